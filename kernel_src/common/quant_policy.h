// How rows that are quantised are laid out on a GPU: pure functions of the shape. A maximum does
// not depend on the order, so neither do results.
#pragma once

#include <algorithm>

#include "common/launch_policy.h"

namespace fuselage {

constexpr int kQuantThreads = 1024;      // of a block, at most
constexpr int kQuantSliceThreads = 256;  // where rows are cut into slices
constexpr int kQuantShortThreads = 128;  // of a block with several rows
constexpr int kQuantVectors = 4;         // of a thread, where a row has more than a warp's
constexpr int64_t kMaxQuantBlocks = (int64_t{1} << 31) - 1;

// A row belongs to `threads_per_row` threads with `vectors` vectors each; or to as many of each of
// `slices` blocks, where it has no scale of its own.
struct QuantPolicy {
  int vectors;
  int threads_per_row;
  int rows_per_block;
  int64_t slices;
  bool for_many;  // one of the kernels for aligned rows of float8_e4m3fn
};

// `whole_rows`: a row has one scale, which is to be made. `for_many`: aligned rows of e4m3. Rows
// with one scale that are longer than a block have the kernel for all others, in which a thread
// takes one vector after the other.
inline QuantPolicy quant_policy(int64_t dim, int element_size, bool whole_rows, bool for_many) {
  const int64_t count = ceil_div(dim, 16 / element_size);
  if (whole_rows && count > int64_t{kQuantThreads} * kQuantVectors) for_many = false;
  QuantPolicy policy{for_many ? kQuantVectors : 1, kQuantThreads, 1, 1, for_many};
  if (for_many && count <= kWarpSize) {
    policy.vectors = 1;
    policy.threads_per_row = next_power_of_two(count);
    policy.rows_per_block = kQuantShortThreads / policy.threads_per_row;
    return policy;
  }
  const int64_t held = int64_t{whole_rows ? kQuantThreads : kQuantSliceThreads} * policy.vectors;
  if (!whole_rows) policy.slices = ceil_div(count, held);
  // A thread's vectors lie a warp apart.
  const int64_t most = std::min(held, ceil_div(count, policy.slices));
  policy.threads_per_row = std::max(threads_for(most, policy.vectors), kWarpSize);
  if (policy.threads_per_row == kWarpSize) policy.rows_per_block = kQuantShortThreads / kWarpSize;
  return policy;
}

}  // namespace fuselage
