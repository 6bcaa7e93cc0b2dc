"""Runs the scenarios: verify first, then time all columns, then write and print the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import torch

from ..roofline import results
from ..roofline.contenders import load_fuselage
from . import batch, measure, peers
from .report import table
from .scenarios import SCENARIOS, Scenario

# Each has a column of its own, and one for each variant of a scenario: "eager + fuselage".
MODES = ("eager", "torch.compile")

# A mistake shows in float32. Many layers in bfloat16 differ by their roundings from any other
# arithmetic, and from float32 as much: that check is only for what works in float32 alone.
EXACT_LAYERS, EXACT_LIMIT, HALF_LIMIT = 2, 1e-4, 0.25
# Random weights do not average the roundings of float8 out as trained ones do.
ROUGH_LIMIT = 0.75


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end",
        description="Times models with random weights: plain and patched, eager and compiled.",
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--only", action="append", choices=SCENARIOS, help="repeatable; default: all")
    add("--quick", action="store_true", help="small models, in float32: a test of the benchmark")
    add("--layers", type=int, help="fewer layers than the model has; the table says so")
    add("--seconds", type=float, default=3.0, help="of timing, for each column")
    add("--no-compile", action="store_true", help="the eager columns alone")
    add("--no-breakdown", action="store_true", help="not where the time goes: compiles once less")
    add("--batch-seconds", type=float, default=15.0, help="of each search for the largest batch")
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
    packages = ("transformers", "diffusers", "accelerate", peers.TORCHAO)
    stored["environment"] = results.environment(device, *packages)
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
    integration = getattr(fuselage.integrations, scenario.integration)
    cudnn, allowed = torch.backends.cudnn, torch.backends.cudnn.allow_tf32
    cudnn.allow_tf32 = False  # convolutions would round their inputs to 11 bits
    try:
        expected = scenario.outputs(scenario.model)
        errors, _ = errors_of_variants(scenario, integration, expected)
    finally:
        cudnn.allow_tf32 = allowed
    error = max(error for name, error in errors.items() if name not in scenario.rough)
    del scenario
    measure.free(device)
    return error


def errors_of_variants(
    scenario: Scenario, integration, expected: tuple[torch.Tensor, ...]
) -> tuple[dict[str, float], list]:
    """The error of the patched model, and the report, of each variant."""
    errors, reports = {}, []
    for name, options in scenario.variants.items():
        reports.append(integration.patch(scenario.model, **options))
        errors[name] = error_of(scenario, scenario.model, expected)
        integration.unpatch(scenario.model)
    return errors, reports


def limit_of(scenario: Scenario, column: str, limit: float) -> float:
    """What the error of a column, or of a variant, must not exceed."""
    return ROUGH_LIMIT if column.rpartition(" + ")[2] in scenario.rough else limit


def run(
    scenario: Scenario,
    integration,
    options: argparse.Namespace,
    device: str,
    exact: float | None,
) -> dict:
    """All columns of one scenario; `exact` is what `exact_error` has found."""
    expected = scenario.outputs(scenario.model)
    errors, reports = errors_of_variants(scenario, integration, expected)
    error = max(errors.values())
    limit = EXACT_LIMIT if options.quick else HALF_LIMIT
    replaced = [0, *(len(report.replaced) for report in reports)]
    verified = all(less < more for less, more in pairwise(replaced))
    for name, found in errors.items():
        own_limit = limit_of(scenario, name, limit)
        verified &= found <= own_limit
        print(f"  {name}: outputs differ by {found:.1e} (RMS, relative); the limit is {own_limit}")
    if exact is not None:
        verified &= exact <= EXACT_LIMIT
        print(f"  {EXACT_LAYERS} layers in fp32: by {exact:.1e}; the limit is {EXACT_LIMIT}")
    columns, found = {}, {}
    besides = (*scenario.variants, *filter(peers.is_installed, scenario.peers))
    if verified:
        for mode in MODES[:1] if options.no_compile else MODES:
            names = (mode, *(f"{mode} + {beside}" for beside in besides))
            columns |= timed(scenario, integration, names, options.seconds, device, expected)
        wrong = [
            name
            for name, column in columns.items()
            if column["error"] > limit_of(scenario, name, limit)
        ]
        for name in wrong:
            print(f"  FAILED: {name} differs by {columns.pop(name)['error']:.1e}; left out")
        verified = not wrong
        if scenario.batches is not None and verified:
            found = largest_batches(scenario, integration, options.batch_seconds, device)
        if not options.no_breakdown:  # last: a profiler may slow down what runs after it
            break_down(scenario, integration, columns, device)
    else:
        print("  FAILED: not timed")
    return {
        "title": scenario.title,
        "notes": scenario.notes,
        "verified": verified,
        "error": error,
        "float32_error": exact,
        "per_sample": scenario.per_sample,
        "replaced": replaced[-1],
        "left_alone": len(reports[-1].left_alone),
        "columns": columns,
        **found,
    }


def largest_batches(scenario: Scenario, integration, seconds: float, device: str) -> dict:
    """Of the plain model and of the last variant, eager: a compiled one would compile for each."""
    found = {}
    for name in (MODES[0], f"{MODES[0]} + {[*scenario.variants][-1]}"):
        with state(scenario, integration, name):
            found[name] = batch.largest(scenario.batches, device, seconds)
    return {"largest_batch": {"tokens": scenario.batches.tokens, "sequences": found}}


def break_down(scenario: Scenario, integration, columns: dict[str, dict], device: str) -> None:
    """Adds to each column where its time goes."""
    for name, column in columns.items():
        with state(scenario, integration, name) as call:
            for _ in range(3):  # compiling, and capturing graphs, take kernels of their own
                scenario.before()
                scenario.step(call)
            scenario.before()
            column["breakdown"] = measure.breakdown(partial(scenario.step, call), device)


@contextmanager
def state(scenario: Scenario, integration, name: str) -> Iterator[Callable]:
    """What to call for the column of that name."""
    mode, _, variant = name.partition(" + ")
    with changed(scenario, integration, variant):
        compiled = mode == "torch.compile"
        call, undo = scenario.compiled() if compiled else (scenario.model, measure.nothing)
        try:
            yield call
        finally:
            undo()


@contextmanager
def changed(scenario: Scenario, integration, variant: str) -> Iterator[None]:
    """The model patched, or by a peer, or as it is."""
    if variant in scenario.peers:
        with scenario.peers[variant](scenario.model, integration):
            yield
        return
    if variant:
        integration.patch(scenario.model, **scenario.variants[variant])
    try:
        yield
    finally:
        if variant:
            integration.unpatch(scenario.model)


def timed(
    scenario: Scenario,
    integration,
    names: tuple[str, ...],
    seconds: float,
    device: str,
    expected: tuple[torch.Tensor, ...],
) -> dict[str, dict]:
    """The columns of those names: error, milliseconds of a step, and GiB.

    All but the last are timed before it and after it: what drifts meanwhile is in all. A column
    that runs out of memory is left out.
    """
    found: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float | None] = {}
    errors: dict[str, float] = {}
    for name, turns in groupby(measure.by_turns(names, rounds=2)):
        part = seconds / 2 * len(list(turns))
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
