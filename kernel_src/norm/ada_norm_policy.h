// How the kernels of layer_norm and the adaptive norms are laid out on a GPU: pure functions of the device, the
// element types, the shape, and which tensors there are.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "norm/ada_norm.h"
#include "norm/row_forward_policy.h"

namespace fuselage {

// Whether every row of every tensor starts and ends on a 16-byte boundary.
inline bool is_aligned(const AdaNormForward& p) {
  const auto rows = [&](const void* data, int64_t stride) {
    return aligned_rows(data, stride, p.dim, p.dtype);
  };
  const auto modulation = [&](const Modulation& m) {
    return aligned_rows(m.data, m.stride, p.dim, m.dtype);
  };
  return rows(p.x, p.x_stride) && rows(p.residual, p.residual_stride) &&
         rows(p.new_residual, p.dim) && rows(p.out, p.dim) && modulation(p.gate) &&
         modulation(p.scale) && modulation(p.shift) &&
         aligned_rows(p.weight.data, 0, p.dim, p.weight.dtype) &&
         aligned_rows(p.bias.data, 0, p.dim, p.bias.dtype);
}

inline bool is_aligned(const AdaNormBackward& p) {
  const auto rows = [&](const void* data, int64_t stride) {
    return aligned_rows(data, stride, p.dim, p.dtype);
  };
  const auto modulation = [&](const Modulation& m) {
    return aligned_rows(m.data, m.stride, p.dim, m.dtype);
  };
  return rows(p.grad_out, p.grad_out_stride) &&
         rows(p.grad_new_residual, p.grad_new_residual_stride) && rows(p.s, p.s_stride) &&
         rows(p.x, p.x_stride) && modulation(p.gate) && modulation(p.scale) &&
         aligned_rows(p.weight.data, 0, p.dim, p.weight.dtype) &&
         aligned_rows(p.bias.data, 0, p.dim, p.bias.dtype) && rows(p.grad_x, p.dim) &&
         rows(p.grad_residual, p.dim) && rows(p.grad_gate, p.dim) && rows(p.grad_scale, p.dim) &&
         rows(p.grad_shift, p.dim);
}

constexpr int kAdaNormThreads = 512;  // of a block, at most

inline RowPolicy ada_norm_forward_policy(const DeviceInfo& device, bool aligned,
                                         const AdaNormForward& p) {
  return row_forward_policy(device, {p.rows, p.dim, dtype_size(p.dtype), aligned});
}

// Columns of a row in a thread of the backward, which keeps their sums (up to three a column) in registers.
constexpr int kAdaNormColumns = 16;
constexpr int kAdaNormMaxStages = 4;
constexpr int kAdaNormStageBytes = 96 * 1024;  // of rows under way in a block

struct AdaNormBackwardPolicy {
  RowPolicy row;
  int stages;                // rows under way between global and shared memory
  int shared_bytes;          // dynamic shared memory of a block
  int64_t blocks_per_group;  // or clusters of them; each leaves one row of every partial sum
};

// `tensors`: that are read, of two to four.
inline AdaNormBackwardPolicy ada_norm_backward_policy(const DeviceInfo& device, bool aligned,
                                                      int tensors, const AdaNormBackward& p) {
  AdaNormBackwardPolicy policy{};
  RowPolicy& row = policy.row;
  const int64_t groups = p.rows / p.group_rows;
  const int64_t threads = ceil_div(p.dim, kAdaNormColumns);
  const int shared_bytes = device.max_shared_memory - 4096;  // less the kernel's own arrays
  const int bytes_per_thread = tensors * kAdaNormColumns * dtype_size(p.dtype);  // of a stage
  const int factor_bytes = kAdaNormColumns * static_cast<int>(sizeof(float));    // of a thread
  // Where shared memory is small, blocks have fewer threads.
  int block_threads = kAdaNormThreads;
  while (block_threads > kWarpSize &&
         block_threads * (bytes_per_thread + factor_bytes) > shared_bytes)
    block_threads -= kWarpSize;
  row = {1, 1, kAdaNormThreads, 1, 1, false};
  if (threads > block_threads) row.cluster = cluster_for(device, threads, block_threads);
  const int64_t threads_each = threads_for(ceil_div(threads, row.cluster), 1);
  row.streamed = threads_each > block_threads;
  if (row.streamed) {
    row.cluster = 1;
    policy.blocks_per_group = std::clamp<int64_t>(64 / groups, 1, p.group_rows);
    return policy;
  }
  row.threads_per_row = static_cast<int>(threads_each);
  // As many rows side by side as there are for each multiprocessor, and threads for.
  if (row.cluster == 1) {
    const int64_t rows_each =
        ceil_div(p.group_rows, std::max<int64_t>(1, device.multiprocessors / groups));
    row.rows_per_block =
        static_cast<int>(std::clamp<int64_t>(rows_each, 1, block_threads / row.threads_per_row));
  }
  const int threads_of_block = row.rows_per_block * row.threads_per_row;
  const int stage_bytes = threads_of_block * bytes_per_thread;
  const int shared_factors = threads_of_block * factor_bytes;
  policy.stages = 1;
  if (aligned) {
    policy.stages =
        std::clamp(std::min(kAdaNormStageBytes, shared_bytes - shared_factors) / stage_bytes, 1,
                   kAdaNormMaxStages);
  }
  // At the end the same memory holds the sums of the block's rows, one kind after the other.
  policy.shared_bytes = policy.stages * stage_bytes + shared_factors;
  policy.blocks_per_group = std::clamp<int64_t>(device.multiprocessors / row.cluster / groups, 1,
                                                ceil_div(p.group_rows, row.rows_per_block));
  return policy;
}

}  // namespace fuselage
