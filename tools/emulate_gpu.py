#!/usr/bin/env python3
"""Runs the GPU kernels without a GPU: their sources as ROCm has them, on tests/emulated_gpu.

Builds a variant for the CPU whose operators are those kernels, into build/.emulated_gpu. Runs the
families' quick tests with it on wavefronts of 64 lanes (of sampling those marked kernels_ci), and
those marked kernels_ci again on warps of 32, whose threads and blocks run in the opposite order.
What depends on the order, as where a barrier is missing, has other results in one of them.

    python tools/emulate_gpu.py
    python tools/emulate_gpu.py --all            # all of them in both orders
    python tools/emulate_gpu.py -- -x tests/norm -k rms_norm

Not seen here: kernels that only NVIDIA GPUs have (of clusters, bulk copies and tensor cores), the
instructions of a GPU, and threads that run at the same time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from steps import REPO_DIR, build_cpu_variant, run

OUTPUT = REPO_DIR / "build/.emulated_gpu"
FAMILIES = ("gate", "loss", "norm", "quant", "rope", "route", "sample")
MANY_DRAWS = (
    "sample",
)  # whose quick tests take a quarter of an hour here: those marked kernels_ci

FORWARDS = {"EMULATED_GPU_WARP": "64"}
BACKWARDS = {"EMULATED_GPU_WARP": "32", "EMULATED_GPU_BACKWARDS": "1"}

# Tests of what a CPU promises, and a GPU with 64 KB of shared memory does not.
LEFT_OUT = {
    # Short rows of fused_mul_poly_norm are laid out otherwise on a GPU.
    "norm/test_grouped_poly_norm.py::test_each_expert_is_a_fused_mul_poly_norm": "cpu-96-float32",
    # A GPU looks for unused rows only where a sum may be used.
    "norm/test_shard_norm.py::test_a_row_that_overflowed_and_is_not_used": None,
    # Is compared with the tanh of PyTorch on a CPU, which errs by half as much as a GPU's.
    "gate/test_activations.py::test_tanh_is_as_accurate_as_pytorch": None,
}


def chosen(families: tuple[str, ...] = FAMILIES) -> list[str]:
    """The families' tests, but for those."""
    left_out = (f"tests/{t}" + (f"[{p}]" if p else "") for t, p in LEFT_OUT.items())
    options = [word for test in left_out for word in ("--deselect", test)]
    return [*options, *(f"tests/{family}" for family in families)]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="all quick tests in both orders")
    parser.add_argument("pytest", nargs="*", help="options and tests, after --")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    variant = build_cpu_variant(OUTPUT, "--emulate-gpu")
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    pytest += ["--numprocesses=auto", "--dist=worksteal"]
    environment = {"FUSELAGE_KERNEL_DIR": str(variant), "OMP_NUM_THREADS": "1"}
    forwards, backwards = {**environment, **FORWARDS}, {**environment, **BACKWARDS}
    quick, fewer = (
        [*pytest, "-m", "not slow and not long"],
        [*pytest, "-m", "kernels_ci and not slow"],
    )
    if options.pytest or options.all:
        run("forwards", [*quick, *(options.pytest or chosen())], forwards)
        run("backwards", [*quick, *(options.pytest or chosen())], backwards)
        return
    families = tuple(family for family in FAMILIES if family not in MANY_DRAWS)
    run("forwards", [*quick, *chosen(families)], forwards)
    run("forwards, many draws", [*fewer, *chosen(MANY_DRAWS)], forwards)
    run("backwards", [*fewer, *chosen()], backwards)


if __name__ == "__main__":
    main()
