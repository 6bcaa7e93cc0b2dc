"""What the tests of device code on the host share: programs that need no GPU and no toolkit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from builder.toolchain import find_cxx
from conftest import REPO_DIR

SOURCES = REPO_DIR / "kernel_src"
TESTS = REPO_DIR / "tests"


def compiled(output: Path, *arguments: object) -> Path:
    """What the C++ compiler makes of `arguments`."""
    command = [find_cxx().path, "-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{SOURCES}"]
    command += [str(argument) for argument in arguments]
    result = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr
    return output


def printed(program: Path, *arguments: str) -> list[str]:
    """The lines that `program` prints."""
    result = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def made_up_headers(folder: Path) -> Path:
    """A folder with the CUDA headers that gpu_compat.h includes, of a made-up runtime."""
    for name in ("cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h"):
        (folder / name).write_text(f'#include "{TESTS}/made_up_runtime.h"\n')
    return folder
