"""What runs in denoisers compiled for inference: operators of ours where the compiler is slower."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from integrations.models import assert_close, compiled_and_counted, small_autoencoder
from torch import nn
from torch._dynamo.testing import CompileCounter

pytest.importorskip("diffusers")


@pytest.fixture(params=[True, False])
def on_gpu(request, fuselage, device, monkeypatch) -> bool:
    """Whether tensors are on a GPU, as far as `patch` knows."""
    probe = importlib.import_module(f"{fuselage.integrations.__name__}._probe")
    monkeypatch.setattr(probe, "is_on_gpu", lambda x: request.param)
    return request.param


def assert_calls(fuselage, plain: nn.Module, inputs: dict, expected: dict) -> None:
    """Of the model patched and compiled without gradients, the ops in its graph."""
    patched = copy.deepcopy(plain)
    fuselage.integrations.diffusers.patch(patched)
    with torch.no_grad():
        run, counts = compiled_and_counted(patched, fuselage)
        for ours, theirs in zip(run(**inputs), plain(**inputs)):
            assert_close(ours, theirs, tol=1e-4)
    assert counts == expected


@pytest.mark.long
@pytest.mark.parametrize("heads", [8, 9])
def test_norms_of_wide_rows(fuselage, device, on_gpu, heads):
    """Flux: the norm of 1024 columns is the compiler's, that of 1152 ours; pairs are ours."""
    from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

    torch.manual_seed(0)
    dim = 128 * heads
    block = FluxSingleTransformerBlock(dim, heads, 128, mlp_ratio=0.25).to(device).eval()
    angles = torch.randn(12, 64, device=device).repeat_interleave(2, dim=-1)
    inputs = {
        "hidden_states": torch.randn(1, 8, dim, device=device),
        "encoder_hidden_states": torch.randn(1, 4, dim, device=device),
        "temb": torch.randn(1, dim, device=device),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }
    expected = {"qk_norm_rotary": 1} if on_gpu else {}
    if on_gpu and dim > 1024:
        expected["ada_norm"] = 1
    assert_calls(fuselage, block, inputs, expected)


@pytest.mark.long
def test_complex_numbers(fuselage, device, on_gpu):
    """QwenImage: of queries and keys of text and image."""
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

    torch.manual_seed(0)
    block = QwenImageTransformerBlock(64, 2, 32).to(device).eval()
    angles = torch.randn(12, 16, device=device)
    turns = torch.polar(torch.ones_like(angles), angles)
    inputs = {
        "hidden_states": torch.randn(1, 8, 64, device=device),
        "encoder_hidden_states": torch.randn(1, 4, 64, device=device),
        "encoder_hidden_states_mask": None,
        "temb": torch.randn(1, 64, device=device),
        "image_rotary_emb": (turns[:8], turns[8:]),
    }
    assert_calls(fuselage, block, inputs, {"qk_norm_rotary": 2} if on_gpu else {})


class First(nn.Module):
    """Gives a tuple, as blocks do."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return (self.module(**inputs),)


@pytest.mark.long
def test_two_tables(fuselage, device, on_gpu):
    """Wan."""
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    torch.manual_seed(0)
    attention = WanAttention(64, 2, 32, processor=WanAttnProcessor()).to(device).eval()
    angles = torch.randn(1, 8, 1, 16, device=device).repeat_interleave(2, dim=-1)
    inputs = {
        "hidden_states": torch.randn(1, 8, 64, device=device),
        "rotary_emb": (angles.cos(), angles.sin()),
    }
    assert_calls(fuselage, First(attention), inputs, {"apply_rotary": 1} if on_gpu else {})


@pytest.mark.long
def test_heads_that_are_not_split_yet(fuselage, device, on_gpu):
    """LTX-Video. Without norms before, they are the compiler's."""
    from diffusers.models.transformers import transformer_ltx as ltx

    torch.manual_seed(0)
    attention = ltx.LTXAttention(64, 2, 2, 32, processor=ltx.LTXVideoAttnProcessor()).to(device)
    angles = torch.randn(1, 8, 32, device=device).repeat_interleave(2, dim=-1)
    inputs = {
        "hidden_states": torch.randn(2, 8, 64, device=device),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }
    expected = {"qk_norm_rotary": 1} if on_gpu else {}
    assert_calls(fuselage, First(attention.eval()), inputs, expected)
    attention.norm_q = attention.norm_k = nn.Identity()
    assert_calls(fuselage, First(attention), inputs, {})


@pytest.fixture
def large_group(fuselage, monkeypatch) -> int:
    """Elements of a group from which on the compiler's norms are slower, in any order."""
    module = importlib.import_module(f"{fuselage.integrations.__name__}._group_norms")
    monkeypatch.setattr(module, "_LARGE_GROUP", 64)
    return 64


@pytest.mark.long
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_group_norms_of_an_autoencoder(fuselage, device, on_gpu, large_group, monkeypatch, order):
    """All of them, with the SiLU after them."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    decoder = small_autoencoder().decoder.to(device, memory_format=order).eval()
    x = torch.randn(2, 4, 8, 8, device=device).to(memory_format=order)
    norms = sum(isinstance(module, nn.GroupNorm) for module in decoder.modules())
    assert_calls(fuselage, decoder, {"sample": x}, {"group_norm": norms} if on_gpu else {})


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_small_groups(fuselage, device, on_gpu, large_group, order, width, silu):
    """Are the compiler's, if channels come last."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()

        def forward(self, x):
            h = self.norm(x)
            return (self.act(h) if silu else h,)

    x = torch.randn(2, 8, 4, width, device=device).to(memory_format=order)
    ours = on_gpu and (order is torch.contiguous_format or 2 * 4 * width >= large_group)
    assert_calls(fuselage, Normed().to(device), {"x": x}, {"group_norm": 1} if ours else {})


def test_group_norms_of_sizes_that_change(fuselage, device, on_gpu, large_group):
    """Nothing is asked of them."""
    norm = nn.GroupNorm(4, 8).to(device)
    fuselage.integrations.diffusers.patch(norm)
    graphs = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for width in (16, 3, 32):
            x = torch.randn(2, 8, 8, width, device=device).to(memory_format=torch.channels_last)
            torch._dynamo.mark_dynamic(x, 3)
            assert_close(compiled(x), norm(x))
    assert graphs.frame_count == 1


def test_what_is_exported(fuselage, device, on_gpu):
    """Runs without fuselage."""
    norm = nn.GroupNorm(4, 8).to(device)
    fuselage.integrations.diffusers.patch(norm)
    x = torch.randn(2, 8, 8, 16, device=device)
    with torch.no_grad():
        exported = torch.export.export(norm, (x,))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.group_norm.default"]
