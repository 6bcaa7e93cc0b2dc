"""What a forward that `_fusion.py` has rewritten calls in the place of its own formulas.

Each computes just what its docstring says, of any values; in one operator where that takes them.
"""

from __future__ import annotations

from typing import Optional

import torch

from ..ada_norm import ada_layer_norm, ada_rms_norm, gate_residual_ada_norm
from . import _probe
from ._gates import is_still_gelu_tanh
from ._norms import LAYER_NORM, eps_of, is_norm, parameter
from ._patch import listened_to, replacement_of, wrapped
from ._products import has_epilogue, linear_gelu_tanh, linear_of_parts, may_stay_apart


def add_norm(norm: torch.nn.Module, x, residual):
    """`r = x + residual`; returns `norm(r)` and `r`, in one pass if the norm is still ours.

    Since the patch, somebody may have replaced the norm or its forward, or may listen to it by
    hooks that expect one tensor.
    """
    if _shape(x) is not None and _shape(x) == _shape(residual) and _is_ours(norm):
        return norm(x, residual)
    total = x + residual
    return norm(total), total


def norm_add_norm(post: torch.nn.Module, x, residual, norm: torch.nn.Module):
    """`r = residual + post(x)`; returns `norm(r)` and `r`, in one pass if both are RMS norms of
    ours that round alike.

    Not with a hook around one of them, which may have its weight elsewhere until it is called, and
    moves what it is given.
    """
    alike = replacement_of(post) == replacement_of(norm) != LAYER_NORM
    same_shape = _shape(x) is not None and _shape(x) == _shape(residual)
    bare = not (wrapped(post) or wrapped(norm))
    if alike and bare and same_shape and _is_ours(post) and _is_ours(norm):
        return norm(x, residual, post)
    return add_norm(norm, post(x), residual)


def _is_ours(norm: torch.nn.Module) -> bool:
    what = replacement_of(norm)
    return what is not None and is_norm(what) and not listened_to(norm)


def modulated(norm: torch.nn.Module, x, scale, shift, cast: bool):
    """`norm(x) * (1 + scale) + shift`; with `cast`, of the norm in float32, as `x` is."""
    if _modulates(norm, x, scale, shift, cast):
        eps, weight, bias = eps_of(norm), parameter(norm, "weight"), parameter(norm, "bias")
        if replacement_of(norm) == LAYER_NORM:
            return ada_layer_norm(x, scale, shift, weight, bias, eps)
        return ada_rms_norm(x, scale, shift, weight, eps)
    out = norm(x.float() if cast else x)
    if scale is not None:
        out = out * (1 + scale)
    if shift is not None:
        out = out + shift
    return out.type_as(x) if cast else out


def gated_norm(norm: torch.nn.Module, residual, a, b, scale, shift, cast: bool, wide: bool):
    """`r = residual + a * b`; returns `modulated(norm, r, ..)` and `r`. No b is one."""
    x, gate = (b, a) if _shape(a) != _shape(residual) == _shape(b) else (a, b)
    if (
        _modulates(norm, residual, scale, shift, cast)
        and _shape(x) == residual.shape
        and x.dtype == residual.dtype
        and _spreads(gate, residual, wide)
    ):
        kind = "layer" if replacement_of(norm) == LAYER_NORM else "rms"
        weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
        return gate_residual_ada_norm(
            x, residual, gate, scale, shift, weight, bias, eps_of(norm), norm=kind
        )
    product = a if b is None else a * b
    if scale is None and not (cast or wide):
        return add_norm(norm, residual, product)
    total = (residual.float() + product).type_as(residual) if wide else residual + product
    return modulated(norm, total, scale, shift, cast), total


def _shape(x) -> Optional[torch.Size]:
    return x.shape if isinstance(x, torch.Tensor) else None


def modulation(norm: torch.nn.Module, x):
    """`modulated` of scale and shift."""
    return lambda scale, shift: modulated(norm, x, scale, shift, False)


def gated_modulation(norm: torch.nn.Module, residual, a, b):
    """`gated_norm` of scale and shift."""
    return lambda scale, shift: gated_norm(norm, residual, a, b, scale, shift, False, False)


def gated(residual, a, b):
    """`residual + a * b`, rounded once."""
    if _shape(residual) is not None and residual.shape in (_shape(a), _shape(b)):
        others = [getattr(t, "dtype", None) for t in (a, b)]
        if others == [residual.dtype] * 2 and residual.dtype in _probe.DTYPES:
            return torch.addcmul(residual, a, b)
    return residual + a * b


def gelu_of(activation: torch.nn.Module, linear: torch.nn.Module, x):
    """`activation(linear(x))`, of a tanh-GELU: with the product, where that has one."""
    if is_still_gelu_tanh(activation) and has_epilogue(linear, x):
        return linear_gelu_tanh(linear, x)
    return activation(linear(x))


def linear_of(linear: torch.nn.Module, parts, dim: int):
    """`linear(torch.cat(parts, dim))`."""
    if may_stay_apart(linear, parts, dim):
        return linear_of_parts(linear, parts)
    return linear(torch.cat(parts, dim))


_READ_ONCE = 1024  # columns of rows that the compiler's kernels keep in registers


def _modulates(norm: torch.nn.Module, x, scale, shift, cast: bool) -> bool:
    """Whether the fused operator takes these, gives the dtype of the formula, and hides nothing."""
    if not isinstance(x, torch.Tensor) or _probe.autocasts(x):
        return False
    # The compiler's kernels read wide rows twice for a variance: of two layers of Flux, modulated
    # norms took 223 us on an H200, and take 153.
    is_twice = replacement_of(norm) == LAYER_NORM and x.dim() > 0 and x.shape[-1] > _READ_ONCE
    if not _probe.taken(x, compiled=is_twice):
        return False
    if not _is_ours(norm) or not (_spreads(scale, x, cast) and _spreads(shift, x, cast)):
        return False
    if shift is not None and (shift.shape != scale.shape or shift.dtype != scale.dtype):
        return False
    weight = parameter(norm, "weight")
    if weight is not None and (weight.device != x.device or weight.shape != x.shape[-1:]):
        return False  # the norm's own forward, or a hook around it, knows where its weight is
    if weight is None or weight.dtype == x.dtype:
        return True
    return weight.dtype == torch.float32 and replacement_of(norm) == LAYER_NORM


def _spreads(values, x: torch.Tensor, wide: bool) -> bool:
    """Whether they are none, one for all rows of `x`, for each batch element or for each row."""
    if values is None:
        return True
    if not isinstance(values, torch.Tensor) or values.dim() not in (1, x.dim()):
        return False
    if values.dtype != x.dtype and not (wide and values.dtype == torch.float32):
        return False
    shape, rows = values.shape, x.shape[:-1]
    if x.dim() < 2 or shape[-1] != x.shape[-1] or values.device != x.device:
        return False
    batches = (x.shape[0], *[1] * (x.dim() - 2))
    return shape[:-1] == rows or all(n == 1 for n in shape[:-1]) or shape[:-1] == batches
