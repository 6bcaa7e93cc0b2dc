"""Causal attention over sliding windows in patched models, without a mask."""

from __future__ import annotations

import copy
import sys
from functools import partial

import pytest
import torch
from integrations import windows
from integrations.models import (
    SIZES,
    assert_no_farther,
    build,
    half_of,
    randomise,
    tokens,
)
from integrations.windows import compiled, counted

COLUMNS, WINDOW = 40, 12
LEFT = (WINDOW - 1, 0)  # a token, and those before it
KINDS = ["sliding_attention", "full_attention"]
NAMES = {
    "Cohere2": {"layer_types": KINDS},
    "Gemma3": {"layer_types": KINDS},
    "Mistral": {},
    "ModernBertDecoder": {
        **{"local_attention": 2 * WINDOW, "layer_types": KINDS, "pad_token_id": 0},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
    },
    "Olmo3": {"layer_types": KINDS},
    "Phi3": {},
}


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


@pytest.fixture
def window(integration, device, monkeypatch):
    with windows.kernel(integration, device, monkeypatch) as module:
        yield module


def models(integration, name, device="cpu", **options):
    """In float32, in bfloat16, and that patched."""
    exact = build(name, device, **{"sliding_window": WINDOW, **NAMES[name], **options})
    plain = half_of(exact)
    patched = copy.deepcopy(plain)
    integration.patch(patched)
    return exact, plain, patched


def windows_of(model) -> list:
    kinds = getattr(model.config, "layer_types", None) or [KINDS[0]] * 2
    return [LEFT if kind == KINDS[0] else None for kind in kinds]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_no_mask_is_made(integration, window, device, name):
    exact, plain, patched = models(integration, name, device)
    run, seen = compiled(patched)
    ids = [tokens(2, COLUMNS, device) for _ in range(4)]
    with torch.no_grad():
        ours, theirs, right = (
            lambda i, m=m: m(input_ids=ids[i], use_cache=False).logits for m in (run, plain, exact)
        )
        assert_no_farther(ours, theirs, right)
    assert seen == windows_of(plain)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Gemma3", "Mistral"])
def test_gradients(integration, window, device, name):
    exact, plain, patched = models(integration, name, device)
    run, seen = compiled(patched)

    def gradients(model, called, seed):
        torch.manual_seed(seed)
        model.zero_grad()
        result = called(input_ids=tokens(2, COLUMNS, device), use_cache=False).logits
        result.square().mean().backward()
        return torch.cat([p.grad.flatten().float() for p in model.parameters()])

    assert_no_farther(
        lambda seed: gradients(patched, run, seed),
        lambda seed: gradients(plain, plain, seed),
        lambda seed: gradients(exact, exact, seed),
    )
    assert seen == windows_of(plain)


@pytest.mark.long
@pytest.mark.parametrize("columns", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_sizes_about_the_window(integration, window, device, columns):
    exact, plain, patched = models(integration, "Mistral", device)
    run, seen = compiled(patched)
    ids = tokens(2, columns, device)
    with torch.no_grad():
        results = [m(input_ids=ids, use_cache=False).logits for m in (run, plain, exact)]
    assert_no_farther(*(lambda _, r=r: r for r in results), seeds=1)
    assert seen == [LEFT if columns >= WINDOW else None] * 2


@pytest.mark.long
def test_sizes_may_change(integration, window, device):
    """One graph serves all lengths that are longer than the window."""
    exact, plain, patched = models(integration, "Mistral", device)
    run, seen = compiled(patched, dynamic=True)
    for shape in ((2, COLUMNS), (3, WINDOW + 5), (5, 3 * WINDOW), (4, WINDOW - 2)):
        ids = tokens(*shape, device)
        with torch.no_grad():
            results = [m(input_ids=ids, use_cache=False).logits for m in (run, plain, exact)]
        assert_no_farther(*(lambda _, r=r: r for r in results), seeds=1)
    assert seen == [LEFT] * 2 + [None] * 2


def test_a_mask_that_is_changed_is_a_mask(integration, window):
    """By a model, in place: a view of it, or all."""
    made = window.mask_of(window.causal(WINDOW), COLUMNS, torch.device("cpu"))
    for change in (lambda mask: mask[..., 0].fill_(True), torch.Tensor.logical_not_):
        mask = made.clone()
        window.mark(mask, window.causal(WINDOW))
        assert window.window_of(mask) == window.causal(WINDOW)
        change(mask)
        assert window.window_of(mask) is None
    with torch.inference_mode():  # where writes are not counted
        mask = made.clone()
        window.mark(mask, window.causal(WINDOW))
        assert window.window_of(mask) == window.causal(WINDOW)


def test_a_window_is_seen_by_its_function(integration, device):
    """Chunks have a local size, too."""
    from transformers import masking_utils as masking

    module = windows.module_of(integration)
    for size in (1, 2, 7, 512):
        causal = module.causal(size)
        assert module.is_window(masking.sliding_window_causal_mask_function(size), causal)
        assert not module.is_window(masking.sliding_window_causal_mask_function(size + 1), causal)
        assert not module.is_window(masking.causal_mask_function, causal)
        padding = torch.zeros(1, dtype=torch.long)
        if size > 1:
            chunks = masking.chunked_causal_mask_function(size, padding)
            assert not module.is_window(chunks, causal)
        both_ways = masking.sliding_window_bidirectional_mask_function(size)
        assert not module.is_window(both_ways, causal)
    nothing = masking.sliding_window_causal_mask_function(-1)
    assert not module.is_window(nothing, module.causal(-1))


@pytest.mark.long
@pytest.mark.parametrize("given", ["attention_mask", "position_ids", "4d"])
def test_what_is_given_needs_a_mask(integration, window, given):
    """Its values are not known."""
    exact, plain, patched = models(integration, "Mistral")
    run, seen = compiled(patched)
    ids = tokens(2, COLUMNS)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    positions = torch.cat([torch.arange(15), torch.arange(COLUMNS - 15)]).expand(2, -1)
    kept = torch.ones(COLUMNS, COLUMNS, dtype=torch.bool).tril().triu(-5).expand(2, 1, -1, -1)
    inputs = {
        "attention_mask": {"attention_mask": padding},
        "position_ids": {"position_ids": positions},
        "4d": {"attention_mask": kept},
    }[given]
    with torch.no_grad():
        results = [m(ids, use_cache=False, **inputs).logits for m in (run, plain, exact)]
    if given == "attention_mask":
        results = [r[padding.bool()] for r in results]
    assert_no_farther(*(lambda _, r=r: r for r in results), seeds=1)
    assert seen == ["mask"] * 2


@pytest.mark.parametrize("prompt", [COLUMNS, WINDOW - 4])
@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
@pytest.mark.slow
def test_caches(integration, window, device, cache, prompt):
    """A prompt that is longer than the window, or shorter, and what comes after it."""
    import transformers

    exact, plain, patched = models(integration, "Gemma3", device)
    run, seen = compiled(patched)
    options = {"max_cache_len": 2 * COLUMNS} if cache == "StaticCache" else {}
    make = getattr(transformers, cache)
    caches = [make(config=plain.config, **options) for _ in range(3)]
    ids = tokens(16, prompt + 6, device)
    parts = ids.split([prompt, 1, 1, 4], 1)
    results = []
    for model, cache_of in zip((run, plain, exact), caches):
        with torch.no_grad():
            made = (model(input_ids=i, past_key_values=cache_of, use_cache=True) for i in parts)
            results.append(torch.cat([each.logits for each in made], 1))
    assert_no_farther(*(lambda _, r=r: r for r in results), seeds=1)
    if cache == "DynamicCache":
        assert seen[:2] == [LEFT if prompt == COLUMNS else None, None]
        assert LEFT not in seen[2:]


@pytest.mark.long
@pytest.mark.parametrize("change", ["dim", "dropout", "float32"])
def test_heads_without_a_kernel(integration, window, device, change):
    """Attention makes the mask then."""
    options = {"dim": {"head_dim": 12}, "dropout": {"attention_dropout": 0.5}}.get(change, {})
    exact, plain, patched = models(integration, "Gemma3", device, **options)
    if change == "float32":
        patched.float()
    patched.train(change == "dropout")
    run, seen = compiled(patched)
    ids = tokens(2, COLUMNS, device)
    with torch.no_grad():
        ours = run(input_ids=ids, use_cache=False).logits
        if change != "dropout":
            results = (ours, *(m(input_ids=ids, use_cache=False).logits for m in (plain, exact)))
            assert_no_farther(*(lambda _, r=r: r for r in results), seeds=1)
    assert seen == ["mask", None]


def test_nothing_is_read_of_a_mask_without_values(integration, window):
    """FakeTensors have none, and a capture would end."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    attention = sys.modules[f"{integration.__name__.rpartition('.')[0]}._attention"]
    ones = torch.ones(2, 3)
    assert attention._is_of_ones(ones) and not attention._is_of_ones(ones.tril())
    with FakeTensorMode() as mode:
        assert not attention._is_of_ones(mode.from_tensor(ones))


def logits_of(model, ids, inputs):
    return model(input_ids=ids, **inputs).logits


@pytest.mark.parametrize("name", NAMES)
def test_eager(fuselage, integration, window, device, name):
    """Masks of ones are none: their values are known."""
    exact, plain, patched = models(integration, name, device)
    ids = tokens(8, COLUMNS, device)
    ones = torch.ones_like(ids)
    with torch.no_grad():
        theirs, right = (m(input_ids=ids).logits for m in (plain, exact))
        others = ({"use_cache": False}, {"output_attentions": False})
        for inputs in ({}, {"attention_mask": ones}, *others):
            called, ours = counted(fuselage, partial(logits_of, patched, ids, inputs))
            assert_no_farther(*(lambda _, r=r: r for r in (ours, theirs, right)), seeds=1)
            assert called == len([w for w in windows_of(plain) if w])
    assert patched.config._attn_implementation == "sdpa"


@pytest.mark.long
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", ["Gemma3", "Mistral"])
def test_autocast(fuselage, integration, window, device, name, compiles):
    """Weights of float32, as trainers have them: attention is in half precision, and has windows.
    Without autocast it has none."""
    exact = build(name, device, **{"sliding_window": WINDOW, **NAMES[name]})
    patched = copy.deepcopy(exact)
    integration.patch(patched)
    run, seen = compiled(patched)
    ids = tokens(8, COLUMNS, device)

    def gradients(model, called, autocasts):
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocasts):
            logits = called(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        return torch.cat([logits.flatten(), *(p.grad.flatten() for p in model.parameters())])

    right, theirs = (gradients(exact, exact, autocasts) for autocasts in (False, True))
    if compiles:
        ours = gradients(patched, run, True)
        assert seen == windows_of(exact)
    else:
        called, ours = counted(fuselage, lambda: gradients(patched, patched, True))
        assert called == windows_of(exact).count(LEFT)
        called, same = counted(fuselage, lambda: gradients(patched, patched, False))
        assert called == 0
        torch.testing.assert_close(same, right)
    assert_no_farther(*(lambda _, r=r: r for r in (ours, theirs, right)), seeds=1)


@pytest.mark.parametrize("given", ["padding", "positions", "4d", "short"])
def test_eager_masks_that_are_more(fuselage, integration, window, device, given):
    exact, plain, patched = models(integration, "Mistral", device)
    ids = tokens(8, COLUMNS if given != "short" else WINDOW - 1, device)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    positions = torch.cat([torch.arange(15), torch.arange(COLUMNS - 15)]).expand(8, -1)
    inputs = {
        "padding": {"attention_mask": padding},
        "positions": {"position_ids": positions.to(device), "use_cache": False},
        "4d": {"attention_mask": torch.ones(8, 1, COLUMNS, COLUMNS, device=device).tril().bool()},
        "short": {},
    }[given]
    kept = padding.bool() if given == "padding" else torch.ones_like(padding).bool()
    with torch.no_grad():
        called, ours = counted(fuselage, partial(logits_of, patched, ids, inputs))
        results = (ours, *(m(input_ids=ids, **inputs).logits for m in (plain, exact)))
    assert_no_farther(*(lambda _, r=r: r[kept] for r in results), seeds=1)
    assert called == 0


@pytest.mark.long
@pytest.mark.parametrize("again", [None, "transformers", "torch", "FSDP2"])
def test_eager_training(fuselage, integration, window, device, again):
    """Layers that run again in the backward are told of no window: the model is not, then."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    exact, plain, patched = models(integration, "Gemma3", device)
    for model in (exact, plain, patched):
        model.train()
        if again == "transformers":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif again is not None:
            checkpoint_wrapper.apply_activation_checkpointing(
                model, check_fn=lambda m: hasattr(m, "self_attn")
            )
        if again == "FSDP2":  # as fully_shard does
            for layer in model.model.layers:
                kind = type(layer)
                layer.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})
    used = []

    def gradients(model, seed):
        torch.manual_seed(seed)
        model.zero_grad()
        ids = tokens(2, COLUMNS, device)
        called, result = counted(fuselage, partial(logits_of, model, ids, {"use_cache": False}))
        if model is patched:
            used.append(called)
        result.square().mean().backward()
        return torch.cat([p.grad.flatten().float() for p in model.parameters()])

    assert_no_farther(*(lambda seed, m=m: gradients(m, seed) for m in (patched, plain, exact)))
    assert set(used) == {1 if again is None else 0}


@pytest.mark.long
def test_compiled_layers_of_an_eager_model(integration, window, device):
    """They are given the mask."""
    exact, plain, patched = models(integration, "Gemma3", device)
    torch._dynamo.reset()
    for layer in patched.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    ids = tokens(8, COLUMNS, device)
    with torch.no_grad():
        results = [m(input_ids=ids, use_cache=False).logits for m in (patched, plain, exact)]
    assert_no_farther(*(lambda _, r=r: r for r in results), seeds=1)


@pytest.mark.slow
def test_eager_generation(fuselage, integration, window, device):
    """The prompt has windows, and tokens after it do not."""
    _, plain, patched = models(integration, "Gemma3", device)
    ids = tokens(2, COLUMNS, device)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    called, ours = counted(fuselage, lambda: patched.generate(ids, **options))
    assert called == 1
    theirs = plain.generate(ids, **options)
    # Random weights have near ties, which roundings decide.
    assert (ours == theirs).float().mean() > 0.9


@pytest.mark.parametrize("name", ["causal", "windows", "both_ways_windows", "unmasked"])
def test_a_mask_with_something_laid_over_it_is_made(integration, window, name):
    """Also where it is known that nothing is packed. Such masks are made by vmap."""
    from transformers import masking_utils as masking

    integration.patch(build("Mistral", sliding_window=WINDOW))
    functions = masking.ALL_MASK_ATTENTION_FUNCTIONS
    function = functions[f"{integration.__name__.rpartition('.')[0]}._attention.{name}"]
    overlaid = masking.or_masks(
        masking.causal_mask_function, lambda batch, head, q, k: (q < 3) & (k < 3)
    )
    options = {"batch_size": 1, "q_length": 6, "kv_length": 6, "q_offset": 0, "kv_offset": 0}
    options |= {"mask_function": overlaid, "use_vmap": True, "allow_is_causal_skip": False}
    for size in (None, 6):
        made = function(**options, local_size=size, device="cpu", dtype=torch.bfloat16)
        assert made is not None and made[0, 0, 0, 2] and not made[0, 0, 0, 3]


def test_another_formula_has_no_kernel(integration, window, device):
    """What transformers refuses for its own attention, it refuses with a window, too."""
    from transformers import AttentionInterface

    _, _, patched = models(integration, "Mistral")
    name = f"{integration.__name__.rpartition('.')[0]}._attention.windows.marked"
    options = {"dtype": torch.bfloat16, "device": device}
    q, k, v = (torch.randn(1, heads, COLUMNS, 16, **options) for heads in (4, 2, 2))
    mask = window.mask_of(window.causal(WINDOW), COLUMNS, torch.device(device))
    window.mark(mask, window.causal(WINDOW))
    given = (patched.model.layers[0].self_attn, q, k, v, mask)
    out, _ = AttentionInterface()[name](*given, scaling=0.25)
    expected, _ = AttentionInterface()["sdpa"](*given, scaling=0.25)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)

    class Other(torch.Tensor):
        """As DTensors are, for which PyTorch may have no rule."""

    assert window.takes(q, k, v, 0.0) and not window.takes(q.as_subclass(Other), k, v, 0.0)
    with pytest.raises(ValueError, match="softcap"):
        AttentionInterface()[name](*given, softcap=5.0)


def with_images(device):
    """A Gemma 3 as its checkpoints are: the masks are made outside of its language model."""
    import transformers

    kinds = {"sliding_window": WINDOW, "layer_types": KINDS}
    text = SIZES | {"num_attention_heads": 4, "head_dim": 16, "pad_token_id": 0} | kinds
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    numbers = {"image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, **numbers
    )
    exact = transformers.Gemma3ForConditionalGeneration(config).to(device).eval()
    randomise(exact)
    return exact, half_of(exact)


@pytest.mark.parametrize("mode", ["compiled", "eager", "image", "compiled image"])
def test_a_model_of_text_and_images(fuselage, integration, window, device, mode):
    """Text alone has windows. An image is seen from both sides: it has a mask."""
    exact, plain = with_images(device)
    patched = copy.deepcopy(plain)
    integration.patch(patched)
    ids = torch.randint(0, 400, (8, COLUMNS), device=device)
    inputs = {"use_cache": False}
    if "image" in mode:
        ids[:, 3:7] = 500
        inputs["token_type_ids"] = (ids == 500).long()
        inputs["pixel_values"] = torch.randn(8, 3, 28, 28, device=device)
    run = patched
    if "compiled" in mode:
        torch._dynamo.reset()
        run = torch.compile(patched, backend="aot_eager")
    results = []
    for model, dtype in ((plain, torch.bfloat16), (exact, torch.float32)):
        own = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors(inputs)}
        with torch.no_grad():
            results.append(model(input_ids=ids, **(inputs | own)).logits)
    own = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors(inputs)}
    with torch.no_grad():
        called, ours = counted(fuselage, partial(logits_of, run, ids, inputs | own))
    assert_no_farther(*(lambda _, r=r: r for r in (ours, *results)), seeds=1)
    assert called == (0 if "image" in mode else 1)
    assert patched.config.text_config._attn_implementation == "sdpa"


def tensors(inputs):
    return [(k, v) for k, v in inputs.items() if isinstance(v, torch.Tensor)]
