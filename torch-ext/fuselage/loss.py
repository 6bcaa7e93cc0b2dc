"""Cross-entropy and log-probabilities of given logits, forward and backward.

Logits are read once in the forward, and once in the backward, which writes their gradient; nothing
of their size is kept or made besides. Arithmetic and results are float32, whatever the logits are.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch

from ._arguments import number_of
from ._autocast import Rule, register_autocast
from ._autograd import (
    differentiable,
    is_tracked,
    mark_written,
    needs_grad,
    transforms_are_active,
)
from ._fake import (
    fake_kernel_of,
    floats_of_rows,
    register_fake_gradients,
    register_fake_in_place,
    register_fakes,
)
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_cross_entropy = ops.cross_entropy.default
_cross_entropy_bwd = ops.cross_entropy_bwd.default
_cross_entropy_bwd_inplace = ops.cross_entropy_bwd_.default
_log_probs = ops.log_probs.default
_log_probs_bwd = ops.log_probs_bwd.default

_REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}


class LogProbs(NamedTuple):
    """What `log_probs` gives for each token. Members that were not asked for are None."""

    log_probs: torch.Tensor  # of the targets, float32
    entropy: Optional[torch.Tensor] = None  # of the whole distribution, float32
    log_sum_exp: Optional[torch.Tensor] = None  # of the logits over temperature, float32
    is_greatest: Optional[torch.Tensor] = None  # whether no logit is larger than the target's


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    logit_softcap: Optional[float] = None,
    token_weights: Optional[torch.Tensor] = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Cross-entropy of logits and targets, as `F.cross_entropy`, in float32.

        x    = logits, or c * tanh(logits / c)        lse = log(sum(exp(x)))
        loss = (1 - e) * (lse - x[target]) + e * (lse - mean(x)) + s * lse^2

    times the weight of the token. The gradient has the dtype of the logits, and is rounded once.

    Args:
        logits: `[..., vocab]`, float16, bfloat16 or float32, with any row stride. The vocabulary is
            1 to 2^26.
        targets: `[...]`, int64 or int32: indices, or `ignore_index`.
        reduction: "none" gives `[...]`, "sum" the sum, and "mean" that over the number of targets
            that are not ignored: NaN where all are, as in PyTorch.
        ignore_index: Tokens with this target have a loss and a gradient of zero, and their logits
            are not read.
        label_smoothing: `e` above, in [0, 1].
        lse_square_scale: `s` above, the z-loss.
        logit_softcap: `c` above, as of Gemma 2.
        token_weights: float32 `[...]`: a factor of each token's loss, of any sign. "mean" divides
            by the number of targets all the same, and not by the sum of the weights. It gets no
            gradient: one that requires it is refused.
        inplace_backward: The backward writes the gradient over the logits, which saves its memory.
            Whatever needs the logits after that raises an error, as a second backward does. Logits
            must be rows that do not overlap, and no leaf. Not under `torch.compile`.

    Returns:
        float32, a scalar or `[...]`. A row with NaN or infinity, or with -inf alone, is NaN, as of
        PyTorch.

    Raises:
        RuntimeError: A wrong dtype, shape, device or option, naming the argument, what it must be
            and what it is. A target that the vocabulary does not have, on a CPU. A GPU cannot
            raise: the loss and the gradient of that row are NaN there.

    Source: Goodfellow et al., "Deep learning", 2016; label smoothing: Szegedy et al., 2016; z-loss:
    Chowdhery et al., "PaLM", 2022.
    """
    arguments = (
        *(logits, targets, token_weights, number_of_reduction(reduction), ignore_index),
        *(label_smoothing, lse_square_scale, logit_softcap),
    )
    if not needs_grad(logits, token_weights):
        return _cross_entropy(*arguments)
    _refuse_gradients(logits, token_weights, inplace_backward)
    return _differentiable_cross_entropy(*arguments, inplace_backward)


def number_of_reduction(reduction: str, op: str = "cross_entropy") -> int:
    """That by which the ops know it."""
    return number_of(op, "reduction", reduction, _REDUCTIONS)


def log_probs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    logit_softcap: Optional[float] = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_log_sum_exp: bool = False,
    return_is_greatest: bool = False,
) -> LogProbs:
    """Log-probabilities of tokens, and the entropy of what they could have been.

        z = x / temperature                 x = logits, or c * tanh(logits / c)
        log_prob = z[target] - log(sum(exp(z)))
        entropy  = -sum(p * log(p)),        p = softmax(z)

    For finite logits and -inf, the log-probability of a token has the bits that
    `gumbel_sample(logits, temperature=..., return_logprobs=True)` reports for it on the same
    device: probabilities are added up as integers in both.

    Args:
        logits: `[..., vocab]`, float16, bfloat16 or float32, with any row stride. The vocabulary is
            1 to 2^26.
        targets: `[...]`, int64 or int32: indices, or `ignore_index`.
        temperature: Above it, a normal float32. (A draw at temperature 0 has probability 1.)
        logit_softcap: `c` above.
        ignore_index: All results of tokens with this target are 0, or False, and so are their
            gradients. Their logits are not read.
        return_entropy, return_log_sum_exp, return_is_greatest: Also give these.

    Returns:
        `LogProbs(log_probs, entropy, log_sum_exp, is_greatest)`, each `[...]`, float32 or bool;
        None for those not asked for. All but `is_greatest` have gradients. A row with NaN or
        infinity, or with -inf alone, is NaN and False.

    Raises:
        RuntimeError: As `cross_entropy`. On a GPU, a row whose target the vocabulary does not have
            is NaN and False, `log_sum_exp` excepted.

    Source: Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    arguments = (logits, targets, temperature, logit_softcap, ignore_index, return_entropy)
    call = _differentiable_log_probs if needs_grad(logits) else _log_probs
    found, entropy, log_sum_exp, is_greatest = call(*arguments)
    return LogProbs(
        found,
        entropy if return_entropy else None,
        log_sum_exp if return_log_sum_exp else None,
        is_greatest if return_is_greatest else None,
    )


# Gradients.


def refuse_gradient_of_weights(op: str, token_weights) -> None:
    # What is no tensor, the op refuses.
    if isinstance(token_weights, torch.Tensor) and is_tracked(token_weights):
        raise RuntimeError(f"fuselage::{op}: `token_weights` has no gradient; detach it")


def _refuse_gradients(logits, token_weights, inplace_backward) -> None:
    op = "fuselage::cross_entropy"
    refuse_gradient_of_weights("cross_entropy", token_weights)
    if not inplace_backward:
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: `inplace_backward` is not supported under torch.compile, which reuses memory "
            "by itself"
        )
    if transforms_are_active():
        raise RuntimeError(f"{op}: `inplace_backward` is not supported by torch.func")
    if logits.is_leaf:
        raise RuntimeError(
            f"{op}: `inplace_backward` would write over `logits`, which is a leaf and needed again"
        )


def _save_cross_entropy(ctx, inputs, outputs):
    logits, targets, token_weights, *ctx.options, ctx.inplace_backward = inputs
    _, statistics, count = outputs
    ctx.save_for_backward(logits, targets, token_weights, statistics, count)


def _cross_entropy_backward(ctx, grad_out):
    logits, *saved = ctx.saved_tensors
    if not ctx.inplace_backward:
        return (_cross_entropy_bwd(grad_out, logits, *saved, *ctx.options),)
    logits = logits.detach()
    _cross_entropy_bwd_inplace(logits, grad_out, *saved, *ctx.options)
    mark_written(logits)
    return (logits,)


def _save_log_probs(ctx, inputs, outputs):
    logits, targets, *ctx.options, has_entropy = inputs
    _, entropy, _, is_greatest, statistics = outputs
    ctx.mark_non_differentiable(is_greatest, statistics)
    ctx.save_for_backward(logits, targets, entropy if has_entropy else None, statistics)


def _log_probs_backward(ctx, grad_log_probs, grad_entropy, grad_log_sum_exp, _):
    logits, targets, entropy, statistics = ctx.saved_tensors
    grads = (grad_log_probs, grad_entropy if entropy is not None else None, grad_log_sum_exp)
    return (_log_probs_bwd(*grads, logits, targets, entropy, statistics, *ctx.options),)


_differentiable_cross_entropy = differentiable(
    "cross_entropy", save=_save_cross_entropy, backward=_cross_entropy_backward, results=1
)
_differentiable_log_probs = differentiable(
    "log_probs", save=_save_log_probs, backward=_log_probs_backward, results=4
)

_LOGITS = Rule(("logits",), float32=("token_weights",))
register_autocast(_LOGITS, "cross_entropy", "cross_entropy_fwd", "log_probs", "log_probs_fwd")


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _floats(logits, *shape):
    return logits.new_empty(shape, dtype=torch.float32)


def _fake_loss(logits, reduction):
    return _floats(logits, *(logits.shape[:-1] if reduction == 0 else ()))


@fake_kernel_of("cross_entropy")
def _(logits, targets, token_weights, reduction, *options):
    return _fake_loss(logits, reduction)


@fake_kernel_of("cross_entropy_fwd")
def _(logits, targets, token_weights, reduction, *options):
    count = _floats(logits, 0 if reduction == 0 else 1)
    return _fake_loss(logits, reduction), floats_of_rows(logits, 2), count


def _fake_log_probs(logits, targets, temperature, logit_softcap, ignore_index, return_entropy):
    shape = logits.shape[:-1]
    return (
        _floats(logits, *shape),
        _floats(logits, *(shape if return_entropy else (0,))),
        _floats(logits, *shape),
        logits.new_empty(shape, dtype=torch.bool),
        floats_of_rows(logits, 2),
    )


register_fakes("log_probs", _fake_log_probs, results=4)
register_fake_gradients("cross_entropy_bwd")
register_fake_in_place("cross_entropy_bwd_")
register_fake_gradients("log_probs_bwd")
