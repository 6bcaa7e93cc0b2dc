"""What the operators do with DTensors: docs/distributed.md says which placements each takes.

A rule is a kernel of `torch.library.register_torch_dispatch`, registered when an operator is first
given a DTensor, so that nobody else pays for it. It decides from placements alone, which are the
same on all ranks: a call that is refused is refused on each of them, before any collective.

NOTE: not `register_sharding`, which picks the cheapest redistribution of each input by itself. Here
gradients go where their inputs are, a row's statistics stay with their rows, what is written in
place is never moved, and a vocabulary is sampled in shards.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ._arguments import public_function
from ._ops import add_op_namespace_prefix, ops
from .sampling import ShardSample, combine_shard_samples

Targets = list  # of a placement for each dimension of the mesh

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
        schema = overload._schema
        names = [argument.name for argument in schema.arguments]
        self.overload = overload
        self.arguments = dict(zip(names, args)) | dict(kwargs or {})
        self.written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        self.results = [result.name for result in schema.returns]
        self.op = public_function() or schema.name.partition("::")[2]

    def __getitem__(self, name: str):
        return self.arguments[name]

    def given(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of some arguments that are not None."""
        return ((n, self.arguments[n]) for n in names if self.arguments.get(n) is not None)

    def refuse(self, why: str):
        raise RuntimeError(f"fuselage::{self.op}: {why}")

    def refuse_placement(self, name: str, index: int, allowed: str):
        t = self.arguments[name]
        dimension = f"dimension {index} of the mesh"
        if t.device_mesh.mesh_dim_names:
            dimension = f"dimension `{t.device_mesh.mesh_dim_names[index]}` of the mesh"
        self.refuse(
            f"`{name}` is {t.placements[index]!r} over {dimension}, which must be {allowed}; "
            "redistribute it"
        )


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
            self.check(call)
            targets = self.targets(call)
            wanted = self.placements(call, targets)
            for name in call.written:
                for index, placement in enumerate(wanted.get(name, ())):
                    if call[name].placements[index] != placement:
                        allowed = f"{placement!r} to be written in place"
                        call.refuse_placement(name, index, allowed)
            moved = {name: _move(call[name], to) for name, to in wanted.items()}
            arguments = call.arguments | {name: t.to_local() for name, t in moved.items()}
            self.localise(call, targets, arguments)
            return self.wrap(call, overload(*arguments.values()), targets)

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
                if type(placement) not in (Replicate, Shard, Partial):
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
                    f"`{of_first}` is {first!r} and `{of_second}` is {second!r} over dimension "
                    f"{index} of the mesh; they must be sharded alike, redistribute one"
                )
            targets.append(next(iter(shards), Replicate()))
        return targets

    def dims(self, call: Call, t: DTensor) -> range:
        """The dimensions that may be sharded."""
        return range(t.dim() if self.columns_may_be_sharded else t.dim() - 1)

    def allowed(self, call: Call, t: DTensor) -> str:
        dims = [f"Shard({dim})" for dim in self.dims(call, t)]
        return " or ".join(["Replicate()", *dims])

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

    def localise(self, call: Call, targets: Targets, arguments: dict) -> None:
        """Changes what else depends on the shard of this rank."""

    def wrap(self, call: Call, results, targets: Targets):
        """The results as DTensors, of the local ones."""
        if results is None or not call.results:
            return results
        several = isinstance(results, (tuple, list))
        wrapped = [
            self.result(call, name, local, targets)
            for name, local in zip(call.results, results if several else [results])
        ]
        return tuple(wrapped) if several else wrapped[0]

    def result(self, call: Call, name: str, local: torch.Tensor, targets: Targets):
        if name in ("rstd", "statistics") or local.shape == (0,):  # or not asked for
            return local
        source = self.source(call, name)
        t = call[source]
        placements = [self.placement(call, source, t, target) for target in targets]
        if source not in self.rows:  # the gradient of what several ranks have
            placements = [
                Partial() if isinstance(target, Shard) and placement == Replicate() else placement
                for target, placement in zip(targets, placements)
            ]
            return _from_local(local, t, placements, t.shape)
        # The columns of a result may be fewer than those of the input, or twice as many.
        whole = any(isinstance(p, Shard) and p.dim == t.dim() - 1 for p in placements)
        columns = t.shape[-1] if whole else local.shape[-1]
        return _from_local(local, t, placements, (*t.shape[:-1], columns))

    def source(self, call: Call, name: str) -> str:
        """The argument that a result is like."""
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
                    call.refuse_placement(name, index, f"{target!r} as `x`, by experts")
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

    def localise(self, call: Call, targets: Targets, arguments: dict) -> None:
        q, tokens = call[self.rows[0]], self.tokens(call)
        start = _start(q, targets, tokens)
        for name, offset in call.given("offset", "offsets"):
            arguments[name] = start + (offset if name == "offset" else arguments[name])


class GivenLogits(Rule):
    """A draw from whole rows: the noise depends on the number of a row."""

    def dims(self, call: Call, t: DTensor) -> range:
        return range(0)

    def localise(self, call: Call, targets: Targets, arguments: dict) -> None:
        if not isinstance(call["seed"], DTensor):  # the ranks may have drawn different ones
            mesh = call[self.rows[0]].device_mesh
            arguments["seed"] = distribute_tensor(call["seed"], mesh, targets).to_local()

    def wrap(self, call: Call, results, targets: Targets):
        reference = call[self.rows[0]]
        return tuple(
            t if t.shape == (0,) else DTensor.from_local(t, reference.device_mesh, targets)
            for t in results
        )


class Head(GivenLogits):
    """A draw from a head that is whole, or whose vocabulary is sharded."""

    def dispatch(self, cls, overload, types, args=(), kwargs=None):
        call = Call(overload, args, kwargs)
        with torch.no_grad():
            self.check(call)
            weight = call["weight"]
            shards = [index for index, p in enumerate(weight.placements) if p == Shard(0)]
            for index, placement in enumerate(weight.placements):
                if placement not in (Shard(0), Replicate()):
                    call.refuse_placement("weight", index, "Replicate() or Shard(0)")
            if not shards:
                return super().dispatch(cls, overload, types, args, kwargs)
            return self.draw(call, self.targets(call), shards)

    def draw(self, call: Call, targets: Targets, shards: list[int]):
        """One all-gather of what each shard draws."""
        for name, _ in call.given("top_k", "top_k_value", "top_p", "top_p_value", "min_p"):
            call.refuse(
                f"`{name.removesuffix('_value')}` needs logits that one rank has; redistribute "
                "`weight` to Replicate(), or draw without filters"
            )
        weight, mesh = call["weight"], call["weight"].device_mesh
        of_vocabulary = [p if p == Shard(0) else Replicate() for p in weight.placements]
        wanted = self.placements(call, targets) | {"weight": of_vocabulary}
        for name, t in call.given("weight_scale", "bias"):
            if t.shape[0] == weight.shape[0]:
                wanted[name] = of_vocabulary
        moved = {name: _move(call[name], to) for name, to in wanted.items()}
        local = call.arguments | {name: t.to_local() for name, t in moved.items()}
        self.localise(call, targets, local)
        names = [argument.name for argument in _lm_head_sample_shard._schema.arguments]
        local["vocab_offset"] += _start(weight, of_vocabulary, 0)
        local["return_log_sum_exp"] = call["return_logprobs"]
        if len(local["weight"]) > 0:
            shard = _lm_head_sample_shard(*(local[name] for name in names))
        else:
            shard = _no_shard(local)
        columns = [t[:, None] if t.dim() == 1 else t for t in shard if t.shape != (0,)]
        packed = torch.cat([t.contiguous().view(torch.int32) for t in columns], 1)[None]
        sharded = DTensor.from_local(packed, mesh, of_vocabulary, run_check=False)
        gathered = sharded.redistribute(placements=targets).to_local()
        drawn = [self.unpacked(each, columns) for each in gathered]
        found = combine_shard_samples(drawn, return_logprobs=call["return_logprobs"])
        if call["return_logprobs"]:
            return super().wrap(call, (*found, found[1].clone()), targets)
        return super().wrap(call, (found, *shard[-1:] * 2), targets)

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
    if list(t.placements) == placements:
        return t
    return t.redistribute(placements=placements, async_op=True)


def _from_local(local: torch.Tensor, like: DTensor, placements: Targets, shape) -> DTensor:
    """A DTensor of a shape, laid out as the local tensor is."""
    order = sorted(range(local.dim()), key=local.stride, reverse=True)
    if local.numel() == 0:
        order = range(local.dim())
    strides = [0] * local.dim()
    for dim, after in zip(order, _suffixes([shape[dim] for dim in order])):
        strides[dim] = after
    return DTensor.from_local(
        local,
        like.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )


def _suffixes(sizes: list[int]) -> list[int]:
    """For each size the product of those after it."""
    products = itertools.accumulate(reversed(sizes[1:]), lambda a, b: a * max(b, 1), initial=1)
    return list(products)[::-1]


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
