"""`python -m benchmarks.fp8_accuracy`: what float8 linears cost whole models in accuracy.

Models of few layers in the shapes of the other benchmarks. Their weights are random, but spread as
those of trained models are: rows and columns of different sizes, a few columns of the hidden state
that are 20 times as large (the outliers that LLM.int8() found, arXiv:2208.07339), and a few rows of
gates, up and value projections that are 5 times as large, which gives products of both outliers.

The float32 model of the same weights is the reference. Compared are the model in bfloat16, both
recipes of `patch(model, linear=...)`, and torchao's rowwise dynamic one for the same linears:

- error: RMS difference of the logits of a prefill, over the RMS of the logits;
- likeliest: positions of the prefill whose likeliest token is the same;
- greedy: tokens of greedy continuations that are the same, up to the first that differs.

One draw of weights says little of small differences: an error is made by few outliers. So small
models are drawn many times, too, and errors of both rowwise recipes compared draw by draw.

On a CPU all float8 products are emulated, torchao's by PyTorch's `_scaled_mm`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean, stdev

import torch

from .end_to_end.cli import relative_error
from .end_to_end.peers import TORCHAO, is_installed, quantised_by_torchao
from .end_to_end.scenarios import causal_model
from .roofline import results
from .roofline.contenders import load_fuselage

KINDS = ("Llama", "Qwen3", "Gemma3")
SMALL = "small "  # before a kind's name in the results: alone it is that of the large shape
RECIPES = {"rowwise": "fp8", "blockwise": "fp8_blockwise"}  # of fuselage, and patch's option
ROWWISE_OF_TORCHAO = "torchao, rowwise"
OUTLIER_COLUMNS, LARGER_COLUMN = 6, 20.0
OUTLIER_ROWS, LARGER_ROW = 0.002, 5.0
SPREAD = 0.3  # of the logarithms of rows' and columns' sizes
OF_PRODUCTS = ("gate_proj", "up_proj", "v_proj")  # what their results are multiplied to


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_accuracy", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="small models alone")
    add("--only", choices=KINDS, action="append", help="some of the models")
    add("--layers", type=int, default=2)
    add("--draws", type=int, default=16, help="of the weights of small models")
    add("--tokens", type=int, default=256, help="of the prefill")
    add("--prompts", type=int, default=8, help="that are continued")
    add("--new-tokens", type=int, default=16, help="of each continuation")
    add("--output", type=Path, help="default: benchmarks/results/fp8_accuracy_...")
    return parser.parse_args(arguments)


@torch.no_grad()
def spread_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """As those of trained models, from the same factors on every device."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size

    def factors(size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * SPREAD).exp()

    outliers = torch.randperm(hidden, generator=generator)[:OUTLIER_COLUMNS]
    for name, weight in model.model.layers.named_parameters():
        rows = factors(len(weight))
        if weight.dim() == 1:
            if len(weight) == hidden:
                rows[outliers] *= LARGER_COLUMN
            # Gemma's weights are added to one.
            weight.copy_(rows - 1 if weight.count_nonzero() == 0 else rows)
            continue
        if name.split(".")[-2] in OF_PRODUCTS:
            larger = torch.rand(len(rows), generator=generator) < OUTLIER_ROWS
            rows[larger] *= LARGER_ROW
        columns = factors(weight.shape[1])
        weight.mul_((rows[:, None] * columns).to(weight))


class Answers:
    """What a model says to the same inputs."""

    def __init__(self, model: torch.nn.Module, options: argparse.Namespace):
        device, vocab = model.device, model.config.vocab_size
        generator = torch.Generator().manual_seed(1)
        sizes = (1, options.tokens), (options.prompts, max(1, options.tokens // 16))
        ids, prompts = (torch.randint(vocab, size, generator=generator) for size in sizes)
        with torch.no_grad():
            self.logits = model(input_ids=ids.to(device)).logits.float()
            self.continued = model.generate(
                prompts.to(device),
                do_sample=False,
                use_cache=True,
                min_new_tokens=options.new_tokens,
                max_new_tokens=options.new_tokens,
                pad_token_id=0,
            )[:, prompts.shape[1] :]

    def compared(self, exact: Answers) -> dict[str, float]:
        same = (self.continued == exact.continued).int().cumprod(-1)
        return {
            "error": relative_error(self.logits, exact.logits),
            "likeliest": (self.logits.argmax(-1) == exact.logits.argmax(-1)).float().mean().item(),
            "greedy": same.float().mean().item(),
        }


def run_model(
    fuselage, device: str, kind: str, small: bool, options: argparse.Namespace, seed: int = 0
) -> dict:
    torch.manual_seed(seed)
    model, title, notes = causal_model(device, small, options.layers, False, kind=kind)
    spread_weights(model.bfloat16(), seed)
    exact = Answers(model.float(), options)
    model.bfloat16()  # the same numbers: they were bfloat16 before
    integration = fuselage.integrations.transformers
    columns = {"bfloat16": Answers(model, options).compared(exact)}
    names: set[str] = set()
    for recipe, linear in RECIPES.items():
        integration.patch(model, linear=linear)
        linears = fuselage.modules.Fp8Linear
        names |= {name for name, m in model.named_modules() if isinstance(m, linears)}
        columns[recipe] = Answers(model, options).compared(exact)
        integration.unpatch(model)
    if is_installed(TORCHAO):
        quantised = quantised_by_torchao(model, names)
        columns[ROWWISE_OF_TORCHAO] = Answers(quantised, options).compared(exact)
    notes += [f"{options.tokens} tokens", f"{options.prompts} of {options.new_tokens} new tokens"]
    return {"title": title, "notes": notes, "linears": len(names), "columns": columns}


def run_draws(fuselage, device: str, kind: str, options: argparse.Namespace) -> dict:
    """Means over draws of a small model, and the mean and noise of errors over torchao's."""
    draws = [
        run_model(fuselage, device, kind, True, options, seed) for seed in range(options.draws)
    ]
    columns = [draw["columns"] for draw in draws]
    record = {**draws[0], "draws": len(draws)}
    record["columns"] = {
        name: {key: fmean(of_draw[name][key] for of_draw in columns) for key in column}
        for name, column in columns[0].items()
    }
    if ROWWISE_OF_TORCHAO in columns[0] and len(draws) > 1:
        pairs = [(c["rowwise"]["error"], c[ROWWISE_OF_TORCHAO]["error"]) for c in columns]
        ratios = [ours / theirs for ours, theirs in pairs]
        record["over_torchao"] = [fmean(ratios), stdev(ratios) / len(ratios) ** 0.5]
    return record


def table(cases: dict[str, dict]) -> str:
    """In Markdown."""
    head = ("", "error of logits", "likeliest token the same", "greedy tokens the same")
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    notes = []
    for record in cases.values():
        model = record["title"].partition(",")[0]
        if "draws" in record:
            model += f", {record['draws']} draws"
        for name, c in record["columns"].items():
            lines.append(
                f"| {model}: {name} | {c['error']:.2%} | {c['likeliest']:.0%} | {c['greedy']:.0%} |"
            )
        if "over_torchao" in record:
            mean, noise = record["over_torchao"]
            notes.append(f"{model}: {mean:.3f} ± {noise:.3f}")
    if notes:
        lines += ["", f"Errors of rowwise over torchao's, draw by draw: {'; '.join(notes)}."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fuselage = load_fuselage(device)
    cases = {}
    for kind in options.only or KINDS:
        cases[SMALL + kind] = run_draws(fuselage, device, kind, options)
        if not options.quick:
            cases[kind] = run_model(fuselage, device, kind, False, options)
        print(table(cases), flush=True)
    if not options.quick or options.output:
        path = options.output or results.FOLDER / f"fp8_accuracy_{results.slug(device)}.json"
        results.add(path, cases, fuselage, device, "transformers", TORCHAO)
    return 0


if __name__ == "__main__":
    sys.exit(main())
