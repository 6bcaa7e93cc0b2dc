"""Upsampling of images that are channels last, twice as high and wide, in any forward that has

    F.interpolate(x, scale_factor=2.0, mode="nearest")          -> upsampled(x)

PyTorch's kernel takes five to seven times as long there as what stands in its place: a copy of all
channels of a position, as numbers of 16 bytes, to four places.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Callable, Optional

import torch
from torch.nn import functional as F

from . import _source
from ._convs import is_large_image
from ._decorators import match_within
from ._patch import Found, marked, replacement_of

UPSAMPLING = "nearest upsampling by a copy"  # what the report says of such a module
_HELPER = "fuselage_upsampled"
_PLAIN = ast.parse('F.interpolate(x, scale_factor=2.0, mode="nearest")', mode="eval").body
_WIDE = torch.complex128  # 16 bytes


def upsampled(x: torch.Tensor) -> torch.Tensor:
    """`F.interpolate(x, scale_factor=2.0, mode="nearest")`, with its layout."""
    if not _taken(x):
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
    samples, channels, height, width = x.shape
    out = x.new_empty(samples, height, 2, width, 2, channels)
    rows = x.movedim(1, -1)[:, :, None, :, None].view(_WIDE)
    out.view(_WIDE).copy_(rows.expand(-1, -1, 2, -1, 2, -1))
    return out.view(samples, 2 * height, 2 * width, channels).movedim(-1, 1)


def _taken(x: torch.Tensor) -> bool:
    """Whether it is a large image whose positions are whole numbers of 16 bytes, for inference."""
    if not is_large_image(x, times=4) or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return not (x.shape[1] * x.element_size() % _WIDE.itemsize or x.data_ptr() % _WIDE.itemsize)


def recognise_upsampling(module: torch.nn.Module) -> Found:
    """Any module with such a call in its forward, unless that is another of ours."""
    if replacement_of(module) not in (None, UPSAMPLING):
        return None
    forward = type(module).forward
    plain = inspect.unwrap(forward)
    if not inspect.isfunction(plain) or plain.__globals__.get("F") is not F:
        return None
    function = _upsampling_forward(plain)
    return None if function is None else match_within(UPSAMPLING, forward, function)


@cache
def _upsampling_forward(forward: Callable) -> Optional[Callable]:
    if "interpolate" not in forward.__code__.co_names:
        return None
    definition = _source.read(forward)
    calls = [] if definition is None else list(filter(_is_plain, ast.walk(definition)))
    if not calls:
        return None
    for call in calls:
        name = ast.copy_location(ast.Name(_HELPER, ast.Load()), call.func)
        call.func, call.keywords = name, []
    function = _source.function_of(definition, {_HELPER: upsampled}, forward)
    return marked(UPSAMPLING, function)


def _is_plain(node: ast.AST) -> bool:
    """Whether it is that call, of anything."""
    if not isinstance(node, ast.Call) or len(node.args) != 1:
        return False
    alike = ast.Call(node.func, _PLAIN.args, node.keywords)
    return not isinstance(node.args[0], ast.Starred) and _source.same(alike, _PLAIN)
