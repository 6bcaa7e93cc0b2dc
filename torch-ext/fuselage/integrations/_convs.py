"""Convolutions whose results are channels last, with the bias and the addition after them.

PyTorch adds the bias of a convolution with a kernel of its own, which takes twice the time of a
copy where channels come last. `bias_act_` does it in place, at the speed of memory, with the same
bits. In any forward with such a convolution right before an addition, one operator adds both:

    h = self.conv(h)
    ..                                 -> h = conv_apart(self.conv, h)
    x = (residual + h) / scale         -> x = residual_sum(residual, h, scale)

What `conv_apart` gives is read by the addition alone. The sum is rounded once instead of twice.
"""

from __future__ import annotations

import ast
from typing import Optional

import torch

from ..gate import add_mul_act_, bias_act_
from . import _probe, _source
from ._patch import Found, Match, listened_to, marked, replacement_of, wrapped
from ._statements import Statements, bodies_of, counted

CONV = "conv2d (bias by bias_act)"  # what the report says of one
# Elements that are written from which on this pays on a GPU: below, calls take longer than kernels.
_LARGE = 2**22

Apart = tuple[torch.Tensor, Optional[torch.Tensor]]  # a result, and the bias it does not have yet


def recognise_conv(module: torch.nn.Module) -> Found:
    """`torch.nn.Conv2d` with a bias, and nothing that derives from it. Not those that cut an image
    into patches, whose input has its channels first.
    """
    if type(module) is not torch.nn.Conv2d or module.bias is None:
        return None
    if module.stride == module.kernel_size != (1, 1):
        return None
    return Match(CONV, _forward)


def _taken(conv: torch.nn.Conv2d, x: torch.Tensor) -> bool:
    """Whether the bias is for us to add: of large images that are channels last, for inference.

    NOTE: a checkpointed forward of a training step runs without gradients first, then with them.
    """
    if conv.training or not is_large_image(x) or x.dtype not in _probe.DTYPES:
        return False
    tensors = (x, conv.weight, conv.bias)
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return False
    return _probe.in_inference(*tensors)


def is_large_image(x: object, times: int = 1) -> bool:
    """Whether it is one on a GPU, channels last, in eager mode: the compiler fuses biases and
    copies with what comes next. The result is so many times as large.
    """
    if type(x) is not torch.Tensor or x.dim() != 4 or torch.compiler.is_compiling():
        return False
    return times * x.numel() >= _LARGE and _probe.is_on_gpu(x) and _is_channels_last(x)


def _is_channels_last(x: torch.Tensor) -> bool:
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1)


def _with_bias(out: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if not _is_channels_last(out):
        return out.add_(bias.view(-1, 1, 1))  # what PyTorch does
    bias_act_(_rows(out), bias)
    return out


def _forward(self, input: torch.Tensor) -> torch.Tensor:
    if not _taken(self, input):
        return type(self).forward(self, input)
    return _with_bias(self._conv_forward(input, self.weight, None), self.bias)


_forward = marked(CONV, _forward)


# ---- with the addition after it ----


def conv_apart(conv: torch.nn.Module, x: torch.Tensor) -> Apart:
    """`conv(x)`, without its bias if the convolution is still ours and nobody listens to it."""
    if replacement_of(conv) != CONV or listened_to(conv) or wrapped(conv) or not _taken(conv, x):
        return conv(x), None
    return conv._conv_forward(x, conv.weight, None), conv.bias


def residual_sum(residual: torch.Tensor, apart: Apart, divisor: object = 1) -> torch.Tensor:
    """`(residual + h) / divisor` for what `conv_apart` gave for `h`."""
    out, bias = apart
    if bias is not None and not _adds_up(residual, out):
        out, bias = _with_bias(out, bias), None
    if bias is None:
        out = residual + out
    else:
        add_mul_act_(_rows(out), bias, _rows(residual))
    return out if type(divisor) in (int, float) and divisor == 1 else out / divisor


def _adds_up(residual: object, out: torch.Tensor) -> bool:
    """Whether one operator takes both, element by element, and nothing needs a gradient."""
    if type(residual) is not torch.Tensor or (residual.requires_grad and torch.is_grad_enabled()):
        return False
    alike = residual.shape == out.shape and residual.dtype == out.dtype
    return alike and _is_channels_last(out) and _is_channels_last(residual)


HELPERS = {"fuselage_conv_apart": conv_apart, "fuselage_residual_sum": residual_sum}
_APART, _SUM = HELPERS


def names_of_convs(module: torch.nn.Module) -> frozenset:
    """Of the submodules that are such convolutions."""
    children = module._modules.items()
    return frozenset(n for n, m in children if m is not None and replacement_of(m) == CONV)


def fuse_residuals(definition: ast.FunctionDef, convs: frozenset) -> None:
    """Rewrites each addition of what one of `convs` gave."""
    self_name = definition.args.args[0].arg
    for body in bodies_of(definition.body):
        statements = Statements(body, counted(definition), self_name)
        for j, statement in enumerate(statements.statements):
            if _source.is_simple(statement):
                _fuse_residual(statements, j, convs)
        statements.finish()


def _fuse_residual(statements: Statements, j: int, convs: frozenset) -> None:
    """The outermost one in statement j."""
    for node in _source.evaluated_once(statements.statements[j]):
        divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        added = node.left if divides else node
        if not (isinstance(added, ast.BinOp) and isinstance(added.op, ast.Add)):
            continue
        for residual, h in ((added.left, added.right), (added.right, added.left)):
            k = statements.only_definition(h.id, j) if isinstance(h, ast.Name) else None
            call = None if k is None else statements.statements[k].value
            if _source.called(call, convs, statements.self_name) is None:
                continue
            arguments = [residual, h, *([node.right] if divides else [])]
            total = ast.Call(ast.Name(_SUM, ast.Load()), arguments, [])
            statements.rewrite(j, _source.Replaced(node, total).visit(statements.statements[j]))
            apart = ast.Call(ast.Name(_APART, ast.Load()), [call.func, *call.args], [])
            statements.rewrite(k, _source.Replaced(call, apart).visit(statements.statements[k]))
            for i in (j, k):
                ast.fix_missing_locations(statements.statements[i])
            return
