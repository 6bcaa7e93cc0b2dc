"""Compares outputs and gradients with a float64 reference."""

from __future__ import annotations

import torch

from .contenders import as_tuple
from .registry import Case

# Of the error's norm over the reference's norm. Rounding a result once costs about 1.6e-3 in
# bfloat16, an eighth of that in float16; float32 results carry the error of long float32 sums.
NORM_TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-5}
# Of a tensor of a few elements, one unlucky rounding may be all of the error: half of epsilon.
FEW_ELEMENTS = 64
# Of each element's error over its size plus the root mean square of all: twice the rounding error,
# so that one wrong row among a million is seen.
ELEMENT_TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-5}
BASELINE_SLACK = 4.0


class WrongResult(Exception):
    """A contender computed something else."""


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float64 `x` rounded to `dtype`; its gradient is that of `x`."""
    return x + (x.to(dtype).to(x.dtype) - x).detach()


def reference(case: Case, inputs, grad_outs) -> tuple[torch.Tensor, ...]:
    """Outputs, followed for the backward by the gradients of all inputs, in float64."""
    backward = case.direction == "bwd"
    exact = tuple(t.detach().double().requires_grad_(backward) for t in inputs)
    outs = case.operator.reference(*exact, case.shape.dtype)
    if not backward:
        return outs
    grads = torch.autograd.grad(outs, exact, [g.double() for g in grad_outs])
    return (*(out.detach() for out in outs), *grads)


def results(case: Case, call, inputs, grad_outs) -> tuple[torch.Tensor, ...]:
    """The same tensors from a contender."""
    if case.direction == "fwd":
        with torch.no_grad():
            return as_tuple(call(*inputs))
    outs = as_tuple(call(*inputs))
    # The outputs are copied first, and grad_outs given as copies: a contender may overwrite either.
    values = tuple(out.detach().clone() for out in outs)
    grads = torch.autograd.grad(outs, inputs, [g.clone() for g in grad_outs])
    return (*values, *grads)


def check(case: Case, got, want, baseline: bool) -> float:
    """Raises WrongResult, or returns the largest error of a tensor, norm over norm."""
    if len(got) != len(want):
        raise WrongResult(f"{len(got)} tensors where {len(want)} are due")
    worst = 0.0
    for index, (tensor, exact) in enumerate(zip(got, want)):
        norm_tolerance, element_tolerance = _tolerances(case, tensor.dtype, baseline)
        if exact.numel() < FEW_ELEMENTS and tensor.is_floating_point():
            norm_tolerance = max(norm_tolerance, torch.finfo(tensor.dtype).eps / 2)
        if tensor.shape != exact.shape:
            raise WrongResult(f"tensor {index} is {tuple(tensor.shape)}, not {tuple(exact.shape)}")
        error = tensor.detach().double().sub_(exact).abs_()
        scale = exact.norm() / max(1, exact.numel()) ** 0.5
        relative = (error.norm() / exact.norm().clamp_min(1e-30)).item()
        element = (error / (exact.abs() + scale)).max().item()
        if not (relative <= norm_tolerance and element <= element_tolerance):  # NaN fails
            raise WrongResult(
                f"tensor {index}: relative error {relative:.2e} (allowed {norm_tolerance:.0e}), "
                f"worst element {element:.2e} (allowed {element_tolerance:.0e})"
            )
        worst = max(worst, relative)
    return worst


def _tolerances(case: Case, dtype: torch.dtype, baseline: bool) -> tuple[float, float]:
    if not dtype.is_floating_point:
        return 0.0, 0.0  # an index is right or wrong
    if case.operator.tolerances is not None:
        return case.operator.tolerances
    if not baseline:
        roundings = case.operator.roundings
        return roundings * NORM_TOLERANCE[dtype], roundings * ELEMENT_TOLERANCE[dtype]
    # A baseline may round a float32 result's ingredients to the activations' type.
    dtypes = (dtype, case.shape.dtype)
    return (
        BASELINE_SLACK * max(NORM_TOLERANCE[d] for d in dtypes),
        BASELINE_SLACK * max(ELEMENT_TOLERANCE[d] for d in dtypes),
    )
