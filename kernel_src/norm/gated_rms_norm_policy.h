// How gated_rms_norm kernels are laid out on a GPU: pure functions of the device, the element types
// and the shape.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "norm/gated_rms_norm.h"

namespace fuselage {

// Threads of a block, at most, by which the kernels get their registers; of a block whose groups
// have a warp or less; and 16-byte vectors of a group in a thread. The backward has registers for
// the sums of two, and copies rows ahead in shared memory.
constexpr int kGatedNormForwardThreads = 640, kGatedNormBackwardThreads = 512;
constexpr int kGatedNormShortThreads = 128;
constexpr int kGatedNormForwardVectors = 4, kGatedNormBackwardVectors = 2;

constexpr int kGatedNormTensors = 3;             // that the backward reads
constexpr int kGatedNormStages = 2;              // rows under way, with the one that is worked on
constexpr int kGatedNormArrayBytes = 1024;       // of shared memory, besides
constexpr int kGatedNormBlocksPerProcessor = 4;  // of the backward, at most

// Whether every group of every tensor starts and ends on a 16-byte boundary.
template <typename Params>
bool shared_tensors_are_aligned(const Params& p) {
  return aligned_rows(p.x, p.x_stride, p.dim, p.dtype) &&
         aligned_rows(p.gate, p.gate_stride, p.dim, p.dtype) &&
         aligned_rows(p.weight, 0, p.dim, p.weight_dtype);
}
inline bool is_aligned(const GatedRmsNormForward& p) {
  return shared_tensors_are_aligned(p) && aligned_rows(p.out, p.dim, p.dim, p.dtype);
}
inline bool is_aligned(const GatedRmsNormBackward& p) {
  return shared_tensors_are_aligned(p) &&
         aligned_rows(p.grad_out, p.grad_out_stride, p.dim, p.dtype) &&
         aligned_rows(p.grad_x, p.dim, p.dim, p.dtype) &&
         aligned_rows(p.grad_gate, p.dim, p.dim, p.dtype);
}

// Threads of a group, and so the order of its sums, follow from its columns alone. `streamed`: read
// twice, one vector after the other.
struct GatedRmsNormPolicy {
  int threads_per_row, rows_per_block;
  bool streamed;
  int64_t blocks;
};

inline GatedRmsNormPolicy gated_rms_norm_forward_policy(const GatedRmsNormForward& p) {
  GatedRmsNormPolicy policy{};
  const int threads =
      threads_for(ceil_div(p.dim, 16 / dtype_size(p.dtype)), kGatedNormForwardVectors);
  policy.streamed = !is_aligned(p) || threads > kGatedNormForwardThreads;
  policy.threads_per_row = std::min(threads, kGatedNormForwardThreads);
  policy.rows_per_block =
      policy.threads_per_row > kWarpSize ? 1 : kGatedNormShortThreads / policy.threads_per_row;
  policy.blocks = ceil_div(p.rows, policy.rows_per_block) * p.groups;
  return policy;
}

// Persistent blocks: `shares` of them have the rows of a group.
struct GatedRmsNormBackwardPolicy {
  GatedRmsNormPolicy row;
  int64_t shares;
  int64_t partials;  // that they leave of each group
  int shared_bytes;
};

inline GatedRmsNormBackwardPolicy gated_rms_norm_backward_policy(const DeviceInfo& device,
                                                                 const GatedRmsNormBackward& p) {
  const int vector_size = 16 / dtype_size(p.dtype);
  GatedRmsNormBackwardPolicy policy{};
  GatedRmsNormPolicy& row = policy.row;
  const int threads = threads_for(ceil_div(p.dim, vector_size), kGatedNormBackwardVectors);
  // Of a thread: its vectors of the rows under way, and its column sums at the end.
  const int stages = kGatedNormStages * kGatedNormTensors * kGatedNormBackwardVectors * 16;
  const int sums = kGatedNormBackwardVectors * vector_size * static_cast<int>(sizeof(float));
  const int bytes = std::max(stages, sums);
  const int most_threads =
      std::min(kGatedNormBackwardThreads,
               (device.max_shared_memory - kGatedNormArrayBytes) / bytes / 32 * 32);
  row.streamed = !is_aligned(p) || threads > most_threads;
  row.threads_per_row = std::min(threads, kGatedNormBackwardThreads);
  // A group has whole blocks: smaller ones where their number then is a multiple of the groups'.
  int each = 1;
  while (2 * each <= kGatedNormBlocksPerProcessor &&
         2 * each * row.threads_per_row <= kGatedNormBackwardThreads &&
         each * device.multiprocessors % p.groups != 0) {
    each *= 2;
  }
  const int64_t blocks = std::max<int64_t>(1, each * device.multiprocessors / p.groups);
  const int block_threads = (row.streamed ? kGatedNormBackwardThreads : most_threads) / each;
  const int64_t most_rows = std::max(1, block_threads / row.threads_per_row);
  row.rows_per_block =
      static_cast<int>(std::clamp<int64_t>(ceil_div(p.rows, blocks), 1, most_rows));
  policy.shares = std::min(ceil_div(p.rows, row.rows_per_block), blocks);
  row.blocks = policy.shares * p.groups;
  policy.partials = policy.shares * (row.streamed ? row.rows_per_block : 1);
  if (!row.streamed) policy.shared_bytes = row.rows_per_block * row.threads_per_row * bytes;
  return policy;
}

}  // namespace fuselage
