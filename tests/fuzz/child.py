"""The process that calls the kernel, and says before each call which it is."""

from __future__ import annotations

import importlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from types import ModuleType

from .judge import Failure

LOST = ("CUDA error", "device-side assert", "illegal memory access")  # nothing works after these


def load(wrap: str | None) -> ModuleType:
    """The kernel as the tests load it; `wrap`, a `module:function`, may plant a mistake in it."""
    from conftest import REPO_ID, VERSION, kernel_backend
    from kernels import get_kernel

    kernel = get_kernel(REPO_ID, version=VERSION, backend=kernel_backend())
    if wrap is None:
        return kernel
    module, function = wrap.split(":")
    return getattr(importlib.import_module(module), function)(kernel)


def sequence(names: list[str], seed: int, start: int) -> Iterator[tuple[int, str, int]]:
    """(index, name, seed) of the cases from `start` on: each name in turn, with seeds in order."""
    index = start
    while True:
        yield index, names[index % len(names)], seed + index // len(names)
        index += 1


def run_case(kernel: ModuleType, name: str, seed: int, device: str) -> dict:
    """The outcome: {"call": ...}, or {"kind": ..., "message": ..., "lost": of the device}."""
    import torch

    from . import cases

    try:
        outcome = {"call": cases.run(kernel, name, seed, device)}
        if device == "cuda":
            torch.cuda.synchronize()
        return outcome
    except Failure as failure:
        kind, message = failure.kind, str(failure)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"call": "out of memory"}
    except Exception as error:
        kind = "the fuzzer raised"
        message = "".join(traceback.format_exception(error)[-3:])
    return {"kind": kind, "message": message, "lost": any(text in message for text in LOST)}


def main(options: dict) -> None:
    """Cases until the time is over; each line of the pipe is one message."""
    pipe = os.fdopen(options["pipe"], "w", buffering=1)

    def say(**message) -> None:
        pipe.write(json.dumps(message) + "\n")

    import torch

    torch.set_num_threads(min(2, torch.get_num_threads()))
    kernel = load(options["wrap"])
    from . import cases

    names = options["ops"] or cases.names(kernel)
    unknown = set(names) - set(cases.names(kernel))
    if unknown:
        say(error=f"no public function {', '.join(sorted(unknown))}")
        return
    say(names=names)
    deadline = time.monotonic() + options["seconds"]
    for index, name, seed in sequence(names, options["seed"], options["start"]):
        if time.monotonic() >= deadline or index >= options["end"]:
            break
        say(start=index, name=name, seed=seed)
        outcome = run_case(kernel, name, seed, options["device"])
        say(done=index, **outcome)
        if outcome.get("lost"):
            os._exit(0)
    say(end=True)
    pipe.flush()
    os._exit(0)  # Torch takes seconds to leave
