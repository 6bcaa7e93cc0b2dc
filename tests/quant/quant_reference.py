"""What quant_fp8 is compared with: the formula, in PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
GROUP = 128


def scales(amax: Tensor, dtype: torch.dtype, scale_ue8m0: bool = False) -> Tensor:
    """Float32 scales of float32 maxima. NOTE: a Python number would make a product of the division.

    PyTorch's GPU kernels multiply by the reciprocal of a number that they know beforehand.
    """
    scale = amax / torch.full_like(amax, LIMITS[dtype])
    if scale_ue8m0:
        mantissa, exponent = torch.frexp(scale)
        power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
        power = power.clamp(min=2.0**-126)
        scale = torch.where((scale > 0) & scale.isfinite(), power, scale)
    return torch.where(scale == 0, 1.0, scale)


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """q of x: divided, cut off and rounded, one after the other."""
    quotient = (x.float() / scale).clamp(-LIMITS[dtype], LIMITS[dtype])
    if dtype == torch.int8:
        return quotient.nan_to_num(nan=0.0).round().to(dtype)
    return quotient.to(dtype)


def quant_fp8(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    group_size: int = -1,
    scale_ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    if scale is not None:
        return rounded(x, scale, dtype), scale
    if group_size == -1:
        amax = x.float().abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(1).float()
        scale = scales(amax.expand(*x.shape[:-1], 1), dtype, scale_ue8m0)
        return rounded(x, scale, dtype), scale
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % GROUP))
    groups = padded.unflatten(-1, (-1, GROUP))
    scale = scales(groups.abs().amax(-1), dtype, scale_ue8m0)
    return rounded(x, scale.repeat_interleave(GROUP, -1)[..., : x.shape[-1]], dtype), scale


def bits(q: Tensor) -> Tensor:
    """The bits of q, of which every NaN has the same."""
    codes = q.view(torch.uint8).clone()
    if q.dtype != torch.int8:
        codes[q.float().isnan()] = 0x7F
    return codes
