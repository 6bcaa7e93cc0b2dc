"""poly_norm, fused_mul_poly_norm and grouped_poly_norm."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch

from ..contenders import compiled
from ..registry import HostSection, Operator, Shape

EPS = 1e-6
PACKED = "packed"


def _shape(rows: int, dim: int, *tags: str, dtype=torch.bfloat16, variant: str = "") -> Shape:
    return Shape((rows, dim), dtype, frozenset(tags), variant)


def _rows_for(dim: int, mebibytes: int = 128) -> int:
    return mebibytes * 2**20 // (2 * dim)


# 8192 is the intermediate size of Motif-2.6B; 11008, 14336 are those of other gated MLPs.
_COMMON = [
    _shape(16384, 8192, "main", "sweep", "quick"),
    _shape(16384, 4096, "main"),
    _shape(8192, 14336, "main"),
    _shape(32768, 1024, "main"),
    _shape(_rows_for(11008), 11008, "odd"),
    _shape(_rows_for(4097), 4097, "odd"),
    _shape(_rows_for(32768), 32768, "odd"),
    _shape(_rows_for(131072), 131072, "odd"),
    _shape(1048576, 128, "odd"),
    _shape(1048576, 64, "odd"),
    _shape(1, 8192, "small", "quick"),
    _shape(128, 8192, "small", "sweep"),
    _shape(1024, 2048, "small"),
    _shape(16384, 4096, "dtype", dtype=torch.float32),
    _shape(16384, 4096, "dtype", dtype=torch.float16),
]
_CPU = [
    _shape(rows, dim, "cpu", "main", *(["quick"] if rows < 2048 else []), dtype=dtype)
    for rows, dim in [(2048, 4096), (1024, 1024), (1, 8192)]
    for dtype in (torch.float32, torch.bfloat16)
]
_MUL_ONLY = [
    _shape(16384, 8192, "main", variant=PACKED),
    _shape(_rows_for(4097), 4097, "odd", variant=PACKED),
    _shape(1, 8192, "small", variant=PACKED),
]


# Rows, dim and experts; an eighth of the rows is padding.
_GROUPED = [
    Shape((16384, 4096, 64), torch.bfloat16, frozenset({"main"})),
    Shape((65536, 1280, 384), torch.bfloat16, frozenset({"odd"})),
    Shape((32768, 1409, 16), torch.bfloat16, frozenset({"odd"})),
    Shape((64, 4096, 64), torch.bfloat16, frozenset({"small"})),
    Shape((2048, 1024, 8), torch.bfloat16, frozenset({"cpu", "main"})),
]


def _activations(shape: Shape, device: str, tensors: int = 1) -> torch.Tensor:
    rows, dim = shape.sizes[:2]
    return torch.randn(rows, tensors * dim, device=device, dtype=shape.dtype)


def _factors(shape: Shape, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.tensor([0.4, 0.3, 0.2], device=device, dtype=shape.dtype)
    return weight, torch.tensor([0.1], device=device, dtype=shape.dtype)


def _poly_norm_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    return (_activations(shape, device), *_factors(shape, device))


def _fused_mul_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    """`x` and `mul`, or one tensor of both."""
    if shape.variant == PACKED:
        return (_activations(shape, device, 2), *_factors(shape, device))
    return (
        _activations(shape, device),
        _activations(shape, device),
        *_factors(shape, device),
    )


def _grouped_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    weight, bias = (t.expand(shape.sizes[2], -1).contiguous() for t in _factors(shape, device))
    return (_activations(shape, device), _activations(shape, device), weight, bias)


@lru_cache
def _offs(rows: int, experts: int, device: torch.device) -> torch.Tensor:
    """The end rows of experts of about one size."""
    ends = torch.arange(1, experts + 1) * (rows - rows // 8) // experts
    return ends.to(device, torch.int32)


@lru_cache
def _experts(rows: int, experts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert of each row, and whether it has one."""
    index = torch.searchsorted(
        _offs(rows, experts, device), torch.arange(rows, device=device), right=True
    )
    return index.clamp(max=experts - 1), (index < experts)[:, None]


def _moves(activations: int):
    """The weight and the bias are four numbers, and not counted."""

    def moved(shape: Shape) -> int:
        rows, dim = shape.sizes[:2]
        return activations * rows * dim * shape.dtype.itemsize

    return moved


# The formulas, as a model would write them: `eager` runs them, `compile` compiles them.


def _norm(u):
    return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + EPS)


def _formula(x, weight, bias):
    return weight[0] * _norm(x**3) + weight[1] * _norm(x**2) + weight[2] * _norm(x) + bias


def eager_poly_norm(x, weight, bias):
    return _formula(x.float(), weight.float(), bias.float()).to(x.dtype)


def eager_fused_mul_poly_norm(*inputs):
    x, mul, weight, bias = _separate(inputs)
    return (_formula(x.float(), weight.float(), bias.float()) * mul.float()).to(x.dtype)


def _grouped_formula(x, mul, weight, bias):
    """With the experts looked up beforehand, and not at each call."""
    index, inside = _experts(x.shape[0], weight.shape[0], x.device)
    return _grouped_formula_of(x, mul, weight, bias, index, inside)


def _grouped_formula_of(x, mul, weight, bias, index, inside):
    w = weight[index]
    y = w[:, 0:1] * _norm(x**3) + w[:, 1:2] * _norm(x**2) + w[:, 2:3] * _norm(x) + bias[index]
    return torch.where(inside, y * mul, 0.0)


def eager_grouped_poly_norm(x, mul, weight, bias):
    return _grouped_formula(x.float(), mul.float(), weight.float(), bias.float()).to(x.dtype)


def compiled_grouped_poly_norm():
    def formula(x, mul, weight, bias, index, inside):
        floats = (t.float() for t in (x, mul, weight, bias))
        return _grouped_formula_of(*floats, index, inside).to(x.dtype)

    run = compiled(formula)

    def call(x, mul, weight, bias):
        return run(x, mul, weight, bias, *_experts(x.shape[0], weight.shape[0], x.device))

    return call


def _separate(inputs):
    """x, mul, weight and bias of either way to give them."""
    if len(inputs) == 4:
        return inputs
    packed, weight, bias = inputs
    return (*packed.chunk(2, dim=-1), weight, bias)


def liger_poly_norm():
    from liger_kernel.ops.poly_norm import LigerPolyNormFunction

    # Its gradient of the bias is a scalar, and so must the bias be. In place is its default.
    return lambda x, weight, bias: LigerPolyNormFunction.apply(
        x, weight, bias.reshape(()), EPS, True
    )


def _poly_norm_contenders(fuselage: ModuleType):
    return {
        "fuselage": lambda: lambda x, weight, bias: fuselage.poly_norm(x, weight, bias, EPS),
        "eager": lambda: eager_poly_norm,
        "compile": lambda: compiled(eager_poly_norm),
        "liger": liger_poly_norm,
    }


def _fused_mul_contenders(fuselage: ModuleType):
    def fused(*inputs):
        x, *others = inputs
        mul = others.pop(0) if len(inputs) == 4 else None
        return fuselage.fused_mul_poly_norm(x, mul, *others, EPS)

    return {
        "fuselage": lambda: fused,
        "eager": lambda: eager_fused_mul_poly_norm,
        "compile": lambda: compiled(eager_fused_mul_poly_norm),
    }


def _grouped_contenders(fuselage: ModuleType):
    def grouped(x, mul, weight, bias):
        offs = _offs(x.shape[0], weight.shape[0], x.device)
        return fuselage.grouped_poly_norm(x, mul, weight, bias, offs, EPS)

    return {
        "fuselage": lambda: grouped,
        "eager": lambda: eager_grouped_poly_norm,
        "compile": compiled_grouped_poly_norm,
    }


def _reference(x, weight, bias, dtype):
    return (_formula(x, weight, bias),)


def _fused_mul_reference(*inputs):
    x, mul, weight, bias = _separate(inputs[:-1])
    return (_formula(x, weight, bias) * mul,)


def _grouped_reference(x, mul, weight, bias, dtype):
    return (_grouped_formula(x, mul, weight, bias),)


def _grouped_moves(reads: int, writes: int):
    """Padding is written, and not read."""

    def moved(shape: Shape) -> int:
        rows, dim, _ = shape.sizes
        return (reads * (rows - rows // 8) + writes * rows) * dim * shape.dtype.itemsize

    return moved


def _host_sections(fuselage: ModuleType, device: str) -> list[HostSection]:
    # On the CPU the work is the host's too, so the tensors are tiny: the call is to be timed.
    training = _shape(*((8, 64) if device == "cpu" else (1024, 2048)))
    return [
        _host_forward(fuselage, device, _shape(64, 64)),
        _host_training(fuselage, device, training),
    ]


def _host_forward(fuselage: ModuleType, device: str, shape: Shape) -> HostSection:
    x, mul, weight, bias = _fused_mul_inputs(shape, device)
    return HostSection(
        name=f"poly_norm forward without gradients {shape.label}",
        calls={
            "x.mul_(1.0)": lambda: lambda: x.mul_(1.0),
            "fuselage.poly_norm": lambda: lambda: fuselage.poly_norm(x, weight, bias, EPS),
            "fuselage.fused_mul_poly_norm": lambda: (
                lambda: fuselage.fused_mul_poly_norm(x, mul, weight, bias, EPS)
            ),
            "compile": lambda: _call(compiled(eager_poly_norm), x, weight, bias),
            "liger": lambda: _call(liger_poly_norm(), x, weight, bias),
        },
        subjects=("fuselage.poly_norm", "fuselage.fused_mul_poly_norm"),
        yardstick="x.mul_(1.0)",
        limit=1.15,
    )


def _call(function, *inputs):
    return lambda: function(*inputs)


def _host_training(fuselage: ModuleType, device: str, shape: Shape) -> HostSection:
    leaves = [t.requires_grad_() for t in _poly_norm_inputs(shape, device)]
    grad_out = _activations(shape, device)
    x, norm_weight = _activations(shape, device), torch.ones(shape.sizes[-1], device=device)
    x.requires_grad_()
    norm_weight = norm_weight.to(shape.dtype).requires_grad_()

    def training(function, *inputs):
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad_out)

    def rms_norm(x, weight):
        return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)

    return HostSection(
        name=f"poly_norm forward+backward {shape.label}",
        calls={
            "F.rms_norm": lambda: training(rms_norm, x, norm_weight),
            "fuselage.poly_norm": lambda: training(fuselage.poly_norm, *leaves),
            "compile": lambda: training(compiled(eager_poly_norm), *leaves),
            "liger": lambda: training(liger_poly_norm(), *leaves),
        },
        subjects=("fuselage.poly_norm",),
        yardstick="F.rms_norm",
        limit=1.5,
    )


OPERATORS = [
    Operator(
        name="poly_norm",
        shapes=[*_COMMON, *_CPU],
        make_inputs=_poly_norm_inputs,
        contenders=_poly_norm_contenders,
        reference=_reference,
        necessary_bytes={"fwd": _moves(2), "bwd": _moves(3)},
        overwrites_grad=frozenset({"liger"}),
        host_sections=_host_sections,
    ),
    Operator(
        name="fused_mul_poly_norm",
        shapes=[*_COMMON, *_MUL_ONLY, *_CPU],
        make_inputs=_fused_mul_inputs,
        contenders=_fused_mul_contenders,
        reference=_fused_mul_reference,
        necessary_bytes={"fwd": _moves(3), "bwd": _moves(5)},
    ),
    Operator(
        name="grouped_poly_norm",
        shapes=_GROUPED,
        make_inputs=_grouped_inputs,
        contenders=_grouped_contenders,
        reference=_grouped_reference,
        necessary_bytes={"fwd": _grouped_moves(2, 1), "bwd": _grouped_moves(3, 2)},
    ),
]
