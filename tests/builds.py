"""What the tests of the builder and of its checks share."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from conftest import REPO_DIR

BUILD_VARIANT = REPO_DIR / "tools/build_variant.py"


def run(command: list, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `command` with `environment` on top of this process's, and returns its output."""
    values = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd="/",
        env={key: value for key, value in values.items() if value is not None},
    )


def copy_sources(target: Path) -> Path:
    """Makes `target` a copy of what the builder reads."""
    target.mkdir()
    shutil.copy(REPO_DIR / "build.toml", target)
    for name in ("kernel_src", "torch-ext"):
        shutil.copytree(REPO_DIR / name, target / name)
    return target
