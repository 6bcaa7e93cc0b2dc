"""What is right, and what is said of what is not."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from harness import FLOAT32_ROUNDINGS, HALVES, UNIT, assert_close, half_an_ulp
from torch import Tensor

from .draw import Draw

UNIT_OF_FLOAT64 = torch.finfo(torch.float64).eps / 2

# Of an activation of half precision on a GPU: an approximate exponential (2^-22), a reciprocal, and
# polynomials fitted for 11 bits (kernel_src/gate/activation_math.h, kRoundsToHalf).
HALF_MATH = 2.0**-18


class Failure(Exception):
    """A mistake of the kernel, of a kind that the summary counts."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@contextmanager
def failing_as(kind: str):
    """Makes assertions, and what a valid call raises, failures of this kind."""
    try:
        yield
    except Failure:
        raise
    except AssertionError as error:
        raise Failure(kind, str(error)) from error


@contextmanager
def valid_call(what: str):
    """A call that must not raise."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        raise Failure("a valid call raised", f"{what}: {type(error).__name__}: {error}") from error


def assert_right(
    actual: Tensor,
    exact: Tensor,
    formula: Tensor,
    label: str,
    *,
    terms: Tensor | None = None,
    inner_rounding: torch.dtype | None = None,
    gradient: bool = False,
    beyond: bool = False,
    half_math: bool = False,
) -> None:
    """Each element is that of the float64 `exact`, or of PyTorch's `formula` in float32.

    The formula decides about NaN, infinities and what it rounds to zero: where a square overflows,
    say, and its reciprocal is zero. An element that agrees with neither is wrong. Where the formula
    alone overflows, float32 has no answer, and any is taken.

    Args:
        gradient: Of NaN and infinities either stands for the other: which of them an overflow
            becomes depends on the order of products, and autograd's is not ours. And what is left
            of `exact` where float64 autograd takes 1 - sigmoid(u) is its rounding.
        beyond: Numbers are beyond the range that docs/limits.md promises: a result may
            be infinite or NaN. A finite one has to be right.
        half_math: Activations of half precision on a GPU: good for more than the 11 bits of the
            result, but not for all of a float32 sum of them, and an exponential that is subnormal
            is zero.
    """
    value, has_answer = actual.double(), formula.isfinite() | ~exact.isfinite()
    formula = formula.to(actual.dtype).double()
    rounded = exact.to(actual.dtype).double()
    excused = (value == formula) | (value == rounded) | (value.isnan() & formula.isnan())
    excused |= ~has_answer | (beyond & ~value.isfinite())
    if gradient:
        excused |= ~value.isfinite() & ~(formula.isfinite() & rounded.isfinite())
    terms = exact.abs() if terms is None else terms
    if half_math:
        flushed = 128 * torch.finfo(torch.float32).tiny * _largest(terms)
        excused |= (value - exact).abs() <= HALF_MATH * terms + flushed
    terms = _with_underflow(terms, gradient)
    bound = 2 * half_an_ulp(formula, actual.dtype)  # both are rounded, and have their own noise
    bound += 2 * FLOAT32_ROUNDINGS * UNIT[torch.float32] * torch.maximum(terms, formula.abs())
    if inner_rounding in HALVES:
        bound += 2 * UNIT[inner_rounding] * formula.abs()
    excused |= formula.isfinite() & ((value - formula).abs() <= bound)
    # Infinite where noise carries it over the largest number, or a sum in another order overflows.
    above = exact.abs() + FLOAT32_ROUNDINGS * UNIT[torch.float32] * terms
    excused |= value.isinf() & (above >= torch.finfo(actual.dtype).max)
    excused |= ~value.isfinite() & (terms >= torch.finfo(torch.float32).max / 2)
    excused = torch.where(excused, value, exact)
    assert_close(actual, excused, label, terms=terms, inner_rounding=inner_rounding)


def _with_underflow(terms: Tensor, gradient: bool) -> Tensor:
    """What is subnormal on the way is off by 2^-150, times at most the largest of the terms.

    And times the 100 or so that an exponential underflows at.
    """
    terms = torch.where(terms.isfinite(), terms, 0.0)  # infinite ones would excuse everything
    relative = 128 * torch.finfo(torch.float32).tiny
    if gradient:  # and the reference by float64's rounding, as assert_close scales the terms
        relative += 8 * UNIT_OF_FLOAT64 / (FLOAT32_ROUNDINGS * UNIT[torch.float32])
    return terms + relative * _largest(terms)


def _largest(terms: Tensor) -> float:
    """The largest finite one, and 1 at least."""
    finite = terms[terms.isfinite()]
    return max(1.0, finite.max().item()) if finite.numel() else 1.0


def same_bits(actual: Tensor, expected: Tensor, label: str, kind: str) -> None:
    """NaN have many bits, all alike."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise Failure(kind, f"{label}: {actual.dtype} {list(actual.shape)}, expected "
                            f"{expected.dtype} {list(expected.shape)}")  # fmt: skip
    different = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if actual.is_floating_point():
        different |= (actual == 0) & (expected == 0) & (actual.signbit() != expected.signbit())
    if different.any():
        index = tuple(different.nonzero()[0].tolist())
        raise Failure(
            kind,
            f"{label}: {different.sum().item()} of {different.numel()} differ; at {index} "
            f"{actual[index].item():.9g} and {expected[index].item():.9g}",
        )


def check_untouched(draw: Draw, besides: str = "") -> None:
    """Nothing but what a call may write to has changed."""
    for buffer in draw.buffers:
        changed = buffer.changed()
        if changed.any():
            first = changed.nonzero()[0].item() - buffer.view.storage_offset()
            raise Failure(
                "a write out of place",
                f"{changed.sum().item()} elements of or around `{buffer.name}` "
                f"{list(buffer.view.shape)}, strides {list(buffer.view.stride())}; the first "
                f"{first} elements from its start{besides}",
            )
