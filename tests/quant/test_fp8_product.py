"""The ops that Fp8Linear calls: products of few rows, and a linear layer in one call."""

from __future__ import annotations

import importlib

import pytest
import torch
from harness import assert_same_bits, each_dtype, normal
from torch import nn

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_recipe = pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
SIZES = [(16, 16), (48, 80), (384, 256), (256, 1040), (32, 4096), (272, 2176)]  # out, dim


@pytest.fixture
def products(fuselage):
    return importlib.import_module(f"{fuselage.__name__}._fp8")


@pytest.fixture
def ops(products):
    return products.ops


def inputs(fuselage, products, rows, out, dim, device, recipe, lead=None):
    """q, scale, weight, weight_scale: of numbers whose rows are of different sizes."""
    x = normal((*((rows,) if lead is None else lead), dim), torch.float32, device)
    x *= torch.arange(1, x.numel() // dim + 1, device=device).view(*x.shape[:-1], 1)
    weight = normal((out, dim), torch.float32, device)
    weight *= torch.linspace(0.1, 3, out, device=device)[:, None]
    q, scale = products.quantize_rows(x, recipe == "blockwise")
    return q, scale, *products.quantize_weight(weight, recipe)


def exact(q, scale, weight, weight_scale, bias=None):
    """The product in float64, and the sizes of what is added up."""
    if weight_scale.shape != (weight.shape[0], 1):
        scale = scale.repeat_interleave(128, -1)[..., : q.shape[-1]]
        blocks = weight_scale.repeat_interleave(128, 0)[: weight.shape[0]]
        weight_scale = blocks.repeat_interleave(128, 1)[:, : weight.shape[1]]
    x, w = q.double() * scale.double(), weight.double() * weight_scale.double()
    extra = 0 if bias is None else bias.double()
    return x @ w.T + extra, x.abs() @ w.abs().T + abs(extra)


@each_recipe
@pytest.mark.parametrize(("out", "dim"), SIZES)
def test_against_float64(fuselage, products, ops, device, recipe, out, dim):
    for rows in (1, 3, 8, 9, 16):
        given = inputs(fuselage, products, rows, out, dim, device, recipe)
        for bias_dtype in (None, *DTYPES):
            bias = None if bias_dtype is None else normal((out,), bias_dtype, device) * 10
            expected, terms = exact(*given, bias)
            for dtype in DTYPES:
                y = ops.fp8_product(*given, bias, dtype)
                assert y.dtype == dtype and y.shape == (rows, out) and y.is_contiguous()
                # Sums in float32, of which tensor cores cut off what is past 24 bits; float16
                # ends at 65504.
                bound = 2**-20 * terms + torch.finfo(dtype).eps / 2 * expected.abs()
                held = expected.abs() < torch.finfo(dtype).max / 2
                assert ((y.double() - expected).abs() <= bound)[held].all()


@pytest.mark.kernels_ci
@each_recipe
def test_leading_dimensions_and_layouts_of_scales(fuselage, products, ops, device, recipe):
    for lead in ((2, 3), (1, 1, 4), ()):
        q, scale, *weight = inputs(fuselage, products, 0, 32, 272, device, recipe, lead)
        y = ops.fp8_product(q, scale, *weight, None, torch.float32)
        assert y.shape == (*lead, 32)
        for other in (scale.contiguous(), torch.stack((scale, scale), -1)[..., 0]):
            assert_same_bits(ops.fp8_product(q, other, *weight, None, torch.float32), y, "y")


@pytest.mark.kernels_ci
@each_recipe
def test_a_row_does_not_depend_on_the_others(fuselage, products, ops, device, recipe):
    q, scale, *weight = inputs(fuselage, products, 16, 48, 1168, device, recipe)
    whole = ops.fp8_product(q, scale, *weight, None, torch.float32)
    for begin, end in ((0, 1), (15, 16), (2, 10), (0, 9)):
        part = ops.fp8_product(q[begin:end], scale[begin:end], *weight, None, torch.float32)
        assert_same_bits(part, whole[begin:end], f"rows {begin} to {end}")


@pytest.mark.parametrize("moved", [0, 1])
def test_codes_that_begin_anywhere(fuselage, products, ops, device, moved):
    given = list(inputs(fuselage, products, 5, 48, 272, device, "rowwise"))
    expected = ops.fp8_product(*given, None, torch.float32)
    codes = given[2 * moved].view(torch.uint8).flatten()
    shifted = torch.cat((codes.new_zeros(1), codes))[1:].view(E4M3)
    given[2 * moved] = shifted.view(given[2 * moved].shape)
    assert given[2 * moved].data_ptr() % 16 == 1
    assert_same_bits(ops.fp8_product(*given, None, torch.float32), expected, "y")


@each_recipe
def test_nan_and_the_largest_codes(fuselage, products, ops, device, recipe):
    q, scale, weight, weight_scale = inputs(fuselage, products, 3, 32, 384, device, recipe)
    codes = q.view(torch.uint8)
    codes[0, 200] = 0x7F
    codes[2] = 0x7E  # 448
    weight.view(torch.uint8)[5] = 0xFE
    y = ops.fp8_product(q, scale, weight, weight_scale, None, torch.float32)
    assert y[0].isnan().all() and not y[1:].isnan().any()
    expected, terms = exact(q[1:], scale[1:], weight, weight_scale)
    assert ((y[1:].double() - expected).abs() <= 2**-20 * terms).all()


def test_every_code_is_its_value(fuselage, products, ops, device):
    """Each by itself, on either side."""
    codes = torch.arange(256, device=device, dtype=torch.uint8)
    values = codes.view(E4M3).float()
    one = torch.ones(16, 1, device=device)
    left = torch.zeros(16, 256, device=device, dtype=torch.uint8)
    left[:, ::16] = 0x38  # 1.0
    for first in range(0, 256, 16):
        weight = torch.zeros(16, 256, device=device, dtype=torch.uint8)
        weight.diagonal().copy_(codes[first : first + 16])
        unit = torch.zeros(16, 256, device=device, dtype=torch.uint8)
        unit.diagonal().fill_(0x38)
        expected = torch.diag(values[first : first + 16])
        for a, b in ((unit, weight), (weight, unit)):
            y = ops.fp8_product(a.view(E4M3), one, b.view(E4M3), one, None, torch.float32)
            assert torch.equal(y.diagonal().nan_to_num(7777), expected.diagonal().nan_to_num(7777))


@each_recipe
@each_dtype
@pytest.mark.parametrize("lead", [(1,), (2, 3), (16,), ()])
def test_a_linear_layer_in_one_call(fuselage, products, ops, device, recipe, dtype, lead):
    _, _, *weight = inputs(fuselage, products, 1, 48, 272, device, recipe)
    bias = normal((48,), dtype, device)
    rows = normal((*lead, 2 * 272), dtype, device)
    for x in (rows[..., :272], rows[..., 272:]):  # with gaps between rows
        y, q, scale = ops.fp8_linear(x, *weight, bias, True, dtype)
        expected = products.quantize_rows(x, recipe == "blockwise")
        assert_same_bits(q.view(torch.uint8), expected.q.view(torch.uint8), "q")
        assert_same_bits(scale, expected.scale, "scale")
        assert_same_bits(y, ops.fp8_product(*expected, *weight, bias, dtype), "y")


@each_recipe
def test_modules_use_them(fuselage, products, device, recipe):
    """Eager and compiled, of tensors and of what was quantised: the same bits."""
    torch._dynamo.reset()
    linear = nn.Linear(256, 384, device=device, dtype=torch.bfloat16).requires_grad_(False)
    module = fuselage.modules.Fp8Linear.from_linear(linear, recipe=recipe)
    assert module.has_kernel
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for rows in (1, 9, 16):
        x = normal((rows, 256), torch.bfloat16, device)
        with torch.profiler.profile() as profile:
            y = module(x)
        assert any("fp8_linear" in event.name for event in profile.events())
        quantized = products.quantize_rows(x, recipe == "blockwise")
        with torch.profiler.profile() as profile:
            assert_same_bits(module(quantized), y, "of (q, scale)")
        assert any("fp8_product" in event.name for event in profile.events())
        assert_same_bits(compiled(x), y, "compiled")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_are_pytorchs_product(fuselage, products, ops, device, bias):
    linear = nn.Linear(256, 384, bias, device=device, dtype=torch.bfloat16).requires_grad_(False)
    module = fuselage.modules.Fp8Linear.from_linear(linear)
    if module.emulated_because is not None:
        pytest.skip("no float8 products")
    tensors = (module.weight, module.weight_scale, module.bias)
    for lead in ((17,), (2, 3, 50), (1000,)):
        x = normal((*lead, 256), torch.bfloat16, device)
        expected = products.product(
            *products.quantize_rows(x, False), *tensors, x.dtype, "rowwise", True, False
        )
        y, _, _ = ops.fp8_linear(x, *tensors, True, x.dtype)
        assert_same_bits(y, expected, "y")
        assert_same_bits(module(x), expected, "the module's")


def test_refusals(fuselage, products, ops, device):
    q, scale, weight, weight_scale = inputs(fuselage, products, 17, 32, 64, device, "rowwise")
    few = (q[:16], scale[:16])
    tensors = (weight, weight_scale, None)

    def refuses(message, op, *given):
        with pytest.raises(RuntimeError, match=f"fuselage::{op}: {message}"):
            getattr(ops, op)(*given)

    half = torch.bfloat16
    refuses("`q` must have at most 16 rows", "fp8_product", q, scale, *tensors, half)
    refuses("`q` must be float8_e4m3fn", "fp8_product", q.float(), scale, *tensors, half)
    refuses("`q` must have 64 columns", "fp8_product", q[:4, :32].clone(), *few[1:], *tensors, half)
    refuses("`scale` must be float32 with 16 x 1", "fp8_product", few[0], scale, *tensors, half)
    refuses("`dtype` must be float16", "fp8_product", *few, *tensors, torch.int32)
    odd = (weight[:20], weight_scale[:20], None)
    refuses("both sizes of `weight` must be multiples of 16", "fp8_product", *few, *odd, half)
    short = (weight, weight_scale[:31], None)
    refuses("`weight_scale` must be float32 with 1 x 1", "fp8_product", *few, *short, half)
    bias = torch.zeros(31, device=device)
    refuses(
        r"`bias` must be contiguous, of shape \[32\]", "fp8_product", *few, *tensors[:2], bias, half
    )
    x = normal((17, 64), half, device)
    refuses("more than 16 rows need scales of rows", "fp8_linear", x, *tensors, True, torch.float16)
    refuses("`x` must have 64 columns", "fp8_linear", x[:, :32], *tensors, True, half)


@each_recipe
def test_fake_kernels(fuselage, products, ops, device, recipe):
    given = inputs(fuselage, products, 4, 32, 272, device, recipe)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x = normal((4, 272), torch.bfloat16, device)
    for op, arguments in (
        (ops.fp8_product, (*given, None, torch.bfloat16)),
        (ops.fp8_linear, (x, *given[2:], None, True, torch.bfloat16)),
    ):
        # NOTE: test_schema adds to float8 tensors, which PyTorch cannot.
        torch.library.opcheck(op.default, arguments, test_utils=checks)
