"""Cases of quant_fp8, and of what ends in it: the bits of the formula."""

from __future__ import annotations

from dataclasses import dataclass

import quant_reference as reference
import quantising
import torch
from harness import DTYPES, normal

from .draw import Draw
from .judge import Failure, same_bits, valid_call

OPTIONS = ("dtype", "group_size", "scale_layout", "scale_ue8m0")


@dataclass
class Call:
    given: dict

    def arguments(self) -> dict:
        return self.given


def shape_of(draw: Draw, ordinary: bool) -> tuple[int, ...]:
    dim = draw.choice((8, 64, 128, 256, 1024, draw.integer(1, 300), draw.integer(1, 20_000)))
    lead = [draw.choice((1, 2, 3, draw.integer(1, 9)))]
    if draw.chance(0.3):
        lead.append(draw.integer(1, 4))
    if not ordinary and draw.chance(0.15):
        lead = draw.choice(([], [0], [2, 0]))
    return (*lead, dim)


def add_options(draw: Draw, given: dict, ordinary: bool, scale: str = "scale") -> None:
    given["dtype"] = draw.choice(tuple(reference.LIMITS)[: 2 if ordinary else 3])
    if draw.chance(0.3):
        given[scale] = draw.lay_out(scale, torch.tensor([draw.choice((1.0, 0.013, 3e-5))]))
    else:
        given["group_size"] = draw.choice((-1, 128))
        given["scale_layout"] = draw.choice(("row", "col_tma"))
        given["scale_ue8m0"] = draw.chance(0.3)


def make(draw: Draw, *, ordinary: bool = False) -> Call:
    scale = draw.choice((1.0, 1e-4, 100.0, 0.0))
    x = normal(shape_of(draw, ordinary), draw.choice(DTYPES), "cpu", scale=scale)
    if not ordinary and draw.chance(0.25):
        x = draw.change(x, draw.choice(("special", "extreme")))
    given: dict = {"x": draw.lay_out("x", x)}
    if ordinary:  # a bad call is also made where x requires a gradient
        given["ste"] = True
    add_options(draw, given, ordinary)
    return Call(given)


def make_fused(draw: Draw, name: str, *, ordinary: bool = False) -> Call:
    """A call of an operator that quantises its result."""
    fused = quantising.BY_NAME[name]
    shape = shape_of(draw, ordinary)
    given = fused.inputs(shape if len(shape) > 1 else (1, *shape), draw.choice(DTYPES), "cpu")
    if not ordinary and draw.chance(0.25):
        given["x" if "x" in given else "gate"] = draw.change(
            next(iter(given.values())), draw.choice(("special", "extreme"))
        )
    given = {n: draw.lay_out(n, t) for n, t in given.items()}
    given |= draw.choice(fused.options)
    add_options(draw, given, ordinary, fused.scale)
    given["return_unquantized"] = draw.chance(0.5)
    return Call(given)


def check_fused(kernel, name: str, call: Call) -> None:
    """The bits of one after the other."""
    fused = quantising.BY_NAME[name]
    with valid_call("forward"):
        q, scale, *others = getattr(kernel, name)(**call.given)
    options = {n: v for n, v in call.given.items() if n in OPTIONS or n == fused.scale}
    inputs = {n: v for n, v in call.given.items() if n not in options}
    keeps_out = inputs.pop("return_unquantized")
    with valid_call("one after the other"):
        out, *rest = fused.apart(kernel, **inputs)
        if fused.scale in options:
            options["scale"] = options.pop(fused.scale)
        wanted_q, wanted_scale = kernel.quant_fp8(out, **options)
    if not torch.equal(scale.nan_to_num(nan=-1.0), wanted_scale.nan_to_num(nan=-1.0)):
        raise Failure("a wrong value", "scales are not those of one after the other")
    if (reference.bits(q) != reference.bits(wanted_q)).any():
        raise Failure("a wrong value", "codes are not those of one after the other")
    wanted = [out, *rest] if keeps_out else rest
    for found, expected in zip(others, wanted, strict=True):
        same_bits(found, expected, "what is returned besides", "a wrong value")


def check(kernel, draw: Draw, call: Call) -> None:
    with valid_call("forward"):
        found = kernel.quant_fp8(**call.given)
    options = {n: v for n, v in call.given.items() if n not in ("x", "scale_layout")}
    of_cpu = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    q, scale = reference.quant_fp8(call.given["x"].cpu(), **of_cpu)
    if not torch.equal(found.scale.cpu().nan_to_num(nan=-1.0), scale.nan_to_num(nan=-1.0)):
        raise Failure("a wrong value", "scales are not those of the formula")
    different = reference.bits(found.q.cpu()) != reference.bits(q)
    if different.any():
        raise Failure("a wrong value", f"{different.sum().item()} of {q.numel()} codes differ")


def check_linear(kernel, draw: Draw, call: Call) -> None:
    """The product of x with a weight, as float64 has it of what both were rounded to."""
    x, recipe = call.given["x"], draw.choice(("rowwise", "blockwise"))
    options = {"device": x.device, "dtype": x.dtype, "bias": draw.chance(0.5)}
    linear = torch.nn.Linear(x.shape[-1], draw.choice((1, 7, 32, 200)), **options)
    with valid_call("modules.Fp8Linear"), torch.no_grad():
        module = kernel.modules.Fp8Linear.from_linear(linear, recipe=recipe)
        y = module(x)
    if y.dtype != x.dtype or y.shape != (*x.shape[:-1], linear.out_features):
        raise Failure("a wrong shape or dtype", f"{y.dtype} {list(y.shape)}")
    q, scale = reference.quant_fp8(x, group_size=-1 if recipe == "rowwise" else reference.GROUP)
    if recipe == "blockwise":
        scale = scale.repeat_interleave(reference.GROUP, -1)[..., : x.shape[-1]]
    left, right = q.double() * scale.double(), module.dequantized(torch.float64)
    bias = 0 if linear.bias is None else linear.bias.detach().double()
    expected, terms = left @ right.T + bias, left.abs() @ right.abs().T + abs(bias)
    bound = (expected.abs() + terms) / 128 + 1e-30
    is_finite = expected.isfinite() & (terms < torch.finfo(x.dtype).max / 2)
    if not ((y.double() - expected).abs() <= bound)[is_finite].all():
        raise Failure("a wrong value", f"of a {recipe} product")
