"""Recognises group norms, by their class and by what they compute."""

from __future__ import annotations

from typing import Optional

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..group_norm import group_norm
from . import _probe
from ._norms import parameter
from ._norms import taken as norm_taken
from ._patch import Found, Match, marked

GROUP_NORM = "group_norm"  # what the report says of one


def recognise_group_norm(module: torch.nn.Module) -> Found:
    """`torch.nn.GroupNorm`, and what derives from it without another forward."""
    if not isinstance(module, torch.nn.GroupNorm):
        return None
    if type(module).forward is not torch.nn.GroupNorm.forward:
        return "its forward is not that of torch.nn.GroupNorm"
    if not _agrees(module):
        return "it computes something else than torch.nn.GroupNorm"
    return Match(GROUP_NORM, _forward)


def _forward(self, input: torch.Tensor) -> torch.Tensor:
    # PyTorch refuses groups of one value, and parameters of another dtype on a GPU.
    if not taken(self, input) or _is_one_value(self, input):
        return type(self).forward(self, input)
    weight, bias = parameter(self, "weight"), parameter(self, "bias")
    return group_norm(input, self.num_groups, weight, bias, self.eps)


_LARGE_GROUP = 2**18  # elements


def taken(norm: torch.nn.GroupNorm, x: torch.Tensor) -> bool:
    """Whether the operator takes these, and is the faster one. Autocast runs F.group_norm in
    float32 on a GPU, and the modules around it expect that.

    Compiled on an H100, SDXL's autoencoder decoded 1024x1024 in 38.3 ms with the compiler's, and
    takes 27.3. Residual blocks as those of its UNet take 0.93 to 0.98 of the time if channels come
    first, and would take 1.04 to 1.08 of it if they come last.
    """
    compiled = _probe.left_to_the_compiler() and (x.is_contiguous() or _has_large_groups(norm, x))
    return norm_taken(x, parameter(norm, "weight"), compiled) and not _probe.autocasts(x)


def _has_large_groups(norm: torch.nn.GroupNorm, x: torch.Tensor) -> bool:
    """As far as it is known while the model is traced."""
    elements = norm.num_channels // norm.num_groups
    for size in x.shape[2:]:
        elements *= size
    return statically_known_true(elements >= _LARGE_GROUP)


def _is_one_value(self, input: torch.Tensor) -> bool:
    """Whether a group has one: by dimensions alone, so that a traced size adds no guard."""
    return input.dim() <= 2 and self.num_groups == self.num_channels


_forward = marked(GROUP_NORM, _forward)


def _agrees(module: torch.nn.GroupNorm) -> bool:
    """With small inputs in every dtype, values and gradients."""
    channels = module.num_channels
    for dtype, affine_dtype in _probe.PAIRS[:3]:  # F.group_norm takes no others everywhere
        made = {
            name: None if value is None else _probe.random(channels, dtype=affine_dtype, seed=seed)
            for seed, (name, value) in enumerate(vars(module)["_parameters"].items(), 1)
        }
        if not made.keys() <= {"weight", "bias"}:
            return False
        for plain in _probe.stand_ins(module, made):
            x = _probe.random(2, channels, 3, 5, dtype=dtype) + 0.25
            theirs = _probe.call(torch.nn.GroupNorm.forward, plain, x)
            if not _probe.agree(_probe.call(_forward, plain, x), theirs):
                return False
    return _same_slopes(plain, x.float())


def _same_slopes(plain: torch.nn.GroupNorm, x: torch.Tensor) -> bool:
    parameters: dict[str, Optional[torch.Tensor]] = vars(plain)["_parameters"]
    for name, value in parameters.items():
        parameters[name] = None if value is None else value.float()
    leaves = [x, *(v for v in parameters.values() if v is not None)]
    return _probe.same_slopes(
        lambda: _forward(plain, x), lambda: torch.nn.GroupNorm.forward(plain, x), leaves
    )
