"""Operators that quantise their result: the bits of the operator, and of quant_fp8 after it."""

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
from quantising import BY_NAME, FUSED, GEMMA, LLAMA, Fused
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
HALF = torch.bfloat16

STYLES = {
    "rows": {},
    "rows ue8m0": {"scale_ue8m0": True},
    "rows e5m2": {"dtype": E5M2},
    "rows int8": {"dtype": INT8},
    "groups": {"group_size": 128},
    "groups tma": {"group_size": 128, "scale_layout": "col_tma"},
    "given": {"scale": 0.013},
}
each_fused = pytest.mark.parametrize("fused", FUSED, ids=str)
each_style = pytest.mark.parametrize("style", STYLES)


def options_of(style: str, device) -> dict:
    options = dict(STYLES[style])
    if "scale" in options:
        options["scale"] = torch.tensor([options["scale"]], device=device)
    return options


def assert_same_codes(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.is_contiguous()
    different = reference.bits(found) != reference.bits(expected)
    assert not different.any(), (
        f"q: {different.sum().item()} of {expected.numel()} differ, "
        f"{found[different][0].item()} and {expected[different][0].item()}"
    )


def one_nan(t: Tensor) -> Tensor:
    """Of NaN there are many, and a formula leaves open which."""
    return torch.where(t.isnan(), torch.full_like(t, math.nan), t)


def check(fuselage, fused: Fused, given: dict, **options) -> tuple[Tensor, ...]:
    """Bits of one after the other, with and without the result that is quantised."""
    out, *others = fused.apart(fuselage, **given)
    quant = {n: v for n, v in options.items() if n not in ("eps", *LLAMA, *GEMMA)}
    q, scale = fuselage.quant_fp8(out, **quant)
    results = fused.call(fuselage, given, **options)
    whole = fused.call(fuselage, given, return_unquantized=True, **options)
    assert type(results) is tuple and len(results) == 2 + len(others)
    assert len(whole) == 3 + len(others)
    assert_same_bits(one_nan(whole[2]), one_nan(out), "out")
    for found, rest in ((results, results[2:]), (whole, whole[3:])):
        assert_same_codes(found[0], q)
        assert found[1].stride() == scale.stride()
        assert_same_bits(one_nan(found[1]).contiguous(), one_nan(scale).contiguous(), "scale")
        for one, other in zip(rest, others, strict=True):
            assert_same_bits(one_nan(one), one_nan(other), "new_residual")
    return results


def check_all(fuselage, fused: Fused, shape, dtype, device, style) -> None:
    for more in fused.options:
        given = {**fused.inputs(shape, dtype, device), **more}
        check(fuselage, fused, given, **options_of(style, device))


@each_dtype
@each_style
@each_fused
@pytest.mark.parametrize("dim", [1, 7, 40, 128, 264, 1000, 1024, 2880])
def test_bits_of_one_after_the_other(fuselage, device, fused, style, dtype, dim):
    check_all(fuselage, fused, (3, 5, dim), dtype, device, style)


@pytest.mark.kernels_ci
@each_style
@each_fused
@pytest.mark.parametrize("dim", [8, 1024])
def test_bits_in_half_precision(fuselage, device, fused, style, dim):
    check_all(fuselage, fused, (9, dim), HALF, device, style)


@each_fused
@pytest.mark.parametrize("style", ["rows", "groups", "given"])
@pytest.mark.parametrize("dim", [8192, 14336, 16384, 16392, 32768, 32776, 65536])
def test_long_rows(fuselage, device, fused, style, dim):
    check_all(fuselage, fused, (3, dim), HALF, device, style)


@each_style
@each_fused
@pytest.mark.parametrize("dim", [257, 263, 777, 1025, 4097, 16383, 16385, 40001])
def test_rows_of_odd_sizes(fuselage, device, fused, style, dim):
    """Rows that start anywhere: of one kernel where a warp is too small and a block is not."""
    check_all(fuselage, fused, (9, dim), HALF, device, style)


@pytest.mark.parametrize("name", ["layer_norm_quant", "ada_layer_norm_quant"])
@pytest.mark.parametrize("style", ["rows", "groups"])
@pytest.mark.parametrize("dim", [257, 1025, 4101])
def test_what_is_past_the_row_is_no_maximum(fuselage, device, name, style, dim):
    """Of a mean that is far larger than what is left without it."""
    fused = BY_NAME[name]
    given = fused.inputs((9, dim), HALF, device)
    given = (
        {"x": given["x"] + 300} if name == "layer_norm_quant" else given | {"x": given["x"] - 300}
    )
    check(fuselage, fused, given, **options_of(style, device))


@pytest.mark.slow
@each_fused
@pytest.mark.parametrize("style", ["rows", "groups tma"])
@on_devices([(700, 128), (600, 4096)], [(300_000, 128), (40_000, 4096), (30_001, 1152)])
def test_many_rows(fuselage, device, fused, style, dim):
    """More than a GPU holds at once, where a thread has several vectors."""
    check_all(fuselage, fused, dim, HALF, device, style)


@each_style
@each_fused
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [40, 520, 1031])
def test_layouts(fuselage, device, fused, style, layout, dim):
    """Rows anywhere in memory are read in place."""
    given = fused.inputs((3, dim), HALF, device)
    main = "gate" if "gate" in given else "x"
    given = {
        name: rows_in_layout(layout, t.shape[-1], HALF, device) if t.shape[:-1] else t
        for name, t in given.items()
        if name in (main, "residual", "up") or t.dim() == 1
    }
    check(fuselage, fused, given, **options_of(style, device))


@pytest.mark.kernels_ci
@each_fused
def test_vectors_of_float32(fuselage, device, fused):
    given = fused.inputs((6, 264), HALF, device)
    given |= {name: t.float() for name, t in given.items() if t.dim() == 1}
    check(fuselage, fused, given)


@pytest.mark.parametrize("name", ["scale", "shift", "both", "weights", "rows"])
def test_modulations(fuselage, device, name):
    """Scale or shift alone, with weight and bias, and of each row."""
    fused = BY_NAME["ada_layer_norm_quant"]
    given = fused.inputs((2, 5, 264), HALF, device)
    if name == "rows":
        given |= {n: normal((2, 5, 264), HALF, device) for n in ("scale", "shift")}
    elif name == "weights":
        given |= {n: normal((264,), HALF, device) for n in ("weight", "bias")}
    elif name != "both":
        given |= dict.fromkeys({"scale", "shift"} - {name})
    check(fuselage, fused, given)


@each_fused
@pytest.mark.parametrize("group_size", [-1, 128])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf, 3e38, 1e-30])
@pytest.mark.parametrize("dim", [520, 521])
def test_special_values(fuselage, device, fused, group_size, value, dim):
    """As the operator and the formula have them, in their row and nowhere else."""
    given = fused.inputs((4, dim), HALF, device)
    for t in given.values():
        if t.dim() > 1:
            t[1, 300] = value
            t[2] = value
    check(fuselage, fused, given, group_size=group_size)


@pytest.mark.kernels_ci
@each_style
@each_fused
def test_no_rows_and_no_columns(fuselage, device, fused, style):
    for shape in ((0, 264), (2, 0, 264), (3, 0), (0, 0)):
        check(fuselage, fused, fused.inputs(shape, HALF, device), **options_of(style, device))


@each_fused
@pytest.mark.parametrize("style", ["rows", "groups", "given"])
@pytest.mark.parametrize("dim", [100, 256, 4096])
def test_rows_do_not_depend_on_the_batch(fuselage, device, fused, style, dim):
    given, options = fused.inputs((67, dim), HALF, device), options_of(style, device)
    whole = fused.call(fuselage, given, **options)
    for rows in (slice(0, 1), slice(3, 8), slice(5, 67)):
        part = {n: t[rows] if t.dim() > 1 else t for n, t in given.items()}
        found = fused.call(fuselage, part, **options)
        assert_same_codes(found[0], whole[0][rows])
        assert style == "given" or torch.equal(found[1], whole[1][rows])


@pytest.mark.kernels_ci
@each_fused
def test_gradients_are_refused_by_name(fuselage, device, fused):
    given = fused.inputs((3, 16), torch.float32, device)
    for name, t in given.items():
        with pytest.raises(RuntimeError, match=f"fuselage::{fused.name}: has no gradient; detach"):
            fused.call(fuselage, {**given, name: t.clone().requires_grad_()})
        with torch.no_grad():
            fused.call(fuselage, {**given, name: t.clone().requires_grad_()})


BAD = [
    ({"group_size": 64}, "`group_size` must be -1, for a scale a row, or 128, got 64"),
    ({"scale_layout": "column"}, "`scale_layout` must be one of row, col_tma, got 'column'"),
    ({"dtype": torch.float16}, "`dtype` must be float8_e4m3fn, float8_e5m2 or int8, got Half"),
    ({"scale": 2}, "`scale` must have one element, for all rows, got [2]"),
    ({"scale": 1, "group_size": 128}, "`scale` is one for all rows, and `group_size`, `scale_la"),
]


@each_fused
@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_options(fuselage, device, fused, number):
    change, message = BAD[number]
    change = {n: torch.ones(v, device=device) if n == "scale" else v for n, v in change.items()}
    with pytest.raises(RuntimeError) as error:
        fused.call(fuselage, fused.inputs((3, 16), torch.float32, device), **change)
    message = message.replace("`scale`", f"`{fused.scale}`")
    assert f"fuselage::{fused.name}: {message}" in str(error.value)


@pytest.mark.kernels_ci
@each_fused
def test_bad_inputs(fuselage, device, fused):
    given = fused.inputs((3, 16), torch.float32, device)
    main = "gate" if "gate" in given else "x"
    with pytest.raises(RuntimeError, match=f"{fused.name}: `{main}` must be float16, bfloat16 or"):
        fused.call(fuselage, {**given, main: given[main].double()})
    for name in given.keys() - {main}:
        with pytest.raises(RuntimeError, match=f"{fused.name}: `{name}` must have"):
            fused.call(fuselage, {**given, name: given[name][..., :8]})


# torch.compile, autocast, graphs


@pytest.mark.long
@each_style
@each_fused
def test_compiled_without_recompiles(fuselage, device, fused, style):
    options = options_of(style, device)

    def call(given):
        q, *others = fused.call(fuselage, given, return_unquantized=True, **options)
        return [q.view(torch.uint8), *(other * 2 for other in others)]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    frames = (
        set()
    )  # more than one before the first call: eps becomes a symbol, and a constant again
    for rows in (4, 7, 30, 129):
        given = fused.inputs((rows, 256), HALF, device)
        for eager, other in zip(call(given), compiled(given), strict=True):
            assert_same_bits(other, eager, f"{rows} rows")
        frames.add(counter.frame_count)
    assert len(frames) == 1


@pytest.mark.kernels_ci
@each_fused
def test_under_autocast(fuselage, device, fused):
    """Rows of two dtypes get the wider one; one dtype stays as it is."""
    given = fused.inputs((5, 40), HALF, device)
    expected = fused.call(fuselage, given)
    with torch.autocast(device, dtype=torch.float16):
        found = fused.call(fuselage, given)
    assert_same_codes(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    other = next((n for n in ("residual", "up") if n in given), None)
    if other is not None:
        mixed = {**given, other: given[other].float()}
        with torch.autocast(device, dtype=torch.float16):
            found = fused.call(fuselage, mixed)
        expected = fused.call(fuselage, {**mixed, **{n: t.float() for n, t in given.items()}})
        assert_same_codes(found[0], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@each_style
@each_fused
@pytest.mark.parametrize("dim", [4096, 4097])
def test_in_a_graph(fuselage, device, fused, style, dim):
    given, options = fused.inputs((64, dim), HALF, device), options_of(style, device)
    graph, captured = captured_by_a_graph(lambda: fused.call(fuselage, given, **options))
    for t in given.values():
        t.copy_(normal(tuple(t.shape), HALF, device))
    graph.replay()
    expected = fused.call(fuselage, given, **options)
    assert_same_codes(captured[0], expected[0])
    assert torch.equal(captured[1], expected[1])
