"""The fuzzer finds planted mistakes, one of each kind, and says which call had it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import REPO_DIR

from . import cases, child, cli, planted

# (mistake, function, kind of the failure): of a few seeds some find it.
MISTAKES = [
    ("wrong_value", "silu", "a wrong value"),
    ("nan_dropped", "silu", "a wrong value"),
    ("past_the_end", "bias_act_", "a write out of place"),
    ("writes_an_input", "silu", "a write out of place"),
    ("not_deterministic", "silu", "not the same bits again"),
    ("other_bits_in_a_layout", "silu", "other bits in another layout"),
    ("depends_on_other_rows", "silu", "a row depends on the others"),
    ("wrong_gradient", "silu", "a wrong gradient"),
    ("refuses_a_valid_call", "silu", "a valid call raised"),
    ("accepts_a_bad_call", "silu", "a bad call was accepted"),
    ("wrong_exception", "silu", "a wrong exception"),
]
SEEDS = 60


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("mistake", "name", "kind"), MISTAKES, ids=lambda value: value)
def test_a_planted_mistake_is_found(fuselage, mistake, name, kind):
    plant = getattr(planted, mistake)
    for seed in range(SEEDS):
        outcome = child.run_case(plant(fuselage), name, seed, "cpu")
        if outcome.get("kind") == kind:
            # The seed alone makes the case: it fails in the same words again.
            assert child.run_case(plant(fuselage), name, seed, "cpu") == outcome
            assert child.run_case(fuselage, name, seed, "cpu").get("kind") != kind
            return
    pytest.fail(f"{SEEDS} cases of {name} found no {kind}")


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(REPO_DIR / "tests"), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "fuzz", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.slow
def test_a_crash_names_its_call_and_the_next_one_runs():
    result = fuzz("--ops", "silu,gelu", "--cases", "2", "--wrap", "fuzz.planted:crash")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 x silu: a crash\n    SIGABRT\n    make fuzz CASE='silu 0'" in result.stdout
    assert "2 cases, 1 failures" in result.stdout


@pytest.mark.slow
def test_a_hang_names_its_call():
    options = ("--timeout", "1", "--wrap", "fuzz.planted:hang")
    result = fuzz("--replay", "silu 3", *options)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED silu 3: a hang: no answer for 1 s" in result.stdout


@pytest.mark.kernels_ci
def test_every_public_name_has_cases(fuselage):
    assert set(cases.names(fuselage)) | set(cases.LEFT_OUT) >= set(fuselage.__all__)
    assert set(cases.LEFT_OUT) <= set(fuselage.__all__)
    modules = {name for name in cases.names(fuselage) if name.startswith("modules.")}
    assert modules == {
        f"modules.{name}"
        for name, member in vars(fuselage.modules).items()
        if isinstance(member, type) and member.__module__ == fuselage.modules.__name__
    }


@pytest.mark.long
def test_valid_calls_of_every_name_run(fuselage):
    """No case fails for the fuzzer's own sake."""
    for name in cases.names(fuselage):
        for seed in range(3):
            outcome = child.run_case(fuselage, name, seed, "cpu")
            assert outcome.get("kind") != "the fuzzer raised", (name, seed, outcome)


def test_options():
    options = cli.parse(["--replay", "silu 7", "--device", "cuda"])
    settings = cli.settings_of(options)
    assert settings["ops"] == ["silu"] and settings["seed"] == 7 and settings["end"] == 1
    order = child.sequence(["a", "b"], 5, 1)
    assert [next(order) for _ in range(3)] == [(1, "b", 5), (2, "a", 6), (3, "b", 6)]
