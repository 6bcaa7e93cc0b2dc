"""Attention over a sliding window, causal or both ways, without a mask: PyTorch's flash attention
has windows, though `scaled_dot_product_attention` does not hand them on.

It skips what lies outside of the window, where attention with a mask multiplies all tokens by all
tokens and reads the mask besides.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Optional

import torch

from .._autocast import dtype_of_product
from . import _probe

_MARK = "fuselage_window"

_flash = torch.ops.aten._flash_attention_forward.default


class Window(NamedTuple):
    """How many tokens a query attends to before its own, and after it."""

    left: int
    right: int


def causal(size: int) -> Window:
    """Of `size` tokens, the query's own is the last."""
    return Window(size - 1, 0)


def both_ways(distance: int) -> Window:
    """Tokens as far away as `distance`, and nearer ones."""
    return Window(distance, distance)


def both_ways_below(distance: int) -> Window:
    """Tokens nearer than `distance`."""
    return Window(distance - 1, distance - 1)


def stand_in(window: Window, device: torch.device) -> torch.Tensor:
    """What goes through a model in place of the mask of a window: without elements, so that nobody
    takes it for a mask.
    """
    return torch.empty((1, *window, 0), dtype=torch.bool, device=device)


def is_stand_in(mask: Optional[torch.Tensor]) -> bool:
    return mask is not None and mask.dim() == 4 and mask.shape[3] == 0


def window_of(mask: Optional[torch.Tensor]) -> Optional[Window]:
    """That of a stand-in, or of a mask that was marked, and not changed since; None of others."""
    if is_stand_in(mask):
        return Window(mask.shape[1], mask.shape[2])
    # Compiled layers of an eager model are given masks, too.
    if torch.compiler.is_compiling() or not hasattr(mask, _MARK):
        return None
    window, version = getattr(mask, _MARK)
    return window if _version(mask) == version else None


def mark(mask: torch.Tensor, window: Window) -> None:
    """Says that a mask is that of a window. Whoever does not ask has the mask."""
    setattr(mask, _MARK, (window, _version(mask)))


def _version(mask: torch.Tensor) -> Optional[int]:
    """How often it, or a view of it, was written. NOTE: nobody counts that of inference tensors."""
    return None if mask.is_inference() else mask._version


def mask_of(window: Window, tokens: int, device: torch.device) -> torch.Tensor:
    positions = torch.arange(tokens, device=device)
    return _is_inside(positions, positions, window)


def _is_inside(queries: torch.Tensor, keys: torch.Tensor, window: Window) -> torch.Tensor:
    """The mask of these positions, `[1, 1, queries, keys]`."""
    back = queries[:, None] - keys
    return ((back >= -window.right) & (back <= window.left))[None, None]


def is_window(mask_function, window: Window) -> bool:
    """Whether a mask function of transformers is `mask_of`, as far as some tokens show."""
    if min(window) < 0:
        return False
    size = max(window) + 1
    tokens = 2 * size + 3
    near = {0, 1, size - 1, size, size + 1, 2 * size, tokens - 1}
    return _agrees(mask_function, window, torch.tensor(sorted(near)), torch.arange(tokens))


def is_open(mask_function) -> bool:
    """Whether a mask function of transformers masks nothing, as far as some tokens show."""
    positions = torch.tensor([0, 1, 2, 10, 10**3, 10**6])
    return _agrees(mask_function, both_ways(10**6), positions, positions)


def _agrees(mask_function, window: Window, queries: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether it masks what is outside of the window, for these positions."""
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long)
    try:
        made = mask_function(zero, zero, queries[None, None, :, None], keys[None, None, None])
    except Exception:  # whatever a model lays over its mask
        return False
    expected = _is_inside(queries, keys, window)
    return torch.equal(made.expand(expected.shape), expected)


# NOTE: models are traced through both, and Dynamo does not look into what they ask.
@torch.compiler.assume_constant_result
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cuda"
        and dtype in _probe.HALF
        and _is_built()
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@cache
def _is_built() -> bool:
    """NOTE: not on ROCm, where nobody has tried."""
    has_windows = any(argument.name == "window_size_left" for argument in _flash._schema.arguments)
    has_flash = torch.backends.cuda.is_flash_attention_available()
    return has_windows and has_flash and torch.version.hip is None


@torch.compiler.assume_constant_result
def _max_dim(device: torch.device) -> int:
    """Of a head. The backward of larger ones takes more shared memory than other GPUs have."""
    if device.type != "cuda":
        return 256
    major, minor = torch.cuda.get_device_capability(device)
    return 256 if major in (9, 10) or (major, minor) == (8, 0) else 192


def dtype_of_attention(device: torch.device, dtype: Optional[torch.dtype]) -> Optional[torch.dtype]:
    """What it computes in, of heads of a dtype: that of autocast, but of float64."""
    return dtype if dtype == torch.float64 else dtype_of_product(device.type, dtype)


def as_attention_has_it(x: torch.Tensor) -> torch.Tensor:
    """As autocast hands it to attention. NOTE: it does not know of the kernel."""
    return x.to(dtype_of_attention(x.device, x.dtype))


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Whether the kernel takes these heads; `has_kernel` has been asked. DTensors have no rule for
    it.
    """
    dim = query.shape[-1]
    return (
        dropout == 0.0
        and all(type(x) is torch.Tensor for x in (query, key, value))
        and key.shape[-1] == dim == value.shape[-1]
        and dim % 8 == 0
        and dim <= _max_dim(query.device)
        and query.dtype == key.dtype == value.dtype
        and query.dtype in _probe.HALF
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: Window,
    scale: Optional[float],
) -> torch.Tensor:
    """`[batch, tokens, heads, dim]`, of `[batch, heads, tokens, dim]` and as many or fewer heads of
    keys and values.
    """
    heads_last = (x.transpose(1, 2) for x in (query, key, value))
    tokens = query.shape[2]
    return _flash(
        *(*heads_last, None, None, tokens, tokens, 0.0, window.right == 0, False),
        scale=scale,
        window_size_left=window.left,
        window_size_right=window.right,
    )[0]
