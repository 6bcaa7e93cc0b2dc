"""fuselage in the models of transformers: a mapping for `kernelize`, and `patch`.

    from kernels import Mode, get_kernel, kernelize, use_kernel_mapping

    fuselage = get_kernel("fuselage-kernels/fuselage", version=1)
    with use_kernel_mapping(fuselage.integrations.transformers.kernel_mapping()):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

    report = fuselage.integrations.transformers.patch(model)

`kernelize` replaces what the model has names for. `patch` goes by what modules compute, and finds
the same layers and those without a name. docs/integrations.md compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Optional, Union

import torch
import torch.nn.functional as F

from .. import layers
from ._attention import recognise_masks
from ._fusion import recognise_fusion
from ._gated_norms import recognise_gated_norm
from ._gates import recognise_activation, recognise_experts_gate, recognise_gated_mlp
from ._linears import check_option, replace_linears, restore_linears
from ._loss import recognise_causal_loss
from ._norms import recognise_norm
from ._patch import Report, patch_modules, unpatch_modules
from ._rotary import recognise_norm_and_rotary, recognise_rotary_attention
from ._routers import recognise_router, recognise_router_block

__all__ = ["Report", "kernel_mapping", "patch", "unpatch"]

_DEVICES = ("cpu", "cuda", "rocm")
# Layers that stand under another name in models: ours, and that name.
_RENAMED = {"RotaryPosEmb": "rotary_pos_emb"}


class _LoadedLayer:
    """A layer of the kernel that is loaded, for `kernels`: nothing is looked up or downloaded."""

    def __init__(self, layer_name: str):
        self.layer_name = layer_name

    def load(self) -> type[torch.nn.Module]:
        return getattr(layers, self.layer_name)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.layer_name == other.layer_name

    def __hash__(self) -> int:
        return hash((__name__, self.layer_name))

    def __repr__(self) -> str:
        return f"{layers.__name__}.{self.layer_name}"


_ONE_KERNEL = {
    "SiLU": F.silu,
    "GeLU": F.gelu,
    "GeluTanh": partial(F.gelu, approximate="tanh"),
}


class _PlainLayer(_LoadedLayer):
    """PyTorch's own. Nothing in its place would be an error: `kernelize` asks for every mode."""

    def load(self) -> type[torch.nn.Module]:
        return _plain_layer(self.layer_name)

    def __hash__(self) -> int:
        return hash((__name__, "plain", self.layer_name))

    def __repr__(self) -> str:
        return f"{self.layer_name} of PyTorch"


@cache
def _plain_layer(layer_name: str) -> type[torch.nn.Module]:
    activation = _ONE_KERNEL[layer_name]

    class Plain(torch.nn.Module):
        has_backward = True
        can_torch_compile = True

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return activation(input)

    return Plain


def kernel_mapping(
    repo_id: Optional[str] = None,
    repo_path: Optional[Union[str, Path]] = None,
    *,
    version: int = 1,
    trust_remote_code: bool = False,
) -> dict:
    """The mapping that `kernels.use_kernel_mapping` and `register_kernel_mapping` take.

    It is the same for inference and training, and has every device that fuselage runs on. In the
    modes with torch.compile, SiLU, GELU and its tanh form are PyTorch's: the compiler fuses those
    with their neighbours, and cannot look into an operator of ours.

    Args:
        repo_id: A repository of the Hub, such as "fuselage-kernels/fuselage".
        repo_path: A local build: a variant's folder, or a checkout with `build/`. With neither of
            the two, the layers are those of the kernel that is loaded already.
        version: Of the repository.
        trust_remote_code: As in `kernels.get_kernel`.

    Returns:
        `{layer: {device: {mode: repository}}}`.

    Raises:
        RuntimeError: Both `repo_id` and `repo_path` are given.
        ImportError: The package `kernels` is not installed.
    """
    if repo_id is not None and repo_path is not None:
        raise RuntimeError("fuselage: kernel_mapping takes `repo_id` or `repo_path`, got both")
    members = vars(layers).items()
    names = [k for k, v in members if isinstance(v, type) and issubclass(v, torch.nn.Module)]

    kernels = _kernels()

    def repository(layer_name: str):
        if repo_path is not None:
            return kernels.LocalLayerRepository(Path(repo_path), layer_name=layer_name)
        if repo_id is not None:
            return kernels.LayerRepository(
                repo_id,
                layer_name=layer_name,
                version=version,
                trust_remote_code=trust_remote_code,
            )
        return _LoadedLayer(layer_name)

    return {_RENAMED.get(k, k): dict.fromkeys(_DEVICES, _modes(k, repository(k))) for k in names}


def _kernels() -> ModuleType:
    """The package `kernels`, the only one of others than Python and PyTorch that is imported."""
    try:
        import kernels
    except ImportError as error:
        raise ImportError(
            "fuselage: kernel_mapping needs the package `kernels`: pip install kernels"
        ) from error
    return kernels


def _modes(layer_name: str, repository: object) -> dict:
    """The modes of `kernels` with what stands for the layer in each."""
    Mode = _kernels().Mode
    compiled = _PlainLayer(layer_name) if layer_name in _ONE_KERNEL else repository
    modes = dict.fromkeys((Mode.INFERENCE, Mode.TRAINING), repository)
    return modes | {mode | Mode.TORCH_COMPILE: compiled for mode in modes}


# What patch looks for, in this order.
PARTS = (
    recognise_gated_mlp,
    recognise_experts_gate,
    recognise_norm,
    recognise_gated_norm,
    recognise_activation,
    recognise_rotary_attention,
    recognise_router,
    recognise_router_block,
)
BLOCKS = (recognise_fusion, recognise_norm_and_rotary)
BODIES = (recognise_masks,)


def patch(
    model: torch.nn.Module,
    *,
    loss: bool = False,
    linear: Optional[str] = None,
    keep: Sequence[str] = (),
) -> Report:
    """Replaces the forward of every layer that fuselage has a faster one for.

    A layer is replaced if its attributes match and if it computes the same on small random inputs.
    In half precision norms round where the model's do; gates, rotary embeddings and adaptive norms
    round once, where the model's may round several times. A layer that only looks like a norm, a
    gated MLP, an activation or a router, or that cannot be tried, is left alone, and the report
    says why.

    Compiled models make no mask where none is given: attention then runs in its fastest kernel.

    Parameters, classes and the keys of the state dict do not change. A deep copy of the model is
    patched too; a pickle of it loads as the plain model. Works before and after accelerate's hooks,
    with `torch.compile` and in training. Patching twice does no harm.

    Args:
        model: Any module; its parameters may be anywhere, the meta device included.
        loss: Also take the loss of a causal language model from what goes into its head, by
            `linear_cross_entropy`: in training, where labels are given, logits are never whole in
            memory, and the model returns none. In `eval`, with `logits_to_keep`, with
            `return_dict=False`, and with a head that is sharded, hooked or no plain Linear, it
            returns them as ever. Models that scale or cap their logits are left alone.
        linear: "fp8" makes the linear layers of the model's blocks `modules.Fp8Linear`, with a
            scale a row; "fp8_blockwise" with scales of groups and blocks. Heads, embeddings, norms
            and routers stay, and what the report names. Then the state dict has float8 weights and
            their scales, and the linears that were there are kept beside for `unpatch`: both take
            memory. Models that are quantised already are left alone (docs/fp8.md).
        keep: Names of modules whose linears stay, or patterns as "*.down_proj".

    Returns:
        What was replaced and what was not. `print` it.
    """
    check_option(linear)
    blocks = (*BLOCKS, recognise_causal_loss) if loss else BLOCKS
    report = patch_modules(model, PARTS, blocks, bodies=BODIES)
    replace_linears(model, linear, keep, report, fuses_quantization=True)
    return report


def unpatch(model: torch.nn.Module) -> int:
    """Undoes `patch`. Returns the number of modules and linear layers that were restored."""
    return restore_linears(model) + unpatch_modules(model)
