#!/usr/bin/env python3
"""A small DLRM trained with and without fuselage's epilogues: the same losses.

Criteo-shaped data is generated: 13 dense features, 26 categorical ones, and a click that depends on
both. Dense features go through an MLP, categorical ones through embedding bags; pairwise products
of the results and a second MLP predict the click. In PyTorch the activation's gradient is one
kernel, and the bias's another that reads it again; `bias_act` has both in one. Run `make build`
first.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", 2019.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from demo import check, load
from torch.profiler import ProfilerActivity, profile

DENSE, CATEGORICAL = 13, 26
LOSS_TOLERANCE = 5e-3  # a quarter of what one batch's loss differs from the next one's
EAGER = {"relu": F.relu, "sigmoid": torch.sigmoid}


def eager_layer(x, weight, bias, activation):
    return EAGER[activation](F.linear(x, weight, bias))


def fused_layer(kernel, x, weight, bias, activation):
    return kernel.bias_act(F.linear(x, weight), bias, activation)


class Mlp(torch.nn.Module):
    def __init__(self, sizes: list[int], last: str, layer):
        super().__init__()
        self.linears = torch.nn.ModuleList(map(torch.nn.Linear, sizes[:-1], sizes[1:]))
        self.activations = ["relu"] * (len(sizes) - 2) + [last]
        self.layer = layer

    def forward(self, x):
        for linear, activation in zip(self.linears, self.activations):
            x = self.layer(x, linear.weight, linear.bias, activation)
        return x


class Dlrm(torch.nn.Module):
    def __init__(self, categories: int, dim: int, width: int, layer):
        super().__init__()
        self.bottom = Mlp([DENSE, width, width // 2, dim], "relu", layer)
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(categories, dim, mode="sum") for _ in range(CATEGORICAL)
        )
        for bag in self.bags:
            torch.nn.init.uniform_(bag.weight, -(categories**-0.5), categories**-0.5)
        vectors = CATEGORICAL + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.top = Mlp([dim + self.pairs.shape[1], width, width // 2, 1], "sigmoid", layer)

    def forward(self, dense, categorical):
        bottom = self.bottom(dense)
        bags = [bag(categorical[:, i]) for i, bag in enumerate(self.bags)]  # [batch, hots] each
        vectors = torch.stack([bottom, *bags], 1)
        products = vectors @ vectors.transpose(1, 2)
        interaction = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, interaction], 1)).squeeze(1)


class Clicks:
    """Criteo-shaped batches: log-normal counts, two categories a feature, some more popular."""

    def __init__(self, categories: int, batch: int, device: str):
        self.generator = torch.Generator(device).manual_seed(1)
        self.random = partial(torch.rand, generator=self.generator, device=device)
        self.categories, self.batch = categories, batch
        self.taste = 2 * self.random(CATEGORICAL, categories) - 1
        self.slope = 2 * self.random(DENSE) - 1

    def __iter__(self):
        return self

    def __next__(self):
        normal = torch.erfinv((2 * self.random(self.batch, DENSE) - 1).clamp(-0.999, 0.999))
        dense = torch.log1p(normal.exp())
        popular = self.random(self.batch, CATEGORICAL, 2).square()
        categorical = (popular * self.categories).long()
        tastes = torch.stack([t[c] for t, c in zip(self.taste, categorical.unbind(1))], 1)
        score = 4 * (dense - 0.7) @ self.slope + 0.5 * tastes.sum((1, 2))
        return dense, categorical, (self.random(self.batch) < score.sigmoid()).float()


def train(layer, options, device: str) -> tuple[list[float], float, str]:
    """The losses, the seconds of a step, and the profiler's table of forward and backward."""
    torch.manual_seed(0)
    model = Dlrm(options.categories, options.dim, options.width, layer).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, eps=1e-3)
    clicks = Clicks(options.categories, options.batch, device)

    def step(dense, categorical, clicked):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy(model(dense, categorical), clicked)
        loss.backward()
        return loss.detach()

    losses = []
    start = time.perf_counter()
    for _ in range(options.steps):
        losses.append(step(*next(clicks)))
        optimizer.step()
    losses = torch.stack(losses).tolist()
    seconds = (time.perf_counter() - start) / options.steps
    batch = next(clicks)
    on_gpu = [ProfilerActivity.CUDA] if device == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiled:
        for _ in range(3):
            step(*batch)
    key = f"self_{device}_time_total"
    return losses, seconds, profiled.key_averages().table(sort_by=key, row_limit=options.rows)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, losses), style in zip(curves.items(), ("-", "--")):
        axes.plot(losses, style, label=name)
    axes.set(xlabel="step", ylabel="binary cross entropy", title="DLRM on generated clicks")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    kernel, device = load()
    small = device == "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256 if small else 2048)
    parser.add_argument("--width", type=int, default=128 if small else 512)
    parser.add_argument("--dim", type=int, default=16 if small else 64)
    parser.add_argument("--categories", type=int, default=200 if small else 10000)
    parser.add_argument("--rows", type=int, default=15, help="of the profiler's table")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--png", type=Path, default=Path("dlrm.png"), help="where to draw the losses"
    )
    options = parser.parse_args()
    layers = {"PyTorch": eager_layer, "fuselage": partial(fused_layer, kernel)}
    curves = {}
    for name, layer in layers.items():
        curves[name], seconds, table = train(layer, options, device)
        first, last = curves[name][0], sum(curves[name][-20:]) / len(curves[name][-20:])
        print(f"{name} on {device}: loss {first:.4f} -> {last:.4f}, {seconds * 1e3:.2f} ms a step")
        print(table)
    draw(curves, options.png)
    # Two float32 programs, of which neither is the exact one: training makes their noise grow.
    apart = max(abs(a - b) for a, b in zip(*curves.values()))
    print(f"losses are at most {apart:.1e} apart; drawn to {options.png}")
    check(apart <= LOSS_TOLERANCE, f"that is more than {LOSS_TOLERANCE}")


if __name__ == "__main__":
    main()
