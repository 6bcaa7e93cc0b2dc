"""Attention of heads that are too wide for the kernels that PyTorch has for it, as decoders of
images have: one of 512 columns.

Flash attention takes 256, and what PyTorch has beside it takes 3.6 ms of 16384 tokens on an H200,
while products of that size take 0.9. Here cuBLAS multiplies, some queries at a time:

    logits = scale * (query @ key.T)    float32, as the product adds them up
    weights = softmax(logits)           rounded once
    out = weights @ value

The weights are made by the kernel that makes a cross-entropy and its gradient at once, which reads
each logit once: of a target without a probability the gradient is the softmax. That target is one
more column, with the lowest logit there is.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Optional

import torch
from torch.nn import functional

from .._autocast import define_op
from .._autograd import below_autograd
from .._fake import floats_of_rows
from .._head_parts import has_float32_products, parts
from .._ops import add_op_namespace_prefix, ops
from . import _probe, _source
from ._patch import Found, Match, replacement
from ._processors import in_place_of, processor_of, subclass_of

WHAT = "attention of wide heads"
_HELPER = "fuselage_attention"

# Columns of a head that flash attention takes.
_MOST_COLUMNS = 256
# Queries and keys, at least. On an H200, bfloat16, one head of 512: 1024 take PyTorch 0.09 ms and
# us 0.14, 2304 0.19 and 0.14, 16384 3.6 and 1.6, 65536 68 and 29.
_LEAST_TOKENS = 2048
# Bytes of logits at a time: 4096 queries of 16384 keys. With a quarter, these take 2.0 ms, as
# products of few rows leave multiprocessors idle; with four times as many 1.5.
_WORKSPACE = 272 << 20
_LOWEST = torch.finfo(torch.float32).min


def recognise_wide_attention(module: torch.nn.Module) -> Found:
    """Attention of diffusers with such heads, whose processor calls PyTorch's."""
    processor = processor_of(module)
    columns, heads = getattr(module, "inner_dim", None), getattr(module, "heads", None)
    if processor is None or not isinstance(columns, int) or not isinstance(heads, int):
        return None
    if columns <= _MOST_COLUMNS * heads:
        return None
    if (what := replacement(processor)) is not None:
        return Match(WHAT, processor, attribute="processor") if what == WHAT else None
    kind = _processor_kind(type(processor))
    return kind and Match(WHAT, in_place_of(processor, kind), attribute="processor")


@cache
def _processor_kind(kind: type) -> Optional[type]:
    """A subclass that calls ours; None of one that does not call PyTorch's by that name."""
    call = kind.__call__
    if getattr(call, "__globals__", {}).get("F") is not functional:
        return None
    call = _source.calling(call, "F.scaled_dot_product_attention", _HELPER, attention)
    return None if call is None else subclass_of(kind, call, WHAT)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    **options,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`."""
    is_plain = attn_mask is None and scale is None and not (dropout_p or is_causal or options)
    if not (is_plain and _is_faster(query, key, value)):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
        )
    if torch.compiler.is_compiling():
        return ops.attention_of_wide_heads.default(query, key, value)
    return attention_of_wide_heads(query, key, value)


def _is_faster(*given: torch.Tensor) -> bool:
    """Whether ours takes tensors, and less time. Without gradients alone."""
    if any(type(x) is not torch.Tensor or x.dim() != 4 for x in given):
        return False
    query, key, value = given
    if not _probe.is_on_gpu(query) or not _probe.taken(query, compiled=True):
        return False
    if query.dtype not in _probe.HALF or not _probe.in_inference(*given):
        return False
    if key.shape != (*query.shape[:2], key.shape[2], query.shape[3]):
        return False
    if value.shape[:3] != key.shape[:3] or query.shape[3] <= _MOST_COLUMNS:
        return False
    return min(query.shape[2], key.shape[2]) >= _LEAST_TOKENS and query.shape[:2].numel() > 0


def attention_of_wide_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """softmax(query @ key.T / sqrt(columns)) @ value, of `[batch, heads, tokens, columns]`."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    tokens, keys = query.shape[2], key.shape[2]
    padded = (keys + 1 + 15) // 16 * 16
    slices = parts(0, tokens, _WORKSPACE // (4 * padded))
    rows = slices[0].stop
    logits = query.new_empty((rows, padded), dtype=torch.float32)
    logits[:, keys] = _LOWEST
    weights = query.new_empty((rows, padded))
    # NOTE: oneDNN's products with AMX read past a row's end, up to a multiple of 32 columns, and
    # multiply with zero what may be NaN (PyTorch 2.13, on a CPU).
    weights[:, keys + 1 :] = 0
    targets = torch.full((rows,), keys, device=query.device)
    unused = floats_of_rows(logits), floats_of_rows(logits, 2)  # losses and their statistics
    one = logits.new_ones(())
    for head in itertools.product(*map(range, query.shape[:2])):
        for part in slices:
            n = part.stop - part.start
            _multiply(query[head][part], key[head], logits[:n, :keys])
            ops.cross_entropy_fwd_bwd_.default(
                *(weights[:n, : keys + 1], *(x[:n] for x in unused), logits[:n, : keys + 1]),
                *(targets[:n], None, one, None, -100, 0.0, 0.0, None),
            )
            torch.mm(weights[:n, :keys], value[head], out=out[head][part])
    return out


def _multiply(q: torch.Tensor, k: torch.Tensor, logits: torch.Tensor) -> None:
    """q @ k.T / sqrt(columns), in float32."""
    options = {"beta": 0, "alpha": q.shape[-1] ** -0.5}
    if has_float32_products(q):
        torch.addmm(logits, q, k.t(), **options, out_dtype=torch.float32, out=logits)
    else:
        torch.addmm(logits, q.float(), k.float().t(), **options, out=logits)


def _op(query, key, value):
    with below_autograd():
        return attention_of_wide_heads(query, key, value)


define_op("attention_of_wide_heads(Tensor query, Tensor key, Tensor value) -> Tensor", _op)


@torch.library.register_fake(add_op_namespace_prefix("attention_of_wide_heads"))
def _fake(query, key, value):
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
