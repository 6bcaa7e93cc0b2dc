"""Log-probabilities of a head that leaves sums of strips of 16 logits, on GPUs where it does: those
of logits in memory, bit for bit."""

from __future__ import annotations

import pytest
import torch
from conftest import why_no_cuda
from harness import assert_same_bits, normal

if why_no_cuda():
    pytest.skip("of kernels for Hopper GPUs", allow_module_level=True)


@pytest.fixture(params=["cuda"])
def cuda(fuselage, request):
    hidden = torch.zeros((1, 64), dtype=torch.bfloat16, device=request.param)
    if not fuselage.linear_loss.ops.makes_strip_sums.default(hidden, hidden):
        pytest.skip("the head makes no sums of strips on this GPU")
    return request.param


def check(fuselage, given: tuple, **options) -> None:
    def run(**more):
        return fuselage.linear_log_probs(
            *given, return_log_sum_exp=True, return_is_greatest=True, **options, **more
        )

    # NOTE: entropies are made of logits in memory.
    ours, expected = run(), run(return_entropy=True)
    for name in ("log_probs", "log_sum_exp", "is_greatest"):
        both = (getattr(found, name) for found in (ours, expected))
        # NOTE: any NaN is as good.
        assert_same_bits(*(torch.where(t.isnan(), -1, t) for t in both), name)


@pytest.mark.parametrize("vocab", [7, 16, 777, 4099])
@pytest.mark.parametrize("rows", [1, 8, 12, 40, 70, 200, 300, 700])
def test_bits_of_logits_in_memory(fuselage, cuda, rows, vocab):
    hidden = normal((rows, 72), torch.bfloat16, cuda)
    weight = normal((vocab, 72), torch.bfloat16, cuda)
    targets = torch.randint(vocab, (rows,), device=cuda)
    check(fuselage, (hidden, weight, targets), temperature=0.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_options(fuselage, cuda, dtype, softcap):
    hidden, weight = normal((300, 40), dtype, cuda), normal((777, 40), dtype, cuda)
    bias = normal((777,), torch.float32, cuda)
    targets = torch.randint(777, (300,), device=cuda, dtype=torch.int32)
    targets[::7], targets[1::7], targets[2::7] = -100, 777, -3
    check(fuselage, (hidden, weight, targets), bias=bias, logit_softcap=softcap)
    small = 8 * 4 * 777  # bytes of workspace: the rows come in parts
    check(fuselage, (hidden, weight, targets), bias=bias, max_workspace=small)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_rows_that_are_not_finite(fuselage, cuda, value, softcap):
    """Of logits, by a bias of one of them, or of all."""
    hidden = normal((20, 40), torch.bfloat16, cuda)
    weight = normal((100, 40), torch.bfloat16, cuda)
    targets = torch.randint(100, (20,), device=cuda)
    targets[:2] = torch.tensor([3, 4], device=cuda)
    for where in ([3], slice(None)):
        bias = torch.zeros(100, device=cuda)
        bias[where] = value
        check(fuselage, (hidden, weight, targets), bias=bias, logit_softcap=softcap)


def test_cpu_and_gpu(fuselage, cuda):
    """The same logits have the same log-probabilities, but for the powers of two of each, whose
    relative errors are 2^-23 and 2^-22, and which are rounded to 2^-24 of the largest."""
    logits = normal((40, 1003), torch.float32, cuda, scale=4.0)
    logits[1, 17], logits[2], logits[3, ::2] = -torch.inf, 2.5, -1e30
    targets = torch.randint(1003, (40,), device=cuda)
    ours = fuselage.log_probs(logits, targets, temperature=1.3).log_probs
    expected = fuselage.log_probs(logits.cpu(), targets.cpu(), temperature=1.3).log_probs
    torch.testing.assert_close(ours.cpu(), expected, rtol=2.0**-22, atol=2.0**-20)


def test_no_logits_in_memory(fuselage, cuda):
    """What is allocated is a fraction of them."""
    hidden = normal((512, 64), torch.bfloat16, cuda)
    weight = normal((32000, 64), torch.bfloat16, cuda)
    targets = torch.randint(32000, (512,), device=cuda)
    fuselage.linear_log_probs(hidden, weight, targets)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fuselage.linear_log_probs(hidden, weight, targets)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 512 * 32000 * 4 / 7
