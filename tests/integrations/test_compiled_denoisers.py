"""What runs in denoisers compiled for inference: operators of ours where the compiler is slower."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from integrations.models import assert_close, compiled_and_counted
from torch import nn

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


def test_two_tables(fuselage, device, on_gpu):
    """Wan."""
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    torch.manual_seed(0)
    attention = WanAttention(64, 2, 32, processor=WanAttnProcessor()).to(device).eval()

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, **inputs):
            return (self.attention(**inputs),)

    angles = torch.randn(1, 8, 1, 16, device=device).repeat_interleave(2, dim=-1)
    inputs = {
        "hidden_states": torch.randn(1, 8, 64, device=device),
        "rotary_emb": (angles.cos(), angles.sin()),
    }
    assert_calls(fuselage, First(), inputs, {"apply_rotary": 1} if on_gpu else {})


def test_group_norms(fuselage, device, on_gpu):
    """The decoder of an autoencoder: all of its norms, with the SiLU after them."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    sizes = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
    blocks = {"up_block_types": ("UpDecoderBlock2D",) * 2}
    decoder = AutoencoderKL(**sizes, **blocks, down_block_types=("DownEncoderBlock2D",) * 2).decoder
    norms = sum(isinstance(module, nn.GroupNorm) for module in decoder.modules())
    inputs = {"sample": torch.randn(2, 4, 8, 8, device=device)}
    expected = {"group_norm": norms} if on_gpu else {}
    assert_calls(fuselage, decoder.to(device).eval(), inputs, expected)
