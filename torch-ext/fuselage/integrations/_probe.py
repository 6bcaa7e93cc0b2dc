"""Finds out what a module computes, by running it on small random inputs.

A stand-in has the class and the plain attributes of the module, but small random parameters on the
CPU. So the model's own parameters may be anywhere (on a GPU, offloaded, on the meta device), and
neither they nor PyTorch's random numbers are touched.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Callable, Optional

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of activations and of weights that models combine.
PAIRS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
)
HOOKS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_apply_gate")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers that are the same in every call, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        return torch.randn(*shape, generator=generator).to(dtype)


def stand_in(
    module: torch.nn.Module,
    parameters: Optional[dict] = None,
    modules: Optional[dict] = None,
    training: bool = False,
) -> torch.nn.Module:
    """A module of the same class and attributes, with these parameters and submodules instead."""
    copy = type(module).__new__(type(module))
    vars(copy).update({k: v for k, v in vars(module).items() if k not in HOOKS})
    vars(copy)["_parameters"] = dict(parameters or {})
    vars(copy)["_buffers"] = {}
    vars(copy)["_modules"] = dict(modules or {})
    vars(copy)["training"] = training
    return copy


def stand_ins(
    module: torch.nn.Module,
    parameters: Optional[dict] = None,
    modules: Optional[dict] = None,
) -> list[torch.nn.Module]:
    """`stand_in` for inference and for training, where a forward may drop something out."""
    return [stand_in(module, parameters, modules, training) for training in (False, True)]


def call(function: Callable, *args):
    """The result, or the exception: a probe must never end a patch."""
    try:
        with torch.no_grad(), torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.random.fork_rng(devices=[]):  # dropout takes random numbers
                return function(*args)
    except Exception as error:  # whatever a model's code may raise
        return error


def autocasts(x: torch.Tensor) -> bool:
    """Whether the operations on `x` run under autocast, which the meta device does not have."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def left_to_the_compiler() -> bool:
    """Whether `torch.compile` traces inference.

    It then fuses norms, gates and rotary embeddings with what is around them, such as the addition
    of the layer before or the store to a cache, which operators of ours would not let it.
    """
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def taken(x: torch.Tensor) -> bool:
    """Whether an operator of ours takes `x` here; the module's own forward runs on others."""
    return x.dtype in DTYPES and not left_to_the_compiler()


def takes_one_tensor(function: Callable) -> bool:
    """Whether it can be called with the module and one tensor, and with nothing else."""
    try:
        names = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(names) == 2 and names[1].kind is names[1].POSITIONAL_OR_KEYWORD


def agree(actual: object, expected: object) -> bool:
    """Whether two results come from the same formula with the same roundings.

    In half precision a formula that rounds elsewhere differs in a fifth of the elements or more,
    and the same one in a few of a thousand, where float32 noise meets a tie.
    """
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return False
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return call(_close, actual, expected) is True  # fake tensors have no values, and raise


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    actual, expected, dtype = actual.double(), expected.double(), expected.dtype
    if not torch.equal(actual.isfinite(), expected.isfinite()):
        return False
    actual, expected = actual.nan_to_num(), expected.nan_to_num()
    if dtype == torch.float32:
        bound = 1e-5 * expected.abs() + 1e-6
    else:
        bound = 2.5 * torch.finfo(dtype).eps * expected.abs() + 1e-6
        if (actual != expected).double().mean() > 0.03:
            return False
    return bool(((actual - expected).abs() <= bound).all())


def agree_all(actual: object, expected: object) -> bool:
    """`agree` for results that are tuples of tensors."""
    if isinstance(expected, (tuple, list)):
        same_length = isinstance(actual, (tuple, list)) and len(actual) == len(expected)
        return same_length and all(map(agree_all, actual, expected))
    if expected is None or isinstance(expected, str):
        return actual == expected
    return agree(actual, expected)


class Stub(torch.nn.Module):
    """Stands for a submodule: `function` of what it is called with."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def disguised(child: torch.nn.Module, function: Callable) -> torch.nn.Module:
    """A stub that passes for `child` where a forward asks for its class or its attributes."""

    def forward(self, *args, **kwargs):
        return function(*args, **kwargs)

    kind = type(child)
    stub = type(kind.__name__, (kind,), {"forward": forward, "__call__": forward})
    copy = stub.__new__(stub)
    vars(copy).update({k: v for k, v in vars(child).items() if k not in HOOKS})
    return copy
