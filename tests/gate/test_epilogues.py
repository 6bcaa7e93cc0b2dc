"""bias_act and add_mul_act: what is saved, and the forms that write over their input."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits, check_gradients, check_values, each_dtype, normal, on_devices
from operators import ADD_MUL_ACT, BIAS_ACT
from reference import ACTIVATIONS

OPS = (BIAS_ACT, ADD_MUL_ACT)
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@each_op
@pytest.mark.parametrize("activation", ACTIVATIONS)
@each_dtype
@on_devices((1, 7, 96, 1000), (1, 7, 64, 96, 512, 1000, 4097, 14336))
def test_every_activation(fuselage, device, op, activation, dtype, dim):
    inputs = op.inputs((37, dim), dtype, device)
    options = {"activation": activation}
    check_values(op, fuselage, inputs, options)
    check_gradients(op, fuselage, inputs, options)


@each_op
@on_devices((1, 13, 64), (1, 13, 64, 512, 4096))
def test_many_rows_of_a_bias_gradient(fuselage, device, op, dim):
    for rows in (1, 8, 9, 63, 64, 65, 1025, 4099):
        inputs = op.inputs((rows, dim), torch.bfloat16, device, "float32_bias")
        check_gradients(op, fuselage, inputs, {})
        check_gradients(op, fuselage, inputs, {}, requires=("bias",))


def test_positional_arguments(fuselage, device):
    x, bias, y = (t.float() for t in ADD_MUL_ACT.inputs((5, 8), torch.float32, device).values())
    total = x.double() + bias.double()
    expected = torch.relu(total)
    torch.testing.assert_close(fuselage.bias_act(x, bias, "relu").double(), expected)
    expected = torch.relu(total + 0.25 * y.double())
    actual = fuselage.add_mul_act(x, bias, y, 0.25, "relu")
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
    assert_same_bits(fuselage.bias_act(x), x, "no bias and no activation")


@each_op
def test_an_unknown_activation_is_refused(fuselage, device, op):
    inputs = op.inputs((5, 8), torch.float32, device)
    for suffix in ("", "_"):
        with pytest.raises(RuntimeError, match=rf"fuselage::{op.name}{suffix}: `activation` must"):
            getattr(fuselage, op.name + suffix)(**inputs, activation="swish")


@each_op
def test_without_an_activation_no_values_are_saved(fuselage, device, op):
    inputs = {n: t.requires_grad_() for n, t in op.inputs((5, 8), torch.float32, device).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = op.run(fuselage, inputs, {"activation": "none"})["out"]
    assert [t.data_ptr() for t in saved] == [inputs["bias"].data_ptr()]
    out.sum().backward()


# In place


def inplace(fuselage, op, inputs: dict, options: dict) -> torch.Tensor:
    options = {**op.defaults, **options}
    returned = getattr(fuselage, f"{op.name}_")(**inputs, **options)
    assert returned is inputs["x"]
    return returned


@pytest.mark.kernels_ci
@each_op
@each_dtype
@on_devices((1, 7, 96, 4096), (1, 7, 96, 1000, 4096, 4097, 65536))
def test_in_place_has_the_bits_of_the_functional_form(fuselage, device, op, dtype, dim):
    for style in op.styles:
        inputs = op.inputs((19, dim), dtype, device, style)
        expected = op.run(fuselage, inputs, op.options(style))["out"]
        assert_same_bits(inplace(fuselage, op, inputs, op.options(style)), expected, style)


@each_op
@pytest.mark.parametrize("wider_by", [3, 8])
@on_devices((7, 96), (7, 96, 4096))
def test_in_place_on_rows_of_a_wider_tensor(fuselage, device, op, wider_by, dim):
    buffer = normal((19, dim + wider_by), torch.bfloat16, device)
    inputs = op.inputs((19, dim), torch.bfloat16, device) | {"x": buffer[:, :dim]}
    beside = buffer[:, dim:].clone()
    expected = op.run(fuselage, inputs, {})["out"]
    assert_same_bits(inplace(fuselage, op, inputs, {}), expected, "out")
    assert_same_bits(buffer[:, dim:], beside, "memory beside x")


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (2, 1, 3, 8), (0, 8), (3, 0)], ids=str)
@each_op
def test_in_place_on_every_shape(fuselage, device, op, shape):
    inputs = op.inputs(shape, torch.float32, device)
    expected = op.run(fuselage, inputs, {})["out"]
    assert_same_bits(inplace(fuselage, op, inputs, {}), expected, "out")


def check_refused(fuselage, op, inputs: dict, match: str) -> None:
    kept = inputs["x"].detach().clone()
    with pytest.raises(RuntimeError, match=match):
        inplace(fuselage, op, inputs, {})
    assert_same_bits(inputs["x"].detach(), kept, "x, which was refused")


@pytest.mark.kernels_ci
@each_op
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t[:1].expand(6, 8),
        lambda t: t.view(-1)[:13].unfold(0, 8, 1),
        lambda t: t.view(8, 6).t(),
        lambda t: t.repeat(1, 2)[:, ::2],
        lambda t: t[:, :1].expand(6, 8),
    ],
    ids=["expanded", "overlapping", "transposed", "every_second_column", "expanded_last"],
)
def test_in_place_refuses_what_it_cannot_write(fuselage, device, op, layout):
    inputs = op.inputs((6, 8), torch.float32, device)
    inputs["x"] = layout(inputs["x"])
    check_refused(fuselage, op, inputs, rf"fuselage::{op.name}_: `x` is written in place")


def test_in_place_refuses_inputs_that_share_memory(fuselage, device):
    buffer = normal((7, 8), torch.float32, device)
    inputs = {"x": buffer[:6], "bias": None, "y": buffer[1:]}
    check_refused(fuselage, ADD_MUL_ACT, inputs, "must not share memory with `y`")
    inputs = {"x": buffer[:6], "bias": buffer[0]}
    check_refused(fuselage, BIAS_ACT, inputs, "must not share memory with `bias`")


@on_devices((8, 96), (8, 96, 4096))
def test_in_place_on_itself_and_on_halves(fuselage, device, dim):
    x = normal((6, dim), torch.float32, device)
    expected = fuselage.add_mul_act(x, None, x, 2.0, "silu")
    assert_same_bits(fuselage.add_mul_act_(x, None, x, 2.0, "silu"), expected, "y is x")
    buffer = normal((6, 2 * dim), torch.float32, device)
    x, y = buffer[:, :dim], buffer[:, dim:]
    expected = fuselage.add_mul_act(x, None, y, 2.0, "silu")
    assert_same_bits(fuselage.add_mul_act_(x, None, y, 2.0, "silu"), expected, "halves")


@each_op
@pytest.mark.parametrize("name", ["x", "bias", "y"])
def test_in_place_refuses_gradients(fuselage, device, op, name):
    inputs = op.inputs((6, 8), torch.float32, device)
    if name not in inputs:
        return
    inputs[name].requires_grad_()
    check_refused(fuselage, op, inputs, rf"fuselage::{op.name}_: .*no gradient")
    with torch.no_grad():
        inplace(fuselage, op, inputs, {})


@each_op
def test_in_place_is_noticed_by_autograd(fuselage, device, op):
    inputs = op.inputs((6, 8), torch.float32, device)
    product = inputs["x"] * torch.ones(6, 8, device=device, requires_grad=True)
    inplace(fuselage, op, inputs, {})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.long
@each_op
def test_in_place_compiles(fuselage, device, op):
    names = tuple(op.inputs((2, 8), torch.float32, device))

    def step(*values):
        inputs = dict(zip(names, values, strict=True))
        inputs["x"] = inputs["x"] * 2
        return inplace(fuselage, op, inputs, {}) + 1

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
        for batch in (4, 9):
            inputs = op.inputs((batch, 64), torch.float32, device).values()
            with torch.no_grad():
                assert_same_bits(compiled(*inputs), step(*inputs), backend)
