"""Recognises attention of diffusers whose processor rotates queries and keys.

By a function `apply_rotary_emb(x, (cos, sin), ...)` of many forms, which the processor's source
file has or imports, or which it defines or imports itself. It gets a subclass that calls ours.
"""

from __future__ import annotations

import ast
from functools import cache, partial
from typing import Callable, Optional

import torch

from ..rope import apply_rotary
from . import _probe, _source
from ._patch import Found, Match, replacement
from ._processors import in_place_of, processor_of, subclass_of
from ._rotary import NORM_AND_ROTARY, WHAT, normed_and_rotated, rebound
from ._rotation_pairs import join

_PROCESSOR_NAMES = ("apply_rotary_emb", "apply_rotary_emb_qwen")


def recognise_rotary_processor(module: torch.nn.Module) -> Found:
    """Attention whose processor calls `apply_rotary_emb`."""
    processor = processor_of(module)
    if processor is None:
        return None
    if hasattr(processor, "fuselage_norms"):
        return Match(_what(processor, module), processor, attribute="processor")
    if replacement(processor):
        return None
    code = getattr(type(processor).__call__, "__code__", None)
    names = () if code is None else (*code.co_names, *code.co_varnames)
    name = next((name for name in _PROCESSOR_NAMES if name in names), None)
    if name is None:
        return None
    kind = _processor_kind(type(processor), name)
    if kind is None:
        return "its rotary embedding computes something else than apply_rotary"
    ours = in_place_of(processor, kind)
    return Match(_what(ours, module), ours, attribute="processor")


def _what(ours: object, module: torch.nn.Module) -> str:
    """Whether it normalises, too, as the module is."""
    return NORM_AND_ROTARY if any(n.may_join(module) for n in ours.fuselage_norms) else WHAT


@cache
def _processor_kind(kind: type, name: str) -> Optional[type]:
    """A subclass that calls ours."""
    call = kind.__call__
    definition = _source.read(call, nested=True)
    if name in call.__code__.co_varnames:
        function = None if definition is None else _local_function(definition, call, name)
    else:
        function = call.__globals__.get(name)
    ours = _ours_for_a_processor(function) if callable(function) else None
    if ours is None:
        return None
    norms = []
    if definition is None:
        call = rebound(call, name, ours)
    else:
        for node in ast.walk(definition):
            if isinstance(node, ast.Name) and node.id == name:
                node.id = _ONE
        norms = join(definition, _ONE, _BOTH)
        call = _source.function_of(definition, {_ONE: ours, _BOTH: ours.of_both}, call)
    return subclass_of(kind, call, WHAT, fuselage_norms=norms)


_ONE, _BOTH = "fuselage_rotate", "fuselage_rotate_both"


def _local_function(definition, call: Callable, name: str) -> Optional[Callable]:
    """The function that `call` imports or defines itself, if that is always the same one."""
    sources = {}
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            return None
        if isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom)):
            names = [getattr(node, "name", None), *(n.name for n in getattr(node, "names", ()))]
            if name in names:
                sources[ast.dump(node)] = node
    if len(sources) != 1:
        return None
    scope = dict(call.__globals__)
    (node,) = sources.values()
    found = _probe.call(exec, compile(ast.Module([node], []), "<local>", "exec"), scope)
    return None if isinstance(found, Exception) else scope.get(name)


def _ours_for_a_processor(function: Callable) -> Optional[Callable]:
    """Ours in the form that the function has."""
    angles = _probe.random(5, 8)
    pairs, halves = angles.repeat_interleave(2, dim=-1), torch.cat([angles, angles], dim=-1)
    tables = (pairs.cos(), pairs.sin())
    wide, heads = _probe.random(2, 5, 16, seed=1), _probe.random(2, 5, 4, 16, seed=2)
    turns = torch.polar(torch.ones_like(angles), angles)
    calls = {
        "pairs": (heads, tables, True, -1, 1),
        "halves": (heads, (halves.cos(), halves.sin()), True, -2, 1),
        "complex": (heads, turns, False),
        "complex, batched": (heads, torch.stack([turns, turns * turns]), False),
    }

    def agrees(ours: Callable, *args) -> bool:
        return _probe.agree(_probe.call(ours, *args), _probe.call(function, *args))

    if agrees(_rotate_tokens(function), wide, [t[None] for t in tables]):
        return _rotate_tokens(function)
    if agrees(_rotate_with_two_tables(function), heads, *(t[None, :, None] for t in tables)):
        return _rotate_with_two_tables(function)
    if agrees(_rotate_by_turns(function), heads, calls["complex, batched"][1]):
        return _rotate_by_turns(function)
    ways = {way for way, args in calls.items() if agrees(_rotate_heads(function, {way}), *args)}
    return _rotate_heads(function, ways) if ways else None


def _rotation(original: Callable, known: Callable) -> Callable:
    """Ours where `known` says how, and `original` everywhere else.

    Args:
        known: Takes whether a norm comes before, and what `original` takes. Gives the tables and
            the options of `apply_rotary`, or None.
    """

    def apply_rotary_emb(x, *args, **kwargs):
        if (found := known(False, x, *args, **kwargs)) is None:
            return original(x, *args, **kwargs)
        tables, options = found
        return apply_rotary(x, None, *tables, **options)

    def of_both(q_norm, k_norm, q, k, *args, **kwargs):
        found = both = None
        if None not in (q_norm, k_norm):
            found = known_of_both(True, q, k, *args, **kwargs)
        if found is not None:
            both = normed_and_rotated(q_norm, k_norm, q, k, *found)
        if both is not None:
            return both
        q, k = (x if norm is None else norm(x) for norm, x in ((q_norm, q), (k_norm, k)))
        if (found := known_of_both(False, q, k, *args, **kwargs)) is None:
            return apply_rotary_emb(q, *args, **kwargs), apply_rotary_emb(k, *args, **kwargs)
        tables, options = found
        return apply_rotary(q, k, *tables, **options)

    def known_of_both(normed, q, k, *args, **kwargs):
        found = known(normed, q, *args, **kwargs)
        return found if found is not None and _alike(q, k, **found[1]) else None

    apply_rotary_emb.of_both = of_both
    return apply_rotary_emb


def _alike(q: torch.Tensor, k: torch.Tensor, heads_dim: int = 2, **options) -> bool:
    """Whether they are queries and keys of the same tokens, of heads of one size."""
    if (q.dim(), q.dtype, q.device) != (k.dim(), k.dtype, k.device):
        return False
    heads = heads_dim if q.dim() == 4 else None
    return all(q.shape[i] == k.shape[i] for i in range(q.dim()) if i != heads)


def _rotate_tokens(original: Callable) -> Callable:
    """For `[batch, tokens, dim]` before the heads are split, as in LTX-Video.

    Compiled on an H200, norms and rotations of a layer took 98 us, and take 47.
    """

    def known(normed, x, freqs):
        cos, sin = freqs
        if x.dim() != 3 or not _tables_fit(x, 1, cos, sin, compiled=normed):
            return None
        return (cos, sin), {"interleaved": True}

    return _rotation(original, known)


def _rotate_heads(original: Callable, ways: set[str]) -> Callable:
    """For four dimensions, of which `sequence_dim` counts tokens, in those ways that it has:
    pairs as in Flux, halves as in CogView 4, complex numbers as in QwenImage or Lumina 2.

    Compiled, on an H200: norms and rotations of a single block of Flux took 79 us, and take 33. The
    compiler does not fuse complex numbers: with norms and concatenations they took 355 us of two
    layers of QwenImage, and take 230. Halves were not measured.
    """

    def known(normed, x, freqs_cis, *args, **kwargs):
        named = {**_DEFAULTS, **dict(zip(_DEFAULTS, args)), **kwargs}
        by_halves, tokens_dim = named["use_real_unbind_dim"] != -1, named["sequence_dim"]
        tables, way, options = freqs_cis, "halves" if by_halves else "pairs", {}
        if not named["use_real"]:
            way = "complex, batched" if freqs_cis.dim() == 3 else "complex"
            tables, tokens_dim = (freqs_cis.real, freqs_cis.imag), 1
            if freqs_cis.dtype == torch.complex128 and way in ways:
                tables = tuple(table.float() for table in tables)
            options = {"rotary_dim": x.shape[-1]}
        width = x.shape[-1] // (1 if named["use_real"] else 2)
        dims = 3 if way == "complex, batched" else 2
        takes = way in ways and tokens_dim in (1, 2) and x.dim() == 4 and len(named) == 3
        fits = partial(_tables_fit, x, tokens_dim, *tables, width)
        if not takes or tables[0].dim() != dims or not fits(compiled=way != "halves"):
            return None
        return tables, {**options, "interleaved": way != "halves", "heads_dim": 3 - tokens_dim}

    return _rotation(original, known)


_DEFAULTS = {"use_real": True, "use_real_unbind_dim": -1, "sequence_dim": 2}


def _rotate_with_two_tables(original: Callable) -> Callable:
    """For tables `[batch or 1, tokens, 1, n]`, as in Wan: norms and rotations of a layer took 578
    us, compiled on an H200, and take 310.
    """

    def known(normed, x, freqs_cos, freqs_sin):
        if x.dim() == 4 and freqs_cos.dim() == freqs_sin.dim() == 4 and freqs_cos.shape[2] == 1:
            cos, sin = freqs_cos[:, :, 0], freqs_sin[:, :, 0]
            if _tables_fit(x, 1, cos, sin, compiled=True):
                return (cos, sin), {"interleaved": True}
        return None

    return _rotation(original, known)


def _rotate_by_turns(original: Callable) -> Callable:
    """For complex tables `[batch or 1, tokens, n]` and nothing else, as in Z-Image."""

    def known(normed, x, freqs_cis):
        if x.dim() != 4 or freqs_cis.dim() != 3 or freqs_cis.dtype != torch.complex64:
            return None
        tables = freqs_cis.real, freqs_cis.imag
        if not _tables_fit(x, 1, *tables, x.shape[-1] // 2, compiled=True):
            return None
        return tables, {"interleaved": True, "rotary_dim": x.shape[-1]}

    return _rotation(original, known)


def _tables_fit(
    x: torch.Tensor,
    tokens_dim: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    width: Optional[int] = None,
    compiled: bool = False,
) -> bool:
    """Whether they are `[tokens, width]` for an `x` of four dimensions, or
    `[batch or 1, tokens, width]`, which for one of three they have to be. `compiled`: whether
    ours is the faster one in compiled inference, too.
    """
    if not _probe.taken(x, compiled) or cos.dtype not in (x.dtype, torch.float32):
        return False
    if (
        cos.dim() not in ((2, 3) if x.dim() == 4 else (3,))
        or cos.requires_grad
        or sin.requires_grad
    ):
        return False
    if cos.dim() == 3 and cos.shape[0] not in (1, x.shape[0]):
        return False
    same = sin.shape == cos.shape and sin.dtype == cos.dtype and cos.device == x.device
    return same and cos.shape[-2:] == (x.shape[tokens_dim], width or x.shape[-1])
