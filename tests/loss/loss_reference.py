"""The loss family in float64, as the formulas stand. Gradients are autograd's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    logit_softcap: float | None = None,
    token_weights: Tensor | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    x = soft_capped(logits, logit_softcap).reshape(-1, logits.shape[-1])
    flat = targets.flatten().long()
    counted = flat != ignore_index
    losses = F.cross_entropy(
        x, flat, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if lse_square_scale != 0:
        losses = losses + lse_square_scale * torch.logsumexp(x, -1).square() * counted
    if token_weights is not None:
        losses = losses * token_weights.flatten().to(losses)
    losses = torch.where(counted, losses, 0.0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / (counted.sum() if reduction == "mean" else 1)


def log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int = -100,
    **_,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(log_probs, entropy, log_sum_exp, is_greatest)`."""
    x = soft_capped(logits, logit_softcap)
    z = x / temperature
    counted = targets != ignore_index
    index = torch.where(counted, targets, 0).long()[..., None]
    every = torch.log_softmax(z, -1)
    # Of a probability of zero nothing is added, and nothing comes back.
    terms = torch.where(every > -torch.inf, every.exp() * every.clamp(min=-1e4), 0.0)
    found, entropy = every.gather(-1, index)[..., 0], -terms.sum(-1)
    largest = x.gather(-1, index)[..., 0] == x.amax(-1)
    # NOTE: PyTorch's gradient of logsumexp is e^(z - its result), which may be rounded to z.
    top = z.detach().amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    of_rows = (found, entropy, torch.logsumexp(z - top, -1) + top[..., 0])
    return (*(torch.where(counted, t, 0.0) for t in of_rows), largest & counted)
