"""What the tests of all operators share: descriptions, inputs, tolerances and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import torch
from conftest import DEVICES
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


# Tolerances

# A result is the float64 reference rounded once, but for what float32 arithmetic loses on the way.
# This is the largest relative error of one rounding.
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}

# The float32 roundings an element goes through: about eight for a norm (the sum, its mean, + eps,
# the root, the reciprocal, two products, the weight's offset): a GPU's approximate root counts
# for four and a long sum for a few more. Relative to the largest term of what is added up.
FLOAT32_ROUNDINGS = 16

# Where the formula itself rounds to a half dtype on the way, float32 noise moves a value over a
# rounding boundary this often at most: the noise, to both sides, over the distance between
# boundaries, and twice that as the result is rounded as well.
TIES = {dtype: 2 * FLOAT32_ROUNDINGS * UNIT[torch.float32] / UNIT[dtype] for dtype in HALVES}

# The accuracy contract compares with PyTorch in the same dtype. Of two float32 computations in
# different order either may be better. Over all values, one float32 rounding of the largest is no
# difference. In the worst single value, which rests on the luck of one row, two are none: its row's
# statistics and the value itself are each rounded in either computation.
# The RMS error of half results is that of the last rounding, and has a spread of under 1%.
ACCURACY_SLACK = UNIT[torch.float32]
ACCURACY_RMS_RATIO = 1.01
# The largest error of half results is half an ulp, and the float32 noise that assert_close allows.
HALF_ACCURACY_SLACK = FLOAT32_ROUNDINGS * UNIT[torch.float32]

# Float64 central differences with a step of 1e-5 are good to 1e-9: float32 gradients are the limit.
DIRECTIONAL_TOLERANCE = 1e-5


def half_an_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding the float64 `x` to `dtype`."""
    info = torch.finfo(dtype)
    # The power of two at or below x is its exponent bits. NOTE: not torch.ldexp, which goes wrong
    # where it is the first kernel on a device (pytorch/pytorch#189567).
    power = (x.view(torch.int64) & (0x7FF << 52)).view(torch.float64)
    power = torch.where(x.isfinite(), power, 0.0)
    return (power * (info.eps / 2)).clamp(min=info.tiny * info.eps / 2)


def assert_close(
    actual: Tensor,
    expected: Tensor,
    label: str,
    *,
    terms: Tensor | None = None,
    inner_rounding: torch.dtype | None = None,
    inner_roundings: int = 1,
) -> None:
    """`actual` is the float64 `expected`, rounded once, but for float32 noise.

    Args:
        terms: The size of the largest terms of a sum, where that is larger than the sum.
        inner_rounding: A dtype that the formula rounds to on the way. Noise may turn a few of these
            roundings the other way, and the results after them; all others have the same bits.
        inner_roundings: So many, one after the other.
    """
    assert actual.shape == expected.shape, f"{label}: {tuple(actual.shape)} {tuple(expected.shape)}"
    terms = expected.abs() if terms is None else torch.maximum(terms, expected.abs())
    bound = half_an_ulp(expected, actual.dtype) + FLOAT32_ROUNDINGS * UNIT[torch.float32] * terms
    if inner_rounding in HALVES:
        bound = bound + 2 * inner_roundings * UNIT[inner_rounding] * expected.abs()
        rounded = expected.to(actual.dtype)
        off = (actual.double() - rounded.double()).abs() > FLOAT32_ROUNDINGS * UNIT[
            torch.float32
        ] * terms
        count = expected[off].unique().numel()
        # Half precision has few values: one that lies on a boundary takes with it all of its row
        # that have its size, of normal numbers up to one in 64.
        ties = math.ceil(inner_roundings * TIES[inner_rounding] * off.numel())
        limit = max(2, ties, off.shape[-1] // 64)
        assert count <= limit, f"{label}: {count} of {off.numel()} rounded differently, {limit=}"
    value = actual.double()
    same = (value == expected) | (value.isnan() & expected.isnan())
    bad = ~(same | ((value - expected).abs() <= bound))
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {bad.sum().item()} of {bad.numel()} wrong; "
            f"at {index} got {value[index].item():.9g}, "
            f"expected {expected[index].item():.9g} within {bound[index].item():.3g}"
        )


def assert_same_bits(actual: Tensor, expected: Tensor, label: str) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, label
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integer = integers[actual.element_size()]
    different = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    assert not different.any(), f"{label}: {different.sum().item()} of {different.numel()} differ"


def as_tuple(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


# Operators


@dataclass(frozen=True)
class Style:
    """One way of calling an operator: what its inputs are made with, and its options."""

    inputs: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Operator:
    """A function of the kernel, and what the shared checks need to know about it."""

    name: str
    make_inputs: (
        Callable  # (shape, dtype, device, **style.inputs, **style.options) -> {name: Tensor}
    )
    reference: Callable  # of reference.py
    eager: Callable  # of eager.py
    row_inputs: tuple[str, ...]  # [..., dim], all of one shape and dtype
    vector_inputs: tuple[str, ...]  # [dim], or as long as `vector_sizes` says
    outputs: tuple[str, ...]
    styles: dict[str, Style]
    roundings: tuple[
        str, ...
    ] = ()  # options that only round on the way: gradients know nothing of them
    inner_roundings: int = 1  # of the formula with cast_before_weight
    rounds_terms: bool = False  # to the dtype of the rows, before they are added up
    output_terms: Callable | None = None  # sizes of the terms of the outputs, see assert_close
    gradient_terms: Callable | None = None  # sizes of the terms of the gradients, likewise
    saved: tuple[str, ...] = ()  # what may be kept for the backward
    statistics: int = 1  # float32 values a row that may be kept besides
    vector_sizes: dict[str, int] = field(default_factory=dict)  # of those that are not [dim]
    samples: Callable | None = None  # (kernel, device) -> (op, arguments) of the ops behind it
    defaults: dict = field(default_factory=dict)  # options of every call, unless it says otherwise
    free_shapes: tuple[str, ...] = ()  # inputs that may have more shapes than their own here
    cpu_dtypes: tuple[torch.dtype, ...] = DTYPES  # fewer where another operator has the same code
    width: int = 1  # elements of a row input for one of an output
    op_name: str | None = None  # the op behind it, where it serves several functions
    has_eps: bool = True

    @property
    def main(self) -> str:
        """The input that decides about dtype and device, and that errors compare others with."""
        return self.row_inputs[0]

    @property
    def registered_name(self) -> str:
        return self.op_name or self.name

    def inputs(self, shape, dtype, device, style: str = "torch") -> dict[str, Tensor | None]:
        chosen = self.styles[style]
        return self.make_inputs(tuple(shape), dtype, device, **chosen.inputs, **chosen.options)

    def options(self, style: str) -> dict:
        return self.styles[style].options

    def run(self, kernel, inputs: dict, options: dict) -> dict[str, Tensor]:
        return self._named(getattr(kernel, self.name)(**inputs, **{**self.defaults, **options}))

    def run_eager(self, inputs: dict, options: dict) -> dict[str, Tensor]:
        return self._named(self.eager(**inputs, **{**self.defaults, **options}))

    def run_reference(self, inputs: dict, options: dict) -> dict[str, Tensor]:
        """In float64, of the float64 values of `inputs`; float64 inputs may require gradients."""
        dtype = options.get("dtype", inputs[self.main].dtype)
        options = {**self.defaults, **options}
        inputs = {name: None if t is None else t.to(torch.float64) for name, t in inputs.items()}
        options = {name: o for name, o in options.items() if name not in ("out_dtype", "dtype")}
        return self._named(self.reference(**inputs, **options, dtype=dtype))

    def run_output_terms(self, inputs: dict, options: dict) -> dict[str, Tensor]:
        if self.output_terms is None:
            return {}
        double = {n: None if t is None else t.detach().double() for n, t in inputs.items()}
        terms = self.output_terms(**double, **{**self.defaults, **options})
        terms = terms if isinstance(terms, dict) else self._named(terms)
        return self.with_roundings(terms, inputs)

    def with_roundings(self, terms: dict[str, Tensor], inputs: dict) -> dict[str, Tensor]:
        """Sizes of terms, and what another rounding of each makes, where that is not the last."""
        dtype = inputs[self.main].dtype
        if not self.rounds_terms or dtype not in HALVES:
            return terms
        # A term moves by its last place, and the sum of it may then round one more the other way.
        ties = 4 * UNIT[dtype] / (FLOAT32_ROUNDINGS * UNIT[torch.float32])
        return {name: t * (1 + ties) for name, t in terms.items()}

    def vector_size(self, name: str, dim: int) -> int:
        return self.vector_sizes.get(name, dim)

    def without_roundings(self, options: dict) -> dict:
        return {name: o for name, o in options.items() if name not in self.roundings}

    def differentiable(self, inputs: dict) -> tuple[str, ...]:
        tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor)}
        return tuple(name for name, t in tensors.items() if t.is_floating_point())

    def _named(self, results) -> dict[str, Tensor]:
        return dict(zip(self.outputs, as_tuple(results), strict=True))


# Inputs


def normal(shape, dtype, device, *, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """The same values on every device, unless there are so many that it would take long."""
    source = device if math.prod(shape) > 1 << 24 else "cpu"
    return torch.randn(shape, device=source).mul_(scale).add_(mean).to(device, dtype)


def random_grad_outs(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: normal(t.shape, t.dtype, t.device) for name, t in outputs.items()}


# Each gives a tensor of rows of `dim`, out of a contiguous one that `make(*shape)` returns.
LAYOUTS = {
    "wider": lambda make, dim: make(12, dim + 32)[:, :dim],
    "wider_by_an_odd_number": lambda make, dim: make(12, dim + 3)[:, :dim],
    "misaligned_columns": lambda make, dim: make(12, dim + 8)[:, 1 : dim + 1],
    "misaligned": lambda make, dim: make(12 * dim + 1)[1:].view(12, dim),
    "misaligned_vector": lambda make, dim: make(dim + 1)[1:],
    "every_second_row": lambda make, dim: make(24, dim)[::2],
    "every_second_column": lambda make, dim: make(12, 2 * dim)[:, ::2],
    "expanded_rows": lambda make, dim: make(1, dim).expand(12, dim),
    "expanded_inside": lambda make, dim: make(3, 1, dim).expand(3, 4, dim),
    "expanded_outside": lambda make, dim: make(4, dim).expand(3, 4, dim),
    "expanded_last": lambda make, dim: make(12, 1).expand(12, dim),
    "expanded_scalar": lambda make, dim: make(1, 1).expand(12, dim),
    "transposed": lambda make, dim: make(dim, 12).t(),
    "heads": lambda make, dim: make(2, 3, 2, dim).transpose(1, 2),
    "slice_of_heads": lambda make, dim: make(2, 3, 6, dim)[:, :, 2:4].transpose(1, 2),
    "rows_of_a_slice": lambda make, dim: make(3, 6, dim)[:, 2:4],
    "channels_last": lambda make, dim: make(2, dim, 3, 2).permute(0, 2, 3, 1),
    "sizes_of_one": lambda make, dim: make(12 * dim).as_strided(
        (4, 1, 3, 1, dim), (3 * dim, 5, dim, 7, 1)
    ),
    "one_row_of_many": lambda make, dim: make(4, dim + 3)[2:3, :dim],
    "overlapping": lambda make, dim: make(11 + dim).unfold(0, dim, 1),
}


def rows_in_layout(layout: str, dim: int, dtype, device) -> Tensor:
    return LAYOUTS[layout](lambda *shape: normal(shape, dtype, device), dim)


# Checks


def check_values(op: Operator, kernel, inputs: dict, options: dict) -> dict[str, Tensor]:
    """The outputs are the reference's, contiguous, in the right dtype. Returns them."""
    outputs = op.run(kernel, inputs, options)
    expected = op.run_reference(inputs, options)
    terms = op.run_output_terms(inputs, options)
    dtype = inputs[op.main].dtype
    inner_rounding = dtype if options.get("cast_before_weight") else None
    for name, output in outputs.items():
        wanted = (options.get("out_dtype") if name == "out" else None) or dtype
        assert output.dtype == wanted and output.device == inputs[op.main].device, name
        assert output.is_contiguous(), f"{name} has strides {output.stride()}"
        assert_close(
            output,
            expected[name],
            name,
            terms=terms.get(name),
            inner_rounding=inner_rounding,
            inner_roundings=op.inner_roundings,
        )
    return outputs


def gradients(
    call: Callable, inputs: dict, options: dict, grad_outs: dict, requires: Iterable[str]
) -> dict[str, Tensor | None]:
    """Backward of `call(leaves, options)` from the outputs that have a gradient in `grad_outs`."""
    leaves = {
        name: t.detach().requires_grad_(name in requires) if isinstance(t, Tensor) else t
        for name, t in inputs.items()
    }
    outputs = call(leaves, options)
    torch.autograd.backward([outputs[name] for name in grad_outs], list(grad_outs.values()))
    return {name: t.grad for name, t in leaves.items() if isinstance(t, Tensor)}


def reference_gradients(op: Operator, inputs: dict, options: dict, grad_outs: dict) -> dict:
    """Float64 autograd through the reference."""
    dtype = options.get("dtype", inputs[op.main].dtype)
    options = op.without_roundings(options)
    double = {name: None if t is None else t.detach().double() for name, t in inputs.items()}
    return gradients(
        op.run_reference,
        double,
        {**options, "dtype": dtype},
        {name: g.double() for name, g in grad_outs.items()},
        op.differentiable(inputs),
    )


def terms_of_gradients(op: Operator, inputs: dict, options: dict, grad_outs: dict) -> dict:
    if op.gradient_terms is None:
        return {}
    options = {**op.defaults, **options}
    terms = op.gradient_terms(
        **{name: None if t is None else t.detach().double() for name, t in inputs.items()},
        **{f"grad_{name}": g.double() for name, g in grad_outs.items()},
        **options,
    )
    return op.with_roundings(terms, inputs)


def check_gradients(
    op: Operator,
    kernel,
    inputs: dict,
    options: dict,
    *,
    requires: Iterable[str] | None = None,
    grad_outs: dict | None = None,
) -> dict[str, Tensor | None]:
    """Gradients are those of float64 autograd, and None where not required. Returns them."""
    requires = op.differentiable(inputs) if requires is None else tuple(requires)
    if grad_outs is None:
        with torch.no_grad():
            grad_outs = random_grad_outs(op.run(kernel, inputs, options))
    actual = gradients(
        lambda leaves, opts: op.run(kernel, leaves, opts), inputs, options, grad_outs, requires
    )
    compare_gradients(op, inputs, options, grad_outs, actual, requires)
    return actual


def compare_gradients(op: Operator, inputs, options, grad_outs, actual, requires) -> None:
    expected = reference_gradients(op, inputs, options, grad_outs)
    terms = terms_of_gradients(op, inputs, options, grad_outs)
    for name in op.differentiable(inputs):
        if name not in requires:
            assert actual[name] is None, f"gradient of {name}, which does not require one"
        elif expected[name] is None:
            assert actual[name] is None or not actual[name].any(), f"grad_{name} is not zero"
        else:
            assert actual[name] is not None, f"no gradient of {name}"
            assert actual[name].dtype == inputs[name].dtype
            assert_close(actual[name], expected[name], f"grad_{name}", terms=terms.get(name))


def captured_by_a_graph(run: Callable) -> tuple[torch.cuda.CUDAGraph, tuple]:
    """A CUDA graph of `run()`, and the results that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, run()


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest and the root mean square error, of the largest expected value."""
    difference = (actual.double() - expected).abs()
    scale = expected.abs().max()
    return (difference.max() / scale).item(), (difference.pow(2).mean().sqrt() / scale).item()


def check_no_worse(
    actual: Tensor, eager: Tensor, expected: Tensor, label: str, luck: float = 1.0
) -> None:
    """The error of `actual` is no larger than that of PyTorch's `eager` result.

    `luck`: so many times as large the largest of all errors may be, where each comes of several
    roundings; and their root mean square, of 128 values say, by a twentieth.
    """
    rms_ratio = ACCURACY_RMS_RATIO if luck == 1.0 else 1.05
    largest, rms = errors(actual, expected)
    eager_largest, eager_rms = errors(eager, expected)
    slack = 2 * ACCURACY_SLACK if actual.dtype == torch.float32 else HALF_ACCURACY_SLACK
    assert largest <= luck * eager_largest + slack, (
        f"{label}: largest error {largest:.3g}, PyTorch {eager_largest:.3g}"
    )
    assert rms <= eager_rms * rms_ratio + ACCURACY_SLACK, (
        f"{label}: RMS error {rms:.3g}, PyTorch {eager_rms:.3g}"
    )


# Parameters


def on_devices(cpu: Iterable, cuda: Iterable, names: str = "dim"):
    """Parametrises by device and `names`, with fewer values on the CPU than on the GPU."""
    by_device = {"cpu": cpu, "cuda": cuda}
    values = [(device, value) for device in DEVICES for value in by_device[device]]
    return pytest.mark.parametrize(("device", names), values, indirect=["device"])


def each_style(operators: Iterable[Operator]):
    """Parametrises by operator and each of its styles."""
    pairs = [(op, style) for op in operators for style in op.styles]
    return pytest.mark.parametrize(
        ("op", "style"), pairs, ids=[f"{op.name}-{style}" for op, style in pairs]
    )


def each_operator(operators: Iterable[Operator], in_ci: Iterable[str] = ()):
    """A test of each operator; of those named by `in_ci`, marked kernels_ci."""
    operators = [
        pytest.param(op, marks=pytest.mark.kernels_ci) if op.name in in_ci else op
        for op in operators
    ]
    return pytest.mark.parametrize("op", operators, ids=lambda op: op.name)


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[-1])
