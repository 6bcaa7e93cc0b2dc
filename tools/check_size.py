#!/usr/bin/env python3
"""Checks that CUDA variants are no larger, and took no longer to compile, than they may.

Prints the size and the CPU time of each file, and fails beyond the bars of tools/builder/costs.py.
Checks every CUDA variant below build/, or those below the folder named.

    python tools/check_size.py [folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builder.costs import read_costs
from builder.errors import BuildError

REPO_DIR = Path(__file__).resolve().parent.parent


def check(variant: Path) -> bool:
    """Prints what `variant` costs; whether it may."""
    (library,) = variant.glob("*.so")
    costs = read_costs(variant.parent / ".work" / variant.name, library)
    found = costs.excess()
    print(costs.table())
    print(f"FAILED  {variant.name}\n  " + "\n  ".join(found) if found else f"ok  {variant.name}")
    return not found


def main() -> int:
    """Checks each variant; nothing built is a failure too."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else REPO_DIR / "build"
    variants = sorted(folder.glob("torch*-cu*-*"))
    if not variants:
        print("error: no CUDA variant is built: make build-cuda", file=sys.stderr)
        return 1
    try:
        passed = [check(variant) for variant in variants]
        return 0 if all(passed) else 1
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
