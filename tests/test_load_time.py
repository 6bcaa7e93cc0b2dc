"""Loading is quick: it imports nothing large, and benchmarks/load_time measures it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import REPO_DIR, REPO_ID, VERSION, kernel_backend, why_no_cuda

# What PyTorch itself leaves to be imported when it is first used, at a second or so each.
LARGE = ("torch._dynamo", "torch._inductor", "torch._export", "torch.onnx", "sympy")

LOAD = f"""
import sys, torch
before = set(sys.modules)
from kernels import get_kernel
kernels = set(sys.modules)
get_kernel({REPO_ID!r}, version={VERSION}, backend={{backend!r}})
large = {LARGE!r}
print(*(m for m in large if m in sys.modules and m not in kernels), sep="\\n")
"""


@pytest.mark.long
@pytest.mark.kernels_ci
def test_loading_imports_nothing_large():
    child = [sys.executable, "-c", LOAD.format(backend=kernel_backend())]
    done = subprocess.run(child, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


INTEGRATIONS = f"""
import sys
from kernels import get_kernel
kernel = get_kernel({REPO_ID!r}, version={VERSION}, backend={{backend!r}})
name = f"{{{{kernel.__name__}}}}.integrations"
assert "integrations" in kernel.__all__ and "integrations" in dir(kernel)
assert name not in sys.modules
assert kernel.integrations is sys.modules[name]
assert "torch.distributed.tensor" not in sys.modules
assert kernel.distributed.__all__ and "distributed" in kernel.__all__
assert {{{{"transformers", "diffusers"}}}}.isdisjoint(sys.modules)
"""


@pytest.mark.long
def test_integrations_are_imported_when_they_are_asked_for():
    child = [sys.executable, "-c", INTEGRATIONS.format(backend=kernel_backend())]
    done = subprocess.run(child, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_benchmark_writes_its_result(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(REPO_DIR)
    from benchmarks import load_time

    path = tmp_path / "load_time.json"
    device = "cpu" if why_no_cuda() else "cuda"
    monkeypatch.setattr(load_time, "BAR", 60.0)  # tests may share the machine
    assert load_time.main(["--device", device, "--runs", "1", "--output", str(path)]) == 0
    case = json.loads(path.read_text())["cases"]["load_time"]
    assert all(0 < times["min"] <= times["median"] for times in case["seconds"].values())
    assert "fuselage " in capsys.readouterr().out
    monkeypatch.setattr(load_time, "BAR", 0.0)
    assert load_time.main(["--device", device, "--runs", "1", "--output", str(path)]) == 1
