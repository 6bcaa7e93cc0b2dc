"""Quantisation to eight bits: float8 and int8, with scales.

One kernel reads x once, finds the largest value of each row or group, and writes q and the scales.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch

from ._arguments import number_of
from ._autocast import Rule, register_autocast
from ._autograd import needs_grad
from ._fake import fake_kernel_of
from ._ops import ops

# Looked up once: a call through the packet pays for the look-up every time.
_quant_fp8 = ops.quant_fp8.default

GROUP = 128  # columns of a group
_LAYOUTS = {"row": False, "col_tma": True}


class Quantized(NamedTuple):
    """Numbers of eight bits and their scales: `x` is about `q * scale`."""

    q: torch.Tensor  # [..., dim]
    scale: torch.Tensor  # float32


def quant_fp8(
    x: torch.Tensor,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: int = -1,
    scale_layout: str = "row",
    scale_ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    ste: bool = False,
) -> Quantized:
    """Quantises `x` to float8 or int8: a scale a row, a scale for each 128 columns, or a given one.

        scale = max(|x|) / limit           of the row or the group, in float32
        q = round(x / scale)               to nearest even, saturating at limit

    where limit is 448 for float8_e4m3fn, 57344 for float8_e5m2, and 127 for int8. `q` has the bits
    of `(x.float() / scale).clamp(-limit, limit).to(dtype)` on every device, for int8 with `round()`
    before the last.

    A row or group whose scale would be zero, as one of zeros, has scale 1. One with a NaN has a
    scale of NaN, and `q` is all NaN. One with an infinity has an infinite scale: infinities become
    NaN, and all else zero. With a given scale, infinities saturate and each NaN stays one. In int8,
    which has no NaN, these are zeros: the scale tells.

    Deterministic, and a row's result does not depend on other rows.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32, with any row stride.
        scale: One float32 element, for all of `x`: nothing is looked for in `x` then. It should be
            positive.
        group_size: -1 for a scale a row, or 128 for one of each 128 columns; the last group of a
            row may be shorter.
        scale_layout: "row" for contiguous scales, or "col_tma" for column-major ones, of which each
            column starts at a multiple of 4 elements, as TMA and blockwise products want them.
        scale_ue8m0: Round the scales up to powers of two, 2^-126 at least.
        dtype: `torch.float8_e4m3fn`, `torch.float8_e5m2` or `torch.int8`.
        ste: Give `x` a straight-through gradient, that of `x / scale` with a constant scale. A
            gradient of `q` has the dtype of `q`, whatever it is computed in: PyTorch rounds it.
            Not for int8, which has no gradients.

    Returns:
        `Quantized(q, scale)`: `q` `[..., dim]`, contiguous; `scale` float32, `[..., 1]` of rows,
        `[..., ceil(dim / 128)]` of groups, and the given one where there is one.

    Raises:
        RuntimeError: A wrong dtype, shape, device or option, naming the argument, what it must be
            and what it is; or `x` requires a gradient, and `ste` is False.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; groups: DeepSeek-AI,
    "DeepSeek-V3", 2024; powers of two: OCP Microscaling Formats, 2023.
    """
    options = (scale, group_size, number_of_layout("quant_fp8", scale_layout), scale_ue8m0, dtype)
    if needs_grad(x):
        _refuse_gradient(ste, dtype)
        q, made = _StraightThrough.apply(x, *options)
    else:
        q, made = _quant_fp8(x, *options)
    return Quantized(q, made if scale is None else scale)


def number_of_layout(op: str, scale_layout: str) -> bool:
    """Whether scales are column-major, as the ops take it."""
    return number_of(op, "scale_layout", scale_layout, _LAYOUTS)


def quantize_rows(x: torch.Tensor, in_groups: bool) -> Quantized:
    """q in float8_e4m3fn and scales of rows, or of groups; no gradient is asked for."""
    options = (GROUP, True) if in_groups else (-1, False)
    return Quantized(*_quant_fp8(x, None, *options, False, torch.float8_e4m3fn))


def _refuse_gradient(ste: bool, dtype: torch.dtype) -> None:
    if not ste:
        raise RuntimeError(
            "fuselage::quant_fp8: has no gradient; pass ste=True for a straight-through one, "
            "detach `x`, or call it under torch.no_grad()"
        )
    if dtype == torch.int8:
        raise RuntimeError("fuselage::quant_fp8: `ste` is for float8: int8 has no gradients")


class _StraightThrough(torch.autograd.Function):
    """q, whose gradient is that of x / scale."""

    @staticmethod
    def forward(ctx, x, scale, group_size, by_columns, scale_ue8m0, dtype):
        q, made = _quant_fp8(x, scale, group_size, by_columns, scale_ue8m0, dtype)
        ctx.mark_non_differentiable(made)
        ctx.save_for_backward(made if scale is None else scale)
        ctx.x_dtype, ctx.group_size = x.dtype, group_size
        return q, made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_q, _):
        (scale,) = ctx.saved_tensors
        if ctx.group_size != -1:
            scale = scale.repeat_interleave(ctx.group_size, -1)[..., : grad_q.shape[-1]]
        elif scale.numel() == 1:
            scale = scale.reshape(())
        return (grad_q.float() / scale).to(ctx.x_dtype), None, None, None, None, None


register_autocast(Rule(("x",), float32=("scale",)), "quant_fp8")


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


@fake_kernel_of("quant_fp8")
def fake_quantized(x, scale, group_size, by_columns, scale_ue8m0, dtype):
    q = x.new_empty(x.shape, dtype=dtype)
    if scale is not None:
        return q, x.new_empty((0,), dtype=torch.float32)
    groups = 1 if group_size == -1 else (x.shape[-1] + group_size - 1) // group_size
    shape = (*x.shape[:-1], groups)
    if not by_columns:
        return q, x.new_empty(shape, dtype=torch.float32)
    strides, stride = [], 1
    for size in reversed(x.shape[:-1]):
        strides.insert(0, stride)
        stride = stride * torch.sym_max(size, 1)
    strides.append((stride + 3) // 4 * 4)
    return q, x.new_empty_strided(shape, strides, dtype=torch.float32)
