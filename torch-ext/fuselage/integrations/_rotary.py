"""Recognises attention that rotates queries and keys through a function of its source file.

Such a function is shared by all models of its kind. So it is not replaced: the attention of this
one model gets a copy of its own forward, in which the name of the function means ours.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Callable, Optional

import torch

from . import _probe
from ._patch import Found, Match, marked, replacement

try:
    from ..rope import apply_rotary
except ImportError:  # not in this version
    apply_rotary = None

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
    if apply_rotary is None:
        return None
    if _NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return "its forward does not call its rotary embedding itself" if any(names) else None
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
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        taken = q.dtype == k.dtype and q.dtype in _probe.DTYPES and q.dim() == 4
        taken = taken and cos.dtype in (q.dtype, torch.float32) and cos.dim() <= 3
        if not taken or q.shape[-1] != cos.shape[-1] * (2 if narrow else 1):
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        options = {"interleaved": interleaved, "heads_dim": unsqueeze_dim}
        if narrow:
            options["rotary_dim"] = q.shape[-1]
        if cos.dtype == q.dtype or q.dtype == torch.float32:
            return apply_rotary(q, k, cos, sin, **options)
        # The function gives its result in the dtype of its tables.
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return apply_rotary_pos_emb


# diffusers: `apply_rotary_emb(x, (cos, sin), ...)`, called by an attention processor

_PROCESSOR_NAME = "apply_rotary_emb"


def recognise_rotary_processor(module: torch.nn.Module) -> Found:
    """Attention whose processor calls `apply_rotary_emb`."""
    processor = vars(module).get("processor")
    if apply_rotary is None or processor is None or isinstance(processor, torch.nn.Module):
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
    ours = kind.__new__(kind)
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
            return type(kind.__name__, (kind,), members)
    return None


def _rotate_tokens(original: Callable) -> Callable:
    """For `[batch, tokens, dim]` before the heads are split, as in LTX-Video."""

    def apply_rotary_emb(x, freqs):
        cos, sin = freqs
        if x.dim() != 3 or not _tables_fit(x, cos):
            return original(x, freqs)
        return apply_rotary(x, None, cos, sin, interleaved=True)

    return apply_rotary_emb


def _rotate_heads(original: Callable) -> Callable:
    """For four dimensions, of which `sequence_dim` counts tokens, as in Flux."""

    def apply_rotary_emb(x, freqs_cis, use_real=True, use_real_unbind_dim=-1, sequence_dim=2):
        if not (use_real and use_real_unbind_dim == -1 and _tables_fit(x, freqs_cis[0])):
            return original(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
        cos, sin = freqs_cis
        return apply_rotary(x, None, cos, sin, interleaved=True, heads_dim=3 - sequence_dim)

    return apply_rotary_emb


def _tables_fit(x: torch.Tensor, cos: torch.Tensor) -> bool:
    if x.dtype not in _probe.DTYPES or cos.dtype not in (x.dtype, torch.float32):
        return False
    return cos.shape[-1] == x.shape[-1] and cos.device == x.device
