"""Draws GB/s against the bytes moved, with the copy as the line to reach, from a results file.

python -m benchmarks.roofline.plot [benchmarks/results/<gpu>.json ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import results

OPERATOR = "rms_norm"
PANELS = {"fwd": "forward", "bwd": "backward"}
# Colours that people with any colour vision tell apart (Okabe and Ito), and a marker each as well.
LINES = {
    "fuselage": ("fuselage", "#D55E00", "o", 2.4),
    "torch": ("torch F.rms_norm", "#0072B2", "s", 1.4),
    "compile": ("torch.compile", "#009E73", "^", 1.4),
    "liger": ("Liger", "#CC79A7", "D", 1.4),
}


def draw(path: Path) -> Path | None:
    """Writes the PNG beside the results file; None if it has no sweep."""
    stored = results.load(path)
    sweeps = {direction: _sweep(stored, direction) for direction in PANELS}
    if not all(sweeps.values()):
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for panel, (direction, title) in zip(axes, PANELS.items()):
        _panel(panel, sweeps[direction], title)
    axes[0].set_ylabel("GB/s of necessary bytes")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    case = sweeps["fwd"][-1]
    environment = stored["environment"]
    figure.suptitle(
        f"{OPERATOR}, {case['dtype']}, rows of {case['sizes'][-1]}, "
        f"{environment['device']}, Torch {environment['torch']}",
        fontsize=12,
    )
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


def _sweep(stored: dict, direction: str) -> list[dict]:
    cases = [
        case
        for case in stored["cases"].values()
        if case["operator"] == OPERATOR
        and case["direction"] == direction
        and "sweep" in case["tags"]
    ]
    return sorted(cases, key=lambda case: case["bytes"])


def _panel(panel, cases: list[dict], title: str) -> None:
    megabytes = [case["bytes"] / 1e6 for case in cases]
    copy = [case["copy"]["gbs"] for case in cases]
    panel.fill_between(megabytes, copy, color="#000000", alpha=0.05, linewidth=0)
    panel.plot(megabytes, copy, color="#333333", linestyle="--", linewidth=1.6, label="copy_")
    for name, (label, colour, marker, width) in reversed(LINES.items()):
        points = [
            (x, case["contenders"][name]["gbs"])
            for x, case in zip(megabytes, cases)
            if name in case["contenders"]
        ]
        if points:
            panel.plot(
                *zip(*points),
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=width,
                label=label,
            )
    panel.set_xscale("log")
    panel.set_xlabel("bytes moved (MB)")
    panel.set_title(title)
    panel.set_ylim(bottom=0)
    panel.grid(True, which="major", alpha=0.25)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline.plot", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args(arguments).files
    for path in files or results.stored_files():
        target = draw(path)
        size = f" ({target.stat().st_size / 1e3:.0f} KB)" if target else ""
        print(f"{target}{size}" if target else f"{path}: no sweep to draw")
    return 0


if __name__ == "__main__":
    sys.exit(main())
