"""Sharding without a second process: a mesh of one, and parameters that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def process_group() -> Iterator:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def partition(model: nn.Module) -> None:
    """Gives every parameter size 0 but while its module runs, as ZeRO-3 does, by hooks."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        for parameter in own:
            if not hasattr(parameter, "whole"):
                parameter.whole, parameter.ds_shape = parameter.data, parameter.shape
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        module.register_forward_pre_hook(lambda module, args: _fetch(module))
        module.register_forward_hook(lambda module, args, out: _release(module))


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    for module in model.modules():
        _fetch(module)
    yield
    for module in model.modules():
        _release(module)


def _fetch(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.whole


def _release(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = torch.empty(0, dtype=parameter.dtype)
