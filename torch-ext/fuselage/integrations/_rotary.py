"""Recognises attention that rotates queries and keys through a function of its source file.

Such a function is shared by all models of its kind. So it is not replaced: the attention of this
one model gets a copy of its own forward, in which the name of the function means ours.
"""

from __future__ import annotations

import ast
import types
from copy import deepcopy
from functools import cache, partial
from typing import Callable, Optional

import torch

from ..rope import apply_rotary, qk_norm_rotary
from . import _probe, _source
from ._norms import eps_of
from ._patch import Found, Match, listened_to, marked, original_of, replacement, replacement_of

_WHAT = "apply_rotary"


def rebound(function: Callable, name: str, value: object) -> Callable:
    """The function with another meaning for one global name."""
    scope = {**function.__globals__, name: value}
    # Named, torch.compile would look the name up in the module, and find the other meaning.
    scope.pop("__name__", None)
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# transformers: `apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)`

_NAME = "apply_rotary_pos_emb"


def recognise_rotary_attention(module: torch.nn.Module) -> Found:
    """Attention whose forward calls `apply_rotary_pos_emb`."""
    forward = type(module).forward
    names = [getattr(f, "kernel_layer_name", "") for f in _kernel_functions(module)]
    if _NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        rotates = "rotary_pos_emb" in names
        return "its forward does not call its rotary embedding itself" if rotates else None
    function = forward.__globals__.get(_NAME)
    ours = _rotary_for(function) if callable(function) else None
    if ours is None:
        return "its rotary embedding computes something else than apply_rotary"
    return Match(_WHAT, _attention_forward(forward, ours))


def _kernel_functions(module: torch.nn.Module) -> tuple:
    functions = vars(module).get("_kernel_funcs")
    return tuple(functions.values()) if isinstance(functions, dict) else ()


@cache
def _attention_forward(forward: Callable, ours: Callable) -> Callable:
    return marked(_WHAT, rebound(forward, _NAME, ours))


@cache
def _rotary_for(function: Callable) -> Optional[Callable]:
    """Ours with the layout of the pairs and of the tables that the function has."""
    angles = _probe.random(2, 5, 8)
    tables = {
        "halves": torch.cat([angles, angles], dim=-1),
        "neighbours": angles.repeat_interleave(2, dim=-1),
        "narrow": angles,
    }
    q, k = _probe.random(2, 4, 5, 16, seed=1), _probe.random(2, 2, 5, 16, seed=2)
    for layout, table in tables.items():
        for interleaved in (False, True):
            ours = _rotary(function, interleaved, narrow=layout == "narrow")
            args = (q, k, table.cos(), table.sin())
            expected = _probe.call(function, *args)
            if isinstance(expected, Exception) or not _meant(layout, interleaved):
                continue
            if _probe.agree_all(_probe.call(ours, *args), expected):
                by_name = _probe.call(partial(function, **dict(zip(_ARGUMENTS, args))))
                if not _probe.agree_all(by_name, expected):
                    return None  # its arguments have other names, or another order
                by_tokens = (q.transpose(1, 2), k.transpose(1, 2), *args[2:], 2)
                expected = _probe.call(function, *by_tokens)
                if isinstance(expected, Exception):
                    return ours
                return ours if _probe.agree_all(_probe.call(ours, *by_tokens), expected) else None
    return None


def _meant(layout: str, interleaved: bool) -> bool:
    """Whether models make tables of this layout for pairs of that one."""
    return layout == "narrow" or interleaved == (layout == "neighbours")


def _rotary(original: Callable, interleaved: bool, narrow: bool) -> Callable:
    """Ours where the probes say what `original` computes, and `original` everywhere else."""

    def apply_rotary_pos_emb(*args, **kwargs):
        named = {**dict(zip(_ARGUMENTS, args)), **kwargs}
        if len(args) > len(_ARGUMENTS) or not _known_case(narrow, **named):
            return original(*args, **kwargs)
        q, k, cos, sin = (named[name] for name in _ARGUMENTS[:4])
        return apply_rotary(q, k, cos, sin, **options_for(**named))

    def options_for(q, unsqueeze_dim=1, **others) -> dict:
        options = {"interleaved": interleaved, "heads_dim": unsqueeze_dim}
        return options | ({"rotary_dim": q.shape[-1]} if narrow else {})

    def norm_and_rotate(q_norm, k_norm, *args, **kwargs):
        named = {**dict(zip(_ARGUMENTS, args)), **kwargs}
        if len(args) <= len(_ARGUMENTS) and _known_case(narrow, **named):
            q, k, cos, sin = (named[name] for name in _ARGUMENTS[:4])
            rounding = _rounding_of(q_norm, k_norm, q)
            if rounding is not None:
                weights = getattr(q_norm, "weight", None), getattr(k_norm, "weight", None)
                options = {**options_for(**named), **rounding}
                return qk_norm_rotary(q, k, *weights, cos, sin, eps_of(q_norm), **options)
        q, k, *args = args
        return apply_rotary_pos_emb(q_norm(q), k_norm(k), *args, **kwargs)

    apply_rotary_pos_emb.norm_and_rotate = norm_and_rotate
    return apply_rotary_pos_emb


# Norms of queries and keys before them: the two become one pass.

_NORM_AND_ROTARY = "qk_norm_rotary"
_HELPER = "fuselage_norm_and_rotate"


def recognise_norm_and_rotary(module: torch.nn.Module) -> Found:
    """Attention that is ours by now, and normalises queries and keys right before it rotates."""
    if replacement_of(module) not in (_WHAT, _NORM_AND_ROTARY):
        return None
    forward = type(module).forward
    if _NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    norms = [name for name, child in module._modules.items() if _is_rms(child)]
    function = _norm_and_rotary_forward(forward, frozenset(norms)) if len(norms) > 1 else None
    return None if function is None else Match(_NORM_AND_ROTARY, function)


def _is_rms(child: Optional[torch.nn.Module]) -> bool:
    return child is not None and (replacement_of(child) or "").startswith("rms_norm")


@cache
def _norm_and_rotary_forward(forward: Callable, norms: frozenset[str]) -> Optional[Callable]:
    ours, definition = _rotary_for(forward.__globals__[_NAME]), _source.read(forward)
    if ours is None or definition is None:
        return None
    calls = [
        n for n in ast.walk(definition) if getattr(getattr(n, "func", None), "id", "") == _NAME
    ]
    statements = definition.body
    j = next((j for j, s in enumerate(statements) if getattr(s, "value", None) in calls), None)
    if j is None or len(calls) != 1:
        return None
    (call,) = calls
    names = [getattr(argument, "id", None) for argument in call.args[:2]]
    found = [_normed_before(statements, j, name, definition, norms) for name in names]
    if len(names) != 2 or names[0] == names[1] or None in found:
        return None
    for i, norm, x in found:
        statements[i] = _source.Replaced(norm, x).visit(statements[i])
    call.func, call.args = (
        ast.Name(_HELPER, ast.Load()),
        [norm.func for _, norm, _ in found] + call.args,
    )
    function = _source.function_of(definition, {_HELPER: ours.norm_and_rotate}, forward)
    return marked(_NORM_AND_ROTARY, function)


def _normed_before(
    statements: list, j: int, name: Optional[str], definition, norms
) -> Optional[tuple]:
    """The statement that sets `name` to a norm, perhaps with tokens and heads swapped, for
    statement j alone; and the call of that norm with what is normalised.
    """
    i = next((i for i in reversed(range(j)) if name in _source.changes(statements[i])), None)
    found = None if i is None else _source.assigned(statements[i])
    if found is None or any(name in _source.loads(s) for s in statements[i + 1 : j]):
        return None
    node = found[1]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "transpose":
        if [getattr(argument, "value", None) for argument in node.args] != [1, 2]:
            return None
        node = node.func.value
    function = node.func if isinstance(node, ast.Call) else None
    owner = getattr(getattr(function, "value", None), "id", None)
    if getattr(function, "attr", None) not in norms or owner != definition.args.args[0].arg:
        return None
    return (i, node, node.args[0]) if len(node.args) == 1 and not node.keywords else None


def _rounding_of(q_norm: torch.nn.Module, k_norm: torch.nn.Module, q) -> Optional[dict]:
    """The options of `qk_norm_rotary` for two norms of ours; None if it has none for them."""
    what = replacement_of(q_norm)
    if what is None or what not in _ROUNDINGS or what != replacement_of(k_norm):
        return None
    if listened_to(q_norm) or listened_to(k_norm) or _probe.autocasts(q):
        return None
    for norm in (q_norm, k_norm):
        weight = getattr(norm, "weight", None)
        if weight is not None and (weight.dtype, weight.device) != (q.dtype, q.device):
            return None
        if weight is not None and weight.shape != q.shape[-1:]:
            return None
    return _ROUNDINGS[what] if eps_of(q_norm) == eps_of(k_norm) else None


_ROUNDINGS = {
    "rms_norm (weight, rounded once)": {},
    "rms_norm (weight, rounded before the weight)": {"cast_before_weight": True},
    "rms_norm (weight, rounded before a half weight)": {"cast_before_weight": True},
    "rms_norm (1 + weight, rounded once)": {"weight_offset": 1.0},
}


_ARGUMENTS = ("q", "k", "cos", "sin", "unsqueeze_dim")


def _known_case(narrow, q=None, k=None, cos=None, sin=None, unsqueeze_dim=1, **others) -> bool:
    """Queries and keys of four dimensions for the same tokens; tables `[batch or 1, tokens, n]`.

    Not among them: queries alone, keys of other tokens, tables without a batch, which mean
    something else for each `unsqueeze_dim`, and tables that are trained.
    """
    if others or k is None or not isinstance(unsqueeze_dim, int) or unsqueeze_dim not in (1, 2):
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.requires_grad or sin.requires_grad:
        return False
    batch, tokens = q.shape[0], q.shape[3 - unsqueeze_dim]
    if k.shape[0] != batch or k.shape[3 - unsqueeze_dim] != tokens or k.shape[-1] != q.shape[-1]:
        return False
    if cos.shape[0] not in (1, batch) or cos.shape[1] != tokens or sin.shape != cos.shape:
        return False
    if q.shape[-1] != cos.shape[-1] * (2 if narrow else 1):
        return False
    # The function gives its result in the wider dtype, that of its tables.
    same = q.dtype == k.dtype and cos.dtype == sin.dtype and q.device == cos.device
    return same and _probe.taken(q) and cos.dtype == q.dtype


# diffusers: `apply_rotary_emb(x, (cos, sin), ...)`, called by an attention processor

_PROCESSOR_NAME = "apply_rotary_emb"


def recognise_rotary_processor(module: torch.nn.Module) -> Found:
    """Attention whose processor calls `apply_rotary_emb`."""
    processor = vars(module).get("processor")
    if processor is None or isinstance(processor, torch.nn.Module):
        return None
    if replacement(processor):
        return Match(_WHAT, processor, attribute="processor")
    call = type(processor).__call__
    code = getattr(call, "__code__", None)
    if code is None or _PROCESSOR_NAME not in code.co_names:
        inner = any(
            getattr(c, "co_name", "") == _PROCESSOR_NAME for c in getattr(code, "co_consts", ())
        )
        return "its rotary embedding is a part of its processor" if inner else None
    function = call.__globals__.get(_PROCESSOR_NAME)
    kind = _processor_kind(type(processor), function) if callable(function) else None
    if kind is None:
        return "its rotary embedding computes something else than apply_rotary"
    ours = object.__new__(kind)
    vars(ours).update(vars(processor), fuselage_original=processor)
    return Match(_WHAT, ours, attribute="processor")


@cache
def _processor_kind(kind: type, function: Callable) -> Optional[type]:
    """A subclass that calls ours."""
    angles = _probe.random(5, 8).repeat_interleave(2, dim=-1)
    tables, batched = (angles.cos(), angles.sin()), (angles.cos()[None], angles.sin()[None])
    wide, heads = _probe.random(2, 5, 16, seed=1), _probe.random(2, 5, 4, 16, seed=2)
    for make, args in (
        (_rotate_tokens, (wide, batched)),
        (_rotate_heads, (heads, tables, True, -1, 1)),
    ):
        ours = make(function)
        if _probe.agree(_probe.call(ours, *args), _probe.call(function, *args)):
            call = rebound(kind.__call__, _PROCESSOR_NAME, ours)
            members = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
            members["fuselage_replacement"] = _WHAT
            members |= {"__reduce__": _as_the_plain_one, "__deepcopy__": _as_ours}
            return type(kind.__name__, (kind,), members)
    return None


def _as_the_plain_one(self):
    """A pickle cannot hold a class that is made here, and loads as the plain model anyway."""
    # Protocol 1 names the class in a way in which it may be another one than that of the object.
    return original_of(self).__reduce_ex__(1)


def _as_ours(self, memo: dict):
    copied = object.__new__(type(self))
    memo[id(self)] = copied
    vars(copied).update(deepcopy(vars(self), memo))
    return copied


def _rotate_tokens(original: Callable) -> Callable:
    """For `[batch, tokens, dim]` before the heads are split, as in LTX-Video."""

    def apply_rotary_emb(x, freqs):
        cos, sin = freqs
        if x.dim() != 3 or not _tables_fit(x, 1, cos, sin):
            return original(x, freqs)
        return apply_rotary(x, None, cos, sin, interleaved=True)

    return apply_rotary_emb


def _rotate_heads(original: Callable) -> Callable:
    """For four dimensions, of which `sequence_dim` counts tokens, as in Flux."""

    def apply_rotary_emb(x, freqs_cis, use_real=True, use_real_unbind_dim=-1, sequence_dim=2):
        known = use_real and use_real_unbind_dim == -1 and sequence_dim in (1, 2) and x.dim() == 4
        if not known or not _tables_fit(x, sequence_dim, *freqs_cis):
            return original(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
        cos, sin = freqs_cis
        return apply_rotary(x, None, cos, sin, interleaved=True, heads_dim=3 - sequence_dim)

    return apply_rotary_emb


def _tables_fit(x: torch.Tensor, tokens_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether they are `[tokens, n]` for an `x` of four dimensions,
    and `[batch or 1, tokens, n]` for one of three.
    """
    if not _probe.taken(x) or cos.dtype not in (x.dtype, torch.float32):
        return False
    if cos.dim() != (2 if x.dim() == 4 else 3) or cos.requires_grad or sin.requires_grad:
        return False
    if cos.dim() == 3 and cos.shape[0] not in (1, x.shape[0]):
        return False
    same = sin.shape == cos.shape and sin.dtype == cos.dtype and cos.device == x.device
    return same and cos.shape[-2] == x.shape[tokens_dim] and cos.shape[-1] == x.shape[-1]
