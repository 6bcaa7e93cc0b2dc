"""Every family's kernels, forward and backward, in shapes that take each branch of the policies.

The program that `tools/sanitize.py --device cuda` runs under compute-sanitizer: no result is
compared, and shapes are as small as the branches allow. Values are made on the CPU, so that a copy
initialises them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import operators
import torch
from harness import LAYOUTS, Operator, gradients, normal, random_grad_outs
from rotary_cases import Case

from . import child

HALF = torch.bfloat16

# (rows, dim, dtype)
SHAPES = (
    (5, 100, HALF),  # short rows of an odd number of vectors
    (300, 64, torch.float16),  # rows that share a block
    (400, 4096, HALF),  # rows enough for bulk copies
    (9, 4097, HALF),  # unaligned rows
    (6, 16384, HALF),  # the longest rows of a block, or short clusters
    (3, 4100, torch.float32),
    (3, 65536, HALF),  # clusters
    (3, 65537, HALF),
    (2, 1 << 20, HALF),  # streamed rows
    (2, (1 << 20) + 1, HALF),
)
VIEWS = ("misaligned", "wider_by_an_odd_number", "expanded_rows", "transposed")

Calls = Iterator[tuple[str, Callable[[], object]]]


def both_ways(kernel, op: Operator, inputs: dict, options: dict) -> None:
    with torch.no_grad():
        grad_outs = random_grad_outs(op.run(kernel, inputs, options))
    gradients(
        lambda leaves, opts: op.run(kernel, leaves, opts),
        inputs,
        options,
        grad_outs,
        op.differentiable(inputs),
    )


def row_calls(kernel, device: str) -> Calls:
    for rows, dim, dtype in SHAPES:
        for op in operators.OPERATORS:
            inputs = op.inputs((rows, dim), dtype, device)
            yield f"{op.name} {rows} x {dim}", lambda op=op, i=inputs: both_ways(kernel, op, i, {})
        yield from in_place_calls(kernel, device, rows, dim, dtype)
        yield from grouped_calls(kernel, device, rows, dim, dtype)
    for layout in VIEWS:
        for op in operators.OPERATORS:
            inputs = op.inputs((12, 4104), HALF, device)
            for name in op.row_inputs:
                inputs[name] = LAYOUTS[layout](
                    lambda *shape: normal(shape, HALF, device), op.width * 4104
                )
            yield f"{op.name} {layout}", lambda op=op, i=inputs: both_ways(kernel, op, i, {})


def in_place_calls(kernel, device, rows, dim, dtype) -> Calls:
    x, y = (normal((rows, dim), dtype, device) for _ in range(2))
    weight = normal((dim,), dtype, device)
    yield f"fused_add_rms_norm_ {rows} x {dim}", lambda: kernel.fused_add_rms_norm_(x, y, weight)
    p, q, bias = x.clone(), y.clone(), weight.clone()
    yield (
        f"fused_add_layer_norm_ {rows} x {dim}",
        lambda: kernel.fused_add_layer_norm_(p, q, weight, bias),
    )
    yield f"add_mul_act_ {rows} x {dim}", lambda: kernel.add_mul_act_(x, weight, y, 0.5, "gelu")


def grouped_calls(kernel, device, rows, dim, dtype) -> Calls:
    op = operators.GROUPED_POLY_NORM
    offs = (rows // 2, rows // 2, rows - 1)
    inputs = op.make_inputs((rows, dim), dtype, device, offs=offs)
    yield f"{op.name} {rows} x {dim}", lambda: both_ways(kernel, op, inputs, {"hidden_clamp": 2.0})


def rotary_calls(kernel, device: str) -> Calls:
    for case in (
        Case(),
        Case(dim=128, tokens=40, q_heads=8, heads_dim=1, half=True),
        Case(dim=37, rotary_dim=12, interleaved=True, positions="ids:int64"),
        Case(dim=256, tokens=3, q_heads=16, k_heads=1, positions="offsets:int32"),
        Case(q_heads=None, k_heads=None, dim=1024, table_dtype=torch.float32),
    ):
        for name in ("apply_rotary", "qk_norm_rotary"):
            op, inputs = case.make(name, HALF, device)
            yield f"{name} {case}", lambda op=op, i=inputs: both_ways(kernel, op, i, {})
            if name == "apply_rotary":
                given = {**inputs, **op.defaults}
                yield f"apply_rotary_ {case}", lambda g=given: kernel.apply_rotary_(**g)


def sampling_calls(kernel, device: str) -> Calls:
    filters = ({}, {"top_k": 5}, {"top_p": 0.9, "return_logprobs": True}, {"min_p": 0.1})
    for rows, vocab in ((3, 257), (2, 40_001), (1, 300_001)):
        logits = normal((rows, vocab), HALF, device)
        for options in filters:
            yield (
                f"gumbel_sample {rows} x {vocab} {options}",
                lambda x=logits, o=options: kernel.gumbel_sample(x, seed=1, **o),
            )
    for batch, dtype, narrow in (
        *((1, HALF, False), (20, HALF, False), (130, HALF, False), (20, HALF, True)),
        *((3, torch.float32, False), (20, torch.float16, True), (40, torch.float32, False)),
    ):
        hidden, weight = normal((batch, 136), dtype, device), normal((515, 136), dtype, "cpu")
        weight = (weight.to(torch.float8_e4m3fn) if narrow else weight).to(device)
        for options in filters[:3]:
            yield (
                f"lm_head_sample {batch} {dtype} {narrow} {options}",
                lambda x=hidden, w=weight, o=options: kernel.lm_head_sample(x, w, seed=1, **o),
            )


def loss_calls(kernel, device: str) -> Calls:
    options = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "logit_softcap": 9.0}
    for rows, vocab, dtype in (
        *((700, 128, HALF), (5, 250, torch.float16), (3, 257, HALF), (5, 4096, HALF)),
        *((9, 4099, HALF), (3, 50_257, HALF), (2, 40_000, torch.float32), (2, 300_001, HALF)),
    ):
        logits = normal((rows, vocab), dtype, device)
        targets = torch.randint(vocab, (rows,)).to(device)
        targets[:1] = -100

        def both(function, x=logits, t=targets, **given) -> None:
            leaf = x.clone().requires_grad_()
            found = function(leaf, t, **given)
            one = isinstance(found, torch.Tensor)
            (found if one else found.log_probs + found.entropy).sum().backward()

        for given in ({}, {"reduction": "none", **options}):
            yield (
                f"cross_entropy {rows} x {vocab} {given}",
                lambda f=both, g=given: f(kernel.cross_entropy, **g),
            )
        yield (
            f"log_probs {rows} x {vocab}",
            lambda f=both: f(kernel.log_probs, return_entropy=True),
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz.families", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no call after these")
    options = parser.parse_args()
    kernel = child.load(None)
    started, made, left_out = time.monotonic(), 0, []
    torch.manual_seed(0)
    for calls in (sampling_calls, loss_calls, rotary_calls, row_calls):
        for label, call in calls(kernel, options.device):
            if time.monotonic() - started > options.seconds:
                left_out.append(label)
                continue
            call()
            made += 1
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(f"calls: {made} made, {len(left_out)} left out for want of time", flush=True)


if __name__ == "__main__":
    main()
