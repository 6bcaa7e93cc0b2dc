"""What the bindings say of memory that is written, and of what a backward is given."""

from __future__ import annotations

import re

import pytest
import torch

# name: (op, arguments of a device, what is said after "fuselage::<op>: ")
REFUSED = {
    "rows that overlap": (
        "fused_add_rms_norm_",
        lambda t: (t(8, 4).as_strided((4, 8), (4, 1)), t(4, 8), None, 1e-6, 0.0, False),
        "`x` is written in place and must be rows of adjacent elements that do not overlap, one "
        "stride between all of them; pass a contiguous tensor or use fused_add_rms_norm",
    ),
    "columns that are not adjacent": (
        "fused_add_rms_norm_",
        lambda t: (t(4, 8), t(8, 4).t(), None, 1e-6, 0.0, False),
        "`residual` is written in place and must be rows of adjacent elements that do not overlap, "
        "one stride between all of them; pass a contiguous tensor or use fused_add_rms_norm",
    ),
    "one tensor written twice": (
        "fused_add_rms_norm_",
        lambda t: ((x := t(4, 8)), x, None, 1e-6, 0.0, False),
        "`x` and `residual` are both written and must not share memory; pass a copy of one",
    ),
    "a weight in x": (
        "fused_add_rms_norm_",
        lambda t: ((x := t(4, 8)), t(4, 8), x[0], 1e-6, 0.0, False),
        "`x` is written in place and must not share memory with `weight`; pass a copy",
    ),
    "a weight in the residual": (
        "fused_add_rms_norm_",
        lambda t: (t(4, 8), (r := t(4, 8)), r[0], 1e-6, 0.0, False),
        "`residual` is written in place and must not share memory with `weight`; pass a copy",
    ),
    "one tensor written twice, of layer norms": (
        "fused_add_layer_norm_",
        lambda t: ((x := t(4, 8)), x, None, None, 1e-6),
        "`x` and `residual` are both written and must not share memory; pass a copy of one",
    ),
    "a bias in the residual": (
        "fused_add_layer_norm_",
        lambda t: (t(4, 8), (r := t(4, 8)), None, r[0], 1e-6),
        "`residual` is written in place and must not share memory with `bias`; pass a copy",
    ),
    "residual rows that overlap": (
        "fused_add_layer_norm_",
        lambda t: (t(4, 8), t(8, 4).as_strided((4, 8), (4, 1)), None, None, 1e-6),
        "`residual` is written in place and must be rows of adjacent elements that do not overlap, "
        "one stride between all of them; pass a contiguous tensor or use fused_add_layer_norm",
    ),
    "rows of an epilogue": (
        "bias_act_",
        lambda t: (t(8, 4).t(), None, 1),
        "`x` is written in place and must be rows of adjacent elements that do not overlap, one "
        "stride between all of them; pass a contiguous tensor or use bias_act",
    ),
    "a bias in x": (
        "bias_act_",
        lambda t: ((x := t(4, 8)), x[0], 1),
        "`x` is written in place and must not share memory with `bias`; pass a copy",
    ),
    "a part of y": (
        "add_mul_act_",
        lambda t: ((x := t(5, 8))[1:], None, x[:4], 1.0, 1),
        "`x` is written in place and must not share memory with `y`, unless they are the same; "
        "pass a copy of one",
    ),
    "statistics of other rows": (
        "rms_norm_bwd",
        lambda t: (t(4, 8), None, t(4, 8), None, t(5), 0.0, True, False),
        "`rstd` must be the float32 [4] that the forward returned, got [5]",
    ),
    "statistics of another type": (
        "poly_norm_bwd",
        lambda t: (
            *(t(4, 8), t(4, 8), None, False, False, t(3), t(1), t(4, 3).half()),
            *(True, False, False, False),
        ),
        "`rstd` must be the float32 [4, 3] that the forward returned, got [4, 3]",
    ),
    "statistics with gaps": (
        "layer_norm_bwd",
        lambda t: (t(4, 8), t(4, 8), None, None, t(2, 4).t(), True, False, False),
        "`statistics` must be the 8 float32 values that the forward returned, got [4, 2]",
    ),
    "a gradient of a packed result": (
        "poly_norm_bwd",
        lambda t: (
            *(t(4, 8), t(4, 8), None, True, False, t(3), t(1), t(4, 3)),
            *(True, False, False, False),
        ),
        "`grad_out` must have the shape of the result, 4 columns for each row of `x` [4, 8], got "
        "[4, 8]",
    ),
    "a gradient of another type": (
        "poly_norm_bwd",
        lambda t: (
            *(t(4, 8).half(), t(4, 8), None, False, False, t(3), t(1), t(4, 3)),
            *(True, False, False, False),
        ),
        "`grad_out` must be float32 as `x`, got float16",
    ),
    "a gate without its factor": (
        "gate_residual_ada_norm_bwd",
        lambda t: (
            *(t(4, 8), None, t(4, 8), None, t(8), None, None, None, None, t(4, 2), True),
            *(False, False, True, False, False, False, False),
        ),
        "`x` must be given where the gradient of `gate` is needed",
    ),
    "an activation without its input": (
        "add_mul_act_bwd",
        lambda t: (t(4, 8), None, None, None, 1.0, 1, True, False, False),
        "`x` must be there for this activation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(fuselage, device, case):
    op, arguments, message = REFUSED[case]

    def tensor(*shape):
        return torch.ones(shape, device=device)

    with pytest.raises(RuntimeError, match="^" + re.escape(f"fuselage::{op}: {message}")):
        getattr(fuselage._ops.ops, op)(*arguments(tensor))


@pytest.mark.parametrize("name", ["silu_and_mul", "fused_mul_poly_norm"])
def test_too_many_dimensions(fuselage, device, name):
    x = torch.ones([1] * 64 + [8], device=device)
    parameters = [] if name == "silu_and_mul" else [None, x.new_ones(3), x.new_ones(1)]
    with pytest.raises(RuntimeError, match=f"^fuselage::{name}: `x` must have at most 64 dimens"):
        getattr(fuselage, name)(x, *parameters)


@pytest.mark.parametrize(
    "call",
    [
        # NOTE: 2^48 bytes, more than a process can address.
        lambda f, t: f.rms_norm(t(1 << 13).expand(1 << 33, -1), None),
        lambda f, t: f.rms_norm(t(1).expand(1 << 33, 1 << 13), None),
    ],
    ids=["a result", "a copy"],
)
def test_out_of_memory(fuselage, device, call):
    """Has PyTorch's exception, and in its message what trainers look for that try less."""
    with pytest.raises(torch.OutOfMemoryError, match=r" out of memory\.") as raised:
        call(fuselage, lambda *shape: torch.ones(shape, device=device))
    assert str(raised.value).startswith("CUDA" if device == "cuda" else "CPU")
