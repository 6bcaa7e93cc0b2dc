"""Processors of diffusers' attention, of which ours are subclasses that call something else."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Callable, Optional

import torch

from ._patch import original_of


def processor_of(module: torch.nn.Module) -> Optional[object]:
    """That of an attention module; None of other modules, and where it is a module itself."""
    processor = vars(module).get("processor")
    return None if isinstance(processor, torch.nn.Module) else processor


def in_place_of(processor: object, kind: type) -> object:
    """One of a subclass, with the attributes of `processor`."""
    ours = object.__new__(kind)
    vars(ours).update(vars(processor), fuselage_original=processor)
    return ours


def subclass_of(kind: type, call: Callable, what: str, **members) -> type:
    """The subclass whose objects are called as `call`, and stand for `what`."""
    members |= {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    members |= {"__reduce__": _as_the_plain_one, "__deepcopy__": _as_ours}
    subclass = type(kind.__name__, (kind,), {**members, "fuselage_replacement": what})
    _register_like(kind, subclass)
    return subclass


def _register_like(kind: type, subclass: type) -> None:
    """Tells diffusers of it, which skips attention by what it knows of a processor's class."""
    helpers = sys.modules.get("diffusers.hooks._helpers")  # whose models have imported it
    registry = getattr(helpers, "AttentionProcessorRegistry", None)
    if registry is None:
        return
    try:
        registry.register(subclass, registry.get(kind))
    except ValueError:  # it knows nothing of the class
        return


def _as_the_plain_one(self):
    """A pickle cannot hold a class that is made here, and loads as the plain model anyway."""
    # Protocol 1 names the class in a way in which it may be another one than that of the object.
    return original_of(self).__reduce_ex__(1)


def _as_ours(self, memo: dict):
    copied = object.__new__(type(self))
    memo[id(self)] = copied
    vars(copied).update(deepcopy(vars(self), memo))
    return copied
