#!/usr/bin/env python3
"""A small Llama whose linears are float8: what `patch(model, linear="fp8")` changes, and undoes.

On a GPU of compute capability 8.9 or later the products are float8; elsewhere they are emulated, to
try what float8 does to a model. Weights are random: nothing is downloaded. Run `make build` first;
needs transformers.
"""

import argparse
import statistics
import sys
import time

import torch
from demo import check, load

SIZES = {"cpu": (2, 128, 64), "cuda": (8, 4096, 4096)}  # layers, hidden size, tokens


def build(layers: int, hidden: int, device: str, dtype: torch.dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 128),
        num_key_value_heads=max(1, hidden // 512),
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # a few rows are larger, as in trained models
                parameter.mul_(1 + 4 * (torch.rand(len(parameter), 1) > 0.98))
    return model.eval().to(device, dtype)


def relative_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return ((logits.double() - exact).norm() / exact.norm()).item()


def milliseconds(call, repeats: int, device: str) -> float:
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def megabytes(model) -> float:
    """Of the blocks, whose linears change."""
    tensors = [*model.model.layers.parameters(), *model.model.layers.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors) / 1e6


def show_one_tensor(kernel, device: str) -> None:
    """`quant_fp8` and `Fp8Linear` by themselves."""
    x = torch.randn(4, 256, device=device, dtype=torch.bfloat16)
    q, scale = kernel.quant_fp8(x)
    print(f"quant_fp8: {q.dtype} {list(q.shape)}, scales {list(scale.shape)}")
    linear = torch.nn.Linear(256, 512, device=device, dtype=torch.bfloat16)
    fp8 = kernel.modules.Fp8Linear.from_linear(linear)
    with torch.no_grad():
        check(torch.equal(fp8(x), fp8((q, scale))), "x and its (q, scale) differ")
        error = relative_error(fp8(x), linear(x).double())
    print(f"Fp8Linear: {error:.1%} from the linear in bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recipe", choices=("fp8", "fp8_blockwise"), default="fp8")
    parser.add_argument("--keep", action="append", default=[], help="linears that stay")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    kernel, device = load()
    given = (options.layers, options.hidden, options.tokens)
    layers, hidden, tokens = (own or default for own, default in zip(given, SIZES[device]))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    show_one_tensor(kernel, device)

    model = build(layers, hidden, device, dtype)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
    integration = kernel.integrations.transformers

    @torch.no_grad()
    def measure(name: str) -> torch.Tensor:
        logits = model(input_ids=ids).logits
        call = torch.compile(model, fullgraph=True) if options.compile else model
        time = milliseconds(lambda: call(input_ids=ids), options.repeats, device)
        torch.compiler.reset()
        print(f"{name:14}{time:10.2f} ms{megabytes(model):12.1f} MB of blocks")
        return logits

    plain = measure("plain")
    integration.patch(model)
    measure("fuselage")
    report = integration.patch(model, linear=options.recipe, keep=options.keep)
    patched = measure(options.recipe)
    print(report)
    error = relative_error(patched, plain.double())
    agree = (patched.argmax(-1) == plain.argmax(-1)).float().mean().item()
    print(f"logits differ by {error:.1%}; {agree:.0%} of the likeliest tokens are the same")
    check(0 < error < 0.5, "that is more than float8 rounds")
    integration.unpatch(model)
    with torch.no_grad():
        check(torch.equal(model(input_ids=ids).logits, plain), "unpatch left something")
    print("undone: the same bits as before")


if __name__ == "__main__":
    sys.exit(main())
