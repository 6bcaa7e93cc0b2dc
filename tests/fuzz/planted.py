"""Mistakes for the fuzzer to find: each function returns a kernel that has one."""

from __future__ import annotations

import itertools
import os
import time

import torch


class Planted:
    """A kernel of which some functions are replaced."""

    def __init__(self, kernel, **functions):
        self._kernel = kernel
        vars(self).update(functions)

    def __getattr__(self, name: str):
        return getattr(self._kernel, name)


def wrong_value(kernel):
    """The last element is off by a fiftieth."""

    def silu(x: torch.Tensor) -> torch.Tensor:
        out = kernel.silu(x)
        factor = torch.ones_like(out)
        factor.view(-1)[-1:] = 1.02
        return out * factor

    return Planted(kernel, silu=silu)


def nan_dropped(kernel):
    """NaN becomes zero, as where a maximum is taken."""

    def silu(x: torch.Tensor) -> torch.Tensor:
        return kernel.silu(torch.where(x.isnan(), torch.zeros_like(x), x))

    return Planted(kernel, silu=silu)


def past_the_end(kernel):
    """Writes one element more than it should."""

    def bias_act_(x, bias=None, activation="none"):
        kernel.bias_act_(x, bias, activation)
        if x.numel():
            end = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            x.as_strided((1,), (1,), x.storage_offset() + end + 1).fill_(0)
        return x

    return Planted(kernel, bias_act_=bias_act_)


def writes_an_input(kernel):
    def silu(x: torch.Tensor) -> torch.Tensor:
        out = kernel.silu(x)
        if x.is_contiguous():
            x.detach().view(-1)[:1].fill_(7)
        return out

    return Planted(kernel, silu=silu)


def not_deterministic(kernel):
    """The last bit of float32 differs in every third call, which no tolerance sees."""
    calls = itertools.count()

    def silu(x: torch.Tensor) -> torch.Tensor:
        out = kernel.silu(x)
        return with_other_bits(out) if next(calls) % 3 == 2 else out

    return Planted(kernel, silu=silu)


def other_bits_in_a_layout(kernel):
    """The last bit of float32 differs where a thread would read with steps."""

    def silu(x: torch.Tensor) -> torch.Tensor:
        out = kernel.silu(x)
        return out if x.is_contiguous() else with_other_bits(out)

    return Planted(kernel, silu=silu)


def depends_on_other_rows(kernel):
    """The last bit of float32 differs where rows are many, as if a row were cut in another way."""

    def silu(x: torch.Tensor) -> torch.Tensor:
        out = kernel.silu(x)
        return with_other_bits(out) if x.dim() > 1 and x.shape[0] > 2 else out

    return Planted(kernel, silu=silu)


def with_other_bits(out: torch.Tensor) -> torch.Tensor:
    """The next float32 to each, with the gradients of `out`; half precision as it is."""
    if out.dtype != torch.float32:
        return out
    moved = out.clone()
    with torch.no_grad():
        moved.copy_(torch.nextafter(out, 2 * out))
    return moved


def wrong_gradient(kernel):
    def silu(x: torch.Tensor) -> torch.Tensor:
        out = kernel.silu(x)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 1.02)
        return out

    return Planted(kernel, silu=silu)


def refuses_a_valid_call(kernel):
    def silu(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and x.dtype == torch.float16:
            raise RuntimeError("fuselage::silu: `x` must be float32")
        return kernel.silu(x)

    return Planted(kernel, silu=silu)


def accepts_a_bad_call(kernel):
    def silu(x: torch.Tensor) -> torch.Tensor:
        return kernel.silu(x.float() if isinstance(x, torch.Tensor) else torch.ones(1))

    return Planted(kernel, silu=silu)


def wrong_exception(kernel):
    def silu(x: torch.Tensor) -> torch.Tensor:
        try:
            return kernel.silu(x)
        except Exception as error:
            raise AttributeError("no attribute") from error

    return Planted(kernel, silu=silu)


def crash(kernel):
    def silu(x: torch.Tensor) -> torch.Tensor:
        os.abort()

    return Planted(kernel, silu=silu)


def hang(kernel):
    def silu(x: torch.Tensor) -> torch.Tensor:
        time.sleep(1e6)

    return Planted(kernel, silu=silu)
