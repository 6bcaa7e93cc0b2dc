"""gated_rms_norm: norm first, gate first, and gate first in groups."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from ..contenders import compiled
from ..registry import Operator, Shape

EPS = 1e-6
GROUPS = 8


def _shape(rows: int, dim: int, *tags: str, dtype=torch.bfloat16) -> Shape:
    return Shape((rows, dim), dtype, frozenset(tags))


def _rows_for(dim: int, mebibytes: int = 128) -> int:
    return mebibytes * 2**20 // (2 * dim)


_CPU = [
    _shape(2048, 4096, "cpu", "main", dtype=torch.float32),
    _shape(2048, 4096, "cpu", "main"),
    _shape(1024, 1024, "cpu", "main", "quick"),
]
# Qwen3-Next has 32 heads of 128 columns a token; Mamba 2 has 4096 to 8192 columns.
_NORM_FIRST = [
    _shape(16384, 4096, "main", "quick"),
    _shape(262144, 128, "main"),
    _shape(1048576, 128, "odd"),
    _shape(524288, 256, "odd"),
    _shape(_rows_for(4097), 4097, "odd"),
    _shape(64, 4096, "small"),
    _shape(32, 128, "small"),
    _shape(16384, 4096, "dtype", dtype=torch.float32),
    *_CPU,
]
_GATE_FIRST = [
    _shape(16384, 4096, "main", "quick"),
    _shape(8192, 8192, "main"),
    _shape(_rows_for(5120), 5120, "odd"),
    _shape(_rows_for(32768), 32768, "odd"),
    _shape(64, 4096, "small"),
    *_CPU,
]
_IN_GROUPS = [
    _shape(8192, 8192, "main", "quick"),
    _shape(16384, 4096, "odd"),
    _shape(64, 8192, "small"),
    *_CPU,
]


def _inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    x, gate = (torch.randn(shape.sizes, device=device, dtype=shape.dtype) for _ in range(2))
    weight = 1.0 + 0.1 * torch.randn(shape.sizes[-1], device=device)
    return x, gate, weight.to(shape.dtype)


def _moves(activations: int, weights: int) -> Callable[[Shape], int]:
    def count(shape: Shape) -> int:
        rows, dim = shape.sizes
        return (activations * rows + weights) * dim * shape.dtype.itemsize

    return count


def _normalised(x: torch.Tensor, groups: int) -> torch.Tensor:
    x = x.unflatten(-1, (groups, -1))
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).flatten(-2)


def _formula(norm_first: bool, groups: int) -> Callable:
    def formula(x, gate, weight):
        a = F.silu(gate)
        if norm_first:
            return _normalised(x, groups) * weight * a
        return _normalised(x * a, groups) * weight

    return formula


def _operator(name: str, shapes: list[Shape], norm_first: bool, groups: int = 1) -> Operator:
    formula = _formula(norm_first, groups)

    def eager(x, gate, weight):
        return formula(x.float(), gate.float(), weight.float()).to(x.dtype)

    def contenders(fuselage: ModuleType):
        def ours(x, gate, weight):
            return fuselage.gated_rms_norm(
                x,
                gate,
                weight,
                EPS,
                norm_before_gate=norm_first,
                group_size=None if groups == 1 else x.shape[-1] // groups,
            )

        return {
            "fuselage": lambda: ours,
            "eager": lambda: eager,
            "compile": lambda: compiled(eager),
        }

    return Operator(
        name=name,
        shapes=shapes,
        make_inputs=_inputs,
        contenders=contenders,
        reference=lambda x, gate, weight, dtype: (formula(x, gate, weight),),
        necessary_bytes={"fwd": _moves(3, 1), "bwd": _moves(5, 2)},
    )


OPERATORS = [
    _operator("gated_rms_norm", _NORM_FIRST, True),
    _operator("gated_rms_norm-gate-first", _GATE_FIRST, False),
    _operator("gated_rms_norm-groups", _IN_GROUPS, False, GROUPS),
]
