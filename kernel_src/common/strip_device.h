// The weights of a strip of logits (common/softmax_math.h) on the GPU.
#pragma once

#include <cstdint>

#include "common/softmax_device.h"

namespace fuselage {

// The weight of a logit within its strip. `scale`: strip_scale. kNanIsNone: NaN has no weight, nor
// have logits of a strip without any number. Otherwise neither may be counted.
template <bool kNanIsNone>
struct StripWeight {
  float power, value;

  __device__ __forceinline__ StripWeight(float logit, float max, float scale)
      : power(power_of(rounded_product(logit - max, scale))), value(exp2_approximate(power)) {}
  static __device__ __forceinline__ float power_of(float exact) {
    return kNanIsNone ? fmaxf(exact, kZeroInStrip) : exact;
  }
  __device__ __forceinline__ uint32_t units() const { return units_in_strip<GpuFloats>(value); }
};

// Of a logit whose strip has a maximum of infinity.
__device__ __forceinline__ uint32_t units_of_infinite(float logit, float max) {
  return logit == max ? 1u << kStripBits : 0;
}

}  // namespace fuselage
