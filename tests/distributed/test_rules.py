"""What the rules for DTensors do beside the plain case of test_placements.py."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from conftest import REPO_DIR
from harness import assert_same_bits
from ranks import Rank, collectives, distributed, random
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

# Where inputs and gradients come from elsewhere.


def parts_of_sums(rank: Rank) -> None:
    """As a row-parallel linear leaves them: reduced to where the residual is, by one collective."""
    kernel, mesh = rank.fuselage, rank.mesh()
    x, residual, weight = random(rank, 4, 4, 8), random(rank, 4, 4, 8), random(rank, 8)
    x = (x * 8).round()  # so that the sum of the parts is exact
    expected = kernel.fused_add_rms_norm(x, residual, weight)
    whole = distributed(weight, mesh, Replicate())
    for placement, wanted in ((Shard(1), "reduce_scatter_tensor"), (Replicate(), "all_reduce")):
        to = distributed(residual, mesh, placement)
        with CommDebugMode() as mode:
            results = kernel.fused_add_rms_norm(distributed(x, mesh, Partial()), to, whole)
        assert collectives(mode) == {wanted: 1}
        for result, value in zip(results, expected, strict=True):
            assert result.placements == (placement,)
            assert_same_bits(result.full_tensor(), value, str(placement))


def gradients_from_elsewhere(rank: Rank) -> None:
    """A gradient goes where its input is."""
    kernel, mesh = rank.fuselage, rank.mesh()
    x, weight, grad = (random(rank, *shape) for shape in ((4, 4, 8), (8,), (4, 4, 8)))
    grad = (grad * 8).round()
    leaf = x.clone().requires_grad_()
    kernel.rms_norm(leaf, weight).backward(grad)
    whole = distributed(weight, mesh, Replicate())
    cases = itertools.product((Shard(0), Shard(1), Replicate()), (Partial(), Shard(0), Replicate()))
    for placement, of_grad in cases:
        sharded = distributed(x, mesh, placement).requires_grad_()
        kernel.rms_norm(sharded, whole).backward(distributed(grad, mesh, of_grad))
        assert sharded.grad.placements == (placement,)
        assert_same_bits(sharded.grad.full_tensor(), leaf.grad, f"{placement} {of_grad}")


def weights_that_are_sharded(rank: Rank) -> None:
    """They are gathered; their gradient is a partial sum all the same."""
    kernel, mesh = rank.fuselage, rank.mesh()
    x, weight = random(rank, 4, 3, 8), random(rank, 8)
    sharded = distributed(weight, mesh, Shard(0)).requires_grad_()
    with CommDebugMode() as mode:
        out = kernel.rms_norm(distributed(x, mesh, Shard(1)), sharded)
    assert collectives(mode) == {"all_gather_into_tensor": 1}
    assert_same_bits(out.full_tensor(), kernel.rms_norm(x, weight), "out")
    out.backward(torch.ones_like(out))
    leaf = weight.requires_grad_()
    kernel.rms_norm(x, leaf).sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), leaf.grad)


def modulations(rank: Rank) -> None:
    """Those of the batch or of each row are sharded with it, however they come."""
    kernel, mesh = rank.fuselage, rank.mesh()
    batch = 2 * rank.count
    x = random(rank, batch, 4, 8)
    one, of_batch, of_rows = {Shard(0), Shard(1)}, {Shard(1)}, set()  # where gradients are sums
    shapes = {(8,): one, (1, 8): one, (1, 1, 8): one}
    shapes |= {(batch, 8): of_batch, (batch, 1, 8): of_batch, (batch, 4, 8): of_rows}
    for shape, placement in itertools.product(shapes, (Shard(0), Shard(1), Replicate())):
        scale, shift = random(rank, *shape), random(rank, *shape)
        leaves = [t.clone().requires_grad_() for t in (x, scale, shift)]
        expected = kernel.ada_layer_norm(*leaves)
        grad = random(rank, *x.shape)
        expected.backward(grad)
        for given in (Replicate(), Shard(0)):
            if given == Shard(0) and shape[0] == 1:
                continue
            sharded = [
                distributed(t, mesh, p).requires_grad_()
                for t, p in ((x, placement), (scale, given), (shift, Replicate()))
            ]
            out = kernel.ada_layer_norm(*sharded)
            assert_same_bits(out.full_tensor(), expected, f"{shape} {placement}")
            out.backward(distributed(grad, mesh, placement))
            for leaf, value in zip(sharded, leaves, strict=True):
                torch.testing.assert_close(leaf.grad.full_tensor(), value.grad)
            sums = sharded[1].grad.placements == (Partial(),)
            assert sums == (placement in shapes[shape]), (shape, placement)


def in_place(rank: Rank) -> None:
    kernel, mesh = rank.fuselage, rank.mesh()
    x, residual, weight, bias = (random(rank, *s) for s in ((3, 5, 8), (3, 5, 8), (8,), (8,)))
    vectors = [distributed(t, mesh, Replicate()) for t in (weight, bias)]
    for placement in (Replicate(), Shard(0), Shard(1)):
        rows = [distributed(t.clone(), mesh, placement) for t in (x, residual)]
        returned = kernel.fused_add_rms_norm_(*rows, vectors[0])
        expected = kernel.fused_add_rms_norm(x, residual, weight)
        assert all(a is b for a, b in zip(returned, rows, strict=True))
        for t, value in zip(rows, expected, strict=True):
            assert_same_bits(t.full_tensor(), value, "fused_add_rms_norm_")
        rows = [distributed(t.clone(), mesh, placement) for t in (x, residual)]
        kernel.fused_add_layer_norm_(*rows, *vectors)
        expected = kernel.fused_add_layer_norm(x, residual, weight, bias)
        for t, value in zip(rows, expected, strict=True):
            assert_same_bits(t.full_tensor(), value, "fused_add_layer_norm_")
    for placement in (Shard(1), Shard(2)):
        sharded, y = (distributed(t.clone(), mesh, placement) for t in (x, residual))
        kernel.bias_act_(sharded, vectors[1], activation="gelu")
        expected = kernel.bias_act(x, bias, activation="gelu")
        assert_same_bits(sharded.full_tensor(), expected, "bias_act_")
        sharded = distributed(x.clone(), mesh, placement)
        kernel.add_mul_act_(sharded, vectors[1], y, 0.5, "silu")
        expected = kernel.add_mul_act(x, bias, residual, 0.5, "silu")
        assert_same_bits(sharded.full_tensor(), expected, "add_mul_act_")


def experts(rank: Rank) -> None:
    """A rank's experts have its rows."""
    kernel, mesh = rank.fuselage, rank.mesh()
    counts = torch.tensor([[3, 0, 2], [1, 4, 0], [0, 0, 0], [2, 2, 2]][: rank.count])
    offs = counts.cumsum(1).to(rank.device, torch.int32)
    rows, mine = int(counts.sum()), counts.sum(1).cumsum(0)
    x, mul = random(rank, rows, 8), random(rank, rows, 8)
    weight, bias = random(rank, 3 * rank.count, 3), random(rank, 3 * rank.count, 1)
    begin, end = int(mine[rank.index] - counts[rank.index].sum()), int(mine[rank.index])

    def of_rank(t: torch.Tensor, begin: int, end: int) -> DTensor:
        local = t[begin:end].contiguous()
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=t.shape, stride=t.stride()
        )

    experts = (3 * rank.index, 3 * rank.index + 3)
    leaves = [t.clone().requires_grad_() for t in (x, mul, weight, bias)]
    all_offs = counts.flatten().cumsum(0).to(rank.device, torch.int32)
    expected = kernel.grouped_poly_norm(*leaves, all_offs)
    grad = random(rank, *x.shape)
    expected.backward(grad)
    sharded = [
        of_rank(t, *cut).requires_grad_()
        for t, cut in zip((x, mul, weight, bias), [(begin, end)] * 2 + [experts] * 2, strict=True)
    ]
    out = kernel.grouped_poly_norm(*sharded, of_rank(offs.flatten(), *experts))
    assert_same_bits(out.to_local(), expected[begin:end].detach(), "out")
    out.backward(of_rank(grad, begin, end))
    cuts = [(begin, end)] * 2 + [experts] * 2
    for leaf, value, (first, last) in zip(sharded, leaves, cuts, strict=True):
        assert leaf.grad.placements == (Shard(0),)
        assert_same_bits(leaf.grad.to_local(), value.grad[first:last], "gradient")


def compiled(rank: Rank) -> None:
    """In one graph, with the same bits."""
    kernel, mesh = rank.fuselage, rank.mesh()
    x, residual, weight = random(rank, 4, 4, 8), random(rank, 4, 4, 8), random(rank, 8)

    def block(x, residual, weight):
        out, residual = kernel.fused_add_rms_norm(x, residual, weight)
        return kernel.swiglu(out, residual)

    graph = torch.compile(block, fullgraph=True, backend="aot_eager")
    for placement, requires in itertools.product((Shard(1), Replicate()), (True, False)):
        found = []
        for function in (block, graph):
            leaves = [distributed(t, mesh, placement) for t in (x, residual)]
            leaves += [distributed(weight, mesh, Replicate())]
            leaves = [t.requires_grad_(requires) for t in leaves]
            out = function(*leaves)
            if requires:
                out.backward(torch.ones_like(out))
            assert out.placements == (placement,)
            found.append([out, *(t.grad for t in leaves if requires)])
        for eager, traced in zip(*found, strict=True):
            assert_same_bits(traced.full_tensor(), eager.full_tensor(), "compiled")


CASES = (
    *(parts_of_sums, gradients_from_elsewhere, weights_that_are_sharded, modulations),
    *(in_place, experts, compiled),
)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_rows(ranks, case):
    ranks.run(case)


# Sampling.


def draw(rank: Rank, vocabulary: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """From a head in shards the tokens of the whole, by one all-gather a sharded dimension."""
    kernel, mesh = rank.fuselage, rank.mesh(*sizes)
    hidden, weight = random(rank, 7, 16, dtype=dtype), random(rank, vocabulary, 16, dtype=dtype)
    bias = random(rank, vocabulary)
    whole = [Replicate()] * mesh.ndim
    x = distributed(hidden, mesh, *whole)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 1.0, 3.0], device=rank.device)
    for cut in itertools.product((Replicate(), Shard(0)), repeat=mesh.ndim):
        sharded = [distributed(t, mesh, *cut) for t in (weight, bias)]
        for logprobs, samples in ((False, 1), (True, 3)):
            options = {"seed": 5, "num_samples": samples, "return_logprobs": logprobs}
            offsets = [torch.tensor([4], device=rank.device) for _ in range(2)]
            expected = kernel.lm_head_sample(
                hidden, weight, bias=bias, offset=offsets[0], temperature=temperature, **options
            )
            with CommDebugMode() as mode:
                found = kernel.lm_head_sample(
                    *(x, sharded[0]),
                    **{"bias": sharded[1], "offset": offsets[1], "temperature": temperature},
                    **options,
                )
            gathers = collectives(mode).get("all_gather_into_tensor", 0)
            assert gathers == cut.count(Shard(0)), collectives(mode)
            assert offsets[0] == offsets[1] == 5
            if not logprobs:
                expected, found = [expected], [found]
            assert found[0].placements == tuple(whole)
            assert found[0].to_local().equal(expected[0])
            for ours, theirs in zip(found[1:], expected[1:], strict=True):
                torch.testing.assert_close(ours.to_local(), theirs, atol=1e-5, rtol=1e-5)


def draw_of_one_row(rank: Rank) -> None:
    """As in decoding: what is packed of one row is contiguous, wherever it starts."""
    kernel, mesh = rank.fuselage, rank.mesh()
    hidden, weight = random(rank, 1, 16), random(rank, 101, 16)
    sharded = distributed(hidden, mesh, Replicate()), distributed(weight, mesh, Shard(0))
    for options in ({}, {"return_logprobs": True}, {"num_samples": 3}):
        expected = kernel.lm_head_sample(hidden, weight, seed=5, **options)
        found = kernel.lm_head_sample(*sharded, seed=5, **options)
        if options.get("return_logprobs"):
            expected, found = expected[0], found[0]
        assert found.to_local().equal(expected)


def one_draw_for_all(rank: Rank) -> None:
    """Ranks whose generators differ draw the same tokens."""
    kernel, mesh = rank.fuselage, rank.mesh()
    hidden, weight = random(rank, 7, 16), random(rank, 100, 16)
    torch.manual_seed(rank.index)
    for placement in (Shard(0), Replicate()):
        tokens = kernel.lm_head_sample(
            distributed(hidden, mesh, Replicate()), distributed(weight, mesh, placement)
        ).to_local()
        parts = [torch.empty_like(tokens) for _ in range(rank.count)]
        torch.distributed.all_gather(parts, tokens)
        assert all(part.equal(tokens) for part in parts), placement
    logits = distributed(hidden @ weight.T, mesh, Replicate())
    tokens = kernel.gumbel_sample(logits, seed=3, top_k=5)
    assert tokens.to_local().equal(kernel.gumbel_sample(hidden @ weight.T, seed=3, top_k=5))


@pytest.mark.parametrize("vocabulary", [101, 3], ids=["uneven", "empty_shards"])
def test_draws_of_a_sharded_vocabulary(ranks, vocabulary):
    for dtype in (torch.float32, torch.bfloat16):
        ranks.run(draw, vocabulary, dtype, ())
    if ranks.count == 4:
        ranks.run(draw, vocabulary, torch.float32, (2, 2))


def test_all_ranks_draw_the_same(ranks):
    ranks.run(one_draw_for_all)
    ranks.run(draw_of_one_row)


# What is refused, on every rank and before any collective.


def refusals(rank: Rank) -> list[tuple[str, str]]:
    kernel, mesh = rank.fuselage, rank.mesh(names=("tp",))
    other = rank.mesh(1, rank.count)

    def t(*shape, to=None, mesh=mesh):
        placements = [Replicate()] * (mesh.ndim - 1) + [to or Replicate()]
        return distribute_tensor(
            torch.ones(shape, device=rank.device), mesh, placements, src_data_rank=None
        )

    masked = DTensor.from_local(torch.ones(4, 8), mesh, [_masked_partial()])
    plain = torch.ones(8, device=rank.device)
    heads, table = (2, 4, 6, 8), t(4, 8)
    a, b = t(4, 3, 8, to=Shard(0)), t(4, 3, 8, to=Shard(1))
    parts = DTensor.from_local(torch.ones(4, 3, 8, device=rank.device), mesh, [Partial()])
    twice = distribute_tensor(
        torch.ones(4, 8, device=rank.device), other, [Shard(1)] * 2, src_data_rank=None
    )
    offs = torch.tensor([2, 4], dtype=torch.int32)
    grouped = distribute_tensor(offs, mesh, [Replicate()], src_data_rank=None)
    calls = [
        lambda: kernel.ada_rms_norm(t(4, 8, to=Shard(1)), None, None),
        lambda: kernel.gate_residual_ada_norm(*[t(4, 3, 8, to=Shard(2))] * 2, None, None, None),
        lambda: kernel.fused_mul_poly_norm(t(4, 8, to=Shard(1)), None, t(3), t(1)),
        lambda: kernel.layer_norm(twice),
        lambda: kernel.silu_and_mul(t(4, 8, to=Shard(1))),
        lambda: kernel.fused_add_rms_norm(a, b),
        lambda: kernel.fused_add_layer_norm_(*[t(4, 3, 8, to=Shard(2))] * 2),
        lambda: kernel.fused_add_rms_norm_(a, t(4, 3, 8)),
        lambda: kernel.fused_add_rms_norm_(parts, t(4, 3, 8)),
        lambda: kernel.rms_norm(a, plain),
        lambda: kernel.rms_norm(torch.ones(4, 8, device=rank.device), t(8)),
        lambda: kernel.rms_norm(a, t(8, mesh=other)),
        lambda: kernel.rms_norm(masked),
        lambda: kernel.apply_rotary(t(*heads, to=Shard(3)), None, table, table),
        lambda: kernel.apply_rotary_(t(*heads, to=Shard(1)), t(*heads, to=Shard(2)), table, table),
        lambda: kernel.grouped_poly_norm(
            t(4, 8, to=Shard(0)), None, t(2, 3, to=Shard(0)), t(2, 1), grouped
        ),
        lambda: kernel.gumbel_sample(t(4, 100, to=Shard(1)), seed=1),
        lambda: kernel.lm_head_sample(t(4, 8), t(100, 8, to=Shard(1)), seed=1),
        lambda: kernel.lm_head_sample(t(4, 8), t(100, 8, to=Shard(0)), seed=1, top_k=5),
        lambda: kernel.lm_head_sample(t(4, 8, to=Shard(0)), t(100, 8), seed=1),
        lambda: kernel.lm_head_sample_shard(
            t(4, 8), t(100, 8), vocab_offset=0, seed=1, offset=None
        ),
        lambda: kernel.linear_cross_entropy(t(4, 8), t(100, 8, to=Shard(0)), t(4).long()),
    ]
    messages = []
    with CommDebugMode() as mode:
        for call in calls:
            for grad in (False, True):
                with torch.set_grad_enabled(grad), pytest.raises(RuntimeError) as error:
                    call()
            messages.append(str(error.value))
    assert collectives(mode) == {}
    return messages


def _masked_partial():
    """What a vocabulary-parallel embedding returns."""
    from torch.distributed.tensor.placement_types import Partial

    class MaskPartial(Partial):
        pass

    return MaskPartial("sum")


REFUSED = [
    "ada_rms_norm: `x` is Shard(dim=1) over dimension `tp` of the mesh, which must be Replicate() "
    "or Shard(0); redistribute it",
    "gate_residual_ada_norm: `x` is Shard(dim=2) over dimension `tp` of the mesh, which must be "
    "Replicate(), Shard(0) or Shard(1); redistribute it",
    "fused_mul_poly_norm: `x` is Shard(dim=1) over dimension `tp` of the mesh, which must be "
    "Replicate() or Shard(0); redistribute it",
    "layer_norm: the last dimension of `x` is sharded over several dimensions of the mesh, and may "
    "be over one; redistribute it",
    "silu_and_mul: `x` is Shard(dim=1) over dimension `tp` of the mesh, which must be "
    "Replicate() or Shard(0); redistribute it",
    "fused_add_rms_norm: `x` is Shard(dim=0) and `residual` is Shard(dim=1) over dimension `tp` "
    "of the mesh; they must be sharded alike, redistribute one",
    "fused_add_layer_norm_: `x` is Shard(dim=2) over dimension `tp` of the mesh, which must be "
    "Replicate(), Shard(0) or Shard(1); redistribute it",
    "fused_add_rms_norm_: `residual` is Replicate() over dimension `tp` of the mesh, which must "
    "be Shard(dim=0) to be written in place; redistribute it",
    "fused_add_rms_norm_: `x` is Partial(sum) over dimension `tp` of the mesh, which must be "
    "Replicate() to be written in place; redistribute it",
    "rms_norm: `weight` is a plain tensor beside `x`, a DTensor; make it one, with "
    "distribute_tensor or DTensor.from_local",
    "rms_norm: `x` is a plain tensor beside `weight`, a DTensor; make it one, with "
    "distribute_tensor or DTensor.from_local",
    "rms_norm: `weight` is on DeviceMesh",
    "rms_norm: `x` is MaskPartial over dimension `tp` of the mesh, which must be Replicate, "
    "Shard or Partial; redistribute it",
    "apply_rotary: `q` is Shard(dim=3) over dimension `tp` of the mesh, which must be "
    "Replicate(), Shard(0), Shard(1) or Shard(2); redistribute it",
    "apply_rotary_: `q` is Shard(dim=1) and `k` is Shard(dim=2) over dimension `tp` of the mesh; "
    "they must be sharded alike, redistribute one",
    "grouped_poly_norm: `offs` is Replicate() over dimension `tp` of the mesh, which must be "
    "Shard(dim=0), as `x` is, by experts; redistribute it",
    "gumbel_sample: `logits` is Shard(dim=1) over dimension `tp` of the mesh, which must be "
    "Replicate(); redistribute it",
    "lm_head_sample: `weight` is Shard(dim=1) over dimension `tp` of the mesh, which must be "
    "Replicate() or Shard(0); redistribute it",
    "lm_head_sample: `top_k` needs logits that one rank has; redistribute `weight` to "
    "Replicate(), or draw without filters",
    "lm_head_sample: `hidden` is Shard(dim=0) over dimension `tp` of the mesh, which must be "
    "Replicate(); redistribute it",
    "lm_head_sample_shard: takes a rank's own tensors; give DTensors to lm_head_sample",
    "linear_cross_entropy: takes plain tensors; gather what is sharded, as with full_tensor()",
]


def test_refused_on_every_rank_before_a_collective(ranks):
    first, *others = ranks.run(refusals)
    assert all(other == first for other in others)
    assert len(first) == len(REFUSED)
    for actual, expected in zip(first, REFUSED, strict=True):
        assert actual.startswith(f"fuselage::{expected}"), actual


# The page.


def page(rank: Rank, blocks: list[str]) -> None:
    names = {"fuselage": rank.fuselage}
    for code in blocks:
        exec(code.replace('"cuda"', repr(rank.device.partition(":")[0])), names)
    assert names["weight"].grad.placements == (Partial(),)
    assert names["tokens"].shape == (2, 1)


def test_the_examples_of_the_page_run(ranks):
    text = (REPO_DIR / "docs/distributed.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    ranks.run(page, blocks[:3])
