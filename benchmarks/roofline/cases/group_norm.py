"""group_norm, contiguous and channels last, alone and with silu after it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from ..contenders import compiled
from ..registry import Operator, Shape

EPS = 1e-6


def _shape(*sizes: int, tags: tuple[str, ...], dtype=torch.bfloat16) -> Shape:
    return Shape(sizes, dtype, frozenset(tags))


def _groups(channels: int) -> int:
    return 32 if channels % 32 == 0 else 5


_CPU = [
    _shape(1, 256, 128, 128, tags=("cpu", "main"), dtype=torch.float32),
    _shape(1, 256, 128, 128, tags=("cpu", "main")),
    _shape(2, 320, 32, 32, tags=("cpu", "main", "quick")),
]
# Decoders of autoencoders have few large groups; a step of a UNet has many small ones.
_SHAPES = [
    _shape(1, 256, 512, 512, tags=("main", "quick")),
    _shape(1, 128, 1024, 1024, tags=("main",)),
    _shape(2, 640, 64, 64, tags=("main",)),
    _shape(1, 512, 128, 128, tags=("odd",)),
    _shape(2, 320, 128, 128, tags=("odd",)),
    _shape(3, 30, 517, 519, tags=("odd",)),
    _shape(2, 1280, 16, 16, tags=("small",)),
    _shape(3, 30, 17, 19, tags=("small",)),
    _shape(1, 256, 512, 512, tags=("dtype",), dtype=torch.float32),
    *_CPU,
]


def _inputs(last: bool) -> Callable:
    def inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
        x = torch.randn(shape.sizes, device=device, dtype=shape.dtype)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        weight, bias = (0.1 * torch.randn(shape.sizes[1], device=device) for _ in range(2))
        return x, (1.0 + weight).to(shape.dtype), bias.to(shape.dtype)

    return inputs


def _moves(activations: int, vectors: int) -> Callable[[Shape], int]:
    """Every tensor once. NOTE: what is larger than the caches is read twice by any kernel."""

    def count(shape: Shape) -> int:
        samples, channels, height, width = shape.sizes
        elements = activations * samples * height * width + vectors
        return elements * channels * shape.dtype.itemsize

    return count


def _formula(silu: bool) -> Callable:
    def formula(x, weight, bias):
        out = F.group_norm(x, _groups(x.shape[1]), weight, bias, EPS)
        return F.silu(out) if silu else out

    return formula


def _operator(name: str, silu: bool, last: bool) -> Operator:
    formula = _formula(silu)

    def contenders(fuselage: ModuleType):
        def ours(x, weight, bias):
            activation = "silu" if silu else None
            groups = _groups(x.shape[1])
            return fuselage.group_norm(x, groups, weight, bias, EPS, activation=activation)

        return {
            "fuselage": lambda: ours,
            "torch": lambda: formula,
            "compile": lambda: compiled(formula),
        }

    return Operator(
        name=name,
        shapes=_SHAPES,
        make_inputs=_inputs(last),
        contenders=contenders,
        reference=lambda x, weight, bias, dtype: (formula(x, weight, bias),),
        necessary_bytes={"fwd": _moves(2, 2), "bwd": _moves(3, 4)},
    )


OPERATORS = [
    _operator("group_norm", False, False),
    _operator("group_norm-channels-last", False, True),
    _operator("group_norm-silu", True, False),
    _operator("group_norm-silu-channels-last", True, True),
]
