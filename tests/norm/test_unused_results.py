"""Results that are not used: nothing comes of them in a backward, even of rows that overflowed."""

from __future__ import annotations

import pytest
import torch
from harness import assert_close, assert_same_bits, gradients, normal, on_devices, random_grad_outs
from operators import FUSED_ADD_LAYER_NORM, FUSED_ADD_RMS_NORM, GATE_RESIDUAL_ADA_NORM

SUMS = (FUSED_ADD_LAYER_NORM, FUSED_ADD_RMS_NORM, GATE_RESIDUAL_ADA_NORM)
GATES = {
    "vector": lambda shape: shape[-1:],
    "batch": lambda shape: (shape[0], shape[-1]),
    "batch_with_ones": lambda shape: (shape[0], 1, shape[-1]),
    "row": lambda shape: shape,
}


def overflowing(op, shape, device) -> dict:
    """Inputs of which row 1 is beyond float16 where it is normalised."""
    inputs = op.inputs(shape, torch.float16, device)
    for name in op.row_inputs:
        inputs[name].view(-1, shape[-1])[1, ::3] = 6e4 if len(op.row_inputs) > 1 else float("inf")
    if inputs.get("gate") is not None:
        inputs["gate"].fill_(1.0)
    return inputs


def flat(t: torch.Tensor) -> torch.Tensor:
    return t.view(-1, t.shape[-1])


@on_devices((7, 96), (7, 96, 4096, 4097, 16384, 65552, 140008))
def test_a_row_without_gradient_that_overflowed(fuselage, device, dim):
    """As torch.compile has it of a result that is not used: zeros, and the bits of a finite row."""
    op = FUSED_ADD_RMS_NORM
    inputs = overflowing(op, (3, 4, dim), device)
    outputs = op.run(fuselage, inputs, {})
    assert not flat(outputs["out"])[1].isfinite().all()
    grad_outs = random_grad_outs(outputs)
    flat(grad_outs["out"])[1] = 0
    finite = {n: None if t is None else t.clone() for n, t in inputs.items()}
    for name in op.row_inputs:
        flat(finite[name])[1] = normal((dim,), torch.float16, device)
    requires = op.differentiable(inputs)
    actual, expected = (
        gradients(lambda leaves, _: op.run(fuselage, leaves, {}), given, {}, grad_outs, requires)
        for given in (inputs, finite)
    )
    for name in requires:  # the finite row may give -0, which + 0 makes 0
        assert_same_bits(actual[name] + 0, expected[name] + 0, f"grad_{name}")

    # Any gradient of it makes those of the row's inputs NaN, as in PyTorch.
    flat(grad_outs["out"])[1, 1] = 1
    actual = gradients(
        lambda leaves, _: op.run(fuselage, leaves, {}), inputs, {}, grad_outs, requires
    )
    for name in op.row_inputs:
        assert flat(actual[name])[1].isnan().all(), name
        assert flat(actual[name])[[0, *range(2, 12)]].isfinite().all(), name
    # But of the weight's only where the row itself is not finite: elsewhere it adds zeros.
    inside = flat(outputs["new_residual"])[1].isfinite()
    assert_same_bits(
        actual["weight"][inside] + 0, expected["weight"][inside] + 0, "grad_weight, a row used"
    )


@on_devices((40,), (40, 4096, 4097, 16384, 140008))
@pytest.mark.parametrize("op", SUMS, ids=lambda op: op.name)
@pytest.mark.parametrize("rows", [4, 400])
def test_a_row_that_overflowed_is_used_elsewhere(fuselage, device, op, dim, rows):
    """A zero among its gradients does not make the row one that is not used."""
    if rows * dim > 2**21:
        rows = 8
    inputs = overflowing(op, (rows, dim), device)
    outputs = op.run(fuselage, inputs, {})
    grad_outs = random_grad_outs(outputs)
    grad_outs["out"][1, 0] = 0  # its input is one that overflowed
    requires = op.differentiable(inputs)
    actual = gradients(
        lambda leaves, _: op.run(fuselage, leaves, {}), inputs, {}, grad_outs, requires
    )
    assert actual["weight"][0].isnan()


@on_devices((40,), (40, 96, 2048, 4096, 4097, 16384, 65552, 140008))
@pytest.mark.parametrize("requires", [("x", "scale", "shift", "gate"), ("scale",)], ids=len)
@pytest.mark.parametrize("rows", [4, 400])
def test_a_row_that_overflowed_is_used(fuselage, device, dim, rows, requires):
    """Without a mean, what is finite in a row of rstd 0 gives the scale a gradient of 0."""
    if rows * dim > 2**21:
        rows = 8
    op, options = GATE_RESIDUAL_ADA_NORM, {"norm": "rms"}
    inputs = overflowing(op, (rows, dim), device) | {"weight": None, "bias": None}
    inputs["scale"], inputs["shift"] = (normal((dim,), torch.float16, device) for _ in range(2))
    outputs = op.run(fuselage, inputs, options)
    actual = gradients(
        lambda leaves, _: op.run(fuselage, leaves, options),
        inputs,
        {},
        {name: torch.ones_like(output) for name, output in outputs.items()},
        requires,
    )
    inside = flat(outputs["new_residual"])[1].isfinite()
    assert actual["scale"][inside].isfinite().all()
    assert not actual["scale"][~inside].isfinite().any()
    if "x" in requires:
        assert actual["x"][1].isnan().all()
        assert actual["x"][[0, *range(2, rows)]].isfinite().all()
        assert actual["shift"].isfinite().all()
        assert actual["gate"].isnan().all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("op", SUMS, ids=lambda op: op.name)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_only_the_sum_is_used(fuselage, device, op, backend):
    inputs = overflowing(op, (3, 4, 64), device)
    grads = random_grad_outs(op.run(fuselage, inputs, {}))["new_residual"]

    def call(leaves, _):
        results = op.run(fuselage, leaves, {})
        return {"new_residual": results["new_residual"], "out": results["out"]}

    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend=backend)
    requires = op.differentiable(inputs)
    actual = gradients(call, inputs, {}, {"new_residual": grads}, requires)
    for name in op.row_inputs:  # the gate is one
        assert_same_bits(actual[name], grads, name)
    for name in set(requires) - {*op.row_inputs, "gate"}:
        assert actual[name] is None or not actual[name].any(), name
        assert backend is not None or actual[name] is None, f"work was done for {name}"
    torch._dynamo.reset()


@pytest.mark.parametrize("form", GATES)
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_gate_and_x_where_only_the_sum_is_used(fuselage, device, form, gate_dtype):
    op = GATE_RESIDUAL_ADA_NORM
    shape = (3, 5, 40)
    inputs = op.inputs(shape, torch.bfloat16, device)
    inputs["gate"] = normal(GATES[form](shape), gate_dtype, device)
    grad = normal(shape, torch.bfloat16, device)
    for requires in (("x", "residual", "gate"), ("x",), ("gate",), ("residual",)):
        actual = gradients(
            lambda leaves, _: op.run(fuselage, leaves, {}),
            inputs,
            {},
            {"new_residual": grad},
            requires,
        )
        double = {n: None if t is None else t.double() for n, t in inputs.items()}
        rows = double["gate"].view(3, 1, 40) if form == "batch" else double["gate"]
        product = grad.double() * double["x"]
        expected = {
            "x": grad.double() * rows,
            "residual": grad.double(),
            "gate": product.sum_to_size(rows.shape).view(inputs["gate"].shape),
        }
        terms = product.abs().sum_to_size(rows.shape).view(inputs["gate"].shape)
        for name in requires:
            assert actual[name].dtype == inputs[name].dtype
            of_sum = terms if name == "gate" else None
            assert_close(actual[name], expected[name], f"grad_{name}", terms=of_sum)
