"""Every family's kernels, forward and backward, in shapes that take each branch of the policies.

The program that `tools/sanitize.py --device cuda` runs under compute-sanitizer: no result is
compared, and shapes are as small as the branches allow. Values are made on the CPU, so that a copy
initialises them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import operators
import quantising
import torch
from harness import LAYOUTS, Operator, gradients, normal, random_grad_outs
from rotary_cases import Case
from shard_slices import NORMS, Slices

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
# Of all ranks: rows that share a block, unaligned ones, float32, and some longer than a block.
SLICED_SHAPES = ((5, 100, HALF), (9, 4097, HALF), (3, 4100, torch.float32), (2, 65537, HALF))
VIEWS = ("misaligned", "wider_by_an_odd_number", "expanded_rows", "transposed")

# A call makes its inputs itself: a list of all of them takes no memory.
Call = tuple[str, Callable[[], object]]
Calls = Iterator[Call]


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


def row_calls(kernel, device: str, rows: int, dim: int, dtype: torch.dtype) -> Calls:
    for op in operators.OPERATORS:
        yield (
            f"{op.name} {rows} x {dim}",
            lambda op=op: both_ways(kernel, op, op.inputs((rows, dim), dtype, device), {}),
        )
    yield from in_place_calls(kernel, device, rows, dim, dtype)
    yield f"grouped_poly_norm {rows} x {dim}", partial(grouped, kernel, device, rows, dim, dtype)


def view_calls(kernel, device: str, layout: str) -> Calls:
    def call(op: Operator) -> None:
        inputs = op.inputs((12, 4104), HALF, device)
        for name in op.row_inputs:
            inputs[name] = LAYOUTS[layout](
                lambda *shape: normal(shape, HALF, device), op.width * 4104
            )
        both_ways(kernel, op, inputs, {})

    for op in operators.OPERATORS:
        yield f"{op.name} {layout}", partial(call, op)


def in_place_calls(kernel, device: str, rows: int, dim: int, dtype: torch.dtype) -> Calls:
    def call(run: Callable) -> None:
        x, y = (normal((rows, dim), dtype, device) for _ in range(2))
        run(x, y, normal((dim,), dtype, device))

    for name, run in (
        ("fused_add_rms_norm_", lambda x, y, w: kernel.fused_add_rms_norm_(x, y, w)),
        ("fused_add_layer_norm_", lambda x, y, w: kernel.fused_add_layer_norm_(x, y, w, w)),
        ("add_mul_act_", lambda x, y, w: kernel.add_mul_act_(x, w, y, 0.5, "gelu")),
    ):
        yield f"{name} {rows} x {dim}", partial(call, run)


def grouped(kernel, device: str, rows: int, dim: int, dtype: torch.dtype) -> None:
    op, offs = operators.GROUPED_POLY_NORM, (rows // 2, rows // 2, rows - 1)
    inputs = op.make_inputs((rows, dim), dtype, device, offs=offs)
    both_ways(kernel, op, inputs, {"hidden_clamp": 2.0})


def sliced_calls(kernel, device: str) -> Calls:
    """Norms whose columns are spread over two ranks, of which each is called here."""

    def call(op: Operator, rows: int, dim: int, dtype: torch.dtype) -> None:
        slices = Slices(kernel, op, op.inputs((rows, dim), dtype, device), {}, ranks=2)
        outputs, statistics = slices.forward()
        slices.backward(outputs, statistics, random_grad_outs(outputs))

    for shape in SLICED_SHAPES:
        for op in NORMS:
            yield f"{op.name} {shape[0]} x {shape[1]} in slices", partial(call, op, *shape)


def rotary_calls(kernel, device: str) -> Calls:
    def call(case: Case, name: str, in_place: bool) -> None:
        op, inputs = case.make(name, HALF, device)
        if in_place:
            kernel.apply_rotary_(**inputs, **op.defaults)
        else:
            both_ways(kernel, op, inputs, {})

    for case in (
        Case(),
        Case(dim=128, tokens=40, q_heads=8, heads_dim=1, half=True),
        Case(dim=37, rotary_dim=12, interleaved=True, positions="ids:int64"),
        Case(dim=256, tokens=3, q_heads=16, k_heads=1, positions="offsets:int32"),
        Case(q_heads=None, k_heads=None, dim=1024, table_dtype=torch.float32),
    ):
        for name in ("apply_rotary", "qk_norm_rotary"):
            yield f"{name} {case}", partial(call, case, name, False)
        yield f"apply_rotary_ {case}", partial(call, case, "apply_rotary", True)


FILTERS = ({}, {"top_k": 5}, {"top_p": 0.9, "return_logprobs": True}, {"min_p": 0.1})


def sampling_calls(kernel, device: str) -> Calls:
    def call(rows: int, vocab: int, options: dict) -> None:
        kernel.gumbel_sample(normal((rows, vocab), HALF, device), seed=1, **options)

    for rows, vocab in ((3, 257), (2, 40_001), (1, 300_001)):
        for options in FILTERS:
            yield f"gumbel_sample {rows} x {vocab} {options}", partial(call, rows, vocab, options)


# (batch, dtype, whether the weight is float8)
HEADS = (
    *((1, HALF, False), (20, HALF, False), (130, HALF, False), (20, HALF, True)),
    *((3, torch.float32, False), (20, torch.float16, True), (40, torch.float32, False)),
)


def head_inputs(device: str, batch: int, dtype: torch.dtype, narrow: bool) -> tuple:
    hidden, weight = normal((batch, 136), dtype, device), normal((515, 136), dtype, "cpu")
    return hidden, (weight.to(torch.float8_e4m3fn) if narrow else weight).to(device)


def head_calls(kernel, device: str) -> Calls:
    def call(head: tuple, options: dict) -> None:
        kernel.lm_head_sample(*head_inputs(device, *head), seed=1, **options)

    for head in HEADS:
        for options in FILTERS[:3]:
            yield f"lm_head_sample {head} {options}", partial(call, head, options)


def shard_calls(kernel, device: str) -> Calls:
    def call(head: tuple, sums: bool) -> None:
        hidden, weight = head_inputs(device, *head)
        shards = [
            kernel.lm_head_sample_shard(
                hidden,
                part,
                vocab_offset=begin,
                seed=1,
                offset=torch.zeros(1, dtype=torch.int64).to(device),
                return_log_sum_exp=sums,
            )
            for begin, part in ((0, weight[:301]), (301, weight[301:]))
        ]
        kernel.combine_shard_samples(shards, return_logprobs=sums)

    for head in HEADS:
        for sums in (False, True):
            yield f"lm_head_sample_shard {head} {sums}", partial(call, head, sums)


def loss_calls(kernel, device: str) -> Calls:
    def call(shape: tuple, function: Callable, options: dict) -> None:
        rows, vocab, dtype = shape
        leaf = normal((rows, vocab), dtype, device).requires_grad_()
        targets = torch.randint(vocab, (rows,))
        targets[:1] = -100
        found = function(leaf, targets.to(device), **options)
        one = isinstance(found, torch.Tensor)
        (found if one else found.log_probs + found.entropy).sum().backward()

    others = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "logit_softcap": 9.0}
    for shape in (
        *((700, 128, HALF), (5, 250, torch.float16), (3, 257, HALF), (5, 4096, HALF)),
        *((9, 4099, HALF), (3, 50_257, HALF), (2, 40_000, torch.float32), (2, 300_001, HALF)),
    ):
        for function, options in (
            (kernel.cross_entropy, {}),
            (kernel.cross_entropy, {"reduction": "none", **others}),
            (kernel.log_probs, {"return_entropy": True}),
        ):
            label = f"{function.__name__} {shape[0]} x {shape[1]} {options}"
            yield label, partial(call, shape, function, options)


def route_calls(kernel, device: str) -> Calls:
    def call(shape: tuple, options: dict) -> None:
        rows, experts, dtype = shape
        leaf = normal((rows, experts), dtype, device).requires_grad_()
        bias = normal((experts,), torch.float32, device) if "num_groups" in options else None
        kernel.topk_softmax(leaf, 4, bias=bias, **options).weights.sum().backward()

    for shape in (
        *((700, 8, HALF), (5, 60, torch.float16), (33, 64, HALF), (9, 129, torch.float32)),
        *((65, 256, torch.float32), (5, 512, HALF), (7, 1024, torch.float32), (3, 1000, HALF)),
    ):
        for options in (
            {},
            {"renormalize": False},
            {"score": "sigmoid", "num_groups": 2 if shape[1] % 2 == 0 else 1, "topk_groups": 1},
        ):
            yield f"topk_softmax {shape[0]} x {shape[1]} {options}", partial(call, shape, options)


def quant_calls(kernel, device: str) -> Calls:
    for shape in (
        *((700, 8, HALF), (5, 60, torch.float16), (33, 64, torch.float32), (9, 129, HALF)),
        *((65, 4096, HALF), (5, 5001, HALF), (3, 40_000, HALF), (3, 20_000, torch.float32)),
    ):
        for options in (
            {},
            {"dtype": torch.int8},
            {"group_size": 128, "scale_layout": "col_tma"},
            {"scale": torch.ones(1, device=device)},
        ):
            rows, dim, dtype = shape
            x = normal((rows, dim), dtype, device)
            yield (
                f"quant_fp8 {rows} x {dim} {list(options)}",
                partial(kernel.quant_fp8, x, **options),
            )
            for fused in quantising.FUSED:
                given = fused.inputs((rows, dim), dtype, device)
                call = partial(
                    fused.call, kernel, given, return_unquantized=rows % 2 > 0, **options
                )
                yield f"{fused.name} {rows} x {dim} {list(options)}", call


def group_norm_calls(kernel, device: str) -> Calls:
    """Groups that are whole and cut, planes small and large, aligned and not, in both orders."""

    def call(shape: tuple, groups: int, dtype: torch.dtype, last: bool, style: str) -> None:
        op = operators.GROUP_NORM
        inputs = op.inputs(shape, dtype, device, style)
        if last:
            inputs["x"] = inputs["x"].movedim(1, -1).contiguous().movedim(-1, 1)
        both_ways(kernel, op, inputs, {**op.options(style), "num_groups": groups})

    for shape, groups, dtype in (
        *(((3, 8), 2, HALF), ((2, 30, 17, 19), 5, HALF), ((2, 64, 8, 8), 32, torch.float16)),
        *(((1, 4, 300, 301), 2, HALF), ((1, 4, 512, 128), 1, HALF), ((70, 8, 2), 4, HALF)),
        *(((1, 600, 9, 9), 3, torch.float32), ((1, 3000, 5, 3), 8, torch.float32)),
        *(((1, 2, 256, 513), 1, torch.float32), ((2, 40, 64, 64), 4, HALF)),
    ):
        for last in (False, True) if len(shape) > 2 else (False,):
            for style in ("torch", "silu"):
                label = f"group_norm {shape} {groups} {last} {style}"
                yield label, partial(call, shape, groups, dtype, last, style)


def all_kinds(kernel, device: str) -> list[list[Call]]:
    return [
        *(list(kind(kernel, device)) for kind in (sampling_calls, head_calls, shard_calls)),
        *(
            list(kind(kernel, device))
            for kind in (
                *(loss_calls, route_calls, quant_calls, rotary_calls, sliced_calls),
                group_norm_calls,
            )
        ),
        *(list(row_calls(kernel, device, *shape)) for shape in SHAPES),
        *(list(view_calls(kernel, device, layout)) for layout in VIEWS),
    ]


def in_turns(kinds: Iterable[list[Call]], seed: int) -> list[Call]:
    """All calls in random order, each kind's spread evenly: a run cut short has some of all."""
    order = random.Random(seed)
    placed = []
    for calls in kinds:
        shuffled = order.sample(calls, len(calls))
        placed += [((i + order.random()) / len(calls), call) for i, call in enumerate(shuffled)]
    return [call for _, call in sorted(placed, key=lambda pair: pair[0])]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz.families", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no call after these")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the calls")
    options = parser.parse_args()
    kernel = child.load(None)
    started, made = time.monotonic(), 0
    calls = in_turns(all_kinds(kernel, options.device), options.seed)
    for _, call in calls:
        if time.monotonic() - started > options.seconds:
            break
        torch.manual_seed(0)  # the same values in any order
        call()
        made += 1
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(f"calls: {made} made, {len(calls) - made} left out for want of time", flush=True)


if __name__ == "__main__":
    main()
