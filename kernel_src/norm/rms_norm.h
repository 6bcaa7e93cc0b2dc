// Root mean square normalisation: what the GPU (norm/rms_norm*.cu) and CPU (norm/rms_norm_cpu.cpp)
// kernels are given. One forward struct and one backward struct serve rms_norm and
// fused_add_rms_norm.
//
//   s    = x                               (rms_norm)
//   s    = round(x + residual)             (fused_add_rms_norm, rounded to x's type)
//   rstd = 1 / sqrt(mean(s^2) + eps)
//   out  = s * rstd * (weight_offset + weight)
#pragma once

#include <cstdint>
#include <initializer_list>

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
struct RmsNormAddRmsNorm {
  const void* x;            // [rows, dim] x_dtype
  const void* residual;     // [rows, dim] x_dtype
  const void* post_weight;  // [dim] post_weight_dtype, or null for a weight of one
  const void* pre_weight;   // [dim] pre_weight_dtype, or null for a weight of one
  void* out;                // [rows, dim] x_dtype, contiguous
  void* new_residual;       // [rows, dim] x_dtype, contiguous
  float* statistics;        // [rows, 2] rstd of x and of new_residual, or null when not needed
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
  const float* rstd;              // [rows], rstd_stride apart
  void* grad_x;                   // [rows, dim] x_dtype, contiguous, or null when not needed
  void* grad_weight;              // [dim] weight_dtype, or null when not needed
  float* partials;                // [partial_count, dim] workspace, null if that is empty
  int64_t partial_count;
  int64_t rows, dim;
  int64_t grad_out_stride, grad_new_residual_stride, x_stride;  // elements between rows
  int64_t rstd_stride;
  float weight_offset;
  DType x_dtype, weight_dtype, out_dtype;
};

// Of rms_norm_add_rms_norm: that of rms_norm with grad_new_residual, whose grad_x is grad_residual
// and the grad_out of the first norm. In one pass it is not rounded in between.
struct RmsNormAddRmsNormBackward {
  const void* grad_out;           // [rows, dim] dtype
  const void* grad_new_residual;  // [rows, dim] dtype, or null
  const void* new_residual;       // [rows, dim] dtype
  const void* x;                  // [rows, dim] dtype
  const void* pre_weight;         // [dim] pre_weight_dtype, or null
  const void* post_weight;        // [dim] post_weight_dtype, or null
  const float* statistics;        // [rows, 2] rstd of x and of new_residual
  void* grad_x;                   // [rows, dim] dtype, contiguous, or null when not needed
  void* grad_residual;            // [rows, dim] dtype, contiguous; null when not needed, but not in
                                  // two passes
  void* grad_pre_weight;          // [dim] pre_weight_dtype, or null when not needed
  void* grad_post_weight;         // [dim] post_weight_dtype, or null when not needed
  float* workspace;               // of gpu::rms_norm_add_rms_norm_backward_workspace; on the CPU
                                  // [chunks, dim] for each of the gradients of weights
  int64_t chunks;                 // of rows, on the CPU
  int64_t rows, dim;
  int64_t grad_out_stride, grad_new_residual_stride, new_residual_stride, x_stride;
  float weight_offset;
  DType dtype, pre_weight_dtype, post_weight_dtype;
};

inline int rms_norm_add_rms_norm_weight_gradients(const RmsNormAddRmsNormBackward& p) {
  return (p.grad_pre_weight != nullptr ? 1 : 0) + (p.grad_post_weight != nullptr ? 1 : 0);
}

// The same as two backwards of rms_norm, `pre` first. set_partials() comes before either.
struct BothRmsNorms {
  RmsNormBackward pre{}, post{};

  explicit BothRmsNorms(const RmsNormAddRmsNormBackward& p) {
    for (RmsNormBackward* norm : {&pre, &post}) {
      norm->rows = p.rows;
      norm->dim = p.dim;
      norm->rstd_stride = 2;
      norm->weight_offset = p.weight_offset;
      norm->x_dtype = norm->out_dtype = p.dtype;
    }
    pre.grad_out = p.grad_out;
    pre.grad_out_stride = p.grad_out_stride;
    pre.grad_new_residual = p.grad_new_residual;
    pre.grad_new_residual_stride = p.grad_new_residual_stride;
    pre.x = p.new_residual;
    pre.x_stride = p.new_residual_stride;
    pre.weight = p.pre_weight;
    pre.weight_dtype = p.pre_weight_dtype;
    pre.rstd = p.statistics + 1;
    pre.grad_x = p.grad_residual;
    pre.grad_weight = p.grad_pre_weight;

    post.grad_out = p.grad_residual;
    post.grad_out_stride = p.dim;
    post.x = p.x;
    post.x_stride = p.x_stride;
    post.weight = p.post_weight;
    post.weight_dtype = p.post_weight_dtype;
    post.rstd = p.statistics;
    post.grad_x = p.grad_x;
    post.grad_weight = p.grad_post_weight;
  }
  bool needs_post() const { return post.grad_x != nullptr || post.grad_weight != nullptr; }
  // `workspace` is null, or has room for partial_floats().
  void set_partials(int64_t of_pre, int64_t of_post, float* workspace) {
    pre.partial_count = of_pre;
    post.partial_count = of_post;
    if (workspace == nullptr) return;
    if (pre.grad_weight != nullptr) pre.partials = workspace;
    if (post.grad_weight != nullptr) post.partials = workspace + floats_of(pre);
  }
  int64_t partial_floats() const { return floats_of(pre) + floats_of(post); }

 private:
  static int64_t floats_of(const RmsNormBackward& norm) {
    return norm.grad_weight != nullptr ? norm.partial_count * norm.dim : 0;
  }
};

namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* rms_norm_forward(const RmsNormForward& p, int device, void* stream);
const char* rms_norm_backward(const RmsNormBackward& p, int device, void* stream);
const char* rms_norm_add_rms_norm(const RmsNormAddRmsNorm& p, int device, void* stream);
const char* rms_norm_add_rms_norm_backward(const RmsNormAddRmsNormBackward& p, int device,
                                           void* stream);

// The partial_count to give rms_norm_backward for these arguments (of which `partials` is not
// looked at): 0 where rows are so few that nothing is summed in two stages.
int64_t rms_norm_backward_partials(const RmsNormBackward& p, int device);

// Whether the backward takes one pass, for which grad_residual may be null.
bool rms_norm_add_rms_norm_backward_in_one_pass(const RmsNormAddRmsNormBackward& p, int device);

// Floats of the workspace to give it.
int64_t rms_norm_add_rms_norm_backward_workspace(const RmsNormAddRmsNormBackward& p, int device);

// rms_norm and fused_add_rms_norm, quantised: whether one kernel does it, and that kernel.
bool rms_norm_quantises(const Quantised<RmsNormForward>& p);
const char* rms_norm_quant(const Quantised<RmsNormForward>& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
