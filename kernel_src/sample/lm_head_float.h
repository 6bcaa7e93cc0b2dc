// The form of sample/lm_head.cu for float32: products and sums of float32, with cp.async, without
// tensor cores.
#pragma once

#include "sample/lm_head_copy.h"
#include "sample/lm_head_epilogue.h"

namespace fuselage {
namespace {

constexpr int float_stage_bytes(FloatTile tile) {
  return (kHeadRows + tile.columns) * kFloatStep * static_cast<int>(sizeof(float));
}

constexpr int float_options_at(FloatTile tile) {
  const int stages = tile.stages * float_stage_bytes(tile);
  const int sums = tile.columns * kHeadSumsStride * static_cast<int>(sizeof(float));
  return stages > sums ? stages : sums;
}

constexpr int float_shared_bytes(FloatTile tile) {
  return float_options_at(tile) + tile.columns * static_cast<int>(sizeof(RowOptions));
}

// A warp has neighbouring rows of the weight, a lane each, and the same columns, which shared
// memory broadcasts to its lanes.
template <int kColumns>
__global__ void __launch_bounds__(float_tile(kColumns).threads, 2)
    float_head_kernel(const LmHead p, const HeadOutput out, const int batch_tiles,
                      const bool aligned) {
  if constexpr (!kCompilesAsyncCopy) return;
  extern __shared__ __align__(128) char shared_bytes[];
  constexpr FloatTile kTile = float_tile(kColumns);
  constexpr int kThreads = kTile.threads, kChunks = kFloatStep / 4;
  constexpr int kRowsEach = kTile.rows_each, kColumnsEach = kTile.columns_each;
  constexpr int kAcross = kHeadRows / kRowsEach;  // threads that share their columns
  static_assert(kAcross * (kColumns / kColumnsEach) == kThreads && kAcross % kWarpSize == 0,
                "every product has a thread, and a warp the same columns");
  constexpr int kStageBytes = float_stage_bytes(kTile);
  constexpr int kWeightBytes = kHeadRows * kFloatStep * static_cast<int>(sizeof(float));
  const int64_t first = int64_t{blockIdx.x / batch_tiles} * kHeadRows;
  const int64_t first_row = int64_t{blockIdx.x % batch_tiles} * kColumns;
  const float* weight = static_cast<const float*>(p.weight) + first * p.weight_stride;
  const float* hidden = static_cast<const float*>(p.hidden) + first_row * p.hidden_stride;
  const int last_weight = last_of(p.vocab - first, kHeadRows);
  const int last_hidden = last_of(p.batch - first_row, kColumns);
  const uint32_t shared = shared_address(shared_bytes);
  const int steps = static_cast<int>((p.dim + kFloatStep - 1) / kFloatStep);
  const int r = threadIdx.x % kAcross, c = threadIdx.x / kAcross * kColumnsEach;

  const auto copy_stage = [&](auto is_aligned, uint32_t stage, int64_t column) {
    copy_rows<kHeadRows, kChunks, kThreads, is_aligned>(stage, weight, p.weight_stride, last_weight,
                                                        column, p.dim);
    copy_rows<kColumns, kChunks, kThreads, is_aligned>(stage + kWeightBytes, hidden,
                                                       p.hidden_stride, last_hidden, column, p.dim);
  };
  const auto start_stage = [&](int step) {
    if (step < steps) {
      const uint32_t stage = shared + static_cast<uint32_t>(step % kTile.stages) * kStageBytes;
      const int64_t column = int64_t{step} * kFloatStep;
      if (aligned) {
        copy_stage(std::true_type{}, stage, column);
      } else {
        copy_stage(std::false_type{}, stage, column);
      }
    }
    cp_async_commit_group();
  };

  RowOptions* options = reinterpret_cast<RowOptions*>(shared_bytes + float_options_at(kTile));
  load_options(p, out, options, first_row, kColumns);
  float sums[kRowsEach][kColumnsEach] = {};
#pragma unroll 1
  for (int i = 0; i < kTile.stages - 1; ++i) start_stage(i);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_group(kTile.stages - 2);
    __syncthreads();
    start_stage(step + kTile.stages - 1);
    const char* stage = shared_bytes + step % kTile.stages * kStageBytes;
#pragma unroll 2
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float4 w[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i)
        w[i] = *reinterpret_cast<const float4*>(stage + chunk_at<kChunks>(r + i * kAcross, chunk));
#pragma unroll
      for (int j = 0; j < kColumnsEach; ++j) {
        const float4 h = *reinterpret_cast<const float4*>(stage + kWeightBytes +
                                                          chunk_at<kChunks>(c + j, chunk));
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          float sum = SampleMath::fma(w[i].x, h.x, sums[i][j]);
          sum = SampleMath::fma(w[i].y, h.y, sum);
          sum = SampleMath::fma(w[i].z, h.z, sum);
          sums[i][j] = SampleMath::fma(w[i].w, h.w, sum);
        }
      }
    }
  }
  cp_async_wait_group(0);
  __syncthreads();
  float* tile = reinterpret_cast<float*>(shared_bytes);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnsEach; ++j)
      tile[(c + j) * kHeadSumsStride + r + i * kAcross] = sums[i][j];
  }
  __syncthreads();
  finish_tile(p, out, options, tile, first, first_row, kColumns);
  launch_dependents();
}

}  // namespace
}  // namespace fuselage
