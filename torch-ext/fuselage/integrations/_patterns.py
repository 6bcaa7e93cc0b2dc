"""The formulas around norms that `_fusion.py` looks for, in single expressions."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Optional

from . import _source


@dataclass
class Normed:
    """`self.norm(x)`, perhaps scaled and shifted, perhaps in float32 and cast back."""

    node: ast.expr
    norm: ast.expr  # self.norm
    x: ast.expr
    scale: Optional[ast.expr] = None
    shift: Optional[ast.expr] = None
    cast: bool = False
    before: Optional[int] = None  # the statement with the norm, where that is another one

    @property
    def is_modulated(self) -> bool:
        """Whether it is more than a norm."""
        return self.scale is not None or self.cast

    @property
    def name(self) -> str:
        return self.norm.attr


@dataclass
class NormedTerm:
    """`self.norm(x)`, a term of a sum with the residual."""

    norm: ast.expr
    x: ast.expr
    residual: ast.expr
    what: str  # the norm is
    before: Optional[int]  # the statement with the norm, where that is another one


@dataclass
class Sum:
    """`residual + x`, or `residual + a * b`, perhaps in float32 and cast back."""

    terms: tuple[ast.expr, ast.expr]  # as they are written
    residual: ast.expr
    factors: tuple[ast.expr, ...]  # x, or a and b
    wide: bool = False
    before: Optional[int] = None  # the statement with the product, where that is another one
    normed: Optional[NormedTerm] = None

    @property
    def is_gated(self) -> bool:
        return len(self.factors) == 2

    @property
    def reads(self) -> set[str]:
        """The names in it, as it is written and as it is fused."""
        parts = [*self.terms, *self.factors, *([self.normed.x] if self.normed is not None else [])]
        return set().union(*map(_source.loads, parts))


def _method(node: ast.AST, name: str) -> Optional[ast.expr]:
    """`value` of `value.name(..)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr == name and not node.keywords else None
    return None


def floated(node: ast.expr) -> tuple[ast.expr, bool]:
    """`x` of `x.float()`, and whether it was that."""
    value = _method(node, "float")
    return (node, False) if value is None or node.args else (value, True)


def cast_of(node: ast.expr) -> tuple[ast.expr, Optional[ast.expr]]:
    """`value` and `x` of `value.type_as(x)`."""
    value = _method(node, "type_as")
    return (node, None) if value is None or len(node.args) != 1 else (value, node.args[0])


def binary(node: ast.AST, kind: type) -> Optional[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, kind):
        return node.left, node.right
    return None


def _of_one_plus(node: ast.expr) -> Optional[ast.expr]:
    """`s` of `1 + s`; `s[i]` of `(1 + s)[i]`, and `s.unsqueeze(i)` of `(1 + s).unsqueeze(i)`."""
    for one, s in _both_ways(binary(node, ast.Add)):
        if isinstance(one, ast.Constant) and one.value == 1:
            return s
    if isinstance(node, ast.Subscript) and (s := _of_one_plus(node.value)) is not None:
        return ast.copy_location(ast.Subscript(s, node.slice, node.ctx), node)
    value = _method(node, "unsqueeze")
    if value is not None and (s := _of_one_plus(value)) is not None:
        function = ast.copy_location(ast.Attribute(s, "unsqueeze", ast.Load()), node)
        return ast.copy_location(ast.Call(function, node.args, []), node)
    return None


def _both_ways(pair: Optional[tuple]) -> tuple:
    return () if pair is None else (pair, pair[::-1])


def scaled(node: ast.expr) -> Optional[tuple[ast.expr, ast.expr]]:
    """`n` and `s` of `n * (1 + s)`."""
    for value, factor in _both_ways(binary(node, ast.Mult)):
        if (scale := _of_one_plus(factor)) is not None:
            return value, scale
    return None


def modulation_of(node: ast.expr) -> tuple[ast.expr, Optional[ast.expr], Optional[ast.expr]]:
    """`n`, `scale` and `shift` of `n * (1 + scale) + shift`."""
    for product, shift in _both_ways(binary(node, ast.Add)):
        if (found := scaled(product)) is not None:
            return *found, shift
    if (found := scaled(node)) is not None:
        return *found, None
    return node, None, None


def concatenation(node: ast.expr) -> Optional[tuple[list[ast.expr], ast.expr]]:
    """The parts and the dimension of `torch.cat([x, y], dim)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return None
    of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    parts, *dims = node.args
    dims += [keyword.value for keyword in node.keywords if keyword.arg == "dim"]
    if not of_torch or node.func.attr != "cat" or len(node.args) + len(node.keywords) != 2:
        return None
    if len(dims) != 1 or not isinstance(parts, (ast.List, ast.Tuple)) or len(parts.elts) < 2:
        return None
    return None if any(isinstance(e, ast.Starred) for e in parts.elts) else (parts.elts, dims[0])
