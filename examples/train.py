#!/usr/bin/env python3
"""Trains a small language model whose loss never has the logits in memory.

`make build` first. The text is made here: sums of two numbers, so that there is something to learn.
Norms, rotary embedding, gates and the loss are fuselage's, forward and backward; the rest is
PyTorch's. Takes less than a minute on a CPU.

    python examples/train.py
    python examples/train.py --steps 300 --dim 256
"""

import argparse
import time

import torch
import torch.nn.functional as F
from demo import check, load
from torch import nn

CHARACTERS = "0123456789+= "


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    return parser.parse_args()


def lines_of_text(count: int, device: str) -> torch.Tensor:
    """Tokens `[count, 12]` of lines as `12+34=046  `."""
    numbers = torch.randint(100, (count, 2)).tolist()
    lines = (f"{a:02}+{b:02}={a + b:03}   "[:12] for a, b in numbers)
    return torch.tensor([[CHARACTERS.index(c) for c in line] for line in lines], device=device)


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm that adds what came before it."""

    def __init__(self, kernel, dim: int, heads: int):
        super().__init__()
        self.kernel, self.heads = kernel, heads
        self.attention_norm = kernel.modules.FusedAddRMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = kernel.modules.FusedAddRMSNorm(dim)
        self.gate_up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x, residual, cos, sin):
        x, residual = self.attention_norm(x, residual)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        q, k = self.kernel.apply_rotary(q, k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(attended.transpose(1, 2).reshape(x.shape))
        x, residual = self.mlp_norm(x, residual)
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.kernel.swiglu(gate, up)), residual


class Model(nn.Module):
    """A small Llama. Its forward ends before the head, which the loss takes as it is."""

    def __init__(self, kernel, vocab: int, dim: int, layers: int, most_tokens: int = 64):
        super().__init__()
        heads = dim // 32
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(kernel, dim, heads) for _ in range(layers))
        self.norm = kernel.modules.FusedAddRMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, 32, 2) / 32)
        angles = torch.outer(torch.arange(most_tokens), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states `[batch, tokens, dim]`, for the head."""
        count = tokens.shape[1]
        residual = self.embedding(tokens)
        x = torch.zeros_like(residual)
        for block in self.blocks:
            x, residual = block(x, residual, self.cos[:count], self.sin[:count])
        return self.norm(x, residual)[0]


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    kernel, device = load()
    model = Model(kernel, len(CHARACTERS), options.dim, options.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, started = None, time.perf_counter()
    for step in range(options.steps):
        tokens = lines_of_text(options.batch, device)
        hidden = model(tokens[:, :-1])
        loss = kernel.linear_cross_entropy(hidden, model.head.weight, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
        if step % 25 == 0 or step == options.steps - 1:
            print(f"step {step:4}: loss {loss.item():.3f}", flush=True)
    print(f"{options.steps} steps in {time.perf_counter() - started:.1f} s on {device}")
    check(loss.item() < 0.8 * first, f"the loss went from {first:.3f} to {loss.item():.3f}")
    with torch.no_grad():
        plain = F.cross_entropy(model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        again = kernel.linear_cross_entropy(hidden, model.head.weight, tokens[:, 1:])
    check(abs(plain - again) < 1e-4, f"the loss is {again:.6f}, PyTorch's is {plain:.6f}")
    print("the loss is PyTorch's, and it fell")


if __name__ == "__main__":
    main()
