"""tools/torch_matrix.py asks for the right packages, and its oldest Torch is the stable ABI's."""

from __future__ import annotations

import sys

import pytest
from conftest import REPO_DIR

sys.path.insert(0, str(REPO_DIR / "tools"))

import torch_matrix
from builder.config import load


def test_the_oldest_torch_is_that_of_the_stable_abi():
    versions = set(load(REPO_DIR).stable_abi.values())
    assert {torch_matrix.OLDEST.rpartition(".")[0]} == versions


def test_only_the_gpu_libraries_are_installed():
    assert torch_matrix.libraries(
        [
            "filelock",
            'nvidia-cublas-cu12==12.8.4.1; platform_system == "Linux"',
            'nvidia-nccl-cu12==2.27.5; platform_system == "Windows"',
            'cuda-bindings==12.9.4; platform_system == "Linux"',
            'cuda-toolkit[cublas,cudart]==13.0.2; platform_system == "Linux"',
            'triton==3.6.0; platform_system == "Linux"',
            'pyyaml; extra == "pyyaml"',
        ]
    ) == ["nvidia-cublas-cu12==12.8.4.1", "cuda-toolkit[cublas,cudart]==13.0.2"]


def test_a_failure_fails_the_matrix_and_the_others_run(monkeypatch, capsys):
    def result(release, folder, options):
        return torch_matrix.Result(release, release != "2.10.0", "said", 1.0, 2.0, 3)

    monkeypatch.setattr(torch_matrix, "test_under", result)
    assert torch_matrix.main(["--torch", "2.10.0,newest", "--", "-x"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "said" in line] == ["2.10.0", "newest"]
    assert ["FAILED" in line for line in lines if "said" in line] == [True, False]
    assert torch_matrix.main(["--torch", "newest"]) == 0


def test_another_torch_than_asked_for_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_matrix, "make_environment", lambda *_: tmp_path / "python")
    monkeypatch.setattr(torch_matrix, "torch_version", lambda _: "2.13.0+cpu")
    with pytest.raises(SystemExit, match=r"wanted Torch 2\.10\.0"):
        torch_matrix.test_under("2.10.0", tmp_path, [])
