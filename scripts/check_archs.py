#!/usr/bin/env python3
"""Checks that each variant of a folder names the GPU architectures of build.toml, and no others.

`kernels` trusts the list in metadata.json: a GPU that it names and that has no code fails at the
first call. A CUDA variant is held to what its CUDA, by the name of its folder, can compile. Needs
nothing but Python 3.11.

    python3 scripts/check_archs.py build
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

REPO_DIR = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO_DIR / "tools"))

from builder.archs import supported  # noqa: E402

LISTS = {"cpu": None, "cuda": "cuda-capabilities", "rocm": "rocm-archs"}


def cuda_version(variant: str) -> tuple[int, int] | None:
    """(12, 6) of a folder's name with `cu126`."""
    found = re.search(r"-cu(\d+)(\d)-", variant)
    return (int(found[1]), int(found[2])) if found else None


def listed(sections: dict, backend: str, cuda: tuple[int, int] | None) -> set[str]:
    """What the sections of `backend` are compiled for. PTX is for GPUs that are not listed."""
    key = LISTS[backend]
    lists = [section.get(key, []) for section in sections.values() if section["backend"] == backend]
    if cuda is not None:
        lists = [supported(archs, cuda) for archs in lists]
    return {arch.removesuffix("+PTX") for archs in lists for arch in archs}


def violations(folder: Path, sections: dict) -> list[str]:
    """What is wrong, a line each."""
    found = []
    documents = sorted(folder.glob("torch-*/metadata.json"))
    if not documents:
        return [f"{folder} has no variant"]
    for path in documents:
        backend, variant = json.loads(path.read_text("utf-8"))["backend"], path.parent.name
        cuda = cuda_version(variant)
        if backend["type"] == "cuda" and cuda is None:
            found.append(f"{variant} has no CUDA version in its name")
            continue
        there = {arch.removesuffix("+PTX") for arch in backend.get("archs") or []}
        wanted = listed(sections, backend["type"], cuda)
        for what, archs in (("lacks", wanted - there), ("claims", there - wanted)):
            if archs:
                found.append(f"{variant} {what} {', '.join(sorted(archs))}")
    return found


def main(arguments: list[str]) -> int:
    """Says what is wrong, or how many variants are right."""
    import tomllib

    if len(arguments) != 1:
        raise SystemExit(__doc__)
    folder = Path(arguments[0])
    with open(REPO_DIR / "build.toml", "rb") as file:
        sections = tomllib.load(file)["kernel"]
    found = violations(folder, sections)
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    if not found:
        print(f"{len(list(folder.glob('torch-*')))} variants name the architectures of build.toml")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
