// Division by what only the host knows before a launch: a multiplication and a shift, where the
// GPU's own takes some thirty instructions (32 bits) or a hundred (64).
#pragma once

#include <cstdint>

namespace fuselage {

// A number of at least 1 to divide by. Granlund and Montgomery 1994: with 2^(k-1) < value <= 2^k
// and multiplier = ceil(2^(63+k) / value), n / value = n * multiplier >> (63 + k) for all n < 2^63.
struct Divisor {
  int64_t value = 1;
  uint64_t multiplier = 0;
  uint32_t shift = 0;  // k - 1: of the upper 64 bits of the product

  Divisor() = default;
  Divisor(int64_t value_) : value(value_) {
    if (value <= 1) return;
    const uint64_t divisor = static_cast<uint64_t>(value);
    while (uint64_t{2} << shift < divisor) ++shift;
    // 2^(63+k) by long division, of 32 bits at a time where the remainder leaves room for that.
    const int bits = divisor >> 32 == 0 ? 32 : 1;
    uint64_t rest = uint64_t{1} << shift;
    for (int done = 0; done < 64; done += bits) {
      const uint64_t part = rest << bits;
      multiplier = multiplier << bits | part / divisor;
      rest = part % divisor;
    }
    if (rest != 0) ++multiplier;
  }
};

}  // namespace fuselage
