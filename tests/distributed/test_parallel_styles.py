"""Parallel styles and plans give what one process gives.

Rows that are only placed elsewhere have the same bits. Where ranks add what one process adds in
another order, the judge is the model in float64: what many ranks compute may be as far from that as
what one process computes in the same dtype.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from harness import assert_same_bits
from ranks import Rank, distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, loss_parallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

# The largest of a few dozen rounding errors, over that of a few dozen others. It reaches 2.
RATIO = 4


def assert_as_good(actual, single, exact, what: str) -> None:
    """That `actual` is as close to `exact` as `single` is, or to the last bit of its dtype."""
    assert actual.dtype == single.dtype and actual.shape == exact.shape, what
    noise = torch.finfo(single.dtype).eps * exact.abs().max()
    bound = RATIO * torch.maximum((single.double() - exact).abs().max(), noise)
    error = (actual.double() - exact).abs().max()
    assert error <= bound, f"{what}: {error:.3g} is more than {bound:.3g}"


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


# Styles of modules

DIM = 24
NORMS = {
    "RMSNorm": lambda x, p: torch.nn.functional.rms_norm(x, (DIM,), p["weight"], 1e-6),
    "LayerNorm": lambda x, p: torch.nn.functional.layer_norm(
        x, (DIM,), p["weight"], p["bias"], 1e-5
    ),
}


def norm_of(rank: Rank, kind: str) -> torch.nn.Module:
    module = getattr(rank.fuselage.modules, kind)(DIM, device=rank.device)
    for index, parameter in enumerate(module.parameters()):
        torch.nn.init.normal_(parameter, 1 - index, 0.3)
    return module


def run_norm(module, inputs: list, grads: list) -> tuple[list, list]:
    """Outputs and the gradients of inputs and parameters."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = module(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    torch.autograd.backward(outputs, grads)
    return outputs, [t.grad for t in (*leaves, *module.parameters())]


def check_norm(rank: Rank, kind: str, tokens: int, placements: tuple) -> None:
    """A norm in its style, of DTensors of these placements; of plain shards where it is None."""
    mesh, fused = rank.mesh(), kind.startswith("FusedAdd")
    single, module = norm_of(rank, kind), norm_of(rank, kind)
    if rank.index == 0 or not fused:  # PyTorch's style takes those of each rank
        module.load_state_dict(single.state_dict())
    xs = [torch.randn(3, tokens, DIM, device=rank.device) for _ in range(1 + fused)]
    grads = [torch.randn_like(t) for t in xs]
    expected, expected_grads = run_norm(single, xs, grads)
    exact = [t.detach().double().requires_grad_() for t in (*xs, *single.parameters())]
    total = sum(exact[: len(xs)])
    parameters = dict(zip(dict(single.named_parameters()), exact[len(xs) :]))
    out = NORMS[kind.removeprefix("FusedAdd")](total, parameters)
    torch.autograd.backward([out, total][: len(xs)], [g.double() for g in grads])

    local = placements == (None, None) and tokens % rank.count != 0
    style = rank.fuselage.distributed.ResidualSequenceParallel if fused else SequenceParallel
    module = parallelize_module(module, mesh, style(use_local_output=local))
    sharded = [distributed(t, mesh, Shard(1)) for t in (*xs, *grads)]
    inputs = [
        shard.to_local() if placement is None else distributed(t, mesh, placement)
        for t, shard, placement in zip(xs, sharded, placements)
    ]
    grads = [t.to_local() if local else t for t in sharded[len(xs) :]]
    outputs, actual_grads = run_norm(module, inputs, grads)
    for name, output, value in zip(("out", "new_residual"), outputs, expected):
        if local:
            assert not isinstance(output, DTensor)
            output = DTensor.from_local(
                output, mesh, [Shard(1)], shape=value.shape, stride=value.stride()
            )
        assert output.placements == (Shard(1),)
        assert_same_bits(output.full_tensor(), value, name)
    for index, (grad, value) in enumerate(zip(actual_grads, expected_grads)):
        if index >= len(xs):
            name = list(parameters)[index - len(xs)]
            assert_as_good(grad.full_tensor(), value, exact[index].grad, f"grad_{name}")
        elif isinstance(grad, DTensor):
            assert_same_bits(grad.full_tensor(), value, f"grad of input {index}")
        else:
            value = distributed(value, mesh, Shard(1)).to_local()
            assert_same_bits(grad, value, f"grad of input {index}")


PLACEMENTS = (None, Shard(1), Shard(2), Replicate(), Partial())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["FusedAddRMSNorm", "FusedAddLayerNorm"])
def test_norms_with_a_residual(ranks, kind):
    for placement in PLACEMENTS:
        for tokens in (2 * ranks.count, 2 * ranks.count + 1):
            ranks.run(check_norm, kind, tokens, (placement, placement))
            ranks.run(check_norm, kind, tokens, (placement, Shard(1)))
        ranks.run(check_norm, kind, 4, (Replicate(), placement))


@pytest.mark.parametrize("kind", NORMS)
def test_norms_in_the_style_of_pytorch(ranks, kind):
    for placement in PLACEMENTS[:-1]:
        ranks.run(check_norm, kind, 2 * ranks.count, (placement,))
    ranks.run(check_norm, kind, 2 * ranks.count + 1, (Shard(1),))


class Difference(torch.nn.Module):
    """Tells its inputs apart, which the sum of a norm does not."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(DIM), requires_grad=False)

    def forward(self, x, residual):
        return self.weight * (x - residual), residual


def check_names(rank: Rank) -> None:
    """Inputs by position and by name, of another dimension; a frozen weight stays frozen."""
    module = Difference().to(rank.device)
    style = rank.fuselage.distributed.ResidualSequenceParallel(sequence_dim=0)
    module = parallelize_module(module, rank.mesh(), style)
    assert not module.weight.requires_grad
    plain = [torch.randn(5, DIM, device=rank.device) for _ in range(2)]
    x, residual = (distributed(t, rank.mesh(), Replicate()) for t in plain)
    calls = (module(x, residual), module(x, residual=residual), module(residual=residual, x=x))
    for out, new_residual in calls:
        assert out.placements == new_residual.placements == (Shard(0),)
        assert torch.equal(out.full_tensor(), plain[0] - plain[1])
        assert torch.equal(new_residual.full_tensor(), plain[1])


def test_inputs_by_position_and_by_name(ranks):
    ranks.run(check_names)


def check_wrong_inputs(rank: Rank) -> None:
    style = rank.fuselage.distributed.ResidualSequenceParallel
    mesh = rank.mesh()
    module = parallelize_module(norm_of(rank, "FusedAddRMSNorm"), mesh, style())
    x = torch.randn(2, 3, DIM, device=rank.device)
    other = distributed(x, rank.mesh(1, rank.count, names=("a", "b"))["a"], Shard(1))
    for args, kind, text in (
        ((x,), TypeError, "got Tensor"),
        ((x, None), TypeError, "got Tensor, NoneType"),
        ((x, x, x), TypeError, "got Tensor, Tensor, Tensor"),
        ((x[0, 0], x[0, 0]), RuntimeError, r"dimension 1, the sequence; got one of shape \(24,\)"),
        ((x, other), RuntimeError, "got an input on"),
    ):
        with pytest.raises(kind, match=rf"FusedAddRMSNorm\(24, .*{text}"):
            module(*args)
    module = parallelize_module(torch.nn.Bilinear(2, 2, 2, bias=False), mesh, style())
    module.forward = lambda x, residual: x
    with pytest.raises(RuntimeError, match=r"Bilinear.* must return two DTensors.* DTensor$"):
        module(x, x)


def test_wrong_inputs_name_the_module(ranks):
    ranks.run(check_wrong_inputs)


# Models

VOCABULARY = 66  # 4 ranks: 17, 17, 17, 15
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
# 4 ranks: 3, 3, 3 and none. NOTE: linears of older DTensors fail for parts of unequal size.
TOKENS = 9 if TORCH >= (2, 13) else 8
of_models = pytest.mark.skipif(TORCH < (2, 11), reason="this PyTorch is refused")
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def llama(
    rank: Rank, dtype: torch.dtype = torch.float32, seed: int = 0, kind: str = "llama", **options
):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**CONFIG, **options})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.to(rank.device, dtype)


def batch(rank: Rank) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, 2] = -100
    return {name: t.to(rank.device) for name, t in (("input_ids", ids), ("labels", labels))}


def trained(model, inputs: dict) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Logits, the loss and all gradients of a step."""
    parallel = isinstance(model.lm_head.weight, DTensor)
    with loss_parallel() if parallel else torch.enable_grad():
        out = model(**inputs)
        out.loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    return whole(out.logits).detach(), whole(out.loss).detach(), grads


def check_step(actual: tuple, single: tuple, exact: tuple) -> None:
    for what, *values in zip(("logits", "loss"), actual, single, exact):
        assert_as_good(*values, what)
    assert actual[2].keys() == exact[2].keys()
    for name, grad in actual[2].items():
        assert_as_good(grad, single[2][name], exact[2][name], name)


def parallelized(rank: Rank, model, when: str, mesh):
    """The model, patched before or after it is parallelized, or never."""
    patch = rank.fuselage.integrations.transformers.patch
    if when == "before":
        patch(model)
    assert rank.fuselage.distributed.parallelize_llama(model, mesh) is model
    if when == "after":
        patch(model)
    return model


class Collectives(TorchDispatchMode):
    """Counts collectives. (CommDebugMode fails on transformers' models.)"""

    def __enter__(self):
        self.counts = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


PLACED = {
    "input_layernorm": Replicate(),
    "self_attn.q_proj": Shard(0),
    "self_attn.o_proj": Shard(1),
    "mlp.up_proj": Shard(0),
    "mlp.down_proj": Shard(1),
}


def check_llama(rank: Rank, when: str, dtype: torch.dtype, options: dict) -> None:
    inputs = batch(rank)
    plain = llama(rank, dtype, **options)
    single = trained(plain, inputs)
    plain.zero_grad()
    exact = trained(plain.double(), inputs)
    model = parallelized(rank, llama(rank, dtype, rank.index, **options), when, rank.mesh())
    layer = model.model.layers[0]
    # One for the embedding or the head; for each attention and each MLP one.
    once = 1 + 2 * len(model.model.layers)
    with torch.no_grad(), Collectives() as collectives:
        model(inputs["input_ids"])
    assert collectives.counts == {"reduce_scatter_tensor": once, "all_gather_into_tensor": once}
    fused = [0] if when == "never" else watch(layer)
    check_step(trained(model, inputs), single, exact)
    assert fused[0] == (when != "never")
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    for name, placement in PLACED.items():
        for key, parameter in layer.get_submodule(name).named_parameters():
            wanted = Replicate() if key == "bias" and placement == Shard(1) else placement
            assert parameter.placements == (wanted,), name


def watch(layer) -> list[int]:
    """Counts the calls of a layer's second norm with a residual."""
    norm, count = layer.post_attention_layernorm, [0]
    forward = norm.forward

    def counted(self, x, residual=None):
        count[0] += residual is not None
        return forward(x) if residual is None else forward(x, residual)

    counted.fuselage_replacement = forward.__func__.fuselage_replacement
    norm.forward = counted.__get__(norm)
    return count


BIASES = {"attention_bias": True, "mlp_bias": True}


def test_an_old_torch_is_refused(fuselage, monkeypatch):
    monkeypatch.setattr(fuselage.distributed, "_VERSION", (2, 10))
    with pytest.raises(RuntimeError, match="parallelize_llama needs PyTorch"):
        fuselage.distributed.parallelize_llama(None, None)


@pytest.mark.long
@of_models
@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_llama_is_what_one_process_has(ranks, when):
    kv_heads = {"num_key_value_heads": ranks.count}
    ranks.run(check_llama, when, torch.float32, kv_heads)
    ranks.run(check_llama, when, torch.bfloat16, kv_heads)
    if when != "before":
        ranks.run(check_llama, when, torch.float32, {"tie_word_embeddings": True, **BIASES})


@of_models
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_models_of_the_same_structure(ranks, kind):
    if ranks.count == 2:
        ranks.run(check_llama, "after", torch.float32, {"kind": kind})


def check_inference(rank: Rank) -> None:
    """Few logits, padding, and a cache that grows by a token."""
    inputs = {"input_ids": batch(rank)["input_ids"]}
    plain = llama(rank)
    model = parallelized(rank, llama(rank), "before", rank.mesh())
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :4] = 0
    with torch.no_grad():
        for options in ({"logits_to_keep": 2}, {"attention_mask": mask}):
            expected, actual = (m(**inputs, **options).logits for m in (plain, model))
            kept = mask.bool() if "attention_mask" in options else ...
            torch.testing.assert_close(actual.full_tensor()[kept], expected[kept])
        steps = []
        for m in (plain, model):
            out = m(**inputs, use_cache=True)
            out = m(input_ids=inputs["input_ids"][:, :1], past_key_values=out.past_key_values)
            steps.append(whole(out.logits))
        torch.testing.assert_close(*steps)


@pytest.mark.long
@of_models
def test_inference(ranks):
    ranks.run(check_inference)


def check_sampling(rank: Rank) -> None:
    plain = llama(rank)
    model = parallelized(rank, llama(rank), "before", rank.mesh())
    ids = batch(rank)["input_ids"]
    draws = []
    with torch.no_grad():
        for m in (plain, model):
            hidden = m.model(ids).last_hidden_state[:, -1]
            draws.append(
                rank.fuselage.lm_head_sample(
                    hidden, m.lm_head.weight, seed=7, num_samples=64, return_logprobs=True
                )
            )
    tokens, logprobs, _ = (whole(t) for t in draws[1])
    assert torch.equal(tokens, draws[0].tokens) and tokens.unique().numel() > 10
    torch.testing.assert_close(logprobs, draws[0].logprobs)


@of_models
def test_sampling_of_the_parallel_head(ranks):
    ranks.run(check_sampling)


def check_checkpointing(rank: Rank) -> None:
    inputs = batch(rank)
    model = parallelized(rank, llama(rank), "before", rank.mesh())
    expected = trained(model, inputs)
    model.zero_grad()
    recomputed = 0
    for layer in model.model.layers:
        forward = layer.forward

        def checkpointed(x, *args, forward=forward, **kwargs):
            nonlocal recomputed
            recomputed += 1
            return checkpoint(partial(forward, **kwargs), x, *args, use_reentrant=False)

        layer.forward = checkpointed
    actual = trained(model, inputs)
    assert recomputed == 2
    for a, b in zip((*actual[:2], *actual[2].values()), (*expected[:2], *expected[2].values())):
        assert_same_bits(a, b, "with activation checkpointing")


@pytest.mark.long
@of_models
def test_activation_checkpointing(ranks):
    ranks.run(check_checkpointing)


def check_two_dimensions(rank: Rank, when: str) -> None:
    """FSDP2 over one dimension of the mesh, of a model that is parallel over the other."""
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    inputs = batch(rank)
    single = trained(llama(rank), inputs)
    exact = trained(llama(rank).double(), inputs)
    model = parallelized(rank, llama(rank, seed=rank.index % 2), when, mesh["tp"])
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    own = mesh["dp"].get_local_rank()
    _, loss, grads = trained(model, {name: t[own : own + 1] for name, t in inputs.items()})
    losses = DTensor.from_local(loss[None], mesh["dp"], [Shard(0)]).full_tensor()
    assert_as_good(losses.mean(), single[1], exact[1], "loss")
    for name, grad in grads.items():
        assert_as_good(grad, single[2][name], exact[2][name], name)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    expected = torch.stack([g.norm() for g in single[2].values()]).norm()
    torch.testing.assert_close(whole(norm), expected)


@pytest.mark.long
@of_models
def test_with_fsdp_over_another_dimension(ranks):
    if ranks.count == 4:
        for when in ("never", "before"):
            ranks.run(check_two_dimensions, when)


def sum_up(model: torch.nn.Module) -> None:
    """What docs/distributed.md says to do before clipping."""
    for p in model.parameters():
        if isinstance(p.grad, DTensor):
            p.grad = p.grad.redistribute(placements=p.placements)


def check_optimizer(rank: Rank) -> None:
    """Gradients that are partial sums are summed by clipping and by AdamW."""
    inputs = batch(rank)
    plain = llama(rank)
    model = parallelized(rank, llama(rank), "before", rank.mesh())
    for m in (plain, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            trained(m, inputs)
            if TORCH < (2, 12):
                sum_up(m)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
    for (name, p), expected in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(whole(p), expected, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.long
@of_models
def test_clipping_and_an_optimizer(ranks):
    ranks.run(check_optimizer)


class Renamed(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def with_child(at: str, name: str, child: torch.nn.Module):
    return lambda model: model.get_submodule(at).register_module(name, child)


def without(at: str, name: str):
    return lambda model: model.get_submodule(at)._modules.pop(name)


ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
CHANGES = {
    f"`{ATTENTION}.q_norm` has parameters that the plan does not know: weight": with_child(
        ATTENTION, "q_norm", torch.nn.RMSNorm(8)
    ),
    f"`{ATTENTION}.k_norm` is a norm that": with_child(
        ATTENTION, "k_norm", torch.nn.RMSNorm(8, elementwise_affine=False)
    ),
    f"`{ATTENTION}` has no q_proj": without(ATTENTION, "q_proj"),
    f"`{MLP}` has no gate_proj": without(MLP, "gate_proj"),
    "`the model` has no model": without("", "model"),
    "`the model` has no lm_head": without("", "lm_head"),
    "`model.layers` is no list": with_child("model", "layers", torch.nn.ModuleList()),
    "`lm_head` is a Renamed, not a Linear": with_child("", "lm_head", Renamed(32, VOCABULARY)),
    f"`{MLP}.up_proj` has a weight of shape": lambda model: model.get_submodule(
        f"{MLP}.up_proj"
    ).register_parameter("weight", torch.nn.Parameter(torch.ones(3, 3))),
    f"`{MLP}.gate_proj` has 45 columns, which": with_child(
        MLP, "gate_proj", torch.nn.Linear(32, 45)
    ),
    f"`{ATTENTION}.k_proj` has 3 heads, which": with_child(
        ATTENTION, "k_proj", torch.nn.Linear(32, 24)
    ),
    f"`{ATTENTION}.v_proj` has 20 columns, which": with_child(
        ATTENTION, "v_proj", torch.nn.Linear(32, 20)
    ),
    f"`{ATTENTION}` has parameters that the plan does not know: sinks": lambda model: (
        model.get_submodule(ATTENTION).register_parameter(
            "sinks", torch.nn.Parameter(torch.ones(4))
        )
    ),
    f"`{ATTENTION}` does not say its head_dim": lambda model: delattr(
        model.get_submodule(ATTENTION), "head_dim"
    ),
    "`model.norm` has submodules": with_child("model.norm", "inner", torch.nn.Identity()),
    "`model.embed_tokens` has a max_norm": lambda model: setattr(
        model.model.embed_tokens, "max_norm", 1.0
    ),
    f"`{MLP}.up_proj.weight` is `{MLP}.gate_proj.weight`, too": lambda model: setattr(
        model.get_submodule(f"{MLP}.up_proj"),
        "weight",
        model.get_submodule(f"{MLP}.gate_proj").weight,
    ),
}


KINDS = {
    "mixtral": "`model.layers.0.mlp` has no gate_proj",
    "phi3": "`model.layers.0.self_attn` has no q_proj",
    "qwen3": "`model.layers.0.self_attn.q_norm` has parameters that the plan does not know: weight",
    "gemma2": "`model.embed_tokens` is a Gemma2TextScaledWordEmbedding, not a",
    "stablelm": "`model.layers.0.self_attn` views its projections by its num_heads, which a rank",
}


def check_refusals(rank: Rank) -> None:
    parallelize = rank.fuselage.distributed.parallelize_llama
    changed = [(why, "llama", change) for why, change in CHANGES.items()]
    for why, kind, change in (*changed, *((KINDS[kind], kind, bool) for kind in KINDS)):
        model = llama(rank, kind=kind)
        change(model)
        with pytest.raises(RuntimeError) as caught:
            parallelize(model, rank.mesh())
        assert str(caught.value).startswith(f"fuselage: parallelize_llama: {why}"), caught.value
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model = llama(rank)
    with pytest.raises(RuntimeError, match=r"a mesh of one dimension, got one of 2; .*\['tp'\]"):
        parallelize(model, rank.mesh(1, rank.count, names=("dp", "tp")))
    parallelize(model, rank.mesh())
    with pytest.raises(RuntimeError, match="is a DTensor already"):
        parallelize(model, rank.mesh())


@of_models
def test_other_models_are_refused_by_name(ranks):
    if ranks.count == 2:
        ranks.run(check_refusals)
