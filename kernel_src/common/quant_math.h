// The scale of a row or group, for the GPU and the CPU.
#pragma once

#include <cstdint>

#include "common/float8.h"
#include "common/shared.h"

namespace FUSELAGE_SHARED_NAMESPACE {

// NOTE: the division is rounded once, as PyTorch's is; a product with 1 / limit is not the same.
FUSELAGE_SHARED float quant_scale_of(float amax, float limit, bool power_of_two) {
  float scale = amax / limit;
  if (power_of_two && scale == scale) {
    // Of subnormal numbers the smallest normal one: bfloat16 and e8m0 have no smaller scale.
    const uint32_t bits = (float8_cast<uint32_t>(scale) + 0x7fffffu) & 0x7f800000u;
    scale = float8_cast<float>(bits);
  }
  return scale == 0.0f ? 1.0f : scale;
}

}  // namespace FUSELAGE_SHARED_NAMESPACE
