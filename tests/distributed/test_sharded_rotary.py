"""Rotary embedding of DTensors: a shard takes the positions that its tokens have."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import assert_same_bits
from ranks import Rank, collectives, distributed, random
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

BATCH, TOKENS, HEADS, DIM = 3, 5, 6, 8


def rotary_inputs(rank: Rank, heads_dim: int) -> list[torch.Tensor]:
    sizes = [BATCH, TOKENS, TOKENS, DIM]
    inputs = []
    for heads in (HEADS, 2):
        sizes[heads_dim] = heads
        inputs.append(random(rank, *sizes))
    return inputs


def tables(rank: Rank, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = random(rank, *shape, DIM // 2).repeat(*[1] * len(shape), 2)
    return angles.cos(), angles.sin()


def rotary(rank: Rank, norm: bool, sizes: tuple[int, ...]) -> None:
    """Sharded by batch, tokens or heads, with every way of saying what the positions are."""
    kernel, mesh = rank.fuselage, rank.mesh(*sizes)
    ids = torch.stack([torch.randperm(9)[:TOKENS] for _ in range(BATCH)]).to(rank.device)
    starts = torch.tensor([1, 0, 4], device=rank.device)
    of_table = tables(rank, 9)
    positions = [
        (tables(rank, TOKENS), {}),
        (tables(rank, 1, TOKENS), {}),
        (tables(rank, BATCH, TOKENS), {}),
        (of_table, {"position_ids": ids}),
        (of_table, {"position_ids": ids[0]}),
        (of_table, {"position_ids": ids[:1]}),
        (of_table, {"offset": 2}),
        (of_table, {"offset": starts}),
        (of_table, {"offset": starts[:1]}),
    ]
    whole = [Replicate()] * mesh.ndim
    of_heads = (Replicate(), Shard(0), Shard(1), Shard(2))
    all_placements = list(itertools.product(of_heads, repeat=mesh.ndim))
    for (cos_sin, options), heads_dim in itertools.product(positions, (1, 2)):
        q, k = rotary_inputs(rank, heads_dim)
        weights = [random(rank, DIM) for _ in range(2 * norm)]
        leaves = [t.clone().requires_grad_() for t in (q, k, *weights)]
        function = kernel.qk_norm_rotary if norm else kernel.apply_rotary
        expected = function(*leaves, *cos_sin, heads_dim=heads_dim, **options)
        grads = [random(rank, *t.shape) for t in expected]
        torch.autograd.backward(expected, grads)
        for placements in all_placements:
            sharded = [distributed(t, mesh, *placements).requires_grad_() for t in (q, k)]
            sharded += [distributed(t, mesh, *whole).requires_grad_() for t in weights]
            given = [distributed(t, mesh, *whole) for t in cos_sin]
            others = {
                n: distributed(t, mesh, *whole) if isinstance(t, torch.Tensor) else t
                for n, t in options.items()
            }
            with CommDebugMode() as mode:
                outs = function(*sharded, *given, heads_dim=heads_dim, **others)
                torch.autograd.backward(outs, [distributed(g, mesh, *placements) for g in grads])
            assert collectives(mode) == {}
            what = f"{placements} {heads_dim=} {list(options)}"
            for out, value in zip(outs, expected, strict=True):
                assert out.placements == placements
                assert_same_bits(out.full_tensor(), value.detach(), what)
            for leaf, value in zip(sharded[:2], leaves[:2], strict=True):
                assert_same_bits(leaf.grad.full_tensor(), value.grad, what)
            for leaf, value in zip(sharded[2:], leaves[2:], strict=True):
                torch.testing.assert_close(leaf.grad.full_tensor(), value.grad)


def rotary_forms(rank: Rank) -> None:
    """Packed tokens, one head, no k, in place, and tables that are sharded with the tokens."""
    kernel, mesh = rank.fuselage, rank.mesh()
    whole = [Replicate()]
    q, k = random(rank, TOKENS, HEADS, DIM), random(rank, TOKENS, 2, DIM)
    cos, sin = tables(rank, 9)
    ids = torch.tensor([3, 0, 8, 1, 1], device=rank.device)
    expected = kernel.apply_rotary(q, k, cos, sin, position_ids=ids)
    given = [distributed(t, mesh, *whole) for t in (cos, sin)]
    for placement in (Shard(0), Shard(1)):
        rows = [distributed(t, mesh, placement) for t in (q, k)]
        outs = kernel.apply_rotary(*rows, *given, position_ids=distributed(ids, mesh, *whole))
        for out, value in zip(outs, expected, strict=True):
            assert_same_bits(out.full_tensor(), value, f"packed {placement}")
    cos, sin = tables(rank, TOKENS)
    one_head = random(rank, BATCH, TOKENS, DIM)
    expected = kernel.apply_rotary(one_head, None, cos, sin)
    for placement, of_tables in ((Shard(0), Replicate()), (Shard(1), Shard(0))):
        given = [distributed(t, mesh, of_tables) for t in (cos, sin)]
        with CommDebugMode() as mode:
            out = kernel.apply_rotary(distributed(one_head, mesh, placement), None, *given)
        assert collectives(mode) == {}
        assert_same_bits(out.full_tensor(), expected, f"one head {placement}")
    q, k = rotary_inputs(rank, 2)
    expected = kernel.apply_rotary(q.transpose(1, 2), None, cos, sin, heads_dim=1)
    given = [distributed(t, mesh, *whole) for t in (cos, sin)]
    out = kernel.apply_rotary(
        distributed(q, mesh, Shard(0)).transpose(1, 2), None, *given, heads_dim=1
    )
    assert out.stride() == expected.stride() != expected.contiguous().stride()
    assert_same_bits(out.full_tensor(), expected, "transposed heads")
    expected = kernel.apply_rotary(q, k, cos, sin)
    for placement in (Shard(0), Shard(1), Shard(2)):
        rows = [distributed(t.clone(), mesh, placement) for t in (q, k)]
        kernel.apply_rotary_(*rows, *(distributed(t, mesh, *whole) for t in (cos, sin)))
        for t, value in zip(rows, expected, strict=True):
            assert_same_bits(t.full_tensor(), value, f"in place {placement}")


@pytest.mark.long
@pytest.mark.parametrize("norm", [False, True], ids=["apply_rotary", "qk_norm_rotary"])
def test_rotary(ranks, norm):
    ranks.run(rotary, norm, ())


@pytest.mark.parametrize("norm", [False, True], ids=["apply_rotary", "qk_norm_rotary"])
@pytest.mark.slow
def test_rotary_on_a_mesh_of_two_dimensions(ranks, norm):
    if ranks.count == 4:
        ranks.run(rotary, norm, (2, 2))


def parts_beside_shards(rank: Rank) -> None:
    """Queries that are parts of sums go to where the keys are, and so do both gradients."""
    kernel, mesh = rank.fuselage, rank.mesh()
    q, k = (t.round() for t in rotary_inputs(rank, 2))  # so that the sums of the parts are exact
    given = [*(random(rank, DIM) for _ in range(2)), *tables(rank, TOKENS)]
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    expected = kernel.qk_norm_rotary(*leaves, *given)
    grads = [random(rank, *t.shape) for t in expected]
    torch.autograd.backward(expected, grads)
    given = [distributed(t, mesh, Replicate()) for t in given]
    for placement in (Shard(0), Shard(1), Shard(2)):
        rows = [distributed(t, mesh, p) for t, p in ((q, Partial()), (k, placement))]
        rows = [t.requires_grad_() for t in rows]
        outs = kernel.qk_norm_rotary(*rows, *given)
        found = torch.autograd.grad(outs, rows, [distributed(g, mesh, placement) for g in grads])
        for out, value in zip(outs, expected, strict=True):
            assert out.placements == (placement,)
            assert_same_bits(out.full_tensor(), value.detach(), "out")
        for gradient, leaf in zip(found, leaves, strict=True):
            assert gradient.placements == (placement,)
            assert_same_bits(gradient.full_tensor(), leaf.grad, "gradient")


@pytest.mark.parametrize("case", [rotary_forms, parts_beside_shards], ids=lambda c: c.__name__)
def test_forms(ranks, case):
    ranks.run(case)
