"""Hub layers: `forward` methods that `kernels.kernelize` gives to the layers of a model.

A layer has no constructor and no state of its own; it reads the attributes of the layer that it
stands in for.
"""

from __future__ import annotations

import torch

from .norm import rms_norm
from .poly_norm import poly_norm


class RMSNorm(torch.nn.Module):
    """Llama's norm and its kin: rounds the normalised value, then multiplies by the weight."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(
            hidden_states,
            self.weight,
            self.variance_epsilon,
            cast_before_weight=True,
            out_dtype=torch.promote_types(hidden_states.dtype, self.weight.dtype),
        )


class RMSNormZeroCentered(torch.nn.Module):
    """Gemma's norm and its kin: float32 throughout, weight stored around zero."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, weight_offset=1.0)


class PolyNorm(torch.nn.Module):
    """Motif's activation: float32 throughout, rounded once."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poly_norm(x, self.weight, self.bias, self.eps)
