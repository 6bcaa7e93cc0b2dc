"""What `patch` changes in half precision: one rounding where a model's own forward has several."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
F = nn.functional
DIM = 64


class Half(nn.Module):
    """In place of a projection: the first or the second half of the columns."""

    def __init__(self, second: bool):
        super().__init__()
        self.second = second

    def forward(self, x):
        return x.chunk(2, dim=-1)[self.second]


class GatedMLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj = Half(False), Half(True)
        self.down_proj, self.act_fn = nn.Identity(), act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act = nn.Identity(), nn.Identity(), nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class ClampedGate(nn.Module):
    """As gpt-oss's."""

    alpha, limit = 1.702, 7.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))

    def forward(self, x):
        return self._apply_gate(x)


class Tables(nn.Module):
    """Rotates by tables that are rounded already: the inputs of the operator, not its roundings."""

    def __init__(self):
        super().__init__()
        from transformers.models.llama import modeling_llama

        scope = {**vars(modeling_llama)}
        code = """
def forward(self, x):
    q, cos, sin = x[..., :16], x[:, 0, :, 16:24].repeat(1, 1, 2), x[:, 0, :, 24:].repeat(1, 1, 2)
    return apply_rotary_pos_emb(q, q, cos, sin)[0]
"""
        exec(code, scope)
        self.attention = type("Attention", (nn.Module,), {"forward": scope["forward"]})()

    def forward(self, x):
        return self.attention(x.unflatten(-1, (2, 32)).transpose(1, 2))


def ada_norm():
    normalization = pytest.importorskip("diffusers.models.normalization")
    module = normalization.AdaLayerNormZeroSingle(DIM)
    module.silu, module.linear = nn.Identity(), nn.Identity()
    module.linear.out_features = 3 * DIM

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = module

        def forward(self, x):
            return self.norm(x, x[:, :3].flatten(1))[0]

    return Both()


def projected(name: str, **options):
    activations = pytest.importorskip("diffusers.models.activations")
    module = getattr(activations, name)(8, 8, **options)
    module.proj = nn.Identity()
    return module


MODULES = {
    "swiglu": lambda: GatedMLP(nn.SiLU()),
    "geglu (gelu)": lambda: GatedMLP(nn.GELU()),
    "geglu (gelu_tanh)": lambda: GatedMLP(nn.GELU(approximate="tanh")),
    "silu_and_mul": PackedMLP,
    "swiglu_clamped": ClampedGate,
    "mul_and_gelu": lambda: projected("GEGLU"),
    "mul_and_silu": lambda: projected("SwiGLU"),
    "gelu_tanh": transformers.activations.NewGELUActivation,
    "gelu_quick": transformers.activations.QuickGELUActivation,
    "apply_rotary": Tables,
    "ada_layer_norm": ada_norm,
}


# float32 noise of terms of a few units, and the spacing of float16's smallest numbers.
NOISE, SMALLEST = 2e-6, 1e-7


def roundings(y: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error over what one rounding may err, which is half of eps or less."""
    one = torch.finfo(y.dtype).eps / 2 * exact.abs() + SMALLEST
    return (((y.double() - exact).abs() - NOISE) / one).max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", MODULES)
def test_one_rounding_where_the_model_has_several(fuselage, device, what, dtype):
    """Against float64; rotary embeddings, gates and adaptive norms are tried in float32 only."""
    plain = MODULES[what]().to(device)
    model = copy.deepcopy(plain)
    assert what in fuselage.integrations.diffusers.patch(model).replaced.values()
    x = torch.randn(64, 24, DIM, device=device).to(dtype)
    exact = plain.double()(x.double())
    ours, theirs = model(x), plain(x)
    assert ours.dtype == theirs.dtype == dtype
    assert roundings(ours, exact) <= 1.01
    assert roundings(theirs, exact) > 1.2  # else this test says nothing
