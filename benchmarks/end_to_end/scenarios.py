"""The models and what is timed of them. Weights are random; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .batch import Batches
from .diffusion import AUTOENCODERS, DENOISERS, decoding, denoising
from .models import FLOAT8, Scenario, compiled_whole, created_on, how_compiled

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
    "Qwen3Moe": {
        "title": "Qwen3-30B-A3B shape",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
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
SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
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
    if quick and "num_experts" in sizes:
        sizes |= SMALL_EXPERTS
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


def prefill(
    device: str,
    quick: bool,
    layers: int | None,
    exact: bool = False,
    kind: str = "Llama",
    whole: bool = False,
    float8: bool = False,
) -> Scenario:
    """Logits of the last token of prompts."""
    model, title, notes = causal_model(device, quick, layers, exact, kind=kind, whole=whole)
    compile, note = how_compiled(model, None if whole else list(model.model.layers))
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
        **(FLOAT8 if float8 else {}),
    )


def decode(
    device: str,
    quick: bool,
    layers: int | None,
    exact: bool = False,
    kind: str = "Llama",
    float8: bool = False,
) -> Scenario:
    """One token for each sequence, with a static cache."""
    from transformers import StaticCache

    model, title, notes = causal_model(device, quick, layers, exact, kind=kind)
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
        **(FLOAT8 if float8 else {}),
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
    compile, note = how_compiled(model, None if whole else list(model.model.layers))
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
    compile, note = how_compiled(model, None)
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


# By the name of their classes. Batch and tokens are what is timed.
ENCODERS = {
    "Bert": {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
        **{"num_hidden_layers": 24, "batch": 32, "tokens": 512},
    },
    "ModernBert": {
        **{"hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16},
        **{"num_hidden_layers": 28, "local_attention": 128, "batch": 8, "tokens": 4096},
    },
}
SMALL_ENCODER = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"num_hidden_layers": 2, "batch": 2, "tokens": 16},
}


def encoding(
    device: str, quick: bool, layers: int | None, exact: bool = False, kind: str = "Bert"
) -> Scenario:
    """The hidden states of an encoder."""
    import transformers

    sizes = {**ENCODERS[kind], **(SMALL_ENCODER if quick else {})}
    batch, tokens = sizes.pop("batch"), sizes.pop("tokens")
    all_layers = sizes["num_hidden_layers"]
    sizes["num_hidden_layers"] = layers or all_layers
    notes = [] if layers is None else [f"{layers} of {all_layers} layers"]
    dtype = torch.float32 if quick or exact else torch.bfloat16
    config = getattr(transformers, f"{kind}Config")(**sizes)
    options = {"add_pooling_layer": False} if kind == "Bert" else {}
    with created_on(device, dtype):
        model = getattr(transformers, f"{kind}Model")(config, **options).eval()
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=device)

    @torch.no_grad()
    def step(call: Callable) -> torch.Tensor:
        return call(input_ids=ids).last_hidden_state

    compile, note = how_compiled(model, None)
    name = kind.replace("Bert", "BERT")
    title = f"small {name}" if quick else f"{name}-large shape"
    return Scenario(
        title=f"{title}, {'fp32' if quick or exact else 'bf16'}: {batch}x{tokens} tokens",
        model=model,
        step=step,
        outputs=lambda call: (step(call),),
        compiled=compile,
        integration="transformers",
        notes=[*notes, note],
    )


WHOLE = ("Llama", "Qwen3", "Gemma3", "Olmo2")
LOSSES = ("Llama", "Qwen3-4B")
IN_FLOAT8 = ("Llama", "Qwen3")
DENOISERS_IN_FLOAT8 = ("ltx-video", "flux")

# With `exact`, in float32.
SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "llama-prefill": prefill,
    "qwen3moe-prefill": partial(prefill, kind="Qwen3Moe"),
    "llama-decode": decode,
    "llama-training": training,
    **{kind.lower(): partial(encoding, kind=kind) for kind in ENCODERS},
    **{kind: partial(denoising, kind=kind) for kind in DENOISERS},
    **{kind: partial(decoding, kind=kind) for kind in AUTOENCODERS},
    **{
        f"{kind}-channels-last": partial(decoding, kind=kind, channels_last=True)
        for kind in AUTOENCODERS
    },
    **{
        f"{kind.lower()}-{factory.__name__}-whole": partial(factory, kind=kind, whole=True)
        for kind in WHOLE
        for factory in (prefill, training)
    },
    **{f"{kind.lower()}-training-loss": partial(training_loss, kind=kind) for kind in LOSSES},
    **{
        f"{kind.lower()}-{factory.__name__}-fp8": partial(factory, kind=kind, float8=True)
        for kind in IN_FLOAT8
        for factory in (prefill, decode)
    },
    **{f"{kind}-fp8": partial(denoising, kind=kind, float8=True) for kind in DENOISERS_IN_FLOAT8},
}
