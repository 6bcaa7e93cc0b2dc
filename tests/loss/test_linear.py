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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
    ours, exact, grad_logits: Tensor, given: dict, label: str, is_rounded_twice: bool = False
) -> None:
    """Within a rounding of each logit's gradient, and of the result; or two of that of weight."""
    dtype = given["hidden"].dtype
    size = grad_logits.abs().clamp(
        min=2.0**-14 if dtype == torch.float16 else 0.0
    )  # subnormal ones
    noise = ROUNDING[dtype] * size + NOISE * size.amax(1, keepdim=True)
    bounds = (
        noise @ given["weight"].double().abs(),
        noise.T @ given["hidden"].double().abs(),
        noise.sum(0),
    )
    for name, a, e, bound in zip(("hidden", "weight", "bias"), ours, exact, bounds, strict=False):
        assert a.dtype == dtype
        bound = bound + half_an_ulp(e, a.dtype) + 1e-30
        if is_rounded_twice and name == "weight":
            bound = bound + ROUNDING[dtype] * e.abs()
        error = (a.double() - e).abs()
        assert (error <= bound).all(), f"{label}, {name}: {(error / bound).max().item():.3g}"


def check_loss(fuselage, given: dict, grad: float | None = None, **options) -> Tensor:
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
    # A mean or sum has its gradients made in the forward, and then multiplied.
    is_rounded_twice = grad is None and options.get("reduction") != "none"
    grad = torch.randn_like(loss) if grad is None else torch.full_like(loss, grad)
    ours = torch.autograd.grad(loss, leaves, grad)
    (expected * grad.double()).sum().backward()
    exact = [t.grad for t in doubles]
    check_gradients(ours, exact, logits.grad, given, "cross_entropy", is_rounded_twice)
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
@pytest.mark.parametrize("count", [0, 1, 7, 8, 4099, 3_000_000])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_factor_of_gradients(fuselage, device, dtype, count, offset):
    """In float32, rounded once, wherever it starts; and what is around stays."""
    multiply = fuselage.linear_loss.ops.multiply_.default
    for factor in (1.0, 1 / 3, -4.0, torch.nan):
        around = normal((offset + count + 1,), dtype, device)
        expected = around.clone()
        expected[offset : offset + count] = (around[offset : offset + count].float() * factor).to(
            dtype
        )
        multiply(around[offset : offset + count], torch.tensor(factor, device=device))
        assert torch.equal(around.nan_to_num(3.0), expected.nan_to_num(3.0))
    with pytest.raises(RuntimeError, match="`factor` must be one float32"):
        multiply(around, torch.ones(2, device=device))
    with pytest.raises(RuntimeError, match="`x` must be contiguous"):
        multiply(around.expand(2, -1), torch.ones(1, device=device))


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("vocab", [1, 128, 129, 1000, 4097, 32000, 50257, 151936, 300_000])
@pytest.mark.parametrize("padded", [True, False])
def test_loss_and_gradient_at_once(fuselage, device, dtype, vocab, padded):
    """The bits of one after the other, of a row whatever the others are, and nothing beside."""
    ops = fuselage.linear_loss.ops
    rows = min(4000, 2**25 // vocab) if device == "cuda" else 7  # some for each cluster
    stride = (vocab + 15) // 16 * 16 if padded else vocab
    logits = normal((rows, stride), torch.float32, device, scale=3.0)[:, :vocab]
    targets = torch.randint(vocab, (rows,), device=device)
    targets[1::3] = targets[5] = -100
    weights, one = normal((rows,), torch.float32, device), torch.ones((), device=device)
    count = (targets != -100).sum(dtype=torch.float32).view(1)
    for case in ({}, {"smoothing": 0.1, "square": 0.01, "softcap": 5.0}):
        smoothing, square = case.get("smoothing", 0.0), case.get("square", 0.0)
        options = (-100, smoothing, square, case.get("softcap"))
        loss, statistics, _ = ops.cross_entropy_fwd.default(
            logits, targets, weights, 0, *options, False
        )
        grads = torch.full((rows, stride), 7.0, dtype=dtype, device=device)
        ops.loss_columns_bwd_.default(
            *(grads[:, :vocab], logits, targets, statistics, one, weights, count),
            *(smoothing, square, None, None, None, None, 1.0, options[3], -100, 0, vocab),
        )
        for some in (slice(0, rows), slice(2, 3)):
            found = torch.full_like(grads[some], 7.0), loss[some] + 1, statistics[some] + 1
            ops.cross_entropy_fwd_bwd_.default(
                *(found[0][:, :vocab], *found[1:], logits[some], targets[some], weights[some]),
                *(one, count, *options),
            )
            for ours, apart in zip(found, (grads, loss, statistics), strict=True):
                assert_same_bits(ours, apart[some], "apart")


def parts_of(fuselage):
    """The module of the loss's slices and products."""
    return sys.modules[fuselage.linear_loss.__name__.replace("linear_loss", "_head_parts")]


def workspace_of(given: dict, tile: int, group: int) -> int:
    """What lets the forward take so many logits, and gradients of them, at a time."""
    (rows, dim), vocab = given["hidden"].shape, given["weight"].shape[0]
    size, padded = given["hidden"].element_size(), (vocab + 15) // 16 * 16
    besides = 16 * rows + 8 * vocab + (4 - size) * rows * dim
    return tile * (4 * padded + size * dim) + group * size * padded + besides


@each_dtype
@pytest.mark.parametrize("case", ["plain", "sum", "all"])
@pytest.mark.parametrize(
    ("rows", "dim", "group"),
    [
        (300, 40, 300),  # all gradients of logits stay in the workspace
        (600, 40, 256),  # some do, some lodge with the weight's, some are made again
        (600, 40, 30),
        (600, 400, 256),  # none are made again
        (200, 300, 90),
    ],
)
def test_gradients_made_in_the_forward(fuselage, device, dtype, rows, dim, group, case):
    given = make(device, dtype, rows, dim)
    options = options_of(case, given)
    tile = min(group, 256)
    workspace = workspace_of(given, tile, group)
    if dtype != torch.float16:
        plan = parts_of(fuselage).plan(given["hidden"], given["weight"], (True,) * 3, workspace)
        lodged = min(rows - group, dim)
        assert plan[:4] == (tile, group, rows - group - lodged, lodged)
    options["max_workspace"] = workspace
    check_loss(fuselage, given, **options, grad=-0.25)
    check_loss(fuselage, given, **options)


def test_backwards_of_one_forward(fuselage, device):
    """Of different gradients of the loss, and of hidden and weight one after the other."""
    given = make(device, torch.bfloat16)
    leaves = leaves_of(given, None)
    loss = fuselage.linear_cross_entropy(*leaves, given["targets"])
    once, twice, eightfold = (
        torch.autograd.grad(factor * loss, leaves, retain_graph=True) for factor in (1, 1, 8)
    )
    for a, b, c in zip(once, twice, eightfold, strict=True):
        assert_same_bits(a, b, "again")
        assert_same_bits(8 * a, c, "of another gradient")
    loss = fuselage.linear_cross_entropy(*leaves, given["targets"])
    for leaf, expected in zip(leaves, once, strict=True):
        (alone,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert_same_bits(alone, expected, "one alone")
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert_same_bits(leaves[1].grad, once[1], "after others")


def test_the_loss_of_a_loss_is_no_factor_of_8_bits(fuselage, device):
    """A third, of which bfloat16 is off by 1e-3: by all of the gradients alike."""
    given = make(device, torch.bfloat16, rows=64, dim=256)
    both = []
    for factor in (1.0, 1 / 3):
        leaves = leaves_of(given, None)
        (factor * fuselage.linear_cross_entropy(*leaves, given["targets"])).backward()
        both.append([leaf.grad.double() for leaf in leaves])
    for whole, third in zip(*both, strict=True):
        assert abs((third.norm() / whole.norm() * 3).item() - 1) < 2e-4


def count_products(monkeypatch, fuselage, given: dict, run) -> float:
    """In products of all hidden with the whole weight."""
    counts, parts = [], parts_of(fuselage)

    def counted(function, sizes):
        def call(*args, **options):
            counts.append(sizes(*args))
            return function(*args, **options)

        return call

    def of_mm(a, b, *_) -> int:
        return a.shape[0] * a.shape[1] * b.shape[1]

    def of_addmm(sums, a, b) -> int:
        return of_mm(a, b)

    def of_head(hidden, weight, *_) -> int:
        return hidden.shape[0] * weight.numel()

    with monkeypatch.context() as patched:
        patched.setattr(torch, "mm", counted(torch.mm, of_mm))
        patched.setattr(torch, "addmm", counted(torch.addmm, of_addmm))
        patched.setattr(parts, "head_logits", counted(parts.head_logits, of_head))
        patched.setattr(fuselage.linear_loss, "head_logits", parts.head_logits)
        run()
    return sum(counts) / (given["hidden"].numel() * given["weight"].shape[0])


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (3, {}),
        (3, {"reduction": "sum", "bias": True}),
        (3 + (600 - 256 - 40) / 600, {"group": 256}),
        (3, {"group": 256, "dim": 400}),
        (2, {"frozen": 1}),
        (2, {"frozen": 1, "group": 30}),
        (2, {"frozen": 0}),
        (2 + (600 - 256 - 40) / 600, {"frozen": 0, "group": 256}),
        (1, {"frozen": 2}),
        (4, {"reduction": "none"}),
        (3, {"reduction": "none", "frozen": 1}),
        (4, {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_products(fuselage, device, monkeypatch, expected, options):
    """How many there are: what makes up the time."""
    options = dict(options)
    given = make(device, options.pop("dtype", torch.bfloat16), 600, options.pop("dim", 40))
    frozen, group = options.pop("frozen", None), options.pop("group", None)
    bias = normal((777,), torch.float32, device) if options.pop("bias", False) else None
    leaves = leaves_of(given, bias)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(frozen not in (i, 2))
    if group is not None:
        options["max_workspace"] = workspace_of(given, min(group, 256), group)

    def run() -> None:
        more = {"bias": leaves[2]} if bias is not None else {}
        loss = fuselage.linear_cross_entropy(*leaves[:2], given["targets"], **more, **options)
        if loss.requires_grad:
            loss.sum().backward()

    assert count_products(monkeypatch, fuselage, given, run) == pytest.approx(expected)


class Allocated(TorchDispatchMode):
    """The most bytes that results of operators take at a time, beside what is given."""

    def __init__(self, *given: Tensor):
        super().__init__()
        self.given = {StorageWeakRef(t.untyped_storage()).cdata for t in given}
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.live = {key: kept for key, kept in self.live.items() if not kept[0].expired()}
        for t in tree_leaves(results):
            if isinstance(t, Tensor):
                storage = StorageWeakRef(t.untyped_storage())
                if storage.cdata not in self.given:
                    self.live[storage.cdata] = (storage, t.untyped_storage().nbytes())
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return results


@pytest.mark.parametrize(
    ("reduction", "needs"),
    [
        ("none", (True, True, True)),
        ("none", (False, True, False)),
        ("mean", (True, True, True)),
        ("mean", (True, False, False)),
        ("mean", (False, True, False)),
    ],
)
@pytest.mark.parametrize(
    ("rows", "dim", "vocab", "workspace"),
    [
        (8192, 4096, 151936, 1 << 30),
        (1000, 4096, 50257, 1 << 27),
        (65536, 1024, 32001, 1 << 29),
    ],
)
def test_what_is_allocated(fuselage, monkeypatch, rows, dim, vocab, workspace, reduction, needs):
    """No more than the workspace, of tensors that have these shapes and no memory."""
    loss, number = fuselage.linear_loss, ["none", "sum", "mean"].index(reduction)
    # As on a GPU, where it allocates nothing.
    monkeypatch.setattr(parts_of(fuselage), "_add_product", lambda *args, **options: None)
    hidden, weight = (
        torch.empty(n, dim, device="meta", dtype=torch.bfloat16) for n in (rows, vocab)
    )
    targets = torch.empty(rows, dtype=torch.int64, device="meta")
    head = (hidden, weight, torch.empty(vocab, device="meta"), targets)
    options = (None, number, -100, 0.0, 0.0, None, workspace, *needs)
    gradients = sum(t.nbytes for t, need in zip(head, needs, strict=False) if need)
    with Allocated(*head) as forward:
        _, statistics, count, *_ = loss._forward_of_loss(*head, *options)
    made_bytes = gradients if reduction == "mean" else 0
    assert workspace / 2 < forward.most - made_bytes <= workspace
    if reduction == "none":
        grad_out = torch.empty(rows, device="meta")
        saved = (None, grad_out, statistics, count)
        with Allocated(*head, *saved[1:]) as backward:
            loss._gradients_of_loss(*head, *saved, *options[1:])
        assert workspace / 2 < backward.most - gradients <= workspace


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
@pytest.mark.parametrize("rows", [70, 600])
def test_log_probs_are_those_of_the_draw(fuselage, device, dtype, rows):
    """Bit for bit, for the whole batch and for one row of it."""
    given = make(device, dtype, rows=rows, dim=64, vocab=1500, ignored=0.0)
    drawn = fuselage.lm_head_sample(
        given["hidden"], given["weight"], temperature=0.8, seed=1, return_logprobs=True
    )
    tokens = drawn.tokens[:, 0] if drawn.tokens.dim() == 2 else drawn.tokens
    reported = drawn.logprobs.view(-1)
    for part in (slice(0, rows), slice(5, 6)):
        found = fuselage.linear_log_probs(
            given["hidden"][part], given["weight"], tokens[part], temperature=0.8
        )
        assert_same_bits(found.log_probs, reported[part], str(part))


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_log_probs_of_many_rows_do_not_depend_on_the_batch(fuselage, device, dtype, softcap):
    """Kernels take rows by 256, and two or more such groups in one launch."""
    given = make(device, dtype, rows=1300, dim=64, vocab=1500, ignored=0.0)
    whole = fuselage.linear_log_probs(*given.values(), logit_softcap=softcap)
    logits = exact_logits(given["hidden"].double(), given["weight"].double(), None)
    expected = reference.log_probs(logits, given["targets"], logit_softcap=softcap)
    torch.testing.assert_close(whole.log_probs.double(), expected[0], rtol=1e-5, atol=1e-5)
    for rows in (255, 385, 512, 640, 641, 900):
        part = fuselage.linear_log_probs(
            given["hidden"][-rows:],
            given["weight"],
            given["targets"][-rows:],
            logit_softcap=softcap,
        )
        assert_same_bits(part.log_probs, whole.log_probs[-rows:], str(rows))


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


def requested_bytes() -> tuple[int, int]:
    """Now, and at most. NOTE: of what is allocated, up to 1 MiB of each large block may be what
    PyTorch's allocator did not cut off a larger one: it depends on what ran before.
    """
    stats = torch.cuda.memory_stats()
    return tuple(stats[f"requested_bytes.all.{when}"] for when in ("current", "peak"))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("rows", [512, 4096])
def test_the_workspace_is_kept(fuselage, device, rows, reduction, frozen):
    """Beside the gradients; with the loss, whose graph is alive, and what it was made of."""
    given = make(device, torch.bfloat16, rows=rows, dim=1024, vocab=32_000)
    workspace = 96 << 20
    for is_measured in (False, True):  # after a call that allocates what cuBLAS keeps
        leaves = leaves_of(given, None)
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(frozen not in (i, 2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, _ = requested_bytes()
        loss = fuselage.linear_cross_entropy(
            *leaves, given["targets"], reduction=reduction, max_workspace=workspace
        ).sum()
        if frozen != 2:
            loss.backward()
        gradients = sum(t.nbytes for t in leaves if t.requires_grad)
        after, peak = (n - before for n in requested_bytes())
        if is_measured:
            assert peak <= workspace + gradients + (4 << 20)
            assert after <= gradients + (1 << 18)
        del loss, leaves


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
    names = ("linear_cross_entropy", "linear_log_probs", "PyTorch")
    for name in (*names, "linear_cross_entropy, frozen weight", "PyTorch, frozen weight"):
        column = record["columns"][name]
        assert column["error"] <= 1e-5
        assert column["milliseconds"]["forward"]["median"] > 0
        assert f"16x32x300: {name} |" in done.stdout
