"""What each GPU's machine code takes in a library, as it is kept there: compressed.

cuobjdump tells sizes of what it has unpacked alone. NVIDIA does not document the format; this is
what nvcc 13.0 writes. A fat binary is a header of 16 bytes and its entries, one for each
architecture: a header, which says what the entry is, and its code.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

from .errors import BuildError

_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_HEADER = struct.Struct("<8xQ")  # bytes of all entries
_ENTRY = struct.Struct("<H2xIQ12xI")  # kind, bytes of its header, bytes of its code, architecture
_PTX, _MACHINE_CODE = 1, 2


def code_bytes(library: Path) -> dict[str, int]:
    """The bytes of machine code by compute capability; `9.0` counts that of `9.0a`, too."""
    data = library.read_bytes()
    found: Counter[str] = Counter()
    begin = data.find(_MAGIC)
    while begin >= 0:
        (size,) = _HEADER.unpack_from(data, begin)
        at = begin + 16
        end = at + size
        while at < end <= len(data):
            kind, header, code, arch = _ENTRY.unpack_from(data, at)
            if kind not in (_PTX, _MACHINE_CODE) or header < _ENTRY.size:
                break
            if kind == _MACHINE_CODE:
                found[f"{arch // 10}.{arch % 10}"] += header + code
            at += header + code
        if at != end:
            raise BuildError(f"{library}: not a fat binary as nvcc 13.0 writes it, at byte {at}")
        begin = data.find(_MAGIC, end)
    return dict(found)
