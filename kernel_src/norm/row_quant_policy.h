// How norms that quantise their result (norm/row_quant.h) are laid out on a GPU: pure functions of
// the device and the shape.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "common/quant.h"
#include "norm/row_forward_policy.h"

namespace fuselage {

// Whether one kernel does both: aligned rows of half precision that a block holds, to
// float8_e4m3fn. Others are written out by the norm's kernel, and quantised by quant_fp8's.
template <typename Forward>
inline bool is_one_kernel(const Quantised<Forward>& p) {
  const QuantForward& quant = p.quant;
  return is_aligned(p) && aligned_rows(quant.q, p.dim, p.dim, 1, 8) &&
         quant.format == QuantFormat::e4m3 && dtype_size(quant.x_dtype) == 2 &&
         ceil_div(p.dim, 8) <= int64_t{kForwardThreads} * kForwardVectors;
}

// A row of several vectors a thread, or of one where all rows are on the GPU at once. Neither the
// row's sums nor its maximum depend on that. `most_vectors`: whether there is a kernel with
// kForwardMostVectors.
inline RowPolicy row_quant_policy(const DeviceInfo& device, int64_t rows, int64_t dim,
                                  bool most_vectors) {
  const int64_t count = ceil_div(dim, 8);
  RowPolicy policy{1, 1, threads_for(count, 1), 1, 1, false};
  const bool few_rows = policy.threads_per_row <= kForwardThreads &&
                        rows * policy.threads_per_row <=
                            int64_t{device.multiprocessors} * device.tuning.norm_resident_threads;
  if (count > kWarpSize && !few_rows) {
    most_vectors = most_vectors && most_vectors_pay(device, rows, count);
    policy.vectors = most_vectors ? kForwardMostVectors : kForwardVectors;
    policy.threads_per_row = std::max(threads_for(count, policy.vectors), kWarpSize);
  }
  if (policy.threads_per_row <= kWarpSize)
    policy.rows_per_block = kForwardShortThreads / policy.threads_per_row;
  return policy;
}

}  // namespace fuselage
