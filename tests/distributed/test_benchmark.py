"""The benchmarks of many GPUs run at reduced size, verify, count and write."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import KERNEL_DIR, REPO_DIR, why_no_cuda
from ranks import Rank, distributed
from torch.distributed.tensor import Partial, Replicate, Shard

from benchmarks.sequence_parallel import Received, table

on_cpus = pytest.mark.skipif(not why_no_cuda(), reason="runs on CPUs")


def received(rank: Rank) -> None:
    """Each collective once, with its bytes; nothing of what PyTorch calls around it."""
    mesh, x = rank.mesh(), torch.ones(4, 8, device=rank.device)
    of_all, others = 4 * 8 * 4, rank.count - 1
    each = of_all // rank.count
    cases = [
        (Shard(0), Replicate(), "all_gather_into_tensor", each * others),
        (Partial(), Shard(0), "reduce_scatter_tensor", each * others),
        (Partial(), Replicate(), "all_reduce", 2 * each * others),
    ]
    for placement, to, collective, of_bytes in cases:
        for requires in (False, True):
            t = distributed(x, mesh, placement).requires_grad_(requires)
            with Received() as counted:
                t.redistribute(placements=[to]).to_local()
            assert counted.found == {collective: {"calls": 1, "bytes": of_bytes}}


@pytest.mark.long
def test_only_collectives_are_counted(ranks):
    ranks.run(received)


def test_scaling_is_relative_to_one_rank():
    def record(ranks: int, milliseconds: float) -> dict:
        column = {"milliseconds": {"median": milliseconds}, "peak_gib": None, "received": {}}
        return {"ranks": ranks, "columns": {"plan": column}}

    cases = {
        "prefill of 64 tokens, 1 rank": record(1, 60.0),
        "prefill of 64 tokens, 4 ranks": record(4, 20.0),
        "prefill of 9 tokens, 4 ranks": record(4, 20.0),
    }
    rows = [line.split(" | ") for line in table(cases).splitlines()]
    assert rows[0][3:5] == ["over one rank", "scaling efficiency"]
    assert [row[3:5] for row in rows[2:]] == [["-", "-"], ["3.00x", "75%"], ["-", "-"]]


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


@pytest.mark.slow
@on_cpus
def test_it_verifies_times_and_writes(fuselage, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "results.json"
    printed = run("sequence_parallel", "--layers", "2", "--output", str(path))
    cases = json.loads(path.read_text())["cases"]
    names = ("training step of 64", "prefill of 64", "decode of 2x64")
    assert list(cases) == [f"{name} tokens, 2 ranks" for name in names]
    for case in cases.values():
        assert case["error"] <= 1e-4 and case["kernel"]
        plan, ours = case["columns"].values()
        # A draw from the head in shards needs no logits of other ranks.
        assert (ours["received"] == plan["received"]) == (case["case"] != "decode")
        collectives = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"}
        assert set(ours["received"]) | set(plan["received"]) <= collectives
        # One for the embedding or the head; for each attention and each MLP one.
        if case["case"] == "prefill":
            for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
                assert ours["received"][name]["calls"] == 5
        assert plan["milliseconds"]["median"] > 0 and ours["milliseconds"]["median"] > 0
    assert "training step of 64 tokens, 2 ranks: plan + fuselage" in printed


@pytest.mark.slow
@on_cpus
def test_sharded_columns(fuselage):
    """Both ways of each norm give the same, and columns that stay receive less."""
    lines = [line for line in run("sharded_columns").splitlines() if "forward" in line]
    received = [float(line.split(" | ")[-1].removesuffix(" |")) for line in lines]
    gathered, in_shards = received[::2], received[1::2]
    assert len(gathered) == 8 and all(0 < b < a for a, b in zip(gathered, in_shards, strict=True))
