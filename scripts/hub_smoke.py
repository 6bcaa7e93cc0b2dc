# /// script
# requires-python = ">=3.10"
# dependencies = ["kernels", "numpy", "torch>=2.10"]
# ///
"""Loads fuselage from the Hub as a user does, and runs one function of each family.

Forward and backward, against PyTorch's formula in float64. Prints the variant that was taken.
Needs only torch and kernels, so that it runs on any machine; `hf jobs uv run` installs them.

    python scripts/hub_smoke.py --version 1
    LOCAL_KERNELS=fuselage-kernels/fuselage=. python scripts/hub_smoke.py --device cpu
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import get_kernel

# Of the largest value: eight float32 roundings, and one of the result.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repo", default="fuselage-kernels/fuselage")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: the GPU, if there is one"
    )
    return parser.parse_args(arguments)


def describe(kernel, device: str) -> str:
    """The variant that was loaded, and the machine."""
    folder = Path(kernel.__file__).parent
    backend = json.loads((folder / "metadata.json").read_text("utf-8"))["backend"]
    lines = [f"variant: {folder.name}", f"architectures: {', '.join(backend.get('archs') or '-')}"]
    name = platform.processor() or platform.machine()
    if device == "cuda":
        name = "{} ({}.{})".format(
            torch.cuda.get_device_name(), *torch.cuda.get_device_capability()
        )
    return "\n".join([*lines, f"torch: {torch.__version__}", f"device: {name}"])


def rms(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def poly(x, weight, bias):
    powers = [rms(x**power, 1.0) for power in (3, 2, 1)]
    return sum(w * p for w, p in zip(weight, powers)) + bias


def rotated(q, cos, sin):
    first, second = q.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def routed(logits):
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :4]
    weights = logits.softmax(-1).gather(-1, order)
    return weights / weights.sum(-1, keepdim=True)


def targets_of(logits):
    return torch.arange(len(logits), device=logits.device)


# The family, our function, the formula, and the shapes of what both take.
CASES = {
    "norm": (
        lambda k, x, w: k.rms_norm(x, w, eps=1e-6),
        rms,
        [(64, 1024), (1024,)],
    ),
    "ada_norm": (
        lambda k, x, scale, shift: k.ada_layer_norm(x, scale, shift, eps=1e-6),
        lambda x, scale, shift: F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift,
        [(2, 32, 1024), (2, 1, 1024), (2, 1, 1024)],
    ),
    "group_norm": (
        lambda k, x, w, b: k.group_norm(x, 8, w, b, activation="silu"),
        lambda x, w, b: F.silu(F.group_norm(x, 8, w, b)),
        [(2, 64, 16, 16), (64,), (64,)],
    ),
    "poly_norm": (
        lambda k, x, w, b: k.poly_norm(x, w, b, eps=1e-6),
        poly,
        [(64, 1024), (3,), (1,)],
    ),
    "gate": (
        lambda k, gate, up: k.swiglu(gate, up),
        lambda gate, up: F.silu(gate) * up,
        [(64, 1024), (64, 1024)],
    ),
    "rope": (
        lambda k, q, cos, sin: k.apply_rotary(q, None, cos.detach(), sin.detach(), rotary_dim=64),
        rotated,
        [(2, 16, 4, 64), (16, 32), (16, 32)],
    ),
    "route": (
        lambda k, x: k.topk_softmax(x, 4).weights.to(x.dtype),
        routed,
        [(64, 128)],
    ),
    "loss": (
        lambda k, x: k.cross_entropy(x, targets_of(x), reduction="none").to(x.dtype),
        lambda x: F.cross_entropy(x, targets_of(x), reduction="none"),
        [(64, 1000)],
    ),
    "linear_loss": (
        lambda k, x, w: k.linear_cross_entropy(x, w, targets_of(x), reduction="none").to(x.dtype),
        lambda x, w: F.cross_entropy(x @ w.T, targets_of(x), reduction="none"),
        [(64, 128), (1000, 128)],
    ),
}


def check(family: str, kernel, device: str, dtype: torch.dtype) -> None:
    """Raises AssertionError where forward or backward is not the formula's."""
    ours, formula, shapes = CASES[family]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, wanted = ours(kernel, *inputs), formula(*exact)
    grad = torch.randn(wanted.shape).to(device, dtype)
    out.backward(grad)
    wanted.backward(grad.double())
    pairs = {"result": (out, wanted)}
    for i, (x, reference) in enumerate(zip(inputs, exact)):
        if x.grad is not None:  # tables of rotary embedding have none
            pairs[f"gradient {i}"] = (x.grad, reference.grad)
    for what, (actual, reference) in pairs.items():
        error = (actual.double() - reference).abs().max() / reference.abs().max()
        assert error <= TOLERANCES[dtype], f"{family} {dtype}: {what} is off by {error:.2g}"


def check_sampling(kernel, device: str) -> None:
    """The token that is by far the most likely is drawn, from a head and from logits."""
    hidden = torch.eye(4, 64, device=device)
    weight = torch.zeros(128, 64, device=device)
    wanted = torch.tensor([5, 77, 0, 127], device=device)
    weight[wanted, torch.arange(4, device=device)] = 100.0
    tokens = kernel.lm_head_sample(hidden, weight, seed=1)
    assert torch.equal(tokens.flatten(), wanted), f"sampling: drew {tokens.flatten().tolist()}"
    tokens = kernel.gumbel_sample(hidden @ weight.T, seed=1)
    assert torch.equal(tokens.flatten(), wanted), f"sampling: drew {tokens.flatten().tolist()}"


def check_quantisation(kernel, device: str) -> None:
    """Values within the rounding of float8, and the product of a layer within a few of them."""
    x = torch.randn(16, 256, device=device)
    for group_size in (-1, 128):
        q, scale = kernel.quant_fp8(x, group_size=group_size)
        scale = scale if group_size == -1 else scale.repeat_interleave(128, -1)
        error = (q.float() * scale - x).abs() - (x.abs() / 16 + scale / 512)
        assert error.max() <= 0, f"quantisation: groups of {group_size} are off"
    linear = torch.nn.Linear(256, 64, device=device).requires_grad_(False)
    ours, exact = kernel.modules.Fp8Linear.from_linear(linear)(x), linear(x)
    error = ((ours - exact).norm() / exact.norm()).item()
    assert error < 0.1, f"quantisation: a product is off by {error:.2g}"


def check_fused_quantisation(kernel, device: str) -> None:
    """What operators quantise their result to: what quant_fp8 makes of it."""
    half = torch.randn(16, 256, device=device).bfloat16()
    weight = torch.randn(256, device=device)
    for q, scale, out in (
        kernel.rms_norm_quant(half, weight, return_unquantized=True),
        kernel.fused_add_rms_norm_quant(half, half, weight, return_unquantized=True)[:3],
        kernel.layer_norm_quant(half, weight, return_unquantized=True),
        kernel.ada_layer_norm_quant(half, weight, weight, return_unquantized=True),
        kernel.silu_and_mul_quant(half, return_unquantized=True),
        kernel.swiglu_quant(half, half, return_unquantized=True),
        kernel.gelu_tanh_quant(half, return_unquantized=True),
    ):
        wanted = kernel.quant_fp8(out)
        same = torch.equal(q.float(), wanted.q.float()) and torch.equal(scale, wanted.scale)
        assert same, "quantisation: not what quant_fp8 makes of the result"


def main(arguments: list[str] | None = None) -> int:
    """Runs every family, and returns 1 if one is wrong."""
    options = parse_arguments(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = "cpu" if device == "cpu" else None
    kernel = get_kernel(
        options.repo,
        version=options.version,
        backend=backend,
        trust_remote_code=options.trust_remote_code,
    )
    print(describe(kernel, device), flush=True)
    failures = 0
    checks = {family: list(TOLERANCES) for family in CASES}
    others = {
        "sampling": check_sampling,
        "quant": check_quantisation,
        "fused_quant": check_fused_quantisation,
    }
    for family, dtypes in {**checks, **dict.fromkeys(others, ())}.items():
        try:
            for dtype in dtypes:
                check(family, kernel, device, dtype)
            if family in others:
                others[family](kernel, device)
            print(f"{family}: ok", flush=True)
        except (AssertionError, RuntimeError) as error:
            failures += 1
            print(f"{family}: FAILED: {error}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
