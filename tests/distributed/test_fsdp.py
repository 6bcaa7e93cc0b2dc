"""FSDP2: sharded parameters give what whole ones give, patched before or after."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.models import assert_close, build, tokens
from ranks import Rank
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytest.importorskip("transformers")


class Block(nn.Module):
    """Every module with parameters. A bias of one element is empty on all ranks but one."""

    def __init__(self, modules):
        super().__init__()
        self.norm = modules.RMSNorm(24)
        self.up = nn.Linear(24, 64)
        self.act = modules.FusedMulPolyNorm()
        self.add = modules.FusedAddRMSNorm(32)
        self.last = modules.FusedAddLayerNorm(32)

    def forward(self, x):
        x = self.act(self.up(self.norm(x)))
        x, residual = self.add(x, x.sin())
        return sum(self.last(x, residual))


def gradients_of_a_block(rank: Rank) -> None:
    """The mean over the ranks' batches of one gradient each."""
    whole = Block(rank.fuselage.modules).to(rank.device)
    for parameter in whole.parameters():  # ones and zeros would hide what is mixed up
        nn.init.normal_(parameter)
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=rank.mesh())
    bias = sharded.act.bias
    assert bias.shape == (1,) and bias.to_local().numel() == (rank.index == 0)
    batches = torch.randn(rank.count, 3, 5, 24).to(rank.device)
    out = sharded(batches[rank.index])
    out.square().mean().backward()
    expected = whole(batches)
    expected.square().mean().backward()
    torch.testing.assert_close(out, expected[rank.index])
    for (name, ours), theirs in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad, name, tol=1e-5)


def training_of_a_llama(rank: Rank, patched: str, half: bool, checkpoints: bool) -> None:
    """Loss and gradients, against the model in one process and the plain one that is sharded."""
    patch = rank.fuselage.integrations.transformers.patch
    plain = build("Llama").to(rank.device).train()
    models = {"plain": copy.deepcopy(plain), "patched": copy.deepcopy(plain)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, model in models.items():
        if name == "patched" and patched == "first":
            patch(model)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers:
            fully_shard(layer, mesh=rank.mesh(), **({"mp_policy": policy} if half else {}))
        fully_shard(model, mesh=rank.mesh(), **({"mp_policy": policy} if half else {}))
    report = patch(models["patched"])
    assert len(report.replaced) > 4
    batches = tokens(2 * rank.count, device=rank.device)
    mine = batches.chunk(rank.count)[rank.index]
    losses = {name: model(mine, labels=mine).loss for name, model in models.items()}
    for loss in losses.values():
        loss.backward()
    plain(batches, labels=batches).loss.backward()
    parameters = zip(
        plain.named_parameters(), *(model.parameters() for model in models.values()), strict=True
    )
    for (name, whole), theirs, ours in parameters:
        theirs, ours = theirs.grad.full_tensor(), ours.grad.full_tensor()
        if not half:
            assert_close(ours, whole.grad, name, tol=1e-4)
            continue
        scale = whole.grad.abs().max()
        error, of_plain = (((g - whole.grad) / scale).square().mean() for g in (ours, theirs))
        assert error <= 2 * of_plain + 1e-9, f"{name}: {error:.3g}, plain {of_plain:.3g}"


def test_gradients_of_modules(ranks):
    ranks.run(gradients_of_a_block)


@pytest.mark.parametrize(
    ("patched", "half", "checkpoints"),
    [("first", False, False), ("last", False, True), ("first", True, True), ("last", True, False)],
)
def test_training(ranks, patched, half, checkpoints):
    ranks.run(training_of_a_llama, patched, half, checkpoints)
