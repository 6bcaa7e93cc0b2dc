"""What attention of a patched and compiled causal model is given: a mask, or `is_causal`."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from integrations import zoo
from integrations.models import assert_close, build, logits, tokens

WHAT = "causal attention without a mask, if compiled"
# Of the zoo: positions that are embedded or counted otherwise, experts, hybrids, and the decoder of
# a model with an encoder.
ARCHITECTURES = (
    "exaone4",
    "gpt2",
    "gpt_neox",
    "granitemoe",
    "llama4_text",
    "minimax",
    "mixtral",
    "modernbert-decoder",
    "olmo_hybrid",
    "qwen3_moe",
    "whisper",
)
NAMES = ("Llama", "Qwen3", "Mistral", "Gemma3", "Olmo2", "Phi3", "Cohere2", "SmolLM3")
COLUMNS = 16


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


def patched(integration, plain):
    model = copy.deepcopy(plain)
    assert WHAT in integration.patch(model).replaced.values()
    return model


def compiled(model, dynamic=None):
    """The model compiled whole, and of each attention in its graphs whether it is told causal, and
    whether it has a mask."""
    seen: list[tuple[bool, bool]] = []

    def backend(graph, inputs):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        for node in (node for part in parts for node in part.graph.nodes):
            if "scaled_dot_product_attention" in str(node.target):
                has_mask = node.kwargs.get("attn_mask") is not None
                seen.append((bool(node.kwargs.get("is_causal")), has_mask))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend), seen


CAUSAL, MASKED, OPEN = (True, False), (False, True), (False, False)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_a_compiled_model_makes_no_mask(integration, name, training):
    """As a training step has no cache: nothing tells the plain model that nothing is packed."""
    plain = build(name)
    model, ids = patched(integration, plain), tokens()
    results, graphs = [], []
    for each in (plain, model):
        run, seen = compiled(each)
        with torch.set_grad_enabled(training):
            results.append(run(input_ids=ids, use_cache=False).logits)
        graphs.append(seen)
        assert each.config._attn_implementation == "sdpa"
    assert graphs == [[MASKED] * 2, [CAUSAL] * 2]
    with torch.set_grad_enabled(training):
        expected = plain(input_ids=ids, use_cache=False).logits
    for result in results:
        assert_close(result.detach(), expected.detach())
    if training:
        results[1].square().mean().backward()
        ours = [parameter.grad for parameter in model.parameters()]
        expected.square().mean().backward()
        for (key, theirs), grad in zip(plain.named_parameters(), ours, strict=True):
            assert_close(grad, theirs.grad, key, tol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(integration, name):
    plain, inputs = zoo.make("causal", name)
    run, seen = compiled(patched(integration, plain))
    actual = zoo.output(run, inputs | {"use_cache": False})
    assert_close(actual.detach(), zoo.output(plain, inputs).detach(), tol=1e-4)
    assert seen and set(seen) == {CAUSAL}


@pytest.mark.long
def test_sizes_may_change(integration):
    """One graph serves all lengths and batches."""
    plain = build("Llama")
    run, seen = compiled(patched(integration, plain), dynamic=True)
    for shape in ((2, 16), (3, 24), (5, 7)):
        ids = tokens(*shape)
        assert_close(
            run(input_ids=ids, use_cache=False).logits.detach(), logits(plain, ids).detach()
        )
    assert seen == [CAUSAL] * 2


@pytest.mark.slow
def test_a_cache_that_grows(integration):
    """The prompt makes it, and each token after it attends to all of it."""
    plain = build("Llama")
    run, seen = compiled(patched(integration, plain))
    ids, theirs, ours = tokens(), None, None
    with torch.no_grad():
        for part in (ids, ids[:, :1], ids[:, 1:2]):
            expected = plain(input_ids=part, past_key_values=theirs, use_cache=True)
            actual = run(input_ids=part, past_key_values=ours, use_cache=True)
            assert_close(actual.logits, expected.logits)
            theirs, ours = expected.past_key_values, actual.past_key_values
        assert set(seen) == {CAUSAL, OPEN}
        # Several tokens after others need a mask: `is_causal` counts from the first key.
        expected = plain(input_ids=ids[:, :3], past_key_values=theirs)
        actual = run(input_ids=ids[:, :3], past_key_values=ours)
    assert_close(actual.logits, expected.logits)
    assert seen[-1] == MASKED


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.slow
def test_a_static_cache(integration, name):
    """Where it begins is a tensor, once it has memory: its value is not known."""
    from transformers import StaticCache

    plain = build(name)
    run, seen = compiled(patched(integration, plain))
    caches = [StaticCache(config=plain.config, max_cache_len=32) for _ in range(2)]
    ids = tokens()
    with torch.no_grad():
        for part in (ids, ids[:, :1], ids[:, 1:2], ids[:, :3]):
            expected = plain(input_ids=part, past_key_values=caches[0]).logits
            assert_close(run(input_ids=part, past_key_values=caches[1]).logits, expected)
    assert seen[:2] == [CAUSAL] * 2 and set(seen[2:]) == {MASKED}


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_no_key_is_copied_for_one_token(integration, masked):
    """Heads that share keys are queries of one head: with a static cache, and with a mask, too."""
    from transformers import StaticCache

    plain = build("Llama")
    ids, shapes = tokens(), {}
    mask = torch.ones(ids.shape[0], ids.shape[1] + 1, dtype=torch.long)
    mask[0, :5] = 0
    inputs = {"attention_mask": mask} if masked else {}
    results = []
    with torch.no_grad():
        for name, model in (("plain", plain), ("patched", patched(integration, plain))):
            cache = StaticCache(config=plain.config, max_cache_len=32)
            first = {k: v[:, :-1] for k, v in inputs.items()}
            plain(input_ids=ids, past_key_values=cache, **first)
            shapes[name] = []

            def backend(graph, inputs, found=shapes[name]):
                for node in graph.graph.nodes:
                    if "scaled_dot_product_attention" in str(node.target):
                        q, k = (node.args[i].meta["example_value"].shape for i in range(2))
                        found.append((q[1], q[2], k[1]))
                return graph.forward

            torch._dynamo.reset()
            run = torch.compile(model, fullgraph=True, backend=backend)
            results.append(run(input_ids=ids[:, :1], past_key_values=cache, **inputs).logits)
    assert_close(results[1], results[0])
    assert shapes == {"plain": [(4, 1, 4)] * 2, "patched": [(2, 2, 2)] * 2}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.slow
def test_generation(integration, cache, side):
    plain = build("Qwen3")
    model = patched(integration, plain)
    model.forward, _ = compiled(model.forward, dynamic=True)
    ids = tokens()
    mask = torch.ones_like(ids)
    if side is not None:
        mask[0, :5] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    expected = plain.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Mistral", "Gemma3", "Cohere2"])
@pytest.mark.parametrize("window", [COLUMNS - 4, COLUMNS, COLUMNS + 1])
def test_a_sliding_window(integration, name, window):
    """A window that all tokens lie within is no window."""
    kinds = ["sliding_attention", "full_attention"]
    if name == "Mistral":
        kinds = ["sliding_attention"] * 2
    kind_of = {} if name == "Mistral" else {"layer_types": kinds}
    plain = build(name, sliding_window=window, **kind_of)
    run, seen = compiled(patched(integration, plain))
    ids = tokens(2, COLUMNS)
    with torch.no_grad():
        actual = run(input_ids=ids, use_cache=False).logits
        assert_close(actual, plain(input_ids=ids, use_cache=False).logits)
    needs = [kind == "sliding_attention" and window <= COLUMNS for kind in kinds]
    assert seen == [MASKED if needed else CAUSAL for needed in needs]


@pytest.mark.long
def test_padding(integration):
    plain = build("Llama")
    run, seen = compiled(patched(integration, plain))
    ids = tokens()
    for padded in (slice(0, 5), slice(12, 16)):
        mask = torch.ones_like(ids)
        mask[0, padded] = 0
        for given in ((ids, mask), (ids,)):  # by its place, and by its name
            names = {} if len(given) == 2 else {"attention_mask": mask}
            actual = run(*given, use_cache=False, **names).logits
            expected = plain(ids, attention_mask=mask, use_cache=False).logits
            assert_close(actual[mask.bool()].detach(), expected[mask.bool()].detach())
    assert set(seen) == {MASKED}


@pytest.mark.long
def test_a_mask_of_the_caller(integration):
    plain = build("Llama")
    run, seen = compiled(patched(integration, plain))
    ids = tokens()
    mask = torch.rand(2, 1, COLUMNS, COLUMNS) > 0.3
    mask |= torch.eye(COLUMNS, dtype=torch.bool)
    expected = plain(ids, attention_mask=mask, use_cache=False).logits
    assert_close(run(ids, attention_mask=mask, use_cache=False).logits.detach(), expected.detach())
    assert seen == [MASKED] * 2


@pytest.mark.long
def test_packed_sequences(integration):
    """Positions that start anew are several sequences; what the positions are is not known."""
    plain = build("Llama")
    run, seen = compiled(patched(integration, plain))
    ids = tokens()
    positions = torch.cat([torch.arange(6), torch.arange(10)]).expand(2, -1)
    actual = run(ids, position_ids=positions, use_cache=False).logits.detach()
    assert_close(actual, plain(ids, position_ids=positions, use_cache=False).logits.detach())
    apart = plain(ids[:, 6:], use_cache=False).logits.detach()
    assert_close(actual[:, 6:], apart, tol=1e-4)
    assert seen == [MASKED] * 2


@pytest.mark.long
def test_checkpointed_layers(integration):
    plain = build("Llama")
    model, ids = patched(integration, plain).train(), tokens()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run, seen = compiled(model)
    run(input_ids=ids, use_cache=False).logits.square().mean().backward()
    logits(plain, ids).square().mean().backward()
    assert set(seen) == {CAUSAL}
    for (key, theirs), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert_close(parameter.grad, theirs.grad, key, tol=1e-4)


@pytest.mark.long
def test_another_implementation_stays(integration):
    """Whatever the model was told, before the patch or since."""
    plain = build("Llama")
    model, ids = patched(integration, plain), tokens()
    model.set_attn_implementation("eager")
    run, seen = compiled(model)
    actual = run(input_ids=ids, use_cache=False).logits.detach()
    assert_close(actual, logits(plain, ids).detach())
    assert model.config._attn_implementation == "eager" and not seen


@pytest.mark.long
def test_a_model_that_looks_both_ways(integration):
    """`config.is_causal` of False: its mask has nothing to do with `is_causal` of attention."""
    plain = build("Llama")
    model, ids = patched(integration, plain), tokens()
    for each in (plain, model):
        each.config.is_causal = False
        for layer in each.model.layers:
            layer.self_attn.is_causal = False
    expected = plain(input_ids=ids, use_cache=False).logits.detach()
    run, _ = compiled(model)
    assert_close(run(input_ids=ids, use_cache=False).logits.detach(), expected)
    assert WHAT not in integration.patch(copy.deepcopy(plain)).replaced.values()


def test_what_has_no_causal_mask_of_its_own_stays(integration):
    import transformers

    small = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**small, num_heads=2, decoder_start_token_id=0)
    )
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    for model in (t5, transformers.BertModel(config), torch.nn.Sequential(torch.nn.ReLU())):
        assert WHAT not in integration.patch(model).replaced.values()


@pytest.mark.long
def test_unpatched_it_makes_its_mask_again(integration):
    plain = build("Llama")
    model = patched(integration, plain)
    count = integration.unpatch(model)
    assert count and "forward" not in vars(model.model)
    run, seen = compiled(model)
    run(input_ids=tokens(), use_cache=False)
    assert seen == [MASKED] * 2


def test_the_signature_stays(integration):
    """Trainers and PEFT ask for it."""
    plain = build("Llama")
    model = patched(integration, plain)
    assert inspect.signature(model.model.forward) == inspect.signature(plain.model.forward)


def test_the_probe_runs_no_layer(integration):
    """The layers of a model may be anywhere, and large."""
    model = build("Llama")
    calls = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *args: calls.append(args))
    config = copy.deepcopy(model.config)
    integration.patch(model)
    assert not calls and config.to_dict() == model.config.to_dict()
    assert model.config._attn_implementation == config._attn_implementation
