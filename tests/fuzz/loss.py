"""Cases of the loss family: losses, log-probabilities and gradients against float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import loss_reference as reference
import torch
from harness import DTYPES, half_an_ulp, normal
from torch import Tensor

from .draw import Draw
from .judge import Failure, same_bits, valid_call

# What float32 arithmetic may lack of a result, relative to its terms, as in tests/loss. Terms of a
# row are as large as its logits may lie apart.
NOISE = 4e-6
FAR = 40.0
ASKED = ("return_entropy", "return_log_sum_exp", "return_is_greatest")


@dataclass
class Call:
    name: str
    given: dict
    is_special: bool = False  # NaN, infinities, or numbers that float32 sums cannot hold

    def arguments(self) -> dict:
        return self.given


def make(draw: Draw, name: str, *, ordinary: bool = False) -> Call:
    if name.startswith("linear_"):
        return _make_linear(draw, name)
    vocab = draw.choice((1, 2, 17, draw.integer(2, 300), draw.integer(2, 3000), 4099))
    lead = [draw.choice((1, 2, 3, draw.integer(1, 9)))]
    if draw.chance(0.3):
        lead.append(draw.integer(1, 4))
    if not ordinary and draw.chance(0.15):
        lead = draw.choice(([], [0], [2, 0]))
    if ordinary:
        vocab = min(vocab, 300)
    dtype = draw.choice(DTYPES)
    logits = normal((*lead, vocab), dtype, "cpu", scale=draw.choice((1.0, 3.0, 0.0)))
    is_special = not ordinary and draw.chance(0.2)
    if is_special:
        logits = draw.change(logits, draw.choice(("special", "extreme")))
    targets = torch.randint(vocab, lead)
    given: dict = {"logits": draw.lay_out("logits", logits)}
    if not ordinary and draw.chance(0.4):
        given["ignore_index"] = draw.choice((-1, 0, vocab - 1, vocab + 5))
    ignored = torch.rand(lead) < draw.choice((0.0, 0.3, 1.0))
    if not ordinary:
        targets = torch.where(ignored, given.get("ignore_index", -100), targets)
    targets = targets.to(draw.choice((torch.int64, torch.int64, torch.int32)))
    given["targets"] = draw.lay_out("targets", targets)
    given = {"logits": given.pop("logits"), "targets": given.pop("targets"), **given}
    if draw.chance(0.2) and not is_special:
        given["logit_softcap"] = draw.choice((30.0, 2.0))
    if name == "log_probs":
        given["temperature"] = draw.choice((1.0, 0.7, 2.5, 0.1))
        given |= {option: draw.chance(0.5) for option in ASKED}
        return Call(name, given, is_special)
    given["reduction"] = draw.choice(("none", "sum", "mean"))
    if not is_special:
        given["label_smoothing"] = draw.choice((0.0, 0.1, 1.0))
        given["lse_square_scale"] = draw.choice((0.0, 1e-2, -1e-3))
    if draw.chance(0.4):
        weights = normal(tuple(lead), torch.float32, "cpu")
        given["token_weights"] = draw.lay_out("token_weights", weights)
    return Call(name, given, is_special)


def _make_linear(draw: Draw, name: str) -> Call:
    """The same of a head."""
    call = make(draw, name.removeprefix("linear_"), ordinary=True)
    logits, dim = call.given.pop("logits"), draw.choice((1, 8, 40, draw.integer(1, 70)))
    vocab, dtype = logits.shape[-1], logits.dtype
    given = {
        "hidden": draw.lay_out("hidden", normal((*logits.shape[:-1], dim), dtype, "cpu")),
        "weight": draw.lay_out("weight", normal((vocab, dim), dtype, "cpu", scale=dim**-0.5)),
        **call.given,
    }
    if draw.chance(0.3):
        bias = normal((vocab,), draw.choice((dtype, torch.float32)), "cpu")
        given["bias"] = draw.lay_out("bias", bias)
    if draw.chance(0.5):
        given["max_workspace"] = draw.choice((1, 4096, 1 << 20))
    return Call(name, given)


def _exact_logits(given: dict) -> Tensor:
    """In float64, with a gradient to be read."""
    if "logits" in given:
        return given["logits"].detach().cpu().double().requires_grad_()
    hidden, weight = (given[name].detach().cpu().double() for name in ("hidden", "weight"))
    logits = hidden @ weight.T
    if "bias" in given:
        logits = logits + given["bias"].cpu().double()
    return logits.requires_grad_()


def check(kernel, draw: Draw, call: Call) -> None:
    given = call.given
    main = next(iter(given))
    leaf = given[main].detach().requires_grad_()
    exact = _exact_logits(given)
    others = {n: v for n, v in given.items() if n != main}
    with valid_call("forward"):
        found = getattr(kernel, call.name)(leaf, **others)
        with torch.no_grad():
            again = getattr(kernel, call.name)(leaf, **others)
    of_cpu = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in others.items()}
    of_cpu = {n: v for n, v in of_cpu.items() if n not in ("weight", "bias", "max_workspace")}
    expected = getattr(reference, call.name.removeprefix("linear_"))(exact, **of_cpu)
    is_loss = call.name.endswith("cross_entropy")
    if is_loss:
        found, again, expected = (found,), (again,), (expected,)
    names = ("loss",) if is_loss else kernel.LogProbs._fields
    grads, sources = [], []
    for name, value, repeated, wanted in zip(names, found, again, expected, strict=True):
        if value is None:
            continue
        same_bits(repeated, value.detach(), name, "not the same bits without gradients")
        if value.dtype == torch.bool and main == "hidden":
            continue  # of logits that are equal, one may be rounded up
        if value.dtype == torch.bool:
            if not call.is_special and not torch.equal(value.cpu(), wanted):
                raise Failure("a wrong value", f"{name}: {value.tolist()}, not {wanted.tolist()}")
            continue
        _check(call, name, value, wanted, torch.float32)
        grads.append(torch.randn_like(value))
        sources.append((value, wanted))
    with valid_call("backward"):
        (ours,) = torch.autograd.grad([v for v, _ in sources], leaf, grads)
    (theirs,) = torch.autograd.grad(
        [w for _, w in sources], exact, [g.cpu().double() for g in grads]
    )
    largest = max((g.abs().max().item() for g in grads if g.numel()), default=0.0)
    if main == "hidden":
        _check_hidden(given, ours, theirs, largest)
        return
    _check(call, "gradient", ours, theirs, leaf.dtype, largest)


def _check_hidden(given: dict, ours: Tensor, of_logits: Tensor, scale: float) -> None:
    """Within the noise and a rounding of each logit's gradient, of which it is a product, and its
    own rounding."""
    weight, dtype = given["weight"].detach().cpu().double(), ours.dtype
    weights = given.get("token_weights")
    if weights is not None and weights.numel():
        scale *= max(1.0, weights.abs().max().item())
    scale *= (1 + 3 / given.get("temperature", 1.0)) ** 2
    rounding = half_an_ulp(of_logits, dtype) if dtype != torch.float32 else 0.0
    noise = NOISE * (FAR * scale + of_logits.abs()) + rounding
    exact = of_logits @ weight
    error = (ours.cpu().double() - exact).abs()
    bound = noise @ weight.abs() + half_an_ulp(exact, dtype)
    if not (error <= bound).all():
        worst = (error / bound).max().item()
        raise Failure("a wrong gradient", f"of hidden, {worst:.3g} times the bound")


def check_shards(kernel, draw: Draw, call: Call) -> None:
    """Of any cut of the vocabulary, what the whole head gives."""
    given = dict(call.given)
    weight, bias = given.pop("weight"), given.pop("bias", None)
    asked = {option: given.pop(option) for option in ASKED}
    cuts = sorted({0, len(weight), *(draw.integer(0, len(weight)) for _ in range(2))})
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    with valid_call("shards"):
        shards = [
            kernel.linear_log_probs_shard(
                **given,
                weight=weight[part],
                bias=None if bias is None else bias[part],
                vocab_offset=part.start,
                return_entropy=asked["return_entropy"],
            )
            for part in parts
        ]
        found = kernel.combine_shard_log_probs(shards)
    whole = kernel.linear_log_probs(**given, weight=weight, bias=bias, **asked)
    for name in ("log_probs", "entropy", "log_sum_exp"):
        ours, theirs = getattr(found, name), getattr(whole, name)
        if theirs is not None:
            _check(call, name, ours, theirs.detach().cpu().double(), torch.float32)


def check_module(kernel, name: str, options: tuple[str, ...], call: Call) -> None:
    """The module has the bits of the function."""
    given = {n: v for n, v in call.given.items() if n in options}
    tensors = {n: v for n, v in call.given.items() if n not in options}
    results = []
    main = next(iter(call.given))
    with valid_call(f"modules.{name}"):
        module = getattr(kernel.modules, name)(**given)
        for function, extra in ((module, {}), (getattr(kernel, call.name), given)):
            leaf = tensors[main].detach().requires_grad_()
            loss = function(**{**tensors, main: leaf}, **extra)
            results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
    for label, ours, theirs in zip(("loss", "gradient"), *results, strict=True):
        same_bits(ours, theirs, f"the module's {label}", "a wrong value")


def _check(call: Call, name, actual: Tensor, exact: Tensor, dtype, scale: float = 1.0) -> None:
    """Within the noise, but that special rows are NaN as PyTorch's are, or overflow."""
    if actual.dtype != dtype or actual.shape != exact.shape:
        raise Failure("a wrong value", f"{name} is {actual.dtype} {list(actual.shape)}")
    value, exact = actual.detach().cpu().double(), exact.detach()
    weights = call.given.get("token_weights")
    if weights is not None and weights.numel():
        scale *= max(1.0, weights.abs().max().item())
    if call.given.get("reduction") == "sum":
        scale *= max(1, exact.numel(), call.given["targets"].numel())
    scale *= 1 + 3 / call.given.get("temperature", 1.0)
    bound = NOISE * (FAR * scale + exact.abs()) + half_an_ulp(exact, dtype)
    right = ((value - exact).abs() <= bound) | (value == exact) | (value.isnan() & exact.isnan())
    if call.is_special:
        right |= ~value.isfinite() | (exact.abs() > 1e30) | ~exact.isfinite()
    if not right.all():
        kind = "a wrong gradient" if name == "gradient" else "a wrong value"
        index = tuple((~right).nonzero()[0].tolist())
        got, wanted = value[index].item(), exact[index].item()
        raise Failure(kind, f"{name} at {index} is {got:.9g}, expected {wanted:.9g}")
