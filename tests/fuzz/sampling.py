"""Cases of the sampling functions: tokens and log-probabilities against float64 scores."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import sample_reference as reference
import torch
from harness import normal
from torch import Tensor

from .draw import Draw
from .judge import Failure, same_bits, valid_call

# What a float32 score may lack, relative to the size of logit / temperature, and by its noise.
SCORE = 4 * 2.0**-24
NOISE = 2e-6

# What a float32 logit of a head may lack, relative to the sum of its products' sizes; a GPU splits
# float32 into parts of half precision.
HEAD = 1e-5

LOGPROB = (1e-6, 2e-7)  # absolute and relative, as in test_filters.py

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Call:
    """Arguments, and what they mean: float64 logits, and how far off float32 ones may be."""

    name: str
    given: dict
    logits: Tensor | None = None  # [batch, vocab], -inf where a token is forbidden
    slack: Tensor | float = 0.0  # [batch]

    def arguments(self) -> dict:
        return self.given


def _per_row(draw: Draw, name: str, batch: int, values, dtype=torch.float32):
    """A number, or a tensor `[1]` or `[batch]` of some."""
    kind = draw.weighted(number=60, one=20, batch=20)
    if kind == "number":
        return draw.choice(values)
    count = 1 if kind == "one" else batch
    numbers = torch.tensor([draw.choice(values) for _ in range(count)], dtype=dtype)
    return draw.lay_out(name, numbers)


def _options(draw: Draw, batch: int, vocab: int, *, ordinary: bool, filters: bool = True) -> dict:
    given: dict = {"num_samples": draw.choice((1, 1, 2, 5))}
    temperatures = (1.0, 0.7, 0.0, 2.5, 1e-3)
    if not ordinary and draw.chance(0.15):
        temperatures = (torch.finfo(torch.float32).tiny, 1e-45, 1e-30, 1e30, 0.0)
    given["temperature"] = _per_row(draw, "temperature", batch, temperatures)
    if filters:
        if draw.chance(0.3):
            ks = (1, 2, 5, max(1, vocab // 2), vocab + 7)
            given["top_k"] = _per_row(draw, "top_k", batch, ks, torch.int64)
        if draw.chance(0.3):
            given["top_p"] = _per_row(draw, "top_p", batch, (0.9, 0.5, 0.05, 1.0, 1e-6))
        if draw.chance(0.2):
            given["min_p"] = _per_row(draw, "min_p", batch, (0.1, 0.0, 1.0, 1e-3))
        given["return_logprobs"] = draw.chance(0.4)
    given["seed"] = draw.integer(-(2**63), 2**63 - 1)
    if draw.chance(0.6):
        given["seed"] = draw.lay_out("seed", _words(draw, batch))
    if draw.chance(0.6):
        given["offset"] = draw.lay_out("offset", _words(draw, batch), rows=True, written=True)
    if draw.chance(0.4):
        given["vocab_offset"] = draw.choice((1, 5, 16, 151_936, 2**33 + 3))
    return given


def _words(draw: Draw, batch: int) -> Tensor:
    """Seeds or steps: `[1]` or `[batch]`."""
    count = draw.choice((1, batch))
    return torch.tensor([draw.integer(0, 2**62) for _ in range(count)], dtype=torch.int64)


def _sizes(draw: Draw, ordinary: bool) -> tuple[int, int]:
    batch = draw.choice((1, 2, 3, draw.integer(1, 9)))
    vocab = draw.choice((1, 17, draw.integer(2, 300), draw.integer(2, 300), 4099))
    if not ordinary and draw.chance(0.05):
        batch = 0
    return batch, min(vocab, 300) if ordinary or batch > 4 else vocab


def make_gumbel(draw: Draw, *, ordinary: bool = False) -> Call:
    batch, vocab = _sizes(draw, ordinary)
    dtype = draw.choice(DTYPES)
    logits = normal((batch, vocab), dtype, "cpu", scale=draw.choice((1.0, 4.0, 0.0)))
    if not ordinary and batch * vocab and draw.chance(0.3):
        logits = _unusual(draw, logits)
    given = {"logits": draw.lay_out("logits", logits)}
    given |= _options(draw, batch, vocab, ordinary=ordinary)
    if draw.chance(0.3):
        form = draw.choice(((vocab,), (1, vocab), (batch, vocab)))
        bias = normal(form, draw.choice((dtype, torch.float32)), "cpu")
        if vocab > 1 and batch and not ordinary:
            bias[..., draw.integer(0, vocab - 1)] = -torch.inf
        given["bias"] = draw.lay_out("bias", bias)
    if draw.chance(0.3):
        words = (vocab + 31) // 32
        form = draw.choice(((words,), (1, words), (batch, words)))
        mask = torch.randint(-(2**31), 2**31, form).to(torch.int32)
        given["bitmask"] = draw.lay_out("bitmask", mask)
    exact = given["logits"].cpu().double()
    if "bias" in given:
        exact = exact + given["bias"].cpu().double()
    if "bitmask" in given:
        index = torch.arange(vocab)
        bits = (given["bitmask"].cpu()[..., index // 32] >> (index % 32)) & 1
        exact = torch.where(bits.bool(), exact, -torch.inf)
    exact = torch.where(exact.isnan(), -torch.inf, exact)
    # The sum with the bias is rounded to float32.
    sums = torch.where(exact.isfinite(), exact.abs(), 0.0) * ("bias" in given)
    return Call("gumbel_sample", given, exact, SCORE * sums.sum(-1) if vocab else 0.0)


def _unusual(draw: Draw, logits: Tensor) -> Tensor:
    kind = draw.weighted(huge=2, special=3, shifted=2, equal=1)
    if kind == "huge":
        most = min(1e37, torch.finfo(logits.dtype).max)
        return (logits.double() * 1e30).clamp(-most, most).to(logits.dtype)
    if kind == "shifted":
        return logits + draw.choice((-1e3, 1e3, 3e4))
    if kind == "equal":
        return torch.full_like(logits, draw.choice((-3.5, 0.0, 77.7)))
    logits = logits.clone()
    for _ in range(draw.integer(1, 4)):
        place = draw.integer(0, logits.numel() - 1)
        lowest = torch.finfo(logits.dtype).min
        infinite = torch.inf if draw.chance(0.2) else -torch.inf
        logits.view(-1)[place] = draw.choice((infinite, float("nan"), lowest))
    if draw.chance(0.2):
        logits[draw.integer(0, len(logits) - 1)] = draw.choice((-torch.inf, float("nan")))
    return logits


def make_head(draw: Draw, *, ordinary: bool = False, shard: bool = False) -> Call:
    batch, vocab = _sizes(draw, ordinary)
    dim = draw.choice((1, 8, 64, draw.integer(1, 200), draw.integer(1, 200)))
    dtype = draw.choice(DTYPES)
    hidden = normal((batch, dim), dtype, "cpu")
    weight = normal((vocab, dim), torch.float32, "cpu", scale=3 / dim**0.5)
    narrow = draw.chance(0.25)
    weight = weight.to(torch.float8_e4m3fn if narrow else dtype)
    given = {"hidden": draw.lay_out("hidden", hidden), "weight": draw.lay_out("weight", weight)}
    given |= _options(draw, batch, vocab, ordinary=ordinary, filters=not shard)
    sizes = given["hidden"].cpu().double().abs() @ given["weight"].cpu().to(torch.float64).abs().T
    exact = given["hidden"].cpu().double() @ given["weight"].cpu().to(torch.float64).T
    if narrow and draw.chance(0.6):
        scale = torch.rand(draw.choice((1, vocab))) + 0.5
        given["weight_scale"] = draw.lay_out("weight_scale", scale)
        scale = given["weight_scale"].cpu().double()  # which may be one value, expanded
        exact, sizes = exact * scale, sizes * scale
    if draw.chance(0.3):
        bias = normal((vocab,), draw.choice((dtype, torch.float32)), "cpu")
        given["bias"] = draw.lay_out("bias", bias)
        bias = given["bias"].cpu().double()
        exact, sizes = exact + bias, sizes + bias.abs()
    if draw.chance(0.3):
        given["logit_softcap"] = draw.choice((30.0, 2.0))
        exact = reference.soft_capped(exact, given["logit_softcap"])
    slack = HEAD * sizes.amax(-1) if vocab else 0.0
    return Call("lm_head_sample", given, exact, slack)


def of_row(value, row: int, missing):
    if value is None:
        return missing
    if isinstance(value, Tensor):
        return value.cpu()[row if len(value) > 1 else 0].item()
    return value


def check(kernel, draw: Draw, call: Call) -> None:
    """Tokens have the highest scores of what may be drawn, and log-probabilities are theirs."""
    given, logits = call.given, call.logits
    offset = given.get("offset")
    steps = None if offset is None else offset.clone()
    with valid_call("forward"):
        result = getattr(kernel, call.name)(**given)
    tokens, *logprobs = result if given.get("return_logprobs") else (result,)
    batch, samples = logits.shape[0], given["num_samples"]
    if tokens.shape != (batch, samples) or tokens.dtype != torch.int64:
        raise Failure("a wrong value", f"tokens are {tokens.dtype} {list(tokens.shape)}")
    if steps is not None and not torch.equal(offset, steps + 1):
        raise Failure("a wrong value", f"the offset went from {steps} to {offset}")
    for row in range(batch):
        values = tuple(part[row].cpu() for part in (tokens, *logprobs))
        _check_row(call, row, *values, step=of_row(steps, row, 0))
    same = given if steps is None else {**given, "offset": steps}
    with valid_call("the same call again"):
        repeated = getattr(kernel, call.name)(**same)
    repeated = repeated if given.get("return_logprobs") else (repeated,)
    for once, twice in zip((tokens, *logprobs), repeated, strict=True):
        same_bits(twice, once, "the result", "not the same bits again")


def _check_row(call: Call, row: int, tokens, logprobs=None, filtered=None, *, step: int) -> None:
    given, first = call.given, call.given.get("vocab_offset", 0)
    logits = call.logits[row]
    slack = call.slack[row].item() if isinstance(call.slack, Tensor) else call.slack
    temperature = of_row(given.get("temperature"), row, 1.0)
    if temperature < torch.finfo(torch.float32).tiny:
        temperature = 0  # as is documented
    seeds = given["seed"]
    per_row = isinstance(seeds, Tensor) and len(seeds) > 1
    key = (of_row(seeds, row, 0), step, 0 if per_row else row)
    if not (logits > -torch.inf).any():
        if (tokens != -1).any() or (logprobs is not None and (logprobs != -torch.inf).any()):
            raise Failure("a wrong value", f"row {row} has nothing to draw, got {tokens.tolist()}")
        return
    infinite = bool((logits == torch.inf).any())
    if infinite:  # all that can be drawn, and each as probable as any
        logits = torch.where(logits == torch.inf, 0.0, -torch.inf)
    if temperature == 0:
        _check_greedy(row, logits, tokens - first, slack, logprobs, filtered)
        return
    limits = [of_row(given.get(name), row, None) for name in ("top_k", "top_p", "min_p")]
    may, must = _sets(logits, temperature, *limits, slack)
    scaled = logits / temperature
    largest = scaled[must].abs().max().item()
    bound = SCORE * largest + 2 * slack / temperature + NOISE
    for sample, token in enumerate(tokens.tolist()):
        where = f"row {row} sample {sample}: token {token}"
        if not 0 <= token - first < len(logits) or not may[token - first]:
            raise Failure("a wrong value", f"{where} may not be drawn")
        noise = torch.from_numpy(reference.noise(range(first, first + len(logits)), *key, sample))
        scores = scaled + noise
        best = scores[must].max().item()
        if infinite:  # beside which no noise is left: as is documented
            best = torch.inf if token - first != must.nonzero()[0].item() else -torch.inf
        if scores[token - first].item() < best - bound:
            raise Failure(
                "a wrong value",
                f"{where} has score {scores[token - first].item():.9g}, the best is {best:.9g}",
            )
    if logprobs is not None:
        for name, got, sets in (("logprobs", logprobs, [logits > -torch.inf]),
                                ("filtered_logprobs", filtered, [may, must])):  # fmt: skip
            _check_logprobs(f"row {row}: {name}", got, scaled, tokens - first, sets, bound)


def _check_greedy(row, logits, tokens, slack, logprobs, filtered) -> None:
    best = logits.max().item()
    lowest = (logits >= best - 2 * slack).nonzero()[0].item()
    for token in tokens.tolist():
        right = 0 <= token < len(logits) and logits[token].item() >= best - 2 * slack
        if not right or (slack == 0 and token != lowest):
            raise Failure("a wrong value", f"row {row} at temperature 0: {token}, not {lowest}")
    for got in (logprobs, filtered):
        if got is not None and (got != 0).any():
            raise Failure("a wrong value", f"row {row} at temperature 0: {got.tolist()}, not 0")


def _sets(logits: Tensor, temperature, top_k, top_p, min_p, slack: float):
    """What may be drawn at most, and at least: a filter's bound is as exact as float32 sums."""
    sets = []
    for sign in (1, -1):
        loose = 1 + sign * (2e-6 + 4 * slack / temperature)
        p = None if top_p is None else min(1.0, max(1e-30, top_p * loose))
        m = None if min_p is None else min(1.0, max(0.0, min_p / max(loose, 1e-6)))
        keep = reference.allowed(logits, temperature, top_k, p, m)
        keep |= logits == logits.max()
        bound = logits[keep].min() - sign * 2 * slack
        sets.append(((logits >= bound) | (logits == logits.max())) & (logits > -torch.inf))
    return sets


def _check_logprobs(label, got: Tensor, scaled: Tensor, tokens, sets, bound: float) -> None:
    absolute, relative = LOGPROB
    for sample, token in enumerate(tokens.tolist()):
        value = got[sample].item()
        exact = [(scaled[token] - torch.logsumexp(scaled[keep], 0)).item() for keep in sets]
        low, high = min(exact), max(exact)
        error = absolute + relative * abs(low) + 2 * (bound - NOISE)
        if not low - error <= value <= high + error:
            raise Failure("a wrong value", f"{label} {value:.9g}, expected {low:.9g} to {high:.9g}")


# Shards


def check_shards(kernel, draw: Draw) -> None:
    """The shards of a head combine to the tokens of the whole, bit for bit."""
    call = make_head(draw, shard=True)
    given = call.given
    first = given.pop("vocab_offset", 0)
    vocab = call.logits.shape[1]
    if "offset" not in given:
        steps = torch.tensor([draw.integer(0, 2**40)], dtype=torch.int64)
        given["offset"] = draw.lay_out("offset", steps, rows=True, written=True)
    steps = given.pop("offset")
    ends = [0, *sorted(draw.integer(0, vocab) for _ in range(draw.integer(0, 3))), vocab]
    logprobs = draw.chance(0.5)
    shards = []
    with valid_call("shards"):
        for begin, end in itertools.pairwise(ends):
            part = dict(given)
            for name in ("weight", "bias", "weight_scale"):
                if name in part and (name != "weight_scale" or len(part[name]) > 1):
                    part[name] = part[name][begin:end]
            shards.append(
                kernel.lm_head_sample_shard(
                    **part,
                    vocab_offset=first + begin,
                    offset=steps.clone(),
                    return_log_sum_exp=logprobs,
                )
            )
        draw.random.shuffle(shards)
        combined = kernel.combine_shard_samples(shards, return_logprobs=logprobs)
        whole = kernel.lm_head_sample(
            **given, vocab_offset=first, offset=steps, return_logprobs=logprobs
        )
    tokens = combined[0] if logprobs else combined
    same_bits(tokens, whole[0] if logprobs else whole, "tokens of shards", "a wrong value")
    if logprobs:
        difference = (combined[1].double() - whole[1].double()).abs()
        same = combined[1] == whole[1]
        limit = 1e-5 + 1e-6 * whole[1].double().abs() + 2 * SCORE * _largest_scaled(call)
        if not (same | (difference <= limit)).all():
            raise Failure("a wrong value", f"log-probabilities of shards: {combined[1]} {whole[1]}")


def _largest_scaled(call: Call) -> float:
    """The size of the largest logit / temperature, whose rounding both ways have."""
    temperatures = call.given["temperature"]
    if not isinstance(temperatures, Tensor):
        temperatures = torch.tensor([temperatures])
    coldest = temperatures[temperatures > 0].double().min() if (temperatures > 0).any() else 1.0
    return (call.logits.abs().max() / coldest).item() if call.logits.numel() else 0.0
