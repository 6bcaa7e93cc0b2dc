// Reading a row's logits, and offering them to a draw: what the kernels that draw from given logits share.
//
// Most logits cannot win by the greatest noise of their group, which a bound of it tells without a logarithm. Only the few
// others' noise is made.
#pragma once

#include "sample/sample_device.h"
#include "sample/sample_policy.h"

namespace fuselage {

// ---- logits ----

// kLogits of a row on their way, as whole vectors of 16 bytes.
template <typename T, int kLogits>
struct LogitLoading {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  static constexpr int kCount = kLogits / kWidth;
  Loading<T, kWidth, false> loading[kCount];

  __device__ __forceinline__ void start(const T* row, int column, int dim) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) loading[i].start(row, column + i * kWidth, dim);
  }
  // What may not be drawn, what is behind the end and NaN among it, is -inf.
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
          logits[k] += element_of(p.bias, p.bias_dtype, row_number * p.bias_stride + column + k);
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

// body(column, logits) for the vectors, of kLogits each, of the columns [begin, end) of a row, shared out over the block. All
// threads call the body equally often. NOTE: NaN may be among the logits.
template <typename T, int kLogits, typename Body>
__device__ __forceinline__ void for_each_vector(const GumbelSample& p, int64_t row, int64_t begin,
                                                int64_t end, Body body) {
  using Logits = LogitLoading<T, kLogits>;
  using Whole = Vector<T, Logits::kWidth>;
  constexpr int kCount = Logits::kCount, kAtOnce = kSampleTurn / kLogits;
  const T* data = row_of<T>(p, row);
  const int dim = static_cast<int>(end);
  const int64_t turn = int64_t{blockDim.x} * kLogits;
  const bool plain =
      p.bias == nullptr && p.bitmask == nullptr && Whole::shift_of(data + begin) == 0;
  for (int64_t first = begin; first < end; first += turn * kAtOnce) {
    float logits[kAtOnce][kLogits];
    if (plain && first + turn * kAtOnce <= end) {
      Whole loaded[kAtOnce][kCount];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          loaded[j][i] = Whole::load(data + first + j * turn + int64_t{threadIdx.x} * kLogits +
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
        const int64_t column = first + j * turn + int64_t{threadIdx.x} * kLogits;
        loading[j].start(data, static_cast<int>(column < end ? column : end), dim);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t column = first + j * turn + int64_t{threadIdx.x} * kLogits;
        loading[j].finish(p, row, data, static_cast<int>(column < end ? column : end), dim,
                          logits[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t column = first + j * turn + int64_t{threadIdx.x} * kLogits;
      body(static_cast<int>(column < end ? column : end), logits[j]);
    }
  }
}

// ---- the draw ----

// The keys of Philox's rounds. Kept by a draw of many words, for which adding them up each time is a third of the work.
struct KeptKeys {
  uint32_t keys[2][kPhiloxRounds];

  __device__ __forceinline__ void set(const NoiseKey& key) {
    uint32_t k0 = key.key[0], k1 = key.key[1];
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      // NOTE: through other lanes, which have the same: what the compiler can make again, it does not keep.
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

// The keys of rounds made each time.
struct MadeKeys {
  __device__ __forceinline__ NoiseGroup group(const NoiseKey& key, int64_t group,
                                              int sample) const {
    return noise_group(key, group, sample);
  }
};

// What a logit has to reach for a score of `least` with noise of at most `noise`. Less by more than all that is rounded
// here and in the score.
__device__ __forceinline__ float threshold_of(float least, float noise, float scale, float unit) {
  const float threshold =
      __fdividef(least - noise * unit - (fabsf(least) + 32.0f * unit) * 1e-6f, scale);
  // NOTE: no number where that is infinite.
  return least < -minus_infinity() ? threshold - fabsf(threshold) * 1e-6f - 1e-30f : least;
}

// One thread's draw of one sample of a row. All threads of a warp call all of it together. The floor, which a score
// must reach, is the best score that is known: `shared_floor`, in shared memory, has its key, or 0.
template <typename Keys>
struct Drawing {
  NoiseKey key;
  Keys keys;
  float scale, unit;  // of scores
  int sample;
  uint32_t* shared_floor;
  Candidate best;
  float floor;

  // A score of at most that of the logit in the group's place, by approximate logarithms.
  __device__ __forceinline__ float low_score(float logit, uint32_t word) const {
    const float u = static_cast<float>(word >> 8) * 5.9604644775390625e-8f;
    const float minus_log = 4.76837158e-7f - 0.69314718f * log2_approximate(u);
    const float noise = kLogOfNoiseGroup - 0.69314718f * log2_approximate(minus_log);
    const float score = score_of<SampleMath>(logit, noise, scale, unit);
    return score - fabsf(score) * 1.0e-6f - 1.0e-4f * unit;
  }

  // Takes the floor that the warp and all others have.
  __device__ __forceinline__ void share_floor(float score) {
    score = warp_greatest(score);
    if (score > floor) {
      floor = score;
      if (threadIdx.x % kWarpSize == 0) atomicMax(shared_floor, key_of<SampleMath>(score));
    }
  }
  __device__ __forceinline__ void take_floor() {
    const float others = value_or_none(*static_cast<volatile uint32_t*>(shared_floor));
    if (others > floor) floor = others;
  }

  // The groups of neighbouring logits, the first of which is number `index` of all shards: from number `split` on, the
  // logits are the next group's. NOTE: all vectors lie alike.
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

  // Raises the floor to the best of the logits that have their group's greatest noise, by approximate scores.
  template <int kCount>
  __device__ __forceinline__ void raise_floor(const float (&logits)[kCount], const Groups& groups) {
    float score = minus_infinity();
    const auto take_place = [&](const NoiseGroup& its, int first) {
      float logit = minus_infinity();
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        logit = first + k == static_cast<int>(its.place) ? logits[k] : logit;
      const float low = low_score(logit, its.least);
      score = low > score ? low : score;
    };
    take_place(groups.group, kNoiseGroup - groups.split);
    if (groups.two) take_place(groups.next, -groups.split);
    share_floor(score);
  }

  // Whether any of a lane's logits may reach the floor.
  template <int kCount>
  __device__ __forceinline__ bool may_win(const float (&logits)[kCount],
                                          const Groups& groups) const {
    float greatest = logits[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) greatest = fmaxf(greatest, logits[k]);
    const uint32_t word =
        groups.group.least > groups.next.least ? groups.group.least : groups.next.least;
    return greatest > minus_infinity() &&
           greatest >= threshold_of(floor, noise_bound<SampleMath>(word), scale, unit);
  }

  __device__ __forceinline__ void offer_one(float logit, const NoiseGroup& group, int64_t index,
                                            int column) {
    const float noise = noise_of<SampleMath>(key, group, index, sample);
    offer(best, score_of<SampleMath>(logit, noise, scale, unit), logit, column);
  }

  // Offers those of a lane's logits that may win, unless the lane `skips`. The first is that of `column`, and number
  // `index` of all shards. The greatest come first, as each raises the floor for the others.
  template <int kCount>
  __device__ __forceinline__ void offer_all(const float (&logits)[kCount], const Groups& groups,
                                            int64_t index, int column, bool skips) {
    const float most = noise_bound<SampleMath>(groups.group.least);
    const float most_of_next = noise_bound<SampleMath>(groups.next.least);
    uint32_t untried = skips ? 0 : (1u << kCount) - 1;
    while (true) {
      const float reach = threshold_of(floor, most, scale, unit);
      const float reach_of_next = threshold_of(floor, most_of_next, scale, unit);
      int chosen = 0;
      float logit = minus_infinity();
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const bool may =
            (untried >> k & 1) != 0 && logits[k] >= (k < groups.split ? reach : reach_of_next);
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
      share_floor(best.score);
    }
  }

  // All of it, for few logits.
  template <int kCount>
  __device__ __forceinline__ void draw(const float (&logits)[kCount], int64_t index, int column) {
    const Groups groups = groups_at<kCount>(index);
    if (floor == minus_infinity()) raise_floor(logits, groups);
    if (warp_any(may_win(logits, groups))) offer_all(logits, groups, index, column, false);
  }
};

// The best of a block's candidates, in its first thread. All threads call it, and meet again before the next call.
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
