"""`forward` methods that `kernels.kernelize` gives to the layers of a model.

A layer has no constructor and no state of its own; it reads the attributes of the layer that it
stands in for.
"""

from __future__ import annotations

import torch

from .ada_norm import layer_norm
from .gate import geglu, gelu, gelu_quick, gelu_tanh, silu, swiglu
from .group_norm import group_norm
from .norm import gated_rms_norm, rms_norm
from .poly_norm import poly_norm
from .rope import apply_rotary
from .route import topk_softmax


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


class RMSNormGated(torch.nn.Module):
    """Qwen3-Next's gated norm and its kin: rounds the normalised value, then its product with the
    weight, then that with the gate's activation.
    """

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(
            hidden_states,
            gate,
            self.weight,
            self.variance_epsilon,
            activation=self.activation,
            cast_before_weight=True,
        )


class FusedRMSNormGated(torch.nn.Module):
    """Kimi Linear's gated norm and its kin, and flash-linear-attention's: float32 throughout."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(
            hidden_states,
            gate,
            self.weight,
            self.variance_epsilon,
            activation=self.activation,
        )


class LayerNorm(torch.nn.Module):
    """`torch.nn.LayerNorm` over the last dimension: float32 throughout, rounded once."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float
    normalized_shape: tuple[int, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if len(self.normalized_shape) != 1:
            raise RuntimeError(
                "fuselage: LayerNorm normalises the last dimension alone, got normalized_shape "
                f"{tuple(self.normalized_shape)}"
            )
        if input.shape[-1:] != tuple(self.normalized_shape):
            raise RuntimeError(
                f"fuselage: LayerNorm of normalized_shape {tuple(self.normalized_shape)} got an "
                f"input of shape {tuple(input.shape)}"
            )
        return layer_norm(input, self.weight, self.bias, self.eps)


class GroupNorm(torch.nn.Module):
    """`torch.nn.GroupNorm`: float32 throughout, rounded once."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float
    num_groups: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class PolyNorm(torch.nn.Module):
    """Motif's activation: float32 throughout, rounded once."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poly_norm(x, self.weight, self.bias, self.eps)


class RotaryPosEmb(torch.nn.Module):
    """`apply_rotary`, for the function that transformers names `rotary_pos_emb`.

    It is `apply_rotary_pos_emb` of Llama and its kin. Pairs are the halves of a head; cos and sin
    have as many columns as it, or half of them as in gpt-oss.
    NOTE: two models of transformers 5.22.2 give the name to another function and must be left out:
    nanochat turns the other way, openai_privacy_filter pairs neighbours.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cos.dtype != q.dtype:
            cos, sin = cos.float(), sin.float()
        # Pixtral's tables have no batch: theirs broadcast over batch and heads.
        heads_dim = 1 if unsqueeze_dim == 0 and cos.dim() == 2 else unsqueeze_dim
        return apply_rotary(q, k, cos, sin, heads_dim=heads_dim, rotary_dim=q.shape[-1])


# Activations: the layers of transformers.activations, which have no attributes to read.


class SiLU(torch.nn.Module):
    """`silu`, for `SiLUActivation` of transformers."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return silu(input)


class GeLU(torch.nn.Module):
    """`gelu`, for `GELUActivation` of transformers."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input)


class GeluTanh(torch.nn.Module):
    """`gelu_tanh`, for `GELUTanh` of transformers."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(input)


class FastGELU(torch.nn.Module):
    """`gelu_tanh`, for `FastGELUActivation` of transformers, which writes it in another way."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(input)


class QuickGELU(torch.nn.Module):
    """`gelu_quick`, for `QuickGELUActivation` of transformers."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu_quick(input)


class NewGELU(torch.nn.Module):
    """`gelu_tanh`, for `NewGELUActivation` of transformers, which writes it in another way."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(input)


class SwiGLUMLP(torch.nn.Module):
    """Llama's MLP and its kin: `down_proj(silu(gate_proj(x)) * up_proj(x))`."""

    has_backward = True
    can_torch_compile = True

    gate_proj: torch.nn.Module
    up_proj: torch.nn.Module
    down_proj: torch.nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class GeGLUMLP(torch.nn.Module):
    """Gemma's MLP and its kin: `down_proj(gelu_tanh(gate_proj(x)) * up_proj(x))`."""

    has_backward = True
    can_torch_compile = True

    gate_proj: torch.nn.Module
    up_proj: torch.nn.Module
    down_proj: torch.nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), activation="gelu_tanh"))


class SoftmaxTopKRouter(torch.nn.Module):
    """`topk_softmax` of a linear layer: `(logits, weights, indices)` of each token.

    For what transformers 5.22.2 gives the name: the router of Qwen3.5-MoE, and that of Laguna,
    which has a sigmoid, a bias for the choice and soft-capped logits.
    """

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    top_k: int
    hidden_dim: int

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = torch.nn.functional.linear(hidden_states, self.weight)
        if not hasattr(self, "e_score_correction_bias"):
            weights, indices = topk_softmax(router_logits, self.top_k)
            return router_logits, weights.to(router_logits.dtype), indices
        router_logits = router_logits.float()
        softcap = self.router_logit_softcapping
        if softcap > 0.0:
            router_logits = torch.tanh(router_logits / softcap) * softcap
        weights, indices = topk_softmax(
            router_logits, self.top_k, score="sigmoid", bias=self.e_score_correction_bias.float()
        )
        return router_logits, weights.to(hidden_states.dtype), indices
