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


def gradients_of_both(fuselage, inputs, grad_outs: dict, options: dict, needed=None) -> list[dict]:
    """Of the operator, and of the three."""
    gradients = []
    for call in (
        lambda leaves: OP.run(fuselage, leaves, options),
        lambda leaves: one_after_the_other(fuselage, leaves, **options),
    ):
        leaves = {
            name: t.clone().requires_grad_(needed is None or name in needed)
            for name, t in inputs.items()
        }
        outputs = call(leaves)
        torch.autograd.backward([outputs[name] for name in grad_outs], list(grad_outs.values()))
        gradients.append({name: t.grad for name, t in leaves.items()})
    return gradients


def assert_alike(gradients: list[dict]) -> None:
    """But for roundings: in one pass the gradient of the sum is not rounded in between.

    Rows that are no multiple of 16 bytes take two.
    """
    for name, grad in gradients[0].items():
        expected = gradients[1][name]
        assert (grad is None) == (expected is None), name
        if grad is None:
            continue
        if grad.shape[-1] * grad.itemsize % 16 != 0:
            assert_same_bits(grad, expected, name)
        else:
            limit = 2 * torch.finfo(grad.dtype).eps * expected.float().abs().nan_to_num().max()
            torch.testing.assert_close(
                grad.float(), expected.float(), rtol=0, atol=limit.item(), equal_nan=True
            )


@each_half
@pytest.mark.parametrize("options", OPTIONS, ids=["once", "cast", "offset"])
@on_devices((96, 100, 97), (96, 100, 1000, 4096, 4097, 16384, 131072, 262144))
def test_gradients_are_those_of_three_operators(fuselage, device, dtype, options, dim):
    """With either result unused, too."""
    inputs = OP.inputs((19, dim), dtype, device)
    grad_outs = random_grad_outs(OP.run(fuselage, inputs, options))
    for used in (("out", "new_residual"), ("out",), ("new_residual",)):
        some = {name: grad_outs[name] for name in used}
        assert_alike(gradients_of_both(fuselage, inputs, some, options))


@pytest.mark.parametrize(
    "needed", [("x",), ("residual",), ("post_weight",), ("pre_weight",), ("x", "pre_weight")]
)
@on_devices((96, 97, 1000), (96, 97, 1000, 4096, 262144))
def test_gradients_of_some_inputs(fuselage, device, needed, dim):
    inputs = OP.inputs((19, dim), torch.bfloat16, device)
    grad_outs = random_grad_outs(OP.run(fuselage, inputs, {}))
    gradients = gradients_of_both(fuselage, inputs, grad_outs, {}, needed)
    assert {name for name, grad in gradients[0].items() if grad is not None} == set(needed)
    assert_alike(gradients)
    every = gradients_of_both(fuselage, inputs, grad_outs, {})[0]
    for name in needed:
        assert_same_bits(gradients[0][name], every[name], name)


@on_devices((96, 97), (96, 97, 4096, 262144))
def test_a_sum_without_a_norm_that_is_not_used(fuselage, device, dim):
    """Of a row with an infinity: what goes through the first norm is the sum's gradient alone."""
    inputs = OP.inputs((5, dim), torch.bfloat16, device)
    grad_outs = random_grad_outs(OP.run(fuselage, inputs, {}))
    inputs["residual"][2, 50] = torch.inf
    grad_outs["out"][2] = 0
    gradients = gradients_of_both(fuselage, inputs, grad_outs, {})
    assert all(grad.isfinite().all() for grad in gradients[0].values())
    assert_alike(gradients)
    grad_outs["out"][2, 1] = 1  # it is used
    gradients = gradients_of_both(fuselage, inputs, grad_outs, {})
    for name in ("x", "residual"):
        grad = gradients[0][name]
        assert grad[2].isnan().all() and grad[[0, 1, 3, 4]].isfinite().all()
    assert_alike(gradients)


def test_large_weights(fuselage, device):
    """Gradients are finite where their factors' product is not."""
    inputs = {name: t * 1e10 for name, t in OP.inputs((5, 96), torch.float32, device).items()}
    grad_outs = random_grad_outs(OP.run(fuselage, inputs, {}))
    grad_outs = {name: 1e10 * grad for name, grad in grad_outs.items()}
    gradients = gradients_of_both(fuselage, inputs, grad_outs, {})
    assert all(grad.isfinite().all() for grad in gradients[0].values())
    for name, grad in gradients[0].items():
        size = gradients[1][name].abs().max()
        torch.testing.assert_close(grad / size, gradients[1][name] / size, rtol=0, atol=1e-5)


def test_backward_checks_its_arguments(fuselage, device):
    x = OP.inputs((6, 64), torch.bfloat16, device)["x"]
    weight, statistics = x[0].clone(), torch.ones(6, 2, device=device)
    good = [x, x, x, x, weight, weight, statistics, 0.0, True, True, True, True]
    fuselage.norm.ops.rms_norm_add_rms_norm_bwd(*good)
    for index, name, wrong in (
        *((0, "grad_out", wrong) for wrong in (x[:5], x.half())),
        *((1, "grad_new_residual", wrong) for wrong in (x[:5], x.float())),
        (2, "x", x.double()),
        *((3, "new_residual", wrong) for wrong in (x[:, :5], x.half())),
        *((4, "post_weight", wrong) for wrong in (weight[:3], weight.half())),
        (5, "pre_weight", weight[:3]),
        *((6, "statistics", wrong) for wrong in (statistics[:5], statistics.half())),
    ):
        bad = [*good[:index], wrong, *good[index + 1 :]]
        with pytest.raises(RuntimeError, match=rf"fuselage::rms_norm_add_rms_norm_bwd: `{name}`"):
            fuselage.norm.ops.rms_norm_add_rms_norm_bwd(*bad)


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
