"""What another library makes of the same linears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..roofline.results import version_of

TORCHAO = "torchao"


def is_installed(name: str) -> bool:
    return version_of(name) is not None


def quantised_by_torchao(model: torch.nn.Module, names: set[str]) -> torch.nn.Module:
    """In place. On a CPU without its check for GPUs: PyTorch's product is there, too."""
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        quant_api,
        quantize_,
    )

    check = quant_api._check_hardware_support
    if next(model.parameters()).device.type == "cpu":
        quant_api._check_hardware_support = lambda granularity: None
    try:
        # NOTE: its options of the compiler, which tune for minutes, would stay for what follows.
        config = Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow(), set_inductor_config=False
        )
        quantize_(model, config, filter_fn=lambda module, name: name in names)
    finally:
        quant_api._check_hardware_support = check
    return model


@contextmanager
def torchao_for_fp8(model: torch.nn.Module, integration) -> Iterator[None]:
    """The linears that `patch(model, linear="fp8")` replaces, by torchao's rowwise dynamic recipe.

    Nothing else is replaced: what is compared is float8 alone.
    """
    before = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    integration.patch(model, linear="fp8")
    now = dict(model.named_modules())
    integration.unpatch(model)
    kept = {name: m.weight for name, m in before.items() if now.get(name) is not m}
    try:
        quantised_by_torchao(model, set(kept))
        yield
    finally:
        for name, weight in kept.items():
            before[name].weight = weight
            vars(before[name]).pop("extra_repr", None)
