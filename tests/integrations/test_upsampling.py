"""Nearest upsampling of images that are channels last."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from integrations.models import randomise, small_autoencoder
from torch import nn

pytest.importorskip("diffusers")


@pytest.fixture
def upsampling(fuselage, monkeypatch):
    """The module, as if images were large and on a GPU."""
    name = fuselage.integrations.__name__
    convs = importlib.import_module(f"{name}._convs")
    monkeypatch.setattr(convs, "_LARGE", 1)
    monkeypatch.setattr(convs._probe, "is_on_gpu", lambda x: True)
    return importlib.import_module(f"{name}._upsampling")


@pytest.fixture
def copies(monkeypatch):
    """What was copied so far: shapes of the targets."""
    shapes, plain = [], torch.Tensor.copy_

    def copy_(self, *args):
        shapes.append(tuple(self.shape))
        return plain(self, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return shapes


def nearest(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def image(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 8, 3, 5), (1, 24, 7, 2), (3, 16, 1, 4)])
def test_values_and_layout(upsampling, copies, shape, dtype):
    x = image(*shape, dtype=dtype)
    x[0, 0, 0, 0], x[-1, -1, -1, -1] = float("nan"), float("inf")
    bits = torch.int64 if dtype is torch.float64 else torch.int32
    bits = torch.int16 if x.element_size() == 2 else bits
    expected = nearest(x)
    copies.clear()
    actual = upsampling.upsampled(x)
    assert len(copies) == 1
    assert torch.equal(actual.view(bits), expected.view(bits))
    assert actual.stride() == expected.stride()


LEFT = {
    "8 bytes": image(2, 4, 3, 5),
    "channels first": image(2, 8, 3, 5).contiguous(),
    "sliced": image(2, 9, 3, 5)[:, 1:],
    "misaligned": torch.randn(241).bfloat16()[1:].view(2, 3, 5, 8).movedim(-1, 1),
    "three dimensions": image(8, 3, 5, 1)[..., 0],
    "gradients": image(2, 8, 3, 5).requires_grad_(),
}


@pytest.mark.parametrize("x", LEFT.values(), ids=LEFT)
def test_what_is_left_to_pytorch(upsampling, copies, x):
    expected = nearest(x)
    copies.clear()
    actual = upsampling.upsampled(x)
    assert not copies
    assert torch.equal(actual, expected)
    assert actual.requires_grad == expected.requires_grad


def test_small_images_are_left(fuselage, copies):
    module = importlib.import_module(f"{fuselage.integrations.__name__}._upsampling")
    x = image(2, 8, 3, 5)
    copies.clear()
    assert torch.equal(module.upsampled(x), nearest(x))
    assert not copies


def test_compiled(upsampling, copies):
    x = image(2, 8, 3, 5)
    compiled = torch.compile(upsampling.upsampled, backend="eager", fullgraph=True)
    expected = nearest(x)
    copies.clear()
    assert torch.equal(compiled(x), expected)
    assert not copies


def test_an_autoencoder(fuselage, upsampling):
    integration = fuselage.integrations.diffusers
    model = small_autoencoder()
    randomise(model)
    model = model.eval().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    report = integration.patch(model)
    names = [n for n, m in model.named_modules() if type(m).__name__ == "Upsample2D"]
    assert names and {report.replaced[n] for n in names} == {upsampling.UPSAMPLING}
    for name in names:
        ours, theirs = model.get_submodule(name), plain.get_submodule(name)
        x = torch.randn(2, ours.channels, 4, 4).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x))
            torch.testing.assert_close(ours(x, output_size=(7, 9)), theirs(x, output_size=(7, 9)))


class Others(nn.Module):
    """Calls that are not quite it."""

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
        x = F.interpolate(x, scale_factor=3.0, mode="nearest")
        return F.interpolate(x, size=(4, 4), mode="nearest")


def test_other_calls(fuselage, upsampling):
    assert upsampling.recognise_upsampling(Others()) is None
    assert not fuselage.integrations.diffusers.patch(Others()).replaced
