// The backward of the adaptive norms as operators of norm/row_backward.h.
#pragma once

#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "common/vector.h"
#include "norm/ada_norm_device.h"
#include "norm/ada_norm_policy.h"
#include "norm/row_backward.h"

namespace fuselage {
namespace {

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
      if (!p.scale_by_row && p.scale_rows.value < p.rows)
        write_scale_and_shift(columns, quotient(row, p.scale_rows), column, sums[0], sums[1]);
    }
    if (p.sums_gate) {
      const float of_gate = p.sums_columns ? sums[2] : sums[0];
      totals[2] += of_gate;
      if (p.gate_rows.value < p.rows)
        store_value(p.grad_gate, p.gate.dtype, quotient(row, p.gate_rows) * p.dim + column,
                    of_gate);
    }
  }
  // What belongs to all groups: scale and shift, or the gate, may be one for all rows.
  __host__ __device__ bool has_one_scale() const {
    return p.sums_columns && !p.scale_by_row && p.scale_rows.value == p.rows;
  }
  __host__ __device__ bool has_one_gate() const {
    return p.sums_gate && p.gate_rows.value == p.rows;
  }
  bool needs_all() const {
    return has_one_scale() || has_one_gate() || p.grad_weight != nullptr || p.grad_bias != nullptr;
  }
  __device__ __forceinline__ void all(const Columns& columns, int64_t column,
                                      const float (&totals)[5]) const {
    if (has_one_scale()) write_scale_and_shift(columns, 0, column, totals[0], totals[1]);
    if (has_one_gate()) store_value(p.grad_gate, p.gate.dtype, column, totals[2]);
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
  static constexpr int kStatistics = 2, kRowSums = 2, kNormSums = 2;
  static constexpr int kColumnSums = kResidual ? 3 : 2;
  static constexpr int kThreads = ada_norm_backward_threads(kResidual && !kByRow);
  static constexpr int kColumns = ada_norm_backward_columns(kResidual);
  static constexpr bool kFullStages = false;
  static constexpr int kSharedFactors = kResidual && !kByRow ? 2 : 1;  // the second is the gate
  static constexpr bool kShortRows = !kResidual, kBulk = !kByRow, kColumnTerms = true;
  static constexpr int kLeastVectors = kAdaNormLeastVectors;
  static constexpr bool kSpreadRows = true;
  using Values = RuntimeValues<T>;

  static __device__ __forceinline__ bool factors_by_row(const Params& p) {
    return kByRow && p.scale_by_row;
  }
  static __device__ __forceinline__ int factors(const Params& p) {
    return kSharedFactors > 1 && p.gate.data != nullptr ? 2 : 1;
  }

  // weight * (1 + scale) of N columns, and the gate.
  template <int N, bool kAligned>
  struct FactorLoading {
    RuntimeLoading<T, N, kAligned> weight, scale, gate;

    static __device__ __forceinline__ Values weight_of(const Params& p) {
      return Values(p.weight.data, p.weight.dtype);
    }
    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int dim) {
      weight.start(weight_of(p), column, dim);
      scale.start(modulation_of<T>(p.scale, row), column, dim);
      if (kSharedFactors > 1) gate.start(modulation_of<T>(p.gate, row), column, dim);
    }
    __device__ __forceinline__ void finish(const Params& p, int64_t row, int column, int dim,
                                           int kind, float (&factors)[N]) const {
      if (kind > 0) {
        gate.finish(modulation_of<T>(p.gate, row), column, dim, 1.0f, factors);
        return;
      }
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
  template <int N, typename Read, typename More>
  static __device__ __forceinline__ void terms(const RowBackward&, const float (&grad_out)[N],
                                               const float (&factors)[N], const float (&s)[N],
                                               const RowMoments& moments, const Read&, const More&,
                                               float (&sums)[2]) {
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

  template <bool kAligned, int N, typename Read, typename More, typename Store>
  static __device__ __forceinline__ void gradients(
      const Params& p, const RowBackward& launch, int64_t row, int column,
      const float (&factors)[N], float (&grad_out)[N], float (&s)[N], const RowMoments& moments,
      const Coefficients& coefficients, const Read& read, const More& more, const Store& store,
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
        if constexpr (kSharedFactors > 1) {
          more(1, a);
        } else {
          load_values<kAligned>(modulation_of<T>(p.gate, row), column, dim, 1.0f, a);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) grad[k] *= a[k];
      }
    }
    if (p.grad_x != nullptr) store(0, p.grad_x, grad);
  }

  template <bool kAligned, bool kStreamed, int N>
  static __device__ __forceinline__ void column_terms(const Params& p, const RowBackward& launch,
                                                      int64_t row, int column,
                                                      const float (&grad_out)[N],
                                                      const float (&s)[N],
                                                      const RowMoments& moments, bool unused,
                                                      float (&sums)[kColumnSums][N]) {
    const int dim = static_cast<int>(p.dim);
    float scale[N];
    load_values<kAligned>(modulation_of<T>(p.scale, row), column, dim, 0.0f, scale);
    float xhat[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      xhat[k] = unused ? 0.0f : normalised(moments)(s[k]);
      const float a = kByRow && p.scale_by_row ? grad_out[k] * (1.0f + scale[k]) : grad_out[k];
      sums[0][k] += a;
      sums[1][k] = fmaf(a, xhat[k], sums[1][k]);
    }
    if constexpr (kResidual && kStreamed) {
      if (!p.sums_gate) return;
      float grad[N], other[N];
      load_values<kAligned>(Values(p.weight.data, p.weight.dtype), column, dim, 1.0f, other);
      // Of a row that is not used nothing comes but the gradient of the sum.
      const Coefficients coefficients(moments.rstd, launch.means[row]);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        grad[k] = coefficients.grad_s(grad_out[k] * (1.0f + scale[k]) * other[k], xhat[k]);
        if (unused) grad[k] = 0.0f;
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

}  // namespace
}  // namespace fuselage
