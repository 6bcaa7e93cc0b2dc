"""PolyNorm, the activation of the Motif models: alone, times another tensor, and for experts."""

from __future__ import annotations

from typing import Optional

import torch

from ._autocast import Norm, register_autocast
from ._autograd import differentiable, needs_grad
from ._fake import floats_of_rows, like, register_fake_gradients, register_fakes
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_poly_norm = ops.poly_norm.default
_poly_norm_bwd = ops.poly_norm_bwd.default
_fused_mul_poly_norm = ops.fused_mul_poly_norm.default
_grouped_poly_norm = ops.grouped_poly_norm.default
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
    if needs_grad(x, weight, bias):
        return _differentiable_poly_norm(x, weight, bias, eps)
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
    if needs_grad(x, mul, weight, bias):
        return _differentiable_fused_mul_poly_norm(x, mul, weight, bias, eps, mul_first)
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
    if needs_grad(x, mul, weight, bias):
        return _differentiable_grouped_poly_norm(x, mul, weight, bias, *options)
    return _grouped_poly_norm(x, mul, weight, bias, *options)


# Gradients.


def _save_poly_norm(ctx, inputs, outputs):
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, bias, outputs[1])


def _poly_norm_backward(ctx, grad_out):
    x, weight, bias, rstd = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_x, _, grad_weight, grad_bias = _poly_norm_bwd(
        *(grad_out, x, None, False, False, weight, bias, rstd),
        *(needs_x, False, needs_weight, needs_bias),
    )
    return grad_x, grad_weight, grad_bias


def _save_fused_mul_poly_norm(ctx, inputs, outputs):
    x, mul, weight, bias, _, ctx.mul_first = inputs
    ctx.save_for_backward(x, mul, weight, bias, outputs[1])


def _fused_mul_poly_norm_backward(ctx, grad_out):
    x, mul, weight, bias, rstd = ctx.saved_tensors
    inputs = (grad_out, x, mul, mul is None, ctx.mul_first, weight, bias, rstd)
    return _poly_norm_bwd(*inputs, *ctx.needs_input_grad[:4])


def _save_grouped_poly_norm(ctx, inputs, outputs):
    x, mul, weight, bias, offs, _, ctx.mul_first, ctx.hidden_clamp = inputs
    ctx.save_for_backward(x, mul, weight, bias, offs, outputs[1])


def _grouped_poly_norm_backward(ctx, grad_out):
    x, mul, weight, bias, offs, rstd = ctx.saved_tensors
    inputs = (grad_out, x, mul, ctx.mul_first, weight, bias, offs, rstd, ctx.hidden_clamp)
    return _grouped_poly_norm_bwd(*inputs, *ctx.needs_input_grad[:4])


_differentiable_poly_norm = differentiable(
    "poly_norm", save=_save_poly_norm, backward=_poly_norm_backward, results=1
)
_differentiable_fused_mul_poly_norm = differentiable(
    "fused_mul_poly_norm",
    save=_save_fused_mul_poly_norm,
    backward=_fused_mul_poly_norm_backward,
    results=1,
)
_differentiable_grouped_poly_norm = differentiable(
    "grouped_poly_norm",
    save=_save_grouped_poly_norm,
    backward=_grouped_poly_norm_backward,
    results=1,
)


register_autocast(Norm(("x",), "weight", "bias"), "poly_norm", "poly_norm_fwd")
register_autocast(
    Norm(("x", "mul"), "weight", "bias"),
    *("fused_mul_poly_norm", "fused_mul_poly_norm_fwd"),
    *("grouped_poly_norm", "grouped_poly_norm_fwd"),
)


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _fake_poly_norm(x, weight, bias, eps):
    return like(x), floats_of_rows(x, 3)


def _fake_fused_mul_poly_norm(x, mul, *options):
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2)) if mul is None else like(x)
    return out, floats_of_rows(x, 3)


register_fakes("poly_norm", _fake_poly_norm, results=1)
register_fakes("fused_mul_poly_norm", _fake_fused_mul_poly_norm, results=1)
register_fakes("grouped_poly_norm", _fake_fused_mul_poly_norm, results=1)
register_fake_gradients("poly_norm_bwd")
register_fake_gradients("grouped_poly_norm_bwd")
