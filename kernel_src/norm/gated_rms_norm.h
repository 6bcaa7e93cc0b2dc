// Root mean square normalisation with a gate, before or after it: what the GPU
// (norm/gated_rms_norm.cu) and CPU (norm/gated_rms_norm_cpu.cpp) kernels are given.
//
//   a    = act(gate)                         silu or sigmoid
//   s    = x              (norm first)       or x * a  (gate first)
//   rstd = 1 / sqrt(mean(s^2) + eps)
//   out  = s * rstd * weight * a  (norm first)   or s * rstd * weight  (gate first)
//
// The columns of a row are cut into groups, each of which is normalised by itself: `dim` are those
// of a group.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fuselage {

// NOTE: the numbers are arguments of the ops, and stand in norm.py too: those of gate/activation.h.
enum class NormGate { sigmoid = 2, silu = 7 };

struct GatedRmsNormForward {
  const void* x;       // [rows, groups, dim] dtype
  const void* gate;    // [rows, groups, dim] dtype
  const void* weight;  // [groups, dim] weight_dtype, or null for a weight of one
  void* out;           // [rows, groups, dim] dtype, contiguous
  float* rstd;         // [rows, groups], or null when no gradient is needed
  int64_t rows, groups, dim;
  int64_t x_stride, gate_stride;  // elements between rows
  float eps;
  bool norm_first;
  // Round s * rstd to dtype before the multiplication by the weight; norm first, the product too,
  // where the weight has the same dtype.
  bool cast_before_weight;
  NormGate activation;
  DType dtype, weight_dtype;  // weight_dtype: dtype or float32
};

// With n = x * rstd, t = grad_out * n * a, c = mean(t * weight) over a group, and a' the slope:
//   norm first  grad_x = rstd * (grad_out * weight * a - n * c)
//               grad_gate = grad_out * weight * n * a'
//   gate first  grad_s = rstd * (grad_out * weight - n * a * c)
//               grad_x = grad_s * a,  grad_gate = grad_s * x * a'
//   either      grad_weight = sum over rows of t
struct GatedRmsNormBackward {
  const void* grad_out;  // [rows, groups, dim] dtype
  const void* x;         // as in the forward
  const void* gate;
  const void* weight;
  const float* rstd;      // [rows, groups]
  void* grad_x;           // [rows, groups, dim] dtype, contiguous, or null when not needed
  void* grad_gate;        // [rows, groups, dim] dtype, contiguous, or null when not needed
  void* grad_weight;      // [groups, dim] weight_dtype, or null when not needed
  float* partials;        // [partial_count, groups, dim] workspace, null without grad_weight
  int64_t partial_count;  // what the GPU or CPU says for these arguments
  int64_t rows, groups, dim;
  int64_t grad_out_stride, x_stride, gate_stride;  // elements between rows
  bool norm_first;
  NormGate activation;
  DType dtype, weight_dtype;
};

namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* gated_rms_norm_forward(const GatedRmsNormForward& p, int device, void* stream);
const char* gated_rms_norm_backward(const GatedRmsNormBackward& p, int device, void* stream);

// The partial_count to give gated_rms_norm_backward for these arguments.
int64_t gated_rms_norm_backward_partials(const GatedRmsNormBackward& p, int device);

}  // namespace gpu
}  // namespace fuselage
