// What the filters of a block or a cluster share: sums of weights, and min_p's bound. NOTE: of warps of 32 lanes.
#pragma once

#include "sample/sample_device.h"

namespace fuselage {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ unsigned long long warp_sum_of(unsigned long long value) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2)
    value += __shfl_xor_sync(kAllLanes, value, mask);
  return value;
}

// Of the block, in every thread. Before `of_warps` is used again, all threads must meet.
template <int kWarps>
__device__ __forceinline__ unsigned long long block_sum_of(unsigned long long (&of_warps)[kWarps],
                                                           unsigned long long value) {
  value = warp_sum_of(value);
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  unsigned long long sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp];
  return sum;
}

// As key_at_distance, 32 keys at a time: all lanes call it.
__device__ __forceinline__ uint32_t warp_key_at_distance(const Scale& scale, float lowest) {
  uint32_t low = kKeyOfMinusInfinity, high = key_of<SampleMath>(scale.greatest);
  while (low < high) {
    const uint32_t step = (high - low) / kWarpSize + 1;
    const uint32_t ahead = step * (threadIdx.x % kWarpSize);
    const uint32_t key = ahead < high - low ? low + ahead : high;
    const bool near = scale.distance(value_of_key<SampleMath>(key)) >= lowest;
    const uint32_t nearby = __ballot_sync(kAllLanes, near);
    const int first = nearby == 0 ? kWarpSize : __ffs(static_cast<int>(nearby)) - 1;
    const uint32_t key_of_first = __shfl_sync(kAllLanes, key, first % kWarpSize);
    const uint32_t key_before = __shfl_sync(kAllLanes, key, first == 0 ? 0 : first - 1);
    if (first < kWarpSize) high = key_of_first;
    if (first > 0) low = key_before + 1;
  }
  return high;
}

// A row's min_p, as a distance; -inf where it leaves out nothing.
__device__ __forceinline__ float farthest_of_min_p(float share) {
  return share >= 1.17549435e-38f ? log_of_normal<SampleMath>(share) : minus_infinity();
}

// What the filters of a row look for.
struct Wanted {
  int64_t top_k;   // 0: none
  float top_p;     // 1: none
  float farthest;  // of min_p: the least distance; -inf: none

  __device__ __forceinline__ Wanted(const Filters& filters, int64_t vocab, int64_t row)
      : top_k(0), top_p(1.0f), farthest(minus_infinity()) {
    if (filters.has_top_k) {
      top_k = option_of(filters.top_k, row);
      if (top_k < 1 || top_k > vocab) top_k = 0;
    }
    if (filters.has_top_p) top_p = option_of(filters.top_p, row);
    if (filters.has_min_p) farthest = farthest_of_min_p(option_of(filters.min_p, row));
  }
  __device__ __forceinline__ bool weighs() const { return top_p < 1.0f; }
  // Whether it is a share of all weights of the row.
  __device__ __forceinline__ bool weighs_all() const { return weighs() && top_k == 0; }
};

// How many of others[0, count) are greater. `count` is a multiple of 4.
__device__ __forceinline__ int count_greater(const float* others, int count, float own) {
  int above = 0;
#pragma unroll 4
  for (int i = 0; i < count; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(others + i);
    above += (four.x > own) + (four.y > own) + (four.z > own) + (four.w > own);
  }
  return above;
}

}  // namespace fuselage
