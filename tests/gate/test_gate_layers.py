"""The Hub layers of activations and MLPs, given to layers and models by `kernelize`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from harness import assert_close, normal
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from reference import add_terms
from torch import nn

transformers = pytest.importorskip("transformers")

MODES = (
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
)
# layer: (the name in ACT2FN of what it stands in for, our function)
ACTIVATIONS = {
    "SiLU": ("silu", "silu"),
    "GeLU": ("gelu", "gelu"),
    "GeluTanh": ("gelu_pytorch_tanh", "gelu_tanh"),
    "FastGELU": ("gelu_fast", "gelu_tanh"),
    "QuickGELU": ("quick_gelu", "gelu_quick"),
    "NewGELU": ("gelu_new", "gelu_tanh"),
}
LAYERS = (*ACTIVATIONS, "SwiGLUMLP", "GeGLUMLP")


class MLP(nn.Module):
    """As in transformers' modeling_llama.py and modeling_gemma.py."""

    def __init__(self, act: str, dim: int = 64, intermediate: int = 176):
        super().__init__()
        self.gate_proj = nn.Linear(dim, intermediate, bias=False)
        self.up_proj = nn.Linear(dim, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, dim, bias=False)
        self.act_fn = transformers.activations.ACT2FN[act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@use_kernel_forward_from_hub("SwiGLUMLP")
class LlamaMLP(MLP):
    def __init__(self):
        super().__init__("silu")


@use_kernel_forward_from_hub("GeGLUMLP")
class GemmaMLP(MLP):
    def __init__(self):
        super().__init__("gelu_pytorch_tanh")


MLPS = {"SwiGLUMLP": LlamaMLP, "GeGLUMLP": GemmaMLP}


@pytest.fixture
def kernelized(fuselage, device):
    """Kernelizes every layer of a model that has one of these names, one by one."""
    path = Path(fuselage.__file__).parent
    mapping = {name: {device: LocalLayerRepository(path, layer_name=name)} for name in LAYERS}

    def apply(model: nn.Module, mode: Mode, replaced: int) -> nn.Module:
        model.train(Mode.TRAINING in mode)
        found = [
            m for m in model.modules() if getattr(type(m), "kernel_layer_name", None) in LAYERS
        ]
        assert len(found) == replaced
        with use_kernel_mapping(mapping, inherit_mapping=False):
            for module in found:
                kernelize(module, mode=mode, device=device, use_fallback=False)
        for module in found:
            forward = module.forward.__func__
            assert forward.__module__ == fuselage.layers.__name__
            assert forward.__qualname__ == f"{type(module).kernel_layer_name}.forward"
        return model

    return apply


def compiled_if(mode: Mode, module: nn.Module):
    if Mode.TORCH_COMPILE not in mode:
        return module
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_activation(fuselage, device, kernelized, name, mode):
    act, function = ACTIVATIONS[name]
    plain = transformers.activations.ACT2FN[act]
    module = kernelized(copy.deepcopy(plain), mode, replaced=1)
    for dtype in (torch.float32, torch.bfloat16):
        x = normal((4, 5, 96), dtype, device)
        terms = add_terms(x.double(), activation=function)["out"]
        leaf = x.clone().requires_grad_(Mode.TRAINING in mode)
        actual = compiled_if(mode, module)(leaf)
        assert_close(actual.detach(), plain(x.double()), name, terms=terms)
        if Mode.TRAINING in mode:
            actual.sum().backward()
            exact = x.double().requires_grad_()
            plain(exact).sum().backward()
            terms = add_terms(x.double(), activation=function, grad_out=torch.ones_like(exact))["x"]
            assert_close(leaf.grad, exact.grad, f"gradient of {name}", terms=terms)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_mlp(fuselage, device, kernelized, name, mode):
    plain = MLPS[name]().to(device)
    module = kernelized(copy.deepcopy(plain), mode, replaced=2)  # the MLP and the activation in it
    x = normal((4, 5, 64), torch.float32, device)
    results = []
    for each in (compiled_if(mode, module), plain):
        leaf = x.clone().requires_grad_(Mode.TRAINING in mode)
        out = each(leaf)
        results.append([out.detach()])
        if Mode.TRAINING in mode:
            out.sum().backward()
            results[-1] += [leaf.grad, each.gate_proj.weight.grad, each.up_proj.weight.grad]
    for actual, expected in zip(*results, strict=True):
        error = (actual - expected).abs().max() / expected.abs().max()
        assert error <= 1e-5  # two chains of float32 matrix products


def test_layers_are_what_the_hub_accepts(fuselage):
    for name in LAYERS:
        layer = getattr(fuselage.layers, name)
        assert layer.has_backward and layer.can_torch_compile
        assert layer.__init__ is nn.Module.__init__
        members = {member for member in vars(layer) if not member.startswith("__")}
        assert members <= {"forward", "has_backward", "can_torch_compile"}


# Models


def llama(device: str) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return transformers.LlamaForCausalLM(config).to(device).eval()


def gpt2(device: str) -> nn.Module:
    """Whose MLP has NewGELU."""
    config = transformers.GPT2Config(
        vocab_size=512, n_embd=96, n_layer=3, n_head=4, n_positions=128
    )
    return transformers.GPT2LMHeadModel(config).to(device).eval()


MODELS = pytest.mark.parametrize("build", [llama, gpt2], ids=lambda build: build.__name__)


@MODELS
@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE], ids=str)
def test_a_model_generates_the_same_tokens(fuselage, device, kernelized, build, mode):
    plain = build(device)
    model = kernelized(copy.deepcopy(plain), mode, replaced=3)
    prompt = torch.randint(0, 512, (2, 7), device=device)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


@pytest.mark.long
@MODELS
def test_a_model_does_not_drift(fuselage, device, kernelized, build):
    """bfloat16 logits are as close to the float32 model's with our layers as with PyTorch's."""
    ratios = []
    for seed in range(8):
        torch.manual_seed(seed)
        exact = build(device)
        half = copy.deepcopy(exact).to(torch.bfloat16)
        # The same rounded parameters, so that only the arithmetic differs.
        exact.load_state_dict(half.state_dict())
        ours = kernelized(copy.deepcopy(half), Mode.INFERENCE, replaced=3)
        tokens = torch.randint(0, 512, (4, 64), device=device)
        with torch.no_grad():
            expected = exact(tokens).logits.double()
            plain_error, our_error = (
                (m(tokens).logits.double() - expected).pow(2).mean().sqrt() for m in (half, ours)
            )
        ratios.append((our_error / plain_error).item())
    assert sum(ratios) / len(ratios) <= 1.01, ratios
    assert max(ratios) <= 1.05, ratios


@MODELS
@pytest.mark.parametrize(
    "mode",
    [Mode.TRAINING, pytest.param(Mode.TRAINING | Mode.TORCH_COMPILE, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_model_trains_the_same(fuselage, device, kernelized, build, mode):
    plain = build(device)
    model = kernelized(copy.deepcopy(plain), mode, replaced=3).eval()  # without dropout
    tokens = torch.randint(0, 512, (2, 16), device=device)
    forward = compiled_if(mode, model)
    for each in (plain, forward):
        logits = each(input_ids=tokens).logits
        nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
    for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
        difference = (actual.grad - expected.grad).abs().max()
        # float32 noise of both models: gradients of 1e-4 of the largest entry
        assert difference <= 1e-4 * expected.grad.abs().max(), name
