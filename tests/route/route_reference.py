"""topk_softmax in float64, as the formula stands. Gradients are autograd's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    weights: Tensor
    indices: Tensor
    # The smallest distance, but zero, of two values that decide about the choice of a row.
    gap: Tensor


def group_values(choice: Tensor, score: str, num_groups: int) -> Tensor:
    groups = choice.unflatten(-1, (num_groups, -1))
    if score == "softmax":
        return groups.amax(-1)
    return groups.topk(2, -1).values.sum(-1)


def in_order(values: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Indices, the largest value first, of equal ones the first; NaN is larger than any number."""
    values = torch.where(values.isnan(), torch.nan, values)  # a GPU sorts those with a sign last
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    if allowed is None:
        return order
    refused = ~allowed.gather(-1, order)
    return order.gather(-1, torch.sort(refused.int(), dim=-1, stable=True).indices)


def gap_of(values: Tensor, order: Tensor, k: int) -> Tensor:
    """The smallest distance of neighbours in the order that are not equal, up to the first left."""
    between = -values.gather(-1, order[..., : k + 1]).diff(dim=-1)
    between = torch.where(between > 0, between, torch.inf)
    ends = between.new_full((*between.shape[:-1], 1), torch.inf)
    return torch.cat((between, ends), -1).amin(-1)


def topk_softmax(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    renormalize: bool = True,
) -> Chosen:
    scores = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    # Without a bias the order is that of the logits, also where scores are NaN for an infinity.
    choice = logits if bias is None else scores + bias.to(scores)
    of_groups = logits if bias is None and score == "softmax" else scores
    of_groups = choice if bias is not None else of_groups
    choice, of_groups = choice.detach(), of_groups.detach()
    allowed, gap = None, torch.full(logits.shape[:-1], torch.inf, device=logits.device)
    if num_groups is not None:
        groups = (
            group_values(of_groups, score, num_groups) if num_groups > 1 else of_groups[..., :1]
        )
        order = in_order(groups)
        gap = gap_of(groups, order, topk_groups)
        mask = torch.zeros_like(groups, dtype=torch.bool)
        mask.scatter_(-1, order[..., :topk_groups], True)
        allowed = mask.repeat_interleave(logits.shape[-1] // num_groups, -1)
    order = in_order(choice, allowed)
    gap = torch.minimum(gap, gap_of(choice, order, k))
    indices = order[..., :k]
    weights = scores.gather(-1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if score == "sigmoid" else 0))
    return Chosen(weights, indices, gap)
