"""Modules that own their parameters, in the manner of `torch.nn`."""

from __future__ import annotations

from typing import Optional, Union

import torch

from . import _fp8
from ._autograd import some_need_grad
from ._fp8_linear import Fp8Weight
from .ada_norm import ada_layer_norm, ada_rms_norm, fused_add_layer_norm, layer_norm
from .gate import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from .group_norm import group_norm
from .linear_loss import linear_cross_entropy
from .loss import cross_entropy
from .norm import fused_add_rms_norm, gated_rms_norm, rms_norm
from .poly_norm import fused_mul_poly_norm, grouped_poly_norm, poly_norm


class RMSNorm(torch.nn.Module):
    """`rms_norm` with a weight of its own, like `torch.nn.RMSNorm` over the last dimension.

    Args:
        dim: Size of the last dimension.
        eps: Added to the mean of squares.
        elementwise_affine: Whether there is a weight. It starts so that the module only normalises.
        weight_offset, cast_before_weight, out_dtype: As in `rms_norm`.
        device, dtype: Of the weight.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        weight_offset: float = 0.0,
        cast_before_weight: bool = False,
        out_dtype: Optional[torch.dtype] = None,
        device=None,
        dtype: Optional[torch.dtype] = None,
    ):
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight_offset = weight_offset
        self.cast_before_weight = cast_before_weight
        self.out_dtype = out_dtype
        weight = (
            torch.nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
            if elementwise_affine
            else None
        )
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that `weight_offset + weight` is one."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(
            x,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            cast_before_weight=self.cast_before_weight,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        affine = self.weight is not None
        text = f"{self.dim}, eps={self.eps}, elementwise_affine={affine}"
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        if self.cast_before_weight:
            text += ", cast_before_weight=True"
        if self.out_dtype is not None:
            text += f", out_dtype={self.out_dtype}"
        return text


class FusedAddRMSNorm(RMSNorm):
    """`fused_add_rms_norm` with a weight of its own: `(x, residual) -> (out, new_residual)`."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_add_rms_norm(
            x,
            residual,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            cast_before_weight=self.cast_before_weight,
            out_dtype=self.out_dtype,
        )


class RMSNormGated(RMSNorm):
    """`gated_rms_norm` with a weight of its own: `(x, gate) -> out`.

    Args:
        dim: Size of the last dimension.
        eps: Added to the mean of squares.
        elementwise_affine: Whether there is a weight, which starts at one.
        activation, norm_before_gate, group_size, cast_before_weight: As in `gated_rms_norm`.
        device, dtype: Of the weight.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        activation: str = "silu",
        norm_before_gate: bool = True,
        group_size: Optional[int] = None,
        cast_before_weight: bool = False,
        device=None,
        dtype: Optional[torch.dtype] = None,
    ):
        given = {"cast_before_weight": cast_before_weight, "device": device, "dtype": dtype}
        super().__init__(dim, eps, elementwise_affine, **given)
        self.activation = activation
        self.norm_before_gate = norm_before_gate
        self.group_size = group_size

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(
            x,
            gate,
            self.weight,
            self.eps,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
            cast_before_weight=self.cast_before_weight,
        )

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, activation={self.activation!r}"
        text += f", norm_before_gate={self.norm_before_gate}"
        if self.group_size is not None:
            text += f", group_size={self.group_size}"
        return text


class LayerNorm(torch.nn.Module):
    """`layer_norm` with parameters of its own, like `torch.nn.LayerNorm` over the last dimension.

    Args:
        dim: Size of the last dimension.
        eps: Added to the variance.
        elementwise_affine: Whether there is a weight, which starts at one.
        bias: Whether there is a bias beside the weight, which starts at zero.
        device, dtype: Of the parameters.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device=None,
        dtype: Optional[torch.dtype] = None,
    ):
        super().__init__()
        self.dim = dim
        self.eps = eps
        for name, wanted in (("weight", True), ("bias", bias)):
            parameter = None
            if elementwise_affine and wanted:
                parameter = torch.nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to one, and the bias to zero."""
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def _check_dim(self, x: torch.Tensor) -> None:
        # Without a weight nothing else would tell.
        if x.shape[-1:] != (self.dim,):
            raise RuntimeError(
                f"fuselage: {type(self).__name__} of {self.dim} columns got an input of shape "
                f"{tuple(x.shape)}"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_dim(x)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        affine, bias = self.weight is not None, self.bias is not None
        return f"{self.dim}, eps={self.eps}, elementwise_affine={affine}, bias={bias}"


class FusedAddLayerNorm(LayerNorm):
    """`fused_add_layer_norm` with parameters of its own: `(x, residual) -> (out, new_residual)`."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_dim(x)
        return fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class AdaLayerNorm(LayerNorm):
    """`ada_layer_norm`: `(x, scale, shift) -> out`, without the projection to scale and shift.

    Args:
        dim, eps, bias, device, dtype: As in `LayerNorm`.
        elementwise_affine: Whether there is a weight. Diffusion transformers have none.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, elementwise_affine: bool = False, bias: bool = True, **to
    ):
        super().__init__(dim, eps, elementwise_affine, bias, **to)

    def forward(
        self, x: torch.Tensor, scale: Optional[torch.Tensor], shift: Optional[torch.Tensor]
    ) -> torch.Tensor:
        self._check_dim(x)
        return ada_layer_norm(x, scale, shift, self.weight, self.bias, self.eps)


class AdaRMSNorm(LayerNorm):
    """`ada_rms_norm`: `(x, scale, shift) -> out`.

    Args:
        dim, eps, device, dtype: As in `LayerNorm`.
        elementwise_affine: Whether there is a weight. Diffusion transformers have none.
    """

    def __init__(self, dim: int, eps: float = 1e-6, elementwise_affine: bool = False, **to):
        super().__init__(dim, eps, elementwise_affine, False, **to)

    def forward(
        self, x: torch.Tensor, scale: Optional[torch.Tensor], shift: Optional[torch.Tensor]
    ) -> torch.Tensor:
        self._check_dim(x)
        return ada_rms_norm(x, scale, shift, self.weight, self.eps)


class GroupNorm(torch.nn.Module):
    """`group_norm` with parameters of its own, like `torch.nn.GroupNorm`.

    Args:
        num_groups: Groups of channels; it divides `num_channels`.
        num_channels: Size of the second dimension.
        eps: Added to the variance.
        affine: Whether there are a weight, which starts at one, and a bias, which starts at zero.
        activation: As in `group_norm`.
        device, dtype: Of the parameters.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        activation: Optional[str] = None,
        device=None,
        dtype: Optional[torch.dtype] = None,
    ):
        super().__init__()
        if num_groups < 1 or num_channels % num_groups != 0:
            raise RuntimeError(
                f"fuselage::GroupNorm: `num_groups` must divide `num_channels` {num_channels}, got "
                f"{num_groups}"
            )
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self.activation = activation
        for name in ("weight", "bias"):
            parameter = None
            if affine:
                parameter = torch.nn.Parameter(
                    torch.empty(num_channels, device=device, dtype=dtype)
                )
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to one, and the bias to zero."""
        if self.affine:
            torch.nn.init.ones_(self.weight)
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Without a weight nothing else would tell.
        if x.dim() < 2 or x.shape[1] != self.num_channels:
            raise RuntimeError(
                f"fuselage: GroupNorm of {self.num_channels} channels got an input of shape "
                f"{tuple(x.shape)}"
            )
        return group_norm(
            x, self.num_groups, self.weight, self.bias, self.eps, activation=self.activation
        )

    def extra_repr(self) -> str:
        text = f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
        return text + (f", activation={self.activation!r}" if self.activation is not None else "")


class PolyNorm(torch.nn.Module):
    """`poly_norm` with a weight `[3]` and a bias `[1]` of its own, as the Motif models have it.

    Args:
        eps: Added to the means.
        device, dtype: Of the parameters, which start at thirds and zero.
    """

    def __init__(self, eps: float = 1e-6, *, device=None, dtype: Optional[torch.dtype] = None):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights to a third each, and the bias to zero."""
        torch.nn.init.constant_(self.weight, 1.0 / 3.0)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poly_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class FusedMulPolyNorm(PolyNorm):
    """`fused_mul_poly_norm` with parameters of its own: `(x, mul)`, or both packed, `-> out`.

    Args:
        eps: Added to the means.
        mul_first: Of a packed `x`: `mul` is the first half.
        device, dtype: Of the parameters.
    """

    def __init__(
        self,
        eps: float = 1e-6,
        *,
        mul_first: bool = False,
        device=None,
        dtype: Optional[torch.dtype] = None,
    ):
        super().__init__(eps, device=device, dtype=dtype)
        self.mul_first = mul_first

    def forward(self, x: torch.Tensor, mul: Optional[torch.Tensor] = None) -> torch.Tensor:
        return fused_mul_poly_norm(
            x, mul, self.weight, self.bias, self.eps, mul_first=self.mul_first
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + (", mul_first=True" if self.mul_first else "")


class GroupedPolyNorm(torch.nn.Module):
    """`grouped_poly_norm` with parameters of its own: `(x, mul, offs)`, or packed, `-> out`.

    Args:
        num_experts: Rows of the weight `[num_experts, 3]` and of the bias `[num_experts, 1]`.
        eps, hidden_clamp, mul_first: As in `grouped_poly_norm`.
        device, dtype: Of the parameters, which start at thirds and zero.
    """

    def __init__(
        self,
        num_experts: int,
        eps: float = 1e-6,
        *,
        hidden_clamp: Optional[float] = None,
        mul_first: bool = False,
        device=None,
        dtype: Optional[torch.dtype] = None,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.eps = eps
        self.hidden_clamp = hidden_clamp
        self.mul_first = mul_first
        self.weight = torch.nn.Parameter(torch.empty(num_experts, 3, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(num_experts, 1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights to a third each, and the biases to zero."""
        torch.nn.init.constant_(self.weight, 1.0 / 3.0)
        torch.nn.init.zeros_(self.bias)

    def forward(
        self, x: torch.Tensor, mul: Optional[torch.Tensor], offs: torch.Tensor
    ) -> torch.Tensor:
        return grouped_poly_norm(
            x,
            mul,
            self.weight,
            self.bias,
            offs,
            self.eps,
            hidden_clamp=self.hidden_clamp,
            mul_first=self.mul_first,
        )

    def extra_repr(self) -> str:
        text = f"{self.num_experts}, eps={self.eps}"
        if self.hidden_clamp is not None:
            text += f", hidden_clamp={self.hidden_clamp}"
        return text + (", mul_first=True" if self.mul_first else "")


class SiluAndMul(torch.nn.Module):
    """`silu_and_mul`: `[..., 2 * dim] -> [..., dim]`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)


class GeluAndMul(torch.nn.Module):
    """`[..., 2 * dim] -> [..., dim]`: `gelu_and_mul`, or `gelu_tanh_and_mul`.

    Args:
        activation: "gelu" or "gelu_tanh".
    """

    def __init__(self, activation: str = "gelu"):
        super().__init__()
        if activation not in ("gelu", "gelu_tanh"):
            raise RuntimeError(
                "fuselage::GeluAndMul: `activation` must be one of gelu, gelu_tanh, got "
                f"{activation!r}"
            )
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_and_mul(x) if self.activation == "gelu" else gelu_tanh_and_mul(x)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class CrossEntropyLoss(torch.nn.Module):
    """`cross_entropy`, like `torch.nn.CrossEntropyLoss`: `[..., vocab], [...] -> [] or [...]`.

    The classes are the last dimension, and the result is float32.

    Args:
        ignore_index, reduction, label_smoothing, lse_square_scale, logit_softcap,
            inplace_backward: As in `cross_entropy`.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        logit_softcap: Optional[float] = None,
        inplace_backward: bool = False,
    ):
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.lse_square_scale = lse_square_scale
        self.logit_softcap = logit_softcap
        self.inplace_backward = inplace_backward

    def forward(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        token_weights: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        return cross_entropy(
            logits,
            targets,
            token_weights=token_weights,
            inplace_backward=self.inplace_backward,
            **_loss_options(self),
        )

    def extra_repr(self) -> str:
        return _show_loss(self) + (", inplace_backward=True" if self.inplace_backward else "")


class LinearCrossEntropyLoss(torch.nn.Module):
    """`linear_cross_entropy`: `[..., dim], [vocab, dim], [...] -> [] or [...]`.

    The head's weight is given to the call, as it is that of another module.

    Args:
        ignore_index, reduction, label_smoothing, lse_square_scale, logit_softcap, max_workspace: As
            in `linear_cross_entropy`.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        logit_softcap: Optional[float] = None,
        max_workspace: int = 1 << 30,
    ):
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.lse_square_scale = lse_square_scale
        self.logit_softcap = logit_softcap
        self.max_workspace = max_workspace

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        bias: Optional[torch.Tensor] = None,
        token_weights: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            token_weights=token_weights,
            max_workspace=self.max_workspace,
            **_loss_options(self),
        )

    def extra_repr(self) -> str:
        return _show_loss(self)


def _loss_options(module: torch.nn.Module) -> dict:
    names = ("ignore_index", "reduction", "label_smoothing", "lse_square_scale", "logit_softcap")
    return {name: getattr(module, name) for name in names}


def _show_loss(module: torch.nn.Module) -> str:
    """Its options, but for those that change nothing."""
    shown = _loss_options(module).items()
    always = ("ignore_index", "reduction")
    return ", ".join(f"{n}={v!r}" for n, v in shown if n in always or v not in (0.0, None))


class Fp8Linear(Fp8Weight):
    """A linear layer with a weight in float8, which quantises its input: `[..., in] -> [..., out]`.

        y = (q(x) @ q(weight).T) * scale_of_x * scale_of_weight + bias

    | recipe | scales of x | scales of the weight | product |
    | --- | --- | --- | --- |
    | "rowwise" | one a row | one a row, `[out, 1]` | compute capability 8.9 and later |
    | "blockwise" | one for each 128 columns | one for 128 x 128 | where PyTorch has it: Hopper |

    Up to 16 rows, of sizes that are multiples of 16, have a kernel of ours, from compute capability
    8.0 on and on CPUs, which reads the weight as it is. It adds up in float32, and rounds once.

    Other products are those of `torch._scaled_mm`. Tensor cores add them up, and the sum is rounded
    to bfloat16, and from there to the input's dtype. With `fast_accum` Hopper's keep sums of
    fewer bits than float32 to themselves, as inference mostly has it; without it they are added up
    in float32 every few columns.

    Where there are none, on CPUs and older GPUs, and where a dimension is no multiple of 16, the
    same q are multiplied in the input's dtype, which saves nothing. The module says so once, and
    `emulated_because` has the reason.

    The weight is made by `from_linear` and is not trained. Gradients of the input and the bias are
    those of the product with the weight that q stands for, straight through the rounding of x.
    `half()`, `to(dtype)` and the like change the bias, and what is returned for a `(q, scale)`:
    float8 weights and float32 scales stay.

    Args:
        in_features, out_features, bias: As in `torch.nn.Linear`.
        recipe: "rowwise" or "blockwise".
        fast_accum: Of rowwise products. Blockwise ones add up in float32 every 128 columns.
        device, dtype: Of the bias; `dtype` is also that of results for a `(q, scale)`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str = "rowwise",
        fast_accum: bool = True,
        device=None,
        dtype: Optional[torch.dtype] = None,
    ):
        super().__init__(in_features, out_features, recipe, fast_accum, device, dtype)
        if bias:
            self.bias = torch.nn.Parameter(self._like.new_zeros(out_features))

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, recipe: str = "rowwise", fast_accum: bool = True
    ) -> Fp8Linear:
        """Quantises the weight of a `torch.nn.Linear`, whose bias it shares.

        Args:
            linear: With a weight in float16, bfloat16 or float32.
            recipe, fast_accum: As in the constructor.

        Raises:
            RuntimeError: A wrong recipe, or a weight of another dtype.
        """
        weight = linear.weight.detach()
        options = {"recipe": recipe, "fast_accum": fast_accum, "dtype": weight.dtype}
        made = cls(linear.in_features, linear.out_features, False, device="meta", **options)
        made.weight, made.weight_scale = _fp8.quantize_weight(weight, recipe)
        made._like = weight.new_empty(0)
        made.bias = linear.bias
        made.training = linear.training
        made.choose_product()
        return made

    def forward(self, x: Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Of a tensor, or of what `quant_fp8` made of one: a scale a row, or a group of 128."""
        if isinstance(x, torch.Tensor):
            _fp8.check_columns(x, self.in_features)
            if torch.is_grad_enabled() and some_need_grad(x, self.bias):
                given = self._given(_fp8.dtype_of_result(x))
                return _fp8.Product.apply(x, *given, self.has_kernel, self.quantizes_in_graph)
            return self.multiply(x)
        q, scale = x
        _fp8.check_quantized(q, scale, self.in_features, self.recipe)
        return self.multiply_quantized(q, scale, self.dtype)

    def dequantized(self, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """The weight that is multiplied with: `q * scale`, in `dtype` or that of the module."""
        return _fp8.dequantized(self.weight, self.weight_scale, self.recipe, dtype or self.dtype)
