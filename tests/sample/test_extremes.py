"""Logits, temperatures and vocabularies at the ends of their ranges."""

from __future__ import annotations

import math

import pytest
import torch

TINY = torch.finfo(torch.float32).tiny
OPTIONS = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 900, "top_p": 0.5}]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=str)
each_temperature = pytest.mark.parametrize("temperature", [TINY, 1e-30, 1e-20, 1e-6])
each_size = pytest.mark.parametrize("size", [30.0, 6e4, 1e30, 3e38])


def steep_rows(size: float, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A positive and a negative row whose maximum is a quarter of `size` ahead, and where it is."""
    at = torch.tensor([vocab // 3, vocab - 1])
    rows = torch.stack([0.5 * torch.rand(vocab), -1 + 0.5 * torch.rand(vocab)])
    rows[[0, 1], at] = torch.tensor([1.0, -0.25])
    return (size * rows.double()).float(), at


@pytest.mark.kernels_ci
@pytest.mark.parametrize("row", [[10.0, 20.0, 30.0], [-30.0, -20.0, -10.0], [0.0, 1e-30, 3e-30]])
def test_the_lowest_temperature_is_greedy(fuselage, device, row):
    logits = torch.tensor([row], device=device)
    for temperature in (TINY, torch.tensor([TINY], device=device)):
        assert fuselage.gumbel_sample(logits, temperature=temperature, seed=0).item() == 2


@each_option
@each_temperature
@each_size
def test_no_temperature_overflows(fuselage, device, size, temperature, options):
    logits, at = steep_rows(size, 5003)
    logits[:, ::7] = torch.where(
        torch.arange(0, 5003, 7) == at[:, None], logits[:, ::7], -torch.inf
    )
    given = {"temperature": temperature, "seed": 3, "num_samples": 4, **options}
    result = fuselage.gumbel_sample(logits.to(device), return_logprobs=True, **given)
    assert (result.tokens.cpu() == at[:, None]).all()
    assert (result.logprobs == 0).all() and (result.filtered_logprobs == 0).all()
    tokens = fuselage.gumbel_sample(logits.to(device), **given)
    assert torch.equal(tokens, result.tokens)


def head_of(rows: torch.Tensor, batch: int, dtype, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden and weight whose logits are the rows, in turn. Rows start at that element."""
    hidden = torch.zeros(batch, 16, device=rows.device)
    hidden[:, start : start + 2] = torch.eye(2, device=rows.device).repeat(batch // 2, 1)
    weight = torch.zeros(rows.shape[1], 16, device=rows.device)
    weight[:, start : start + 2] = rows.T
    return hidden.to(dtype)[:, start : start + 8], weight.to(dtype)[:, start : start + 8]


# A Hopper GPU has a kernel for rows of half precision that are aligned, and others for all else.
@pytest.mark.parametrize(
    ("dtype", "start"),
    [(torch.float32, 0), (torch.bfloat16, 0), (torch.float16, 0), (torch.bfloat16, 1)],
    ids=str,
)
@pytest.mark.parametrize("batch", [2, 40, 300])
@each_temperature
@each_size
def test_no_temperature_of_a_head_overflows(
    fuselage, device, size, temperature, batch, dtype, start
):
    if dtype == torch.float16 and size > torch.finfo(dtype).max:
        size = 3e3
    vocab = 40_000 if device == "cuda" else 3000
    rows, at = steep_rows(size, vocab)
    hidden, weight = head_of(rows.to(device), batch, dtype, start)
    expected = at.repeat(batch // 2)[:, None].to(device)
    given = {"temperature": temperature, "seed": 3}
    for options in ({"num_samples": 2}, {"top_k": 5}, {"top_p": 0.9}):
        tokens = fuselage.lm_head_sample(hidden, weight, **given, **options)
        assert (tokens == expected).all(), options
    result = fuselage.lm_head_sample(hidden, weight, return_logprobs=True, **given)
    assert (result.tokens == expected).all() and (result.logprobs == 0).all()
    for sums in (False, True):
        shards = [
            fuselage.lm_head_sample_shard(
                *(hidden, weight[begin:end]),
                vocab_offset=begin,
                offset=None,
                return_log_sum_exp=sums,
                **given,
            )
            for begin, end in ((0, 1000), (1000, 1500), (1500, vocab))
        ]
        combined = fuselage.combine_shard_samples(shards, return_logprobs=sums)
        tokens = combined[0] if sums else combined
        assert (tokens == expected).all()
        assert not sums or (combined[1] == 0).all()


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_a_power_of_two_for_logits_and_temperature_changes_nothing(fuselage, device, options):
    """Bit for bit: in units of a power of two scores are what they are without."""
    logits = 3 * torch.randn(16, 5003, device=device)
    hidden, weight = logits[:, :8].contiguous(), torch.randn(5003, 8, device=device)
    given = {"seed": 5, "num_samples": 3, **options}
    expected = fuselage.gumbel_sample(logits, **given)
    expected_of_head = fuselage.lm_head_sample(hidden, weight, **given)
    for power in (-90, -60, -7, -1, 3, 60):
        scaled = {"temperature": 2.0**power, **given}
        assert torch.equal(fuselage.gumbel_sample(logits * 2.0**power, **scaled), expected)
        tokens = fuselage.lm_head_sample(hidden, weight * 2.0**power, **scaled)
        assert torch.equal(tokens, expected_of_head)
    zeros = torch.zeros(64, 5003, device=device)
    drawn = fuselage.gumbel_sample(zeros, temperature=TINY, seed=5)
    assert torch.equal(drawn, fuselage.gumbel_sample(zeros, seed=5))


# Vocabularies

MOST = 2**26


@pytest.mark.parametrize("vocab", [2**24 - 1, 2**24, 2**24 + 1, MOST])
def test_log_probabilities_of_many_equal_logits(fuselage, device, vocab):
    logits = torch.zeros(1, vocab, dtype=torch.bfloat16, device=device)
    result = fuselage.gumbel_sample(logits, seed=1, return_logprobs=True)
    expected = -math.log(vocab)
    # The logarithm of float32 errs by units of its last place, 2e-6.
    assert abs(result.logprobs.item() - expected) < 4e-6
    assert result.filtered_logprobs.item() == result.logprobs.item()
    assert 0 <= result.tokens.item() < vocab


@pytest.mark.long
def test_top_p_of_many_equal_logits(fuselage, device):
    """Half of them have 1 / (1 + 1/e) = 0.731 of the probability."""
    half = 2**24
    logits = torch.zeros(1, 2 * half, dtype=torch.bfloat16, device=device)
    logits[:, ::2] = -1
    for top_p, allowed in ((0.7, half), (0.75, 2 * half)):
        result = fuselage.gumbel_sample(
            logits, seed=1, top_p=top_p, num_samples=4, return_logprobs=True
        )
        total = half * (1 + math.exp(-1))
        logits_of = logits[0, result.tokens].float()
        kept = half if allowed == half else total
        assert allowed != half or (logits_of == 0).all()
        assert (result.logprobs - (logits_of - math.log(total))).abs().max() < 4e-6
        assert (result.filtered_logprobs - (logits_of - math.log(kept))).abs().max() < 4e-6


@pytest.mark.long
def test_a_head_of_many_equal_logits(fuselage, device):
    vocab, cut = 2**24 + 2**20, 2**24
    hidden = torch.zeros(1, 8, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(vocab, 8, dtype=torch.bfloat16, device=device)
    result = fuselage.lm_head_sample(hidden, weight, seed=1, return_logprobs=True)
    assert abs(result.logprobs.item() + math.log(vocab)) < 4e-6
    shards = [
        fuselage.lm_head_sample_shard(
            *(hidden, weight[begin:end]),
            vocab_offset=begin,
            seed=1,
            offset=None,
            return_log_sum_exp=True,
        )
        for begin, end in ((0, cut), (cut, vocab))
    ]
    token, logprob = fuselage.combine_shard_samples(shards, return_logprobs=True)
    assert token.item() == result.tokens.item()
    assert abs(logprob.item() + math.log(vocab)) < 4e-6


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.5, "return_logprobs": True}])
def test_the_last_of_the_largest_vocabulary_is_drawn(fuselage, device, options):
    logits = torch.zeros(2, MOST, dtype=torch.bfloat16, device=device)
    logits[:, -1] = 100
    drawn = fuselage.gumbel_sample(logits, seed=1, **options)
    drawn = drawn if isinstance(drawn, torch.Tensor) else drawn.tokens
    assert (drawn == MOST - 1).all()
    hidden = torch.ones(2, 8, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(MOST, 8, dtype=torch.bfloat16, device=device)
    weight[-1] = 100
    drawn = fuselage.lm_head_sample(hidden, weight, seed=1, **options)
    drawn = drawn if isinstance(drawn, torch.Tensor) else drawn.tokens
    assert (drawn == MOST - 1).all()


@pytest.mark.kernels_ci
def test_a_larger_vocabulary_is_refused(fuselage, device):
    rows = torch.empty(MOST + 1, 1, dtype=torch.float16, device=device)
    message = "fuselage::{}: {} must be at most 2^26, got 67108865".replace("^", r"\^")
    with pytest.raises(RuntimeError, match=message.format("gumbel_sample", "columns of `logits`")):
        fuselage.gumbel_sample(rows.T, seed=1)
    hidden = torch.ones(1, 1, dtype=torch.float16, device=device)
    for sample in ("lm_head_sample", "lm_head_sample_shard"):
        shard = {"vocab_offset": 0, "offset": None} if sample.endswith("shard") else {}
        with pytest.raises(RuntimeError, match=message.format(sample, "rows of `weight`")):
            getattr(fuselage, sample)(hidden, rows, seed=1, **shard)
