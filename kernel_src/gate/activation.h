// Activations, gated activations and fused epilogues: what the GPU (gate/activation.cu) and CPU
// (gate/activation_cpu.cpp) kernels are given. All are element-wise, so one forward struct serves
// every operator of the family, and one backward struct every gradient. The activations:
// gate/activation_math.h.
//
//   add:           out = act(x + bias + alpha * y)        bias and y may be left out
//   gate:          out = act(x) * y                       x is the gate, y the value
//   clamped_gate:  g = min(x, limit), u = clamp(y, -limit, limit)
//                  out = g * sigmoid(alpha * g) * (u + 1)
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/quant.h"

namespace fuselage {

// NOTE: the numbers are arguments of the ops, and stand in gate.py too.
enum class Activation {
  none = 0,
  relu = 1,
  sigmoid = 2,
  tanh = 3,
  gelu = 4,
  gelu_tanh = 5,
  gelu_quick = 6,
  silu = 7,
  relu2 = 8,
};

enum class Formula { add, gate, clamped_gate };

struct ActivationForward {
  const void* x;     // [rows, dim] dtype; interleaved: [rows, 2 * dim], x and y in turn
  const void* y;     // [rows, dim] dtype; null where the formula has none, or interleaved
  const void* bias;  // [dim] bias_dtype, or null
  void* out;         // [rows, dim] dtype; may be x itself
  int64_t rows, dim;
  int64_t x_stride, y_stride, out_stride;  // elements between rows
  float alpha, limit;
  Formula formula;
  Activation activation;  // not of clamped_gate
  bool interleaved;
  DType dtype, bias_dtype;  // bias_dtype: dtype or float32
};

// With u what the activation is applied to:
//   add:   grad_x = grad_out * act'(u), grad_y = alpha * grad_x,
//          grad_bias = sum over rows of grad_x
//   gate:  grad_x = grad_out * act'(x) * y, grad_y = grad_out * act(x)
// Sums are of float32 values before they are rounded. Where the activation is `none`, x, y and bias
// are not looked at and may be null, and so may y where only the gradient of a gate's value is
// needed.
struct ActivationBackward {
  const void* grad_out;  // [rows, dim] dtype
  const void* x;         // as in the forward
  const void* y;
  const void* bias;
  void* grad_x;     // [rows, dim] dtype, or null when not needed; interleaved: [rows, 2 * dim]
  void* grad_y;     // [rows, dim] dtype, or null when not needed, or interleaved
  void* grad_bias;  // [dim] bias_dtype, or null when not needed
  float* partials;  // [partial_count, dim] workspace, null without grad_bias
  int64_t partial_count;
  int64_t rows, dim;
  int64_t grad_out_stride, x_stride, y_stride, grad_x_stride, grad_y_stride;
  float alpha, limit;
  Formula formula;
  Activation activation;
  bool interleaved;
  DType dtype, bias_dtype;
};

namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* activation_forward(const ActivationForward& p, int device, void* stream);
const char* activation_backward(const ActivationBackward& p, int device, void* stream);

// The partial_count to give activation_backward for these arguments, where it is to sum grad_bias.
int64_t activation_backward_partials(const ActivationBackward& p, int device);

// silu_and_mul, swiglu and gelu_tanh, quantised: whether one kernel does it, and that kernel.
bool activation_quantises(const Quantised<ActivationForward>& p);
const char* activation_quant(const Quantised<ActivationForward>& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
