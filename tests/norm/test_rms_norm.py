"""rms_norm: the roundings and options that its docstring promises."""

from __future__ import annotations

from itertools import product

import eager
import pytest
import torch
from harness import (
    DTYPES,
    HALVES,
    TIES,
    Style,
    assert_same_bits,
    check_gradients,
    check_values,
    each_dtype,
    normal,
    on_devices,
)
from operators import FUSED_ADD_RMS_NORM, RMS_NORM


def every_option():
    """(dtype, weight dtype, weight_offset, cast_before_weight, out_dtype) that is allowed."""
    for dtype in DTYPES:
        weights = (None, dtype) if dtype == torch.float32 else (None, dtype, torch.float32)
        outs = (None, *DTYPES) if dtype == torch.float32 else (None, dtype, torch.float32)
        yield from product((dtype,), weights, (0.0, 1.0), (False, True), outs)


@pytest.mark.parametrize("op", [RMS_NORM, FUSED_ADD_RMS_NORM], ids=lambda op: op.name)
@on_devices((100,), (100, 129, 4096, 5120, 65536, 262145))
def test_every_combination_of_options(fuselage, device, op, dim):
    for dtype, weight_dtype, offset, cast, out_dtype in every_option():
        options = {"weight_offset": offset, "cast_before_weight": cast, "out_dtype": out_dtype}
        style = Style({"weight": weight_dtype})
        inputs = op.make_inputs((9, dim), dtype, device, **style.inputs, **options)
        check_values(op, fuselage, inputs, options)
        check_gradients(op, fuselage, inputs, options)


# Rows off a 16-byte boundary pass through the shared memory of a GPU: here with a little less than
# the 48 KB that a block has without asking, backward (of 1000 rows) and forward (with a residual).
@pytest.mark.parametrize("op", [RMS_NORM, FUSED_ADD_RMS_NORM], ids=lambda op: op.name)
@each_dtype
@pytest.mark.parametrize(
    ("rows", "dim"),
    [
        (1000, 65),
        (1000, 129),
        (1000, 201),
        (1000, 255),
        (5, 5849),
        (5, 6101),
        (5, 11697),
        (5, 12271),
    ],
)
def test_just_below_48_kilobytes_of_shared_memory(fuselage, device, op, dtype, rows, dim):
    inputs = op.inputs((rows, dim), dtype, device)
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
def test_llama_style_rounds_twice(fuselage, device, dtype):
    """Bit for bit the formula of LlamaRMSNorm, which rounding once is not."""
    inputs = RMS_NORM.inputs((64, 1000), dtype, device)
    llama = eager.rms_norm(**inputs, cast_before_weight=True)
    twice = fuselage.rms_norm(**inputs, cast_before_weight=True)
    once = fuselage.rms_norm(**inputs)
    assert (twice != llama).float().mean() < TIES[dtype]
    assert (once != llama).float().mean() > 0.05


def test_the_defaults(fuselage, device):
    inputs = RMS_NORM.inputs((5, 64), torch.bfloat16, device)
    spelled_out = fuselage.rms_norm(
        inputs["x"],
        inputs["weight"],
        1e-6,
        weight_offset=0.0,
        cast_before_weight=False,
        out_dtype=torch.bfloat16,
    )
    assert_same_bits(fuselage.rms_norm(inputs["x"], inputs["weight"]), spelled_out, "out")
    ones = torch.ones(64, device=device, dtype=torch.bfloat16)
    expected = fuselage.rms_norm(inputs["x"], ones)
    assert_same_bits(fuselage.rms_norm(inputs["x"]), expected, "without a weight")
    unused = fuselage.rms_norm(inputs["x"], weight_offset=3.0)
    assert_same_bits(unused, expected, "weight_offset without a weight")


@each_dtype
def test_like_torch(fuselage, device, dtype):
    inputs = RMS_NORM.inputs((33, 640), dtype, device)
    expected = torch.nn.functional.rms_norm(
        inputs["x"].float(), (640,), inputs["weight"].float(), 1e-5
    )
    actual = fuselage.rms_norm(**inputs, eps=1e-5)
    torch.testing.assert_close(actual, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("op", [RMS_NORM, FUSED_ADD_RMS_NORM], ids=lambda op: op.name)
def test_a_wrong_out_dtype(fuselage, device, op):
    for dtype, wrong, got in (
        (torch.float32, torch.float64, "Double"),
        (torch.float32, torch.int8, "Char"),
        (torch.float16, torch.bfloat16, "BFloat16"),
        (torch.bfloat16, torch.float16, "Half"),
    ):
        for requires_grad in (False, True):
            inputs = op.inputs((3, 8), dtype, device)
            inputs["x"].requires_grad_(requires_grad)
            message = rf"fuselage::{op.name}: `out_dtype` must be {str(dtype)[6:]}.*got {got}"
            with pytest.raises(RuntimeError, match=message):
                op.run(fuselage, inputs, {"out_dtype": wrong})


# The ops behind it


@on_devices((100, 4097), (100, 4097, 12288, 65536))
def test_saved_statistics(fuselage, device, dim):
    x = normal((7, 3, dim), torch.bfloat16, device)
    out, rstd = fuselage.norm.ops.rms_norm_fwd(x, None, 1e-6, 0.0, False, None)
    assert rstd.dtype == torch.float32 and rstd.shape == (21,)
    expected = torch.rsqrt(x.double().pow(2).mean(-1) + 1e-6).flatten()
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)
    assert_same_bits(out, fuselage.rms_norm(x), "with and without statistics")


@pytest.mark.parametrize(
    ("needs_x", "needs_weight"), [(True, False), (False, True), (False, False)]
)
def test_backward_makes_only_what_is_needed(fuselage, device, needs_x, needs_weight):
    inputs = RMS_NORM.inputs((6, 64), torch.bfloat16, device)
    rstd = torch.ones(6, device=device)
    grad_out = torch.ones_like(inputs["x"])
    arguments = (grad_out, None, inputs["x"], inputs["weight"], rstd, 0.0)
    both = fuselage.norm.ops.rms_norm_bwd(*arguments, True, True)
    some = fuselage.norm.ops.rms_norm_bwd(*arguments, needs_x, needs_weight)
    for needed, alone, together in zip((needs_x, needs_weight), some, both, strict=True):
        if needed:
            assert_same_bits(alone, together, "gradient")
        else:
            assert alone.numel() == 0


@pytest.mark.kernels_ci
def test_backward_checks_its_arguments(fuselage, device):
    inputs = RMS_NORM.inputs((6, 64), torch.bfloat16, device)
    rstd = torch.ones(6, device=device)
    good = [inputs["x"], None, inputs["x"], inputs["weight"], rstd, 0.0, True, True]
    fuselage.norm.ops.rms_norm_bwd(*good)
    for index, name, wrong in (
        (0, "grad_out", inputs["x"][:5]),
        (0, "grad_out", inputs["x"].double()),
        (0, "out_dtype|grad_out", inputs["x"].half()),
        (1, "residual|grad_new_residual", inputs["x"][:5]),
        (1, "residual|grad_new_residual", inputs["x"].float()),
        (2, "x", inputs["x"].double()),
        (3, "weight", inputs["weight"][:3]),
        (3, "weight", inputs["weight"].half()),
        (4, "rstd", rstd[:5]),
        (4, "rstd", rstd.half()),
        (4, "rstd", rstd.repeat(2)[::2]),
    ):
        bad = [*good[:index], wrong, *good[index + 1 :]]
        with pytest.raises(RuntimeError, match=rf"fuselage::rms_norm_bwd: `({name})`"):
            fuselage.norm.ops.rms_norm_bwd(*bad)


# Alignment


def moved(t: torch.Tensor, start: int) -> torch.Tensor:
    """`t`, `start` elements behind where an allocation begins."""
    return torch.cat([t.new_zeros(start), t.flatten()])[start:].view(t.shape)


def with_gradients(fuselage, x, weight, grad_out, out_dtype) -> dict:
    leaves = {"x": x.detach().requires_grad_(), "weight": weight.detach().requires_grad_()}
    out = fuselage.rms_norm(**leaves, out_dtype=out_dtype)
    out.backward(grad_out)
    return {"out": out.detach(), **{f"grad_{name}": t.grad for name, t in leaves.items()}}


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@on_devices((96, 1000, 5120), (96, 1000, 5120, 8192))
def test_bits_wherever_a_tensor_begins(fuselage, device, out_dtype, dim):
    """But for the one exception of docs/design-decisions.md, which is as accurate."""
    x = normal((924, dim), torch.float16, device)
    weight = normal((dim,), torch.float16, device)
    grad_out = normal((924, dim), out_dtype, device)
    expected = with_gradients(fuselage, x, weight, grad_out, out_dtype)
    # What both have room for in an H200's shared memory, less may not be in another's.
    room = device == "cpu" or torch.cuda.get_device_capability() == (9, 0)
    for start in (1, 8, 13):
        for of_grad_out in (0, start):
            args = (moved(x, start), weight, moved(grad_out, of_grad_out), out_dtype)
            actual = with_gradients(fuselage, *args)
            if device == "cuda" and (out_dtype == torch.float32 or not room):
                actual.pop("grad_weight")
            for name, value in actual.items():
                assert_same_bits(value, expected[name], f"{name}, {start} elements off")
    if device == "cuda" and out_dtype == torch.float32:
        inputs = {"x": moved(x, 13), "weight": weight}
        options = {"out_dtype": out_dtype}
        check_gradients(RMS_NORM, fuselage, inputs, options, grad_outs={"out": grad_out})
