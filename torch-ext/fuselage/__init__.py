"""fuselage: fused operators for transformers and diffusion models, forward and backward."""

from . import layers, modules
from .norm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm

__all__ = [
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "layers",
    "modules",
    "rms_norm",
]
