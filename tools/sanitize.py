#!/usr/bin/env python3
"""Runs the kernels under sanitizers.

On a CPU: builds the CPU variant under AddressSanitizer and UBSan into build/.sanitize, and runs the
tests' quick part and the fuzzer with it; `--device emulated` does the same with the GPU kernels, on
threads that are fibers (tools/emulate_gpu.py). On a GPU: runs a program that calls every family
(tests/fuzz/families.py) under compute-sanitizer's tools, and prints a table of their errors.

    python tools/sanitize.py [--device emulated]
    python tools/sanitize.py --device cuda [--tools memcheck,racecheck] [--seconds 45] [--seed 1]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import emulate_gpu
from steps import REPO_DIR, build_cpu_variant, run

OUTPUT = REPO_DIR / "build/.sanitize"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

# Kernels that a tool is wrong about.
LEFT_TO_OTHER_TOOLS = {
    # Its warps hand buffers over by one lane's arrival at an mbarrier after __syncwarp, which
    # racecheck takes for a race: so it does in a kernel of ten lines that does nothing else.
    "racecheck": "lm_head_kernel",
    # Reads the strips' maxima four at a time, and drops those past the end.
    "initcheck": "strips_kernel",
}
# NOTE: where racecheck is told to exclude that kernel, the kernel accesses illegal memory. So it
# looks at all kernels, and its reports about this one are not counted.
EXCLUDES = ("initcheck",)

# Of `kernels_ci`, what asks the most of a CPU's time and least of its memory: bits, one by one, and
# Inductor's compiler.
# NOTE: pytest must leave the file descriptors alone, or a report is lost with the process.
QUICK = ("-m", "kernels_ci", "-q", "-x", "-p", "no:cacheprovider", "--capture=sys")
LEFT_OUT = "not same_bits and not do_not_depend and not planted and not every_name and not inductor"


def sanitized_environment() -> dict[str, str]:
    """For a Python that loads a library under AddressSanitizer, whose runtime must come first."""
    libraries = [_library(name) for name in ("libasan.so", "libstdc++.so")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        # Python leaks, and Torch frees with what its own allocator did not make.
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def _library(name: str) -> str:
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_file():
        sys.exit(f"error: {compiler} has no {name}: apt-get install libasan8, or gcc's")
    return path


def on_cpu(options: argparse.Namespace) -> None:
    emulated = options.device == "emulated"
    if emulated:
        output = OUTPUT.with_name(".sanitize_gpu")
        variant = build_cpu_variant(output, "--sanitize", "--emulate-gpu")
    else:
        variant = build_cpu_variant(OUTPUT, "--sanitize")
    environment = sanitized_environment() | {"FUSELAGE_KERNEL_DIR": str(variant)}
    pytest = [sys.executable, "-m", "pytest", *QUICK, "-k", LEFT_OUT]
    run("tests", [*pytest, *(emulate_gpu.chosen() if emulated else ())], environment)
    if emulated:
        return
    fuzz = [sys.executable, "-m", "fuzz", *limits_of(options), "--timeout", "300"]
    run("fuzzer", fuzz, environment | {"PYTHONPATH": "tests"})


def limits_of(options: argparse.Namespace) -> list[str]:
    """As the fuzzer and the calls of all families both take them."""
    return ["--seconds", str(options.seconds), "--seed", str(options.seed)]


@dataclass
class Outcome:
    tool: str
    errors: int
    calls: str
    seconds: float


def on_gpu(options: argparse.Namespace) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).is_file():
        sys.exit("error: no compute-sanitizer: it comes with the CUDA toolkit")
    outcomes = [_under(sanitizer, tool, limits_of(options)) for tool in options.tools.split(",")]
    print(f"{'tool':10} {'errors':>6} {'seconds':>8}  calls")
    for outcome in outcomes:
        errors = "?" if outcome.errors < 0 else outcome.errors
        print(f"{outcome.tool:10} {errors:>6} {outcome.seconds:8.0f}  {outcome.calls}")
    sys.exit(int(any(outcome.errors != 0 for outcome in outcomes)))


def _under(sanitizer: str, tool: str, limits: list[str]) -> Outcome:
    left_out = LEFT_TO_OTHER_TOOLS.get(tool)
    command = [sanitizer, "--tool", tool, "--print-limit", "10000" if left_out else "10"]
    if tool in EXCLUDES:
        command += ["--kernel-name-exclude", f"kernel_substring={left_out}"]
    command.append(sys.executable)
    program = ["-m", "fuzz.families", *limits]
    # Every tensor in memory of its own: between those of one block, nothing would be out of bounds.
    path = os.pathsep.join(filter(None, ("tests", os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = time.monotonic()
    print(f"--- {tool}", flush=True)
    result = subprocess.run(
        [*command, *program], cwd=REPO_DIR, env=environment, text=True, capture_output=True
    )
    output = result.stdout + result.stderr
    errors = errors_in(output, None if tool in EXCLUDES else left_out)
    calls = re.search(r"^calls: (.*)$", output, re.M)
    if errors != 0 or calls is None:
        print(output[-20_000:])
    ended = calls.group(1) if calls else f"it did not end: exit code {result.returncode}"
    seconds = time.monotonic() - started
    return Outcome(tool, errors if calls or errors > 0 else -1, ended, seconds)


def errors_in(output: str, kernel: str | None = None) -> int:
    """What compute-sanitizer's summary counts, less the races of `kernel` with itself; -1 without a
    summary.
    """
    plain = re.search(r"ERROR SUMMARY: (\d+) error", output)
    races = re.search(r"RACECHECK SUMMARY: (\d+) hazards?", output)
    found = races or plain
    return int(found.group(1)) - races_of(output, kernel) if found else -1


def races_of(output: str, kernel: str | None) -> int:
    """The reports of races all of whose accesses are in `kernel`."""
    if kernel is None:
        return 0
    reports = re.findall(r"^=+ Error: (Race reported between .*(?:\n=+     and .*)*)", output, re.M)
    accesses = [
        re.findall(r"access at (?:void )?((?:\w|::|<unnamed>)+)", report) for report in reports
    ]
    return sum(all(name.endswith(f"::{kernel}") for name in names) for names in accesses)


def main() -> None:
    """Runs the checks of a device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "emulated", "cuda"), default="cpu")
    parser.add_argument("--tools", default=",".join(TOOLS), help="of compute-sanitizer, by commas")
    parser.add_argument(
        "--seconds", type=float, help="of the fuzzer (60), or of the calls under each tool (45)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the fuzzer's cases, or of the order of the calls"
    )
    options = parser.parse_args()
    if options.seconds is None:
        options.seconds = 60 if options.device == "cpu" else 45
    on_gpu(options) if options.device == "cuda" else on_cpu(options)


if __name__ == "__main__":
    main()
