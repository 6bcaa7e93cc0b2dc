"""Rows of the most columns that are accepted, and of more, which are refused.

2^31 - 2^16 columns, and of logits 2^26.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import gradients, half_an_ulp, on_devices, terms_of_gradients
from operators import OPERATORS
from torch._subclasses import FakeTensorMode

MOST = (1 << 31) - (1 << 16)
MOST_LOGITS = 1 << 26
PERIOD = 1 << 13  # a divisor of MOST
TILES = MOST // PERIOD

# A thread of a kernel adds up half a million vectors in turn, which loses up to 1e-4 of a sum. What
# is not computed, or in the wrong place, is off by all of it.
TOLERANCE = 1e-3

# Of packed rows, which have two columns for one of a result, the activations' rows stand.
PLAIN = [op for op in OPERATORS if op.width == 1 and op.name != "grouped_poly_norm"]


def has_memory(gibibytes: int) -> bool:
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(0).total_memory >= gibibytes << 30


def tiled(t: torch.Tensor, start: int) -> torch.Tensor:
    """As many columns as there may be, of those of `t`, from `start` elements off a boundary on."""
    buffer = torch.empty(MOST + start, dtype=t.dtype, device=t.device)[start:]
    buffer.view(TILES, PERIOD).copy_(t.view(1, PERIOD).expand(TILES, PERIOD))
    return buffer.view(*t.shape[:-1], MOST)


def check_tiles(actual: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor, label) -> None:
    bound = half_an_ulp(expected, actual.dtype) + TOLERANCE * torch.maximum(terms, expected.abs())
    tiles = actual.view(TILES, PERIOD)
    for begin in range(0, TILES, 4096):
        error = (tiles[begin : begin + 4096].double() - expected.view(1, PERIOD)).abs()
        bad = ~(error <= bound.view(1, PERIOD))
        assert not bad.any(), f"{label}: {bad.sum().item()} wrong from tile {begin} on"


# NOTE: not collected where there is less memory than an operator of this size takes.
if has_memory(130):

    @pytest.mark.slow
    @pytest.mark.gpu
    @pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.name)
    @pytest.mark.parametrize("start", [0, 1], ids=["aligned", "misaligned"])
    def test_longest_row(fuselage, op, start):
        """A row that repeats itself has the means of its period, and so its results."""
        short = op.inputs((1, PERIOD), torch.bfloat16, "cuda")
        outputs = op.run_reference(short, {})
        terms = op.run_output_terms(short, {})
        grads = {n: torch.randn_like(t).bfloat16() for n, t in outputs.items()}
        double = {n: None if t is None else t.double() for n, t in short.items()}
        names = [n for n in op.differentiable(short) if op.vector_size(n, PERIOD) == PERIOD]
        expected = gradients(
            op.run_reference,
            double,
            {"dtype": torch.bfloat16},
            {n: g.double() for n, g in grads.items()},
            names,
        )
        grad_terms = terms_of_gradients(op, short, {}, grads)
        try:
            inputs = {
                n: tiled(t, start) if t is not None and t.shape[-1] == PERIOD else t
                for n, t in short.items()
            }
            with torch.no_grad():
                results = op.run(fuselage, inputs, {})
            for n, t in outputs.items():
                check_tiles(results.pop(n), t, terms.get(n, t.abs()), n)
            grad_outs = {n: tiled(g, start) for n, g in grads.items()}

            def call(leaves, _):
                return op.run(fuselage, leaves, {})

            actual = gradients(call, inputs, {}, grad_outs, names)
            for n in names:
                zero = torch.zeros_like(expected[n])
                check_tiles(actual.pop(n), expected[n], grad_terms.get(n, zero), f"grad_{n}")
        finally:
            inputs = results = grad_outs = actual = None
            torch.cuda.empty_cache()

    @pytest.mark.slow
    @pytest.mark.gpu
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_longest_row_of_logits(fuselage, temperature):
        most = MOST_LOGITS
        logits = torch.full((1, most), float("-inf"), dtype=torch.bfloat16, device="cuda")
        for token in (0, 1 << 25, most - 1):
            logits[0, token] = 1.0
            assert fuselage.gumbel_sample(logits, temperature=temperature).item() == token
            logits[0, token] = float("-inf")
        del logits
        torch.cuda.empty_cache()

    # (hidden, weight, columns): each form of the head that takes the longest rows, and the longest
    # of the one that takes fewer than 2^24 columns.
    FORMS = {
        "wgmma": (torch.bfloat16, torch.bfloat16, (1 << 24) - 8),
        "mma": (torch.bfloat16, torch.bfloat16, MOST),
        "unaligned": (torch.bfloat16, torch.bfloat16, MOST - 1),
        "float8": (torch.float16, torch.float8_e4m3fn, MOST),
        "floats": (torch.float32, torch.float32, MOST),
    }
    HIDDEN = torch.tensor([[1, 2, 3, -1, 2], [3, -2, 1, 2, -3]]) / 2
    WEIGHT = torch.tensor([[2, -1, 1, 3, -2], [1, 1, -2, 2, 3], [-3, 2, 2, 1, 1]]) / 2

    @pytest.mark.slow
    @pytest.mark.gpu
    @pytest.mark.parametrize("form", FORMS)
    def test_longest_rows_of_a_head(fuselage, form):
        """All but five columns are zero, and the last is not. NOTE: slow, as one block does it."""
        dtype, weight_dtype, dim = FORMS[form]
        hidden = torch.zeros(2, dim, dtype=dtype, device="cuda")
        weight = torch.zeros(3, dim, dtype=weight_dtype, device="cuda")
        for i, column in enumerate((0, 7, dim // 2 + 1, dim - 9, dim - 1)):
            hidden[:, column] = HIDDEN[:, i].to(dtype).cuda()
            weight[:, column] = WEIGHT[:, i].to(weight_dtype).cuda()
        logits = (HIDDEN @ WEIGHT.T).double()
        drawn = fuselage.lm_head_sample(hidden, weight, seed=1, return_logprobs=True)
        expected = logits.log_softmax(-1).gather(-1, drawn.tokens.cpu())
        torch.testing.assert_close(drawn.logprobs.cpu().double(), expected, rtol=0, atol=1e-5)
        token = fuselage.lm_head_sample(hidden, weight, temperature=0.0, seed=1)
        assert torch.equal(token[:, 0].cpu(), logits.argmax(-1))
        del hidden, weight
        torch.cuda.empty_cache()

    @pytest.mark.slow
    @pytest.mark.gpu
    def test_longest_head(fuselage):
        """apply_rotary takes it, or says why not: a launch has fewer blocks for one token."""
        table = torch.ones(1, MOST, dtype=torch.bfloat16, device="cuda")
        q = torch.ones(1, 1, 1, MOST, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(RuntimeError, match="too many elements for one launch"):
            fuselage.apply_rotary(q, None, table, table)
        size = 1 << 26
        out = fuselage.apply_rotary(q[..., :size], None, table[:, :size], table[:, :size])
        assert not out[..., : size // 2].any() and (out[..., size // 2 :] == 2).all()
        del table, q, out
        torch.cuda.empty_cache()


# Of results and, relative to their terms, of gradients. log_probs adds up integers, whose unit is
# larger from 2^24 logits on.
LOSS_TOLERANCES = {"cross_entropy": 1e-5, "log_probs": 3e-4}

# (dtype, elements from a boundary to the first)
LOGITS = tuple(itertools.product((torch.float32, torch.bfloat16), (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSS_TOLERANCES)
@on_devices(LOGITS[-1:], LOGITS, "row")
def test_longest_row_of_a_loss(fuselage, device, row, name):
    dtype, start = row
    logits = torch.randn(1, MOST_LOGITS + start, device=device).to(dtype)[:, start:]
    leaf = logits.requires_grad_()
    target = torch.tensor([MOST_LOGITS - 1], device=device)
    if name == "cross_entropy":
        results, factors = [-fuselage.cross_entropy(leaf, target)], (2.0, 0.0, 0.0)
    else:
        found = fuselage.log_probs(leaf, target, return_entropy=True, return_log_sum_exp=True)
        results, factors = found[:3], (2.0, -0.5, 1.5)
    sum(factor * result.sum() for factor, result in zip(factors, results)).backward()

    exact = leaf.detach()[0].double()
    log_sum_exp = exact.logsumexp(0)
    logs = exact.sub_(log_sum_exp)
    p = logs.exp()
    entropy = -(p @ logs)
    tolerance = LOSS_TOLERANCES[name]
    for result, wanted in zip(results, (logs[-1], entropy, log_sum_exp)):
        assert abs(result.item() - wanted.item()) <= tolerance
    of_log_prob, of_entropy, of_sum = factors
    expected = p * (of_sum - of_log_prob - of_entropy * (logs + entropy))
    expected[-1] += of_log_prob
    terms = p * (of_sum + of_log_prob + abs(of_entropy) * (logs.abs() + entropy))
    error = leaf.grad[0].double().sub_(expected).abs_()
    bad = ~(error <= half_an_ulp(expected, dtype) + tolerance * terms)
    assert not bad.any(), f"{bad.sum().item()} wrong, the first is {bad.nonzero()[0].item()}"


@pytest.mark.kernels_ci
def test_more_logits_are_refused(fuselage, device):
    """On fake and meta tensors, too."""
    for where in (device, "meta", "fake"):
        for name in LOSS_TOLERANCES:
            with pytest.raises(RuntimeError, match=rf"{name}: columns of `logits` .*1 to 2\^26"):
                if where != "fake":
                    call_with_more_logits(getattr(fuselage, name), where)
                else:
                    with FakeTensorMode():
                        call_with_more_logits(getattr(fuselage, name), device)


def call_with_more_logits(loss, device: str) -> None:
    logits = torch.ones(1, 1, dtype=torch.bfloat16, device=device).expand(1, MOST_LOGITS + 1)
    loss(logits, torch.zeros(1, dtype=torch.int64, device=device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("columns", [MOST + 1, 1 << 31, (1 << 33) + 2])
def test_longer_rows_are_refused(fuselage, device, columns):
    # Expanded, so that there is no memory behind them: it must not come to a copy.
    x = torch.ones(1, 1, device=device).expand(1, columns)
    one = torch.ones(1, device=device)
    three = torch.ones(3, device=device)
    calls = {
        "rms_norm": lambda: fuselage.rms_norm(x),
        "fused_add_rms_norm": lambda: fuselage.fused_add_rms_norm(x, x),
        "fused_add_rms_norm_": lambda: fuselage.fused_add_rms_norm_(x, x),
        "fused_add_layer_norm": lambda: fuselage.fused_add_layer_norm(x, x),
        "fused_add_layer_norm_": lambda: fuselage.fused_add_layer_norm_(x, x),
        "layer_norm": lambda: fuselage.layer_norm(x),
        "ada_layer_norm": lambda: fuselage.ada_layer_norm(x, None, None),
        "rms_norm_add_rms_norm": lambda: fuselage.rms_norm_add_rms_norm(x, x),
        "gated_rms_norm": lambda: fuselage.gated_rms_norm(x, x),
        "ada_rms_norm": lambda: fuselage.ada_rms_norm(x, None, None),
        "gate_residual_ada_norm": lambda: fuselage.gate_residual_ada_norm(x, x, None, None, None),
        "poly_norm": lambda: fuselage.poly_norm(x, three, one),
        "apply_rotary": lambda: fuselage.apply_rotary(x[None], None, x, x),
        "qk_norm_rotary": lambda: fuselage.qk_norm_rotary(x[None], None, None, None, x, x),
        "lm_head_sample": lambda: fuselage.lm_head_sample(x, x, seed=0),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"{name}: .*at most 2\^31 - 2\^16"):
            call()
    with pytest.raises(RuntimeError, match=r"gumbel_sample: columns of .*at most 2\^26"):
        fuselage.gumbel_sample(x, seed=0)
