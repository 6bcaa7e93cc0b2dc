"""fuselage: fused operators for transformers and diffusion models, forward and backward.

What holds for all functions, unless they say otherwise:

- Inputs are float16, bfloat16 or float32 tensors with any leading dimensions, on CUDA, ROCm or the
  CPU. Arithmetic is in float32. Weights, biases, scales and tables have the dtype of the input or
  float32. `combine_shard_samples` and the tables of video models are written in PyTorch.
- They are differentiable once, in every floating-point input that can have a gradient.
- Functions whose names end in `_` write over their inputs. They have no gradient, and neither has
  sampling.
- All work under `torch.compile`, `torch.autocast` and CUDA graphs.
- A wrong dtype, shape, device or option raises `RuntimeError`, and an argument of the wrong kind
  `TypeError`, before anything is written.
"""

import importlib

from . import layers, modules
from ._arguments import explain_errors_of
from ._ops import ops
from .ada_norm import (
    ada_layer_norm,
    ada_rms_norm,
    fused_add_layer_norm,
    fused_add_layer_norm_,
    gate_residual_ada_norm,
    layer_norm,
)
from .fused_quant import (
    ada_layer_norm_quant,
    fused_add_rms_norm_quant,
    gelu_tanh_quant,
    layer_norm_quant,
    rms_norm_quant,
    silu_and_mul_quant,
    swiglu_quant,
)
from .gate import (
    add_mul_act,
    add_mul_act_,
    bias_act,
    bias_act_,
    geglu,
    gelu,
    gelu_and_mul,
    gelu_quick,
    gelu_tanh,
    gelu_tanh_and_mul,
    mul_and_gelu,
    mul_and_gelu_tanh,
    mul_and_relu,
    mul_and_silu,
    relu2,
    relu_and_mul,
    silu,
    silu_and_mul,
    swiglu,
    swiglu_clamped,
)
from .group_norm import group_norm
from .linear_loss import (
    ShardLogProbs,
    combine_shard_log_probs,
    linear_cross_entropy,
    linear_log_probs,
    linear_log_probs_shard,
)
from .loss import LogProbs, cross_entropy, log_probs
from .norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_,
    gated_rms_norm,
    rms_norm,
    rms_norm_add_rms_norm,
)
from .poly_norm import fused_mul_poly_norm, grouped_poly_norm, poly_norm
from .quant import Quantized, quant_fp8
from .rope import (
    apply_rotary,
    apply_rotary_,
    ltx_video_rotary_tables,
    qk_norm_rotary,
    wan_rotary_tables,
)
from .route import TopK, topk_softmax
from .sampling import (
    Sample,
    ShardSample,
    combine_shard_samples,
    gumbel_sample,
    lm_head_sample,
    lm_head_sample_shard,
)

__all__ = [
    "LogProbs",
    "Quantized",
    "Sample",
    "ShardLogProbs",
    "ShardSample",
    "TopK",
    "ada_layer_norm",
    "ada_layer_norm_quant",
    "ada_rms_norm",
    "add_mul_act",
    "add_mul_act_",
    "apply_rotary",
    "apply_rotary_",
    "bias_act",
    "bias_act_",
    "combine_shard_log_probs",
    "combine_shard_samples",
    "cross_entropy",
    "distributed",
    "fused_add_layer_norm",
    "fused_add_layer_norm_",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "fused_add_rms_norm_quant",
    "fused_mul_poly_norm",
    "gate_residual_ada_norm",
    "gated_rms_norm",
    "geglu",
    "gelu",
    "gelu_and_mul",
    "gelu_quick",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gelu_tanh_quant",
    "group_norm",
    "grouped_poly_norm",
    "gumbel_sample",
    "integrations",
    "layer_norm",
    "layer_norm_quant",
    "layers",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_log_probs_shard",
    "lm_head_sample",
    "lm_head_sample_shard",
    "log_probs",
    "ltx_video_rotary_tables",
    "modules",
    "mul_and_gelu",
    "mul_and_gelu_tanh",
    "mul_and_relu",
    "mul_and_silu",
    "poly_norm",
    "qk_norm_rotary",
    "quant_fp8",
    "relu2",
    "relu_and_mul",
    "rms_norm",
    "rms_norm_add_rms_norm",
    "rms_norm_quant",
    "silu",
    "silu_and_mul",
    "silu_and_mul_quant",
    "swiglu",
    "swiglu_clamped",
    "swiglu_quant",
    "topk_softmax",
    "wan_rotary_tables",
]

explain_errors_of(ops)


def __getattr__(name: str):
    """`distributed` and `integrations`, each imported when it is first asked for."""
    if name in ("distributed", "integrations"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
