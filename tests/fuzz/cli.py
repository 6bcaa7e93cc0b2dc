"""The command line, and the process that watches the one that calls the kernel.

A call that crashes or hangs takes its process with it: the last case that was announced is the one,
and a new process goes on with the next.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from . import child

TESTS = Path(__file__).resolve().parent.parent
SHOWN = 3  # failures of one kind of one function
MOST_LOST = 20  # processes, after which it ends
LOAD_SECONDS = 600  # of a process, before its first case


@dataclass
class Report:
    """What was called, and what was wrong."""

    calls: Counter = field(default_factory=Counter)  # (name, "valid" or "bad")
    failures: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=dict)

    def fail(self, name: str, seed: int, kind: str, message: str) -> None:
        known = self.failures.setdefault((name, kind), [])
        known.append((seed, message))
        if len(known) <= SHOWN:
            print(f"FAILED {name} {seed}: {kind}: {message[:600]}", flush=True)

    def count(self) -> int:
        return sum(len(found) for found in self.failures.values())

    def show(self, options: argparse.Namespace) -> None:
        names = sorted({name for name, _ in self.calls})
        width = max(map(len, names), default=0)
        for name in names:
            valid, bad = (self.calls[name, kind] for kind in ("valid", "bad"))
            wrong = sum(len(found) for (n, _), found in self.failures.items() if n == name)
            print(
                f"  {name:{width}} {valid:7} valid {bad:6} bad calls"
                + f" {wrong} FAILED" * (wrong > 0)
            )
        print(f"{sum(self.calls.values())} cases, {self.count()} failures")
        for (name, kind), found in sorted(self.failures.items()):
            print(f"{len(found)} x {name}: {kind}")
            for seed, message in found[:SHOWN]:
                print(f"    {message.splitlines()[0][:200] if message else ''}")
                print(f"    make fuzz CASE='{name} {seed}'{_device(options.device)}")


def _device(device: str) -> str:
    return "" if device == "cpu" else f" FUZZ='--device {device}'"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="fuzz fuselage's functions")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--cases", type=int, help="end after so many, if that is sooner")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each function")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ops", help="a comma-separated part of the public functions")
    parser.add_argument("--timeout", type=float, default=60.0, help="of a case, in seconds")
    parser.add_argument("--replay", metavar="'OP SEED'", help="run this one case")
    parser.add_argument("--here", action="store_true", help="replay in this process (a debugger's)")
    parser.add_argument("--wrap", help="module:function that is given the kernel and returns one")
    return parser.parse_args(arguments)


class Child:
    """A process that runs cases, and the lines that it sends."""

    def __init__(self, settings: dict):
        read, write = os.pipe()
        self.output = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115
        code = "import json, sys; from fuzz import child; child.main(json.loads(sys.argv[1]))"
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps({**settings, "pipe": write})],
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"},
        )
        os.close(write)
        self.pipe, self.rest = read, b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(read, selectors.EVENT_READ)

    def message(self, timeout: float) -> dict | None:
        """The next one; None where the process has ended. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self.rest:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(self.pipe, 1 << 16)
            if not part:
                return None
            self.rest += part
        line, self.rest = self.rest.split(b"\n", 1)
        return json.loads(line)

    def end(self) -> str:
        """Ends the process. Returns how it ended, with its last lines."""
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.pipe)
        code = self.process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.output.seek(0)
        lines = self.output.read().splitlines()
        reports = ("ERROR: AddressSanitizer", "runtime error:")
        found = (i for i, line in enumerate(lines) if any(report in line for report in reports))
        first = next(found, None)
        return "\n".join([how, *(lines[-15:] if first is None else lines[first : first + 25])])


def watch(settings: dict, timeout: float, report: Report) -> int | None:
    """One child until it ends. Returns the index to go on with, None where all is done."""
    process = Child(settings)
    running, wait = None, LOAD_SECONDS
    try:
        while (message := process.message(wait)) is not None:
            wait = timeout
            if "error" in message:
                sys.exit(f"error: {message['error']}")
            if "end" in message:
                process.end()
                return None
            if "start" in message:
                running = message
            elif "done" in message:
                name, seed = running["name"], running["seed"]
                report.calls[name, message.get("call", "valid")] += 1
                if "kind" in message:
                    report.fail(name, seed, message["kind"], message["message"])
                running = None
                if message.get("lost"):
                    process.end()
                    return message["done"] + 1
    except TimeoutError:
        process.process.kill()
        process.end()
        if running is None:
            sys.exit(f"error: no case began within {LOAD_SECONDS} s")
        report.calls[running["name"], "valid"] += 1
        report.fail(running["name"], running["seed"], "a hang", f"no answer for {timeout:.0f} s")
        return running["start"] + 1
    how = process.end()
    if running is None:
        sys.exit(f"error: the process ended between cases: {how}")
    report.calls[running["name"], "valid"] += 1
    report.fail(running["name"], running["seed"], "a crash", how)
    return running["start"] + 1


def settings_of(options: argparse.Namespace) -> dict:
    settings = {
        "ops": options.ops.split(",") if options.ops else None,
        "seed": options.seed,
        "device": options.device,
        "wrap": options.wrap,
        "start": 0,
        "end": sys.maxsize if options.cases is None else options.cases,
    }
    if options.replay:
        name, seed = options.replay.split()
        settings |= {"ops": [name], "seed": int(seed), "end": 1}
    return settings


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    settings = settings_of(options)
    if options.replay and options.here:
        kernel = child.load(options.wrap)
        outcome = child.run_case(kernel, settings["ops"][0], settings["seed"], options.device)
        print(outcome.get("message", f"right: a {outcome.get('call')} call"))
        return int("kind" in outcome)
    report = Report()
    deadline = time.monotonic() + options.seconds
    start: int | None = 0
    for _ in range(MOST_LOST):
        left = deadline - time.monotonic()
        if start is None or start >= settings["end"] or left <= 0:
            break
        start = watch({**settings, "start": start, "seconds": left}, options.timeout, report)
    report.show(options)
    return int(report.count() > 0)
