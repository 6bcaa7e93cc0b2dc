"""The models and what is timed of them. Weights are random; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from .batch import Batches
from .measure import nothing


@dataclass
class Scenario:
    """One thing to time.

    Attributes:
        title: Model, shape and dtype, for the table.
        model: With its weights, on the device.
        step: Runs it once, with the model to call: the model itself, or compiled.
        outputs: What must agree with the plain model's, from a run of its own, with what to call.
        compiled: Compiles the model in place, and returns what to call and what undoes it.
        integration: The part of fuselage.integrations that patches it.
        variants: Names of what is patched, and the options of `patch`. Each replaces more than the
            one before.
        before: What each step needs before it, and what is not timed.
        per_sample: Steps in what the table calls one sample, such as the steps of a denoising.
        batches: What finds the largest batch, for the plain model and the last variant.
        notes: What a reader must know: sizes that were reduced, and how it was compiled.
    """

    title: str
    model: torch.nn.Module
    step: Callable[[Callable], object]
    outputs: Callable[[Callable], tuple[torch.Tensor, ...]]
    compiled: Callable[[], tuple[Callable, Callable[[], None]]]
    integration: str
    before: Callable[[], object] = nothing
    per_sample: int = 1
    batches: Batches | None = None
    variants: dict[str, dict] = field(default_factory=lambda: {"fuselage": {}})
    notes: list[str] = field(default_factory=list)


# Causal language models, by the name of their classes, and a size where there are several.
SHAPES = {
    "Llama": {
        "title": "Llama-3-8B shape",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
    "Qwen3": {
        "title": "Qwen3-8B shape",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen3-4B": {
        "title": "Qwen3-4B shape",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "Gemma3": {
        "title": "Gemma-3-4B shape",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "Olmo2": {
        "title": "OLMo-2-7B shape",
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Of 8B with 4096 tokens: weights, gradients, AdamW's averages and activations of a layer, and the
# same of embedding, head, logits and loss.
TRAINING_BYTES_A_LAYER, TRAINING_BYTES = 3.0 * 2**30, 22 * 2**30
LAYERS_COMPILED_WHOLE = 8


@contextmanager
def created_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Weights are made where they stay, and in their dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def causal_model(
    device: str,
    quick: bool,
    layers: int | None,
    exact: bool,
    training: bool = False,
    kind: str = "Llama",
    whole: bool = False,
):
    """The model, its title and notes. What is compiled whole has few layers, if not told how many:
    compiling takes the longer the more there are.
    """
    import transformers

    sizes = {**SHAPES[kind], **(SMALL if quick else {})}
    title = sizes.pop("title")
    all_layers = sizes["num_hidden_layers"]
    if whole and layers is None:
        layers = min(all_layers, LAYERS_COMPILED_WHOLE)
    if training and not quick and layers is None:
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        layers = int((free - TRAINING_BYTES) / TRAINING_BYTES_A_LAYER)
        layers = max(1, min(all_layers, layers))
    sizes["num_hidden_layers"] = layers or all_layers
    dtype = torch.float32 if quick or exact else torch.bfloat16
    name = kind.partition("-")[0]
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    with created_on(device, dtype):
        model = getattr(transformers, f"{name}ForCausalLM")(config(**sizes, use_cache=False))
    notes = []
    if sizes["num_hidden_layers"] != all_layers:
        notes.append(f"{sizes['num_hidden_layers']} of {all_layers} layers")
    title = f"small {kind}" if quick else title
    return model.eval(), f"{title}, {'fp32' if quick or exact else 'bf16'}", notes


def compiled_blocks(blocks: list[torch.nn.Module], model: torch.nn.Module):
    """Compiles the blocks, which are alike, one by one: once for all of them."""

    def compile() -> tuple[Callable, Callable[[], None]]:
        torch._dynamo.reset()
        for block in blocks:
            block.compile(fullgraph=True)

        def undo() -> None:
            for block in blocks:
                block._compiled_call_impl = None

        return model, undo

    return compile


BLOCKS_NOTE = "compiled block by block (fullgraph), as all blocks are alike"


def compiled_whole(model: torch.nn.Module, mode: str = "default"):
    """Compiles the model, masks included."""

    def compile() -> tuple[Callable, Callable[[], None]]:
        torch._dynamo.reset()
        return torch.compile(model, mode=mode), torch._dynamo.reset

    return compile


def how_compiled(model: torch.nn.Module, whole: bool) -> tuple[Callable, str]:
    """What compiles a causal model, and the note on it."""
    if whole:
        return compiled_whole(model), "compiled whole"
    return compiled_blocks(list(model.model.layers), model), BLOCKS_NOTE


def prefill(
    device: str,
    quick: bool,
    layers: int | None,
    exact: bool = False,
    kind: str = "Llama",
    whole: bool = False,
) -> Scenario:
    """Logits of the last token of prompts."""
    model, title, notes = causal_model(device, quick, layers, exact, kind=kind, whole=whole)
    compile, note = how_compiled(model, whole)
    batch, tokens = (2, 64) if quick else (2, 4096)
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=device)

    @torch.no_grad()
    def step(call: Callable) -> torch.Tensor:
        return call(input_ids=ids, logits_to_keep=1).logits

    return Scenario(
        title=f"{title}: prefill of {batch}x{tokens} tokens",
        model=model,
        step=step,
        outputs=lambda call: (step(call),),
        compiled=compile,
        integration="transformers",
        notes=[*notes, note],
    )


def decode(device: str, quick: bool, layers: int | None, exact: bool = False) -> Scenario:
    """One token for each sequence, with a static cache."""
    from transformers import StaticCache

    model, title, notes = causal_model(device, quick, layers, exact)
    batch, context = (2, 32) if quick else (8, 1024)
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    cache = StaticCache(config=model.config, max_cache_len=context + 1)
    position = torch.full((batch, 1), context, device=device)

    @torch.no_grad()
    def fill() -> None:
        cache.reset()
        model.model(input_ids=ids, past_key_values=cache, use_cache=True)

    @torch.no_grad()
    def step(call: Callable) -> torch.Tensor:
        return call(
            input_ids=ids[:, -1:], position_ids=position, past_key_values=cache, use_cache=True
        ).logits

    def outputs(call: Callable) -> tuple[torch.Tensor, ...]:
        fill()
        return (step(call).clone(),)  # a CUDA graph writes to the same memory again

    fill()
    # CUDA graphs: a step is short enough for the launches to be what takes the time.
    mode = "reduce-overhead" if device == "cuda" else "default"
    return Scenario(
        title=f"{title}: decode, {batch} sequences after {context} tokens",
        model=model,
        step=step,
        outputs=outputs,
        compiled=compiled_whole(model, mode),
        integration="transformers",
        # The same token again: every step does the same work.
        before=lambda: _rewind(cache, context),
        notes=[*notes, "static cache", "compiled whole, with CUDA graphs on a GPU"],
    )


def _rewind(cache, length: int) -> None:
    """Makes a static cache forget the tokens after `length`."""
    for layer in cache.layers:
        for name in ("cumulative_length", "_cumulative_length"):
            value = getattr(layer, name, None)
            if isinstance(value, torch.Tensor):
                value.fill_(length)
            elif value is not None:
                setattr(layer, name, length)


def training(
    device: str,
    quick: bool,
    layers: int | None,
    exact: bool = False,
    kind: str = "Llama",
    whole: bool = False,
) -> Scenario:
    """Forward, loss, backward and AdamW."""
    model, title, notes = causal_model(device, quick, layers, exact, True, kind, whole)
    compile, note = how_compiled(model, whole)
    model.train()
    batch, tokens = (2, 64) if quick else (1, 4096)
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=device)
    # A rate of zero: the model stays the same for all columns, and the work does too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=device == "cuda")

    def loss_of(call: Callable) -> torch.Tensor:
        return call(input_ids=ids, labels=ids).loss

    def step(call: Callable) -> None:
        loss_of(call).backward()
        optimizer.step()
        optimizer.zero_grad()

    def outputs(call: Callable) -> tuple[torch.Tensor, ...]:
        loss = loss_of(call)
        loss.backward()
        gradients = _gradients_of_norms(model)
        optimizer.zero_grad()
        return loss.detach(), *gradients

    return Scenario(
        title=f"{title}: training step of {batch}x{tokens} tokens, AdamW",
        model=model,
        step=step,
        outputs=outputs,
        compiled=compile,
        integration="transformers",
        notes=[*notes, note],
    )


def _gradients_of_norms(model: torch.nn.Module) -> list[torch.Tensor]:
    """Those of the last norm and of one in the first layer."""
    norms = (model.model.norm, model.model.layers[0].post_attention_layernorm)
    return [norm.weight.grad for norm in norms]


HEAD_ROWS = 4096  # of the gradient of a head that are compared: all would take 1 GB


def training_loss(
    device: str, quick: bool, layers: int | None, exact: bool = False, kind: str = "Llama"
) -> Scenario:
    """Forward, loss and backward; the loss may be taken from what goes into the head."""
    model, title, notes = causal_model(device, quick, layers, exact, True, kind, whole=True)
    compile, note = how_compiled(model, True)
    model.train()
    vocab = model.config.vocab_size
    batch, tokens = (2, 64) if quick else (8, 1024)
    ids = torch.randint(0, vocab, (batch, tokens), device=device)

    def loss_of(call: Callable, ids: torch.Tensor) -> torch.Tensor:
        return call(input_ids=ids, labels=ids).loss

    def outputs(call: Callable) -> tuple[torch.Tensor, ...]:
        model.zero_grad()
        loss = loss_of(call, ids)
        loss.backward()
        head = model.get_output_embeddings().weight.grad[:: max(1, vocab // HEAD_ROWS)].clone()
        gradients = [*_gradients_of_norms(model), head]
        model.zero_grad()
        return loss.detach(), *gradients

    def run_batch(sequences: int) -> None:
        many = torch.randint(0, vocab, (sequences, tokens), device=device)
        try:
            loss_of(model, many).backward()
        finally:
            model.zero_grad()

    return Scenario(
        title=f"{title}: training step of {batch}x{tokens} tokens, without an optimizer",
        model=model,
        step=lambda call: loss_of(call, ids).backward(),
        outputs=outputs,
        compiled=compile,
        integration="transformers",
        variants={"fuselage": {}, "fuselage + loss": {"loss": True}},
        before=model.zero_grad,
        batches=Batches(run_batch, tokens, first=batch, most=4 if quick else 1024),
        notes=[*notes, note, "no label is ignored"],
    )


def ltx_video(device: str, quick: bool, layers: int | None, exact: bool = False) -> Scenario:
    """The transformer of LTX-Video: 30 steps of denoising, with guidance."""
    from diffusers import LTXVideoTransformer3DModel

    sizes = {"num_attention_heads": 4, "cross_attention_dim": 256, "num_layers": 2} if quick else {}
    notes = []
    if layers is not None:
        sizes["num_layers"] = layers
        notes.append(f"{layers} of 28 layers")
    dtype = torch.float32 if quick or exact else torch.bfloat16
    with created_on(device, dtype):
        model = LTXVideoTransformer3DModel(**sizes).eval()
    pixel_frames, pixel_height, pixel_width = (9, 64, 96) if quick else (49, 512, 768)
    frames, height, width = (pixel_frames - 1) // 8 + 1, pixel_height // 32, pixel_width // 32
    text, steps = (16, 3) if quick else (128, 30)
    with created_on(device, dtype):
        inputs = {
            "hidden_states": torch.randn(2, frames * height * width, 128),
            "encoder_hidden_states": torch.randn(2, text, 4096),
            "timestep": torch.full((2,), 500.0),
            "encoder_attention_mask": torch.ones(2, text),
        }
    inputs |= {
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "return_dict": False,
    }

    @torch.no_grad()
    def step(call: Callable) -> torch.Tensor:
        return call(**inputs)[0]

    size = "small LTX-Video" if quick else "LTX-Video"
    return Scenario(
        title=f"{size}, {'fp32' if quick or exact else 'bf16'}: {pixel_frames} frames of "
        f"{pixel_height}x{pixel_width}, {steps} steps, with guidance (batch 2)",
        model=model,
        step=step,
        outputs=lambda call: (step(call),),
        compiled=compiled_blocks(list(model.transformer_blocks), model),
        integration="diffusers",
        per_sample=steps,
        notes=[*notes, BLOCKS_NOTE, "the transformer alone: no text encoder, no autoencoder"],
    )


WHOLE = ("Llama", "Qwen3", "Gemma3", "Olmo2")
LOSSES = ("Llama", "Qwen3-4B")

# With `exact`, in float32.
SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "llama-prefill": prefill,
    "llama-decode": decode,
    "llama-training": training,
    "ltx-video": ltx_video,
    **{
        f"{kind.lower()}-{factory.__name__}-whole": partial(factory, kind=kind, whole=True)
        for kind in WHOLE
        for factory in (prefill, training)
    },
    **{f"{kind.lower()}-training-loss": partial(training_loss, kind=kind) for kind in LOSSES},
}
