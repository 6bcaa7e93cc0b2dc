// What the kernels of norm/gated_rms_norm.cu are made of: the gate, where a group lies, and the
// gradients of a vector.
#pragma once

#include "common/gpu_math.h"
#include "common/runtime_dtype.h"
#include "common/vector.h"
#include "norm/gated_rms_norm.h"

namespace fuselage {
namespace {

// 1 / v for v in [1, 2].
template <typename T>
__device__ __forceinline__ float reciprocal_of_sum(float v) {
  const float r = reciprocal_of_normal(v);
  return sizeof(T) < sizeof(float) ? r : fmaf(fmaf(-v, r, 1.0f), r, r);
}

// The lesser of sigmoid(v) and sigmoid(-v), of which the gate's activation and slope are made
// without another exponential. Accurate relative to itself, as are all of these.
template <typename T>
__device__ __forceinline__ float lesser_sigmoid(float v) {
  const float e = GpuMath<T>::exp_negative(GpuMath<T>::minus_absolute(v));
  return __fmul_rn(e, reciprocal_of_sum<T>(1.0f + e));  // the same bits in all kernels: no fma
}

// A condition as a mask of bits, of which the compiler knows nothing: it would make a copy of each
// loop for either.
struct Mask {
  uint32_t bits;

  __device__ __forceinline__ explicit Mask(bool condition)
      : bits(-static_cast<uint32_t>(condition)) {
#if !defined(USE_ROCM)
    asm("" : "+r"(bits));
#endif
  }
  __device__ __forceinline__ float choose(float a, float b) const {
    return __uint_as_float((__float_as_uint(a) & bits) | (__float_as_uint(b) & ~bits));
  }
};

// Which activation the gate has, and whether it comes after the norm.
template <bool kNormFirst>
struct SiluGate {
  static constexpr bool kOpensLate = kNormFirst;

  template <typename Params>
  __device__ __forceinline__ explicit SiluGate(const Params&) {}
  __device__ __forceinline__ bool norm_first() const { return kNormFirst; }
  __device__ __forceinline__ float if_silu(float a, float) const { return a; }
  __device__ __forceinline__ float before_norm(float a) const { return kNormFirst ? 1.0f : a; }
  __device__ __forceinline__ float after_norm(float a) const { return kNormFirst ? a : 1.0f; }
};

// Either, as it is asked for at run time.
struct AnyGate {
  static constexpr bool kOpensLate = false;
  Mask silu, first;

  template <typename Params>
  __device__ __forceinline__ explicit AnyGate(const Params& p)
      : silu(p.activation == NormGate::silu), first(p.norm_first) {}
  __device__ __forceinline__ bool norm_first() const { return first.bits != 0; }
  __device__ __forceinline__ float if_silu(float a, float b) const { return silu.choose(a, b); }
  __device__ __forceinline__ float before_norm(float a) const { return first.choose(1.0f, a); }
  __device__ __forceinline__ float after_norm(float a) const { return first.choose(a, 1.0f); }
};

// The activation and its slope.
template <typename T, typename Gate>
__device__ __forceinline__ float activated(const Gate& gate, float v, float& slope) {
  const float lesser = lesser_sigmoid<T>(v), larger = 1.0f - lesser;
  const float of = v < 0.0f ? lesser : larger, of_minus = v < 0.0f ? larger : lesser;
  const float value = gate.if_silu(v, 1.0f) * of;
  slope = fmaf(value, of_minus, gate.if_silu(of, 0.0f));
  return value;
}

// s, or norm first x, in `values`; and what comes after the norm, in `factors`.
template <typename T, int N, typename Gate>
__device__ __forceinline__ void open_gate(const Gate& gate, const Vector<T, N>& x,
                                          const Vector<T, N>& gates, float (&values)[N],
                                          float (&factors)[N]) {
  x.to_floats(values);
  gates.to_floats(factors);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float slope;
    const float a = activated<T>(gate, factors[k], slope);
    values[k] *= gate.before_norm(a);
    factors[k] = gate.after_norm(a);
  }
}

// A group of a row: where its columns start, in tensors with a stride between rows and in those
// without gaps. `dim` is 0 where there is no such row.
struct GatedGroup {
  int64_t row, first_column, start;
  int dim;

  template <typename Params>
  __device__ __forceinline__ GatedGroup(const Params& p, int64_t row_, uint32_t group)
      : row(row_),
        first_column(group * p.dim),
        start((row_ * p.groups + group) * p.dim),
        dim(row_ < p.rows ? static_cast<int>(p.dim) : 0) {}

  template <typename T>
  __device__ __forceinline__ const T* in(const void* data, int64_t stride) const {
    return static_cast<const T*>(data) + row * stride + first_column;
  }
  template <typename T>
  __device__ __forceinline__ T* out(void* data) const {
    return static_cast<T*>(data) + start;
  }
  template <typename T, typename Params>
  __device__ __forceinline__ RuntimeValues<T> weight(const Params& p) const {
    return RuntimeValues<T>(p.weight, p.weight_dtype).row_at(first_column);
  }
};

__device__ __forceinline__ float mean_of_group(float sum, int64_t dim) {
  return sum * reciprocal_of_normal(static_cast<float>(static_cast<int>(dim)));
}

// The result of a vector of open_gate.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> gated_result(const GatedRmsNormForward& p, float rstd,
                                                     const float (&weight)[N],
                                                     const float (&factors)[N],
                                                     float (&values)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] *= rstd;
  if (p.cast_before_weight) round_all<T>(values);
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] *= weight[k];
  if (p.cast_before_weight && p.norm_first && p.weight_dtype == p.dtype) round_all<T>(values);
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] *= factors[k];
  return Vector<T, N>::from_floats(values);
}

// t = grad_out * x * rstd * act(gate) of a vector, in the order of the forward; in place of the
// gate its activation, and the slope of that.
template <typename T, int N, typename Gate>
__device__ __forceinline__ void gated_terms(const Gate& gate, float rstd,
                                            const float (&grad_out)[N], const float (&x)[N],
                                            float (&a)[N], float (&slopes)[N], float (&t)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    a[k] = activated<T>(gate, a[k], slopes[k]);
    const float n = x[k] * gate.before_norm(a[k]) * rstd;
    t[k] = grad_out[k] * n * gate.after_norm(a[k]);
  }
}

// t * weight, summed.
template <int N>
__device__ __forceinline__ float weighted_sum(const float (&t)[N], const float (&weight)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) sum = fmaf(t[k], weight[k], sum);
  return sum;
}

// The gradients of a vector of x and of the gate, in place of x and of the slopes: `mean` is that
// of t * weight.
template <int N, typename Gate>
__device__ __forceinline__ void gated_gradients(const Gate& gate, float rstd, float mean,
                                                const float (&grad_out)[N],
                                                const float (&weight)[N], const float (&a)[N],
                                                float (&x)[N], float (&slopes)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float g = grad_out[k] * weight[k];
    if (gate.norm_first()) {
      const float n = x[k] * rstd;
      x[k] = rstd * fmaf(g, a[k], -n * mean);
      slopes[k] *= g * n;
    } else {
      const float grad_s = rstd * fmaf(-(x[k] * a[k] * rstd), mean, g);
      slopes[k] *= grad_s * x[k];
      x[k] = grad_s * a[k];
    }
  }
}

}  // namespace
}  // namespace fuselage
