"""layers.SoftmaxTopKRouter, given by `kernelize` to the routers that transformers has so named."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping

HIDDEN, EXPERTS, CHOSEN = 48, 32, 4
ROUTERS = {
    "qwen3_5_moe": ("Qwen3_5MoeTopKRouter", {}),
    "laguna": ("LagunaTopKRouter", {"moe_router_logit_softcapping": 0.0}),
    "laguna with a soft cap": ("LagunaTopKRouter", {"moe_router_logit_softcapping": 2.0}),
}
MODES = (
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
)


@pytest.fixture
def plain(request, device):
    """A router of transformers."""
    pytest.importorskip("transformers")
    name, options = ROUTERS[request.param]
    model = request.param.split()[0]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = {"num_experts_per_tok": CHOSEN, "num_experts": EXPERTS, "hidden_size": HIDDEN}
    router = getattr(module, name)(SimpleNamespace(**config, **options)).to(device)
    assert type(router).kernel_layer_name == "SoftmaxTopKRouter"
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(std=0.3)
    return router


def kernelized(fuselage, plain, mode: Mode, device: str):
    repository = LocalLayerRepository(
        Path(fuselage.__file__).parent, layer_name="SoftmaxTopKRouter"
    )
    router = copy.deepcopy(plain).train(Mode.TRAINING in mode)
    with use_kernel_mapping({"SoftmaxTopKRouter": {device: repository}}, inherit_mapping=False):
        kernelize(router, mode=mode, device=device, use_fallback=False)
    assert router.forward.__func__.__module__ == fuselage.layers.__name__
    return router


@pytest.mark.parametrize("plain", ROUTERS, indirect=True)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router(fuselage, device, plain, mode, dtype):
    plain = plain.to(dtype)
    router = kernelized(fuselage, plain, mode, device)
    call = router
    if Mode.TORCH_COMPILE in mode:
        torch._dynamo.reset()
        call = torch.compile(router, fullgraph=True, dynamic=True)
    hidden = torch.randn(3, 7, HIDDEN, device=device).to(dtype)
    results = [function(hidden) for function in (call, plain)]
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    (logits, weights, indices), expected = results
    torch.testing.assert_close(logits, expected[0])
    # Of equal logits, PyTorch may choose any.
    chosen = torch.topk(logits, CHOSEN + 1, -1).values
    is_clear = (chosen.diff(dim=-1) != 0).all(-1)
    assert is_clear.any()
    if dtype == torch.float32:
        assert is_clear.all() and torch.equal(indices, expected[2])
    torch.testing.assert_close(weights[is_clear], expected[1][is_clear])
    if Mode.TRAINING not in mode:
        return
    grads = []
    for module, of_module in ((router, weights), (plain, expected[1])):
        factors = torch.arange(1, CHOSEN + 1, device=device).to(dtype)
        (of_module * factors)[is_clear].sum().backward()
        grads.append(module.weight.grad)
    torch.testing.assert_close(*grads)


def test_a_layer_is_what_the_hub_accepts(fuselage):
    layer = fuselage.layers.SoftmaxTopKRouter
    assert layer.has_backward and layer.can_torch_compile
