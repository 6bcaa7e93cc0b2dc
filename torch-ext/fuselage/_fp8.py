"""Products of float8, for `modules.Fp8Linear`: where PyTorch has them, and what stands for them."""

from __future__ import annotations

import warnings
from typing import Optional

import torch
import torch.nn.functional as F

from ._autocast import dtype_of_product
from ._fake import fake_kernel_of
from ._ops import ops
from .quant import GROUP, fake_quantized, quantize_rows

# Looked up once: a call through the packet pays for the look-up every time.
linear = ops.fp8_linear.default
product_of_few = ops.fp8_product.default

E4M3 = torch.float8_e4m3fn
RECIPES = ("rowwise", "blockwise")
_LIMIT = torch.finfo(E4M3).max
MULTIPLE = 16  # of both dimensions: float8 tensor cores take no others


def quantize_weight(weight: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """q of a weight `[out, in]`, and its scales: of rows or of blocks."""
    if recipe == "rowwise":
        return quantize_rows(weight.contiguous(), False)
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % GROUP, 0, -rows % GROUP))
    blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP)).transpose(1, 2)
    q, scale = quantize_rows(blocks.flatten(2), False)  # a block is a row here
    q = q.view(torch.uint8).unflatten(-1, (GROUP, GROUP)).transpose(1, 2)
    q = q.reshape(padded.shape)[:rows, :columns].contiguous().view(E4M3)
    return q, scale.squeeze(-1)


def quantize_input(x: torch.Tensor, recipe: str, in_graph: bool) -> tuple:
    """q of what is multiplied, and its scales, `in_graph` by what the compiler sees through. No
    gradient is asked for.
    """
    if in_graph and torch.compiler.is_compiling():
        return quantize_in_graph(x)
    return quantize_rows(x, recipe == "blockwise")


def quantize_in_graph(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` by operations of PyTorch, which the compiler fuses with the norm before them,
    those of query, key and value in one kernel.

    Of four layers of Llama-3-8B, compiled, norms and quantisation took 1.31 ms of a prefill of 8192
    tokens on an H100, and take 0.95; 58 us less, of 1743, of eight layers that decode 8 tokens. Of
    denoisers the op was as fast (LTX-Video), or a percent or more faster (Flux).
    """
    x = x.float()
    # NOTE: by a tensor, as PyTorch divides by a number by multiplying with its inverse.
    scale = x.abs().amax(-1, keepdim=True) / x.new_full((), _LIMIT)
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).clamp(-_LIMIT, _LIMIT).to(E4M3), scale


# ---- products ----


def product(q, scale, weight, weight_scale, bias, dtype, recipe, fast_accum, emulated, few_rows=0):
    """Of inputs that are checked. `few_rows`: so many are scaled after the product, if compiled."""
    if q.shape[-1] == 0 or q.numel() == 0:
        out = q.new_zeros((*q.shape[:-1], weight.shape[0]), dtype=dtype)
        return out if bias is None else out + bias.to(dtype)
    if emulated:
        with torch.autocast(q.device.type, enabled=False):
            return _emulated(q, scale, weight, weight_scale, bias, dtype, recipe)
    lead, rows = q.shape[:-1], None
    if len(lead) != 1:
        q, scale = q.reshape(-1, q.shape[-1]), scale.reshape(-1, scale.shape[-1])
    if recipe == "blockwise":
        # A column of scales after the other, of a multiple of 4 rows.
        if q.shape[0] % 4:
            rows, padding = q.shape[0], (0, 0, 0, -q.shape[0] % 4)
            q, scale = F.pad(q.view(torch.uint8), padding).view(E4M3), F.pad(scale, padding)
        scale = scale.t().contiguous().t()
    if few_rows and torch.compiler.is_compiling() and q.shape[0] <= few_rows:
        one = torch.ones((), device=q.device)
        options = {"out_dtype": torch.float32, "use_fast_accum": fast_accum}
        out = torch._scaled_mm(q, weight.t(), scale_a=one, scale_b=one, **options)
        out = out * scale * weight_scale.t()
        out = (out if bias is None else out + bias.float()).to(dtype)
        return out if len(lead) == 1 else out.reshape(*lead, weight.shape[0])
    fuses_bias = recipe == "rowwise" and dtype == torch.bfloat16 and _is_bfloat16(bias)
    out = torch._scaled_mm(
        q,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale.t(),
        bias=bias if fuses_bias else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum and recipe == "rowwise",
    )
    out = out if rows is None else out[:rows]
    out = (out if len(lead) == 1 else out.reshape(*lead, weight.shape[0])).to(dtype)
    return out if bias is None or fuses_bias else out + bias.to(dtype)


# Rows that the kernel of fp8_product takes: as many as are bound by the reading of the weight.
KERNEL_ROWS = 16


def are_few(x: torch.Tensor) -> bool:
    """Whether the rows of `x`, or of what it is quantised to, are so few, and there is one."""
    return 0 < x.numel() <= KERNEL_ROWS * x.shape[-1]


def fits_kernel(q: torch.Tensor, has_kernel: bool) -> bool:
    """Whether what was quantised goes to that kernel, where there is one."""
    return has_kernel and type(q) is torch.Tensor and are_few(q)


def has_kernel(device: torch.device, out_features: int, in_features: int) -> bool:
    """Whether few rows have a kernel of ours, which multiplies float8 wherever it is."""
    if out_features % MULTIPLE or in_features % MULTIPLE:
        return False
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device)[0] >= 8
    return device.type == "cpu"


# A product with scales of rows takes as long for one row as for a hundred. That with one scale for
# all takes two thirds of it on an H100, or half, and the compiler fuses the scales into what comes
# after it.
_FEW_ROWS = 64


def few_rows(device: torch.device, recipe: str, emulated: bool) -> int:
    """Up to how many rows a compiled product is scaled by itself."""
    if emulated or recipe != "rowwise" or device.type != "cuda" or torch.version.hip is not None:
        return 0
    return _FEW_ROWS if torch.cuda.get_device_capability(device)[0] == 9 else 0


def _emulated(q, scale, weight, weight_scale, bias, dtype, recipe):
    if recipe == "rowwise" and dtype == torch.bfloat16:
        # It holds every q, so that only the product is rounded. (float16 would overflow.)
        out = F.linear(q.to(dtype), weight.to(dtype)).float() * scale * weight_scale[:, 0]
        return (out if bias is None else out + bias.float()).to(dtype)
    x = _dequantized_rows(q, scale, recipe).to(dtype)
    weight = dequantized(weight, weight_scale, recipe, dtype)
    return F.linear(x, weight, None if bias is None else bias.to(dtype))


def _is_bfloat16(bias: Optional[torch.Tensor]) -> bool:
    return bias is not None and bias.dtype == torch.bfloat16


def dtype_of_result(x: torch.Tensor) -> torch.dtype:
    """That of `x`, or of autocast."""
    return dtype_of_product(x.device.type, x.dtype)


def check_columns(x: torch.Tensor, columns: int) -> None:
    if x.shape[-1:] != (columns,):
        raise RuntimeError(
            f"fuselage::Fp8Linear: `x` must have {columns} columns, got {list(x.shape)}"
        )


def check_quantized(q: torch.Tensor, scale: torch.Tensor, columns: int, recipe: str) -> None:
    check_columns(q, columns)
    if q.dtype != E4M3:
        raise RuntimeError(
            f"fuselage::Fp8Linear: q of a (q, scale) must be float8_e4m3fn, got {q.dtype}"
        )
    groups = 1 if recipe == "rowwise" else -(-columns // GROUP)
    if scale.dtype != torch.float32 or scale.shape != (*q.shape[:-1], groups):
        raise RuntimeError(
            f"fuselage::Fp8Linear: `scale` must be float32 {[*q.shape[:-1], groups]}, that of "
            f"{recipe} products, got {scale.dtype} {list(scale.shape)}"
        )


def _dequantized_rows(q, scale, recipe):
    if recipe == "blockwise":
        scale = scale.repeat_interleave(GROUP, -1)[..., : q.shape[-1]]
    return q.float() * scale


def dequantized(weight, weight_scale, recipe, dtype):
    if recipe == "blockwise":
        weight_scale = weight_scale.repeat_interleave(GROUP, 0)[: weight.shape[0]]
    return _dequantized_rows(weight, weight_scale, recipe).to(dtype)


class Product(torch.autograd.Function):
    """A product of which x and the bias have gradients."""

    @staticmethod
    def forward(
        ctx,
        x,
        weight,
        weight_scale,
        bias,
        dtype,
        recipe,
        fast_accum,
        emulated,
        has_kernel,
        in_graph,
    ):
        ctx.save_for_backward(weight, weight_scale)
        ctx.recipe, ctx.x_dtype = recipe, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        q, scale = quantize_input(x, recipe, in_graph)
        given = (q, scale, weight, weight_scale, bias)
        if fits_kernel(q, has_kernel):
            return product_of_few(*given, dtype)
        return product(*given, dtype, recipe, fast_accum, emulated)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        weight, weight_scale = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            matrix = dequantized(weight, weight_scale, ctx.recipe, grad_out.dtype)
            grad_x = (grad_out @ matrix).to(ctx.x_dtype)
        if ctx.needs_input_grad[3]:
            grad_bias = grad_out.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return grad_x, None, None, grad_bias, *(None,) * 6


# ---- where products are ----

_refusals: dict[tuple, Optional[str]] = {}
_warned: set[str] = set()


def why_emulated(
    device: torch.device, recipe: str, out_features: int, in_features: int
) -> Optional[str]:
    """Why a product of these sizes is not float8 there; None where it is."""
    if device.type == "meta":
        return None  # it is asked again when there is a device
    if device.type != "cuda":
        return f"{device.type} has no float8 products"
    if out_features % MULTIPLE or in_features % MULTIPLE:
        return (
            f"float8 products take multiples of {MULTIPLE}, and the weight is "
            f"[{out_features}, {in_features}]"
        )
    if recipe == "blockwise" and in_features % GROUP:
        return f"blockwise products take multiples of {GROUP} columns, not {in_features}"
    blocks = in_features // GROUP % 4 if recipe == "blockwise" else 0
    key = (device.index, recipe, blocks)
    if key not in _refusals:
        _refusals[key] = _try_product(device, recipe, blocks)
    return _refusals[key]


def _try_product(device: torch.device, recipe: str, blocks: int) -> Optional[str]:
    """What is wrong with a small product on that GPU, whose scales have rows of 4 + `blocks`.

    PyTorch 2.11 on an H100 takes a weight's scales for rows of a multiple of four blocks, whatever
    they are: where they are not, it raises nothing, and multiplies with others.
    """
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no float8 products"
    size = GROUP * (4 + blocks)
    q = torch.ones((size, size), device=device).to(E4M3)
    scales = (size, 1) if recipe == "rowwise" else (size, size // GROUP)
    of_weight = (size, 1) if recipe == "rowwise" else (size // GROUP,) * 2
    scale, weight_scale = (  # powers of two, no row or column of them like another
        torch.arange(rows * columns, device=device).remainder(11).float().exp2().view(rows, columns)
        for rows, columns in (scales, of_weight)
    )
    given = (q, scale, q, weight_scale, None, torch.bfloat16, recipe, True)  # q is the weight, too
    try:
        found = product(*given, False).float()
    except (RuntimeError, ValueError) as error:
        return f"PyTorch has no {recipe} product here: {str(error).splitlines()[0]}"
    expected = product(*given, True).float()
    if not torch.allclose(found, expected, rtol=2**-6):
        return f"PyTorch's {recipe} product of rows of {4 + blocks} blocks is wrong here"
    return None


# ---- tracing ----


@fake_kernel_of("fp8_product")
def _fake_product(q, scale, weight, weight_scale, bias, dtype):
    return q.new_empty((*q.shape[:-1], weight.shape[0]), dtype=dtype)


@fake_kernel_of("fp8_linear")
def _fake_linear(x, weight, weight_scale, bias, fast_accum, dtype):
    in_groups = weight_scale.shape[0] != weight.shape[0]
    quantized = fake_quantized(x, None, GROUP if in_groups else -1, in_groups, False, E4M3)
    return (x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype), *quantized)


def warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"fuselage: Fp8Linear multiplies in the input's dtype: {reason}", stacklevel=3
        )
