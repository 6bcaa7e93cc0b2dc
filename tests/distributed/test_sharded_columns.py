"""Norms whose columns are sharded: what one process gives, by one collective each way.

The sums of a row are those of its parts, added up in the order of the ranks: results differ from
the unsharded ones by float32 rounding alone, and every rank has the same statistics, bit for bit.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import (
    UNIT,
    assert_same_bits,
    normal,
    random_grad_outs,
    reference_gradients,
    terms_of_gradients,
)
from operators import OPERATORS
from ranks import Rank, distributed
from test_placements import check_sum
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

BY_NAME = {op.name: op for op in OPERATORS}
SHARDED = (
    *("rms_norm", "fused_add_rms_norm", "layer_norm", "fused_add_layer_norm"),
    *("poly_norm", "fused_mul_poly_norm"),
)
# Minutes of Gloo on two cores: `make test-all` and CI run them. The kernels' own tests are quick
# (tests/norm/test_shard_norm.py).
pytestmark = pytest.mark.slow

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
COLUMNS = Shard(2)
# Columns of 4 ranks: even; uneven; and 2, 2, 1 and none.
SHAPES = ((3, 5, 64), (3, 5, 37), (3, 5, 5))
# Rounding of a float32 sum of so few columns, of rstd and of the products with it: in units of
# float32 of the terms. The sharded and the unsharded result both have it, on either side.
ROUNDINGS = 32


def sharded_leaves(op, inputs: dict, mesh, placements, of_vectors) -> dict:
    """DTensors that require a gradient: rows as `placements`, vectors of columns `of_vectors`."""
    leaves = {}
    for name, t in inputs.items():
        if isinstance(t, torch.Tensor):
            to = placements if name in op.row_inputs else [Replicate()] * mesh.ndim
            if name not in op.row_inputs and t.shape[0] == inputs["x"].shape[-1]:
                to = of_vectors
            t = distributed(t, mesh, *to).requires_grad_()
        leaves[name] = t
    return leaves


def check_close(what: str, actual, expected, terms: torch.Tensor | None = None, halves: int = 2):
    """Within so many roundings of its own dtype, of half an ulp, and float32 ones of `terms`.

    Two of a result that is rounded once on either side; four where it is rounded on the way, too.
    """
    expected = expected.double()
    terms = expected.abs() if terms is None else terms
    scale = terms.abs().max() if terms.numel() else 0.0
    bound = halves * UNIT[actual.dtype] * expected.abs() + ROUNDINGS * UNIT[torch.float32] * scale
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"{what}: {error.max():.3g} of {bound[error > bound]}"


def with_statistics(op, kernel, inputs: dict, options: dict) -> tuple[dict, torch.Tensor]:
    """The outputs, and what of a row is kept for the backward: a plain tensor."""
    kept = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outputs = op.run(kernel, inputs, options)
    (statistics,) = (t for t in kept if not isinstance(t, DTensor))
    return outputs, statistics


def assert_alike(rank: Rank, statistics: torch.Tensor, columns: int) -> None:
    """All ranks that have columns have the same bits."""
    parts = [torch.empty_like(statistics) for _ in range(rank.count)]
    torch.distributed.all_gather(parts, statistics)
    for part in parts[: -(-columns // -(-columns // rank.count))]:
        assert part.shape[0] == 15 and part.all()
        assert_same_bits(part, parts[0], "statistics")


def count(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items() if n}


def expected_placements(name: str, op, placements) -> tuple:
    """Of a gradient."""
    if name in op.row_inputs:
        return placements
    of_columns = Partial() if "poly" in op.name else Shard(0)
    others = {COLUMNS: of_columns, Replicate(): Replicate()}
    return tuple(others.get(placement, Partial()) for placement in placements)


def placements_of(sizes: tuple) -> list[tuple]:
    """Of rows, on a mesh whose last or first dimension shards the columns."""
    if not sizes:
        return [(COLUMNS,)]
    others = (Replicate(), Shard(0), Shard(1))
    return [pair for other in others for pair in ((other, COLUMNS), (COLUMNS, other))]


def check(rank: Rank, name: str, style: str, dtype, shape, sizes: tuple) -> None:
    op, mesh = BY_NAME[name], rank.mesh(*sizes)
    inputs, options = op.inputs(shape, dtype, rank.device, style), op.options(style)
    leaves = {
        n: t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t
        for n, t in inputs.items()
    }
    whole = op.run(rank.fuselage, leaves, options)
    grad_outs = random_grad_outs(whole)
    exact = reference_gradients(op, inputs, options, grad_outs)
    terms = terms_of_gradients(op, inputs, options, grad_outs)
    vectors = itertools.cycle((Shard(0), Replicate()))
    for placements, of_columns in zip(placements_of(sizes), vectors, strict=False):
        of_vectors = [of_columns if p == COLUMNS else Replicate() for p in placements]
        sharded = sharded_leaves(op, inputs, mesh, placements, of_vectors)
        grads = {n: distributed(t, mesh, *placements) for n, t in grad_outs.items()}
        wanted = [n for n, t in sharded.items() if isinstance(t, DTensor)]
        with CommDebugMode() as forward:
            outputs, statistics = with_statistics(op, rank.fuselage, sharded, options)
        if not sizes:
            assert_alike(rank, statistics, shape[-1])
        with CommDebugMode() as backward:
            found = torch.autograd.grad(
                list(outputs.values()), [sharded[n] for n in wanted], [grads[n] for n in outputs]
            )
        assert count(forward) == count(backward) == {"all_gather_into_tensor": 1}
        for key, out in outputs.items():
            assert out.placements == placements and out.shape == whole[key].shape
            halves = 4 if options.get("cast_before_weight") else 2
            check_close(key, out.full_tensor(), whole[key].detach(), halves=halves)
        for key, gradient in zip(wanted, found, strict=True):
            assert gradient.placements == expected_placements(key, op, placements), key
            size = terms.get(key, exact[key].abs())
            if Partial() in gradient.placements:
                check_sum(key, gradient, exact[key], size)
            else:
                check_close(f"grad_{key}", gradient.full_tensor(), exact[key], size)
        with torch.no_grad():
            for key, out in op.run(rank.fuselage, sharded, options).items():
                assert_same_bits(out.to_local(), outputs[key].to_local(), "no gradient")


@pytest.mark.parametrize("name", SHARDED)
def test_is_what_one_process_gives(ranks, name):
    first, *others = BY_NAME[name].styles
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            ranks.run(check, name, first, dtype, shape, ())
        if ranks.count == 4:
            ranks.run(check, name, first, torch.bfloat16, shape, (2, 2))
    for style in others:
        ranks.run(check, name, style, torch.bfloat16, SHAPES[1], ())


def rows_alike(rank: Rank, name: str) -> None:
    """Columns that are whole on a rank have the same bits wherever they are: so has a row."""
    op, mesh = BY_NAME[name], rank.mesh()
    inputs = op.inputs((1, 1, 24), torch.float32, rank.device)
    of_one = op.run(rank.fuselage, sharded_leaves(op, inputs, mesh, (COLUMNS,), [Shard(0)]), {})
    many = {n: t.expand(3, 5, 24) if n in op.row_inputs else t for n, t in inputs.items()}
    of_many = op.run(rank.fuselage, sharded_leaves(op, many, mesh, (COLUMNS,), [Shard(0)]), {})
    for key, out in of_one.items():
        local = out.to_local()
        assert_same_bits(of_many[key].to_local(), local.expand(3, 5, -1), key)


@pytest.mark.parametrize("name", SHARDED)
def test_a_row_does_not_depend_on_its_batch(ranks, name):
    ranks.run(rows_alike, name)


def one_of_the_results(rank: Rank) -> None:
    """Gradients of a weight alone, or of x alone, need no more than what is theirs."""
    kernel, mesh = rank.fuselage, rank.mesh()
    x = normal((3, 5, 37), torch.float32, rank.device)
    weight, bias = (normal((37,), torch.float32, rank.device) for _ in range(2))
    for of_x in (True, False):
        sharded = distributed(x, mesh, COLUMNS).requires_grad_(of_x)
        vectors = [distributed(t, mesh, Shard(0)).requires_grad_(not of_x) for t in (weight, bias)]
        out = kernel.layer_norm(sharded, *vectors)
        with CommDebugMode() as mode:
            out.backward(torch.ones_like(out))
        assert count(mode) == ({"all_gather_into_tensor": 1} if of_x else {})
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        kernel.layer_norm(*leaves).sum().backward()
        for leaf, value in zip((sharded, *vectors), leaves, strict=True):
            assert (leaf.grad is None) == (not leaf.requires_grad)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad.full_tensor(), value.grad)


def elsewhere(rank: Rank) -> None:
    """Inputs and gradients that are not where the columns are go there."""
    kernel, mesh = rank.fuselage, rank.mesh()
    x, residual, grad = (normal((3, 4, 24), torch.float32, rank.device) for _ in range(3))
    grad = (grad * 8).round()
    weight = normal((24,), torch.float32, rank.device)
    expected = kernel.fused_add_rms_norm(x, residual, weight)
    leaf = x.clone().requires_grad_()
    kernel.rms_norm(leaf, weight).backward(grad)
    whole = distributed(weight, mesh, Replicate())
    with CommDebugMode() as mode:
        found = kernel.fused_add_rms_norm(
            distributed(x, mesh, COLUMNS), distributed(residual, mesh, Replicate()), whole
        )
    assert count(mode) == {"all_gather_into_tensor": 1}
    for result, value in zip(found, expected, strict=True):
        assert result.placements == (COLUMNS,)
        torch.testing.assert_close(result.full_tensor(), value)
    for of_grad in (Partial(), Replicate(), Shard(0)):
        sharded = distributed(x, mesh, COLUMNS).requires_grad_()
        kernel.rms_norm(sharded, whole).backward(distributed(grad, mesh, of_grad))
        assert sharded.grad.placements == (COLUMNS,)
        torch.testing.assert_close(sharded.grad.full_tensor(), leaf.grad)
    for dtype in (torch.float16, torch.bfloat16):
        sharded = distributed(x, mesh, COLUMNS).requires_grad_()
        out = kernel.rms_norm(sharded, whole, out_dtype=dtype)
        check_close("out", out.full_tensor(), kernel.rms_norm(x, weight, out_dtype=dtype))
        out.backward(distributed(grad.to(dtype), mesh, COLUMNS))
        torch.testing.assert_close(sharded.grad.full_tensor(), leaf.grad)


def one_dimension(rank: Rank) -> None:
    """A single row, of which a rank may have nothing."""
    x, mesh = normal((rank.count - 1,), torch.float32, rank.device), rank.mesh()
    sharded = distributed(x, mesh, Shard(0)).requires_grad_()
    out = rank.fuselage.rms_norm(sharded)
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), rank.fuselage.rms_norm(x))
    (gradient,) = torch.autograd.grad(out, sharded, torch.ones_like(out))
    assert gradient.placements == (Shard(0),) and gradient.shape == x.shape


def no_rows(rank: Rank) -> None:
    x = distributed(torch.ones(0, 4, 24, device=rank.device), rank.mesh(), COLUMNS)
    out = rank.fuselage.layer_norm(x.requires_grad_())
    assert out.shape == x.shape and out.placements == (COLUMNS,)
    out.backward(torch.ones_like(out))
    assert x.grad.shape == x.shape


def bias_of_nothing(rank: Rank) -> None:
    """The gradient of a bias of which a rank has no columns is a DTensor there, too."""
    mesh = rank.mesh()
    x, bias = torch.ones(2, 3, device=rank.device), torch.ones(3, device=rank.device)
    sharded = distributed(bias, mesh, Shard(0)).requires_grad_()
    y = distributed(x, mesh, Shard(1))
    rank.fuselage.add_mul_act(y, sharded, y, 1.0, "silu").sum().backward()
    assert isinstance(sharded.grad, DTensor) and sharded.grad.placements == (Shard(0),)


def compiled(rank: Rank) -> None:
    """In one graph, with the same bits, and as many collectives."""
    kernel, mesh = rank.fuselage, rank.mesh()
    x, residual = (normal((3, 5, 37), torch.float32, rank.device) for _ in range(2))
    weight, of_powers, bias = (
        normal((n,), torch.float32, rank.device, mean=1.0) for n in (37, 3, 1)
    )

    def block(x, residual, weight, of_powers, bias):
        out, residual = kernel.fused_add_rms_norm(x, residual, weight)
        return kernel.fused_mul_poly_norm(kernel.layer_norm(out, weight), residual, of_powers, bias)

    graph = torch.compile(block, fullgraph=True, backend="aot_eager")
    placements = [COLUMNS, COLUMNS, Shard(0), Replicate(), Replicate()]
    for requires in (True, False):
        found = []
        for function in (block, graph):
            leaves = [
                distributed(t, mesh, to).requires_grad_(requires)
                for t, to in zip((x, residual, weight, of_powers, bias), placements, strict=True)
            ]
            out = function(*leaves)
            if requires:
                out.backward(torch.ones_like(out))
            assert out.placements == (COLUMNS,)
            found.append([out, *(t.grad for t in leaves if requires)])
        for eager, traced in zip(*found, strict=True):
            if TORCH >= (2, 13):  # 2.11 traces another placement of the same gradient
                assert traced.placements == eager.placements
            assert_same_bits(traced.full_tensor(), eager.full_tensor(), "compiled")


CASES = (
    *(one_of_the_results, elsewhere, one_dimension, no_rows, bias_of_nothing),
    compiled,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_columns(ranks, case):
    ranks.run(case)
