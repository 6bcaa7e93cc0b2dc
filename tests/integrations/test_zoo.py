"""`patch` on small models of every architecture of transformers that `zoo` can make."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from integrations import zoo, zoo_diffusion
from integrations.models import (
    assert_close,
    compiled_and_counted,
    counted_ops,
    randomise,
    rms,
)
from integrations.sharding import partition, process_group

REPO_DIR = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO_DIR / "tools"))

import write_models  # noqa: E402

transformers = pytest.importorskip("transformers")

# In every run: one of each family. The others are slow.
QUICK = {"qwen3", "t5", "bert", "vit", "wav2vec2"}
SHARDED = ("qwen3", "gemma2", "phi3", "bart", "bert", "vit", "wav2vec2", "mamba")
COMPILED = ("qwen3", "bert", "vit")
# Where the plain model raises, so that there is nothing to compare.
PLAIN_RAISES: dict[str, set[str]] = {
    "gradients": {"rwkv"},
    "half precision": {"fnet", "kandinsky", "mra"},
    "generate": set(),
    "partitioned": {
        "bamba",
        "falcon_mamba",
        "gemma3n_text",
        "gpt_neox_japanese",
        "granitemoehybrid",
        "inkling_text",
        "jamba",
        "jetmoe",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "mobilebert",
        "olmo_hybrid",
        "prophetnet",
        "qwen3_next",
        "sew-d",
        "siglip",
        "wavlm",
    },
}


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


def fuselage_of(integration):
    return sys.modules[integration.__name__.partition(".")[0]]


def models(names=None) -> list:
    """A parameter for each architecture that can be built."""
    return [
        pytest.param(
            family,
            name,
            id=f"{family}-{name}",
            marks=() if names is not None or name in QUICK else pytest.mark.slow,
        )
        for family, name in zoo.tested()
        if names is None or name in names
    ]


def patched(integration, plain):
    model = copy.deepcopy(plain)
    return model, integration.patch(model)


def run(model, inputs) -> torch.Tensor:
    torch.manual_seed(1)  # of what samples when it infers
    return zoo.output(model, inputs)


@pytest.mark.parametrize(("family", "name"), models())
def test_a_model_of_the_zoo(integration, family, name, tmp_path):
    plain, inputs = zoo.make(family, name)
    randomise(plain)
    generates = family in ("causal", "seq2seq") and plain.can_generate()
    _check(name, integration, plain, inputs, tmp_path, generates)


@pytest.mark.parametrize(
    "make",
    [pytest.param(f, marks=pytest.mark.slow, id=f.__name__) for f in zoo_diffusion.MODELS],
)
def test_a_diffusion_model(fuselage, make, tmp_path):
    pytest.importorskip("diffusers")
    plain, inputs = zoo_diffusion.make(make)
    randomise(plain)
    _check(make.__name__, fuselage.integrations.diffusers, plain, inputs, tmp_path)


def _check(name, integration, plain, inputs, path, generates: bool = False) -> None:
    with torch.no_grad():
        expected = run(plain, inputs)
    before = [dict(vars(module)) for module in plain.modules()]
    model, report = patched(integration, plain)
    assert not [why for why in report.left_alone.values() if "cannot be tried:" in why], str(report)
    _described(name, report)
    with torch.no_grad(), counted_ops(fuselage_of(integration)) as counts:
        assert_close(run(model, inputs), expected, str(report), tol=1e-4)
    _called(report, counts)
    _half_precision(name, integration, plain, inputs)
    _partitioned(name, integration, plain, inputs)
    if generates:
        _same_tokens(name, model, plain, inputs)
    _same_gradients(name, model, plain, inputs)
    _saved_and_loaded(model, inputs, expected, path)
    assert integration.unpatch(model) == len(report.replaced)
    with torch.no_grad():
        assert torch.equal(run(model, inputs), expected)
    for theirs, module in zip(before, model.modules(), strict=True):
        assert vars(module).keys() == theirs.keys()
        assert "forward" not in vars(module)


# What a report names by the operator that then runs, under another name of its op or not.
OPS = {"ada_layer_norm": "ada_norm", "ada_rms_norm": "ada_norm"}
OPS |= {k: k for k in ("gate_residual_ada_norm", "fused_add_rms_norm", "fused_add_layer_norm")}
OPS |= {k: k for k in ("apply_rotary", "qk_norm_rotary", "gated_rms_norm", "group_norm")}
OPS |= {"group_norm (with silu)": "group_norm"}


def _called(report, counts) -> None:
    """What is said to run does run, and not the model's own function in its place."""
    named = {what for entry in report.replaced.values() for what in entry.split(", ")}
    assert not [what for what in named & OPS.keys() if not counts[OPS[what]]], (counts, str(report))


def _described(name, report) -> None:
    """docs/models.md says what was replaced, of the version that it was written with."""
    page = write_models.PAGE.read_text("utf-8")
    if f"with transformers {transformers.__version__} " in page:
        assert write_models.row(name, report) in page.splitlines(), "run tools/write_models.py"


def _of_plain(what: str, name: str, function):
    """What the plain model gives; None where it raises, which `PLAIN_RAISES` knows."""
    try:
        result = function()
    except Exception:
        assert name in PLAIN_RAISES[what], f"{name}: {what}"
        return None
    assert name not in PLAIN_RAISES[what], f"{name}: {what}"
    return result


def _backward(model, inputs) -> torch.Tensor:
    result = run(model, inputs)
    cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(3))
    (result * cotangent).sum().backward()
    return result


def _same_gradients(name, model, plain, inputs) -> None:
    if _of_plain("gradients", name, lambda: _backward(plain, inputs)) is None:
        return
    _backward(model, inputs)
    grads = [p.grad for p in plain.parameters() if p.grad is not None and p.numel()]
    largest = max(grad.abs().max() for grad in grads)
    for (key, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        if theirs.grad is not None and theirs.numel():
            # Gradients that are zero but for noise, as of the bias of a key, are noise of the rest.
            error = (ours.grad - theirs.grad).abs().max()
            assert error <= 1e-3 * theirs.grad.abs().max() + 1e-5 * largest, (key, error)
    plain.zero_grad()
    model.zero_grad()


def _half_precision(name, integration, plain, inputs) -> None:
    """bfloat16 is no farther from float32 than the plain model's, but for the luck of one model.

    That of a classifier with two labels, of which there are four values, is the largest.
    """
    exact = copy.deepcopy(plain)
    half = copy.deepcopy(plain).to(torch.bfloat16)
    exact.load_state_dict(half.state_dict())
    ours, _ = patched(integration, half)
    with torch.no_grad():
        theirs = _of_plain("half precision", name, lambda: run(half, inputs))
        if theirs is None:
            return
        expected, actual = run(exact, inputs), run(ours, inputs)
    assert actual.dtype == theirs.dtype
    error, bound = rms(actual.double() - expected), rms(theirs.double() - expected)
    luck = 1.5 + 3 / expected.numel() ** 0.5
    assert error <= luck * bound + 1e-3 * rms(expected), (error, bound)


def _same_tokens(name, model, plain, inputs) -> None:
    options = {"max_new_tokens": 3, "do_sample": False, "decoder_start_token_id": 1}
    prompt = inputs["input_ids"]
    expected = _of_plain("generate", name, lambda: plain.generate(prompt, **options))
    assert expected is None or torch.equal(model.generate(prompt, **options), expected)


def _saved_and_loaded(model, inputs, expected, path) -> None:
    """The patched model is saved as the plain one."""
    model.save_pretrained(path)
    loaded = type(model).from_pretrained(path).eval()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(run(loaded, inputs), expected)


def _partitioned(name, integration, plain, inputs) -> None:
    """With parameters of size 0, as ZeRO-3's: a model that takes another module's raises."""
    parted, model = copy.deepcopy(plain), copy.deepcopy(plain)
    partition(parted)
    partition(model)
    integration.patch(model)
    with torch.no_grad():
        expected = _of_plain("partitioned", name, lambda: run(parted, inputs))
        if expected is not None:
            assert_close(run(model, inputs), expected, tol=1e-4)


@pytest.mark.slow
def test_what_is_not_in_the_zoo():
    """The list of models that cannot be made does not grow unseen."""
    known = {name for _, name in zoo.architectures()}
    assert known >= zoo.NOT_BUILT
    for family, name in zoo.architectures():
        if name in zoo.NOT_BUILT:
            with pytest.raises(zoo.NotBuilt):
                zoo.make(family, name)
    assert len(known - zoo.NOT_BUILT) >= 200


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), models(SHARDED))
def test_a_sharded_model_of_the_zoo(integration, family, name):
    from torch.distributed.fsdp import fully_shard

    plain, inputs = zoo.make(family, name)
    model = copy.deepcopy(plain)
    unsharded = integration.patch(copy.deepcopy(plain))
    with process_group() as mesh:
        for module in list(model.modules()):
            if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        report = integration.patch(model)
        assert report.replaced == unsharded.replaced
        expected, actual = run(plain, inputs), run(model, inputs)
        assert_close(actual.detach(), expected.detach(), tol=1e-4)
        for result in (expected, actual):
            result.square().mean().backward()
        for (key, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
            if theirs.grad is not None and theirs.grad.abs().max() > 1e-6:
                assert_close(ours.grad.full_tensor(), theirs.grad, key, tol=1e-3)
        assert integration.unpatch(model) == len(report.replaced)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), models(COMPILED))
def test_a_compiled_model_of_the_zoo(integration, fuselage, family, name):
    plain, inputs = zoo.make(family, name)
    model, report = patched(integration, plain)
    compiled, counts = compiled_and_counted(model, fuselage)
    actual = run(compiled, inputs)
    assert report.replaced and sum(counts.values())
    assert_close(actual.detach(), run(plain, inputs).detach(), tol=1e-4)
