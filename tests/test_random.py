"""Random shapes, layouts, dtypes and options against the reference."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

import torch
from harness import DTYPES, check_gradients, check_values, each_operator, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import OPERATORS


@st.composite
def shapes(draw) -> tuple[int, ...]:
    lead = draw(st.lists(st.integers(1, 6), max_size=3))
    around_a_power = st.builds(
        lambda p, d: max(1, 2**p + d), st.integers(0, 12), st.integers(-2, 2)
    )
    return (*lead, draw(st.integers(1, 300) | around_a_power))


@st.composite
def views(draw, shape, dtype, device) -> torch.Tensor:
    """A tensor of this shape: padded, stepped, offset, permuted or expanded at random."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    starts = [draw(st.integers(0, 3)) for _ in shape]
    expanded = [draw(st.sampled_from([False] * 5 + [True])) for _ in shape]
    sizes = [
        1 if wide else start + size * step
        for size, step, start, wide in zip(shape, steps, starts, expanded, strict=True)
    ]
    if draw(st.booleans()):  # most tensors are contiguous
        return normal(shape, dtype, device)
    buffer = normal([sizes[i] for i in order], dtype, device)
    back = [order.index(i) for i in range(len(shape))]
    view = buffer.permute(back)
    for axis, (size, step, start, wide) in enumerate(
        zip(shape, steps, starts, expanded, strict=True)
    ):
        if not wide:
            view = view.narrow(axis, start, size * step)
            view = view[(slice(None),) * axis + (slice(None, None, step),)]
    return view.expand(shape)


@pytest.mark.long
@each_operator(OPERATORS)
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_calls(fuselage, device, op, data):
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    style = data.draw(st.sampled_from(sorted(op.styles)), label="style")
    shape = data.draw(shapes(), label="shape")
    inputs = op.inputs(shape, dtype, device, style)
    for name in op.row_inputs:
        inputs[name] = data.draw(views(inputs[name].shape, dtype, device), label=name)
    for name in op.vector_inputs:
        if inputs[name] is not None:
            weight = inputs[name]
            inputs[name] = data.draw(views(weight.shape, weight.dtype, device), label=name)
    options = op.options(style)
    if op.has_eps:
        options = {**options, "eps": data.draw(st.sampled_from([1e-6, 1e-5, 1e-2]), label="eps")}
    outputs = check_values(op, fuselage, inputs, options)
    grad_outs = {
        name: data.draw(views(shape, output.dtype, device), label=f"grad_{name}")
        for name, output in outputs.items()
    }
    requires = data.draw(st.sets(st.sampled_from(op.differentiable(inputs)), min_size=1))
    if requires == set(op.vector_inputs):  # the only gradient is that of `out`
        grad_outs = {"out": grad_outs["out"]}
    check_gradients(op, fuselage, inputs, options, requires=requires, grad_outs=grad_outs)
