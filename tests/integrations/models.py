"""Small models with random weights, and what the tests of the integrations ask of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(name: str, device: str = "cpu", **options) -> nn.Module:
    """The causal language model `name`, such as Llama, in float32, without dropout."""
    import transformers

    special = {
        # Every expert is used: a choice that a rounding can tip would hide all other differences.
        "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 2},
        "Phi": {"hidden_act": "gelu_new"},
    }.get(name, {})
    if name in ("Qwen3", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3", "GptOss"):
        special["head_dim"] = 16
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config)(**SIZES | special | options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    randomise(model)
    return model.to(device).eval()


def randomise(model: nn.Module) -> None:
    """Norm weights and biases of ones and zeros would hide mistakes."""
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if "norm" in type(module).__name__.lower():
                    parameter.normal_(1.0 if name == "weight" else 0.0, 0.2)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)


def tokens(rows: int = 2, columns: int = 16, device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, columns), device=device)


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits


@contextmanager
def counted_ops(fuselage, also: tuple[str, ...] = ()) -> Iterator[Counter]:
    """Counts the calls of fuselage's own ops, by name, and of those of PyTorch that `also` has."""
    counts: Counter = Counter()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts.update(_name_of(func, fuselage))
            counts.update({func.overloadpacket.__name__} & {*also})
            return func(*args, **(kwargs or {}))

    with Mode():
        yield counts


def _name_of(func, fuselage) -> list[str]:
    namespace, _, name = getattr(getattr(func, "_schema", None), "name", "").partition("::")
    ours = fuselage._ops.add_op_namespace_prefix("")[:-2]
    return [name.removesuffix("_fwd")] if namespace == ours else []


def small_autoencoder() -> nn.Module:
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=16,
    )


def compiled_and_counted(model: nn.Module, fuselage) -> tuple[Callable, Counter]:
    """The model compiled whole, and fuselage's ops in the graph, counted when it is traced."""
    from torch._dynamo.backends.registry import lookup_backend

    counts: Counter = Counter()

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            counts.update(_name_of(node.target, fuselage))
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend), counts


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def assert_no_farther(
    ours: Callable, plain: Callable, exact: Callable, seeds: int = 4, margin: float = 1.03
) -> None:
    """In half precision `ours(seed)` is as close to `exact(seed)` as `plain(seed)` is.

    Sums over seeds, because one model's roundings may happen to cancel.
    """
    our_error = plain_error = 0.0
    for seed in range(seeds):
        expected = exact(seed).double()
        our_error += rms(ours(seed).double() - expected)
        plain_error += rms(plain(seed).double() - expected)
    assert our_error <= margin * plain_error, (our_error, plain_error)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str = "", tol=2e-5) -> None:
    """float32 noise of a whole model, relative to the largest value."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    error = (actual - expected).abs().max()
    assert error <= tol * expected.abs().max(), f"{what}: {error} of {expected.abs().max()}"


def half_of(exact: nn.Module) -> nn.Module:
    """A bfloat16 copy; `exact` gets its rounded parameters, so that only the arithmetic differs."""
    half = copy.deepcopy(exact).to(torch.bfloat16)
    exact.load_state_dict(half.state_dict())
    return half
