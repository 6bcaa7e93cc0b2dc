"""Logits of a head and gradients of them, some rows or columns at a time.

What these functions allocate, beside results, is no more than `max_workspace` bytes. Only where
what is of all rows, as float32 gradients of hidden, takes more than half of that, is it the other
half and that; and a row of logits in a forward, or 256 columns in a backward, is the least. On a
CPU, and on ROCm, float32 copies of some half-precision factors of a product come on top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch

from ._ops import ops
from .loss import number_of_reduction

head_logits = ops.head_logits.default

NO_REDUCTION = number_of_reduction("none")
# Rows of hidden, or of the weight, that the kernels of heads take together.
_ROWS = 256
# Rows of hidden that read the weight once.
_TILE = 2 * _ROWS
# Bytes of what is kept of a row besides: its loss, two statistics, whether it counts.
_OF_ROW = 16

# Writes the gradients of logits of some rows and columns: (grads, logits, rows, first_column).
Differentiate = Callable[[torch.Tensor, torch.Tensor, slice, int], None]


def parts(begin: int, end: int, most: int) -> list[slice]:
    """Slices of at most so many, in whole blocks where they are several of that size.

    Of nothing there is one, for what is checked.
    """
    step = max(most if most >= end - begin else _blocks(most), 1)
    firsts = range(begin, end, step)
    return [slice(first, min(first + step, end)) for first in firsts] or [slice(begin, begin)]


def parts_of_rows(hidden, weight, max_workspace: int) -> list[slice]:
    """Of hidden, those whose logits are made together."""
    of_logits, _ = _bytes_of_row(hidden, weight)
    room = _room(max_workspace, _OF_ROW * hidden.shape[0])
    return parts(0, hidden.shape[0], room // of_logits)


def _bytes_of_row(hidden, weight) -> tuple[int, int]:
    """Of logits, with the copy of hidden that a kernel makes, and of their gradient."""
    vocab, size = weight.shape[0] if weight.dim() > 0 else 0, hidden.element_size()
    padded = max(_padded(vocab), 1)
    return 4 * padded + size * hidden.shape[-1], size * padded


def _room(max_workspace: int, taken: int) -> int:
    """What is left of a workspace, which is half of it at least."""
    return max(max_workspace - taken, max_workspace // 2)


def _blocks(count: int) -> int:
    return count if count < _ROWS else count // _ROWS * _ROWS


def logits_again(hidden, weight, bias) -> torch.Tensor:
    """Logits for a gradient.

    NOTE: of few columns, the head's kernel takes 1.7 to 3 times as long as a product of cuBLAS,
    whose bits differ.
    """
    if hidden.dtype == torch.float32 or not has_float32_products(hidden):
        return head_logits(hidden, weight, bias)
    logits = _rows_of(hidden, hidden.shape[0], weight.shape[0], torch.float32)
    torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=logits)
    return logits if bias is None else logits.add_(bias)


def _padded(columns: int) -> int:
    return (columns + 15) // 16 * 16


def _rows_of(like: torch.Tensor, rows: int, columns: int, dtype=None) -> torch.Tensor:
    """Rows that start on 32-byte boundaries, for kernels and products."""
    return like.new_empty((rows, _padded(columns)), dtype=dtype or like.dtype)[:, :columns]


def gradients_by_columns(hidden, weight, bias, needs, max_workspace, differentiate: Differentiate):
    """The gradients of hidden, weight and bias; empty where they are not needed.

    All logits are made again: some columns of all rows at a time.
    """
    needs_hidden, needs_weight, needs_bias = needs
    rows, size = hidden.shape[0], hidden.element_size()
    grad_hidden = hidden.new_empty(hidden.shape if needs_hidden else (0,))
    grad_weight = weight.new_empty(weight.shape if needs_weight else (0,))
    grad_bias = bias.new_empty(bias.shape) if needs_bias else hidden.new_empty((0,))
    sums = grad_hidden
    if needs_hidden and size < 4:
        sums = hidden.new_empty(hidden.shape, dtype=torch.float32)
    room = _room(max_workspace, 4 * sums.numel() if sums is not grad_hidden else 0)
    for part in parts(0, weight.shape[0], max(room // max((4 + size) * rows, 1), _ROWS)):
        weights = some(weight, part)
        logits = logits_again(hidden, weights, some(bias, part))
        grads = _rows_of(hidden, rows, weights.shape[0])
        differentiate(grads, logits, slice(0, rows), part.start)
        del logits  # before there are products
        if needs_hidden:
            _add_product(sums, grads, weights, is_first=part.start == 0)
        if needs_weight:
            torch.mm(grads.t(), hidden, out=some(grad_weight, part))
        if needs_bias:
            grad_bias[part] = grads.sum(0, dtype=torch.float32)
        del grads  # before there are the next
    if sums is not grad_hidden:
        grad_hidden.copy_(sums)
    return grad_hidden, grad_weight, grad_bias


class Plan(NamedTuple):
    """Which rows and columns `gradients_by_rows` takes together."""

    tile: int  # rows whose logits are together
    group: int  # rows whose gradients of logits are; the last ones stay
    again: int  # the first rows: their logits are made again
    lodged: int  # the rows after them: lodged in the memory of the weight's gradient
    columns: int  # of the weight's gradient that are made together


def plan(hidden, weight, needs, max_workspace: int) -> Plan:
    """With which logits are made again of as few rows as there is no room for."""
    needs_hidden, needs_weight, needs_bias = needs
    (rows, dim), vocab, size = hidden.shape, weight.shape[0], hidden.element_size()
    of_logits, of_grads = _bytes_of_row(hidden, weight)
    taken = _OF_ROW * rows + 8 * vocab * needs_bias + (4 - size) * rows * dim * needs_hidden
    room = _room(max_workspace, taken)

    def group_beside(tile: int) -> int:
        group = (room - tile * of_logits) // of_grads
        if group < rows and needs_weight:
            # The columns of the other rows come together, too.
            group = (room - max(tile * of_logits, _ROWS * (size + 4) * rows)) // of_grads
        return group

    least, small = min(rows, _TILE), min(rows, _ROWS)
    if group_beside(least) < least or group_beside(least) < rows <= group_beside(small):
        least = small
    group = group_beside(least)
    if group < least:
        group = room // (of_logits + of_grads)
    group = max(min(rows, group if group >= rows else _blocks(group)), 1)
    tile = min(group, max((room - group * of_grads) // of_logits, 1))
    others = max(rows - group, 0) if needs_weight else 0
    lodged = min(others, dim)
    again = others - lodged
    columns = (room - group * of_grads) // max(size * rows + 4 * again, 1)
    return Plan(tile, group, again, lodged, max(columns, _ROWS))


def gradients_by_rows(
    hidden,
    weight,
    bias,
    needs,
    max_workspace,
    differentiate: Callable,
    differentiate_again: Differentiate,
):
    """The gradients of hidden, weight and bias; empty where they are not needed.

    `differentiate(grads, logits, rows)` sees all logits, a row once, and `differentiate_again` some
    columns of rows that it has seen. The gradients of hidden and bias are float32.

    The gradient of hidden is complete with the rows, that of the weight where the gradients of some
    columns of all rows are together. Until then they stay in the workspace, or lodge in the memory
    of the weight's gradient: `dim` rows of the columns that come there have the size of what comes.
    Of the rows beyond, logits are made again.
    """
    needs_hidden, needs_weight, needs_bias = needs
    if hidden.dim() != 2 or weight.dim() != 2:
        head_logits(hidden, weight, bias)  # which refuses them
    rows, vocab = hidden.shape[0], weight.shape[0]
    tile, most, again, lodged, columns = plan(hidden, weight, needs, max_workspace)
    grad_hidden, grad_weight, grad_bias = empty_gradients(hidden, weight, needs)
    grad_bias.zero_()
    slices = parts(0, vocab, columns)
    kept = _rows_of(hidden, most, vocab)
    groups = parts(0, again, most) if again > 0 else []
    groups += parts(again, again + lodged, most) if lodged > 0 else []
    for group in groups + parts(again + lodged, rows, most):
        grads = kept[: group.stop - group.start]
        for part in parts(group.start, group.stop, tile):
            logits = head_logits(some(hidden, part), weight, bias)
            within = slice(part.start - group.start, part.stop - group.start)
            differentiate(some(grads, within), logits, part)
            del logits  # before there are the next
        if needs_hidden:
            _add_product(some(grad_hidden, group), grads, weight, is_first=True)
        if needs_bias:
            grad_bias += grads.sum(0, dtype=torch.float32)
        if again <= group.start < again + lodged:
            for part in slices:
                lodging = _lodging(grad_weight, part)[group.start - again : group.stop - again]
                _copy_rows(lodging, grads[:, part])
    if needs_weight and again + lodged == 0:
        torch.mm(kept[:rows].t(), hidden, out=grad_weight)
    elif needs_weight:
        for part in slices:
            grads = _rows_of(hidden, rows, part.stop - part.start)
            _copy_rows(grads[again + lodged :], kept[: rows - again - lodged, part])
            _copy_rows(grads[again : again + lodged], _lodging(grad_weight, part)[:lodged])
            if again > 0:
                others = slice(0, again)
                logits = logits_again(hidden[others], weight[part], some(bias, part))
                differentiate_again(grads[others], logits, others, part.start)
                del logits  # before there is a product
            torch.mm(grads.t(), hidden, out=grad_weight[part])
            del grads  # before there are the next
    return grad_hidden, grad_weight, grad_bias


def empty_gradients(hidden, weight, needs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For those of `gradients_by_rows`."""
    needs_hidden, needs_weight, needs_bias = needs
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,), dtype=torch.float32),
        weight.new_empty(weight.shape if needs_weight else (0,)),
        hidden.new_empty(weight.shape[:1] if needs_bias else (0,), dtype=torch.float32),
    )


def _lodging(grad_weight: torch.Tensor, columns: slice) -> torch.Tensor:
    """`[dim, columns]` in the memory of the gradient of these columns, `[columns, dim]`."""
    own = grad_weight[columns]
    return own.view(own.shape[1], own.shape[0])


def _copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """NOTE: by 8 bytes where rows are such, as PyTorch copies rows by elements."""
    both, each = (target, source), 8 // source.element_size()
    if all(n % each == 0 for t in both for n in (t.shape[1], t.stride(0), t.storage_offset())):
        target, source = (t.view(torch.int64) for t in both)
    target.copy_(source)


def some(of_rows: Optional[torch.Tensor], rows: slice) -> Optional[torch.Tensor]:
    """of_rows[rows]. NOTE: a slice of all rows takes 2 us."""
    if of_rows is None or (rows.start == 0 and rows.stop == of_rows.shape[0]):
        return of_rows
    return of_rows[rows]


def _add_product(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, is_first: bool) -> None:
    """Adds a @ b to float32 sums, or starts them."""
    columns = parts(0, a.shape[1], a.shape[1])
    options = {}
    if a.dtype != torch.float32 and has_float32_products(a):
        options = {"out_dtype": torch.float32}
    elif a.dtype != torch.float32:  # some float32 copies at a time
        columns = parts(0, a.shape[1], 4 * _ROWS)
    for part in columns:
        left, right = a[:, part], some(b, part)
        if not options:
            left, right = left.float(), right.float()
        if is_first and part.start == 0:
            torch.mm(left, right, **options, out=sums)
        else:
            torch.addmm(sums, left, right, **options, out=sums)


def has_float32_products(x: torch.Tensor) -> bool:
    """Whether PyTorch has float32 products of half-precision matrices. NOTE: not on ROCm."""
    return x.is_cuda and torch.version.cuda is not None
