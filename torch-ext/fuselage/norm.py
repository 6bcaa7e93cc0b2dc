"""Root mean square normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

import math
from typing import Optional

import torch

from ._autocast import Norm, register_autocast
from ._autograd import (
    below_autograd,
    mark_written,
    needs_grad,
    no_double_backward,
    register_autograd,
    uses_registered,
)
from ._fake import new_like, register_fake
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_rms_norm = ops.rms_norm.default
_rms_norm_fwd = ops.rms_norm_fwd.default
_rms_norm_bwd = ops.rms_norm_bwd.default
_fused_add_rms_norm = ops.fused_add_rms_norm.default
_fused_add_rms_norm_fwd = ops.fused_add_rms_norm_fwd.default
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
        if uses_registered():
            return _rms_norm_fwd(x, weight, eps, weight_offset, cast_before_weight, out_dtype)[0]
        return _RMSNorm.apply(x, weight, eps, weight_offset, cast_before_weight, out_dtype)
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
        args = (x, residual, weight, eps, weight_offset, cast_before_weight, out_dtype)
        if uses_registered():
            return _fused_add_rms_norm_fwd(*args)[:2]
        return _FusedAddRMSNorm.apply(*args)
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
        raise RuntimeError(
            "fuselage::fused_add_rms_norm_: writes over its inputs and has no gradient; use "
            "fused_add_rms_norm, or call it under torch.no_grad()"
        )
    _fused_add_rms_norm_inplace(x, residual, weight, eps, weight_offset, cast_before_weight)
    mark_written(x, residual)
    return x, residual


# Autograd: one Function an operator for eager mode, and the same backward registered with the op
# for torch.compile (docs/design-decisions.md has the measurements behind this).


def _rms_norm_setup(ctx, inputs, output):
    x, weight, _, ctx.weight_offset, _, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, rstd)


def _rms_norm_backward(ctx, grad_out, grad_rstd=None):
    if grad_out is None:
        return (None,) * 6
    x, weight, rstd = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    grad_x, grad_weight = _rms_norm_bwd(
        grad_out, None, x, weight, rstd, ctx.weight_offset, needs_x, needs_weight
    )
    return (
        grad_x if needs_x else None,
        grad_weight if needs_weight else None,
        None,
        None,
        None,
        None,
    )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, weight_offset, cast_before_weight, out_dtype):
        with below_autograd():
            out, rstd = _rms_norm_fwd(x, weight, eps, weight_offset, cast_before_weight, out_dtype)
        ctx.weight_offset = weight_offset
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        no_double_backward("rms_norm")
        return _rms_norm_backward(ctx, grad_out)


def _fused_add_rms_norm_setup(ctx, inputs, output):
    _, _, weight, _, ctx.weight_offset, _, _ = inputs
    _, new_residual, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(new_residual, weight, rstd)


def _fused_add_rms_norm_backward(ctx, grad_out, grad_new_residual, grad_rstd=None):
    needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
    needs_sum = needs_x or needs_residual
    if grad_out is None:  # only new_residual was used
        grad_sum, grad_weight = grad_new_residual, None
    else:
        new_residual, weight, rstd = ctx.saved_tensors
        grad_sum, grad_weight = _rms_norm_bwd(
            grad_out,
            grad_new_residual,
            new_residual,
            weight,
            rstd,
            ctx.weight_offset,
            needs_sum,
            needs_weight,
        )
    return (
        grad_sum if needs_x else None,
        grad_sum if needs_residual else None,
        grad_weight if needs_weight else None,
        None,
        None,
        None,
        None,
    )


class _FusedAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, weight_offset, cast_before_weight, out_dtype):
        with below_autograd():
            out, new_residual, rstd = _fused_add_rms_norm_fwd(
                x, residual, weight, eps, weight_offset, cast_before_weight, out_dtype
            )
        ctx.weight_offset = weight_offset
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(new_residual, weight, rstd)
        return out, new_residual

    @staticmethod
    def backward(ctx, grad_out, grad_new_residual):
        no_double_backward("fused_add_rms_norm")
        return _fused_add_rms_norm_backward(ctx, grad_out, grad_new_residual)


register_autograd("rms_norm_fwd", _rms_norm_backward, setup_context=_rms_norm_setup)
register_autograd(
    "fused_add_rms_norm_fwd",
    _fused_add_rms_norm_backward,
    setup_context=_fused_add_rms_norm_setup,
)


register_autocast(Norm(("x",), "weight"), "rms_norm", "rms_norm_fwd")
register_autocast(Norm(("x", "residual"), "weight"), "fused_add_rms_norm", "fused_add_rms_norm_fwd")


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _out_like(x, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def _rstd_like(x):
    return x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.float32)


@register_fake("rms_norm")
def _(x, weight, eps, weight_offset, cast_before_weight, out_dtype):
    return _out_like(x, out_dtype)


@register_fake("rms_norm_fwd")
def _(x, weight, eps, weight_offset, cast_before_weight, out_dtype):
    return _out_like(x, out_dtype), _rstd_like(x)


@register_fake("rms_norm_bwd")
def _(grad_out, grad_new_residual, x, weight, rstd, weight_offset, needs_grad_x, needs_grad_weight):
    return new_like(x, (needs_grad_x, x), (needs_grad_weight, weight))


@register_fake("fused_add_rms_norm")
def _(x, residual, weight, eps, weight_offset, cast_before_weight, out_dtype):
    return _out_like(x, out_dtype), _out_like(x, None)


@register_fake("fused_add_rms_norm_fwd")
def _(x, residual, weight, eps, weight_offset, cast_before_weight, out_dtype):
    return _out_like(x, out_dtype), _out_like(x, None), _rstd_like(x)


@register_fake("fused_add_rms_norm_")
def _(x, residual, weight, eps, weight_offset, cast_before_weight):
    return None
