// The filters of the sampling family on the CPU.
//
// Part of sample/sample_cpu.cpp, which says how it is compiled.
#pragma once

#include "sample/sample_cpu_rows.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

struct SampleBins {
  uint32_t counts[kDistanceBins];
  uint64_t weights[kDistanceBins];
};

// body(logits, size) for all of a row, a piece at a time, -inf up to whole strips.
template <class Body>
FUSELAGE_INLINE void sample_for_pieces(const GumbelSample& p, int64_t row, Body body) {
  float logits[kSamplePiece];
  for (int64_t first = 0; first < p.draws.vocab; first += kSamplePiece) {
    const int64_t size =
        p.draws.vocab - first < kSamplePiece ? p.draws.vocab - first : kSamplePiece;
    sample_load(p, row, first, size, logits);
    for (int64_t i = size; i % kStrip != 0; ++i) logits[i] = sample_minus_infinity();
    body(logits, size);
  }
}

// What a filter looks for: the highest key such that `count` logits, or weights that sum up to
// `weight`, are at or above it. One of the two is zero.
struct SampleWanted {
  uint64_t count, weight;
};

// Raises the row's bound to that key, or to `key` where that is not zero.
static void sample_raise_bound(const GumbelSample& p, int64_t row, float inv_temperature,
                               const SampleBins& bins, SampleWanted wanted, uint32_t key,
                               SampleRow& found) {
  const auto distance_at = [&](float logit) {
    return distance_of(logit, found.max_logit, inv_temperature);
  };
  const int weights_shift = weight_shift(p.draws.vocab);
  // The bin of the key.
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
  // The key, eight bits at a time.
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
    // The search ends at the lowest digit that occurs, if not before.
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
  found = {sample_minus_infinity(), kSampleNoBound, 0, 0, 0};
  sample_for_pieces(p, row, [&](const float* logits, int64_t size) {
    const float max_logit = sample_max(logits, 0, size);
    found.max_logit = max_logit > found.max_logit ? max_logit : found.max_logit;
  });
  const SampleTemperature temperature = sample_temperature(p.draws, row);
  if (temperature.greedy || !(found.max_logit > sample_minus_infinity())) return;

  SampleBins bins = {};
  const int shift = weight_shift(p.draws.vocab);
  uint64_t count = 0;
  sample_for_pieces(p, row, [&](const float* logits, int64_t size) {
    for (int64_t i = 0; i < size && p.results.needs_sums(); i += kStrip) {
      const StripSum strip = strip_sum(logits + i, temperature.inv_temperature, nullptr);
      const float distance = distance_of(strip.max, found.max_logit, temperature.inv_temperature);
      found.strip_weights += weight_of_strip<SampleNumbers>(strip.weights, distance, shift);
    }
    for (int64_t i = 0; i < size && p.filters.any(); ++i) {
      if (!(logits[i] > sample_minus_infinity())) continue;
      const float distance = distance_of(logits[i], found.max_logit, temperature.inv_temperature);
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
      sample_raise_bound(p, row, temperature.inv_temperature, bins, {static_cast<uint64_t>(k), 0},
                         0, found);
    }
  }
  if (filters.has_top_p) {
    const float share = sample_option(filters.top_p, row);
    if (share < 1.0f) {
      const uint64_t weight = weights_needed(share, found.allowed);
      sample_raise_bound(p, row, temperature.inv_temperature, bins, {0, weight}, 0, found);
    }
  }
  if (filters.has_min_p) {
    const float share = sample_option(filters.min_p, row);
    if (share >= 0x1p-126f) {
      const uint32_t key = key_at_distance<SampleNumbers>(
          log_of_normal<SampleNumbers>(share), found.max_logit, temperature.inv_temperature);
      sample_raise_bound(p, row, temperature.inv_temperature, bins, {0, 0}, key, found);
    }
  }
}

FUSELAGE_HIDDEN void sample_rows(const GumbelSample& p, SampleRow* rows, int64_t begin,
                                 int64_t end) {
  for (int64_t row = begin; row < end; ++row) sample_row(p, row, rows[row]);
}

}  // namespace FUSELAGE_ISA
}  // namespace fuselage::cpu
