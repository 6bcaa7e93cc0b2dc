"""torch.library.opcheck and torch.compile."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits, each_operator, each_style, random_grad_outs
from operators import OPERATORS, SAMPLED
from torch._dynamo.testing import CompileCounterWithBackend

BATCHES = (4, 7, 30, 129)
# In the Hub's subset, which has a minute: opcheck and Inductor take seconds an operator.
IN_CI = ("rms_norm", "silu_and_mul", "apply_rotary", "lm_head_sample")


class Compilations(CompileCounterWithBackend):
    """Counts the compilations after those of the first call.

    NOTE: the first call may compile twice: Dynamo first takes `eps` and its like for variables.
    """

    def __init__(self, backend: str):
        super().__init__(backend)
        self.first = None

    def none_since_the_first_call(self) -> bool:
        if self.first is None:
            self.first = self.frame_count
            assert self.first > 0, "nothing was compiled"
        return self.frame_count == self.first


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_operator(SAMPLED, in_ci=IN_CI)
@pytest.mark.slow
def test_opcheck(fuselage, device, op):
    for overload, arguments in op.samples(fuselage, device):
        results = torch.library.opcheck(overload, arguments)
        assert set(results.values()) == {"SUCCESS"}, overload
        assert "test_aot_dispatch_dynamic" in results


@each_operator(OPERATORS)
def test_every_op_is_checked(fuselage, op):
    """No op is registered that `samples` forgets."""
    checked = {
        overload._schema.name.split("::")[1]
        for each in SAMPLED
        for overload, _ in each.samples(fuselage, "cpu")
    }
    prefix = fuselage.norm.ops.rms_norm.default._schema.name.split("::")[0] + "::"
    registered = {
        schema.name.removeprefix(prefix)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(prefix)
    }
    assert op.registered_name in registered
    # The first takes and gives no values. The others have checks in quant/test_fp8_product.py,
    # loss/test_strips.py and integrations/test_products.py; those of strips are only of GPUs.
    of_strips = {"makes_strip_sums", "head_strip_sums", "log_probs_of_strips"}
    others = {"read_tuning", "fp8_linear", "fp8_product"} | of_strips
    assert registered - {"linear_of_parts"} == checked | others  # of integrations, once imported


def check_compiled(op, kernel, device, style, dtype, backend, *, training: bool) -> None:
    """One compilation serves every batch size, and gives the bits of eager mode."""
    options = op.options(style)
    counter = Compilations(backend)
    names = tuple(op.inputs((2, 8), dtype, device, style))

    def call(*values):
        return tuple(op.run(kernel, dict(zip(names, values, strict=True)), options).values())

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for batch in BATCHES:
        inputs = op.inputs((batch, 3, 64), dtype, device, style)
        grad_outs = list(random_grad_outs(op.run(kernel, inputs, options)).values())
        results = []
        for function in (call, compiled):
            values = [
                t if t is None else t.clone().requires_grad_(training) for t in inputs.values()
            ]
            outputs = function(*values)
            result = list(outputs)
            if training:
                leaves = [t for t in values if t is not None]
                result += torch.autograd.grad(outputs, leaves, grad_outs)
            results.append([t.detach() for t in result])
        for index, (eager, traced) in enumerate(zip(*results, strict=True)):
            assert_same_bits(traced, eager, f"result {index} at batch {batch}")
        assert counter.none_since_the_first_call(), f"recompiled for batch {batch}"


@each_style(OPERATORS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compile(fuselage, device, op, style, training):
    check_compiled(op, fuselage, device, style, torch.bfloat16, "aot_eager", training=training)


@each_operator(OPERATORS, in_ci=IN_CI)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compile_with_inductor(fuselage, device, op, training):
    style = "llama" if "llama" in op.styles else "torch"
    check_compiled(op, fuselage, device, style, torch.bfloat16, "inductor", training=training)


@each_operator(OPERATORS)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_compile_for_inference(fuselage, device, op, guard):
    counter = Compilations("aot_eager")
    compiled = torch.compile(
        lambda inputs: op.run(fuselage, inputs, {}), fullgraph=True, dynamic=True, backend=counter
    )
    with guard():
        for batch in BATCHES:
            inputs = op.inputs((batch, 64), torch.float32, device)
            for t in inputs.values():
                t.requires_grad_()
            outputs = compiled(inputs)
            for name, expected in op.run(fuselage, inputs, {}).items():
                assert outputs[name].grad_fn is None
                assert_same_bits(outputs[name], expected, name)
            assert counter.none_since_the_first_call(), f"recompiled for batch {batch}"


@pytest.mark.long
@each_operator(OPERATORS)
def test_compile_with_neighbours_and_some_gradients(fuselage, device, op):
    """In a graph with other work around it, with a frozen weight and an unused output."""

    def block(x, others):
        outputs = op.run(fuselage, {op.main: torch.sin(x) * 2, **others}, {})
        # Large results would be all noise.
        return torch.cos(0.1 * outputs["out"]) + x[..., : outputs["out"].shape[-1]]

    counter = Compilations("inductor")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for batch in BATCHES:
        inputs = op.inputs((batch, 96), torch.float32, device)
        x = inputs.pop(op.main).requires_grad_()
        results = [(y := f(x, inputs), *torch.autograd.grad(y.sum(), x)) for f in (block, compiled)]
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)  # sin and cos are not those of eager mode
        assert counter.none_since_the_first_call(), f"recompiled for batch {batch}"


@each_operator(OPERATORS)
@pytest.mark.slow
def test_compile_with_another_dim_and_dtype(fuselage, device, op):
    """Recompiling for these is fine, being wrong is not."""
    for dtype in (torch.float32, torch.bfloat16):
        compiled = torch.compile(
            lambda inputs: op.run(fuselage, inputs, {}),
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        for shape in ((3, 8), (1, 8), (2, 100), (5,), (0, 8), (2, 3, 4, 5)):
            inputs = op.inputs(shape, dtype, device)
            outputs = compiled(inputs)
            for name, expected in op.run(fuselage, inputs, {}).items():
                assert_same_bits(outputs[name], expected, name)
        torch._dynamo.reset()


@pytest.mark.long
@each_operator(OPERATORS)
def test_compile_with_strided_inputs(fuselage, device, op):
    compiled = torch.compile(
        lambda inputs: op.run(fuselage, inputs, {}),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for transpose in (
        lambda t: t.transpose(0, 1),
        lambda t: t[:, ::2],
        lambda t: t[..., op.width :],
    ):
        inputs = op.inputs((4, 6, 9), torch.bfloat16, device)
        for name in op.row_inputs:
            inputs[name] = transpose(inputs[name])
        for name in op.vector_inputs:
            inputs[name] = inputs[name][: inputs[op.main].shape[-1]]
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        outputs = compiled(leaves)
        for name, expected in op.run(fuselage, inputs, {}).items():
            assert outputs[name].stride() == expected.stride()
            assert_same_bits(outputs[name].detach(), expected, name)
        sum(output.sum() for output in outputs.values()).backward()
        for name, t in leaves.items():
            assert t.grad is not None, name


@pytest.mark.gpu
@each_operator(OPERATORS)
def test_compile_reduce_overhead(fuselage, op):
    """Inductor's CUDA graphs."""
    names = tuple(op.inputs((2, 8), torch.bfloat16, "cuda"))
    compiled = torch.compile(
        lambda *values: tuple(op.run(fuselage, dict(zip(names, values, strict=True)), {}).values()),
        fullgraph=True,
        mode="reduce-overhead",
    )
    for _ in range(4):
        inputs = op.inputs((64, 4096), torch.bfloat16, "cuda")
        outputs = compiled(*inputs.values())
        for name, output in zip(op.outputs, outputs, strict=True):
            assert_same_bits(output.clone(), op.run(fuselage, inputs, {})[name], name)


@each_operator(OPERATORS)
def test_export(fuselage, device, op):
    names = op.inputs((2, 8), torch.bfloat16, device).keys()

    class Model(torch.nn.Module):
        def forward(self, *values):
            return tuple(op.run(fuselage, dict(zip(names, values, strict=True)), {}).values())

    inputs = op.inputs((4, 64), torch.bfloat16, device)
    batch = torch.export.Dim("batch", min=2)
    dynamic = {"values": tuple({0: batch} if name in op.row_inputs else {} for name in names)}
    with torch.no_grad():
        exported = torch.export.export(Model(), tuple(inputs.values()), dynamic_shapes=dynamic)
    inputs = op.inputs((9, 64), torch.bfloat16, device)
    outputs = exported.module()(*inputs.values())
    for name, output in zip(op.outputs, outputs, strict=True):
        assert_same_bits(output, op.run(fuselage, inputs, {})[name], name)
