"""Tuning: what a file may say, who reads it, that no value changes a bit, and who writes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check_tuning
import pytest
import torch
import tune
from builder.config import load
from builder.package import _package_files
from builds import copy_sources
from conftest import DEVICES, REPO_DIR
from harness import assert_same_bits
from jsonschema import Draft202012Validator
from probes import SOURCES, TESTS, compiled, made_up_headers, printed

from benchmarks.roofline import results, tables

GPU = "NVIDIA H200"
FILE = "nvidia-h200.json"
RUN = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).run(*map(str.encode, sys.argv[2:]))"
VALUES = [(name, value) for name, of in tune.TUNABLES.items() for value in of["enum"]]


def document(**changes: object) -> dict:
    """A file, but for the changes; None leaves a key out."""
    measured = {
        "by": "tools/tune.py",
        "date": "2026-11-24",
        "commit": "0" * 40,
        "kernel": "_fuselage_cuda_0123456",
        "versions": {"torch": "2.13.0", "cuda": "13.0"},
        "method": "made up",
        "parameters": {"rotary_threads": {"128": {"mean": 0.9, "worst": 1.0}}},
        "shapes": {"apply_rotary.fwd 1x1": {"built_in_us": 2.0, "tuned_us": 1.8}},
    }
    made = {"schema": 1, "gpu": GPU, "parameters": {"rotary_threads": 128}, "measured": measured}
    return {key: value for key, value in {**made, **changes}.items() if value is not None}


# policies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuning")


@pytest.mark.long
def test_every_value_matters_and_none_changes_an_order(folder: Path):
    lines = printed(compiled(folder / "order", TESTS / "tuning_order_probe.cpp"))
    swept = []
    for line in lines:
        name, value, built_in, policies, orders, first = line.split("|")
        swept.append((name, int(value)))
        assert (int(policies) == 0) == (built_in == "1"), line
        assert (orders, first) == ("0", ""), line
    assert swept == VALUES


@pytest.mark.slow
def test_every_value_is_a_legal_launch(folder: Path):
    lines = printed(compiled(folder / "policies", TESTS / "policy_probe.cpp"), "tuned")
    cases = [line.split("|", 4) for line in lines]
    families = {part[0] for part in cases}
    assert len(families) >= 12 and len(cases) == len(families) * 3 * (len(VALUES) + 2)
    assert {part[1] for part in cases} >= {f"H100, {name}={value}" for name, value in VALUES}
    assert [part for part in cases if part[3] != "0"] == []


# files


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    """What reads a file, above a made-up runtime; its own folder has one."""
    own = folder / "tuning"
    own.mkdir()
    (own / FILE).write_text(json.dumps(document(parameters={"qk_norm_turns": 2})))
    return compiled(
        folder / "tuning_probe.so",
        *("-shared", "-fPIC", "-pthread", "-D_GLIBCXX_ASSERTIONS", f"-I{made_up_headers(folder)}"),
        *(TESTS / "tuning_probe.cpp", "-x", "c++", SOURCES / "common/device_info.cu"),
    )


def said(library: Path, command: str, gpu: str = GPU, argument: object = "", **environment: str):
    """What the library prints on stdout and on stderr, line by line."""
    unset = {k: v for k, v in os.environ.items() if not k.startswith("FUSELAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, library, command, gpu, str(argument)],
        capture_output=True,
        text=True,
        env=unset | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def seen(**changes: int) -> str:
    """How the probe prints all values."""
    values = {name: of["default"] for name, of in tune.TUNABLES.items()} | changes
    return ", ".join(f"{name}={value}" for name, value in values.items())


@pytest.mark.long
def test_the_schema_has_the_parameters_of_the_library(library: Path):
    lines, _ = said(library, "parameters")
    expected = {
        name: {"enum": list(map(int, values)), "default": int(default)}
        for name, default, *values in map(str.split, lines)
    }
    assert expected == tune.TUNABLES
    assert [*expected] == [*tune.TUNABLES]
    Draft202012Validator.check_schema(check_tuning.SCHEMA)


def test_the_page_lists_the_parameters():
    page = (REPO_DIR / "docs/tuning.md").read_text("utf-8")
    listed = re.findall(r"^\| `(\w+)` \| ([\d, *]+) \|", page, re.M)
    expected = {
        name: ", ".join(f"**{v}**" if v == of["default"] else str(v) for v in of["enum"])
        for name, of in tune.TUNABLES.items()
    }
    assert dict(listed) == expected


def test_a_gpu_takes_the_file_beside_the_library(library: Path):
    assert said(library, "seen") == ([seen(qk_norm_turns=2)], [])
    assert said(library, "seen", "NVIDIA L4") == ([seen()], [])


def test_a_folder_of_ones_own_comes_first(library: Path, tmp_path: Path):
    (tmp_path / FILE).write_text(json.dumps(document()))
    own = {"FUSELAGE_TUNING_DIR": str(tmp_path)}
    assert said(library, "seen", **own) == ([seen(rotary_threads=128)], [])
    assert said(library, "seen", "NVIDIA L4", **own) == ([seen()], [])
    assert said(library, "seen", FUSELAGE_TUNING_DIR=str(tmp_path / "none")) == ([seen()], [])


def test_one_line_says_what_was_chosen_and_more_say_why(library: Path):
    path = library.parent / "tuning" / FILE
    chosen = f"fuselage: info: {GPU}: the launch policy of {path}: qk_norm_turns=2"
    assert said(library, "seen", FUSELAGE_LOG="info")[1] == [chosen]
    assert said(library, "seen", "NVIDIA L4", FUSELAGE_LOG="info")[1] == [
        "fuselage: info: NVIDIA L4: the built-in launch policy"
    ]
    debug = said(library, "seen", FUSELAGE_LOG="debug")[1]
    assert chosen in debug and len(debug) == 3
    assert f"FUSELAGE_TUNING_DIR is not set: the folder is {path.parent}" in debug[0]
    missing = said(library, "seen", "NVIDIA L4", FUSELAGE_LOG="debug")[1]
    assert f"there is no {path.parent}/nvidia-l4.json" in missing[1]


# What is changed of a file, and what the warning has to say. All are refused by the schema, too.
BAD = [
    (document(schema=2), "a schema of another version"),
    (document(gpu="NVIDIA H100"), 'it is of "NVIDIA H100", and this GPU is "NVIDIA H200"'),
    (document(gpu=None), "is missing"),
    (document(parameters=None), "is missing"),
    (document(measured=None), "is missing"),
    (document(author="me"), 'the key "author" is not known'),
    (document(parameters={"threads": 128}), 'there is no parameter "threads"'),
    (document(parameters={"rotary_threads": 96}), "is 96, and may be: 64 128 256"),
    (document(parameters={"rotary_threads": 0}), "is 0, and may be: 64 128 256"),
    (document(parameters={"rotary_threads": -64}), "is -64, and may be: 64 128 256"),
    (document(parameters={"rotary_threads": 1 << 40}), "is not an integer of nine digits at most"),
    (document(parameters={"rotary_threads": 64.5}), "64.5 is not an integer"),
    (document(parameters={"rotary_threads": "64"}), "no value, or none that JSON has"),
    (document(parameters=[64]), "'{' is missing"),
]
BROKEN = [
    ("", "'{' is missing"),
    ("{", "'\"' is missing"),
    ("null", "'{' is missing"),
    ('{"schema": 1', "'}' is missing"),
    ('{"schema": 1,}', "'\"' is missing"),
    ('{"schema": 01}', "a number starts with a zero"),
    ('{"schema": 1, "schema": 1}', '"schema" is there twice'),
    ('{"schema": 1,\n"gpu": "NVIDIA', "line 2: a string is not closed"),
    ('{"gpu": "\\x"}', "an escape that JSON has not"),
    ('{"measured": ' + "[" * 100, "nested too deep"),
    ('{"measured": nil}', "no value, or none that JSON has"),
    (json.dumps(document()) + "{}", "something follows the end"),
    (json.dumps(document()) + " " * (1 << 20), "it has more than a megabyte"),
]


# NOTE: pytest tells children the test's name in an environment variable: no text of a megabyte.
@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(text, why, id=why)
        for text, why in [*((json.dumps(made), why) for made, why in BAD), *BROKEN]
    ],
)
def test_a_bad_file_is_named_and_nothing_of_it_is_taken(library: Path, tmp_path, text, why):
    path = tmp_path / FILE
    path.write_text(text)
    lines, errors = said(library, "seen", FUSELAGE_TUNING_DIR=str(tmp_path))
    assert lines == [seen()]
    assert len(errors) == 1
    assert errors[0].startswith(f"fuselage: warning: {path} is not used: ")
    assert why in errors[0]
    if len(text) < 1 << 20:
        assert check_tuning.problems(path)


def test_a_folder_in_place_of_a_file_is_a_warning(library: Path, tmp_path: Path):
    (tmp_path / FILE).mkdir()
    lines, errors = said(library, "seen", FUSELAGE_TUNING_DIR=str(tmp_path))
    assert lines == [seen()]
    assert "it cannot be read" in errors[0]
    lines, errors = said(library, "seen", FUSELAGE_TUNING_DIR="x" * 5000)
    assert lines == [seen()]
    assert "it cannot be opened" in errors[0]


def test_a_good_file_keeps_to_the_schema_and_is_taken_with_every_value(library, tmp_path):
    path = tmp_path / FILE
    for name, value in VALUES[:: max(1, len(VALUES) // 8)]:
        path.write_text(json.dumps(document(parameters={name: value}), indent=2))
        lines, errors = said(library, "seen", FUSELAGE_TUNING_DIR=str(tmp_path))
        assert (lines, errors) == ([seen(**{name: value})], [])
    odd = {"a": [1, -0.5e-3, {"b": []}, True, None, 'é \\ " \n']}
    path.write_text(json.dumps(document(measured=odd)))
    assert said(library, "seen", FUSELAGE_TUNING_DIR=str(tmp_path))[1] == []


def test_spoilt_files_are_refused_or_have_values_that_kernels_know(library: Path):
    assert said(library, "spoil", GPU, json.dumps(document(measured={"a": [1.5, "b"]}))) == (
        ["ok"],
        [],
    )


def test_a_file_is_read_once(library: Path, tmp_path: Path):
    lines, errors = said(library, "threads", FUSELAGE_LOG="info")
    assert lines == ["4 queries, 0 of device 64, 0 wrong"]
    assert len(errors) == 4
    (tmp_path / FILE).write_text(json.dumps(document()))
    before, kept, line, after = said(library, "again", GPU, tmp_path)[0]
    assert before == kept == seen(qk_norm_turns=2)
    assert line == f"{GPU}: the launch policy of {tmp_path / FILE}: rotary_threads=128"
    assert after == seen(rotary_threads=128)


@pytest.mark.parametrize(
    "gpu", [GPU, "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090", "AMD Instinct(TM) MI300X ", ""]
)
def test_a_file_has_the_name_of_the_results_of_its_gpu(library: Path, monkeypatch, gpu: str):
    monkeypatch.setattr(results, "device_name", lambda device: gpu)
    assert said(library, "file name", gpu)[0] == [f"{results.slug('cuda')}.json"]


# what ships


def test_what_ships_was_measured_and_keeps_to_the_schema():
    assert check_tuning.main([]) == 0


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        (FILE, {}, None),
        ("h200.json", {}, "a NVIDIA H200 looks for nvidia-h200.json"),
        (FILE, {"parameters": {"rotary_threads": 64}}, "rotary_threads=64 was not measured"),
        (FILE, {"measured": {"by": "hand"}}, "tools/tune.py"),
    ],
)
def test_what_was_not_measured_is_refused(tmp_path: Path, capsys, name, changes, why):
    path = tmp_path / name
    path.write_text(json.dumps(document(**changes)))
    assert check_tuning.main([str(path)]) == (why is not None)
    assert (why or "") in capsys.readouterr().err


def test_the_page_says_what_shipped_won(tmp_path: Path):
    assert tables.tuning(tmp_path).startswith("No GPU has a file yet")
    made = document()
    made["measured"]["shapes"] = {
        "apply_rotary interleaved.fwd 1x2x4 bf16": {"built_in_us": 2.0, "tuned_us": 1.6}
    }
    (tmp_path / FILE).write_text(json.dumps(made))
    text = tables.tuning(tmp_path)
    assert "**NVIDIA H200**" in text and "`rotary_threads=128`" in text
    assert "| `apply_rotary interleaved.fwd` | 1x2x4 bf16 | 2.00 | 1.60 | 1.25x |" in text


def test_a_variant_has_the_files(tmp_path: Path):
    config = load(copy_sources(tmp_path / "checkout"))
    path = config.package_dir / "tuning" / "nvidia-l4.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    files = _package_files(config)
    assert files["tuning/nvidia-l4.json"] == b"{}"
    assert not any(name.endswith(".md") for name in files)


# the op


def test_a_cpu_has_no_tuning(fuselage):
    with pytest.raises(RuntimeError, match="read_tuning: a CPU has no launch policy"):
        fuselage.norm.ops.read_tuning(torch.empty(0))


@pytest.fixture
def policies(fuselage, tmp_path: Path, monkeypatch):
    """Lets the library read parameters; afterwards the ones that it came with."""
    monkeypatch.setenv("FUSELAGE_TUNING_DIR", str(tmp_path))
    on = torch.empty(0, device="cuda")

    def use(parameters: dict[str, int]) -> str:
        made = document(gpu=torch.cuda.get_device_name(), parameters=parameters)
        (tmp_path / f"{results.slug('cuda')}.json").write_text(json.dumps(made))
        return fuselage.norm.ops.read_tuning(on)

    yield use
    monkeypatch.undo()
    fuselage.norm.ops.read_tuning(on)


def results_of(f, device: str) -> list[torch.Tensor]:
    """Of every kernel that has parameters: shapes on both sides of where they decide."""
    made = torch.Generator(device).manual_seed(1)
    found = []

    def randn(*sizes: int, dtype=torch.bfloat16) -> torch.Tensor:
        return torch.randn(sizes, generator=made, device=device).to(dtype)

    for dtype in (torch.bfloat16, torch.float32):
        for rows, dim in [(3, 64), (64, 512), (1024, 2048), (700, 4096), (9984, 2048), (2500, 200)]:
            x, y, weight = randn(rows, dim), randn(rows, dim), randn(dim)
            x, y, weight = (t.to(dtype).requires_grad_() for t in (x, y, weight))
            outs = (f.rms_norm(x, weight), *f.fused_add_rms_norm(x, y, weight))
            outs += (f.layer_norm(x, weight), f.swiglu(x, y), f.bias_act(x, weight, "silu"))
            found += [out.detach() for out in outs]
            found += torch.autograd.grad(
                outs, (x, y, weight), [randn(*o.shape).to(o.dtype) for o in outs]
            )
            found.append(f.rms_norm(x[:, 1:].detach(), None))
            found.append(f.silu(x[:, 1:].detach()))
    found.append(f.ada_layer_norm(randn(1, 32760, 1536), None, None))
    for batch, tokens, q, k, dim in [
        (1, 1, 32, 8, 128),
        (1, 512, 32, 32, 128),
        (2, 4096, 64, 8, 64),
    ]:
        heads = randn(batch, tokens, q, dim), randn(batch, tokens, k, dim)
        cos, sin = randn(tokens, dim), randn(tokens, dim)
        found += f.apply_rotary(*heads, cos, sin)
        found += f.qk_norm_rotary(*heads, randn(dim), randn(dim), cos, sin)
    for batch, vocab in [(1, 151936), (64, 151936), (300, 32000)]:
        logits = randn(batch, vocab)
        found.append(f.gumbel_sample(logits, seed=7))
        found += [t for t in f.gumbel_sample(logits, seed=7, return_logprobs=True) if t is not None]
        found.append(f.gumbel_sample(logits, seed=7, top_p=0.9))
    return found


@pytest.mark.parametrize("parameter", [*tune.TUNABLES] if "cuda" in DEVICES else [])
def test_no_value_changes_a_bit(fuselage, policies, parameter: str):
    assert policies({}).endswith("as built in")
    expected = results_of(fuselage, "cuda")
    for value in tune.TUNABLES[parameter]["enum"]:
        line = policies({parameter: value})
        is_built_in = value == tune.TUNABLES[parameter]["default"]
        assert line.endswith("as built in" if is_built_in else f"{parameter}={value}")
        for i, (tensor, same) in enumerate(
            zip(results_of(fuselage, "cuda"), expected, strict=True)
        ):
            assert_same_bits(tensor, same, f"result {i} with {parameter}={value}")


@pytest.mark.parametrize("device", ["cuda"] if "cuda" in DEVICES else [])
def test_a_bad_file_leaves_a_gpu_as_built_in(fuselage, policies, device: str, capfd):
    assert policies({"rotary_threads": 96}).endswith("the built-in launch policy")
    assert "rotary_threads" in capfd.readouterr().err


# the tuner


class MadeUp:
    """Times of a GPU on which some values are better, or seem to be until they are measured again.

    `fails`: with the values of other parameters ("again"), or with none ("built in").
    """

    def __init__(self, effects: dict[tuple[str, int], float], fails: str = "", worst: float = 1.0):
        self.effects, self.fails, self.worst = effects, fails, worst

    def __call__(self, case, choices) -> list[float]:
        kind = "" if len(choices) != 2 else "again" if choices[0] else "built in"
        times = []
        for choice in choices:
            us = 100.0
            for name, value in choice.items():
                effect = self.effects.get((name, value), 1.0)
                if kind and kind == self.fails:
                    effect = 1.0
                us *= self.worst if effect < 1 and case.shape.sizes[0] == 64 else effect
            times.append(us)
        return times


def tuned(measure: MadeUp) -> tune.Outcome:
    return tune.tune(tune.FAMILIES, [*tune.TUNABLES], measure, log=lambda line: None)


def test_the_tuner_takes_what_wins_and_nothing_else():
    outcome = tuned(
        MadeUp(
            {
                ("rotary_threads", 64): 0.97,
                ("rotary_threads", 128): 0.9,
                ("qk_norm_turns", 2): 0.99,
                ("sample_turns", 8): 1.3,
            }
        )
    )
    assert outcome.parameters == {"rotary_threads": 128}
    assert outcome.tried["rotary_threads"]["128"]["mean"] < 0.95
    assert set(outcome.tried) == set(tune.TUNABLES)
    assert len(outcome.shapes) == len(tune.FAMILIES["apply_rotary"].cases)
    for us in outcome.shapes.values():
        assert us["tuned_us"] <= us["built_in_us"] == 100.0


def test_what_wins_only_once_or_loses_on_one_shape_is_not_taken():
    effects = {("rotary_threads", 128): 0.9}
    for fails in ("again", "built in"):
        outcome = tuned(MadeUp(effects, fails))
        assert (outcome.parameters, outcome.shapes) == ({}, {})
    assert tuned(MadeUp(effects, worst=1.1)).parameters == {}
    assert tuned(MadeUp(effects)).parameters == {"rotary_threads": 128}


def test_what_the_tuner_writes_is_what_the_library_reads(library: Path, tmp_path: Path):
    outcome = tuned(MadeUp({("sample_turns", 8): 0.8}))
    origin = {"date": "2026-11-24", "commit": "a" * 40, "kernel": "_fuselage_cuda_0123456"}
    versions = {"torch": "2.13.0", "cuda": "13.0", "triton": None}
    path = tmp_path / FILE
    path.write_text(json.dumps(tune.document_of(outcome, GPU, versions, origin), indent=2))
    assert check_tuning.problems(path) == []
    lines, errors = said(library, "seen", FUSELAGE_TUNING_DIR=str(tmp_path))
    assert (lines, errors) == ([seen(sample_turns=8)], [])


class MadeUpTimer:
    """In place of CudaTimer: what was captured n-th takes n microseconds."""

    def __init__(self):
        self.captured = 0

    def prepare(self, case): ...
    def release(self): ...
    def sets(self, case) -> int:
        return 2

    def contender(self, case, call, checked: bool):
        call(1)
        self.captured += 1
        return lambda us=float(self.captured): [us]


TINY = tune.Family(
    ("rotary_threads",),
    (
        ("rms_norm", "fwd", (4, 64)),
        ("swiglu", "bwd", (4, 64)),
        ("apply_rotary", "fwd", (1, 3, 2, 1, 8)),
        ("gumbel_sample", "fwd", (2, 100)),
    ),
)


@pytest.mark.parametrize("case", tune.cases_of(TINY), ids=lambda case: case.operator.name)
def test_a_case_is_timed_under_each_policy_and_its_bits_compared(
    fuselage, tmp_path, monkeypatch, case
):
    monkeypatch.setenv("FUSELAGE_TUNING_DIR", "")
    gpu = tune.Gpu(fuselage, tmp_path, MadeUpTimer(), "cpu")
    used = []
    monkeypatch.setattr(gpu, "use", used.append)
    choices = [{"rotary_threads": 256}, {"rotary_threads": 128}]
    assert gpu.times(case, choices) == [1.0, 2.0]
    assert used == choices

    def other_inputs(parameters):
        for inputs in sets:
            inputs[0][0].data.neg_()

    sets = []
    make_set = tune.make_set
    monkeypatch.setattr(tune, "make_set", lambda *of: sets.append(make_set(*of)) or sets[-1])
    monkeypatch.setattr(gpu, "use", other_inputs)
    with pytest.raises(tune.ChangedBits, match=case.operator.name):
        gpu.times(case, choices)


def test_a_policy_that_the_library_does_not_take_is_an_error(fuselage, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSELAGE_TUNING_DIR", "")
    gpu = tune.Gpu(fuselage, tmp_path, MadeUpTimer(), "cpu")
    line = f"a GPU: the launch policy of {gpu.file}: rotary_threads=64"
    ops = SimpleNamespace(read_tuning=lambda on: line)
    monkeypatch.setattr(sys.modules[f"{fuselage.__name__}._ops"], "ops", ops)
    gpu.use({"rotary_threads": 64, "qk_norm_turns": 4})
    written = json.loads(gpu.file.read_text())
    assert written["parameters"] == {"rotary_threads": 64, "qk_norm_turns": 4}
    with pytest.raises(RuntimeError, match=r"did not take .*128"):
        gpu.use({"rotary_threads": 128})


def test_the_tuners_shapes_are_operators_of_the_benchmarks():
    for family in tune.FAMILIES.values():
        assert set(family.parameters) <= {*tune.TUNABLES}
        for case in tune.cases_of(family):
            assert case.bytes > 0
    tuned_here = [name for family in tune.FAMILIES.values() for name in family.parameters]
    assert tuned_here == [*tune.TUNABLES]


def test_without_a_gpu_the_tuner_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 1
    assert "PyTorch sees no GPU" in capsys.readouterr().err
