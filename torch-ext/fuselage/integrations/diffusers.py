"""fuselage in the pipelines and models of diffusers.

    pipe = LTXPipeline.from_pretrained("Lightricks/LTX-Video", torch_dtype=torch.bfloat16)
    print(fuselage.integrations.diffusers.patch(pipe))

docs/integrations.md says what is replaced, and what that does to a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Optional

import torch

from ._convs import recognise_conv
from ._feed_forwards import recognise_feed_forward
from ._fusion import recognise_fusion
from ._gates import (
    recognise_activation,
    recognise_experts_gate,
    recognise_gated_mlp,
    recognise_projected_gate,
)
from ._group_norm_act import recognise_group_norm_act
from ._group_norms import recognise_group_norm
from ._linears import check_option, replace_linears, restore_linears
from ._norms import recognise_norm
from ._patch import Report, patch_modules, unpatch_modules
from ._rotary import recognise_rotary_attention
from ._rotary_processor import recognise_rotary_processor
from ._signatures import recognise_signature
from ._upsampling import recognise_upsampling
from ._wide_heads import recognise_wide_attention

__all__ = ["Report", "patch", "unpatch"]

# What patch looks for, in this order. The first three are for the text encoders.
PARTS = (
    recognise_gated_mlp,
    recognise_experts_gate,
    recognise_projected_gate,
    recognise_norm,
    recognise_group_norm,
    recognise_conv,
    recognise_activation,
    recognise_rotary_attention,
    recognise_wide_attention,
)
BLOCKS = (recognise_fusion, recognise_group_norm_act, recognise_upsampling)
BODIES = (recognise_rotary_processor,)  # which asks what became of the norms


def patch(pipe: object, *, linear: Optional[str] = None, keep: Sequence[str] = ()) -> Report:
    """Replaces the forward of every layer that fuselage has a faster one for.

    As `integrations.transformers.patch`, for a transformer or for all the models of a pipeline, its
    text encoders included. Works before and after `enable_model_cpu_offload`,
    `enable_sequential_cpu_offload` and the hooks of `diffusers.hooks`.

    Args:
        pipe: A pipeline, or a model of one.
        linear: "fp8" makes the linear layers of the model's blocks `modules.Fp8Linear`, with a
            scale a row; "fp8_blockwise" with scales of groups and blocks. Heads, embeddings, norms
            and routers stay, and what the report names. Then the state dict has float8 weights and
            their scales, and the linears that were there are kept beside for `unpatch`: both take
            memory. Models that are quantised already are left alone (docs/fp8.md).
        keep: Names of modules whose linears stay, or patterns as "*.down_proj".

    Returns:
        What was replaced and what was not. `print` it.
    """
    check_option(linear)
    report = Report()
    for name, model in _models(pipe):
        patch_modules(model, PARTS, BLOCKS, report, name, BODIES)
        kept = patch_modules(model, (recognise_signature,), prefix=name)
        for module, what in kept.replaced.items():  # beside what became of the processor
            others = report.replaced.get(module)
            report.replaced[module] = what if others is None else f"{others}, {what}"
        report.left_alone |= kept.left_alone
        replace_linears(model, linear, keep, report, name, fuses_quantization=False)
        if linear is not None:
            patch_modules(model, (recognise_feed_forward,), report=report, prefix=name)
    return report


def unpatch(pipe: object) -> int:
    """Undoes `patch`. Returns the number of modules and linear layers that were restored."""
    return sum(restore_linears(model) + unpatch_modules(model) for _, model in _models(pipe))


def _models(pipe: object) -> Iterator[tuple[str, torch.nn.Module]]:
    """A model itself, or those of a pipeline with the prefix of their names."""
    if isinstance(pipe, torch.nn.Module):
        yield "", pipe
        return
    components = getattr(pipe, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"patch: needs a pipeline or a torch.nn.Module, got {type(pipe).__name__}")
    for name, component in components.items():
        if isinstance(component, torch.nn.Module):
            yield f"{name}.", component
