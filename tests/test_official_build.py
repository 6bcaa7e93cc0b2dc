"""`make official-build`: which commands it runs, with stand-ins for kernel-builder and CMake."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import official_build
import pytest
from builder.identity import Identity
from builds import run
from conftest import REPO_DIR

SCRIPT = REPO_DIR / "tools/official_build.py"
# Says what it is called with; `ninja install` copies the variant that is loaded.
STAND_IN = """\
#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  kernel-builder*$FAILS*) [ -z "$FAILS" ] || exit 3 ;;
  cmake*) for word; do case "$word" in
      -DCMAKE_INSTALL_PREFIX=*) echo "${word#*=}" > "$CALLS.prefix" ;;
    esac; done ;;
  ninja*) prefix=$(cat "$CALLS.prefix")
    mkdir -p "$prefix/_fuselage_cpu_0123456"
    cp -r "$VARIANT" "$prefix/" ;;
esac
"""


@pytest.fixture
def environment(fuselage, tmp_path: Path, monkeypatch) -> dict[str, str]:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("kernel-builder", "cmake"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    # ninja is found beside Python.
    (tools / "ninja").write_text(STAND_IN)
    (tools / "ninja").chmod(0o755)
    variant = Path(fuselage.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(variant, tmp_path / "from" / variant.name, ignore=ignore)
    return {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "VARIANT": str(tmp_path / "from" / variant.name),
        "FAILS": "",
    }


def build(tmp_path: Path, environment: dict[str, str]):
    code = (
        "import sys, official_build; official_build.find_ninja = lambda: 'ninja';"
        "sys.exit(official_build.main())"
    )
    command = [sys.executable, "-c", code, "--output", tmp_path / "out"]
    return run(command, **environment, PYTHONPATH=str(SCRIPT.parent))


@pytest.mark.long
def test_the_steps_are_those_of_the_hubs_builder(tmp_path: Path, environment):
    result = build(tmp_path, environment)
    assert result.returncode == 0, result.stdout + result.stderr
    calls = Path(environment["CALLS"]).read_text().splitlines()
    assert [" ".join(call.split()[:2]) for call in calls] == [
        "kernel-builder create-pyproject",
        "cmake -S",
        "ninja -C",
        "kernel-builder hash",
        "kernel-builder check-builds",
        "kernel-builder check-abi",
    ]
    assert "-DBUILD_ALL_SUPPORTED_ARCHS=ON" in calls[1] and "--torch-stable-abi=2.10" in calls[5]
    name = Path(environment["VARIANT"]).name
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert f"ok  {name}" in result.stdout  # check_compliance


@pytest.mark.long
@pytest.mark.parametrize("step", ["create-pyproject", "check-builds", "check-abi"])
def test_a_step_that_fails_ends_it(tmp_path: Path, environment, step: str):
    result = build(tmp_path, environment | {"FAILS": step})
    assert result.returncode == 1
    assert f"error: kernel-builder {step} failed" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_kernel_builder_it_says_how_to_get_it(tmp_path: Path):
    result = run([sys.executable, SCRIPT, "--output", tmp_path / "out"], PATH="/nonexistent")
    assert result.returncode == 1
    assert "kernel-builder not found. Install Nix" in result.stderr
    revision = official_build.how_to_get_it().partition("kernels/")[2].partition("#")[0]
    assert revision in (REPO_DIR / "flake.lock").read_text() and len(revision) == 40


@pytest.mark.parametrize(
    ("identity", "provenance"),
    [
        (Identity("0123456", "f" * 40, False), ["--kernel-sha", "f" * 40]),
        (Identity("0123456_dirty", "f" * 40, True), ["--kernel-sha", "f" * 40, "--kernel-dirty"]),
        (Identity("0123456", None, False), []),
    ],
)
def test_the_project_is_told_its_commit(tmp_path: Path, identity: Identity, provenance: list[str]):
    command = official_build.create_command("kernel-builder", tmp_path, identity)
    head = ["kernel-builder", "create-pyproject", "--force", "--unique-id", identity.unique_id]
    assert command == [*head, *provenance, str(tmp_path)]
