// What the forwards of rms_norm and rms_norm_add_rms_norm share on the GPU.
#pragma once

#include "common/gpu_compat.h"
#include "common/vector.h"

namespace fuselage {

__device__ __forceinline__ float rstd_of(float squares, int64_t dim, float eps) {
  return reciprocal_sqrt(squares / static_cast<float>(static_cast<int>(dim)) + eps);
}

// values * rstd * (offset + factors), with the rounding to T between that `cast_before_weight` asks
// for.
template <typename T, int N>
__device__ __forceinline__ void rms_normalise(float (&values)[N], float rstd,
                                              const float (&factors)[N], float offset,
                                              bool cast_before_weight) {
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] *= rstd;
  if (cast_before_weight) round_all<T>(values);
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] *= offset + factors[k];
}

}  // namespace fuselage
