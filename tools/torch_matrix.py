#!/usr/bin/env python3
"""Runs tests under several releases of PyTorch, on the one CPU variant that lies in build/.

The variant promises to serve the stable ABI's oldest Torch and every later one; a rebuild for each
would prove nothing. Each release has an environment of its own, .venv-torch-<release>, which holds
that Torch and sees all else in the development environment.

    python tools/torch_matrix.py                                # oldest, development, newest
    python tools/torch_matrix.py --torch 2.10.0 -- tests/norm   # one of them, and pytest's options
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

REPO_DIR = Path(__file__).resolve().parent.parent
OLDEST = "2.10.0"  # build.toml's stable ABI
NEWEST = "newest"
DEVELOPMENT = "development"  # what requirements/dev.txt pins


@dataclass
class Result:
    """What came of one release."""

    torch: str
    passed: bool
    summary: str
    install_seconds: float
    test_seconds: float
    megabytes: int


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch",
        default=f"{OLDEST},{DEVELOPMENT},{NEWEST}",
        help=f"comma-separated releases; also {DEVELOPMENT} and {NEWEST} (default: %(default)s)",
    )
    parser.add_argument("--folder", type=Path, default=REPO_DIR, help="where environments go")
    parser.add_argument("pytest", nargs="*", help="what pytest gets, after --")
    return parser.parse_args(arguments)


def libraries(requires: list[str]) -> list[str]:
    """Those of Torch's requirements that `import torch` loads: its GPU libraries.

    PyPI's x86-64 builds are CUDA builds, which do not load without them. A CPU build has none.
    Triton compiles for GPUs alone, and the Python packages are those of the development
    environment.
    """
    found = []
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if re.match(r"nvidia-|cuda-toolkit$", requirement.name):
            requirement.marker = None
            found.append(str(requirement))
    return found


def site_packages(environment: Path) -> Path:
    """Where packages of `environment` lie."""
    base = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", vars=base))


def make_environment(release: str, folder: Path) -> Path:
    """The Python of an environment with `release` of Torch; one that is there is kept."""
    environment = folder / f".venv-torch-{release}"
    python = environment / "bin/python"
    done = environment / ".complete"
    if done.is_file() and release != NEWEST:
        return python
    shared = site_packages(environment) / "development.pth"
    if not done.is_file():
        shutil.rmtree(environment, ignore_errors=True)
        run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    done.unlink(missing_ok=True)
    shared.unlink(missing_ok=True)  # or pip would find everything installed
    wanted = ["--upgrade", "torch"] if release == NEWEST else [f"torch=={release}"]
    install(python, ["--no-deps", *wanted])
    (torch,) = importlib.metadata.distributions(
        name="torch", path=[str(site_packages(environment))]
    )
    if needed := libraries(torch.requires or []):
        install(python, needed)
    shared.write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    done.touch()
    return python


def install(python: Path, packages: list[str]) -> None:
    """With this environment's pip, which the new one does without."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    run([*pip, "--quiet", "--no-cache-dir", "--disable-pip-version-check", *packages])


def run(command: list[str]) -> None:
    if subprocess.run(command).returncode != 0:
        raise SystemExit(f"error: this failed, its messages are above: {' '.join(command)}")


def torch_version(python: Path) -> str:
    """What `import torch` gives there."""
    command = [str(python), "-c", "import torch; print(torch.__version__)"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"error: import torch failed under {python}:\n{result.stderr}")
    return result.stdout.strip()


def megabytes(environment: Path) -> int:
    """What an environment takes on disk."""
    files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    return round(sum(path.stat().st_size for path in files) / 1e6)


def test_under(release: str, folder: Path, options: list[str]) -> Result:
    """Makes the environment and runs the tests in it."""
    started = time.monotonic()
    if release == DEVELOPMENT:
        python, size = Path(sys.executable), 0
    else:
        python = make_environment(release, folder)
        size = megabytes(folder / f".venv-torch-{release}")
    installed = time.monotonic() - started
    version = torch_version(python)
    if release[0].isdigit() and version.partition("+")[0] != release:
        raise SystemExit(f"error: wanted Torch {release}, {python} imports {version}")
    print(f"\n=== Torch {version}", flush=True)
    # No GPU: what is tested is the CPU variant. `test_build.py` is about building, and not run.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "--ignore=tests/test_build.py", *options]
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=REPO_DIR, env=environment, stdout=subprocess.PIPE, text=True
    )
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip(" =\n") or last
    passed = process.wait() == 0
    return Result(version, passed, last, installed, time.monotonic() - started, size)


def main(arguments: list[str] | None = None) -> int:
    """Runs all releases, also after one that fails, and says what came of each."""
    options = parse_arguments(arguments)
    releases = options.torch.split(",")
    results = [test_under(release, options.folder, options.pytest) for release in releases]
    print(f"\n{'Torch':<14} {'environment':>18} {'tests':>8}")
    for result in results:
        made = f"{result.install_seconds:.0f} s, {result.megabytes} MB"
        state = "" if result.passed else "FAILED: "
        print(
            f"{result.torch:<14} {made:>18} {result.test_seconds:>6.0f} s  {state}{result.summary}"
        )
    return int(not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
