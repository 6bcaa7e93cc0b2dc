"""Loads the kernel the way a user does and hands it to every test.

`get_kernel` is pointed at this checkout by `LOCAL_KERNELS`, so `make build` must have run. Set
`FUSELAGE_KERNEL_DIR` to test another checkout, or one variant folder of a release. If
`LOCAL_KERNELS` names this kernel, that one is tested: kernel-builder's `ci-test` sets it, and runs
what is marked `kernels_ci` where there is nothing but the sources of the build and these tests.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPO_ID = "fuselage-kernels/fuselage"
VERSION = 1
REPO_DIR = Path(__file__).resolve().parent.parent
HAS_CHECKOUT = (REPO_DIR / "tools").is_dir()


def local_kernels() -> dict[str, str]:
    """What `LOCAL_KERNELS` names, and this kernel with it."""
    given = os.environ.get("LOCAL_KERNELS", "")
    named = dict(entry.split("=", 1) for entry in given.split(":") if "=" in entry)
    named.setdefault(REPO_ID, str(REPO_DIR))
    if "FUSELAGE_KERNEL_DIR" in os.environ:
        named[REPO_ID] = os.environ["FUSELAGE_KERNEL_DIR"]
    return named | {REPO_ID: str(Path(named[REPO_ID]).resolve())}


KERNEL_DIR = Path(local_kernels()[REPO_ID])

# `kernels` and `huggingface_hub` read these once, at import or at the first call.
os.environ["LOCAL_KERNELS"] = ":".join(f"{name}={path}" for name, path in local_kernels().items())
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch  # noqa: E402


def why_no_cuda() -> str | None:
    """Why this run has no CUDA tests; None where it has them."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if any(re.search(r"-(cu|rocm)\d+-", path.name) for path in variants()):
        return None
    return "no GPU variant is built (is there no nvcc?)"


def variants() -> list[Path]:
    """The folders of which `kernels` may load one."""
    return [KERNEL_DIR, *KERNEL_DIR.glob("torch-*"), *KERNEL_DIR.glob("build/torch-*")]


# What the suite runs on. Parameters for other devices are not collected.
DEVICES = ("cpu",) if why_no_cuda() else ("cpu", "cuda")


def kernel_backend() -> str | None:
    """`None` (automatic) on a GPU or without a CPU variant, otherwise the CPU."""
    has_cpu_variant = any("-cpu-" in path.name for path in variants())
    return "cpu" if "cuda" not in DEVICES and has_cpu_variant else None


def pytest_report_header() -> str:
    """One line in place of a skip for each GPU test of a machine without a GPU."""
    reason = why_no_cuda()
    line = f"devices: {', '.join(DEVICES)}" + (f" (no GPU tests: {reason})" if reason else "")
    line += "" if KERNEL_DIR == REPO_DIR else f"; kernel: {KERNEL_DIR}"
    return line if HAS_CHECKOUT else f"{line}; no checkout: only files with kernels_ci tests"


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marks where pytest.ini is missing."""
    if not HAS_CHECKOUT:
        for mark in ("gpu(count=1): needs so many GPUs", "slow: takes seconds", "long: takes one"):
            config.addinivalue_line("markers", mark)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a checkout, leaves out the files whose tests need one."""
    if HAS_CHECKOUT or not collection_path.name.startswith("test_"):
        return None
    return b"mark.kernels_ci" not in collection_path.read_bytes() or None


@pytest.hookimpl(optionalhook=True)  # the Hub's builder has no xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for `-n auto`: one a core, but few on a GPU, whose memory the slow tests fill."""
    if "cuda" not in DEVICES:
        return len(os.sched_getaffinity(0))
    return 8 if "not slow" in config.option.markexpr else 0


def pytest_pycollect_makeitem(obj: object) -> list | None:
    """Collects no test that wants more GPUs than there are, or has no values for what is."""
    marks = getattr(obj, "pytestmark", ())
    there = torch.cuda.device_count() if "cuda" in DEVICES else 0
    if any(m.name == "gpu" and m.kwargs.get("count", 1) > there for m in marks):
        return []
    return [] if any(m.name == "parametrize" and m.args[1:] == ([],) for m in marks) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what an operator's `cpu_dtypes` says is tested with another operator."""

    def wanted(item: pytest.Item) -> bool:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        dtypes = getattr(params.get("op"), "cpu_dtypes", ())
        on_cpu = params.get("device") == "cpu"
        return not (on_cpu and dtypes and "dtype" in params) or params["dtype"] in dtypes

    left_out = [item for item in items if not wanted(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if wanted(item)]


# When .ci/run has no more time, in seconds since the epoch.
TESTS_END = float(os.environ.get("FUSELAGE_TESTS_END", "inf"))


def pytest_runtest_setup() -> None:
    """Skips what is left then, and says of how many tests."""
    if time.time() > TESTS_END:
        pytest.skip("time is up")


@pytest.fixture(scope="session")
def fuselage() -> ModuleType:
    """The kernel, as `get_kernel` returns it."""
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=VERSION, backend=kernel_backend())


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device the suite runs on."""
    return request.param


_GPUS = torch.cuda.device_count() if "cuda" in DEVICES else 0
_RANKS = [("cpu", 2), ("cpu", 4), *(("cuda", count) for count in (2, 4) if count <= _GPUS)]


@pytest.fixture(scope="session")
def started_ranks() -> Iterator[dict]:
    started = {}
    yield started
    for ranks in started.values():
        ranks.close()


@pytest.fixture(params=_RANKS, ids=lambda ranks: f"{ranks[0]}-{ranks[1]}")
def ranks(request: pytest.FixtureRequest, started_ranks: dict):
    """Two and four processes on the CPU, and on so many GPUs: `ranks.run(function, ...)`."""
    from ranks import Ranks

    device, count = request.param
    if request.param not in started_ranks:
        started_ranks[request.param] = Ranks(count, device)
    return started_ranks[request.param]


def seed_generators() -> int:
    """Seeds every generator.

    NOTE: not by `torch.manual_seed`, which formats a stack for each kind of device that is not
    there, and keeps all of them. With logging's plugin (pytest.ini) that was 4 of the 11 ms that a
    small test took.
    """
    value = 20261121
    random.seed(value)
    torch.default_generator.manual_seed(value)
    if "cuda" in DEVICES:
        torch.cuda.manual_seed_all(value)
    return value


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds every generator before each test, so that a failure repeats."""
    return seed_generators()


@pytest.fixture(autouse=True)
def plain_rotary_embedding():
    """Undoes what `kernelize` does to the function that all Llamas of the process share."""
    yield
    llama = sys.modules.get("transformers.models.llama.modeling_llama")
    if llama is not None:
        vars(llama.apply_rotary_pos_emb).pop("forward", None)
