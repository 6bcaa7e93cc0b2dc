// What the filters of a block or a cluster share: sums of weights, and a row's options. NOTE: warps
// have 32 lanes.
#pragma once

#include "sample/sample_device.h"

namespace fuselage {

constexpr uint32_t kAllLanes = 0xffffffffu;

// The sum over the block, in every thread. A barrier must be before the next use of `of_warps`.
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

// A row's min_p as a distance; -inf where it removes nothing.
__device__ __forceinline__ float min_p_distance_of(float share) {
  return share >= 1.17549435e-38f ? log_of_normal<SampleMath>(share) : minus_infinity();
}

// A row's filters.
struct RowFilters {
  int64_t top_k;         // 0: none
  float top_p;           // 1: none
  float min_p_distance;  // -inf: none

  __device__ __forceinline__ RowFilters(const Filters& filters, int64_t vocab, int64_t row)
      : top_k(0), top_p(1.0f), min_p_distance(minus_infinity()) {
    if (filters.has_top_k) {
      top_k = option_of(filters.top_k, row);
      if (top_k < 1 || top_k > vocab) top_k = 0;
    }
    if (filters.has_top_p) top_p = option_of(filters.top_p, row);
    if (filters.has_min_p) min_p_distance = min_p_distance_of(option_of(filters.min_p, row));
  }
  __device__ __forceinline__ bool has_top_p() const { return top_p < 1.0f; }
  // Whether top_p is a share of all weights of the row.
  __device__ __forceinline__ bool is_top_p_alone() const { return has_top_p() && top_k == 0; }
};

}  // namespace fuselage
