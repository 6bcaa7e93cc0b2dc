"""What the tests of attention over windows have in common: who calls the kernel, and with what.

On a CPU, the kernel of the window is a formula that stands in for PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from integrations.models import counted_ops

FLASH = "_flash_attention_forward"


def weights_of(query, key, is_causal, scale, window_size_left, window_size_right):
    """The softmax, float32, and heads of queries and keys, `[batch, heads, tokens, dim]`."""
    right = 0 if is_causal else window_size_right
    q, k = (x.float().transpose(1, 2) for x in (query, key))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    scores = (q @ k.mT * scale).masked_fill((back < -right) | (back > window_size_left), -torch.inf)
    return scores.softmax(-1), q, k


def cpu_forward(query, key, value, *args, scale=None, **window):
    weights, _, _ = weights_of(query, key, args[5], scale, **window)
    v = value.float().transpose(1, 2).repeat_interleave(query.shape[2] // value.shape[2], 1)
    out = (weights @ v).transpose(1, 2).to(query.dtype)
    batch, rows, heads, _ = query.shape
    sums = query.new_zeros((batch, heads, rows), dtype=torch.float32)
    state = query.new_zeros(2, dtype=torch.uint64)
    return out, sums, state, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def cpu_backward(grad, query, key, value, *args, scale=None, **window):
    weights, q, k = weights_of(query, key, args[7], scale, **window)
    shared = query.shape[2] // key.shape[2]
    v = value.float().transpose(1, 2).repeat_interleave(shared, 1)
    g = grad.float().transpose(1, 2)
    of_weights = g @ v.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    of_key, of_value = (
        x.unflatten(1, (-1, shared)).sum(2) for x in (of_scores.mT @ q, weights.mT @ g)
    )
    return tuple(x.transpose(1, 2).to(query.dtype) for x in (of_scores @ k, of_key, of_value))


def module_of(integration) -> ModuleType:
    return sys.modules[f"{integration.__name__.rpartition('.')[0]}._window"]


@contextmanager
def kernel(integration, device, monkeypatch) -> Iterator[ModuleType]:
    """The module of windows, as on a GPU that has the kernel."""
    module = module_of(integration)
    if device != "cpu":
        yield module
        return
    half = (torch.float16, torch.bfloat16)
    monkeypatch.setattr(module, "has_kernel", lambda _, dtype: dtype in half)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", cpu_forward, "CPU")
    library.impl("_flash_attention_backward", cpu_backward, "CPU")
    yield module
    library._destroy()


def compiled(model, dynamic=None):
    """The model compiled whole, and of each attention in its graphs its window, left and right;
    None of none, and "mask" with a mask."""
    seen: list = []

    def backend(graph, inputs):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        for node in (node for part in parts for node in part.graph.nodes):
            if "scaled_dot_product_attention" in str(node.target):
                seen.append(None if node.kwargs.get("attn_mask") is None else "mask")
            elif "_flash_attention_forward" in str(node.target):
                seen.append((node.kwargs["window_size_left"], node.kwargs["window_size_right"]))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend), seen


def counted(fuselage, call):
    """How often it calls the kernel, and its result."""
    with counted_ops(fuselage, also=(FLASH,)) as counts:
        result = call()
    return counts[FLASH], result
