"""group_norm: values, gradients and layouts against float64, and what is promised besides."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import (
    HALVES,
    assert_close,
    assert_same_bits,
    captured_by_a_graph,
    check_no_worse,
    compare_gradients,
    each_dtype,
    gradients,
    normal,
    on_devices,
    reference_gradients,
)
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from operators import GROUP_NORM as OP
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

each_style = pytest.mark.parametrize("style", OP.styles)
each_order = pytest.mark.parametrize("last", [False, True], ids=["flat", "channels_last"])


def channels_last(x: Tensor) -> Tensor:
    """The same values, with the channels innermost in memory."""
    return x if x.dim() < 3 else x.movedim(1, -1).contiguous().movedim(-1, 1)


def is_channels_last(x: Tensor) -> bool:
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def in_order(x: Tensor, last: bool) -> Tensor:
    return channels_last(x) if last else x


def run(kernel, inputs: dict, options: dict) -> dict[str, Tensor]:
    return OP.run(kernel, inputs, options)


def check(kernel, inputs: dict, options: dict, grad_out: Tensor | None = None) -> None:
    """Values and gradients are the reference's; results lie in memory as `x` does."""
    x = inputs["x"]
    with torch.no_grad():
        out = run(kernel, inputs, options)["out"]
    expected = OP.run_reference(inputs, options)["out"]
    assert out.dtype == x.dtype and out.shape == x.shape
    assert out.is_contiguous() or is_channels_last(out)
    terms = OP.run_output_terms(inputs, options)["out"]
    assert_close(out, expected, "out", terms=terms)
    grad_outs = {"out": torch.randn_like(out) if grad_out is None else grad_out}
    needed = OP.differentiable(inputs)
    call = lambda leaves, opts: run(kernel, leaves, opts)  # noqa: E731
    actual = gradients(call, inputs, options, grad_outs, needed)
    compare_gradients(OP, inputs, options, grad_outs, actual, needed)


# (shape, groups). Of every size that kernels tell apart: one position, few and many channels of a
# group, groups and planes that do not start on vectors, and groups that are cut into chunks.
SMALL = (
    ((3, 8), 2),
    ((2, 12), 12),
    ((4, 30), 1),
    ((2, 8, 5), 4),
    ((3, 30, 17, 19), 5),
    ((2, 6, 2, 3, 4), 3),
    ((1, 1, 7, 7), 1),
    ((2, 64, 8, 8), 32),
    ((2, 320, 4, 4), 32),
    ((1, 513, 3, 3), 27),
)
LARGE = (
    ((1, 4, 300, 301), 1),
    ((1, 300, 40, 40), 2),
    ((2, 16, 128, 80), 4),
)
LARGE_ON_GPU = (
    *LARGE,
    ((2, 96, 20, 24), 2),
    ((1, 40, 96, 128), 4),
    ((3, 384, 10, 9), 128),
    ((2, 1280, 32, 32), 32),
    ((2, 640, 64, 64), 32),
    ((1, 128, 256, 256), 32),
    ((1, 32, 701, 1003), 4),
    ((1, 5000, 9, 9), 4),
    ((1, 1024, 48, 48), 1),
    ((1, 9000, 3, 5), 2),
    ((1, 2, 3, 700, 700), 1),
    ((70, 32, 16, 16), 32),
    ((2, 66, 16, 8), 2),
    ((3, 320, 8, 8), 4),
    # Held by all multiprocessors together: chunks of one channel, of two and of many, the last of
    # which is short; and more groups than are held at once.
    ((3, 16, 512, 256), 4),
    ((2, 9, 500, 424), 3),
    ((1, 1200, 24, 56), 2),
    ((2, 128, 256, 512), 32),
    # In half precision, nearly all that can be held.
    ((1, 4, 1600, 2048), 1),
    # Channels last, all samples are held; groups start within vectors.
    ((2, 320, 96, 128), 32),
    ((1, 1000, 64, 72), 8),
    ((1, 96, 256, 272), 32),
)


@each_dtype
@each_style
@each_order
@pytest.mark.parametrize(("shape", "groups"), SMALL, ids=str)
def test_values_and_gradients(fuselage, device, dtype, style, last, shape, groups):
    inputs = OP.inputs(shape, dtype, device, style)
    inputs["x"] = in_order(inputs["x"], last)
    check(fuselage, inputs, OP.options(style) | {"num_groups": groups})


@each_dtype
@each_order
@on_devices(LARGE, LARGE_ON_GPU, names="sizes")
@pytest.mark.parametrize("style", ["torch", "silu"])
def test_large_groups(fuselage, device, dtype, style, last, sizes):
    shape, groups = sizes
    inputs = OP.inputs(shape, dtype, device, style)
    inputs["x"] = in_order(inputs["x"], last)
    check(fuselage, inputs, OP.options(style) | {"num_groups": groups})


@pytest.mark.kernels_ci
@each_order
@pytest.mark.parametrize("style", ["torch", "silu"])
def test_values_in_half_precision(fuselage, device, style, last):
    inputs = OP.inputs((2, 64, 9, 10), torch.bfloat16, device, style)
    inputs["x"] = in_order(inputs["x"], last)
    check(fuselage, inputs, OP.options(style) | {"num_groups": 8})


# Layouts


SHAPE = (4, 12, 6, 10)
LAYOUTS = {
    "contiguous": lambda make: make(*SHAPE),
    "channels_last": lambda make: channels_last(make(*SHAPE)),
    "every_second_sample": lambda make: make(8, 12, 6, 10)[::2],
    "every_second_sample_channels_last": lambda make: channels_last(make(8, 12, 6, 10))[::2],
    "some_channels": lambda make: make(4, 20, 6, 10)[:, 3:15],
    "some_channels_channels_last": lambda make: channels_last(make(4, 20, 6, 10))[:, 3:15],
    "one_sample_of_all": lambda make: make(1, 12, 6, 10).expand(SHAPE),
    "expanded_channels": lambda make: make(4, 1, 6, 10).expand(SHAPE),
    "expanded_scalar": lambda make: make(1, 1, 1, 1).expand(SHAPE),
    "transposed": lambda make: make(4, 12, 10, 6).transpose(2, 3),
    "samples_inside": lambda make: make(12, 4, 6, 10).transpose(0, 1),
    "cropped": lambda make: make(4, 12, 8, 12)[:, :, 1:7, 1:11],
    "misaligned": lambda make: make(math.prod(SHAPE) + 1)[1:].view(SHAPE),
    "misaligned_channels_last": lambda make: (
        make(math.prod(SHAPE) + 1)[1:].view(4, 6, 10, 12).movedim(-1, 1)
    ),
}
IN_PLACE_LAST = ("channels_last", "every_second_sample_channels_last", "misaligned_channels_last")


@each_dtype
@pytest.mark.parametrize("style", ["torch", "silu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fuselage, device, dtype, layout, style):
    inputs = OP.inputs(SHAPE, dtype, device, style)
    inputs["x"] = LAYOUTS[layout](lambda *shape: normal(shape, dtype, device))
    options = OP.options(style) | {"num_groups": 3}
    check(fuselage, inputs, options)
    out = run(fuselage, inputs, options)["out"]
    assert is_channels_last(out) == (layout in IN_PLACE_LAST)
    assert out.is_contiguous() != (layout in IN_PLACE_LAST)


@pytest.mark.kernels_ci
@each_dtype
@each_order
@on_devices([(31, 33), (48, 64)], [(31, 33), (48, 64), (256, 264), (512, 272)], names="size")
def test_bits_do_not_depend_on_alignment(fuselage, device, dtype, last, size):
    """Of `x` and of the gradient; nor on the stride between samples."""
    x, grad_out = (in_order(normal((2, 24, *size), dtype, device), last) for _ in range(2))
    shape = (2, *size, 24) if last else x.shape

    def moved(t: Tensor, offset: int) -> Tensor:
        memory = torch.zeros(t.numel() + offset, dtype=dtype, device=device)[offset:].view(shape)
        view = memory.movedim(-1, 1) if last else memory
        return view.copy_(t)

    found = []
    for offset in (0, 1, 3):
        leaf = moved(x, offset).requires_grad_()
        out = fuselage.group_norm(leaf, 4, activation="silu")
        (grad,) = torch.autograd.grad(out, leaf, moved(grad_out, offset))
        found.append((out.detach(), grad))
    for out, grad in found[1:]:
        assert_same_bits(out, found[0][0], "out")
        assert_same_bits(grad, found[0][1], "gradient")


@each_dtype
@each_order
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded_scalar", "transposed"])
def test_gradients_of_any_layout(fuselage, device, dtype, last, layout):
    inputs = OP.inputs(SHAPE, dtype, device)
    inputs["x"] = in_order(inputs["x"], last)
    grad_out = LAYOUTS[layout](lambda *shape: normal(shape, dtype, device))
    check(fuselage, inputs, {"num_groups": 3}, grad_out)
    leaf = inputs["x"].requires_grad_()
    fuselage.group_norm(leaf, 3).backward(grad_out)
    assert is_channels_last(leaf.grad) == last


def test_vectors_that_are_strided(fuselage, device):
    inputs = OP.inputs(SHAPE, torch.float32, device)
    for name in ("weight", "bias"):
        inputs[name] = torch.stack((inputs[name], inputs[name]), -1)[:, 0]
    check(fuselage, inputs, {"num_groups": 3})


# Numbers


@each_dtype
@each_order
@pytest.mark.parametrize("mean", [30.0, -1000.0])
def test_a_mean_that_is_large(fuselage, device, dtype, last, mean):
    """Deviations do not cancel: what is left is what the rounding of the mean costs."""
    inputs = {"x": in_order(normal((2, 8, 64, 65), dtype, device, mean=mean), last)}
    check(fuselage, inputs, {"num_groups": 2})


@each_dtype
@each_order
@on_devices(((2, 64, 24, 24),), ((2, 64, 24, 24), (2, 320, 64, 64)), names="shape")
@each_style
def test_no_worse_than_pytorch(fuselage, device, dtype, last, shape, style):
    inputs = OP.inputs(shape, dtype, device, style)
    inputs["x"] = in_order(inputs["x"], last)
    options = OP.options(style) | {"num_groups": 32}
    out, plain = run(fuselage, inputs, options)["out"], OP.run_eager(inputs, options)["out"]
    check_no_worse(out, plain, OP.run_reference(inputs, options)["out"], "out")
    grad_outs = {"out": torch.randn_like(out)}
    needed = OP.differentiable(inputs)
    ours = gradients(lambda i, o: run(fuselage, i, o), inputs, options, grad_outs, needed)
    theirs = gradients(OP.run_eager, inputs, options, grad_outs, needed)
    exact = reference_gradients(OP, inputs, options, grad_outs)
    for name in needed:
        check_no_worse(ours[name], theirs[name], exact[name], f"grad_{name}")


@each_order
@on_devices([(5, 7), (80, 96)], [(5, 7), (80, 96), (256, 512), (512, 520)], names="size")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_stays_in_its_group(fuselage, device, last, size, bad):
    x = normal((2, 8, *size), torch.float32, device)
    x[1, 5, 2, 3] = bad
    out = fuselage.group_norm(in_order(x, last), 4)
    expected = torch.zeros_like(x, dtype=torch.bool)
    expected[1, 4:6] = True
    assert torch.equal(out.isnan(), expected)


@each_dtype
@each_order
@on_devices([(33, 35), (64, 96)], [(33, 35), (64, 96), (512, 512)], names="size")
def test_values_that_are_all_alike(fuselage, device, dtype, last, size):
    inputs = OP.inputs((2, 8, *size), dtype, device)
    inputs["x"] = in_order(torch.full_like(inputs["x"], 3.3), last)
    check(fuselage, inputs, {})


# Promises


@each_dtype
@each_order
@on_devices(
    (((5, 16, 9, 11), 4), ((3, 8, 150, 151), 2)),
    (
        ((5, 16, 9, 11), 4),
        ((3, 8, 150, 151), 2),
        ((3, 64, 32, 48), 4),
        ((40, 64, 64, 64), 8),
        ((3, 32, 512, 509), 4),
        ((3, 16, 512, 264), 4),
        ((3, 320, 96, 128), 32),
    ),
    names="sizes",
)
@pytest.mark.parametrize("style", ["torch", "silu"])
def test_samples_do_not_depend_on_the_batch(fuselage, device, dtype, last, sizes, style):
    """Nor on the number of threads; and again it is the same bits."""
    shape, groups = sizes
    inputs = OP.inputs(shape, dtype, device, style)
    inputs["x"] = in_order(inputs["x"], last)
    options = OP.options(style) | {"num_groups": groups}
    grad_out = torch.randn_like(inputs["x"])

    def both_ways(chosen: slice) -> dict[str, Tensor]:
        given = inputs | {"x": in_order(inputs["x"][chosen].clone(), last)}
        grad_outs = {"out": grad_out[chosen]}
        with torch.no_grad():
            out = run(fuselage, given, options)["out"]
        found = gradients(lambda i, o: run(fuselage, i, o), given, options, grad_outs, given)
        return {"out": out, **found}

    whole, again = both_ways(slice(None)), both_ways(slice(None))
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        others = both_ways(slice(None))
    finally:
        torch.set_num_threads(threads)
    for name, t in whole.items():
        assert_same_bits(again[name], t, name)
        assert_same_bits(others[name], t, f"{name} with another number of threads")
    for chosen in (slice(0, 1), slice(shape[0] - 1, None), slice(1, 3)):
        some = both_ways(chosen)
        for name in ("out", "x"):
            assert_same_bits(some[name], whole[name][chosen], f"{name} of {chosen}")


@pytest.mark.kernels_ci
@each_order
def test_gradients_that_are_not_needed(fuselage, device, last):
    inputs = OP.inputs((2, 8, 5, 6), torch.float32, device)
    inputs["x"] = in_order(inputs["x"], last)
    grad_outs = {"out": torch.randn_like(inputs["x"])}
    for needed in (("x",), ("weight",), ("bias",), ("x", "bias"), ("weight", "bias")):
        actual = gradients(lambda i, o: run(fuselage, i, o), inputs, {}, grad_outs, needed)
        compare_gradients(OP, inputs, {}, grad_outs, actual, needed)


@each_dtype
@pytest.mark.parametrize("shape", [(0, 8, 3), (2, 8, 0), (0, 4), (2, 8, 3, 0, 2)], ids=str)
def test_of_nothing(fuselage, device, dtype, shape):
    inputs = OP.inputs(shape, dtype, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    out = fuselage.group_norm(**leaves, num_groups=2, activation="silu")
    out.sum().backward()
    assert out.shape == shape and out.is_contiguous()
    assert not leaves["weight"].grad.any() and not leaves["bias"].grad.any()


@pytest.mark.slow
@each_order
@on_devices([], [HALVES[1]], names="half")
def test_more_than_2_31_elements(fuselage, device, half, last):
    """Samples past 2^31 elements; the last has the bits that it has alone."""
    x = torch.zeros((70, 32, 1024, 1024), dtype=half, device=device)
    x = x.view(70, 1024, 1024, 32).movedim(-1, 1) if last else x
    x[-1] = normal((32, 1024, 1024), half, device)
    out = fuselage.group_norm(x, 4, activation="silu")
    alone = fuselage.group_norm(in_order(x[-1:].clone(), last), 4, activation="silu")
    assert_same_bits(out[-1:], alone, "out")
    assert not out[0].any()


@each_order
@on_devices([], [(64, 96), (256, 264), (512, 264)], names="size")
def test_cuda_graphs(fuselage, device, last, size):
    x = in_order(normal((2, 64, *size), torch.bfloat16, device), last)
    call = lambda: (fuselage.group_norm(x, 8, activation="silu"),)  # noqa: E731
    graph, (out,) = captured_by_a_graph(call)
    x.copy_(normal(x.shape, torch.bfloat16, device))
    graph.replay()
    assert_same_bits(out, call()[0], "out")


@each_order
@on_devices([], [torch.bfloat16, torch.float32], names="dtype")
def test_streams_that_run_at_once(fuselage, device, dtype, last):
    """Kernels that want all multiprocessors do not wait for each other's blocks."""
    x = in_order(normal((2, 32 if last else 16, 512, 264), dtype, device), last)
    call = lambda: fuselage.group_norm(x, 4, activation="silu")  # noqa: E731
    expected = call()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    for out in found:
        assert_same_bits(out, expected, "out")


# What is refused


def test_refusals(fuselage, device):
    x = normal((2, 12, 3), torch.float32, device)
    for words, call in (
        (r"`x` must be \[samples, channels, ...\], got \[12\]", lambda: (x[0, :, 0], 3)),
        (
            r"`num_groups` must divide the second dimension of `x` \[2, 12, 3\], got 5",
            lambda: (x, 5),
        ),
        (r"`num_groups` must divide .*, got 0", lambda: (x, 0)),
        (r"`num_groups` must divide .*, got -2", lambda: (x, -2)),
        (r"`x` must be float16, bfloat16 or float32, got Double", lambda: (x.double(), 3)),
        (r"`weight` must have shape \[12\], .* got \[11\]", lambda: (x, 3, x[0, :11, 0])),
        (r"`bias` must have shape \[12\], .* got \[1, 12\]", lambda: (x, 3, None, x[:1, :, 0])),
        (
            r"`weight` must be float32 as `x`, or float32, got bfl",
            lambda: (x, 3, x[0, :, 0].bfloat16()),
        ),
        (r"`eps` must be finite and not negative, got -1", lambda: (x, 3, None, None, -1.0)),
    ):
        with pytest.raises(RuntimeError, match=r"group_norm: " + words):
            fuselage.group_norm(*call())
    with pytest.raises(RuntimeError, match=r"`activation` must be one of silu, got 'relu'"):
        fuselage.group_norm(x, 3, activation="relu")


# torch.compile


@pytest.mark.long
@each_order
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile(fuselage, device, backend, last):
    torch._dynamo.reset()
    weight, bias = (normal((8,), torch.float32, device) for _ in range(2))

    def function(x, weight, bias):
        return fuselage.group_norm(x * 2, 4, weight, bias, activation="silu") * 2

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    frames = None
    for batch in (3, 5, 9):
        x = in_order(normal((batch, 8, 6, 7), torch.float32, device), last)
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        others = [t.detach().requires_grad_() for t in (x, weight, bias)]
        out, expected = compiled(*leaves), function(*others)
        assert_same_bits(out.detach(), expected.detach(), "out")
        assert out.stride() == expected.stride()
        out.sum().backward()
        expected.sum().backward()
        for ours, theirs in zip(leaves, others, strict=True):
            assert_same_bits(ours.grad, theirs.grad, "gradient")
        frames = frames or counter.frame_count
        assert counter.frame_count == frames, "compiled again"


# The module and the layer


@each_dtype
@pytest.mark.parametrize("activation", [None, "silu"])
def test_module(fuselage, device, dtype, activation):
    module = fuselage.modules.GroupNorm(
        4, 12, 1e-3, activation=activation, device=device, dtype=dtype
    )
    plain = torch.nn.GroupNorm(4, 12, 1e-3, device=device, dtype=dtype)
    assert module.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        module.weight.normal_()
        module.bias.normal_()
    x = normal((2, 12, 5, 5), dtype, device)
    expected = fuselage.group_norm(x, 4, module.weight, module.bias, 1e-3, activation=activation)
    assert_same_bits(module(x).detach(), expected.detach(), "out")
    shown = (
        f"4, 12, eps=0.001, affine=True{', activation=' + repr(activation) if activation else ''}"
    )
    assert module.extra_repr() == shown


def test_module_without_parameters(fuselage, device):
    module = fuselage.modules.GroupNorm(4, 12, affine=False)
    x = normal((2, 12, 5), torch.float32, device)
    assert not list(module.parameters())
    assert_same_bits(module(x), fuselage.group_norm(x, 4), "out")
    with pytest.raises(
        RuntimeError, match=r"GroupNorm of 12 channels got an input of shape \(2, 8"
    ):
        module(x[:, :8])
    with pytest.raises(RuntimeError, match=r"`num_groups` must divide `num_channels` 12, got 5"):
        fuselage.modules.GroupNorm(5, 12)


@each_order
@pytest.mark.parametrize("affine", [True, False])
def test_layer(fuselage, device, last, affine):
    """Given to torch.nn.GroupNorm by kernelize."""
    from kernels import use_kernel_forward_from_hub

    @use_kernel_forward_from_hub("GroupNorm")
    class Norm(torch.nn.GroupNorm):
        pass

    norm = Norm(4, 12, affine=affine).to(device)
    x = in_order(normal((2, 12, 6, 5), torch.float32, device), last)
    expected = F.group_norm(x, 4, norm.weight, norm.bias, norm.eps)
    path = Path(fuselage.__file__).parent
    repository = LocalLayerRepository(path, layer_name="GroupNorm")
    with use_kernel_mapping({"GroupNorm": {device: repository}}, inherit_mapping=False):
        kernelize(norm, mode=Mode.TRAINING, device=device, use_fallback=False)
    assert "group_norm" in norm.forward.__func__.__code__.co_names
    out = norm(x)
    assert_same_bits(
        out.detach(), fuselage.group_norm(x, 4, norm.weight, norm.bias, norm.eps).detach(), "out"
    )
    torch.testing.assert_close(out, expected)
