"""Plain and gated activations: every function, how they relate, and their tails."""

from __future__ import annotations

import math

import pytest
import torch
from harness import (
    DTYPES,
    assert_close,
    assert_same_bits,
    check_gradients,
    check_values,
    each_dtype,
    each_operator,
    normal,
    on_devices,
)
from operators import GEGLU, SWIGLU_CLAMPED, act_and_mul_operator, plain_operator
from reference import ACTIVATIONS, add_terms, clamp, swiglu_clamped_terms

GATES = ("silu", "gelu", "gelu_tanh", "relu")
PLAIN = [plain_operator(name) for name in ("gelu", "gelu_tanh", "gelu_quick", "relu2")]
PACKED = [act_and_mul_operator(name, gate_first) for name in GATES for gate_first in (True, False)]


@each_operator([*PLAIN, *PACKED])
@each_dtype
@on_devices((1, 7, 96, 1000, 4097), (1, 7, 8, 96, 1000, 2056, 4096, 4097, 11008, 65544))
def test_every_function(fuselage, device, op, dtype, dim):
    for rows in (1, 5):
        inputs = op.inputs((rows, dim), dtype, device)
        check_values(op, fuselage, inputs, {})
        check_gradients(op, fuselage, inputs, {})


@each_operator(PACKED)
@each_dtype
def test_a_packed_tensor_of_a_wider_one(fuselage, device, op, dtype):
    for begin in (0, 1, 8):
        wide = normal((5, 3, 2 * 96 + 16), dtype, device)
        inputs = {"x": wide[..., begin : begin + 2 * 96]}
        check_values(op, fuselage, inputs, {})
        check_gradients(op, fuselage, inputs, {})


@on_devices((), (1032,))
def test_more_rows_than_a_grid_has_blocks_along_y(fuselage, device, dim):
    x = normal((70_001, 2 * dim), torch.bfloat16, device)
    expected = torch.cat([fuselage.silu_and_mul(part) for part in x.split(20_000)])
    assert_same_bits(fuselage.silu_and_mul(x), expected, "out")


def with_gradients(function, *inputs):
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    grad_out = normal(out.shape, out.dtype, "cpu").to(out.device)
    torch.manual_seed(1)
    return out.detach(), torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.kernels_ci
@each_dtype
@on_devices((5, 96, 4097), (5, 96, 4096, 4097, 14336))
def test_packed_and_apart_have_the_same_bits(fuselage, device, dtype, dim):
    gate, up = normal((19, dim), dtype, device), normal((19, dim), dtype, device)
    pairs = (
        (fuselage.swiglu, fuselage.silu_and_mul, fuselage.mul_and_silu),
        (fuselage.geglu, fuselage.gelu_and_mul, fuselage.mul_and_gelu),
        (
            lambda gate, up: fuselage.geglu(gate, up, "gelu_tanh"),
            fuselage.gelu_tanh_and_mul,
            fuselage.mul_and_gelu_tanh,
        ),
    )
    for apart, gate_first, gate_last in pairs:
        torch.manual_seed(1)
        out, (grad_gate, grad_up) = with_gradients(apart, gate, up)
        first, (grad_first,) = with_gradients(gate_first, torch.cat([gate, up], -1))
        last, (grad_last,) = with_gradients(gate_last, torch.cat([up, gate], -1))
        assert_same_bits(first, out, "gate first")
        assert_same_bits(last, out, "gate last")
        assert_same_bits(grad_first, torch.cat([grad_gate, grad_up], -1), "gradient, gate first")
        assert_same_bits(grad_last, torch.cat([grad_up, grad_gate], -1), "gradient, gate last")


@pytest.mark.kernels_ci
@each_dtype
@on_devices((1, 5, 96, 4097), (1, 5, 96, 2880, 4096, 4097))
def test_interleaved_and_halves_have_the_same_bits(fuselage, device, dtype, dim):
    x = 3 * normal((19, 2 * dim), dtype, device)
    halves = torch.cat([x[:, ::2], x[:, 1::2]], -1)
    torch.manual_seed(1)
    out, (grad_x,) = with_gradients(fuselage.swiglu_clamped, x)
    expected, (grad_halves,) = with_gradients(
        lambda x: fuselage.swiglu_clamped(x, interleaved=False), halves
    )
    assert_same_bits(out, expected, "out")
    assert_same_bits(torch.cat([grad_x[:, ::2], grad_x[:, 1::2]], -1), grad_halves, "gradient")


@each_dtype
@pytest.mark.parametrize("begin", [0, 1, 2, 8])
@on_devices((5, 96), (5, 96, 2880))
def test_interleaved_rows_of_a_wider_tensor(fuselage, device, dtype, begin, dim):
    wide = normal((19, 2 * dim + 11), dtype, device)
    inputs = {"x": wide[:, begin : begin + 2 * dim]}
    check_values(SWIGLU_CLAMPED, fuselage, inputs, {})
    check_gradients(SWIGLU_CLAMPED, fuselage, inputs, {})


def test_the_clamp_passes_gradients_at_its_limits(fuselage, device):
    """As torch.clamp before 2.15: none beyond a limit, the gradient at the limit itself."""
    gate = torch.tensor([1.5, 2.0, 2.5, -2.5, -2.0], device=device)
    up = torch.tensor([0.5, 2.0, 2.5, -2.5, -2.0], device=device)
    x = torch.stack([gate, up], -1).flatten().requires_grad_()
    fuselage.swiglu_clamped(x, limit=2.0).sum().backward()
    grad_gate, grad_up = x.grad[::2], x.grad[1::2]
    assert (grad_gate != 0).tolist() == [True, True, False, True, True]
    assert (grad_up != 0).tolist() == [True, True, False, False, True]


def test_gpt_oss(fuselage, device):
    """The layer of transformers itself."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    experts = gpt_oss.GptOssExperts.__new__(gpt_oss.GptOssExperts)
    torch.nn.Module.__init__(experts)
    experts.alpha, experts.limit = 1.702, 7.0
    x = 5 * normal((64, 2 * 2880), torch.float32, device)
    terms = swiglu_clamped_terms(x.double())["out"]
    expected = experts._apply_gate(x.double())
    assert_close(fuselage.swiglu_clamped(x), expected, "out", terms=terms)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("quick_gelu", "gelu_quick"),
        ("relu2", "relu2"),
    ],
)
def test_the_names_of_transformers(fuselage, device, name, function):
    activations = pytest.importorskip("transformers.activations")
    x = normal((64, 96), torch.float32, device)
    expected = activations.ACT2FN[name](x.double())
    terms = add_terms(x.double(), activation=function)["out"]
    # gelu_fast writes sqrt(2 / pi) with ten digits.
    assert_close(getattr(fuselage, function)(x), expected, name, terms=terms)


# Tails

# What is smaller than this may be flushed to zero: e^-|x| below the smallest normal float32, times
# an x of at most 104, where it is zero in any case.
SMALLEST = 104 * torch.finfo(torch.float32).tiny

# Slopes that are the same on both sides of zero, and the side on which float64 autograd does not
# subtract from one what is close to it.
ACCURATE_SIDE = {"sigmoid": -1, "tanh": 1}


def sweep(device) -> torch.Tensor:
    ends = torch.tensor([1e4, 1e10, 1e19, 1e30, 3e38])
    steps = torch.cat([torch.linspace(0, 1, 4001), torch.linspace(1, 128, 40001), ends])
    return torch.cat([-steps.flip(0), steps]).to(device)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
@each_dtype
def test_tails(fuselage, device, activation, dtype):
    """From -3e38 to 3e38: as if the argument were rounded once more, or flushed to zero."""
    x = sweep(device)
    x = x[x.abs() <= torch.finfo(dtype).max].to(dtype)
    leaf = x.clone().requires_grad_()
    out = fuselage.bias_act(leaf, None, activation)
    out.sum().backward()
    exact = x.double().requires_grad_()
    expected = ACTIVATIONS[activation](exact)
    mirrored = x.double()
    if activation in ACCURATE_SIDE:
        mirrored = ACCURATE_SIDE[activation] * mirrored.abs()
    mirrored.requires_grad_()
    # Where the float64 formula of a slope is NaN, it is a product of zero and infinity.
    (slope,) = torch.autograd.grad(ACTIVATIONS[activation](mirrored).sum(), mirrored)
    slope = slope.nan_to_num(nan=0.0)
    terms = add_terms(x.double(), activation=activation)["out"].nan_to_num(nan=0.0)
    ones = torch.ones_like(mirrored)
    slopes = add_terms(mirrored.detach(), activation=activation, grad_out=ones)["x"]
    for label, got, want, sizes in (
        ("value", out.detach(), expected.detach(), terms),
        ("slope", leaf.grad, slope, slopes.nan_to_num(nan=0.0)),
    ):
        wanted = want.to(dtype)
        assert torch.equal(got.isinf(), wanted.isinf()), f"{label} has an infinity too many or few"
        assert not got.isnan().any(), label
        near = want.abs() > SMALLEST
        near &= ~wanted.isinf()
        assert_close(got[near], want[near], label, terms=sizes[near])
        assert (got[~near & ~wanted.isinf()].abs() <= SMALLEST).all(), label


@pytest.mark.kernels_ci
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
@each_dtype
def test_values_at_infinity_and_zero_are_those_of_the_formula(fuselage, device, activation, dtype):
    """NaN where it multiplies zero by infinity, and the sign of a zero."""
    x = torch.tensor([-math.inf, math.inf, math.nan, -0.0, 0.0], dtype=dtype)
    got = fuselage.bias_act(x.to(device), None, activation).cpu()
    expected = ACTIVATIONS[activation](x.double()).to(dtype)
    assert torch.equal(got.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), (got, expected)
    signs = [t[~expected.isnan()].signbit() for t in (got, expected)]
    assert torch.equal(*signs), (got, expected)


# What a mask of zeros and ones would turn into NaN or infinity, and NaN itself.
EXTREME = (-1e38, -8.0, -1.0, 0.0, 0.5, 7.0, 8.0, 1e38, float("inf"), -float("inf"), float("nan"))
SELECTING = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "relu_and_mul": lambda gate, up: torch.relu(gate) * up,
    "mul_and_relu": lambda up, gate: torch.relu(gate) * up,
    "swiglu_clamped": lambda gate, up: (
        (clamp(up, -7, 7) + 1)
        * (clamp(gate, -math.inf, 7) * torch.sigmoid(1.702 * clamp(gate, -math.inf, 7)))
    ),
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", SELECTING)
def test_relu_and_clamp_select_gradients_as_pytorch(fuselage, device, name):
    """Zero where its float32 formula has zero, whatever the gradient is, and the same for NaN."""
    values = torch.tensor(EXTREME, device=device)
    plain = name in ("relu", "relu2")
    inputs = [values] * (2 if plain else 3)
    *inputs, grad_out = (t.flatten() for t in torch.meshgrid(*inputs, indexing="ij"))
    if name == "swiglu_clamped":  # its formula multiplies zero by infinity at large negative gates
        moderate = ~(inputs[0] < -10)
        inputs, grad_out = [t[moderate] for t in inputs], grad_out[moderate]
    calls = {
        "relu": lambda x: fuselage.bias_act(x, None, "relu"),
        "swiglu_clamped": lambda *x: fuselage.swiglu_clamped(torch.cat(x), interleaved=False),
    }
    ours = calls.get(name, lambda *x: getattr(fuselage, name)(torch.cat(x)))
    results = []
    for function in (ours, SELECTING[name]):
        leaves = [t.clone().requires_grad_() for t in inputs]
        results.append(torch.autograd.grad(function(*leaves), leaves, grad_out))
    for label, (actual, expected) in enumerate(zip(*results, strict=True)):
        # A few float32 roundings. What overflows does so in either order of the products.
        close = torch.isclose(actual, expected, rtol=1e-5, atol=0, equal_nan=True)
        # PyTorch adds terms of the sigmoid's slope, which may overflow where a product does not.
        close |= (name == "swiglu_clamped") & ~expected.isfinite() & ~actual.isnan()
        wrong = [
            (*(t[i].item() for t in (*inputs, grad_out, actual, expected)),)
            for i in (~close).nonzero().flatten()[:4]
        ]
        assert not wrong, f"gradient of input {label}: inputs, grad_out, ours, PyTorch's: {wrong}"


def test_selected_gradients_of_an_epilogue(fuselage, device):
    """Of x, bias and y alike."""
    x = torch.tensor([[-1.0, -1.0, float("nan")], [2.0, -3.0, 1.0]], device=device)
    grad_out = torch.tensor([[float("inf"), float("nan"), 2.0], [1.0, 3.0, 1.0]], device=device)
    for activation in ("relu", "relu2"):
        gradients = []
        for call in (
            lambda x, bias, y, a=activation: fuselage.add_mul_act(x, bias, y, 0.5, a),
            lambda x, bias, y, a=activation: SELECTING[a](x + bias + 0.5 * y),
        ):
            leaves = [x.clone(), torch.zeros(3, device=device), torch.zeros_like(x)]
            leaves = [t.requires_grad_() for t in leaves]
            gradients.append(torch.autograd.grad(call(*leaves), leaves, grad_out))
        for ours, pytorch in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, pytorch, equal_nan=True)


def test_tanh_is_as_accurate_as_pytorch(fuselage, device):
    """Float32: half of the last bit of results just below one more than PyTorch errs, at most."""
    x = torch.cat([torch.linspace(0, 10, 200001), torch.linspace(0.5, 1.5, 200001)]).to(device)
    x = torch.cat([-x, x])
    expected = x.double().tanh()
    error = (fuselage.bias_act(x, None, "tanh").double() - expected).abs().max().item()
    pytorch = (x.tanh().double() - expected).abs().max().item()
    assert error <= pytorch + torch.finfo(torch.float32).eps / 4, (error, pytorch)


@each_dtype
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_nan_stays_nan(fuselage, device, activation, dtype):
    x = torch.zeros(100, dtype=dtype, device=device)
    x[[0, 50, 99]] = float("nan")
    out = fuselage.bias_act(x, None, activation)
    assert out.isnan().nonzero().flatten().tolist() == [0, 50, 99]
    for function in (fuselage.silu_and_mul, fuselage.relu_and_mul, fuselage.swiglu_clamped):
        assert function(x).isnan().any()


# Errors


@pytest.mark.kernels_ci
@each_operator([*PACKED, SWIGLU_CLAMPED])
def test_an_odd_packed_dimension_is_refused(fuselage, device, op):
    for target in (device, "meta"):
        with pytest.raises(RuntimeError, match=rf"fuselage::{op.name}: the last dimension of `x`"):
            op.run(fuselage, {"x": torch.zeros(3, 7, device=target)}, {})


@each_operator([*PLAIN, *PACKED])
def test_errors_name_the_function(fuselage, device, op):
    for grad in (False, True):
        with pytest.raises(RuntimeError, match=f"fuselage::{op.name}: `x` must be float16"):
            x = torch.zeros(2, 8, dtype=torch.float64, device=device, requires_grad=grad)
            op.run(fuselage, {"x": x}, {})
    x = torch.ones(2, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"fuselage::{op.name}: the backward is not diff"):
        out = op.run(fuselage, {"x": x}, {})["out"]
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("activation", ["tanh", "silu"])
def test_geglu_refuses_other_activations(fuselage, device, activation):
    inputs = GEGLU.inputs((3, 8), DTYPES[0], device)
    words = rf"^fuselage::geglu: `activation` must be one of gelu, gelu_tanh, got '{activation}'"
    with pytest.raises(RuntimeError, match=words):
        fuselage.geglu(**inputs, activation=activation)


# Modules


@pytest.mark.parametrize("options", [{}, {"activation": "gelu_tanh"}], ids=str)
def test_modules(fuselage, device, options):
    x = normal((3, 5, 16), torch.bfloat16, device)
    gelu = fuselage.modules.GeluAndMul(**options)
    function = fuselage.gelu_tanh_and_mul if options else fuselage.gelu_and_mul
    assert_same_bits(gelu(x), function(x), "GeluAndMul")
    assert_same_bits(fuselage.modules.SiluAndMul()(x), fuselage.silu_and_mul(x), "SiluAndMul")
    assert repr(gelu) == f"GeluAndMul(activation={options.get('activation', 'gelu')!r})"
    with pytest.raises(RuntimeError, match=r"^fuselage::GeluAndMul: `activation` must .* 'tanh'"):
        fuselage.modules.GeluAndMul("tanh")
