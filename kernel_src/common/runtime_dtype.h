// Values whose dtype is known at run time alone: weights, biases, scales, shifts and gates have the
// activations' dtype T or float32, and so have their gradients. The one place that reads and writes
// them.
#pragma once

#include "common/dtype.h"
#include "common/vector.h"

namespace fuselage {

// Value i of a tensor of any dtype.
__device__ __forceinline__ float load_value(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::float16: return to_float(static_cast<const float16*>(data)[i]);
    case DType::bfloat16: return to_float(static_cast<const bfloat16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}
__device__ __forceinline__ void store_value(void* data, DType dtype, int64_t i, float value) {
  switch (dtype) {
    case DType::float16: static_cast<float16*>(data)[i] = from_float<float16>(value); break;
    case DType::bfloat16: static_cast<bfloat16*>(data)[i] = from_float<bfloat16>(value); break;
    default: static_cast<float*>(data)[i] = value;
  }
}

// One value on its way, or none (null): what is loaded is not waited for before finish().
struct RuntimeValueLoading {
  uint32_t bits;

  __device__ __forceinline__ RuntimeValueLoading(const void* data, DType dtype, int64_t i)
      : bits(0) {
    if (data == nullptr) return;
    bits = dtype == DType::float32 ? static_cast<const uint32_t*>(data)[i]
                                   : static_cast<const uint16_t*>(data)[i];
  }
  __device__ __forceinline__ float finish(const void* data, DType dtype, float missing) const {
    return data == nullptr ? missing : load_value(&bits, dtype, 0);
  }
};

// A row of values of T or float32, or of none (null).
template <typename T>
struct RuntimeValues {
  const void* data;
  bool is_float32;  // and T is not

  __device__ __forceinline__ RuntimeValues(const void* data_, DType dtype)
      : data(data_), is_float32(sizeof(T) != sizeof(float) && dtype == DType::float32) {}

  __device__ __forceinline__ bool is_packed() const { return data != nullptr && !is_float32; }

  // The row so many elements further on. Null stays null.
  __device__ __forceinline__ RuntimeValues row_at(int64_t elements) const {
    RuntimeValues row = *this;
    const int64_t size = is_float32 ? sizeof(float) : sizeof(T);
    if (data != nullptr) row.data = static_cast<const char*>(data) + elements * size;
    return row;
  }

  __device__ __forceinline__ float at(int64_t i) const {
    return is_float32 ? static_cast<const float*>(data)[i]
                      : to_float(static_cast<const T*>(data)[i]);
  }
  __device__ __forceinline__ float at_or(int64_t i, float missing) const {
    return data == nullptr ? missing : at(i);
  }
};

// N columns of RuntimeValues on their way: start() of all first, then finish() of each. Values of T
// are loaded by start() and kept packed; float32 ones take twice the registers, and are loaded
// (from L1, mostly) by finish().
template <typename T, int N, bool kAligned>
struct RuntimeLoading {
  Vector<T, N> packed;

  __device__ __forceinline__ void start(const RuntimeValues<T>& values, int column, int dim) {
    if (values.is_packed()) packed = load_columns(static_cast<const T*>(values.data), column, dim);
  }
  // Columns past the end are zero; all are `missing` where there are no values.
  __device__ __forceinline__ void finish(const RuntimeValues<T>& values, int column, int dim,
                                         float missing, float (&floats)[N]) const {
    if (values.data == nullptr) {
#pragma unroll
      for (int k = 0; k < N; ++k) floats[k] = missing;
    } else if (values.is_float32) {
      load_columns(static_cast<const float*>(values.data), column, dim).to_floats(floats);
    } else {
      packed.to_floats(floats);
    }
  }

  template <typename W>
  static __device__ __forceinline__ Vector<W, N> load_columns(const W* row, int column, int dim) {
    if (column >= dim) return Vector<W, N>::zero();
    if constexpr (!kAligned) {
      if (column + N > dim || reinterpret_cast<uintptr_t>(row) % 16 != 0)
        return Vector<W, N>::load_elements(row, column, dim);
    }
    return Vector<W, N>::load(row + column);
  }
};

// N columns at once.
template <bool kAligned, typename T, int N>
__device__ __forceinline__ void load_values(const RuntimeValues<T>& values, int column, int dim,
                                            float missing, float (&floats)[N]) {
  RuntimeLoading<T, N, kAligned> loading;
  loading.start(values, column, dim);
  loading.finish(values, column, dim, missing, floats);
}

// Writes N columns of a row of T or float32. Unaligned rows are written by the element.
template <bool kAligned, typename T, int N>
__device__ __forceinline__ void store_values(void* data, DType dtype, int64_t row_start,
                                             const float (&values)[N], int column, int dim) {
  const auto write = [&](auto* row, auto vector) {
    if constexpr (kAligned) {
      if (column < dim) vector.store(row + column);
    } else {
      vector.store_elements(vector, row, column, dim);
    }
  };
  if (sizeof(T) != sizeof(float) && dtype == DType::float32) {
    write(static_cast<float*>(data) + row_start, Vector<float, N>::from_floats(values));
  } else {
    write(static_cast<T*>(data) + row_start, Vector<T, N>::from_floats(values));
  }
}

}  // namespace fuselage
