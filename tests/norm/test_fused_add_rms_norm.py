"""fused_add_rms_norm: the sum it returns, and the form that writes over its inputs."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits, each_dtype, each_operator, normal, on_devices
from operators import FUSED_ADD_RMS_NORM

OP = FUSED_ADD_RMS_NORM
STYLES = [style for style in OP.styles if "out_dtype" not in OP.options(style)]


def inplace(fuselage, inputs: dict, options: dict) -> dict:
    """Runs the in-place form on clones of the same layout and returns what they hold after."""
    held = {name: t if t is None else like(t) for name, t in inputs.items()}
    returned = fuselage.fused_add_rms_norm_(**held, **options)
    assert returned[0] is held["x"] and returned[1] is held["residual"]
    return {"out": held["x"], "new_residual": held["residual"]}


def like(t: torch.Tensor) -> torch.Tensor:
    """A copy with the strides and the alignment of `t`."""
    size = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    offset = t.storage_offset() % 16
    buffer = torch.zeros(offset + size, dtype=t.dtype, device=t.device)
    return buffer.as_strided(t.shape, t.stride(), offset).copy_(t)


@pytest.mark.kernels_ci
@each_dtype
@on_devices((1, 7, 96, 4096), (1, 7, 96, 4096, 4097, 16384, 65536))
def test_is_an_addition_and_a_norm(fuselage, device, dtype, dim):
    """Bit for bit, as the docstring says."""
    inputs = OP.inputs((19, dim), dtype, device)
    for options in ({}, {"cast_before_weight": True}, {"weight_offset": 1.0, "eps": 1e-3}):
        out, new_residual = fuselage.fused_add_rms_norm(**inputs, **options)
        expected = inputs["x"] + inputs["residual"]
        assert_same_bits(new_residual, expected, "new_residual")
        norm = fuselage.rms_norm(expected, inputs["weight"], **options)
        assert_same_bits(out, norm, "out")


def test_gradients_of_x_and_residual_are_not_one_tensor(fuselage, device):
    """Accumulating into one .grad must not change the other."""
    inputs = {
        name: t.requires_grad_() for name, t in OP.inputs((5, 64), torch.float32, device).items()
    }
    fuselage.fused_add_rms_norm(**inputs)[0].sum().backward()
    x, residual = inputs["x"].grad, inputs["residual"].grad
    assert_same_bits(x, residual, "gradients")
    kept = residual.clone()
    x.zero_()
    assert_same_bits(residual, kept, "gradient of residual")


# In place


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("style", STYLES)
@on_devices((1, 7, 96, 4096), (1, 7, 96, 1000, 4096, 4097, 16384, 65536, 262144))
def test_in_place_has_the_bits_of_the_functional_form(fuselage, device, dtype, style, dim):
    inputs = OP.inputs((19, dim), dtype, device, style)
    expected = OP.run(fuselage, inputs, OP.options(style))
    for name, value in inplace(fuselage, inputs, OP.options(style)).items():
        assert_same_bits(value, expected[name], name)


@pytest.mark.parametrize("names", [("x",), ("residual",), ("x", "residual")], ids="-".join)
@pytest.mark.parametrize("wider_by", [3, 8])
@on_devices((7, 96), (7, 96, 4096, 65536))
def test_in_place_on_rows_of_wider_tensors(fuselage, device, names, wider_by, dim):
    inputs = OP.inputs((19, dim), torch.bfloat16, device)
    buffers = {}
    for name in names:
        buffers[name] = normal((19, dim + wider_by), torch.bfloat16, device)
        inputs[name] = buffers[name][:, :dim]
    beside = {name: buffer[:, dim:].clone() for name, buffer in buffers.items()}
    expected = OP.run(fuselage, inputs, {})
    fuselage.fused_add_rms_norm_(**inputs)
    assert_same_bits(inputs["x"], expected["out"], "out")
    assert_same_bits(inputs["residual"], expected["new_residual"], "new_residual")
    for name, buffer in buffers.items():
        assert_same_bits(buffer[:, dim:], beside[name], f"memory beside {name}")


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (2, 1, 3, 8), (0, 8), (3, 0)], ids=str)
def test_in_place_on_every_shape(fuselage, device, shape):
    inputs = OP.inputs(shape, torch.float32, device)
    expected = OP.run(fuselage, inputs, {})
    for name, value in inplace(fuselage, inputs, {}).items():
        assert_same_bits(value, expected[name], name)


def check_refused(fuselage, inputs: dict, match: str, **options) -> None:
    """RuntimeError, and every input is as it was, bit for bit."""
    kept = {name: None if t is None else t.detach().clone() for name, t in inputs.items()}
    with pytest.raises(RuntimeError, match=match):
        fuselage.fused_add_rms_norm_(**inputs, **options)
    for name, value in kept.items():
        if value is not None:
            assert_same_bits(inputs[name].detach(), value, f"{name}, which was refused")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", ["x", "residual"])
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
def test_in_place_refuses_what_it_cannot_write(fuselage, device, name, layout):
    inputs = OP.inputs((6, 8), torch.float32, device)
    inputs[name] = layout(inputs[name])
    check_refused(fuselage, inputs, rf"fuselage::fused_add_rms_norm_: `{name}` is written in place")


@pytest.mark.parametrize(
    "residual_of",
    [
        lambda buffer: buffer[:6],
        lambda buffer: buffer[1:7],
        lambda buffer: buffer.view(-1)[3:51].view(6, 8),
    ],
    ids=["same", "next_rows", "shifted"],
)
def test_in_place_refuses_inputs_that_share_memory(fuselage, device, residual_of):
    buffer = normal((7, 8), torch.float32, device)
    inputs = {"x": buffer[:6], "residual": residual_of(buffer)}
    inputs["weight"] = torch.ones(8, device=device)
    check_refused(fuselage, inputs, r"fuselage::fused_add_rms_norm_: .*(share|overlap|same memory)")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", ["x", "residual"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_in_place_refuses_a_weight_that_it_would_write(fuselage, device, name, dtype):
    inputs = OP.inputs((6, 16), torch.bfloat16, device)
    held = inputs[name].view(dtype).view(-1)
    for start in (0, held.numel() - 16):
        weight = held[start : start + 16]
        check_refused(
            fuselage, {**inputs, "weight": weight}, rf"`{name}` is written .*memory with `weight`"
        )
    # Right beside either end there is nothing in common.
    buffer = normal((8, 16), torch.bfloat16, device)
    for place in (0, 7):
        inputs |= {name: buffer[1:7], "weight": buffer[place]}
        expected = OP.run(fuselage, {n: t.clone() for n, t in inputs.items()}, {})
        fuselage.fused_add_rms_norm_(**inputs)
        assert_same_bits(inputs["x"], expected["out"], "out")


def test_in_place_on_the_halves_of_one_tensor(fuselage, device):
    """Interleaved rows of one buffer, which do not overlap."""
    buffer = normal((6, 2, 8), torch.float32, device)
    x, residual = buffer[:, 0], buffer[:, 1]
    expected = fuselage.fused_add_rms_norm(x.clone(), residual.clone())
    fuselage.fused_add_rms_norm_(x, residual)
    assert_same_bits(x, expected[0], "out")
    assert_same_bits(residual, expected[1], "new_residual")


@pytest.mark.kernels_ci
def test_in_place_writes_nothing_when_refused(fuselage, device):
    for dtype in (torch.float32, torch.bfloat16):
        good = OP.inputs((6, 8), dtype, device)
        x, residual, weight = good.values()
        for wrong, match in (
            ({"weight": weight[:7]}, "`weight` must have shape"),
            ({"weight": weight.double()}, "`weight` must be"),
            ({"residual": residual[:5]}, "`residual` must have the shape"),
            ({"residual": residual.double()}, "`residual` must be"),
            ({"x": x.double()}, "`x` must be"),
            ({"x": x[0, 0]}, "`x` must have"),
        ):
            check_refused(fuselage, {**good, **wrong}, rf"fuselage::fused_add_rms_norm_: {match}")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", ["x", "residual", "weight"])
def test_in_place_refuses_where_a_gradient_is_needed(fuselage, device, name):
    inputs = OP.inputs((6, 8), torch.float32, device)
    inputs[name].requires_grad_()
    check_refused(fuselage, inputs, r"fuselage::fused_add_rms_norm_: .*no gradient.*no_grad")
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            leaves = {n: t.detach().clone().requires_grad_(n == name) for n, t in inputs.items()}
            expected = OP.run(fuselage, inputs, {})
            fuselage.fused_add_rms_norm_(**leaves)
            assert_same_bits(leaves["x"].detach(), expected["out"], "out")
            assert_same_bits(leaves["residual"].detach(), expected["new_residual"], "new_residual")


@pytest.mark.parametrize("name", ["x", "residual"])
def test_in_place_is_noticed_by_autograd(fuselage, device, name):
    """A graph that has saved the old value must not use the new one."""
    inputs = OP.inputs((6, 8), torch.float32, device)
    other = torch.ones(6, 8, device=device, requires_grad=True)
    product = inputs[name] * other
    fuselage.fused_add_rms_norm_(**inputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.long
@each_operator([OP])
def test_in_place_compiles(fuselage, device, op):
    def step(x, residual, weight):
        x = x * 2
        out, new_residual = fuselage.fused_add_rms_norm_(x, residual, weight)
        return out + 1, new_residual

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
        for batch in (4, 9):
            inputs = op.inputs((batch, 64), torch.float32, device)
            clones = {n: t.clone() for n, t in inputs.items()}
            with torch.no_grad():
                expected, actual = step(**inputs), compiled(**clones)
            for eager, traced in zip(expected, actual, strict=True):
                assert_same_bits(traced, eager, f"result with {backend}")
            assert_same_bits(clones["residual"], inputs["residual"], "residual")
            assert_same_bits(clones["x"], inputs["x"], "x")
