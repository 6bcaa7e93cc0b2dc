// What the forward and the backward of the adaptive norms share on the GPU.
#pragma once

#include "common/quotient.h"
#include "common/runtime_dtype.h"
#include "norm/ada_norm.h"

namespace fuselage {
namespace {

// A row of what rows are scaled, shifted or gated with.
template <typename T>
__device__ __forceinline__ RuntimeValues<T> modulation_of(const Modulation& m, int64_t row) {
  const RuntimeValues<T> values(m.data, m.dtype);
  return m.data == nullptr || m.stride == 0 ? values
                                            : values.row_at(quotient(row, m.rows) * m.stride);
}

// (value - mean) * rstd. NOTE: not as value * rstd - mean * rstd, which one instruction would do:
// of a row whose elements are all alike that leaves the rounding of mean * rstd, which may be any
// number.
struct Normalise {
  float mean, rstd, offset;

  __device__ __forceinline__ Normalise(float mean_, float rest, float rstd_)
      : mean(mean_), rstd(rstd_), offset(-rest * rstd_) {}
  __device__ __forceinline__ float operator()(float value) const {
    return fmaf(value - mean, rstd, offset);
  }
};

}  // namespace
}  // namespace fuselage
