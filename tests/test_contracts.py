"""The other contracts: determinism, batch invariance, errors, streams, devices, CUDA graphs."""

from __future__ import annotations

import re

import pytest
import torch
from harness import (
    assert_same_bits,
    check_gradients,
    check_values,
    each_dtype,
    each_operator,
    on_devices,
    random_grad_outs,
)
from operators import OPERATORS

DIMS = (
    1,
    7,
    8,
    64,
    100,
    128,
    768,
    1024,
    2880,
    4096,
    4097,
    8192,
    12288,
    16384,
    32768,
    65536,
    262144,
)
CPU_DIMS = (1, 7, 8, 100, 128, 1023, 4096, 4097, 65536)


def run_both_ways(op, kernel, inputs: dict, grad_outs: dict | None = None) -> dict:
    """Outputs and gradients, by name."""
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    outputs = op.run(kernel, leaves, {})
    grad_outs = random_grad_outs(outputs) if grad_outs is None else grad_outs
    grads = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), list(grad_outs.values())
    )
    named = {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: t.detach() for name, t in outputs.items()} | named


# Determinism and batch invariance


@each_operator(OPERATORS)
@each_dtype
@on_devices(CPU_DIMS, DIMS)
def test_same_inputs_same_bits(fuselage, device, op, dtype, dim):
    inputs = op.inputs((max(3, (1 << 17) // dim), dim), dtype, device)
    grad_outs = random_grad_outs(op.run(fuselage, inputs, {}))
    first = run_both_ways(op, fuselage, inputs, grad_outs)
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            again = run_both_ways(op, fuselage, inputs, grad_outs)
        finally:
            torch.set_num_threads(threads)
        for name, expected in first.items():
            assert_same_bits(again[name], expected, name)


def check_batch_invariance(op, kernel, inputs: dict, sizes=(1, 2, 5, 16)) -> None:
    rows = inputs[op.main].shape[0]
    grad_outs = random_grad_outs(op.run(kernel, inputs, {}))
    batch = run_both_ways(op, kernel, inputs, grad_outs)
    of_rows = [*op.outputs, *(f"grad_{name}" for name in op.row_inputs)]
    for size in sizes:
        for begin in {0, 3, rows - size}:
            part = slice(begin, begin + size)
            some = {n: t[part] if n in op.row_inputs else t for n, t in inputs.items()}
            alone = run_both_ways(op, kernel, some, {n: g[part] for n, g in grad_outs.items()})
            for name in of_rows:
                label = f"{name} of rows {begin}..{begin + size} of {rows}"
                assert_same_bits(alone[name], batch[name][part], label)


@each_operator(OPERATORS)
@each_dtype
@on_devices(CPU_DIMS, DIMS)
def test_rows_do_not_depend_on_the_batch(fuselage, device, op, dtype, dim):
    rows = 37 if dim > 16384 else 133
    check_batch_invariance(op, fuselage, op.inputs((rows, dim), dtype, device))


@each_operator(OPERATORS)
@on_devices((100, 4097), (64, 100, 500, 511, 512, 1024, 2048, 4096, 8192, 12288))
def test_rows_do_not_depend_on_a_large_batch(fuselage, device, op, dim):
    rows = 1 << 10 if device == "cpu" else 1 << 15
    inputs = op.inputs((rows, dim), torch.bfloat16, device)
    check_batch_invariance(op, fuselage, inputs, sizes=(1, 300))


@each_operator(OPERATORS)
@pytest.mark.parametrize("wider_by", [3, 8])
@on_devices((100, 4096), (100, 1024, 4096, 8192, 12288))
def test_rows_of_a_wider_tensor_do_not_depend_on_the_batch(fuselage, device, op, dim, wider_by):
    inputs = op.inputs((37, dim), torch.bfloat16, device)
    for name in op.row_inputs:
        wide = op.inputs((37, dim + wider_by), torch.bfloat16, device)[name]
        inputs[name] = wide[:, : op.width * dim]
    check_batch_invariance(op, fuselage, inputs)


# Errors


def refuses(op, kernel, inputs: dict, options: dict, *words: str) -> None:
    """With and without gradients: RuntimeError, with the name of the op and all of the words."""
    for requires_grad in (False, True):
        leaves = {
            name: t.clone().requires_grad_(requires_grad and t.is_floating_point())
            if isinstance(t, torch.Tensor)
            else t
            for name, t in inputs.items()
        }
        with pytest.raises(RuntimeError) as caught:
            op.run(kernel, leaves, options)
        message = str(caught.value)
        assert message.startswith(f"fuselage::{op.name}: "), message
        for word in words:
            assert re.search(word, message), f"{word!r} not in {message!r}"


@pytest.mark.kernels_ci
@each_operator(OPERATORS)
@pytest.mark.parametrize("wrong", [torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_a_wrong_dtype_of_everything(fuselage, device, op, wrong):
    inputs = {name: t.to(wrong) for name, t in op.inputs((3, 8), torch.float32, device).items()}
    got = {
        torch.float64: "(?i)double|float64",
        torch.int32: "(?i)int",
        torch.bool: "(?i)bool",
        torch.float8_e4m3fn: "(?i)float8_e4m3fn",
    }[wrong]
    refuses(op, fuselage, inputs, {}, f"`{op.main}` must be float16, bfloat16 or float32, got", got)


@pytest.mark.kernels_ci
@each_operator(OPERATORS)
def test_a_wrong_dtype_of_one_input(fuselage, device, op):
    for dtype, wrong, needs in (
        (torch.float32, torch.float64, "float32"),
        (torch.float32, torch.float16, "float32.* got float16"),
        (torch.float16, torch.bfloat16, "float16.* got bfloat16"),
        (torch.bfloat16, torch.int64, "bfloat16.* got Long"),
    ):
        inputs = op.inputs((3, 8), dtype, device)
        for name in (*op.row_inputs[1:], *op.vector_inputs):
            refuses(op, fuselage, {**inputs, name: inputs[name].to(wrong)}, {}, f"`{name}`", needs)
    inputs = op.inputs((3, 8), torch.bfloat16, device)
    for name in op.row_inputs[1:]:
        refuses(
            op, fuselage, {**inputs, name: inputs[name].float()}, {}, f"`{name}`", "got float32"
        )


@pytest.mark.kernels_ci
@each_operator(OPERATORS)
def test_a_wrong_shape(fuselage, device, op):
    inputs = op.inputs((3, 8), torch.float32, device)
    for name in op.row_inputs[1:]:
        for wrong, got in (
            (inputs[name][:2], r"got \[2, 8\]"),
            (inputs[name][:, :7], r"got \[3, 7\]"),
            (inputs[name][None], r"got \[1, 3, 8\]"),
            (inputs[name][0], r"got \[8\]"),
            (inputs[name][0, 0], r"got \[\]"),
        ):
            refuses(op, fuselage, {**inputs, name: wrong}, {}, f"`{name}`", r"\[3, 8\]", got)
    for name in set(op.vector_inputs) - set(op.free_shapes):
        size = op.vector_size(name, 8)
        for wrong, got in (
            (inputs[name][: size - 1], rf"got \[{size - 1}\]"),
            (inputs[name][:0], r"got \[0\]"),
            (inputs[name][None], rf"got \[1, {size}\]"),
            (inputs[name][0], r"got \[\]"),
            (inputs[name].repeat(2), rf"got \[{2 * size}\]"),
        ):
            needs = rf"shape \[{size}\]"
            refuses(op, fuselage, {**inputs, name: wrong}, {}, f"`{name}`", needs, got)
    scalars = {name: t.flatten()[0] for name, t in inputs.items()}
    refuses(
        op, fuselage, scalars, {}, f"`{op.main}` must have at least one dimension, got a scalar"
    )


@pytest.mark.gpu
@each_operator(OPERATORS)
def test_inputs_on_different_devices(fuselage, op):
    inputs = op.inputs((3, 8), torch.float32, "cuda")
    for name in (*op.row_inputs[1:], *op.vector_inputs):
        wrong = {**inputs, name: inputs[name].cpu()}
        refuses(op, fuselage, wrong, {}, f"`{name}`", f"device of `{op.main}`.*cuda:0", "got cpu")
        wrong = {n: t.cpu() for n, t in inputs.items()} | {name: inputs[name]}
        refuses(op, fuselage, wrong, {}, f"`{name}`", f"device of `{op.main}`.*cpu", "got cuda:0")
        if torch.cuda.device_count() > 1:
            wrong = {**inputs, name: inputs[name].to("cuda:1")}
            refuses(op, fuselage, wrong, {}, f"`{name}`", "cuda:0", "got cuda:1")


@each_operator(OPERATORS)
def test_an_input_without_data(fuselage, device, op):
    """A meta tensor among real ones must not let an uninitialised result through."""
    inputs = op.inputs((3, 8), torch.float32, device)
    for name in (*op.row_inputs[1:], *op.vector_inputs):
        wrong = {**inputs, name: inputs[name].to("meta")}
        refuses(op, fuselage, wrong, {}, f"`{name}`", "device")


@each_operator(OPERATORS)
def test_meta_tensors(fuselage, op):
    inputs = {n: t.to("meta") for n, t in op.inputs((3, 8), torch.bfloat16, "cpu").items()}
    for output in op.run(fuselage, inputs, {}).values():
        assert output.device.type == "meta" and output.shape == (3, 8)
        assert output.dtype == torch.bfloat16


# Streams and devices


@pytest.mark.gpu
@each_operator(OPERATORS)
def test_current_stream(fuselage, op):
    """The inputs arrive late on a side stream: a launch on another one would read zeros."""
    inputs = op.inputs((512, 4096), torch.bfloat16, "cuda")
    grad_outs = random_grad_outs(op.run(fuselage, inputs, {}))
    expected = run_both_ways(op, fuselage, inputs, grad_outs)
    late = {name: torch.zeros_like(t) for name, t in inputs.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name, t in inputs.items():
            late[name].copy_(t)
        actual = run_both_ways(op, fuselage, late, grad_outs)
    stream.synchronize()
    for name, value in expected.items():
        assert_same_bits(actual[name], value, name)


@pytest.mark.gpu(count=2)
@each_operator(OPERATORS)
def test_other_device(fuselage, op):
    assert torch.cuda.current_device() == 0
    inputs = op.inputs((37, 4096), torch.bfloat16, "cuda:1")
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@each_operator(OPERATORS)
@pytest.mark.parametrize("dim", [100, 4096, 16384, 65536])
def test_cuda_graph(fuselage, op, dim):
    """Forward and backward captured once, replayed on new data."""
    static = op.inputs((64, dim), torch.bfloat16, "cuda")
    grad_outs = random_grad_outs(op.run(fuselage, static, {}))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_both_ways(op, fuselage, static, grad_outs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_both_ways(op, fuselage, static, grad_outs)
    for _ in range(3):
        for t in (*static.values(), *grad_outs.values()):
            t.normal_()
        graph.replay()
        expected = run_both_ways(op, fuselage, static, grad_outs)
        for name, value in expected.items():
            assert_same_bits(captured[name], value, name)


@pytest.mark.gpu
@each_operator(OPERATORS)
def test_cpu_tensors_beside_a_gpu(fuselage, op):
    inputs = op.inputs((37, 100), torch.bfloat16, "cpu")
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})
