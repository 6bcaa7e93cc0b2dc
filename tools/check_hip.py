#!/usr/bin/env python3
"""Compiles every GPU source of the rocm sections as HIP, for a machine without ROCm or a GPU.

Debian's clang 19 with its HIP 5.2 headers stands in for ROCm's compiler: the device side is
compiled down to assembly of gfx90a, the host side to an object. Nothing is linked or run. The
objects must hold no state that two versions in one process would share: no flag here hides it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builder.config import BuildConfig, Section, load
from builder.errors import BuildError
from builder.sources import check_sources
from check_abi import shared_state

REPO_DIR = Path(__file__).resolve().parent.parent
ARCH = "gfx90a"
PACKAGES = "apt-get install clang-19 libamdhip64-dev rocm-device-libs"
DEVICE_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/amdgcn/bitcode",
    "/usr/lib/aarch64-linux-gnu/amdgcn/bitcode",
    "/opt/rocm/amdgcn/bitcode",
)
# `-S` for the device side: the full code generator, without the lld that an object would need.
SIDES = {"device": ["--cuda-device-only", "-S"], "host": ["--cuda-host-only", "-c"]}


def base_command() -> list[str]:
    """The compiler with the flags that every file gets."""
    compiler = shutil.which(os.environ.get("HIP_CLANG", "clang++-19"))
    if compiler is None:
        raise BuildError(f"clang++-19 not found: {PACKAGES}")
    libraries = next((path for path in DEVICE_LIBRARIES if Path(path, "ocml.bc").exists()), None)
    if libraries is None:
        raise BuildError(f"no ROCm device libraries in {DEVICE_LIBRARIES[0]}: {PACKAGES}")
    rocm = next((path for path in ("/usr", "/opt/rocm") if _has_hip(path)), None)
    if rocm is None:
        raise BuildError(f"hip/hip_runtime.h not found: {PACKAGES}")
    flags = f"-x hip --offload-arch={ARCH} --rocm-path={rocm} --rocm-device-lib-path={libraries}"
    flags += " -std=c++17 -O3 -fPIC -Wall -ferror-limit=5"
    flags += " -Wno-unused-command-line-argument -Wno-pass-failed"
    flags += " -D__HIP_PLATFORM_AMD__=1 -DUSE_ROCM=1 -DROCM_KERNEL -DNDEBUG"
    return [compiler, *flags.split()]


def _has_hip(folder: str) -> bool:
    return Path(folder, "include/hip/hip_runtime.h").exists()


def compile_file(config: BuildConfig, section: Section, source: str) -> tuple[bool, str]:
    """Compiles both sides of one file; returns success and the line to print."""
    started, warnings = time.monotonic(), ""
    includes = [f"-I{folder}" for folder in section.include]
    with tempfile.TemporaryDirectory() as folder:
        for side, flags in SIDES.items():
            output = str(Path(folder, side))
            command = [*base_command(), *section.gpu_flags, *includes, *flags, source, "-o", output]
            result = subprocess.run(command, cwd=config.root, capture_output=True, text=True)
            if result.returncode != 0:
                return False, f"FAILED  {source} ({side})\n{shlex.join(command)}\n{result.stderr}"
            warnings = warnings or result.stderr
        if shared := shared_state(Path(folder, "host")):
            return False, f"FAILED  {source}: state shared between versions: {', '.join(shared)}"
    state = "ok, with warnings" if warnings else "ok"
    seconds = time.monotonic() - started
    return True, f"{state}  {source} ({ARCH}, device and host, {seconds:.1f} s)\n{warnings}".strip()


def main() -> int:
    """Compiles all, two at a time, and prints one line a file."""
    try:
        config = load(REPO_DIR)
        check_sources(config, ("rocm",))
        base_command()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    jobs = [
        (config, section, source)
        for section in config.for_backend("rocm")
        for source in section.sources
        if source.endswith(".cu")
    ]
    failures = 0
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for success, line in pool.map(lambda job: compile_file(*job), jobs):
            failures += not success
            print(line, flush=True)
    print(f"check-hip: {len(jobs) - failures} of {len(jobs)} files compile for {ARCH}")
    return 1 if failures or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
