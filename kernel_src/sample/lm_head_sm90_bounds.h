// The bounds warps of sample/lm_head_sm90.cu, where it draws. For the next tile they make upper
// bounds of the noise, one for each unit of 16 rows and column, while the consumers multiply. Then
// they score the candidates that the epilogue queued.
#pragma once

#include <type_traits>

#include "sample/lm_head_sm90_queue.h"

namespace fuselage {
namespace gpu {
namespace {

// As WholeProducts, by products of 16 bits, which are nine or ten instructions for one. But an
// instruction that gives the high word of a product delays a warpgroup's wgmma by 8 to 9 cycles
// (H200, 256 columns), and these do not.
//
// The sum of two products with half of the factor must fit into a word. The second factor is too
// large for that: its difference to 2^32 is used.
struct HalfProducts {
  static __device__ __forceinline__ WordProduct first(uint32_t v) {
    constexpr uint32_t kLow = kPhiloxFirst & 0xffffu, kHigh = kPhiloxFirst >> 16;
    static_assert(kLow + kHigh < 0xffffu, "no sum exceeds a word");
    const uint32_t low = v & 0xffffu, high = v >> 16;
    const uint32_t middle = high * kLow + low * kHigh + ((low * kLow) >> 16);
    return {high * kHigh + (middle >> 16), kPhiloxFirst * v};
  }
  static __device__ __forceinline__ WordProduct second(uint32_t v) {
    constexpr uint32_t kLack = 0u - kPhiloxSecond;
    constexpr uint32_t kLow = kLack & 0xffffu, kHigh = kLack >> 16;
    static_assert(kLow + kHigh < 0xfffeu, "no sum exceeds a word");
    const uint32_t low = v & 0xffffu, high = v >> 16;
    // The high words of kLack * v + 2^32 - 1, which is rounded up.
    const uint32_t middle = high * kLow + low * kHigh + 0xffffu + ((low * kLow + 0xffffu) >> 16);
    return {v - high * kHigh - (middle >> 16), kPhiloxSecond * v};
  }
};

// The upper bound of a group's noise, with the position of its maximum in the lowest bits. 0: the
// column has no noise.
__device__ __forceinline__ float bound_and_position(const NoiseGroup& group) {
  const uint32_t above = __float_as_uint(noise_bound<SampleMath>(group.min_word)) + kNoiseGroup;
  return __uint_as_float((above & ~(kNoiseGroup - 1u)) | group.position);
}

// Bounds are made in parts of four units and a column for each lane.
constexpr int kUnitsOfPart = 4;

template <typename Products, int kColumns>
__device__ __forceinline__ void make_bounds(const HeadDraw& p, const Columns& columns,
                                            float* bounds, const Tile& tile, int sample, int part,
                                            int lane) {
  const int i = 32 * part + lane, column = i % kColumns, first = i / kColumns * kUnitsOfPart;
  if (first >= tile.units) return;
  float made[kUnitsOfPart] = {};
  if (column < p.batch && columns.unit[column] != 0.0f) {
    const NoiseKey key = columns.key_of(column);
    const int64_t group = group_of(p.vocab_offset + tile.row) + first;
    // Four at once: one alone waits for its own results most of the time.
#pragma unroll
    for (int k = 0; k < kUnitsOfPart; ++k)
      made[k] = bound_and_position(noise_group<Products>(key, group + k, sample));
  }
#pragma unroll
  for (int k = 0; k < kUnitsOfPart; ++k) bounds[(first + k) * kColumns + column] = made[k];
}

// All bounds warps. An iteration is one sample of one tile. Its bounds are made two iterations
// before its candidates are scored, as there are two buffers.
template <typename Traits>
__device__ __forceinline__ void run_bounds_warps(const HeadDraw& p, const Block<Traits>& block,
                                                 int thread) {
  constexpr int kColumns = Traits::kColumns;
  constexpr int kParts = (Traits::kBounds / kUnitsOfPart + 31) / 32;
  // Where wgmma waits for memory it does not matter which.
  using Products = std::conditional_t<(kColumns > 64), HalfProducts, WholeProducts>;
  const int lane = threadIdx.x % 32;
  grid_dependency_wait();  // shared_thresholds are set
  const int iterations = p.tiles / static_cast<int>(gridDim.x) * p.num_samples;
  const auto tile_of_iteration = [&](int iteration) {
    return tile_of(p, blockIdx.x + iteration / p.num_samples * gridDim.x);
  };
  for (int iteration = 0; iteration < iterations + 2; ++iteration) {
    const int buffer = iteration & 1;
    if (iteration >= 2) {
      mbarrier_wait_parity(block.bounds_empty + 8 * buffer, (iteration >> 1 & 1) ^ 1);
      score_all_queued(p, block, (iteration - 2) % p.num_samples,
                       tile_of_iteration(iteration - 2).row, thread);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(block.queue_empty);
    }
    if (iteration >= iterations) continue;
    const Tile tile = tile_of_iteration(iteration);
    const int sample = iteration % p.num_samples;
    for (int first = 0; first < kParts; first += kBoundsWarps) {
      ThresholdExchange<kColumns, kBoundsThreads> exchange;
      exchange.start(p, sample, thread);
      const int part = first + thread / 32;
      if (part < kParts) {
        make_bounds<Products, kColumns>(p, block.columns, block.bounds + buffer * Traits::kBounds,
                                        tile, sample, part, lane);
      }
      exchange.finish(p, block.columns, sample, thread);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(block.bounds_full + 8 * buffer);
  }
}

}  // namespace
}  // namespace gpu
}  // namespace fuselage
