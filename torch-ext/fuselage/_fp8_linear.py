"""What `modules.Fp8Linear` owns, and which product it calls."""

from __future__ import annotations

import torch

from . import _fp8
from .quant import GROUP


class Fp8Weight(torch.nn.Module):
    """Float8 and scales that no cast changes, and a bias; and products with them."""

    fuses_quantization = True  # compiled; see `_fp8.quantize_in_graph`

    def __init__(self, in_features, out_features, recipe, fast_accum, device, dtype):
        super().__init__()
        if recipe not in _fp8.RECIPES:
            names = ", ".join(_fp8.RECIPES)
            raise RuntimeError(
                f"fuselage::Fp8Linear: `recipe` must be one of {names}, got {recipe!r}"
            )
        self.in_features, self.out_features, self.recipe = in_features, out_features, recipe
        self.fast_accum = fast_accum
        blocks = (-(-out_features // GROUP), -(-in_features // GROUP))
        scales = (out_features, 1) if recipe == "rowwise" else blocks
        q = torch.zeros((out_features, in_features), device=device, dtype=torch.uint8)
        self.register_buffer("weight", q.view(_fp8.E4M3))
        self.register_buffer("weight_scale", torch.ones(scales, device=device, dtype=torch.float32))
        # Has the dtype that a cast gives it.
        like = torch.empty(0, device=device, dtype=dtype)
        self.register_buffer("_like", like, persistent=False)
        self.register_parameter("bias", None)
        self.choose_product()

    @property
    def dtype(self) -> torch.dtype:
        """Of results for a `(q, scale)`."""
        return self._like.dtype

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.bias is not None}, recipe={self.recipe!r}"
        return text + (", emulated" if self.emulated_because is not None else "")

    def _apply(self, fn, recurse: bool = True):
        """Moves the weight and its scales as integers, which a cast leaves alone."""
        self.weight = self.weight.view(torch.uint8)
        self.weight_scale = self.weight_scale.view(torch.int32)
        try:
            return super()._apply(fn, recurse)
        finally:
            self.weight = self.weight.view(_fp8.E4M3)
            self.weight_scale = self.weight_scale.view(torch.float32)
            self.choose_product()

    def _load_from_state_dict(self, state_dict, prefix, *others):
        given = state_dict.get(f"{prefix}weight")
        if given is not None and given.dtype != _fp8.E4M3:
            errors = others[-1]
            errors.append(
                f"{prefix}weight must be float8_e4m3fn, got {given.dtype}: load it into a "
                "torch.nn.Linear, and use Fp8Linear.from_linear"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.choose_product()  # with assign=True the weight may be elsewhere

    def choose_product(self) -> None:
        """Here and not in each call: `torch.compile` has nothing to ask a device."""
        sizes = (self.out_features, self.in_features)
        device = self.weight.device
        self.device_type = device.type
        self.emulated_because = _fp8.why_emulated(device, self.recipe, *sizes)
        self.few_rows = _fp8.few_rows(device, self.recipe, self.emulated_because is not None)
        self.has_scaled_mm = (
            self.recipe == "rowwise" and device.type == "cuda" and self.emulated_because is None
        )
        self.has_kernel = _fp8.has_kernel(device, *sizes)

    @property
    def quantizes_in_graph(self) -> bool:
        return self.has_scaled_mm and self.fuses_quantization

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product with a tensor of the right columns, without gradients."""
        return self.quantize_and_multiply(x)[0]

    def quantize_and_multiply(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        """The product, and the `(q, scale)` it was made of."""
        # NOTE: in eager mode each line here is time of the host.
        plain = not (torch.compiler.is_compiling() or torch.is_autocast_enabled(self.device_type))
        if plain and self.takes_one_call(x):
            weight, weight_scale = self._buffers["weight"], self._buffers["weight_scale"]
            bias, dtype = self._parameters["bias"], x.dtype
            y, *quantized = _fp8.linear(x, weight, weight_scale, bias, self.fast_accum, dtype)
            return y, quantized
        quantized = _fp8.quantize_input(x, self.recipe, self.quantizes_in_graph)
        return self.multiply_quantized(*quantized, _fp8.dtype_of_result(x)), quantized

    def takes_one_call(self, x: torch.Tensor) -> bool:
        """Whether one call of ours quantises and multiplies."""
        if type(x) is not torch.Tensor and not isinstance(x, torch.nn.Parameter):
            return False
        if self.has_kernel and _fp8.are_few(x):
            return True
        bias, dtype = self._parameters["bias"], torch.bfloat16
        fits = x.dtype == dtype and (bias is None or bias.dtype == dtype)
        return fits and self.has_scaled_mm and x.numel() > 0

    def multiply_quantized(self, q: torch.Tensor, scale: torch.Tensor, dtype) -> torch.Tensor:
        if _fp8.fits_kernel(q, self.has_kernel):
            tensors = self._buffers["weight"], self._buffers["weight_scale"]
            return _fp8.product_of_few(q, scale, *tensors, self._parameters["bias"], dtype)
        return _fp8.product(q, scale, *self._given(dtype), self.few_rows)

    def _given(self, dtype: torch.dtype) -> tuple:
        """What `_fp8.product` takes after the input."""
        emulated = self.emulated_because is not None
        if emulated and not torch.compiler.is_compiling():
            _fp8.warn_once(self.emulated_because)
        tensors = (self.weight, self.weight_scale, self.bias)
        return (*tensors, dtype, self.recipe, self.fast_accum, emulated)
