"""Time, memory, and where the time goes."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

# Device kernels by their names, and the CPU's operators by theirs.
_MATMUL = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|aten::(addmm|mm|bmm|baddbmm|linear)$",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
_FUSELAGE = re.compile(r"fuselage", re.IGNORECASE)
_OPTIMIZER = re.compile(r"adam|multi_tensor|foreach", re.IGNORECASE)
# The compiler's own, whose names tell of all that they are fused with.
_GENERATED = re.compile(r"^triton_(poi|red|per)_")
_KINDS = (
    ("other", _GENERATED),
    ("fuselage", _FUSELAGE),  # before others: none of ours is a matmul or attention
    ("attention", _ATTENTION),
    ("matmul", _MATMUL),
    ("optimizer", _OPTIMIZER),
)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Gives back the memory of what is gone."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def nothing() -> None:
    """What most runs need before them."""


def times(
    run: Callable[[], object],
    device: str,
    seconds: float,
    least: int = 5,
    before: Callable[[], object] = nothing,
) -> list[float]:
    """Milliseconds of single runs, for about `seconds`. Host time, from idle to idle.

    What happens in `before`, before each run, is not in them, nor is Python's garbage collection.
    """
    for _ in range(2):
        before()
        run()
    found: list[float] = []
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        while len(found) < least or time.perf_counter() < end:
            before()
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            found.append((time.perf_counter() - start) * 1e3)
    finally:
        gc.enable()
    return found


def by_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Each name once a round, there and back, so that none always comes after the same other."""
    for round_ in range(rounds):
        yield from names if round_ % 2 == 0 else reversed(names)


def peak_memory(run: Callable[[], object], device: str) -> float | None:
    """GiB, weights included. None on a CPU."""
    if device != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats()
    run()
    wait(device)
    return torch.cuda.max_memory_allocated() / 2**30


def breakdown(run: Callable[[], object], device: str) -> dict[str, float]:
    """Milliseconds of one run by kind of kernel: fuselage's, attention, matmul and all others."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU] if device == "cpu" else [activity.CPU, activity.CUDA]
    wait(device)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        wait(device)
    total = {"fuselage": 0.0, "attention": 0.0, "matmul": 0.0, "optimizer": 0.0, "other": 0.0}
    for event in profile.key_averages():
        if getattr(event, "is_user_annotation", False):
            continue  # its time is that of the kernels under it
        if device == "cpu":
            spent = event.self_cpu_time_total
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            spent = event.self_device_time_total
        else:
            continue
        kind = next((kind for kind, names in _KINDS if names.search(event.key)), "other")
        total[kind] += spent / 1e3
    return total


def summary(found: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}
