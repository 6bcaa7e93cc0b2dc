"""Noises of a group share random words: are they Gumbel-distributed and independent even so?"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import sample_reference as reference
import torch

# Standard deviations from the mean. Chi-squared of the 63 degrees of freedom of each of 153 pairs
# exceeds it five times in a million, the few of the number of great noises twice in ten thousand.
LIMIT = 5.5

GROUP = 16 * 1234567
ROWS, SAMPLES = 1024, 256
DRAWS = ROWS * SAMPLES  # each of another seed and step, or sample
SEEDS, OFFSETS = np.random.default_rng(1).integers(2**62, size=(2, ROWS))


@functools.cache
def noise(fuselage, device: str, index: int) -> np.ndarray:
    """Of a logit, all draws of it."""
    key = torch.from_numpy(SEEDS), torch.from_numpy(OFFSETS)
    drawn = reference.drawn_noise(fuselage, device, index, *key, num_samples=SAMPLES)
    return drawn.flatten().double().numpy()


def quantiles(fuselage, device: str, begin: int, end: int) -> np.ndarray:
    """Of the noises of the group's logits `begin` to `end`: uniform in (0, 1)."""
    noises = np.stack([noise(fuselage, device, GROUP + i) for i in range(begin, end)])
    return np.exp(-np.exp(-noises))


@pytest.mark.long
def test_any_position_may_have_the_smallest_exponential(fuselage, device):
    noises = np.stack([noise(fuselage, device, GROUP + i) for i in range(16)])
    key = (SEEDS[:, None], OFFSETS[:, None], 0, np.arange(SAMPLES))
    position = reference.group(GROUP, *key)[1].flatten()
    at_position = np.take_along_axis(noises, position[None].astype(np.int64), 0)[0]
    # Nearly equal exponentials may have their logarithms' last bits in either order.
    assert (at_position >= noises.max(0) - 3e-6).all()
    counts = np.bincount(noises.argmax(0), minlength=16)
    assert abs(reference.chi_squared(counts, np.full(16, DRAWS / 16))) < LIMIT


def test_noise_of_each_place_is_gumbel(fuselage, device):
    # The rarest bins expect 26 draws of a position, and 42 of all.
    tail = np.array([1e-4, 1e-3, 1e-2])
    edges = np.concatenate([[0], tail, np.linspace(0.02, 0.98, 49), 1 - tail[::-1], [1]])
    of_positions = quantiles(fuselage, device, 0, 16)
    for values in of_positions:
        counts = np.histogram(values, edges)[0]
        assert abs(reference.chi_squared(counts, DRAWS * np.diff(edges))) < LIMIT
    edges = np.concatenate([[0, 1e-5], edges[1:-1], [1 - 1e-5, 1]])
    counts = np.histogram(of_positions, edges)[0]
    assert abs(reference.chi_squared(counts, 16 * DRAWS * np.diff(edges))) < LIMIT


@pytest.mark.parametrize("rate", [1e-3, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_great_noises_of_a_group_are_as_many_as_of_independent_ones(fuselage, device, rate):
    great = (quantiles(fuselage, device, 0, 16) > 1 - rate).sum(0)
    chance = [math.comb(16, k) * rate**k * (1 - rate) ** (16 - k) for k in range(17)]
    counts = np.bincount(great, minlength=17)
    assert abs(reference.chi_squared(counts, DRAWS * np.array(chance))) < LIMIT


@pytest.mark.long
def test_any_two_noises_are_independent(fuselage, device):
    """Of a group and the logits on both sides of it."""
    values = quantiles(fuselage, device, -1, 17)
    correlation = np.corrcoef(values) - np.eye(len(values))
    assert abs(correlation).max() < LIMIT / np.sqrt(DRAWS)
    eighths = (values * 8).astype(np.int64)
    for first, second in itertools.combinations(eighths, 2):
        counts = np.bincount(8 * first + second, minlength=64)
        assert abs(reference.chi_squared(counts, np.full(64, DRAWS / 64))) < LIMIT
