"""gated_rms_norm beside the classes of transformers; its groups, strided gates, module and layers.

What it shares with other operators is tested by the shared tests (tests/operators.py).
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch
from harness import (
    HALVES,
    assert_same_bits,
    check_gradients,
    check_values,
    each_dtype,
    gradients,
    normal,
    on_devices,
)
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from operators import GATED_RMS_NORM as OP

each_style = pytest.mark.parametrize("style", OP.styles)


# Groups


@each_style
@each_dtype
@on_devices(
    ((192, 64), (60, 5), (7, 1), (2056, 8)),
    ((192, 64), (60, 5), (7, 1), (8192, 1024), (2056, 8), (3072, 1536), (9000, 4500), (4224, 128)),
    names="sizes",
)
def test_groups(fuselage, device, style, dtype, sizes):
    dim, group_size = sizes
    inputs = OP.inputs((2, 5, dim), dtype, device, style)
    options = OP.options(style) | {"group_size": group_size}
    check_values(OP, fuselage, inputs, options)
    check_gradients(OP, fuselage, inputs, options)


@each_dtype
@on_devices(((192, 64), (7, 1)), ((192, 64), (7, 1), (8192, 1024), (9000, 4500)), names="sizes")
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_groups_are_rows(fuselage, device, dtype, sizes, norm_before_gate):
    """Of a weight that repeats: the same bits, also of the gradients of rows."""
    dim, group_size = sizes
    inputs = OP.inputs((6, dim), dtype, device)
    weight = inputs["weight"] = inputs["weight"][:group_size].repeat(dim // group_size)
    split = {n: inputs[n].unflatten(-1, (-1, group_size)) for n in OP.row_inputs}
    split["weight"] = weight[:group_size]
    options = {"norm_before_gate": norm_before_gate}
    grad_out = normal((6, dim), dtype, device)
    found = []
    for given, more in ((inputs, {"group_size": group_size}), (split, {})):
        outs = OP.run(fuselage, given, options | more)
        grads = gradients(
            lambda leaves, opts: OP.run(fuselage, leaves, opts),
            given,
            options | more,
            {"out": grad_out.view(outs["out"].shape)},
            OP.row_inputs,
        )
        found.append({"out": outs["out"], "x": grads["x"], "gate": grads["gate"]})
    for name, t in found[0].items():
        assert_same_bits(t, found[1][name].view(6, dim), name)


def test_a_group_of_all_columns(fuselage, device):
    inputs = OP.inputs((3, 96), torch.float32, device)
    assert_same_bits(
        OP.run(fuselage, inputs, {"group_size": 96})["out"], OP.run(fuselage, inputs, {})["out"], ""
    )


@pytest.mark.parametrize("group_size", [0, -8, 7, 192])
def test_groups_that_do_not_divide(fuselage, device, group_size):
    inputs = OP.inputs((3, 96), torch.float32, device)
    words = r"gated_rms_norm: `group_size` must divide the last dimension of `x` \[3, 96\], got "
    with pytest.raises(RuntimeError, match=words + str(group_size)):
        fuselage.gated_rms_norm(**inputs, group_size=group_size)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)], ids=str)
def test_groups_of_nothing(fuselage, device, shape):
    inputs = OP.inputs(shape, torch.float32, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    out = fuselage.gated_rms_norm(**leaves, group_size=8)
    out.sum().backward()
    assert out.shape == shape and not leaves["weight"].grad.any()


# Gates


@each_dtype
@on_devices((64, 100), (64, 100, 4096, 4097))
def test_a_gate_that_is_a_slice(fuselage, device, dtype, dim):
    """As in Mamba 2: a part of the projection, whose stride is its own."""
    projected = normal((2, 6, 2 * dim + 40), dtype, device)
    gate, x = projected[..., :dim], projected[..., dim : 2 * dim]
    inputs = {"x": x, "gate": gate, "weight": normal((dim,), dtype, device)}
    size = 241 if dim == 4097 else dim // 4
    for options in ({}, {"norm_before_gate": False}, {"group_size": size}):
        check_values(OP, fuselage, inputs, options)
        check_gradients(OP, fuselage, inputs, options)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@each_dtype
def test_gates_of_any_size(fuselage, device, activation, norm_before_gate, dtype):
    inputs = OP.inputs((7, 96), dtype, device)
    size = torch.tensor([1e-30, 1e-4, 1.0, 8.0, 20.0, 60.0, 90.0], device=device)
    inputs["gate"] = (inputs["gate"].float().sign() * size[:, None]).to(dtype)
    options = {"activation": activation, "norm_before_gate": norm_before_gate}
    check_values(OP, fuselage, inputs, options)
    check_gradients(OP, fuselage, inputs, options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_gate_of_another_dtype(fuselage, device, dtype):
    inputs = OP.inputs((3, 96), dtype, device)
    words = f"gated_rms_norm: `gate` must be {str(dtype)[6:]} as `x`, got float32"
    with pytest.raises(RuntimeError, match=words):
        fuselage.gated_rms_norm(**inputs | {"gate": inputs["gate"].float()})


@pytest.mark.parametrize("needed", ["x", "gate", "weight"])
@each_style
@on_devices((96,), (96, 4096, 4097))
def test_one_gradient(fuselage, device, needed, style, dim):
    inputs = OP.inputs((20, dim), torch.float32, device, style)
    if inputs[needed] is not None:
        check_gradients(OP, fuselage, inputs, OP.options(style), requires=(needed,))


# The classes of transformers

NORM_FIRST = {"cast_before_weight": True}
GATE_FIRST = {"norm_before_gate": False, "cast_before_weight": True}
CLASSES = {  # the class's own arguments, and ours
    "qwen3_next.Qwen3NextRMSNormGated": ({}, NORM_FIRST),
    "qwen3_5.Qwen3_5RMSNormGated": ({}, NORM_FIRST),
    "olmo_hybrid.OlmoHybridRMSNormGated": ({}, NORM_FIRST),
    "kimi_linear.KimiLinearRMSNormGated": ({}, {"activation": "sigmoid"}),
    "bailing_hybrid.BailingHybridRMSNormGated": ({}, {"activation": "sigmoid"}),
    "mamba2.MambaRMSNormGated": ({}, GATE_FIRST),
    "bamba.BambaRMSNormGated": ({}, GATE_FIRST),
    "granitemoehybrid.GraniteMoeHybridRMSNormGated": ({}, GATE_FIRST),
    "zamba2.Zamba2RMSNormGated": ({"group_size": 32}, {"group_size": 32, **GATE_FIRST}),
    "nemotron_h.NemotronHRMSNormGated": ({"group_size": 32}, {"group_size": 32, **GATE_FIRST}),
    "falcon_h1.FalconH1RMSNormGated": ({"n_groups": 2}, {"group_size": 64}),
    "falcon_h1.FalconH1RMSNormGated ": (
        {"n_groups": 1, "norm_before_gate": False},
        {"norm_before_gate": False},
    ),
}


def class_of(name: str):
    family, name = name.strip().split(".")
    pytest.importorskip("transformers")
    path = f"transformers.models.{family}.modeling_{family}"
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {name}")


def compare(actual, expected, dtype, label, most_different=0.01):
    """Float32 noise, which turns a few roundings of half precision the other way."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, label
    if dtype == torch.float32:
        scale = expected.abs().max()
        torch.testing.assert_close(actual / scale, expected / scale, rtol=1e-5, atol=2e-6)
        return
    torch.testing.assert_close(
        actual, expected, rtol=3 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny
    )
    assert (actual != expected).float().mean() < most_different, label


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("weight_dtype", ["same", torch.float32], ids=str)
@each_dtype
def test_like_transformers(fuselage, device, name, weight_dtype, dtype):
    arguments, options = CLASSES[name]
    weight_dtype = dtype if weight_dtype == "same" else weight_dtype
    module = class_of(name)(128, eps=1e-5, **arguments).to(device, weight_dtype)
    torch.nn.init.normal_(module.weight, 1.0, 0.3)
    x, gate = (normal((3, 5, 128), dtype, device) for _ in range(2))
    expected = module(x, gate)
    actual = fuselage.gated_rms_norm(x, gate, module.weight, 1e-5, **options)
    if expected.dtype != dtype:  # PyTorch promotes a product with a float32 weight
        expected = expected.to(dtype)
    compare(actual, expected, dtype, name)


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_like_transformers(fuselage, device, name):
    arguments, options = CLASSES[name]
    module = class_of(name)(128, eps=1e-5, **arguments).to(device)
    torch.nn.init.normal_(module.weight, 1.0, 0.3)
    x, gate, grad_out = (normal((3, 5, 128), torch.float32, device) for _ in range(3))
    found = []
    for call in (
        module,
        lambda x, gate: fuselage.gated_rms_norm(x, gate, module.weight, 1e-5, **options),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, gate)]
        found.append(torch.autograd.grad(call(*leaves), [*leaves, module.weight], grad_out))
    for expected, actual in zip(*found, strict=True):
        compare(actual, expected, torch.float32, name)


# The module


@each_dtype
@pytest.mark.parametrize("name", ["qwen3_next.Qwen3NextRMSNormGated", "zamba2.Zamba2RMSNormGated"])
def test_module(fuselage, device, dtype, name):
    arguments, options = CLASSES[name]
    theirs = class_of(name)(128, eps=1e-5, **arguments).to(device, dtype)
    torch.nn.init.normal_(theirs.weight, 1.0, 0.3)
    ours = fuselage.modules.RMSNormGated(128, 1e-5, **options, device=device, dtype=dtype)
    assert torch.equal(ours.weight, torch.ones_like(ours.weight))
    ours.load_state_dict(theirs.state_dict())
    x, gate = (normal((3, 128), dtype, device) for _ in range(2))
    compare(ours(x, gate), theirs(x, gate), dtype, name)


def test_module_without_weight(fuselage, device):
    module = fuselage.modules.RMSNormGated(
        64, elementwise_affine=False, activation="sigmoid", group_size=16
    )
    assert list(module.state_dict()) == []
    assert "elementwise_affine=False" in repr(module) and "group_size=16" in repr(module)
    x, gate = (normal((3, 64), torch.float32, device) for _ in range(2))
    expected = fuselage.gated_rms_norm(x, gate, activation="sigmoid", group_size=16)
    assert_same_bits(module(x, gate), expected, "out")


# Layers for kernelize

LAYERS = {
    "RMSNormGated": ("qwen3_next.Qwen3NextRMSNormGated", "olmo_hybrid.OlmoHybridRMSNormGated"),
    "FusedRMSNormGated": ("kimi_linear.KimiLinearRMSNormGated",),
}


@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAINING], ids=str)
@pytest.mark.parametrize(
    ("layer", "name"), [(layer, name) for layer, names in LAYERS.items() for name in names]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers(fuselage, device, layer, name, dtype, mode):
    plain = class_of(name)(128, eps=1e-5).to(device, dtype).train(mode == Mode.TRAINING)
    torch.nn.init.normal_(plain.weight, 1.0, 0.3)
    module = copy.deepcopy(plain)
    repository = LocalLayerRepository(Path(fuselage.__file__).parent, layer_name=layer)
    with use_kernel_mapping({"RMSNormGated": {device: repository}}, inherit_mapping=False):
        kernelize(module, mode=mode, device=device, use_fallback=False)
    assert module.forward.__func__.__qualname__ == f"{layer}.forward"
    x, gate = (normal((3, 5, 128), dtype, device) for _ in range(2))
    compare(module(x, gate), plain(x, gate), dtype, name)


def test_layers_are_what_the_hub_accepts(fuselage):
    for name in LAYERS:
        layer = getattr(fuselage.layers, name)
        assert layer.has_backward and layer.can_torch_compile
        assert layer.__init__ is torch.nn.Module.__init__
        members = {member for member in vars(layer) if not member.startswith("__")}
        assert members <= {"forward", "has_backward", "can_torch_compile"}
