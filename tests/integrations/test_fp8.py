"""patch(model, linear="fp8"): which linears are replaced, what stays, and that it is undone."""

from __future__ import annotations

import copy
import io
import sys
from collections import Counter

import pytest
import torch
from integrations.models import build, logits, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


def linears(report) -> dict[str, str]:
    return {name: what for name, what in report.replaced.items() if what.startswith("Fp8Linear")}


def kept(report) -> dict[str, str]:
    return {n: why for n, why in report.left_alone.items() if why.startswith("linear")}


def error(ours, theirs) -> float:
    return ((ours - theirs).square().mean() / theirs.square().mean()).sqrt().item()


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
@pytest.mark.parametrize(("option", "recipe"), [("fp8", "rowwise"), ("fp8_blockwise", "blockwise")])
def test_causal_models(integration, fuselage, name, option, recipe):
    plain = build(name)
    model = copy.deepcopy(plain)
    before = {n: id(m) for n, m in model.named_modules()}
    state = {n: t.clone() for n, t in model.state_dict().items()}
    report = integration.patch(model, linear=option)
    assert len(linears(report)) == 2 * 7, str(report)
    assert set(linears(report).values()) == {f"Fp8Linear ({recipe}): emulated"}
    assert kept(report) == {"lm_head": "linear: it is outside of the blocks"}
    assert "glu" in report.replaced["model.layers.0.mlp"]
    for found in linears(report):
        module = model.get_submodule(found)
        assert isinstance(module, fuselage.modules.Fp8Linear) and module.weight.dtype == E4M3
    with torch.no_grad():
        ids = tokens()
        ours, theirs = logits(model, ids), logits(plain, ids)
    assert 0 < error(ours, theirs) < 0.15
    other = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(logits(other, ids), ours)
    again = integration.patch(model, linear=option)
    assert not linears(again)
    for patched in (model, other):
        assert integration.unpatch(patched) == len(report.replaced)
        assert integration.unpatch(patched) == 0
        found = patched.state_dict()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in state.items())
        with torch.no_grad():
            assert torch.equal(logits(patched, ids), theirs)
    assert {n: id(m) for n, m in model.named_modules()} == before


class Calls(TorchDispatchMode):
    """Counts the operators that quantise: of `quantized`, without or with a product."""

    def __init__(self):
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().rpartition("::")[2]
        if name in ("quant_fp8", "fp8_linear"):
            self.counts["quantized"] += 1
        elif "quant" in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("option", ["fp8", "fp8_blockwise"])
@pytest.mark.parametrize(
    ("name", "each_layer"),
    [
        ("Llama", {"quantized": 3, "swiglu_quant": 1}),
        ("Phi3", {"quantized": 3, "silu_and_mul_quant": 1}),
        ("Gemma3", {"quantized": 4}),
    ],
)
def test_what_is_quantised_once(integration, fuselage, monkeypatch, name, each_layer, option):
    """Query, key and value share it, gate and up do, and the gate hands its result over; with the
    bits of each linear for itself.
    """
    model = build(name)
    integration.patch(model, linear=option)
    with torch.no_grad():
        ids = tokens()
        with Calls() as calls:
            ours = logits(model, ids)
        assert calls.counts == {n: 2 * count for n, count in each_layer.items()}
        linear = type(model.model.layers[0].mlp.down_proj)
        monkeypatch.setattr(linear, "multiply", fuselage.modules.Fp8Linear.multiply)
        gates = sys.modules[linear.__module__.replace("_linears", "_gates")]
        monkeypatch.setattr(gates, "takes_quantized", lambda *_: False)
        with Calls() as calls:
            assert torch.equal(logits(model, ids), ours)
        # Phi3 has one linear for query, key and value, and one for gate and up.
        assert calls.counts == {"quantized": 2 * (4 if name == "Phi3" else 7)}


@pytest.mark.parametrize("option", ["fp8", "fp8_blockwise"])
def test_what_is_not_shared(integration, option):
    """After a write, of inference tensors, of parameters, and by linears of another kind."""
    model = Model(Block())
    integration.patch(model, linear=option)
    first, second = model.blocks[0].first, model.blocks[0].second
    x = torch.randn(5, 32)
    with torch.no_grad():
        for given in (x, nn.Parameter(x.clone())):
            with Calls() as calls:
                first(given), second(given)
            assert calls.counts["quantized"] == (1 if given is x else 2)
        x.mul_(2)
        assert torch.equal(first(x), first(x.clone()))
    with torch.inference_mode():
        y = torch.randn(5, 32)
        with Calls() as calls:
            first(y), second(y)
        assert calls.counts["quantized"] == 2
        y.mul_(2)
        assert torch.equal(first(y), first(y.clone()))


def test_a_down_projection_with_a_hook_gets_a_tensor(integration):
    model = build("Llama")
    integration.patch(model, linear="fp8")
    seen = []
    down = model.model.layers[0].mlp.down_proj
    with torch.no_grad():
        ids = tokens()
        expected = logits(model, ids)
        down.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        assert torch.equal(logits(model, ids), expected)
    assert len(seen) == 1 and isinstance(seen[0], torch.Tensor)


def test_gradients_pass_a_gate(integration):
    """Adapters before a float8 linear are trained: nothing is handed over there."""
    model = build("Llama")
    integration.patch(model, linear="fp8")
    embedding = model.model.embed_tokens.weight
    embedding.requires_grad_(True)
    with Calls() as calls:
        logits(model, tokens()).sum().backward()
    assert embedding.grad.abs().sum() > 0 and "swiglu_quant" not in calls.counts


def test_a_bias_after_a_gate_is_trained(integration):
    """A product of what is quantised already has no gradients."""
    model = build("Llama", mlp_bias=True)
    integration.patch(model, linear="fp8")
    bias = model.model.layers[0].mlp.down_proj.bias
    model.requires_grad_(False)
    bias.requires_grad_(True)
    logits(model, tokens()).sum().backward()
    assert bias.grad.abs().sum() > 0


def test_without_the_option_linears_stay(integration):
    model = build("Llama")
    report = integration.patch(model)
    assert not linears(report) and not kept(report)
    with pytest.raises(RuntimeError, match="patch: `linear` must be None or one of fp8, fp8_block"):
        integration.patch(model, linear="int4")


def test_names_to_keep(integration):
    model = build("Llama")
    keep = ("model.layers.0", "*.down_proj", "model.layers.*.self_attn.q_proj")
    report = integration.patch(model, linear="fp8", keep=keep)
    names = {name.rpartition(".")[2] for name in linears(report)}
    assert names == {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    assert all(name.startswith("model.layers.1.") for name in linears(report))
    assert list(kept(report).values()).count("linear: it is in `keep`") == 7 + 2
    integration.unpatch(model)
    report = integration.patch(model, linear="fp8", keep="*.mlp")
    assert len(linears(report)) == 2 * 4


def test_routers_stay(integration):
    model = build("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    report = integration.patch(model, linear="fp8")
    assert linears(report) and not any(name.endswith(".gate") for name in linears(report))


class Block(nn.Module):
    def __init__(self, make=lambda: nn.Linear(32, 32)):
        super().__init__()
        self.first, self.norm, self.second = make(), nn.LayerNorm(32), make()

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(32, 32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reads(Block):
    def forward(self, x):
        return self.second(self.norm(self.first(x).to(self.second.weight.dtype)))


class Own(nn.Linear):
    pass


def test_what_stays_and_why(integration):
    hooked, own, small = Block(), Block(lambda: Own(32, 32)), Block()
    hooked.first.register_forward_hook(lambda *_: None)
    own.second = nn.Linear(32, 32)
    small.first = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32))
    model = Model(hooked, own, small, Reads())
    model.blocks[3].first.forward = lambda x: x
    report = integration.patch(model, linear="fp8")
    assert kept(report) == {
        "blocks.0.first": "linear: it has hooks",
        "blocks.1.first": "linear: it is a Own",
        "blocks.2.first.0": "linear: its sizes are no multiples of 16",
        "blocks.2.first.1": "linear: its sizes are no multiples of 16",
        "blocks.3.first": kept(report)["blocks.3.first"],
        "blocks.3.second": "linear: Reads reads its weight",
        "head": "linear: it is outside of the blocks",
    }
    assert "its forward was replaced already" in kept(report)["blocks.3.first"]
    assert set(linears(report)) == {"blocks.0.second", "blocks.1.second", "blocks.2.second"}


def test_a_linear_that_several_blocks_share(integration, fuselage):
    shared = nn.Linear(32, 32)
    model = Model(Block(), Block())
    model.blocks[0].second = model.blocks[1].second = shared
    integration.patch(model, linear="fp8")
    assert isinstance(model.blocks[0].second, fuselage.modules.Fp8Linear)
    assert model.blocks[0].second is model.blocks[1].second
    integration.unpatch(model)
    assert model.blocks[0].second is shared and model.blocks[1].second is shared


def test_models_that_are_quantised_already(integration):
    model = build("Llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    report = integration.patch(model, linear="fp8")
    assert not linears(report)
    assert kept(report) == {"": "linears: the model is quantised already (fp8)"}
    assert "left alone" in str(report)
    del model.config.quantization_config

    class FP8Linear(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj = FP8Linear(64, 128)
    report = integration.patch(model, linear="fp8")
    assert not linears(report) and kept(report) == {"": "linears: the model has FP8Linear already"}


def test_it_follows_the_model(integration):
    """A cast of the patched model is one of the plain model when it is undone."""
    model = Model(Block(), Block())
    weight = model.blocks[0].first.weight.detach().clone()
    integration.patch(model, linear="fp8")
    model.to(torch.bfloat16).eval()
    assert model.blocks[0].first.weight.dtype == E4M3
    assert model(torch.randn(3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    integration.unpatch(model)
    assert torch.equal(model.blocks[0].first.weight, weight.to(torch.bfloat16))
    assert not model.blocks[0].first.training


def test_a_pickle_is_of_the_plain_model(integration):
    model = nn.Sequential(nn.ModuleList([nn.Linear(32, 48), nn.Linear(48, 16)]))
    weight = model[0][1].weight.detach().clone()
    assert len(linears(integration.patch(model, linear="fp8"))) == 2
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert type(other[0][0]) is nn.Linear and torch.equal(other[0][1].weight, weight)
    assert isinstance(copy.copy(model[0][0]), nn.Module)


@pytest.mark.slow
def test_compiled(integration):
    model = build("Llama")
    integration.patch(model, linear="fp8")
    ids = tokens()
    torch._dynamo.reset()
    with torch.no_grad():
        expected = logits(model, ids)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = compiled(input_ids=ids).logits
    assert error(found, expected) < 1e-4


@pytest.mark.parametrize("name", ["ltx", "flux"])
def test_diffusers(fuselage, name):
    pytest.importorskip("diffusers")
    from integrations import test_diffusers

    integration = fuselage.integrations.diffusers
    model, inputs = getattr(test_diffusers, name)()
    model.eval()
    with torch.no_grad():
        expected = model(**inputs)[0]
        state = {n: t.clone() for n, t in model.state_dict().items()}
        report = integration.patch(model, linear="fp8", keep=("*.ff.net.2",))
        assert len(linears(report)) > 8, str(report)
        assert not any("norm" in n or "embed" in n or n == "proj_out" for n in linears(report))
        assert error(model(**inputs)[0], expected) < 0.2
        assert integration.unpatch(model) == len(report.replaced)
        found = model.state_dict()
        assert all(torch.equal(found[n], t) for n, t in state.items()) and len(found) == len(state)
        assert torch.equal(model(**inputs)[0], expected)


def patched_ltx(fuselage, option="fp8"):
    """A model, what goes into it, and its feed-forwards."""
    pytest.importorskip("diffusers")
    from integrations import test_diffusers

    model, inputs = test_diffusers.ltx()
    report = fuselage.integrations.diffusers.patch(model.eval(), linear=option)
    handing = [n for n, what in report.replaced.items() if what == "gelu_tanh_quant"]
    assert handing == [f"transformer_blocks.{i}.ff" for i in range(2)], str(report)
    return model, inputs, [model.get_submodule(name) for name in handing]


def counted(model, inputs) -> tuple[torch.Tensor, int]:
    """What it computes, and how many activations hand their result over."""
    with torch.no_grad(), Calls() as calls:
        found = model(**inputs)[0]
    return found, calls.counts["gelu_tanh_quant"]


@pytest.mark.parametrize("option", ["fp8", "fp8_blockwise"])
def test_a_feed_forward_hands_its_activation_over(fuselage, monkeypatch, option):
    """With the bits of one that does not."""
    model, inputs, ffs = patched_ltx(fuselage, option)
    found, count = counted(model, inputs)
    assert count == 2
    forward = type(ffs[0]).forward
    for ff in ffs:
        monkeypatch.setattr(ff, "forward", forward.__get__(ff))
    expected, count = counted(model, inputs)
    assert count == 0 and torch.equal(found, expected)


@pytest.mark.parametrize("child", [0, 1, 2])
def test_a_feed_forward_whose_layers_have_hooks_calls_them(fuselage, child):
    model, inputs, ffs = patched_ltx(fuselage)
    expected, _ = counted(model, inputs)
    seen = []
    ffs[1].net[child].register_forward_hook(lambda module, given, made: seen.append(given[0]))
    found, count = counted(model, inputs)
    assert count == 1 and torch.equal(found, expected)
    assert len(seen) == 1 and isinstance(seen[0], torch.Tensor)


def test_a_feed_forward_that_drops_out_or_is_trained_hands_nothing_over(fuselage):
    model, inputs, ffs = patched_ltx(fuselage)
    ffs[0].net[1].p = 0.5
    assert counted(model, inputs)[1] == 2
    assert counted(model.train(), inputs)[1] == 1
    x = torch.randn(2, 3, 64, requires_grad=True)
    with Calls() as calls:
        ffs[1](x).sum().backward()
    assert "gelu_tanh_quant" not in calls.counts and x.grad.abs().sum() > 0


def test_a_feed_forward_under_autocast(fuselage):
    """Its projection gives another type than it was given."""
    _, _, ffs = patched_ltx(fuselage)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        expected = ffs[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            assert error(ffs[0](x).float(), expected) < 0.05


def test_a_feed_forward_that_does_more_is_left_alone(fuselage):
    pytest.importorskip("diffusers")
    from diffusers.models.attention import FeedForward

    class Doubled(FeedForward):
        def forward(self, x):
            return 2 * super().forward(x)

    model = Model(Doubled(64, activation_fn="gelu-approximate"), FeedForward(64))
    report = fuselage.integrations.diffusers.patch(model, linear="fp8")
    why = "its forward does more than to call its layers in turn"
    assert report.left_alone["blocks.0"] == why and "blocks.1" not in report.replaced
    assert len(linears(report)) == 4


@pytest.mark.slow
def test_a_compiled_feed_forward_hands_over(fuselage):
    model, inputs, _ = patched_ltx(fuselage)
    expected, _ = counted(model, inputs)
    torch._dynamo.reset()
    names = []

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        found = torch.compile(model, backend=backend)(**inputs)[0]
    assert sum("gelu_tanh_quant" in name for name in names) == 2
    assert error(found, expected) < 1e-4


@pytest.mark.parametrize("kind", ["transformers", "diffusers"])
def test_which_compiled_models_fuse_the_quantisation(fuselage, kind):
    """Those of transformers, for which it was measured to be faster; copies and casts do, too."""
    if kind == "transformers":
        model = build("Llama")
    else:
        pytest.importorskip("diffusers")
        from integrations import test_diffusers

        model, _ = test_diffusers.flux()
    getattr(fuselage.integrations, kind).patch(model, linear="fp8")
    for each in (model, copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)):
        found = [m for m in each.modules() if isinstance(m, fuselage.modules.Fp8Linear)]
        assert found and all(m.fuses_quantization == (kind == "transformers") for m in found)
        assert not any(m.quantizes_in_graph for m in found)  # no compiler quantises for a CPU
    assert fuselage.modules.Fp8Linear.from_linear(nn.Linear(32, 16)).fuses_quantization
