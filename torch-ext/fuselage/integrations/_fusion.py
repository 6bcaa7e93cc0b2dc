"""Fuses norms with the additions before them and the modulations after them, in any forward.

A module whose norms were replaced gets its own forward with other expressions in a few places:

    h = residual + x;  n = self.norm(h)               -> n, h = add_norm(self.norm, x, residual)
    h = residual + self.post(x);  n = self.norm(h)    -> n, h = norm_add_norm(self.post, x, ..)
    self.norm(residual + x)                           -> add_norm(..)[0]
    self.norm(x) * (1 + scale) + shift                -> modulated(self.norm, x, scale, shift)
    h = residual + gate * x;  n = (as above)(h)       -> n, h = gated_norm(..)
    h = residual + gate * x                           -> h = gated(residual, gate, x)
    self.modulate(self.norm(x), ..)                   -> modulate(modulation(self.norm, x), ..)

The last is a method that modulates what it is given, as QwenImage has: of its own copy. And linear
layers with what is next to them:

    self.act(self.linear(x))                          -> gelu_of(self.act, self.linear, x)
    self.linear(torch.cat([x, y], dim))               -> linear_of(self.linear, (x, y), dim)

These are found in its source, whatever the names. What stands in their place computes just the same
wherever an operator of ours does not take the tensors it gets, so nothing else has to be known of
the module. The norm itself was recognised by what it computes (_norms.py).

A norm moves up to the addition it follows if nothing in between changes what it reads.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Callable, NamedTuple, Optional

import torch

from . import _fused, _patterns, _source
from ._body import PREFIX, RMS_NORM, Body
from ._decorators import match_within
from ._gates import is_gelu_tanh
from ._norms import LAYER_NORM, is_norm
from ._patch import Found, Match, marked, replacement_of
from ._products import takes_parts
from ._statements import bodies_of, counted, name_node

# Of a norm that has a form with scale and shift, unless its result is float32.
_RMS = f"{RMS_NORM}weight"
_UNROUNDED = "rounded not at all"


def recognise_fusion(module: torch.nn.Module) -> Found:
    """Any module that has such expressions with a norm that was replaced, or a gate beside an
    adaptive norm, as the single blocks of Flux, or linear layers.
    """
    children = {name: child for name, child in module._modules.items() if child is not None}
    linears = {k: child for k, child in children.items() if isinstance(child, torch.nn.Linear)}
    gelus = _names(children if linears else {}, is_gelu_tanh)
    with_bias = _names(linears, lambda linear: linear.bias is not None)
    gates = any(map(_is_adaptive, children.values()))
    wide = _names(linears, takes_parts)
    return _recognise(module, gates, with_bias, wide, gelus if with_bias else ())


class _Children(NamedTuple):
    """Names of a module's: norms of ours, with what they are; linear layers with a bias; those that
    may take parts; and tanh-GELUs.
    """

    norms: tuple[tuple[str, str], ...]
    linears: tuple[str, ...]
    wide: tuple[str, ...]
    gelus: tuple[str, ...]


def _names(children: dict[str, torch.nn.Module], wanted: Callable) -> tuple[str, ...]:
    return tuple(sorted(name for name, child in children.items() if wanted(child)))


def _is_adaptive(module: torch.nn.Module) -> bool:
    """Whether its forward is, or will be, a modulated norm."""
    found = _recognise(module, False)
    return isinstance(found, Match) and "ada_" in found.what


def _recognise(
    module: torch.nn.Module, gates: bool, linears: tuple = (), wide: tuple = (), gelus: tuple = ()
) -> Found:
    """`gates`: other gates are fused, too."""
    norms = {
        name: what
        for name, child in module._modules.items()
        if child is not None and (what := replacement_of(child)) and is_norm(what)
    }
    own = replacement_of(module)
    if not (norms or gates or wide or gelus) or not (own is None or own in _WHATS):
        return None  # there is nothing, or its forward is another of ours
    forward = type(module).forward
    if str(getattr(forward, "__module__", "")).startswith("torch."):
        return None
    plain = inspect.unwrap(forward)
    definition = _definition(plain)
    dead = () if definition is None else tuple(_lines(_source.dead(definition, module)))
    children = _Children(tuple(sorted(norms.items())), linears, wide, gelus)
    found = _fused_forward(type(module), plain, children, dead, gates)
    return None if found is None else match_within(found.fuselage_replacement, forward, found)


_WHATS = set()  # of what forwards of ours are made here


_definition = cache(_source.read)


def _lines(bodies: list[list[ast.stmt]]) -> Iterator[tuple[int, int]]:
    """What tells the bodies of one source apart."""
    for body in filter(None, bodies):
        yield body[0].lineno, body[0].col_offset


_CALLS = (
    *(_fused.add_norm, _fused.norm_add_norm, _fused.modulated, _fused.gated_norm, _fused.gated),
    *(_fused.modulation, _fused.gated_modulation, _fused.gelu_of, _fused.linear_of),
)
_HELPERS = {f"{PREFIX}_{function.__name__}": function for function in _CALLS}


@cache
def _fused_forward(
    kind: type, forward: Callable, children: _Children, dead: tuple, gates: bool
) -> Optional[Callable]:
    """With these children, in all bodies but those that begin at `dead`."""
    definition = _definition(forward)
    if definition is None:
        return None
    fusion = _Fusion(kind, deepcopy(definition), children, dead, gates)
    if not fusion.whats:
        return None
    function = _source.function_of(fusion.definition, fusion.helpers, forward)
    what = ", ".join(sorted(fusion.whats))
    _WHATS.add(what)
    return marked(what, function)


class _Fusion:
    """Rewrites `definition`; `whats` are the operators it then calls."""

    def __init__(
        self, kind: type, definition: ast.FunctionDef, children: _Children, dead: tuple, gates: bool
    ):
        self.kind = kind
        self.helpers = dict(_HELPERS)
        self.definition = definition
        self.children, self.norms = children, dict(children.norms)
        self.self_name = definition.args.args[0].arg
        self.whats: set[str] = set()
        self.fresh = 0
        self.modulated = gates
        self.reads = counted(definition)
        bodies = [Body(self, body) for body in bodies_of(definition.body)]
        self.bodies = {id(body.body): body for body in bodies}
        live = [body for body in bodies if next(_lines([body.body])) not in dead]
        for body in live:
            body.fuse_products()
        for body in live:
            body.fuse_norms()
        for body in live if self.modulated else ():
            body.fuse_gates()
        for body in bodies:
            body.finish()

    def norm_call(self, node: ast.expr) -> Optional[tuple[ast.expr, ast.expr]]:
        """`self.norm` and `x` of `self.norm(x)`."""
        return self.call_of(node, self.norms)

    def call_of(self, node: ast.expr, children) -> Optional[tuple[ast.expr, ast.expr]]:
        """`self.child` and `x` of `self.child(x)`, of one of these."""
        return _source.called(node, children, self.self_name)

    def modulating(self, name: str) -> Optional[bool]:
        """Makes a helper of a method that modulates its first argument, which is then a function of
        scale and shift. Whether it returns more; None for another method.
        """
        method = getattr(self.kind, name, None)
        definition = deepcopy(_definition(method)) if inspect.isfunction(method) else None
        if definition is None or len(definition.args.args) < 2:
            return None
        x = definition.args.args[1].arg
        returns = [node for node in ast.walk(definition) if isinstance(node, ast.Return)]
        if len(returns) != 1 or returns[0].value is None or counted(definition).get(x) != 1:
            return None
        value = returns[0].value
        first = value.elts[0] if isinstance(value, ast.Tuple) else value
        normed, scale, shift = _patterns.modulation_of(first)
        if scale is None or getattr(normed, "id", None) != x or x in _source.changes(definition):
            return None
        call = ast.Call(name_node(x), [scale, shift or ast.Constant(None)], [])
        _source.Replaced(first, call).visit(definition)
        self.helpers[f"{PREFIX}_{name}"] = _source.function_of(definition, {}, method)
        return value is not first

    def is_modulated_alone(self, name: str) -> bool:
        """Whether the name is set once, and read by several modulations alone."""
        if self.reads.get(name, 0) < 2:
            return False
        nodes = list(ast.walk(self.definition))
        scaled = [found[0] for node in nodes if (found := _patterns.scaled(node)) is not None]
        read = sum(isinstance(value, ast.Name) and value.id == name for value in scaled)
        sets = sum(isinstance(n, ast.Name) and n.id == name for n in nodes) - self.reads[name]
        return read == self.reads[name] and sets == 1

    def calls(self, what: str) -> None:
        """Of an operator that modulates or gates: then other gates are fused, too."""
        self.whats.add(what)
        self.modulated = True

    def modulated_form(self, name: str) -> str:
        """The operator for this norm with scale and shift."""
        return "ada_layer_norm" if self.norms[name] == LAYER_NORM else "ada_rms_norm"

    def modulates(self, name: str) -> bool:
        """Whether there is an operator with scale and shift for this norm."""
        what = self.norms[name]
        return what == LAYER_NORM or (what.startswith(_RMS) and _UNROUNDED not in what)
