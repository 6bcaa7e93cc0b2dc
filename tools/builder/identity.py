"""Names a source state, so that two versions of the kernel can live in one process."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass

from .config import BuildConfig

SHORT = 7


@dataclass(frozen=True)
class Identity:
    """The unique part of the op namespace, and the commit it came from where there is one."""

    unique_id: str
    commit: str | None
    dirty: bool

    def ops_name(self, config: BuildConfig, backend: str) -> str:
        """The module and op namespace, such as `_fuselage_cpu_1a2b3c4`."""
        return f"_{config.python_name}_{backend}_{self.unique_id}"


def identify(config: BuildConfig, override: str | None = None) -> Identity:
    """The hash of the commit's tree, as kernel-builder names it; without a commit, of the files."""
    tree, commit = _git(config, "rev-parse", "HEAD^{tree}"), _git(config, "rev-parse", "HEAD")
    if tree is None or commit is None:
        return Identity(override or content_hash(config)[:SHORT], None, False)
    status = _git(config, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules")
    dirty = bool(status)
    return Identity(override or tree[:SHORT] + ("_dirty" if dirty else ""), commit, dirty)


def content_hash(config: BuildConfig) -> str:
    """A hash of everything that goes into a variant."""
    listed = {config.root / path for section in config.sections for path in section.src}
    package = {
        path
        for path in config.package_dir.rglob("*")
        if path.suffix in config.data_suffixes and path.name != "_ops.py"
    }
    digest = hashlib.sha256()
    for path in sorted({config.root / "build.toml", *listed, *package}):
        digest.update(path.relative_to(config.root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _git(config: BuildConfig, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(config.root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
