"""Rewrites the source of an attention processor of diffusers: queries and keys that are rotated one
after the other are rotated by one call, which normalises them, too, where the source does before.

    q = attn.norm_q(q)                q = q if <rotated> else attn.norm_q(q)
    k = attn.norm_k(k)                k = k if <rotated> else attn.norm_k(k)
    if freqs is not None:             if freqs is not None:
        q = rotate(q, freqs)              q, k = rotate_both(
        k = rotate(k, freqs)                  attn.norm_q, attn.norm_k, q, k, freqs)

`<rotated>` says that the call is reached, here `freqs is not None`. A condition in between whose
body reads the query, as one that puts text before images, must not hold either: where it does, the
norm stays where it was, and the call gets None for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

import torch

from . import _source
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
    """`name = module.norm(x)`, at a place.

    Attributes:
        module_name: Of the module.
        here: Conditions under which the norm runs where it is, and those under which what follows
            reads its result before it is rotated, negated.
        reached: Conditions under which the rotation is reached.
    """

    body: list[ast.stmt]
    index: int
    module_name: str
    here: list[ast.expr] = field(default_factory=list)
    reached: list[ast.expr] = field(default_factory=list)

    def defer(self) -> ast.expr:
        """Leaves it to the rotation; the module of the norm, or None where it did run."""
        statement = self.body[self.index]
        norm = statement.value
        statement.value = _where([*self.here, *self.reached], norm.args[0], norm)
        return _where(self.here, norm.func, ast.Constant(None))

    def may_join(self, module: torch.nn.Module) -> bool:
        """Whether it is part of the call, as far as the attributes of the module say."""
        answers = (_source.truth(test, self.module_name, module) for test in self.here)
        return False not in answers


def _where(conditions: list[ast.expr], x: ast.expr, y: ast.expr) -> ast.expr:
    """x where all conditions hold, and y elsewhere."""
    test = ast.BoolOp(ast.And(), conditions) if len(conditions) > 1 else (*conditions, None)[0]
    return x if test is None else ast.IfExp(test, x, y)


def _norm_before(places: list[Place], name: str, definition: ast.FunctionDef) -> Optional[_Norm]:
    """The norm that sets what the pair at the last of `places` rotates as `name`; of the module
    that is the first argument after `self`.
    """
    module_name = (*(argument.arg for argument in definition.args.args), None, None)[1]
    here, reached, changed, mutated = [], [], set(), set()
    for depth, (body, end) in enumerate(reversed(places)):
        if depth > 0:
            reached.append(body[end].test)
        for i in reversed(range(end)):
            statement, found = body[i], None
            is_function = isinstance(statement, ast.FunctionDef)  # what it sets is its own
            sets = {statement.name} if is_function else _source.changes(statement)
            changed |= sets
            if name not in sets | _source.loads(statement):
                mutated |= _source.mutates(statement)
                continue
            if isinstance(statement, ast.If):
                others = (statement.test, *statement.orelse)
                if any(name in _source.changes(s) | _source.loads(s) for s in others):
                    return None
                if len(statement.body) == 1 and _is_norm(statement.body[0], name, module_name):
                    here.append(statement.test)
                    found = _Norm(statement.body, 0, module_name, here, reached)
                else:
                    here.append(ast.UnaryOp(ast.Not(), statement.test))
            elif _is_norm(statement, name, module_name):
                found = _Norm(body, i, module_name, here, reached)
            else:
                return None
            if found is not None:
                tests, x = [*here, *reached], found.body[found.index].value.args[0].id
                read = set().union(*map(_source.loads, tests))
                stays = x not in mutated and not read & changed
                return found if stays and all(map(_source.is_static, tests)) else None
            mutated |= _source.mutates(statement)
    return None


def _is_norm(statement: ast.stmt, name: str, module_name: str) -> bool:
    """`name = module.norm(x)`."""
    target, call = _source.assigned(statement) or (None, None)
    if target != name or not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1:
        return False
    norm, (x,) = call.func, call.args
    if not isinstance(norm, ast.Attribute) or "norm" not in norm.attr:
        return False
    return getattr(norm.value, "id", None) == module_name and isinstance(x, ast.Name)
