// Division by what only the host knows before a launch: a multiplication and a shift, where the
// GPU's own takes some thirty instructions (32 bits) or a hundred (64).
#pragma once

#include <cstdint>

namespace fuselage {

// A number of at least 1 to divide by. Granlund and Montgomery 1994: with 2^(k-1) < value <= 2^k
// and multiplier = ceil(2^(31+k) / value), n / value = n * multiplier >> (31 + k) for all n < 2^31.
struct Divisor {
  int64_t value;
  uint32_t multiplier = 0, shift = 0;  // 0, 0: of one, or of what takes more than 31 bits

  Divisor(int64_t value_ = 1) : value(value_) {
    if (value <= 1 || value >> 31 != 0) return;
    while (int64_t{1} << (shift + 1) < value) ++shift;  // k - 1
    const uint64_t power = uint64_t{1} << (32 + shift);
    multiplier = static_cast<uint32_t>((power + value - 1) / value);
  }
};

}  // namespace fuselage
