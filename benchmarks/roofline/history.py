"""What is stored, over time: what changed since it was measured, and what another run says.

    python -m benchmarks.roofline.history stale nvidia-h200     # names, most changed first
    python -m benchmarks.roofline.history compare FILE          # a run's times, and those stored
    python -m benchmarks.roofline.history compare FILE --store  # and stores them

A case is stale where a commit since its own changed kernels of its family, or what families share.
What is not measured again gets slower: the names are what `--only` of a run takes.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from . import registry, results
from .contenders import REPO

# The folders of kernel_src/ that a module of cases times, where its name is not theirs.
FOLDERS = {
    "ada_norm": ("norm",),
    "fp8_linear": ("quant",),
    "gated_norm": ("norm",),
    "group_norm": ("norm",),
    "poly_norm": ("norm",),
    "quant": ("quant", "norm", "gate"),
    "sampling": ("sample",),
}


def folders() -> dict[str, tuple[str, ...]]:
    """`{operator: the folders of kernel_src/ whose kernels it runs}`."""
    found = {}
    for name, module in registry.modules().items():
        for operator in module.OPERATORS:
            found[operator.name] = ("common", *FOLDERS.get(name, (name,)))
    return found


@functools.cache
def commits_since(commit: str, names: tuple[str, ...], repo: Path = REPO) -> int:
    """Commits after `commit` that changed these folders of kernel_src/."""
    paths = [f"kernel_src/{name}" for name in names]
    count = results.git("rev-list", "--count", f"{commit}..HEAD", "--", *paths, repo=repo)
    if count is None:
        raise SystemExit(f"error: git does not find {commit} in this repository's history")
    return int(count)


def stale(
    stored: dict, since: Callable[[str, tuple[str, ...]], int] = commits_since
) -> dict[str, int]:
    """`{key: commits}` of the cases whose kernels changed since, most changed first."""
    of = folders()
    counts = {
        key: since(case["commit"], of[case["operator"]])
        for key, case in stored["cases"].items()
        if case["operator"] in of
    }
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return {key: count for key, count in ordered if count > 0}


@functools.cache
def is_older(commit: str, other: str, repo: Path = REPO) -> bool:
    """Whether `other` comes after `commit`."""
    order = ("merge-base", "--is-ancestor", commit, other)
    return commit != other and results.git(*order, repo=repo) is not None


def fresh(run: dict, stored: dict) -> dict:
    """The run's cases, less those of before what is stored: it began with what was stored then."""
    kept = stored["cases"]
    return {
        key: case
        for key, case in run["cases"].items()
        if key not in kept or not is_older(case["commit"], kept[key]["commit"])
    }


def compare(run: dict, stored: dict) -> list[str]:
    """One line for each case that the run has anew, those first that became slower most."""

    def us(case: dict) -> float:
        return case["contenders"]["fuselage"]["us"]

    lines = []
    for key, case in fresh(run, stored).items():
        before = stored["cases"].get(key)
        if case == before:
            continue
        copies = us(case) / case["copy"]["us"]
        line = f"{key:<50} {us(case):9.2f} us {copies:5.2f} copies"
        ratio = 0.0
        if before is not None:
            ratio = us(case) / us(before)
            line += f"  was {us(before):9.2f} ({before['commit'][:7]})  {ratio:.3f}x"
        lines.append((ratio, line))
    return [line for _, line in sorted(lines, key=lambda item: -item[0])]


def with_peers(case: dict, before: dict | None) -> dict:
    """A run's case, and those of its contenders that were measured before and not in the run, each
    with the commit of its own.
    """
    if before is None or before["contenders"].keys() <= case["contenders"].keys():
        return case
    kept = {n: {"commit": before["commit"], **c} for n, c in before["contenders"].items()}
    return {**case, "contenders": {**kept, **case["contenders"]}}


def merge(run: dict, stored: dict) -> dict:
    """What is stored, with the run's cases and host sections in place of its own."""
    cases = {k: with_peers(c, stored["cases"].get(k)) for k, c in fresh(run, stored).items()}
    new = {**run, "cases": cases}
    sections = {name: {**stored[name], **new[name]} for name in ("cases", "host")}
    return {**stored, "environment": run["environment"], "method": run["method"], **sections}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline.history")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("stale", help="cases whose kernels changed since").add_argument
    add("device", help="the name of a results file, such as nvidia-h200")
    add("--commits", type=int, default=1, metavar="N", help="by N commits or more")
    add = commands.add_parser("compare", help="a run's times beside the stored ones").add_argument
    add("file", type=Path, help="<device>.json of a run with --results")
    add("--store", action="store_true", help="in place of those")
    options = parser.parse_args(arguments)
    if options.command == "stale":
        stored = results.load(results.FOLDER / f"{options.device}.json")
        names = [key for key, count in stale(stored).items() if count >= options.commits]
        print(*names, sep="\n")
        print(f"{len(names)} of {len(stored['cases'])} cases", file=sys.stderr)
        return 0
    run, path = results.load(options.file), results.FOLDER / options.file.name
    stored = results.load(path)
    print(*compare(run, stored), sep="\n")
    if options.store:
        results.save(path, merge(run, stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
