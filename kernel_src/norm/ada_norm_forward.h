// layer_norm, ada_layer_norm, ada_rms_norm and gate_residual_ada_norm as operators of
// norm/row_forward.h.
#pragma once

#include "common/reduce.h"
#include "common/vector.h"
#include "norm/ada_norm_device.h"
#include "norm/row_forward.h"

namespace fuselage {
namespace {

// What the values of columns are: a scale and a shift alone, both of x's type, or of float32 where
// that is another; or anything else.
enum class ColumnPair { none, of_x, of_float32 };

// Weight and bias take the place of scale and shift where there are neither.
struct AdaNormParams : AdaNormForward {
  float scale_offset;  // what is added to the scale
  ColumnPair pair;
};

inline AdaNormParams ada_norm_params(const AdaNormForward& given) {
  AdaNormParams p{given, 1.0f, ColumnPair::none};
  if (p.scale.data == nullptr && p.shift.data == nullptr) {
    p.scale = {p.weight.data, 0, 1, p.weight.dtype};
    p.shift = {p.bias.data, 0, 1, p.bias.dtype};
    p.weight.data = p.bias.data = nullptr;
    if (p.scale.data != nullptr) p.scale_offset = -0.0f;  // which leaves -0, too, as it is
  }
  if (p.weight.data == nullptr && p.bias.data == nullptr && p.scale.data != nullptr &&
      p.shift.data != nullptr && p.scale.dtype == p.shift.dtype)
    p.pair = p.scale.dtype == p.dtype ? ColumnPair::of_x : ColumnPair::of_float32;
  return p;
}

template <typename T, bool kResidual>
struct AdaNormOp {
  using Params = AdaNormParams;
  using In = T;
  using Out = T;
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kCentres = true, kMostVectors = !kResidual;
  static constexpr bool kRest =
      sizeof(T) == sizeof(float);  // in half precision it is lost in the rounding
  static constexpr int kSums = 1, kShared = Moments<kRest>::kShared;
  static constexpr bool kWritesSum = kResidual, kNormsInput = false;

  // Launch bounds: 64 registers; 80 with several inputs.
  static constexpr int threads(bool, bool) { return kResidual ? 768 : kForwardThreads; }
  static constexpr int blocks(int, bool, bool) { return kResidual ? 1 : 2; }
  static constexpr int short_blocks(bool aligned) { return aligned && !kResidual ? 7 : 5; }
  static constexpr bool early(int vectors, bool aligned) { return aligned && vectors < 4; }

  static __device__ __forceinline__ bool centred(const Params& p) { return p.layer; }
  static __device__ __forceinline__ bool shares_columns(const Params& p) {
    return p.scale.stride == 0 && p.shift.stride == 0;
  }
  static __device__ __forceinline__ T* sum_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.new_residual) + row * p.new_residual_stride;
  }
  static __device__ __forceinline__ T* out_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.out) + row * p.out_stride;
  }

  // s = x, or residual + gate * x, rounded. NOTE: product and sum are rounded to float32 on the
  // way, as on the CPU.
  template <int kVectors, bool kAligned>
  struct Inputs {
    RowLoading<T, kVectors, kAligned> x, residual, gate;

    // Whether the gate is loaded with x: it is of its type, and there are registers for it.
    static __device__ __forceinline__ bool gate_is_packed(const Params& p) {
      return (kAligned || kVectors > 1) && RuntimeValues<T>(p.gate.data, p.gate.dtype).is_packed();
    }
    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
      if constexpr (kResidual) {
        residual.start(static_cast<const T*>(p.residual) + row * p.residual_stride + column, left);
        if (gate_is_packed(p))
          gate.start(static_cast<const T*>(modulation_of<T>(p.gate, row).data) + column, left);
      }
    }
    __device__ __forceinline__ void join(const Params& p) {
      x.join();
      if constexpr (kResidual) {
        residual.join();
        if (gate_is_packed(p)) gate.join();
      }
    }
    __device__ __forceinline__ Vector<T, N> finish(const Params& p, int64_t row, int column,
                                                   int j) const {
      if constexpr (!kResidual) return x.joined(j);
      float a[N], b[N], gates[N];
      x.joined(j).to_floats(a);
      residual.joined(j).to_floats(b);
#pragma unroll
      for (int k = 0; k < N; ++k) gates[k] = 1.0f;
      if (gate_is_packed(p)) {
        gate.joined(j).to_floats(gates);
      } else if (p.gate.data != nullptr) {
        const int dim = static_cast<int>(p.dim);
        load_inside<kAligned>(modulation_of<T>(p.gate, row), column, dim, gates);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = __fadd_rn(b[k], __fmul_rn(gates[k], a[k]));
      return Vector<T, N>::from_floats(a);
    }
  };

  // N values from `column` on. Aligned, what is past the end is read as the last vector: cheaper
  // than not to.
  template <bool kAligned>
  static __device__ __forceinline__ void load_inside(const RuntimeValues<T>& values, int column,
                                                     int dim, float (&floats)[N]) {
    if (kAligned) column = min(column, dim - N);
    if (values.is_float32) {
      load_columns<kAligned, N>(static_cast<const float*>(values.data), column, dim)
          .to_floats(floats);
    } else {
      load_columns<kAligned, N>(static_cast<const T*>(values.data), column, dim).to_floats(floats);
    }
  }

  static __device__ __forceinline__ void sums_of(const Vector<T, N>& s, float (&sums)[1]) {
    sums[0] = sum_of_squares(s);
  }
  // Keeps the compiler from keeping the floats of a vector, which take twice the registers, for its
  // next use.
  static __device__ __forceinline__ void forget_floats(Vector<T, N>& v) {
#if !defined(USE_ROCM)
#pragma unroll
    for (int i = 0; i < Vector<T, N>::kWords; ++i) asm volatile("" : "+r"(v.words[i]));
#endif
  }

  struct Stats {
    float mean, rest, rstd;

    __device__ __forceinline__ Stats(float mean_, float rest_, float rstd_)
        : mean(mean_), rest(rest_), rstd(rstd_) {}
    __device__ __forceinline__ Stats(const Params& p, const float (&squares)[1])
        : mean(0.0f),
          rest(0.0f),
          rstd(reciprocal_sqrt(squares[0] / static_cast<float>(static_cast<int>(p.dim)) + p.eps)) {}
    __device__ __forceinline__ Stats(const Params& p, const Moments<kRest>& moments) {
      const float dim = static_cast<float>(static_cast<int>(p.dim));
      mean = moments.sum;
      rest = kRest ? mean_of(moments.rest, dim) : 0.0f;
      float variance = mean_of(moments.squares, dim) - rest * rest;
      variance = variance < 0.0f ? 0.0f : variance;  // and a NaN stays one
      rstd = reciprocal_sqrt(variance + p.eps);
    }
    __device__ __forceinline__ void save(const Params& p, int64_t row) const {
      if (p.statistics == nullptr) return;
      if (p.layer) {
        reinterpret_cast<float2*>(p.statistics)[row] = make_float2(mean + rest, rstd);
      } else {
        p.statistics[row] = rstd;
      }
    }
    __device__ __forceinline__ Stats from(int lane, int width) const {
      return Stats(shuffle_from(mean, lane, width), kRest ? shuffle_from(rest, lane, width) : 0.0f,
                   shuffle_from(rstd, lane, width));
    }
    __device__ __forceinline__ void normalise(const Vector<T, N>& s, float (&values)[N]) const {
      s.to_floats(values);
      const Normalise normalised(mean, kRest ? rest : 0.0f, rstd);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = normalised(values[k]);
    }
  };

  // out = xhat * (1 + scale) + shift, or without the 1, where there are both, of type U, and
  // nothing else. kOne: which, where rows are aligned; others have one kind for both.
  template <typename U>
  struct Pair {
    Vector<U, N> scale, shift;
  };
  template <typename U, bool kOne, bool kAligned = true>
  struct Columns {
    using Loaded = Pair<U>;
    static constexpr int kAhead = sizeof(U) == sizeof(T) ? 1 : 0;  // where their registers are few
    // NOTE: of float32 some registers would be spilled.
    static constexpr bool kRare = false, kTogether = !kAligned && sizeof(U) < sizeof(float);
    static constexpr bool kLoadsAnyway = false, kFirst = false;
    const U *scale, *shift;
    float offset;

    static __device__ __forceinline__ bool fits(const Params& p) {
      return p.pair == (std::is_same_v<U, T> ? ColumnPair::of_x : ColumnPair::of_float32);
    }
    __device__ __forceinline__ Columns(const Params& p, int64_t row)
        : scale(row_of(p.scale, row)),
          shift(row_of(p.shift, row)),
          offset(kAligned ? (kOne ? 1.0f : -0.0f) : p.scale_offset) {}
    // As modulation_of, of a known type.
    static __device__ __forceinline__ const U* row_of(const Modulation& m, int64_t row) {
      const U* data = static_cast<const U*>(m.data);
      return m.stride == 0 ? data : data + quotient(row, m.rows) * m.stride;
    }
    // What is past the end is read as the last vector: cheaper than not to.
    __device__ __forceinline__ Loaded load(int column, int dim) const {
      const int inside = kAligned ? min(column, dim - N) : column;
      return {load_columns<kAligned, N>(scale, inside, dim),
              load_columns<kAligned, N>(shift, inside, dim)};
    }
    // Of all vectors of a thread.
    template <int kVectors>
    __device__ __forceinline__ void load_all(int column, int dim,
                                             Loaded (&loaded)[kVectors]) const {
      RowLoading<U, kVectors, false> scales, shifts;
      scales.start(scale + column, dim - column);
      shifts.start(shift + column, dim - column);
      scales.join();
      shifts.join();
#pragma unroll
      for (int j = 0; j < kVectors; ++j) loaded[j] = {scales.joined(j), shifts.joined(j)};
    }
    __device__ __forceinline__ Vector<T, N> map(const Vector<T, N>& s, const Stats& stats,
                                                const Loaded& loaded) const {
      float values[N], factors[N], other[N];
      stats.normalise(s, values);
      loaded.scale.to_floats(factors);
      loaded.shift.to_floats(other);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = fmaf(values[k], offset + factors[k], other[k]);
      return Vector<T, N>::from_floats(values);
    }
  };
  template <bool kAligned>
  using PackedColumns = Columns<T, true, kAligned>;

  // out = (xhat * weight + bias) * (offset + scale) + shift, of any types, read where they are
  // used.
  // NOTE: spelled out, so that every kernel rounds alike.
  template <bool kAligned>
  struct AnyColumns {
    struct Loaded {
      int column, dim;
    };
    static constexpr int kAhead = 0;
    static constexpr bool kRare = !kAligned, kTogether = false;
    RuntimeValues<T> weight, bias, scale, shift;
    float offset;

    __device__ __forceinline__ AnyColumns(const Params& p, int64_t row)
        : weight(p.weight.data, p.weight.dtype),
          bias(p.bias.data, p.bias.dtype),
          scale(modulation_of<T>(p.scale, row)),
          shift(modulation_of<T>(p.shift, row)),
          offset(p.scale_offset) {}
    __device__ __forceinline__ Loaded load(int column, int dim) const { return {column, dim}; }
    __device__ __forceinline__ Vector<T, N> map(const Vector<T, N>& s, const Stats& stats,
                                                const Loaded& at) const {
      float values[N], factors[N], other[N];
      const auto load_or_zero = [&](const RuntimeValues<T>& from, float(&floats)[N]) {
        if (from.data == nullptr) {
          Vector<T, N>::zero().to_floats(floats);
        } else {
          load_inside<kAligned>(from, at.column, at.dim, floats);
        }
      };
      stats.normalise(s, values);
      if (weight.data != nullptr) {
        load_or_zero(weight, other);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = __fmul_rn(values[k], other[k]);
      }
      if (bias.data != nullptr) {
        load_or_zero(bias, other);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = __fadd_rn(values[k], other[k]);
      }
      load_or_zero(scale, factors);
      load_or_zero(shift, other);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = fmaf(values[k], offset + factors[k], other[k]);
      return Vector<T, N>::from_floats(values);
    }
  };

  template <bool kAligned, typename F>
  static __device__ __forceinline__ void with_columns(const Params& p, F&& f) {
    if (PackedColumns<kAligned>::fits(p)) {
      if (kAligned && p.scale_offset == 0.0f) {
        f(ColumnsTag<Columns<T, false>>{});
      } else {
        f(ColumnsTag<PackedColumns<kAligned>>{});
      }
    } else if (kAligned && sizeof(T) != sizeof(float) && p.scale_offset != 0.0f &&
               Columns<float, true>::fits(p)) {
      f(ColumnsTag<Columns<float, true>>{});
    } else {
      f(ColumnsTag<AnyColumns<kAligned>>{});
    }
  }
};

}  // namespace
}  // namespace fuselage
