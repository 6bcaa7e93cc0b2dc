"""grouped_poly_norm: rows of experts, padding, clamps."""

from __future__ import annotations

import pytest
import torch
from harness import (
    assert_same_bits,
    check_gradients,
    check_no_worse,
    check_values,
    each_dtype,
    gradients,
    normal,
    on_devices,
    random_grad_outs,
    reference_gradients,
)
from operators import GROUPED_POLY_NORM as OP
from torch._dynamo.testing import CompileCounterWithBackend

STYLES = pytest.mark.parametrize("style", OP.styles)
ORDERS = pytest.mark.parametrize("mul_first", [False, True], ids=["x_first", "mul_first"])

# The end rows of the experts, of 23 rows: up to 8 of them are padding.
OFFS = {
    "one": (23,),
    "even": (8, 16, 23),
    "padding": (5, 15),
    "empty_experts": (0, 0, 4, 4, 9, 9, 9),
    "one_row_each": tuple(range(1, 24)),
    "all_empty": (0, 0, 0),
    "all_in_the_last": (0, 0, 23),
    "many": tuple(min(20, i // 9) for i in range(300)),
}
EACH_OFFS = pytest.mark.parametrize("offs", OFFS.values(), ids=OFFS.keys())
ROWS = 23


def make(dim, dtype, device, style="torch", offs=OFFS["empty_experts"], rows=ROWS) -> dict:
    chosen = OP.styles[style]
    return OP.make_inputs((rows, dim), dtype, device, offs=offs, **chosen.inputs)


def run_both_ways(fuselage, inputs: dict, options: dict, grad_out: torch.Tensor) -> dict:
    leaves = {name: t.detach().requires_grad_(name != "offs") for name, t in inputs.items()}
    out = fuselage.grouped_poly_norm(**leaves, **options)
    out.backward(grad_out)
    grads = {f"grad_{name}": leaves[name].grad for name in ("x", "mul", "weight", "bias")}
    return {"out": out.detach(), **grads}


# Values


@pytest.mark.kernels_ci
@each_dtype
@STYLES
@EACH_OFFS
def test_values_and_gradients(fuselage, device, dtype, style, offs):
    inputs = make(40, dtype, device, style, offs)
    check_values(OP, fuselage, inputs, OP.options(style))
    check_gradients(OP, fuselage, inputs, OP.options(style))


@each_dtype
@STYLES
@on_devices(
    (1, 7, 8, 96, 1000, 4097, 65536),
    (
        1,
        7,
        8,
        96,
        256,
        520,
        1000,
        2048,
        4096,
        4097,
        8192,
        8200,
        12288,
        16384,
        65536,
        131072,
        262144,
    ),
)
def test_every_dim(fuselage, device, dtype, style, dim):
    inputs = make(dim, dtype, device, style)
    check_values(OP, fuselage, inputs, OP.options(style))
    check_gradients(OP, fuselage, inputs, OP.options(style))


@pytest.mark.kernels_ci
@each_dtype
@on_devices((7, 96, 1000), (1000, 4097, 8192, 12288, 65536))
def test_each_expert_is_a_fused_mul_poly_norm(fuselage, device, dtype, dim):
    """Bit for bit, of long rows on a GPU: short ones are laid out otherwise there."""
    inputs = make(dim, dtype, device, offs=OFFS["padding"])
    grad_out = normal((ROWS, dim), dtype, device)
    grouped = run_both_ways(fuselage, inputs, {}, grad_out)
    begin = 0
    for expert, end in enumerate(OFFS["padding"]):
        rows = slice(begin, end)
        leaves = [inputs[name][rows].clone().requires_grad_() for name in ("x", "mul")]
        out = fuselage.fused_mul_poly_norm(
            *leaves, inputs["weight"][expert], inputs["bias"][expert]
        )
        out.backward(grad_out[rows])
        assert_same_bits(grouped["out"][rows], out.detach(), "out")
        assert_same_bits(grouped["grad_x"][rows], leaves[0].grad, "grad_x")
        assert_same_bits(grouped["grad_mul"][rows], leaves[1].grad, "grad_mul")
        begin = end


@pytest.mark.kernels_ci
@each_dtype
@STYLES
@on_devices((7, 96), (7, 96, 4097, 8192, 65536, 262144))
def test_padding_may_hold_anything(fuselage, device, dtype, style, dim):
    inputs = make(dim, dtype, device, style)
    grad_out = normal((ROWS, dim), dtype, device)
    clean = run_both_ways(fuselage, inputs, OP.options(style), grad_out)
    padding = slice(OFFS["empty_experts"][-1], None)
    for name in ("x", "mul"):
        inputs[name][padding] = float("nan")
    grad_out[padding] = float("inf")
    dirty = run_both_ways(fuselage, inputs, OP.options(style), grad_out)
    for name, expected in clean.items():
        assert_same_bits(dirty[name], expected, name)
    for name in ("out", "grad_x", "grad_mul"):
        assert not dirty[name][padding].any(), f"{name} of padding is not zero"
    assert dirty["out"][: padding.start].any()


def test_empty_experts_have_no_gradient(fuselage, device):
    inputs = make(40, torch.float32, device)
    grads = run_both_ways(fuselage, inputs, {}, torch.ones(ROWS, 40, device=device))
    ends = OFFS["empty_experts"]
    for expert, (begin, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        for name in ("grad_weight", "grad_bias"):
            assert grads[name][expert].any() == (end > begin), (name, expert)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hidden_clamp", [None, 2.0])
def test_a_special_value_stays_in_its_row(fuselage, device, value, hidden_clamp):
    inputs = make(40, torch.float32, device, offs=OFFS["even"])
    inputs["x"][3, 5] = value
    out = fuselage.grouped_poly_norm(**inputs, hidden_clamp=hidden_clamp)
    assert out[[*range(3), *range(4, ROWS)]].isfinite().all()
    if hidden_clamp is None or value != value:
        assert out[3, 5].isnan()
    else:  # infinity is cut
        assert out[3].isfinite().all()


def test_the_clamp_cuts_inputs_and_result(fuselage, device):
    """What is cut has no gradient; x, mul and the product each."""
    x = torch.tensor([[3.0, -3.0, 0.5, 1.0], [0.1, 0.2, 0.3, 0.4]], device=device)
    mul = torch.tensor([[1.0, 1.0, 9.0, -0.1], [0.1, 0.2, 0.3, 0.4]], device=device)
    weight, bias = torch.ones(1, 3, device=device), torch.zeros(1, 1, device=device)
    offs = torch.tensor([2], dtype=torch.int32, device=device)
    cut = fuselage.grouped_poly_norm(
        x.clamp(-2, 2), mul.clamp(-2, 2), weight, bias, offs, hidden_clamp=None
    ).clamp(-2, 2)
    inputs = {"x": x, "mul": mul, "weight": weight, "bias": bias, "offs": offs}
    results = run_both_ways(fuselage, inputs, {"hidden_clamp": 2.0}, torch.ones_like(x))
    assert_same_bits(results["out"], cut, "out")
    assert results["grad_x"][0, 0] == 0 and results["grad_x"][0, 1] == 0
    assert results["grad_mul"][0, 2] == 0
    assert results["grad_x"][1].ne(0).all() and results["grad_mul"][1].ne(0).all()
    unlimited = run_both_ways(fuselage, inputs, {"hidden_clamp": 1e6}, torch.ones_like(x))
    without = run_both_ways(fuselage, inputs, {}, torch.ones_like(x))
    for name, expected in without.items():
        assert_same_bits(unlimited[name], expected, name)


@each_dtype
@STYLES
def test_accuracy_is_no_worse_than_pytorchs(fuselage, device, style, dtype):
    inputs = make(1000, dtype, device, style, (50, 50, 120, 180), rows=200)
    options = OP.options(style)
    actual = OP.run(fuselage, inputs, options)
    eager = OP.run_eager(inputs, options)
    check_no_worse(actual["out"], eager["out"], OP.run_reference(inputs, options)["out"], "out")
    grad_outs, names = random_grad_outs(actual), ("x", "mul")
    expected = reference_gradients(OP, inputs, options, grad_outs)
    eager = gradients(OP.run_eager, inputs, options, grad_outs, names)
    actual = gradients(lambda i, o: OP.run(fuselage, i, o), inputs, options, grad_outs, names)
    for name in names:
        check_no_worse(actual[name], eager[name], expected[name], f"grad_{name}")


# Packed, layouts, shapes


@pytest.mark.kernels_ci
@ORDERS
@STYLES
@on_devices((1, 7, 96, 4097), (1, 7, 96, 4096, 4097, 8192, 12288, 65536, 262144))
def test_packed_is_the_same(fuselage, device, mul_first, style, dim):
    inputs = make(dim, torch.bfloat16, device, style)
    options, grad_out = OP.options(style), normal((ROWS, dim), torch.bfloat16, device)
    separate = run_both_ways(fuselage, inputs, options, grad_out)
    halves = ("mul", "x") if mul_first else ("x", "mul")
    packed = torch.cat([inputs[name] for name in halves], dim=-1).requires_grad_()
    factors = [inputs[name].detach().requires_grad_() for name in ("weight", "bias")]
    out = fuselage.grouped_poly_norm(
        packed, None, *factors, inputs["offs"], mul_first=mul_first, **options
    )
    out.backward(grad_out)
    assert_same_bits(out.detach(), separate["out"], "out")
    expected = torch.cat([separate[f"grad_{name}"] for name in halves], dim=-1)
    assert_same_bits(packed.grad, expected, "gradient of the packed tensor")
    assert_same_bits(factors[0].grad, separate["grad_weight"], "grad_weight")
    assert_same_bits(factors[1].grad, separate["grad_bias"], "grad_bias")


@pytest.mark.parametrize("layout", ["wider", "misaligned", "expanded", "transposed"])
@pytest.mark.parametrize("name", ["x", "mul", "weight", "bias", "grad_out"])
@on_devices((96,), (96, 4096))
def test_layouts(fuselage, device, layout, name, dim):
    inputs = make(dim, torch.float32, device)
    tensors = {**inputs, "grad_out": normal((ROWS, dim), torch.float32, device)}
    value = tensors[name]
    rows, columns = value.shape
    tensors[name] = {
        "wider": lambda: torch.cat((value, value), dim=1)[:, :columns],
        "misaligned": lambda: torch.cat((value[0, :1], value.flatten()))[1:].view(rows, columns),
        "expanded": lambda: value[:1].expand(rows, columns),
        "transposed": lambda: value.t().contiguous().t(),
    }[layout]()
    grad_out = tensors.pop("grad_out")
    check_values(OP, fuselage, tensors, {})
    check_gradients(OP, fuselage, tensors, {}, grad_outs={"out": grad_out})


@pytest.mark.parametrize("lead", [(), (ROWS,), (1, ROWS), (ROWS, 1)], ids=str)
def test_leading_dimensions(fuselage, device, lead):
    inputs = make(40, torch.float32, device, rows=ROWS if lead else 1)
    flat = fuselage.grouped_poly_norm(**inputs)
    shaped = {name: inputs[name].view(*lead, 40) for name in ("x", "mul")}
    out = fuselage.grouped_poly_norm(**{**inputs, **shaped})
    assert out.shape == (*lead, 40)
    assert_same_bits(out.view(-1, 40), flat, "out")


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_empty(fuselage, device, shape):
    inputs = OP.make_inputs(shape, torch.float32, device, offs=(0, 0))
    results = run_both_ways(fuselage, inputs, {}, torch.ones(shape, device=device))
    assert results["out"].shape == shape
    for name in ("x", "mul", "weight", "bias"):
        assert results[f"grad_{name}"].shape == inputs[name].shape
        assert not results[f"grad_{name}"].any()


# Contracts


@pytest.mark.kernels_ci
@each_dtype
@on_devices((7, 1000), (7, 1000, 8192, 16384, 262144))
def test_rows_do_not_depend_on_the_others(fuselage, device, dtype, dim):
    """The last rows alone, with the same experts."""
    inputs = make(dim, dtype, device, offs=(9, 16, 23))
    grad_out = normal((ROWS, dim), dtype, device)
    batch = run_both_ways(fuselage, inputs, {}, grad_out)
    for begin in (1, 10, 22):
        some = {name: inputs[name][begin:] for name in ("x", "mul")}
        offs = (inputs["offs"] - begin).clamp(min=0)
        alone = run_both_ways(fuselage, {**inputs, **some, "offs": offs}, {}, grad_out[begin:])
        for name in ("out", "grad_x", "grad_mul"):
            assert_same_bits(alone[name], batch[name][begin:], name)


@each_dtype
@on_devices((100, 4097), (100, 4097, 8192, 65536))
def test_same_inputs_same_bits(fuselage, device, dtype, dim):
    inputs = make(dim, dtype, device, offs=(300, 300, 900), rows=1000)
    grad_out = normal((1000, dim), dtype, device)
    first = run_both_ways(fuselage, inputs, {}, grad_out)
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            again = run_both_ways(fuselage, inputs, {}, grad_out)
        finally:
            torch.set_num_threads(threads)
        for name, expected in first.items():
            assert_same_bits(again[name], expected, name)


@pytest.mark.kernels_ci
def test_strided_offs(fuselage, device):
    inputs = make(40, torch.float32, device)
    inputs["offs"] = torch.stack((inputs["offs"], -inputs["offs"]), dim=1)[:, 0]
    assert not inputs["offs"].is_contiguous()
    check_values(OP, fuselage, inputs, {})
    check_gradients(OP, fuselage, inputs, {})


@pytest.mark.kernels_ci
@pytest.mark.parametrize("requires_grad", [False, True])
def test_errors(fuselage, device, requires_grad):
    good = make(40, torch.bfloat16, device, offs=(3, 20))
    for name, wrong, words in (
        ("x", good["x"].double(), "float16, bfloat16 or float32"),
        ("mul", good["mul"][:5], r"shape of `x` \[23, 40\]"),
        ("mul", good["mul"].float(), "got float32"),
        ("weight", good["weight"][:1], r"\[2, 3\].*got \[1, 3\]"),
        ("weight", good["weight"][0], r"\[2, 3\].*got \[3\]"),
        ("weight", good["weight"].half(), "got float16"),
        ("bias", good["bias"][:, 0], r"\[2, 1\].*got \[2\]"),
        ("offs", good["offs"].long(), r"int32.*got Long \[2\]"),
        ("offs", good["offs"][None], r"got Int \[1, 2\]"),
        ("offs", good["offs"][:0], r"at least one.*got Int \[0\]"),
        ("offs", good["offs"].to("meta"), "device of `x`"),
    ):
        inputs = {**good, name: wrong}
        if requires_grad:
            inputs["bias"] = inputs["bias"].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=rf"fuselage::grouped_poly_norm: `{name}`.*{words}"):
            fuselage.grouped_poly_norm(**inputs)
    with pytest.raises(RuntimeError, match="`hidden_clamp` must not be negative, got -1"):
        fuselage.grouped_poly_norm(**good, hidden_clamp=-1.0)


@pytest.mark.kernels_ci
def test_double_backward_is_refused(fuselage, device):
    inputs = make(40, torch.float32, device)
    inputs["x"].requires_grad_()
    loss = fuselage.grouped_poly_norm(**inputs).pow(2).sum()
    with pytest.raises(RuntimeError, match="fuselage::grouped_poly_norm: the backward is not diff"):
        torch.autograd.grad(loss, inputs["x"], create_graph=True)


@pytest.mark.parametrize("requires", ["x", "mul", "weight", "bias"])
def test_gradients_only_where_required(fuselage, device, requires):
    inputs = make(40, torch.bfloat16, device)
    check_gradients(OP, fuselage, inputs, {}, requires=(requires,))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@STYLES
def test_compile(fuselage, device, backend, style):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    names = ("x", "mul", "weight", "bias")

    def step(offs, *values):
        inputs = dict(zip(names, values, strict=True))
        return fuselage.grouped_poly_norm(**inputs, offs=offs, **OP.options(style))

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for rows, offs in ((23, (4, 4, 9)), (31, (0, 9, 31)), (64, (1, 2, 3))):
        inputs = make(64, torch.bfloat16, device, style, offs, rows)
        results = []
        for function in (step, compiled):
            leaves = [inputs[name].clone().requires_grad_() for name in names]
            out = function(inputs["offs"], *leaves)
            results.append([out, *torch.autograd.grad(out.float().pow(2).sum(), leaves)])
        for eager, traced in zip(*results, strict=True):
            assert_same_bits(traced.detach(), eager.detach(), f"{rows} rows")
        first = first or counter.frame_count
        assert counter.frame_count == first, f"recompiled for {rows} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [100, 4096, 16384])
def test_cuda_graph_with_other_experts(fuselage, dim):
    """Captured once without a synchronisation, replayed with rows that moved between experts."""
    static = make(dim, torch.bfloat16, "cuda", "clamp", (4, 9, 20))
    grad_out = normal((ROWS, dim), torch.bfloat16, "cuda")
    options = OP.options("clamp")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_both_ways(fuselage, static, options, grad_out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_both_ways(fuselage, static, options, grad_out)
    for offs in ((0, 0, 23), (7, 7, 7), (1, 22, 23)):
        static["offs"].copy_(torch.tensor(offs, dtype=torch.int32))
        static["x"].normal_()
        graph.replay()
        expected = run_both_ways(fuselage, static, options, grad_out)
        for name, value in expected.items():
            assert_same_bits(captured[name], value, name)


# The module


@pytest.mark.kernels_ci
def test_module(fuselage, device):
    module = fuselage.modules.GroupedPolyNorm(3, 1e-5, hidden_clamp=1.5, device=device)
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == {
        "weight": (3, 3),
        "bias": (3, 1),
    }
    assert torch.equal(module.weight, torch.full((3, 3), 1 / 3, device=device))
    assert not module.bias.any()
    assert repr(module) == "GroupedPolyNorm(3, eps=1e-05, hidden_clamp=1.5)"
    torch.nn.init.normal_(module.weight)
    inputs = make(40, torch.bfloat16, device, offs=(4, 9, 20))
    x, mul, offs = (inputs[name] for name in ("x", "mul", "offs"))
    expected = fuselage.grouped_poly_norm(
        x, mul, module.weight, module.bias, offs, 1e-5, hidden_clamp=1.5
    )
    assert_same_bits(module(x, mul, offs).detach(), expected.detach(), "out")
    module.mul_first = True
    packed = torch.cat((mul, x), dim=-1)
    assert_same_bits(module(packed, None, offs).detach(), expected.detach(), "packed")
    module.reset_parameters()
    assert torch.equal(module.weight, torch.full((3, 3), 1 / 3, device=device))
