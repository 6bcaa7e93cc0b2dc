"""The case of a seed: a valid call or a bad one of a public function."""

from __future__ import annotations

from types import ModuleType

import quantising

from . import bad_calls, group, loss, modules, quant, rotary, route, rows, sampling, tables
from .draw import Draw
from .judge import Failure, check_untouched

BAD_CALLS = 0.25  # of the cases

# In `__all__`, and not called here.
LEFT_OUT = {
    "LogProbs": "what log_probs returns, and checked there",
    "Quantized": "what quant_fp8 returns, and checked there",
    "Sample": "what the samplers return with return_logprobs=True, and checked there",
    "ShardLogProbs": "what linear_log_probs_shard returns, and combine_shard_log_probs takes",
    "ShardSample": "what lm_head_sample_shard returns, and combine_shard_samples takes",
    "TopK": "what topk_softmax returns, and checked there",
    "distributed": "places models on many processes; tests/distributed",
    "integrations": "patches models; tests/integrations",
    "layers": "for kernelize: their forwards are one call of a function; tests/*/test_*layers.py",
    "modules": "a namespace: its classes are called as modules.RMSNorm and so on",
}

# PyTorch's own functions refuse what is wrong there.
NO_BAD_CALLS = ("ltx_video_rotary_tables", "linear_log_probs_shard", "combine_shard_log_probs")

TABLES = ("ltx_video_rotary_tables", "wan_rotary_tables")
LOSSES = ("cross_entropy", "log_probs", "linear_cross_entropy", "linear_log_probs")
LOSS_MODULES = ("modules.CrossEntropyLoss", "modules.LinearCrossEntropyLoss")
LOSS_SHARDS = ("linear_log_probs_shard", "combine_shard_log_probs")
SHARDS = ("lm_head_sample_shard", "combine_shard_samples")


def make(draw: Draw, name: str, ordinary: bool):
    """A random call of `name`; `ordinary` ones are what a change makes bad."""
    if name in rows.STYLES:
        return rows.make(draw, name, ordinary=ordinary)
    if name in rows.IN_PLACE:
        function, written = rows.IN_PLACE[name]
        return rows.make(draw, function, written, ordinary=ordinary)
    if name in ("apply_rotary", "qk_norm_rotary"):
        return rotary.make(draw, name, ordinary=ordinary)
    if name == "apply_rotary_":
        return rotary.make(draw, "apply_rotary", in_place=True, ordinary=ordinary)
    if name == "gumbel_sample":
        return sampling.make_gumbel(draw, ordinary=ordinary)
    if name in LOSS_MODULES:
        name = modules.MODULES[name.split(".")[1]][0]
    if name in LOSS_SHARDS:
        name = "linear_log_probs"
    if name in LOSSES:
        return loss.make(draw, name, ordinary=ordinary)
    if name == "topk_softmax":
        return route.make(draw, ordinary=ordinary)
    if name in ("quant_fp8", "modules.Fp8Linear"):
        return quant.make(draw, ordinary=ordinary)
    if name in quantising.BY_NAME:
        return quant.make_fused(draw, name, ordinary=ordinary)
    if name in ("group_norm", "modules.GroupNorm"):
        return group.make(draw, ordinary=ordinary)
    if name in TABLES:
        return tables.make(draw, name, ordinary=ordinary)
    if name in SHARDS or name == "lm_head_sample":
        return sampling.make_head(draw, ordinary=ordinary, shard=name in SHARDS)
    if name.startswith("modules."):
        return rows.make(draw, modules.MODULES[name.split(".")[1]][0], ordinary=ordinary)
    raise ValueError(f"no case of {name}: add it to {__name__}")


def check_valid(kernel, draw: Draw, name: str) -> None:
    if name in SHARDS:
        sampling.check_shards(kernel, draw)
        return
    call = make(draw, name, ordinary=False)
    if name in rows.IN_PLACE:
        rows.check_in_place(kernel, draw, name, call, rows.IN_PLACE[name][1])
    elif name == "apply_rotary_":
        written = tuple(n for n in rotary.WRITTEN if call.inputs[n] is not None)
        rows.check_in_place(kernel, draw, name, call, written)
    elif name == "modules.GroupNorm":
        group.check_module(kernel, call)
    elif name in LOSS_MODULES:
        module = name.split(".")[1]
        loss.check_module(kernel, module, modules.MODULES[module][1], call)
    elif name == "modules.Fp8Linear":
        quant.check_linear(kernel, draw, call)
    elif name.startswith("modules."):
        modules.check(kernel, draw, name.split(".")[1], call)
    elif name in TABLES:
        tables.check(kernel, draw, call)
    elif name in LOSSES:
        loss.check(kernel, draw, call)
    elif name in LOSS_SHARDS:
        loss.check_shards(kernel, draw, call)
    elif name == "topk_softmax":
        route.check(kernel, draw, call)
    elif name == "quant_fp8":
        quant.check(kernel, draw, call)
    elif name in quantising.BY_NAME:
        quant.check_fused(kernel, name, call)
    elif name == "group_norm":
        group.check(kernel, draw, call)
    elif isinstance(call, sampling.Call):
        sampling.check(kernel, draw, call)
    else:
        rows.check(kernel, draw, call)


def run(kernel: ModuleType, name: str, seed: int, device: str) -> str:
    """The case; raises Failure. Returns "valid" or "bad", what kind of call it was."""
    draw = Draw(name, seed, device)
    bad = draw.chance(BAD_CALLS) and name not in NO_BAD_CALLS and not name.startswith("modules.")
    try:
        if bad:
            bad_calls.check(draw, name, getattr(kernel, name), _good_call(draw, name))
        else:
            check_valid(kernel, draw, name)
    except Failure as failure:
        check_untouched(draw, f"; besides, {failure.kind}: {failure}")  # which may explain it
        raise
    check_untouched(draw)
    return "bad" if bad else "valid"


def _good_call(draw: Draw, name: str) -> dict:
    """The arguments that a change makes bad."""
    if name == "combine_shard_samples":
        return {"shards": None}
    given = make(draw, name, ordinary=True).arguments()
    if name == "lm_head_sample_shard":
        return _of_a_shard(draw, given)
    if name.endswith("_"):
        given.pop("out_dtype", None)
    return given


def _of_a_shard(draw: Draw, given: dict) -> dict:
    """Seed and offset are tensors, and the place in the vocabulary must be said."""
    given.pop("return_logprobs", None)
    given.setdefault("vocab_offset", 0)
    for name in ("seed", "offset"):
        if not hasattr(given.get(name), "shape"):
            given[name] = draw.lay_out(name, sampling._words(draw, 1))
    return given


def names(kernel: ModuleType) -> list[str]:
    """Everything that is called: what `__all__` has, and the modules."""
    functions = [name for name in kernel.__all__ if name not in LEFT_OUT]
    return [*functions, *(f"modules.{name}" for name in modules.MODULES)]
