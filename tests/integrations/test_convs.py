"""Convolutions of diffusers that are channels last: their biases, and the additions after them."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch
from integrations.models import assert_close, counted_ops, randomise, small_autoencoder
from torch import nn

pytest.importorskip("diffusers")


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.diffusers


@pytest.fixture
def convs(fuselage, monkeypatch):
    """The module, as if images were large and on a GPU."""
    module = importlib.import_module(f"{fuselage.integrations.__name__}._convs")
    monkeypatch.setattr(module, "_LARGE", 1)
    monkeypatch.setattr(module._probe, "is_on_gpu", lambda x: True)
    return module


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 8), nn.SiLU()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=bias)
        self.scale = 1.0

    def forward(self, x):
        h = self.norm(x)
        h = self.act(h)
        h = self.conv(h)
        if self.scale == 3.0:
            x = x * 2
        return (x + h) / self.scale


class Ways:
    """Other places of a convolution's result."""

    def first(self, x):
        h = self.act(self.norm(x))
        h = self.conv(h)
        y = h + x
        return y * self.scale

    def nested(self, x):
        h = self.act(self.norm(x))
        return x + self.conv(h)

    def read_again(self, x):
        h = self.act(self.norm(x))
        h = self.conv(h)
        y = x + h
        return y * h

    def read_before(self, x):
        h = self.act(self.norm(x))
        h = self.conv(h)
        z = h.mean()
        return x + h + z

    def read_twice(self, x):
        h = self.act(self.norm(x))
        h = self.conv(h)
        return h + h

    def changed(self, x):
        h = self.act(self.norm(x))
        h = self.conv(h)
        h = h * 2
        return x + h

    def elsewhere(self, x):
        h = self.act(self.norm(x))
        h = self.conv(h)
        if self.scale != 2.0:
            return x + h
        return x - h


ADDED = (Block.forward, Ways.first)
WAYS = [Block.forward, *filter(inspect.isfunction, vars(Ways).values())]


def block(dtype: torch.dtype = torch.float32, forward=Block.forward, **options):
    kind = type("Block", (Block,), {"forward": forward})
    model = kind(**options)
    randomise(model)
    return model.to(dtype).eval(), channels_last(torch.randn(2, 8, 6, 5).to(dtype))


@pytest.mark.parametrize("how", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("scale", [1.0, 2.0, 3.0])
def test_ways(integration, fuselage, convs, how, scale):
    model, x = block(forward=how)
    model.scale = scale
    expected = model(x)
    report = integration.patch(model)
    assert report.replaced["conv"] == convs.CONV
    with torch.no_grad(), counted_ops(fuselage) as calls:
        actual = model(x)
    assert_close(actual, expected)
    assert actual.is_contiguous(memory_format=torch.channels_last)
    assert (calls["add_mul_act_"], calls["bias_act_"]) == ((1, 0) if how in ADDED else (0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_a_convolution(integration, fuselage, convs, dtype):
    """Those of PyTorch's, which adds the bias to a rounded result on a GPU."""
    conv = nn.Conv2d(3, 5, 3, stride=2, padding=1, padding_mode="reflect").eval().to(dtype)
    x = channels_last(torch.randn(2, 3, 8, 9, dtype=dtype))
    with torch.no_grad():
        flat = conv(x.contiguous())
        product = conv._conv_forward(x, conv.weight, None)
        expected = product + conv.bias.view(-1, 1, 1)
        model = nn.Sequential(conv)
        integration.patch(model)
        with counted_ops(fuselage) as calls:
            assert torch.equal(model(x), expected)
        assert calls["bias_act_"] == 1
        assert torch.equal(model(x.contiguous()), flat)
        assert calls["bias_act_"] == 1


def test_the_sum_is_rounded_once(integration, convs):
    model, x = block(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    plain = copy.deepcopy(model)
    integration.patch(model)
    with torch.no_grad():
        errors = [(m(x).double() - exact(x.float())).square().mean() for m in (model, plain)]
    assert errors[0] <= errors[1]


def test_an_autoencoder(integration, fuselage, convs):
    model = small_autoencoder()
    randomise(model)
    model, x = model.eval().to(memory_format=torch.channels_last), torch.randn(2, 3, 16, 16)
    plain = copy.deepcopy(model)
    report = integration.patch(model)
    names = [n for n, m in model.named_modules() if type(m) is nn.Conv2d]
    assert names and {report.replaced[n] for n in names} == {convs.CONV}
    blocks = sum(type(m).__name__ == "ResnetBlock2D" for m in model.modules())
    with torch.no_grad(), counted_ops(fuselage) as calls:
        assert_close(model(channels_last(x)).sample, plain(channels_last(x)).sample)
    assert calls["add_mul_act_"] == blocks
    assert 0 < calls["bias_act_"] <= len(names) - blocks
    assert integration.unpatch(model) == len(report.replaced)
    with torch.no_grad():
        assert torch.equal(model(x).sample, plain(x).sample)


def _hooked(model):
    heard = []
    model.conv.register_forward_hook(lambda module, args, out: heard.append(out.clone()))
    return heard


def test_hooks_get_the_whole_result(integration, fuselage, convs):
    for patches_first in (True, False):
        model, x = block()
        expected = model.conv(model.act(model.norm(x)))
        if patches_first:
            integration.patch(model)
        heard = _hooked(model)
        integration.patch(model)
        with torch.no_grad(), counted_ops(fuselage) as calls:
            model(x)
        assert_close(heard[0], expected)
        assert calls["add_mul_act_"] == 0


def test_hooks_around_a_convolution_run(integration, fuselage, convs):
    """Those of accelerate and diffusers, which move its weights."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = block()
    expected = model(x)
    integration.patch(model)
    hooks.add_hook_to_module(model.conv, hooks.ModelHook())
    with torch.no_grad(), counted_ops(fuselage) as calls:
        assert_close(model(x), expected)
    assert (calls["add_mul_act_"], calls["bias_act_"]) == (0, 1)


@pytest.mark.parametrize(
    "change",
    ["gradients", "gradient of the residual", "residual of another layout", "of another shape",
     "of another dtype", "channels first", "float64", "small", "no bias", "bias gone", "autocast",
     "compiled", "training"],
)  # fmt: skip
def test_what_is_left_to_pytorch(integration, fuselage, convs, monkeypatch, change):
    model, x = block(bias=change != "no bias")
    plain = copy.deepcopy(model)
    integration.patch(model)
    other = {
        "residual of another layout": x.contiguous(),
        "of another shape": x[:1],
        "of another dtype": x.double(),
    }
    adds_bias = change in other
    if change == "small":
        monkeypatch.setattr(convs, "_LARGE", x.numel() + 1)
    if change == "float64":
        model, plain, x = model.double(), plain.double(), x.double()
    if change == "bias gone":
        model.conv.bias = plain.conv.bias = None
    if change == "training":
        model.train()
    if change == "channels first":
        x = x.contiguous()
    if change == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for m in (model, plain):
        m.requires_grad_(change == "gradients")
    with counted_ops(fuselage) as calls, torch.autocast("cpu", enabled=change == "autocast"):
        if change in other:
            apart = convs.conv_apart(model.conv, x)
            assert apart[1] is not None
            actual = convs.residual_sum(other[change], apart, 2)
            expected = (other[change] + plain.conv(x)) / 2
        elif change == "gradient of the residual":
            residual = x.clone(memory_format=torch.preserve_format).requires_grad_()
            actual = convs.residual_sum(residual, convs.conv_apart(model.conv, x))
            expected = residual + plain.conv(x)
            assert torch.equal(*torch.autograd.grad(actual.sum(), residual), torch.ones_like(x))
            adds_bias = True
        else:
            actual, expected = model(x), plain(x)
    assert actual.dtype == expected.dtype
    assert_close(actual, expected)
    assert (calls["add_mul_act_"], calls["bias_act_"]) == (0, int(adds_bias))
    if change == "gradients":
        x.requires_grad_()  # without it PyTorch's group_norm crashes, channels last on a CPU
        for m in (model, plain):
            m(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad)


def test_what_pytorch_refuses(integration, convs):
    """A bias of another dtype than the weight, which `bias_act_` would take."""
    model, x = block(torch.bfloat16)
    model.conv.bias = nn.Parameter(model.conv.bias.float())
    integration.patch(model)
    for call in (model, model.conv):
        with torch.no_grad(), pytest.raises(RuntimeError, match="type"):
            call(x)


def test_which_convolutions(integration, convs):
    class Other(nn.Conv2d):
        pass

    model = nn.ModuleList(
        [nn.Conv2d(3, 4, 1), Other(3, 4, 1), nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(3, 4, 2, 2)]
    )
    assert integration.patch(model).replaced == {"0": convs.CONV}
