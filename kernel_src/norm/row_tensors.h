// What kernels of a backward of rows read: the tensors, and the statistics of each row. And the
// last step of their column sums, over the rows of a block.
#pragma once

#include "common/divide.h"
#include "common/gpu_compat.h"
#include "common/vector.h"
#include "norm/row_backward_policy.h"

namespace fuselage {
namespace {

// The tensors that are read for each row.
struct RowTensors {
  const void* data[kMaxRowTensors];  // [rows, dim]
  int64_t stride[kMaxRowTensors];    // elements between rows
  int64_t step[kMaxRowTensors];      // bytes between rows that a thread has one after the other
  int count;

  void add(const void* tensor, int64_t row_stride) {
    data[count] = tensor;
    stride[count++] = row_stride;
  }
  template <typename U>
  __device__ __forceinline__ const U* row(int i, int64_t row, int64_t column) const {
    return static_cast<const U*>(data[i]) + row * stride[i] + column;
  }
};

// What a backward is launched with, besides the operator's own params.
struct RowBackward {
  RowTensors tensors;
  int extra;                // the tensor with the gradient of the sum that was normalised, or 0
  const float* statistics;  // [rows, statistics_size]: those of a RowMoments, or rstd and others
  int statistics_size;
  int64_t dim;
  int64_t groups, group_rows;
  Divisor blocks_per_group;
  int64_t row_step, output_step;  // rows, and elements, between rows that a thread has
  int turns, rest;  // a thread has so many of a group's; and the first `rest` threads one more
  bool needs_rows;  // and not sums of columns alone
  float* partials;  // [groups][blocks_per_group][partial_kinds][dim], or null
  int partial_kinds;
  int row_blocks, column_blocks;
  float2* means;  // [rows], of streamed rows: the pair of Coefficients, for sums of columns

  // What is read for every row: the gradient of the result, what was normalised, and the gradient
  // of the latter, if it is a result, too.
  void read(const void* grad_out, int64_t grad_out_stride, const void* s, int64_t s_stride,
            const void* grad_s, int64_t grad_s_stride) {
    tensors.add(grad_out, grad_out_stride);
    tensors.add(s, s_stride);
    read_extra(grad_s, grad_s_stride);
  }
  void read_extra(const void* grad_s, int64_t grad_s_stride) {
    if (grad_s == nullptr) return;
    extra = tensors.count;
    tensors.add(grad_s, grad_s_stride);
  }
};

// How its shared memory is laid out: [statistics of each stage][factors][stages].
struct RowBackwardLayout {
  int cluster, stages, statistics_bytes, factor_bytes;
};

// Mean and rstd of a row; a mean of zero where there is none, or what an operator has instead.
struct RowMoments {
  float mean, rstd;
};

template <int kStatistics>
__device__ __forceinline__ RowMoments moments_from(const float* values, int size) {
  if constexpr (kStatistics == 2) {
    if (size == 2) {
      const float2 pair = *reinterpret_cast<const float2*>(values);
      return {pair.x, pair.y};
    }
  }
  return {0.0f, values[0]};
}
__device__ __forceinline__ const float* statistics_of(const RowBackward& launch, int64_t row) {
  return launch.statistics + row * launch.statistics_size;
}
template <int kStatistics>
__device__ __forceinline__ RowMoments load_moments(const RowBackward& launch, int64_t row) {
  return moments_from<kStatistics>(statistics_of(launch, row), launch.statistics_size);
}

// Sums of kWidth columns over the rows of a block: `first` is the first column of the first row, in
// shared memory. Sixteen rows are added up apart: of 512 that all point one way the rounding would
// add up, too. (In float64 it took 0.3 to 2 us more on an H100.)
template <int kWidth>
__device__ __forceinline__ void add_block_rows(const float* first, int pitch,
                                               float (&sums)[kWidth]) {
  constexpr int kGroup = 16;
  const int count = static_cast<int>(blockDim.y);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sums[k] = 0.0f;
  for (int row = 0; row < count; row += kGroup) {
    float group[kWidth] = {};
    for (int i = row; i < min(row + kGroup, count); ++i) {
      float values[kWidth];
      Vector<float, kWidth>::load_shared(first + i * pitch).to_floats(values);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) group[k] += values[k];
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[k] += group[k];
  }
}

// Whether the normalised row may be a result that is not used, of a sum that is: a row without
// statistics (see nan_unless_zero).
__device__ __forceinline__ bool may_be_unused(const RowBackward& launch,
                                              const RowMoments& moments) {
  return launch.extra > 0 && !(moments.rstd > 0.0f);
}

}  // namespace
}  // namespace fuselage
