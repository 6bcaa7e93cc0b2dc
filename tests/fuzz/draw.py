"""Everything that is random in a case, and the buffers around its tensors.

A case is its operator and its seed: the same two give the same call on every machine. Values are
made on the CPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from harness import DTYPES
from torch import Tensor

# Elements around and between what a tensor holds. NaN, so that reading one shows in a result.
MARGIN = 16

# Row strides exceed the rows by so much: odd, a vector, more.
GAPS = (1, 3, 8, 32)


@dataclass
class Buffer:
    """Memory of a tensor with what is around it, and what it held before the call."""

    name: str
    memory: Tensor
    kept: Tensor
    view: Tensor
    written: bool = False  # the call may write to `view`, and to nothing else

    def changed(self) -> Tensor:
        """Which elements of the memory are not as they were, of those that no call may change."""
        if self.written:
            own = (self.view.shape, self.view.stride(), self.view.storage_offset())
            self.kept.as_strided(*own).copy_(self.view)
        size = self.memory.element_size()
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        return self.memory.view(integer) != self.kept.view(integer)


class Draw:
    """The random choices of one case."""

    def __init__(self, name: str, seed: int, device: str):
        self.random = random.Random(f"{name} {seed}")
        torch.manual_seed(self.random.getrandbits(60))
        self.device = device
        self.buffers: list[Buffer] = []

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, values: Sequence):
        return values[self.random.randrange(len(values))]

    def weighted(self, **weights: float) -> str:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def dtype(self) -> torch.dtype:
        return self.choice(DTYPES)

    # Shapes

    def dim(self, most: int = 1 << 18) -> int:
        kind = self.weighted(small=50, power=35, any=12, huge=3)
        if kind == "small":
            return min(most, self.integer(1, 300))
        if kind == "power":
            power = 2 ** self.integer(0, 14) + self.choice((-1, 0, 0, 0, 1, 4, 8))
            return max(1, min(most, power))
        return self.integer(1, min(most, 20_000 if kind == "any" else 1 << 18))

    def shape(self) -> tuple[int, ...]:
        """`[..., dim]`: seldom empty, and as many rows as `elements` has room for."""
        dim = self.dim()
        rows = self.rows(max(1, self.elements() // dim))
        lead = [rows]
        while len(lead) < 3 and self.chance(0.35):
            part = self.integer(1, 4)
            lead = [part, max(1, lead[0] // part), *lead[1:]]
        if self.chance(0.1):
            lead = []
        shape = [*lead, dim]
        if self.chance(0.03):
            shape[self.integer(0, len(shape) - 1)] = 0
        return tuple(shape)

    def rows(self, most: int) -> int:
        return min(most, self.choice((1, 2, 3, self.integer(1, 40), self.integer(1, 4100), most)))

    def elements(self) -> int:
        """Of a tensor, at most: float64 of all takes the time."""
        few, many = (14, 18) if self.device == "cpu" else (18, 23)
        return 1 << (many if self.chance(0.1) else few)

    # Layouts

    def lay_out(self, name: str, values: Tensor, *, rows: bool = False, written: bool = False):
        """`values` in a guarded buffer: at any offset, with gaps, steps, permuted or expanded.

        Args:
            name: What a message calls it.
            values: Contiguous.
            rows: Only layouts of rows of adjacent elements with one stride between them.
            written: The call may write to the values.
        """
        weights = {"plain": 40, "rows": 35, "any": 25}
        if rows or values.numel() > 1 << 20:
            del weights["any"]
        kind = self.weighted(**weights)
        if values.dim() == 0 or values.numel() == 0:
            kind = "plain"
        shape = values.shape
        sizes, steps, starts = list(values.shape), [1] * values.dim(), [0] * values.dim()
        order = list(range(values.dim()))
        if kind == "rows":
            gap = self.choice(GAPS)
            starts[-1] = self.integer(0, gap)
            sizes[-1] += gap
        elif kind == "any":
            self.random.shuffle(order)
            for axis in range(values.dim()):
                if self.chance(0.2):
                    values = values.narrow(axis, 0, 1)
                    sizes[axis] = 1
                elif sizes[axis] <= 1 << 12:
                    steps[axis] = self.choice((1, 1, 1, 2))
                    starts[axis] = self.integer(0, 3)
                    sizes[axis] = starts[axis] + sizes[axis] * steps[axis]
        return self._view(name, values, sizes, order, steps, starts, written).expand(shape)

    def _view(self, name, values, sizes, order, steps, starts, written) -> Tensor:
        front = self.choice((0, self.integer(1, MARGIN)))
        memory = torch.empty(front + math.prod(sizes) + MARGIN, dtype=values.dtype)
        memory.view(torch.uint8).fill_(0xFF)  # NaN of every float, -1 of every integer
        view = memory[front : front + math.prod(sizes)].view([sizes[axis] for axis in order])
        view = view.permute([order.index(axis) for axis in range(len(sizes))])
        for axis, (step, start) in enumerate(zip(steps, starts, strict=True)):
            if sizes[axis] != 1:
                view = view.narrow(axis, start, values.shape[axis] * step)
                view = view[(slice(None),) * axis + (slice(None, None, step),)]
        view.copy_(values)
        memory = memory.to(self.device)
        view = memory.as_strided(view.shape, view.stride(), view.storage_offset())
        self.buffers.append(Buffer(name, memory, memory.clone(), view, written))
        return view

    # Values

    def regime(self) -> str:
        """What kind of values a case has, of each tensor on its own."""
        return self.weighted(normal=55, scaled=12, constant=5, special=14, extreme=14)

    def change(self, values: Tensor, regime: str) -> Tensor:
        """`values`, as far from ordinary as `regime` says."""
        if regime == "normal" or not values.is_floating_point() or values.numel() == 0:
            return values
        info = torch.finfo(values.dtype)
        if regime == "scaled":
            return values * self.choice((1e-4, 1e-2, 1.0, 30.0, 300.0))
        if regime == "constant":
            number = self.choice((0.0, -0.0, 1.0, 300.1, -1e-3, 77.7))
            return torch.full_like(values, number)
        if regime == "special":
            values = values.clone()
            often = (float("inf"), -float("inf"), float("nan"))
            seldom = (0.0, -0.0, info.max, info.min, info.tiny, -info.smallest_normal / 4)
            for _ in range(self.integer(1, 4)):
                number = self.choice(often if self.chance(0.6) else seldom)
                values.view(-1)[self.integer(0, values.numel() - 1)] = number
            return values
        # Powers of ten that leave room to the overflow, and to what float32 has as subnormal.
        highest = math.floor(math.log10(info.max))
        scale = 10.0 ** self.choice((-30, -20, -10, -5, 3, 10, 18, 25, 30, highest - 1, highest))
        return (values.double().clamp(-3, 3) * scale).clamp(info.min, info.max).to(values.dtype)
