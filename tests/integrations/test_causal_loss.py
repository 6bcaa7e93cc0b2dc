"""patch(model, loss=True): the loss of causal language models, from what goes into the head."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from integrations.models import assert_close, build, compiled_and_counted, counted_ops, tokens

pytest.importorskip("transformers")

WHAT = "linear_cross_entropy, in training: no logits"
TAKEN = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma3": {"final_logit_softcapping": None},
    "Mixtral": {"output_router_logits": True},
    "Phi": {},  # whose head has a bias
}
CHANGES_LOGITS = ("Gemma2", "Granite", "Cohere")


def of_model(integration, plain):
    """The patched copy, in training, and what the report says of the model itself."""
    model = copy.deepcopy(plain).train()
    report = integration.patch(model, loss=True)
    return model, report.replaced.get(""), report.left_alone.get("")


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


def labelled(device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = tokens(device=device)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def assert_same_step(plain, model, **given) -> None:
    """The same loss and gradients, to float32 noise."""
    expected = plain(**given).loss
    actual = model(**given)
    assert actual.logits is None and "logits" not in actual
    assert_close(actual.loss, expected, "loss")
    expected.backward()
    actual.loss.backward()
    for (name, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(ours.grad, theirs.grad, f"gradient of {name}")


@pytest.mark.parametrize("name", TAKEN)
def test_loss_and_gradients(fuselage, integration, device, name):
    plain = build(name, device, **TAKEN[name]).train()
    model, what, _ = of_model(integration, plain)
    assert what == WHAT
    with counted_ops(fuselage) as counts:
        assert_same_step(plain, model, **labelled(device))
    assert counts["linear_cross_entropy"] == 1


@pytest.mark.parametrize("extra", ["num_items_in_batch", "as a tensor", "shift_labels"])
def test_what_a_trainer_gives(integration, extra):
    plain = build("Llama").train()
    model, *_ = of_model(integration, plain)
    given = labelled()
    if extra == "shift_labels":
        given["shift_labels"] = torch.roll(given["labels"], 1, 1)
    else:
        given["num_items_in_batch"] = torch.tensor(50) if extra == "as a tensor" else 50
    assert_same_step(plain, model, **given)


def test_logits_where_they_are_wanted(integration):
    plain = build("Llama").train()
    model, *_ = of_model(integration, plain)
    given = labelled()
    torch.testing.assert_close(model(**given, return_dict=False)[1], plain(**given).logits)
    assert model(**given, logits_to_keep=16).logits.shape == (2, 16, 512)
    assert model(input_ids=given["input_ids"]).logits.shape == (2, 16, 512)
    for each in (model, plain):
        each.eval()
    torch.testing.assert_close(model(**given).logits, plain(**given).logits)
    torch.testing.assert_close(model(**given).loss, plain(**given).loss)


@pytest.mark.parametrize("name", CHANGES_LOGITS)
def test_models_that_change_their_logits_are_left_alone(integration, name):
    options = {"Granite": {"logits_scaling": 4.0}, "Cohere": {"logit_scale": 0.5}}.get(name, {})
    plain = build(name, **options).train()
    model, what, why = of_model(integration, plain)
    assert what is None and why == "it changes its logits before the loss"
    given = labelled()
    assert model(**given).logits is not None
    assert_close(model(**given).loss, plain(**given).loss, "loss")


def test_other_heads_and_losses_are_left_alone(integration):
    class Adapter(torch.nn.Module):
        """As PEFT wraps a head."""

        def __init__(self, head):
            super().__init__()
            self.base, self.weight = head, head.weight
            self.more = torch.nn.Linear(64, 512, bias=False)

        def forward(self, x):
            return self.base(x) + self.more(x)

    plain = build("Llama").train()
    plain.lm_head = Adapter(plain.lm_head)
    _, what, why = of_model(integration, plain)
    assert what is None and why == "its lm_head is a Adapter, not a Linear"

    plain = build("Llama").train()
    model, *_ = of_model(integration, plain)
    given = labelled()
    heard = []
    hook = model.lm_head.register_forward_hook(lambda *args: heard.append(args))
    assert model(**given).logits is not None and heard
    hook.remove()
    model.loss_function = lambda logits, labels, **others: logits.sum()
    outputs = model(**given)
    assert torch.equal(outputs.loss, outputs.logits.sum())


def test_asked_for_and_undone(integration):
    plain = build("Llama").train()
    model = copy.deepcopy(plain)
    assert WHAT not in integration.patch(model).replaced.values()
    assert model(**labelled()).logits is not None
    model, *_ = of_model(integration, plain)
    given = labelled()
    twin, head = copy.deepcopy(model), pickle.loads(pickle.dumps(model.lm_head))
    assert model(**given).logits is None and twin(**given).logits is None
    assert head(torch.ones(64)).shape == (512,)
    integration.unpatch(model)
    torch.testing.assert_close(model(**given).logits, plain(**given).logits, rtol=0, atol=0)
    assert "forward" not in vars(model.lm_head) and "_loss_function" not in vars(model)


@pytest.mark.slow
def test_compiled_whole(fuselage, integration):
    plain = build("Llama").train()
    model, *_ = of_model(integration, plain)
    compiled, counts = compiled_and_counted(model, fuselage)
    assert_same_step(plain, compiled, **labelled())
    assert counts["linear_cross_entropy"] == 1
    assert model.eval()(**labelled()).logits is not None
