"""Inputs of the rope family: queries, keys and tables of any kind, and the operator for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from harness import Operator, assert_close, check_gradients, normal, random_grad_outs
from operators import rotary_operator

NAMES = ("apply_rotary", "qk_norm_rotary")


@dataclass(frozen=True)
class Case:
    """One kind of call. `q_heads=None`: three dimensions. `k_heads=None` with heads of q: no k."""

    batch: int = 2
    tokens: int = 5
    q_heads: int | None = 4
    k_heads: int | None = 2
    dim: int = 64
    rotary_dim: int | None = None
    half: bool = False
    interleaved: bool = False
    heads_dim: int = 2
    table_dtype: torch.dtype | None = None
    table_batch: int | None = None
    positions: str | None = None
    packed: bool = False  # [tokens, heads, dim], with positions="shared_ids:..."

    def shape(self, heads: int | None) -> tuple[int, ...]:
        if self.packed:
            return (self.tokens, heads, self.dim)
        if heads is None:
            return (self.batch, self.tokens, self.dim)
        middle = (self.tokens, heads) if self.heads_dim == 2 else (heads, self.tokens)
        return (self.batch, *middle, self.dim)

    def make(self, name: str, dtype, device) -> tuple[Operator, dict]:
        """The operator, with tables and options that are not differentiable, and its inputs."""
        rotated = self.rotary_dim or self.dim
        columns = rotated // 2 if self.half else rotated
        rows = (self.tokens,) if self.positions is None else (self.tokens + 11,)
        if self.table_batch is not None:
            rows = (self.table_batch, *rows)
        table_dtype = self.table_dtype or dtype
        # Any values will do: the halves of a table differ, and no column is a true cosine.
        cos, sin = (normal((*rows, columns), table_dtype, device) for _ in range(2))
        options = {"cos": cos, "sin": sin, **self.positions_of(device)}
        if self.half or 2 * columns == self.dim:
            options["rotary_dim"] = rotated
        if self.interleaved:
            options["interleaved"] = True
        if self.heads_dim != 2:
            options["heads_dim"] = self.heads_dim
        q = normal(self.shape(self.q_heads), dtype, device)
        no_k = self.k_heads is None and self.q_heads is not None
        inputs = {"q": q, "k": None if no_k else normal(self.shape(self.k_heads), dtype, device)}
        if name == "qk_norm_rotary":
            for weight in ("q_weight", "k_weight"):
                inputs[weight] = normal((self.dim,), dtype, device, scale=0.3, mean=1.0)
            if no_k:
                inputs["k_weight"] = None
        op = rotary_operator(name, **options)
        return (replace(op, outputs=("q_out",)) if no_k else op), inputs

    def positions_of(self, device) -> dict:
        tokens, batch = self.tokens, self.batch
        if self.positions is None:
            return {}
        if self.positions == "offset":
            return {"offset": 7}
        kind, dtype = self.positions.split(":")
        dtype = getattr(torch, dtype)
        if kind == "offsets":
            return {"offset": torch.arange(3, 3 + batch, dtype=dtype, device=device)}
        if kind == "one_offset":
            return {"offset": torch.tensor([4], dtype=dtype, device=device)}
        rows = {"ids": (batch, tokens), "shared_ids": (tokens,), "one_ids": (1, tokens)}[kind]
        return {"position_ids": torch.randint(0, tokens + 11, rows).to(device, dtype)}


def check(op: Operator, kernel, inputs: dict) -> dict:
    """Values, layout and gradients. Returns the outputs."""
    outputs = op.run(kernel, inputs, {})
    expected, terms = op.run_reference(inputs, {}), op.run_output_terms(inputs, {})
    for name, output in outputs.items():
        x = inputs[name[0]]
        assert output.dtype == x.dtype and output.device == x.device, name
        assert output.stride() == dense_strides(x), f"{name}: {x.stride()} {output.stride()}"
        assert_close(output, expected[name], name, terms=terms[name])
    check_rotary_gradients(op, kernel, inputs)
    return outputs


def check_rotary_gradients(op: Operator, kernel, inputs: dict, **options) -> dict:
    options.setdefault("grad_outs", random_grad_outs(op.run(kernel, inputs, {})))
    return check_gradients(op, kernel, inputs, {}, **options)


def dense_strides(x) -> tuple[int, ...]:
    """Those of a tensor without gaps that has tokens and heads in the order of `x`."""
    if x.dim() == 4 and x.stride(-1) == 1 and x.stride(1) < x.stride(2):
        return torch.empty(x.transpose(1, 2).shape).transpose(1, 2).stride()
    return torch.empty(x.shape).stride()
