"""The sizes of activations and gradients for which docs/limits.md promises accuracy."""

from __future__ import annotations

import pytest
import torch
from harness import assert_close, check_gradients, check_values, normal, on_devices
from operators import (
    ADA_LAYER_NORM,
    ADA_RMS_NORM,
    FUSED_ADD_RMS_NORM,
    FUSED_MUL_POLY_NORM,
    GATE_RESIDUAL_ADA_NORM,
    GATED_RMS_NORM,
    LAYER_NORM,
    POLY_NORM,
    RMS_NORM,
    RMS_NORM_ADD_RMS_NORM,
    rotary_operator,
)

NORMS = (
    RMS_NORM,
    FUSED_ADD_RMS_NORM,
    RMS_NORM_ADD_RMS_NORM,
    GATED_RMS_NORM,
    LAYER_NORM,
    ADA_LAYER_NORM,
    ADA_RMS_NORM,
    GATE_RESIDUAL_ADA_NORM,
    POLY_NORM,
    FUSED_MUL_POLY_NORM,
)
POWERS = (POLY_NORM, FUSED_MUL_POLY_NORM)  # which have x^6
DTYPES = (torch.float32, torch.bfloat16)  # float16 ends at 65504

each_size = pytest.mark.parametrize("grad_size", [1e-6, 1e15])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sized(outputs: dict, size: float) -> dict:
    return {n: normal(t.shape, t.dtype, t.device, scale=size) for n, t in outputs.items()}


@pytest.mark.parametrize("op", NORMS, ids=lambda op: op.name)
@pytest.mark.parametrize("largest", [False, True], ids=["least", "most"])
@each_size
@each_dtype
@on_devices((96,), (96, 4096, 4099, 65552, 140008))
def test_norms(fuselage, device, op, largest, grad_size, dtype, dim):
    least, most = (1e-6, 1e5) if op in POWERS else (1e-12, 1e15)
    scale = most if largest else least
    inputs = op.inputs((5, dim), dtype, device)
    for name in op.row_inputs:
        if name not in ("mul", "gate"):
            inputs[name].mul_(scale)
    outputs = check_values(op, fuselage, inputs, {})
    assert all(t.isfinite().all() for t in outputs.values())
    check_gradients(op, fuselage, inputs, {}, grad_outs=sized(outputs, grad_size))


@pytest.mark.parametrize("scale", [1e-12, 1e15])
@each_size
@each_dtype
@on_devices((64,), (64, 128, 1000, 1536))
def test_qk_norm_rotary(fuselage, device, scale, grad_size, dtype, dim):
    cos, sin = (normal((5, dim), dtype, device) for _ in range(2))
    op = rotary_operator("qk_norm_rotary", cos=cos, sin=sin)
    heads = {"q": 4, "k": 2}.items()
    inputs = {n: normal((2, 5, h, dim), dtype, device, scale=scale) for n, h in heads}
    for name in ("q_weight", "k_weight"):
        inputs[name] = normal((dim,), dtype, device, scale=0.3, mean=1.0)
    outputs = op.run(fuselage, inputs, {})
    expected, terms = op.run_reference(inputs, {}), op.run_output_terms(inputs, {})
    for name, output in outputs.items():
        assert_close(output, expected[name], name, terms=terms[name])
    check_gradients(op, fuselage, inputs, {}, grad_outs=sized(outputs, grad_size))
