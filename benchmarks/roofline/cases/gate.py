"""Activations: plain, gated, and fused with the addition before them."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F

from ..contenders import compiled
from ..registry import HostSection, Operator, Shape

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss
LORA_SCALE = 0.5


def _shape(rows: int, dim: int, *tags: str, dtype=torch.bfloat16) -> Shape:
    return Shape((rows, dim), dtype, frozenset(tags))


# The intermediate sizes of Llama 2 7B and Llama 3 8B first.
_GATES = [
    _shape(16384, 11008, "main", "sweep", "quick"),
    _shape(16384, 14336),
    _shape(4096, 4096, "sweep"),
    _shape(8191, 4097, "odd"),
    _shape(65536, 688, "odd"),
    _shape(1, 4096, "small", "quick"),
    _shape(128, 4096, "small", "sweep"),
    _shape(4096, 11008, "dtype", dtype=torch.float32),
]
# Layers of recommender models, and of low-rank adaptation.
_EPILOGUES = [
    _shape(16384, 4096, "main", "quick"),
    _shape(2048, 512, "small"),
    _shape(128, 64, "small", "quick"),
    _shape(2048, 13, "small"),
    _shape(8191, 4097, "odd"),
    _shape(1048576, 64, "odd"),
    _shape(16384, 4096, "dtype", dtype=torch.float32),
]
_CPU = [
    _shape(rows, dim, "cpu", *(["quick"] if rows == 1024 else []), dtype=dtype)
    for rows, dim in [(2048, 4096), (1024, 1024), (64, 1024)]
    for dtype in (torch.float32, torch.bfloat16)
]


def _activations(shape: Shape, device: str, width: int = 1) -> torch.Tensor:
    rows, dim = shape.sizes
    return torch.randn((rows, width * dim), device=device, dtype=shape.dtype)


def _vector(shape: Shape, device: str) -> torch.Tensor:
    return torch.randn(shape.sizes[-1], device=device, dtype=shape.dtype)


def _moves(activations: int, vectors: int = 0):
    def size(shape: Shape) -> int:
        rows, dim = shape.sizes
        return (activations * rows + vectors) * dim * shape.dtype.itemsize

    return size


# The formulas, as a model would write them: `eager` runs them, `compile` compiles them.


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(gate, up):
    return F.silu(gate) * up


def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def swiglu_clamped(x):
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(max=LIMIT)
    up = up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


def bias_relu(x, bias):
    return F.relu(x + bias)


def add_mul_silu(x, bias, y):
    return F.silu(x + bias + LORA_SCALE * y)


# Liger's backward of these writes the gradients over the inputs.


def liger_swiglu():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)


def liger_geglu():
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply


def _operator(name, formula, ours, inputs, moves, shapes, *, liger=None, host_sections=None):
    """`ours`: fuselage -> the call. `formula`: the baseline and, in float64, the reference."""

    def contenders(fuselage: ModuleType):
        calls = {
            "fuselage": lambda: ours(fuselage),
            "eager": lambda: formula,
            "compile": lambda: compiled(formula),
        }
        return calls if liger is None else {**calls, "liger": liger}

    return Operator(
        name=name,
        shapes=[*shapes, *_CPU],
        make_inputs=inputs,
        contenders=contenders,
        reference=lambda *inputs_and_dtype: (formula(*inputs_and_dtype[:-1]),),
        necessary_bytes=dict(zip(("fwd", "bwd"), moves)),
        overwrites_inputs=frozenset() if liger is None else frozenset({"liger"}),
        host_sections=host_sections,
    )


def _one(shape: Shape, device: str):
    return (_activations(shape, device),)


def _packed(shape: Shape, device: str):
    return (_activations(shape, device, width=2),)


def _two(shape: Shape, device: str):
    return _activations(shape, device), _activations(shape, device)


def _with_bias(shape: Shape, device: str):
    return _activations(shape, device), _vector(shape, device)


def _with_bias_and_y(shape: Shape, device: str):
    return _activations(shape, device), _vector(shape, device), _activations(shape, device)


def _host_sections(fuselage: ModuleType, device: str) -> list[HostSection]:
    shape = _shape(64, 64)
    gate, up = _two(shape, device)
    packed, bias = _packed(shape, device)[0], _vector(shape, device)

    def call(function, *inputs):
        return lambda: lambda: function(*inputs)

    return [
        HostSection(
            name=f"activations, forward without gradients {shape.label}",
            calls={
                "x.mul_(1.0)": call(gate.mul_, 1.0),
                "fuselage.silu": call(fuselage.silu, gate),
                "fuselage.silu_and_mul": call(fuselage.silu_and_mul, packed),
                "fuselage.swiglu": call(fuselage.swiglu, gate, up),
                "fuselage.bias_act": call(fuselage.bias_act, gate, bias, "relu"),
                "fuselage.add_mul_act": call(fuselage.add_mul_act, gate, bias, up, 0.5, "relu"),
                "F.silu": call(F.silu, gate),
                "eager swiglu": call(swiglu, gate, up),
                "compile swiglu": lambda: call(compiled(swiglu), gate, up)(),
                "liger swiglu": lambda: call(liger_swiglu(), gate, up)(),
            },
            subjects=("fuselage.silu", "fuselage.silu_and_mul"),
            yardstick="x.mul_(1.0)",
            limit=1.15,
        )
    ]


OPERATORS = [
    _operator("silu", F.silu, lambda f: f.silu, _one, (_moves(2), _moves(3)), _EPILOGUES),
    _operator("gelu", F.gelu, lambda f: f.gelu, _one, (_moves(2), _moves(3)), _EPILOGUES),
    _operator(
        "silu_and_mul",
        silu_and_mul,
        lambda f: f.silu_and_mul,
        _packed,
        (_moves(3), _moves(5)),
        _GATES,
        host_sections=_host_sections,
    ),
    _operator(
        "swiglu",
        swiglu,
        lambda f: f.swiglu,
        _two,
        (_moves(3), _moves(5)),
        _GATES,
        liger=liger_swiglu,
    ),
    _operator(
        "geglu",
        geglu,
        lambda f: partial(f.geglu, activation="gelu_tanh"),
        _two,
        (_moves(3), _moves(5)),
        _GATES,
        liger=liger_geglu,
    ),
    _operator(
        "swiglu_clamped",
        swiglu_clamped,
        lambda f: partial(f.swiglu_clamped, alpha=ALPHA, limit=LIMIT),
        _packed,
        (_moves(3), _moves(5)),
        _GATES,
    ),
    _operator(
        "bias_act",
        bias_relu,
        lambda f: lambda x, bias: f.bias_act(x, bias, "relu"),
        _with_bias,
        (_moves(2, 1), _moves(3, 2)),
        _EPILOGUES,
    ),
    _operator(
        "add_mul_act",
        add_mul_silu,
        lambda f: lambda x, bias, y: f.add_mul_act(x, bias, y, LORA_SCALE, "silu"),
        _with_bias_and_y,
        # Backward: recomputed from x and y. A forward that also stores their sum would move one
        # tensor less here, and one more there.
        (_moves(3, 1), _moves(5, 2)),
        _EPILOGUES,
    ),
]
