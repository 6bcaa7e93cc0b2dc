"""rms_norm, fused_add_rms_norm and rms_norm_add_rms_norm."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from ..contenders import compiled
from ..registry import HostSection, Operator, Shape
from ..verify import rounded

EPS = 1e-6
FLOAT32_WEIGHT = "w32"


def _shape(rows: int, dim: int, *tags: str, dtype=torch.bfloat16, variant: str = "") -> Shape:
    return Shape((rows, dim), dtype, frozenset(tags), variant)


def _rows_for(dim: int, mebibytes: int = 128) -> int:
    return mebibytes * 2**20 // (2 * dim)


_COMMON = [
    _shape(8192, 3072, "main"),
    _shape(16384, 4096, "main", "sweep", "quick"),
    _shape(16384, 8192, "main"),
    _shape(32768, 1024, "main"),
    _shape(_rows_for(7168), 7168, "odd"),
    _shape(_rows_for(4097), 4097, "odd"),
    _shape(_rows_for(131072), 131072, "odd"),
    _shape(1048576, 128, "odd"),
    _shape(1048576, 64, "odd"),
    _shape(1, 4096, "small", "quick"),
    _shape(1024, 2048, "small"),
    _shape(16384, 4096, "dtype", dtype=torch.float32),
]
_RMS_NORM_ONLY = [
    _shape(_rows_for(5120), 5120, "odd"),
    _shape(_rows_for(12288), 12288, "odd"),
    _shape(_rows_for(16385), 16385, "odd"),
    _shape(1, 131072, "small"),
    _shape(128, 4096, "small", "sweep"),
    _shape(16384, 4096, "dtype", dtype=torch.float16),
    _shape(16384, 4096, "dtype", variant=FLOAT32_WEIGHT),
    _shape(32768, 1024, "dtype", variant=FLOAT32_WEIGHT),
    *[_shape(rows, 4096, "sweep") for rows in (64, 512, 2048, 4096, 65536)],
]
_CPU = [
    _shape(rows, dim, "cpu", "main", *(["quick"] if rows < 2048 else []), dtype=dtype)
    for rows, dim in [(2048, 4096), (1024, 1024), (1, 4096)]
    for dtype in (torch.float32, torch.bfloat16)
]


def _activations(shape: Shape, device: str) -> torch.Tensor:
    return torch.randn(shape.sizes, device=device, dtype=shape.dtype)


def _weight(shape: Shape, device: str) -> torch.Tensor:
    dtype = torch.float32 if shape.variant == FLOAT32_WEIGHT else shape.dtype
    return (1.0 + 0.1 * torch.randn(shape.sizes[-1], device=device)).to(dtype)


def _activation_bytes(shape: Shape) -> int:
    rows, dim = shape.sizes
    return rows * dim * shape.dtype.itemsize


def _weight_bytes(shape: Shape) -> int:
    return shape.sizes[-1] * (4 if shape.variant == FLOAT32_WEIGHT else shape.dtype.itemsize)


def _moves(activations: int, weights: int):
    return lambda shape: activations * _activation_bytes(shape) + weights * _weight_bytes(shape)


# The formulas, as a model would write them: `eager` runs them, `compile` compiles them.


def eager_rms_norm(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * weight.float()).to(x.dtype)


def eager_fused_add_rms_norm(x, residual, weight):
    new_residual = x + residual
    return eager_rms_norm(new_residual, weight), new_residual


def eager_rms_norm_add_rms_norm(x, residual, post_weight, pre_weight):
    new_residual = residual + eager_rms_norm(x, post_weight)
    return eager_rms_norm(new_residual, pre_weight), new_residual


def torch_rms_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS).to(x.dtype)


def torch_fused_add_rms_norm(x, residual, weight):
    new_residual = x + residual
    return torch_rms_norm(new_residual, weight), new_residual


def torch_rms_norm_add_rms_norm(x, residual, post_weight, pre_weight):
    new_residual = residual + torch_rms_norm(x, post_weight)
    return torch_rms_norm(new_residual, pre_weight), new_residual


# Liger: "gemma" is the casting that rounds once, as fuselage does by default. In place is its
# default for rms_norm; without it, it would fill the gradient with zeros first.


def liger_rms_norm():
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", True)


def liger_fused_add_rms_norm():
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, EPS, 0.0, "gemma", False
    )


def liger_rms_norm_add_rms_norm():
    norm, add_norm = liger_rms_norm(), liger_fused_add_rms_norm()

    def call(x, residual, post_weight, pre_weight):
        return add_norm(norm(x, post_weight), residual, pre_weight)

    return call


def quack_rms_norm():
    from quack import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def quack_fused_add_rms_norm():
    from quack import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _rms_norm_contenders(fuselage: ModuleType):
    return {
        "fuselage": lambda: lambda x, weight: fuselage.rms_norm(x, weight, EPS),
        "eager": lambda: eager_rms_norm,
        "torch": lambda: torch_rms_norm,
        "compile": lambda: compiled(eager_rms_norm),
        "liger": liger_rms_norm,
        "quack": quack_rms_norm,
    }


def _fused_add_rms_norm_contenders(fuselage: ModuleType):
    return {
        "fuselage": lambda: (
            lambda x, residual, weight: fuselage.fused_add_rms_norm(x, residual, weight, EPS)
        ),
        "eager": lambda: eager_fused_add_rms_norm,
        "torch": lambda: torch_fused_add_rms_norm,
        "compile": lambda: compiled(eager_fused_add_rms_norm),
        "liger": liger_fused_add_rms_norm,
        "quack": quack_fused_add_rms_norm,
    }


def _rms_norm_add_rms_norm_contenders(fuselage: ModuleType):
    return {
        "fuselage": lambda: lambda *inputs: fuselage.rms_norm_add_rms_norm(*inputs, EPS),
        "eager": lambda: eager_rms_norm_add_rms_norm,
        "torch": lambda: torch_rms_norm_add_rms_norm,
        "compile": lambda: compiled(eager_rms_norm_add_rms_norm),
        "liger": liger_rms_norm_add_rms_norm,
    }


def _reference(x, weight, dtype):
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight,)


def _fused_add_reference(x, residual, weight, dtype):
    new_residual = rounded(x + residual, dtype)
    return (*_reference(new_residual, weight, dtype), new_residual)


def _rms_norm_add_reference(x, residual, post_weight, pre_weight, dtype):
    n = rounded(*_reference(x, post_weight, dtype), dtype)
    return _fused_add_reference(n, residual, pre_weight, dtype)


def _host_sections(fuselage: ModuleType, device: str) -> list[HostSection]:
    # On the CPU the work is the host's too, so the tensors are tiny: the call is to be timed.
    return [
        _host_forward(fuselage, device, 64, 64),
        _host_training(fuselage, device, *((8, 64) if device == "cpu" else (1024, 2048))),
    ]


def _host_forward(fuselage: ModuleType, device: str, rows: int, dim: int) -> HostSection:
    shape = _shape(rows, dim)
    x, residual, weight = (
        _activations(shape, device),
        _activations(shape, device),
        _weight(shape, device),
    )

    def call(function, *inputs):
        return lambda: function(*inputs)

    return HostSection(
        name=f"forward without gradients {shape.label}",
        calls={
            "x.mul_(1.0)": lambda: call(x.mul_, 1.0),
            "F.rms_norm": lambda: lambda: F.rms_norm(x, (dim,), weight, EPS),
            "fuselage.rms_norm": lambda: lambda: fuselage.rms_norm(x, weight, EPS),
            "fuselage.fused_add_rms_norm": lambda: (
                lambda: fuselage.fused_add_rms_norm(x, residual, weight, EPS)
            ),
            "compile": lambda: call(compiled(eager_rms_norm), x, weight),
            "liger": lambda: call(liger_rms_norm(), x, weight),
            "quack": lambda: call(quack_rms_norm(), x, weight),
        },
        subjects=("fuselage.rms_norm", "fuselage.fused_add_rms_norm"),
        yardstick="x.mul_(1.0)",
        limit=1.15,
    )


def _host_training(fuselage: ModuleType, device: str, rows: int, dim: int) -> HostSection:
    shape = _shape(rows, dim)
    plain, x, weight = (make(shape, device) for make in (_activations, _activations, _weight))
    residual = _activations(shape, device).requires_grad_()
    grad_out = _activations(shape, device)
    x.requires_grad_()
    weight.requires_grad_()

    def training(function):
        return lambda: torch.autograd.grad(function(x, weight), (x, weight), grad_out)

    def fused_training():
        return torch.autograd.grad(
            fuselage.fused_add_rms_norm(x, residual, weight, EPS),
            (x, residual, weight),
            (grad_out, grad_out),
        )

    def rms_norm(x, weight):
        return fuselage.rms_norm(x, weight, EPS)

    def registered(x, weight):
        return fuselage.norm.ops.rms_norm_fwd(x, weight, EPS, 0.0, False, None)[0]

    return HostSection(
        name=f"forward+backward {shape.label}",
        calls={
            "x.mul_(1.0)": lambda: lambda: plain.mul_(1.0),
            "F.rms_norm": lambda: training(lambda x, weight: F.rms_norm(x, (dim,), weight, EPS)),
            "fuselage.rms_norm": lambda: training(rms_norm),
            "fuselage.fused_add_rms_norm": lambda: fused_training,
            "fuselage, registered op": lambda: training(registered),
            "fuselage, compile": lambda: training(compiled(rms_norm)),
            "compile": lambda: training(compiled(eager_rms_norm)),
            "liger": lambda: training(liger_rms_norm()),
            "quack": lambda: training(quack_rms_norm()),
        },
        subjects=("fuselage.rms_norm",),
        yardstick="F.rms_norm",
        limit=1.5,
    )


OPERATORS = [
    Operator(
        name="rms_norm",
        shapes=[*_COMMON, *_RMS_NORM_ONLY, *_CPU],
        make_inputs=lambda shape, device: (_activations(shape, device), _weight(shape, device)),
        contenders=_rms_norm_contenders,
        reference=_reference,
        # The saved statistics of a row are not counted: x is read anyway and could yield them.
        necessary_bytes={"fwd": _moves(2, 1), "bwd": _moves(3, 2)},
        overwrites_grad=frozenset({"liger"}),
        host_sections=_host_sections,
    ),
    Operator(
        name="fused_add_rms_norm",
        shapes=[*_COMMON, *_CPU],
        make_inputs=lambda shape, device: (
            _activations(shape, device),
            _activations(shape, device),
            _weight(shape, device),
        ),
        contenders=_fused_add_rms_norm_contenders,
        reference=_fused_add_reference,
        # Backward: the gradient of x is also that of the residual, written once.
        necessary_bytes={"fwd": _moves(4, 1), "bwd": _moves(4, 2)},
    ),
    Operator(
        name="rms_norm_add_rms_norm",
        shapes=[
            _shape(16384, 4096, "main", "quick"),
            _shape(8192, 3072, "main"),
            _shape(_rows_for(2560), 2560, "odd"),
            _shape(_rows_for(4097), 4097, "odd"),
            _shape(_rows_for(131072), 131072, "odd"),
            _shape(1048576, 128, "odd"),
            _shape(1024, 2048, "small"),
            _shape(1, 4096, "small"),
            _shape(16384, 4096, "dtype", dtype=torch.float32),
            *_CPU,
        ],
        make_inputs=lambda shape, device: (
            *(_activations(shape, device) for _ in range(2)),
            *(_weight(shape, device) for _ in range(2)),
        ),
        contenders=_rms_norm_add_rms_norm_contenders,
        reference=_rms_norm_add_reference,
        roundings=2,
        # Backward: reads both gradients, x and the sum; writes the gradients of x and the residual.
        necessary_bytes={"fwd": _moves(4, 2), "bwd": _moves(6, 4)},
    ),
]
