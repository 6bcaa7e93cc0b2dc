"""Norms of rows whose columns are spread over the ranks of one dimension of a mesh.

    forward    local sums of each row, ONE all-gather of one to three floats a row, results
    backward   local sums of each row, ONE all-gather likewise, the gradient of x

The sums of all ranks are added up in the order of the ranks, by every rank: statistics have the
same bits everywhere, and those of a row do not depend on how many rows there are. (The order of an
all-reduce does: docs/design-decisions.md.)

Gradients of weights and biases, and of `mul`, need the statistics and nothing from other ranks: the
kernels of whole rows make them, while the gradient's sums are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._fake import fake_kernel_of, floats_of_rows, like
from ._ops import ops

RMS, LAYER, POLY = range(3)  # as the ops number them

Gather = Callable[[torch.Tensor], torch.Tensor]  # [rows, floats] -> [ranks, rows, floats]

_shard_norm_sums = ops.shard_norm_sums.default
_shard_norm = ops.shard_norm.default
_shard_norm_bwd_sums = ops.shard_norm_bwd_sums.default
_shard_norm_bwd = ops.shard_norm_bwd.default
_rms_norm_bwd = ops.rms_norm_bwd.default
_layer_norm_bwd = ops.layer_norm_bwd.default
_gate_residual_ada_norm_bwd = ops.gate_residual_ada_norm_bwd.default
_poly_norm_bwd = ops.poly_norm_bwd.default


# Forward: `a` are a rank's own arguments of the op, and `dim` the columns of all ranks.


def _forward(a: dict[str, Any], dim: int, gather: Gather, kind: int) -> tuple[torch.Tensor, ...]:
    """(out, statistics), with new_residual in between where there is a residual."""
    x, residual = a["x"], a.get("residual")
    sums, new_residual = _shard_norm_sums(x, residual, kind)
    s = x if residual is None else new_residual
    out_dtype = a.get("out_dtype")
    casts = out_dtype not in (None, x.dtype, torch.float32)  # of float32: exact but for this
    out, statistics = _shard_norm(
        *(s, a.get("mul"), gather(sums), a["weight"], a.get("bias"), dim, a["eps"]),
        *(a.get("weight_offset", 0.0), a.get("cast_before_weight", False)),
        *(None if casts else out_dtype, kind),
    )
    if casts:
        out = out.to(out_dtype)
    return (out, statistics) if residual is None else (out, new_residual, statistics)


def _forward_of(kind: int, results: int, for_gradient: bool) -> Callable:
    def run(a: dict[str, Any], dim: int, gather: Gather):
        outputs = _forward(a, dim, gather, kind)
        if for_gradient:
            return outputs
        return outputs[0] if results == 1 else outputs[:results]

    return run


# Backward: the gradient's sums are gathered while those of weights are made.


def _grad_out_for(a: dict[str, Any]) -> torch.Tensor:
    """`grad_out` in a dtype that the ops take: that of a float32 x may be half."""
    grad_out, x = a["grad_out"], a["x"]
    return grad_out.float() if x.dtype == torch.float32 else grad_out


def _rms_norm_backward(a: dict[str, Any], dim: int, gather: Gather):
    grad_out, x, weight, rstd = _grad_out_for(a), a["x"], a["weight"], a["rstd"]
    offset, needs_x = a["weight_offset"], a["needs_grad_x"]
    if needs_x:
        sums = _shard_norm_bwd_sums(grad_out, x, None, weight, None, rstd, offset, RMS)
        gathered = gather(sums)
    other = a["grad_new_residual"]  # tells the weight's gradient of rows that are not used, too
    grad_x, grad_weight = _rms_norm_bwd(
        a["grad_out"], other, x, weight, rstd, offset, False, a["needs_grad_weight"]
    )
    if needs_x:
        grad_x = _shard_norm_bwd(
            grad_out, other, x, None, gathered, weight, None, rstd, dim, offset, RMS
        )
    return grad_x, grad_weight


def _layer_norm_backward(a: dict[str, Any], dim: int, gather: Gather):
    """Also of fused_add_layer_norm: with `grad_new_residual`."""
    grad_out, x, weight, bias = a["grad_out"], a["x"], a["weight"], a["bias"]
    statistics, needs_x = a["statistics"], a["needs_grad_x"]
    if needs_x:
        sums = _shard_norm_bwd_sums(grad_out, x, None, weight, None, statistics, 0.0, LAYER)
        gathered = gather(sums)
    other, needs = a.get("grad_new_residual"), (a["needs_grad_weight"], a["needs_grad_bias"])
    if other is None:
        grad_x, *grads = _layer_norm_bwd(grad_out, x, weight, bias, statistics, False, *needs)
    else:  # as above: rows that are not used
        grad_x, *_, grad_weight, grad_bias = _gate_residual_ada_norm_bwd(
            *(grad_out, other, x, None, None, None, None, weight, bias, statistics, True),
            *(False, False, False, False, False, *needs),
        )
        grads = (grad_weight, grad_bias)
    if needs_x:
        grad_x = _shard_norm_bwd(
            *(grad_out, other, x, None, gathered, weight, None, statistics, dim, 0.0, LAYER)
        )
    return grad_x, *grads


def _fused_add_layer_norm_backward(a: dict[str, Any], dim: int, gather: Gather):
    given = a | {"x": a["new_residual"], "needs_grad_x": a["needs_grad_residual"]}
    grad_sum, grad_weight, grad_bias = _layer_norm_backward(given, dim, gather)
    nothing = grad_sum.new_empty((0,))
    return nothing, grad_sum, nothing, nothing, nothing, grad_weight, grad_bias


def _poly_norm_backward(a: dict[str, Any], dim: int, gather: Gather):
    grad_out, x, mul, rstd = a["grad_out"], a["x"], a["mul"], a["rstd"]
    factors, needs_x = (a["weight"], a["bias"]), a["needs_grad_x"]
    if needs_x:
        sums = _shard_norm_bwd_sums(grad_out, x, mul, *factors, rstd, 0.0, POLY)
        gathered = gather(sums)
    others = (a["needs_grad_mul"], a["needs_grad_weight"], a["needs_grad_bias"])
    grad_x, *grads = _poly_norm_bwd(grad_out, x, mul, False, False, *factors, rstd, False, *others)
    if needs_x:
        grad_x = _shard_norm_bwd(grad_out, None, x, mul, gathered, *factors, rstd, dim, 0.0, POLY)
    return grad_x, *grads


def _both(name: str, kind: int, results: int = 1) -> dict[str, Callable]:
    return {
        name: _forward_of(kind, results, for_gradient=False),
        f"{name}_fwd": _forward_of(kind, results, for_gradient=True),
    }


# What runs an op: run(arguments, dim, gather).
RUN: dict[str, Callable] = {
    **_both("rms_norm", RMS),
    **_both("fused_add_rms_norm", RMS, results=2),
    "rms_norm_bwd": _rms_norm_backward,
    **_both("layer_norm", LAYER),
    **_both("fused_add_layer_norm", LAYER, results=2),
    "layer_norm_bwd": _layer_norm_backward,
    "gate_residual_ada_norm_bwd": _fused_add_layer_norm_backward,
    **_both("poly_norm", POLY),
    **_both("fused_mul_poly_norm", POLY),
    "poly_norm_bwd": _poly_norm_backward,
}


# Shapes and dtypes of the results, for tracing.


@fake_kernel_of("shard_norm_sums")
def _(x, residual, kind):
    new_residual = x.new_empty((0,)) if residual is None else like(x)
    return floats_of_rows(x, 1 if kind == RMS else 3), new_residual


@fake_kernel_of("shard_norm")
def _(x, mul, gathered, weight, bias, dim, eps, weight_offset, cast, out_dtype, kind):
    statistics = floats_of_rows(x, *() if kind == RMS else (kind + 1,))
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), statistics


@fake_kernel_of("shard_norm_bwd_sums")
def _(grad_out, x, mul, weight, bias, statistics, weight_offset, kind):
    return floats_of_rows(x, kind + 1)


@fake_kernel_of("shard_norm_bwd")
def _(grad_out, grad_new_residual, x, *others):
    return like(x)
