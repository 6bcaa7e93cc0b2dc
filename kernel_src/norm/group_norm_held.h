// A thread's vectors of some tensors in shared memory: the thread copies all of them at once, uses
// them as they arrive, and again later. It reads nothing but what it has copied itself, so that
// nothing waits for other threads. Vectors that are not aligned are copied by the element, in the
// same order.
#pragma once

#include "norm/group_norm_device.h"

namespace fuselage {
namespace {

// They arrive in kStages parts.
template <typename T, int kTensors, int kStages>
struct HeldVectors {
  static constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  V* own;  // the first; others follow `threads` further on, a vector of each tensor in turn
  int threads;

  __device__ __forceinline__ HeldVectors(void* shared)
      : own(static_cast<V*>(shared) + thread_of_block()),
        threads(static_cast<int>(blockDim.x * blockDim.y)) {}

  // Starts to copy `count` of each. next(): elements from the tensors' starts to the next one;
  // negative where there is none.
  template <typename Next>
  __device__ __forceinline__ void start(const T* const (&tensors)[kTensors], bool aligned,
                                        int count, const Next& next) {
    V* target = own;
    const int stage = stage_of(count);
    int until = stage;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i == until) {
        cp_async_commit_group();
        until += stage;
      }
      const int64_t offset = next();
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        if (offset >= 0 && aligned) {
          cp_async<16>(target, tensors[t] + offset);
        } else if (offset >= 0) {
          *target = V::load_elements(tensors[t] + offset, 0, N);
        }
        target += threads;
      }
    }
    cp_async_commit_group();
  }
  // The same of those `step` elements apart, from the tensors' starts on.
  __device__ __forceinline__ void start_rows(const T* const (&tensors)[kTensors], bool aligned,
                                             int count, int64_t step) {
    int64_t at = -step;
    start(tensors, aligned, count, [&] { return at += step; });
  }
  // f(values, i) for each of them, stage by stage as they arrive.
  template <typename F>
  __device__ __forceinline__ void for_each(int count, DType dtype, const F& f) const {
    const V* vectors = own;
    const int stage = stage_of(count);
    int until = 0, pending = count > 0 ? (count - 1) / stage : 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i == until) {
        cp_async_wait_group(pending--);
        until += stage;
      }
      float values[kTensors][N];
      read(vectors, dtype, values);
      f(values, i);
    }
  }
  // Those that follow, at `vectors`.
  __device__ __forceinline__ void read(const V*& vectors, DType dtype,
                                       float (&values)[kTensors][N]) const {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      unpack(*vectors, dtype, values[t]);
      vectors += threads;
    }
  }

 private:
  static __device__ __forceinline__ int stage_of(int count) {
    return (count + kStages - 1) / kStages;
  }
};

}  // namespace
}  // namespace fuselage
