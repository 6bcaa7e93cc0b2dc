"""Cross-entropy of some of a head's logits at a time: the losses, reduced, and their gradient."""

from __future__ import annotations

from typing import Optional

import torch

from ._fake import floats_of_rows
from ._head_parts import NO_REDUCTION, Differentiate, some
from ._ops import ops
from .loss import number_of_reduction

_cross_entropy_fwd = ops.cross_entropy_fwd.default
_cross_entropy_fwd_bwd = ops.cross_entropy_fwd_bwd_.default
_loss_columns_bwd = ops.loss_columns_bwd_.default

MEAN = number_of_reduction("mean")


class Losses:
    """The losses of some rows at a time, reduced as `cross_entropy` does."""

    def __init__(self, hidden, weight, targets, token_weights, reduction, ignore_index, *options):
        self.head, self.of_rows = (hidden, weight), (targets, token_weights)
        self.reduction, self.options, self.ignore_index = reduction, options, ignore_index
        self.losses = None  # of rows; before there are any, or where all came together

    def add(self, logits: torch.Tensor, rows: slice) -> None:
        targets, token_weights = self.of_rows
        is_all = rows == slice(0, self.head[0].shape[0])
        if not is_all:
            self._keep_of_rows()
        found = _cross_entropy_fwd(
            *(logits, some(targets, rows), some(token_weights, rows)),
            *(self.reduction if is_all else NO_REDUCTION, self.ignore_index),
            *(*self.options, False),
        )
        if is_all:
            self.loss, self.statistics, self.count = found
        else:
            self.losses[rows], self.statistics[rows], _ = found

    def add_with_gradient(self, grads, logits, rows: slice) -> None:
        """As `gradients_by_rows` wants it."""
        targets, token_weights = self.of_rows
        self._keep_of_rows()
        _cross_entropy_fwd_bwd(
            *(grads, some(self.losses, rows), some(self.statistics, rows), logits),
            *(some(targets, rows), some(token_weights, rows), self.one, self._divisor()),
            *(self.ignore_index, *self.options),
        )

    def _keep_of_rows(self) -> None:
        if self.losses is not None:
            return
        hidden, targets = self.head[0], self.of_rows[0]
        self.losses, self.statistics = floats_of_rows(hidden), floats_of_rows(hidden, 2)
        self.one, self.count = self.losses.new_ones(()), self.losses.new_empty((0,))
        if self.reduction != NO_REDUCTION:
            self.count = (targets != self.ignore_index).sum(dtype=torch.float32).view(1)

    def _divisor(self) -> Optional[torch.Tensor]:
        return self.count if self.reduction == MEAN else None

    def reduced(self) -> torch.Tensor:
        if self.losses is None:
            return self.loss
        if self.reduction == NO_REDUCTION:
            return self.losses
        loss = self.losses.sum(dtype=torch.float64)
        return (loss / self.count[0] if self.reduction == MEAN else loss).float()

    def differentiate(self, grads, logits, rows: slice, first_column: int) -> None:
        """Likewise, of rows that were added."""
        targets, token_weights = self.of_rows
        gradient_of_cross_entropy(
            *(self.head[1], targets, self.statistics, self.one, token_weights, self._divisor()),
            *(*self.options, self.ignore_index),
        )(grads, logits, rows, first_column)


def gradient_of_cross_entropy(
    weight,
    targets,
    statistics,
    grad,
    token_weights,
    divisor,
    smoothing,
    square_scale,
    softcap,
    ignore_index,
) -> Differentiate:
    """Of gradients of each row's loss or of all, over `divisor`."""

    def differentiate(grads, logits, rows: slice, first_column: int) -> None:
        _loss_columns_bwd(
            *(grads, logits, some(targets, rows), some(statistics, rows)),
            *(some(grad, rows) if grad.dim() > 0 else grad, some(token_weights, rows), divisor),
            *(smoothing, square_scale, None, None, None, None, 1.0, softcap, ignore_index),
            *(first_column, weight.shape[0]),
        )

    return differentiate
