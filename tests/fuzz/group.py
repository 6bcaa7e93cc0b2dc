"""Cases of group_norm: results and gradients against float64, of any shape and layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from harness import DTYPES, assert_close, compare_gradients, gradients, normal
from operators import GROUP_NORM as OP
from torch import Tensor

from .draw import Draw
from .judge import Failure, same_bits, valid_call


@dataclass
class Call:
    given: dict
    is_special: bool = False  # NaN, infinities, or numbers whose squares float32 does not hold

    def arguments(self) -> dict:
        return self.given


def make(draw: Draw, *, ordinary: bool = False) -> Call:
    groups = draw.choice((1, 2, 3, 8, 32, draw.integer(1, 40)))
    channels = groups * draw.choice((1, 2, 4, 10, draw.integer(1, 12)))
    shape = [draw.choice((1, 2, 3)), channels]
    for _ in range(draw.choice((0, 1, 2, 2, 2, 3))):
        shape.append(draw.choice((1, 2, 7, 8, 16, draw.integer(1, 40))))
    if not ordinary and draw.chance(0.1):
        shape[draw.choice((0, -1))] = 0
        shape[1] = channels
    dtype = draw.choice(DTYPES)
    x = normal(shape, dtype, "cpu", scale=draw.choice((1.0, 3.0)), mean=draw.choice((0.0, 5.0)))
    is_special = not ordinary and draw.chance(0.2)
    if is_special:
        x = draw.change(x, draw.choice(("special", "extreme")))
    given: dict = {"x": draw.lay_out("x", x), "num_groups": groups}
    if x.dim() > 2 and draw.chance(0.5):
        given["x"] = given["x"].movedim(1, -1).contiguous().movedim(-1, 1)
    for name, mean in (("weight", 1.0), ("bias", 0.0)):
        if draw.chance(0.7):
            values = normal((channels,), draw.choice((dtype, torch.float32)), "cpu", mean=mean)
            given[name] = draw.lay_out(name, values)
    given["eps"] = draw.choice((1e-5, 1e-6, 1e-3))
    if draw.chance(0.5):
        given["activation"] = "silu"
    return Call(given, is_special)


def check(kernel, draw: Draw, call: Call) -> None:
    inputs = {n: call.given.get(n) for n in ("x", "weight", "bias")}
    options = {n: v for n, v in call.given.items() if n not in inputs}
    function = lambda leaves, opts: OP.run(kernel, leaves, opts)  # noqa: E731
    with valid_call("forward"), torch.no_grad():
        out = function(inputs, options)["out"]
        again = function(inputs, options)["out"]
    same_bits(again, out, "out", "not the same bits again")
    grad_outs = {"out": torch.randn_like(out)}
    needed = OP.differentiable(inputs)
    with valid_call("backward"):
        ours = gradients(function, inputs, options, grad_outs, needed)
    if call.is_special or inputs["x"].numel() == 0:
        return
    inputs, grad_outs, ours = _on_cpu(inputs), _on_cpu(grad_outs), _on_cpu(ours)
    try:
        terms = OP.run_output_terms(inputs, options)["out"]
        assert_close(out.cpu(), OP.run_reference(inputs, options)["out"], "out", terms=terms)
    except AssertionError as error:
        raise Failure("a wrong value", str(error)) from None
    try:
        compare_gradients(OP, inputs, options, grad_outs, ours, needed)
    except AssertionError as error:
        raise Failure("a wrong gradient", str(error)) from None


def check_module(kernel, call: Call) -> None:
    """The module has the bits of the function."""
    given = dict(call.given)
    x, weight, bias = (given.pop(n, None) for n in ("x", "weight", "bias"))
    if weight is None or bias is None:
        weight = bias = None
    options = {"affine": weight is not None, "activation": given.get("activation")}
    with valid_call("modules.GroupNorm"):
        module = kernel.modules.GroupNorm(given["num_groups"], x.shape[1], given["eps"], **options)
        if weight is not None:
            module.weight, module.bias = (torch.nn.Parameter(t.detach()) for t in (weight, bias))
        out = module(x)
    expected = kernel.group_norm(x, weight=weight, bias=bias, **given)
    same_bits(out.detach(), expected.detach(), "the module's result", "a wrong value")


def _on_cpu(tensors: dict) -> dict:
    return {n: t.cpu() if isinstance(t, Tensor) else t for n, t in tensors.items()}
