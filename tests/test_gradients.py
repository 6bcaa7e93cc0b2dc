"""How operators behave in autograd: what is asked for, what is saved, what is refused."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from harness import (
    DIRECTIONAL_TOLERANCE,
    assert_same_bits,
    check_gradients,
    each_operator,
    each_style,
    random_grad_outs,
)
from operators import OPERATORS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

SHAPE = (5, 3, 72)


def subsets(names):
    return [some for size in range(1, len(names) + 1) for some in combinations(names, size)]


def leaves_of(inputs: dict) -> dict:
    return {name: None if t is None else t.clone().requires_grad_() for name, t in inputs.items()}


class Calls(TorchDispatchMode):
    """The names of the ops that run, views apart."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.kernels_ci
@each_style(OPERATORS)
def test_gradients_only_where_required(fuselage, device, op, style):
    inputs = op.inputs(SHAPE, torch.bfloat16, device, style)
    for requires in subsets(op.differentiable(inputs)):
        check_gradients(op, fuselage, inputs, op.options(style), requires=requires)


@pytest.mark.kernels_ci
@each_style(OPERATORS)
def test_gradients_of_some_outputs(fuselage, device, op, style):
    inputs, options = op.inputs(SHAPE, torch.float32, device, style), op.options(style)
    grad_outs = random_grad_outs(op.run(fuselage, inputs, options))
    for used in subsets(op.outputs):
        some = {name: grad_outs[name] for name in used}
        for requires in subsets(op.differentiable(inputs)):
            needed = [name for name in used if name == "out" or requires != op.vector_inputs]
            if needed == list(used):  # new_residual has no gradient for a weight alone
                check_gradients(op, fuselage, inputs, options, requires=requires, grad_outs=some)


@each_style(OPERATORS)
def test_gradients_are_directional_derivatives(fuselage, device, op, style):
    """Central differences of the float64 formula: autograd has no part in it."""
    inputs = op.inputs((7, 40), torch.float32, device, style)
    options = op.options(style)
    grad_outs = random_grad_outs(op.run(fuselage, inputs, options))
    actual = check_gradients(op, fuselage, inputs, options, grad_outs=grad_outs)
    double = {name: None if t is None else t.double() for name, t in inputs.items()}
    # The formula without its roundings, which have no derivative.
    smooth = {**op.without_roundings(options), "dtype": torch.float64}

    def loss(inputs):
        outputs = op.run_reference(inputs, smooth)
        return sum((outputs[name] * grad_outs[name].double()).sum() for name in outputs)

    step = 1e-5
    for name in op.differentiable(inputs):
        direction = torch.randn_like(double[name])
        ahead, behind = (
            loss({**double, name: double[name] + sign * step * direction}) for sign in (1, -1)
        )
        numerical = ((ahead - behind) / (2 * step)).item()
        terms = actual[name].double() * direction
        scale = terms.abs().sum().item()
        assert abs(terms.sum().item() - numerical) <= DIRECTIONAL_TOLERANCE * scale, name


@each_operator(OPERATORS)
def test_backward_twice_accumulates(fuselage, device, op):
    leaves = leaves_of(op.inputs(SHAPE, torch.float32, device))
    outputs = op.run(fuselage, leaves, {})
    grad_outs = random_grad_outs(outputs)
    for _ in range(2):
        torch.autograd.backward(list(outputs.values()), list(grad_outs.values()), retain_graph=True)
    twice = {name: t.grad.clone() for name, t in leaves.items()}
    once = check_gradients(
        op,
        fuselage,
        {name: t.detach() for name, t in leaves.items()},
        {},
        grad_outs=grad_outs,
    )
    for name, grad in once.items():
        assert_same_bits(twice[name], 2 * grad, name)


@each_operator([op for op in OPERATORS if op.vector_inputs])
def test_gradients_accumulate_over_uses(fuselage, device, op):
    """A weight that two calls share, as in gradient accumulation, has the sum of both gradients."""
    first, second = (op.inputs(SHAPE, torch.float32, device) for _ in range(2))
    second |= {name: first[name] for name in op.vector_inputs}
    total = {name: first[name].clone().requires_grad_() for name in op.vector_inputs}
    separate = dict.fromkeys(op.vector_inputs, 0)
    for inputs in (first, second):
        op.run(fuselage, inputs | total, {})["out"].sum().backward()
        leaves = leaves_of(inputs)
        op.run(fuselage, leaves, {})["out"].sum().backward()
        for name in separate:
            separate[name] = separate[name] + leaves[name].grad
    for name, expected in separate.items():
        assert_same_bits(total[name].grad, expected, name)


@each_operator(OPERATORS)
def test_forward_mode_is_refused(fuselage, device, op):
    inputs = op.inputs(SHAPE, torch.float32, device)
    for name in op.differentiable(inputs):

        def run(tensor, name=name):
            return op.run(fuselage, {**inputs, name: tensor}, {})["out"]

        with pytest.raises(RuntimeError, match="forward-mode"):
            torch.func.jvp(run, (inputs[name],), (torch.ones_like(inputs[name]),))


@pytest.mark.kernels_ci
@each_operator(OPERATORS)
def test_double_backward_is_refused(fuselage, device, op):
    leaves = leaves_of(op.inputs(SHAPE, torch.float32, device))
    loss = op.run(fuselage, leaves, {})["out"].pow(2).sum()
    with pytest.raises(RuntimeError, match=rf"fuselage::{op.name}: the backward is not diff"):
        torch.autograd.grad(loss, list(leaves.values()), create_graph=True)


@each_operator(OPERATORS)
def test_writing_to_a_saved_input_is_noticed(fuselage, device, op):
    for name in (*op.row_inputs, *op.vector_inputs):
        inputs = leaves_of(op.inputs(SHAPE, torch.float32, device))
        inputs[name] = inputs[name] * 1  # not a leaf, which could not be written to
        outputs = op.run(fuselage, inputs, {})
        inputs[name].mul_(2)
        if name in op.saved:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                outputs["out"].sum().backward()
        else:
            outputs["out"].sum().backward()


@each_operator(OPERATORS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(fuselage, device, op, reentrant):
    inputs = op.inputs(SHAPE, torch.bfloat16, device)
    grads = []
    for wrapped in (False, True):
        leaves = leaves_of(inputs)

        def call(*values):
            return tuple(op.run(fuselage, dict(zip(inputs, values, strict=True)), {}).values())

        values = list(leaves.values())
        outputs = checkpoint(call, *values, use_reentrant=reentrant) if wrapped else call(*values)
        sum(output.float().pow(2).sum() for output in outputs).backward()
        grads.append({name: t.grad for name, t in leaves.items()})
    for name, grad in grads[0].items():
        assert_same_bits(grads[1][name], grad, name)


@each_operator(OPERATORS)
def test_hooks_see_the_gradient(fuselage, device, op):
    leaves = leaves_of(op.inputs(SHAPE, torch.float32, device))
    seen = {}
    for name, leaf in leaves.items():
        leaf.register_hook(lambda grad, name=name: seen.update({name: grad.clone()}))
    outputs = op.run(fuselage, leaves, {})
    outputs["out"].register_hook(lambda grad: grad * 2)
    outputs["out"].sum().backward()
    for name, leaf in leaves.items():
        assert_same_bits(seen[name], leaf.grad, name)


# What it costs


def packed_in(call) -> list[torch.Tensor]:
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return tensors


@pytest.mark.kernels_ci
@each_operator(OPERATORS)
def test_only_what_backward_needs_is_saved(fuselage, device, op):
    leaves = leaves_of(op.inputs(SHAPE, torch.bfloat16, device))
    results = {}
    saved = packed_in(lambda: results.update(op.run(fuselage, leaves, {})))
    for tensor in saved:
        known = [
            name for name, t in {**leaves, **results}.items() if tensor.data_ptr() == t.data_ptr()
        ]
        assert set(known) <= set(op.saved)
        if not known:  # row statistics
            assert (
                tensor.dtype == torch.float32
                and tensor.numel() == SHAPE[0] * SHAPE[1] * op.statistics
            )
    assert len(saved) <= len(op.saved)


@pytest.mark.kernels_ci
@each_style(OPERATORS)
def test_without_gradients_one_op_runs_and_nothing_is_saved(fuselage, device, op, style):
    inputs, options = op.inputs(SHAPE, torch.bfloat16, device, style), op.options(style)
    leaves = leaves_of(inputs)

    def run(inputs):
        with Calls() as calls:
            outputs = op.run(fuselage, inputs, options)
        assert all(output.grad_fn is None for output in outputs.values())
        assert not any(output.requires_grad for output in outputs.values())
        assert [name.split("::")[1] for name in calls.names] == [op.registered_name]

    assert packed_in(lambda: run(inputs)) == []
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert packed_in(lambda: run(leaves)) == []


@each_style(OPERATORS)
def test_with_gradients_one_op_runs_each_way(fuselage, device, op, style):
    inputs, options = op.inputs(SHAPE, torch.bfloat16, device, style), op.options(style)
    leaves = leaves_of(inputs)
    with Calls() as forward:
        outputs = op.run(fuselage, leaves, options)
    assert len(forward.names) == 1 and op.registered_name in forward.names[0]
    grad_outs = random_grad_outs(outputs)
    with Calls() as backward:
        torch.autograd.grad(
            list(outputs.values()),
            [t for t in leaves.values() if t is not None],
            list(grad_outs.values()),
        )
    ours = [name for name in backward.names if not name.startswith("aten::")]
    assert len(ours) == 1
    # No tensor of the size of the activations is made by another op.
    assert set(backward.names) - set(ours) <= {"aten::detach", "aten::alias"}


@pytest.mark.gpu
@each_operator(OPERATORS)
def test_memory_without_gradients_is_that_of_the_outputs(fuselage, op):
    inputs = op.inputs((1024, 4096), torch.bfloat16, "cuda")
    op.run(fuselage, inputs, {})
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = op.run(fuselage, inputs, {})
    size = sum(output.numel() * output.element_size() for output in outputs.values())
    assert torch.cuda.max_memory_allocated() - before == size


@each_operator(OPERATORS)
def test_autocast_of_one_dtype(fuselage, device, op):
    """Left alone, but for the norms of a GPU, which are in float32 (docs/autocast.md)."""
    widened = device == "cuda" and op.has_eps
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.inputs(SHAPE, dtype, device)
        expected = op.run(fuselage, inputs, {})
        with torch.autocast(device, dtype=torch.bfloat16):
            outputs = op.run(fuselage, inputs, {})
            leaves = leaves_of(inputs)
            trained = op.run(fuselage, leaves, {})
        trained["out"].sum().backward()
        for name in op.outputs:
            assert_same_bits(trained[name].detach(), outputs[name], name)
            if widened and (name == "out" or op.rounds_terms):  # a sum with a norm is as wide
                assert outputs[name].dtype == torch.float32
            else:
                assert_same_bits(outputs[name], expected[name], name)
        assert all(leaf.grad.dtype == dtype for leaf in leaves.values())
