"""Reads the source of a forward as a syntax tree, and makes a forward of a changed one.

What a tree is about (a pattern of norms and additions) is for `_fusion.py` to say.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import types
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Callable, Optional

from torch import nn

_FUTURE = __future__.annotations.compiler_flag
# Parts of an expression that may not be evaluated, or more than once.
_CONDITIONAL = (
    *(ast.IfExp, ast.BoolOp, ast.Lambda, ast.NamedExpr),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)

LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)  # run at another time


def read(function: Callable, nested: bool = False) -> Optional[ast.FunctionDef]:
    """The definition of a plain function; None where its source is not what runs, or where it has
    functions inside, unless `nested`.

    A source may be missing, or newer than what was imported, and a class may mangle names. So the
    tree must compile to the code that the function has.
    """
    if not isinstance(function, types.FunctionType):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        # Within a block, so that it may be indented.
        (definition,) = ast.parse("if 1:\n" + "".join(lines)).body[0].body
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return None
    inner = (node for node in ast.walk(definition) if node is not definition)
    if not nested and any(isinstance(node, LATER) for node in inner):
        return None
    ast.increment_lineno(definition, first - 2)
    same = _same_code(_compiled(definition, (), function), function.__code__)
    return definition if same else None


def _compiled(definition: ast.FunctionDef, cells: Iterable[str], like: Callable) -> types.CodeType:
    """The code of the function, within another that has the names `cells`."""
    bare = ast.FunctionDef(**{k: getattr(definition, k) for k in definition._fields})
    bare.decorator_list, bare.returns = [], None
    parameters = [ast.arg(name) for name in (*like.__code__.co_freevars, *cells)]
    outer = ast.parse("def outer(): pass").body[0]
    outer.args.args, outer.body = parameters, [bare]
    # A method of a name that was imported is called by other instructions (Python 3.11).
    names = _imported(like.__code__.co_filename) & _global_names(like.__code__)
    imports = [ast.Import([ast.alias(name)]) for name in names]
    module = ast.fix_missing_locations(ast.Module([*imports, outer], []))
    # The defaults and the annotations are those of the original; here they need only compile.
    flags = like.__code__.co_flags & _FUTURE
    code = compile(module, like.__code__.co_filename, "exec", flags, dont_inherit=True)
    return _inner(_inner(code))


def _global_names(code: types.CodeType) -> set[str]:
    """That it and the functions inside use, attributes among them."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_global_names, inner))


@cache
def _imported(path: str) -> frozenset[str]:
    """The names that a file imports outside of its functions and classes."""
    names, nodes = set(), list(ast.parse("".join(linecache.getlines(path))).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif not isinstance(node, LATER):
            nodes += ast.iter_child_nodes(node)
    return frozenset(names)


def _inner(code: types.CodeType) -> types.CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _same_code(ours: object, theirs: object) -> bool:
    """Whether two codes, or two of their constants, are the same."""
    if not isinstance(ours, types.CodeType):
        return type(ours) is type(theirs) and ours == theirs
    names = ("co_code", "co_names", "co_varnames", "co_cellvars", "co_freevars", "co_argcount")
    if any(getattr(ours, name) != getattr(theirs, name, None) for name in names):
        return False
    constants = (ours.co_consts, theirs.co_consts)
    return len(constants[0]) == len(constants[1]) and all(map(_same_code, *constants))


def function_of(
    definition: ast.FunctionDef, cells: dict[str, Callable], like: Callable
) -> Callable:
    """The function with the globals, defaults and place of `like`; `cells` are names it may use."""
    code = _compiled(definition, cells, like)
    all_cells = dict(zip(like.__code__.co_freevars, like.__closure__ or ()))
    all_cells.update({name: types.CellType(value) for name, value in cells.items()})
    closure = tuple(all_cells[name] for name in code.co_freevars)
    function = types.FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    function.__kwdefaults__ = like.__kwdefaults__
    return function


def calling(function: Callable, wanted: str, name: str, ours: Callable) -> Optional[Callable]:
    """The function with `ours` for what it calls as `wanted`, an expression of that or of the whole
    call; None where it does not, or cannot be read. `name` is one that it does not use.
    """
    definition = read(function)
    if definition is None:
        return None
    tree = ast.parse(wanted, mode="eval").body
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    calls = [call for call in calls if same(call, tree) or same(call.func, tree)]
    for call in calls:
        call.func = ast.copy_location(ast.Name(name, ast.Load()), call.func)
    return function_of(definition, {name: ours}, function) if calls else None


def methods(kind: type) -> Iterator[types.FunctionType]:
    """The forward of a module's class, and the methods of the class that it and they call."""
    names, seen = ["forward"], set(dir(nn.Module)) - {"forward"}
    while names:
        name = names.pop()
        method = (
            inspect.unwrap(getattr(kind, name)) if callable(getattr(kind, name, None)) else None
        )
        if name in seen or not isinstance(method, types.FunctionType):
            continue
        seen.add(name)
        yield method
        names += method.__code__.co_names


# ---- questions about trees ----


def same(a: ast.AST, b: ast.AST) -> bool:
    return ast.dump(a) == ast.dump(b)


def loads(tree: ast.AST) -> set[str]:
    """The names that it reads."""
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def mutates(tree: ast.AST) -> set[str]:
    """The names whose values it changes in place."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            if not isinstance(node.ctx, ast.Load):
                found |= loads(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr.endswith("_"):  # x.add_(y)
                found |= loads(node.func.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def changes(tree: ast.AST) -> set[str]:
    """The names that it sets, or whose values it changes in place."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return mutates(tree) | {name.id for name in names if not isinstance(name.ctx, ast.Load)}


def assigned(statement: ast.stmt) -> Optional[tuple[str, ast.expr]]:
    """Name and value of `name = value`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if len(targets) == 1 and isinstance(targets[0], ast.Name):
        return targets[0].id, statement.value
    return None


def called(node: Optional[ast.AST], names, self_name: str) -> Optional[tuple[ast.expr, ast.expr]]:
    """`self.child` and `x` of `self.child(x)`, of a child with one of these names."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return None
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr not in names:
        return None
    of_self = isinstance(function.value, ast.Name) and function.value.id == self_name
    starred = isinstance(node.args[0], ast.Starred)
    return (function, node.args[0]) if of_self and not starred else None


def is_simple(statement: ast.stmt) -> bool:
    """Whether it has no other statements inside."""
    return isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.Pass))


def evaluated_once(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a simple statement that are evaluated when it runs, inner ones last."""
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop(0)
        if isinstance(node, ast.expr):
            yield node
        if not isinstance(node, _CONDITIONAL):
            stack += [n for n in ast.iter_child_nodes(node) if not isinstance(n, _CONDITIONAL)]


# Of a condition on names and attributes, which is the same wherever it is asked.
_STATIC = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Load, ast.UnaryOp, ast.Not, ast.BoolOp, ast.And),
    *(ast.Or, ast.Compare, ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn),
    *(ast.Tuple, ast.List),
)


def is_static(test: ast.expr) -> bool:
    return all(isinstance(part, _STATIC) for part in ast.walk(test))


def dead(definition: ast.FunctionDef, module: object) -> list[list[ast.stmt]]:
    """The bodies of conditions that do not run as the attributes of `module` are."""
    name, found = definition.args.args[0].arg, []
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and (answer := truth(node.test, name, module)) is not None:
            found.append(node.orelse if answer else node.body)
    inner = [n for body in found for s in body for n in ast.walk(s) if isinstance(n, ast.If)]
    return found + [body for node in inner for body in (node.body, node.orelse)]


def truth(test: ast.expr, name: str, module: object) -> Optional[bool]:
    """Of a condition on the attributes of `name` alone; None if it is another one."""
    if loads(test) != {name} or not is_static(test):
        return None
    try:
        return bool(eval(compile(ast.Expression(test), "<condition>", "eval"), {name: module}))
    except Exception:  # an attribute that is not there
        return None


class Replaced(ast.NodeTransformer):
    """Puts one expression in the place of another, which is the same object."""

    def __init__(self, old: ast.expr, new: ast.expr):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)
