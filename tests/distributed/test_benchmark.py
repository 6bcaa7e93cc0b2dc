"""The benchmarks of many GPUs run at reduced size, verify, count and write."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import KERNEL_DIR, REPO_DIR, why_no_cuda

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not why_no_cuda(), reason="runs on CPUs"),
]


def run(module: str, *options: str) -> str:
    """What the benchmark prints, in two processes on the CPU."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *torchrun, "-m", f"benchmarks.{module}", "--quick", *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=REPO_DIR,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "FUSELAGE_KERNEL_DIR": str(KERNEL_DIR)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_it_verifies_times_and_writes(fuselage, tmp_path):
    path = tmp_path / "results.json"
    printed = run("sequence_parallel", "--layers", "2", "--output", str(path))
    cases = json.loads(path.read_text())["cases"]
    decodes = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 13)
    names = ("training step", "prefill", "decode")[: 2 + decodes]
    assert list(cases) == [f"{name} of 64 tokens, 2 ranks" for name in names]
    for case in cases.values():
        assert case["error"] <= 1e-4 and case["kernel"]
        plan, ours = case["columns"].values()
        # A draw from the head in shards needs no logits of other ranks.
        assert (ours["received"] == plan["received"]) == (case["case"] != "decode")
        assert ours["received"]
        assert plan["milliseconds"]["median"] > 0 and ours["milliseconds"]["median"] > 0
    assert "training step of 64 tokens, 2 ranks: plan + fuselage" in printed


def test_sharded_columns(fuselage):
    """Both ways of each norm give the same, and columns that stay receive less."""
    lines = [line for line in run("sharded_columns").splitlines() if "forward" in line]
    received = [float(line.split(" | ")[-1].removesuffix(" |")) for line in lines]
    gathered, in_shards = received[::2], received[1::2]
    assert len(gathered) == 8 and all(0 < b < a for a, b in zip(gathered, in_shards, strict=True))
