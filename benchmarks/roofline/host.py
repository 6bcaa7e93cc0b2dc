"""Host time: the wall-clock of a call whose device work is negligible."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from .contenders import reset_compiler
from .registry import HostSection

BLOCKS = 10  # between synchronisations
ROUNDS = 3


def measure_section(section: HostSection, device: str, quick: bool) -> dict:
    """Microseconds of each call: of the rounds' median blocks, the smallest."""
    reset_compiler()
    calls, failures = {}, {}
    for name, factory in section.calls.items():
        if quick and "compile" in name:
            continue
        try:
            calls[name] = factory()
            for _ in range(20):
                calls[name]()
        except Exception as error:
            calls.pop(name, None)
            if name.startswith("fuselage.") or name == section.yardstick:
                raise
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    block = 20 if quick else 200
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 if quick else ROUNDS):
        for name, call in calls.items():
            medians[name].append(_median_block(call, block, device))
    return {
        "us": {name: round(min(times), 3) for name, times in medians.items()},
        "rounds": {name: [round(t, 3) for t in times] for name, times in medians.items()},
        "failed": failures,
        "subjects": list(section.subjects),
        "yardstick": section.yardstick,
        "limit": section.limit,
    }


def _median_block(call: Callable, calls: int, device: str) -> float:
    def synchronize():
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(calls // 4):
        call()
    blocks = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(BLOCKS):
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            blocks.append((time.perf_counter() - start) * 1e6 / calls)
    finally:
        gc.enable()
        synchronize()
    return sorted(blocks)[len(blocks) // 2]
