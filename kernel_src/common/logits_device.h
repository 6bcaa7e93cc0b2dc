// Logits of a row on their way to a softmax: which of them a thread has, and how they are finished.
#pragma once

#include "common/row_vectors.h"
#include "common/softmax_device.h"

namespace fuselage {

// NOTE: not inlined. A thread has 16 logits: that would be most of the code.
static __device__ __noinline__ float soft_capped_call(float logit, float softcap) {
  return soft_capped<GpuFloats>(logit, softcap);
}

// The columns of this thread: `step` columns on from `first` there are those of the next turn.
template <typename T, int kVectors>
struct LogitColumns {
  static constexpr int N = 16 / static_cast<int>(sizeof(T));
  int first, step;

  __device__ __forceinline__ LogitColumns() {
    const int lane = lane_in_row<kVectors>();
    first = (static_cast<int>(threadIdx.x) - lane) * kVectors * N + lane * N;
    step = static_cast<int>(blockDim.x) * kVectors * N;
  }
};

// The x of a vector, of which the row has `left` columns. Those past the end are `missing`.
template <int N>
__device__ __forceinline__ void finish_logits(float (&values)[N], int left, float softcap,
                                              float missing) {
  if (softcap != 0.0f) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = soft_capped_call(values[k], softcap);
  }
  if (left >= N) return;
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] = k < left ? values[k] : missing;
}

}  // namespace fuselage
