"""Norms with a gate that `patch` replaces, and those that only look like one."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from integrations.models import counted_ops
from torch import nn

DIM = 64
CLASSES = {  # of transformers, and what their constructors are given
    "bailing_hybrid.BailingHybridRMSNormGated": {},
    "bamba.BambaRMSNormGated": {},
    "falcon_h1.FalconH1RMSNormGated": {},
    "glm5_next.Glm5NextTextRMSNormGated": {},
    "granitemoehybrid.GraniteMoeHybridRMSNormGated": {},
    "kimi_linear.KimiLinearRMSNormGated": {},
    "mamba2.MambaRMSNormGated": {},
    "nemotron_h.NemotronHRMSNormGated": {"group_size": 16},
    "olmo_hybrid.OlmoHybridRMSNormGated": {},
    "qwen3_5.Qwen3_5RMSNormGated": {},
    "qwen3_next.Qwen3NextRMSNormGated": {},
    "zamba2.Zamba2RMSNormGated": {"group_size": 32},
}
CASES = [
    *CLASSES.items(),
    ("falcon_h1.FalconH1RMSNormGated", {"norm_before_gate": False}),
    ("falcon_h1.FalconH1RMSNormGated", {"n_groups": 4}),
    ("falcon_h1.FalconH1RMSNormGated", {"n_groups": 4, "norm_before_gate": False}),
]
each_case = pytest.mark.parametrize(("name", "given"), CASES, ids=lambda value: str(value))


def made(name: str, given: dict) -> nn.Module:
    pytest.importorskip("transformers")
    family, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(module, kind)
    size = inspect.signature(kind).parameters.get("group_size")
    if size is not None and size.default is size.empty:  # all of them from transformers 5.23 on
        given = {"group_size": 16, **given}
    norm = kind(DIM, eps=1e-5, **given)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm


def both(fuselage, plain: nn.Module) -> nn.Module:
    model = nn.Sequential(copy.deepcopy(plain))
    report = fuselage.integrations.transformers.patch(model)
    assert report.replaced == {"0": "gated_rms_norm"} and not report.left_alone, str(report)
    return model[0]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape, dtype=dtype), torch.randn(*shape, dtype=dtype)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_class_of_transformers(fuselage, name, given, dtype):
    """The results have the same roundings: few differ, by one."""
    plain = made(name, given).to(dtype)
    ours = both(fuselage, plain)
    for shape in ((3, 50, DIM), (40, DIM)):
        x, gate = rows(*shape, dtype=dtype)
        with counted_ops(fuselage) as counts:
            actual = ours(x, gate)
        assert counts["gated_rms_norm"] == 1
        expected = plain(x, gate)
        assert actual.dtype == dtype
        torch.testing.assert_close(
            actual, expected, rtol=2.5 * torch.finfo(dtype).eps + 1e-6, atol=1e-6
        )
        assert dtype == torch.float32 or (actual != expected).double().mean() < 0.03


@each_case
def test_gradients(fuselage, name, given):
    plain = made(name, given)
    ours = both(fuselage, plain)
    grads = []
    inputs, weights = rows(3, 5, DIM), torch.randn(3, 5, DIM)
    for norm in (plain, ours):
        x, gate = (t.clone().requires_grad_() for t in inputs)
        (norm(x, gate) * weights).sum().backward()
        grads.append((x.grad, gate.grad, norm.weight.grad))
    for expected, actual in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@each_case
def test_rows_and_gates_of_other_dtypes_and_shapes(fuselage, name, given):
    """What the operator does not take runs as before; a half-precision gate of float32 rows, as
    Mamba's scan has them, is exact in float32."""
    plain = made(name, given)
    ours = both(fuselage, plain)
    x, gate = rows(3, 5, DIM)
    for args in ((x.double(), gate), (x, gate[:1])):
        with counted_ops(fuselage) as counts:
            assert torch.equal(ours(*args), plain(*args))
        assert not counts
    with counted_ops(fuselage) as counts:
        actual = ours(x, gate.bfloat16())
    assert counts["gated_rms_norm"] == 1
    torch.testing.assert_close(actual, plain(x, gate.bfloat16()))


def test_results_in_the_dtype_of_the_weight(fuselage):
    """As Mamba 2 has them, and Qwen3-Next has not."""
    x, gate = rows(3, 5, DIM, dtype=torch.bfloat16)
    for name, is_taken in (
        ("mamba2.MambaRMSNormGated", 0),
        ("qwen3_next.Qwen3NextRMSNormGated", 1),
    ):
        plain = made(name, {})
        ours = both(fuselage, plain)
        with counted_ops(fuselage) as counts:
            assert ours(x, gate).dtype == plain(x, gate).dtype
        assert counts["gated_rms_norm"] == is_taken
    norm = made("mamba2.MambaRMSNormGated", {})
    assert torch.equal(both(fuselage, norm)(x), norm(x))  # without a gate


def test_names_of_arguments_stay(fuselage):
    plain = made("qwen3_next.Qwen3NextRMSNormGated", {})
    x, gate = rows(2, 3, DIM)
    ours = both(fuselage, plain)
    with counted_ops(fuselage) as counts:
        ours(hidden_states=x, gate=gate)
        ours(x, gate=gate)
    assert counts["gated_rms_norm"] == 2


class GatedNorm(nn.Module):
    """What the classes below vary."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(DIM) + 0.5), 1e-5

    def forward(self, x, gate):
        return self.formula(x.float(), gate.float(), self.weight.float()).to(x.dtype)

    def norm(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def formula(self, x, gate, weight):
        return weight * self.norm(x) * F.silu(gate)


class Tanh(GatedNorm):
    def formula(self, x, gate, weight):
        return weight * self.norm(x) * gate.tanh()


class Centred(GatedNorm):
    def formula(self, x, gate, weight):
        return weight * self.norm(x - x.mean(-1, keepdim=True)) * F.silu(gate)


class Detached(GatedNorm):
    """Its values are those of gated_rms_norm."""

    def formula(self, x, gate, weight):
        return weight * self.norm(x) * F.silu(gate).detach()


class OneMore(GatedNorm):
    def formula(self, x, gate, weight):
        return (1 + weight) * self.norm(x) * F.silu(gate)


class Rows(GatedNorm):
    """Over another dimension."""

    def norm(self, x):
        return x * torch.rsqrt(x.square().mean(-2, keepdim=True) + self.eps)


class EpsilonOutside(GatedNorm):
    def norm(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Dropping(GatedNorm):
    """In training alone it is something else."""

    def formula(self, x, gate, weight):
        return weight * self.norm(x) * F.dropout(F.silu(gate), 0.5, self.training)


OTHERS = [Tanh, Centred, Detached, OneMore, Rows, EpsilonOutside, Dropping]


def test_a_class_of_ones_own(fuselage):
    norm = GatedNorm()
    x, gate = rows(3, 5, DIM)
    torch.testing.assert_close(both(fuselage, norm)(x, gate), norm(x, gate))


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_what_computes_something_else_is_left_alone(fuselage, kind):
    norm = type(f"{kind.__name__}GatedNorm", (kind,), {})()  # one that the report is about
    report = fuselage.integrations.transformers.patch(nn.Sequential(norm.eval()))
    assert not report.replaced
    assert "than gated_rms_norm" in report.left_alone["0"]


def test_a_gate_of_one_tensor_is_no_norm(fuselage):
    """Modules of two tensors that are called otherwise are not in the report at all."""

    class Product(GatedNorm):
        def formula(self, x, gate, weight):
            return weight * x * gate

    report = fuselage.integrations.transformers.patch(nn.Sequential(Product()))
    assert not report.replaced and not report.left_alone
