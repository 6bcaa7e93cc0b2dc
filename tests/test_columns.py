"""`make lint` refuses lines of more than 100 columns in C++ and GPU sources."""

from __future__ import annotations

import sys

from conftest import REPO_DIR

sys.path.insert(0, str(REPO_DIR / "tools"))

import check_columns


def test_a_comment_that_is_too_long_is_found(tmp_path, capsys):
    path = tmp_path / "kernel.cu"
    path.write_text(f"int x;\n// {'µ' * 97}\n// {'µ' * 98}\n", "utf-8")
    assert check_columns.main([str(path)]) == 1
    assert capsys.readouterr().out == f"{path}:3: 101 columns, at most 100\n"


def test_the_sources_fit(capsys):
    assert check_columns.main([]) == 0, capsys.readouterr().out
    assert REPO_DIR / "tests/policy_probe.cpp" in check_columns.sources()
