"""The results file of one device: what was measured, with which commit and which software."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from types import ModuleType

import torch

from .contenders import REPO, kernel_metadata

FOLDER = REPO / "benchmarks" / "results"
SCHEMA = 1


def slug(device: str) -> str:
    """The file's name: `nvidia-h200`, `cpu-amd-epyc`."""
    name = device_name(device)
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"cpu-{name}" if device == "cpu" else name


def device_name(device: str) -> str:
    """Of the GPU, or the model of the CPU."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def environment(device: str, *more_packages: str) -> dict:
    """The device and the versions of everything that takes part."""
    found = {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cpu":
        found["threads"] = torch.get_num_threads()
        found["capability"] = torch.backends.cpu.get_cpu_capability()
    else:
        found["cuda"] = torch.version.cuda
        found["hip"] = torch.version.hip
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        found["memory_gib"] = round(torch.cuda.get_device_properties().total_memory / 2**30)
    for package in ("triton", "kernels", "liger-kernel", "quack-kernels", *more_packages):
        found[package] = version_of(package)
    return found


def version_of(package: str) -> str | None:
    """None of one that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance(fuselage: ModuleType) -> dict:
    """The commit, from FUSELAGE_COMMIT, the variant's metadata or git, and the variant's id.

    FUSELAGE_COMMIT is for machines that receive the files without `.git`; `<hash>-dirty` marks
    changes.
    """
    metadata = kernel_metadata(fuselage)
    commit, dirty = _from_environment() or _from_metadata(metadata) or _from_git() or (None, True)
    return {
        "commit": commit,
        "dirty": dirty,
        "kernel": metadata.get("id"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }


def _from_environment() -> tuple[str, bool] | None:
    commit = os.environ.get("FUSELAGE_COMMIT")
    return (commit.removesuffix("-dirty"), commit.endswith("-dirty")) if commit else None


def _from_metadata(metadata: dict) -> tuple[str, bool] | None:
    kernel = metadata.get("provenance", {}).get("kernel", {})
    commit = kernel.get("commit") or kernel.get("sha")
    return (commit, bool(kernel.get("dirty", False))) if commit else None


def _from_git() -> tuple[str, bool] | None:
    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit, bool(git("status", "--porcelain", "--", ".", ":!benchmarks/results"))


def git(*arguments: str, repo: Path = REPO) -> str | None:
    """What git prints; None where it fails, or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repo), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def load(path: Path) -> dict:
    """A results file, or an empty one."""
    if path.is_file():
        stored = json.loads(path.read_text("utf-8"))
        if stored.get("schema") == SCHEMA:
            return stored
    return {"schema": SCHEMA, "environment": {}, "method": {}, "cases": {}, "host": {}}


def save(path: Path, results: dict) -> None:
    """Replaces the file whole, so that a run that is cut short leaves a good one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    temporary.replace(path)


def add(
    path: Path, cases: dict[str, dict], fuselage: ModuleType, device: str, *more_packages: str
) -> None:
    """Stores cases, with where they come from, beside or in place of those that are there."""
    stored = load(path)
    stored["environment"] = environment(device, *more_packages)
    origin = provenance(fuselage)
    stored["cases"] |= {name: {**origin, **record} for name, record in cases.items()}
    save(path, stored)


# How the names of files begin whose cases are no single operators.
_OTHERS = ("end_to_end_", "fp8_accuracy_", "linear_loss_", "load_time_", "sequence_parallel_")


def stored_files(folder: Path = FOLDER) -> list[Path]:
    """All results of operators, GPUs first."""
    found = [path for path in folder.glob("*.json") if not path.name.startswith(_OTHERS)]
    return sorted(found, key=lambda path: (path.name.startswith("cpu-"), path.name))


def stored_of(benchmark: str, folder: Path = FOLDER) -> list[Path]:
    """All results of another benchmark, such as end_to_end."""
    return sorted(folder.glob(f"{benchmark}_*.json"))
