"""What each operator computes, in float64 and as the formula.

Inputs are float64 and the result is not rounded: the tests say how far off that may be.
Where a formula rounds, it rounds to `dtype`, that of the activations, with a gradient of one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def round_to(dtype: torch.dtype, x: Tensor) -> Tensor:
    rounded = x.detach().to(dtype).to(torch.float64)
    return rounded + (x - x.detach()) if x.requires_grad else rounded


# Norms


def rms_norm(
    x: Tensor,  # [..., dim]
    weight: Tensor | None = None,  # [dim]
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    dtype: torch.dtype,
) -> Tensor:
    n = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        n = round_to(dtype, n)
    return n if weight is None else n * (weight_offset + weight)


def fused_add_rms_norm(
    x: Tensor,  # [..., dim]
    residual: Tensor,  # [..., dim]
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype,
    **options,
) -> tuple[Tensor, Tensor]:
    new_residual = round_to(dtype, x + residual)
    return rms_norm(new_residual, weight, eps, dtype=dtype, **options), new_residual


def rms_norm_gradient_terms(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    grad_out: Tensor | None = None,
    grad_new_residual: Tensor | None = None,
    **_,
) -> dict[str, Tensor]:
    """The sizes of the terms whose sum is the gradient; the sum itself can be far smaller.

    grad_x      = rstd * (g - xhat * mean(g * xhat)) + grad_new_residual, with g = grad_out * factor
    grad_weight = sum over rows of grad_out * xhat
    """
    s = x if residual is None else x + residual
    grad_out = torch.zeros_like(s) if grad_out is None else grad_out.abs()
    rstd = 1 / torch.sqrt(s.pow(2).mean(-1, keepdim=True) + eps)
    xhat = s.abs() * rstd
    g = grad_out if weight is None else grad_out * (weight_offset + weight).abs()
    sizes = rstd * (g + xhat * (g * xhat).mean(-1, keepdim=True))
    if grad_new_residual is not None:
        sizes = sizes + grad_new_residual.abs()
    return {"x": sizes, "residual": sizes, "weight": (grad_out * xhat).sum_to_size(s.shape[-1])}
