"""cross_entropy: values and gradients against float64, and what is promised besides."""

from __future__ import annotations

import math

import loss_reference as reference
import pytest
import torch
import torch.nn.functional as F
from harness import (
    assert_same_bits,
    captured_by_a_graph,
    each_dtype,
    half_an_ulp,
    normal,
    on_devices,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

# What float32 arithmetic may lack of a loss: a sum of a row's exponentials, of an approximate
# exponential on a GPU, its logarithm, and a difference of logits; relative to the size of those.
NOISE = 2e-6
VOCABULARIES = (1, 2, 7, 8, 100, 128, 255, 256, 257, 1000, 4096, 4097, 16384, 32001, 50257)
CI_VOCABULARIES = (7, 128, 4097)

STYLES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "square": {"lse_square_scale": 0.01, "reduction": "none"},
    "softcap": {"logit_softcap": 4.0, "label_smoothing": 0.2},
    "weights": {"weighted": True},
    "all": {
        "weighted": True,
        "reduction": "none",
        "label_smoothing": 0.3,
        "lse_square_scale": 0.02,
        "logit_softcap": 3.0,
    },
}
each_style = pytest.mark.parametrize("style", STYLES)


def make(device, shape, dtype, *, ignored=0.2, scale=3.0, integers=torch.int64):
    """Logits and targets, some of which are ignored. The first never is."""
    logits = normal(shape, dtype, device, scale=scale)
    targets = torch.randint(shape[-1], shape[:-1], device=device)
    skipped = torch.rand(shape[:-1], device=device) < ignored
    if skipped.numel():
        skipped.view(-1)[0] = False
    return logits, torch.where(skipped, -100, targets).to(integers)


def options_of(style: str, targets: Tensor) -> dict:
    options = dict(STYLES[style])
    if options.pop("weighted", False):
        options["token_weights"] = normal(targets.shape, torch.float32, targets.device)
    return options


def close(actual: Tensor, exact: Tensor, size: float, dtype: torch.dtype, label: str) -> None:
    """Within float32 noise of terms of that size, and the rounding to `dtype`."""
    assert actual.shape == exact.shape, label
    bound = NOISE * size + NOISE * exact.abs() + half_an_ulp(exact, dtype)
    error = (actual.detach().double() - exact).abs()
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    assert (same | (error <= bound)).all(), f"{label}: {error.max().item():.3g}"


def check(fuselage, logits: Tensor, targets: Tensor, grad: Tensor | None = None, **options):
    """The loss and its gradient are the reference's. Returns both."""
    leaf, exact = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    loss = fuselage.cross_entropy(leaf, targets, **options)
    expected = reference.cross_entropy(exact, targets, **options)
    assert loss.dtype == torch.float32 and loss.device == logits.device
    weights = options.get("token_weights")
    weight = 1.0 if weights is None or weights.numel() == 0 else weights.abs().max().item()
    size = 20 * weight
    close(loss, expected.detach(), size, torch.float32, "loss")
    with torch.no_grad():
        assert_same_bits(fuselage.cross_entropy(logits, targets, **options), loss, "no gradient")
    grad = torch.randn_like(loss) if grad is None else grad
    ours, theirs = torch.autograd.grad(loss, leaf, grad)[0], None
    (theirs,) = torch.autograd.grad(expected, exact, grad.double())
    assert ours.dtype == logits.dtype and ours.is_contiguous()
    largest = grad.abs().max().item() if grad.numel() else 0.0
    close(ours, theirs, largest * weight, logits.dtype, "gradient")
    return loss.detach(), ours


@each_dtype
@each_style
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_values_and_gradients(fuselage, device, dtype, style, vocab):
    logits, targets = make(device, (3, 5, vocab), dtype)
    check(fuselage, logits, targets, **options_of(style, targets))


@pytest.mark.kernels_ci
@each_style
@pytest.mark.parametrize("vocab", CI_VOCABULARIES)
def test_values_in_half_precision(fuselage, device, style, vocab):
    logits, targets = make(device, (2, 5, vocab), torch.bfloat16)
    check(fuselage, logits, targets, **options_of(style, targets))


@pytest.mark.kernels_ci
def test_int32_targets_and_one_row(fuselage, device):
    logits, targets = make(device, (4, 33), torch.float32, integers=torch.int32)
    check(fuselage, logits, targets)
    loss = fuselage.cross_entropy(logits[0], targets[0])
    assert_same_bits(loss, fuselage.cross_entropy(logits[:1], targets[:1]), "a row")


@pytest.mark.parametrize("rows", [1, 2, 100, 5000])
def test_rows(fuselage, device, rows):
    logits, targets = make(device, (rows, 130), torch.bfloat16)
    for reduction in ("none", "sum", "mean"):
        check(fuselage, logits, targets, reduction=reduction)


@pytest.mark.slow
@on_devices([(20_000, 128), (300, 5000)], [(100_000, 128), (2500, 40_000), (1500, 50_257)])
def test_many_rows(fuselage, device, dim):
    """On a GPU enough for blocks of the backward that have several chunks of a row."""
    logits, targets = make(device, dim, torch.bfloat16)
    check(fuselage, logits, targets, torch.ones((), device=device), label_smoothing=0.1)
    leaf = logits.requires_grad_()
    whole = fuselage.cross_entropy(leaf, targets, reduction="sum")
    (grad,) = torch.autograd.grad(whole, leaf)
    for begin in (0, 17):
        some = logits[begin : begin + 3].detach().requires_grad_()
        loss = fuselage.cross_entropy(some, targets[begin : begin + 3], reduction="sum")
        (few,) = torch.autograd.grad(loss, some)
        assert_same_bits(few, grad[begin : begin + 3], f"gradient of rows from {begin} on")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_in_a_graph(fuselage, device):
    logits, targets = make(device, (64, 32_000), torch.bfloat16)
    leaf = logits.requires_grad_()

    def run():
        loss = fuselage.cross_entropy(leaf, targets)
        found = fuselage.log_probs(leaf, targets, return_entropy=True)
        total = loss + found.log_probs.sum() + found.entropy.sum()
        return loss.detach(), found.log_probs.detach(), torch.autograd.grad(total, leaf)[0]

    graph, captured = captured_by_a_graph(run)
    with torch.no_grad():
        leaf.copy_(normal(leaf.shape, torch.bfloat16, device))
    graph.replay()
    for name, replayed, expected in zip(("loss", "log_probs", "gradient"), captured, run()):
        assert_same_bits(replayed, expected, name)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_all_ignored(fuselage, device, reduction):
    logits = normal((4, 50), torch.float32, device).requires_grad_()
    targets = torch.full((4,), 77, device=device)
    given = {"reduction": reduction, "ignore_index": 77}
    for smoothing in (0.0, 0.1):
        loss = fuselage.cross_entropy(logits, targets, label_smoothing=smoothing, **given)
        expected = F.cross_entropy(logits, targets, label_smoothing=smoothing, **given)
        assert torch.equal(loss, expected) or (loss.isnan() and expected.isnan())
        if reduction != "mean":
            (grad,) = torch.autograd.grad(loss.sum(), logits)
            assert (grad == 0).all()


@pytest.mark.kernels_ci
def test_ignored_rows_are_not_read(fuselage, device):
    logits, targets = make(device, (6, 300), torch.float32, ignored=0.0)
    targets[2] = targets[4] = -100
    clean = check(fuselage, logits, targets, label_smoothing=0.1)
    logits[2] = math.nan
    logits[4] = math.inf
    leaf = logits.requires_grad_()
    loss = fuselage.cross_entropy(leaf, targets, label_smoothing=0.1)
    assert_same_bits(loss, clean[0], "loss")
    loss.backward()
    assert (leaf.grad[[2, 4]] == 0).all() and leaf.grad.isfinite().all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("wrong", [-1, 50, 2**40, -(2**40)])
def test_targets_out_of_range(fuselage, device, wrong):
    logits = normal((3, 50), torch.float32, device).requires_grad_()
    targets = torch.tensor([4, wrong, 49], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=rf"`targets` must be in \[0, 50\) .*got {wrong}$"):
            fuselage.cross_entropy(logits, targets)
        return
    loss = fuselage.cross_entropy(logits, targets, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    loss.backward(torch.ones_like(loss))
    assert logits.grad.isnan().all(1).tolist() == [False, True, False]
    assert logits.grad[[0, 2]].isfinite().all()


SPECIAL = {
    "huge": [1e30, -1e30, 3.0, 0.0, 1e30],
    "lowest": [-3.4028235e38, -3.4028235e38, -math.inf, -3.4028235e38, -math.inf],
    "far": [0.0, -200.0, 100.0, 99.0, -1e4],
    "some -inf": [1.0, -math.inf, 2.0, -math.inf, 0.5],
    "all -inf": [-math.inf] * 5,
    "one inf": [1.0, math.inf, 2.0, 0.0, 0.5],
    "a NaN": [1.0, math.nan, 2.0, 0.0, 0.5],
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("copies", [1, 100, 2000])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_special_logits(fuselage, device, special, copies, target):
    """As the float32 formula of PyTorch has them."""
    logits = torch.tensor(SPECIAL[special] * copies, device=device)[None].requires_grad_()
    targets = torch.tensor([target], device=device)
    loss = fuselage.cross_entropy(logits, targets)
    expected = F.cross_entropy(logits, targets)
    (grad,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected, equal_nan=True, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grad, wanted, equal_nan=True, rtol=1e-4, atol=1e-6)


# Layouts


def layouts(logits: Tensor):
    rows, vocab = logits.shape
    for gap, start in ((1, 0), (3, 1), (8, 8), (8, 1)):
        wide = torch.full((rows, vocab + gap + start), math.nan, device=logits.device)
        wide = wide.to(logits.dtype)
        wide[:, start : start + vocab] = logits
        yield wide[:, start : start + vocab]
    yield logits.t().contiguous().t()
    yield torch.cat((logits[:0], logits))[:]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("vocab", [96, 1024, 4099, 40000])
@each_dtype
def test_layouts_have_the_same_bits(fuselage, device, dtype, vocab):
    logits, targets = make(device, (5, vocab), dtype)
    options = {"reduction": "none", "label_smoothing": 0.1}
    grad = torch.randn(5, device=device)
    loss, expected = check(fuselage, logits, targets, grad, **options)
    for view in layouts(logits):
        leaf = view.detach().requires_grad_()
        other = fuselage.cross_entropy(leaf, targets, **options)
        assert_same_bits(other, loss, "loss")
        assert_same_bits(torch.autograd.grad(other, leaf, grad)[0], expected, "gradient")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("vocab", [40, 128, 1000, 4099, 50257])
def test_rows_do_not_depend_on_the_batch(fuselage, device, vocab):
    logits, targets = make(device, (37, vocab), torch.bfloat16)
    options = {"reduction": "none", "label_smoothing": 0.1, "lse_square_scale": 0.1}
    grad = torch.randn(37, device=device)

    def run(rows: slice):
        leaf = logits[rows].clone().requires_grad_()
        loss = fuselage.cross_entropy(leaf, targets[rows], **options)
        return loss, torch.autograd.grad(loss, leaf, grad[rows])[0]

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(3, 8), slice(36, 37), slice(5, 37)):
        for name, some, all_rows in zip(("loss", "gradient"), run(rows), whole, strict=True):
            assert_same_bits(some, all_rows[rows], f"{name} of {rows}")
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            again = run(slice(None))
        finally:
            torch.set_num_threads(threads)
        assert_same_bits(again[0], whole[0], "loss")
        assert_same_bits(again[1], whole[1], "gradient")


@pytest.mark.kernels_ci
def test_empty(fuselage, device):
    logits = torch.empty((2, 0, 9), device=device).requires_grad_()
    targets = torch.empty((2, 0), dtype=torch.int64, device=device)
    assert fuselage.cross_entropy(logits, targets, reduction="none").shape == (2, 0)
    total = fuselage.cross_entropy(logits, targets, reduction="sum")
    assert total == 0
    assert fuselage.cross_entropy(logits, targets).isnan()
    assert torch.autograd.grad(total, logits)[0].shape == logits.shape


# In place


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("vocab", [40, 1000, 4099])
@pytest.mark.parametrize("gap", [0, 3])
def test_the_backward_in_place(fuselage, device, dtype, vocab, gap):
    base, targets = make(device, (5, vocab + gap), dtype)
    targets = targets.clamp(max=vocab - 1)
    leaf = base.requires_grad_()
    expected = torch.autograd.grad(fuselage.cross_entropy(leaf[:, gap:], targets), leaf)[0]
    logits = (leaf * 1)[:, gap:]
    loss = fuselage.cross_entropy(logits, targets, inplace_backward=True)
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    assert_same_bits(grad, expected[:, gap:].contiguous(), "gradient")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf)


@pytest.mark.kernels_ci
def test_the_backward_in_place_is_refused(fuselage, device):
    leaf, targets = make(device, (5, 40), torch.float32)
    leaf.requires_grad_()
    with pytest.raises(RuntimeError, match=r"cross_entropy: `inplace_backward` would .* leaf"):
        fuselage.cross_entropy(leaf, targets, inplace_backward=True)
    for wrong in ((leaf * 1).t().contiguous().t(), (leaf[:1] * 1).expand(5, 40)):
        with pytest.raises(RuntimeError, match="cross_entropy: `logits` is written in place"):
            fuselage.cross_entropy(wrong, targets, inplace_backward=True)

    def call(x):
        return fuselage.cross_entropy(x * 1, targets, inplace_backward=True)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="inplace_backward"):
        torch.compile(call, backend="eager", fullgraph=True)(leaf)


# The rest


@pytest.mark.kernels_ci
def test_weights_get_no_gradient(fuselage, device):
    logits, targets = make(device, (5, 40), torch.float32)
    weights = torch.ones(5, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="cross_entropy: `token_weights` has no gradient"):
        fuselage.cross_entropy(logits, targets, token_weights=weights)


BAD = [
    ({"targets": lambda t: t[:-1]}, "`targets` must have the shape of `logits` [5, 40] without"),
    ({"targets": lambda t: t.float()}, "`targets` must be int64 or int32, got Float"),
    ({"logits": lambda t: t.double()}, "`logits` must be float16, bfloat16 or float32, got Double"),
    ({"logits": lambda t: t[..., :0]}, "columns of `logits` must be 1 to 2^26"),
    ({"token_weights": lambda t: torch.ones(5).double()}, "`token_weights` must be float32"),
    ({"token_weights": lambda t: torch.ones(4)}, "`token_weights` must have the shape of"),
    ({"label_smoothing": 1.5}, "`label_smoothing` must be in [0, 1], got 1.5"),
    ({"lse_square_scale": math.inf}, "`lse_square_scale` must be finite"),
    ({"logit_softcap": 0.0}, "`logit_softcap` must be positive, got 0"),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input(fuselage, device, number):
    change, message = BAD[number]
    logits, targets = make(device, (5, 40), torch.float32)
    given = {"logits": logits, "targets": targets}
    for name, value in change.items():
        given[name] = value(given.get(name)) if callable(value) else value
        if isinstance(given[name], Tensor):
            given[name] = given[name].to(device)
    with pytest.raises(RuntimeError) as error:
        fuselage.cross_entropy(**given)
    assert f"fuselage::cross_entropy: {message}" in str(error.value)


def check_compiled(call, arguments) -> None:
    """One graph for all `arguments`, of which the first are logits, with the bits of eager mode."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for logits, *others in arguments:
        results = []
        for function in (call, compiled):
            leaf = logits.clone().requires_grad_()
            loss = function(leaf, *others)
            results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
        for eager, other in zip(*results, strict=True):
            assert_same_bits(other, eager, f"{len(logits)} rows")
        first = counter.frame_count if first is None else first
        assert counter.frame_count == first > 0


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_without_recompiles(fuselage, device, dtype):
    def call(x, targets, weights):
        losses = fuselage.cross_entropy(
            x * 2, targets, reduction="none", token_weights=weights, label_smoothing=0.1
        )
        return losses.sum() + fuselage.cross_entropy(x * 2, targets)

    check_compiled(
        call,
        (
            (*make(device, (rows, 100), dtype), torch.rand(rows, device=device))
            for rows in (4, 7, 30, 129)
        ),
    )


@pytest.mark.kernels_ci
def test_autocast_changes_nothing(fuselage, device):
    logits, targets = make(device, (5, 40), torch.bfloat16)
    weights = torch.ones(5, device=device)
    expected = check(fuselage, logits, targets, torch.ones((), device=device))
    with torch.autocast(device, dtype=torch.bfloat16):
        leaf = logits.clone().requires_grad_()
        loss = fuselage.cross_entropy(leaf, targets, token_weights=weights.bfloat16())
        assert loss.dtype == F.cross_entropy(logits, targets).dtype == torch.float32
        assert fuselage.cross_entropy(logits.float(), targets).dtype == torch.float32
    assert_same_bits(loss, expected[0], "loss")
    assert_same_bits(torch.autograd.grad(loss, leaf)[0], expected[1], "gradient")


def test_checkpoints_and_accumulation(fuselage, device):
    hidden = normal((6, 16), torch.float32, device).requires_grad_()
    weight = normal((50, 16), torch.float32, device).requires_grad_()
    _, targets = make(device, (6, 50), torch.float32)

    def loss_of(h):
        return fuselage.cross_entropy(h @ weight.T, targets, reduction="sum")

    loss_of(hidden).backward()
    expected = weight.grad.clone(), hidden.grad.clone()
    weight.grad = hidden.grad = None
    checkpoint(loss_of, hidden, use_reentrant=False).backward()
    assert_same_bits(weight.grad, expected[0], "grad_weight")
    for part in (slice(0, 2), slice(2, 6)):
        loss = fuselage.cross_entropy(hidden[part] @ weight.T, targets[part], reduction="sum")
        loss.backward()
    torch.testing.assert_close(weight.grad, 2 * expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.kernels_ci
def test_module(fuselage, device):
    logits, targets = make(device, (5, 40), torch.float32)
    options = {"label_smoothing": 0.1, "reduction": "sum", "lse_square_scale": 0.1}
    module = fuselage.modules.CrossEntropyLoss(**options, logit_softcap=3.0)
    expected = fuselage.cross_entropy(logits, targets, **options, logit_softcap=3.0)
    assert_same_bits(module(logits, targets), expected, "loss")
    shown = "CrossEntropyLoss(ignore_index=-100, reduction='sum', label_smoothing=0.1, "
    assert repr(module) == shown + "lse_square_scale=0.1, logit_softcap=3.0)"
