// rms_norm and fused_add_rms_norm as operators of norm/row_forward.h.
#pragma once

#include <type_traits>

#include "common/vector.h"
#include "norm/rms_norm.h"
#include "norm/rms_norm_device.h"
#include "norm/row_forward.h"

namespace fuselage {
namespace {

template <typename T, typename O, bool kResidual>
struct RmsNormOp {
  using Params = RmsNormForward;
  using In = T;
  using Out = O;
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kCentres = false, kMostVectors = false;
  static constexpr int kSums = 1, kShared = 1;
  static constexpr bool kWritesSum = kResidual, kNormsInput = false;

  // Launch bounds. 56 registers for the plain aligned kernels, so that three blocks of 384 threads
  // fit on a multiprocessor: on an H200 (5461, 12288) bfloat16 then takes 67.8 us, with two blocks
  // 75.2.
  static constexpr int threads(bool aligned, bool clusters) {
    return aligned && !kResidual && !clusters ? 576 : kForwardThreads;
  }
  static constexpr int blocks(int, bool aligned, bool) {
    return (aligned && kResidual) || sizeof(O) > sizeof(T) ? 1 : 2;
  }
  static constexpr int short_blocks(bool aligned) { return !aligned ? 5 : kResidual ? 7 : 9; }
  static constexpr bool early(int, bool aligned) { return aligned || !kResidual; }

  static __device__ __forceinline__ bool shares_columns(const Params&) { return true; }
  static __device__ __forceinline__ T* sum_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.new_residual) + row * p.new_residual_stride;
  }
  static __device__ __forceinline__ O* out_row(const Params& p, int64_t row) {
    return static_cast<O*>(p.out) + row * p.out_stride;
  }

  // s = x, or the rounded sum of x and residual.
  template <int kVectors, bool kAligned>
  struct Inputs {
    RowLoading<T, kVectors, kAligned> x, residual;

    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
      if constexpr (kResidual)
        residual.start(static_cast<const T*>(p.residual) + row * p.residual_stride + column, left);
    }
    __device__ __forceinline__ void join(const Params&) {
      x.join();
      if constexpr (kResidual) residual.join();
    }
    __device__ __forceinline__ Vector<T, N> finish(const Params&, int64_t, int, int j) const {
      if constexpr (!kResidual) return x.joined(j);
      float a[N], b[N];
      x.joined(j).to_floats(a);
      residual.joined(j).to_floats(b);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] += b[k];
      return Vector<T, N>::from_floats(a);
    }
  };

  static __device__ __forceinline__ void sums_of(const Vector<T, N>& s, float (&sums)[1]) {
    sums[0] = sum_of_squares(s);
  }

  struct Stats {
    float rstd;

    __device__ __forceinline__ explicit Stats(float rstd_) : rstd(rstd_) {}
    __device__ __forceinline__ Stats(const Params& p, const float (&sums)[1])
        : rstd(rstd_of(sums[0], p.dim, p.eps)) {}
    __device__ __forceinline__ void save(const Params& p, int64_t row) const {
      if (p.rstd != nullptr) p.rstd[row] = rstd;
    }
    __device__ __forceinline__ Stats from(int lane, int width) const {
      return Stats(shuffle_from(rstd, lane, width));
    }
  };

  // A weight of type W, or none.
  template <typename W, bool kAligned>
  struct Columns {
    using Loaded = Vector<W, N>;
    static constexpr int kAhead = 0;
    static constexpr bool kRare = false, kTogether = !kAligned && sizeof(W) == 2 && sizeof(T) == 2;
    static constexpr bool kLoadsAnyway = true;  // no weight where it does not fit
    static constexpr bool kFirst = kAligned && !kResidual;
    const W* weight;
    float offset;
    bool cast_before_weight;

    // Of W = T.
    static __device__ __forceinline__ bool fits(const Params& p) {
      return sizeof(T) == sizeof(float) || p.weight == nullptr || p.weight_dtype != DType::float32;
    }
    __device__ __forceinline__ Columns(const Params& p, int64_t)
        : weight(std::is_same_v<W, T> && !fits(p) ? nullptr : static_cast<const W*>(p.weight)),
          offset(weight == nullptr ? 1.0f : p.weight_offset),
          cast_before_weight(p.cast_before_weight) {}
    __device__ __forceinline__ Loaded load(int column, int dim) const {
      if (weight == nullptr || column >= dim) return Loaded::zero();
      return load_columns<kAligned, N>(weight, column, dim);
    }
    // Of all vectors of a thread.
    template <int kVectors>
    __device__ __forceinline__ void load_all(int column, int dim,
                                             Loaded (&loaded)[kVectors]) const {
      RowLoading<W, kVectors, false> loading;
      loading.start(weight + column, weight == nullptr ? -N : dim - column);
      loading.join();
#pragma unroll
      for (int j = 0; j < kVectors; ++j) loaded[j] = loading.joined(j);
    }
    __device__ __forceinline__ Vector<O, N> map(const Vector<T, N>& s, const Stats& stats,
                                                const Loaded& loaded) const {
      float values[N], factors[N];
      s.to_floats(values);
      loaded.to_floats(factors);
      rms_normalise<T>(values, stats.rstd, factors, offset, cast_before_weight);
      return Vector<O, N>::from_floats(values);
    }
  };
  template <bool kAligned>
  using PackedColumns = Columns<T, kAligned>;

  template <bool kAligned, typename F>
  static __device__ __forceinline__ void with_columns(const Params& p, F&& f) {
    if (sizeof(T) != sizeof(float) && p.weight != nullptr && p.weight_dtype == DType::float32) {
      f(ColumnsTag<Columns<float, kAligned>>{});
    } else {
      f(ColumnsTag<Columns<T, kAligned>>{});
    }
  }
};

}  // namespace
}  // namespace fuselage
