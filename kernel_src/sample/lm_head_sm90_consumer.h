// The consumers of sample/lm_head_sm90.cu, two or three warpgroups: they multiply a tile of the
// weight by hidden with wgmma, make logits of the sums, and hand them to the epilogue.
//
// Weights of float8 stay as they are in shared memory. A warp loads its rows, converts them to
// float16, which is exact, and multiplies them from registers, half a stage at a time: its wgmma
// runs while the other half is converted. Of 16 columns a lane loads four neighbours, where wgmma
// expects two times two: lm_head_sm90_prepare.h puts hidden's columns in that order. It also scales
// bfloat16 to float16: weights are converted to float16 by one instruction for two, to bfloat16 by
// four.
#pragma once

#include <type_traits>

#include "common/float8.h"
#include "sample/lm_head_sm90_epilogue.h"
#include "sample/lm_head_sm90_weights.h"
#include "sample/wgmma.h"

namespace fuselage {
namespace gpu {
namespace {

// The ring of stages, as a consumer reads it.
struct Ring {
  int stage;
  uint32_t phase;
};

// Tells the producers of all blocks of the cluster that a warp's wgmma has read a stage.
template <int kCluster>
__device__ __forceinline__ void free_stage(uint32_t empty, int lane) {
  if (kCluster == 1) {
    if (lane == 0) mbarrier_arrive(empty);
  } else if (lane < kCluster) {
    mbarrier_arrive_cluster(empty, lane);
  }
}

template <typename Traits>
__device__ __forceinline__ void free_previous_stage(const Block<Traits>& block, const Ring& ring,
                                                    int lane) {
  free_stage<Traits::kCluster>(
      block.empty + 8 * (ring.stage == 0 ? Traits::kStages - 1 : ring.stage - 1), lane);
}

// ---- products ----

// Starts the products of a tile. Those of its last step are in flight at the end. `warp` % 4 is
// that of the warpgroup.
template <typename Traits>
__device__ __forceinline__ void multiply(const HeadDraw& p, const Block<Traits>& block, Ring& ring,
                                         float (&sums)[Traits::kColumns / 2], int warp, int lane) {
  constexpr int kStages = Traits::kStages, kStageBytes = Traits::kStageBytes;
  const int group = warp / 4;
  for (int step = 0; step < p.steps; ++step) {
    const uint32_t weight =
        wgmma_descriptor(block.stages + ring.stage * kStageBytes + group * kGroupRows * kRowBytes);
    const uint32_t hidden =
        wgmma_descriptor(block.stages + ring.stage * kStageBytes + Traits::kWeightBytes);
    mbarrier_wait_parity(block.full + 8 * ring.stage, ring.phase);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Traits::kDepth / 16; ++k) {
      Wgmma<typename Traits::T, Traits::kColumns>::run(sums, weight + 2 * k, hidden + 2 * k,
                                                       step > 0 || k > 0);
    }
    wgmma_commit_group();
    if (step > 0) {
      wgmma_wait_group<1>();
      free_previous_stage(block, ring, lane);
    }
    if (++ring.stage == kStages) {
      ring.stage = 0;
      ring.phase ^= 1;
    }
  }
}

// The address of a lane's row in two chunks of 16 bytes of 16 rows, as TMA swizzles rows of 128 or
// 64 bytes. That of the i-th two chunks is this ^ i * 32.
template <int kBytes>
__device__ __forceinline__ uint32_t swizzled_chunk(int lane) {
  const int row = lane % 16, chunk = lane / 16;
  const int swizzled = chunk ^ (kBytes == 128 ? row % 8 : row / 2 % 4);
  return static_cast<uint32_t>(row * kBytes + swizzled * 16);
}

// The same of weights of float8. A stage has two halves: the products of one run while the other is
// converted.
template <typename Traits>
__device__ __forceinline__ void multiply_float8(const HeadDraw& p, const Block<Traits>& block,
                                                Ring& ring, float (&sums)[Traits::kColumns / 2],
                                                int warp, int lane) {
  constexpr int kColumns = Traits::kColumns, kStages = Traits::kStages;
  constexpr int kStageBytes = Traits::kStageBytes;
  constexpr int kBlocks = Traits::kDepth / 32;  // of 16 elements, in a half
  uint32_t fragments[2][kBlocks][4];
  uint32_t own = block.stages + warp * (kUnitRows * Traits::kWeightRowBytes);
  own += swizzled_chunk<Traits::kWeightRowBytes>(lane);
  asm volatile("" : "+r"(own));  // NOTE: not to be computed again for each stage
  uint32_t weight = own + ring.stage * kStageBytes;
  // NOTE: a shuffle, after which it is in the uniform registers that wgmma takes it from.
  const auto hidden_of = [&](int stage) {
    return __shfl_sync(0xffffffffu,
                       wgmma_descriptor(block.stages + stage * kStageBytes + Traits::kWeightBytes),
                       0);
  };
  uint32_t hidden = hidden_of(ring.stage);
  for (int step = 0; step < p.steps; ++step) {
    const int next = ring.stage + 1 == kStages ? 0 : ring.stage + 1;
    uint32_t next_hidden = 0;
    mbarrier_wait_parity(block.full + 8 * ring.stage, ring.phase);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[kBlocks / 2][4];
#pragma unroll
      for (int i = 0; i < kBlocks / 2; ++i) {
        ldmatrix_x4(weight ^ (half * kBlocks / 2 + i) * 32, words[i]);
      }
      // All but the other half are done: these registers are free, and, in the second half, the
      // previous stage.
      wgmma_wait_group<1>();
      if (half == 1 && step > 0) free_previous_stage(block, ring, lane);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const uint32_t* two = words[i / 2] + i % 2 * 2;
        e4m3x4_to_float16(two[0], fragments[half][i][0], fragments[half][i][2]);
        e4m3x4_to_float16(two[1], fragments[half][i][1], fragments[half][i][3]);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int k = half * kBlocks + i;
        Wgmma<typename Traits::T, kColumns>::run(
            sums, fragments[half][i], hidden + k / 4 * (kColumns * kRowBytes / 16) + k % 4 * 2,
            step > 0 || k > 0);
      }
      wgmma_commit_group();
      if (half == 0) next_hidden = hidden_of(next);
    }
    if (next == 0) ring.phase ^= 1;
    ring.stage = next;
    hidden = next_hidden;
    weight = own + ring.stage * kStageBytes;
  }
}

// ---- from sums to logits ----

// The two rows of a lane.
struct Rows {
  int upper, lower;
  bool has_upper, has_lower;  // whether they are in the vocabulary
  float upper_scale, lower_scale;

  template <typename Traits>
  __device__ __forceinline__ static Rows load(const HeadDraw& p, int row, bool in_tile, int lane) {
    Rows rows;
    rows.upper = row + (lane >> 2);
    rows.lower = rows.upper + 8;
    rows.has_upper = rows.upper >= 0 && rows.upper < p.vocab;
    rows.has_lower = rows.lower >= 0 && rows.lower < p.vocab;
    rows.upper_scale = rows.lower_scale = 1.0f;
    if (Traits::kFloat8 && p.weight_scale != nullptr && in_tile) {
      if (rows.has_upper) rows.upper_scale = p.weight_scale[p.scale_per_row ? rows.upper : 0];
      if (rows.has_lower) rows.lower_scale = p.weight_scale[p.scale_per_row ? rows.lower : 0];
    }
    return rows;
  }
};

// Applies scales and bias. Rows past the end become NaN. `row` is the first of the warp's.
template <typename Traits>
__device__ __forceinline__ void finish_logits(const HeadDraw& p, const Block<Traits>& block,
                                              const Rows& rows, int row, int warp, int units,
                                              bool is_first, float (&logits)[Traits::kColumns / 2],
                                              int lane) {
  constexpr int kColumns = Traits::kColumns;
  const Columns& columns = block.columns;
  if (Traits::kFloat8) {
    if (is_first) {  // of the previous kernel, for which the producer has waited
      for (int column = threadIdx.x; column < kColumns; column += Traits::kConsumerThreads)
        columns.scale[column] = __ldcg(p.hidden_scales + column);
      named_barrier_sync<kConsumerBarrier, Traits::kConsumerThreads>();
    }
#pragma unroll
    for (int fragment = 0; fragment < kColumns / 8; ++fragment) {
      const float2 scale = two_of(columns.scale + 8 * fragment + 2 * (lane & 3));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& logit = logits[4 * fragment + i];
        logit = __fmul_rn(logit, i & 1 ? scale.y : scale.x);
        logit = __fmul_rn(logit, i & 2 ? rows.lower_scale : rows.upper_scale);
      }
    }
  }
  if (p.bias != nullptr) {
    const float upper_bias =
        rows.has_upper && warp < units ? load_value(p.bias, p.bias_dtype, rows.upper) : 0.0f;
    const float lower_bias =
        rows.has_lower && warp < units ? load_value(p.bias, p.bias_dtype, rows.lower) : 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) logits[i] += i & 2 ? lower_bias : upper_bias;
  }
  if (warp < units && (row < 0 || row + kUnitRows > p.vocab)) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      if (!(i & 2 ? rows.has_lower : rows.has_upper)) logits[i] = NAN;
    }
  }
}

// ---- the warps ----

// What a consumer warp does with the buffers that it shares with the bounds warps, in one
// iteration.
template <typename Traits>
struct Epilogue {
  static constexpr int kColumns = Traits::kColumns;
  const HeadDraw& p;
  const Block<Traits>& block;
  Queue queue;
  int warp, lane;
  int iteration;  // of the block: a tile's logits, or one sample of them

  __device__ __forceinline__ float* own_bounds() const {
    return block.bounds + (iteration & 1) * Traits::kBounds + warp * kColumns;
  }
  __device__ __forceinline__ void begin() const {
    mbarrier_wait_parity(block.bounds_full + 8 * (iteration & 1), iteration >> 1 & 1);
    if (iteration > 0) mbarrier_wait_parity(block.queue_empty, (iteration - 1) & 1);
    if (lane == 0) *queue.count = 0;
  }
  __device__ __forceinline__ void find_thresholds(int sample) const {
    find_logit_thresholds<kColumns>(own_bounds(), block.columns,
                                    block.columns.thresholds + sample * kColumns, lane);
  }
  __device__ __forceinline__ void end() {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(block.bounds_empty + 8 * (iteration & 1));
    ++iteration;
  }

  __device__ __forceinline__ void write(const float (&logits)[kColumns / 2], int first_column,
                                        int row, int units) {
    const auto write_to = [&](auto has_strips, float* maxima) {
      if (warp < units && p.softcap == 0.0f) {
        write_logits<has_strips, false>(p, block.columns, logits, maxima, first_column, row, lane);
      } else if (warp < units) {
        write_logits<has_strips, true>(p, block.columns, logits, maxima, first_column, row, lane);
      }
    };
    if (p.out.strips.maxima == nullptr) return write_to(std::false_type{}, nullptr);
    mbarrier_wait_parity(block.bounds_full + 8 * (iteration & 1), (iteration >> 1 & 1) ^ 1);
    write_to(std::true_type{}, own_bounds());
    end();
  }

  __device__ __forceinline__ void write_sums(const float (&logits)[kColumns / 2], const Rows& rows,
                                             int first_column, int row, int units) const {
    if (warp >= units) return;
    if (p.sums.targets != nullptr)
      write_target_logits<kColumns>(p, block.columns, logits, first_column, row, lane);
    // With float8, registers are short.
    constexpr int kAtOnce = Traits::kFloat8 && kColumns >= 64 ? 2 : 4;
    // NOTE: less code is kept where the head waits for memory.
    const bool per_row = kColumns < 256 || p.draws.temperature.values != nullptr;
    const float inverse =
        p.draws_samples() ? row_temperature(p.draws, 0).inv_temperature : p.sums.inv_temperature;
    // Nothing is queued while this runs.
    const auto write_to = [&](auto draws, auto own, auto capped) {
      StripSumsWriter<kAtOnce, draws, own, capped, kColumns / 2>{
          p,   block.columns,  queue.logits,   first_column,
          row, rows.has_upper, rows.has_lower, strip_scale(inverse),
          lane}
          .run(logits);
    };
    constexpr std::true_type yes{};
    constexpr std::false_type no{};
    if (!p.draws_samples()) {
      p.softcap == 0.0f ? write_to(no, no, no) : write_to(no, no, yes);
    } else if (p.softcap != 0.0f) {
      write_to(yes, yes, yes);
    } else if (per_row) {
      write_to(yes, yes, no);
    } else if constexpr (kColumns == 256) {
      write_to(yes, no, no);
    }
  }

  template <bool kCapped>
  __device__ __forceinline__ void draw_sample(const float (&logits)[kColumns / 2], const Tile& tile,
                                              int row, int sample, bool is_first, bool begun) {
    if (is_first) {
      if (warp < tile.units) {
        bound_scores<kColumns, kCapped>(p, block.columns, own_bounds(), logits, queue.logits, lane);
      }
      init_thresholds(p, block, tile.units, sample, threadIdx.x);
    }
    if (!begun) find_thresholds(sample);
    if (warp < tile.units) {
      queue_candidates<kColumns, kCapped>(p, block.columns, queue, own_bounds(), logits, row,
                                          sample, lane);
    }
  }

  __device__ __forceinline__ void draw(const float (&logits)[kColumns / 2], const Tile& tile,
                                       int row, bool is_first) {
    for (int sample = 0; sample < p.num_samples; ++sample) {
      const bool begun = sample == 0 && !is_first;
      if (!begun) begin();
      if (p.softcap == 0.0f) {
        draw_sample<false>(logits, tile, row, sample, is_first, begun);
      } else {
        draw_sample<true>(logits, tile, row, sample, is_first, begun);
      }
      end();
    }
  }
};

template <typename Traits>
__device__ __forceinline__ void consume(const HeadDraw& p, const Block<Traits>& block,
                                        const Share& share, int warp, int lane) {
  Epilogue<Traits> epilogue{p, block, Queue(block.queues, warp), warp, lane, 0};
  Ring ring{};
  for (int number = share.first_tile; number < p.tiles; number += share.tile_step) {
    const Tile tile = tile_of(p, number);
    const bool is_first = number == share.first_tile;
    const int row = tile.row + warp * kUnitRows;
    float logits[Traits::kColumns / 2];
    const Rows rows = Rows::load<Traits>(p, row, warp < tile.units, lane);
    if constexpr (Traits::kFloat8) {
      multiply_float8(p, block, ring, logits, warp, lane);
    } else {
      multiply(p, block, ring, logits, warp, lane);
    }
    if (p.draws_samples() && !is_first) {  // beside the last products
      epilogue.begin();
      epilogue.find_thresholds(0);
    }
    wgmma_wait_group<0>();
    free_previous_stage(block, ring, lane);
    wgmma_fence_operand(logits);
    finish_logits(p, block, rows, row, warp, tile.units, is_first, logits, lane);
    if (p.out.logits != nullptr) {
      epilogue.write(logits, share.first_column, row, tile.units);
    }
    if (p.sums.strips.sums != nullptr)
      epilogue.write_sums(logits, rows, share.first_column, row, tile.units);
    if (p.draws_samples()) epilogue.draw(logits, tile, row, is_first);
  }
}

}  // namespace
}  // namespace gpu
}  // namespace fuselage
