"""top_k, top_p and min_p: what may be drawn, and with which probability."""

from __future__ import annotations

import numpy as np
import pytest
import sample_reference as reference
import torch

FILTERS = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 100_000},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.0},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 400, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.2, "temperature": 2.0},
    {"top_k": 20, "temperature": 0.3},
]


def logits_of(kind: str, vocab: int = 2000) -> torch.Tensor:
    if kind == "normal":
        return 3 * torch.randn(4, vocab)
    if kind == "coarse":  # of few values, so that there are ties everywhere
        return (2 * torch.randn(4, vocab)).round()
    if kind == "equal":
        return torch.full((4, vocab), -3.5)
    if kind == "wide":  # hardly any weight but one's
        return 100 * torch.randn(4, vocab)
    if kind == "peaked":  # one so far ahead that the others are alike to it
        logits = 2 * torch.randn(4, vocab)
        logits[:, vocab // 3] += 60
        return logits
    if kind == "masked":
        logits = torch.randn(4, vocab)
        logits[:, 10:] = -torch.inf
        return logits
    raise ValueError(kind)


def check_filtered(fuselage, device, logits, options):
    """Every token is of the exact set, and has the probability it has there."""
    on_device = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    result = fuselage.gumbel_sample(
        logits.to(device), seed=11, num_samples=32, return_logprobs=True, **on_device
    )
    tokens, logprobs, filtered = (t.cpu() for t in result)
    for row in range(logits.shape[0]):
        own = {n: v[row].item() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
        keep = reference.allowed(logits[row], **own)
        assert keep[tokens[row]].all(), (row, own)
        p = reference.probabilities(logits[row], own.get("temperature", 1.0))
        kept = torch.where(keep, p, 0.0)
        for got, exact in ((logprobs, p), (filtered, kept / kept.sum())):
            expected = exact[tokens[row]].log()
            error = (got[row].double() - expected).abs()
            assert (error <= 1e-6 + 2e-7 * expected.abs()).all(), (own, error.max())
    return tokens


@pytest.mark.kernels_ci
@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "coarse", "equal", "wide", "peaked", "masked"])
def test_only_the_exact_set_is_drawn(fuselage, device, kind, options):
    check_filtered(fuselage, device, logits_of(kind), options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits(fuselage, device, dtype):
    logits = logits_of("normal").to(dtype)
    check_filtered(fuselage, device, logits, {"top_k": 30, "top_p": 0.8})


def test_every_row_has_its_own_options(fuselage, device):
    options = {
        "temperature": torch.tensor([1.0, 0.5, 2.0, 1.0]),
        "top_k": torch.tensor([5, 100, 2000, 7]),
        "top_p": torch.tensor([0.9, 1.0, 0.3, 0.99]),
        "min_p": torch.tensor([0.0, 0.1, 0.01, 0.5]),
    }
    check_filtered(fuselage, device, logits_of("normal"), options)
    logits = logits_of("normal").to(device)
    alike = {name: value[:1].to(device) for name, value in options.items()}
    shared = fuselage.gumbel_sample(logits, seed=1, num_samples=9, **alike)
    numbers = {name: value.item() for name, value in alike.items()}
    assert torch.equal(shared, fuselage.gumbel_sample(logits, seed=1, num_samples=9, **numbers))


def test_top_k_below_one_is_no_filter(fuselage, device):
    logits = logits_of("normal").to(device)
    unfiltered = fuselage.gumbel_sample(logits, seed=1, num_samples=50)
    for top_k in (0, -1, torch.tensor([0, -1, 0, -1], device=device)):
        drawn = fuselage.gumbel_sample(logits, seed=1, num_samples=50, top_k=top_k)
        assert torch.equal(drawn, unfiltered)


def test_a_large_vocabulary(fuselage, device):
    logits = 2 * torch.randn(2, 151936)
    for options in ({"top_k": 50}, {"top_p": 0.9}, {"top_k": 20000, "min_p": 1e-3}):
        check_filtered(fuselage, device, logits, options)
    # All in one bin, so that lists overflow.
    check_filtered(fuselage, device, 1e-4 * torch.randn(2, 151936), {"top_p": 0.3})
    check_filtered(fuselage, device, 1e-4 * torch.randn(2, 151936), {"top_k": 5})


EVERY_FILTER = [
    {"top_k": 50},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "vocab_offset": 3},
    {"top_k": 60000, "top_p": 0.999},
    {"num_samples": 3},
]


@pytest.mark.parametrize("kind", ["normal", "equal", "peaked", "coarse"])
def test_the_length_of_a_row_does_not_matter(fuselage, device, kind):
    """What is -inf at the end of a row changes nothing, in rows of any length."""
    logits = logits_of(kind, 30011)[:2].to(device)
    longer = torch.full((2, 450_001), -torch.inf, device=device)
    for options in EVERY_FILTER:
        options = {"seed": 3, "return_logprobs": True, **options}
        expected = fuselage.gumbel_sample(logits, **options)
        for vocab in (30012, 151_936, 450_001) if device == "cuda" else (30012,):
            padded = longer[:, :vocab]
            padded[:, :30011] = logits
            for a, b in zip(expected, fuselage.gumbel_sample(padded, **options), strict=True):
                assert torch.equal(a, b), (vocab, options)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("kind", ["normal", "equal", "peaked", "coarse", "near"])
def test_a_gpu_filters_as_a_cpu(fuselage, device, kind):
    for vocab in (1001, 20011, 151_935):
        logits = 1e-4 * torch.randn(2, vocab) if kind == "near" else logits_of(kind, vocab)[:2]
        bitmask = torch.randint(-(2**31), 2**31, (2, (vocab + 31) // 32)).int()
        for options in EVERY_FILTER:
            for mask in (None, bitmask):
                results = [
                    fuselage.gumbel_sample(
                        logits.to(on),
                        bitmask=None if mask is None else mask.to(on),
                        seed=5,
                        return_logprobs=True,
                        **options,
                    )
                    for on in ("cpu", device)
                ]
                for a, b in zip(*results, strict=True):
                    assert torch.equal(a, b.cpu()), (vocab, options)


@pytest.mark.parametrize("options", EVERY_FILTER, ids=str)
def test_filters_do_not_depend_on_the_batch(fuselage, device, options):
    vocab, batch = (151_936, 200) if device == "cuda" else (5000, 20)
    logits = (2 * torch.randn(1, vocab)).to(device)
    alone = fuselage.gumbel_sample(logits, seed=3, **options)
    together = fuselage.gumbel_sample(logits.expand(batch, -1), seed=3, **options)
    assert torch.equal(alone, together[:1])


def test_what_is_filtered_is_drawn_as_often_as_it_should(fuselage, device):
    logits = torch.randn(1, 300)
    options = {"top_k": 60, "top_p": 0.8, "min_p": 0.05}
    tokens = fuselage.gumbel_sample(
        logits.expand(1024, -1).to(device), seed=3, num_samples=64, **options
    )
    keep = reference.allowed(logits[0], **options)
    p = torch.where(keep, reference.probabilities(logits[0]), 0.0)
    counts = torch.bincount(tokens.flatten().cpu(), minlength=300).numpy()
    assert counts[~keep.numpy()].sum() == 0
    expected = (p / p.sum() * counts.sum()).numpy()
    assert abs(reference.chi_squared(counts[keep.numpy()], expected[keep.numpy()])) < 5.5


@pytest.mark.kernels_ci
def test_bias_and_bitmask(fuselage, device):
    logits = torch.randn(3, 1000)
    allowed = torch.rand(3, 1000) < 0.01
    allowed[:, 999] = True
    bits = torch.zeros(3, 32, dtype=torch.int64)
    for i in range(1000):
        bits[:, i // 32] |= allowed[:, i].long() << (i % 32)
    bitmask = torch.where(bits >= 2**31, bits - 2**32, bits).int()
    bias = torch.where(allowed, 0.0, -torch.inf)
    masked = fuselage.gumbel_sample(
        logits.to(device), bitmask=bitmask.to(device), seed=1, num_samples=64
    )
    assert allowed.gather(1, masked.cpu()).all()
    for dtype in (torch.float32, torch.bfloat16):
        biased = fuselage.gumbel_sample(
            logits.to(device, dtype), bias=bias.to(device, dtype), seed=1, num_samples=64
        )
        expected = fuselage.gumbel_sample(
            logits.to(device, dtype), bitmask=bitmask.to(device), seed=1, num_samples=64
        )
        assert torch.equal(biased, expected)
    for row in (bias[:1], bias[0]):
        one = fuselage.gumbel_sample(logits.to(device), bias=row.to(device), seed=1)
        assert allowed[0].gather(0, one.flatten().cpu()).all()
    one = fuselage.gumbel_sample(logits.to(device), bitmask=bitmask[0].to(device), seed=1)
    assert allowed[0].gather(0, one.flatten().cpu()).all()
    values = torch.randn(3, 1000)
    added = fuselage.gumbel_sample(logits.to(device), bias=values.to(device), seed=1, top_k=7)
    assert torch.equal(added, fuselage.gumbel_sample((logits + values).to(device), seed=1, top_k=7))


def test_a_row_without_a_token_gives_minus_one(fuselage, device):
    logits = torch.randn(3, 100, device=device)
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    for options in ({}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.5, "min_p": 0.1}):
        tokens, logprobs, filtered = fuselage.gumbel_sample(
            logits, seed=1, return_logprobs=True, **options
        )
        assert tokens[1].item() == -1
        assert logprobs[1].item() == filtered[1].item() == -np.inf
        assert tokens[0].item() >= 0 and tokens[2].item() not in (-1, 5)
        assert logprobs[[0, 2]].isfinite().all() and filtered[[0, 2]].isfinite().all()


def test_an_infinite_logit_is_drawn(fuselage, device):
    logits = torch.randn(2, 100, device=device)
    logits[:, [30, 70]] = torch.inf
    for options in ({}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.5, "min_p": 0.1}):
        assert fuselage.gumbel_sample(logits, seed=1, **options).flatten().tolist() == [30, 30]
