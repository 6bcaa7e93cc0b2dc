// The three norms whose columns are spread over ranks, as the kernels of norm/shard_norm.cu take
// them: what is summed over a row, and what is made of the sums.
#pragma once

#include "common/reduce.h"
#include "common/runtime_dtype.h"
#include "common/vector.h"
#include "norm/ada_norm_device.h"
#include "norm/poly_norm_device.h"
#include "norm/shard_norm.h"
#include "norm/shard_norm_math.h"

namespace fuselage {
namespace {

// Where g is zero, so is the product, whatever the row holds: is_zero of common/vector.h.
__device__ __forceinline__ float product(float g, float value) {
  return g == 0.0f ? 0.0f : g * value;
}

// The floats of a row that each rank gave.
struct ShardGathered {
  const float* values;
  int64_t rank_stride;

  __device__ __forceinline__ ShardGathered(const ShardNorm& p, int64_t row)
      : values(p.gathered + row * shard_sum_count(p.kind, p.backward)),
        rank_stride(p.rows * shard_sum_count(p.kind, p.backward)) {}
  template <int kCount>
  __device__ __forceinline__ void totals(const ShardNorm& p, float (&sums)[kCount]) const {
    shard_totals(values, rank_stride, p.ranks, sums);
  }
};

__device__ __forceinline__ float total_dim(const ShardNorm& p) {
  return static_cast<float>(static_cast<int>(p.total_dim));
}

// N values of the weight with its offset from `column` on.
template <typename T, int N>
__device__ __forceinline__ void load_weight(const ShardNorm& p, int column, float (&floats)[N]) {
  const int dim = static_cast<int>(p.dim);
  load_values<false>(RuntimeValues<T>(p.weight, p.weight_dtype), column, dim, 0.0f, floats);
#pragma unroll
  for (int k = 0; k < N; ++k) floats[k] += p.weight_offset;
}

// Rms norm and layer norm: the former has a mean of zero, and no bias. They share kernels.
template <typename T>
struct ShardLinearOp {
  using Element = T;
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kMul = false, kAnyOut = true;  // out may be float32
  static constexpr int kSums = 2, kBackwardSums = 2;   // of rms norm, the second

  static __device__ __forceinline__ bool is_layer(const ShardNorm& p) {
    return p.kind == ShardNormKind::layer;
  }

  // The index of a row's last float where layer norm has two a row, and rms norm one.
  static __device__ __forceinline__ int64_t last_of(const ShardNorm& p, int64_t row) {
    return is_layer(p) ? 2 * row + 1 : row;
  }

  struct Statistics {
    float mean = 0.0f, rest = 0.0f, rstd;

    __device__ __forceinline__ float xhat(float value) const {
      return Normalise(mean, rest, rstd)(value);
    }
  };

  // Deviations from `mean`, and their squares.
  static __device__ __forceinline__ void add(const float (&s)[N], float mean, int inside,
                                             float (&sums)[kSums]) {
    float rest = 0.0f, squares = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float d = k < inside ? s[k] - mean : 0.0f;
      rest += d;
      squares = fmaf(d, d, squares);
    }
    sums[0] += rest;
    sums[1] += squares;
  }
  static __device__ __forceinline__ void give(const ShardNorm& p, int64_t row, float mean,
                                              const float (&sums)[kSums]) {
    if (!is_layer(p)) {
      p.sums[row] = sums[1];
      return;
    }
    const float rest = sums[0] / static_cast<float>(static_cast<int>(p.dim));
    const float squares = sums[1] - rest * sums[0];
    p.sums[3 * row] = mean;
    p.sums[3 * row + 1] = rest;
    p.sums[3 * row + 2] = squares < 0.0f ? 0.0f : squares;  // and a NaN stays one
  }

  // Of the gathered sums; `saves`: by this thread.
  static __device__ __forceinline__ Statistics merged(const ShardNorm& p, int64_t row, bool saves) {
    const ShardGathered gathered(p, row);
    Statistics found;
    float variance;
    if (is_layer(p)) {
      const ShardMoments moments = merge_shard_moments(gathered.values, gathered.rank_stride,
                                                       p.ranks, p.total_dim, p.rank_dim);
      found.mean = moments.mean;
      found.rest = moments.rest;
      variance = moments.variance;
    } else {
      float total[1];
      gathered.totals(p, total);
      variance = total[0] / total_dim(p);
    }
    found.rstd = reciprocal_sqrt(variance + p.eps);
    if (saves) {
      if (is_layer(p)) p.saved[2 * row] = found.mean + found.rest;
      p.saved[last_of(p, row)] = found.rstd;
    }
    return found;
  }
  static __device__ __forceinline__ Statistics saved(const ShardNorm& p, int64_t row) {
    Statistics found;
    if (is_layer(p)) found.mean = p.statistics[2 * row];
    const float rstd = p.statistics[last_of(p, row)];
    // Of a row that overflowed NaN, which is in every product but with zero.
    found.rstd = rstd > 0.0f ? rstd : __uint_as_float(0x7fc00000u);
    return found;
  }

  static __device__ __forceinline__ void map(const ShardNorm& p, const Statistics& statistics,
                                             int column, const float (&)[N], float (&values)[N]) {
    float factors[N];
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = statistics.xhat(values[k]);
    if (p.cast_before_weight) round_all<T>(values);
    if (p.weight != nullptr) {
      load_weight<T>(p, column, factors);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = __fmul_rn(values[k], factors[k]);
    }
    if (p.bias == nullptr) return;
    const int dim = static_cast<int>(p.dim);
    load_values<false>(RuntimeValues<T>(p.bias, p.bias_dtype), column, dim, 0.0f, factors);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = __fadd_rn(values[k], factors[k]);
  }

  // The gradient of xhat.
  static __device__ __forceinline__ void weigh(const ShardNorm& p, int column, const float (&)[N],
                                               float (&grad)[N]) {
    if (p.weight == nullptr) return;
    float factors[N];
    load_weight<T>(p, column, factors);
#pragma unroll
    for (int k = 0; k < N; ++k) grad[k] *= factors[k];
  }
  static __device__ __forceinline__ void add_gradient(const Statistics& statistics,
                                                      const float (&g)[N], const float (&x)[N],
                                                      float (&sums)[kBackwardSums]) {
    float of_g = 0.0f, of_product = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      of_g += g[k];
      of_product += product(g[k], statistics.xhat(x[k]));
    }
    sums[0] += of_g;
    sums[1] += of_product;
  }
  static __device__ __forceinline__ void give_gradient(const ShardNorm& p, int64_t row,
                                                       const float (&sums)[kBackwardSums]) {
    if (is_layer(p)) p.sums[2 * row] = sums[0];
    p.sums[last_of(p, row)] = sums[1];
  }
  struct Means {
    float g = 0.0f, product;

    __device__ __forceinline__ Means(const ShardNorm& p, int64_t row, const Statistics&) {
      const ShardGathered gathered(p, row);
      if (is_layer(p)) {
        float sums[2];
        gathered.totals(p, sums);
        g = sums[0] / total_dim(p);
        product = sums[1] / total_dim(p);
      } else {
        float sum[1];
        gathered.totals(p, sum);
        product = sum[0] / total_dim(p);
      }
    }
  };
  static __device__ __forceinline__ float gradient(const Statistics& statistics, const Means& means,
                                                   float g, float x) {
    const float through =
        means.product == 0.0f ? 0.0f : __fmul_rn(statistics.xhat(x), means.product);
    return product(g - means.g - through, statistics.rstd);
  }
};

template <typename T>
struct ShardPolyOp {
  using Element = T;
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kMul = true, kAnyOut = false;
  static constexpr int kSums = 3, kBackwardSums = 3;

  struct Statistics {
    float rstd[3];
    Polynomial y;
  };

  static __device__ __forceinline__ bool is_layer(const ShardNorm&) { return false; }
  static __device__ __forceinline__ void add(const float (&x)[N], float, int,
                                             float (&sums)[kSums]) {
    add_moments(x, sums);
  }
  static __device__ __forceinline__ void give(const ShardNorm& p, int64_t row, float,
                                              const float (&sums)[kSums]) {
#pragma unroll
    for (int k = 0; k < 3; ++k) p.sums[3 * row + k] = sums[k];
  }
  static __device__ __forceinline__ Statistics of(const ShardNorm& p, const float (&rstd)[3]) {
    return {{rstd[0], rstd[1], rstd[2]}, Polynomial(load_factors<T>(p, 0), rstd)};
  }
  static __device__ __forceinline__ Statistics merged(const ShardNorm& p, int64_t row, bool saves) {
    const ShardGathered gathered(p, row);
    float sums[3], rstd[3];
    gathered.totals(p, sums);
    rstd_of(sums, total_dim(p), p.eps, rstd);
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (saves) p.saved[3 * row + k] = rstd[k];
    }
    return of(p, rstd);
  }
  static __device__ __forceinline__ Statistics saved(const ShardNorm& p, int64_t row) {
    const float* rstd = p.statistics + 3 * row;
    return of(p, {rstd[0], rstd[1], rstd[2]});
  }

  static __device__ __forceinline__ void map(const ShardNorm& p, const Statistics& statistics, int,
                                             const float (&mul)[N], float (&values)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      values[k] = statistics.y(values[k]);
      if (p.mul != nullptr) values[k] *= mul[k];
    }
  }
  static __device__ __forceinline__ void weigh(const ShardNorm& p, int, const float (&mul)[N],
                                               float (&grad)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (p.mul != nullptr) grad[k] *= mul[k];
    }
  }
  static __device__ __forceinline__ void add_gradient(const Statistics&, const float (&g)[N],
                                                      const float (&x)[N],
                                                      float (&sums)[kBackwardSums]) {
    float products[4] = {};
    add_products(g, x, products);  // the fourth is the bias's
#pragma unroll
    for (int k = 0; k < 3; ++k) sums[k] += products[k];
  }
  static __device__ __forceinline__ void give_gradient(const ShardNorm& p, int64_t row,
                                                       const float (&sums)[kBackwardSums]) {
#pragma unroll
    for (int k = 0; k < 3; ++k) p.sums[3 * row + k] = sums[k];
  }
  struct Means {
    Derivative derivative;

    __device__ __forceinline__ Means(const ShardNorm& p, int64_t row, const Statistics& statistics)
        : Means(statistics, totals(p, row), total_dim(p)) {}

   private:
    struct Totals {
      float sums[4];
    };
    static __device__ __forceinline__ Totals totals(const ShardNorm& p, int64_t row) {
      float sums[3];
      ShardGathered(p, row).totals(p, sums);
      return {{sums[0], sums[1], sums[2], 0.0f}};
    }
    __device__ __forceinline__ Means(const Statistics& statistics, const Totals& totals, float dim)
        : derivative(statistics.y, statistics.rstd, totals.sums, dim) {}
  };
  static __device__ __forceinline__ float gradient(const Statistics&, const Means& means, float g,
                                                   float x) {
    return means.derivative.grad_x(g, x);
  }
};

}  // namespace
}  // namespace fuselage
