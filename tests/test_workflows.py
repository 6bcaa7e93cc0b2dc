""".github/workflows: pinned actions, least privilege, no token where a log could have it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from builder.config import load
from conftest import KERNEL_DIR, REPO_DIR, REPO_ID

sys.path.insert(0, str(REPO_DIR / "scripts"))

import check_archs
import hub_smoke

yaml = pytest.importorskip("yaml")

WORKFLOWS = sorted((REPO_DIR / ".github/workflows").glob("*.yml"))
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
WRITES = {"update-lock": {"contents", "pull-requests"}}  # the scopes a workflow may write to
TOKENS = {"release": {"upload"}, "gpu-test": {"smoke"}}  # the jobs that have a secret


def jobs_of(path) -> dict:
    return yaml.safe_load(path.read_text("utf-8"))["jobs"]


def steps_of(path) -> list[dict]:
    return [step for job in jobs_of(path).values() for step in job["steps"]]


def test_all_workflows_are_there():
    names = {path.stem for path in WORKFLOWS}
    assert names == {"ci", "build-pr", "release", "gpu-test", "update-lock"}


@each_workflow
def test_actions_are_pinned_by_commit(path):
    """With the release beside it, and one commit for one release everywhere."""
    lines = re.findall(r"uses: *(.*)", path.read_text("utf-8"))
    assert len(lines) >= 1
    for line in lines:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+(\.\d+\.\d+)?", line), line


def test_an_action_has_one_pin():
    pins = {
        tuple(line.split("@"))
        for path in WORKFLOWS
        for line in re.findall(r"uses: *(.*)", path.read_text("utf-8"))
    }
    assert len(pins) == len(dict(pins))


@each_workflow
def test_jobs_state_their_permissions(path):
    assert yaml.safe_load(path.read_text("utf-8"))["permissions"] == {}
    for name, job in jobs_of(path).items():
        assert "timeout-minutes" in job, name
        scopes = job["permissions"]
        writes = {scope for scope, right in scopes.items() if right != "read"}
        assert writes <= WRITES.get(path.stem, set()), (name, writes)


@each_workflow
def test_checkouts_leave_no_token_behind(path):
    checkouts = [s for s in steps_of(path) if s.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) >= 1
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@each_workflow
def test_secrets_are_in_the_environment_of_one_step(path):
    """Of a job behind an environment; never in a script, where a log would show it."""
    for name, job in jobs_of(path).items():
        secret = [step for step in job["steps"] if "secrets." in str(step)]
        if not secret:
            assert "secrets." not in str(job), name
            continue
        assert name in TOKENS.get(path.stem, ()) and "environment" in job, name
        assert len(secret) == 1 and "secrets." not in str({**secret[0], "env": {}}), name
        script = secret[0]["run"]
        assert "HF_TOKEN" not in script and "set -x" not in script, name


@each_workflow
def test_scripts_are_shell_without_expressions(path):
    """An expression in a script would run what somebody named a branch."""
    for step in steps_of(path):
        script = step.get("run", "")
        assert "${{" not in script
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_pull_requests_run_without_secrets():
    for path in WORKFLOWS:
        text = path.read_text("utf-8")
        assert "pull_request_target" not in text and "workflow_run" not in text
        if "pull_request:" in text:
            assert "secrets." not in text, path.name


@each_workflow
def test_what_scripts_name_exists(path):
    targets = set(re.findall(r"^([a-z-]+):", (REPO_DIR / "Makefile").read_text(), re.M))
    for step in steps_of(path):
        script = step.get("run", "")
        named = set(re.findall(r"^ *make ([a-z-]+)", script, re.M))
        assert named <= targets, named - targets
        files = re.findall(r"\b(?:scripts|tools)/\w+\.py|^\.ci/run", script, re.M)
        assert all((REPO_DIR / file).is_file() for file in files), files


@pytest.mark.parametrize("name", ["build-pr", "release"])
def test_a_pull_request_is_checked_as_a_release_is(name):
    path = REPO_DIR / f".github/workflows/{name}.yml"
    (script,) = [
        step["run"] for step in jobs_of(path)["build"]["steps"] if "check" in step.get("run", "")
    ]
    checks = re.findall(r"builder (check-\w+)|python3 (scripts/\w+\.py)", script)
    assert checks == [("check-abi", ""), ("check-builds", ""), ("", "scripts/check_archs.py")]


def test_a_release_builds_its_cpu_variant_again():
    """The variant: of a bundle Nix would only copy the parts again."""
    steps = steps_of(REPO_DIR / ".github/workflows/release.yml")
    (again,) = [step["run"] for step in steps if "--rebuild" in step.get("run", "")]
    major, minor = load(REPO_DIR).abi_version("cpu")
    assert f'".#redistributable.torch-stable-abi{major}{minor}-cpu-$SYSTEM"' in again


# The scripts


@pytest.mark.long
def test_the_smoke_test_runs_every_family():
    """As on the Hub, in a process of its own."""
    environment = {**os.environ, "LOCAL_KERNELS": f"{REPO_ID}={KERNEL_DIR}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(REPO_DIR / "scripts/hub_smoke.py"), "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    families = {line.partition(":")[0] for line in result.stdout.splitlines() if ": ok" in line}
    modules = {p.stem for p in (REPO_DIR / "torch-ext/fuselage").glob("[a-z]*.py")}
    assert families == modules - {"modules", "layers", "distributed"}
    assert "variant: torch-stable-abi210-cpu-" in result.stdout


@pytest.mark.parametrize("family", hub_smoke.CASES)
def test_the_smoke_test_finds_a_wrong_result(fuselage, family, monkeypatch):
    ours, formula, shapes = hub_smoke.CASES[family]

    def wrong(kernel, *inputs):
        return ours(kernel, *inputs) * (1 + 2**-10)

    hub_smoke.check(family, fuselage, "cpu", hub_smoke.torch.float32)
    monkeypatch.setitem(hub_smoke.CASES, family, (wrong, formula, shapes))
    with pytest.raises(AssertionError, match="is off by"):
        hub_smoke.check(family, fuselage, "cpu", hub_smoke.torch.float32)


SECTIONS = {
    "a": {"backend": "cuda", "cuda-capabilities": ["8.0", "9.0+PTX", "10.0", "12.0+PTX"]},
    "b": {"backend": "cuda", "cuda-capabilities": ["9.0a"]},
    "c": {"backend": "cpu"},
}
CU126, CU130 = (f"torch-stable-abi210-{name}-x86_64-linux" for name in ("cu126", "cu130"))


@pytest.mark.parametrize(
    ("variant", "archs", "expected"),
    [
        ("torch-stable-abi210-cpu-x86_64-linux", None, []),
        # As kernel-builder makes it of these lists: CUDA 12.6 knows no Blackwell.
        (CU126, ["8.0", "9.0+PTX", "9.0a"], []),
        (CU130, ["8.0", "9.0+PTX", "9.0a", "10.0", "12.0+PTX"], []),
        (CU126, ["8.0", "9.0+PTX", "9.0a", "10.0"], ["claims 10.0"]),
        (CU130, ["8.0", "9.0+PTX", "9.0a"], ["lacks 10.0, 12.0"]),
        (CU130, ["7.0", "8.0", "9.0", "10.0", "12.0"], ["lacks 9.0a", "claims 7.0"]),
        ("torch-cuda", ["8.0"], ["has no CUDA version in its name"]),
    ],
)
def test_architectures_are_compared(tmp_path, variant, archs, expected):
    backend = {"type": "cpu"} if archs is None else {"type": "cuda", "archs": archs}
    (tmp_path / variant).mkdir()
    (tmp_path / variant / "metadata.json").write_text(json.dumps({"backend": backend}))
    found = check_archs.violations(tmp_path, SECTIONS)
    assert found == [f"{variant} {line}" for line in expected]


def test_a_folder_without_variants_is_no_release(tmp_path):
    assert check_archs.violations(tmp_path, SECTIONS) == [f"{tmp_path} has no variant"]


def test_architectures_are_compared_without_packages(tmp_path):
    """A runner of GitHub has Python alone."""
    command = [sys.executable, "-I", "-S", str(REPO_DIR / "scripts/check_archs.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "has no variant" in result.stderr, result.stderr
