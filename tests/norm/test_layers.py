"""layers.RMSNorm and layers.RMSNormZeroCentered, given to layers and models by `kernelize`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from harness import assert_close, assert_same_bits, normal
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from operators import RMS_NORM
from torch import nn

MODES = (
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
)


@use_kernel_forward_from_hub("RMSNorm")
class LlamaNorm(nn.Module):
    """As in transformers' modeling_llama.py."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


@use_kernel_forward_from_hub("RMSNormZeroCentered")
class ZeroCentredNorm(nn.Module):
    """As in transformers' modeling_qwen3_5.py."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        output = x.float()
        output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + self.eps)
        return (output * (1.0 + self.weight.float())).type_as(x)


LAYERS = {"RMSNorm": LlamaNorm, "RMSNormZeroCentered": ZeroCentredNorm}


@pytest.fixture
def kernelized(fuselage, device):
    """Kernelizes the norms of a model with this build, and checks that they got its forward.

    Norm by norm: without a fallback, `kernelize` of a model wants kernels for its other layers too.
    """
    path = Path(fuselage.__file__).parent
    mapping = {name: {device: LocalLayerRepository(path, layer_name=name)} for name in LAYERS}

    def apply(model: nn.Module, mode: Mode, replaced: int) -> nn.Module:
        model.train(Mode.TRAINING in mode)
        norms = [
            m for m in model.modules() if getattr(type(m), "kernel_layer_name", None) in LAYERS
        ]
        assert len(norms) == replaced
        with use_kernel_mapping(mapping, inherit_mapping=False):
            for norm in norms:
                kernelize(norm, mode=mode, device=device, use_fallback=False)
        for norm in norms:
            forward = norm.forward.__func__
            assert forward.__module__ == fuselage.layers.__name__
            assert forward.__qualname__ == f"{type(norm).kernel_layer_name}.forward"
        return model

    return apply


def outputs_and_gradients(module, x, grad_out) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = module(leaf)
    module.zero_grad()
    out.backward(grad_out)
    return [out.detach(), leaf.grad, module.weight.grad.clone()]


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_layer(fuselage, device, kernelized, name, mode):
    for dtype, weight_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        plain = LAYERS[name](96, eps=1e-5).to(device, weight_dtype)
        torch.nn.init.normal_(plain.weight, mean=0.0 if name.endswith("Centered") else 1.0)
        module = kernelized(copy.deepcopy(plain), mode, replaced=1)
        if Mode.TORCH_COMPILE in mode:
            torch._dynamo.reset()
            module_forward = torch.compile(module, fullgraph=True, dynamic=True)
        else:
            module_forward = module
        x = normal((4, 5, 96), dtype, device)
        expected = plain(x)
        actual = module_forward(x)
        # Some are rounded the other way, none is more than two roundings off.
        inner = dtype if name == "RMSNorm" else None
        options = {"eps": 1e-5, "cast_before_weight": inner is not None}
        options["weight_offset"] = 0.0 if name == "RMSNorm" else 1.0
        reference = RMS_NORM.run_reference({"x": x, "weight": plain.weight.detach()}, options)[
            "out"
        ]
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert_close(actual.detach(), reference, "out", inner_rounding=inner)
        if Mode.TRAINING in mode:
            grad_out = normal(expected.shape, expected.dtype, device)
            ours, theirs = (outputs_and_gradients(m, x, grad_out) for m in (module, plain))
            for index, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
                assert actual.dtype == expected.dtype
                error = (actual.double() - expected.double()).abs().max() / expected.abs().max()
                assert error <= 4 * torch.finfo(dtype).eps, index


def test_layers_are_what_the_hub_accepts(fuselage):
    for name in LAYERS:
        layer = getattr(fuselage.layers, name)
        assert layer.has_backward and layer.can_torch_compile
        assert layer.__init__ is nn.Module.__init__
        members = {member for member in vars(layer) if not member.startswith("__")}
        assert members <= {"forward", "has_backward", "can_torch_compile"}


# Models


def llama(device: str, **config) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    defaults = {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**defaults | config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)  # weights of one would hide mistakes
    return model.to(device).eval()


LLAMA_NORMS = 3 * 2 + 1


@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE], ids=str)
def test_llama_generates_the_same_tokens(fuselage, device, kernelized, mode):
    plain = llama(device)
    model = kernelized(copy.deepcopy(plain), mode, LLAMA_NORMS)
    prompt = torch.randint(0, 512, (2, 7), device=device)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


@pytest.mark.long
def test_llama_does_not_drift(fuselage, device, kernelized):
    """bfloat16 logits are as close to the float32 model's with our norms as with PyTorch's."""
    ratios = []
    for seed in range(8):
        torch.manual_seed(seed)
        exact = llama(device)
        half = copy.deepcopy(exact).to(torch.bfloat16)
        # The same rounded parameters, so that only the arithmetic differs.
        exact.load_state_dict(half.state_dict())
        ours = kernelized(copy.deepcopy(half), Mode.INFERENCE, LLAMA_NORMS)
        tokens = torch.randint(0, 512, (4, 64), device=device)
        with torch.no_grad():
            expected = exact(tokens).logits.double()
            plain_error, our_error = (
                (m(tokens).logits.double() - expected).pow(2).mean().sqrt() for m in (half, ours)
            )
        ratios.append((our_error / plain_error).item())
    # Measured on a CPU: 1.0000 but for one 1.00003. Few roundings of the norm differ at all.
    assert sum(ratios) / len(ratios) <= 1.01, ratios
    assert max(ratios) <= 1.05, ratios


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE], ids=str)
def test_llama_trains_the_same(fuselage, device, kernelized, mode):
    plain = llama(device)
    model = kernelized(copy.deepcopy(plain), mode, LLAMA_NORMS)
    tokens = torch.randint(0, 512, (2, 16), device=device)
    forward = model
    if Mode.TORCH_COMPILE in mode:
        torch._dynamo.reset()
        forward = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    plain(input_ids=tokens, labels=tokens).loss.backward()
    forward(input_ids=tokens, labels=tokens).loss.backward()
    for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
        difference = (actual.grad - expected.grad).abs().max()
        # float32 noise of both models: gradients of 1e-4 of the largest entry
        assert difference <= 1e-4 * expected.grad.abs().max(), name


def test_qwen_with_zero_centred_norms(fuselage, device, kernelized):
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    module = qwen.Qwen3_5RMSNorm(96).to(device, torch.bfloat16)
    torch.nn.init.normal_(module.weight)
    x = normal((3, 96), torch.bfloat16, device)
    expected = module(x)
    actual = kernelized(copy.deepcopy(module), Mode.INFERENCE, 1)(x)
    assert_close(actual.detach(), expected.detach().double(), "out", terms=4000 * expected.abs())
    assert (actual != expected).float().mean() < 0.01


def test_a_kernelized_model_leaves_the_original_alone(fuselage, device, kernelized):
    plain = LlamaNorm(64).to(device)
    x = normal((3, 64), torch.float32, device)
    before = plain(x)
    kernelized(copy.deepcopy(plain), Mode.INFERENCE, replaced=1)
    assert_same_bits(plain(x).detach(), before.detach(), "out")
