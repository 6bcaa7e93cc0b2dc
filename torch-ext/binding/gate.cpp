// Bindings of the gate family. The formulas are in gate/activation.h. Activations are numbers of
// the enum there.
#include "binding.h"
#include "quantised.h"

#include "gate/activation.h"
#include "gate/activation_cpu.h"

namespace fuselage::binding {
namespace {

// ---- checks ----

// dim of a packed x [..., 2 * dim].
int64_t check_packed(const char* op, const Tensor& x) {
  check_rows(op, x);
  const int64_t size = columns_in(x);
  FUSELAGE_CHECK(op, size % 2 == 0,
                 "the last dimension of `x` must be even: it holds gate and value, got ",
                 shape_of(x));
  return size / 2;
}

Activation check_activation(const char* op, int64_t activation) {
  FUSELAGE_CHECK(op, activation >= 0 && activation <= static_cast<int64_t>(Activation::relu2),
                 "no activation has number ", activation);
  return static_cast<Activation>(activation);
}

// What the public functions call themselves: the ops behind them serve several.

const char* activation_name(int64_t activation) {
  switch (static_cast<Activation>(activation)) {
    case Activation::gelu: return "gelu";
    case Activation::gelu_tanh: return "gelu_tanh";
    case Activation::gelu_quick: return "gelu_quick";
    case Activation::silu: return "silu";
    case Activation::relu2: return "relu2";
    default: return "activation";
  }
}

const char* act_and_mul_name(int64_t activation, bool gate_first) {
  switch (static_cast<Activation>(activation)) {
    case Activation::relu: return gate_first ? "relu_and_mul" : "mul_and_relu";
    case Activation::gelu: return gate_first ? "gelu_and_mul" : "mul_and_gelu";
    case Activation::gelu_tanh: return gate_first ? "gelu_tanh_and_mul" : "mul_and_gelu_tanh";
    case Activation::silu: return gate_first ? "silu_and_mul" : "mul_and_silu";
    default: return nullptr;
  }
}

const char* glu_name(int64_t activation) {
  switch (static_cast<Activation>(activation)) {
    case Activation::gelu:
    case Activation::gelu_tanh: return "geglu";
    case Activation::silu: return "swiglu";
    case Activation::relu: return "glu";
    default: return nullptr;
  }
}

const char* check_gate(const char* op, const char* name) {
  FUSELAGE_CHECK(op, name != nullptr, "this activation has no gated form");
  return name;
}

// ---- launches ----

// Tensors without gaps are one long row, unless a bias makes columns count.
void collapse(ActivationForward& p) {
  const int64_t x_dim = p.interleaved ? 2 * p.dim : p.dim;
  if (p.bias != nullptr || p.x_stride != x_dim || p.out_stride != p.dim ||
      (p.y != nullptr && p.y_stride != p.dim))
    return;
  p.dim *= p.rows;
  p.rows = 1;
}

void collapse(ActivationBackward& p) {
  const int64_t x_dim = p.interleaved ? 2 * p.dim : p.dim;
  if (p.bias != nullptr || p.grad_bias != nullptr || p.grad_out_stride != p.dim ||
      (p.x != nullptr && p.x_stride != x_dim) || (p.y != nullptr && p.y_stride != p.dim) ||
      (p.grad_x != nullptr && p.grad_x_stride != x_dim) ||
      (p.grad_y != nullptr && p.grad_y_stride != p.dim))
    return;
  p.dim *= p.rows;
  p.rows = 1;
}

void run(const char* op, ActivationForward p, const Tensor& x) {
  if (is_nothing(x, p.rows, p.dim)) return;
  collapse(p);
  launch<cpu::activation_forward, gpu::activation_forward>(
      op, x, p, cpu::activation_pieces(p.rows, p.dim), std::min(p.dim, cpu::kActivationColumns));
}

void run(const char* op, ActivationBackward p, const Tensor& x) {
  if (is_nothing(x, p.rows, p.dim)) return;
  collapse(p);
  if (p.grad_bias == nullptr) {
    launch<cpu::activation_backward, gpu::activation_backward>(
        op, x, p, cpu::activation_pieces(p.rows, p.dim), std::min(p.dim, cpu::kActivationColumns));
    return;
  }
  OptionalTensor partials;
  const auto make_partials = [&](int64_t count) {
    p.partial_count = count;
    p.partials = scratch(partials, count * p.dim, x);
  };
  launch(
      op, x,
      [&] {
        make_partials(cpu::activation_backward_chunks(p.rows, p.dim));
        on_threads<cpu::activation_backward_chunk>(p, p.partial_count,
                                                   p.rows / p.partial_count * p.dim);
        on_threads<cpu::activation_backward_bias>(p, p.dim, p.partial_count);
      },
      [&](int32_t device, void* stream) {
        make_partials(gpu::activation_backward_partials(p, device));
        return gpu::activation_backward(p, device, stream);
      });
}

// How a packed x [..., 2 * dim] holds gate and value.
enum class Packing { gate_first, gate_last, interleaved };

struct PackedFormula {
  Formula formula;
  Activation activation;
  Packing packing;
  double alpha = 0, limit = 0;
};

// What is read of a packed x. The copy that is returned keeps it alive.
template <typename Params>
[[nodiscard]] Rows read_packed(Params& p, const PackedFormula& packed, const Tensor& x) {
  p.formula = packed.formula;
  p.activation = packed.activation;
  p.alpha = static_cast<float>(packed.alpha);
  p.limit = static_cast<float>(packed.limit);
  p.interleaved = packed.packing == Packing::interleaved;
  p.dtype = p.bias_dtype = *dtype_from(x.scalar_type());
  p.rows = rows_in(x);
  p.dim = columns_in(x) / 2;
  Rows rows = read_rows(p.x, p.x_stride, x);
  if (!p.interleaved) {
    const bool last = packed.packing == Packing::gate_last;
    p.y = element(p.x, last ? 0 : p.dim, p.dtype);
    p.x = element(p.x, last ? p.dim : 0, p.dtype);
    p.y_stride = p.x_stride;
  }
  return rows;
}

Tensor packed_forward(const char* op, const Tensor& x, const PackedFormula& packed) {
  const int64_t dim = check_packed(op, x);
  FUSELAGE_CHECK(op, x.dim() <= kMaxDim, "`x` must have at most ", kMaxDim, " dimensions, got ",
                 x.dim());
  Tensor out = empty_with_columns(x, dim);
  if (out.numel() == 0) return out;
  ActivationForward p{};
  const Rows x_rows = read_packed(p, packed, x);
  p.out = out.mutable_data_ptr();
  p.out_stride = dim;
  run(op, p, x);
  return out;
}

Tensor packed_backward(const char* op, const Tensor& grad_out, const Tensor& x,
                       const PackedFormula& packed) {
  const int64_t dim = check_packed(op, x);
  check_same_device(op, "grad_out", grad_out, x);
  FUSELAGE_CHECK(op,
                 same_rows(grad_out, x) && columns_in(grad_out) == dim &&
                     grad_out.scalar_type() == x.scalar_type(),
                 "`grad_out` must be of the shape and dtype of the result of `x` ", shape_of(x),
                 ", got ", shape_of(grad_out));
  Tensor grad_x = empty_like(x, x.scalar_type());
  if (grad_x.numel() == 0) return grad_x;
  ActivationBackward p{};
  const Rows x_rows = read_packed(p, packed, x);
  const Rows grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_x_stride = p.grad_y_stride = 2 * dim;
  if (!p.interleaved) {
    const bool last = packed.packing == Packing::gate_last;
    p.grad_y = element(p.grad_x, last ? 0 : dim, p.dtype);
    p.grad_x = element(p.grad_x, last ? dim : 0, p.dtype);
  }
  run(op, p, x);
  return grad_x;
}

PackedFormula act_and_mul_formula(int64_t activation, bool gate_first) {
  return {Formula::gate, static_cast<Activation>(activation),
          gate_first ? Packing::gate_first : Packing::gate_last};
}

PackedFormula clamped_formula(const char* op, double alpha, double limit, bool interleaved) {
  check_not_nan(op, "alpha", alpha);
  FUSELAGE_CHECK(op, limit >= 0, "`limit` must not be negative or NaN, got ", limit);
  return {Formula::clamped_gate, Activation::silu,
          interleaved ? Packing::interleaved : Packing::gate_first, alpha, limit};
}

// act(x + bias + alpha * y), as an op was called.
struct Sum {
  const char* op;
  const Tensor& x;
  const OptionalTensor& bias;
  const OptionalTensor& y;
  double alpha;
  int64_t activation;
};

// The same, checked: what the kernel is given but for x, y and the result.
struct CheckedSum {
  ActivationForward p;
  OptionalTensor bias;
};

CheckedSum check(const Sum& a) {
  CheckedSum c{};
  c.p.dtype = check_rows(a.op, a.x);
  c.bias = check_vector(a.op, "bias", a.bias, a.x);
  check_like(a.op, "y", a.y, a.x);
  check_not_nan(a.op, "alpha", a.alpha);
  c.p.formula = Formula::add;
  c.p.activation = check_activation(a.op, a.activation);
  c.p.alpha = static_cast<float>(a.alpha);
  c.p.rows = rows_in(a.x);
  c.p.dim = c.p.out_stride = columns_in(a.x);
  read_vector(c.p.bias, c.p.bias_dtype, c.bias, c.p.dtype);
  return c;
}

void run(const Sum& a, ActivationForward& p, const Tensor& out) {
  if (is_nothing(a.x, p.rows, p.dim)) return;
  const auto x_rows = read_rows(p.x, p.x_stride, a.x);
  const auto y_rows = read_rows(p.y, p.y_stride, a.y);
  p.out = out.mutable_data_ptr();
  run(a.op, p, a.x);
}

Tensor add_act(const Sum& a) {
  CheckedSum c = check(a);
  Tensor out = empty_like(a.x, a.x.scalar_type());
  run(a, c.p, out);
  return out;
}

// As add_act, over x.
void add_act_inplace(const Sum& a, const char* functional_op) {
  CheckedSum c = check(a);
  ActivationForward& p = c.p;
  p.out_stride = check_written_rows(a.op, "x", a.x, functional_op);
  if (is_nothing(a.x, p.rows, p.dim)) return;
  if (a.y.has_value()) {
    const Rows y = rows_of(*a.y);  // where this is a copy, it shares nothing
    const bool same = y.data() == a.x.const_data_ptr() && y.stride == p.out_stride;
    FUSELAGE_CHECK(a.op, same || !overlap(a.x, p.out_stride, y.tensor, y.stride, p.rows, p.dim),
                   "`x` is written in place and must not share memory with `y`, unless they are "
                   "the same; pass a copy of one");
  }
  check_apart(a.op, "x", a.x, "bias", c.bias);
  run(a, p, a.x);
}

Tensor activation(const Tensor& x, int64_t activation) {
  return add_act({activation_name(activation), x, std::nullopt, std::nullopt, 0, activation});
}

// act(gate) * value of the halves of x [..., 2 * dim], the gate first or last.
Tensor act_and_mul(const Tensor& x, int64_t activation, bool gate_first) {
  const char* op = check_gate("act_and_mul", act_and_mul_name(activation, gate_first));
  return packed_forward(op, x, act_and_mul_formula(activation, gate_first));
}

Tensor act_and_mul_bwd(const Tensor& grad_out, const Tensor& x, int64_t activation,
                       bool gate_first) {
  const char* op = check_gate("act_and_mul_bwd", act_and_mul_name(activation, gate_first));
  return packed_backward(op, grad_out, x, act_and_mul_formula(activation, gate_first));
}

// The clamped gate of x [..., 2 * dim]: halves, the gate first, or gate and value in turn.
Tensor swiglu_clamped(const Tensor& x, double alpha, double limit, bool interleaved) {
  const char* op = "swiglu_clamped";
  return packed_forward(op, x, clamped_formula(op, alpha, limit, interleaved));
}

Tensor swiglu_clamped_bwd(const Tensor& grad_out, const Tensor& x, double alpha, double limit,
                          bool interleaved) {
  const char* op = "swiglu_clamped";
  return packed_backward(op, grad_out, x, clamped_formula(op, alpha, limit, interleaved));
}

Tensor glu(const Tensor& gate, const Tensor& up, int64_t activation) {
  const char* op = check_gate("glu", glu_name(activation));
  ActivationForward p{};
  p.dtype = p.bias_dtype = check_rows(op, gate, "gate");
  check_like(op, "up", up, gate, "gate");
  Tensor out = empty_like(gate, gate.scalar_type());
  p.rows = rows_in(gate);
  p.dim = p.out_stride = columns_in(gate);
  if (p.rows == 0 || p.dim == 0) return out;
  p.formula = Formula::gate;
  p.activation = static_cast<Activation>(activation);
  const Rows gate_rows = read_rows(p.x, p.x_stride, gate);
  const Rows up_rows = read_rows(p.y, p.y_stride, up);
  p.out = out.mutable_data_ptr();
  run(op, p, gate);
  return out;
}

void activation_row(const ActivationForward& p, int64_t row) {
  const int64_t pieces = cpu::activation_pieces(1, p.dim);
  cpu::activation_forward(p, row * pieces, (row + 1) * pieces);
}

// (q, scale_of_q, out) of rows of `dim` columns, the latter without elements unless it is asked
// for. read(p) fills in what is activated, and returns what keeps it alive.
template <typename Read>
std::tuple<Tensor, Tensor, Tensor> run_quantised(const char* op, const Tensor& x, int64_t dim,
                                                 const QuantOptions& options, bool keeps_out,
                                                 const Read& read) {
  Quantised<ActivationForward> p{};
  p.dtype = p.bias_dtype = *dtype_from(x.scalar_type());
  p.rows = rows_in(x);
  p.dim = p.out_stride = dim;
  const QuantResults quant = quant_results(op, x, dim, p.dtype, options, p.quant);
  const Tensor out = keeps_out ? empty_with_columns(x, dim) : no_tensor(x);
  if (!is_nothing(x, p.rows, p.dim)) {
    const auto kept = read(p);
    if (keeps_out) p.out = out.mutable_data_ptr();
    launch_quantised<&activation_row, &gpu::activation_forward, &gpu::activation_quantises,
                     &gpu::activation_quant>(op, x, p);
  }
  return {quant.q, quant.scale, out};
}

std::tuple<Tensor, Tensor, Tensor> silu_and_mul_quant(const Tensor& x, const OptionalTensor& scale,
                                                      int64_t group_size, bool scales_by_columns,
                                                      bool scale_ue8m0, bool return_unquantized,
                                                      ScalarType dtype) {
  const char* op = "silu_and_mul_quant";
  const int64_t dim = check_packed(op, x);
  check_columns(op, "x", x);
  return run_quantised(
      op, x, dim, {scale, group_size, scales_by_columns, scale_ue8m0, dtype}, return_unquantized,
      [&](ActivationForward& p) {
        return read_packed(p, act_and_mul_formula(static_cast<int64_t>(Activation::silu), true), x);
      });
}

std::tuple<Tensor, Tensor, Tensor> swiglu_quant(const Tensor& gate, const Tensor& up,
                                                const OptionalTensor& scale, int64_t group_size,
                                                bool scales_by_columns, bool scale_ue8m0,
                                                bool return_unquantized, ScalarType dtype) {
  const char* op = "swiglu_quant";
  check_rows(op, gate, "gate");
  check_columns(op, "gate", gate);
  check_like(op, "up", up, gate, "gate");
  return run_quantised(
      op, gate, columns_in(gate), {scale, group_size, scales_by_columns, scale_ue8m0, dtype},
      return_unquantized, [&](ActivationForward& p) {
        p.formula = Formula::gate;
        p.activation = Activation::silu;
        return std::pair(read_rows(p.x, p.x_stride, gate), read_rows(p.y, p.y_stride, up));
      });
}

std::tuple<Tensor, Tensor, Tensor> gelu_tanh_quant(const Tensor& x, const OptionalTensor& scale,
                                                   int64_t group_size, bool scales_by_columns,
                                                   bool scale_ue8m0, bool return_unquantized,
                                                   ScalarType dtype) {
  const char* op = "gelu_tanh_quant";
  check_rows(op, x);
  check_columns(op, "x", x);
  return run_quantised(op, x, columns_in(x),
                       {scale, group_size, scales_by_columns, scale_ue8m0, dtype},
                       return_unquantized, [&](ActivationForward& p) {
                         p.formula = Formula::add;
                         p.activation = Activation::gelu_tanh;
                         return read_rows(p.x, p.x_stride, x);
                       });
}

// (grad_gate, grad_up), either of them empty where not needed.
std::tuple<Tensor, Tensor> glu_bwd(const Tensor& grad_out, const Tensor& gate, const Tensor& up,
                                   int64_t activation, bool needs_grad_gate, bool needs_grad_up) {
  const char* op = check_gate("glu_bwd", glu_name(activation));
  ActivationBackward p{};
  p.dtype = p.bias_dtype = check_rows(op, gate, "gate");
  check_like(op, "up", up, gate, "gate");
  check_like(op, "grad_out", grad_out, gate, "gate");
  const Gradient grad_gate = gradient_of(gate, needs_grad_gate);
  const Gradient grad_up = gradient_of(up, needs_grad_up);
  const std::tuple<Tensor, Tensor> results{grad_gate.tensor, grad_up.tensor};
  p.rows = rows_in(gate);
  p.dim = p.grad_x_stride = p.grad_y_stride = columns_in(gate);
  if (p.rows == 0 || p.dim == 0 || !(needs_grad_gate || needs_grad_up)) return results;
  p.formula = Formula::gate;
  p.activation = static_cast<Activation>(activation);
  const Rows grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  const Rows gate_rows = read_rows(p.x, p.x_stride, gate);
  std::optional<Rows> up_rows;  // the gradient of up alone is not read from up
  if (needs_grad_gate) up_rows = read_rows(p.y, p.y_stride, up);
  p.grad_x = grad_gate.data();
  p.grad_y = grad_up.data();
  run(op, p, gate);
  return results;
}

Tensor bias_act(const Tensor& x, const OptionalTensor& bias, int64_t activation) {
  return add_act({"bias_act", x, bias, std::nullopt, 0, activation});
}

void bias_act_(const Tensor& x, const OptionalTensor& bias, int64_t activation) {
  add_act_inplace({"bias_act_", x, bias, std::nullopt, 0, activation}, "bias_act");
}

Tensor add_mul_act(const Tensor& x, const OptionalTensor& bias, const Tensor& y, double alpha,
                   int64_t activation) {
  return add_act({"add_mul_act", x, bias, y, alpha, activation});
}

void add_mul_act_(const Tensor& x, const OptionalTensor& bias, const Tensor& y, double alpha,
                  int64_t activation) {
  add_act_inplace({"add_mul_act_", x, bias, y, alpha, activation}, "add_mul_act");
}

// The gradient of both: (grad_x, grad_bias, grad_y), any of them empty where not needed. Without an
// activation x and y are not read and may be left out.
std::tuple<Tensor, Tensor, Tensor> add_mul_act_bwd(const Tensor& grad_out, const OptionalTensor& x,
                                                   const OptionalTensor& bias,
                                                   const OptionalTensor& y, double alpha,
                                                   int64_t activation, bool needs_grad_x,
                                                   bool needs_grad_bias, bool needs_grad_y) {
  const char* op = "add_mul_act_bwd";
  ActivationBackward p{};
  p.formula = Formula::add;
  p.activation = check_activation(op, activation);
  p.alpha = static_cast<float>(alpha);
  p.dtype = check_rows(op, grad_out, "grad_out");
  const OptionalTensor checked_bias = check_vector(op, "bias", bias, grad_out);
  const Gradient grad_x = gradient_of(grad_out, needs_grad_x);
  Gradient grad_bias = gradient_of(checked_bias, needs_grad_bias, grad_out);
  const Gradient grad_y = gradient_of(grad_out, needs_grad_y);
  const std::tuple<Tensor, Tensor, Tensor> results{grad_x.tensor, grad_bias.tensor, grad_y.tensor};
  p.rows = rows_in(grad_out);
  p.dim = p.grad_x_stride = p.grad_y_stride = columns_in(grad_out);
  if (p.rows == 0 || p.dim == 0) {
    grad_bias.zero();
    return results;
  }
  if (!(grad_x.needed || grad_bias.needed || grad_y.needed)) return results;

  const Rows grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  std::optional<Rows> x_rows, y_rows;
  read_vector(p.bias, p.bias_dtype, checked_bias, p.dtype);
  if (p.activation == Activation::none) {
    p.bias = nullptr;
  } else {
    FUSELAGE_CHECK(op, x.has_value(), "`x` must be there for this activation");
    check_like(op, "x", x, grad_out, "grad_out");
    check_like(op, "y", y, grad_out, "grad_out");
    x_rows = read_rows(p.x, p.x_stride, x);
    y_rows = read_rows(p.y, p.y_stride, y);
  }
  p.grad_x = grad_x.data();
  p.grad_bias = grad_bias.data();
  p.grad_y = grad_y.data();
  run(op, p, grad_out);
  return results;
}

Tensor activation_bwd(const Tensor& grad_out, const Tensor& x, int64_t activation) {
  return std::get<0>(
      add_mul_act_bwd(grad_out, x, std::nullopt, std::nullopt, 0, activation, true, false, false));
}

}  // namespace

void register_gate_ops(const Ops& ops) {
  ops.with_fwd("activation(Tensor x, int activation) -> Tensor", TORCH_BOX(&activation));
  ops.op("activation_bwd(Tensor grad_out, Tensor x, int activation) -> Tensor",
         TORCH_BOX(&activation_bwd));
  ops.with_fwd("act_and_mul(Tensor x, int activation, bool gate_first) -> Tensor",
               TORCH_BOX(&act_and_mul));
  ops.op("act_and_mul_bwd(Tensor grad_out, Tensor x, int activation, bool gate_first) -> Tensor",
         TORCH_BOX(&act_and_mul_bwd));
  ops.with_fwd("swiglu_clamped(Tensor x, float alpha, float limit, bool interleaved) -> Tensor",
               TORCH_BOX(&swiglu_clamped));
  ops.op(
      "swiglu_clamped_bwd(Tensor grad_out, Tensor x, float alpha, float limit, bool interleaved) "
      "-> Tensor",
      TORCH_BOX(&swiglu_clamped_bwd));
  ops.with_fwd("glu(Tensor gate, Tensor up, int activation) -> Tensor", TORCH_BOX(&glu));
  ops.op(
      "glu_bwd(Tensor grad_out, Tensor gate, Tensor up, int activation, bool needs_grad_gate, "
      "bool needs_grad_up) -> (Tensor grad_gate, Tensor grad_up)",
      TORCH_BOX(&glu_bwd));
  ops.op("silu_and_mul_quant(Tensor x, " FUSELAGE_QUANT_OPTIONS FUSELAGE_QUANT_RESULTS ")",
         TORCH_BOX(&silu_and_mul_quant));
  ops.op("swiglu_quant(Tensor gate, Tensor up, " FUSELAGE_QUANT_OPTIONS FUSELAGE_QUANT_RESULTS ")",
         TORCH_BOX(&swiglu_quant));
  ops.op("gelu_tanh_quant(Tensor x, " FUSELAGE_QUANT_OPTIONS FUSELAGE_QUANT_RESULTS ")",
         TORCH_BOX(&gelu_tanh_quant));
  ops.with_fwd("bias_act(Tensor x, Tensor? bias, int activation) -> Tensor", TORCH_BOX(&bias_act));
  ops.op("bias_act_(Tensor(a!) x, Tensor? bias, int activation) -> ()", TORCH_BOX(&bias_act_));
  ops.with_fwd(
      "add_mul_act(Tensor x, Tensor? bias, Tensor y, float alpha, int activation) -> Tensor",
      TORCH_BOX(&add_mul_act));
  ops.op("add_mul_act_(Tensor(a!) x, Tensor? bias, Tensor y, float alpha, int activation) -> ()",
         TORCH_BOX(&add_mul_act_));
  ops.op(
      "add_mul_act_bwd(Tensor grad_out, Tensor? x, Tensor? bias, Tensor? y, float alpha, int "
      "activation, bool needs_grad_x, bool needs_grad_bias, bool needs_grad_y) -> (Tensor grad_x, "
      "Tensor grad_bias, Tensor grad_y)",
      TORCH_BOX(&add_mul_act_bwd));
}

}  // namespace fuselage::binding
