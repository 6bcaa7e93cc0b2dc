"""Recognises norms, by their attributes and by what they compute."""

from __future__ import annotations

import re
from functools import cache
from typing import Callable, Optional

import torch

from ..ada_norm import layer_norm
from ..norm import fused_add_rms_norm, rms_norm
from . import _probe
from ._patch import Found, Match, marked

_NAME = re.compile(r"norm", re.IGNORECASE)
_OTHER_NAMES = re.compile(r"batch|group|instance|response|gated|spectral|weightnorm", re.IGNORECASE)
_EPS = ("variance_epsilon", "eps", "epsilon")

# Where models round, by name: `rms_norm`'s docstring has the table.
_ROUNDINGS = ("once", "before the weight", "before a half weight", "not at all")


def recognise_norm(module: torch.nn.Module) -> Found:
    """RMS norms of every rounding, and layer norms, over the last dimension."""
    kind = type(module)
    if not _NAME.search(kind.__name__) or _OTHER_NAMES.search(kind.__name__):
        return None
    looks = re.search(r"(rms|layer|l2)_?norm", kind.__name__, re.IGNORECASE)
    reason = _why_not_a_norm(module)
    if reason is not None:
        return reason if looks and not any(module.children()) else None
    eps = next(name for name in _EPS if name in vars(module))
    return _match(module, eps)


def _why_not_a_norm(module: torch.nn.Module) -> Optional[str]:
    if any(module.children()):
        return "it has submodules"
    parameters = dict(module.named_parameters(recurse=False))
    if not parameters.keys() <= {"weight", "bias"}:
        return f"it has other parameters than weight and bias: {', '.join(sorted(parameters))}"
    sizes = getattr(module, "normalized_shape", None) or getattr(module, "dim", None)
    if isinstance(sizes, (tuple, list)) and len(sizes) != 1:
        return "it normalises over more than the last dimension"
    if any(p.dim() != 1 for p in parameters.values()):
        return "its parameters do not have one dimension"
    if any(True for _ in module.buffers(recurse=False)):
        return "it has buffers"
    if not any(name in vars(module) for name in _EPS):
        return f"it has no {', '.join(_EPS[:-1])} or {_EPS[-1]}"
    if not _probe.takes_one_tensor(type(module).forward):
        return "its forward takes more than one tensor"
    return None


def _match(module: torch.nn.Module, eps: str) -> Found:
    weight, bias = (vars(module)["_parameters"].get(name) for name in ("weight", "bias"))
    dim = _dim(module, weight)
    key = (type(module), _attributes(module), dim, weight is None, bias is None, eps)
    if key[1] is not None and key in _found:
        return _found[key]
    found = _probe_styles(module, eps, dim, weight is not None, bias is not None)
    if key[1] is not None:
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
    if weight is not None:
        return weight.shape[0]
    sizes = getattr(module, "normalized_shape", None) or getattr(module, "dim", None)
    return sizes[0] if isinstance(sizes, (tuple, list)) else 96


def _probe_styles(module, eps: str, dim: int, has_weight: bool, has_bias: bool) -> Found:
    for function in _candidates(eps, _parameter_name(type(module)), has_weight, has_bias):
        if _behaves_the_same(module, function, dim, has_weight, has_bias):
            return Match(function.fuselage_replacement, function)
    return "it computes something else than the norms that fuselage has"


def _parameter_name(kind: type) -> str:
    return list(kind.forward.__code__.co_varnames)[1] if hasattr(kind.forward, "__code__") else "x"


def _candidates(eps: str, name: str, has_weight: bool, has_bias: bool) -> list[Callable]:
    candidates = []
    if not has_bias:
        for rounding in _ROUNDINGS if has_weight else ("once", "not at all"):
            candidates.append(_rms_forward(eps, name, 0.0, rounding))
            if has_weight:
                candidates.append(_rms_forward(eps, name, 1.0, rounding))
    return [*candidates, _layer_forward(eps, name)]


def _behaves_the_same(module, function, dim: int, has_weight: bool, has_bias: bool) -> bool:
    compared = 0
    for dtype, weight_dtype in _probe.PAIRS:
        parameters = {
            "weight": _probe.random(dim, dtype=weight_dtype, seed=1) if has_weight else None,
            "bias": _probe.random(dim, dtype=weight_dtype, seed=2) if has_bias else None,
        }
        declared = vars(module)["_parameters"]
        parameters = {k: v for k, v in parameters.items() if v is not None or k in declared}
        plain = _probe.stand_in(module, parameters)
        for name in ("weight", "bias"):
            if parameters.get(name) is None and name in vars(module):
                vars(plain)[name] = vars(module)[name]
        # The second tensor is small enough for eps to matter: it must be in the same place.
        x = _probe.random(max(8192 // dim, 3), dim, dtype=dtype) + 0.25
        eps = next((getattr(plain, n) for n in _EPS if getattr(plain, n, None)), 1e-6)
        for inputs in (x, x * (eps**0.5)):
            expected = _probe.call(type(module).forward, plain, inputs.clone())
            if isinstance(expected, Exception):
                if dtype == torch.float32:
                    return False
                continue  # such as mixed dtypes that it never takes
            if not _probe.agree(_probe.call(function, plain, inputs.clone()), expected):
                return False
            compared += 1
    return compared > 2


# The forwards. Each is made once, so that all norms of a model share one function.


def _named(function: Callable, name: str) -> Callable:
    """The function with its first argument after self called `name`, as that of the original is."""
    code = function.__code__
    variables = (code.co_varnames[0], name, *code.co_varnames[2:])
    if name in code.co_varnames[2:]:
        return function
    function.__code__ = code.replace(co_varnames=variables)
    return function


def _taken(x: torch.Tensor, weight: Optional[torch.Tensor]) -> bool:
    """Whether the operators take these; the module's own forward runs on others."""
    fits = weight is None or weight.dtype == x.dtype or weight.dtype == torch.float32
    return fits and _probe.taken(x)


@cache
def _rms_forward(eps: str, name: str, offset: float, rounding: str) -> Callable:
    """The forward of an RMS norm; with a residual, `(out, residual + x)` in one pass."""

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None):
        if residual is not None and residual.dtype != x.dtype:  # under autocast
            total = residual + x
            return forward(self, total), total
        weight = getattr(self, "weight", None)
        # Autocast runs F.rms_norm in float32 on a GPU, and the modules around it expect that.
        autocast = isinstance(self, torch.nn.RMSNorm) and _probe.autocasts(x)
        if autocast or not _taken(x, weight):
            if residual is None:
                return type(self).forward(self, x)
            total = residual + x
            return type(self).forward(self, total), total
        epsilon = getattr(self, eps)
        if epsilon is None:
            # As PyTorch takes it, which computes in float32 whatever the dtype.
            epsilon = torch.finfo(torch.float32).eps
        cast, out_dtype = False, None
        if rounding == "not at all":
            out_dtype = torch.float32
        elif weight is not None and rounding != "once":
            cast = rounding == "before the weight" or weight.dtype != torch.float32
            out_dtype = torch.promote_types(x.dtype, weight.dtype)
        options = {"weight_offset": offset, "cast_before_weight": cast, "out_dtype": out_dtype}
        if residual is None:
            return rms_norm(x, weight, epsilon, **options)
        return fused_add_rms_norm(x, residual, weight, epsilon, **options)

    weight = "1 + weight" if offset else "weight"
    what = f"rms_norm ({weight}, rounded {rounding})"
    return marked(what, _named(forward, name))


@cache
def _layer_forward(eps: str, name: str) -> Callable:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        if not _taken(x, weight) or _probe.autocasts(x):  # as F.rms_norm
            return type(self).forward(self, x)
        return layer_norm(x, weight, bias, getattr(self, eps))

    return marked("layer_norm", _named(forward, name))
