"""Recognises attention of diffusers that asks for the signature of its processor in every call.

`inspect.signature` takes the host 25 us, as long as several launches, and 140 such calls a step of
SDXL's UNet: on a fast GPU that waits for the host. The signature of a method is kept instead.
"""

from __future__ import annotations

import inspect
import types
from functools import cache, lru_cache
from typing import Callable, Optional

import torch

from . import _source
from ._patch import Found, Match, marked, replacement_of

SIGNATURE = "signature kept"  # what the report says of such a module
_HELPER = "fuselage_signature"


def recognise_signature(module: torch.nn.Module) -> Found:
    """Any module whose forward has `inspect.signature(self.processor.__call__)`."""
    if "processor" not in vars(module) and "processor" not in module._modules:
        return None
    if replacement_of(module) not in (None, SIGNATURE):
        return None
    function = _keeping(type(module).forward)
    return None if function is None else Match(SIGNATURE, function)


@cache
def _keeping(forward: Callable) -> Optional[Callable]:
    """The forward that keeps it; None of one that does not ask."""
    if getattr(forward, "__globals__", {}).get("inspect") is not inspect:
        return None
    wanted = "inspect.signature(self.processor.__call__)"
    function = _source.calling(forward, wanted, _HELPER, signature)
    return None if function is None else marked(SIGNATURE, function)


def signature(method: Callable) -> inspect.Signature:
    """`inspect.signature(method)`, of bound methods kept."""
    if torch.compiler.is_compiling() or not isinstance(method, types.MethodType):
        return inspect.signature(method)
    return _of_bound(method.__func__)


@lru_cache(256)
def _of_bound(function: Callable) -> inspect.Signature:
    return inspect.signature(types.MethodType(function, object()))
