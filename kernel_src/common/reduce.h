// The one reduction: the sum of a value over the threads that share a row. The order of the additions is
// fixed by the thread layout, so the same row gives the same bits wherever and whenever it is computed.
#pragma once

#include "common/gpu_compat.h"

namespace fuselage {

constexpr int kMaxWarpsPerBlock = 1024 / kWarpSize;

// Sum over `width` neighbouring lanes (a power of two, at most kWarpSize), in every one of them.
__device__ __forceinline__ float warp_sum(float value, int width) {
  for (int mask = width / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask, width);
  return value;
}

constexpr int kMaxCluster = 8;

// Shared memory for one row_sum of kCount values.
template <int kCount>
struct RowSumScratch {
  float warps[kCount][kMaxWarpsPerBlock];
  float blocks[kCount][kMaxCluster];
  uint64_t mailbox;
};

// What a cluster needs before its first row_sum: all threads call the start early in the kernel, and the end
// right before that row_sum.
template <int kCount, int kScratches>
__device__ __forceinline__ void row_sum_start(int cluster,
                                              RowSumScratch<kCount> (&scratches)[kScratches]) {
  if (cluster == 1) return;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kScratches; ++i) mailbox_init(&scratches[i].mailbox);
  }
  cluster_meet_start();
}
__device__ __forceinline__ void row_sum_end(int cluster) {
  if (cluster > 1) cluster_meet_end();
}

// Sum of kCount values over the threads that share a row, in every one of them: blockDim.x threads of a
// block (a power of two, or whole warps), in each of the `cluster` blocks of a cluster. threadIdx.y counts
// the rows of the block. Beyond a warp a row, all rows of the block, or the whole cluster, call equally often.
// kRowsApart: the rows of a block need not call at the same time. (That takes a barrier for each, of which a
// multiprocessor has few, so that fewer blocks fit on it.)
// `turn` counts the calls of a kernel: they take turns with two scratches, one of which may still be read.
template <bool kRowsApart, int kCount, int kScratches>
__device__ __forceinline__ void row_sum(float (&values)[kCount], int cluster,
                                        RowSumScratch<kCount> (&scratches)[kScratches], int turn) {
  RowSumScratch<kCount>& scratch = scratches[turn % kScratches];
  const int threads = blockDim.x;
  if (threads <= kWarpSize) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = warp_sum(values[i], threads);
    return;
  }
  const int warps = threads / kWarpSize;
  const int first_warp = threadIdx.y * warps;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = warp_sum(values[i], kWarpSize);
    if (lane == 0) scratch.warps[i][first_warp + threadIdx.x / kWarpSize] = values[i];
  }
  if constexpr (kRowsApart) {
    row_barrier();
  } else {
    __syncthreads();
  }
  // Every thread adds up its row's warp sums by itself: no broadcast, and no second barrier.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // In pairs of pairs, which keeps the sum as accurate as the shuffles are.
    const float* sums = &scratch.warps[i][first_warp];
    values[i] = 0.0f;
    for (int warp = 0; warp < warps; warp += 4) {
      const auto sum_of = [&](int w) { return w < warps ? sums[w] : 0.0f; };
      values[i] += (sum_of(warp) + sum_of(warp + 1)) + (sum_of(warp + 2) + sum_of(warp + 3));
    }
  }
  if (cluster > 1) {
    // Each block sends its sums to every block of the cluster; all add them up in the same order.
    if (threadIdx.x < cluster) {
      if (threadIdx.x == 0)
        mailbox_expect(&scratch.mailbox, cluster * kCount * static_cast<int>(sizeof(float)));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        mailbox_send(&scratch.mailbox, &scratch.blocks[i][cluster_rank()], threadIdx.x, values[i]);
      }
    }
    mailbox_wait(&scratch.mailbox, turn / kScratches % 2);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float* sums = scratch.blocks[i];
      values[i] = 0.0f;
      for (int block = 0; block < cluster; block += 2) values[i] += sums[block] + sums[block + 1];
    }
  }
}

}  // namespace fuselage
