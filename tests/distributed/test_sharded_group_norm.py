"""group_norm on DTensors: whole samples sharded, parameters on every rank."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits, normal
from ranks import Rank, distributed
from torch.distributed.tensor import Partial, Replicate, Shard


def samples_that_are_sharded(rank: Rank) -> None:
    """For 4 ranks: one of them has no sample of the three. Channels last as well."""
    kernel, mesh = rank.fuselage, rank.mesh()
    for last in (False, True):
        x = normal((3, 8, 4, 6), torch.float32, rank.device)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        weight, bias, grad = (
            normal(shape, torch.float32, rank.device) for shape in ((8,), (8,), x.shape)
        )
        plain = [t.clone().requires_grad_() for t in (x, weight, bias)]
        expected = kernel.group_norm(plain[0], 2, *plain[1:], activation="silu")
        expected.backward(grad)
        for placement in (Shard(0), Replicate()):
            leaves = [distributed(x, mesh, placement).requires_grad_()]
            leaves += [distributed(t, mesh, Replicate()).requires_grad_() for t in (weight, bias)]
            found = kernel.group_norm(leaves[0], 2, *leaves[1:], activation="silu")
            found.backward(distributed(grad, mesh, placement))
            assert found.placements == leaves[0].grad.placements == (placement,)
            assert found.shape == x.shape
            pairs = {
                "out": (found.full_tensor(), expected.detach()),
                "grad_x": (leaves[0].grad.full_tensor(), plain[0].grad),
            }
            for name, (ours, theirs) in pairs.items():
                if last:  # shards are made contiguous, and summed up in that order
                    torch.testing.assert_close(ours, theirs)
                else:
                    assert_same_bits(ours, theirs, name)
            for ours, theirs in zip(leaves[1:], plain[1:], strict=True):
                of_shards = Partial() if placement == Shard(0) else placement
                assert ours.grad.placements == (of_shards,)
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def what_is_refused(rank: Rank) -> None:
    kernel, mesh = rank.fuselage, rank.mesh()
    x = normal((3, 8, 4, 6), torch.float32, rank.device)
    for dim in (1, 2):
        with pytest.raises(RuntimeError, match=rf"group_norm: `x` is Shard\(dim={dim}\)"):
            kernel.group_norm(distributed(x, mesh, Shard(dim)), 2)
    with pytest.raises(RuntimeError, match="`weight` is a plain tensor beside `x`"):
        kernel.group_norm(distributed(x, mesh, Shard(0)), 2, x[0, :, 0, 0])


@pytest.mark.parametrize(
    "function", [samples_that_are_sharded, what_is_refused], ids=lambda f: f.__name__
)
def test_group_norm(ranks, function):
    ranks.run(function)
