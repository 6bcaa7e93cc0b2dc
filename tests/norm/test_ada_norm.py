"""The adaptive norms with scale, shift and gate for each batch element, and for each row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import (
    DTYPES,
    FLOAT32_ROUNDINGS,
    HALVES,
    UNIT,
    Style,
    assert_close,
    assert_same_bits,
    check_gradients,
    check_no_worse,
    check_values,
    each_dtype,
    normal,
    on_devices,
    random_grad_outs,
    reference_gradients,
    terms_of_gradients,
)
from operators import ADA_LAYER_NORM, ADA_RMS_NORM, GATE_RESIDUAL_ADA_NORM, LAYER_NORM
from torch._dynamo.testing import CompileCounterWithBackend

ADAPTIVE = (ADA_LAYER_NORM, ADA_RMS_NORM, GATE_RESIDUAL_ADA_NORM)
MODULATIONS = ("gate", "scale", "shift")

# The shape of scale, shift and gate for that of x.
FORMS = {
    "vector": lambda shape: shape[-1:],
    "one": lambda shape: (*[1] * (len(shape) - 1), shape[-1]),
    "batch": lambda shape: (shape[0], shape[-1]),
    "batch_with_ones": lambda shape: (shape[0], *[1] * (len(shape) - 2), shape[-1]),
    "row": lambda shape: shape,
}
each_adaptive = pytest.mark.parametrize("op", ADAPTIVE, ids=lambda op: op.name)
each_form = pytest.mark.parametrize("form", FORMS)


def in_form(op, form: str, modulation="same"):
    """`op` whose inputs have scale, shift and gate in this form."""
    style = Style(inputs={"form": FORMS[form], "modulation": modulation})
    return replace(op, styles={"torch": style})


@pytest.mark.kernels_ci
@each_adaptive
@each_form
@on_devices((33, 1000), (33, 1000, 1536, 4096, 8200, 65552))
def test_forms(fuselage, device, op, form, dim):
    for modulation in ("same", torch.float32):
        op = in_form(op, form, modulation)
        for dtype in DTYPES:
            inputs = op.inputs((3, 5, dim), dtype, device)
            check_values(op, fuselage, inputs, {})
            check_gradients(op, fuselage, inputs, {})


@each_adaptive
@pytest.mark.parametrize(
    "shape", [(2, 300, 72), (300, 2, 72), (7, 1, 72), (1, 9, 72), (2, 3, 2, 72), (5, 72)], ids=str
)
def test_shapes(fuselage, device, op, shape):
    """Few and many batch elements of few and many rows: partial sums within and over groups."""
    for form in FORMS:
        if len(shape) == 2 and form == "batch":
            continue  # without a dimension between, that is a row each
        op = in_form(op, form)
        inputs = op.inputs(shape, torch.bfloat16, device)
        check_values(op, fuselage, inputs, {})
        check_gradients(op, fuselage, inputs, {})


@pytest.mark.parametrize("gate_form", FORMS)
@pytest.mark.parametrize("scale_form", ["vector", "batch", "row"])
def test_a_gate_of_another_form(fuselage, device, gate_form, scale_form):
    op = in_form(GATE_RESIDUAL_ADA_NORM, scale_form)
    shape = (3, 40, 72)
    inputs = op.inputs(shape, torch.float32, device)
    inputs["gate"] = normal(FORMS[gate_form](shape), torch.float32, device)
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})
    # Without weight and bias, whose gradients belong to all rows.
    check_gradients(op, fuselage, inputs | {"weight": None, "bias": None}, {})


@each_adaptive
def test_what_may_be_missing(fuselage, device, op):
    names = [name for name in (*MODULATIONS, "weight", "bias") if name in op.vector_inputs]
    for form in ("vector", "batch", "row"):
        for missing in ([name] for name in names):
            inputs = in_form(op, form).inputs((2, 5, 72), torch.float32, device)
            inputs |= dict.fromkeys(missing)
            check_values(op, fuselage, inputs, {})
            check_gradients(op, fuselage, inputs, {})
    inputs = op.inputs((2, 5, 72), torch.float32, device) | dict.fromkeys(names)
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})
    for weight, bias in ((None, None), ("same", None), (None, "same"), (torch.float32, "same")):
        style = {"weight": weight, "bias": bias}
        inputs = LAYER_NORM.make_inputs((2, 5, 72), torch.bfloat16, device, **style)
        check_values(LAYER_NORM, fuselage, inputs, {})
        check_gradients(LAYER_NORM, fuselage, inputs, {})


@pytest.mark.parametrize("form", ["vector", "batch", "row"])
def test_root_mean_square_with_a_gate(fuselage, device, form):
    op = in_form(GATE_RESIDUAL_ADA_NORM, form)
    for dtype in DTYPES:
        inputs = op.inputs((3, 20, 104), dtype, device) | {"bias": None}
        check_values(op, fuselage, inputs, {"norm": "rms"})
        check_gradients(op, fuselage, inputs, {"norm": "rms"})


@each_adaptive
@pytest.mark.parametrize("form", ["batch", "row"])
def test_gradients_only_where_required(fuselage, device, op, form):
    op = in_form(op, form)
    inputs = op.inputs((2, 6, 72), torch.bfloat16, device)
    names = op.differentiable(inputs)
    for some in ([name] for name in names):
        check_gradients(op, fuselage, inputs, {}, requires=some)
        check_gradients(op, fuselage, inputs, {}, requires=set(names) - set(some))


# Views of one tensor

CHUNKS = {
    "chunks_of_columns": lambda t: [c.squeeze(1) for c in t.flatten(1)[:, None].chunk(6, -1)],
    "chunks_with_ones": lambda t: t.flatten(1)[:, None].chunk(6, -1),
    "unbound": lambda t: t.unbind(1),
    "split": lambda t: t.split(1, 1),
}


@each_adaptive
@pytest.mark.parametrize("chunks", CHUNKS)
@on_devices((72, 75), (72, 75, 3072))
def test_slices_of_one_tensor(fuselage, device, op, chunks, dim):
    """As blocks have them: six parts of one projection, whose gradient they add up to."""
    op = replace(op, styles={"torch": Style()})
    for dtype in (torch.float32, torch.bfloat16):
        inputs = op.inputs((2, 9, dim), dtype, device)
        names = [name for name in MODULATIONS if name in inputs]
        whole = normal((2, 6, dim), dtype, device, scale=0.5).requires_grad_()
        parts = CHUNKS[chunks](whole)
        inputs |= dict(zip(names, parts[1:], strict=False))
        assert parts[1].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        detached = {name: t.detach() for name, t in inputs.items()}
        check_values(op, fuselage, detached, {})
        leaves = {n: t if n in names else t.requires_grad_() for n, t in inputs.items()}
        outputs = op.run(fuselage, leaves, {})
        grad_outs = random_grad_outs(outputs)
        torch.autograd.backward(list(outputs.values()), list(grad_outs.values()))
        expected = reference_gradients(op, detached, {}, grad_outs)
        terms = terms_of_gradients(op, detached, {}, grad_outs)
        for name, actual in zip(names, CHUNKS[chunks](whole.grad)[1:], strict=False):
            assert_close(actual, expected[name], f"grad_{name}", terms=terms[name])
        assert not CHUNKS[chunks](whole.grad)[0].any()


@pytest.mark.parametrize("name", MODULATIONS)
@pytest.mark.parametrize(
    "layout",
    [
        lambda make, dim: make(2, 9, dim + 5)[..., 3 : dim + 3],
        lambda make, dim: make(9, 2, dim).transpose(0, 1),
        lambda make, dim: make(2, 9, 2 * dim)[..., ::2],
        lambda make, dim: make(1, 1, dim).expand(2, 9, dim),
        lambda make, dim: make(2, 1, dim).expand(2, 9, dim),
        lambda make, dim: make(2, 9, 1).expand(2, 9, dim),
    ],
    ids=["misaligned", "transposed", "strided", "expanded", "expanded_batch", "expanded_last"],
)
def test_layouts_of_rows(fuselage, device, name, layout):
    op = in_form(GATE_RESIDUAL_ADA_NORM, "row")
    for dim in (40, 75):
        inputs = op.inputs((2, 9, dim), torch.bfloat16, device)
        inputs[name] = layout(lambda *shape: normal(shape, torch.bfloat16, device), dim)
        check_values(op, fuselage, inputs, {})
        check_gradients(op, fuselage, inputs, {})


# Numerics


@each_dtype
@pytest.mark.parametrize("mean", [30.0, 1e3])
@on_devices((1000, 4096), (1000, 4096, 16384))
def test_a_large_mean_costs_no_accuracy(fuselage, device, dtype, mean, dim):
    x = normal((64, dim), dtype, device, mean=mean)
    # In halves, deviations of the size of a rounding: of each row of other ones.
    expected = LAYER_NORM.run_reference({"x": x}, {})["out"]
    actual = fuselage.layer_norm(x)
    eager = F.layer_norm(x.float(), (dim,)).to(dtype)
    check_no_worse(actual, eager, expected, "out")
    terms = LAYER_NORM.run_output_terms({"x": x}, {})["out"]
    # A formula that takes the square of the mean from the mean of squares is off by more than this.
    assert (actual.double() - expected).abs().max() <= 0.02 + 2**-21 * terms.max()


# Of many rows, one warp each; and of few, blocks of many threads: threads of eight vectors.
@each_dtype
@on_devices((), (1152, 2048, 12288, 16384))
def test_many_rows_have_the_bits_of_few(fuselage, device, dtype, dim):
    dim //= dtype.itemsize // 2
    rows = 16000 if dim <= 2048 else 100
    x = normal((rows, dim), dtype, device, mean=3.0)
    weight, bias = normal((dim,), dtype, device), normal((dim,), dtype, device)
    scale, shift = normal((dim,), torch.float32, device), normal((dim,), torch.float32, device)
    some = slice(rows // 2, rows // 2 + 7)
    moved = torch.empty(rows * dim + 1, dtype=dtype, device=device)[1:].view(rows, dim).copy_(x)
    for call in (
        lambda x: fuselage.layer_norm(x, weight, bias),
        lambda x: fuselage.ada_layer_norm(x, scale, shift),
        lambda x: fuselage.ada_rms_norm(x, scale, shift),
    ):
        out = call(x)
        assert_same_bits(call(x[some]), out[some], "few rows")
        assert_same_bits(call(moved), out, "rows off a boundary")
    check_values(LAYER_NORM, fuselage, {"x": x[some], "weight": weight, "bias": bias}, {})


@pytest.mark.parametrize("value", [991.0, 997.5, 3008.0, 9.9766, -0.1])
def test_rows_of_equal_elements_are_zero(fuselage, device, value):
    """What is left of the deviations from their mean would be made a number of any size by rstd."""
    for dtype in DTYPES:
        for dim in (1, 64, 512, 4096):
            # Few bits, so that their sum is exact.
            x = torch.full((3, dim), value, dtype=torch.float16, device=device).to(dtype)
            bias = normal((dim,), dtype, device)
            for eps in (1e-5, 1e-12):
                out = fuselage.layer_norm(x, None, bias, eps)
                assert_same_bits(out, bias.expand(3, dim), f"{dtype} {dim} {eps}")


@each_adaptive
@pytest.mark.parametrize("form", ["batch", "row"])
def test_accuracy_is_no_worse_than_pytorchs(fuselage, device, op, form):
    op = in_form(op, form)
    for dtype in DTYPES:
        inputs = op.inputs((4, 64, 512), dtype, device)
        actual, eager = op.run(fuselage, inputs, {}), op.run_eager(inputs, {})
        expected = op.run_reference(inputs, {})
        for name in op.outputs:
            check_no_worse(actual[name], eager[name], expected[name], name)


@each_dtype
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_norm_reads_the_rounded_sum(fuselage, device, dtype, norm):
    inputs = in_form(GATE_RESIDUAL_ADA_NORM, "batch").inputs((3, 7, 104), dtype, device)
    if norm == "rms":
        inputs["bias"] = None
    out, new_residual = fuselage.gate_residual_ada_norm(**inputs, norm=norm)
    del inputs["x"], inputs["residual"], inputs["gate"]
    if norm == "rms":
        del inputs["bias"]
        expected = fuselage.ada_rms_norm(new_residual, **inputs)
    else:
        expected = fuselage.ada_layer_norm(new_residual, **inputs)
    assert_same_bits(out, expected, "out")


@each_adaptive
@pytest.mark.parametrize("form", ["batch", "row"])
def test_rows_do_not_depend_on_the_batch(fuselage, device, op, form):
    op = in_form(op, form)
    inputs = op.inputs((6, 40, 264), torch.bfloat16, device)
    per_batch = [name for name in inputs if inputs[name].dim() > 1]

    def run(inputs, grad_outs):
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        outputs = op.run(fuselage, leaves, {})
        grads = torch.autograd.grad(list(outputs.values()), leaves["x"], list(grad_outs.values()))
        return [*(t.detach() for t in outputs.values()), *grads]

    grad_outs = random_grad_outs(op.run(fuselage, inputs, {}))
    whole = run(inputs, grad_outs)
    for again in run(inputs, grad_outs), run(inputs, grad_outs):
        for first, second in zip(whole, again, strict=True):
            assert_same_bits(second, first, "again")
    part = slice(2, 3)
    some = {name: t[part] if name in per_batch else t for name, t in inputs.items()}
    alone = run(some, {name: g[part] for name, g in grad_outs.items()})
    for actual, expected in zip(alone, whole, strict=True):
        assert_same_bits(actual, expected[part], "alone")


# Contracts


def test_what_is_kept_for_the_backward(fuselage, device):
    """x only for the gradient of the gate, and shift and bias never beside scale and weight."""
    op = in_form(GATE_RESIDUAL_ADA_NORM, "row")
    inputs = op.inputs((2, 9, 72), torch.bfloat16, device)
    kept = []

    def pack(tensor):
        kept.extend(name for name, t in inputs.items() if t.data_ptr() == tensor.data_ptr())
        return tensor

    for requires in (("x", "residual"), ("gate",)):
        kept.clear()
        for name, t in inputs.items():
            t.requires_grad_(name in requires)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            op.run(fuselage, inputs, {})
        assert set(kept) == {"gate", "scale", "weight"} | ({"x"} if "gate" in requires else set())


@each_adaptive
def test_errors(fuselage, device, op):
    for name in set(MODULATIONS) & set(op.vector_inputs):
        inputs = in_form(op, "batch_with_ones").inputs((3, 4, 8), torch.float16, device)
        for wrong, message in (
            (inputs[name][:2], r"\[3, 4, 8\], got \[2, 1, 8\]"),
            (inputs[name][..., :7], r"\[3, 4, 8\], got \[3, 1, 7\]"),
            (inputs[name].expand(3, 3, 8), r"\[3, 4, 8\], got \[3, 3, 8\]"),
            (inputs[name][None], r"\[3, 4, 8\], got \[1, 3, 1, 8\]"),
            (inputs[name][0, 0, 0], r"\[3, 4, 8\], got \[\]"),
            (inputs[name].double(), "float16, bfloat16 or float32, got Double"),
            (inputs[name].bfloat16(), "must be float16 as `x`, or float32, got bfloat16"),
        ):
            for requires_grad in (False, True):
                wrongs = inputs | {name: wrong.detach().requires_grad_(requires_grad)}
                with pytest.raises(RuntimeError, match=f"fuselage::{op.name}: `{name}`.*{message}"):
                    op.run(fuselage, wrongs, {})
    inputs["shift"] = inputs["shift"][0, 0]
    with pytest.raises(RuntimeError, match="`shift` must have the shape of `scale`"):
        op.run(fuselage, inputs, {})


def test_another_norm_is_refused(fuselage, device):
    inputs = GATE_RESIDUAL_ADA_NORM.inputs((3, 8), torch.float32, device)
    with pytest.raises(RuntimeError, match="`norm` must be one of layer, rms, got 'batch'"):
        fuselage.gate_residual_ada_norm(**inputs, norm="batch")


@pytest.mark.slow
@each_adaptive
@pytest.mark.parametrize("form", ["batch", "batch_with_ones", "row"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compile(fuselage, device, op, form, training):
    """One compilation serves every batch size and number of rows, with the bits of eager mode."""
    torch._dynamo.reset()
    op = in_form(op, form)
    counter = CompileCounterWithBackend("aot_eager")
    names = tuple(op.inputs((2, 3, 8), torch.bfloat16, device))

    def call(*values):
        return tuple(op.run(fuselage, dict(zip(names, values, strict=True)), {}).values())

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    first = None
    for shape in ((3, 4, 72), (2, 9, 72), (5, 2, 72)):
        inputs = op.inputs(shape, torch.bfloat16, device)
        results = []
        for function in (call, compiled):
            values = [t.detach().requires_grad_(training) for t in inputs.values()]
            outputs = function(*values)
            grads = []
            if training:
                grad_outs = [torch.ones_like(t) for t in outputs]
                grads = torch.autograd.grad(outputs, values, grad_outs)
            results.append([t.detach() for t in (*outputs, *grads)])
        for eager, traced in zip(*results, strict=True):
            assert_same_bits(traced, eager, str(shape))
        first = first or counter.frame_count
        assert counter.frame_count == first, f"recompiled for {shape}"


# LayerNorm


@pytest.mark.kernels_ci
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_the_module_is_like_torchs(fuselage, device, options):
    for dtype in (torch.float32, torch.bfloat16):
        theirs = torch.nn.LayerNorm(96, **options, device=device, dtype=dtype)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter)
        ours = fuselage.modules.LayerNorm(96, **options, device=device, dtype=dtype)
        ours.load_state_dict(theirs.state_dict())
        assert list(ours.state_dict()) == list(theirs.state_dict())
        x, grad_out = (normal((4, 5, 96), dtype, device) for _ in range(2))
        results = []
        for module in (ours, theirs):
            leaf = x.clone().requires_grad_()
            out = module(leaf)
            out.backward(grad_out)
            results.append([out.detach(), leaf.grad, *(p.grad for p in module.parameters())])
        tolerance = 4 * torch.finfo(dtype).eps
        for actual, expected in zip(*results, strict=True):
            scale = expected.abs().max()
            torch.testing.assert_close(
                actual / scale, expected / scale, rtol=tolerance, atol=tolerance
            )
        with pytest.raises(RuntimeError, match="48"):
            ours(x[..., :48])
    fresh = fuselage.modules.LayerNorm(8, device=device)
    assert torch.equal(fresh.weight, torch.ones_like(fresh.weight)) and not fresh.bias.any()
    assert "eps=1e-05" in repr(fresh)


def test_the_modules_of_adaptive_norms(fuselage, device):
    x = normal((2, 5, 96), torch.bfloat16, device)
    scale, shift = (normal((2, 1, 96), torch.bfloat16, device) for _ in range(2))
    plain = fuselage.modules.AdaLayerNorm(96, eps=1e-5)
    assert list(plain.parameters()) == []
    expected = fuselage.ada_layer_norm(x, scale, shift, eps=1e-5)
    assert_same_bits(plain(x, scale, shift), expected, "AdaLayerNorm")
    plain = fuselage.modules.AdaRMSNorm(96, eps=1e-5)
    expected = fuselage.ada_rms_norm(x, scale, shift, eps=1e-5)
    assert_same_bits(plain(x, scale, shift), expected, "AdaRMSNorm")
    for module in (fuselage.modules.AdaLayerNorm(48), fuselage.modules.AdaRMSNorm(48)):
        with pytest.raises(RuntimeError, match="of 48 columns"):
            module(x, scale, shift)
    module = fuselage.modules.AdaLayerNorm(96, elementwise_affine=True, device=device)
    assert sorted(module.state_dict()) == ["bias", "weight"]
    expected = fuselage.ada_layer_norm(x, scale, shift, module.weight, module.bias)
    assert_same_bits(module(x, scale, shift), expected, "with a weight")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_hub_layer(fuselage, device, compiled):
    from pathlib import Path

    from kernels import (
        LocalLayerRepository,
        Mode,
        kernelize,
        use_kernel_forward_from_hub,
        use_kernel_mapping,
    )

    @use_kernel_forward_from_hub("LayerNorm")
    class Norm(torch.nn.LayerNorm):
        pass

    layer = LocalLayerRepository(Path(fuselage.__file__).parent, layer_name="LayerNorm")
    mode = Mode.TRAINING | Mode.TORCH_COMPILE if compiled else Mode.TRAINING
    x = normal((4, 5, 96), torch.bfloat16, device)
    for options in ({}, {"bias": False}, {"elementwise_affine": False}):
        norm = Norm(96, **options, device=device, dtype=torch.bfloat16)
        with use_kernel_mapping({"LayerNorm": {device: layer}}, inherit_mapping=False):
            kernelize(norm, mode=mode, device=device, use_fallback=False)
        assert norm.forward.__func__.__module__ == fuselage.layers.__name__
        torch._dynamo.reset()
        call = torch.compile(norm, fullgraph=True, backend="aot_eager") if compiled else norm
        out = call(x)
        expected = fuselage.layer_norm(x, norm.weight, norm.bias, norm.eps)
        assert_same_bits(out.detach(), expected.detach(), "out")
        if not compiled:
            with pytest.raises(RuntimeError, match="48"):
                norm(x[..., :48])
    two = Norm((5, 96), device=device)
    with use_kernel_mapping({"LayerNorm": {device: layer}}, inherit_mapping=False):
        kernelize(two, mode=Mode.TRAINING, device=device, use_fallback=False)
    with pytest.raises(RuntimeError, match="last dimension"):
        two(x.float())


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
def test_many_rows(fuselage, device, dtype):
    """More rows than are on a GPU at once, of few batch elements."""
    op = in_form(GATE_RESIDUAL_ADA_NORM, "batch_with_ones")
    inputs = op.inputs((2, 20_001 if device == "cuda" else 2001, 64), dtype, device)
    check_values(op, fuselage, inputs, {})
    check_gradients(op, fuselage, inputs, {})


# Rows whose elements are all alike

# (x - mean) * rstd is zero. A mean of float32 values is wrong by 2^-18 of their size at most (a
# thread's 69 additions in turn), and what it is wrong by is known, and taken off, to as much of it.
# eps makes rstd 316. A CPU does so where the mean is above 4 / rstd: below, it is float32 noise.
NEXT_TO_ZERO = 2.0**-18 * 2.0**-18 * 317
# A GPU takes the mean of half precision as it is. Sums of up to 2^13 values of 11 bits are exact.
NEXT_TO_ZERO_OF_LONG_HALVES = 2.0**-18 * 317


@each_dtype
@pytest.mark.parametrize("value", [300.1, -7.3, 1e-3, 6e4])
@on_devices((1, 2, 3, 7, 9, 96, 1000), (1, 2, 3, 7, 9, 96, 1000, 4096, 4099, 12289, 65552, 140008))
def test_constant_rows(fuselage, device, dtype, value, dim):
    x = torch.full((5, dim), value, device=device).to(dtype).requires_grad_()
    out = fuselage.layer_norm(x, eps=1e-5)
    limit = NEXT_TO_ZERO if dtype == torch.float32 else 0.0
    if dtype in HALVES and device == "cuda" and dim > 8192:
        limit = NEXT_TO_ZERO_OF_LONG_HALVES
    noise = FLOAT32_ROUNDINGS * UNIT[torch.float32] if dtype == torch.float32 else 0.0
    assert out.abs().max() <= abs(value) * limit + noise
    if limit == NEXT_TO_ZERO_OF_LONG_HALVES:
        return
    grad = normal((5, dim), dtype, device)
    out.backward(grad)
    # Of a row without deviations xhat is zero, and the gradient rstd * (grad - mean(grad)).
    centred = grad.double() - grad.double().mean(-1, keepdim=True)
    expected = centred / (1e-5**0.5)
    terms = (grad.double().abs() + grad.double().abs().mean(-1, keepdim=True)) * 317
    assert_close(x.grad, expected, "grad_x", terms=terms)
