"""Runs a compiler and leaves the CPU seconds it took in a file: `timed.py FILE COMMAND...`.

CPU time and not the time on the clock, which ninja logs: that depends on how many compilers run at
once, and on what else the machine does.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path


def main(file: str, *command: str) -> int:
    """Runs `command`; its processes' user and system time goes to `file`."""
    status = subprocess.run(command).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(file).write_text(f"{used.ru_utime + used.ru_stime:.2f}\n")
    return status if status >= 0 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
