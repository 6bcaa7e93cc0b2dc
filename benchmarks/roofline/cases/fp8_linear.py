"""A float8 linear layer of few rows: the input is quantised and multiplied in one call.

Sizes: rows, outputs, columns.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from ..contenders import compiled
from ..registry import HostSection, Operator, Shape
from .quant import _formula


def _shape(rows: int, out: int, dim: int, *tags: str) -> Shape:
    return Shape((rows, out, dim), torch.bfloat16, frozenset(tags))


# The projections of 8B models, in decoding.
_SHAPES = [
    _shape(8, 4096, 4096, "main", "quick"),
    _shape(8, 14336, 4096, "main"),
    _shape(8, 4096, 14336, "main"),
    _shape(1, 4096, 4096, "small"),
    _shape(16, 14336, 4096, "small"),
    _shape(8, 1024, 4096, "small"),
    _shape(8, 2048, 2048, "cpu", "quick"),
]


def _inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    rows, out, dim = shape.sizes
    x = torch.randn(rows, dim, device=device).to(shape.dtype)
    return (x, *_formula(torch.randn(out, dim, device=device)))


def _scaled_mm(x, weight, weight_scale):
    q, scale = _formula(x)
    options = {"scale_a": scale, "scale_b": weight_scale.t(), "use_fast_accum": True}
    return torch._scaled_mm(q, weight.t(), out_dtype=torch.bfloat16, **options)


def _contenders(fuselage: ModuleType):
    op = fuselage._fp8.linear

    def ours(x, weight, weight_scale):
        return op(x, weight, weight_scale, None, True, x.dtype)[0]

    return {
        "fuselage": lambda: ours,
        "eager": lambda: _scaled_mm,
        "compile": lambda: compiled(_scaled_mm),
    }


def _reference(x, weight, weight_scale, dtype: torch.dtype) -> tuple[torch.Tensor]:
    q, scale = _formula(x.to(dtype))
    return ((q.double() * scale.double()) @ (weight.double() * weight_scale.double()).T,)


def _moves(shape: Shape) -> int:
    rows, out, dim = shape.sizes
    return out * (dim + 4) + rows * (dim + out) * shape.dtype.itemsize


def _host_sections(fuselage: ModuleType, device: str) -> list[HostSection]:
    return [_host_section(fuselage, device, rows) for rows in (8, 512)]


def _host_section(fuselage: ModuleType, device: str, rows: int) -> HostSection:
    x = torch.randn(rows, 256, device=device, dtype=torch.bfloat16)
    linear = torch.nn.Linear(256, 256, False, device=device, dtype=x.dtype).requires_grad_(False)
    fp8 = fuselage.modules.Fp8Linear.from_linear(linear)
    return HostSection(
        name=f"Fp8Linear of {rows} rows",
        calls={
            "F.linear": lambda: lambda: F.linear(x, linear.weight),
            "nn.Linear": lambda: lambda: linear(x),
            "fuselage.Fp8Linear": lambda: lambda: fp8(x),
        },
        subjects=("fuselage.Fp8Linear",),
        yardstick="nn.Linear",
        limit=1.5,
    )


OPERATORS = [
    Operator(
        name="fp8_linear",
        shapes=_SHAPES,
        make_inputs=_inputs,
        contenders=_contenders,
        reference=_reference,
        necessary_bytes={"fwd": _moves},
        host_sections=_host_sections,
    )
]
