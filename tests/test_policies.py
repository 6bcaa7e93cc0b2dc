"""Launch policies over GPUs that this machine has not, and what the process keeps of those it has.

Policies are pure functions in plain C++ headers. policy_probe.cpp sweeps all of them over made-up
devices; device_probe.cpp runs common/device_info.cu against a runtime that it makes up. Neither
needs a GPU or its toolkit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from check_abi import shared_state
from probes import SOURCES, TESTS, compiled, made_up_headers, printed

# policies

FAMILIES = (
    "rms_norm forward",
    "rms_norm backward",
    "rms_norm_add_rms_norm backward",
    "ada_norm forward",
    "ada_norm backward",
    "poly_norm",
    "gated_rms_norm",
    "group_norm",
    "shard_norm",
    "activation",
    "rotary",
    "qk_norm_rotary",
    "sampling",
    "lm_head",
    "loss",
    "topk_softmax",
    "quant_fp8",
    "row_quant",
)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """For each family, what the sweep finds of each device: name, cases, violations, the first."""
    folder = tmp_path_factory.mktemp("policies")
    probe = compiled(folder / "policy_probe", TESTS / "policy_probe.cpp")
    found: dict[str, list[list[str]]] = {}
    for line in printed(probe):
        family, *rest = line.split("|", 4)
        found.setdefault(family, []).append(rest)
    return found


@pytest.mark.long
def test_every_family_is_swept(sweep: dict[str, list[list[str]]]):
    assert set(sweep) == set(FAMILIES)
    for devices in sweep.values():
        assert len(devices) == 10
        assert all(int(cases) > 50 for _, cases, _, _ in devices)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_asks_for_what_the_device_has(sweep: dict[str, list[list[str]]], family: str):
    wrong = [
        f"{device}: {violations} of {cases}, first: {first}"
        for device, cases, violations, first in sweep[family]
        if int(violations)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_divisor_divides_exactly(tmp_path: Path):
    """Whatever fits in 63 bits, by one to the largest number."""
    probe = compiled(tmp_path / "divide_probe", TESTS / "divide_probe.cpp")
    divisions, wrong, first = printed(probe)[0].split("|")
    assert int(divisions) > 300_000
    assert wrong == "0", first


def test_no_kernel_or_policy_compares_a_capability():
    pattern = re.compile(r"compute_?capability|CapabilityM(ajor|inor)", re.IGNORECASE)
    mapping = {"device_info.h", "device_info.cu", "gpu_compat.h"}
    for path in SOURCES.rglob("*"):
        if path.suffix in (".h", ".cu", ".cpp") and path.name not in mapping:
            code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            assert not pattern.search(code), path


def code_of_kernels(source: str, arch: str, folder: Path) -> list[tuple[str, int]]:
    """The name and the bytes of machine code of each kernel of a source."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    cubin = folder / "code.cubin"
    command = [nvcc, "-cubin", f"-arch=sm_{arch}", "-std=c++17", "-O3", "--expt-relaxed-constexpr"]
    command += [f"-I{SOURCES}", SOURCES / source, "-o", cubin]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    sections = subprocess.run(["readelf", "-SW", cubin], capture_output=True, text=True).stdout
    found = re.findall(r"\.text\._Z\S*?\d([a-z_]+)I\S* +PROGBITS +\w+ \w+ (\w+)", sections)
    return [(name, int(size, 16)) for name, size in found]


@pytest.mark.long
def test_the_heads_form_for_a_t4_has_code_there(tmp_path: Path):
    """policy_probe.cpp: a T4 takes no other. What it cannot run is empty."""
    kernels = code_of_kernels("sample/lm_head.cu", "75", tmp_path)
    code = {name: [size for its, size in kernels if its == name] for name, _ in kernels}
    assert {name: len(sizes) for name, sizes in code.items()} == {
        "plain_head_kernel": 6,  # three dtypes, and float8 beside each
        "float_head_kernel": 2,
        "head_kernel": 26,
    }
    assert min(code["plain_head_kernel"]) > 10_000
    assert max(code["float_head_kernel"] + code["head_kernel"]) < 500


# devices


@pytest.fixture(scope="module")
def made_up_runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_headers(tmp_path_factory.mktemp("runtime"))


@pytest.mark.long
def test_device_code_keeps_no_state_that_versions_share(made_up_runtime: Path):
    # Without -fno-gnu-unique and -fvisibility=hidden, which the release's builder does not give.
    source = SOURCES / "common/device_info.cu"
    arguments = (f"-I{made_up_runtime}", "-fPIC", "-c", "-x", "c++", source)
    assert not shared_state(compiled(made_up_runtime / "device_info.o", *arguments))


@pytest.fixture(scope="module")
def device_probe(made_up_runtime: Path) -> Path:
    source = SOURCES / "common/device_info.cu"
    return compiled(
        made_up_runtime / "device_probe",
        *("-pthread", f"-I{made_up_runtime}", TESTS / "device_probe.cpp", "-x", "c++", source),
    )


DEVICE_CASES = (
    "features",
    "failure is raised and not kept",
    "asked once by many threads",
    "a device beyond the kept ones",
    "shared memory is allowed once and to the most",
    "shared memory of many kernels and devices",
)


@pytest.mark.parametrize("case", DEVICE_CASES)
def test_device_info(device_probe: Path, case: str):
    assert printed(device_probe, case) == ["ok"]
