// Draws of the sampling family on the CPU.
//
// Part of sample/sample_cpu.cpp, which says how it is compiled.
#pragma once

#include "sample/sample_cpu_rows.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

FUSELAGE_INLINE SampleCandidate sample_nothing() { return {sample_minus_infinity(), 0.0f, -1}; }

FUSELAGE_INLINE void sample_keep_better(SampleCandidate& best, const SampleCandidate& other) {
  if (other.index < 0) return;
  if (best.index < 0 || other.score > best.score ||
      (other.score == best.score && other.index < best.index)) {
    best = other;
  }
}

// One sample of some of a row's logits, the first of which has the index `first` over all shards.
struct SampleDraw {
  const float* logits;  // [size]
  int64_t size, first;
  SampleTemperature temperature;
  NoiseKey key;
  int sample = 0;
};

// `best`, or the largest of the logits.
static SampleCandidate sample_best_logit(const SampleDraw& p, SampleCandidate best) {
  const Floats none = broadcast(sample_minus_infinity());
  Floats maxima = none;
  SampleIntegers at = {}, number = {};
  for (int k = 0; k < kLanes; ++k) number[k] = k;
  for_each_vector(0, p.size, [&](int64_t i, auto lanes) {
    Floats logit = none;
    __builtin_memcpy(&logit, p.logits + i, count_of(lanes) * sizeof(float));
    const auto better = logit > maxima;
    maxima = better ? logit : maxima;
    at = better ? number + int32_t(i) : at;
  });
  for (int k = 0; k < kLanes; ++k) {
    if (maxima[k] > sample_minus_infinity())
      sample_keep_better(best, {maxima[k], maxima[k], p.first + at[k]});
  }
  return best;
}

constexpr int64_t kSampleGroups = 16;  // of noise, in vectors

struct SampleNoise {
  uint32_t min_word[kSampleGroups], position[kSampleGroups];
  float bound[kSampleGroups];  // upper bound of the group's noise, in the unit of scores
};

static void sample_noise(const SampleDraw& p, int64_t group, SampleNoise& noise) {
  for (int64_t j = 0; j < kSampleGroups; ++j) {
    const NoiseGroup one = noise_group(p.key, group + j, p.sample);
    noise.min_word[j] = one.min_word;
    noise.position[j] = one.position;
  }
  for_each_vector(0, kSampleGroups, [&](int64_t j, auto lanes) {
    Words min_words;
    __builtin_memcpy(&min_words, noise.min_word + j, sizeof(min_words));
    store(noise.bound + j, noise_bound<SampleVectors>(min_words) * p.temperature.unit, lanes);
  });
}

// Whether a logit's score is below the best, with the upper bound of its noise.
FUSELAGE_INLINE bool sample_cannot_reach(const SampleDraw& p, float logit, float bound,
                                         const SampleCandidate& best) {
  return !(logit > sample_minus_infinity()) ||
         SampleNumbers::fma(logit, p.temperature.scale, bound) < best.score;
}

static void sample_visit_logit(const SampleDraw& p, int64_t i, const NoiseGroup& group, float bound,
                               SampleCandidate& best) {
  if (sample_cannot_reach(p, p.logits[i], bound, best)) return;
  const float noise = noise_of<SampleNumbers>(p.key, group, p.first + i, p.sample);
  const float score =
      score_of<SampleNumbers>(p.logits[i], noise, p.temperature.scale, p.temperature.unit);
  if (score > sample_minus_infinity()) sample_keep_better(best, {score, p.logits[i], p.first + i});
}

// `best`, or the best of the scores. Most groups are below it even with the bound of their noise
// for their largest logit.
static SampleCandidate sample_best_score(const SampleDraw& p, SampleCandidate best) {
  const int64_t groups_end = group_of(p.first + p.size - 1) + 1;
  for (int64_t groups = group_of(p.first); groups < groups_end; groups += kSampleGroups) {
    SampleNoise noise;
    sample_noise(p, groups, noise);
    for (int64_t j = 0; j < kSampleGroups && groups + j < groups_end; ++j) {
      const int64_t start = (groups + j) * kNoiseGroup - p.first;
      const int64_t begin = start < 0 ? 0 : start;
      const int64_t end = p.size < start + kNoiseGroup ? p.size : start + kNoiseGroup;
      const float max_logit = sample_max(p.logits, begin, end), bound = noise.bound[j];
      if (sample_cannot_reach(p, max_logit, bound, best)) continue;
      // The logit with the most noise first: with its score the others are seldom candidates.
      const NoiseGroup group = {noise.min_word[j], noise.position[j]};
      const int64_t first = start + group.position;
      if (first >= begin && first < end) sample_visit_logit(p, first, group, bound, best);
      for (int64_t i = begin; i < end; ++i) {
        if (i != first) sample_visit_logit(p, i, group, bound, best);
      }
    }
  }
  return best;
}

// `best`, or a better one of the logits.
FUSELAGE_INLINE SampleCandidate sample_best(const SampleDraw& p, const SampleCandidate& best) {
  return p.temperature.greedy ? sample_best_logit(p, best) : sample_best_score(p, best);
}

FUSELAGE_HIDDEN void sample_draw(const GumbelSample& p, const SampleRow* rows,
                                 SampleCandidate* candidates, int64_t begin, int64_t end) {
  const int64_t pieces = sample_pieces(p.draws.vocab);
  float logits[kSamplePiece];
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / pieces, first = piece % pieces * kSamplePiece;
    const int64_t size =
        p.draws.vocab - first < kSamplePiece ? p.draws.vocab - first : kSamplePiece;
    sample_load(p, row, first, size, logits);
    const SampleTemperature temperature = sample_temperature(p.draws, row);
    if (rows != nullptr && !temperature.greedy) {
      const float bound = value_of_key<SampleNumbers>(rows[row].bound);
      for (int64_t i = 0; i < size; ++i)
        logits[i] = logits[i] >= bound ? logits[i] : sample_minus_infinity();
    }
    SampleDraw draw = {logits, size, p.draws.vocab_offset + first, temperature,
                       sample_key(p.draws, row)};
    const bool known = first > 0 && piece > begin;  // the best of the pieces before
    for (draw.sample = 0; draw.sample < p.draws.num_samples; ++draw.sample) {
      SampleCandidate* best = candidates + piece * p.draws.num_samples + draw.sample;
      *best = sample_best(draw, known ? best[-p.draws.num_samples] : sample_nothing());
    }
  }
}

}  // namespace FUSELAGE_ISA
}  // namespace fuselage::cpu
