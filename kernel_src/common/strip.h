// Strips of a row of logits: their weights are added up first (common/softmax_math.h).
#pragma once

#include <cstdint>

namespace fuselage {

// Neighbouring logits of a row, from a multiple of kStrip on.
constexpr int kStrip = 16;

// What a head leaves of a strip.
struct alignas(8) StripSum {
  float max;         // of its logits
  uint32_t weights;  // the sum of those beside `max`
};

}  // namespace fuselage
