"""Routers of mixtures of experts that `patch` gives topk_softmax, and those that only look so."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from integrations import zoo
from integrations.models import assert_close, compiled_and_counted, counted_ops
from route.test_routers import HIDDEN, ROUTERS, made
from torch import nn

EXPERTS, CHOSEN = 16, 4
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("moe_num_experts", "num_experts_total"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), CHOSEN),
}
GROUPS = {"n_group": 4, "topk_group": 2}
MODELS = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", **GROUPS},
    "deepseek_v3": GROUPS,
    "ernie4_5_moe": {},
    "glm4_moe": GROUPS,
    "gpt_oss": {},
    "granitemoe": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {"norm_topk_prob": True},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
}
QUICK = ("mixtral", "qwen3_moe", "deepseek_v3")
each_model = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS]
)
each_router = pytest.mark.parametrize("which", ROUTERS, ids="-".join)


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A small causal language model whose layers all have experts, or all but the first."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    sizes = {**vars(zoo.configuration(name)), **zoo._sizes(kind)}
    given = {k: v for k, v in zoo._sizes(kind).items() if k in sizes}
    given |= {k: v for k, v in _EXPERTS.items() if k in sizes}
    if "first_k_dense_replace" in sizes:
        given["first_k_dense_replace"] = 1
    if "moe_layer_start_index" in sizes:
        given["moe_layer_start_index"] = 0
    torch.manual_seed(20261125)
    model = AutoModelForCausalLM.from_config(kind(**{**given, **MODELS[name]})).eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "e_score_correction_bias" in key:
                tensor.normal_(std=0.1)
    return model, torch.randint(4, 99, (2, 12))


def both(integration, plain: nn.Module) -> tuple[nn.Module, list[str]]:
    """The patched model, and the names of its routers."""
    model = copy.deepcopy(plain)
    replaced = integration.patch(model).replaced
    return model, [name for name, what in replaced.items() if what == "topk_softmax"]


@each_model
def test_a_model(fuselage, integration, name):
    plain, ids = model_of(name)
    model, routers = both(integration, plain)
    assert routers
    with torch.no_grad(), counted_ops(fuselage) as counts:
        actual = model(ids, use_cache=False)
    assert counts["topk_softmax"] == len(routers)
    with torch.no_grad():
        assert_close(actual.logits, plain(ids, use_cache=False).logits, tol=1e-4)


@each_model
def test_gradients_of_routers(integration, name):
    plain, ids = model_of(name)
    model, routers = both(integration, plain)
    for each in (plain, model):
        each(ids, use_cache=False).logits.square().mean().backward()
    for key in routers:
        theirs = dict(plain.get_submodule(key).named_parameters())
        for part, parameter in model.get_submodule(key).named_parameters():
            expected = theirs[part].grad
            assert (parameter.grad is None) == (expected is None), part
            if expected is not None:
                assert expected.abs().max() > 0 or "correction" in part
                assert_close(parameter.grad, expected, f"{key}.{part}", tol=1e-3)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_logits_that_the_model_returns(integration, name):
    """And the loss that balances experts, which is made of them."""
    plain, ids = model_of(name)
    model, routers = both(integration, plain)
    for each in (plain, model):
        each.config.output_router_logits = True
    with torch.no_grad():
        actual, expected = (each(ids, labels=ids, use_cache=False) for each in (model, plain))
    assert len(actual.router_logits) == len(routers)
    for ours, theirs in zip(actual.router_logits, expected.router_logits, strict=True):
        assert_close(ours, theirs, tol=1e-4)
    assert_close(actual.aux_loss, expected.aux_loss, tol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@each_model
def test_a_compiled_model(fuselage, integration, name, training):
    """Whole, where the plain one compiles whole."""
    plain, ids = model_of(name)
    for implementation in ("grouped_mm", "batched_mm"):
        plain.set_experts_implementation(implementation)
        run, _ = compiled_and_counted(plain, fuselage)
        try:
            with torch.set_grad_enabled(training):
                run(ids, use_cache=False)
            break
        except Exception:
            continue
    else:
        pytest.fail("the plain model does not compile whole")
    model, routers = both(integration, plain)
    run, counts = compiled_and_counted(model, fuselage)
    with torch.set_grad_enabled(training):
        actual = run(ids, use_cache=False).logits
        expected = plain(ids, use_cache=False).logits
    assert counts["topk_softmax"] == len(routers)
    assert_close(actual.detach(), expected.detach(), tol=1e-4)
    if training:
        for logits in (actual, expected):
            logits.square().mean().backward()
        for key in routers:
            parameters = zip(
                model.get_submodule(key).named_parameters(), plain.get_submodule(key).parameters()
            )
            for (part, ours), theirs in parameters:
                if theirs.grad is not None:
                    assert_close(ours.grad, theirs.grad, f"{key}.{part}", tol=1e-3)


@each_model
def test_unpatched_it_is_as_it_was(integration, name):
    plain, ids = model_of(name)
    model, _ = both(integration, plain)
    integration.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)


# Routers by themselves.


def router_of(which) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """And what it is given beside tokens."""
    change, options = ROUTERS[which]
    router = made(which[0], which[1], change, "cpu").requires_grad_(True)
    return router, ((torch.randn(32) / 5,) if options.get("bias") == "argument" else ())


def patched(integration, router: nn.Module) -> nn.Module:
    model = nn.Sequential(copy.deepcopy(router))
    report = integration.patch(model)
    assert report.replaced == {"0": "topk_softmax"} and not report.left_alone, str(report)
    return model[0]


def compared(actual: tuple, expected: tuple) -> None:
    """Logits are the same bits, experts are the same where no two logits are equal."""
    assert [t.dtype for t in actual] == [t.dtype for t in expected]
    assert [t.shape for t in actual] == [t.shape for t in expected]
    logits, weights, indices = expected
    assert torch.equal(actual[0], logits)
    top = logits.detach().float().topk(indices.shape[-1] + 1, -1).values
    clear = (top.diff(dim=-1) != 0).all(-1)
    assert clear.any() or not clear.numel()
    ours, theirs = actual[2].sort(-1), indices.sort(-1)
    assert torch.equal(ours.values[clear], theirs.values[clear])
    rtol = 1e-5 if weights.dtype == torch.float32 else 2.5 * torch.finfo(weights.dtype).eps
    torch.testing.assert_close(
        actual[1].gather(-1, ours.indices)[clear],
        weights.gather(-1, theirs.indices)[clear],
        rtol=rtol,
        atol=1e-7,
    )


@each_router
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_router(fuselage, integration, which, dtype):
    plain, bias = router_of(which)
    plain = plain.to(dtype)
    ours = patched(integration, plain)
    for rows in (300, 1, 0):
        args = (torch.randn(rows, HIDDEN).to(dtype), *bias)
        with counted_ops(fuselage) as counts:
            actual = ours(*args)
        assert counts["topk_softmax"] == 1
        compared(actual, plain(*args)) if rows > 1 else plain(*args)


@each_router
def test_gradients(integration, which):
    """Of tokens and weights, by way of the chosen weights and of the logits."""
    plain, bias = router_of(which)
    ours = patched(integration, plain)
    x, spread, of_logits = torch.randn(50, HIDDEN), torch.randn(50, 32), torch.randn(50, 32)
    grads = []
    for router in (plain, ours):
        leaf = x.clone().requires_grad_()
        logits, weights, indices = router(leaf, *bias)
        ((weights * spread.gather(-1, indices)).sum() + (logits * of_logits).sum()).backward()
        grads.append([leaf.grad, *(p.grad for p in router.parameters())])
    for expected, actual in zip(*grads, strict=True):
        if expected is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@each_router
@pytest.mark.slow
def test_a_compiled_router(fuselage, integration, which):
    """One graph for any number of tokens."""
    plain, bias = router_of(which)
    ours = patched(integration, plain)
    torch._dynamo.reset()
    run = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (40, 7):
        x = torch.randn(rows, HIDDEN)
        compared(run(x, *bias), plain(x, *bias))
    with torch.no_grad():
        run, counts = compiled_and_counted(ours, fuselage)
        run(x, *bias)
    assert counts["topk_softmax"] == 1


@each_router
def test_what_it_does_not_take_runs_as_before(fuselage, integration, which):
    plain, bias = router_of(which)
    ours = patched(integration, plain)
    x = torch.randn(9, HIDDEN)
    with torch.autocast("cpu"), counted_ops(fuselage) as counts:
        for actual, expected in zip(ours(x, *bias), plain(x, *bias), strict=True):
            assert torch.equal(actual, expected)
    doubles = [module.double() for module in (copy.deepcopy(ours), copy.deepcopy(plain))]
    results = [module(x.double(), *bias) for module in doubles]
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    assert not counts


def test_more_experts_chosen_since(fuselage, integration):
    """A setting of the module that is no longer what was tried."""
    plain, _ = router_of(("mixtral", "MixtralTopKRouter"))
    ours, x = patched(integration, plain), torch.randn(9, HIDDEN)
    plain.top_k = ours.top_k = 6
    with counted_ops(fuselage) as counts:
        for actual, expected in zip(ours(x), plain(x), strict=True):
            assert torch.equal(actual, expected)
    assert not counts


def test_names_of_arguments_stay(integration):
    plain, bias = router_of(("minimax_m2", "MiniMaxM2TopKRouter"))
    x = torch.randn(9, HIDDEN)
    ours = patched(integration, plain)
    compared(ours(hidden_states=x, e_score_correction_bias=bias[0]), plain(x, *bias))


def test_tokens_of_a_batch(integration):
    """Some routers make one dimension of them, some do not, and some take no others."""
    for which in (("mixtral", "MixtralTopKRouter"), ("granitemoe", "GraniteMoeTopKRouter")):
        plain, _ = router_of(which)
        x = torch.randn(3, 20, HIDDEN)
        compared(patched(integration, plain)(x), plain(x))


def test_the_bias_of_a_submodule(integration):
    """ERNIE's has a module of its own, which is not called any more: a hook on it counts."""
    plain, _ = router_of(("ernie4_5_moe", "Ernie4_5_MoeTopKRouter"))
    plain.moe_statics.register_forward_hook(lambda *args: None)
    report = integration.patch(nn.Sequential(plain))
    assert "moe_statics has hooks" in report.left_alone["0"] and not report.replaced


def test_weights_that_have_no_values(integration):
    """On the meta device, as with offloading."""
    plain, _ = router_of(("deepseek_v3", "DeepseekV3TopkRouter"))
    ours = patched(integration, copy.deepcopy(plain).to("meta"))
    x = torch.randn(9, HIDDEN, device="meta")
    assert [t.shape for t in ours(x)] == [(9, 32), (9, 4), (9, 4)]


class Router(nn.Module):
    """What the classes below vary."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 7)

    def forward(self, x):
        logits = F.linear(x, self.weight)
        weights, indices = self.chosen(logits)
        return logits, weights, indices

    def chosen(self, logits):
        weights, indices = logits.softmax(-1, torch.float32).topk(CHOSEN, -1)
        return self.scaled(weights).to(logits.dtype), indices

    def scaled(self, weights):
        return weights / weights.sum(-1, keepdim=True)


class ChoiceFirst(Router):
    """As DeepSeek's own code has it, without logits."""

    def forward(self, x):
        weights, indices = self.chosen(F.linear(x, self.weight))
        return indices, weights


class Third(Router):
    def scaled(self, weights):
        return weights / 3


class Detached(Router):
    def scaled(self, weights):
        return weights.detach()


class DetachedSum(Router):
    def scaled(self, weights):
        return weights / weights.sum(-1, keepdim=True).detach()


class LargeEpsilon(Router):
    def chosen(self, logits):
        weights, indices = logits.float().sigmoid().topk(CHOSEN, -1)
        return weights / (weights.sum(-1, keepdim=True) + 1e-6), indices


class Least(Router):
    def chosen(self, logits):
        return (-logits).softmax(-1, torch.float32).topk(CHOSEN, -1)


class Noisy(Router):
    """In training alone it is something else."""

    def chosen(self, logits):
        return super().chosen(F.dropout(logits, 0.3, self.training))


class Cool(Router):
    def forward(self, x):
        logits = F.linear(x, self.weight) / 2
        return logits, *self.chosen(logits)


class Rounded(Router):
    """Scores are rounded before the choice, so that many are equal."""

    def chosen(self, logits):
        weights, indices = logits.softmax(-1, torch.float32).bfloat16().topk(CHOSEN, -1)
        return self.scaled(weights.float()).to(logits.dtype), indices


OTHERS = [Third, Detached, DetachedSum, LargeEpsilon, Least, Noisy, Cool, Rounded]


def test_a_class_of_ones_own(integration):
    plain, x = Router(), torch.randn(60, HIDDEN)
    compared(patched(integration, plain)(x), plain(x))


def test_logits_that_are_not_returned(fuselage, integration):
    plain, x = ChoiceFirst(), torch.randn(60, HIDDEN)
    ours = patched(integration, plain)
    with counted_ops(fuselage) as counts:
        actual, expected = ours(x), plain(x)
    assert counts["topk_softmax"] == 1
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_what_computes_something_else_is_left_alone(integration, kind):
    router = type(f"{kind.__name__}Router", (kind,), {})()
    report = integration.patch(nn.Sequential(router.eval()))
    assert not report.replaced
    assert "than topk_softmax" in report.left_alone["0"]


REASONS = {
    ("lfm2_moe", "Lfm2MoeTopKRouter"): "something else than topk_softmax",  # adds 1e-6
    ("kolibri1", "Kolibri1TopKRouter"): "something else on a GPU",
    ("mistral4", "Mistral4TopkRouter"): "something else than topk_softmax",
}


@pytest.mark.parametrize("which", REASONS, ids="-".join)
def test_routers_of_transformers_that_are_left_alone(integration, which):
    router = made(*which, {"use_expert_bias": True}, "cpu")
    report = integration.patch(nn.Sequential(router))
    assert REASONS[which] in report.left_alone["0"] and not report.replaced


def test_a_block_that_chooses_for_itself(integration):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(HIDDEN, EXPERTS)
            self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)])

        def forward(self, x):
            return self.chosen(self.gate(x).softmax(-1))

        def chosen(self, scores):
            return scores.topk(CHOSEN, -1)

    report = integration.patch(nn.Sequential(Block()))
    assert report.left_alone == {"0": "its router is no module of its own"}


def test_modules_that_are_no_routers_are_not_in_the_report(integration):
    """Those with two results that are called otherwise."""

    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return F.linear(x, self.weight).max(-1)

    report = integration.patch(nn.Sequential(Pooling(), nn.Linear(4, 8), nn.Bilinear(2, 2, 2)))
    assert not report.replaced and not report.left_alone


def test_routers_that_are_alike_are_tried_once(fuselage, integration, monkeypatch):
    routers = importlib.import_module(f"{fuselage.__name__}.integrations._routers")
    calls = []
    own = routers._found_of
    monkeypatch.setattr(routers, "_found_of", lambda *args: calls.append(args) or own(*args))
    monkeypatch.setattr(routers, "_found", {})
    model = nn.Sequential(*(Router() for _ in range(5)))
    assert len(integration.patch(model).replaced) == 5 and len(calls) == 1
