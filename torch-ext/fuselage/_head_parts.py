"""Logits of a head and gradients of them, some rows or columns at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

import torch

from ._ops import ops
from .loss import number_of_reduction

head_logits = ops.head_logits.default

NO_REDUCTION = number_of_reduction("none")
# Rows of hidden, or of the weight, that the kernels of heads take together.
_ROWS = 256


def parts(begin: int, end: int, most: int) -> Iterator[slice]:
    """Slices of at most so many, in whole blocks of _ROWS where that many are allowed."""
    step = max(1, most if most < _ROWS else most // _ROWS * _ROWS)
    for first in range(begin, end, step):
        yield slice(first, min(first + step, end))


def parts_of_rows(hidden, weight, max_workspace: int, kept: int = 0) -> list[slice]:
    """Of hidden, those whose logits are made together; none has the row `kept` amid.

    Of no rows there is one, for what is checked.
    """
    rows, vocab = hidden.shape[0], weight.shape[0] if weight.dim() > 0 else 0
    most = max_workspace // (4 * max(vocab, 1))
    return [*parts(0, kept, most), *parts(kept, rows, most)] or [slice(0, 0)]


def logits_again(hidden, weight, bias) -> torch.Tensor:
    """Logits for a gradient.

    NOTE: of few columns, the head's kernel takes 1.7 to 3 times as long as a product of cuBLAS,
    whose bits differ.
    """
    if hidden.dtype == torch.float32 or not _has_float32_products(hidden):
        return head_logits(hidden, weight, bias)
    logits = rows_of(hidden, hidden.shape[0], weight.shape[0], torch.float32)
    torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=logits)
    return logits if bias is None else logits.add_(bias)


def rows_of(like: torch.Tensor, rows: int, columns: int, dtype=None) -> torch.Tensor:
    """Rows that start on 32-byte boundaries, for kernels and products."""
    padded = (columns + 15) // 16 * 16
    return like.new_empty((rows, padded), dtype=dtype or like.dtype)[:, :columns]


def no_kept(hidden, weight, max_workspace, reduction: int) -> torch.Tensor:
    """Where the forward keeps the gradients of some rows' logits.

    NOTE: none of float16, whose range may not have them before they are multiplied by the gradient
    of the loss.
    """
    vocab = weight.shape[0] if weight.dim() > 0 else 0
    rows = 0
    if reduction != NO_REDUCTION and hidden.dtype != torch.float16:
        room = max_workspace * 3 // 4 // (hidden.element_size() * max(vocab, 1)) // _ROWS * _ROWS
        rows = torch.sym_min(hidden.shape[0], room)
    return rows_of(hidden, rows, vocab)


def gradients_by_columns(
    hidden, weight, bias, needs, max_workspace, differentiate, kept=None, factor=None
):
    """The gradients of hidden, weight and bias; empty where they are not needed.

    `differentiate(grads, logits, rows, first_column)` writes the gradients of logits of some rows
    and columns. Those of the first rows are `kept`. All are then times `factor`, if given.
    """
    needs_hidden, needs_weight, needs_bias = needs
    rows, vocab = hidden.shape[0], weight.shape[0]
    grad_hidden = hidden.new_empty(hidden.shape if needs_hidden else (0,))
    grad_weight = weight.new_empty(weight.shape if needs_weight else (0,))
    grad_bias = bias.new_empty(bias.shape) if needs_bias else hidden.new_empty((0,))
    others = slice(0 if kept is None else kept.shape[0], rows)
    bytes_of_column = 0
    if others.start < rows:
        bytes_of_column = rows * hidden.element_size() + 4 * (rows - others.start)
    if others.start > 0:
        max_workspace -= kept.numel() * kept.element_size()
    most = max(max_workspace // max(bytes_of_column, 1), _ROWS)
    factored_hidden = hidden if factor is None or not needs_weight else hidden * factor
    sums = None
    for part in parts(0, vocab, most):
        weights = some(weight, part)
        if others.start < rows or rows == 0:
            grads = rows_of(hidden, rows, weights.shape[0])
            if others.start > 0:
                _copy_rows(grads[: others.start], kept[:, part])
            logits = logits_again(some(hidden, others), weights, some(bias, part))
            differentiate(some(grads, others), logits, others, part.start)
            del logits  # before there are products
        else:
            grads = kept[:, part]
        if needs_hidden:
            sums = _add_product(sums, grads, weights)
        if needs_weight:
            torch.mm(grads.t(), factored_hidden, out=some(grad_weight, part))
        if needs_bias:
            of_bias = grads.sum(0, dtype=torch.float32)
            _multiply(grad_bias[part], of_bias, factor)
        del grads  # before there are the next
    if needs_hidden:
        _multiply(grad_hidden, sums, factor)
    return grad_hidden, grad_weight, grad_bias


def some(of_rows: Optional[torch.Tensor], rows: slice) -> Optional[torch.Tensor]:
    """of_rows[rows]. NOTE: a slice of all rows takes 2 us."""
    if of_rows is None or (rows.start == 0 and rows.stop == of_rows.shape[0]):
        return of_rows
    return of_rows[rows]


def _multiply(out: torch.Tensor, x: torch.Tensor, factor: Optional[torch.Tensor]) -> None:
    out.copy_(x) if factor is None else torch.mul(x, factor, out=out)


def _copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Of rows of `_rows_of`. NOTE: by 8 bytes, as PyTorch copies rows by elements."""
    size = (source.shape[0], (source.shape[1] + 15) // 16 * 16)
    wide = (t.as_strided(size, t.stride()).view(torch.int64) for t in (target, source))
    next(wide).copy_(next(wide))


def _add_product(sum: Optional[torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum + a @ b in float32, in the place of sum."""
    options = {}
    if a.dtype != torch.float32 and _has_float32_products(a):
        options = {"out_dtype": torch.float32}
    else:
        a, b = a.float(), b.float()
    if sum is None:
        return torch.mm(a, b, **options)
    return torch.addmm(sum, a, b, **options, out=sum)


def _has_float32_products(x: torch.Tensor) -> bool:
    """Whether PyTorch has float32 products of half-precision matrices. NOTE: not on ROCm."""
    return x.is_cuda and torch.version.cuda is not None
