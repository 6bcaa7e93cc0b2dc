"""Times device work as replays of CUDA graphs. The package's docstring explains the method."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .registry import Case
from .verify import NORM_TOLERANCE, WrongResult

L2_MULTIPLE = 4  # bytes touched between two uses of a set, over the L2's size
MOST_SETS = 256
FEWEST_SETS = 4
FEWEST_CALLS = 20  # in a graph
SLOW_CALL_US = 200  # a call this long, and three times the floor, needs no more calls than sets
FLOOR_GBS = 4000  # only to tell what is slow
WARM_UP_MS = 0.5  # of each contender in each turn, of graphs that are shorter
TURN_MS = 2
MOST_REPLAYS = 4  # in a turn


@dataclass(frozen=True)
class Plan:
    """How one case is timed."""

    flush: bool
    sets: int


class CudaTimer:
    """Works on one stream of its own, on which warm-up, forward and capture all happen."""

    turns = 4

    def __init__(self, quick: bool):
        self.l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.flush_buffer = torch.empty(
            L2_MULTIPLE * self.l2_bytes // 4, dtype=torch.int32, device="cuda"
        )
        self.method = {
            "clock": "CUDA events around graph replays",
            "L2 bytes": self.l2_bytes,
            "L2 multiple": L2_MULTIPLE,
            "fewest calls a graph": FEWEST_CALLS,
        }

    def prepare(self, case: Case) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def plan(self, case: Case) -> Plan:
        sets = max(FEWEST_SETS, -(-L2_MULTIPLE * self.l2_bytes // case.bytes))
        return Plan(flush=True, sets=1) if sets > MOST_SETS else Plan(flush=False, sets=sets)

    def sets(self, case: Case) -> int:
        return self.plan(case).sets

    def describe(self, case: Case) -> dict:
        plan = self.plan(case)
        return {"method": "flush" if plan.flush else "rotate", "sets": plan.sets}

    def contender(self, case: Case, call: Callable[[int], tuple], checked: bool) -> Callable:
        """Captures the call and returns a function that times the graph for one turn."""
        plan = self.plan(case)
        estimate_us = _warm_up(call, plan.sets)
        calls = plan.sets * -(-FEWEST_CALLS // plan.sets)
        if plan.flush:
            calls = 1
        elif estimate_us > max(SLOW_CALL_US, 3 * case.bytes / FLOOR_GBS / 1e3):
            calls = plan.sets
        captured = _capture(call, plan.sets, calls)
        if checked:
            _check_replay(case, call, captured)
        flush = self.flush_buffer.zero_ if plan.flush else None

        graph_ms = _time_replays(captured, 2, flush)[1]
        warm_up = _between(0, WARM_UP_MS / graph_ms, 10)
        replays = _between(1, TURN_MS / graph_ms, MOST_REPLAYS)

        def one_turn() -> Iterator[float]:
            for milliseconds in _time_replays(captured, warm_up + replays, flush)[warm_up:]:
                yield milliseconds * 1e3 / calls

        return one_turn

    def release(self) -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Captured:
    """A graph and the last outputs of each set, which must live as long as it is replayed."""

    graph: torch.cuda.CUDAGraph
    outputs: list[tuple]


def _between(least: int, value: float, most: int) -> int:
    return max(least, min(most, int(value)))


def _warm_up(call: Callable[[int], tuple], sets: int) -> float:
    """Compiles, tunes, loads; returns the time of a call in microseconds."""
    for i in (0, 0, sets - 1):
        call(i)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # cycles, about 2 ms, in which the host gets ahead
    start.record()
    for _ in range(2):
        call(0)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / 2


def _capture(call: Callable[[int], tuple], sets: int, calls: int) -> Captured:
    """A graph of `calls` calls that rotate over the sets.

    The outputs stay referenced, so that each set writes into memory of its own. `torch.cuda.graph`
    would empty the allocator's cache before every capture; this does not.
    """
    graph = torch.cuda.CUDAGraph()
    outputs: list[tuple] = [()] * sets
    torch.cuda.synchronize()
    gc.collect(0)
    gc.disable()  # a collection could free CUDA objects, which a capture forbids
    try:
        graph.capture_begin()
        try:
            for i in range(calls):
                outputs[i % sets] = call(i % sets)
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return Captured(graph, outputs)


def _check_replay(case: Case, call: Callable[[int], tuple], captured: Captured) -> None:
    """Overwrites the outputs, replays, compares the first and last set with direct calls."""
    outputs = captured.outputs
    for tensor in (tensor for tensors in outputs for tensor in tensors):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    captured.graph.replay()
    for i in sorted({0, len(outputs) - 1}):
        for replayed, direct in zip(outputs[i], call(i)):
            direct = direct.float()
            difference = ((replayed.float() - direct).norm() / direct.norm()).item()
            if not difference <= NORM_TOLERANCE[case.shape.dtype]:
                raise WrongResult(f"the replayed graph is {difference:.2e} off a direct call")


def _time_replays(
    captured: Captured, count: int, flush: Callable[[], object] | None
) -> list[float]:
    """Milliseconds of each replay; all are queued at once, so the device never waits."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000)  # cycles; the host gets ahead
    for start, end in events:
        if flush is not None:
            flush()
        start.record()
        captured.graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]
