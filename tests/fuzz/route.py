"""Cases of topk_softmax: choices, weights and gradients against float64."""

from __future__ import annotations

from dataclasses import dataclass

import route_reference as reference
import torch
from harness import DTYPES, half_an_ulp, normal
from torch import Tensor

from .draw import Draw
from .judge import Failure, same_bits, valid_call

# As in tests/route.
NOISE = 2e-6
CHOICE_NOISE = 1e-6


@dataclass
class Call:
    given: dict
    is_special: bool = False  # NaN, infinities, or numbers whose scores float32 does not hold

    def arguments(self) -> dict:
        return self.given


def make(draw: Draw, *, ordinary: bool = False) -> Call:
    experts = draw.choice((8, 16, 60, 64, 128, draw.integer(2, 40), draw.integer(2, 1024)))
    lead = [draw.choice((1, 2, 3, draw.integer(1, 9)))]
    if draw.chance(0.3):
        lead.append(draw.integer(1, 4))
    if not ordinary and draw.chance(0.15):
        lead = draw.choice(([], [0], [2, 0]))
    dtype = draw.choice(DTYPES)
    logits = normal((*lead, experts), dtype, "cpu", scale=draw.choice((1.0, 3.0, 0.0)))
    is_special = not ordinary and draw.chance(0.25)
    if is_special:
        logits = draw.change(logits, draw.choice(("special", "extreme")))
    given: dict = {"logits": draw.lay_out("logits", logits), "k": 1}
    given["score"] = draw.choice(("softmax", "sigmoid"))
    most = min(experts, 64)
    if draw.chance(0.5):
        sizes = [n for n in range(2, experts + 1) if experts % n == 0]
        groups = experts // draw.choice(sizes)
        given["num_groups"], given["topk_groups"] = groups, draw.integer(1, groups)
        most = min(most, experts // groups * given["topk_groups"])
    given["k"] = draw.choice((1, min(2, most), min(8, most), draw.integer(1, most)))
    if draw.chance(0.5):
        bias = normal((experts,), draw.choice((dtype, torch.float32)), "cpu", scale=0.3)
        given["bias"] = draw.lay_out("bias", bias)
    given["renormalize"] = draw.chance(0.5)
    return Call(given, is_special)


def check(kernel, draw: Draw, call: Call) -> None:
    leaf = call.given["logits"].detach().requires_grad_()
    options = {name: value for name, value in call.given.items() if name != "logits"}
    with valid_call("forward"):
        found = kernel.topk_softmax(leaf, **options)
        with torch.no_grad():
            again = kernel.topk_softmax(leaf, **options)
    _check_indices(found.indices, again.indices, leaf.shape[-1])
    same_bits(again.weights, found.weights.detach(), "weights", "not the same bits again")
    with valid_call("backward"):
        grad = torch.randn_like(found.weights)
        (ours,) = torch.autograd.grad(found.weights, leaf, grad)
    if ours.dtype != leaf.dtype or ours.shape != leaf.shape:
        raise Failure("a wrong gradient", f"of {ours.dtype} {list(ours.shape)}")
    if call.is_special:
        return
    exact = leaf.detach().cpu().double().requires_grad_()
    of_cpu = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in options.items()}
    expected = reference.topk_softmax(exact, **of_cpu)
    clear = expected.gap > CHOICE_NOISE
    if not torch.equal(found.indices.cpu()[clear], expected.indices[clear]):
        raise Failure("a wrong value", "indices differ from the reference's")
    _check(found.weights.detach().cpu()[clear], expected.weights.detach()[clear], 0.0, "weights")
    (theirs,) = torch.autograd.grad(expected.weights, exact, grad.cpu().double())
    size = 2 * grad.abs().max().item() if grad.numel() else 0.0
    _check(ours.cpu()[clear], theirs[clear], size, "gradient")


def _check_indices(indices: Tensor, again: Tensor, experts: int) -> None:
    if not torch.equal(indices, again):
        raise Failure("not the same bits again", "indices differ without gradients")
    ordered = indices.sort(-1).values
    if not (((indices >= 0) & (indices < experts)).all() and (ordered.diff(dim=-1) > 0).all()):
        raise Failure("a wrong value", f"indices are no choice of {experts} experts")


def _check(actual: Tensor, exact: Tensor, size: float, name: str) -> None:
    bound = NOISE * (size + exact.abs()) + half_an_ulp(exact, actual.dtype)
    error = (actual.double() - exact).abs()
    if not (error <= bound).all():
        kind = "a wrong gradient" if name == "gradient" else "a wrong value"
        raise Failure(kind, f"{name}: {(error / bound).max().item():.3g} times the bound")
