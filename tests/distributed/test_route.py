"""topk_softmax on DTensors: rows sharded, experts refused by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import assert_same_bits, normal
from ranks import Rank, distributed
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

PLACEMENTS = (Shard(0), Shard(1), Replicate())
STYLES = (
    {},
    {"renormalize": False},
    {"score": "sigmoid", "num_groups": 4, "topk_groups": 2},
)


def rows_that_are_sharded(rank: Rank, *sizes: int) -> None:
    """For 4 ranks: one of them has no row of the three."""
    kernel, mesh = rank.fuselage, rank.mesh(*sizes)
    logits = normal((3, 5, 32), torch.bfloat16, rank.device)
    bias = normal((32,), torch.float32, rank.device)
    all_placements = itertools.product(PLACEMENTS, repeat=mesh.ndim)
    for placements, style in itertools.product(all_placements, STYLES):
        leaf = logits.clone().requires_grad_()
        expected = kernel.topk_softmax(leaf, 4, bias=bias, **style)
        grad = torch.arange(60, dtype=torch.float32, device=rank.device).view(3, 5, 4)
        expected.weights.backward(grad)
        sharded = distributed(logits, mesh, *placements).requires_grad_()
        whole = distributed(bias, mesh, *[Replicate()] * mesh.ndim)
        with CommDebugMode() as collectives:
            found = kernel.topk_softmax(sharded, 4, bias=whole, **style)
            found.weights.backward(distributed(grad, mesh, *placements))
        assert not collectives.get_total_counts(), (placements, style)
        assert found.weights.placements == found.indices.placements == placements
        assert torch.equal(found.indices.full_tensor(), expected.indices)
        assert_same_bits(found.weights.full_tensor(), expected.weights.detach(), "weights")
        assert sharded.grad.placements == placements
        assert_same_bits(sharded.grad.full_tensor(), leaf.grad, "gradient")


def what_is_refused(rank: Rank) -> None:
    kernel, mesh = rank.fuselage, rank.mesh()
    logits = normal((3, 5, 32), torch.bfloat16, rank.device)
    with pytest.raises(RuntimeError, match=r"topk_softmax: `logits` is Shard\(dim=2\)"):
        kernel.topk_softmax(distributed(logits, mesh, Shard(2)), 4)
    bias = torch.zeros(32, device=rank.device)
    with pytest.raises(RuntimeError, match="`bias` is a plain tensor beside `logits`"):
        kernel.topk_softmax(distributed(logits, mesh, Shard(0)), 4, bias=bias)


@pytest.mark.parametrize(
    "function", [rows_that_are_sharded, what_is_refused], ids=lambda f: f.__name__
)
def test_topk_softmax(ranks, function):
    ranks.run(function)


def test_a_mesh_of_two_dimensions(ranks):
    if ranks.count == 4:
        ranks.run(rows_that_are_sharded, 2, 2)
