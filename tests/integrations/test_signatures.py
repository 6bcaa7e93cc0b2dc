"""Attention of diffusers that asks for the signature of its processor in every call."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

KEPT = {"": "signature kept"}


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.diffusers


@pytest.fixture
def asked(monkeypatch) -> list:
    """What is asked of `inspect` meanwhile."""
    calls, original = [], inspect.signature

    def signature(function, *args, **kwargs):
        calls.append(function)
        return original(function, *args, **kwargs)

    monkeypatch.setattr(inspect, "signature", signature)
    return calls


def attention(processor=None) -> Attention:
    torch.manual_seed(0)
    return Attention(16, heads=2, dim_head=8, processor=processor or AttnProcessor2_0()).eval()


def test_asked_once(integration, asked):
    class Own(AttnProcessor2_0):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    module, x = attention(Own()), torch.randn(2, 3, 16)
    expected = module(x)
    assert len(asked) == 1
    assert integration.patch(module).replaced == KEPT
    assert integration.patch(module).replaced == KEPT
    asked.clear()
    for _ in range(3):
        assert torch.equal(module(x), expected)
    assert len(asked) == 1
    assert integration.unpatch(module) == 1
    assert "forward" not in vars(module)
    assert torch.equal(module(x), expected) and len(asked) == 2


class Scaled(AttnProcessor2_0):
    def __call__(self, attn, hidden_states, *args, factor=1.0, **kwargs):
        return factor * super().__call__(attn, hidden_states, *args, **kwargs)


class ScaledModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Scaled()

    def forward(self, attn, hidden_states, *args, factor=1.0, **kwargs):
        return self.inner(attn, hidden_states, *args, factor=factor, **kwargs)


class Messages(logging.Handler):
    """Those of a logger, in order."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What diffusers warns of."""
    handler = Messages()
    logging.getLogger("diffusers").addHandler(handler)
    yield handler.texts
    logging.getLogger("diffusers").removeHandler(handler)


@pytest.mark.parametrize("processor", [Scaled, ScaledModule, AttnProcessor, AttnProcessor2_0])
def test_arguments_of_the_processor(integration, messages, processor):
    """Those that it has no name for are ignored, with a warning, as in a plain model."""
    module, x = attention(processor()), torch.randn(2, 3, 16)
    expected = module(x, factor=3.0)
    warnings = list(messages)
    messages.clear()
    integration.patch(module)
    assert torch.equal(module(x, factor=3.0), expected)
    assert messages == warnings
    assert bool(warnings) == (processor is not Scaled)
    assert torch.equal(expected, module(x)) == (processor is not Scaled)


def test_a_processor_that_is_set_later(integration):
    module, x = attention(), torch.randn(2, 3, 16)
    integration.patch(module)
    plain = module(x)
    module.set_processor(Scaled())
    assert torch.equal(module(x, factor=2.0), 2 * plain)
    module.set_processor(ScaledModule())
    assert torch.equal(module(x), plain)


def test_compiled(integration, asked):
    module, x = attention(), torch.randn(2, 3, 16)
    expected = module(x)
    integration.patch(module)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)


def test_others_stay(integration):
    class Own(Attention):
        def forward(self, hidden_states):
            return self.processor(self, hidden_states)

    torch.manual_seed(0)
    assert not integration.patch(Own(16, heads=2, dim_head=8)).replaced
    assert not integration.patch(nn.Linear(4, 4)).replaced


def test_a_forward_of_somebody_else_is_reported(integration):
    module = attention()
    module.forward = lambda hidden_states: hidden_states
    report = integration.patch(module)
    assert not report.replaced
    assert "its forward was replaced already" in report.left_alone[""]
