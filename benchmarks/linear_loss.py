"""`python -m benchmarks.linear_loss`: the loss of a language-model head, from hidden to gradients.

fuselage's losses against PyTorch's with the logits in memory, and Liger's fused one. Each is
verified against float32, then timed by turns; memory is what a call takes beside its inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from .end_to_end import measure
from .end_to_end.cli import relative_error
from .roofline import results
from .roofline.contenders import compiled, load_fuselage

# Rows, dim, vocabulary: Qwen3-8B's head, and a small one.
SHAPES = ((8192, 4096, 151936), (512, 2048, 32000))
QUICK = ((16, 32, 300),)
ROUNDS = 2
# RMS difference of gradients, relative: bfloat16 has 8 bits, and what is rounded twice loses more.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Also with a weight that needs no gradient, as of a head beside adapters.
FROZEN = ", frozen weight"
FROZEN_TOO = ("linear_cross_entropy", "PyTorch", "torch.compile", "Liger")

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_loss", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a small head, in float32: a test of the benchmark")
    add("--runs", type=int, default=5, help="timed in each of two rounds")
    add("--output", type=Path, help="the results file; default: benchmarks/results/linear_loss_...")
    return parser.parse_args(arguments)


def naive(hidden, weight, targets) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def losses(fuselage, device: str) -> dict[str, Loss]:
    """What is compared, by name."""

    def log_probs(hidden, weight, targets) -> torch.Tensor:
        return -fuselage.linear_log_probs(hidden, weight, targets).log_probs.mean()

    found = {
        "linear_cross_entropy": fuselage.linear_cross_entropy,
        "linear_cross_entropy, 2 GiB": partial(
            fuselage.linear_cross_entropy, max_workspace=2 << 30
        ),
        "linear_cross_entropy, 4 GiB": partial(
            fuselage.linear_cross_entropy, max_workspace=4 << 30
        ),
        "linear_log_probs": log_probs,
        "PyTorch": naive,
    }
    if device == "cuda":
        found["torch.compile"] = compiled(naive)
        try:
            from liger_kernel.ops.fused_linear_cross_entropy import (
                LigerFusedLinearCrossEntropyFunction,
            )
        except ImportError:
            return found

        def liger(hidden, weight, targets) -> torch.Tensor:
            loss = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets)
            return loss[0] if isinstance(loss, tuple) else loss

        found["Liger"] = liger
    return found


def extra_memory(run: Callable[[], object], device: str) -> float | None:
    """GiB beyond what was there before."""
    if device != "cuda":
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() / 2**30
    return measure.peak_memory(run, device) - before


def run_shape(fuselage, device: str, shape: tuple[int, int, int], options) -> dict:
    rows, dim, vocab = shape
    dtype = torch.float32 if options.quick else torch.bfloat16
    torch.manual_seed(0)
    hidden = torch.randn(rows, dim, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, device=device, dtype=dtype) * dim**-0.5
    weight.requires_grad_()
    targets = torch.randint(vocab, (rows,), device=device)
    head = {True: (hidden, weight), False: (hidden, weight.detach())}
    found = {name: (loss, True) for name, loss in losses(fuselage, device).items()}
    found |= {name + FROZEN: (found[name][0], False) for name in FROZEN_TOO if name in found}

    def gradients(name: str) -> tuple[torch.Tensor, ...]:
        loss, of_weight = found[name]
        wanted = (hidden, weight) if of_weight else (hidden,)
        return torch.autograd.grad(loss(*head[of_weight], targets), wanted)

    wide = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    exact = torch.autograd.grad(naive(*wide, targets), wide)
    columns = {}
    for name in found:
        ours = gradients(name)
        error = max(relative_error(a.float(), e) for a, e in zip(ours, exact, strict=False))
        if not error <= LIMITS[dtype]:
            raise SystemExit(f"FAILED: gradients of {name} differ by {error:.1e}")
        gib = sum(t.numel() * t.element_size() for t in ours) / 2**30
        columns[name] = {"error": error, "gradients_gib": gib, "forward": [], "both": []}
        del ours

    def forward(name: str) -> None:
        with torch.no_grad():
            found[name][0](hidden, weight, targets)

    del wide, exact
    for name in measure.by_turns(tuple(found), ROUNDS):
        for kind, run in (("forward", forward), ("both", gradients)):
            run_it = partial(run, name)
            columns[name][kind] += measure.times(run_it, device, 0.0, options.runs)
    for name, column in columns.items():
        column["milliseconds"] = {
            kind: measure.summary(column.pop(kind)) for kind in ("forward", "both")
        }
        column["extra_gib"] = extra_memory(partial(gradients, name), device)
    return {"sizes": shape, "columns": columns}


def table(cases: dict[str, dict]) -> str:
    """In Markdown."""
    head = ("", "forward, ms", "forward and backward, ms", "memory beside gradients, GiB")
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for case, record in cases.items():
        for name, column in record["columns"].items():
            times = column["milliseconds"]
            extra = column["extra_gib"]
            gradients = column.get("gradients_gib") or record["gradients_gib"]  # older results
            memory = "-" if extra is None else f"{max(extra - gradients, 0):.2f}"
            lines.append(
                f"| {case}: {name} | {times['forward']['median']:.2f} | "
                f"{times['both']['median']:.2f} | {memory} |"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        print("on a CPU only --quick is feasible", file=sys.stderr)
        return 2
    fuselage = load_fuselage(device)
    cases = {}
    for shape in QUICK if options.quick else SHAPES:
        cases["x".join(map(str, shape))] = run_shape(fuselage, device, shape, options)
        print(table(cases), flush=True)
    if not options.quick or options.output:
        path = options.output or results.FOLDER / f"linear_loss_{results.slug(device)}.json"
        results.add(path, cases, fuselage, device, "liger-kernel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
