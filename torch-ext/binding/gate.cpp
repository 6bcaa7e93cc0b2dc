#include "gate.h"

#include "cpu/activation.h"
#include "gate/activation.h"

namespace fuselage::binding {
namespace {

// ---- checks ----

DType check_x(const char* op, const Tensor& x, const char* name = "x") {
  FUSELAGE_CHECK(op, x.dim() >= 1, "`", name, "` must have at least one dimension, got a scalar");
  return check_dtype(op, name, x);
}

// dim of a packed x [..., 2 * dim].
int64_t check_packed(const char* op, const Tensor& x) {
  check_x(op, x);
  const int64_t size = x.size(x.dim() - 1);
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
  if (p.rows == 0 || p.dim == 0 || is_meta(x)) return;
  collapse(p);
  if (x.is_cpu()) {
    torch::stable::parallel_for(
        0, cpu::activation_pieces(p.rows, p.dim),
        tasks_of(std::min(p.dim, cpu::kActivationColumns)),
        [&](int64_t begin, int64_t end) { cpu::activation_forward(p, begin, end); });
    return;
  }
#if defined(FUSELAGE_GPU)
  const int32_t device = x.get_device_index();
  const OnDevice on_device(device);
  const char* error = gpu::activation_forward(p, device, on_device.stream());
  FUSELAGE_CHECK(op, error == nullptr, error);
#endif
}

void run(const char* op, ActivationBackward p, const Tensor& x) {
  if (p.rows == 0 || p.dim == 0 || is_meta(x)) return;
  collapse(p);
  OptionalTensor partials;
  const auto with_partials = [&](int64_t count) {
    p.partial_count = count;
    const int64_t sizes[2] = {count, p.dim};
    partials = empty(sizes, 2, ScalarType::Float, x);
    p.partials = static_cast<float*>(partials->mutable_data_ptr());
  };
  if (x.is_cpu()) {
    if (p.grad_bias == nullptr) {
      torch::stable::parallel_for(
          0, cpu::activation_pieces(p.rows, p.dim),
          tasks_of(std::min(p.dim, cpu::kActivationColumns)),
          [&](int64_t begin, int64_t end) { cpu::activation_backward(p, begin, end); });
      return;
    }
    with_partials(cpu::activation_backward_chunks(p.rows, p.dim));
    torch::stable::parallel_for(
        0, p.partial_count, tasks_of(p.rows / p.partial_count * p.dim),
        [&](int64_t begin, int64_t end) { cpu::activation_backward_chunk(p, begin, end); });
    torch::stable::parallel_for(
        0, p.dim, tasks_of(p.partial_count),
        [&](int64_t begin, int64_t end) { cpu::activation_backward_bias(p, begin, end); });
    return;
  }
#if defined(FUSELAGE_GPU)
  const int32_t device = x.get_device_index();
  const OnDevice on_device(device);
  if (p.grad_bias != nullptr) with_partials(gpu::activation_backward_partials(p, device));
  const char* error = gpu::activation_backward(p, device, on_device.stream());
  FUSELAGE_CHECK(op, error == nullptr, error);
#endif
}

// The element `index` of the rows of a tensor.
const void* element(const Rows& rows, int64_t index, DType dtype) {
  return static_cast<const char*>(rows.data()) + index * dtype_size(dtype);
}
void* element(const Tensor& tensor, int64_t index, DType dtype) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + index * dtype_size(dtype);
}

template <typename Params>
void set_bias(Params& p, const OptionalTensor& bias) {
  p.bias_dtype = p.dtype;
  if (!bias.has_value()) return;
  p.bias = bias->const_data_ptr();
  p.bias_dtype = *dtype_from(bias->scalar_type());
}

// How a packed x [..., 2 * dim] holds gate and value.
enum class Packing { gate_first, gate_last, interleaved };

struct PackedFormula {
  Formula formula;
  Activation activation;
  Packing packing;
  double alpha = 0, limit = 0;
};

template <typename Params>
void set_packed(Params& p, const PackedFormula& packed, const Rows& x, DType dtype, int64_t dim) {
  p.formula = packed.formula;
  p.activation = packed.activation;
  p.alpha = static_cast<float>(packed.alpha);
  p.limit = static_cast<float>(packed.limit);
  p.interleaved = packed.packing == Packing::interleaved;
  p.dtype = p.bias_dtype = dtype;
  p.rows = rows_in(x.tensor);
  p.dim = dim;
  p.x = element(x, packed.packing == Packing::gate_last ? dim : 0, dtype);
  if (!p.interleaved) p.y = element(x, packed.packing == Packing::gate_last ? 0 : dim, dtype);
  p.x_stride = p.y_stride = x.stride;
}

Tensor packed_forward(const char* op, const Tensor& x, const PackedFormula& packed) {
  const int64_t dim = check_packed(op, x);
  int64_t sizes[kMaxDim];
  FUSELAGE_CHECK(op, x.dim() <= kMaxDim, "`x` must have at most ", kMaxDim, " dimensions, got ",
                 x.dim());
  for (int64_t i = 0; i + 1 < x.dim(); ++i) sizes[i] = x.size(i);
  sizes[x.dim() - 1] = dim;
  Tensor out = empty(sizes, x.dim(), x.scalar_type(), x);
  if (out.numel() == 0) return out;
  ActivationForward p{};
  const Rows x_rows = rows_of(x);
  set_packed(p, packed, x_rows, *dtype_from(x.scalar_type()), dim);
  p.out = out.mutable_data_ptr();
  p.out_stride = dim;
  run(op, p, x);
  return out;
}

Tensor packed_backward(const char* op, const Tensor& grad_out, const Tensor& x,
                       const PackedFormula& packed) {
  const int64_t dim = check_packed(op, x);
  const DType dtype = *dtype_from(x.scalar_type());
  check_same_device(op, "grad_out", grad_out, x);
  bool same = grad_out.dim() == x.dim() && grad_out.size(x.dim() - 1) == dim;
  for (int64_t i = 0; same && i + 1 < x.dim(); ++i) same = grad_out.size(i) == x.size(i);
  FUSELAGE_CHECK(op, same && grad_out.scalar_type() == x.scalar_type(),
                 "`grad_out` must be of the shape and dtype of the result of `x` ", shape_of(x),
                 ", got ", shape_of(grad_out));
  Tensor grad_x = empty_like(x, x.scalar_type());
  if (grad_x.numel() == 0) return grad_x;
  ActivationBackward p{};
  const Rows x_rows = rows_of(x), grad_out_rows = rows_of(grad_out);
  set_packed(p, packed, x_rows, dtype, dim);
  p.grad_out = grad_out_rows.data();
  p.grad_out_stride = grad_out_rows.stride;
  p.grad_x = element(grad_x, packed.packing == Packing::gate_last ? dim : 0, dtype);
  if (!p.interleaved)
    p.grad_y = element(grad_x, packed.packing == Packing::gate_last ? 0 : dim, dtype);
  p.grad_x_stride = p.grad_y_stride = 2 * dim;
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

// act(x + bias + alpha * y) into `out`, whose rows are out_stride apart.
void add_forward(const char* op, const Tensor& x, const OptionalTensor& bias, const Tensor* y,
                 double alpha, Activation activation, const Tensor& out, int64_t out_stride) {
  ActivationForward p{};
  p.rows = rows_in(x);
  p.dim = x.size(x.dim() - 1);
  if (p.rows == 0 || p.dim == 0) return;
  p.formula = Formula::add;
  p.activation = activation;
  p.alpha = static_cast<float>(alpha);
  p.dtype = *dtype_from(x.scalar_type());
  const Rows x_rows = rows_of(x);
  p.x = x_rows.data();
  p.x_stride = x_rows.stride;
  std::optional<Rows> y_rows;
  if (y != nullptr) {
    y_rows = rows_of(*y);
    p.y = y_rows->data();
    p.y_stride = y_rows->stride;
  }
  set_bias(p, bias);
  p.out = out.mutable_data_ptr();
  p.out_stride = out_stride;
  run(op, p, x);
}

Tensor add_act(const char* op, const Tensor& x, const OptionalTensor& bias, const Tensor* y,
               double alpha, int64_t activation) {
  check_x(op, x);
  const OptionalTensor checked_bias = check_vector(op, "bias", bias, x);
  if (y != nullptr) check_like(op, "y", *y, x);
  check_not_nan(op, "alpha", alpha);
  Tensor out = empty_like(x, x.scalar_type());
  add_forward(op, x, checked_bias, y, alpha, check_activation(op, activation), out,
              x.size(x.dim() - 1));
  return out;
}

// As add_act, over x.
void add_act_inplace(const char* op, const char* functional_op, const Tensor& x,
                     const OptionalTensor& bias, const Tensor* y, double alpha,
                     int64_t activation) {
  check_x(op, x);
  const OptionalTensor checked_bias = check_vector(op, "bias", bias, x);
  if (y != nullptr) check_like(op, "y", *y, x);
  check_not_nan(op, "alpha", alpha);
  const Activation checked_activation = check_activation(op, activation);
  const auto stride = row_stride_of(x);
  const int64_t rows = rows_in(x), dim = x.size(x.dim() - 1);
  FUSELAGE_CHECK(
      op, stride.has_value() && (rows <= 1 || *stride >= dim),
      "`x` is written in place and must be rows of adjacent elements that do not overlap, one "
      "stride between all of them; pass a contiguous tensor or use ",
      functional_op);
  if (rows == 0 || dim == 0 || is_meta(x)) return;
  if (y != nullptr) {
    const Rows y_rows = rows_of(*y);  // where this is a copy, it shares nothing
    const bool same = y_rows.data() == x.const_data_ptr() && y_rows.stride == *stride;
    FUSELAGE_CHECK(op, same || !overlap(x, *stride, y_rows.tensor, y_rows.stride, rows, dim),
                   "`x` is written in place and must not share memory with `y`, unless they are "
                   "the same; pass a copy of one");
  }
  if (checked_bias.has_value()) check_apart(op, "x", x, "bias", *checked_bias);
  add_forward(op, x, checked_bias, y, alpha, checked_activation, x, *stride);
}

}  // namespace

Tensor activation(const Tensor& x, int64_t activation) {
  return add_act(activation_name(activation), x, std::nullopt, nullptr, 0, activation);
}

Tensor activation_bwd(const Tensor& grad_out, const Tensor& x, int64_t activation) {
  return std::get<0>(
      add_mul_act_bwd(grad_out, x, std::nullopt, std::nullopt, 0, activation, true, false, false));
}

Tensor act_and_mul(const Tensor& x, int64_t activation, bool gate_first) {
  const char* op = check_gate("act_and_mul", act_and_mul_name(activation, gate_first));
  return packed_forward(op, x, act_and_mul_formula(activation, gate_first));
}

Tensor act_and_mul_bwd(const Tensor& grad_out, const Tensor& x, int64_t activation,
                       bool gate_first) {
  const char* op = check_gate("act_and_mul_bwd", act_and_mul_name(activation, gate_first));
  return packed_backward(op, grad_out, x, act_and_mul_formula(activation, gate_first));
}

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
  p.dtype = p.bias_dtype = check_x(op, gate, "gate");
  check_like(op, "up", up, gate, "gate");
  Tensor out = empty_like(gate, gate.scalar_type());
  p.rows = rows_in(gate);
  p.dim = gate.size(gate.dim() - 1);
  if (p.rows == 0 || p.dim == 0) return out;
  const Rows gate_rows = rows_of(gate), up_rows = rows_of(up);
  p.formula = Formula::gate;
  p.activation = static_cast<Activation>(activation);
  p.x = gate_rows.data();
  p.x_stride = gate_rows.stride;
  p.y = up_rows.data();
  p.y_stride = up_rows.stride;
  p.out = out.mutable_data_ptr();
  p.out_stride = p.dim;
  run(op, p, gate);
  return out;
}

std::tuple<Tensor, Tensor> glu_bwd(const Tensor& grad_out, const Tensor& gate, const Tensor& up,
                                   int64_t activation, bool needs_grad_gate, bool needs_grad_up) {
  const char* op = check_gate("glu_bwd", glu_name(activation));
  ActivationBackward p{};
  p.dtype = p.bias_dtype = check_x(op, gate, "gate");
  check_like(op, "up", up, gate, "gate");
  check_like(op, "grad_out", grad_out, gate, "gate");
  Tensor grad_gate = needs_grad_gate ? empty_like(gate, gate.scalar_type()) : no_tensor(gate);
  Tensor grad_up = needs_grad_up ? empty_like(up, up.scalar_type()) : no_tensor(up);
  p.rows = rows_in(gate);
  p.dim = gate.size(gate.dim() - 1);
  if (p.rows == 0 || p.dim == 0 || !(needs_grad_gate || needs_grad_up)) return {grad_gate, grad_up};
  const Rows grad_out_rows = rows_of(grad_out), gate_rows = rows_of(gate), up_rows = rows_of(up);
  p.formula = Formula::gate;
  p.activation = static_cast<Activation>(activation);
  p.grad_out = grad_out_rows.data();
  p.grad_out_stride = grad_out_rows.stride;
  p.x = gate_rows.data();
  p.x_stride = gate_rows.stride;
  if (needs_grad_gate) {  // the gradient of up alone is not read from up
    p.y = up_rows.data();
    p.y_stride = up_rows.stride;
    p.grad_x = grad_gate.mutable_data_ptr();
  }
  if (needs_grad_up) p.grad_y = grad_up.mutable_data_ptr();
  p.grad_x_stride = p.grad_y_stride = p.dim;
  run(op, p, gate);
  return {grad_gate, grad_up};
}

Tensor bias_act(const Tensor& x, const OptionalTensor& bias, int64_t activation) {
  return add_act("bias_act", x, bias, nullptr, 0, activation);
}

void bias_act_(const Tensor& x, const OptionalTensor& bias, int64_t activation) {
  add_act_inplace("bias_act_", "bias_act", x, bias, nullptr, 0, activation);
}

Tensor add_mul_act(const Tensor& x, const OptionalTensor& bias, const Tensor& y, double alpha,
                   int64_t activation) {
  return add_act("add_mul_act", x, bias, &y, alpha, activation);
}

void add_mul_act_(const Tensor& x, const OptionalTensor& bias, const Tensor& y, double alpha,
                  int64_t activation) {
  add_act_inplace("add_mul_act_", "add_mul_act", x, bias, &y, alpha, activation);
}

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
  p.dtype = check_x(op, grad_out, "grad_out");
  const OptionalTensor checked_bias = check_vector(op, "bias", bias, grad_out);
  needs_grad_bias = needs_grad_bias && checked_bias.has_value();
  Tensor grad_x = needs_grad_x ? empty_like(grad_out, grad_out.scalar_type()) : no_tensor(grad_out);
  Tensor grad_bias = needs_grad_bias ? empty_like(*checked_bias, checked_bias->scalar_type())
                                     : no_tensor(grad_out);
  Tensor grad_y = needs_grad_y ? empty_like(grad_out, grad_out.scalar_type()) : no_tensor(grad_out);
  std::tuple<Tensor, Tensor, Tensor> results = {grad_x, grad_bias, grad_y};
  p.rows = rows_in(grad_out);
  p.dim = grad_out.size(grad_out.dim() - 1);
  if (p.rows == 0 || p.dim == 0) {
    if (needs_grad_bias) torch::stable::zero_(grad_bias);
    return results;
  }
  if (!(needs_grad_x || needs_grad_bias || needs_grad_y)) return results;

  const Rows grad_out_rows = rows_of(grad_out);
  p.grad_out = grad_out_rows.data();
  p.grad_out_stride = grad_out_rows.stride;
  std::optional<Rows> x_rows, y_rows;
  set_bias(p, checked_bias);
  if (p.activation == Activation::none) {
    p.bias = nullptr;
  } else {
    FUSELAGE_CHECK(op, x.has_value(), "`x` must be there for this activation");
    check_like(op, "x", *x, grad_out, "grad_out");
    x_rows = rows_of(*x);
    p.x = x_rows->data();
    p.x_stride = x_rows->stride;
    if (y.has_value()) {
      check_like(op, "y", *y, grad_out, "grad_out");
      y_rows = rows_of(*y);
      p.y = y_rows->data();
      p.y_stride = y_rows->stride;
    }
  }
  if (needs_grad_x) p.grad_x = grad_x.mutable_data_ptr();
  if (needs_grad_y) p.grad_y = grad_y.mutable_data_ptr();
  p.grad_x_stride = p.grad_y_stride = p.dim;
  if (needs_grad_bias) p.grad_bias = grad_bias.mutable_data_ptr();
  run(op, p, grad_out);
  return results;
}

}  // namespace fuselage::binding
