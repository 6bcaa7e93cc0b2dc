// What the kernels of the loss family share: targets, and logits on their way from a row.
#pragma once

#include "common/dispatch_size.h"
#include "common/logits_device.h"
#include "common/ptx.h"
#include "common/reduce.h"
#include "common/row_vectors.h"
#include "common/runtime_dtype.h"
#include "loss/cross_entropy.h"

namespace fuselage {

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

// Whether the vocabulary has the target.
__device__ __forceinline__ bool has_target(const LossRows& in, int64_t row) {
  const int64_t target = target_of(in, row);
  return target >= 0 && target < in.vocab;
}

// The target's x, and NaN where the vocabulary has no such target.
__device__ __forceinline__ float target_logit(const LossRows& in, int64_t row) {
  if (!has_target(in, row)) return not_a_number();
  const float logit = load_value(in.logits, in.dtype, row * in.stride + target_of(in, row));
  return in.softcap == 0.0f ? logit : soft_capped_call(logit, in.softcap);
}

// The log of a sum of which the largest term is 1, and NaN where there is none.
__device__ __forceinline__ float log_of_sum(float sum) {
  return sum > 0.0f ? log_of_normal<GpuFloats>(sum) : not_a_number();
}

}  // namespace fuselage
