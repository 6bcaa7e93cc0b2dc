// common/softmax_math.h on the GPU, and the reductions of a warp that have no order.
#pragma once

#include "common/gpu_compat.h"
#include "common/softmax_math.h"

namespace fuselage {

constexpr float kLog2E = 1.4426950408889634f;

// One float32 a thread.
struct GpuFloats {
  using Floats = float;
  using Words = uint32_t;
  using Integers = int32_t;
  static __device__ __forceinline__ float fma(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
  }
  static __device__ __forceinline__ float to_floats(int32_t i) { return static_cast<float>(i); }
  static __device__ __forceinline__ int32_t signed_of(uint32_t word) {
    return static_cast<int32_t>(word);
  }
  static __device__ __forceinline__ int32_t integers_of(float f) {
    return static_cast<int32_t>(__float_as_uint(f));
  }
  static __device__ __forceinline__ float floats_of(int32_t i) {
    return __uint_as_float(static_cast<uint32_t>(i));
  }
  static __device__ __forceinline__ uint32_t word_of(float f) { return __float_as_uint(f); }
  static __device__ __forceinline__ float float_of(uint32_t word) { return __uint_as_float(word); }
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The maximum over `width` neighbouring lanes, in every one of them.
__device__ __forceinline__ float warp_max(float value, int width = kWarpSize) {
#pragma unroll
  for (int mask = width / 2; mask > 0; mask /= 2) {
    const float other = shuffle_xor(value, mask, width);
    value = other > value ? other : value;
  }
  return value;
}

// The sum over `width` neighbouring lanes, in every one of them.
__device__ __forceinline__ unsigned long long warp_sum_of(unsigned long long value,
                                                          int width = kWarpSize) {
#pragma unroll
  for (int mask = width / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask, width);
  return value;
}

}  // namespace fuselage
