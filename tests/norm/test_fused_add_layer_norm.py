"""fused_add_layer_norm: the sum it returns, the form that writes over its inputs, the module.

What writes over its inputs shares its checks with fused_add_rms_norm_, which has more tests.
"""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits, each_dtype, normal, on_devices
from operators import FUSED_ADD_LAYER_NORM

OP = FUSED_ADD_LAYER_NORM


@pytest.mark.kernels_ci
@each_dtype
@on_devices((7, 4096), (1, 7, 96, 1152, 2048, 4096))
def test_is_an_addition_and_a_norm(fuselage, device, dtype, dim):
    """Bit for bit, as the docstring says."""
    inputs = OP.inputs((19, dim), dtype, device)
    expected = inputs["x"] + inputs["residual"]
    for options in ({}, {"eps": 1e-3}):
        out, new_residual = fuselage.fused_add_layer_norm(**inputs, **options)
        assert_same_bits(new_residual, expected, "new_residual")
        norm = fuselage.layer_norm(expected, inputs["weight"], inputs["bias"], **options)
        assert_same_bits(out, norm, "out")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("wider_by", [0, 3, 8])
@on_devices((7, 96), (1, 7, 96, 1152, 4096, 4097, 16384, 65536, 1 << 20))
def test_in_place_has_the_bits_of_the_functional_form(fuselage, device, wider_by, dim):
    """With rows of wider tensors, whose other columns stay as they are."""
    inputs = OP.inputs((19, dim), torch.bfloat16, device)
    wide = {name: normal((19, dim + wider_by), torch.bfloat16, device) for name in OP.row_inputs}
    inputs |= {name: t[:, :dim] for name, t in wide.items()}
    beside = {name: t[:, dim:].clone() for name, t in wide.items()}
    out, new_residual = fuselage.fused_add_layer_norm(**inputs)
    returned = fuselage.fused_add_layer_norm_(**inputs)
    assert returned[0] is inputs["x"] and returned[1] is inputs["residual"]
    assert_same_bits(inputs["x"], out, "out")
    assert_same_bits(inputs["residual"], new_residual, "new_residual")
    for name, t in wide.items():
        assert_same_bits(t[:, dim:], beside[name], f"memory beside {name}")


@pytest.mark.parametrize("name", ["x", "residual", "weight", "bias"])
def test_in_place_refuses_what_needs_a_gradient(fuselage, device, name):
    inputs = OP.inputs((3, 8), torch.float32, device)
    kept = inputs["x"].clone()
    inputs[name].requires_grad_()
    with pytest.raises(RuntimeError, match="use fused_add_layer_norm, or call it under"):
        fuselage.fused_add_layer_norm_(**inputs)
    with torch.no_grad():
        assert_same_bits(inputs["x"], kept, "x, which was refused")
        fuselage.fused_add_layer_norm_(**inputs)


def test_the_module(fuselage, device):
    inputs = OP.inputs((3, 5, 24), torch.float32, device)
    module = fuselage.modules.FusedAddLayerNorm(24, 1e-3, device=device)
    with torch.no_grad():
        module.weight.copy_(inputs["weight"])
        module.bias.copy_(inputs["bias"])
    actual = module(inputs["x"], inputs["residual"])
    expected = fuselage.fused_add_layer_norm(**inputs, eps=1e-3)
    for ours, theirs, name in zip(actual, expected, OP.outputs, strict=True):
        assert_same_bits(ours.detach(), theirs, name)
    with pytest.raises(RuntimeError, match="FusedAddLayerNorm of 24 columns got an input of shape"):
        module(torch.ones(2, 8, device=device), torch.ones(2, 8, device=device))
