"""The choice of experts for each token, as routers of mixture-of-experts models make it.

One kernel reads the logits once and writes weights and indices; one writes the gradient of the
logits. Arithmetic and weights are float32, whatever the logits are.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch

from ._arguments import number_of
from ._autocast import Rule, register_autocast
from ._autograd import differentiable, needs_grad
from ._fake import register_fake_gradients, register_fakes
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_topk_softmax = ops.topk_softmax.default
_topk_softmax_bwd = ops.topk_softmax_bwd.default

# The op takes scores as numbers: those of the enum in kernel_src/route/topk_softmax.h.
_SCORES = {"softmax": 0, "sigmoid": 1}


class TopK(NamedTuple):
    """The chosen experts of each token, the best first."""

    weights: torch.Tensor  # [..., k], float32
    indices: torch.Tensor  # [..., k], int64


def topk_softmax(
    logits: torch.Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Optional[torch.Tensor] = None,
    num_groups: Optional[int] = None,
    topk_groups: Optional[int] = None,
    renormalize: bool = True,
) -> TopK:
    """The `k` experts of each token and their weights: the router of a mixture of experts.

        s = softmax(logits) or sigmoid(logits)      over all experts, in float32
        indices = topk(s + bias, k)                 of the experts of the best groups, with groups
        weights = s[indices]                        / (sum(s[indices]) + e) where renormalised

    where `e` is 0, and 1e-20 of sigmoid.

    Of equal experts, and of equal groups, the one with the lower index is chosen; NaN is larger
    than any number, as in `torch.topk`. So indices are always valid, and no two of a token are
    equal. Without a bias, and without groups of sigmoid scores, experts are compared by their
    logits: these have the order of the scores, and differ where scores are rounded to one number.

    | routers | options |
    | --- | --- |
    | Mixtral, Qwen3-MoE, MiniMax; OLMoE and others with `norm_topk_prob` | none |
    | OLMoE, Qwen2-MoE, DeepSeek-V2 | `renormalize=False` |
    | DeepSeek-V2, group-limited | `num_groups`, `topk_groups` and `renormalize=False` |
    | DeepSeek-V3, GLM-4-MoE, dots.llm1, Kimi K2 | `score="sigmoid"`, `bias` and the groups |
    | MiniMax-M2 | `score="sigmoid"` and `bias` |
    | ERNIE 4.5, LongCat | `bias`; LongCat with `renormalize=False` |
    | gpt-oss, Granite-MoE, whose softmax is that of the chosen | none: it is the same |

    The caller adds what is added to the logits, such as the bias of gpt-oss, and multiplies the
    weights by a `routed_scaling_factor`. Not covered: Mistral 4 with more than one group, as its
    softmax groups count for their two largest; the 1e-6 of LFM2-MoE in place of `e`; the scores of
    DeepSeek-V4; routers that draw noise.

    Args:
        logits: `[..., experts]`, float16, bfloat16 or float32, with any row stride; 1 to 1024
            experts.
        k: Experts of a token, 1 to 64, and no more than may be chosen.
        score: "softmax" or "sigmoid".
        bias: `[experts]`, in the dtype of the logits or float32: added to the scores for the choice
            alone. It gets no gradient.
        num_groups: Experts are cut into as many groups of neighbours, and only those of
            `topk_groups` groups may be chosen. A group counts for its largest `s + bias` with
            softmax, as in DeepSeek-V2, and for the sum of its two largest with sigmoid, as in
            DeepSeek-V3.
        topk_groups: How many; it is given with `num_groups` alone.
        renormalize: Divide the weights by their sum.

    Returns:
        `TopK(weights, indices)`, float32 and int64 `[..., k]`, in descending order of `s + bias`.
        The weights have a gradient with respect to the logits, in their dtype. The backward reads
        them: a change in place makes it raise. With softmax, the weights of a row with NaN or
        infinity, or with -inf alone, are NaN.

    Raises:
        RuntimeError: A wrong dtype, shape, device or option, naming the argument, what it must be
            and what it is.

    Source: Jiang et al., "Mixtral of Experts", 2024; groups: DeepSeek-AI, "DeepSeek-V2", 2024;
    sigmoid and bias: DeepSeek-AI, "DeepSeek-V3", 2024.
    """
    number = number_of("topk_softmax", "score", score, _SCORES)
    if getattr(bias, "requires_grad", False):  # or no tensor, which the op refuses
        bias = bias.detach()
    call = _differentiable_topk_softmax if needs_grad(logits) else _topk_softmax
    return TopK(*call(logits, k, number, bias, num_groups, topk_groups, renormalize))


# Gradients.


def _save(ctx, inputs, outputs):
    logits, _, ctx.score, _, _, _, ctx.renormalize = inputs
    weights, indices = outputs
    ctx.mark_non_differentiable(indices)
    ctx.save_for_backward(logits, weights, indices)


def _backward(ctx, grad_weights, _):
    return (_topk_softmax_bwd(grad_weights, *ctx.saved_tensors, ctx.score, ctx.renormalize),)


_differentiable_topk_softmax = differentiable(
    "topk_softmax", save=_save, backward=_backward, results=2
)

register_autocast(Rule(("logits",), "bias"), "topk_softmax", "topk_softmax_fwd")


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _fake(logits, k, *options):
    shape = (*logits.shape[:-1], k)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int64),
    )


register_fakes("topk_softmax", _fake, results=2)
register_fake_gradients("topk_softmax_bwd")
