"""Runs the scenarios: verify first, then time four columns, then write and print the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from ..roofline import results
from ..roofline.contenders import load_fuselage
from . import measure
from .report import table
from .scenarios import SCENARIOS, Scenario

COLUMNS = ("eager", "eager + fuselage", "torch.compile", "torch.compile + fuselage")

# A mistake shows in float32. Many layers in bfloat16 differ by their roundings from any other
# arithmetic, and from float32 as much: that check is only for what works in float32 alone.
EXACT_LAYERS, EXACT_LIMIT, HALF_LIMIT = 2, 1e-4, 0.25


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end",
        description="Times whole models with random weights in four columns.",
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--only", action="append", choices=SCENARIOS, help="repeatable; default: all")
    add("--quick", action="store_true", help="small models, in float32: a test of the benchmark")
    add("--layers", type=int, help="fewer layers than the model has; the table says so")
    add("--seconds", type=float, default=3.0, help="of timing, for each column")
    add("--no-compile", action="store_true", help="the first two columns alone")
    add("--output", type=Path, help="the results file; default: benchmarks/results/...")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a patched model does not compute what the plain one does."""
    options = parse_arguments(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and not options.quick:
        print("on a CPU only --quick is feasible", file=sys.stderr)
        return 2
    if options.quick:
        options.seconds = min(options.seconds, 0.1)
    fuselage = load_fuselage(device)
    path = options.output or results.FOLDER / f"end_to_end_{results.slug(device)}.json"
    stored = results.load(path)
    stored["environment"] = results.environment(device, "transformers", "diffusers", "accelerate")
    origin = results.provenance(fuselage)
    failed = False
    for name in options.only or SCENARIOS:
        started = time.perf_counter()
        torch.manual_seed(0)
        try:
            exact = None if options.quick else exact_error(name, fuselage, device)
            scenario = SCENARIOS[name](device, options.quick, options.layers)
        except ModuleNotFoundError as error:
            print(f"\n{name}: left out, {error}", flush=True)
            continue
        print(f"\n{scenario.title}", *scenario.notes, sep="\n  ", flush=True)
        integration = getattr(fuselage.integrations, scenario.integration)
        record = run(scenario, integration, options, device, exact)
        stored["cases"][name] = {**origin, **record}
        print(table(record), f"({time.perf_counter() - started:.0f} s)", sep="\n", flush=True)
        failed |= not record["verified"]
        if not options.quick or options.output:
            results.save(path, stored)
        del scenario
        measure.free(device)
    return int(failed)


def exact_error(name: str, fuselage, device: str) -> float:
    """How far apart the outputs are in float32, with few layers. Nothing is left patched."""
    scenario = SCENARIOS[name](device, False, EXACT_LAYERS, exact=True)
    expected = scenario.outputs(scenario.model)
    integration = getattr(fuselage.integrations, scenario.integration)
    integration.patch(scenario.model)
    error = error_of(scenario, scenario.model, expected)
    del scenario
    measure.free(device)
    return error


def run(
    scenario: Scenario,
    integration,
    options: argparse.Namespace,
    device: str,
    exact: float | None,
) -> dict:
    """All columns of one scenario; `exact` is what `exact_error` has found."""
    model = scenario.model
    expected = scenario.outputs(model)
    report = integration.patch(model)
    error = error_of(scenario, model, expected)
    integration.unpatch(model)
    limit = EXACT_LIMIT if options.quick else HALF_LIMIT
    verified = error <= limit and bool(report.replaced)
    print(f"  outputs differ by {error:.1e} (RMS, relative); the limit is {limit}")
    if exact is not None:
        verified &= exact <= EXACT_LIMIT
        print(f"  {EXACT_LAYERS} layers in fp32: by {exact:.1e}; the limit is {EXACT_LIMIT}")
    columns = {}
    if verified:
        for compiled in (False,) if options.no_compile else (False, True):
            columns |= timed_pair(
                scenario, integration, compiled, options.seconds, device, expected
            )
        wrong = [name for name, column in columns.items() if column["error"] > limit]
        for name in wrong:
            print(f"  FAILED: {name} differs by {columns.pop(name)['error']:.1e}; left out")
        verified = not wrong
        for name, column in columns.items():  # last: a profiler may slow down what runs after it
            with state(scenario, integration, name) as call:
                for _ in range(3):  # compiling, and capturing graphs, take kernels of their own
                    scenario.before()
                    scenario.step(call)
                scenario.before()
                column["breakdown"] = measure.breakdown(partial(scenario.step, call), device)
    else:
        print("  FAILED: not timed")
    return {
        "title": scenario.title,
        "notes": scenario.notes,
        "verified": verified,
        "error": error,
        "float32_error": exact,
        "per_sample": scenario.per_sample,
        "replaced": len(report.replaced),
        "left_alone": len(report.left_alone),
        "columns": columns,
    }


@contextmanager
def state(scenario: Scenario, integration, name: str) -> Iterator[Callable]:
    """What to call for the column of that name."""
    patched = name.endswith("fuselage")
    if patched:
        integration.patch(scenario.model)
    compiled = name.startswith("torch.compile")
    call, undo = scenario.compiled() if compiled else (scenario.model, measure.nothing)
    try:
        yield call
    finally:
        undo()
        if patched:
            integration.unpatch(scenario.model)


def timed_pair(
    scenario: Scenario,
    integration,
    compiled: bool,
    seconds: float,
    device: str,
    expected: tuple[torch.Tensor, ...],
) -> dict[str, dict]:
    """The plain column and that with fuselage: error, milliseconds of a step, and GiB.

    The plain one is timed before and after the other: what drifts meanwhile is in both. A column
    that runs out of memory is left out.
    """
    plain, patched = COLUMNS[2 * compiled : 2 * compiled + 2]
    found: dict[str, list[float]] = {plain: [], patched: []}
    peaks: dict[str, float | None] = {}
    errors: dict[str, float] = {}
    for name, part in ((plain, seconds / 2), (patched, seconds), (plain, seconds / 2)):
        try:
            with state(scenario, integration, name) as call:
                errors[name] = error_of(scenario, call, expected)
                scenario.before()
                step = partial(scenario.step, call)
                found[name] += measure.times(step, device, part, before=scenario.before)
                scenario.before()
                peaks[name] = measure.peak_memory(step, device)
        except torch.OutOfMemoryError:
            print(f"  out of memory: {name} is left out", flush=True)
            found[name].clear()
            scenario.model.zero_grad()
            measure.free(device)
    return {
        name: {
            "milliseconds": measure.summary(times),
            "runs": len(times),
            "peak_gib": peaks[name],
            "error": errors[name],
        }
        for name, times in found.items()
        if times
    }


def error_of(scenario: Scenario, call: Callable, expected: tuple[torch.Tensor, ...]) -> float:
    """The largest error of the outputs of `call`."""
    return max(map(relative_error, scenario.outputs(call), expected))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over the RMS of what is expected."""
    actual, expected = actual.double(), expected.double()
    if not actual.isfinite().all():
        return float("inf")
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()
