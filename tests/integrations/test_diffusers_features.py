"""Patched models with what diffusers does to models itself: whichever comes first."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from integrations import test_diffusers, zoo_diffusion
from integrations.models import assert_close

diffusers = pytest.importorskip("diffusers")
hooks = pytest.importorskip("diffusers.hooks")

MODELS = {
    "flux": test_diffusers.flux,
    "wan": test_diffusers.wan,
    "unet": partial(zoo_diffusion.conditional_unet, diffusers),
    "qwen_image": partial(zoo_diffusion.qwen_image, diffusers),
    "cogview4": partial(zoo_diffusion.cogview4, diffusers),
}


def fused(model):
    model.fuse_qkv_projections()


def fused_and_not(model):
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()


def cast_by_layers(model):
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)


def offloaded(model, kind: str):
    cpu, blocks = torch.device("cpu"), {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(cpu, offload_device=cpu, offload_type=kind, **blocks)


def with_backend(model):
    model.set_attention_backend("_native_math")


def with_its_own_processors(model):
    model.set_attn_processor(model.attn_processors)


def with_free_u(model):
    model.enable_freeu(0.9, 0.2, 1.1, 1.2)


def skipping(model, **what: bool):
    hooks.apply_layer_skip(model, hooks.LayerSkipConfig([0], fqn="auto", **what))


def caching(model, config: type, **options):
    model.enable_cache(config(**options))


ATTENTION = {
    "spatial_attention_block_skip_range": 2,
    "spatial_attention_timestep_skip_range": (-1, 10000),
    "current_timestep_callback": lambda: 500,
}
FEATURES = {
    "fused": (fused, ("flux", "unet")),
    "fused and not": (fused_and_not, ("flux", "wan")),
    "float8 between calls": (cast_by_layers, ("qwen_image", "unet")),
    "layers offloaded": (partial(offloaded, kind="leaf_level"), ("flux", "unet")),
    "blocks offloaded": (partial(offloaded, kind="block_level"), ("flux", "cogview4")),
    "attention backend": (with_backend, ("flux", "qwen_image")),
    "its own processors": (with_its_own_processors, ("flux", "unet")),
    "FreeU": (with_free_u, ("unet",)),
    "no attention": (partial(skipping, skip_attention=True, skip_ff=False), ("cogview4",)),
    "no feed-forward": (partial(skipping, skip_attention=False, skip_ff=True), ("flux", "wan")),
    "no block": (partial(skipping, skip_attention=False, skip_ff=False), ("flux", "cogview4")),
    "first block": (
        partial(caching, config=hooks.FirstBlockCacheConfig, threshold=10.0),
        ("flux", "cogview4"),
    ),
    "attention of earlier steps": (
        partial(caching, config=hooks.PyramidAttentionBroadcastConfig, **ATTENTION),
        ("flux", "wan"),
    ),
    "Taylor series": (
        partial(
            caching,
            config=hooks.TaylorSeerCacheConfig,
            cache_interval=2,
            disable_cache_before_step=1,
            max_order=1,
            # The default is bfloat16, in which float32 noise is a rounding step of it.
            taylor_factors_dtype=torch.float32,
        ),
        ("flux", "wan"),
    ),
}


def three_steps(model, inputs: dict) -> list[torch.Tensor]:
    """Of inputs that differ a little: what is kept of a step may be used in the next."""
    outputs = []
    context = contextlib.nullcontext()
    if getattr(model, "is_cache_enabled", False):
        context = model.cache_context("cond")
    with torch.no_grad(), context:
        for step in range(3):
            moved = {
                name: value + 0.1 * step
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2
                else value
                for name, value in inputs.items()
            }
            outputs.append(model(**moved, return_dict=False)[0])
    return outputs


def built(name: str):
    torch.manual_seed(0)
    return test_diffusers.built(MODELS[name], "cpu")


@pytest.mark.parametrize("patch_first", [False, True], ids=["feature first", "patch first"])
@pytest.mark.parametrize(
    "feature, name", [(feature, name) for feature in FEATURES for name in FEATURES[feature][1]]
)
def test_a_feature_of_diffusers(fuselage, feature, name, patch_first):
    integration, turn_on = fuselage.integrations.diffusers, FEATURES[feature][0]
    model, inputs = built(name)
    turn_on(model)
    expected = three_steps(model, inputs)
    model, inputs = built(name)
    if not patch_first:
        turn_on(model)
    assert integration.patch(model).replaced
    if patch_first:
        turn_on(model)
    for actual, wanted in zip(three_steps(model, inputs), expected):
        assert_close(actual, wanted)
