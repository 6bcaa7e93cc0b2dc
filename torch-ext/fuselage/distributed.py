"""Models on many GPUs, by PyTorch's own tensor and sequence parallelism.

    import torch.distributed.tensor.parallel as parallel

    mesh = torch.distributed.init_device_mesh("cuda", (8,))
    fuselage.distributed.parallelize_llama(model, mesh)
    with parallel.loss_parallel():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

All functions of fuselage take DTensors; what is here places them. For a module that is called with
one tensor, such as `modules.RMSNorm`, PyTorch's `SequenceParallel` is right as it is.
"""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

__all__ = ["ResidualSequenceParallel", "parallelize_llama"]

_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


class ResidualSequenceParallel(SequenceParallel):
    """PyTorch's `SequenceParallel` for modules `(x, residual) -> (out, new_residual)`.

    Such are `modules.FusedAddRMSNorm` and `modules.FusedAddLayerNorm`. Both inputs, given by
    position or by name, are sharded along the sequence: a DTensor of other placements, partial sums
    included, is redistributed; a plain tensor is taken for the shard of this rank. The outputs are
    sharded alike. All ranks get the parameters of the first one.

        plan = {"norm": fuselage.distributed.ResidualSequenceParallel()}
        parallelize_module(model, mesh, plan)

    Args:
        sequence_dim: The dimension of both inputs that counts tokens.
        use_local_output: Return the shards of this rank, not DTensors. Set it where plain inputs
            have different lengths on the ranks: a DTensor made of those would have a wrong shape.

    Raises:
        TypeError: At a call: the inputs are not two tensors.
        RuntimeError: At a call: an input is a DTensor of another mesh or lacks the dimension of the
            sequence, or the module does not return two DTensors.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    2022, https://arxiv.org/abs/2205.05198, and PyTorch's `SequenceParallel`.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        _replicate(module, device_mesh, self.src_data_rank)
        shard = partial(self._shard_inputs, mesh=device_mesh)
        module.register_forward_pre_hook(shard, with_kwargs=True)
        module.register_forward_hook(self._outputs)
        return module

    def _shard_inputs(self, module: torch.nn.Module, args: tuple, kwargs: dict, *, mesh):
        given = [*args, *kwargs.values()]
        if len(given) != 2 or not all(isinstance(t, torch.Tensor) for t in given):
            kinds = ", ".join(type(t).__name__ for t in given) or "nothing"
            raise TypeError(f"{self._name(module)} takes two tensors, x and residual; got {kinds}")
        (placement,) = self.sequence_sharding
        for t in given:
            if not -t.dim() <= placement.dim < t.dim():
                raise RuntimeError(
                    f"{self._name(module)} needs inputs with a dimension {placement.dim}, the "
                    f"sequence; got one of shape {tuple(t.shape)}"
                )
            if isinstance(t, DTensor) and t.device_mesh != mesh:
                raise RuntimeError(
                    f"{self._name(module)} is on {mesh}; got an input on {t.device_mesh}"
                )
        whole = next((t for t in given if isinstance(t, DTensor)), None)
        sharded = [self._sharded(t, whole, mesh) for t in given]
        return tuple(sharded[: len(args)]), dict(zip(kwargs, sharded[len(args) :]))

    def _sharded(self, t: torch.Tensor, whole: DTensor | None, mesh: DeviceMesh) -> DTensor:
        """`t` along the sequence, which is that of the DTensor beside it if there is one."""
        if isinstance(t, DTensor):
            if t.placements == self.sequence_sharding:
                return t
            return t.redistribute(placements=self.sequence_sharding, async_op=True)
        known = {} if whole is None else {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(t, mesh, self.sequence_sharding, run_check=False, **known)

    def _outputs(self, module: torch.nn.Module, args: tuple, outputs):
        several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        if len(several) != 2 or not all(isinstance(t, DTensor) for t in several):
            kinds = ", ".join(type(t).__name__ for t in several)
            raise RuntimeError(
                f"{self._name(module)} must return two DTensors, out and new_residual; "
                f"it returned {kinds}"
            )
        return tuple(t.to_local() for t in several) if self.use_local_output else tuple(several)

    def _name(self, module: torch.nn.Module) -> str:
        kind = f"{type(module).__name__}({module.extra_repr()})"
        return f"fuselage: the {kind} in {type(self).__name__}"


def _replicate(
    module: torch.nn.Module, mesh: DeviceMesh, src_data_rank: int | None
) -> torch.nn.Module:
    """Gives all ranks the parameters of one. What is frozen stays so."""

    def replicate(name: str, submodule: torch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in submodule.named_parameters(recurse=False):
            t = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=src_data_rank)
            whole = torch.nn.Parameter(t, requires_grad=parameter.requires_grad)
            submodule.register_parameter(key, whole)

    return distribute_module(module, mesh, replicate)


def parallelize_llama(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Tensor and sequence parallelism for transformers' Llama and models of its structure.

    Mistral and Qwen2 are such. `parallelize_module` of PyTorch changes the model in place:

        embed_tokens, lm_head                    sharded over the vocabulary
        q_proj, k_proj, v_proj                   columns sharded: whole heads
        gate_proj, up_proj                       columns sharded
        o_proj, down_proj                        rows sharded
        norms                                    replicated
        what attention and MLP take              gathered
        what norms take, and residuals           sharded along the sequence

    Call the model with the same tokens on all ranks. Its logits are DTensors sharded over the
    vocabulary: compute the loss and the backward under PyTorch's `loss_parallel()`. To sample, call
    `lm_head_sample(hidden[:, -1], model.lm_head.weight)` with the hidden states of `model.model`;
    given the same hidden states and seed, it draws what one process draws. `logits_to_keep` may be
    a number, not a tensor; `generate` of transformers needs whole logits, and fails.

    An embedding that is tied to the head stays one parameter. Gradients of norms are partial sums,
    as with PyTorch's `SequenceParallel`; optimizers, FSDP2, and from PyTorch 2.12 on
    `clip_grad_norm_` sum them. That of an embedding without a tie is whole on each rank, as with
    PyTorch's `RowwiseParallel`.

    `fuselage.integrations.transformers.patch` may come before or after. `fully_shard` over another
    dimension of the mesh comes after.

    Args:
        model: With a head, and whole on each rank, on any device, the meta device included. The
            weights of the first rank of the mesh count.
        mesh: Of one dimension. Its size divides the numbers of heads and of key-value heads, and
            the intermediate size. Before PyTorch 2.13 it divides the number of tokens, too: a
            linear of DTensors fails there otherwise.

    Returns:
        The model.

    Raises:
        RuntimeError: The model has parameters, norms or shapes that the plan does not know, such as
            norms of q and k, packed projections or experts; or PyTorch is older than 2.11. The
            model is as it was.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    2022, https://arxiv.org/abs/2205.05198.
    """
    if _VERSION < (2, 11):
        raise RuntimeError(
            "fuselage: parallelize_llama needs PyTorch 2.11 or newer: the sharded embedding of "
            f"{torch.__version__} loses its mask"
        )
    if mesh.ndim != 1:
        raise RuntimeError(
            f"fuselage: parallelize_llama takes a mesh of one dimension, got one of {mesh.ndim}; "
            "take a dimension of it, such as mesh['tp']"
        )
    _Llama(model).check(mesh.size())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(model, mesh, _plan())
    if tied:  # both were sharded over the vocabulary, each for itself
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


class _Whole(ParallelStyle):
    """A norm whose input is sharded along the sequence already: only its parameters change.

    NOTE: not SequenceParallel, whose hooks would do nothing here. A patched decoder layer calls a
    norm that has hooks with one tensor, and adds the residual by itself.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return _replicate(module, device_mesh, self.src_data_rank)


class _WholeSequence(PrepareModuleInput):
    """Gathers the sequence, of the first argument or of `hidden_states`: callers do either."""

    def __init__(self):
        super().__init__(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )

    def _prepare_input_fn(self, inputs, device_mesh):
        first = super()._prepare_input_fn(inputs[:1], device_mesh) if inputs else ()
        return (*first, *inputs[1:])


_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_COLUMNS = (*_HEADS, "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def _plan() -> dict[str, ParallelStyle]:
    sequence = {"output_layouts": Shard(1), "use_local_output": False}
    layer = {
        **dict.fromkeys(_NORMS, _Whole()),
        **dict.fromkeys(("self_attn", "mlp"), _WholeSequence()),
        **dict.fromkeys(_COLUMNS, ColwiseParallel()),
        **dict.fromkeys(_ROWS, RowwiseParallel(**sequence)),
    }
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **sequence),
        **{f"model.layers.*.{name}": style for name, style in layer.items()},
        "model.norm": _Whole(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }


class _Llama:
    """A model that should have the structure of Llama."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.planned: set[str] = set()

    def refuse(self, name: str, why: str):
        raise RuntimeError(f"fuselage: parallelize_llama: `{name or 'the model'}` {why}")

    def check(self, ranks: int) -> None:
        """Refuses what the plan does not know, or cannot cut for so many ranks."""
        layers = self.get("model.layers")
        if not isinstance(layers, torch.nn.ModuleList) or len(layers) == 0:
            self.refuse("model.layers", "is no list of layers")
        self.leaf("model.embed_tokens", torch.nn.Embedding)
        if self.get("model.embed_tokens").max_norm is not None:
            self.refuse("model.embed_tokens", "has a max_norm")
        for index in range(len(layers)):
            self.check_layer(f"model.layers.{index}", ranks)
        self.norm("model.norm")
        self.leaf("lm_head", torch.nn.Linear)
        self.check_others()
        self.check_parameters()

    def get(self, name: str) -> torch.nn.Module:
        """A submodule by its name."""
        module = self.model
        parent = ""
        for part in name.split("."):
            child = module._modules.get(part)
            if child is None:
                self.refuse(parent, f"has no {part}")
            module, parent = child, f"{parent}.{part}".lstrip(".")
        return module

    def leaf(self, name: str, kind: type[torch.nn.Module]) -> torch.nn.Module:
        """A submodule that computes what a class of PyTorch does, with its plain weight."""
        module = self.get(name)
        if not isinstance(module, kind) or type(module).forward is not kind.forward:
            self.refuse(name, f"is a {type(module).__name__}, not a {kind.__name__}")
        sizes = (
            (module.num_embeddings, module.embedding_dim)
            if kind is torch.nn.Embedding
            else (module.out_features, module.in_features)
        )
        if module.weight.shape != sizes:
            shape = tuple(module.weight.shape)
            self.refuse(name, f"has a weight of shape {shape}, not {sizes}")
        self.planned.add(name)
        return module

    def norm(self, name: str) -> None:
        module = self.get(name)
        if any(True for _ in module.children()):
            self.refuse(name, "has submodules, which no norm has")
        self.planned.add(name)

    def check_layer(self, name: str, ranks: int) -> None:
        for norm in _NORMS:
            self.norm(f"{name}.{norm}")
        linears = {n: self.leaf(f"{name}.{n}", torch.nn.Linear) for n in (*_COLUMNS, *_ROWS)}
        head_dim = self.head_dim(f"{name}.self_attn")
        for column in _COLUMNS:
            what, width = ("heads", head_dim) if column in _HEADS else ("columns", 1)
            count, rest = divmod(linears[column].out_features, width)
            if rest or count % ranks:
                size = f"{linears[column].out_features} columns" if rest else f"{count} {what}"
                self.refuse(f"{name}.{column}", f"has {size}, which {ranks} ranks cannot share")

    def head_dim(self, name: str) -> int:
        """Of an attention that takes as many heads as its projections give."""
        attention = self.get(name)
        if not isinstance(getattr(attention, "head_dim", None), int):
            self.refuse(name, "does not say its head_dim")
        forward = inspect.unwrap(type(attention).forward)
        fixed = {"num_heads", "num_key_value_heads"} & {*forward.__code__.co_names}
        if fixed:
            self.refuse(name, f"views its projections by its {min(fixed)}, which a rank shares")
        return attention.head_dim

    def check_others(self) -> None:
        """That nothing else has parameters, or is a norm."""
        for name, module in self.model.named_modules():
            if name in self.planned:
                continue
            parameters = ", ".join(key for key, _ in module.named_parameters(recurse=False))
            if parameters:
                self.refuse(name, f"has parameters that the plan does not know: {parameters}")
            if "norm" in name.rpartition(".")[2].lower():
                self.refuse(name, "is a norm that the plan does not know")

    def check_parameters(self) -> None:
        """That each is a plain tensor of one module, unless it ties the embedding to the head."""
        owners: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor):
                self.refuse(name, "is a DTensor already; parallelize the model once, and first")
            other = owners.setdefault(id(parameter), name)
            tied = (other, name) == ("model.embed_tokens.weight", "lm_head.weight")
            if other != name and not tied:
                self.refuse(name, f"is `{other}`, too")
