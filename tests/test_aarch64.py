"""The CPU kernels on aarch64, cross-compiled and emulated: values and gradients of each family.

Where Debian's g++-aarch64-linux-gnu and qemu-user-static are (CI installs them); skipped elsewhere.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO_DIR
from filelock import FileLock  # Torch needs it
from harness import (
    DTYPES,
    assert_close,
    compare_gradients,
    normal,
    random_grad_outs,
)
from operators import FUSED_ADD_RMS_NORM, LAYER_NORM, POLY_NORM, SWIGLU

sys.path += [str(REPO_DIR / "tests/loss"), str(REPO_DIR / "tests/route")]

import loss_reference
import route_reference

COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # kernel_src/common/dtype.h
ROWS, DIMS = 9, (5, 64, 131)
EPS = 1e-5

# Slow: half a minute of compiling before the first.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (COMPILER and EMULATOR), reason="no aarch64 compiler and emulator"),
]


@pytest.fixture(scope="session")
def probe(tmp_path_factory, worker_id) -> Path:
    """cpu_probe.cpp and every CPU kernel; compiled by the first of pytest's processes to ask."""
    if worker_id == "master":
        return compiled(tmp_path_factory.mktemp("aarch64"))
    folder = tmp_path_factory.getbasetemp().parent / "aarch64"
    with FileLock(f"{folder}.lock"):
        folder.mkdir(exist_ok=True)
        return folder / "probe" if (folder / "probe").is_file() else compiled(folder)


def compiled(folder: Path) -> Path:
    sources = [REPO_DIR / "tests/cpu_probe.cpp", *(REPO_DIR / "kernel_src").glob("*/*_cpu.cpp")]
    flags = ["-std=c++20", "-O3", "-Wall", "-Werror", "-static", f"-I{REPO_DIR / 'kernel_src'}"]
    compilers = [
        subprocess.Popen([COMPILER, *flags, "-c", source, "-o", folder / f"{source.stem}.o"])
        for source in sources
    ]
    codes = [compiler.wait() for compiler in compilers]
    assert not any(codes)
    program = folder / "probe"
    subprocess.run([COMPILER, "-static", *folder.glob("*.o"), "-o", program], check=True)
    return program


def run(probe: Path, name: str, shape, given: list, results: dict) -> dict[str, torch.Tensor]:
    """What the probe makes of the tensors `given`; results: name -> (shape, dtype)."""
    rows, dim = shape
    arguments = [name, NUMBERS[given[0].dtype], rows, dim, EPS]
    inputs = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in given)
    command = [EMULATOR, probe, *map(str, arguments)]
    done = subprocess.run(command, input=inputs, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found, start = {}, 0
    for result, (size, dtype) in results.items():
        end = start + torch.Size(size).numel() * dtype.itemsize
        data = bytearray(done.stdout[start:end])
        found[result] = torch.frombuffer(data, dtype=dtype).view(size)
        start = end
    assert start == len(done.stdout)
    return found


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "op", (FUSED_ADD_RMS_NORM, LAYER_NORM, SWIGLU, POLY_NORM), ids=lambda op: op.name
)
def test_values_and_gradients(probe, op, dtype, dim):
    inputs = op.inputs((ROWS, dim), dtype, "cpu")
    options = {} if op is SWIGLU else {"eps": EPS}
    expected = op.run_reference(inputs, options)
    grad_outs = random_grad_outs({name: t.to(dtype) for name, t in expected.items()})
    # One gradient stands for x and residual.
    wanted = [name for name in op.differentiable(inputs) if name != "residual"]
    results = {name: (t.shape, dtype) for name, t in expected.items()}
    results |= {f"grad_{name}": (inputs[name].shape, dtype) for name in wanted}
    given = [*inputs.values(), *grad_outs.values()]
    found = run(probe, op.name, (ROWS, dim), given, results)
    terms = op.run_output_terms(inputs, options)
    for name, value in expected.items():
        assert_close(found[name], value, name, terms=terms.get(name))
    actual = {name: found[f"grad_{name}"] for name in wanted}
    if "residual" in inputs:
        actual["residual"] = actual["x"]
    compare_gradients(op, inputs, options, grad_outs, actual, op.differentiable(inputs))


@pytest.mark.parametrize("dim", (2, 64, 130))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary(probe, dtype, dim):
    q = normal((ROWS, dim), dtype, "cpu")
    angles = normal((ROWS, dim // 2), torch.float64, "cpu").repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    results = {"out": (q.shape, dtype), "back": (q.shape, dtype)}
    found = run(probe, "apply_rotary", (ROWS, dim), [q, cos, sin], results)
    half = dim // 2
    for x, label, sign in ((q, "out", 1), (found["out"], "back", -1)):
        x, c, s = x.double(), cos.double(), sign * sin.double()
        turned = torch.cat((-x[:, half:], x[:, :half]), 1)
        terms = (x * c).abs() + (turned * s).abs()
        assert_close(found[label], x * c + turned * s, label, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampling_draws_what_this_machine_draws(probe, fuselage, dtype):
    logits = normal((50, 5001), dtype, "cpu", scale=2.0)
    found = run(probe, "gumbel_sample", (50, 5001), [logits], {"t": ((50,), torch.int64)})["t"]
    expected = fuselage.gumbel_sample(logits, seed=7)
    assert torch.equal(found, expected.view(-1))


# The options that cpu_probe.cpp has, and what it gives.
FLOATS = dict.fromkeys(("log_probs", "entropy", "log_sum_exp"), torch.float32)
LOSSES = {
    "cross_entropy": (
        {"reduction": "none", "label_smoothing": 0.125, "lse_square_scale": 0.25},
        {"losses": torch.float32},
    ),
    "log_probs": (
        {"temperature": 0.5, "logit_softcap": 4.0},
        {**FLOATS, "is_greatest": torch.bool},
    ),
}


@pytest.mark.parametrize("vocab", (5, 131, 5001))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(probe, name, dtype, vocab):
    options, dtypes = LOSSES[name]
    logits = normal((ROWS, vocab), dtype, "cpu", scale=3.0)
    targets = torch.randint(vocab, (ROWS,))
    targets[4] = -100  # ignored
    leaf = logits.double().requires_grad_()
    expected = getattr(loss_reference, name)(leaf, targets, **options)
    expected = (expected,) if torch.is_tensor(expected) else expected
    outs = [value for value in expected if value.requires_grad]
    grads = [torch.randn(ROWS) for _ in outs]
    (grad,) = torch.autograd.grad(outs, leaf, [g.double() for g in grads])
    results = {label: ((ROWS,), of) for label, of in dtypes.items()}
    results["grad_logits"] = (logits.shape, dtype)
    found = run(probe, name, logits.shape, [logits, targets, *grads], results)
    # Logits lie less than 30 apart: that is rounded.
    for label, value in zip(dtypes, expected):
        if value.requires_grad:
            assert_close(found[label], value.detach(), label, terms=torch.full((ROWS,), 30.0))
        else:
            assert torch.equal(found[label], value), label
    # In an exponential these are some 32 roundings of its own: twice what a term has.
    terms = 2 * sum(g.abs() for g in grads).max()
    assert_close(found["grad_logits"], grad, "gradient", terms=terms.expand_as(grad))


@pytest.mark.parametrize("experts", (16, 64, 132))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_choice_of_experts(probe, dtype, experts):
    logits, bias = normal((ROWS, experts), dtype, "cpu"), normal((experts,), torch.float32, "cpu")
    leaf = logits.double().requires_grad_()
    options = {"score": "sigmoid", "num_groups": 4, "topk_groups": 2}
    expected = route_reference.topk_softmax(leaf, 6, bias=bias, **options)
    assert (expected.gap > 1e-6).all()
    grad_weights = torch.randn(ROWS, 6)
    (grad,) = torch.autograd.grad(expected.weights, leaf, grad_weights.double())
    of_chosen = {"weights": ((ROWS, 6), torch.float32), "indices": ((ROWS, 6), torch.int64)}
    results = {**of_chosen, "grad_logits": (logits.shape, dtype)}
    found = run(probe, "topk_softmax", logits.shape, [logits, bias, grad_weights], results)
    assert torch.equal(found["indices"], expected.indices)
    assert_close(found["weights"], expected.weights.detach(), "weights")
    terms = 2 * grad_weights.abs().max()
    assert_close(found["grad_logits"], grad, "gradient", terms=terms.expand_as(grad))
