"""What every operator's autograd needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch.autograd import forward_ad

from ._arguments import refuse_wrong_kinds
from ._ops import add_op_namespace_prefix

# Inside a Function the op is called past its own, registered autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd


def needs_grad(a: torch.Tensor, b: Optional[torch.Tensor] = None) -> bool:
    """Whether a result of these inputs must carry a gradient."""
    if forward_ad._current_level >= 0:
        _no_forward_mode(a, b)
    try:
        return (a.requires_grad or (b is not None and b.requires_grad)) and torch.is_grad_enabled()
    except AttributeError:  # not a tensor
        refuse_wrong_kinds()
        raise


def uses_registered() -> bool:
    """Whether the backward that is registered with an op is used, and not the `Function`.

    Under torch.compile, which knows no other, and under autocast: what an op casts is then recorded
    before it.
    """
    return torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()


def _no_forward_mode(*tensors: Optional[torch.Tensor]) -> None:
    """Raises where an input has a tangent: an op without a rule for it would silently drop it."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given):
        raise RuntimeError(
            "fuselage: forward-mode differentiation (torch.func.jvp) is not supported; "
            "use reverse mode, as torch.func.vjp or backward() do"
        )


def no_double_backward(op: str) -> None:
    """Raises where the gradient itself is to be differentiated, which would silently be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"fuselage::{op}: the backward is not differentiable, create_graph=True not supported"
        )


def register_autograd(name: str, backward: Callable, setup_context: Callable) -> None:
    """Registers the backward of an op, for torch.compile and autocast."""

    def once(ctx, *grads):
        no_double_backward(name.removesuffix("_fwd"))
        return backward(ctx, *grads)

    qualified = add_op_namespace_prefix(name)
    torch.library.register_autograd(qualified, once, setup_context=setup_context)


def mark_written(*tensors: torch.Tensor) -> None:
    """Tells autograd that an op wrote over these tensors, so that a stale use of them raises."""
    if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version(tensors)
