"""Which variant `kernels` takes of a release, on machines that are not here: docs/variants.md."""

from __future__ import annotations

import itertools

import pytest
import variants
from builder.config import load
from conftest import REPO_DIR

TORCH = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
SERVED = {
    "cpu": "cpu",
    "cu126": "cu126",
    "cu128": "cu126",
    "cu129": "cu126",
    "cu130": "cu130",
    "cu131": "cu130",
    "cu132": "cu132",
    "cu133": "cu132",
}


@pytest.fixture(scope="module")
def names() -> list[str]:
    return variants.released(load(REPO_DIR))


@pytest.mark.parametrize(
    ("torch", "backend", "machine"),
    [*itertools.product(TORCH, SERVED, ("x86_64", "aarch64"))],
)
def test_the_variant_that_is_taken(names: list[str], torch: str, backend: str, machine: str):
    resolved = variants.resolve(names, torch, backend, machine)
    assert resolved.variant == f"torch-stable-abi210-{SERVED[backend]}-{machine}-linux"
    assert {resolved.variant, *resolved.refused} == {*names}


def test_why_others_are_refused(names: list[str]):
    resolved = variants.resolve(names, "2.13", "cu130", "x86_64")
    reasons = {name: why for name, why in resolved.refused.items() if "x86_64" in name}
    assert reasons == {
        "torch-stable-abi210-cpu-x86_64-linux": (
            "backend (cpu) does not match selected backend (cu130)"
        ),
        "torch-stable-abi210-cu126-x86_64-linux": (
            "CUDA version (12.6) is not compatible with system CUDA version (13.0)"
        ),
        "torch-stable-abi210-cu132-x86_64-linux": (
            "CUDA version (13.2) is not compatible with system CUDA version (13.0)"
        ),
    }
    others = {why for name, why in resolved.refused.items() if "aarch64" in name}
    assert others == {"CPU (aarch64) does not match system CPU (x86_64)"}


@pytest.mark.parametrize(
    ("torch", "backend", "reason"),
    [
        ("2.9", "cu130", "Torch stable ABI version (2.10) is too new"),
        ("2.13", "cu124", "is not compatible with system CUDA version (12.4)"),
        ("2.13", "rocm71", "does not match selected backend (rocm71)"),
    ],
)
def test_who_is_not_served(names: list[str], torch: str, backend: str, reason: str):
    resolved = variants.resolve(names, torch, backend, "x86_64")
    assert resolved.variant is None
    assert any(reason in why for why in resolved.refused.values())


def test_a_release_has_no_rocm(names: list[str]):
    """kernel-builder's newest PyTorch for ROCm 7.1 is broken, and nobody has run the kernels."""
    assert {name.split("-")[3] for name in names} == {"cpu", "cu126", "cu130", "cu132"}


def test_a_variant_that_is_missing_is_seen(names: list[str]):
    fewer = [name for name in names if "cu126" not in name]
    assert variants.resolve(fewer, "2.13", "cu128", "x86_64").variant is None


@pytest.mark.parametrize(
    ("capability", "archs", "code"),
    [
        ("7.5", ["8.0", "9.0+PTX"], "refused"),
        ("8.7", ["8.6", "9.0+PTX"], "machine code"),
        ("9.0", ["9.0a"], "machine code"),
        ("10.0", ["9.0a", "9.0+PTX"], "PTX"),
        ("10.0", ["9.0a", "9.0"], "refused"),
        ("12.1", ["12.0"], "machine code"),
    ],
)
def test_what_a_gpu_runs(capability: str, archs: list[str], code: str):
    assert variants.gpu_code(archs, capability) == code
