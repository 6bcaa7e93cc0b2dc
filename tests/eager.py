"""The same operators as models write them in PyTorch, in their dtypes: the bar for accuracy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reference import clamp
from torch import Tensor

# Norms


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`LlamaRMSNorm` of transformers with `cast_before_weight`, else its `GemmaRMSNorm`."""
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        n = n.to(x.dtype)
        if weight is not None:
            n = (weight if weight_offset == 0 else weight_offset + weight.float()) * n
    elif weight is not None:
        n = n * (weight_offset + weight.float())
    return n.to(out_dtype or x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, **options
) -> tuple[Tensor, Tensor]:
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps, **options), new_residual


def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor | None = None,
    pre_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    pre_eps: float | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    new_residual = residual + rms_norm(x, post_weight, eps, **options)
    pre_eps = eps if pre_eps is None else pre_eps
    return rms_norm(new_residual, pre_weight, pre_eps, **options), new_residual


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    cast_before_weight: bool = False,
) -> Tensor:
    """`Qwen3NextRMSNormGated` of transformers, or its `Zamba2RMSNormGated`, with
    `cast_before_weight`; else its `FalconH1RMSNormGated`."""
    a = (F.silu if activation == "silu" else torch.sigmoid)(gate.float())
    n = x.float() if norm_before_gate else x.float() * a
    n = n.unflatten(-1, (-1, group_size or max(x.shape[-1], 1)))
    n = (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    if cast_before_weight:
        n = n.to(x.dtype)
    if weight is not None:
        n = (weight if cast_before_weight else weight.float()) * n
    return (n * a if norm_before_gate else n).to(x.dtype)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> Tensor:
    """In `x`'s dtype, as PyTorch takes no others on a GPU."""
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    out = torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)
    return out if activation is None else torch.nn.functional.silu(out)


def poly_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, *, mul: Tensor | None = None
) -> Tensor:
    """`PolyNorm` of the Motif models, in float32, and its product with `mul`."""

    def norm(u):
        return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)

    h, w = x.float(), weight.float()
    out = w[0] * norm(h**3) + w[1] * norm(h**2) + w[2] * norm(h) + bias.float()
    return (out if mul is None else out * mul.float()).to(x.dtype)


def fused_mul_poly_norm(
    x: Tensor, mul: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6
) -> Tensor:
    return poly_norm(x, weight, bias, eps, mul=mul)


def grouped_poly_norm(
    x: Tensor,
    mul: Tensor,
    weight: Tensor,
    bias: Tensor,
    offs: Tensor,
    eps: float = 1e-6,
    *,
    hidden_clamp: float | None = None,
) -> Tensor:
    limit = float("inf") if hidden_clamp is None else hidden_clamp
    out, begin = torch.zeros_like(x), 0
    for expert, end in enumerate(offs.tolist()):
        h, m = (clamp(t[begin:end].float(), -limit, limit) for t in (x, mul))
        y = poly_norm(h, weight[expert], bias[expert], eps, mul=m)
        out[begin:end] = clamp(y, -limit, limit).to(x.dtype)
        begin = end
    return out


def for_rows(values: Tensor | None, x: Tensor) -> Tensor | float:
    if values is None:
        return 0.0
    if values.dim() == 2 and x.dim() > 2:
        return values.reshape(values.shape[0], *[1] * (x.dim() - 2), values.shape[1])
    return values


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`FP32LayerNorm` of diffusers."""
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    if x.numel() == 0:  # PyTorch 2.11, on CUDA: fails in the backward of what no rows use
        out = x.float() if weight is None else x.float() * weight
        return (out if bias is None else out + bias).to(x.dtype)
    if weight is None:  # likewise, in the backward of a bias alone
        out = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
        return (out if bias is None else out + bias).to(x.dtype)
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def fused_add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5) -> tuple[Tensor, Tensor]:
    new_residual = x + residual
    return layer_norm(new_residual, weight, bias, eps), new_residual


def ada_layer_norm(x, scale, shift, weight=None, bias=None, eps=1e-6) -> Tensor:
    """`AdaLayerNormZero` of diffusers."""
    out = layer_norm(x, weight, bias, eps) * (1 + for_rows(scale, x)) + for_rows(shift, x)
    return out.to(x.dtype)


def ada_rms_norm(x, scale, shift, weight=None, eps=1e-6) -> Tensor:
    """`LTXVideoTransformerBlock` of diffusers."""
    out = rms_norm(x, weight, eps) * (1 + for_rows(scale, x)) + for_rows(shift, x)
    return out.to(x.dtype)


def gate_residual_ada_norm(
    x, residual, gate, scale, shift, weight=None, bias=None, eps=1e-6, *, norm="layer"
) -> tuple[Tensor, Tensor]:
    new_residual = residual + (x if gate is None else for_rows(gate, x) * x)
    new_residual = new_residual.to(x.dtype)
    if norm == "rms":
        return ada_rms_norm(new_residual, scale, shift, weight, eps), new_residual
    return ada_layer_norm(new_residual, scale, shift, weight, bias, eps), new_residual


# Activations

ACTIVATIONS = {
    "none": lambda u: u,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "gelu_quick": lambda u: u * torch.sigmoid(1.702 * u),
    "silu": F.silu,
    "relu2": lambda u: F.relu(u).square(),
}


def plain(activation: str):
    return lambda x: ACTIVATIONS[activation](x)


def act_and_mul(activation: str, gate_first: bool = True):
    def formula(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        gate, up = (first, second) if gate_first else (second, first)
        return ACTIVATIONS[activation](gate) * up

    return formula


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor, activation: str = "gelu") -> Tensor:
    return ACTIVATIONS[activation](gate) * up


def swiglu_clamped(
    x: Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True
) -> Tensor:
    """`GptOssExperts._apply_gate` of transformers."""
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    gate = clamp(gate, float("-inf"), limit)
    up = clamp(up, -limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def bias_act(x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    return ACTIVATIONS[activation](x if bias is None else x + bias).to(x.dtype)


def add_mul_act(
    x: Tensor,
    bias: Tensor | None,
    y: Tensor,
    alpha: float = 1.0,
    activation: str = "none",
) -> Tensor:
    total = x if bias is None else x + bias
    return ACTIVATIONS[activation](total + alpha * y).to(x.dtype)


# Rotary embedding


def apply_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 2,
) -> Tensor | tuple[Tensor, Tensor]:
    """transformers' `apply_rotary_pos_emb`, and diffusers' `apply_rotary_emb` where interleaved."""

    def rotate(x):
        if interleaved:
            pairs = x.unflatten(-1, (-1, 2))
            return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
        x1, x2 = x.chunk(2, -1)
        return torch.cat((-x2, x1), -1)

    def apply(x):
        if x is None:
            return None
        c, s = (cos, sin) if x.dim() == 3 else (t.unsqueeze(heads_dim) for t in tables)
        return ((x * c) + (rotate(x) * s)).to(x.dtype)

    tables = [t if t.dim() == 3 else t[None] for t in (cos, sin)]
    results = tuple(apply(x) for x in (q, k))
    return results if k is not None else results[0]


def qk_norm_rotary(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    **options,
):
    """The norm of Qwen3 with `cast_before_weight`, and then its rotary embedding."""
    norm = {"weight_offset": weight_offset, "cast_before_weight": cast_before_weight}
    y = [
        None if x is None else rms_norm(x, w, eps, **norm)
        for x, w in ((q, q_weight), (k, k_weight))
    ]
    return apply_rotary(*y, cos, sin, **options)
