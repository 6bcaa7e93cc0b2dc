#!/usr/bin/env python3
"""Checks that each variant of a folder names the GPU architectures of build.toml, and no others.

`kernels` trusts the list in metadata.json: a GPU that it names and that has no code fails at the
first call. Needs nothing but Python 3.11.

    python3 scripts/check_archs.py build
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPO_DIR = Path(__file__).resolve().parent.parent
LISTS = {"cpu": None, "cuda": "cuda-capabilities", "rocm": "rocm-archs"}


def listed(sections: dict, backend: str) -> set[str]:
    """What the sections of `backend` are compiled for. PTX is for GPUs that are not listed."""
    key = LISTS[backend]
    wanted = [section for section in sections.values() if section["backend"] == backend]
    return {arch.removesuffix("+PTX") for section in wanted for arch in section.get(key, [])}


def violations(folder: Path, sections: dict) -> list[str]:
    """What is wrong, a line each."""
    found = []
    documents = sorted(folder.glob("torch-*/metadata.json"))
    if not documents:
        return [f"{folder} has no variant"]
    for path in documents:
        backend = json.loads(path.read_text("utf-8"))["backend"]
        there = {arch.removesuffix("+PTX") for arch in backend.get("archs") or []}
        wanted = listed(sections, backend["type"])
        for what, archs in (("lacks", wanted - there), ("claims", there - wanted)):
            if archs:
                found.append(f"{path.parent.name} {what} {', '.join(sorted(archs))}")
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
