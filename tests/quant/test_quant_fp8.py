"""quant_fp8: the bits of the formula in PyTorch, and what is promised besides."""

from __future__ import annotations

import math

import pytest
import quant_reference as reference
import torch
from harness import (
    LAYOUTS,
    assert_same_bits,
    captured_by_a_graph,
    each_dtype,
    normal,
    on_devices,
    rows_in_layout,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FORMATS = (E4M3, E5M2, INT8)
INF, NAN = math.inf, math.nan

DIMS = (1, 2, 7, 8, 15, 16, 64, 100, 127, 128, 129, 255, 256, 264, 1000, 1024, 2880, 4096, 5000)
DIMS += (257, 1031, 4099)  # rows that start anywhere, of several vectors a thread
CI_DIMS = (7, 128, 264, 1024)

STYLES = {
    "rows": {},
    "rows e5m2": {"dtype": E5M2},
    "rows int8": {"dtype": INT8},
    "rows ue8m0": {"scale_ue8m0": True},
    "groups": {"group_size": 128},
    "groups ue8m0": {"group_size": 128, "scale_ue8m0": True},
    "groups tma": {"group_size": 128, "scale_layout": "col_tma"},
    "groups tma int8": {"group_size": 128, "scale_layout": "col_tma", "dtype": INT8},
    "given": {"scale": 0.013},
    "given e5m2": {"scale": 3.1e-5, "dtype": E5M2},
    "given int8": {"scale": 0.03, "dtype": INT8},
}
each_style = pytest.mark.parametrize("style", STYLES)


def options_of(style: str, device) -> dict:
    options = dict(STYLES[style])
    if "scale" in options:
        options["scale"] = torch.tensor([options["scale"]], device=device)
    return options


def check(fuselage, x: Tensor, **options) -> tuple[Tensor, Tensor]:
    """q and scales have the bits of the formula."""
    found = fuselage.quant_fp8(x, **options)
    assert type(found).__name__ == "Quantized" and found._fields == ("q", "scale")
    layout = options.pop("scale_layout", "row")
    q, scale = reference.quant_fp8(x, **options)
    assert found.q.dtype == q.dtype and found.q.is_contiguous() and found.q.device == x.device
    assert found.scale.dtype == torch.float32 and found.scale.shape == scale.shape
    if layout == "row":
        assert found.scale.is_contiguous()
    elif x.numel() > 0:
        rows = math.prod(x.shape[:-1])
        assert found.scale.stride(-1) == (rows + 3) // 4 * 4
        assert found.scale.flatten(0, -2).stride(0) == 1 if x.dim() > 1 else True
    same = (found.scale == scale) | (found.scale.isnan() & scale.isnan())
    assert same.all(), f"scales: {found.scale[~same][0].item()} and {scale[~same][0].item()}"
    different = reference.bits(found.q) != reference.bits(q)
    assert not different.any(), (
        f"q: {different.sum().item()} of {q.numel()} differ, "
        f"{found.q[different][0].item()} and {q[different][0].item()}"
    )
    return found


@each_dtype
@each_style
@pytest.mark.parametrize("dim", DIMS)
def test_values(fuselage, device, dtype, style, dim):
    x = normal((3, 5, dim), dtype, device, scale=2.0)
    x[0, 1] = 0
    check(fuselage, x, **options_of(style, device))


@pytest.mark.kernels_ci
@each_style
@pytest.mark.parametrize("dim", CI_DIMS)
def test_values_in_half_precision(fuselage, device, style, dim):
    check(fuselage, normal((9, dim), torch.bfloat16, device), **options_of(style, device))


@each_style
@pytest.mark.parametrize("dim", [8192, 16384, 20000, 32776, 40001, 131072, 262144])
def test_long_rows(fuselage, device, style, dim):
    dtype = torch.float32 if dim % 3 else torch.bfloat16
    check(fuselage, normal((3, dim), dtype, device), **options_of(style, device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_every_half_precision_number(fuselage, device, format):
    """All 65536 of each, with scales of 1 and others: the rounding and the saturation."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(1 << 16, device=device).to(torch.uint16).view(dtype)
        for scale in (1.0, 0.25, 1.5, 3e-5, 1e-38, 1e-45, 7e20, 2e38, INF, NAN):
            given = torch.tensor(scale, device=device)
            check(fuselage, every, scale=given, dtype=format)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("format", FORMATS)
def test_halfway_between_two(fuselage, device, format):
    """x / scale exactly between two numbers, and a bit beside it: to the even one."""
    codes = torch.arange(127, device=device).to(torch.uint8)
    numbers = codes.view(format).float()
    numbers = numbers[numbers.isfinite()]
    between = (numbers[1:] + numbers[:-1]) / 2
    for scale in (1.0, 3.0, 0.001, 0.7346):
        given = torch.tensor([scale], device=device)
        x = between * given
        around = [x, x.nextafter(x + 1), x.nextafter(x - 1)]
        check(fuselage, torch.cat([*around, *(-t for t in around)]), scale=given, dtype=format)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group_size", [-1, 128])
@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-37, 1e-30, 1e-20, 1.0, 1e20, 3e38])
def test_rows_of_any_size(fuselage, device, format, group_size, size):
    """Subnormal and huge rows: quotients neither overflow nor lose bits on the way."""
    x = torch.rand(64, 512, device=device).mul_(2).sub_(1).mul_(size)
    x[:, ::7] *= 1e-3
    x[3, 100:] = -0.0
    for scale_ue8m0 in (False, True):
        options = {"group_size": group_size, "dtype": format, "scale_ue8m0": scale_ue8m0}
        check(fuselage, x, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quotients_are_rounded_once(fuselage, device, dtype):
    """Rows of which most quotients are close to a boundary, with random scales."""
    rows, dim = 2000, 1024
    amax = torch.rand(rows, 1, device=device) * 3 + 0.5
    codes = torch.randint(1, 126, (rows, dim), device=device).to(torch.uint8)
    numbers = codes.view(E4M3).float()
    between = (numbers + (codes + 1).view(E4M3).float()) / 2
    x = between * (amax / torch.full_like(amax, 448.0))
    nudge = torch.randint(-2, 3, x.shape, device=device, dtype=torch.int32)
    x = (x.view(torch.int32) + nudge).view(torch.float32)
    x = x.clamp(max=amax)
    x[:, :1] = amax
    check(fuselage, x.to(dtype))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_largest_value_of_half_precision(fuselage, device, dtype):
    """Rows of each mantissa of amax, with the numbers next to each boundary between two codes."""
    amax = torch.arange(1, 2, torch.finfo(dtype).eps, device=device)[:, None] * 2**14
    codes = torch.arange(126, device=device).to(torch.uint8)
    between = (codes.view(E4M3).float() + (codes + 1).view(E4M3).float()) / 2
    nearest = (between * amax / 448).to(dtype).view(torch.int16)
    x = torch.cat([amax.to(dtype), *((nearest + k).view(dtype) for k in (-1, 0, 1))], -1)
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))  # aligned rows
    for signed in (x, -x):
        check(fuselage, signed)
        check(fuselage, signed, scale_ue8m0=True)


SPECIAL = {
    "a NaN": [1.0, NAN, -3.0, 2.0],
    "a negative NaN": [1.0, -NAN, -3.0, 2.0],
    "infinity": [1.0, INF, -3.0, 2.0],
    "both infinities": [-INF, INF, 0.0, -0.0],
    "infinity and NaN": [INF, 1.0, NAN, -2.0],
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "the smallest": [1e-45, -1e-45, 0.0, 1e-45],
    "the largest": [3.4e38, -3.4e38, 0.0, 1.0],
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("special", SPECIAL)
@each_style
def test_special_values(fuselage, device, special, style):
    """As the formula has them: in the row or group, and nowhere else."""
    for copies in (1, 64, 1024, 10_000):
        x = torch.tensor(SPECIAL[special] * copies, device=device)
        rows = torch.stack((torch.ones_like(x), x, torch.full_like(x, -2.0)))
        rows[2, -1] = x[0]
        check(fuselage, rows, **options_of(style, device))


@pytest.mark.kernels_ci
def test_documented_values(fuselage, device):
    nan, inf, zeros = (
        fuselage.quant_fp8(torch.tensor(values, device=device))
        for values in ([1.0, NAN, 2.0], [1.0, INF, 2.0], [0.0, 0.0, 0.0])
    )
    assert nan.scale.isnan().all() and nan.q.float().isnan().all()
    assert inf.scale.tolist() == [INF] and inf.q.float()[::2].tolist() == [0.0, 0.0]
    assert inf.q.float()[1].isnan()
    assert zeros.scale.tolist() == [1.0] and not zeros.q.float().any()
    given = torch.ones(1, device=device)
    x = torch.tensor([INF, -INF, NAN, 1000.0], device=device)
    found = fuselage.quant_fp8(x, scale=given)
    assert found.q.float().nan_to_num(nan=7.0).tolist() == [448.0, -448.0, 7.0, 448.0]
    assert found.scale is given


@pytest.mark.kernels_ci
@pytest.mark.parametrize("group_size", [-1, 128])
@each_dtype
def test_the_error_is_that_of_rounding(fuselage, device, dtype, group_size):
    """Against float64: half of the last of four bits, or of the smallest number of e4m3."""
    x = normal((64, 512), dtype, device)
    q, scale = fuselage.quant_fp8(x, group_size=group_size)
    scale = scale.double()
    if group_size != -1:
        scale = scale.repeat_interleave(group_size, -1)
    error = (q.double() * scale - x.double()).abs()
    bound = torch.maximum(x.double().abs() / 16, scale * 2.0**-10) * (1 + 1e-6)
    assert (error <= bound).all()


@pytest.mark.slow
@on_devices([(3000, 4096)], [(30_000, 4096), (200_000, 264), (100, 131072)])
@pytest.mark.parametrize("style", ["rows", "groups", "groups tma", "given"])
def test_many_rows(fuselage, device, dim, style):
    check(fuselage, normal(dim, torch.bfloat16, device), **options_of(style, device))


@pytest.mark.slow
@on_devices([], [128, 4096])
@pytest.mark.parametrize("style", ["rows", "groups tma", "given"])
def test_more_than_2_31_elements(fuselage, device, dim, style):
    rows = (1 << 31) // dim + 5
    x = torch.zeros(rows, dim, dtype=torch.bfloat16, device=device)
    x[-7:] = normal((7, dim), torch.bfloat16, device)
    found = fuselage.quant_fp8(x, **options_of(style, device))
    expected = fuselage.quant_fp8(x[-7:], **options_of(style, device))
    assert torch.equal(found.q[-7:].view(torch.uint8), expected.q.view(torch.uint8))
    assert style == "given" or torch.equal(found.scale[-7:], expected.scale)


@each_style
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [40, 256, 520, 1031])
def test_layouts_have_the_same_bits(fuselage, device, style, layout, dim):
    x = rows_in_layout(layout, dim, torch.bfloat16, device)
    found = check(fuselage, x, **options_of(style, device))
    expected = fuselage.quant_fp8(x.contiguous(), **options_of(style, device))
    assert_same_bits(found.q.view(torch.uint8), expected.q.view(torch.uint8), "q")


@pytest.mark.kernels_ci
@each_style
@pytest.mark.parametrize("dim", [100, 256, 4096])
def test_rows_do_not_depend_on_the_batch(fuselage, device, style, dim):
    x = normal((67, dim), torch.bfloat16, device)
    options = options_of(style, device)
    whole = fuselage.quant_fp8(x, **options)
    for rows in (slice(0, 1), slice(3, 8), slice(5, 67)):
        found = fuselage.quant_fp8(x[rows], **options)
        assert torch.equal(found.q.view(torch.uint8), whole.q[rows].view(torch.uint8))
        assert "given" in style or torch.equal(found.scale, whole.scale[rows])


@pytest.mark.kernels_ci
@each_style
def test_one_row_and_none(fuselage, device, style):
    options = options_of(style, device)
    check(fuselage, normal((300,), torch.float32, device), **options)
    for shape in ((0, 300), (2, 0, 300), (3, 0), (0, 0), (0,)):
        check(fuselage, torch.empty(shape, device=device), **options)


# Gradients


@pytest.mark.kernels_ci
def test_gradients_are_refused_by_name(fuselage, device):
    x = normal((3, 8), torch.float32, device).requires_grad_()
    with pytest.raises(RuntimeError, match=r"quant_fp8: has no gradient; pass ste=True"):
        fuselage.quant_fp8(x)
    with pytest.raises(RuntimeError, match=r"quant_fp8: `ste` is for float8"):
        fuselage.quant_fp8(x, dtype=INT8, ste=True)
    with torch.no_grad():
        assert not fuselage.quant_fp8(x, ste=True).q.requires_grad
    assert not fuselage.quant_fp8(x.detach(), ste=True).q.requires_grad


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("style", ["rows", "rows e5m2", "groups", "groups tma", "given"])
def test_straight_through(fuselage, device, dtype, style):
    """The gradient of x / scale: the one of q is a float8, whose values here are exact."""
    x = normal((6, 200), dtype, device).requires_grad_()
    options = options_of(style, device)
    q, scale = fuselage.quant_fp8(x, ste=True, **options)
    assert q.requires_grad and not scale.requires_grad
    weights = torch.randint(-4, 5, x.shape, device=device).float()
    (q.float() * weights).sum().backward()
    if "groups" in style:
        scale = scale.repeat_interleave(128, -1)[:, :200]
    assert x.grad.dtype == dtype and torch.equal(x.grad, (weights / scale).to(dtype))
    expected = fuselage.quant_fp8(x.detach(), **options)
    assert torch.equal(q.detach().view(torch.uint8), expected.q.view(torch.uint8))


# What is refused

BAD = [
    ({"x": lambda t: t.double()}, "`x` must be float16, bfloat16 or float32, got Double"),
    ({"x": lambda t: t[0, 0]}, "`x` must have at least one dimension, got a scalar"),
    ({"group_size": 64}, "`group_size` must be -1, for a scale a row, or 128, got 64"),
    ({"group_size": 0}, "`group_size` must be -1, for a scale a row, or 128, got 0"),
    ({"scale_layout": "column"}, "`scale_layout` must be one of row, col_tma, got 'column'"),
    ({"dtype": torch.float16}, "`dtype` must be float8_e4m3fn, float8_e5m2 or int8, got Half"),
    ({"dtype": torch.uint8}, "`dtype` must be float8_e4m3fn, float8_e5m2 or int8, got Byte"),
    ({"scale": lambda _: torch.ones(2)}, "`scale` must have one element, for all rows, got [2]"),
    ({"scale": lambda _: torch.ones(1).half()}, "`scale` must be float32, got Half"),
    (
        {"scale": lambda _: torch.ones(1), "group_size": 128},
        "`scale` is one for all rows, and `group_size`, `scale_layout` and `scale_ue8m0` are for",
    ),
    (
        {"scale": lambda _: torch.ones(1), "scale_ue8m0": True},
        "`scale` is one for all rows, and `group_size`, `scale_layout` and `scale_ue8m0` are for",
    ),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input(fuselage, device, number):
    change, message = BAD[number]
    given = {"x": normal((5, 40), torch.float32, device)}
    for name, value in change.items():
        given[name] = value(given.get(name)) if callable(value) else value
        if isinstance(given[name], Tensor):
            given[name] = given[name].to(device)
    with pytest.raises(RuntimeError) as error:
        fuselage.quant_fp8(**given)
    assert f"fuselage::quant_fp8: {message}" in str(error.value)


# torch.compile, autocast, graphs


@each_style
def test_compiled_without_recompiles(fuselage, device, style):
    options = options_of(style, device)

    def call(x):
        q, scale = fuselage.quant_fp8(x * 2, **options)
        return q.view(torch.uint8), scale * 2

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for rows in (4, 7, 30, 129):
        x = normal((rows, 256), torch.bfloat16, device)
        for eager, other in zip(call(x), compiled(x), strict=True):
            assert_same_bits(other, eager, f"{rows} rows")
    assert counter.frame_count == 1


def test_straight_through_compiled(fuselage, device):
    def call(x):
        q, _ = fuselage.quant_fp8(x, ste=True)
        return (q.float() * 2).sum()

    torch._dynamo.reset()
    x = normal((5, 64), torch.float32, device).requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x), x)
    (expected,) = torch.autograd.grad(call(x), x)
    assert torch.equal(found, expected)


@pytest.mark.kernels_ci
def test_autocast_changes_nothing(fuselage, device):
    x = normal((5, 40), torch.bfloat16, device)
    expected = fuselage.quant_fp8(x)
    with torch.autocast(device, dtype=torch.float16):
        found = fuselage.quant_fp8(x)
    assert torch.equal(found.q.view(torch.uint8), expected.q.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@each_style
def test_in_a_graph(fuselage, device, style):
    x = normal((64, 4096), torch.bfloat16, device)
    options = options_of(style, device)
    graph, captured = captured_by_a_graph(lambda: fuselage.quant_fp8(x, **options))
    x.copy_(normal((64, 4096), torch.bfloat16, device))
    graph.replay()
    expected = fuselage.quant_fp8(x, **options)
    assert torch.equal(captured[0].view(torch.uint8), expected.q.view(torch.uint8))
    assert torch.equal(captured[1], expected.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@each_style
@each_dtype
def test_the_same_bits_on_both_devices(fuselage, device, style, dtype):
    x = normal((33, 1000), dtype, device)
    found = fuselage.quant_fp8(x, **options_of(style, device))
    expected = fuselage.quant_fp8(x.cpu(), **options_of(style, "cpu"))
    assert torch.equal(found.q.cpu().view(torch.uint8), expected.q.view(torch.uint8))
    assert torch.equal(found.scale.cpu(), expected.scale)
