// common/softmax_math.h on the CPU: of a vector, and of one number.
#pragma once

#include <cstdint>

#include "common/cpu_vector.h"
#include "common/softmax_math.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

// Rounded once. NOTE: the compiler may split or join `a * b + c`.
FUSELAGE_INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) {
#if FUSELAGE_VECTOR_BYTES == 64
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FUSELAGE_VECTOR_BYTES == 32
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  Floats result;
  for (int i = 0; i < kLanes; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
#endif
}

typedef int32_t Integers __attribute__((vector_size(FUSELAGE_VECTOR_BYTES)));

struct CpuVectors {
  using Floats = FUSELAGE_ISA::Floats;
  using Words = FUSELAGE_ISA::Words;
  using Integers = FUSELAGE_ISA::Integers;
  static FUSELAGE_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return fused_multiply_add(a, b, c);
  }
  static FUSELAGE_INLINE Floats fma(Floats a, Floats b, float c) {
    return fused_multiply_add(a, b, broadcast(c));
  }
  static FUSELAGE_INLINE Floats fma(Floats a, float b, Floats c) {
    return fused_multiply_add(a, broadcast(b), c);
  }
  static FUSELAGE_INLINE Floats fma(Floats a, float b, float c) {
    return fused_multiply_add(a, broadcast(b), broadcast(c));
  }
  static FUSELAGE_INLINE Floats to_floats(Integers i) { return __builtin_convertvector(i, Floats); }
  static FUSELAGE_INLINE Integers signed_of(Words words) { return (Integers)words; }
  static FUSELAGE_INLINE Integers integers_of(Floats f) { return (Integers)f; }
  static FUSELAGE_INLINE Floats floats_of(Integers i) { return (Floats)i; }
  static FUSELAGE_INLINE Words word_of(Floats f) { return (Words)f; }
  static FUSELAGE_INLINE Floats float_of(Words words) { return (Floats)words; }
};

struct CpuFloats {
  using Floats = float;
  using Words = uint32_t;
  using Integers = int32_t;
  static FUSELAGE_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static FUSELAGE_INLINE float to_floats(int32_t i) { return static_cast<float>(i); }
  static FUSELAGE_INLINE int32_t signed_of(uint32_t word) { return static_cast<int32_t>(word); }
  static FUSELAGE_INLINE int32_t integers_of(float f) {
    int32_t i;
    __builtin_memcpy(&i, &f, sizeof(i));
    return i;
  }
  static FUSELAGE_INLINE float floats_of(int32_t i) {
    float f;
    __builtin_memcpy(&f, &i, sizeof(f));
    return f;
  }
  static FUSELAGE_INLINE uint32_t word_of(float f) { return static_cast<uint32_t>(integers_of(f)); }
  static FUSELAGE_INLINE float float_of(uint32_t word) {
    return floats_of(static_cast<int32_t>(word));
  }
};

// ---- strips ----

// 2^power, for kZeroInStrip <= power <= 0.
FUSELAGE_INLINE Floats exp2_in_strip(Floats power) {
  // Adding 1.5 * 2^23 rounds to an integer. The low bits of the sum become the exponent.
  constexpr float kMagic = 12582912.0f;
  const Floats biased = power + kMagic;
  const Floats f = power - (biased - kMagic);
  // The polynomial, of 2^f for |f| <= 1/2, has a relative error of 9.1e-8.
  Floats p = CpuVectors::fma(f, 0.0013264727f, 0.0096715130f);
  p = CpuVectors::fma(p, f, 0.055507336f);
  p = CpuVectors::fma(p, f, 0.24022242f);
  p = CpuVectors::fma(p, f, 0.69314700f);
  p = CpuVectors::fma(p, f, 1.0f);
  return (Floats)((Words)p + ((Words)biased << 23));
}

// The sum of the weights of kStrip logits beside their maximum, which is no NaN. `products`, unless
// null: of weight * distance.
FUSELAGE_INLINE StripSum strip_sum(const float* logits, float inv_temperature, double* products) {
  typedef float FourFloats __attribute__((vector_size(16)));
  typedef uint32_t FourWords __attribute__((vector_size(16)));
  FourFloats quads[kStrip / 4];
  __builtin_memcpy(quads, logits, sizeof(quads));
  for (int i = 1; i < kStrip / 4; ++i) quads[0] = quads[i] > quads[0] ? quads[i] : quads[0];
  const float even = quads[0][0] > quads[0][2] ? quads[0][0] : quads[0][2];
  const float odd = quads[0][1] > quads[0][3] ? quads[0][1] : quads[0][3];
  const float max = even > odd ? even : odd;

  const Floats least = broadcast(kZeroInStrip);
  const float scale = strip_scale(inv_temperature);
  constexpr double kUnits = 0.693147180559945 * (1 << kStripBits);  // and natural logarithms
  Words weights = {};
  for (int i = 0; i < kStrip; i += kLanes) {
    const Floats logit = load(logits + i, AllLanes{});
    const Floats exact = (logit - max) * scale;
    const Floats power = exact > least ? exact : least;  // of NaN, too
    const Floats weight = exp2_in_strip(power);
    weights += units_in_strip<CpuVectors>(weight);
    if (max == __builtin_inff()) weights -= (Words)(logit == max) << kStripBits;
    for (int k = 0; products != nullptr && k < kLanes; ++k)
      *products += static_cast<double>(weight[k]) * power[k] * kUnits;
  }
  FourWords sums[kLanes / 4];
  __builtin_memcpy(sums, &weights, sizeof(sums));
  for (int i = 1; i < kLanes / 4; ++i) sums[0] += sums[i];
  return {max, sums[0][0] + sums[0][1] + sums[0][2] + sums[0][3]};
}

// e^v for v <= 0; 0 below -87, and NaN for NaN.
FUSELAGE_INLINE Floats exp_up_to_0(Floats v) {
  const Floats lowest = broadcast(-87.0f);
  const auto e = split_exp<CpuVectors>(v > lowest ? v : lowest);
  const Integers exponent = __builtin_convertvector(e.exponent, Integers);
  const Floats power = (Floats)((Integers)e.factor + exponent * (1 << 23));
  return v > lowest ? power : (v == v ? Floats{} : v);
}

}  // namespace FUSELAGE_ISA
}  // namespace fuselage::cpu
