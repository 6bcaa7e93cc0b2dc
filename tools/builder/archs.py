"""GPU architectures: what kernel-builder makes of build.toml's lists, and what a library has."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from .config import BuildConfig
from .errors import BuildError
from .toolchain import find_nvcc

# The capabilities that kernel-builder builds for, by the first CUDA that has them. Capabilities of
# build.toml are chosen to serve these.
TARGETS = {
    (13, 0): "7.5 8.0 8.6 8.7 8.9 9.0 10.0 11.0 12.0 12.1".split(),
    (12, 8): "7.0 7.2 7.5 8.0 8.6 8.7 8.9 9.0 10.0 10.1 12.0".split(),
    (0, 0): "7.0 7.2 7.5 8.0 8.6 8.7 8.9 9.0".split(),
}


@dataclass(frozen=True)
class MachineCode:
    """What a library is compiled for: capabilities with machine code, and those with PTX."""

    machine: frozenset[str]
    ptx: frozenset[str]


def number(arch: str) -> tuple[int, int]:
    """The capability of `arch` to compare by: (9, 0) for `9.0`, `9.0a` and `9.0+PTX`."""
    major, minor = arch.removesuffix("+PTX").rstrip("af").split(".")
    return int(major), int(minor)


def by_number(archs: set[str]) -> list[str]:
    """`archs` in ascending order, `9.0` before `9.0a`."""
    return sorted(archs, key=lambda arch: (number(arch), arch))


def supported(capabilities: list[str] | tuple[str, ...], cuda: tuple[int, int]) -> list[str]:
    """The part of a section's capabilities that kernel-builder compiles with this CUDA.

    For each GPU that it builds for, that is the newest capability whose machine code or PTX runs
    there. What is for one GPU alone (9.0a) goes where that GPU is among them.
    """
    targets = TARGETS[max(first for first in TARGETS if first <= cuda)]
    general = sorted((arch for arch in capabilities if arch[-1] not in "af"), key=number)
    chosen = {arch for arch in capabilities if arch[-1] in "af" and arch[:-1] in targets}
    for target in {*targets} - {arch[:-1] for arch in chosen}:
        runs = [
            arch
            for arch in general
            if number(arch) <= number(target)
            and (arch.endswith("+PTX") or number(arch)[0] == number(target)[0])
        ]
        chosen.update(runs[-1:])
    return by_number(chosen)


def release_archs(config: BuildConfig, cuda: tuple[int, int]) -> list[str]:
    """What metadata.json of the official CUDA variant lists: the sum over the sections.

    [torch] has no list and is not asked for one; a kernel section without a list adds every
    capability that kernel-builder builds for.
    """
    sections = [section for section in config.for_backend("cuda") if section.backend]
    targets = TARGETS[max(first for first in TARGETS if first <= cuda)]
    lists = [supported(section.archs, cuda) if section.archs else targets for section in sections]
    return by_number({arch for archs in lists for arch in archs})


def without_ptx(config: BuildConfig) -> BuildConfig:
    """`config` with machine code alone."""
    sections = [
        replace(section, archs=tuple(arch.removesuffix("+PTX") for arch in section.archs))
        for section in config.sections
    ]
    return replace(config, sections=tuple(sections))


def find_cuobjdump() -> str | None:
    """$CUOBJDUMP, or cuobjdump of the wheel nvidia-cuda-cuobjdump, of PATH or beside nvcc."""
    candidates = [os.environ.get("CUOBJDUMP")]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        candidates += sorted(map(str, Path(folder).glob("*/bin/cuobjdump")))
    candidates.append("cuobjdump")
    nvcc = find_nvcc()
    if nvcc is not None:
        candidates += ["/usr/local/cuda/bin/cuobjdump", str(Path(nvcc.path).with_name("cuobjdump"))]
    return next(filter(None, map(shutil.which, filter(None, candidates))), None)


def machine_code(library: Path, cuobjdump: str) -> MachineCode:
    """What `library` has code for."""
    return MachineCode(
        frozenset(_listed(cuobjdump, "--list-elf", library)),
        frozenset(_listed(cuobjdump, "--list-ptx", library)),
    )


def _listed(cuobjdump: str, option: str, library: Path) -> set[str]:
    command = [cuobjdump, option, str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        # It says so, and fails, where there is no code of the kind.
        if "does not contain device code" in result.stdout + result.stderr:
            return set()
        raise BuildError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    names = re.findall(r"\.sm_(\d+)(\d[af]?)\.(?:cubin|ptx)$", result.stdout, re.MULTILINE)
    return {f"{major}.{minor}" for major, minor in names}


def disagreements(archs: list[str], code: MachineCode) -> list[str]:
    """Where metadata.json's list and the code differ, one line each; empty when nowhere."""
    listed = {arch.removesuffix("+PTX") for arch in archs}
    listed_ptx = {arch.removesuffix("+PTX") for arch in archs if arch.endswith("+PTX")}
    found = []
    for kind, claimed, present in (
        ("machine code", listed, code.machine),
        ("PTX", listed_ptx, code.ptx),
    ):
        missing, more = by_number(claimed - present), by_number(present - claimed)
        found += [f"{arch} is listed, but there is no {kind}" for arch in missing]
        found += [f"{arch} has {kind}, but is not listed" for arch in more]
    return found
