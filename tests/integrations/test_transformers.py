"""integrations.transformers: the mapping for `kernelize`, and `patch`, on whole models."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO_DIR
from integrations.models import (
    assert_close,
    assert_no_farther,
    build,
    compiled_and_counted,
    counted_ops,
    half_of,
    logits,
    randomise,
    tokens,
)
from kernels import KernelizeFallback, LayerRepository, Mode, kernelize, use_kernel_mapping
from torch import nn

transformers = pytest.importorskip("transformers")
needs_kernelize = pytest.mark.skipif(
    not transformers.utils.is_kernels_available(),
    reason="this transformers asks for another version of `kernels`, and marks no layers without",
)
F = nn.functional

# The norm of each model, what its gated part is replaced by, and how often.
LLAMA = "rms_norm (weight, rounded before the weight)"
GEMMA = "rms_norm (1 + weight, rounded once)"
ONCE = "rms_norm (weight, rounded once)"
# A layer calls the norm that it has with the residual: it adds no call of an operator.
LAYERS = {"fused_add_rms_norm": 2}
POST_NORMED = {"rms_norm_add_rms_norm": 2}  # and this one call less
MODELS = {
    "Llama": {LLAMA: 5, "swiglu": 2, "apply_rotary": 2, **LAYERS},
    "Qwen3": {LLAMA: 9, "swiglu": 2, "qk_norm_rotary": 2, **LAYERS},
    "Mistral": {LLAMA: 5, "swiglu": 2, "apply_rotary": 2, **LAYERS},
    "Phi": {"layer_norm": 3, "gelu_tanh": 2, "apply_rotary": 2},
    "Phi3": {LLAMA: 5, "silu_and_mul": 2, "apply_rotary": 2, **LAYERS},
    "Gemma": {GEMMA: 5, "geglu (gelu_tanh)": 2, "apply_rotary": 2, **LAYERS},
    "Gemma3": {GEMMA: 13, "geglu (gelu_tanh)": 2, "qk_norm_rotary": 2, **POST_NORMED},
    "GptOss": {ONCE: 5, "swiglu_clamped": 2, "apply_rotary": 2, **LAYERS},
}
# The plain model cannot be trained compiled: gradients of experts have sizes that depend on data.
NOT_TRAINED_COMPILED = {"GptOss"}

each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


def values_of(report) -> dict[str, int]:
    values = list(report.replaced.values())
    return {what: values.count(what) for what in values}


def calls_of(name: str) -> int:
    """The fewest calls of our operators in one forward."""
    given = MODELS[name]
    calls = sum(n for what, n in given.items() if what not in {**LAYERS, **POST_NORMED})
    calls -= given.get("rms_norm_add_rms_norm", 0)
    return calls - 2 * MODELS[name].get("qk_norm_rotary", 0)  # which calls neither of its norms


def norms_in(counts) -> int:
    fused = counts["fused_add_rms_norm"] + counts["rms_norm_add_rms_norm"]
    return counts["rms_norm"] + fused


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# patch: values


@each_model
def test_the_report_names_what_is_replaced(integration, device, name):
    report = integration.patch(build(name, device))
    found = {k: v for k, v in values_of(report).items() if k in MODELS[name]}
    assert found == MODELS[name], str(report)
    assert "replaced" in str(report) and all(what in str(report) for what in MODELS[name])


@each_model
def test_logits_loss_and_gradients(integration, fuselage, device, name):
    plain = build(name, device)
    model = copy.deepcopy(plain)
    report = integration.patch(model)
    ids = tokens(device=device)
    with counted_ops(fuselage) as counts:
        actual = loss(model, ids)
    assert sum(counts.values()) >= calls_of(name), (counts, str(report))
    for what in ("apply_rotary", "qk_norm_rotary", "fused_add_rms_norm"):
        assert counts[what] == MODELS[name].get(what, 0)
    expected = loss(plain, ids)
    assert_close(logits(model, ids).detach(), logits(plain, ids).detach(), "logits")
    assert_close(actual.detach(), expected.detach(), "loss")
    actual.backward()
    expected.backward()
    for (key, theirs), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is None or (name == "Phi" and key.endswith("k_proj.bias")):
            continue  # the bias of a key moves every score of a query alike: its gradient is noise
        assert_close(parameter.grad, theirs.grad, key, tol=1e-4)


@each_model
def test_half_precision_does_not_drift(integration, device, name):
    @functools.lru_cache(maxsize=1)
    def results(seed: int):
        torch.manual_seed(seed)
        exact = build(name, device)
        plain = half_of(exact)
        ours = copy.deepcopy(plain)
        integration.patch(ours)
        ids = tokens(4, 32, device)
        with torch.no_grad():
            return [logits(model, ids) for model in (ours, plain, exact)]

    assert_no_farther(*(lambda seed, i=i: results(seed)[i] for i in range(3)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_training_follows_the_plain_curve(integration, device, name):
    curves = []
    plain = build(name, device)
    ids = tokens(4, 24, device)
    for patched in (False, True):
        model = copy.deepcopy(plain).train()
        if patched:
            integration.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        curve = []
        for _ in range(25):
            optimizer.zero_grad()
            value = loss(model, ids)
            value.backward()
            optimizer.step()
            curve.append(value.item())
        curves.append(curve)
    assert curves[0][-1] < 0.5 * curves[0][0]  # it learns
    for theirs, ours in zip(*curves, strict=True):
        assert abs(ours - theirs) <= 2e-3 * theirs, curves


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_TRAINED_COMPILED])
def test_compiled_whole(integration, fuselage, device, name):
    plain = build(name, device)
    model = copy.deepcopy(plain)
    integration.patch(model)
    ids = tokens(device=device)
    compiled, counts = compiled_and_counted(model, fuselage)
    actual = loss(compiled, ids)
    assert sum(counts.values()) >= calls_of(name), counts
    expected = loss(plain, ids)
    assert_close(actual.detach(), expected.detach(), "loss")
    actual.backward()
    expected.backward()
    for (key, theirs), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_close(parameter.grad, theirs.grad, key, tol=1e-4)


@pytest.mark.slow
@each_model
def test_compiled_inference_is_left_to_the_compiler(integration, fuselage, device, name):
    plain = build(name, device)
    model = copy.deepcopy(plain)
    integration.patch(model)
    ids = tokens(device=device)
    compiled, counts = compiled_and_counted(model, fuselage)
    with torch.no_grad():
        assert_close(logits(compiled, ids), logits(plain, ids))
    assert counts.keys() <= {"topk_softmax"}  # several times as fast as the compiler's


def test_generation_gives_the_same_tokens(integration, device):
    plain = build("Qwen3", device)
    model = copy.deepcopy(plain)
    integration.patch(model)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    prompt = tokens(2, 7, device)
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


# patch: what it does to a model


def test_unpatch_restores_exactly(integration, fuselage, device):
    model = build("Gemma3", device)
    before = [dict(vars(module)) for module in model.modules()]
    keys = list(model.state_dict())
    ids = tokens(device=device)
    with torch.no_grad():
        expected = logits(model, ids)
        report = integration.patch(model)
        assert list(model.state_dict()) == keys
        assert integration.unpatch(model) == len(report.replaced)
        with counted_ops(fuselage) as counts:
            assert torch.equal(logits(model, ids), expected)
    assert not counts
    assert [vars(module) for module in model.modules()] == before
    assert integration.unpatch(model) == 0


def test_patching_twice_is_patching_once(integration, device):
    model = build("Llama", device)
    first = integration.patch(model)
    functions = [vars(module).get("forward") for module in model.modules()]
    second = integration.patch(model)
    assert (first.replaced, first.left_alone) == (second.replaced, second.left_alone)
    assert [vars(module).get("forward") for module in model.modules()] == functions
    assert integration.unpatch(model) == len(first.replaced)


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def _kernelized(model, integration):
    with use_kernel_mapping(integration.kernel_mapping(), inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device="cpu", use_fallback=KernelizeFallback.NO_LAYER)


@pytest.mark.parametrize("name", ["Llama", "Phi3", "Gemma3"])
@pytest.mark.parametrize(
    "change",
    ["unpatched", "wrapped", pytest.param("kernelized", marks=needs_kernelize), "listened to"],
)
def test_a_norm_may_change_after_the_patch(integration, fuselage, name, change):
    """A layer gives its norm two tensors; only the forward that patch has set takes them."""
    model = build(name)
    ids, seen = tokens(), []
    with torch.no_grad():
        expected = logits(model, ids)
    integration.patch(model)
    which = "pre_feedforward_layernorm" if name == "Gemma3" else "post_attention_layernorm"
    for layer in model.model.layers:
        norm = getattr(layer, which)
        if change == "unpatched":
            assert integration.unpatch(norm) == 1
        elif change == "wrapped":
            setattr(layer, which, Wrapped(norm))
        elif change == "listened to":
            norm.register_forward_hook(lambda module, args, out: seen.append((*args, out)))
    if change == "kernelized":
        _kernelized(model, integration)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(logits(model, ids), expected)
    if (name, change) != ("Gemma3", "kernelized"):  # its norm has no name to kernelize by
        assert not counts["fused_add_rms_norm"] and not counts["rms_norm_add_rms_norm"]
    assert len(seen) == (2 if change == "listened to" else 0)
    assert all(isinstance(x, torch.Tensor) for hook in seen for x in hook)


def test_a_deep_copy_is_patched_and_on_its_own(integration, fuselage, device):
    model = build("Llama", device)
    integration.patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # what the twin must not see
        with counted_ops(fuselage) as counts:
            result = logits(twin, tokens(device=device))
    assert counts and result.abs().max() > 0
    integration.unpatch(twin)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        logits(model, tokens(device=device))
    assert counts


def test_a_pickle_loads_as_the_plain_model(integration, fuselage):
    """Of layers that can be pickled; transformers' attention cannot be, with or without us."""
    model = nn.Sequential(nn.Linear(8, 64), nn.RMSNorm(64, eps=1e-5))
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x)
        integration.patch(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        with counted_ops(fuselage) as counts:
            assert torch.equal(loaded(x), expected)
        assert not counts
        assert integration.patch(loaded).replaced == {"1": ONCE}
        with counted_ops(fuselage) as counts:
            assert_close(loaded(x), expected)
        assert counts == {"rms_norm": 1}


class GptOssGate(nn.Module):
    alpha, limit = 1.702, 7.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def test_the_gate_of_experts_is_pickled(integration):
    experts = GptOssGate()
    assert integration.patch(experts).replaced == {"": "swiglu_clamped"}
    loaded = pickle.loads(pickle.dumps(experts))
    assert loaded._apply_gate.__func__ is GptOssGate._apply_gate


def test_a_patched_model_moves(integration, fuselage, device):
    model = build("Llama")
    integration.patch(model)
    model.to(device)
    ids = tokens(device=device)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        expected = logits(model, ids)
        half = logits(model.to(torch.bfloat16), ids)
        exact = logits(model.double(), ids)  # no operator takes it: the plain forwards run
    assert norms_in(counts) >= 10
    assert exact.dtype == torch.float64
    assert_close(half.float(), expected, tol=0.1)


def test_a_model_without_weights_can_be_patched(integration, fuselage, device):
    """From the meta device, as large models are loaded."""
    plain = build("Llama", device)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(plain.config)
        report = integration.patch(model)
    assert values_of(report)[LLAMA] == 5
    model.load_state_dict(plain.state_dict(), assign=True)
    norm, x = model.model.norm, torch.randn(3, 64, device=device)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(norm(x), plain.model.norm(x))
    assert counts["rms_norm"] == 1


def test_a_model_of_fake_tensors_can_be_patched(integration):
    """Those have no values to compare, and what was found without any must not be remembered."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(nn.RMSNorm(64, eps=1e-4), MLP(nn.SiLU()))
        report = integration.patch(model)
    assert report.replaced == {"0": ONCE, "1": "swiglu"}
    assert integration.patch(nn.RMSNorm(64, eps=1e-4)).replaced == {"": ONCE}


def test_autocast(integration, fuselage, device):
    plain = build("Llama", device)
    model = copy.deepcopy(plain)
    integration.patch(model)
    ids = tokens(device=device)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        with counted_ops(fuselage) as counts:
            actual = logits(model, ids)
        expected = logits(plain, ids)
    assert counts and actual.dtype == expected.dtype
    assert_close(actual, expected, tol=0.02)


@pytest.mark.parametrize("make", [lambda: nn.RMSNorm(64, eps=1e-5), lambda: nn.LayerNorm(64)])
def test_what_autocast_runs_in_float32_runs_as_before(integration, fuselage, device, make):
    module, x = make().to(device), torch.randn(3, 64, device=device).bfloat16()
    _same_under_autocast(integration, fuselage, device, module, x)


def test_an_activation_under_autocast(integration, fuselage, device):
    module = transformers.activations.NewGELUActivation()
    x = torch.randn(3, 64, device=device).bfloat16()
    _same_under_autocast(integration, fuselage, device, module, x)


def _same_under_autocast(integration, fuselage, device, module, x):
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        expected = module(x)
        assert integration.patch(module).replaced
        with counted_ops(fuselage) as counts:
            actual = module(x)
    assert not counts and actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_a_patched_model_on_the_meta_device(integration):
    """Autocast does not know that device, and raises when it is asked."""
    model = nn.Sequential(nn.RMSNorm(64, eps=1e-5), nn.LayerNorm(64), nn.Linear(64, 64))
    model.append(transformers.activations.NewGELUActivation())
    assert len(integration.patch(model).replaced) == 3
    assert model.to("meta")(torch.empty(2, 64, device="meta")).shape == (2, 64)


# The rotary embedding is called in more ways than patch tries.


def _rotates_as_before(integration, model, run):
    """Values and gradients of `run(model)`, patched and not."""
    plain = copy.deepcopy(model)
    report = integration.patch(model)
    assert "apply_rotary" in report.replaced.values()
    actual, expected = run(model), run(plain)
    assert_close(actual.detach(), expected.detach())
    for loss in (actual, expected):
        loss.square().mean().backward()
    for (key, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(ours.grad, theirs.grad, key, tol=1e-4)


def test_tables_without_a_batch(integration, device):
    """Pixtral unsqueezes its tables at the front."""
    config = transformers.PixtralVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    model = transformers.PixtralVisionModel(config).to(device)
    pixels = torch.randn(1, 3, 32, 32, device=device)
    sizes = torch.tensor([[32, 32]])
    _rotates_as_before(integration, model, lambda m: m(pixels, image_sizes=sizes).last_hidden_state)


def _llama_attention(call):
    """The attention of Llama, with a forward that rotates as `call` does."""
    modeling = transformers.models.llama.modeling_llama
    code = compile(call, "call", "exec")
    scope = {**vars(modeling)}
    exec(code, scope)

    class Attention(modeling.LlamaAttention):
        forward = scope["forward"]

    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    return Attention(config, 0)


ROTATED = {
    "keys of other tokens": "apply_rotary_pos_emb(q, k[:, :, :1], cos, sin)",
    "tables with a gradient": "apply_rotary_pos_emb(q, k, cos * self.scale, sin * self.scale)",
    "tables without a batch": "apply_rotary_pos_emb(q, k, cos[0], sin[0], unsqueeze_dim=0)",
    "tables of one token": "apply_rotary_pos_emb(q, k, cos[:, :1], sin[:, :1])",
    "by name": "apply_rotary_pos_emb(k=k, q=q, sin=sin, cos=cos, unsqueeze_dim=1)",
    "keys of another batch": "apply_rotary_pos_emb(q, k[:1], cos[:1], sin[:1])",
}


@pytest.mark.parametrize("how", ROTATED)
def test_a_call_of_the_rotary_embedding(integration, device, how):
    attention = _llama_attention(
        f"""
def forward(self, x, cos, sin):
    q = self.q_proj(x).view(2, 5, 4, 16).transpose(1, 2)
    k = self.k_proj(x).view(2, 5, 4, 16).transpose(1, 2)
    q, k = {ROTATED[how]}
    return (q * k.mean(2, keepdim=True).mean(0)).sum(1)
"""
    )
    attention.scale = nn.Parameter(torch.tensor(1.5))
    angles = torch.randn(2, 5, 8, device=device).repeat(1, 1, 2)
    x, cos, sin = torch.randn(2, 5, 64, device=device), angles.cos(), angles.sin()
    _rotates_as_before(integration, attention.to(device), lambda m: m(x, cos, sin))


# Norms of queries and keys before the rotary embedding

apply_rotary_pos_emb = transformers.models.llama.modeling_llama.apply_rotary_pos_emb


class NormedAttention(nn.Module):
    """As in Qwen3."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6)
        self.q_proj, self.k_proj = nn.Linear(64, 64), nn.Linear(64, 32)
        randomise(self)

    def forward(self, x, cos, sin):
        q = self.q_norm(self.q_proj(x).view(2, 5, 4, 16)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(2, 5, 2, 16)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q.sum(1), k.sum(1)


class NormedAfterTheTranspose(NormedAttention):
    """As in Gemma 3."""

    def forward(self, x, cos, sin):
        q = self.q_proj(x).view(2, 5, 4, 16).transpose(1, 2)
        k = self.k_proj(x).view(2, 5, 2, 16).transpose(1, 2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
        return q.sum(1), k.sum(1)


class QueryIsReadAgain(NormedAttention):
    def forward(self, x, cos, sin):
        q = self.q_norm(self.q_proj(x).view(2, 5, 4, 16)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(2, 5, 2, 16)).transpose(1, 2)
        more = q * 2
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q.sum(1) + more.sum(1), k.sum(1)


class KeysAreNotNormed(NormedAttention):
    def forward(self, x, cos, sin):
        q = self.q_norm(self.q_proj(x).view(2, 5, 4, 16)).transpose(1, 2)
        k = self.k_proj(x).view(2, 5, 2, 16).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q.sum(1), k.sum(1)


class NormedOverAll(NormedAttention):
    """As in OLMo 2: not each head."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(64, eps=1e-6), nn.RMSNorm(32, eps=1e-6)

    def forward(self, x, cos, sin):
        q = self.q_norm(self.q_proj(x)).view(2, 5, 4, 16).transpose(1, 2)
        k = self.k_norm(self.k_proj(x)).view(2, 5, 2, 16).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q.sum(1), k.sum(1)


def _run_attention(attention, device, dtype=torch.float32) -> list[torch.Tensor]:
    """Results, and the gradients of parameters and input."""
    torch.manual_seed(3)
    angles = torch.randn(2, 5, 8, device=device).repeat(1, 1, 2)
    x = torch.randn(2, 5, 64, device=device, dtype=dtype, requires_grad=True)
    out = attention(x, angles.cos().to(dtype), angles.sin().to(dtype))
    loss = sum((t.float() * torch.linspace(0, 1, 16, device=device)).sum() for t in out)
    grads = torch.autograd.grad(loss, [x, *attention.parameters()], allow_unused=True)
    return [t.detach() for t in (*out, *grads) if t is not None]


NORMED = {
    NormedAttention: {"qk_norm_rotary": 1},
    NormedAfterTheTranspose: {"qk_norm_rotary": 1},
    QueryIsReadAgain: {"rms_norm": 2, "apply_rotary": 1},
    KeysAreNotNormed: {"rms_norm": 1, "apply_rotary": 1},
    NormedOverAll: {"rms_norm": 2, "apply_rotary": 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", NORMED, ids=lambda kind: kind.__name__)
def test_norm_and_rotary_embedding(integration, fuselage, device, kind, dtype):
    attention = kind().to(device, dtype)
    expected = _run_attention(attention, device, dtype)
    report = integration.patch(attention)
    assert integration.patch(attention).replaced == report.replaced
    with counted_ops(fuselage) as counts:
        actual = _run_attention(attention, device, dtype)
    assert {k: v for k, v in counts.items() if "bwd" not in k} == NORMED[kind]
    tol = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours.float(), theirs.float(), tol=tol)


def _listen(attention):
    attention.q_norm.register_forward_hook(lambda *args: None)


def _another_eps(attention):
    attention.k_norm.eps = 1e-3


def _another_dtype(attention):
    attention.q_norm.double()
    attention.q_norm.forward = lambda x: nn.functional.rms_norm(
        x, (16,), attention.q_norm.weight.to(x.dtype), 1e-6
    )


@pytest.mark.parametrize("change", [_listen, _another_eps, _another_dtype])
def test_norms_may_change_after_the_patch(integration, fuselage, device, change):
    attention = NormedAttention().to(device)
    plain = copy.deepcopy(attention)
    integration.patch(attention)
    change(plain)
    change(attention)
    with counted_ops(fuselage) as counts:
        actual = _run_attention(attention, device)
    for ours, theirs in zip(actual, _run_attention(plain, device), strict=True):
        assert_close(ours, theirs, tol=1e-5)
    assert counts["apply_rotary"] == 1 and not counts["qk_norm_rotary"]


# Layers that are only nearly those of Llama


def _mllama_layer():
    from transformers.models.mllama import modeling_mllama as modeling

    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
    config = modeling.MllamaTextConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, cross_attention_layers=[]
    )
    config._attn_implementation = "eager"
    return modeling.MllamaSelfAttentionDecoderLayer(config, 0)


def test_a_layer_keeps_from_its_attention_what_the_plain_one_keeps(integration, fuselage, device):
    """As Mllama's, which is given the states of the images and hands them to no attention."""
    layer = _mllama_layer().to(device).eval()
    seen = []
    keep = lambda module, args, kwargs: seen.append(kwargs)  # noqa: E731
    layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    plain = copy.deepcopy(layer)
    assert integration.patch(layer).replaced[""] == "fused_add_rms_norm"
    angles = torch.randn(2, 5, 8, device=device).repeat(1, 1, 2)
    x, states = torch.randn(2, 5, 64, device=device), torch.randn(2, 3, 64, device=device)
    options = {"position_embeddings": (angles.cos(), angles.sin()), "of_nobody": 1}
    with torch.no_grad():
        for args in ((), (states, None, None)):
            given = {} if args else {"cross_attention_states": states}
            assert_close(layer(x, *args, **given, **options), plain(x, *args, **given, **options))
            ours, theirs = ({k: v for k, v in s.items() if k != "hidden_states"} for s in seen[-2:])
            assert "cross_attention_states" not in ours
            assert ours.keys() == theirs.keys() and all(ours[k] is theirs[k] for k in ours)


def test_a_layer_that_asks_for_the_class_of_its_mlp(integration, fuselage):
    """As Ernie-4.5-VL, which gives experts a second tensor."""
    modeling = transformers.models.llama.modeling_llama

    class Experts(modeling.LlamaMLP):
        def forward(self, x, types):
            return super().forward(x) * types, None

    class Layer(modeling.LlamaDecoderLayer):
        def forward(self, hidden_states, types=None, **kwargs):
            residual = hidden_states
            hidden_states, _ = self.self_attn(
                hidden_states=self.input_layernorm(hidden_states), **kwargs
            )
            hidden_states = residual + hidden_states
            residual, hidden_states = hidden_states, self.post_attention_layernorm(hidden_states)
            if isinstance(self.mlp, Experts):
                hidden_states, _ = self.mlp(hidden_states, types)
            else:
                hidden_states = self.mlp(hidden_states)
            return residual + hidden_states

    class Attention(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return torch.tanh(hidden_states), None

    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=4)
    dense, sparse = Layer(config, 0), Layer(config, 0)
    sparse.mlp = Experts(config)
    for layer, options in ((dense, {}), (sparse, {"types": torch.rand(64)})):
        layer.self_attn = Attention()
        x = torch.randn(2, 3, 64)
        expected = layer(x, **options)
        assert integration.patch(layer).replaced[""] == "fused_add_rms_norm"
        with counted_ops(fuselage) as counts:
            assert_close(layer(x, **options).detach(), expected.detach())
        assert counts["fused_add_rms_norm"] == 1


# Hooks that replace the forward, as accelerate's


def wrap(module: nn.Module, calls: list) -> None:
    """What `accelerate.hooks.add_hook_to_module` does to a module."""
    module._old_forward = module.forward

    def wrapper(module, *args, **kwargs):
        calls.append(module)
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(
        functools.partial(wrapper, module), module._old_forward
    )


def unwrap(module: nn.Module) -> None:
    module.forward = module._old_forward
    del module._old_forward


@pytest.mark.parametrize("order", ["hooks first", "patch first"])
def test_hooks_and_patch_survive_each_other(integration, fuselage, order):
    model = build("Llama")
    ids = tokens()
    expected = logits(model, ids).detach()
    calls: list = []
    hooked = [m for m in model.modules() if not isinstance(m, nn.ModuleList)]
    steps = [lambda: [wrap(m, calls) for m in hooked], lambda: integration.patch(model)]
    for step in steps if order == "hooks first" else reversed(steps):
        step()
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(logits(model, ids), expected)
    assert norms_in(counts) >= 5
    norms = [m for m in hooked if "Norm" in type(m).__name__]
    assert len(norms) == 5 and all(norm in calls for norm in norms)
    twin = copy.deepcopy(model)
    for m in hooked:
        unwrap(m)
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert_close(logits(model, ids), expected)
    assert norms_in(counts) >= 5  # still patched
    integration.unpatch(model)
    integration.unpatch(twin)  # with its hooks
    calls.clear()
    with torch.no_grad(), counted_ops(fuselage) as counts:
        assert torch.equal(logits(model, ids), expected)
        assert not calls
        assert torch.equal(logits(twin, ids), expected)
        assert len(calls) == len(hooked)
    assert not counts


def test_the_hooks_of_accelerate(integration, fuselage, device):
    hooks = pytest.importorskip("accelerate.hooks")
    for patch_first in (False, True):
        model = build("Llama", device)
        with torch.no_grad():
            expected = logits(model, tokens(device=device))
        if patch_first:
            integration.patch(model)
        weights = {k: v.cpu() for k, v in model.state_dict().items()}
        hooks.attach_align_device_hook(
            model, execution_device=torch.device(device), offload=True, weights_map=weights
        )
        assert model.model.norm.weight.device.type == "meta"
        if not patch_first:
            integration.patch(model)
        torch.manual_seed(20261121)
        with torch.no_grad(), counted_ops(fuselage) as counts:
            assert logits(model, tokens(device=device)).shape == expected.shape
        assert norms_in(counts) == 5
        hooks.remove_hook_from_submodules(model)
        assert integration.unpatch(model) == 12


# patch: what it recognises, and what it does not


class Norm(nn.Module):
    def __init__(self, dim=64, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))
        self.eps = eps

    def normalised(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class ARMSNorm(Norm):
    def forward(self, x):
        return (self.normalised(x) * self.weight.float()).to(x.dtype)


class BRMSNorm(Norm):
    def forward(self, hidden):
        return self.weight * self.normalised(hidden).to(hidden.dtype)


class CRMSNorm(Norm):
    def forward(self, x):
        return (self.normalised(x) * (1.0 + self.weight.float())).type_as(x)


class DRMSNorm(Norm):
    def forward(self, x):
        return self.normalised(x).to(x.dtype) * (1.0 + self.weight)  # rounds 1 + weight, too


class WrongEpsRMSNorm(Norm):
    def forward(self, x):
        x32 = x.float()
        out = x32 / (x32.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
        return (out * self.weight.float()).to(x.dtype)


class FlooredRMSNorm(Norm):
    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True).clamp_min(self.eps))
        return (x.float() * scale * self.weight.float()).to(x.dtype)


class GatedRMSNormWithTwoInputs(Norm):
    def forward(self, x, gate=None):
        return ARMSNorm.forward(self, x) * (1 if gate is None else gate)


class TwoParameterRMSNorm(ARMSNorm):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


class RaisingRMSNorm(Norm):
    def forward(self, x):
        raise RuntimeError("never called like this")


@pytest.mark.parametrize(
    ("kind", "what"),
    [(ARMSNorm, ONCE), (BRMSNorm, LLAMA), (CRMSNorm, GEMMA)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_style_of_a_norm_is_found_by_what_it_computes(integration, fuselage, kind, what):
    model = nn.Sequential(kind())
    assert integration.patch(model).replaced == {"0": what}
    keyword = {kind.forward.__code__.co_varnames[1]: torch.randn(2, 64)}
    assert_close(model[0](**keyword), kind.forward(model[0], **keyword))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (DRMSNorm, "computes something else"),
        (WrongEpsRMSNorm, "computes something else"),
        (FlooredRMSNorm, "computes something else"),
        (TwoParameterRMSNorm, "other parameters"),
        (RaisingRMSNorm, "never called like this"),
        (nn.BatchNorm1d, None),
        (nn.GroupNorm, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_only_looks_like_a_norm_is_left_alone(integration, kind, why):
    module = {nn.BatchNorm1d: lambda: kind(64), nn.GroupNorm: lambda: kind(4, 64)}.get(kind, kind)()
    report = integration.patch(nn.Sequential(module))
    assert not report.replaced and "forward" not in vars(module)
    if why is None:
        assert not report.left_alone
    else:
        assert why in report.left_alone["0"] and why in str(report)


def test_another_forward_on_the_instance_is_left_alone(integration):
    norm = ARMSNorm()
    norm.forward = lambda x: x
    report = integration.patch(nn.Sequential(norm))
    assert "was replaced already" in report.left_alone["0"] and not report.replaced
    assert torch.equal(norm(torch.ones(2)), torch.ones(2))


def test_torch_rms_norm(integration, fuselage, device):
    for weight in (True, False):
        norm = nn.RMSNorm(64, eps=1e-5, elementwise_affine=weight, device=device)
        model = nn.Sequential(norm)
        x = torch.randn(4, 64, device=device)
        expected = model(x)
        assert integration.patch(model).replaced == {"0": ONCE}
        with counted_ops(fuselage) as counts:
            assert_close(model(x).detach(), expected.detach())
        assert counts == {"rms_norm": 1}
    several = nn.Sequential(nn.RMSNorm((4, 64), eps=1e-5))
    assert "more than the last dimension" in integration.patch(several).left_alone["0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_rms_norm_without_an_eps(integration, fuselage, device, dtype):
    """Its default is that of float32, which is what it computes in."""
    norm = nn.RMSNorm(64, device=device, dtype=dtype)
    x = 3e-4 * torch.randn(4, 64, device=device, dtype=dtype)
    expected = norm(x).detach()
    assert integration.patch(norm).replaced == {"": ONCE}
    with counted_ops(fuselage) as counts:
        assert_close(norm(x).detach(), expected, tol=2 * torch.finfo(dtype).eps)
    assert counts == {"rms_norm": 1}


class MLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down_proj, self.act_fn = nn.Linear(16, 8), act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ScaledMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5


class SwappedMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class DroppingMLP(MLP):
    def __init__(self, act):
        super().__init__(act)
        self.dropout = nn.Dropout(0.1)


class ClampedMLP(MLP):
    """As in DeepSeek-V4 and Step-3.7."""

    def __init__(self, limit):
        super().__init__(nn.SiLU())
        self.limit = limit

    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(min=-self.limit, max=self.limit)
        return self.down_proj(self.act_fn(gate) * up)


class ClampedExperts(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.act_fn, self.limit = nn.SiLU(), limit

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class FunctionalDropoutMLP(MLP):
    """As in Seed-OSS."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, training=self.training)


@pytest.mark.parametrize("training", [False, True])
def test_a_dropout_without_a_module_is_seen(integration, training):
    model = nn.Sequential(FunctionalDropoutMLP(nn.SiLU())).train(training)
    state = torch.get_rng_state()
    report = integration.patch(model)
    assert not report.replaced and "computes something else" in report.left_alone["0"]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_drops_out_what_the_plain_one_does(integration, fuselage, training):
    Idefics = transformers.models.idefics
    config = Idefics.IdeficsConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, dropout=0.3
    )
    layer = Idefics.modeling_idefics.IdeficsDecoderLayer(config).train(training)
    x = torch.randn(2, 3, 32)

    def run() -> torch.Tensor:
        torch.manual_seed(5)
        out = layer(x, position_ids=torch.arange(3)[None])
        return out[0] if isinstance(out, tuple) else out

    expected = run()
    assert integration.patch(layer).replaced[""] == "fused_add_rms_norm"
    with counted_ops(fuselage) as counts:
        assert_close(run().detach(), expected.detach())
    assert counts["fused_add_rms_norm"] == 1


@pytest.mark.parametrize("limit", [7, 10, 16, 40])
def test_a_clamp_is_seen(integration, limit):
    for module, why in (
        (ClampedMLP(limit), "computes something else"),
        (ClampedExperts(limit), ""),
    ):
        report = integration.patch(nn.Sequential(module))
        assert not report.replaced and why in report.left_alone["0"]
    for module in (ClampedMLP(float("inf")), ClampedExperts(float("inf"))):
        assert integration.patch(nn.Sequential(module)).replaced.keys() == {"0"}


def test_what_only_looks_like_a_gated_mlp_is_left_alone(integration):
    class Clipped(nn.Module):
        def forward(self, x):
            return F.silu(x).clamp(-20, 20)

    for module, why in (
        (ScaledMLP(nn.SiLU()), "computes something else"),
        (SwappedMLP(nn.SiLU()), "computes something else"),
        (DroppingMLP(nn.SiLU()), "more submodules: dropout"),
        (MLP(nn.Tanh()), "its activation"),
        (MLP(Clipped()), "its activation"),
    ):
        report = integration.patch(nn.Sequential(module))
        assert why in report.left_alone["0"] and not report.replaced
    for act, what in ((nn.SiLU(), "swiglu"), (nn.GELU(), "geglu (gelu)"), (F.silu, "swiglu")):
        assert integration.patch(nn.Sequential(MLP(act))).replaced == {"0": what}


def test_activations(integration, fuselage):
    names = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "gelu_quick"}
    model = nn.ModuleDict({name: transformers.activations.ACT2FN[name] for name in names})
    others = {"silu", "gelu", "gelu_10", "gelu_pytorch_tanh"}
    model.update({name: transformers.activations.ACT2FN[name] for name in others})
    report = integration.patch(model)
    assert report.replaced == names
    assert report.left_alone.keys() == others
    assert "something else" in report.left_alone["gelu_10"]
    assert "one kernel" in report.left_alone["silu"]


class DtypeRMSNorm(Norm):
    """Rounds where an attribute says."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        if self.dtype is None:
            return self.weight * self.normalised(x).to(x.dtype)
        return (self.normalised(x).to(self.dtype) * self.weight.float()).to(x.dtype)


class ScaledRMSNorm(Norm):
    """What it computes stands in an attribute of an attribute."""

    def __init__(self, scale):
        super().__init__()
        self.config = SimpleNamespace(scale=scale)

    def forward(self, x):
        return (self.normalised(x) * self.config.scale * self.weight.float()).to(x.dtype)


def test_norms_of_one_class_are_told_apart_by_all_their_attributes(integration):
    kinds = {"once": torch.float32, "twice": None}
    model = nn.ModuleDict({name: DtypeRMSNorm(dtype) for name, dtype in kinds.items()})
    model.update({"plain": ScaledRMSNorm(1), "scaled": ScaledRMSNorm(2)})
    report = integration.patch(model)
    assert report.replaced == {"once": ONCE, "twice": LLAMA, "plain": ONCE}
    assert report.left_alone.keys() == {"scaled"}


def test_a_probe_touches_neither_parameters_nor_random_numbers(integration):
    model = build("Gemma3")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    integration.patch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# kernel_mapping


def test_kernel_mapping_of_the_hub(integration):
    mapping = integration.kernel_mapping("fuselage-kernels/fuselage", version=1)
    for modes in (modes for devices in mapping.values() for modes in devices.values()):
        assert len(modes) == 4
        assert isinstance(modes[Mode.INFERENCE], LayerRepository)
        assert isinstance(modes[Mode.TRAINING], LayerRepository)
    for mode in mapping["RMSNorm"]["cuda"]:
        repository = mapping["RMSNorm"]["cuda"][mode]
        assert "fuselage-kernels/fuselage" in repr(repository.__dict__)
        assert repository.layer_name == "RMSNorm"


@needs_kernelize
@pytest.mark.parametrize("compiled", [False, True])
def test_activations_of_one_kernel_are_left_to_the_compiler(integration, fuselage, compiled):
    names = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new")
    model = nn.ModuleList(transformers.activations.ACT2FN[name] for name in names)
    plain, x = copy.deepcopy(model), torch.randn(3, 64)
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE if compiled else Mode.INFERENCE
    with use_kernel_mapping(integration.kernel_mapping(), inherit_mapping=False):
        kernelize(model, mode=mode, device="cpu", use_fallback=KernelizeFallback.NO_LAYER)
    for name, ours, theirs in zip(names, model, plain, strict=True):
        with counted_ops(fuselage) as counts:
            assert_close(ours(x), theirs(x))
        assert bool(counts) == (not compiled or name == "gelu_new"), name


@needs_kernelize
@pytest.mark.parametrize("source", ["loaded", "path"])
def test_kernel_mapping(integration, fuselage, device, source):
    options = {"loaded": {}, "path": {"repo_path": Path(fuselage.__file__).parent}}[source]
    mapping = integration.kernel_mapping(**options)
    assert {"RMSNorm", "RMSNormZeroCentered", "SiLU", "SwiGLUMLP"} <= mapping.keys()
    plain = build("Llama", device)
    expected = loss(plain, tokens(device=device))
    for mode in (Mode.INFERENCE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE):
        model = copy.deepcopy(plain).train(Mode.TRAINING in mode)
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model, mode=mode, device=device, use_fallback=KernelizeFallback.NO_LAYER)
        torch.manual_seed(20261121)
        with counted_ops(fuselage) as counts:
            actual = loss(model, tokens(device=device))
        assert norms_in(counts) == 5
        torch.manual_seed(20261121)
        expected = loss(plain, tokens(device=device))
        assert_close(actual.detach(), expected.detach())


def test_every_layer_is_in_the_mapping(integration, fuselage):
    members = vars(fuselage.layers).items()
    layers = {k for k, v in members if isinstance(v, type) and issubclass(v, nn.Module)}
    mapping = integration.kernel_mapping()
    renamed = {"RotaryPosEmb": "rotary_pos_emb"}
    assert {renamed.get(name, name) for name in layers} == set(mapping)
    assert {"RMSNorm", "RMSNormZeroCentered", "SiLU", "NewGELU", "SwiGLUMLP"} <= set(mapping)
    assert all(set(devices) == {"cpu", "cuda", "rocm"} for devices in mapping.values())
    with pytest.raises(RuntimeError, match="got both"):
        integration.kernel_mapping("a/b", repo_path=".")


# Loading


@pytest.mark.long
def test_it_is_loaded_when_it_is_asked_for(fuselage):
    code = f"""
import sys
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path({str(Path(fuselage.__file__).parent)!r}), backend=None)
assert not [name for name in sys.modules if ".integrations" in name and "fuselage" in name]
assert not {{"transformers", "diffusers"}} & set(sys.modules)
assert kernel.integrations.transformers.patch and kernel.integrations.diffusers.patch
assert not {{"transformers", "diffusers"}} & set(sys.modules)
try:
    kernel.integrations.nothing
except AttributeError:
    print("done")
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO_DIR, timeout=60)
    assert "done" in result.stdout, result.stderr
