// The form of sample/lm_head.cu for all GPUs and dtypes, a T4 and those of AMD among them: neither
// cp.async nor tensor cores.
#pragma once

#include <type_traits>

#include "common/float8.h"
#include "sample/lm_head_epilogue.h"

namespace fuselage {
namespace {

// A thread has the sums of four rows of the weight and two of the batch.
template <typename T, typename W>
__global__ void __launch_bounds__(kPlainThreads, 2)
    plain_head_kernel(const LmHead p, const HeadOutput out, const int batch_tiles) {
  // has_plain_form (sample/sample_policy.h) says the same of the GPU.
  constexpr bool kIsAlone = std::is_same_v<T, float> && std::is_same_v<W, Float8>;
  if constexpr (kCompilesAsyncCopy && !kIsAlone) return;
  constexpr int kRowsEach = 4, kColumnsEach = 2;
  static_assert(kPlainRows == kHeadRows, "candidates are those of tiles of one size");
  static_assert(kPlainThreads == kPlainRows / kRowsEach * (kPlainColumns / kColumnsEach),
                "every product has a thread");
  __shared__ float weights[kPlainStep][kPlainRows + 4];
  __shared__ float hiddens[kPlainStep][kPlainColumns + 4];
  __shared__ __align__(16) float tile[kPlainColumns * kHeadSumsStride];
  __shared__ RowOptions options[kPlainColumns];
  const int64_t first = int64_t{blockIdx.x / batch_tiles} * kPlainRows;
  const int64_t first_row = int64_t{blockIdx.x % batch_tiles} * kPlainColumns;
  const W* weight = static_cast<const W*>(p.weight);
  const T* hidden = static_cast<const T*>(p.hidden);
  const int r = threadIdx.x % (kPlainRows / kRowsEach) * kRowsEach;
  const int c = threadIdx.x / (kPlainRows / kRowsEach) * kColumnsEach;
  // Those of the next step, in flight while this one is computed.
  constexpr int kWeightsEach = kPlainRows * kPlainStep / kPlainThreads;
  constexpr int kHiddensEach = kPlainColumns * kPlainStep / kPlainThreads;
  float next_weights[kWeightsEach], next_hiddens[kHiddensEach];
  const auto load_step = [&](int64_t begin) {
#pragma unroll
    for (int i = 0; i < kWeightsEach; ++i) {
      const int slot = i * kPlainThreads + threadIdx.x;
      const int64_t row = first + slot / kPlainStep, column = begin + slot % kPlainStep;
      next_weights[i] =
          row < p.vocab && column < p.dim ? to_float(weight[row * p.weight_stride + column]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHiddensEach; ++i) {
      const int slot = i * kPlainThreads + threadIdx.x;
      const int64_t row = first_row + slot / kPlainStep, column = begin + slot % kPlainStep;
      next_hiddens[i] =
          row < p.batch && column < p.dim ? to_float(hidden[row * p.hidden_stride + column]) : 0.0f;
    }
  };
  load_options(p, out, options, first_row, kPlainColumns);
  float sums[kRowsEach][kColumnsEach] = {};
  load_step(0);
  for (int64_t begin = 0; begin < p.dim; begin += kPlainStep) {
#pragma unroll
    for (int i = 0; i < kWeightsEach; ++i) {
      const int slot = i * kPlainThreads + threadIdx.x;
      weights[slot % kPlainStep][slot / kPlainStep] = next_weights[i];
    }
#pragma unroll
    for (int i = 0; i < kHiddensEach; ++i) {
      const int slot = i * kPlainThreads + threadIdx.x;
      hiddens[slot % kPlainStep][slot / kPlainStep] = next_hiddens[i];
    }
    __syncthreads();
    if (begin + kPlainStep < p.dim) load_step(begin + kPlainStep);
#pragma unroll
    for (int k = 0; k < kPlainStep; ++k) {
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnsEach; ++j)
          sums[i][j] = SampleMath::fma(weights[k][r + i], hiddens[k][c + j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnsEach; ++j) tile[(c + j) * kHeadSumsStride + r + i] = sums[i][j];
  }
  __syncthreads();
  finish_tile(p, out, options, tile, first, first_row, kPlainColumns);
  launch_dependents();
}

}  // namespace
}  // namespace fuselage
