"""Recognises the adaptive norms of diffusers, which take scale and shift from an embedding.

They agree on `norm(x) * (1 + scale) + shift` and on little else: the order of scale and shift, and
what else the projection of the embedding holds, differ from class to class. So each is probed.
"""

from __future__ import annotations

from functools import partial
from typing import Callable, Optional

import torch

from ..ada_norm import ada_layer_norm
from . import _probe
from ._patch import Found, Match, known_name, listened_to, marked


def recognise_ada_norm(module: torch.nn.Module) -> Found:
    """The norms of `_FORMS` whose inner layer norm has no parameters."""
    name = known_name(module, _FORMS)
    norm = getattr(module, "norm", None)
    if name is None or norm is None:
        return None  # its parts are looked at one by one
    if not isinstance(norm, torch.nn.LayerNorm) or len(norm.normalized_shape) != 1:
        return "its norm is no layer norm over the last dimension"
    if norm.weight is not None or norm.bias is not None:
        return "its norm has parameters of its own; that norm is replaced instead"
    if getattr(module, "chunk_dim", 1) != 1:
        return "its scale and shift lie along another dimension; its norm is replaced instead"
    function, chunks, arguments = _FORMS[name]
    if not _behaves_the_same(module, function, chunks, arguments):
        return "it computes something else than ada_layer_norm"
    return Match("ada_layer_norm", function, covers=("norm",))


def modulate(
    norm: torch.nn.Module,
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
) -> torch.Tensor:
    """`norm(x) * (1 + scale) + shift` with scale and shift `[batch, dim]`, in one kernel."""
    if fusible(norm, x, scale):
        return ada_layer_norm(x, scale[:, None], shift[:, None], eps=norm.eps)
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


def fusible(norm: torch.nn.Module, x: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether the fused operator gives the dtype of the formula, and no hook misses the norm."""
    taken = x.dtype == scale.dtype and x.dtype in _probe.DTYPES and not _probe.autocasts(x)
    return taken and not listened_to(norm)


def _behaves_the_same(module, function: Callable, chunks: int, arguments: tuple) -> bool:
    dim = module.norm.normalized_shape[0]
    if getattr(module.linear, "out_features", None) != chunks * dim:
        return False

    def projection(emb: torch.Tensor) -> torch.Tensor:
        return torch.cat([emb * (1 + i) + i / 8 for i in range(chunks)], dim=-1)

    children = {**module._modules, "linear": _probe.Stub(projection), "emb": None}
    x = _probe.random(2, 5, dim) + 0.5
    given = {"x": x, "emb": _probe.random(2, dim, seed=1), "y": _probe.random(2, 3, dim, seed=2)}
    keywords = {name: given[key] for name, key in arguments}
    for plain in _probe.stand_ins(module, None, children):
        expected = _probe.call(partial(type(module).forward, plain, **keywords))
        if not _probe.agree_all(_probe.call(partial(function, plain, **keywords)), expected):
            return False
    return True


# The forwards.


def _embedded(self, emb: torch.Tensor) -> torch.Tensor:
    return self.linear(self.silu(emb))


def _zero(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, gate, *rest = _embedded(self, emb).chunk(6, dim=1)
    return modulate(self.norm, x, scale, shift), gate, *rest


def _zero_single(self, x, emb=None):
    shift, scale, gate = _embedded(self, emb).chunk(3, dim=1)
    return modulate(self.norm, x, scale, shift), gate


def _zero_twice(self, hidden_states, emb=None):
    shift, scale, gate, a, b, c, shift2, scale2, gate2 = _embedded(self, emb).chunk(9, dim=1)
    first = modulate(self.norm, hidden_states, scale, shift)
    return first, gate, a, b, c, modulate(self.norm, hidden_states, scale2, shift2), gate2


def _continuous(self, x, conditioning_embedding):
    emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
    scale, shift = emb.chunk(2, dim=1)
    return modulate(self.norm, x, scale, shift)


def _shift_first(self, x, timestep: Optional[torch.Tensor] = None, temb=None):
    if self.emb is not None:
        temb = self.emb(timestep)
    shift, scale = _embedded(self, temb).chunk(2, dim=1)
    return modulate(self.norm, x, scale, shift)


def _two_streams(self, hidden_states, encoder_hidden_states, temb):
    shift, scale, gate, shift2, scale2, gate2 = _embedded(self, temb).chunk(6, dim=1)
    first = modulate(self.norm, hidden_states, scale, shift)
    second = modulate(self.norm, encoder_hidden_states, scale2, shift2)
    return first, second, gate[:, None, :], gate2[:, None, :]


# class: its forward, the number of its chunks, and the arguments of a probe
_FORMS = {
    "AdaLayerNormZero": (_zero, 6, (("x", "x"), ("emb", "emb"))),
    "AdaLayerNormZeroSingle": (_zero_single, 3, (("x", "x"), ("emb", "emb"))),
    "SD35AdaLayerNormZeroX": (_zero_twice, 9, (("hidden_states", "x"), ("emb", "emb"))),
    "AdaLayerNormContinuous": (_continuous, 2, (("x", "x"), ("conditioning_embedding", "emb"))),
    "AdaLayerNorm": (_shift_first, 2, (("x", "x"), ("temb", "emb"))),
    "CogVideoXLayerNormZero": (
        _two_streams,
        6,
        (("hidden_states", "x"), ("encoder_hidden_states", "y"), ("temb", "emb")),
    ),
}
for _function, _, _ in _FORMS.values():
    marked("ada_layer_norm", _function)
