"""Linear layers of a model's blocks become `modules.Fp8Linear`, and themselves again.

A module takes the place of another one here, as its parameters are others. The one that was there
is kept beside, where neither `modules()` nor the state dict sees it.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Optional

import torch
from torch import nn

from .._fp8 import MULTIPLE, dtype_of_result
from ..modules import Fp8Linear
from ..quant import GROUP
from ._patch import Report, foreign_forward, listened_to

RECIPES = {"fp8": "rowwise", "fp8_blockwise": "blockwise"}

# Names of linears whose results choose experts: a rounding may choose others.
_ROUTERS = ("gate", "router", "shared_expert_gate", "gate_logits", "router_logits")
# Classes of others whose weights are float8.
_FLOAT8_CLASSES = (
    "FP8Linear",
    "FbgemmFp8Linear",
    "Float8Linear",
    "FP8Expert",
    "Float8InferenceLinear",
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


_KEPT = "_fuselage_quantized"  # of a tensor: what it was quantised to, and when

# As `quantize_rows` has them.
_QUANTIZATION = {
    "rowwise": {},
    "blockwise": {"group_size": GROUP, "scale_layout": "col_tma"},
}


def takes_quantized(linear: nn.Module, x: torch.Tensor) -> bool:
    """Whether a linear of ours may be given what one made of `x` as `(q, scale)`."""
    if not isinstance(linear, PatchedLinear) or linear.dtype != x.dtype or listened_to(linear):
        return False
    trains_bias = linear.bias is not None and linear.bias.requires_grad
    return not (torch.is_grad_enabled() and (x.requires_grad or trains_bias))


def _may_keep(x: torch.Tensor) -> bool:
    """Whether it shows when something is written to `x`, as it does not for inference tensors, and
    for parameters by their `data`; other classes may do anything. What was made before a capture
    the graph would not make again.
    """
    if x.is_inference() or type(x) is not torch.Tensor:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _stream_of(x: torch.Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0


class PatchedLinear(Fp8Linear):
    """One that knows what it stands for, of which no submodule, parameter or state is made.

    It is copied as it is, and pickled as the other. In eager mode, linears that are called with the
    same tensor one after the other share what it is quantised to: query, key and value do.
    """

    @classmethod
    @torch.no_grad()
    def of(cls, linear: nn.Linear, recipe: str, fuses_quantization: bool) -> PatchedLinear:
        made = cls.from_linear(linear, recipe=recipe)
        vars(made)["fuselage_original"] = linear
        made.fuses_quantization = fuses_quantization
        return made

    def original(self) -> nn.Linear:
        """Where the model went meanwhile."""
        linear = vars(self)["fuselage_original"].to(self.weight.device, self.dtype)
        return linear.train(self.training)

    @property
    def quantization(self) -> dict:
        """The options of `quant_fp8` for what it takes."""
        return _QUANTIZATION[self.recipe]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not _may_keep(x):
            return super().multiply(x)
        key = (self.recipe, x._version, _stream_of(x))
        kept = getattr(x, _KEPT, None)
        if kept is not None and kept[0] == key:
            return self.multiply_quantized(*kept[1], dtype_of_result(x))
        y, quantized = self.quantize_and_multiply(x)
        setattr(x, _KEPT, (key, quantized))
        return y

    def _get_name(self) -> str:
        return Fp8Linear.__name__

    def __deepcopy__(self, memo: dict) -> PatchedLinear:
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol):
        return operator.itemgetter(0), ((self.original(),),)


def replace_linears(
    model: nn.Module,
    linear: Optional[str],
    keep: Iterable[str],
    report: Report,
    prefix: str = "",
    *,
    fuses_quantization: bool,
) -> None:
    """Replaces the linears of blocks, and says in the report which, and why others stay.

    `fuses_quantization`: the compiler quantises what they take, where it fuses that.
    """
    if linear is None:
        return
    why = why_none(model)
    if why is not None:
        report.left_alone[prefix.rstrip(".")] = why
        return
    made: dict[int, PatchedLinear] = {}
    in_float32 = _names_in_float32(model)
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    for name, parent, child_name, in_blocks in list(_linears(model)):
        child = parent._modules[child_name]
        if id(child) not in made:
            reason = None if in_blocks else "linear: it is outside of the blocks"
            reason = reason or _why_it_stays(name, child, parent, in_float32)
            if any(_is_within(prefix + name, pattern) for pattern in keep):
                reason = "linear: it is in `keep`"
            if reason is not None:
                report.left_alone.setdefault(prefix + name, reason)
                continue
            made[id(child)] = PatchedLinear.of(child, RECIPES[linear], fuses_quantization)
        parent._modules[child_name] = made[id(child)]
        report.replaced[prefix + name] = _described(made[id(child)])


def check_option(linear: Optional[str]) -> None:
    if linear is not None and linear not in RECIPES:
        raise RuntimeError(
            f"fuselage: patch: `linear` must be None or one of {', '.join(RECIPES)}, got {linear!r}"
        )


def restore_linears(model: nn.Module) -> int:
    """Puts every linear back where it was; returns how many there were."""
    count = 0
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, PatchedLinear):
                parent._modules[name] = child.original()
                count += 1
    return count


def why_none(model: nn.Module) -> Optional[str]:
    """Why no linear of the model is replaced: it is quantised already."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None:
        get = config.get if isinstance(config, dict) else lambda key: getattr(config, key, None)
        method = get("quant_method")
        return f"linears: the model is quantised already ({getattr(method, 'value', method)})"
    for module in model.modules():
        if type(module).__name__ in _FLOAT8_CLASSES:
            return f"linears: the model has {type(module).__name__} already"
    return None


def _linears(
    model: nn.Module, prefix: str = "", in_blocks: bool = False
) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """Name, parent, name in the parent, and whether it is in a list of blocks."""
    in_blocks = in_blocks or isinstance(model, nn.ModuleList)
    for name, child in model._modules.items():
        if isinstance(child, nn.Linear):
            yield prefix + name, model, name, in_blocks
        elif child is not None:
            yield from _linears(child, f"{prefix}{name}.", in_blocks)


def _why_it_stays(
    name: str, linear: nn.Linear, parent: nn.Module, in_float32: tuple[str, ...]
) -> Optional[str]:
    parts = name.split(".")
    weight = linear.weight
    if type(linear) is not nn.Linear:
        return f"linear: it is a {type(linear).__name__}"
    if parts[-1] in _ROUTERS:
        return "linear: it chooses experts"
    if any("norm" in part.lower() or "embed" in part.lower() for part in parts):
        return "linear: it belongs to a norm or an embedding"
    if any(part in in_float32 for part in parts):
        return "linear: its model keeps it in float32"
    if parts[-1] == "base_layer":
        return "linear: it belongs to an adapter"
    if type(weight.detach()) is not torch.Tensor or weight.dtype not in _DTYPES:
        return f"linear: its weight is a {type(weight.detach()).__name__} of {weight.dtype}"
    if weight.is_meta or weight.shape != (linear.out_features, linear.in_features):
        return "linear: its weight is elsewhere"
    if linear.out_features % MULTIPLE or linear.in_features % MULTIPLE:
        return f"linear: its sizes are no multiples of {MULTIPLE}"
    if listened_to(linear):
        return "linear: it has hooks"
    foreign = foreign_forward(linear)
    if foreign is not None or hasattr(linear, "_hf_hook"):
        return f"linear: its forward was replaced already, by {foreign or 'accelerate'}"
    if _reads_weight(type(parent), parts[-1]):
        return f"linear: {type(parent).__name__} reads its weight"
    return None


@cache
def _reads_weight(parent: type, name: str) -> bool:
    """Whether the class that has a linear uses more of it than its forward, as T5 does."""
    try:
        return f".{name}.weight" in inspect.getsource(parent)
    except (OSError, TypeError):
        return False


def _names_in_float32(model: nn.Module) -> tuple[str, ...]:
    lists = (
        getattr(module, attribute, None) or ()
        for module in model.modules()
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    )
    return tuple({name for names in lists for name in names})


def _is_within(name: str, pattern: str) -> bool:
    """Whether the module of that name, or one that it is within, is of the pattern."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def _described(linear: Fp8Linear) -> str:
    what = f"Fp8Linear ({linear.recipe})"
    return what if linear.emulated_because is None else f"{what}: emulated"
