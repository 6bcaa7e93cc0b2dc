"""What torch.autocast does to the operators: docs/autocast.md has the rules, and why.

The rules are kernels of the dispatcher's autocast keys. While autocast is off, they cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Optional

import torch

from ._ops import add_op_namespace_prefix, ops

library = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "FRAGMENT")


def define_op(schema: str, kernel: Callable) -> None:
    """Defines an op with a kernel in Python, on CPU and GPU."""
    library.define(schema)
    for key in ("CPU", "CUDA"):
        library.impl(schema.partition("(")[0], kernel, key)


_CAST = (torch.float16, torch.bfloat16, torch.float32)


class Rule:
    """Which arguments of an op are cast, by their names.

    `rows` get the widest of their dtypes. `others` may be of that dtype or float32; what is neither
    becomes float32, and with it the second of a pair, which have one dtype. Then what the op takes
    in `float32` alone.
    """

    def __init__(
        self,
        rows: tuple[str, ...],
        *others: str | tuple[str, ...],
        float32: tuple[str, ...] = (),
    ):
        self.rows = rows
        self.others = tuple((name,) if isinstance(name, str) else name for name in others)
        self.float32 = float32

    def call(self, overload, arguments: dict, device_type: str):
        """Calls an op with what this rule makes of its arguments."""
        self.cast(arguments, self.dtype_of_rows(arguments, device_type))
        return overload(*arguments.values())

    def dtype_of_rows(self, arguments: dict, device_type: str) -> Optional[torch.dtype]:
        """What the rows are cast to, or None where they are nothing that autocast knows."""
        dtypes = [dtype for name in self.rows if (dtype := _dtype_of(arguments[name])) in _CAST]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None

    def cast(self, arguments: dict, dtype: Optional[torch.dtype]) -> None:
        for name in self.rows:
            _cast(arguments, name, dtype)
        for names in self.others:
            dtypes = {_dtype_of(arguments[name]) for name in names} - {None}
            if not (dtypes <= {dtype} or dtypes <= {torch.float32}):
                for name in names:
                    _cast(arguments, name, torch.float32)
        for name in self.float32:
            _cast(arguments, name, torch.float32)


class Norm(Rule):
    """On a GPU, PyTorch computes norms in float32 under autocast, and returns that."""

    def dtype_of_rows(self, arguments: dict, device_type: str) -> Optional[torch.dtype]:
        dtype = super().dtype_of_rows(arguments, device_type)
        if device_type != "cuda" or dtype is None:
            return dtype
        if "out_dtype" not in arguments:
            return torch.float32
        if arguments["out_dtype"] is None:  # such an op widens by itself
            arguments["out_dtype"] = torch.float32
        return dtype


class Product(Rule):
    """A product of matrices is one of the dtype of autocast."""

    def dtype_of_rows(self, arguments: dict, device_type: str) -> Optional[torch.dtype]:
        return torch.get_autocast_dtype(device_type)


def dtype_of_product(kind: str, dtype: Optional[torch.dtype]) -> Optional[torch.dtype]:
    """That of a product of matrices of `dtype` on a kind of device, or that of autocast, which the
    meta device does not have.
    """
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else dtype


def _dtype_of(value: Optional[torch.Tensor]) -> Optional[torch.dtype]:
    return None if value is None else value.dtype


def _cast(arguments: dict, name: str, dtype: Optional[torch.dtype]) -> None:
    value = arguments.get(name)
    if dtype is not None and value is not None and value.dtype in _CAST:
        arguments[name] = value.to(dtype)


def register_autocast(rule: Rule, *names: str) -> None:
    """Makes ops follow a rule under autocast, on CPU and GPU."""
    for name in names:
        overload = getattr(ops, name).default
        parameters = [argument.name for argument in overload._schema.arguments]
        for device_type in ("cpu", "cuda"):
            library.impl(name, *_kernel(rule, overload, parameters, device_type))


def _kernel(rule: Rule, overload, parameters: list[str], device_type: str) -> tuple[Callable, str]:
    def kernel(*args):
        arguments = dict(zip(parameters, args))
        with without_autocast(device_type):
            return rule.call(overload, arguments, device_type)

    return kernel, f"Autocast{device_type.upper()}"


_KEYS = {
    device_type: torch._C.DispatchKeySet(
        getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    )
    for device_type in ("cpu", "cuda")
}


def without_autocast(device_type: str):
    """A context in which autocast changes nothing on such a device."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS[device_type])
