"""What a call of an operator that fails goes through: nothing is looked at before.

An argument of the wrong kind is named, as a list where a tensor belongs: the public function is
found on the stack, and what it was given is compared with its annotations. The first DTensor makes
the operators know such.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Optional

import torch

_INT64 = range(-(2**63), 2**63)
_OUT_OF_MEMORY = " out of memory. fuselage tried"
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Overload(torch._ops.OpOverload):
    """An operator whose errors are explained. Until one is raised this costs nothing."""

    def __call__(self, /, *args, **kwargs):
        try:
            return self._op(*args, **kwargs)
        except Exception as error:
            if _registers_dtensors(args, kwargs):
                return self._op(*args, **kwargs)
            if _OUT_OF_MEMORY in str(error) and not isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from None
            refuse_wrong_kinds()
            raise


def _registers_dtensors(args: tuple, kwargs: dict) -> bool:
    """Whether a DTensor among these is the first one: from then on the ops take them."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None or not any(isinstance(a, tensor.DTensor) for a in (*args, *kwargs.values())):
        return False
    from . import _dtensor

    return _dtensor.register()


def explain_errors_of(ops) -> None:
    """Makes the operators that were looked up in this namespace explain their errors.

    NOTE: their class is changed in place: torch.compile knows an operator by identity.
    """
    for packet in vars(ops).values():
        if isinstance(packet, torch._ops.OpOverloadPacket):
            packet.default.__class__ = _Overload


def public_function() -> Optional[str]:
    """The name of the public function that is running, if one is."""
    function, _ = _running()
    return function and function.__name__


def _running() -> tuple[Optional[types.FunctionType], Optional[types.FrameType]]:
    """The public function that is running, and its frame."""
    package = vars(sys.modules[__package__])
    members = (package.get(name) for name in package["__all__"])  # nothing is imported for it
    public = {_place(f.__code__): f for f in members if isinstance(f, types.FunctionType)}
    frame = sys._getframe(1)
    while frame is not None and _place(frame.f_code) not in public:
        frame = frame.f_back
    return (None, None) if frame is None else (public[_place(frame.f_code)], frame)


def _place(code: types.CodeType) -> tuple:
    """What the code that torch.compile puts in place of a function's has in common with it."""
    return code.co_filename, code.co_firstlineno, code.co_name


def number_of(op: str, argument: str, value: str, numbers: dict[str, int]) -> int:
    """The number of a value that is one of a few names, as the ops take it."""
    try:
        number = numbers.get(value)
    except TypeError:  # not hashable
        number = None
    if number is None:
        refuse_wrong_kinds()
        raise RuntimeError(
            f"fuselage::{op}: `{argument}` must be one of {', '.join(numbers)}, got {value!r}"
        )
    return number


def refuse_wrong_kinds() -> None:
    """Raises TypeError if the public function that is running has an argument of the wrong kind."""
    function, frame = _running()
    if function is None:
        return
    hints = typing.get_type_hints(function)
    for name in function.__code__.co_varnames[: len(hints) - 1]:
        value, kinds = frame.f_locals[name], tuple(_kinds_of(hints[name]))
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = " or ".join(_WORDS.get(kind, kind.__name__) for kind in kinds)
            got = type(value).__name__
            if isinstance(value, int):
                bits = value.bit_length()
                got = str(value) if bits < 100 else f"one of {bits} bits"
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
