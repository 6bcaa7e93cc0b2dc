"""log_probs: against float64, and bit for bit against what a draw reports."""

from __future__ import annotations

import math

import loss_reference as reference
import pytest
import torch
from harness import assert_same_bits, each_dtype, normal
from test_cross_entropy import SPECIAL, VOCABULARIES, check_compiled, close, layouts, make
from torch import Tensor

ASKED = {"return_entropy": True, "return_log_sum_exp": True, "return_is_greatest": True}
STYLES = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 4.0},
    "softcap": {"logit_softcap": 4.0, "temperature": 0.7},
}
each_style = pytest.mark.parametrize("style", STYLES)


def check(fuselage, logits: Tensor, targets: Tensor, **options) -> tuple[Tensor, ...]:
    """All results, and the gradients of each of them and of all, are the reference's."""
    leaf, exact = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    found = fuselage.log_probs(leaf, targets, **ASKED, **options)
    expected = reference.log_probs(exact, targets, **options)
    size = 30 / options.get("temperature", 1.0)
    for name, value, wanted in zip(found._fields[:3], found, expected):
        assert value.dtype == torch.float32 and value.device == logits.device
        close(value, wanted.detach(), size, torch.float32, name)
    assert found.is_greatest.dtype == torch.bool and not found.is_greatest.requires_grad
    assert torch.equal(found.is_greatest, expected[3])
    with torch.no_grad():
        for one, other in zip(fuselage.log_probs(leaf, targets, **ASKED, **options), found):
            assert_same_bits(one, other, "without gradients")
    grads = [torch.randn_like(t) for t in found[:3]]
    for some in ((0,), (1,), (2,), (0, 1, 2)):
        (ours,) = torch.autograd.grad(
            [found[i] for i in some], leaf, [grads[i] for i in some], retain_graph=True
        )
        (theirs,) = torch.autograd.grad(
            [expected[i] for i in some],
            exact,
            [grads[i].double() for i in some],
            retain_graph=True,
        )
        assert ours.dtype == logits.dtype
        close(ours, theirs, 3 * size, logits.dtype, f"gradient of {some}")
    return (*(t.detach() for t in found), ours)


@each_dtype
@each_style
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_values_and_gradients(fuselage, device, dtype, style, vocab):
    logits, targets = make(device, (3, 5, vocab), dtype)
    check(fuselage, logits, targets, **STYLES[style])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("vocab", [7, 128, 4097])
def test_values_in_half_precision(fuselage, device, vocab):
    logits, targets = make(device, (7, vocab), torch.bfloat16, integers=torch.int32)
    check(fuselage, logits, targets, temperature=0.7)


# Rollout and trainer


@pytest.mark.kernels_ci
@each_dtype
@pytest.mark.parametrize("vocab", [1, 40, 257, 4096, 33333, 151936])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.1])
def test_the_bits_of_a_draw(fuselage, device, dtype, vocab, temperature):
    logits = normal((5, vocab), dtype, device, scale=3.0)
    if vocab > 1:
        logits[2, vocab // 2 :] = -math.inf
    drawn = fuselage.gumbel_sample(
        logits, temperature=temperature, num_samples=3, seed=5, return_logprobs=True
    )
    for sample in range(3):
        found = fuselage.log_probs(logits, drawn.tokens[:, sample], temperature=temperature)
        assert_same_bits(found.log_probs, drawn.logprobs[:, sample].contiguous(), "log_probs")


@pytest.mark.kernels_ci
def test_the_bits_of_a_draw_from_a_head(fuselage, device):
    hidden, weight = (normal((rows, 64), torch.float32, device) for rows in (6, 3000))
    drawn = fuselage.lm_head_sample(
        hidden, weight, temperature=0.8, seed=5, logit_softcap=9.0, return_logprobs=True
    )
    # The head's own logits, which are sums in another order than PyTorch's: as good as these.
    found = fuselage.log_probs(
        hidden @ weight.T, drawn.tokens[:, 0], temperature=0.8, logit_softcap=9.0
    )
    torch.testing.assert_close(found.log_probs, drawn.logprobs[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_largest_vocabularies(fuselage, device):
    """From 2^24 logits on the unit of the weights is larger."""
    for vocab in ((1 << 24) - 1, (1 << 24) + 8, 1 << 26):
        logits = normal((1, vocab), torch.bfloat16, device)
        drawn = fuselage.gumbel_sample(logits, seed=5, return_logprobs=True)
        found = fuselage.log_probs(logits, drawn.tokens[:, 0])
        assert_same_bits(found.log_probs, drawn.logprobs[:, 0].contiguous(), "log_probs")
        exact = torch.log_softmax(logits.double(), -1)[0, drawn.tokens[0, 0]].item()
        assert found.log_probs.item() == pytest.approx(exact, abs=3e-4)
        loss = fuselage.cross_entropy(logits, drawn.tokens[:, 0])
        assert loss.item() == pytest.approx(-exact, abs=1e-5)


# What else is promised


@pytest.mark.kernels_ci
def test_members_that_were_not_asked_for(fuselage, device):
    logits, targets = make(device, (5, 40), torch.float32)
    plain = fuselage.log_probs(logits, targets)
    assert plain[1:] == (None, None, None)
    everything = fuselage.log_probs(logits, targets, **ASKED)
    assert_same_bits(plain.log_probs, everything.log_probs, "log_probs")
    for option, member in zip(ASKED, plain._fields[1:], strict=True):
        found = fuselage.log_probs(logits, targets, **{option: True})
        given = [name for name in plain._fields if getattr(found, name) is not None]
        assert given == ["log_probs", member]
        assert torch.equal(getattr(found, member), getattr(everything, member))


@pytest.mark.kernels_ci
def test_ignored_rows(fuselage, device):
    logits, targets = make(device, (6, 300), torch.float32, ignored=0.0)
    targets[2] = 999
    logits[2] = math.nan
    leaf = logits.requires_grad_()
    found = fuselage.log_probs(leaf, targets, ignore_index=999, **ASKED)
    assert [t[2].item() for t in found] == [0, 0, 0, False]
    sum(t.sum() for t in found[:3]).backward()
    assert (leaf.grad[2] == 0).all() and leaf.grad.isfinite().all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_targets_out_of_range(fuselage, device, wrong):
    logits = normal((3, 50), torch.float32, device).requires_grad_()
    targets = torch.tensor([4, wrong, 49], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=rf"log_probs: `targets` must be .*got {wrong}$"):
            fuselage.log_probs(logits, targets)
        return
    found = fuselage.log_probs(logits, targets, **ASKED)
    for value in found[:2]:
        assert value.isnan().tolist() == [False, True, False]
    assert not found.is_greatest[1]
    found.log_probs.sum().backward()
    assert logits.grad.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("copies", [1, 100, 8000])
def test_special_logits(fuselage, device, special, copies):
    """As log_softmax has them in float32."""
    logits = torch.tensor(SPECIAL[special] * copies, device=device)[None]
    for target in (0, 1):
        leaf = logits.clone().requires_grad_()
        targets = torch.tensor([target], device=device)
        found = fuselage.log_probs(leaf, targets, **ASKED)
        expected = torch.log_softmax(logits, -1)[:, target]
        torch.testing.assert_close(found.log_probs, expected, equal_nan=True, rtol=1e-6, atol=1e-5)
        is_finite = not (logits.isnan() | (logits == math.inf)).any()
        is_finite &= bool((logits > -math.inf).any())
        assert found.entropy.isfinite().item() == is_finite
        grad = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), leaf)[0]
        assert grad.isfinite().all().item() == is_finite and grad.isnan().any() != is_finite


@pytest.mark.kernels_ci
@pytest.mark.parametrize("vocab", [96, 4099, 40000])
def test_layouts_have_the_same_bits(fuselage, device, vocab):
    logits, targets = make(device, (5, vocab), torch.bfloat16)
    *expected, grad = check(fuselage, logits, targets)
    for view in layouts(logits):
        leaf = view.detach().requires_grad_()
        found = fuselage.log_probs(leaf, targets, **ASKED)
        for name, one, other in zip(found._fields, found, expected, strict=True):
            assert_same_bits(one, other, name)
        grads = [torch.ones_like(t) for t in found[:3]]
        (first,) = torch.autograd.grad(found[:3], leaf, grads)
        assert first.shape == grad.shape


@pytest.mark.kernels_ci
@pytest.mark.parametrize("vocab", [40, 1000, 4099, 50257])
def test_rows_do_not_depend_on_the_batch(fuselage, device, vocab):
    logits, targets = make(device, (37, vocab), torch.bfloat16)
    whole = fuselage.log_probs(logits, targets, **ASKED)
    for rows in (slice(0, 1), slice(3, 8), slice(5, 37)):
        some = fuselage.log_probs(logits[rows], targets[rows], **ASKED)
        for name, one, every in zip(some._fields, some, whole, strict=True):
            assert_same_bits(one, every[rows], name)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, 1e-40])
def test_bad_temperatures(fuselage, device, temperature):
    logits, targets = make(device, (5, 40), torch.float32)
    with pytest.raises(RuntimeError, match=r"log_probs: `temperature` must be in \[2\^-126, 3e38"):
        fuselage.log_probs(logits, targets, temperature=temperature)


def test_compiled_without_recompiles(fuselage, device):
    def call(x, targets):
        found = fuselage.log_probs(x * 2, targets, temperature=0.7, return_entropy=True)
        return found.log_probs.sum() + 0.1 * found.entropy.sum()

    check_compiled(call, (make(device, (rows, 100), torch.bfloat16) for rows in (4, 7, 30)))


@pytest.mark.kernels_ci
def test_empty(fuselage, device):
    logits = torch.empty((0, 9), device=device).requires_grad_()
    targets = torch.empty((0,), dtype=torch.int64, device=device)
    found = fuselage.log_probs(logits, targets, **ASKED)
    assert all(t.shape == (0,) for t in found)
    assert torch.autograd.grad(found.log_probs.sum(), logits)[0].shape == (0, 9)
