"""Root mean square normalisation: alone, fused with the residual addition before it, and gated."""

from __future__ import annotations

import math
from typing import Optional

import torch

from ._arguments import number_of
from ._autocast import Norm, register_autocast
from ._autograd import (
    differentiable,
    mark_written,
    needs_grad,
    refuse_gradient,
    some_need_grad,
)
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
_rms_norm_add_rms_norm = ops.rms_norm_add_rms_norm.default
_rms_norm_add_rms_norm_bwd = ops.rms_norm_add_rms_norm_bwd.default
_gated_rms_norm = ops.gated_rms_norm.default
_gated_rms_norm_bwd = ops.gated_rms_norm_bwd.default

# The ops take activations as numbers: those of the enum in kernel_src/norm/gated_rms_norm.h.
_GATES = {"silu": 7, "sigmoid": 2}


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
    if needs_grad(x, weight, residual):
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
    if needs_grad(x, weight, residual):
        refuse_gradient("fused_add_rms_norm_", "fused_add_rms_norm")
    _fused_add_rms_norm_inplace(x, residual, weight, eps, weight_offset, cast_before_weight)
    mark_written(x, residual)
    return x, residual


def rms_norm_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_weight: Optional[torch.Tensor] = None,
    pre_weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    pre_eps: Optional[float] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises, adds the residual, and normalises the sum, in one pass.

        n            = rms_norm(x, post_weight, eps, ...)
        new_residual = round(residual + n)
        out          = rms_norm(new_residual, pre_weight, pre_eps, ...)

    The norm after a layer, the residual addition, and the norm before the next layer. What is
    rounded is what the three steps round: `n` and the sum, both to the activations' dtype. In half
    precision the results are bit for bit those of `n = rms_norm(x, ...)` and then
    `fused_add_rms_norm(n, residual, ...)`; in float32 a product and the addition round once.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32: the result of attention or of an MLP. Rows of
            adjacent elements with one stride between them are read in place; anything else is made
            contiguous first.
        residual: Shape, dtype and device of `x`.
        post_weight: `[dim]`, in `x`'s dtype or float32, of the norm of `x`. None multiplies by one,
            whatever the offset.
        pre_weight: Likewise, of the norm of the sum.
        eps: Added to the mean of squares, in both norms.
        weight_offset, cast_before_weight: As in `rms_norm`, for both norms.
        pre_eps: In place of `eps`, in the norm of the sum.

    Returns:
        `(out, new_residual)`, both contiguous and both differentiable (once) in `x`, `residual` and
        the weights. The gradient of the sum goes on through the first norm in float32 where a GPU
        takes both in one pass; otherwise rounded to its dtype, as between PyTorch's operators.

    Raises:
        RuntimeError: A wrong dtype, shape or device, naming the argument, what it must be and what
            it is.

    Source: the blocks of Gemma 2 and 3, with `weight_offset=1.0`.
    """
    options = (eps, eps if pre_eps is None else pre_eps, weight_offset, cast_before_weight)
    if some_need_grad(x, residual, post_weight, pre_weight):
        return _differentiable_rms_norm_add_rms_norm(x, residual, post_weight, pre_weight, *options)
    return _rms_norm_add_rms_norm(x, residual, post_weight, pre_weight, *options)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: Optional[int] = None,
    cast_before_weight: bool = False,
) -> torch.Tensor:
    """Root mean square normalisation with a gate, as in Mamba 2 and gated delta nets.

        n(s) = s / sqrt(mean(s^2, last dim) + eps)
        out  = n(x) * weight * activation(gate)      norm_before_gate=True
        out  = n(x * activation(gate)) * weight      norm_before_gate=False

    All arithmetic is in float32. Models differ in the order, and in where they round:

    - `gated_rms_norm(x, gate, weight, eps)` rounds the result: flash-linear-attention's
      `FusedRMSNormGated`, and Falcon-H1 with its `mamba_norm_before_gate`. With
      `activation="sigmoid"`: Kimi Linear, Bailing, GLM-5.
    - `gated_rms_norm(x, gate, weight, eps, cast_before_weight=True)` rounds `n`, its product with
      the weight, and the result: Qwen3-Next, Qwen3.5, OLMo Hybrid.
    - `gated_rms_norm(x, gate, weight, eps, norm_before_gate=False)` rounds the result: the
      `RMSNormGated` of Mamba 2's own code, and Falcon-H1.
    - `gated_rms_norm(x, gate, weight, eps, norm_before_gate=False, cast_before_weight=True)` rounds
      `n`, then the result: Mamba 2, Bamba and Granite of transformers. With `group_size`: Zamba 2,
      Nemotron-H.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32. Rows of adjacent elements with one stride
            between them are read in place; anything else is made contiguous first.
        gate: Shape, dtype and device of `x`, with strides of its own: a slice of a projection is
            read in place.
        weight: `[dim]`, in `x`'s dtype or float32. None multiplies by one.
        eps: Added to the mean of squares.
        activation: Of the gate: `"silu"` or `"sigmoid"`.
        norm_before_gate: Whether `x` is normalised, or its product with the gate.
        group_size: Columns that are normalised by themselves; it divides `dim`. None: all of them.
        cast_before_weight: Round `n` to `x`'s dtype before the multiplication by the weight. A gate
            that comes after it is multiplied with what PyTorch makes of the product: rounded again
            where the weight is in `x`'s dtype.

    Returns:
        Shape and dtype of `x`, contiguous. Differentiable (once) in `x`, `gate` and `weight`;
        roundings count as identity.

    Raises:
        RuntimeError: A wrong dtype, shape, device or activation, naming the argument, what it must
            be and what it is.

    Source: Dao and Gu, "Transformers are SSMs", 2024, and its `RMSNormGated`; Yang et al., "Gated
    Delta Networks", 2024.
    """
    number = number_of("gated_rms_norm", "activation", activation, _GATES)
    options = (eps, number, norm_before_gate, group_size, cast_before_weight)
    if some_need_grad(x, gate, weight):
        return _differentiable_gated_rms_norm(x, gate, weight, *options)
    return _gated_rms_norm(x, gate, weight, *options)


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


def _save_rms_norm_add_rms_norm(ctx, inputs, outputs):
    x, _, post_weight, pre_weight, _, _, ctx.weight_offset, _ = inputs
    _, new_residual, statistics = outputs
    ctx.save_for_backward(x, new_residual, post_weight, pre_weight, statistics)


def _rms_norm_add_rms_norm_backward(ctx, grad_out, grad_new_residual):
    x, new_residual, post_weight, pre_weight, statistics = ctx.saved_tensors
    needs_x, _, needs_post, _ = needs = ctx.needs_input_grad[:4]
    if grad_out is not None:
        return _rms_norm_add_rms_norm_bwd(
            *(grad_out, grad_new_residual, x, new_residual, post_weight, pre_weight, statistics),
            *(ctx.weight_offset, *needs),
        )
    grad_x = grad_post_weight = None  # only new_residual was used
    if needs_x or needs_post:
        # NOTE: the forward may have moved a DTensor x to where the sum is, and its rstd are there.
        if getattr(x, "placements", None) != getattr(new_residual, "placements", None):
            x = x.detach().redistribute(placements=new_residual.placements)
        grad_x, grad_post_weight = _rms_norm_bwd(
            *(grad_new_residual, None, x, post_weight, statistics[:, 0].contiguous()),
            *(ctx.weight_offset, needs_x, needs_post),
        )
    return grad_x, grad_new_residual, grad_post_weight, None


def _save_gated_rms_norm(ctx, inputs, outputs):
    x, gate, weight, _, *ctx.options, _ = inputs
    ctx.save_for_backward(x, gate, weight, outputs[1])


def _gated_rms_norm_backward(ctx, grad_out):
    return _gated_rms_norm_bwd(
        grad_out, *ctx.saved_tensors, *ctx.options, *ctx.needs_input_grad[:3]
    )


_differentiable_rms_norm = differentiable(
    "rms_norm", save=_save_rms_norm, backward=_rms_norm_backward, results=1
)
_differentiable_fused_add_rms_norm = differentiable(
    "fused_add_rms_norm",
    save=_save_fused_add_rms_norm,
    backward=_fused_add_rms_norm_backward,
    results=2,
)
_differentiable_rms_norm_add_rms_norm = differentiable(
    "rms_norm_add_rms_norm",
    save=_save_rms_norm_add_rms_norm,
    backward=_rms_norm_add_rms_norm_backward,
    results=2,
)
_differentiable_gated_rms_norm = differentiable(
    "gated_rms_norm", save=_save_gated_rms_norm, backward=_gated_rms_norm_backward, results=1
)


_SUM = ("x", "residual")

register_autocast(Norm(("x",), "weight"), "rms_norm", "rms_norm_fwd")
register_autocast(Norm(("x", "gate"), "weight"), "gated_rms_norm", "gated_rms_norm_fwd")
register_autocast(Norm(_SUM, "weight"), "fused_add_rms_norm", "fused_add_rms_norm_fwd")
register_autocast(
    Norm(_SUM, "post_weight", "pre_weight"), "rms_norm_add_rms_norm", "rms_norm_add_rms_norm_fwd"
)


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _fake_rms_norm(x, weight, eps, weight_offset, cast_before_weight, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), floats_of_rows(x)


def _fake_fused_add_rms_norm(x, residual, *options):
    out, rstd = _fake_rms_norm(x, *options)
    return out, like(x), rstd


def _fake_rms_norm_add_rms_norm(x, residual, *options):
    return like(x), like(x), floats_of_rows(x, 2)


def _fake_gated_rms_norm(x, gate, weight, eps, activation, norm_before_gate, group_size, cast):
    groups = 1 if group_size is None else x.shape[-1] // group_size
    rows = math.prod(x.shape[:-1])
    return like(x), x.new_empty((rows * groups,), dtype=torch.float32)


register_fakes("rms_norm", _fake_rms_norm, results=1)
register_fakes("fused_add_rms_norm", _fake_fused_add_rms_norm, results=2)
register_fake_in_place("fused_add_rms_norm_")
register_fake_gradients("rms_norm_bwd")
register_fakes("rms_norm_add_rms_norm", _fake_rms_norm_add_rms_norm, results=2)
register_fake_gradients("rms_norm_add_rms_norm_bwd", like={"residual": "x"})
register_fakes("gated_rms_norm", _fake_gated_rms_norm, results=1)
register_fake_gradients("gated_rms_norm_bwd")
