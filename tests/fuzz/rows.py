"""Cases of the operators on rows: norms, gates, adaptive norms, PolyNorm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import eager
import operators
import reference
import torch
from harness import (
    FLOAT32_ROUNDINGS,
    HALVES,
    UNIT,
    Operator,
    gradients,
    normal,
    reference_gradients,
    terms_of_gradients,
)
from torch import Tensor

from .draw import Draw
from .judge import Failure, assert_right, failing_as, same_bits, valid_call


@dataclass
class Call:
    """A call of `op`, which is what checks it too."""

    op: Operator
    inputs: dict
    options: dict
    regime: str = "normal"

    def arguments(self) -> dict:
        return {**self.inputs, **self.op.defaults, **self.options}


# What may be called: (shape, dtype) -> styles of inputs, options


def eps_of(draw: Draw) -> float:
    return draw.choice((1e-6, 1e-6, 1e-5, 1e-12, 1e-2, 1.0, 0.0))


def _rms(draw: Draw, shape, dtype):
    outs = (None, None, torch.float32, *((torch.float16,) if dtype == torch.float32 else ()))
    return {"weight": draw.choice((None, "same", "same", torch.float32))}, {
        "eps": eps_of(draw),
        "weight_offset": draw.choice((0.0, 0.0, 1.0, 0.375, -1.0)),
        "cast_before_weight": draw.chance(0.3),
        "out_dtype": draw.choice(outs),
    }


def _norm_add_norm(draw: Draw, shape, dtype):
    inputs, options = _rms(draw, shape, dtype)
    del options["out_dtype"]
    return inputs, options | {"pre_eps": draw.choice((None, eps_of(draw)))}


def _gated(draw: Draw, shape, dtype):
    first, dim = draw.chance(0.5), shape[-1]
    sizes = [size for size in (1, 2, 3, 8, 64, dim) if size and dim % size == 0]
    return {"weight": draw.choice((None, "same", "same", torch.float32))}, {
        "eps": eps_of(draw),
        "activation": draw.choice(("silu", "sigmoid")),
        "norm_before_gate": first,
        "group_size": draw.choice((None, None, *sizes)),
        # Norm first there are two roundings, which shared checks do not know.
        "cast_before_weight": not first and draw.chance(0.3),
    }


def _layer(draw: Draw, shape, dtype):
    kinds = (None, "same", "same", torch.float32)
    eps = eps_of(draw)
    if dtype != torch.float32:
        eps = max(eps, 1e-6)  # of constant rows the variance is noise: docs/limits.md
    return {"weight": draw.choice(kinds), "bias": draw.choice(kinds)}, {"eps": eps}


def _modulation(draw: Draw, shape) -> Callable:
    """The shape of a scale, from that of x."""
    forms = [lambda shape: shape[-1:], lambda shape: shape]
    if len(shape) > 1:
        ones = draw.integer(1, len(shape) - 1)
        forms.append(lambda shape: (1,) * ones + shape[-1:])
    if len(shape) > 2:
        forms.append(lambda shape: (shape[0], shape[-1]))
    if len(shape) == 3:
        forms.append(lambda shape: (shape[0], 1, shape[-1]))
    return draw.choice(forms)


def _ada(draw: Draw, shape, dtype):
    inputs, options = _layer(draw, shape, dtype)
    inputs["modulation"] = draw.choice(("same", "same", torch.float32))
    return inputs | {"form": _modulation(draw, shape)}, options


def _ada_rms(draw: Draw, shape, dtype):
    inputs, options = _ada(draw, shape, dtype)
    return inputs | {"bias": None}, options


def _gate_residual(draw: Draw, shape, dtype):
    inputs, options = _ada(draw, shape, dtype)
    norm = draw.choice(("layer", "layer", "rms"))
    return inputs | ({"bias": None} if norm == "rms" else {}), options | {"norm": norm}


def _poly(draw: Draw, shape, dtype):
    kinds = ("same", "same", torch.float32)
    return {"weight": draw.choice(kinds), "bias": draw.choice(kinds)}, {"eps": eps_of(draw)}


def _grouped(draw: Draw, shape, dtype):
    inputs, options = _poly(draw, shape, dtype)
    rows = shape[0]
    ends = sorted(draw.integer(0, rows) for _ in range(draw.integer(1, 6)))
    clamp = draw.choice((None, 0.5, 1.5, 1e6))
    return inputs | {"offs": tuple(ends)}, options | {"hidden_clamp": clamp}


def _activation(draw: Draw) -> str:
    return draw.choice(
        ("none", "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "gelu_quick", "silu", "relu2")
    )


def _bias_act(draw: Draw, shape, dtype):
    bias = draw.choice((None, "same", torch.float32))
    return {"bias": bias}, {"activation": _activation(draw)}


def _add_mul_act(draw: Draw, shape, dtype):
    inputs, options = _bias_act(draw, shape, dtype)
    return inputs, options | {"alpha": draw.choice((1.0, 0.5, 0.0, -2.75, 1e3))}


def _clamped(draw: Draw, shape, dtype):
    return {}, {
        "alpha": draw.choice((1.702, 1.0, -0.5)),
        "limit": draw.choice((7.0, 1.25, 0.0, 1e6)),
        "interleaved": draw.chance(0.6),
    }


def _plain(draw: Draw, shape, dtype):
    return {}, {}


def _geglu(draw: Draw, shape, dtype):
    return {}, {"activation": draw.choice(("gelu", "gelu_tanh"))}


STYLES: dict[str, tuple[Operator, Callable]] = {
    op.name: (op, style)
    for op, style in (
        (operators.RMS_NORM, _rms),
        (operators.FUSED_ADD_RMS_NORM, _rms),
        (operators.RMS_NORM_ADD_RMS_NORM, _norm_add_norm),
        (operators.GATED_RMS_NORM, _gated),
        (operators.LAYER_NORM, _layer),
        (operators.FUSED_ADD_LAYER_NORM, _layer),
        (operators.ADA_LAYER_NORM, _ada),
        (operators.ADA_RMS_NORM, _ada_rms),
        (operators.GATE_RESIDUAL_ADA_NORM, _gate_residual),
        (operators.POLY_NORM, _poly),
        (operators.FUSED_MUL_POLY_NORM, _poly),
        (operators.GROUPED_POLY_NORM, _grouped),
        *(
            (operators.plain_operator(name), _plain)
            for name in ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu2")
        ),
        *(
            (operators.act_and_mul_operator(name, gate_first), _plain)
            for name in ("silu", "gelu", "gelu_tanh", "relu")
            for gate_first in (True, False)
        ),
        (operators.SWIGLU_CLAMPED, _clamped),
        (operators.SWIGLU, _plain),
        (operators.GEGLU, _geglu),
        (operators.BIAS_ACT, _bias_act),
        (operators.ADD_MUL_ACT, _add_mul_act),
    )
}

# In-place form: (function, what it writes)
IN_PLACE = {
    "fused_add_layer_norm_": ("fused_add_layer_norm", ("x", "residual")),
    "fused_add_rms_norm_": ("fused_add_rms_norm", ("x", "residual")),
    "bias_act_": ("bias_act", ("x",)),
    "add_mul_act_": ("add_mul_act", ("x",)),
}


# The formulas that round the sum to the activations' dtype, as is documented, between float32.


def _fused_add_formula(dtype, x, residual, weight=None, eps=1e-6, **options):
    total = reference.round_to(dtype, x + residual).float()
    return eager.rms_norm(total, weight, eps, **options), total


def _norm_add_norm_formula(
    dtype, x, residual, post_weight=None, pre_weight=None, eps=1e-6, *, pre_eps=None, **options
):
    n = reference.round_to(dtype, eager.rms_norm(x, post_weight, eps, **options)).float()
    total = reference.round_to(dtype, n + residual).float()
    total = _RoundedGradient.apply(total, dtype)
    pre_eps = eps if pre_eps is None else pre_eps
    return eager.rms_norm(total, pre_weight, pre_eps, **options), total


class _RoundedGradient(torch.autograd.Function):
    """Of what it returns, as in two passes: in half precision it may overflow."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).float(), None


def _fused_add_layer_formula(dtype, x, residual, weight=None, bias=None, eps=1e-5):
    total = reference.round_to(dtype, x + residual).float()
    return eager.layer_norm(total, weight, bias, eps), total


def _gate_residual_formula(
    dtype, x, residual, gate, scale, shift, weight=None, bias=None, eps=1e-6, *, norm="layer"
):
    product = x if gate is None else eager.for_rows(gate, x) * x
    total = reference.round_to(dtype, residual + product).float()
    modulated = (total, torch.zeros_like(total), None, scale, shift, weight, bias, eps)
    return eager.gate_residual_ada_norm(*modulated, norm=norm)[0], total


FORMULAS = {
    "fused_add_layer_norm": _fused_add_layer_formula,
    "fused_add_rms_norm": _fused_add_formula,
    "gate_residual_ada_norm": _gate_residual_formula,
    "rms_norm_add_rms_norm": _norm_add_norm_formula,
}


def make(draw: Draw, name: str, written: tuple[str, ...] = (), *, ordinary: bool = False) -> Call:
    """A random call of the function `name`, `written` inputs laid out so that it may write them."""
    op, style = STYLES[name]
    dtype = draw.dtype()
    shape = (draw.integer(1, 5), draw.integer(2, 40)) if ordinary else draw.shape()
    if name == "grouped_poly_norm" and len(shape) != 2:
        shape = (1, *shape) if len(shape) == 1 else (shape[0] * shape[1], shape[-1])
    kinds, options = style(draw, shape, dtype)
    if written:
        options.pop("out_dtype", None)
    values = op.make_inputs(shape, dtype, "cpu", **kinds, **options)
    if op is operators.GATE_RESIDUAL_ADA_NORM and draw.chance(0.5):
        form = _modulation(draw, shape)(shape)
        values["gate"] = normal(form, values["scale"].dtype, "cpu", scale=0.5)
    for modulation in op.free_shapes:
        if draw.chance(0.15):
            values[modulation] = None
    regime = "normal" if ordinary else draw.regime()
    shrinks = regime == "extreme" or options.get("norm_before_gate") is False
    if shrinks and options.get("eps") == 0.0:
        options["eps"] = 1e-12  # squares that are no normal float32 are noise: docs/limits.md
    inputs = {}
    for key, value in values.items():
        if value is None:
            inputs[key] = None
            continue
        if key == op.main or draw.chance(0.6):
            value = draw.change(value, regime)
        inputs[key] = draw.lay_out(key, value, rows=key in written, written=key in written)
    if name in FORMULAS:
        op = replace(op, eager=partial(FORMULAS[name], dtype))
    return Call(op, inputs, options, regime)


# Checks

# "Range" of docs/limits.md: activations, parameters and gradients up to these do not overflow, as
# long as what is added up over a row does not.
MOST, MOST_OF_POLY = 1e15, 1e5


def is_beyond(op: Operator, *tensors: dict) -> bool:
    """Whether a finite number is larger than is promised for."""
    most = MOST_OF_POLY if "poly" in op.name else MOST
    numbers = [t for some in tensors for t in some.values() if isinstance(t, Tensor)]
    return any(
        bool((t.isfinite() & (t.abs() > most)).any()) for t in numbers if t.is_floating_point()
    )


def check(kernel, draw: Draw, call: Call) -> None:
    """One valid call: values, gradients, the same bits again, and what else must agree."""
    outputs = check_outputs(kernel, call)
    grad_outs, requires = incoming(draw, call, outputs)
    grads = check_gradients(kernel, call, grad_outs, requires)
    if draw.chance(0.5):
        check_repeats(kernel, draw, call, outputs, grads, grad_outs, requires)
    if draw.chance(0.3):
        check_contiguous(kernel, call, outputs, grads, grad_outs, requires)
    if draw.chance(0.3) and call.op.name in STYLES and call.op.name != "grouped_poly_norm":
        check_rows_alone(kernel, draw, call, outputs, grads, grad_outs, requires)


def check_outputs(kernel, call: Call) -> dict[str, Tensor]:
    op, inputs, options = call.op, call.inputs, call.options
    with valid_call("forward"):
        outputs = op.run(kernel, inputs, options)
    exact, terms = op.run_reference(inputs, options), op.run_output_terms(inputs, options)
    formula = op.run_eager(as_float32(inputs), options)
    dtype = inputs[op.main].dtype
    beyond = is_beyond(op, inputs, op.defaults)
    inner_rounding = dtype if options.get("cast_before_weight") else None
    if inner_rounding in HALVES and op.name == "qk_norm_rotary":
        # Another tie moves a term, not the result that is left of two; tests/rope counts them.
        ties = 2 * UNIT[dtype] / (FLOAT32_ROUNDINGS * UNIT[torch.float32])
        inner_rounding, terms = None, {name: t * (1 + ties) for name, t in terms.items()}
    with failing_as("a wrong value"):
        for name, output in outputs.items():
            wanted = (options.get("out_dtype") if name == "out" else None) or dtype
            assert output.dtype == wanted, f"{name} is {output.dtype}"
            assert output.device == inputs[op.main].device, f"{name} is on {output.device}"
            assert_right(
                output,
                exact[name],
                formula[name],
                name,
                terms=terms.get(name),
                inner_rounding=inner_rounding,
                beyond=beyond,
                half_math=has_half_math(call),
            )
            if op.name not in ("apply_rotary", "qk_norm_rotary"):
                assert output.is_contiguous(), f"{name} has strides {output.stride()}"
    return outputs


def has_half_math(call: Call) -> bool:
    """Whether activations are computed for a result of half precision."""
    x = call.inputs[call.op.main]
    has_gate = "norm" not in call.op.name or call.op.name == "gated_rms_norm"
    return x.is_cuda and x.dtype in HALVES and has_gate


def as_float32(tensors: dict) -> dict:
    return {
        name: t.detach().float() if isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in tensors.items()
    }


def incoming(draw: Draw, call: Call, outputs: dict) -> tuple[dict, tuple[str, ...]]:
    """Gradients of some outputs, and the inputs that require one."""
    names = call.op.differentiable(call.inputs)
    requires = tuple(name for name in names if draw.chance(0.7)) or names[:1]
    used = [name for name in outputs if draw.chance(0.7)] or [
        "out" if "out" in outputs else "q_out"
    ]
    grads = {}
    for name in used:
        values = draw.change(normal(outputs[name].shape, outputs[name].dtype, "cpu"), call.regime)
        if name == "out" and "new_residual" in outputs and values.numel() > 0:
            # NOTE: of a row of zeros, the kernels take it that its result is not used.
            values[(values == 0).all(-1), 0] = 1
        grads[name] = draw.lay_out(f"grad_{name}", values)
    return grads, requires


def run_gradients(kernel, op: Operator, inputs, options, grad_outs, requires) -> dict:
    with valid_call("backward"):
        return gradients(
            lambda leaves, opts: op.run(kernel, leaves, opts), inputs, options, grad_outs, requires
        )


def check_gradients(kernel, call: Call, grad_outs: dict, requires) -> dict:
    """Gradients are those of float64 autograd, and None where not required. Returns them."""
    op, inputs, options = call.op, call.inputs, call.options
    actual = run_gradients(kernel, op, inputs, options, grad_outs, requires)
    exact = reference_gradients(op, inputs, options, grad_outs)
    terms = terms_of_gradients(op, inputs, options, grad_outs)
    formula = exact
    if inputs[op.main].numel() > 0:  # PyTorch's layer_norm of no rows raises in its backward
        formula = gradients(
            op.run_eager,
            as_float32(inputs),
            op.without_roundings(options),
            {name: g.to(formula_dtype(options, name)) for name, g in grad_outs.items()},
            op.differentiable(inputs),
        )
    beyond = is_beyond(op, inputs, op.defaults, grad_outs)
    with failing_as("a wrong gradient"):
        for name in op.differentiable(inputs):
            label = f"grad_{name}"
            if name not in requires:
                assert actual[name] is None, f"{label}, which is not required"
            elif exact[name] is None or actual[name] is None:
                assert exact[name] is None, f"no {label}"
                assert actual[name] is None or not actual[name].any(), f"{label} is not zero"
            else:
                assert actual[name].dtype == inputs[name].dtype, f"{label} is {actual[name].dtype}"
                assert_right(
                    actual[name],
                    exact[name],
                    exact[name] if formula[name] is None else formula[name],
                    label,
                    terms=terms.get(name),
                    gradient=True,
                    beyond=beyond,
                    half_math=has_half_math(call),
                )
    return actual


def formula_dtype(options: dict, output: str) -> torch.dtype:
    """That of the float32 formula's output, which an `out_dtype` rounds."""
    return (options.get("out_dtype") if output == "out" else None) or torch.float32


def check_repeats(kernel, draw: Draw, call, outputs, grads, grad_outs, requires) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(draw.integer(1, 3))
    try:
        with valid_call("the same call again"):
            again = call.op.run(kernel, call.inputs, call.options)
        grads_again = run_gradients(kernel, call.op, call.inputs, call.options, grad_outs, requires)
    finally:
        torch.set_num_threads(threads)
    compare_bits(outputs, grads, again, grads_again, "not the same bits again")


# In their backward on a GPU, rows off 16-byte boundaries may be added up in another order:
# docs/limits.md.
RMS_NORMS = ("rms_norm", "fused_add_rms_norm", "rms_norm_add_rms_norm")
ADA_NORMS = ("ada_layer_norm", "ada_rms_norm", "gate_residual_ada_norm")
STAGED = (*RMS_NORMS, "gated_rms_norm", "layer_norm", "fused_add_layer_norm", *ADA_NORMS)


def is_aligned(t: Tensor) -> bool:
    strides = [step for size, step in zip(t.shape[:-1], t.stride()) if size > 1]
    return all(number * t.itemsize % 16 == 0 for number in (t.storage_offset(), *strides))


def has_one_order(call: Call, name: str) -> bool:
    """Whether the gradient of `name` has the same bits for rows of any alignment."""
    op, x = call.op, call.inputs[call.op.main]
    if x.device.type == "cpu" or op.name not in STAGED:
        return True
    return name in op.row_inputs and (op.name not in RMS_NORMS or x.shape[-1] <= 7000)


def check_contiguous(kernel, call: Call, outputs, grads, grad_outs, requires) -> None:
    copies = {
        name: t.clone(memory_format=torch.contiguous_format) if isinstance(t, Tensor) else t
        for name, t in call.inputs.items()
    }
    with valid_call("contiguous copies"):
        again = call.op.run(kernel, copies, call.options)
    grad_copies = {name: g.contiguous() for name, g in grad_outs.items()}
    grads_again = run_gradients(kernel, call.op, copies, call.options, grad_copies, requires)
    given = (*call.inputs.values(), *copies.values(), *grad_outs.values(), *grad_copies.values())
    if not all(is_aligned(t) for t in given if isinstance(t, Tensor)):
        grads = {name: grad for name, grad in grads.items() if has_one_order(call, name)}
    compare_bits(outputs, grads, again, grads_again, "other bits in another layout")


def compare_bits(outputs, grads, again, grads_again, kind: str) -> None:
    for name, output in outputs.items():
        same_bits(again[name], output, name, kind)
    for name, grad in grads.items():
        if (grad is None) != (grads_again[name] is None):
            raise Failure(kind, f"grad_{name} is None once")
        if grad is not None:
            same_bits(grads_again[name], grad, f"grad_{name}", kind)


def check_rows_alone(kernel, draw: Draw, call: Call, outputs, grads, grad_outs, requires) -> None:
    """Some of the first dimension have the bits that they have among all."""
    op, x = call.op, call.inputs[call.op.main]
    if x.dim() < 2 or x.shape[0] < 2:
        return
    begin = draw.integer(0, x.shape[0] - 1)
    part = slice(begin, draw.integer(begin + 1, x.shape[0]))
    some = {
        name: t[part] if isinstance(t, Tensor) and t.dim() > 1 and len(t) == len(x) else t
        for name, t in call.inputs.items()
    }
    kind = "a row depends on the others"
    with valid_call("some rows alone"):
        alone = op.run(kernel, some, call.options)
    for name, output in alone.items():
        same_bits(output, outputs[name][part], name, kind)
    if op.name in ADA_NORMS and alone["out"].numel() == x.shape[-1] and x.is_cuda:
        return  # a modulation of one row counts as one of all rows: docs/limits.md
    some_grads = {name: g[part] for name, g in grad_outs.items()}
    grads_alone = run_gradients(kernel, op, some, call.options, some_grads, requires)
    for name in op.row_inputs:
        if grads[name] is not None:
            same_bits(grads_alone[name], grads[name][part], f"grad_{name}", kind)


def check_in_place(kernel, draw: Draw, name: str, call: Call, written: tuple[str, ...]) -> None:
    """`name`, that writes over some inputs of `call`, has the bits of the function's result."""
    if name == "add_mul_act_" and draw.chance(0.1):
        call.inputs["y"] = call.inputs["x"]
    copies = {n: t.clone() if isinstance(t, Tensor) else t for n, t in call.inputs.items()}
    expected = call.op.run(kernel, copies, call.options)
    in_place = replace(call.op, name=name)
    with valid_call("in place"):
        outputs = in_place.run(kernel, call.inputs, call.options)
    for (output_name, output), given in zip(outputs.items(), written, strict=True):
        if output is not call.inputs[given]:
            raise Failure("a wrong value", f"{output_name} is not `{given}`, which was given")
        same_bits(output, expected[output_name], output_name, "a wrong value")
