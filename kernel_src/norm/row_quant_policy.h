// How norms that quantise their result (norm/row_quant.h) are laid out on a GPU: pure functions of
// the device and the shape.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "common/quant.h"
#include "norm/row_forward_policy.h"

namespace fuselage {

// Whether every row starts and ends on a boundary: q's of 8 bytes, which are a vector's.
template <typename Forward>
inline bool is_aligned(const Quantised<Forward>& p) {
  return is_aligned(static_cast<const Forward&>(p)) && aligned_rows(p.quant.q, p.dim, p.dim, 1, 8);
}

// Whether one kernel does both: rows of half precision that a block holds, to float8_e4m3fn. Others
// are written out by the norm's kernel, and quantised by quant_fp8's; so are unaligned rows of a
// warp's first vectors, which are rare.
template <typename Forward>
inline bool is_one_kernel(const Quantised<Forward>& p) {
  const int64_t count = ceil_div(p.dim, 8);
  return p.quant.format == QuantFormat::e4m3 && dtype_size(p.quant.x_dtype) == 2 &&
         count <= int64_t{kForwardThreads} * kForwardVectors &&
         (count > kWarpSize || is_aligned(p));
}

// A row of several vectors a thread; where all rows are on the GPU at once, of two, or of one if
// that is no more than two warps. Neither the row's sums nor its maximum depend on that. On an
// H200, bfloat16: layer_norm_quant of (256, 4096) takes 5.1 us with one, 4.4 with two and 4.9 with
// four; rms_norm_quant of (8, 4096) 2.6, 2.4 and 2.6.
// `most_vectors`: whether there is a kernel with kForwardMostVectors. What a thread does besides
// its vectors is more here than in the norm alone: eight pay for longer rows, too, where no thread
// has fewer. On an H100, bfloat16: layer_norm_quant of (16384, 4096) takes 77.5 us with four and
// 73.5 with eight, (8192, 8192) 81 and 75; but (16384, 3072) 61 and 72, (4096, 4096) 23.5 and 24.9.
// Unaligned rows have one kernel, of four.
inline RowPolicy row_quant_policy(const DeviceInfo& device, int64_t rows, int64_t dim, bool aligned,
                                  bool most_vectors) {
  const int64_t count = ceil_div(dim, 8);
  RowPolicy policy{1, 1, threads_for(count, 1), 1, 1, false};
  most_vectors &= aligned;
  const bool few_rows = aligned && policy.threads_per_row <= kForwardThreads &&
                        rows * policy.threads_per_row <=
                            int64_t{device.multiprocessors} * device.tuning.norm_resident_threads;
  if (few_rows && count > 2 * kWarpSize) {
    policy.vectors = 2;
    policy.threads_per_row = threads_for(count, 2);
  } else if (count > kWarpSize && !few_rows) {
    const bool full = count % (kWarpSize * kForwardMostVectors) == 0 &&
                      has_rows_for_most_vectors(device, rows, count);
    most_vectors = most_vectors && (full || most_vectors_pay(device, rows, count));
    policy.vectors = most_vectors ? kForwardMostVectors : kForwardVectors;
    policy.threads_per_row = std::max(threads_for(count, policy.vectors), kWarpSize);
  }
  if (policy.threads_per_row <= kWarpSize)
    policy.rows_per_block = kForwardShortThreads / policy.threads_per_row;
  return policy;
}

}  // namespace fuselage
