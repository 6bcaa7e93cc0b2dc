// Layer norm and the adaptive norms: what the GPU (norm/ada_norm.cu) and CPU
// (norm/ada_norm_cpu.cpp) kernels are given. One forward struct serves layer_norm,
// fused_add_layer_norm, ada_layer_norm, ada_rms_norm and gate_residual_ada_norm, one backward
// struct all their gradients.
//
//   s    = x                                   (without residual)
//   s    = round(residual + gate * x)          (rounded to x's type; fused_add_layer_norm: gate 1)
//   mean = mean(s)                             (layer; 0 otherwise)
//   rstd = 1 / sqrt(mean((s - mean)^2) + eps)
//   xhat = (s - mean) * rstd
//   out  = (xhat * weight + bias) * (1 + scale) + shift
#pragma once

#include <cstdint>

#include "common/divide.h"
#include "common/dtype.h"
#include "common/quant.h"

namespace fuselage {

// What a row is scaled, shifted or gated with: row i has the `dim` values at row i / rows of the
// tensor. One for all rows has a stride of zero; one for each batch element has as many rows as an
// element has.
struct Modulation {
  const void* data;  // [ceil(all rows / rows), dim], or null
  int64_t stride;    // elements between its rows
  Divisor rows;      // that share one of its rows
  DType dtype;       // x's, or float32
};

// A vector for all rows: [dim], x's type or float32, or null.
struct NormVector {
  const void* data;
  DType dtype;
};

struct AdaNormForward {
  const void* x;                 // [rows, dim] dtype
  void* out;                     // [rows, dim] dtype; may be x itself
  float* statistics;             // [rows, 2] mean and rstd (layer) or [rows] rstd; or null
  int64_t x_stride, out_stride;  // elements between rows
  int64_t rows, dim;
  float eps;
  bool layer;  // take the mean away
  DType dtype;
  Modulation scale, shift;
  NormVector weight, bias;
  const void* residual;  // [rows, dim] dtype, or null
  void* new_residual;    // [rows, dim] dtype, null without residual; may be residual itself
  int64_t residual_stride, new_residual_stride;
  Modulation gate;
};

// With f = weight * (1 + scale), g = grad_out * f, over the last dimension:
//   grad_s     = rstd * (g - mean(g) - xhat * mean(g * xhat)) [+ grad_new_residual];
//                mean(g) for layer alone
//   grad_x     = gate * grad_s,  grad_residual = grad_s,  grad_gate = grad_s * x
//   grad_scale = grad_out * (xhat * weight + bias),  grad_shift = grad_out
//   grad_weight = sum of grad_out * (1 + scale) * xhat,  grad_bias = sum of grad_out * (1 + scale)
// Gradients of what rows share are sums over these rows. They all follow from sums of columns
//   A = sum of a,  C = sum of a * xhat,  G = sum of grad_s * x
// over the rows of a group, within which scale, shift and gate do not change, unless every row has
// its own (`by_row`). a is grad_out, times (1 + scale) where every row has its own. Scale and shift
// are alike in this.
struct AdaNormBackward {
  const void* grad_out;           // [rows, dim] dtype
  const void* grad_new_residual;  // [rows, dim] dtype, or null
  const void* s;                  // [rows, dim] dtype
  const void* x;                  // [rows, dim] dtype, null unless grad_gate is needed
  const float* statistics;        // of the forward
  Modulation gate, scale;
  NormVector weight, bias;
  void* grad_x;         // [rows, dim] dtype, contiguous, or null when not needed
  void* grad_residual;  // likewise; null without residual
  void* grad_gate;      // [rows, dim] by row, else [rows / gate_rows, dim], or null when not needed
  void* grad_scale;     // likewise, with scale_rows
  void* grad_shift;     // likewise, with scale_rows
  void* grad_weight;    // [dim], dtype of the weight, or null when not needed
  void* grad_bias;      // [dim], dtype of the bias, or null when not needed
  Divisor gate_rows,
      scale_rows;  // rows that share a gate, or a scale and a shift: `rows` if all do
  bool gate_by_row, scale_by_row;
  DType shift_dtype, bias_dtype;
  bool sums_columns, sums_gate;  // which columns are summed: those of A and C, and those of G
  int partial_rows;              // of `dim` sums that a block leaves: A, C, G, or those summed
  float* partials;  // workspace of ada_norm_backward_workspace floats; null if that is 0
  int64_t rows, dim;
  int64_t group_rows;        // rows of a group; a divisor of `rows`
  int64_t blocks_per_group;  // partial sums of each group
  int64_t grad_out_stride, grad_new_residual_stride, s_stride, x_stride;  // elements between rows
  bool layer;
  DType dtype;
};

// Sets what of `p` follows from the gradients that are needed.
inline void ada_norm_choose_sums(AdaNormBackward& p) {
  p.sums_columns = p.grad_weight != nullptr || p.grad_bias != nullptr ||
                   ((p.grad_scale != nullptr || p.grad_shift != nullptr) && !p.scale_by_row);
  p.sums_gate = p.grad_gate != nullptr && !p.gate_by_row;
  p.partial_rows = (p.sums_columns ? 2 : 0) + (p.sums_gate ? 1 : 0);
}

namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* ada_norm_forward(const AdaNormForward& p, int device, void* stream);
const char* ada_norm_backward(const AdaNormBackward& p, int device, void* stream);

// Sets p.blocks_per_group, and returns how many floats p.partials must have.
int64_t ada_norm_backward_workspace(AdaNormBackward& p, int device);

// Norms without a residual, quantised: whether one kernel does it, and that kernel.
bool ada_norm_quantises(const Quantised<AdaNormForward>& p);
const char* ada_norm_quant(const Quantised<AdaNormForward>& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
