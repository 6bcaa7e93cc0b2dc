"""Gives modules of a model another forward, and takes it back.

The new forward is an attribute of the instance, as `kernels.kernelize` does it: classes, parameters
and the keys of the state dict stay, a deep copy is patched too, and a pickle loads as the plain
model. What to replace, and by what, is for the recognisers to say.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Callable, Optional, Union

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import _probe

_MARK = "fuselage_replacement"  # an attribute of our functions: what they stand for
_INNER = "fuselage_inner"  # of those around another: which


@dataclass(frozen=True)
class Match:
    """What a recogniser found: another function for one attribute of the module.

    Args:
        what: For the report, such as "swiglu".
        function: Takes the place of the method; its first argument is the module. Or an object that
            takes the place of another one, which it has as `fuselage_original`.
        attribute: Name of the method or the object.
        covers: Names of submodules that are not called any more.
    """

    what: str
    function: Callable
    attribute: str = "forward"
    covers: tuple[str, ...] = ()


# None: not what this recogniser looks for. A text: why it is left alone though it looks like it.
Found = Union[None, str, Match]
Recogniser = Callable[[torch.nn.Module], Found]


@dataclass
class Report:
    """What `patch` did.

    Attributes:
        replaced: Name of a module: what runs there now.
        left_alone: Name of a module that looked like something fuselage has: why it stays.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table with one row for the modules whose names differ in their numbers only."""
        rows = [("replaced", "count", "by")]
        rows += _grouped(self.replaced)
        rows += [("left alone", "count", "because")]
        rows += _grouped(self.left_alone)
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(
            f"{name:<{widths[0]}}  {count:>{widths[1]}}  {what}" for name, count, what in rows
        )


def _grouped(entries: dict[str, str]) -> list[tuple[str, str, str]]:
    counts: dict[tuple[str, str], int] = {}
    for name, what in entries.items():
        shape = ".".join("*" if part.isdigit() else part for part in name.split("."))
        counts[shape or "(the model)", what] = counts.get((shape or "(the model)", what), 0) + 1
    return [(name, str(count), what) for (name, what), count in counts.items()] or [("-", "0", "")]


def patch_modules(
    model: torch.nn.Module,
    parts: Iterable[Recogniser],
    blocks: Iterable[Recogniser] = (),
    report: Optional[Report] = None,
    prefix: str = "",
    bodies: Iterable[Recogniser] = (),
) -> Report:
    """Replaces what the recognisers match: `parts` everywhere first, then `blocks` made of them.

    Those for `bodies` come last, with forwards around what is there then.
    """
    report = Report() if report is None else report
    covered: set[int] = set()
    with unset_fake_temporarily(), _probe.isolated():  # what a probe computes must have values
        for recognisers in (tuple(parts), tuple(blocks), tuple(bodies)):
            for name, module in model.named_modules():
                if id(module) in covered:
                    continue
                found = _patched(module, recognisers)
                if isinstance(found, str):
                    report.left_alone[prefix + name] = found
                elif found is not None:
                    report.replaced[prefix + name] = found.what
                    covered.update(id(module.get_submodule(child)) for child in found.covers)
    return report


def _patched(module: torch.nn.Module, recognisers: tuple[Recogniser, ...]) -> Found:
    """Installs the first match. A module on which a recogniser raises stays as it is."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted by torch.jit"
    error: Optional[Exception] = None
    for recognise in recognisers:
        try:
            found = recognise(module)
            if isinstance(found, Match):
                return _why_heard(module, found.covers) or install(module, found) or found
        except Exception as raised:  # whatever a model's code may raise
            found, error = None, error or raised
        if found is not None:
            return found
    return None if error is None else _probe.cannot(error)


def _why_heard(module: torch.nn.Module, covers: Iterable[str]) -> Optional[str]:
    """Why submodules that are not called any more have to be."""
    for name in covers:
        child = module.get_submodule(name)
        if listened_to(child):
            return f"its {name} has hooks, which would not be called"
        foreign = foreign_forward(child)
        if foreign is not None:
            return f"the forward of its {name} was replaced already, by {foreign}"
    return None


def listened_to(module: torch.nn.Module) -> bool:
    """Whether hooks are called with what the module takes or gives."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def wrapped(module: torch.nn.Module) -> bool:
    """Whether a hook of accelerate or diffusers is around its forward."""
    return _slot(module) != (module, "forward")


def unpatch_modules(model: torch.nn.Module) -> int:
    """Gives every module its own methods back; returns how many modules had other ones."""
    count = 0
    for module in model.modules():
        restored = _restore(module, *_slot(module))
        for name, value in list(vars(module).items()):
            if name not in ("forward", "_old_forward"):
                restored += _restore(module, module, name) if replacement(value) else 0
        count += restored > 0
    return count


def install(module: torch.nn.Module, match: Match) -> Optional[str]:
    """Sets the method; if somebody else has replaced it already, says so and sets nothing."""
    if match.attribute == "forward":
        holder, name = _slot(module)
    else:
        holder, name = module, match.attribute
    if not isinstance(match.function, types.FunctionType):
        setattr(module, name, match.function)
        return None
    foreign = _foreign(module, holder, name)
    if foreign is not None:
        return f"its {match.attribute} was replaced already, by {foreign}"
    setattr(holder, name, types.MethodType(match.function, module))
    return None


def foreign_forward(module: torch.nn.Module) -> Optional[str]:
    """Whose forward the module has, if it is neither its class's nor ours."""
    return _foreign(module, *_slot(module))


def _foreign(module: torch.nn.Module, holder: object, name: str) -> Optional[str]:
    current = vars(holder).get(name)
    if current is None or replacement(current) is not None:
        return None
    method = "forward" if name in ("_old_forward", "original_forward") else name
    own = getattr(type(module), method, None)
    return None if getattr(current, "__func__", None) is own else _origin(current)


def replacement(method: object) -> Optional[str]:
    """What a method or an object of ours stands for; None for those of others."""
    return getattr(getattr(method, "__func__", method), _MARK, None)


def replacement_of(module: torch.nn.Module) -> Optional[str]:
    """What the module's forward was replaced by, within ones around it; None if we did not."""
    return replacement(innermost(module))


def around(inner: Optional[Callable], function: Callable) -> Callable:
    """Marks a function of ours as one around another, or around the class's own."""
    setattr(function, _INNER, inner)
    return function


def innermost(module: torch.nn.Module) -> Optional[Callable]:
    """The function of ours in the place of its class's forward, within ones around it."""
    holder, name = _slot(module)
    method = vars(holder).get(name)
    function = getattr(method, "__func__", method) if replacement(method) else None
    return getattr(function, _INNER, function)


def marked(what: str, function: Callable, attribute: str = "forward") -> Callable:
    """Marks a function as ours. A bound one is pickled by its name: that of what it stands for."""
    setattr(function, _MARK, what)
    function.__name__ = attribute
    return function


def original_of(ours: object) -> object:
    """The object that one of ours stands for, with what was set on ours since.

    One that was made from our class, as diffusers does for an IP-Adapter, has none: it gets one.
    """
    kind = type(ours).__mro__[1]
    original = vars(ours).get("fuselage_original")
    original = object.__new__(kind) if original is None else original
    vars(original).update((k, v) for k, v in vars(ours).items() if k != "fuselage_original")
    return original


def _origin(method: object) -> str:
    function = getattr(method, "__func__", method)
    function = getattr(function, "func", function)  # of a functools.partial
    names = (getattr(function, "__module__", None), getattr(function, "__qualname__", None))
    return ".".join(name for name in names if name) or type(method).__name__


def _slot(module: torch.nn.Module) -> tuple[object, str]:
    """The object and the attribute that hold the innermost forward.

    Hooks that move weights replace `module.forward` by a wrapper and keep what they found:
    accelerate in `module._old_forward`, diffusers in its hook registry. Replacing the wrapper would
    lose the hook, so what they kept is what we replace; whichever comes first, the other survives.
    """
    for holder, name in _places(module):
        value = vars(holder).get(name)
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return holder, name
    return module, "forward"


def _places(module: torch.nn.Module) -> Iterator[tuple[object, str]]:
    """Where a forward may be, looked up as far as they are asked for: the first has it, mostly."""
    yield module, "forward"
    yield module, "_old_forward"
    for reference in getattr(vars(module).get("_diffusers_hook"), "_fn_refs", ()):
        yield reference, "original_forward"
        yield reference, "forward"


def _restore(module: torch.nn.Module, holder: object, name: str) -> int:
    if replacement(vars(holder).get(name)) is None:
        return 0
    ours = vars(holder)[name]
    if not isinstance(ours, types.MethodType):
        setattr(holder, name, original_of(ours))
    elif holder is module and name != "_old_forward":
        delattr(module, name)  # the class has it
    else:
        setattr(holder, name, types.MethodType(type(module).forward, module))
    return 1
