"""What attention of a patched and compiled encoder is given: a mask only where something is masked.

Before Torch 2.13, `torch.compiler.is_exporting` was true while torch.compile traced, so that
transformers left no mask out. Here transformers is told so, whatever the Torch.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from integrations import zoo
from integrations.models import assert_close

WHAT = "attention without a mask, if compiled"
TOKENS = (
    "albert",
    "bert",
    "distilbert",
    "electra",
    "ernie",
    "modernbert",
    "roberta",
    "xlm-roberta",
)
# "wav2vec2" adds and normalises in the module that makes the mask.
OTHERS = (
    *(("vision", name) for name in ("beit", "deit", "dinov2", "ijepa", "vit")),
    *(("speech", name) for name in ("hubert", "sew", "wav2vec2")),
)
WITH_DECODERS = ("bart", "m2m_100", "marian", "pegasus", "plbart", "t5", "umt5")


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


@pytest.fixture
def old_torch(monkeypatch) -> None:
    """Tracing looks like an export."""
    masking = pytest.importorskip("transformers.masking_utils")
    monkeypatch.setattr(masking, "is_torchdynamo_exporting", torch.compiler.is_compiling)


@pytest.fixture(params=["old Torch", "Torch as it is"])
def either_torch(request) -> None:
    if request.param == "old Torch":
        request.getfixturevalue("old_torch")


def patched(integration, plain):
    model = copy.deepcopy(plain)
    report = integration.patch(model)
    assert any(what.endswith(WHAT) for what in report.replaced.values()), str(report)
    return model


def compiled(model, dynamic=None):
    """The model compiled whole, and of each attention in its graphs whether it has a mask."""
    seen: list[bool] = []

    def backend(graph, inputs):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        for node in (node for part in parts for node in part.graph.nodes):
            if "scaled_dot_product_attention" in str(node.target):
                seen.append(node.kwargs.get("attn_mask") is not None)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend), seen


def padding(rows: int = 2, columns: int = 12) -> torch.Tensor:
    mask = torch.ones(rows, columns, dtype=torch.long)
    mask[0, columns - 5 :] = 0
    mask[1, :2] = 0
    return mask


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "bert" else pytest.mark.slow) for n in TOKENS]
)
def test_an_encoder_makes_no_mask(integration, either_torch, name):
    """ModernBERT's window is wider than the rows are here."""
    plain, inputs = zoo.make("encoder", name)
    run, seen = compiled(patched(integration, plain))
    with torch.no_grad():
        expected = plain(**inputs).logits
        assert_close(run(**inputs).logits, expected)
        assert seen and not any(seen)


@pytest.mark.long
def test_a_plain_one_makes_a_mask(old_torch):
    """Else the tests here would say nothing."""
    plain, inputs = zoo.make("encoder", "bert")
    run, seen = compiled(plain)
    run(**inputs)
    assert seen == [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), OTHERS)
def test_other_encoders(integration, old_torch, family, name):
    plain, inputs = zoo.make(family, name)
    run, seen = compiled(patched(integration, plain))
    with torch.no_grad():
        assert_close(zoo.output(run, inputs), zoo.output(plain, inputs), tol=1e-4)
    assert seen and not any(seen)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_DECODERS)
def test_encoders_and_decoders(integration, old_torch, name):
    """Attention across looks at other tokens; that of the decoder is causal."""
    plain, inputs = zoo.make("seq2seq", name)
    inputs = inputs | {"use_cache": False}
    run, seen = compiled(patched(integration, plain))
    with torch.no_grad():
        expected = plain(**inputs).logits
        assert_close(run(**inputs).logits, expected, tol=1e-4)
        # The bias of positions goes in as a mask: it stays.
        has_bias = name in ("t5", "umt5")
        assert has_bias or (seen and not any(seen))
        padded = inputs | {"attention_mask": padding()}
        expected = plain(**padded).logits
        assert_close(run(**padded).logits, expected, tol=1e-4)
        assert any(seen[len(seen) // 2 :])


def masking_nodes(model, inputs) -> int:
    """The comparisons and choices in the graph of a compiled model: what makes masks."""
    found = []

    def backend(graph, _):
        names = [str(node.target).rpartition(".")[2] for node in graph.graph.nodes]
        found.extend(name for name in names if name in ("ge", "where", "bitwise_and"))
        found.extend(n for n in graph.graph.nodes if "built-in function ge" in str(n.target))
        found.extend(n for n in graph.graph.nodes if "built-in method where" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=backend)(**inputs)
    return len(found)


@pytest.mark.long
def test_a_position_bias_stays(integration, old_torch):
    """And no mask is made to lay over it."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    plain = transformers.T5EncoderModel(transformers.T5Config(**sizes, num_heads=4)).eval()
    for block in plain.encoder.block:
        if block.layer[0].SelfAttention.has_relative_attention_bias:
            torch.nn.init.normal_(block.layer[0].SelfAttention.relative_attention_bias.weight)
    model, ids = patched(integration, plain), torch.randint(0, 99, (2, 12))
    run, seen = compiled(model)
    with torch.no_grad():
        expected = plain(ids).last_hidden_state
        assert_close(run(ids).last_hidden_state, expected)
        assert seen == [True] * 2
        more = masking_nodes(plain, {"input_ids": ids}) - masking_nodes(model, {"input_ids": ids})
    assert more > 0
    bare = copy.deepcopy(plain)
    torch.nn.init.zeros_(
        bare.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    )
    assert not torch.allclose(bare(ids).last_hidden_state, expected, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "modernbert", "roberta"])
def test_padding(integration, either_torch, name):
    """Values that are not known: the mask stays, of ones too."""
    plain, inputs = zoo.make("encoder", name)
    run, seen = compiled(patched(integration, plain))
    with torch.no_grad():
        for mask in (padding(), torch.ones(2, 12, dtype=torch.long), padding().bool()):
            for given in ({"attention_mask": mask}, {"attention_mask": mask, **inputs}):
                given = inputs | given
                expected, rows = plain(**given).logits, mask.bool()
                assert_close(run(**given).logits[rows], expected[rows])
        unmasked = plain(**inputs).logits
    assert seen and all(seen)
    assert not torch.allclose(
        unmasked[0, 0], plain(**inputs, attention_mask=padding()).logits[0, 0]
    )


@pytest.mark.slow
def test_with_and_without_padding_by_turns(integration, old_torch):
    """One model, two graphs."""
    plain, inputs = zoo.make("encoder", "bert")
    run, seen = compiled(patched(integration, plain))
    with torch.no_grad():
        for mask in (None, padding(), None, padding()):
            given = inputs | {"attention_mask": mask}
            assert_close(run(**given).logits, plain(**given).logits)
    assert seen == [False, False, True, True]


@pytest.mark.long
def test_a_mask_of_the_caller(integration, old_torch):
    """Of queries by keys."""
    plain, inputs = zoo.make("encoder", "bert")
    mask = (torch.rand(2, 1, 12, 12) > 0.4) | torch.eye(12, dtype=torch.bool)
    run, seen = compiled(patched(integration, plain))
    with torch.no_grad():
        given = inputs | {"attention_mask": mask}
        assert_close(run(**given).logits, plain(**given).logits)
    assert seen == [True] * 2


@pytest.mark.long
@pytest.mark.parametrize("columns", [8, 12])
def test_a_sliding_window(integration, either_torch, columns):
    """That of ModernBERT goes both ways; within it, it is none."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "local_attention": 18, "pad_token_id": 0},
        layer_types=["full_attention", "sliding_attention"],
    )
    plain = transformers.ModernBertModel(config).eval()
    window = config.sliding_window
    ids = torch.randint(4, 99, (2, columns))
    run, seen = compiled(patched(integration, plain))
    with torch.no_grad():
        assert_close(run(ids).last_hidden_state, plain(ids).last_hidden_state)
    assert seen == [False, columns >= window] and 8 < window <= 12


def cross_attending(**options):
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "is_decoder": True, "add_cross_attention": True},
        **options,
    )
    return transformers.BertLMHeadModel(config).eval()


@pytest.mark.slow
def test_cross_attention(integration, either_torch):
    """A BERT that decodes: causal in itself, and across it looks at all that is not padding."""
    plain = cross_attending()
    run, seen = compiled(patched(integration, plain))
    ids, states = torch.randint(0, 99, (2, 7)), torch.randn(2, 12, 32)
    given = {"input_ids": ids, "encoder_hidden_states": states, "use_cache": False}
    with torch.no_grad():
        assert_close(run(**given).logits, plain(**given).logits)
        assert seen == [False] * 4
        given["encoder_attention_mask"] = padding()
        assert_close(run(**given).logits, plain(**given).logits)
        assert seen[4:] == [False, True] * 2
        given["attention_mask"] = padding(2, 7)
        rows = given["attention_mask"].bool()
        assert_close(run(**given).logits[rows], plain(**given).logits[rows])
    assert seen[8:] == [True] * 4


@pytest.mark.slow
def test_a_cache(integration, old_torch):
    """Several tokens after others need a mask, whatever else is known."""
    plain = cross_attending()
    run, seen = compiled(patched(integration, plain))
    ids, states = torch.randint(0, 99, (2, 7)), torch.randn(2, 12, 32)
    caches = [None, None]
    with torch.no_grad():
        for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            given = {"input_ids": part, "encoder_hidden_states": states, "use_cache": True}
            outputs = [
                call(**given, past_key_values=cache) for call, cache in zip((plain, run), caches)
            ]
            assert_close(outputs[1].logits, outputs[0].logits)
            caches = [output.past_key_values for output in outputs]
    assert seen[-4:] == [True, False] * 2 and not any(seen[:-4])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_eager_attention_stays(integration, old_torch, when):
    """Also for the attentions that it can return."""
    plain, inputs = zoo.make("encoder", "bert")
    if when == "before":
        plain.set_attn_implementation("eager")
    model = patched(integration, plain)
    for each in (plain, model):
        each.set_attn_implementation("eager")
    run, seen = compiled(model)
    for mask in (None, padding()):
        given = inputs | {"attention_mask": mask, "output_attentions": True}
        with torch.no_grad():
            model(**given)  # sets the hooks that record them, which cannot be traced
            actual, expected = run(**given), plain(**given)
        assert_close(actual.logits, expected.logits)
        assert len(actual.attentions) == 2
        for ours, theirs in zip(actual.attentions, expected.attentions, strict=True):
            assert_close(ours, theirs)
    assert not seen and model.config._attn_implementation == "eager"


@pytest.mark.slow
def test_a_graph_that_breaks(integration, old_torch):
    """As it does in attention, where it warns that it returns no attentions."""
    plain, inputs = zoo.make("encoder", "bert")
    model = patched(integration, plain)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager")
    with torch.no_grad():
        for mask in (None, padding()):
            given = inputs | {"attention_mask": mask, "output_attentions": True}
            actual, expected = run(**given), plain(**given)
            assert_close(actual.logits, expected.logits)
            assert repr(actual.attentions) == repr(expected.attentions)
            assert model.config._attn_implementation == "sdpa"


@pytest.mark.long
def test_training(integration, old_torch):
    plain, inputs = zoo.make("encoder", "bert")
    model = patched(integration, plain)
    run, seen = compiled(model)
    run(**inputs).logits.square().mean().backward()
    plain(**inputs).logits.square().mean().backward()
    assert seen == [False] * 2
    for (key, theirs), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        # That of a bias of keys is noise around zero, as a softmax takes no notice of it.
        if theirs.grad is not None and not key.endswith("key.bias"):
            assert_close(parameter.grad, theirs.grad, key, tol=1e-4)


@pytest.mark.slow
def test_sizes_may_change(integration, old_torch):
    plain, _ = zoo.make("encoder", "bert")
    run, seen = compiled(patched(integration, plain), dynamic=True)
    for shape in ((2, 16), (3, 24), (5, 7)):
        ids = torch.randint(4, 99, shape)
        with torch.no_grad():
            assert_close(run(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert seen == [False] * 2


@pytest.mark.long
def test_an_overlay_stays(fuselage, old_torch):
    """Of a mask that looks both ways, and one that must be made whatever is known."""
    masking = pytest.importorskip("transformers.masking_utils")
    make = masking.create_bidirectional_mask

    class Body(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, x, **options):
            return make(self.config, x, None, **options)

    plain, _ = zoo.make("encoder", "bert")
    body = Body(plain.config)
    attention = importlib.import_module(f"{fuselage.__name__}.integrations._attention")
    function = attention._forward(Body, None, attention._UNMASKED, None)
    attention._register(masking)
    x = torch.randn(2, 6, 32)

    def apart(batch, head, query, key):
        return (query - key).abs() != 2

    def run(**options):
        torch._dynamo.reset()
        return torch.compile(lambda: function(body, x, **options), backend="eager")()

    assert run() is None
    assert run(allow_is_bidirectional_skip=False).all()
    mask = run(and_mask_function=apart)
    rows = torch.arange(6)
    assert torch.equal(mask[0, 0], (rows[:, None] - rows).abs() != 2)


@pytest.mark.long
def test_unpatched_it_is_as_it_was(integration, old_torch):
    plain, inputs = zoo.make("speech", "wav2vec2")
    model = patched(integration, plain)
    encoder = model.wav2vec2.encoder
    assert "forward" in vars(encoder)
    again = integration.patch(model)
    assert again.replaced == integration.patch(copy.deepcopy(plain)).replaced
    integration.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())
    run, seen = compiled(model)
    with torch.no_grad():
        assert torch.equal(zoo.output(run, inputs), zoo.output(plain, inputs))
    assert set(seen) == {True}


def test_a_fusion_goes_on_within(integration):
    """The encoder of wav2vec 2 adds, normalises and makes the mask."""
    plain, inputs = zoo.make("speech", "wav2vec2")
    model = copy.deepcopy(plain)
    replaced = integration.patch(model).replaced
    assert replaced["wav2vec2.encoder"] == f"fused_add_layer_norm and {WHAT}"
    with torch.no_grad():
        assert_close(zoo.output(model, inputs), zoo.output(plain, inputs), tol=1e-4)


def test_what_makes_no_mask_is_not_in_the_report(integration):
    import transformers

    config = transformers.CLIPVisionConfig(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
    )
    report = integration.patch(transformers.CLIPVisionModel(config))
    assert not any(WHAT in what for what in report.replaced.values())


@pytest.mark.parametrize("name", ["squeezebert", "convbert"])
def test_attention_of_ones_own_is_not_in_the_report(integration, name):
    """It is none that transformers can be told to run."""
    plain, _ = zoo.make("encoder", name)
    assert not any(WHAT in what for what in integration.patch(plain).replaced.values())
