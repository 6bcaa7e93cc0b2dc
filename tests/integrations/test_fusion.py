"""Forwards in which `patch` fuses norms with the additions and modulations around them."""

from __future__ import annotations

import copy
import inspect
import traceback

import pytest
import torch
from integrations.models import assert_close, counted_ops
from torch import nn

DIM = 16


class Block(nn.Module):
    """What the forwards below are made of."""

    is_set = True

    def __init__(self):
        super().__init__()
        self.norm, self.free = nn.LayerNorm(DIM), nn.LayerNorm(DIM, elementwise_affine=False)
        self.rms, self.mix = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, DIM)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5, 0.3)


# ---- what is fused, and the operators that it then calls ----


class SumThenNorm(Block):
    """As in Whisper."""

    def forward(self, x, y, scale, shift, gate):
        h = x + self.mix(y)
        residual = h
        h = self.norm(h)
        return residual, h


class NormOfASum(Block):
    """As in BERT."""

    def forward(self, x, y, scale, shift, gate):
        return self.rms(x + y)


class NormSumNorm(Block):
    """As in Gemma 2."""

    def __init__(self):
        super().__init__()
        self.post = nn.RMSNorm(DIM, eps=1e-3)
        nn.init.normal_(self.post.weight, 0.5, 0.3)

    def forward(self, x, y, scale, shift, gate):
        residual = x
        h = self.mix(y)
        h = self.post(h)
        h = residual + h
        residual = h
        h = self.rms(h)
        return residual, h


class NormSumNormInside(NormSumNorm):
    def forward(self, x, y, scale, shift, gate):
        return self.rms(self.post(y) + x)


class NormIsReadAgain(NormSumNorm):
    """The first norm is a result, too."""

    def forward(self, x, y, scale, shift, gate):
        n = self.post(y)
        h = x + n
        return self.rms(h), h, n


class NormedChanges(NormSumNorm):
    """What the first norm reads has another value by the sum."""

    def forward(self, x, y, scale, shift, gate):
        n = self.post(y)
        y = y * 3
        h = x + n
        return self.rms(h), h, y


class Modulated(Block):
    def forward(self, x, y, scale, shift, gate):
        return self.free(x) * (1 + scale) + shift


class ModulatedTheOtherWayRound(Block):
    def forward(self, x, y, scale, shift, gate):
        return shift + (scale + 1.0) * self.norm(x)


class ModulatedWithoutAShift(Block):
    """As in Lumina."""

    def forward(self, x, y, scale, shift, gate):
        return self.mix(self.rms(x) * (1 + scale))


class ModulatedLater(Block):
    """As in LTX-Video."""

    def forward(self, x, y, scale, shift, gate):
        n = self.free(x)
        scale, shift = scale * 2, shift - 1
        n = n * (1 + scale) + shift
        return n


class ModulatedByRows(Block):
    """As in AuraFlow."""

    def forward(self, x, y, scale, shift, gate):
        scale, shift = scale[:, 0], shift[:, 0]
        a = self.free(x) * (1 + scale)[:, None, :] + shift[:, None, :]
        return a, self.free(y) * (1 + scale).unsqueeze(1) + shift.unsqueeze(1)


class ModulatedTwice(Block):
    """As in Stable Diffusion 3.5, which gives the norm's input another meaning in between."""

    def forward(self, x, y, scale, shift, gate):
        n = self.free(x)
        x = n * (1 + scale) + shift
        other = n * (1 + shift) + scale
        return x, other


class Gated(Block):
    """As in Flux."""

    def forward(self, x, y, scale, shift, gate):
        y = self.mix(y)
        y = gate * y
        h = x + y
        n = self.free(h)
        n = n * (1 + scale) + shift
        return h + self.mix(n) * gate


class GatedInside(Block):
    """As in AuraFlow."""

    def forward(self, x, y, scale, shift, gate):
        return self.free(x + gate * y) * (1 + scale) + shift


class GatedWithoutModulation(Block):
    """As in CogView 4."""

    def forward(self, x, y, scale, shift, gate):
        x = x + gate * y
        return self.norm(x)


class Cast(Block):
    """As in Wan, whose modulation is in float32."""

    def forward(self, x, y, scale, shift, gate):
        scale, shift, gate = scale.float(), shift.float(), gate.float()
        n = (self.free(x.float()) * (1 + scale) + shift).type_as(x)
        x = (x.float() + self.mix(n) * gate).type_as(x)
        n = self.free(x.float()).type_as(x)
        x = x + n * y
        n = (self.free(x.float()) * (1 + shift) + scale).type_as(x)
        return (x.float() + n.float() * gate).type_as(x)


class Either(Block):
    """As in GPT-2 with and without cross-attention."""

    condition = True

    def forward(self, x, y, scale, shift, gate):
        h = x + y
        if self.condition:
            residual = h
            h = residual + self.mix(h)
        residual = h
        h = self.norm(h)
        return residual, h


class Neither(Either):
    condition = False


class EitherGated(Block):
    """As in Stable Diffusion 3.5."""

    def forward(self, x, y, scale, shift, gate):
        y = gate * y
        x = x + y
        if scale is not None:
            x = x + gate * self.mix(x)
        n = self.free(x)
        n = n * (1 + scale) + shift
        return n, x


class GatedBesideAnAdaptiveNorm(nn.Module):
    """As in the single blocks of Flux."""

    class Norm(Block):
        def forward(self, x, scale, shift):
            return self.free(x) * (1 + scale) + shift

    def __init__(self):
        super().__init__()
        self.norm, self.mix = self.Norm(), nn.Linear(DIM, DIM)

    def forward(self, x, y, scale, shift, gate):
        residual = x
        x = self.norm(x, scale, shift)
        x = gate * self.mix(x + y)
        x = residual + x
        return x


class InABranch(Block):
    """As in PixArt."""

    def forward(self, x, y, scale, shift, gate):
        if gate is None:
            n = self.norm(x)
        elif scale is not None:
            n = self.free(x)
            n = n * (1 + scale) + shift
        return n


class Configured(Block):
    """What its attributes rule out is not fused, nor reported."""

    style = "late"

    def forward(self, x, y, scale, shift, gate):
        if self.style == "early" and self.is_set:
            x = self.free(x) * (1 + scale) + shift
        elif not self.is_set:
            x = x + gate * y
            x = self.free(x) * (1 + scale) + shift
        else:
            x = self.norm(x + y)
        return x


class ModulatedByAMethod(Block):
    """As in QwenImage."""

    def modulate(self, x, values, index=None):
        scale, shift = values
        if index is not None:
            scale = scale * index
        return x * (1 + scale) + shift, shift

    def forward(self, x, y, scale, shift, gate):
        n = self.free(x)
        m, first = self.modulate(n, (scale, shift))
        y = self.mix(m) + y
        x = x + gate * y
        n = self.free(x)
        m, second = self.modulate(n, (shift, scale), index=2)
        return m + first + second, x


class ModulatedByAFunctionOfItself(Block):
    """Alone, and not with the sum, which is read before."""

    def modulate(self, x, scale):
        return x * (1 + scale)

    def forward(self, x, y, scale, shift, gate):
        x = x + gate * y
        n = self.free(x)
        n = self.modulate(n, scale=scale)
        return n, x


class MethodReadsItTwice(Block):
    def modulate(self, x, scale):
        return x * (1 + scale) + x.mean(), scale

    def forward(self, x, y, scale, shift, gate):
        n = self.free(x)
        m, _ = self.modulate(n, scale)
        return m


class SumIsReadBeforeTheMethod(Block):
    def modulate(self, x, scale, shift):
        return x * (1 + scale) + shift, scale

    def forward(self, x, y, scale, shift, gate):
        x = x + gate * y
        n = self.free(x)
        scale = scale + x.mean()
        m, _ = self.modulate(n, scale, shift)
        return m


class WithAClosure(Block):
    """`super` and, up to Python 3.11, lists that are made of others have cells."""

    def forward(self, x, y, scale, shift, gate):
        given = [self.mix(t) for t in (x, y)]
        return self.norm(given[0] + given[1] * super().is_set)


FUSED = {
    SumThenNorm: {"fused_add_layer_norm": 1},
    NormOfASum: {"fused_add_rms_norm": 1},
    NormSumNorm: {"rms_norm_add_rms_norm": 1},
    NormSumNormInside: {"rms_norm_add_rms_norm": 1},
    NormIsReadAgain: {"rms_norm": 1, "fused_add_rms_norm": 1},
    NormedChanges: {"rms_norm": 1, "fused_add_rms_norm": 1},
    Modulated: {"ada_norm": 1},
    ModulatedTheOtherWayRound: {"ada_norm": 1},
    ModulatedWithoutAShift: {"ada_norm": 1},
    ModulatedLater: {"ada_norm": 1},
    ModulatedByRows: {"ada_norm": 2},
    ModulatedTwice: {"ada_norm": 2},
    Gated: {"gate_residual_ada_norm": 1, "addcmul": 1},
    GatedInside: {"gate_residual_ada_norm": 1},
    GatedWithoutModulation: {"gate_residual_ada_norm": 1},
    Cast: {"ada_norm": 1, "gate_residual_ada_norm": 2},
    Either: {"fused_add_layer_norm": 1},
    Neither: {"fused_add_layer_norm": 1},
    EitherGated: {"gate_residual_ada_norm": 1, "addcmul": 1},
    GatedBesideAnAdaptiveNorm: {"ada_norm": 1, "addcmul": 1},
    InABranch: {"ada_norm": 1},
    Configured: {"fused_add_layer_norm": 1},
    ModulatedByAMethod: {"ada_norm": 1, "gate_residual_ada_norm": 1},
    ModulatedByAFunctionOfItself: {"ada_norm": 1, "addcmul": 1},
    WithAClosure: {"fused_add_layer_norm": 1},
}

# ---- what must not be, or only in part ----


class SumChanges(Block):
    def forward(self, x, y, scale, shift, gate):
        h = x + y
        h = h * 2
        return self.norm(h)


class SumChangesInPlace(Block):
    def forward(self, x, y, scale, shift, gate):
        h = x + y
        h.mul_(2)
        return self.norm(h)


class SumIsSetInParts(Block):
    def forward(self, x, y, scale, shift, gate):
        h = x + y
        h[:, 0] = 1
        return self.norm(h)


class ScaleChanges(Block):
    """The norm cannot move up to the sum, but its modulation can be fused."""

    def forward(self, x, y, scale, shift, gate):
        h = x + gate * y
        scale = scale * 2
        n = self.free(h) * (1 + scale) + shift
        return n, h


class InputChanges(Block):
    def forward(self, x, y, scale, shift, gate):
        n = self.free(x)
        x = x * 2
        n = n * (1 + scale) + shift
        return n + x


class InputChangesInPlace(Block):
    def forward(self, x, y, scale, shift, gate):
        x = x.detach() + 0.0
        n = self.free(x)
        first = n * (1 + scale) + shift
        x.mul_(2)
        return first, n * (1 + shift) + scale


class NormIsReadAgain(Block):
    def forward(self, x, y, scale, shift, gate):
        n = self.free(x)
        out = n * (1 + scale) + shift
        return out + n


class ProductIsReadAgain(Block):
    def forward(self, x, y, scale, shift, gate):
        product = gate * y
        h = x + product
        n = self.free(h) * (1 + scale) + shift
        return n + product


class FactorChanges(Block):
    def forward(self, x, y, scale, shift, gate):
        product = gate * y
        gate = gate + 1
        h = x + product
        return self.free(h) * (1 + scale) + shift, gate


class InALoop(Block):
    def forward(self, x, y, scale, shift, gate):
        n = y
        for _ in range(2):
            x = x + n
            n = self.free(x)
            n = n * (1 + scale) + shift
        return n


class ConditionReadsTheSum(Block):
    def forward(self, x, y, scale, shift, gate):
        h = x + y
        if h.dim() == 3:
            h = h + self.mix(h)
        return self.norm(h)


class BothBranches(Block):
    def forward(self, x, y, scale, shift, gate):
        h = x + y
        if scale is None:
            h = h + self.mix(h)
        else:
            y = h
            h = y + shift
        return self.norm(h)


class FactorChangesBeforeTheBranch(Block):
    """The sum cannot wait for the condition."""

    def forward(self, x, y, scale, shift, gate):
        y = gate * y
        x = x + y
        gate = gate + 1
        if scale is not None:
            x = x + gate * self.mix(x)
        n = self.free(x)
        n = n * (1 + scale) + shift
        return n, x


class ScaleChangesAfterTheBranch(Block):
    def forward(self, x, y, scale, shift, gate):
        x = x + gate * y
        if scale is not None:
            x = x + gate * self.mix(x)
        scale = scale * 2
        n = self.free(x)
        n = n * (1 + scale) + shift
        return n, x


class NormIsReadAfterTheBranch(Block):
    def forward(self, x, y, scale, shift, gate):
        if gate is not None:
            n = self.free(x)
            out = n * (1 + scale) + shift
        return out + n


class ModulatedInABranch(Block):
    """And outside of it: the statement with the norm has to stay."""

    def forward(self, x, y, scale, shift, gate):
        n = self.free(x)
        if gate is not None:
            y = n * (1 + shift) + scale
        return n * (1 + scale) + shift, y


class CastToAnother(Block):
    def forward(self, x, y, scale, shift, gate):
        y = y.double()
        return (self.free(x.float()) * (1 + scale) + shift).type_as(y)


class Conditional(Block):
    """What may not be evaluated stays where it is."""

    def forward(self, x, y, scale, shift, gate):
        return self.norm(x + y) if scale is None else x


class Another(Block):
    """Another cast, another offset, and an addition of a number."""

    def forward(self, x, y, scale, shift, gate):
        a = (self.norm(x.float()) * (2 + scale) + shift).type_as(x)
        h = x + 1
        return a, self.norm(h), self.norm(y) * scale + shift


class WithALambda(Block):
    def forward(self, x, y, scale, shift, gate):
        h = x + y
        double = lambda: h * 2  # noqa: E731
        return self.norm(h), double()


PARTLY = {
    SumChanges: {"layer_norm": 1},
    SumChangesInPlace: {"layer_norm": 1},
    SumIsSetInParts: {"layer_norm": 1},
    ScaleChanges: {"ada_norm": 1, "addcmul": 1},
    InputChanges: {"layer_norm": 1},
    InputChangesInPlace: {"layer_norm": 1},
    NormIsReadAgain: {"layer_norm": 1},
    ProductIsReadAgain: {"gate_residual_ada_norm": 1},
    FactorChanges: {"gate_residual_ada_norm": 1},
    InALoop: {"layer_norm": 2},
    ConditionReadsTheSum: {"layer_norm": 1},
    BothBranches: {"layer_norm": 1},
    FactorChangesBeforeTheBranch: {"ada_norm": 1, "addcmul": 2},
    ScaleChangesAfterTheBranch: {"ada_norm": 1, "addcmul": 2},
    NormIsReadAfterTheBranch: {"layer_norm": 1},
    ModulatedInABranch: {"layer_norm": 1},
    MethodReadsItTwice: {"layer_norm": 1},
    SumIsReadBeforeTheMethod: {"ada_norm": 1, "addcmul": 1},
    CastToAnother: {"layer_norm": 1},
    Conditional: {},
    Another: {"layer_norm": 3},
    WithALambda: {"layer_norm": 1},
}


@pytest.fixture
def integration(fuselage):
    return fuselage.integrations.transformers


def inputs(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x, y, and a scale, a shift and a gate for each batch element."""
    shapes = [(2, 5, DIM)] * 2 + [(2, 1, DIM)] * 3
    given = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return [t.requires_grad_() for t in given]


def run(module: nn.Module, given: list) -> list[torch.Tensor]:
    """Results and the gradients of what requires one."""
    out = module(*given)
    out = list(out) if isinstance(out, tuple) else [out]
    leaves = [t for t in given if isinstance(t, torch.Tensor)] + list(module.parameters())
    cotangents = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t) for t in out]
    grads = torch.autograd.grad(out, leaves, cotangents, allow_unused=True)
    return [t.detach() for t in out] + [g for g in grads if g is not None]


def compare(integration, fuselage, module: nn.Module, given: list, tol: float = 2e-5):
    """The plain results; those of the patched module agree. Returns report and operators."""
    plain = copy.deepcopy(module)
    expected = run(plain, given)
    report = integration.patch(module)
    with counted_ops(fuselage, also=("addcmul",)) as counts:
        module(*given)
    actual = run(module, given)
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert_close(ours, theirs, str(i), tol=tol)
    return report, counts


@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)
def test_what_is_fused(integration, fuselage, device, kind):
    report, counts = compare(integration, fuselage, kind().to(device), inputs(device))
    assert counts == FUSED[kind] and "" in report.replaced


@pytest.mark.parametrize("kind", PARTLY, ids=lambda kind: kind.__name__)
def test_what_stays_as_it_is(integration, fuselage, device, kind):
    _, counts = compare(integration, fuselage, kind().to(device), inputs(device))
    assert counts == PARTLY[kind]


@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)
def test_half_precision(integration, fuselage, device, kind):
    """The same dtypes, and no larger errors than those of the plain forward."""
    errors = torch.zeros(2, dtype=torch.float64)  # over seeds: 16 columns are noise
    for seed in range(8):
        torch.manual_seed(seed)
        module, given = kind().to(device), [t.detach() for t in inputs(device)]
        exact = copy.deepcopy(module).double(), [t.double().requires_grad_() for t in given]
        half = [t.bfloat16().requires_grad_() for t in given]
        module = module.bfloat16()
        plain = copy.deepcopy(module)
        integration.patch(module)
        with counted_ops(fuselage, also=("addcmul",)) as counts:
            module(*half)
        assert counts == FUSED[kind]
        for ours, theirs, right in zip(run(module, half), run(plain, half), run(*exact)):
            assert ours.dtype == theirs.dtype
            both = [(t.double() - right).norm() / right.norm() for t in (ours, theirs)]
            errors += torch.stack(both).cpu()
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [SumThenNorm, Gated, Cast, Either, ModulatedTwice, ModulatedByAMethod]
)
def test_compiled_whole(integration, fuselage, device, kind):
    module, given = kind().to(device), inputs(device)
    expected = run(copy.deepcopy(module), given)
    integration.patch(module)
    compiled = torch.compile(module, fullgraph=True)
    for ours, theirs in zip(run(compiled, given), expected, strict=True):
        assert_close(ours, theirs, tol=2e-5)


def odd_inputs() -> dict:
    """What the operators do not take, or the formula means otherwise, by a name."""

    def given(**others):
        x, y, scale, shift, gate = (t.detach() for t in inputs("cpu"))
        usual = {"x": x, "y": y, "scale": scale, "shift": shift, "gate": gate}
        return list((usual | others).values())

    tokens = torch.randn(1, 5, DIM)
    return {
        "for each token": given(scale=tokens, shift=tokens, gate=tokens),
        "for each column": given(scale=tokens[0, 0], shift=tokens[0, 0], gate=tokens[0, 0]),
        "for all columns": given(scale=tokens[:, :1, :1], shift=tokens[:, :1, :1]),
        "of other shapes": given(shift=tokens),
        "a sum that spreads": given(y=tokens),
        "float64": [t.double() for t in given()],
        "wider": given(scale=tokens[:, :1].double(), shift=tokens[:, :1].double()),
        "a wider gate": given(gate=tokens[:, :1].double()),
        "numbers": given(gate=0.5),
    }


@pytest.mark.parametrize("what", odd_inputs())
@pytest.mark.parametrize(
    "kind", [SumThenNorm, Modulated, Gated, GatedWithoutModulation, EitherGated]
)
def test_what_the_operators_do_not_take(integration, fuselage, kind, what):
    torch.manual_seed(0)
    given, module = odd_inputs()[what], kind()
    if what == "float64":
        module.double()
    plain = copy.deepcopy(module)
    integration.patch(module)
    try:
        expected = plain(*given)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            module(*given)
        return
    pairs = (v if isinstance(v, tuple) else (v,) for v in (module(*given), expected))
    for ours, theirs in zip(*pairs, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours.detach(), theirs.detach(), tol=2e-5)


@pytest.mark.parametrize("kind", [SumThenNorm, Modulated, Gated, Cast, EitherGated])
def test_hooks_of_a_norm_are_called(integration, fuselage, kind):
    module, given, calls = kind(), inputs("cpu"), []
    norm = module.norm if kind is SumThenNorm else module.free
    expected = run(module, given)
    integration.patch(module)
    handle = norm.register_forward_hook(lambda module, args, out: calls.append(out.shape))
    for ours, theirs in zip(run(module, given), expected, strict=True):
        assert_close(ours, theirs, tol=2e-5)
    assert calls
    handle.remove()


def test_autocast(integration, fuselage, device):
    """Norms run in float32 there, and so they stay."""
    for kind in (SumThenNorm, Gated):
        module, given = kind().to(device), inputs(device)
        with torch.autocast(device, torch.bfloat16):
            expected = module(*given)
            integration.patch(module)
            with counted_ops(fuselage) as counts:
                actual = module(*given)
        pairs = (v if isinstance(v, tuple) else (v,) for v in (actual, expected))
        for ours, theirs in zip(*pairs, strict=True):
            assert ours.dtype == theirs.dtype
            assert_close(ours.detach().float(), theirs.detach().float(), tol=2e-2)
        assert not counts


def test_a_traceback_shows_the_line_of_the_source(integration):
    module = Gated()
    integration.patch(module)
    with pytest.raises(RuntimeError) as raised:
        module(*inputs("cpu")[:2], *[torch.zeros(7)] * 3)
    frame = next(f for f in traceback.extract_tb(raised.tb) if f.name == "forward")
    lines, first = inspect.getsourcelines(Gated.forward)
    assert frame.filename == __file__ and first <= frame.lineno < first + len(lines)


def test_a_source_that_changed_is_not_read(integration, fuselage, tmp_path, monkeypatch):
    """What was imported counts, and not what the file has by now."""
    path = tmp_path / "changing_module.py"
    source = "import torch\nclass Changing(torch.nn.Module):\n"
    source += "    def __init__(self):\n        super().__init__()\n"
    source += "        self.norm = torch.nn.LayerNorm(16)\n"
    source += "    def forward(self, x, y):\n        h = x {} y\n        return self.norm(h)\n"
    path.write_text(source.format("-"))
    monkeypatch.syspath_prepend(tmp_path)
    from changing_module import Changing

    path.write_text(source.format("+"))
    module, x = Changing(), torch.randn(3, DIM)
    expected = module(x, x)
    assert integration.patch(module).replaced == {"norm": "layer_norm"}
    assert_close(module(x, x).detach(), expected.detach())


def test_modules_of_one_class_may_be_configured_otherwise(integration, fuselage):
    for style, is_set, what in (
        ("late", True, "fused_add_layer_norm"),
        ("early", True, "ada_layer_norm"),
        ("early", False, "gate_residual_ada_norm"),
    ):
        module = Configured()
        module.style, module.is_set = style, is_set
        report, _ = compare(integration, fuselage, module, inputs("cpu"))
        assert report.replaced[""] == what


def test_modules_of_a_class_with_other_norms_are_told_apart(integration, fuselage):
    """What is fused depends on the norms that a module has."""
    first, second = SumThenNorm(), SumThenNorm()
    second.norm = nn.Identity()
    assert integration.patch(nn.ModuleList([first, second])).replaced["0"]
    assert "forward" not in vars(second)
    given = inputs("cpu")
    assert_close(second(*given)[1].detach(), second(*given)[0].detach())
