// The weights of a strip of logits (common/softmax_math.h) on the GPU.
#pragma once

#include <cstdint>

#include "common/softmax_device.h"

namespace fuselage {

// weight_in_strip of a logit; none of NaN and -inf. `scale`: strip_scale.
struct StripWeight {
  float power, value;

  __device__ __forceinline__ StripWeight(float logit, float max, float scale)
      : power(fmaxf(rounded_product(logit - max, scale), kZeroInStrip)),
        value(weight_in_strip<GpuFloats>(power)) {}
  __device__ __forceinline__ uint32_t units() const { return static_cast<uint32_t>(value); }
};

// Of a logit whose strip has a maximum of infinity.
__device__ __forceinline__ uint32_t units_of_infinite(float logit, float max) {
  return logit == max ? 1u << kStripBits : 0;
}

}  // namespace fuselage
