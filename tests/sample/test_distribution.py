"""Whether draws are distributed as they should be, and independent."""

from __future__ import annotations

import numpy as np
import pytest
import sample_reference as reference
import torch
from harness import on_devices

# Of a statistic that is nearly normal: one in ten million.
LIMIT = 5.5


def counts_of(fuselage, logits: torch.Tensor, draws: int, *, seed: int, **options) -> np.ndarray:
    """How often each token of one row is drawn."""
    vocab = logits.shape[-1]
    rows = min(64, max(1, draws // 256))
    batch = logits.expand(rows, -1)
    counts = torch.zeros(vocab, dtype=torch.int64, device=logits.device)
    offset = torch.zeros(1, dtype=torch.int64, device=logits.device)
    seeds = torch.tensor([seed], device=logits.device)
    done = 0
    while done < draws:
        tokens = fuselage.gumbel_sample(
            batch, num_samples=256, seed=seeds, offset=offset, **options
        )
        counts += torch.bincount(tokens.flatten(), minlength=vocab)
        done += tokens.numel()
    return counts.cpu().numpy()


def check(fuselage, logits, draws, *, seed, temperature=1.0):
    counts = counts_of(fuselage, logits, draws, seed=seed, temperature=temperature)
    p = reference.probabilities(logits[0].cpu(), temperature).numpy()
    deviation = reference.chi_squared(counts, counts.sum() * p)
    assert abs(deviation) < LIMIT, deviation
    return counts, p


@pytest.mark.long
@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("vocab", "draws"), [(100, 400_000), (512, 100_000)])
def test_chi_squared(fuselage, device, vocab, draws, scale):
    draws *= 25 if device == "cuda" else 1
    logits = scale * torch.randn(1, vocab).to(device)
    check(fuselage, logits, draws, seed=int(scale) + vocab)


@on_devices([4096], [10_000_000], "draws")
def test_chi_squared_of_a_large_vocabulary(fuselage, device, draws):
    """With a tail of tokens whose probabilities are below 1e-6 each, and sum up to a tenth."""
    logits = torch.zeros(1, 151936)
    logits[:, :1000] = 5 + 2 * torch.randn(1000)
    logits[:, 1000:] -= torch.rand(150936)
    tail = torch.logsumexp(logits[0, 1000:], 0) - torch.logsumexp(logits[0, :1000], 0)
    logits[:, 1000:] += np.log(0.1 / 0.9) - tail
    counts, p = check(fuselage, logits.to(device), draws, seed=77)
    assert p[1000:].max() < 2e-6
    expected = counts.sum() * p[1000:].sum()
    assert abs(counts[1000:].sum() - expected) < LIMIT * np.sqrt(expected * 0.9)


def test_the_tail_is_drawn_as_often_as_it_should(fuselage, device):
    """One token has all but 1e-4; of the others each has below 1e-6."""
    logits = torch.zeros(1, 512)
    logits[0, 7] = np.log(511 / 1e-4)
    draws = 20_000_000 if device == "cuda" else 1_000_000
    counts = counts_of(fuselage, logits.to(device), draws, seed=5)
    rare, expected = counts.sum() - counts[7], counts.sum() * 1e-4
    assert abs(rare - expected) < LIMIT * np.sqrt(expected), (rare, expected)


def test_many_seeds(fuselage, device):
    """A draw of each of many seeds is as good as many draws of one."""
    logits = torch.randn(1, 50)
    rows = 200_000
    tokens = fuselage.gumbel_sample(
        logits.expand(rows, -1).to(device), seed=torch.arange(rows, device=device)
    )
    counts = torch.bincount(tokens.flatten().cpu(), minlength=50).numpy()
    expected = rows * reference.probabilities(logits[0]).numpy()
    assert abs(reference.chi_squared(counts, expected)) < LIMIT


def check_independent(first: torch.Tensor, second: torch.Tensor, size: int) -> None:
    """Of uniform draws, all pairs are as frequent."""
    pairs = (first.flatten() * size + second.flatten()).cpu()
    counts = torch.bincount(pairs, minlength=size * size).numpy()
    deviation = reference.chi_squared(counts, np.full(size * size, len(pairs) / size**2))
    assert abs(deviation) < LIMIT, deviation


def test_rows_steps_and_samples_are_independent(fuselage, device):
    size = 16
    logits = torch.zeros(4096, size, device=device)
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    steps = [
        fuselage.gumbel_sample(
            logits, seed=torch.tensor([1], device=device), offset=offset, num_samples=16
        )
        for _ in range(2)
    ]
    check_independent(steps[0], steps[1], size)
    check_independent(steps[0][:, ::2], steps[0][:, 1::2], size)
    check_independent(steps[0][::2], steps[0][1::2], size)
    other = fuselage.gumbel_sample(logits, seed=2, num_samples=16)
    check_independent(steps[0], other, size)
