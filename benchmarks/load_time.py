"""`python -m benchmarks.load_time`: what loading costs over `import torch`, in fresh processes.

Bar: 0.15 s. `kernels` is imported before, and has a figure of its own: it is the user's already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from .roofline import results
from .roofline.contenders import REPO, load_fuselage

BAR = 0.15  # seconds

# Prints seconds. What follows `import torch` must not be in the time of loading.
CHILD = """
import json, sys, time
times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
import kernels
from benchmarks.roofline.contenders import load_fuselage
times.append(time.perf_counter())
load_fuselage(sys.argv[1])
times.append(time.perf_counter())
seconds = [after - before for before, after in zip(times, times[1:])]
print(json.dumps(dict(zip(("torch", "kernels", "fuselage"), seconds))))
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_time", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--runs", type=int, default=9, help="processes, after one that warms the caches")
    add("--output", type=Path, help="the results file; default: benchmarks/results/load_time_...")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where loading takes longer than the bar."""
    import torch

    options = parse_arguments(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    runs = [one_run(device) for _ in range(options.runs + 1)][1:]
    seconds = {
        name: {
            "median": statistics.median(run[name] for run in runs),
            "min": min(run[name] for run in runs),
            "max": max(run[name] for run in runs),
        }
        for name in runs[0]
    }
    path = options.output or results.FOLDER / f"load_time_{results.slug(device)}.json"
    case = {"runs": len(runs), "seconds": seconds, "bar": BAR}
    results.add(path, {"load_time": case}, load_fuselage(device), device)
    for name, times in seconds.items():
        print(f"{name:9} {times['median']:.3f} s ({times['min']:.3f} to {times['max']:.3f})")
    return int(seconds["fuselage"]["median"] > BAR)


def one_run(device: str) -> dict[str, float]:
    """Seconds of each import, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, device], cwd=REPO, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
