"""Activations: plain, gated, and fused with the bias and the addition before them.

All are element-wise: computed in float32 and rounded once, forward and backward, where a model may
round after each step. The backward recomputes what it needs from the inputs, and saves nothing
else. Packed tensors are read in place: no split copies a half, and the gradient is packed.
"""

from __future__ import annotations

from typing import Optional

import torch

from ._arguments import number_of
from ._autocast import Rule, register_autocast
from ._autograd import differentiable, mark_written, needs_grad, refuse_gradient
from ._fake import like, register_fake_gradients, register_fake_in_place, register_fakes
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_activation = ops.activation.default
_activation_bwd = ops.activation_bwd.default
_act_and_mul = ops.act_and_mul.default
_act_and_mul_bwd = ops.act_and_mul_bwd.default
_swiglu_clamped = ops.swiglu_clamped.default
_swiglu_clamped_bwd = ops.swiglu_clamped_bwd.default
_glu = ops.glu.default
_glu_bwd = ops.glu_bwd.default
_bias_act = ops.bias_act.default
_bias_act_inplace = ops.bias_act_.default
_add_mul_act = ops.add_mul_act.default
_add_mul_act_inplace = ops.add_mul_act_.default
_add_mul_act_bwd = ops.add_mul_act_bwd.default

# The ops take activations as numbers: those of the enum in kernel_src/gate/activation.h.
_NUMBERS = {
    "none": 0,
    "relu": 1,
    "sigmoid": 2,
    "tanh": 3,
    "gelu": 4,
    "gelu_tanh": 5,
    "gelu_quick": 6,
    "silu": 7,
    "relu2": 8,
}
_NONE = 0
_RELU = 1
_GELU = 4
_GELU_TANH = 5
_GELU_QUICK = 6
_SILU = 7
_RELU2 = 8
_NAMES = {number: name for name, number in _NUMBERS.items()}


_GELUS = {"gelu": _GELU, "gelu_tanh": _GELU_TANH}


# Plain activations


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(x)`, also called swish.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32. Rows of adjacent elements with one stride
            between them are read in place; anything else is made contiguous first.

    Returns:
        Shape and dtype of `x`, contiguous. Differentiable (once).

    Raises:
        RuntimeError: A wrong dtype or shape, naming the argument, what it must be and what it is.

    Source: Elfwing et al., "Sigmoid-Weighted Linear Units", 2017; `torch.nn.functional.silu`.
    """
    return _apply_activation(x, _SILU)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """`x * Phi(x) = x / 2 * (1 + erf(x / sqrt(2)))`.

    Arguments, result and errors as in `silu`. Negative `x` of any size keep their relative
    accuracy, which the formula with `erf` loses in float32.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; `torch.nn.functional.gelu`.
    """
    return _apply_activation(x, _GELU)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`.

    Arguments, result and errors as in `silu`.

    Source: `torch.nn.functional.gelu(x, approximate="tanh")`; `gelu_new`, `gelu_fast` and
    `gelu_pytorch_tanh` of transformers are the same function.
    """
    return _apply_activation(x, _GELU_TANH)


def gelu_quick(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(1.702 * x)`.

    Arguments, result and errors as in `silu`.

    Source: Hendrycks and Gimpel, 2016; CLIP's `quick_gelu`.
    """
    return _apply_activation(x, _GELU_QUICK)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """`max(x, 0)^2`.

    Arguments, result and errors as in `silu`.

    Source: So et al., "Primer", 2021; `relu2` of transformers.
    """
    return _apply_activation(x, _RELU2)


# Gated activations of one packed tensor


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, with `gate, up = x.chunk(2, -1)`.

    Args:
        x: `[..., 2 * dim]`, float16, bfloat16 or float32; the halves are read in place. Rows of
            adjacent elements with one stride between them are too; anything else is made contiguous
            first.

    Returns:
        `[..., dim]`, contiguous, in the dtype of `x`. Differentiable (once): the gradient is one
        tensor of the shape of `x`.

    Raises:
        RuntimeError: A wrong dtype or shape, naming the argument, what it must be and what it is.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; the name is vLLM's.
    """
    return _apply_act_and_mul(x, _SILU, True)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, with `gate, up = x.chunk(2, -1)`. Otherwise as `silu_and_mul`."""
    return _apply_act_and_mul(x, _GELU, True)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu_tanh(gate) * up`, with `gate, up = x.chunk(2, -1)`. Otherwise as `silu_and_mul`."""
    return _apply_act_and_mul(x, _GELU_TANH, True)


def relu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`relu(gate) * up`, with `gate, up = x.chunk(2, -1)`. Otherwise as `silu_and_mul`."""
    return _apply_act_and_mul(x, _RELU, True)


def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """`up * silu(gate)`, with `up, gate = x.chunk(2, -1)`: the value comes first.

    Otherwise as `silu_and_mul`. Source: the SwiGLU of diffusers.
    """
    return _apply_act_and_mul(x, _SILU, False)


def mul_and_gelu(x: torch.Tensor) -> torch.Tensor:
    """`up * gelu(gate)`, with `up, gate = x.chunk(2, -1)`: the value comes first.

    Otherwise as `silu_and_mul`. Source: the GEGLU of diffusers.
    """
    return _apply_act_and_mul(x, _GELU, False)


def mul_and_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """`up * gelu_tanh(gate)`, with `up, gate = x.chunk(2, -1)`. Otherwise as `mul_and_silu`."""
    return _apply_act_and_mul(x, _GELU_TANH, False)


def mul_and_relu(x: torch.Tensor) -> torch.Tensor:
    """`up * relu(gate)`, with `up, gate = x.chunk(2, -1)`. Otherwise as `mul_and_silu`."""
    return _apply_act_and_mul(x, _RELU, False)


def swiglu_clamped(
    x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True
) -> torch.Tensor:
    """The clamped SwiGLU of gpt-oss.

        gate = min(gate, limit), up = clamp(up, -limit, limit)
        out  = gate * sigmoid(alpha * gate) * (up + 1)

    Args:
        x: `[..., 2 * dim]`, as in `silu_and_mul`.
        alpha: The slope in the sigmoid.
        limit: Where gate and up are clamped. The gradient at the limit itself passes, as it does in
            `torch.clamp`.
        interleaved: Gate and up are interleaved, `gate, up = x[..., ::2], x[..., 1::2]`, as gpt-oss
            has them; otherwise they are halves, `gate, up = x.chunk(2, -1)`. Both are read in
            place.

    Returns:
        `[..., dim]`, contiguous, in the dtype of `x`. Differentiable (once).

    Raises:
        RuntimeError: A wrong dtype or shape, naming the argument, what it must be and what it is.

    Source: `GptOssExperts` of transformers; OpenAI's gpt-oss reference.
    """
    if needs_grad(x):
        return _differentiable_swiglu_clamped(x, alpha, limit, interleaved)
    return _swiglu_clamped(x, alpha, limit, interleaved)


# Gated activations of two tensors


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`.

    Args:
        gate: `[..., dim]`, float16, bfloat16 or float32. Rows of adjacent elements with one stride
            between them are read in place; anything else is made contiguous first.
        up: Shape, dtype and device of `gate`.

    Returns:
        Shape and dtype of `gate`, contiguous. Differentiable (once) in both.

    Raises:
        RuntimeError: A wrong dtype, shape or device, naming the argument, what it must be and what
            it is.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; the MLP of Llama.
    """
    return _apply_glu(gate, up, _SILU)


def geglu(gate: torch.Tensor, up: torch.Tensor, activation: str = "gelu") -> torch.Tensor:
    """`activation(gate) * up`, where the activation is `gelu` or `gelu_tanh`.

    Args:
        gate, up: As in `swiglu`.
        activation: "gelu" or "gelu_tanh".

    Returns:
        As `swiglu`.

    Raises:
        RuntimeError: As `swiglu`, and for another activation.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; the MLP of Gemma ("gelu_tanh").
    """
    return _apply_glu(gate, up, number_of("geglu", "activation", activation, _GELUS))


# Fused epilogues


def bias_act(
    x: torch.Tensor, bias: Optional[torch.Tensor] = None, activation: str = "none"
) -> torch.Tensor:
    """`act(x + bias)`.

    Args:
        x: `[..., dim]`, float16, bfloat16 or float32. Rows of adjacent elements with one stride
            between them are read in place; anything else is made contiguous first.
        bias: `[dim]`, in `x`'s dtype or float32, or None.
        activation: "none", "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "gelu_quick", "silu" or
            "relu2".

    Returns:
        Shape and dtype of `x`, contiguous; the sum is not rounded before the activation.
        Differentiable (once) in `x` and `bias`.

    Raises:
        RuntimeError: A wrong dtype, shape, device or activation, naming the argument, what it must
            be and what it is.

    Source: the epilogue of a linear layer, as in the MLPs of recommender models.
    """
    number = number_of("bias_act", "activation", activation, _NUMBERS)
    if needs_grad(x, bias):
        return _differentiable_bias_act(x, bias, number)
    return _bias_act(x, bias, number)


def bias_act_(
    x: torch.Tensor, bias: Optional[torch.Tensor] = None, activation: str = "none"
) -> torch.Tensor:
    """`bias_act` for inference, which writes over `x`.

    Args:
        x: As in `bias_act`, but it is written to: rows of adjacent elements, one stride between all
            of them, that do not overlap each other or `bias`.
        bias, activation: As in `bias_act`.

    Returns:
        `x`, the tensor that was given.

    Raises:
        RuntimeError: As `bias_act`, and where a gradient would be needed.
    """
    if needs_grad(x, bias):
        refuse_gradient("bias_act_", "bias_act")
    _bias_act_inplace(x, bias, number_of("bias_act_", "activation", activation, _NUMBERS))
    mark_written(x)
    return x


def add_mul_act(
    x: torch.Tensor,
    bias: Optional[torch.Tensor],
    y: torch.Tensor,
    alpha: float = 1.0,
    activation: str = "none",
) -> torch.Tensor:
    """`act(x + bias + alpha * y)`.

    Args:
        x: `[..., dim]`, as in `bias_act`.
        bias: `[dim]`, in `x`'s dtype or float32, or None.
        y: Shape, dtype and device of `x`.
        alpha: What `y` is multiplied by.
        activation: As in `bias_act`.

    Returns:
        Shape and dtype of `x`, contiguous; nothing is rounded before the activation. Differentiable
        (once) in `x`, `bias` and `y`.

    Raises:
        RuntimeError: A wrong dtype, shape, device or activation, naming the argument, what it must
            be and what it is.

    Source: the sum of a frozen linear layer and its low-rank adaptation: Hu et al., "LoRA", 2021.
    """
    number = number_of("add_mul_act", "activation", activation, _NUMBERS)
    if needs_grad(x, bias, y):
        return _differentiable_add_mul_act(x, bias, y, alpha, number)
    return _add_mul_act(x, bias, y, alpha, number)


def add_mul_act_(
    x: torch.Tensor,
    bias: Optional[torch.Tensor],
    y: torch.Tensor,
    alpha: float = 1.0,
    activation: str = "none",
) -> torch.Tensor:
    """`add_mul_act` for inference, which writes over `x`.

    Args:
        x: As in `add_mul_act`, but it is written to: rows of adjacent elements, one stride between
            all of them, that do not overlap each other, `bias` or `y`. (`y` may be `x` itself.)
        bias, y, alpha, activation: As in `add_mul_act`.

    Returns:
        `x`, the tensor that was given.

    Raises:
        RuntimeError: As `add_mul_act`, and where a gradient would be needed.
    """
    if needs_grad(x, bias, y):
        refuse_gradient("add_mul_act_", "add_mul_act")
    _add_mul_act_inplace(
        x, bias, y, alpha, number_of("add_mul_act_", "activation", activation, _NUMBERS)
    )
    mark_written(x)
    return x


def _apply_activation(x, activation):
    if needs_grad(x):
        return _differentiable_activation(x, activation)
    return _activation(x, activation)


def _apply_act_and_mul(x, activation, gate_first):
    if needs_grad(x):
        return _differentiable_act_and_mul(x, activation, gate_first)
    return _act_and_mul(x, activation, gate_first)


def _apply_glu(gate, up, activation):
    if needs_grad(gate, up):
        return _differentiable_glu(gate, up, activation)
    return _glu(gate, up, activation)


# Gradients.


def _save_activation(ctx, inputs, output):
    x, ctx.activation = inputs
    ctx.save_for_backward(x)


def _activation_backward(ctx, grad_out):
    (x,) = ctx.saved_tensors
    return (_activation_bwd(grad_out, x, ctx.activation),)


def _save_act_and_mul(ctx, inputs, output):
    x, ctx.activation, ctx.gate_first = inputs
    ctx.save_for_backward(x)


def _act_and_mul_backward(ctx, grad_out):
    (x,) = ctx.saved_tensors
    return (_act_and_mul_bwd(grad_out, x, ctx.activation, ctx.gate_first),)


def _act_and_mul_name(ctx):
    name = _NAMES[ctx.activation]
    return f"{name}_and_mul" if ctx.gate_first else f"mul_and_{name}"


def _save_swiglu_clamped(ctx, inputs, output):
    x, ctx.alpha, ctx.limit, ctx.interleaved = inputs
    ctx.save_for_backward(x)


def _swiglu_clamped_backward(ctx, grad_out):
    (x,) = ctx.saved_tensors
    return (_swiglu_clamped_bwd(grad_out, x, ctx.alpha, ctx.limit, ctx.interleaved),)


def _save_glu(ctx, inputs, output):
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _glu_backward(ctx, grad_out):
    gate, up = ctx.saved_tensors
    needs_gate, needs_up = ctx.needs_input_grad[:2]
    return _glu_bwd(grad_out, gate, up, ctx.activation, needs_gate, needs_up)


def _save_sum(ctx, x, bias, y):
    # Without an activation the gradient does not depend on the values; `bias` tells dtype and size.
    if ctx.activation == _NONE:
        ctx.save_for_backward(None, bias, None)
    else:
        ctx.save_for_backward(x, bias, y)


def _sum_backward(ctx, grad_out, needs_x, needs_bias, needs_y):
    """The gradients of x, bias and y."""
    x, bias, y = ctx.saved_tensors
    # Without an activation the gradient of x is grad_out as it is.
    computes_x = needs_x and ctx.activation != _NONE
    if not (computes_x or needs_bias or needs_y):
        return grad_out, None, None
    grad_x, grad_bias, grad_y = _add_mul_act_bwd(
        grad_out, x, bias, y, ctx.alpha, ctx.activation, computes_x, needs_bias, needs_y
    )
    return grad_x if computes_x else grad_out, grad_bias, grad_y


def _save_bias_act(ctx, inputs, output):
    x, bias, ctx.activation = inputs
    ctx.alpha = 0.0
    _save_sum(ctx, x, bias, None)


def _bias_act_backward(ctx, grad_out):
    return _sum_backward(ctx, grad_out, *ctx.needs_input_grad[:2], False)[:2]


def _save_add_mul_act(ctx, inputs, output):
    x, bias, y, ctx.alpha, ctx.activation = inputs
    _save_sum(ctx, x, bias, y)


def _add_mul_act_backward(ctx, grad_out):
    return _sum_backward(ctx, grad_out, *ctx.needs_input_grad[:3])


_differentiable_activation = differentiable(
    "activation",
    save=_save_activation,
    backward=_activation_backward,
    called=lambda ctx: _NAMES[ctx.activation],
)
_differentiable_act_and_mul = differentiable(
    "act_and_mul",
    save=_save_act_and_mul,
    backward=_act_and_mul_backward,
    called=_act_and_mul_name,
)
_differentiable_swiglu_clamped = differentiable(
    "swiglu_clamped", save=_save_swiglu_clamped, backward=_swiglu_clamped_backward
)
_differentiable_glu = differentiable(
    "glu",
    save=_save_glu,
    backward=_glu_backward,
    called=lambda ctx: "swiglu" if ctx.activation == _SILU else "geglu",
)
_differentiable_bias_act = differentiable(
    "bias_act", save=_save_bias_act, backward=_bias_act_backward
)
_differentiable_add_mul_act = differentiable(
    "add_mul_act", save=_save_add_mul_act, backward=_add_mul_act_backward
)


register_autocast(Rule(("gate", "up")), "glu", "glu_fwd")
register_autocast(Rule(("x",), "bias"), "bias_act", "bias_act_fwd")
register_autocast(Rule(("x", "y"), "bias"), "add_mul_act", "add_mul_act_fwd")


# Shapes and dtypes of the results, for tracing.


def _fake_like_x(x, *options):
    return like(x)


def _fake_half_of_x(x, *options):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


for _op in ("activation", "glu", "bias_act", "add_mul_act"):
    register_fakes(_op, _fake_like_x)
for _op in ("act_and_mul", "swiglu_clamped"):
    register_fakes(_op, _fake_half_of_x)
for _op in ("bias_act_", "add_mul_act_"):
    register_fake_in_place(_op)
for _op in ("activation_bwd", "act_and_mul_bwd", "swiglu_clamped_bwd", "glu_bwd"):
    register_fake_gradients(_op)
register_fake_gradients("add_mul_act_bwd", like={"x": "grad_out", "y": "grad_out"})
