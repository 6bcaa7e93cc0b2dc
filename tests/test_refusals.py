"""What the operators refuse: the same on fake and meta tensors, and with the right error."""

from __future__ import annotations

import inspect
import math
import re
import typing

import calls
import pytest
import torch
from harness import as_tuple
from torch import Tensor
from torch._subclasses import FakeTensorMode

FUNCTIONS = (
    "ada_layer_norm",
    "ada_layer_norm_quant",
    "ada_rms_norm",
    "add_mul_act",
    "add_mul_act_",
    "apply_rotary",
    "apply_rotary_",
    "bias_act",
    "bias_act_",
    "cross_entropy",
    "fused_add_layer_norm",
    "fused_add_layer_norm_",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "fused_add_rms_norm_quant",
    "fused_mul_poly_norm",
    "gate_residual_ada_norm",
    "gated_rms_norm",
    "geglu",
    "gelu",
    "gelu_and_mul",
    "gelu_quick",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gelu_tanh_quant",
    "group_norm",
    "grouped_poly_norm",
    "gumbel_sample",
    "layer_norm",
    "layer_norm_quant",
    "linear_cross_entropy",
    "linear_log_probs",
    "lm_head_sample",
    "lm_head_sample_shard",
    "log_probs",
    "mul_and_gelu",
    "mul_and_gelu_tanh",
    "mul_and_relu",
    "mul_and_silu",
    "poly_norm",
    "qk_norm_rotary",
    "quant_fp8",
    "relu2",
    "relu_and_mul",
    "rms_norm",
    "rms_norm_add_rms_norm",
    "rms_norm_quant",
    "silu",
    "silu_and_mul",
    "silu_and_mul_quant",
    "swiglu",
    "swiglu_clamped",
    "swiglu_quant",
    "topk_softmax",
)
# Pure PyTorch, whose functions have checks of their own.
WITHOUT_OPS = (
    *("combine_shard_log_probs", "combine_shard_samples", "linear_log_probs_shard"),
    *("ltx_video_rotary_tables", "wan_rotary_tables"),
)

# Tensors that are refused where they require a gradient.
WITHOUT_GRADIENTS = ("cos", "sin", "token_weights")

SAMPLERS = ("gumbel_sample", "lm_head_sample", "lm_head_sample_shard")

each_function = pytest.mark.parametrize("name", FUNCTIONS)
with_gradients = pytest.mark.parametrize("requires_grad", [False, True], ids=["", "gradients"])


def test_every_function_is_here(fuselage):
    public = {n for n in fuselage.__all__ if inspect.isfunction(getattr(fuselage, n))}
    assert public == {*FUNCTIONS, *WITHOUT_OPS}


def as_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def outcome(function, call: dict, requires_grad: bool):
    """The error, or what is known of the results without their values."""
    call = {
        name: value.detach().requires_grad_(requires_grad and value.is_floating_point())
        if isinstance(value, Tensor) and name not in WITHOUT_GRADIENTS
        else value
        for name, value in call.items()
    }
    try:
        results = function(**call)
    except (RuntimeError, TypeError) as error:
        return type(error), re.sub(
            r"\((cpu|meta)\), got (cpu|meta)", "(device), got another", str(error)
        )
    given = (t for t in as_tuple(results) if t is not None)
    return [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in given]


@each_function
@with_gradients
def test_fake_and_meta_tensors_are_refused_as_real_ones(fuselage, name, requires_grad):
    function = getattr(fuselage, name)
    refused = 0
    for what, call in calls.variants_of(calls.call_of(name, torch.bfloat16, "cpu")):
        real = outcome(function, call, requires_grad)
        refused += isinstance(real, tuple)
        if what == "as it is" and name not in calls.WITHOUT_GRADIENT:
            assert isinstance(real, list), real
        meta = {n: as_meta(v) if isinstance(v, Tensor) else v for n, v in call.items()}
        assert outcome(function, meta, requires_grad) == real, f"meta, {what}"
        with FakeTensorMode() as mode:
            fake = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in call.items()}
            assert outcome(function, fake, requires_grad) == real, f"fake, {what}"
    assert refused > 2


@each_function
def test_a_tensor_of_another_device_is_refused_by_fakes(fuselage, name):
    """`cuda` where this machine has none: a fake tensor of it needs no GPU."""
    function = getattr(fuselage, name)
    call = calls.call_of(name, torch.float32, "cpu")
    tensors = [n for n, value in call.items() if isinstance(value, Tensor)]
    for other in tensors[1:]:
        with FakeTensorMode() as mode:
            fake = {n: mode.from_tensor(v) if n in tensors else v for n, v in call.items()}
            fake[other] = torch.empty(call[other].shape, dtype=call[other].dtype, device="meta")
            words = rf"fuselage::{name}: `{other}` must be on the device of `\w+` \(cpu\), got meta"
            with pytest.raises(RuntimeError, match=words):
                function(**fake)


# Options of sampling that Python looks at before the op does: tests/sample has them.
PYTHON_CHECKS = ("seed", "offset", "top_k", "generator")
WRONG = (None, "text", [1.0], 3.5, 1j, 2**63, object())


def fits(value, hint) -> bool:
    kinds = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,)
    if bool in kinds:  # an op takes the truth of what is no tensor
        return True
    if isinstance(value, int):
        return float in kinds or (int in kinds and value < 2**63)
    return isinstance(value, kinds)


@each_function
@with_gradients
def test_arguments_of_the_wrong_kind(fuselage, device, name, requires_grad):
    function = getattr(fuselage, name)
    hints = typing.get_type_hints(function)
    call = calls.call_of(name, torch.float32, device)
    first = next(iter(call))
    if requires_grad and name not in calls.WITHOUT_GRADIENT:
        call[first].requires_grad_()
    for parameter in inspect.signature(function).parameters:
        if parameter in PYTHON_CHECKS and name in SAMPLERS:
            continue
        for wrong in WRONG:
            if not fits(wrong, hints[parameter]):
                words = rf"^fuselage::{name}: `{parameter}` must be a.*, got .*"
                with pytest.raises(TypeError, match=words):
                    function(**{**call, parameter: wrong})


@each_function
def test_arguments_of_the_wrong_kind_in_compiled_code(fuselage, device, name):
    """Dynamo leaves out what it cannot trace, and runs other code in place of the function's.

    Where nothing looks at the tensors before the op does, as in sampling, it reports the op's error
    as one of its own, and names its operator.
    """
    torch._dynamo.reset()
    call = calls.call_of(name, torch.float32, device)
    function = torch.compile(getattr(fuselage, name), backend="eager")
    first = next(iter(call))
    words = rf"^fuselage::{name}: `{first}` must be a.*, got list$"
    if name in SAMPLERS:
        words = rf"call_function \w+\.{name}\.default"
    with pytest.raises((TypeError, torch._dynamo.exc.TorchRuntimeError), match=words):
        function(**{**call, first: [1.0]})


@each_function
@with_gradients
def test_a_word_that_is_no_option(fuselage, device, name, requires_grad):
    function = getattr(fuselage, name)
    hints = typing.get_type_hints(function)
    call = calls.call_of(name, torch.float32, device)
    if requires_grad and name not in calls.WITHOUT_GRADIENT:
        call[next(iter(call))].requires_grad_()
    for option in (parameter for parameter, hint in hints.items() if hint is str):
        words = rf"^fuselage::{name}: `{option}` must be one of .*, got 'wrong'$"
        with pytest.raises(RuntimeError, match=words):
            function(**{**call, option: "wrong"})


RMS_NORMS = (
    *("rms_norm", "fused_add_rms_norm", "fused_add_rms_norm_", "rms_norm_add_rms_norm"),
    "qk_norm_rotary",
)
LAYER_NORMS = (
    *("layer_norm", "fused_add_layer_norm", "fused_add_layer_norm_"),
    *("ada_layer_norm", "ada_rms_norm", "gate_residual_ada_norm"),
)
POLY_NORMS = ("poly_norm", "fused_mul_poly_norm", "grouped_poly_norm")
NOT_AN_EPS = (math.nan, math.inf, -math.inf, -1e-6, 1e300)


@pytest.mark.parametrize(
    ("name", "argument", "values"),
    [
        *(
            (name, "eps", NOT_AN_EPS)
            for name in ("gated_rms_norm", *RMS_NORMS, *LAYER_NORMS, *POLY_NORMS)
        ),
        ("rms_norm_add_rms_norm", "pre_eps", NOT_AN_EPS),
        *((name, "weight_offset", (math.nan,)) for name in RMS_NORMS),
        *(
            (name, "alpha", (math.nan,))
            for name in ("swiglu_clamped", "add_mul_act", "add_mul_act_")
        ),
        ("swiglu_clamped", "limit", (math.nan, -1.0)),
        ("grouped_poly_norm", "hidden_clamp", (math.nan, -1.0)),
        *(
            (name, *numbers)
            for name in ("cross_entropy", "linear_cross_entropy")
            for numbers in (
                ("label_smoothing", (math.nan, -0.1, 1.1)),
                ("lse_square_scale", (math.nan, math.inf, 1e300)),
            )
        ),
    ],
)
@with_gradients
def test_numbers_out_of_range(fuselage, device, name, argument, values, requires_grad):
    function = getattr(fuselage, name)
    call = calls.call_of(name, torch.float32, device)
    if requires_grad and name not in calls.WITHOUT_GRADIENT:
        call[next(iter(call))].requires_grad_()
    function(**{**call, argument: 0.0})
    for value in values:
        with pytest.raises(RuntimeError, match=rf"^fuselage::{name}: `{argument}` must .*, got "):
            function(**{**call, argument: value})


def test_tables_without_columns(fuselage, device):
    for name in ("apply_rotary", "apply_rotary_", "qk_norm_rotary"):
        call = calls.call_of(name, torch.float32, device)
        for table in ("cos", "sin"):
            call[table] = call[table][:, :0]
        for options in ({}, {"rotary_dim": 0}):
            with pytest.raises(RuntimeError, match=rf"^fuselage::{name}: `cos` must have columns"):
                getattr(fuselage, name)(**call, **options)


def test_a_bias_where_the_norm_has_none(fuselage, device):
    call = calls.call_of("gate_residual_ada_norm", torch.float32, device)
    with pytest.raises(RuntimeError, match="gate_residual_ada_norm: `bias` must be None"):
        fuselage.gate_residual_ada_norm(**{**call, "norm": "rms"})
