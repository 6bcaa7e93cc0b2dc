#include "poly_norm.h"

#include <algorithm>
#include <limits>

#include "cpu/poly_norm.h"
#include "norm/poly_norm.h"

namespace fuselage::binding {
namespace {

constexpr int64_t kElementsPerTask = 16384;  // work for which a CPU thread is worth waking

int64_t rows_per_task(int64_t dim) { return std::max<int64_t>(1, kElementsPerTask / dim); }

// What an op is given, as it was called.
struct Arguments {
  const char* op;
  const Tensor& x;
  const OptionalTensor& mul;
  bool packed, mul_first;
  const Tensor& weight;
  const Tensor& bias;
  const Tensor* offs;  // null but for grouped_poly_norm
  std::optional<double> hidden_clamp;
};

// The same, checked: x and mul as rows, the rest as adjacent elements.
struct Inputs {
  DType dtype;
  int64_t rows, dim, experts;
  Tensor weight, bias;
  Tensor x_holder, mul_holder;  // keep contiguous copies alive
  OptionalTensor offs_holder;
  const void* x;
  const void* mul;
  int64_t x_stride, mul_stride;
  const int32_t* offs;
  float hidden_clamp;
};

// `name` of `width` values, or [experts, width], in x's type or float32, as adjacent elements.
Tensor check_factors(const Arguments& a, const char* name, const Tensor& factors, int64_t width,
                     int64_t experts, DType x_dtype) {
  check_same_device(a.op, name, factors, a.x);
  if (a.offs == nullptr) {
    FUSELAGE_CHECK(a.op, factors.dim() == 1 && factors.size(0) == width, "`", name,
                   "` must have shape [", width, "], got ", shape_of(factors));
  } else {
    FUSELAGE_CHECK(a.op,
                   factors.dim() == 2 && factors.size(0) == experts && factors.size(1) == width,
                   "`", name, "` must have shape [", experts, ", ", width,
                   "], a row for each expert of `offs`, got ", shape_of(factors));
  }
  check_like_or_float32(a.op, name, check_dtype(a.op, name, factors), x_dtype);
  return factors.is_contiguous() ? factors : torch::stable::contiguous(factors);
}

const void* element(const void* data, int64_t index, DType dtype) {
  return static_cast<const char*>(data) + index * dtype_size(dtype);
}

void* element(void* data, int64_t index, DType dtype) {
  return static_cast<char*>(data) + index * dtype_size(dtype);
}

Inputs check(const Arguments& a) {
  const Tensor& x = a.x;
  FUSELAGE_CHECK(a.op, x.dim() >= 1, "`x` must have at least one dimension, got a scalar");
  const DType dtype = check_dtype(a.op, "x", x);
  const int64_t width = x.size(x.dim() - 1);
  check_columns(a.op, "x", x);
  if (a.packed) {
    FUSELAGE_CHECK(a.op, width % 2 == 0,
                   "`x` without `mul` is packed, and its last dimension must be even, got ",
                   shape_of(x));
  }
  if (a.mul.has_value()) {
    check_like(a.op, "mul", *a.mul, x);
  }
  int64_t experts = 1;
  OptionalTensor offs;
  if (a.offs != nullptr) {
    check_same_device(a.op, "offs", *a.offs, x);
    FUSELAGE_CHECK(
        a.op,
        a.offs->scalar_type() == ScalarType::Int && a.offs->dim() == 1 && a.offs->size(0) >= 1,
        "`offs` must be int32 [experts] of at least one, got ",
        torch::headeronly::toString(a.offs->scalar_type()), " ", shape_of(*a.offs));
    experts = a.offs->size(0);
    offs = a.offs->is_contiguous() ? *a.offs : torch::stable::contiguous(*a.offs);
  }
  if (a.hidden_clamp.has_value()) {
    FUSELAGE_CHECK(a.op, *a.hidden_clamp >= 0, "`hidden_clamp` must not be negative, got ",
                   *a.hidden_clamp);
  }
  Tensor weight = check_factors(a, "weight", a.weight, 3, experts, dtype);
  Tensor bias = check_factors(a, "bias", a.bias, 1, experts, dtype);

  const int64_t dim = a.packed ? width / 2 : width;
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  const float hidden_clamp = a.hidden_clamp.has_value() ? static_cast<float>(*a.hidden_clamp)
                                                        : std::numeric_limits<float>::infinity();
  const Rows x_rows = rows_of(x);
  const auto* offs_data =
      offs.has_value() ? static_cast<const int32_t*>(offs->const_data_ptr()) : nullptr;
  Inputs in{dtype,   rows,          dim,           experts,   weight,
            bias,    x_rows.tensor, x_rows.tensor, offs,      x_rows.data(),
            nullptr, x_rows.stride, x_rows.stride, offs_data, hidden_clamp};
  if (a.packed) {
    in.mul = element(in.x, a.mul_first ? 0 : dim, dtype);
    in.x = element(in.x, a.mul_first ? dim : 0, dtype);
  } else if (a.mul.has_value()) {
    const Rows mul_rows = rows_of(*a.mul);
    in.mul_holder = mul_rows.tensor;
    in.mul = mul_rows.data();
    in.mul_stride = mul_rows.stride;
  }
  return in;
}

// The parameters that the two ways have in common.
template <typename Params>
Params params_of(const Inputs& in) {
  Params p{};
  p.x = in.x;
  p.mul = in.mul;
  p.weight = in.weight.const_data_ptr();
  p.bias = in.bias.const_data_ptr();
  p.offs = in.offs;
  p.rows = in.rows;
  p.dim = in.dim;
  p.experts = in.experts;
  p.x_stride = in.x_stride;
  p.mul_stride = in.mul_stride;
  p.hidden_clamp = in.hidden_clamp;
  p.dtype = in.dtype;
  p.weight_dtype = *dtype_from(in.weight.scalar_type());
  p.bias_dtype = *dtype_from(in.bias.scalar_type());
  return p;
}

Tensor empty_rstd(const Tensor& x, int64_t rows) {
  const int64_t sizes[2] = {rows, 3};
  return empty(sizes, 2, ScalarType::Float, x);
}

// The result, and rstd where there is a place for it.
Tensor run_forward(const Arguments& a, double eps, std::optional<Tensor>* rstd) {
  const Inputs in = check(a);
  check_eps(a.op, eps);
  constexpr int64_t kMaxDim = 64;
  int64_t sizes[kMaxDim];
  const int64_t last = a.x.dim() - 1;
  FUSELAGE_CHECK(a.op, last < kMaxDim, "`x` must have at most ", kMaxDim, " dimensions");
  for (int64_t i = 0; i < last; ++i) sizes[i] = a.x.size(i);
  sizes[last] = in.dim;
  Tensor out = empty(sizes, last + 1, a.x.scalar_type(), a.x);
  if (rstd != nullptr) *rstd = empty_rstd(a.x, in.rows);
  if (in.rows == 0 || in.dim == 0 || is_meta(a.x)) return out;

  PolyNormForward p = params_of<PolyNormForward>(in);
  p.out = out.mutable_data_ptr();
  p.rstd = rstd == nullptr ? nullptr : static_cast<float*>((*rstd)->mutable_data_ptr());
  p.eps = static_cast<float>(eps);
  if (a.x.is_cpu()) {
    torch::stable::parallel_for(0, p.rows, rows_per_task(p.dim), [&](int64_t begin, int64_t end) {
      cpu::poly_norm_forward(p, begin, end);
    });
    return out;
  }
#if defined(FUSELAGE_GPU)
  const int32_t device = a.x.get_device_index();
  const OnDevice on_device(device);
  const char* error = gpu::poly_norm_forward(p, device, on_device.stream());
  FUSELAGE_CHECK(a.op, error == nullptr, error);
#endif
  return out;
}

std::tuple<Tensor, Tensor> run_forward_for_gradient(const Arguments& a, double eps) {
  std::optional<Tensor> rstd;
  Tensor out = run_forward(a, eps, &rstd);
  return {out, *rstd};
}

struct Needs {
  bool x, mul, weight, bias;
};

void check_grad_out(const Arguments& a, const Tensor& grad_out, const Inputs& in) {
  check_same_device(a.op, "grad_out", grad_out, a.x);
  const int64_t last = a.x.dim() - 1;
  bool same = grad_out.dim() == a.x.dim() && grad_out.size(last) == in.dim;
  for (int64_t i = 0; same && i < last; ++i) same = grad_out.size(i) == a.x.size(i);
  FUSELAGE_CHECK(a.op, same, "`grad_out` must have the shape of the result, ", in.dim,
                 " columns for each row of `x` ", shape_of(a.x), ", got ", shape_of(grad_out));
  const DType dtype = check_dtype(a.op, "grad_out", grad_out);
  FUSELAGE_CHECK(a.op, dtype == in.dtype, "`grad_out` must be ", dtype_name(in.dtype),
                 " as `x`, got ", dtype_name(dtype));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> run_backward(const Arguments& a, const Tensor& grad_out,
                                                        const Tensor& rstd, Needs needs) {
  const Inputs in = check(a);
  check_grad_out(a, grad_out, in);
  check_same_device(a.op, "rstd", rstd, a.x);
  FUSELAGE_CHECK(a.op,
                 rstd.numel() == 3 * in.rows && rstd.is_contiguous() &&
                     rstd.scalar_type() == ScalarType::Float,
                 "`rstd` must be the float32 [", in.rows, ", 3] that the forward returned, got ",
                 shape_of(rstd));
  needs.mul = needs.mul && a.mul.has_value();

  Tensor grad_x = needs.x ? empty_like(a.x, a.x.scalar_type()) : no_tensor(a.x);
  Tensor grad_mul = needs.mul ? empty_like(a.x, a.x.scalar_type()) : no_tensor(a.x);
  Tensor grad_weight =
      needs.weight ? empty_like(in.weight, in.weight.scalar_type()) : no_tensor(a.x);
  Tensor grad_bias = needs.bias ? empty_like(in.bias, in.bias.scalar_type()) : no_tensor(a.x);
  const auto results = [&] { return std::make_tuple(grad_x, grad_mul, grad_weight, grad_bias); };
  if (in.rows == 0 || in.dim == 0 || is_meta(a.x)) {
    if (needs.weight) torch::stable::zero_(grad_weight);
    if (needs.bias) torch::stable::zero_(grad_bias);
    return results();
  }

  PolyNormBackward p = params_of<PolyNormBackward>(in);
  const Rows grad_out_rows = rows_of(grad_out);
  p.grad_out = grad_out_rows.data();
  p.grad_out_stride = grad_out_rows.stride;
  p.rstd = static_cast<const float*>(rstd.const_data_ptr());
  p.grad_x_stride = p.grad_mul_stride = a.packed ? 2 * p.dim : p.dim;
  if (needs.x) {
    p.grad_x = grad_x.mutable_data_ptr();
    if (a.packed) {
      p.grad_mul = element(p.grad_x, a.mul_first ? 0 : p.dim, p.dtype);
      p.grad_x = element(p.grad_x, a.mul_first ? p.dim : 0, p.dtype);
    }
  }
  if (needs.mul) p.grad_mul = grad_mul.mutable_data_ptr();
  if (needs.weight) p.grad_weight = grad_weight.mutable_data_ptr();
  if (needs.bias) p.grad_bias = grad_bias.mutable_data_ptr();

  const auto with_partials = [&](int64_t count) {
    p.partial_count = count;
    OptionalTensor partials;
    if (needs.weight || needs.bias) {
      const int64_t sizes[2] = {count, 4};
      partials = empty(sizes, 2, ScalarType::Float, a.x);
      p.partials = static_cast<float*>(partials->mutable_data_ptr());
    }
    return partials;
  };
  if (a.x.is_cpu()) {
    const OptionalTensor partials = with_partials(p.rows);
    torch::stable::parallel_for(0, p.rows, rows_per_task(p.dim), [&](int64_t begin, int64_t end) {
      cpu::poly_norm_backward(p, begin, end);
    });
    if (partials.has_value()) {
      torch::stable::parallel_for(0, p.experts, 1, [&](int64_t begin, int64_t end) {
        cpu::poly_norm_backward_weight(p, begin, end);
      });
    }
    return results();
  }
#if defined(FUSELAGE_GPU)
  const int32_t device = a.x.get_device_index();
  const OnDevice on_device(device);
  const OptionalTensor partials = with_partials(gpu::poly_norm_backward_partials(p, device));
  const char* error = gpu::poly_norm_backward(p, device, on_device.stream());
  FUSELAGE_CHECK(a.op, error == nullptr, error);
#endif
  return results();
}

const OptionalTensor kNoMul = std::nullopt;

Arguments poly_norm_arguments(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return {"poly_norm", x, kNoMul, false, false, weight, bias, nullptr, std::nullopt};
}

Arguments fused_mul_arguments(const Tensor& x, const OptionalTensor& mul, const Tensor& weight,
                              const Tensor& bias, bool mul_first) {
  return {"fused_mul_poly_norm", x, mul, !mul.has_value(), mul_first, weight, bias, nullptr,
          std::nullopt};
}

Arguments grouped_arguments(const char* op, const Tensor& x, const OptionalTensor& mul,
                            const Tensor& weight, const Tensor& bias, const Tensor& offs,
                            bool mul_first, std::optional<double> hidden_clamp) {
  return {op, x, mul, !mul.has_value(), mul_first, weight, bias, &offs, hidden_clamp};
}

}  // namespace

Tensor poly_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return run_forward(poly_norm_arguments(x, weight, bias), eps, nullptr);
}

std::tuple<Tensor, Tensor> poly_norm_fwd(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                         double eps) {
  return run_forward_for_gradient(poly_norm_arguments(x, weight, bias), eps);
}

Tensor fused_mul_poly_norm(const Tensor& x, const OptionalTensor& mul, const Tensor& weight,
                           const Tensor& bias, double eps, bool mul_first) {
  return run_forward(fused_mul_arguments(x, mul, weight, bias, mul_first), eps, nullptr);
}

std::tuple<Tensor, Tensor> fused_mul_poly_norm_fwd(const Tensor& x, const OptionalTensor& mul,
                                                   const Tensor& weight, const Tensor& bias,
                                                   double eps, bool mul_first) {
  return run_forward_for_gradient(fused_mul_arguments(x, mul, weight, bias, mul_first), eps);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> poly_norm_bwd(
    const Tensor& grad_out, const Tensor& x, const OptionalTensor& mul, bool packed, bool mul_first,
    const Tensor& weight, const Tensor& bias, const Tensor& rstd, bool needs_grad_x,
    bool needs_grad_mul, bool needs_grad_weight, bool needs_grad_bias) {
  const char* op = "poly_norm_bwd";
  FUSELAGE_CHECK(op, !packed || !mul.has_value(), "`mul` must be None where `x` is packed");
  const Arguments a{op, x, mul, packed, mul_first, weight, bias, nullptr, std::nullopt};
  return run_backward(a, grad_out, rstd,
                      {needs_grad_x, needs_grad_mul, needs_grad_weight, needs_grad_bias});
}

Tensor grouped_poly_norm(const Tensor& x, const OptionalTensor& mul, const Tensor& weight,
                         const Tensor& bias, const Tensor& offs, double eps, bool mul_first,
                         std::optional<double> hidden_clamp) {
  return run_forward(
      grouped_arguments("grouped_poly_norm", x, mul, weight, bias, offs, mul_first, hidden_clamp),
      eps, nullptr);
}

std::tuple<Tensor, Tensor> grouped_poly_norm_fwd(const Tensor& x, const OptionalTensor& mul,
                                                 const Tensor& weight, const Tensor& bias,
                                                 const Tensor& offs, double eps, bool mul_first,
                                                 std::optional<double> hidden_clamp) {
  return run_forward_for_gradient(
      grouped_arguments("grouped_poly_norm", x, mul, weight, bias, offs, mul_first, hidden_clamp),
      eps);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> grouped_poly_norm_bwd(
    const Tensor& grad_out, const Tensor& x, const OptionalTensor& mul, bool mul_first,
    const Tensor& weight, const Tensor& bias, const Tensor& offs, const Tensor& rstd,
    std::optional<double> hidden_clamp, bool needs_grad_x, bool needs_grad_mul,
    bool needs_grad_weight, bool needs_grad_bias) {
  return run_backward(grouped_arguments("grouped_poly_norm_bwd", x, mul, weight, bias, offs,
                                        mul_first, hidden_clamp),
                      grad_out, rstd,
                      {needs_grad_x, needs_grad_mul, needs_grad_weight, needs_grad_bias});
}

}  // namespace fuselage::binding
