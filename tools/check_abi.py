#!/usr/bin/env python3
"""Checks built libraries against what the Hub requires of them.

`kernel-abi-check` looks for Python's limited API 3.9 and manylinux_2_28, and `nm` for C++ symbols
of Torch outside of its stable ABI. Checks every variant below build/, or the libraries named.

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
    return found + [f"not in Torch's stable ABI: {name}" for name in torch_symbols(library)]


def has_symbol_table(library: Path) -> bool:
    """Whether the 64-bit ELF file `library` has a section of type SHT_SYMTAB."""
    data = library.read_bytes()
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    types = [struct.unpack_from("<I", data, offset + i * size + 4)[0] for i in range(count)]
    return _SHT_SYMTAB in types


def torch_symbols(library: Path) -> list[str]:
    """The C++ symbols of Torch that `library` needs and that the stable ABI does not have."""
    if shutil.which("nm") is None:
        raise FileNotFoundError("nm not found: apt-get install binutils")
    output = subprocess.run(["nm", "-uC", str(library)], capture_output=True, text=True, check=True)
    return [
        match.group(1) for line in output.stdout.splitlines() if (match := _TORCH_CPP.search(line))
    ]


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
            print(f"ok  {name}: limited API {PYTHON_ABI}, {MANYLINUX}, Torch stable ABI only")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
