#!/usr/bin/env python3
"""Checks built variants against what the Hub requires of a kernel (its "kernel requirements").

Layout, metadata.json, the namespace of the operators, ABIs (tools/check_abi.py), linked libraries,
GPU architectures, digest, provenance, imports, tuning, and that the public API is no smaller than
the one in tools/public_api.txt. Checks every variant below build/, or the variant folders named.
`--release` also refuses what only a local build may be: of uncommitted sources, or for fewer GPUs.

    python tools/check_compliance.py [--release] [folder ...]
    python tools/check_compliance.py --record-api    # writes tools/public_api.txt
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from builder.archs import (
    by_number,
    disagreements,
    find_cuobjdump,
    machine_code,
    release_archs,
)
from builder.config import load
from builder.errors import BuildError
from check_abi import violations
from check_tuning import problems

REPO_DIR = Path(__file__).resolve().parent.parent
# What the package may import beside Python's own modules and itself; and what one function may,
# which says so where it is missing.
ALLOWED_IMPORTS = {*sys.stdlib_module_names, "torch"}
LAZY_IMPORTS = {("integrations/transformers.py", "_kernels", "kernels")}
# What metadata.json may hold, and what it must.
REQUIRED_KEYS = {"id", "name", "version", "license", "backend", "digest"}
KNOWN_KEYS = REQUIRED_KEYS | {
    *("python-depends", "kernel-depends", "kernels-minver", "provenance", "source", "upstream")
}
# Torch, what Torch depends on, and what every system with glibc 2.28 has.
ALLOWED_LIBRARIES = re.compile(
    r"libtorch(_cpu|_cuda|_hip)?\.so|libc10(_cuda|_hip)?\.so|libcudart\.so\.\d+|"
    r"libamdhip64\.so\.\d+|libstdc\+\+\.so\.6|libgcc_s\.so\.1|ld-linux-[\w-]+\.so\.[12]|"
    r"lib(c|m|dl|rt)\.so\.6|lib(dl|rt)\.so\.[12]|libpthread\.so\.0"
)
# Decorators of torch.library whose first argument names an operator.
REGISTRATIONS = {
    *("custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap"),
    "register_torch_dispatch",
}
PUBLIC_API = REPO_DIR / "tools/public_api.txt"


class Skipped(Exception):
    """A check that this machine cannot make; its text says what is missing."""


@dataclass(frozen=True)
class Variant:
    """A folder below build/, as the Hub has it."""

    folder: Path

    @cached_property
    def metadata(self) -> dict:
        return json.loads((self.folder / "metadata.json").read_bytes())

    @property
    def backend(self) -> str:
        return self.metadata["backend"]["type"]

    @cached_property
    def library(self) -> Path:
        libraries = sorted(self.folder.glob("*.so"))
        if len(libraries) != 1:
            raise BuildError(f"{len(libraries)} libraries in {self.folder}, not one")
        return libraries[0]


def check_layout(variant: Variant) -> list[str]:
    """The folder's name and files, as `kernels` looks for them, and nothing else."""
    from kernels.variants import parse_variant

    found = []
    try:
        backend = parse_variant(variant.folder.name).arch.backend.name
    except (AttributeError, ValueError) as error:
        found.append(f"{variant.folder.name} is not the name of a variant: {error}")
    else:
        if backend != variant.backend:
            found.append(f"the folder is named for {backend}, and made for {variant.backend}")
    files = {
        path.relative_to(variant.folder).as_posix()
        for path in variant.folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    library = f"{variant.metadata['id']}.abi3.so"
    needed = {"__init__.py", "_ops.py", "metadata.json", library}
    found += [f"{name} is missing" for name in sorted(needed - files)]
    expected = re.compile(r".*\.py|tuning/[a-z0-9-]+\.json")
    strange = {name for name in files - needed if not expected.fullmatch(name)}
    found += [f"{name} does not belong there" for name in sorted(strange)]
    plain = variant.metadata["name"].replace("-", "_")
    if (variant.folder / plain).exists():
        found.append(f"the folder {plain} lets users get used to `import {plain}`")
    return found


def check_metadata(variant: Variant) -> list[str]:
    """What `kernels` can read, with the keys of the requirements."""
    from kernels._rust import Metadata

    try:
        Metadata.read_from_file(variant.folder / "metadata.json")
    except (OSError, RuntimeError, ValueError) as error:
        return [f"kernels cannot read it: {error}"]
    found = [f"no {key!r}" for key in sorted(REQUIRED_KEYS - variant.metadata.keys())]
    found += [f"unknown key {key!r}" for key in sorted(variant.metadata.keys() - KNOWN_KEYS)]
    if variant.backend in ("cuda", "rocm") and not variant.metadata["backend"].get("archs"):
        found.append("a GPU variant must list its architectures")
    return found


def check_namespace(variant: Variant) -> list[str]:
    """Operators of a name that no other build has: that of the library, `torch.ops.<id>`."""
    unique = variant.metadata["id"]
    plain = variant.metadata["name"].replace("-", "_")
    found = []
    if not re.fullmatch(rf"_{plain}_{variant.backend}_\w+", unique):
        found.append(f"the id {unique} is not _{plain}_{variant.backend}_<unique>")
    text = (variant.folder / "_ops.py").read_text(encoding="utf-8")
    namespaces = {*re.findall(r"torch\.ops\.(\w+)", text), *re.findall(r"\"(\w+)::", text)}
    found += [f"_ops.py uses {name}, not {unique}" for name in sorted(namespaces - {unique})]
    content = variant.library.read_bytes()
    for needed in (f"PyInit_{unique}", unique):
        if f"\0{needed}\0".encode() not in content:
            found.append(f"{variant.library.name} has no {needed}")
    for path in sorted(variant.folder.rglob("*.py")):
        for line in literal_operators(ast.parse(path.read_bytes())):
            where = f"{path.relative_to(variant.folder).as_posix()}:{line}"
            found.append(f"{where} registers without add_op_namespace_prefix")
    return found


def literal_operators(tree: ast.Module) -> Iterator[int]:
    """The lines of decorators of torch.library that name an operator by a text."""
    for node in ast.walk(tree):
        for call in getattr(node, "decorator_list", []):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
            prefixed = (
                isinstance(call.args[0], ast.Call)
                and getattr(call.args[0].func, "id", None) == "add_op_namespace_prefix"
            )
            if name in REGISTRATIONS and not prefixed:
                yield call.lineno


def check_abis(variant: Variant) -> list[str]:
    """Python's limited API, manylinux_2_28, Torch's stable ABI, no state that versions share."""
    return violations(variant.library)


def check_libraries(variant: Variant) -> list[str]:
    """Torch and its dependencies, found by name: no path of the machine that built it."""
    if shutil.which("readelf") is None:
        raise Skipped("no readelf: apt-get install binutils")
    command = ["readelf", "-dW", str(variant.library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    found = [f"links {name}" for name in needed if not ALLOWED_LIBRARIES.fullmatch(name)]
    if not any(name.startswith("libtorch") for name in needed):
        found.append("does not link Torch")
    return found + [f"has {line}" for line in re.findall(r"\((R(?:UN)?PATH)\)", text)]


def check_digest(variant: Variant) -> list[str]:
    """Every file has the digest that metadata.json says."""
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    actual = Digest.hash_variant(DigestAlgorithm.SHA256, variant.folder)
    try:
        Metadata.read_from_file(variant.folder / "metadata.json").digest.validate(actual)
    except DigestValidationError as error:
        return [str(violation) for violation in error.violations]
    return []


def check_provenance(variant: Variant) -> list[str]:
    """Which commit it is made of, by which builder."""
    provenance = variant.metadata.get("provenance", {})
    found = []
    if not provenance.get("kernel-builder", {}).get("version"):
        found.append("no version of the builder")
    kernel = provenance.get("kernel")
    if kernel is None:
        return [*found, "no commit"]
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", kernel["commit"]):
        found.append(f"{kernel['commit']} is not a commit")
    if kernel["dirty"] and not variant.metadata["id"].endswith("_dirty"):
        found.append("made of uncommitted sources, and the id does not say so")
    return found


def check_architectures(variant: Variant) -> list[str]:
    """`kernels` refuses a GPU by this list, and trusts it."""
    archs = variant.metadata["backend"].get("archs", [])
    if variant.backend == "cpu":
        return [f"a CPU variant lists {arch}" for arch in archs]
    if variant.backend != "cuda":
        raise Skipped("nothing here reads machine code of AMD GPUs")
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise Skipped("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    return disagreements(archs, machine_code(variant.library, cuobjdump))


def check_imports(variant: Variant) -> list[str]:
    """Python, Torch and the kernel itself, and the latter relative: its name is not unique."""
    found = []
    for path in sorted(variant.folder.rglob("*.py")):
        name = path.relative_to(variant.folder).as_posix()
        for function, module in absolute_imports(ast.parse(path.read_bytes())):
            top = module.partition(".")[0]
            if top not in ALLOWED_IMPORTS and (name, function, module) not in LAZY_IMPORTS:
                where = f"{name}, in {function}()" if function else name
                found.append(f"{where} imports {module}")
    return found


def absolute_imports(node: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """What is imported below `node`, after the name of the outermost function that does so."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((function, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield function, child.module
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from absolute_imports(child, function or child.name)
        else:
            yield from absolute_imports(child, function)


def check_tuning(variant: Variant) -> list[str]:
    """Launch policies that were measured, in the schema that the library reads."""
    files = sorted(variant.folder.glob("tuning/*.json"))
    return [f"{path.name}: {problem}" for path in files for problem in problems(path)]


def check_api(variant: Variant) -> list[str]:
    """`__all__` is what __init__.py has, and nothing of the recorded API is gone."""
    tree = ast.parse((variant.folder / "__init__.py").read_bytes())
    exported = literal_all(tree)
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        and node.level
        and not (node.module or "").startswith("_")
        for alias in node.names
    }
    lazy = lazy_modules(variant.folder, exported - imported)
    bound = {name for name in imported if not name.startswith("_")}
    found = [f"{name} is public, and not in __all__" for name in sorted(bound - exported)]
    found += [f"{name} is in __all__, and not there" for name in sorted(exported - bound - lazy)]
    recorded = set(PUBLIC_API.read_text(encoding="utf-8").split())
    gone = sorted(recorded - public_api(variant.folder))
    return found + [f"{name} is gone: that takes a new version" for name in gone]


def literal_all(tree: ast.Module) -> set[str]:
    """The names of a module's `__all__`; without one, of its public classes and functions."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    kinds = (ast.ClassDef, ast.FunctionDef)
    names = {node.name for node in tree.body if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("_")}


def lazy_modules(package: Path, names: set[str]) -> set[str]:
    """Those of the names that are modules of the package: its `__getattr__` imports them."""
    paths = {name: (package / name, package / f"{name}.py") for name in names}
    return {name for name, (folder, file) in paths.items() if folder.is_dir() or file.is_file()}


def public_api(package: Path) -> set[str]:
    """What `__all__` names, and what its namespaces have: `rms_norm`, `layers.RMSNorm`."""
    tree = ast.parse((package / "__init__.py").read_bytes())
    names = literal_all(tree)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    modules = {
        alias.name: package / f"{alias.name}.py"
        for node in imports
        if node.module is None
        for alias in node.names
    }
    lazy = lazy_modules(package, names - {alias.name for node in imports for alias in node.names})
    modules |= {name: package / f"{name}.py" for name in lazy} | {
        f"{name}.{path.stem}": path for name in names for path in (package / name).glob("[!_]*.py")
    }
    return names | {
        f"{prefix}.{name}"
        for prefix, path in modules.items()
        if path.is_file()
        for name in literal_all(ast.parse(path.read_bytes()))
    }


def check_release(variant: Variant) -> list[str]:
    """What only a local build may be."""
    found = []
    if variant.metadata.get("provenance", {}).get("kernel", {}).get("dirty", True):
        found.append("made of uncommitted sources, or of no commit")
    cuda = re.search(r"-cu(\d+)(\d)-", variant.folder.name)
    if cuda:
        wanted = set(release_archs(load(REPO_DIR), (int(cuda[1]), int(cuda[2]))))
        archs = set(variant.metadata["backend"].get("archs", []))
        found += [f"{arch} is missing" for arch in by_number(wanted - archs)]
        found += [f"{arch} is not in build.toml" for arch in by_number(archs - wanted)]
    return found


# By the name that the report has.
CHECKS: dict[str, Callable[[Variant], list[str]]] = {
    "layout": check_layout,
    "metadata": check_metadata,
    "namespace": check_namespace,
    "ABIs": check_abis,
    "libraries": check_libraries,
    "architectures": check_architectures,
    "digest": check_digest,
    "provenance": check_provenance,
    "imports": check_imports,
    "tuning": check_tuning,
    "API": check_api,
}


def report(variant: Variant, release: bool) -> bool:
    """Prints what was checked of `variant`, and what is wrong; whether nothing is."""
    passed, failures, skipped = [], [], []
    checks = CHECKS | ({"release": check_release} if release else {})
    for name, check in checks.items():
        try:
            found = check(variant)
        except Skipped as reason:
            skipped.append(f"{name}: {reason}")
            continue
        failures += [f"{name}: {line}" for line in found]
        if not found:
            passed.append(name)
    print(f"{'FAILED' if failures else 'ok'}  {variant.folder.name}: {', '.join(passed)}")
    for kind, lines in (("", failures), ("skipped ", skipped)):
        for line in lines:
            print(f"  {kind}{line}")
    return not failures


def main(arguments: list[str] | None = None) -> int:
    """Checks each variant; nothing built is a failure too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--release", action="store_true")
    parser.add_argument("--record-api", action="store_true")
    options = parser.parse_args(arguments)
    if options.record_api:
        names = sorted(public_api(load(REPO_DIR).package_dir))
        PUBLIC_API.write_text("\n".join(names) + "\n", encoding="utf-8")
        return 0
    folders = options.folders or sorted((REPO_DIR / "build").glob("torch*"))
    if not folders:
        print("error: nothing is built: make build", file=sys.stderr)
        return 1
    try:
        passed = [
            report(Variant(folder), options.release) for folder in folders
        ]  # all of them, whatever the first
        return 0 if all(passed) else 1
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
