"""The loss family on DTensors: rows sharded, a vocabulary refused by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import assert_same_bits, normal
from ranks import Rank, distributed
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

ASKED = {"return_entropy": True, "return_log_sum_exp": True, "return_is_greatest": True}
PLACEMENTS = (Shard(0), Shard(1), Replicate())


def made(rank: Rank):
    """For 4 ranks: one of them has no row of the three."""
    logits = normal((3, 5, 40), torch.bfloat16, rank.device)
    targets = torch.randint(40, (3, 5), device=rank.device)
    targets[0, :2] = -100
    return logits, targets, torch.rand(3, 5, device=rank.device)


def rows_that_are_sharded(rank: Rank, *sizes: int) -> None:
    kernel, mesh = rank.fuselage, rank.mesh(*sizes)
    logits, targets, weights = made(rank)
    all_placements = itertools.product(PLACEMENTS, repeat=mesh.ndim)
    for placements, reduction in itertools.product(all_placements, ("none", "sum")):
        leaf = logits.clone().requires_grad_()
        options = {"reduction": reduction, "label_smoothing": 0.1}
        expected = kernel.cross_entropy(leaf, targets, token_weights=weights, **options)
        expected.backward(torch.ones_like(expected))
        sharded = distributed(logits, mesh, *placements).requires_grad_()
        others = [distributed(t, mesh, *placements) for t in (targets, weights)]
        with CommDebugMode() as collectives:
            loss = kernel.cross_entropy(sharded, others[0], token_weights=others[1], **options)
            loss.backward(distributed(torch.ones_like(expected), mesh, *_of(loss)))
        assert not collectives.get_total_counts(), (placements, reduction)
        if reduction == "none":
            assert loss.placements == placements
            assert_same_bits(loss.full_tensor(), expected.detach(), "loss")
        else:
            summed = tuple(p if p == Replicate() else Partial() for p in placements)
            assert loss.placements == summed
            torch.testing.assert_close(loss.full_tensor(), expected.detach())
        assert sharded.grad.placements == placements
        assert_same_bits(sharded.grad.full_tensor(), leaf.grad, "gradient")


def _of(loss):
    return [Replicate() if p == Partial() else p for p in loss.placements]


def sums_of_ignored_rows(rank: Rank) -> None:
    """A rank all of whose targets are ignored adds zeros to the gradient of a weight."""
    kernel, mesh = rank.fuselage, rank.mesh()
    x, weight = normal((2 * rank.count, 40), torch.float32, rank.device), torch.ones(40)
    targets = torch.randint(40, (2 * rank.count,), device=rank.device)
    targets[:3] = -100  # all of the first rank, and one of the second
    leaf = weight.to(rank.device).requires_grad_()
    kernel.cross_entropy(kernel.rms_norm(x, leaf), targets, reduction="sum").backward()
    shared = distributed(leaf.detach(), mesh, Replicate()).requires_grad_()
    logits = kernel.rms_norm(distributed(x, mesh, Shard(0)), shared)
    kernel.cross_entropy(logits, distributed(targets, mesh, Shard(0)), reduction="sum").backward()
    assert shared.grad.placements == (Partial(),)
    assert shared.grad.to_local().any() == (rank.index > 0)
    torch.testing.assert_close(shared.grad.full_tensor(), leaf.grad)


def log_probs_of_rows(rank: Rank) -> None:
    kernel, mesh = rank.fuselage, rank.mesh()
    logits, targets, _ = made(rank)
    for placement, asked in itertools.product(PLACEMENTS, (ASKED, {})):
        leaf = logits.clone().requires_grad_()
        expected = kernel.log_probs(leaf, targets, temperature=0.7, **asked)
        expected.log_probs.sum().backward()
        sharded = distributed(logits, mesh, placement).requires_grad_()
        of_ranks = distributed(targets, mesh, placement)
        found = kernel.log_probs(sharded, of_ranks, temperature=0.7, **asked)
        for name, value, wanted in zip(found._fields, found, expected, strict=True):
            assert (value is None) == (wanted is None)
            if value is not None:
                assert value.placements == (placement,)
                assert_same_bits(value.full_tensor(), wanted.detach(), name)
        found.log_probs.backward(torch.ones_like(found.log_probs))
        assert_same_bits(sharded.grad.full_tensor(), leaf.grad, "gradient")


def what_is_refused(rank: Rank) -> None:
    kernel, mesh = rank.fuselage, rank.mesh()
    logits, targets, _ = made(rank)
    whole = distributed(targets, mesh, Replicate())
    of_vocabulary = distributed(logits, mesh, Shard(2))
    for function in (kernel.cross_entropy, kernel.log_probs):
        with pytest.raises(RuntimeError, match=rf"{function.__name__}: `logits` is Shard\(dim=2\)"):
            function(of_vocabulary, whole)
        with pytest.raises(RuntimeError, match="`targets` is a plain tensor beside `logits`"):
            function(distributed(logits, mesh, Shard(0)), targets)
    rows = [distributed(t, mesh, Shard(0)) for t in (logits, targets)]
    with pytest.raises(RuntimeError, match="cross_entropy: `reduction` of sharded rows must be"):
        kernel.cross_entropy(*rows)
    leaf = rows[0].requires_grad_()
    with pytest.raises(RuntimeError, match="cross_entropy: `inplace_backward` is not for DTensors"):
        kernel.cross_entropy(leaf * 1, rows[1], reduction="sum", inplace_backward=True)
    mean = kernel.cross_entropy(distributed(logits, mesh, Replicate()), whole)
    assert_same_bits(mean.full_tensor(), kernel.cross_entropy(logits, targets), "mean")


@pytest.mark.parametrize(
    "function",
    [rows_that_are_sharded, sums_of_ignored_rows, log_probs_of_rows, what_is_refused],
    ids=lambda f: f.__name__,
)
def test_loss(ranks, function):
    ranks.run(function)


def test_a_mesh_of_two_dimensions(ranks):
    if ranks.count == 4:
        ranks.run(rows_that_are_sharded, 2, 2)
