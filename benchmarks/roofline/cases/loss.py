"""cross_entropy and log_probs of given logits. Sizes: rows, vocabulary.

Targets are made of the logits' shape alone, so that all contenders have the same.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F

from ..contenders import compiled
from ..registry import Operator, Shape

TEMPERATURE = 0.7


def _shape(rows: int, vocab: int, *tags: str, dtype=torch.bfloat16) -> Shape:
    return Shape((rows, vocab), dtype, frozenset(tags))


# Qwen3, Llama 3 and Gemma, then few tokens, few classes and odd sizes.
_LOGITS = [
    _shape(8192, 151936, "main"),
    _shape(4096, 128256),
    _shape(2048, 262144),
    _shape(512, 32000, "small", "quick"),
    _shape(1, 151936, "small"),
    _shape(100000, 128, "odd"),
    _shape(2048, 50257, "odd"),
    _shape(2048, 32000, "dtype", dtype=torch.float32),
]
_CPU = [
    _shape(rows, vocab, "cpu", *(["quick"] if rows == 64 else []), dtype=dtype)
    for rows, vocab in [(64, 32000), (512, 8192)]
    for dtype in (torch.float32, torch.bfloat16)
]


@cache
def _targets(rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return torch.randint(vocab, (rows,), generator=generator).to(device)


def _of(logits: torch.Tensor) -> torch.Tensor:
    return _targets(*logits.shape, logits.device)


def _inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(shape.sizes, device=device, dtype=shape.dtype) * 3,)


# The formulas, as a trainer writes them.


def _loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), _of(logits))


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    every = torch.log_softmax(logits.float() / TEMPERATURE, -1)
    return every.gather(-1, _of(logits)[:, None])[:, 0]


def _compiled(function):
    """Of the targets as an argument: a cached function is none that can be traced."""

    def loss(logits, targets):
        return F.cross_entropy(logits.float(), targets)

    def log_probs(logits, targets):
        every = torch.log_softmax(logits.float() / TEMPERATURE, -1)
        return every.gather(-1, targets[:, None])[:, 0]

    call = compiled(loss if function is _loss else log_probs)
    return lambda logits: call(logits, _of(logits))


def _liger():
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss = LigerCrossEntropyLoss()
    return lambda logits: loss(logits, _of(logits))


def _quack():
    from quack import cross_entropy

    return lambda logits: cross_entropy(logits, _of(logits), reduction="mean")


def _loss_contenders(fuselage: ModuleType):
    calls = {
        "fuselage": lambda: lambda x: fuselage.cross_entropy(x, _of(x)),
        "eager": lambda: _loss,
        "compile": lambda: _compiled(_loss),
        "liger": _liger,
        "quack": _quack,
    }
    if torch.cuda.is_available():  # a CPU's bar is for PyTorch's slow operators: this is not one
        calls["torch"] = lambda: lambda x: F.cross_entropy(x, _of(x))
    return calls


def _log_prob_contenders(fuselage: ModuleType):
    def ours(x: torch.Tensor) -> torch.Tensor:
        return fuselage.log_probs(x, _of(x), temperature=TEMPERATURE).log_probs

    return {
        "fuselage": lambda: ours,
        "eager": lambda: _log_probs,
        "compile": lambda: _compiled(_log_probs),
    }


def _reference_loss(logits, _dtype):
    return (F.cross_entropy(logits, _of(logits)),)


def _reference_log_probs(logits, _dtype):
    every = torch.log_softmax(logits / TEMPERATURE, -1)
    return (every.gather(-1, _of(logits)[:, None])[:, 0],)


def _moves(times: int, per_row: int):
    """The logits so often, and so many bytes of each row: targets, statistics, results."""

    def size(shape: Shape) -> int:
        rows, vocab = shape.sizes
        return rows * (times * vocab * shape.dtype.itemsize + per_row)

    return size


def _operator(name: str, contenders, reference) -> Operator:
    return Operator(
        name=name,
        shapes=[*_LOGITS, *_CPU],
        make_inputs=_inputs,
        contenders=contenders,
        reference=reference,
        necessary_bytes={"fwd": _moves(1, 12), "bwd": _moves(2, 20)},
        # Its forward makes the gradient, over the logits.
        overwrites_inputs=frozenset({"liger"}),
    )


OPERATORS = [
    _operator("cross_entropy", _loss_contenders, _reference_loss),
    _operator("log_probs", _log_prob_contenders, _reference_log_probs),
]
