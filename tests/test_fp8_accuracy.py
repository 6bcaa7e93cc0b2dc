"""`python -m benchmarks.fp8_accuracy`: what float8 linears cost models in accuracy."""

import json

import pytest
import torch

pytest.importorskip("transformers")

COLUMNS = ["bfloat16", "rowwise", "blockwise"]


@pytest.fixture
def benchmark(fuselage, monkeypatch):
    from benchmarks import fp8_accuracy

    monkeypatch.setattr(fp8_accuracy, "load_fuselage", lambda device: fuselage)
    monkeypatch.setattr(fp8_accuracy, "is_installed", lambda name: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return fp8_accuracy


def measured(benchmark, path, *options):
    arguments = ["--quick", "--tokens", "32", "--prompts", "2", "--new-tokens", "4", "--draws", "2"]
    assert benchmark.main([*arguments, *options, "--output", str(path)]) == 0
    return json.loads(path.read_text())["cases"]


def test_both_recipes_are_compared(benchmark, tmp_path, capsys):
    """Of all linears of the blocks, float8's errors being larger than bfloat16's."""
    case = measured(benchmark, tmp_path / "results.json", "--only", "Llama")["small Llama"]
    columns = case["columns"]
    assert list(columns) == COLUMNS and case["linears"] == 2 * 7
    half, *others = (columns[name]["error"] for name in COLUMNS)
    assert 0 < half < 0.03 and all(2 * half < error < 0.3 for error in others)
    assert all(0 <= c[share] <= 1 for c in columns.values() for share in ("likeliest", "greedy"))
    output = capsys.readouterr().out
    assert f"| small Llama, 2 draws: rowwise | {columns['rowwise']['error']:.2%} |" in output


def test_torchao_quantises_the_same_linears(benchmark, tmp_path, monkeypatch, capsys):
    """What it is given; the library itself is not installed here."""
    asked = []

    def quantised(model, names):
        asked.append(names)
        assert all(type(model.get_submodule(name)) is torch.nn.Linear for name in names)
        return model

    monkeypatch.setattr(benchmark, "is_installed", lambda name: True)
    monkeypatch.setattr(benchmark, "quantised_by_torchao", quantised)
    case = measured(benchmark, tmp_path / "results.json", "--only", "Llama")["small Llama"]
    columns = case["columns"]
    assert len(asked) == 2 and len(asked[0]) == 14
    assert all(".layers." in name for name in asked[0])
    assert columns["torchao, rowwise"] == columns["bfloat16"]  # patches were undone
    mean, noise = case["over_torchao"]
    assert mean > 2 and noise > 0
    assert f"Llama, 2 draws: {mean:.3f} ± {noise:.3f}." in capsys.readouterr().out


def test_weights_have_outliers(benchmark):
    """The same columns of each norm of the hidden state; Gemma's norms add one."""
    from benchmarks.end_to_end.scenarios import causal_model

    for kind in benchmark.KINDS:
        model, _, _ = causal_model("cpu", True, 2, False, kind=kind)
        benchmark.spread_weights(model)
        found = set()
        for layer in model.model.layers:
            weight = layer.input_layernorm.weight.detach()
            large = (weight + (kind == "Gemma3")).topk(benchmark.OUTLIER_COLUMNS + 1)
            assert large.values[-1] < 4 < large.values[-2]
            found.add(frozenset(large.indices[:-1].tolist()))
        assert len(found) == 1


def test_a_continuation_counts_up_to_the_first_difference(benchmark):
    def answers(continued):
        made = object.__new__(benchmark.Answers)
        made.logits = torch.tensor([[[0.0, 3.0], [4.0, 0.0]]])
        made.continued = torch.tensor(continued)
        return made

    compared = answers([[1, 2, 9, 4], [5, 6, 7, 8]]).compared(answers([[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert compared == {"error": 0.0, "likeliest": 1.0, "greedy": 6 / 8}
