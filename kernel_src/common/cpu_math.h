// What formulas of activations are computed with on the CPU: `Math` of common/sigmoid_math.h.
#pragma once

#include <cstdint>

#include "common/cpu_vector.h"
#include "common/sigmoid_math.h"

namespace fuselage::cpu::FUSELAGE_ISA {

template <bool kRoundsToHalf_>
struct CpuMath {
  using Floats = FUSELAGE_ISA::Floats;
  static constexpr bool kRoundsToHalf = kRoundsToHalf_;
  typedef int32_t Integers __attribute__((vector_size(FUSELAGE_VECTOR_BYTES)));

  // Adding and taking away kShift rounds to an integer k, and leaves the exponent field of
  // 2^(k + 64) in the low bits. Powers are computed as 2^(k + 64) times 2^-64 of the rest, which
  // are normal where the result is not.
  static constexpr float kShift = 0x1.8p23f + 127 + 64, kScale = 0x1p-64f;
  static FUSELAGE_INLINE Floats power_of(Floats shifted) { return (Floats)((Words)shifted << 23); }

  // e^v for v <= 0: 2^k e^r with |r| <= ln(2) / 2, and a polynomial with a relative error of
  // 3.1e-9. A NaN stays one.
  static FUSELAGE_INLINE Floats exp_negative(Floats v) {
    if constexpr (kRoundsToHalf && kHasScale) return exp_of_product(v, kLog2OfE);
    if constexpr (kRoundsToHalf) return v < -104.0f ? Floats{} : exp_of_product(v, kLog2OfE);
    const Floats shifted = v * kLog2OfE + kShift;
    const Floats k = shifted - kShift;
    const Floats r = (v - k * 0.693359375f) + k * 2.12194440e-4f;
    Floats p = kScale * 1.381452823e-3f * r + kScale * 8.368750559e-3f;
    p = p * r + kScale * 4.166839132e-2f;
    p = p * r + kScale * 1.666652035e-1f;
    p = p * r + kScale * 4.999999343e-1f;
    p = p * r + kScale;
    p = p * r + kScale;
    return v < -104.0f ? Floats{} : p * power_of(shifted);
  }
  static FUSELAGE_INLINE Floats exp_minus_half_square(Floats v) {
    const Floats a = at_most(absolute(v), 15.0f);
    return exp_of_product(a * a, -0.5f * kLog2OfE);
  }

  // 2^(v factor) = 2^k 2^r with |r| <= 1 / 2, and a polynomial with a relative error of 2.0e-9, or
  // 9.1e-8 where results are rounded to half precision. For products in [-190, 0]. The factor's own
  // rounding counts as one of v. kHasScale: k is the floor, the product is rounded once more, and
  // whatever underflows is zero.
  static constexpr float kLog2OfE = 1.4426950408889634f;
  static FUSELAGE_INLINE Floats exp_of_product(Floats v, float factor) {
    if constexpr (kRoundsToHalf && kHasScale) {
      const Floats product = v * factor, r = above_floor(product);
      Floats p = 1.867130884e-3f * r + 9.017028593e-3f;
      p = p * r + 5.579991435e-2f;
      p = p * r + 2.401644498e-1f;
      p = p * r + 6.931513118e-1f;
      return scale(p * r + 1.0f, product);
    }
    const Floats shifted = v * factor + kShift;
    const Floats r = v * factor - (shifted - kShift);
    Floats p;
    if constexpr (kRoundsToHalf) {
      p = kScale * 1.326472725e-3f * r + kScale * 9.671512688e-3f;
      p = p * r + kScale * 5.550733744e-2f;
      p = p * r + kScale * 2.402224208e-1f;
      p = p * r + kScale * 6.931469776e-1f;
    } else {
      p = kScale * 1.535327871e-4f * r + kScale * 1.339897764e-3f;
      p = p * r + kScale * 9.618438352e-3f;
      p = p * r + kScale * 5.550332225e-2f;
      p = p * r + kScale * 2.402264790e-1f;
      p = p * r + kScale * 6.931472030e-1f;
    }
    return (p * r + kScale) * power_of(shifted);
  }
  static FUSELAGE_INLINE Floats reciprocal(Floats v) { return 1.0f / v; }
  static FUSELAGE_INLINE Floats quotient(Floats u, Floats v) { return u / v; }
  static FUSELAGE_INLINE Floats absolute(Floats v) { return (Floats)((Words)v & 0x7fffffff); }
  static FUSELAGE_INLINE Floats minus_absolute(Floats v) { return (Floats)((Words)v | 0x80000000); }
  // A NaN stays one.
  static FUSELAGE_INLINE Floats at_most(Floats v, float limit) {
    return minimum(broadcast(limit), v);
  }
  static FUSELAGE_INLINE Floats at_least(Floats v, Floats limits) { return maximum(limits, v); }
  static FUSELAGE_INLINE Floats if_below(Floats v, float limit, Floats x, Floats y) {
    return v < limit ? x : y;
  }
  static FUSELAGE_INLINE Floats if_at_most(Floats v, float limit, Floats x, Floats y) {
    return v <= limit ? x : y;
  }
  static FUSELAGE_INLINE Floats if_above(Floats v, float limit, Floats x, Floats y) {
    return v > limit ? x : y;
  }
  // By the sign bit, which takes one instruction in AVX2.
  static FUSELAGE_INLINE Floats if_negative(Floats v, Floats x, Floats y) {
    return (Integers)v < 0 ? x : y;
  }
};

}  // namespace fuselage::cpu::FUSELAGE_ISA
