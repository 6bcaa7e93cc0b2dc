"""Finds out what a module computes, by running it on small random inputs.

A stand-in has the class and the plain attributes of the module, but small random parameters on the
CPU, and it fires no hooks. So the model's own parameters may be anywhere (on a GPU, offloaded,
sharded, on the meta device), and neither they nor any random numbers are touched.
"""

from __future__ import annotations

import inspect
import random as python_random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Callable, Optional

import torch
from torch.autograd import forward_ad

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)
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
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)


@contextmanager
def isolated() -> Iterator[None]:
    """What surrounds `patch` must not decide: autocast would run the modules' own forwards."""
    numpy = sys.modules.get("numpy")
    states = (python_random.getstate(), numpy and numpy.random.get_state())
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),  # dropout takes random numbers
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        python_random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


class _Direct(partial):
    """What `Module.__call__` calls in place of hooks and forward, as a compiled one."""


def stand_in(
    module: torch.nn.Module,
    parameters: Optional[dict] = None,
    modules: Optional[dict] = None,
    training: bool = False,
) -> torch.nn.Module:
    """A module of the same class and attributes, with these parameters and submodules instead."""
    modules = {k: _quiet(child, training) for k, child in (modules or {}).items()}
    copy = _bare(module)
    vars(copy).update(_parameters=dict(parameters or {}), _buffers={}, _modules=modules)
    vars(copy).update(training=training, _compiled_call_impl=_Direct(type(copy).forward, copy))
    return copy


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    """Of the same class and attributes. FSDP2's classes override `__new__`, to build others."""
    copy = object.__new__(type(module))
    for name, value in vars(module).items():
        if name not in HOOKS:  # a forward may add to a list that it keeps
            kept = type(value) in (list, dict, set)
            vars(copy)[name] = value.copy() if kept else value
    return copy


def _quiet(module: Optional[torch.nn.Module], training: bool) -> Optional[torch.nn.Module]:
    """A copy that shares the parameters and fires no hooks, global ones included."""
    if module is None or isinstance(vars(module).get("_compiled_call_impl"), _Direct):
        return module
    copy = stand_in(module, vars(module)["_parameters"], vars(module)["_modules"], training)
    vars(copy)["_buffers"] = dict(vars(module)["_buffers"])
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
    torch.default_generator.manual_seed(0)  # that of `isolated`
    try:
        return function(*args)
    except Exception as error:  # whatever a model's code may raise
        return error


def cannot(error: Exception, how: str = "") -> str:
    """The reason for the report."""
    lines = str(error).strip().splitlines() or [""]
    return f"it cannot be tried{how}: {type(error).__name__}: {lines[0][:100]}"


def in_inference(*given: torch.Tensor) -> bool:
    """Whether these are of one dtype and device, and nothing else is asked of what is computed from
    them: no gradient, of whichever mode, and no cast.
    """
    x = given[0]
    if forward_ad._current_level >= 0:
        return False
    if any(t.dtype != x.dtype or t.device != x.device for t in given) or autocasts(x):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in given))


def autocasts(x: torch.Tensor) -> bool:
    """Whether the operations on `x` run under autocast, which the meta device does not have."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False  # 0.1 us, where asking for the device takes 0.7
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def left_to_the_compiler() -> bool:
    """Whether `torch.compile` traces inference.

    It then fuses norms, gates and rotary embeddings with what is around them, such as the addition
    of the layer before or the store to a cache, which operators of ours would not let it.
    """
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def taken(x: torch.Tensor, compiled: bool = False) -> bool:
    """Whether an operator of ours takes `x` here; the module's own forward runs on others.

    `compiled`: whether it is faster on a GPU than what the compiler makes. What is exported is to
    run without fuselage.
    """
    if x.dtype not in DTYPES:
        return False
    if not left_to_the_compiler():
        return True
    return compiled and is_on_gpu(x) and not _exports()


# NOTE: until PyTorch 2.13 is_exporting() is true in whatever `torch.compile` traces; called outside
# of the trace it is not.
@torch.compiler.assume_constant_result
def _exports() -> bool:
    return torch.compiler.is_exporting()


def is_on_gpu(x: torch.Tensor) -> bool:
    """Where it was measured what is faster. NOTE: not on ROCm."""
    return x.is_cuda and torch.version.hip is None


def takes_tensors(function: Callable, count: int = 1) -> bool:
    """Whether it can be called with the module and so many tensors, and with nothing else."""
    try:
        names = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(names) == 1 + count and all(
        name.kind is name.POSITIONAL_OR_KEYWORD for name in names[1:]
    )


def agree(actual: object, expected: object, noise: float = 1e-6) -> bool:
    """Whether two results come from the same formula and, if they are in half precision, with the
    same roundings.

    There a formula that rounds elsewhere differs in a fifth of the elements or more,
    and the same one in a few of a thousand, where float32 noise meets a tie.
    """
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return False
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return call(_close, actual, expected, noise) is True  # fake tensors have no values, and raise


def _close(actual: torch.Tensor, expected: torch.Tensor, noise: float) -> bool:
    actual, expected, dtype = actual.double(), expected.double(), expected.dtype
    if not torch.equal(actual.isfinite(), expected.isfinite()):
        return False
    actual, expected = actual.nan_to_num(), expected.nan_to_num()
    if dtype == torch.float32:
        bound = 1e-5 * expected.abs() + noise
    else:
        bound = 2.5 * torch.finfo(dtype).eps * expected.abs() + noise
        if (actual != expected).double().mean() > 0.03:
            return False
    return bool(((actual - expected).abs() <= bound).all())


def agree_all(actual: object, expected: object, noise: float = 1e-6) -> bool:
    """`agree` for results that are tuples of tensors."""
    if isinstance(expected, (tuple, list)):
        same_length = isinstance(actual, (tuple, list)) and len(actual) == len(expected)
        return same_length and all(agree_all(*pair, noise) for pair in zip(actual, expected))
    if expected is None or isinstance(expected, str):
        return actual == expected
    return agree(actual, expected, noise)


def same_slopes(ours: Callable, theirs: Callable, leaves: list[torch.Tensor]) -> bool:
    """Whether two functions of nothing have the same gradients in `leaves`: a formula may detach
    a part, which its values do not show. Where theirs cannot be trained, there is nothing to lose.
    """

    def slopes(function: Callable) -> object:
        with torch.enable_grad():
            out = function()
            weights = random(*out.shape, dtype=out.dtype, seed=5)
            return torch.autograd.grad(out, leaves, weights, allow_unused=True)

    for leaf in leaves:
        leaf.requires_grad_()
    expected, actual = call(slopes, theirs), call(slopes, ours)
    for leaf in leaves:
        leaf.requires_grad_(False)
    if isinstance(expected, Exception):
        return "does not require grad" not in str(expected)
    return isinstance(actual, tuple) and all(map(_same_slope, actual, expected))


def _same_slope(actual: Optional[torch.Tensor], expected: Optional[torch.Tensor]) -> bool:
    if actual is None or expected is None:
        return actual is expected
    largest = expected.abs().max().clamp_min(1e-3)  # noise of large terms that cancel
    return agree(actual / largest, expected / largest, noise=1e-5)


class Stub(torch.nn.Module):
    """Stands for a submodule: `function` of what it is called with."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def quiet_ones(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The module itself, for inference and for training, without hooks."""
    return [_quiet(module, training) for training in (False, True)]
