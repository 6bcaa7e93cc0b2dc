"""Recognises transformer blocks in which a residual addition meets a norm, and fuses the two.

Only a block whose norms were replaced gets another forward, and only if that computes the same.
Attention and MLP stay what they are and are called as before.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Callable, Optional

import torch

from ..ada_norm import ada_layer_norm, ada_rms_norm, gate_residual_ada_norm
from . import _probe
from ._ada import fusible
from ._patch import Found, Match, known_name, listened_to, marked, replacement_of

# Decoder layers of language models: the norm before the MLP takes the residual, too.

_LLAMA = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PHI3 = _LLAMA | {"resid_attn_dropout", "resid_mlp_dropout"}
_GEMMA = _LLAMA | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


def recognise_decoder_layer(module: torch.nn.Module) -> Found:
    """Llama's layer and those like it, Phi-3's, and Gemma's with norms on both sides."""
    children = dict(module.named_children())
    forms = [(_LLAMA, _llama_layer), (_PHI3, _phi3_layer), (_GEMMA, _gemma_layer)]
    form = next((form for names, form in forms if names == children.keys()), None)
    if form is None:
        return None
    fused = "pre_feedforward_layernorm" if form is _gemma_layer else "post_attention_layernorm"
    if not (replacement_of(children[fused]) or "").startswith("rms_norm"):
        return f"its {fused} is not replaced"
    function = _decoder_forward_of(module, form)
    if function is None or not _decoder_behaves_the_same(module, function):
        return "it does not add, normalise and add in the way of Llama, Phi-3 or Gemma"
    return Match(function.fuselage_replacement, function)


def _decoder_forward_of(module, form: Callable) -> Optional[Callable]:
    """The form with the arguments that the module's own forward hands to its attention."""
    parameters = _parameters_of(type(module).forward)
    if parameters is None:
        return None
    names = tuple(parameters)
    given = {name: _probe.random(1, seed=i).abs() for i, name in enumerate((*names, _OTHER))}
    plain, calls = _decoder_stand_ins(module)[0]
    result = _probe.call(partial(type(module).forward, plain, _probe.random(2, 3, 8), **given))
    if isinstance(result, TypeError):  # it takes no others
        given.pop(_OTHER)
        result = _probe.call(partial(type(module).forward, plain, _probe.random(2, 3, 8), **given))
    if isinstance(result, Exception) or not calls or not calls[-1].keys() <= given.keys():
        return None
    defaults = tuple((name, parameters[name]) for name in names if name in calls[-1])
    return _decoder_forward(form, names, defaults, _OTHER in calls[-1])


_OTHER = "an_argument_of_no_model"
_REQUIRED = inspect.Parameter.empty


def _parameters_of(forward: Callable) -> Optional[dict[str, object]]:
    """The names after `hidden_states` and their defaults."""
    try:
        _, first, *others = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return None
    defaults = {p.name: p.default for p in others if p.kind is p.POSITIONAL_OR_KEYWORD}
    plain = all(
        value is None or value is _REQUIRED or value is False for value in defaults.values()
    )
    named = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_KEYWORD) for p in others)
    return defaults if first.name == "hidden_states" and plain and named else None


@cache
def _decoder_forward(form: Callable, names: tuple, defaults: tuple, others: bool) -> Callable:
    def forward(self, hidden_states, *args, **kwargs):
        given = {**dict(zip(names, args)), **kwargs}
        options = {k: given.get(k, v) for k, v in defaults if k in given or v is not _REQUIRED}
        if others:
            options.update({k: v for k, v in given.items() if k not in names})
        return form(self, hidden_states, options)

    return marked("fused_add_rms_norm", forward)


def _decoder_behaves_the_same(module, function) -> bool:
    """With submodules that tell from the result what they were called with, and in which order."""
    names = _parameters_of(type(module).forward)
    x = _probe.random(2, 3, 8)
    values = {name: _probe.random(1, seed=i).abs() for i, name in enumerate(names)}
    required = {k: v for k, v in values.items() if names[k] is _REQUIRED}
    for plain, calls in _decoder_stand_ins(module):
        for args, keywords in (((), values), (tuple(values.values()), {}), ((), required)):
            expected = _probe.call(partial(type(module).forward, plain, x, *args, **keywords))
            actual = _probe.call(partial(function, plain, x, *args, **keywords))
            if not (_probe.agree_all(actual, expected) and _same_options(*calls[-2:])):
                return False
    # Experts may give their router's numbers, too. A layer that expects those is another one.
    pair = _probe.disguised(module.mlp, lambda x: (x, x))
    plain, _ = _decoder_stand_ins(module)[0]
    plain._modules["mlp"] = pair
    return isinstance(_probe.call(partial(type(module).forward, plain, x, **values)), Exception)


def _same_options(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)


def _decoder_stand_ins(module) -> list[tuple[torch.nn.Module, list[dict]]]:
    """For inference and training, each with the options that its attention was called with."""
    calls: list[dict] = []

    def attention(*args, hidden_states=None, **options):
        (x,) = args if hidden_states is None else (hidden_states, *args)
        calls.append(options)
        return torch.tanh(x) * 1.5, "weights"

    functions = {name: lambda x: x for name, _ in module.named_children()}
    functions |= {"self_attn": attention, "mlp": lambda x: torch.cos(3 * x)}
    for i, name in enumerate(name for name in functions if name.endswith("layernorm")):
        functions[name] = lambda x, i=i: torch.sin(x * (1 + i / 8)) + i
    stubs = {k: _probe.disguised(child, functions[k]) for k, child in module.named_children()}
    return [(plain, calls) for plain in _probe.stand_ins(module, None, stubs)]


def _add_then_norm(
    norm: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`r = residual + x`; returns `norm(r)` and `r`, in one pass if the norm is still ours.

    Since the patch, somebody may have replaced the norm or its forward, or may listen to it by
    hooks that expect one tensor.
    """
    if not listened_to(norm) and (replacement_of(norm) or "").startswith("rms_norm"):
        return norm(x, residual)
    total = residual + x
    return norm(total), total


def _llama_layer(self, hidden_states, options):
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(normed, **options)
    normed, residual = _add_then_norm(self.post_attention_layernorm, attended, hidden_states)
    return residual + self.mlp(normed)


def _phi3_layer(self, hidden_states, options):
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(normed, **options)
    attended = self.resid_attn_dropout(attended)
    normed, residual = _add_then_norm(self.post_attention_layernorm, attended, hidden_states)
    return residual + self.resid_mlp_dropout(self.mlp(normed))


def _gemma_layer(self, hidden_states, options):
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(normed, **options)
    attended = self.post_attention_layernorm(attended)
    normed, residual = _add_then_norm(self.pre_feedforward_layernorm, attended, hidden_states)
    return residual + self.post_feedforward_layernorm(self.mlp(normed))


# Blocks of diffusion transformers: gated residual, norm and modulation in one kernel.


def recognise_diffusion_block(module: torch.nn.Module) -> Found:
    """The blocks of LTX-Video, Flux, Stable Diffusion 3 and Wan."""
    kind = known_name(module, _DIFFUSION_BLOCKS)
    if kind is None:
        return None
    function, norms, arguments = _DIFFUSION_BLOCKS[kind]
    for name in norms:
        norm = getattr(module, name, None)
        if norm is None or isinstance(norm, torch.nn.Identity):
            continue
        if not replacement_of(norm):
            return f"its {name} is not replaced"
        if name != "norm2" and getattr(norm, "weight", None) is not None:
            return f"its {name} has a weight"
    if not _block_behaves_the_same(module, kind, function, arguments):
        return "it computes something else than the block of that name that fuselage knows"
    return Match(function.fuselage_replacement, function)


def _block_behaves_the_same(module, kind: str, function, arguments) -> bool:
    stubs = dict(module.named_children())
    for name, child in stubs.items():
        if "attn" in name:
            stubs[name] = _probe.disguised(child, _attention_of(name, kind))
        elif name.startswith("ff"):
            stubs[name] = _probe.disguised(child, lambda x: torch.cos(3 * x))
        elif any(True for _ in child.parameters()):  # an adaptive norm, or a norm with a weight
            stubs[name] = _small(child)
    dim = _dim_of(module)
    parameters = {
        name: _probe.random(*p.shape, seed=7) * 0.5
        for name, p in module.named_parameters(recurse=False)
    }
    for plain in _probe.stand_ins(module, parameters, stubs):
        for keywords in arguments(dim):
            expected = _probe.call(partial(type(module).forward, plain, **keywords))
            actual = _probe.call(partial(function, plain, **keywords))
            if not _probe.agree_all(actual, expected, noise=_NOISE):
                return False
    return True


# Of float32 after two norms and a stub that multiplies by 3, seen up to 4e-6.
_NOISE = 2e-5


def _attention_of(name: str, block: str):
    two = block in ("FluxTransformerBlock", "JointTransformerBlock") and name == "attn"

    def attention(*args, hidden_states=None, encoder_hidden_states=None, **others):
        x = args[0] if args else hidden_states
        encoder = args[1] if len(args) > 1 else encoder_hidden_states
        mean = 0.0 if encoder is None else encoder.mean()
        if two:
            return torch.tanh(x) + mean, torch.sin(encoder)
        return torch.tanh(x * 2) + mean

    return attention


def _dim_of(module: torch.nn.Module) -> int:
    table = getattr(module, "scale_shift_table", None)
    return module.norm2.normalized_shape[0] if table is None else table.shape[-1]


def _small(norm: torch.nn.Module) -> torch.nn.Module:
    """A norm with parameters of its own, with random ones; an adaptive one projects by a stub."""
    children = dict(norm.named_children())
    if "linear" in children:
        dim = norm.norm.normalized_shape[0]
        chunks = children["linear"].out_features // dim
        children["linear"] = _probe.Stub(
            lambda emb: torch.cat([emb * (1 + i) / 4 + i / 8 for i in range(chunks)], dim=-1)
        )
    parameters = {
        name: _probe.random(*p.shape, seed=5) for name, p in norm.named_parameters(recurse=False)
    }
    return _probe.stand_in(norm, {**norm._parameters, **parameters}, {**norm._modules, **children})


def _add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    gate: Optional[torch.Tensor],
    norm: torch.nn.Module,
    scale: torch.Tensor,
    shift: torch.Tensor,
    kind: str = "layer",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`r = residual + gate * x`; returns `norm(r) * (1 + scale) + shift` and `r`."""
    if fusible(norm, residual, scale) and x.dtype == residual.dtype:
        return gate_residual_ada_norm(x, residual, gate, scale, shift, eps=norm.eps, norm=kind)
    residual = residual + (x if gate is None else x * gate)
    return norm(residual) * (1 + scale) + shift, residual


def _ltx_block(
    self,
    hidden_states,
    encoder_hidden_states,
    temb,
    image_rotary_emb=None,
    encoder_attention_mask=None,
):
    table = self.scale_shift_table
    ada = table[None, None].to(temb.device) + temb.unflatten(2, (table.shape[0], -1))
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = ada.unbind(dim=2)
    if fusible(self.norm1, hidden_states, scale):
        normed = ada_rms_norm(hidden_states, scale, shift, eps=self.norm1.eps)
    else:
        normed = self.norm1(hidden_states) * (1 + scale) + shift
    attended = self.attn1(
        hidden_states=normed, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb
    )
    hidden_states = torch.addcmul(hidden_states, attended, gate)
    attended = self.attn2(
        hidden_states,
        encoder_hidden_states=encoder_hidden_states,
        image_rotary_emb=None,
        attention_mask=encoder_attention_mask,
    )
    normed, hidden_states = _add_norm(
        attended, hidden_states, None, self.norm2, scale_mlp, shift_mlp, "rms"
    )
    return torch.addcmul(hidden_states, self.ff(normed), gate_mlp)


def _flux_block(
    self,
    hidden_states,
    encoder_hidden_states,
    temb,
    image_rotary_emb=None,
    joint_attention_kwargs=None,
):
    normed, *ada = self.norm1(hidden_states, emb=temb)
    context, *context_ada = self.norm1_context(encoder_hidden_states, emb=temb)
    attended, context_attended, *adapter = self.attn(
        hidden_states=normed,
        encoder_hidden_states=context,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    hidden_states = _second_half(hidden_states, attended, ada, self.norm2, self.ff)
    for extra in adapter:
        hidden_states = hidden_states + extra
    encoder_hidden_states = _second_half(
        encoder_hidden_states, context_attended, context_ada, self.norm2_context, self.ff_context
    )
    if encoder_hidden_states.dtype == torch.float16:
        encoder_hidden_states = encoder_hidden_states.clip(-65504, 65504)
    return encoder_hidden_states, hidden_states


def _second_half(x, attended, ada, norm, ff):
    """From the result of attention to the end of a block of Flux or Stable Diffusion 3."""
    gate, shift_mlp, scale_mlp, gate_mlp = (value[:, None] for value in ada[:4])
    normed, x = _add_norm(attended, x, gate, norm, scale_mlp, shift_mlp)
    return torch.addcmul(x, ff(normed), gate_mlp)


def _joint_block(self, hidden_states, encoder_hidden_states, temb, joint_attention_kwargs=None):
    if self._chunk_size is not None:
        return type(self).forward(
            self, hidden_states, encoder_hidden_states, temb, joint_attention_kwargs
        )
    normed, *ada = self.norm1(hidden_states, emb=temb)
    if self.context_pre_only:
        context, context_ada = self.norm1_context(encoder_hidden_states, temb), None
    else:
        context, *context_ada = self.norm1_context(encoder_hidden_states, emb=temb)
    options = joint_attention_kwargs or {}
    attended, context_attended = self.attn(
        hidden_states=normed, encoder_hidden_states=context, **options
    )
    if self.use_dual_attention:
        gate, *mlp, second_normed, second_gate = ada
        hidden_states = torch.addcmul(hidden_states, attended, gate[:, None])
        attended, ada = self.attn2(hidden_states=second_normed, **options), (second_gate, *mlp)
    hidden_states = _second_half(hidden_states, attended, ada, self.norm2, self.ff)
    if context_ada is None:
        return None, hidden_states
    encoder_hidden_states = _second_half(
        encoder_hidden_states, context_attended, context_ada, self.norm2_context, self.ff_context
    )
    return encoder_hidden_states, hidden_states


def _wan_block(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
    x = hidden_states
    if temb.ndim == 4:  # one embedding for each token
        ada = (self.scale_shift_table.unsqueeze(0) + temb.float()).unbind(dim=2)
    else:
        ada = (self.scale_shift_table + temb.float()).chunk(6, dim=1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = ada
    taken = x.dtype in _probe.DTYPES and not _probe.autocasts(x)
    taken = taken and not (listened_to(self.norm1) or listened_to(self.norm3))
    if not (taken and scale.dtype == torch.float32):
        return type(self).forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb)
    normed = ada_layer_norm(x, scale, shift, eps=self.norm1.eps)
    attended = self.attn1(normed, None, None, rotary_emb)
    x = (x.float() + attended * gate).type_as(x)
    normed = self.norm2(x)
    attended = self.attn2(normed, encoder_hidden_states, None, None)
    normed, x = gate_residual_ada_norm(attended, x, None, scale_mlp, shift_mlp, eps=self.norm3.eps)
    return (x.float() + self.ffn(normed).float() * gate_mlp).type_as(x)


def _arguments(**shapes):
    """Random arguments of these shapes; -1 is the size of the block."""

    def arguments(dim: int) -> list[dict]:
        return [
            {
                name: _probe.random(*(dim if n == -1 else n for n in shape), seed=i) * 0.5
                for i, (name, shape) in enumerate(shapes.items(), 1)
            }
        ]

    return arguments


_STREAMS = {"hidden_states": (2, 5, -1), "encoder_hidden_states": (2, 3, -1)}


def _ltx_arguments(dim: int) -> list[dict]:
    (keywords,) = _arguments(**_STREAMS)(dim)
    return [
        {**keywords, "temb": _probe.random(2, tokens, 6 * dim, seed=9) * 0.5} for tokens in (1, 5)
    ]


def _wan_arguments(dim: int) -> list[dict]:
    (keywords,) = _arguments(**_STREAMS)(dim)
    keywords["rotary_emb"] = None
    shapes = ((2, 6, dim), (2, 5, 6, dim))
    return [{**keywords, "temb": _probe.random(*shape, seed=9) * 0.5} for shape in shapes]


# class: its forward, the norms that it takes over, and the arguments of a probe
_DIFFUSION_BLOCKS = {
    "LTXVideoTransformerBlock": (_ltx_block, ("norm1", "norm2"), _ltx_arguments),
    "FluxTransformerBlock": (
        _flux_block,
        ("norm2", "norm2_context"),
        _arguments(**_STREAMS, temb=(2, -1)),
    ),
    "JointTransformerBlock": (
        _joint_block,
        ("norm2", "norm2_context"),
        _arguments(**_STREAMS, temb=(2, -1)),
    ),
    "WanTransformerBlock": (_wan_block, ("norm1", "norm3"), _wan_arguments),
}
for _function, _, _ in _DIFFUSION_BLOCKS.values():
    marked("gate_residual_ada_norm", _function)
