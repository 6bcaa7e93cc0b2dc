"""integrations.diffusers on whole transformers, with random weights and at reduced size."""

from __future__ import annotations

import copy
import functools
import inspect
import io
from types import SimpleNamespace

import pytest
import torch
from integrations.models import (
    assert_close,
    assert_no_farther,
    compiled_and_counted,
    counted_ops,
    half_of,
    randomise,
)
from torch import nn

diffusers = pytest.importorskip("diffusers")


def ltx():
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=32,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=16,
    )
    frames, height, width = 2, 3, 4
    tokens = frames * height * width
    return model, {
        "hidden_states": torch.randn(2, tokens, 8),
        "encoder_hidden_states": torch.randn(2, 6, 16),
        "timestep": torch.tensor([500, 20]),
        "encoder_attention_mask": torch.ones(2, 6).bool(),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def flux():
    model = diffusers.FluxTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": torch.randn(2, 16, 8),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.5, 0.1]),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
    }


def wan():
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 16),
        "timestep": torch.tensor([500, 20]),
    }


def sd3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": torch.tensor([500, 20]),
    }


# What must be among the calls of one forward, and how often at least.
TRANSFORMERS = {
    ltx: {
        "ada_norm": 2,
        "gate_residual_ada_norm": 2,
        "rms_norm": 4,
        "activation": 2,
        "rotations": 2,
    },
    flux: {
        "ada_norm": 6,
        "gate_residual_ada_norm": 4,
        "rms_norm": 8,
        "activation": 4,
        "apply_rotary": 2,
        "qk_norm_rotary": 1,
    },
    wan: {
        "ada_norm": 2,
        "gate_residual_ada_norm": 2,
        "rms_norm": 8,
        "activation": 2,
        "apply_rotary": 2,
    },
    sd3: {"ada_norm": 8, "gate_residual_ada_norm": 5, "rms_norm": 14, "activation": 5},
}
each_transformer = pytest.mark.parametrize("make", TRANSFORMERS, ids=lambda make: make.__name__)


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.diffusers


def built(make, device: str) -> tuple[nn.Module, dict]:
    model, inputs = make()
    randomise(model)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # the default makes a model that hardly depends on its blocks
            nn.init.normal_(parameter, 0.0, 1.5 / parameter.shape[-1] ** 0.5)
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    return model.to(device).eval(), inputs


def output(model: nn.Module, inputs: dict, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections")
    cast = {k: inputs[k].to(dtype) for k in names if k in inputs}
    return model(**{**inputs, **cast}, return_dict=False)[0]


def expect(counts, make) -> None:
    counts["rotations"] = counts["apply_rotary"] + counts["qk_norm_rotary"]
    for name, least in TRANSFORMERS[make].items():
        assert counts[name] >= least, (name, counts)


@each_transformer
def test_outputs_and_gradients(integration, fuselage, device, make):
    plain, inputs = built(make, device)
    model = copy.deepcopy(plain)
    report = integration.patch(model)
    with counted_ops(fuselage) as counts:
        actual = output(model, inputs)
    expect(counts, make)
    expected = output(plain, inputs)
    assert_close(actual.detach(), expected.detach(), str(report))
    grad_out = torch.randn_like(expected)
    actual.backward(grad_out)
    expected.backward(grad_out)
    for (key, theirs), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is None or _is_noise(key, theirs):
            continue
        assert_close(parameter.grad, theirs.grad, key, tol=2e-4)


def _is_noise(key: str, parameter: nn.Parameter) -> bool:
    """The bias of a key moves all scores of a query alike: its gradient is float32 noise."""
    return key.endswith(("to_k.bias", "add_k_proj.bias")) or parameter.grad.abs().max() < 1e-5


@pytest.mark.long
@each_transformer
def test_half_precision_does_not_drift(integration, device, make):
    @functools.lru_cache(maxsize=1)
    def results(seed: int):
        torch.manual_seed(seed)
        exact, inputs = built(make, device)
        plain = half_of(exact)
        ours = copy.deepcopy(plain)
        integration.patch(ours)
        names = ("hidden_states", "encoder_hidden_states", "pooled_projections")
        inputs.update({k: inputs[k].bfloat16().float() for k in names if k in inputs})
        half = torch.bfloat16
        with torch.no_grad():
            return output(ours, inputs, half), output(plain, inputs, half), output(exact, inputs)

    assert results(0)[0].dtype == results(0)[1].dtype
    assert_no_farther(*(lambda seed, i=i: results(seed)[i] for i in range(3)))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [ltx, sd3], ids=lambda make: make.__name__)
def test_compiled_whole(integration, fuselage, device, make, training):
    """For inference the compiler gets the whole, adaptive norms included: it fuses them as well."""
    plain, inputs = built(make, device)
    model = copy.deepcopy(plain)
    integration.patch(model)
    compiled, counts = compiled_and_counted(model, fuselage)
    with torch.set_grad_enabled(training):
        actual, expected = output(compiled, inputs), output(plain, inputs)
    if training:
        expect(counts, make)
    else:
        assert not counts, counts
    assert_close(actual.detach(), expected.detach())


@each_transformer
def test_unpatch_restores_exactly(integration, fuselage, device, make):
    model, inputs = built(make, device)
    before = [dict(vars(module)) for module in model.modules()]
    with torch.no_grad():
        expected = output(model, inputs)
        report = integration.patch(model)
        assert integration.patch(model).replaced == report.replaced
        assert not torch.equal(output(model, inputs), expected) or report.replaced
        assert integration.unpatch(model) == len(report.replaced)
        with counted_ops(fuselage) as counts:
            assert torch.equal(output(model, inputs), expected)
    assert not counts
    assert [vars(module) for module in model.modules()] == before


@pytest.mark.long
@each_transformer
def test_a_pickle_loads_as_the_plain_model(integration, fuselage, make):
    model, inputs = built(make, "cpu")
    with torch.no_grad():
        expected = output(model, inputs)
        report = integration.patch(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        with counted_ops(fuselage) as counts:
            assert torch.equal(output(loaded, inputs), expected)
        assert not counts
        assert integration.patch(loaded).replaced == report.replaced
        twin = copy.deepcopy(model)  # which is patched, though by the same means of Python
        integration.unpatch(model)
        with counted_ops(fuselage) as counts:
            assert_close(output(twin, inputs), expected)
        expect(counts, make)


@pytest.mark.parametrize("make", [ltx, flux], ids=lambda make: make.__name__)
def test_processors_that_were_rebuilt_are_unpatched(integration, make):
    """By their class, as diffusers does when an IP-Adapter comes or goes."""
    model, inputs = built(make, "cpu")
    attention = {k: m for k, m in model.named_modules() if hasattr(m, "processor")}
    kinds = {k: type(m.processor) for k, m in attention.items()}
    with torch.no_grad():
        expected = output(model, inputs)
        integration.patch(model)
        for m in attention.values():
            m.set_processor(type(m.processor)())
            m.processor.scale = 0.5
        integration.patch(model)
        integration.unpatch(model)
        assert {k: type(m.processor) for k, m in attention.items()} == kinds
        assert all(m.processor.scale == 0.5 for m in attention.values())
        assert torch.equal(output(model, inputs), expected)


@pytest.mark.parametrize("patch_first", [False, True], ids=["hooks first", "patch first"])
@pytest.mark.parametrize("make", [ltx, wan], ids=lambda make: make.__name__)
def test_the_hooks_of_accelerate(integration, fuselage, make, patch_first):
    """As `enable_sequential_cpu_offload` attaches them: to every module that has a parameter."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, inputs = built(make, "cpu")
    with torch.no_grad():
        expected = output(model, inputs)
    if patch_first:
        integration.patch(model)
    hooks.attach_align_device_hook(
        model,
        execution_device=torch.device("cpu"),
        offload=True,
        weights_map=dict(model.state_dict()),
    )
    assert next(model.parameters()).device.type == "meta"
    if not patch_first:
        integration.patch(model)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(output(model, inputs), expected)
    expect(counts, make)
    hooks.remove_hook_from_submodules(model)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(output(model, inputs), expected)
    expect(counts, make)
    integration.unpatch(model)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert torch.equal(output(model, inputs), expected)
    assert not counts


@pytest.mark.parametrize("patch_first", [False, True], ids=["hooks first", "patch first"])
def test_the_hooks_of_diffusers(integration, fuselage, patch_first):
    from diffusers.hooks import HookRegistry, ModelHook

    calls = []

    class Counting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    model, inputs = built(ltx, "cpu")
    with torch.no_grad():
        expected = output(model, inputs)
    if patch_first:
        integration.patch(model)
    modules = list(model.transformer_blocks.modules())
    for module in modules:
        HookRegistry.check_if_exists_or_initialize(module).register_hook(Counting(), "counting")
    if not patch_first:
        integration.patch(model)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(output(model, inputs), expected)
    expect(counts, ltx)
    assert {type(module).__name__ for module in calls} >= {"LTXVideoTransformerBlock", "GELU"}
    model.transformer_blocks._diffusers_hook.remove_hook("counting")
    calls.clear()
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(output(model, inputs), expected)
    expect(counts, ltx)
    assert not calls
    integration.unpatch(model)
    with torch.no_grad():
        assert torch.equal(output(model, inputs), expected)


def test_a_pipeline_is_patched_model_by_model(integration):
    pipeline = SimpleNamespace(components={"transformer": ltx()[0], "scheduler": object()})
    report = integration.patch(pipeline)
    assert report.replaced and all(name.startswith("transformer.") for name in report.replaced)
    assert integration.unpatch(pipeline) == len(report.replaced)
    with pytest.raises(TypeError, match="needs a pipeline"):
        integration.patch(object())


# Layers, one by one


NORMALIZATION = "diffusers.models.normalization"


def each_ada_norm():
    from diffusers.models import normalization as n

    x, emb, y = torch.randn(2, 5, 32), torch.randn(2, 32), torch.randn(2, 3, 32)
    yield n.AdaLayerNormZero(32), {"x": x, "emb": emb}
    yield n.AdaLayerNormZero(32, norm_type="fp32_layer_norm"), {"x": x, "emb": emb}
    yield n.AdaLayerNormZeroSingle(32), {"x": x, "emb": emb}
    yield n.SD35AdaLayerNormZeroX(32), {"hidden_states": x, "emb": emb}
    yield n.AdaLayerNormContinuous(32, 32, False, 1e-6), {"x": x, "conditioning_embedding": emb}
    yield n.AdaLayerNorm(32, chunk_dim=1), {"x": x, "temb": emb}
    streams = {"hidden_states": x, "encoder_hidden_states": y}
    yield n.CogVideoXLayerNormZero(32, 32, elementwise_affine=False), {**streams, "temb": emb}


@pytest.mark.parametrize("index", range(7))
def test_an_adaptive_norm(integration, fuselage, device, index):
    module, inputs = list(each_ada_norm())[index]
    randomise(module)
    module.to(device)
    inputs = {k: v.to(device) for k, v in inputs.items()}
    expected = module(**inputs)
    report = integration.patch(module)
    assert report.replaced[""] == "ada_layer_norm"
    with counted_ops(fuselage) as counts:
        actual = module(**inputs)
    assert counts["ada_norm"] >= 1
    pairs = (
        zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    )
    for i, (ours, theirs) in enumerate(pairs):
        assert_close(ours.detach(), theirs.detach(), str(i), tol=1e-5)


def each_other_ada_norm():
    """Classes of names that are known, which mean something else, and whether they are taken."""
    from diffusers.models import normalization as n

    class Swapped(n.AdaLayerNormZeroSingle):
        def forward(self, x, emb=None):
            scale, shift, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
            return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate

    class WithoutOne(n.AdaLayerNormContinuous):
        def forward(self, x, conditioning_embedding):
            scale, shift = self.linear(self.silu(conditioning_embedding)).chunk(2, dim=1)
            return self.norm(x) * scale[:, None] + shift[:, None]

    yield Swapped(32), True
    yield WithoutOne(32, 32, False), False
    yield n.AdaLayerNormContinuous(32, 32, elementwise_affine=True), True


@pytest.mark.parametrize("index", range(3))
def test_another_adaptive_norm(integration, fuselage, device, index):
    module, taken = list(each_other_ada_norm())[index]
    randomise(module)
    module.to(device)
    args = (torch.randn(2, 5, 32, device=device), torch.randn(2, 32, device=device))
    expected = module(*args)
    report = integration.patch(module)
    assert report.replaced.get("") == ("ada_layer_norm" if taken else None)
    with counted_ops(fuselage) as counts:
        actual = module(*args)
    assert counts == ({"ada_norm": 1} if taken else {"layer_norm": 1})
    for ours, theirs in zip(*((v if isinstance(v, tuple) else (v,)) for v in (actual, expected))):
        assert_close(ours.detach(), theirs.detach(), tol=1e-5)


@pytest.mark.parametrize("elementwise_affine", [True, False])
def test_rms_norm_with_and_without_a_weight(integration, fuselage, device, elementwise_affine):
    from diffusers.models.normalization import RMSNorm

    module = RMSNorm(64, 1e-6, elementwise_affine).to(device)
    randomise(module)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 64, device=device).to(dtype)
        integration.unpatch(module)
        expected = module(x)
        assert integration.patch(module).replaced
        with counted_ops(fuselage) as counts:
            assert_close(module(x).detach(), expected.detach())  # a float32 result for bfloat16
        assert counts == {"rms_norm": 1}
    with_bias = RMSNorm(64, 1e-6, bias=True)
    nn.init.normal_(with_bias.bias)
    assert not integration.patch(with_bias).replaced


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("GEGLU", "mul_and_gelu"),
        ("SwiGLU", "mul_and_silu"),
        ("GELU", "gelu_tanh"),
        ("ApproximateGELU", "gelu_quick"),
    ],
)
def test_a_feed_forward(integration, fuselage, device, name, what):
    from diffusers.models import activations

    kind = getattr(activations, name)
    options = {"approximate": "tanh"} if name == "GELU" else {}
    module = kind(16, 24, **options).to(device)
    x = torch.randn(3, 16, device=device)
    expected = module(x)
    assert integration.patch(module).replaced == {"": what}
    parameter = list(inspect.signature(kind.forward).parameters)[1]
    with counted_ops(fuselage) as counts:
        assert_close(module(x).detach(), expected.detach())
    assert sum(counts.values()) == 1
    assert parameter in ("x", "hidden_states")


def test_the_plain_gelu_is_left_alone(integration):
    from diffusers.models.activations import GELU, LinearActivation

    assert "one kernel" in integration.patch(GELU(16, 24)).left_alone[""]
    assert not integration.patch(LinearActivation(16, 24)).replaced
