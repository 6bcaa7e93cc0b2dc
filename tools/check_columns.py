#!/usr/bin/env python3
"""Checks that no line of the C++ and GPU sources is longer than 100 columns, comments included.

clang-format breaks code there, but leaves comments and strings as they are. Python has ruff for it.

    python tools/check_columns.py [file ...]     # default: kernel_src, torch-ext and tests
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builder.sources import CODE_SUFFIXES, GENERATED

REPO_DIR = Path(__file__).resolve().parent.parent
COLUMNS = 100
FOLDERS = ("kernel_src", "torch-ext", "tests")


def sources() -> list[Path]:
    """Every source and header that is not generated."""
    found = [path for folder in FOLDERS for path in (REPO_DIR / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in CODE_SUFFIXES and not _left_out(path))


def _left_out(path: Path) -> bool:
    name = path.relative_to(REPO_DIR).as_posix()
    return name in GENERATED


def long_lines(path: Path) -> list[tuple[int, int]]:
    """The number and the length of each line that is too long."""
    lines = path.read_text("utf-8").splitlines()
    return [(i, len(line)) for i, line in enumerate(lines, 1) if len(line) > COLUMNS]


def main(arguments: list[str]) -> int:
    """Prints every line that is too long; 1 if there is one."""
    paths = [Path(argument) for argument in arguments] or sources()
    found = [(path, line, size) for path in paths for line, size in long_lines(path)]
    for path, line, size in found:
        print(f"{path}:{line}: {size} columns, at most {COLUMNS}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
