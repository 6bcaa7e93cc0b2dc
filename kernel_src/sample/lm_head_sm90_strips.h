// The bounds warps of sample/lm_head_sm90.cu, where it writes logits for filters. They write the
// maxima of strips, of 16 rows and a column each, and derive thresholds from them: the epilogue
// does not write the strips below. A late threshold only costs time.
#pragma once

#include "sample/lm_head_sm90_layout.h"
#include "sample/sample_filter.h"

namespace fuselage {
namespace gpu {
namespace {

// The thresholds of top_k, from the strips of the first tiles of all blocks, whose warps share the
// columns. Strips are dealt into groups. The top_k largest maxima of groups are as many logits, so
// that the smallest of them is a threshold.
// NOTE: not in shared memory: each access waits for hundreds of cycles beside wgmma.
__device__ __forceinline__ void find_top_k_thresholds(const HeadDraw& p, int thread) {
  constexpr int kMaxPolls = 400;
  constexpr int kGroupsEach = 12, kMaxTopK = 32 * kGroupsEach * 2 / 3;
  named_barrier_sync<kBoundsBarrier, kBoundsThreads>();
  const int lane = thread % 32;
  if (thread == 0) {
    __threadfence();
    atomicAdd(p.arrived, 1u);
  }
  bool arrived = false;
  for (int i = 0; i < kMaxPolls && !arrived; ++i) {
    arrived = *const_cast<const volatile uint32_t*>(p.arrived) >= gridDim.x;
    if (!arrived) __nanosleep(500);
  }
  if (!__all_sync(0xffffffffu, arrived)) return;
  __threadfence();
  const int strips = tile_of(p, gridDim.x).row / kStrip;
  for (int column = blockIdx.x + thread / 32 * gridDim.x; column < p.batch;
       column += kBoundsWarps * gridDim.x) {
    const int64_t row = int64_t{p.batch_start} + column;
    const int64_t top_k = RowFilters(p.out.filters, p.vocab, row).top_k;
    if (top_k == 0 || top_k > kMaxTopK) continue;
    const float* maxima = p.out.strips.maxima + row * p.out.strips.stride;
    uint32_t keys[kGroupsEach] = {};
    for (int first = lane; first < strips; first += 32 * kGroupsEach) {
#pragma unroll
      for (int i = 0; i < kGroupsEach; ++i) {
        const int at = first + 32 * i;
        if (at < strips) keys[i] = max(keys[i], key_of<SampleMath>(__ldcg(maxima + at)));
      }
    }
    // The largest key with top_k keys at or above it, from the highest bit on.
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit != 0; bit /= 2) {
      uint32_t count = 0;
#pragma unroll
      for (int i = 0; i < kGroupsEach; ++i) count += keys[i] >= (found | bit);
      if (__reduce_add_sync(0xffffffffu, count) >= top_k) found |= bit;
    }
    if (lane == 0) atomicMax(p.out.strips.thresholds + row, found);
  }
}

// The smallest distance from the maximum that a row's filters look at, if that is known without
// the other logits; -inf otherwise. top_p is of what top_k leaves, or else of all that has weight.
__device__ __forceinline__ float min_distance(const HeadDraw& p, const RowTemperature& temperature,
                                              int64_t row) {
  const RowFilters filters(p.out.filters, p.vocab, row);
  return temperature.greedy         ? 0.0f
         : filters.is_top_p_alone() ? kZeroWeightDistance
         : filters.has_top_p()      ? -INFINITY
                                    : filters.min_p_distance;
}

// Of each tile, writes the maxima of its strips, which the epilogue leaves in shared memory, and
// raises the thresholds by them. Meanwhile loads the thresholds of other blocks.
template <typename Traits>
__device__ __forceinline__ void run_strips_warps(const HeadDraw& p, const Block<Traits>& block,
                                                 int thread) {
  constexpr int kColumns = Traits::kColumns;
  constexpr int kEach = (kColumns + kBoundsThreads - 1) / kBoundsThreads;
  grid_dependency_wait();  // what is beside the strips is cleared
  const Strips& strips = p.out.strips;
  float seen[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) seen[i] = -INFINITY;
  const auto for_columns = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = i * kBoundsThreads + thread;
      if (column < p.batch) body(column, int64_t{p.batch_start} + column, seen[i]);
    }
  };
  int iteration = 0;
  for (int number = blockIdx.x; number < p.tiles; number += gridDim.x, ++iteration) {
    const int buffer = iteration & 1;
    const uint32_t parity = iteration >> 1 & 1;
    const bool is_last = number + gridDim.x >= p.tiles;  // after which the next kernel waits
    while (p.finds_thresholds &&
           !__all_sync(0xffffffffu,
                       mbarrier_test_wait_parity(block.bounds_empty + 8 * buffer, parity))) {
      for_columns([&](int column, int64_t row, float) {
        const uint32_t key = const_cast<const volatile uint32_t*>(strips.thresholds)[row];
        if (key != 0)
          const_cast<volatile float*>(block.columns.thresholds)[column] =
              value_of_key<SampleMath>(key);
      });
      __nanosleep(is_last ? 100 : 1000);
    }
    mbarrier_wait_parity(block.bounds_empty + 8 * buffer, parity);
    const Tile tile = tile_of(p, number);
    for_columns([&](int column, int64_t row, float& max_seen) {
      const float* of_units = block.bounds + buffer * Traits::kBounds + column;
      float* to = strips.maxima + row * strips.stride + tile.row / kStrip;
      float of_tile = -INFINITY;
      for (int unit = 0; unit < tile.units; ++unit) {
        const float its = of_units[unit * kColumns];
        to[unit] = its;
        of_tile = fmaxf(of_tile, its);
      }
      if (!p.finds_thresholds || !(of_tile > max_seen)) return;
      max_seen = of_tile;
      const RowTemperature temperature = row_temperature(p.out.temperature, row);
      const float distance = min_distance(p, temperature, row);
      if (distance > -INFINITY) {
        atomicMax(strips.thresholds + row,
                  key_at_distance<SampleMath>(distance, of_tile, temperature.inv_temperature));
      }
    });
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(block.bounds_full + 8 * buffer);
    if (iteration == 0 && p.finds_thresholds && p.out.filters.has_top_k)
      find_top_k_thresholds(p, thread);
  }
}

}  // namespace
}  // namespace gpu
}  // namespace fuselage
