"""What there is to time: operators, their shapes, and the cases that follow from them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch

Call = Callable[..., object]

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Shape:
    """One set of sizes, as the operator's `make_inputs` reads them.

    Tags: `main` rows go to docs/benchmarks.md, `sweep` rows to the plot, `odd`, `small` and `dtype`
    are the rest; `cpu` rows run on the CPU, `quick` rows with `--quick`.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    tags: frozenset[str]
    variant: str = ""

    @property
    def label(self) -> str:
        parts = ["x".join(map(str, self.sizes)), DTYPE_NAMES[self.dtype], self.variant]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Operator:
    """One operator: how to feed it, who computes it, what it must move, what it must compute."""

    name: str
    shapes: Sequence[Shape]
    # (shape, device) -> the floating inputs, in the order of every call; gradients flow to all.
    make_inputs: Callable[[Shape, str], tuple[torch.Tensor, ...]]
    # fuselage -> {contender: factory}; a factory returns the call, or raises and is shown as `-`.
    contenders: Callable[[ModuleType], dict[str, Callable[[], Call]]]
    # (*float64 inputs, dtype of the activations) -> the float64 outputs, differentiable.
    reference: Callable[..., tuple[torch.Tensor, ...]]
    # Roundings of the formula one after another: errors may be so many times as large.
    roundings: int = field(default=1, kw_only=True)
    # Where results are not as exact as their dtype: of the norm of errors, and of an element's.
    tolerances: tuple[float, float] | None = field(default=None, kw_only=True)
    # direction -> bytes that any implementation must move for a shape.
    necessary_bytes: dict[str, Callable[[Shape], int]]
    # Contenders whose backward writes over grad_out.
    overwrites_grad: frozenset[str] = frozenset()
    # Contenders whose backward writes over the inputs: they are given copies.
    overwrites_inputs: frozenset[str] = frozenset()
    # Contenders that do only part of the work: what makes of their results, untimed, the outputs.
    rest: dict[str, Callable[..., object]] = field(default_factory=dict)
    # (fuselage, device) -> sections of host time.
    host_sections: Callable[[ModuleType, str], list[HostSection]] | None = None


@dataclass(frozen=True)
class HostSection:
    """Calls on small tensors whose wall-clock is compared."""

    name: str
    calls: dict[str, Callable[[], Call]]
    subjects: tuple[str, ...]  # which of them are held to the bar
    yardstick: str  # against which of them
    limit: float  # and how many times its time


@dataclass(frozen=True)
class Case:
    """One line of the output."""

    operator: Operator = field(repr=False)
    direction: str  # "fwd" or "bwd"
    shape: Shape
    threads: int | None = None  # on the CPU

    @property
    def key(self) -> str:
        threads = f" {self.threads}t" if self.threads else ""
        return f"{self.operator.name}.{self.direction} {self.shape.label}{threads}"

    @property
    def bytes(self) -> int:
        return self.operator.necessary_bytes[self.direction](self.shape)


def modules() -> dict[str, ModuleType]:
    """Every module in `cases`, in the order of their names."""
    from . import cases

    names = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
    return {name: importlib.import_module(f"{cases.__name__}.{name}") for name in names}


def operators() -> list[Operator]:
    """The `OPERATORS` of these modules."""
    return [operator for module in modules().values() for operator in module.OPERATORS]


def all_cases(device: str, quick: bool) -> list[Case]:
    """Every case of a device: `main` shapes first, so that a run that is cut short has them."""
    cases = []
    for operator in operators():
        for shape in operator.shapes:
            if ("cpu" in shape.tags) != (device == "cpu") or (quick and "quick" not in shape.tags):
                continue
            for direction in operator.necessary_bytes:
                for threads in _thread_counts(quick) if device == "cpu" else [None]:
                    cases.append(Case(operator, direction, shape, threads))
    return sorted(cases, key=lambda case: "main" not in case.shape.tags)


def _thread_counts(quick: bool) -> list[int]:
    return [1] if quick else sorted({1, torch.get_num_threads()})
