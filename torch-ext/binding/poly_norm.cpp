// Bindings of poly_norm, fused_mul_poly_norm and grouped_poly_norm. The formulas are in
// norm/poly_norm.h.
#include "binding.h"

#include <limits>

#include "norm/poly_norm.h"
#include "norm/poly_norm_cpu.h"

namespace fuselage::binding {
namespace {

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

// `name` of `width` values, or [experts, width], in x's type or float32, as adjacent elements.
Tensor check_factors(const Arguments& a, const char* name, const Tensor& factors, int64_t width,
                     int64_t experts) {
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
  check_like_or_float32(a.op, name, check_dtype(a.op, name, factors),
                        *dtype_from(a.x.scalar_type()));
  return with_adjacent_elements(factors);
}

Tensor check_offs(const Arguments& a) {
  const Tensor& offs = *a.offs;
  check_same_device(a.op, "offs", offs, a.x);
  FUSELAGE_CHECK(a.op,
                 offs.scalar_type() == ScalarType::Int && offs.dim() == 1 && offs.size(0) >= 1,
                 "`offs` must be int32 [experts] of at least one, got ",
                 torch::headeronly::toString(offs.scalar_type()), " ", shape_of(offs));
  return with_adjacent_elements(offs);
}

// Checked: the parameters that both ways have in common, and what keeps contiguous copies alive.
template <typename Params>
struct Checked {
  Params p;
  Tensor weight, bias;
  OptionalTensor offs;
  std::optional<Rows> x, mul;

  bool is_nothing(const Arguments& a) const { return binding::is_nothing(a.x, p.rows, p.dim); }
};

template <typename Params>
Checked<Params> check(const Arguments& a) {
  const DType dtype = check_rows(a.op, a.x);
  const int64_t width = columns_in(a.x);
  check_columns(a.op, "x", a.x);
  FUSELAGE_CHECK(a.op, !a.packed || width % 2 == 0,
                 "`x` without `mul` is packed, and its last dimension must be even, got ",
                 shape_of(a.x));
  check_like(a.op, "mul", a.mul, a.x);
  OptionalTensor offs;
  if (a.offs != nullptr) offs = check_offs(a);
  const int64_t experts = offs.has_value() ? offs->size(0) : 1;
  if (a.hidden_clamp.has_value()) {
    FUSELAGE_CHECK(a.op, *a.hidden_clamp >= 0, "`hidden_clamp` must not be negative, got ",
                   *a.hidden_clamp);
  }
  Checked<Params> c{{},
                    check_factors(a, "weight", a.weight, 3, experts),
                    check_factors(a, "bias", a.bias, 1, experts),
                    offs,
                    {},
                    {}};
  Params& p = c.p;
  p.dtype = dtype;
  p.rows = rows_in(a.x);
  p.dim = a.packed ? width / 2 : width;
  p.experts = experts;
  p.hidden_clamp = a.hidden_clamp.has_value() ? static_cast<float>(*a.hidden_clamp)
                                              : std::numeric_limits<float>::infinity();
  return c;
}

// Points the kernel at the inputs, which are there.
template <typename Params>
void read(const Arguments& a, Checked<Params>& c) {
  Params& p = c.p;
  c.x = read_rows(p.x, p.x_stride, a.x);
  c.mul = read_rows(p.mul, p.mul_stride, a.mul);
  if (a.packed) {
    p.mul = element(p.x, a.mul_first ? 0 : p.dim, p.dtype);
    p.x = element(p.x, a.mul_first ? p.dim : 0, p.dtype);
    p.mul_stride = p.x_stride;
  }
  read_vector(p.weight, p.weight_dtype, c.weight, p.dtype);
  read_vector(p.bias, p.bias_dtype, c.bias, p.dtype);
  if (c.offs.has_value()) p.offs = static_cast<const int32_t*>(c.offs->const_data_ptr());
}

// One element is as much work as two of other operators.
int64_t work_of(int64_t elements) { return 2 * elements; }

struct Results {
  Tensor out;
  OptionalTensor rstd;
};

Results run_forward(const Arguments& a, double eps, bool for_gradient) {
  Checked<PolyNormForward> c = check<PolyNormForward>(a);
  PolyNormForward& p = c.p;
  check_eps(a.op, eps);
  FUSELAGE_CHECK(a.op, a.x.dim() <= kMaxDim, "`x` must have at most ", kMaxDim, " dimensions");
  Results results{empty_with_columns(a.x, p.dim), {}};
  if (for_gradient) results.rstd = empty_floats({p.rows, 3}, a.x);
  if (c.is_nothing(a)) return results;
  read(a, c);
  p.out = results.out.mutable_data_ptr();
  if (for_gradient) p.rstd = static_cast<float*>(results.rstd->mutable_data_ptr());
  p.eps = static_cast<float>(eps);
  launch<cpu::poly_norm_forward, gpu::poly_norm_forward>(a.op, a.x, p, p.rows, work_of(p.dim));
  return results;
}

struct Needs {
  bool x, mul, weight, bias;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> run_backward(const Arguments& a, const Tensor& grad_out,
                                                        const Tensor& rstd, const Needs& needs) {
  Checked<PolyNormBackward> c = check<PolyNormBackward>(a);
  PolyNormBackward& p = c.p;
  check_same_device(a.op, "grad_out", grad_out, a.x);
  FUSELAGE_CHECK(a.op, same_rows(grad_out, a.x) && columns_in(grad_out) == p.dim,
                 "`grad_out` must have the shape of the result, ", p.dim,
                 " columns for each row of `x` ", shape_of(a.x), ", got ", shape_of(grad_out));
  check_same_dtype(a.op, "grad_out", grad_out, a.x);
  check_saved(a.op, "rstd", rstd, 3 * p.rows, a.x, "x", "float32 [", p.rows, ", 3]");

  Gradient grad_x = gradient_of(a.x, needs.x);
  Gradient grad_mul = gradient_of(a.mul, needs.mul, a.x);
  Gradient grad_weight = gradient_of(c.weight, needs.weight, a.x);
  Gradient grad_bias = gradient_of(c.bias, needs.bias, a.x);
  const auto results = [&] {
    return std::make_tuple(grad_x.tensor, grad_mul.tensor, grad_weight.tensor, grad_bias.tensor);
  };
  if (c.is_nothing(a)) {
    grad_weight.zero();
    grad_bias.zero();
    return results();
  }
  read(a, c);
  const auto grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  p.rstd = static_cast<const float*>(rstd.const_data_ptr());
  p.grad_x_stride = p.grad_mul_stride = columns_in(a.x);
  p.grad_x = grad_x.data();
  p.grad_mul = grad_mul.data();
  if (a.packed && needs.x) {
    p.grad_mul = element(p.grad_x, a.mul_first ? 0 : p.dim, p.dtype);
    p.grad_x = element(p.grad_x, a.mul_first ? p.dim : 0, p.dtype);
  }
  p.grad_weight = grad_weight.data();
  p.grad_bias = grad_bias.data();

  OptionalTensor partials;
  const auto make_partials = [&](int64_t count) {
    p.partial_count = count;
    p.partials = scratch(partials, needs.weight || needs.bias ? count * 4 : 0, a.x);
  };
  launch(
      a.op, a.x,
      [&] {
        make_partials(p.rows);
        on_threads<cpu::poly_norm_backward>(p, p.rows, work_of(p.dim));
        if (partials.has_value())
          on_threads<cpu::poly_norm_backward_weight>(p, p.experts, kElementsPerTask);
      },
      [&](int32_t device, void* stream) {
        make_partials(gpu::poly_norm_backward_partials(p, device));
        return gpu::poly_norm_backward(p, device, stream);
      });
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

template <bool kForGradient>
auto poly_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Results results = run_forward(poly_norm_arguments(x, weight, bias), eps, kForGradient);
  return returned<kForGradient>(results.out, results.rstd);
}

// Without mul, x is packed: [..., 2 * dim], x in the first half and mul in the second, or the other
// way round with mul_first.
template <bool kForGradient>
auto fused_mul_poly_norm(const Tensor& x, const OptionalTensor& mul, const Tensor& weight,
                         const Tensor& bias, double eps, bool mul_first) {
  const Arguments a = fused_mul_arguments(x, mul, weight, bias, mul_first);
  const Results results = run_forward(a, eps, kForGradient);
  return returned<kForGradient>(results.out, results.rstd);
}

// The gradient of both: (grad_x, grad_mul, grad_weight, grad_bias), each empty where not needed.
// That of a packed x is packed.
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

// As fused_mul_poly_norm, with the weight and the bias of each row's expert.
template <bool kForGradient>
auto grouped_poly_norm(const Tensor& x, const OptionalTensor& mul, const Tensor& weight,
                       const Tensor& bias, const Tensor& offs, double eps, bool mul_first,
                       std::optional<double> hidden_clamp) {
  const char* op = "grouped_poly_norm";
  const Arguments a = grouped_arguments(op, x, mul, weight, bias, offs, mul_first, hidden_clamp);
  const Results results = run_forward(a, eps, kForGradient);
  return returned<kForGradient>(results.out, results.rstd);
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

}  // namespace

void register_poly_norm_ops(const Ops& ops) {
  ops.forward("poly_norm", "Tensor x, Tensor weight, Tensor bias, float eps", "Tensor out",
              "Tensor rstd", TORCH_BOX(&poly_norm<false>), TORCH_BOX(&poly_norm<true>));
  ops.forward("fused_mul_poly_norm",
              "Tensor x, Tensor? mul, Tensor weight, Tensor bias, float eps, bool mul_first",
              "Tensor out", "Tensor rstd", TORCH_BOX(&fused_mul_poly_norm<false>),
              TORCH_BOX(&fused_mul_poly_norm<true>));
  ops.forward(
      "grouped_poly_norm",
      "Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor offs, float eps, bool mul_first, "
      "float? hidden_clamp",
      "Tensor out", "Tensor rstd", TORCH_BOX(&grouped_poly_norm<false>),
      TORCH_BOX(&grouped_poly_norm<true>));
  ops.op(
      "grouped_poly_norm_bwd(Tensor grad_out, Tensor x, Tensor? mul, bool mul_first, Tensor "
      "weight, Tensor bias, Tensor offs, Tensor rstd, float? hidden_clamp, bool needs_grad_x, "
      "bool needs_grad_mul, bool needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, "
      "Tensor grad_mul, Tensor grad_weight, Tensor grad_bias)",
      TORCH_BOX(&grouped_poly_norm_bwd));
  ops.op(
      "poly_norm_bwd(Tensor grad_out, Tensor x, Tensor? mul, bool packed, bool mul_first, Tensor "
      "weight, Tensor bias, Tensor rstd, bool needs_grad_x, bool needs_grad_mul, bool "
      "needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, Tensor grad_mul, Tensor "
      "grad_weight, Tensor grad_bias)",
      TORCH_BOX(&poly_norm_bwd));
}

}  // namespace fuselage::binding
