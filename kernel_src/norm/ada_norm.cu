// layer_norm, ada_layer_norm, ada_rms_norm and gate_residual_ada_norm on the GPU (formulas:
// norm/ada_norm.h).
//
// Forward: norm/row_forward.h, of the operator AdaNormOp.
//
// Backward: the one of all row operators (norm/row_backward.h). Every block works on rows of one
// group, within which scale, shift and gate do not change, and keeps up to three sums of its
// columns in registers; the gradients of scale, shift, gate, weight and bias are made of these.
//
// Rows too long for either (no clusters, or beyond what eight blocks hold) are streamed: read
// several times, mostly from cache.
//
// Which thread has which columns, and so the order of every sum, does not depend on alignment: with
// kAligned every row of every tensor starts and ends on a 16-byte boundary; without, vectors are
// put together from two aligned blocks (common/vector.h).
#include "norm/ada_norm.h"

#include <type_traits>

#include "common/dispatch.h"
#include "common/quotient.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "common/vector.h"
#include "norm/ada_norm_policy.h"
#include "norm/row_backward.h"
#include "norm/row_forward.h"

namespace fuselage {
namespace {

// ---- device helpers ----

// `dim` values of T or of float32, or none.
template <typename T>
struct Values {
  const void* data;
  bool is_float32;  // where T is not

  __device__ __forceinline__ Values(const void* data_, DType dtype)
      : data(data_),
        is_float32(data_ != nullptr && sizeof(T) != sizeof(float) && dtype == DType::float32) {}
  // Those of one row.
  __device__ __forceinline__ Values(const Modulation& m, int64_t row) : Values(m.data, m.dtype) {
    if (data == nullptr) return;
    const int64_t index = m.stride == 0 ? 0 : quotient(row, m.rows);
    const int64_t size = is_float32 ? sizeof(float) : sizeof(T);
    data = static_cast<const char*>(data) + index * m.stride * size;
  }

  // N of them from `column` on; those past the end are zero.
  template <bool kAligned, int N>
  __device__ __forceinline__ void load_floats(int column, int dim, float (&values)[N]) const {
    if constexpr (!kAligned) {
      // Rows that are read again and again, from L1: by the element, which takes the fewest
      // registers.
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = column + k < dim ? at(column + k) : 0.0f;
    } else if (is_float32) {
      load<true, N>(static_cast<const float*>(data), column, dim).to_floats(values);
    } else {
      load<true, N>(static_cast<const T*>(data), column, dim).to_floats(values);
    }
  }
  // As load_floats, by whole vectors. Of aligned rows all columns are inside.
  template <bool kAligned, int N>
  __device__ __forceinline__ void load_columns_of(int column, int dim, float (&values)[N]) const {
    if (is_float32) {
      load_columns<kAligned, N>(static_cast<const float*>(data), column, dim).to_floats(values);
    } else {
      load_columns<kAligned, N>(static_cast<const T*>(data), column, dim).to_floats(values);
    }
  }
  // Whether values of this type are kept as U: T or float.
  template <typename U>
  static __device__ __forceinline__ bool is(DType dtype) {
    return sizeof(T) == sizeof(float) || (dtype == DType::float32) == (sizeof(U) == sizeof(float));
  }
  __device__ __forceinline__ float at(int64_t i) const {
    return is_float32 ? static_cast<const float*>(data)[i]
                      : to_float(static_cast<const T*>(data)[i]);
  }
};

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

// ---- forward ----

// Weight and bias take the place of scale and shift where there are neither.
struct AdaNormParams : AdaNormForward {
  float scale_offset;  // what is added to the scale
};

template <typename T, bool kResidual>
struct AdaNormOp {
  using Params = AdaNormParams;
  using In = T;
  using Out = T;
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kCentres = true;
  static constexpr bool kRest =
      sizeof(T) == sizeof(float);  // in half precision it is lost in the rounding
  static constexpr int kSums = 1, kShared = Moments<kRest>::kShared;
  static constexpr bool kWritesSum = kResidual;

  // Launch bounds: 64 registers; 80 with several inputs, or where rows are put together.
  static constexpr int threads(bool aligned, bool) {
    return aligned && !kResidual ? kForwardThreads : 768;
  }
  static constexpr int blocks(bool aligned, bool) { return aligned && !kResidual ? 2 : 1; }
  static constexpr int short_blocks(bool aligned) { return aligned && !kResidual ? 7 : 5; }
  static constexpr bool early(int vectors, bool aligned) { return aligned && vectors < 4; }

  static __device__ __forceinline__ bool centred(const Params& p) { return p.layer; }
  static __device__ __forceinline__ bool shares_columns(const Params& p) {
    return p.scale.stride == 0 && p.shift.stride == 0;
  }
  static __device__ __forceinline__ T* sum_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.new_residual) + row * p.dim;
  }
  static __device__ __forceinline__ T* out_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.out) + row * p.dim;
  }

  // s = x, or residual + gate * x, rounded. NOTE: product and sum are rounded to float32 on the
  // way, as on the CPU.
  template <int kVectors, bool kAligned>
  struct Inputs {
    RowLoading<T, kVectors, kAligned> x, residual, gate;

    // Whether the gate is loaded with x: it is of its type, and aligned.
    static __device__ __forceinline__ bool gate_is_packed(const Values<T>& gate) {
      return kAligned && gate.data != nullptr && !gate.is_float32;
    }
    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
      if constexpr (kResidual) {
        residual.start(static_cast<const T*>(p.residual) + row * p.residual_stride + column, left);
        const Values<T> values(p.gate, row);
        if (gate_is_packed(values)) gate.start(static_cast<const T*>(values.data) + column, left);
      }
    }
    __device__ __forceinline__ Vector<T, N> finish(const Params& p, int64_t row, int column,
                                                   int j) const {
      if constexpr (!kResidual) return x.finish(j);
      float a[N], b[N], gates[N];
      x.finish(j).to_floats(a);
      residual.finish(j).to_floats(b);
      const Values<T> values(p.gate, row);
#pragma unroll
      for (int k = 0; k < N; ++k) gates[k] = 1.0f;
      if (gate_is_packed(values)) {
        gate.finish(j).to_floats(gates);
      } else if (values.data != nullptr) {
        const int dim = static_cast<int>(p.dim);
        values.template load_columns_of<kAligned>(kAligned ? min(column, dim - N) : column, dim,
                                                  gates);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = __fadd_rn(b[k], __fmul_rn(gates[k], a[k]));
      return Vector<T, N>::from_floats(a);
    }
  };

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

  // NOTE: normalised as (value - mean) * rstd, and not as value * rstd - mean * rstd, which one
  // instruction would do: of a row whose elements are all alike that leaves the rounding of mean *
  // rstd, which may be any number.
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
      const float offset = kRest ? -rest * rstd : 0.0f;
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = fmaf(values[k] - mean, rstd, offset);
    }
  };

  // out = xhat * (1 + scale) + shift, or without the 1, where there are both, of type U, and
  // nothing else.
  template <typename U>
  struct Pair {
    Vector<U, N> scale, shift;
  };
  template <typename U, bool kOne>
  struct Columns {
    using Loaded = Pair<U>;
    static constexpr int kAhead = sizeof(U) == sizeof(T) ? 1 : 0;  // where their registers are few
    const U *scale, *shift;

    static __device__ __forceinline__ bool fits(const Params& p) {
      return p.weight.data == nullptr && p.bias.data == nullptr && p.scale.data != nullptr &&
             p.shift.data != nullptr && Values<T>::template is<U>(p.scale.dtype) &&
             Values<T>::template is<U>(p.shift.dtype);
    }
    __device__ __forceinline__ Columns(const Params& p, int64_t row)
        : scale(static_cast<const U*>(Values<T>(p.scale, row).data)),
          shift(static_cast<const U*>(Values<T>(p.shift, row).data)) {}
    // What is past the end is read as the last vector: cheaper than not to.
    __device__ __forceinline__ Loaded load(int column, int dim) const {
      const int inside = min(column, dim - N);
      return {Vector<U, N>::load(scale + inside), Vector<U, N>::load(shift + inside)};
    }
    __device__ __forceinline__ Vector<T, N> map(const Vector<T, N>& s, const Stats& stats,
                                                const Loaded& loaded) const {
      float values[N], factors[N], other[N];
      stats.normalise(s, values);
      loaded.scale.to_floats(factors);
      loaded.shift.to_floats(other);
#pragma unroll
      for (int k = 0; k < N; ++k)
        values[k] = fmaf(values[k], kOne ? 1.0f + factors[k] : factors[k], other[k]);
      return Vector<T, N>::from_floats(values);
    }
  };
  template <bool kAligned>
  using PackedColumns = Columns<T, true>;

  // out = (xhat * weight + bias) * (offset + scale) + shift, of any types, read where they are
  // used.
  // NOTE: spelled out, so that every kernel rounds alike.
  template <bool kAligned>
  struct AnyColumns {
    struct Loaded {
      int column, dim;
    };
    static constexpr int kAhead = 0;
    Values<T> weight, bias, scale, shift;
    float offset;

    __device__ __forceinline__ AnyColumns(const Params& p, int64_t row)
        : weight(p.weight.data, p.weight.dtype),
          bias(p.bias.data, p.bias.dtype),
          scale(p.scale, row),
          shift(p.shift, row),
          offset(p.scale_offset) {}
    __device__ __forceinline__ Loaded load(int column, int dim) const {
      return {kAligned ? min(column, dim - N) : column, dim};
    }
    __device__ __forceinline__ Vector<T, N> map(const Vector<T, N>& s, const Stats& stats,
                                                const Loaded& at) const {
      float values[N], factors[N], other[N];
      const auto load_or_zero = [&](const Values<T>& from, float(&floats)[N]) {
        if (from.data == nullptr) {
          Vector<T, N>::zero().to_floats(floats);
        } else {
          from.template load_columns_of<kAligned>(at.column, at.dim, floats);
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
    if (kAligned && PackedColumns<kAligned>::fits(p)) {
      if (p.scale_offset == 0.0f) {
        f(ColumnsTag<Columns<T, false>>{});
      } else {
        f(ColumnsTag<Columns<T, true>>{});
      }
    } else if (kAligned && sizeof(T) != sizeof(float) && p.scale_offset != 0.0f &&
               Columns<float, true>::fits(p)) {
      f(ColumnsTag<Columns<float, true>>{});
    } else {
      f(ColumnsTag<AnyColumns<kAligned>>{});
    }
  }
};

// ---- backward ----

// A row of what rows are scaled or gated with.
template <typename T>
__device__ __forceinline__ RuntimeValues<T> modulation_of(const Modulation& m, int64_t row) {
  const RuntimeValues<T> values(m.data, m.dtype);
  return m.data == nullptr ? values : values.row_at(quotient(row, m.rows) * m.stride);
}

// The gradients that are sums, of the partial sums: A, C and G of each group, or of those what is
// summed.
template <typename T>
struct AdaNormGradients {
  static constexpr int kKinds = 3;
  static constexpr int kTotals = 5;  // A, C, G, and the gradients of weight and bias
  struct Columns {
    float weight, bias;
  };
  AdaNormBackward p;

  __device__ __forceinline__ Columns load(int64_t column, bool inside) const {
    if (!inside) return {1.0f, 0.0f};
    return {RuntimeValues<T>(p.weight.data, p.weight.dtype).at_or(column, 1.0f),
            RuntimeValues<T>(p.bias.data, p.bias.dtype).at_or(column, 0.0f)};
  }
  __device__ __forceinline__ void write_scale_and_shift(const Columns& columns, int64_t row,
                                                        int64_t column, float a, float c) const {
    const int64_t i = row * p.dim + column;
    if (p.grad_shift != nullptr) store_value(p.grad_shift, p.shift_dtype, i, a);
    if (p.grad_scale != nullptr)
      store_value(p.grad_scale, p.scale.dtype, i, c * columns.weight + a * columns.bias);
  }
  __device__ __forceinline__ void group(const Columns& columns, int64_t group, int64_t column,
                                        const float (&sums)[3], float (&totals)[5]) const {
    const int64_t row = group * p.group_rows;
    if (p.sums_columns) {
      float factor = 1.0f;
      if (!p.scale_by_row && p.scale.data != nullptr) {
        const RuntimeValues<T> scale(p.scale.data, p.scale.dtype);
        factor += scale.row_at(quotient(row, p.scale.rows) * p.scale.stride).at(column);
      }
      totals[0] += sums[0];
      totals[1] += sums[1];
      totals[3] = fmaf(factor, sums[1], totals[3]);
      totals[4] = fmaf(factor, sums[0], totals[4]);
      if (!p.scale_by_row && p.scale_rows < p.rows)
        write_scale_and_shift(columns, quotient(row, p.scale_rows), column, sums[0], sums[1]);
    }
    if (p.sums_gate) {
      const float of_gate = p.sums_columns ? sums[2] : sums[0];
      totals[2] += of_gate;
      if (p.gate_rows < p.rows)
        store_value(p.grad_gate, p.gate.dtype, quotient(row, p.gate_rows) * p.dim + column,
                    of_gate);
    }
  }
  // What belongs to all groups.
  __device__ __forceinline__ void all(const Columns& columns, int64_t column,
                                      const float (&totals)[5]) const {
    if (p.sums_columns && !p.scale_by_row && p.scale_rows == p.rows)
      write_scale_and_shift(columns, 0, column, totals[0], totals[1]);
    if (p.sums_gate && p.gate_rows == p.rows)
      store_value(p.grad_gate, p.gate.dtype, column, totals[2]);
    if (p.grad_weight != nullptr) store_value(p.grad_weight, p.weight.dtype, column, totals[3]);
    if (p.grad_bias != nullptr) store_value(p.grad_bias, p.bias_dtype, column, totals[4]);
  }
};

// What the backward of a row is (norm/row_backward.h). kResidual: there may be grad_new_residual,
// grad_residual and a gate; kByRow: there may be a scale or a gate for every row.
//
// The sums of columns are A, C and G (norm/ada_norm.h). Two take 64 registers with 32 columns a
// thread; three leave room for 16 columns, and for a few more threads to hide latency.
template <typename T, bool kResidual, bool kByRow>
struct AdaNormBackwardOp {
  using Params = AdaNormBackward;
  using Element = T;
  using GradOut = T;
  static constexpr int kTensors = kResidual ? 4 : 2, kOutputs = kResidual ? 2 : 1;
  static constexpr int kStatistics = 2, kRowSums = 2, kColumnSums = kResidual ? 3 : 2;
  static constexpr int kThreads = ada_norm_backward_threads(kResidual && !kByRow);
  static constexpr int kColumns = ada_norm_backward_columns(kResidual);
  static constexpr bool kFullStages = false;
  static constexpr bool kFactorsInShared = true, kShortRows = !kResidual, kBulk = !kByRow;
  using Values = RuntimeValues<T>;

  static __device__ __forceinline__ bool factors_by_row(const Params& p) {
    return kByRow && p.scale_by_row;
  }

  // weight * (1 + scale) of N columns.
  template <int N, bool kAligned>
  struct FactorLoading {
    RuntimeLoading<T, N, kAligned> weight, scale;

    static __device__ __forceinline__ Values weight_of(const Params& p) {
      return Values(p.weight.data, p.weight.dtype);
    }
    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int dim) {
      weight.start(weight_of(p), column, dim);
      scale.start(modulation_of<T>(p.scale, row), column, dim);
    }
    __device__ __forceinline__ void finish(const Params& p, int64_t row, int column, int dim,
                                           float (&factors)[N]) const {
      float weights[N];
      scale.finish(modulation_of<T>(p.scale, row), column, dim, 0.0f, factors);
      weight.finish(weight_of(p), column, dim, 1.0f, weights);
#pragma unroll
      for (int k = 0; k < N; ++k) factors[k] = (1.0f + factors[k]) * weights[k];
    }
  };

  static __device__ __forceinline__ Normalise normalised(const RowMoments& moments) {
    return Normalise(moments.mean, 0.0f, moments.rstd);
  }

  // g and g * xhat.
  template <int N>
  static __device__ __forceinline__ void terms(const float (&grad_out)[N],
                                               const float (&factors)[N], const float (&s)[N],
                                               const RowMoments& moments, float (&sums)[2]) {
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float g = grad_out[k] * factors[k];
      sum += g;
      dot = fmaf(g, normalised(moments)(s[k]), dot);
    }
    sums[0] += sum;
    sums[1] += dot;
  }

  // grad_s = rstd * (g - mean(g) - xhat * mean(g * xhat))
  struct Coefficients {
    float rstd, of_xhat, constant;
    __device__ __forceinline__ Coefficients(float rstd_, const float2& pair)
        : rstd(rstd_), of_xhat(pair.x), constant(pair.y) {}
    __device__ __forceinline__ float2 pair() const { return make_float2(of_xhat, constant); }
    __device__ __forceinline__ float grad_s(float g, float xhat) const {
      return fmaf(g, rstd, fmaf(xhat, of_xhat, constant));
    }
  };
  static __device__ __forceinline__ Coefficients coefficients(const Params& p,
                                                              const float (&sums)[2],
                                                              const RowMoments& moments,
                                                              const RowBackward& launch) {
    const float dim = static_cast<float>(launch.dim);
    const float of_xhat = -moments.rstd * (sums[1] / dim);
    return {moments.rstd, make_float2(of_xhat, p.layer ? -moments.rstd * (sums[0] / dim) : 0.0f)};
  }

  // Every row has its own scale and shift: writes their gradients, and a = grad_out * (1 + scale).
  template <bool kAligned, int N>
  static __device__ __forceinline__ void write_row_gradients(const Params& p, int64_t row,
                                                             int column, const float (&grad_out)[N],
                                                             const float (&xhat)[N],
                                                             float (&a)[N]) {
    const int dim = static_cast<int>(p.dim);
    if (p.grad_scale != nullptr) {
      float y[N], bias[N];
      load_values<kAligned>(Values(p.weight.data, p.weight.dtype), column, dim, 1.0f, y);
      load_values<kAligned>(Values(p.bias.data, p.bias.dtype), column, dim, 0.0f, bias);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = grad_out[k] * (xhat[k] * y[k] + bias[k]);
      store_values<kAligned, T>(p.grad_scale, p.scale.dtype, row * p.dim, y, column, dim);
    }
    if (p.grad_shift != nullptr)
      store_values<kAligned, T>(p.grad_shift, p.shift_dtype, row * p.dim, grad_out, column, dim);
    load_values<kAligned>(modulation_of<T>(p.scale, row), column, dim, 0.0f, a);
#pragma unroll
    for (int k = 0; k < N; ++k) a[k] = grad_out[k] * (1.0f + a[k]);
  }

  template <bool kAligned, int N, typename Read, typename Store>
  static __device__ __forceinline__ void gradients(const Params& p, const RowBackward& launch,
                                                   int64_t row, int column,
                                                   const float (&factors)[N], float (&grad_out)[N],
                                                   float (&s)[N], const RowMoments& moments,
                                                   const Coefficients& coefficients,
                                                   const Read& read, const Store& store,
                                                   float (&sums)[kColumnSums][N]) {
    const int dim = static_cast<int>(p.dim);
    float a[N], grad[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      s[k] = normalised(moments)(s[k]);
      a[k] = grad_out[k];
    }
    if (kByRow && p.scale_by_row) write_row_gradients<kAligned>(p, row, column, grad_out, s, a);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sums[0][k] += a[k];
      sums[1][k] = fmaf(a[k], s[k], sums[1][k]);
      grad[k] = coefficients.grad_s(grad_out[k] * factors[k], s[k]);
    }
    if (!launch.needs_rows) return;
    if constexpr (kResidual) {
      if (launch.extra > 0) {
        read(launch.extra, a);
#pragma unroll
        for (int k = 0; k < N; ++k) grad[k] += a[k];
      }
      if (p.grad_gate != nullptr) {
        read(launch.tensors.count - 1, a);  // x
        if (kByRow && p.gate_by_row) {
#pragma unroll
          for (int k = 0; k < N; ++k) a[k] *= grad[k];
          store_values<kAligned, T>(p.grad_gate, p.gate.dtype, row * p.dim, a, column, dim);
        } else {
#pragma unroll
          for (int k = 0; k < N; ++k) sums[2][k] = fmaf(grad[k], a[k], sums[2][k]);
        }
      }
      if (p.grad_residual != nullptr) store(1, p.grad_residual, grad);
      if (p.grad_x != nullptr && p.gate.data != nullptr) {
        load_values<kAligned>(modulation_of<T>(p.gate, row), column, dim, 1.0f, a);
#pragma unroll
        for (int k = 0; k < N; ++k) grad[k] *= a[k];
      }
    }
    if (p.grad_x != nullptr) store(0, p.grad_x, grad);
  }

  template <bool kAligned, int N>
  static __device__ __forceinline__ void column_terms(const Params& p, const RowBackward& launch,
                                                      int64_t row, int column,
                                                      const float (&grad_out)[N],
                                                      const float (&s)[N],
                                                      const RowMoments& moments,
                                                      float (&sums)[kColumnSums][N]) {
    const int dim = static_cast<int>(p.dim);
    const bool lost = may_be_unused(launch, moments);
    float scale[N];
    load_values<kAligned>(modulation_of<T>(p.scale, row), column, dim, 0.0f, scale);
    float xhat[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      xhat[k] = lost && grad_out[k] == 0.0f ? 0.0f : normalised(moments)(s[k]);
      const float a = kByRow && p.scale_by_row ? grad_out[k] * (1.0f + scale[k]) : grad_out[k];
      sums[0][k] += a;
      sums[1][k] = fmaf(a, xhat[k], sums[1][k]);
    }
    if constexpr (kResidual) {
      if (!p.sums_gate) return;
      float grad[N], other[N];
      load_values<kAligned>(Values(p.weight.data, p.weight.dtype), column, dim, 1.0f, other);
      // Of a row that is not used nothing comes but the gradient of the sum.
      const Coefficients coefficients(moments.rstd, launch.means[row]);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        grad[k] = coefficients.grad_s(grad_out[k] * (1.0f + scale[k]) * other[k], xhat[k]);
        if (lost && grad_out[k] == 0.0f) grad[k] = coefficients.of_xhat;
      }
      if (launch.extra > 0) {
        load<kAligned, N>(launch.tensors.row<T>(launch.extra, row, 0), column, dim)
            .to_floats(other);
#pragma unroll
        for (int k = 0; k < N; ++k) grad[k] += other[k];
      }
      load<kAligned, N>(launch.tensors.row<T>(launch.tensors.count - 1, row, 0), column, dim)
          .to_floats(other);
#pragma unroll
      for (int k = 0; k < N; ++k) sums[2][k] = fmaf(grad[k], other[k], sums[2][k]);
    }
  }

  static __device__ __forceinline__ int kind(const Params& p, int i) {
    if (i < 2) return p.sums_columns ? i : -1;
    return p.sums_gate ? p.partial_rows - 1 : -1;
  }
  static __host__ __device__ __forceinline__ AdaNormGradients<T> finish(const Params& p) {
    return {p};
  }
  static __device__ __forceinline__ void* output(const Params& p, int i) {
    return i == 0 ? p.grad_x : p.grad_residual;
  }
};

// ---- launchers ----

RowBackward ada_norm_backward_launch(const AdaNormBackward& p, const RowBackwardShape& shape) {
  RowBackward launch{};
  RowTensors& tensors = launch.tensors;
  const auto add = [&](const void* data, int64_t stride) {
    tensors.data[tensors.count] = data;
    tensors.stride[tensors.count++] = stride;
  };
  add(p.grad_out, p.grad_out_stride);
  add(p.s, p.s_stride);
  if (p.grad_new_residual != nullptr) {
    launch.extra = tensors.count;
    add(p.grad_new_residual, p.grad_new_residual_stride);
  }
  if (p.x != nullptr) add(p.x, p.x_stride);
  launch.statistics = p.statistics;
  launch.statistics_size = p.layer ? 2 : 1;
  launch.needs_rows = p.grad_x != nullptr || p.grad_residual != nullptr || p.grad_gate != nullptr;
  launch.partials = p.partials;
  launch.partial_kinds = p.partial_rows;
  // Streamed rows leave what the sums of the gate need of them after the partial sums, as pairs.
  if (p.partials != nullptr) {
    launch.means =
        reinterpret_cast<float2*>(p.partials) + ceil_div(ada_norm_backward_sums(p, shape), 2);
  }
  return launch;
}

}  // namespace

namespace gpu {

const char* ada_norm_forward(const AdaNormForward& given, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  AdaNormParams p{given, 1.0f};
  if (p.scale.data == nullptr && p.shift.data == nullptr) {
    p.scale = {p.weight.data, 0, 1, p.weight.dtype};
    p.shift = {p.bias.data, 0, 1, p.bias.dtype};
    p.weight.data = p.bias.data = nullptr;
    if (p.scale.data != nullptr) p.scale_offset = 0.0f;
  }
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_bool(p.residual != nullptr, [&](auto residual) {
      return with_bool(is_aligned(p), [&](auto aligned) {
        const RowPolicy policy = ada_norm_forward_policy(device_info(device), aligned, p);
        return launch_row_forward<AdaNormOp<T, residual>, aligned>(p, policy, stream);
      });
    });
  }));
}

int64_t ada_norm_backward_workspace(AdaNormBackward& p, int device) {
  const RowBackwardShape shape = ada_norm_backward_shape(p);
  const RowBackwardPolicy policy = row_backward_policy(device_info(device), shape);
  p.blocks_per_group = policy.blocks_per_group;
  if (p.partial_rows == 0) return 0;
  const int64_t sums = ada_norm_backward_sums(p, shape);
  return policy.row.streamed ? 2 * (ceil_div(sums, 2) + p.rows) : sums;
}

const char* ada_norm_backward(const AdaNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const RowBackwardShape shape = ada_norm_backward_shape(p);
  const RowBackwardPolicy policy = row_backward_policy(device_info(device), shape);
  RowBackward launch = ada_norm_backward_launch(p, shape);
  if (!policy.row.streamed) launch.means = nullptr;
  if (policy.row.streamed && p.scale_by_row) launch.needs_rows = true;  // it writes their gradients
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.scale_by_row || p.gate_by_row)
      return row_backward<AdaNormBackwardOp<T, true, true>>(p, launch, shape, policy, stream);
    if (ada_norm_has_residual(p))
      return row_backward<AdaNormBackwardOp<T, true, false>>(p, launch, shape, policy, stream);
    return row_backward<AdaNormBackwardOp<T, false, false>>(p, launch, shape, policy, stream);
  }));
}

}  // namespace gpu
}  // namespace fuselage
