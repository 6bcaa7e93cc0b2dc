"""Norms of DTensors whose columns are sharded: in place, and by gathering the rows first.

    torchrun --nproc-per-node 2 -m benchmarks.sharded_columns
    torchrun --nproc-per-node 2 -m benchmarks.sharded_columns --quick   # a test, on CPUs

Each case is verified, then timed by turns: host time, from idle to idle. Without sharded columns a
program gathers the rows, normalises them whole on every rank, and keeps its columns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from .end_to_end import measure
from .process_group import run_on_ranks
from .roofline.contenders import load_fuselage
from .sequence_parallel import Received

COLUMNS, WHOLE = [Shard(1)], [Replicate()]
WAYS = ("gathered", "in shards")
ROUNDS = 3


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.sharded_columns", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="few rows and columns: a test of the benchmark")
    add("--rows", type=int, nargs="+", default=[16, 8192])
    add("--runs", type=int, default=50, help="timed in each of three rounds; with --quick 3")
    return parser.parse_args(arguments)


def norms(fuselage) -> dict[str, tuple[Callable, int, int, tuple[int, ...]]]:
    """`f(*rows, *vectors)`, how many tensors of rows, their columns, and the sizes of vectors."""

    def fused_add_rms_norm(x, residual, weight) -> DTensor:
        return fuselage.fused_add_rms_norm(x, residual, weight)[0]

    return {
        "rms_norm": (fuselage.rms_norm, 1, 4096, (4096,)),
        "fused_add_rms_norm": (fused_add_rms_norm, 2, 4096, (4096,)),
        "layer_norm": (fuselage.layer_norm, 1, 4096, (4096, 4096)),
        "fused_mul_poly_norm": (fuselage.fused_mul_poly_norm, 2, 14336, (3, 1)),
    }


def both_ways(f: Callable, rows: list[DTensor], vectors: list[DTensor]) -> dict[str, Callable]:
    """A forward of each, as columns that are sharded."""

    def gathered() -> DTensor:
        whole = [t.redistribute(placements=WHOLE) for t in rows]
        return f(*whole, *vectors).redistribute(placements=COLUMNS)

    return {"gathered": gathered, "in shards": lambda: f(*rows, *vectors)}


def steps(forward: Callable, leaves: list[DTensor], grad: DTensor) -> dict[str, Callable]:
    def inference() -> DTensor:
        with torch.no_grad():
            return forward()

    def training() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, grad)

    return {"forward": inference, "forward and backward": training}


def run(fuselage, device: str, options: argparse.Namespace) -> list[tuple]:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    dtype = torch.float32 if options.quick else torch.bfloat16
    found, runs = [], 3 if options.quick else options.runs
    for name, (f, count, dim, of_vectors) in norms(fuselage).items():
        if options.quick:
            of_vectors = [96 if size == dim else size for size in of_vectors]
            dim = 96
        for rows in [7] if options.quick else options.rows:
            torch.manual_seed(0)  # all ranks make the same values

            def make(*size: int, to=COLUMNS) -> DTensor:
                t = torch.randn(size, device=device, dtype=dtype)
                return distribute_tensor(t, mesh, to, src_data_rank=None).requires_grad_()

            of_rows = [make(rows, dim) for _ in range(count)]
            vectors = [make(size, to=WHOLE) for size in of_vectors]
            grad = make(rows, dim).detach()
            ways = {
                way: steps(forward, [*of_rows, *vectors], grad)
                for way, forward in both_ways(f, of_rows, vectors).items()
            }
            results = [ways[way]["forward"]().full_tensor() for way in WAYS]
            tolerance = 1e-5 if options.quick else 2e-2
            torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
            for step in ways[WAYS[0]]:
                times = {way: [] for way in WAYS}
                for way in measure.by_turns(WAYS, ROUNDS):
                    times[way] += measure.times(ways[way][step], device, 0.0, least=runs)
                for way in WAYS:
                    with Received() as received:
                        ways[way][step]()
                    bytes_in = sum(c["bytes"] for c in received.found.values())
                    time = measure.summary(times[way])["median"]
                    found.append((f"{name} ({rows}, {dim}), {step}", way, time, bytes_in))
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def body(device: str, rank: int, ranks: int) -> None:
        found = run(load_fuselage(device), device, options)
        if rank != 0:
            return
        print(f"| {ranks} ranks | | us | KB a rank receives |\n| --- | --- | ---: | ---: |")
        for case, way, time, bytes_in in found:
            print(f"| {case} | {way} | {time * 1e3:.0f} | {bytes_in / 1e3:.2f} |")

    return run_on_ranks(options.quick, body)


if __name__ == "__main__":
    sys.exit(main())
