// Logarithms, exponentials and the weights of a distribution, written once for the GPU and the CPU:
// same inputs, same bits. They are polynomials made of single float32 operations, but for weights
// within strips: a GPU's powers of two are the hardware's. Nowhere is the sum of a product and
// something else left to the compiler, which on some targets would round it once and on others
// twice: what is to be rounded once is an fma.
//
// `Math` says what they are computed with: Floats, Words and Integers, which are one float,
// uint32_t and int32_t, or vectors of as many, and
//   fma(a, b, c)       rounded once
//   to_floats(i)       of integers, rounded to nearest
//   signed_of(w), integers_of(f), floats_of(i), word_of(f), float_of(w)     the same bits
#pragma once

#include <cstdint>

#include "common/shared.h"
#include "common/strip.h"

namespace FUSELAGE_SHARED_NAMESPACE {

// ---- logarithms ----

// exponent * log(2) + log(1 + f) for |f| <= 1/3. The polynomial, of (log(1 + f) - f) / f^2, has a
// relative error of 4.6e-8 (all here are fitted by weighted least squares), a sixth of which is
// left in the result.
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED Floats log_of_split(Floats f, Floats exponent) {
  Floats p = Math::fma(f, -0.12594892f, 0.13754526f);
  p = Math::fma(p, f, -0.12250531f);
  p = Math::fma(p, f, 0.1405461f);
  p = Math::fma(p, f, -0.1667595f);
  p = Math::fma(p, f, 0.200073f);
  p = Math::fma(p, f, -0.24999887f);
  p = Math::fma(p, f, 0.33333272f);
  p = Math::fma(p, f, -0.5f);
  return Math::fma(exponent, 0.693147180559945f, Math::fma(f * f, p, f));
}

template <class Floats>
struct Split {
  Floats f, exponent;  // of 2^exponent * (1 + f)
};

// Of a normal, positive number: 1 + f is in [2/3, 4/3).
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED Split<Floats> split(Floats value) {
  const typename Math::Integers bits = Math::integers_of(value);
  const typename Math::Integers exponent = (bits - 0x3f2aaaab) >> 23;
  // A product, which the compiler makes a shift: C++17 shifts no negative value.
  return {Math::floats_of(bits - exponent * (1 << 23)) - 1.0f, Math::to_floats(exponent)};
}

template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED Floats log_of_normal(Floats value) {
  const Split<Floats> s = split<Math>(value);
  return log_of_split<Math>(s.f, s.exponent);
}

// ---- exponentials ----

template <class Floats>
struct SplitExp {  // factor * 2^exponent
  Floats factor;   // in [0.7, 1.42], a multiple of 2^-24
  Floats exponent;
};

// e^v / 2^k, where k is the integer next to v / log(2).
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED Floats exp_factor(Floats v, Floats k) {
  Floats r = Math::fma(k, -0.693359375f, v);
  r = Math::fma(k, 2.12194440e-4f, r);
  Floats p = Math::fma(r, 0.0013901283f, 0.008363162f);
  p = Math::fma(p, r, 0.041666854f);
  p = Math::fma(p, r, 0.16666578f);
  p = Math::fma(p, r, 0.5f);
  return Math::fma(r * r, p, r) + 1.0f;
}

// e^v, as long as the exponent is small.
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED SplitExp<Floats> split_exp(Floats v) {
  // Adding and taking away 1.5 * 2^23 rounds to an integer.
  const Floats k = Math::fma(v, 1.4426950408889634f, 12582912.0f) - 12582912.0f;
  return {exp_factor<Math>(v, k), k};
}

// ---- the distribution ----

// Weights are counted in units of 2^-40 of the largest: integers, whose sum has no order. From 2^24
// logits on the unit is 2^shift times that, so that no sum exceeds 64 bits. At kMaxVocab, roundings
// of the weights change a sum by at most 2^-12 of the largest.
constexpr int kWeightBits = 40;
constexpr int kWeightCountBits = 64 - kWeightBits;

FUSELAGE_SHARED int weight_shift(int64_t vocab) {
  int shift = 0;
  while (vocab >> (kWeightCountBits + shift) != 0) ++shift;
  return shift;
}

constexpr float kZeroWeightDistance = -28.5f;  // distances up to this one have none

// e^distance in those units, for distance <= 0. Zero for NaN.
template <class Math>
FUSELAGE_SHARED uint64_t weight_of(float distance, int shift = 0) {
  if (!(distance > kZeroWeightDistance)) return 0;
  const auto e = split_exp<Math>(distance);
  const uint64_t mantissa = static_cast<uint64_t>(static_cast<uint32_t>(e.factor * 16777216.0f))
                            << (kWeightBits - 24);
  const int down = shift - static_cast<int>(e.exponent);
  return down == 0 ? mantissa : (mantissa + (uint64_t{1} << (down - 1))) >> down;
}

// For log-probabilities a row's weights are added up by strips, each beside its own maximum. So the
// row is read once, or the head that makes it keeps no more than a maximum and a sum of each strip.
// A weight within its strip is a power of two, by the hardware or a polynomial, and is counted in
// units of 2^-23 of the strip's largest. A strip whose maximum is infinite has the weight of as
// many logits as are.
constexpr int kStripBits = 23;
constexpr float kZeroInStrip = -40.0f;  // powers of two from this one down have no weight

// By which distances within a strip become powers of two.
FUSELAGE_SHARED float strip_scale(float inv_temperature) {
  return inv_temperature * 1.4426950408889634f;
}

// A weight of at most 1 in these units: the low bits of a float32 in [1, 2].
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED typename Math::Words units_in_strip(Floats weight) {
  return Math::word_of(weight + 1.0f) - 0x3f800000u;
}

// The weight of a strip, of which `sum` is that of its weights, in the units of weight_of.
// `distance`: that of its maximum from the row's.
template <class Math>
FUSELAGE_SHARED uint64_t weight_of_strip(uint32_t sum, float distance, int shift) {
  constexpr float kZero = -31.5f;  // a strip of equal logits has 16 times the weight of one
  if (!(distance > kZero)) return 0;
  const auto e = split_exp<Math>(distance);
  // In units of 2^(exponent - 47) of the row's largest weight.
  const uint64_t weight = uint64_t{sum} * static_cast<uint32_t>(e.factor * 16777216.0f);
  const int down = kStripBits + 24 - kWeightBits + shift - static_cast<int>(e.exponent);
  return (weight + (uint64_t{1} << (down - 1))) >> down;
}

// Log of a sum of weights in units of the largest.
template <class Math>
FUSELAGE_SHARED float log_of_weights(uint64_t sum, int shift) {
  const float unit = static_cast<float>(1 << shift) * 9.0949470177292824e-13f;  // 2^(shift - 40)
  return log_of_normal<Math>(static_cast<float>(sum) * unit);
}

// A product that is rounded by itself, whatever is added to it.
FUSELAGE_SHARED float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// The distance, at most zero, of a logit from the row's maximum, over temperature. NOTE: that of an
// infinity from an equal one is 0.
FUSELAGE_SHARED float distance_of(float logit, float max_logit, float inv_temperature) {
  return logit == max_logit ? 0.0f : rounded_product(logit - max_logit, inv_temperature);
}

// logit / temperature + more, of a finite logit the nearest finite number.
template <class Math>
FUSELAGE_SHARED float tempered(float logit, float inv_temperature, float more) {
  constexpr float kMax = 3.40282347e+38f;
  const float value = Math::fma(logit, inv_temperature, more);
  if (value > kMax && logit <= kMax) return kMax;
  return value < -kMax && logit >= -kMax ? -kMax : value;
}

// ---- logits ----

// cap * tanh(logit / cap).
template <class Math>
FUSELAGE_SHARED float soft_capped(float logit, float cap) {
  const float v = logit / cap;
  const float size = v < 0.0f ? -v : v;
  if (size < 0.62f) {
    const float square = v * v;
    float p = Math::fma(square, -0.0061003934f, 0.020999726f);
    p = Math::fma(p, square, -0.05385145f);
    p = Math::fma(p, square, 0.13332774f);
    p = Math::fma(p, square, -0.33333328f);
    return cap * Math::fma(v * square, p, v);
  }
  // 1 - 2 / (e^(2 size) + 1). From 9.1 on, this is 1.
  if (!(size < 9.1f)) return size >= 9.1f ? (v < 0.0f ? -cap : cap) : logit;
  const auto e = split_exp<Math>(2.0f * size);
  const float power =
      Math::float_of(static_cast<uint32_t>(static_cast<int32_t>(e.exponent) + 127) << 23);
  const float tanh = 1.0f - 2.0f / Math::fma(e.factor, power, 1.0f);
  return v < 0.0f ? -cap * tanh : cap * tanh;
}

}  // namespace FUSELAGE_SHARED_NAMESPACE
