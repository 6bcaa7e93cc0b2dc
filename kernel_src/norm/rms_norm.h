// Root mean square normalisation: what the GPU (norm/rms_norm*.cu) and CPU (norm/rms_norm_cpu.cpp)
// kernels are given. One forward struct serves rms_norm and fused_add_rms_norm, one backward struct
// all gradients.
//
//   s    = x                               (rms_norm)
//   s    = round(x + residual)             (fused_add_rms_norm, rounded to x's type)
//   rstd = 1 / sqrt(mean(s^2) + eps)
//   out  = s * rstd * (weight_offset + weight)
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/quant.h"

namespace fuselage {

// What every call needs comes first, here and in other parameters of kernels: multiprocessors read
// them by lines of 64 bytes, and kernels that take two microseconds wait for each.
struct RmsNormForward {
  const void* x;                 // [rows, dim] x_dtype
  const void* weight;            // [dim] weight_dtype, or null for a weight of one
  void* out;                     // [rows, dim] out_dtype; may be x itself
  float* rstd;                   // [rows], or null when no gradient is needed
  int64_t x_stride, out_stride;  // elements between rows
  int64_t rows, dim;
  float eps, weight_offset;
  bool cast_before_weight;  // round s * rstd to x_dtype before the multiplication by the weight
  DType x_dtype, weight_dtype, out_dtype;  // weight_dtype: x_dtype or float32
  const void* residual;                    // [rows, dim] x_dtype, or null
  void* new_residual;  // [rows, dim] x_dtype, null without residual; may be residual itself
  int64_t residual_stride, new_residual_stride;
};

// rms_norm_add_rms_norm: a result is normalised, added to the residual, and the sum normalised.
//   n            = rms_norm(x, post_weight, eps)              (rounded to x's type)
//   new_residual = round(residual + n)
//   out          = rms_norm(new_residual, pre_weight, pre_eps)
// Its gradient is rms_norm's, twice.
struct RmsNormAddRmsNorm {
  const void* x;            // [rows, dim] x_dtype
  const void* residual;     // [rows, dim] x_dtype
  const void* post_weight;  // [dim] post_weight_dtype, or null for a weight of one
  const void* pre_weight;   // [dim] pre_weight_dtype, or null for a weight of one
  void* out;                // [rows, dim] x_dtype, contiguous
  void* new_residual;       // [rows, dim] x_dtype, contiguous
  float* post_rstd;         // [rows], of x, or null when no gradient is needed
  float* pre_rstd;          // [rows], of new_residual, or null
  int64_t rows, dim;
  int64_t x_stride, residual_stride;  // elements between rows
  float eps, pre_eps, weight_offset;
  bool cast_before_weight;  // round the normalised values before the multiplication by a weight
  DType x_dtype, post_weight_dtype, pre_weight_dtype;
};

// With g = grad_out * (weight_offset + weight) and xhat = x * rstd, over the last dimension:
//   grad_x      = rstd * (g - xhat * mean(g * xhat)) [+ grad_new_residual]
//   grad_weight = sum over rows of grad_out * xhat
struct RmsNormBackward {
  const void* grad_out;           // [rows, dim] out_dtype
  const void* grad_new_residual;  // [rows, dim] x_dtype, or null
  const void* x;                  // [rows, dim] x_dtype: s of the forward
  const void* weight;             // [dim] weight_dtype, or null
  const float* rstd;              // [rows]
  void* grad_x;                   // [rows, dim] x_dtype, contiguous, or null when not needed
  void* grad_weight;              // [dim] weight_dtype, or null when not needed
  float* partials;                // [partial_count, dim] workspace, null if that is empty
  int64_t partial_count;
  int64_t rows, dim;
  int64_t grad_out_stride, grad_new_residual_stride, x_stride;  // elements between rows
  float weight_offset;
  DType x_dtype, weight_dtype, out_dtype;
};

namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* rms_norm_forward(const RmsNormForward& p, int device, void* stream);
const char* rms_norm_backward(const RmsNormBackward& p, int device, void* stream);
const char* rms_norm_add_rms_norm(const RmsNormAddRmsNorm& p, int device, void* stream);

// The partial_count to give rms_norm_backward for these arguments (of which `partials` is not
// looked at): 0 where rows are so few that nothing is summed in two stages.
int64_t rms_norm_backward_partials(const RmsNormBackward& p, int device);

// rms_norm and fused_add_rms_norm, quantised: whether one kernel does it, and that kernel.
bool rms_norm_quantises(const Quantised<RmsNormForward>& p);
const char* rms_norm_quant(const Quantised<RmsNormForward>& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
