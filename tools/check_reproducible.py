#!/usr/bin/env python3
"""Checks that two builds of one commit in two folders are the same, byte for byte.

HEAD is cloned twice, to paths of different length, and the CPU variant is built in each.

    python tools/check_reproducible.py                                # the whole variant, twice
    python tools/check_reproducible.py --only torch-ext/binding/norm.cpp    # some objects: seconds
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builder import compile as compiling
from builder import toolchain
from builder.compile import Toolchain
from builder.config import load
from builder.identity import identify

REPO_DIR = Path(__file__).resolve().parent.parent
FOLDERS = ("a", "another-folder-with-a-longer-name/b")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="SOURCE", help="compile these, link nothing")
    return parser.parse_args(arguments)


def clone(folder: Path) -> Path:
    """HEAD in a folder of its own, with its commit, which the op namespace is named after."""
    run(["git", "clone", "--quiet", str(REPO_DIR), str(folder)])
    return folder


def run(command: list[str], **options) -> None:
    if subprocess.run(command, **options).returncode != 0:
        raise SystemExit(f"error: this failed, its messages are above: {' '.join(command)}")


def compile_some(source: Path, only: list[str]) -> Path:
    """The folder of the objects of some sources, with the flags that the whole build gives them."""
    config = load(source)
    torch = toolchain.find_torch(config.abi_version("cpu"))
    tools = Toolchain(toolchain.find_cxx(), torch, toolchain.find_python_headers())
    units = compiling.plan(config, "cpu", tools, None, identify(config).ops_name(config, "cpu"))
    if unknown := set(only) - {unit.source for unit in units}:
        raise SystemExit(f"error: not in build.toml: {', '.join(sorted(unknown))}")
    work = source / "build/.work/some"
    compiling.sync_sources(config, "cpu", tools, work)
    ninja = compiling.ninja_file(units, tools, "cpu", "some.so", jobs=2)
    compiling.write_if_changed(work / "build.ninja", ninja.encode())
    objects = [unit.object for unit in units if unit.source in only]
    run([toolchain.find_ninja(), "-f", "../build.ninja", *objects], cwd=work / "src")
    return work / "obj"


def build_all(source: Path) -> Path:
    """The folder of the variant."""
    tool = str(source / "tools/build_variant.py")
    run([sys.executable, tool, "--backend", "cpu"], cwd=source)
    (variant,) = (source / "build").glob(f"torch-*-cpu-{platform.machine()}-linux")
    return variant


def digests(folder: Path) -> dict[str, str]:
    """The hash of each file, but for what the build keeps for itself."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".d", ".pyc")
    }


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """The files that are not the same, or not in both."""
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def main(arguments: list[str] | None = None) -> int:
    """Builds twice, and names what differs."""
    options = parse_arguments(arguments)
    if subprocess.run(["git", "-C", str(REPO_DIR), "diff", "--quiet", "HEAD"]).returncode != 0:
        print("note: HEAD is built; what is not committed is left out")
    with tempfile.TemporaryDirectory() as temporary:
        # Both before the first build: HEAD may move in the minutes that it takes.
        sources = [clone(Path(temporary) / name) for name in FOLDERS]
        found = [
            digests(compile_some(source, options.only) if options.only else build_all(source))
            for source in sources
        ]
    different = differences(*found)
    for name in different:
        print(f"error: {name} differs between two folders", file=sys.stderr)
    if not found[0]:
        raise SystemExit("error: nothing was built")
    if not different:
        what = "objects" if options.only else "files of the CPU variant"
        print(f"{len(found[0])} {what} are the same in two folders")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
