"""Recognises attention that rotates queries and keys through a function of its source file.

Such a function is shared by all models of its kind. So it is not replaced: the attention of this
one model gets a copy of its own forward, in which the name of the function means ours.
"""

from __future__ import annotations

import ast
import inspect
import types
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Callable, Optional

import torch

from ..rope import apply_rotary, qk_norm_rotary
from . import _probe, _source
from ._decorators import match_within
from ._norms import eps_of, parameter
from ._patch import Found, listened_to, marked, replacement_of, wrapped

WHAT = "apply_rotary"
NORM_AND_ROTARY = "qk_norm_rotary"


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
    forward = inspect.unwrap(type(module).forward)
    names = [getattr(f, "kernel_layer_name", "") for f in _kernel_functions(module)]
    if _NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        rotates = "rotary_pos_emb" in names
        return "its forward does not call its rotary embedding itself" if rotates else None
    definition = _source.read(forward)
    if definition is not None and not _calls(definition, module):
        return "as it is configured, it does not call apply_rotary_pos_emb"
    function = forward.__globals__.get(_NAME)
    ours = _rotary_for(function) if callable(function) else None
    if ours is None:
        return "its rotary embedding computes something else than apply_rotary"
    return match_within(WHAT, type(module).forward, _attention_forward(forward, ours))


def _calls(definition: ast.FunctionDef, module: torch.nn.Module) -> bool:
    """Whether the function is called outside of what does not run as the module is."""
    names = [n for n in ast.walk(definition) if getattr(n, "id", None) == _NAME]
    bodies = _source.dead(definition, module)
    dead = {id(n) for body in bodies for statement in body for n in ast.walk(statement)}
    return any(id(name) not in dead for name in names)


def _kernel_functions(module: torch.nn.Module) -> tuple:
    functions = vars(module).get("_kernel_funcs")
    return tuple(functions.values()) if isinstance(functions, dict) else ()


@cache
def _attention_forward(forward: Callable, ours: Callable) -> Callable:
    return marked(WHAT, rebound(forward, _NAME, ours))


@dataclass(frozen=True)
class _Form:
    """What a function of transformers does with its tables."""

    interleaved: bool
    part: str  # of a table that is read: "all", "first half", or "narrow", which has no other
    of_a_part: bool = False  # heads may be longer than what is rotated
    keeps_dtype: bool = False  # tables in float32 do not make the result so

    def rotary_dim(self, cos: torch.Tensor) -> int:
        return cos.shape[-1] * (2 if self.part == "narrow" else 1)

    def read(self, table: torch.Tensor) -> torch.Tensor:
        return table[..., : table.shape[-1] // 2] if self.part == "first half" else table

    def options(self, cos: torch.Tensor, heads_dim: int) -> dict:
        options = {"interleaved": self.interleaved, "heads_dim": heads_dim}
        return {**options, "rotary_dim": self.rotary_dim(cos)}


# With the tables that models make for them: an angle for each element, or for each pair.
_FORMS = {
    _Form(False, "all"): lambda angles: torch.cat([angles, angles], dim=-1),
    _Form(True, "all"): lambda angles: angles.repeat_interleave(2, dim=-1),
    _Form(True, "first half"): lambda angles: torch.cat([angles, angles], dim=-1),
    _Form(False, "narrow"): lambda angles: angles,
    _Form(True, "narrow"): lambda angles: angles,
}


@cache
def _rotary_for(function: Callable) -> Optional[Callable]:
    """Ours with the layout of the pairs and of the tables that the function has."""
    angles = _probe.random(2, 5, 8)
    q, k = _probe.random(2, 4, 5, 16, seed=1), _probe.random(2, 2, 5, 16, seed=2)
    for form, table_of in _FORMS.items():
        table = table_of(angles)
        args = (q, k, table.cos(), table.sin())
        if _same_result(function, form, *args):
            by_name = partial(function, **dict(zip(_ARGUMENTS, args)))
            if not _probe.agree_all(_probe.call(by_name), _probe.call(function, *args)):
                return None  # its arguments have other names, or another order
            by_tokens = (q.transpose(1, 2), k.transpose(1, 2), *args[2:], 2)
            takes_tokens = not isinstance(_probe.call(function, *by_tokens), Exception)
            if takes_tokens and not _same_result(function, form, *by_tokens):
                return None
            longer = [torch.cat([t, t.flip(-1)], dim=-1)[..., :24] for t in (q, k)]
            of_a_part = replace(form, of_a_part=True)
            if _same_result(function, of_a_part, *longer, *args[2:]):
                form = of_a_part
            keeps_dtype = replace(form, keeps_dtype=True)
            if _same_result(function, keeps_dtype, q.bfloat16(), k.bfloat16(), *args[2:]):
                form = keeps_dtype
            return _rotary(function, form)
        alone = _rotary_alone(function, form)
        calls = [(t, *args[2:]) for t in (q, k)] + [(q.transpose(1, 2), *args[2:], 2)]
        if all(_probe.agree(_probe.call(alone, *c), _probe.call(function, *c)) for c in calls):
            # One that takes longer heads rotates a part of them: those of DeepSeek-V4, the last.
            longer = _probe.call(function, torch.cat([q, q], dim=-1), *args[2:])
            return alone if isinstance(longer, Exception) else None
    return None


def _rotary_alone(original: Callable, form: _Form) -> Callable:
    """Of one tensor at a time, as in Gemma 3n."""

    def apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1, **others):
        if others or not _known_case(form, x, x, cos, sin, unsqueeze_dim):
            return original(x, cos, sin, unsqueeze_dim, **others)
        tables = form.read(cos), form.read(sin)
        return apply_rotary(x, None, *tables, **form.options(cos, unsqueeze_dim))

    return apply_rotary_pos_emb


def _same_result(function: Callable, form: _Form, *args) -> bool:
    expected = _probe.call(function, *args)
    if isinstance(expected, Exception) or not _known_case(form, **dict(zip(_ARGUMENTS, args))):
        return False
    return _probe.agree_all(_probe.call(_rotary(function, form), *args), expected)


def _rotary(original: Callable, form: _Form) -> Callable:
    """Ours where the probes say what `original` computes, and `original` everywhere else."""

    def known(args: tuple, kwargs: dict) -> Optional[tuple]:
        """q, k, the tables and the options of ours; None where `original` runs."""
        named = {**dict(zip(_ARGUMENTS, args)), **kwargs}
        if len(args) > len(_ARGUMENTS) or not _known_case(form, **named):
            return None
        q, k, cos, sin = (named[name] for name in _ARGUMENTS[:4])
        options = form.options(cos, named.get("unsqueeze_dim", 1))
        return (q, k), (form.read(cos), form.read(sin)), options

    def apply_rotary_pos_emb(*args, **kwargs):
        if (found := known(args, kwargs)) is None:
            return original(*args, **kwargs)
        heads, tables, options = found
        return apply_rotary(*heads, *tables, **options)

    def norm_and_rotate(q_norm, k_norm, q, k, *args, **kwargs):
        found = known((q, k, *args), kwargs)
        both = None if found is None else normed_and_rotated(q_norm, k_norm, q, k, *found[1:])
        if both is None:
            return apply_rotary_pos_emb(q_norm(q), k_norm(k), *args, **kwargs)
        return both

    apply_rotary_pos_emb.norm_and_rotate = norm_and_rotate
    return apply_rotary_pos_emb


_ARGUMENTS = ("q", "k", "cos", "sin", "unsqueeze_dim")


def _known_case(form, q=None, k=None, cos=None, sin=None, unsqueeze_dim=1, **others) -> bool:
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
    passed = q.shape[-1] - form.rotary_dim(cos)
    if passed < 0 or (passed > 0 and not form.of_a_part):
        return False
    # Most functions give their result in the wider dtype, that of their tables.
    fits = cos.dtype == q.dtype or (form.keeps_dtype and cos.dtype == torch.float32)
    same = q.dtype == k.dtype and cos.dtype == sin.dtype and q.device == cos.device
    return same and fits and _probe.taken(q)


# Norms of queries and keys before them: the two become one pass.

_HELPER = "fuselage_norm_and_rotate"


def recognise_norm_and_rotary(module: torch.nn.Module) -> Found:
    """Attention that is ours by now, and normalises queries and keys right before it rotates."""
    if replacement_of(module) not in (WHAT, NORM_AND_ROTARY):
        return None
    forward = inspect.unwrap(type(module).forward)
    if _NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    norms = [name for name, child in module._modules.items() if _is_rms(child)]
    function = _norm_and_rotary_forward(forward, frozenset(norms)) if len(norms) > 1 else None
    if function is None:
        return None
    return match_within(NORM_AND_ROTARY, type(module).forward, function)


def _is_rms(child: Optional[torch.nn.Module]) -> bool:
    return child is not None and (replacement_of(child) or "").startswith("rms_norm")


@cache
def _norm_and_rotary_forward(forward: Callable, norms: frozenset[str]) -> Optional[Callable]:
    ours, definition = _rotary_for(forward.__globals__[_NAME]), _source.read(forward)
    if definition is None or not hasattr(ours, "norm_and_rotate"):
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
    return marked(NORM_AND_ROTARY, function)


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


def normed_and_rotated(q_norm, k_norm, q, k, tables, options: dict) -> Optional[tuple]:
    """Queries and keys after two norms and `apply_rotary(.., *tables, **options)`, in one pass;
    None where there is none for these norms.
    """
    if not (isinstance(q_norm, torch.nn.Module) and isinstance(k_norm, torch.nn.Module)):
        return None
    if q.shape[-1] > _WIDEST or (rounding := _rounding_of(q_norm, k_norm, q)) is None:
        return None
    weights = getattr(q_norm, "weight", None), getattr(k_norm, "weight", None)
    return qk_norm_rotary(q, k, *weights, *tables, eps_of(q_norm), **options, **rounding)


_WIDEST = 2048  # heads of `qk_norm_rotary` on a GPU


def _rounding_of(q_norm: torch.nn.Module, k_norm: torch.nn.Module, q) -> Optional[dict]:
    """The options of `qk_norm_rotary` for two norms of ours; None if it has none for them."""
    what = replacement_of(q_norm)
    if what is None or what not in _ROUNDINGS or what != replacement_of(k_norm):
        return None
    if _probe.autocasts(q):
        return None
    for norm in (q_norm, k_norm):
        if listened_to(norm) or wrapped(norm):
            return None
        weight = parameter(norm, "weight")
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
