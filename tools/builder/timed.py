"""Runs a compiler and leaves what it took in a file: `timed.py FILE COMMAND...`.

CPU time and not the time on the clock, which ninja logs: that depends on how many compilers run at
once, and on what else the machine does. CPU time still depends on the machine: the same build took
half as long again on one whose cores had been busy elsewhere. So the file has two numbers: the CPU
seconds of the command, and those of a fixed piece of work just before and after it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

# Like a compiler's work, because it is one's: Python's, of these functions.
YARDSTICK = "\n".join(
    f"def f{i}(x, y={i}):\n"
    f"    if x > y:\n"
    f"        return [a * {i} + b for a in range(x) for b in range(y) if b % 3]\n"
    f"    return {{k: (k, str(k)) for k in range({i})}}"
    for i in range(300)
)
YARDSTICK_TIMES = 5


def yardstick() -> float:
    """The CPU seconds of a fixed piece of work, here and now, once it was done before."""
    compile(YARDSTICK, "yardstick", "exec")
    start = time.process_time()
    for _ in range(YARDSTICK_TIMES):
        compile(YARDSTICK, "yardstick", "exec")
    return time.process_time() - start


def main(file: str, *command: str) -> int:
    """Runs `command`; its processes' user and system time goes to `file`, and the yardstick's."""
    before = yardstick()
    status = subprocess.run(command).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    measured = (before + yardstick()) / 2
    Path(file).write_text(f"{used.ru_utime + used.ru_stime:.2f} {measured:.4f}\n")
    return status if status >= 0 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
