"""Recognises activations, and the gated MLPs that are made with them."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Callable, Optional

import torch
from torch.overrides import TorchFunctionMode

from ..fused_quant import silu_and_mul_quant, swiglu_quant
from ..gate import (
    geglu,
    gelu,
    gelu_and_mul,
    gelu_quick,
    gelu_tanh,
    gelu_tanh_and_mul,
    mul_and_gelu,
    mul_and_silu,
    relu2,
    silu,
    silu_and_mul,
    swiglu,
    swiglu_clamped,
)
from . import _probe
from ._linears import takes_quantized
from ._patch import Found, Match, listened_to, marked, replacement_of
from ._products import has_epilogue, linear_gelu_tanh

# What the report is about. What is replaced is for the probes to decide.
_NAME = re.compile(r"silu|swish|gelu|relu2|relusquared", re.IGNORECASE)
_ACTIVATIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "relu2": relu2,
}
_TWO_INPUTS = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up: geglu(gate, up, "gelu_tanh"),
}
_GATE_FIRST = {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


def activation_of(function: Callable) -> Optional[str]:
    """Which of our activations a function or a module computes, tried from -40 to 40."""
    modes = [function]
    if isinstance(function, torch.nn.Module):
        modes = _probe.quiet_ones(function)
    x, answers = _activation_answers()
    results = [_probe.call(mode, x.clone()) for mode in modes]
    for name, ours in answers.items():
        if all(_probe.agree(ours, result) for result in results):
            x = _probe.random(512)
            same = partial(_probe.same_slopes, partial(_ACTIVATIONS[name], x), leaves=[x])
            return name if all(same(partial(mode, x)) for mode in modes) else None
    return None


@cache
def _activation_answers() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    line = torch.linspace(-40, 40, 1601, device="cpu", dtype=torch.float32)
    x = torch.cat([_probe.random(512), line])
    return x, {name: ours(x) for name, ours in _ACTIVATIONS.items()}


def recognise_activation(module: torch.nn.Module) -> Found:
    """Activations that PyTorch computes in several kernels."""
    kind = type(module)
    if any(module.children()) or any(True for _ in (*module.parameters(), *module.buffers())):
        return None
    if not _probe.takes_tensors(kind.forward):
        return None
    looks = _NAME.search(kind.__name__)
    if getattr(module, "inplace", False):
        return "it works in place" if looks else None
    name = activation_of(module)
    if name is None:
        why = "it computes something else than the activations that fuselage has"
        return why if looks else None
    if _is_one_kernel(module):
        return "PyTorch computes it in one kernel, which is as fast"
    return Match(name, _activation_forward(name))


def _is_one_kernel(module: torch.nn.Module) -> bool:
    """Whether the module calls one function of PyTorch and computes nothing around it."""

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    count, plain = Count(), _probe.stand_in(module)

    def counted(x: torch.Tensor) -> torch.Tensor:
        with count:
            return type(module).forward(plain, x)

    _probe.call(counted, _probe.random(8))
    return count.calls <= 1


# Classes that are a tanh-GELU in one kernel, and nothing else.
_GELU_CLASSES: set[type] = set()


def is_gelu_tanh(module: torch.nn.Module) -> bool:
    """Whether it is that activation, in one kernel or ours."""
    if "gelu" not in type(module).__name__.lower() or any(module.children()):
        return False
    if replacement_of(module) is not None:
        return replacement_of(module) == "gelu_tanh"
    if not _probe.takes_tensors(type(module).forward) or activation_of(module) != "gelu_tanh":
        return False
    if type(module) is not torch.nn.GELU:
        _GELU_CLASSES.add(type(module))
    return True


def is_still_gelu_tanh(module: torch.nn.Module) -> bool:
    """Whether what was that activation is it now, and nobody listens to it."""
    if listened_to(module):
        return False
    if "forward" in vars(module):
        return replacement_of(module) == "gelu_tanh"
    if type(module) is torch.nn.GELU:
        return module.approximate == "tanh"
    return type(module) in _GELU_CLASSES


@cache
def _activation_forward(name: str) -> Callable:
    activation = _ACTIVATIONS[name]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Autocast runs the powers in some of them in float32 on a GPU.
        if not _probe.taken(input) or _probe.autocasts(input):
            return type(self).forward(self, input)
        return activation(input)

    return marked(name, forward)


# MLPs: the projections are replaced by small ones, which must be all that the forward depends on.


class _Projection(torch.nn.Module):
    """A linear map that tells from its result what was multiplied with what."""

    def __init__(self, rows: int, columns: int, seed: int):
        super().__init__()
        self.matrix = _probe.random(rows, columns, seed=seed) / rows**0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


def _child_activation(module: torch.nn.Module, names: tuple[str, ...]) -> tuple[str, object]:
    """The activation of an MLP, a submodule or a function, and its name."""
    for name in names:
        function = getattr(module, name, None)
        if callable(function):
            return name, function
    return "", None


def _same_as(module, function, children: dict, parameters: Optional[dict] = None) -> bool:
    for plain in _probe.stand_ins(module, parameters, children):
        for scale in _SCALES:
            x = _probe.random(32, 8) * scale
            expected = _probe.call(type(module).forward, plain, x.clone())
            actual = _probe.call(function, plain, x.clone())
            if not _probe.agree(*_in_proportion(actual, expected)):
                return False
        x, own = _probe.random(32, 8), type(module).forward
        if not _probe.same_slopes(partial(function, plain, x), partial(own, plain, x), [x]):
            return False
    return True


# Models clamp what they multiply, to 16 and less. The larger inputs go far beyond that.
_SCALES = (3, 9, 300)


def _in_proportion(actual: object, expected: object) -> tuple[object, object]:
    """Over the largest value: float32 noise of large terms remains where they cancel."""
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return actual, expected
    largest = _probe.call(lambda: expected.abs().max().clamp_min(1))
    return actual / largest, expected / largest


def recognise_gated_mlp(module: torch.nn.Module) -> Found:
    """`down_proj(act(gate_proj(x)) * up_proj(x))`, apart or as one `gate_up_proj`."""
    children = dict(module.named_children())
    apart = {"gate_proj", "up_proj", "down_proj"} <= children.keys()
    packed = {"gate_up_proj", "down_proj"} <= children.keys()
    if not (apart or packed):
        return None
    act_name, act = _child_activation(module, ("act_fn", "activation_fn", "act", "activation"))
    if act is None:
        return "it has no activation of a known name"
    if not _probe.takes_tensors(type(module).forward):
        return "its forward takes more than one tensor"
    activation = activation_of(act)
    if activation not in _TWO_INPUTS:
        return "its activation is none that fuselage has a gated form of"
    if apart:
        stand_ins = {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}
        function = _apart_forward(activation)
    else:
        stand_ins = {"gate_up_proj": (8, 24), "down_proj": (12, 8)}
        function = _packed_forward(activation)
    others = {k: v for k, v in children.items() if k not in stand_ins}
    if set(others) - {act_name}:
        return f"it has more submodules: {', '.join(sorted(set(others) - {act_name}))}"
    stand_ins = {k: _Projection(*v, seed=i) for i, (k, v) in enumerate(stand_ins.items(), 3)}
    if not _same_as(module, function, stand_ins | others):
        return "it computes something else than down_proj(act(gate) * up)"
    covers = (act_name,) if isinstance(act, torch.nn.Module) else ()
    return Match(function.fuselage_replacement, function, covers=covers)


# Gates that hand their result to a float8 linear quantised. The compiler cannot, so that these are
# called under torch.compile, too.
_QUANTIZING = {"silu": (swiglu_quant, silu_and_mul_quant)}


@cache
def _apart_forward(activation: str) -> Callable:
    gated = _TWO_INPUTS[activation]
    quantizing, _ = _QUANTIZING.get(activation, (None, None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hands_over = quantizing is not None and takes_quantized(self.down_proj, x)
        if _probe.left_to_the_compiler() and not hands_over:
            return type(self).forward(self, x)
        gate = self.gate_proj(x)
        if gate.dtype not in _probe.DTYPES:
            return type(self).forward(self, x)
        up = self.up_proj(x)
        if hands_over and gate.dtype == up.dtype and takes_quantized(self.down_proj, gate):
            return self.down_proj(quantizing(gate, up, **self.down_proj.quantization))
        return self.down_proj(gated(gate, up))

    what = "swiglu" if activation == "silu" else f"geglu ({activation})"
    return marked(what, forward)


@cache
def _packed_forward(activation: str) -> Callable:
    gated = _GATE_FIRST[activation]
    _, quantizing = _QUANTIZING.get(activation, (None, None))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hands_over = quantizing is not None and takes_quantized(self.down_proj, hidden_states)
        if _probe.left_to_the_compiler() and not hands_over:
            return type(self).forward(self, hidden_states)
        packed = self.gate_up_proj(hidden_states)
        if packed.dtype not in _probe.DTYPES:
            return type(self).forward(self, hidden_states)
        if hands_over and takes_quantized(self.down_proj, packed):
            return self.down_proj(quantizing(packed, **self.down_proj.quantization))
        return self.down_proj(gated(packed))

    return marked(f"{activation}_and_mul", forward)


def recognise_experts_gate(module: torch.nn.Module) -> Found:
    """The `_apply_gate` of a mixture of experts: gpt-oss's clamped one, or halves."""
    method = getattr(type(module), "_apply_gate", None)
    if method is None or not _probe.takes_tensors(method):
        return None
    plain_ones = _probe.stand_ins(module, None, vars(module)["_modules"])
    x = torch.cat([_probe.random(64, 16) * 2 * scale for scale in _SCALES])
    expected = [_probe.call(method, plain, x.clone()) for plain in plain_ones]
    if isinstance(expected[0], Exception):
        return _probe.cannot(expected[0])
    act = getattr(module, "act_fn", None)
    activation = activation_of(act) if callable(act) else None
    for function in filter(None, (_clamped_gate, _experts_gate(activation))):
        actual = [_probe.call(function, plain, x.clone()) for plain in plain_ones]
        if _probe.agree_all(actual, expected):
            heard = ("act_fn",) if "act_fn" in vars(module)["_modules"] else ()
            heard = () if function is _clamped_gate else heard
            what = function.fuselage_replacement
            return Match(what, function, attribute="_apply_gate", covers=heard)
    return "its gate is none that fuselage has"


def _clamped_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
    if not _probe.taken(gate_up):
        return type(self)._apply_gate(self, gate_up)
    return swiglu_clamped(gate_up, self.alpha, self.limit)


marked("swiglu_clamped", _clamped_gate, "_apply_gate")


@cache
def _experts_gate(activation: Optional[str]) -> Optional[Callable]:
    gated = _GATE_FIRST.get(activation)
    if gated is None:
        return None

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not _probe.taken(gate_up):
            return type(self)._apply_gate(self, gate_up)
        return gated(gate_up)

    return marked(f"{activation}_and_mul", _apply_gate, "_apply_gate")


# The feed-forwards of diffusers: a projection, and an activation on it.


def recognise_projected_gate(module: torch.nn.Module) -> Found:
    """`value * act(gate)` of one projection `proj`, value first: GEGLU and SwiGLU of diffusers."""
    children = dict(module.named_children())
    others = {name: child for name, child in children.items() if name != "proj"}
    if "proj" not in children or any(True for _ in module.named_parameters(recurse=False)):
        return None
    if any(True for child in others.values() for _ in (*child.parameters(), *child.children())):
        return None
    if not re.search(r"glu|gelu", type(module).__name__, re.IGNORECASE):
        return None
    for activation, gated in (("silu", mul_and_silu), ("gelu", mul_and_gelu)):
        function = _projected_forward(f"mul_and_{activation}", gated)
        if _same_as(module, function, {"proj": _Projection(8, 24, 3), **others}):
            return Match(function.fuselage_replacement, function, covers=tuple(others))
    for activation, ours in _ACTIVATIONS.items():
        function = _projected_forward(activation, ours)
        if _same_as(module, function, {"proj": _Projection(8, 24, 3), **others}):
            if activation == "gelu":
                return "PyTorch computes it in one kernel, which is as fast"
            return Match(function.fuselage_replacement, function, covers=tuple(others))
    return "it computes something else than an activation of its projection"


@cache
def _projected_forward(what: str, function: Callable) -> Callable:
    in_product = what == "gelu_tanh"

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if in_product and has_epilogue(self.proj, hidden_states):
            return linear_gelu_tanh(self.proj, hidden_states)
        if _probe.left_to_the_compiler():
            return type(self).forward(self, hidden_states)
        projected = self.proj(hidden_states)
        if projected.dtype not in _probe.DTYPES:
            return type(self).forward(self, hidden_states)
        return function(projected)

    return marked(what, forward)
