// What the launch policies of all families share: how a row is laid out over threads, and the
// arithmetic of it. Policies are plain C++: tests sweep them over made-up devices
// (tests/test_policies.py).
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/device_info.h"

namespace fuselage {

// One row belongs to `threads_per_row` threads in each of `cluster` blocks; a thread has `vectors`
// vectors of it, for `rows_per_thread` rows at once. Rows too long for that are `streamed`: read
// twice, the second time from cache.
struct RowPolicy {
  int vectors;
  int rows_per_thread;
  int threads_per_row;
  int rows_per_block;  // rows side by side in one block
  int cluster;
  bool streamed;
};

// Along the second and third dimension of a grid.
constexpr int64_t kMostBlocksAlongY = 65535;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int next_power_of_two(int64_t n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Threads for a row of `count` vectors at `vectors` a thread: a power of two within a warp, whole
// warps beyond.
inline int threads_for(int64_t count, int vectors) {
  const int64_t threads = ceil_div(count, vectors);
  if (threads <= kWarpSize) return next_power_of_two(threads);
  return static_cast<int>(ceil_div(threads, kWarpSize) * kWarpSize);
}

// Blocks to cut a row of `count` vectors over, so that each has `wanted` vectors or fewer: one
// where the GPU has no clusters.
inline int cluster_for(const DeviceInfo& device, int64_t count, int64_t wanted) {
  if (!device.has_clusters) return 1;
  return std::min(next_power_of_two(ceil_div(count, wanted)), kMaxCluster);
}

}  // namespace fuselage
