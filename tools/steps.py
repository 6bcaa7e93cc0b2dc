"""What the checks that run a variant of their own have in common: steps that end at a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

REPO_DIR = Path(__file__).resolve().parent.parent


def run(title: str, command: list[str], environment: dict[str, str]) -> None:
    """Runs a step, with more in its environment; the first that fails is the last."""
    started = time.monotonic()
    print(f"--- {title}", flush=True)
    code = subprocess.run(command, cwd=REPO_DIR, env={**os.environ, **environment}).returncode
    print(f"--- {title}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
    if code != 0:
        sys.exit(code)


def build_cpu_variant(output: Path, *options: str) -> Path:
    """Builds a variant for the CPU into `output`, and returns its folder."""
    builder = [sys.executable, "tools/build_variant.py", "--backend", "cpu", *options]
    run("build", [*builder, "--output", str(output)], {})
    (variant,) = output.glob("torch-*-cpu-*")
    return variant
