"""quant_fp8, and operators that quantise their result: a scale a row, or one for each 128 columns.

Sizes: rows, columns of the result. What is timed gives codes and scales; what is compared is their
product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

from ..contenders import compiled
from ..registry import Operator, Shape
from .norm import EPS, eager_fused_add_rms_norm, eager_rms_norm

LIMIT, GROUP = 448.0, 128
# Four bits: an error of a sixteenth at most, of 2.6% on average; and of a bit of half precision
# before that.
E4M3_TOLERANCES = (0.03, 0.07)


def _shape(rows: int, dim: int, *tags: str, dtype=torch.bfloat16) -> Shape:
    return Shape((rows, dim), dtype, frozenset(tags))


# Prefill and decode of 8B models, wide feed-forwards, then odd sizes.
_SHAPES = [
    _shape(16384, 4096, "main", "quick"),
    _shape(8192, 14336, "main"),
    _shape(16384, 8192, "sweep"),
    _shape(16384, 1024, "sweep"),
    _shape(32768, 128, "sweep"),
    _shape(4096, 28672, "sweep"),
    _shape(2048, 53248, "odd"),
    _shape(16384, 5120, "odd"),
    _shape(16384, 2880, "odd"),
    _shape(16384, 4104, "odd"),
    _shape(16384, 4097, "odd"),
    _shape(8, 4096, "small"),
    _shape(1, 14336, "small"),
    _shape(16384, 4096, "dtype", dtype=torch.float32),
    _shape(16384, 4096, "dtype", dtype=torch.float16),
    _shape(2048, 4096, "cpu"),
    _shape(2048, 4096, "cpu", "quick", dtype=torch.float32),
]


def _inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(shape.sizes, device=device).to(shape.dtype),)


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """[..., groups, 128], with zeros after the last column."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def _formula(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amax = x.abs().amax(-1, keepdim=True).float()
    scale = amax / torch.full_like(amax, LIMIT)  # a number's reciprocal would be multiplied with
    return (x.float() / scale).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn), scale


def _formula_of_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = _formula(_grouped(x))
    q = q.view(torch.uint8).flatten(-2)[..., : x.shape[-1]].contiguous()
    return q.view(torch.float8_e4m3fn), scale.squeeze(-1)


def _product(results) -> torch.Tensor:
    """What codes and scales stand for."""
    q, scale = results
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(GROUP, -1)[..., : q.shape[-1]]
    return q.float() * scale


def _contenders(group_size: int, formula):
    def contenders(fuselage: ModuleType):
        return {
            "fuselage": lambda: lambda x: tuple(fuselage.quant_fp8(x, group_size=group_size)),
            "eager": lambda: formula,
            "compile": lambda: compiled(formula),
        }

    return contenders


def _operator(name: str, group_size: int, formula) -> Operator:
    def reference(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor]:
        return (_product(formula(x.to(dtype))).double(),)

    def moves(shape: Shape) -> int:
        rows, dim = shape.sizes
        scales = 1 if group_size == -1 else -(-dim // GROUP)
        return rows * (dim * (shape.dtype.itemsize + 1) + 4 * scales)

    return Operator(
        name=name,
        shapes=_SHAPES,
        make_inputs=_inputs,
        contenders=_contenders(group_size, formula),
        reference=reference,
        necessary_bytes={"fwd": moves},
        rest=dict.fromkeys(("fuselage", "eager", "compile"), _product),
    )


# ---- operators whose result is quantised ----


def _quantised(function: Callable) -> Callable:
    """(q, scale) and what else there is of a function's first result."""

    def call(*inputs):
        out, *others = function(*inputs)
        return (*_formula(out), *others)

    return call


def _normed(x, weight, bias):
    return (F.layer_norm(x, x.shape[-1:], weight, bias, EPS),)


def _modulated(x, scale, shift):
    return (F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift,)


@dataclass(frozen=True)
class Fused:
    """The inputs, by the names of `_SIZES`; the formula; ours; and the sizes of what is written."""

    name: str
    inputs: tuple[str, ...]
    formula: Callable
    ours: Callable[[ModuleType], Callable]
    writes: tuple[str, ...] = ()


# Of inputs, by the rows and columns of the result.
_SIZES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "rows": lambda rows, dim: (rows, dim),
    "packed": lambda rows, dim: (rows, 2 * dim),
    "vector": lambda rows, dim: (dim,),
}
_FUSED = (
    Fused(
        "rms_norm_quant",
        ("rows", "vector"),
        lambda x, weight: (eager_rms_norm(x, weight),),
        lambda k: lambda x, weight: k.rms_norm_quant(x, weight, EPS),
    ),
    Fused(
        "fused_add_rms_norm_quant",
        ("rows", "rows", "vector"),
        eager_fused_add_rms_norm,
        lambda k: lambda x, residual, weight: k.fused_add_rms_norm_quant(x, residual, weight, EPS),
        ("rows",),
    ),
    Fused(
        "layer_norm_quant",
        ("rows", "vector", "vector"),
        _normed,
        lambda k: lambda x, weight, bias: k.layer_norm_quant(x, weight, bias, EPS),
    ),
    Fused(
        "ada_layer_norm_quant",
        ("rows", "vector", "vector"),
        _modulated,
        lambda k: lambda x, scale, shift: k.ada_layer_norm_quant(x, scale, shift, eps=EPS),
    ),
    Fused(
        "silu_and_mul_quant",
        ("packed",),
        lambda x: (F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],),
        lambda k: k.silu_and_mul_quant,
    ),
    Fused(
        "swiglu_quant",
        ("rows", "rows"),
        lambda gate, up: (F.silu(gate) * up,),
        lambda k: k.swiglu_quant,
    ),
    Fused(
        "gelu_tanh_quant",
        ("rows",),
        lambda x: (F.gelu(x, approximate="tanh"),),
        lambda k: k.gelu_tanh_quant,
    ),
)
_FUSED_SHAPES = [
    _shape(16384, 4096, "main", "quick"),
    _shape(8192, 14336, "main"),
    _shape(16384, 1024, "odd"),
    _shape(16384, 5120, "odd"),
    _shape(16384, 4097, "odd"),
    _shape(8, 4096, "small"),
    _shape(16384, 4096, "dtype", dtype=torch.float16),
    _shape(2048, 4096, "cpu", "quick"),
]


def _fused_operator(fused: Fused) -> Operator:
    def inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
        sizes = (_SIZES[name](*shape.sizes) for name in fused.inputs)
        return tuple(torch.randn(size, device=device).to(shape.dtype) for size in sizes)

    def contenders(fuselage: ModuleType):
        formula = _quantised(fused.formula)
        return {
            "fuselage": lambda: fused.ours(fuselage),
            "eager": lambda: formula,
            "compile": lambda: compiled(formula),
        }

    def product(results):
        q, scale, *others = results
        return (_product((q, scale)), *others)

    def reference(*exact_and_dtype) -> tuple[torch.Tensor, ...]:
        *exact, _ = exact_and_dtype
        return tuple(fused.formula(*exact))

    def moves(shape: Shape) -> int:
        names = (*fused.inputs, *fused.writes)
        numbers = sum(math.prod(_SIZES[name](*shape.sizes)) for name in names)
        rows, dim = shape.sizes
        return numbers * shape.dtype.itemsize + rows * (dim + 4)

    return Operator(
        name=fused.name,
        shapes=_FUSED_SHAPES,
        make_inputs=inputs,
        contenders=contenders,
        reference=reference,
        tolerances=E4M3_TOLERANCES,
        necessary_bytes={"fwd": moves},
        rest=dict.fromkeys(("fuselage", "eager", "compile"), product),
    )


OPERATORS = [
    _operator("quant_fp8", -1, _formula),
    _operator("quant_fp8-groups", GROUP, _formula_of_groups),
    *map(_fused_operator, _FUSED),
]
