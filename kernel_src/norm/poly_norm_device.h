// What the forward and the backward of the poly_norm operators share on the GPU.
#pragma once

#include "common/reduce.h"
#include "common/row_vectors.h"
#include "common/runtime_dtype.h"
#include "common/vector.h"
#include "norm/poly_norm.h"

namespace fuselage {
namespace {

enum class Form { plain, mul, grouped };

constexpr bool has_mul(Form form) { return form != Form::plain; }

// The weights and the bias of one expert.
struct Factors {
  float weight[3], bias;
};

template <typename T, typename Params>
__device__ __forceinline__ Factors load_factors(const Params& p, int64_t expert) {
  Factors factors;
#pragma unroll
  for (int k = 0; k < 3; ++k)
    factors.weight[k] = RuntimeValues<T>(p.weight, p.weight_dtype).at(3 * expert + k);
  factors.bias = RuntimeValues<T>(p.bias, p.bias_dtype).at(expert);
  return factors;
}

// The expert whose rows `row` is among: the first with a later end. p.experts for a row of padding.
template <typename Params>
__device__ __forceinline__ int expert_of(const Params& p, int64_t row) {
  int begin = 0, end = static_cast<int>(p.experts);
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (p.offs[middle] > row) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

// The rows that belong to an expert: padding after them is not read.
template <Form kForm, typename Params>
__device__ __forceinline__ int64_t rows_to_read(const Params& p) {
  if constexpr (kForm != Form::grouped) return p.rows;
  return min(p.rows, static_cast<int64_t>(p.offs[p.experts - 1]));
}

// The factors of a thread's rows. With experts it has one row.
template <typename T, Form kForm>
struct RowFactors {
  Factors factors;
  bool is_padding = false;

  // Called before the rows are loaded: these loads would wait for them.
  template <typename Params>
  __device__ __forceinline__ void load_common(const Params& p) {
    if constexpr (kForm != Form::grouped) factors = load_factors<T>(p, 0);
  }
  // Called after: this takes long, and the row is on its way meanwhile.
  template <typename Params>
  __device__ __forceinline__ void load_of_row(const Params& p, int64_t row) {
    if constexpr (kForm == Form::grouped) {
      const int expert = expert_of(p, row);
      is_padding = expert >= p.experts;
      factors = is_padding ? Factors{} : load_factors<T>(p, expert);
    }
  }
};

// Cuts values to [-limit, limit]; a NaN stays one.
template <int N>
__device__ __forceinline__ void clamp_all(float (&values)[N], float limit) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    values[k] = values[k] > limit ? limit : values[k];
    values[k] = values[k] < -limit ? -limit : values[k];
  }
}

// A gradient is zero where the value it belongs to was cut.
template <int N>
__device__ __forceinline__ void zero_clamped(float (&grads)[N], const float (&values)[N],
                                             float limit) {
#pragma unroll
  for (int k = 0; k < N; ++k) grads[k] = fabsf(values[k]) <= limit ? grads[k] : 0.0f;
}

template <Form kForm, typename Params>
__device__ __forceinline__ bool clamps(const Params& p) {
  return kForm == Form::grouped && p.hidden_clamp < __int_as_float(0x7f800000);
}

// NOTE: the arithmetic below is spelled out in fused multiply-adds, so that no two kernels round
// differently.

// Adds up x^6, x^4 and x^2: those of a vector by themselves, which keeps the sum accurate.
template <int N>
__device__ __forceinline__ void add_moments(const float (&x)[N], float (&sums)[3]) {
  float part[3] = {};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float square = x[k] * x[k], cube = square * x[k];
    part[0] = fmaf(cube, cube, part[0]);
    part[1] = fmaf(square, square, part[1]);
    part[2] = fmaf(x[k], x[k], part[2]);
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) sums[k] += part[k];
}

// Adds up g x^3, g x^2, g x and g, where g = grad * mul.
template <int N>
__device__ __forceinline__ void add_products(const float (&grad)[N], const float (&x)[N],
                                             float* sums) {
  float part[4] = {};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float linear = grad[k] * x[k], square = linear * x[k];
    part[0] = fmaf(square, x[k], part[0]);
    part[1] = fmaf(linear, x[k], part[1]);
    part[2] = fmaf(grad[k], x[k], part[2]);
    part[3] += grad[k];
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) sums[k] += part[k];
}

// y of a row is a polynomial of x.
struct Polynomial {
  float of_cube, of_square, of_line, bias;

  __device__ __forceinline__ Polynomial(const Factors& factors, const float (&rstd)[3])
      : of_cube(factors.weight[0] * rstd[0]),
        of_square(factors.weight[1] * rstd[1]),
        of_line(factors.weight[2] * rstd[2]),
        bias(factors.bias) {}
  __device__ __forceinline__ float operator()(float x) const {
    return fmaf(fmaf(fmaf(of_cube, x, of_square), x, of_line), x, bias);
  }
  // That of another lane.
  __device__ __forceinline__ Polynomial from(int lane, int width) const {
    Polynomial y = *this;
    y.of_cube = shuffle_from(of_cube, lane, width);
    y.of_square = shuffle_from(of_square, lane, width);
    y.of_line = shuffle_from(of_line, lane, width);
    return y;
  }
};

// The derivative of y, which is a polynomial of x, and of what goes through the means of its row.
struct Derivative {
  float direct[3], through_means[3];

  __device__ __forceinline__ explicit Derivative(const Polynomial& y) {
    direct[0] = 3.0f * y.of_cube;
    direct[1] = 2.0f * y.of_square;
    direct[2] = y.of_line;
  }
  __device__ __forceinline__ Derivative(const Polynomial& y, const float (&rstd)[3],
                                        const float (&sums)[4], float dim)
      : Derivative(y) {
    // In this order no product leaves the range of float32 before x^6 does.
#pragma unroll
    for (int k = 0; k < 3; ++k) through_means[k] = direct[k] * (sums[k] * rstd[k] / dim * rstd[k]);
  }
  // That of another lane, whose polynomial is `y`.
  __device__ __forceinline__ Derivative from(const Polynomial& y, int lane, int width) const {
    Derivative derivative(y);
#pragma unroll
    for (int k = 0; k < 3; ++k)
      derivative.through_means[k] = shuffle_from(through_means[k], lane, width);
    return derivative;
  }
  __device__ __forceinline__ float grad_x(float g, float x) const {
    const float square = x * x;
    const float slope = fmaf(fmaf(direct[0], x, direct[1]), x, direct[2]);
    const float means =
        fmaf(fmaf(through_means[0], square, through_means[1]), square, through_means[2]);
    return fmaf(g, slope, -(x * means));
  }
};

__device__ __forceinline__ void rstd_of(const float (&sums)[3], float dim, float eps,
                                        float (&rstd)[3]) {
#pragma unroll
  for (int k = 0; k < 3; ++k) rstd[k] = reciprocal_sqrt(sums[k] / dim + eps);
}

// x, and mul if there is one, as the formula takes them.
template <Form kForm, typename T, int N>
__device__ __forceinline__ void cut_floats(const Vector<T, N>& vector, bool clamps, float limit,
                                           float (&values)[N]) {
  vector.to_floats(values);
  if constexpr (kForm == Form::grouped) {
    if (clamps) clamp_all(values, limit);
  }
}

// Vectors of a row on their way together: what a thread of a streamed kernel has from `column` on,
// each `step` columns after the one before it. Zero where there is no row: kReads.
template <typename T, int N, int kBatch, bool kReads = true>
struct BatchLoading {
  Loading<T, N, false> loading[kBatch];
  const T* row;
  int column, step, dim;

  __device__ __forceinline__ BatchLoading(const T* row_, int column_, int step_, int dim_)
      : row(row_), column(column_), step(step_), dim(dim_) {
    if constexpr (kReads) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) loading[b].start(row, column_of(b), dim);
    }
  }
  __device__ __forceinline__ int column_of(int b) const { return column + b * step; }
  __device__ __forceinline__ Vector<T, N> finish(int b) const {
    if constexpr (!kReads) return Vector<T, N>::zero();
    return loading[b].finish(row, column_of(b), dim);
  }
};

}  // namespace
}  // namespace fuselage
