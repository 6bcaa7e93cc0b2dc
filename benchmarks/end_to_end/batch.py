"""The largest batch that the memory of the device has room for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from . import measure

# The search ends when what fits and what does not are so close: this part of what fits, or one.
RESOLUTION = 16


@dataclass
class Batches:
    """What the search tries.

    Attributes:
        run: Does all of a step that takes memory, with so many sequences.
        tokens: In each sequence.
        first: Sequences to begin with.
        most: Sequences to end with.
    """

    run: Callable[[int], object]
    tokens: int
    first: int
    most: int


def largest(batches: Batches, device: str, seconds: float) -> dict[str, int | None]:
    """The most sequences that have fitted, and the fewest that have not, None if all have.

    Doubles, then bisects. After `seconds` no other batch is tried, so that the two may be far
    apart. One that fits has run once.
    """
    end = time.perf_counter() + seconds
    fits, fails, size = 0, None, batches.first
    while True:
        measure.free(device)
        if has_room(partial(batches.run, size), device):
            fits = size
        else:
            fails = size
        if fails is None:
            found, size = fits >= batches.most, min(2 * fits, batches.most)
        else:
            found, size = fails - fits <= max(1, fits // RESOLUTION), (fits + fails) // 2
        if found or time.perf_counter() >= end:
            measure.free(device)
            return {"fits": fits, "fails": fails}


def has_room(run: Callable[[], object], device: str) -> bool:
    """Whether it runs without running out of memory."""
    try:
        run()
        measure.wait(device)
    except RuntimeError as error:
        # NOTE: the driver, which loads a kernel when it is first launched, has its own error.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return False
        raise
    return True
