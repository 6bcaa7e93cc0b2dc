"""Checks that build.toml lists every source: the Nix build sees nothing else."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

from .config import BACKENDS, BuildConfig, Section
from .errors import BuildError
from .includes import included_headers

CODE_SUFFIXES = (".h", ".hpp", ".cuh", ".cpp", ".cc", ".cu", ".hip")
GENERATED = ("torch-ext/registration.h",)


def check_sources(config: BuildConfig, backends: tuple[str, ...] = BACKENDS) -> None:
    """Raises `BuildError` naming each file that build.toml and the tree disagree on."""
    problems = [*_missing(config), *_unlisted(config)]
    for backend in backends:
        problems += _compiled_twice(config, backend)
        problems += _unlisted_includes(config, backend)
    if problems:
        raise BuildError("build.toml and the sources disagree:\n  " + "\n  ".join(problems))


def source_files(root: Path) -> list[str]:
    """Every C++ and GPU source or header below kernel_src and torch-ext, relative to `root`."""
    found = [
        path.relative_to(root).as_posix()
        for folder in ("kernel_src", "torch-ext")
        for path in (root / folder).rglob("*")
        if path.suffix in CODE_SUFFIXES
    ]
    return sorted(path for path in found if path not in GENERATED)


def resolve_include(header: str, includer: str, section: Section, files: set[str]) -> str | None:
    """The file of `files` that `includer` means by `header`, as the compiler looks it up."""
    for folder in (posixpath.dirname(includer), *section.include):
        candidate = posixpath.normpath(posixpath.join(folder, header))
        if candidate in files:
            return candidate
    return None


def _missing(config: BuildConfig) -> Iterator[str]:
    for section in config.sections:
        for path in section.src:
            if not (config.root / path).is_file():
                yield f"{path}: listed in [{section.name}], but there is no such file"


def _unlisted(config: BuildConfig) -> Iterator[str]:
    listed = {path for section in config.sections for path in section.src}
    for path in source_files(config.root):
        if path not in listed:
            where = "[torch]" if path.startswith("torch-ext/") else "a [kernel.*] section"
            yield f"{path}: not listed; add it to `src` of {where}"


def _compiled_twice(config: BuildConfig, backend: str) -> Iterator[str]:
    seen: dict[str, str] = {}
    for section in config.for_backend(backend):
        for path in section.sources:
            if path in seen:
                yield f"{path}: compiled by both [{seen[path]}] and [{section.name}] for {backend}"
            seen[path] = section.name


def _unlisted_includes(config: BuildConfig, backend: str) -> Iterator[str]:
    sections = config.for_backend(backend)
    listed = {path for section in sections for path in section.src}
    present = set(source_files(config.root))
    for section in sections:
        for path in section.src:
            if path not in present:
                continue
            text = (config.root / path).read_text(encoding="utf-8")
            for header in included_headers(text, backend):
                target = resolve_include(header, path, section, present)
                if target is not None and target not in listed:
                    yield (
                        f"{path}: includes {target}, which no section for {backend} lists; "
                        f"add it to `src` of [{_section_to_extend(section, sections)}]"
                    )


def _section_to_extend(section: Section, sections: list[Section]) -> str:
    """[torch] reaches every backend, so a header missing for one belongs to that one's section."""
    if section.backend is not None:
        return section.name
    return next((other.name for other in sections if other.backend), section.name)
