"""Layer normalisation, alone and with the modulations of diffusion transformers around it."""

from __future__ import annotations

from typing import Optional

import torch

from ._arguments import refuse_wrong_kinds
from ._autocast import Norm, Rule, register_autocast
from ._autograd import differentiable, mark_written, refuse_gradient, some_need_grad
from ._fake import (
    floats_of_rows,
    like,
    register_fake_gradients,
    register_fake_in_place,
    register_fakes,
)
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_layer_norm = ops.layer_norm.default
_layer_norm_fwd = ops.layer_norm_fwd.default
_layer_norm_bwd = ops.layer_norm_bwd.default
_fused_add_layer_norm = ops.fused_add_layer_norm.default
_fused_add_layer_norm_inplace = ops.fused_add_layer_norm_.default
_ada_norm = ops.ada_norm.default
_ada_norm_fwd = ops.ada_norm_fwd.default
_ada_norm_bwd = ops.ada_norm_bwd.default
_gate_residual_ada_norm = ops.gate_residual_ada_norm.default
_gate_residual_ada_norm_bwd = ops.gate_residual_ada_norm_bwd.default


def layer_norm(
    x: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer normalisation over the last dimension.

        n   = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)
        out = n * weight + bias

    All arithmetic is in float32, and rounded once at the end. The mean is taken away before the
    squares are summed up: a mean far larger than the deviations costs no accuracy.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32. Rows of adjacent elements with one stride
            between them are read in place; anything else is made contiguous first.
        weight: `[dim]`, in `x`'s dtype or float32. None multiplies by one.
        bias: `[dim]`, in `x`'s dtype or float32. None adds nothing.
        eps: Added to the variance.

    Returns:
        `[..., dim]` in `x`'s dtype, contiguous. Differentiable (once) in `x`, `weight` and `bias`.

    Raises:
        RuntimeError: A wrong dtype, shape or device, naming the argument, what it must be and what
            it is.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016; `torch.nn.LayerNorm`.
    """
    if some_need_grad(x, weight, bias):
        return _differentiable_layer_norm(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps)


def fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a residual and normalises the sum, in one pass.

        new_residual = round(x + residual)
        out          = layer_norm(new_residual, weight, bias, eps)

    The sum is rounded to the activations' dtype before it is normalised: `new_residual` is `x +
    residual`, bit for bit, and `out` is `layer_norm(new_residual, ...)` up to 4096 columns. Longer
    rows may be added up in another order there.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32.
        residual: Shape, dtype and device of `x`.
        weight, bias, eps: As in `layer_norm`.

    Returns:
        `(out, new_residual)`, both contiguous and both differentiable (once) in `x`, `residual`,
        `weight` and `bias`.

    Raises:
        RuntimeError: As `layer_norm`.

    Source: the residual blocks of BERT, GPT-2, Whisper and ViT.
    """
    if some_need_grad(x, residual, weight, bias):
        return _differentiable_fused_add_layer_norm(x, residual, weight, bias, eps)
    return _fused_add_layer_norm(x, residual, weight, bias, eps)


def fused_add_layer_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_add_layer_norm` for inference, which writes over `x` and `residual`.

    Args:
        x: As in `fused_add_layer_norm`, but it is written to: rows of adjacent elements, one stride
            between all of them, that overlap neither each other nor `residual`, `weight` or `bias`.
        residual: Likewise.
        weight, bias, eps: As in `layer_norm`.

    Returns:
        `(x, residual)`, the tensors that were given, now `out` and `new_residual`.

    Raises:
        RuntimeError: As `fused_add_layer_norm`, and where a gradient would be needed.
    """
    if some_need_grad(x, residual, weight, bias):
        refuse_gradient("fused_add_layer_norm_", "fused_add_layer_norm")
    _fused_add_layer_norm_inplace(x, residual, weight, bias, eps)
    mark_written(x, residual)
    return x, residual


def ada_layer_norm(
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Layer normalisation, modulated.

        out = layer_norm(x, weight, bias, eps) * (1 + scale) + shift

    All arithmetic is in float32, and rounded once at the end. Scale and shift are mostly slices of
    one larger tensor, `[batch, 6, dim]` or `[batch, 6 * dim]`: they are read where they are.

    Args:
        x: `[batch, ..., dim]` as in `layer_norm`.
        scale: In `x`'s dtype or float32. One for all rows, `[dim]` or with dimensions of size one
            before it; one for each batch element, `[batch, dim]` (with three or more dimensions of
            `x`) or `[batch, 1, dim]`; or one for each row, of the shape of `x`. None for zero.
        shift: As `scale`, and of its shape. None for zero.
        weight, bias: `[dim]` as in `layer_norm`.
        eps: Added to the variance.

    Returns:
        `[batch, ..., dim]` in `x`'s dtype, contiguous. Differentiable (once) in `x`, `scale`,
        `shift`, `weight` and `bias`.

    Raises:
        RuntimeError: As `layer_norm`.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2022; the transformers
    of Stable Diffusion 3, Flux and Wan.
    """
    args = (x, scale, shift, weight, bias, eps, True)
    if some_need_grad(x, scale, shift, weight, bias):
        return _differentiable_ada_norm(*args)
    return _ada_norm(*args)


def ada_rms_norm(
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Root mean square normalisation, modulated.

        out = rms_norm(x, weight, eps) * (1 + scale) + shift

    All arithmetic is in float32, and rounded once at the end.

    Args:
        x, scale, shift, weight: As in `ada_layer_norm`.
        eps: Added to the mean of squares.

    Returns:
        `[batch, ..., dim]` in `x`'s dtype, contiguous. Differentiable (once) in `x`, `scale`,
        `shift` and `weight`.

    Raises:
        RuntimeError: As `layer_norm`.

    Source: the transformers of LTX-Video.
    """
    args = (x, scale, shift, weight, None, eps, False)
    if some_need_grad(x, scale, shift, weight):
        return _differentiable_ada_norm(*args)
    return _ada_norm(*args)


def gate_residual_ada_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    gate: Optional[torch.Tensor],
    scale: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    norm: str = "layer",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the gated result of one half of a block, and normalises and modulates for the next.

        new_residual = round(residual + gate * x)
        out          = ada_layer_norm(new_residual, scale, shift, weight, bias, eps)

    The sum is computed in float32 and rounded to the activations' dtype before it is normalised, as
    in `fused_add_rms_norm`: `out` is `ada_layer_norm(new_residual, ...)`, bit for bit up to 4096
    columns. Longer rows may be added up in another order there.

    Args:
        x: `[batch, ..., dim]`, float16, bfloat16 or float32: the result of attention or MLP.
        residual: Shape, dtype and device of `x`.
        gate: One for all rows, for each batch element or for each row, as `scale` in
            `ada_layer_norm`, but not necessarily of its shape. None for one.
        scale, shift, weight, bias, eps: As in `ada_layer_norm`.
        norm: "layer", or "rms" for `ada_rms_norm`, which has no bias.

    Returns:
        `(out, new_residual)`, both contiguous and both differentiable (once) in `x`, `residual`,
        `gate`, `scale`, `shift`, `weight` and `bias`.

    Raises:
        RuntimeError: As `layer_norm`, and for another `norm`.

    Source: the adaLN-Zero block of Peebles and Xie, 2022.
    """
    if norm not in ("layer", "rms"):
        refuse_wrong_kinds()
        raise RuntimeError(
            f"fuselage::gate_residual_ada_norm: `norm` must be one of layer, rms, got {norm!r}"
        )
    args = (x, residual, gate, scale, shift, weight, bias, eps, norm == "layer")
    if some_need_grad(x, residual, gate, scale, shift, weight, bias):
        return _differentiable_gate_residual_ada_norm(*args)
    return _gate_residual_ada_norm(*args)


# Gradients.


def _keep(ctx, s, x, gate, scale, shift, weight, bias, statistics, needs_scale: bool) -> None:
    """Saves what the backward reads.

    Of a shift only shape and dtype count there, and of a bias only the dtype unless the scale has a
    gradient: they are not kept where scale and weight stand for them.
    """
    ctx.shift_is_scale = shift is not None and scale is not None and shift.dtype == scale.dtype
    ctx.bias_is_weight = (
        bias is not None
        and weight is not None
        and bias.dtype == weight.dtype
        and not (needs_scale and scale is not None)
    )
    shift = None if ctx.shift_is_scale else shift
    bias = None if ctx.bias_is_weight else bias
    ctx.save_for_backward(s, x, gate, scale, shift, weight, bias, statistics)


def _kept(ctx) -> tuple:
    s, x, gate, scale, shift, weight, bias, statistics = ctx.saved_tensors
    shift = scale if ctx.shift_is_scale else shift
    bias = weight if ctx.bias_is_weight else bias
    return s, x, gate, scale, shift, weight, bias, statistics


def _save_layer_norm(ctx, inputs, outputs):
    x, weight, bias, _ = inputs
    _keep(ctx, x, None, None, None, None, weight, bias, outputs[1], False)


def _layer_norm_backward(ctx, grad_out):
    x, _, _, _, _, weight, bias, statistics = _kept(ctx)
    return _layer_norm_bwd(grad_out, x, weight, bias, statistics, *ctx.needs_input_grad[:3])


def _save_fused_add_layer_norm(ctx, inputs, outputs):
    _, _, weight, bias, _ = inputs
    _, new_residual, statistics = outputs
    _keep(ctx, new_residual, None, None, None, None, weight, bias, statistics, False)


def _fused_add_layer_norm_backward(ctx, grad_out, grad_new_residual):
    if grad_out is None:  # only new_residual was used
        return grad_new_residual, grad_new_residual, None, None
    new_residual, *absent, weight, bias, statistics = _kept(ctx)
    needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
    _, grad_sum, *_, grad_weight, grad_bias = _gate_residual_ada_norm_bwd(
        *(grad_out, grad_new_residual, new_residual, *absent, weight, bias, statistics, True),
        *(False, needs_x or needs_residual, False, False, False, needs_weight, needs_bias),
    )
    return grad_sum, grad_sum, grad_weight, grad_bias


def _save_ada_norm(ctx, inputs, outputs):
    x, scale, shift, weight, bias, _, ctx.layer = inputs
    needs_scale = ctx.needs_input_grad[1]
    _keep(ctx, x, None, None, scale, shift, weight, bias, outputs[1], needs_scale)


def _ada_norm_backward(ctx, grad_out):
    x, _, _, scale, shift, weight, bias, statistics = _kept(ctx)
    inputs = (grad_out, x, scale, shift, weight, bias, statistics, ctx.layer)
    return _ada_norm_bwd(*inputs, *ctx.needs_input_grad[:5])


def _save_gate_residual_ada_norm(ctx, inputs, outputs):
    x, _, gate, scale, shift, weight, bias, _, ctx.layer = inputs
    _, new_residual, statistics = outputs
    _, _, needs_gate, needs_scale = ctx.needs_input_grad[:4]
    x = x if needs_gate else None
    _keep(ctx, new_residual, x, gate, scale, shift, weight, bias, statistics, needs_scale)


def _gate_residual_backward(
    needs: tuple[bool, ...], grad: torch.Tensor, x: Optional[torch.Tensor], gate
) -> tuple:
    """The gradients of x, residual and gate, of which x is given where that of the gate is needed.

    This is where only `new_residual` was used: nothing of the norm's is read.
    """
    needs_x, needs_residual, needs_gate = needs
    grad_x, grad_gate = grad if needs_x else None, None
    if gate is not None and (needs_x or needs_gate):
        rows = gate
        if gate.dim() == 2 and grad.dim() > 2 and gate.shape[0] != 1:  # one for each batch element
            rows = gate.view(gate.shape[0], *[1] * (grad.dim() - 2), gate.shape[1])
        if needs_x:
            grad_x = (grad * rows).to(grad.dtype)
        if needs_gate:
            grad_gate = (grad.float() * x.float()).sum_to_size(rows.shape)
            grad_gate = grad_gate.view(gate.shape).to(gate.dtype)
    return grad_x, grad if needs_residual else None, grad_gate


def _gate_residual_ada_norm_backward(ctx, grad_out, grad_new_residual):
    new_residual, x, gate, scale, shift, weight, bias, statistics = _kept(ctx)
    needs_x, needs_residual, needs_gate, *needs_others = ctx.needs_input_grad[:7]
    if grad_out is None:
        needs = (needs_x, needs_residual, needs_gate)
        return _gate_residual_backward(needs, grad_new_residual, x, gate)
    # Without a gate, x and residual have one gradient.
    own_x = needs_x and gate is not None
    needs_sum = needs_residual or (needs_x and not own_x)
    grad_x, grad_residual, *grads = _gate_residual_ada_norm_bwd(
        *(grad_out, grad_new_residual, new_residual, x, gate, scale, shift, weight, bias),
        *(statistics, ctx.layer, own_x, needs_sum, needs_gate, *needs_others),
    )
    return grad_x if own_x else grad_residual, grad_residual, *grads


_differentiable_layer_norm = differentiable(
    "layer_norm", save=_save_layer_norm, backward=_layer_norm_backward, results=1
)
_differentiable_fused_add_layer_norm = differentiable(
    "fused_add_layer_norm",
    save=_save_fused_add_layer_norm,
    backward=_fused_add_layer_norm_backward,
    results=2,
)
_differentiable_ada_norm = differentiable(
    "ada_norm",
    save=_save_ada_norm,
    backward=_ada_norm_backward,
    results=1,
    called=lambda ctx: "ada_layer_norm" if ctx.layer else "ada_rms_norm",
)
_differentiable_gate_residual_ada_norm = differentiable(
    "gate_residual_ada_norm",
    save=_save_gate_residual_ada_norm,
    backward=_gate_residual_ada_norm_backward,
    results=2,
)


register_autocast(Norm(("x",), "weight", "bias"), "layer_norm", "layer_norm_fwd")
register_autocast(Norm(("x",), "scale", "shift", "weight", "bias"), "ada_norm", "ada_norm_fwd")


class _SumNorm(Norm):
    """As a sum of `rows` and the norm of it one after the other: the sum is no norm."""

    def __init__(self, *arguments, norm, norm_fwd):
        super().__init__(*arguments)
        self.norm, self.norm_fwd = norm, norm_fwd

    def call(self, overload, arguments, device_type):
        dtype = Rule.dtype_of_rows(self, arguments, device_type)
        if device_type != "cuda" or dtype in (None, torch.float32):
            return super().call(overload, arguments, device_type)
        self.cast(arguments, dtype)
        _, new_residual, *_ = overload(*arguments.values())
        self.cast(arguments, torch.float32)
        options = list(arguments.values())[len(self.rows) :]
        if len(overload._schema.returns) == 2:
            return self.norm(new_residual.float(), *options), new_residual
        out, statistics = self.norm_fwd(new_residual.float(), *options)
        return out, new_residual, statistics


register_autocast(
    _SumNorm(*(("x", "residual"), "weight", "bias"), norm=_layer_norm, norm_fwd=_layer_norm_fwd),
    *("fused_add_layer_norm", "fused_add_layer_norm_fwd"),
)
register_autocast(
    _SumNorm(
        *(("x", "residual", "gate"), "scale", "shift", "weight", "bias"),
        norm=_ada_norm,
        norm_fwd=_ada_norm_fwd,
    ),
    *("gate_residual_ada_norm", "gate_residual_ada_norm_fwd"),
)


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _fake_layer_norm(x, weight, bias, eps):
    return like(x), floats_of_rows(x, 2)


def _fake_fused_add_layer_norm(x, residual, weight, bias, eps):
    return like(x), like(x), floats_of_rows(x, 2)


def _fake_ada_norm(x, scale, shift, weight, bias, eps, layer):
    return like(x), floats_of_rows(x, 2) if layer else floats_of_rows(x)


def _fake_gate_residual_ada_norm(x, residual, gate, *options):
    out, statistics = _fake_ada_norm(x, *options)
    return out, like(x), statistics


register_fakes("layer_norm", _fake_layer_norm, results=1)
register_fakes("fused_add_layer_norm", _fake_fused_add_layer_norm, results=2)
register_fake_in_place("fused_add_layer_norm_")
register_fakes("ada_norm", _fake_ada_norm, results=1)
register_fakes("gate_residual_ada_norm", _fake_gate_residual_ada_norm, results=2)
register_fake_gradients("layer_norm_bwd")
register_fake_gradients("ada_norm_bwd")
register_fake_gradients(
    "gate_residual_ada_norm_bwd", like={"x": "new_residual", "residual": "new_residual"}
)
