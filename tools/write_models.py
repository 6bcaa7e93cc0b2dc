#!/usr/bin/env python3
"""Writes docs/models.md: what `patch` replaces in small models of every tested architecture.

tests/integrations/zoo.py and zoo_diffusion.py make the models. tests/integrations/test_zoo.py holds
each row against its model.

    python tools/write_models.py        # after `make build`; takes minutes
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

REPO_DIR = Path(__file__).resolve().parent.parent
PAGE = REPO_DIR / "docs/models.md"

HEAD = """# What `patch` does to each architecture

<!-- `tools/write_models.py` writes this page. Do not edit it. -->

`fuselage.integrations.transformers.patch(model)`, and that of `diffusers`, decide by what a module
computes ([Models](integrations.md)), so an architecture that is not here may gain as well:
`print(patch(model))` says what was replaced. This page is that report for small models with random
weights, most of two layers. Every row is tested: outputs, gradients, bfloat16, generation, saving,
loading and unpatching.

How much whole models gain on a GPU is in [Benchmarks](benchmarks.md#whole-models).
"""
SECTIONS = {
    "causal": "Causal language models",
    "seq2seq": "Encoder and decoder",
    "encoder": "Encoders",
    "vision": "Vision",
    "speech": "Speech",
    "diffusion": "Diffusion",
}

Job = tuple[str, object]  # family and name, or "diffusion" and the function that makes the model


def jobs() -> list[Job]:
    from integrations import zoo, zoo_diffusion

    return [*zoo.tested(), *(("diffusion", make) for make in zoo_diffusion.MODELS)]


def patched_row(job: Job) -> str:
    """Makes the model, patches it, and gives its row."""
    import kernels
    import torch
    from integrations import zoo, zoo_diffusion
    from integrations.models import randomise

    torch.set_num_threads(1)
    fuselage = kernels.get_local_kernel(REPO_DIR, backend="cpu")
    family, which = job
    if family == "diffusion":
        model, _ = zoo_diffusion.make(which)
        integration, name = fuselage.integrations.diffusers, which.__name__
    else:
        model, _ = zoo.make(family, which)
        integration, name = fuselage.integrations.transformers, which
    randomise(model)
    return row(name, integration.patch(model))


def row(name: str, report) -> str:
    """The row of one model."""
    cells = [f"`{name}`", counted(report.replaced.values()), counted(report.left_alone.values())]
    return "| " + " | ".join(cells) + " |"


def counted(entries: Iterable[str]) -> str:
    counts = Counter(entry.replace("|", "\\|") for entry in entries)
    return "; ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "-"


def page(rows: dict[str, list[str]], packages: str) -> str:
    lines = [HEAD, f"Written with {packages}."]
    for family, title in SECTIONS.items():
        lines += ["", f"## {title}", "", "| model | replaced | left alone |", "| --- | --- | --- |"]
        lines += sorted(rows[family], key=lambda line: line.split("`")[1])
    return "\n".join(lines) + "\n"


def main() -> int:
    import diffusers
    import transformers

    sys.path.insert(0, str(REPO_DIR / "tests"))
    rows: dict[str, list[str]] = {family: [] for family in SECTIONS}
    every = jobs()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        for (family, _), line in zip(every, pool.map(patched_row, every)):
            rows[family].append(line)
            print(line, flush=True)
    packages = f"transformers {transformers.__version__} and diffusers {diffusers.__version__}"
    PAGE.write_text(page(rows, packages), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
