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
        is_third = next(calls) % 3 == 2
        return torch.nextafter(out, 2 * out) if is_third and x.dtype == torch.float32 else out

    return Planted(kernel, silu=silu)


def wrong_gradient(kernel):
    def silu(x: torch.Tensor) -> torch.Tensor:
        out = kernel.silu(x)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 1.02)
        return out

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
