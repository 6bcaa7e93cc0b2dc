"""quant_fp8: a scale a row, or one for each 128 columns. Sizes: rows, columns.

What is timed gives codes and scales; what is compared is their product.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..contenders import compiled
from ..registry import Operator, Shape

LIMIT, GROUP = 448.0, 128


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


OPERATORS = [
    _operator("quant_fp8", -1, _formula),
    _operator("quant_fp8-groups", GROUP, _formula_of_groups),
]
