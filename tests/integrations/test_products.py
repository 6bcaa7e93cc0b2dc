"""Products that `patch` puts together with what is next to them: a tanh-GELU, a concatenation."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from integrations.models import assert_close, counted_ops, rms
from torch import nn
from torch.autograd import forward_ad

DIM, HIDDEN = 64, 256
GELU = "gelu_tanh in a product"
PARTS = "products of parts"
ALSO = ("_addmm_activation", "gelu", "cat")


class OneLine(nn.Module):
    """As in Flux."""

    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(DIM, HIDDEN), nn.GELU(approximate="tanh")
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class LineByLine(OneLine):
    """As in SigLIP."""

    def forward(self, hidden_states):
        hidden_states = self.up(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.down(hidden_states)
        return hidden_states


class OwnClass(OneLine):
    """An activation that has a class of the model's own, in one kernel."""

    class TanhGelu(nn.Module):
        def forward(self, input):
            return F.gelu(input, approximate="tanh")

    def __init__(self):
        super().__init__()
        self.act = self.TanhGelu()


class Formula(OneLine):
    """As in GPT-2: several kernels, which become one of ours where a product has none."""

    def __init__(self):
        from transformers.activations import NewGELUActivation

        super().__init__()
        self.act = NewGELUActivation()


def projection() -> nn.Module:
    """As in LTX-Video and QwenImage."""
    from diffusers.models.activations import GELU

    return GELU(DIM, HIDDEN, approximate="tanh")


WITH_GELU = (OneLine, LineByLine, OwnClass, Formula, projection)


class Wide(nn.Module):
    """As in the single blocks of Flux."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(DIM + HIDDEN, DIM)

    def forward(self, x, y, gate):
        h = torch.cat([x, y], dim=2)
        gate = gate.unsqueeze(1)
        h = gate * self.out(h)
        return h


class WideWithGelu(Wide):
    """What is concatenated goes through a product that has a GELU."""

    def __init__(self):
        super().__init__()
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x, y, gate):
        h = torch.cat([x, y], dim=2)
        return self.act(self.out(h)) * gate.unsqueeze(1)


class WideAtOnce(Wide):
    def forward(self, x, y, gate):
        return gate.unsqueeze(1) * self.out(torch.cat((x, y), -1))


WITH_PARTS = (Wide, WideAtOnce)


@pytest.fixture(params=("transformers", "diffusers"))
def integration(request, fuselage):
    pytest.importorskip(request.param)
    return getattr(fuselage.integrations, request.param)


@pytest.fixture
def products(fuselage):
    return _module(fuselage, "_products")


def _module(fuselage, name: str):
    return importlib.import_module(f"{fuselage.integrations.__name__}.{name}")


def half(module: nn.Module, device: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.to(device, dtype).eval()


def wide_inputs(device: str, rows: int = 600, dtype: torch.dtype = torch.bfloat16) -> list:
    torch.manual_seed(1)
    shapes = ((2, rows // 2, DIM), (2, rows // 2, HIDDEN), (2, DIM))
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return rms(actual.double() - exact) / rms(exact)


def doubled(module: nn.Module, *inputs) -> torch.Tensor:
    return copy.deepcopy(module).double()(*(x.double() for x in inputs))


# ---- what is made of them: on a GPU, of half precision, without gradients ----


@pytest.mark.parametrize("make", WITH_GELU)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@torch.no_grad()
def test_a_product_has_its_gelu(integration, fuselage, device, make, dtype):
    plain = half(make(), device, dtype)
    patched = copy.deepcopy(plain)
    if make is projection:
        integration = fuselage.integrations.diffusers
    assert integration.patch(patched).replaced[""] == ("gelu_tanh" if make is projection else GELU)
    x = torch.randn(3, 50, DIM, device=device, dtype=dtype)
    exact = doubled(plain, x)
    with counted_ops(fuselage, ALSO) as counts:
        actual = patched(x)
    assert counts["_addmm_activation"] == (device != "cpu")
    assert counts["gelu"] + counts["gelu_tanh"] + counts["activation"] == (device == "cpu")
    assert actual.shape == exact.shape and actual.dtype == dtype
    assert error(actual, exact) <= 1.01 * error(plain(x), exact)  # a GPU rounds once less
    compiled = torch.compile(patched, fullgraph=True)
    assert_close(compiled(x).float(), actual.float(), tol=2e-2)
    integration.unpatch(patched)
    assert torch.equal(patched(x), plain(x))


@pytest.mark.parametrize("make", WITH_GELU)
def test_training_has_the_gelu_by_itself(integration, fuselage, device, make):
    plain = half(make(), device)
    patched = copy.deepcopy(plain)
    integration.patch(patched)
    x = torch.randn(3, 50, DIM, device=device, dtype=torch.bfloat16)
    with counted_ops(fuselage, ALSO) as counts:
        out = patched(x)
    assert counts["_addmm_activation"] == 0
    expected = plain(x)
    weights = torch.randn_like(out)
    actual = torch.autograd.grad(out, [*patched.parameters()], weights)
    others = torch.autograd.grad(expected, [*plain.parameters()], weights)
    for ours, theirs in zip(actual, others):
        assert_close(ours.float(), theirs.float(), tol=3e-2)
    patched.requires_grad_(False)
    assert patched(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("make", WITH_PARTS)
@torch.no_grad()
def test_parts_stay_apart(integration, fuselage, device, make):
    plain = half(make(), device)
    patched = copy.deepcopy(plain)
    assert PARTS in integration.patch(patched).replaced[""]
    inputs = wide_inputs(device)
    exact = doubled(plain, *inputs)
    with counted_ops(fuselage, ALSO) as counts:
        actual = patched(*inputs)
    assert counts["cat"] == (device == "cpu")
    assert error(actual, exact) <= 1.5 * error(plain(*inputs), exact)  # two roundings for one
    compiled = torch.compile(patched, fullgraph=True)
    assert error(compiled(*inputs), exact) <= 1.5 * error(plain(*inputs), exact)
    few = wide_inputs(device, rows=8)
    with counted_ops(fuselage, ALSO) as counts:
        assert torch.equal(patched(*few), plain(*few))
    assert counts["cat"] == 2  # one of each


# ---- what is found, and what stays ----


@pytest.mark.parametrize("make", (*WITH_GELU[:-1], *WITH_PARTS, WideWithGelu))
@torch.no_grad()
def test_elsewhere_nothing_changes(integration, make):
    """On a CPU, and of float32."""
    plain = half(make(), "cpu")
    patched = copy.deepcopy(plain)
    assert integration.patch(patched).replaced[""] in (GELU, PARTS)
    inputs = wide_inputs("cpu")[: 3 if issubclass(make, Wide) else 1]
    if make is not Formula:  # that is ours, rounded once
        assert torch.equal(patched(*inputs), plain(*inputs))
    copied = copy.deepcopy(patched).float()
    assert_close(copied(*(x.float() for x in inputs)), doubled(plain, *inputs).float())
    assert integration.unpatch(patched) >= 1
    assert "forward" not in vars(patched)


class Erf(OneLine):
    def __init__(self):
        super().__init__()
        self.act = nn.GELU()


class WithoutBias(OneLine):
    """As in T5: PyTorch's product with a GELU adds a bias."""

    def __init__(self):
        super().__init__()
        self.up.bias = None


class Between(OneLine):
    """Something else happens in between."""

    def forward(self, x):
        h = self.up(x)
        x = x + 1
        h = self.act(h)
        return self.down(h) + x


class ReadAgain(OneLine):
    def forward(self, x):
        h = self.up(x)
        y = self.act(h)
        return self.down(y) + self.down(h)


class Narrow(Wide):
    """Of twice as many columns as it has results."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(DIM + HIDDEN, (DIM + HIDDEN) // 2)

    def forward(self, x, y, gate):
        return self.out(torch.cat([x, y], dim=2))


class PartWritten(Wide):
    def forward(self, x, y, gate):
        h = torch.cat([x, y], dim=2)
        y.add_(1)
        return self.out(h) + y.mean()


class WithMore(Wide):
    def forward(self, x, y, gate):
        parts = [y]
        return self.out(torch.cat([x, *parts], dim=2))


@pytest.mark.parametrize(
    "make", (Erf, WithoutBias, Between, ReadAgain, Narrow, PartWritten, WithMore)
)
def test_what_stays_as_it_is(integration, make):
    assert "" not in integration.patch(make()).replaced


@pytest.fixture
def recorded(products, fuselage, monkeypatch):
    """What is made of products, as if a CPU were a GPU and float32 half precision."""
    calls = []

    def gelu(linear, x):
        calls.append("gelu")
        return F.gelu(linear(x), approximate="tanh")

    def of_parts(linear, parts):
        calls.append("parts")
        return products._linear_of_parts(parts, linear.weight, linear.bias)

    monkeypatch.setattr(products._probe, "HALF", (torch.float32,))
    monkeypatch.setattr(products._probe, "is_on_gpu", lambda x: True)
    fused = _module(fuselage, "_fused")
    monkeypatch.setattr(fused, "linear_gelu_tanh", gelu)
    monkeypatch.setattr(fused, "linear_of_parts", of_parts)
    return calls


def assert_made(module: nn.Module, plain: nn.Module, inputs: list, calls: list, what: list) -> None:
    calls.clear()
    assert_close(module(*inputs), plain(*inputs))
    assert calls == what


@pytest.mark.long
@torch.no_grad()
def test_what_decides_when_it_runs(integration, recorded):
    plain = half(OneLine(), "cpu", torch.float32)
    patched = copy.deepcopy(plain)
    integration.patch(patched)
    x = [torch.randn(5, DIM)]
    assert_made(patched, plain, x, recorded, ["gelu"])
    assert_made(copy.deepcopy(patched), plain, x, recorded, ["gelu"])

    seen = []
    for child in (patched.up, patched.act):
        hook = child.register_forward_hook(lambda *_: seen.append("hook"))
        assert_made(patched, plain, x, recorded, [])
        hook.remove()
    assert len(seen) == 2

    for changed in ("act", "up"):
        other = copy.deepcopy(patched)
        own = getattr(other, changed)
        own.forward = lambda input, own=own: type(own).forward(own, input) + 1
        expected = copy.deepcopy(plain)
        setattr(expected, changed, copy.deepcopy(own))
        assert_made(other, expected, x, recorded, [])

    class Adapted(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    other, expected = copy.deepcopy(patched), copy.deepcopy(plain)
    other.up = expected.up = Adapted(DIM, HIDDEN)
    assert_made(other, expected, x, recorded, [])
    other.up = expected.up = nn.Linear(DIM, HIDDEN, bias=False)
    assert_made(other, expected, x, recorded, [])
    other.up, other.act = patched.up, nn.GELU()
    expected.up, expected.act = plain.up, nn.GELU()
    assert_made(other, expected, x, recorded, [])
    with torch.enable_grad():
        assert_made(patched, plain, x, recorded, [])
    with forward_ad.dual_level():
        tangent = torch.randn_like(x[0])
        dual = [forward_ad.make_dual(x[0], tangent)]
        assert_made(patched, plain, dual, recorded, [])
        of_both = (forward_ad.unpack_dual(m(*dual)).tangent for m in (patched, plain))
        assert_close(*of_both)
    with torch.autocast("cpu", torch.bfloat16):
        recorded.clear()
        assert patched(*x).dtype == torch.bfloat16 and recorded == []


@torch.no_grad()
def test_which_parts_stay_apart(integration, recorded):
    plain = half(Wide(), "cpu", torch.float32)
    patched = copy.deepcopy(plain)
    integration.patch(patched)
    x, y, gate = wide_inputs("cpu", dtype=torch.float32)
    assert_made(patched, plain, [x, y, gate], recorded, ["parts"])
    strided = torch.randn(*x.shape[:2], 2 * DIM)[..., ::2]
    assert_made(patched, plain, [strided, y, gate], recorded, ["parts"])
    assert_made(patched, plain, [x[:, :9], y[:, :9], gate], recorded, [])
    without = copy.deepcopy(patched)
    without.out.bias, plain.out.bias = None, None
    assert_made(without, plain, [x, y, gate], recorded, ["parts"])
    with pytest.raises(RuntimeError):
        patched(x, y[:1], gate)  # by torch.cat
    with pytest.raises(RuntimeError):
        patched(x, y[..., 1:], gate)


def test_the_op_of_parts(fuselage, device):
    torch.manual_seed(0)
    parts = [torch.randn(3, 5, n, device=device) for n in (7, 16, 2)]
    weight, bias = torch.randn(9, 25, device=device), torch.randn(9, device=device)
    op = fuselage.norm.ops.linear_of_parts.default
    for given in (bias, None):
        expected = F.linear(torch.cat(parts, -1).double(), weight.double())
        expected = expected if given is None else expected + given.double()
        assert_close(op(parts, weight, given), expected.float())
        results = torch.library.opcheck(op, (parts, weight, given))
        assert set(results.values()) == {"SUCCESS"}


@torch.no_grad()
def test_blocks_of_flux(fuselage, device):
    pytest.importorskip("diffusers")
    from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

    plain = half(FluxSingleTransformerBlock(DIM, 2, 32), device)
    patched = copy.deepcopy(plain)
    report = fuselage.integrations.diffusers.patch(patched)
    assert report.replaced[""] == f"{GELU}, {PARTS}"
    torch.manual_seed(2)
    shapes = ((1, 88, DIM), (1, 512, DIM), (1, DIM))
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    exact = doubled(plain, *inputs)
    with counted_ops(fuselage, ALSO) as counts:
        actual = patched(*inputs)
    on_gpu = device != "cpu"
    assert counts["_addmm_activation"] == on_gpu and counts["gelu"] == (not on_gpu)
    assert counts["cat"] == (1 if on_gpu else 2)  # that of text and image
    for ours, theirs, right in zip(actual, plain(*inputs), exact):
        assert error(ours, right) <= 1.1 * error(theirs, right)


def test_the_classes_of_transformers(fuselage):
    transformers = pytest.importorskip("transformers")
    from transformers.models.siglip.modeling_siglip import SiglipMLP
    from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

    sizes = {"hidden_size": DIM, "intermediate_size": HIDDEN}
    made = (
        SiglipMLP(transformers.SiglipVisionConfig(**sizes)),
        Starcoder2MLP(transformers.Starcoder2Config(**sizes)),
    )
    for module in made:
        assert fuselage.integrations.transformers.patch(module).replaced[""] == GELU
