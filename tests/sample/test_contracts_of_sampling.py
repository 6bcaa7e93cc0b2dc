"""Errors and compilation of the sampling operators."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def inputs(device, dtype=torch.float32):
    hidden = torch.randn(3, 16, device=device).to(dtype)
    weight = torch.randn(50, 16, device=device).to(dtype)
    return hidden, weight


BAD_HEADS = [
    ({"hidden": lambda t: t[0]}, "`hidden` must have shape [batch, dim], got [16]"),
    ({"hidden": lambda t: t.double()}, "`hidden` must be float16, bfloat16 or float32, got Double"),
    ({"weight": lambda t: t[:, 1:]}, "`weight` must have shape [vocab, 16]"),
    ({"weight": lambda t: t.half()}, "`weight` must be float32 as `hidden`, or float8_e4m3fn"),
    ({"bias": torch.zeros(49)}, "`bias` must have shape [50], got [49]"),
    ({"bias": torch.zeros(50).half()}, "`bias` must be float32 as `hidden`, or float32"),
    ({"weight_scale": torch.ones(1)}, "`weight_scale` must be None unless"),
    ({"logit_softcap": -1.0}, "`logit_softcap` must be positive, got -1"),
    ({"logit_softcap": math.nan}, "`logit_softcap` must be positive, got nan"),
]
BAD_OPTIONS = [
    ({"num_samples": 0}, "`num_samples` must be in [1, 256], got 0"),
    ({"num_samples": 257}, "`num_samples` must be in [1, 256], got 257"),
    ({"temperature": -0.5}, "`temperature` must be in [0, 3e38), got -0.5"),
    ({"temperature": math.nan}, "`temperature` must be in [0, 3e38), got nan"),
    ({"temperature": math.inf}, "`temperature` must be in [0, 3e38), got inf"),
    ({"temperature": torch.ones(2)}, "`temperature` must have shape [1] or [3]"),
    ({"temperature": torch.ones(3).half()}, "`temperature` must be float32, got Half"),
    ({"top_k": torch.ones(3)}, "`top_k` must be int64, got Float"),
    ({"top_p": 0.0}, "`top_p` must be in (0, 1], got 0"),
    ({"top_p": 1.5}, "`top_p` must be in (0, 1], got 1.5"),
    ({"top_p": math.nan}, "`top_p` must be in (0, 1], got nan"),
    ({"min_p": math.nan}, "`min_p` must be in [0, 1], got nan"),
    ({"min_p": -0.1}, "`min_p` must be in [0, 1], got -0.1"),
    ({"min_p": torch.ones(4)}, "`min_p` must have shape [1] or [3]"),
    ({"vocab_offset": -1}, "`vocab_offset` must be in [0, 2^34"),
    ({"seed": torch.zeros(2, dtype=torch.int64)}, "`seed` must have shape [1] or [3]"),
    ({"seed": torch.zeros(1)}, "`seed` must be int64, got Float"),
    ({"seed": 1, "offset": torch.zeros(1)}, "`offset` must be int64, got Float"),
    ({"offset": torch.zeros(1, dtype=torch.int64)}, "`offset` needs a `seed`"),
]
BAD_LOGITS = [
    ({"bias": torch.zeros(2, 50)}, "`bias` must have shape [50] or [3 or 1, 50], got [2, 50]"),
    ({"bitmask": torch.zeros(3, 1, dtype=torch.int32)}, "`bitmask` must have shape [2] or"),
    ({"bitmask": torch.zeros(3, 2)}, "`bitmask` must be int32, got Float"),
]


def on(device, options):
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}


def identify(value):
    """The message alone: a function's name has its address, which differs between processes."""
    return value[:60] if isinstance(value, str) else ""


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("change", "message"), BAD_HEADS + BAD_OPTIONS, ids=identify)
def test_bad_input_of_the_head(fuselage, device, change, message):
    hidden, weight = inputs(device)
    given = {"hidden": hidden, "weight": weight}
    for name, value in on(device, change).items():
        given[name] = value(given[name]) if callable(value) else value
    with pytest.raises(RuntimeError, match=r"fuselage.*" + re.escape(message)):
        fuselage.lm_head_sample(**given)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("change", "message"), BAD_OPTIONS + BAD_LOGITS, ids=identify)
def test_bad_input_of_logits(fuselage, device, change, message):
    logits = torch.randn(3, 50, device=device)
    with pytest.raises(RuntimeError, match=r"fuselage.*" + re.escape(message)):
        fuselage.gumbel_sample(logits, **on(device, change))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("seed", [1.5, 1j, 2**63, -(2**63) - 1, "7", [7]], ids=str)
def test_a_seed_that_is_no_int64_is_refused(fuselage, device, seed):
    hidden, weight = inputs(device)
    message = r"`seed` must be an int in \[-2\^63, 2\^63\) or an int64 tensor, got "
    message += re.escape(repr(seed))
    with pytest.raises(TypeError, match="fuselage::gumbel_sample: " + message):
        fuselage.gumbel_sample(hidden, seed=seed)
    with pytest.raises(TypeError, match="fuselage::lm_head_sample: " + message):
        fuselage.lm_head_sample(hidden, weight, seed=seed)
    with pytest.raises(TypeError, match="fuselage::lm_head_sample_shard: " + message):
        fuselage.lm_head_sample_shard(hidden, weight, seed=seed, offset=None, vocab_offset=0)


@pytest.mark.parametrize("wrong", [None, 1j, [1.0], "text"], ids=str)
def test_arguments_of_the_wrong_kind_beside_a_seed(fuselage, device, wrong):
    """The seed's tensor is made on the device of what is no tensor."""
    _, weight = inputs(device)
    calls = {
        "gumbel_sample: `logits`": lambda: fuselage.gumbel_sample(wrong, seed=3),
        "lm_head_sample: `hidden`": lambda: fuselage.lm_head_sample(wrong, weight, seed=3),
        "lm_head_sample_shard: `hidden`": lambda: fuselage.lm_head_sample_shard(
            wrong, weight, seed=3, offset=None, vocab_offset=0
        ),
    }
    for words, call in calls.items():
        with pytest.raises(TypeError, match=f"fuselage::{words} must be a tensor, got"):
            call()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("return_logprobs", [False, True])
@pytest.mark.parametrize("wrong", [None, 1.5, 1j, "text", [None], [1.0], [()], {1: 2}], ids=str)
def test_shards_of_the_wrong_kind(fuselage, wrong, return_logprobs):
    message = "fuselage::combine_shard_samples: `shards` must be .*, got"
    with pytest.raises(TypeError, match=message):
        fuselage.combine_shard_samples(wrong, return_logprobs=return_logprobs)


def test_integers_of_other_kinds_are_seeds(fuselage, device):
    logits = torch.zeros(2, 4096, device=device)
    expected = fuselage.gumbel_sample(logits, seed=7)
    assert torch.equal(fuselage.gumbel_sample(logits, seed=np.int64(7)), expected)
    for seed in (2**63 - 1, -(2**63)):
        tensor = torch.tensor([seed], device=device)
        expected = fuselage.gumbel_sample(logits, seed=tensor)
        assert torch.equal(fuselage.gumbel_sample(logits, seed=seed), expected)


def test_a_shard_needs_the_seed_of_all_ranks(fuselage, device):
    with pytest.raises(TypeError, match="lm_head_sample_shard: `seed` must be that of all ranks"):
        fuselage.lm_head_sample_shard(*inputs(device), vocab_offset=0, seed=None, offset=None)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_tensors_of_another_device_are_named(fuselage, device):
    hidden, weight = inputs(device)
    for name in ("weight", "temperature", "seed"):
        given = {"weight": weight, "temperature": torch.ones(3, device=device)}
        given["seed"] = torch.zeros(1, dtype=torch.int64, device=device)
        given[name] = given[name].cpu()
        with pytest.raises(RuntimeError, match=f"`{name}` must be on the device of `hidden`"):
            fuselage.lm_head_sample(hidden, **given)


def test_nothing_is_written_before_the_checks_pass(fuselage, device):
    offset = torch.tensor([4], device=device)
    with pytest.raises(RuntimeError, match="top_p"):
        fuselage.gumbel_sample(torch.randn(3, 50, device=device), seed=1, offset=offset, top_p=0)
    assert offset.item() == 4


# Compilation


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_calls_draw_the_same(fuselage, device, fresh_dynamo):
    _, weight = inputs(device)

    def step(hidden, weight, seed, offset):
        tokens = fuselage.lm_head_sample(
            hidden * 2, weight, seed=seed, offset=offset, top_k=7, temperature=0.9
        )
        more = fuselage.gumbel_sample(hidden @ weight.T, seed=seed, offset=offset, top_p=0.9)
        result = fuselage.lm_head_sample(
            hidden, weight, seed=seed, offset=offset, return_logprobs=True
        )
        return tokens + 1, more, *result

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (3, 5, 8):
        hidden = torch.randn(batch, 16, device=device)
        seed = torch.tensor([3], device=device)
        offsets = [torch.tensor([6], device=device) for _ in range(2)]
        expected = step(hidden, weight, seed, offsets[0])
        with torch.compiler.set_stance("fail_on_recompile" if batch > 3 else "default"):
            got = compiled(hidden, weight, seed, offsets[1])
        assert offsets[0].item() == offsets[1].item() == 9
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


def test_the_default_noise_is_drawn_anew_by_compiled_code(fuselage, device, fresh_dynamo):
    compiled = torch.compile(
        lambda logits: fuselage.gumbel_sample(logits), fullgraph=True, backend="aot_eager"
    )
    logits = torch.zeros(1, 2**20, device=device)
    tokens = {compiled(logits).item() for _ in range(5)}
    tokens |= {fuselage.gumbel_sample(logits).item() for _ in range(5)}
    assert len(tokens) == 10


def test_combination_compiles(fuselage, device, fresh_dynamo):
    hidden, weight = inputs(device)

    def draw(hidden, weight, seed, offset):
        shards = [
            fuselage.lm_head_sample_shard(
                hidden,
                weight[begin : begin + 25],
                vocab_offset=begin,
                seed=seed,
                offset=offset.clone(),
                return_log_sum_exp=True,
            )
            for begin in (0, 25)
        ]
        return fuselage.combine_shard_samples(shards, return_logprobs=True)

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    seed, offset = torch.tensor([3], device=device), torch.tensor([6], device=device)
    for a, b in zip(compiled(hidden, weight, seed, offset), draw(hidden, weight, seed, offset)):
        assert torch.equal(a, b)


def test_meta_tensors_have_the_right_shapes(fuselage):
    hidden, weight = inputs("meta")
    result = fuselage.lm_head_sample(
        hidden, weight, seed=torch.zeros(1, dtype=torch.int64, device="meta"), return_logprobs=True
    )
    assert [t.shape for t in result] == [(3, 1)] * 3 and result.tokens.dtype == torch.int64


def test_a_step_without_rows_and_data_is_not_taken(fuselage, device):
    """With a fake offset, which a GPU's kernel must not be launched for."""
    with FakeTensorMode():
        offset = torch.zeros(1, dtype=torch.int64, device=device)
        given = {"seed": offset.clone(), "offset": offset}
        assert fuselage.gumbel_sample(torch.zeros(0, 9, device=device), **given).shape == (0, 1)
    assert fuselage.gumbel_sample(torch.zeros(2, 9, device=device), seed=1).shape == (2, 1)
