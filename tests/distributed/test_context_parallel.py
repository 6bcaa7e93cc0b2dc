"""A decoder layer's attention and gate over shards of the sequence, keys and values in a ring.

What passes keys and values around is written here, as programs with context parallelism have it:
fuselage has no part in it. Its operators need nothing from other ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import Rank, collectives, distributed, random
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

BATCH, HEADS, DIM = 2, 3, 8
TOKENS_OF_A_RANK = 3


def passed(t: torch.Tensor, by: int) -> torch.Tensor:
    """That of the rank so many places before; ours goes as far on."""
    rank, count = dist.get_rank(), dist.get_world_size()
    t, received = t.contiguous(), torch.empty_like(t)
    to, source = (rank + by) % count, (rank - by) % count
    steps = [dist.P2POp(dist.isend, t, to), dist.P2POp(dist.irecv, received, source)]
    for work in dist.batch_isend_irecv(steps):
        work.wait()
    return received


class Pass(torch.autograd.Function):
    """To the next rank; gradients go to the one before."""

    @staticmethod
    def forward(ctx, t: torch.Tensor) -> torch.Tensor:
        return passed(t, 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return passed(grad, -1)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, starts: list):
    """Of [batch, tokens, heads, dim], where `starts` are those of equal parts of k and v."""
    queries = torch.arange(start, start + q.shape[1], device=q.device)
    keys = torch.cat([torch.arange(s, s + q.shape[1], device=q.device) for s in starts])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def ring_attention(rank: Rank, q: DTensor, k: DTensor, v: DTensor) -> DTensor:
    """Each rank's queries meet the keys and values of one rank after the other."""
    q, k, v = (t.to_local() for t in (q, k, v))
    tokens, parts = q.shape[1], [torch.stack([k, v])]
    for _ in range(rank.count - 1):
        parts.append(Pass.apply(parts[-1]))
    k, v = torch.cat(parts, 2)
    starts = [(rank.index - step) % rank.count * tokens for step in range(rank.count)]
    out = causal_attention(q, k, v, rank.index * tokens, starts)
    return DTensor.from_local(out, rank.mesh(), [Shard(1)], run_check=False)


def layer(kernel, attention, x, weights, cos, sin):
    """A norm, attention without projections, and a norm and a gate of what it adds to."""
    heads = kernel.rms_norm(x, weights[0]).unflatten(-1, (HEADS, DIM))
    q, k = kernel.apply_rotary(heads, heads, cos, sin)
    attended = attention(q, k, heads).flatten(-2)
    out, residual = kernel.fused_add_rms_norm(attended, x, weights[1])
    return kernel.swiglu(out, residual)


def ring(rank: Rank) -> None:
    kernel, mesh, tokens = rank.fuselage, rank.mesh(), TOKENS_OF_A_RANK * rank.count
    x, grad = (random(rank, BATCH, tokens, HEADS * DIM) for _ in range(2))
    weights = [random(rank, HEADS * DIM) for _ in range(2)]
    angles = random(rank, tokens, DIM // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    expected = layer(
        *(kernel, lambda q, k, v: causal_attention(q, k, v, 0, [0])),
        *(leaves[0], leaves[1:], cos, sin),
    )
    expected.backward(grad)

    sharded = [distributed(x, mesh, Shard(1))]
    sharded += [distributed(t, mesh, Replicate()) for t in weights]
    sharded = [t.requires_grad_() for t in sharded]
    of_positions = [distributed(t, mesh, Shard(0)) for t in (cos, sin)]
    with CommDebugMode() as mode:
        out = layer(
            *(kernel, lambda q, k, v: ring_attention(rank, q, k, v)),
            *(sharded[0], sharded[1:], *of_positions),
        )
        out.backward(distributed(grad, mesh, Shard(1)))
    assert collectives(mode) == {}
    assert out.placements == sharded[0].grad.placements == (Shard(1),)
    assert all(t.grad.placements == (Partial(),) for t in sharded[1:])
    torch.testing.assert_close(out.full_tensor(), expected.detach())
    for ours, theirs in zip(sharded, leaves, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_attention_in_a_ring(ranks):
    ranks.run(ring)
