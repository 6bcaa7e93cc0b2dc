"""Results and gradients against float64: sizes, layouts, and huge inputs."""

from __future__ import annotations

import pytest
import torch
from harness import (
    HALVES,
    LAYOUTS,
    assert_close,
    check_gradients,
    check_no_worse,
    check_values,
    compare_gradients,
    each_dtype,
    each_operator,
    each_style,
    gradients,
    normal,
    on_devices,
    random_grad_outs,
    reference_gradients,
    rows_in_layout,
    terms_of_gradients,
)
from operators import OPERATORS

# Around vector widths and warps, hidden sizes of models, and where kernels change strategy.
DIMS = (
    *(
        1,
        2,
        3,
        7,
        8,
        16,
        31,
        64,
        100,
        127,
        128,
        129,
        255,
        256,
        320,
        512,
        768,
        1000,
        1023,
        1024,
        1025,
    ),
    *(2048, 2880, 3072, 4096, 4097, 5120, 7168, 8192, 11008, 12288, 16384, 16385, 32768, 65536),
    *(65537, 131072, 262144),
)
CPU_DIMS = (
    1,
    2,
    3,
    7,
    8,
    16,
    31,
    64,
    100,
    127,
    128,
    129,
    257,
    1000,
    1023,
    1024,
    2048,
    2049,
    4097,
    16385,
    262144,
)
ROWS = (1, 2, 3, 5, 127, 128, 129, 1023, 4099)
LAYOUT_DIMS = (5, 96)


def rows_for(dim: int) -> int:
    """Few enough for a quick test, enough and odd enough for rows that share a block."""
    return max(3, min(37, (1 << 18) // dim))


@each_dtype
@each_style(OPERATORS)
@on_devices(CPU_DIMS, DIMS)
def test_values_of_every_dim(fuselage, device, op, style, dtype, dim):
    inputs = op.inputs((rows_for(dim), dim), dtype, device, style)
    check_values(op, fuselage, inputs, op.options(style))


@each_dtype
@each_operator(OPERATORS)
@on_devices(CPU_DIMS, DIMS)
def test_gradients_of_every_dim(fuselage, device, op, dtype, dim):
    inputs = op.inputs((rows_for(dim), dim), dtype, device)
    check_gradients(op, fuselage, inputs, {})


@each_dtype
@each_style(OPERATORS)
@on_devices((33, 1000), (33, 1000, 4096, 65536))
def test_gradients_of_every_style(fuselage, device, op, style, dtype, dim):
    inputs = op.inputs((rows_for(dim), dim), dtype, device, style)
    check_gradients(op, fuselage, inputs, op.options(style))


@each_operator(OPERATORS)
@pytest.mark.parametrize("rows", ROWS)
@on_devices((8, 100), (8, 100, 1024))
def test_every_number_of_rows(fuselage, device, op, rows, dim):
    inputs = op.inputs((rows, dim), torch.bfloat16, device)
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})


# Layouts


def row_inputs_of(operators):
    """(op, the row inputs in an unusual layout): each of them, and all at once."""
    params = []
    for op in operators:
        for name in op.row_inputs:
            params.append(pytest.param(op, (name,), id=f"{op.name}-{name}"))
        if len(op.row_inputs) > 1:
            params.append(pytest.param(op, op.row_inputs, id=f"{op.name}-all"))
    return params


@pytest.mark.parametrize(("op", "names"), row_inputs_of(OPERATORS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@on_devices(LAYOUT_DIMS, (*LAYOUT_DIMS, 4104, 65544))
def test_layouts_of_rows(fuselage, device, op, names, layout, dtype, dim):
    shape = rows_in_layout(layout, dim, dtype, device).shape
    inputs = op.inputs(shape, dtype, device)
    for name in names:
        inputs[name] = rows_in_layout(layout, op.width * dim, dtype, device)
    kept = {name: inputs[name].clone() for name in names}
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})
    for name in names:
        assert torch.equal(inputs[name], kept[name]), f"{name} was written to"


@pytest.mark.parametrize("layout", LAYOUTS)
@each_operator(OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@on_devices(LAYOUT_DIMS, (*LAYOUT_DIMS, 4104, 65544))
def test_layouts_of_incoming_gradients(fuselage, device, op, layout, dtype, dim):
    shape = rows_in_layout(layout, dim, dtype, device).shape
    inputs = op.inputs(shape, dtype, device)
    grad_outs = {name: rows_in_layout(layout, dim, dtype, device) for name in op.outputs}
    actual = check_gradients(op, fuselage, inputs, {}, grad_outs=grad_outs)
    assert all(grad.is_contiguous() for grad in actual.values())


@each_operator(OPERATORS)
def test_incoming_gradients_of_a_sum(fuselage, device, op):
    inputs = op.inputs((5, 100), torch.float32, device)
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    sum(output.sum() for output in op.run(fuselage, leaves, {}).values()).backward()
    actual = {name: t.grad for name, t in leaves.items()}
    ones = {name: torch.ones(5, 100, device=device) for name in op.outputs}
    compare_gradients(op, inputs, {}, ones, actual, op.differentiable(inputs))


@each_operator(OPERATORS)
@each_dtype
@pytest.mark.parametrize(
    "layout",
    [
        lambda make, dim: make(2 * dim)[::2],
        lambda make, dim: make(dim + 1)[1:],
        lambda make, dim: make(1).expand(dim),
        lambda make, dim: make(dim, 3)[:, 1],
    ],
    ids=["strided", "misaligned", "expanded", "column"],
)
@on_devices(LAYOUT_DIMS, (*LAYOUT_DIMS, 4104))
def test_layouts_of_vectors(fuselage, device, op, layout, dtype, dim):
    inputs = op.inputs((7, dim), dtype, device)
    for name in op.vector_inputs:
        size = op.vector_size(name, dim)
        inputs[name] = layout(lambda *shape: normal(shape, dtype, device), size)
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})


# Special values


@each_operator([op for op in OPERATORS if op.has_eps])
@each_dtype
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-5, 0.1])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_eps_and_scale(fuselage, device, op, dtype, eps, scale):
    inputs = op.inputs((6, 100), dtype, device)
    for name in op.row_inputs:
        inputs[name] = inputs[name] * scale
    check_values(op, fuselage, inputs, {"eps": eps})
    check_gradients(op, fuselage, inputs, {"eps": eps})


@each_operator(OPERATORS)
@each_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_a_special_row_stays_in_its_row(fuselage, device, op, dtype, value):
    inputs = op.inputs((5, 100), dtype, device)
    inputs[op.main][2, 50] = value
    if value == 0.0:
        for name in op.row_inputs:
            inputs[name][2] = 0.0
    outputs = check_values(op, fuselage, inputs, {})
    others = torch.tensor([0, 1, 3, 4], device=device)
    assert all(output[others].isfinite().all() for output in outputs.values())


# Accuracy


@each_dtype
@each_style(OPERATORS)
@on_devices((1000, 4096), (128, 1000, 4096, 16384, 65536))
def test_accuracy_is_no_worse_than_pytorchs(fuselage, device, op, style, dtype, dim):
    options = op.options(style)
    inputs = op.inputs(((1 << 18) // dim, dim), dtype, device, style)
    actual = op.run(fuselage, inputs, options)
    eager = op.run_eager(inputs, options)
    # Of terms that are rounded, it is luck whose roundings are the reference's: against none.
    exact = {**options, "dtype": torch.float64} if op.rounds_terms else options
    expected = op.run_reference(inputs, op.without_roundings(exact))
    for name in op.outputs:
        assert actual[name].dtype == eager[name].dtype
        check_no_worse(actual[name], eager[name], expected[name], name)

    grad_outs = random_grad_outs(actual)
    requires = op.differentiable(inputs)
    expected = reference_gradients(op, inputs, exact, grad_outs)
    eager = gradients(op.run_eager, inputs, options, grad_outs, requires)
    actual = gradients(
        lambda leaves, opts: op.run(fuselage, leaves, opts), inputs, options, grad_outs, requires
    )
    for name in requires:
        if name not in op.vector_sizes:  # of a few values it is luck whose are closer
            luck = 2.0 if op.rounds_terms else 1.0
            check_no_worse(actual[name], eager[name], expected[name], f"grad_{name}", luck)


# Large inputs


def check_in_parts(op, kernel, inputs: dict, rows: list[int], part: int = 1 << 25) -> None:
    """Outputs and gradients of selected rows, and all of the vectors' gradients, a part at a time.

    Memory: inputs, outputs and gradients, and one more tensor for the incoming gradients.
    """
    main = inputs[op.main]
    index = torch.tensor(rows, device=main.device)
    grad_outs = dict.fromkeys(op.outputs, main[:, : main.shape[1] // op.width].flip(0))
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    outputs = op.run(kernel, leaves, {})
    selected = {name: t[index] if name in op.row_inputs else t for name, t in inputs.items()}
    expected = op.run_reference(selected, {})
    terms = op.run_output_terms(selected, {})
    for name in op.outputs:
        assert_close(outputs[name].detach()[index], expected[name], name, terms=terms.get(name))

    torch.autograd.backward(list(outputs.values()), list(grad_outs.values()))
    actual = {name: t.grad for name, t in leaves.items()}
    of_rows = {name: actual[name][index] for name in op.row_inputs}
    none = dict.fromkeys(op.vector_inputs)
    some_grad_outs = {name: g[index] for name, g in grad_outs.items()}
    compare_gradients(op, selected, {}, some_grad_outs, of_rows | none, op.row_inputs)

    count, dim = main.shape
    totals, sizes = dict.fromkeys(op.vector_inputs, 0), dict.fromkeys(op.vector_inputs, 0)
    step = max(1, part // dim)
    for begin in range(0, count, step):
        rows_here = slice(begin, begin + step)
        some = {n: t[rows_here] if n in op.row_inputs else t for n, t in inputs.items()}
        some_grad_outs = {name: g[rows_here] for name, g in grad_outs.items()}
        expected = reference_gradients(op, some, {}, some_grad_outs)
        terms = terms_of_gradients(op, some, {}, some_grad_outs)
        for name in op.vector_inputs:
            totals[name] = totals[name] + expected[name]
            sizes[name] = sizes[name] + terms[name]
    for name in op.vector_inputs:
        assert_close(actual[name], totals[name], f"grad_{name}", terms=sizes[name])


@each_operator(OPERATORS)
def test_the_check_of_large_inputs(fuselage, device, op):
    inputs = op.inputs((1000, 40), torch.bfloat16, device)
    check_in_parts(op, fuselage, inputs, [0, 500, 999], part=4000)


@pytest.mark.slow
@each_operator(OPERATORS)
@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
def test_many_rows(fuselage, device, op, dtype):
    shape = (250_003, 8) if device == "cpu" else (1_000_003, 64)
    inputs = op.inputs(shape, dtype, device)
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})


@pytest.mark.slow
@pytest.mark.gpu
@each_operator(OPERATORS)
@pytest.mark.parametrize(
    "shape",
    [
        ((1 << 19) + 3, 4096),
        ((1 << 31) // 4097 + 5, 4097),
        ((1 << 31) + 5, 1),
        ((1 << 13) + 5, 1 << 18),
    ],
    ids=str,
)
def test_more_than_two_to_the_31_elements(fuselage, op, shape):
    # In bfloat16, and for short rows their float32 statistics; the float64 of the check beside it.
    tensors = 2 * op.width * len(op.row_inputs) + len(op.outputs) + 2
    needed = (2 * tensors * shape[1] + 8) * shape[0] + 20 * 8 * (1 << 25)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    rows, dim = shape
    inputs = op.inputs((1, dim), torch.bfloat16, "cuda")
    for name in op.row_inputs:
        wide = (shape[0], op.width * shape[1])
        inputs[name] = torch.empty(wide, dtype=torch.bfloat16, device="cuda").normal_()
    across = (1 << 31) // dim
    check_in_parts(op, fuselage, inputs, [0, 1, rows // 2, across - 1, across, rows - 1])
    del inputs
    torch.cuda.empty_cache()


@pytest.mark.slow
@pytest.mark.gpu
@each_operator(OPERATORS)
def test_rows_more_than_two_to_the_31_elements_apart(fuselage, op):
    stride = (1 << 31) + 16
    width = op.width * 4096
    buffer = torch.empty(2 * stride + width, dtype=torch.bfloat16, device="cuda")
    inputs = op.inputs((3, 4096), torch.bfloat16, "cuda")
    for name in op.row_inputs:
        far = buffer.as_strided((3, width), (stride, 1), 0)
        far.copy_(inputs[name])
        check_values(op, fuselage, {**inputs, name: far}, {})
        check_gradients(op, fuselage, {**inputs, name: far}, {})


@pytest.mark.gpu
@each_operator(OPERATORS)
@pytest.mark.parametrize("layout", ["wider", "wider_by_an_odd_number", "misaligned", "heads"])
@pytest.mark.parametrize("dim", [128, 4096, 12288, 65536])
def test_layouts_of_many_rows(fuselage, op, layout, dim):
    rows = 1003
    width = op.width * dim

    def make(*shape):
        return normal(
            (shape[0] * rows, *shape[1:]) if len(shape) > 1 else (shape[0] * rows,),
            torch.bfloat16,
            "cuda",
        )

    x = {
        "wider": lambda: make(1, width + 32)[:, :width],
        "wider_by_an_odd_number": lambda: make(1, width + 3)[:, :width],
        "misaligned": lambda: make(width + 1)[1 : 1 + rows * width].view(rows, width),
        "heads": lambda: make(1, 2, width).view(17, 59, 2, width).transpose(1, 2),
    }[layout]()
    inputs = op.inputs((*x.shape[:-1], dim), torch.bfloat16, "cuda")
    inputs[op.main] = x
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})


# The checks themselves


def test_the_comparison_can_fail():
    expected = torch.randn(1000, dtype=torch.float64)
    for dtype in (torch.float32, *HALVES):
        right = expected.to(dtype)
        assert_close(right, expected, "right")
        last_wrong = torch.cat([right[:-1], torch.zeros(1, dtype=dtype)])
        wrongs = [last_wrong, right * 1.01, torch.full_like(right, float("nan"))]
        if dtype != torch.float32:  # whose noise is larger than an ulp
            one_ulp_off = torch.nextafter(right, torch.full_like(right, float("inf")))
            wrongs += [one_ulp_off]
            with pytest.raises(AssertionError, match="rounded differently"):
                assert_close(one_ulp_off, expected, "one ulp off", inner_rounding=dtype)
        for wrong in wrongs:
            with pytest.raises(AssertionError, match="wrong"):
                assert_close(wrong, expected, "wrong")
