"""topk_softmax: the experts of each token. Sizes: tokens, experts.

Experts that may be chosen, and groups, lie apart: of equal ones contenders choose any.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..contenders import compiled
from ..registry import Operator, Shape

CHOSEN = {8: 2, 60: 4, 512: 10}  # experts of a token, of so many; 8 of others
GROUPS, CHOSEN_GROUPS = 8, 4


def _shape(rows: int, experts: int, *tags: str, dtype=torch.bfloat16) -> Shape:
    return Shape((rows, experts), dtype, frozenset(tags))


_CPU = _shape(4096, 128, "cpu", "quick", dtype=torch.float32)
# Qwen3-MoE, Mixtral and Qwen3-Next, then few tokens and odd sizes.
_SOFTMAX = [
    _shape(32768, 128, "main"),
    _shape(32768, 8),
    _shape(32768, 512),
    _shape(256, 128, "small", "quick"),
    _shape(1, 128, "small"),
    _shape(32768, 60, "odd"),
    _shape(32768, 1024, "odd"),
    _shape(32768, 128, "dtype", dtype=torch.float32),
    _shape(4096, 128, "cpu"),
    _CPU,
]
# DeepSeek-V3, whose logits are float32.
_GROUPED = [
    _shape(32768, 256, "main", dtype=torch.float32),
    _shape(256, 256, "small", "quick", dtype=torch.float32),
    _shape(1, 256, "small", dtype=torch.float32),
    _CPU,
]


def _k(experts: int) -> int:
    return CHOSEN.get(experts, 8)


def _ranks(*sizes: int, device: str) -> torch.Tensor:
    """A random order of each row."""
    return torch.rand(sizes, device=device).argsort(-1)


def _logits(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    """The largest are a quarter apart, which bfloat16 holds."""
    logits = (4 - _ranks(*shape.sizes, device=device) / 4).clamp(min=-4)
    return (logits.to(shape.dtype),)


def _grouped_logits(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    """Groups are more than a quarter apart, and experts of one a 64th."""
    rows, experts = shape.sizes
    size = experts // GROUPS
    of_groups = _ranks(rows, GROUPS, device=device)[..., None] * (1 / 4 + 1 / 1024)
    logits = of_groups + _ranks(rows, GROUPS, size, device=device) / 64
    return (logits.view(rows, experts).to(shape.dtype),)


def _bias(logits: torch.Tensor) -> torch.Tensor:
    return torch.full(logits.shape[-1:], 0.125, device=logits.device, dtype=torch.float32)


# The formulas, as models write them. A reference is given float64.


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    exact = logits if logits.dtype == torch.float64 else logits.float()
    weights, _ = torch.topk(torch.softmax(exact, -1), _k(logits.shape[-1]), -1)
    return weights / weights.sum(-1, keepdim=True)


def _grouped(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    scores = (logits if logits.dtype == torch.float64 else logits.float()).sigmoid()
    choice = scores + bias
    groups = choice.unflatten(-1, (GROUPS, -1)).topk(2, -1).values.sum(-1)
    best = groups.topk(CHOSEN_GROUPS, -1).indices
    mask = torch.zeros_like(groups).scatter(-1, best, 1).bool()
    mask = mask.repeat_interleave(logits.shape[-1] // GROUPS, -1)
    indices = choice.masked_fill(~mask, float("-inf")).topk(_k(logits.shape[-1]), -1).indices
    weights = scores.gather(-1, indices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20)


def _softmax_contenders(fuselage: ModuleType):
    def ours(logits: torch.Tensor) -> torch.Tensor:
        return fuselage.topk_softmax(logits, _k(logits.shape[-1])).weights

    return {
        "fuselage": lambda: ours,
        "eager": lambda: _softmax,
        "compile": lambda: compiled(_softmax),
    }


def _grouped_contenders(fuselage: ModuleType):
    options = {"score": "sigmoid", "num_groups": GROUPS, "topk_groups": CHOSEN_GROUPS}
    biases: dict[torch.device, torch.Tensor] = {}

    def with_bias(function):
        def call(logits: torch.Tensor) -> torch.Tensor:
            if logits.device not in biases or biases[logits.device].shape != logits.shape[-1:]:
                biases[logits.device] = _bias(logits)
            return function(logits, biases[logits.device])

        return call

    def ours(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return fuselage.topk_softmax(logits, _k(logits.shape[-1]), bias=bias, **options).weights

    return {
        "fuselage": lambda: with_bias(ours),
        "eager": lambda: with_bias(_grouped),
        "compile": lambda: with_bias(compiled(_grouped)),
    }


def _reference_softmax(logits, _dtype):
    return (_softmax(logits),)


def _reference_grouped(logits, _dtype):
    return (_grouped(logits, _bias(logits).double()),)


# Weights and indices are written, or read with the weights' gradients.


def _moves(of_choice: int):
    """The logits once, or their gradient, and so many bytes of a chosen expert."""

    def size(shape: Shape) -> int:
        rows, experts = shape.sizes
        return rows * (experts * shape.dtype.itemsize + _k(experts) * of_choice)

    return size


def _operator(name: str, shapes, make_inputs, contenders, reference) -> Operator:
    return Operator(
        name=name,
        shapes=shapes,
        make_inputs=make_inputs,
        contenders=contenders,
        reference=reference,
        necessary_bytes={"fwd": _moves(12), "bwd": _moves(16)},
    )


OPERATORS = [
    _operator("topk_softmax", _SOFTMAX, _logits, _softmax_contenders, _reference_softmax),
    _operator(
        *("topk_softmax-groups", _GROUPED, _grouped_logits),
        *(_grouped_contenders, _reference_grouped),
    ),
]
