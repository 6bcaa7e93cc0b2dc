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
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from . import _shard_norm
from ._dtensor_rules import Call, Like, Plan, Rule, Targets, from_local, names_of, start_of
from ._ops import add_op_namespace_prefix, ops
from .sampling import ShardSample, combine_shard_samples

_NONE, _MEAN = 0, 2  # of a loss's reductions

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


class Norm(Rule):
    """Rows that are whole, or whose columns are sharded over one dimension of the mesh."""

    def dims(self, call: Call, t: DTensor) -> range:
        """Halves that are packed into one tensor are not cut: a rank would have one of them."""
        packed = call.arguments.get("packed", call.arguments.get("mul", t) is None)
        return range(t.dim() - packed)

    def columns_over(self, call: Call, targets: Targets) -> int | None:
        """The dimension of the mesh that the columns are sharded over."""
        _, x = next(call.given(*self.rows))
        last = Shard(x.dim() - 1)
        return targets.index(last) if last in targets else None

    def targets(self, call: Call) -> Targets:
        targets = super().targets(call)
        index = self.columns_over(call, targets)
        if index is not None and targets[index] in targets[index + 1 :]:
            name, _ = next(call.given(*self.rows))
            call.refuse(
                f"the last dimension of `{name}` is sharded over several dimensions of the mesh, "
                "and may be over one; redistribute it"
            )
        return targets

    def run(self, call: Call, plan: Plan, arguments: dict):
        """Of sharded columns by one all-gather of what each rank sums up of a row."""
        index = self.columns_over(call, plan.targets)
        if index is None:
            return super().run(call, plan, arguments)
        _, x = next(call.given(*self.rows))
        whole = [Replicate()] * x.device_mesh.ndim
        parts = [Shard(0) if i == index else Replicate() for i in range(x.device_mesh.ndim)]

        def gather(sums: torch.Tensor) -> torch.Tensor:
            of_rank = DTensor.from_local(sums[None], x.device_mesh, parts, run_check=False)
            return of_rank.redistribute(placements=whole, async_op=True).to_local()

        return _shard_norm.RUN[call.op](arguments, x.shape[-1], gather)

    def wrapped(self, call: Call, local: torch.Tensor, like: Like | None):
        if like is None or self.columns_over(call, like.placements) is None:
            return super().wrapped(call, local, like)
        if self.backward and not call[like.needed]:
            return local
        t = call[like.source]
        return from_local(local, t.device_mesh, like.placements, t.shape)


class Samples(Rule):
    """Whole samples, of which a rank has some; and what each has kept of them."""

    def dims(self, call: Call, t: DTensor) -> range:
        return range(1)

    def wrapped(self, call: Call, local: torch.Tensor, like: Like | None):
        if like is None or like.source not in self.rows or local.shape == (0,):
            return super().wrapped(call, local, like)
        t = call[like.source]
        return from_local(local, t.device_mesh, like.placements, t.shape)


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
        return start_of(call[self.rows[0]], targets, self.tokens(call))

    def localise(self, call: Call, plan: Plan, arguments: dict) -> None:
        if arguments["offset"] is not None:
            arguments["offset"] += plan.start
        elif arguments["offsets"] is not None:
            arguments["offsets"] = arguments["offsets"] + plan.start
        elif arguments["position_ids"] is None and call[self.rows[0]].dim() == 3:
            # The shard of one rank may have as many sequences as tokens, and could be packed.
            tables = {name: arguments[name] for name in self.tables}
            arguments |= {name: t[None] if t.dim() == 2 else t for name, t in tables.items()}


class Tokens(Rule):
    """Rows are logits. All other tensors have an element for each, or are scalars."""

    of_tokens = ("targets", "token_weights", "grad_out", "entropy")
    of_tokens += ("grad_log_probs", "grad_entropy", "grad_log_sum_exp")

    def distributed(self) -> tuple[str, ...]:
        return self.rows + self.of_tokens

    def check(self, call: Call) -> None:
        super().check(call)
        if call.arguments.get("inplace_backward"):
            call.refuse("`inplace_backward` is not for DTensors")

    def targets(self, call: Call) -> Targets:
        targets = super().targets(call)
        if call.arguments.get("reduction") == _MEAN and any(isinstance(t, Shard) for t in targets):
            call.refuse(
                "`reduction` of sharded rows must be 'none' or 'sum', as no rank knows the number "
                "of all targets, got 'mean'"
            )
        return targets

    def placement(self, call: Call, name: str, t: DTensor, rows) -> Replicate | Shard:
        return rows if t.dim() > 0 else Replicate()

    def result(self, call: Call, name: str, targets: Targets) -> Like | None:
        if name in ("statistics", "count") or (name == "entropy" and not call["return_entropy"]):
            return None
        if name == "grad_logits":
            return Like("logits", targets, "")
        if name == "loss" and call["reduction"] != _NONE:
            return Like("loss", [Partial() if isinstance(t, Shard) else t for t in targets], "")
        return Like("targets", targets, "")

    def wrapped(self, call: Call, local: torch.Tensor, like: Like | None):
        if like is None:
            return local
        if like.source == "loss":
            return from_local(local, call["logits"].device_mesh, like.placements, ())
        t = call[like.source]
        return from_local(local, t.device_mesh, like.placements, t.shape)


class GivenLogits(Rule):
    """A draw from whole rows: the noise depends on the number of a row."""

    def dims(self, call: Call, t: DTensor) -> range:
        return range(0)

    def localise(self, call: Call, plan: Plan, arguments: dict) -> None:
        if not isinstance(call["seed"], DTensor):  # the ranks may have drawn different ones
            mesh = call[self.rows[0]].device_mesh
            arguments["seed"] = distribute_tensor(call["seed"], mesh, plan.targets).to_local()

    def wrapped(self, call: Call, local: torch.Tensor, like: Like):
        if local.shape == (0,):
            return local
        mesh = call[self.rows[0]].device_mesh
        return DTensor.from_local(local, mesh, like.placements, run_check=False)


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
        return start_of(call["weight"], call["weight"].placements, 0)

    def run(self, call: Call, plan: Plan, arguments: dict) -> tuple[torch.Tensor, ...]:
        """Of a vocabulary in shards by one all-gather of what each shard draws."""
        weight = call["weight"]
        if Shard(0) not in weight.placements:
            return super().run(call, plan, arguments)
        logprobs = call["return_logprobs"]
        local = arguments | {"return_log_sum_exp": logprobs}
        local["vocab_offset"] += plan.start
        if len(local["weight"]) > 0:
            shard = _lm_head_sample_shard(*(local[n] for n in names_of(_lm_head_sample_shard)))
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
        # NOTE: copied. Of one row a part is contiguous, but does not start where a wider type may.
        parts = [
            part.clone(memory_format=torch.contiguous_format).view(t.dtype)
            for part, t in zip(packed.split(widths, 1), columns)
        ]
        sums = parts[3][:, 0] if len(parts) == 4 else packed.new_empty((0,), dtype=torch.float32)
        return ShardSample(*parts[:3], sums)


@dataclass(frozen=True)
class Refused(Rule):
    """What has no meaning for DTensors."""

    why: str = "takes a rank's own tensors"

    def dispatch(self, cls, overload, types, args=(), kwargs=None):
        Call(overload, args, kwargs).refuse(self.why)


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
_QUANTISES = Refused((), why="takes a rank's own tensor: a scale is of a row that is whole")
_LOSS = Tokens(("logits",))
_LINEAR_LOSS = Refused((), why="takes plain tensors; gather what is sharded, as with full_tensor()")
_OPTIONS = ("seed", "offset", "temperature", "top_k", "top_p", "min_p")


def _gradient(rows: tuple[str, ...], *others, kind=Rule, **options) -> Rule:
    return kind(rows, *others, backward=True, **options)


RULES: dict[str, Rule] = {
    **_with_gradient("rms_norm", Norm(_X, columns=("weight",))),
    **_with_gradient("fused_add_rms_norm", Norm(_SUM, columns=("weight",))),
    "fused_add_rms_norm_": Rule(_SUM, ("weight",)),
    "rms_norm_bwd": _gradient(
        ("x", "grad_out", "grad_new_residual"), columns=("weight",), kind=Norm
    ),
    **_with_gradient("rms_norm_add_rms_norm", Rule(_SUM, ("post_weight", "pre_weight"))),
    "rms_norm_add_rms_norm_bwd": _gradient(
        ("new_residual", "x", "grad_out", "grad_new_residual"), ("post_weight", "pre_weight")
    ),
    **_with_gradient("gated_rms_norm", Rule(("x", "gate"), ("weight",))),
    "gated_rms_norm_bwd": _gradient(("x", "gate", "grad_out"), ("weight",)),
    **_with_gradient("group_norm", Samples(_X, _AFFINE)),
    "group_norm_bwd": _gradient(("x", "grad_out"), _AFFINE, kind=Samples),
    **_with_gradient("layer_norm", Norm(_X, columns=_AFFINE)),
    **_with_gradient("fused_add_layer_norm", Norm(_SUM, columns=_AFFINE)),
    "fused_add_layer_norm_": Rule(_SUM, _AFFINE),
    "layer_norm_bwd": _gradient(("x", "grad_out"), columns=_AFFINE, kind=Norm),
    **_with_gradient("ada_norm", Rule(_X, _AFFINE, modulations=_SCALE)),
    "ada_norm_bwd": _gradient(("x", "grad_out"), _AFFINE, modulations=_SCALE),
    **_with_gradient("gate_residual_ada_norm", Rule(_SUM, _AFFINE, modulations=_GATE)),
    # Of fused_add_layer_norm, too: there without gate, scale and shift.
    "gate_residual_ada_norm_bwd": _gradient(
        ("new_residual", "grad_out", "grad_new_residual", "x"),
        **{"columns": _AFFINE, "modulations": _GATE, "kind": Norm},
    ),
    **_with_gradient("poly_norm", Norm(_X, _AFFINE)),
    **_with_gradient("fused_mul_poly_norm", Norm(("x", "mul"), _AFFINE)),
    "poly_norm_bwd": _gradient(("x", "mul", "grad_out"), _AFFINE, kind=Norm),
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
    **_with_gradient("cross_entropy", _LOSS),
    "cross_entropy_bwd": _gradient(("logits",), kind=Tokens),
    "cross_entropy_bwd_": _gradient(("logits",), kind=Tokens),
    **_with_gradient("log_probs", _LOSS),
    "log_probs_bwd": _gradient(("logits",), kind=Tokens),
    **_with_gradient("topk_softmax", Rule(("logits",), ("bias",))),
    "topk_softmax_bwd": _gradient(("logits", "weights", "indices", "grad_weights")),
    "quant_fp8": _QUANTISES,
    "rms_norm_quant": _QUANTISES,
    "fused_add_rms_norm_quant": _QUANTISES,
    "layer_norm_quant": _QUANTISES,
    "ada_layer_norm_quant": _QUANTISES,
    "silu_and_mul_quant": _QUANTISES,
    "swiglu_quant": _QUANTISES,
    "gelu_tanh_quant": _QUANTISES,
    "gumbel_sample": GivenLogits(("logits",), ("bias", "bitmask"), numbers=_OPTIONS),
    "lm_head_sample": Head(("hidden",), ("weight", "weight_scale", "bias"), numbers=_OPTIONS),
    "lm_head_sample_shard": Refused(
        (), why="takes a rank's own tensors; give DTensors to lm_head_sample"
    ),
    "linear_cross_entropy": _LINEAR_LOSS,
    "linear_cross_entropy_fwd": _LINEAR_LOSS,
    "linear_log_probs": _LINEAR_LOSS,
    "linear_log_probs_fwd": _LINEAR_LOSS,
}
