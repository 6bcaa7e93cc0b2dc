// Bindings of gated_rms_norm. The formulas are in norm/gated_rms_norm.h.
#include "binding.h"

#include "norm/gated_rms_norm.h"
#include "norm/gated_rms_norm_cpu.h"

namespace fuselage::binding {
namespace {

// What an op is given, forward or backward, as it was called.
struct Arguments {
  const char* op;
  const Tensor &x, &gate;
  const OptionalTensor& weight;
  int64_t activation;
  bool norm_before_gate;
  std::optional<int64_t> group_size;
};

// Checks them, and fills in what both params have. The weight, as adjacent elements.
template <typename Params>
OptionalTensor check(const Arguments& a, Params& p) {
  p.dtype = check_rows(a.op, a.x);
  check_columns(a.op, "x", a.x);
  check_like(a.op, "gate", a.gate, a.x);
  const OptionalTensor weight = check_vector(a.op, "weight", a.weight, a.x);
  p.activation = static_cast<NormGate>(a.activation);
  FUSELAGE_CHECK(a.op, p.activation == NormGate::silu || p.activation == NormGate::sigmoid,
                 "`activation` must be 2 (sigmoid) or 7 (silu), got ", a.activation);
  const int64_t columns = columns_in(a.x);
  const int64_t size = a.group_size.value_or(columns);
  FUSELAGE_CHECK(a.op, !a.group_size.has_value() || (size > 0 && columns % size == 0),
                 "`group_size` must divide the last dimension of `x` ", shape_of(a.x), ", got ",
                 size);
  p.rows = rows_in(a.x);
  p.groups = size == columns ? 1 : columns / size;
  p.dim = size;
  p.norm_first = a.norm_before_gate;
  read_vector(p.weight, p.weight_dtype, weight, p.dtype);
  return weight;
}

template <bool kForGradient>
auto gated_rms_norm(const Tensor& x, const Tensor& gate, const OptionalTensor& weight, double eps,
                    int64_t activation, bool norm_before_gate, std::optional<int64_t> group_size,
                    bool cast_before_weight) {
  const Arguments a{"gated_rms_norm", x, gate, weight, activation, norm_before_gate, group_size};
  GatedRmsNormForward p{};
  const OptionalTensor checked_weight = check(a, p);
  check_eps(a.op, eps);
  p.eps = static_cast<float>(eps);
  p.cast_before_weight = cast_before_weight;
  const Tensor out = empty_like(x, x.scalar_type());
  OptionalTensor rstd;
  if (kForGradient) rstd = empty_floats({p.rows * p.groups}, x);
  if (!is_nothing(x, p.rows, p.groups * p.dim)) {
    const auto x_rows = read_rows(p.x, p.x_stride, x);
    const auto gate_rows = read_rows(p.gate, p.gate_stride, gate);
    p.out = out.mutable_data_ptr();
    if (kForGradient) p.rstd = static_cast<float*>(rstd->mutable_data_ptr());
    launch<cpu::gated_rms_norm_forward, gpu::gated_rms_norm_forward>(a.op, x, p, p.rows,
                                                                     p.groups * p.dim);
  }
  return returned<kForGradient>(out, rstd);
}

// (grad_x, grad_gate, grad_weight), each of them empty where not needed.
std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_bwd(
    const Tensor& grad_out, const Tensor& x, const Tensor& gate, const OptionalTensor& weight,
    const Tensor& rstd, int64_t activation, bool norm_before_gate,
    std::optional<int64_t> group_size, bool needs_grad_x, bool needs_grad_gate,
    bool needs_grad_weight) {
  const Arguments a{"gated_rms_norm_bwd", x,         gate, weight, activation,
                    norm_before_gate,     group_size};
  GatedRmsNormBackward p{};
  const OptionalTensor checked_weight = check(a, p);
  check_like(a.op, "grad_out", grad_out, x);
  const int64_t statistics = p.rows * p.groups, columns = p.groups * p.dim;
  check_saved(a.op, "rstd", rstd, statistics, x, "x", "float32 [", statistics, "]");

  Gradient grad_x = gradient_of(x, needs_grad_x);
  Gradient grad_gate = gradient_of(gate, needs_grad_gate);
  Gradient grad_weight = gradient_of(checked_weight, needs_grad_weight, x);
  if (is_nothing(x, p.rows, columns)) {
    grad_weight.zero();
    return {grad_x.tensor, grad_gate.tensor, grad_weight.tensor};
  }
  const auto grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  const auto x_rows = read_rows(p.x, p.x_stride, x);
  const auto gate_rows = read_rows(p.gate, p.gate_stride, gate);
  p.rstd = static_cast<const float*>(rstd.const_data_ptr());
  p.grad_x = grad_x.data();
  p.grad_gate = grad_gate.data();
  p.grad_weight = grad_weight.data();

  OptionalTensor partials;
  const auto make_partials = [&](int64_t count) {
    p.partial_count = count;
    p.partials = scratch(partials, grad_weight.needed ? count * columns : 0, x);
  };
  launch(
      a.op, x,
      [&] {
        make_partials(cpu::gated_rms_norm_backward_chunks(p.rows));
        on_threads<cpu::gated_rms_norm_backward>(p, p.partial_count,
                                                 p.rows / p.partial_count * columns);
        if (grad_weight.needed)
          on_threads<cpu::gated_rms_norm_backward_weight>(p, columns, p.partial_count);
      },
      [&](int32_t device, void* stream) {
        make_partials(gpu::gated_rms_norm_backward_partials(p, device));
        return gpu::gated_rms_norm_backward(p, device, stream);
      });
  return {grad_x.tensor, grad_gate.tensor, grad_weight.tensor};
}

}  // namespace

void register_gated_rms_norm_ops(const Ops& ops) {
  ops.forward("gated_rms_norm",
              "Tensor x, Tensor gate, Tensor? weight, float eps, int activation, bool "
              "norm_before_gate, int? group_size, bool cast_before_weight",
              "Tensor out", "Tensor rstd", TORCH_BOX(&gated_rms_norm<false>),
              TORCH_BOX(&gated_rms_norm<true>));
  ops.op(
      "gated_rms_norm_bwd(Tensor grad_out, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, int "
      "activation, bool norm_before_gate, int? group_size, bool needs_grad_x, bool "
      "needs_grad_gate, bool needs_grad_weight) -> (Tensor grad_x, Tensor grad_gate, Tensor "
      "grad_weight)",
      TORCH_BOX(&gated_rms_norm_bwd));
}

}  // namespace fuselage::binding
