"""Cases of the rotary operators."""

from __future__ import annotations

from dataclasses import replace

import eager
import reference
import torch
from rotary_cases import Case
from torch import Tensor

from .draw import Draw
from .rows import Call, eps_of

WRITTEN = ("q", "k")  # by the in-place form
POSITIONS = ("offset", "offsets", "one_offset", "ids", "shared_ids", "one_ids")


def _case(draw: Draw, most_tokens: int) -> Case:
    dim = draw.choice((2, 64, 128, draw.integer(2, 40), draw.integer(2, 300)))
    rotated = draw.choice((None, 2 * draw.integer(0, dim // 2), 2 * draw.integer(0, dim // 2)))
    if dim % 2:
        rotated = rotated or 2 * (dim // 2)  # not 0, which Case takes for all
    batch = draw.integer(1, 4)
    q_heads = draw.choice((None, 1, 2, 4, draw.integer(1, 9)))
    tokens = draw.choice((1, draw.integer(1, 12), draw.integer(1, most_tokens)))
    if q_heads is None and batch == tokens:
        tokens += 1  # could be packed, and is refused
    packed = q_heads is not None and draw.chance(0.1)
    positions = None
    if draw.chance(0.5):
        positions = draw.choice(POSITIONS)
        if q_heads is None and positions == "shared_ids":
            positions = "one_ids"  # the former makes three dimensions packed ones
        positions += "" if positions == "offset" else draw.choice((":int32", ":int64"))
    if packed:
        positions = draw.choice(("shared_ids:int32", "shared_ids:int64"))
    return Case(
        batch=batch,
        tokens=tokens,
        q_heads=q_heads,
        k_heads=None if q_heads is None else draw.choice((None, 1, 2, q_heads)),
        dim=dim,
        rotary_dim=rotated,
        half=draw.chance(0.4),
        interleaved=draw.chance(0.4),
        heads_dim=draw.choice((1, 2, 2)),
        table_dtype=draw.choice((None, torch.float32)),
        table_batch=None if positions else draw.choice((None, 1, batch)),
        positions=positions,
        packed=packed,
    )


def make(draw: Draw, name: str, *, in_place: bool = False, ordinary: bool = False) -> Call:
    """A random call of `apply_rotary` or `qk_norm_rotary`."""
    case = _case(draw, 8 if ordinary else draw.choice((40, 300)))
    op, inputs = case.make(name, draw.dtype(), "cpu")
    regime = "normal" if ordinary else draw.regime()
    options = {}
    if name == "qk_norm_rotary":
        options = {
            "eps": eps_of(draw),
            "weight_offset": draw.choice((0.0, 0.0, 1.0, -0.5)),
            "cast_before_weight": draw.chance(0.3),
        }
        for weight in ("q_weight", "k_weight"):
            if inputs[weight] is not None:
                inputs[weight] = draw.choice((inputs[weight], inputs[weight].float(), None))
    values = inputs | {key: t for key, t in op.defaults.items() if isinstance(t, Tensor)}
    laid_out = {}
    for key, value in values.items():
        if value is not None:
            written = in_place and key in WRITTEN
            if key == "q" or draw.chance(0.6):
                value = draw.change(value, regime)
            value = draw.lay_out(key, value, rows=written, written=written)
        laid_out[key] = value
    inputs = {key: laid_out.pop(key) for key in inputs}
    if in_place and case.q_heads and inputs["k"] is not None and draw.chance(0.4):
        inputs |= _of_one_projection(draw, case, inputs)
    formula = {"apply_rotary": apply_rotary, "qk_norm_rotary": qk_norm_rotary}[name]
    op = replace(op, defaults=op.defaults | laid_out, eager=formula)
    return Call(op, inputs, options, regime)


def _of_one_projection(draw: Draw, case: Case, inputs: dict) -> dict:
    """q and k as neighbours in one tensor."""
    axis = 1 if case.packed else case.heads_dim
    both = torch.cat((inputs["q"], inputs["k"]), axis).cpu()
    projection = draw.lay_out("q and k", both, rows=True, written=True)
    q, k = projection.split((inputs["q"].shape[axis], inputs["k"].shape[axis]), axis)
    return {"q": q, "k": k}


# The formula in float32: transformers' and diffusers', on rows of full width


def _rotate(x: Tensor | None, cos, sin, interleaved=False, heads_dim=2, **where):
    if x is None:
        return None
    names = ("rotary_dim", "position_ids", "offset")
    tables = (
        reference._columns_of(table, x, interleaved, heads_dim, *(where.get(n) for n in names))
        for table in (cos, sin)
    )
    cos, sin = (t.float() if x.dim() == 3 else t.float().squeeze(heads_dim) for t in tables)
    part = x[..., : cos.shape[-1]]
    turned = eager.apply_rotary(part, None, cos, sin, interleaved=interleaved, heads_dim=heads_dim)
    return torch.cat((turned, x[..., cos.shape[-1] :]), -1)


def apply_rotary(q, k, cos, sin, **options):
    results = tuple(_rotate(x, cos, sin, **options) for x in (q, k))
    return results[0] if k is None else results


def qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, eps=1e-6, *, weight_offset=0.0, **options):
    options.pop("cast_before_weight", None)
    y = [
        None if x is None else eager.rms_norm(x, weight, eps, weight_offset=weight_offset)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    return apply_rotary(*y, cos, sin, **options)
