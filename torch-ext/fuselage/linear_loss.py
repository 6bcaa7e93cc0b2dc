"""Cross-entropy and log-probabilities of a language-model head, whose logits are never whole in
memory.

The forward takes some rows of hidden at a time: their logits, and what the loss needs of them. The
backward makes the logits again, some rows of the weight at a time, and their gradient of them: the
gradient of those rows is complete then, and is rounded once, and that of hidden adds up in float32.
Logits are float32; those of the forward have the bits that `lm_head_sample` draws from.

Where the loss is a mean or a sum, the gradient of a logit is known in the forward, but for the
factor of the loss's gradient. The forward makes all gradients then, and the backward multiplies
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch

from ._arguments import refuse_wrong_kinds
from ._autocast import Product, define_op, register_autocast, without_autocast
from ._autograd import below_autograd, differentiable, some_need_grad
from ._fake import (
    fake_kernel_of,
    floats_of_rows,
    register_fake_gradients,
    register_fake_in_place,
    register_fakes,
)
from ._head_losses import MEAN, Losses, gradient_of_cross_entropy
from ._head_parts import (
    NO_REDUCTION,
    empty_gradients,
    gradients_by_columns,
    gradients_by_rows,
    head_logits,
    parts_of_rows,
    some,
)
from ._ops import ops
from .loss import LogProbs, number_of_reduction, refuse_gradient_of_weights

_log_probs_fwd = ops.log_probs_fwd.default
_loss_columns_bwd = ops.loss_columns_bwd_.default
_multiply = ops.multiply_.default

_DEFAULT_WORKSPACE = 1 << 30
_IGNORED = -100  # of the targets of a shard


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: Optional[torch.Tensor] = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    logit_softcap: Optional[float] = None,
    token_weights: Optional[torch.Tensor] = None,
    max_workspace: int = _DEFAULT_WORKSPACE,
) -> torch.Tensor:
    """Cross-entropy of `hidden @ weight.T + bias`, without these logits in memory.

        logits = hidden @ weight.T + bias        loss = cross_entropy(logits, targets, ...)

    Logits are float32, and never rounded. Their gradient is rounded to the dtype of `hidden` before
    it is multiplied by `weight` and `hidden`; those products add up in float32, and are rounded
    once. Where the loss is a mean or a sum, and not of float16, the forward makes the gradients,
    which saves a fourth matrix product, and keeps them for the backward: that of `hidden` in
    float32, that of `weight` rounded. Times the loss's gradient, that of `weight` is rounded again
    unless it is a power of two. A second backward of such a graph makes them again.

    Args:
        hidden: `[..., dim]`, float16, bfloat16 or float32, with any row stride.
        weight: `[vocab, dim]`, of the dtype of `hidden`. The vocabulary is 1 to 2^26.
        targets: `[...]`, int64 or int32: indices, or `ignore_index`.
        bias: `[vocab]`, of the dtype of `hidden` or float32.
        reduction, ignore_index, label_smoothing, lse_square_scale, logit_softcap, token_weights: As
            in `cross_entropy`. What hidden of an ignored token is, does not matter, unless it is
            not finite.
        max_workspace: Bytes that a call takes beside the gradients: for logits and their gradient,
            of which as many are made at a time as there is room for. At least a row is in the
            forward, and 256 columns in the backward; and half of it is theirs, however much the
            float32 gradient of half-precision `hidden` takes. Of a mean or a sum with a `weight`
            that needs a gradient, some logits are made twice: of those tokens for whose logits'
            gradient there is room neither here nor in the memory of the gradient of `weight`, which
            holds that of `dim` tokens.

    Returns:
        float32, a scalar or `[...]`. The loss of a token has the same bits whatever the other
        tokens are, and the workspace.

    Raises:
        RuntimeError: As `cross_entropy`, and for a `weight` without rows, as one that is
            partitioned and not gathered.

    Source: Wijmans et al., "Cut your losses in large-vocabulary language models", 2025.
    """
    number = number_of_reduction(reduction, "linear_cross_entropy")
    rows, targets_of_rows, shape = _flat("linear_cross_entropy", hidden, targets)
    weights = token_weights
    if shape is not None and getattr(weights, "shape", None) == shape:
        weights = weights.reshape(-1)
    arguments = (
        *(rows, weight, bias, targets_of_rows, weights, number, ignore_index),
        *(label_smoothing, lse_square_scale, logit_softcap, max_workspace),
    )
    refuse_gradient_of_weights("linear_cross_entropy", token_weights)
    if some_need_grad(rows, weight, bias):
        needs = (isinstance(t, torch.Tensor) and t.requires_grad for t in (rows, weight, bias))
        loss = _differentiable_cross_entropy(*arguments, *needs)
    else:
        loss = ops.linear_cross_entropy.default(*arguments)
    return loss.view(shape) if number == NO_REDUCTION and shape is not None else loss


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: Optional[torch.Tensor] = None,
    temperature: float = 1.0,
    logit_softcap: Optional[float] = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_log_sum_exp: bool = False,
    return_is_greatest: bool = False,
    max_workspace: int = _DEFAULT_WORKSPACE,
) -> LogProbs:
    """Log-probabilities of tokens from a head, without its logits in memory.

        logits = hidden @ weight.T + bias        LogProbs = log_probs(logits, targets, ...)

    The log-probability of a token has the bits that
    `lm_head_sample(hidden, weight, ..., temperature=..., return_logprobs=True)` reports for it on
    the same device: rollout and trainer agree.

    Args:
        hidden, weight, targets, bias, max_workspace: As in `linear_cross_entropy`.
        temperature, logit_softcap, ignore_index, return_entropy, return_log_sum_exp,
            return_is_greatest: As in `log_probs`.

    Returns:
        `LogProbs(log_probs, entropy, log_sum_exp, is_greatest)`, each `[...]`, float32 or bool;
        None for those not asked for. All but `is_greatest` have gradients.

    Raises:
        RuntimeError: As `log_probs`, and for a `weight` without rows.

    Source: Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    rows, targets_of_rows, shape = _flat("linear_log_probs", hidden, targets)
    arguments = (
        *(rows, weight, bias, targets_of_rows, temperature, logit_softcap, ignore_index),
        *(return_entropy, max_workspace),
    )
    if some_need_grad(rows, weight, bias):
        found = _differentiable_log_probs(*arguments)
    else:
        found = ops.linear_log_probs.default(*arguments)
    wanted = (True, return_entropy, return_log_sum_exp, return_is_greatest)
    kept = (t if keep else None for t, keep in zip(found, wanted))
    if shape is not None:
        kept = (None if t is None else t.view(shape) for t in kept)
    return LogProbs(*kept)


class ShardLogProbs(NamedTuple):
    """What one shard of the vocabulary says of each token, for `combine_shard_log_probs`."""

    logits: torch.Tensor  # of the target, over temperature; -inf where another shard has it
    log_sum_exp: torch.Tensor  # of the shard's logits over temperature
    entropy: Optional[torch.Tensor]  # of the shard's part of the distribution by itself
    is_counted: torch.Tensor  # whether the target is not `ignore_index`


def linear_log_probs_shard(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_offset: int,
    bias: Optional[torch.Tensor] = None,
    temperature: float = 1.0,
    logit_softcap: Optional[float] = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    max_workspace: int = _DEFAULT_WORKSPACE,
) -> ShardLogProbs:
    """What a shard of a head contributes to `linear_log_probs` of the whole one.

    Args:
        hidden, bias, temperature, logit_softcap, max_workspace: As in `linear_log_probs`, of the
            shard's part of the bias.
        weight: The rows `[vocab_offset, vocab_offset + rows)` of the whole weight.
        targets: `[...]`, int64 or int32: indices of the whole vocabulary, or `ignore_index`.
        vocab_offset: The index of the shard's first row.
        ignore_index, return_entropy: As in `linear_log_probs`.

    Returns:
        `ShardLogProbs`, float32 and bool `[...]`. All but `is_counted` have gradients.

    Raises:
        RuntimeError: As `linear_log_probs`. A target that no shard has is not refused: its
            log-probability is -inf.
    """
    try:
        local, size = targets - vocab_offset, weight.shape[0]
        is_counted = targets != ignore_index
    except (AttributeError, IndexError, TypeError):  # not a tensor, or without dimensions
        refuse_wrong_kinds()
        raise
    inside = is_counted & (local >= 0) & (local < size)
    # Of a token that another shard has, any of the shard's own gives the sums.
    own = torch.where(inside, local, torch.where(is_counted, 0, _IGNORED)).to(targets.dtype)
    found = linear_log_probs(
        *(hidden, weight, own),
        bias=bias,
        temperature=temperature,
        logit_softcap=logit_softcap,
        ignore_index=_IGNORED,
        return_entropy=return_entropy,
        return_log_sum_exp=True,
        max_workspace=max_workspace,
    )
    logits = torch.where(inside, found.log_probs + found.log_sum_exp, -torch.inf)
    return ShardLogProbs(logits, found.log_sum_exp, found.entropy, is_counted)


def combine_shard_log_probs(shards: Sequence[ShardLogProbs]) -> LogProbs:
    """`linear_log_probs` of a whole head, of those of its shards, to float32 rounding.

        lse      = log(sum of e^lse_s)            log_prob = logit of the target - lse
        entropy  = lse - sum of e^(lse_s - lse) * (lse_s - entropy_s)

    Args:
        shards: The results of `linear_log_probs_shard`, in the order of the vocabulary, on one
            device.

    Returns:
        `LogProbs`: `log_probs`, `log_sum_exp`, and `entropy` where the shards have it. All have
        gradients. Zero for ignored tokens.

    Raises:
        RuntimeError: No shards.
        TypeError: Shards that are no sequence of such results.
    """
    try:
        if len(shards) == 0:
            raise RuntimeError("fuselage::combine_shard_log_probs: `shards` must not be empty")
        logits, sums = (torch.stack([s[i] for s in shards]) for i in range(2))
        entropies, is_counted = [s.entropy for s in shards], shards[0].is_counted
    except (AttributeError, IndexError, TypeError):
        refuse_wrong_kinds()
        raise TypeError(
            "fuselage::combine_shard_log_probs: `shards` must be a sequence of results of "
            "linear_log_probs_shard"
        ) from None
    log_sum_exp = torch.logsumexp(sums, 0)
    log_probs = torch.where(is_counted, logits.amax(0) - log_sum_exp, 0.0)
    entropy = None
    if entropies[0] is not None:
        means = sums - torch.stack(entropies)
        entropy = log_sum_exp - ((sums - log_sum_exp).exp() * means).sum(0)
        entropy = torch.where(is_counted, entropy, 0.0)
    return LogProbs(log_probs, entropy, torch.where(is_counted, log_sum_exp, 0.0))


def _flat(op: str, hidden, targets) -> tuple[torch.Tensor, torch.Tensor, Optional[torch.Size]]:
    """Hidden and targets as rows, and the shape of the tokens where that is another."""
    try:
        shape = hidden.shape[:-1]
        if hidden.dim() == 2 and targets.dim() == 1:
            return hidden, targets, None
        if hidden.dim() == 0 or targets.shape != shape:
            raise _other_shape(op, hidden, "targets", targets)
        return hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), shape
    except AttributeError:  # not a tensor
        refuse_wrong_kinds()
        raise


def _other_shape(op: str, hidden: torch.Tensor, name: str, tensor: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"fuselage::{op}: `{name}` must have the shape of `hidden` {list(hidden.shape)} "
        f"without its last dimension, got {list(tensor.shape)}"
    )


# The ops, made of those above.


def _op(schema: str):
    """Registers a function as the kernel of an op, on CPU and GPU."""

    def register(function):
        name = schema.partition("(")[0]

        def kernel(hidden, *others):
            try:
                with below_autograd(), without_autocast("cuda" if hidden.is_cuda else "cpu"):
                    return function(hidden, *others)
            except RuntimeError as error:
                raise _renamed(error, name.removesuffix("_fwd")) from None

        define_op(schema, kernel)
        return function

    return register


def _renamed(error: RuntimeError, name: str) -> RuntimeError:
    """What an op refuses that `name` is made of, is refused by `name`."""
    message = str(error)
    for inner in ("head_logits", "cross_entropy", "log_probs"):
        message = message.replace(f"fuselage::{inner}:", f"fuselage::{name}:")
    return error if message == str(error) else RuntimeError(message)


_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets"
_LOSS_OPTIONS = (
    "int reduction, int ignore_index, float label_smoothing, float lse_square_scale, "
    "float? logit_softcap, int max_workspace"
)
_LOSS = f"{_HEAD}, Tensor? token_weights, {_LOSS_OPTIONS}"
_LOG_PROBS_OPTIONS = (
    "float temperature, float? logit_softcap, int ignore_index, bool return_entropy, "
    "int max_workspace"
)
_LOG_PROBS = f"{_HEAD}, {_LOG_PROBS_OPTIONS}"
_LOG_PROBS_RESULTS = "Tensor log_probs, Tensor entropy, Tensor log_sum_exp, Tensor is_greatest"
_NEEDS = "bool needs_grad_hidden, bool needs_grad_weight, bool needs_grad_bias"
_GRADIENTS = "(Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)"


@_op(
    f"linear_cross_entropy_fwd({_LOSS}, {_NEEDS}) -> "
    f"(Tensor loss, Tensor statistics, Tensor count, {_GRADIENTS[1:-1]})"
)
def _forward_of_loss(hidden, weight, bias, targets, token_weights, reduction, *options):
    ignore_index, *options, max_workspace, needs_1, needs_2, needs_3 = options
    tokens = {"targets": targets, "token_weights": token_weights}
    _check("linear_cross_entropy", hidden, max_workspace, **tokens)
    losses = Losses(hidden, weight, targets, token_weights, reduction, ignore_index, *options)
    needs = needs_1, needs_2, needs_3
    if _are_made_in_forward(hidden, reduction) and any(needs):
        grads = gradients_by_rows(
            *(hidden, weight, bias, needs, max_workspace),
            *(losses.add_with_gradient, losses.differentiate),
        )
    else:
        for part in parts_of_rows(hidden, weight, max_workspace):
            losses.add(head_logits(some(hidden, part), weight, bias), part)
        grads = empty_gradients(hidden, weight, (False,) * 3)
    return losses.reduced(), losses.statistics, losses.count, *grads


def _are_made_in_forward(hidden: torch.Tensor, reduction: int) -> bool:
    """Whether the gradients are, but for the factor of the loss's.

    NOTE: not of float16, whose range may not have those of logits without that factor.
    """
    return reduction != NO_REDUCTION and hidden.dtype != torch.float16


@_op(f"linear_cross_entropy({_LOSS}) -> Tensor loss")
def _(*arguments):
    return _forward_of_loss(*arguments, False, False, False)[0]


@_op(
    f"linear_cross_entropy_bwd({_HEAD}, Tensor? token_weights, Tensor grad_out, Tensor statistics, "
    f"Tensor count, {_LOSS_OPTIONS}, {_NEEDS}) -> {_GRADIENTS}"
)
def _gradients_of_loss(
    hidden, weight, bias, targets, token_weights, grad_out, statistics, count, *options
):
    reduction, ignore_index, *options, max_workspace, needs_1, needs_2, needs_3 = options
    divisor = count if reduction == MEAN else None
    factors = (grad_out, token_weights, divisor, *options, ignore_index)
    differentiate = gradient_of_cross_entropy(weight, targets, statistics, *factors)
    needs = needs_1, needs_2, needs_3
    return gradients_by_columns(hidden, weight, bias, needs, max_workspace, differentiate)


@_op(f"linear_log_probs_fwd({_LOG_PROBS}) -> ({_LOG_PROBS_RESULTS}, Tensor statistics)")
def _forward_of_log_probs(hidden, weight, bias, targets, *options):
    *options, has_entropy, max_workspace = options
    _check("linear_log_probs", hidden, max_workspace, targets=targets)
    parts = parts_of_rows(hidden, weight, max_workspace)
    of_logits = has_entropy or not _makes_strip_sums(hidden, weight, bias, targets)
    if len(parts) > 1:
        results = _empty_log_probs(hidden, has_entropy)
    for part in parts:
        of_part = (some(hidden, part), weight, bias, some(targets, part), *options)
        found = _of_logits(*of_part, has_entropy) if of_logits else _of_strips(*of_part)
        if len(parts) == 1:
            return found
        for result, value in zip(results, found):
            if result.shape[0] > 0:
                result[part] = value
    return results


def _makes_strip_sums(hidden, weight, *others) -> bool:
    # NOTE: tensors of other devices are refused by name where there are logits.
    others = (t for t in (weight, *others) if t is not None)
    if not hidden.is_cuda or any(t.device != hidden.device for t in others):
        return False
    return ops.makes_strip_sums.default(hidden, weight)


def _of_logits(hidden, weight, bias, targets, *options):
    return _log_probs_fwd(head_logits(hidden, weight, bias), targets, *options)


def _of_strips(hidden, weight, bias, targets, temperature, softcap, ignore_index):
    """The same bits, without logits in memory: the head adds up the weights of 16 at a time."""
    targets = targets.contiguous()
    sums, of_targets = ops.head_strip_sums.default(
        *(hidden, weight, bias, targets, temperature, softcap)
    )
    log_probs, *others = ops.log_probs_of_strips.default(
        *(sums, of_targets, targets, weight.shape[0], temperature, ignore_index)
    )
    return log_probs, hidden.new_empty((0,), dtype=torch.float32), *others


@_op(f"linear_log_probs({_LOG_PROBS}) -> ({_LOG_PROBS_RESULTS})")
def _(*arguments):
    return _forward_of_log_probs(*arguments)[:4]


@_op(
    f"linear_log_probs_bwd({_HEAD}, Tensor? grad_log_probs, Tensor? grad_entropy, "
    f"Tensor? grad_log_sum_exp, Tensor? entropy, Tensor statistics, float temperature, "
    f"float? logit_softcap, int ignore_index, int max_workspace, {_NEEDS}) -> {_GRADIENTS}"
)
def _(hidden, weight, bias, targets, *others):
    of_rows, others = others[:5], others[5:]
    temperature, softcap, ignore_index, max_workspace, *needs = others
    vocab = weight.shape[0]

    def differentiate(grads, logits, rows: slice, first_column: int) -> None:
        *gradients, entropy, statistics = (some(t, rows) for t in of_rows)
        _loss_columns_bwd(
            *(grads, logits, targets[rows], statistics, None, None, None, 0.0, 0.0),
            *(*gradients, entropy, temperature, softcap, ignore_index, first_column, vocab),
        )

    return gradients_by_columns(hidden, weight, bias, needs, max_workspace, differentiate)


def _check(op: str, hidden: torch.Tensor, max_workspace: int, **of_tokens) -> None:
    """What slices would hide, and what the ops that are called do not know."""
    for name, tensor in of_tokens.items():
        if tensor is None or hidden.dim() != 2 or tensor.device != hidden.device:
            continue  # the ops say so
        if tensor.shape != hidden.shape[:1]:
            raise _other_shape(op, hidden, name, tensor)
    if max_workspace < 1:
        raise RuntimeError(f"fuselage::{op}: `max_workspace` must be positive, got {max_workspace}")


def _empty_log_probs(hidden, has_entropy) -> tuple[torch.Tensor, ...]:
    of_rows = floats_of_rows(hidden)
    return (
        of_rows,
        torch.empty_like(of_rows) if has_entropy else of_rows.new_empty((0,)),
        torch.empty_like(of_rows),
        torch.empty_like(of_rows, dtype=torch.bool),
        floats_of_rows(hidden, 2),
    )


# Gradients.


def _save_cross_entropy(ctx, inputs, outputs):
    _, statistics, count, *made = outputs
    *ctx.options, _, _, _ = inputs[5:]
    # NOTE: not saved as others are: the backward writes over them, and hands them on.
    ctx.made = made
    ctx.save_for_backward(*inputs[:5], statistics, count)


def _cross_entropy_backward(ctx, grad_out):
    *inputs, statistics, count = ctx.saved_tensors
    hidden, _, bias, _, _ = inputs
    if not _are_made_in_forward(hidden, ctx.options[0]):
        saved = (*inputs, grad_out, statistics, count)
        return ops.linear_cross_entropy_bwd.default(*saved, *ctx.options, *_needs(ctx))
    made, ctx.made = ctx.made, None
    if made is None:  # of the second backward of a graph: the first one has taken them
        forward = ops.linear_cross_entropy_fwd.default(*inputs, *ctx.options, *_needs(ctx))
        made = forward[3:]
    of_hidden, of_weight, of_bias = (_multiplied(grad, grad_out) for grad in made)
    of_bias = of_bias if bias is None else of_bias.to(bias.dtype)
    return of_hidden.to(hidden.dtype), of_weight, of_bias


def _multiplied(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """In float32, and in place unless torch.compile traces it, which sees to that itself."""
    if type(grad) is torch.Tensor:
        _multiply(grad, factor)
        return grad
    # NOTE: of one dimension, as a scalar's dtype would not widen that of what it multiplies.
    return (grad * factor.view(1)).to(grad.dtype)


def _save_log_probs(ctx, inputs, outputs):
    *saved, temperature, softcap, ignore_index, has_entropy, max_workspace = inputs
    ctx.options = (temperature, softcap, ignore_index, max_workspace)
    _, entropy, _, is_greatest, statistics = outputs
    ctx.mark_non_differentiable(is_greatest, statistics)
    ctx.save_for_backward(*saved, entropy if has_entropy else None, statistics)


def _log_probs_backward(ctx, grad_log_probs, grad_entropy, grad_log_sum_exp, _):
    *inputs, entropy, statistics = ctx.saved_tensors
    grads = (grad_log_probs, grad_entropy if entropy is not None else None, grad_log_sum_exp)
    saved = (*inputs, *grads, entropy, statistics)
    return ops.linear_log_probs_bwd.default(*saved, *ctx.options, *_needs(ctx))


def _needs(ctx) -> tuple[bool, ...]:
    """Whether hidden, weight and bias need their gradients."""
    return tuple(ctx.needs_input_grad[:3])


_differentiable_cross_entropy = differentiable(
    "linear_cross_entropy",
    save=_save_cross_entropy,
    backward=_cross_entropy_backward,
    results=1,
    transforms=False,
)
_differentiable_log_probs = differentiable(
    "linear_log_probs",
    save=_save_log_probs,
    backward=_log_probs_backward,
    results=4,
    transforms=False,
)

_PRODUCT = Product(("hidden", "weight"), "bias", float32=("token_weights",))
for _name in ("linear_cross_entropy", "linear_log_probs"):
    register_autocast(_PRODUCT, _name, f"{_name}_fwd")


# Shapes and dtypes of the results, for tracing.


def _fake_loss(hidden, weight, bias, targets, token_weights, reduction, *options):
    losses = floats_of_rows(hidden)
    loss = losses if reduction == NO_REDUCTION else losses.new_empty(())
    count = losses.new_empty((0 if reduction == NO_REDUCTION else 1,))
    needs = options[-3:] if _are_made_in_forward(hidden, reduction) else (False,) * 3
    grads = empty_gradients(hidden, weight, needs)
    return loss, floats_of_rows(hidden, 2), count, *grads


def _fake_log_probs(hidden, weight, bias, targets, *options):
    return _empty_log_probs(hidden, options[-2])


@fake_kernel_of("head_logits")
def _(hidden, weight, bias):
    vocab = weight.shape[0]
    strips = (vocab + 15) // 16 * 16
    return hidden.new_empty((hidden.shape[0], strips), dtype=torch.float32)[:, :vocab]


register_fakes("linear_cross_entropy", _fake_loss, results=1)
register_fakes("linear_log_probs", _fake_log_probs, results=4)
register_fake_gradients("linear_cross_entropy_bwd")
register_fake_gradients("linear_log_probs_bwd")
register_fake_in_place("cross_entropy_fwd_bwd_")
register_fake_in_place("loss_columns_bwd_")
register_fake_in_place("multiply_")
