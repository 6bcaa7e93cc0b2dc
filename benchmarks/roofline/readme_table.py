"""Writes the tables of README.md from the results files, between two markers.

python -m benchmarks.roofline.readme_table            # rewrite README.md
python -m benchmarks.roofline.readme_table --check    # exit with 1 if it would change
python -m benchmarks.roofline.readme_table --print    # the tables alone
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from . import results
from .contenders import REPO

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
TITLES = {"eager": "eager", "torch": "`F.rms_norm`", "compile": "`torch.compile`", "liger": "Liger"}


def tables(folder: Path = results.FOLDER) -> str:
    """Markdown for every device: its main rows, and host time on a GPU."""
    parts = []
    for path in results.stored_files(folder):
        stored = results.load(path)
        on_cpu = "cuda" not in stored["environment"]
        parts.append(_title(stored))
        parts.append(_cpu_table(stored) if on_cpu else _gpu_table(stored))
        if not on_cpu:
            parts += [_host_table(name, section) for name, section in stored["host"].items()]
    return "\n\n".join(part for part in parts if part)


def _title(stored: dict) -> str:
    environment = stored["environment"]
    software = [f"Torch {environment['torch']}"]
    if environment.get("triton"):
        software.append(f"Triton {environment['triton']}")
    if environment.get("liger-kernel"):
        software.append(f"Liger {environment['liger-kernel']}")
    records = [*_main(stored), *stored["host"].values()]
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


def _gpu_table(stored: dict) -> str:
    names = ("torch", "compile", "liger")
    head = ["operator", "shape", "µs", "GB/s", "of `copy_`", *(f"over {TITLES[n]}" for n in names)]
    rows = [
        [
            f"`{case['operator']}` {DIRECTIONS[case['direction']]}",
            case["shape"],
            f"{case['contenders']['fuselage']['us']:.1f}",
            f"{case['contenders']['fuselage']['gbs']:.0f}",
            f"{100 * case['fraction_of_copy']:.0f}%",
            *(_speed_up(case, name) for name in names),
        ]
        for case in _main(stored)
    ]
    return _markdown(head, rows)


def _cpu_table(stored: dict) -> str:
    names = ("eager", "torch")
    head = ["operator", "shape", "threads", "µs", *(f"over {TITLES[n]}" for n in names)]
    rows = [
        [
            f"`{case['operator']}` {DIRECTIONS[case['direction']]}",
            case["shape"],
            str(case["threads"]),
            f"{case['contenders']['fuselage']['us']:.1f}",
            *(_speed_up(case, name) for name in names),
        ]
        for case in _main(stored)
    ]
    return _markdown(head, rows)


def _host_table(name: str, section: dict) -> str:
    yardstick = section["yardstick"]
    rows = [
        [f"`{call}`", f"{us:.1f}", f"{us / section['us'][yardstick]:.2f}x"]
        for call, us in section["us"].items()
    ]
    return f"Host time, {name}:\n\n" + _markdown(["call", "µs", f"over `{yardstick}`"], rows)


def _speed_up(case: dict, name: str) -> str:
    entry = case["contenders"].get(name)
    return f"{entry['us'] / case['contenders']['fuselage']['us']:.2f}x" if entry else "-"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] * 2 + ["---:"] * (len(head) - 2)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule[: len(head)], *rows])


def updated(readme: str, generated: str) -> str:
    """The README with `generated` between the markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"error: README.md lacks {BEGIN} and {END}")
    return f"{before}{begin}\n{generated}\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline.readme_table", description=__doc__
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--readme", type=Path, default=REPO / "README.md")
    parser.add_argument("--results", type=Path, default=results.FOLDER)
    options = parser.parse_args(arguments)
    generated = tables(options.results)
    if options.print:
        print(generated)
        return 0
    old = options.readme.read_text("utf-8")
    new = updated(old, generated)
    if options.check and new != old:
        changes = difflib.unified_diff(
            old.splitlines(), new.splitlines(), "README.md", "generated", lineterm=""
        )
        print(*changes, sep="\n")
        print("error: run python -m benchmarks.roofline.readme_table", file=sys.stderr)
        return 1
    if not options.check:
        options.readme.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
