"""The pages of docs/: their examples run, messages are those that are raised, the site has all."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import kernels
import pytest
import torch
from conftest import REPO_DIR, kernel_backend

sys.path.insert(0, str(REPO_DIR / "tools"))

import site_plots

DOCS = REPO_DIR / "docs"
EXAMPLES = ("quickstart", "training", "serving", "numerics")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_page_run(name, fuselage, device, monkeypatch):
    """One after the other, as a reader would type them."""
    get_kernel = partial(kernels.get_kernel, backend=kernel_backend())
    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    text = (DOCS / f"{name}.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    names = {"fuselage": fuselage, "torch": torch}
    for code in blocks:
        exec(code.replace('"cuda"', repr(device)), names)


# What raises each message of troubleshooting.md, or the text that has it.


def messages() -> list[str]:
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    return re.findall(r"^### `(.*)`$", text, re.M)


def wrong_calls(fuselage: ModuleType) -> dict:
    x, table = torch.randn(4, 8), torch.randn(4, 4)
    heads = torch.randn(1, 4, 2, 8)

    def twice():
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(fuselage.silu(leaf).sum(), leaf, create_graph=True)
        gradient.sum().backward()

    def of_head(x):
        return fuselage.linear_cross_entropy(x, x, torch.zeros(len(x), dtype=torch.int64))

    needs = table.clone().requires_grad_()
    return {
        "must be float16": lambda: fuselage.silu(x.double()),
        "must be bfloat16 as": lambda: fuselage.swiglu(x.bfloat16(), x),
        "on the device of": lambda: fuselage.swiglu(x, x.to("meta")),
        "half the columns": lambda: fuselage.apply_rotary(heads, None, table, table),
        "detach them": lambda: fuselage.apply_rotary(heads, None, needs, needs, rotary_dim=8),
        "create_graph": twice,
        "writes over": lambda: fuselage.bias_act_(x.clone().requires_grad_(), None, "silu"),
        "out of memory": lambda: fuselage.rms_norm(x[0].expand(1 << 45, -1)),
        "forward-mode": lambda: torch.func.jvp(fuselage.silu, (x,), (x,)),
        "by torch.func": lambda: torch.func.grad(of_head)(x),
        "No module named": lambda: importlib.import_module("fuselage"),
    }


DEVICE_INFO = "kernel_src/common/device_info.cu"


def sources() -> str:
    """Where the messages of loading and building stand, as one line without quotes."""
    from kernels import hf_hub, resolver

    files = [REPO_DIR / name for name in ("tools/builder/toolchain.py", DEVICE_INFO)]
    texts = [inspect.getsource(module) for module in (hf_hub, resolver)]
    return re.sub(r'"\s*f?"|\s+', " ", "\n".join([*texts, *map(Path.read_text, files)]))


@pytest.mark.parametrize("message", messages())
def test_a_message_is_what_is_raised(message: str, fuselage):
    parts = [part.strip() for part in message.split("...") if part.strip()]
    calls = [call for key, call in wrong_calls(fuselage).items() if key in message]
    if calls:
        with pytest.raises((RuntimeError, ImportError)) as raised:
            calls[0]()
        text = str(raised.value)
    else:
        text = sources()
    assert all(part in text for part in parts), (parts, text[:300])


def test_the_site_has_every_page():
    config = (REPO_DIR / "mkdocs.yml").read_text("utf-8")
    listed = set(re.findall(r": ([\w./-]+\.md)$", config, re.M))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    hooks = (REPO_DIR / "tools/site_hooks.py").read_text("utf-8")
    outside = dict(re.findall(r'^    "([\w./-]+\.md)": "([\w./]+)"', hooks, re.M))
    assert all((REPO_DIR / path).is_file() for path in outside)
    assert listed == pages | {*outside.values()}


def test_every_operator_that_was_measured_has_a_plot():
    """On its page, with a bar and a title of its time for each case."""
    operators = site_plots.results().keys() - {"fp8_linear"}  # a module
    shown = [site_plots.cases(operator) for operator in operators]
    cases = [case for shapes in shown for pair in shapes.values() for case in pair.values()]
    pages = "".join(
        site_plots.with_plots(page.read_text("utf-8")) for page in DOCS.glob("reference/*.md")
    )
    figures = [ElementTree.fromstring(f) for f in re.findall(r"<figure.*?</figure>", pages)]
    bars = [bar for figure in figures for bar in figure.iter("rect")]
    assert len(figures) == len(shown) and len(bars) == len(cases)
    titles = [bar.findtext("title") for bar in bars]
    for case in cases:
        own, copy = case["contenders"]["fuselage"]["us"], case["copy"]["us"]
        assert f"fuselage: {own:.4g} µs, {100 * copy / own:.0f}% of the copy" in titles
    for bar in bars:
        share = float(re.search(r"(\d+)% of", bar.findtext("title")).group(1))
        length = site_plots.PANEL * min(share, site_plots.MOST) / site_plots.MOST
        assert abs(float(bar.get("width")) - length) < 0.01 * site_plots.PANEL


def test_a_contender_is_marked_at_its_share():
    figure = ElementTree.fromstring(site_plots.figure("rms_norm"))
    for mark in figure.find("svg").iter("path"):
        if mark.get("class") == "mark":
            share = float(re.search(r"(\d+)% of", mark.findtext("title")).group(1))
            x = float(re.search(r"translate\(([\d.]+)", mark.get("transform")).group(1))
            bars = [float(bar.get("x")) for bar in figure.iter("rect")]
            left = max(start for start in bars if start <= x)
            expected = min(share, site_plots.MOST) / site_plots.MOST * site_plots.PANEL
            assert abs(x - left - expected) < 0.01 * site_plots.PANEL


def test_mkdocs_is_needed_for_the_site_alone():
    assert "mkdocs" not in (REPO_DIR / "requirements/dev.txt").read_text("utf-8")
    assert "mkdocs" not in sys.modules
