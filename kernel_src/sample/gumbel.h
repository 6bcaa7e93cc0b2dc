// The noise of a draw and the weights of a distribution, written once for the GPU and the CPU: same
// inputs, same bits. Random words are Philox4x32-10's; logarithms and exponentials are polynomials
// made of single float32 operations. Nowhere is the sum of a product and something else left to the
// compiler, which on some targets would round it once and on others twice: what is to be rounded
// once is an fma.
//
// `Math` says what they are computed with: Floats, Words and Integers, which are one float,
// uint32_t and int32_t, or vectors of as many, and
//   fma(a, b, c)       rounded once
//   to_floats(i)       of integers, rounded to nearest
//   to_integers(f)     towards zero
//   words_of(f), integers_of(f), floats_of(i)     the same bits
//   absolute(f)
#pragma once

#include <cstdint>

#include "common/shared.h"

namespace FUSELAGE_SHARED_NAMESPACE {

// ---- random words ----

struct PhiloxWords {
  uint32_t words[4];
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFirst = 0xd2511f53u, kPhiloxSecond = 0xcd9e8d57u;

struct WordProduct {
  uint32_t high, low;
};

// Products with Philox's two factors.
struct WholeProducts {
  static FUSELAGE_SHARED WordProduct split(uint64_t product) {
    return {static_cast<uint32_t>(product >> 32), static_cast<uint32_t>(product)};
  }
  static FUSELAGE_SHARED WordProduct first(uint32_t v) { return split(uint64_t{kPhiloxFirst} * v); }
  static FUSELAGE_SHARED WordProduct second(uint32_t v) {
    return split(uint64_t{kPhiloxSecond} * v);
  }
};

template <class Products>
FUSELAGE_SHARED void philox_round(PhiloxWords& counter, uint32_t k0, uint32_t k1) {
  uint32_t(&c)[4] = counter.words;
  const WordProduct first = Products::first(c[0]), second = Products::second(c[2]);
  const uint32_t c0 = second.high ^ c[1] ^ k0, c2 = first.high ^ c[3] ^ k1;
  c[1] = second.low;
  c[3] = first.low;
  c[0] = c0;
  c[2] = c2;
}

// The keys of the next round.
FUSELAGE_SHARED void philox_next_keys(uint32_t& k0, uint32_t& k1) {
  k0 += 0x9e3779b9u;
  k1 += 0xbb67ae85u;
}

// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
template <class Products = WholeProducts>
FUSELAGE_SHARED PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                   uint32_t k1) {
  PhiloxWords counter{{c0, c1, c2, c3}};
#if defined(__CUDACC__) || defined(__HIPCC__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round<Products>(counter, k0, k1);
    philox_next_keys(k0, k1);
  }
  return counter;
}

// The noise of a row depends on this.
struct NoiseKey {
  uint32_t key[2];     // the row's seed
  uint32_t offset[2];  // the row's step
  uint32_t stream;     // 256 times the number of the row among those of one seed
};

// The words of a number, for one of a row's samples.
template <class Products>
FUSELAGE_SHARED PhiloxWords noise_words(const NoiseKey& key, int64_t number, uint32_t offset_high,
                                        int sample) {
  return philox<Products>(static_cast<uint32_t>(number), key.stream + static_cast<uint32_t>(sample),
                          key.offset[0], offset_high, key.key[0], key.key[1]);
}

// ---- where noise comes from ----

// The maximum of the noise of 16 neighbours is made first, so that most of the rest need not be
// made. -log(u) of a uniform u has the exponential distribution, and noise is -log of that. Of
// kNoiseGroup such exponentials e_i
//   the minimum has the distribution of e / kNoiseGroup, and is at each position equally often,
//   the others are the minimum plus an exponential each, as these have no memory.
// So a group of logits, counted over all shards, has two words: one for the minimum, and one for
// its position. The noise of the other positions has a word of its own besides.
constexpr int kNoiseGroup = 16;
constexpr float kLogOfNoiseGroup = 2.772588722239781f;

struct NoiseGroup {
  uint32_t min_word;  // of the smallest exponential
  uint32_t position;  // its index % kNoiseGroup
};

static_assert(kNoiseGroup == 1 << 4, "group_of and the position take four bits");

FUSELAGE_SHARED NoiseGroup noise_group_of(const PhiloxWords& noise) {
  return {noise.words[0], noise.words[1] >> 28};
}

// The number of a logit's group.
FUSELAGE_SHARED int64_t group_of(int64_t index) { return index >> 4; }

template <class Products = WholeProducts>
FUSELAGE_SHARED NoiseGroup noise_group(const NoiseKey& key, int64_t group, int sample) {
  return noise_group_of(noise_words<Products>(key, group, key.offset[1], sample));
}

// The own word of a logit. Offsets are not negative: their highest bit tells these words from those
// of groups.
FUSELAGE_SHARED uint32_t noise_word(const NoiseKey& key, int64_t index, int sample) {
  const PhiloxWords noise =
      noise_words<WholeProducts>(key, index >> 2, key.offset[1] ^ 0x80000000u, sample);
  // NOTE: words in registers have no run-time index.
  const uint32_t even = index & 2 ? noise.words[2] : noise.words[0];
  const uint32_t odd = index & 2 ? noise.words[3] : noise.words[1];
  return index & 1 ? odd : even;
}

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

// -log((x + 1/2) / 2^32) of a random word x: a draw of the exponential distribution, in [1.16e-10,
// 22.9]. The distance of (x + 1/2) / 2^32 to the nearer of 0 and 1 is what is rounded to float32,
// so that both tails are exact to a few units of the last place.
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED Floats exponential_of(typename Math::Words word) {
  using Integers = typename Math::Integers;
  const Integers x = Math::signed_of(word);
  const Floats distance =
      (Math::to_floats(x < 0 ? ~x : x) + 0.5f) * 2.3283064365386963e-10f;  // in (0, 1/2]
  // Near 1: 1 - distance as it is, or twice that.
  const Split<Floats> low = split<Math>(distance);
  const Floats none = distance - distance;
  const Floats high_f = distance <= 0.33333334f ? -distance : 1.0f - 2.0f * distance;
  const Floats high_exponent = distance <= 0.33333334f ? none : none - 1.0f;
  const Floats f = x < 0 ? high_f : low.f, exponent = x < 0 ? high_exponent : low.exponent;
  return -log_of_split<Math>(f, exponent);
}

// The smallest exponential of a group. NOTE: exact, so that it does not matter how a sum with it is
// rounded.
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED Floats min_of_group(typename Math::Words word) {
  return exponential_of<Math>(word) * (1.0f / kNoiseGroup);
}

// The noise of a logit of the group: a draw of the Gumbel distribution, in [-3.2, 25.7].
template <class Math>
FUSELAGE_SHARED float noise_of(const NoiseKey& key, const NoiseGroup& group, int64_t index,
                               int sample) {
  float exponential = min_of_group<Math>(group.min_word);
  if (group.position != static_cast<uint64_t>(index) % kNoiseGroup)
    exponential += exponential_of<Math>(noise_word(key, index, sample));
  return -log_of_normal<Math>(exponential);
}

template <class Math>
FUSELAGE_SHARED float noise_of(const NoiseKey& key, int64_t index, int sample) {
  const NoiseGroup group = noise_group(key, group_of(index), sample);
  return noise_of<Math>(key, group, index, sample);
}

// No noise is smaller.
constexpr float kMinNoise = -3.25f;

// An upper bound of the noise of a group, of a few operations: where a score with it is too low,
// the noise need not be computed. Above kNoiseBoundTight it is at most kNoiseBoundError more than
// the maximum.
constexpr float kNoiseBoundError = 0.33f, kNoiseBoundTight = 3.2f;

template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED Floats noise_bound(typename Math::Words word) {
  using Integers = typename Math::Integers;
  const Integers x = Math::signed_of(word);
  // Near 1, -log(1 - d) is between d and 2 log(2) d. log2(d) is at least its linear interpolation,
  // which the bits of d are as an integer, and at most 0.0861 more. d = (~x + 1/2) / 2^32.
  const Floats distance = Math::to_floats(~x) + 0.5f;
  const Floats bits = Math::to_floats(Math::integers_of(distance));
  const Floats high = Math::fma(bits, -8.2629582881927490e-8f, 112.9831f);
  const Floats none = high - high;
  return x < 0 ? high : none + 3.1392f;  // -log(log(2) / 16) is less
}

// ---- exponentials ----

struct SplitExp {
  float factor, exponent;  // factor * 2^exponent; the factor is in [0.7, 1.42], a multiple of 2^-24
};

// e^v, as long as the exponent is small.
template <class Math>
FUSELAGE_SHARED SplitExp split_exp(float v) {
  // Adding and taking away 1.5 * 2^23 rounds to an integer.
  const float k = Math::fma(v, 1.4426950408889634f, 12582912.0f) - 12582912.0f;
  float r = Math::fma(k, -0.693359375f, v);
  r = Math::fma(k, 2.12194440e-4f, r);
  float p = Math::fma(r, 0.0013901283f, 0.008363162f);
  p = Math::fma(p, r, 0.041666854f);
  p = Math::fma(p, r, 0.16666578f);
  p = Math::fma(p, r, 0.5f);
  return {Math::fma(r * r, p, r) + 1.0f, k};
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
  const SplitExp e = split_exp<Math>(distance);
  const uint64_t mantissa = static_cast<uint64_t>(static_cast<uint32_t>(e.factor * 16777216.0f))
                            << (kWeightBits - 24);
  const int down = shift - static_cast<int>(e.exponent);
  return down == 0 ? mantissa : (mantissa + (uint64_t{1} << (down - 1))) >> down;
}

// Log of a sum of weights in units of the largest.
template <class Math>
FUSELAGE_SHARED float log_of_weights(uint64_t sum, int shift) {
  const float unit = static_cast<float>(1 << shift) * 9.0949470177292824e-13f;  // 2^(shift - 40)
  return log_of_normal<Math>(static_cast<float>(sum) * unit);
}

// Larger floats have larger keys, and equal floats equal ones. Never 0, which stands for no value.
template <class Math>
FUSELAGE_SHARED uint32_t key_of(float value) {
  const uint32_t bits = Math::word_of(value + 0.0f);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

template <class Math>
FUSELAGE_SHARED float value_of_key(uint32_t key) {
  return Math::float_of(key >> 31 != 0 ? key & 0x7fffffffu : ~key);
}

constexpr uint32_t kKeyOfMinusInfinity = 0x007fffffu;

// Distances from the maximum of a row have bins: 1/64 wide up to 4, then 1/32 wide up to 12, and so
// on, 256 of a width, up to 508. Of the few bins beyond there are two for each doubling, to
// infinity.
constexpr int kDistanceBins = 2048;
constexpr int kNearDistanceBins = 1792;

// For distances not beyond 500.
template <class Math>
FUSELAGE_SHARED int near_distance_bin(float distance) {
  return (Math::integers_of(4.0f - distance) - 0x40800000) >> 15;  // the bits of 4.0
}

template <class Math>
FUSELAGE_SHARED int distance_bin(float distance) {
  // NaN counts as infinitely far. NOTE: it may have either sign.
  const int32_t bits =
      distance <= 0.0f ? Math::integers_of(4.0f - distance) - 0x40800000 : 0x7f800000 - 0x40800000;
  const int near = bits >> 15;
  const int far = kNearDistanceBins + ((bits - (kNearDistanceBins << 15)) >> 22);
  return near < far ? near : far;
}

// The distance, at most zero, of a logit from the row's maximum, over temperature. NOTE: that of an
// infinity from an equal one is 0.
FUSELAGE_SHARED float distance_of(float logit, float max_logit, float inv_temperature) {
  return logit == max_logit ? 0.0f : (logit - max_logit) * inv_temperature;
}

// The lowest key whose distance from the maximum is at least `lowest`.
template <class Math>
FUSELAGE_SHARED uint32_t key_at_distance(float lowest, float max_logit, float inv_temperature) {
  uint32_t low = kKeyOfMinusInfinity, high = key_of<Math>(max_logit);
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    const float distance = distance_of(value_of_key<Math>(middle), max_logit, inv_temperature);
    if (distance >= lowest) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

// `share` of a sum of weights, at least one.
FUSELAGE_SHARED uint64_t weights_needed(float share, uint64_t sum) {
  const double wanted = static_cast<double>(share) * static_cast<double>(sum);
  uint64_t needed = static_cast<uint64_t>(wanted);
  if (static_cast<double>(needed) < wanted) ++needed;
  if (needed < 1) needed = 1;
  return needed < sum ? needed : sum;
}

// ---- scores ----

// Scores are in a unit that keeps those of finite logits finite: 1 / temperature, rounded up to a
// power of two, where that is more than 1. So they are rounded, and ordered, as without it. This is
// a score of 1 in that unit.
template <class Math>
FUSELAGE_SHARED float score_unit(float inv_temperature) {
  const int32_t exponent = (Math::integers_of(inv_temperature) + 0x7fffff) >> 23;  // rounded up
  return exponent <= 127 ? 1.0f : Math::floats_of((254 - exponent) << 23);
}

// `scale` is 1 / temperature in that unit.
template <class Math>
FUSELAGE_SHARED float score_of(float logit, float noise, float scale, float unit) {
  return Math::fma(logit, scale, noise * unit);
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
  const SplitExp e = split_exp<Math>(2.0f * size);
  const float power =
      Math::float_of(static_cast<uint32_t>(static_cast<int32_t>(e.exponent) + 127) << 23);
  const float tanh = 1.0f - 2.0f / Math::fma(e.factor, power, 1.0f);
  return v < 0.0f ? -cap * tanh : cap * tanh;
}

}  // namespace FUSELAGE_SHARED_NAMESPACE
