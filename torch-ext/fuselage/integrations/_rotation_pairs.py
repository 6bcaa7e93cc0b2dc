"""Rewrites the source of an attention processor of diffusers: queries and keys that are rotated one
after the other are rotated by one call, which normalises them, too, where the source does before.

    q = attn.norm_q(q)                q = q if <rotated> else attn.norm_q(q)
    k = attn.norm_k(k)                k = k if <rotated> else attn.norm_k(k)
    if freqs is not None:             if freqs is not None:
        q = rotate(q, freqs)              q, k = rotate_both(
        k = rotate(k, freqs)                  attn.norm_q, attn.norm_k, q, k, freqs)

`<rotated>` says that the call is reached, here `freqs is not None`. A condition in between whose
body reads the query, as one that puts text before images, must not hold either: where it does, the
norm stays where it was, and the call gets None for it. Conditions are asked at both places: they
are of names that are set in any case and of attributes of the attention, and nothing in between may
leave, or change anything in place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch

from . import _source
from ._patch import replacement_of
from ._statements import name_node

Place = tuple[list[ast.stmt], int]  # a body and the index of a statement in it


def join(definition: ast.FunctionDef, rotate: str, rotate_both: str) -> list[_Norm]:
    """Rewrites `definition`; the norms that are part of a call now."""
    joined = []
    for *outer, (body, j) in _pairs(definition.body, rotate):
        names = [_source.assigned(statement)[0] for statement in body[j : j + 2]]
        norms = [_norm_before([*outer, (body, j)], name, definition) for name in names]
        if None in norms:
            norms = [ast.Constant(None)] * 2
        else:
            joined += norms
            norms = [norm.defer() for norm in norms]
        call = body[j].value
        call.func = name_node(rotate_both)
        call.args = [*norms, *map(name_node, names), *call.args[1:]]
        targets = ast.Tuple([name_node(name, ast.Store()) for name in names], ast.Store())
        body[j : j + 2] = [ast.Assign([targets], call), ast.Pass()]
    return joined


def _pairs(body: list[ast.stmt], rotate: str, outer: tuple[Place, ...] = ()) -> Iterator[list]:
    """Where `q = rotate(q, ...)` and `k = rotate(k, ...)` follow each other, with the same other
    arguments; behind the conditions around them.
    """
    for j, statement in enumerate(body):
        if isinstance(statement, ast.If):
            yield from _pairs(statement.body, rotate, (*outer, (body, j)))
        first, second = (_rotated(s, rotate) for s in (*body[j : j + 2], ast.Pass())[:2])
        if not first or not second or first[0] == second[0] or first[1:] != second[1:]:
            continue
        if not {first[0], second[0]} & first[2]:
            yield [*outer, (body, j)]


def _rotated(statement: ast.stmt, rotate: str) -> Optional[tuple[str, str, frozenset[str]]]:
    """Of `x = rotate(x, ...)`: the name of x, the other arguments, and the names in them; of
    arguments that are the same when they are evaluated once more.
    """
    name, call = _source.assigned(statement) or (None, None)
    if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != rotate or not call.args:
        return None
    others = ast.Tuple([*call.args[1:], *(word.value for word in call.keywords)], ast.Load())
    if getattr(call.args[0], "id", None) != name or any(word.arg is None for word in call.keywords):
        return None
    if any(isinstance(part, (ast.Call, ast.NamedExpr)) for part in ast.walk(others)):
        return None
    words = [word.arg for word in call.keywords]
    return name, f"{words} {ast.dump(others)}", frozenset(_source.loads(others))


@dataclass
class _Norm:
    """A call `module.norm(x)`, which a statement at a place sets a name to.

    Attributes:
        module_name: Of the module.
        conditions: Under which it may be left to the rotation, in the order of the source.
        reached: Those of them that hold where the rotation is.
    """

    body: list[ast.stmt]
    index: int
    module_name: str
    conditions: list[ast.expr]
    reached: list[ast.expr]

    def __post_init__(self):
        self.call = self.body[self.index].value

    @property
    def _here(self) -> list[ast.expr]:
        return [test for test in self.conditions if test not in self.reached]

    def defer(self) -> ast.expr:
        """Leaves it to the rotation; the module of the norm, or None where it did run."""
        left = _where(self.conditions, self.call.args[0], self.call)
        self.body[self.index].value = left
        return _where(self._here, self.call.func, ast.Constant(None))

    def may_join(self, module: torch.nn.Module) -> bool:
        """Whether it is part of the call, as far as the attributes of the module say."""
        answers = (_source.truth(test, self.module_name, module) for test in self._here)
        norm = module._modules.get(self.call.func.attr)
        is_rms = norm is not None and (replacement_of(norm) or "").startswith("rms_norm")
        return is_rms and False not in answers


def _where(conditions: list[ast.expr], x: ast.expr, y: ast.expr) -> ast.expr:
    """x where all conditions hold, and y elsewhere."""
    test = ast.BoolOp(ast.And(), conditions) if len(conditions) > 1 else (*conditions, None)[0]
    return x if test is None else ast.IfExp(test, x, y)


def _norm_before(places: list[Place], name: str, definition: ast.FunctionDef) -> Optional[_Norm]:
    """The norm that sets what the pair at the last of `places` rotates as `name`; of the module
    that is the first argument after `self`.
    """
    arguments = definition.args
    parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if len(parameters) < 2 or _is_captured(name, definition):
        return None
    module_name, known = parameters[1], {*parameters, *(a.arg for a in arguments.kwonlyargs)}
    conditions, reached, changed = [], [], set()  # the last condition first
    for depth, (body, end) in enumerate(reversed(places)):
        if depth > 0:
            reached.append(body[end].test)
            conditions.append(body[end].test)
        for i in reversed(range(end)):
            statement, norm = body[i], None
            if _is_norm(statement, name, module_name):
                norm = (body, i)
            elif isinstance(statement, ast.If) and name in _names_in(statement):
                if any(name in _names_in(s) for s in (statement.test, *statement.orelse)):
                    return None
                if len(statement.body) == 1 and _is_norm(statement.body[0], name, module_name):
                    norm = (statement.body, 0)
                    conditions.append(statement.test)
                else:
                    conditions.append(ast.UnaryOp(ast.Not(), statement.test))
            elif name in _names_in(statement):
                return None
            if norm is not None:
                # What is set in any case before it.
                top = i if body is definition.body else places[0][1]
                known |= {(_source.assigned(s) or (None,))[0] for s in definition.body[:top]}
                asked = all(_may_be_asked_twice(test, module_name, known) for test in conditions)
                read = {module_name}.union(*map(_source.loads, conditions))
                if not asked or read & changed:
                    return None
                return _Norm(*norm, module_name, conditions[::-1], reached)
            if not _is_harmless(statement):
                return None
            changed |= _names_set(statement)
    return None


def _names_set(statement: ast.stmt) -> set[str]:
    """By a statement that is harmless."""
    if isinstance(statement, ast.FunctionDef):  # what it sets is its own
        return {statement.name}
    aliases = (part for part in ast.walk(statement) if isinstance(part, ast.alias))
    return _source.changes(statement).union(a.asname or a.name for a in aliases)


def _names_in(tree: ast.AST) -> set[str]:
    return _source.changes(tree) | _source.loads(tree)


def _is_captured(name: str, definition: ast.FunctionDef) -> bool:
    """Whether a function inside may read or set it."""
    nodes = ast.walk(definition)
    inner = (n for n in nodes if isinstance(n, _source.LATER) and n is not definition)
    return any(name in _names_in(function) for function in inner)


def _is_harmless(statement: ast.stmt) -> bool:
    """Whether what stands after it runs, and nothing was changed in place."""
    if isinstance(statement, ast.FunctionDef):
        return True
    parts = list(ast.walk(statement))
    kinds = (ast.Assign, ast.AnnAssign, ast.Expr, ast.If, ast.Pass, ast.Import, ast.ImportFrom)
    if not all(isinstance(part, kinds) for part in parts if isinstance(part, ast.stmt)):
        return False
    has_out = any(getattr(part, "arg", None) == "out" for part in parts)
    return not has_out and not _source.mutates(statement)


def _may_be_asked_twice(test: ast.expr, module_name: str, known: set[str]) -> bool:
    """Of known names and of attributes of the module alone."""
    owners = (part.value for part in ast.walk(test) if isinstance(part, ast.Attribute))
    of_module = all(getattr(owner, "id", None) == module_name for owner in owners)
    return of_module and _source.is_static(test) and _source.loads(test) <= known


def _is_norm(statement: ast.stmt, name: str, module_name: str) -> bool:
    """`name = module.norm(x)`."""
    target, call = _source.assigned(statement) or (None, None)
    if target != name or not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1:
        return False
    norm, (x,) = call.func, call.args
    if not isinstance(norm, ast.Attribute) or "norm" not in norm.attr:
        return False
    return getattr(norm.value, "id", None) == module_name and isinstance(x, ast.Name)
