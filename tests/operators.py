"""The operators under test: an entry here gives an operator every test in this folder."""

from __future__ import annotations

import dataclasses
import importlib

import eager
import reference
import torch
from harness import Operator, Style, normal

# Norms

RMS_NORM_STYLES = {
    "torch": Style(),
    "llama": Style(options={"cast_before_weight": True}),
    "gemma": Style(options={"weight_offset": 1.0}),
    "no_weight": Style(inputs={"weight": None}, options={"eps": 1e-5}),
    "float32_weight": Style(inputs={"weight": torch.float32}),
    "float32_out": Style(
        inputs={"weight": torch.float32},
        options={"out_dtype": torch.float32, "cast_before_weight": True},
    ),
}


def rms_norm_inputs(shape, dtype, device, *, weight="same", weight_offset=0.0, **_):
    """`x` and `weight`: the dtype of the weight, "same" for that of `x`, or None for none."""
    inputs = {"x": normal(shape, dtype, device), "weight": None}
    if weight is not None:
        weight_dtype = dtype if weight == "same" else weight
        centre = 1.0 - weight_offset
        inputs["weight"] = normal(shape[-1:], weight_dtype, device, scale=0.3, mean=centre)
    return inputs


def fused_add_rms_norm_inputs(shape, dtype, device, **style):
    inputs = rms_norm_inputs(shape, dtype, device, **style)
    residual = normal(shape, dtype, device, scale=2.0)
    return {"x": inputs["x"], "residual": residual, "weight": inputs["weight"]}


def _rms_norm_samples(kernel, device):
    """(op, arguments) of everything that is registered, for opcheck."""
    ops = kernel.norm.ops
    for dtype, weight_dtype, shape in (
        (torch.float32, torch.float32, (3, 8)),
        (torch.bfloat16, torch.float32, (2, 3, 5)),
        (torch.float16, None, (4, 16)),
    ):
        style = {"weight": weight_dtype}
        x, residual, weight = fused_add_rms_norm_inputs(shape, dtype, device, **style).values()
        options = (1e-6, 0.0, True, torch.float32)
        yield ops.rms_norm.default, (x, weight, *options)
        yield ops.fused_add_rms_norm.default, (x, residual, weight, *options)
        yield ops.fused_add_rms_norm_.default, (x, residual, weight, *options[:3])
        rstd = torch.rand(x[..., 0].numel(), device=device) + 0.5
        for extra, needs_x, needs_weight in ((None, True, True), (residual, True, False)):
            backward = (x.float(), extra, x, weight, rstd, 0.0, needs_x, needs_weight)
            yield ops.rms_norm_bwd.default, backward
        for requires_grad in (False, True):
            leaves = [
                t if t is None else t.clone().requires_grad_(requires_grad)
                for t in (x, residual, weight)
            ]
            yield ops.rms_norm_fwd.default, (leaves[0], leaves[2], *options)
            yield ops.fused_add_rms_norm_fwd.default, (*leaves, *options)
    yield from _shard_norm_samples(kernel, device)


def _shard_norm_samples(kernel, device):
    """(op, arguments) of what the rules for DTensors call, for opcheck."""
    importlib.import_module(f"{kernel.__name__}._shard_norm")  # as the first DTensor does
    ops = kernel.norm.ops
    for kind, dtype, x_shape in (
        *((0, torch.float32, (3, 8)), (0, torch.bfloat16, (2, 3, 5))),
        *((1, torch.float32, (3, 8)), (1, torch.float16, (2, 3, 5))),
        *((2, torch.bfloat16, (3, 8)), (2, torch.float32, (2, 3, 5))),
    ):
        x, other = normal(x_shape, dtype, device), normal(x_shape, dtype, device)
        rows, dim, poly = x[..., 0].numel(), x_shape[-1], kind == 2
        weight = normal((3 if poly else dim,), torch.float32, device)
        bias = normal((1 if poly else dim,), dtype, device) if kind else None
        mul, residual = (other, None) if poly else (None, other)
        rstd = torch.rand((rows, kind + 1) if kind else (rows,), device=device) + 0.5
        sums, gradient_sums = (
            torch.rand((2, rows, n), device=device) for n in (3 if kind else 1, kind + 1)
        )
        out_dtype = None if kind else torch.float32
        grad_out = other if kind else other.float()
        yield ops.shard_norm_sums.default, (x, None, kind)
        yield ops.shard_norm_sums.default, (x, other, kind)
        options = (2 * dim, 1e-6, 0.0, False, out_dtype, kind)
        yield ops.shard_norm.default, (x, mul, sums, weight, bias, *options)
        own = (x, mul, weight, bias, rstd, 0.0, kind)
        yield ops.shard_norm_bwd_sums.default, (grad_out, *own)
        factors = (weight, bias, rstd, 2 * dim, 0.0, kind)
        yield ops.shard_norm_bwd.default, (grad_out, residual, x, mul, gradient_sums, *factors)


RMS_NORM = Operator(
    name="rms_norm",
    make_inputs=rms_norm_inputs,
    reference=reference.rms_norm,
    eager=eager.rms_norm,
    row_inputs=("x",),
    vector_inputs=("weight",),
    outputs=("out",),
    styles=RMS_NORM_STYLES,
    roundings=("cast_before_weight",),
    gradient_terms=reference.rms_norm_gradient_terms,
    saved=("x", "weight", "rstd"),
    samples=_rms_norm_samples,
)

FUSED_ADD_RMS_NORM = Operator(
    name="fused_add_rms_norm",
    make_inputs=fused_add_rms_norm_inputs,
    reference=reference.fused_add_rms_norm,
    eager=eager.fused_add_rms_norm,
    row_inputs=("x", "residual"),
    vector_inputs=("weight",),
    outputs=("out", "new_residual"),
    styles=RMS_NORM_STYLES,
    roundings=("cast_before_weight",),
    gradient_terms=reference.rms_norm_gradient_terms,
    saved=("new_residual", "weight", "rstd"),
)


def rms_norm_add_rms_norm_inputs(shape, dtype, device, **style):
    post = fused_add_rms_norm_inputs(shape, dtype, device, **style)
    pre = rms_norm_inputs(shape, dtype, device, **style)
    return {
        "x": post["x"],
        "residual": post["residual"],
        "post_weight": post["weight"],
        "pre_weight": pre["weight"],
    }


def _rms_norm_add_rms_norm_samples(kernel, device):
    """(op, arguments) of everything that is registered, for opcheck."""
    ops = kernel.norm.ops
    for dtype, weight_dtype, shape in (
        (torch.float32, torch.float32, (3, 8)),
        (torch.bfloat16, torch.float32, (2, 3, 5)),
        (torch.float16, None, (4, 16)),
    ):
        inputs = rms_norm_add_rms_norm_inputs(shape, dtype, device, weight=weight_dtype)
        options = (1e-6, 1e-5, 0.0, True)
        yield ops.rms_norm_add_rms_norm.default, (*inputs.values(), *options)
        for requires_grad in (False, True):
            leaves = [
                t if t is None else t.clone().requires_grad_(requires_grad) for t in inputs.values()
            ]
            yield ops.rms_norm_add_rms_norm_fwd.default, (*leaves, *options)
        x, residual, post, pre = inputs.values()
        statistics = torch.rand(x[..., 0].numel(), 2, device=device) + 0.5
        for extra, some in ((None, False), (residual, True)):
            backward = (x, extra, residual, x, post, pre, statistics, 0.0, True, some, some, True)
            yield ops.rms_norm_add_rms_norm_bwd.default, backward


RMS_NORM_ADD_RMS_NORM = Operator(
    name="rms_norm_add_rms_norm",
    make_inputs=rms_norm_add_rms_norm_inputs,
    reference=reference.rms_norm_add_rms_norm,
    eager=eager.rms_norm_add_rms_norm,
    row_inputs=("x", "residual"),
    vector_inputs=("post_weight", "pre_weight"),
    outputs=("out", "new_residual"),
    styles={
        **{name: style for name, style in RMS_NORM_STYLES.items() if name != "float32_out"},
        "pre_eps": Style(options={"eps": 1e-3, "pre_eps": 1e-5}),
    },
    rounds_terms=True,
    inner_roundings=4,
    output_terms=reference.rms_norm_add_rms_norm_terms,
    gradient_terms=reference.rms_norm_add_rms_norm_terms,
    saved=("x", "post_weight", "new_residual", "pre_weight", "statistics"),
    statistics=2,
    samples=_rms_norm_add_rms_norm_samples,
)

# Groups do not divide every size of the shared tests: tests/norm/test_gated_rms_norm.py has them.
GATED_RMS_NORM_STYLES = {
    "torch": Style(),
    "qwen3_next": Style(options={"cast_before_weight": True}),
    "sigmoid": Style(inputs={"weight": torch.float32}, options={"activation": "sigmoid"}),
    "gate_first": Style(options={"norm_before_gate": False}),
    "mamba2": Style(options={"norm_before_gate": False, "cast_before_weight": True}),
    "no_weight": Style(
        inputs={"weight": None}, options={"norm_before_gate": False, "activation": "sigmoid"}
    ),
}


def gated_rms_norm_inputs(shape, dtype, device, *, weight="same", **_):
    inputs = rms_norm_inputs(shape, dtype, device, weight=weight)
    return {"x": inputs["x"], "gate": normal(shape, dtype, device), "weight": inputs["weight"]}


def _gated_rms_norm_samples(kernel, device):
    """(op, arguments) of everything that is registered, for opcheck."""
    ops = kernel.norm.ops
    for dtype, weight_dtype, shape, first, group_size in (
        (torch.float32, torch.float32, (3, 8), True, None),
        (torch.bfloat16, torch.float32, (2, 3, 6), False, 2),
        (torch.float16, None, (4, 16), False, None),
    ):
        x, gate, weight = gated_rms_norm_inputs(shape, dtype, device, weight=weight_dtype).values()
        how = (7 if first else 2, first, group_size)
        yield ops.gated_rms_norm.default, (x, gate, weight, 1e-6, *how, True)
        rstd = torch.rand(x.numel() // (group_size or shape[-1]), device=device) + 0.5
        for needs in ((True, True, True), (True, False, False), (False, True, True)):
            yield ops.gated_rms_norm_bwd.default, (x, x, gate, weight, rstd, *how, *needs)
        for requires_grad in (False, True):
            leaves = [
                t if t is None else t.clone().requires_grad_(requires_grad)
                for t in (x, gate, weight)
            ]
            yield ops.gated_rms_norm_fwd.default, (*leaves, 1e-6, *how, False)


GATED_RMS_NORM = Operator(
    name="gated_rms_norm",
    make_inputs=gated_rms_norm_inputs,
    reference=reference.gated_rms_norm,
    eager=eager.gated_rms_norm,
    row_inputs=("x", "gate"),
    vector_inputs=("weight",),
    outputs=("out",),
    styles=GATED_RMS_NORM_STYLES,
    roundings=("cast_before_weight",),
    inner_roundings=2,
    output_terms=reference.gated_rms_norm_terms,
    gradient_terms=reference.gated_rms_norm_terms,
    saved=("x", "gate", "weight", "rstd"),
    samples=_gated_rms_norm_samples,
)

# Group norm

GROUP_NORM_STYLES = {
    "torch": Style(),
    "silu": Style(options={"activation": "silu"}),
    "float32_affine": Style(
        inputs={"weight": torch.float32, "bias": torch.float32}, options={"activation": "silu"}
    ),
    "no_affine": Style(inputs={"weight": None, "bias": None}, options={"eps": 1e-3}),
    "no_bias": Style(inputs={"bias": None}),
}


def group_norm_inputs(shape, dtype, device, *, weight="same", bias="same", **_):
    """`x`, `weight` and `bias`: their dtypes, "same" for that of `x`, or None for none."""
    inputs = {"x": normal(shape, dtype, device, mean=0.5)}
    for name, chosen, centre in (("weight", weight, 1.0), ("bias", bias, 0.0)):
        chosen = dtype if chosen == "same" else chosen
        inputs[name] = None
        if chosen is not None:
            inputs[name] = normal(shape[1:2], chosen, device, scale=0.3, mean=centre)
    return inputs


def _group_norm_samples(kernel, device):
    """(op, arguments) of everything that is registered, for opcheck."""
    ops = kernel.norm.ops
    for dtype, affine, shape, groups, last in (
        (torch.float32, torch.float32, (2, 4, 3), 2, False),
        (torch.bfloat16, torch.float32, (2, 6, 3, 5), 3, True),
        (torch.float16, None, (3, 8), 4, False),
    ):
        x, weight, bias = group_norm_inputs(
            shape, dtype, device, weight=affine, bias=affine
        ).values()
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        number = 7 if last else 0
        yield ops.group_norm.default, (x, groups, weight, bias, 1e-5, number)
        statistics = torch.rand((shape[0] * groups, 2), device=device) + 0.5
        given = (groups, weight, bias, statistics, number)
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            yield ops.group_norm_bwd.default, (torch.ones_like(x), x, *given, *needs)
        for requires_grad in (False, True):
            leaves = [
                t if t is None else t.detach().clone().requires_grad_(requires_grad)
                for t in (x, weight, bias)
            ]
            arguments = (leaves[0], groups, *leaves[1:], 1e-5, number)
            yield ops.group_norm_fwd.default, arguments


# Not among OPERATORS: samples are no rows. tests/norm/test_group_norm.py has its tests.
GROUP_NORM = Operator(
    name="group_norm",
    make_inputs=group_norm_inputs,
    reference=reference.group_norm,
    eager=eager.group_norm,
    row_inputs=("x",),
    vector_inputs=("weight", "bias"),
    outputs=("out",),
    styles=GROUP_NORM_STYLES,
    defaults={"num_groups": 2},
    output_terms=reference.group_norm_output_terms,
    gradient_terms=reference.group_norm_gradient_terms,
    saved=("x", "weight", "bias", "statistics"),
    samples=_group_norm_samples,
)

# PolyNorm

POLY_NORM_STYLES = {
    "torch": Style(),
    "eps": Style(options={"eps": 1e-3}),
    "float32_weight": Style(inputs={"weight": torch.float32}),
    "float32_bias": Style(inputs={"bias": torch.float32}),
}


def poly_norm_inputs(shape, dtype, device, *, weight="same", bias="same", **_):
    """`x`, `weight` [3] and `bias` [1]: their dtypes, or "same" for that of `x`."""
    weight_dtype, bias_dtype = (dtype if d == "same" else d for d in (weight, bias))
    return {
        "x": normal(shape, dtype, device),
        "weight": normal((3,), weight_dtype, device, mean=1.0),
        "bias": normal((1,), bias_dtype, device),
    }


def fused_mul_poly_norm_inputs(shape, dtype, device, **style):
    inputs = poly_norm_inputs(shape, dtype, device, **style)
    return {"x": inputs.pop("x"), "mul": normal(shape, dtype, device), **inputs}


def _poly_norm_samples(kernel, device):
    """(op, arguments) of everything that is registered, for opcheck."""
    ops = kernel.norm.ops
    for dtype, weight_dtype, shape in (
        (torch.float32, torch.float32, (3, 8)),
        (torch.bfloat16, torch.float32, (2, 3, 6)),
        (torch.float16, torch.float16, (4, 16)),
    ):
        style = {"weight": weight_dtype, "bias": weight_dtype}
        x, mul, weight, bias = fused_mul_poly_norm_inputs(shape, dtype, device, **style).values()
        rstd = torch.rand((x[..., 0].numel(), 3), device=device) + 0.5
        for requires_grad in (False, True):
            x, mul, weight, bias = (
                t.detach().clone().requires_grad_(requires_grad) for t in (x, mul, weight, bias)
            )
            if not requires_grad:
                yield ops.poly_norm.default, (x, weight, bias, 1e-6)
            yield ops.poly_norm_fwd.default, (x, weight, bias, 1e-6)
            for other, mul_first in ((mul, False), (None, False), (None, True)):
                arguments = (x, other, weight, bias, 1e-6, mul_first)
                if not requires_grad:
                    yield ops.fused_mul_poly_norm.default, arguments
                yield ops.fused_mul_poly_norm_fwd.default, arguments
        x, mul, weight, bias = (t.detach() for t in (x, mul, weight, bias))
        half = x[..., : shape[-1] // 2].contiguous()
        for grad_out, other, packed, needs in (
            (x, None, False, (True, False, True, True)),
            (x, mul, False, (True, True, True, True)),
            (x, mul, False, (False, True, False, False)),
            (half, None, True, (True, False, True, False)),
        ):
            arguments = (grad_out, x, other, packed, False, weight, bias, rstd, *needs)
            yield ops.poly_norm_bwd.default, arguments
        yield from _grouped_poly_norm_samples(ops, x, mul, weight, bias, rstd)


def _grouped_poly_norm_samples(ops, x, mul, weight, bias, rstd):
    offs = torch.tensor([1, 1, 2], dtype=torch.int32, device=x.device)
    weight, bias = weight.expand(3, 3).contiguous(), bias.expand(3, 1).contiguous()
    for requires_grad in (False, True):
        for second, mul_first, limit in ((mul, False, 1.0), (None, True, None)):
            first, second, *factors = (
                None if t is None else t.detach().clone().requires_grad_(requires_grad)
                for t in (x, second, weight, bias)
            )
            arguments = (first, second, *factors, offs, 1e-6, mul_first, limit)
            if not requires_grad:
                yield ops.grouped_poly_norm.default, arguments
            yield ops.grouped_poly_norm_fwd.default, arguments
    inputs = (x, x, mul, False, weight, bias, offs, rstd, 1.0)
    for needs in ((True, True, True, True), (False, True, False, True)):
        yield ops.grouped_poly_norm_bwd.default, (*inputs, *needs)


def grouped_poly_norm_inputs(
    shape, dtype, device, *, offs=(2, 2, 5), weight="same", bias="same", **_
):
    """As those of fused_mul_poly_norm, with `offs` and a weight and a bias for each expert."""
    inputs = fused_mul_poly_norm_inputs(shape, dtype, device, weight=weight, bias=bias)
    experts = len(offs)
    for name, width, mean in (("weight", 3, 1.0), ("bias", 1, 0.0)):
        inputs[name] = normal((experts, width), inputs[name].dtype, device, mean=mean)
    return inputs | {"offs": torch.tensor(offs, dtype=torch.int32, device=device)}


POLY_NORM = Operator(
    name="poly_norm",
    make_inputs=poly_norm_inputs,
    reference=reference.poly_norm,
    eager=eager.poly_norm,
    row_inputs=("x",),
    vector_inputs=("weight", "bias"),
    vector_sizes={"weight": 3, "bias": 1},
    outputs=("out",),
    styles=POLY_NORM_STYLES,
    output_terms=reference.poly_norm_output_terms,
    gradient_terms=reference.poly_norm_gradient_terms,
    saved=("x", "weight", "bias", "rstd"),
    statistics=3,
    samples=_poly_norm_samples,
)

FUSED_MUL_POLY_NORM = Operator(
    name="fused_mul_poly_norm",
    make_inputs=fused_mul_poly_norm_inputs,
    reference=reference.fused_mul_poly_norm,
    eager=eager.fused_mul_poly_norm,
    row_inputs=("x", "mul"),
    vector_inputs=("weight", "bias"),
    vector_sizes={"weight": 3, "bias": 1},
    outputs=("out",),
    styles=POLY_NORM_STYLES,
    output_terms=reference.poly_norm_output_terms,
    gradient_terms=reference.poly_norm_gradient_terms,
    saved=("x", "mul", "weight", "bias", "rstd"),
    statistics=3,
)

# Not among OPERATORS: a row's place decides its expert, so the shared tests do not fit it.
GROUPED_POLY_NORM = Operator(
    name="grouped_poly_norm",
    make_inputs=grouped_poly_norm_inputs,
    reference=reference.grouped_poly_norm,
    eager=eager.grouped_poly_norm,
    row_inputs=("x", "mul"),
    vector_inputs=("weight", "bias"),
    outputs=("out",),
    styles={
        "torch": Style(),
        "clamp": Style(options={"hidden_clamp": 1.5}),
        "float32_factors": Style(inputs={"weight": torch.float32, "bias": torch.float32}),
    },
    output_terms=reference.grouped_poly_norm_output_terms,
    gradient_terms=reference.grouped_poly_norm_gradient_terms,
)


# Layer norm and the adaptive norms. The shared tests call them with one scale for all rows;
# tests/norm/test_ada_norm.py has those for each batch element, and for each row.


def layer_norm_inputs(shape, dtype, device, *, weight="same", bias="same", **_):
    """`x`, `weight` and `bias`: their dtypes, "same" for that of `x`, or None for none."""
    inputs = {"x": normal(shape, dtype, device, mean=0.5)}
    for name, wanted, mean in (("weight", weight, 1.0), ("bias", bias, 0.0)):
        wanted = dtype if wanted == "same" else wanted
        inputs[name] = None
        if wanted is not None:
            inputs[name] = normal(shape[-1:], wanted, device, scale=0.3, mean=mean)
    return inputs


def fused_add_layer_norm_inputs(shape, dtype, device, **style):
    inputs = layer_norm_inputs(shape, dtype, device, **style)
    return {"x": inputs.pop("x"), "residual": normal(shape, dtype, device, scale=2.0)} | inputs


def ada_norm_inputs(shape, dtype, device, *, modulation="same", form=None, names=None, **style):
    """As layer_norm_inputs, and what modulates: `form` gives its shape from that of `x`."""
    vectors = layer_norm_inputs(shape, dtype, device, **style)
    inputs = {"x": vectors.pop("x")}
    modulated = dtype if modulation == "same" else modulation
    of_shape = shape[-1:] if form is None else form(shape)
    for name in names or ("scale", "shift"):
        inputs[name] = None
        if modulation is not None:
            inputs[name] = normal(of_shape, modulated, device, scale=0.5)
    return inputs | vectors


def ada_rms_norm_inputs(shape, dtype, device, **style):
    inputs = ada_norm_inputs(shape, dtype, device, **style)
    del inputs["bias"]
    return inputs


def gate_residual_ada_norm_inputs(shape, dtype, device, **style):
    names = ("gate", "scale", "shift")
    inputs = ada_norm_inputs(shape, dtype, device, names=names, **style)
    x = inputs.pop("x")
    return {"x": x, "residual": normal(shape, dtype, device, scale=2.0)} | inputs


def _ada_norm_samples(kernel, device):
    """(op, arguments) of everything the family registers, for opcheck."""
    ops = kernel.ada_norm.ops
    for dtype, other, shape, of_batch, layer in (
        (torch.float32, torch.float32, (3, 8), None, True),
        (torch.bfloat16, torch.float32, (2, 3, 6), lambda shape: (shape[0], 1, shape[-1]), False),
        (torch.float16, torch.float16, (2, 2, 16), lambda shape: shape, True),
    ):
        made = gate_residual_ada_norm_inputs(
            shape, dtype, device, modulation=other, weight=other, form=of_batch
        )
        rows = made["x"][..., 0].numel()
        of_layer, of_either = (
            torch.rand((rows, 2) if has_mean else (rows,), device=device) + 0.5
            for has_mean in (True, layer)
        )
        for requires_grad in (False, True):
            x, residual, gate, scale, shift, weight, bias = (
                t.detach().clone().requires_grad_(requires_grad) for t in made.values()
            )
            modulated = (scale, shift, weight, bias if layer else None, 1e-6, layer)
            if not requires_grad:
                yield ops.layer_norm.default, (x, weight, bias, 1e-6)
                yield ops.fused_add_layer_norm.default, (x, residual, weight, bias, 1e-6)
                written = (x.clone(), residual.clone())
                yield ops.fused_add_layer_norm_.default, (*written, weight, bias, 1e-6)
                yield ops.ada_norm.default, (x, *modulated)
                yield ops.gate_residual_ada_norm.default, (x, residual, gate, *modulated)
            yield ops.layer_norm_fwd.default, (x, weight, bias, 1e-6)
            yield ops.fused_add_layer_norm_fwd.default, (x, residual, weight, bias, 1e-6)
            yield ops.ada_norm_fwd.default, (x, *modulated)
            yield ops.gate_residual_ada_norm_fwd.default, (x, residual, gate, *modulated)
        x, residual, gate, scale, shift, weight, bias = made.values()
        modulated = (scale, shift, weight, bias if layer else None, of_either, layer)
        for some in (True, False):
            needs = (some, True, not some)
            yield ops.layer_norm_bwd.default, (x, residual, weight, bias, of_layer, *needs)
            needs = (some, some, True, not some, some)
            yield ops.ada_norm_bwd.default, (x, residual, *modulated, *needs)
            rest = (residual, x, gate, *modulated) if some else (residual, None, None, *modulated)
            needs = (some, True, some, some, not some, True, some)
            extra = x if some else None
            yield ops.gate_residual_ada_norm_bwd.default, (x, extra, *rest, *needs)


LAYER_NORM = Operator(
    name="layer_norm",
    make_inputs=layer_norm_inputs,
    reference=reference.layer_norm,
    eager=eager.layer_norm,
    row_inputs=("x",),
    vector_inputs=("weight", "bias"),
    outputs=("out",),
    styles={"torch": Style()},
    output_terms=reference.layer_norm_terms,
    gradient_terms=reference.layer_norm_terms,
    cpu_dtypes=(torch.bfloat16,),  # gate_residual_ada_norm has the others
    saved=("x", "weight", "statistics"),
    statistics=2,
    samples=_ada_norm_samples,
)

FUSED_ADD_LAYER_NORM = Operator(
    name="fused_add_layer_norm",
    make_inputs=fused_add_layer_norm_inputs,
    reference=reference.fused_add_layer_norm,
    eager=eager.fused_add_layer_norm,
    row_inputs=("x", "residual"),
    vector_inputs=("weight", "bias"),
    outputs=("out", "new_residual"),
    styles={"torch": Style()},
    output_terms=reference.fused_add_layer_norm_terms,
    gradient_terms=reference.fused_add_layer_norm_terms,
    cpu_dtypes=(torch.float16,),  # gate_residual_ada_norm has the others
    saved=("new_residual", "weight", "statistics"),
    statistics=2,
)

ADA_LAYER_NORM = Operator(
    name="ada_layer_norm",
    make_inputs=ada_norm_inputs,
    reference=reference.ada_layer_norm,
    eager=eager.ada_layer_norm,
    row_inputs=("x",),
    vector_inputs=("scale", "shift", "weight", "bias"),
    free_shapes=("scale", "shift"),
    outputs=("out",),
    styles={"torch": Style()},
    output_terms=reference.ada_norm_terms,
    gradient_terms=reference.ada_norm_terms,
    saved=("x", "scale", "weight", "bias", "statistics"),
    statistics=2,
    op_name="ada_norm",
)

ADA_RMS_NORM = Operator(
    name="ada_rms_norm",
    make_inputs=ada_rms_norm_inputs,
    reference=reference.ada_rms_norm,
    eager=eager.ada_rms_norm,
    row_inputs=("x",),
    vector_inputs=("scale", "shift", "weight"),
    free_shapes=("scale", "shift"),
    outputs=("out",),
    styles={"torch": Style()},
    output_terms=reference.ada_rms_norm_terms,
    gradient_terms=reference.ada_rms_norm_terms,
    saved=("x", "scale", "weight", "statistics"),
    op_name="ada_norm",
)

GATE_RESIDUAL_ADA_NORM = Operator(
    name="gate_residual_ada_norm",
    make_inputs=gate_residual_ada_norm_inputs,
    reference=reference.gate_residual_ada_norm,
    eager=eager.gate_residual_ada_norm,
    row_inputs=("x", "residual"),
    vector_inputs=("gate", "scale", "shift", "weight", "bias"),
    free_shapes=("gate", "scale", "shift"),
    outputs=("out", "new_residual"),
    styles={"torch": Style()},
    output_terms=reference.gate_residual_ada_norm_terms,
    gradient_terms=reference.gate_residual_ada_norm_terms,
    cpu_dtypes=(torch.float32, torch.bfloat16),
    saved=("new_residual", "x", "gate", "scale", "weight", "bias", "statistics"),
    statistics=2,
)


# Activations. What shares a kernel is represented here by one operator; tests/gate has the others.


def _row_inputs(*names: str, width: int = 1):
    def make(shape, dtype, device, **_):
        wide = (*shape[:-1], width * shape[-1])
        return {name: normal(wide, dtype, device) for name in names}

    return make


def bias_act_inputs(shape, dtype, device, *, bias="same", **_):
    """`x` and `bias`: the dtype of the bias, "same" for that of `x`, or None for none."""
    inputs = {"x": normal(shape, dtype, device), "bias": None}
    if bias is not None:
        inputs["bias"] = normal(shape[-1:], dtype if bias == "same" else bias, device)
    return inputs


def add_mul_act_inputs(shape, dtype, device, **style):
    return bias_act_inputs(shape, dtype, device, **style) | {"y": normal(shape, dtype, device)}


def plain_operator(activation: str, **options) -> Operator:
    return Operator(
        name=activation,
        make_inputs=_row_inputs("x"),
        reference=reference.plain(activation),
        eager=eager.plain(activation),
        row_inputs=("x",),
        vector_inputs=(),
        outputs=("out",),
        styles={"torch": Style()},
        output_terms=reference.plain_terms(activation),
        gradient_terms=reference.plain_terms(activation),
        saved=("x",),
        op_name="activation",
        has_eps=False,
        **options,
    )


def act_and_mul_operator(activation: str, gate_first: bool) -> Operator:
    return Operator(
        name=f"{activation}_and_mul" if gate_first else f"mul_and_{activation}",
        make_inputs=_row_inputs("x", width=2),
        reference=reference.act_and_mul(activation, gate_first),
        eager=eager.act_and_mul(activation, gate_first),
        row_inputs=("x",),
        vector_inputs=(),
        outputs=("out",),
        styles={"torch": Style()},
        output_terms=reference.act_and_mul_terms(activation, gate_first),
        gradient_terms=reference.act_and_mul_terms(activation, gate_first),
        saved=("x",),
        op_name="act_and_mul",
        width=2,
        has_eps=False,
    )


def _gate_samples(kernel, device):
    """(op, arguments) of everything the family registers, for opcheck."""
    ops = kernel.gate.ops
    for dtype, bias_dtype, shape in (
        (torch.float32, torch.float32, (3, 8)),
        (torch.bfloat16, torch.float32, (2, 3, 6)),
        (torch.float16, None, (4, 16)),
    ):
        made = add_mul_act_inputs(shape, dtype, device, bias=bias_dtype)
        x, bias, y = made.values()
        half = x[..., : shape[-1] // 2].contiguous()
        gelu, clamped = 4, (1.702, 7.0, True)
        yield ops.activation.default, (x, gelu)
        yield ops.activation_bwd.default, (y, x, gelu)
        yield ops.act_and_mul.default, (x, gelu, True)
        yield ops.act_and_mul_bwd.default, (half, x, gelu, False)
        yield ops.swiglu_clamped.default, (x, *clamped)
        yield ops.swiglu_clamped_bwd.default, (half, x, *clamped)
        yield ops.glu.default, (x, y, gelu)
        for needs in ((True, True), (False, True), (True, False)):
            yield ops.glu_bwd.default, (y, x, y, gelu, *needs)
        yield ops.bias_act.default, (x, bias, gelu)
        yield ops.bias_act_.default, (x, bias, gelu)
        yield ops.add_mul_act.default, (x, bias, y, 0.5, gelu)
        yield ops.add_mul_act_.default, (x, bias, y, 0.5, gelu)
        for needs in ((True, True, True), (True, False, False), (False, True, False)):
            yield ops.add_mul_act_bwd.default, (y, x, bias, y, 0.5, gelu, *needs)
        yield ops.add_mul_act_bwd.default, (y, None, bias, None, 0.5, 0, False, True, True)
        for requires_grad in (False, True):
            x, bias, y = (
                t if t is None else t.clone().requires_grad_(requires_grad) for t in made.values()
            )
            yield ops.activation_fwd.default, (x, gelu)
            yield ops.act_and_mul_fwd.default, (x, gelu, False)
            yield ops.swiglu_clamped_fwd.default, (x, *clamped)
            yield ops.glu_fwd.default, (x, y, gelu)
            yield ops.bias_act_fwd.default, (x, bias, gelu)
            yield ops.add_mul_act_fwd.default, (x, bias, y, 0.5, gelu)


SILU = plain_operator("silu", samples=_gate_samples)
SILU_AND_MUL = act_and_mul_operator("silu", True)

SWIGLU_CLAMPED = Operator(
    name="swiglu_clamped",
    make_inputs=_row_inputs("x", width=2),
    reference=reference.swiglu_clamped,
    eager=eager.swiglu_clamped,
    row_inputs=("x",),
    vector_inputs=(),
    outputs=("out",),
    styles={
        "torch": Style(),
        "gpt_oss": Style(options={"alpha": 1.702, "limit": 7.0}),
        "halves": Style(options={"interleaved": False}),
    },
    defaults={"limit": 1.25},  # so that many values are clamped
    output_terms=reference.swiglu_clamped_terms,
    gradient_terms=reference.swiglu_clamped_terms,
    saved=("x",),
    width=2,
    has_eps=False,
)

_GLU = {
    "make_inputs": _row_inputs("gate", "up"),
    "row_inputs": ("gate", "up"),
    "vector_inputs": (),
    "outputs": ("out",),
    "output_terms": reference.glu_terms,
    "saved": ("gate", "up"),
    "op_name": "glu",
    "has_eps": False,
}
SWIGLU = Operator(
    name="swiglu",
    reference=reference.swiglu,
    eager=eager.swiglu,
    styles={"torch": Style()},
    gradient_terms=reference.glu_terms,
    **_GLU,
)
GEGLU = Operator(
    name="geglu",
    reference=reference.geglu,
    eager=eager.geglu,
    styles={"torch": Style(), "tanh": Style(options={"activation": "gelu_tanh"})},
    defaults={"activation": "gelu"},
    gradient_terms=reference.glu_terms,
    **_GLU,
)

_ADD = {
    "vector_inputs": ("bias",),
    "outputs": ("out",),
    "output_terms": reference.add_terms,
    "gradient_terms": reference.add_terms,
    "has_eps": False,
}
BIAS_ACT = Operator(
    name="bias_act",
    make_inputs=bias_act_inputs,
    reference=reference.bias_act,
    eager=eager.bias_act,
    row_inputs=("x",),
    styles={
        "torch": Style(),
        "relu": Style(options={"activation": "relu"}),
        "sigmoid": Style(options={"activation": "sigmoid"}),
        "tanh": Style(options={"activation": "tanh"}),
        "silu": Style(options={"activation": "silu"}),
        "no_bias": Style(inputs={"bias": None}, options={"activation": "gelu_tanh"}),
        "float32_bias": Style(inputs={"bias": torch.float32}, options={"activation": "none"}),
    },
    defaults={"activation": "gelu"},
    saved=("x", "bias"),
    **_ADD,
)
ADD_MUL_ACT = Operator(
    name="add_mul_act",
    make_inputs=add_mul_act_inputs,
    reference=reference.add_mul_act,
    eager=eager.add_mul_act,
    row_inputs=("x", "y"),
    styles={
        "torch": Style(),
        "none": Style(options={"activation": "none"}),
        "gelu": Style(options={"activation": "gelu"}),
        "no_bias": Style(inputs={"bias": None}),
        "float32_bias": Style(inputs={"bias": torch.float32}),
    },
    defaults={"alpha": 0.5, "activation": "silu"},
    saved=("x", "bias", "y"),
    **_ADD,
)

# Rotary embedding. Not among OPERATORS: q and k have tokens and heads, which shared tests do not
# know. tests/rope has tests of the same contracts.


def rotary_operator(name: str, **options) -> Operator:
    """Called with the given tables and options, unless a test says otherwise."""
    norm = name == "qk_norm_rotary"
    return Operator(
        name=name,
        make_inputs=None,
        reference=getattr(reference, name),
        eager=getattr(eager, name),
        row_inputs=("q", "k"),
        vector_inputs=("q_weight", "k_weight") if norm else (),
        outputs=("q_out", "k_out"),
        styles={},
        roundings=("cast_before_weight",),
        output_terms=getattr(reference, f"{name}_terms"),
        gradient_terms=getattr(reference, f"{name}_gradient_terms"),
        samples=_rotary_samples,
        defaults=options,
        has_eps=norm,
    )


def _rotary_samples(kernel, device):
    """(op, arguments) of everything the family registers, for opcheck."""
    ops = kernel.rope.ops
    for dtype, shape, table, positions, rotary in (
        # positions: ids, offsets, offset; rotary: interleaved, heads_dim, rotary_dim
        (torch.float32, (2, 3, 4, 8), (3, 8), (None, None, None), (False, 2, None)),
        (torch.bfloat16, (2, 2, 3, 12), (9, 4), ("ids", None, None), (True, 1, 8)),
        (torch.float16, (2, 3, 16), (9, 16), (None, "offsets", None), (True, 2, None)),
    ):
        q, k, grad_q, grad_k = (normal(shape, dtype, device) for _ in range(4))
        weight = normal(shape[-1:], dtype, device)
        cos, sin = (normal(table, torch.float32, device) for _ in range(2))
        ids = torch.arange(3, device=device).expand(2, 3).contiguous()
        offsets = torch.tensor([2, 4], dtype=torch.int32, device=device)
        tables = (cos, sin, ids if positions[0] else None, offsets if positions[1] else None, None)
        norm = (1e-6, 0.0)
        x, y, w = (t.clone().requires_grad_() for t in (q, k, weight))
        yield ops.apply_rotary_fwd.default, (x, y, *tables, *rotary)
        yield ops.qk_norm_rotary_fwd.default, (x, y, w, w, *tables, *norm, False, *rotary)
        backward = (grad_q, grad_k, q, k, weight, weight, *tables, *norm, *rotary)
        yield ops.qk_norm_rotary_bwd.default, (*backward, True, False, False, True)
        if positions == (None, None, None):
            yield ops.apply_rotary.default, (q, k, *tables, *rotary)
            yield ops.apply_rotary.default, (q, None, *tables, *rotary)
            yield ops.apply_rotary_bwd.default, (q, k, *tables, *rotary)
            yield ops.apply_rotary_.default, (q, k, *tables, *rotary)
            yield ops.qk_norm_rotary.default, (q, k, weight, None, *tables, *norm, True, *rotary)


APPLY_ROTARY = rotary_operator("apply_rotary")


# Sampling. Not among OPERATORS: tokens are no numbers to compare. tests/sample has its tests.


def _sampling_samples(kernel, device):
    """(op, arguments) of everything the family registers, for opcheck."""
    ops = kernel.sampling.ops
    hidden, weight = (normal((rows, 16), torch.bfloat16, device) for rows in (3, 50))
    temperature = torch.ones(3, device=device)
    for top_k, top_p, logprobs in ((None, None, False), (5, 0.9, True)):
        seed, offset = (torch.tensor([n], device=device) for n in (3, 6))
        noise = (seed, offset if logprobs else None, temperature, 1.0)
        filters = (None, top_k, None, top_p, None, None)
        yield (
            ops.lm_head_sample.default,
            (hidden, weight, None, None, 5.0, *noise, *filters, 2, 0, logprobs),
        )
        yield (
            ops.gumbel_sample.default,
            (hidden @ weight.T, None, None, *noise, *filters, 2, 0, logprobs),
        )
        yield (
            ops.lm_head_sample_shard.default,
            (hidden, weight, None, None, None, *noise, 2, 0, logprobs),
        )


LM_HEAD_SAMPLE = Operator(
    name="lm_head_sample",
    make_inputs=None,
    reference=None,
    eager=None,
    row_inputs=("hidden",),
    vector_inputs=(),
    outputs=("tokens",),
    styles={},
    samples=_sampling_samples,
    has_eps=False,
)

# Loss. Not among OPERATORS: results are of rows, and float32. tests/loss has its tests.


def _loss_samples(kernel, device):
    """(op, arguments) of everything the family registers, for opcheck."""
    ops = kernel.loss.ops
    targets = torch.tensor([[3, 0, -100], [7, 2, 2]], device=device)
    weights = normal((2, 3), torch.float32, device)
    statistics = torch.rand((6, 2), device=device) + 2
    for dtype, number, softcap in ((torch.float32, 0, None), (torch.bfloat16, 2, 5.0)):
        made = normal((2, 3, 9), dtype, device)
        options = (number, -100, 0.1, 0.01, softcap)
        count = torch.ones(1 if number else 0, device=device)
        grad = torch.ones((), device=device) if number else weights
        saved = (targets, weights, statistics, count, *options)
        yield ops.cross_entropy_bwd.default, (grad, made, *saved)
        yield ops.cross_entropy_bwd_.default, (made.clone(), grad, *saved)
        yield ops.cross_entropy.default, (made, targets, weights, *options)
        temperature, entropy = (0.7, softcap, -100), bool(number)
        yield ops.log_probs.default, (made, targets, *temperature, entropy)
        for some in (weights, None):
            grads = (weights, some, some)
            of_rows = torch.rand((2, 3), device=device)
            yield (
                ops.log_probs_bwd.default,
                (*grads, made, targets, of_rows, statistics, *temperature),
            )
        for requires_grad in (False, True):
            logits = made.clone().requires_grad_(requires_grad)
            yield ops.cross_entropy_fwd.default, (logits, targets, None, *options, False)
            yield ops.log_probs_fwd.default, (logits, targets, *temperature, entropy)


def _linear_loss_samples(kernel, device):
    """Of the losses of a head."""
    ops = kernel.loss.ops
    targets = torch.tensor([3, 0, -100, 7, 2, 2], device=device)
    weights, of_rows = (torch.rand(6, device=device) for _ in range(2))
    statistics = torch.rand((6, 2), device=device) + 2
    for dtype, number in ((torch.float32, 0), (torch.bfloat16, 2)):
        hidden, weight = normal((6, 16), dtype, device), normal((9, 16), dtype, device)
        bias = normal((9,), dtype, device) if number else None
        head, needs = (hidden, weight, bias, targets), (True, True, bias is not None)
        options, temperature = (number, -100, 0.1, 0.01, 5.0), (0.7, None, -100)
        count = torch.ones(1 if number else 0, device=device)
        grad = torch.ones((), device=device) if number else weights
        logits = ops.head_logits.default(hidden, weight, bias)
        yield ops.head_logits.default, (hidden, weight, bias)
        grad_logits = torch.empty_like(logits, dtype=dtype)
        divisor = count if number else None
        factors = (grad, weights, divisor, 0.1, 0.01, None, None, None, None, 1.0, None)
        given = (grad_logits, logits, targets, statistics, *factors, -100, 2, 20)
        yield ops.loss_columns_bwd_.default, given
        outputs = (grad_logits, torch.empty_like(weights), torch.empty_like(statistics))
        given = (*outputs, logits, targets, weights, grad, divisor, -100, 0.1, 0.01, 5.0)
        yield ops.cross_entropy_fwd_bwd_.default, given
        yield ops.multiply_.default, (grad_logits.contiguous(), torch.tensor(0.3, device=device))
        yield ops.linear_cross_entropy.default, (*head, weights, *options, 512)
        yield ops.linear_log_probs.default, (*head, *temperature, bool(number), 512)
        saved = (weights, grad, statistics, count)
        yield ops.linear_cross_entropy_bwd.default, (*head, *saved, *options, 512, *needs)
        saved = (weights, of_rows, None, of_rows, statistics)
        yield ops.linear_log_probs_bwd.default, (*head, *saved, *temperature, 512, *needs)
        for requires_grad in (False, True):
            given = (hidden.clone().requires_grad_(requires_grad), *head[1:])
            for some in (needs, (True, False, False)):
                forward = (*given, weights, *options, 512, *some)
                yield ops.linear_cross_entropy_fwd.default, forward
            yield ops.linear_log_probs_fwd.default, (*given, *temperature, bool(number), 512)


CROSS_ENTROPY = dataclasses.replace(
    LM_HEAD_SAMPLE,
    name="cross_entropy",
    row_inputs=("logits",),
    outputs=("loss",),
    samples=_loss_samples,
)
LINEAR_CROSS_ENTROPY = dataclasses.replace(
    LM_HEAD_SAMPLE,
    name="linear_cross_entropy",
    outputs=("loss",),
    samples=_linear_loss_samples,
)


# Choosing experts. Not among OPERATORS: indices are no numbers to compare. tests/route has its
# tests.


def _route_samples(kernel, device):
    """(op, arguments) of everything the family registers, for opcheck."""
    ops = kernel.route.ops
    for dtype, shape, score, groups in (
        (torch.float32, (3, 16), 0, (None, None)),
        (torch.bfloat16, (2, 3, 24), 1, (4, 2)),
        (torch.float16, (5, 7), 0, (None, None)),
    ):
        made = normal(shape, dtype, device)
        bias = normal(shape[-1:], torch.float32, device) if score else None
        for renormalize in (True, False):
            options = (3, score, bias, *groups, renormalize)
            weights, indices = ops.topk_softmax.default(made, *options)
            yield ops.topk_softmax.default, (made, *options)
            saved = (made, weights, indices, score, renormalize)
            yield ops.topk_softmax_bwd.default, (torch.ones_like(weights), *saved)
            for requires_grad in (False, True):
                logits = made.clone().requires_grad_(requires_grad)
                yield ops.topk_softmax_fwd.default, (logits, *options)


TOPK_SOFTMAX = dataclasses.replace(
    LM_HEAD_SAMPLE,
    name="topk_softmax",
    row_inputs=("logits",),
    outputs=("weights", "indices"),
    samples=_route_samples,
)


# Quantisation. Not among OPERATORS: results are codes. tests/quant has its tests.


def _quant_samples(kernel, device):
    """(op, arguments) of everything the family registers, for opcheck."""
    op = kernel.quant.ops.quant_fp8.default
    given = torch.tensor([0.02], device=device)
    for dtype, shape in ((torch.float32, (3, 8)), (torch.bfloat16, (2, 3, 200))):
        x = normal(shape, dtype, device)
        for options in (
            (None, -1, False, False, torch.float8_e4m3fn),
            (None, 128, False, True, torch.float8_e5m2),
            (None, 128, True, False, torch.float8_e4m3fn),
            (None, -1, False, False, torch.int8),
            (given, -1, False, False, torch.float8_e4m3fn),
        ):
            yield op, (x, *options)


QUANT_FP8 = dataclasses.replace(
    LM_HEAD_SAMPLE,
    name="quant_fp8",
    row_inputs=("x",),
    outputs=("q", "scale"),
    samples=_quant_samples,
)


def _fused_quant_samples(kernel, device):
    ops, e4m3 = kernel.quant.ops, torch.float8_e4m3fn
    given = torch.tensor([0.02], device=device)
    for options in (
        (None, -1, False, False, True, e4m3),
        (None, 128, True, True, False, e4m3),
        (given, -1, False, False, False, torch.int8),
    ):
        x, y = (normal((2, 3, 200), torch.bfloat16, device) for _ in range(2))
        weight, bias = (normal((200,), torch.bfloat16, device) for _ in range(2))
        rms = (1e-6, 1.0, True, *options)
        yield ops.rms_norm_quant.default, (x, weight, *rms)
        yield ops.fused_add_rms_norm_quant.default, (x, y, weight, *rms)
        yield ops.layer_norm_quant.default, (x, weight, bias, 1e-5, *options)
        yield ops.ada_layer_norm_quant.default, (x, y[:, 0], x[:, 1], None, bias, 1e-6, *options)
        yield ops.silu_and_mul_quant.default, (x, *options)
        yield ops.swiglu_quant.default, (x, y, *options)
        yield ops.gelu_tanh_quant.default, (x, *options)


FUSED_QUANT = dataclasses.replace(QUANT_FP8, name="fused_quant", samples=_fused_quant_samples)

OPERATORS = (
    RMS_NORM,
    FUSED_ADD_RMS_NORM,
    RMS_NORM_ADD_RMS_NORM,
    GATED_RMS_NORM,
    LAYER_NORM,
    FUSED_ADD_LAYER_NORM,
    GATE_RESIDUAL_ADA_NORM,
    POLY_NORM,
    FUSED_MUL_POLY_NORM,
    SILU,
    SILU_AND_MUL,
    SWIGLU_CLAMPED,
    SWIGLU,
    GEGLU,
    BIAS_ACT,
    ADD_MUL_ACT,
)

# Everything that has samples for opcheck.
SAMPLED = tuple(
    op
    for op in (
        *(*OPERATORS, APPLY_ROTARY, LM_HEAD_SAMPLE, CROSS_ENTROPY, LINEAR_CROSS_ENTROPY),
        *(TOPK_SOFTMAX, GROUP_NORM, QUANT_FP8, FUSED_QUANT),
    )
    if op.samples is not None
)
