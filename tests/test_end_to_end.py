"""benchmarks/end_to_end runs at reduced size, verifies before it times, and writes its results."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
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


@pytest.mark.slow
def test_it_verifies_times_and_writes(main, tmp_path, capsys):
    names = ["llama-prefill", "llama-decode", "llama-training", "bert", "modernbert"]
    if find_spec("diffusers"):
        names += ["ltx-video", "flux", "flux2", "qwen-image", "wan"]
        names += ["sdxl-unet", "sdxl-vae", "flux-vae-channels-last"]
    path = tmp_path / "results.json"
    options = [*OPTIONS, "--output", str(path)]
    assert main(options + [option for name in names for option in ("--only", name)]) == 0
    stored = json.loads(path.read_text())
    assert list(stored["cases"]) == names and stored["environment"]["transformers"]
    for case in stored["cases"].values():
        assert case["verified"] and case["replaced"] and case["kernel"]
        assert list(case["columns"]) == ["eager", "eager + fuselage"]
        shares = [column["breakdown"]["fuselage"] for column in case["columns"].values()]
        assert shares[0] == 0 < shares[1]
        assert all(column["milliseconds"]["median"] > 0 for column in case["columns"].values())
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| eager")]
    assert len(rows) == 2 * len(names)


def believe_every_norm(norms, monkeypatch) -> None:
    """Lets `patch` replace norms without looking at what they compute."""
    probe = SimpleNamespace(**vars(norms._probe))
    probe.agree = probe.same_slopes = lambda *args: True
    monkeypatch.setattr(norms, "_probe", probe)


@pytest.mark.long
def test_it_does_not_time_what_is_wrong(main, fuselage, monkeypatch, capsys):
    assert fuselage.integrations.transformers
    norms = sys.modules[fuselage.__name__ + ".integrations._norms"]
    right = norms.rms_norm
    monkeypatch.setattr(norms, "rms_norm", lambda *args, **kw: 1.01 * right(*args, **kw))
    believe_every_norm(norms, monkeypatch)
    monkeypatch.setattr(norms, "_found", {})
    assert main([*OPTIONS, "--only", "llama-prefill"]) == 1
    output = capsys.readouterr().out
    assert "FAILED: not timed" in output and "| eager + fuselage" not in output


@pytest.fixture
def scenarios(main):
    from benchmarks.end_to_end import scenarios

    return scenarios


class Smaller:
    """The scenarios of `--quick` for those of full size; the one to be timed is in bfloat16."""

    def __init__(self, factory):
        self.factory = factory
        self.calls = []

    def __call__(self, device, quick, layers, exact=False):
        self.calls.append((layers, exact))
        scenario = self.factory(device, True, layers)
        if not exact:
            scenario.model.to(torch.bfloat16)
        return scenario


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.slow
def test_full_size_is_verified_in_float32(main, scenarios, fuselage, monkeypatch, capsys, right):
    """Layers in bfloat16 are farther apart than the strict limit, though nothing is wrong."""
    from benchmarks.end_to_end import cli

    smaller = Smaller(scenarios.SCENARIOS["llama-prefill"])
    monkeypatch.setitem(scenarios.SCENARIOS, "llama-prefill", smaller)
    if not right:
        assert fuselage.integrations.transformers
        norms = sys.modules[fuselage.__name__ + ".integrations._norms"]
        rms_norm = norms.rms_norm
        monkeypatch.setattr(norms, "rms_norm", lambda *args, **kw: 1.001 * rms_norm(*args, **kw))
        believe_every_norm(norms, monkeypatch)
        monkeypatch.setattr(norms, "_found", {})
    options = cli.parse_arguments(["--seconds", "0.01", "--no-compile"])
    exact = cli.exact_error("llama-prefill", fuselage, "cpu")
    assert (exact <= cli.EXACT_LIMIT) == right
    scenario = smaller("cpu", False, 12)
    record = cli.run(scenario, fuselage.integrations.transformers, options, "cpu", exact)
    assert smaller.calls == [(cli.EXACT_LAYERS, True), (12, False)]
    assert record["verified"] == right and record["float32_error"] == exact
    assert record["error"] > cli.EXACT_LIMIT
    assert ("FAILED: not timed" in capsys.readouterr().out) == (not right)


@pytest.mark.slow
def test_what_is_wrong_when_compiled_is_left_out(main, scenarios, fuselage, capsys):
    from benchmarks.end_to_end import cli

    scenario = scenarios.prefill("cpu", True, 1)

    def off(**inputs):
        return SimpleNamespace(logits=1.01 * scenario.model(**inputs).logits)

    scenario.compiled = lambda: (off, lambda: None)
    options = cli.parse_arguments(["--quick", "--seconds", "0.01"])
    record = cli.run(scenario, fuselage.integrations.transformers, options, "cpu", None)
    assert not record["verified"] and list(record["columns"]) == ["eager", "eager + fuselage"]
    assert capsys.readouterr().out.count("FAILED: torch.compile") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-prefill-whole", "olmo2-training-whole"])
def test_models_compiled_whole(main, tmp_path, name):
    path = tmp_path / "results.json"
    options = ["--quick", "--device", "cpu", "--only", name, "--output", str(path)]
    assert main(options) == 0
    (case,) = json.loads(path.read_text())["cases"].values()
    assert len(case["columns"]) == 4 and "compiled whole" in case["notes"]
    assert all(column["error"] <= 1e-4 for column in case["columns"].values())


@pytest.mark.long
def test_what_is_before_a_step_is_not_timed(main, scenarios, monkeypatch):
    from benchmarks.end_to_end import measure

    order = []
    prepare = lambda: (order.append("before"), time.sleep(0.03))  # noqa: E731
    found = measure.times(lambda: order.append("step"), "cpu", 0.0, least=3, before=prepare)
    assert order == ["before", "step"] * 5 and max(found) < 20
    rewinds = []
    scenario = scenarios.decode("cpu", True, 1)
    scenario.before()
    monkeypatch.setattr(scenarios, "_rewind", lambda *args: rewinds.append(args))
    scenario.step(scenario.model)
    assert not rewinds
    scenario.before()
    assert len(rewinds) == 1


def test_the_breakdown_counts_no_kernel_twice(main, monkeypatch):
    """A user's annotation on a GPU has the time of the kernels under it."""
    from benchmarks.end_to_end import measure

    cuda = torch.autograd.DeviceType.CUDA
    shared = {"device_type": cuda, "self_device_time_total": 2e3}
    events = [
        SimpleNamespace(key="gemm", is_user_annotation=False, **shared),
        SimpleNamespace(key="Optimizer.step#AdamW.step", is_user_annotation=True, **shared),
    ]
    profile = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(profile))
    monkeypatch.setattr(measure, "wait", lambda device: None)
    found = measure.breakdown(lambda: None, "cuda")
    assert found["matmul"] == 2 and sum(found.values()) == 2


@pytest.mark.slow
def test_a_column_that_runs_out_of_memory_ends_no_other(main, monkeypatch, tmp_path, capsys):
    from benchmarks.end_to_end import measure

    times, calls = measure.times, []

    def second_fails(*args, **keywords):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return times(*args, **keywords)

    monkeypatch.setattr(measure, "times", second_fails)
    path = tmp_path / "results.json"
    assert main([*OPTIONS, "--only", "llama-prefill", "--output", str(path)]) == 0
    columns = json.loads(path.read_text())["cases"]["llama-prefill"]["columns"]
    assert list(columns) == ["eager"] and len(calls) == 3
    assert "eager + fuselage is left out" in capsys.readouterr().out


def test_a_cpu_times_nothing_of_full_size(main):
    assert main(["--device", "cpu", "--only", "ltx-video"]) == 2


LOSSES = ("llama-training-loss", "qwen3-4b-training-loss")


@pytest.mark.slow
def test_training_steps_with_and_without_the_fused_loss(main, tmp_path, capsys):
    path = tmp_path / "results.json"
    options = [*OPTIONS, "--batch-seconds", "600", "--output", str(path)]
    assert main(options + [option for name in LOSSES for option in ("--only", name)]) == 0
    stored = json.loads(path.read_text())["cases"]
    for name in LOSSES:
        case = stored[name]
        assert case["verified"] and case["error"] <= 1e-4
        assert list(case["columns"]) == ["eager", "eager + fuselage", "eager + fuselage + loss"]
        shares = [column["breakdown"]["fuselage"] for column in case["columns"].values()]
        assert shares[0] == 0 < shares[1]
        found = case["largest_batch"]["sequences"]
        assert list(found) == ["eager", "eager + fuselage + loss"]
        assert all(ends == {"fits": 4, "fails": None} for ends in found.values())
    assert capsys.readouterr().out.count("4 fit, more may") == 2 * len(LOSSES)


@pytest.mark.slow
def test_float8_linears_have_a_limit_of_their_own(main, tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.json"
    options = [*OPTIONS, "--only", "qwen3-prefill-fp8", "--output", str(path)]
    assert main(options) == 0
    (case,) = json.loads(path.read_text())["cases"].values()
    assert list(case["columns"]) == ["eager", "eager + fuselage", "eager + fuselage + fp8"]
    errors = [column["error"] for column in case["columns"].values()]
    assert errors[1] <= 1e-4 < errors[2]
    from benchmarks.end_to_end import cli

    monkeypatch.setattr(cli, "ROUGH_LIMIT", 1e-3)
    assert main(options) == 1 and "FAILED: not timed" in capsys.readouterr().out


def test_a_peer_replaces_the_same_linears_and_puts_them_back(main, fuselage, monkeypatch):
    """torchao stands for itself here: a function that changes weights in place, as it does."""
    from benchmarks.end_to_end import cli, peers
    from benchmarks.end_to_end.scenarios import SCENARIOS

    def quantised(model, names):
        for name in names:
            linear = model.get_submodule(name)
            linear.weight = torch.nn.Parameter(linear.weight.detach() * 0, requires_grad=False)
            linear.extra_repr = lambda: "other"

    monkeypatch.setattr(peers, "quantised_by_torchao", quantised)
    scenario = SCENARIOS["qwen3-prefill-fp8"]("cpu", True, 1)
    integration = getattr(fuselage.integrations, scenario.integration)
    before = {name: id(p) for name, p in scenario.model.named_parameters()}
    plain = str(scenario.model)
    (expected,) = scenario.outputs(scenario.model)
    with cli.state(scenario, integration, "eager + torchao") as call:
        now = {name: id(p) for name, p in scenario.model.named_parameters()}
        changed = {name for name in now if now[name] != before[name]}
        assert len(changed) == 7 and all(".layers." in name for name in changed)
        assert not torch.equal(scenario.outputs(call)[0], expected)
    assert {name: id(p) for name, p in scenario.model.named_parameters()} == before
    assert str(scenario.model) == plain
    assert torch.equal(scenario.outputs(scenario.model)[0], expected)


@pytest.mark.slow
def test_the_fused_loss_compiled(main, tmp_path):
    path = tmp_path / "results.json"
    options = ["--quick", "--device", "cpu", "--no-breakdown", "--output", str(path)]
    assert main([*options, "--only", LOSSES[0], "--layers", "1"]) == 0
    (case,) = json.loads(path.read_text())["cases"].values()
    assert list(case["columns"])[3:] == [
        "torch.compile",
        "torch.compile + fuselage",
        "torch.compile + fuselage + loss",
    ]
    assert "1 of 2 layers" in case["notes"] and "compiled whole" in case["notes"]
    for column in case["columns"].values():
        assert column["error"] <= 1e-4 and column["runs"] >= 5 and "breakdown" not in column


@pytest.mark.long
@pytest.mark.parametrize("mistake", ["the gradient of the head", "no loss is taken"])
def test_a_wrong_or_missing_loss_is_not_timed(main, fuselage, monkeypatch, capsys, mistake):
    integration = fuselage.integrations.transformers
    loss = sys.modules[fuselage.__name__ + ".integrations._loss"]
    if mistake == "no loss is taken":
        monkeypatch.setattr(integration, "recognise_causal_loss", lambda module: None)
    else:
        right = loss.linear_cross_entropy

        def without(hidden, weight, *args, **keywords):
            return right(hidden, weight.detach(), *args, **keywords) + 0.0 * weight.sum()

        monkeypatch.setattr(loss, "linear_cross_entropy", without)
    assert main([*OPTIONS, "--only", LOSSES[0]]) == 1
    output = capsys.readouterr().out
    assert "FAILED: not timed" in output and "| eager" not in output


def test_the_shape_of_qwen3_4b(main, scenarios):
    """4.02 billion weights, the head's counted once."""
    model, title, notes = scenarios.causal_model("meta", False, None, False, kind="Qwen3-4B")
    assert title == "Qwen3-4B shape, bf16" and not notes
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert sum(weight.numel() for weight in model.parameters()) == 4_022_468_096


@pytest.fixture
def batch(main):
    from benchmarks.end_to_end import batch

    return batch


def step_with_room_for(room: int, tried: list[int], error: Exception | None = None):
    def run(sequences: int) -> None:
        tried.append(sequences)
        if sequences > room:
            raise error or torch.OutOfMemoryError("no memory")

    return run


@pytest.mark.parametrize("room", [0, 1, 5, 7, 8, 9, 15, 31, 100, 1000, 5000])
def test_the_largest_batch(batch, monkeypatch, room):
    monkeypatch.setattr(batch.measure, "free", lambda device: None)  # 0.3 s of collecting garbage
    tried = []
    run = step_with_room_for(room, tried)
    found = batch.largest(batch.Batches(run, 16, first=8, most=1024), "cpu", 60.0)
    fits, fails = found["fits"], found["fails"]
    assert fits <= room and fits in (0, *tried) and len(tried) <= 14
    if room >= 1024:
        assert found == {"fits": 1024, "fails": None}
    else:
        assert fits >= room * 15 // 16 and room < fails <= max(fits + 1, fits + fits // 16)
        assert fails in tried


@pytest.mark.long
def test_the_search_for_the_largest_batch_ends_in_time(batch):
    tried = []
    run = step_with_room_for(100, tried)
    found = batch.largest(batch.Batches(run, 16, first=8, most=1024), "cpu", 0.0)
    assert tried == [8] and found == {"fits": 8, "fails": None}


def test_only_a_lack_of_memory_says_that_a_batch_does_not_fit(batch):
    driver = RuntimeError("CUDA driver error: out of memory")
    assert not batch.has_room(lambda: step_with_room_for(0, [], driver)(1), "cpu")
    other = RuntimeError("sizes do not match")
    with pytest.raises(RuntimeError, match="sizes"):
        batch.has_room(lambda: step_with_room_for(0, [], other)(1), "cpu")


def test_a_batch_without_room_leaves_no_gradients(main, scenarios):
    scenario = scenarios.training_loss("cpu", True, 1)
    shapes = []

    def run_out(module, grad_input, grad_output):
        shapes.append(grad_output[0].shape[:2])
        assert scenario.model.get_output_embeddings().weight.grad is not None
        raise torch.OutOfMemoryError("no memory")

    scenario.model.model.layers[0].register_full_backward_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        scenario.batches.run(3)
    assert shapes == [(3, scenario.batches.tokens)]
    assert all(weight.grad is None for weight in scenario.model.parameters())


@pytest.mark.long
def test_the_search_runs_the_plain_model_and_the_last_variant(main, scenarios, fuselage):
    from benchmarks.end_to_end import cli

    scenario = scenarios.training_loss("cpu", True, 1)
    patched = []
    scenario.batches.run = lambda sequences: patched.append("forward" in vars(scenario.model))
    scenario.batches.most = scenario.batches.first
    found = cli.largest_batches(scenario, fuselage.integrations.transformers, 60.0, "cpu")
    assert patched == [False, True]
    ends = {"fits": 2, "fails": None}
    searched = {"eager": ends, "eager + fuselage + loss": ends}
    assert found == {"largest_batch": {"tokens": 64, "sequences": searched}}


def test_columns_take_turns(main, scenarios, fuselage, monkeypatch):
    """All but the last before it and after it, and as long."""
    from benchmarks.end_to_end import cli, measure

    turns = []

    def times(run, device, seconds, **keywords):
        turns.append(seconds)
        return [seconds]

    monkeypatch.setattr(measure, "times", times)
    scenario = scenarios.training_loss("cpu", True, 1)
    names = ("eager", "eager + fuselage", "eager + fuselage + loss")
    expected = scenario.outputs(scenario.model)
    integration = fuselage.integrations.transformers
    columns = cli.timed(scenario, integration, names, 2.0, "cpu", expected)
    assert turns == [1.0, 1.0, 2.0, 1.0, 1.0]
    assert [column["runs"] for column in columns.values()] == [2, 2, 1]
    assert "forward" not in vars(scenario.model)


def test_the_tables_of_the_fused_loss(main):
    from benchmarks.end_to_end import report

    def column(milliseconds, gib):
        times = dict.fromkeys(("median", "min", "max"), milliseconds)
        return {"milliseconds": times, "peak_gib": gib, "runs": 5, "error": 0.0}

    plain = {"title": "A model", "notes": ["2 of 32 layers"], "per_sample": 1}
    plain["columns"] = {"eager": column(30.0, 20.0), "eager + fuselage": column(20.0, 20.0)}
    found = {
        "eager": {"fits": 5, "fails": 6},
        "eager + fuselage + loss": {"fits": 9, "fails": None},
    }
    loss = {**plain, "largest_batch": {"tokens": 64, "sequences": found}}
    loss["columns"] = {**plain["columns"], "eager + fuselage + loss": column(15.0, 10.0)}
    others = report.summary({"some-training": plain})
    both = report.summary({"some-training": plain, "some-training-loss": loss})
    table = both.removeprefix(f"{others}\n\n")
    assert "| `some-training` | A model (2 of 32 layers) | 30.0 | 20.0 | 1.50x |" in others
    assert table != both
    assert table.splitlines()[-3:] == [
        "| eager | 30.0 |  | 20.0 | 5 fit, 6 do not |",
        "| eager + fuselage | 20.0 | 1.50x | 20.0 |  |",
        "| eager + fuselage + loss | 15.0 | 2.00x | 10.0 | 9 fit, more may |",
    ]
    assert "A model (2 of 32 layers):" in table
    assert report.table(loss).endswith(
        "tokens: eager: 5 fit, 6 do not; eager + fuselage + loss: 9 fit, more may."
    )
