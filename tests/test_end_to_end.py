"""benchmarks/end_to_end runs at reduced size, verifies before it times, and writes its results."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import pytest
from conftest import REPO_DIR, why_no_cuda

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not why_no_cuda(), reason="loads the CPU variant")
OPTIONS = ["--quick", "--device", "cpu", "--no-compile"]


@pytest.fixture
def main(fuselage, monkeypatch):
    monkeypatch.syspath_prepend(REPO_DIR)
    from benchmarks.end_to_end import cli

    monkeypatch.setattr(cli, "load_fuselage", lambda device: fuselage)
    return cli.main


def test_it_verifies_times_and_writes(main, tmp_path, capsys):
    names = ["llama-prefill", "llama-decode", "llama-training"]
    names += ["ltx-video"] if find_spec("diffusers") else []
    path = tmp_path / "results.json"
    options = [*OPTIONS, "--output", str(path)]
    assert main(options + [option for name in names for option in ("--only", name)]) == 0
    stored = json.loads(path.read_text())
    assert list(stored["cases"]) == names and stored["environment"]["torch"]
    for case in stored["cases"].values():
        assert case["verified"] and case["replaced"] and case["kernel"]
        assert list(case["columns"]) == ["eager", "eager + fuselage"]
        shares = [column["breakdown"]["fuselage"] for column in case["columns"].values()]
        assert shares[0] == 0 < shares[1]
        assert all(column["milliseconds"]["median"] > 0 for column in case["columns"].values())
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| eager")]
    assert len(rows) == 2 * len(names)


def test_it_does_not_time_what_is_wrong(main, fuselage, monkeypatch, capsys):
    assert fuselage.integrations.transformers
    norms = sys.modules[fuselage.__name__ + ".integrations._norms"]
    right = norms.rms_norm
    monkeypatch.setattr(norms, "rms_norm", lambda *args, **kw: 1.01 * right(*args, **kw))
    monkeypatch.setattr(norms, "_behaves_the_same", lambda *args: True)
    monkeypatch.setattr(norms, "_found", {})
    assert main([*OPTIONS, "--only", "llama-prefill"]) == 1
    output = capsys.readouterr().out
    assert "FAILED: not timed" in output and "| eager + fuselage" not in output


def test_a_cpu_times_nothing_of_full_size(main):
    assert main(["--device", "cpu", "--only", "ltx-video"]) == 2
