"""Calls that must be refused: one argument of a valid call is changed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import quantising
import torch
from torch import Tensor

from .draw import Draw
from .judge import Failure

REFUSED = (RuntimeError,)  # a value, shape, dtype or device that is not taken

# What a number must not be. What is not here is not refused: an infinite limit, say.
NAN, INF = float("nan"), float("inf")
NUMBERS = {
    "eps": (NAN, INF, -1e-6),
    "weight_offset": (NAN,),
    "alpha": (NAN,),
    "limit": (NAN, -1.0),
    "hidden_clamp": (NAN, -1.0),
    "heads_dim": (0, 3, -1),
    "rotary_dim": (-2, 3, 10**6),
    "num_samples": (0, 257, -1),
    "vocab_offset": (-1, 2**34 + 1),
    "temperature": (-1.0, NAN, INF),
    "top_p": (1.5, NAN, -0.1),
    "min_p": (-0.1, 1.5, NAN),
    "logit_softcap": (0.0, -1.0, NAN),
    "label_smoothing": (-0.1, 1.5, NAN),
    "lse_square_scale": (NAN, INF),
    "max_workspace": (0, -1),
    "group_size": (0, -2),
    "num_groups": (0, -1),
    "topk_groups": (0, -1),
}
# The size of the dimension that these have one element for each of, or one for all.
PER_ROW = ("temperature", "top_k", "top_p", "min_p", "seed", "offset", "weight_scale")
# What says nothing of the main argument's columns: a head may have more than its tables rotate, and
# a word of a mask has bits to spare.
NOT_OF_COLUMNS = (
    *(*PER_ROW, "cos", "sin", "position_ids", "bitmask"),
    *("targets", "token_weights"),
)
# Of which Python takes the truth, with no op to refuse what is no bool.
TRUTHS = {
    "combine_shard_samples": ("return_logprobs",),
    "cross_entropy": ("inplace_backward",),
    "log_probs": ("return_log_sum_exp", "return_is_greatest"),
    "quant_fp8": ("ste",),
    "linear_log_probs": ("return_log_sum_exp", "return_is_greatest"),
}


@dataclass
class Bad:
    """The argument that is changed, its value, and what has to be raised."""

    argument: str
    value: object
    what: str
    expected: tuple[type[Exception], ...] = REFUSED
    named: tuple[str, ...] | None = None  # the arguments of which one must be in the message

    def names(self) -> tuple[str, ...]:
        return (self.argument,) if self.named is None else self.named


def check(draw: Draw, name: str, function: Callable, given: dict) -> None:
    """`function` refuses the changed arguments, says why, and has written nothing."""
    for buffer in draw.buffers:
        buffer.written = False
    changes = list(mutations(draw, name, function, given))
    bad = draw.choice(changes)
    arguments = {**given, bad.argument: bad.value}
    main = next(iter(given))
    tensor = arguments[main]
    has_gradients = not name.endswith("_") and name not in quantising.BY_NAME
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and has_gradients:
        arguments[main] = tensor.detach().requires_grad_(draw.chance(0.5))
    try:
        function(**arguments)
    except Exception as error:
        _check_error(name, bad, error)
    else:
        raise Failure("a bad call was accepted", f"`{bad.argument}`: {bad.what}")


def _check_error(name: str, bad: Bad, error: Exception) -> None:
    message = str(error).splitlines()[0] if str(error) else ""
    got = f"`{bad.argument}`: {bad.what} raised {type(error).__name__}: {message[:160]}"
    if not isinstance(error, bad.expected):
        raise Failure("a wrong exception", f"{got}; not {bad.expected[0].__name__}") from error
    names = bad.names()
    named = not names or any(f"`{argument}`" in str(error) for argument in names)
    if name not in str(error) or not named:
        raise Failure("a wrong exception", f"{got}; it does not name operator and argument")


def mutations(draw: Draw, name: str, function: Callable, given: dict) -> Iterator[Bad]:
    if name == "wan_rotary_tables":
        yield Bad("dim", 15, "15")
        return  # the rest is for PyTorch's own functions to refuse
    parameters = inspect.signature(function).parameters
    tensors = [n for n, value in given.items() if isinstance(value, Tensor)]
    for argument, parameter in parameters.items():
        if argument in TRUTHS.get(name, ()):
            continue
        yield from wrong_kinds(argument, str(parameter.annotation))
        yield from wrong_numbers(argument, str(parameter.annotation), given)
    for argument in tensors:
        is_main = argument == tensors[0]
        yield from wrong_dtypes(argument, given)
        yield from wrong_shapes(argument, given, is_main and name, tensors)
        if not is_main:
            meta = torch.empty_like(given[argument], device="meta")
            yield Bad(argument, meta, "a meta tensor among others")
    if name.endswith("_"):
        yield from wrong_in_place(tensors[0], given, tensors)
    if draw.device == "cpu" and "position_ids" in tensors and given["position_ids"].numel():
        outside = given["position_ids"].clone(memory_format=torch.contiguous_format)
        outside.view(-1)[-1] = len(given["cos"])
        yield Bad("position_ids", outside, "a position past the end of the table")
    if draw.device == "cpu" and "targets" in tensors and given["targets"].numel():
        outside = given["targets"].clone(memory_format=torch.contiguous_format)
        outside.view(-1)[-1] = (
            given["logits"].shape[-1] if "logits" in given else len(given["weight"])
        )
        yield Bad("targets", outside, "a target past the end of the vocabulary")


# Kinds. The annotations say which are right.


def wrong_kinds(argument: str, annotation: str) -> Iterator[Bad]:
    # A shard's offset is documented as the head's, which may be None.
    optional = "Optional" in annotation or "None" in annotation or argument == "offset"
    number = any(word in annotation for word in ("int", "float", "Number"))
    tensor = "Tensor" in annotation or "Number" in annotation
    if not (number or tensor or annotation in ("bool", "str") or "dtype" in annotation):
        if argument == "shards":
            yield Bad(argument, [], "an empty list")
            yield Bad(argument, None, "None", (TypeError,))
        return
    values: list = [["a list"]] if annotation != "str" else [3]
    if annotation != "str":
        values.append("text")
    if not optional and annotation != "bool":
        values.append(None)
    if tensor and not number:
        values += [1.5, 1j]
    if number:
        values.append(1j)
        if "float" not in annotation and "Number" not in annotation:
            values.append(1.5)
    for value in values:
        yield Bad(argument, value, repr(value), (TypeError,))


def wrong_numbers(argument: str, annotation: str, given: dict) -> Iterator[Bad]:
    if annotation == "str":
        yield Bad(argument, "nonsense", "'nonsense'")
    if argument == "seed":
        yield Bad(argument, 2**63, "2**63", (TypeError,))
    if argument == "offset" and "cos" in given and given.get("position_ids") is None:
        for value in (-1, 10**6):
            yield Bad(argument, value, str(value), named=("offset", "cos"))
    if argument == "k" and annotation == "int":  # and no tensor of keys
        for value in (0, -1, 65):
            yield Bad(argument, value, str(value))
    if argument == "out_dtype":
        for dtype in (torch.float64, torch.int32, torch.bool):
            yield Bad(argument, dtype, str(dtype))
    for value in NUMBERS.get(argument, ()):
        named = ("rotary_dim", "cos") if argument == "rotary_dim" else None
        yield Bad(argument, value, repr(value), named=named)


# Tensors


def wrong_dtypes(argument: str, given: dict) -> Iterator[Bad]:
    value = given[argument]
    wrong = [torch.float64, torch.int64, torch.bool]
    if not value.is_floating_point():
        wrong = [torch.float32, torch.int16]
    for dtype in wrong:
        yield Bad(argument, value.to(dtype), f"{dtype}")


def wrong_shapes(argument: str, given: dict, main_of: str | bool, tensors: list) -> Iterator[Bad]:
    value = given[argument]
    if main_of:
        yield Bad(argument, value.reshape(-1)[:1].squeeze(0), "a scalar")
        if main_of in ("poly_norm", "quant_fp8"):
            return  # whose other tensors know nothing of the shape
    if argument in PER_ROW and value.dim() == 1:
        rows = given[tensors[1 if argument == "weight_scale" else 0]].shape[0] + 2
        wrong = value.flatten()[:1].expand(rows).clone()
    elif main_of == "group_norm":  # whose positions may be any, and whose channels may not
        wrong = torch.cat((value, value[:, :1]), 1)
        tensors = [*tensors, "num_groups"]
    else:
        wrong = torch.cat((value, value[..., :1]), -1)
    others = set(tensors[1:]) - {*NOT_OF_COLUMNS, "num_groups"}
    if main_of in quantising.BY_NAME:
        others.discard(quantising.BY_NAME[main_of].scale)  # one number
    if main_of and not others and "_and_" not in main_of:
        return  # any shape will do
    yield Bad(argument, wrong, f"of shape {list(wrong.shape)}", named=tuple(tensors))


def wrong_in_place(main: str, given: dict, tensors: list) -> Iterator[Bad]:
    """Inputs that are written to and overlap themselves or others, or require a gradient."""
    x = given[main]
    grad = x.detach().clone().requires_grad_()
    yield Bad(main, grad, "a tensor that requires a gradient", named=())
    same = [n for n in tensors if n != main and given[n].dtype == x.dtype]
    if x.dim() > 1 and x.shape[0] > 1:
        expanded = x[:1].expand(x.shape)
        yield Bad(main, expanded, "rows that are one row", named=tuple(tensors))
    for other in same:
        value = given[other]
        if value.shape == x.shape:
            if other != "y":  # which may be x, element for element
                yield Bad(other, x, f"`{main}` itself", named=tuple(tensors))
        elif value.numel() and value.numel() <= math.prod(x.shape) and x.is_contiguous():
            inside = x.view(-1)[: value.numel()].view(value.shape)
            yield Bad(other, inside, f"a part of `{main}`", named=tuple(tensors))
