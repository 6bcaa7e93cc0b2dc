"""Parallel styles and plans give what one process gives.

Rows that are only placed elsewhere have the same bits. Where ranks add what one process adds in
another order, the judge is the model in float64: what many ranks compute may be as far from that as
what one process computes in the same dtype.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import assert_same_bits
from ranks import Rank
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

# The largest of a few dozen rounding errors, over that of a few dozen others. It reaches 2.
RATIO = 4


def assert_as_good(actual, single, exact, what: str) -> None:
    """That `actual` is as close to `exact` as `single` is, or to the last bit of its dtype."""
    assert actual.dtype == single.dtype and actual.shape == exact.shape, what
    noise = torch.finfo(single.dtype).eps * exact.abs().max()
    bound = RATIO * torch.maximum((single.double() - exact).abs().max(), noise)
    error = (actual.double() - exact).abs().max()
    assert error <= bound, f"{what}: {error:.3g} is more than {bound:.3g}"


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def distributed(t: torch.Tensor, mesh, placement) -> DTensor:
    """Of what every rank has; of partial sums each has as much."""
    if isinstance(placement, Partial):
        return DTensor.from_local(t / mesh.size(), mesh, [placement])
    return distribute_tensor(t, mesh, [placement], src_data_rank=None)


# Styles of modules

DIM = 24
NORMS = {
    "RMSNorm": lambda x, p: torch.nn.functional.rms_norm(x, (DIM,), p["weight"], 1e-6),
    "LayerNorm": lambda x, p: torch.nn.functional.layer_norm(
        x, (DIM,), p["weight"], p["bias"], 1e-5
    ),
}


def norm_of(rank: Rank, kind: str) -> torch.nn.Module:
    module = getattr(rank.fuselage.modules, kind)(DIM, device=rank.device)
    for index, parameter in enumerate(module.parameters()):
        torch.nn.init.normal_(parameter, 1 - index, 0.3)
    return module


def run_norm(module, inputs: list, grads: list) -> tuple[list, list]:
    """Outputs and the gradients of inputs and parameters."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = module(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    torch.autograd.backward(outputs, grads)
    return outputs, [t.grad for t in (*leaves, *getattr(module, "parameters", list)())]


def check_norm(rank: Rank, kind: str, tokens: int, placements: tuple) -> None:
    """A norm in its style, of DTensors of these placements; of plain shards where it is None."""
    mesh, fused = rank.mesh(), kind.startswith("FusedAdd")
    single, module = norm_of(rank, kind), norm_of(rank, kind)
    if rank.index == 0 or not fused:  # PyTorch's style takes those of each rank
        module.load_state_dict(single.state_dict())
    xs = [torch.randn(3, tokens, DIM, device=rank.device) for _ in range(1 + fused)]
    grads = [torch.randn_like(t) for t in xs]
    expected, expected_grads = run_norm(single, xs, grads)
    exact = [t.detach().double().requires_grad_() for t in (*xs, *single.parameters())]
    total = sum(exact[: len(xs)])
    parameters = dict(zip(dict(single.named_parameters()), exact[len(xs) :]))
    out = NORMS[kind.removeprefix("FusedAdd")](total, parameters)
    torch.autograd.backward([out, total][: len(xs)], [g.double() for g in grads])

    local = placements == (None, None) and tokens % rank.count != 0
    style = rank.fuselage.distributed.ResidualSequenceParallel if fused else SequenceParallel
    module = parallelize_module(module, mesh, style(use_local_output=local))
    sharded = [distributed(t, mesh, Shard(1)) for t in (*xs, *grads)]
    inputs = [
        shard.to_local() if placement is None else distributed(t, mesh, placement)
        for t, shard, placement in zip(xs, sharded, placements)
    ]
    grads = [t.to_local() if local else t for t in sharded[len(xs) :]]
    outputs, actual_grads = run_norm(module, inputs, grads)
    for name, output, value in zip(("out", "new_residual"), outputs, expected):
        if local:
            assert not isinstance(output, DTensor)
            output = DTensor.from_local(
                output, mesh, [Shard(1)], shape=value.shape, stride=value.stride()
            )
        assert output.placements == (Shard(1),)
        assert_same_bits(output.full_tensor(), value, name)
    for index, (grad, value) in enumerate(zip(actual_grads, expected_grads)):
        if index >= len(xs):
            name = list(parameters)[index - len(xs)]
            assert_as_good(grad.full_tensor(), value, exact[index].grad, f"grad_{name}")
        elif isinstance(grad, DTensor):
            assert_same_bits(grad.full_tensor(), value, f"grad of input {index}")
        else:
            value = distributed(value, mesh, Shard(1)).to_local()
            assert_same_bits(grad, value, f"grad of input {index}")


PLACEMENTS = (None, Shard(1), Shard(2), Replicate(), Partial())


@pytest.mark.parametrize("kind", ["FusedAddRMSNorm", "FusedAddLayerNorm"])
def test_norms_with_a_residual(ranks, kind):
    for placement in PLACEMENTS:
        for tokens in (2 * ranks.count, 2 * ranks.count + 1):
            ranks.run(check_norm, kind, tokens, (placement, placement))
            ranks.run(check_norm, kind, tokens, (placement, Shard(1)))
        ranks.run(check_norm, kind, 4, (Replicate(), placement))


@pytest.mark.parametrize("kind", NORMS)
def test_norms_in_the_style_of_pytorch(ranks, kind):
    for placement in PLACEMENTS[:-1]:
        ranks.run(check_norm, kind, 2 * ranks.count, (placement,))
    ranks.run(check_norm, kind, 2 * ranks.count + 1, (Shard(1),))


def check_names(rank: Rank) -> None:
    """Inputs by position and by name, of another dimension; a frozen weight stays frozen."""
    module = norm_of(rank, "FusedAddRMSNorm").requires_grad_(False)
    style = rank.fuselage.distributed.ResidualSequenceParallel(sequence_dim=0)
    module = parallelize_module(module, rank.mesh(), style)
    assert not module.weight.requires_grad
    x, residual = (distributed(torch.randn(5, DIM), rank.mesh(), Replicate()) for _ in range(2))
    expected = module(x, residual)
    assert expected[0].placements == (Shard(0),)
    for actual in (module(x, residual=residual), module(residual=residual, x=x)):
        assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(actual, expected))


def test_inputs_by_position_and_by_name(ranks):
    ranks.run(check_names)


def check_wrong_inputs(rank: Rank) -> None:
    style = rank.fuselage.distributed.ResidualSequenceParallel
    mesh = rank.mesh()
    module = parallelize_module(norm_of(rank, "FusedAddRMSNorm"), mesh, style())
    x = torch.randn(2, 3, DIM)
    other = distributed(x, rank.mesh(1, rank.count, names=("a", "b"))["a"], Shard(1))
    for args, kind, text in (
        ((x,), TypeError, "got Tensor"),
        ((x, None), TypeError, "got Tensor, NoneType"),
        ((x, x, x), TypeError, "got Tensor, Tensor, Tensor"),
        ((x[0, 0], x[0, 0]), RuntimeError, r"dimension 1, the sequence; got one of shape \(24,\)"),
        ((x, other), RuntimeError, "got an input on"),
    ):
        with pytest.raises(kind, match=rf"FusedAddRMSNorm\(24, .*{text}"):
            module(*args)
    module = parallelize_module(torch.nn.Bilinear(2, 2, 2, bias=False), mesh, style())
    module.forward = lambda x, residual: x
    with pytest.raises(RuntimeError, match="Bilinear.* must return two DTensors.* DTensor$"):
        module(x, x)


def test_wrong_inputs_name_the_module(ranks):
    ranks.run(check_wrong_inputs)
