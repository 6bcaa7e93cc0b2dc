"""Fuses a group norm with the SiLU after it, in any forward that has both as submodules.

    h = self.norm(x)
    h = self.act(h)                    -> h = group_norm_act(self.norm, self.act, x)
    h = self.act(self.norm(x))         -> likewise

The norm may be at the end of a branch, as in the residual blocks of diffusers: what stands after a
condition then moves to the end of each of its branches, where it runs just the same. The same
forwards have convolutions and additions, which _convs.py fuses.
"""

from __future__ import annotations

import ast
import inspect
from copy import deepcopy
from functools import cache
from typing import Callable, Optional

import torch

from ..group_norm import group_norm
from . import _source
from ._convs import HELPERS, fuse_residuals, names_of_convs
from ._decorators import match_within
from ._group_norms import GROUP_NORM, taken
from ._norms import parameter
from ._patch import Found, listened_to, marked, replacement_of

GROUP_NORM_ACT = "group_norm (with silu)"  # what the report says of such a module
_HELPER = "fuselage_group_norm_act"
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def group_norm_act(norm: torch.nn.Module, act: torch.nn.Module, x):
    """`act(norm(x))`; in one operator if the norm is still ours, and nobody listens to either."""
    fits = replacement_of(norm) == GROUP_NORM and _is_silu(act) and isinstance(x, torch.Tensor)
    if not fits or listened_to(norm) or listened_to(act) or "forward" in vars(act):
        return act(norm(x))
    weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
    if not taken(norm, x) or x.dim() < 3 or x.shape[1] != norm.num_channels:
        return act(norm(x))
    if weight is not None and weight.device != x.device:
        return act(norm(x))  # a hook around the norm knows where its weight is
    return group_norm(x, norm.num_groups, weight, bias, norm.eps, activation="silu")


def _is_silu(module: Optional[torch.nn.Module]) -> bool:
    return type(module) is torch.nn.SiLU and not module.inplace


def recognise_group_norm_act(module: torch.nn.Module) -> Found:
    """Any module in whose forward such a norm that was replaced has a SiLU right after it."""
    children = module._modules.items()
    norms = frozenset(n for n, m in children if m is not None and replacement_of(m) == GROUP_NORM)
    acts = frozenset(n for n, m in children if _is_silu(m))
    if not norms or not acts or replacement_of(module) not in (None, GROUP_NORM_ACT):
        return None
    forward = type(module).forward
    plain = inspect.unwrap(forward)
    if str(getattr(plain, "__module__", "")).startswith("torch."):
        return None
    function = _fused_forward(plain, norms, acts, names_of_convs(module))
    return None if function is None else match_within(GROUP_NORM_ACT, forward, function)


@cache
def _fused_forward(
    forward: Callable, norms: frozenset, acts: frozenset, convs: frozenset
) -> Optional[Callable]:
    definition = _source.read(forward)
    if definition is None:
        return None
    fusion = _Fusion(definition.args.args[0].arg, norms, acts)
    fusion.fuse(definition)
    if not fusion.count:
        return None
    fuse_residuals(definition, convs)
    function = _source.function_of(definition, {_HELPER: group_norm_act, **HELPERS}, forward)
    return marked(GROUP_NORM_ACT, function)


class _Fusion:
    def __init__(self, self_name: str, norms: frozenset, acts: frozenset):
        self.self_name, self.norms, self.acts = self_name, norms, acts
        self.count = 0

    def fuse(self, definition: ast.FunctionDef) -> None:
        for node in list(ast.walk(definition)):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    self._sink(statements)
        for node in list(ast.walk(definition)):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    self._fuse_pairs(statements)
            self._fuse_nested(node)

    def _called(self, node: Optional[ast.AST], names: frozenset) -> Optional[ast.expr]:
        """The argument of `self.name(argument)`."""
        found = _source.called(node, names, self.self_name)
        return None if found is None else found[1]

    def _activated(self, statement: ast.stmt) -> Optional[str]:
        """The name of `h = self.act(h)`."""
        name, value = _source.assigned(statement) or (None, None)
        argument = self._called(value, self.acts)
        return name if isinstance(argument, ast.Name) and argument.id == name else None

    def _sets_by_norm(self, statement: ast.stmt, name: str) -> bool:
        found = _source.assigned(statement)
        return (
            found is not None
            and found[0] == name
            and self._called(found[1], self.norms) is not None
        )

    def _sink(self, statements: list[ast.stmt]) -> None:
        for i in range(len(statements) - 1, 0, -1):
            name, before = self._activated(statements[i]), statements[i - 1]
            if (
                name is not None
                and isinstance(before, ast.If)
                and self._ends_with_norm(before, name)
            ):
                self._append(before, statements.pop(i))

    def _ends_with_norm(self, condition: ast.If, name: str) -> bool:
        return any(
            self._ends_with_norm(body[-1], name)
            if isinstance(body[-1], ast.If)
            else self._sets_by_norm(body[-1], name)
            for body in (condition.body, condition.orelse)
            if body
        )

    def _append(self, condition: ast.If, statement: ast.stmt) -> None:
        """At the end of every branch that gets there."""
        for body in (condition.body, condition.orelse):
            if body and isinstance(body[-1], ast.If):
                self._append(body[-1], statement)
            elif not (body and isinstance(body[-1], _LEAVES)):
                body.append(deepcopy(statement))

    def _fuse_pairs(self, statements: list[ast.stmt]) -> None:
        for i in range(len(statements) - 1, 0, -1):
            name = self._activated(statements[i])
            if name is not None and self._sets_by_norm(statements[i - 1], name):
                norm, act = statements[i - 1].value, statements[i].value
                statements[i - 1].value = self._fused(norm.func, act.func, norm.args[0], norm)
                del statements[i]

    def _fuse_nested(self, node: ast.AST) -> None:
        """`self.act(self.norm(x))`, whose call becomes that of the helper."""
        inner = self._called(node, self.acts)
        x = self._called(inner, self.norms)
        if x is not None:
            made = self._fused(inner.func, node.func, x, node)
            node.func, node.args = made.func, made.args

    def _fused(self, norm: ast.expr, act: ast.expr, x: ast.expr, place: ast.AST) -> ast.Call:
        self.count += 1
        call = ast.Call(ast.Name(_HELPER, ast.Load()), [norm, act, x], [])
        return ast.fix_missing_locations(ast.copy_location(call, place))
