"""Group norms of diffusers, with the SiLU after them: patched, undone, and left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.models import assert_close, counted_ops, randomise, small_autoencoder
from torch import nn

diffusers = pytest.importorskip("diffusers")


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.diffusers


def vae():
    model = small_autoencoder()
    randomise(model)
    return model.eval(), torch.randn(2, 3, 16, 16)


class Pairs(nn.Module):
    """What is fused: in a row, nested, and at the end of branches."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8, eps=1e-3, affine=False)
        self.act = nn.SiLU()

    def forward(self, x, how: int):
        h = self.norm(x)
        h = self.act(h)
        if how == 0:
            h = h + 1
            h = self.other(h)
        elif how == 1:
            h = self.norm(h)
        elif how == 2:
            h = h * 2
        elif how == 3:
            return h
        h = self.act(h)
        for _ in range(2):
            h = self.act(self.norm(h))
        return h


class Apart(nn.Module):
    """What is not: the norm's result is read by something else, or another is activated."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 8), nn.SiLU()

    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        x = self.act(x)
        return h + y + x


@pytest.mark.parametrize("last", [False, True], ids=["flat", "channels_last"])
def test_an_autoencoder(integration, fuselage, last):
    model, x = vae()
    if last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    report = integration.patch(model)
    norms = [n for n, m in model.named_modules() if type(m) is nn.GroupNorm]
    assert {report.replaced[n] for n in norms} == {"group_norm"}
    blocks = [n for n, m in model.named_modules() if type(m).__name__ == "ResnetBlock2D"]
    assert blocks and {report.replaced[n] for n in blocks} == {"group_norm (with silu)"}
    assert report.replaced["decoder"] == report.replaced["encoder"] == "group_norm (with silu)"
    with torch.no_grad():
        assert_close(model(x).sample, plain(x).sample)
        with counted_ops(fuselage) as calls:
            model(x)
    assert calls["group_norm"] == len(norms)
    for model_ in (model, plain):
        model_(x).sample.square().mean().backward()
    # All together: of what a norm takes away, such as the bias before it, gradients are noise.
    assert_close(*(torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, plain)))
    assert integration.unpatch(model) == len(report.replaced)
    with torch.no_grad():
        assert torch.equal(model(x).sample, plain(x).sample)
    assert all("forward" not in vars(m) for m in model.modules())


def test_pairs(integration, fuselage):
    model = Pairs()
    randomise(model)
    x = torch.randn(2, 8, 5, 6)
    expected = [model(x, how) for how in range(5)]
    assert integration.patch(model).replaced[""] == "group_norm (with silu)"
    calls = []
    for how in range(5):
        with counted_ops(fuselage) as count, torch.no_grad():
            assert_close(model(x, how), expected[how])
        calls.append(sum(count.values()))
    assert calls == [4, 4, 3, 1, 3]


def test_what_is_not_a_pair(integration):
    model = Apart()
    x = torch.randn(2, 8, 5)
    expected = model(x)
    assert list(integration.patch(model).replaced) == ["norm"]
    assert_close(model(x), expected)


@pytest.mark.parametrize("listener", ["norm", "act"])
def test_hooks_are_called(integration, listener):
    """Put there before or after the patch."""
    for patches_first in (True, False):
        model, heard = Pairs(), []
        if patches_first:
            integration.patch(model)
        handle = getattr(model, listener).register_forward_hook(
            lambda *a, heard=heard: heard.append(a)
        )
        if not patches_first:
            integration.patch(model)
        model(torch.randn(2, 8, 5), 3)
        assert len(heard) == 1
        handle.remove()


class Scaled(nn.GroupNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def test_another_forward(integration):
    model = nn.Sequential(Scaled(2, 8), nn.GroupNorm(2, 8))
    report = integration.patch(model)
    assert report.left_alone == {"0": "its forward is not that of torch.nn.GroupNorm"}
    assert report.replaced == {"1": "group_norm"}


def test_inputs_that_are_not_taken(integration):
    """Other dtypes, autocast, and what PyTorch refuses run as before."""
    model = nn.GroupNorm(2, 8)
    integration.patch(model)
    x = torch.randn(2, 8, 5)
    assert model.double()(x.double()).dtype == torch.float64
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), torch.nn.functional.group_norm(x, 2, model.weight, model.bias))
    with pytest.raises(RuntimeError):
        model(x[:, :7])


@pytest.mark.slow
def test_compiled(integration):
    model, x = vae()
    expected = model(x).sample
    integration.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert_close(compiled(x).sample, expected)
    with torch.no_grad():
        assert_close(compiled(x).sample, expected)
