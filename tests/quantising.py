"""The operators that quantise their result: what they are given, and what is done one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import normal
from torch import Tensor


@dataclass(frozen=True)
class Fused:
    """An operator: what it is given, of the shape of its result; and what is done one by one."""

    name: str
    inputs: Callable[[tuple, torch.dtype, str], dict]
    apart: Callable[..., tuple[Tensor, ...]]  # (fuselage, **inputs) -> out, and what else there is
    scale: str = "scale"
    options: tuple[dict, ...] = ({},)

    def __str__(self) -> str:
        return self.name

    def call(self, fuselage, given: dict, **options) -> tuple[Tensor, ...]:
        if "scale" in options:
            options[self.scale] = options.pop("scale")
        return getattr(fuselage, self.name)(**given, **options)


def _norm(*names: str):
    def inputs(shape, dtype, device) -> dict:
        x = normal(shape, dtype, device, scale=2.0)
        vectors = {name: 1 + normal(shape[-1:], dtype, device) / 4 for name in names}
        return {"x": x, **vectors}

    return inputs


def _added(shape, dtype, device) -> dict:
    return {**_norm("weight")(shape, dtype, device), "residual": normal(shape, dtype, device)}


def modulated(shape, dtype, device) -> dict:
    batch = shape[:1] if len(shape) > 2 else ()
    modulation = {n: normal((*batch, shape[-1]), dtype, device) for n in ("scale", "shift")}
    return {"x": normal(shape, dtype, device, scale=2.0), **modulation}


def _gated(shape, dtype, device) -> dict:
    return {name: normal(shape, dtype, device, scale=2.0) for name in ("gate", "up")}


LLAMA, GEMMA = {"cast_before_weight": True}, {"weight_offset": 1.0, "eps": 1e-5}
FUSED = (
    Fused(
        "rms_norm_quant",
        _norm("weight"),
        lambda f, **given: (f.rms_norm(**given),),
        options=({}, LLAMA, GEMMA),
    ),
    Fused(
        "fused_add_rms_norm_quant",
        _added,
        lambda f, **given: f.fused_add_rms_norm(**given),
        options=({}, LLAMA, GEMMA),
    ),
    Fused("layer_norm_quant", _norm("weight", "bias"), lambda f, **given: (f.layer_norm(**given),)),
    Fused(
        "ada_layer_norm_quant",
        modulated,
        lambda f, **given: (f.ada_layer_norm(**given),),
        scale="quant_scale",
    ),
    Fused(
        "silu_and_mul_quant",
        lambda shape, *of: _norm()((*shape[:-1], 2 * shape[-1]), *of),
        lambda f, **given: (f.silu_and_mul(**given),),
    ),
    Fused("swiglu_quant", _gated, lambda f, **given: (f.swiglu(**given),)),
    Fused("gelu_tanh_quant", _norm(), lambda f, **given: (f.gelu_tanh(**given),)),
)
BY_NAME = {fused.name: fused for fused in FUSED}
