// What the sampling kernels share: the float32 arithmetic of sample/gumbel.h, a row's options,
// candidates and their reductions.
#pragma once

#include "common/dispatch.h"
#include "common/ptx.h"
#include "common/reduce.h"
#include "common/runtime_dtype.h"
#include "common/strip_device.h"
#include "sample/gumbel.h"
#include "sample/sample.h"

namespace fuselage {

using SampleMath = GpuFloats;

__device__ __forceinline__ float option_of(const RowFloats& option, int64_t row) {
  return option.values == nullptr ? option.value : option.values[row * option.stride];
}

__device__ __forceinline__ int64_t option_of(const RowInts& option, int64_t row) {
  return option.values == nullptr ? option.value : option.values[row * option.stride];
}

// The value of a key, and -inf for 0, which is none.
__device__ __forceinline__ float value_or_none(uint32_t key) {
  return key == 0 ? minus_infinity() : value_of_key<SampleMath>(key);
}

struct RowTemperature {
  bool greedy;
  float inv_temperature;
  float scale, unit;  // of scores
};

__device__ __forceinline__ RowTemperature row_temperature(const RowFloats& temperatures,
                                                          int64_t row) {
  const float temperature = option_of(temperatures, row);
  if (!(temperature >= 1.17549435e-38f)) return {true, 1.0f, 1.0f, 0.0f};
  const float inverse = 1.0f / temperature, unit = score_unit<SampleMath>(inverse);
  return {false, inverse, inverse * unit, unit};
}

__device__ __forceinline__ RowTemperature row_temperature(const Draws& draws, int64_t row) {
  return row_temperature(draws.temperature, row);
}

// Distances and weights of a row's logits.
struct Scale {
  float max_logit, inv_temperature;

  __device__ __forceinline__ float distance(float logit) const {
    return distance_of(logit, max_logit, inv_temperature);
  }
  __device__ __forceinline__ unsigned long long weight_of_key(uint32_t key) const {
    return weight_of<SampleMath>(distance(value_of_key<SampleMath>(key)));
  }
  __device__ __forceinline__ int bin(float logit) const {
    return distance_bin<SampleMath>(distance(logit));
  }
};

__device__ __forceinline__ NoiseKey key_of_row(const Draws& draws, int64_t row) {
  const uint64_t seed = static_cast<uint64_t>(draws.seeds[row * draws.seed_stride]);
  const int64_t step = draws.offsets == nullptr ? 0 : draws.offsets[row * draws.offset_stride];
  const uint64_t offset = static_cast<uint64_t>(step) - (draws.is_advanced ? 1 : 0);
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
          {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)},
          draws.seed_per_row ? 0u : static_cast<uint32_t>(row) * 256u};
}

// Whether no other row reads the row's offset: then the row's draw advances it.
__host__ __device__ __forceinline__ bool has_own_offset(const Draws& draws) {
  return draws.offsets != nullptr && (draws.offset_per_row || draws.batch == 1);
}

// Whether several rows read one offset, which is advanced after all of them.
__host__ __device__ __forceinline__ bool has_shared_offset(const Draws& draws) {
  return draws.offsets != nullptr && !has_own_offset(draws);
}

struct RowStrips {
  const float* maxima;
  float threshold;

  __device__ __forceinline__ RowStrips(const Strips& strips, int64_t row)
      : maxima(strips.maxima == nullptr ? nullptr : strips.maxima + row * strips.stride),
        threshold(minus_infinity()) {
    const uint32_t key = strips.thresholds == nullptr ? 0 : strips.thresholds[row];
    if (key != 0) threshold = value_of_key<SampleMath>(key);
  }
  // Whether the strip of that column was not written.
  __device__ __forceinline__ bool is_absent(int column) const {
    return maxima != nullptr && maxima[column / kStrip] < threshold;
  }
};

// ---- candidates ----

// The best of some of a row's logits. `index` is that in the shard, or kNoIndex.
struct Candidate {
  float score, logit;
  int index;
};

constexpr int kNoIndex = 0x7fffffff;

__device__ __forceinline__ Candidate no_candidate() { return {minus_infinity(), 0.0f, kNoIndex}; }

// NOTE: a score of -inf, as of what may not be drawn, is no candidate.
__device__ __forceinline__ void keep_better(Candidate& best, const Candidate& other) {
  if (other.score > best.score || (other.score == best.score && other.index < best.index))
    best = other;
}

__device__ __forceinline__ void offer(Candidate& best, float score, float logit, int index) {
  if (score > minus_infinity()) keep_better(best, {score, logit, index});
}

// In every lane.
__device__ __forceinline__ Candidate warp_best(Candidate best) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    Candidate other;
    other.score = shuffle_xor(best.score, mask, kWarpSize);
    other.logit = shuffle_xor(best.logit, mask, kWarpSize);
    other.index =
        SampleMath::integers_of(shuffle_xor(SampleMath::floats_of(best.index), mask, kWarpSize));
    keep_better(best, other);
  }
  return best;
}

// What the filters and the log-probabilities know of a row. `bound` is the lowest key of a logit
// that may be drawn, and `allowed` the sum of the weights from there on, once a filter has raised
// the bound. `strip_weights` is the sum of all as log-probabilities have it.
struct RowState {
  unsigned long long weights, allowed, strip_weights;
  uint32_t max_key;  // or 0
  uint32_t bound;
  uint32_t listed;
  uint32_t raised;
};

__device__ __forceinline__ bool wants_sums(const DrawResults& results) {
  return results.logprobs != nullptr || results.log_sum_exp != nullptr;
}

// The weight of a strip, of which 16 / N neighbouring lanes have N logits each, in the first of
// them; 0 in the others. -inf stands for what may not be drawn.
template <int N>
__device__ __forceinline__ unsigned long long weight_of_strip(const float (&logits)[N],
                                                              const Scale& scale, int shift) {
  constexpr int kLanes = kStrip / N;
  float max = logits[0];
#pragma unroll
  for (int k = 1; k < N; ++k) max = fmaxf(max, logits[k]);
  max = warp_max(max, kLanes);
  const float to_powers = strip_scale(scale.inv_temperature);
  uint32_t weights = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) weights += StripWeight<true>(logits[k], max, to_powers).units();
  if (max == -minus_infinity()) {
#pragma unroll
    for (int k = 0; k < N; ++k) weights += units_of_infinite(logits[k], max);
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) weights += shuffle_xor(weights, mask, kLanes);
  if (threadIdx.x % kLanes != 0) return 0;
  return weight_of_strip<SampleMath>(weights, scale.distance(max), shift);
}

// Writes the draw of a row's sample. `state` is used where log-probabilities are wanted.
__device__ __forceinline__ void write_draw(const Draws& draws, const DrawResults& results,
                                           int64_t row, int sample, const Candidate& best,
                                           const RowState& state) {
  const int64_t slot = row * draws.num_samples + sample;
  const bool found = best.index != kNoIndex;
  results.tokens[slot] = found ? draws.vocab_offset + best.index : -1;
  if (results.scores != nullptr) results.scores[slot] = best.score;
  const RowTemperature temperature = row_temperature(draws, row);
  if (results.logits != nullptr)
    results.logits[slot] = found
                               ? tempered<SampleMath>(best.logit, temperature.inv_temperature, 0.0f)
                               : minus_infinity();
  if (results.logprobs == nullptr && results.log_sum_exp == nullptr) return;
  const float max_logit = value_or_none(state.max_key);
  float log_all = 0.0f, log_allowed = 0.0f;
  if (!temperature.greedy && state.strip_weights != 0) {
    const int shift = weight_shift(draws.vocab);
    log_all = log_allowed = log_of_weights<SampleMath>(state.strip_weights, shift);
    // NOTE: a sum of other roundings, which may be larger.
    if (state.raised != 0)
      log_allowed = fminf(log_all, log_of_weights<SampleMath>(state.allowed, shift));
  }
  if (results.log_sum_exp != nullptr && sample == 0) {
    results.log_sum_exp[row] =
        temperature.greedy ? minus_infinity()
                           : tempered<SampleMath>(max_logit, temperature.inv_temperature, log_all);
  }
  if (results.logprobs == nullptr) return;
  float distance = minus_infinity();
  if (found)
    distance =
        temperature.greedy ? 0.0f : distance_of(best.logit, max_logit, temperature.inv_temperature);
  results.logprobs[slot] = distance - log_all;
  results.filtered_logprobs[slot] = distance - log_allowed;
}

namespace gpu {

// The second stage: the best of `parts` candidates of each row and sample, and the step of the
// offsets. `states` may be null. Dependent on the kernel that writes the candidates.
gpuError draw_finish(const Draws& draws, const DrawResults& results, const RowState* states,
                     const Candidate* candidates,  // [batch, parts, num_samples]
                     int64_t parts, gpuStream stream);

// Advances an offset that rows share, after the kernel that reads it.
gpuError advance_shared_offset(int64_t* offset, gpuStream stream);

}  // namespace gpu
}  // namespace fuselage
