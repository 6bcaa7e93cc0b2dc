"""What every operator's fake kernel needs, which gives the shapes and dtypes of the results for
tracing, and is also what runs when an input is on the meta device.
"""

from __future__ import annotations

import torch


def check_devices(op: str, name: str, x: torch.Tensor, /, **others) -> None:
    """Raises as the real op does where one of `others` is not on the device of `x`, its `name`."""
    for other_name, other in others.items():
        if other is not None and other.device != x.device:
            raise RuntimeError(
                f"fuselage::{op}: `{other_name}` must be on the device of `{name}` ({x.device}), "
                f"got {other.device}"
            )


def new_like(x: torch.Tensor, *pairs: tuple[bool, torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Of pairs (needed, tensor or None): a new tensor like it, or an empty one of `x`'s dtype.

    That is what the backward ops return, whose schemas have no optional results.
    """
    return tuple(
        t.new_empty(t.shape) if needed and t is not None else x.new_empty((0,))
        for needed, t in pairs
    )
