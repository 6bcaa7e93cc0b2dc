"""Attention of heads that flash attention is too narrow for."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from harness import normal, on_devices
from integrations.models import (
    assert_no_farther,
    compiled_and_counted,
    counted_ops,
    half_of,
    randomise,
)
from torch.nn import functional

pytest.importorskip("diffusers")

COLUMNS = 264


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.diffusers


@pytest.fixture
def wide(fuselage, monkeypatch):
    """The module, as if few tokens were many, and on a GPU."""
    module = importlib.import_module(f"{fuselage.integrations.__name__}._wide_heads")
    monkeypatch.setattr(module, "_LEAST_TOKENS", 1)
    monkeypatch.setattr(module._probe, "is_on_gpu", lambda x: True)
    return module


def attention(heads: int = 1, columns: int = COLUMNS) -> torch.nn.Module:
    from diffusers.models.attention_processor import Attention

    model = Attention(
        heads * columns,
        heads=heads,
        dim_head=columns,
        norm_num_groups=8,
        residual_connection=True,
        bias=True,
    )
    randomise(model)
    return model.eval()


def heads_of(tokens: int, keys: int, dtype, device: str, columns: int = COLUMNS):
    """Of heads side by side in a token, as a processor has them."""
    shapes = [(2, n, 3, columns) for n in (tokens, keys, keys)]
    return [normal(shape, dtype, device).transpose(1, 2) for shape in shapes]


def exact(query, key, value) -> torch.Tensor:
    q, k, v = (x.double() for x in (query, key, value))
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("room", [1, 1 << 28])
@on_devices(((1, 1), (37, 53), (64, 16)), ((1, 1), (37, 53), (1024, 4096), (2000, 999)), "sizes")
def test_values(fuselage, wide, monkeypatch, device, sizes, dtype, room):
    monkeypatch.setattr(wide, "_WORKSPACE", room)
    given = heads_of(*sizes, dtype, device)
    expected = exact(*given)
    with counted_ops(fuselage) as counts, torch.no_grad():
        actual = wide.attention(*given, dropout_p=0.0, is_causal=False)
    assert counts["cross_entropy_fwd_bwd_"] > 0
    plain = functional.scaled_dot_product_attention(*given)
    assert actual.dtype == dtype
    # Weights are rounded once, and each may err by half a unit, as those of flash attention.
    error, other = ((x.double() - expected).norm() / expected.norm() for x in (actual, plain))
    assert error <= max(1.5 * other, torch.finfo(dtype).eps)


@on_devices((40,), (40, 1500), "tokens")
def test_large_logits(fuselage, wide, device, tokens):
    query, key, value = heads_of(tokens, tokens, torch.bfloat16, device)
    given = query * 1e4, key * 1e4, value
    with torch.no_grad():
        actual = wide.attention(*given)
    torch.testing.assert_close(actual.double(), exact(*given), rtol=2e-2, atol=2e-2)
    given[0][0, 0, 3] = float("nan")
    with torch.no_grad():
        actual = wide.attention(*given)
    assert actual[0, 0, 3].isnan().all()
    assert actual.isnan().sum() == COLUMNS


def test_memory_that_nothing_wrote_is_not_read(wide, device, monkeypatch):
    """Products of CPUs with AMX read past the end of a row."""
    empty = torch.Tensor.new_empty

    def filled(self, *sizes, **options):
        return empty(self, *sizes, **options).fill_(float("nan"))

    given = heads_of(37, 35, torch.bfloat16, device)
    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    with torch.no_grad():
        assert wide.attention(*given).isfinite().all()


CALLS = {
    "a mask": lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(9, 9, dtype=torch.bool)}),
    "causal": lambda q, k, v: ((q, k, v), {"is_causal": True}),
    "causal, by place": lambda q, k, v: ((q, k, v, None, 0.0, True), {}),
    "dropout": lambda q, k, v: ((q, k, v), {"dropout_p": 0.5}),
    "another scale": lambda q, k, v: ((q, k, v), {"scale": 0.5}),
    "no scale": lambda q, k, v: ((q, k, v), {"scale": 0.0}),
    "float32": lambda *given: ([x.float() for x in given], {}),
    "narrow heads": lambda *given: ([x[..., :256] for x in given], {}),
    "one head of keys": lambda q, k, v: ((q, k[:, :1], v[:, :1]), {}),
    "a gradient": lambda q, k, v: ((q.requires_grad_(), k, v), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_are_left_to_pytorch(fuselage, wide, name):
    given, options = CALLS[name](*heads_of(9, 9, torch.bfloat16, "cpu"))
    torch.manual_seed(0)
    expected = functional.scaled_dot_product_attention(*given, **options)
    torch.manual_seed(0)
    with counted_ops(fuselage) as counts:
        actual = wide.attention(*given, **options)
    assert counts["cross_entropy_fwd_bwd_"] == 0
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_processor(fuselage, integration, wide, heads):
    model = attention(heads)
    half = half_of(model)
    plain, kept = copy.deepcopy(half), half.processor
    report = integration.patch(half)
    assert wide.WHAT in report.replaced[""]

    def image(seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, heads * COLUMNS, 5, 7, generator=generator).bfloat16()

    with counted_ops(fuselage) as counts, torch.no_grad():
        actual = half(image())
    assert counts["cross_entropy_fwd_bwd_"] == 2 * heads
    with torch.no_grad():
        assert_no_farther(
            lambda seed: half(image(seed)),
            lambda seed: plain(image(seed)),
            lambda seed: model(image(seed).float()),
        )
        assert torch.equal(copy.deepcopy(half)(image()), actual)
    assert type(pickle.loads(pickle.dumps(half)).processor) is type(kept)
    assert wide.WHAT in integration.patch(half).replaced[""]
    assert integration.unpatch(half) > 0
    assert half.processor is kept


def test_narrow_heads_keep_their_processor(integration, wide):
    model = attention(2, 64)
    kept = model.processor
    integration.patch(model)
    assert model.processor is kept


def test_compiled(fuselage, integration, wide):
    model = half_of(attention())
    integration.patch(model)
    x = torch.randn(2, COLUMNS, 4, 6).bfloat16()
    compiled, counts = compiled_and_counted(model, fuselage)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    assert counts["attention_of_wide_heads"] == 1
