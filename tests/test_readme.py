"""README.md and docs/ say what is true: names, targets, links, examples, tables."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import kernels
import pytest
import torch
from conftest import REPO_DIR, kernel_backend

README = REPO_DIR / "README.md"
PAGES = [README, *sorted((REPO_DIR / "docs").glob("*.md"))]


def section(heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README.read_text(), re.M | re.S)
    assert found, f"README.md has no section {heading!r}"
    return found.group(1)


def first_column(text: str, head: str) -> list[str]:
    """The names in backquotes that start the rows of the table whose first head is `head`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(re.match(r"\| `([^`]+)` \|", line).group(1))
    return rows


def example(text: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    return code


def test_the_operator_table_is_complete(fuselage):
    functions = {n for n in fuselage.__all__ if inspect.isfunction(getattr(fuselage, n))}
    names = first_column(section("Operators"), "operator")
    assert sorted(names) == sorted(functions)


def test_the_layer_table_is_complete(fuselage):
    layers = {
        name
        for name, member in vars(fuselage.layers).items()
        if inspect.isclass(member) and issubclass(member, torch.nn.Module)
    }
    assert set(first_column(section("In a transformers model"), "layer")) == layers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (REPO_DIR / "Makefile").read_text(), re.M))
    blocks = r"^```.*?^```"
    code = re.findall(blocks, page.read_text(), re.M | re.S)
    code += re.findall(r"`[^`]+`", re.sub(blocks, "", page.read_text(), flags=re.M | re.S))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(code)))
    assert named <= targets, named - targets
    if page == README:
        assert {"demo", "test"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path):
    """Every path in backquotes that starts in one of our folders."""
    folders = "kernel_src|torch-ext|tools|tests|benchmarks|examples|docs|requirements"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text())
    missing = [path for path in named if not (REPO_DIR / path).exists()]
    assert not missing, f"{page.name} names {missing}"


def test_the_results_are_those_that_were_measured():
    command = [sys.executable, "-m", "benchmarks.roofline.readme_table", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO_DIR)
    assert result.returncode == 0, result.stdout + result.stderr


# The examples, as they stand but for the device


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, fuselage, device):
    """What makes the examples run on this machine, without a network."""

    get_kernel = partial(kernels.get_kernel, backend=kernel_backend())
    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    return lambda code: code.replace('"cuda"', repr(device))


def test_the_example_runs(here, fuselage, device):
    names: dict = {}
    exec(here(example(section("Use it"))), names)
    assert names["fuselage"] is fuselage
    assert names["y"].shape == names["x"].shape and names["y"].device.type == device


def test_the_examples_of_the_integrations_run(here, fuselage, device):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2)
    page = (REPO_DIR / "docs/integrations.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(examples) == 2
    for code in examples:
        names = {"model": transformers.LlamaForCausalLM(config).to(device), "fuselage": fuselage}
        exec(here(code), names)
        forwards = [vars(m).get("forward") for m in names["model"].modules()]
        assert sum(forward is not None for forward in forwards) >= 7


def test_the_example_of_kernelize_runs(here, fuselage, device):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2)
    names = {"model": transformers.LlamaForCausalLM(config).to(device)}
    exec(here(example(section("In a transformers model"))), names)
    norms = [m for m in names["model"].modules() if "RMSNorm" in type(m).__name__]
    assert len(norms) == 5
    assert all(norm.forward.__func__ is fuselage.layers.RMSNorm.forward for norm in norms)


@pytest.mark.parametrize("call", re.findall(r"`(rms_norm\([^`]*=[^`]*\))` \|", README.read_text()))
def test_the_calls_of_models_run(fuselage, call: str):
    values = {"x": torch.randn(2, 8).bfloat16(), "weight": torch.ones(8), "eps": 1e-6}
    result = eval(call, {"rms_norm": fuselage.rms_norm, "torch": torch, **values})
    assert result.shape == (2, 8) and result.isfinite().all()
