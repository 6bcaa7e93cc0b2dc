// The sampling family on the CPU: formulas in sample/sample.h, noise and weights in sample/gumbel.h. Compiled
// once per instruction set: see isa.h.

#include "cpu/sample.h"

#include <cstdint>

#include "common/dtype.h"
#include "cpu/isa.h"
#include "cpu/vector.h"
#include "sample/gumbel.h"
#include "sample/sample.h"

namespace fuselage::cpu {

struct SampleFunctions {
  void (*rows)(const GumbelSample& p, SampleRow* rows, int64_t begin, int64_t end);
  void (*draw)(const GumbelSample& p, const SampleRow* rows, SampleCandidate* candidates,
               int64_t begin, int64_t end);
  void (*hidden)(const LmHead& p, float* hidden, int64_t begin, int64_t end);
  void (*logits)(const LmHead& p, const float* hidden, float* scratch, float* logits,
                 int64_t stride, int64_t begin, int64_t end);
  void (*head_draw)(const LmHead& p, const Draws& draws, const float* hidden, float* scratch,
                    SampleCandidate* candidates, int64_t begin, int64_t end);
};

namespace FUSELAGE_ISA {

// Math

// Rounded once, wherever: the compiler may split or join `a * b + c` as it likes.
FUSELAGE_INLINE Floats sample_fma(Floats a, Floats b, Floats c) {
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

typedef int32_t SampleIntegers __attribute__((vector_size(FUSELAGE_VECTOR_BYTES)));

struct SampleVectors {
  using Floats = FUSELAGE_ISA::Floats;
  using Words = FUSELAGE_ISA::Words;
  using Integers = SampleIntegers;
  static FUSELAGE_INLINE Floats fma(Floats a, Floats b, Floats c) { return sample_fma(a, b, c); }
  static FUSELAGE_INLINE Floats fma(Floats a, Floats b, float c) {
    return sample_fma(a, b, broadcast(c));
  }
  static FUSELAGE_INLINE Floats fma(Floats a, float b, Floats c) {
    return sample_fma(a, broadcast(b), c);
  }
  static FUSELAGE_INLINE Floats fma(Floats a, float b, float c) {
    return sample_fma(a, broadcast(b), broadcast(c));
  }
  static FUSELAGE_INLINE Floats to_floats(Integers i) { return __builtin_convertvector(i, Floats); }
  static FUSELAGE_INLINE Integers signed_of(Words words) { return (Integers)words; }
  static FUSELAGE_INLINE Integers integers_of(Floats f) { return (Integers)f; }
  static FUSELAGE_INLINE Floats floats_of(Integers i) { return (Floats)i; }
};

struct SampleNumbers {
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

FUSELAGE_INLINE float sample_minus_infinity() { return -__builtin_inff(); }

// Rows

FUSELAGE_INLINE float sample_option(const RowFloats& option, int64_t row) {
  return option.values == nullptr ? option.value : option.values[row * option.stride];
}

struct SampleHeat {
  bool greedy;
  float inv_temperature;
  float scale, unit;  // of scores
};

FUSELAGE_INLINE SampleHeat sample_heat(const Draws& draws, int64_t row) {
  const float temperature = sample_option(draws.temperature, row);
  if (!(temperature >= 0x1p-126f)) return {true, 1.0f, 1.0f, 0.0f};
  const float inverse = 1.0f / temperature, unit = score_unit<SampleNumbers>(inverse);
  return {false, inverse, inverse * unit, unit};
}

FUSELAGE_INLINE NoiseKey sample_key(const Draws& draws, int64_t row) {
  const uint64_t seed = static_cast<uint64_t>(draws.seeds[row * draws.seed_stride]);
  const uint64_t offset = draws.offsets == nullptr
                              ? 0
                              : static_cast<uint64_t>(draws.offsets[row * draws.offset_stride]);
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
          {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)},
          draws.seed_per_row ? 0u : static_cast<uint32_t>(row) * 256u};
}

template <class T>
static void sample_load_as(const T* from, float* to, int64_t size) {
  for_each_vector(0, size,
                  [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
}

template <class T>
static void sample_add_as(const T* from, float* to, int64_t size) {
  for_each_vector(0, size, [&](int64_t i, auto lanes) {
    store(to + i, load(to + i, lanes) + load(from + i, lanes), lanes);
  });
}

// visit(pointer of the type).
template <class Visit>
FUSELAGE_INLINE void sample_visit(const void* data, DType dtype, Visit visit) {
  switch (dtype) {
    case DType::float32: return visit(static_cast<const float*>(data));
    case DType::float16: return visit(static_cast<const Float16*>(data));
    case DType::bfloat16: return visit(static_cast<const BFloat16*>(data));
  }
}

// Logits [begin, begin + size) of a row; what may not be drawn, NaN among it, is -inf.
static void sample_load(const GumbelSample& p, int64_t row, int64_t begin, int64_t size,
                        float* logits) {
  sample_visit(p.logits, p.dtype, [&](const auto* data) {
    sample_load_as(data + row * p.stride + begin, logits, size);
  });
  if (p.bias != nullptr) {
    sample_visit(p.bias, p.bias_dtype, [&](const auto* data) {
      sample_add_as(data + row * p.bias_stride + begin, logits, size);
    });
  }
  if (p.bitmask != nullptr) {
    const int32_t* mask = p.bitmask + row * p.bitmask_stride;
    for (int64_t i = 0; i < size; ++i) {
      const bool allowed = static_cast<uint32_t>(mask[(begin + i) / 32]) >> (begin + i) % 32 & 1;
      if (!allowed) logits[i] = sample_minus_infinity();
    }
  }
  for (int64_t i = 0; i < size; ++i)
    logits[i] = logits[i] == logits[i] ? logits[i] : sample_minus_infinity();
}

// The greatest of logits [begin, end), -inf where there are none.
FUSELAGE_INLINE float sample_greatest(const float* logits, int64_t begin, int64_t end) {
  Floats greatest = broadcast(sample_minus_infinity());
  for_each_vector(begin, end, [&](int64_t i, auto lanes) {
    Floats logit = greatest;
    __builtin_memcpy(&logit, logits + i, count_of(lanes) * sizeof(float));
    greatest = logit > greatest ? logit : greatest;
  });
  typedef float Quad __attribute__((vector_size(16)));
  Quad quad[kLanes / 4];
  __builtin_memcpy(quad, &greatest, sizeof(quad));
  Quad four = quad[0];
  for (int k = 1; k < kLanes / 4; ++k) four = quad[k] > four ? quad[k] : four;
  const float even = four[0] > four[2] ? four[0] : four[2];
  const float odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

// Draws

FUSELAGE_INLINE SampleCandidate sample_nothing() { return {sample_minus_infinity(), 0.0f, -1}; }

FUSELAGE_INLINE void sample_keep_better(SampleCandidate& best, const SampleCandidate& other) {
  if (other.index < 0) return;
  if (best.index < 0 || other.score > best.score ||
      (other.score == best.score && other.index < best.index)) {
    best = other;
  }
}

// Of logits of a row, the first of which has the number `first` over all shards.
struct SampleDraw {
  const float* logits;  // [size]
  int64_t size, first;
  SampleHeat heat;
  NoiseKey key;
  int sample = 0;
};

// `best`, or a better one of the logits themselves.
static SampleCandidate sample_best_logit(const SampleDraw& p, SampleCandidate best) {
  const Floats none = broadcast(sample_minus_infinity());
  Floats greatest = none;
  SampleIntegers at = {}, number = {};
  for (int k = 0; k < kLanes; ++k) number[k] = k;
  for_each_vector(0, p.size, [&](int64_t i, auto lanes) {
    Floats logit = none;
    __builtin_memcpy(&logit, p.logits + i, count_of(lanes) * sizeof(float));
    const auto better = logit > greatest;
    greatest = better ? logit : greatest;
    at = better ? number + int32_t(i) : at;
  });
  for (int k = 0; k < kLanes; ++k) {
    if (greatest[k] > sample_minus_infinity())
      sample_keep_better(best, {greatest[k], greatest[k], p.first + at[k]});
  }
  return best;
}

constexpr int64_t kSampleGroups = 16;  // of noise, side by side

struct SampleNoise {
  uint32_t least[kSampleGroups], place[kSampleGroups];
  float bound[kSampleGroups];  // no noise of the group is greater; in the unit of scores
};

static void sample_noise(const SampleDraw& p, int64_t group, SampleNoise& noise) {
  for (int64_t j = 0; j < kSampleGroups; ++j) {
    const NoiseGroup one = noise_group(p.key, group + j, p.sample);
    noise.least[j] = one.least;
    noise.place[j] = one.place;
  }
  for_each_vector(0, kSampleGroups, [&](int64_t j, auto lanes) {
    Words least;
    __builtin_memcpy(&least, noise.least + j, sizeof(least));
    store(noise.bound + j, noise_bound<SampleVectors>(least) * p.heat.unit, lanes);
  });
}

// Whether a logit's score is below the best, if its noise is the greatest.
FUSELAGE_INLINE bool sample_cannot_win(const SampleDraw& p, float logit, float bound,
                                       const SampleCandidate& best) {
  return !(logit > sample_minus_infinity()) ||
         SampleNumbers::fma(logit, p.heat.scale, bound) < best.score;
}

static void sample_visit_logit(const SampleDraw& p, int64_t i, const NoiseGroup& group, float bound,
                               SampleCandidate& best) {
  if (sample_cannot_win(p, p.logits[i], bound, best)) return;
  const float noise = noise_of<SampleNumbers>(p.key, group, p.first + i, p.sample);
  const float score = score_of<SampleNumbers>(p.logits[i], noise, p.heat.scale, p.heat.unit);
  if (score > sample_minus_infinity()) sample_keep_better(best, {score, p.logits[i], p.first + i});
}

// `best`, or a better one of the scores. Most groups are below the best even if their greatest logit has their
// greatest noise.
static SampleCandidate sample_best_score(const SampleDraw& p, SampleCandidate best) {
  const int64_t groups_end = group_of(p.first + p.size - 1) + 1;
  for (int64_t groups = group_of(p.first); groups < groups_end; groups += kSampleGroups) {
    SampleNoise noise;
    sample_noise(p, groups, noise);
    for (int64_t j = 0; j < kSampleGroups && groups + j < groups_end; ++j) {
      const int64_t start = (groups + j) * kNoiseGroup - p.first;
      const int64_t begin = start < 0 ? 0 : start;
      const int64_t end = p.size < start + kNoiseGroup ? p.size : start + kNoiseGroup;
      const float greatest = sample_greatest(p.logits, begin, end), bound = noise.bound[j];
      if (sample_cannot_win(p, greatest, bound, best)) continue;
      // The logit with the greatest noise first: the others seldom win then.
      const NoiseGroup group = {noise.least[j], noise.place[j]};
      const int64_t place = start + group.place;
      if (place >= begin && place < end) sample_visit_logit(p, place, group, bound, best);
      for (int64_t i = begin; i < end; ++i) {
        if (i != place) sample_visit_logit(p, i, group, bound, best);
      }
    }
  }
  return best;
}

// `best`, or a better one of the logits.
FUSELAGE_INLINE SampleCandidate sample_best(const SampleDraw& p, const SampleCandidate& best) {
  return p.heat.greedy ? sample_best_logit(p, best) : sample_best_score(p, best);
}

static void sample_draw(const GumbelSample& p, const SampleRow* rows, SampleCandidate* candidates,
                        int64_t begin, int64_t end) {
  const int64_t pieces = sample_pieces(p.draws.vocab);
  float logits[kSamplePiece];
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / pieces, first = piece % pieces * kSamplePiece;
    const int64_t size =
        p.draws.vocab - first < kSamplePiece ? p.draws.vocab - first : kSamplePiece;
    sample_load(p, row, first, size, logits);
    const SampleHeat heat = sample_heat(p.draws, row);
    if (rows != nullptr && !heat.greedy) {
      const float bound = value_of_key<SampleNumbers>(rows[row].bound);
      for (int64_t i = 0; i < size; ++i)
        logits[i] = logits[i] >= bound ? logits[i] : sample_minus_infinity();
    }
    SampleDraw draw = {logits, size, p.draws.vocab_offset + first, heat, sample_key(p.draws, row)};
    const bool known = first > 0 && piece > begin;  // the best of the pieces before
    for (draw.sample = 0; draw.sample < p.draws.num_samples; ++draw.sample) {
      SampleCandidate* best = candidates + piece * p.draws.num_samples + draw.sample;
      *best = sample_best(draw, known ? best[-p.draws.num_samples] : sample_nothing());
    }
  }
}

// Filters

struct SampleBins {
  uint32_t counts[kDistanceBins];
  uint64_t weights[kDistanceBins];
};

// body(logits, size) for all of a row, a piece at a time.
template <class Body>
FUSELAGE_INLINE void sample_for_pieces(const GumbelSample& p, int64_t row, Body body) {
  float logits[kSamplePiece];
  for (int64_t first = 0; first < p.draws.vocab; first += kSamplePiece) {
    const int64_t size =
        p.draws.vocab - first < kSamplePiece ? p.draws.vocab - first : kSamplePiece;
    sample_load(p, row, first, size, logits);
    body(logits, size);
  }
}

// What the keys of a bin are searched for: the greatest key, from which on up there are `count` logits or
// weights of `weight` in all, of which the bins above have `count_above` and `weight_above`. Of two numbers
// that are wanted one is zero.
struct SampleWanted {
  uint64_t count, weight;
};

// Raises the row's bound to the key that is wanted, or to `key` where that is not zero.
static void sample_raise_bound(const GumbelSample& p, int64_t row, float inv_temperature,
                               const SampleBins& bins, SampleWanted wanted, uint32_t key,
                               SampleRow& found) {
  const auto distance_at = [&](float logit) {
    return distance_of(logit, found.greatest, inv_temperature);
  };
  const int weights_shift = weight_shift(p.draws.vocab);
  // The bin.
  uint64_t count = 0, weight = 0;
  int bin = 0;
  if (key != 0) {
    bin = distance_bin<SampleNumbers>(distance_at(value_of_key<SampleNumbers>(key)));
    for (int i = 0; i < bin; ++i) weight += bins.weights[i];
  } else {
    for (; bin < kDistanceBins - 1; ++bin) {
      const uint64_t next_count = count + bins.counts[bin];
      const uint64_t next_weight = weight + bins.weights[bin];
      if (wanted.count != 0 ? next_count >= wanted.count : next_weight >= wanted.weight) break;
      count = next_count;
      weight = next_weight;
    }
  }
  // Of the key, eight bits at a time.
  const int rounds = key != 0 ? 0 : 4;
  uint32_t prefix = 0;
  for (int round = 0; round < rounds; ++round) {
    const int shift = 24 - 8 * round;
    uint32_t counts[256] = {};
    uint64_t weights[256] = {};
    sample_for_pieces(p, row, [&](const float* logits, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        if (!(logits[i] > sample_minus_infinity())) continue;
        const float distance = distance_at(logits[i]);
        if (distance_bin<SampleNumbers>(distance) != bin) continue;
        const uint32_t other = key_of<SampleNumbers>(logits[i]);
        if (round > 0 && other >> (shift + 8) != prefix) continue;
        ++counts[other >> shift & 255];
        weights[other >> shift & 255] += weight_of<SampleNumbers>(distance, weights_shift);
      }
    });
    // The lowest digit that is there is where the search ends at the latest.
    int digit = 255, last = 255;
    while (last >= 0 && counts[last] == 0) --last;
    digit = last;
    for (int i = last; i >= 0; --i) {
      if (counts[i] == 0) continue;
      digit = i;
      if (wanted.count != 0 ? count + counts[i] >= wanted.count
                            : weight + weights[i] >= wanted.weight)
        break;
      if (i == 0) break;
      bool more = false;
      for (int j = i - 1; j >= 0; --j) more |= counts[j] != 0;
      if (!more) break;
      count += counts[i];
      weight += weights[i];
    }
    prefix = prefix << 8 | static_cast<uint32_t>(digit);
    if (round == 3) weight += weights[digit];
  }
  if (key == 0) {
    key = prefix;
  } else {
    sample_for_pieces(p, row, [&](const float* logits, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        if (!(logits[i] > sample_minus_infinity())) continue;
        const float distance = distance_at(logits[i]);
        if (distance_bin<SampleNumbers>(distance) == bin && key_of<SampleNumbers>(logits[i]) >= key)
          weight += weight_of<SampleNumbers>(distance, weights_shift);
      }
    });
  }
  if (key <= found.bound) return;
  found.bound = key;
  found.allowed = weight;
}

static void sample_row(const GumbelSample& p, int64_t row, SampleRow& found) {
  found = {sample_minus_infinity(), kKeyOfMinusInfinity + 1, 0, 0};
  sample_for_pieces(p, row, [&](const float* logits, int64_t size) {
    const float greatest = sample_greatest(logits, 0, size);
    found.greatest = greatest > found.greatest ? greatest : found.greatest;
  });
  const SampleHeat heat = sample_heat(p.draws, row);
  if (heat.greedy || !(found.greatest > sample_minus_infinity())) return;

  SampleBins bins = {};
  const int shift = weight_shift(p.draws.vocab);
  uint64_t count = 0;
  sample_for_pieces(p, row, [&](const float* logits, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      if (!(logits[i] > sample_minus_infinity())) continue;
      const float distance = distance_of(logits[i], found.greatest, heat.inv_temperature);
      const uint64_t weight = weight_of<SampleNumbers>(distance, shift);
      const int bin = distance_bin<SampleNumbers>(distance);
      ++bins.counts[bin];
      bins.weights[bin] += weight;
      found.weights += weight;
      ++count;
    }
  });
  found.allowed = found.weights;
  const Filters& filters = p.filters;
  if (filters.has_top_k) {
    const RowInts& option = filters.top_k;
    const int64_t k = option.values == nullptr ? option.value : option.values[row * option.stride];
    if (k >= 1 && static_cast<uint64_t>(k) < count) {
      sample_raise_bound(p, row, heat.inv_temperature, bins, {static_cast<uint64_t>(k), 0}, 0,
                         found);
    }
  }
  if (filters.has_top_p) {
    const float share = sample_option(filters.top_p, row);
    if (share < 1.0f) {
      const uint64_t weight = weights_needed(share, found.allowed);
      sample_raise_bound(p, row, heat.inv_temperature, bins, {0, weight}, 0, found);
    }
  }
  if (filters.has_min_p) {
    const float share = sample_option(filters.min_p, row);
    if (share >= 0x1p-126f) {
      const uint32_t key = key_at_distance<SampleNumbers>(log_of_normal<SampleNumbers>(share),
                                                          found.greatest, heat.inv_temperature);
      sample_raise_bound(p, row, heat.inv_temperature, bins, {0, 0}, key, found);
    }
  }
}

static void sample_rows(const GumbelSample& p, SampleRow* rows, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) sample_row(p, row, rows[row]);
}

// The head

static void lm_head_hidden(const LmHead& p, float* hidden, int64_t begin, int64_t end) {
  sample_visit(p.hidden, p.dtype, [&](const auto* data) {
    for (int64_t row = begin; row < end; ++row)
      sample_load_as(data + row * p.hidden_stride, hidden + row * p.dim, p.dim);
  });
}

// float8_e4m3: four bits of exponent around 7, three of mantissa, and no infinities.
struct Float8 {
  uint8_t bits;
};

static void lm_head_load_row(const Float8* from, float* to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = from[i].bits;
    const float magnitude = static_cast<float>(bits & 7) * 0x1p-9f;  // of a subnormal
    const float normal = SampleNumbers::float_of((bits & 0x7f) << 20 | 0) * 0x1p120f;
    float value = (bits & 0x78) == 0 ? magnitude : normal;
    value = (bits & 0x7f) == 0x7f ? __builtin_nanf("") : value;
    to[i] = bits & 0x80 ? -value : value;
  }
}

constexpr int kLmHeadRows = 4;  // of weight, at once

// w * x + sum: rounded once where there is an instruction for it, and always twice elsewhere.
FUSELAGE_INLINE Floats lm_head_add(Floats w, Floats x, Floats sum) {
#if FUSELAGE_VECTOR_BYTES > 16 || defined(__aarch64__)
  return sample_fma(w, x, sum);
#else
  return w * x + sum;
#endif
}

// Dots of kLmHeadRows rows of weight with kBatch rows of hidden: each has one accumulator, a vector, whose
// lanes are added up in the end, so that its bits do not depend on the others.
template <int kBatch, class W>
static void lm_head_dots(const W* const (&weights)[kLmHeadRows], const float* hidden, int64_t dim,
                         float (&dots)[kLmHeadRows][kBatch]) {
  Floats sums[kLmHeadRows][kBatch] = {};
  for_each_vector(0, dim, [&](int64_t i, auto lanes) {
    Floats x[kBatch];
    for (int b = 0; b < kBatch; ++b) x[b] = load(hidden + b * dim + i, lanes);
    for (int r = 0; r < kLmHeadRows; ++r) {
      const Floats w = load(weights[r] + i, lanes);
      for (int b = 0; b < kBatch; ++b) sums[r][b] = lm_head_add(w, x[b], sums[r][b]);
    }
  });
  for (int r = 0; r < kLmHeadRows; ++r) {
    for (int b = 0; b < kBatch; ++b) dots[r][b] = sum_lanes(sums[r][b]);
  }
}

// Logits of the weight's rows [begin, end), at most kLmHeadPiece, for all of the batch.
template <class W>
static void lm_head_piece(const LmHead& p, const W* weight, const float* hidden, float* scratch,
                          int64_t begin, int64_t end, float* logits, int64_t stride) {
  for (int64_t row = begin; row < end; row += kLmHeadRows) {
    const int64_t count = end - row < kLmHeadRows ? end - row : kLmHeadRows;
    const auto dots_with = [&](const auto* const(&rows)[kLmHeadRows]) {
      const auto keep = [&](int64_t b, const auto& dots) {
        for (int64_t r = 0; r < count; ++r) {
          for (int k = 0; k < int(sizeof(dots[0]) / sizeof(float)); ++k) {
            float logit = dots[r][k];
            if (p.weight_scale != nullptr) logit *= p.weight_scale[p.scale_per_row ? row + r : 0];
            if (p.bias != nullptr) {
              float bias = 0;
              sample_visit(p.bias, p.bias_dtype,
                           [&](const auto* data) { sample_load_as(data + row + r, &bias, 1); });
              // A float64 sum, so that nothing is an fma.
              logit = static_cast<float>(static_cast<double>(logit) + bias);
            }
            if (p.softcap != 0) logit = soft_capped<SampleNumbers>(logit, p.softcap);
            logits[(b + k) * stride + row - begin + r] = logit;
          }
        }
      };
      int64_t b = 0;
      for (; b + 4 <= p.batch; b += 4) {
        float dots[kLmHeadRows][4];
        lm_head_dots(rows, hidden + b * p.dim, p.dim, dots);
        keep(b, dots);
      }
      for (; b < p.batch; ++b) {
        float dots[kLmHeadRows][1];
        lm_head_dots(rows, hidden + b * p.dim, p.dim, dots);
        keep(b, dots);
      }
    };
    if constexpr (sizeof(W) == 1) {
      const float* rows[kLmHeadRows];
      for (int64_t r = 0; r < kLmHeadRows; ++r) {
        rows[r] = scratch + r * p.dim;
        if (r < count) {
          lm_head_load_row(weight + (row + r) * p.weight_stride, scratch + r * p.dim, p.dim);
        } else {
          rows[r] = rows[0];
        }
      }
      dots_with(rows);
    } else {
      const W* rows[kLmHeadRows];
      for (int64_t r = 0; r < kLmHeadRows; ++r)
        rows[r] = weight + (row + (r < count ? r : 0)) * p.weight_stride;
      dots_with(rows);
    }
  }
}

static void lm_head_piece_of(const LmHead& p, const float* hidden, float* scratch, int64_t begin,
                             int64_t end, float* logits, int64_t stride) {
  if (p.weight_type == WeightType::float8_e4m3) {
    return lm_head_piece(p, static_cast<const Float8*>(p.weight), hidden, scratch, begin, end,
                         logits, stride);
  }
  sample_visit(p.weight, p.dtype, [&](const auto* weight) {
    lm_head_piece(p, weight, hidden, scratch, begin, end, logits, stride);
  });
}

static void lm_head_logits(const LmHead& p, const float* hidden, float* scratch, float* logits,
                           int64_t stride, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece * kLmHeadPiece;
    const int64_t row_end = p.vocab - row < kLmHeadPiece ? p.vocab : row + kLmHeadPiece;
    lm_head_piece_of(p, hidden, scratch, row, row_end, logits + row, stride);
  }
}

static void lm_head_draw(const LmHead& p, const Draws& draws, const float* hidden, float* scratch,
                         SampleCandidate* candidates, int64_t begin, int64_t end) {
  const int64_t pieces = lm_head_pieces(p.vocab);
  float* logits = scratch + kLmHeadRows * p.dim;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece * kLmHeadPiece;
    const int64_t row_end = p.vocab - row < kLmHeadPiece ? p.vocab : row + kLmHeadPiece;
    lm_head_piece_of(p, hidden, scratch, row, row_end, logits, kLmHeadPiece);
    for (int64_t b = 0; b < p.batch; ++b) {
      float* own = logits + b * kLmHeadPiece;
      for (int64_t i = 0; i < row_end - row; ++i)
        own[i] = own[i] == own[i] ? own[i] : sample_minus_infinity();
      SampleDraw draw = {own, row_end - row, draws.vocab_offset + row, sample_heat(draws, b),
                         sample_key(draws, b)};
      for (draw.sample = 0; draw.sample < draws.num_samples; ++draw.sample) {
        SampleCandidate* best = candidates + (b * pieces + piece) * draws.num_samples + draw.sample;
        *best = sample_best(draw, piece > begin ? best[-draws.num_samples] : sample_nothing());
      }
    }
  }
}

extern FUSELAGE_HIDDEN const SampleFunctions sample_functions;
const SampleFunctions sample_functions = {sample_rows, sample_draw, lm_head_hidden, lm_head_logits,
                                          lm_head_draw};

}  // namespace FUSELAGE_ISA

// The public functions

#if FUSELAGE_ISA_IS_BASELINE

FUSELAGE_PICK_ISA(SampleFunctions, sample_functions)

void sample_rows(const GumbelSample& p, SampleRow* rows, int64_t begin, int64_t end) {
  functions_of_this_cpu().rows(p, rows, begin, end);
}

void sample_draw(const GumbelSample& p, const SampleRow* rows, SampleCandidate* candidates,
                 int64_t begin, int64_t end) {
  functions_of_this_cpu().draw(p, rows, candidates, begin, end);
}

void lm_head_hidden(const LmHead& p, float* hidden, int64_t begin, int64_t end) {
  functions_of_this_cpu().hidden(p, hidden, begin, end);
}

void lm_head_logits(const LmHead& p, const float* hidden, float* scratch, float* logits,
                    int64_t stride, int64_t begin, int64_t end) {
  functions_of_this_cpu().logits(p, hidden, scratch, logits, stride, begin, end);
}

void lm_head_draw(const LmHead& p, const Draws& draws, const float* hidden, float* scratch,
                  SampleCandidate* candidates, int64_t begin, int64_t end) {
  functions_of_this_cpu().head_draw(p, draws, hidden, scratch, candidates, begin, end);
}

int64_t lm_head_logits_scratch(const LmHead& p) { return baseline::kLmHeadRows * p.dim; }

int64_t lm_head_draw_scratch(const LmHead& p) {
  return lm_head_logits_scratch(p) + p.batch * kLmHeadPiece;
}

void sample_finish(const Draws& draws, const DrawResults& results, const SampleRow* rows,
                   const SampleCandidate* candidates, int64_t pieces) {
  using baseline::SampleNumbers;
  const int samples = draws.num_samples;
  for (int64_t row = 0; row < draws.batch; ++row) {
    const baseline::SampleHeat heat = baseline::sample_heat(draws, row);
    const float none = baseline::sample_minus_infinity();
    // Logs of the sums, of which the greatest weight is 1.
    float log_all = 0, log_allowed = 0;
    if (rows != nullptr && !heat.greedy && rows[row].weights != 0) {
      const int shift = baseline::weight_shift(draws.vocab);
      log_all = baseline::log_of_weights<SampleNumbers>(rows[row].weights, shift);
      log_allowed = baseline::log_of_weights<SampleNumbers>(rows[row].allowed, shift);
    }
    if (results.log_sum_exp != nullptr) {
      results.log_sum_exp[row] = heat.greedy
                                     ? none
                                     : baseline::tempered<SampleNumbers>(
                                           rows[row].greatest, heat.inv_temperature, log_all);
    }
    for (int s = 0; s < samples; ++s) {
      SampleCandidate best = {none, none, -1};
      for (int64_t piece = 0; piece < pieces; ++piece)
        baseline::sample_keep_better(best, candidates[(row * pieces + piece) * samples + s]);
      const int64_t i = row * samples + s;
      results.tokens[i] = best.index;
      if (results.scores != nullptr) results.scores[i] = best.score;
      if (results.logits != nullptr) {
        results.logits[i] =
            baseline::tempered<SampleNumbers>(best.logit, heat.inv_temperature, 0.0f);
      }
      if (results.logprobs == nullptr) continue;
      float distance = none;
      if (best.index >= 0)
        distance = heat.greedy ? 0.0f
                               : baseline::distance_of(best.logit, rows[row].greatest,
                                                       heat.inv_temperature);
      results.logprobs[i] = distance - log_all;
      results.filtered_logprobs[i] = distance - log_allowed;
    }
  }
  if (draws.offsets == nullptr) return;
  for (int64_t i = 0; i < (draws.offset_per_row ? draws.batch : 1); ++i)
    ++draws.offsets[i * draws.offset_stride];
}

#endif

}  // namespace fuselage::cpu
