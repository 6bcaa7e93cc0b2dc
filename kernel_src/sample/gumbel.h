// The noise of a draw, written once for the GPU and the CPU: same inputs, same bits. Random words
// are Philox4x32-10's; logarithms, weights and `Math` are those of common/softmax_math.h.
#pragma once

#include <cstdint>

#include "common/softmax_math.h"

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

// ---- the distribution ----

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

}  // namespace FUSELAGE_SHARED_NAMESPACE
