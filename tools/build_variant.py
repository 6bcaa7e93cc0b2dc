#!/usr/bin/env python3
"""Builds the kernel for this machine into build/<variant>, in the layout of the Hub.

For developers; releases come from Nix (`nix run .#build-and-copy`). Everything that is compiled,
and how, stands in build.toml. A second run compiles only what changed, by content.

    python tools/build_variant.py                      # what this machine can run
    python tools/build_variant.py --backend cuda --archs 9.0,8.0
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builder import compile as compiling
from builder import package, toolchain
from builder.archs import without_ptx
from builder.compile import Toolchain, Unit
from builder.config import BACKENDS, BuildConfig, load
from builder.costs import read_costs
from builder.errors import BuildError
from builder.identity import identify
from builder.sources import check_sources

REPO_DIR = Path(__file__).resolve().parent.parent


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto")
    parser.add_argument(
        "--archs",
        help="a comma-separated part of build.toml's GPU architectures, `all`, or `native` (this "
        "machine's GPU). Default: all; with --backend auto on a GPU machine, native",
    )
    parser.add_argument(
        "--ptx",
        action="store_true",
        help="GPU code as a release has it: PTX where build.toml says so, and machine code of the "
        "PTX of each architecture",
    )
    parser.add_argument("--source", type=Path, default=REPO_DIR, help="the folder of build.toml")
    parser.add_argument("--output", type=Path, help="where <variant> goes (default: build)")
    parser.add_argument("--work", type=Path, help="where objects are kept (default: OUTPUT/.work)")
    parser.add_argument("--unique-id", help="replaces the source hash in the op namespace")
    parser.add_argument(
        "--sanitize", action="store_true", help="C++ under AddressSanitizer and UBSan (--output)"
    )
    parser.add_argument(
        "--emulate-gpu",
        action="store_true",
        help="a variant for the CPU whose operators run the kernels of GPUs, as ROCm has them, on "
        "tests/emulated_gpu (--output)",
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--check", action="store_true", help="only check build.toml and sources")
    return parser.parse_args(arguments)


def choose_backend(torch: toolchain.Torch) -> tuple[str, str]:
    """The backend that this machine can build and run, and why."""
    if torch.cuda is None and torch.hip is None:
        return "cpu", "this Torch has no GPU support"
    if torch.cuda is not None and toolchain.find_nvcc() is None:
        return "cpu", "there is no nvcc"  # asked first: importing Torch takes seconds
    if toolchain.gpu_capability() is None:
        return "cpu", "Torch sees no GPU"
    if torch.hip is not None:
        return "rocm", "Torch sees a ROCm GPU"
    return "cuda", "Torch sees a GPU and nvcc is there"


def choose_archs(
    option: str | None, backend: str, automatic: bool, config: BuildConfig
) -> list | None:
    """The GPU architectures to compile for; None for all of build.toml's."""
    if backend == "cpu" or option == "all" or (option is None and not automatic):
        return None
    if option not in (None, "native"):
        return [arch.strip() for arch in option.split(",") if arch.strip()]
    if backend == "rocm":
        return None
    capability = toolchain.gpu_capability()
    if capability is None:
        raise BuildError("--archs native: Torch sees no GPU")
    return [_best_match(capability, config)]


def _best_match(capability: str, config: BuildConfig) -> str:
    """The newest listed capability whose machine code runs on `capability`."""
    listed = {
        arch.removesuffix("+PTX")
        for section in config.for_backend("cuda")
        for arch in section.archs
        # What is for one GPU alone comes with that GPU's number.
        if arch.removesuffix("+PTX")[-1].isdigit()
    }
    major, minor = map(int, capability.split("."))
    runs = [
        arch
        for arch in listed
        if int(arch.split(".")[0]) == major and int(arch.split(".")[1]) <= minor
    ]
    if not runs:
        raise BuildError(
            f"this GPU has compute capability {capability}; build.toml lists "
            f"{', '.join(sorted(listed, key=lambda arch: [*map(int, arch.split('.'))]))}"
        )
    return max(runs, key=lambda arch: int(arch.split(".")[1]))


def find_tools(
    backend: str, torch: toolchain.Torch, options: argparse.Namespace
) -> tuple[Toolchain, str]:
    """The toolchain for `backend`, and the tag of the variant's name."""
    tools = Toolchain(
        cxx=toolchain.find_cxx(),
        torch=torch,
        python_include=toolchain.find_python_headers(),
        cuda=toolchain.find_cuda() if backend == "cuda" else None,
        hip=toolchain.find_hip() if backend == "rocm" else None,
        sanitize=options.sanitize,
        emulate_gpu=options.emulate_gpu,
    )
    if backend == "cuda":
        return tools, "cu{}{}".format(*tools.cuda.version)
    if backend == "rocm":
        if torch.hip is None:
            raise BuildError("--backend rocm needs a ROCm build of Torch (see `make check-hip`)")
        return tools, "rocm" + "".join(torch.hip.split(".")[:2])
    return tools, "cpu"


@contextmanager
def locked(work: Path):
    """Keeps a second build of the same variant waiting. Gives the lock's file descriptor."""
    work.mkdir(parents=True, exist_ok=True)
    with open(work / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def run_ninja(work: Path, units: list[Unit], jobs: int, lock: int) -> bool:
    """Compiles what changed, with ninja's progress lines; tells whether anything had.

    NOTE: ninja inherits the lock. Where this process is killed it goes on, and an object that it
    leaves would be newer than the sources of the next build, and so never made anew.
    """
    environment = {
        **os.environ,
        "NINJA_STATUS": "[%f/%t] ",
        "NVCC_APPEND_FLAGS": f"--threads={compiling.nvcc_threads(units, jobs)}",
    }
    command = [toolchain.find_ninja(), "-f", "../build.ninja", "-j", str(jobs)]
    source = work / "src"
    plan = subprocess.run(
        [*command, "-n"], cwd=source, env=environment, capture_output=True, text=True
    )
    if plan.returncode == 0 and "no work to do" in plan.stdout:
        return False
    compiled = subprocess.run(command, cwd=source, env=environment, pass_fds=[lock])
    if compiled.returncode != 0:
        raise BuildError("compilation failed; the compiler's messages are above")
    return True


def build(options: argparse.Namespace) -> Path:
    """Builds one variant and returns its folder."""
    started = time.monotonic()
    config = load(options.source.resolve())
    check_sources(config)
    output = (options.output or config.root / "build").resolve()
    if options.check:
        print("build.toml is valid and lists every source")
        return output
    for option in ("sanitize", "emulate_gpu"):
        if getattr(options, option) and options.output is None:
            name = option.replace("_", "-")
            raise BuildError(f"--{name} needs an --output of its own: what it makes is no release")
    if options.emulate_gpu and options.backend != "cpu":
        raise BuildError("--emulate-gpu makes a variant for the CPU: pass --backend cpu")
    if not options.ptx:
        config = without_ptx(config)
    torch = toolchain.find_torch(min(map(config.abi_version, config.stable_abi)))
    automatic = options.backend == "auto"
    backend, reason = choose_backend(torch) if automatic else (options.backend, "as asked")
    wanted = choose_archs(options.archs, backend, automatic, config)
    tools, tag = find_tools(backend, torch, options)
    identity = identify(config, options.unique_id)
    ops_name = identity.ops_name(config, backend)
    name = package.variant_name(config, tag, platform.machine())
    work = (options.work or output / ".work").resolve() / name
    print(f"{name}: {ops_name} ({reason}; torch {torch.version})", flush=True)

    with locked(work) as lock:
        listed = "rocm" if options.emulate_gpu else backend
        units = compiling.plan(config, listed, tools, wanted, ops_name, shared_ptx=not options.ptx)
        library = f"{ops_name}.abi3.so"
        ninja = compiling.ninja_file(units, tools, backend, library, options.jobs)
        compiling.sync_sources(config, listed, tools, work)
        compiling.write_if_changed(work / "build.ninja", ninja.encode())
        compiled = run_ninja(work, units, options.jobs, lock)
        archs = {
            arch
            for section in config.for_backend(backend)
            for arch in compiling.select_archs(section, wanted, tools.cuda and tools.cuda.version)
        }
        variant = output / name
        changed = package.assemble(
            config, backend, sorted(archs), identity, work / "lib" / library, variant
        )
        if backend == "cuda" and compiled:
            print(read_costs(work, variant / library).table())
    state = "built" if compiled else "packaged, nothing compiled" if changed else "up to date"
    if not (compiled or changed):
        state += ", nothing compiled"
    print(f"{state} in {time.monotonic() - started:.1f} s: {_shown(variant)}", flush=True)
    return variant


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def main() -> int:
    """Builds; an expected failure is one message, not a traceback."""
    try:
        build(parse_arguments())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
