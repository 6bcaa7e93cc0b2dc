"""Compiled causal models of transformers: attention that is told `is_causal`, without a mask.

Eager models hand attention no mask where it is purely causal. Compiled ones make a mask in memory,
and attention reads it, in a kernel that is slower: the values of `position_ids` and of a padding
mask are not known while the model is traced, and before Torch 2.13 tracing looked like an export.
Where the caller gave neither, both are known. Then the model is traced with an attention
implementation whose mask function, registered with transformers, returns no mask where transformers
itself would return none in eager mode, and makes the same mask as ever otherwise.
"""

from __future__ import annotations

import copy
import inspect
import sys
from functools import cache, partial
from types import ModuleType
from typing import Callable, Optional

import torch

from . import _probe
from ._patch import Found, Match, marked

WHAT = "causal attention without a mask, if compiled"

_CAUSAL = f"{__name__}.causal"  # the names of attention implementations
_RECORDED = f"{__name__}.recorded"

_ASKED_OF = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds"}
# What a caller may give: not what a model may lay over its mask. Positions that start anew are
# those of packed sequences, but not of a model with a cache.
_KNOWN = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
}


def recognise_causal_model(module: torch.nn.Module) -> Found:
    """The body of a causal language model: what holds its layers and makes their mask."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not getattr(module, "_supports_sdpa", False):
        return None
    if not inspect.signature(type(module).forward).parameters.keys() >= _ASKED_OF:
        return None
    if not any(isinstance(child, torch.nn.ModuleList) for child in module.children()):
        return None
    if getattr(module.config, "sub_configs", None):  # which would get the implementation as well
        return None
    calls = _mask_calls(module, masking)
    if not calls or not all(_may_be_skipped(call) for call in calls):
        return None
    _register(masking)
    return Match(WHAT, _forward(type(module)))


def _mask_calls(module: torch.nn.Module, masking: ModuleType) -> list[dict]:
    """What the model asks of mask functions in eager mode, for a few tokens and nothing else."""
    calls: list[dict] = []
    masking.AttentionMaskInterface.register(_RECORDED, lambda **kwargs: calls.append(kwargs))
    children = {
        name: torch.nn.ModuleList()
        if isinstance(child, torch.nn.ModuleList)
        else _probe.Stub(_same_tokens)
        for name, child in module.named_children()
    }
    config = copy.deepcopy(module.config)
    config._attn_implementation = _RECORDED
    for plain in _probe.stand_ins(module, modules=children):
        vars(plain)["config"] = config
        for use_cache in (False, True):
            forward = partial(type(module).forward, plain, use_cache=use_cache)
            result = _probe.call(partial(forward, inputs_embeds=_probe.random(2, 4, 8)))
            if isinstance(result, Exception):
                return []
    return calls


def _same_tokens(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """For embeddings, norms and the like: their values have no say in the mask."""
    return x if x.is_floating_point() else _probe.random(*x.shape, 8)


def _may_be_skipped(call: dict) -> bool:
    """Whether the mask is causal, over a window or not, and nothing was laid over it."""
    return call.get("allow_is_causal_skip") is True and not call.get("use_vmap")


def _register(masking: ModuleType) -> None:
    attention = sys.modules["transformers.modeling_utils"].AttentionInterface
    sdpa = masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    masking.AttentionMaskInterface.register(_CAUSAL, _mask_function(sdpa))
    attention.register(_CAUSAL, attention()["sdpa"])


@cache
def _mask_function(sdpa: Callable) -> Callable:
    def mask(**kwargs) -> Optional[torch.Tensor]:
        """As the mask function of `sdpa`, and called with the same: None where `is_causal` does.

        NOTE: `allow_is_causal_skip` is False for positions that may be packed. Here they are those
        of a model that counts them, or it has a cache, and then they have no say.
        """
        queries, keys = kwargs["q_length"], kwargs["kv_length"]
        window = kwargs.get("local_size")
        masked = kwargs.get("attention_mask") is not None or (window is not None and keys >= window)
        # The offset of a static cache is a tensor, whose value is not known.
        if masked or isinstance(kwargs.get("q_offset"), torch.Tensor):
            return sdpa(**kwargs)
        first_or_last = kwargs["allow_is_causal_skip"] and (queries == 1 or kwargs["q_offset"] == 0)
        return None if keys == queries or first_or_last else sdpa(**kwargs)

    return mask


@cache
def _forward(kind: type) -> Callable:
    signature = inspect.signature(kind.forward)
    names = tuple(signature.parameters)[1:]

    def forward(self, *args, **kwargs):
        own = type(self).forward
        if not torch.compiler.is_dynamo_compiling():
            return own(self, *args, **kwargs)
        given = {k for k, v in (*zip(names, args), *kwargs.items()) if v is not None}
        known = _KNOWN | {"position_ids"} if "past_key_values" in given else _KNOWN
        if self.config._attn_implementation != "sdpa" or not given <= known:
            return own(self, *args, **kwargs)
        self.config._attn_implementation = _CAUSAL
        try:
            return own(self, *args, **kwargs)
        finally:
            self.config._attn_implementation = "sdpa"

    forward.__signature__ = signature
    return marked(WHAT, forward)
