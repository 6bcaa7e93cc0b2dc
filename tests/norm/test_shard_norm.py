"""The kernels of norms whose columns are spread over ranks, without ranks.

Rows are cut into slices, and what each gives of its own sums is put together by hand.
tests/distributed/test_sharded_columns.py does the same with processes.
"""

from __future__ import annotations

import pytest
import torch
from harness import (
    DTYPES,
    assert_close,
    assert_same_bits,
    compare_gradients,
    each_dtype,
    each_operator,
    each_style,
    errors,
    normal,
    on_devices,
    random_grad_outs,
)
from operators import RMS_NORM
from shard_slices import LAYER_NORMS, NORMS, POLY_NORMS, Slices, module_of


def check(fuselage, op, inputs: dict, options: dict, ranks: int) -> None:
    """Outputs and gradients are those of the formula."""
    slices = Slices(fuselage, op, inputs, options, ranks)
    outputs, statistics = slices.forward()
    expected, terms = op.run_reference(inputs, options), op.run_output_terms(inputs, options)
    dtype = inputs["x"].dtype
    for name, out in outputs.items():
        assert out.dtype == ((options.get("out_dtype") if name == "out" else None) or dtype)
        inner = dtype if options.get("cast_before_weight") else None
        assert_close(out, expected[name], name, terms=terms.get(name), inner_rounding=inner)
    grad_outs = random_grad_outs(outputs)
    found = slices.backward(outputs, statistics, grad_outs)
    if op in POLY_NORMS and dtype != torch.float32:
        # Each rank rounds its part of the sums, of which so little is left.
        found |= dict.fromkeys(op.vector_inputs)
    requires = [n for n, t in found.items() if t is not None]
    compare_gradients(op, inputs, options, grad_outs, found, requires)


@each_style(NORMS)
@each_dtype
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_is_the_formula(fuselage, device, op, style, dtype, ranks):
    for dim in (1, 13, 96):
        inputs = op.inputs((3, 5, dim), dtype, device, style)
        check(fuselage, op, inputs, op.options(style), ranks)


# Of 4 slices: in one batch of vectors and in several; a block's threads at most and more.
@each_operator(NORMS)
@on_devices((1000, 4096), (1000, 4096, 4100, 16384, 65552, 262144))
def test_sizes(fuselage, device, op, dim):
    for dtype in DTYPES:
        check(fuselage, op, op.inputs((7, dim), dtype, device), {}, 4)


@each_operator(NORMS)
@on_devices((96,), (96, 4096, 4099))
def test_bits_do_not_depend_on_layout_or_batch(fuselage, device, op, dim):
    """Nor on the call: rows that start anywhere have the lanes of those that are aligned."""
    for dtype in DTYPES:
        inputs = op.inputs((12, dim), dtype, device)
        expected = outputs_and_gradients(fuselage, op, inputs)
        assert_all_same(outputs_and_gradients(fuselage, op, inputs), expected, "again")
        moved = {
            n: torch.empty(t.shape[0], dim + 3, dtype=dtype, device=device)[:, 1 : dim + 1].copy_(t)
            if n in op.row_inputs
            else t
            for n, t in inputs.items()
        }
        # Sums of columns are those of the kernels of whole rows.
        of_rows = {n: t for n, t in expected.items() if t.dim() == 2}
        found = outputs_and_gradients(fuselage, op, moved)
        assert_all_same({n: found[n] for n in of_rows}, of_rows, "layout")
        some = {n: t[3:8] if n in op.row_inputs else t for n, t in inputs.items()}
        found = outputs_and_gradients(fuselage, op, some, first=3)
        cut = {n: t[3:8] for n, t in of_rows.items()}
        assert_all_same({n: found[n] for n in cut}, cut, "batch")


def outputs_and_gradients(fuselage, op, inputs: dict, first: int = 0) -> dict:
    slices = Slices(fuselage, op, inputs, {}, 3)
    outputs, statistics = slices.forward()
    torch.manual_seed(1)
    rows = inputs["x"].shape[0]
    grads = {n: normal((12, *t.shape[1:]), t.dtype, t.device) for n, t in outputs.items()}
    grads = {n: t[first : first + rows] for n, t in grads.items()}
    found = slices.backward(outputs, statistics, grads)
    return outputs | {f"grad_{n}": t for n, t in found.items()}


def assert_all_same(actual: dict, expected: dict, what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, t in actual.items():
        assert_same_bits(t, expected[name], f"{name}, {what}")


@each_operator(LAYER_NORMS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_a_large_mean_does_not_cancel(fuselage, device, op, ranks):
    """Also where the ranks' means are far apart, and where deviations are of the last bits."""
    dim = 1003
    starts = {
        "one mean": torch.full((dim,), 3e4),
        "a mean of float32's last bits": torch.full((dim,), 1.2345678e6),
        "a ramp": torch.linspace(-1e6, 1e6, dim),
        "a mean a rank": 1e5 * (torch.arange(dim) // -(-dim // ranks)).float(),
    }
    for what, start in starts.items():
        inputs = op.inputs((6, dim), torch.float32, device)
        inputs["x"] += start.to(device)
        outputs, _ = Slices(fuselage, op, inputs, {}, ranks).forward()
        expected = op.run_reference(inputs, {})["out"]
        largest, rms = errors(outputs["out"], expected)
        of_whole = errors(op.run(fuselage, inputs, {})["out"], expected)
        assert largest <= 2 * of_whole[0] + 2e-7 and rms <= 2 * of_whole[1] + 1e-7, what


@each_operator(NORMS)
def test_rows_that_are_alike_have_no_deviation(fuselage, device, op):
    inputs = op.inputs((4, 37), torch.float32, device)
    inputs["x"].fill_(0.1)
    if "residual" in inputs:
        inputs["residual"].zero_()
    check(fuselage, op, inputs, {}, 3)
    if op in LAYER_NORMS:
        outputs, _ = Slices(fuselage, op, inputs, {}, 3).forward()
        assert (outputs["out"] == inputs["bias"]).all()


@each_operator([op for op in NORMS if op not in POLY_NORMS])
def test_a_row_that_overflowed_and_is_not_used(fuselage, device, op):
    """Zeros come of zeros: is_zero of common/vector.h. Anything else of such a row is NaN."""
    inputs = op.inputs((5, 96), torch.float16, device)
    for name in op.row_inputs:
        inputs[name][1, ::3] = 6e4 if len(op.row_inputs) > 1 else float("inf")
    slices = Slices(fuselage, op, inputs, {}, 3)
    outputs, statistics = slices.forward()
    assert not outputs["out"][1].isfinite().all()
    grad_outs = {n: torch.ones_like(t) for n, t in outputs.items()}
    grad_outs["out"][1] = 0
    expected = grad_outs.get("new_residual", torch.zeros_like(inputs["x"]))[1]
    grads = slices.backward(outputs, statistics, grad_outs)
    assert_same_bits(grads["x"][1] + 0, expected, "grad_x")
    if device == "cpu" or "new_residual" in outputs:  # a GPU looks only where a sum may be used
        assert grads["weight"].isfinite().all()
    grad_outs["out"][1, 5] = 1
    assert slices.backward(outputs, statistics, grad_outs)["x"][1].isnan().all()


@each_operator(NORMS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_no_rows(fuselage, device, op, shape):
    inputs = op.inputs(shape, torch.bfloat16, device)
    slices = Slices(fuselage, op, inputs, {}, 3)
    outputs, statistics = slices.forward()
    grads = slices.backward(outputs, statistics, outputs)
    assert outputs["out"].shape == grads["x"].shape == shape
    assert not grads["weight"].any()


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_dtypes_of_the_result(fuselage, device, x_dtype, out_dtype):
    """Those that rms_norm has, forward and backward."""
    if x_dtype != out_dtype and torch.float32 not in (x_dtype, out_dtype):
        return
    inputs = RMS_NORM.inputs((5, 36), x_dtype, device)
    check(fuselage, RMS_NORM, inputs, {"out_dtype": out_dtype}, 2)


def test_bad_input(fuselage, device):
    ops, module = fuselage.norm.ops, module_of(fuselage)
    x, gathered = torch.ones(3, 8, device=device), torch.ones(2, 3, 3, device=device)
    rstd, weight = torch.ones(3, 3, device=device), torch.ones(3, device=device)

    def finish(given=gathered, kind=module.LAYER, dim=16, factors=None, out_dtype=None, mul=None):
        options = (dim, 1e-6, 0.0, False, out_dtype, kind)
        return ops.shard_norm(x, mul, given, factors, factors, *options)

    finish()
    wrong = [
        (lambda: ops.shard_norm_sums(x, x[:2], 0), "`residual` must have the shape"),
        (lambda: ops.shard_norm_sums(x, None, 3), "`kind` must be 0, 1 or 2"),
        (lambda: finish(gathered[:, :2]), "`gathered` must be contiguous float32"),
        (lambda: finish(gathered.double()), "`gathered` must be contiguous float32"),
        (lambda: finish(kind=module.RMS), "`gathered` must be contiguous float32"),
        (lambda: finish(dim=7), "`dim` must be at least that of `x`"),
        (lambda: finish(kind=module.POLY), "`weight` must be given for kind 2"),
        (lambda: finish(factors=weight), "`weight` must have shape"),
        (lambda: finish(out_dtype=torch.float16), "`out_dtype` must be None"),
        (lambda: finish(mul=x), "`mul` must be None"),
        (
            lambda: ops.shard_norm_bwd_sums(x[:, :4], x, None, None, None, rstd, 0.0, 1),
            "`grad_out` must have the shape",
        ),
        (
            lambda: ops.shard_norm_bwd_sums(x, x, None, None, None, rstd, 0.0, 1),
            "`statistics` must be the",
        ),
        (
            lambda: ops.shard_norm_bwd(
                *(x, x, x, None, gathered, weight, weight[:1], rstd, 16, 0.0, 2)
            ),
            "`grad_new_residual` must be None",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            call()
