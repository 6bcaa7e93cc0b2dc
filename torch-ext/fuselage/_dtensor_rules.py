"""What every rule for DTensors shares: a call, its plan, and the plain case of both.

A rule decides from placements alone, which are the same on all ranks: a call that is refused is
refused on each of them, before any collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ._arguments import public_function

Targets = list  # of a placement for each dimension of the mesh

# Arguments that are no tensors, and change a plan.
_OF_PLANS = ("heads_dim", "reduction", "return_entropy", "inplace_backward")

# NOTE: not what derives from these. The mask of an embedding's parts is gone after one reduction.
_UNDERSTOOD = (Replicate, Shard, Partial)


class Call:
    """One call of an op, some of whose arguments are DTensors."""

    def __init__(self, overload, args, kwargs):
        self.overload = overload
        self.arguments = dict(zip(names_of(overload), args))
        if kwargs:
            self.arguments |= kwargs

    @property
    def op(self) -> str:
        return self.overload._schema.name.partition("::")[2]

    def __getitem__(self, name: str):
        return self.arguments[name]

    def given(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of some arguments that are not None."""
        return ((n, self.arguments[n]) for n in names if self.arguments.get(n) is not None)

    def layout(self) -> tuple:
        """All that a plan depends on."""
        described = [
            (a.device_mesh, a.placements, a.shape) if isinstance(a, DTensor) else a is None
            for a in self.arguments.values()
        ]
        return (self.overload, *map(self.arguments.get, _OF_PLANS), *described)

    def refuse(self, why: str):
        op = public_function() or self.op
        raise RuntimeError(f"fuselage::{op}: {why}")

    def refuse_placement(self, name: str, index: int, allowed: str):
        placement = self.arguments[name].placements[index]
        shown = repr(placement) if type(placement) in _UNDERSTOOD else type(placement).__name__
        self.refuse(
            f"`{name}` is {shown} over {self.mesh_dimension(index)}, which must be {allowed}; "
            "redistribute it"
        )

    def mesh_dimension(self, index: int) -> str:
        mesh = next(t for t in self.arguments.values() if isinstance(t, DTensor)).device_mesh
        name = f"`{mesh.mesh_dim_names[index]}`" if mesh.mesh_dim_names else index
        return f"dimension {name} of the mesh"


@cache
def names_of(overload) -> list[str]:
    return [argument.name for argument in overload._schema.arguments]


class Like(NamedTuple):
    """What a result is: as an argument, but for its placements."""

    source: str
    placements: Targets
    needed: str  # the argument, if there is one, that says whether it was asked for


class Plan(NamedTuple):
    """What is done with the tensors of a call."""

    targets: Targets  # of the rows
    inputs: list[tuple[str, Targets, bool]]  # where each goes, and whether it is there
    results: list[Like | None]  # None stays local
    start: int = 0  # of this rank, along what is sharded


_plans: dict[tuple, Plan] = {}
_PLANS = 4096  # that are kept


@dataclass(frozen=True)
class Rule:
    """What the arguments of an op are, by their names.

    `rows` are sharded alike. In a backward, gradients among them go to where those of the forward
    are.
    """

    rows: tuple[str, ...]
    vectors: tuple[str, ...] = ()  # for all rows: whole on every rank
    columns: tuple[str, ...] = ()  # likewise, but sharded with the columns of rows
    modulations: tuple[str, ...] = ()  # for all rows, for each element of the batch or each row
    numbers: tuple[str, ...] = ()  # whole on every rank, DTensors or not
    columns_may_be_sharded: bool = False
    backward: bool = False

    def dispatch(self, cls, overload, types, args=(), kwargs=None):
        call = Call(overload, args, kwargs)
        with torch.no_grad():
            plan = self.plan(call)
            arguments = call.arguments.copy()
            for name, to, is_there in plan.inputs:
                if not is_there:
                    arguments[name] = _move(arguments[name], to)
            for name, _, _ in plan.inputs:  # all collectives are under way
                arguments[name] = arguments[name].to_local()
            self.localise(call, plan, arguments)
            return self.wrap(call, self.run(call, plan, arguments), plan)

    def run(self, call: Call, plan: Plan, arguments: dict):
        """The results of this rank, of its own arguments."""
        return call.overload(*arguments.values())

    def plan(self, call: Call) -> Plan:
        """Made once for a layout. Raises what is to be refused."""
        layout = call.layout()
        try:
            plan = _plans.get(layout)
        except TypeError:  # a size that is known only when a traced program runs
            return self.make_plan(call)
        if plan is None:
            plan = self.make_plan(call)
            if len(_plans) >= _PLANS:
                _plans.clear()
            _plans[layout] = plan
        return plan

    def make_plan(self, call: Call) -> Plan:
        self.check(call)
        targets = self.targets(call)
        inputs = [
            (name, to, list(call[name].placements) == to)
            for name, to in self.placements(call, targets).items()
        ]
        self.check_written(call, inputs)
        schema = call.overload._schema
        results = [self.result(call, result.name, targets) for result in schema.returns]
        return Plan(targets, inputs, results, self.start(call, targets))

    def check_written(self, call: Call, inputs: list[tuple[str, Targets, bool]]) -> None:
        schema = call.overload._schema
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        for name, to, is_there in inputs:
            if name in written and not is_there:
                for index, placement in enumerate(to):
                    if call[name].placements[index] != placement:
                        allowed = f"{placement!r} to be written in place"
                        call.refuse_placement(name, index, allowed)

    def distributed(self) -> tuple[str, ...]:
        return self.rows + self.vectors + self.columns + self.modulations

    def check(self, call: Call) -> None:
        """That all tensors are DTensors of one mesh, of placements that can be understood."""
        first, reference = next(
            (name, t) for name, t in call.given(*self.distributed()) if isinstance(t, DTensor)
        )
        for name, t in call.given(*self.distributed(), *self.numbers):
            if not isinstance(t, DTensor):
                if name in self.numbers:
                    continue
                call.refuse(
                    f"`{name}` is a plain tensor beside `{first}`, a DTensor; make it one, with "
                    "distribute_tensor or DTensor.from_local"
                )
            if t.device_mesh != reference.device_mesh:
                call.refuse(
                    f"`{name}` is on {t.device_mesh}, and `{first}` on {reference.device_mesh}; "
                    "they must be on one mesh"
                )
            for index, placement in enumerate(t.placements):
                if type(placement) not in _UNDERSTOOD:
                    call.refuse_placement(name, index, "Replicate, Shard or Partial")

    def targets(self, call: Call) -> Targets:
        """Where the rows go, for each dimension of the mesh."""
        given = list(call.given(*self.rows))
        # A forward may have moved one of its rows to where another is: both decide again.
        of_forward = [(n, t) for n, t in given if not n.startswith("grad_")] or given[:1]
        targets = []
        for index in range(given[0][1].device_mesh.ndim):
            shards = {}
            for other, t in of_forward if self.backward else given:
                placement = t.placements[index]
                if isinstance(placement, Shard):
                    if placement.dim not in self.dims(call, t):
                        call.refuse_placement(other, index, self.allowed(call, t))
                    shards.setdefault(placement, other)
            if len(shards) > 1:
                (first, of_first), (second, of_second) = list(shards.items())[:2]
                call.refuse(
                    f"`{of_first}` is {first!r} and `{of_second}` is {second!r} over "
                    f"{call.mesh_dimension(index)}; they must be sharded alike, redistribute one"
                )
            targets.append(next(iter(shards), Replicate()))
        return targets

    def dims(self, call: Call, t: DTensor) -> range:
        """The dimensions that may be sharded."""
        return range(t.dim() if self.columns_may_be_sharded else t.dim() - 1)

    def allowed(self, call: Call, t: DTensor) -> str:
        *but_last, last = ["Replicate()", *(f"Shard({dim})" for dim in self.dims(call, t))]
        return f"{', '.join(but_last)} or {last}" if but_last else last

    def placements(self, call: Call, targets: Targets) -> dict[str, Targets]:
        """Where each DTensor of the call goes."""
        return {
            name: [self.placement(call, name, t, target) for target in targets]
            for name, t in call.given(*self.distributed(), *self.numbers)
            if isinstance(t, DTensor)
        }

    def placement(self, call: Call, name: str, t: DTensor, rows) -> Replicate | Shard:
        """Where `t` goes where the rows are `rows`, over one dimension of the mesh."""
        if name in self.rows or not isinstance(rows, Shard):
            return rows
        x = next(t for _, t in call.given(*self.rows))
        if name in self.columns and rows.dim == x.dim() - 1:
            return Shard(t.dim() - 1)
        if name in self.modulations and rows.dim < t.dim() and t.shape[rows.dim] != 1:
            of_rows = t.dim() == x.dim()
            of_batch = t.dim() == 2 and rows.dim == 0
            if of_rows or of_batch:
                return rows
        return Replicate()

    def start(self, call: Call, targets: Targets) -> int:
        """What `localise` needs."""
        return 0

    def localise(self, call: Call, plan: Plan, arguments: dict) -> None:
        """Changes what else depends on the shard of this rank."""

    def wrap(self, call: Call, results, plan: Plan):
        """The results as DTensors, of the local ones."""
        if isinstance(results, torch.Tensor):
            return self.wrapped(call, results, plan.results[0])
        if results is None:
            return None
        return tuple(self.wrapped(call, t, like) for t, like in zip(results, plan.results))

    def wrapped(self, call: Call, local: torch.Tensor, like: Like | None):
        # What was not asked for is empty, but so is a part of nothing.
        if like is None or (local.shape == (0,) and not call.arguments.get(like.needed, False)):
            return local
        source, placements, _ = like
        t = call[source]
        if source not in self.rows or self.columns_may_be_sharded:
            return from_local(local, t.device_mesh, placements, t.shape)
        # The columns of a result may be fewer than those of the input, or twice as many.
        return from_local(local, t.device_mesh, placements, (*t.shape[:-1], local.shape[-1]))

    def result(self, call: Call, name: str, targets: Targets) -> Like | None:
        """The argument that a result is like, and where it is."""
        if name == "statistics" or name.endswith("rstd"):
            return None
        source = self.source(call, name)
        placements = [self.placement(call, source, call[source], target) for target in targets]
        if source not in self.rows:  # the gradient of what several ranks have
            placements = [
                Partial() if isinstance(target, Shard) and placement == Replicate() else placement
                for target, placement in zip(targets, placements)
            ]
        return Like(source, placements, f"needs_{name}")

    def source(self, call: Call, name: str) -> str:
        source = name.removeprefix("grad_").removesuffix("_in").removesuffix("_out")
        candidates = (source, f"grad_{source}", *self.rows)
        return next(name for name, _ in call.given(*candidates) if name in self.distributed())


def _move(t: DTensor, placements: Targets) -> DTensor:
    return t.detach().redistribute(placements=placements, async_op=True)


def from_local(local: torch.Tensor, mesh, placements: Targets, shape: Sequence[int]) -> DTensor:
    """A DTensor of a shape, laid out as the local tensor is."""
    strides, after = [0] * local.dim(), 1
    order = range(local.dim())
    if not local.is_contiguous() or local.numel() == 0:  # then it is contiguous in any order
        order = sorted(order, key=local.stride, reverse=True)
    for dim in reversed(order):
        strides[dim] = after
        after *= max(shape[dim], 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def start_of(t: DTensor, placements: Targets, dim: int) -> int:
    """The index along `dim` of the first element of this rank."""
    start, size = 0, t.shape[dim]
    for index, placement in enumerate(placements):
        if placement == Shard(dim):
            rank, ranks = t.device_mesh.get_local_rank(index), t.device_mesh.size(index)
            each = -(-size // ranks)  # as torch.chunk cuts it
            before = min(size, rank * each)
            start, size = start + before, min(size - before, each)
    return start
