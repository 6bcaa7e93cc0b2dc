// The one reduction: the sum of a value over the threads that share a row. The order of the
// additions is fixed by the thread layout, so the same row gives the same bits wherever and
// whenever it is computed.
#pragma once

#include "common/gpu_compat.h"
#include "common/ptx.h"

namespace fuselage {

constexpr int kMaxWarpsPerBlock = 1024 / kWarpSize;

// Sum over `width` neighbouring lanes (a power of two, at most kWarpSize), in every one of them.
__device__ __forceinline__ float warp_sum(float value, int width) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    if (mask < width) value += shuffle_xor(value, mask, kWarpSize);
  }
  return value;
}

// The smallest and the largest of a warp, in every lane.
__device__ __forceinline__ uint32_t lowest_of_warp(uint32_t value) {
#if defined(FUSELAGE_SM80)
  return __reduce_min_sync(0xffffffffu, value);
#else
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2)
    value = min(value, shuffle_xor(value, mask, kWarpSize));
  return value;
#endif
}
__device__ __forceinline__ uint32_t highest_of_warp(uint32_t value) {
#if defined(FUSELAGE_SM80)
  return __reduce_max_sync(0xffffffffu, value);
#else
  return ~lowest_of_warp(~value);
#endif
}

// Sums over `width` neighbouring lanes of kCount values of each of kRows rows (a power of two, at
// most `width`). A lane gets those of one row, row_of_lane: in the first steps it hands half of its
// rows over and goes on with the other half. The additions are those of warp_sum.
template <int kRows, int kCount>
__device__ __forceinline__ void warp_sums_of_rows(float (&values)[kRows][kCount],
                                                  float (&sums)[kCount], int width) {
  const int lane = threadIdx.x & (width - 1);
  int mask = width / 2;
#pragma unroll
  for (int rows = kRows; rows > 1; rows /= 2, mask /= 2) {
    const bool upper = lane & mask;
#pragma unroll
    for (int i = 0; i < rows / 2; ++i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float given = upper ? values[i][k] : values[i + rows / 2][k];
        values[i][k] =
            (upper ? values[i + rows / 2][k] : values[i][k]) + shuffle_xor(given, mask, width);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) sums[k] = values[0][k];
  for (; mask > 0; mask /= 2) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[k] += shuffle_xor(sums[k], mask, width);
  }
}

// The row whose sums warp_sums_of_rows leaves in this lane, and the first lane that has those of a
// row.
template <int kRows>
__device__ __forceinline__ int row_of_lane(int width) {
  return kRows == 1 ? 0 : static_cast<int>(threadIdx.x % width) * kRows / width;
}
template <int kRows>
__device__ __forceinline__ int lane_of_row(int row, int width) {
  return row * width / kRows;
}

// Shared memory for one row_sum of kCount values.
template <int kCount>
struct RowSumScratch {
  // One sum a warp; the sums of a row start at a multiple of four.
  alignas(16) float warps[kCount][2 * kMaxWarpsPerBlock];
  float blocks[kCount][kMaxCluster];
  uint64_t mbarrier;
};

// What a cluster needs before its first row_sum: all threads call the start early in the kernel,
// with every array of scratches, and the end right before that row_sum.
template <typename... Scratches>
__device__ __forceinline__ void row_sum_start(int cluster, Scratches&... scratches) {
  if (cluster == 1) return;
  const auto init_all = [](auto& array) {
    for (auto& scratch : array) mbarrier_init(shared_address(&scratch.mbarrier), 1);
    fence_mbarrier_init();
  };
  if (threadIdx.x == 0) (init_all(scratches), ...);
  cluster_arrive_relaxed();
}
__device__ __forceinline__ void row_sum_end(int cluster) {
  if (cluster > 1) cluster_wait();
}

// Sum over the warp of kVectors (1, 2 or 4) values a lane, in every lane: first those with the same
// index, then the sums of neighbouring indices, in pairs.
template <int kVectors>
__device__ __forceinline__ float warp_sum_of_vectors(const float (&values)[kVectors]) {
  static_assert(kVectors == 1 || kVectors == 2 || kVectors == 4, "1, 2 or 4 vectors a thread");
  float sums[kVectors][1], sum[1];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) sums[j][0] = values[j];
  warp_sums_of_rows(sums, sum, kWarpSize);
#pragma unroll
  for (int mask = kWarpSize / kVectors; mask < kWarpSize; mask *= 2)
    sum[0] += shuffle_xor(sum[0], mask, kWarpSize);
  return sum[0];
}

// Sum of kCount values over the threads that share a row, in every one of them: blockDim.x threads
// of a block (a power of two, or whole warps), in each of the `cluster` blocks of a cluster.
// threadIdx.y counts the rows of the block. Beyond a warp a row, all rows of the block, or the
// whole cluster, call equally often.
//
// A thread brings kVectors partial sums of each value, for vectors that lie a warp apart; a warp
// has neighbouring ones. The additions are a tree over 16 * 32 vectors at a time, which is the same
// tree however many of them one thread has: a kernel may choose that by the number of rows.
//
// kRowsApart: the rows of a block need not call at the same time. (That takes a barrier for each,
// of which a multiprocessor has few, so that fewer blocks fit on it.) `turn` counts the calls of a
// kernel: they take turns with two scratches, one of which may still be read.
template <bool kRowsApart, int kVectors, int kCount, int kScratches>
__device__ __forceinline__ void row_sum_of_vectors(const float (&vectors)[kCount][kVectors],
                                                   float (&sums)[kCount], int cluster,
                                                   RowSumScratch<kCount> (&scratches)[kScratches],
                                                   int turn) {
  RowSumScratch<kCount>& scratch = scratches[turn % kScratches];
  const int threads = blockDim.x;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i] = kVectors == 1 && threads < kWarpSize ? warp_sum(vectors[i][0], threads)
                                                   : warp_sum_of_vectors(vectors[i]);
  }
  if (threads <= kWarpSize) return;

  const int warps = threads / kWarpSize;
  const int quads = (warps + 3) / 4;
  const int first_warp = threadIdx.y * quads * 4;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (threadIdx.x % kWarpSize == 0)
      scratch.warps[i][first_warp + threadIdx.x / kWarpSize] = sums[i];
    if (threadIdx.x < quads * 4 - warps) scratch.warps[i][first_warp + warps + threadIdx.x] = 0.0f;
  }
  if constexpr (kRowsApart) {
    row_barrier();
  } else {
    __syncthreads();
  }
  // Every thread adds up its row's warp sums by itself: no broadcast, and no second barrier.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float4* quad = reinterpret_cast<const float4*>(&scratch.warps[i][first_warp]);
    const auto sum_of_quad = [&](int q) {
      const float4 four = quad[q];
      return (four.x + four.y) + (four.z + four.w);
    };
    sums[i] = 0.0f;
    if constexpr (kVectors == 4) {
#pragma unroll 4
      for (int q = 0; q < quads; ++q) sums[i] += sum_of_quad(q);
    } else if constexpr (kVectors == 2) {
      for (int q = 0; q < quads; q += 2)
        sums[i] += sum_of_quad(q) + (q + 1 < quads ? sum_of_quad(q + 1) : 0.0f);
    } else {
      for (int q = 0; q < quads; q += 4) {
        float four[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) four[k] = q + k < quads ? sum_of_quad(q + k) : 0.0f;
        sums[i] += (four[0] + four[1]) + (four[2] + four[3]);
      }
    }
  }
  if (cluster > 1) {
    // Each block sends its sums to every block of the cluster; all add them up in the same order.
    const uint32_t barrier = shared_address(&scratch.mbarrier);
    if (threadIdx.x < cluster) {
      if (threadIdx.x == 0)
        mbarrier_arrive_expect_tx(barrier, cluster * kCount * static_cast<int>(sizeof(float)));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        st_async(&scratch.blocks[i][cluster_rank()], threadIdx.x, sums[i], barrier);
      }
    }
    mbarrier_wait_parity_cluster(barrier, turn / kScratches % 2);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float* blocks = scratch.blocks[i];
      sums[i] = 0.0f;
      for (int block = 0; block < cluster; block += 2) sums[i] += blocks[block] + blocks[block + 1];
    }
  }
}

// As row_sum_of_vectors, of one value a thread.
template <bool kRowsApart, int kCount, int kScratches>
__device__ __forceinline__ void row_sum(float (&values)[kCount], int cluster,
                                        RowSumScratch<kCount> (&scratches)[kScratches], int turn) {
  float vectors[kCount][1];
#pragma unroll
  for (int i = 0; i < kCount; ++i) vectors[i][0] = values[i];
  row_sum_of_vectors<kRowsApart>(vectors, values, cluster, scratches, turn);
}

}  // namespace fuselage
