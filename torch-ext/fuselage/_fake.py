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
