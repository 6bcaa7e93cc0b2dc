// Loading a row's logits, and offering them to a draw: what the kernels that draw from given logits
// share.
//
// The noise of a group of logits has an upper bound, which takes no logarithm. With that, most
// logits are below the best score so far. Only the few others' noise is made.
#pragma once

#include "sample/sample_device.h"
#include "sample/sample_policy.h"

namespace fuselage {

// ---- logits ----

// kLogits of a row that are being loaded, as whole vectors of 16 bytes.
template <typename T, int kLogits>
struct LogitLoading {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  static constexpr int kCount = kLogits / kWidth;
  Loading<T, kWidth, false> loading[kCount];

  __device__ __forceinline__ void start(const T* row, int column, int dim) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) loading[i].start(row, column + i * kWidth, dim);
  }
  // -inf stands for what may not be drawn: NaN, and columns past the end.
  __device__ __forceinline__ void finish(const GumbelSample& p, int64_t row_number, const T* row,
                                         int column, int dim, float (&logits)[kLogits]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float values[kWidth];
      loading[i].finish(row, column + i * kWidth, dim).to_floats(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) logits[i * kWidth + k] = values[k];
    }
    if (column >= dim) {
#pragma unroll
      for (int k = 0; k < kLogits; ++k) logits[k] = minus_infinity();
      return;
    }
    if (p.bias != nullptr) {
#pragma unroll
      for (int k = 0; k < kLogits; ++k) {
        if (column + k < dim)
          logits[k] += load_value(p.bias, p.bias_dtype, row_number * p.bias_stride + column + k);
      }
    }
    uint32_t mask = ~0u;
    if (p.bitmask != nullptr) {
      mask = static_cast<uint32_t>(p.bitmask[row_number * p.bitmask_stride + column / 32]) >>
             (column % 32);
    }
    static_assert(32 % kLogits == 0, "a vector has one word of the mask");
#pragma unroll
    for (int k = 0; k < kLogits; ++k) {
      const bool drawn = column + k < dim && (mask >> k & 1) != 0 && logits[k] == logits[k];
      logits[k] = drawn ? logits[k] : minus_infinity();
    }
  }
};

template <typename T>
__device__ __forceinline__ const T* row_of(const GumbelSample& p, int64_t row) {
  return static_cast<const T*>(p.logits) + row * p.stride;
}

// body(column, logits) for the vectors, of kLogits each, of columns [begin, end) of a row, over the
// threads of the block. All threads call the body equally often. NOTE: NaN may be among the logits.
template <typename T, int kLogits, typename Body>
__device__ __forceinline__ void for_each_vector(const GumbelSample& p, int64_t row, int64_t begin,
                                                int64_t end, Body body) {
  using Logits = LogitLoading<T, kLogits>;
  using Whole = Vector<T, Logits::kWidth>;
  constexpr int kCount = Logits::kCount, kAtOnce = kSampleLoads / kLogits;
  const T* data = row_of<T>(p, row);
  const int dim = static_cast<int>(end);
  const int64_t step = int64_t{blockDim.x} * kLogits;
  const bool plain =
      p.bias == nullptr && p.bitmask == nullptr && Whole::shift_of(data + begin) == 0;
  for (int64_t first = begin; first < end; first += step * kAtOnce) {
    float logits[kAtOnce][kLogits];
    if (plain && first + step * kAtOnce <= end) {
      Whole loaded[kAtOnce][kCount];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          loaded[j][i] = Whole::load(data + first + j * step + int64_t{threadIdx.x} * kLogits +
                                     i * Logits::kWidth);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          float values[Logits::kWidth];
          loaded[j][i].to_floats(values);
#pragma unroll
          for (int k = 0; k < Logits::kWidth; ++k) logits[j][i * Logits::kWidth + k] = values[k];
        }
      }
    } else {
      Logits loading[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t column = first + j * step + int64_t{threadIdx.x} * kLogits;
        loading[j].start(data, static_cast<int>(column < end ? column : end), dim);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t column = first + j * step + int64_t{threadIdx.x} * kLogits;
        loading[j].finish(p, row, data, static_cast<int>(column < end ? column : end), dim,
                          logits[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t column = first + j * step + int64_t{threadIdx.x} * kLogits;
      body(static_cast<int>(column < end ? column : end), logits[j]);
    }
  }
}

// ---- the draw ----

// The keys of Philox's rounds, in registers: for a draw of many words, to add them up each time is
// a third of the work.
struct KeptKeys {
  uint32_t keys[2][kPhiloxRounds];

  __device__ __forceinline__ void set(const NoiseKey& key) {
    uint32_t k0 = key.key[0], k1 = key.key[1];
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      // NOTE: by a shuffle from a lane that has the same: otherwise the compiler computes them
      // again.
      keys[0][round] = shuffle_from_first(k0);
      keys[1][round] = shuffle_from_first(k1);
      philox_next_keys(k0, k1);
    }
  }
  static __device__ __forceinline__ uint32_t shuffle_from_first(uint32_t value) {
    return __float_as_uint(shuffle_from(__uint_as_float(value), 0, kWarpSize));
  }
  // As noise_group.
  __device__ __forceinline__ NoiseGroup group(const NoiseKey& key, int64_t group,
                                              int sample) const {
    PhiloxWords counter{{static_cast<uint32_t>(group), key.stream + static_cast<uint32_t>(sample),
                         key.offset[0], key.offset[1]}};
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round)
      philox_round<WholeProducts>(counter, keys[0][round], keys[1][round]);
    return noise_group_of(counter);
  }
};

// The keys of rounds, computed each time.
struct MadeKeys {
  __device__ __forceinline__ NoiseGroup group(const NoiseKey& key, int64_t group,
                                              int sample) const {
    return noise_group(key, group, sample);
  }
};

// The threshold of a logit, for a score of `score` with noise of at most `bound`. Lower by more
// than all roundings here and in the score.
__device__ __forceinline__ float logit_threshold(float score, float bound, float scale,
                                                 float unit) {
  const float threshold =
      __fdividef(score - bound * unit - (fabsf(score) + 32.0f * unit) * 1e-6f, scale);
  // NOTE: of an infinite score that is NaN.
  return score < -minus_infinity() ? threshold - fabsf(threshold) * 1e-6f - 1e-30f : score;
}

// One thread's draw of one sample of a row. All threads of a warp call all of it together. The
// threshold of scores is the best one that is known: `shared_threshold`, in shared memory, has its
// key, or 0.
template <typename Keys>
struct Drawing {
  NoiseKey key;
  Keys keys;
  float scale, unit;  // of scores
  int sample;
  uint32_t* shared_threshold;
  Candidate best;
  float threshold;

  // A lower bound of the score of the logit at the group's position, by approximate logarithms.
  __device__ __forceinline__ float low_score(float logit, uint32_t word) const {
    const float u = static_cast<float>(word >> 8) * 5.9604644775390625e-8f;
    const float minus_log = 4.76837158e-7f - 0.69314718f * log2_approximate(u);
    const float noise = kLogOfNoiseGroup - 0.69314718f * log2_approximate(minus_log);
    const float score = score_of<SampleMath>(logit, noise, scale, unit);
    return score - fabsf(score) * 1.0e-6f - 1.0e-4f * unit;
  }

  // Raises the threshold to the warp's largest score, for the block, too.
  __device__ __forceinline__ void share_threshold(float score) {
    score = warp_max(score);
    if (score > threshold) {
      threshold = score;
      if (threadIdx.x % kWarpSize == 0) atomicMax(shared_threshold, key_of<SampleMath>(score));
    }
  }
  __device__ __forceinline__ void load_threshold() {
    const float others = value_or_none(*static_cast<volatile uint32_t*>(shared_threshold));
    if (others > threshold) threshold = others;
  }

  // The noise groups of neighbouring logits, whose first has `index` over all shards. From number
  // `split` on, the logits are the next group's. NOTE: `split` and `two` are the same for all
  // vectors.
  struct Groups {
    NoiseGroup group, next;
    int split;
    bool two;

    __device__ __forceinline__ const NoiseGroup& of(int k) const {
      return k < split ? group : next;
    }
  };
  template <int kCount>
  __device__ __forceinline__ Groups groups_at(int64_t index) const {
    static_assert(kNoiseGroup % kCount == 0, "of two groups at most");
    Groups groups;
    groups.split = kNoiseGroup - static_cast<int>(index & (kNoiseGroup - 1));
    groups.two = index % kCount != 0;
    groups.group = groups.next = keys.group(key, group_of(index), sample);
    if (groups.two) groups.next = keys.group(key, group_of(index) + 1, sample);
    return groups;
  }

  // Raises the threshold to the best of the logits that have the maximum noise of their group, by
  // lower bounds.
  template <int kCount>
  __device__ __forceinline__ void init_threshold(const float (&logits)[kCount],
                                                 const Groups& groups) {
    float score = minus_infinity();
    const auto try_position = [&](const NoiseGroup& its, int first) {
      float logit = minus_infinity();
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        logit = first + k == static_cast<int>(its.position) ? logits[k] : logit;
      const float low = low_score(logit, its.min_word);
      score = low > score ? low : score;
    };
    try_position(groups.group, kNoiseGroup - groups.split);
    if (groups.two) try_position(groups.next, -groups.split);
    share_threshold(score);
  }

  // Whether any of a lane's logits may reach the threshold.
  template <int kCount>
  __device__ __forceinline__ bool has_candidate(const float (&logits)[kCount],
                                                const Groups& groups) const {
    float max_logit = logits[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) max_logit = fmaxf(max_logit, logits[k]);
    const uint32_t word =
        groups.group.min_word > groups.next.min_word ? groups.group.min_word : groups.next.min_word;
    return max_logit > minus_infinity() &&
           max_logit >= logit_threshold(threshold, noise_bound<SampleMath>(word), scale, unit);
  }

  __device__ __forceinline__ void offer_one(float logit, const NoiseGroup& group, int64_t index,
                                            int column) {
    const float noise = noise_of<SampleMath>(key, group, index, sample);
    offer(best, score_of<SampleMath>(logit, noise, scale, unit), logit, column);
  }

  // Offers a lane's candidates, unless the lane `skips`. The first logit is that of `column`, and
  // has `index` over all shards. The largest comes first, as each raises the threshold for the
  // others.
  template <int kCount>
  __device__ __forceinline__ void offer_all(const float (&logits)[kCount], const Groups& groups,
                                            int64_t index, int column, bool skips) {
    const float bound = noise_bound<SampleMath>(groups.group.min_word);
    const float next_bound = noise_bound<SampleMath>(groups.next.min_word);
    uint32_t untried = skips ? 0 : (1u << kCount) - 1;
    while (true) {
      const float reach = logit_threshold(threshold, bound, scale, unit);
      const float next_reach = logit_threshold(threshold, next_bound, scale, unit);
      int chosen = 0;
      float logit = minus_infinity();
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const bool may =
            (untried >> k & 1) != 0 && logits[k] >= (k < groups.split ? reach : next_reach);
        if (may && logits[k] > logit) {
          chosen = k;
          logit = logits[k];
        }
      }
      const bool is_open = logit > minus_infinity();
      if (!warp_any(is_open)) return;
      if (is_open) {
        untried &= ~(1u << chosen);
        offer_one(logit, groups.of(chosen), index + chosen, column + chosen);
      }
      share_threshold(best.score);
    }
  }

  // All of it, for few logits.
  template <int kCount>
  __device__ __forceinline__ void draw(const float (&logits)[kCount], int64_t index, int column) {
    const Groups groups = groups_at<kCount>(index);
    if (threshold == minus_infinity()) init_threshold(logits, groups);
    if (warp_any(has_candidate(logits, groups))) offer_all(logits, groups, index, column, false);
  }
};

// The best of a block's candidates, in its first thread. All threads call it. A barrier must be
// between two calls.
template <int kThreads>
__device__ __forceinline__ Candidate block_best(Candidate best,
                                                Candidate (&of_warps)[kThreads / kWarpSize]) {
  best = warp_best(best);
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = best;
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    best = threadIdx.x < kThreads / kWarpSize ? of_warps[threadIdx.x] : no_candidate();
    best = warp_best(best);
  }
  return best;
}

}  // namespace fuselage
