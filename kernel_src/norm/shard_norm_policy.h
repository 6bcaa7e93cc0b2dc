// How kernels of norms whose columns are spread over ranks are laid out on a GPU: pure functions of
// the element types and the shape.
#pragma once

#include <algorithm>

#include "common/launch_policy.h"
#include "norm/shard_norm.h"

namespace fuselage {

constexpr int kShardNormThreads = 512;  // of a block, at most
constexpr int kShardNormShort = 128;    // of a block whose rows have a warp or less
constexpr int kShardNormVectors = 4;    // of 16 bytes that a thread has of a row, or more
// That it loads together, of one input or two: with three or four there are enough of them.
constexpr int kShardNormBatch = 2;

struct ShardNormPolicy {
  int threads_per_row, rows_per_block;
};

// Threads of a row follow from its columns alone: a row has the same bits in any batch.
inline ShardNormPolicy shard_norm_policy(const ShardNorm& p) {
  ShardNormPolicy policy{};
  const int64_t count = ceil_div(p.dim, 16 / dtype_size(p.dtype));
  policy.threads_per_row = std::min(threads_for(count, kShardNormVectors), kShardNormThreads);
  policy.rows_per_block =
      policy.threads_per_row > kWarpSize ? 1 : kShardNormShort / policy.threads_per_row;
  return policy;
}

}  // namespace fuselage
