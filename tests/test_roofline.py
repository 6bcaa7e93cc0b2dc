"""The roofline benchmark runs, verifies and stores, on a CPU and one small case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.roofline import cli


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_case_is_timed_and_stored(tmp_path: Path, direction: str, capsys):
    chosen = ["--device", "cpu", "--quick", "--no-host", "--only", f"cross_entropy.{direction}"]
    assert cli.main([*chosen, "--results", str(tmp_path)]) == 0, capsys.readouterr().out
    (stored,) = tmp_path.glob("*.json")
    cases = json.loads(stored.read_text())["cases"]
    measured = [case for key, case in cases.items() if f"cross_entropy.{direction}" in key]
    assert measured and all(case["contenders"]["fuselage"]["us"] > 0 for case in measured)
