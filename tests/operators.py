"""The operators under test: an entry here gives an operator every test in this folder."""

from __future__ import annotations

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

OPERATORS = (RMS_NORM, FUSED_ADD_RMS_NORM)
