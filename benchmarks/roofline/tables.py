"""Writes the tables of docs/benchmarks.md, docs/distributed.md, docs/fp8.md, docs/tuning.md and
benchmarks/results/README.md.

python -m benchmarks.roofline.tables            # rewrite them, between their markers
python -m benchmarks.roofline.tables --check    # exit with 1 if they would change
python -m benchmarks.roofline.tables --print    # the tables alone
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from ..end_to_end import report as models
from . import bar, results
from .contenders import REPO
from .latest import latest, operator_of

DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
# PyTorch's own function where there is one (F.rms_norm), and otherwise its formula, not compiled.
PYTORCH = ("torch", "eager")


def summary() -> str:
    """Markdown: one row for each operator and direction, of the GPU that measured it last."""
    parts = []
    files = [results.load(path) for path in results.stored_files()]
    shown = latest(stored for stored in files if _on_gpu(stored))
    for stored in files:
        first = {}
        for case in _main(stored):
            if not _on_gpu(stored) or shown[operator_of(case)] is stored:
                first.setdefault((case["operator"], case["direction"], case.get("threads")), case)
        cases = list(first.values())
        if cases:
            parts += [_title(stored, cases), _table(stored, cases)]
    return "\n\n".join(parts)


def details() -> str:
    """Markdown for every device: its main rows, host time, and what misses the bar."""
    parts = []
    for stored in map(results.load, results.stored_files()):
        cases = _main(stored)
        parts += [_title(stored, [*cases, *stored["host"].values()]), _table(stored, cases)]
        parts += [_host_table(name, section) for name, section in stored["host"].items()]
        parts.append(_misses(stored))
    return "\n\n".join(parts)


def _on_gpu(stored: dict) -> bool:
    return "cuda" in stored["environment"]


def _table(stored: dict, cases: list[dict]) -> str:
    return _gpu_table(cases) if _on_gpu(stored) else _cpu_table(cases)


def model_summary() -> str:
    """Markdown for every device: what whole models gain."""
    return _of("end_to_end", models.summary)


def model_details() -> str:
    """Markdown for every device: all columns of the whole models."""
    return _of("end_to_end", models.details)


def sequence_parallel() -> str:
    """Markdown for every device: models on several GPUs."""
    from ..sequence_parallel import table

    def write(cases: dict[str, dict]) -> str:
        titles = (", ".join([r["title"].partition(":")[0], *r["notes"]]) for r in cases.values())
        return "\n\n".join([*sorted(set(titles)), table(cases)])

    return _of("sequence_parallel", write)


def linear_loss() -> str:
    """Markdown for every device: the loss of a head."""
    from ..linear_loss import table

    return _of("linear_loss", table)


def fp8_accuracy() -> str:
    """Markdown for every device: what float8 costs whole models in accuracy."""
    from ..fp8_accuracy import table

    return _of("fp8_accuracy", table)


def _of(benchmark: str, write: Callable[[dict], str]) -> str:
    parts = []
    for stored in map(results.load, results.stored_of(benchmark)):
        cases = stored["cases"]
        parts += [_title(stored, list(cases.values())), write(cases)]
    return "\n\n".join(parts)


def _title(stored: dict, records: list[dict]) -> str:
    environment = stored["environment"]
    packages = {"Torch": "torch", "Triton": "triton", "Liger": "liger-kernel"}
    packages |= {name: name for name in ("transformers", "diffusers", "torchao")}
    software = [f"{k} {environment[v]}" for k, v in packages.items() if environment.get(v)]
    commits = sorted({_commit(record) for record in records})
    dates = sorted({record["date"] for record in records})
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"**{environment['device']}**, {', '.join(software)}, measured {when} "
        f"at {', '.join(commits)}:"
    )


def _commit(record: dict) -> str:
    if record["commit"] is None:
        return f"`{record['kernel']}` (no commit)"
    return f"`{record['commit'][:10]}`" + (" with changes" if record["dirty"] else "")


def _main(stored: dict) -> list[dict]:
    return [case for case in stored["cases"].values() if "main" in case["tags"]]


def _gpu_table(cases: list[dict]) -> str:
    baselines = {"PyTorch": PYTORCH, "`torch.compile`": ("compile",), "Liger": ("liger",)}
    head = ["operator", "shape", "µs", "GB/s", "of `copy_`", *(f"over {n}" for n in baselines)]
    rows = [
        [
            f"`{case['operator']}` {DIRECTIONS[case['direction']]}",
            case["shape"],
            f"{case['contenders']['fuselage']['us']:.1f}",
            f"{case['contenders']['fuselage']['gbs']:.0f}",
            f"{100 * case['fraction_of_copy']:.0f}%",
            *(_speed_up(case, *names) for names in baselines.values()),
        ]
        for case in cases
    ]
    return _markdown(head, rows)


def _cpu_table(cases: list[dict]) -> str:
    baselines = {"eager": ("eager",), "PyTorch's own": ("torch",)}
    head = ["operator", "shape", "threads", "µs", *(f"over {n}" for n in baselines)]
    rows = [
        [
            f"`{case['operator']}` {DIRECTIONS[case['direction']]}",
            case["shape"],
            str(case["threads"]),
            f"{case['contenders']['fuselage']['us']:.1f}",
            *(_speed_up(case, *names) for names in baselines.values()),
        ]
        for case in cases
    ]
    return _markdown(head, rows)


def _host_table(name: str, section: dict) -> str:
    yardstick = section["yardstick"]
    rows = [
        [f"`{call}`", f"{us:.1f}", f"{us / section['us'][yardstick]:.2f}x"]
        for call, us in section["us"].items()
    ]
    return f"Host time, {name}:\n\n" + _markdown(["call", "µs", f"over `{yardstick}`"], rows)


def _speed_up(case: dict, *names: str) -> str:
    """Over the first of these that was measured."""
    for name in names:
        entry = case["contenders"].get(name)
        if entry:
            return f"{entry['us'] / case['contenders']['fuselage']['us']:.2f}x"
    return "-"


def _misses(stored: dict) -> str:
    checks = bar.checks(stored)
    missed = [check for check in checks if check.missed]
    rows = [
        [
            f"`{check.row}`",
            check.rule,
            f"{check.measured:.2f}",
            f"{'at least' if check.at_least else 'at most'} {check.limit:.2f}",
        ]
        for check in missed
    ]
    title = f"What misses the bar, {len(missed)} of {len(checks)} checks:"
    return f"{title}\n\n" + _markdown(["row", "rule", "measured", "bar"], rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] * 2 + ["---:"] * (len(head) - 2)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule[: len(head)], *rows])


def tuning(folder: Path = REPO / "torch-ext/fuselage/tuning") -> str:
    """Markdown for every GPU that has a tuning: its parameters, and what they change."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text("utf-8"))
        measured = document["measured"]
        chosen = ", ".join(f"`{name}={value}`" for name, value in document["parameters"].items())
        parts.append(
            f"**{document['gpu']}**, Torch {measured['versions']['torch']}, measured "
            f"{measured['date']} at `{measured['commit'][:10]}`: "
            + (chosen or "no value was better than the built-in one by more than noise.")
        )
        rows = []
        for key, us in measured["shapes"].items():
            *operator, sizes, dtype = key.split()
            old, new = us["built_in_us"], us["tuned_us"]
            name = f"`{' '.join(operator)}`"
            rows.append([name, f"{sizes} {dtype}", f"{old:.2f}", f"{new:.2f}", f"{old / new:.2f}x"])
        if rows:
            head = ["operator", "shape", "built in, µs", "tuned, µs", "faster"]
            parts.append(_markdown(head, rows))
    return "\n\n".join(parts) or "No GPU has a file yet: all take the built-in policy."


# The tables of each page, by the name in their markers.
PAGES = {
    REPO / "docs/tuning.md": {"tuning": tuning},
    REPO / "docs/distributed.md": {"sequence_parallel": sequence_parallel},
    REPO / "docs/fp8.md": {"fp8_accuracy": fp8_accuracy},
    REPO / "docs/benchmarks.md": {
        "results": summary,
        "linear_loss": linear_loss,
        "models": model_summary,
    },
    results.FOLDER / "README.md": {"results": details, "models": model_details},
}


def updated(path: Path, tables: dict[str, Callable[[], str]]) -> str:
    """The page with the tables between their markers."""
    page = path.read_text("utf-8")
    for name, generate in tables.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise SystemExit(f"error: {path} lacks {begin} and {end}")
        page = f"{before}{begin}\n{generate()}\n{end}{after}"
    return page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline.tables", description=__doc__
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args(arguments)
    if options.print:
        print(*(table() for tables in PAGES.values() for table in tables.values()), sep="\n\n")
        return 0
    stale = False
    for path, tables in PAGES.items():
        old, new = path.read_text("utf-8"), updated(path, tables)
        if not options.check:
            path.write_text(new, "utf-8")
        elif new != old:
            stale = True
            name = str(path.relative_to(REPO))
            changes = difflib.unified_diff(
                old.splitlines(), new.splitlines(), name, "generated", lineterm=""
            )
            print(*changes, sep="\n")
    if stale:
        print("error: run make docs", file=sys.stderr)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
