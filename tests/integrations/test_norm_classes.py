"""`patch` on every norm class of transformers and diffusers that can be built by sizes alone."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from integrations.models import assert_close
from torch import nn

DIM = 24
ARGUMENTS = dict.fromkeys(
    (
        "hidden_size",
        "dim",
        "normalized_shape",
        "n",
        "size",
        "feat_size",
        "num_features",
        "num_channels",
        "nx",
        "nf",
        "embedding_dim",
        "c_in",
    ),
    DIM,
) | {"eps": 1e-5, "num_groups": 2, "conditioning_embedding_dim": DIM, "group_size": DIM}


# The names of norms, and not of what has one.
NAME = re.compile(r"norm(\dd|\dp|gated|zero|single|continuous)?$", re.IGNORECASE)
# Their constructors want a configuration, or more than sizes.
NOT_BUILT = {
    "transformers": {
        "AXK2GatedRMSNorm",
        "AutoformerLayernorm",
        "ChameleonLayerNorm",
        "ConvDropoutLayerNorm",
        "CpmAntLayerNorm",
        "DINOv3ConvNextLayerNorm",
        "DbrxNormAttentionNorm",
        "Emu3VQVAEGroupNorm",
        "Emu3VQVAESpatialNorm",
        "Gemma3nAudioCumulativeGroupNorm",
        "HubertEncoderLayerStableLayerNorm",
        "HubertEncoderStableLayerNorm",
        "PatchTSMixerBatchNorm",
        "PatchTSTBatchNorm",
        "UniSpeechEncoderLayerStableLayerNorm",
        "UniSpeechEncoderStableLayerNorm",
        "UniSpeechSatEncoderLayerStableLayerNorm",
        "UniSpeechSatEncoderStableLayerNorm",
        "VibeVoiceDiffusionHeadAdaLayerNorm",
        "VoxtralRealtimeTextAdaRmsNorm",
        "Wav2Vec2EncoderLayerStableLayerNorm",
        "Wav2Vec2EncoderStableLayerNorm",
        "WavLMEncoderLayerStableLayerNorm",
        "WavLMEncoderStableLayerNorm",
        "ZayaQKNorm",
        "xLSTMMultiHeadLayerNorm",
    },
    "diffusers": {
        "AdaGroupNorm",
        "CogVideoXLayerNormZero",
        "CogVideoXSpatialNorm3D",
        "CosmosAdaLayerNorm",
        "CosmosAdaLayerNormZero",
        "CosmosCausalGroupNorm",
        "EasyAnimateLayerNormZero",
        "HunyuanImageAdaNorm",
        "HunyuanVideo15AdaNorm",
        "HunyuanVideoAdaNorm",
        "KVAECachedGroupNorm",
        "KVAECachedSpatialNorm3D",
        "KVAEDecoderSpatialNorm2D",
        "Kandinsky3ConditionalGroupNorm",
        "Kandinsky6SRLatentUpscalerModulatedNorm",
        "Kandinsky6SRSpatialNorm3D",
        "LuminaRMSNormZero",
        "MochiRMSNormZero",
        "MotifVideoAdaNorm",
        "RFD4ProteinaAdaptiveNorm",
        "ResnetBlockCondNorm2D",
        "SDCascadeLayerNorm",
        "SpatialNorm",
    },
}
REPLACED = {"transformers": 214, "diffusers": 7}  # at least


def norm_classes(library: str) -> dict[str, type[nn.Module]]:
    """Those with "norm" at the end of the name, by the module that defines them."""
    root = Path(importlib.import_module(f"{library}.models").__path__[0])
    pattern = "*/modeling_*.py" if library == "transformers" else "**/*.py"
    found: dict[str, type[nn.Module]] = {}
    for path in sorted(root.glob(pattern)):
        parts = path.relative_to(root).with_suffix("").parts
        if "flax" in str(path) or parts[-1] == "__init__":
            continue
        try:
            module = importlib.import_module(".".join((f"{library}.models", *parts)))
        except ImportError:
            continue  # such as those that need torchaudio
        for name, kind in vars(module).items():
            own = isinstance(kind, type) and kind.__module__ == module.__name__
            if own and issubclass(kind, nn.Module) and NAME.search(name):
                found[f"{module.__name__.removeprefix(library + '.models.')}.{name}"] = kind
    return found


def built(kind: type[nn.Module]) -> nn.Module | None:
    """With `DIM` for whatever its constructor calls a size; None if it needs something else."""
    given = {}
    try:
        for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
            if name in ARGUMENTS:
                given[name] = ARGUMENTS[name]
            elif parameter.default is parameter.empty and parameter.kind in (1, 3):
                return None
        module = kind(**given)
    except Exception:  # whatever a constructor raises
        return None
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(1.0, 0.3)
    return module.eval()


def outputs(module: nn.Module, x: torch.Tensor) -> torch.Tensor | Exception:
    try:
        return module(x)
    except Exception as error:
        return error


def check(integration, module: nn.Module) -> str | None:
    """What replaced it, if anything did, after comparing all that it computes."""
    plain = copy.deepcopy(module)
    before = dict(vars(module))
    report = integration.patch(module)
    for shape in ((5, DIM), (2, 5, DIM), (2, 3, 5, DIM)) if report.replaced else ():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(shape).to(dtype)
            ours, theirs = module.to(dtype), plain.to(dtype)
            for training in (False, True):
                expected = outputs(theirs.train(training), x)
                if isinstance(expected, torch.Tensor):
                    tol = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
                    actual = ours.train(training)(x)
                    assert_close(actual.detach(), expected.detach(), f"{shape} {dtype}", tol)
        module.float(), plain.float()
        _same_gradients(module, plain, torch.randn(shape))
    module.eval()
    assert integration.unpatch(module) == len(report.replaced)
    assert dict(vars(module)) == before
    return report.replaced.get("")


def _same_gradients(module, plain, x) -> None:
    if not isinstance(outputs(plain, x), torch.Tensor):
        return
    grads = []
    cotangent = torch.randn(x.shape)
    for one in (module, plain):
        one.zero_grad()
        leaf = x.clone().requires_grad_()
        (one(leaf) * cotangent).sum().backward()
        grads.append([leaf.grad, *(p.grad for p in one.parameters())])
    for actual, expected in zip(*grads, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert_close(actual, expected, "gradient", tol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_every_norm_class(fuselage, library):
    pytest.importorskip(library)
    integration = getattr(fuselage.integrations, library)
    not_built, replaced = set(), 0
    for kind in norm_classes(library).values():
        module = built(kind)
        if module is None:
            not_built.add(kind.__name__)
        else:
            replaced += check(integration, module) is not None
    assert not_built == NOT_BUILT[library]
    assert replaced >= REPLACED[library]


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(4, 16)], ids=repr)
def test_a_weight_that_is_no_parameter(fuselage, norm):
    """But made of one, or a tensor in its place, as FSDP sets it."""
    from torch.nn.utils import parametrize

    x = torch.randn(2, 16, 4) if isinstance(norm, nn.GroupNorm) else torch.randn(2, 16)
    plain = copy.deepcopy(norm)
    nn.init.normal_(plain.weight)
    patched = copy.deepcopy(plain)
    fuselage.integrations.diffusers.patch(patched)
    for each in (plain, patched):
        parametrize.register_parametrization(each, "weight", Doubled())
    assert_close(patched(x), plain(x))
    plain, patched = (copy.deepcopy(norm) for _ in range(2))
    fuselage.integrations.diffusers.patch(patched)
    tensor = torch.randn(16)
    for each in (plain, patched):
        del each.weight
        each.weight = tensor
    assert_close(patched(x), plain(x))
