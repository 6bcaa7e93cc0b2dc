// The epilogue of the kernels of sample/lm_head.cu: a tile's logits are transposed in shared
// memory, and either written, or drawn from at once. A warp has a row of the batch, a lane four
// logits of a noise group. Each tile writes a candidate. It also raises the threshold of the row,
// which tiles that are later compare their bounds with before they make noise.
#pragma once

#include "sample/sample_draw.h"

namespace fuselage {
namespace {

// The logits are written, or drawn from.
struct HeadOutput {
  float* logits;  // [batch, vocab], or null
  int64_t stride;
  Candidate* candidates;  // [batch, tiles, num_samples]
  uint32_t* thresholds;   // [batch, num_samples]: key of the best score so far, or 0; or null
  int64_t tiles;
  Draws draws;
};

// ---- from a sum to a logit ----

__device__ __forceinline__ float product(float a, float b) {
#if defined(USE_ROCM)
  return __builtin_fmaf(a, b, -0.0f);
#else
  return __fmul_rn(a, b);
#endif
}

__device__ __forceinline__ float logit_of_sum(const LmHead& p, float sum, int64_t vocab) {
  if (p.weight_scale != nullptr) sum = product(sum, p.weight_scale[p.scale_per_row ? vocab : 0]);
  if (p.bias != nullptr) sum += load_value(p.bias, p.bias_dtype, vocab);
  if (p.softcap != 0.0f) sum = soft_capped<SampleMath>(sum, p.softcap);
  return sum;
}

// ---- the tile in shared memory ----

// Its sums: [columns, kHeadRows + kHeadPad], a row for each row of the batch.
constexpr int kHeadPad = 4;
constexpr int kHeadSumsStride = kHeadRows + kHeadPad;

// What the draws of a row of the batch need, loaded before the sums are done.
struct RowOptions {
  NoiseKey key;
  RowTemperature temperature;
  uint32_t threshold;  // key of the best score of earlier tiles, or 0
};

// All threads of the block; a barrier must follow.
__device__ __forceinline__ void load_options(const LmHead& p, const HeadOutput& out,
                                             RowOptions* options, int64_t first_row, int columns) {
  if (out.logits != nullptr) return;
  for (int b = threadIdx.x; b < columns; b += blockDim.x) {
    if (first_row + b < p.batch) {
      options[b] = {key_of_row(out.draws, first_row + b), row_temperature(out.draws, first_row + b),
                    0};
    }
  }
}

__device__ __forceinline__ void load_thresholds(const LmHead& p, const HeadOutput& out,
                                                RowOptions* options, int64_t first_row, int columns,
                                                int sample) {
  for (int b = threadIdx.x; b < columns; b += blockDim.x) {
    if (first_row + b >= p.batch) return;
    const volatile uint32_t* thresholds = out.thresholds;  // which other blocks write
    options[b].threshold = thresholds[(first_row + b) * out.draws.num_samples + sample];
  }
}

// One row of the batch, by a warp.
__device__ __forceinline__ void write_logits(const HeadOutput& out, const float* logits,
                                             int64_t row, int64_t first, int count) {
  float* to = out.logits + row * out.stride + first;
  for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) to[i] = logits[i];
}

// The vocabulary range of a tile. Noise groups begin at multiples of their size in the whole
// vocabulary: the first may begin `before` logits before the tile.
struct VocabRange {
  int64_t begin;  // in the whole vocabulary
  int before, count;
};

// body(at, logits) of four logits for each lane, from number `at` of the tile on; -inf past the
// end. All lanes call the body equally often.
template <int kRows, typename Body>
__device__ __forceinline__ void for_each_four(const VocabRange& range, const float* tile,
                                              Body body) {
#pragma unroll 1
  for (int first = -range.before; first < range.count; first += 4 * kWarpSize) {
    const int at = first + 4 * static_cast<int>(threadIdx.x % kWarpSize);
    float logits[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float* from = tile + i * kHeadSumsStride + at;
      if (range.before == 0) {
        const float4 vector = *reinterpret_cast<const float4*>(from);
        logits[i][0] = vector.x, logits[i][1] = vector.y;
        logits[i][2] = vector.z, logits[i][3] = vector.w;
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          logits[i][k] = at + k >= 0 && at + k < range.count ? from[k] : minus_infinity();
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const bool valid = at + k < range.count && logits[i][k] == logits[i][k];
        logits[i][k] = valid ? logits[i][k] : minus_infinity();
      }
    }
    body(at, logits);
  }
}

// Lanes that share a noise group, of four logits each.
constexpr int kFours = kNoiseGroup / 4;

// Which of kFours rows have a candidate, whose score may reach the threshold: a bit for each row,
// in all lanes.
__device__ __forceinline__ uint32_t rows_with_candidates(const VocabRange& range,
                                                         const RowOptions* options,
                                                         const float* tile, int sample) {
  // The lanes that share a group make its bound for a row each.
  const int lane = threadIdx.x % kWarpSize;
  const RowOptions& own = options[lane % kFours];
  bool found[kFours] = {};
  for_each_four<kFours>(range, tile, [&](int at, const float(&logits)[kFours][4]) {
    float bound = 0.0f;
    if (!own.temperature.greedy) {
      const int64_t group = group_of(range.begin + at);
      bound = noise_bound<SampleMath>(noise_group(own.key, group, sample).min_word) *
              own.temperature.unit;
    }
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float max_logit =
          fmaxf(fmaxf(logits[i][0], logits[i][1]), fmaxf(logits[i][2], logits[i][3]));
      const float noise = shuffle_from(bound, lane / kFours * kFours + i, kWarpSize);
      const float score = SampleMath::fma(max_logit, options[i].temperature.scale, noise);
      found[i] |= score >= value_or_none(options[i].threshold) && score > minus_infinity();
    }
  });
  uint32_t rows = 0;
#pragma unroll
  for (int i = 0; i < kFours; ++i) rows |= warp_any(found[i]) ? 1u << i : 0u;
  return rows;
}

// The best of a row, in every lane.
__device__ __forceinline__ Candidate draw_row(const VocabRange& range, RowOptions& options,
                                              uint32_t threshold, const float* tile, int first,
                                              int sample) {
  Drawing<MadeKeys> drawing{};
  drawing.key = options.key;
  drawing.scale = options.temperature.scale;
  drawing.unit = options.temperature.unit;
  drawing.sample = sample;
  drawing.shared_threshold = &options.threshold;
  drawing.best = no_candidate();
  drawing.threshold = value_or_none(threshold);
  for_each_four<1>(range, tile, [&](int at, const float(&logits)[1][4]) {
    if (!options.temperature.greedy) {
      drawing.draw(logits[0], range.begin + at, first + at);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) offer(drawing.best, logits[0][k], logits[0][k], first + at + k);
    }
  });
  return warp_best(drawing.best);
}

// All threads of the block, when the sums are in shared memory.
__device__ __forceinline__ void finish_tile(const LmHead& p, const HeadOutput& out,
                                            RowOptions* options, float* tile, int64_t first,
                                            int64_t first_row, int columns) {
  const int count = static_cast<int>(p.vocab - first < kHeadRows ? p.vocab - first : kHeadRows);
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int rows = static_cast<int>(p.batch - first_row < columns ? p.batch - first_row : columns);
  if (p.weight_scale != nullptr || p.bias != nullptr || p.softcap != 0.0f) {
    for (int b = warp; b < rows; b += warps) {
#pragma unroll 1
      for (int i = lane; i < count; i += kWarpSize)
        tile[b * kHeadSumsStride + i] = logit_of_sum(p, tile[b * kHeadSumsStride + i], first + i);
    }
    __syncthreads();
  }
  if (out.logits != nullptr) {
    for (int b = warp; b < rows; b += warps)
      write_logits(out, tile + b * kHeadSumsStride, first_row + b, first, count);
    return;
  }
  const int64_t begin = out.draws.vocab_offset + first;
  const VocabRange range{begin, static_cast<int>(begin % kNoiseGroup), count};
  // Rows that are tested for candidates together.
  const int together = out.thresholds == nullptr ? 1 : kFours;
#pragma unroll 1
  for (int sample = 0; sample < out.draws.num_samples; ++sample) {
    if (out.thresholds != nullptr) {
      if (sample != 0) __syncthreads();
      load_thresholds(p, out, options, first_row, columns, sample);
      __syncthreads();
    }
#pragma unroll 1
    for (int b = warp * together; b < rows; b += warps * together) {
      const uint32_t with_candidates =
          out.thresholds == nullptr
              ? ~0u
              : rows_with_candidates(range, options + b, tile + b * kHeadSumsStride, sample);
#pragma unroll 1
      for (int i = 0; i < together && b + i < rows; ++i) {
        const int64_t row = first_row + b + i;
        Candidate best = no_candidate();
        if ((with_candidates >> i & 1) != 0) {
          RowOptions& own = options[b + i];
          // NOTE: without thresholds, own.threshold is that of the previous sample.
          best = draw_row(range, own, out.thresholds == nullptr ? 0 : own.threshold,
                          tile + (b + i) * kHeadSumsStride, static_cast<int>(first), sample);
        }
        if (lane != 0) continue;
        out.candidates[(row * out.tiles + first / kHeadRows) * out.draws.num_samples + sample] =
            best;
        if (out.thresholds != nullptr && best.index != kNoIndex)
          atomicMax(out.thresholds + row * out.draws.num_samples + sample,
                    key_of<SampleMath>(best.score));
      }
    }
  }
}

}  // namespace
}  // namespace fuselage
