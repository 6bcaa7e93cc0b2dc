// Bindings of the norm family. The formulas are in norm/rms_norm.h.
#include "binding.h"
#include "quantised.h"

#include "norm/rms_norm.h"
#include "norm/rms_norm_cpu.h"

namespace fuselage::binding {
namespace {

// What an op is given, as it was called.
struct Arguments {
  const char* op;
  const Tensor& x;
  const OptionalTensor& residual;
  const OptionalTensor& weight;
  double eps, weight_offset;
  bool cast_before_weight;
  std::optional<ScalarType> out_dtype;
};

// The same, checked: what the kernel is given but for x, residual and the results.
struct Checked {
  RmsNormForward p;
  OptionalTensor weight;
};

Checked check(const Arguments& a) {
  Checked c{};
  RmsNormForward& p = c.p;
  p.x_dtype = check_rows(a.op, a.x);
  check_columns(a.op, "x", a.x);
  check_eps(a.op, a.eps);
  check_not_nan(a.op, "weight_offset", a.weight_offset);
  c.weight = check_vector(a.op, "weight", a.weight, a.x);
  p.out_dtype = check_out_dtype(a.op, a.out_dtype, p.x_dtype);
  check_like(a.op, "residual", a.residual, a.x);
  read_vector(p.weight, p.weight_dtype, c.weight, p.x_dtype);
  p.rows = rows_in(a.x);
  p.dim = p.out_stride = p.new_residual_stride = columns_in(a.x);
  p.eps = static_cast<float>(a.eps);
  p.weight_offset = static_cast<float>(a.weight_offset);
  p.cast_before_weight = a.cast_before_weight;
  return c;
}

struct Results {
  Tensor out;
  OptionalTensor new_residual, rstd;
};

void run(const Arguments& a, RmsNormForward& p, const Results& results) {
  if (is_nothing(a.x, p.rows, p.dim)) return;
  const auto x = read_rows(p.x, p.x_stride, a.x);
  const auto residual = read_rows(p.residual, p.residual_stride, a.residual);
  p.out = results.out.mutable_data_ptr();
  if (a.residual.has_value()) p.new_residual = results.new_residual->mutable_data_ptr();
  if (results.rstd.has_value()) p.rstd = static_cast<float*>(results.rstd->mutable_data_ptr());
  launch<cpu::rms_norm_forward, gpu::rms_norm_forward>(a.op, a.x, p, p.rows, p.dim);
}

Results run_forward(const Arguments& a, bool for_gradient) {
  Checked c = check(a);
  Results results{empty_like(a.x, scalar_type_of(c.p.out_dtype)), {}, {}};
  if (a.residual.has_value()) results.new_residual = empty_like(a.x, a.x.scalar_type());
  if (for_gradient) results.rstd = empty_floats({c.p.rows}, a.x);
  run(a, c.p, results);
  return results;
}

template <bool kForGradient>
auto rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double weight_offset,
              bool cast_before_weight, std::optional<ScalarType> out_dtype) {
  const Arguments a{"rms_norm",         x,        std::nullopt, weight, eps, weight_offset,
                    cast_before_weight, out_dtype};
  const Results results = run_forward(a, kForGradient);
  return returned<kForGradient>(results.out, results.rstd);
}

template <bool kForGradient>
auto fused_add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                        double eps, double weight_offset, bool cast_before_weight,
                        std::optional<ScalarType> out_dtype) {
  const Arguments a{"fused_add_rms_norm", x,        residual, weight, eps, weight_offset,
                    cast_before_weight,   out_dtype};
  const Results results = run_forward(a, kForGradient);
  return returned<kForGradient>(results.out, results.new_residual, results.rstd);
}

// out goes to x, new_residual to residual.
void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                         double eps, double weight_offset, bool cast_before_weight) {
  const Arguments a{"fused_add_rms_norm_", x,           residual, weight, eps, weight_offset,
                    cast_before_weight,    std::nullopt};
  auto [p, checked_weight] = check(a);
  std::tie(p.out_stride, p.new_residual_stride) =
      check_written_sum(a.op, "fused_add_rms_norm", x, residual, {{"weight", &checked_weight}});
  run(a, p, {x, residual, std::nullopt});
}

void rms_norm_row(const RmsNormForward& p, int64_t row) { cpu::rms_norm_forward(p, row, row + 1); }

struct QuantisedNorm {
  QuantResults quant;
  Tensor out;
  OptionalTensor new_residual;
};

QuantisedNorm run_quantised(const Arguments& a, const QuantOptions& options, bool keeps_out) {
  const Checked c = check(a);
  Quantised<RmsNormForward> p{c.p, {}};
  QuantisedNorm results{quant_results(a.op, a.x, p.dim, p.x_dtype, options, p.quant),
                        keeps_out ? empty_like(a.x, a.x.scalar_type()) : no_tensor(a.x),
                        {}};
  if (a.residual.has_value()) results.new_residual = empty_like(a.x, a.x.scalar_type());
  if (is_nothing(a.x, p.rows, p.dim)) return results;
  const auto x = read_rows(p.x, p.x_stride, a.x);
  const auto residual = read_rows(p.residual, p.residual_stride, a.residual);
  if (keeps_out) p.out = results.out.mutable_data_ptr();
  if (a.residual.has_value()) p.new_residual = results.new_residual->mutable_data_ptr();
  launch_quantised<&rms_norm_row, &gpu::rms_norm_forward, &gpu::rms_norm_quantises,
                   &gpu::rms_norm_quant>(a.op, a.x, p);
  return results;
}

// `out` has no elements unless it is asked for.
std::tuple<Tensor, Tensor, Tensor> rms_norm_quant(const Tensor& x, const OptionalTensor& weight,
                                                  double eps, double weight_offset,
                                                  bool cast_before_weight,
                                                  const OptionalTensor& scale, int64_t group_size,
                                                  bool scales_by_columns, bool scale_ue8m0,
                                                  bool return_unquantized, ScalarType dtype) {
  const Arguments a{"rms_norm_quant",   x,           std::nullopt, weight, eps, weight_offset,
                    cast_before_weight, std::nullopt};
  const QuantisedNorm results = run_quantised(
      a, {scale, group_size, scales_by_columns, scale_ue8m0, dtype}, return_unquantized);
  return {results.quant.q, results.quant.scale, results.out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_add_rms_norm_quant(
    const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps,
    double weight_offset, bool cast_before_weight, const OptionalTensor& scale, int64_t group_size,
    bool scales_by_columns, bool scale_ue8m0, bool return_unquantized, ScalarType dtype) {
  const Arguments a{"fused_add_rms_norm_quant", x,           residual, weight, eps, weight_offset,
                    cast_before_weight,         std::nullopt};
  const QuantisedNorm results = run_quantised(
      a, {scale, group_size, scales_by_columns, scale_ue8m0, dtype}, return_unquantized);
  return {results.quant.q, results.quant.scale, results.out, *results.new_residual};
}

template <bool kForGradient>
auto rms_norm_add_rms_norm(const Tensor& x, const Tensor& residual,
                           const OptionalTensor& post_weight, const OptionalTensor& pre_weight,
                           double eps, double pre_eps, double weight_offset,
                           bool cast_before_weight) {
  const char* op = "rms_norm_add_rms_norm";
  RmsNormAddRmsNorm p{};
  p.x_dtype = check_rows(op, x);
  check_columns(op, "x", x);
  check_eps(op, eps);
  check_eps(op, pre_eps, "pre_eps");
  check_not_nan(op, "weight_offset", weight_offset);
  check_like(op, "residual", residual, x);
  const OptionalTensor post = check_vector(op, "post_weight", post_weight, x);
  const OptionalTensor pre = check_vector(op, "pre_weight", pre_weight, x);
  read_vector(p.post_weight, p.post_weight_dtype, post, p.x_dtype);
  read_vector(p.pre_weight, p.pre_weight_dtype, pre, p.x_dtype);
  p.rows = rows_in(x);
  p.dim = columns_in(x);
  p.eps = static_cast<float>(eps);
  p.pre_eps = static_cast<float>(pre_eps);
  p.weight_offset = static_cast<float>(weight_offset);
  p.cast_before_weight = cast_before_weight;

  const Tensor out = empty_like(x, x.scalar_type());
  const Tensor new_residual = empty_like(x, x.scalar_type());
  OptionalTensor statistics;
  if (kForGradient) {
    statistics = empty_floats({p.rows, 2}, x);
    p.statistics = static_cast<float*>(statistics->mutable_data_ptr());
  }
  if (!is_nothing(x, p.rows, p.dim)) {
    const auto x_rows = read_rows(p.x, p.x_stride, x);
    const auto residual_rows = read_rows(p.residual, p.residual_stride, residual);
    p.out = out.mutable_data_ptr();
    p.new_residual = new_residual.mutable_data_ptr();
    launch<cpu::rms_norm_add_rms_norm, gpu::rms_norm_add_rms_norm>(op, x, p, p.rows, p.dim);
  }
  return returned<kForGradient>(out, new_residual, statistics);
}

// Of rms_norm and fused_add_rms_norm: (grad_x, grad_weight), either of them empty where not needed.
std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad_out,
                                        const OptionalTensor& grad_new_residual, const Tensor& x,
                                        const OptionalTensor& weight, const Tensor& rstd,
                                        double weight_offset, bool needs_grad_x,
                                        bool needs_grad_weight) {
  const char* op = "rms_norm_bwd";
  RmsNormBackward p{};
  p.x_dtype = check_rows(op, x);
  check_columns(op, "x", x);
  check_same_device(op, "grad_out", grad_out, x);
  check_same_shape(op, "grad_out", grad_out, x);
  p.out_dtype = check_dtype(op, "grad_out", grad_out);
  check_out_dtype(op, grad_out.scalar_type(), p.x_dtype);
  const OptionalTensor checked_weight = check_vector(op, "weight", weight, x);
  check_like(op, "grad_new_residual", grad_new_residual, x);
  p.rows = rows_in(x);
  p.dim = columns_in(x);
  check_saved(op, "rstd", rstd, p.rows, x, "x", "float32 [", p.rows, "]");

  Gradient grad_x = gradient_of(x, needs_grad_x);
  Gradient grad_weight = gradient_of(checked_weight, needs_grad_weight, x);
  if (is_nothing(x, p.rows, p.dim)) {
    grad_weight.zero();
    return {grad_x.tensor, grad_weight.tensor};
  }
  const auto grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  const auto x_rows = read_rows(p.x, p.x_stride, x);
  const auto grad_new_residual_rows =
      read_rows(p.grad_new_residual, p.grad_new_residual_stride, grad_new_residual);
  read_vector(p.weight, p.weight_dtype, checked_weight, p.x_dtype);
  p.rstd = static_cast<const float*>(rstd.const_data_ptr());
  p.rstd_stride = 1;
  p.weight_offset = static_cast<float>(weight_offset);
  p.grad_x = grad_x.data();
  p.grad_weight = grad_weight.data();

  OptionalTensor partials;
  const auto make_partials = [&](int64_t count) {
    p.partial_count = count;
    p.partials = scratch(partials, grad_weight.needed ? count * p.dim : 0, x);
  };
  launch(
      op, x,
      [&] {
        make_partials(cpu::rms_norm_backward_chunks(p.rows, p.dim));
        on_threads<cpu::rms_norm_backward>(p, p.partial_count, p.rows / p.partial_count * p.dim);
        if (grad_weight.needed)
          on_threads<cpu::rms_norm_backward_weight>(p, p.dim, p.partial_count);
      },
      [&](int32_t device, void* stream) {
        make_partials(gpu::rms_norm_backward_partials(p, device));
        return gpu::rms_norm_backward(p, device, stream);
      });
  return {grad_x.tensor, grad_weight.tensor};
}

// (grad_x, grad_residual, grad_post_weight, grad_pre_weight), each empty where not needed.
std::tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_add_rms_norm_bwd(
    const Tensor& grad_out, const OptionalTensor& grad_new_residual, const Tensor& x,
    const Tensor& new_residual, const OptionalTensor& post_weight, const OptionalTensor& pre_weight,
    const Tensor& statistics, double weight_offset, bool needs_grad_x, bool needs_grad_residual,
    bool needs_grad_post_weight, bool needs_grad_pre_weight) {
  const char* op = "rms_norm_add_rms_norm_bwd";
  RmsNormAddRmsNormBackward p{};
  p.dtype = check_rows(op, x);
  check_columns(op, "x", x);
  check_like(op, "grad_out", grad_out, x);
  check_like(op, "grad_new_residual", grad_new_residual, x);
  check_like(op, "new_residual", new_residual, x);
  const OptionalTensor post = check_vector(op, "post_weight", post_weight, x);
  const OptionalTensor pre = check_vector(op, "pre_weight", pre_weight, x);
  p.rows = rows_in(x);
  p.dim = columns_in(x);
  check_saved(op, "statistics", statistics, p.rows * 2, x, "x", "float32 [", p.rows, ", 2]");

  Gradient grad_x = gradient_of(x, needs_grad_x);
  Gradient grad_residual = gradient_of(x, needs_grad_residual);
  Gradient grad_post = gradient_of(post, needs_grad_post_weight, x);
  Gradient grad_pre = gradient_of(pre, needs_grad_pre_weight, x);
  const auto results = [&] {
    return std::tuple(grad_x.tensor, grad_residual.tensor, grad_post.tensor, grad_pre.tensor);
  };
  if (is_nothing(x, p.rows, p.dim)) {
    grad_post.zero();
    grad_pre.zero();
    return results();
  }
  const auto grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  const auto grad_new_residual_rows =
      read_rows(p.grad_new_residual, p.grad_new_residual_stride, grad_new_residual);
  const auto new_residual_rows = read_rows(p.new_residual, p.new_residual_stride, new_residual);
  const auto x_rows = read_rows(p.x, p.x_stride, x);
  read_vector(p.post_weight, p.post_weight_dtype, post, p.dtype);
  read_vector(p.pre_weight, p.pre_weight_dtype, pre, p.dtype);
  p.statistics = static_cast<const float*>(statistics.const_data_ptr());
  p.weight_offset = static_cast<float>(weight_offset);
  p.grad_x = grad_x.data();
  p.grad_residual = grad_residual.data();
  p.grad_post_weight = grad_post.data();
  p.grad_pre_weight = grad_pre.data();

  OptionalTensor workspace, sum;
  const auto make_grad_residual = [&] {  // in two passes the first norm reads it
    sum = empty_like(x, x.scalar_type());
    p.grad_residual = sum->mutable_data_ptr();
  };
  launch(
      op, x,
      [&] {
        if (!grad_residual.needed) make_grad_residual();
        p.chunks = cpu::rms_norm_backward_chunks(p.rows, p.dim);
        const int64_t partials = p.chunks * rms_norm_add_rms_norm_weight_gradients(p);
        p.workspace = scratch(workspace, partials * p.dim, x);
        on_threads<cpu::rms_norm_add_rms_norm_backward>(p, p.chunks, p.rows / p.chunks * p.dim);
        if (partials > 0)
          on_threads<cpu::rms_norm_add_rms_norm_backward_weights>(p, p.dim, partials);
      },
      [&](int32_t device, void* stream) {
        if (!grad_residual.needed && !gpu::rms_norm_add_rms_norm_backward_in_one_pass(p, device))
          make_grad_residual();
        p.workspace =
            scratch(workspace, gpu::rms_norm_add_rms_norm_backward_workspace(p, device), x);
        return gpu::rms_norm_add_rms_norm_backward(p, device, stream);
      });
  return results();
}

}  // namespace

void register_norm_ops(const Ops& ops) {
  ops.forward("rms_norm",
              "Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight, "
              "ScalarType? out_dtype",
              "Tensor out", "Tensor rstd", TORCH_BOX(&rms_norm<false>), TORCH_BOX(&rms_norm<true>));
  ops.op(
      "rms_norm_bwd(Tensor grad_out, Tensor? grad_new_residual, Tensor x, Tensor? weight, Tensor "
      "rstd, float weight_offset, bool needs_grad_x, bool needs_grad_weight) -> (Tensor grad_x, "
      "Tensor grad_weight)",
      TORCH_BOX(&rms_norm_bwd));
  ops.forward("fused_add_rms_norm",
              "Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, bool "
              "cast_before_weight, ScalarType? out_dtype",
              "Tensor out, Tensor new_residual", "Tensor rstd",
              TORCH_BOX(&fused_add_rms_norm<false>), TORCH_BOX(&fused_add_rms_norm<true>));
  ops.forward(
      "rms_norm_add_rms_norm",
      "Tensor x, Tensor residual, Tensor? post_weight, Tensor? pre_weight, float eps, float "
      "pre_eps, float weight_offset, bool cast_before_weight",
      "Tensor out, Tensor new_residual", "Tensor statistics",
      TORCH_BOX(&rms_norm_add_rms_norm<false>), TORCH_BOX(&rms_norm_add_rms_norm<true>));
  ops.op(
      "rms_norm_add_rms_norm_bwd(Tensor grad_out, Tensor? grad_new_residual, Tensor x, Tensor "
      "new_residual, Tensor? post_weight, Tensor? pre_weight, Tensor statistics, float "
      "weight_offset, bool needs_grad_x, bool needs_grad_residual, bool needs_grad_post_weight, "
      "bool needs_grad_pre_weight) -> (Tensor grad_x, Tensor grad_residual, Tensor "
      "grad_post_weight, Tensor grad_pre_weight)",
      TORCH_BOX(&rms_norm_add_rms_norm_bwd));
  ops.op(
      "rms_norm_quant(Tensor x, Tensor? weight, float eps, float weight_offset, bool "
      "cast_before_weight, " FUSELAGE_QUANT_OPTIONS FUSELAGE_QUANT_RESULTS ")",
      TORCH_BOX(&rms_norm_quant));
  ops.op(
      "fused_add_rms_norm_quant(Tensor x, Tensor residual, Tensor? weight, float eps, float "
      "weight_offset, bool cast_before_weight, " FUSELAGE_QUANT_OPTIONS FUSELAGE_QUANT_RESULTS
      ", Tensor new_residual)",
      TORCH_BOX(&fused_add_rms_norm_quant));
  ops.op(
      "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps, float "
      "weight_offset, bool cast_before_weight) -> ()",
      TORCH_BOX(&fused_add_rms_norm_));
}

}  // namespace fuselage::binding
