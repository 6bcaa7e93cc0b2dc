"""fuselage: fused operators for transformers and diffusion models, forward and backward."""

from . import layers, modules
from .norm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm
from .poly_norm import fused_mul_poly_norm, grouped_poly_norm, poly_norm

__all__ = [
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "fused_mul_poly_norm",
    "grouped_poly_norm",
    "layers",
    "modules",
    "poly_norm",
    "rms_norm",
]
