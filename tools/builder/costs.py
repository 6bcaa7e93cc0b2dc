"""What a CUDA variant costs, by file: bytes and CPU seconds; and what it may cost."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .fatbin import code_bytes

# Of the library: machine code for every architecture of build.toml, no PTX. A T4's, which came
# later, is not in that, and may add 15%.
MOST_BYTES = 40 * 10**6
T4 = "7.5"
MOST_T4_BYTES = MOST_BYTES * 15 // 100
# Twenty minutes on two cores that do nothing else, and on which the yardstick of timed.py takes
# YARDSTICK_SECONDS; and 15%, as compilers are not slowed down just as it is. Times measured on
# slower cores count for less: one build took 2219 s, and 3104 s where the yardstick took 0.151.
MOST_SECONDS = 2 * 20 * 60 * 115 // 100
YARDSTICK_SECONDS = 0.108
TIMES_SUFFIX = ".times"  # of the file beside an object that tools/builder/timed.py writes


@dataclass(frozen=True)
class Cost:
    """What one source adds to the library, and to the build."""

    source: str
    bytes: int
    measured: float  # CPU seconds there
    yardstick: float  # those of the yardstick there

    @property
    def seconds(self) -> float:
        """CPU seconds where the yardstick takes YARDSTICK_SECONDS."""
        return self.measured * YARDSTICK_SECONDS / self.yardstick


@dataclass(frozen=True)
class Costs:
    """A library, of which a part is code for a T4, and what it was made of."""

    library_bytes: int
    t4_bytes: int
    files: tuple[Cost, ...]

    @property
    def seconds(self) -> float:
        return sum(file.seconds for file in self.files)

    def table(self) -> str:
        """A line a file, the slowest first, and the sums beside what they may be."""
        lines = [f"{'CPU s':>7}  {'MB':>6}"]
        lines += [
            f"{file.seconds:7.1f}  {file.bytes / 1e6:6.2f}  {file.source}"
            for file in sorted(self.files, key=lambda file: (-file.seconds, file.source))
        ]
        lines.append(
            f"{self.seconds:7.1f}  {self.library_bytes / 1e6:6.2f}  all files, and the library "
            f"(at most {MOST_SECONDS} CPU s)"
        )
        measured = sum(file.measured for file in self.files)
        lines.append(
            f"{measured:7.1f}  {'':6}  measured: its cores are {self.seconds / measured:.2f} "
            "as fast as those of the bar"
        )
        for size, most, what in self._parts():
            lines.append(f"{'':7}  {size / 1e6:6.2f}  {what} (at most {most / 1e6:.0f} MB)")
        return "\n".join(lines)

    def excess(self) -> list[str]:
        """What is more than it may be, one line each; empty when nothing is."""
        found = [
            f"{what} has {size / 1e6:.1f} MB, more than {most / 1e6:.0f}"
            for size, most, what in self._parts()
            if size > most
        ]
        if self.seconds > MOST_SECONDS:
            found.append(
                f"compiling took {self.seconds / 60:.1f} CPU minutes, "
                f"more than {MOST_SECONDS / 60:.0f}: 20 on two cores, and 15%"
            )
        return found

    def _parts(self) -> tuple[tuple[int, int, str], ...]:
        """Parts of the library, each with what it may have."""
        rest = self.library_bytes - self.t4_bytes
        return (
            (rest, MOST_BYTES, f"the library without code for {T4}"),
            (self.t4_bytes, MOST_T4_BYTES, f"code for {T4}"),
        )


def read_costs(work: Path, library: Path) -> Costs:
    """The costs of `library`, whose objects are below the work folder `work`.

    Each object has the time of its last compilation, so that the sum is that of a whole build even
    if the last one compiled one file.
    """
    ninja = work / "build.ninja"
    if not ninja.is_file():
        raise BuildError(f"{ninja} is missing: make build-cuda")
    built = re.findall(r"^build \.\./(obj/\S+): \w+ (\S+)", ninja.read_text(), re.MULTILINE)
    files = []
    for name, source in built:
        path = work / name
        times = path.with_name(path.name + TIMES_SUFFIX)
        for needed in (path, times):
            if not needed.is_file():
                raise BuildError(f"{needed} is missing: make build-cuda")
        measured, yardstick = map(float, times.read_text().split())
        files.append(Cost(source, path.stat().st_size, measured, yardstick))
    return Costs(library.stat().st_size, code_bytes(library).get(T4, 0), tuple(files))
