"""Recognises feed-forwards of diffusers whose activation quantises for a float8 linear."""

from __future__ import annotations

import torch
from torch import nn

from ..fused_quant import gelu_tanh_quant
from ..gate import gelu_tanh
from . import _probe
from ._linears import PatchedLinear, takes_quantized
from ._patch import Found, Match, listened_to, marked, replacement_of


def recognise_feed_forward(module: nn.Module) -> Found:
    """`net`: a projection with its activation, a dropout and a float8 linear, called in turn.

    After linears are replaced, and projections with an activation are recognised.
    """
    net = module._modules.get("net")
    if set(module._modules) != {"net"} or not isinstance(net, nn.ModuleList) or len(net) < 3:
        return None
    first, dropout, linear, *rest = net
    if replacement_of(first) != "gelu_tanh" or not isinstance(linear, PatchedLinear):
        return None
    if not all(isinstance(child, nn.Dropout) for child in (dropout, *rest)):
        return None
    numbers = [_Scale(3.0), dropout, _Scale(5.0), *rest]
    for plain in _probe.stand_ins(module, None, {"net": nn.ModuleList(numbers)}):
        x = _probe.random(32, 8)
        expected = _probe.call(_in_turn, plain, x.clone())
        if not _probe.agree(_probe.call(type(module).forward, plain, x.clone()), expected):
            return "its forward does more than to call its layers in turn"
    return Match("gelu_tanh_quant", _forward)


class _Scale(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + 1


def _in_turn(self, x: torch.Tensor) -> torch.Tensor:
    for module in self.net:
        x = module(x)
    return x


def _forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    first, dropout, linear = self.net[0], self.net[1], self.net[2]
    drops = dropout.training and dropout.p > 0
    if drops or listened_to(first) or listened_to(dropout) or args or kwargs:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if not takes_quantized(linear, hidden_states):
        return type(self).forward(self, hidden_states)
    x = first.proj(hidden_states)
    if takes_quantized(linear, x):
        x = linear(gelu_tanh_quant(x, **linear.quantization))
    else:  # under autocast
        x = linear(gelu_tanh(x))
    for i in range(3, len(self.net)):
        x = self.net[i](x)
    return x


marked("gelu_tanh_quant", _forward)
