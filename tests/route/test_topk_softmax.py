"""topk_softmax: choices, weights and gradients against float64, and what is promised besides."""

from __future__ import annotations

import itertools
import math

import pytest
import route_reference as reference
import torch
from harness import (
    LAYOUTS,
    assert_same_bits,
    captured_by_a_graph,
    each_dtype,
    half_an_ulp,
    normal,
    on_devices,
    rows_in_layout,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

# What float32 arithmetic may lack of a weight or a gradient, relative to its terms: an exponential,
# a division, and a sum of up to 1024 of them.
NOISE = 2e-6
# What two values that decide about a choice lack: scores and biases, or sums of two of these.
CHOICE_NOISE = 1e-6

EXPERTS = (
    1,
    2,
    3,
    7,
    8,
    16,
    17,
    31,
    40,
    60,
    64,
    100,
    128,
    160,
    255,
    256,
    384,
    512,
    520,
    1000,
    1024,
)
CI_EXPERTS = (8, 60, 256)

# `groups`: (num_groups, topk_groups), where the experts can be cut so.
STYLES = {
    "mixtral": {},
    "plain softmax": {"renormalize": False},
    "ernie": {"biased": True},
    "longcat": {"biased": True, "renormalize": False},
    "deepseek v2": {"groups": (8, 3), "renormalize": False},
    "softmax groups": {"groups": (4, 2)},
    "biased groups": {"groups": (4, 1), "biased": True},
    "sigmoid": {"score": "sigmoid"},
    "plain sigmoid": {"score": "sigmoid", "renormalize": False},
    "minimax": {"score": "sigmoid", "biased": True},
    "deepseek v3": {"score": "sigmoid", "biased": True, "groups": (8, 4)},
    "sigmoid groups": {"score": "sigmoid", "groups": (2, 1), "renormalize": False},
}
each_style = pytest.mark.parametrize("style", STYLES)


def options_of(style: str, experts: int, device, bias_dtype=torch.float32) -> dict:
    options = dict(STYLES[style])
    if options.pop("biased", False):
        options["bias"] = normal((experts,), bias_dtype, device, scale=0.2)
    groups, chosen = options.pop("groups", (1, 1))
    if groups > 1:
        if experts % groups or experts // groups < 2:
            groups, chosen = 1, 1
        options |= {"num_groups": groups, "topk_groups": chosen}
    return options


def most_chosen(experts: int, options: dict) -> int:
    """The largest k."""
    groups = options.get("num_groups", 1)
    return min(64, experts // groups * options.get("topk_groups", 1))


def close(actual: Tensor, exact: Tensor, size: float, dtype: torch.dtype, label: str) -> None:
    """Within float32 noise of terms of that size, and the rounding to `dtype`."""
    assert actual.shape == exact.shape, label
    bound = NOISE * (size + exact.abs()) + half_an_ulp(exact, dtype)
    error = (actual.detach().double() - exact).abs()
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    assert (same | (error <= bound)).all(), f"{label}: {error.max().item():.3g}"


def check(fuselage, logits: Tensor, k: int, **options):
    """Indices, weights and the gradient of the logits are the reference's.

    But for rows in which values that decide about the choice are closer than float32 tells apart.
    """
    leaf, exact = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    found = fuselage.topk_softmax(leaf, k, **options)
    weights, indices, gap = reference.topk_softmax(exact, k, **options)
    assert type(found).__name__ == "TopK" and found._fields == ("weights", "indices")
    assert found.weights.dtype == torch.float32 and found.indices.dtype == torch.int64
    assert found.weights.is_contiguous() and found.indices.is_contiguous()
    assert found.weights.shape == found.indices.shape == (*logits.shape[:-1], k)
    assert found.weights.device == found.indices.device == logits.device
    assert not found.indices.requires_grad
    is_clear = gap > CHOICE_NOISE
    assert logits.numel() < 100 or is_clear.float().mean() > 0.5
    assert torch.equal(found.indices[is_clear], indices[is_clear])
    check_indices(found.indices, logits.shape[-1])
    with torch.no_grad():
        for one, other in zip(fuselage.topk_softmax(logits, k, **options), found, strict=True):
            assert torch.equal(one, other), "without gradients"

    close(found.weights[is_clear], weights[is_clear].detach(), 0.0, torch.float32, "weights")
    grad = torch.randn_like(found.weights) * is_clear[..., None]
    (ours,) = torch.autograd.grad(found.weights, leaf, grad)
    (theirs,) = torch.autograd.grad(weights, exact, grad.double())
    assert ours.dtype == logits.dtype and ours.shape == logits.shape and ours.is_contiguous()
    size = 2 * grad.abs().max().item() if grad.numel() else 0.0
    close(ours, theirs, size, logits.dtype, "gradient")
    return found.weights.detach(), found.indices, ours


def check_indices(indices: Tensor, experts: int) -> None:
    """They are of experts, and no two of a row are one."""
    assert ((indices >= 0) & (indices < experts)).all()
    ordered = indices.sort(-1).values
    assert (ordered.diff(dim=-1) > 0).all()


@each_dtype
@each_style
@pytest.mark.parametrize("experts", EXPERTS)
def test_values_and_gradients(fuselage, device, dtype, style, experts):
    logits = normal((3, 5, experts), dtype, device, scale=2.0)
    options = options_of(style, experts, device)
    most = most_chosen(experts, options)
    for k in {1, min(2, most), min(8, most), most}:
        check(fuselage, logits, k, **options)


@pytest.mark.kernels_ci
@each_style
@pytest.mark.parametrize("experts", CI_EXPERTS)
def test_values_in_half_precision(fuselage, device, style, experts):
    logits = normal((9, experts), torch.bfloat16, device, scale=2.0)
    check(fuselage, logits, 4 if experts > 8 else 1, **options_of(style, experts, device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_bias_of_the_dtype_of_the_logits(fuselage, device, dtype, score):
    logits = normal((9, 40), dtype, device)
    bias = normal((40,), dtype, device)
    check(fuselage, logits, 5, score=score, bias=bias)
    strided = torch.stack((bias, bias), -1)[:, 0]
    found = fuselage.topk_softmax(logits, 5, score=score, bias=strided)
    expected = fuselage.topk_softmax(logits, 5, score=score, bias=bias.float())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@on_devices([(20_000, 64), (3000, 1024)], [(300_000, 8), (100_000, 128), (30_000, 1024)])
@pytest.mark.parametrize("style", ["mixtral", "plain softmax", "deepseek v3"])
def test_many_rows(fuselage, device, dim, style):
    logits = normal(dim, torch.bfloat16, device, scale=2.0)
    check(fuselage, logits, 2, **options_of(style, dim[1], device))


@pytest.mark.slow
@on_devices([], [8, 1024])
@pytest.mark.parametrize("style", ["mixtral", "deepseek v3"])
def test_more_than_2_31_elements(fuselage, device, dim, style):
    rows = (1 << 31) // dim + 5
    logits = torch.zeros(rows, dim, dtype=torch.bfloat16, device=device)
    logits[-7:] = normal((7, dim), torch.bfloat16, device)
    options = options_of(style, dim, device)
    leaf, few = logits.requires_grad_(), logits[-7:].detach().requires_grad_()
    found = fuselage.topk_softmax(leaf, 2, **options)
    expected = fuselage.topk_softmax(few, 2, **options)
    assert torch.equal(found.indices[-7:], expected.indices)
    assert torch.equal(found.weights[-7:], expected.weights)
    (ours,) = torch.autograd.grad(found.weights[:, 0].sum(), leaf)
    (theirs,) = torch.autograd.grad(expected.weights[:, 0].sum(), few)
    assert theirs.any()
    assert_same_bits(ours[-7:], theirs, "gradient")


# Ties


TIES = {
    "plain": {},
    "biased": {"bias": True},
    "sigmoid": {"score": "sigmoid"},
    "groups": {"num_groups": 4, "topk_groups": 2},
    "biased sigmoid groups": {
        "score": "sigmoid",
        "bias": True,
        "num_groups": 4,
        "topk_groups": 2,
    },
}


def tie_options(name: str, experts: int, device) -> dict:
    options = dict(TIES[name])
    if options.pop("bias", False):
        options["bias"] = torch.full((experts,), 0.25, device=device)
    return options


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize("experts", [8, 60, 128, 512, 1024])
def test_of_equal_experts_the_first(fuselage, device, dtype, name, experts):
    options = tie_options(name, experts, device)
    k = min(most_chosen(experts, options), 8)
    logits = torch.full((5, experts), -0.5, dtype=dtype, device=device)
    found = fuselage.topk_softmax(logits, k, **options)
    assert torch.equal(found.indices, torch.arange(k, device=device).expand(5, k))
    torch.testing.assert_close(found.weights, torch.full_like(found.weights, 1 / k))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize("experts", [8, 60, 128, 512, 1024])
def test_few_different_logits(fuselage, device, name, experts):
    """Many ties, among groups too: the reference's order, which is that of the experts."""
    logits = torch.randint(3, (64, experts), device=device).float()
    options = tie_options(name, experts, device)
    k = min(most_chosen(experts, options), 8)
    found = fuselage.topk_softmax(logits, k, **options)
    expected = reference.topk_softmax(logits.double(), k, **options)
    assert torch.equal(found.indices, expected.indices)
    check(fuselage, logits, k, **options)


@pytest.mark.kernels_ci
def test_zeros_are_equal_and_scores_that_round_to_one_are_not(fuselage, device):
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0], [0.0, 30.0, 40.0, 50.0]], device=device)
    found = fuselage.topk_softmax(logits, 3, score="sigmoid")
    assert found.indices.tolist() == [[0, 1, 2], [3, 2, 1]]
    logits = torch.tensor([[-200.0, -150.0, 0.0, -300.0]], device=device)
    assert fuselage.topk_softmax(logits, 4).indices.tolist() == [[2, 1, 0, 3]]


# Numbers that are none, and large ones

INF, NAN = math.inf, math.nan
SPECIAL = {
    "a NaN": [1.0, NAN, 3.0, 2.0, -1.0, 0.0, 0.5, 4.0],
    "NaN alone": [NAN] * 8,
    "negative NaN": [1.0, -NAN, 3.0, NAN, 0.0, 0.0, 0.0, 0.0],
    "infinity": [1.0, INF, 3.0, 2.0, INF, 0.0, 0.5, 4.0],
    "infinity and NaN": [INF, 1.0, NAN, 2.0, INF, 0.0, 0.5, NAN],
    "masked": [-INF, 1.0, -INF, 2.0, -INF, -INF, 0.5, -INF],
    "masked but one": [-INF] * 5 + [2.0] + [-INF] * 2,
    "all masked": [-INF] * 8,
    "extreme": [3e38, -3e38, 1e30, 3e38, 0.0, 1e-40, -1e-40, 3e38],
    "far apart": [100.0, -100.0, 50.0, 88.0, -88.0, 0.0, -103.0, 90.0],
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [None, 2])
def test_special_logits(fuselage, device, special, score, groups):
    """The indices are those of a sort in which NaN is the largest, and weights are PyTorch's."""
    options = {"score": score, "num_groups": groups, "topk_groups": groups and 1}
    is_clear = score == "softmax" or groups is None or special not in ("extreme", "far apart")
    for copies, k, renormalize in itertools.product((1, 16, 128), (1, 3, 4), (True, False)):
        logits = torch.tensor(SPECIAL[special] * copies, device=device)[None]
        found = fuselage.topk_softmax(logits, k, renormalize=renormalize, **options)
        check_indices(found.indices, logits.shape[-1])
        expected = reference.topk_softmax(logits.double(), k, renormalize=renormalize, **options)
        if is_clear:
            assert torch.equal(found.indices, expected.indices)
            torch.testing.assert_close(
                *(found.weights.double(), expected.weights),
                **{"equal_nan": True, "rtol": 2e-6, "atol": 1e-37},
            )


@pytest.mark.kernels_ci
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_special_biases(fuselage, device, score):
    """Minus infinity is a mask, but for experts that must be chosen; NaN comes first."""
    logits = normal((7, 24), torch.float32, device)
    bias = torch.zeros(24, device=device)
    bias[8:] = -INF
    found = fuselage.topk_softmax(logits, 8, score=score, bias=bias)
    assert (found.indices < 8).all()
    found = fuselage.topk_softmax(logits, 10, score=score, bias=bias)
    assert found.indices[:, 8:].tolist() == [[8, 9]] * 7
    bias[20], bias[3], bias[5] = NAN, INF, NAN
    found = fuselage.topk_softmax(logits, 3, score=score, bias=bias)
    assert found.indices.tolist() == [[5, 20, 3]] * 7
    assert found.weights.isfinite().all()


@pytest.mark.kernels_ci
def test_a_group_without_an_expert_to_prefer_is_no_way_out(fuselage, device):
    """Experts of other groups are not chosen, though those of the best group are minus infinity."""
    bias = torch.full((8,), -INF, device=device)
    bias[5] = 9.0
    found = fuselage.topk_softmax(
        torch.zeros(3, 8, device=device), 4, bias=bias, num_groups=2, topk_groups=1
    )
    assert found.indices.tolist() == [[5, 4, 6, 7]] * 3


# What else is promised


@pytest.mark.kernels_ci
@pytest.mark.parametrize("style", ["mixtral", "plain softmax", "deepseek v3"])
def test_only_the_weights_have_a_gradient(fuselage, device, style):
    logits = normal((6, 32), torch.float32, device)
    options = options_of(style, 32, device)
    found = fuselage.topk_softmax(logits, 3, **options)
    assert not found.weights.requires_grad
    if "bias" in options:
        options["bias"].requires_grad_()
        assert not fuselage.topk_softmax(logits, 3, **options).weights.requires_grad
    leaf = logits.clone().requires_grad_()
    found = fuselage.topk_softmax(leaf, 3, **options)
    found.weights.sum().backward()  # an expanded gradient
    assert "bias" not in options or options["bias"].grad is None
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, found.indices, True)
    assert ((leaf.grad != 0) | chosen).all() or style != "plain softmax"
    assert not leaf.grad[~chosen].any() or style == "plain softmax"
    with pytest.raises(RuntimeError, match="topk_softmax: the backward is not differentiable"):
        weights = fuselage.topk_softmax(leaf, 3, **options).weights
        torch.autograd.grad(weights.sum(), leaf, create_graph=True)


@pytest.mark.parametrize("style", ["mixtral", "plain softmax", "deepseek v3"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts", [40, 64, 520])
def test_layouts_have_the_same_bits(fuselage, device, style, layout, experts):
    logits = rows_in_layout(layout, experts, torch.bfloat16, device)
    options = options_of(style, experts, device)
    leaf, other = logits.detach().requires_grad_(), logits.contiguous().requires_grad_()
    found = fuselage.topk_softmax(leaf, 5, **options)
    expected = fuselage.topk_softmax(other, 5, **options)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.weights, expected.weights)
    grad = torch.randn_like(found.weights)
    (ours,) = torch.autograd.grad(found.weights, leaf, grad)
    (theirs,) = torch.autograd.grad(expected.weights, other, grad)
    assert_same_bits(ours, theirs, "gradient")


@pytest.mark.kernels_ci
@each_style
@pytest.mark.parametrize("experts", [8, 60, 256, 1024])
def test_rows_do_not_depend_on_the_batch(fuselage, device, style, experts):
    logits = normal((67, experts), torch.bfloat16, device).requires_grad_()
    options = options_of(style, experts, device)
    k = min(4, most_chosen(experts, options))
    whole = fuselage.topk_softmax(logits, k, **options)
    grad = torch.randn_like(whole.weights)
    (of_whole,) = torch.autograd.grad(whole.weights, logits, grad)
    for rows in (slice(0, 1), slice(3, 8), slice(5, 67)):
        some = logits[rows].detach().requires_grad_()
        found = fuselage.topk_softmax(some, k, **options)
        assert torch.equal(found.indices, whole.indices[rows])
        assert_same_bits(found.weights.detach(), whole.weights[rows].detach(), "weights")
        (of_some,) = torch.autograd.grad(found.weights, some, grad[rows])
        assert_same_bits(of_some, of_whole[rows], "gradient")


@pytest.mark.kernels_ci
def test_one_token_and_none(fuselage, device):
    logits = normal((16,), torch.float32, device).requires_grad_()
    found = fuselage.topk_softmax(logits, 2)
    assert found.weights.shape == found.indices.shape == (2,)
    again = fuselage.topk_softmax(logits[None], 2)
    assert torch.equal(found.weights, again.weights[0])
    assert torch.autograd.grad(found.weights[0], logits)[0].shape == (16,)
    for shape in ((0, 16), (2, 0, 16)):
        empty = torch.empty(shape, device=device).requires_grad_()
        found = fuselage.topk_softmax(empty, 2, num_groups=4, topk_groups=1)
        assert found.weights.shape == found.indices.shape == (*shape[:-1], 2)
        assert torch.autograd.grad(found.weights.sum(), empty)[0].shape == shape


@pytest.mark.kernels_ci
def test_one_expert(fuselage, device):
    logits = torch.tensor([[3.0], [-200.0], [INF]], device=device)
    for options in ({}, {"renormalize": False}, {"num_groups": 1, "topk_groups": 1}):
        found = fuselage.topk_softmax(logits, 1, **options)
        assert not found.indices.any() and found.weights[:2].tolist() == [[1.0], [1.0]]
        assert found.weights[2].isnan().all()
    sigmoids = fuselage.topk_softmax(logits, 1, score="sigmoid", renormalize=False).weights
    torch.testing.assert_close(sigmoids, torch.sigmoid(logits), rtol=1e-6, atol=1e-37)


@pytest.mark.kernels_ci
def test_groups_that_are_all_chosen_are_no_limit(fuselage, device):
    logits = normal((9, 24), torch.float32, device)
    for score in ("softmax", "sigmoid"):
        expected = fuselage.topk_softmax(logits, 5, score=score)
        for groups in (1, 3, 24):
            found = fuselage.topk_softmax(
                logits, 5, score=score, num_groups=groups, topk_groups=groups
            )
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("experts", [64, 512])
def test_groups_of_one_expert(fuselage, device, experts):
    """With softmax they are experts; with sigmoid there are no two to add up."""
    logits = normal((9, experts), torch.float32, device)
    found = fuselage.topk_softmax(logits, 4, num_groups=experts, topk_groups=6)
    assert torch.equal(found.indices, fuselage.topk_softmax(logits, 4).indices)
    with pytest.raises(RuntimeError, match="`num_groups` must leave groups of two experts at le"):
        fuselage.topk_softmax(logits, 4, score="sigmoid", num_groups=experts, topk_groups=6)


BAD = [
    ({"logits": lambda t: t.double()}, "`logits` must be float16, bfloat16 or float32, got Double"),
    ({"logits": lambda t: t[0, 0]}, "`logits` must have at least one dimension, got a scalar"),
    (
        {"logits": lambda t: t[:, :0]},
        "the last dimension of `logits`, that of experts, must be 1 to",
    ),
    ({"logits": lambda t: t.repeat(1, 26)}, "the last dimension of `logits`, that of experts, mus"),
    ({"k": 0}, "`k` must be 1 to 40, got 0"),
    ({"k": 41}, "`k` must be 1 to 40, got 41"),
    ({"logits": lambda t: t.repeat(1, 4), "k": 65}, "`k` must be 1 to 64, got 65"),
    ({"score": "relu"}, "`score` must be one of softmax, sigmoid, got 'relu'"),
    ({"bias": lambda _: torch.ones(39)}, "`bias` must have shape [40], the last dimension of `log"),
    ({"bias": lambda _: torch.ones(40).half()}, "`bias` must be float32 as `logits`, or float32"),
    ({"bias": lambda _: torch.ones(40).double()}, "`bias` must be float16, bfloat16 or float32"),
    ({"num_groups": 4}, "`num_groups` and `topk_groups` must be given together"),
    ({"topk_groups": 4}, "`num_groups` and `topk_groups` must be given together"),
    ({"num_groups": 7, "topk_groups": 2}, "`num_groups` must divide the 40 experts, got 7"),
    ({"num_groups": 0, "topk_groups": 1}, "`num_groups` must divide the 40 experts, got 0"),
    ({"num_groups": 80, "topk_groups": 1}, "`num_groups` must divide the 40 experts, got 80"),
    ({"num_groups": 4, "topk_groups": 5}, "`topk_groups` must be 1 to the 4 of `num_groups`, got"),
    ({"num_groups": 4, "topk_groups": 0}, "`topk_groups` must be 1 to the 4 of `num_groups`, got"),
    ({"num_groups": 20, "topk_groups": 1}, "`k` must be at most the 2 experts of `topk_groups` gr"),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input(fuselage, device, number):
    change, message = BAD[number]
    given = {"logits": normal((5, 40), torch.float32, device), "k": 3}
    for name, value in change.items():
        given[name] = value(given.get(name)) if callable(value) else value
        if isinstance(given[name], Tensor):
            given[name] = given[name].to(device)
    with pytest.raises(RuntimeError) as error:
        fuselage.topk_softmax(**given)
    assert f"fuselage::topk_softmax: {message}" in str(error.value)


@pytest.mark.kernels_ci
def test_arguments_of_the_wrong_kind(fuselage, device):
    logits = normal((5, 40), torch.float32, device)
    for given in ({"k": 2.5}, {"k": None}, {"score": 3}, {"num_groups": "4"}, {"bias": 1.0}):
        with pytest.raises(TypeError, match=rf"topk_softmax: `{next(iter(given))}` must be"):
            fuselage.topk_softmax(logits, **{"k": 2, **given})


@pytest.mark.parametrize("style", ["mixtral", "plain softmax", "deepseek v3"])
def test_compiled_without_recompiles(fuselage, device, style):
    options = options_of(style, 64, device)

    def call(x):
        found = fuselage.topk_softmax(x * 2, 4, **options)
        return (found.weights * (1 + found.indices)).sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for rows in (4, 7, 30, 129):
        logits, results = normal((rows, 64), torch.bfloat16, device), []
        for function in (call, compiled):
            leaf = logits.clone().requires_grad_()
            total = function(leaf)
            results.append((total.detach(), torch.autograd.grad(total, leaf)[0]))
        for eager, other in zip(*results, strict=True):
            assert_same_bits(other, eager, f"{rows} rows")
    assert counter.frame_count == 1


@pytest.mark.kernels_ci
def test_autocast_changes_nothing(fuselage, device):
    logits = normal((5, 40), torch.bfloat16, device)
    bias = normal((40,), torch.float32, device)
    expected = check(fuselage, logits, 4, bias=bias)
    with torch.autocast(device, dtype=torch.float16):
        leaf = logits.clone().requires_grad_()
        found = fuselage.topk_softmax(leaf, 4, bias=bias)
        other = fuselage.topk_softmax(leaf, 4, bias=bias.half())  # of neither's dtype
    assert torch.equal(found.indices, expected[1])
    assert_same_bits(found.weights.detach(), expected[0], "weights")
    assert torch.autograd.grad(found.weights.sum(), leaf)[0].dtype == torch.bfloat16
    assert other.weights.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("style", ["mixtral", "plain softmax", "deepseek v3"])
def test_in_a_graph(fuselage, device, style):
    leaf = normal((64, 256), torch.bfloat16, device).requires_grad_()
    options = options_of(style, 256, device)

    def run():
        found = fuselage.topk_softmax(leaf, 8, **options)
        (grad,) = torch.autograd.grad(found.weights, leaf, torch.ones_like(found.weights))
        return found.weights.detach(), found.indices, grad

    graph, captured = captured_by_a_graph(run)
    with torch.no_grad():
        leaf.copy_(normal((64, 256), torch.bfloat16, device))
    graph.replay()
    for one, other in zip(captured, run(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@each_style
def test_a_gpu_chooses_as_a_cpu_does(fuselage, device, style):
    logits = normal((500, 128), torch.float32, "cpu", scale=2.0)
    options = options_of(style, 128, "cpu")
    on_gpu = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in options.items()}
    found = fuselage.topk_softmax(logits.to(device), 8, **on_gpu)
    expected = fuselage.topk_softmax(logits, 8, **options)
    is_clear = reference.topk_softmax(logits.double(), 8, **options).gap > CHOICE_NOISE
    assert torch.equal(found.indices.cpu()[is_clear], expected.indices[is_clear])
    torch.testing.assert_close(
        found.weights.cpu()[is_clear], expected.weights[is_clear], rtol=1e-5, atol=1e-7
    )
