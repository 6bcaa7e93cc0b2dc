"""Patched language models with what transformers and accelerate do to models themselves."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from integrations.models import assert_close

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
}
CONFIGS = {  # a norm before each part; norms of heads and experts; norms around each part
    "Llama": {},
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "Gemma2": {"head_dim": 8, "sliding_window": 8},
}
IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0


def logits(model, **arguments) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(IDS, attention_mask=MASK, **arguments).logits[MASK.bool()]]


def gradients(model, **arguments) -> list[torch.Tensor]:
    model(IDS, labels=IDS, **arguments).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def offloaded(model):
    """Parameters are on the meta device but in the forward of the module that has them."""
    pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")
    return logits(model)


def checkpointed(model, use_reentrant: bool):
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return gradients(model.train())


def with_attention_weights(model):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(IDS, attention_mask=MASK, output_attentions=True)
    return [out.logits[MASK.bool()], *out.attentions]


def with_hidden_states(model):
    with torch.no_grad():
        out = model(IDS, attention_mask=MASK, output_hidden_states=True)
    return [states[MASK.bool()] for states in out.hidden_states]


def saved_and_loaded(model, folder):
    model.save_pretrained(folder)
    return logits(transformers.AutoModelForCausalLM.from_pretrained(folder))


def exported(model):
    program = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=False)
    return [program.module()(input_ids=IDS, use_cache=False).logits]


def packed(model):
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    return gradients(model, position_ids=positions, use_cache=False)


def of_embeddings(model):
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(IDS)
        return [model(inputs_embeds=embeddings, attention_mask=MASK).logits[MASK.bool()]]


def in_two_parts(model):
    with torch.no_grad():
        first = model(IDS[:, :7], use_cache=True)
        second = model(IDS[:, 7:], past_key_values=first.past_key_values)
    return [first.logits, second.logits]


def called_functionally(model):
    parameters = {name: 2 * value.detach() for name, value in model.named_parameters()}
    out = torch.func.functional_call(model, parameters, (IDS,), {"use_cache": False})
    return [out.logits.detach()]


def generated(model, **how):
    with torch.no_grad():
        return [model.generate(IDS[:1], max_new_tokens=6, do_sample=False, **how).float()]


FEATURES = {
    "offloaded": offloaded,
    "checkpointed": lambda model: checkpointed(model, use_reentrant=False),
    "checkpointed, reentrant": lambda model: checkpointed(model, use_reentrant=True),
    "attention weights": with_attention_weights,
    "hidden states": with_hidden_states,
    "saved": saved_and_loaded,
    "exported": exported,
    "packed": packed,
    "embeddings": of_embeddings,
    "two parts": in_two_parts,
    "functional": called_functionally,
    "beams": lambda model: generated(model, num_beams=3),
    "static cache": lambda model: generated(
        model, cache_implementation="static", disable_compile=True
    ),
    "guesses": lambda model: generated(model, prompt_lookup_num_tokens=2),
}


def built(name: str):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        mean, deviation = (1.0, 0.1) if parameter.dim() == 1 else (0.0, 0.15)
        torch.nn.init.normal_(parameter, mean, deviation)
    return model.eval()


SLOW = {("offloaded", "Llama"), ("offloaded", "Qwen3Moe")}  # 6 to 8 s each, as the third
CASES = [case for case in product(FEATURES, CONFIGS) if case not in SLOW]


@pytest.mark.parametrize("feature, name", CASES)
def test_a_feature_of_transformers(fuselage, feature, name, tmp_path):
    options = (tmp_path,) if feature == "saved" else ()
    expected = FEATURES[feature](built(name), *options)
    model = built(name)
    assert fuselage.integrations.transformers.patch(model).replaced
    found = FEATURES[feature](model, *options)
    assert len(found) == len(expected)
    for actual, wanted in zip(found, expected):
        assert_close(actual, wanted)
