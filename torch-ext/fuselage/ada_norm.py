"""Layer normalisation, alone and with the modulations of diffusion transformers around it."""

from __future__ import annotations

import math
from typing import Optional

import torch

from ._arguments import refuse_wrong_kinds
from ._autocast import Norm, Rule, register_autocast
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
_layer_norm = ops.layer_norm.default
_layer_norm_fwd = ops.layer_norm_fwd.default
_layer_norm_bwd = ops.layer_norm_bwd.default
_ada_norm = ops.ada_norm.default
_ada_norm_fwd = ops.ada_norm_fwd.default
_ada_norm_bwd = ops.ada_norm_bwd.default
_gate_residual_ada_norm = ops.gate_residual_ada_norm.default
_gate_residual_ada_norm_fwd = ops.gate_residual_ada_norm_fwd.default
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
    if _some_need_grad(x, weight, bias):
        if uses_registered():
            return _layer_norm_fwd(x, weight, bias, eps)[0]
        return _LayerNorm.apply(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps)


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
    if _some_need_grad(x, scale, shift, weight, bias):
        return _ada_norm_fwd(*args)[0] if uses_registered() else _AdaNorm.apply(*args)
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
    if _some_need_grad(x, scale, shift, weight):
        return _ada_norm_fwd(*args)[0] if uses_registered() else _AdaNorm.apply(*args)
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
    if _some_need_grad(x, residual, gate, scale, shift, weight, bias):
        if uses_registered():
            return _gate_residual_ada_norm_fwd(*args)[:2]
        return _GateResidualAdaNorm.apply(*args)
    return _gate_residual_ada_norm(*args)


def _some_need_grad(x: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    return needs_grad(x) or any(t is not None and needs_grad(t) for t in others)


# Autograd: one Function an operator for eager mode, and the same backward registered with the op
# for torch.compile (docs/design-decisions.md has the measurements behind this).


def _where_needed(needs: tuple[bool, ...], grads: tuple[Optional[torch.Tensor], ...]) -> tuple:
    return tuple(grad if need else None for need, grad in zip(needs, grads))


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
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(s, x, gate, scale, shift, weight, bias, statistics)


def _kept(ctx) -> tuple:
    s, x, gate, scale, shift, weight, bias, statistics = ctx.saved_tensors
    shift = scale if ctx.shift_is_scale else shift
    bias = weight if ctx.bias_is_weight else bias
    return s, x, gate, scale, shift, weight, bias, statistics


def _layer_norm_setup(ctx, inputs, output):
    x, weight, bias, _ = inputs
    _, statistics = output
    ctx.mark_non_differentiable(statistics)
    _keep(ctx, x, None, None, None, None, weight, bias, statistics, False)


def _layer_norm_backward(ctx, grad_out, grad_statistics=None):
    if grad_out is None:
        return (None,) * 4
    x, _, _, _, _, weight, bias, statistics = _kept(ctx)
    needs = ctx.needs_input_grad[:3]
    grads = _layer_norm_bwd(grad_out, x, weight, bias, statistics, *needs)
    return (*_where_needed(needs, grads), None)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        with below_autograd():
            out, statistics = _layer_norm_fwd(x, weight, bias, eps)
        _keep(ctx, x, None, None, None, None, weight, bias, statistics, False)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        no_double_backward("layer_norm")
        return _layer_norm_backward(ctx, grad_out)


def _ada_norm_setup(ctx, inputs, output):
    x, scale, shift, weight, bias, _, ctx.layer = inputs
    _, statistics = output
    ctx.mark_non_differentiable(statistics)
    needs_scale = ctx.needs_input_grad[1]
    _keep(ctx, x, None, None, scale, shift, weight, bias, statistics, needs_scale)


def _ada_norm_backward(ctx, grad_out, grad_statistics=None):
    if grad_out is None:
        return (None,) * 7
    x, _, _, scale, shift, weight, bias, statistics = _kept(ctx)
    needs = ctx.needs_input_grad[:5]
    grads = _ada_norm_bwd(grad_out, x, scale, shift, weight, bias, statistics, ctx.layer, *needs)
    return (*_where_needed(needs, grads), None, None)


class _AdaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, shift, weight, bias, eps, layer):
        with below_autograd():
            out, statistics = _ada_norm_fwd(x, scale, shift, weight, bias, eps, layer)
        ctx.layer = layer
        needs_scale = ctx.needs_input_grad[1]
        _keep(ctx, x, None, None, scale, shift, weight, bias, statistics, needs_scale)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        no_double_backward("ada_layer_norm" if ctx.layer else "ada_rms_norm")
        return _ada_norm_backward(ctx, grad_out)


def _gate_residual_ada_norm_setup(ctx, inputs, output):
    x, _, gate, scale, shift, weight, bias, _, ctx.layer = inputs
    _, new_residual, statistics = output
    ctx.mark_non_differentiable(statistics)
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


def _gate_residual_ada_norm_backward(ctx, grad_out, grad_new_residual, grad_statistics=None):
    new_residual, x, gate, scale, shift, weight, bias, statistics = _kept(ctx)
    needs = ctx.needs_input_grad[:7]
    if grad_out is None:
        if grad_new_residual is None:
            return (None,) * 9
        return (*_gate_residual_backward(needs[:3], grad_new_residual, x, gate), *(None,) * 6)
    needs_x, needs_residual, *needs_others = needs
    # Without a gate, x and residual have one gradient.
    own_x = needs_x and gate is not None
    needs_sum = needs_residual or (needs_x and not own_x)
    grad_x, grad_residual, *grads = _gate_residual_ada_norm_bwd(
        grad_out,
        grad_new_residual,
        new_residual,
        x,
        gate,
        scale,
        shift,
        weight,
        bias,
        statistics,
        ctx.layer,
        own_x,
        needs_sum,
        *needs_others,
    )
    grad_x = grad_x if own_x else grad_residual
    return (*_where_needed(needs, (grad_x, grad_residual, *grads)), None, None)


class _GateResidualAdaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, gate, scale, shift, weight, bias, eps, layer):
        with below_autograd():
            out, new_residual, statistics = _gate_residual_ada_norm_fwd(
                x, residual, gate, scale, shift, weight, bias, eps, layer
            )
        ctx.layer = layer
        _, _, needs_gate, needs_scale = ctx.needs_input_grad[:4]
        x = x if needs_gate else None
        _keep(ctx, new_residual, x, gate, scale, shift, weight, bias, statistics, needs_scale)
        return out, new_residual

    @staticmethod
    def backward(ctx, grad_out, grad_new_residual):
        no_double_backward("gate_residual_ada_norm")
        return _gate_residual_ada_norm_backward(ctx, grad_out, grad_new_residual)


register_autograd("layer_norm_fwd", _layer_norm_backward, setup_context=_layer_norm_setup)
register_autograd("ada_norm_fwd", _ada_norm_backward, setup_context=_ada_norm_setup)
register_autograd(
    "gate_residual_ada_norm_fwd",
    _gate_residual_ada_norm_backward,
    setup_context=_gate_residual_ada_norm_setup,
)


register_autocast(Norm(("x",), "weight", "bias"), "layer_norm", "layer_norm_fwd")
register_autocast(Norm(("x",), "scale", "shift", "weight", "bias"), "ada_norm", "ada_norm_fwd")


class _GateResidualNorm(Norm):
    """As `residual + gate * x` and the norm of that one after the other: the sum is no norm."""

    def call(self, overload, arguments, device_type):
        dtype = Rule.dtype_of_rows(self, arguments, device_type)
        if device_type != "cuda" or dtype in (None, torch.float32):
            return super().call(overload, arguments, device_type)
        self.cast(arguments, dtype)
        _, new_residual, *_ = overload(*arguments.values())
        self.cast(arguments, torch.float32)
        *_, scale, shift, weight, bias, eps, layer = arguments.values()
        norm = _ada_norm if overload is _gate_residual_ada_norm else _ada_norm_fwd
        results = norm(new_residual.float(), scale, shift, weight, bias, eps, layer)
        if overload is _gate_residual_ada_norm:
            return results, new_residual
        out, statistics = results
        return out, new_residual, statistics


register_autocast(
    _GateResidualNorm(("x", "residual", "gate"), "scale", "shift", "weight", "bias"),
    *("gate_residual_ada_norm", "gate_residual_ada_norm_fwd"),
)


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _statistics_like(x, layer):
    rows = math.prod(x.shape[:-1])
    return x.new_empty((rows, 2) if layer else (rows,), dtype=torch.float32)


@register_fake("layer_norm")
def _(x, weight, bias, eps):
    return x.new_empty(x.shape)


@register_fake("layer_norm_fwd")
def _(x, weight, bias, eps):
    return x.new_empty(x.shape), _statistics_like(x, True)


@register_fake("layer_norm_bwd")
def _(grad_out, x, weight, bias, statistics, *needs):
    return new_like(x, *zip(needs, (x, weight, bias)))


@register_fake("ada_norm")
def _(x, scale, shift, weight, bias, eps, layer):
    return x.new_empty(x.shape)


@register_fake("ada_norm_fwd")
def _(x, scale, shift, weight, bias, eps, layer):
    return x.new_empty(x.shape), _statistics_like(x, layer)


@register_fake("ada_norm_bwd")
def _(grad_out, x, scale, shift, weight, bias, statistics, layer, *needs):
    return new_like(x, *zip(needs, (x, scale, shift, weight, bias)))


@register_fake("gate_residual_ada_norm")
def _(x, residual, gate, scale, shift, weight, bias, eps, layer):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@register_fake("gate_residual_ada_norm_fwd")
def _(x, residual, gate, scale, shift, weight, bias, eps, layer):
    return x.new_empty(x.shape), x.new_empty(x.shape), _statistics_like(x, layer)


@register_fake("gate_residual_ada_norm_bwd")
def _(grad_out, grad_new_residual, s, x, gate, scale, shift, weight, bias, statistics, _, *needs):
    return new_like(s, *zip(needs, (s, s, gate, scale, shift, weight, bias)))
