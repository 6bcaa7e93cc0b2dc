#!/usr/bin/env python3
"""Builds a variant as kernel-builder does: with its CLI, its CMake project and its checks.

create-pyproject, cmake, ninja, hash, check-builds, check-abi, then `make check-compliance`, in a
copy of what its sandbox has. Compilers and Torch are this machine's: with a glibc newer than 2.28
check-abi may object to a symbol. Releases come from Nix (`nix run .#build-and-copy`).

    python tools/official_build.py [--output build/official]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import check_compliance
from builder.config import BuildConfig, load
from builder.errors import BuildError
from builder.identity import Identity, identify
from builder.toolchain import find_ninja
from ci_test import copy_source_set

REPO_DIR = Path(__file__).resolve().parent.parent


def how_to_get_it() -> str:
    """What to do where kernel-builder is not installed, for the pinned revision."""
    nodes = json.loads((REPO_DIR / "flake.lock").read_text(encoding="utf-8"))["nodes"]
    locked = nodes["kernel-builder"]["locked"]
    flake = f"github:{locked['owner']}/{locked['repo']}/{locked['rev']}#kernel-builder"
    return (
        "kernel-builder not found. Install Nix, then\n"
        f"  nix profile add --accept-flake-config {flake}\n"
        "or build a release at once: nix run .#build-and-copy"
    )


def find(tool: str, message: str) -> str:
    path = shutil.which(tool)
    if path is None:
        raise BuildError(message)
    return path


def create_command(kernel_builder: str, source: Path, identity: Identity) -> list[str]:
    """The call that writes the CMake project, with what a copy without .git cannot know."""
    command = [kernel_builder, "create-pyproject", "--force", "--unique-id", identity.unique_id]
    if identity.commit is not None:
        command += ["--kernel-sha", identity.commit, *["--kernel-dirty"] * identity.dirty]
    return [*command, str(source)]


def build(config: BuildConfig, output: Path) -> list[Path]:
    """Builds into `output`, and returns the folders of the variants."""
    kernel_builder = find("kernel-builder", how_to_get_it())
    cmake = find("cmake", "cmake not found: apt-get install cmake (3.26 or newer)")
    with tempfile.TemporaryDirectory() as folder:
        source, work = Path(folder, "source"), Path(folder, "work")
        source.mkdir()
        copy_source_set(config, source)
        shutil.rmtree(output, ignore_errors=True)
        definitions = {
            "BUILD_ALL_SUPPORTED_ARCHS": "ON",
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_INSTALL_PREFIX": output,
            "CMAKE_MAKE_PROGRAM": find_ninja(),
            "CMAKE_SKIP_RPATH": "ON",
            "Python3_EXECUTABLE": sys.executable,
        }
        configure = [cmake, "-S", source, "-B", work, "-G", "Ninja"]
        run(*create_command(kernel_builder, source, identify(config)))
        run(*configure, *(f"-D{name}={value}" for name, value in definitions.items()))
        run(find_ninja(), "-C", work, "install")
    # As the Nix build does: the library is installed a second time, below its own name.
    for second in output.glob(f"_{config.python_name}_*"):
        shutil.rmtree(second)
    major, minor = config.abi_version("cpu")
    run(kernel_builder, "hash", output)
    run(kernel_builder, "check-builds", output)
    run(kernel_builder, "check-abi", f"--torch-stable-abi={major}.{minor}", output)
    return sorted(path.parent for path in output.glob("*/metadata.json"))


def run(*command: object) -> None:
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    if subprocess.run(words).returncode != 0:
        raise BuildError(f"{Path(words[0]).name} {words[1]} failed; its messages are above")


def main() -> int:
    """Builds and checks; an expected failure is one message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=REPO_DIR / "build/official")
    options = parser.parse_args()
    try:
        variants = build(load(REPO_DIR), options.output.resolve())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return check_compliance.main([str(variant) for variant in variants])


if __name__ == "__main__":
    sys.exit(main())
