#!/usr/bin/env python3
"""Trains a Llama on several GPUs: tensor and sequence parallel, with fuselage's operators.

`make build` first. The weights and the text are random: nothing is downloaded. Without a GPU for
each process it runs small, over Gloo.

    torchrun --nproc-per-node 2 examples/train_sequence_parallel.py
    torchrun --nproc-per-node 8 examples/train_sequence_parallel.py --layers 32 --hidden 4096
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from demo import check, load
from torch.distributed.tensor.parallel import loss_parallel

SMALL = {"layers": 2, "hidden": 128, "tokens": 64, "vocab": 500}
LARGE = {"layers": 16, "hidden": 2048, "tokens": 4096, "vocab": 32000}


def parse_arguments(device: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (LARGE if device == "cuda" else SMALL).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def build_llama(options: argparse.Namespace, device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(options.hidden // 128, 8)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        use_cache=False,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LlamaForCausalLM(config).to(device, dtype)


def clip(model: torch.nn.Module, limit: float) -> torch.Tensor:
    """Scales the gradients down to a norm of `limit`; returns what it was.

    Those of norms are partial sums, summed first: PyTorch does not scale such before 2.12.
    """
    for p in model.parameters():
        if p.grad is not None and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit).full_tensor()


def train(model: torch.nn.Module, options: argparse.Namespace, device: str) -> list[float]:
    """The loss before each step, on the same random text."""
    generator = torch.Generator().manual_seed(0)  # all ranks read the same tokens
    shape = (options.batch, options.tokens)
    ids = torch.randint(options.vocab, shape, generator=generator).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(options.steps):
        start = time.perf_counter()
        with loss_parallel():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        norm = clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().item())
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - start
            print(f"step {step}: loss {losses[-1]:.4f}, gradient {norm:.2f}, {seconds:.2f} s")
    return losses


def main() -> None:
    kernel, device = load()
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        device = "cpu"
    options = parse_arguments(device)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = build_llama(options, device)
    kernel.distributed.parallelize_llama(model, mesh)
    report = kernel.integrations.transformers.patch(model)
    if dist.get_rank() == 0:
        own = sum(p.to_local().numel() for p in model.parameters())
        print(report)
        print(f"{own / 1e6:.1f} million parameters on each of {mesh.size()} ranks")
    losses = train(model, options, device)
    dist.barrier()  # a rank that leaves first takes its connections with it
    dist.destroy_process_group()
    check(losses[-1] < losses[0], f"the loss does not fall: {losses}")
    # DTensor's caches keep Gloo's threads alive, and Python's end may abort such a process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
