"""Rows that start anywhere, or with gaps between them, give the bits of rows on 16-byte boundaries.

Of the operators whose kernels for either are apart, and add up in the same order. Sums over the
rows are compared where their order is promised, too.
"""

from __future__ import annotations

import operators
import torch
from harness import (
    assert_same_bits,
    each_dtype,
    each_operator,
    each_style,
    gradients,
    on_devices,
    random_grad_outs,
)

POLY_NORMS = [operators.POLY_NORM, operators.FUSED_MUL_POLY_NORM, operators.GROUPED_POLY_NORM]
NORMS = [
    operators.RMS_NORM,
    operators.FUSED_ADD_RMS_NORM,
    operators.RMS_NORM_ADD_RMS_NORM,
    operators.LAYER_NORM,
    operators.FUSED_ADD_LAYER_NORM,
    operators.ADA_LAYER_NORM,
    operators.GATE_RESIDUAL_ADA_NORM,
    operators.GATED_RMS_NORM,
]
GATES = [
    operators.SWIGLU,
    operators.GEGLU,
    operators.SWIGLU_CLAMPED,
    operators.BIAS_ACT,
    operators.ADD_MUL_ACT,
]


def moved(t: torch.Tensor) -> torch.Tensor:
    """The same values, one element past a boundary."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


def apart(t: torch.Tensor) -> torch.Tensor:
    """The same values, with a gap of three elements between rows."""
    return torch.nn.functional.pad(t, (0, 3))[..., :-3]


def check_moved(
    op, kernel, style: str, shape: tuple[int, int], dtype, device, move=moved, sums: bool = True
) -> None:
    inputs, options = op.inputs(shape, dtype, device, style), op.options(style)
    elsewhere = {name: move(t) if name in op.row_inputs else t for name, t in inputs.items()}
    requires = op.differentiable(inputs)
    assert set(op.row_inputs) <= set(requires) and len(op.row_inputs) > 0

    def call(leaves, options):
        return op.run(kernel, leaves, options)

    outputs = call(inputs, options)
    grad_outs = random_grad_outs(outputs)
    moved_grad_outs = {name: move(grad) for name, grad in grad_outs.items()}
    grads = gradients(call, inputs, options, grad_outs, requires)
    moved_outputs = call(elsewhere, options)
    moved_grads = gradients(call, elsewhere, options, moved_grad_outs, requires)
    for name, expected in outputs.items():
        assert_same_bits(moved_outputs[name], expected, name)
    for name in requires if sums else op.row_inputs:
        assert_same_bits(moved_grads[name], grads[name], f"gradient of {name}")


# Of several rows in a warp, of blocks, of blocks in clusters, and too long for those.
@each_style(NORMS)
@each_dtype
@on_devices((64, 1000), (8, 64, 136, 512, 1000, 2048, 4096, 16384, 65536, 163840))
def test_norms_do_not_depend_on_alignment(fuselage, device, op, style, dtype, dim):
    check_moved(op, fuselage, style, (37, dim), dtype, device, sums=False)


# More rows than there are blocks for.
@each_operator(NORMS)
@each_dtype
@on_devices((), (8, 136, 2048, 5120))
def test_norms_of_many_rows_do_not_depend_on_alignment(fuselage, device, op, dtype, dim):
    check_moved(op, fuselage, next(iter(op.styles)), (3001, dim), dtype, device, sums=False)


# Of several rows a thread, of one, of blocks in clusters, and too long for those.
@each_style(POLY_NORMS)
@each_dtype
@on_devices((64, 1000), (8, 64, 256, 512, 1000, 2048, 8192, 16384, 65536, 163840))
def test_poly_norms_do_not_depend_on_alignment(fuselage, device, op, style, dtype, dim):
    check_moved(op, fuselage, style, (37, dim), dtype, device)


# Rows that end anywhere in what a warp has, and start anywhere: gaps move the starts.
@each_operator(NORMS + POLY_NORMS)
@each_dtype
@on_devices((65, 1281, 2049), (65, 1023, 1281, 2049, 4100, 5119, 16391))
def test_norms_of_odd_rows_do_not_depend_on_gaps(fuselage, device, op, dtype, dim):
    check_moved(op, fuselage, next(iter(op.styles)), (37, dim), dtype, device, apart, sums=False)


# Where aligned rows are copied into shared memory, by blocks and by clusters, and others are not.
# The blocks then have other rows, so that sums over rows differ.
@each_style(POLY_NORMS)
@each_dtype
@on_devices((), (2048, 5120, 10240, 14336, 32768))
def test_poly_norms_of_many_rows_do_not_depend_on_alignment(
    fuselage, device, op, style, dtype, dim
):
    check_moved(op, fuselage, style, (1501, dim), dtype, device, sums=False)


# More blocks of rows than partial sums, so that blocks go round.
@each_operator(POLY_NORMS)
@on_devices((), (64, 512))
def test_sums_over_many_rows_do_not_depend_on_alignment(fuselage, device, op, dim):
    check_moved(op, fuselage, "torch", ((1 << 25) // dim + 3, dim), torch.bfloat16, device)


@each_style(GATES)
@each_dtype
@on_devices((64, 1000), (8, 64, 1000, 4096))
def test_gates_do_not_depend_on_alignment(fuselage, device, op, style, dtype, dim):
    check_moved(op, fuselage, style, (133, dim), dtype, device)


# On the CPU narrow rows without gaps are worked on several at a time.
@each_style(GATES)
@each_dtype
@on_devices((3, 13, 64, 256, 1000), (3, 64, 1000))
def test_gates_do_not_depend_on_gaps(fuselage, device, op, style, dtype, dim):
    check_moved(op, fuselage, style, (133, dim), dtype, device, apart)


# Rows enough for four vectors of them a thread, in the sum of the bias gradient.
@each_style([operators.BIAS_ACT, operators.ADD_MUL_ACT])
@on_devices((), (512,))
def test_bias_gradients_of_many_rows_do_not_depend_on_alignment(fuselage, device, op, style, dim):
    check_moved(op, fuselage, style, (1 << 15, dim), torch.bfloat16, device)


# An addition of 0, in place of none, would show.
@each_dtype
@on_devices((), (136, 2048))
def test_negative_zeros_do_not_depend_on_alignment(fuselage, device, dtype, dim):
    x = torch.randn(37, dim).to(dtype).to(device)
    zeros = torch.full((dim,), -0.0, dtype=dtype, device=device)
    expected = fuselage.layer_norm(x, zeros, zeros)
    assert {False, True} == set(torch.signbit(expected).unique().tolist())
    assert_same_bits(fuselage.layer_norm(moved(x), zeros, zeros), expected, "out")
