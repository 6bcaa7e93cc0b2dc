"""Lays out a variant folder as the Hub expects it."""

from __future__ import annotations

import json
from pathlib import Path

from .compile import write_if_changed
from .config import BuildConfig
from .errors import BuildError
from .identity import Identity

OPS_PY = '''\
"""The operators of this build, and the prefix that names one of them."""

import torch

from . import {ops_name}

ops = torch.ops.{ops_name}


def add_op_namespace_prefix(op_name: str) -> str:
    """`op_name` with the namespace of this build, such as `{ops_name}::rms_norm`."""
    return f"{ops_name}::{{op_name}}"
'''

BUILDER_VERSION = "fuselage-build-variant-1"


def variant_name(config: BuildConfig, backend_tag: str, machine: str) -> str:
    """Such as `torch-stable-abi210-cu130-x86_64-linux`; `backend_tag` is cpu, cu130 or rocm71."""
    major, minor = config.abi_version(backend_of_tag(backend_tag))
    return f"torch-stable-abi{major}{minor}-{backend_tag}-{machine}-linux"


def backend_of_tag(tag: str) -> str:
    """The backend whose variants carry `tag`."""
    return {"cp": "cpu", "cu": "cuda", "ro": "rocm"}[tag[:2]]


def assemble(
    config: BuildConfig,
    backend: str,
    archs: list[str],
    identity: Identity,
    library: Path,
    variant: Path,
) -> bool:
    """Makes `variant` hold this build and nothing else; tells whether anything changed."""
    ops_name = identity.ops_name(config, backend)
    files = _package_files(config)
    files["_ops.py"] = OPS_PY.format(ops_name=ops_name).encode()
    files[library.name] = library.read_bytes()
    changed = _remove_others(variant, {*files, "metadata.json"})
    for path, content in files.items():
        changed |= write_if_changed(variant / path, content)
    document = metadata(config, backend, archs, identity, variant)
    return changed | write_if_changed(variant / "metadata.json", document.encode())


def metadata(
    config: BuildConfig, backend: str, archs: list[str], identity: Identity, variant: Path
) -> str:
    """The text of metadata.json, with the digest of the files that `variant` holds."""
    from kernels._rust import Digest, DigestAlgorithm

    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    provenance: dict = {"kernel-builder": {"version": BUILDER_VERSION}}
    if identity.commit is not None:
        provenance["kernel"] = {"commit": identity.commit, "dirty": identity.dirty}
    backend_info: dict = {"type": backend}
    if archs:
        backend_info["archs"] = sorted(archs)
    document = {
        "name": config.name,
        "id": identity.ops_name(config, backend),
        "version": config.version,
        "license": config.license,
        **config.links,
        "python-depends": config.python_depends[backend],
        "kernel-depends": [],
        "backend": backend_info,
        "digest": {"algorithm": "sha256", "files": digest.files},
        "provenance": provenance,
    }
    return json.dumps(document, indent=2) + "\n"


def _package_files(config: BuildConfig) -> dict[str, bytes]:
    folder = config.package_dir
    if not (folder / "__init__.py").is_file():
        raise BuildError(f"no Python package: {folder / '__init__.py'} is missing")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in config.data_suffixes and path.name != "_ops.py"
    }


def _remove_others(variant: Path, wanted: set[str]) -> bool:
    """Deletes what an earlier build left, such as the library of an earlier id."""
    removed = False
    for path in sorted(variant.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif _source(path).relative_to(variant).as_posix() not in wanted:
            path.unlink()
            removed |= path.suffix != ".pyc"
    return removed


def _source(path: Path) -> Path:
    """The Python file that `path` is the bytecode of; any other path is its own source."""
    if path.suffix != ".pyc":
        return path
    return path.parent.parent / f"{path.name.partition('.')[0]}.py"
