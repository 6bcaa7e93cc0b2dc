"""Norms and activations whose result is quantised where it is in registers: q and scales are
written, and nothing else is.

Each takes the operator's arguments and then those of `quant_fp8`, and gives the bits of one after
the other: the result is rounded to the activations' dtype, and then quantised.
"""

from __future__ import annotations

from typing import Optional

import torch

from ._autocast import Rule, register_autocast
from ._autograd import some_need_grad
from ._fake import fake_kernel_of, like
from ._ops import ops
from .quant import fake_quantized, number_of_layout

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_rms_norm_quant = ops.rms_norm_quant.default
_fused_add_rms_norm_quant = ops.fused_add_rms_norm_quant.default
_layer_norm_quant = ops.layer_norm_quant.default
_ada_layer_norm_quant = ops.ada_layer_norm_quant.default
_silu_and_mul_quant = ops.silu_and_mul_quant.default
_swiglu_quant = ops.swiglu_quant.default
_gelu_tanh_quant = ops.gelu_tanh_quant.default


def rms_norm_quant(
    x: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    scale: Optional[torch.Tensor] = None,
    group_size: int = -1,
    scale_layout: str = "row",
    scale_ue8m0: bool = False,
    return_unquantized: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, ...]:
    """`quant_fp8(rms_norm(x, weight, eps, ...), ...)`, in one pass.

    On a GPU, rows of half precision that start and end on 16-byte boundaries, with up to 16384
    columns, to float8_e4m3fn have a kernel of their own. All others take two, with the same bits.

    Args:
        x, weight, eps, weight_offset, cast_before_weight: As in `rms_norm`.
        scale, group_size, scale_layout, scale_ue8m0, dtype: As in `quant_fp8`.
        return_unquantized: Return the norm as well, in `x`'s dtype: what was quantised.

    Returns:
        `(q, scale)` as `quant_fp8` returns them, or `(q, scale, out)`.

    Raises:
        RuntimeError: As `rms_norm` and `quant_fp8`, and where a gradient would be needed.

    Source: `rms_norm` and `quant_fp8`.
    """
    _refuse_gradient("rms_norm_quant", x, weight)
    layout = number_of_layout("rms_norm_quant", scale_layout)
    options = (scale, group_size, layout, scale_ue8m0, return_unquantized, dtype)
    found = _rms_norm_quant(x, weight, eps, weight_offset, cast_before_weight, *options)
    return _results(found, scale, return_unquantized)


def fused_add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    scale: Optional[torch.Tensor] = None,
    group_size: int = -1,
    scale_layout: str = "row",
    scale_ue8m0: bool = False,
    return_unquantized: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, ...]:
    """Adds a residual, normalises the sum, and quantises that, in one pass.

        new_residual = round(x + residual)
        q, scale     = rms_norm_quant(new_residual, weight, eps, ...)

    Args:
        x, residual, weight, eps, weight_offset, cast_before_weight: As in `fused_add_rms_norm`.
        scale, group_size, scale_layout, scale_ue8m0, return_unquantized, dtype: As in
            `rms_norm_quant`.

    Returns:
        `(q, scale, new_residual)`, or `(q, scale, out, new_residual)`.

    Raises:
        RuntimeError: As `fused_add_rms_norm` and `quant_fp8`, and where a gradient would be needed.

    Source: `fused_add_rms_norm` and `quant_fp8`.
    """
    _refuse_gradient("fused_add_rms_norm_quant", x, residual, weight)
    layout = number_of_layout("fused_add_rms_norm_quant", scale_layout)
    options = (scale, group_size, layout, scale_ue8m0, return_unquantized, dtype)
    *found, new_residual = _fused_add_rms_norm_quant(
        x, residual, weight, eps, weight_offset, cast_before_weight, *options
    )
    return (*_results(found, scale, return_unquantized), new_residual)


def layer_norm_quant(
    x: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: int = -1,
    scale_layout: str = "row",
    scale_ue8m0: bool = False,
    return_unquantized: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, ...]:
    """`quant_fp8(layer_norm(x, weight, bias, eps), ...)`, in one pass.

    Args:
        x, weight, bias, eps: As in `layer_norm`.
        scale, group_size, scale_layout, scale_ue8m0, return_unquantized, dtype: As in
            `rms_norm_quant`.

    Returns:
        `(q, scale)`, or `(q, scale, out)`.

    Raises:
        RuntimeError: As `layer_norm` and `quant_fp8`, and where a gradient would be needed.

    Source: `layer_norm` and `quant_fp8`.
    """
    _refuse_gradient("layer_norm_quant", x, weight, bias)
    layout = number_of_layout("layer_norm_quant", scale_layout)
    options = (scale, group_size, layout, scale_ue8m0, return_unquantized, dtype)
    return _results(_layer_norm_quant(x, weight, bias, eps, *options), scale, return_unquantized)


def ada_layer_norm_quant(
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    *,
    quant_scale: Optional[torch.Tensor] = None,
    group_size: int = -1,
    scale_layout: str = "row",
    scale_ue8m0: bool = False,
    return_unquantized: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, ...]:
    """`quant_fp8(ada_layer_norm(x, scale, shift, weight, bias, eps), ...)`, in one pass.

    Args:
        x, scale, shift, weight, bias, eps: As in `ada_layer_norm`.
        quant_scale: `scale` of `quant_fp8`: one float32 element, for all rows.
        group_size, scale_layout, scale_ue8m0, return_unquantized, dtype: As in `rms_norm_quant`.

    Returns:
        `(q, scale_of_q)`, or `(q, scale_of_q, out)`.

    Raises:
        RuntimeError: As `ada_layer_norm` and `quant_fp8`, and where a gradient would be needed.

    Source: `ada_layer_norm` and `quant_fp8`.
    """
    _refuse_gradient("ada_layer_norm_quant", x, scale, shift, weight, bias)
    layout = number_of_layout("ada_layer_norm_quant", scale_layout)
    options = (quant_scale, group_size, layout, scale_ue8m0, return_unquantized, dtype)
    found = _ada_layer_norm_quant(x, scale, shift, weight, bias, eps, *options)
    return _results(found, quant_scale, return_unquantized)


def silu_and_mul_quant(
    x: torch.Tensor,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: int = -1,
    scale_layout: str = "row",
    scale_ue8m0: bool = False,
    return_unquantized: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, ...]:
    """`quant_fp8(silu_and_mul(x), ...)`, in one pass.

    On a GPU, rows as in `rms_norm_quant` have a kernel of their own, with up to 32768 columns where
    a row has one scale, and any number otherwise.

    Args:
        x: `[..., 2 * dim]`, as in `silu_and_mul`.
        scale, group_size, scale_layout, scale_ue8m0, return_unquantized, dtype: As in
            `rms_norm_quant`.

    Returns:
        `(q, scale)`, or `(q, scale, out)`, with `dim` columns.

    Raises:
        RuntimeError: As `silu_and_mul` and `quant_fp8`, and where a gradient would be needed.

    Source: `silu_and_mul` and `quant_fp8`.
    """
    _refuse_gradient("silu_and_mul_quant", x)
    layout = number_of_layout("silu_and_mul_quant", scale_layout)
    options = (scale, group_size, layout, scale_ue8m0, return_unquantized, dtype)
    return _results(_silu_and_mul_quant(x, *options), scale, return_unquantized)


def swiglu_quant(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: int = -1,
    scale_layout: str = "row",
    scale_ue8m0: bool = False,
    return_unquantized: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, ...]:
    """`quant_fp8(swiglu(gate, up), ...)`, in one pass. Otherwise as `silu_and_mul_quant`.

    Args:
        gate, up: As in `swiglu`.
        scale, group_size, scale_layout, scale_ue8m0, return_unquantized, dtype: As in
            `rms_norm_quant`.

    Returns:
        `(q, scale)`, or `(q, scale, out)`.

    Raises:
        RuntimeError: As `swiglu` and `quant_fp8`, and where a gradient would be needed.

    Source: `swiglu` and `quant_fp8`.
    """
    _refuse_gradient("swiglu_quant", gate, up)
    layout = number_of_layout("swiglu_quant", scale_layout)
    options = (scale, group_size, layout, scale_ue8m0, return_unquantized, dtype)
    return _results(_swiglu_quant(gate, up, *options), scale, return_unquantized)


def gelu_tanh_quant(
    x: torch.Tensor,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: int = -1,
    scale_layout: str = "row",
    scale_ue8m0: bool = False,
    return_unquantized: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, ...]:
    """`quant_fp8(gelu_tanh(x), ...)`, in one pass. Otherwise as `silu_and_mul_quant`.

    Args:
        x: As in `gelu_tanh`.
        scale, group_size, scale_layout, scale_ue8m0, return_unquantized, dtype: As in
            `rms_norm_quant`.

    Returns:
        `(q, scale)`, or `(q, scale, out)`.

    Raises:
        RuntimeError: As `gelu_tanh` and `quant_fp8`, and where a gradient would be needed.

    Source: `gelu_tanh` and `quant_fp8`.
    """
    _refuse_gradient("gelu_tanh_quant", x)
    layout = number_of_layout("gelu_tanh_quant", scale_layout)
    options = (scale, group_size, layout, scale_ue8m0, return_unquantized, dtype)
    return _results(_gelu_tanh_quant(x, *options), scale, return_unquantized)


def _refuse_gradient(op: str, x: torch.Tensor, *others: Optional[torch.Tensor]) -> None:
    if some_need_grad(x, *others):
        raise RuntimeError(
            f"fuselage::{op}: has no gradient; detach its inputs, or call it under torch.no_grad()"
        )


def _results(found, scale: Optional[torch.Tensor], return_unquantized: bool) -> tuple:
    """What an op found, with a scale that was given in the place of the one that was not made."""
    q, made, out = found
    made = made if scale is None else scale
    return (q, made, out) if return_unquantized else (q, made)


register_autocast(Rule(("x",), "weight", float32=("scale",)), "rms_norm_quant")
register_autocast(Rule(("x", "residual"), "weight", float32=("scale",)), "fused_add_rms_norm_quant")
register_autocast(Rule(("x",), "weight", "bias", float32=("scale",)), "layer_norm_quant")
register_autocast(
    Rule(("x",), ("scale", "shift"), "weight", "bias", float32=("quant_scale",)),
    "ada_layer_norm_quant",
)
register_autocast(Rule(("x",), float32=("scale",)), "silu_and_mul_quant", "gelu_tanh_quant")
register_autocast(Rule(("gate", "up"), float32=("scale",)), "swiglu_quant")


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device. All end in the same six options.


def _fake(x: torch.Tensor, args: tuple) -> tuple:
    """(q, scale, out) of a result of x's shape."""
    *quantised, return_unquantized, dtype = args[-6:]
    out = like(x) if return_unquantized else x.new_empty((0,))
    return (*fake_quantized(x, *quantised, dtype), out)


for _name in ("rms_norm", "layer_norm", "ada_layer_norm", "swiglu", "gelu_tanh"):
    fake_kernel_of(f"{_name}_quant")(lambda x, *args: _fake(x, args))


@fake_kernel_of("fused_add_rms_norm_quant")
def _fake_fused_add_rms_norm_quant(x, *args):
    return (*_fake(x, args), like(x))


@fake_kernel_of("silu_and_mul_quant")
def _fake_silu_and_mul_quant(x, *args):
    return _fake(x.new_empty((*x.shape[:-1], x.shape[-1] // 2)), args)
