"""FSDP2: sharded parameters give what whole ones give, patched before or after."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.models import assert_close, build, tokens
from ranks import Rank
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

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


class LoraBlock(nn.Module):
    """A frozen linear and norms, as sharded, and what adapts the linear."""

    def __init__(self, fuselage):
        super().__init__()
        self.join = fuselage.add_mul_act
        self.add = fuselage.modules.FusedAddRMSNorm(24)
        self.base = nn.Linear(24, 32)
        self.a, self.b = nn.Parameter(torch.randn(4, 24)), nn.Parameter(torch.randn(32, 4))
        self.bias = nn.Parameter(torch.randn(32))
        self.last = fuselage.modules.RMSNorm(32)

    def adapters(self) -> list[nn.Parameter]:
        return [self.a, self.b]

    def forward(self, x):
        x, residual = self.add(x, x.sin())
        low_rank = nn.functional.linear(nn.functional.linear(residual, self.a), self.b)
        joined = self.join(self.base(x), self.bias, low_rank, 2.0, "silu")
        return self.last(joined)


def adapters_of_a_frozen_linear(rank: Rank, sharded: bool) -> None:
    """As PEFT has them: sharded with the block, or plain beside sharded weights."""
    whole = LoraBlock(rank.fuselage).to(rank.device)
    for parameter in whole.parameters():
        nn.init.normal_(parameter.requires_grad_(False))
    for parameter in whole.adapters():
        parameter.requires_grad_()
    block = copy.deepcopy(whole)
    fully_shard(block.base, mesh=rank.mesh())
    plain = set() if sharded else {*block.adapters()}
    fully_shard(block, mesh=rank.mesh(), ignored_params=plain)
    assert all(isinstance(p, DTensor) == sharded for p in block.adapters())
    batches = torch.randn(rank.count, 3, 5, 24).to(rank.device)
    out = block(batches[rank.index])
    out.square().mean().backward()
    expected = whole(batches)
    expected.square().mean().backward()
    assert_close(out.detach(), expected[rank.index].detach(), "out")
    for ours, theirs in zip(block.adapters(), whole.adapters(), strict=True):
        grad = ours.grad.full_tensor() if sharded else mean(rank, ours.grad)
        assert_close(grad, theirs.grad, "gradient", tol=1e-5)
    frozen = [p for p in block.parameters() if not p.requires_grad]
    assert len(frozen) == 5 and all(p.grad is None and isinstance(p, DTensor) for p in frozen)
    # What a sharded module has is a DTensor outside of its forward.
    plain_rows = torch.randn(3, 32, device=rank.device)
    with pytest.raises(RuntimeError, match="bias_act: `x` is a plain tensor beside `bias`"):
        rank.fuselage.bias_act(plain_rows, block.base.bias, activation="silu")


def mean(rank: Rank, t: torch.Tensor) -> torch.Tensor:
    """Over the ranks."""
    t = t.detach()[None]
    return DTensor.from_local(t, rank.mesh(), [Shard(0)]).full_tensor().mean(0)


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
    whole_loss = plain(batches, labels=batches).loss
    whole_loss.backward()
    assert_close(
        mean(rank, losses["patched"]), whole_loss.detach(), "loss", 2**-8 if half else 1e-5
    )
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


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
def test_adapters(ranks, sharded):
    ranks.run(adapters_of_a_frozen_linear, sharded)


@pytest.mark.long
@pytest.mark.parametrize(
    ("patched", "half", "checkpoints"),
    [("first", False, False), ("last", False, True), ("first", True, True), ("last", True, False)],
)
def test_training(ranks, patched, half, checkpoints):
    ranks.run(training_of_a_llama, patched, half, checkpoints)
