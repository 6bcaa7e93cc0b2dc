// PolyNorm: what the GPU (norm/poly_norm.cu) and CPU (norm/poly_norm_cpu.cpp) kernels are given.
// One struct each way serves poly_norm, fused_mul_poly_norm and grouped_poly_norm.
//
//   r0, r1, r2 = 1 / sqrt(mean(x^6, x^4, x^2) + eps)
//   y   = w0 * x^3 * r0 + w1 * x^2 * r1 + w2 * x * r2 + b
//   out = y                                (poly_norm)
//   out = y * mul                          (fused_mul_poly_norm)
//   out = y * mul, w and b of the expert   (grouped_poly_norm; zero past the last expert's rows)
//
// With hidden_clamp, the grouped form cuts x, mul and the product to [-hidden_clamp, hidden_clamp].
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fuselage {

struct PolyNormForward {
  const void* x;       // [rows, dim] dtype
  const void* mul;     // [rows, dim] dtype, or null
  const void* weight;  // [3] weight_dtype, or [experts, 3] with offs
  const void* bias;    // [1] bias_dtype, or [experts, 1] with offs
  const int32_t*
      offs;     // [experts]: the end row of each expert, or null for one weight for all rows
  void* out;    // [rows, dim] dtype, contiguous
  float* rstd;  // [rows, 3]: r0, r1, r2, or null when no gradient is needed
  int64_t rows, dim, experts;
  int64_t x_stride, mul_stride;  // elements between rows
  float eps;
  float hidden_clamp;                     // infinity for none; looked at with offs alone
  DType dtype, weight_dtype, bias_dtype;  // weight_dtype, bias_dtype: dtype or float32
};

// With g = grad_out * mul, S0, S1, S2 = sum(g * x^3, g * x^2, g * x) over the last dimension:
//   grad_x      = g * (3 w0 r0 x^2 + 2 w1 r1 x + w2 r2)
//                 - x * (3 w0 r0^3 S0 x^4 + 2 w1 r1^3 S1 x^2 + w2 r2^3 S2) / dim
//   grad_mul    = grad_out * y
//   grad_weight = sum over rows of (r0 S0, r1 S1, r2 S2)
//   grad_bias   = sum over rows of sum(g)
// What was cut by hidden_clamp has no gradient.
struct PolyNormBackward {
  const void* grad_out;  // [rows, dim] dtype
  const void* x;         // [rows, dim] dtype
  const void* mul;       // [rows, dim] dtype, or null
  const void* weight;    // as in the forward
  const void* bias;
  const int32_t* offs;
  const float* rstd;  // [rows, 3]
  void* grad_x;       // [rows, dim] dtype, or null when not needed
  void* grad_mul;     // [rows, dim] dtype, or null when not needed
  void* grad_weight;  // shape and type of weight, or null when not needed
  void* grad_bias;    // shape and type of bias, or null when not needed
  float* partials;    // [partial_count, 4]: parts of grad_weight and grad_bias; null without both
  int64_t partial_count;  // [rows] with offs
  int64_t rows, dim, experts;
  int64_t grad_out_stride, x_stride, mul_stride, grad_x_stride, grad_mul_stride;
  float hidden_clamp;
  DType dtype, weight_dtype, bias_dtype;
};

namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* poly_norm_forward(const PolyNormForward& p, int device, void* stream);
const char* poly_norm_backward(const PolyNormBackward& p, int device, void* stream);

// The partial_count to give poly_norm_backward for these arguments (of which `partials` is not
// looked at).
int64_t poly_norm_backward_partials(const PolyNormBackward& p, int device);

}  // namespace gpu
}  // namespace fuselage
