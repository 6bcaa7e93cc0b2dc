"""PolyNorm: packed inputs, the gradients of weight and bias, and what the ops promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import (
    ACCURACY_SLACK,
    assert_same_bits,
    check_gradients,
    check_values,
    each_dtype,
    gradients,
    normal,
    on_devices,
    random_grad_outs,
    reference_gradients,
    terms_of_gradients,
)
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from operators import FUSED_MUL_POLY_NORM, POLY_NORM
from torch._dynamo.testing import CompileCounterWithBackend

OPERATORS = pytest.mark.parametrize("op", [POLY_NORM, FUSED_MUL_POLY_NORM], ids=lambda op: op.name)
ORDERS = pytest.mark.parametrize("mul_first", [False, True], ids=["x_first", "mul_first"])


def pack(x: torch.Tensor, mul: torch.Tensor, mul_first: bool) -> torch.Tensor:
    return torch.cat((mul, x) if mul_first else (x, mul), dim=-1)


def run_packed(fuselage, inputs: dict, mul_first: bool, layout=lambda t: t) -> dict:
    """The output and the gradients, those of `x` and `mul` cut out of the packed one."""
    weight, bias = (inputs[name].clone().requires_grad_() for name in ("weight", "bias"))
    packed = layout(pack(inputs["x"], inputs["mul"], mul_first)).detach().requires_grad_()
    out = fuselage.fused_mul_poly_norm(packed, None, weight, bias, mul_first=mul_first)
    return {"out": out, "packed": packed, "weight": weight, "bias": bias}


# Values


@pytest.mark.kernels_ci
@each_dtype
def test_the_formula(fuselage, device, dtype):
    """Written out once more, independently of the reference: each power in its place."""
    x = torch.tensor([[1.0, -2.0, 3.0]], dtype=dtype, device=device)
    for index, power in enumerate((3, 2, 1)):
        weight = torch.zeros(3, dtype=dtype, device=device)
        weight[index] = 2.0
        bias = torch.full((1,), 0.5, dtype=dtype, device=device)
        u = x.double() ** power
        expected = 2.0 * u / (u.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() + 0.5
        actual = fuselage.poly_norm(x, weight, bias)
        torch.testing.assert_close(actual, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_the_defaults(fuselage, device):
    x, mul, weight, bias = FUSED_MUL_POLY_NORM.inputs((5, 64), torch.bfloat16, device).values()
    assert_same_bits(
        fuselage.poly_norm(x, weight, bias), fuselage.poly_norm(x, weight, bias, 1e-6), "eps"
    )
    assert_same_bits(
        fuselage.fused_mul_poly_norm(x, mul, weight, bias),
        fuselage.fused_mul_poly_norm(x, mul, weight, bias, 1e-6, mul_first=False),
        "eps and mul_first",
    )


@pytest.mark.kernels_ci
@each_dtype
@on_devices((7, 96, 4097), (7, 96, 512, 1000, 4096))
def test_a_factor_of_one_changes_nothing(fuselage, device, dtype, dim):
    # NOTE: on a GPU only up to 1024 vectors: longer rows are cut over two blocks with a factor, and
    # over one without, so that their moments are added up in another order.
    x, weight, bias = POLY_NORM.inputs((19, dim), dtype, device).values()
    product = fuselage.fused_mul_poly_norm(x, torch.ones_like(x), weight, bias)
    assert_same_bits(product, fuselage.poly_norm(x, weight, bias), "out")


@pytest.mark.parametrize("scale", [1e4, 6e4])
def test_large_float16(fuselage, device, scale):
    """The sixth power of any float16 is a float32."""
    inputs = POLY_NORM.inputs((5, 100), torch.float16, device)
    inputs["x"] = (inputs["x"].float() * scale).clamp(-65504, 65504).half()
    check_values(POLY_NORM, fuselage, inputs, {})
    check_gradients(POLY_NORM, fuselage, inputs, {})


@OPERATORS
def test_powers_that_overflow(fuselage, device, op):
    """No worse than PyTorch's formula in float32, where the cube's term is zero as well."""
    inputs = op.inputs((3, 100), torch.float32, device)
    inputs["x"] = inputs["x"] * 1e8
    actual, eager = op.run(fuselage, inputs, {})["out"], op.run_eager(inputs, {})["out"]
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, eager, rtol=1e-5, atol=1e-5)


# Packed


@pytest.mark.kernels_ci
@ORDERS
@each_dtype
@on_devices((1, 7, 8, 96, 4097), (1, 7, 8, 96, 512, 1000, 4096, 4097, 8192, 12288, 65536, 262144))
def test_packed_is_the_same(fuselage, device, mul_first, dtype, dim):
    """Bit for bit: out and all gradients. Both halves of one gradient are written."""
    inputs = FUSED_MUL_POLY_NORM.inputs((13, dim), dtype, device)
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    out = fuselage.fused_mul_poly_norm(**leaves)
    packed = run_packed(fuselage, inputs, mul_first)
    assert packed["out"].is_contiguous()
    assert_same_bits(packed["out"].detach(), out.detach(), "out")
    grad_out = normal(out.shape, dtype, device)
    out.backward(grad_out)
    packed["out"].backward(grad_out)
    expected = pack(leaves["x"].grad, leaves["mul"].grad, mul_first)
    assert_same_bits(packed["packed"].grad, expected, "gradient of the packed tensor")
    for name in ("weight", "bias"):
        assert_same_bits(packed[name].grad, leaves[name].grad, f"grad_{name}")


@ORDERS
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: torch.cat((t, t[..., :3]), dim=-1)[..., : t.shape[-1]],
        lambda t: torch.cat((t, t[..., :8]), dim=-1)[..., : t.shape[-1]],
        lambda t: torch.cat((t[:1, 0, 0], t.flatten()))[1:].view(t.shape),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    ],
    ids=["wider_by_3", "wider_by_8", "misaligned", "transposed", "every_second_column"],
)
@on_devices((7, 96), (7, 96, 4096, 65536))
def test_layouts_of_packed(fuselage, device, mul_first, layout, dim):
    inputs = FUSED_MUL_POLY_NORM.inputs((3, 5, dim), torch.bfloat16, device)
    plain = run_packed(fuselage, inputs, mul_first)
    grad_out = normal(plain["out"].shape, torch.bfloat16, device)
    plain["out"].backward(grad_out)
    strided = run_packed(fuselage, inputs, mul_first, layout)
    strided["out"].backward(grad_out)
    assert_same_bits(strided["out"].detach(), plain["out"].detach(), "out")
    for name in ("packed", "weight", "bias"):
        assert_same_bits(strided[name].grad.contiguous(), plain[name].grad, f"gradient of {name}")


@ORDERS
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)], ids=str)
def test_empty_packed(fuselage, device, mul_first, shape):
    inputs = FUSED_MUL_POLY_NORM.inputs(shape, torch.float32, device)
    packed = run_packed(fuselage, inputs, mul_first)
    assert packed["out"].shape == shape
    packed["out"].sum().backward()
    for name in ("packed", "weight", "bias"):
        assert packed[name].grad.shape == packed[name].shape
        assert not packed[name].grad.any()


@pytest.mark.kernels_ci
def test_packed_of_an_odd_size_is_refused(fuselage, device):
    x, weight, bias = POLY_NORM.inputs((3, 9), torch.float32, device).values()
    with pytest.raises(RuntimeError, match=r"fuselage::fused_mul_poly_norm: `x` .*even.*\[3, 9\]"):
        fuselage.fused_mul_poly_norm(x, None, weight, bias)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_packed_compiles(fuselage, device, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def step(packed, weight, bias):
        return fuselage.fused_mul_poly_norm(packed, None, weight, bias, mul_first=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for batch in (4, 7, 30):
        inputs = FUSED_MUL_POLY_NORM.inputs((batch, 64), torch.bfloat16, device)
        values = [pack(inputs["x"], inputs["mul"], True), inputs["weight"], inputs["bias"]]
        results = []
        for function in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in values]
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out.float().pow(2).sum(), leaves)])
        for eager, traced in zip(*results, strict=True):
            assert_same_bits(traced.detach(), eager.detach(), f"batch {batch}")
        first = first or counter.frame_count
        assert counter.frame_count == first, f"recompiled for batch {batch}"


def test_packed_runs_one_op(fuselage, device):
    """No split, no copy."""
    inputs = FUSED_MUL_POLY_NORM.inputs((6, 64), torch.bfloat16, device)
    packed = pack(inputs["x"], inputs["mul"], False)
    with torch.profiler.profile() as profile:
        fuselage.fused_mul_poly_norm(packed, None, inputs["weight"], inputs["bias"])
    ours = [e.key for e in profile.key_averages() if e.key.endswith("::fused_mul_poly_norm")]
    copies = [e.key for e in profile.key_averages() if "copy" in e.key or "contiguous" in e.key]
    assert len(ours) == 1 and copies == []


# The gradients of weight and bias


@OPERATORS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@on_devices((100, 4096), (100, 4096, 16384))
def test_accuracy_of_weight_gradients(fuselage, device, op, dtype, dim):
    """Of a single sum it is luck whether PyTorch's is closer; of many it is not."""
    inputs = op.inputs(((1 << 16) // dim, dim), dtype, device)
    inputs["weight"], inputs["bias"] = inputs["weight"].float(), inputs["bias"].float()
    names = ("weight", "bias")
    errors = {(name, who): [] for name in names for who in ("ours", "eager")}
    for _ in range(24):
        grad_outs = random_grad_outs(op.run(fuselage, inputs, {}))
        expected = reference_gradients(op, inputs, {}, grad_outs)
        terms = terms_of_gradients(op, inputs, {}, grad_outs)
        ours = gradients(lambda i, o: op.run(fuselage, i, o), inputs, {}, grad_outs, names)
        eager = gradients(op.run_eager, inputs, {}, grad_outs, names)
        for name in names:
            # The size that a sum of terms of random signs has.
            scale = terms[name] / inputs["x"].numel() ** 0.5
            for who, grads in (("ours", ours), ("eager", eager)):
                errors[name, who].append((grads[name].double() - expected[name]) / scale)
    for name in names:
        ours, eager = (
            torch.cat(errors[name, who]).pow(2).mean().sqrt().item() for who in ("ours", "eager")
        )
        assert ours <= eager + ACCURACY_SLACK, f"grad_{name}: {ours:.3g}, PyTorch {eager:.3g}"


@pytest.mark.parametrize("needs", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_backward_makes_only_what_is_needed(fuselage, device, needs, packed):
    x, mul, weight, bias = FUSED_MUL_POLY_NORM.inputs((6, 64), torch.bfloat16, device).values()
    rstd = torch.rand(6, 3, device=device)
    grad_out = torch.ones_like(x)
    first, second = (pack(x, mul, False), None) if packed else (x, mul)
    arguments = (grad_out, first, second, packed, False, weight, bias, rstd)
    every = fuselage.norm.ops.poly_norm_bwd(*arguments, True, True, True, True)
    some = fuselage.norm.ops.poly_norm_bwd(*arguments, *map(bool, needs))
    for index, (alone, together) in enumerate(zip(some, every, strict=True)):
        if needs[index]:
            assert_same_bits(alone, together, "gradient")
        else:
            assert alone.numel() == 0


# The ops behind it


@on_devices((100, 4097), (64, 100, 512, 4097, 12288, 65536, 262144))
def test_saved_statistics(fuselage, device, dim):
    x, weight, bias = POLY_NORM.inputs((7, 3, dim), torch.bfloat16, device).values()
    out, rstd = fuselage.norm.ops.poly_norm_fwd(x, weight, bias, 1e-6)
    assert rstd.dtype == torch.float32 and rstd.shape == (21, 3)
    powers = torch.stack([x.double().pow(n).mean(-1).flatten() for n in (6, 4, 2)], dim=-1)
    torch.testing.assert_close(rstd.double(), torch.rsqrt(powers + 1e-6), rtol=2e-6, atol=0)
    assert_same_bits(out, fuselage.poly_norm(x, weight, bias), "with and without statistics")


@pytest.mark.kernels_ci
def test_backward_checks_its_arguments(fuselage, device):
    x, mul, weight, bias = FUSED_MUL_POLY_NORM.inputs((6, 64), torch.bfloat16, device).values()
    rstd = torch.ones(6, 3, device=device)
    good = [x, x, mul, False, False, weight, bias, rstd, True, True, True, True]
    fuselage.norm.ops.poly_norm_bwd(*good)
    for index, name, wrong in (
        (0, "grad_out", x[:5]),
        (0, "grad_out", x[:, :32]),
        (0, "grad_out", x.float()),
        (1, "x", x.double()),
        (2, "mul", mul[:5]),
        (2, "mul", mul.float()),
        (3, "mul", True),
        (5, "weight", weight[:2]),
        (5, "weight", weight.half()),
        (6, "bias", bias.repeat(2)),
        (6, "bias", bias.half()),
        (7, "rstd", rstd[:5]),
        (7, "rstd", rstd.half()),
        (7, "rstd", rstd.repeat(2, 1)[::2]),
    ):
        bad = [*good[:index], wrong, *good[index + 1 :]]
        with pytest.raises(RuntimeError, match=rf"fuselage::poly_norm_bwd: `{name}`"):
            fuselage.norm.ops.poly_norm_bwd(*bad)


# Modules


def module_arguments(name: str, shape, dtype, device) -> list[torch.Tensor]:
    return [normal(shape, dtype, device) for _ in range(1 if name == "PolyNorm" else 2)]


MODULES = pytest.mark.parametrize("name", ["PolyNorm", "FusedMulPolyNorm"])


@pytest.mark.kernels_ci
@MODULES
def test_module_parameters(fuselage, device, name):
    module = getattr(fuselage.modules, name)(1e-5, device=device, dtype=torch.bfloat16)
    assert list(module.state_dict()) == ["weight", "bias"]
    assert module.eps == 1e-5 and getattr(fuselage.modules, name)().eps == 1e-6
    for parameter in module.parameters():
        assert parameter.dtype == torch.bfloat16 and parameter.device.type == device
    thirds = torch.full((3,), 1 / 3, dtype=torch.bfloat16, device=device)
    assert torch.equal(module.weight, thirds)
    assert torch.equal(module.bias, torch.zeros_like(module.bias))
    torch.nn.init.normal_(module.weight)
    module.reset_parameters()
    assert torch.equal(module.weight, thirds)
    assert repr(module) == f"{name}(eps=1e-05)"


@MODULES
def test_modules_call_the_function(fuselage, device, name):
    module = getattr(fuselage.modules, name)(0.1, device=device)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    function = {
        "PolyNorm": fuselage.poly_norm,
        "FusedMulPolyNorm": fuselage.fused_mul_poly_norm,
    }[name]
    inputs = module_arguments(name, (4, 5, 64), torch.bfloat16, device)
    expected = function(*inputs, module.weight, module.bias, 0.1)
    assert_same_bits(module(*inputs).detach(), expected.detach(), "out")


@ORDERS
def test_module_of_packed_inputs(fuselage, device, mul_first):
    module = fuselage.modules.FusedMulPolyNorm(mul_first=mul_first, device=device)
    x, mul = module_arguments("FusedMulPolyNorm", (4, 64), torch.float32, device)
    expected = fuselage.fused_mul_poly_norm(x, mul, module.weight, module.bias)
    assert_same_bits(module(pack(x, mul, mul_first)).detach(), expected.detach(), "out")
    assert ("mul_first=True" in repr(module)) == mul_first


@MODULES
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_modules_compile(fuselage, device, name, backend):
    torch._dynamo.reset()
    module = getattr(fuselage.modules, name)(device=device)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for batch in (4, 9, 33):
        inputs = module_arguments(name, (batch, 64), torch.bfloat16, device)
        results = []
        for function in (module, compiled):
            module.zero_grad()
            leaves = [t.clone().requires_grad_() for t in inputs]
            out = function(*leaves)
            out.float().pow(2).sum().backward()
            grads = [module.weight.grad.clone(), module.bias.grad.clone()]
            results.append([out, *(t.grad for t in leaves), *grads])
        for eager, traced in zip(*results, strict=True):
            assert_same_bits(traced.detach(), eager.detach(), f"batch {batch}")
        first = first or counter.frame_count
        assert counter.frame_count == first, f"recompiled for batch {batch}"


def test_a_module_trains(fuselage, device):
    """As the formula does: the same losses, step by step."""

    class Formula(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3,), 1 / 3))
            self.bias = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return POLY_NORM.eager(x, self.weight, self.bias)

    x, y = normal((64, 32), torch.float32, device), normal((64, 1), torch.float32, device)
    losses = []
    for make in (Formula, fuselage.modules.PolyNorm):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 32), make(), torch.nn.Linear(32, 1)]
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][-1] < losses[1][0]


# The Hub layer


@use_kernel_forward_from_hub("PolyNorm")
class MotifActivation(torch.nn.Module):
    """With the attributes of the layer in the Motif models."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3) / 3)
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.eps = eps

    def forward(self, x):
        return POLY_NORM.eager(x, self.weight, self.bias, self.eps)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "mode",
    [
        Mode.INFERENCE,
        Mode.TRAINING,
        Mode.INFERENCE | Mode.TORCH_COMPILE,
        Mode.TRAINING | Mode.TORCH_COMPILE,
    ],
    ids=str,
)
def test_the_layer(fuselage, device, mode):
    layer = MotifActivation(eps=0.1).to(device)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    layer.train(Mode.TRAINING in mode)
    repository = LocalLayerRepository(Path(fuselage.__file__).parent, layer_name="PolyNorm")
    with use_kernel_mapping({"PolyNorm": {device: repository}}, inherit_mapping=False):
        kernelize(layer, mode=mode, device=device, use_fallback=False)
    assert layer.forward.__func__ is fuselage.layers.PolyNorm.forward
    torch._dynamo.reset()
    call = torch.compile(layer, fullgraph=True) if Mode.TORCH_COMPILE in mode else layer
    x = normal((4, 5, 64), torch.bfloat16, device).requires_grad_()
    out = call(x)
    expected = fuselage.poly_norm(x, layer.weight, layer.bias, 0.1)
    assert_same_bits(out.detach(), expected.detach(), "out")
    if Mode.TRAINING in mode:
        wanted = (x, layer.weight, layer.bias)
        ours, theirs = (torch.autograd.grad(o.float().sum(), wanted) for o in (out, expected))
        for actual, grad in zip(ours, theirs, strict=True):
            assert_same_bits(actual, grad, "gradient")
