"""Results and gradients of tensors of any shape, and of empty ones.

Apart from tests/test_values.py, whose many sizes take long to collect where only what is marked
`kernels_ci` runs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import check_gradients, check_values, each_dtype, each_operator, each_style
from operators import OPERATORS

SHAPES = ((64,), (1, 64), (7, 64), (2, 3, 64), (2, 1, 3, 64), (1, 1, 1, 64), (2, 2, 1, 2, 64))
EMPTY_SHAPES = ((0,), (0, 8), (3, 0), (2, 0, 8), (0, 3, 8), (0, 0), (2, 3, 0))


@pytest.mark.kernels_ci
@each_dtype
@each_style(OPERATORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(fuselage, device, op, style, dtype, shape):
    inputs = op.inputs(shape, dtype, device, style)
    options = op.options(style)
    check_values(op, fuselage, inputs, options)
    check_gradients(op, fuselage, inputs, options)


@pytest.mark.kernels_ci
@each_style(OPERATORS)
@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty(fuselage, device, op, style, shape):
    options = op.options(style)
    inputs = op.inputs(shape, torch.bfloat16, device, style)
    outputs = op.run(fuselage, inputs, options)
    assert all(output.shape == shape for output in outputs.values())
    assert outputs["out"].dtype == options.get("out_dtype", torch.bfloat16)
    leaves = {name: t if t is None else t.clone().requires_grad_() for name, t in inputs.items()}
    outputs = op.run(fuselage, leaves, options)
    torch.autograd.backward(list(outputs.values()), [torch.ones_like(o) for o in outputs.values()])
    for name in op.differentiable(inputs):
        assert leaves[name].grad.shape == inputs[name].shape
        assert not leaves[name].grad.any(), f"grad_{name} is not zero"


WITH_AN_IN_PLACE_FORM = ("fused_add_layer_norm", "fused_add_rms_norm", "bias_act", "add_mul_act")
IN_PLACE = [op for op in OPERATORS if op.name in WITH_AN_IN_PLACE_FORM]


@each_operator(IN_PLACE)
@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_empty_in_place(fuselage, device, op, shape, transposed):
    """No elements overlap, whatever the strides between them are."""
    inputs = op.inputs(shape, torch.bfloat16, device)
    if transposed and len(shape) > 1:
        for name in op.row_inputs:
            inputs[name] = (
                torch.empty(shape, dtype=torch.bfloat16, device=device).mT.contiguous().mT
            )
    outputs = replace(op, name=f"{op.name}_").run(fuselage, inputs, {})
    assert outputs["out"] is inputs["x"]
