"""README.md and docs/ say what is true: names, targets, links, examples, tables."""

from __future__ import annotations

import copy
import inspect
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jinja2
import kernels
import pytest
import torch
from conftest import REPO_DIR, REPO_ID, VERSION, kernel_backend

sys.path.insert(0, str(REPO_DIR / "tools"))

import write_docs

README = REPO_DIR / "README.md"
INTEGRATIONS = REPO_DIR / "docs/integrations.md"
PAGES = [
    README,
    REPO_DIR / "RELEASING.md",
    REPO_DIR / "SECURITY.md",
    *sorted((REPO_DIR / "docs").rglob("*.md")),
    REPO_DIR / "benchmarks/results/README.md",
]
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(REPO_DIR).as_posix()
)


def section(heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README.read_text(), re.M | re.S)
    assert found, f"README.md has no section {heading!r}"
    return found.group(1)


def example(text: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    return code


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


def test_every_family_has_its_line(fuselage):
    rows = [line for line in section("Operators").splitlines() if line.startswith("| [")]
    pages = re.findall(r"\]\(docs/reference/([\w.]+)\.md\)", "\n".join(rows))
    assert pages == list(write_docs.FAMILIES)
    others = {"patch", "unpatch", "kernel_mapping", "parallelize_llama"}
    named = set(re.findall(r"`([a-z_]\w*)`", "\n".join(rows)))
    assert named <= {*fuselage.__all__, *others}, named - {*fuselage.__all__}


@each_page
def test_make_targets_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (REPO_DIR / "Makefile").read_text(), re.M))
    blocks = r"^```.*?^```"
    code = re.findall(blocks, page.read_text(), re.M | re.S)
    code += re.findall(r"`[^`]+`", re.sub(blocks, "", page.read_text(), flags=re.M | re.S))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(code)))
    assert named <= targets, named - targets
    if page == README:
        assert {"demo", "test"} <= named


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_linked_files_and_headings_exist(page: Path):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


@each_page
def test_named_files_exist(page: Path):
    """Every path in backquotes that starts in one of our folders."""
    folders = "kernel_src|torch-ext|tools|tests|benchmarks|examples|docs|requirements|scripts"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text())
    missing = [path for path in named if not (REPO_DIR / path).exists()]
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.long
def test_the_results_are_those_that_were_measured():
    command = [sys.executable, "-m", "benchmarks.roofline.tables", "--check"]
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


@pytest.fixture
def llama(device):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).to(device)


def test_the_example_of_patch_runs(here, fuselage, llama, capsys):
    names = {"model": llama, "fuselage": fuselage}
    exec(here(example(section("Patch a model"))), names)
    assert {"model.norm", "model.layers.0.mlp"} <= names["report"].replaced.keys()
    assert str(names["report"]) in capsys.readouterr().out
    assert not [m for m in llama.modules() if "forward" in vars(m)]


def test_the_example_of_training_runs(here, fuselage, device):
    names = {"torch": torch, "fuselage": fuselage}
    exec(here(example(section("Train"))), names)
    x, loss = names["x"], names["loss"]
    assert x.device.type == device and loss < x.square().mean()
    assert (names["model"][0].weight != 1).all()


def test_the_examples_of_the_integrations_run(here, fuselage, llama):
    examples = re.findall(r"^```python\n(.*?)^```", INTEGRATIONS.read_text(), re.M | re.S)
    assert len(examples) == 2
    for code in examples:
        names = {"model": copy.deepcopy(llama), "fuselage": fuselage}
        exec(here(code), names)
        forwards = [vars(m).get("forward") for m in names["model"].modules()]
        assert sum(forward is not None for forward in forwards) >= 7


def test_the_example_of_kernelize_runs(here, fuselage, llama):
    code = re.search(r"^```python\n(.*?kernelize.*?)^```", INTEGRATIONS.read_text(), re.M | re.S)
    exec(here(code.group(1)), {"model": llama, "fuselage": fuselage})
    norms = [m for m in llama.modules() if "RMSNorm" in type(m).__name__]
    assert len(norms) == 5
    assert all(norm.forward.__func__ is fuselage.layers.RMSNorm.forward for norm in norms)


def test_the_card_says_what_is_true(here, fuselage, llama, device):
    """As kernel-builder fills it in: `functions` are the names of `__all__`."""
    template = jinja2.Template((REPO_DIR / "CARD.md").read_text())
    values = {"functions": fuselage.__all__, "layers": ["RMSNorm"], "has_benchmark": True}
    card = template.render(repo_id=REPO_ID, version=VERSION, license="Apache-2.0", **values)
    functions = [name for name in fuselage.__all__ if inspect.isfunction(getattr(fuselage, name))]
    assert f"\n`{'`, `'.join(functions)}`.\n" in card and "\n`RMSNorm`.\n" in card
    names = {"x": torch.randn(2, 8, device=device), "weight": None, "model": llama}
    exec(here(example(card)), names)
    assert names["y"].shape == (2, 8)
    assert len(card.splitlines()) <= len(README.read_text().splitlines()) / 2


CALLS = re.findall(
    r"^- `(rms_norm\([^`]*\))` rounds", (REPO_DIR / "docs/reference/norm.md").read_text(), re.M
)


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_of_models_run(fuselage, call: str):
    values = {"x": torch.randn(2, 8).bfloat16(), "weight": torch.ones(8), "eps": 1e-6}
    result = eval(call, {"rms_norm": fuselage.rms_norm, "torch": torch, **values})
    assert result.shape == (2, 8) and result.isfinite().all()


def test_all_calls_of_models_are_found():
    assert len(CALLS) == 5
