"""layers.RotaryPosEmb, given to transformers' function by `kernelize`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from kernels import KernelizeFallback, LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from rotary_cases import Case
from torch import nn

MODES = (
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
)


@pytest.fixture
def kernelized(fuselage, device):
    """Kernelizes the rotary embedding of a model with this build.

    NOTE: the function belongs to the module of the model, not to the model: it is given back.
    """
    repository = LocalLayerRepository(Path(fuselage.__file__).parent, layer_name="RotaryPosEmb")
    models = []

    def apply(model: nn.Module, mode: Mode, mapping=None) -> nn.Module:
        mapping = {"rotary_pos_emb": {device: repository}} if mapping is None else mapping
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model, mode=mode, device=device, use_fallback=KernelizeFallback.NO_LAYER)
        models.append(model)
        return model

    yield apply
    for model in models[:]:
        apply(model, Mode.INFERENCE, mapping={})


def small_model(name: str, device: str, **config) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        **config,
    }
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(device)


def rotary_function(model: nn.Module) -> nn.Module:
    (function,) = {
        function
        for module in model.modules()
        for function in getattr(module, "_kernel_funcs", {}).values()
    }
    return function


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_llama(fuselage, device, kernelized, mode):
    """Logits, loss and gradients are those of the plain model."""
    model = small_model("Llama", device).train(Mode.TRAINING in mode)
    tokens = torch.randint(0, 128, (2, 16), device=device)

    def run(forward):
        result = forward(input_ids=tokens, labels=tokens)
        model.zero_grad()
        if Mode.TRAINING in mode:
            result.loss.backward()
        grads = [copy.deepcopy(p.grad) for p in model.parameters()]
        return result.logits.detach(), result.loss.detach(), grads

    expected = run(model)
    kernelized(model, mode)
    forward = rotary_function(model).forward
    assert forward.__func__ is fuselage.layers.RotaryPosEmb.forward
    compiles = Mode.TORCH_COMPILE in mode
    torch._dynamo.reset()
    actual = run(torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model)
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(actual[2], expected[2], strict=True):
        if theirs is not None:
            assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Phi", {"partial_rotary_factor": 0.5}),
        ("Qwen3", {"head_dim": 32}),
        ("Olmo2", {}),
    ],
)
def test_other_models(fuselage, device, kernelized, name, config):
    model = small_model(name, device, **config).eval()
    tokens = torch.randint(0, 128, (2, 16), device=device)
    with torch.no_grad():
        expected = model(tokens).logits
        kernelized(model, Mode.INFERENCE)
        assert rotary_function(model).forward.__func__ is fuselage.layers.RotaryPosEmb.forward
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_llama_generates_the_same_tokens(fuselage, device, kernelized):
    model = small_model("Llama", device).eval()
    prompt = torch.randint(0, 128, (2, 7), device=device)
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(prompt, **options)
    assert torch.equal(kernelized(model, Mode.INFERENCE).generate(prompt, **options), expected)


def test_the_layer(fuselage, device):
    layer = fuselage.layers.RotaryPosEmb
    assert layer.has_backward and layer.can_torch_compile
    assert layer.__init__ is nn.Module.__init__
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    functions = {False: llama.apply_rotary_pos_emb, True: gpt_oss.apply_rotary_pos_emb}
    for half, function in functions.items():
        for heads_dim in (1, 2):
            case = Case(heads_dim=heads_dim, half=half, table_batch=2)
            op, inputs = case.make("apply_rotary", torch.float32, device)
            arguments = (inputs["q"], inputs["k"], op.defaults["cos"], op.defaults["sin"])
            expected = function(*arguments, unsqueeze_dim=heads_dim)
            for ours, theirs in zip(layer()(*arguments, heads_dim), expected, strict=True):
                torch.testing.assert_close(ours, theirs)
    op, inputs = Case(heads_dim=1).make("apply_rotary", torch.float32, device)
    arguments = (inputs["q"], inputs["k"], op.defaults["cos"], op.defaults["sin"])
    expected = functions[False](*arguments, unsqueeze_dim=0)
    for ours, theirs in zip(layer()(*arguments, 0), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    halves = [t.half() for t in arguments[2:]]
    for ours in layer()(*arguments[:2], *halves, 1):
        assert ours.dtype == torch.float32
