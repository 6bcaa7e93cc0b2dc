"""Names an argument of the wrong kind, as a list where a tensor belongs.

Nothing is looked at before a call. Where one fails, the public function is found on the stack, and
what it was given is compared with its annotations.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator, Sequence

import torch

_INT64 = range(-(2**63), 2**63)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Overload(torch._ops.OpOverload):
    """An operator whose errors are explained. Until one is raised this costs nothing."""

    def __call__(self, /, *args, **kwargs):
        try:
            return self._op(*args, **kwargs)
        except Exception:
            refuse_wrong_kinds()
            raise


def explain_errors_of(ops) -> None:
    """Makes the operators that were looked up in this namespace explain their errors.

    NOTE: their class is changed in place: torch.compile knows an operator by identity.
    """
    for packet in vars(ops).values():
        if isinstance(packet, torch._ops.OpOverloadPacket):
            packet.default.__class__ = _Overload


def refuse_wrong_kinds() -> None:
    """Raises TypeError if the public function that is running has an argument of the wrong kind."""
    package = vars(sys.modules[__package__])
    members = (package.get(name) for name in package["__all__"])  # nothing is imported for it
    public = {f.__code__: f for f in members if isinstance(f, types.FunctionType)}
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in public:
        frame = frame.f_back
    if frame is None:
        return
    function = public[frame.f_code]
    hints = typing.get_type_hints(function)
    for name in function.__code__.co_varnames[: len(hints) - 1]:
        value, kinds = frame.f_locals[name], tuple(_kinds_of(hints[name]))
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = " or ".join(_WORDS.get(kind, kind.__name__) for kind in kinds)
            got = type(value).__name__
            if isinstance(value, int):
                got = f"an int of {value.bit_length()} bits"
            raise TypeError(
                f"fuselage::{function.__name__}: `{name}` must be {wanted}, got {got}"
            ) from None


_WORDS = {
    torch.Tensor: "a tensor",
    float: "a float",
    int: "an int of 64 bits",
    bool: "a bool",
    str: "a str",
    torch.dtype: "a torch.dtype",
    type(None): "None",
    Sequence: "a sequence",
}


def _kinds_of(hint) -> Iterator[type]:
    if typing.get_origin(hint) is typing.Union:
        yield from typing.get_args(hint)
    else:
        yield typing.get_origin(hint) or hint


def _is_a(value, kind: type) -> bool:
    if kind not in (int, float, bool):
        return isinstance(value, kind)
    # An op takes what PyTorch takes for a number: also a bool, a symbol, a tensor of one element.
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, int):
        return value in _INT64
    return isinstance(value, _SYMBOLS) or (kind is float and isinstance(value, float))
