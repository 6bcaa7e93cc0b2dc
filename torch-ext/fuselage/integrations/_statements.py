"""The statements of a forward that `_fusion.py` rewrites: which of them set and read a name, and
what may take another place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Optional

from . import _source


def bodies_of(statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """This one and those of conditions inside, the innermost first.

    Not those of loops: what is dead at the end of a body may be read at its start.
    """
    for statement in statements:
        if isinstance(statement, ast.If):
            yield from bodies_of(statement.body)
            yield from bodies_of(statement.orelse)
    if statements:
        yield statements


def counted(tree: ast.AST) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            counts[node.id] = counts.get(node.id, 0) + 1
    return counts


def name_node(name: str, context: Optional[ast.expr_context] = None) -> ast.Name:
    return ast.Name(name, context or ast.Load())


def _sets(statement: ast.stmt, name: str) -> bool:
    """Whether an assignment sets the name itself."""
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    parts = (part for t in targets for part in getattr(t, "elts", (t,)))
    return any(isinstance(part, ast.Name) and part.id == name for part in parts)


class Statements:
    """The statements of one body; each becomes those of its slot.

    Args:
        reads: How often the whole forward reads each name.
        self_name: Of its first argument.
    """

    def __init__(self, statements: list[ast.stmt], reads: dict[str, int], self_name: str):
        self.all_reads, self.self_name = reads, self_name
        self.body = statements
        self.statements = list(statements)
        self.slots = [[statement] for statement in statements]
        self.changes = [_source.changes(statement) for statement in statements]
        self.reads = [counted(statement) for statement in statements]

    def finish(self) -> None:
        self.body[:] = [s for slot in self.slots for s in slot] or [ast.Pass()]

    def rewrite(self, j: int, *statements: ast.stmt) -> None:
        self.slots[j] = list(statements)
        self.changes[j] = set().union(*map(_source.changes, statements))
        self.reads[j] = counted(ast.Module(list(statements), []))

    def replace(self, node: ast.expr, j: int, new: ast.expr, before: Optional[int]) -> None:
        """In statement j; another one set what is read there."""
        if before is not None:
            self.rewrite(before)
        self.rewrite(j, _source.Replaced(node, new).visit(self.statements[j]))

    def last_change(self, name: str, j: int) -> Optional[int]:
        return next((i for i in reversed(range(j)) if name in self.changes[i]), None)

    def only_definition(self, name: str, j: int) -> Optional[int]:
        """The statement that sets `name` to what statement j alone reads, once."""
        k = self.last_change(name, j)
        if k is None or _source.assigned(self.statements[k]) is None or not self.slots[k]:
            return None
        if any(name in self.reads[m] for m in range(k + 1, j)) or self.reads[j].get(name) != 1:
            return None
        return k if self.is_dead_after(name, j) else None

    def inlined(self, x: ast.expr, j: int) -> tuple[Optional[ast.expr], Optional[int]]:
        """What statement j reads as `x`, and the statement that sets it, if that is another one,
        which it may take from there; None where it may not.
        """
        if not isinstance(x, ast.Name):
            return x, None
        k = self.only_definition(x.id, j)
        value = None if k is None else self.statements[k].value
        if value is None or not self.may_move(value, range(k + 1, j)):
            return None, None
        return value, k

    def is_dead_after(self, name: str, j: int) -> bool:
        if _sets(self.statements[j], name):
            return True
        for m in range(j + 1, len(self.statements)):
            if name in self.reads[m]:
                return False
            if _source.is_simple(self.statements[m]) and _sets(self.statements[m], name):
                return True
        here = sum(reads.get(name, 0) for reads in self.reads)
        return self.all_reads.get(name, 0) == here

    def unchanged(self, names: set[str], where: range) -> bool:
        return not any(names & self.changes[m] for m in where)

    def may_move(self, node: ast.expr, where: range) -> bool:
        calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
        if where and any(self.calls_self(call) for call in calls):
            return False
        return self.unchanged(_source.loads(node), where)

    def calls_self(self, node: ast.Call) -> bool:
        return self.self_name in _source.loads(node.func)
