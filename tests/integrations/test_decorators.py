"""Forwards with decorators, of which `patch` keeps these around a forward of its own."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from integrations.models import assert_close, compiled_and_counted, counted_ops
from torch import nn

DIM = 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.RMSNorm(DIM, eps=1e-6), []
        nn.init.normal_(self.norm.weight, 0.5, 0.3)

    def forward(self, x, y, scale=1.0):
        return self.norm(x + y) * scale


def renamed(function):
    """As transformers gives an argument another name."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if "factor" in kwargs:
            kwargs["scale"] = kwargs.pop("factor")
        return function(*args, **kwargs)

    return wrapper


class Renamed(Layer):
    forward = renamed(Layer.forward)


class RenamedTwice(Layer):
    forward = renamed(renamed(Layer.forward))


class Checkpointed(Layer):
    """As transformers checkpoints a layer: in the outermost decorator of its class."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        forward = cls.forward

        @functools.wraps(forward)
        def with_checkpointing(self, *args, **kwargs):
            if type(self).forward is with_checkpointing:
                self.calls.append(type(self).__name__)
            return forward(self, *args, **kwargs)

        cls.forward = with_checkpointing


class CheckpointedLayer(Checkpointed):
    forward = renamed(Layer.forward)


class WithoutGradients(Layer):
    forward = torch.no_grad()(Layer.forward)


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


def inputs() -> list[torch.Tensor]:
    return [torch.randn(3, 5, DIM) for _ in range(2)]


def patched(integration, kind: type) -> tuple[nn.Module, nn.Module]:
    plain = kind()
    ours = copy.deepcopy(plain)
    report = integration.patch(ours)
    assert report.replaced[""] == "fused_add_rms_norm" and not report.left_alone, str(report)
    return plain, ours


def check(fuselage, plain: nn.Module, ours: nn.Module, fused: int = 1, **options) -> None:
    given = inputs()
    with counted_ops(fuselage) as counts:
        actual = ours(*given, **options)
    assert counts["fused_add_rms_norm"] == fused
    expected = plain(*given, **options)
    assert_close(actual.detach(), expected.detach())
    assert actual.requires_grad == expected.requires_grad


@pytest.mark.parametrize("kind", [Renamed, RenamedTwice, CheckpointedLayer, WithoutGradients])
def test_what_decorators_do_is_kept(integration, fuselage, kind):
    plain, ours = patched(integration, kind)
    check(fuselage, plain, ours)
    if kind is not WithoutGradients:
        check(fuselage, plain, ours, factor=3.0)
    assert ours.calls == plain.calls
    assert integration.unpatch(ours) == 2
    check(fuselage, plain, ours, fused=0)


@pytest.mark.parametrize("patched_first", [True, False])
def test_a_class_that_is_given_later(integration, fuselage, patched_first):
    """As FSDP2 does it: the outermost decorator is then that of the new class."""
    plain, ours = CheckpointedLayer(), CheckpointedLayer()
    ours.load_state_dict(plain.state_dict())
    sharded = type("ShardedLayer", (CheckpointedLayer,), {})
    if patched_first:
        integration.patch(ours)
    ours.__class__ = plain.__class__ = sharded
    if not patched_first:
        integration.patch(ours)
    check(fuselage, plain, ours)
    assert ours.calls == plain.calls == ["ShardedLayer"]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    given = inputs()
    assert_close(compiled(*given).detach(), plain(*given).detach())
    assert ours.calls == plain.calls


def test_compiled_without_a_break(integration, fuselage):
    plain, ours = patched(integration, CheckpointedLayer)
    compiled, counts = compiled_and_counted(ours, fuselage)
    given = inputs()
    assert_close(compiled(*given, factor=3.0).detach(), plain(*given, factor=3.0).detach())
    assert counts["fused_add_rms_norm"] == 1 and ours.calls


def test_the_source_of_a_traceback_is_the_plain_one(integration):
    _, ours = patched(integration, Renamed)
    with pytest.raises(TypeError) as caught:
        ours(*inputs(), scale="a text")
    assert caught.traceback[-1].path.name == "test_decorators.py"


def in_a_list(function):
    """A decorator that does not hold the function in a variable."""
    functions = [function]

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return functions[0](*args, **kwargs)

    return wrapper


class Called:
    """A decorator that is no function."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __get__(self, module, kind=None):
        return self if module is None else functools.partial(self.__wrapped__, module)


@pytest.mark.parametrize("decorator", [in_a_list, Called, torch.compile, torch.compiler.disable])
def test_decorators_that_hide_what_they_call(integration, decorator):
    """Or that belong to the compiler, which knows a function by its code."""
    ours = type("Hidden", (Layer,), {"forward": decorator(Layer.forward)})()
    report = integration.patch(ours)
    assert "decorator" in report.left_alone[""]
    assert "" not in report.replaced and "forward" not in vars(ours)
