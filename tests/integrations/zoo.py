"""Small models of every architecture of transformers that can be made by sizes alone."""

from __future__ import annotations

import inspect

import torch
from torch import nn

# By their names in configurations; each configuration gets those that it has.
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_or_config_json_file"), 99),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "dim"), 32),
    **dict.fromkeys(("d_embed", "embedding_size", "hidden_sizes", "embed_dims", "dims"), 32),
    **dict.fromkeys(("neck_hidden_sizes", "projection_dim", "conv_dim", "stem_channels"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "kv_lora_rank", "q_lora_rank", "state_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_topk"), 1),
    **dict.fromkeys(("image_size", "img_size"), 64),
    **dict.fromkeys(("depths", "num_encoder_blocks", "layer_depths"), 1),
    **dict.fromkeys(("num_mel_bins", "feature_projection_input_dim"), 16),
    **dict.fromkeys(("rotary_dim",), 4),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
    "patch_size": 4,
    "window_size": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "mask_token_id": 3,
    "sep_token_id": 2,
    "cls_token_id": 1,
}
_MAMBA = {"expand": 2, "n_groups": 1, "chunk_size": 8}
_MAMBA_LAYERS = {
    **{f"mamba_{name}": value for name, value in _MAMBA.items()},
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
}
# Of names that one architecture has.
OWN_SIZES = {
    "qwen3_next": {
        **dict.fromkeys(("linear_num_key_heads", "full_attention_interval"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        **{"linear_num_value_heads": 4, "decoder_sparse_step": 1},
    },
    "mamba2": {**_MAMBA, "num_heads": 8, "head_dim": 8, "state_size": 8},
    "bamba": {**_MAMBA_LAYERS, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA_LAYERS,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "jamba": {
        **{"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gemma3n_text": {
        **{"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8},
        **{"num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2},
        **{"layer_types": ["sliding_attention", "full_attention"]},
        **{"activation_sparsity_pattern": [0.0, 0.0]},
    },
    "gemma4_text": {
        **{"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8},
        **{"num_kv_shared_layers": 0, "global_head_dim": 8},
        **{"layer_types": ["sliding_attention", "full_attention"]},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
# What is not in the zoo, and why: sizes of other names, other inputs, packages that are not there.
NOT_BUILT = set(
    """
    audioflamingo3 bailing_hybrid bit blt cohere_compass_text cpmant cvt dbrx dinat efficientnet
    emu3 encoder-decoder esm esmc fsmt fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified
    gemma4_unified_assistant git glmasr got_ocr2 granite_speech granite_speech5_ctc
    granite_speech_plus hgnet_v2 hiera imagegpt kimi_linear lasr_ctc levit llama4 longcat_flash luke
    mobilenet_v1 mobilenet_v2 mobilevitv2 modernvbert moshi moss_transcribe_diarize mpt
    musicflamingo musicgen musicgen_melody nemo_speechlm neomme parakeet_ctc perceiver
    phi4_multimodal pp_lcnet pvt qwen2_audio qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_asr qwen4_exp qwen4_exp_text reformer roc_bert shieldgemma2 siglip2 t5gemma2 textnet
    timm_wrapper ultravbert vibevoice_asr voxtral voxtral_realtime wav2vec2-bert xlstm xmod zamba
    zamba2 zaya
    """.split()
)
TOO_SLOW = {"falcon_h1", "funnel", "longformer", "nemotron_h"}  # half a minute and more
LARGEST = 1_500_000  # parameters; what stays larger has sizes of other names
FAMILIES = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
}


class NotBuilt(Exception):
    """Why a model is not in the zoo."""


def architectures() -> list[tuple[str, str]]:
    """Family and type of every model; each type once."""
    from transformers.models.auto import modeling_auto

    seen: dict[str, str] = {}
    for family, mapping in FAMILIES.items():
        for name in getattr(modeling_auto, mapping):
            seen.setdefault(name, family)
    return [(family, name) for name, family in seen.items()]


def tested() -> list[tuple[str, str]]:
    """Those that are built and are not too slow."""
    left_out = NOT_BUILT | TOO_SLOW
    return [(family, name) for family, name in architectures() if name not in left_out]


def configuration(name: str):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    return kind(**{**_sizes(kind), **OWN_SIZES.get(name, {})})


def _sizes(kind: type) -> dict:
    """What `SIZES` has for it, and for the configurations that it is made of."""
    has = {*dir(kind), *inspect.signature(kind.__init__).parameters}
    for base in kind.__mro__:
        has |= vars(base).get("__annotations__", {}).keys()
    parts = getattr(kind, "sub_configs", {})
    sizes = {} if parts else {k: v for k, v in SIZES.items() if k in has}
    if "qk_rope_head_dim" in sizes:  # the rest of the head has a size of its own
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for key, value in list(sizes.items()):
        if getattr(kind, "attribute_map", {}).get(key) in sizes:
            del sizes[key]
            continue
        default = getattr(kind, key, None)
        if isinstance(default, property):
            del sizes[key]
        elif isinstance(default, (list, tuple)):  # one for each stage
            sizes[key] = type(default)([value] * len(default))
        elif callable(default):
            del sizes[key]
    sizes |= {k: _sizes(part) for k, part in parts.items() if part.__name__ != "AutoConfig"}
    return sizes


def make(family: str, name: str) -> tuple[nn.Module, dict]:
    """The model in inference mode with random weights, and inputs for it."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = getattr(modeling_auto, FAMILIES[family])[name]
    kind = getattr(transformers, kind if isinstance(kind, str) else kind[0])
    try:
        config = configuration(name)
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(config).parameters())
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {str(error)[:80]}") from error
    if size > LARGEST:
        raise NotBuilt(f"{size} parameters")
    torch.manual_seed(20261121)
    model = kind(config).eval()
    inputs = _inputs(family, model)
    try:
        with torch.no_grad():
            output(model, inputs)
    except Exception as error:
        raise NotBuilt(f"runs not: {type(error).__name__}: {str(error)[:80]}") from error
    return model, inputs


def _inputs(family: str, model: nn.Module) -> dict:
    if family == "vision":
        channels = getattr(model.config, "num_channels", 3)
        return {"pixel_values": torch.randn(2, channels, 64, 64)}
    if family == "speech":
        if model.main_input_name == "input_values":
            return {"input_values": torch.randn(2, 2000)}
        return {"input_features": torch.randn(2, 40, getattr(model.config, "num_mel_bins", 80))}
    ids = {"input_ids": torch.randint(4, 99, (2, 12))}
    return ids | (
        {"decoder_input_ids": torch.randint(4, 99, (2, 7))} if family == "seq2seq" else {}
    )


def output(model: nn.Module, inputs: dict) -> torch.Tensor:
    """Its logits, or what a diffusion model predicts."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def cast(value):
        tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if tensor else value

    result = model(**{name: cast(value) for name, value in inputs.items()})
    return result["logits"] if "logits" in result else result["sample"]
