"""benchmarks/end_to_end runs at reduced size, verifies before it times, and writes its results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import REPO_DIR

COLUMNS = ["eager", "eager + fuselage"]
OPTIONS = ["--quick", "--device", "cpu", "--no-compile"]


def test_it_verifies_times_and_writes(fuselage, tmp_path):
    pytest.importorskip("transformers")
    names = ["llama-prefill", "llama-decode", "llama-training"]
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.end_to_end", *OPTIONS, "--output", str(path)]
    command += [option for name in names for option in ("--only", name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPO_DIR)
    assert result.returncode == 0, result.stdout + result.stderr
    stored = json.loads(path.read_text())
    assert list(stored["cases"]) == names and stored["environment"]["torch"]
    for case in stored["cases"].values():
        assert case["verified"] and case["replaced"] and case["kernel"]
        assert list(case["columns"]) == COLUMNS
        shares = [column["breakdown"]["fuselage"] for column in case["columns"].values()]
        assert shares[0] == 0 < shares[1]
        assert all(column["milliseconds"]["median"] > 0 for column in case["columns"].values())
    rows = [line for line in result.stdout.splitlines() if line.startswith("| eager")]
    assert len(rows) == 2 * len(names)


BROKEN = """
import sys
from benchmarks.end_to_end import cli
from benchmarks.roofline.contenders import load_fuselage
kernel = load_fuselage("cpu")
kernel.integrations.transformers
norms = sys.modules[kernel.__name__ + ".integrations._norms"]
right = norms.rms_norm
norms.rms_norm = lambda *args, **options: 1.01 * right(*args, **options)
norms._behaves_the_same = lambda *args: True
sys.exit(cli.main(sys.argv[1:]))
"""


def test_it_does_not_time_what_is_wrong(fuselage):
    pytest.importorskip("transformers")
    command = [sys.executable, "-c", BROKEN, *OPTIONS, "--only", "llama-prefill"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPO_DIR)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED: not timed" in result.stdout and "| eager + fuselage" not in result.stdout
