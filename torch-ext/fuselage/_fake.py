"""What every operator's fake kernel needs, which gives the shapes and dtypes of the results for
tracing, and is also what runs when an input is on the meta device.

What an op refuses is written once, in its binding. A fake kernel asks the binding: it calls the
op's CPU kernel on tensors without data, for which the binding checks the arguments and launches
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.utils import _python_dispatch

from ._ops import add_op_namespace_prefix, ops

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def fake_kernel_of(name: str) -> Callable:
    """Registers a fake kernel, which is called with arguments that the op accepts."""
    overload = getattr(ops, name).default
    names = [argument.name for argument in overload._schema.arguments]

    def register(fake: Callable) -> Callable:
        def checked(*args, **kwargs):
            args = (*args, *(kwargs[name] for name in names[len(args) :]))
            _check(overload, args)
            return fake(*args)

        torch.library.register_fake(add_op_namespace_prefix(name), checked)
        return fake

    return register


def register_fakes(name: str, fake: Callable, results: int | None = None) -> None:
    """Registers the fake kernels of a plain op and of its `*_fwd` op, whose outputs `fake` gives.

    So many of these are `results`, which the plain op returns; None for an op of one output.
    """

    def plain(*args):
        outputs = fake(*args)
        return outputs[0] if results == 1 else outputs[:results]

    fake_kernel_of(f"{name}_fwd")(fake)
    fake_kernel_of(name)(fake if results is None else plain)


def register_fake_gradients(name: str, like: dict[str, str] | None = None) -> None:
    """Registers the fake kernel of a backward op by the names in its schema.

    `grad_x` is like the argument `x`, or like `like["x"]`, and empty where there is none or where
    `needs_grad_x` is false. An op of one result is given no `needs_grad_x`.
    """
    schema = getattr(ops, name).default._schema
    names = [argument.name for argument in schema.arguments]
    inputs = [result.name.removeprefix("grad_") or "x" for result in schema.returns]
    sources = [(like or {}).get(of, of) for of in inputs]

    @fake_kernel_of(name)
    def _(*args):
        given = dict(zip(names, args))
        outputs = tuple(
            new_like(given[sources[0]], given[source], given.get(f"needs_grad_{of}", True))
            for of, source in zip(inputs, sources)
        )
        return outputs if len(outputs) > 1 else outputs[0]


def register_fake_in_place(name: str) -> None:
    fake_kernel_of(name)(lambda *args: None)


def like(x: torch.Tensor) -> torch.Tensor:
    """A result of the shape and dtype of `x`, contiguous."""
    return x.new_empty(x.shape)


def floats_of_rows(x: torch.Tensor, *each: int) -> torch.Tensor:
    """What a forward keeps of the rows of `x`: float32 `[rows, *each]`."""
    return x.new_empty((math.prod(x.shape[:-1]), *each), dtype=torch.float32)


def new_like(x: torch.Tensor, t: torch.Tensor | None, needed: bool = True) -> torch.Tensor:
    """Like `t`; or where it is not needed or missing, an empty tensor of `x`'s dtype.

    That is what the backward ops return, whose schemas have no optional results.
    """
    return like(t) if needed and t is not None else x.new_empty((0,))


def _check(overload: torch._ops.OpOverload, args: tuple) -> None:
    """Raises what the op raises for such arguments."""
    devices = [a.device for a in args if isinstance(a, torch.Tensor)]
    try:
        # NOTE: in a mode the stand-ins would be fake tensors, whose memory is not to be asked for.
        with _python_dispatch._disable_current_modes():
            overload.redispatch(_CPU, *(_stand_in(a, devices[0]) for a in args))
    except _NoHintError:
        return  # the op checks it when it runs
    except RuntimeError as error:
        other = next((device for device in devices if device != devices[0]), None)
        message = str(error).replace("(meta), got cpu", f"({devices[0]}), got {other}")
        raise RuntimeError(message) from None


class _NoHintError(Exception):
    """A size is known only when the program runs."""


def _stand_in(value, device: torch.device):
    """A tensor without data like `value`, or anything else as it is.

    One that is not on `device` becomes a CPU tensor, whose device the binding refuses.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.device != device:
        return torch.empty(0, dtype=value.dtype)
    sizes, strides = ([_hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _hint(size) -> int:
    """What a symbolic size is in the example that is traced. No guard follows from it."""
    if isinstance(size, int):
        return size
    if not size.node.has_hint():
        raise _NoHintError
    return size.node.hint
