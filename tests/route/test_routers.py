"""topk_softmax in place of what transformers' own routers do with their logits."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

HIDDEN = 48
CONFIG = {
    "hidden_size": HIDDEN,
    "num_experts_per_tok": 4,
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 32
    ),
    **{"moe_k": 4, "moe_topk": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"n_group": 8, "topk_group": 3, "moe_norm_min": 1e-12, "topk_method": "greedy"},
    **{"scoring_func": "softmax", "zero_expert_num": 0, "router_bias": False},
}
GROUPS = {"num_groups": 8, "topk_groups": 3}
SIGMOID = {"score": "sigmoid"}

# (module, class): what is called of it, a change of the configuration, and options of ours.
ROUTERS = {
    ("mixtral", "MixtralTopKRouter"): ({}, {}),
    ("qwen3_moe", "Qwen3MoeTopKRouter"): ({}, {}),
    ("qwen2_moe", "Qwen2MoeTopKRouter"): ({"norm_topk_prob": False}, {"renormalize": False}),
    ("olmoe", "OlmoeTopKRouter"): ({"norm_topk_prob": False}, {"renormalize": False}),
    ("qwen3_5_moe", "Qwen3_5MoeTopKRouter"): ({}, {}),
    ("minimax", "MiniMaxTopKRouter"): ({}, {}),
    ("gpt_oss", "GptOssTopKRouter"): ({}, {}),
    ("granitemoe", "GraniteMoeTopKRouter"): ({}, {}),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter"): ({}, {"bias": True}),
    ("longcat_flash", "LongcatFlashTopkRouter"): ({}, {"bias": True, "renormalize": False}),
    ("deepseek_v2", "DeepseekV2TopkRouter"): ({}, {"renormalize": False}),
    ("deepseek_v2", "DeepseekV2TopkRouter", "groups"): (
        {"topk_method": "group_limited_greedy"},
        {"renormalize": False, **GROUPS},
    ),
    ("deepseek_v3", "DeepseekV3TopkRouter"): ({}, {"bias": True, **SIGMOID, **GROUPS}),
    ("deepseek_v3", "DeepseekV3TopkRouter", "plain"): (
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        {"bias": True, **SIGMOID, "renormalize": False},
    ),
    ("glm4_moe", "Glm4MoeTopkRouter"): ({}, {"bias": True, **SIGMOID, **GROUPS}),
    ("dots1", "Dots1TopkRouter"): ({}, {"bias": True, **SIGMOID, **GROUPS}),
    ("minimax_m2", "MiniMaxM2TopKRouter"): ({}, {"bias": "argument", **SIGMOID}),
}


def made(module: str, name: str, change: dict, device: str) -> nn.Module:
    """The router, with random weights and, where it has one, a random bias for the choice."""
    pytest.importorskip("transformers")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(20261125)
    router = getattr(models, name)(SimpleNamespace(**{**CONFIG, **change})).to(device)
    with torch.no_grad():
        for t in (*router.parameters(), *router.buffers()):
            t.normal_(std=0.3)
    return router.requires_grad_(True)


def bias_of(router: nn.Module) -> torch.Tensor:
    tensors = (*router.named_parameters(), *router.named_buffers())
    (bias,) = [t for name, t in tensors if name.endswith("e_score_correction_bias")]
    return bias.detach().flatten()


@pytest.mark.parametrize("which", ROUTERS, ids="-".join)
def test_a_router_of_transformers(fuselage, device, which):
    module, name, *_ = which
    change, options = ROUTERS[which]
    options = dict(options)
    router = made(module, name, change, device)
    if hasattr(router, "routed_scaling_factor"):
        router.routed_scaling_factor = 1.0
    hidden = torch.randn(200, HIDDEN, device=device)
    arguments, bias = [hidden], options.pop("bias", None)
    if bias is not None:
        options["bias"] = bias_of(router) if bias is True else torch.randn(32, device=device) / 5
    if bias == "argument":
        arguments.append(options["bias"])
    logits, weights, indices = router(*arguments)

    leaf = logits.detach().requires_grad_()
    found = fuselage.topk_softmax(leaf, 4, **options)
    # Some do not sort their experts.
    ours, theirs = found.indices.sort(-1), indices.sort(-1)
    assert torch.equal(ours.values, theirs.values)
    torch.testing.assert_close(
        found.weights.gather(-1, ours.indices), weights.gather(-1, theirs.indices)
    )

    grad = torch.randn(200, 32, device=device)  # of each expert's weight
    (expected,) = torch.autograd.grad(weights, logits, grad.gather(-1, indices), retain_graph=True)
    (actual,) = torch.autograd.grad(found.weights, leaf, grad.gather(-1, found.indices))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
