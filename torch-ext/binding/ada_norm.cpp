#include "ada_norm.h"

#include "cpu/ada_norm.h"
#include "norm/ada_norm.h"

namespace fuselage::binding {
namespace {

const OptionalTensor kNone = std::nullopt;

// What an op is given, as it was called.
struct Arguments {
  const char* op;
  const Tensor& x;  // in a backward, what was normalised
  const OptionalTensor& gate;
  const OptionalTensor& scale;
  const OptionalTensor& shift;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  bool layer;
  const char* x_name = "x";
};

// A gate, scale or shift, checked.
struct Modulated {
  Modulation values{};
  bool by_row = false;      // every row of x has its own
  int64_t rows;             // of x that share one
  OptionalTensor holder{};  // keeps a contiguous copy alive
};

Modulated check_modulation(const Arguments& a, const char* name, const OptionalTensor& tensor,
                           DType x_dtype, int64_t rows) {
  Modulated result;
  result.rows = rows;
  if (!tensor.has_value()) return result;
  const Tensor &t = *tensor, &x = a.x;
  check_same_device(a.op, name, t, x, a.x_name);
  const DType dtype = check_dtype(a.op, name, t);
  const int64_t t_dims = t.dim(), x_dims = x.dim(), dim = x.size(x_dims - 1);
  bool one = t_dims >= 1 && t_dims <= x_dims && t.size(t_dims - 1) == dim;
  bool same = one && t_dims == x_dims;
  // One for each batch element: the first dimension of x, and then none or ones.
  bool batch = one && x_dims > 2 && (t_dims == 2 || t_dims == x_dims) && t.size(0) == x.size(0);
  for (int64_t i = 0; i + 1 < t_dims; ++i) {
    one = one && t.size(i) == 1;
    same = same && t.size(i) == x.size(i);
    batch = batch && (i == 0 || t.size(i) == 1);
  }
  FUSELAGE_CHECK(a.op, one || same || batch, "`", name, "` must have shape [", dim,
                 "], one for each batch element, or that of `", a.x_name, "` ", shape_of(x),
                 ", got ", shape_of(t));
  check_like_or_float32(a.op, name, dtype, x_dtype, a.x_name);
  const Rows t_rows = rows_of(t);
  result.holder = t_rows.tensor;
  result.values = {t_rows.data(), t_rows.stride, 1, dtype};
  if (one) {
    result.values.stride = 0;
  } else {
    result.rows = same || rows == 0 ? 1 : rows / x.size(0);
    result.values.rows = result.rows;
    result.by_row = result.rows == 1;
  }
  return result;
}

NormVector vector_of(const OptionalTensor& tensor, DType x_dtype) {
  if (!tensor.has_value()) return {nullptr, x_dtype};
  return {tensor->const_data_ptr(), *dtype_from(tensor->scalar_type())};
}

// The arguments that all ops have, checked.
struct Checked {
  DType dtype;
  int64_t rows, dim;
  Modulated gate, scale, shift;
  OptionalTensor weight, bias;
};

Checked check(const Arguments& a) {
  FUSELAGE_CHECK(a.op, a.x.dim() >= 1, "`", a.x_name,
                 "` must have at least one dimension, got a scalar");
  Checked c{};
  c.dtype = check_dtype(a.op, a.x_name, a.x);
  c.dim = a.x.size(a.x.dim() - 1);
  check_columns(a.op, a.x_name, a.x);
  c.rows = rows_in(a.x);
  c.gate = check_modulation(a, "gate", a.gate, c.dtype, c.rows);
  c.scale = check_modulation(a, "scale", a.scale, c.dtype, c.rows);
  c.shift = check_modulation(a, "shift", a.shift, c.dtype, c.rows);
  if (a.scale.has_value() && a.shift.has_value())
    check_same_shape(a.op, "shift", *a.shift, *a.scale, "scale");
  c.weight = check_vector(a.op, "weight", a.weight, a.x, a.x_name);
  FUSELAGE_CHECK(a.op, a.layer || !a.bias.has_value(), "`bias` must be None with norm=\"rms\"");
  c.bias = check_vector(a.op, "bias", a.bias, a.x, a.x_name);
  return c;
}

struct Results {
  std::optional<Tensor> out, new_residual, statistics;
};

Results run_forward(const Arguments& a, const Tensor* residual, double eps, bool for_gradient) {
  const Checked c = check(a);
  if (residual != nullptr) check_like(a.op, "residual", *residual, a.x, a.x_name);
  check_eps(a.op, eps);
  Results results;
  results.out = empty_like(a.x, a.x.scalar_type());
  if (residual != nullptr) results.new_residual = empty_like(a.x, a.x.scalar_type());
  if (for_gradient) {
    const int64_t sizes[2] = {c.rows, 2};
    results.statistics = empty(sizes, a.layer ? 2 : 1, ScalarType::Float, a.x);
  }
  if (c.rows == 0 || c.dim == 0 || is_meta(a.x)) return results;

  AdaNormForward p{};
  const Rows x_rows = rows_of(a.x);
  p.x = x_rows.data();
  p.x_stride = x_rows.stride;
  std::optional<Rows> residual_rows;
  if (residual != nullptr) {
    residual_rows = rows_of(*residual);
    p.residual = residual_rows->data();
    p.residual_stride = residual_rows->stride;
    p.new_residual = results.new_residual->mutable_data_ptr();
  }
  p.out = results.out->mutable_data_ptr();
  if (for_gradient) p.statistics = static_cast<float*>(results.statistics->mutable_data_ptr());
  p.gate = c.gate.values;
  p.scale = c.scale.values;
  p.shift = c.shift.values;
  p.weight = vector_of(c.weight, c.dtype);
  p.bias = vector_of(c.bias, c.dtype);
  p.rows = c.rows;
  p.dim = c.dim;
  p.eps = static_cast<float>(eps);
  p.layer = a.layer;
  p.dtype = c.dtype;
  if (a.x.is_cpu()) {
    torch::stable::parallel_for(0, p.rows, tasks_of(p.dim), [&](int64_t begin, int64_t end) {
      cpu::ada_norm_forward(p, begin, end);
    });
    return results;
  }
#if defined(FUSELAGE_GPU)
  const int32_t device = a.x.get_device_index();
  const OnDevice on_device(device);
  const char* error = gpu::ada_norm_forward(p, device, on_device.stream());
  FUSELAGE_CHECK(a.op, error == nullptr, error);
#endif
  return results;
}

struct Needs {
  bool x, residual, gate, scale, shift, weight, bias;
};

struct Gradients {
  Tensor x, residual, gate, scale, shift, weight, bias;
};

// a.x is what was normalised; `x` what the gate was multiplied with.
Gradients run_backward(const Arguments& a, const Tensor& grad_out,
                       const OptionalTensor& grad_new_residual, const OptionalTensor& x,
                       const Tensor& statistics, Needs needs) {
  const Checked c = check(a);
  check_like(a.op, "grad_out", grad_out, a.x, a.x_name);
  if (grad_new_residual.has_value())
    check_like(a.op, "grad_new_residual", *grad_new_residual, a.x, a.x_name);
  const int64_t values = c.rows * (a.layer ? 2 : 1);
  check_same_device(a.op, "statistics", statistics, a.x, a.x_name);
  FUSELAGE_CHECK(a.op,
                 statistics.numel() == values && statistics.is_contiguous() &&
                     statistics.scalar_type() == ScalarType::Float,
                 "`statistics` must be the ", values,
                 " float32 values that the forward returned, got ", shape_of(statistics));
  needs.gate = needs.gate && a.gate.has_value();
  needs.scale = needs.scale && a.scale.has_value();
  needs.shift = needs.shift && a.shift.has_value();
  needs.weight = needs.weight && a.weight.has_value();
  needs.bias = needs.bias && a.bias.has_value();
  if (needs.gate) {
    FUSELAGE_CHECK(a.op, x.has_value(), "`x` must be given where the gradient of `gate` is needed");
    check_like(a.op, "x", *x, a.x, a.x_name);
  }

  const auto grad_of = [&](bool needed, const Tensor* like) {
    return needed ? empty_like(*like, like->scalar_type()) : no_tensor(a.x);
  };
  const auto pointer = [](const OptionalTensor& tensor) {
    return tensor.has_value() ? &*tensor : nullptr;
  };
  Gradients grads{grad_of(needs.x, &a.x),
                  grad_of(needs.residual, &a.x),
                  grad_of(needs.gate, pointer(a.gate)),
                  grad_of(needs.scale, pointer(a.scale)),
                  grad_of(needs.shift, pointer(a.shift)),
                  grad_of(needs.weight, pointer(a.weight)),
                  grad_of(needs.bias, pointer(a.bias))};
  if (c.rows == 0 || c.dim == 0 || is_meta(a.x)) {
    if (needs.gate) torch::stable::zero_(grads.gate);
    if (needs.scale) torch::stable::zero_(grads.scale);
    if (needs.shift) torch::stable::zero_(grads.shift);
    if (needs.weight) torch::stable::zero_(grads.weight);
    if (needs.bias) torch::stable::zero_(grads.bias);
    return grads;
  }

  AdaNormBackward p{};
  const auto data_of = [](bool needed, const Tensor& grad) {
    return needed ? grad.mutable_data_ptr() : nullptr;
  };
  p.grad_x = data_of(needs.x, grads.x);
  p.grad_residual = data_of(needs.residual, grads.residual);
  p.grad_gate = data_of(needs.gate, grads.gate);
  p.grad_scale = data_of(needs.scale, grads.scale);
  p.grad_shift = data_of(needs.shift, grads.shift);
  p.grad_weight = data_of(needs.weight, grads.weight);
  p.grad_bias = data_of(needs.bias, grads.bias);

  const Rows grad_out_rows = rows_of(grad_out);
  const Rows s_rows = rows_of(a.x);
  std::optional<Rows> grad_new_residual_rows, x_rows;
  p.grad_out = grad_out_rows.data();
  p.grad_out_stride = grad_out_rows.stride;
  p.s = s_rows.data();
  p.s_stride = s_rows.stride;
  if (grad_new_residual.has_value()) {
    grad_new_residual_rows = rows_of(*grad_new_residual);
    p.grad_new_residual = grad_new_residual_rows->data();
    p.grad_new_residual_stride = grad_new_residual_rows->stride;
  }
  if (needs.gate) {
    x_rows = rows_of(*x);
    p.x = x_rows->data();
    p.x_stride = x_rows->stride;
  }
  p.statistics = static_cast<const float*>(statistics.const_data_ptr());
  p.rows = p.group_rows = c.rows;
  p.dim = c.dim;
  p.gate = c.gate.values;
  p.gate_rows = c.gate.rows;
  p.gate_by_row = c.gate.by_row;
  p.scale = c.scale.values;
  const Modulated& modulated = a.scale.has_value() ? c.scale : c.shift;
  p.scale_rows = modulated.rows;
  p.scale_by_row = modulated.by_row;
  p.shift_dtype = c.shift.values.dtype;
  // Where something is the same for a batch element alone, that is what is summed up.
  for (const Modulated* m : {&c.gate, &modulated}) {
    if (!m->by_row) p.group_rows = std::min(p.group_rows, m->rows);
  }
  p.weight = vector_of(c.weight, c.dtype);
  p.bias = vector_of(c.bias, c.dtype);
  p.bias_dtype = p.bias.dtype;
  p.layer = a.layer;
  p.dtype = c.dtype;
  ada_norm_choose_sums(p);

  const auto with_workspace = [&](int64_t floats) {
    OptionalTensor workspace;
    if (floats > 0) {
      workspace = empty(&floats, 1, ScalarType::Float, a.x);
      p.partials = static_cast<float*>(workspace->mutable_data_ptr());
    }
    return workspace;
  };
  if (a.x.is_cpu()) {
    p.blocks_per_group = cpu::ada_norm_backward_chunks(p.rows, p.group_rows);
    const int64_t chunks = p.rows / p.group_rows * p.blocks_per_group;
    const int64_t sums = p.partial_rows;
    const OptionalTensor workspace = with_workspace(chunks * sums * p.dim);
    torch::stable::parallel_for(
        0, chunks, tasks_of(p.group_rows / p.blocks_per_group * p.dim),
        [&](int64_t begin, int64_t end) { cpu::ada_norm_backward(p, begin, end); });
    if (sums > 0) {
      torch::stable::parallel_for(
          0, p.dim, tasks_of(chunks * sums),
          [&](int64_t begin, int64_t end) { cpu::ada_norm_backward_sums(p, begin, end); });
    }
    return grads;
  }
#if defined(FUSELAGE_GPU)
  const int32_t device = a.x.get_device_index();
  const OnDevice on_device(device);
  const OptionalTensor workspace = with_workspace(gpu::ada_norm_backward_workspace(p, device));
  const char* error = gpu::ada_norm_backward(p, device, on_device.stream());
  FUSELAGE_CHECK(a.op, error == nullptr, error);
#endif
  return grads;
}

Arguments layer_norm_arguments(const char* op, const Tensor& x, const OptionalTensor& weight,
                               const OptionalTensor& bias) {
  return {op, x, kNone, kNone, kNone, weight, bias, true};
}

Arguments ada_norm_arguments(const char* op, const Tensor& x, const OptionalTensor& scale,
                             const OptionalTensor& shift, const OptionalTensor& weight,
                             const OptionalTensor& bias, bool layer) {
  return {op, x, kNone, scale, shift, weight, bias, layer};
}

const char* ada_norm_name(bool layer) { return layer ? "ada_layer_norm" : "ada_rms_norm"; }

}  // namespace

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps) {
  return *run_forward(layer_norm_arguments("layer_norm", x, weight, bias), nullptr, eps, false).out;
}

std::tuple<Tensor, Tensor> layer_norm_fwd(const Tensor& x, const OptionalTensor& weight,
                                          const OptionalTensor& bias, double eps) {
  const Results results =
      run_forward(layer_norm_arguments("layer_norm", x, weight, bias), nullptr, eps, true);
  return {*results.out, *results.statistics};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_out, const Tensor& x,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias,
                                                  const Tensor& statistics, bool needs_grad_x,
                                                  bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients grads = run_backward(
      layer_norm_arguments("layer_norm_bwd", x, weight, bias), grad_out, kNone, kNone, statistics,
      {needs_grad_x, false, false, false, false, needs_grad_weight, needs_grad_bias});
  return {grads.x, grads.weight, grads.bias};
}

Tensor ada_norm(const Tensor& x, const OptionalTensor& scale, const OptionalTensor& shift,
                const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool layer) {
  const char* op = ada_norm_name(layer);
  return *run_forward(ada_norm_arguments(op, x, scale, shift, weight, bias, layer), nullptr, eps,
                      false)
              .out;
}

std::tuple<Tensor, Tensor> ada_norm_fwd(const Tensor& x, const OptionalTensor& scale,
                                        const OptionalTensor& shift, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps, bool layer) {
  const char* op = ada_norm_name(layer);
  const Results results =
      run_forward(ada_norm_arguments(op, x, scale, shift, weight, bias, layer), nullptr, eps, true);
  return {*results.out, *results.statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> ada_norm_bwd(
    const Tensor& grad_out, const Tensor& x, const OptionalTensor& scale,
    const OptionalTensor& shift, const OptionalTensor& weight, const OptionalTensor& bias,
    const Tensor& statistics, bool layer, bool needs_grad_x, bool needs_grad_scale,
    bool needs_grad_shift, bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients grads =
      run_backward(ada_norm_arguments("ada_norm_bwd", x, scale, shift, weight, bias, layer),
                   grad_out, kNone, kNone, statistics,
                   {needs_grad_x, false, false, needs_grad_scale, needs_grad_shift,
                    needs_grad_weight, needs_grad_bias});
  return {grads.x, grads.scale, grads.shift, grads.weight, grads.bias};
}

std::tuple<Tensor, Tensor> gate_residual_ada_norm(
    const Tensor& x, const Tensor& residual, const OptionalTensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool layer) {
  const Arguments a{"gate_residual_ada_norm", x, gate, scale, shift, weight, bias, layer};
  const Results results = run_forward(a, &residual, eps, false);
  return {*results.out, *results.new_residual};
}

std::tuple<Tensor, Tensor, Tensor> gate_residual_ada_norm_fwd(
    const Tensor& x, const Tensor& residual, const OptionalTensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool layer) {
  const Arguments a{"gate_residual_ada_norm", x, gate, scale, shift, weight, bias, layer};
  const Results results = run_forward(a, &residual, eps, true);
  return {*results.out, *results.new_residual, *results.statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gate_residual_ada_norm_bwd(
    const Tensor& grad_out, const OptionalTensor& grad_new_residual, const Tensor& new_residual,
    const OptionalTensor& x, const OptionalTensor& gate, const OptionalTensor& scale,
    const OptionalTensor& shift, const OptionalTensor& weight, const OptionalTensor& bias,
    const Tensor& statistics, bool layer, bool needs_grad_x, bool needs_grad_residual,
    bool needs_grad_gate, bool needs_grad_scale, bool needs_grad_shift, bool needs_grad_weight,
    bool needs_grad_bias) {
  const Arguments a{"gate_residual_ada_norm_bwd",
                    new_residual,
                    gate,
                    scale,
                    shift,
                    weight,
                    bias,
                    layer,
                    "new_residual"};
  const Gradients grads =
      run_backward(a, grad_out, grad_new_residual, x, statistics,
                   {needs_grad_x, needs_grad_residual, needs_grad_gate, needs_grad_scale,
                    needs_grad_shift, needs_grad_weight, needs_grad_bias});
  return {grads.x, grads.residual, grads.gate, grads.scale, grads.shift, grads.weight, grads.bias};
}

}  // namespace fuselage::binding
