// Kernels for the sizes of dtypes: one for both of half precision.
#pragma once

#include "common/dispatch.h"

namespace fuselage {

// Kernels are compiled for float32 and for bfloat16. Float16 takes those of bfloat16, whose size it
// has, and is told apart where they are converted: a branch for each vector, and a third
// less code.
template <typename T, int N>
__device__ __forceinline__ void unpack(const Vector<T, N>& vector, DType dtype,
                                       float (&values)[N]) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::float16) {
      bits_as<Vector<float16, N>>(vector).to_floats(values);
      return;
    }
  }
  vector.to_floats(values);
}

template <typename T, int N>
__device__ __forceinline__ Vector<T, N> pack(const float (&values)[N], DType dtype) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::float16)
      return bits_as<Vector<T, N>>(Vector<float16, N>::from_floats(values));
  }
  return Vector<T, N>::from_floats(values);
}

// f(TypeTag<T>) of the type that a kernel is compiled for.
template <typename F>
inline gpuError dispatch_size(DType dtype, F&& f) {
  return dtype == DType::float32 ? f(TypeTag<float>{}) : f(TypeTag<bfloat16>{});
}

}  // namespace fuselage
