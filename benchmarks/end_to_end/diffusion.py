"""Transformers and UNets of image and video models, of which one step of denoising is timed, and
decoders of autoencoders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .models import FLOAT8, Scenario, created_on, how_compiled


@dataclass
class Denoiser:
    """One model, and what goes into it.

    Attributes:
        title: Model and what is made, for the table.
        name: Of its class in diffusers.
        inputs: Makes them, of the full size or `quick`.
        small: What differs in a small model.
        layers: The arguments that say how many blocks there are.
        steps: Of one sample, which is what the table gives; one: a step by itself.
        whole: Whether it is compiled whole, as a UNet, whose blocks differ.
    """

    title: str
    name: str
    inputs: Callable[[bool], dict]
    small: dict
    layers: tuple[str, ...] = ("num_layers",)
    steps: int = 1
    sizes: dict = field(default_factory=dict)
    whole: bool = False


def _grid(*sizes: int) -> torch.Tensor:
    """The positions of tokens along each dimension: [tokens, dimensions]."""
    return torch.cartesian_prod(*(torch.arange(float(size)) for size in sizes))


def _ltx_inputs(quick: bool) -> dict:
    frames, height, width = (2, 2, 3) if quick else (7, 16, 24)
    text = 16 if quick else 128
    return {
        "hidden_states": torch.randn(2, frames * height * width, 128),
        "encoder_hidden_states": torch.randn(2, text, 4096),
        "timestep": torch.full((2,), 500.0),
        "encoder_attention_mask": torch.ones(2, text),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _flux_inputs(quick: bool) -> dict:
    side, text = (4, 5) if quick else (64, 512)
    return {
        "hidden_states": torch.randn(1, side * side, 64),
        "encoder_hidden_states": torch.randn(1, text, 32 if quick else 4096),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.full((1,), 0.5),
        "guidance": torch.full((1,), 3.5),
        "img_ids": _grid(1, side, side),
        "txt_ids": torch.zeros(text, 3),
    }


def _flux2_inputs(quick: bool) -> dict:
    side, text = (4, 5) if quick else (64, 512)
    return {
        "hidden_states": torch.randn(1, side * side, 128),
        "encoder_hidden_states": torch.randn(1, text, 32 if quick else 15360),
        "timestep": torch.full((1,), 0.5),
        "guidance": torch.full((1,), 3.5),
        "img_ids": _grid(1, side, side, 1),
        "txt_ids": torch.zeros(text, 4),
    }


def _qwen_image_inputs(quick: bool) -> dict:
    side, text = (4, 5) if quick else (64, 256)
    return {
        "hidden_states": torch.randn(1, side * side, 64),
        "encoder_hidden_states": torch.randn(1, text, 32 if quick else 3584),
        "encoder_hidden_states_mask": torch.ones(1, text).bool(),
        "timestep": torch.full((1,), 0.5),
        "img_shapes": [(1, side, side)],
    }


def _wan_inputs(quick: bool) -> dict:
    sizes = (2, 8, 8) if quick else (9, 60, 104)
    return {
        "hidden_states": torch.randn(1, 16, *sizes),
        "encoder_hidden_states": torch.randn(1, 5 if quick else 512, 32 if quick else 4096),
        "timestep": torch.full((1,), 500.0),
    }


def _sdxl_inputs(quick: bool) -> dict:
    """Of two samples: with guidance."""
    side, text, columns, pooled = (8, 5, 32, 8) if quick else (128, 77, 2048, 1280)
    return {
        "sample": torch.randn(2, 4, side, side),
        "timestep": torch.full((2,), 500.0),
        "encoder_hidden_states": torch.randn(2, text, columns),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, pooled),
            "time_ids": torch.full((2, 6), 1024.0),
        },
    }


_SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (5, 10, 20),  # how many heads there are
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 1280 + 6 * 256,
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_IMAGE = {**_HEADS, "joint_attention_dim": 32, "num_layers": 2}
_STREAMS = ("num_layers", "num_single_layers")

DENOISERS = {
    "ltx-video": Denoiser(
        "LTX-Video: 49 frames of 512x768, 30 steps, with guidance (batch 2)",
        "LTXVideoTransformer3DModel",
        _ltx_inputs,
        {"num_attention_heads": 4, "cross_attention_dim": 256, "num_layers": 2},
        steps=30,
    ),
    "flux": Denoiser(
        "FLUX.1-dev shape: one step of 1024x1024",
        "FluxTransformer2DModel",
        _flux_inputs,
        {**_IMAGE, "num_single_layers": 2, "axes_dims_rope": (4, 6, 6)},
        _STREAMS,
        sizes={"guidance_embeds": True},
    ),
    "flux2": Denoiser(
        "FLUX.2-dev shape: one step of 1024x1024",
        "Flux2Transformer2DModel",
        _flux2_inputs,
        {**_IMAGE, "num_single_layers": 2, "axes_dims_rope": (4, 4, 4, 4)},
        _STREAMS,
    ),
    "qwen-image": Denoiser(
        "Qwen-Image shape: one step of 1024x1024",
        "QwenImageTransformer2DModel",
        _qwen_image_inputs,
        {**_IMAGE, "axes_dims_rope": (4, 6, 6)},
    ),
    "wan": Denoiser(
        "Wan2.1-14B shape: one step of 33 frames of 480x832",
        "WanTransformer3DModel",
        _wan_inputs,
        {**_HEADS, "text_dim": 32, "ffn_dim": 64, "num_layers": 2},
    ),
    "sdxl-unet": Denoiser(
        "SDXL's UNet: one step of 1024x1024, with guidance (batch 2)",
        "UNet2DConditionModel",
        _sdxl_inputs,
        {
            "sample_size": 8,
            "block_out_channels": (32, 32, 64),
            "attention_head_dim": (2, 2, 4),
            "transformer_layers_per_block": 1,
            "cross_attention_dim": 32,
            "norm_num_groups": 8,
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 8 + 6 * 4,
        },
        layers=(),
        sizes=_SDXL,
        whole=True,
    ),
}


def denoising(
    device: str,
    quick: bool,
    layers: int | None,
    exact: bool = False,
    *,
    kind: str,
    float8: bool = False,
) -> Scenario:
    """A step of the denoiser alone, without text encoder and autoencoder."""
    import diffusers

    denoiser = DENOISERS[kind]
    make = getattr(diffusers, denoiser.name)
    sizes = {**denoiser.sizes, **(denoiser.small if quick else {})}
    notes = []
    if layers is not None and denoiser.layers:
        sizes |= dict.fromkeys(denoiser.layers, layers)
        notes.append(f"{layers} layers of each kind")
    dtype = torch.float32 if quick or exact else torch.bfloat16
    with created_on(device, dtype):
        model = make(**sizes).eval()
        inputs = denoiser.inputs(quick)

    @torch.no_grad()
    def step(call: Callable) -> torch.Tensor:
        return call(**inputs, return_dict=False)[0]

    model_name, _, made = denoiser.title.partition(":")
    title = (
        f"small {model_name}, fp32"
        if quick
        else f"{model_name}, {'fp32' if exact else 'bf16'}:{made}"
    )
    blocks = [m for m in model.modules() if type(m).__name__ in model._repeated_blocks]
    compile, note = how_compiled(model, None if denoiser.whole else blocks)
    return Scenario(
        title=title,
        model=model,
        step=step,
        outputs=lambda call: (step(call),),
        compiled=compile,
        integration="diffusers",
        per_sample=denoiser.steps,
        notes=[*notes, note, "the denoiser alone: no text encoder, no autoencoder"],
        **(FLOAT8 if float8 else {}),
    )


@dataclass
class Autoencoder:
    """One autoencoder, of which the decoder is timed.

    Attributes:
        title: Model and what is made, for the table.
        sizes: The arguments of AutoencoderKL.
        latents: Shape of what is decoded.
    """

    title: str
    sizes: dict
    latents: tuple[int, ...]


_KL = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 1024,
}
_SMALL_KL = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 8,
}

AUTOENCODERS = {
    "sdxl-vae": Autoencoder(
        "SDXL autoencoder: decoding 1024x1024", {**_KL, "latent_channels": 4}, (1, 4, 128, 128)
    ),
    "flux-vae": Autoencoder(
        "FLUX.1 autoencoder: decoding 1024x1024",
        {**_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
        (1, 16, 128, 128),
    ),
}


def decoding(
    device: str,
    quick: bool,
    layers: int | None,
    exact: bool = False,
    *,
    kind: str,
    channels_last: bool = False,
) -> Scenario:
    """Latents to an image. Sizes do not follow from `layers`: the decoder is small."""
    import diffusers

    autoencoder = AUTOENCODERS[kind]
    sizes = {**autoencoder.sizes, **(_SMALL_KL if quick else {})}
    latents_shape = (*autoencoder.latents[:2], 8, 8) if quick else autoencoder.latents
    dtype = torch.float32 if quick or exact else torch.bfloat16
    with created_on(device, dtype):
        model = diffusers.AutoencoderKL(**sizes).eval()
        latents = torch.randn(latents_shape)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        latents = latents.contiguous(memory_format=torch.channels_last)
    decoder = model.decoder

    @torch.no_grad()
    def step(call: Callable) -> torch.Tensor:
        return call(latents)

    model_name, _, made = autoencoder.title.partition(":")
    title = (
        f"small {model_name}, fp32"
        if quick
        else f"{model_name}, {'fp32' if exact else 'bf16'}:{made}"
    )
    compile, note = how_compiled(decoder, None)
    order = "channels last" if channels_last else "contiguous"
    return Scenario(
        title=f"{title} ({order})",
        model=decoder,
        step=step,
        outputs=lambda call: (step(call),),
        compiled=compile,
        integration="diffusers",
        notes=[note, "the decoder alone"],
    )
