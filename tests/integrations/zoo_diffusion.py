"""Small models of diffusers, each with inputs: those that other tests have are not among them."""

from __future__ import annotations

import torch
from torch import nn


def _images(channels: int = 4, size: int = 8) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


def _text(columns: int = 32) -> torch.Tensor:
    return torch.randn(2, 5, columns)


TIME = {"timestep": torch.tensor([500, 20])}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}


def unet(d):
    model = d.UNet2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    return model, {"sample": _images(), **TIME}


def conditional_unet(d):
    model = d.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return model, {"sample": _images(), **TIME, "encoder_hidden_states": _text()}


def autoencoder(d):
    model = d.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=8)
    return model, {"sample": _images(3)}


def dit(d):
    model = d.DiTTransformer2DModel(**HEADS, num_layers=2, sample_size=8, num_embeds_ada_norm=1000)
    return model, {"hidden_states": _images(), **TIME, "class_labels": torch.tensor([1, 2])}


def pixart(d):
    model = d.PixArtTransformer2DModel(
        **HEADS,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=32,
        use_additional_conditions=False,
    )
    added = {"resolution": None, "aspect_ratio": None}
    inputs = {"hidden_states": _images(), "encoder_hidden_states": _text(), **TIME}
    return model, {**inputs, "added_cond_kwargs": added}


def sana(d):
    model = d.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        **HEADS,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=8,
    )
    return model, {"hidden_states": _images(), "encoder_hidden_states": _text(), **TIME}


def aura_flow(d):
    model = d.AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        **HEADS,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    return model, {"hidden_states": _images(), "encoder_hidden_states": _text(), **TIME}


def cogvideo(d):
    model = d.CogVideoXTransformer3DModel(
        **HEADS,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=5,
    )
    angles = torch.randn(2 * 4 * 4, 4).repeat_interleave(2, dim=1)  # of two frames
    inputs = {"image_rotary_emb": (angles.cos(), angles.sin()), **TIME}
    return model, {
        "hidden_states": torch.randn(2, 2, 4, 8, 8),
        "encoder_hidden_states": _text(),
        **inputs,
    }


def mochi(d):
    model = d.MochiTransformer3DModel(
        **HEADS,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=32,
        time_embed_dim=4,
    )
    inputs = {"hidden_states": torch.randn(2, 4, 2, 8, 8), "encoder_hidden_states": _text()}
    return model, {**inputs, **TIME, "encoder_attention_mask": torch.ones(2, 5).bool()}


def lumina(d):
    model = d.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 32, 32),
        cap_feat_dim=32,
    )
    inputs = {"hidden_states": _images(), "encoder_hidden_states": _text(), **TIME}
    return model, {**inputs, "encoder_attention_mask": torch.ones(2, 5).bool()}


def transformer2d(d):
    model = d.Transformer2DModel(
        **HEADS, in_channels=32, num_layers=2, cross_attention_dim=32, norm_num_groups=8
    )
    return model, {"hidden_states": _images(32), "encoder_hidden_states": _text()}


STREAMS = {"num_layers": 1, "num_single_layers": 1, **HEADS, "joint_attention_dim": 32}
ROPE = {"axes_dims_rope": (4, 2, 2)}


def _tokens(columns: int) -> dict:
    """Images as rows of tokens, and text."""
    text = {"encoder_hidden_states": _text(), "txt_ids": torch.zeros(5, 3)}
    positions = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    return {"hidden_states": torch.randn(2, 16, columns), **text, "img_ids": positions}


def flux2(d):
    axes = {"axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 16}
    model = d.Flux2Transformer2DModel(in_channels=4, **STREAMS, **axes)
    inputs = _tokens(4)
    for name in ("img_ids", "txt_ids"):
        inputs[name] = torch.cat([inputs[name], torch.zeros(len(inputs[name]), 1)], dim=1)
    return model, {**inputs, **TIME, "guidance": torch.tensor([3.5, 3.5])}


def chroma(d):
    approximator = {"approximator_num_channels": 8, "approximator_hidden_dim": 32}
    model = d.ChromaTransformer2DModel(
        in_channels=4, **STREAMS, **ROPE, **approximator, approximator_layers=1
    )
    return model, {**_tokens(4), **TIME}


def qwen_image(d):
    model = d.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, **HEADS, joint_attention_dim=32, **ROPE
    )
    inputs = {"hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": _text(), **TIME}
    mask = {"encoder_hidden_states_mask": torch.ones(2, 5).bool()}
    return model, {**inputs, **mask, "img_shapes": [(1, 4, 4)] * 2}


def hunyuan_video(d):
    model = d.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        **HEADS,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=32,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 2, 2),
    )
    inputs = {"hidden_states": torch.randn(2, 4, 2, 8, 8), "encoder_hidden_states": _text()}
    more = {"pooled_projections": torch.randn(2, 16), "guidance": torch.tensor([6.0, 6.0])}
    return model, {**inputs, **TIME, **more, "encoder_attention_mask": torch.ones(2, 5)}


def cogview4(d):
    model = d.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        **HEADS,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=8,
        sample_size=8,
        rope_axes_dim=(8, 8),
    )
    sizes = dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.ones(2, 2))
    return model, {"hidden_states": _images(), "encoder_hidden_states": _text(), **TIME, **sizes}


def cosmos(d):
    model = d.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    )
    inputs = {"hidden_states": torch.randn(2, 4, 2, 8, 8), "encoder_hidden_states": _text()}
    return model, {**inputs, "timestep": torch.tensor([5.0, 2.0])}


def prx(d):
    model = d.PRXTransformer2DModel(
        in_channels=4, context_in_dim=32, hidden_size=32, num_heads=4, depth=2, axes_dim=[4, 4]
    )
    inputs = {"hidden_states": _images(), "encoder_hidden_states": _text()}
    return model, {**inputs, "timestep": torch.tensor([0.5, 0.2])}


def kandinsky(d):
    model = d.Kandinsky5Transformer3DModel(
        in_text_dim=32,
        in_text_dim2=16,
        time_dim=16,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 2, 2),
    )
    inputs = {"hidden_states": torch.randn(2, 2, 8, 8, 4), "encoder_hidden_states": _text(), **TIME}
    positions = {"visual_rope_pos": [torch.arange(n) for n in (2, 4, 4)]}
    more = {"pooled_projections": torch.randn(2, 16), "text_rope_pos": torch.arange(5)}
    return model, {**inputs, **positions, **more}


MODELS = (
    unet,
    conditional_unet,
    autoencoder,
    dit,
    pixart,
    sana,
    aura_flow,
    cogvideo,
    mochi,
    lumina,
    transformer2d,
    flux2,
    chroma,
    qwen_image,
    hunyuan_video,
    cogview4,
    cosmos,
    prx,
    kandinsky,
)


def make(function) -> tuple[nn.Module, dict]:
    import diffusers

    torch.manual_seed(20261121)
    model, inputs = function(diffusers)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # some are made of zeros
            nn.init.normal_(parameter, 0.0, parameter[0].numel() ** -0.5)
    return model.eval(), inputs
