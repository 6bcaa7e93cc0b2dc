"""What every operator's autograd needs."""

from __future__ import annotations

from typing import Optional

import torch

# Inside a Function the op is called past its own, registered autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd


def needs_grad(a: torch.Tensor, b: Optional[torch.Tensor] = None) -> bool:
    """Whether a result of these inputs must carry a gradient."""
    return (a.requires_grad or (b is not None and b.requires_grad)) and torch.is_grad_enabled()


def no_double_backward(op: str) -> None:
    """Raises where the gradient itself is to be differentiated, which would silently be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"fuselage::{op}: the backward is not differentiable, create_graph=True not supported"
        )


def mark_written(*tensors: torch.Tensor) -> None:
    """Tells autograd that an op wrote over these tensors, so that a stale use of them raises."""
    if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version(tensors)
