#include "norm.h"

#include "cpu/rms_norm.h"
#include "norm/rms_norm.h"

namespace fuselage::binding {
namespace {

void check_x(const char* op, const Tensor& x) {
  FUSELAGE_CHECK(op, x.dim() >= 1, "`x` must have at least one dimension, got a scalar");
}

DType check_out_dtype(const char* op, std::optional<ScalarType> out_dtype, DType x_dtype) {
  if (!out_dtype.has_value()) return x_dtype;
  const std::optional<DType> dtype = dtype_from(*out_dtype);
  FUSELAGE_CHECK(op,
                 dtype.has_value() &&
                     (*dtype == x_dtype || *dtype == DType::float32 || x_dtype == DType::float32),
                 "`out_dtype` must be ", dtype_name(x_dtype), " as `x`, or float32",
                 x_dtype == DType::float32 ? ", float16 or bfloat16" : "", ", got ",
                 torch::headeronly::toString(*out_dtype));
  return *dtype;
}

Tensor empty_rstd(const Tensor& x) {
  const int64_t rows = rows_in(x);
  return empty(&rows, 1, ScalarType::Float, x);
}

struct Options {
  double eps, weight_offset;
  bool cast_before_weight;
};

// Checks are done, outputs allocated: fills the params and launches.
void forward(const char* op, const Tensor& x, const Tensor* residual, const OptionalTensor& weight,
             const Tensor& out, int64_t out_stride, const Tensor* new_residual,
             int64_t new_residual_stride, const Tensor* rstd, const Options& options) {
  RmsNormForward p{};
  p.rows = rows_in(x);
  p.dim = x.size(x.dim() - 1);
  if (p.rows == 0 || p.dim == 0 || is_meta(x)) return;
  const Rows x_rows = rows_of(x);
  p.x = x_rows.data();
  p.x_stride = x_rows.stride;
  p.x_dtype = *dtype_from(x.scalar_type());
  std::optional<Rows> residual_rows;
  if (residual != nullptr) {
    residual_rows = rows_of(*residual);
    p.residual = residual_rows->data();
    p.residual_stride = residual_rows->stride;
    p.new_residual = new_residual->mutable_data_ptr();
    p.new_residual_stride = new_residual_stride;
  }
  p.weight_dtype = p.x_dtype;
  if (weight.has_value()) {
    p.weight = weight->const_data_ptr();
    p.weight_dtype = *dtype_from(weight->scalar_type());
  }
  p.out = out.mutable_data_ptr();
  p.out_stride = out_stride;
  p.out_dtype = *dtype_from(out.scalar_type());
  p.rstd = rstd == nullptr ? nullptr : static_cast<float*>(rstd->mutable_data_ptr());
  p.eps = static_cast<float>(options.eps);
  p.weight_offset = static_cast<float>(options.weight_offset);
  p.cast_before_weight = options.cast_before_weight;

  if (x.is_cpu()) {
    torch::stable::parallel_for(0, p.rows, tasks_of(p.dim), [&](int64_t begin, int64_t end) {
      cpu::rms_norm_forward(p, begin, end);
    });
    return;
  }
#if defined(FUSELAGE_GPU)
  const int32_t device = x.get_device_index();
  const OnDevice on_device(device);
  const char* error = gpu::rms_norm_forward(p, device, on_device.stream());
  FUSELAGE_CHECK(op, error == nullptr, error);
#endif
}

struct Prepared {
  OptionalTensor weight;
  DType x_dtype, out_dtype;
};

Prepared check_forward(const char* op, const Tensor& x, const OptionalTensor& weight,
                       const Options& options, std::optional<ScalarType> out_dtype) {
  check_x(op, x);
  const DType x_dtype = check_dtype(op, "x", x);
  check_columns(op, "x", x);
  check_eps(op, options.eps);
  check_not_nan(op, "weight_offset", options.weight_offset);
  return {check_vector(op, "weight", weight, x), x_dtype, check_out_dtype(op, out_dtype, x_dtype)};
}

Tensor run_rms_norm(const char* op, const Tensor& x, const OptionalTensor& weight,
                    const Options& options, std::optional<ScalarType> out_dtype,
                    const Tensor* rstd) {
  const Prepared checked = check_forward(op, x, weight, options, out_dtype);
  Tensor out = empty_like(x, scalar_type_of(checked.out_dtype));
  const int64_t dim = x.size(x.dim() - 1);
  forward(op, x, nullptr, checked.weight, out, dim, nullptr, 0, rstd, options);
  return out;
}

std::tuple<Tensor, Tensor> run_fused_add(const char* op, const Tensor& x, const Tensor& residual,
                                         const OptionalTensor& weight, const Options& options,
                                         std::optional<ScalarType> out_dtype, const Tensor* rstd) {
  const Prepared checked = check_forward(op, x, weight, options, out_dtype);
  check_like(op, "residual", residual, x);
  Tensor out = empty_like(x, scalar_type_of(checked.out_dtype));
  Tensor new_residual = empty_like(x, x.scalar_type());
  const int64_t dim = x.size(x.dim() - 1);
  forward(op, x, &residual, checked.weight, out, dim, &new_residual, dim, rstd, options);
  return {out, new_residual};
}

}  // namespace

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double weight_offset,
                bool cast_before_weight, std::optional<ScalarType> out_dtype) {
  return run_rms_norm("rms_norm", x, weight, {eps, weight_offset, cast_before_weight}, out_dtype,
                      nullptr);
}

std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& x, const OptionalTensor& weight, double eps,
                                        double weight_offset, bool cast_before_weight,
                                        std::optional<ScalarType> out_dtype) {
  check_x("rms_norm", x);
  const Tensor rstd = empty_rstd(x);
  Tensor out = run_rms_norm("rms_norm", x, weight, {eps, weight_offset, cast_before_weight},
                            out_dtype, &rstd);
  return {out, rstd};
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual,
                                              const OptionalTensor& weight, double eps,
                                              double weight_offset, bool cast_before_weight,
                                              std::optional<ScalarType> out_dtype) {
  return run_fused_add("fused_add_rms_norm", x, residual, weight,
                       {eps, weight_offset, cast_before_weight}, out_dtype, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> fused_add_rms_norm_fwd(const Tensor& x, const Tensor& residual,
                                                          const OptionalTensor& weight, double eps,
                                                          double weight_offset,
                                                          bool cast_before_weight,
                                                          std::optional<ScalarType> out_dtype) {
  check_x("fused_add_rms_norm", x);
  const Tensor rstd = empty_rstd(x);
  auto [out, new_residual] =
      run_fused_add("fused_add_rms_norm", x, residual, weight,
                    {eps, weight_offset, cast_before_weight}, out_dtype, &rstd);
  return {out, new_residual, rstd};
}

void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                         double eps, double weight_offset, bool cast_before_weight) {
  const char* op = "fused_add_rms_norm_";
  const Options options{eps, weight_offset, cast_before_weight};
  const Prepared checked = check_forward(op, x, weight, options, std::nullopt);
  check_like(op, "residual", residual, x);
  const auto x_stride = row_stride_of(x);
  const auto residual_stride = row_stride_of(residual);
  const int64_t rows = rows_in(x), dim = x.size(x.dim() - 1);
  const auto writable = [&](const std::optional<int64_t>& stride) {
    return stride.has_value() && (rows <= 1 || *stride >= dim);
  };
  FUSELAGE_CHECK(
      op, writable(x_stride),
      "`x` is written in place and must be rows of adjacent elements that do not overlap, one "
      "stride between all of them; pass a contiguous tensor or use fused_add_rms_norm");
  FUSELAGE_CHECK(
      op, writable(residual_stride),
      "`residual` is written in place and must be rows of adjacent elements that do not overlap, "
      "one stride between all of them; pass a contiguous tensor or use fused_add_rms_norm");
  FUSELAGE_CHECK(
      op, !overlap(x, *x_stride, residual, *residual_stride, rows, dim),
      "`x` and `residual` are both written and must not share memory; pass a copy of one");
  if (checked.weight.has_value()) {
    check_apart(op, "x", x, "weight", *checked.weight);
    check_apart(op, "residual", residual, "weight", *checked.weight);
  }
  forward(op, x, &residual, checked.weight, x, *x_stride, &residual, *residual_stride, nullptr,
          options);
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad_out,
                                        const OptionalTensor& grad_new_residual, const Tensor& x,
                                        const OptionalTensor& weight, const Tensor& rstd,
                                        double weight_offset, bool needs_grad_x,
                                        bool needs_grad_weight) {
  const char* op = "rms_norm_bwd";
  check_x(op, x);
  check_columns(op, "x", x);
  RmsNormBackward p{};
  p.x_dtype = check_dtype(op, "x", x);
  check_same_device(op, "grad_out", grad_out, x);
  check_same_shape(op, "grad_out", grad_out, x);
  p.out_dtype = check_dtype(op, "grad_out", grad_out);
  check_out_dtype(op, grad_out.scalar_type(), p.x_dtype);
  const OptionalTensor checked_weight = check_vector(op, "weight", weight, x);
  if (grad_new_residual.has_value()) check_like(op, "grad_new_residual", *grad_new_residual, x);
  p.rows = rows_in(x);
  p.dim = x.size(x.dim() - 1);
  check_same_device(op, "rstd", rstd, x);
  FUSELAGE_CHECK(
      op, rstd.numel() == p.rows && rstd.is_contiguous() && rstd.scalar_type() == ScalarType::Float,
      "`rstd` must be the float32 [", p.rows, "] that the forward returned, got ", shape_of(rstd));

  p.weight_dtype = p.x_dtype;
  if (checked_weight.has_value()) {
    p.weight = checked_weight->const_data_ptr();
    p.weight_dtype = *dtype_from(checked_weight->scalar_type());
  }
  needs_grad_weight = needs_grad_weight && checked_weight.has_value();
  Tensor grad_x = needs_grad_x ? empty_like(x, x.scalar_type()) : no_tensor(x);
  Tensor grad_weight =
      needs_grad_weight ? empty_like(*checked_weight, checked_weight->scalar_type()) : no_tensor(x);
  if (p.rows == 0 || p.dim == 0 || is_meta(x)) {
    if (needs_grad_weight) torch::stable::zero_(grad_weight);
    return {grad_x, grad_weight};
  }

  const Rows grad_out_rows = rows_of(grad_out);
  const Rows x_rows = rows_of(x);
  std::optional<Rows> grad_new_residual_rows;
  p.grad_out = grad_out_rows.data();
  p.grad_out_stride = grad_out_rows.stride;
  p.x = x_rows.data();
  p.x_stride = x_rows.stride;
  if (grad_new_residual.has_value()) {
    grad_new_residual_rows = rows_of(*grad_new_residual);
    p.grad_new_residual = grad_new_residual_rows->data();
    p.grad_new_residual_stride = grad_new_residual_rows->stride;
  }
  p.rstd = static_cast<const float*>(rstd.const_data_ptr());
  p.weight_offset = static_cast<float>(weight_offset);
  p.grad_x = needs_grad_x ? grad_x.mutable_data_ptr() : nullptr;
  p.grad_weight = needs_grad_weight ? grad_weight.mutable_data_ptr() : nullptr;

  const auto with_partials = [&](int64_t count) {
    p.partial_count = count;
    const int64_t sizes[2] = {count, p.dim};
    OptionalTensor partials;
    if (needs_grad_weight) {
      partials = empty(sizes, 2, ScalarType::Float, x);
      p.partials = static_cast<float*>(partials->mutable_data_ptr());
    }
    return partials;
  };
  if (x.is_cpu()) {
    const OptionalTensor partials = with_partials(cpu::rms_norm_backward_chunks(p.rows, p.dim));
    const int64_t chunk_elements = p.rows / p.partial_count * p.dim;
    torch::stable::parallel_for(
        0, p.partial_count, tasks_of(chunk_elements),
        [&](int64_t begin, int64_t end) { cpu::rms_norm_backward(p, begin, end); });
    if (needs_grad_weight) {
      torch::stable::parallel_for(
          0, p.dim, tasks_of(p.partial_count),
          [&](int64_t begin, int64_t end) { cpu::rms_norm_backward_weight(p, begin, end); });
    }
    return {grad_x, grad_weight};
  }
#if defined(FUSELAGE_GPU)
  const int32_t device = x.get_device_index();
  const OnDevice on_device(device);
  const OptionalTensor partials = with_partials(gpu::rms_norm_backward_partials(p, device));
  const char* error = gpu::rms_norm_backward(p, device, on_device.stream());
  FUSELAGE_CHECK(op, error == nullptr, error);
#endif
  return {grad_x, grad_weight};
}

}  // namespace fuselage::binding
