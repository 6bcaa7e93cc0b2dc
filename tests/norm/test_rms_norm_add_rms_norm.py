"""rms_norm_add_rms_norm: the three operators that it stands for."""

from __future__ import annotations

import pytest
import torch
from harness import HALVES, assert_same_bits, normal, on_devices, random_grad_outs
from operators import RMS_NORM_ADD_RMS_NORM

OP = RMS_NORM_ADD_RMS_NORM
OPTIONS = ({}, {"cast_before_weight": True}, {"weight_offset": 1.0, "eps": 1e-3, "pre_eps": 1e-5})
each_half = pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])


def one_after_the_other(fuselage, inputs: dict, *, pre_eps=None, **options) -> dict:
    n = fuselage.rms_norm(inputs["x"], inputs["post_weight"], **options)
    options = options if pre_eps is None else {**options, "eps": pre_eps}
    results = fuselage.fused_add_rms_norm(n, inputs["residual"], inputs["pre_weight"], **options)
    return dict(zip(OP.outputs, results, strict=True))


@pytest.mark.kernels_ci
@each_half
@pytest.mark.parametrize("options", OPTIONS, ids=["once", "cast", "offset"])
@on_devices((1, 7, 96, 4096), (1, 7, 64, 96, 200, 1000, 2048, 4096, 4097, 16384, 65536, 262144))
def test_is_three_operators(fuselage, device, dtype, options, dim):
    """Bit for bit, as the docstring says. (In float32 a product and a sum are one instruction.)"""
    inputs = OP.inputs((19, dim), dtype, device)
    expected = one_after_the_other(fuselage, inputs, **options)
    for name, value in OP.run(fuselage, inputs, options).items():
        assert_same_bits(value, expected[name], name)


@pytest.mark.parametrize("rows", [1, 3, 1000, 20000])
def test_is_three_operators_of_any_number_of_rows(fuselage, device, rows):
    """Which may choose another kernel."""
    for dim in (40, 256, 512):
        inputs = OP.inputs((rows, dim), torch.bfloat16, device)
        expected = one_after_the_other(fuselage, inputs)
        for name, value in OP.run(fuselage, inputs, {}).items():
            assert_same_bits(value, expected[name], name)


@each_half
@pytest.mark.parametrize("options", OPTIONS, ids=["once", "cast", "offset"])
def test_gradients_are_those_of_three_operators(fuselage, device, dtype, options):
    """With either result unused, too."""
    inputs = OP.inputs((19, 96), dtype, device)
    grad_outs = random_grad_outs(OP.run(fuselage, inputs, options))
    for used in (("out", "new_residual"), ("out",), ("new_residual",)):
        gradients = []
        for call in (
            lambda leaves: OP.run(fuselage, leaves, options),
            lambda leaves: one_after_the_other(fuselage, leaves, **options),
        ):
            leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
            outputs = call(leaves)
            torch.autograd.backward([outputs[n] for n in used], [grad_outs[n] for n in used])
            gradients.append({name: t.grad for name, t in leaves.items()})
        for name, grad in gradients[0].items():
            expected = gradients[1][name]
            if name == "pre_weight" and "out" not in used:
                assert grad is None and expected is None
            else:
                assert_same_bits(grad, expected, name)


def test_a_row_of_infinities_does_not_spread(fuselage, device):
    inputs = OP.inputs((5, 100), torch.bfloat16, device)
    inputs["x"][2, 50] = torch.inf
    for value in OP.run(fuselage, inputs, {}).values():
        assert value[[0, 1, 3, 4]].isfinite().all() and not value[2].isfinite().all()


def test_weights_of_two_dtypes(fuselage, device):
    inputs = OP.inputs((5, 96), torch.bfloat16, device)
    expected = OP.run(fuselage, inputs, {})
    for name in ("post_weight", "pre_weight"):
        mixed = {**inputs, name: inputs[name].float()}
        for output, value in OP.run(fuselage, mixed, {}).items():
            assert_same_bits(value, expected[output], output)


def test_strided_inputs(fuselage, device):
    inputs = OP.inputs((19, 96), torch.float16, device)
    expected = OP.run(fuselage, inputs, {})
    for name in ("x", "residual"):
        wider = normal((19, 99), torch.float16, device)
        wider[:, :96] = inputs[name]
        for output, value in OP.run(fuselage, {**inputs, name: wider[:, :96]}, {}).items():
            assert_same_bits(value, expected[output], output)
