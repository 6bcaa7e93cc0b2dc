"""Who takes part: fuselage as a user loads it, the baselines' common parts, and the copies."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

REPO = Path(__file__).resolve().parents[2]
DEFAULT = {
    "cuda": ("fuselage", "eager", "torch", "compile", "liger", "quack"),
    "cpu": ("fuselage", "eager", "torch"),
}
COPY, KERNEL_COPY = "copy", "kernel copy"


def load_fuselage(device: str) -> ModuleType:
    """The built variant, through `kernels`; FUSELAGE_KERNEL_DIR names another checkout."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from kernels import get_local_kernel

    folder = Path(os.environ.get("FUSELAGE_KERNEL_DIR", REPO)).resolve()
    return get_local_kernel(folder, backend="cpu" if device == "cpu" else None)


def kernel_metadata(fuselage: ModuleType) -> dict:
    """The `metadata.json` of the loaded variant."""
    return json.loads((Path(fuselage.__file__).parent / "metadata.json").read_text("utf-8"))


def reset_compiler() -> None:
    """Forgets what was compiled, so that each case compiles for its own shape."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def compiled(function: Callable) -> Callable:
    """`torch.compile` in its default mode, for one shape."""
    import torch._functorch.config

    # A backward with donated buffers cannot run twice, and a replayed graph runs it many times.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def as_tuple(outputs) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def copies(total_bytes: int, sets: int, device: str) -> dict[str, Callable[[int], tuple]]:
    """Two ways to read half of `total_bytes` and write the other half, on set `i`."""
    words = max(1, (total_bytes // 2 + 511) // 512) * 128
    buffers = [
        (
            torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=device),
            torch.zeros(words, dtype=torch.int32, device=device),
        )
        for _ in range(sets)
    ]

    def copy(i: int) -> tuple[torch.Tensor]:
        source, target = buffers[i]
        return (target.copy_(source),)

    def kernel_copy(i: int) -> tuple[torch.Tensor]:
        source, target = buffers[i]
        return (torch.bitwise_not(source, out=target),)

    return {COPY: copy, KERNEL_COPY: kernel_copy}
