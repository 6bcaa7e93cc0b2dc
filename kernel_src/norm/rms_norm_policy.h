// How rms_norm kernels are laid out on a GPU: pure functions of the device, the element types and
// the shape.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "norm/rms_norm.h"
#include "norm/row_backward_policy.h"
#include "norm/row_forward_policy.h"

namespace fuselage {

// Whether every row of every tensor starts and ends on a 16-byte boundary.
inline bool is_aligned(const RmsNormForward& p) {
  return aligned_rows(p.x, p.x_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.residual, p.residual_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.new_residual, p.new_residual_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.out, p.out_stride, p.dim, p.out_dtype) &&
         aligned_rows(p.weight, 0, p.dim, p.weight_dtype);
}

inline bool is_aligned(const RmsNormBackward& p) {
  return aligned_rows(p.x, p.x_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.grad_out, p.grad_out_stride, p.dim, p.out_dtype) &&
         aligned_rows(p.grad_new_residual, p.grad_new_residual_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.grad_x, p.dim, p.dim, p.x_dtype) &&
         aligned_rows(p.weight, 0, p.dim, p.weight_dtype);
}

// Rows of two types pass through shared memory as unaligned ones do: few callers have them.
template <typename Params>
inline bool has_aligned_kernel(const Params& p) {
  return is_aligned(p) && p.x_dtype == p.out_dtype;
}

constexpr int kMaxThreads = 512;  // as the kernels' launch bounds

inline RowPolicy rms_norm_forward_policy(const DeviceInfo& device, bool aligned,
                                         const RmsNormForward& p) {
  const bool light = p.residual == nullptr;
  return row_forward_policy(device, {p.rows, p.dim, dtype_size(p.x_dtype), aligned, false, light});
}

// A thread of the backward accumulates the weight gradient of its columns in registers.
constexpr int kBackwardThreads = 512;
constexpr int kBackwardColumns = 32;
constexpr int kMaxStages = 4;

struct BackwardPolicy {
  RowPolicy row;
  bool bulk;          // whole rows are copied by one thread
  int stages;         // rows under way between global and shared memory
  int shared_bytes;   // dynamic shared memory of a block
  int blocks;         // persistent blocks; each cluster of them leaves one row of weight partials
  int column_blocks;  // that make the weight gradient themselves: no partial sums then
};

inline BackwardPolicy rms_norm_backward_policy(const DeviceInfo& real_device, bool aligned,
                                               const RmsNormBackward& p) {
  DeviceInfo device = real_device;
  const int x_size = dtype_size(p.x_dtype), out_size = dtype_size(p.out_dtype);
  const bool has_grad_new_residual = p.grad_new_residual != nullptr;
  const int64_t rows = p.rows, dim = p.dim;
  BackwardPolicy policy{};
  RowPolicy& row = policy.row;
  row = {1, 1, kMaxThreads, 1, 1, false};  // if it is streamed
  const int vector_size = 16 / x_size;
  // Less the kernel's own arrays, and rstd of each thread's rows.
  const int rstd_bytes = kBackwardThreads * static_cast<int>(sizeof(float));
  const int shared_bytes = device.max_shared_memory - 1024 - kMaxStages * rstd_bytes;
  const int x_reads = has_grad_new_residual ? 2 : 1;
  // Bytes of one stage of `rows` rows of `threads` * `vectors` vectors. Aligned stages have room
  // for all threads a block may have.
  const auto tensor_bytes_of = [&](int rows, int threads, int vectors) {
    return rows * staged_bytes(threads * vectors * vector_size, std::max(x_size, out_size));
  };
  const auto stage_bytes_of = [&](int rows, int threads, int vectors) {
    if (aligned) return kBackwardThreads * vectors * vector_size * (x_reads * x_size + out_size);
    return (x_reads + 1) * tensor_bytes_of(rows, threads, vectors);
  };
  const int least_stages = aligned ? 1 : 2;
  // Unaligned rows need two stages, and room for grad_x on its way out.
  const auto least_bytes_of = [&](int rows, int threads, int vectors) {
    return least_stages * stage_bytes_of(rows, threads, vectors) +
           (aligned ? 0 : tensor_bytes_of(rows, threads, vectors));
  };

  const int64_t count = ceil_div(dim, vector_size);
  // Where shared memory is small, threads have fewer vectors (aligned) or rows fewer threads.
  int most_vectors = kBackwardColumns / vector_size;
  int block_threads = kBackwardThreads;
  while (aligned && most_vectors > 1 &&
         least_bytes_of(1, block_threads, most_vectors) > shared_bytes) {
    most_vectors /= 2;
  }
  while (!aligned && block_threads > kWarpSize &&
         least_bytes_of(1, block_threads, most_vectors) > shared_bytes) {
    block_threads -= kWarpSize;
  }
  const int64_t block_limit = int64_t{block_threads} * most_vectors;
  // Kernels of clusters have the most vectors alone.
  if (count > block_limit && most_vectors == kBackwardColumns / vector_size)
    row.cluster = cluster_for(device, count, block_limit);
  const int64_t block_count = ceil_div(count, row.cluster);
  row.streamed = block_count > block_limit;
  if (row.streamed) {
    row.cluster = 1;
    policy.blocks = static_cast<int>(std::min<int64_t>(rows, 32));
    return policy;
  }
  row.vectors = most_vectors;
  while (row.vectors > 1 && block_count <= kWarpSize * row.vectors / 2) row.vectors /= 2;
  row.threads_per_row = threads_for(block_count, row.vectors);
  // Where rows are few, the weight gradient is made by blocks of their own. Rows of two types are
  // too rare for them.
  const int64_t most_rows = row.cluster > 1 ? 1 : kBackwardThreads / row.threads_per_row;
  if (p.grad_weight != nullptr && p.x_dtype == p.out_dtype) {
    constexpr int kSteps = 8;
    policy.column_blocks = column_blocks_for(
        device,
        {1, rows, dim, vector_size, aligned, row.cluster, row.threads_per_row, most_rows, kSteps});
    device.multiprocessors -= policy.column_blocks;
  }
  // As many rows side by side as there are for each multiprocessor, threads for, and room for two
  // stages.
  if (row.cluster == 1) {
    int64_t rows_each = ceil_div(rows, device.multiprocessors);
    if (policy.column_blocks > 0)
      rows_each = std::max(rows_each, least_rows_beside_columns(rows, row.threads_per_row));
    row.rows_per_block = static_cast<int>(std::clamp<int64_t>(rows_each, 1, most_rows));
    while (!aligned && row.rows_per_block > 1 &&
           least_bytes_of(row.rows_per_block, row.threads_per_row, row.vectors) > shared_bytes) {
      --row.rows_per_block;
    }
  }
  // Bulk copies pay where a block has rows enough to copy ahead. Their kernels have the most
  // vectors a thread.
  const auto bulk_bytes_of = [&](int rows) {
    return rows * row.threads_per_row * row.vectors * vector_size * (x_reads * x_size + out_size);
  };
  const int64_t turns =
      ceil_div(rows * row.cluster, int64_t{device.multiprocessors} * row.rows_per_block);
  policy.bulk = aligned && device.has_bulk_copy && row.threads_per_row > kWarpSize && turns > 2 &&
                policy.column_blocks == 0 && 2 * bulk_bytes_of(1) <= shared_bytes;
  while (policy.bulk && 2 * bulk_bytes_of(row.rows_per_block) > shared_bytes) --row.rows_per_block;
  const int stage_bytes =
      policy.bulk ? bulk_bytes_of(row.rows_per_block)
                  : stage_bytes_of(row.rows_per_block, row.threads_per_row, row.vectors);
  // NOTE: measured on an H200, bfloat16. Copying further ahead is slower with two inputs: it does
  // not depend on the way of copying, nor on the arithmetic, and some multiprocessors then end a
  // third earlier than others. Bulk copies of (16384, 4096) take 109 us with two stages, 115 with
  // three; of (9362, 7168) 106 and 117. Others take 105 us with one stage, 113 with two; (32768,
  // 1024) 56 with one. With three inputs two stages are best, for short rows four: (1048576, 128)
  // takes 293, 214, and 196 with four. Blocks of a cluster wait for each other every row, which
  // more stages hide: (512, 131072) takes 206 us with two, 178 with three.
  int stages = kMaxStages;
  if (policy.bulk && row.cluster == 1) {
    stages = 2;
  } else if (row.vectors == most_vectors && !has_grad_new_residual && row.cluster == 1) {
    stages = 1;
  }
  const int out_bytes =
      aligned ? 0 : tensor_bytes_of(row.rows_per_block, row.threads_per_row, row.vectors);
  policy.stages =
      std::max(std::min((shared_bytes - out_bytes) / stage_bytes, stages), least_stages);
  // At the end the same memory holds the weight gradients of the block's rows, to add them up.
  const int columns = row.threads_per_row * row.vectors * vector_size;
  const int weight_bytes = row.rows_per_block * columns * static_cast<int>(sizeof(float));
  policy.shared_bytes =
      std::max(policy.stages * (stage_bytes + rstd_bytes) + out_bytes, weight_bytes);
  if (policy.column_blocks > 0) {
    const int threads = row.rows_per_block * row.threads_per_row;
    policy.shared_bytes = std::max(policy.shared_bytes, column_bytes(1, threads, vector_size));
  }
  const int64_t row_blocks = ceil_div(rows, row.rows_per_block);
  policy.blocks = static_cast<int>(std::min<int64_t>(
      row_blocks * row.cluster, std::max(device.multiprocessors / row.cluster, 1) * row.cluster));
  return policy;
}

}  // namespace fuselage
