"""modules.RMSNorm and modules.FusedAddRMSNorm beside torch.nn.RMSNorm."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from harness import assert_same_bits, each_dtype, normal
from torch._dynamo.testing import CompileCounterWithBackend

NAMES = pytest.mark.parametrize("name", ["RMSNorm", "FusedAddRMSNorm"])


def arguments(name: str, shape, dtype, device) -> list[torch.Tensor]:
    return [normal(shape, dtype, device) for _ in range(1 if name == "RMSNorm" else 2)]


def results(module, inputs) -> tuple[torch.Tensor, ...]:
    output = module(*inputs)
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.kernels_ci
@each_dtype
def test_like_torch(fuselage, device, dtype):
    theirs = torch.nn.RMSNorm(96, eps=1e-5, device=device, dtype=dtype)
    torch.nn.init.normal_(theirs.weight)
    ours = fuselage.modules.RMSNorm(96, eps=1e-5, device=device, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    grads = []
    x, grad_out = normal((4, 5, 96), dtype, device), normal((4, 5, 96), dtype, device)
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(grad_out)
        grads.append((out.detach(), leaf.grad, module.weight.grad))
    for actual, expected in zip(*grads, strict=True):
        scale = expected.abs().max()
        torch.testing.assert_close(actual / scale, expected / scale, **tolerance)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.kernels_ci
@NAMES
def test_parameters(fuselage, device, name):
    cls = getattr(fuselage.modules, name)
    module = cls(64, device=device, dtype=torch.bfloat16)
    assert list(module.state_dict()) == ["weight"]
    assert module.weight.dtype == torch.bfloat16 and module.weight.device.type == device
    assert module.eps == 1e-6
    assert torch.equal(module.weight, torch.ones_like(module.weight))
    centred = cls(64, weight_offset=1.0, device=device)
    assert torch.equal(centred.weight, torch.zeros_like(centred.weight))
    inputs = arguments(name, (3, 64), torch.float32, device)
    plain = cls(64, elementwise_affine=False)
    assert plain.weight is None and list(plain.parameters()) == []
    ones = cls(64, device=device)
    for first, second, third in zip(
        *(results(m, inputs) for m in (plain, ones, centred)), strict=True
    ):
        assert_same_bits(first, second.detach(), "no weight, and a weight of one")
        assert_same_bits(first, third.detach(), "no weight, and a weight of zero plus one")
    torch.nn.init.normal_(ones.weight)
    ones.reset_parameters()
    assert torch.equal(ones.weight, torch.ones_like(ones.weight))


@NAMES
def test_options_reach_the_function(fuselage, device, name):
    function = {
        "RMSNorm": fuselage.rms_norm,
        "FusedAddRMSNorm": fuselage.fused_add_rms_norm,
    }[name]
    inputs = arguments(name, (5, 64), torch.bfloat16, device)
    for options in (
        {"eps": 0.1},
        {"weight_offset": 1.0},
        {"cast_before_weight": True},
        {"out_dtype": torch.float32},
    ):
        module = getattr(fuselage.modules, name)(64, device=device, **options)
        torch.nn.init.normal_(module.weight)
        expected = function(*inputs, module.weight, **options)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for actual, wanted in zip(results(module, inputs), expected, strict=True):
            assert_same_bits(actual.detach(), wanted.detach(), str(options))


@NAMES
def test_repr(fuselage, name):
    cls = getattr(fuselage.modules, name)
    assert repr(cls(8)) == f"{name}(8, eps=1e-06, elementwise_affine=True)"
    text = repr(cls(8, 1e-5, False, weight_offset=1.0, cast_before_weight=True))
    assert text.startswith(f"{name}(8, eps=1e-05, elementwise_affine=False")
    assert "weight_offset=1.0" in text and "cast_before_weight=True" in text
    assert "out_dtype=torch.float32" in repr(cls(8, out_dtype=torch.float32))


@NAMES
def test_copies(fuselage, device, name):
    module = getattr(fuselage.modules, name)(64, 1e-3, cast_before_weight=True, device=device)
    torch.nn.init.normal_(module.weight)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    loaded = getattr(fuselage.modules, name)(64, 1e-3, cast_before_weight=True, device=device)
    loaded.load_state_dict(torch.load(saved))
    pickled = io.BytesIO()
    torch.save(module, pickled)
    pickled.seek(0)
    inputs = arguments(name, (5, 64), torch.float32, device)
    for other in (copy.deepcopy(module), loaded, torch.load(pickled, weights_only=False)):
        assert other.weight is not module.weight
        for actual, expected in zip(results(other, inputs), results(module, inputs), strict=True):
            assert_same_bits(actual.detach(), expected.detach(), "copy")


@NAMES
def test_moves(fuselage, device, name):
    module = getattr(fuselage.modules, name)(64, device="meta").to_empty(device=device)
    module.reset_parameters()
    module = module.to(torch.bfloat16)
    for output in results(module, arguments(name, (5, 64), torch.bfloat16, device)):
        assert output.dtype == torch.bfloat16 and output.isfinite().all()


@NAMES
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(fuselage, device, name, backend):
    torch._dynamo.reset()
    module = getattr(fuselage.modules, name)(64, device=device, dtype=torch.bfloat16)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for batch in (4, 9, 33):
        inputs = arguments(name, (batch, 64), torch.bfloat16, device)
        grads = []
        for function in (module, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            module.zero_grad()
            outputs = results(function, leaves)
            sum(output.float().pow(2).sum() for output in outputs).backward()
            grads.append([*outputs, *(t.grad for t in leaves), module.weight.grad.clone()])
        for eager, traced in zip(*grads, strict=True):
            assert_same_bits(traced.detach(), eager.detach(), f"batch {batch}")
        first = first or counter.frame_count
        assert counter.frame_count == first, f"recompiled for batch {batch}"


def test_trains(fuselage, device):
    """A step of an optimiser through both modules goes the way PyTorch's does."""

    def build(cls):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 32), cls(32, eps=1e-6), torch.nn.Linear(32, 1)]
        return torch.nn.Sequential(*layers).to(device)

    losses = []
    x, y = normal((64, 32), torch.float32, device), normal((64, 1), torch.float32, device)
    for cls in (torch.nn.RMSNorm, fuselage.modules.RMSNorm):
        model = build(cls)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
