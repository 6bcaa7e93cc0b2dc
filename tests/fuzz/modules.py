"""`fuselage.modules`: each has the bits of the function that it calls."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import Draw
from .judge import same_bits, valid_call
from .rows import Call

# Class -> the function, and what of the function's arguments the constructor takes.
LOSS_OPTIONS = (
    *("ignore_index", "reduction", "label_smoothing", "lse_square_scale"),
    "logit_softcap",
)
MODULES = {
    "RMSNorm": ("rms_norm", ("eps", "weight_offset", "cast_before_weight", "out_dtype")),
    "FusedAddRMSNorm": (
        "fused_add_rms_norm",
        ("eps", "weight_offset", "cast_before_weight", "out_dtype"),
    ),
    "RMSNormGated": (
        "gated_rms_norm",
        ("eps", "activation", "norm_before_gate", "group_size", "cast_before_weight"),
    ),
    "LayerNorm": ("layer_norm", ("eps",)),
    "FusedAddLayerNorm": ("fused_add_layer_norm", ("eps",)),
    "AdaLayerNorm": ("ada_layer_norm", ("eps",)),
    "AdaRMSNorm": ("ada_rms_norm", ("eps",)),
    "GroupNorm": ("group_norm", ("eps", "num_groups", "activation")),  # its cases: group.py
    "PolyNorm": ("poly_norm", ("eps",)),
    "FusedMulPolyNorm": ("fused_mul_poly_norm", ("eps", "mul_first")),
    "GroupedPolyNorm": ("grouped_poly_norm", ("eps", "hidden_clamp", "mul_first")),
    "Fp8Linear": ("quant_fp8", ()),  # whose cases are those of quant.py
    "SiluAndMul": ("silu_and_mul", ()),
    "GeluAndMul": ("gelu_and_mul", ()),
    # Whose cases are those of loss.py.
    "CrossEntropyLoss": ("cross_entropy", LOSS_OPTIONS),
    "LinearCrossEntropyLoss": ("linear_cross_entropy", (*LOSS_OPTIONS, "max_workspace")),
}


def check(kernel, draw: Draw, name: str, call: Call) -> None:
    """The module with the call's parameters, forward and backward."""
    function, options = MODULES[name]
    parameters = {n: t for n, t in call.inputs.items() if n in ("weight", "bias")}
    given = {n: value for n, value in call.options.items() if n in options}
    x = call.inputs[call.op.main]
    if "Poly" not in name and name not in ("SiluAndMul", "GeluAndMul"):
        given |= {"dim": x.shape[-1], "elementwise_affine": parameters["weight"] is not None}
        if name in ("LayerNorm", "FusedAddLayerNorm", "AdaLayerNorm"):
            given["bias"] = parameters.get("bias") is not None
            if parameters["weight"] is None:  # then there is no bias either
                parameters["bias"] = None
    if name == "GroupedPolyNorm":
        given["num_experts"] = len(parameters["weight"])
    with valid_call(f"modules.{name}"):
        module = getattr(kernel.modules, name)(**given)
    leaves = {}
    for key, value in call.inputs.items():
        value = parameters.get(key, value)
        leaves[key] = _leaf(value)
        if value is not None and key in parameters:
            setattr(module, key, torch.nn.Parameter(value.detach()))
    forward = {key: _leaf(t) for key, t in call.inputs.items() if key not in parameters}
    with valid_call(f"modules.{name}"):
        outputs = module(**forward)
    expected = getattr(kernel, function)(**leaves, **call.options)
    outputs, expected = (o if isinstance(o, tuple) else (o,) for o in (outputs, expected))
    for ours, theirs in zip(outputs, expected, strict=True):
        same_bits(ours.detach(), theirs.detach(), "the module's result", "a wrong value")
    with valid_call(f"the backward of modules.{name}"):
        for result in (outputs, expected):
            torch.autograd.backward(result, [torch.ones_like(o) for o in result])
    for key, leaf in {**forward, **dict(module.named_parameters())}.items():
        if leaf is not None and leaf.grad is not None:
            same_bits(leaf.grad, leaves[key].grad, f"grad_{key}", "a wrong gradient")


def _leaf(value):
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())
