"""Runs one case: verify, capture or warm up every contender, time them in turn."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch

from . import verify
from .contenders import COPY, KERNEL_COPY, as_tuple, copies, reset_compiler
from .registry import Call, Case
from .timing import in_turn


class Timer(Protocol):
    """What `CpuTimer` and `CudaTimer` have in common."""

    method: dict
    turns: int  # of each contender in a round

    def prepare(self, case: Case) -> None: ...
    def sets(self, case: Case) -> int: ...
    def describe(self, case: Case) -> dict: ...
    def contender(self, case: Case, call: Callable[[int], tuple], checked: bool) -> Callable: ...
    def release(self) -> None: ...


class FuselageFailed(Exception):
    """fuselage raised or computed something else; nothing is timed after that."""


def measure(case: Case, fuselage: ModuleType, timer: Timer, device: str, names) -> dict:
    """The case's record for the results file."""
    timer.prepare(case)
    reset_compiler()
    torch.manual_seed(20261121)
    calls, failures = _make_calls(case, fuselage, names)
    sets = [make_set(case, device)]
    errors = _verify(case, calls, failures, *sets[0])
    sets += [make_set(case, device) for _ in range(timer.sets(case) - 1)]

    ready = {
        name: timer.contender(case, copy, checked=False)
        for name, copy in copies(case.bytes, len(sets), device).items()
    }
    for name, call in calls.items():
        if name in failures:
            continue
        backward = case.direction == "bwd"
        overwrites = backward and name in case.operator.overwrites_grad
        overwrites_inputs = backward and name in case.operator.overwrites_inputs
        try:
            own_sets = [(_copies(i), g) for i, g in sets] if overwrites_inputs else sets
            timed = on_set(case, call, own_sets, overwrites)
            ready[name] = timer.contender(
                case, timed, checked=not (overwrites or overwrites_inputs)
            )
        except Exception as error:
            _fail(case, name, error, failures)
        timed = own_sets = None
    times = in_turn(ready, timer.turns)
    ready.clear()
    sets.clear()
    timer.release()
    return _record(case, timer, times, failures, errors)


def _make_calls(case: Case, fuselage: ModuleType, names) -> tuple[dict[str, Call], dict[str, str]]:
    calls, failures = {}, {}
    for name, factory in case.operator.contenders(fuselage).items():
        if name not in names:
            continue
        try:
            calls[name] = factory()
        except Exception as error:
            _fail(case, name, error, failures)
    return calls, failures


def make_set(case: Case, device: str) -> tuple[tuple, tuple]:
    """Inputs and, for the backward, gradients of the outputs."""
    inputs = case.operator.make_inputs(case.shape, device)
    if case.direction == "fwd":
        return inputs, ()
    outs = case.operator.reference(*(t.to("meta") for t in inputs), case.shape.dtype)
    grads = tuple(torch.randn(out.shape, device=device, dtype=case.shape.dtype) for out in outs)
    x = inputs[0]
    if x.dim() == 4 and not x.is_contiguous():  # images: their gradients are laid out alike
        order = torch.channels_last
        if x.is_contiguous(memory_format=order):
            grads = tuple(grad.contiguous(memory_format=order) for grad in grads)
    return tuple(t.requires_grad_() for t in inputs), grads


def _copies(inputs: tuple) -> tuple:
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)


def _verify(case: Case, calls, failures: dict[str, str], inputs, grad_outs) -> dict[str, float]:
    want = verify.reference(case, inputs, grad_outs)
    errors = {}
    for name, call in calls.items():
        try:
            own = _copies(inputs) if name in case.operator.overwrites_inputs else inputs
            rest = case.operator.rest.get(name)
            whole = (lambda *args, call=call, rest=rest: rest(call(*args))) if rest else call
            got = verify.results(case, whole, own, grad_outs)
            errors[name] = verify.check(case, got, want, baseline=name != "fuselage")
        except Exception as error:
            _fail(case, name, error, failures)
        got = None
    return errors


def on_set(case: Case, call: Call, sets, overwrites: bool) -> Callable[[int], tuple]:
    """The timed work, on set `i`."""
    if case.direction == "fwd":

        @torch.no_grad()
        def forward(i: int) -> tuple[torch.Tensor, ...]:
            return as_tuple(call(*sets[i][0]))

        return forward

    pending = []
    for inputs, grad_outs in sets:
        outs = as_tuple(call(*inputs))
        pending.append((outs, inputs, [g.clone() for g in grad_outs] if overwrites else grad_outs))

    def backward(i: int) -> tuple[torch.Tensor, ...]:
        outs, inputs, grad_outs = pending[i]
        return torch.autograd.grad(outs, inputs, grad_outs, retain_graph=True)

    return backward


def _fail(case: Case, name: str, error: Exception, failures: dict[str, str]) -> None:
    reason = f"{type(error).__name__}: {error}".strip()
    if name == "fuselage":
        raise FuselageFailed(f"{case.key}: fuselage is wrong or failed: {reason}") from error
    failures[name] = reason.splitlines()[0][:300]


def _record(case: Case, timer: Timer, times: dict, failures: dict, errors: dict) -> dict:
    def rated(name: str) -> dict:
        entry = {**times[name], "gbs": round(case.bytes / times[name]["us"] / 1e3, 1)}
        if name in errors:
            entry["error"] = errors[name]
        return entry

    contenders = {name: rated(name) for name in times if name not in (COPY, KERNEL_COPY)}
    # In a graph `copy_` is a memcpy node, which at some sizes is far slower than a kernel.
    floor = min(COPY, KERNEL_COPY, key=lambda name: times[name]["us"])
    return {
        "operator": case.operator.name,
        "direction": case.direction,
        "sizes": list(case.shape.sizes),
        "shape": case.shape.label,
        "dtype": str(case.shape.dtype).removeprefix("torch."),
        "tags": sorted(case.shape.tags),
        **({"threads": case.threads} if case.threads else {}),
        "bytes": case.bytes,
        **timer.describe(case),
        "copy": rated(floor),
        "copies": {name: rated(name) for name in (COPY, KERNEL_COPY)},
        "fraction_of_copy": round(times[floor]["us"] / times["fuselage"]["us"], 4),
        "contenders": contenders,
        "failed": failures,
    }
