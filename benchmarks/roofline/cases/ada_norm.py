"""layer_norm, fused_add_layer_norm, ada_layer_norm, ada_rms_norm and gate_residual_ada_norm."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from ..contenders import compiled
from ..registry import HostSection, Operator, Shape
from ..verify import rounded

EPS = 1e-6
FLOAT32 = "mod32"  # scale, shift and gate in float32, as Wan has them


def _shape(*sizes: int, tags: tuple[str, ...], dtype=torch.bfloat16, variant: str = "") -> Shape:
    return Shape(sizes, dtype, frozenset(tags), variant)


def _rows_for(dim: int, mebibytes: int = 128) -> int:
    return mebibytes * 2**20 // (2 * dim)


_LAYER_NORM = [
    _shape(16384, 4096, tags=("main", "quick")),
    _shape(32768, 1024, tags=("main",)),
    _shape(8192, 3072, tags=("main",)),
    _shape(_rows_for(5120), 5120, tags=("odd",)),
    _shape(_rows_for(8192), 8192, tags=("odd",)),
    _shape(_rows_for(16384), 16384, tags=("odd",)),
    _shape(_rows_for(640), 640, tags=("odd",)),
    _shape(_rows_for(768), 768, tags=("odd",)),
    _shape(_rows_for(4097), 4097, tags=("odd",)),
    _shape(_rows_for(131072), 131072, tags=("odd",)),
    _shape(1048576, 128, tags=("odd",)),
    _shape(1, 4096, tags=("small", "quick")),
    _shape(1024, 2048, tags=("small",)),
    _shape(16384, 4096, tags=("dtype",), dtype=torch.float32),
    _shape(16384, 4096, tags=("dtype",), dtype=torch.float16),
]
# LTX-Video at 49 frames of 512x768, Flux at 1024x1024, Wan 2.1 at 81 frames of 480x832.
_ADAPTIVE = [
    _shape(2, 4992, 2048, tags=("main", "quick")),
    _shape(1, 4608, 3072, tags=("main",)),
    _shape(1, 32760, 5120, tags=("main",)),
    _shape(1, 32760, 1536, tags=("main",)),
    _shape(1, 32760, 5120, tags=("dtype",), variant=FLOAT32),
    _shape(2, 4992, 2048, tags=("dtype",), dtype=torch.float32),
    _shape(2, 4992, 2049, tags=("odd",)),
    _shape(64, 256, 1152, tags=("odd",)),  # a DiT's many small images
    _shape(2, 77, 2048, tags=("small", "quick")),
    _shape(1, 512, 3072, tags=("small",)),
]
_CPU = [
    _shape(*sizes, tags=("cpu", "main", *(["quick"] if sizes[-2] < 2048 else [])), dtype=dtype)
    for sizes in [(2048, 4096), (1024, 1024)]
    for dtype in (torch.float32, torch.bfloat16)
]
_ADAPTIVE_CPU = [
    _shape(2, 512, 2048, tags=("cpu", "main", "quick"), dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16)
]


def _activations(shape: Shape, device: str) -> torch.Tensor:
    return torch.randn(shape.sizes, device=device, dtype=shape.dtype)


def _modulation_dtype(shape: Shape) -> torch.dtype:
    return torch.float32 if shape.variant == FLOAT32 else shape.dtype


def _modulations(shape: Shape, device: str, count: int) -> list[torch.Tensor]:
    sizes = (shape.sizes[0], 1, shape.sizes[-1])
    return [
        (0.2 * torch.randn(sizes, device=device)).to(_modulation_dtype(shape)) for _ in range(count)
    ]


def _layer_norm_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    dim = shape.sizes[-1]
    weight, bias = (0.1 * torch.randn(2, dim, device=device)).to(shape.dtype).unbind()
    return _activations(shape, device), (1.0 + weight).clone(), bias.clone()


def _fused_add_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    x, weight, bias = _layer_norm_inputs(shape, device)
    return x, _activations(shape, device), weight, bias


def _ada_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    return (_activations(shape, device), *_modulations(shape, device, 2))


def _gate_residual_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    x, residual = _activations(shape, device), _activations(shape, device)
    return (x, residual, *_modulations(shape, device, 3))


def _moves(activations: int, vectors: int = 0, modulations: int = 0):
    """Bytes of so many [..., dim], [dim] and [batch, 1, dim]."""

    def moved(shape: Shape) -> int:
        size, dim = shape.dtype.itemsize, shape.sizes[-1]
        rows = 1
        for n in shape.sizes[:-1]:
            rows *= n
        of_batch = modulations * shape.sizes[0] * _modulation_dtype(shape).itemsize
        return dim * (activations * rows * size + vectors * size + of_batch)

    return moved


# The formulas, as a model would write them: `eager` runs them, `compile` compiles them.


def eager_layer_norm(x, weight, bias):
    h = x.float()
    centred = h - h.mean(-1, keepdim=True)
    n = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS)
    return (n * weight.float() + bias.float()).to(x.dtype)


def eager_ada_layer_norm(x, scale, shift):
    h = F.layer_norm(x.float(), x.shape[-1:], None, None, EPS)
    return (h * (1 + scale) + shift).to(x.dtype)


def eager_ada_rms_norm(x, scale, shift):
    h = F.rms_norm(x.float(), x.shape[-1:], None, EPS)
    return (h * (1 + scale) + shift).to(x.dtype)


def torch_layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def torch_ada_layer_norm(x, scale, shift):
    return (F.layer_norm(x, x.shape[-1:], None, None, EPS) * (1 + scale) + shift).to(x.dtype)


def torch_ada_rms_norm(x, scale, shift):
    return (F.rms_norm(x, x.shape[-1:], None, EPS) * (1 + scale) + shift).to(x.dtype)


def _with_sum(layer_norm):
    def formula(x, residual, weight, bias):
        new_residual = x + residual
        return layer_norm(new_residual, weight, bias), new_residual

    return formula


def _with_residual(ada_norm):
    def formula(x, residual, gate, scale, shift):
        new_residual = (residual + gate * x).to(x.dtype)
        return ada_norm(new_residual, scale, shift), new_residual

    return formula


def liger_layer_norm():
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _layer_norm_contenders(fuselage: ModuleType):
    return {
        "fuselage": lambda: lambda x, weight, bias: fuselage.layer_norm(x, weight, bias, EPS),
        "eager": lambda: eager_layer_norm,
        "torch": lambda: torch_layer_norm,
        "compile": lambda: compiled(eager_layer_norm),
        "liger": liger_layer_norm,
    }


def _fused_add_contenders(fuselage: ModuleType):
    def ours(x, residual, weight, bias):
        return fuselage.fused_add_layer_norm(x, residual, weight, bias, EPS)

    return {
        "fuselage": lambda: ours,
        "eager": lambda: _with_sum(eager_layer_norm),
        "torch": lambda: _with_sum(torch_layer_norm),
        "compile": lambda: compiled(_with_sum(eager_layer_norm)),
    }


def _ada_contenders(name: str, eager, torchs):
    def contenders(fuselage: ModuleType):
        ours = getattr(fuselage, name)
        return {
            "fuselage": lambda: lambda x, scale, shift: ours(x, scale, shift, eps=EPS),
            "eager": lambda: eager,
            "torch": lambda: torchs,
            "compile": lambda: compiled(eager),
        }

    return contenders


def _gate_residual_contenders(norm: str, eager, torchs):
    def contenders(fuselage: ModuleType):
        def ours(x, residual, gate, scale, shift):
            return fuselage.gate_residual_ada_norm(
                x, residual, gate, scale, shift, eps=EPS, norm=norm
            )

        return {
            "fuselage": lambda: ours,
            "eager": lambda: _with_residual(eager),
            "torch": lambda: _with_residual(torchs),
            "compile": lambda: compiled(_with_residual(eager)),
        }

    return contenders


def _normalised(x, layer: bool):
    centred = x - x.mean(-1, keepdim=True) if layer else x
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)


def _layer_norm_reference(x, weight, bias, dtype):
    return (_normalised(x, True) * weight + bias,)


def _fused_add_reference(x, residual, weight, bias, dtype):
    new_residual = rounded(x + residual, dtype)
    return _normalised(new_residual, True) * weight + bias, new_residual


def _ada_reference(layer: bool):
    return lambda x, scale, shift, dtype: (_normalised(x, layer) * (1 + scale) + shift,)


def _gate_residual_reference(layer: bool):
    def reference(x, residual, gate, scale, shift, dtype):
        # Product and sum are float32 on the way, which decides ties of the last rounding.
        product = rounded(gate * x, torch.float32)
        new_residual = rounded(rounded(residual + product, torch.float32), dtype)
        return _normalised(new_residual, layer) * (1 + scale) + shift, new_residual

    return reference


def _host_sections(fuselage: ModuleType, device: str) -> list[HostSection]:
    # On the CPU the work is the host's too, so the tensors are tiny: the call is to be timed.
    rows, dim = (8, 64) if device == "cpu" else (1024, 2048)
    small = _shape(64, 64, tags=())
    x, weight, bias = _layer_norm_inputs(small, device)
    scale, shift = weight[None], bias[None]
    leaves = [t.requires_grad_() for t in _layer_norm_inputs(_shape(rows, dim, tags=()), device)]
    grad_out = torch.ones_like(leaves[0])

    def training(function):
        return lambda: torch.autograd.grad(function(*leaves), leaves, grad_out)

    return [
        HostSection(
            name=f"layer_norm without gradients {small.label}",
            calls={
                "x.mul_(1.0)": lambda: lambda: x.mul_(1.0),
                "F.layer_norm": lambda: lambda: torch_layer_norm(x, weight, bias),
                "fuselage.layer_norm": lambda: lambda: fuselage.layer_norm(x, weight, bias, EPS),
                "fuselage.ada_layer_norm": lambda: (
                    lambda: fuselage.ada_layer_norm(x, scale, shift, eps=EPS)
                ),
            },
            subjects=("fuselage.layer_norm", "fuselage.ada_layer_norm"),
            yardstick="x.mul_(1.0)",
            limit=1.15,
        ),
        HostSection(
            name=f"layer_norm forward+backward {rows}x{dim}",
            calls={
                "F.layer_norm": lambda: training(torch_layer_norm),
                "fuselage.layer_norm": lambda: training(
                    lambda x, weight, bias: fuselage.layer_norm(x, weight, bias, EPS)
                ),
                "liger": lambda: training(liger_layer_norm()),
            },
            subjects=("fuselage.layer_norm",),
            yardstick="F.layer_norm",
            limit=1.5,
        ),
    ]


def _gate_residual(name: str, norm: str, shapes: list[Shape], eager, torchs) -> Operator:
    return Operator(
        name=name,
        shapes=shapes,
        make_inputs=_gate_residual_inputs,
        contenders=_gate_residual_contenders(norm, eager, torchs),
        reference=_gate_residual_reference(norm == "layer"),
        # Backward: x is read for the gradient of the gate.
        necessary_bytes={"fwd": _moves(4, modulations=3), "bwd": _moves(6, modulations=5)},
    )


OPERATORS = [
    Operator(
        name="layer_norm",
        shapes=[*_LAYER_NORM, *_CPU],
        make_inputs=_layer_norm_inputs,
        contenders=_layer_norm_contenders,
        reference=_layer_norm_reference,
        necessary_bytes={"fwd": _moves(2, 2), "bwd": _moves(3, 3)},
        host_sections=_host_sections,
    ),
    Operator(
        name="fused_add_layer_norm",
        shapes=[s for s in _LAYER_NORM if s.tags & {"main", "small"}] + _CPU,
        make_inputs=_fused_add_inputs,
        contenders=_fused_add_contenders,
        reference=_fused_add_reference,
        necessary_bytes={"fwd": _moves(4, 2), "bwd": _moves(4, 3)},
    ),
    Operator(
        name="ada_layer_norm",
        shapes=[*_ADAPTIVE, *_ADAPTIVE_CPU],
        make_inputs=_ada_inputs,
        contenders=_ada_contenders("ada_layer_norm", eager_ada_layer_norm, torch_ada_layer_norm),
        reference=_ada_reference(True),
        necessary_bytes={"fwd": _moves(2, modulations=2), "bwd": _moves(3, modulations=3)},
    ),
    Operator(
        name="ada_rms_norm",
        shapes=[s for s in _ADAPTIVE if s.sizes[-1] == 2048],
        make_inputs=_ada_inputs,
        contenders=_ada_contenders("ada_rms_norm", eager_ada_rms_norm, torch_ada_rms_norm),
        reference=_ada_reference(False),
        necessary_bytes={"fwd": _moves(2, modulations=2), "bwd": _moves(3, modulations=3)},
    ),
    _gate_residual(
        "gate_residual_ada_norm",
        "layer",
        [*_ADAPTIVE, *_ADAPTIVE_CPU],
        eager_ada_layer_norm,
        torch_ada_layer_norm,
    ),
    _gate_residual(
        "gate_residual_ada_norm-rms",
        "rms",
        [s for s in _ADAPTIVE if s.sizes[-1] == 2048],
        eager_ada_rms_norm,
        torch_ada_rms_norm,
    ),
]
