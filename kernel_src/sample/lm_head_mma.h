// The form of sample/lm_head.cu for half precision: tensor cores by mma, and a ring of stages in
// shared memory, which cp.async fills. Weights of float8 are converted to the dtype of hidden
// between shared memory and tensor cores, which is exact.
#pragma once

#include <type_traits>

#include "common/float8.h"
#include "sample/lm_head_copy.h"
#include "sample/lm_head_epilogue.h"

namespace fuselage {
namespace {

// ---- products ----

__device__ __forceinline__ uint32_t load_pair(uint32_t shared) {
  uint16_t pair;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(shared) : "memory");
  return pair;
}

// ---- the layout of a block ----

constexpr int weight_stage_bytes(HeadTile tile, bool float8) {
  return kHeadRows * tile.step * (float8 ? 1 : 2);
}

constexpr int stage_bytes(HeadTile tile, bool float8) {
  return weight_stage_bytes(tile, float8) + tile.columns * tile.step * 2;
}

// The stages, or the sums that replace them, and then the rows' options.
constexpr int options_at(HeadTile tile, bool float8) {
  const int stages = tile.stages * stage_bytes(tile, float8);
  const int sums = tile.columns * kHeadSumsStride * static_cast<int>(sizeof(float));
  return stages > sums ? stages : sums;
}

constexpr int head_shared_bytes(HeadTile tile, bool float8) {
  return options_at(tile, float8) + tile.columns * static_cast<int>(sizeof(RowOptions));
}

template <typename Element, int kBatchColumns, bool kIsAligned, bool kIsFloat8>
struct MmaTraits {
  using T = Element;
  using W = std::conditional_t<kIsFloat8, uint8_t, T>;
  static constexpr int kColumns = kBatchColumns;
  static constexpr bool kAligned = kIsAligned, kFloat8 = kIsFloat8;
  static constexpr HeadTile kTile = head_tile(kColumns, kFloat8);
  static_assert(head_shared_bytes(kTile, kFloat8) <= kHeadSharedBytes,
                "what a block may have on every GPU");
  static constexpr int kWarpsDown = kHeadRows / kTile.warp_rows;
  static_assert(kWarpsDown * (kColumns / kTile.warp_columns) * kWarpSize == kHeadThreads,
                "every part of the tile has a warp");
  static constexpr int kFragments = kTile.warp_rows / 16;
  static constexpr int kColumnFragments = kTile.warp_columns / 8;
  static constexpr int kPairs = (kColumnFragments + 1) / 2;  // of column fragments
  static constexpr int kBlocks = kTile.step / 16;            // k-blocks of a stage
  static_assert(kBlocks % 2 == 0, "two sets of fragments alternate");
  static constexpr int kChunks = kTile.step / 8;
  static constexpr int kWeightChunks = kFloat8 ? kChunks / 2 : kChunks;
  static constexpr int kStageBytes = stage_bytes(kTile, kFloat8);
  static constexpr int kWeightBytes = weight_stage_bytes(kTile, kFloat8);
};

// A warp's part of the tile.
struct WarpTile {
  int row, column, lane;
};

// ---- fragments ----

// One k-block of a stage. Of a: rows 0-7, rows 8-15, and both again eight columns on, as four
// matrices.
template <typename Traits>
__device__ __forceinline__ void load_fragments(const WarpTile& warp, uint32_t stage, int block,
                                               uint32_t (&a)[Traits::kFragments][4],
                                               uint32_t (&b)[Traits::kPairs][4]) {
  constexpr int kWeightChunks = Traits::kWeightChunks, kChunks = Traits::kChunks;
  const int lane = warp.lane;
#pragma unroll
  for (int f = 0; f < Traits::kFragments; ++f) {
    if constexpr (Traits::kFloat8) {  // a chunk is a k-block
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp.row + f * 16 + lane / 4 + i % 2 * 8;
        a[f][i] = load_pair(stage + chunk_at<kWeightChunks>(row, block) + lane % 4 * 2 + i / 2 * 8);
      }
    } else {
      const int row = warp.row + f * 16 + lane % 16;
      ldmatrix_x4(stage + chunk_at<kChunks>(row, block * 2 + lane / 16), a[f]);
    }
  }
  // Of b: eight rows of the batch, both halves of the columns, and the next eight. Where there are
  // but eight rows, the upper lanes' addresses are those of the lower ones again.
#pragma unroll
  for (int c = 0; c < Traits::kPairs; ++c) {
    const int upper = Traits::kColumnFragments == 1 ? 0 : lane / 16 * 8;
    const int row = warp.column + c * 16 + upper + lane % 8;
    ldmatrix_x4(stage + Traits::kWeightBytes + chunk_at<kChunks>(row, block * 2 + lane / 8 % 2),
                b[c]);
  }
}

template <typename Traits>
__device__ __forceinline__ void multiply_fragments(
    uint32_t (&a)[Traits::kFragments][4], const uint32_t (&b)[Traits::kPairs][4],
    float (&sums)[Traits::kFragments][Traits::kColumnFragments][4]) {
#pragma unroll
  for (int f = 0; f < Traits::kFragments; ++f) {
    uint32_t(&rows)[4] = a[f];
    if constexpr (Traits::kFloat8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i] = e4m3x2_to<typename Traits::T>(rows[i]);
    }
#pragma unroll
    for (int c = 0; c < Traits::kColumnFragments; ++c) {
      const uint32_t(&columns)[4] = b[c / 2];
      mma_m16n8k16<std::is_same_v<typename Traits::T, float16>>(
          sums[f][c], rows, columns[c % 2 * 2], columns[c % 2 * 2 + 1]);
    }
  }
}

// Transposes the sums into shared memory, in place of the stages.
template <typename Traits>
__device__ __forceinline__ void store_sums(
    const WarpTile& warp, const float (&sums)[Traits::kFragments][Traits::kColumnFragments][4],
    float* tile) {
  float* own =
      tile + (warp.column + warp.lane % 4 * 2) * kHeadSumsStride + warp.row + warp.lane / 4;
#pragma unroll
  for (int f = 0; f < Traits::kFragments; ++f) {
#pragma unroll
    for (int c = 0; c < Traits::kColumnFragments; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        own[(c * 8 + k % 2) * kHeadSumsStride + f * 16 + k / 2 * 8] = sums[f][c][k];
    }
  }
}

// ---- the kernel ----

template <typename T, int kColumns, bool kAligned, bool kFloat8>
__global__ void __launch_bounds__(kHeadThreads, kAligned ? head_tile(kColumns, kFloat8).blocks : 2)
    head_kernel(const LmHead p, const HeadOutput out, const int batch_tiles) {
  if constexpr (!kCompilesMma) return;
  extern __shared__ __align__(128) char shared_bytes[];
  using Traits = MmaTraits<T, kColumns, kAligned, kFloat8>;
  using W = typename Traits::W;
  constexpr HeadTile kTile = Traits::kTile;
  constexpr int kBlocks = Traits::kBlocks, kStageBytes = Traits::kStageBytes;
  const int64_t first = int64_t{blockIdx.x / batch_tiles} * kHeadRows;
  const int64_t first_row = int64_t{blockIdx.x % batch_tiles} * kColumns;
  const int warp = threadIdx.x / kWarpSize;
  const WarpTile own{warp % Traits::kWarpsDown * kTile.warp_rows,
                     warp / Traits::kWarpsDown * kTile.warp_columns,
                     static_cast<int>(threadIdx.x % kWarpSize)};
  const W* weight = static_cast<const W*>(p.weight) + first * p.weight_stride;
  const T* hidden = static_cast<const T*>(p.hidden) + first_row * p.hidden_stride;
  const int last_weight = last_of(p.vocab - first, kHeadRows);
  const int last_hidden = last_of(p.batch - first_row, kColumns);
  const uint32_t shared = shared_address(shared_bytes);
  const int steps = static_cast<int>((p.dim + kTile.step - 1) / kTile.step);

  int filled = 0;        // steps that are started
  uint32_t filling = 0;  // offset of the next one's stage
  const auto start_stage = [&] {
    if (filled < steps) {
      const uint32_t stage = shared + filling;
      const int64_t column = int64_t{filled} * kTile.step;
      copy_rows<kHeadRows, Traits::kWeightChunks, kHeadThreads, kAligned>(
          stage, weight, p.weight_stride, last_weight, column, p.dim);
      copy_rows<kColumns, Traits::kChunks, kHeadThreads, kAligned>(
          stage + Traits::kWeightBytes, hidden, p.hidden_stride, last_hidden, column, p.dim);
    }
    ++filled;
    filling = filling == (kTile.stages - 1) * kStageBytes ? 0 : filling + kStageBytes;
    cp_async_commit_group();
  };

  // Two sets: one is loaded while the other is multiplied.
  uint32_t a[2][Traits::kFragments][4], b[2][Traits::kPairs][4];
  RowOptions* options = reinterpret_cast<RowOptions*>(shared_bytes + options_at(kTile, kFloat8));
  load_options(p, out, options, first_row, kColumns);
  float sums[Traits::kFragments][Traits::kColumnFragments][4] = {};
#pragma unroll
  for (int i = 0; i < kTile.stages - 1; ++i) start_stage();
  cp_async_wait_group(kTile.stages - 2);
  __syncthreads();
  uint32_t reading = 0;
  load_fragments<Traits>(own, shared, 0, a[0], b[0]);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block == kBlocks - 1) {
        // The next stage has arrived, and nobody reads the previous one any more.
        reading = reading == (kTile.stages - 1) * kStageBytes ? 0 : reading + kStageBytes;
        cp_async_wait_group(kTile.stages - 2);
        __syncthreads();
      }
      const int next = (block + 1) % 2;
      load_fragments<Traits>(own, shared + reading, (block + 1) % kBlocks, a[next], b[next]);
      if (block == 0) start_stage();
      multiply_fragments<Traits>(a[block % 2], b[block % 2], sums);
    }
  }
  cp_async_wait_group(0);
  __syncthreads();

  float* tile = reinterpret_cast<float*>(shared_bytes);
  store_sums<Traits>(own, sums, tile);
  __syncthreads();
  finish_tile(p, out, options, tile, first, first_row, kColumns);
  launch_dependents();
}

}  // namespace
}  // namespace fuselage
