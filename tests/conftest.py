"""Loads the kernel the way a user does and hands it to every test.

`get_kernel` is pointed at this checkout by `LOCAL_KERNELS`, so `make build` must have run. Set
`FUSELAGE_KERNEL_DIR` to test another checkout, or one variant folder of a release.
"""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO_ID = "fuselage-kernels/fuselage"
VERSION = 1
REPO_DIR = Path(__file__).resolve().parent.parent
KERNEL_DIR = Path(os.environ.get("FUSELAGE_KERNEL_DIR", REPO_DIR)).resolve()

# `kernels` and `huggingface_hub` read these once, at import or at the first call.
os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={KERNEL_DIR}"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch  # noqa: E402


def why_no_cuda() -> str | None:
    """Why this run has no CUDA tests; None where it has them."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    variants = [KERNEL_DIR, *KERNEL_DIR.glob("torch-*"), *KERNEL_DIR.glob("build/torch-*")]
    if any(re.search(r"-(cu|rocm)\d+-", path.name) for path in variants):
        return None
    return "no GPU variant is built (is there no nvcc?)"


# What the suite runs on. Parameters for other devices are not collected.
DEVICES = ("cpu",) if why_no_cuda() else ("cpu", "cuda")


def kernel_backend() -> str | None:
    """The backend to ask for: `None` (automatic) on a GPU, otherwise the CPU variant."""
    return None if "cuda" in DEVICES else "cpu"


def pytest_report_header() -> str:
    """One line in place of a skip for each GPU test of a machine without a GPU."""
    reason = why_no_cuda()
    return f"devices: {', '.join(DEVICES)}" + (f" (no GPU tests: {reason})" if reason else "")


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


@pytest.fixture(scope="session")
def fuselage() -> ModuleType:
    """The kernel, as `get_kernel` returns it."""
    from kernels import get_kernel

    return get_kernel(REPO_ID, version=VERSION, backend=kernel_backend())


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device the suite runs on."""
    return request.param


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds every generator before each test, so that a failure repeats."""
    value = 20261121
    random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def plain_rotary_embedding():
    """Undoes what `kernelize` does to the function that all Llamas of the process share."""
    yield
    llama = sys.modules.get("transformers.models.llama.modeling_llama")
    if llama is not None:
        vars(llama.apply_rotary_pos_emb).pop("forward", None)
