"""Rotary position embedding: alone, after a norm of each head, and its tables for video models."""

from __future__ import annotations

import math
from typing import Optional, Union

import torch

from ._autocast import Norm, Rule, register_autocast
from ._autograd import differentiable, mark_written, needs_grad, refuse_gradient
from ._fake import fake_kernel_of, like, new_like, register_fake_in_place, register_fakes
from ._ops import ops

# Overloads, looked up once: a call through the packet pays for the look-up every time.
_apply_rotary = ops.apply_rotary.default
_apply_rotary_bwd = ops.apply_rotary_bwd.default
_apply_rotary_inplace = ops.apply_rotary_.default
_qk_norm_rotary = ops.qk_norm_rotary.default
_qk_norm_rotary_bwd = ops.qk_norm_rotary_bwd.default

Heads = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def apply_rotary(
    q: torch.Tensor,
    k: Optional[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 2,
    rotary_dim: Optional[int] = None,
    position_ids: Optional[torch.Tensor] = None,
    offset: Union[int, torch.Tensor, None] = None,
) -> Heads:
    """Rotary position embedding of queries and keys, in one pass.

        out1 = x1 * cos1 - x2 * sin1
        out2 = x2 * cos2 + x1 * sin2

    for the pairs `(x1, x2)` of each head: `rotary_dim / 2` elements apart, or neighbours with
    `interleaved`. In tables of full width each element has its own `cos` and `sin`, in tables of
    half width a pair has one of each. Elements from `rotary_dim` on are passed through. Arithmetic
    is in float32, and the result is rounded once.

    Args:
        q: `[batch, tokens, heads, dim]`, `[batch, heads, tokens, dim]` with `heads_dim=1`, or
            `[batch, tokens, dim]` for one head; or packed, `[tokens, heads, dim]` as serving
            engines have it, with `position_ids` of `[tokens]`. float16, bfloat16 or float32. Any
            strides are read in place, as those of a transposed view or a slice, if the elements of
            a head are adjacent.
        k: As `q`, in all but the number of heads. Or None.
        cos, sin: In the dtype of `q`, or float32. `[tokens, columns]` or `[batch or 1, tokens,
            columns]`, also with a dimension of size one for the heads; or with `position_ids` or
            `offset` a table `[positions, columns]`. They must not require a gradient. Where `q` is
            `[batch, tokens, dim]` with as many sequences as tokens it could be a packed one too:
            `cos` and `sin` of `[tokens, columns]` are refused then.
        interleaved: Pairs are neighbours (GPT-J, Flux, LTX-Video, Wan), and not the halves of
            `rotary_dim` (GPT-NeoX, Llama and most models of transformers).
        heads_dim: The dimension of `q` that counts heads, 1 or 2. It is where transformers'
            functions `unsqueeze` cos and sin. Not used where `q` has three dimensions.
        rotary_dim: How many elements of a head are rotated, even. By default as many as `cos` has
            columns. It must be given for tables of half width, which have one column a pair; and
            where `cos` has half the columns of a head, which could mean either.
        position_ids: int64 or int32 `[tokens]` or `[batch or 1, tokens]`: the rows of the table.
            A `q` of three dimensions is packed with the former, and `[batch, tokens, dim]` with the
            latter.
        offset: The row of the first token, those of the others follow: an int, or int64 or int32
            `[1]` or `[batch]` on the device of `q`. Not of a packed `q`.

    Returns:
        `(q, k)`, or `q` alone where `k` is None: dense, with tokens and heads in the order in
        which the input has them in memory. Differentiable (once) in `q` and `k`; the backward is
        the transposed rotation, and keeps cos, sin and the positions alone.

    Raises:
        RuntimeError: A wrong dtype, shape or device, naming the argument, what it must be and what
            it is; a cos or sin that requires a gradient. A position outside the table raises on the
            CPU. On a GPU, whose kernel finds it, what is rotated of that token becomes NaN; an
            `offset` that is an int raises there too.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    _no_table_gradient("apply_rotary", cos, sin)
    offsets, offset, cos, sin = _positions(
        "apply_rotary", q, cos, sin, heads_dim, position_ids, offset
    )
    args = (q, k, cos, sin, position_ids, offsets, offset, interleaved, heads_dim, rotary_dim)
    outs = _differentiable_apply_rotary(*args) if needs_grad(q, k) else _apply_rotary(*args)
    return outs[0] if k is None else outs


def apply_rotary_(
    q: torch.Tensor,
    k: Optional[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 2,
    rotary_dim: Optional[int] = None,
    position_ids: Optional[torch.Tensor] = None,
    offset: Union[int, torch.Tensor, None] = None,
) -> Heads:
    """`apply_rotary` for inference, which writes over `q` and `k`.

    Args:
        q: As in `apply_rotary`, but it is written to: the elements of a head are adjacent, and no
            two heads overlap. Elements that are not rotated are not touched.
        k: Likewise. It does not share memory with `q`; both may be parts of one projection.
        cos, sin, interleaved, heads_dim, rotary_dim, position_ids, offset: As in `apply_rotary`.
            The tensors among them lie outside the memory that `q` and `k` reach over.

    Returns:
        `(q, k)`, or `q` alone where `k` is None: the tensors that were given.

    Raises:
        RuntimeError: As `apply_rotary`, and where a gradient would be needed.
    """
    _no_table_gradient("apply_rotary_", cos, sin)
    if needs_grad(q, k):
        refuse_gradient("apply_rotary_", "apply_rotary")
    offsets, offset, cos, sin = _positions(
        "apply_rotary_", q, cos, sin, heads_dim, position_ids, offset
    )
    _apply_rotary_inplace(
        q, k, cos, sin, position_ids, offsets, offset, interleaved, heads_dim, rotary_dim
    )
    if k is None:
        mark_written(q)
        return q
    mark_written(q, k)
    return q, k


def qk_norm_rotary(
    q: torch.Tensor,
    k: Optional[torch.Tensor],
    q_weight: Optional[torch.Tensor],
    k_weight: Optional[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    interleaved: bool = False,
    heads_dim: int = 2,
    rotary_dim: Optional[int] = None,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    position_ids: Optional[torch.Tensor] = None,
    offset: Union[int, torch.Tensor, None] = None,
) -> Heads:
    """Root mean square normalisation of each head, then rotary position embedding, in one pass.

        y   = x / sqrt(mean(x^2, last dim) + eps) * (weight_offset + weight)
        out = apply_rotary(y, cos, sin)

    Arithmetic is in float32, and the result is rounded once. With `cast_before_weight` the
    normalised value and `y` are rounded too, as in Qwen3 and others whose norm is Llama's: the
    results are then those of `apply_rotary(rms_norm(x, weight, eps, cast_before_weight=True))`, but
    for values so near to the middle of two that float32 rounds them the other way.

    Args:
        q, k: As in `apply_rotary`. On a GPU `dim` is at most 2048, or 1536 where a part of float32
            heads is rotated.
        q_weight, k_weight: `[dim]`, in the dtype of `q` or float32. None multiplies by one.
        cos, sin: As in `apply_rotary`.
        eps: Added to the mean of squares.
        interleaved, heads_dim, rotary_dim, position_ids, offset: As in `apply_rotary`.
        weight_offset: Added to the weights, in float32. 1.0 for weights stored around zero.
        cast_before_weight: Round as Llama's norm does.

    Returns:
        `(q, k)`, or `q` alone where `k` is None, laid out as those of `apply_rotary`.
        Differentiable (once) in `q`, `k`, `q_weight` and `k_weight`; roundings count as identity.
        The backward keeps the inputs, and computes the norm's statistics again.

    Raises:
        RuntimeError: As `apply_rotary`.

    Source: the attention of Qwen3 and Flux.
    """
    _no_table_gradient("qk_norm_rotary", cos, sin)
    offsets, offset, cos, sin = _positions(
        "qk_norm_rotary", q, cos, sin, heads_dim, position_ids, offset
    )
    args = (
        *(q, k, q_weight, k_weight, cos, sin, position_ids, offsets, offset),
        *(eps, weight_offset, cast_before_weight, interleaved, heads_dim, rotary_dim),
    )
    if needs_grad(q, k, q_weight, k_weight):
        outs = _differentiable_qk_norm_rotary(*args)
    else:
        outs = _qk_norm_rotary(*args)
    return outs[0] if k is None else outs


def _no_table_gradient(op: str, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if needs_grad(cos, sin):
        raise RuntimeError(
            f"fuselage::{op}: `cos` and `sin` must not require a gradient, which is not computed; "
            "detach them"
        )


def _positions(op, q, cos, sin, heads_dim, position_ids, offset):
    """`(offsets, offset, cos, sin)`: an offset that is a tensor, or an int, or neither.

    Under torch.compile an int is spent here, on rows of cos and sin.
    """
    if offset is None:
        return None, None, cos, sin
    if isinstance(offset, torch.Tensor):
        return offset, None, cos, sin
    if torch.compiler.is_compiling() and cos.dim() == 2:
        # As an argument of the op the offset would be a constant of the compiled code. What the op
        # would check is checked here; `narrow` refuses what is past the end of the table.
        if position_ids is not None:
            raise RuntimeError(
                f"fuselage::{op}: `position_ids` and `offset` must not both be given"
            )
        if offset < 0:
            raise RuntimeError(f"fuselage::{op}: `offset` must not be negative, got {offset}")
        tokens = q.shape[1] if q.dim() == 3 else q.shape[3 - heads_dim]
        return None, None, cos.narrow(0, offset, tokens), sin.narrow(0, offset, tokens)
    return None, offset, cos, sin


# Tables. They are pure PyTorch, and traced as such.


def ltx_video_rotary_tables(
    frames: int,
    height: int,
    width: int,
    dim: int,
    *,
    scale: Optional[tuple[float, float, float]] = None,
    base_size: tuple[int, int, int] = (20, 2048, 2048),
    theta: float = 10000.0,
    device: Optional[torch.device] = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of LTX-Video, for `apply_rotary(..., interleaved=True)` before heads are split.

    A token `(t, y, x)` has, for each frequency `f` from pi / 2 to theta pi / 2 in `dim // 6` steps,
    the angles `f * (2 p - 1)` of its three positions `p` one after the other; each fills two
    columns. If `dim` is not a multiple of 6, the columns left over come first and do not rotate.

    Args:
        frames, height, width: Tokens along each axis of the latent video; time changes slowest.
        dim: Columns: the width of q before it is split into heads.
        scale: Seconds or pixels of a token along each axis. None takes the indices of the tokens
            for positions; otherwise positions are `index * scale / base_size`.
        base_size: Of time, height and width.
        theta: The ratio of the highest to the lowest frequency.
        device, dtype: Of the results. Angles are float32.

    Returns:
        `(cos, sin)`, both `[frames * height * width, dim]`.

    Source: `LTXVideoRotaryPosEmbed` of diffusers.
    """
    positions = []
    for axis, size in enumerate((frames, height, width)):
        position = torch.arange(size, dtype=torch.float32, device=device)
        positions.append(position if scale is None else position * scale[axis] / base_size[axis])
    grid = torch.cartesian_prod(*positions)  # [tokens, 3]
    count = dim // 6
    exponents = torch.linspace(0.0, 1.0, count, dtype=torch.float32, device=device)
    frequencies = theta**exponents * (math.pi / 2)
    angles = (frequencies[:, None] * (2 * grid[:, None, :] - 1)).flatten(1)  # frequencies, axes
    return _pairs_of(angles, dim, dtype)


def wan_rotary_tables(
    frames: int,
    height: int,
    width: int,
    dim: int,
    *,
    theta: float = 10000.0,
    device: Optional[torch.device] = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of Wan, for `apply_rotary(..., interleaved=True)` on heads of `dim` elements.

    The columns of a head are cut into three parts, for time, height and width: the latter two have
    `2 * (dim // 6)` each. In a part of `n` columns pair `i` has the angle `p * theta^(-2 i / n)` of
    its position `p`.

    Args:
        frames, height, width: Tokens along each axis of the latent video; time changes slowest.
        dim: Size of a head, even.
        theta: As above.
        device, dtype: Of the results. Angles are float64.

    Returns:
        `(cos, sin)`, both `[frames * height * width, dim]`.

    Raises:
        RuntimeError: An odd `dim`.

    Source: `WanRotaryPosEmbed` of diffusers.
    """
    if dim % 2 != 0:
        raise RuntimeError(f"fuselage::wan_rotary_tables: `dim` must be even, got {dim}")
    part = 2 * (dim // 6)
    positions = [
        torch.arange(size, dtype=torch.float64, device=device) for size in (frames, height, width)
    ]
    grid = torch.cartesian_prod(*positions)  # [tokens, 3]
    angles = []
    for axis, columns in enumerate((dim - 2 * part, part, part)):
        exponents = torch.arange(0, columns, 2, dtype=torch.float64, device=device) / columns
        angles.append(grid[:, axis, None] / theta**exponents)
    return _pairs_of(torch.cat(angles, dim=1), dim, dtype)


def _pairs_of(angles: torch.Tensor, dim: int, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each angle twice, after columns that do not rotate, `dim` in all."""
    still = dim - 2 * angles.shape[1]
    cos, sin = (t.to(dtype).repeat_interleave(2, dim=1) for t in (angles.cos(), angles.sin()))
    if still == 0:
        return cos, sin
    return torch.nn.functional.pad(cos, (still, 0), value=1.0), torch.nn.functional.pad(
        sin, (still, 0)
    )


# Gradients.


def _no_gradient_without_k(ctx, k, outputs):
    if k is None:
        ctx.mark_non_differentiable(outputs[1])


def _save_apply_rotary(ctx, inputs, outputs):
    _, k, cos, sin, position_ids, offsets, *ctx.options = inputs
    _no_gradient_without_k(ctx, k, outputs)
    ctx.save_for_backward(cos, sin, position_ids, offsets)


def _apply_rotary_backward(ctx, grad_q_out, grad_k_out):
    needs_q, needs_k = ctx.needs_input_grad[:2]
    grad_q, grad_k = (grad_q_out if needs_q else None, grad_k_out if needs_k else None)
    if grad_q is not None:
        grad_q, rotated = _apply_rotary_bwd(grad_q, grad_k, *ctx.saved_tensors, *ctx.options)
        grad_k = None if grad_k is None else rotated
    elif grad_k is not None:
        grad_k, _ = _apply_rotary_bwd(grad_k, None, *ctx.saved_tensors, *ctx.options)
    return grad_q, grad_k


def _save_qk_norm_rotary(ctx, inputs, outputs):
    *tensors, ctx.offset, ctx.eps, ctx.weight_offset, _ = inputs[:12]
    ctx.options = inputs[12:]
    _no_gradient_without_k(ctx, inputs[1], outputs)
    ctx.save_for_backward(*tensors)


def _qk_norm_rotary_backward(ctx, grad_q_out, grad_k_out):
    q, k, q_weight, k_weight, *tables = ctx.saved_tensors
    needs_q, needs_k, needs_q_weight, needs_k_weight = ctx.needs_input_grad[:4]
    use_q = grad_q_out is not None and (needs_q or needs_q_weight)
    use_k = grad_k_out is not None and (needs_k or needs_k_weight)
    nothing = (None, None, None, False, False)  # gradient, x, weight, and which are needed
    sides = []
    if use_q:
        sides.append((grad_q_out, q, q_weight, needs_q, needs_q_weight))
    if use_k:
        sides.append((grad_k_out, k, k_weight, needs_k, needs_k_weight))
    grads = [None] * 4
    if sides:
        (grad1, x1, weight1, needs1, needs_weight1), second = sides[0], nothing
        if len(sides) == 2:
            second = sides[1]
        grad2, x2, weight2, needs2, needs_weight2 = second
        results = _qk_norm_rotary_bwd(
            *(grad1, grad2, x1, x2, weight1, weight2),
            *(*tables, ctx.offset, ctx.eps, ctx.weight_offset, *ctx.options),
            *(needs1, needs2, needs_weight1, needs_weight2),
        )
        first = 0 if use_q else 1
        for index in range(len(sides)):
            grads[first + index] = results[index]
            grads[first + index + 2] = results[index + 2]
    return tuple(grads)


_differentiable_apply_rotary = differentiable(
    "apply_rotary", save=_save_apply_rotary, backward=_apply_rotary_backward, results=2
)
_differentiable_qk_norm_rotary = differentiable(
    "qk_norm_rotary", save=_save_qk_norm_rotary, backward=_qk_norm_rotary_backward, results=2
)


register_autocast(Rule(("q", "k"), ("cos", "sin")), "apply_rotary", "apply_rotary_fwd")
register_autocast(
    Norm(("q", "k"), "q_weight", "k_weight", ("cos", "sin")),
    *("qk_norm_rotary", "qk_norm_rotary_fwd"),
)


# Shapes and dtypes of the results, for tracing. This is also what runs when an input is on the meta
# device.


def _heads_like(x: Optional[torch.Tensor], q: torch.Tensor) -> torch.Tensor:
    """As the op lays its results out: tokens and heads in the order in memory of `x`."""
    if x is None:
        return q.new_empty((0,))
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return like(x)  # a contiguous copy was read
    if x.dim() == 3 or x.stride(1) >= x.stride(2):
        return like(x)
    batch, first, second, dim = x.shape
    return x.new_empty((batch, second, first, dim)).transpose(1, 2)


def _fake_rotary(q, k, *options):
    return _heads_like(q, q), _heads_like(k, q)


register_fakes("apply_rotary", _fake_rotary, results=2)
register_fakes("qk_norm_rotary", _fake_rotary, results=2)
fake_kernel_of("apply_rotary_bwd")(_fake_rotary)
register_fake_in_place("apply_rotary_")


@fake_kernel_of("qk_norm_rotary_bwd")
def _(grad_q_out, grad_k_out, q, k, q_weight, k_weight, *options):
    *_, needs_q, needs_k, needs_q_weight, needs_k_weight = options
    return (
        _heads_like(q if needs_q else None, q),
        _heads_like(k if needs_k else None, q),
        new_like(q, q_weight, needs_q_weight),
        new_like(q, k_weight, needs_k_weight and k is not None),
    )
