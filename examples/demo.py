#!/usr/bin/env python3
"""Runs a small Llama with fuselage's norms, and compares it and the operators with PyTorch's.

`make demo` builds the kernel first. The model has random weights: nothing is downloaded.
"""

import copy
import ctypes
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from kernels import Mode, get_local_kernel, kernelize, use_kernel_mapping
from rich.console import Console
from rich.table import Table

REPO = Path(__file__).resolve().parent.parent
MODELS = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
    "cuda": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16},
}
SHAPES = {
    "cpu": [(1024, 1024, "float32"), (2048, 4096, "float32"), (2048, 4096, "bfloat16")],
    "cuda": [(8192, 4096, "bfloat16"), (16384, 4096, "bfloat16"), (16384, 8192, "bfloat16")],
}
say = partial(print, flush=True)


def check(holds: bool, failure: str) -> None:
    if not holds:
        sys.exit(f"FAILED: {failure}")


def load():
    """The kernel that was built, and the device it runs on."""
    for device in ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]:
        try:
            # A CUDA build of Torch wants a CUDA variant unless it is told otherwise.
            return get_local_kernel(REPO, backend="cpu" if device == "cpu" else None), device
        except FileNotFoundError:
            continue
    sys.exit("FAILED: no kernel is built for this machine: make build")


def build_llama(device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = MODELS[device]["hidden_size"] // 64
    options = {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "vocab_size": 4096}
    # Weights large enough for the tokens to vary, and norms whose weight is not one.
    config = LlamaConfig(**MODELS[device], **options, initializer_range=0.05)
    model = LlamaForCausalLM(config).to(device).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def with_fuselage(model: torch.nn.Module, kernel) -> torch.nn.Module:
    """A copy of the model whose RMSNorm layers run fuselage's forward."""
    model = copy.deepcopy(model)
    norms = [m for m in model.modules() if getattr(m, "kernel_layer_name", None) == "RMSNorm"]
    device = "rocm" if model.device.type == "cuda" and torch.version.hip else model.device.type
    mapping = kernel.integrations.transformers.kernel_mapping()
    with use_kernel_mapping(mapping, inherit_mapping=False):
        for norm in norms:  # and nothing else: RoPE would change in the plain model, too
            kernelize(norm, mode=Mode.INFERENCE, device=device, use_fallback=False)
    replaced = sum(n.forward.__func__ is kernel.layers.RMSNorm.forward for n in norms)
    expected = 2 * model.config.num_hidden_layers + 1
    check(replaced == expected, f"{replaced} of {expected} RMSNorm layers were replaced")
    return model


@torch.no_grad()
def check_llama(kernel, device: str) -> None:
    """The same tokens in float32, and bfloat16 logits as good as those of the plain model."""
    say(f"building a Llama with random weights on {device}")
    plain = build_llama(device)
    say("replacing its RMSNorm layers through kernelize")
    fused = with_fuselage(plain, kernel)
    say("generating 2 x 32 tokens in float32, greedily, with the plain model and with fuselage")
    prompt = torch.randint(3, 4096, (2, 16), device=device)
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected, tokens = (model.generate(prompt, **options) for model in (plain, fused))
    check(torch.equal(tokens, expected), f"tokens {tokens}, but the plain model's are {expected}")
    say(f"  tokens are equal; {tokens[:, 16:].unique().numel()} different ones among them")
    exact = plain(tokens).logits
    error = ((fused(tokens).logits - exact).abs().max() / exact.abs().max()).item()
    say(f"  float32 logits differ by {error:.1e} of the largest")
    check(error <= 1e-4, "that is more than 1e-4")
    say("computing logits in bfloat16")
    half = copy.deepcopy(plain).bfloat16()
    plain.load_state_dict(half.state_dict())  # so that only the arithmetic differs
    exact = plain(tokens).logits
    logits = (model(tokens).logits for model in (half, with_fuselage(half, kernel)))
    before, after = ((bf16.float() - exact).square().mean().sqrt().item() for bf16 in logits)
    say(f"  RMS distance to float32: {after:.3e} with fuselage, {before:.3e} without")
    check(after <= 1.05 * before, "fuselage adds more than 5% to the error")


def torch_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def torch_add_norm(x, residual, weight):
    new_residual = x + residual
    return torch_norm(new_residual, weight), new_residual


def training(norm, x, grad_out, weight):
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = norm(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def results(call, inputs: list) -> tuple[torch.Tensor, ...]:
    found = call(*inputs)
    return found if isinstance(found, tuple) else (found,)


def microseconds(calls: tuple, inputs: list) -> list[float]:
    """The median time of each call, taken in turns so that all meet the same machine."""
    repeats, wait = (10, torch.cuda.synchronize) if inputs[0].is_cuda else (1, bool)
    rounds = [[] for _ in range(11)]
    for round, call in ((round, call) for round in rounds for call in calls):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call(*inputs)
        wait()
        round.append((time.perf_counter() - start) * 1e6 / repeats)
    return [statistics.median(column) for column in zip(*rounds)]


def compare(kernel, device: str) -> Table:
    """Checks every operator against float64, then times it beside PyTorch's."""
    where = f"{torch.get_num_threads()} CPU threads"
    if device == "cuda":
        where = torch.cuda.get_device_name()
    table = Table(
        *("operator", "shape", "F.rms_norm", "fuselage", "speed-up", "its error", "fuselage's"),
        title=f"PyTorch {torch.__version__} on {where}",
        caption="Median µs. Errors: the largest against float64, relative to the largest value.",
    )
    norms, add_norms = (torch_norm, kernel.rms_norm), (torch_add_norm, kernel.fused_add_rms_norm)
    operators = {
        "rms_norm": (norms, 1),
        "fused_add_rms_norm": (add_norms, 2),
        "rms_norm fwd+bwd": ([partial(training, norm) for norm in norms], 2),
    }
    for name, (calls, count) in operators.items():
        for rows, dim, dtype in SHAPES[device]:
            shape, dtype = f"({rows}, {dim}) {dtype}", getattr(torch, dtype)
            say(f"checking and timing {name} {shape}")
            sizes = [(rows, dim)] * count + [(dim,)]
            inputs = [torch.randn(size, device=device, dtype=dtype) for size in sizes]
            exact = results(calls[0], [t.double() for t in inputs])
            errors = [
                max(((a - e).abs().max() / e.abs().max()).item() for a, e in zip(found, exact))
                for found in (results(call, inputs) for call in calls)
            ]
            limit = errors[0] + torch.finfo(dtype).eps / 2
            check(errors[1] <= limit, f"the error is {errors[1]:.1e}, F.rms_norm's {errors[0]:.1e}")
            before, after = microseconds(calls, inputs)
            times = f"{before:10.0f}", f"{after:8.0f}", f"{before / after:7.1f}x"
            table.add_row(name, shape, *times, *(f"{error:9.1e}" for error in errors))
    return table


def main() -> None:
    torch.manual_seed(0)
    kernel, device = load()
    say(f"loaded {Path(kernel.__file__).parent.name}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is small: threads would mostly wait for each other
    check_llama(kernel, device)
    torch.set_num_threads(threads)
    if device == "cpu" and hasattr(ctypes.CDLL(None), "mallopt"):
        # Keep freed memory, for both: glibc would have large results zeroed anew for every call.
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    table = compare(kernel, device)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    main()
