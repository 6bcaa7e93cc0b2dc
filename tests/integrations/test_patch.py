"""`patch` on modules that are hard to try: sharded, partitioned, hooked, lazy, misleading."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from integrations.models import assert_close, build, counted_ops, logits, tokens
from integrations.sharding import gathered, partition, process_group
from torch import nn

F = nn.functional
ONCE = "rms_norm (weight, rounded once)"


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


@pytest.fixture(scope="module")
def mesh():
    with process_group() as mesh:
        yield mesh


class AnyNorm(nn.Module):
    """An RMS norm over `axis`, without "norm" in its name where it is derived from."""

    axis = -1

    def __init__(self, dim=8, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))
        self.eps = eps

    def forward(self, x):
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(self.axis, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float()).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, act, linear=nn.Linear):
        super().__init__()
        self.gate_proj, self.up_proj = linear(8, 16), linear(8, 16)
        self.down_proj, self.act_fn = linear(16, 8), act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


# Parameters that are elsewhere


def test_fully_shard(integration, fuselage, mesh):
    """FSDP2 gives a module a class whose `__new__` builds another one."""
    from torch.distributed.fsdp import fully_shard

    plain = build("Llama")
    for patch_first in (False, True):
        model = copy.deepcopy(plain)
        if patch_first:
            integration.patch(model)
        for layer in model.model.layers:
            fully_shard(layer.mlp, mesh=mesh)
            fully_shard(layer.input_layernorm, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        report = integration.patch(model)
        replaced = list(report.replaced.values())
        assert [replaced.count(w) for w in ("swiglu", "apply_rotary")] == [2, 2], str(report)
        assert sum(what.startswith("rms_norm") for what in replaced) == 5
        assert replaced.count("fused_add_rms_norm") == 2
        ids = tokens()
        with counted_ops(fuselage) as counts:
            actual = logits(model, ids)
        assert counts["rms_norm"] + counts["fused_add_rms_norm"] == 5 and counts["apply_rotary"]
        expected = logits(plain, ids)
        assert_close(actual.detach(), expected.detach())
        plain.zero_grad()
        for result in (actual, expected):
            result.square().mean().backward()
        for (key, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert_close(ours.grad.full_tensor(), theirs.grad, key, tol=1e-4)
        assert integration.unpatch(model) == len(report.replaced)


def test_partitioned_parameters(integration, fuselage):
    """As ZeRO-3 leaves them: of size 0 but while a module runs."""
    plain = build("Llama")
    model = copy.deepcopy(plain)
    partition(model)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    report = integration.patch(model)
    assert sum(what.startswith("rms_norm") for what in report.replaced.values()) == 5
    ids = tokens()
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(logits(model, ids), logits(plain, ids))
    assert counts["rms_norm"] == 5
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    integration.unpatch(model)
    with gathered(model):
        assert all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("make", [nn.RMSNorm, nn.LayerNorm, AnyNorm], ids=lambda m: m.__name__)
def test_a_norm_of_size_0(integration, make):
    """It declares another size, or none; one for 0 columns runs on no others."""
    norm = make(8)
    norm.weight = nn.Parameter(torch.empty(0))
    if getattr(norm, "bias", None) is not None:
        norm.bias = nn.Parameter(torch.empty(0))
    (what,) = integration.patch(nn.Sequential(norm)).replaced.values()
    assert what == ("layer_norm" if make is nn.LayerNorm else ONCE)
    report = integration.patch(make(0))
    assert len(report.replaced) == (make is AnyNorm) and not integration.patch(norm).left_alone


def test_mochi(fuselage):
    """Some of its norms are made for 0 columns and run on any number."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=4,
    )
    report = fuselage.integrations.diffusers.patch(model)
    assert report.replaced["transformer_blocks.0.norm1.norm"] == ONCE


def test_flat_parameters(integration, fuselage, mesh):
    """FSDP1 without `use_orig_params` has views in place of parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for original in (False, True):
        plain = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.LayerNorm(8))
        model = FullyShardedDataParallel(
            copy.deepcopy(plain), use_orig_params=original, device_id=torch.device("cpu")
        )
        report = integration.patch(model)
        assert sorted(report.replaced.values()) == ["layer_norm", ONCE], str(report)
        x = torch.randn(2, 3, 8)
        with counted_ops(fuselage) as counts:
            assert_close(model(x).detach(), plain(x).detach())
        assert counts == {"rms_norm": 1, "layer_norm": 1}


class LazyRMSNorm(nn.modules.lazy.LazyModuleMixin, AnyNorm):
    def __init__(self):
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, x):
        self.weight.materialize((x.shape[-1],))
        nn.init.normal_(self.weight)


def test_parameters_that_do_not_exist_yet(integration, fuselage):
    lazy = lambda rows, columns: nn.LazyLinear(columns)  # noqa: E731
    model = nn.ModuleDict({"norm": LazyRMSNorm(), "mlp": MLP(nn.SiLU(), lazy)})
    model["conv"], model["batch"] = nn.LazyConv1d(8, 3), nn.LazyBatchNorm1d()
    report = integration.patch(model)
    assert report.replaced == {"mlp": "swiglu"}
    assert "not initialised" in report.left_alone["norm"]
    x = torch.randn(2, 3, 8)
    with counted_ops(fuselage) as counts:
        assert model["mlp"](model["norm"](x)).shape == x.shape
    assert sum(counts.values()) == 1
    assert integration.patch(model).replaced["norm"] == ONCE


# Gradients that the values do not show


class DetachedNorm(AnyNorm):
    def forward(self, x):
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps).detach()
        return (x32 * scale * self.weight.float()).to(x.dtype)


class FrozenNorm(AnyNorm):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class DetachedWeight(AnyNorm):
    def forward(self, x):
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.detach().float()).to(x.dtype)


class DetachedMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


class DetachedAct(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x).detach()


@pytest.mark.parametrize(
    "module",
    [DetachedNorm(), FrozenNorm(), DetachedWeight(), DetachedMLP(nn.SiLU()), MLP(DetachedAct())],
    ids=lambda m: type(m).__name__,
)
def test_other_gradients_are_left_alone(integration, module):
    report = integration.patch(module)
    assert not report.replaced
    assert "forward" not in vars(module)


# Modules that cannot be tried


class Hostile(nn.Module):
    """Raises whatever is asked of it, as a proxy to another process may."""

    gate_proj = up_proj = down_proj = processor = None

    def __getattr__(self, name):
        raise OSError(f"{name} is not here")


@pytest.mark.parametrize("which", ["transformers", "diffusers"])
def test_a_module_that_raises_is_left_alone(fuselage, which):
    integration = getattr(fuselage.integrations, which)
    model = nn.Sequential(Hostile(), nn.RMSNorm(8), torch.jit.script(nn.Linear(8, 8)))
    report = integration.patch(model)
    assert report.replaced == {"1": ONCE}
    assert "cannot be tried: OSError" in report.left_alone["0"]
    assert "scripted" in report.left_alone["2"]


def test_the_reason_is_the_error(integration):
    class RMSNorm(AnyNorm):
        def forward(self, x):
            raise RuntimeError("only on Sundays")

    report = integration.patch(RMSNorm())
    assert report.left_alone[""].endswith("RuntimeError: only on Sundays")


# Norms that agree on some inputs only


class ChannelNorm(AnyNorm):
    axis = 1


class FirstNorm(AnyNorm):
    axis = 0


class SecondToLastNorm(AnyNorm):
    axis = -2


class AllButTheFirstNorm(AnyNorm):
    def forward(self, x):
        self.axis = tuple(range(1, x.dim()))
        return super().forward(x)


class DroppingNorm(AnyNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class ImageNorm(AnyNorm):
    """Over the channels of images, and over the last dimension of sequences."""

    def forward(self, x):
        self.axis = 1 if x.dim() == 4 else -1
        return super().forward(x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "kind",
    [ChannelNorm, FirstNorm, SecondToLastNorm, AllButTheFirstNorm, DroppingNorm, ImageNorm],
    ids=lambda kind: kind.__name__,
)
def test_a_norm_that_agrees_on_some_inputs_is_left_alone(integration, kind, training):
    for dim in (2, 3, 5, 7, 8):
        report = integration.patch(kind(dim).train(training))
        assert not report.replaced and "computes something else" in report.left_alone[""]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GroupNorm(1, 8),
        lambda: nn.GroupNorm(1, 8, affine=False),
        lambda: nn.BatchNorm1d(8, track_running_stats=False),
        lambda: nn.InstanceNorm1d(8, affine=True),
        lambda: nn.InstanceNorm2d(8),
    ],
)
def test_norms_over_other_dimensions(integration, make):
    report = integration.patch(make())
    assert not report.replaced and not report.left_alone


def test_names_decide_nothing(integration):
    class Scaler(AnyNorm):
        pass

    class Bend(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3))))

    report = integration.patch(nn.Sequential(Scaler(), Bend(), nn.Dropout(), nn.Tanh()))
    assert report.replaced == {"0": ONCE, "1": "gelu_tanh"}
    assert not report.left_alone


def test_a_class_whose_forward_changes_is_tried_again(integration, monkeypatch):
    class Changing(AnyNorm):
        pass

    assert integration.patch(Changing()).replaced
    monkeypatch.setattr(Changing, "forward", lambda self, x: x * self.weight)
    assert not integration.patch(Changing()).replaced


# What surrounds the call


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode,
        lambda: torch.device("meta"),
        torch.enable_grad,
    ],
    ids=["autocast", "inference mode", "meta", "grad"],
)
def test_what_surrounds_patch_decides_nothing(integration, around):
    class CubicRMSNorm(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x) ** 3

    class ShiftedLayerNorm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(CubicRMSNorm(8), ShiftedLayerNorm(8), nn.RMSNorm(8), MLP(nn.SiLU()))
    with around():
        report = integration.patch(model)
    assert report.replaced == {"2": ONCE, "3": "swiglu"}


def test_patch_leaves_modes_and_random_numbers(integration):
    import numpy

    class Noisy(nn.Module):
        def forward(self, x):
            return x + random.random() + numpy.random.rand() + torch.rand(())

    model = nn.Sequential(DroppingNorm(), Noisy(), MLP(Noisy()), MLP(nn.SiLU()).eval()).train()
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    integration.patch(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]


def test_an_activation_that_drops_out_in_training(integration):
    class DroppingSiLU(nn.Module):
        def forward(self, x):
            return F.dropout(F.silu(x), 0.1, self.training)

    for training in (False, True):
        report = integration.patch(MLP(DroppingSiLU()).train(training))
        assert not report.replaced


def test_a_forward_that_keeps_a_list(integration):
    class KeepingRMSNorm(AnyNorm):
        def __init__(self):
            super().__init__()
            self.kept = []

        def forward(self, x):
            self.kept.append(x.shape)
            return super().forward(x)

    norm = KeepingRMSNorm()
    integration.patch(norm)
    assert norm.kept == []


# Hooks

GLOBAL_HOOKS = (
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_module_full_backward_hook",
    "register_module_full_backward_pre_hook",
)


def test_probes_fire_no_hooks(fuselage):
    fired = []
    models = [(fuselage.integrations.transformers, build("Phi3"))]
    if pytest.importorskip("diffusers"):
        from integrations.test_diffusers import built, flux, ltx

        models += [(fuselage.integrations.diffusers, built(m, "cpu")[0]) for m in (flux, ltx)]
    models.append((fuselage.integrations.transformers, MLP(nn.SiLU())))
    for _, model in models:
        for module in model.modules():
            for name in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
                hook = lambda *args, name=name: fired.append(name)  # noqa: E731
                getattr(module, f"register_{name}")(hook)
    registered = [
        getattr(nn.modules.module, name)(lambda *args, name=name: fired.append(name))
        for name in GLOBAL_HOOKS
    ]
    try:
        for integration, model in models:
            integration.patch(model)
    finally:
        for handle in registered:
            handle.remove()
    assert not fired


def test_an_activation_with_a_hook_is_called_as_before(integration):
    mlp, seen = MLP(nn.SiLU()), []
    mlp.act_fn.register_forward_hook(lambda *args: seen.append(args))
    report = integration.patch(mlp)
    assert "has hooks" in report.left_alone[""] and not report.replaced
    mlp(torch.randn(2, 8))
    assert len(seen) == 1


def test_an_activation_with_another_forward_is_called_as_before(integration):
    mlp = MLP(nn.SiLU())
    mlp.act_fn.forward = lambda x: x
    x = torch.randn(2, 8)
    expected = mlp(x)
    report = integration.patch(mlp)
    assert "act_fn" in report.left_alone[""] and not report.replaced
    assert torch.equal(mlp(x), expected)


def test_a_hook_on_a_norm_of_a_diffusion_block_is_called(fuselage):
    pytest.importorskip("diffusers")
    from integrations.test_diffusers import built, flux, output

    model, inputs = built(flux, "cpu")
    with torch.no_grad():
        expected = output(model, inputs)
        fuselage.integrations.diffusers.patch(model)
        seen = []
        for block in model.transformer_blocks:
            block.norm2.register_forward_hook(lambda module, args, out: seen.append(out))
            block.norm1.norm.register_forward_hook(lambda module, args, out: seen.append(out))
        assert_close(output(model, inputs), expected)
    assert len(seen) == 4


def test_a_compiled_child_is_not_run(integration):
    mlp = MLP(nn.SiLU())
    calls = []
    mlp.act_fn._compiled_call_impl = lambda x: calls.append(x)
    integration.patch(mlp)
    assert not calls


# Reports


def test_mamba_has_no_rotary_embedding(integration):
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    report = integration.patch(transformers.MambaForCausalLM(config))
    assert "rotary" not in str(report)
    assert sum(what.startswith("rms_norm") for what in report.replaced.values()) == 3
