// What formulas of activations are computed with on the GPU: `Math` of common/sigmoid_math.h.
#pragma once

#include <type_traits>

#include "common/gpu_compat.h"
#include "common/sigmoid_math.h"
#include "common/vector.h"

namespace fuselage {
namespace {

// Where the result has 11 bits or fewer, e^v may be wrong by as much as a rounding of v makes it:
// one instruction instead of about eight.
template <typename T>
struct GpuMath {
  using Floats = float;
  // The same for all types of this size.
  using Shared = GpuMath<std::conditional_t<sizeof(T) == sizeof(float), float, float16>>;
  static constexpr bool kRoundsToHalf = sizeof(T) < sizeof(float);
  static __device__ __forceinline__ float exp_negative(float v) {
    if constexpr (!kRoundsToHalf) return expf(v);
    return exp2_approximate(1.4426950408889634f * v);
  }
  static __device__ __forceinline__ float exp_minus_half_square(float v) {
    if constexpr (!kRoundsToHalf) return expf(-0.5f * v * v);
    return exp2_approximate(-0.7213475204444817f * v * v);
  }
  static __device__ __forceinline__ float reciprocal(float v) {
    if constexpr (!kRoundsToHalf) return 1.0f / v;
    return reciprocal_of_normal(v);
  }
  static __device__ __forceinline__ float quotient(float u, float v) {
    return u * reciprocal_of_normal(v);
  }
  static __device__ __forceinline__ float absolute(float v) { return fabsf(v); }
  static __device__ __forceinline__ float minus_absolute(float v) { return -fabsf(v); }
  static __device__ __forceinline__ float at_most(float v, float limit) { return fminf(v, limit); }
  static __device__ __forceinline__ float at_least(float v, float limit) { return fmaxf(v, limit); }
  static __device__ __forceinline__ float if_below(float v, float limit, float x, float y) {
    return v < limit ? x : y;
  }
  static __device__ __forceinline__ float if_at_most(float v, float limit, float x, float y) {
    return v <= limit ? x : y;
  }
  static __device__ __forceinline__ float if_above(float v, float limit, float x, float y) {
    return v > limit ? x : y;
  }
  static __device__ __forceinline__ float if_negative(float v, float x, float y) {
    return v < 0.0f ? x : y;
  }
};

}  // namespace
}  // namespace fuselage
