"""What benchmarks under `torchrun` share: a process a GPU, or with --quick on CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist


def run_on_ranks(quick: bool, body: Callable[[str, int, int], None]) -> int:
    """`body(device, rank, ranks)` on every rank; the exit status, where it returns.

    The process ends here, without the interpreter's finalization: DTensor's caches keep the group
    and Gloo's threads alive after `destroy_process_group`, and a thread that drops a tensor then
    waits for the interpreter's lock until it is aborted (Torch 2.13).
    """
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= ranks
    if not on_gpus and not quick:
        print("on CPUs only --quick is feasible", file=sys.stderr)
        return 2
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    body("cuda" if on_gpus else "cpu", rank, ranks)
    dist.barrier()  # a rank that leaves first takes its connections with it
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
