#!/usr/bin/env python3
"""Checks built libraries against what the Hub requires of them.

`kernel-abi-check` looks for Python's limited API 3.9 and manylinux_2_28, and `nm` for C++ symbols
of Torch outside of its stable ABI, and for state that two versions of the library would share in
one process. Checks every variant below build/, or the libraries named.

    python tools/check_abi.py [library.abi3.so ...]
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

REPO_DIR = Path(__file__).resolve().parent.parent
PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
_TORCH_CPP = re.compile(r" U (?!torch::stable::)((?:c10|at|torch)::\S.*)$")
# A variable of the namespace, of a function in it, or its guard.
_FUSELAGE = re.compile(r"_Z(?:GV)?Z*N8fuselage")
_WRITABLE = (".bss", ".data", ".tbss", ".tdata")
_CONSTANT = ".data.rel.ro"
_SHT_SYMTAB = 2


def violations(library: Path) -> list[str]:
    """What is wrong with `library`, one line each; empty when nothing is."""
    from kernel_abi_check import ObjectFile

    if not has_symbol_table(library):
        # NOTE: kernel-abi-check reads this table and finds nothing to object to in a stripped file.
        return ["is stripped, so its symbols cannot be checked"]
    file = ObjectFile(str(library))
    found = [f"Python {PYTHON_ABI}: {item}" for item in file.check_python_abi(PYTHON_ABI)]
    found += [f"{MANYLINUX}: {item}" for item in file.check_manylinux(MANYLINUX)]
    found += [f"not in Torch's stable ABI: {name}" for name in torch_symbols(library)]
    return found + [f"state shared between versions: {name}" for name in shared_state(library)]


def has_symbol_table(library: Path) -> bool:
    """Whether the 64-bit ELF file `library` has a section of type SHT_SYMTAB."""
    data = library.read_bytes()
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    types = [struct.unpack_from("<I", data, offset + i * size + 4)[0] for i in range(count)]
    return _SHT_SYMTAB in types


def torch_symbols(library: Path) -> list[str]:
    """The C++ symbols of Torch that `library` needs and that the stable ABI does not have."""
    matches = map(_TORCH_CPP.search, _nm("-uC", library))
    return [match.group(1) for match in matches if match]


def shared_state(file: Path) -> list[str]:
    """The variables of a library or object that another version in the process would share.

    That is what is unique in the process (STB_GNU_UNIQUE), and what is fuselage's without internal
    linkage. Its name tells, whatever flags hide it in this build: the release's builder has not
    these flags. Constants may be shared.
    """
    found = []
    for line in _nm("-f", "sysv", file):
        name, _, kind, _, _, _, section = (f"{line}|||||||".split("|"))[:7]
        name, kind, section = name.strip(), kind.strip(), section.strip()
        if not section.startswith(_WRITABLE) or section.startswith(_CONSTANT):
            continue
        is_ours = _FUSELAGE.match(name) is not None
        if kind == "u" or (is_ours and not has_internal_linkage(name)):
            found.append(name)
    return found


def has_internal_linkage(name: str) -> bool:
    """Whether the mangled name is of something static, or in an anonymous namespace."""
    rest = name[_FUSELAGE.match(name).end() :]
    while match := re.match(r"(L?)(\d+)", rest):
        begin = match.end()
        identifier, rest = rest[begin:][: int(match[2])], rest[begin + int(match[2]) :]
        if match[1] or identifier.startswith("_GLOBAL__N_"):
            return True
    return False


def _nm(*arguments: object) -> list[str]:
    """The lines that `nm` prints."""
    if shutil.which("nm") is None:
        raise FileNotFoundError("nm not found: apt-get install binutils")
    command = ["nm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> int:
    """Checks and prints one line a library."""
    libraries = [Path(argument) for argument in sys.argv[1:]]
    libraries = libraries or sorted((REPO_DIR / "build").glob("torch*/*.so"))
    if not libraries:
        print("error: nothing is built: make build", file=sys.stderr)
        return 1
    failed = False
    for library in libraries:
        found = violations(library)
        failed |= bool(found)
        name = f"{library.parent.name}/{library.name}"
        if found:
            print(f"FAILED  {name}\n  " + "\n  ".join(found))
        else:
            print(
                f"ok  {name}: limited API {PYTHON_ABI}, {MANYLINUX}, Torch stable ABI only, "
                "no shared state"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
