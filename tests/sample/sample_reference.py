"""The references of sampling: Philox in NumPy, noise in float64, filters by sorting."""

from __future__ import annotations

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


def words(index: Tensor, seed: int, offset: int, stream: int = 0, sample: int = 0) -> np.ndarray:
    """The random word of each logit, by its index."""
    index = index.numpy().astype(np.uint64)
    counter = np.zeros((len(index), 4), np.uint32)
    seed, offset = seed % 2**64, offset % 2**64
    counter[:, 0] = (index >> 2) & 0xFFFFFFFF
    counter[:, 1] = stream * 256 + sample
    counter[:, 2], counter[:, 3] = offset & 0xFFFFFFFF, offset >> 32
    key = np.broadcast_to(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), (len(index), 2))
    return np.take_along_axis(philox(counter, key), (index & 3).astype(np.int64)[:, None], 1)[:, 0]


def gumbel(word: np.ndarray) -> np.ndarray:
    """-log(-log(u)) in float64, of u = (word + 1/2) / 2^32 whose distance to 1 is exact."""
    word = word.astype(np.float64)
    small = -np.log((word + 0.5) / 2**32)
    near_one = -np.log1p(-(2**32 - 1 - word + 0.5) / 2**32)
    return -np.log(np.where(word < 2**31, small, near_one))


def scores(logits: Tensor, temperature, seed, offset, stream=0, sample=0, vocab_offset=0):
    """Of one row, in float64."""
    index = torch.arange(logits.shape[0]) + vocab_offset
    noise = gumbel(words(index, seed, offset, stream, sample))
    return logits.double() / temperature + torch.from_numpy(noise)


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
    if min_p is not None:
        keep &= p >= min_p * p.max()
    return keep & (logits > -torch.inf)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def chi_squared(counts: np.ndarray, expected: np.ndarray, least: float = 10.0) -> float:
    """Standard deviations of the statistic from its mean; bins with few expected are one."""
    rare = expected < least
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    degrees = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))
