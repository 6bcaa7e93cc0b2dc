#!/usr/bin/env python3
"""Runs the tests marked `kernels_ci` as kernel-builder's `ci-test` does (`nix run .#ci-test`).

The tests lie in a folder with nothing but the sources that build.toml lists, the Python files of
torch-ext and tests, and the pyproject.toml that kernel-builder generates. The kernel is one variant
in another folder, named by `LOCAL_KERNELS`. No package can be imported but those that flake.nix
asks for and that Torch, kernels and pytest need. One process; fails beyond 60 seconds.

    python tools/ci_test.py [--variant build/<variant>] [pytest options]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builder.config import BuildConfig, load
from builder.errors import BuildError

REPO_DIR = Path(__file__).resolve().parent.parent
MOST_SECONDS = 60  # what the Hub's documentation recommends
# In the builder's environment, Torch depends on these, and pip's Torch does not.
NIX_DEPENDS = ("numpy", "pyyaml", "requests")
PYPROJECT = """\
[tool.pytest.ini_options]
markers = [
  "kernels_ci: mark a test as a kernel CI test"
]
"""
# Python imports it at its start, from PYTHONPATH.
SITECUSTOMIZE = """\
import sys
from importlib.machinery import PathFinder


class Installed(PathFinder):
    refused = {refused!r}

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in cls.refused:
            return None
        return PathFinder.find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""


def copy_source_set(config: BuildConfig, target: Path) -> None:
    """Copies what kernel-builder copies into its sandbox, and no other file."""
    files = {path for section in config.sections for path in section.src} | {"build.toml"}
    for folder in ("torch-ext", "tests"):
        for path in (config.root / folder).rglob("*"):
            if path.suffix in config.data_suffixes and path.name != "_ops.py":
                files.add(path.relative_to(config.root).as_posix())
    for name in sorted(files):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config.root / name, target / name)
    (target / "pyproject.toml").write_text(PYPROJECT)


def check_inputs() -> list[str]:
    """The packages that flake.nix adds for tests."""
    text = (REPO_DIR / "flake.nix").read_text()
    found = re.search(r"pythonCheckInputs = \w+: with \w+; \[([^\]]*)\]", text)
    return found.group(1).split() if found else []


def refused_modules() -> set[str]:
    """The top-level modules of installed packages that the builder's environment lacks."""
    there: set[str] = set()
    pending = ["torch", "kernels", "pytest", *NIX_DEPENDS, *check_inputs()]
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in there:
            continue
        there.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = [need for need in needs if "extra ==" not in need]
        pending += [re.match(r"[\w.-]+", need).group() for need in needs]
    return {
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", package).lower() in there for package in packages)
    }


def default_variant() -> Path:
    """The CPU variant; without one, any."""
    variants = sorted(
        (REPO_DIR / "build").glob("torch*"), key=lambda path: "-cpu-" not in path.name
    )
    if not variants:
        raise BuildError("nothing is built: make build")
    return variants[0]


def run_tests(variant: Path, options: list[str], repo_id: str) -> int:
    """Runs pytest in a sandbox of its own, and returns its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        source, extension, site = (Path(folder, name) for name in ("source", "extension", "site"))
        source.mkdir()
        copy_source_set(load(REPO_DIR), source)
        shutil.copytree(variant, extension / variant.name)
        site.mkdir()
        text = SITECUSTOMIZE.format(refused=refused_modules())
        (site / "sitecustomize.py").write_text(text)
        environment = {
            key: value
            for key, value in os.environ.items()
            if key != "LD_LIBRARY_PATH" and not key.startswith(("FUSELAGE_", "PYTEST_"))
        }
        environment["PYTHONPATH"] = f"{extension / variant.name}{os.pathsep}{site}"
        # With nothing compiled yet.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of packages that are refused
        environment["LOCAL_KERNELS"] = f"{repo_id}={extension}"
        command = [sys.executable, "-m", "pytest", str(source / "tests"), "-m", "kernels_ci"]
        command += ["-p", "no:cacheprovider", *options]
        return subprocess.run(command, cwd=folder, env=environment).returncode


def main() -> int:
    """Runs the tests; more than a minute is a failure, too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", type=Path)
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="at most (60)")
    options, rest = parser.parse_known_args()
    try:
        variant = (options.variant or default_variant()).resolve()
        repo_id = re.search(r'^repo-id = "(.*)"$', (REPO_DIR / "build.toml").read_text(), re.M)
        started = time.monotonic()
        status = run_tests(variant, rest, repo_id.group(1))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(f"{seconds:.0f} s of {options.seconds:.0f}: {variant.name}")
    if seconds > options.seconds:
        print("error: the tests marked kernels_ci take too long", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
