"""Processors of diffusers: queries and keys are rotated by one call, with the norms before."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from integrations.models import assert_close, counted_ops, randomise
from torch import nn

pytest.importorskip("diffusers")
from diffusers.models.embeddings import apply_rotary_emb

HEADS, DIM, TOKENS = 3, 16, 6
ONE_CALL = {"qk_norm_rotary": 1}
APART = {"rms_norm": 2, "apply_rotary": 1}


class Processor:
    """Queries and keys of heads; each below says what it does with them."""

    def result(self, q, k):
        return torch.cat([q.flatten(1), k.flatten(1)], dim=1)


class Plain(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class Joined(Processor):
    """As Flux: text may come before."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        if text is not None:
            q = torch.cat([text, q[:, 2:]], dim=1)
            k = torch.cat([text, k[:, 2:]], dim=1)
        if freqs is not None:
            q = apply_rotary_emb(q, freqs, sequence_dim=1)
            k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class Conditional(Processor):
    """As QwenImage: there may be no norms."""

    def __call__(self, attn, x, freqs=None, text=None):
        query = attn.to_q(x).unflatten(-1, (-1, DIM))
        key = attn.to_k(x).unflatten(-1, (-1, DIM))
        if attn.norm_q is not None:
            q = attn.norm_q(query)
        if attn.norm_k is not None:
            k = attn.norm_k(key)
        if freqs is not None:
            tables = freqs
            q = apply_rotary_emb(q, tables, sequence_dim=1)
            k = apply_rotary_emb(k, tables, sequence_dim=1)
        return self.result(q, k)


class QueryIsReadBefore(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.norm_q(attn.to_q(x).unflatten(-1, (-1, DIM)))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        mean = q.mean()
        if freqs is not None:
            q = apply_rotary_emb(q, freqs, sequence_dim=1)
            k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k) + mean


class ConditionChanges(Processor):
    """Whether it is rotated is known after the norm only."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        tables = None
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        tables = freqs
        if tables is not None:
            q = apply_rotary_emb(q, tables, sequence_dim=1)
            k = apply_rotary_emb(k, tables, sequence_dim=1)
        return self.result(q, k)


class ConditionOfValues(Processor):
    """A condition that is not asked twice."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        if len(freqs) > 1:
            q = apply_rotary_emb(q, freqs, sequence_dim=1)
            k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class ReadWhereItIsNotRotated(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        more = [x.mean()]
        if text is not None:
            more.append(0.5)
        else:
            more.append(q.mean())
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k) + sum(more)


class InALoop(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        for _ in range(2):
            q = attn.norm_q(q)
            k = attn.norm_k(k)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class KeysAreNotNormed(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class AfterProducts(Processor):
    """Rotated right after another module than a norm."""

    def __call__(self, attn, x, freqs=None, text=None):
        x = x.unflatten(-1, (-1, DIM))
        q = attn.to_head(x)
        k = attn.to_head(x)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class OtherTables(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, (freqs[1], freqs[0]), sequence_dim=1)
        return self.result(q, k)


class TablesAreUsedUp(Processor):
    """Arguments that are others each time."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        tables = [freqs, (freqs[1], freqs[0])]
        q = apply_rotary_emb(q, tables.pop(), sequence_dim=1)
        k = apply_rotary_emb(k, tables.pop(), sequence_dim=1)
        return self.result(q, k)


class AliasChanges(Processor):
    """What queries and keys are a part of, after the norms."""

    def __call__(self, attn, x, freqs=None, text=None):
        both = torch.stack([attn.to_q(x), attn.to_k(x)]).unflatten(-1, (-1, DIM))
        q, k = both.unbind()
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        both.zero_()
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class WrittenTo(Processor):
    """By the argument of a function."""

    def __call__(self, attn, x, freqs=None, text=None):
        query = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(query)
        k = attn.norm_k(k)
        torch.add(query, 1, out=query)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class WeightChanges(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        attn.norm_q.weight.mul_(2)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        attn.norm_q.weight.div_(2)
        return self.result(q, k)


class ChangedInPlace(Processor):
    """What is normalised, after the norm."""

    def __call__(self, attn, x, freqs=None, text=None):
        query = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(query)
        k = attn.norm_k(k)
        query.add_(1)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class TablesOfTheQuery(Processor):
    """The second call reads what the first one sets."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        q = apply_rotary_emb(q, freqs, sequence_dim=q.dim() - 3)
        k = apply_rotary_emb(k, freqs, sequence_dim=q.dim() - 3)
        return self.result(q, k)


class ByTurns(Processor):
    """As Z-Image: a function of its own, of complex numbers."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)

        def apply_rotary_emb(x, freqs):
            turns = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            freqs = freqs.unsqueeze(2)
            return torch.view_as_real(turns * freqs).flatten(3).type_as(x)

        if freqs is not None:
            q = apply_rotary_emb(q, freqs)
            k = apply_rotary_emb(k, freqs)
        return self.result(q, k)


class Nested(Processor):
    """Conditions that may be asked in one order alone; `text` is an object with options."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        if text is not None:  # noqa: SIM102
            if text.rotates:
                q = apply_rotary_emb(q, freqs, sequence_dim=1)
                k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class NestedParameters(Processor):
    """Conditions that may be asked anywhere."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        is_plain = text is None
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        if is_plain:
            from diffusers.models.embeddings import get_timestep_embedding  # noqa: F401

            if freqs is not None and attn.norm_q is not None:
                q = apply_rotary_emb(q, freqs, sequence_dim=1)
                k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class Guarded(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        if freqs is None:
            return x
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class StateChanges(Processor):
    """A call in between decides."""

    tables = None

    def prepare(self, freqs):
        self.tables = freqs

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        self.prepare(freqs)
        if self.tables is not None:
            q = apply_rotary_emb(q, freqs, sequence_dim=1)
            k = apply_rotary_emb(k, freqs, sequence_dim=1)
        self.tables = None
        return self.result(q, k)


class NameIsImported(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        from math import pi as text

        if text is not None:
            q = apply_rotary_emb(q, freqs, sequence_dim=1)
            k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class NameMayNotBeSet(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        if text is None:
            tables = freqs
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        if tables is not None:
            q = apply_rotary_emb(q, freqs, sequence_dim=1)
            k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class ReadByAFunction(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))

        def mean():
            return q.mean()

        q = attn.norm_q(q)
        k = attn.norm_k(k)
        more = mean()
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k) + more


class OwnerIsGone(Processor):
    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        attn = None
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k)


class OtherFunction(Processor):
    """The name of the function means another one, later."""

    def __call__(self, attn, x, freqs=None, text=None):
        from diffusers.models.embeddings import apply_rotary_emb

        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x).unflatten(-1, (-1, DIM))
        if text is None:
            apply_rotary_emb = lambda x, freqs: x * 2  # noqa: E731
        return self.result(apply_rotary_emb(q, freqs), apply_rotary_emb(k, freqs))


class Attention(nn.Module):
    def __init__(self, kind: type, key_heads: int = HEADS):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(32, HEADS * DIM), nn.Linear(32, key_heads * DIM)
        self.to_head = nn.Linear(DIM, DIM)
        self.norm_q, self.norm_k = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.processor = kind()
        randomise(self)

    def forward(self, x, **inputs):
        return self.processor(self, x, **inputs)


def inputs_for(kind: type, device: str) -> dict:
    torch.manual_seed(1)
    x = torch.randn(2, TOKENS, 32, device=device, requires_grad=True)
    angles = torch.randn(TOKENS, DIM // 2, device=device)
    if kind is ByTurns:
        return {"x": x, "freqs": torch.polar(torch.ones_like(angles), angles)[None]}
    pairs = angles.repeat_interleave(2, dim=1)
    more = {"text": SimpleNamespace(rotates=True)} if kind is Nested else {}
    return {"x": x, "freqs": (pairs.cos(), pairs.sin()), **more}


def results(attention: nn.Module, inputs: dict) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of what has any."""
    out = attention(**inputs)
    leaves = [inputs["x"], *attention.parameters()]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return [t.detach() for t in (out, *grads) if t is not None]


def assert_calls(integration, fuselage, attention, inputs, expected, change=None) -> None:
    plain = copy.deepcopy(attention)
    integration.patch(attention)
    for module in (plain, attention):
        if change is not None:
            change(module)
    with counted_ops(fuselage) as counts:
        ours = results(attention, inputs)
    assert {k: v for k, v in counts.items() if "bwd" not in k} == expected
    for actual, reference in zip(ours, results(plain, inputs), strict=True):
        assert_close(actual, reference, tol=1e-5)


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.diffusers


KINDS = {
    Plain: ONE_CALL,
    Joined: ONE_CALL,
    Conditional: ONE_CALL,
    ByTurns: ONE_CALL,
    QueryIsReadBefore: {"rms_norm": 3, "apply_rotary": 1},
    ConditionChanges: APART,
    ConditionOfValues: APART,
    ReadWhereItIsNotRotated: APART,
    InALoop: {"rms_norm": 4, "apply_rotary": 1},
    KeysAreNotNormed: {"rms_norm": 1, "apply_rotary": 1},
    AfterProducts: {"apply_rotary": 1},
    OtherTables: {"rms_norm": 2, "apply_rotary": 2},
    Nested: APART,
    NestedParameters: ONE_CALL,
    Guarded: APART,
    StateChanges: APART,
    NameIsImported: APART,
    NameMayNotBeSet: APART,
    ReadByAFunction: APART,
    OwnerIsGone: APART,
    TablesAreUsedUp: {"apply_rotary": 2},
    TablesOfTheQuery: {"rms_norm": 2, "apply_rotary": 2},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_norms_and_rotations(integration, fuselage, device, kind):
    attention = Attention(kind).to(device)
    assert_calls(integration, fuselage, attention, inputs_for(kind, device), KINDS[kind])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_the_report_says(integration, kind):
    """And says again of a model that is patched."""
    attention = Attention(kind)
    for _ in range(2):
        what = "qk_norm_rotary" if KINDS[kind] is ONE_CALL else "apply_rotary"
        assert integration.patch(attention).replaced[""] == what
    integration.unpatch(attention)
    assert type(attention.processor) is kind


def test_the_report_of_models_whose_text_comes_first(integration):
    """Flux: the norms of a double block are not part of the call, those of a single one are."""
    from diffusers.models.transformers import transformer_flux as flux

    double = flux.FluxTransformerBlock(48, HEADS, DIM)
    single = flux.FluxSingleTransformerBlock(48, HEADS, DIM)
    assert integration.patch(double).replaced["attn"] == "apply_rotary, signature kept"
    assert integration.patch(single).replaced["attn"] == "qk_norm_rotary, signature kept"


@pytest.mark.parametrize("kind", [Joined, Conditional])
def test_it_may_not_be_rotated(integration, fuselage, device, kind):
    inputs = {**inputs_for(kind, device), "freqs": None}
    assert_calls(integration, fuselage, Attention(kind).to(device), inputs, {"rms_norm": 2})


def test_text_comes_after_the_norms(integration, fuselage, device):
    inputs = inputs_for(Joined, device)
    inputs["text"] = torch.randn(2, 2, HEADS, DIM, device=device)
    assert_calls(integration, fuselage, Attention(Joined).to(device), inputs, APART)


def _listen(attention):
    attention.norm_q.register_forward_hook(lambda *args: None)


def _another_eps(attention):
    attention.norm_k.eps = 1e-3


@pytest.mark.parametrize("change", [_listen, _another_eps])
def test_norms_may_change_after_the_patch(integration, fuselage, device, change):
    attention = Attention(Joined).to(device)
    assert_calls(integration, fuselage, attention, inputs_for(Joined, device), APART, change)


def _without(attention):
    attention.norm_k = nn.Identity()


def test_a_norm_may_go_after_the_patch(integration, fuselage, device):
    attention, inputs = Attention(Joined).to(device), inputs_for(Joined, device)
    expected = {"rms_norm": 1, "apply_rotary": 1}
    assert_calls(integration, fuselage, attention, inputs, expected, _without)


def test_fewer_heads_of_keys(integration, fuselage, device):
    """As Lumina 2."""
    attention, inputs = Attention(Plain, key_heads=1).to(device), inputs_for(Plain, device)
    assert_calls(integration, fuselage, attention, inputs, ONE_CALL)


@pytest.mark.parametrize("kind", [ChangedInPlace, AliasChanges, WrittenTo, WeightChanges])
def test_what_is_normalised_changes_in_place(integration, device, kind):
    attention, inputs = Attention(kind).to(device), inputs_for(kind, device)
    with torch.no_grad():
        expected = attention(**inputs)
        integration.patch(attention)
        assert_close(attention(**inputs), expected)


@pytest.mark.parametrize("options", [None, SimpleNamespace(rotates=False)])
def test_conditions_are_asked_in_their_order(integration, fuselage, device, options):
    inputs = {**inputs_for(Nested, device), "text": options}
    assert_calls(integration, fuselage, Attention(Nested).to(device), inputs, {"rms_norm": 2})


def test_a_guard(integration, device):
    attention, inputs = Attention(Guarded).to(device), inputs_for(Guarded, device)
    integration.patch(attention)
    assert attention(inputs["x"]) is inputs["x"]


def test_a_name_that_means_another_function(integration, device):
    attention, inputs = Attention(OtherFunction).to(device), inputs_for(OtherFunction, device)
    expected = attention(**inputs)
    assert "rotary" in integration.patch(attention).left_alone[""]
    assert torch.equal(attention(**inputs), expected)


@pytest.mark.parametrize("patch_first", [True, False])
def test_a_hook_of_accelerate_is_called(integration, fuselage, device, patch_first):
    hooks = pytest.importorskip("accelerate.hooks")

    class Twice(hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 2

    attention, inputs = Attention(Plain).to(device), inputs_for(Plain, device)
    hooked = copy.deepcopy(attention)
    hooks.add_hook_to_module(hooked.norm_q, Twice())
    expected = hooked(**inputs)
    if patch_first:
        integration.patch(attention)
    hooks.add_hook_to_module(attention.norm_q, Twice())
    if not patch_first:
        integration.patch(attention)
    assert_close(attention(**inputs), expected)


def _layer_norms(attention):
    attention.norm_q, attention.norm_k = nn.LayerNorm(DIM), nn.LayerNorm(DIM)


def _functions(attention):
    del attention.norm_q, attention.norm_k
    attention.norm_q, attention.norm_k = torch.tanh, torch.sigmoid


@pytest.mark.parametrize("change", [_layer_norms, _functions])
def test_other_norms(integration, device, change):
    attention, inputs = Attention(Plain), inputs_for(Plain, device)
    change(attention.to(device))
    expected = attention(**inputs)
    assert integration.patch(attention).replaced[""] == "apply_rotary"
    assert_close(attention(**inputs), expected)


class Across(Processor):
    """Keys of other tokens, which have tables as long."""

    def __call__(self, attn, x, freqs=None, text=None):
        q = attn.to_q(x).unflatten(-1, (-1, DIM))
        k = attn.to_k(x.flip(0)[:1]).unflatten(-1, (-1, DIM))
        q = attn.norm_q(q)
        k = attn.norm_k(k)
        q = apply_rotary_emb(q, freqs, sequence_dim=1)
        k = apply_rotary_emb(k, freqs, sequence_dim=1)
        return self.result(q, k.expand_as(q))


def test_fewer_sequences_of_keys(integration, fuselage, device):
    attention, inputs = Attention(Across).to(device), inputs_for(Across, device)
    expected = {"rms_norm": 2, "apply_rotary": 2}
    assert_calls(integration, fuselage, attention, inputs, expected)


def test_longer_heads_than_the_kernel_takes(integration, fuselage, device, monkeypatch):
    module = importlib.import_module(f"{fuselage.integrations.__name__}._rotary")
    monkeypatch.setattr(module, "_WIDEST", DIM - 1)
    attention = Attention(Plain).to(device)
    assert_calls(integration, fuselage, attention, inputs_for(Plain, device), APART)


def test_other_numbers_of_tokens(integration, fuselage, device):
    """Tables for a part of the tokens: PyTorch's own, which raises."""
    attention, inputs = Attention(Plain).to(device), inputs_for(Plain, device)
    inputs["freqs"] = tuple(table[1:] for table in inputs["freqs"])
    integration.patch(attention)
    with pytest.raises(RuntimeError, match="must match"):
        attention(**inputs)
