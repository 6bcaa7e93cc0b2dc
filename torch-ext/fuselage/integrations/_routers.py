"""Recognises routers of mixtures of experts by what they compute: logits, and a choice among them.

A router is replaced if its logits are those of a linear layer, and if its weights and indices are
those of `topk_softmax` with some options, on random inputs, in all dtypes, for inference and for
training, and with the same gradients. All else that it returns stays as it is: the logits are
computed by the same operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Callable, Optional

import torch
import torch.nn.functional as F

from ..route import TopK, topk_softmax
from . import _probe
from ._norms import named, parameter_names
from ._patch import Found, Match, marked
from ._source import methods

WHAT = "topk_softmax"
_OTHER = "it computes something else than topk_softmax"
_TOKENS = 48  # of a probe


def recognise_router(module: torch.nn.Module) -> Found:
    """Modules that return `(logits, weights, indices)` of each token, or the last two alone."""
    looks = re.search("router", type(module).__name__, re.IGNORECASE) is not None
    shapes = _shapes(module)
    if isinstance(shapes, str):
        return shapes if looks else None
    found = _found_once(type(module), shapes, _settings(module), module)
    return found if isinstance(found, Match) or looks else None


def recognise_router_block(module: torch.nn.Module) -> Found:
    """A mixture of experts that chooses for itself, which nothing can be put in the place of."""
    if "experts" not in module._modules:
        return None
    chooses = any("topk" in method.__code__.co_names for method in methods(type(module)))
    return "its router is no module of its own" if chooses else None


@dataclass(frozen=True)
class _Tensors:
    """Where a router has its tensors: names, such as `gate.weight`."""

    weight: str  # [experts, hidden]
    vectors: tuple[str, ...]  # of a number for each expert
    experts: int
    hidden: int
    names: tuple[str, ...]  # of the arguments of the forward


def _shapes(module: torch.nn.Module) -> _Tensors | str:
    """The tensors, or why it is no router that can be tried."""
    names = parameter_names(type(module))
    if not names or len(names) > 2 or not _probe.takes_tensors(type(module).forward, len(names)):
        return "its forward does not take one tensor, or one and a bias"
    if any(True for child in module.children() for _ in child.children()):
        return "it has more submodules"
    matrices, vectors = {}, {}
    for prefix, part in (("", module), *((f"{k}.", v) for k, v in module.named_children())):
        plain = {k: v for k, v in vars(part).items() if isinstance(v, torch.Tensor)}
        for name, tensor in {**part._parameters, **part._buffers, **plain}.items():
            shape = tuple(getattr(tensor, "ds_shape", getattr(tensor, "shape", ())))
            if len(shape) == 2 and 1 not in shape:
                matrices[prefix + name] = shape
            elif tensor is not None:
                vectors[prefix + name] = shape
    if len(matrices) != 1:
        return "it has another number of weights than one"
    ((weight, (experts, hidden)),) = matrices.items()
    if "." in weight and not isinstance(getattr(module, weight.split(".")[0]), torch.nn.Linear):
        return "its weight is that of a submodule, which is no linear layer"
    if any(torch.Size(shape).numel() != experts for shape in vectors.values()):
        return "it has other parameters than a weight and a number for each expert"
    return _Tensors(weight, tuple(vectors), experts, hidden, names)


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def _settings(module: torch.nn.Module) -> tuple[tuple[str, object], ...]:
    """The numbers and words that it was made with."""
    own = sorted(vars(module).keys() - _OF_EVERY_MODULE)
    plain = ((name, vars(module)[name]) for name in own)
    return tuple((k, v) for k, v in plain if isinstance(v, (bool, int, float, str)))


def _found_once(kind: type, tensors: _Tensors, settings: tuple, module: torch.nn.Module) -> Found:
    """What is found of the module, which routers that are alike share."""
    config = getattr(module, "config", None)  # which may say more
    key = (kind, kind.forward, tensors, settings, repr(config))
    if key not in _found:
        _found[key] = _found_of(module, tensors, settings)
    return _found[key]


_found: dict[tuple, Found] = {}


@dataclass(frozen=True)
class _Options:
    """What a forward of ours does."""

    tensors: _Tensors
    settings: tuple = ()
    linear: str = "as it is"  # or "wide", "widened", "narrowed", "a submodule"
    linear_bias: Optional[str] = None
    flat: bool = True  # the tokens of a batch become one dimension
    dims: tuple[int, ...] = (2, 3)  # of the inputs that were tried
    order: tuple[str, ...] = ("logits", "weights", "indices")
    k: int = 1
    score: str = "softmax"
    bias: Optional[str] = None  # the name of a tensor; "" is that of an argument
    groups: tuple[Optional[int], Optional[int]] = (None, None)
    renormalize: bool = True
    factor: float = 1.0
    cast: Optional[str] = None  # weights are in the dtype of the "logits", or of the "input"


@dataclass
class _Case:
    plain: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    logits: Optional[torch.Tensor]
    weights: torch.Tensor
    indices: torch.Tensor

    @property
    def exact(self) -> bool:
        return self.args[0].dtype == torch.float32


def _found_of(module: torch.nn.Module, tensors: _Tensors, settings: tuple) -> Found:
    own = type(module).forward
    if any("is_cuda" in method.__code__.co_names for method in methods(type(module))):
        return "it computes something else on a GPU"
    cases, order, error = [], None, None
    for plain, args in _inputs(module, tensors):
        result = _probe.call(own, plain, *(t.clone() for t in args))
        if isinstance(result, Exception):  # as other dtypes or dimensions may be
            error = error or result
            continue
        found = _order(result)
        if found is None or found != (order or found):
            return _OTHER
        order = found
        cases.append(_Case(plain, args, **{"logits": None, **dict(zip(order, result))}))
    if not any(case.exact for case in cases):
        return _probe.cannot(error)
    start = _Options(tensors, settings, order=order, k=cases[0].indices.shape[-1])
    for dims in ((2, 3), (2,), (3,)):
        some = [case for case in cases if case.args[0].dim() in dims]
        if {case.args[0].dim() for case in some if case.exact} != set(dims):
            continue
        options = _options_of(replace(start, dims=dims), some)
        if options is None:
            continue
        function = _forward(options)
        if not _same_slopes(function, own, some[0], tensors.experts):
            return "it has other gradients than topk_softmax"
        covers = {n.partition(".")[0] for n in (options.bias or "",) if "." in n}
        return Match(WHAT, function, covers=tuple(covers))
    return _OTHER


def _order(result: object) -> Optional[tuple[str, ...]]:
    """The names of what a router returns."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        return None
    if not all(isinstance(part, torch.Tensor) for part in result):
        return None
    floats = iter(("logits", "weights")[-(len(result) - 1) :])
    names = tuple("indices" if t.dtype == torch.int64 else next(floats, "") for t in result)
    shapes = {name: t.shape for name, t in zip(names, result)}
    fits = set(names) >= {"weights", "indices"} and shapes["weights"] == shapes["indices"]
    return names if fits and len(shapes) == len(result) else None


def _inputs(module: torch.nn.Module, tensors: _Tensors) -> Iterator[tuple]:
    """Stand-ins and what they are called with.

    The first column of the weight is one number, so that the first of an input moves all logits.
    """
    for dtype, weight_dtype in _probe.PAIRS:
        weight = _probe.random(tensors.experts, tensors.hidden, dtype=weight_dtype, seed=1)
        weight = weight / tensors.hidden**0.5
        weight[:, 0] = 1
        own = {tensors.weight: weight}
        for seed, name in enumerate(tensors.vectors, 2):
            own[name] = _probe.random(tensors.experts, seed=seed).div(8).to(weight_dtype)
        infers, trains = (_stand_in(module, own, training) for training in (False, True))
        x = _probe.random(_TOKENS, tensors.hidden, dtype=dtype)
        x[:, 0] = 0
        bias = _probe.random(tensors.experts, dtype=weight_dtype, seed=9) / 8
        more = (bias,) if len(tensors.names) == 2 else ()
        low = x.clone()
        low[:, 0] = -30  # a sigmoid so small that what is added to the sum would show
        for of_batches in (False, True):
            given = (x, x * 8, low) if dtype == torch.float32 else (x,)
            given = [t.view(3, -1, tensors.hidden) if of_batches else t for t in given]
            for each in given:
                yield infers, (each, *more)
            yield trains, (given[0], *more)


def _stand_in(module: torch.nn.Module, given: dict, training: bool) -> torch.nn.Module:
    """With these tensors, in the shapes that it has them in."""

    def own(part: torch.nn.Module, prefix: str) -> dict:
        names = {**part._parameters, **part._buffers}
        names |= {k: v for k, v in vars(part).items() if isinstance(v, torch.Tensor)}
        shapes = {k: getattr(v, "ds_shape", getattr(v, "shape", ())) for k, v in names.items()}
        found = {k: given[prefix + k].reshape(v) for k, v in shapes.items() if prefix + k in given}
        return dict.fromkeys(names) | found

    children = {}
    for name, child in module.named_children():
        children[name] = _probe.stand_in(child, own(child, f"{name}."), training=training)
    plain = _probe.stand_in(module, own(module, ""), children, training)
    for part, prefix in ((plain, ""), *((v, f"{k}.") for k, v in children.items())):
        for key, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):  # a view of FSDP1's flat parameter
                vars(part)[key] = given[prefix + key]
    return plain


# The search. What the logits are shows without the choice, so it comes first.


def _options_of(start: _Options, cases: list[_Case]) -> Optional[_Options]:
    exact = [case for case in cases if case.exact]
    for options in _linears(start):
        if all(_same_logits(options, case) for case in cases):
            for found in _choices(options, exact[0]):
                if all(_same_choice(found, case) for case in (*exact, *cases)):
                    return found
    return None


def _linears(start: _Options) -> Iterator[_Options]:
    tensors = start.tensors
    kinds = ["as it is", "wide", "widened", "narrowed"]
    if tensors.weight.endswith(".weight"):
        kinds = ["a submodule", "a submodule, widened", *kinds]
    for linear, bias, flat in product(kinds, (None, *tensors.vectors), (True, False)):
        if linear.startswith("a submodule") and bias not in (None, _beside(tensors)):
            continue
        yield replace(start, linear=linear, linear_bias=bias, flat=flat)


def _beside(tensors: _Tensors) -> str:
    return tensors.weight.removesuffix("weight") + "bias"


def _same_logits(options: _Options, case: _Case) -> bool:
    """Whether they are the same bits, or, of those that it does not return, may be."""
    logits = _probe.call(_logits, options, case.plain, case.args[0].clone())
    if not isinstance(logits, torch.Tensor):
        return False
    if "logits" not in options.order:
        case.logits = logits
        return logits.shape[:-1] == case.indices.shape[:-1]
    return logits.dtype == case.logits.dtype and torch.equal(logits, case.logits)


def _choices(start: _Options, case: _Case) -> Iterator[_Options]:
    """Options with which the choice may be made."""
    tensors = start.tensors
    biases = [None, *(name for name in tensors.vectors if name != start.linear_bias)]
    if len(tensors.names) == 2:
        biases = [""]
    numbers = [v for k, v in start.settings if "group" in k and type(v) is int]
    groups = [(None, None), *(pair for pair in product(numbers, numbers) if 1 <= pair[1] < pair[0])]
    factors = [v for _, v in start.settings if type(v) in (int, float) and v > 0]
    factors = dict.fromkeys((1.0, *factors, 1 / start.k))
    styles = product(("softmax", "sigmoid"), biases, groups, (True, False))
    for score, bias, pair, renormalize in styles:
        found = replace(start, score=score, bias=bias, groups=pair, renormalize=renormalize)
        ours = _probe.call(_choice, found, case.plain, case.logits, *case.args)
        if not _same_sets(ours, case.indices):
            continue
        for factor, cast in product(factors, (None, "logits", "input")):
            yield replace(found, factor=factor, cast=cast)


def _same_sets(ours: object, indices: torch.Tensor) -> bool:
    if not isinstance(ours, tuple) or ours[2].shape != indices.shape:
        return False
    return torch.equal(ours[2].sort(-1).values, indices.sort(-1).values)


def _same_choice(options: _Options, case: _Case) -> bool:
    """Whether the experts and their weights are the same, in whatever order.

    In half precision some logits are equal, and PyTorch may choose any of these.
    """
    ours = _probe.call(_choice, options, case.plain, case.logits, *case.args)
    if not isinstance(ours, tuple) or ours[2].shape != case.indices.shape:
        return False
    logits, weights, indices = ours
    clear = torch.ones(indices.shape[:-1], dtype=torch.bool)
    if not case.exact and options.k < logits.shape[-1]:
        top = logits.topk(options.k + 1, -1).values
        clear = top[..., -1] != top[..., -2]
        if clear.sum() < 4:
            return False
    ours, theirs = indices.sort(-1), case.indices.sort(-1)
    if not torch.equal(ours.values[clear], theirs.values[clear]):
        return False
    expected = case.weights.gather(-1, theirs.indices)[clear]
    # Noise in proportion: weights of sigmoids may be tiny, and are still all that counts.
    largest = expected.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    actual = weights.gather(-1, ours.indices)[clear]
    if actual.dtype != expected.dtype:
        return False
    return _probe.agree(actual / largest, expected / largest, 3e-6) and _probe.agree(
        actual, expected
    )


def _same_slopes(ours: Callable, theirs: Callable, case: _Case, experts: int) -> bool:
    """Of the logits, and of each expert's weight."""
    x = case.args[0].reshape(-1, case.args[0].shape[-1])[:33].clone()
    x = x[None] if case.args[0].dim() == 3 else x

    def dense(function: Callable) -> torch.Tensor:
        result = function(case.plain, x, *case.args[1:])
        of = dict(zip(_order(result), result))
        zeros = torch.zeros(*of["weights"].shape[:-1], experts)
        spread = zeros.scatter(-1, of["indices"], of["weights"].float())
        return torch.cat([spread, of["logits"].float()], -1) if "logits" in of else spread

    leaves = [x, *case.plain.parameters()]
    return _probe.same_slopes(partial(dense, ours), partial(dense, theirs), leaves)


# The forward. Each is made once, so that all routers of a model share one function.


def _tensor(module: torch.nn.Module, name: Optional[str]) -> Optional[torch.Tensor]:
    """The tensor of that name, which may be that of a submodule."""
    if name is None:
        return None
    part, _, last = name.rpartition(".")
    return getattr(getattr(module, part) if part else module, last)


def _logits(options: _Options, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """By the operations that the module has them from."""
    if options.flat:
        x = x.reshape(-1, options.tensors.hidden)
    if options.linear.startswith("a submodule"):
        logits = getattr(module, options.tensors.weight.removesuffix(".weight"))(x)
        return logits.float() if options.linear.endswith("widened") else logits
    weight = _tensor(module, options.tensors.weight)
    bias = _tensor(module, options.linear_bias)
    if options.linear == "wide":
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if options.linear == "narrowed":
        x = x.to(weight.dtype)
    logits = F.linear(x, weight, bias)
    return logits.float() if options.linear == "widened" else logits


def _choice(
    options: _Options,
    module: torch.nn.Module,
    logits: torch.Tensor,
    x: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the module returns, of its logits and of its arguments."""
    if options.bias:
        bias = _tensor(module, options.bias).flatten()
    found: TopK = topk_softmax(
        logits,
        options.k,
        score=options.score,
        bias=None if bias is None else bias.float(),
        num_groups=options.groups[0],
        topk_groups=options.groups[1],
        renormalize=options.renormalize,
    )
    weights = found.weights
    if options.factor != 1:
        weights = weights * options.factor
    if options.cast is not None:
        weights = weights.to(logits.dtype if options.cast == "logits" else x.dtype)
    return logits, weights, found.indices


@cache
def _forward(options: _Options) -> Callable:
    tensors, settings = options.tensors, options.settings
    places = [("logits", "weights", "indices").index(name) for name in options.order]

    def takes(module: torch.nn.Module, x: torch.Tensor) -> bool:
        """Whether all is as it was when it was tried: a user may choose more experts since."""
        if x.dim() not in options.dims or x.dtype not in _probe.DTYPES or _probe.autocasts(x):
            return False
        weight = _tensor(module, tensors.weight)
        if weight.dtype not in _probe.DTYPES:
            return False
        calls_linear = options.linear.startswith("a submodule")
        if not calls_linear and weight.numel() != tensors.experts * tensors.hidden:
            return False  # partitioned, by hooks of a submodule that is not called
        if options.bias:  # hooks of a submodule may gather it, but that is not called
            bias = _tensor(module, options.bias)
            if bias.numel() != tensors.experts or bias.device != x.device:
                return False
        return all(getattr(module, name, None) == value for name, value in settings)

    if len(tensors.names) == 2:

        def forward(self, x: torch.Tensor, bias: Optional[torch.Tensor] = None):
            if bias is None or bias.dim() != 1 or not takes(self, x):
                return type(self).forward(self, x, bias)
            results = _choice(options, self, _logits(options, self, x), x, bias)
            return tuple(results[place] for place in places)

    else:

        def forward(self, x: torch.Tensor):
            if not takes(self, x):
                return type(self).forward(self, x)
            results = _choice(options, self, _logits(options, self, x), x)
            return tuple(results[place] for place in places)

    return marked(WHAT, named(forward, *tensors.names))
