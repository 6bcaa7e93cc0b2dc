"""Sampling from a language-model head, whose logits are never in memory, and from given logits.

The draw is Gumbel-max: the token with the largest score, which is its logit over the temperature
plus noise. The noise is a function of seed, step and token, so a row draws the same token at any
batch size and in any cut of the vocabulary. From the same logits, a CPU and a GPU draw the same.
The filters (top_k, top_p, min_p) sort nothing, and never part equal logits. `examples/generate.py`
generates text.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch

from ._arguments import refuse_wrong_kinds
from ._autocast import Product, Rule, register_autocast
from ._fake import fake_kernel_of
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_gumbel_sample = ops.gumbel_sample.default
_lm_head_sample = ops.lm_head_sample.default
_lm_head_sample_shard = ops.lm_head_sample_shard.default

Number = Union[float, torch.Tensor]


class Sample(NamedTuple):
    """Drawn tokens and their log-probabilities, all `[batch, num_samples]`."""

    tokens: torch.Tensor
    logprobs: torch.Tensor  # of the distribution at the row's temperature
    filtered_logprobs: torch.Tensor  # of what top_k, top_p and min_p leave of it


class ShardSample(NamedTuple):
    """The draw of one shard of the vocabulary, for `combine_shard_samples`."""

    scores: torch.Tensor  # [batch, num_samples], float32
    tokens: torch.Tensor  # [batch, num_samples], int64, of the whole vocabulary
    logits: torch.Tensor  # [batch, num_samples], over temperature, finite where they are
    log_sum_exp: torch.Tensor  # [batch], of all of the shard's logits over temperature; or [0]


def lm_head_sample(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    temperature: Number = 1.0,
    top_k: Union[int, torch.Tensor, None] = None,
    top_p: Optional[Number] = None,
    min_p: Optional[Number] = None,
    num_samples: int = 1,
    seed: Union[int, torch.Tensor, None] = None,
    offset: Optional[torch.Tensor] = None,
    generator: Optional[torch.Generator] = None,
    weight_scale: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    logit_softcap: Optional[float] = None,
    vocab_offset: int = 0,
    return_logprobs: bool = False,
) -> Union[torch.Tensor, Sample]:
    """Tokens drawn from `softmax(logits / temperature)` of a language-model head.

        logits = softcap(hidden @ weight.T * weight_scale + bias)    softcap(v) = c * tanh(v / c)
        token  = argmax(logits / temperature + g),    g = -log(-log(u)), u uniform in (0, 1)

    in one pass over the weights. Without filters and log-probabilities the logits are never in
    memory; with filters they are written once, in float32, and with log-probabilities on GPUs other
    than Hopper. Accumulation is in float32.

    The noise `g` is made by Philox4x32-10 of the row's seed, offset and stream, the number of the
    sample and the index of the token, and of nothing else: a row draws the same token at any batch
    size and in any cut of the vocabulary. Of each 16 tokens whose indices differ in the last four
    bits alone, one has the largest `g`, made of a `u` of 32 bits for -log(u) / 16 in place of
    -log(u); the others add to that the -log(u) of a `u` of their own. All `g` are independent.

    The sum of logit and noise is a float32. Where the largest logits over the temperature are
    beyond 10^6, the noise loses digits that count; from 10^8 on none is left, and of equal logits
    the lowest index is drawn, as it is of infinite ones.

    Args:
        hidden: `[batch, dim]`, float16, bfloat16 or float32, with any row stride.
        weight: `[vocab, dim]`, in the dtype of `hidden` or float8_e4m3fn, with any row stride. The
            vocabulary is at most 2^26, here and in `gumbel_sample`.
        temperature: At least 0; a number, or float32 `[batch]` or `[1]`. 0 takes the largest
            logit, of equals the lowest index, whatever the filters are. A subnormal number is 0;
            in a tensor a negative one and NaN are, too.
        top_k: The number of largest logits that may be drawn, where 0 or less is all; an int, or
            int64 `[batch]` or `[1]`.
        top_p: Of what top_k leaves, the fewest largest logits whose probabilities sum up to top_p
            of it, in (0, 1]; a number, or float32 `[batch]` or `[1]`.
        min_p: Of what is left, those at least min_p times as probable as the most probable, in
            [0, 1]; a number, or float32 `[batch]` or `[1]`. No filter parts equal logits: those
            equal to the last one that may be drawn may be drawn, too.
        num_samples: Independent draws of each row, 1 to 256.
        seed: None draws one from `generator`. An int, or int64 `[1]` or `[batch]` on the device. A
            seed that all rows share gives each a stream of its own, by its number; of `[batch]`
            seeds, rows with equal ones draw with equal noise.
        offset: int64 `[1]` or `[batch]` on the device: the step. It is read, and advanced by one,
            on the device, so that the replay of a CUDA graph draws anew. None, with a seed, is
            step 0: the same call draws the same tokens.
        generator: Where there is no seed, what draws it: a `torch.Generator` of the device, or
            None, the device's default one, which `torch.manual_seed` seeds. The replay of a CUDA
            graph draws anew, of a generator that the graph has registered. `torch.compile` takes
            the default one only, as of PyTorch's own operators.
        weight_scale: float32 `[1]` or `[vocab]`, for weights in float8_e4m3fn. Beside those, a
            Hopper GPU rounds what is below 2^-32 of the largest element of a bfloat16 row, by
            2^-40 of that at most.
        bias: `[vocab]`, in the dtype of `hidden` or float32.
        logit_softcap: `c` above, as of Gemma 2.
        vocab_offset: Index of the weight's first row, where it is a part of a larger head.
        return_logprobs: Also return the log-probability of each token.

    Returns:
        int64 `[batch, num_samples]`, or with `return_logprobs` a tuple `(tokens, logprobs,
        filtered_logprobs)`: the latter in float32, under the distribution at the row's temperature,
        and under what the filters leave of it. At temperature 0 both are 0. Logits of -inf and NaN
        are never drawn; a row without any other gives -1, with a log-probability of -inf. Not
        differentiable.

    Raises:
        RuntimeError: A wrong dtype, shape, device or number, naming the argument, what it must be
            and what it is. Numbers in tensors are not checked.
        TypeError: A seed that is no int64 number, or a generator that is none.

    Source: Gumbel, "Statistical theory of extreme values", 1954; Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", 2011; top_p: Holtzman et al., 2020; min_p: Nguyen et al., 2024.
    """
    seed, offset = _noise("lm_head_sample", hidden, seed, offset, generator)
    tokens, *logprobs = _lm_head_sample(
        *(hidden, weight, weight_scale, bias, logit_softcap, seed, offset),
        *_number(temperature, 1.0),
        *(*_number(top_k), *_number(top_p), *_number(min_p)),
        *(num_samples, vocab_offset, return_logprobs),
    )
    return Sample(tokens, *logprobs) if return_logprobs else tokens


def gumbel_sample(
    logits: torch.Tensor,
    *,
    temperature: Number = 1.0,
    top_k: Union[int, torch.Tensor, None] = None,
    top_p: Optional[Number] = None,
    min_p: Optional[Number] = None,
    num_samples: int = 1,
    seed: Union[int, torch.Tensor, None] = None,
    offset: Optional[torch.Tensor] = None,
    generator: Optional[torch.Generator] = None,
    bias: Optional[torch.Tensor] = None,
    bitmask: Optional[torch.Tensor] = None,
    vocab_offset: int = 0,
    return_logprobs: bool = False,
) -> Union[torch.Tensor, Sample]:
    """Tokens drawn from `softmax((logits + bias) / temperature)`, as by `lm_head_sample`.

    The same logits, seed and offset give the same tokens as there, on a CPU and on a GPU alike.

    Args:
        logits: `[batch, vocab]`, float16, bfloat16 or float32, with any row stride.
        bias: Added to the logits, in float32: `[vocab]` or `[batch or 1, vocab]`, in the dtype of
            `logits` or float32. -inf forbids a token.
        bitmask: int32 `[ceil(vocab / 32)]` or `[batch or 1, ceil(vocab / 32)]`. A token `i` may be
            drawn where bit `i % 32` of word `i // 32` is set, as xgrammar and others make it.
        temperature, top_k, top_p, min_p, num_samples, seed, offset, generator, vocab_offset,
            return_logprobs: As in `lm_head_sample`. The filters see what bias and bitmask leave.

    Returns:
        As `lm_head_sample`.

    Raises:
        RuntimeError: As `lm_head_sample`.
    """
    seed, offset = _noise("gumbel_sample", logits, seed, offset, generator)
    tokens, *logprobs = _gumbel_sample(
        *(logits, bias, bitmask, seed, offset),
        *_number(temperature, 1.0),
        *(*_number(top_k), *_number(top_p), *_number(min_p)),
        *(num_samples, vocab_offset, return_logprobs),
    )
    return Sample(tokens, *logprobs) if return_logprobs else tokens


def lm_head_sample_shard(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    vocab_offset: int,
    temperature: Number = 1.0,
    num_samples: int = 1,
    seed: Union[int, torch.Tensor],
    offset: Optional[torch.Tensor],
    weight_scale: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    logit_softcap: Optional[float] = None,
    return_log_sum_exp: bool = False,
) -> ShardSample:
    """What one rank of a tensor-parallel head contributes to a draw: the best of its shard.

    Each rank calls this for its rows of the weight, gathers the results of all, and gets from
    `combine_shard_samples` the tokens that `lm_head_sample` would draw from the whole weight.

    Args:
        hidden, weight, temperature, num_samples, weight_scale, bias, logit_softcap: As in
            `lm_head_sample`; weight, weight_scale and bias are those of the shard.
        vocab_offset: Index of the shard's first row in the whole weight.
        seed, offset: As in `lm_head_sample`, and equal on all ranks; the seed is not None.
        return_log_sum_exp: Also give what the log-probabilities need.

    Returns:
        `(scores, tokens, logits, log_sum_exp)`: the largest score, its token, and the token's
        logit over temperature, each `[batch, num_samples]`; and the log of the sum of e to all
        logits over temperature, `[batch]`, -inf at temperature 0, and empty unless asked for.

    Raises:
        RuntimeError: As `lm_head_sample`.
        TypeError: As `lm_head_sample`, and for a seed that is None.
    """
    op = "lm_head_sample_shard"
    if seed is None:
        raise TypeError(f"fuselage::{op}: `seed` must be that of all ranks, got None")
    seed, offset = _noise(op, hidden, seed, offset)
    return ShardSample(
        *_lm_head_sample_shard(
            *(hidden, weight, weight_scale, bias, logit_softcap, seed, offset),
            *_number(temperature, 1.0),
            *(num_samples, vocab_offset, return_log_sum_exp),
        )
    )


def combine_shard_samples(
    shards: Sequence[ShardSample], *, return_logprobs: bool = False
) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The tokens that a draw from the whole head gives, of those of its shards, bit for bit.

        token = that of the largest score, of equals the lowest

    Args:
        shards: The results of `lm_head_sample_shard`, in any order, on one device.
        return_logprobs: Also return the log-probability of each token, of shards with
            `return_log_sum_exp`.

    Returns:
        int64 `[batch, num_samples]`, or with `return_logprobs` `(tokens, logprobs)`.

    Raises:
        RuntimeError: No shards, or log-probabilities of shards without `log_sum_exp`.
        TypeError: Shards that are no sequence of such results.
    """
    try:
        return _combine(shards, return_logprobs)
    except (AttributeError, IndexError, TypeError):
        refuse_wrong_kinds()
        for shard in shards:
            if not isinstance(shard, ShardSample):
                raise TypeError(
                    "fuselage::combine_shard_samples: `shards` must be results of "
                    f"lm_head_sample_shard, got {type(shard).__name__}"
                ) from None
        raise


def _combine(shards, return_logprobs):
    if len(shards) == 0:
        raise RuntimeError("fuselage::combine_shard_samples: `shards` must not be empty")
    scores, tokens, logits = (
        torch.stack([shard[i] for shard in shards]) for i in range(len(ShardSample._fields) - 1)
    )
    nothing = torch.iinfo(torch.int64).max
    best = (scores == scores.amax(0)) & (tokens >= 0)
    token = torch.where(best, tokens, nothing).amin(0)
    none = token == nothing
    token = token.masked_fill(none, -1)
    if not return_logprobs:
        return token
    sums = torch.stack([shard.log_sum_exp for shard in shards])
    if sums.shape[1:] != scores.shape[1:2]:
        raise RuntimeError(
            "fuselage::combine_shard_samples: `return_logprobs` needs shards that were made with "
            "return_log_sum_exp=True"
        )
    logit = torch.where(tokens == token, logits, 0.0).sum(0)
    total = torch.logsumexp(sums, 0)[:, None]
    # At temperature 0 the sums are -inf. An infinite logit is as far from itself as any.
    logprob = torch.where((total == -torch.inf) | (logit == total), 0.0, logit - total)
    return token, logprob.masked_fill(none, -torch.inf)


def _number(value, default=None):
    """`(tensor, number)` of an option, as the ops take it."""
    return (value, default) if isinstance(value, torch.Tensor) else (None, value)


def _noise(op, x, seed, offset, generator=None) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Seed and offset as the ops take them."""
    if seed is None:
        if offset is not None:
            raise RuntimeError(f"fuselage::{op}: `offset` needs a `seed`")
        # A tensor of each call's own: nothing is kept that another mode of PyTorch could have made.
        try:
            seed = torch.randint(
                2**63 - 1, (1,), dtype=torch.int64, device=x.device, generator=generator
            )
        except (AttributeError, TypeError):
            _check_generator(op, generator)
            refuse_wrong_kinds()
            raise
        return seed, None
    if generator is not None:
        raise RuntimeError(f"fuselage::{op}: `generator` must be None where there is a `seed`")
    if not isinstance(seed, torch.Tensor):
        number = _whole(op, seed)
        try:
            seed = torch.full((1,), number, dtype=torch.int64, device=x.device)
        except AttributeError:
            refuse_wrong_kinds()
            raise
    return seed, offset


def _whole(op, seed) -> int:
    """The number of a seed that is no tensor."""
    try:
        number = seed if isinstance(seed, int) else operator.index(seed)
        if -(2**63) <= number < 2**63:
            return number
    except TypeError:
        pass
    raise TypeError(
        f"fuselage::{op}: `seed` must be an int in [-2^63, 2^63) or an int64 tensor, got {seed!r}"
    )


def _check_generator(op, generator) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"fuselage::{op}: `generator` must be a torch.Generator, got {type(generator).__name__}"
        )


_PRODUCT = Product(
    ("hidden", "weight"), "bias", float32=("weight_scale", "temperature", "top_p", "min_p")
)
_LOGITS = Rule(("logits",), "bias", float32=("temperature", "top_p", "min_p"))
register_autocast(_PRODUCT, "lm_head_sample", "lm_head_sample_shard")
register_autocast(_LOGITS, "gumbel_sample")


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _fake_results(x, num_samples, return_logprobs):
    shape = (x.shape[0], num_samples)
    floats = shape if return_logprobs else (0,)
    return (
        x.new_empty(shape, dtype=torch.int64),
        x.new_empty(floats, dtype=torch.float32),
        x.new_empty(floats, dtype=torch.float32),
    )


@fake_kernel_of("gumbel_sample")
@fake_kernel_of("lm_head_sample")
def _(x, *options):
    *_, num_samples, _, return_logprobs = options
    return _fake_results(x, num_samples, return_logprobs)


@fake_kernel_of("lm_head_sample_shard")
def _(hidden, *options):
    *_, num_samples, _, return_log_sum_exp = options
    tokens, _, _ = _fake_results(hidden, num_samples, False)
    sums = (hidden.shape[0] if return_log_sum_exp else 0,)
    return (
        hidden.new_empty(tokens.shape, dtype=torch.float32),
        tokens,
        hidden.new_empty(tokens.shape, dtype=torch.float32),
        hidden.new_empty(sums, dtype=torch.float32),
    )
