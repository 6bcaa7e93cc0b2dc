"""The demo runs as `make demo` runs it: it checks a model and every operator by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import REPO_DIR

DEMO = REPO_DIR / "examples/demo.py"


@pytest.mark.slow
def test_the_demo_passes_and_prints_its_table(fuselage):
    result = subprocess.run(
        [sys.executable, DEMO], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.strip("│ ").split("│") for line in result.stdout.splitlines() if line[0:1] == "│"]
    operators = [cells[0].strip() for cells in rows]
    for name in ("rms_norm", "fused_add_rms_norm", "rms_norm fwd+bwd"):
        assert operators.count(name) == 3, result.stdout
    assert all(len(cells) == 7 and all(cells) for cells in rows), result.stdout


BROKEN = """
import sys
sys.path.insert(0, sys.argv[1])
import demo
kernel, device = demo.load()
right = kernel.layers.rms_norm
kernel.layers.rms_norm = lambda *args, **options: 1.001 * right(*args, **options)
demo.main()
"""


@pytest.mark.slow
def test_the_demo_fails_where_the_norms_are_wrong(fuselage):
    command = [sys.executable, "-c", BROKEN, DEMO.parent]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED: " in result.stderr and "Traceback" not in result.stderr
