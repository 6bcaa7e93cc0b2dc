"""benchmarks/sequence_parallel.py runs at reduced size, verifies, counts and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import KERNEL_DIR, REPO_DIR, why_no_cuda

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not why_no_cuda(), reason="runs on CPUs"),
]


def test_it_verifies_times_and_writes(fuselage, tmp_path):
    path = tmp_path / "results.json"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--quick", "--layers", "2", "--output", str(path)]
    result = subprocess.run(
        [sys.executable, *torchrun, "-m", "benchmarks.sequence_parallel", *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=REPO_DIR,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "FUSELAGE_KERNEL_DIR": str(KERNEL_DIR)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    cases = json.loads(path.read_text())["cases"]
    names = ("training step", "prefill", "decode")
    assert list(cases) == [f"{name}, 2 ranks" for name in names]
    for case in cases.values():
        assert case["error"] <= 1e-4 and case["kernel"]
        plan, ours = case["columns"].values()
        # A draw from the head in shards needs no logits of other ranks.
        assert (ours["received"] == plan["received"]) == (case is not cases["decode, 2 ranks"])
        assert ours["received"]
        assert plan["milliseconds"]["median"] > 0 and ours["milliseconds"]["median"] > 0
    assert "training step, 2 ranks: plan + fuselage" in result.stdout
