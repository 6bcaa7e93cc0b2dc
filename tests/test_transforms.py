"""Gradients by torch.func: grad, vjp and jacrev, alone and with vmap, in either order."""

from __future__ import annotations

import calls
import pytest
import torch
from calls import is_differentiable
from harness import as_tuple, assert_same_bits, normal
from torch import Tensor, func

# One of each description of a gradient (`differentiable`).
FUNCTIONS = (
    "add_mul_act",
    "ada_layer_norm",
    "ada_rms_norm",
    "apply_rotary",
    "bias_act",
    "cross_entropy",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_mul_poly_norm",
    "gate_residual_ada_norm",
    "gated_rms_norm",
    "gelu",
    "group_norm",
    "grouped_poly_norm",
    "layer_norm",
    "log_probs",
    "poly_norm",
    "qk_norm_rotary",
    "rms_norm",
    "rms_norm_add_rms_norm",
    "silu_and_mul",
    "swiglu",
    "swiglu_clamped",
    "topk_softmax",
)
SAMPLES = 3

each_function = pytest.mark.parametrize("name", FUNCTIONS)
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def call_of(fuselage, name: str, device: str) -> tuple:
    """(loss of the tensors that have a gradient, these), with numbers of one sample."""
    call = calls.call_of(name, torch.float32, device)
    names = [n for n, value in call.items() if is_differentiable(n, value)]
    if name == "topk_softmax":
        names.remove("bias")

    def loss(*tensors: Tensor) -> Tensor:
        results = getattr(fuselage, name)(**call | dict(zip(names, tensors, strict=True)))
        floats = [t for t in as_tuple(results) if t is not None and t.is_floating_point()]
        return sum((k + 1) * t.square().sum() for k, t in enumerate(floats))

    return loss, tuple(call[n] for n in names)


def samples_of(tensors) -> tuple[Tensor, ...]:
    """Of each tensor several, in a dimension of its own."""
    return tuple(
        torch.stack([t + k * normal(t.shape, t.dtype, t.device) for k in range(SAMPLES)])
        for t in tensors
    )


def backward(loss, tensors, which=None) -> tuple[Tensor, ...]:
    """The gradients of these inputs, or of all. NOTE: no others are asked for: on a GPU, a gradient
    that is a sum over rows has another order where it is the only one."""
    which = every(tensors) if which is None else which
    leaves = [t.detach().requires_grad_(index in which) for index, t in enumerate(tensors)]
    return torch.autograd.grad(loss(*leaves), [leaves[index] for index in which])


def of_each_sample(loss, samples) -> tuple[Tensor, ...]:
    found = [backward(loss, tensors) for tensors in zip(*samples, strict=True)]
    return tuple(torch.stack(grads) for grads in zip(*found, strict=True))


def every(tensors) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


def assert_same(actual, expected) -> None:
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert b.any(), f"gradient {index} would not show a mistake"
        assert_same_bits(a.detach(), b, f"gradient {index}")


@each_function
def test_grad(fuselage, device, name):
    loss, tensors = call_of(fuselage, name, device)
    expected = backward(loss, tensors)
    assert_same(func.grad(loss, every(tensors))(*tensors), expected)
    value, vjp = func.vjp(loss, *tensors)
    assert_same(vjp(torch.ones_like(value)), expected)
    for index in every(tensors):  # all others need none
        assert_same([func.grad(loss, index)(*tensors)], backward(loss, tensors, [index]))


@each_function
def test_gradients_of_samples(fuselage, device, name):
    loss, tensors = call_of(fuselage, name, device)
    samples = samples_of(tensors)
    assert_same(func.vmap(func.grad(loss, every(tensors)))(*samples), of_each_sample(loss, samples))


@each_function
def test_gradients_of_a_mapped_function(fuselage, device, name):
    """A gradient outside of vmap, where no tensor inside says by itself that it needs one."""
    loss, tensors = call_of(fuselage, name, device)
    samples = samples_of(tensors)
    expected = of_each_sample(loss, samples)

    def total(*samples):
        return func.vmap(loss)(*samples).sum()

    assert_same(func.grad(total, every(tensors))(*samples), expected)
    assert_same(backward(total, samples), expected)


def test_shared_weights_of_samples(fuselage, device):
    """As of a linear layer: the rows are a sample's own, and the weight is one."""
    x, weight = normal((SAMPLES, 5, 8), torch.float32, device), normal((8,), torch.float32, device)

    def loss(x, weight):
        return fuselage.rms_norm(x, weight).square().sum()

    actual = func.vmap(func.grad(loss, 1), (0, None))(x, weight)
    assert_same(actual, [backward(loss, (row, weight))[1] for row in x])


def test_a_model_of_modules(fuselage, device):
    """The gradient of each sample by itself, as in training with differential privacy."""
    nn, modules = torch.nn, fuselage.modules
    layers = (nn.Linear(8, 8), modules.RMSNorm(8), nn.Linear(8, 16), modules.SiluAndMul())
    model = nn.Sequential(*layers).to(device)
    names = [name for name, _ in model.named_parameters()]

    def loss(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return func.functional_call(model, given, (x,)).square().sum()

    parameters = tuple(t.detach() for t in model.parameters())
    each = [normal((3, 8), torch.float32, device) for _ in range(SAMPLES)]
    own = (0, *(None for _ in names))
    found = func.vmap(func.grad(loss, every(own)[1:]), own)(torch.stack(each), *parameters)
    expected = [backward(loss, (x, *parameters))[1:] for x in each]
    for actual, grads in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(grads))  # PyTorch's products of all samples


def test_jacrev(fuselage, device):
    x = normal((4,), torch.float32, device)
    jacobian = func.jacrev(fuselage.silu)(x)
    rows = [backward(lambda x, k=k: fuselage.silu(x)[k], (x,))[0] for k in range(4)]
    assert_same(jacobian, rows)


@each_function
def test_second_derivatives_are_refused(fuselage, device, name):
    loss, tensors = call_of(fuselage, name, device)

    def of_gradients(*tensors):
        return sum(grad.sum() for grad in func.grad(loss, every(tensors))(*tensors))

    message = rf"fuselage::{name}: the backward is not differentiable"
    with pytest.raises(RuntimeError, match=message):
        func.grad(of_gradients)(*tensors)
    # Of parameters: a gradient has a graph then, which raises only where it is followed.
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = func.grad(loss, every(tensors))(*leaves)
    assert_same(found, backward(loss, tensors))
    with pytest.raises(RuntimeError, match=message):
        found[0].sum().backward()


def test_graphs_may_be_kept(fuselage, device):
    x = normal((3, 8), torch.float32, device)
    _, vjp = func.vjp(fuselage.gelu, x)
    first, second = (vjp(torch.ones_like(x))[0] for _ in range(2))
    assert_same_bits(first, second, "a second gradient")


def test_without_gradients_nothing_is_recorded(fuselage, device):
    x = normal((3, 8), torch.float32, device)
    with torch.no_grad():
        assert func.vmap(fuselage.silu)(x).grad_fn is None
    assert func.grad(lambda y: (y * fuselage.silu(x)).sum())(x).grad_fn is None


@pytest.mark.long
def test_compiled(fuselage, device):
    """Dynamo leaves it to eager mode, and says so where it may not."""
    loss, tensors = call_of(fuselage, "fused_add_rms_norm", device)
    samples = samples_of(tensors)
    every_one = every(tensors)

    def of_samples(*samples):
        return func.vmap(func.grad(loss, every_one))(*samples)

    def of_all(*samples):
        return func.grad(lambda *each: func.vmap(loss)(*each).sum(), every_one)(*samples)

    expected = of_each_sample(loss, samples)
    for function in (of_samples, of_all):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(function, backend="aot_eager", fullgraph=True)(*samples)
        torch._dynamo.reset()
        assert_same(torch.compile(function, backend="aot_eager")(*samples), expected)
    with torch.no_grad():
        mapped = torch.compile(
            lambda *samples: func.vmap(loss)(*samples), backend="aot_eager", fullgraph=True
        )
        assert_same_bits(mapped(*samples), func.vmap(loss)(*samples), "without a gradient")


def test_autocast_is_refused(fuselage, device):
    x = normal((3, 8), torch.float32, device)
    with (
        torch.autocast(device),
        pytest.raises(RuntimeError, match="rms_norm: no gradient"),
    ):
        func.grad(lambda x: fuselage.rms_norm(x).sum())(x)


def test_what_has_no_gradient_is_refused(fuselage, device):
    """Also where it is vmap that hides what requires one."""
    x = normal((3, 8), torch.float32, device)
    targets, weights = torch.tensor([1, 2, 3], device=device), torch.ones(3, device=device)

    def of_weights(weights):
        return fuselage.cross_entropy(x, targets, token_weights=weights).sum()

    def mapped(weights):
        return func.vmap(of_weights)(weights[None]).sum()

    for loss in (of_weights, mapped):
        with pytest.raises(RuntimeError, match="`token_weights` has no gradient"):
            func.grad(loss)(weights)
    with pytest.raises(RuntimeError, match="`inplace_backward` is not supported"):
        func.grad(lambda x: fuselage.cross_entropy(x, targets, inplace_backward=True))(x)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: no gradient"):
        func.grad(lambda x: fuselage.linear_cross_entropy(x, x, targets[:0]).sum())(x[:0])
    with pytest.raises(RuntimeError, match="linear_log_probs: no gradient"):
        func.grad(lambda x: fuselage.linear_log_probs(x, x, targets[:0])[0].sum())(x[:0])
