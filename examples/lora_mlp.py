#!/usr/bin/env python3
"""A LoRA-adapted MLP whose two branches meet in `add_mul_act`, beside eager and `torch.compile`.

Each layer is `act(x W^T + bias + scale * (x A^T) B^T)` with W and bias frozen. The matrix products
are PyTorch's in all three; what differs is the rest: three element-wise kernels and two tensors in
between in eager mode, one kernel and none with fuselage. Run `make build` first.
"""

import argparse
import statistics
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F
from demo import check, load

SIZES = {"cpu": (256, 512, 1024), "cuda": (8192, 4096, 11008)}  # tokens, dim, intermediate
RANK, SCALE = 16, 2.0


def eager_join(base, bias, low_rank, activation):
    total = base + bias + SCALE * low_rank
    return F.silu(total) if activation == "silu" else total


def fused_join(kernel, base, bias, low_rank, activation):
    return kernel.add_mul_act(base, bias, low_rank, SCALE, activation)


class LoraLinear(torch.nn.Module):
    """A frozen linear layer and its low-rank adaptation, joined by `join`."""

    def __init__(self, inputs: int, outputs: int, activation: str, join):
        super().__init__()
        self.activation, self.join = activation, join
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5, False)
        self.bias = torch.nn.Parameter(torch.randn(outputs) * 0.1, False)
        self.a = torch.nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.b = torch.nn.Parameter(torch.randn(outputs, RANK) * 0.1 * RANK**-0.5)

    def forward(self, x):
        low_rank = F.linear(F.linear(x, self.a), self.b)
        return self.join(F.linear(x, self.weight), self.bias, low_rank, self.activation)


def build(dim: int, intermediate: int, join, device: str, dtype) -> torch.nn.Module:
    """The same weights whatever the join."""
    torch.manual_seed(0)
    layers = (
        LoraLinear(dim, intermediate, "silu", join),
        LoraLinear(intermediate, dim, "none", join),
    )
    return torch.nn.Sequential(*layers).to(device, dtype)


def training_step(model, x, grad_out) -> list[torch.Tensor]:
    adapters = [p for p in model.parameters() if p.requires_grad]
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out, adapters, grad_out)]


def relative_error(results, exact) -> float:
    return max(((r.double() - e).norm() / e.norm()).item() for r, e in zip(results, exact))


def milliseconds(call, repeats: int, wait) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--dim", type=int)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    kernel, device = load()
    sizes = (options.tokens, options.dim, options.intermediate)
    tokens, dim, intermediate = (own or default for own, default in zip(sizes, SIZES[device]))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    eager = build(dim, intermediate, eager_join, device, dtype)
    models = {"eager": eager}
    if not options.no_compile:
        models["torch.compile"] = torch.compile(build(dim, intermediate, eager_join, device, dtype))
    models["fuselage"] = build(dim, intermediate, partial(fused_join, kernel), device, dtype)

    x = torch.randn(tokens, dim, device=device, dtype=dtype)
    grad_out = torch.randn_like(x)
    exact_model = build(dim, intermediate, eager_join, device, dtype).double()
    exact = training_step(exact_model, x.double(), grad_out.double())
    print(f"LoRA MLP {tokens} x {dim} -> {intermediate} -> {dim}, rank {RANK}, {dtype} on {device}")
    print(f"{'':14}{'forward ms':>12}{'+ backward':>12}{'error':>12}")
    errors = {}
    for name, model in models.items():
        errors[name] = relative_error(training_step(model, x, grad_out), exact)
        with torch.no_grad():
            forward = milliseconds(partial(model, x), options.repeats, wait)
        step = partial(training_step, model, x, grad_out)
        both = milliseconds(step, options.repeats, wait)
        print(f"{name:14}{forward:12.3f}{both:12.3f}{errors[name]:12.2e}")
    # Of the output and of the adapters' gradients, norm over norm, against float64.
    limit = errors["eager"] * 1.1 + torch.finfo(dtype).eps / 2
    check(errors["fuselage"] <= limit, f"the error is more than eager's: {errors}")


if __name__ == "__main__":
    sys.exit(main())
