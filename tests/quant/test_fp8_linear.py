"""Fp8Linear: products of quantised rows and weights, emulated where there are no others."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import quant_reference as reference
import torch
from harness import assert_same_bits, each_dtype, normal
from torch import nn

E4M3 = torch.float8_e4m3fn
HALF = torch.bfloat16
each_recipe = pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])


def linear_of(columns, rows, device, dtype=HALF, bias=True) -> nn.Linear:
    linear = nn.Linear(columns, rows, bias=bias, device=device, dtype=dtype)
    with torch.no_grad():
        linear.weight.mul_(torch.rand(rows, 1, device=device).to(dtype) * 3 + 0.1)
    return linear.requires_grad_(False)


def made(fuselage, columns=256, rows=384, device="cpu", recipe="rowwise", **options):
    linear = linear_of(columns, rows, device, **options)
    return linear, fuselage.modules.Fp8Linear.from_linear(linear, recipe=recipe)


def dequantized(q, scale, recipe):
    """Rows, or a matrix of blocks, in float64."""
    if recipe == "blockwise":
        scale = scale.repeat_interleave(128, -1)[..., : q.shape[-1]]
    return q.double() * scale.double()


def expected_of(fuselage, module, x):
    """The product in float64 of what is quantised, and the sizes of what is added up."""
    recipe = module.recipe
    group_size = -1 if recipe == "rowwise" else 128
    left = dequantized(*fuselage.quant_fp8(x, group_size=group_size), recipe)
    scale = module.weight_scale
    if recipe == "blockwise":
        scale = scale.repeat_interleave(128, 0)[: module.out_features]
    right = dequantized(module.weight, scale, recipe)
    bias = 0 if module.bias is None else module.bias.double()
    return left @ right.T + bias, left.abs() @ right.abs().T + abs(bias)


def check_product(fuselage, module, x):
    y = module(x)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], module.out_features)
    expected, terms = expected_of(fuselage, module, x)
    # Rounded to bfloat16, and both factors where they are emulated in it; the tensor cores' sums
    # have 14 bits with fast_accum.
    bound = 2**-8 * (expected.abs() + terms) + 1e-30
    assert ((y.double() - expected).abs() <= bound).all()
    return y


@each_recipe
@each_dtype
@pytest.mark.parametrize(("columns", "rows"), [(256, 384), (1024, 128), (200, 96), (40, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_products(fuselage, device, recipe, dtype, columns, rows, bias):
    linear, module = made(fuselage, columns, rows, device, recipe, dtype=dtype, bias=bias)
    for lead in ((5,), (1,), (2, 3), (64,), ()):
        check_product(fuselage, module, normal((*lead, columns), dtype, device))
    x = normal((64, columns), dtype, device)
    exact = linear.double()(x.double())
    error = (module(x).double() - exact).square().mean() / exact.square().mean()
    assert error.sqrt() < 0.05


@pytest.mark.kernels_ci
@each_recipe
def test_the_weight_is_quantised_once(fuselage, device, recipe):
    linear, module = made(fuselage, 200, 300, device, recipe)
    assert module.weight.dtype == E4M3 and module.weight.is_contiguous()
    weight = linear.weight.float()
    if recipe == "rowwise":
        q, scale = reference.quant_fp8(linear.weight)
    else:
        scale = torch.empty(3, 2, device=device)
        q = torch.empty_like(weight, dtype=E4M3)
        for i in range(3):
            for j in range(2):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scale[i, j] = reference.scales(weight[block].abs().amax()[None], E4M3)[0]
                q[block] = reference.rounded(weight[block], scale[i, j], E4M3)
    assert torch.equal(module.weight_scale, scale)
    assert torch.equal(module.weight.view(torch.uint8), q.view(torch.uint8))
    assert module.bias is linear.bias
    close = module.dequantized(torch.float32)
    assert (close - weight).abs().max() <= weight.abs().max() / 16


@each_recipe
@pytest.mark.parametrize("layout", ["row", "col_tma"])
def test_a_quantised_input(fuselage, device, recipe, layout):
    _, module = made(fuselage, recipe=recipe, device=device)
    x = normal((3, 5, 256), HALF, device)
    given = {} if recipe == "rowwise" else {"group_size": 128, "scale_layout": layout}
    assert_same_bits(module(fuselage.quant_fp8(x, **given)), module(x), "y")
    q, scale = fuselage.quant_fp8(x)
    with pytest.raises(RuntimeError, match="Fp8Linear: `x` must have 256 columns"):
        module((q[..., :8], scale))
    with pytest.raises(RuntimeError, match="Fp8Linear: `scale` must be float32"):
        module((q, scale[..., :0]))
    with pytest.raises(RuntimeError, match="Fp8Linear: `x` must have 256 columns"):
        module(x[..., :128])


@pytest.mark.kernels_ci
@each_recipe
@pytest.mark.parametrize("bias", [True, False])
def test_no_rows(fuselage, device, recipe, bias):
    _, module = made(fuselage, recipe=recipe, device=device, bias=bias)
    for lead in ((0,), (2, 0)):
        assert module(torch.empty(*lead, 256, device=device)).shape == (*lead, 384)


def test_recipes_and_dtypes_that_there_are_not(fuselage, device):
    linear = linear_of(32, 32, device)
    with pytest.raises(RuntimeError, match="Fp8Linear: `recipe` must be one of rowwise, blockwise"):
        fuselage.modules.Fp8Linear.from_linear(linear, recipe="tensorwise")
    with pytest.raises(RuntimeError, match="quant_fp8: `x` must be float16, bfloat16 or float32"):
        fuselage.modules.Fp8Linear.from_linear(linear.double())


# What is kept, copied and moved


@each_recipe
def test_state_dict_and_copies(fuselage, device, recipe):
    _, module = made(fuselage, recipe=recipe, device=device)
    x = normal((4, 256), HALF, device)
    expected = module(x)
    state = module.state_dict()
    assert set(state) == {"weight", "weight_scale", "bias"}
    options = {"recipe": recipe, "device": device, "dtype": HALF}
    for assign in (False, True):
        other = fuselage.modules.Fp8Linear(256, 384, **options)
        other.load_state_dict(state, assign=assign)
        assert_same_bits(other(x), expected, "loaded")
    assert_same_bits(copy.deepcopy(module)(x), expected, "copied")
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert_same_bits(other(x), expected, "saved")
    plain = nn.Linear(256, 384, device=device, dtype=HALF)
    with pytest.raises(RuntimeError, match=r"weight must be float8_e4m3fn, got torch.bfloat16"):
        other.load_state_dict({**plain.state_dict(), "weight_scale": state["weight_scale"]})


@each_recipe
def test_safetensors(fuselage, device, recipe, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    _, module = made(fuselage, recipe=recipe, device=device)
    path = str(tmp_path / "model.safetensors")
    safetensors.save_model(nn.Sequential(module), path)
    other = fuselage.modules.Fp8Linear(256, 384, recipe=recipe, device=device, dtype=HALF)
    safetensors.load_model(nn.Sequential(other), path)
    x = normal((4, 256), HALF, device)
    assert_same_bits(other(x), module(x), "y")


@each_recipe
@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.float(), lambda m: m.to(torch.float16)]
)
def test_a_cast_changes_the_bias_alone(fuselage, device, recipe, cast):
    _, module = made(fuselage, recipe=recipe, device=device)
    q, scale = module.weight.view(torch.uint8).clone(), module.weight_scale.clone()
    dtype = cast(nn.Linear(1, 1)).weight.dtype
    module = cast(nn.Sequential(module))[0]
    assert module.weight.dtype == E4M3 and torch.equal(module.weight.view(torch.uint8), q)
    assert module.weight_scale.dtype == torch.float32 and torch.equal(module.weight_scale, scale)
    assert module.bias.dtype == dtype and module.dtype == dtype
    x = normal((4, 256), dtype, device)
    given = {} if recipe == "rowwise" else {"group_size": 128}
    assert module(fuselage.quant_fp8(x, **given)).dtype == dtype
    check_product(fuselage, module, x)


@each_recipe
def test_moves(fuselage, device, recipe):
    _, module = made(fuselage, recipe=recipe, device=device)
    x = normal((4, 256), HALF, device)
    expected = module(x)
    other = fuselage.modules.Fp8Linear(256, 384, recipe=recipe, device="meta", dtype=HALF)
    assert other(x.to("meta")).shape == (4, 384)
    other.to_empty(device=device).load_state_dict(module.state_dict())
    assert_same_bits(other(x), expected, "from meta")
    back = module.to("cpu").to(device)
    assert back is module
    assert_same_bits(module(x), expected, "there and back")


# Gradients, autocast, torch.compile


@each_recipe
def test_gradients(fuselage, device, recipe):
    _, module = made(fuselage, recipe=recipe, device=device)
    module.bias.requires_grad_()
    x = normal((2, 3, 256), HALF, device).requires_grad_()
    y = module(x)
    assert_same_bits(y.detach(), module(x.detach()).detach(), "y")
    grad = normal(y.shape, HALF, device)
    grad_x, grad_bias = torch.autograd.grad(y, (x, module.bias), grad)
    exact = grad.double() @ module.dequantized(torch.float64)
    torch.testing.assert_close(grad_x.double(), exact, rtol=0.02, atol=0.05)
    torch.testing.assert_close(grad_bias.double(), grad.double().sum((0, 1)), rtol=0.02, atol=0.05)
    assert module.weight.grad is None and not module.weight.requires_grad


@each_recipe
def test_autocast(fuselage, device, recipe):
    _, module = made(fuselage, recipe=recipe, device=device, dtype=torch.float32)
    x = normal((4, 256), torch.float32, device)
    with torch.autocast(device, dtype=HALF):
        y = module(x)
    assert y.dtype == HALF
    torch.testing.assert_close(y.float(), module(x), rtol=0.02, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "in_graph"), [("rowwise", False), ("rowwise", True), ("blockwise", False)]
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiled(fuselage, device, monkeypatch, recipe, requires_grad, in_graph):
    """With PyTorch's operations in place of an op, of rows, the bits are the same."""
    torch._dynamo.reset()
    _, module = made(fuselage, recipe=recipe, device=device)
    monkeypatch.setattr(type(module), "quantizes_in_graph", in_graph)
    seen = []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        parts = (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))
        seen.extend(str(node.target) for part in parts for node in part.graph.nodes)
        return aot_eager(graph, inputs)

    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for rows in (4, 7, 30):
        x = normal((rows, 256), HALF, device).requires_grad_(requires_grad)
        y = compiled(x)
        assert_same_bits(y.detach(), module(x).detach(), f"{rows} rows")
        if requires_grad:
            (ours,) = torch.autograd.grad(y.sum(), x)
            assert ours.shape == x.shape
    assert any("quant_fp8" in name for name in seen) != in_graph


@each_dtype
def test_what_the_compiler_quantises_with(fuselage, device, dtype):
    """Operations of PyTorch have the bits of the op."""
    import importlib

    x = normal((12, 384), dtype, device) * torch.logspace(-6, 3, 12, device=device)[:, None]
    x[0] = 0
    x[1, 5], x[2, 7], x[3, 9] = torch.nan, torch.inf, -torch.inf
    found = importlib.import_module(f"{fuselage.__name__}._fp8").quantize_in_graph(x.to(dtype))
    for ours, expected in zip(found, fuselage.quant_fp8(x.to(dtype)), strict=True):
        assert ours.dtype == expected.dtype
        same = ours.float() == expected.float()
        assert (same | (ours.isnan() & expected.isnan())).all()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("rows", [1, 16, 40, 130])
def test_the_compiler_fuses_the_norm(fuselage, device, rows):
    """What a norm before linears makes is quantised in its kernel, and not by an op of ours."""
    _, module = made(fuselage, device=device)
    other = made(fuselage, device=device)[1]
    if not module.has_scaled_mm:
        pytest.skip("no float8 products")
    seen = []

    def inspected(graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        seen.extend(str(node.target) for node in graph.graph.nodes)
        return compile_fx(graph, inputs)

    def block(x):
        h = nn.functional.rms_norm(x, (256,))
        return module(h), other(h)

    torch._dynamo.reset()
    x = normal((rows, 256), HALF, device)
    with torch.no_grad():
        found = torch.compile(block, fullgraph=True, backend=inspected)(x)
        exact = nn.functional.rms_norm(x.double(), (256,))
        for each, linear in zip(found, (module, other), strict=True):
            expected, terms = expected_of(fuselage, linear, exact.float())
            # Beside roundings of the product, a q may be a neighbour: 2^-3 of it, where few are.
            assert ((each.double() - expected).abs() <= 2**-6 * (expected.abs() + terms)).all()
    assert not any("quant_fp8" in name for name in seen)


# Where it is emulated


@pytest.mark.parametrize("lead", [(5,), (2, 3), (), (1,), (16,)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_that_is_emulated(fuselage, lead, bias):
    """PyTorch's own, of rows with a scale each, which newer releases have on a CPU."""
    import importlib

    products = importlib.import_module(f"{fuselage.__name__}._fp8")
    _, module = made(fuselage, bias=bias)
    x = normal((*lead, 256), HALF, "cpu")
    tensors = (*fuselage.quant_fp8(x), module.weight, module.weight_scale, module.bias)
    try:
        found = products.product(*tensors, HALF, "rowwise", True, False)
    except (RuntimeError, ValueError, NotImplementedError):
        pytest.skip("this PyTorch has no float8 products on a CPU")
    expected = products.product(*tensors, HALF, "rowwise", True, True)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01 * scale)


def test_it_says_once_that_it_is_emulated(fuselage):
    _, module = made(fuselage)
    assert module.emulated_because == "cpu has no float8 products"
    import importlib

    importlib.import_module(f"{fuselage.__name__}._fp8")._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.ones(16, 256))  # which have a kernel
    with pytest.warns(UserWarning, match="multiplies in the input's dtype: cpu has no float8"):
        module(torch.ones(17, 256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.ones(17, 256))
    assert "emulated" in repr(module)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_where_it_is_not_emulated(fuselage, device):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 products")
    _, module = made(fuselage, 512, 256, device)
    assert module.emulated_because is None
    odd = made(fuselage, 520, 256, device)[1]
    assert "multiples of 16" in odd.emulated_because
    odd = made(fuselage, 512, 250, device)[1]
    assert "multiples of 16" in odd.emulated_because
    _, module = made(fuselage, 512, 256, device, "blockwise")
    if torch.cuda.get_device_capability() == (9, 0):
        assert module.emulated_because is None
    module = module.to("cpu")
    assert module.emulated_because == "cpu has no float8 products"


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@each_dtype
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_compiled(fuselage, device, dtype, bias):
    """Rows that are scaled after the product, and more of them, which are scaled in it."""
    _, module = made(fuselage, 256, 384, device, "rowwise", dtype=dtype, bias=bias)
    if module.few_rows == 0:
        pytest.skip("this GPU has no use for it")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: module(x * 2), fullgraph=True)
    for lead in ((1,), (2, 3), (64,), (65,)):
        x = normal((*lead, 256), dtype, device)
        with torch.no_grad():
            found, expected = compiled(x), module(x * 2)
        assert found.dtype == dtype and found.shape == expected.shape
        # Both round once or twice to the dtype, and the other to bfloat16 before. Compiled division
        # is not exact: of what is halfway between two q, which a 16th is of a row whose largest is
        # 448 times a power of two, half become the other one, 2^-4 to 2^-3 away.
        difference = (found.double() - expected.double()).abs()
        size = expected.double().square().mean(-1, keepdim=True).sqrt()
        assert (difference <= 2**-7 * expected.double().abs() + 2**-2 * size).all()
        assert (difference.square().mean(-1, keepdim=True).sqrt() <= 2**-5 * size).all()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@each_recipe
def test_both_devices_agree(fuselage, device, recipe):
    _, module = made(fuselage, 512, 256, device, recipe)
    for rows in (1, 3, 16, 130):
        x = normal((rows, 512), HALF, device)
        ours, theirs = module(x), copy.deepcopy(module).cpu()(x.cpu())
        scale = theirs.abs().max()
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0.02, atol=0.02 * scale.item())
