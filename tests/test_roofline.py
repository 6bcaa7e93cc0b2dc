"""The roofline benchmark runs, verifies and stores, on a CPU and one small case."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.roofline import cli, history, results


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_case_is_timed_and_stored(tmp_path: Path, direction: str, capsys):
    chosen = ["--device", "cpu", "--quick", "--no-host", "--only", f"cross_entropy.{direction}"]
    assert cli.main([*chosen, "--results", str(tmp_path)]) == 0, capsys.readouterr().out
    (stored,) = tmp_path.glob("*.json")
    cases = json.loads(stored.read_text())["cases"]
    measured = [case for key, case in cases.items() if f"cross_entropy.{direction}" in key]
    assert measured and all(case["contenders"]["fuselage"]["us"] > 0 for case in measured)


def git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(repo), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_commits_to_a_family_and_to_what_families_share_are_counted(tmp_path: Path):
    git(tmp_path, "init", "-q")
    commits = []
    for name in ("norm", "gate", "common", "norm"):
        folder = tmp_path / "kernel_src" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.cu").write_text(str(len(commits)))
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "-m", name)
        commits.append(git(tmp_path, "rev-parse", "HEAD"))
    counts = [history.commits_since(commit, ("common", "norm"), tmp_path) for commit in commits]
    assert counts == [2, 2, 1, 0]
    assert history.is_older(commits[0], commits[1], tmp_path)
    assert not history.is_older(commits[1], commits[0], tmp_path)
    assert not history.is_older(commits[1], commits[1], tmp_path)


def case(us: float, commit: str = "a" * 40) -> dict:
    times = {"contenders": {"fuselage": {"us": us}}, "copy": {"us": 1.0}}
    return {**times, "commit": commit, "operator": "rms_norm"}


def stored(**cases: dict) -> dict:
    return {"environment": {}, "method": {}, "host": {}, "cases": cases}


def test_stale_cases_are_those_whose_kernels_changed():
    commits = {"a" * 40: 0, "b" * 40: 1, "c" * 40: 5}
    cases = {name: case(1.0, commit) for name, commit in zip("xyz", commits, strict=True)}
    assert history.stale(stored(**cases), lambda commit, _: commits[commit]) == {"z": 5, "y": 1}


def test_every_operator_has_folders_of_kernels():
    for operator, names in history.folders().items():
        assert all((results.REPO / "kernel_src" / name).is_dir() for name in names), operator


def test_a_run_is_compared_and_merged():
    before = stored(same=case(1.0), slower=case(1.0), faster=case(1.0), other=case(1.0))
    run = stored(same=case(1.0), slower=case(2.0), faster=case(0.5), new=case(3.0))
    lines = history.compare(run, before)
    assert [line.split()[0] for line in lines] == ["slower", "faster", "new"]
    assert lines[0].endswith("2.000x") and lines[1].endswith("0.500x")
    merged = history.merge(run, before)["cases"]
    assert merged == {**run["cases"], "other": case(1.0)}


def test_contenders_that_a_run_lacks_stay_with_their_commit():
    peers = {"fuselage": {"us": 2.0}, "compile": {"us": 3.0}, "liger": {"us": 4.0}}
    before = stored(one={**case(2.0), "contenders": peers})
    run = stored(one=case(1.0, "b" * 40))
    run["cases"]["one"]["contenders"]["compile"] = {"us": 3.1}
    merged = history.merge(run, before)["cases"]["one"]
    assert merged["commit"] == "b" * 40
    assert merged["contenders"] == {
        "fuselage": {"us": 1.0},
        "compile": {"us": 3.1},
        "liger": {"us": 4.0, "commit": before["cases"]["one"]["commit"]},
    }
    again = history.merge(stored(one=case(0.9, "c" * 40)), stored(one=merged))["cases"]["one"]
    assert again["contenders"]["liger"] == merged["contenders"]["liger"]


def test_what_a_run_began_with_does_not_replace_what_is_newer(monkeypatch):
    monkeypatch.setattr(history, "is_older", lambda commit, other: commit < other)
    before = stored(newer=case(1.0, "b" * 40), older=case(1.0))
    run = stored(newer=case(2.0), older=case(2.0, "b" * 40))
    assert len(history.compare(run, before)) == 1
    merged = history.merge(run, before)["cases"]
    assert merged == {"newer": case(1.0, "b" * 40), "older": case(2.0, "b" * 40)}
