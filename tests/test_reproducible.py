"""tools/check_reproducible.py builds in two folders, and sees what differs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import REPO_DIR

sys.path.insert(0, str(REPO_DIR / "tools"))

import check_reproducible

SMALLEST = "glibc_shim.cpp"  # a source of one line, which the builder adds
pytestmark = pytest.mark.skipif(not (REPO_DIR / ".git").exists(), reason="needs a clone")


def test_files_are_compared(tmp_path: Path):
    for folder, text in (("a", "1"), ("b", "2")):
        (tmp_path / folder / "inner").mkdir(parents=True)
        (tmp_path / folder / "inner/same").write_text("same")
        (tmp_path / folder / "inner/other").write_text(text)
        (tmp_path / folder / f"only_in_{folder}").write_text("")
        (tmp_path / folder / "depends.d").write_text(folder)
    found = [check_reproducible.digests(tmp_path / folder) for folder in "ab"]
    assert check_reproducible.differences(found[0], found[0]) == []
    assert check_reproducible.differences(*found) == ["inner/other", "only_in_a", "only_in_b"]


def test_the_same_object_in_two_folders(capfd):
    assert check_reproducible.main(["--only", SMALLEST]) == 0
    assert "1 objects are the same in two folders" in capfd.readouterr().out


@pytest.mark.long
def test_an_object_with_its_folder_inside_is_found(monkeypatch, capfd):
    text = check_reproducible.compiling.GLIBC_SHIM_CPP
    real = check_reproducible.compile_some

    def compile_some(source: Path, only: list[str]) -> Path:
        where = f'extern "C" {{ extern const char where[] = "{source}"; }}\n'
        monkeypatch.setattr(check_reproducible.compiling, "GLIBC_SHIM_CPP", text + where)
        return real(source, only)

    monkeypatch.setattr(check_reproducible, "compile_some", compile_some)
    assert check_reproducible.main(["--only", SMALLEST]) == 1
    assert f"{SMALLEST}.o differs between two folders" in capfd.readouterr().err


def test_a_source_that_is_not_listed_is_refused():
    with pytest.raises(SystemExit, match=r"not in build\.toml: nothing\.cpp"):
        check_reproducible.main(["--only", "nothing.cpp"])
