// How the kernels of the gate family are laid out on a GPU: pure functions of the device, the
// element type and the shape. All results but sums are element-wise, so the layout may depend on
// the number of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/alignment.h"
#include "common/launch_policy.h"

namespace fuselage {

constexpr int kActivationThreads = 128;     // the most, as the kernels' launch bounds
constexpr int kActivationSumThreads = 256;  // of the kernel that also sums grad_bias

// What of the layout a kernel needs: a thread has several vectors, each row_step rows and
// column_step columns after the one before it (one of the steps is zero).
struct ActivationTile {
  int rows_per_block, columns_per_block;
  int row_step, column_step;
  int layer;  // blocks along y of the grid
};

// A block has threads_x threads side by side and threads_y rows of them, of `vectors` vectors each.
struct ActivationPolicy {
  ActivationTile tile;
  int vectors;
  int threads_x, threads_y;
  int64_t column_blocks, row_blocks;  // along x of the grid, and along y and z
  int layers;                         // along z
};

inline void lay_out_row_blocks(ActivationPolicy& policy, int64_t rows) {
  policy.row_blocks = ceil_div(rows, policy.tile.rows_per_block);
  policy.layers = static_cast<int>(ceil_div(policy.row_blocks, kMostBlocksAlongY));
  policy.tile.layer = static_cast<int>(ceil_div(policy.row_blocks, policy.layers));
}

// `vector_size`: columns of a vector. `most_vectors`: what a thread has where all multiprocessors
// have work for long, `least_vectors` where not.
inline ActivationPolicy activation_policy(const DeviceInfo& device, int vector_size,
                                          int most_vectors, int least_vectors, int64_t rows,
                                          int64_t dim) {
  const int64_t count = ceil_div(dim, vector_size);
  ActivationPolicy policy{};
  const int block_threads = device.tuning.activation_threads;
  // Few elements: one vector a thread gives more blocks, and each is done sooner.
  const int64_t full = int64_t{device.tuning.activation_full_blocks} * device.multiprocessors *
                       block_threads * most_vectors;
  policy.vectors = rows * count >= full ? most_vectors : least_vectors;
  policy.threads_y = 1;
  if (count <= block_threads) {
    // Rows side by side and, for a thread with several vectors, below each other.
    policy.threads_x = threads_for(count, 1);
    policy.threads_y = static_cast<int>(
        std::min<int64_t>(std::max(1, block_threads / policy.threads_x), ceil_div(rows, 1)));
    // NOTE: whole warps, or an unaligned store would wait for lanes that are not there.
    while (policy.threads_x * policy.threads_y % kWarpSize != 0) ++policy.threads_y;
    policy.tile.row_step = policy.threads_y;
    policy.tile.rows_per_block = policy.threads_y * policy.vectors;
    policy.tile.columns_per_block = policy.threads_x * vector_size;
    policy.column_blocks = 1;
  } else {
    // A row is cut into blocks of equal size, so that the last is not mostly empty.
    policy.column_blocks = ceil_div(count, int64_t{policy.vectors} * block_threads);
    policy.threads_x = threads_for(ceil_div(count, policy.vectors * policy.column_blocks), 1);
    policy.threads_x = std::max(policy.threads_x, kWarpSize);
    policy.tile.column_step = policy.threads_x * vector_size;
    policy.tile.rows_per_block = 1;
    policy.tile.columns_per_block = policy.tile.column_step * policy.vectors;
  }
  lay_out_row_blocks(policy, rows);
  return policy;
}

// The backward that sums grad_bias: a block has a strip of columns and, for all of them, a chunk of
// the rows. It leaves one row of partial sums, of which there are row_blocks.
inline ActivationPolicy activation_sum_policy(const DeviceInfo& device, int vector_size,
                                              int most_vectors, int64_t rows, int64_t dim) {
  const int64_t count = ceil_div(dim, vector_size);
  ActivationPolicy policy{};
  // Many more blocks than run at once, because all of them stop for loads in the same rhythm
  // otherwise.
  const int64_t blocks = int64_t{32} * device.multiprocessors;
  policy.vectors = rows * count >= blocks * kActivationSumThreads ? most_vectors : 1;
  policy.threads_x = threads_for(std::min<int64_t>(count, kWarpSize), 1);
  policy.threads_y = kActivationSumThreads / policy.threads_x;
  policy.tile.row_step = policy.threads_y;
  policy.tile.columns_per_block = policy.threads_x * vector_size;
  policy.column_blocks = ceil_div(count, policy.threads_x);
  // Each with so many rows that its partial sums are little beside them.
  const int64_t rows_at_once = int64_t{policy.threads_y} * policy.vectors;
  const int64_t chunks = std::clamp<int64_t>(ceil_div(rows, 2 * rows_at_once), 1,
                                             ceil_div(blocks, policy.column_blocks));
  policy.tile.rows_per_block =
      static_cast<int>(std::min<int64_t>(ceil_div(rows, chunks), int64_t{1} << 30));
  lay_out_row_blocks(policy, rows);
  return policy;
}

}  // namespace fuselage
