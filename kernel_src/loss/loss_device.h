// What the kernels of the loss family share: targets, and logits on their way from a row.
#pragma once

#include "common/dispatch_size.h"
#include "common/ptx.h"
#include "common/reduce.h"
#include "common/row_vectors.h"
#include "common/runtime_dtype.h"
#include "common/softmax_device.h"
#include "loss/cross_entropy.h"

namespace fuselage {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowestFloat = -3.40282347e+38f;

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

__device__ __forceinline__ int64_t target_of(const LossRows& in, int64_t row) {
  return in.int32_targets ? static_cast<const int32_t*>(in.targets)[row]
                          : static_cast<const int64_t*>(in.targets)[row];
}

__device__ __forceinline__ bool is_counted(const LossRows& in, int64_t row) {
  return row < in.rows && target_of(in, row) != in.ignore_index;
}

template <typename T>
__device__ __forceinline__ const T* row_of(const LossRows& in, int64_t row) {
  return static_cast<const T*>(in.logits) + row * in.stride;
}

// NOTE: not inlined. A thread has 16 logits: that would be most of the code.
static __device__ __noinline__ float soft_capped_call(float logit, float softcap) {
  return soft_capped<GpuFloats>(logit, softcap);
}

// The target's x, and NaN where the vocabulary has no such target.
__device__ __forceinline__ float target_logit(const LossRows& in, int64_t row) {
  const int64_t target = target_of(in, row);
  if (target < 0 || target >= in.vocab) return not_a_number();
  const float logit = load_value(in.logits, in.dtype, row * in.stride + target);
  return in.softcap == 0.0f ? logit : soft_capped_call(logit, in.softcap);
}

// The log of a sum of which the largest term is 1, and NaN where there is none.
__device__ __forceinline__ float log_of_sum(float sum) {
  return sum > 0.0f ? log_of_normal<GpuFloats>(sum) : not_a_number();
}

// The columns of this thread: `step` columns on from `first` there are those of the next turn.
template <typename T, int kVectors>
struct LossColumns {
  static constexpr int N = 16 / static_cast<int>(sizeof(T));
  int first, step;

  __device__ __forceinline__ LossColumns() {
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
