"""Recognises norms with a gate, before or after them, by what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import Callable, Optional

import torch

from ..norm import gated_rms_norm
from . import _probe
from ._norms import eps_of, found_once, named, parameter_names, taken, why_not_a_norm
from ._patch import Found, Match, marked

_OTHER = "it computes something else than gated_rms_norm"


def recognise_gated_norm(module: torch.nn.Module) -> Found:
    """RMS norms of `(x, gate)` over the last dimension, or over groups of it."""
    if any(module.children()) or not _probe.takes_tensors(type(module).forward, 2):
        return None
    found = why_not_a_norm(module, inputs=2) or found_once(module, _probe_styles)
    kind = type(module).__name__.lower()
    looks = "norm" in kind and "gate" in kind
    return found if isinstance(found, Match) or looks else None


def _probe_styles(module, dim: int, has_weight: bool, has_bias: bool) -> Found:
    if has_bias or not has_weight:
        return _OTHER
    cases = []
    for plain, x, gate in _cases(module, dim):
        expected = _probe.call(type(module).forward, plain, x.clone(), gate.clone())
        if isinstance(expected, Exception):
            return _probe.cannot(expected)
        cases.append((plain, x, gate, expected))
    for function in _candidates(module, dim):
        results = (_probe.call(function, p, x.clone(), g.clone()) for p, x, g, _ in cases)
        if not all(map(_probe.agree, results, (case[-1] for case in cases))):
            continue
        plain, x, gate, _ = cases[0]
        if not _same_slopes(function, type(module).forward, plain, x, gate):
            return "it has other gradients than gated_rms_norm"
        return Match(function.fuselage_replacement, function)
    return _OTHER


def _same_slopes(ours: Callable, theirs: Callable, plain, x, gate) -> bool:
    x, gate = x[:, :7].clone(), gate[:, :7].clone()
    leaves = [x, gate, plain.weight]
    return _probe.same_slopes(
        partial(ours, plain, x, gate), partial(theirs, plain, x, gate), leaves
    )


def _cases(module: torch.nn.Module, dim: int) -> Iterator[tuple]:
    """Stand-ins and what they are called with: rows of a batch, and rows by themselves."""
    two = 2 if dim != 2 else 3
    for dtype, weight_dtype in _probe.PAIRS:
        weight = _probe.random(dim, dtype=weight_dtype, seed=1)
        infers, trains = _probe.stand_ins(module, {"weight": weight})
        many = max(8192 // dim // two, 7)
        shape = (two, many + (many == dim), dim)
        x, gate = (_probe.random(*shape, dtype=dtype, seed=seed) for seed in (0, 2))
        yield infers, x, gate
        # So small that eps matters: it must be in the same place.
        yield infers, x * eps_of(infers) ** 0.5, gate
        yield infers, x[0], gate[0]
        yield trains, x[:, :7], gate[:, :7]


def _candidates(module: torch.nn.Module, dim: int) -> Iterator[Callable]:
    names = parameter_names(type(module))
    sizes = [getattr(module, "group_size", None), dim]
    groups = getattr(module, "n_groups", None)
    if isinstance(groups, int) and groups > 0:
        sizes.insert(0, dim // groups)
    sizes = [n for n in dict.fromkeys(sizes) if isinstance(n, int) and n > 0 and dim % n == 0]
    styles = product(sizes, ("silu", "sigmoid"), (True, False), (True, False), (True, False))
    for size, activation, first, cast, mixed in styles:
        yield _forward(*names, None if size == dim else size, activation, first, cast, mixed)


@cache
def _forward(
    x_name: str,
    gate_name: str,
    group_size: Optional[int],
    activation: str,
    norm_first: bool,
    cast: bool,
    mixed: bool,
) -> Callable:
    """The forward of a gated norm. `mixed`: results have the dtype of x, whatever the weight's."""
    options = {
        "activation": activation,
        "norm_before_gate": norm_first,
        "group_size": group_size,
        "cast_before_weight": cast,
    }

    def forward(self, x: torch.Tensor, gate: Optional[torch.Tensor] = None) -> torch.Tensor:
        weight = self.weight
        fits = taken(x, weight) and (mixed or weight.dtype == x.dtype)
        if gate is None or not fits or gate.shape != x.shape or gate.dtype not in _probe.DTYPES:
            return type(self).forward(self, x, gate)
        if gate.dtype != x.dtype:
            if x.dtype != torch.float32:
                return type(self).forward(self, x, gate)
            gate = gate.to(x.dtype)  # as the formula does
        return gated_rms_norm(x, gate, weight, eps_of(self), **options)

    return marked("gated_rms_norm", named(forward, x_name, gate_name))
