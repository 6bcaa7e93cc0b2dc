"""Cases of the rotary tables of video models."""

from __future__ import annotations

from dataclasses import dataclass

import reference
import torch
from harness import DTYPES, UNIT, half_an_ulp

from .draw import Draw
from .judge import Failure, valid_call

# Roundings of LTX-Video's float32 angles: the exponent, whose error is multiplied by log(theta),
# the power, and three products.
ANGLE_ROUNDINGS = 32


@dataclass
class Call:
    name: str
    given: dict

    def arguments(self) -> dict:
        return self.given


def make(draw: Draw, name: str, *, ordinary: bool = False) -> Call:
    given: dict = {size: draw.integer(1, 6) for size in ("frames", "height", "width")}
    given["dim"] = draw.choice((6, 12, 64, 2 * draw.integer(1, 70)))
    given["theta"] = draw.choice((10000.0, 500.0))
    if name == "ltx_video_rotary_tables" and draw.chance(0.5):
        given["scale"] = (0.16, 32.0, 32.0)
        given["base_size"] = draw.choice(((20, 2048, 2048), (7, 100, 300)))
    if draw.chance(0.5):
        given["dtype"] = draw.choice((*DTYPES, torch.float64))
    return Call(name, given | {"device": draw.device})


def check(kernel, draw: Draw, call: Call) -> None:
    with valid_call("forward"):
        tables = getattr(kernel, call.name)(**call.given)
    given = {key: value for key, value in call.given.items() if key not in ("device", "dtype")}
    if call.name == "wan_rotary_tables":
        angles, error = reference.wan_angles(**given), 1e-12
    else:
        given.setdefault("base_size", (20, 2048, 2048))
        angles = reference.ltx_video_angles(**given)
        error = ANGLE_ROUNDINGS * UNIT[torch.float32]
    dtype = call.given.get("dtype", torch.float32)
    still = call.given["dim"] - 2 * angles.shape[1]
    for name, table, function in zip(("cos", "sin"), tables, (torch.cos, torch.sin), strict=True):
        exact = function(angles).repeat_interleave(2, -1)
        first = torch.full((len(exact), still), function(torch.zeros(())).item())
        exact = torch.cat((first.double(), exact), -1)
        # The terms of 2 p - 1 are up to as large again.
        size = (2 * angles.abs() + angles.abs().amax(0)).repeat_interleave(2, -1)
        size = torch.nn.functional.pad(size, (still, 0))
        bound = error * (1 + size) + half_an_ulp(exact, dtype)
        if dtype in (torch.float16, torch.bfloat16):
            bound += half_an_ulp(exact, torch.float32)  # PyTorch rounds float64 to float32 first
        if table.dtype != dtype or table.shape != exact.shape:
            raise Failure("a wrong value", f"{name} is {table.dtype} {list(table.shape)}")
        bad = ~((table.cpu().double() - exact).abs() <= bound)
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise Failure(
                "a wrong value",
                f"{name}[{row}, {column}] is {table[row, column].item():.9g}, expected "
                f"{exact[row, column].item():.9g}",
            )
