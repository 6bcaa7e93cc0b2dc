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


def needs_grad(a: torch.Tensor, b: Optional[torch.Tensor] = None) -> bool:
    """Whether a result of these inputs must carry a gradient."""
    if forward_ad._current_level >= 0:
        _no_forward_mode(a, b)
    try:
        return (a.requires_grad or (b is not None and b.requires_grad)) and torch.is_grad_enabled()
    except AttributeError:  # not a tensor
        refuse_wrong_kinds()
        raise


def some_need_grad(x: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    if needs_grad(x):
        return True
    for t in others:  # noqa: SIM110, as any() of a generator takes half as long again
        if t is not None and needs_grad(t):
            return True
    return False


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
) -> Callable:
    """The way of calling an op where an input requires a gradient: `call(*inputs)` of all of them.

    The `*_fwd` op gets its gradient twice, of one description: as a Function in eager mode, and as
    a backward that is registered with the op, for torch.compile and autocast
    (docs/design-decisions.md has the measurements behind this).

    Args:
        name: Of the plain op.
        save: `save(ctx, inputs, outputs)` keeps what the backward reads.
        backward: `backward(ctx, *grads)` of the gradients of the results, None for one that was
            not used, gives a tuple of those of the first inputs. Where one is not needed, what
            stands for it is thrown away.
        results: So many of the `*_fwd` op's outputs are results; those after them are for `save`
            alone. None for an op of one output, which `backward` always gets a gradient of.
        called: `called(ctx)` is the name of the public function, where that is not the op's.
    """
    overload = getattr(ops, f"{name}_fwd").default
    nothing = (None,) * len(overload._schema.arguments)
    shown = 0 if results == 1 else slice(results)
    several = results is not None

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
            raise RuntimeError(
                f"fuselage::{called(ctx) if called else name}: the backward is not differentiable, "
                "create_graph=True not supported"
            )
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
    body = {
        "forward": staticmethod(forward_of_several if several else forward),
        "backward": staticmethod(gradients),
    }
    apply = types.new_class(
        "".join(word.capitalize() for word in name.split("_")),
        (torch.autograd.Function,),
        exec_body=lambda namespace: namespace.update(body),
    ).apply
    is_compiling, is_autocast_enabled = (
        torch.compiler.is_compiling,
        torch._C._is_any_autocast_enabled,
    )

    def call(*inputs):
        # torch.compile knows no other; and what autocast casts is recorded before the op.
        if is_compiling() or is_autocast_enabled():
            return overload(*inputs)[shown] if several else overload(*inputs)
        return apply(*inputs)

    return call


def mark_written(*tensors: torch.Tensor) -> None:
    """Tells autograd that an op wrote over these tensors, so that a stale use of them raises."""
    if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version(tensors)
