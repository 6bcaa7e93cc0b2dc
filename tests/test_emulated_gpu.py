"""What tools/emulate_gpu.py runs kernels on: threads that wait for each other.

emulated_gpu/probe.cpp has a kernel for each.
"""

import os
import platform
import subprocess
from pathlib import Path

import pytest
from builder.compile import EMULATED_GPU_FLAGS, for_emulated_gpu
from probes import TESTS, compiled

FOLDER = TESTS / "emulated_gpu"

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="its fibers are for x86-64")


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("probe") / "probe"
    flags = [flag for flag in EMULATED_GPU_FLAGS if not flag.startswith("-I")]
    sources = (FOLDER / "emulated_gpu.cpp", FOLDER / "probe.cpp")
    return compiled(output, *flags, f"-I{FOLDER}", *sources)


def run(probe: Path, kernel: str, **options: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **options}
    command = [str(probe), kernel]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def numbers(probe: Path, kernel: str, **options: str) -> list[int]:
    done = run(probe, kernel, **options)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


ORDERS = ({}, {"EMULATED_GPU_BACKWARDS": "1"})


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS, ids=("forwards", "backwards"))
@pytest.mark.parametrize("warp", ["32", "64"])
def test_blocks_add_up(probe, warp, order):
    sums = numbers(probe, "block_sum", EMULATED_GPU_WARP=warp, **order)
    assert sums == [sum(range(64 * i, 64 * i + 64)) for i in range(4)]


def test_a_race_depends_on_the_order(probe):
    there, back = (numbers(probe, "race", **order) for order in ORDERS)
    assert there != back
    there, back = (numbers(probe, "no_race", **order) for order in ORDERS)
    assert there == back == [1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize("order", ORDERS, ids=("forwards", "backwards"))
def test_threads_that_wait_for_ever_end_the_program(probe, order):
    done = run(probe, "half_at_a_barrier", **order)
    assert done.returncode != 0
    assert "threads wait for others that never come, block (0, 0, 0) of 32" in done.stderr
    assert "thread 0: at a barrier" in done.stderr and "thread 16: at a shuffle" in done.stderr


def test_nobody_waits_for_those_that_ended(probe):
    found = numbers(probe, "others_have_ended")
    assert found[:8] == [-1] * 8  # what these have left
    assert found[8:16] == [3] * 4 + [7] * 4
    assert found[16:] == [0, 0, 1, 2, 4, 4, 5, 6]


def test_half_a_wavefront_votes_alone(probe):
    assert numbers(probe, "votes", EMULATED_GPU_WARP="64") == [1] * 32 + [0] * 32
    assert numbers(probe, "votes", EMULATED_GPU_WARP="32") == [1] * 32 + [0] * 32


def test_shared_memory_holds_what_was_never_written(probe):
    assert numbers(probe, "shared_memory_is_not_zero") == [-1, -1]


def test_a_launch_that_no_gpu_takes(probe):
    done = run(probe, "too_many_threads")
    assert done.returncode != 0 and "a launch that no GPU takes" in done.stderr


def test_what_is_changed_of_the_sources():
    """Launches and arrays of dynamic shared memory, wherever there are some."""
    launches = arrays = 0
    for path in sorted((TESTS.parent / "kernel_src").rglob("*.[ch]*")):
        before = path.read_bytes()
        after = for_emulated_gpu(before)
        assert b"<<<" not in after and b"extern __shared__" not in after, path
        launches += after.count(b"emulated_gpu::launch")
        arrays += after.count(b"emulated_gpu::dynamic_shared")
    assert launches == 1 and arrays > 5
