"""The command line: choose cases, run them, store and print."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

from . import bar, host, registry, report, results
from .contenders import DEFAULT, load_fuselage
from .measure import FuselageFailed, Timer, measure
from .registry import Case


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline",
        description="Times fuselage against a copy of the same bytes and against others.",
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add(
        "--only",
        action="append",
        metavar="TEXT",
        help="cases whose name has TEXT; `host` for host time",
    )
    add("--shapes", metavar="ROWSxDIM,...", help="these sizes only")
    add("--tags", metavar="TAG,...", help="shapes with one of these: main odd small dtype sweep")
    add("--quick", action="store_true", help="few shapes, short rounds; not stored")
    add("--contenders", metavar="NAME,...", help="these only, besides fuselage; not stored")
    add("--no-host", action="store_true", help="leave host time out")
    add("--resume", action="store_true", help="leave out what is stored for this commit and build")
    add("--budget", type=float, metavar="S", help="start no case after S seconds")
    add("--results", type=Path, metavar="DIR", help="where <device>.json goes, whatever is run")
    add("--report", action="store_true", help="print what is stored; time nothing")
    add("--list", action="store_true", help="print the names of the cases; time nothing")
    add("--strict", action="store_true", help="exit with 2 where the bar is missed")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [case for case in registry.all_cases(device, options.quick) if _chosen(case, options)]
    if options.list:
        print("\n".join(case.key for case in cases))
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        print("error: Torch sees no GPU; --device cpu runs without one", file=sys.stderr)
        return 1
    stored = _load(options, device)
    if options.report:
        print(report.everything(stored))
        return 0
    return _run(options, device, cases, stored)


def _chosen(case: Case, options) -> bool:
    sizes = "x".join(map(str, case.shape.sizes))
    return (
        (not options.only or any(text in case.key for text in options.only))
        and (not options.shapes or sizes in options.shapes.split(","))
        and (not options.tags or bool(case.shape.tags & set(options.tags.split(","))))
    )


def _load(options, device: str) -> dict:
    """What is stored; a file in --results goes before the repository's, which it then extends."""
    name = f"{results.slug(device)}.json"
    folders = [options.results, results.FOLDER] if options.results else [results.FOLDER]
    found = [folder / name for folder in folders if (folder / name).is_file()]
    return results.load((found or [results.FOLDER / name])[0])


def _run(options, device: str, cases: list[Case], stored: dict) -> int:
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    started = time.monotonic()
    fuselage = load_fuselage(device)
    timer = _timer(device, options.quick)
    names = {
        "fuselage",
        *(options.contenders.split(",") if options.contenders else DEFAULT[device]),
    }
    keep = options.results or not (options.quick or options.contenders)
    path = (options.results or results.FOLDER) / f"{results.slug(device)}.json"
    origin = results.provenance(fuselage)
    stored.update(environment=results.environment(device), method=timer.method)
    new = {**stored, "cases": {}, "host": {}}
    print(*(f"{k}: {v}" for k, v in {**stored["environment"], **origin}.items()), sep="\n")

    def is_stored(section: str, key: str) -> bool:
        record = stored[section].get(key, {})
        return all(record.get(k) == origin[k] for k in ("commit", "dirty", "kernel", "torch"))

    def store(section: str, key: str, record: dict) -> None:
        new[section][key] = stored[section][key] = {**origin, **record}
        if keep:
            results.save(path, stored)

    if not options.no_host and _wants_host(options):
        for section in _host_sections(fuselage, device):
            if options.resume and is_stored("host", section.name):
                continue
            record = host.measure_section(section, device, options.quick)
            store("host", section.name, record)
            print("", *report.host_lines(section.name, record), sep="\n", flush=True)

    columns = tuple(name for name in report.RATIOS if name in names)
    print("", report.header(columns), sep="\n", flush=True)
    for number, case in enumerate(cases):
        if options.resume and is_stored("cases", case.key):
            continue
        if options.budget and time.monotonic() - started > options.budget:
            left = len(cases) - number
            print(f"stopped after {options.budget:.0f} s, {left} cases to go: see --resume")
            break
        try:
            record = measure(case, fuselage, timer, device, names)
        except FuselageFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        store("cases", case.key, record)
        print(report.case_line(new["cases"][case.key], columns), flush=True)

    reasons = report.failures(new)
    if reasons:
        print("", "columns with `-`:", *reasons, sep="\n")
    print("", *report.bar_lines(new), sep="\n")
    where = f"stored in {path}" if keep else "not stored"
    print(f"\n{time.monotonic() - started:.0f} s, {where}")
    return 2 if options.strict and any(check.missed for check in bar.checks(new)) else 0


def _wants_host(options) -> bool:
    chooses_cases = options.only or options.shapes or options.tags
    return not chooses_cases or "host" in (options.only or ())


def _host_sections(fuselage, device: str):
    for operator in registry.operators():
        if operator.host_sections is not None:
            yield from operator.host_sections(fuselage, device)


def _timer(device: str, quick: bool) -> Timer:
    if device == "cpu":
        from .cpu_timing import CpuTimer

        return CpuTimer(quick)
    from .cuda_timing import CudaTimer

    return CudaTimer(quick)
