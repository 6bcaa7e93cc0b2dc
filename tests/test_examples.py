"""The examples run, small, and check themselves. (tests/test_demo.py has the demo.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO_DIR

EXAMPLES = REPO_DIR / "examples"


def run(name: str, *options: str, cwd: Path | str = "/") -> str:
    command = [sys.executable, EXAMPLES / name, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.long
def test_lora_mlp(fuselage):
    sizes = ["--tokens", "32", "--dim", "64", "--intermediate", "96", "--repeats", "2"]
    output = run("lora_mlp.py", *sizes, "--no-compile")
    assert [line.split()[0] for line in output.splitlines()[2:]] == ["eager", "fuselage"]


@pytest.mark.long
def test_train(fuselage):
    output = run("train.py", "--layers", "1", "--dim", "64", "--batch", "16", "--steps", "60")
    assert output.endswith("the loss is PyTorch's, and it fell\n")


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["fp8", "fp8_blockwise"])
def test_fp8(fuselage, recipe):
    pytest.importorskip("transformers")
    sizes = ["--layers", "1", "--tokens", "16", "--repeats", "1", "--keep", "*.down_proj"]
    output = run("fp8.py", *sizes, "--recipe", recipe)
    assert "left alone" in output and "linear: it is in `keep`" in output
    assert output.endswith("undone: the same bits as before\n")


@pytest.mark.long
def test_grpo(fuselage):
    output = run("grpo.py", "--dim", "32", "--group", "32", "--steps", "25")
    assert output.endswith("rollout and trainer agree bit for bit, and the reward rose\n")


@pytest.mark.slow
def test_dlrm(fuselage, tmp_path):
    sizes = ["--batch", "64", "--width", "32", "--dim", "8", "--categories", "50", "--steps", "20"]
    output = run("dlrm.py", *sizes, "--rows", "200", cwd=tmp_path)
    assert (tmp_path / "dlrm.png").stat().st_size > 1000
    assert "losses are at most" in output
    eager, fused = output.split("fuselage on ")
    assert "bias_act" in fused and "bias_act" not in eager  # in the profiler's table


@pytest.mark.long
def test_transformers_llama(fuselage):
    pytest.importorskip("transformers")
    sizes = ["--layers", "2", "--hidden", "128", "--tokens", "32", "--repeats", "2", "--steps", "4"]
    output = run("transformers_llama.py", *sizes, "--no-compile", "--patch")
    assert "loss after 4 steps" in output and "swiglu" in output
    assert [line.split()[0] for line in output.splitlines()[-2:]] == ["eager", "fuselage"]


@pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="parallelize_llama refuses it")
@pytest.mark.slow
def test_train_sequence_parallel(fuselage):
    pytest.importorskip("transformers")
    sizes = ["--layers", "2", "--hidden", "64", "--tokens", "16", "--vocab", "100", "--steps", "3"]
    ranks = ["--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks]
    command += [EXAMPLES / "train_sequence_parallel.py", *sizes]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 3 and "fused_add_rms_norm" in result.stdout


WATCHED = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[1:] = sys.argv[2:]
import transformers_llama as example
from transformers.models.llama import modeling_llama
timed = example.milliseconds
def watched(*args):
    print("timing", list(args[0]) if isinstance(args[0], dict) else args[0], end=" ")
    print("kernelized" if "forward" in vars(modeling_llama.apply_rotary_pos_emb) else "plain")
    return timed(*args)
example.milliseconds = watched
example.main()
"""


@pytest.mark.slow
def test_the_plain_llama_is_timed_before_kernelize_changes_it(fuselage):
    """Which replaces the rotary embedding of all Llamas at once."""
    pytest.importorskip("transformers")
    options = ["--layers", "1", "--hidden", "128", "--tokens", "16", "--steps", "1"]
    command = [sys.executable, "-c", WATCHED, EXAMPLES, *options, "--repeats", "1", "--no-compile"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert result.returncode == 0, result.stderr
    timings = [line for line in result.stdout.splitlines() if line.startswith("timing")]
    assert timings == ["timing eager plain", "timing fuselage kernelized"]


@pytest.mark.slow
def test_diffusers_ltx_video(fuselage):
    pytest.importorskip("diffusers")
    output = run("diffusers_ltx_video.py", "--layers", "2", "--steps", "2", "--no-compile")
    assert "after 2 steps the latents differ" in output and "gelu_tanh" in output
    assert [line.split()[0] for line in output.splitlines()[-2:]] == ["eager", "fuselage"]


@pytest.mark.long
def test_generate(fuselage):
    pytest.importorskip("transformers")
    sizes = ["--layers", "1", "--hidden", "128", "--vocab", "500", "--tokens", "6"]
    output = run("generate.py", *sizes, "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01")
    first, *times = output.splitlines()
    tokens = first.split(":")[1].split()
    assert len(tokens) == 6 and all(0 <= int(token) < 500 for token in tokens)
    assert [line.split()[0] for line in times] == ["plain", "fuselage"]


BROKEN = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[1:] = sys.argv[2:]
import {name} as example
load = example.load
def broken():
    kernel, device = load()
    class Kernel:
        bias_act = staticmethod(lambda *args: 1.5 * kernel.bias_act(*args))
        add_mul_act = staticmethod(lambda *args: 1.5 * kernel.add_mul_act(*args))
    return Kernel, device
example.load = broken
example.main()
"""


@pytest.mark.slow
def test_they_fail_where_the_operators_are_wrong(fuselage, tmp_path):
    for name, options in (
        ("lora_mlp", ["--tokens", "32", "--dim", "64", "--repeats", "1", "--no-compile"]),
        ("dlrm", ["--batch", "64", "--width", "32", "--steps", "20"]),
    ):
        command = [sys.executable, "-c", BROKEN.format(name=name), EXAMPLES, *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert result.returncode == 1, result.stdout + result.stderr
        assert "FAILED: " in result.stderr and "Traceback" not in result.stderr


BROKEN_NORM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[1:] = sys.argv[2:]
import transformers_llama as example
kernel, device = example.load()
right = kernel.norm.rms_norm
wrong = lambda *args, **options: 1.01 * right(*args, **options)
kernel.layers.rms_norm = wrong
example.load = lambda: (kernel, device)
example.main()
"""


@pytest.mark.slow
def test_a_model_fails_where_the_norms_are_wrong(fuselage):
    pytest.importorskip("transformers")
    # Through kernelize.
    options = ["--layers", "1", "--hidden", "128", "--steps", "1", "--no-compile"]
    command = [sys.executable, "-c", BROKEN_NORM, EXAMPLES, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED: " in result.stderr and "Traceback" not in result.stderr
