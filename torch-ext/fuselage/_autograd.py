"""What every operator's autograd needs."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Optional

import torch
from torch.autograd import forward_ad

from ._arguments import refuse_wrong_kinds
from ._ops import add_op_namespace_prefix, ops

# Inside a Function the op is called past its own, registered autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd

_are_active = torch._C._are_functorch_transforms_active


def transforms_are_active() -> bool:
    """Whether this call is within transforms of torch.func, as grad and vmap."""
    return _are_active()


# Dynamo cannot trace that, but traces within the transforms: so it asks, once for a graph. NOTE: as
# torch.compiler.assume_constant_result does it, which imports Dynamo.
transforms_are_active._dynamo_marked_constant = True


def needs_grad(
    a: torch.Tensor,
    b: Optional[torch.Tensor] = None,
    c: Optional[torch.Tensor] = None,
    d: Optional[torch.Tensor] = None,
) -> bool:
    """Whether a result of these inputs must carry a gradient."""
    if forward_ad._current_level >= 0:
        _no_forward_mode(a, b, c, d)
    try:
        needs = (
            a.requires_grad
            or (b is not None and b.requires_grad)
            or (c is not None and c.requires_grad)
            or (d is not None and d.requires_grad)
        )
    except AttributeError:  # not a tensor
        refuse_wrong_kinds()
        raise
    if needs or not transforms_are_active():
        return needs and torch.is_grad_enabled()
    given = [t for t in (a, b, c, d) if t is not None]
    return torch.is_grad_enabled() and any(is_tracked(t) for t in given)


def is_tracked(t: torch.Tensor) -> bool:
    """Whether `t` requires a gradient, or what transforms of torch.func have wrapped in it does.

    Within transforms Dynamo breaks the graph here.
    """
    functorch = torch._C._functorch
    while not t.requires_grad:
        if not transforms_are_active() or not functorch.is_functorch_wrapped_tensor(t):
            return False
        t = functorch.get_unwrapped(t)
    return True


def some_need_grad(x: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """`needs_grad` of any number, three others at a time."""
    if needs_grad(x, *others[:3]):
        return True
    return len(others) > 3 and some_need_grad(x, *others[3:])


def _no_forward_mode(*tensors: Optional[torch.Tensor]) -> None:
    """Raises where an input has a tangent: an op without a rule for it would silently drop it."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given):
        raise RuntimeError(
            "fuselage: forward-mode differentiation (torch.func.jvp) is not supported; "
            "use reverse mode, as torch.func.vjp or backward() do"
        )


def refuse_gradient(op: str, functional_op: str) -> None:
    """Raises for an op that writes over its inputs."""
    raise RuntimeError(
        f"fuselage::{op}: writes over its inputs and has no gradient; use {functional_op}, or call "
        "it under torch.no_grad()"
    )


def differentiable(
    name: str,
    *,
    save: Callable,
    backward: Callable,
    results: Optional[int] = None,
    called: Optional[Callable] = None,
    transforms: bool = True,
) -> Callable:
    """The way of calling an op where an input requires a gradient: `call(*inputs)` of all of them.

    The `*_fwd` op gets its gradient three times, of one description: as a Function in eager mode,
    as Functions for transforms of torch.func, and as a backward that is registered with the op, for
    torch.compile and autocast (docs/design-decisions.md has the measurements behind this).

    Args:
        name: Of the plain op.
        save: `save(ctx, inputs, outputs)` keeps what the backward reads.
        backward: `backward(ctx, *grads)` of the gradients of the results, None for one that was
            not used, gives a tuple of those of the first inputs. Where one is not needed, what
            stands for it is thrown away.
        results: So many of the `*_fwd` op's outputs are results; those after them are for `save`
            alone. None for an op of one output, which `backward` always gets a gradient of.
        called: `called(ctx)` is the name of the public function, where that is not the op's.
        transforms: Whether there is a gradient under transforms of torch.func. Not where `save`
            leaves tensors on `ctx` itself.
    """
    overload = getattr(ops, f"{name}_fwd").default
    nothing = (None,) * len(overload._schema.arguments)
    shown = 0 if results == 1 else slice(results)
    several = results is not None
    called = called or (lambda ctx: name)

    def forward(ctx, *inputs):
        with below_autograd():
            output = overload(*inputs)
        save(ctx, inputs, output)
        return output

    def forward_of_several(ctx, *inputs):
        with below_autograd():
            outputs = overload(*inputs)
        ctx.set_materialize_grads(False)
        save(ctx, inputs, outputs)
        return outputs[shown]

    def setup_context(ctx, inputs, output):
        if several:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output[results:])  # or what `save` marks
        save(ctx, inputs, output)

    def gradients(ctx, *grads):
        if torch.is_grad_enabled():  # the gradient itself would silently have a wrong one
            raise RuntimeError(_not_differentiable(called(ctx)))
        if grads[0] is None and all(grad is None for grad in grads):
            return nothing
        found = backward(ctx, *grads)
        needs = ctx.needs_input_grad[: len(found)]
        if False in needs:
            found = tuple([grad if need else None for grad, need in zip(found, needs)])
        return found + nothing[len(found) :]

    torch.library.register_autograd(
        add_op_namespace_prefix(f"{name}_fwd"),
        lambda ctx, *grads: gradients(ctx, *grads[:results]),
        setup_context=setup_context,
    )
    apply = _function(name, forward_of_several if several else forward, gradients)
    transformed = (
        _for_transforms(name, overload, save, backward, results, called)
        if transforms
        else _refused_transforms(name)
    )
    is_compiling, is_autocast_enabled = (
        torch.compiler.is_compiling,
        torch._C._is_any_autocast_enabled,
    )

    def call(*inputs):
        # torch.compile knows no other; and what autocast casts is recorded before the op.
        if is_compiling() or (is_autocast_enabled() and not _are_active()):
            outputs = overload(*inputs)
        elif _are_active():
            outputs = transformed(*inputs)
        else:
            return apply(*inputs)
        return outputs[shown] if several else outputs

    return call


def _for_transforms(name, overload, save, backward, results, called) -> Callable:
    """The call of `differentiable` under transforms of torch.func, with all outputs of the op.

    Those take Functions alone whose `forward` has no `ctx`, and run its parts at the levels of each
    transform. They ask for a graph of every gradient, which must raise only if that is
    differentiated: so the gradient is a Function, too, of all tensors that it is made of.
    """

    def forward(*inputs):
        if torch._C._is_any_autocast_enabled():
            raise RuntimeError(
                f"fuselage::{name}: no gradient by torch.func under autocast; cast the inputs"
            )
        with below_autograd():
            return overload(*inputs)

    def setup_context(ctx, inputs, output):
        kept = _Kept(ctx.needs_input_grad)
        save(kept, inputs, output)
        ctx.save_for_backward(*kept.take())
        ctx.kept = kept

    def gradients(ctx, *grads):
        grads = grads[:results]
        found = gradient(ctx.kept, len(grads), *grads, *ctx.saved_tensors)
        return found + (None,) * (len(ctx.needs_input_grad) - len(found))

    def forward_of_gradient(kept, count, *tensors):
        kept.saved_tensors = tensors[count:]
        with below_autograd():
            found = backward(kept, *tensors[:count])
        kept.take()
        return tuple(grad if need else None for grad, need in zip(found, kept.needs_input_grad))

    def keep_nothing(ctx, inputs, output):
        ctx.kept = inputs[0]

    def refuse(ctx, *grads):
        raise RuntimeError(_not_differentiable(called(ctx.kept)))

    gradient = _function(f"{name}_gradient", forward_of_gradient, refuse, keep_nothing)
    return _function(name, forward, gradients, setup_context)


class _Kept:
    """What `save` keeps of a call under transforms: it stands in for a `ctx`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors = ()

    def save_for_backward(self, *tensors: Optional[torch.Tensor]) -> None:
        self.saved_tensors = tensors

    def take(self) -> tuple[Optional[torch.Tensor], ...]:
        """What is saved, which is not kept here: it belongs to a level of the transforms."""
        saved, self.saved_tensors = self.saved_tensors, ()
        return saved

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None:
        """Their gradients come as zeros, and `backward` does not look at them."""


def _refused_transforms(name: str) -> Callable:
    def call(*inputs):
        raise RuntimeError(f"fuselage::{name}: no gradient by torch.func; use backward()")

    return call


def _function(
    name: str, forward: Callable, backward: Callable, setup_context: Optional[Callable] = None
) -> Callable:
    """`apply` of a Function; of one for transforms, if it has a `setup_context`."""
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    if setup_context is not None:
        body |= {"setup_context": staticmethod(setup_context), "generate_vmap_rule": True}
    return types.new_class(
        "".join(word.capitalize() for word in name.split("_")),
        (torch.autograd.Function,),
        exec_body=lambda namespace: namespace.update(body),
    ).apply


def _not_differentiable(op: str) -> str:
    return f"fuselage::{op}: the backward is not differentiable, create_graph=True not supported"


def mark_written(*tensors: torch.Tensor) -> None:
    """Tells autograd that an op wrote over these tensors, so that a stale use of them raises."""
    if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version(tensors)
