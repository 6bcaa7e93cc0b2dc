"""The Hub's builder runs `kernels_ci` tests where there is little else: tools/ci_test.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ci_test
import conftest
import pytest
from builder.config import load
from conftest import REPO_DIR, REPO_ID


def test_the_sandbox_has_the_sources_of_the_build_and_python_files(tmp_path: Path):
    ci_test.copy_source_set(load(REPO_DIR), tmp_path)
    files = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    there = {"build.toml", "pyproject.toml", "kernel_src/norm/rms_norm.cu", "tests/conftest.py"}
    assert there < files
    top = {name.partition("/")[0] for name in files}
    assert top == {"build.toml", "pyproject.toml", "kernel_src", "torch-ext", "tests"}
    assert {Path(name).suffix for name in files if name.startswith("tests/")} == {".py"}


def test_packages_of_this_project_alone_are_refused():
    refused = ci_test.refused_modules()
    assert {"hypothesis", "transformers", "xdist"} <= refused
    assert refused.isdisjoint({"torch", "kernels", "pytest", "numpy", "jinja2", "huggingface_hub"})


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, {REPO_ID: REPO_DIR}),
        ({"LOCAL_KERNELS": f"{REPO_ID}=/given"}, {REPO_ID: "/given"}),
        ({"LOCAL_KERNELS": "a/b=/b"}, {"a/b": "/b", REPO_ID: REPO_DIR}),
        (
            {"LOCAL_KERNELS": f"a/b=/b:{REPO_ID}=/given", "FUSELAGE_KERNEL_DIR": "/chosen"},
            {"a/b": "/b", REPO_ID: "/chosen"},
        ),
    ],
)
def test_a_given_kernel_is_the_one_that_is_tested(monkeypatch, environment, named):
    for name in ("LOCAL_KERNELS", "FUSELAGE_KERNEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert conftest.local_kernels() == {name: str(path) for name, path in named.items()}


@pytest.mark.parametrize(
    ("folders", "backend"),
    [
        (["torch-stable-abi210-cpu-x86_64-linux", "torch-stable-abi210-cu130-x86_64-linux"], "cpu"),
        (["torch-stable-abi210-cu130-x86_64-linux"], None),
    ],
)
def test_without_a_gpu_the_cpu_variant_is_asked_for_if_there_is_one(
    monkeypatch, tmp_path: Path, folders: list[str], backend: str | None
):
    for name in folders:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(conftest, "KERNEL_DIR", tmp_path)
    monkeypatch.setattr(conftest, "DEVICES", ("cpu",))
    assert conftest.kernel_backend() == backend


@pytest.mark.slow
def test_the_tests_are_collected_in_the_sandbox(fuselage):
    """`make ci-test` runs them."""
    variant = Path(fuselage.__file__).parent
    command = [sys.executable, ci_test.__file__, "--variant", variant, "--collect-only", "-q"]
    result = subprocess.run([*command, "--seconds", "600"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr
    (count,) = re.findall(r"^(\d+)/\d+ tests collected", result.stdout, re.M)
    assert int(count) > 2000
