"""Causal language models of transformers whose loss is computed from what goes into the head.

Such a model gives its head's logits to the causal LM loss as they are. In training, where there are
labels, its forward runs with a head that passes its input on, and a loss that takes that and the
head's weight: `linear_cross_entropy`, which never has the logits in memory. The model returns none
then. A model that changes its logits first, by a scale or a soft cap, is left alone.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache, partial
from typing import Callable, Optional

import torch
import torch.nn.functional as F

from ..linear_loss import linear_cross_entropy
from . import _probe
from ._patch import Found, Match, foreign_forward, install, listened_to, marked

WHAT = "linear_cross_entropy, in training: no logits"

_PASSES = "fuselage_passes_on"  # an attribute of a head


def recognise_causal_loss(module: torch.nn.Module) -> Found:
    """A model with a head and the causal LM loss."""
    if "labels" not in inspect.signature(type(module).forward).parameters:
        return None
    loss = _causal_lm_loss()
    if loss is None or getattr(module, "loss_function", None) is not loss:
        return None
    head = module.get_output_embeddings()
    name = next((n for n, child in module.named_children() if child is head), None)
    if head is None or name is None:
        return "its head is none of its own modules"
    if type(head) is not torch.nn.Linear:
        return f"its {name} is a {type(head).__name__}, not a Linear"
    why_not = _why_not(module, name) or install(head, Match(WHAT, _pass_or_project))
    return why_not or Match(WHAT, _forward(type(module), name))


def _pass_or_project(self, x: torch.Tensor) -> torch.Tensor:
    """The forward of a head, which passes its input on while its model says so."""
    return x if getattr(self, _PASSES, False) else F.linear(x, self.weight, self.bias)


marked(WHAT, _pass_or_project)


class _Outputs:
    """What a body returns, of which the model reads what it likes."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index) -> Optional[torch.Tensor]:
        return self.last_hidden_state if index == 0 else None


def _why_not(module: torch.nn.Module, name: str) -> Optional[str]:
    """Why the loss may not be taken before the head: found with stand-ins for all submodules."""
    hidden, logits, seen = _probe.random(1, 4, 8), _probe.random(1, 4, 16), {}

    def loss(logits: torch.Tensor, labels: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        seen.update(logits=logits)
        return logits.new_zeros(())

    children = {
        n: _probe.Stub((lambda x: logits) if n == name else lambda *a, **k: _Outputs(hidden))
        for n, _ in module.named_children()
    }
    plain = _probe.stand_in(module, modules=children, training=True)
    vars(plain)["_loss_function"] = loss
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    given = {"input_ids": tokens, "labels": tokens}
    if "output_router_logits" in inspect.signature(type(module).forward).parameters:
        given["output_router_logits"] = False  # what is added to the loss needs those of experts
    result = _probe.call(partial(type(module).forward, plain, **given))
    if isinstance(result, Exception):
        return _probe.cannot(result)
    if seen.get("logits") is not logits or getattr(result, "logits", None) is not logits:
        return "it changes its logits before the loss"
    return None


@cache
def _forward(kind: type, name: str) -> Callable:
    signature = inspect.signature(kind.forward)
    names = tuple(signature.parameters)[1:]

    def forward(self, *args, **kwargs):
        own, head = type(self).forward, getattr(self, name)
        if not _is_training(self, head, {**dict(zip(names, args)), **kwargs}):
            return own(self, *args, **kwargs)
        whole_loss = self.loss_function
        setattr(head, _PASSES, True)
        self._loss_function = partial(_loss, head)
        try:
            outputs = own(self, *args, **kwargs)
        finally:
            setattr(head, _PASSES, False)
            self._loss_function = whole_loss
            if not torch.compiler.is_compiling():  # which could not trace it
                delattr(head, _PASSES)
                del self._loss_function
        return type(outputs)(**{k: v for k, v in outputs.items() if k != "logits"})

    forward.__signature__ = signature
    return marked(WHAT, forward)


def _is_training(model: torch.nn.Module, head: torch.nn.Module, given: dict) -> bool:
    """Whether the loss is wanted, and the logits are not."""
    keep = given.get("logits_to_keep")
    asked = keep is not None and not (isinstance(keep, int) and keep == 0)
    if not model.training or given.get("labels") is None or asked:
        return False
    if given.get("return_dict") is False or getattr(model.config, "return_dict", True) is False:
        return False  # a tuple, in which the logits have a place
    if type(head) is not torch.nn.Linear or listened_to(head) or foreign_forward(head):
        return False
    if "_hf_hook" in vars(head):  # its weight may be there for its own forward alone
        return False
    if vars(model).get("_loss_function") not in (None, _causal_lm_loss()):
        return False  # the user's own
    return head.weight.numel() > 0 and not hasattr(head.weight, "device_mesh")


def _causal_lm_loss() -> Optional[Callable]:
    losses = sys.modules.get("transformers.loss.loss_utils")
    return None if losses is None else losses.ForCausalLMLoss


def _loss(
    head: torch.nn.Linear,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Optional[torch.Tensor] = None,
    **kwargs,
) -> torch.Tensor:
    """As transformers' ForCausalLMLoss, of what goes into the head in place of logits."""
    hidden, weights = logits, None
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
    if num_items_in_batch is not None:
        # NOTE: of each token, not of the sum: so gradients are rounded with it, and not before.
        items = torch.as_tensor(num_items_in_batch, device=hidden.device)
        weights = items.float().reciprocal().expand(targets.shape)
    return linear_cross_entropy(
        *(hidden, head.weight, targets),
        bias=head.bias,
        reduction="mean" if weights is None else "sum",
        ignore_index=ignore_index,
        token_weights=weights,
    )
