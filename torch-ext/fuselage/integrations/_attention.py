"""Models of transformers: attention without a mask. Compiled ones where eager mode has none, and
all over windows.

Eager models hand attention no mask where there is no padding, and it is purely causal or looks both
ways. Compiled ones make a mask in memory, and attention reads it, in a kernel that is slower: the
values of `position_ids` and of a padding mask are not known while the model is traced, and before
Torch 2.13 tracing looked like an export, so that no mask at all was left out.
Where the caller gave neither, both are known. Then the model is traced with an attention
implementation whose mask function, registered with transformers, returns no mask where transformers
itself would return none in eager mode, and makes the same mask as ever otherwise. A mask that is
given is never left out: its values are not known.

Of a mask over a sliding window, causal or both ways, the same is known. What attention is given in
its place says how wide the window is (`_window.py`), where the GPU has a kernel that takes windows.
Eager models have masks of windows, too, and are told in the same way: their mask is marked.

With a mask, as static caches have one, that implementation copies no keys for the heads that share
them, where there is one token.
"""

from __future__ import annotations

import copy
import inspect
import sys
from functools import cache, partial
from types import ModuleType
from typing import Callable, NamedTuple, Optional

import torch

from . import _decoding, _probe, _source, _window
from ._patch import Found, Match, around, innermost, marked, replacement

WHAT = "causal attention without a mask, if compiled"
BOTH_WAYS = "attention without a mask, if compiled"

_CAUSAL = f"{__name__}.causal"  # the names of attention implementations
_UNMASKED = f"{__name__}.unmasked"
_WINDOWS = f"{__name__}.windows"
_BOTH_WAYS_WINDOWS = f"{__name__}.both_ways_windows"
_OVERLAID = f"{__name__}.overlaid"  # Gemma 3 as an encoder
_RECORDED = f"{__name__}.recorded"


class _Formula(NamedTuple):
    """Of the windows of a model.

    Args:
        window: Of the `local_size` that transformers hands to a mask function.
        both_ways: Whether transformers is asked for a mask that looks both ways.
        overlaid: Whether it is asked for a causal one, over which the model lays what comes after.
    """

    window: Callable[[int], _window.Window]
    both_ways: bool = False
    overlaid: bool = False


# By the implementation of a compiled model. That of an eager one has `_MARKED` after it.
_FORMULAS = {
    _WINDOWS: _Formula(_window.causal),
    _BOTH_WAYS_WINDOWS: _Formula(_window.both_ways, both_ways=True),
    _OVERLAID: _Formula(_window.both_ways_below, overlaid=True),
}
_MARKED = ".marked"

# Arguments of attention functions that make it another formula.
_CHANGES = {"softcap", "position_bias", "cache", "s_aux", "output_attentions"}

_ASKED_OF = {"attention_mask", "position_ids", "inputs_embeds"}
_CACHES = {"cache", "past_key_values"}  # names of one argument: the latter before transformers 5.23
# What a caller may give: not what a model may lay over its mask. Positions that start anew are
# those of packed sequences, but not of a model with a cache.
_KNOWN = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "labels",
    "num_items_in_batch",
}


def recognise_masks(module: torch.nn.Module) -> Found:
    """What makes the masks of its layers: the body of a causal language model, or of an encoder or
    a decoder, or whatever else asks transformers for a mask that looks both ways.
    """
    masking = sys.modules.get("transformers.masking_utils")
    config = getattr(module, "config", None)
    if masking is None or not hasattr(config, "_attn_implementation"):
        return None
    child = _text_model(module)
    # Other parts of a model would get the implementation as well.
    if child is None and getattr(config, "sub_configs", None):
        return None
    # Of a body that is no model, its configuration says whether its attention can be told.
    if not getattr(module, "_supports_sdpa", config._attn_implementation == "sdpa"):
        return None
    name = _implementation(module, masking, child)
    if name is None:
        return None
    _register(masking)
    forward = _forward(type(module), innermost(module), name, child)
    return Match(replacement(forward), forward)


def _implementation(
    module: torch.nn.Module, masking: ModuleType, child: Optional[str]
) -> Optional[str]:
    """The name of that which the model is compiled with; None of a model whose masks stay."""
    names = inspect.signature(type(module).forward).parameters.keys()
    is_decoder = names >= _ASKED_OF and bool(names & _CACHES)
    looks_both_ways = child is None and _looks_both_ways(type(module), masking)
    if not is_decoder and not looks_both_ways:
        return None
    calls = _mask_calls(module, masking, child) if _layers(module, child) else []
    if is_decoder and calls and all(_may_be_skipped(call) for call in calls):
        return _WINDOWS if _has_windows(calls, _WINDOWS) else _CAUSAL
    if child is not None:
        return None
    if is_decoder and _has_windows(calls, _OVERLAID) and _is_open_beside(module, calls):
        return _OVERLAID
    if _has_windows(calls, _BOTH_WAYS_WINDOWS):
        return _BOTH_WAYS_WINDOWS
    return _UNMASKED if looks_both_ways else None


def _has_windows(calls: list[dict], name: str) -> bool:
    """Whether masks are over windows, and all such have the formula of an implementation."""
    windows = [call for call in calls if call.get("local_size") is not None]
    return bool(windows) and all(
        (window := _window_of(call, name)) is not None
        and _window.is_window(call["mask_function"], window)
        for call in windows
    )


def _window_of(call: dict, name: str) -> Optional[_window.Window]:
    """That of a mask, if it is one that the formula of an implementation is for."""
    size, formula = call.get("local_size"), _FORMULAS.get(name)
    if size is None or formula is None:
        return None
    if ("allow_is_bidirectional_skip" in call) != formula.both_ways:
        return None
    if bool(call.get("use_vmap")) != formula.overlaid:
        return None
    return formula.window(size) if call.get("allow_is_bidirectional_skip", True) else None


def _is_open_beside(module: torch.nn.Module, calls: list[dict]) -> bool:
    """Whether the masks of a model with overlays mask nothing but windows, and its attention
    without a mask is not causal.
    """
    parts = [part for layers in _layers(module, None) for part in layers.modules()]
    causal = [part.is_causal for part in parts if hasattr(part, "is_causal")]
    return not any(causal) and all(
        call.get("use_vmap") and _window.is_open(call["mask_function"])
        for call in calls
        if call.get("local_size") is None
    )


def _text_model(module: torch.nn.Module) -> Optional[str]:
    """The name of the language model in one of several parts, as text and images. The masks may be
    those that the whole makes, as Gemma 3 does.
    """
    if not getattr(module.config, "sub_configs", None):
        return None
    text = module.config.get_text_config()
    names = (n for n, child in module.named_children() if getattr(child, "config", None) is text)
    return None if text is module.config else next(names, None)


def _layers(module: torch.nn.Module, child: Optional[str]) -> list[torch.nn.ModuleList]:
    children = (module if child is None else module._modules[child])._modules.values()
    return [each for each in children if isinstance(each, torch.nn.ModuleList)]


@cache
def _looks_both_ways(kind: type, masking: ModuleType) -> bool:
    """Whether its forward, or a method that it calls, asks for a mask that looks both ways.

    The code need not be understood: what is left out is for the mask function to say.
    """
    wanted = {id(v) for k, v in vars(masking).items() if k.startswith("create_bidirectional_")}
    return any(
        id(method.__globals__.get(name)) in wanted
        for method in _source.methods(kind)
        for name in method.__code__.co_names
    )


class _MasksAreMade(Exception):
    """A language model is called with them."""


def _no_further(*args, **kwargs) -> None:
    raise _MasksAreMade


def _mask_calls(
    module: torch.nn.Module, masking: ModuleType, text_model: Optional[str]
) -> list[dict]:
    """What the model asks of mask functions in eager mode, for a few tokens and nothing else."""
    calls: list[dict] = []
    masking.AttentionMaskInterface.register(_RECORDED, lambda **kwargs: calls.append(kwargs))
    children = {
        name: torch.nn.ModuleList()
        if isinstance(child, torch.nn.ModuleList)
        else _probe.Stub(_no_further if name == text_model else _same_tokens)
        for name, child in module.named_children()
    }
    config = copy.deepcopy(module.config)
    config._attn_implementation = _RECORDED
    for plain in _probe.stand_ins(module, modules=children):
        vars(plain)["config"] = config
        for use_cache in (False, True):
            forward = partial(type(module).forward, plain, use_cache=use_cache)
            result = _probe.call(partial(forward, inputs_embeds=_probe.random(2, 4, 8)))
            if isinstance(result, Exception) and not isinstance(result, _MasksAreMade):
                return []
    return calls


def _same_tokens(*args, **kwargs) -> torch.Tensor:
    """For embeddings, norms and the like: their values have no say in the mask."""
    x = next(each for each in (*args, *kwargs.values()) if each is not None)
    return x if x.is_floating_point() else _probe.random(*x.shape, 8)


def _may_be_skipped(call: dict) -> bool:
    """Whether the mask is causal, over a window or not, and nothing was laid over it."""
    return call.get("allow_is_causal_skip") is True and not call.get("use_vmap")


def _register(masking: ModuleType) -> None:
    attention = sys.modules["transformers.modeling_utils"].AttentionInterface
    sdpa = masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    functions = {name: _mask_function(sdpa, name) for name in (_CAUSAL, _UNMASKED, *_FORMULAS)}
    functions |= {name + _MARKED: _eager_mask_function(sdpa, name) for name in _FORMULAS}
    for name, function in functions.items():
        masking.AttentionMaskInterface.register(name, function)
        attention.register(name, _attention_function(attention()["sdpa"]))


@cache
def _attention_function(sdpa: Callable) -> Callable:
    """As the attention function of `sdpa`, and called with the same, or with the stand-in of a
    window. With a mask, `sdpa` copies keys and values for each head that shares them.

    Where there is one token, as in decoding with a static cache, the heads that share a key are
    queries of one head, and nothing is copied. Copies and the attention that reads them took 118 of
    the 308 us of a layer of Llama-3-8B, for 8 sequences of 1024 tokens on an H100. Where these are
    too few blocks for a GPU, each has a part of the keys (`_decoding.py`).
    """

    def attention(module, query, key, value, attention_mask, **kwargs):
        batch, heads, queries, _ = query.shape
        others = {k for k, v in kwargs.items() if v is not None and v is not False} & _CHANGES
        window = _window.window_of(attention_mask)
        if window is not None:
            cast = tuple(_window.as_attention_has_it(x) for x in (query, key, value))
            if _window.takes(*cast, kwargs.get("dropout", 0.0)) and not others:
                return _window.attend(*cast, window, kwargs.get("scaling")), None
            if _window.is_stand_in(attention_mask):
                attention_mask = _window.mask_of(window, queries, query.device)
        shares = heads > key.shape[1] and queries == 1
        one_mask = attention_mask is not None and attention_mask.shape[1:-1] == (1, 1)
        if not (shares and one_mask) or others:
            return sdpa(module, query, key, value, attention_mask, **kwargs)
        dropout, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
        parts = _decoding.parts_of(query, key, value, attention_mask, dropout)
        if parts > 1:
            out = _decoding.attend(query, key, value, attention_mask, scale, parts)
            return out.transpose(1, 2), None
        out = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(batch, key.shape[1], -1, query.shape[-1]),
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            scale=scale,
        )
        return out.reshape(batch, 1, heads, value.shape[-1]), None

    return attention


@cache
def _mask_function(sdpa: Callable, name: str) -> Callable:
    """As the mask function of `sdpa`, and called with the same: None where eager mode has none, or
    the stand-in of a window.

    NOTE: `allow_is_causal_skip` is False for positions that may be packed. Where they are
    `counted`, the model counts them, or it has a cache, and then they have no say.
    """
    counted = name in (_CAUSAL, _WINDOWS)

    def mask(**kwargs) -> Optional[torch.Tensor]:
        queries, keys = kwargs["q_length"], kwargs["kv_length"]
        size, window = kwargs.get("local_size"), _window_of(kwargs, name)
        if kwargs.get("attention_mask") is not None:
            return sdpa(**kwargs)
        if size is not None and keys >= size:
            if window is not None and _has_kernel(kwargs):
                return _window.stand_in(window, torch.device(kwargs["device"]))
            return sdpa(**kwargs)
        if kwargs.get("use_vmap"):
            return None if _is_open(kwargs, name) else sdpa(**kwargs)
        if "allow_is_bidirectional_skip" in kwargs:  # nothing is masked, unless it is laid over
            return None if kwargs["allow_is_bidirectional_skip"] else sdpa(**kwargs)
        # The offset of a static cache is a tensor, whose value is not known.
        if isinstance(kwargs.get("q_offset"), torch.Tensor):
            return sdpa(**kwargs)
        may_skip = kwargs["allow_is_causal_skip"]
        first_or_last = may_skip and (queries == 1 or kwargs["q_offset"] == 0)
        all_of_them = keys == queries and (may_skip or counted)
        return None if all_of_them or first_or_last else sdpa(**kwargs)

    return mask


@cache
def _eager_mask_function(sdpa: Callable, name: str) -> Callable:
    """As the mask function of `sdpa`. Masks of windows are marked where values say that it is all
    that they are.
    """

    def mask(**kwargs) -> Optional[torch.Tensor]:
        given, window = kwargs.get("attention_mask"), _window_of(kwargs, name)
        if _is_open(kwargs, name) and (given is None or _is_of_ones(given)):
            return None
        made = sdpa(**kwargs)
        packed = name == _WINDOWS and not _may_be_skipped(kwargs)
        if made is None or window is None or packed:
            return made
        if _has_kernel(kwargs) and (given is None or _is_of_ones(given)):
            _window.mark(made, window)
        return made

    return mask


def _is_open(mask: dict, name: str) -> bool:
    """Whether an overlay leaves nothing masked: it has no window, or all tokens are within it."""
    if name != _OVERLAID or not mask.get("use_vmap") or not _is_whole(mask):
        return False
    size = mask.get("local_size")
    return size is None or mask["kv_length"] <= size


def _is_of_ones(given: torch.Tensor) -> bool:
    """Whether it is known to be: nothing may be read in a capture, nor of FakeTensors."""
    if type(given) is not torch.Tensor:
        return False
    if given.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(given.all())


def _has_kernel(mask: dict) -> bool:
    """Whether windows have a kernel, which takes masks of all tokens."""
    device = torch.device(mask["device"])
    dtype = _window.dtype_of_attention(device, mask.get("dtype"))
    return _is_whole(mask) and _window.has_kernel(device, dtype)


def _is_whole(mask: dict) -> bool:
    """Whether it is of all tokens, with none before them."""
    offset = mask.get("q_offset", 0)
    known = not isinstance(offset, torch.Tensor)
    return known and offset == 0 and mask["q_length"] == mask["kv_length"]


def _is_eager(model: torch.nn.Module, child: Optional[str]) -> bool:
    """Whether the model is called as it is, and none of its layers a second time in the backward:
    the configuration has its own implementation again by then.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if not torch.is_grad_enabled():
        return True
    layers = [layer for each in _layers(model, child) for layer in each._modules.values()]
    parts = [*layers, *(part for layer in layers for part in layer._modules.values())]
    return not any(_runs_again(part) for part in parts if part is not None)


def _runs_again(part: torch.nn.Module) -> bool:
    """Whether it is checkpointed. FSDP2 makes subclasses, of the wrapper as well."""
    names = {kind.__name__ for kind in type(part).__mro__}
    return bool(vars(part).get("gradient_checkpointing")) or "CheckpointWrapper" in names


@cache
def _forward(kind: type, own: Optional[Callable], name: str, child: Optional[str]) -> Callable:
    """The forward of the class, or `own`, another one of ours, with an implementation: that of its
    configuration, or of a child's.
    """
    signature = inspect.signature(kind.forward)
    names = tuple(signature.parameters)[1:]

    def forward(self, *args, **kwargs):
        inner = own or type(self).forward
        config = (self if child is None else self._modules[child]).config
        if config._attn_implementation != "sdpa":
            return inner(self, *args, **kwargs)
        given = {k for k, v in (*zip(names, args), *kwargs.items()) if v is not None}
        known = _KNOWN | _CACHES | ({"position_ids"} if given & _CACHES else set())
        if torch.compiler.is_dynamo_compiling():
            config._attn_implementation = name if given <= known else _UNMASKED
        elif name in _FORMULAS and (given <= known or name != _OVERLAID) and _is_eager(self, child):
            config._attn_implementation = name + _MARKED
        else:
            return inner(self, *args, **kwargs)
        try:
            return inner(self, *args, **kwargs)
        finally:
            config._attn_implementation = "sdpa"

    forward.__signature__ = signature
    what = WHAT if name in (_CAUSAL, _WINDOWS) else BOTH_WAYS
    if own is not None:
        what = f"{replacement(own)} and {what}"
    return around(own, marked(what, forward))
