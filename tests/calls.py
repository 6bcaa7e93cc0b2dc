"""A valid call of every public function with an op, and calls that differ in one argument."""

from __future__ import annotations

from collections.abc import Iterator

import quantising
import torch
from harness import normal
from operators import (
    ADA_LAYER_NORM,
    ADA_RMS_NORM,
    GATE_RESIDUAL_ADA_NORM,
    OPERATORS,
    group_norm_inputs,
    grouped_poly_norm_inputs,
)
from torch import Tensor

# They write over their inputs, or quantise.
WITHOUT_GRADIENT = (
    "fused_add_layer_norm_",
    "fused_add_rms_norm_",
    "bias_act_",
    "add_mul_act_",
    "apply_rotary_",
    *quantising.BY_NAME,
)


def _rotary(dtype, device, **others) -> dict:
    q, k = (normal((2, 3, heads, 8), dtype, device) for heads in (4, 2))
    cos, sin = (normal((3, 8), torch.float32, device) for _ in range(2))
    return {"q": q, "k": k, "cos": cos, "sin": sin, **others}


def _qk_norm_rotary(dtype, device) -> dict:
    weights = {name: normal((8,), dtype, device) for name in ("q_weight", "k_weight")}
    return _rotary(dtype, device, **weights, eps=1e-6, weight_offset=0.0)


def _sampling(name: str, dtype, device) -> dict:
    vocabulary, batch = 40, 3
    call = {
        "temperature": 1.0,
        "num_samples": 2,
        "seed": torch.arange(batch, device=device),
        "offset": torch.zeros(1, dtype=torch.int64, device=device),
        "vocab_offset": 0,
        "bias": normal((vocabulary,), dtype, device),
    }
    if name == "gumbel_sample":
        words = torch.full(((vocabulary + 31) // 32,), -1, dtype=torch.int32, device=device)
        return {"logits": normal((batch, vocabulary), dtype, device), "bitmask": words, **call}
    hidden, weight = (normal((rows, 16), dtype, device) for rows in (batch, vocabulary))
    return {"hidden": hidden, "weight": weight, **call}


def _loss(name: str, dtype, device) -> dict:
    if name.startswith("linear_"):
        given = {
            "hidden": normal((2, 3, 16), dtype, device),
            "weight": normal((8, 16), dtype, device),
            "bias": normal((8,), dtype, device),
            "max_workspace": 256,
        }
    else:
        given = {"logits": normal((2, 3, 8), dtype, device)}
    targets = torch.tensor([[0, 6, 3], [2, 2, 5]], device=device)
    call = {**given, "targets": targets, "logit_softcap": 20.0}
    if name.endswith("log_probs"):
        asked = ("return_entropy", "return_log_sum_exp", "return_is_greatest")
        return {**call, "temperature": 0.5, **dict.fromkeys(asked, True)}
    weights = normal((2, 3), torch.float32, device)
    numbers = {"label_smoothing": 0.5, "lse_square_scale": 0.5, "reduction": "none"}
    return {**call, "token_weights": weights, **numbers}


def _route(dtype, device) -> dict:
    return {
        "logits": normal((2, 3, 8), dtype, device),
        "k": 2,
        "score": "sigmoid",
        "bias": normal((8,), dtype, device),
        "num_groups": 4,
        "topk_groups": 2,
    }


def _quant(dtype, device) -> dict:
    return {
        "x": normal((2, 3, 8), dtype, device),
        "group_size": -1,
        "scale_layout": "row",
        "scale_ue8m0": False,
        "ste": True,
    }


def call_of(name: str, dtype: torch.dtype, device: str) -> dict:
    """Arguments of a valid call, by name."""
    shape = (2, 3, 8)
    if name in ("lm_head_sample", "lm_head_sample_shard", "gumbel_sample"):
        return _sampling(name, dtype, device)
    if name.endswith(("cross_entropy", "log_probs")):
        return _loss(name, dtype, device)
    if name == "topk_softmax":
        return _route(dtype, device)
    if name == "quant_fp8":
        return _quant(dtype, device)
    if name in quantising.BY_NAME:
        given = quantising.BY_NAME[name].inputs(shape, dtype, device)
        options = {"group_size": -1, "scale_layout": "row", "scale_ue8m0": False}
        return given | options | {"return_unquantized": True}
    if name == "group_norm":
        inputs = group_norm_inputs((2, 8, 3), dtype, device)
        return {**inputs, "num_groups": 2, "eps": 1e-5, "activation": "silu"}
    if name == "qk_norm_rotary":
        return _qk_norm_rotary(dtype, device)
    if name.startswith("apply_rotary"):
        return _rotary(dtype, device)
    if name == "grouped_poly_norm":
        inputs = grouped_poly_norm_inputs(shape, dtype, device)
        return {**inputs, "eps": 1e-6, "hidden_clamp": 2.0}
    operators = {op.name: op for op in (*OPERATORS, ADA_LAYER_NORM, ADA_RMS_NORM)}
    op = operators.get(name.removesuffix("_"))
    if op is None:  # the activations of one tensor
        return {"x": normal(shape, dtype, device)}
    numbers = {"eps": 1e-6} if op.has_eps else {}
    options = op.defaults if op is not GATE_RESIDUAL_ADA_NORM else {"norm": "layer"}
    return op.inputs(shape, dtype, device) | options | numbers


def is_differentiable(name: str, value) -> bool:
    """Whether an argument of that name may have a gradient, in most functions."""
    others = ("cos", "sin", "token_weights")
    return isinstance(value, Tensor) and value.is_floating_point() and name not in others


def other_tensors(t: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Tensors that an op may or may not accept in place of `t`."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64):
        if dtype != t.dtype:
            yield f"of {dtype}", t.to(dtype)
    yield "missing", None
    yield "a scalar", t.flatten()[0]
    yield "with one more dimension", t[None]
    yield "with one dimension less", t[0]
    yield "with no rows", t[:0]
    yield "with one row", t[:1]
    yield "with fewer columns", t[..., :-1]
    yield "without columns", t[..., :0]
    yield "with more columns", torch.cat((t, t), dim=-1)
    yield "strided", torch.stack((t, t), dim=-1)[..., 0]


def other_values(value) -> Iterator[tuple[str, object]]:
    if isinstance(value, Tensor):
        yield from other_tensors(value)
    elif isinstance(value, str):
        yield "another word", "wrong"
    elif isinstance(value, bool):
        yield "the opposite", not value
    elif isinstance(value, (int, float)):
        numbers = (0, -1, 3, 257) if isinstance(value, int) else (0.0, -1.0, float("nan"))
        yield from ((str(number), number) for number in numbers)
        if isinstance(value, float):
            yield from (("inf", float("inf")), ("1e300", 1e300))


def variants_of(call: dict) -> Iterator[tuple[str, dict]]:
    """The call, and all that differ from it in one argument."""
    yield "as it is", call
    for name, value in call.items():
        for what, other in other_values(value):
            yield f"{name} {what}", {**call, name: other}
