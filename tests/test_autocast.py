"""torch.autocast: inputs are cast as PyTorch casts those of its own operators."""

from __future__ import annotations

import calls
import pytest
import torch
import torch.nn.functional as F
from calls import is_differentiable
from harness import as_tuple, assert_same_bits, normal
from torch import Tensor

NORMS = (
    "ada_layer_norm",
    "ada_rms_norm",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_mul_poly_norm",
    "gate_residual_ada_norm",
    "gated_rms_norm",
    "group_norm",
    "grouped_poly_norm",
    "layer_norm",
    "poly_norm",
    "qk_norm_rotary",
    "rms_norm",
    "rms_norm_add_rms_norm",
)
POINTWISE = ("add_mul_act", "apply_rotary", "bias_act", "geglu", "swiglu")
# Whose second result is no norm's.
SUMS = ("fused_add_layer_norm", "fused_add_rms_norm", "gate_residual_ada_norm")
ROWS = ("x", "residual", "mul", "y", "gate", "up", "q", "k")

HALF, OTHER_HALF = torch.bfloat16, torch.float16
# Dtypes of the first of the row inputs, of the others, and of weights, biases and tables.
MIXTURES = {
    "first_float32": (torch.float32, HALF, HALF),
    "first_half": (HALF, torch.float32, HALF),
    "half": (HALF, HALF, HALF),
    "half_of_two_kinds": (HALF, HALF, OTHER_HALF),
    "two_kinds_of_rows": (HALF, OTHER_HALF, OTHER_HALF),
    "float32_weights": (HALF, HALF, torch.float32),
}
each_mixture = pytest.mark.parametrize("mixture", MIXTURES)
each_function = pytest.mark.parametrize("name", (*NORMS, *POINTWISE))


def mixed_call(name: str, mixture: str, device: str) -> dict:
    first, rows, others = MIXTURES[mixture]
    call = calls.call_of(name, HALF, device)
    main = next(iter(call))
    for argument, value in call.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            dtype = first if argument == main else rows if argument in ROWS else others
            call[argument] = value.to(dtype)
    return call


def widest_of_rows(call: dict) -> torch.dtype:
    dtypes = {call[n].dtype for n in ROWS if isinstance(call.get(n), Tensor)}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def results_and_gradients(function, call: dict, training: bool) -> tuple[list, list]:
    leaves = {
        n: t.detach().requires_grad_(training) if is_differentiable(n, t) else t
        for n, t in call.items()
    }
    outputs = as_tuple(function(**leaves))
    if not training:
        return list(outputs), []
    wanted = [t for n, t in leaves.items() if is_differentiable(n, t)]
    torch.manual_seed(0)
    grad_outs = [normal(t.shape, HALF, t.device).to(t.dtype) for t in outputs]
    grads = torch.autograd.grad(outputs, wanted, grad_outs)
    assert [g.dtype for g in grads] == [t.dtype for t in wanted]
    return [t.detach() for t in outputs], list(grads)


def expected_of(function, name: str, call: dict, device: str, training: bool) -> tuple[list, list]:
    """The call without autocast, on what autocast makes of its inputs."""
    dtype = torch.float32 if name in NORMS and device == "cuda" else widest_of_rows(call)
    cast = {
        n: t.to(dtype if n in ROWS else torch.float32)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for n, t in call.items()
    }
    outputs, grads = results_and_gradients(function, cast, training)
    given = [t for n, t in call.items() if is_differentiable(n, t)]
    return outputs, [g.to(t.dtype) for g, t in zip(grads, given[: len(grads)], strict=True)]


def assert_same(actual: tuple[list, list], expected: tuple[list, list]) -> None:
    for kind, some, others in zip(("output", "gradient"), actual, expected, strict=True):
        for index, (a, e) in enumerate(zip(some, others, strict=True)):
            assert_same_bits(a, e, f"{kind} {index}")


def assert_same_but_order(name: str, call: dict, actual, expected) -> None:
    """As assert_same. On a GPU the gradients of parameters may be added up in another order, where
    rows of two dtypes have another kernel than rows of one."""
    assert_same((actual[0], []), (expected[0], []))
    given = [n for n, t in call.items() if is_differentiable(name, t)]
    for argument, a, e in zip(given, actual[1], expected[1], strict=False):
        if argument in ROWS:
            assert_same_bits(a, e, f"gradient of {argument}")
        else:
            rtol = 2 * torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, e, rtol=rtol, atol=1e-5, msg=f"gradient of {argument}")


def rounds_its_sum(name: str, call: dict, device: str) -> bool:
    """On a GPU the sum of half inputs stays half, and only its norm is float32."""
    return device == "cuda" and name in SUMS and widest_of_rows(call) != torch.float32


@pytest.mark.kernels_ci
@each_function
@each_mixture
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_mixed_dtypes(fuselage, device, name, mixture, training):
    function = getattr(fuselage, name)
    call = mixed_call(name, mixture, device)
    with torch.autocast(device, dtype=HALF):
        actual = results_and_gradients(function, call, training)
    if rounds_its_sum(name, call, device):
        (out, new_residual), _ = actual
        assert out.dtype == torch.float32 and new_residual.dtype == widest_of_rows(call)
    else:
        expected = expected_of(function, name, call, device, training)
        if name in NORMS and device == "cuda":
            assert_same_but_order(name, call, actual, expected)
        else:
            assert_same(actual, expected)


@each_function
@pytest.mark.parametrize(
    "mixture",
    [
        "first_float32",
        pytest.param("first_half", marks=pytest.mark.long),
        pytest.param("half_of_two_kinds", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compiled_as_eager(fuselage, device, name, mixture, inside, training):
    function = getattr(fuselage, name)
    call = mixed_call(name, mixture, device)

    def with_autocast(**arguments):
        with torch.autocast(device, dtype=HALF):
            return function(**arguments)

    torch._dynamo.reset()
    compiled = torch.compile(
        with_autocast if inside else function, fullgraph=True, backend="aot_eager"
    )
    with torch.autocast(device, dtype=HALF, enabled=not inside):
        actual = results_and_gradients(compiled, call, training)
    with torch.autocast(device, dtype=HALF):
        expected = results_and_gradients(function, call, training)
    assert_same(actual, expected)


@pytest.mark.kernels_ci
def test_dtypes_are_those_of_pytorch(fuselage, device):
    """What PyTorch's own operators return, of which the rules are made."""
    half, single = (normal((3, 8), dtype, device) for dtype in (HALF, torch.float32))
    # Torch 2.11 does not have rms_norm on autocast's list beside layer_norm, 2.13 has.
    own_norm = F.rms_norm if torch.__version__ >= "2.13" else F.layer_norm
    with torch.autocast(device, dtype=HALF):
        for x in (half, single):
            assert fuselage.rms_norm(x).dtype == own_norm(x, (8,)).dtype
            assert fuselage.layer_norm(x).dtype == F.layer_norm(x, (8,)).dtype
            assert fuselage.silu(x).dtype == F.silu(x).dtype
            for y in (half, single):
                assert fuselage.swiglu(x, y).dtype == (F.silu(x) * y).dtype
                out, new_residual = fuselage.fused_add_rms_norm(x, y)
                assert new_residual.dtype == (x + y).dtype
                assert out.dtype == own_norm(x + y, (8,)).dtype


@pytest.mark.kernels_ci
def test_the_sum_of_halves_is_rounded_before_its_float32_norm(fuselage):
    """What a GPU gets, by the rule itself, on a CPU."""
    on_gpu = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    x, residual, gate, scale, shift = inputs = [normal((2, 3, 8), HALF, "cpu") for _ in range(5)]
    for layer, norm in ((True, fuselage.ada_layer_norm), (False, fuselage.ada_rms_norm)):
        results = []
        for op in (
            fuselage.ada_norm.ops.gate_residual_ada_norm_fwd.default,
            fuselage.ada_norm.ops.gate_residual_ada_norm.default,
        ):
            leaves = [t.detach().requires_grad_(op.name().endswith("fwd")) for t in inputs]
            results.append((leaves, op.redispatch(on_gpu, *leaves, None, None, 1e-6, layer)))
        (leaves, (out, new_residual, _)), (_, without_gradients) = results
        rounded = (residual.float() + gate.float() * x.float()).to(HALF)
        expected = norm(rounded.float(), scale.float(), shift.float())
        for some in ((out, new_residual), without_gradients):
            assert_same_bits(some[0], expected, "out")
            assert_same_bits(some[1], rounded, "new_residual")
        leaves = [t.detach().requires_grad_() for t in inputs]
        _, s = fuselage.gate_residual_ada_norm(*leaves[:3], None, None)
        again = norm(s.float(), leaves[3].float(), leaves[4].float())
        grads = torch.autograd.grad(out.sum() + new_residual.sum(), results[0][0])
        for grad, other in zip(
            grads, torch.autograd.grad(again.sum() + s.sum(), leaves), strict=True
        ):
            assert_same_bits(grad, other, "gradient")
    op = fuselage.norm.ops.fused_add_rms_norm.default
    out, new_residual = op.redispatch(on_gpu, x, residual, None, 1e-6, 0.0, False, None)
    assert_same_bits(new_residual, x + residual, "new_residual")
    assert_same_bits(out, fuselage.rms_norm(new_residual.float()), "out")


def test_sampling(fuselage, device):
    """A head is a product, computed in autocast's dtype; options may be half."""
    for name in ("lm_head_sample", "gumbel_sample"):
        call = calls.call_of(name, HALF, device)
        expected = getattr(fuselage, name)(**call)
        single = ("hidden", "weight", "bias") if name == "lm_head_sample" else ("logits",)
        mixed = {n: t.float() if n in single else t for n, t in call.items()}
        mixed["temperature"] = torch.ones(3, dtype=HALF, device=device)
        mixed["offset"] = torch.zeros_like(call["offset"])
        with torch.autocast(device, dtype=HALF):
            actual = getattr(fuselage, name)(**mixed)
        assert torch.equal(actual, expected), name


@pytest.mark.kernels_ci
def test_without_autocast_mixed_dtypes_are_refused(fuselage, device):
    call = mixed_call("swiglu", "first_float32", device)
    with pytest.raises(RuntimeError, match="`up` must be float32 as `gate`, got bfloat16"):
        fuselage.swiglu(**call)
    with torch.autocast(device, dtype=HALF):
        fuselage.swiglu(**call)
        with (
            torch.autocast(device, enabled=False),
            pytest.raises(RuntimeError, match="`up` must be float32 as `gate`, got bfloat16"),
        ):
            fuselage.swiglu(**call)


@pytest.mark.kernels_ci
@each_function
def test_double_backward_is_refused(fuselage, device, name):
    call = mixed_call(name, "half", device)
    leaf = call[next(iter(call))].requires_grad_()
    with torch.autocast(device, dtype=HALF):
        out, *_ = as_tuple(getattr(fuselage, name)(**call))
    loss = out.float().pow(2).sum()
    # Where PyTorch adds in float32 first, the norm alone is ours.
    ours = {
        "gate_residual_ada_norm": "(gate_residual_ada_norm|ada_layer_norm)",
        "fused_add_layer_norm": "(fused_add_)?layer_norm",
    }.get(name, name)
    with pytest.raises(RuntimeError, match=f"fuselage::{ours}: the backward is not diff"):
        torch.autograd.grad(loss, leaf, create_graph=True)
