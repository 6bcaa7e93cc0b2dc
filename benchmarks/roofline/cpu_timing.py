"""Times calls on the CPU with `perf_counter`, rotating over sets of inputs."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator

from .registry import Case

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt


class CpuTimer:
    """Wall-clock; the caches are not flushed, but no set is used twice in a row."""

    turns = 1

    def __init__(self, quick: bool):
        self.round_s = 0.01 if quick else 0.075
        self.method = {
            "clock": "perf_counter",
            "seconds a round": self.round_s,
            "allocator": "keeps freed memory" if _keep_freed_memory() else "as it is",
            "load average at the start": os.getloadavg()[0],
        }

    def prepare(self, case: Case) -> None:
        import torch

        torch.set_num_threads(case.threads)

    def sets(self, case: Case) -> int:
        """Enough for 128 MB, four to eight."""
        return min(8, max(4, 128_000_000 // max(1, case.bytes)))

    def describe(self, case: Case) -> dict:
        return {"method": "calls", "sets": self.sets(case)}

    def contender(self, case: Case, call: Callable[[int], tuple], checked: bool) -> Callable:
        """A function that times the call for one turn."""
        sets = self.sets(case)
        for i in range(sets):
            call(i)
        start = time.perf_counter()
        call(0)
        once = time.perf_counter() - start
        batch = max(1, round(200e-6 / once))  # calls between two readings of the clock
        count = max(3, round(self.round_s / (once * batch)))

        def one_turn() -> Iterator[float]:
            i = 0
            for _ in range(count):
                start = time.perf_counter()
                for _ in range(batch):
                    call(i)
                    i = (i + 1) % sets
                yield (time.perf_counter() - start) * 1e6 / batch

        return one_turn

    def release(self) -> None:
        """Nothing is held."""


def _keep_freed_memory() -> bool:
    """Lets glibc reuse large blocks, for every contender.

    By default a result of 32 MiB and more is mapped anew for each call, and the kernel's zeroing of
    its pages takes several times as long as the operator.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
