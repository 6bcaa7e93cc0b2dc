"""Finds the compilers, Torch, the Python headers and ninja, or says how to get them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError


@dataclass(frozen=True)
class Compiler:
    """A compiler and the line that its `--version` identifies it by."""

    path: str
    version: str


@dataclass(frozen=True)
class Cuda:
    """nvcc with the toolkit's version and the folder of its shared runtime."""

    nvcc: Compiler
    version: tuple[int, int]
    library_dir: Path
    runtime: str  # the file to link, such as libcudart.so


@dataclass(frozen=True)
class Torch:
    """An installed Torch, read without importing it (that takes seconds)."""

    root: Path
    version: str
    cuda: str | None
    hip: str | None

    @property
    def version_numbers(self) -> tuple[int, ...]:
        """(2, 13) for 2.13.0+cpu."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])

    @property
    def include_dirs(self) -> list[Path]:
        return [self.root / "include", self.root / "include/torch/csrc/api/include"]


def find_cxx() -> Compiler:
    """$CXX, g++ or clang++."""
    wanted = os.environ.get("CXX")
    path = next(filter(None, map(shutil.which, [wanted] if wanted else ["g++", "clang++"])), None)
    if path is None:
        named = f"CXX={wanted} is not there" if wanted else "neither g++ nor clang++ is there"
        raise BuildError(f"no C++ compiler ({named}): apt-get install g++")
    return Compiler(path, version_line(path))


def find_nvcc() -> Compiler | None:
    """$NVCC, or nvcc of $CUDA_HOME, of PATH or of /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    candidates = [os.environ.get("NVCC"), f"{home}/bin/nvcc", "nvcc"]
    if "CUDA_HOME" not in os.environ:
        candidates = [os.environ.get("NVCC"), "nvcc", f"{home}/bin/nvcc"]
    path = next(filter(None, map(shutil.which, filter(None, candidates))), None)
    return Compiler(path, version_line(path, last=True)) if path else None


def find_cuda() -> Cuda:
    """nvcc and the shared CUDA runtime next to it."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            "nvcc not found: install the CUDA toolkit (12.6 or newer) and put its bin folder on "
            "PATH, or set CUDA_HOME"
        )
    output = _output([nvcc.path, "--version"])
    release = re.search(r"release (\d+)\.(\d+)", output)
    if release is None:
        raise BuildError(f"{nvcc.path} --version does not name a release:\n{output}")
    version = (int(release.group(1)), int(release.group(2)))
    top = re.search(r"^#\$ TOP=(.*)$", _output([nvcc.path, "--dryrun", "-c", "x.cu"]), re.MULTILINE)
    home = Path(top.group(1)) if top else Path(nvcc.path).resolve().parent.parent
    for folder in (home / "lib64", home / "lib", *home.glob("targets/*/lib")):
        for name in ("libcudart.so", f"libcudart.so.{version[0]}"):
            if (folder / name).exists():
                return Cuda(nvcc, version, folder.resolve(), name)
    raise BuildError(f"no libcudart.so below {home}: install the CUDA runtime of the toolkit")


def find_hip() -> Compiler:
    """ROCm's compiler: $HIPCXX, amdclang++ or hipcc."""
    rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
    candidates = [os.environ.get("HIPCXX"), "amdclang++", f"{rocm}/bin/amdclang++", "hipcc"]
    path = next(filter(None, map(shutil.which, filter(None, candidates))), None)
    if path is None:
        raise BuildError("no HIP compiler: install ROCm, or set HIPCXX to its amdclang++")
    return Compiler(path, version_line(path))


def find_torch(minimum: tuple[int, int]) -> Torch:
    """The Torch of this Python, at least as new as the stable ABI that is targeted."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"torch is not installed for {sys.executable}: pip install torch")
    root = Path(spec.origin).parent
    facts: dict = {}
    exec((root / "version.py").read_text(), facts)
    version = facts["__version__"]
    torch = Torch(root, version, facts.get("cuda"), facts.get("hip"))
    if torch.version_numbers < minimum:
        needed = ".".join(map(str, minimum))
        raise BuildError(f"torch {version} is older than the stable ABI {needed} of build.toml")
    return torch


def find_python_headers() -> Path:
    """The folder of Python.h."""
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").is_file():
        raise BuildError(f"no Python.h in {folder}: apt-get install python3-dev")
    return folder


def find_ninja() -> str:
    """ninja of this Python's environment, or of PATH."""
    beside = Path(sys.executable).parent / "ninja"
    path = str(beside) if beside.is_file() else shutil.which("ninja")
    if path is None:
        raise BuildError("ninja not found: pip install ninja")
    return path


def gpu_capability() -> str | None:
    """The compute capability of GPU 0 as Torch sees it, such as "9.0"; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.get_device_capability(0)))


def version_line(path: str, last: bool = False) -> str:
    """The first (or last) line of `path` --version."""
    lines = _output([path, "--version"]).strip().splitlines()
    return lines[-1 if last else 0] if lines else "unknown"


def _output(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    return result.stdout + result.stderr
