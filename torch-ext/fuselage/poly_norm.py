"""PolyNorm, the activation of the Motif models: alone, times another tensor, and for experts."""

from __future__ import annotations

import math
from typing import Optional

import torch

from ._autocast import Norm, register_autocast
from ._autograd import (
    below_autograd,
    needs_grad,
    no_double_backward,
    register_autograd,
    uses_registered,
)
from ._fake import new_like, register_fake
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_poly_norm = ops.poly_norm.default
_poly_norm_fwd = ops.poly_norm_fwd.default
_poly_norm_bwd = ops.poly_norm_bwd.default
_fused_mul_poly_norm = ops.fused_mul_poly_norm.default
_fused_mul_poly_norm_fwd = ops.fused_mul_poly_norm_fwd.default
_grouped_poly_norm = ops.grouped_poly_norm.default
_grouped_poly_norm_fwd = ops.grouped_poly_norm_fwd.default
_grouped_poly_norm_bwd = ops.grouped_poly_norm_bwd.default


def poly_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """A polynomial of normalised powers of `x`, over the last dimension.

        N(u) = u / sqrt(mean(u^2, last dim) + eps)
        out  = weight[0] * N(x^3) + weight[1] * N(x^2) + weight[2] * N(x) + bias

    All arithmetic is in float32, and rounded once at the end. `x^6` overflows float32 for `x` above
    2.6e6; the cube's term of such a row is then zero, as in PyTorch's formula in float32. Its
    gradients may be infinite or NaN, as where `grad_out * x^3`, summed over a row, overflows.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32. Rows of adjacent elements with one stride
            between them are read in place; anything else is made contiguous first.
        weight: `[3]`, in `x`'s dtype or float32. The first belongs to the cube.
        bias: `[1]`, in `x`'s dtype or float32.
        eps: Added to the means.

    Returns:
        `[..., dim]` in `x`'s dtype, contiguous. Differentiable (once) in `x`, `weight` and `bias`.

    Raises:
        RuntimeError: A wrong dtype, shape or device, naming the argument, what it must be and what
            it is.

    Source: Zhuo et al., "Polynomial Composition Activations", 2024; the Motif models.
    """
    if needs_grad(x, weight) or needs_grad(bias):
        if uses_registered():
            return _poly_norm_fwd(x, weight, bias, eps)[0]
        return _PolyNorm.apply(x, weight, bias, eps)
    return _poly_norm(x, weight, bias, eps)


def fused_mul_poly_norm(
    x: torch.Tensor,
    mul: Optional[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    *,
    mul_first: bool = False,
) -> torch.Tensor:
    """`poly_norm(x, weight, bias, eps) * mul`, multiplied in float32 before the one rounding.

    Args:
        x: `[..., dim]` as in `poly_norm`. Without `mul`, `x` and `mul` packed into one tensor
            `[..., 2 * dim]`, as one matrix multiplication gives them; its halves are read in place.
        mul: Shape, dtype and device of `x`. None where `x` is packed.
        weight, bias, eps: As in `poly_norm`.
        mul_first: Of a packed `x`: `mul` is the first half, not the second.

    Returns:
        `[..., dim]` in `x`'s dtype, contiguous. Differentiable (once) in `x`, `mul`, `weight` and
        `bias`; the gradient of a packed `x` is packed.

    Raises:
        RuntimeError: As `poly_norm`.

    Source: the gated MLP of the Motif models.
    """
    if needs_grad(x, mul) or needs_grad(weight, bias):
        if uses_registered():
            return _fused_mul_poly_norm_fwd(x, mul, weight, bias, eps, mul_first)[0]
        return _FusedMulPolyNorm.apply(x, mul, weight, bias, eps, mul_first)
    return _fused_mul_poly_norm(x, mul, weight, bias, eps, mul_first)


def grouped_poly_norm(
    x: torch.Tensor,
    mul: Optional[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    offs: torch.Tensor,
    eps: float = 1e-6,
    *,
    hidden_clamp: Optional[float] = None,
    mul_first: bool = False,
) -> torch.Tensor:
    """`fused_mul_poly_norm` with a weight and a bias for each expert, of rows sorted by expert.

        c(u) = u cut to [-hidden_clamp, hidden_clamp], or u without hidden_clamp
        out  = c(poly_norm(c(x), weight[e], bias[e], eps) * c(mul))

    for rows `offs[e - 1]` to `offs[e]` of expert `e`. Rows from `offs[-1]` on are padding: their
    result and gradients are zero, and they take no part in those of `weight` and `bias`. What is
    cut has no gradient, as with `torch.clamp`. Nothing waits for the device.

    Args:
        x: `[..., dim]` as in `fused_mul_poly_norm`, with all leading dimensions counted as rows;
            packed `[..., 2 * dim]` without `mul`.
        mul: Shape, dtype and device of `x`. None where `x` is packed.
        weight: `[experts, 3]`, in `x`'s dtype or float32.
        bias: `[experts, 1]`, in `x`'s dtype or float32.
        offs: `[experts]`, int32, on the device of `x`: the end row of each expert, as for
            `torch._grouped_mm`. It must not decrease; an expert may be empty. The values are on
            the device, and not checked.
        eps: Added to the means.
        hidden_clamp: See above. The Motif models cut at 1e6, where `x^6` is still a float32.
        mul_first: As in `fused_mul_poly_norm`.

    Returns:
        `[..., dim]` in `x`'s dtype, contiguous. Differentiable (once) in `x`, `mul`, `weight` and
        `bias`; an empty expert has a gradient of zero.

    Raises:
        RuntimeError: As `poly_norm`.

    Source: the mixture-of-experts layers of the Motif models.
    """
    options = (offs, eps, mul_first, hidden_clamp)
    if needs_grad(x, mul) or needs_grad(weight, bias):
        if uses_registered():
            return _grouped_poly_norm_fwd(x, mul, weight, bias, *options)[0]
        return _GroupedPolyNorm.apply(x, mul, weight, bias, *options)
    return _grouped_poly_norm(x, mul, weight, bias, *options)


# Autograd: one Function an operator for eager mode, and the same backward registered with the op
# for torch.compile (docs/design-decisions.md has the measurements behind this).


def _where_needed(needs: tuple[bool, ...], grads: tuple[torch.Tensor, ...]) -> tuple:
    return tuple(grad if need else None for need, grad in zip(needs, grads))


def _poly_norm_setup(ctx, inputs, output):
    x, weight, bias, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, rstd)


def _poly_norm_backward(ctx, grad_out, grad_rstd=None):
    if grad_out is None:
        return (None,) * 4
    x, weight, bias, rstd = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = needs = ctx.needs_input_grad[:3]
    grad_x, _, grad_weight, grad_bias = _poly_norm_bwd(
        grad_out,
        x,
        None,
        False,
        False,
        weight,
        bias,
        rstd,
        needs_x,
        False,
        needs_weight,
        needs_bias,
    )
    return (*_where_needed(needs, (grad_x, grad_weight, grad_bias)), None)


class _PolyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        with below_autograd():
            out, rstd = _poly_norm_fwd(x, weight, bias, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, rstd)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        no_double_backward("poly_norm")
        return _poly_norm_backward(ctx, grad_out)


def _fused_mul_poly_norm_setup(ctx, inputs, output):
    x, mul, weight, bias, _, ctx.mul_first = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mul, weight, bias, rstd)


def _fused_mul_poly_norm_backward(ctx, grad_out, grad_rstd=None):
    if grad_out is None:
        return (None,) * 6
    x, mul, weight, bias, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad[:4]
    grads = _poly_norm_bwd(grad_out, x, mul, mul is None, ctx.mul_first, weight, bias, rstd, *needs)
    return (*_where_needed(needs, grads), None, None)


class _FusedMulPolyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mul, weight, bias, eps, mul_first):
        with below_autograd():
            out, rstd = _fused_mul_poly_norm_fwd(x, mul, weight, bias, eps, mul_first)
        ctx.mul_first = mul_first
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mul, weight, bias, rstd)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        no_double_backward("fused_mul_poly_norm")
        return _fused_mul_poly_norm_backward(ctx, grad_out)


def _grouped_poly_norm_setup(ctx, inputs, output):
    x, mul, weight, bias, offs, _, ctx.mul_first, ctx.hidden_clamp = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mul, weight, bias, offs, rstd)


def _grouped_poly_norm_backward(ctx, grad_out, grad_rstd=None):
    if grad_out is None:
        return (None,) * 8
    x, mul, weight, bias, offs, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad[:4]
    inputs = (grad_out, x, mul, ctx.mul_first, weight, bias, offs, rstd, ctx.hidden_clamp)
    grads = _grouped_poly_norm_bwd(*inputs, *needs)
    return (*_where_needed(needs, grads), None, None, None, None)


class _GroupedPolyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mul, weight, bias, offs, eps, mul_first, hidden_clamp):
        with below_autograd():
            out, rstd = _grouped_poly_norm_fwd(
                x, mul, weight, bias, offs, eps, mul_first, hidden_clamp
            )
        ctx.mul_first = mul_first
        ctx.hidden_clamp = hidden_clamp
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mul, weight, bias, offs, rstd)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        no_double_backward("grouped_poly_norm")
        return _grouped_poly_norm_backward(ctx, grad_out)


register_autograd("poly_norm_fwd", _poly_norm_backward, setup_context=_poly_norm_setup)
register_autograd(
    "fused_mul_poly_norm_fwd",
    _fused_mul_poly_norm_backward,
    setup_context=_fused_mul_poly_norm_setup,
)
register_autograd(
    "grouped_poly_norm_fwd",
    _grouped_poly_norm_backward,
    setup_context=_grouped_poly_norm_setup,
)


register_autocast(Norm(("x",), "weight", "bias"), "poly_norm", "poly_norm_fwd")
register_autocast(
    Norm(("x", "mul"), "weight", "bias"),
    *("fused_mul_poly_norm", "fused_mul_poly_norm_fwd"),
    *("grouped_poly_norm", "grouped_poly_norm_fwd"),
)


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _out_like(x, packed):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2) if packed else x.shape)


def _rstd_like(x):
    return x.new_empty((math.prod(x.shape[:-1]), 3), dtype=torch.float32)


@register_fake("poly_norm")
def _(x, weight, bias, eps):
    return _out_like(x, False)


@register_fake("poly_norm_fwd")
def _(x, weight, bias, eps):
    return _out_like(x, False), _rstd_like(x)


@register_fake("fused_mul_poly_norm")
def _(x, mul, weight, bias, eps, mul_first):
    return _out_like(x, mul is None)


@register_fake("fused_mul_poly_norm_fwd")
def _(x, mul, weight, bias, eps, mul_first):
    return _out_like(x, mul is None), _rstd_like(x)


@register_fake("poly_norm_bwd")
def _(grad_out, x, mul, packed, mul_first, weight, bias, rstd, *needs):
    return new_like(x, *zip(needs, (x, mul, weight, bias)))


@register_fake("grouped_poly_norm")
def _(x, mul, weight, bias, offs, eps, mul_first, hidden_clamp):
    return _out_like(x, mul is None)


@register_fake("grouped_poly_norm_fwd")
def _(x, mul, weight, bias, offs, eps, mul_first, hidden_clamp):
    return _out_like(x, mul is None), _rstd_like(x)


@register_fake("grouped_poly_norm_bwd")
def _(grad_out, x, mul, mul_first, weight, bias, offs, rstd, hidden_clamp, *needs):
    return new_like(x, *zip(needs, (x, mul, weight, bias)))
