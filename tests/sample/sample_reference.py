"""The references of sampling: Philox in NumPy, noise in float64, filters by sorting."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of counters `[..., 4]` and keys `[..., 2]`, all uint32 values."""
    low = np.uint64(0xFFFFFFFF)
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [key[..., i].astype(np.uint64) for i in range(2)]
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & low, (p0 >> 32) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, -1).astype(np.uint32)


def words(number, seed, offset, stream=0, sample=0) -> np.ndarray:
    """Philox's four words `[..., 4]` of a number, for one row's sample."""
    parts = [np.asarray(v).astype(np.uint64) for v in (number, seed, offset, stream, sample)]
    number, seed, offset, stream, sample = np.broadcast_arrays(*parts)
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = [number & low, np.uint64(256) * stream + sample, offset & low, offset >> high]
    return philox(np.stack(counter, -1), np.stack([seed & low, seed >> high], -1))


def group(index, *key) -> tuple[np.ndarray, np.ndarray]:
    """The word of the smallest exponential of each logit's group of 16, and its position."""
    made = words(np.asarray(index) >> 4, *key)
    return made[..., 0], made[..., 1] >> 28


def own_word(index, seed, offset, *row) -> np.ndarray:
    """The word of each logit for itself, of an offset whose highest bit is the other."""
    index = np.asarray(index)
    made = words(index >> 2, seed, np.asarray(offset).astype(np.uint64) ^ np.uint64(2**63), *row)
    which = np.broadcast_to(index & 3, made.shape[:-1])
    return np.take_along_axis(made, which[..., None], -1)[..., 0]


def exponential(word: np.ndarray) -> np.ndarray:
    """-log(u) in float64, of u = (word + 1/2) / 2^32 whose distance to 1 is exact."""
    word = word.astype(np.float64)
    small = -np.log((word + 0.5) / 2**32)
    near_one = -np.log1p(-(2**32 - 1 - word + 0.5) / 2**32)
    return np.where(word < 2**31, small, near_one)


def noise(index, seed, offset, stream=0, sample=0) -> np.ndarray:
    """The Gumbel noise in float64 of logits, seeds, offsets and rows that are numbers or arrays.

    One position of 16 has the smallest of their exponentials, a 16th of one; each other position
    has that plus an exponential of its own.
    """
    key = (seed, offset, stream, sample)
    word, position = group(index, *key)
    own = np.where(position == np.asarray(index) % 16, 0, exponential(own_word(index, *key)))
    return -np.log(exponential(word) / 16 + own)


def drawn_noise(fuselage, device, index: int, seed: Tensor, offset: Tensor, num_samples=1):
    """The library's noise `[rows, num_samples]` of a logit: the score of a head's only one, 0."""
    return fuselage.lm_head_sample_shard(
        torch.zeros(max(len(seed), len(offset)), 8, device=device),
        torch.zeros(1, 8, device=device),
        vocab_offset=index,
        seed=seed.to(device),
        offset=offset.to(device, copy=True),
        num_samples=num_samples,
    ).scores.cpu()


def scores(logits: Tensor, temperature, seed, offset, stream=0, sample=0, vocab_offset=0):
    """Of one row, in float64."""
    index = np.arange(logits.shape[0]) + vocab_offset
    g = noise(index, seed, offset, stream, sample)
    return logits.double() / temperature + torch.from_numpy(g)


def probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.softmax(logits.double() / temperature, -1)


def allowed(logits: Tensor, temperature=1.0, top_k=None, top_p=None, min_p=None) -> Tensor:
    """Which logits of one row may be drawn, by the definition."""
    logits = logits.double()
    p = probabilities(logits, temperature)
    order = torch.argsort(logits, descending=True, stable=True)
    bound = -torch.inf
    if top_k is not None:
        bound = logits[order[min(top_k, len(order)) - 1]].item()
    p = torch.where(logits >= bound, p, 0.0)
    p = p / p.sum()
    if top_p is not None and top_p < 1:
        count = int((p[order].cumsum(0) < top_p).sum()) + 1
        bound = max(bound, logits[order[min(count, len(order)) - 1]].item())
    keep = logits >= bound
    if min_p:  # as logarithms: probabilities of a high temperature are all rounded to the same
        keep &= (logits - logits.max()) / temperature >= math.log(min_p)
    return keep & (logits > -torch.inf)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def chi_squared(counts: np.ndarray, expected: np.ndarray, minimum: float = 10.0) -> float:
    """Standard deviations of the statistic from its mean; bins with few expected are one."""
    rare = expected < minimum
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    degrees = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))
