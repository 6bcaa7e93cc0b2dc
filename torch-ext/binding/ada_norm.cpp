// Bindings of layer_norm and the adaptive norms. The formulas are in norm/ada_norm.h. `layer`: take
// the mean away.
#include "binding.h"
#include "quantised.h"

#include "norm/ada_norm.h"
#include "norm/ada_norm_cpu.h"

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
  bool by_row = false;           // every row of x has its own
  int64_t rows;                  // of x that share one
  std::optional<Rows> source{};  // keeps a contiguous copy alive
};

Modulated check_modulation(const Arguments& a, const char* name, const OptionalTensor& tensor,
                           DType x_dtype, int64_t rows) {
  Modulated result;
  result.rows = rows;
  if (!tensor.has_value()) return result;
  const Tensor &t = *tensor, &x = a.x;
  check_same_device(a.op, name, t, x, a.x_name);
  const DType dtype = check_dtype(a.op, name, t);
  const int64_t t_dims = t.dim(), x_dims = x.dim(), dim = columns_in(x);
  bool one = t_dims >= 1 && t_dims <= x_dims && columns_in(t) == dim;
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
  result.values.rows = 1;
  result.values.dtype = dtype;
  result.source = read_rows(result.values.data, result.values.stride, t);
  if (one) {
    result.values.stride = 0;
  } else {
    result.rows = same || rows == 0 ? 1 : rows / x.size(0);
    result.values.rows = result.rows;
    result.by_row = result.rows == 1;
  }
  return result;
}

// The arguments that all ops have, checked.
struct Checked {
  DType dtype;
  int64_t rows, dim;
  Modulated gate, scale, shift;
  OptionalTensor weight, bias;

  bool is_nothing(const Arguments& a) const { return binding::is_nothing(a.x, rows, dim); }

  template <typename Params>
  void fill(const Arguments& a, Params& p) const {
    p.gate = gate.values;
    p.scale = scale.values;
    read_vector(p.weight.data, p.weight.dtype, weight, dtype);
    read_vector(p.bias.data, p.bias.dtype, bias, dtype);
    p.rows = rows;
    p.dim = dim;
    p.layer = a.layer;
    p.dtype = dtype;
  }
};

Checked check(const Arguments& a) {
  Checked c{};
  c.dtype = check_rows(a.op, a.x, a.x_name);
  c.rows = rows_in(a.x);
  c.dim = columns_in(a.x);
  check_columns(a.op, a.x_name, a.x);
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
  Tensor out;
  OptionalTensor new_residual, statistics;
};

Checked check_forward(const Arguments& a, const OptionalTensor& residual, double eps) {
  const Checked c = check(a);
  check_like(a.op, "residual", residual, a.x, a.x_name);
  check_eps(a.op, eps);
  return c;
}

// `strides`: of out and new_residual.
void run(const Arguments& a, const Checked& c, const OptionalTensor& residual, double eps,
         const Results& results, const std::pair<int64_t, int64_t>& strides) {
  if (c.is_nothing(a)) return;
  AdaNormForward p{};
  c.fill(a, p);
  const auto x_rows = read_rows(p.x, p.x_stride, a.x);
  const auto residual_rows = read_rows(p.residual, p.residual_stride, residual);
  p.shift = c.shift.values;
  p.eps = static_cast<float>(eps);
  p.out = results.out.mutable_data_ptr();
  if (residual.has_value()) p.new_residual = results.new_residual->mutable_data_ptr();
  if (results.statistics.has_value())
    p.statistics = static_cast<float*>(results.statistics->mutable_data_ptr());
  std::tie(p.out_stride, p.new_residual_stride) = strides;
  launch<cpu::ada_norm_forward, gpu::ada_norm_forward>(a.op, a.x, p, p.rows, p.dim);
}

Results run_forward(const Arguments& a, const OptionalTensor& residual, double eps,
                    bool for_gradient) {
  const Checked c = check_forward(a, residual, eps);
  Results results{empty_like(a.x, a.x.scalar_type()), {}, {}};
  if (residual.has_value()) results.new_residual = empty_like(a.x, a.x.scalar_type());
  if (for_gradient)
    results.statistics = a.layer ? empty_floats({c.rows, 2}, a.x) : empty_floats({c.rows}, a.x);
  run(a, c, residual, eps, results, {c.dim, c.dim});
  return results;
}

struct Needs {
  bool x, residual, gate, scale, shift, weight, bias;
};

struct Gradients {
  Gradient x, residual, gate, scale, shift, weight, bias;
};

// a.x is what was normalised; `x` what the gate was multiplied with.
Gradients run_backward(const Arguments& a, const Tensor& grad_out,
                       const OptionalTensor& grad_new_residual, const OptionalTensor& x,
                       const Tensor& statistics, const Needs& needs) {
  const Checked c = check(a);
  check_like(a.op, "grad_out", grad_out, a.x, a.x_name);
  check_like(a.op, "grad_new_residual", grad_new_residual, a.x, a.x_name);
  const int64_t values = c.rows * (a.layer ? 2 : 1);
  check_saved(a.op, "statistics", statistics, values, a.x, a.x_name, values, " float32 values");
  if (needs.gate && a.gate.has_value()) {
    FUSELAGE_CHECK(a.op, x.has_value(), "`x` must be given where the gradient of `gate` is needed");
    check_like(a.op, "x", x, a.x, a.x_name);
  }
  Gradients grads{gradient_of(a.x, needs.x),
                  gradient_of(a.x, needs.residual),
                  gradient_of(a.gate, needs.gate, a.x),
                  gradient_of(a.scale, needs.scale, a.x),
                  gradient_of(a.shift, needs.shift, a.x),
                  gradient_of(a.weight, needs.weight, a.x),
                  gradient_of(a.bias, needs.bias, a.x)};
  if (c.is_nothing(a)) {
    for (Gradient* sum : {&grads.gate, &grads.scale, &grads.shift, &grads.weight, &grads.bias})
      sum->zero();
    return grads;
  }

  AdaNormBackward p{};
  c.fill(a, p);
  p.grad_x = grads.x.data();
  p.grad_residual = grads.residual.data();
  p.grad_gate = grads.gate.data();
  p.grad_scale = grads.scale.data();
  p.grad_shift = grads.shift.data();
  p.grad_weight = grads.weight.data();
  p.grad_bias = grads.bias.data();
  const auto grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  const auto grad_new_residual_rows =
      read_rows(p.grad_new_residual, p.grad_new_residual_stride, grad_new_residual);
  const auto s_rows = read_rows(p.s, p.s_stride, a.x);
  std::optional<Rows> x_rows;
  if (grads.gate.needed) x_rows = read_rows(p.x, p.x_stride, x);
  p.statistics = static_cast<const float*>(statistics.const_data_ptr());
  p.group_rows = c.rows;
  p.gate_rows = c.gate.rows;
  p.gate_by_row = c.gate.by_row;
  const Modulated& modulated = a.scale.has_value() ? c.scale : c.shift;
  p.scale_rows = modulated.rows;
  p.scale_by_row = modulated.by_row;
  p.shift_dtype = c.shift.values.dtype;
  // Where something is the same for a batch element alone, that is what is summed up.
  for (const Modulated* m : {&c.gate, &modulated}) {
    if (!m->by_row) p.group_rows = std::min(p.group_rows, m->rows);
  }
  p.bias_dtype = p.bias.dtype;
  ada_norm_choose_sums(p);

  OptionalTensor workspace;
  launch(
      a.op, a.x,
      [&] {
        p.blocks_per_group = cpu::ada_norm_backward_chunks(p.rows, p.group_rows);
        const int64_t chunks = p.rows / p.group_rows * p.blocks_per_group;
        const int64_t sums = chunks * p.partial_rows;
        p.partials = scratch(workspace, sums * p.dim, a.x);
        on_threads<cpu::ada_norm_backward>(p, chunks, p.group_rows / p.blocks_per_group * p.dim);
        if (sums > 0) on_threads<cpu::ada_norm_backward_sums>(p, p.dim, sums);
      },
      [&](int32_t device, void* stream) {
        p.partials = scratch(workspace, gpu::ada_norm_backward_workspace(p, device), a.x);
        return gpu::ada_norm_backward(p, device, stream);
      });
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

template <bool kForGradient>
auto layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                double eps) {
  const Arguments a = layer_norm_arguments("layer_norm", x, weight, bias);
  const Results results = run_forward(a, kNone, eps, kForGradient);
  return returned<kForGradient>(results.out, results.statistics);
}

// (grad_x, grad_weight, grad_bias), each empty where not needed. Of `bias` only the dtype counts.
std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_out, const Tensor& x,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias,
                                                  const Tensor& statistics, bool needs_grad_x,
                                                  bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients grads = run_backward(
      layer_norm_arguments("layer_norm_bwd", x, weight, bias), grad_out, kNone, kNone, statistics,
      {needs_grad_x, false, false, false, false, needs_grad_weight, needs_grad_bias});
  return {grads.x.tensor, grads.weight.tensor, grads.bias.tensor};
}

// The gradient is that of gate_residual_ada_norm.
template <bool kForGradient>
auto fused_add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                          const OptionalTensor& bias, double eps) {
  const Arguments a = layer_norm_arguments("fused_add_layer_norm", x, weight, bias);
  const Results results = run_forward(a, residual, eps, kForGradient);
  return returned<kForGradient>(results.out, results.new_residual, results.statistics);
}

// Writes out over x, and new_residual over residual.
void fused_add_layer_norm_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
  const Arguments a = layer_norm_arguments("fused_add_layer_norm_", x, weight, bias);
  const Checked c = check_forward(a, residual, eps);
  const auto strides = check_written_sum(a.op, "fused_add_layer_norm", x, residual,
                                         {{"weight", &c.weight}, {"bias", &c.bias}});
  run(a, c, residual, eps, {x, residual, {}}, strides);
}

template <bool kForGradient>
auto ada_norm(const Tensor& x, const OptionalTensor& scale, const OptionalTensor& shift,
              const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool layer) {
  const Arguments a =
      ada_norm_arguments(ada_norm_name(layer), x, scale, shift, weight, bias, layer);
  const Results results = run_forward(a, kNone, eps, kForGradient);
  return returned<kForGradient>(results.out, results.statistics);
}

// (grad_x, grad_scale, grad_shift, grad_weight, grad_bias), each empty where not needed. Of `shift`
// only shape and dtype count, and of `bias` only the dtype unless grad_scale is needed.
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
  return {grads.x.tensor, grads.scale.tensor, grads.shift.tensor, grads.weight.tensor,
          grads.bias.tensor};
}

void ada_norm_row(const AdaNormForward& p, int64_t row) { cpu::ada_norm_forward(p, row, row + 1); }

// (q, scale_of_q, out), the latter without elements unless it is asked for.
std::tuple<Tensor, Tensor, Tensor> run_quantised(const Arguments& a, double eps,
                                                 const QuantOptions& options, bool keeps_out) {
  const Checked c = check_forward(a, kNone, eps);
  Quantised<AdaNormForward> p{};
  const QuantResults quant = quant_results(a.op, a.x, c.dim, c.dtype, options, p.quant);
  const Tensor out = keeps_out ? empty_like(a.x, a.x.scalar_type()) : no_tensor(a.x);
  if (!c.is_nothing(a)) {
    c.fill(a, p);
    const auto x_rows = read_rows(p.x, p.x_stride, a.x);
    p.shift = c.shift.values;
    p.eps = static_cast<float>(eps);
    if (keeps_out) p.out = out.mutable_data_ptr();
    p.out_stride = c.dim;
    launch_quantised<&ada_norm_row, &gpu::ada_norm_forward, &gpu::ada_norm_quantises,
                     &gpu::ada_norm_quant>(a.op, a.x, p);
  }
  return {quant.q, quant.scale, out};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_quant(const Tensor& x, const OptionalTensor& weight,
                                                    const OptionalTensor& bias, double eps,
                                                    const OptionalTensor& scale, int64_t group_size,
                                                    bool scales_by_columns, bool scale_ue8m0,
                                                    bool return_unquantized, ScalarType dtype) {
  return run_quantised(layer_norm_arguments("layer_norm_quant", x, weight, bias), eps,
                       {scale, group_size, scales_by_columns, scale_ue8m0, dtype},
                       return_unquantized);
}

std::tuple<Tensor, Tensor, Tensor> ada_layer_norm_quant(
    const Tensor& x, const OptionalTensor& scale, const OptionalTensor& shift,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps,
    const OptionalTensor& quant_scale, int64_t group_size, bool scales_by_columns, bool scale_ue8m0,
    bool return_unquantized, ScalarType dtype) {
  return run_quantised(
      ada_norm_arguments("ada_layer_norm_quant", x, scale, shift, weight, bias, true), eps,
      {quant_scale, group_size, scales_by_columns, scale_ue8m0, dtype, "quant_scale"},
      return_unquantized);
}

template <bool kForGradient>
auto gate_residual_ada_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& gate,
                            const OptionalTensor& scale, const OptionalTensor& shift,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                            bool layer) {
  const Arguments a{"gate_residual_ada_norm", x, gate, scale, shift, weight, bias, layer};
  const Results results = run_forward(a, residual, eps, kForGradient);
  return returned<kForGradient>(results.out, results.new_residual, results.statistics);
}

// (grad_x, grad_residual, grad_gate, grad_scale, grad_shift, grad_weight, grad_bias), as
// ada_norm_bwd. `x` may be missing unless grad_gate is needed.
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
  return {grads.x.tensor,     grads.residual.tensor, grads.gate.tensor, grads.scale.tensor,
          grads.shift.tensor, grads.weight.tensor,   grads.bias.tensor};
}

}  // namespace

void register_ada_norm_ops(const Ops& ops) {
  ops.forward("layer_norm", "Tensor x, Tensor? weight, Tensor? bias, float eps", "Tensor out",
              "Tensor statistics", TORCH_BOX(&layer_norm<false>), TORCH_BOX(&layer_norm<true>));
  ops.op(
      "layer_norm_bwd(Tensor grad_out, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, "
      "bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, Tensor "
      "grad_weight, Tensor grad_bias)",
      TORCH_BOX(&layer_norm_bwd));
  ops.forward("fused_add_layer_norm",
              "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps",
              "Tensor out, Tensor new_residual", "Tensor statistics",
              TORCH_BOX(&fused_add_layer_norm<false>), TORCH_BOX(&fused_add_layer_norm<true>));
  ops.op(
      "fused_add_layer_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, Tensor? bias, "
      "float eps) -> ()",
      TORCH_BOX(&fused_add_layer_norm_));
  ops.forward(
      "ada_norm",
      "Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, bool layer",
      "Tensor out", "Tensor statistics", TORCH_BOX(&ada_norm<false>), TORCH_BOX(&ada_norm<true>));
  ops.op("layer_norm_quant(Tensor x, Tensor? weight, Tensor? bias, float eps, "  // and then
         FUSELAGE_QUANT_OPTIONS FUSELAGE_QUANT_RESULTS ")",
         TORCH_BOX(&layer_norm_quant));
  ops.op(
      "ada_layer_norm_quant(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, "
      "float eps, Tensor? quant_scale, " FUSELAGE_QUANT_SIZES FUSELAGE_QUANT_RESULTS ")",
      TORCH_BOX(&ada_layer_norm_quant));
  ops.op(
      "ada_norm_bwd(Tensor grad_out, Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, "
      "Tensor? bias, Tensor statistics, bool layer, bool needs_grad_x, bool needs_grad_scale, "
      "bool needs_grad_shift, bool needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, "
      "Tensor grad_scale, Tensor grad_shift, Tensor grad_weight, Tensor grad_bias)",
      TORCH_BOX(&ada_norm_bwd));
  ops.forward(
      "gate_residual_ada_norm",
      "Tensor x, Tensor residual, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, "
      "Tensor? bias, float eps, bool layer",
      "Tensor out, Tensor new_residual", "Tensor statistics",
      TORCH_BOX(&gate_residual_ada_norm<false>), TORCH_BOX(&gate_residual_ada_norm<true>));
  ops.op(
      "gate_residual_ada_norm_bwd(Tensor grad_out, Tensor? grad_new_residual, Tensor "
      "new_residual, Tensor? x, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, "
      "Tensor? bias, Tensor statistics, bool layer, bool needs_grad_x, bool needs_grad_residual, "
      "bool needs_grad_gate, bool needs_grad_scale, bool needs_grad_shift, bool "
      "needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, Tensor grad_residual, Tensor "
      "grad_gate, Tensor grad_scale, Tensor grad_shift, Tensor grad_weight, Tensor grad_bias)",
      TORCH_BOX(&gate_residual_ada_norm_bwd));
}

}  // namespace fuselage::binding
