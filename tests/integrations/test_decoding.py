"""Attention of one token with the keys in parts. On a CPU a formula stands in for the kernel."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from integrations.models import assert_close, build, rms, tokens

NAME = "_scaled_dot_product_cudnn_attention"
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}


def formula(query, key, value, bias, with_sums, dropout=0.0, causal=False, debug=False, scale=None):
    """[batch, heads, queries, 1] are its logarithms of sums, as those of the kernel."""
    q, k, v = (x.float() for x in (query, key, value))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias.float()
    sums = scores.logsumexp(-1, keepdim=True)
    out = ((scores - sums).exp() @ v).to(query.dtype)
    nothing = query.new_empty(0)
    return out, sums, nothing, nothing, 0, 0, nothing, nothing, nothing


@pytest.fixture
def decoding(fuselage, device, monkeypatch):
    """The module, as on a GPU of 32 multiprocessors that has the kernel."""
    module = importlib.import_module(f"{fuselage.integrations.__name__}._decoding")
    if device != "cpu" and not module._is_preferred(None):
        pytest.skip("PyTorch's attention is another one here")
    monkeypatch.setattr(module, "_multiprocessors", lambda _: 32)
    library = torch.library.Library("aten", "IMPL")
    if device == "cpu":
        monkeypatch.setattr(module, "_has_kernel", lambda _: True)
        library.impl(NAME, formula, "CPU")
    yield module
    library._destroy()


@pytest.mark.parametrize("most", [2, 3, 7, 8, 13, 16])
def test_every_key_is_in_one_part(fuselage, most):
    module = importlib.import_module(f"{fuselage.integrations.__name__}._decoding")
    for keys in (*range(64 * most, 64 * most + 200), 4097, 8191, 131072):
        parts, length, step = module.lengths(keys, most)
        assert parts <= most and length % 8 == 0 and step <= length
        assert (parts - 1) * step + length == keys
        assert parts * length <= 2 * keys and most * length <= 2.5 * keys, "too much overlaps"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "keys", "dim", "parts"),
    [
        (1, 8, 2, 1025, 64, 16),
        (3, 4, 1, 640, 128, 7),
        (2, 32, 8, 131, 80, 2),
        (1, 6, 2, 4096, 128, 13),
    ],
)
@torch.no_grad()
def test_parts_are_joined(decoding, device, dtype, batch, heads, key_heads, keys, dim, parts):
    torch.manual_seed(0)
    query = torch.randn(batch, heads, 1, dim, device=device, dtype=dtype) * 3
    key, value = (
        torch.randn(batch, key_heads, keys, dim, device=device, dtype=dtype) for _ in range(2)
    )
    masks = torch.rand(3, batch, 1, 1, keys, device=device) < 0.5
    masks[1, ..., 70:] = False  # of most parts, everything
    masks[1, ..., 3] = True
    masks[2] = False  # but for one key, the last
    masks[2, ..., -1] = True
    shared = [x.repeat_interleave(heads // key_heads, 1) for x in (key, value)]
    for mask, scale in zip(masks, (None, 0.3, None)):
        exact = F.scaled_dot_product_attention(
            *(x.double() for x in (query, *shared)), attn_mask=mask, scale=scale
        )
        plain = F.scaled_dot_product_attention(query, *shared, attn_mask=mask, scale=scale)
        ours = decoding.attend(query, key, value, mask, scale, parts)
        assert ours.shape == plain.shape and ours.dtype == dtype
        error, bound = (rms(x.double() - exact) / rms(exact) for x in (ours, plain))
        # Three roundings of one size: of probabilities in the kernel, of parts, and of the result.
        assert error <= 3**0.5 * bound
    one = decoding.attend(query, key, value, masks[0][:1], None, parts)
    assert torch.equal(one[0], decoding.attend(query, key, value, masks[0], None, parts)[0])


def model_of(device: str, dtype: torch.dtype) -> torch.nn.Module:
    return build("Llama", device, **SIZES).to(dtype)


class Seen:
    """A backend that counts attention in parts, and compilations."""

    def __init__(self):
        self.in_parts, self.graphs = 0, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.in_parts += sum(NAME in str(node.target) for node in graph.graph.nodes)
        return graph.forward


def decode(model, plain, keys: int, padded: bool, kind: str = "static", steps: int = 1):
    """Logits of one token after others: those of the model compiled, and of the plain one."""
    from transformers import DynamicCache, StaticCache

    device = plain.device
    ids = tokens(device=device)
    mask = torch.ones(ids.shape[0], ids.shape[1] + steps, dtype=torch.long, device=device)
    mask[0, :5] = 0
    seen, results = Seen(), []
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend=seen)
    for call in (run, plain):
        of_config = {"config": plain.config}
        cache = DynamicCache(**of_config)
        if kind == "static":
            cache = StaticCache(**of_config, max_cache_len=keys)
        given = {"attention_mask": mask[:, : ids.shape[1]]} if padded else {}
        plain(input_ids=ids, past_key_values=cache, **given)
        for step in range(steps):
            given = {"attention_mask": mask[:, : ids.shape[1] + step + 1]} if padded else {}
            out = call(input_ids=ids[:, step : step + 1], past_key_values=cache, **given)
        results.append(out.logits)
    return seen, *results


@pytest.mark.long
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_static_cache(fuselage, decoding, device, padded):
    plain = model_of(device, torch.bfloat16)
    model = copy.deepcopy(plain)
    fuselage.integrations.transformers.patch(model)
    seen, ours, theirs = decode(model, plain, 200, padded)
    assert seen.in_parts == plain.config.num_hidden_layers
    assert_close(ours.float(), theirs.float(), tol=3e-2)


@pytest.mark.long
@torch.no_grad()
def test_what_stays_in_one_part(fuselage, decoding, device, monkeypatch):
    plain = model_of(device, torch.bfloat16)
    model = copy.deepcopy(plain)
    fuselage.integrations.transformers.patch(model)
    assert decode(model, plain, 100, False)[0].in_parts == 0  # too few keys
    monkeypatch.setattr(decoding, "_multiprocessors", lambda _: 7)
    assert decode(model, plain, 200, False)[0].in_parts == 0  # enough heads
    monkeypatch.setattr(decoding, "_multiprocessors", lambda _: 32)
    assert decode(model, plain, 200, False)[0].in_parts > 0
    exact, own = plain.float(), model.float()
    assert decode(own, exact, 200, False)[0].in_parts == 0


@pytest.mark.long
@torch.no_grad()
def test_a_cache_that_grows_is_compiled_once(fuselage, decoding, device, monkeypatch):
    """Its length is not known: nothing is asked of it."""
    monkeypatch.setattr(decoding, "_LEAST", 4)
    plain = model_of(device, torch.bfloat16)
    model = copy.deepcopy(plain)
    fuselage.integrations.transformers.patch(model)
    seen, ours, theirs = decode(model, plain, 0, True, "dynamic", steps=6)
    assert_close(ours.float(), theirs.float(), tol=3e-2)
    monkeypatch.setattr(decoding, "parts_of", lambda *_: 1)
    without, _, _ = decode(model, plain, 0, True, "dynamic", steps=6)
    assert seen.graphs == without.graphs < 6
