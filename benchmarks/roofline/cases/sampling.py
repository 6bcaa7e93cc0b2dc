"""lm_head_sample and gumbel_sample. Sizes: batch, vocabulary, dim; and batch, vocabulary.

A draw cannot be compared with a float64 reference, unless it is certain: one token of each row
leads by so much that no other has a chance, and everyone has to find it. How long a draw takes does
not depend on it: in any tile but one, logits are as random as they would be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch

from ..contenders import compiled
from ..registry import Operator, Shape

LEAD = 60.0  # of the certain token's logit, over logits of about one


def _shape(*sizes: int, tags: tuple[str, ...] = (), dtype=torch.bfloat16) -> Shape:
    return Shape(sizes, dtype, frozenset(tags))


# Qwen3 8B, Llama 3 70B and Gemma 2 2B, then odd sizes.
_HEADS = [
    *(
        _shape(batch, 151936, 4096, tags=("main", *(("quick",) if batch == 1 else ())))
        for batch in (1, 16, 64, 128, 256)
    ),
    *(_shape(batch, 128256, 8192) for batch in (1, 64, 256)),
    *(_shape(batch, 262144, 2048) for batch in (1, 64, 256)),
    _shape(5, 50257, 1600, tags=("odd",)),
    _shape(33, 32001, 4100, tags=("odd",)),
    _shape(1, 32000, 1024, tags=("small", "quick")),
    _shape(16, 32000, 4096, tags=("dtype",), dtype=torch.float32),
]
_FILTERED = [_shape(batch, 151936, 4096) for batch in (1, 64, 256)]
_NARROW = [_shape(batch, 151936, 4096) for batch in (1, 16, 64, 128, 256)]
_LOGITS = [
    *(_shape(batch, 151936, tags=("main",) if batch == 64 else ()) for batch in (1, 64, 256)),
    _shape(1, 32000, tags=("small",)),
    _shape(64, 50257, tags=("odd",)),
]
_CPU_HEADS = [
    _shape(batch, 32768, 1024, tags=("cpu", *(("quick",) if batch == 1 else ())), dtype=dtype)
    for batch in (1, 8)
    for dtype in (torch.float32, torch.bfloat16)
]
_CPU_LOGITS = [_shape(8, 151936, tags=("cpu",), dtype=torch.float32)]


@dataclass(frozen=True)
class Draw:
    """One way of drawing, which makes its inputs and its contenders."""

    from_head: bool = True
    filters: dict = field(default_factory=dict)
    float8: bool = False  # the weight, with a scale for each row; baselines have it in bfloat16
    logprobs: bool = False  # of the tokens, too; a case has their exponential, which is not 0

    def inputs(self, shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
        batch, vocab, *dim = shape.sizes
        certain = torch.randint(vocab, (batch,), device=device)
        if not self.from_head:
            logits = torch.randn(batch, vocab, device=device)
            logits[torch.arange(batch, device=device), certain] = LEAD
            return (logits.to(shape.dtype),)
        weight = torch.randn(vocab, *dim, device=device, dtype=shape.dtype)
        # Its own row of the weight, at a size that gives the logit its lead; and noise.
        own = weight[certain].float()
        hidden = own * (LEAD / own.square().sum(1, keepdim=True))
        if not self.float8:
            return hidden.to(shape.dtype), weight
        # Powers of two: the baselines' weight in bfloat16 is the same.
        scale = 2.0 ** torch.randint(-6, -3, (vocab,), device=device).float()
        narrow = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
        weight = (narrow.float() * scale[:, None]).to(shape.dtype)
        return hidden.to(shape.dtype), weight, narrow, scale

    def logits(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0] @ inputs[1].T if self.from_head else inputs[0]

    def filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """As transformers filters."""
        if "top_k" in self.filters:
            least = torch.topk(logits, self.filters["top_k"]).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if "top_p" in self.filters:
            ordered, order = torch.sort(logits)
            left_out = torch.softmax(ordered, -1).cumsum(-1) <= 1 - self.filters["top_p"]
            left_out[:, -1] = False
            logits = logits.masked_fill(left_out.scatter(1, order, left_out), -torch.inf)
        if "min_p" in self.filters:
            p = torch.softmax(logits, -1)
            least = self.filters["min_p"] * p.amax(-1, keepdim=True)
            logits = logits.masked_fill(p < least, -torch.inf)
        return logits

    def with_logprobs(self, tokens: torch.Tensor, logits: torch.Tensor):
        if not self.logprobs:
            return tokens
        return tokens, torch.log_softmax(logits, -1).gather(1, tokens).exp()

    def multinomial(self, *inputs: torch.Tensor):
        logits = self.filtered(self.logits(*inputs).float())
        return self.with_logprobs(torch.multinomial(torch.softmax(logits, -1), 1), logits)

    def gumbel(self, *inputs: torch.Tensor):
        logits = self.filtered(self.logits(*inputs).float())
        noise = -torch.log(torch.empty_like(logits).exponential_())
        return self.with_logprobs((logits + noise).argmax(-1, keepdim=True), logits)

    def ours(self, fuselage: ModuleType):
        """With a seed and a step on the device, as a serving engine has them."""
        function = fuselage.lm_head_sample if self.from_head else fuselage.gumbel_sample
        noise: dict[str, torch.Tensor] = {}
        options = {**self.filters, "return_logprobs": self.logprobs}

        def draw(x: torch.Tensor, *weights: torch.Tensor):
            if not noise:
                for name in ("seed", "offset"):
                    noise[name] = torch.zeros(1, dtype=torch.int64, device=x.device)
            if self.float8:
                _, *weights, options["weight_scale"] = weights
            drawn = function(x, *weights, **noise, **options)
            return (drawn.tokens, drawn.logprobs.exp()) if self.logprobs else drawn

        return draw

    def contenders(self, fuselage: ModuleType):
        calls = {
            "fuselage": lambda: self.ours(fuselage),
            "eager": lambda: self.multinomial,
            "compile": lambda: compiled(self.gumbel),
        }
        if torch.cuda.is_available():  # a CPU's bar is for PyTorch's own operators
            calls["torch"] = lambda: self.logits if self.from_head else _argmax
        return calls

    def reference(self, *inputs_and_dtype) -> tuple[torch.Tensor]:
        *inputs, _ = inputs_and_dtype
        tokens = _argmax(self.logits(*inputs)).double()
        return (tokens, torch.ones_like(tokens)) if self.logprobs else (tokens,)

    def bytes(self, shape: Shape) -> int:
        """The weight and hidden, or the logits, once."""
        batch, vocab, *dim = shape.sizes
        if not self.from_head:
            return batch * vocab * shape.dtype.itemsize + 8 * batch
        weight = vocab * (dim[0] + 4 if self.float8 else dim[0] * shape.dtype.itemsize)
        return weight + batch * dim[0] * shape.dtype.itemsize + 8 * batch


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1, keepdim=True)


def _operator(name: str, draw: Draw, shapes) -> Operator:
    return Operator(
        name=name,
        shapes=shapes,
        make_inputs=draw.inputs,
        contenders=draw.contenders,
        reference=draw.reference,
        necessary_bytes={"fwd": draw.bytes},
        rest={"torch": _argmax} if draw.from_head else {},
    )


OPERATORS = [
    _operator("lm_head_sample", Draw(), [*_HEADS, *_CPU_HEADS]),
    _operator("lm_head_sample float8", Draw(float8=True), _NARROW),
    _operator("lm_head_sample logprobs", Draw(logprobs=True), _NARROW),
    _operator("lm_head_sample top_k", Draw(filters={"top_k": 50}), _FILTERED),
    _operator("lm_head_sample top_p", Draw(filters={"top_p": 0.9}), _FILTERED),
    _operator("lm_head_sample min_p", Draw(filters={"min_p": 0.05}), _FILTERED),
    _operator("gumbel_sample", Draw(from_head=False), [*_LOGITS, *_CPU_LOGITS]),
    _operator("gumbel_sample top_p", Draw(False, {"top_p": 0.9}), _LOGITS),
]
