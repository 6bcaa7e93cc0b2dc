// Reading a row's logits, and offering them to a draw: what the kernels that draw from given logits share.
//
// Most logits cannot win whatever the logarithms of their noise are, and only the few others are computed. A score
// reaches `floor` only if
//   1 - u <= -log(u) = e^-g <= e^(logit / temperature - floor)
// where u is the random word as a number in (0, 1). That takes no logarithm, and four neighbouring logits are
// told together by the greatest of them and the greatest of their words.
#pragma once

#include "sample/sample_device.h"
#include "sample/sample_policy.h"

namespace fuselage {

// ---- logits ----

// kSampleVector logits of a row on their way, as whole vectors of 16 bytes.
template <typename T>
struct LogitLoading {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  static constexpr int kCount = kSampleVector / kWidth;
  Loading<T, kWidth, false> loading[kCount];

  __device__ __forceinline__ void start(const T* row, int column, int dim) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) loading[i].start(row, column + i * kWidth, dim);
  }
  // What may not be drawn, what is behind the end and NaN among it, is -inf.
  __device__ __forceinline__ void finish(const GumbelSample& p, int64_t row_number, const T* row,
                                         int column, int dim,
                                         float (&logits)[kSampleVector]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float values[kWidth];
      loading[i].finish(row, column + i * kWidth, dim).to_floats(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) logits[i * kWidth + k] = values[k];
    }
    if (column >= dim) {
#pragma unroll
      for (int k = 0; k < kSampleVector; ++k) logits[k] = minus_infinity();
      return;
    }
    if (p.bias != nullptr) {
#pragma unroll
      for (int k = 0; k < kSampleVector; ++k) {
        if (column + k < dim)
          logits[k] += element_of(p.bias, p.bias_dtype, row_number * p.bias_stride + column + k);
      }
    }
    uint32_t mask = 0xffu;
    if (p.bitmask != nullptr) {
      mask = static_cast<uint32_t>(p.bitmask[row_number * p.bitmask_stride + column / 32]) >>
             (column % 32);
    }
    static_assert(32 % kSampleVector == 0, "a vector has one word of the mask");
#pragma unroll
    for (int k = 0; k < kSampleVector; ++k) {
      const bool drawn = column + k < dim && (mask >> k & 1) != 0 && logits[k] == logits[k];
      logits[k] = drawn ? logits[k] : minus_infinity();
    }
  }
};

template <typename T>
__device__ __forceinline__ const T* row_of(const GumbelSample& p, int64_t row) {
  return static_cast<const T*>(p.logits) + row * p.stride;
}

// body(column, logits) for the vectors of the columns [begin, end) of a row, shared out over the block. All
// threads call the body equally often. NOTE: NaN may be among the logits.
template <typename T, typename Body>
__device__ __forceinline__ void for_each_vector(const GumbelSample& p, int64_t row, int64_t begin,
                                                int64_t end, Body body) {
  using Whole = Vector<T, LogitLoading<T>::kWidth>;
  constexpr int kCount = LogitLoading<T>::kCount;
  const T* data = row_of<T>(p, row);
  const int dim = static_cast<int>(end);
  const int64_t turn = int64_t{blockDim.x} * kSampleVector;
  const bool plain =
      p.bias == nullptr && p.bitmask == nullptr && Whole::shift_of(data + begin) == 0;
  for (int64_t first = begin; first < end; first += turn * kSampleVectors) {
    float logits[kSampleVectors][kSampleVector];
    if (plain && first + turn * kSampleVectors <= end) {
      Whole loaded[kSampleVectors][kCount];
#pragma unroll
      for (int j = 0; j < kSampleVectors; ++j) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          loaded[j][i] =
              Whole::load(data + first + j * turn + int64_t{threadIdx.x} * kSampleVector +
                          i * LogitLoading<T>::kWidth);
        }
      }
#pragma unroll
      for (int j = 0; j < kSampleVectors; ++j) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          float values[LogitLoading<T>::kWidth];
          loaded[j][i].to_floats(values);
#pragma unroll
          for (int k = 0; k < LogitLoading<T>::kWidth; ++k)
            logits[j][i * LogitLoading<T>::kWidth + k] = values[k];
        }
      }
    } else {
      LogitLoading<T> loading[kSampleVectors];
#pragma unroll
      for (int j = 0; j < kSampleVectors; ++j) {
        const int64_t column = first + j * turn + int64_t{threadIdx.x} * kSampleVector;
        loading[j].start(data, static_cast<int>(column < end ? column : end), dim);
      }
#pragma unroll
      for (int j = 0; j < kSampleVectors; ++j) {
        const int64_t column = first + j * turn + int64_t{threadIdx.x} * kSampleVector;
        loading[j].finish(p, row, data, static_cast<int>(column < end ? column : end), dim,
                          logits[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kSampleVectors; ++j) {
      const int64_t column = first + j * turn + int64_t{threadIdx.x} * kSampleVector;
      body(static_cast<int>(column < end ? column : end), logits[j]);
    }
  }
}

// ---- the draw ----

constexpr float kLog2OfE = 1.4426950408889634f;

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
  // As noise_words.
  __device__ __forceinline__ PhiloxWords words(const NoiseKey& key, int64_t block,
                                               int sample) const {
    PhiloxWords counter{{static_cast<uint32_t>(block), key.stream + static_cast<uint32_t>(sample),
                         key.offset[0], key.offset[1]}};
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round)
      philox_round<WholeProducts>(counter, keys[0][round], keys[1][round]);
    return counter;
  }
};

// The keys of rounds made each time.
struct MadeKeys {
  __device__ __forceinline__ PhiloxWords words(const NoiseKey& key, int64_t block,
                                               int sample) const {
    return noise_words(key, block, sample);
  }
};

// One thread's draw of one sample of a row. All threads of a warp call all of it together. The floor, which a score
// must reach, is the best score that the block is known to have: `block_floor`, in shared memory, has its key.
template <typename Keys>
struct Drawing {
  NoiseKey key;
  Keys keys;
  float inv_temperature;
  int sample, shift;
  uint32_t* block_floor;
  Candidate best;
  float floor,
      exponent;  // 2^(logit * inv_temperature * log2(e) + exponent) bounds 1 - u from above

  __device__ __forceinline__ void set_floor(float value) {
    floor = value;
    // Less by more than all that is rounded here and in the score.
    const float scaled = value * kLog2OfE;
    exponent = absolute(scaled) * 9.5367431640625e-7f + 0.001953125f - scaled;
  }

  static __device__ __forceinline__ float absolute(float value) {
    return __uint_as_float(__float_as_uint(value) & 0x7fffffffu);
  }

  // Whether a logit of at most `logit` with a word of at most `word` may reach the floor. NOTE: what is no number
  // may.
  __device__ __forceinline__ bool may_win(float logit, uint32_t word) const {
    const float most =
        exp2_approximate(SampleMath::fma(logit, inv_temperature * kLog2OfE, exponent));
    // 1 + u, of which 23 bits are left, in [1, 2).
    const float u = __uint_as_float(word >> 9 | 0x3f800000u);
    return !(u < 1.99999976158142090f - most);
  }

  // A score of at most that of the logit, by approximate logarithms.
  __device__ __forceinline__ float low_score(float logit, uint32_t word) const {
    const float u = static_cast<float>(word >> 8) * 5.9604644775390625e-8f;
    const float minus_log = 4.76837158e-7f - 0.69314718f * log2_approximate(u);
    const float score =
        SampleMath::fma(logit, inv_temperature, -0.69314718f * log2_approximate(minus_log));
    return score - absolute(score) * 1.0e-6f - 1.0e-4f;
  }

  // Takes the floor that the warp and the rest of the block have.
  __device__ __forceinline__ void share_floor(float score) {
    score = warp_greatest(score);
    if (score > floor) {
      set_floor(score);
      if (threadIdx.x % kWarpSize == 0) atomicMax(block_floor, key_of<SampleMath>(score));
    }
  }
  __device__ __forceinline__ void take_floor() {
    const float others = value_or_none(*static_cast<volatile uint32_t*>(block_floor));
    if (others > floor) set_floor(others);
  }

  // Offers neighbouring logits, the first of which is that of `column`, or number `index` of all shards.
  template <int kCount>
  __device__ __forceinline__ void offer_all(const float (&logits)[kCount], int64_t index,
                                            int column) {
    uint32_t words[kCount];
    make_words(index >> 2, words);
    if (floor == minus_infinity()) {
      // The first: approximate scores spare the exact ones of nearly all.
      float score = minus_infinity();
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float low = low_score(logits[k], words[k]);
        score = low > score ? low : score;
      }
      share_floor(score);
    }
    bool may = false;
#pragma unroll
    for (int k = 0; k < kCount; k += 4) {
      may |=
          may_win(greater(greater(logits[k], logits[k + 1]), greater(logits[k + 2], logits[k + 3])),
                  greater(greater(words[k], words[k + 1]), greater(words[k + 2], words[k + 3])));
    }
    if (!warp_any(may)) return;
    uint32_t open = 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) open |= may && may_win(logits[k], words[k]) ? 1u << k : 0u;
    while (open != 0) {
      const int chosen = __ffs(static_cast<int>(open)) - 1;
      open &= open - 1;
      float logit = logits[0];
      uint32_t word = words[0];
#pragma unroll
      for (int k = 1; k < kCount; ++k) {
        logit = k == chosen ? logits[k] : logit;
        word = k == chosen ? words[k] : word;
      }
      if (!(logit > minus_infinity())) continue;
      const float score = SampleMath::fma(logit, inv_temperature, gumbel_of<SampleMath>(word));
      offer(best, score, logit, column + chosen);
    }
    share_floor(best.score);
  }

 private:
  // Those from word `shift` of block `block` on.
  template <int kCount>
  __device__ __forceinline__ void make_words(int64_t block, uint32_t (&words)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const PhiloxWords four = keys.words(key, block + i / 4, sample);
#pragma unroll
      for (int k = 0; k < 4; ++k) words[i + k] = four.words[k];
    }
    if (shift == 0) return;
    const PhiloxWords last = keys.words(key, block + kCount / 4, sample);
    const auto word = [&](int i) { return i < kCount ? words[i] : last.words[i - kCount]; };
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      words[i] = shift == 1 ? word(i + 1) : shift == 2 ? word(i + 2) : word(i + 3);
  }

  // NOTE: of a number and what is none, the number.
  static __device__ __forceinline__ float greater(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ uint32_t greater(uint32_t a, uint32_t b) {
    return a > b ? a : b;
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
