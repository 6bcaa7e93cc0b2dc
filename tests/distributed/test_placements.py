"""Every operator, sharded in every way it takes, gives what it gives on one process.

Rows do not depend on each other: results, and gradients of rows, have the bits of the unsharded
call. Gradients of what all rows share come back as partial sums of the ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from harness import (
    FLOAT32_ROUNDINGS,
    UNIT,
    Operator,
    assert_same_bits,
    each_dtype,
    each_operator,
    random_grad_outs,
    reference_gradients,
    terms_of_gradients,
)
from operators import OPERATORS
from ranks import Rank, collectives, distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

pytestmark = pytest.mark.slow

BY_NAME = {op.name: op for op in OPERATORS}
SHARDED_COLUMNS = ("silu", "swiglu", "geglu", "bias_act", "add_mul_act")
SHAPE = (3, 5, 8)  # 4 ranks: one of them has no row of the three, and the five are cut unevenly


def all_placements(op: Operator, mesh) -> list[tuple]:
    dims = range(len(SHAPE) - (op.name not in SHARDED_COLUMNS))
    return list(itertools.product([Replicate(), *map(Shard, dims)], repeat=mesh.ndim))


def leaves_of(op: Operator, inputs: dict, mesh, placements) -> dict:
    """DTensors that require a gradient: rows sharded, all else whole."""
    whole = [Replicate()] * mesh.ndim
    leaves = {}
    for name, t in inputs.items():
        if isinstance(t, torch.Tensor):
            t = distributed(t, mesh, *(placements if name in op.row_inputs else whole))
            t.requires_grad_(t.is_floating_point())
        leaves[name] = t
    return leaves


def check_sum(name: str, actual: DTensor, expected: torch.Tensor, terms: torch.Tensor) -> None:
    """Each rank rounds its sum, and the sum of these is rounded on the way."""
    layout = {"shape": actual.shape, "stride": actual.stride(), "run_check": False}
    parts = actual.to_local().abs()
    parts = DTensor.from_local(parts, actual.device_mesh, actual.placements, **layout)
    parts = parts.full_tensor().double()
    noise = FLOAT32_ROUNDINGS * UNIT[torch.float32] * torch.maximum(terms, parts)
    bound = 2 * actual.device_mesh.size() * UNIT[actual.dtype] * parts + noise
    error = (actual.full_tensor().double() - expected).abs()
    assert (error <= bound).all(), f"grad_{name}: {error.max():.3g}, {bound[error > bound]}"


def check(rank: Rank, name: str, style: str, dtype: torch.dtype, sizes: tuple) -> None:
    op = BY_NAME[name]
    mesh = rank.mesh(*sizes)
    inputs, options = op.inputs(SHAPE, dtype, rank.device, style), op.options(style)
    leaves = {
        n: t.clone().requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t
        for n, t in inputs.items()
    }
    expected = op.run(rank.fuselage, leaves, options)
    grad_outs = random_grad_outs(expected)
    torch.autograd.backward(list(expected.values()), list(grad_outs.values()))
    sums = reference_gradients(op, inputs, options, grad_outs)
    terms = terms_of_gradients(op, inputs, options, grad_outs)
    for placements in all_placements(op, mesh):
        sharded = leaves_of(op, inputs, mesh, placements)
        grads = {n: distributed(t, mesh, *placements) for n, t in grad_outs.items()}
        wanted = [n for n, t in sharded.items() if isinstance(t, DTensor) and t.requires_grad]
        # NOTE: not backward(), which copies a gradient of two inputs: by a gather in Torch 2.10.
        with CommDebugMode() as collectives:
            outputs = op.run(rank.fuselage, sharded, options)
            found = torch.autograd.grad(
                list(outputs.values()),
                [sharded[name] for name in wanted],
                [grads[name] for name in outputs],
            )
        assert not collectives.get_total_counts(), (placements, collectives.get_comm_counts())
        for name, out in outputs.items():
            assert out.placements == placements, (name, out.placements)
            assert_same_bits(out.full_tensor(), expected[name], f"{name} of {placements}")
        for name, gradient in zip(wanted, found, strict=True):
            if Partial() in gradient.placements:
                check_sum(name, gradient, sums[name], terms.get(name, sums[name].abs()))
            elif not gradient.full_tensor().equal(leaves[name].grad):  # zeros of either sign
                assert_same_bits(gradient.full_tensor(), leaves[name].grad, f"grad_{name}")
        with torch.no_grad():
            for name, out in op.run(rank.fuselage, sharded, options).items():
                assert_same_bits(out.to_local(), outputs[name].to_local(), f"{name}, no gradient")


def check_parts(rank: Rank, name: str, dtype: torch.dtype) -> None:
    """Rows that are parts of sums, alone and beside others, are summed up where those are."""
    op, mesh = BY_NAME[name], rank.mesh()
    style = next(iter(op.styles))
    inputs, options = op.inputs(SHAPE, dtype, rank.device, style), op.options(style)
    for row in op.row_inputs:
        inputs[row] = (inputs[row] * 8).round()  # so that the sums of the parts are exact
    leaves = {
        n: t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t
        for n, t in inputs.items()
    }
    expected = op.run(rank.fuselage, leaves, options)
    grad_outs = random_grad_outs(expected)
    torch.autograd.backward(list(expected.values()), list(grad_outs.values()))
    sums = reference_gradients(op, inputs, options, grad_outs)
    terms = terms_of_gradients(op, inputs, options, grad_outs)
    first, *others = op.row_inputs
    for beside in (Partial(), Replicate(), Shard(0), Shard(1))[: 4 if others else 1]:
        sharded = leaves_of(op, inputs, mesh, (beside,))
        sharded[first] = distributed(inputs[first], mesh, Partial()).requires_grad_()
        with CommDebugMode() as mode:
            outputs = op.run(rank.fuselage, sharded, options)
        target = beside if isinstance(beside, Shard) else Replicate()
        parts = len(op.row_inputs) if beside == Partial() else 1
        collective = "reduce_scatter_tensor" if isinstance(beside, Shard) else "all_reduce"
        assert collectives(mode) == {collective: parts}
        for key, out in outputs.items():
            assert out.placements == (target,)
            assert_same_bits(out.full_tensor(), expected[key], f"{key} beside {beside}")
        grads = [distributed(t, mesh, target) for t in grad_outs.values()]
        wanted = [n for n, t in sharded.items() if isinstance(t, DTensor)]
        with CommDebugMode() as backward:
            found = torch.autograd.grad(list(outputs.values()), [sharded[n] for n in wanted], grads)
        assert Counter(collectives(backward)) <= Counter(collectives(mode))  # of what it needs
        for key, gradient in zip(wanted, found, strict=True):
            assert key not in op.row_inputs or gradient.placements == (target,)
            if Partial() in gradient.placements:
                check_sum(key, gradient, sums[key], terms.get(key, sums[key].abs()))
            elif not gradient.full_tensor().equal(leaves[key].grad):  # zeros of either sign
                assert_same_bits(gradient.full_tensor(), leaves[key].grad, f"grad_{key}")


@each_operator(OPERATORS)
def test_parts_of_sums(ranks, op):
    for dtype in (torch.float32, torch.bfloat16):
        ranks.run(check_parts, op.name, dtype)


@each_operator(OPERATORS)
@each_dtype
def test_is_what_one_process_gives(ranks, op, dtype):
    for style in op.styles:
        ranks.run(check, op.name, style, dtype, ())
    if ranks.count == 4:
        ranks.run(check, op.name, next(iter(op.styles)), dtype, (2, 2))
