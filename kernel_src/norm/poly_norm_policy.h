// How poly_norm kernels are laid out on a GPU: pure functions of the device, the element types and
// the shape.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "norm/poly_norm.h"
#include "norm/row_backward_policy.h"

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

// Up to so many a backward that holds rows in registers has two blocks or more on a multiprocessor:
// one loads while others add up.
constexpr int kPolyNormThreads = 256;

// Threads of a block of short rows.
constexpr int kPolyNormShortThreads = 128;

// A block holds rows of up to kPolyNormLongThreads by itself; longer ones are cut over a cluster.
// `several_rows`: whether a thread may have several short ones.
inline RowPolicy poly_norm_row_policy(const DeviceInfo& device, int element_size, int64_t dim,
                                      bool several_rows) {
  constexpr int64_t kBlockVectors = int64_t{kPolyNormLongThreads} * kPolyNormVectors;
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
  if (count > kBlockVectors) policy.cluster = cluster_for(device, count, kBlockVectors);
  const int64_t block_count = ceil_div(count, policy.cluster);
  policy.streamed = block_count > kBlockVectors;
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

struct PolyNormForwardPolicy {
  RowPolicy row;
  int64_t groups;    // blocks, or clusters of them
  int stages;        // rows under way to shared memory; 0 where rows are held in registers
  int shared_bytes;  // dynamic shared memory of a block
};

// Stages pay where two blocks that hold rows have too little under way: rows of more than 384
// threads, in half precision and without mul, which are many. On an H200, bfloat16: (8192, 14336)
// takes 126 us so, and 136 without; (2048, 32768), clusters of two, 77 and 93; but (6096, 11008) 74
// and 74, (1024, 65536), clusters of four that wait for each other every row, 110 and 102.
inline bool poly_norm_forward_stages_pay(const DeviceInfo& device, const PolyNormForward& p,
                                         const RowPolicy& row, int64_t blocks) {
  return device.has_bulk_copy && p.mul == nullptr && dtype_size(p.dtype) == 2 && is_aligned(p) &&
         !row.streamed && row.cluster <= 2 && row.threads_per_row > 384 &&
         p.rows * row.cluster > 2 * blocks;
}

inline PolyNormForwardPolicy poly_norm_forward_policy(const DeviceInfo& device,
                                                      const PolyNormForward& p) {
  PolyNormForwardPolicy policy{};
  RowPolicy& row = policy.row;
  row = poly_norm_row_policy(device, dtype_size(p.dtype), p.dim, p.offs == nullptr);
  policy.groups = ceil_div(p.rows, int64_t{row.rows_per_block} * row.rows_per_thread);
  const int64_t blocks = int64_t{2} * device.multiprocessors;
  const int stages = row.cluster == 1 ? 2 : 3;
  const int bytes = stages * row.threads_per_row * row.vectors * 16;
  if (poly_norm_forward_stages_pay(device, p, row, blocks) &&
      bytes <= device.max_shared_memory / 2 - kRowBackwardArrayBytes) {
    policy.groups = blocks / row.cluster;
    policy.stages = stages;
    policy.shared_bytes = bytes;
  }
  return policy;
}

// The most partial sums of the weight gradient: a block of the second kernel reads four a thread.
// With more blocks of rows than that, each block takes several of them.
constexpr int64_t kPolyNormPartials = 4096;

struct PolyNormBackwardPolicy {
  RowPolicy row;
  int64_t groups;    // blocks, or clusters of them
  int stages;        // rows under way to shared memory; 0 where rows are held in registers
  int shared_bytes;  // dynamic shared memory of a block
};

// What a block with stages is given: as the norms' backwards, but rows have no factors, and their
// sums are not kept by column.
inline RowBackwardShape poly_norm_backward_shape(const PolyNormBackward& p) {
  RowBackwardShape shape{};
  shape.groups = 1;
  shape.group_rows = p.rows;
  shape.dim = p.dim;
  shape.aligned = is_aligned(p);
  shape.element_size = shape.grad_out_size = dtype_size(p.dtype);
  shape.tensors = p.mul != nullptr ? 3 : 2;
  shape.threads = kPolyNormLongThreads;
  shape.max_columns = kPolyNormVectors * 16 / shape.element_size;
  shape.bulk = true;
  shape.bulk_turns = 2;
  // NOTE: measured on an H200, bfloat16, as is bulk_bytes. With mul (16384, 4096) takes 168 us with
  // two rows side by side in three stages, and 185 with four in two; (13107, 5120) takes 169 with
  // two, and 182 with three. Without, of as many rows as fit, (4096, 16384) takes 101 us in three
  // stages and 114 in two, but float32 (16384, 4096) 215 and 196.
  if (p.mul != nullptr) shape.bulk_row_bytes = 48 << 10;
  shape.bulk_bytes = (p.mul != nullptr ? 190 : shape.element_size == 2 ? 192 : 184) << 10;
  return shape;
}

// Whether registers take less time than stages. Blocks of a large cluster wait for each other every
// row, which only other clusters on the multiprocessor hide: (512, 131072) takes 260 us on an H200
// with stages, 143 without. The expert of a row is found when its turn comes: 303 us, and 187, of
// (16384, 4096) of 64 experts. float32 of (16384, 4096) with mul: 344 and 327.
inline bool holds_better(const PolyNormBackward& p, const RowPolicy& row) {
  return row.cluster > 2 || p.offs != nullptr ||
         (p.mul != nullptr && p.dtype == DType::float32 && row.threads_per_row <= kPolyNormThreads);
}

inline PolyNormBackwardPolicy poly_norm_backward_policy(const DeviceInfo& device,
                                                        const PolyNormBackward& p) {
  PolyNormBackwardPolicy policy{};
  const bool grouped = p.offs != nullptr;
  policy.row = poly_norm_row_policy(device, dtype_size(p.dtype), p.dim, !grouped);
  const RowBackwardPolicy staged = row_backward_policy(device, poly_norm_backward_shape(p));
  // NOTE: the order of a row's sums does not depend on the number of rows. Where shared memory is
  // small, a block with stages may have fewer threads.
  const bool same_order = staged.row.cluster == policy.row.cluster &&
                          staged.row.threads_per_row == policy.row.threads_per_row;
  if (staged.bulk && same_order && !holds_better(p, staged.row)) {
    policy.row = staged.row;
    policy.groups = staged.blocks_per_group;
    policy.stages = staged.stages;
    policy.shared_bytes = staged.shared_bytes;
    return policy;
  }
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
