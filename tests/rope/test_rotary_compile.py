"""The rope family under torch.compile. (opcheck of its ops is in tests/test_compile.py.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import assert_same_bits, random_grad_outs
from rotary_cases import NAMES, Case
from test_compile import Compilations

# NOTE: sizes that are equal in the first call (to one of heads, too) are taken to be one by Dynamo.
SIZES = ((5, 6), (7, 9), (3, 30), (2, 129))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check_compiled(kernel, device, name, case, backend, *, training: bool) -> None:
    """One compilation serves every batch and number of tokens, and gives the bits of eager mode."""
    counter = Compilations(backend)
    outputs_of = replace(case.make(name, torch.bfloat16, device)[0], defaults={}).run

    def call(inputs, options):
        return outputs_of(kernel, inputs, options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for batch, tokens in SIZES:
        made, inputs = replace(case, batch=batch, tokens=tokens).make(name, torch.bfloat16, device)
        options = made.defaults | ({"offset": tokens} if case.positions == "offset" else {})
        if case.positions == "offset":
            options |= {t: options[t].repeat(2, 1) for t in ("cos", "sin")}
        grad_outs = random_grad_outs(call(inputs, options))
        results = []
        for run in (call, compiled):
            leaves = {n: t.clone().requires_grad_(training) for n, t in inputs.items()}
            outputs = run(leaves, options)
            result = list(outputs.values())
            if training:
                gradients = torch.autograd.grad(
                    result, list(leaves.values()), list(grad_outs.values())
                )
                result += gradients
            results.append([t.detach() for t in result])
        for index, (eager, traced) in enumerate(zip(*results, strict=True)):
            label = f"result {index} of {batch}, {tokens}"
            assert_same_bits(traced, eager, label)
            assert traced.stride() == eager.stride(), label
        assert counter.none_since_the_first_call(), f"recompiled for {batch}, {tokens}"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(heads_dim=1, dim=80, rotary_dim=32, half=True),
        Case(positions="ids:int64"),
        Case(positions="one_offset:int64"),
        Case(positions="offset"),
        Case(q_heads=None, k_heads=None, dim=96, interleaved=True),
        Case(packed=True, positions="shared_ids:int64"),
    ],
    ids=["plain", "partial", "ids", "one_offset", "offset", "three_dimensions", "packed"],
)
def test_compile(fuselage, device, name, case, training):
    check_compiled(fuselage, device, name, case, "aot_eager", training=training)


@pytest.mark.long
def test_compile_with_inductor(fuselage, device):
    check_compiled(fuselage, device, "qk_norm_rotary", Case(), "inductor", training=True)


def test_compile_with_inductor_of_rotary(fuselage, device):
    check_compiled(fuselage, device, "apply_rotary", Case(heads_dim=1), "inductor", training=True)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_compile_with_strided_inputs(fuselage, device, name):
    """Transposed views, q alone, and gradients through the work around it."""
    op, inputs = Case(heads_dim=1, dim=32).make(name, torch.float32, device)
    inputs = {n: t.transpose(1, 2).contiguous() if n in "qk" else t for n, t in inputs.items()}

    def block(inputs):
        views = {n: (2 * t).transpose(1, 2) if n in "qk" else t for n, t in inputs.items()}
        outs = op.run(fuselage, views, {})
        q_alone = {n: None if n.startswith("k") else t for n, t in views.items()}
        alone = replace(op, outputs=("q_out",)).run(fuselage, q_alone, {})["q_out"]
        return outs["q_out"] + 0, outs["k_out"] + 0, alone + 0

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for run in (block, compiled):
        leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
        outs = run(leaves)
        loss = sum(out.square().sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(loss, list(leaves.values()))])
    for index, (eager, traced) in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(traced, eager)
        assert index >= 3 or traced.stride() == eager.stride()


def test_compile_in_place(fuselage, device):
    op, inputs = Case().make("apply_rotary", torch.bfloat16, device)
    expected = op.run(fuselage, inputs, {})
    op = replace(op, name="apply_rotary_")
    compiled = torch.compile(
        lambda inputs: tuple(op.run(fuselage, inputs, {}).values()),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.no_grad():
        results = compiled(inputs)
    for name, result in zip(expected, results, strict=True):
        assert_same_bits(result, expected[name], name)
        assert_same_bits(inputs[name[0]], expected[name], name)


def test_compiled_offsets_are_checked(fuselage, device):
    """Traced, the offset does not reach the op, which would have checked it."""
    op, inputs = Case(positions="offset").make("apply_rotary", torch.float32, device)
    q, cos, sin = inputs["q"], op.defaults["cos"], op.defaults["sin"]
    compiled = torch.compile(
        lambda options: fuselage.apply_rotary(q, None, cos, sin, **options), backend="eager"
    )
    ids = torch.zeros(5, dtype=torch.int64, device=device)
    for options, word in (
        ({"offset": -3}, "negative, got -3|an offset of -3"),
        ({"offset": 1, "position_ids": ids}, "must not both be given"),
    ):
        with pytest.raises(RuntimeError, match=word):
            compiled(options)


def test_export(fuselage, device):
    op, inputs = Case().make("apply_rotary", torch.bfloat16, device)

    class Model(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return fuselage.apply_rotary(q, k, cos, sin)

    batch = torch.export.Dim("batch", min=2)
    dynamic = {"q": {0: batch}, "k": {0: batch}, "cos": {}, "sin": {}}
    tables = (op.defaults["cos"], op.defaults["sin"])
    exported = torch.export.export(Model(), (*inputs.values(), *tables), dynamic_shapes=dynamic)
    _, inputs = Case(batch=9).make("apply_rotary", torch.bfloat16, device)
    outs = exported.module()(*inputs.values(), *tables)
    for out, expected in zip(outs, op.run(fuselage, inputs, {}).values(), strict=True):
        assert_same_bits(out, expected, "out")
