"""What each operator computes, in float64 and as the formula.

Inputs are float64 and the result is not rounded: the tests say how far off that may be.
Where a formula rounds, it rounds to `dtype`, that of the activations, with a gradient of one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class _RoundTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype).to(torch.float64)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def round_to(dtype: torch.dtype, x: Tensor) -> Tensor:
    return _RoundTo.apply(x, dtype)


# Norms


def rms_norm(
    x: Tensor,  # [..., dim]
    weight: Tensor | None = None,  # [dim]
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    dtype: torch.dtype,
) -> Tensor:
    n = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        n = round_to(dtype, n)
    return n if weight is None else n * (weight_offset + weight)


def fused_add_rms_norm(
    x: Tensor,  # [..., dim]
    residual: Tensor,  # [..., dim]
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype,
    **options,
) -> tuple[Tensor, Tensor]:
    new_residual = round_to(dtype, x + residual)
    return rms_norm(new_residual, weight, eps, dtype=dtype, **options), new_residual


def rms_norm_add_rms_norm(
    x: Tensor,  # [..., dim]
    residual: Tensor,  # [..., dim]
    post_weight: Tensor | None = None,  # [dim]
    pre_weight: Tensor | None = None,  # [dim]
    eps: float = 1e-6,
    *,
    pre_eps: float | None = None,
    dtype: torch.dtype,
    **options,
) -> tuple[Tensor, Tensor]:
    n = round_to(dtype, rms_norm(x, post_weight, eps, dtype=dtype, **options))
    new_residual = round_to(dtype, residual + n)
    pre_eps = eps if pre_eps is None else pre_eps
    return rms_norm(new_residual, pre_weight, pre_eps, dtype=dtype, **options), new_residual


def rms_norm_add_rms_norm_terms(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor | None = None,
    pre_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    pre_eps: float | None = None,
    weight_offset: float = 0.0,
    grad_out: Tensor | None = None,
    grad_new_residual: Tensor | None = None,
    **_,
) -> dict[str, Tensor]:
    """The sizes of the terms of the results, or of the gradients: as in rms_norm_gradient_terms."""
    pre_eps = eps if pre_eps is None else pre_eps
    options = {"weight_offset": weight_offset, "dtype": torch.float64}
    n = rms_norm(x, post_weight, eps, **options)
    new_residual, sizes = residual + n, residual.abs() + n.abs()
    if grad_out is None and grad_new_residual is None:
        factor = 1 if pre_weight is None else (weight_offset + pre_weight).abs()
        rstd = 1 / torch.sqrt(new_residual.pow(2).mean(-1, keepdim=True) + pre_eps)
        return {"new_residual": sizes, "out": sizes * rstd * factor}
    of_sum = rms_norm_gradient_terms(
        *(new_residual, pre_weight, pre_eps),
        weight_offset=weight_offset,
        grad_out=grad_out,
        grad_new_residual=grad_new_residual,
        sizes=sizes,
    )
    of_x = rms_norm_gradient_terms(
        x, post_weight, eps, weight_offset=weight_offset, grad_out=of_sum["x"]
    )
    return {
        "x": of_x["x"],
        "residual": of_sum["x"],
        "post_weight": of_x["weight"],
        "pre_weight": of_sum["weight"],
    }


def rms_norm_gradient_terms(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    grad_out: Tensor | None = None,
    grad_new_residual: Tensor | None = None,
    sizes: Tensor | None = None,  # of what x is the sum of
    **_,
) -> dict[str, Tensor]:
    """The sizes of the terms whose sum is the gradient; the sum itself can be far smaller.

    grad_x      = rstd * (g - xhat * mean(g * xhat)) + grad_new_residual, with g = grad_out * factor
    grad_weight = sum over rows of grad_out * xhat
    """
    s = x if residual is None else x + residual
    grad_out = torch.zeros_like(s) if grad_out is None else grad_out.abs()
    rstd = 1 / torch.sqrt(s.pow(2).mean(-1, keepdim=True) + eps)
    xhat = (s.abs() if sizes is None else sizes) * rstd
    g = grad_out if weight is None else grad_out * (weight_offset + weight).abs()
    sizes = rstd * (g + xhat * (g * xhat).mean(-1, keepdim=True))
    if grad_new_residual is not None:
        sizes = sizes + grad_new_residual.abs()
    return {"x": sizes, "residual": sizes, "weight": (grad_out * xhat).sum_to_size(s.shape[-1])}


GATES = {
    "silu": torch.nn.functional.silu,
    # The slope of a sigmoid near one has no digits: each side from where it is near zero.
    "sigmoid": lambda u: torch.where(u < 0, torch.sigmoid(u), 1 - torch.sigmoid(-u)),
}


def _in_groups(group_size: int | None, *tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors `[..., dim]` as `[..., groups, group_size]`."""
    return [
        None if t is None else t.unflatten(-1, (-1, group_size or max(t.shape[-1], 1)))
        for t in tensors
    ]


def gated_rms_norm(
    x: Tensor,  # [..., dim]
    gate: Tensor,  # [..., dim]
    weight: Tensor | None = None,  # [dim]
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    cast_before_weight: bool = False,
    dtype: torch.dtype,
) -> Tensor:
    """Norm first, cast_before_weight rounds the product with a weight of `dtype`, too."""
    a = GATES[activation](gate)
    s = x if norm_before_gate else x * a
    (grouped,) = _in_groups(group_size, s)
    out = rms_norm(grouped, None, eps, dtype=dtype, cast_before_weight=cast_before_weight)
    out = out.flatten(-2)
    if weight is not None:
        out = out * weight
    if not norm_before_gate:
        return out
    return (round_to(dtype, out) if cast_before_weight else out) * a


def gated_rms_norm_terms(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    grad_out: Tensor | None = None,
    **_,
):
    """The sizes of the terms of the result, or of the gradients: as in rms_norm_gradient_terms, and
    what noise in the gate makes of its activation and slope."""
    # Below `tiny` a float32 has fewer bits: sigmoids, and their products.
    tiny, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    finite = gate.clamp(-most, most)
    small = tiny * (1 + finite.abs())
    # Below it, and so of gates from 87 on, a GPU takes e^-|gate| for zero in half precision: an
    # error of that size, where others are of its 2^-24. From 104 on it is zero in any case.
    small = torch.where((finite.abs() > 87) & (finite.abs() < 104), 2**24 * small, small)
    a, slope = (t + small for t in _terms(GATES[activation], finite, finite.abs()))
    s = x if norm_before_gate else x * GATES[activation](gate)
    x, s, a, slope, grad_out, weight = _in_groups(
        group_size, x.abs() + tiny, s, a, slope, grad_out, weight
    )
    rstd = 1 / torch.sqrt(s.pow(2).mean(-1, keepdim=True) + eps)
    weight = torch.ones_like(x) if weight is None else weight.abs()
    if grad_out is None:
        return ((x * a + tiny) * rstd * weight).flatten(-2)
    t = grad_out.abs() * x * a * rstd
    mean = (t * weight).mean(-1, keepdim=True)
    g = grad_out.abs() * weight
    if norm_before_gate:
        of_x, of_gate = rstd * (g * a + x * rstd * mean), g * x * rstd * slope
    else:
        of_s = rstd * (g + x * a * rstd * mean) + tiny
        of_x, of_gate = of_s * a, of_s * x * slope
    sizes = {"x": of_x, "gate": of_gate, "weight": t.sum_to_size(t.shape[-2:])}
    return {name: size.flatten(-2) for name, size in sizes.items()}


def _group_norm_parts(x: Tensor, num_groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`x` as [samples, groups, size], its mean and its rstd."""
    grouped = x.reshape(x.shape[0], num_groups, -1)
    mean = grouped.mean(-1, keepdim=True)
    variance = (grouped - mean).pow(2).mean(-1, keepdim=True)
    return grouped, mean, 1 / torch.sqrt(variance + eps)


def _of_channels(values: Tensor | None, x: Tensor, missing: float) -> Tensor | float:
    return missing if values is None else values.view(-1, *[1] * (x.dim() - 2))


def group_norm(
    x: Tensor,  # [samples, channels, ...]
    num_groups: int,
    weight: Tensor | None = None,  # [channels]
    bias: Tensor | None = None,  # [channels]
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    grouped, mean, rstd = _group_norm_parts(x, num_groups, eps)
    n = ((grouped - mean) * rstd).reshape(x.shape)
    y = n * _of_channels(weight, x, 1.0) + _of_channels(bias, x, 0.0)
    return y if activation is None else y * torch.sigmoid(y)


def group_norm_output_terms(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> Tensor:
    """The sizes of the terms whose sum is the result. The slope of silu is at most 1.1."""
    grouped, _, rstd = _group_norm_parts(x, num_groups, eps)
    n = ((grouped.abs() + grouped.abs().mean(-1, keepdim=True)) * rstd).reshape(x.shape)
    weight, bias = _of_channels(weight, x, 1.0), _of_channels(bias, x, 0.0)
    return n * abs(weight) + abs(bias)


def group_norm_gradient_terms(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    grad_out: Tensor,
) -> dict[str, Tensor]:
    """The same of the gradients, with a = grad_out * slope of the activation

    grad_x      = rstd * (a * weight - mean(a * weight) - n * mean(a * weight * n))
    grad_weight = sum of a * n
    grad_bias   = sum of a
    """
    grouped, _, rstd = _group_norm_parts(x, num_groups, eps)
    n = ((grouped.abs() + grouped.abs().mean(-1, keepdim=True)) * rstd).reshape(x.shape)
    a = grad_out.abs()
    if (
        activation is not None
    ):  # the slope of silu changes by at most half of what its argument does
        a = a * (1 + group_norm_output_terms(x, num_groups, weight, bias, eps) / 2)
    g = a * abs(_of_channels(weight, x, 1.0))

    def mean_of(t: Tensor) -> Tensor:
        means = t.reshape(grouped.shape).mean(-1, keepdim=True)
        return means.expand(grouped.shape).reshape(x.shape)

    of_x = (g + mean_of(g) + n * mean_of(g * n)).reshape(grouped.shape) * rstd
    others = [0, *range(2, x.dim())]
    return {
        "x": of_x.reshape(x.shape),
        "weight": (a * n).sum(others),
        "bias": a.sum(others),
    }


def _poly_norm_parts(x: Tensor, eps: float) -> list[Tensor]:
    """N(x^3), N(x^2), N(x), in the order of the weights."""
    powers = (x * x * x, x * x, x)
    return [u / torch.sqrt(u.pow(2).mean(-1, keepdim=True) + eps) for u in powers]


def poly_norm(
    x: Tensor,  # [..., dim]
    weight: Tensor,  # [3]
    bias: Tensor,  # [1]
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    cube, square, line = _poly_norm_parts(x, eps)
    return weight[0] * cube + weight[1] * square + weight[2] * line + bias


def fused_mul_poly_norm(
    x: Tensor,  # [..., dim]
    mul: Tensor,  # [..., dim]
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return poly_norm(x, weight, bias, eps) * mul


def poly_norm_output_terms(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, *, mul: Tensor | None = None
) -> Tensor:
    """The sizes of the terms whose sum is the result; the sum itself can be far smaller."""
    parts = [*_poly_norm_parts(x.abs(), eps), torch.ones_like(x)]
    factors = [*weight.abs(), bias.abs()]
    terms = sum(factor * part for factor, part in zip(factors, parts, strict=True))
    return terms if mul is None else terms * mul.abs()


def poly_norm_gradient_terms(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    *,
    mul: Tensor | None = None,
    grad_out: Tensor,
) -> dict[str, Tensor]:
    """The same of the gradients, g = grad_out * mul, n = 3, 2, 1, r = 1 / sqrt(mean(x^2n) + eps)

    grad_x      = sum over n of w * n * r * x^(n-1) * (g - N(x^n) * mean(g * N(x^n)))
    grad_weight = sum of g * N(x^n)
    grad_bias   = sum of g
    grad_mul    = grad_out * poly_norm(x)
    """
    x, g = x.abs(), grad_out.abs()
    grad_mul = g * poly_norm_output_terms(x, weight, bias, eps)
    g = g if mul is None else g * mul.abs()
    grad_x, grad_weight = 0.0, []
    for n, factor, part in zip((3, 2, 1), weight.abs(), _poly_norm_parts(x, eps), strict=True):
        rstd = 1 / torch.sqrt(x.pow(2 * n).mean(-1, keepdim=True) + eps)
        of_mean = part * (g * part).mean(-1, keepdim=True)
        grad_x = grad_x + factor * n * rstd * x.pow(n - 1) * (g + of_mean)
        grad_weight.append((g * part).sum())
    return {
        "x": grad_x,
        "mul": grad_mul,
        "weight": torch.stack(grad_weight),
        "bias": g.sum().reshape(1),
    }


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """With the gradient at the limits themselves, as models were trained.

    torch.clamp had that, too; from 2.15 on it has none there.
    """
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def grouped_poly_norm(
    x: Tensor,  # [rows, dim]
    mul: Tensor,  # [rows, dim]
    weight: Tensor,  # [experts, 3]
    bias: Tensor,  # [experts, 1]
    offs: Tensor,  # [experts]: the end row of each expert
    eps: float = 1e-6,
    *,
    hidden_clamp: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    expert = (rows[:, None] >= offs.long()).sum(-1)
    inside = expert < len(offs)
    # Padding is cut off before the arithmetic: it may hold anything, NaN as well.
    x, mul, expert = x[inside], mul[inside], expert[inside]
    if hidden_clamp is not None:
        x, mul = (clamp(t, -hidden_clamp, hidden_clamp) for t in (x, mul))
    parts = torch.stack([*_poly_norm_parts(x, eps), torch.ones_like(x)], dim=-1)
    factors = torch.cat([weight, bias], dim=-1)[expert]
    out = (parts * factors[:, None]).sum(-1) * mul
    if hidden_clamp is not None:
        out = clamp(out, -hidden_clamp, hidden_clamp)
    padded = torch.zeros(len(rows), x.shape[-1], dtype=out.dtype, device=out.device)
    return padded.index_put((inside.nonzero()[:, 0],), out)


def _of_experts(offs: Tensor, rows: int):
    """(expert, its rows) of all that have some."""
    ends = offs.long().clamp(max=rows).tolist()
    for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if begin < end:
            yield expert, slice(begin, end)


def _clamped(hidden_clamp: float | None, *tensors: Tensor):
    limit = float("inf") if hidden_clamp is None else hidden_clamp
    return tuple(t.clamp(-limit, limit) for t in tensors)


def grouped_poly_norm_output_terms(
    x: Tensor,
    mul: Tensor,
    weight: Tensor,
    bias: Tensor,
    offs: Tensor,
    eps: float = 1e-6,
    *,
    hidden_clamp: float | None = None,
) -> Tensor:
    terms = torch.zeros_like(x)
    x, mul = _clamped(hidden_clamp, x, mul)
    for e, rows in _of_experts(offs, len(x)):
        terms[rows] = poly_norm_output_terms(x[rows], weight[e], bias[e], eps, mul=mul[rows])
    return terms


def grouped_poly_norm_gradient_terms(
    x: Tensor,
    mul: Tensor,
    weight: Tensor,
    bias: Tensor,
    offs: Tensor,
    eps: float = 1e-6,
    *,
    hidden_clamp: float | None = None,
    grad_out: Tensor,
) -> dict[str, Tensor]:
    inputs = {"x": x, "mul": mul, "weight": weight, "bias": bias}
    terms = {name: torch.zeros_like(t) for name, t in inputs.items()}
    x, mul = _clamped(hidden_clamp, x, mul)
    for e, rows in _of_experts(offs, len(x)):
        of_expert = poly_norm_gradient_terms(
            x[rows], weight[e], bias[e], eps, mul=mul[rows], grad_out=grad_out[rows]
        )
        for name in ("x", "mul"):
            terms[name][rows] = of_expert[name]
        for name in ("weight", "bias"):
            terms[name][e] = of_expert[name]
    return terms


# Layer norm and the adaptive norms. What modulates is [dim], [batch, dim], [batch, 1, dim] or as x.


def for_rows(values: Tensor | None, x: Tensor, missing: float) -> Tensor:
    """`values`, so that they broadcast with x."""
    if values is None:
        return torch.full_like(x[..., :1], missing)
    if values.dim() == 2 and x.dim() > 2:
        return values.reshape(values.shape[0], *[1] * (x.dim() - 2), values.shape[1])
    return values


def _centre(s: Tensor, layer: bool) -> Tensor:
    return s.mean(-1, keepdim=True) if layer else torch.zeros_like(s[..., :1])


def _rstd(centred: Tensor, eps: float) -> Tensor:
    return 1 / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps)


def ada_norm(
    x: Tensor,  # [batch, ..., dim]
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None = None,  # [dim]
    bias: Tensor | None = None,  # [dim]
    eps: float = 1e-6,
    *,
    layer: bool,
) -> Tensor:
    centred = x - _centre(x, layer)
    y = centred * _rstd(centred, eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y * (1 + for_rows(scale, x, 0.0)) + for_rows(shift, x, 0.0)


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, dtype=None) -> Tensor:
    return ada_norm(x, None, None, weight, bias, eps, layer=True)


def fused_add_layer_norm(
    x, residual, weight=None, bias=None, eps=1e-5, *, dtype
) -> tuple[Tensor, Tensor]:
    new_residual = round_to(dtype, x + residual)
    return layer_norm(new_residual, weight, bias, eps), new_residual


def ada_layer_norm(x, scale, shift, weight=None, bias=None, eps=1e-6, *, dtype=None) -> Tensor:
    return ada_norm(x, scale, shift, weight, bias, eps, layer=True)


def ada_rms_norm(x, scale, shift, weight=None, eps=1e-6, *, dtype=None) -> Tensor:
    return ada_norm(x, scale, shift, weight, None, eps, layer=False)


def gate_residual_ada_norm(
    x, residual, gate, scale, shift, weight=None, bias=None, eps=1e-6, *, norm="layer", dtype
) -> tuple[Tensor, Tensor]:
    """Product and sum are float32 before the sum is rounded."""
    product = for_rows(gate, x, 1.0) * x
    halves = dtype in (torch.float16, torch.bfloat16)
    new_residual = residual + (round_to(torch.float32, product) if halves else product)
    new_residual = round_to(torch.float32, new_residual) if halves else new_residual
    new_residual = round_to(dtype, new_residual)
    out = ada_norm(new_residual, scale, shift, weight, bias, eps, layer=norm == "layer")
    return out, new_residual


def ada_norm_terms(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    layer: bool | None = None,
    norm: str = "layer",
    grad_out: Tensor | None = None,
    grad_new_residual: Tensor | None = None,
) -> dict[str, Tensor]:
    """The sizes of the terms of the outputs, or of the gradients where there are incoming ones.

    A mean is a sum, whose float32 noise is relative to its terms: their mean size counts as a term
    of every element. So is that of a residual and what is added to it.
    """
    layer = norm == "layer" if layer is None else layer
    gates, scales, shifts = (
        for_rows(t, x, missing).abs() for t, missing in ((gate, 1.0), (scale, 0.0), (shift, 0.0))
    )
    s = x if residual is None else residual + for_rows(gate, x, 1.0) * x
    rstd = _rstd(s - _centre(s, layer), eps)
    sizes = s.abs() if residual is None else residual.abs() + gates * x.abs()
    xhat = (sizes + _centre(s.abs(), layer)) * rstd
    weights = torch.ones_like(s[..., :1]) if weight is None else weight.abs()
    y = xhat * weights + (0.0 if bias is None else bias.abs())
    if grad_out is None and grad_new_residual is None:
        terms = {"out": y * (1 + scales) + shifts}
        if residual is not None:
            terms["new_residual"] = sizes
        return terms

    grad_out = torch.zeros_like(s) if grad_out is None else grad_out.abs()
    g = grad_out * weights * (1 + scales)
    means = xhat * (g * xhat).mean(-1, keepdim=True) + layer * g.mean(-1, keepdim=True)
    grad_s = rstd * (g + means)
    if grad_new_residual is not None:
        grad_s = grad_s + grad_new_residual.abs()

    def summed(sizes: Tensor, like: Tensor | None) -> Tensor | None:
        if like is None:
            return None
        return sizes.sum_to_size(for_rows(like, x, 0.0).shape).reshape(like.shape)

    return {
        "x": gates * grad_s,
        "residual": grad_s,
        "gate": summed(grad_s * x.abs(), gate),
        "scale": summed(grad_out * y, scale),
        "shift": summed(grad_out, shift),
        "weight": summed(grad_out * (1 + scales) * xhat, weight),
        "bias": summed(grad_out * (1 + scales), bias),
    }


def layer_norm_terms(x, weight=None, bias=None, eps=1e-5, **options):
    return ada_norm_terms(x, None, None, weight, bias, eps, **options)


def fused_add_layer_norm_terms(x, residual, weight=None, bias=None, eps=1e-5, **options):
    return ada_norm_terms(x, None, None, weight, bias, eps, residual=residual, **options)


def ada_rms_norm_terms(x, scale, shift, weight=None, eps=1e-6, **options):
    return ada_norm_terms(x, scale, shift, weight, None, eps, layer=False, **options)


def gate_residual_ada_norm_terms(
    x, residual, gate, scale, shift, weight=None, bias=None, eps=1e-6, **options
):
    return ada_norm_terms(
        x, scale, shift, weight, bias, eps, residual=residual, gate=gate, **options
    )


# Activations. Where a formula loses in float64 what its neighbour keeps, the neighbour stands here:
# (1 + erf(v)) / 2 = erfc(-v) / 2, and (1 + tanh(v)) / 2 = sigmoid(2 v).

ACTIVATIONS = {
    "none": lambda u: 1 * u,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    # The slope of a sigmoid near one has no digits: each side from where it is near zero.
    "tanh": lambda u: torch.where(
        u < 0, 2 * torch.sigmoid(2 * u) - 1, 1 - 2 * torch.sigmoid(-2 * u)
    ),
    "gelu": lambda u: u * torch.erfc(-u * math.sqrt(0.5)) / 2,
    "gelu_tanh": lambda u: u * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)),
    "gelu_quick": lambda u: u * torch.sigmoid(1.702 * u),
    "silu": lambda u: u * torch.sigmoid(u),
    "relu2": lambda u: torch.relu(u) ** 2,
}


def plain(activation: str):
    return lambda x, *, dtype: ACTIVATIONS[activation](x)


def halves(x: Tensor, gate_first: bool = True) -> tuple[Tensor, Tensor]:
    """Gate and value of a packed `[..., 2 * dim]`."""
    first, second = x.chunk(2, -1)
    return (first, second) if gate_first else (second, first)


def act_and_mul(activation: str, gate_first: bool = True):
    def formula(x: Tensor, *, dtype) -> Tensor:
        gate, up = halves(x, gate_first)
        return ACTIVATIONS[activation](gate) * up

    return formula


def swiglu(gate: Tensor, up: Tensor, *, dtype) -> Tensor:
    return ACTIVATIONS["silu"](gate) * up


def geglu(gate: Tensor, up: Tensor, activation: str = "gelu", *, dtype) -> Tensor:
    return ACTIVATIONS[activation](gate) * up


def swiglu_clamped(
    x: Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True, dtype
) -> Tensor:
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else halves(x)
    gate, up = clamp(gate, -math.inf, limit), clamp(up, -limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def bias_act(x: Tensor, bias: Tensor | None = None, activation: str = "none", *, dtype) -> Tensor:
    return ACTIVATIONS[activation](x if bias is None else x + bias)


def add_mul_act(
    x: Tensor,
    bias: Tensor | None,
    y: Tensor,
    alpha: float = 1.0,
    activation: str = "none",
    *,
    dtype,
) -> Tensor:
    return ACTIVATIONS[activation]((x if bias is None else x + bias) + alpha * y)


# The sizes of the terms: float32 noise in an argument u, relative to the largest it is made of,
# moves f(u) by as much times f'(u), and f'(u) by as much times f''(u).


def _terms(activation, u: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Of f(u) and f'(u), with `size` that of what u is the sum of."""
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        value = activation(u)
        (slope,) = torch.autograd.grad(value.sum(), u, create_graph=True)
        curvature = None
        if slope.requires_grad:
            (curvature,) = torch.autograd.grad(slope.sum(), u, allow_unused=True)
    value, slope = value.detach().abs(), slope.detach().abs()
    curvature = torch.zeros_like(value) if curvature is None else curvature.abs()
    return value + size * slope, slope + size * curvature


def add_terms(x, bias=None, y=None, alpha=1.0, activation="none", *, grad_out=None, **_):
    """Of bias_act and add_mul_act."""
    parts = [x, *([] if bias is None else [bias]), *([] if y is None else [alpha * y])]
    value, slope = _terms(ACTIVATIONS[activation], sum(parts), sum(part.abs() for part in parts))
    if grad_out is None:
        return {"out": value}
    sizes = grad_out.abs() * slope
    return {"x": sizes, "y": abs(alpha) * sizes, "bias": sizes.sum_to_size(sizes.shape[-1])}


def plain_terms(activation: str):
    return lambda x, **options: add_terms(x, activation=activation, **options)


def _gated(activation, gate: Tensor, up: Tensor, grad_out: Tensor | None):
    """Terms of the output; or of the gradients of gate and up."""
    value, slope = _terms(activation, gate, gate.abs())
    if grad_out is None:
        return value * up.abs()
    return grad_out.abs() * up.abs() * slope, grad_out.abs() * value


def glu_terms(gate, up, activation="silu", *, grad_out=None, **_):
    activation = ACTIVATIONS[activation]
    terms = _gated(activation, gate, up, grad_out)
    return {"out": terms} if grad_out is None else {"gate": terms[0], "up": terms[1]}


def act_and_mul_terms(activation: str, gate_first: bool = True):
    def terms(x, *, grad_out=None, **_):
        of_parts = _gated(ACTIVATIONS[activation], *halves(x, gate_first), grad_out)
        if grad_out is None:
            return {"out": of_parts}
        return {"x": torch.cat(of_parts if gate_first else of_parts[::-1], -1)}

    return terms


def swiglu_clamped_terms(x, alpha=1.702, limit=7.0, *, interleaved=True, grad_out=None, **_):
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else halves(x)
    gate, up = gate.clamp(max=limit), 1 + up.abs().clamp(max=limit)
    terms = _gated(lambda g: g * torch.sigmoid(alpha * g), gate, up, grad_out)
    if grad_out is None:
        return {"out": terms}
    return {"x": torch.stack(terms, -1).flatten(-2) if interleaved else torch.cat(terms, -1)}


# Rotary embedding


def _columns_of(table: Tensor, x: Tensor, interleaved, heads_dim, rotary_dim, position_ids, offset):
    """cos or sin in full width, with the dimensions of `x`."""
    table = table.double()
    tokens = x.shape[1] if x.dim() == 3 else x.shape[3 - heads_dim]
    if position_ids is not None:
        table = table[position_ids.long()]
    elif isinstance(offset, Tensor):
        table = table[offset.long()[:, None] + torch.arange(tokens, device=x.device)]
    elif offset is not None:
        table = table[offset : offset + tokens]
    elif table.dim() == 4:
        table = table.squeeze(heads_dim)
    if rotary_dim is not None and rotary_dim == 2 * table.shape[-1]:
        table = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
    if x.dim() == 3 and position_ids is not None and position_ids.dim() == 1:
        return table[:, None]  # packed: [tokens, heads, dim]
    table = table if table.dim() == 3 else table[None]
    return table if x.dim() == 3 else table.unsqueeze(heads_dim)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Each pair of the first columns becomes (x1 c1 + sign x2 s1, x2 c2 + x1 s2)."""
    width = cos.shape[-1]
    first, second = (
        (slice(0, width, 2), slice(1, width, 2))
        if interleaved
        else (slice(0, width // 2), slice(width // 2, width))
    )
    out = x.clone()
    x1, x2 = x[..., first], x[..., second]
    out[..., first] = x1 * cos[..., first] + sign * x2 * sin[..., first]
    out[..., second] = x2 * cos[..., second] + x1 * sin[..., second]
    return out


def apply_rotary(
    # [batch, tokens, heads, dim], [batch, heads, tokens, dim], [batch, tokens, dim], or with
    # position_ids of one dimension [tokens, heads, dim]
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 2,
    rotary_dim: int | None = None,
    position_ids: Tensor | None = None,
    offset: int | Tensor | None = None,
    dtype: torch.dtype | None = None,
    terms: bool = False,
):
    """With `terms` the sizes of the terms whose sum is the result."""
    results = []
    for x in (q, k):
        if x is None:
            continue
        where = (x, interleaved, heads_dim, rotary_dim, position_ids, offset)
        columns = [_columns_of(table, *where) for table in (cos, sin)]
        if terms:
            x, columns = x.abs(), [table.abs() for table in columns]
        results.append(_rotate(x, *columns, interleaved, 1 if terms else -1))
    return tuple(results) if k is not None else results[0]


def apply_rotary_terms(**arguments):
    return apply_rotary(**arguments, terms=True)


def apply_rotary_gradient_terms(
    q=None, k=None, cos=None, sin=None, grad_q_out=None, grad_k_out=None, **options
) -> dict[str, Tensor]:
    """|g1 c1| + |g2 s2| and |g2 c2| + |g1 s1|: the sines change places."""
    interleaved, heads_dim = (
        options.get("interleaved", False),
        options.get("heads_dim", 2),
    )
    where = [options.get(name) for name in ("rotary_dim", "position_ids", "offset")]
    terms = {}
    for name, g in (("q", grad_q_out), ("k", grad_k_out)):
        if g is None:
            continue
        c, s = (_columns_of(t, g, interleaved, heads_dim, *where).abs() for t in (cos, sin))
        if interleaved:
            s = s.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            s = s.roll(s.shape[-1] // 2, -1)
        terms[name] = _rotate(g.abs(), c, s, interleaved, 1)
    return terms


def qk_norm_rotary(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    dtype: torch.dtype,
    **options,
):
    norm = {"weight_offset": weight_offset, "cast_before_weight": cast_before_weight}
    y = [
        None if x is None else rms_norm(x, w, eps, **norm, dtype=dtype)
        for x, w in ((q, q_weight), (k, k_weight))
    ]
    if cast_before_weight:
        y = [None if x is None else round_to(dtype, x) for x in y]
    return apply_rotary(*y, cos, sin, **options)


def qk_norm_rotary_terms(**arguments):
    return qk_norm_rotary(**arguments, dtype=torch.float64, terms=True)


def qk_norm_rotary_gradient_terms(
    *, q=None, k=None, q_weight=None, k_weight=None, eps=1e-6, weight_offset=0.0, **options
) -> dict[str, Tensor]:
    grads = apply_rotary_gradient_terms(**options)
    terms = {}
    for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
        if name in grads:
            sizes = rms_norm_gradient_terms(
                x, weight, eps, weight_offset=weight_offset, grad_out=grads[name]
            )
            terms |= {name: sizes["x"], f"{name}_weight": sizes["weight"]}
    return terms


def _places(frames: int, height: int, width: int) -> Tensor:
    """(time, row, column) of each token, [tokens, 3]."""
    axes = [torch.arange(size, dtype=torch.float64) for size in (frames, height, width)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2)


def ltx_video_angles(
    frames: int, height: int, width: int, dim: int, *, scale=None, base_size, theta=10000.0
) -> Tensor:
    """Of each pair that rotates, [tokens, dim // 2 - (dim % 6) // 2]."""
    places = _places(frames, height, width)
    if scale is not None:
        places = places * torch.tensor(scale) / torch.tensor(base_size)
    count = dim // 6
    exponents = torch.arange(count, dtype=torch.float64) / max(1, count - 1)
    frequencies = theta**exponents * (math.pi / 2)
    return (frequencies[:, None] * (2 * places[:, None] - 1)).flatten(1)


def wan_angles(frames: int, height: int, width: int, dim: int, *, theta=10000.0) -> Tensor:
    """Of each pair, [tokens, dim // 2]."""
    part = 2 * (dim // 6)
    angles = [
        place[:, None] * theta ** (-torch.arange(0, columns, 2, dtype=torch.float64) / columns)
        for place, columns in zip(
            _places(frames, height, width).unbind(-1), (dim - 2 * part, part, part), strict=True
        )
    ]
    return torch.cat(angles, -1)
