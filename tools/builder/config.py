"""Reads build.toml: the only list of sources and flags."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

BACKENDS = ("cpu", "cuda", "rocm")
SOURCE_SUFFIXES = (".cpp", ".cu")


@dataclass(frozen=True)
class Section:
    """One table of build.toml that lists files: `[torch]` or a `[kernel.*]`."""

    name: str
    backend: str | None  # None: [torch], which every backend compiles
    src: tuple[str, ...]
    include: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    gpu_flags: tuple[str, ...]
    archs: tuple[str, ...]

    @property
    def sources(self) -> list[str]:
        """The listed files that are compiled; the others are headers."""
        return [path for path in self.src if path.endswith(SOURCE_SUFFIXES)]


@dataclass(frozen=True)
class BuildConfig:
    """What the builder needs of build.toml."""

    root: Path
    name: str
    version: int
    license: str
    links: dict[str, str]  # `upstream` and `source`, where given
    python_depends: dict[str, list[str]]
    stable_abi: dict[str, str]
    data_suffixes: tuple[str, ...]
    sections: tuple[Section, ...]

    @property
    def python_name(self) -> str:
        """The name of the package folder below torch-ext."""
        return self.name.replace("-", "_")

    @property
    def package_dir(self) -> Path:
        """The Python package that `get_kernel` returns."""
        return self.root / "torch-ext" / self.python_name

    def for_backend(self, backend: str) -> list[Section]:
        """The sections that a variant of `backend` is made of."""
        return [section for section in self.sections if section.backend in (None, backend)]

    def abi_version(self, backend: str) -> tuple[int, int]:
        """The stable ABI version of `backend` as (major, minor)."""
        if backend not in self.stable_abi:
            raise BuildError(f"build.toml: [torch.stable-abi] has no version for {backend}")
        major, minor = self.stable_abi[backend].split(".")[:2]
        return int(major), int(minor)


def validate(root: Path) -> None:
    """Lets the parser of `kernels` judge build.toml, so that the Hub's builder will accept it."""
    try:
        from kernels._rust import Build
    except ImportError as error:
        raise BuildError(f"kernels is not installed ({error}): pip install kernels") from None
    try:
        Build.open(root)
    except ValueError as error:
        raise BuildError(f"build.toml is not valid: {error}") from None


def load(root: Path) -> BuildConfig:
    """Reads and validates `root`/build.toml."""
    if not (root / "build.toml").is_file():
        raise BuildError(f"no build.toml in {root}")
    validate(root)
    table = _read_toml(root / "build.toml")
    general, torch = table["general"], table.get("torch")
    if torch is None:
        raise BuildError("build.toml: the local builder needs a [torch] section")
    if "kernel-depends" in general:
        raise BuildError("build.toml: the local builder does not support kernel-depends")
    stable_abi = torch.get("stable-abi", {})
    if isinstance(stable_abi, str):
        stable_abi = dict.fromkeys(BACKENDS, stable_abi)
    kernels = table.get("kernel", {}).items()
    return BuildConfig(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        links={key: general[key] for key in ("upstream", "source") if key in general},
        python_depends=_python_depends(general),
        stable_abi=stable_abi,
        data_suffixes=tuple({".py", *(f".{extension}" for extension in torch.get("pyext", []))}),
        sections=(
            _section("torch", torch),
            *(_section(f"kernel.{name}", kernel) for name, kernel in kernels),
        ),
    )


def _read_toml(path: Path) -> dict:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # a requirement of `kernels`, so it is there
    with open(path, "rb") as file:
        return tomllib.load(file)


def _python_depends(general: dict) -> dict[str, list[str]]:
    common = general.get("python-depends", [])
    return {
        backend: [*common, *general.get(backend, {}).get("python-depends", [])]
        for backend in BACKENDS
    }


def _section(name: str, table: dict) -> Section:
    backend = table.get("backend")
    gpu = {"cuda": ("cuda-flags", "cuda-capabilities"), "rocm": ("hip-flags", "rocm-archs")}
    flags_key, archs_key = gpu.get(backend, (None, None))
    return Section(
        name=name,
        backend=backend,
        src=tuple(table["src"]),
        include=tuple(table.get("include", [])),
        cxx_flags=tuple(table.get("cxx-flags", [])),
        gpu_flags=tuple(table.get(flags_key, [])),
        archs=tuple(table.get(archs_key, [])),
    )
