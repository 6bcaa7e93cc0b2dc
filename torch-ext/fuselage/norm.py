"""Root mean square normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

from typing import Optional

import torch

from ._autocast import Norm, register_autocast
from ._autograd import differentiable, mark_written, needs_grad, refuse_gradient
from ._fake import (
    floats_of_rows,
    like,
    register_fake_gradients,
    register_fake_in_place,
    register_fakes,
)
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_rms_norm = ops.rms_norm.default
_rms_norm_bwd = ops.rms_norm_bwd.default
_fused_add_rms_norm = ops.fused_add_rms_norm.default
_fused_add_rms_norm_inplace = ops.fused_add_rms_norm_.default


def rms_norm(
    x: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Root mean square normalisation over the last dimension.

        n   = x / sqrt(mean(x^2, last dim) + eps)
        out = n * (weight_offset + weight)

    All arithmetic is in float32. Models differ in where they round:

    - `rms_norm(x, weight, eps)` rounds the result: `torch.nn.RMSNorm`, gpt-oss, OLMo 2.
    - `rms_norm(x, weight, eps, cast_before_weight=True)` rounds `n`, then the result: Llama,
      Mistral, Qwen, Phi, DeepSeek, T5.
    - `rms_norm(x, weight, eps, weight_offset=1.0)` rounds the result: Gemma and Qwen3-Next, whose
      weights are stored around zero.
    - `rms_norm(x, eps=eps)` rounds the result: query and key norms without a weight.
    - `rms_norm(x, weight, eps, out_dtype=torch.float32)` rounds nothing: a half-precision `x`, and
      a float32 weight and result.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32. Rows of adjacent elements with one stride
            between them are read in place; anything else is made contiguous first.
        weight: `[dim]`, in `x`'s dtype or float32. None multiplies by one, whatever the offset.
        eps: Added to the mean of squares.
        weight_offset: Added to the weight, in float32. 1.0 for weights stored around zero.
        cast_before_weight: Round `n` to `x`'s dtype before the multiplication, as Llama's reference
            does.
        out_dtype: Dtype of the result, by default `x`'s. Float32 for any `x`; any of the three for
            float32 `x`.

    Returns:
        `[..., dim]`, contiguous. Differentiable (once) in `x` and `weight`; roundings count as
        identity.

    Raises:
        RuntimeError: A wrong dtype, shape or device, naming the argument, what it must be and what
            it is.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if needs_grad(x, weight):
        return _differentiable_rms_norm(
            x, weight, eps, weight_offset, cast_before_weight, out_dtype
        )
    return _rms_norm(x, weight, eps, weight_offset, cast_before_weight, out_dtype)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    out_dtype: Optional[torch.dtype] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a residual and normalises the sum, in one pass.

        new_residual = round(x + residual)
        out          = rms_norm(new_residual, weight, eps, ...)

    The sum is rounded to the activations' dtype before it is normalised: the two results are bit
    for bit those of `new_residual = x + residual; out = rms_norm(new_residual, ...)`.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32.
        residual: Shape, dtype and device of `x`.
        weight, eps, weight_offset, cast_before_weight, out_dtype: As in `rms_norm`.

    Returns:
        `(out, new_residual)`, both contiguous and both differentiable (once) in `x`, `residual` and
        `weight`.

    Raises:
        RuntimeError: A wrong dtype, shape or device, naming the argument, what it must be and what
            it is.

    Source: the pre-norm residual block of Llama and its descendants.
    """
    if needs_grad(x, weight) or needs_grad(residual):
        return _differentiable_fused_add_rms_norm(
            x, residual, weight, eps, weight_offset, cast_before_weight, out_dtype
        )
    return _fused_add_rms_norm(
        x, residual, weight, eps, weight_offset, cast_before_weight, out_dtype
    )


def fused_add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_add_rms_norm` for inference, which writes over `x` and `residual`.

    Args:
        x: As in `fused_add_rms_norm`, but it is written to: rows of adjacent elements, one stride
            between all of them, that overlap neither each other nor `residual` nor `weight`.
        residual: Likewise.
        weight, eps, weight_offset, cast_before_weight: As in `rms_norm`.

    Returns:
        `(x, residual)`, the tensors that were given, now `out` and `new_residual`.

    Raises:
        RuntimeError: As `fused_add_rms_norm`, and where a gradient would be needed.
    """
    if needs_grad(x, weight) or needs_grad(residual):
        refuse_gradient("fused_add_rms_norm_", "fused_add_rms_norm")
    _fused_add_rms_norm_inplace(x, residual, weight, eps, weight_offset, cast_before_weight)
    mark_written(x, residual)
    return x, residual


# Gradients.


def _save_rms_norm(ctx, inputs, outputs):
    x, weight, _, ctx.weight_offset, _, _ = inputs
    ctx.save_for_backward(x, weight, outputs[1])


def _rms_norm_backward(ctx, grad_out):
    x, weight, rstd = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    return _rms_norm_bwd(grad_out, None, x, weight, rstd, ctx.weight_offset, needs_x, needs_weight)


def _save_fused_add_rms_norm(ctx, inputs, outputs):
    _, _, weight, _, ctx.weight_offset, _, _ = inputs
    _, new_residual, rstd = outputs
    ctx.save_for_backward(new_residual, weight, rstd)


def _fused_add_rms_norm_backward(ctx, grad_out, grad_new_residual):
    if grad_out is None:  # only new_residual was used
        return grad_new_residual, grad_new_residual, None
    new_residual, weight, rstd = ctx.saved_tensors
    needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
    grad_sum, grad_weight = _rms_norm_bwd(
        *(grad_out, grad_new_residual, new_residual, weight, rstd, ctx.weight_offset),
        *(needs_x or needs_residual, needs_weight),
    )
    return grad_sum, grad_sum, grad_weight


_differentiable_rms_norm = differentiable(
    "rms_norm", save=_save_rms_norm, backward=_rms_norm_backward, results=1
)
_differentiable_fused_add_rms_norm = differentiable(
    "fused_add_rms_norm",
    save=_save_fused_add_rms_norm,
    backward=_fused_add_rms_norm_backward,
    results=2,
)


register_autocast(Norm(("x",), "weight"), "rms_norm", "rms_norm_fwd")
register_autocast(Norm(("x", "residual"), "weight"), "fused_add_rms_norm", "fused_add_rms_norm_fwd")


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _fake_rms_norm(x, weight, eps, weight_offset, cast_before_weight, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), floats_of_rows(x)


def _fake_fused_add_rms_norm(x, residual, *options):
    out, rstd = _fake_rms_norm(x, *options)
    return out, like(x), rstd


register_fakes("rms_norm", _fake_rms_norm, results=1)
register_fakes("fused_add_rms_norm", _fake_fused_add_rms_norm, results=2)
register_fake_in_place("fused_add_rms_norm_")
register_fake_gradients("rms_norm_bwd")
