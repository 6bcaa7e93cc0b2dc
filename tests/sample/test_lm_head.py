"""lm_head_sample: the logits it draws from, its invariances, shards, and log-probabilities."""

from __future__ import annotations

import itertools

import pytest
import sample_reference as reference
import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[-1])
each_half_dtype = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"]
)


def make(batch, vocab, dim, dtype, device):
    hidden = torch.randn(batch, dim).to(device, dtype)
    weight = (torch.randn(vocab, dim) * 3 / dim**0.5).to(device, dtype)
    return hidden, weight


def exact_logits(hidden, weight, *, scale=None, bias=None, cap=None) -> torch.Tensor:
    logits = hidden.cpu().double() @ weight.cpu().to(torch.float64).T
    if scale is not None:
        logits = logits * scale.cpu().double()
    if bias is not None:
        logits = logits + bias.cpu().double()
    return reference.soft_capped(logits, cap)


def check_draws(tokens, logits, *, temperature=1.0, seed=0, offset=0, vocab_offset=0, slack):
    """Every token has the best score in float64, up to the error of float32 logits."""
    tokens = tokens.cpu()
    for row in range(tokens.shape[0]):
        for sample in range(tokens.shape[1]):
            scores = reference.scores(
                logits[row], temperature, seed, offset, row, sample, vocab_offset
            )
            chosen = scores[tokens[row, sample] - vocab_offset]
            assert chosen >= scores.max() - slack, (row, sample, scores.max() - chosen)


# Float32 sums of a few hundred products of size 1/10, and their rounding.
SLACK = 2e-5

SHAPES = [
    (1, 1, 1),
    (1, 130, 8),
    (2, 300, 7),
    (3, 127, 65),
    (8, 1000, 64),
    (9, 257, 100),
    (17, 515, 136),
    (33, 128, 72),
    (65, 400, 48),
]


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draws_of_all_sizes(fuselage, device, dtype, shape):
    hidden, weight = make(*shape, dtype, device)
    tokens = fuselage.lm_head_sample(hidden, weight, seed=4, num_samples=2, temperature=0.8)
    assert tokens.shape == (shape[0], 2) and tokens.dtype == torch.int64
    check_draws(tokens, exact_logits(hidden, weight), seed=4, temperature=0.8, slack=SLACK)


@each_dtype
def test_greedy_is_argmax(fuselage, device, dtype):
    hidden, weight = make(6, 3000, 128, dtype, device)
    weight[2000] = weight[1000]  # whose logits are equal
    hidden[0] = weight[1000] * 50
    tokens = fuselage.lm_head_sample(hidden, weight, temperature=0.0)
    logits = exact_logits(hidden, weight)
    gap = logits.max(1).values - logits.gather(1, tokens.cpu())[:, 0]
    assert (gap <= SLACK * logits.abs().max()).all()
    assert tokens[0].item() == 1000
    rows = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], device=device)
    some = fuselage.lm_head_sample(hidden, weight, temperature=rows, seed=1)
    assert torch.equal(some[::2], tokens[::2])
    assert torch.equal(some[1::2], fuselage.lm_head_sample(hidden, weight, seed=1)[1::2])
    given = logits.float().to(device)
    assert torch.equal(fuselage.gumbel_sample(given, temperature=0.0)[:, 0], given.argmax(1))


@pytest.mark.kernels_ci
@each_dtype
def test_bias_and_soft_cap(fuselage, device, dtype):
    hidden, weight = make(4, 600, 64, dtype, device)
    for bias_dtype in {dtype, torch.float32}:
        bias = torch.randn(600).to(device, bias_dtype)
        logits = exact_logits(hidden, weight, bias=bias, cap=2.5)
        options = {"bias": bias, "logit_softcap": 2.5, "seed": 2}
        tokens = fuselage.lm_head_sample(hidden, weight, num_samples=3, **options)
        check_draws(tokens, logits, seed=2, slack=SLACK)
        result = fuselage.lm_head_sample(hidden, weight, return_logprobs=True, **options)
        expected = torch.log_softmax(logits, -1).gather(1, result.tokens.cpu())
        assert (result.logprobs.cpu() - expected).abs().max() < SLACK


@each_dtype
def test_float8_weights(fuselage, device, dtype):
    hidden, weight = make(5, 400, 80, dtype, device)
    narrow = weight.to(torch.float8_e4m3fn)
    for scale in (None, torch.tensor([0.7]), torch.rand(400) + 0.5):
        on_device = None if scale is None else scale.to(device)
        tokens = fuselage.lm_head_sample(
            hidden, narrow, weight_scale=on_device, seed=3, num_samples=2
        )
        check_draws(tokens, exact_logits(hidden, narrow, scale=scale), seed=3, slack=SLACK)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = values.float().isfinite()
    one = torch.ones(1, 1, dtype=dtype, device=device)
    result = [
        fuselage.lm_head_sample_shard(
            one,
            values[i : i + 1, None].to(device),
            vocab_offset=0,
            temperature=0.0,
            seed=0,
            offset=torch.zeros(1, dtype=torch.int64, device=device),
        ).scores.item()
        for i in range(256)
    ]
    expected = torch.where(finite, values.float(), -torch.inf)
    assert torch.equal(torch.tensor(result), expected)


FLOAT8_SHAPES = [
    # batch, vocab, dim, scale, options
    (1, 1000, 64, "row", {}),
    (5, 1000, 200, "one", {"logit_softcap": 3.0}),
    (16, 300, 77, None, {"bias": torch.float32}),
    (64, 1000, 130, "row", {"bias": "as hidden", "logit_softcap": 20.0}),
    (130, 515, 64, "row", {}),
    (256, 257, 144, "one", {"bias": "as hidden"}),
    (5, 5003, 64, "row", {"bias": torch.float32, "logit_softcap": 3.0}),
]


@each_dtype
@pytest.mark.parametrize("shape", FLOAT8_SHAPES, ids=lambda shape: str(shape[:3]))
def test_float8_weights_of_all_sizes(fuselage, device, dtype, shape):
    """Shards and rows of hidden that begin anywhere, and gaps of NaN after the rows of weights."""
    batch, vocab, dim, scaled, options = shape
    hidden, weight = make(batch, vocab, dim, dtype, device)
    hidden = torch.nn.functional.pad(hidden, (1, 2), value=torch.nan)[:, 1 : dim + 1]
    narrow = torch.full((vocab, dim // 16 * 16 + 32), torch.nan).to(torch.float8_e4m3fn).to(device)
    narrow[:, :dim] = weight.to(torch.float8_e4m3fn)
    narrow = narrow[:, :dim]
    scales = {"row": torch.rand(vocab) + 0.5, "one": torch.tensor([0.7]), None: None}
    scale = None if scaled is None else scales[scaled].to(device)
    cap, bias = options.get("logit_softcap"), options.get("bias")
    if bias is not None:
        bias = torch.randn(vocab).to(device, dtype if bias == "as hidden" else bias)
    logits = exact_logits(hidden, narrow, scale=scale, bias=bias, cap=cap)
    draws = {"temperature": 0.9, "seed": 6, "vocab_offset": 7}
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    head = {"bias": bias, "logit_softcap": cap, "weight_scale": scale}
    result = fuselage.lm_head_sample_shard(hidden, narrow, offset=offset, **head, **draws)
    check_draws(result.tokens, logits, slack=SLACK * logits.abs().max(), **draws)
    whole = fuselage.lm_head_sample(hidden, narrow, seed=6, return_logprobs=True, **head)
    expected = torch.log_softmax(logits, -1).gather(1, whole.tokens.cpu())
    assert (whole.logprobs.cpu() - expected).abs().max() < SLACK * logits.abs().max()


@each_dtype
def test_float8_beside_hidden_of_any_size(fuselage, device, dtype):
    """Rows of hidden far apart, and elements of one row: some kernels bring them to float16."""
    hidden, weight = make(6, 500, 96, dtype, device)
    far = 8 if dtype == torch.float16 else 60
    hidden[0] *= 2.0**-far
    hidden[1] *= 2.0**far
    hidden[2, 5], weight[:, 5] = 2.0**14, 0.0
    hidden[3] = 0.0
    hidden[4, ::2] *= 2.0**-12
    if dtype != torch.float16:
        hidden[5] *= 2.0**-133  # subnormal
    narrow = weight.to(torch.float8_e4m3fn)
    shard = fuselage.lm_head_sample_shard(
        hidden,
        narrow,
        vocab_offset=0,
        temperature=0.0,
        seed=0,
        offset=torch.zeros(1, dtype=torch.int64, device=device),
    )
    logits = exact_logits(hidden, narrow)
    # 96 roundings to float32 of at most the sum of the sizes, or of subnormal numbers.
    slack = 96 * (exact_logits(hidden.abs(), narrow.float().abs()).amax(1) * 2.0**-24 + 2.0**-149)
    drawn = logits.gather(1, shard.tokens.cpu())[:, 0]
    assert ((shard.scores[:, 0].cpu() - drawn).abs() <= slack).all()
    assert (drawn >= logits.amax(1) - 2 * slack).all()


@each_dtype
def test_float8_rows_of_nan_are_not_drawn(fuselage, device, dtype):
    hidden, weight = make(20, 700, 96, dtype, device)
    narrow = weight.to(torch.float8_e4m3fn)
    narrow.view(torch.uint8)[::3, 5] = 0x7F
    narrow.view(torch.uint8)[3::6, 95] = 0xFF
    tokens = fuselage.lm_head_sample(hidden, narrow, seed=1, num_samples=2)
    assert (tokens % 3 != 0).all()
    logits = exact_logits(hidden, narrow)
    check_draws(tokens, logits.nan_to_num(nan=-torch.inf), seed=1, slack=SLACK)


# What a draw does not depend on


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("dim", [256, 100])
@pytest.mark.parametrize("narrow", [False, True], ids=["", "float8"])
def test_the_batch_does_not_matter(fuselage, device, dtype, dim, narrow):
    """Nor does the temperature make two near logits equal: their bits are compared."""
    hidden, weight = make(130, 900, dim, dtype, device)
    if narrow:
        weight = weight.to(torch.float8_e4m3fn)
    options = {"vocab_offset": 0, "return_log_sum_exp": True}

    def shard(rows):
        return fuselage.lm_head_sample_shard(
            hidden[rows],
            weight,
            seed=torch.arange(130, device=device)[rows],
            offset=torch.arange(130, device=device)[rows].contiguous(),
            **options,
        )

    everything = shard(slice(None))
    for rows in (slice(0, 1), slice(5, 9), slice(3, 20), slice(60, 100), slice(64, 130)):
        for name, some, of_all in zip(everything._fields, shard(rows), everything):
            assert torch.equal(some, of_all[rows]), name


@each_dtype
@pytest.mark.parametrize("batch", [1, 9, 33, 65, 130, 300])
def test_many_tiles_draw_as_from_their_logits(fuselage, device, dtype, batch):
    """Log-probabilities take the logits through memory: another kernel draws from the same bits."""
    vocab = 40003 if torch.device(device).type == "cuda" else 9000
    hidden, weight = make(batch, vocab, 128, dtype, device)
    temperature = torch.linspace(2.0, 0.0, batch, device=device)
    for options in ({}, {"logit_softcap": 5.0, "bias": torch.randn(vocab).to(device)}):
        options = {**options, "temperature": temperature, "num_samples": 3, "seed": 6}
        tokens = fuselage.lm_head_sample(hidden, weight, **options)
        through_memory = fuselage.lm_head_sample(hidden, weight, return_logprobs=True, **options)
        assert torch.equal(tokens, through_memory.tokens)
    logits = exact_logits(hidden[:1], weight, cap=5.0, bias=options["bias"])[0] / 2.0
    expected = torch.log_softmax(logits, -1)[tokens[0].cpu()]
    assert (through_memory.logprobs[0].cpu() - expected).abs().max() < SLACK


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("narrow", [False, True], ids=["", "float8"])
@pytest.mark.parametrize(
    "cuts", [(500,), (3, 130, 131, 700), (1, 6, 13, 16, 999), (128, 256)], ids=str
)
def test_shards_combine_to_the_token_of_the_whole(fuselage, device, dtype, cuts, narrow):
    hidden, weight = make(19, 1000, 72, dtype, device)
    if narrow:
        weight = weight.to(torch.float8_e4m3fn)
    temperature = torch.ones(19, device=device)
    temperature[3] = 0.0
    options = {"temperature": temperature, "num_samples": 3, "bias": torch.randn(1000).to(device)}
    whole = fuselage.lm_head_sample(hidden, weight, seed=7, return_logprobs=True, **options)
    direct = fuselage.lm_head_sample(hidden, weight, seed=7, **options)
    assert torch.equal(direct, whole.tokens)
    edges = [0, *cuts, 1000]

    def shards_with(return_log_sum_exp):
        return [
            fuselage.lm_head_sample_shard(
                hidden,
                weight[begin:end],
                **{**options, "bias": options["bias"][begin:end]},
                vocab_offset=begin,
                seed=torch.tensor([7], device=device),
                offset=torch.zeros(1, dtype=torch.int64, device=device),
                return_log_sum_exp=return_log_sum_exp,
            )
            for begin, end in itertools.pairwise(edges)
        ]

    shards, without = shards_with(True), shards_with(False)
    tokens, logprobs = fuselage.combine_shard_samples(shards[::-1], return_logprobs=True)
    assert torch.equal(tokens, direct)
    assert (logprobs - whole.logprobs).abs().max() < 2e-6
    for shard, other in zip(shards, without):
        assert torch.equal(shard.scores, other.scores) and torch.equal(shard.logits, other.logits)
    assert torch.equal(fuselage.combine_shard_samples(without), direct)
    with pytest.raises(RuntimeError, match="return_log_sum_exp"):
        fuselage.combine_shard_samples(without, return_logprobs=True)
    with pytest.raises(RuntimeError, match="must not be empty"):
        fuselage.combine_shard_samples([])


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.float32, 96), (torch.float32, 33)]
    + [(dtype, dim) for dtype in (torch.float16, torch.bfloat16) for dim in (100, 33)],
    ids=lambda value: str(value).split(".")[-1],
)
def test_the_tiles_of_the_batch_do_not_matter(fuselage, device, dtype, dim):
    """Tiles have 8 to 128 rows of the batch, of which some are greedy."""
    hidden, weight = make(300, 259, dim, dtype, device)
    seed = torch.arange(300, device=device)
    temperature = (seed % 4).float()
    options = {"vocab_offset": 1, "num_samples": 2}

    def shard(rows):
        return fuselage.lm_head_sample_shard(
            hidden[:rows],
            weight,
            seed=seed[:rows],
            offset=torch.ones(rows, dtype=torch.int64, device=device),
            temperature=temperature[:rows],
            **options,
        )

    everything = shard(300)
    logits = exact_logits(hidden, weight)
    for row in range(0, 300, 37):
        for sample, token in enumerate(everything.tokens[row].tolist()):
            scores = logits[row]
            if row % 4 != 0:
                scores = reference.scores(logits[row], row % 4, row, 1, 0, sample, 1)
            assert scores[token - 1] >= scores.max() - SLACK, (row, sample)
    for rows in (1, 16, 63, 64, 65, 127, 128, 129):
        for name, some, of_all in zip(everything._fields, shard(rows), everything):
            assert torch.equal(some, of_all[:rows]), (rows, name)


@each_half_dtype
@pytest.mark.parametrize("dim", [96, 100, 33])
def test_the_tiles_of_float8_do_not_matter(fuselage, device, dtype, dim):
    hidden, weight = make(140, 259, dim, dtype, device)
    narrow = weight.to(torch.float8_e4m3fn)
    scale = (torch.rand(259) + 0.5).to(device)

    def shard(rows):
        return fuselage.lm_head_sample_shard(
            hidden[:rows],
            narrow,
            weight_scale=scale,
            seed=3,
            offset=torch.zeros(1, dtype=torch.int64, device=device),
            vocab_offset=0,
        )

    everything = shard(140)
    check_draws(everything.tokens, exact_logits(hidden, narrow, scale=scale), seed=3, slack=SLACK)
    for rows in (1, 16, 32, 33, 65, 129):
        for name, some, of_all in zip(everything._fields, shard(rows), everything):
            assert torch.equal(some, of_all[:rows]), (rows, name)


@each_dtype
def test_equal_scores_of_two_shards_go_to_the_lowest_index(fuselage, device, dtype):
    hidden, weight = make(2, 64, 32, dtype, device)
    weight = weight[:32].repeat(2, 1)
    options = {"temperature": 0.0, "seed": 0}
    whole = fuselage.lm_head_sample(hidden, weight, **options)
    shards = [
        fuselage.lm_head_sample_shard(
            hidden,
            weight[begin : begin + 32],
            vocab_offset=begin,
            **options,
            offset=torch.zeros(1, dtype=torch.int64, device=device),
        )
        for begin in (32, 0)
    ]
    assert (whole < 32).all() and torch.equal(fuselage.combine_shard_samples(shards), whole)


@each_dtype
def test_layouts(fuselage, device, dtype):
    """Rows with gaps, from anywhere in memory, and copies of columns."""
    hidden, weight = make(5, 300, 64, dtype, device)
    expected = fuselage.lm_head_sample(hidden, weight, seed=1, num_samples=2)

    def wider(x, before, after):
        padded = torch.nn.functional.pad(x, (before, after), value=torch.nan)
        return padded[:, before : before + x.shape[1]]

    for before, after in ((0, 8), (8, 0), (1, 2), (3, 0)):
        for h, w in (
            (wider(hidden, before, after), weight),
            (hidden, wider(weight, before, after)),
        ):
            got = fuselage.lm_head_sample(h, w, seed=1, num_samples=2)
            assert torch.equal(got, expected), (before, after)
    transposed = fuselage.lm_head_sample(hidden, weight.T.contiguous().T, seed=1, num_samples=2)
    assert torch.equal(transposed, expected)
    logits = torch.randn(5, 301, device=device).to(dtype)
    contiguous = fuselage.gumbel_sample(logits[:, 1:].contiguous(), seed=1, top_p=0.9)
    assert torch.equal(fuselage.gumbel_sample(logits[:, 1:], seed=1, top_p=0.9), contiguous)


# Log-probabilities, filters, edges


@each_dtype
def test_filters_and_log_probabilities(fuselage, device, dtype):
    hidden, weight = make(4, 2000, 96, dtype, device)
    options = {"top_k": 50, "top_p": 0.9, "temperature": 1.5}
    tokens, logprobs, filtered = (
        t.cpu()
        for t in fuselage.lm_head_sample(
            hidden, weight, seed=5, num_samples=16, return_logprobs=True, **options
        )
    )
    logits = exact_logits(hidden, weight)
    for row in range(4):
        keep = reference.allowed(logits[row], **options)
        assert keep[tokens[row]].all()
        p = reference.probabilities(logits[row], 1.5)
        kept = torch.where(keep, p, 0.0)
        assert (logprobs[row] - p[tokens[row]].log()).abs().max() < SLACK
        assert (filtered[row] - (kept / kept.sum())[tokens[row]].log()).abs().max() < SLACK


def of_kinds(vocab: int) -> torch.Tensor:
    """A weight of which each column is the logits of the hidden that is one there."""
    flat = torch.randn(vocab)
    likely = flat.clone()
    likely[torch.randperm(vocab)[:40]] += torch.linspace(6.0, 14.0, 40)
    strip = flat.clone()
    strip[320:336] += 20.0  # so that the maxima of the others are not among the largest logits
    kinds = [3 * flat, (2 * flat).round(), torch.zeros(vocab), 100 * flat, likely]
    kinds += [torch.linspace(-12.0, 4.0, vocab), 1e-4 * flat, strip]
    return torch.stack(kinds, 1)


FILTERS = [
    *({"top_k": k} for k in (1, 40, 96, 97, 256, 257, 3000)),
    *({"top_p": p} for p in (1e-6, 0.3, 0.9, 0.9999)),
    *({"min_p": p} for p in (1.0, 0.3, 1e-3, 1e-12)),
    {"top_k": 30, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.1},
    {"top_p": 0.6, "min_p": 0.2},
    {"top_k": 200, "top_p": 0.99, "min_p": 0.01},
]


@each_half_dtype
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_draw_as_from_all_logits(fuselage, device, dtype, options):
    """A filtered row is drawn from the few logits that can matter; log-probabilities want all."""
    vocab = 70_001 if device == "cuda" else 5001
    weight = of_kinds(vocab).to(device, dtype)
    # None of 200 neighbours may be drawn, among which are most of the largest of one kind.
    bias = torch.zeros(vocab, device=device)
    bias[300:310] = bias[vocab - 210 : vocab - 10] = -torch.inf
    hidden = torch.eye(8, device=device, dtype=dtype)
    for temperature in (1.0, 0.3, torch.tensor([2.0, 0.0] * 4, device=device)):
        for given in ({}, {"bias": bias, "logit_softcap": 30.0}):
            given = {"temperature": temperature, "num_samples": 4, "seed": 6, **given, **options}
            tokens = fuselage.lm_head_sample(hidden, weight, **given)
            of_all = fuselage.lm_head_sample(hidden, weight, return_logprobs=True, **given)
            assert torch.equal(tokens, of_all.tokens), (tokens != of_all.tokens).nonzero()
            assert ("bias" not in given) or not bias[tokens].isinf().any()
    # A row alone, and many of them, of which those below a floor are not written.
    temperature = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0, 0.7, 1.0] * 36, device=device)
    for batch in (20, 64, 288) if device == "cuda" else (20,):
        given = {"num_samples": 4, "temperature": temperature[:batch], **options}
        seed = torch.arange(batch, device=device) // 8
        rows = hidden.repeat(batch // 8 + 1, 1)[:batch]
        many = fuselage.lm_head_sample(rows, weight, seed=seed, **given)
        of_all = fuselage.lm_head_sample(rows, weight, seed=seed, return_logprobs=True, **given)
        assert torch.equal(many, of_all.tokens), (batch, (many != of_all.tokens).nonzero())
        given["temperature"] = temperature[batch - 1 : batch]
        alone = fuselage.lm_head_sample(rows[-1:], weight, seed=seed[-1:], **given)
        assert torch.equal(many[-1:], alone), batch


@pytest.mark.parametrize("narrow", [False, True], ids=["", "float8"])
@each_half_dtype
def test_filters_advance_the_offset_of_all_rows_once(fuselage, device, dtype, narrow):
    """However many launches they take, and whichever kernel draws a row."""
    vocab = 70_001 if device == "cuda" else 5001
    for batch in (1, 5, 64, 300) if device == "cuda" else (1, 20):
        hidden, weight = make(batch, vocab, 64, dtype, device)
        if narrow:
            weight = weight.to(torch.float8_e4m3fn)
        for options in ({"top_k": 5}, {"top_k": 3000}, {"top_p": 0.9}, {"top_k": 9, "min_p": 0.1}):
            offsets = [torch.full((1,), 7, device=device) for _ in range(2)]
            for step in (8, 9):
                tokens, of_all = (
                    fuselage.lm_head_sample(
                        hidden,
                        weight,
                        seed=3,
                        offset=offset,
                        num_samples=2,
                        return_logprobs=logprobs,
                        **options,
                    )
                    for offset, logprobs in zip(offsets, (False, True), strict=True)
                )
                assert torch.equal(tokens, of_all.tokens), (batch, options)
                assert offsets[0].item() == offsets[1].item() == step, (batch, options)


@each_half_dtype
def test_the_head_draws_as_from_its_logits(fuselage, device, dtype):
    """Where few logits are candidates, and where all are, which is more than the queues hold."""
    vocab = 70_001 if device == "cuda" else 5001
    steep = torch.linspace(0.0, 400.0, vocab)
    weight = torch.cat([of_kinds(vocab)[:, :6], torch.stack([steep, steep.flip(0)], 1)], 1)
    weight = weight.to(device, dtype)
    logits = weight.T.float()
    hidden = torch.eye(8, device=device, dtype=dtype)
    temperatures = torch.tensor([1.0, 0.3, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 30.0], device=device)
    for batch in (8, 40, 128, 256) if device == "cuda" else (8,):
        rows = torch.arange(batch, device=device) % 8
        seed = torch.arange(batch, device=device) // 8
        for given in ({}, {"num_samples": 4, "vocab_offset": 5}):
            given = {"temperature": temperatures.repeat(29)[:batch], **given}
            tokens = fuselage.lm_head_sample(hidden[rows], weight, seed=seed, **given)
            assert torch.equal(tokens, fuselage.gumbel_sample(logits[rows], seed=seed, **given))
        given = {"seed": seed, "logit_softcap": 30.0}
        tokens = fuselage.lm_head_sample(hidden[rows], weight, **given)
        of_all = fuselage.lm_head_sample(hidden[rows], weight, return_logprobs=True, **given)
        assert torch.equal(tokens, of_all.tokens), batch


def test_filters_of_each_row_advance_its_offset(fuselage, device):
    """Whichever way a row is drawn; none of its options may be that of another row."""
    vocab = 70_001 if device == "cuda" else 5001
    weight = of_kinds(vocab).to(device, torch.bfloat16)
    hidden = torch.eye(8, device=device, dtype=torch.bfloat16)
    options = {
        "top_k": torch.tensor([5, 0, 3000, 50, 257, -1, 7, 100], device=device),
        "top_p": torch.tensor([1.0, 1.0, 0.5, 0.9, 1.0, 0.9, 0.0, 0.3], device=device),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 1e-4, 0.0, 0.5, 0.0, 0.0], device=device),
        "temperature": torch.tensor([1.0, 1.5, 0.5, 1.0, 0.0, 1.0, 2.0, 1.0], device=device),
    }
    for names in (("top_k", "top_p", "min_p"), ("top_p",), ("top_p", "min_p"), ("min_p",)):
        for rows in (list(range(8)), [0], [3], [5, 1, 2, 3, 4, 0, 7, 6] * 5):
            given = {n: options[n][rows] for n in (*names, "temperature")}
            count = len(rows)
            for size in {1, count}:
                seed = torch.arange(size, device=device)
                offsets = [torch.arange(size, device=device) + 5 for _ in range(2)]
                for _ in range(2):
                    draws = [
                        fuselage.lm_head_sample(
                            hidden[rows],
                            weight,
                            seed=seed,
                            offset=offset,
                            return_logprobs=logprobs,
                            **given,
                        )
                        for offset, logprobs in zip(offsets, (False, True), strict=True)
                    ]
                    assert torch.equal(draws[0], draws[1].tokens), (names, rows, size)
                for offset in offsets:
                    assert torch.equal(offset.cpu(), torch.arange(size) + 7), (names, rows, size)


def test_at_temperature_zero_log_probabilities_are_zero(fuselage, device):
    hidden, weight = make(3, 200, 32, torch.float32, device)
    result = fuselage.lm_head_sample(hidden, weight, temperature=0.0, top_k=5, return_logprobs=True)
    assert not result.logprobs.any() and not result.filtered_logprobs.any()


@pytest.mark.kernels_ci
def test_empties(fuselage, device):
    weight = torch.randn(10, 4, device=device)
    for options in ({}, {"top_k": 3}, {"return_logprobs": True}):
        result = fuselage.lm_head_sample(weight[:0], weight, num_samples=3, **options)
        tokens = result if isinstance(result, torch.Tensor) else result.tokens
        assert tokens.shape == (0, 3) and tokens.dtype == torch.int64
        result = fuselage.lm_head_sample(weight[:2], weight[:0], num_samples=3, **options)
        tokens = result if isinstance(result, torch.Tensor) else result.tokens
        assert tokens.tolist() == [[-1] * 3] * 2
        result = fuselage.gumbel_sample(weight[:2, :0], **options)
        tokens = result if isinstance(result, torch.Tensor) else result.tokens
        assert tokens.tolist() == [[-1]] * 2
    # No columns: all logits are zero.
    tokens = fuselage.lm_head_sample(weight[:2, :0], weight[:, :0], seed=1)
    zeros = torch.zeros(2, 10, device=device)
    assert torch.equal(tokens, fuselage.gumbel_sample(zeros, seed=1))


def test_large_and_small_temperatures(fuselage, device):
    logits = torch.randn(2, 1000, device=device)
    greedy = logits.argmax(1)
    for temperature in (1e-45, 1e-38, 1e-30, 1e-6):
        tokens = fuselage.gumbel_sample(logits, temperature=temperature, seed=1, top_p=0.9)
        assert torch.equal(tokens[:, 0], greedy), temperature
    hot = fuselage.gumbel_sample(logits, temperature=1e30, seed=1, num_samples=100)
    flat = fuselage.gumbel_sample(torch.zeros_like(logits), seed=1, num_samples=100)
    assert torch.equal(hot, flat)
