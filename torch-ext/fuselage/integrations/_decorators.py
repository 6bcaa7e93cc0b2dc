"""A forward of ours where the one it was made from has decorators, as those of transformers that
checkpoint a layer, or give an argument its new name: these are kept, around ours.
"""

from __future__ import annotations

import functools
import types
from functools import cache
from typing import Callable, Optional

import torch

from ._patch import Found, Match, marked


def match_within(what: str, forward: Callable, ours: Callable) -> Found:
    """A match of `ours`, which was made from the plain function inside of `forward`."""
    function = _within(forward, ours)
    if function is None:
        return "a decorator wraps its forward"
    return Match(what, marked(what, function))


@cache
def _within(forward: Callable, ours: Callable) -> Optional[Callable]:
    """`forward` with `ours` for the function that its decorators wrap. `ours` itself where it has
    none; None where one of them does not show what it calls.

    A decorator may ask whether it is the outermost of the class, as transformers' checkpointing
    does, and FSDP2 gives a module a class of its own later, with another around it: then that is
    copied, too. Compiled, the layer's own forward runs there.
    """
    if not hasattr(forward, "__wrapped__"):
        return ours
    decorated = _decorated(forward, ours)
    if decorated is None:
        return None

    @functools.wraps(forward)
    def method(self, *args, **kwargs):
        own = type(self).forward
        if own is forward:
            return decorated(self, *args, **kwargs)
        later = None if torch.compiler.is_compiling() else _decorated(own, ours)
        return (later or own)(self, *args, **kwargs)

    return method


@cache
def _decorated(function: Callable, ours: Callable) -> Optional[Callable]:
    """Copies of the decorators, around `ours`. Each has what it wraps in a variable."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return ours
    inner = _decorated(wrapped, ours)
    if inner is None or not isinstance(function, types.FunctionType) or _is_of_dynamo(function):
        return None
    cells = function.__closure__ or ()
    if not any(_holds(cell, wrapped) for cell in cells):
        return None
    closure = tuple(types.CellType(inner) if _holds(cell, wrapped) else cell for cell in cells)
    names = (function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy = types.FunctionType(*names, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    vars(copy).update(vars(function), __wrapped__=inner)
    return copy


def _is_of_dynamo(function: types.FunctionType) -> bool:
    """Whether it is a compiled function, or one that is kept from the compiler."""
    return str(function.__globals__.get("__name__")).startswith("torch._dynamo")


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty one
        return False
