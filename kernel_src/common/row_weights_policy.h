// How rows of logits are laid out whose weights are added up (common/row_weights.h): a pure
// function of the device and the shape.
#pragma once

#include <algorithm>

#include "common/launch_policy.h"

namespace fuselage {

// A row is read twice: for the maximum, and for the weights. The blocks of a cluster have a part of
// it each, and keep what they can of that in shared memory. What they cannot is read again, from L2
// mostly.
constexpr int kWeightThreads = 512;          // of a block, at most
constexpr int kWeightVectors = 2;            // 16-byte loads of a thread in flight
constexpr int kWeightWanted = 40000;         // logits of a row for one block
constexpr int kWeightWantedOfFew = 16384;    // where rows are few
constexpr int kWeightFixedBytes = 4 * 1024;  // of a block, besides what it keeps
constexpr int kWeightBlocks = 2;             // of kWeightThreads, on an SM
constexpr int kWeightNarrowRows = 4;         // of a block where a warp has a row

struct RowWeightsPolicy {
  int threads, rows_per_block;
  int cluster;
  int part;  // logits of a row for one block, whole vectors
  int kept;  // steps of kWeightVectors vectors a thread that are kept
  int shared_bytes;
};

// `any_order`: the layout may depend on the rows, as no float is added up.
inline RowWeightsPolicy row_weights_policy(const DeviceInfo& device, int64_t rows, int64_t vocab,
                                           int vector_size, bool any_order) {
  RowWeightsPolicy policy{};
  // Blocks of a cluster wait for each other, and one that computes loads nothing: many rows take
  // small clusters of small blocks, few rows large ones. On an H200, bfloat16, (8192, 151936) takes
  // 1672 us so and 2980 with large ones, (1, 151936) 19.5 and 11.7.
  const int64_t count = std::max<int64_t>(vocab, 1);
  const int large = cluster_for(device, count, kWeightWantedOfFew);
  const bool is_few = any_order && rows * large <= kWeightBlocks * device.multiprocessors;
  policy.cluster = is_few ? large : cluster_for(device, count, kWeightWanted);
  // Of rows between these, as many blocks as run at once.
  while (any_order && 2 * policy.cluster <= large &&
         rows * policy.cluster <= kWeightBlocks * device.multiprocessors) {
    policy.cluster *= 2;
  }
  const int most_threads = is_few ? kWeightThreads : kWeightThreads / 2;
  const int blocks = kWeightBlocks * kWeightThreads / most_threads;
  const int64_t vectors =
      std::max<int64_t>(ceil_div(ceil_div(vocab, policy.cluster), vector_size), 1);
  policy.part = static_cast<int>(vectors) * vector_size;
  policy.threads = std::clamp(threads_for(std::min<int64_t>(vectors, 1 << 16), kWeightVectors),
                              kWarpSize, most_threads);
  policy.rows_per_block = policy.threads == kWarpSize ? kWeightNarrowRows : 1;
  const int step_bytes = policy.threads * policy.rows_per_block * kWeightVectors * 16;
  const int room = device.max_shared_memory / blocks - kWeightFixedBytes;
  const int64_t steps = ceil_div(vectors, int64_t{policy.threads} * kWeightVectors);
  policy.kept = static_cast<int>(std::min<int64_t>(steps, std::max(room, 0) / step_bytes));
  policy.shared_bytes = policy.kept * step_bytes;
  return policy;
}

}  // namespace fuselage
