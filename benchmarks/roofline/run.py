#!/usr/bin/env python3
"""`python benchmarks/roofline/run.py`, the same as `python -m benchmarks.roofline`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.roofline.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
