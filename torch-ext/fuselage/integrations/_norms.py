"""Recognises norms, by their attributes and by what they compute."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache, partial
from typing import Callable, Optional

import torch

from ..ada_norm import fused_add_layer_norm, layer_norm
from ..norm import fused_add_rms_norm, rms_norm, rms_norm_add_rms_norm
from . import _probe
from ._patch import Found, Match, marked

# What the report is about. What is replaced is for the probes to decide.
_NAME = re.compile(r"norm", re.IGNORECASE)
_OTHER_NAMES = re.compile(r"batch|group|instance|response|gated|spectral|weightnorm", re.IGNORECASE)
_EPS = ("variance_epsilon", "eps", "epsilon")

# Where models round, by name: `rms_norm`'s docstring has the table.
_ROUNDINGS = ("once", "before the weight", "before a half weight", "not at all")


LAYER_NORM = "layer_norm"  # what the report says of one


def is_norm(what: str) -> bool:
    """Whether this stands for one of the norms below."""
    return what == LAYER_NORM or what.startswith("rms_norm")


def recognise_norm(module: torch.nn.Module) -> Found:
    """RMS norms of every rounding, and layer norms, over the last dimension."""
    if any(module.children()):
        return None
    kind = type(module).__name__
    found = why_not_a_norm(module, inputs=1) or found_once(module, _probe_styles)
    looks = _NAME.search(kind) and not _OTHER_NAMES.search(kind)
    return found if isinstance(found, Match) or looks else None


def why_not_a_norm(module: torch.nn.Module, inputs: int) -> Optional[str]:
    """The reason, as far as it shows without running the module. `inputs`: tensors it takes."""
    parameters = {**dict(module.named_parameters(recurse=False)), **_tensors(module)}
    if not parameters.keys() <= {"weight", "bias"}:
        return f"it has other parameters than weight and bias: {', '.join(sorted(parameters))}"
    if any(torch.nn.parameter.is_lazy(p) for p in parameters.values()):
        return "its parameters are not initialised yet"
    sizes = _sizes(module)
    if isinstance(sizes, (tuple, list)) and len(sizes) != 1:
        return "it normalises over more than the last dimension"
    if any(p.dim() != 1 for p in parameters.values()):
        return "its parameters do not have one dimension"
    if any(True for _ in module.buffers(recurse=False)):
        return "it has buffers"
    if not any(name in vars(module) for name in _EPS):
        return f"it has no {', '.join(_EPS[:-1])} or {_EPS[-1]}"
    if not _probe.takes_tensors(type(module).forward, inputs):
        return f"its forward does not take {'one tensor' if inputs == 1 else f'{inputs} tensors'}"
    return None


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those that are neither parameters nor buffers, such as FSDP1's views of its flat one."""
    return {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}


def _own(module: torch.nn.Module) -> dict[str, Optional[torch.Tensor]]:
    """Parameters, and what stands as a tensor in their place."""
    return {**vars(module)["_parameters"], **_tensors(module)}


def _sizes(module: torch.nn.Module) -> object:
    return getattr(module, "normalized_shape", None) or getattr(module, "dim", None)


def found_once(module: torch.nn.Module, probe: Callable[..., Found]) -> Found:
    """`probe(module, dim, has_weight, has_bias)`, which norms that are alike share."""
    own = _own(module)
    weight, bias = own.get("weight"), own.get("bias")
    dim = _dim(module, bias if weight is None else weight)
    forward, attributes = type(module).forward, _attributes(module)
    key = (probe, type(module), forward, attributes, dim, weight is None, bias is None)
    if attributes is not None and key in _found:
        return _found[key]
    found = probe(module, dim, weight is not None, bias is not None)
    if attributes is not None:
        _found[key] = found
    return found


_found: dict[tuple, Found] = {}
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (int, float, str, tuple, type(None), torch.dtype, torch.device)


def _attributes(module: torch.nn.Module) -> Optional[tuple]:
    """The module's own attributes; None if there is one that cannot be compared, as a config."""
    names = vars(module).keys() - _OF_EVERY_MODULE - set(_probe.HOOKS)
    values = {name: vars(module)[name] for name in sorted(names)}
    if not all(isinstance(value, _PLAIN) for value in values.values()):
        return None
    return tuple((name, repr(value)) for name, value in values.items())


def _dim(module: torch.nn.Module, weight: Optional[torch.Tensor]) -> int:
    """Of a parameter, which may be partitioned: `ds_shape` is DeepSpeed's; or what it declares."""
    sizes = _sizes(module)
    for shape in (getattr(weight, "ds_shape", None), getattr(weight, "shape", None), sizes):
        size = shape[0] if isinstance(shape, (tuple, list)) and len(shape) == 1 else None
        if isinstance(size, int) and size > 0:
            return size
    return 96


def _probe_styles(module, dim: int, has_weight: bool, has_bias: bool) -> Found:
    cases = []
    for how, plain, x in _cases(module, dim, has_weight, has_bias):
        expected = _probe.call(type(module).forward, plain, x.clone())
        if not isinstance(expected, Exception):
            cases.append((plain, x, expected))
        elif how is not None:
            return _probe.cannot(expected, how)
    for function in _candidates(parameter_names(type(module))[0], has_weight, has_bias):
        if all(_probe.agree(_probe.call(function, p, x.clone()), y) for p, x, y in cases):
            if not _same_slopes(function, type(module).forward, *cases[0][:2]):
                return "it has other gradients than the norms that fuselage has"
            return Match(function.fuselage_replacement, function)
    return "it computes something else than the norms that fuselage has"


def _same_slopes(ours: Callable, theirs: Callable, plain, x: torch.Tensor) -> bool:
    x = x[:, :7].clone()
    leaves = [x, *(v for v in _own(plain).values() if v is not None)]
    return _probe.same_slopes(partial(ours, plain, x), partial(theirs, plain, x), leaves)


def parameter_names(kind: type) -> tuple[str, ...]:
    """Of the forward, after self."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _candidates(name: str, has_weight: bool, has_bias: bool) -> list[Callable]:
    candidates = []
    if not has_bias:
        for rounding in _ROUNDINGS if has_weight else ("once", "not at all"):
            candidates.append(_rms_forward(name, 0.0, rounding))
            if has_weight:
                candidates.append(_rms_forward(name, 1.0, rounding))
    return [*candidates, _layer_forward(name)]


def _cases(module, dim: int, has_weight: bool, has_bias: bool) -> Iterator[tuple]:
    """Stand-ins and inputs for them, with words for the cases that the module must take.

    No two dimensions have the same size, so that it shows over which one it normalises.
    """
    two, three = [n for n in (2, 3, 5) if n != dim][:2]
    for dtype, weight_dtype in _probe.PAIRS:
        parameters = {
            "weight": _probe.random(dim, dtype=weight_dtype, seed=1) if has_weight else None,
            "bias": _probe.random(dim, dtype=weight_dtype, seed=2) if has_bias else None,
        }
        declared = vars(module)["_parameters"]
        parameters = {k: v for k, v in parameters.items() if v is not None or k in declared}
        infers, trains = _probe.stand_ins(module, parameters)
        for plain in (infers, trains):
            vars(plain).update({k: parameters[k] for k in _tensors(plain)})
        many = max(8192 // dim // two, 7)
        x = _probe.random(two, many + (many == dim), dim, dtype=dtype) + 0.25
        # The second tensor is small enough for eps to matter: it must be in the same place.
        eps = next((getattr(infers, n) for n in _EPS if getattr(infers, n, None)), 1e-6)
        exact = dtype == torch.float32
        yield " with 3 dimensions" if exact else None, infers, x
        yield None, infers, x * (eps**0.5)
        if exact or dtype == torch.bfloat16 == weight_dtype:
            yield None, infers, x[:, :7].reshape(-1, dim)
            more = _probe.random(two, three, 7 + (dim == 7), dim, dtype=dtype, seed=3)
            yield " with 4 dimensions" if exact else None, infers, more
            yield " in training" if exact else None, trains, x[:, :7]


# The forwards. Each is made once, so that all norms of a model share one function.


def named(function: Callable, *names: str) -> Callable:
    """The function with its first arguments after self called so, as those of the original are."""
    code = function.__code__
    rest = code.co_varnames[1 + len(names) :]
    if not set(names).isdisjoint(rest):
        return function
    function.__code__ = code.replace(co_varnames=(code.co_varnames[0], *names, *rest))
    return function


def taken(x: torch.Tensor, weight: Optional[torch.Tensor], compiled: bool = False) -> bool:
    """Whether the operators take these; the module's own forward runs on others. `compiled`: as
    that of `_probe.taken`.
    """
    fits = weight is None or weight.dtype == x.dtype or weight.dtype == torch.float32
    return fits and _probe.taken(x, compiled)


def parameter(module: torch.nn.Module, name: str) -> Optional[torch.Tensor]:
    """`module.name`, or None if it has none: in 0.1 us, where the attribute takes 0.4."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name, None)


def eps_of(norm: torch.nn.Module) -> float:
    """Under any of its names."""
    own = vars(norm)
    eps = own[next(name for name in _EPS if name in own)]
    # None as PyTorch takes it, which computes in float32 whatever the dtype.
    return torch.finfo(torch.float32).eps if eps is None else eps


@cache
def _rms_forward(name: str, offset: float, rounding: str) -> Callable:
    """The forward of an RMS norm; with a residual, `(out, residual + x)` in one pass, or with the
    norm `post`, which has this forward, too, `(out, residual + post(x))`.
    """

    def forward(
        self,
        x: torch.Tensor,
        residual: Optional[torch.Tensor] = None,
        post: Optional[torch.nn.Module] = None,
    ):
        if post is not None and not _norms_alike(self, post, x, residual):
            return forward(self, forward(post, x), residual)
        if residual is not None and residual.dtype != x.dtype:  # under autocast
            total = residual + x
            return forward(self, total), total
        weight = parameter(self, "weight")
        # Autocast runs F.rms_norm in float32 on a GPU, and the modules around it expect that.
        autocast = isinstance(self, torch.nn.RMSNorm) and _probe.autocasts(x)
        if autocast or not taken(x, weight):
            x = x if post is None else forward(post, x)
            if residual is None:
                return type(self).forward(self, x)
            total = residual + x
            return type(self).forward(self, total), total
        epsilon = eps_of(self)
        cast, out_dtype = False, None
        if rounding == "not at all":
            out_dtype = torch.float32
        elif weight is not None and rounding != "once":
            cast = rounding == "before the weight" or weight.dtype != torch.float32
            out_dtype = torch.promote_types(x.dtype, weight.dtype)
        options = {"weight_offset": offset, "cast_before_weight": cast, "out_dtype": out_dtype}
        if post is not None:
            options["pre_eps"], options["eps"] = epsilon, eps_of(post)
            del options["out_dtype"]
            return rms_norm_add_rms_norm(x, residual, post.weight, weight, **options)
        if residual is None:
            return rms_norm(x, weight, epsilon, **options)
        return fused_add_rms_norm(x, residual, weight, epsilon, **options)

    weight = "1 + weight" if offset else "weight"
    what = f"rms_norm ({weight}, rounded {rounding})"
    return marked(what, named(forward, name))


def _norms_alike(norm: torch.nn.Module, post: torch.nn.Module, x, residual) -> bool:
    """Whether all is of one dtype, and so is each result on the way."""
    tensors = (residual, parameter(norm, "weight"), parameter(post, "weight"))
    return all(t is not None and (t.dtype, t.device) == (x.dtype, x.device) for t in tensors)


@cache
def _layer_forward(name: str) -> Callable:
    """The forward of a layer norm; with a residual, as that of an RMS norm."""

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None):
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        plain = not taken(x, weight) or _probe.autocasts(x)  # as F.rms_norm
        if residual is not None and (plain or residual.dtype != x.dtype):
            total = residual + x
            return forward(self, total), total
        if plain:
            return type(self).forward(self, x)
        if residual is None:
            return layer_norm(x, weight, bias, eps_of(self))
        return fused_add_layer_norm(x, residual, weight, bias, eps_of(self))

    return marked(LAYER_NORM, named(forward, name))
