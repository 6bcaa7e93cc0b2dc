"""Rows of one tensor that are whole 16-byte vectors beside rows of another that are not.

With mixed dtypes, and rows further apart than they are long, every tensor of a call has an
alignment of its own. Kernels that take vectors or bulk copies for granted read past the end of
rows, or wait for ever: a bulk copy of a size that is no multiple of 16 bytes never completes.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

HANG_SECONDS = 300
HALVES = (torch.float16, torch.bfloat16)

# Sums over a row or a column in another order: float32 noise of up to 1024 terms, relative to the
# largest result. What is rounded to half precision may turn the other way besides, which is one
# unit in the last place.
NOISE = 2e-6


def rows_for(device: str) -> int:
    """On a GPU more than an H200 works on at once: its persistent backward then copies ahead."""
    return 1024 if device == "cuda" else 16


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Ends the process, with a traceback, where a kernel never does."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def spread(x: Tensor, columns: int) -> Tensor:
    """The values of `x`, in rows that are a multiple of `columns` elements apart."""
    dim = x.shape[-1]
    wide = torch.full((*x.shape[:-1], -(-(dim + 1) // columns) * columns), torch.nan).to(x)
    wide[..., :dim] = x.detach()
    return wide[..., :dim]


def results(call: Callable, inputs: list[Tensor], others: list[Tensor], columns: int | None):
    """Outputs and gradients of `call`, of tensors whose rows are `columns` apart or contiguous."""

    def laid_out(x: Tensor) -> Tensor:
        return x.detach().clone() if columns is None else spread(x, columns)

    leaves = [laid_out(x).requires_grad_() for x in inputs]
    leaves += [x.detach().clone().requires_grad_() for x in others]
    outputs = call(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
    torch.autograd.backward(outputs, [laid_out(grad) for grad in grads])
    if outputs[0].is_cuda:
        torch.cuda.synchronize()
    return [*outputs, *(leaf.grad for leaf in leaves)]


def check(call: Callable, inputs: list[Tensor], others: list[Tensor]) -> None:
    """`call` gives the same for `inputs` and gradients of every alignment."""
    expected = results(call, inputs, others, None)
    for columns in (8, 2, 1):
        for actual, wanted in zip(results(call, inputs, others, columns), expected, strict=True):
            assert actual.dtype == wanted.dtype
            largest = wanted.double().abs().max().item()
            unit = torch.finfo(wanted.dtype).eps if wanted.dtype in HALVES else 0.0
            torch.testing.assert_close(
                actual.double(), wanted.double(), rtol=unit, atol=NOISE * max(largest, 1.0)
            )


def normal(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


# Rows of 4-byte elements are whole vectors, of 2-byte elements not: 12, 516 and 4100 columns are a
# multiple of four and not of eight.
DIMS = (12, 516, 4100)
both_halves = pytest.mark.parametrize("half", HALVES, ids=str)
every_dim = pytest.mark.parametrize("dim", DIMS)


def test_a_gradient_of_half_precision_for_rows_of_float32(fuselage: ModuleType, device: str):
    # Never answered on an H200: rows of grad_out have 8200 bytes.
    rows = 4 * rows_for(device)
    x = torch.randn(rows, 4100, device=device, requires_grad=True)
    weight = torch.ones(4100, device=device)
    y = fuselage.rms_norm(x, weight, out_dtype=torch.bfloat16)
    grad = torch.randn(rows, 4104, device=device, dtype=torch.bfloat16)
    y.backward(grad[:, :4100])
    (expected,) = torch.autograd.grad(
        fuselage.rms_norm(x, weight, out_dtype=torch.bfloat16), x, grad[:, :4100].contiguous()
    )
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-5)


@both_halves
@every_dim
@pytest.mark.parametrize("narrow_out", [True, False])
def test_rms_norm(fuselage: ModuleType, device: str, half: torch.dtype, dim: int, narrow_out: bool):
    dtype, out_dtype = (torch.float32, half) if narrow_out else (half, torch.float32)
    x, residual = (normal(device, dtype, rows_for(device), dim) for _ in range(2))
    weight = normal(device, torch.float32, dim)
    check(lambda x, w: fuselage.rms_norm(x, w, out_dtype=out_dtype), [x], [weight])
    check(
        lambda x, r, w: fuselage.fused_add_rms_norm(x, r, w, out_dtype=out_dtype),
        [x, residual],
        [weight],
    )


@both_halves
@every_dim
def test_adaptive_norms(fuselage: ModuleType, device: str, half: torch.dtype, dim: int):
    x, residual = (normal(device, half, 4, rows_for(device) // 4, dim) for _ in range(2))
    scale, shift, gate = (normal(device, torch.float32, 4, dim) for _ in range(3))
    weight = normal(device, torch.float32, dim)
    check(fuselage.ada_rms_norm, [x, scale, shift], [weight])
    check(fuselage.layer_norm, [x], [weight])
    check(fuselage.gate_residual_ada_norm, [x, residual, gate, scale, shift], [weight])


@both_halves
@every_dim
def test_poly_norm(fuselage: ModuleType, device: str, half: torch.dtype, dim: int):
    x, mul = (normal(device, half, rows_for(device), dim) for _ in range(2))
    weight, bias = normal(device, torch.float32, 3), normal(device, torch.float32, 1)
    check(fuselage.poly_norm, [x], [weight, bias])
    check(fuselage.fused_mul_poly_norm, [x, mul], [weight, bias])


@both_halves
@every_dim
def test_gates(fuselage: ModuleType, device: str, half: torch.dtype, dim: int):
    x, up = (normal(device, half, rows_for(device), dim) for _ in range(2))
    bias = normal(device, torch.float32, dim)
    check(lambda x, b: fuselage.bias_act(x, b, "silu"), [x], [bias])
    check(fuselage.swiglu, [x, up], [])
    check(fuselage.silu_and_mul, [x], [])
    check(fuselage.swiglu_clamped, [x], [])


@both_halves
@pytest.mark.parametrize("dim", [12, 60, 100])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(fuselage: ModuleType, device: str, half: torch.dtype, dim: int, interleaved: bool):
    q, k = (normal(device, half, 2, 64, heads, dim) for heads in (6, 3))
    cos, sin = (normal(device, torch.float32, 64, dim) for _ in range(2))
    weight = normal(device, torch.float32, dim)

    def rotary(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return fuselage.apply_rotary(q, k, cos, sin, interleaved=interleaved)

    def normed(q: Tensor, k: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fuselage.qk_norm_rotary(q, k, weight, weight, cos, sin, interleaved=interleaved)

    check(rotary, [q, k], [])
    check(normed, [q, k], [weight])


@both_halves
@pytest.mark.parametrize("vocab", [1004, 50257])
def test_sampling(fuselage: ModuleType, device: str, half: torch.dtype, vocab: int):
    logits = normal(device, half, 20, vocab)
    bias = normal(device, torch.float32, vocab)
    for options in ({}, {"bias": bias}, {"top_k": 50}, {"top_p": 0.9}, {"return_logprobs": True}):
        offset = torch.zeros(1, dtype=torch.int64, device=device)
        expected = fuselage.gumbel_sample(logits, seed=3, offset=offset.clone(), **options)
        for columns in (8, 2, 1):
            moved = spread(logits, columns)
            actual = fuselage.gumbel_sample(moved, seed=3, offset=offset.clone(), **options)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@both_halves
@pytest.mark.parametrize("dim", [12, 516])
@pytest.mark.parametrize("batch", [1, 20])
def test_head(fuselage: ModuleType, device: str, half: torch.dtype, dim: int, batch: int):
    hidden, weight = normal(device, half, batch, dim), normal(device, half, 5000, dim)
    # Greedy, where no two logits are within what another order of additions changes.
    logits = hidden.double() @ weight.double().T
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second > 1e-4 * best.abs()).all()
    for rows in (None, 8, 2, 1):
        for columns in (None, 8, 2, 1):
            token = fuselage.lm_head_sample(
                hidden if rows is None else spread(hidden, rows),
                weight if columns is None else spread(weight, columns),
                temperature=0.0,
            )
            assert (token.view(-1) == logits.argmax(-1)).all()
