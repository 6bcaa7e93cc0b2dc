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
constexpr int kGatedNormForwardThreads = 1024, kGatedNormBackwardThreads = 512;
constexpr int kGatedNormShortThreads = 128;
constexpr int kGatedNormForwardVectors = 2, kGatedNormBackwardVectors = 2;
// Registers of a thread of the forward: of the kernels for one gate, and of others, which would
// spill some of so few. On an H200, bfloat16, gate first: (16384, 4096) takes 102 us with 48, and
// 106 with 64; 111 with four vectors a thread, and (64, 4096) 3.0 and 4.0. Norm first, long groups
// were faster with four: (4096, 10240) took 70 us, and takes 76.
constexpr int kGatedNormRegisters = 48, kGatedNormMoreRegisters = 64;

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

// Threads of a group, and so the order of its sums, follow from its columns alone. `anywhere`: of
// the kernel for groups that start anywhere, or are cut over a cluster. `streamed`: read twice, one
// vector after the other.
struct GatedRmsNormPolicy {
  int threads_per_row, rows_per_block, cluster;
  bool anywhere, streamed;
  int64_t blocks;  // or clusters
};

// Of a group of `count` vectors. NOTE: columns of all groups are counted in an int.
inline GatedRmsNormPolicy gated_rms_norm_row_policy(const DeviceInfo& device, int64_t count,
                                                    int vectors, int most_threads, bool aligned,
                                                    int64_t columns) {
  GatedRmsNormPolicy policy{};
  const int64_t limit = int64_t{most_threads} * vectors;
  policy.cluster = 1;
  if (count > limit) policy.cluster = cluster_for(device, count, limit);
  int64_t block_count = ceil_div(count, policy.cluster);
  policy.streamed = block_count > limit || columns > (1 << 30);
  if (policy.streamed) {
    policy.cluster = 1;
    block_count = limit;
  }
  policy.anywhere = !aligned || policy.cluster > 1;
  policy.threads_per_row = std::min(threads_for(block_count, vectors), most_threads);
  return policy;
}

inline GatedRmsNormPolicy gated_rms_norm_forward_policy(const DeviceInfo& device,
                                                        const GatedRmsNormForward& p) {
  GatedRmsNormPolicy policy = gated_rms_norm_row_policy(
      device, ceil_div(p.dim, 16 / dtype_size(p.dtype)), kGatedNormForwardVectors,
      kGatedNormForwardThreads, is_aligned(p), p.groups * p.dim);
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
  // Of a thread: its vectors of the rows under way, and its column sums at the end. Groups that
  // start anywhere have a vector more in each warp.
  const int64_t count = ceil_div(p.dim, vector_size);
  const int width = std::min(threads_for(count, kGatedNormBackwardVectors), kWarpSize);
  const int stages = kGatedNormStages * kGatedNormTensors * kGatedNormBackwardVectors * 16;
  const int sums = kGatedNormBackwardVectors * vector_size * static_cast<int>(sizeof(float));
  const int bytes = std::max(stages + stages / width, sums);
  const int most_threads =
      std::min(kGatedNormBackwardThreads,
               (device.max_shared_memory - kGatedNormArrayBytes) / bytes / 32 * 32);
  row = gated_rms_norm_row_policy(device, count, kGatedNormBackwardVectors, most_threads,
                                  is_aligned(p), p.groups * p.dim);
  // A group has whole blocks: smaller ones where their number then is a multiple of the groups'.
  int each = 1;
  while (2 * each <= kGatedNormBlocksPerProcessor &&
         2 * each * row.threads_per_row <= kGatedNormBackwardThreads &&
         each * device.multiprocessors % p.groups != 0) {
    each *= 2;
  }
  const int64_t blocks =
      std::max<int64_t>(1, each * device.multiprocessors / row.cluster / p.groups);
  const int block_threads = (row.streamed ? kGatedNormBackwardThreads : most_threads) / each;
  const int64_t most_rows = row.cluster > 1 ? 1 : std::max(1, block_threads / row.threads_per_row);
  row.rows_per_block =
      static_cast<int>(std::clamp<int64_t>(ceil_div(p.rows, blocks), 1, most_rows));
  policy.shares = std::min(ceil_div(p.rows, row.rows_per_block), blocks);
  row.blocks = policy.shares * p.groups;
  policy.partials = policy.shares * (row.streamed ? row.rows_per_block : 1);
  if (!row.streamed) {
    const int of_rows = row.anywhere ? stages + stages / width : stages;
    policy.shared_bytes = row.rows_per_block * row.threads_per_row * std::max(of_rows, sums);
  }
  return policy;
}

}  // namespace fuselage
