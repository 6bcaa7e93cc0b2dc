// How rows of logits are laid out whose weights are added up (common/row_weights.h): a pure
// function of the device and the shape.
#pragma once

#include <algorithm>

#include "common/launch_policy.h"
#include "common/strip.h"

namespace fuselage {

// A row is read once, by strips of kStrip logits; the blocks of a cluster have a part of it each. A
// thread has some strips at a time, and keeps of each the maximum, the sum of the weights and, if
// wanted, their mean distance (common/row_weights.h) in shared memory, as long as there is room for
// it. The others are made again.
constexpr int kWeightThreads = 512;          // of a block, at most
constexpr int kWeightWanted = 80000;         // logits of a row for one block
constexpr int kWeightSteps = 8;              // of a thread, at least, where rows are many
constexpr int kWeightWantedOfFew = 16384;    // where rows are few
constexpr int kStripsWanted = 1 << 20;       // the same, where strips are in memory
constexpr int kWeightFixedBytes = 4 * 1024;  // of a block, besides what it keeps
constexpr int kWeightBlocks = 2;             // of kWeightThreads, on an SM
constexpr int kWeightNarrowRows = 4;         // of a block where a warp has a row
constexpr int kStripsInFlight = 8;           // of a thread, where strips are in memory

struct RowWeightsPolicy {
  int threads, rows_per_block;
  int cluster;
  int part;  // logits of a row for one block, whole strips
  int kept;  // steps of a thread whose strips are kept
  int shared_bytes;
};

// `each`: strips of a thread at a time, 1 where they are made of logits. With means, floats are
// added up: the layout must not depend on the rows.
inline RowWeightsPolicy row_weights_policy(const DeviceInfo& device, int64_t rows, int64_t vocab,
                                           int each, bool has_means) {
  RowWeightsPolicy policy{};
  // Blocks of a cluster wait for each other, and one that starts, or joins its sums, loads nothing:
  // many rows take small clusters of small blocks, few rows large ones. In bfloat16, an H100 takes
  // for (8192, 151936) 988 us with blocks of 40000 logits, and 921 with these; for (16384, 4096)
  // 104 with one step a thread, 60 with four and 57 with eight.
  const int64_t count = std::max<int64_t>(vocab, 1);
  const int large = cluster_for(device, count, kWeightWantedOfFew);
  const bool is_few = !has_means && rows * large <= kWeightBlocks * device.multiprocessors;
  const int wanted = each > 1 ? kStripsWanted : kWeightWanted;
  policy.cluster = is_few ? large : cluster_for(device, count, wanted);
  // Of rows between these, as many blocks as run at once.
  while (!has_means && 2 * policy.cluster <= large &&
         rows * policy.cluster <= kWeightBlocks * device.multiprocessors) {
    policy.cluster *= 2;
  }
  const int most_threads = is_few ? kWeightThreads : kWeightThreads / 2;
  const int blocks = kWeightBlocks * kWeightThreads / most_threads;
  const int64_t all_strips = ceil_div(count, int64_t{kStrip});
  const int64_t strips = ceil_div(all_strips, int64_t{policy.cluster} * each) * each;
  policy.part = static_cast<int>(strips) * kStrip;
  const int least = is_few || each > 1 ? each : kWeightSteps;  // strips of a thread
  policy.threads =
      std::clamp(threads_for(std::min<int64_t>(strips, 1 << 16), least), kWarpSize, most_threads);
  policy.rows_per_block = policy.threads == kWarpSize ? kWeightNarrowRows : 1;
  const int strip_bytes = static_cast<int>(sizeof(StripSum) + (has_means ? sizeof(float) : 0));
  const int step_bytes = policy.threads * policy.rows_per_block * each * strip_bytes;
  const int room = device.max_shared_memory / blocks - kWeightFixedBytes;
  const int64_t steps = ceil_div(strips, int64_t{policy.threads} * each);
  policy.kept = static_cast<int>(std::min<int64_t>(steps, std::max(room, 0) / step_bytes));
  policy.shared_bytes = policy.kept * step_bytes;
  return policy;
}

}  // namespace fuselage
