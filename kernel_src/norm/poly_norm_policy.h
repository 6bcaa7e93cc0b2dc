// How poly_norm kernels are laid out on a GPU: pure functions of the device, the element types and
// the shape.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "norm/poly_norm.h"

namespace fuselage {

// Whether every row of every tensor starts and ends on a 16-byte boundary.
inline bool is_aligned(const PolyNormForward& p) {
  return aligned_rows(p.out, p.dim, p.dim, p.dtype) &&
         aligned_rows(p.x, p.x_stride, p.dim, p.dtype) &&
         aligned_rows(p.mul, p.mul_stride, p.dim, p.dtype);
}

inline bool is_aligned(const PolyNormBackward& p) {
  return aligned_rows(p.grad_out, p.grad_out_stride, p.dim, p.dtype) &&
         aligned_rows(p.x, p.x_stride, p.dim, p.dtype) &&
         aligned_rows(p.mul, p.mul_stride, p.dim, p.dtype) &&
         aligned_rows(p.grad_x, p.grad_x_stride, p.dim, p.dtype) &&
         aligned_rows(p.grad_mul, p.grad_mul_stride, p.dim, p.dtype);
}

constexpr int kPolyNormVectors = 4;        // of a row in a thread, at most
constexpr int kPolyNormLongThreads = 512;  // of a block, at most

// Threads of a block that has a row by itself, at most: longer rows are cut over a cluster. Two
// blocks or more must fit on a multiprocessor, so that one loads while the other adds up. On an
// H200, bfloat16, (8192, 14336): the plain backward takes 201 us with one block a row, 289 with
// two; the forward with mul 184 us with two blocks a row, 210 with one.
constexpr int poly_norm_threads(bool has_mul) { return has_mul ? 256 : kPolyNormLongThreads; }

// Threads of a block of short rows.
constexpr int kPolyNormShortThreads = 128;

// Where rows are cut over the blocks of a cluster, each block has at most this many vectors if it
// can.
constexpr int64_t kPolyNormClusterVectors = 1024;

// A block holds rows of up to `block_threads` threads by itself. `several_rows`: whether a thread
// may have several short ones.
inline RowPolicy poly_norm_row_policy(const DeviceInfo& device, int element_size, int64_t dim,
                                      int block_threads, bool several_rows) {
  const int64_t count = ceil_div(dim, 16 / element_size);
  RowPolicy policy{};
  policy.vectors = kPolyNormVectors;
  policy.rows_per_thread = policy.rows_per_block = policy.cluster = 1;
  // Four 16-byte loads of each input in flight a thread, as in rms_norm's forward.
  if (several_rows && count <= kWarpSize) {
    policy.vectors = 1;
    policy.rows_per_thread = 4;
  } else if (several_rows && count <= 2 * kWarpSize) {
    policy.vectors = 2;
    policy.rows_per_thread = 2;
  }
  if (count > int64_t{block_threads} * kPolyNormVectors)
    policy.cluster = cluster_for(device, count, kPolyNormClusterVectors);
  const int64_t block_count = ceil_div(count, policy.cluster);
  policy.streamed = block_count > kPolyNormLongThreads * kPolyNormVectors;
  if (policy.streamed) {
    policy.cluster = 1;
    policy.threads_per_row = kPolyNormLongThreads;
    return policy;
  }
  // A thread looks after the sums of one of its rows.
  policy.threads_per_row =
      std::max(threads_for(block_count, policy.vectors), policy.rows_per_thread);
  if (policy.threads_per_row <= kWarpSize)
    policy.rows_per_block = kPolyNormShortThreads / policy.threads_per_row;
  return policy;
}

inline RowPolicy poly_norm_forward_policy(const DeviceInfo& device, const PolyNormForward& p) {
  return poly_norm_row_policy(device, dtype_size(p.dtype), p.dim,
                              poly_norm_threads(p.mul != nullptr), p.offs == nullptr);
}

// The most partial sums of the weight gradient: a block of the second kernel reads four a thread.
// With more blocks of rows than that, each block takes several of them.
constexpr int64_t kPolyNormPartials = 4096;

struct PolyNormBackwardPolicy {
  RowPolicy row;
  int64_t groups;  // blocks, or clusters of them
};

inline PolyNormBackwardPolicy poly_norm_backward_policy(const DeviceInfo& device,
                                                        const PolyNormBackward& p) {
  PolyNormBackwardPolicy policy{};
  const bool grouped = p.offs != nullptr;
  policy.row = poly_norm_row_policy(device, dtype_size(p.dtype), p.dim,
                                    poly_norm_threads(p.mul != nullptr), !grouped);
  const int64_t rows_at_once = int64_t{policy.row.rows_per_block} * policy.row.rows_per_thread;
  policy.groups = ceil_div(p.rows, rows_at_once);
  // Rows of experts leave a partial sum each.
  if (!grouped) policy.groups = ceil_div(policy.groups, ceil_div(policy.groups, kPolyNormPartials));
  return policy;
}

// Threads of the second kernel's blocks, one an expert. Of experts the host does not know how many
// rows they have: the largest may have many times the mean.
inline int poly_norm_weight_threads(const PolyNormBackward& p) {
  const int threads = threads_for(ceil_div(p.partial_count, p.experts), 4);
  return std::clamp(threads, p.offs != nullptr ? 256 : 1, 1024);
}

}  // namespace fuselage
