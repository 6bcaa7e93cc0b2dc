"""Sequence-parallel Llama: PyTorch's plan with the plain model, and with the patched one.

    torchrun --nproc-per-node 2 -m benchmarks.sequence_parallel
    torchrun --nproc-per-node 2 -m benchmarks.sequence_parallel --quick   # a test, on CPUs

Each case is verified, then timed by turns. Written are time, peak memory, and for each kind of
collective how often a rank calls it and how many bytes it receives. Run with one process it gives
what scaling is relative to.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from .end_to_end import measure
from .end_to_end.cli import EXACT_LIMIT, HALF_LIMIT, relative_error
from .end_to_end.scenarios import causal_model
from .process_group import run_on_ranks
from .roofline import results
from .roofline.contenders import load_fuselage

COLUMNS = ("plan", "plan + fuselage")
# RMS difference of logits, relative. Partial sums of bfloat16 are rounded on every rank.
LIMITS = {torch.float32: EXACT_LIMIT, torch.bfloat16: HALF_LIMIT}
ROUNDS = 3
# Ops beside the collectives that move nothing: one waits, the other is an identity for autograd.
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


def bytes_received(collective: str, of_input: int, ranks: int) -> int:
    """What a rank receives at least, where so many bytes are its input."""
    others = {
        "all_gather_into_tensor": of_input * (ranks - 1),
        "reduce_scatter_tensor": of_input * (ranks - 1) // ranks,
        "all_reduce": 2 * of_input * (ranks - 1) // ranks,
        "broadcast": of_input,
    }
    return others[collective]


class Received(TorchDispatchMode):
    """Counts the collectives of a rank, and the bytes that it receives by them."""

    def __init__(self):
        super().__init__()
        self.found: dict[str, dict[str, int]] = defaultdict(lambda: {"calls": 0, "bytes": 0})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with local tensors
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")
        if name[0] == "_c10d_functional" and name[2] not in NO_COLLECTIVES:
            of_input = args[0].numel() * args[0].element_size()
            self.found[name[2]]["calls"] += 1
            self.found[name[2]]["bytes"] += bytes_received(name[2], of_input, dist.get_world_size())
        return result


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.sequence_parallel", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a small model, in float32: a test of the benchmark")
    add("--layers", type=int, default=8, help="of 32; the results say so")
    add("--tokens", type=int, default=4096)
    add("--sequences", type=int, help="that decode; default: as many as ranks, and at least 2")
    add("--runs", type=int, default=20, help="timed in each of three rounds; with --quick 3")
    add("--output", type=Path, help="the results file; default: benchmarks/results/...")
    return parser.parse_args(arguments)


def steps(model, ids: torch.Tensor, sample: Callable) -> dict[str, Callable[[], object]]:
    """What is timed, of a model that is on all ranks. `sample(model, **inputs)` draws a token.

    All of `ids` decode; training and prefill take the first sequence.
    """
    from transformers import DynamicCache

    cache, first = DynamicCache(config=model.config), ids[:1]

    def training() -> None:
        model.zero_grad(set_to_none=True)
        with loss_parallel():
            model(input_ids=first, labels=first).loss.backward()

    @torch.no_grad()
    def prefill() -> torch.Tensor:
        return model(input_ids=first).logits

    @torch.no_grad()
    def decode() -> torch.Tensor:
        """One more token after those of `ids`: the cache grows by it."""
        if cache.get_seq_length() == 0:
            model.model(input_ids=ids, past_key_values=cache, use_cache=True)
        return sample(model, input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)

    return {"training step": training, "prefill": prefill, "decode": decode}


def samplers(fuselage) -> dict[str, Callable]:
    """How each draws: from whole logits, or from the head where it is."""

    def of_logits(model, **inputs) -> torch.Tensor:
        logits = model(**inputs).logits[:, -1].full_tensor()
        return torch.multinomial(logits.float().softmax(-1), 1)

    def of_head(model, **inputs) -> torch.Tensor:
        hidden = model.model(**inputs).last_hidden_state[:, -1]
        return fuselage.lm_head_sample(hidden, model.lm_head.weight).to_local()

    return dict(zip(COLUMNS, (of_logits, of_head), strict=True))


def run(fuselage, device: str, options: argparse.Namespace) -> dict[str, dict]:
    """The cases, measured."""
    torch.manual_seed(0)  # all ranks make the same weights
    plain, title, notes = causal_model(device, options.quick, options.layers, False, training=True)
    tokens = 64 if options.quick else options.tokens
    # With a token of each, before Torch 2.13 a linear of DTensors needs one for every rank.
    sequences = options.sequences or max(2, dist.get_world_size())
    ids = torch.randint(0, plain.config.vocab_size, (sequences, tokens), device=device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    models = {"plan": copy.deepcopy(plain), "plan + fuselage": plain}
    report = fuselage.integrations.transformers.patch(plain)
    for model in models.values():
        fuselage.distributed.parallelize_llama(model, mesh)
    sample = samplers(fuselage)
    calls = {name: steps(model, ids, sample[name]) for name, model in models.items()}
    logits = {name: calls[name]["prefill"]().full_tensor() for name in COLUMNS}
    error = relative_error(logits["plan + fuselage"], logits["plan"])
    if not (error <= LIMITS[plain.dtype] and report.replaced):
        raise SystemExit(f"FAILED: logits differ by {error:.1e}, {len(report.replaced)} replaced")
    cases, runs = {}, 3 if options.quick else options.runs
    for case in calls[COLUMNS[0]]:
        times = {name: [] for name in COLUMNS}
        for name in measure.by_turns(COLUMNS, ROUNDS):
            # So many runs on all ranks: a rank that stopped earlier would leave the others.
            times[name] += measure.times(calls[name][case], device, 0.0, least=runs)
        columns = {}
        for name in COLUMNS:
            with Received() as received:
                calls[name][case]()
            columns[name] = {
                "milliseconds": measure.summary(times[name]),
                "peak_gib": measure.peak_memory(calls[name][case], device),
                "received": dict(received.found),
            }
        batch = sequences if case == "decode" else 1
        cases[case_name(case, batch, tokens, dist.get_world_size())] = {
            "title": f"{title}: {case} of {batch}x{tokens} tokens",
            "notes": notes,
            "case": case,
            "sequences": batch,
            "tokens": tokens,
            "ranks": dist.get_world_size(),
            "error": error,
            "columns": columns,
        }
    return cases


def case_name(case: str, batch: int, tokens: int, ranks: int) -> str:
    size = f"{batch}x{tokens}" if batch > 1 else tokens
    return f"{case} of {size} tokens, {ranks} rank{'s' if ranks > 1 else ''}"


def scaling(cases: dict[str, dict], case: str, column: str) -> list[str]:
    """How much faster than one rank, and which part of what so many ranks could be at most."""
    record = cases[case]
    alone = cases.get(f"{case.rpartition(', ')[0]}, 1 rank")
    if alone is None or record["ranks"] == 1:
        return ["-", "-"]
    times = [r["columns"][column]["milliseconds"]["median"] for r in (alone, record)]
    faster = times[0] / times[1]
    return [f"{faster:.2f}x", f"{100 * faster / record['ranks']:.0f}%"]


HEAD = ("", "ms", "over the plan alone", "over one rank", "scaling efficiency", "peak GiB")
HEAD += ("collectives", "MB a rank receives")


def table(cases: dict[str, dict]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "| --- |" + " ---: |" * (len(HEAD) - 1)]
    for case, record in cases.items():
        alone = record["columns"]["plan"]["milliseconds"]["median"]
        for name, column in record["columns"].items():
            time, peak = column["milliseconds"]["median"], column["peak_gib"]
            counted = column["received"].values()
            row = [
                f"{case}: {name}",
                f"{time:.1f}",
                f"{alone / time:.2f}x",
                *scaling(cases, case, name),
                "-" if peak is None else f"{peak:.1f}",
                str(sum(c["calls"] for c in counted)),
                f"{sum(c['bytes'] for c in counted) / 1e6:.1f}",
            ]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def body(device: str, rank: int, ranks: int) -> None:
        fuselage = load_fuselage(device)
        cases = run(fuselage, device, options)
        if rank != 0:
            return
        path = options.output or results.FOLDER / f"sequence_parallel_{results.slug(device)}.json"
        if not options.quick or options.output:
            results.add(path, cases, fuselage, device, "transformers")
        print(table(cases), flush=True)

    return run_on_ranks(options.quick, body)


if __name__ == "__main__":
    sys.exit(main())
