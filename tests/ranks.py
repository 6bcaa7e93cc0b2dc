"""Processes that tests share: each is one rank, and runs what it is sent.

They are forked from a server that has imported Torch once (forkserver of multiprocessing), and stay
until the session ends. What takes minutes is taken for a deadlock, and fails. The tests of the
example and of the benchmarks start those under torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType

import torch
from harness import normal
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

SECONDS = 180

_meshes: dict[tuple, DeviceMesh] = {}  # of a rank's process

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed.tensor.parallel",
        "kernels",
        "transformers.models.llama.modeling_llama",  # is passed over where it is missing
    ]
)


@dataclass(frozen=True)
class Rank:
    """What a function is given that runs on every rank."""

    index: int
    count: int
    device: str
    fuselage: ModuleType

    def mesh(self, *sizes: int, names: tuple[str, ...] | None = None):
        """A mesh of all ranks, in one dimension unless sizes are given.

        NOTE: made once. Each has process groups of its own, which stay, and whose Gloo threads wake
        up a hundred times a second: those of a whole run of the tests took more than half a core.
        """
        sizes = sizes or (self.count,)
        if (sizes, names) not in _meshes:
            kind = self.device.partition(":")[0]
            _meshes[sizes, names] = init_device_mesh(kind, sizes, mesh_dim_names=names)
        return _meshes[sizes, names]


def distributed(t: torch.Tensor, mesh, *placements) -> DTensor:
    """Of what every rank has, without a collective. Parts of a sum are equal."""
    if Partial() in placements:
        return DTensor.from_local(t / mesh.size(), mesh, placements)
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def collectives(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items() if n}


def random(rank: Rank, *shape: int, dtype=torch.float32) -> torch.Tensor:
    """What all ranks draw alike."""
    return normal(shape, dtype, rank.device)


class Ranks:
    """So many ranks, on the CPU with Gloo or on a GPU each with NCCL."""

    def __init__(self, count: int, device: str):
        self.count = count
        self.device = device
        self._start()

    def _start(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self._folder, self._pipes, self._processes = folder, [], []
        for index in range(self.count):
            ours, theirs = _context.Pipe()
            arguments = (theirs, index, self.count, self.device, f"{folder.name}/store")
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable, *arguments) -> list:
        """`function(rank, *arguments)` on every rank; what it returns on each."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._answer(pipe) for pipe in self._pipes]
        failed = [(i, text) for i, (right, text) in enumerate(answers) if not right]
        if failed:  # the others may wait for a collective of these
            self.close()
            self._start()
            raise AssertionError("\n".join(f"rank {i}: {text}" for i, text in failed))
        return [value for _, value in answers]

    def _answer(self, pipe) -> tuple[bool, object]:
        try:
            if pipe.poll(SECONDS):
                return pipe.recv()
            return False, f"no answer after {SECONDS} seconds: a deadlock?"
        except EOFError:
            return False, "the process has ended"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe, index: int, count: int, device: str, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{index}"
        torch.cuda.set_device(index)
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{store}",
        rank=index,
        world_size=count,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    from conftest import REPO_ID, VERSION, kernel_backend, seed_generators
    from kernels import get_kernel

    kernel = get_kernel(REPO_ID, version=VERSION, backend=kernel_backend())
    rank = Rank(index, count, device, kernel)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        seed_generators()
        try:
            answer = True, function(rank, *arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
