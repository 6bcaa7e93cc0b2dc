"""Products together with what is next to them: a tanh-GELU after, or a concatenation before.

A library of products applies a GELU to its float32 sums while it writes them, which saves a pass
over memory and a rounding. And a product of concatenated parts is a sum of products, each of them
added to the result of the one before, so that nothing is concatenated; of half precision, that sum
is rounded once more. Without gradients alone: a backward needs what went into the GELU.

Measured on an H100, in bfloat16, `[4608, 3072] @ [3072, 12288]` and what follows in a single block
of Flux: 528 us with a GELU that the compiler makes, 473 with that of the product; with the
concatenation and the product that takes it 1099, and 1036 without it.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import nn

from .._autocast import define_op
from .._autograd import below_autograd
from .._ops import add_op_namespace_prefix, ops
from . import _probe
from ._patch import listened_to


def has_epilogue(linear: nn.Module, x) -> bool:
    """Whether the product of a linear layer takes a GELU along."""
    return _is_plain(linear, x) and linear.bias is not None


def linear_gelu_tanh(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Of a layer for which `has_epilogue`: rounded once."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch._addmm_activation(linear.bias, rows, linear.weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], out.shape[-1])


def _is_plain(linear: nn.Module, x) -> bool:
    """Whether a layer is what `nn.Linear` makes of it, on a GPU with tensors of one half-precision
    dtype, none of which has a gradient, of whichever mode.
    """
    if type(linear) is not nn.Linear or "forward" in vars(linear) or listened_to(linear):
        return False
    if type(x) is not torch.Tensor or not _probe.is_on_gpu(x):
        return False
    weight, bias = linear.weight, linear.bias
    given = (x, weight) if bias is None else (x, weight, bias)
    if type(weight) is not nn.Parameter or x.dtype not in _probe.HALF or x.numel() == 0:
        return False
    return _probe.in_inference(*given)


# Columns of parts over those of a product, from which on it takes longer to write and read the
# concatenation than to write and read the product's result once more. Flux has 5.
_LEAST_RATIO = 3
# Rows below which a product reads its weight for most of its time.
_LEAST_ROWS = 512


def linear_of_parts(linear: nn.Linear, parts) -> torch.Tensor:
    """`linear(torch.cat(parts, -1))`, of what `may_stay_apart`."""
    if torch.compiler.is_compiling():
        return ops.linear_of_parts.default(parts, linear.weight, linear.bias)
    return _linear_of_parts(parts, linear.weight, linear.bias)


def may_stay_apart(linear: nn.Module, parts, dim: int) -> bool:
    """Whether a concatenation is better left out before a linear layer."""
    if not all(type(part) is torch.Tensor for part in parts):
        return False
    first, columns = parts[0], sum(part.shape[-1] for part in parts if part.dim() > 0)
    if not all(_is_plain(linear, part) for part in parts):
        return False
    if dim not in (-1, first.dim() - 1) or columns != linear.in_features:
        return False
    if any(part.shape[:-1] != first.shape[:-1] for part in parts):
        return False
    return takes_parts(linear) and first.numel() >= _LEAST_ROWS * first.shape[-1]


def takes_parts(linear: nn.Linear) -> bool:
    """Whether parts are so wide that they may stay apart."""
    return linear.in_features >= _LEAST_RATIO * linear.out_features


def _linear_of_parts(parts, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    out, begin = None, 0
    for part in parts:
        end = begin + part.shape[-1]
        rows, matrix = part.reshape(-1, part.shape[-1]), weight[:, begin:end].t()
        if out is not None:
            out.addmm_(rows, matrix)
        elif bias is None:
            out = torch.mm(rows, matrix)
        else:
            out = torch.addmm(bias, rows, matrix)
        begin = end
    return out.view(*parts[0].shape[:-1], weight.shape[0])


def _op(parts, weight, bias):
    with below_autograd():
        return _linear_of_parts(parts, weight, bias)


# For the compiler, which would copy the result of a product before it adds another one to it.
define_op("linear_of_parts(Tensor[] parts, Tensor weight, Tensor? bias) -> Tensor", _op)


@torch.library.register_fake(add_op_namespace_prefix("linear_of_parts"))
def _fake(parts, weight, bias):
    return parts[0].new_empty((*parts[0].shape[:-1], weight.shape[0]))
