"""docs/reference is what the docstrings say, and has every public name."""

from __future__ import annotations

import ast
import inspect
import re
import sys

import pytest
from conftest import REPO_DIR

sys.path.insert(0, str(REPO_DIR / "tools"))

import write_docs


def test_the_pages_are_up_to_date():
    assert not write_docs.stale(), "run make docs"


@pytest.mark.long
def test_a_changed_page_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(write_docs, "REPO_DIR", tmp_path)
    monkeypatch.setattr(write_docs, "FOLDER", tmp_path / "reference")
    assert write_docs.main([]) == 0 and write_docs.main(["--check"]) == 0
    (tmp_path / "reference/norm.md").write_text("Something else.")
    (tmp_path / "reference/gate.md").unlink()
    (tmp_path / "reference/gone.md").write_text("A module that is no more.")
    assert write_docs.stale() == ["reference/gate.md", "reference/gone.md", "reference/norm.md"]
    assert write_docs.main(["--check"]) == 1
    assert write_docs.main([]) == 0 and write_docs.stale() == []


def described() -> dict[str, list[str]]:
    """The names that each page has a section for."""
    return {
        page: re.findall(r"^## `(\w+)`", (write_docs.FOLDER / f"{page}.md").read_text(), re.M)
        for page in write_docs.FAMILIES
    }


def test_every_public_name_is_described(fuselage):
    pages = described()
    names = [name for page in pages if "." not in page for name in pages[page]]
    own = {*names} - {*pages["modules"], *pages["layers"], *pages["distributed"]}
    namespaces = {name for name in fuselage.__all__ if inspect.ismodule(getattr(fuselage, name))}
    assert own == {*fuselage.__all__} - namespaces
    assert pages["distributed"] == fuselage.distributed.__all__
    assert namespaces <= {page.partition(".")[0] for page in pages}
    for namespace in (fuselage.modules, fuselage.layers):
        name = namespace.__name__
        members = vars(namespace).values()
        classes = {c.__name__ for c in members if inspect.isclass(c) and c.__module__ == name}
        assert classes == {*pages[name.rpartition(".")[2]]}


@pytest.mark.parametrize("page", write_docs.FAMILIES)
def test_docstrings_name_the_parameters(page):
    """An `Args` section has all of them, and nothing else."""
    names = {*write_docs.exported(write_docs.parse(write_docs.PACKAGE / "__init__.py")[1])}
    module = write_docs.load(page, names)
    for name, node in module.public.items():
        lines = write_docs.sections(ast.get_docstring(node)).get("Args")
        if lines is None:
            continue
        function = node
        if isinstance(node, ast.ClassDef):
            function = write_docs.method(module, node, "__init__")
        wanted = [
            re.split("[:=]", argument)[0] for argument in write_docs.parameters(function.args)
        ]
        if "**to" in wanted:
            wanted += ["device", "dtype"]
        named = [n for names, _ in write_docs.entries(lines) for n in names.split(", ")]
        assert sorted(named) == sorted({*wanted} - {"*", "**to"}), name
