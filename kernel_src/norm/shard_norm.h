// Norms of rows whose columns are spread over ranks: what the GPU (norm/shard_norm.cu) and CPU
// (norm/shard_norm_cpu.cpp) kernels are given. A rank has `dim` of the `total_dim` columns of each
// row. Formulas are those of norm/rms_norm.h, norm/ada_norm.h (layer norm) and norm/poly_norm.h,
// where they are sums over a row. Either way takes two steps, with one all-gather in between:
//
//   sums      a rank's own sums of each row                               -> sums
//   finish    all ranks' sums added up in the order of ranks, and results -> out, saved
//
//               forward                             backward
//   rms norm    sum(s^2)                            sum(g * xhat)
//   layer norm  mean(s), rest, sum((s - mean)^2)    sum(g), sum(g * xhat)
//   poly norm   sum(x^6), sum(x^4), sum(x^2)        S0, S1, S2
//
// s = x, or round(x + residual). g = grad_out * weight, or grad_out * mul. `rest` is what the
// rounding of the mean to float32 leaves of it: the mean is off by as much.
//
// Means and squared deviations from them are merged about the mean of the first rank that has
// columns, so that nothing cancels, however large the mean. All ranks merge the same values in the
// same order: their statistics have the same bits.
//
// Gradients of weights and biases, and of mul, are a rank's own, given the statistics: the kernels
// of whole rows make them.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fuselage {

enum class ShardNormKind { rms, layer, poly };

// Floats of a row that a rank gives to the others.
constexpr int shard_sum_count(ShardNormKind kind, bool backward) {
  if (kind == ShardNormKind::rms) return 1;
  return kind == ShardNormKind::layer && backward ? 2 : 3;
}

// Floats of a row that the forward saves: rstd; mean and rstd; or three rstd.
constexpr int shard_statistic_count(ShardNormKind kind) {
  return kind == ShardNormKind::rms ? 1 : kind == ShardNormKind::layer ? 2 : 3;
}

struct ShardNorm {
  ShardNormKind kind;
  bool backward;                  // grad_out is there
  const void* x;                  // [rows, dim] dtype; but for the forward's sums, s
  const void* residual;           // [rows, dim] dtype, or null: for the forward's sums
  const void* mul;                // [rows, dim] dtype, or null: poly norm
  const void* grad_out;           // [rows, dim] out_dtype
  const void* grad_new_residual;  // [rows, dim] dtype, or null
  const void* weight;             // [dim], or null for one; [3] of poly norm
  const void* bias;               // [dim], or null for zero; [1] of poly norm
  const float* statistics;        // [rows, shard_statistic_count]: backward
  const float* gathered;          // [ranks, rows, shard_sum_count]: to finish
  float* sums;                    // [rows, shard_sum_count]
  float* saved;                   // [rows, shard_statistic_count]: to finish the forward
  void* out;                      // [rows, dim] out_dtype; in the backward grad_s, dtype
  void* new_residual;             // [rows, dim] dtype, null without residual
  int64_t rows, dim, total_dim, ranks;
  int64_t rank_dim;  // columns of a rank, but for the last ones: as torch.chunk cuts them
  int64_t x_stride, residual_stride, mul_stride;  // elements between rows
  int64_t grad_out_stride, grad_new_residual_stride;
  float eps, weight_offset;
  bool cast_before_weight;
  DType dtype, out_dtype;          // out_dtype: dtype, but for rms norm
  DType weight_dtype, bias_dtype;  // dtype or float32
};

namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* shard_norm_sums(const ShardNorm& p, int device, void* stream);
const char* shard_norm_finish(const ShardNorm& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
