// What the filters of a block or a cluster share: sums of weights, and what a row wants. NOTE: of warps of 32 lanes.
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

}  // namespace fuselage
