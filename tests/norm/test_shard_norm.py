"""The kernels of norms whose columns are spread over ranks, without ranks.

Rows are cut into slices, and what each gives of its own sums is put together by hand.
tests/distributed/test_sharded_columns.py does the same with processes.
"""

from __future__ import annotations

import importlib
import inspect

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
from operators import (
    FUSED_ADD_LAYER_NORM,
    FUSED_ADD_RMS_NORM,
    FUSED_MUL_POLY_NORM,
    LAYER_NORM,
    POLY_NORM,
    RMS_NORM,
)

NORMS = (
    *(RMS_NORM, FUSED_ADD_RMS_NORM, LAYER_NORM, FUSED_ADD_LAYER_NORM),
    *(POLY_NORM, FUSED_MUL_POLY_NORM),
)
BACKWARD = {
    "rms_norm": "rms_norm_bwd",
    "fused_add_rms_norm": "rms_norm_bwd",
    "layer_norm": "layer_norm_bwd",
    "fused_add_layer_norm": "gate_residual_ada_norm_bwd",
    "poly_norm": "poly_norm_bwd",
    "fused_mul_poly_norm": "poly_norm_bwd",
}
LAYER_NORMS = (LAYER_NORM, FUSED_ADD_LAYER_NORM)
POLY_NORMS = (POLY_NORM, FUSED_MUL_POLY_NORM)


def module_of(fuselage):
    """What the rules for DTensors call. It is not loaded before the first DTensor."""
    return importlib.import_module(f"{fuselage.__name__}._shard_norm")


class Slices:
    """An operator on rows that are cut into `ranks` parts, as torch.chunk cuts them."""

    def __init__(self, fuselage, op, inputs: dict, options: dict, ranks: int):
        self.op, self.ranks, self.run = op, ranks, module_of(fuselage).RUN
        self.ops = fuselage.norm.ops
        function = inspect.signature(getattr(fuselage, op.name)).parameters
        defaults = {n: p.default for n, p in function.items() if p.default is not p.empty}
        self.arguments = {"mul": None, "bias": None, **defaults, **options, **inputs}
        self.dim = inputs["x"].shape[-1]
        self.each = -(-self.dim // ranks)

    def cut(self, t, rank: int):
        """The columns of a rank, of what has them: views, which start anywhere."""
        columns = isinstance(t, torch.Tensor) and t.shape[-1] == self.dim
        if columns and not (t.dim() == 1 and self.op in POLY_NORMS):
            return t[..., rank * self.each : (rank + 1) * self.each]
        return t

    def both_steps(self, name: str, arguments: dict) -> list[tuple]:
        """What every rank returns."""
        of_ranks, given = [], []
        for rank in range(self.ranks):
            of_ranks.append({n: self.cut(t, rank) for n, t in arguments.items()})

        def keep(sums):
            given.append(sums)
            return sums.new_zeros((self.ranks, *sums.shape))

        for a in of_ranks:
            self.run[name](a, self.dim, keep)
        gathered = torch.stack(given)
        return [self.run[name](a, self.dim, lambda _: gathered) for a in of_ranks]

    def forward(self) -> tuple[dict, torch.Tensor]:
        """The outputs, and the statistics, which all ranks have alike."""
        found = self.both_steps(f"{self.op.name}_fwd", self.arguments)
        statistics = [t[-1] for t in found if t[0].shape[-1] > 0]
        for other in statistics:
            assert_same_bits(other, statistics[0], "statistics")
        outputs = zip(self.op.outputs, zip(*found, strict=True), strict=False)
        return {n: torch.cat(parts, -1) for n, parts in outputs}, statistics[0]

    def backward(self, outputs: dict, statistics: torch.Tensor, grad_outs: dict) -> dict:
        """The gradients of the inputs."""
        s = outputs.get("new_residual", self.arguments["x"])
        a = dict.fromkeys(("gate", "scale", "shift")) | self.arguments
        a |= {"grad_out": grad_outs["out"], "grad_new_residual": grad_outs.get("new_residual")}
        a |= {"x": s, "new_residual": s, "rstd": statistics, "statistics": statistics}
        a |= {f"needs_grad_{n}": a[n] is not None for n in ("x", "mul", "weight", "bias")}
        a["needs_grad_residual"] = True
        name = BACKWARD[self.op.name]
        schema = getattr(self.ops, name).default._schema
        found = zip(*self.both_steps(name, a), strict=True)
        grads = dict(zip((r.name for r in schema.returns), found, strict=True))
        results = {}
        for n in self.op.differentiable(self.arguments):
            if n in self.op.row_inputs and "new_residual" in outputs:
                key = "grad_x" if "grad_x" in grads and name == "rms_norm_bwd" else "grad_residual"
            else:
                key = f"grad_{n}"
            parts = grads[key]
            own = n not in self.op.row_inputs and self.op in POLY_NORMS
            results[n] = torch.stack(parts).float().sum(0) if own else torch.cat(parts, -1)
            results[n] = results[n].to(self.arguments[n].dtype)
        return results


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
