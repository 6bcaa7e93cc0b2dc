"""Encoders whose tokens attend to a window before and after them: patched, they make no mask."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from integrations import windows
from integrations.models import assert_no_farther, half_of, randomise, tokens
from integrations.windows import compiled, counted

COLUMNS, DISTANCE = 40, 6
BOTH = (DISTANCE, DISTANCE)
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"layer_types": (FULL, SLIDING), "max_position_embeddings": 64, "initializer_range": 0.1},
}
# The names of their classes, and how each configuration says how far its tokens look.
NAMES = {
    "ModernBert": {"local_attention": 2 * DISTANCE, "cls_token_id": 1, "sep_token_id": 2},
    "Ultrabert": {"sliding_window": DISTANCE, "num_key_value_heads": 2, "head_dim": 16},
    "EmbeddingGemma2Text": {
        **{"sliding_window": DISTANCE, "num_key_value_heads": 2, "head_dim": 16},
        **{"hidden_size_per_layer_input": 16, "embedding_dim": 32, "global_head_dim": 16},
        "layer_types": (SLIDING, FULL),
    },
    # EmbeddingGemma. Its masks are causal ones with an overlay, and it halves the size of a window.
    "Gemma3Text": {
        **{"sliding_window": 2 * DISTANCE, "num_key_value_heads": 2, "head_dim": 16},
        **{"use_bidirectional_attention": True, "layer_types": (SLIDING, FULL)},
    },
}


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


@pytest.fixture
def window(integration, device, monkeypatch):
    with windows.kernel(integration, device, monkeypatch) as module:
        yield module


def models(integration, name="ModernBert", device="cpu", **options):
    """In float32, in bfloat16, and that patched."""
    import transformers

    torch.manual_seed(0)
    options = SIZES | NAMES[name] | options
    options["layer_types"] = [*options["layer_types"]]
    config = getattr(transformers, f"{name}Config")(**options)
    exact = getattr(transformers, f"{name}Model")(config).to(device).eval()
    randomise(exact)
    plain = half_of(exact)
    patched = copy.deepcopy(plain)
    integration.patch(patched)
    return exact, plain, patched


def states(model, ids, **inputs):
    return model(input_ids=ids, **inputs).last_hidden_state


def assert_right(run, plain, exact, ids, rows=slice(None), **inputs):
    """The result of `run` is as close to the exact one as the plain model's.

    Of so few tokens the errors differ by 3% by chance; a window one token off has several times
    that of the plain model.
    """
    with torch.no_grad():
        results = [states(model, ids, **inputs)[rows] for model in (run, plain, exact)]
    assert_no_farther(*(lambda _, r=r: r for r in results), seeds=1, margin=1.1)


def windows_of(plain) -> list:
    return [BOTH if kind == SLIDING else None for kind in plain.config.layer_types]


def calls_of(fuselage, model, mode, call) -> int:
    """How often `call` of the model, or of it compiled, comes to the kernel."""
    if mode == "eager":
        return counted(fuselage, partial(call, model))[0]
    run, seen = compiled(model)
    call(run)
    assert {*seen} <= {None, "mask", BOTH}
    return seen.count(BOTH)


def right(plain, exact, ids, rows=slice(None), **inputs):
    """What asserts it of a model."""
    return lambda run: assert_right(run, plain, exact, ids, rows, **inputs)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_no_mask_is_made(integration, window, device, name):
    exact, plain, patched = models(integration, name, device)
    run, seen = compiled(patched)
    assert_right(run, plain, exact, tokens(8, COLUMNS, device))
    assert seen == windows_of(plain)


@pytest.mark.parametrize("name", NAMES)
def test_eager(fuselage, integration, window, device, name):
    """Masks of ones are none: their values are known."""
    exact, plain, patched = models(integration, name, device)
    ids = tokens(8, COLUMNS, device)
    ones = torch.ones_like(ids)
    for inputs in ({}, {"attention_mask": ones}, {"attention_mask": ones.bool()}):
        call = right(plain, exact, ids, **inputs)
        assert calls_of(fuselage, patched, "eager", call) == 1
    assert patched.config._attn_implementation == "sdpa"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["compiled", "eager", "transformers", "torch"])
def test_gradients(fuselage, integration, window, device, mode):
    """Layers that run again in the backward are told of no window: the model is not, then."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    exact, plain, patched = models(integration, device=device)
    for model in (exact, plain, patched):
        model.train()
        if mode == "transformers":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif mode == "torch":
            checkpoint_wrapper.apply_activation_checkpointing(
                model, check_fn=lambda m: hasattr(m, "attn")
            )
    run, seen = compiled(patched)
    if mode != "compiled":
        run, seen = patched, []

    def gradients(model, called, seed):
        torch.manual_seed(seed)
        model.zero_grad()
        ids = tokens(2, COLUMNS, device)
        if model is patched and mode != "compiled":
            count, result = counted(fuselage, partial(states, called, ids))
            seen.append(BOTH if count else None)
        else:
            result = states(called, ids)
        result.square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return torch.cat([grad.flatten().float() for grad in grads])

    pairs = ((patched, run), (plain, plain), (exact, exact))
    assert_no_farther(*(lambda seed, m=m, c=c: gradients(m, c, seed) for m, c in pairs))
    assert (BOTH in seen) == (mode in ("compiled", "eager"))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize("columns", [DISTANCE - 1, DISTANCE, DISTANCE + 1, 2 * DISTANCE + 2])
def test_sizes_about_the_window(fuselage, integration, window, device, columns, mode):
    exact, plain, patched = models(integration, device=device)
    call = right(plain, exact, tokens(8, columns, device))
    assert calls_of(fuselage, patched, mode, call) == (1 if columns >= DISTANCE else 0)


@pytest.mark.long
def test_sizes_may_change(integration, window, device):
    """One graph serves all lengths that are longer than the window."""
    exact, plain, patched = models(integration, device=device)
    run, seen = compiled(patched, dynamic=True)
    for shape in ((4, COLUMNS), (6, 2 * DISTANCE + 5), (5, 3 * DISTANCE), (8, DISTANCE - 1)):
        assert_right(run, plain, exact, tokens(*shape, device))
    assert seen == [None, BOTH, None, None]


def given_masks(ids) -> dict:
    """Inputs that say more than a window, and the rows that count."""
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    padding[1, -9:] = 0
    whole = torch.ones(COLUMNS, COLUMNS, dtype=torch.bool, device=ids.device)
    near = whole.tril(3).triu(-3).expand(len(ids), 1, -1, -1)
    both = {"full_attention": near, "sliding_attention": near}
    return {
        "padding": ({"attention_mask": padding}, padding.bool()),
        "4d": ({"attention_mask": near}, slice(None)),
        "mapping": ({"attention_mask": both}, slice(None)),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["ModernBert", "Gemma3Text"])
@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize("given", ["padding", "4d", "mapping"])
def test_masks_that_are_given_stay(fuselage, integration, window, device, given, mode, name):
    exact, plain, patched = models(integration, name, device)
    ids = tokens(8, COLUMNS, device)
    inputs, rows = given_masks(ids)[given]
    call = right(plain, exact, ids, rows, **inputs)
    assert calls_of(fuselage, patched, mode, call) == 0


@pytest.mark.long
def test_a_compiled_model_does_not_know_a_mask_of_ones(integration, window, device):
    exact, plain, patched = models(integration, device=device)
    run, seen = compiled(patched)
    ids = tokens(8, COLUMNS, device)
    assert_right(run, plain, exact, ids, attention_mask=torch.ones_like(ids))
    assert seen == ["mask"] * 2


@pytest.mark.long
@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize("change", ["dim", "dropout", "float32"])
def test_heads_without_a_kernel(fuselage, integration, window, device, change, mode):
    options = {"dim": {"hidden_size": 48}, "dropout": {"attention_dropout": 0.5}}.get(change, {})
    exact, plain, patched = models(integration, device=device, **options)
    if change == "float32":
        patched.float()
    patched.train(change == "dropout")
    ids = tokens(8, COLUMNS, device)
    call = right(plain, exact, ids) if change != "dropout" else partial(states, ids=ids)
    assert calls_of(fuselage, patched, mode, call) == 0


@pytest.mark.long
def test_compiled_layers_of_an_eager_model(integration, window, device):
    """They are given the mask."""
    exact, plain, patched = models(integration, device=device)
    torch._dynamo.reset()
    for layer in patched.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert_right(patched, plain, exact, tokens(8, COLUMNS, device))


def test_the_window_is_seen_by_its_function(integration):
    """That of transformers is as far as its size to both sides; others are nearer, or one-sided."""
    from transformers import masking_utils as masking

    module = windows.module_of(integration)
    for size in (1, 2, 7, 512):
        function = masking.sliding_window_bidirectional_mask_function(size)
        assert module.is_window(function, module.both_ways(size))
        for left, right in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1)):
            other = module.Window(size + left, size + right)
            assert not module.is_window(function, other), other
        assert not module.is_window(masking.bidirectional_mask_function, module.both_ways(size))
        causal = masking.sliding_window_causal_mask_function(size)
        assert not module.is_window(causal, module.both_ways(size))


@pytest.mark.long
def test_another_function_of_the_model_keeps_the_masks(integration, window, monkeypatch):
    """What is asked for is compared when the model is patched."""
    from transformers import masking_utils as masking

    def nearer(size):
        return masking.and_masks(
            masking.sliding_window_bidirectional_overlay(size - 1),
            masking.bidirectional_mask_function,
        )

    monkeypatch.setattr(masking, "sliding_window_bidirectional_mask_function", nearer)
    exact, plain, patched = models(integration)
    run, seen = compiled(patched)
    assert_right(run, plain, exact, tokens(8, COLUMNS))
    assert seen == [None, "mask"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_packed_sequences_keep_their_masks(fuselage, integration, window, device, mode):
    """Of causal models, to which those with overlays belong, positions that start anew are others;
    encoders take no notice."""
    exact, plain, patched = models(integration, "Gemma3Text", device)
    positions = torch.cat([torch.arange(15), torch.arange(COLUMNS - 15)]).expand(8, -1).to(device)
    inputs = {"position_ids": positions, "use_cache": False}
    call = right(plain, exact, tokens(8, COLUMNS, device), **inputs)
    assert calls_of(fuselage, patched, mode, call) == 0
    exact, plain, patched = models(integration, "ModernBert", device)
    call = right(plain, exact, tokens(8, COLUMNS, device), position_ids=positions)
    assert calls_of(fuselage, patched, mode, call) == (mode == "eager")


@pytest.mark.long
@pytest.mark.parametrize("columns", [DISTANCE, DISTANCE + 1, DISTANCE + 2])
def test_an_overlay_over_a_few_tokens(fuselage, integration, window, device, columns):
    """All of them are within the window, or two of them are not."""
    exact, plain, patched = models(integration, "Gemma3Text", device)
    run, seen = compiled(patched)
    call = right(plain, exact, tokens(8, columns, device))
    call(run)
    assert seen == [BOTH if columns > DISTANCE else None, None]
    assert calls_of(fuselage, patched, "eager", call) == (columns > DISTANCE + 1)


@pytest.mark.parametrize("change", ["window", "rest", "attention"])
def test_another_overlay_keeps_the_masks(fuselage, integration, window, monkeypatch, change):
    """Of a window, of what has none, and of attention that is causal where it has no mask."""
    from transformers.models.gemma3 import modeling_gemma3

    if change == "window":
        overlay = modeling_gemma3._bidirectional_window_overlay
        name = "_bidirectional_window_overlay"
        monkeypatch.setattr(modeling_gemma3, name, lambda size: overlay(size - 1))
    elif change == "rest":
        make = modeling_gemma3.create_causal_mask

        def nearer(*args, or_mask_function, **kwargs):
            return make(*args, or_mask_function=lambda b, h, q, k: k - q < 500, **kwargs)

        monkeypatch.setattr(modeling_gemma3, "create_causal_mask", nearer)
    else:
        init = modeling_gemma3.Gemma3Attention.__init__

        def causal(self, *args, **kwargs):
            init(self, *args, **kwargs)
            self.is_causal = True

        monkeypatch.setattr(modeling_gemma3.Gemma3Attention, "__init__", causal)
    exact, plain, patched = models(integration, "Gemma3Text")
    assert "forward" not in vars(patched)
    call = right(plain, exact, tokens(8, COLUMNS))
    assert calls_of(fuselage, patched, "eager", call) == 0


def test_a_mask_that_must_be_made_is_made(integration, window, device):
    """As one that the model wants to append to another."""
    from transformers import masking_utils as masking

    models(integration)
    name = f"{integration.__name__.rpartition('.')[0]}._attention.both_ways_windows"
    call = {"batch_size": 1, "q_length": COLUMNS, "kv_length": COLUMNS, "local_size": DISTANCE}
    call |= {"mask_function": masking.sliding_window_bidirectional_mask_function(DISTANCE)}
    call |= {"allow_is_causal_skip": False, "device": device, "dtype": torch.bfloat16}
    functions = masking.ALL_MASK_ATTENTION_FUNCTIONS
    for skip in (True, False):
        made = functions[name](**call, allow_is_bidirectional_skip=skip)
        assert window.is_stand_in(made) == skip
        made = functions[f"{name}.marked"](**call, allow_is_bidirectional_skip=skip)
        assert window.window_of(made) == (BOTH if skip else None)
    across = call | {"kv_length": COLUMNS + 1, "allow_is_bidirectional_skip": True}
    for which in (name, f"{name}.marked"):
        assert window.window_of(functions[which](**across)) is None


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_causal_model_that_is_told_to_look_both_ways(integration, window, device, when):
    """Told after the patch, its window was not compared: it keeps its mask."""
    from integrations.models import build

    plain = build("Mistral", sliding_window=DISTANCE).bfloat16().to(device)
    patched = copy.deepcopy(plain)
    if when == "after":
        integration.patch(patched)
    for model in (plain, patched):
        model.config.is_causal = False
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    if when == "before":
        integration.patch(patched)
    run, seen = compiled(patched)
    ids = tokens(2, COLUMNS).to(device)
    with torch.no_grad():
        actual, expected = (m(input_ids=ids, use_cache=False).logits for m in (run, plain))
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    assert seen == [BOTH if when == "before" else "mask"] * 2
