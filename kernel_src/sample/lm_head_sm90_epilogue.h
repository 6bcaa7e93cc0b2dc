// The epilogue of sample/lm_head_sm90.cu, of the consumer warps: what becomes of a tile's logits,
// which are in registers as wgmma leaves them. Of each fragment, 8 columns of the batch, a lane has
// rows lane / 4 and 8 more and two columns.
//
// A draw: the score of a logit is at most logit / temperature + the bound of its noise. So a logit
// has to reach a threshold that is known before its noise is. Logits that do are candidates, and
// are queued.
#pragma once

#include "sample/lm_head_sm90_queue.h"
#include "sample/sample_draw.h"

namespace fuselage {
namespace gpu {
namespace {

// ---- registers and shared memory ----

// Four floats of shared memory that other threads write.
__device__ __forceinline__ float4 load_volatile(const float* at) {
  float4 value;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(shared_address(at)));
  return value;
}

// Not a branch: a first tile with 64 of those took 6.9 thousand cycles, and takes 3.9 (H200, 256
// columns).
__device__ __forceinline__ void store_if(bool is, float* at, float value) {
  asm volatile(
      "{\n"
      ".reg .pred is;\n"
      "setp.ne.b32 is, %0, 0;\n"
      "@is st.shared.f32 [%1], %2;\n"
      "}" ::"r"(static_cast<int>(is)),
      "r"(shared_address(at)), "f"(value)
      : "memory");
}

// As store_if, to global memory, of two values eight apart.
__device__ __forceinline__ void store_global_if(uint32_t is, float* at, float value, float after) {
  asm volatile(
      "{\n"
      ".reg .pred is;\n"
      "setp.ne.b32 is, %0, 0;\n"
      "@is st.global.cs.f32 [%1], %2;\n"
      "@is st.global.cs.f32 [%1 + 32], %3;\n"
      "}" ::"r"(is),
      "l"(at), "f"(value), "f"(after));
}

__device__ __forceinline__ float2 two_of(const float* at) {
  return *reinterpret_cast<const float2*>(at);
}

// Copies fragments from kFirst on. NOTE: `volatile` keeps this a branch, and not a selection among
// all registers.
template <int kFirst, int kAtOnce, int kCount>
__device__ __forceinline__ void copy_fragments(const float (&logits)[kCount],
                                               float (&fragments)[kAtOnce][4]) {
  if constexpr (4 * kFirst < kCount) {
#pragma unroll
    for (int i = 0; i < 4 * kAtOnce; ++i)
      asm volatile("mov.b32 %0, %1;" : "=f"(fragments[i / 4][i % 4]) : "f"(logits[4 * kFirst + i]));
  }
}

// Copies any fragments, of number * kAtOnce and on: registers have no run-time index, but a loop
// over all fragments is too long to be unrolled.
template <int kAtOnce, int kCount>
__device__ __forceinline__ void copy_fragments(const float (&logits)[kCount], int number,
                                               float (&fragments)[kAtOnce][4]) {
#define FUSELAGE_COPY(i) \
  case i: copy_fragments<(i) * kAtOnce>(logits, fragments); break;
#define FUSELAGE_COPY_8(i) \
  FUSELAGE_COPY(i)         \
  FUSELAGE_COPY(i + 1)     \
  FUSELAGE_COPY(i + 2)     \
  FUSELAGE_COPY(i + 3)     \
  FUSELAGE_COPY(i + 4)     \
  FUSELAGE_COPY(i + 5)     \
  FUSELAGE_COPY(i + 6)     \
  FUSELAGE_COPY(i + 7)
  switch (number) {
    FUSELAGE_COPY_8(0)
    FUSELAGE_COPY_8(8)
    FUSELAGE_COPY_8(16)
    FUSELAGE_COPY_8(24)
  }
#undef FUSELAGE_COPY_8
#undef FUSELAGE_COPY
}

// body(fragments, first) for all fragments, kAtOnce at a time.
template <int kAtOnce, bool kRolled, int kCount, typename Body>
__device__ __forceinline__ void for_fragments(const float (&logits)[kCount], Body body) {
  static_assert(kCount % (4 * kAtOnce) == 0, "whole fragments");
  float fragments[kAtOnce][4];
  if constexpr (kRolled) {
#pragma unroll 1
    for (int number = 0; number < kCount / (4 * kAtOnce); ++number) {
      copy_fragments(logits, number, fragments);
      body(fragments, number * kAtOnce);
    }
  } else {
#pragma unroll
    for (int first = 0; first < kCount / 4; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < 4 * kAtOnce; ++i) fragments[i / 4][i % 4] = logits[4 * first + i];
      body(fragments, first);
    }
  }
}

// ---- softcap ----

struct SoftCap {
  float cap, inverse, error;
};

template <bool kCapped>
__device__ __forceinline__ SoftCap softcap_of(const HeadDraw& p) {
  if (!kCapped) return {};
  return {p.softcap, 1.0f / p.softcap, p.softcap * (1.0f / 1024)};
}

// The error of the approximate tanh is below 2^-10.
__device__ __forceinline__ float approximate_softcap(float logit, float cap, float inverse) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(logit * inverse));
  return result * cap;
}

// An upper bound of the capped logit.
template <bool kCapped>
__device__ __forceinline__ float capped_bound(float logit, const SoftCap& softcap) {
  return kCapped ? approximate_softcap(logit, softcap.cap, softcap.inverse) + softcap.error : logit;
}

// ---- thresholds ----

__device__ __forceinline__ int position_of(float bound) {
  return static_cast<int>(__float_as_uint(bound) % kNoiseGroup);
}

// For each column a lower bound of a score: that of the logit which has the largest noise of a
// warp's rows. NaN of rows past the end. The arguments are those of queue_candidates.
template <int kColumns, bool kCapped>
__device__ __forceinline__ void bound_scores(const HeadDraw& p, const Columns& columns,
                                             const float* bounds,
                                             const float (&logits)[kColumns / 2], float* scores,
                                             int lane) {
  const SoftCap softcap = softcap_of<kCapped>(p);
  for_fragments<1, kCapped>(logits, [&](const float(&fragment)[1][4], int number) {
    const int column = 8 * number + 2 * (lane & 3);
    const float2 both_bounds = two_of(bounds + column);
    const float2 inverses = two_of(columns.inverse + column);
    const float2 units = two_of(columns.unit + column);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float bound = t == 0 ? both_bounds.x : both_bounds.y;
      const float logit = capped_bound<kCapped>(
          position_of(bound) >= 8 ? fragment[0][t + 2] : fragment[0][t], softcap);
      const float min_noise = bound > kNoiseBoundTight ? bound - kNoiseBoundError
                              : bound == 0.0f          ? 0.0f
                                                       : kMinNoise;
      const float score =
          score_of<SampleMath>(logit - 2.0f * softcap.error, min_noise,
                               t == 0 ? inverses.x : inverses.y, t == 0 ? units.x : units.y);
      store_if(position_of(bound) % 8 == lane >> 2, scores + column + t, score);
    }
  });
}

// Raises the thresholds by the largest of bound_scores in the first tile. Otherwise all of its
// logits would be candidates. With many columns, the consumers wait, but not for long, for the
// thresholds of an eighth of the blocks.
// NOTE: without fences: what comes late only costs time.
template <typename Traits>
__device__ __forceinline__ void init_thresholds(const HeadDraw& p, const Block<Traits>& block,
                                                int units, int sample, int thread) {
  constexpr int kColumns = Traits::kColumns, kThreads = Traits::kConsumerThreads;
  constexpr int kMaxPolls = 40;
  constexpr bool kExchanges = kColumns >= 64;
  static_assert(kColumns * sizeof(float) <= kQueueBytes, "scores are in the memory of queues");
  const auto sync = [] { named_barrier_sync<kConsumerBarrier, kThreads>(); };
  sync();
  for (int column = thread; column < p.batch; column += kThreads) {
    float score = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < Traits::kConsumerWarps; ++warp) {
      if (warp < units) score = fmaxf(score, Queue(block.queues, warp).logits[column]);
    }
    const int at = sample * kColumns + column;
    atomic_max(block.columns.thresholds + at, score);
    if (kExchanges) atomicMax(p.shared_thresholds + at, key_of<SampleMath>(score));
  }
  sync();
  if (!kExchanges) return;
  if (thread == 0) {
    uint32_t* arrived = p.shared_thresholds + p.num_samples * kColumns + sample;
    atomicAdd(arrived, 1u);
    for (int i = 0; i < kMaxPolls && *const_cast<volatile uint32_t*>(arrived) < gridDim.x / 8;
         ++i) {
      __nanosleep(100);
    }
  }
  sync();
  ThresholdExchange<kColumns, kThreads> exchange;
  exchange.start(p, sample, thread);
  exchange.finish(p, block.columns, sample, thread);
  sync();
}

// Replaces the bounds of a warp's noise by the thresholds of its logits.
template <int kColumns>
__device__ __forceinline__ void find_logit_thresholds(float* bounds, const Columns& columns,
                                                      const float* thresholds, int lane) {
#pragma unroll
  for (int first = 0; first < kColumns; first += 128) {
    const int column = first + 4 * lane;
    if (column >= kColumns) break;
    const float4 b = *reinterpret_cast<const float4*>(bounds + column);
    const float4 i = *reinterpret_cast<const float4*>(columns.inverse + column);
    const float4 u = *reinterpret_cast<const float4*>(columns.unit + column);
    const float4 t = load_volatile(thresholds + column);
    *reinterpret_cast<float4*>(bounds + column) =
        make_float4(logit_threshold(t.x, b.x, i.x, u.x), logit_threshold(t.y, b.y, i.y, u.y),
                    logit_threshold(t.z, b.z, i.z, u.z), logit_threshold(t.w, b.w, i.w, u.w));
  }
  __syncwarp();
}

// ---- candidates ----

// The fragments that have a candidate, a bit each, the same in all lanes.
template <int kColumns, bool kCapped>
__device__ __forceinline__ uint32_t fragments_with_candidates(const SoftCap& softcap,
                                                              const float* thresholds,
                                                              const float (&logits)[kColumns / 2],
                                                              int own_column) {
  uint32_t found = 0;
  for_fragments<1, kCapped>(logits, [&](const float(&fragment)[1][4], int number) {
    const float2 reach = two_of(thresholds + own_column + 8 * number);
    const float first = capped_bound<kCapped>(fmaxf(fragment[0][0], fragment[0][2]), softcap);
    const float second = capped_bound<kCapped>(fmaxf(fragment[0][1], fragment[0][3]), softcap);
    if (first >= reach.x || second >= reach.y) found |= 1u << number;
  });
  return __reduce_or_sync(0xffffffffu, found);
}

// Queues the logits that reach their thresholds. A queue that is full is scored at once. `row` is
// the first of the warp's.
template <int kColumns, bool kCapped>
__device__ __forceinline__ void queue_candidates(const HeadDraw& p, const Columns& columns,
                                                 const Queue& queue, const float* thresholds,
                                                 const float (&logits)[kColumns / 2], int row,
                                                 int sample, int lane) {
  const int own_column = 2 * (lane & 3);
  const SoftCap softcap = softcap_of<kCapped>(p);
  const uint32_t lower_lanes = (1u << lane) - 1;
  uint32_t numbers =
      fragments_with_candidates<kColumns, kCapped>(softcap, thresholds, logits, own_column);
  int count = 0;
#pragma unroll 1
  while (true) {
    float fragment[1][4];
    uint32_t lanes[4] = {};  // that have a candidate
    const int number = __ffs(numbers) - 1, column = 8 * number + own_column;
    if (numbers != 0) {
      copy_fragments(logits, number, fragment);
      const float2 reach = two_of(thresholds + own_column + 8 * number);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float logit = capped_bound<kCapped>(fragment[0][t], softcap);
        lanes[t] = __ballot_sync(0xffffffffu, logit >= (t & 1 ? reach.y : reach.x));
      }
    }
    const int more = __popc(lanes[0]) + __popc(lanes[1]) + __popc(lanes[2]) + __popc(lanes[3]);
    if (numbers == 0 || count + more > kQueue) {
      if (numbers == 0) break;
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < count; i += 32)
        score_queued(p, columns, queue, i, sample, kColumns, row);
      __syncwarp();
      count = 0;
    }
    numbers &= numbers - 1;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (lanes[t] >> lane & 1) {
        const int at = count + __popc(lanes[t] & lower_lanes);
        queue.logits[at] = fragment[0][t];
        queue.places[at] =
            ((lane >> 2) + 8 * (t >> 1)) << 16 | static_cast<uint32_t>(column + (t & 1));
      }
      count += __popc(lanes[t]);
    }
  }
  if (lane == 0) *queue.count = count;
}

// ---- columns of fragments ----

// Values of a warp's columns, reduced over its rows: of kCount fragments at a time, each lane gets
// those of its two columns in one, whose number is in bits 2 to 4 of the lane's, the highest first.
template <int kCount>
struct OwnColumns {
  int fragment, column;  // of the first of the two, among all of the fragments

  __device__ __forceinline__ explicit OwnColumns(int lane)
      : fragment((kCount * (lane >> 2 & 1) / 2) + (kCount * (lane >> 3 & 1) / 4) +
                 (kCount * (lane >> 4) / 8)),
        column(8 * fragment + 2 * (lane & 3)) {}
  // The first lane that gets those of fragment f, but for its two lowest bits.
  static constexpr int lane_of(int f) {
    return 4 * (2 * f / kCount % 2) + 8 * (4 * f / kCount % 2) + 16 * (8 * f / kCount % 2);
  }
  __device__ __forceinline__ bool is_first(int lane) const {
    return lane_of(fragment) == (lane & ~3);
  }
};

// values[f][t] of a lane's column t in fragment f, by join(a, b): those of the lane's own in
// values[0].
template <int kCount, typename V, typename Join>
__device__ __forceinline__ void reduce_columns(V (&values)[kCount][2], int lane, Join join) {
#pragma unroll
  for (int bit = 4, half = kCount / 2; bit <= 16; bit *= 2, half /= 2) {
    const bool high = (lane & bit) != 0;
#pragma unroll
    for (int f = 0; f < (half > 0 ? half : 1); ++f) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const V first = values[f][t], second = values[f + half][t];
        values[f][t] =
            join(high ? second : first, __shfl_xor_sync(0xffffffffu, high ? first : second, bit));
      }
    }
  }
}

// The maxima. Of NaN and a number that is the number, unless kKeepsNan.
template <bool kKeepsNan, int kCount>
__device__ __forceinline__ float2 column_maxima(const float (&fragments)[kCount][4], int lane) {
  const auto larger = [](float a, float b) { return kKeepsNan ? max_or_nan(a, b) : fmaxf(a, b); };
  float maxima[kCount][2];
#pragma unroll
  for (int f = 0; f < kCount; ++f) {
    maxima[f][0] = larger(fragments[f][0], fragments[f][2]);
    maxima[f][1] = larger(fragments[f][1], fragments[f][3]);
  }
  reduce_columns(maxima, lane, larger);
  return make_float2(larger(maxima[0][0], -INFINITY), larger(maxima[0][1], -INFINITY));
}

// ---- logits for filters ----

// Writes a warp's logits, of rows from `row` on, unless their strip is below the column's
// threshold. The maximum of each strip goes to `maxima`. Those past the end are NaN. Without
// strips, writes all.
//
// NOTE: without branches, so that the shuffles and stores of several fragments are in flight
// together. One fragment after the other, of those that have anything to be written, took longer.
// Four bytes a lane, but whole sectors: wider vectors take more shuffles than they save (H200).
template <bool kHasStrips, bool kCapped, int kLogits>
__device__ __forceinline__ void write_logits(const HeadDraw& p, const Columns& columns,
                                             const float (&logits)[kLogits], float* maxima,
                                             int first_column, int row, int lane) {
  static_assert(kUnitRows == kStrip, "a warp has a strip of each column");
  constexpr int kAtOnce = kCapped ? 1 : kLogits < 32 ? kLogits / 4 : 8;
  using Own = OwnColumns<kAtOnce>;
  const int lane_column = 2 * (lane & 3), own_column = Own(lane).column;
  float* to = p.out.logits + (int64_t{p.batch_start} + first_column + lane_column) * p.out.stride +
              row + lane / 4;
  for_fragments<kAtOnce, kCapped>(logits, [&](float(&fragments)[kAtOnce][4], int number) {
#pragma unroll
    for (int i = 0; i < 4 && kCapped; ++i)
      fragments[0][i] = soft_capped<SampleMath>(fragments[0][i], p.softcap);
    uint32_t first = 0, second = 0;
    if constexpr (kHasStrips) {
      const float2 threshold = two_of(columns.thresholds + 8 * number + own_column);
      const float2 max = column_maxima<false>(fragments, lane);
      *reinterpret_cast<float2*>(maxima + 8 * number + own_column) = max;
      first = __ballot_sync(0xffffffffu, max.x >= threshold.x) >> lane_column / 2;
      second = __ballot_sync(0xffffffffu, max.y >= threshold.y) >> lane_column / 2;
    }
    const int left = p.batch - first_column - lane_column - 8 * number;  // columns of the batch
#pragma unroll
    for (int f = 0; f < kAtOnce; ++f) {
      const uint32_t bit = 1u << Own::lane_of(f);
      store_global_if(kHasStrips ? first & bit : 8 * f < left, to, fragments[f][0],
                      fragments[f][2]);
      store_global_if(kHasStrips ? second & bit : 8 * f + 1 < left, to + p.out.stride,
                      fragments[f][1], fragments[f][3]);
      to += 8 * p.out.stride;
    }
  });
}

}  // namespace
}  // namespace gpu
}  // namespace fuselage
