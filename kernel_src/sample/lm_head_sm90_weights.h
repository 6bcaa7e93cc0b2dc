// What the epilogue of sample/lm_head_sm90.cu leaves for log-probabilities: the sum of the weights
// of each strip of 16 rows and a column (common/softmax_math.h), and the logits of targets.
#pragma once

#include "sample/lm_head_sm90_epilogue.h"

namespace fuselage {
namespace gpu {
namespace {

// strip_scale of two columns of a draw whose rows have temperatures of their own: of 1 /
// temperature, exactly, as the unit is a power of two.
__device__ __forceinline__ float2 scales_of(const Columns& columns, int column) {
  const float2 inverses = two_of(columns.inverse + column), units = two_of(columns.unit + column);
  const auto scale = [](float inverse, float unit) {
    return strip_scale(inverse * __uint_as_float(0x7f000000u - __float_as_uint(unit)));
  };
  return make_float2(scale(inverses.x, units.x), scale(inverses.y, units.y));
}

// Writes the sums of a warp's strips, of rows from `row` on, of which a lane has up to two. Of a
// draw NaN is none; otherwise a strip with NaN has that as its maximum. kPerRow: the rows of the
// batch have temperatures of their own. Otherwise all have `scale`. `maxima`: [columns], shared
// memory of the warp. kMostAtOnce: fragments whose sums are reduced together.
//
// NOTE: all maxima come first: there is nothing beside which a shuffle for few fragments could be
// waited for, as the warps of a block add up at the same time. With soft caps, which are long, this
// is a loop: more instructions are not fetched in time. On an H100 the sums of 256 columns take a
// tenth of the products' time; those of up to 64 hide behind memory.
template <int kMostAtOnce, bool kDraws, bool kPerRow, bool kCapped, int kLogits>
struct StripSumsWriter {
  static_assert(kUnitRows == kStrip, "a warp has a strip of each column");
  static constexpr int kFragments = kLogits / 4;
  static constexpr int kAtOnce = kCapped ? 1 : kFragments < kMostAtOnce ? kFragments : kMostAtOnce;
  const HeadDraw& p;
  const Columns& columns;
  float* maxima;
  int first_column, row;
  bool has_upper, has_lower;
  float scale;
  int lane;

  template <int kCount>
  __device__ __forceinline__ void prepare(float (&fragments)[kCount][4]) const {
    if (kCapped) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        fragments[0][i] = soft_capped<SampleMath>(fragments[0][i], p.softcap);
    }
    if (kDraws || row + kUnitRows <= p.vocab) return;
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) {  // NaN past the end is none
      if (!(i & 2 ? has_lower : has_upper)) fragments[i / 4][i % 4] = -INFINITY;
    }
  }
  // Returns whether one is infinite.
  template <int kCount>
  __device__ __forceinline__ bool keep_maxima(const float (&fragments)[kCount][4],
                                              int number) const {
    const float2 max = column_maxima<!kDraws>(fragments, lane);
    const int column = OwnColumns<kCount>(lane).column;
    *reinterpret_cast<float2*>(maxima + 8 * number + column) = max;
    return kDraws && (max.x == INFINITY || max.y == INFINITY);
  }
  // Those of fragments [number, number + kAtOnce).
  __device__ __forceinline__ void add_up(const float (&fragments)[kAtOnce][4], int number,
                                         bool any_infinite, uint32_t (&weights)[kAtOnce][2]) const {
    const auto each = [&](auto weigh) {
#pragma unroll
      for (int f = 0; f < kAtOnce; ++f) {
        const int column = 8 * (number + f) + 2 * (lane & 3);
        const float2 most = two_of(maxima + column);
        const float2 scales = kPerRow ? scales_of(columns, column) : make_float2(scale, scale);
        weights[f][0] =
            weigh(fragments[f][0], most.x, scales.x) + weigh(fragments[f][2], most.x, scales.x);
        weights[f][1] =
            weigh(fragments[f][1], most.y, scales.y) + weigh(fragments[f][3], most.y, scales.y);
      }
    };
    if (kDraws && any_infinite) {
      each([](float logit, float most, float its) {
        return most == INFINITY ? units_of_infinite(logit, most)
                                : StripWeight<kDraws>(logit, most, its).units();
      });
    } else {
      each([](float logit, float most, float its) {
        return StripWeight<kDraws>(logit, most, its).units();
      });
    }
  }
  // `to`: of the first of a lane's own columns, of which there are `left` in the batch.
  __device__ __forceinline__ void write(uint32_t (&weights)[kAtOnce][2], float2 max, StripSum* to,
                                        int left) const {
    reduce_columns(weights, lane, [](uint32_t a, uint32_t b) { return a + b; });
    if (left > 0) to[0] = {max.x, weights[0][0]};
    if (left > 1) to[p.sums.strips.stride] = {max.y, weights[0][1]};
  }

  __device__ __forceinline__ void run(const float (&logits)[kLogits]) const {
    bool any_infinite = false;
    if constexpr (!kCapped) {
      constexpr int kTogether = kFragments < 4 ? kFragments : 4;
      for_fragments<kTogether, false>(logits, [&](float(&fragments)[kTogether][4], int number) {
        prepare(fragments);
        any_infinite |= keep_maxima(fragments, number);
      });
      any_infinite = kDraws && __any_sync(0xffffffffu, any_infinite);
      __syncwarp();
    }
    const OwnColumns<kAtOnce> own(lane);
    int left = own.is_first(lane) ? p.batch - first_column - own.column : 0;
    StripSum* to = p.sums.strips.sums +
                   (int64_t{p.batch_start} + first_column + own.column) * p.sums.strips.stride +
                   row / kStrip;
    for_fragments<kAtOnce, kCapped>(logits, [&](float(&fragments)[kAtOnce][4], int number) {
      prepare(fragments);
      if constexpr (kCapped) {
        any_infinite = __any_sync(0xffffffffu, keep_maxima(fragments, number));
        __syncwarp();
      }
      uint32_t weights[kAtOnce][2];
      add_up(fragments, number, any_infinite, weights);
      write(weights, two_of(maxima + 8 * number + own.column), to, left);
      to += 8 * kAtOnce * p.sums.strips.stride;
      left -= 8 * kAtOnce;
    });
    __syncwarp();  // `maxima` is read
  }
};

// Writes the logits of the targets that are among a warp's rows: in few tiles there is one.
template <int kColumns>
__device__ __forceinline__ void write_target_logits(const HeadDraw& p, const Columns& columns,
                                                    const float (&logits)[kColumns / 2],
                                                    int first_column, int row, int lane) {
#pragma unroll 1
  for (int first = 0; first < kColumns; first += 32) {
    uint32_t place = kUnitRows;  // row of the warp's 16
    if (first + lane < kColumns) place = columns.targets()[first + lane] - row;
    uint32_t found = __ballot_sync(0xffffffffu, place < kUnitRows);
#pragma unroll 1
    for (; found != 0; found &= found - 1) {
      const int column = first + __ffs(found) - 1;
      const uint32_t at = __shfl_sync(0xffffffffu, place, column - first);
      float fragment[1][4];
      copy_fragments(logits, column / 8, fragment);
      if (lane != static_cast<int>(at % 8 * 4) + column % 8 / 2) continue;
      const float upper = column % 2 == 0 ? fragment[0][0] : fragment[0][1];
      const float lower = column % 2 == 0 ? fragment[0][2] : fragment[0][3];
      const float logit = at < 8 ? upper : lower;
      p.sums.target_logits[p.batch_start + first_column + column] =
          p.softcap == 0.0f ? logit : soft_capped<SampleMath>(logit, p.softcap);
    }
    __syncwarp();
  }
}

}  // namespace
}  // namespace gpu
}  // namespace fuselage
