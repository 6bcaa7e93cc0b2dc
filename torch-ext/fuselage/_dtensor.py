"""What the operators do with DTensors: docs/distributed.md says which placements each takes.

A rule is a kernel of `torch.library.register_torch_dispatch`, registered when an operator is first
given a DTensor, so that nobody else pays for it. It decides from placements alone, which are the
same on all ranks: a call that is refused is refused on each of them, before any collective.

NOTE: not `register_sharding`, which picks the cheapest redistribution of each input by itself. Here
gradients go where their inputs are, a row's statistics stay with their rows, what is written in
place is never moved, and a vocabulary is sampled in shards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ._arguments import public_function
from ._ops import add_op_namespace_prefix, ops
from .sampling import ShardSample, combine_shard_samples

Targets = list  # of a placement for each dimension of the mesh

# NOTE: not what derives from these. The mask of an embedding's parts is gone after one reduction.
_UNDERSTOOD = (Replicate, Shard, Partial)

_registered = False
_lock = threading.Lock()


def register() -> bool:
    """Registers the rules; False where they are already."""
    global _registered
    with _lock:
        if _registered:
            return False
        for name, rule in RULES.items():
            torch.library.register_torch_dispatch(
                add_op_namespace_prefix(name), DTensor, rule.dispatch
            )
        _registered = True
        return True


class Call:
    """One call of an op, some of whose arguments are DTensors."""

    def __init__(self, overload, args, kwargs):
        self.overload = overload
        self.arguments = dict(zip(_names(overload), args))
        if kwargs:
            self.arguments |= kwargs

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
        return (self.overload, self.arguments.get("heads_dim"), *described)

    def refuse(self, why: str):
        op = public_function() or self.overload._schema.name.partition("::")[2]
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
def _names(overload) -> list[str]:
    return [argument.name for argument in overload._schema.arguments]


class Plan(NamedTuple):
    """What is done with the tensors of a call."""

    targets: Targets  # of the rows
    inputs: list[tuple[str, Targets, bool]]  # where each goes, and whether it is there
    results: list[tuple[str, Targets] | None]  # what each is like, and where; None stays local
    start: int = 0  # of this rank, along what is sharded


_plans: dict[tuple, Plan] = {}
_PLANS = 4096  # that are kept


@dataclass(frozen=True)
class Rule:
    """What the arguments of an op are, by their names.

    `rows` are sharded alike. In a backward, whose first rows are those of the forward, all others
    go to the placements of these.
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
        targets = []
        for index in range(given[0][1].device_mesh.ndim):
            shards = {}
            for other, t in given[:1] if self.backward else given:
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

    def wrapped(self, call: Call, local: torch.Tensor, like: tuple[str, Targets] | None):
        if like is None or local.shape == (0,):  # that was not asked for
            return local
        source, placements = like
        t = call[source]
        if source not in self.rows or self.columns_may_be_sharded:
            return _from_local(local, t.device_mesh, placements, t.shape)
        # The columns of a result may be fewer than those of the input, or twice as many.
        return _from_local(local, t.device_mesh, placements, (*t.shape[:-1], local.shape[-1]))

    def result(self, call: Call, name: str, targets: Targets) -> tuple[str, Targets] | None:
        """The argument that a result is like, and where it is."""
        if name in ("rstd", "statistics"):
            return None
        source = self.source(call, name)
        placements = [self.placement(call, source, call[source], target) for target in targets]
        if source not in self.rows:  # the gradient of what several ranks have
            placements = [
                Partial() if isinstance(target, Shard) and placement == Replicate() else placement
                for target, placement in zip(targets, placements)
            ]
        return source, placements

    def source(self, call: Call, name: str) -> str:
        source = name.removeprefix("grad_").removesuffix("_in").removesuffix("_out")
        candidates = (source, f"grad_{source}", *self.rows)
        return next(name for name, _ in call.given(*candidates) if name in self.distributed())


class Grouped(Rule):
    """Rows sorted by expert: whole, or those of the experts that a rank has, with their offsets."""

    def dims(self, call: Call, t: DTensor) -> range:
        return range(1)

    def placement(self, call: Call, name: str, t: DTensor, rows) -> Replicate | Shard:
        return rows

    def placements(self, call: Call, targets: Targets) -> dict[str, Targets]:
        for name, t in call.given("offs", "weight", "bias", *self.rows[:1]):
            for index, (placement, target) in enumerate(zip(t.placements, targets)):
                if Shard(0) in (placement, target) and placement != target:
                    call.refuse_placement(name, index, f"{target!r}, as `x` is, by experts")
        return super().placements(call, targets)


class Rotary(Rule):
    """Rows are heads. Tables and positions are whole, or sharded with the batch or the tokens."""

    tables = ("cos", "sin")

    def distributed(self) -> tuple[str, ...]:
        return (*super().distributed(), *self.tables, "position_ids", "offsets")

    def tokens(self, call: Call) -> int:
        """The dimension of `q` that counts tokens."""
        q, positions = call[self.rows[0]], call["position_ids"]
        if q.dim() == 3:
            return 0 if positions is not None and positions.dim() == 1 else 1
        return 3 - call["heads_dim"]

    def placement(self, call: Call, name: str, t: DTensor, rows) -> Replicate | Shard:
        if name not in (*self.tables, "position_ids", "offsets") or not isinstance(rows, Shard):
            return super().placement(call, name, t, rows)
        tokens = self.tokens(call)
        if rows.dim == tokens:
            if name == "position_ids":
                return Shard(t.dim() - 1)
            moves_along = all(call[n] is None for n in ("position_ids", "offsets", "offset"))
            if name in self.tables and moves_along:
                return Shard(t.dim() - 2 if t.dim() < 4 else tokens)
            return Replicate()
        of_batch = name == "offsets" or t.dim() > (1 if name == "position_ids" else 2)
        return rows if rows.dim == 0 and of_batch and t.shape[0] != 1 else Replicate()

    def start(self, call: Call, targets: Targets) -> int:
        return _start(call[self.rows[0]], targets, self.tokens(call))

    def localise(self, call: Call, plan: Plan, arguments: dict) -> None:
        if arguments["offset"] is not None:
            arguments["offset"] += plan.start
        elif arguments["offsets"] is not None:
            arguments["offsets"] = arguments["offsets"] + plan.start
        elif arguments["position_ids"] is None and call[self.rows[0]].dim() == 3:
            # The shard of one rank may have as many sequences as tokens, and could be packed.
            tables = {name: arguments[name] for name in self.tables}
            arguments |= {name: t[None] if t.dim() == 2 else t for name, t in tables.items()}


class GivenLogits(Rule):
    """A draw from whole rows: the noise depends on the number of a row."""

    def dims(self, call: Call, t: DTensor) -> range:
        return range(0)

    def localise(self, call: Call, plan: Plan, arguments: dict) -> None:
        if not isinstance(call["seed"], DTensor):  # the ranks may have drawn different ones
            mesh = call[self.rows[0]].device_mesh
            arguments["seed"] = distribute_tensor(call["seed"], mesh, plan.targets).to_local()

    def wrapped(self, call: Call, local: torch.Tensor, like: tuple[str, Targets]):
        if local.shape == (0,):
            return local
        return DTensor.from_local(local, call[self.rows[0]].device_mesh, like[1], run_check=False)


class Head(GivenLogits):
    """A draw from a head that is whole, or whose vocabulary is sharded."""

    def placements(self, call: Call, targets: Targets) -> dict[str, Targets]:
        weight = call["weight"]
        for index, placement in enumerate(weight.placements):
            if placement not in (Shard(0), Replicate()):
                call.refuse_placement("weight", index, "Replicate() or Shard(0)")
        filters = ("top_k", "top_k_value", "top_p", "top_p_value", "min_p", "min_p_value")
        for name, _ in call.given(*filters if Shard(0) in weight.placements else ()):
            call.refuse(
                f"`{name.removesuffix('_value')}` needs logits that one rank has; redistribute "
                "`weight` to Replicate(), or draw without filters"
            )
        # With the vocabulary go a scale and a bias for each token.
        sharded = [n for n, t in call.given(*self.vectors) if t.shape[0] == weight.shape[0]]
        wanted = super().placements(call, targets)
        return wanted | {name: list(weight.placements) for name in sharded}

    def start(self, call: Call, targets: Targets) -> int:
        return _start(call["weight"], call["weight"].placements, 0)

    def run(self, call: Call, plan: Plan, arguments: dict) -> tuple[torch.Tensor, ...]:
        """Of a vocabulary in shards by one all-gather of what each shard draws."""
        weight = call["weight"]
        if Shard(0) not in weight.placements:
            return super().run(call, plan, arguments)
        logprobs = call["return_logprobs"]
        local = arguments | {"return_log_sum_exp": logprobs}
        local["vocab_offset"] += plan.start
        if len(local["weight"]) > 0:
            shard = _lm_head_sample_shard(*(local[n] for n in _names(_lm_head_sample_shard)))
        else:
            shard = _no_shard(local)
        columns = [t[:, None] if t.dim() == 1 else t for t in shard if t.shape != (0,)]
        packed = torch.cat([t.contiguous().view(torch.int32) for t in columns], 1)[None]
        sharded = DTensor.from_local(packed, weight.device_mesh, weight.placements, run_check=False)
        gathered = sharded.redistribute(placements=plan.targets).to_local()
        drawn = [self.unpacked(each, columns) for each in gathered]
        found = combine_shard_samples(drawn, return_logprobs=logprobs)
        if logprobs:
            return (*found, found[1].clone())
        return (found, shard[-1], shard[-1])

    @staticmethod
    def unpacked(packed: torch.Tensor, columns: list[torch.Tensor]) -> ShardSample:
        widths = [t.shape[1] * t.itemsize // 4 for t in columns]
        parts = [
            part.contiguous().view(t.dtype) for part, t in zip(packed.split(widths, 1), columns)
        ]
        sums = parts[3][:, 0] if len(parts) == 4 else packed.new_empty((0,), dtype=torch.float32)
        return ShardSample(*parts[:3], sums)


class Refused(Rule):
    """What has no meaning for DTensors."""

    def dispatch(self, cls, overload, types, args=(), kwargs=None):
        call = Call(overload, args, kwargs)
        call.refuse("takes a rank's own tensors; give DTensors to lm_head_sample")


def _move(t: DTensor, placements: Targets) -> DTensor:
    return t.detach().redistribute(placements=placements, async_op=True)


def _from_local(local: torch.Tensor, mesh, placements: Targets, shape: Sequence[int]) -> DTensor:
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


def _start(t: DTensor, placements: Targets, dim: int) -> int:
    """The index along `dim` of the first element of this rank."""
    start, size = 0, t.shape[dim]
    for index, placement in enumerate(placements):
        if placement == Shard(dim):
            rank, ranks = t.device_mesh.get_local_rank(index), t.device_mesh.size(index)
            each = -(-size // ranks)  # as torch.chunk cuts it
            before = min(size, rank * each)
            start, size = start + before, min(size - before, each)
    return start


def _no_shard(local: dict) -> tuple[torch.Tensor, ...]:
    """What a rank without rows of the weight contributes to a draw."""
    hidden, samples = local["hidden"], (local["hidden"].shape[0], local["num_samples"])
    if local["offset"] is not None:
        local["offset"].add_(1)
    scores = hidden.new_full(samples, -torch.inf, dtype=torch.float32)
    sums = (samples[0] if local["return_log_sum_exp"] else 0,)
    return (
        scores,
        hidden.new_full(samples, -1, dtype=torch.int64),
        torch.zeros_like(scores),
        hidden.new_full(sums, -torch.inf, dtype=torch.float32),
    )


_lm_head_sample_shard = ops.lm_head_sample_shard.default


def _with_gradient(name: str, rule: Rule) -> dict[str, Rule]:
    return {name: rule, f"{name}_fwd": rule}


_X = ("x",)
_SUM = ("x", "residual")
_AFFINE = ("weight", "bias")
_SCALE, _GATE = ("scale", "shift"), ("gate", "scale", "shift")
_ROTATED = Rotary(("q", "k"))
_NORMED = Rotary(("q", "k"), ("q_weight", "k_weight"))
_OPTIONS = ("seed", "offset", "temperature", "top_k", "top_p", "min_p")


def _gradient(rows: tuple[str, ...], *others, kind=Rule, **options) -> Rule:
    return kind(rows, *others, backward=True, **options)


RULES: dict[str, Rule] = {
    **_with_gradient("rms_norm", Rule(_X, ("weight",))),
    **_with_gradient("fused_add_rms_norm", Rule(_SUM, ("weight",))),
    "fused_add_rms_norm_": Rule(_SUM, ("weight",)),
    "rms_norm_bwd": _gradient(("x", "grad_out", "grad_new_residual"), ("weight",)),
    **_with_gradient("layer_norm", Rule(_X, _AFFINE)),
    **_with_gradient("fused_add_layer_norm", Rule(_SUM, _AFFINE)),
    "fused_add_layer_norm_": Rule(_SUM, _AFFINE),
    "layer_norm_bwd": _gradient(("x", "grad_out"), _AFFINE),
    **_with_gradient("ada_norm", Rule(_X, _AFFINE, modulations=_SCALE)),
    "ada_norm_bwd": _gradient(("x", "grad_out"), _AFFINE, modulations=_SCALE),
    **_with_gradient("gate_residual_ada_norm", Rule(_SUM, _AFFINE, modulations=_GATE)),
    "gate_residual_ada_norm_bwd": _gradient(
        ("new_residual", "grad_out", "grad_new_residual", "x"), _AFFINE, modulations=_GATE
    ),
    **_with_gradient("poly_norm", Rule(_X, _AFFINE)),
    **_with_gradient("fused_mul_poly_norm", Rule(("x", "mul"), _AFFINE)),
    "poly_norm_bwd": _gradient(("x", "mul", "grad_out"), _AFFINE),
    **_with_gradient("grouped_poly_norm", Grouped(("x", "mul"), (*_AFFINE, "offs"))),
    "grouped_poly_norm_bwd": _gradient(("x", "mul", "grad_out"), (*_AFFINE, "offs"), kind=Grouped),
    **_with_gradient("activation", Rule(_X, columns_may_be_sharded=True)),
    "activation_bwd": _gradient(("x", "grad_out"), columns_may_be_sharded=True),
    **_with_gradient("act_and_mul", Rule(_X)),
    "act_and_mul_bwd": _gradient(("x", "grad_out")),
    **_with_gradient("swiglu_clamped", Rule(_X)),
    "swiglu_clamped_bwd": _gradient(("x", "grad_out")),
    **_with_gradient("glu", Rule(("gate", "up"), columns_may_be_sharded=True)),
    "glu_bwd": _gradient(("gate", "up", "grad_out"), columns_may_be_sharded=True),
    **_with_gradient("bias_act", Rule(_X, columns=("bias",), columns_may_be_sharded=True)),
    "bias_act_": Rule(_X, columns=("bias",), columns_may_be_sharded=True),
    **_with_gradient(
        "add_mul_act", Rule(("x", "y"), columns=("bias",), columns_may_be_sharded=True)
    ),
    "add_mul_act_": Rule(("x", "y"), columns=("bias",), columns_may_be_sharded=True),
    "add_mul_act_bwd": _gradient(
        ("x", "y", "grad_out"), columns=("bias",), columns_may_be_sharded=True
    ),
    **_with_gradient("apply_rotary", _ROTATED),
    "apply_rotary_": _ROTATED,
    "apply_rotary_bwd": _gradient(("grad_q", "grad_k"), kind=Rotary),
    **_with_gradient("qk_norm_rotary", _NORMED),
    "qk_norm_rotary_bwd": _gradient(
        ("q", "k", "grad_q_out", "grad_k_out"), ("q_weight", "k_weight"), kind=Rotary
    ),
    "gumbel_sample": GivenLogits(("logits",), ("bias", "bitmask"), numbers=_OPTIONS),
    "lm_head_sample": Head(("hidden",), ("weight", "weight_scale", "bias"), numbers=_OPTIONS),
    "lm_head_sample_shard": Refused(()),
}
