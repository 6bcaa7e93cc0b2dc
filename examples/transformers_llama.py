#!/usr/bin/env python3
"""A Llama of transformers with fuselage: checks logits, trains it, and times a forward.

`make build` first. The weights are random: nothing is downloaded. `--patch` replaces every layer by
what it computes; without it, `kernels.kernelize` replaces the layers that the model has names for.

    python examples/transformers_llama.py --patch
    python examples/transformers_llama.py --layers 2 --hidden 64 --tokens 32 --no-compile
"""

import argparse
import copy
import logging
import statistics
import time

import torch
from demo import check, load
from kernels import KernelizeFallback, Mode, kernelize, use_kernel_mapping


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10, help="of training")
    parser.add_argument("--repeats", type=int, default=7, help="of each measurement")
    parser.add_argument("--patch", action="store_true", help="patch() instead of kernelize()")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def build_llama(options: argparse.Namespace, device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(options.hidden // 64, 2)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
    )
    return LlamaForCausalLM(config).to(device).eval()


def with_fuselage(model: torch.nn.Module, kernel, options: argparse.Namespace) -> torch.nn.Module:
    """The model, which has fuselage's layers from now on.

    Not a copy: a deep copy has its own entry for the rotary embedding, which it does not call.
    """
    integration = kernel.integrations.transformers
    if options.patch:
        print(integration.patch(model))
        return model
    device = "rocm" if model.device.type == "cuda" and torch.version.hip else model.device.type
    logging.getLogger("kernels").setLevel(logging.ERROR)  # names each layer it has no kernel for
    with use_kernel_mapping(integration.kernel_mapping(), inherit_mapping=False):
        return kernelize(
            model,
            mode=Mode.TRAINING | Mode.TORCH_COMPILE,  # the layers are the same in every mode
            device=device,
            use_fallback=KernelizeFallback.NO_LAYER,
        )


def train(model: torch.nn.Module, ids: torch.Tensor, steps: int) -> list[float]:
    """The loss before each step. The model itself stays as it is."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def milliseconds(name: str, model, ids: torch.Tensor, options) -> dict[str, float]:
    """The median time of a forward of the model, and of the model compiled."""
    calls = {name: model}
    if not options.no_compile:
        calls[f"{name}, compiled"] = torch.compile(model)
    wait = torch.cuda.synchronize if ids.is_cuda else bool
    medians = {}
    for name, call in calls.items():
        call(input_ids=ids)  # compiles
        times = []
        for _ in range(options.repeats):
            wait()
            start = time.perf_counter()
            call(input_ids=ids)
            wait()
            times.append((time.perf_counter() - start) * 1e3)
        medians[name] = statistics.median(times)
    return medians


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    kernel, device = load()
    plain = build_llama(options, device)
    ids = torch.randint(0, 2048, (2, options.tokens), device=device)
    # All of the plain model first: kernelize replaces the rotary embedding of all Llamas at once.
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
    losses = train(plain, ids, options.steps)
    times = milliseconds("eager", plain, ids, options)
    fused = with_fuselage(plain, kernel, options)
    with torch.no_grad():
        error = (fused(input_ids=ids).logits - expected).abs().max() / expected.abs().max()
    print(f"logits differ by {error:.1e} of the largest")
    check(error <= 1e-4, "that is more than 1e-4")
    ours = train(fused, ids, options.steps)
    print(f"loss after {options.steps} steps: {losses[-1]:.4f}, with fuselage {ours[-1]:.4f}")
    worst = max(abs(a - b) / b for a, b in zip(ours, losses))
    check(worst <= 1e-2, f"the losses differ by up to {worst:.1e}")
    times |= milliseconds("fuselage", fused, ids, options)
    for name, value in times.items():
        print(f"{name:20} {value:8.1f} ms")


if __name__ == "__main__":
    main()
