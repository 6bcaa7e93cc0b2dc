"""linear_cross_entropy and linear_log_probs: the head and its loss in float64, and what is promised
besides."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import loss_reference as reference
import pytest
import torch
from conftest import KERNEL_DIR, REPO_DIR, why_no_cuda
from harness import assert_same_bits, each_dtype, half_an_ulp, normal
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

# What a row's float32 arithmetic may lack, relative to its largest gradient.
NOISE = 4e-6
# A rounding of a logit's gradient, relative.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CASES = {
    "plain": {},
    "sum": {"reduction": "sum", "bias": True},
    "none": {"reduction": "none", "weighted": True},
    "all": {
        "bias": True,
        "weighted": True,
        "label_smoothing": 0.2,
        "lse_square_scale": 0.01,
        "logit_softcap": 5.0,
    },
}
each_case = pytest.mark.parametrize("case", CASES)
SMALL = 4096  # bytes of workspace: a few rows of logits, and 256 columns, at a time


def make(device, dtype, rows=11, dim=40, vocab=777, ignored=0.2) -> dict:
    hidden = normal((rows, dim), dtype, device)
    weight = normal((vocab, dim), dtype, device, scale=dim**-0.5)
    targets = torch.randint(vocab, (rows,), device=device)
    skipped = torch.rand(rows, device=device) < ignored
    if rows:
        skipped[0] = False
    return {"hidden": hidden, "weight": weight, "targets": torch.where(skipped, -100, targets)}


def options_of(case: str, given: dict) -> dict:
    options = dict(CASES[case])
    rows, vocab = given["hidden"].shape[0], given["weight"].shape[0]
    device, dtype = given["hidden"].device, given["hidden"].dtype
    if options.pop("bias", False):
        options["bias"] = normal((vocab,), dtype, device)
    if options.pop("weighted", False):
        options["token_weights"] = normal((rows,), torch.float32, device)
    return options


def exact_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden.double() @ weight.double().T
    return logits if bias is None else logits + bias.double()


def leaves_of(given: dict, bias: Tensor | None, dtype=None) -> list[Tensor]:
    """Hidden, weight and bias, that need gradients."""
    found = [t for t in (given["hidden"], given["weight"], bias) if t is not None]
    return [t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in found]


def check_gradients(
    ours, exact, grad_logits: Tensor, given: dict, label: str, hidden_roundings: int = 0
) -> None:
    """Within a rounding of each logit's gradient, and of the result; and for the gradient of the
    weight so many of hidden."""
    dtype = given["hidden"].dtype
    size = grad_logits.abs().clamp(
        min=2.0**-14 if dtype == torch.float16 else 0.0
    )  # subnormal ones
    noise = ROUNDING[dtype] * size + NOISE * size.amax(1, keepdim=True)
    bounds = (
        noise @ given["weight"].double().abs(),
        (noise + hidden_roundings * ROUNDING[dtype] * size).T @ given["hidden"].double().abs(),
        noise.sum(0),
    )
    for name, a, e, bound in zip(("hidden", "weight", "bias"), ours, exact, bounds, strict=False):
        assert a.dtype == dtype
        bound = bound + half_an_ulp(e, a.dtype) + 1e-30
        error = (a.double() - e).abs()
        assert (error <= bound).all(), f"{label}, {name}: {(error / bound).max().item():.3g}"


def check_loss(
    fuselage, given: dict, grad: float | None = None, hidden_roundings: int = 0, **options
) -> Tensor:
    workspace = {"max_workspace": options.pop("max_workspace", SMALL)}
    bias = options.pop("bias", None)
    leaves, doubles = leaves_of(given, bias), leaves_of(given, bias, torch.float64)
    with_bias = {"bias": leaves[2]} if bias is not None else {}
    loss = fuselage.linear_cross_entropy(
        *leaves[:2], given["targets"], **with_bias, **options, **workspace
    )
    logits = exact_logits(*doubles[:2], doubles[2] if bias is not None else None)
    logits.retain_grad()
    expected = reference.cross_entropy(logits, given["targets"], **options)
    assert loss.dtype == torch.float32 and loss.shape == expected.shape
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    with torch.no_grad():
        plain = fuselage.linear_cross_entropy(**given, bias=bias, **options, **workspace)
        assert_same_bits(plain, loss, "no gradient")
    grad = torch.randn_like(loss) if grad is None else torch.full_like(loss, grad)
    ours = torch.autograd.grad(loss, leaves, grad)
    (expected * grad.double()).sum().backward()
    exact = [t.grad for t in doubles]
    check_gradients(ours, exact, logits.grad, given, "cross_entropy", hidden_roundings)
    return loss.detach()


@each_dtype
@each_case
def test_cross_entropy(fuselage, device, dtype, case):
    given = make(device, dtype)
    check_loss(fuselage, given, **options_of(case, given))


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("rows", "dim", "vocab"), [(1, 8, 1), (3, 17, 33), (300, 64, 1000), (2, 128, 5000)]
)
def test_shapes(fuselage, device, rows, dim, vocab):
    given = make(device, torch.bfloat16, rows, dim, vocab)
    small = check_loss(fuselage, given, reduction="none")
    whole = check_loss(fuselage, given, reduction="none", max_workspace=1 << 30)
    assert_same_bits(small, whole, "another workspace")


@each_dtype
@pytest.mark.parametrize("rows", [256, 600])
@pytest.mark.parametrize("case", ["plain", "sum", "all"])
def test_gradients_kept_from_the_forward(fuselage, device, dtype, rows, case):
    """Of 256 rows: all there are, or not those after them."""
    given = make(device, dtype, rows)
    options = options_of(case, given)
    weights = options.pop("token_weights", None)
    workspace = 400 * 777 * dtype.itemsize * 4 // 3
    forward = fuselage.linear_loss.ops.linear_cross_entropy_fwd.default
    *_, kept = forward(
        *(given["hidden"], given["weight"], None, given["targets"], weights, 2, -100),
        *(0.0, 0.0, None, workspace),
    )
    assert kept.shape == (0 if dtype == torch.float16 else 256, 777) and kept.dtype == dtype
    options |= {"token_weights": weights, "max_workspace": workspace}
    check_loss(fuselage, given, **options, grad=-0.25)
    check_loss(fuselage, given, **options, hidden_roundings=1)


def test_a_kept_gradient_is_read_twice(fuselage, device):
    """By two backwards of one forward, of different gradients of the loss."""
    given = make(device, torch.bfloat16)
    leaves = leaves_of(given, None)
    loss = fuselage.linear_cross_entropy(*leaves, given["targets"])
    once, twice, eightfold = (
        torch.autograd.grad(factor * loss, leaves, retain_graph=True) for factor in (1, 1, 8)
    )
    for a, b, c in zip(once, twice, eightfold, strict=True):
        assert_same_bits(a, b, "again")
        assert_same_bits(8 * a, c, "of another gradient")


def test_any_leading_dimensions(fuselage, device):
    given = make(device, torch.float32, 12)
    shaped = {**given, "hidden": given["hidden"].view(2, 3, 2, 40)}
    shaped["targets"] = given["targets"].view(2, 3, 2)
    flat = fuselage.linear_cross_entropy(**given, reduction="none")
    assert_same_bits(
        fuselage.linear_cross_entropy(**shaped, reduction="none"), flat.view(2, 3, 2), "loss"
    )
    found = fuselage.linear_log_probs(**shaped, return_entropy=True)
    assert found.log_probs.shape == found.entropy.shape == (2, 3, 2)
    assert found.log_sum_exp is None and found.is_greatest is None


def test_strided_rows(fuselage, device):
    given = make(device, torch.bfloat16)
    wide = {
        name: torch.cat([given[name], given[name]], 1)[:, : given[name].shape[1]]
        for name in ("hidden", "weight")
    }
    leaves = [t.detach().requires_grad_() for t in wide.values()]
    loss = fuselage.linear_cross_entropy(*leaves, given["targets"])
    same = leaves_of(given, None)
    expected = fuselage.linear_cross_entropy(*same, given["targets"])
    assert_same_bits(loss, expected, "loss")
    pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, same), strict=True)
    for a, e in pairs:
        torch.testing.assert_close(a, e, rtol=2e-2, atol=1e-5)


@each_dtype
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs(fuselage, device, dtype, softcap, temperature):
    given = make(device, dtype)
    options = {"logit_softcap": softcap, "temperature": temperature, "return_entropy": True}
    leaves, doubles = leaves_of(given, None), leaves_of(given, None, torch.float64)
    found = fuselage.linear_log_probs(
        *leaves,
        given["targets"],
        **options,
        return_log_sum_exp=True,
        return_is_greatest=True,
        max_workspace=SMALL,
    )
    logits = exact_logits(*doubles, None)
    logits.retain_grad()
    expected = reference.log_probs(logits, given["targets"], **options)
    for name, a, e in zip(found._fields, found, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=1e-5, atol=1e-5, msg=name)
    grads = [torch.randn_like(t) for t in found[:3]]
    ours = torch.autograd.grad(found[:3], leaves, grads)
    sum((e * g.double()).sum() for e, g in zip(expected, grads, strict=False)).backward()
    check_gradients(ours, [t.grad for t in doubles], logits.grad, given, "log_probs")


@pytest.mark.kernels_ci
@each_dtype
def test_log_probs_are_those_of_the_draw(fuselage, device, dtype):
    """Bit for bit, for the whole batch and for one row of it."""
    given = make(device, dtype, rows=70, dim=64, vocab=1500, ignored=0.0)
    drawn = fuselage.lm_head_sample(
        given["hidden"], given["weight"], temperature=0.8, seed=1, return_logprobs=True
    )
    tokens = drawn.tokens[:, 0] if drawn.tokens.dim() == 2 else drawn.tokens
    reported = drawn.logprobs.view(-1)
    for part in (slice(0, 70), slice(5, 6)):
        found = fuselage.linear_log_probs(
            given["hidden"][part], given["weight"], tokens[part], temperature=0.8
        )
        assert_same_bits(found.log_probs, reported[part], str(part))


def test_all_ignored(fuselage, device):
    given = make(device, torch.float32)
    given["targets"].fill_(-100)
    leaves = leaves_of(given, None)
    for reduction, expected in (("mean", torch.nan), ("sum", 0.0)):
        loss = fuselage.linear_cross_entropy(*leaves, given["targets"], reduction=reduction)
        torch.testing.assert_close(loss.item(), expected, equal_nan=True)
        for grad in torch.autograd.grad(loss, leaves):
            assert not grad.any()


def test_no_rows(fuselage, device):
    given = make(device, torch.float32, rows=0)
    leaves = leaves_of(given, None)
    loss = fuselage.linear_cross_entropy(*leaves, given["targets"], reduction="sum")
    grads = torch.autograd.grad(loss, leaves)
    assert loss.item() == 0 and grads[0].shape == (0, 40) and not grads[1].any()
    assert fuselage.linear_log_probs(**given).log_probs.shape == (0,)


def test_some_gradients(fuselage, device):
    """What is frozen costs nothing and changes nothing."""
    given = make(device, torch.bfloat16)
    both = leaves_of(given, None)
    loss = fuselage.linear_cross_entropy(*both, given["targets"])
    expected = torch.autograd.grad(loss, both)
    for i in range(2):
        leaves = leaves_of(given, None)
        leaves[1 - i].requires_grad_(False)
        loss = fuselage.linear_cross_entropy(*leaves, given["targets"])
        loss.backward()
        assert leaves[1 - i].grad is None
        assert_same_bits(leaves[i].grad, expected[i], f"gradient {i}")


def test_accumulation_and_checkpoint(fuselage, device):
    given = make(device, torch.float32)
    leaves = leaves_of(given, None)
    for _ in range(2):
        fuselage.linear_cross_entropy(*leaves, given["targets"]).backward()
    again = leaves_of(given, None)
    loss = checkpoint(fuselage.linear_cross_entropy, *again, given["targets"], use_reentrant=False)
    loss.backward()
    for twice, once in zip(leaves, again, strict=True):
        torch.testing.assert_close(twice.grad, 2 * once.grad)


def test_autocast(fuselage, device):
    """A product of matrices: hidden and weight are cast, and gradients have their own dtypes."""
    given = make(device, torch.float32)
    leaves = leaves_of(given, None)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = fuselage.linear_cross_entropy(*leaves, given["targets"])
    half = leaves_of(given, None, torch.bfloat16)
    expected = fuselage.linear_cross_entropy(*half, given["targets"])
    assert_same_bits(loss, expected, "loss")
    grads = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, half), strict=True)
    for a, e in grads:
        assert a.dtype == torch.float32
        assert_same_bits(a.bfloat16(), e, "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs"])
def test_compile(fuselage, device, name):
    """One graph, for any number of rows."""
    function = getattr(fuselage, name)

    def results(function, leaves, targets):
        found = function(*leaves, targets)
        found = found if isinstance(found, Tensor) else found.log_probs
        return found, *torch.autograd.grad(found.sum(), leaves)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for rows in (5, 9, 33):
        given = make(device, torch.bfloat16, rows)
        actual = results(compiled, leaves_of(given, None), given["targets"])
        expected = results(function, leaves_of(given, None), given["targets"])
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a, e, name)
        first = counter.frame_count if first is None else first
        assert counter.frame_count == first > 0


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_workspace_is_kept(fuselage, device, backward):
    given = make(device, torch.bfloat16, rows=4096, dim=512, vocab=32_000)
    leaves = leaves_of(given, None) if backward else list(given.values())[:2]
    workspace = 64 << 20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = fuselage.linear_cross_entropy(*leaves, given["targets"], max_workspace=workspace)
    if backward:
        loss.backward()
    results = sum(t.numel() * 2 for t in leaves) if backward else 0
    accumulated = 3 * 4 * leaves[0].numel() if backward else 0
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= workspace + results + accumulated + (8 << 20)


def test_what_is_refused(fuselage, device):
    given = make(device, torch.bfloat16)

    def refused(match: str, kind=RuntimeError, **changes) -> None:
        for name in ("linear_cross_entropy", "linear_log_probs"):
            with pytest.raises(kind, match=match):
                getattr(fuselage, name)(**{**given, **changes})

    refused("`targets` must have the shape of `hidden`", targets=given["targets"][:3])
    refused("`weight` must be bfloat16", weight=given["weight"].float())
    refused("`weight` must have shape", weight=given["weight"][:, :7])
    refused("has no rows", weight=given["weight"][:0])
    refused("`max_workspace` must be positive", max_workspace=0)
    refused("`bias` must have shape", bias=given["hidden"][0])
    refused("`targets` must be int64 or int32", targets=given["targets"].float())
    refused("`hidden` must be a tensor", TypeError, hidden=[1.0])
    if device == "cpu":
        refused("`targets` must be in", targets=given["targets"].fill_(777))
    weights = torch.ones(11, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="`token_weights` has no gradient"):
        fuselage.linear_cross_entropy(**given, token_weights=weights)
    with pytest.raises(RuntimeError, match="`reduction` must be one of"):
        fuselage.linear_cross_entropy(**given, reduction="max")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_targets_out_of_range_are_nan_on_a_gpu(fuselage, device):
    given = make(device, torch.bfloat16, ignored=0.0)
    given["targets"][3] = 777
    leaves = leaves_of(given, None)
    losses = fuselage.linear_cross_entropy(*leaves, given["targets"], reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == [3]
    (grad,) = torch.autograd.grad(losses.sum(), leaves[0])
    assert grad.isnan().all(1).nonzero().flatten().tolist() == [3]


def test_module(fuselage, device):
    given = make(device, torch.float32)
    options = {"label_smoothing": 0.1, "reduction": "sum", "logit_softcap": 3.0}
    module = fuselage.modules.LinearCrossEntropyLoss(**options, max_workspace=SMALL)
    expected = fuselage.linear_cross_entropy(**given, **options)
    assert_same_bits(module(*given.values()), expected, "loss")
    assert "reduction='sum', label_smoothing=0.1, logit_softcap=3.0)" in repr(module)


@pytest.mark.parametrize("cuts", [(0, 777), (0, 1, 300, 777)])
def test_shards_of_the_vocabulary(fuselage, device, cuts):
    """The whole head's values and gradients, to float32 rounding."""
    given = make(device, torch.float32)
    bias = normal((777,), torch.float32, device)
    both = [leaves_of(given, bias) for _ in range(2)]
    options = {"temperature": 0.7, "logit_softcap": 8.0, "return_entropy": True}
    hidden, weight, own = both[0]
    shards = [
        fuselage.linear_log_probs_shard(
            *(hidden, weight[a:b], given["targets"]), bias=own[a:b], vocab_offset=a, **options
        )
        for a, b in itertools.pairwise(cuts)
    ]
    ours = fuselage.combine_shard_log_probs(shards)
    hidden, weight, own = both[1]
    whole = fuselage.linear_log_probs(
        *(hidden, weight, given["targets"]), bias=own, **options, return_log_sum_exp=True
    )
    for name, a, e in zip(ours._fields[:3], ours, whole, strict=False):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5, msg=name)
    grads = [torch.randn_like(t) for t in ours[:3]]
    pairs = zip(
        torch.autograd.grad(ours[:3], both[0], grads),
        torch.autograd.grad(whole[:3], both[1], grads),
        strict=True,
    )
    for a, e in pairs:
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_shards_that_are_none(fuselage, device):
    given = make(device, torch.float32)
    with pytest.raises(RuntimeError, match="`shards` must not be empty"):
        fuselage.combine_shard_log_probs([])
    for wrong in ([None], 3.0, [given["hidden"]]):
        with pytest.raises(TypeError, match="combine_shard_log_probs: `shards` must be"):
            fuselage.combine_shard_log_probs(wrong)
    with pytest.raises(TypeError, match="linear_log_probs_shard: `targets` must be a tensor"):
        fuselage.linear_log_probs_shard(**{**given, "targets": "text"}, vocab_offset=0)


@pytest.mark.slow
@pytest.mark.skipif(not why_no_cuda(), reason="loads the CPU variant")
def test_the_benchmark_verifies_times_and_writes(fuselage, tmp_path):
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.linear_loss", "--quick", "--output", str(path)]
    environment = {**os.environ, "FUSELAGE_KERNEL_DIR": str(KERNEL_DIR)}
    done = subprocess.run(command, cwd=REPO_DIR, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(path.read_text())["cases"].values()
    for name in ("linear_cross_entropy", "linear_log_probs", "PyTorch"):
        column = record["columns"][name]
        assert column["error"] <= 1e-5
        assert column["milliseconds"]["forward"]["median"] > 0
        assert f"16x32x300: {name} |" in done.stdout
