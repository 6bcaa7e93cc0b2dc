"""apply_rotary and qk_norm_rotary. Sizes: batch, tokens, heads of q, heads of k, dim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from ..contenders import compiled
from ..registry import HostSection, Operator, Shape

EPS = 1e-6


def _shape(*sizes: int, tags: tuple[str, ...] = (), dtype=torch.bfloat16) -> Shape:
    return Shape(sizes, dtype, frozenset(tags))


# Llama 3 8B and 70B first, then other heads, decoding, and odd sizes.
_HEADS = [
    _shape(4, 4096, 32, 8, 128, tags=("main", "quick")),
    _shape(2, 4096, 64, 8, 128),
    _shape(8, 4096, 16, 16, 64),
    _shape(8, 4096, 16, 4, 256),
    _shape(4, 4096, 16, 16, 72, tags=("odd",)),
    _shape(4, 4096, 32, 8, 100, tags=("odd",)),
    _shape(4, 2048, 32, 8, 128, tags=("dtype",), dtype=torch.float32),
    _shape(1, 1, 32, 8, 128, tags=("small", "quick")),
    _shape(64, 1, 32, 8, 128, tags=("small",)),
    _shape(1, 512, 32, 8, 128, tags=("small",)),
]
_TRANSPOSED = [
    _shape(4, 4096, 32, 8, 128, tags=("main",)),
    _shape(64, 1, 32, 8, 128, tags=("small",)),
    _shape(1, 512, 32, 8, 128, tags=("small",)),
]
# LTX-Video, at 49 frames of 512x768, has one head of all columns; Wan and Flux have heads.
_INTERLEAVED = [
    _shape(2, 2688, 1, 1, 2048, tags=("main",)),
    _shape(1, 32760, 12, 12, 128),
    _shape(1, 4608, 24, 24, 128),
]
_CPU = [
    _shape(1, tokens, 32, 8, 128, tags=("cpu", *(("quick",) if tokens == 1 else ())), dtype=dtype)
    for tokens in (1, 512)
    for dtype in (torch.float32, torch.bfloat16)
]


# The formulas, as a model would write them: `eager` runs them, `compile` compiles them.


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def rotate_pairs(x):
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-imaginary, real), -1).flatten(-2)


def rms_norm(x, weight):
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + EPS)
    return (n * weight.float()).to(x.dtype)


def exact_rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@dataclass(frozen=True)
class Rotary:
    """One way of calling, which makes its inputs, its tables and its contenders."""

    heads_dim: int = 2
    interleaved: bool = False
    float32_tables: bool = False
    norm: bool = False

    def inputs(self, shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
        """q and k, with `heads_dim=1` transposed views as transformers has them, and weights."""
        batch, tokens, *heads, dim = shape.sizes
        sizes = [(batch, tokens, count, dim) for count in heads]
        made = [torch.randn(size, device=device, dtype=shape.dtype) for size in sizes]
        if self.heads_dim == 1:
            made = [x.transpose(1, 2) for x in made]
        if self.norm:
            made += [1 + 0.1 * torch.randn(dim, device=device).to(shape.dtype) for _ in range(2)]
        remember_tables(made[0], *self._make_tables(tokens, dim, shape.dtype, made[0].device))
        return tuple(made)

    def tables(self, q: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Those made together with q: each set of inputs has its own, as cold as they are."""
        tokens = q.shape[3 - self.heads_dim]
        found = _tables.get(q.data_ptr())
        if found is not None and found[0].shape == (tokens, q.shape[-1]) and q.dtype == dtype:
            return found
        return self._shared_tables(tokens, q.shape[-1], dtype, q.device)

    def _make_tables(self, tokens, dim, dtype, device):
        exponents = torch.arange(0, dim, 2, device=device) / dim
        angles = torch.arange(tokens, device=device)[:, None] * 10000.0**-exponents
        if self.interleaved:
            angles = angles.repeat_interleave(2, 1)
        else:
            angles = torch.cat((angles, angles), 1)
        dtype = torch.float32 if self.float32_tables else dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    _shared_tables = lru_cache(maxsize=4)(_make_tables)

    def formula(self, norm):
        rotate = rotate_pairs if self.interleaved else rotate_half

        def both(q, k, *others):
            *weights, cos, sin = others
            cos, sin = cos.unsqueeze(self.heads_dim - 1), sin.unsqueeze(self.heads_dim - 1)
            if self.norm:
                q, k = norm(q, weights[0]), norm(k, weights[1])
            return tuple(((x * cos) + (rotate(x) * sin)).to(x.dtype) for x in (q, k))

        return both

    def with_tables(self, function):
        return lambda q, *others: function(q, *others, *self.tables(q, q.dtype))

    def ours(self, fuselage: ModuleType):
        options = {"interleaved": self.interleaved, "heads_dim": self.heads_dim}
        if self.norm:
            return lambda *inputs: fuselage.qk_norm_rotary(*inputs, EPS, **options)
        return lambda *inputs: fuselage.apply_rotary(*inputs, **options)

    def contenders(self, fuselage: ModuleType):
        calls = {
            "fuselage": lambda: self.with_tables(self.ours(fuselage)),
            "eager": lambda: self.with_tables(self.formula(rms_norm)),
            "compile": lambda: self.with_tables(compiled(self.formula(rms_norm))),
        }
        if self.heads_dim == 1 and not self.interleaved and not self.norm:
            calls["liger"] = lambda: self.with_tables(liger_rope())
        return calls

    def reference(self, q, *others_and_dtype):
        *others, dtype = others_and_dtype
        tables = self._shared_tables(q.shape[3 - self.heads_dim], q.shape[-1], dtype, q.device)
        return self.formula(exact_rms_norm)(q, *others, *(t.double() for t in tables))

    def bytes(self, tensors: int, weights: int = 0):
        """`tensors` of the size of q and k, and the tables."""

        def size(shape: Shape) -> int:
            batch, tokens, q_heads, k_heads, dim = shape.sizes
            itemsize = shape.dtype.itemsize
            tables = 2 * tokens * dim * (4 if self.float32_tables else itemsize)
            heads = batch * tokens * (q_heads + k_heads) * dim
            return (tensors * heads + 2 * weights * dim) * itemsize + tables

        return size


_tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def remember_tables(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    for pointer, (other, _) in list(_tables.items()):
        if other.shape != cos.shape:
            del _tables[pointer]  # of the shape before
    _tables[q.data_ptr()] = cos, sin


# Liger's kernel writes over q and k, and over their gradients.


def liger_rope():
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply


def _operator(name: str, rotary: Rotary, shapes, host_sections=None) -> Operator:
    # Backward: with the norm q and k are read again, and the weights' gradients written.
    forward, backward = (
        (rotary.bytes(2, 1), rotary.bytes(3, 2)) if rotary.norm else [rotary.bytes(2)] * 2
    )
    return Operator(
        name=name,
        shapes=shapes,
        make_inputs=rotary.inputs,
        contenders=rotary.contenders,
        reference=rotary.reference,
        necessary_bytes={"fwd": forward, "bwd": backward},
        overwrites_grad=frozenset({"liger"}),
        overwrites_inputs=frozenset({"liger"}),
        host_sections=host_sections,
    )


def _host_sections(fuselage: ModuleType, device: str) -> list[HostSection]:
    shape = _shape(1, 1, 8, 2, 64)
    calls = {}
    q, _ = Rotary().inputs(shape, device)
    calls["x.mul_(1.0)"] = lambda: lambda: q.mul_(1.0)
    for name, rotary in (("apply_rotary", Rotary()), ("qk_norm_rotary", Rotary(norm=True))):
        inputs = rotary.inputs(shape, device)
        given = (*inputs, *rotary.tables(inputs[0], shape.dtype))
        function, plain = rotary.ours(fuselage), rotary.formula(rms_norm)
        calls[f"fuselage.{name}"] = lambda f=function, given=given: lambda: f(*given)
        calls[f"eager {name}"] = lambda f=plain, given=given: lambda: f(*given)
        calls[f"compile {name}"] = lambda f=plain, given=given: _call(compiled(f), given)
    return [
        HostSection(
            name=f"rotary embedding, forward without gradients {shape.label}",
            calls=calls,
            subjects=("fuselage.apply_rotary",),
            yardstick="x.mul_(1.0)",
            limit=1.5,  # four tensors in and two out, where the yardstick has one
        )
    ]


def _call(function, given):
    return lambda: function(*given)


OPERATORS = [
    _operator("apply_rotary", Rotary(), [*_HEADS, *_CPU], _host_sections),
    _operator("apply_rotary transposed", Rotary(heads_dim=1), _TRANSPOSED),
    _operator("apply_rotary float32 tables", Rotary(float32_tables=True), _HEADS[:1]),
    _operator(
        "apply_rotary interleaved", Rotary(interleaved=True, float32_tables=True), _INTERLEAVED
    ),
    _operator("qk_norm_rotary", Rotary(norm=True), [*_HEADS, *_CPU]),
    _operator(
        "qk_norm_rotary interleaved",
        Rotary(norm=True, interleaved=True, float32_tables=True),
        _INTERLEAVED,
    ),
]
