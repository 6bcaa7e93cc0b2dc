"""Holds results to the bar: which rows miss it, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LARGE_BYTES = 64_000_000
OVER_COPY = {"fwd": 1.03, "bwd": 1.08}
BASELINES = ("eager", "torch", "compile", "liger")
NOISE = 1.02
CPU_SPEED_UP = 5.0  # over F.rms_norm, float32
CPU_NOISE = 1.05  # bfloat16 over float32


@dataclass(frozen=True)
class Check:
    """One rule on one row: `measured` is at most `limit`, or at least."""

    row: str
    rule: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def missed(self) -> bool:
        if self.at_least:
            return not self.measured >= self.limit
        return not self.measured <= self.limit


def checks(results: dict) -> list[Check]:
    """Every rule on every row it applies to."""
    found: list[Check] = []
    on_cpu = "cuda" not in results["environment"]
    for key, case in results["cases"].items():
        found += _cpu_checks(key, case, results["cases"]) if on_cpu else _gpu_checks(key, case)
    if not on_cpu:
        for name, section in results["host"].items():
            found += _host_checks(name, section)
    return found


def _gpu_checks(key: str, case: dict) -> Iterator[Check]:
    us = case["contenders"]["fuselage"]["us"]
    if case["bytes"] >= LARGE_BYTES:
        limit = OVER_COPY[case["direction"]]
        yield Check(key, "time over copy", us / case["copy"]["us"], limit)
    yield from _against_baselines(key, case, us)


def _cpu_checks(key: str, case: dict, cases: dict) -> Iterator[Check]:
    us = case["contenders"]["fuselage"]["us"]
    if case["dtype"] == "float32" and "torch" in case["contenders"]:
        speed_up = case["contenders"]["torch"]["us"] / us
        yield Check(key, "speed-up over torch", speed_up, CPU_SPEED_UP, at_least=True)
    twin = cases.get(key.replace("bf16", "fp32"))
    if case["dtype"] == "bfloat16" and twin:
        slower = us / twin["contenders"]["fuselage"]["us"]
        yield Check(key, "bf16 over fp32", slower, CPU_NOISE)
    yield from _against_baselines(key, case, us)


def _against_baselines(key: str, case: dict, us: float) -> Iterator[Check]:
    times = {n: c["us"] for n, c in case["contenders"].items() if n in BASELINES}
    if times:
        best = min(times, key=times.__getitem__)
        yield Check(key, f"time over the best baseline ({best})", us / times[best], NOISE)


def _host_checks(name: str, section: dict) -> Iterator[Check]:
    times = section["us"]
    for subject in section["subjects"]:
        ratio = times[subject] / times[section["yardstick"]]
        yield Check(
            f"host: {name}: {subject}", f"over {section['yardstick']}", ratio, section["limit"]
        )
