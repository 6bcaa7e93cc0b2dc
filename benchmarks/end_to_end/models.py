"""What a scenario is, and how its model is made and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .batch import Batches
from .measure import nothing
from .peers import TORCHAO, torchao_for_fp8


@dataclass
class Scenario:
    """One thing to time.

    Attributes:
        title: Model, shape and dtype, for the table.
        model: With its weights, on the device.
        step: Runs it once, with the model to call: the model itself, or compiled.
        outputs: What must agree with the plain model's, from a run of its own, with what to call.
        compiled: Compiles the model in place, and returns what to call and what undoes it.
        integration: The part of fuselage.integrations that patches it.
        variants: Names of what is patched, and the options of `patch`. Each replaces more than the
            one before.
        rough: Variants that round more than bfloat16 does, as float8: held to a wider limit.
        peers: Other libraries, where they are installed: contexts of the model and the integration.
        before: What each step needs before it, and what is not timed.
        per_sample: Steps in what the table calls one sample, such as the steps of a denoising.
        batches: What finds the largest batch, for the plain model and the last variant.
        notes: What a reader must know: sizes that were reduced, and how it was compiled.
    """

    title: str
    model: torch.nn.Module
    step: Callable[[Callable], object]
    outputs: Callable[[Callable], tuple[torch.Tensor, ...]]
    compiled: Callable[[], tuple[Callable, Callable[[], None]]]
    integration: str
    before: Callable[[], object] = nothing
    per_sample: int = 1
    batches: Batches | None = None
    variants: dict[str, dict] = field(default_factory=lambda: {"fuselage": {}})
    rough: tuple[str, ...] = ()
    peers: dict[str, Callable] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@contextmanager
def created_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Weights are made where they stay, and in their dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def compiled_blocks(blocks: list[torch.nn.Module], model: torch.nn.Module):
    """Compiles the blocks, which are alike, one by one: once for all of them."""

    def compile() -> tuple[Callable, Callable[[], None]]:
        torch._dynamo.reset()
        for block in blocks:
            block.compile(fullgraph=True)

        def undo() -> None:
            for block in blocks:
                block._compiled_call_impl = None

        return model, undo

    return compile


# What is also timed with float8 linears: fuselage's operators without them, and with them; and
# float8 linears of a peer, with nothing else.
FLOAT8 = {
    "variants": {"fuselage": {}, "fuselage + fp8": {"linear": "fp8"}},
    "rough": ("fp8", "fuselage + fp8", TORCHAO),
    "peers": {TORCHAO: torchao_for_fp8},
}

BLOCKS_NOTE = "compiled block by block (fullgraph), as all blocks are alike"


def how_compiled(
    model: torch.nn.Module, blocks: list[torch.nn.Module] | None
) -> tuple[Callable, str]:
    """What compiles a model, whole where there are no `blocks`; and the note on it."""
    if blocks is None:
        return compiled_whole(model), "compiled whole"
    return compiled_blocks(blocks, model), BLOCKS_NOTE


def compiled_whole(model: torch.nn.Module, mode: str = "default"):
    """Compiles the model, masks included."""

    def compile() -> tuple[Callable, Callable[[], None]]:
        torch._dynamo.reset()
        return torch.compile(model, mode=mode), torch._dynamo.reset

    return compile
