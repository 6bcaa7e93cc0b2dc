"""Group normalisation over the channels of images and videos, with an activation after it."""

from __future__ import annotations

from typing import Optional

import torch

from ._arguments import number_of
from ._autocast import Norm, register_autocast
from ._autograd import differentiable, some_need_grad
from ._fake import fake_kernel_of, new_like, register_fakes
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_group_norm = ops.group_norm.default
_group_norm_bwd = ops.group_norm_bwd.default

# The ops take activations as numbers: those of the enum in kernel_src/gate/activation.h.
_NO_ACTIVATION = 0
_ACTIVATIONS = {"silu": 7}


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
    *,
    activation: Optional[str] = None,
) -> torch.Tensor:
    """Normalisation over groups of channels and all positions, with an activation after it.

        n   = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)
        out = activation(n * weight + bias)

    Means are over the `C / num_groups` channels of a group of a sample, and all of their positions.
    All arithmetic is in float32, and rounded once at the end. The mean is taken away before the
    squares are summed up: a mean far larger than the deviations costs no accuracy. The result of a
    sample does not depend on how many there are.

    - `group_norm(x, 32, weight, bias, eps)`: `torch.nn.functional.group_norm`.
    - `group_norm(x, 32, weight, bias, eps, activation="silu")`: `silu(group_norm(x))` of the
      residual blocks of UNets and autoencoders, without a rounding between the two.

    Args:
        x: `[N, C, ...]`, float16, bfloat16 or float32, with any number of dimensions after the
            channels. Samples that are contiguous, and those that are channels last (any layout
            `[..., C]` without gaps), are read in place, with any stride between them; anything else
            is made contiguous first.
        num_groups: It divides `C`.
        weight: `[C]`, in `x`'s dtype or float32. None multiplies by one.
        bias: `[C]`, in `x`'s dtype or float32. None adds nothing.
        eps: Added to the variance.
        activation: None or `"silu"`.

    Returns:
        Shape and dtype of `x`, channels last where `x` is, and otherwise contiguous. Differentiable
        (once) in `x`, `weight` and `bias`.

    Raises:
        RuntimeError: A wrong dtype, shape, device or activation, naming the argument, what it must
            be and what it is.

    Source: Wu and He, "Group Normalization", 2018; `torch.nn.GroupNorm`.
    """
    number = _NO_ACTIVATION
    if activation is not None:
        number = number_of("group_norm", "activation", activation, _ACTIVATIONS)
    if some_need_grad(x, weight, bias):
        return _differentiable_group_norm(x, num_groups, weight, bias, eps, number)
    return _group_norm(x, num_groups, weight, bias, eps, number)


# Gradients.


def _save_group_norm(ctx, inputs, outputs):
    x, ctx.num_groups, weight, bias, _, ctx.activation = inputs
    ctx.save_for_backward(x, weight, bias, outputs[1])


def _group_norm_backward(ctx, grad_out):
    x, weight, bias, statistics = ctx.saved_tensors
    needs_x, _, needs_weight, needs_bias = ctx.needs_input_grad[:4]
    grad_x, grad_weight, grad_bias = _group_norm_bwd(
        *(grad_out, x, ctx.num_groups, weight, bias, statistics, ctx.activation),
        *(needs_x, needs_weight, needs_bias),
    )
    return grad_x, None, grad_weight, grad_bias


_differentiable_group_norm = differentiable(
    "group_norm", save=_save_group_norm, backward=_group_norm_backward, results=1
)


register_autocast(Norm(("x",), "weight", "bias"), "group_norm", "group_norm_fwd")


# Shapes, dtypes and strides of the results, for tracing. This is also what runs when an input is on
# the meta device.


def _is_dense(x: torch.Tensor, dims: list[int]) -> bool:
    """Whether these dimensions, from the innermost on, lie in memory without gaps."""
    expected = 1
    for dim in dims:
        if x.shape[dim] != 1 and x.stride(dim) != expected:
            return False
        expected = expected * x.shape[dim]
    return True


def _like_in_order(x: torch.Tensor, needed: bool = True) -> torch.Tensor:
    """Like `x`, channels last where `x` is."""
    positions = list(range(x.dim() - 1, 1, -1))
    if not needed or not positions or x.numel() == 0 or _is_dense(x, [*positions, 1]):
        return new_like(x, x, needed)
    if not _is_dense(x, [1, *positions]):
        return new_like(x, x)
    return x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).movedim(-1, 1)


def _fake_group_norm(x, num_groups, weight, bias, eps, activation):
    statistics = x.new_empty((x.shape[0] * num_groups, 2), dtype=torch.float32)
    return _like_in_order(x), statistics


register_fakes("group_norm", _fake_group_norm, results=1)


@fake_kernel_of("group_norm_bwd")
def _fake_group_norm_bwd(
    grad_out, x, num_groups, weight, bias, statistics, activation, needs_x, needs_weight, needs_bias
):
    return (
        _like_in_order(x, needs_x),
        new_like(x, weight, needs_weight),
        new_like(x, bias, needs_bias),
    )
