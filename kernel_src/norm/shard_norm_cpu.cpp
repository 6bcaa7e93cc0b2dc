// Norms whose columns are spread over ranks, on the CPU: the formulas are in norm/shard_norm.h.
// Compiled once per instruction set: see common/cpu_isa.h.

#include "norm/shard_norm_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "norm/shard_norm.h"
#include "norm/shard_norm_math.h"

namespace fuselage::cpu {

namespace FUSELAGE_ISA {

// What is given of a row.
template <class X, class Out>
struct ShardNormRow {
  const X *x, *residual, *mul, *grad_new_residual;
  const Out* grad_out;
  X* new_residual;
  const float* gathered;
  int64_t rank_stride;  // between the floats of two ranks

  FUSELAGE_INLINE ShardNormRow(const ShardNorm& p, int64_t row)
      : x(static_cast<const X*>(p.x) + row * p.x_stride),
        residual(row_of<X>(p.residual, row * p.residual_stride)),
        mul(row_of<X>(p.mul, row * p.mul_stride)),
        grad_new_residual(row_of<X>(p.grad_new_residual, row * p.grad_new_residual_stride)),
        grad_out(row_of<Out>(p.grad_out, row * p.grad_out_stride)),
        new_residual(static_cast<X*>(p.new_residual) + row * p.dim),
        gathered(p.gathered + row * shard_sum_count(p.kind, p.backward)),
        rank_stride(p.rows * shard_sum_count(p.kind, p.backward)) {}

  template <class T>
  static FUSELAGE_INLINE const T* row_of(const void* data, int64_t offset) {
    return data == nullptr ? nullptr : static_cast<const T*>(data) + offset;
  }
  template <int kCount>
  FUSELAGE_INLINE void totals(const ShardNorm& p, float (&sums)[kCount]) const {
    shard_totals(gathered, rank_stride, p.ranks, sums);
  }
};

// The weight of rms norm with its offset, or that of layer norm; one where there is none.
template <class X, class Lanes>
FUSELAGE_INLINE Floats shard_norm_weight(const ShardNorm& p, int64_t i, Lanes lanes) {
  if (p.weight == nullptr) return broadcast(1);
  return p.weight_offset + load_as<X>(p.weight, p.weight_dtype, i, lanes);
}

// Where g is zero, so is the product, whatever the row holds: is_zero of common/cpu_vector.h.
FUSELAGE_INLINE Floats shard_norm_product(Floats g, Floats value) {
  return g == 0 ? Floats{} : g * value;
}

// The saved rstd; of a row that overflowed NaN, which is in every product but with zero.
FUSELAGE_INLINE float shard_norm_rstd(const ShardNorm& p, const float* statistics) {
  const float rstd = statistics[p.kind == ShardNormKind::layer ? 1 : 0];
  return rstd > 0 ? rstd : __builtin_nanf("");
}

// Factors of the polynomial of a row of poly_norm: w0 r0, w1 r1, w2 r2, and the bias.
struct ShardPolynomial {
  float factors[3], bias;

  FUSELAGE_INLINE Floats at(Floats v) const {
    return ((factors[0] * v + factors[1]) * v + factors[2]) * v + bias;
  }
};

template <class X>
FUSELAGE_INLINE ShardPolynomial shard_polynomial(const ShardNorm& p, const float* rstd) {
  const FirstLanes one{1};
  ShardPolynomial y;
  for (int k = 0; k < 3; ++k)
    y.factors[k] = load_as<X>(p.weight, p.weight_dtype, k, one)[0] * rstd[k];
  y.bias = load_as<X>(p.bias, p.bias_dtype, 0, one)[0];
  return y;
}

// Sums, forward

template <class X>
static void shard_norm_moments(const X* s,  // [dim]
                               int64_t dim, float* sums) {
  const double count = static_cast<double>(dim);
  const double sum = sum_vectors(dim, [&](int64_t i, auto lanes) { return load(s + i, lanes); });
  const float mean = static_cast<float>(sum / count);
  double totals[2];
  sum_vectors_of<2>(dim, totals, [&](int64_t i, auto lanes, Floats* add) {
    const Floats centred = cut(load(s + i, lanes) - mean, lanes);
    add[0] += centred;
    add[1] += centred * centred;
  });
  const double rest = totals[0] / count, squares = totals[1] - rest * totals[0];
  sums[0] = mean;
  sums[1] = static_cast<float>(rest);
  sums[2] = static_cast<float>(squares < 0 ? 0 : squares);  // and a NaN stays one
}

template <class X>
static void shard_norm_powers(const X* x,  // [dim]
                              int64_t dim, float* sums) {
  double totals[3];
  sum_vectors_of<3>(dim, totals, [&](int64_t i, auto lanes, Floats(&terms)[3]) {
    const Floats v = load(x + i, lanes), square = v * v, cube = square * v;
    terms[0] += cube * cube;
    terms[1] += square * square;
    terms[2] += square;
  });
  for (int k = 0; k < 3; ++k) sums[k] = static_cast<float>(totals[k]);
}

template <class X>
static void shard_norm_forward_sums(const ShardNorm& p, int64_t row, float* sums) {
  const ShardNormRow<X, X> in(p, row);
  const X* s = in.x;
  if (in.residual != nullptr) {
    for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
      store(in.new_residual + i, load(in.x + i, lanes) + load(in.residual + i, lanes), lanes);
    });
    s = in.new_residual;
  }
  switch (p.kind) {
    case ShardNormKind::rms: sums[0] = static_cast<float>(sum_squares(s, p.dim)); break;
    case ShardNormKind::layer: shard_norm_moments(s, p.dim, sums); break;
    case ShardNormKind::poly: shard_norm_powers(s, p.dim, sums); break;
  }
}

// Sums, backward

template <class X, class Out>
static void shard_norm_backward_sums(const ShardNorm& p, int64_t row, float* sums) {
  const ShardNormRow<X, Out> in(p, row);
  const float* statistics = p.statistics + row * shard_statistic_count(p.kind);
  double totals[3] = {};
  if (p.kind == ShardNormKind::poly) {
    sum_vectors_of<3>(p.dim, totals, [&](int64_t i, auto lanes, Floats(&terms)[3]) {
      Floats g = load(in.grad_out + i, lanes);
      if (in.mul != nullptr) g *= load(in.mul + i, lanes);
      const Floats v = load(in.x + i, lanes), linear = g * v, square = linear * v;
      terms[0] += square * v;
      terms[1] += square;
      terms[2] += linear;
    });
    for (int k = 0; k < 3; ++k) sums[k] = static_cast<float>(totals[k]);
    return;
  }
  const bool layer = p.kind == ShardNormKind::layer;
  const float mean = layer ? statistics[0] : 0.0f, rstd = shard_norm_rstd(p, statistics);
  double of_g[2];
  sum_vectors_of<2>(p.dim, of_g, [&](int64_t i, auto lanes, Floats* add) {
    const Floats g = load(in.grad_out + i, lanes) * shard_norm_weight<X>(p, i, lanes);
    add[0] += g;
    add[1] += shard_norm_product(g, (load(in.x + i, lanes) - mean) * rstd);
  });
  if (layer) *sums++ = static_cast<float>(of_g[0]);
  *sums = static_cast<float>(of_g[1]);
}

// Results, forward

template <class X, class Out>
static void shard_norm_finish_poly(const ShardNorm& p, const ShardNormRow<X, Out>& in, Out* out,
                                   float* saved) {
  float totals[3];
  in.totals(p, totals);
  for (int k = 0; k < 3; ++k)
    saved[k] = rstd_of(totals[k] / static_cast<float>(p.total_dim), p.eps);
  const ShardPolynomial y = shard_polynomial<X>(p, saved);
  for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
    Floats value = y.at(load(in.x + i, lanes));
    if (in.mul != nullptr) value *= load(in.mul + i, lanes);
    store(out + i, value, lanes);
  });
}

template <class X, class Out>
static void shard_norm_finish_layer(const ShardNorm& p, const ShardNormRow<X, Out>& in, Out* out,
                                    float* saved) {
  const ShardMoments moments =
      merge_shard_moments(in.gathered, in.rank_stride, p.ranks, p.total_dim, p.rank_dim);
  const float mean = moments.mean, rstd = rstd_of(moments.variance, p.eps);
  const float offset = -moments.rest * rstd;
  saved[0] = mean + moments.rest;
  saved[1] = rstd;
  for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
    Floats value =
        ((load(in.x + i, lanes) - mean) * rstd + offset) * shard_norm_weight<X>(p, i, lanes);
    if (p.bias != nullptr) value += load_as<X>(p.bias, p.bias_dtype, i, lanes);
    store(out + i, value, lanes);
  });
}

template <class X, class Out>
static void shard_norm_finish_forward(const ShardNorm& p, int64_t row) {
  const ShardNormRow<X, Out> in(p, row);
  Out* out = static_cast<Out*>(p.out) + row * p.dim;
  float* saved = p.saved + row * shard_statistic_count(p.kind);
  if (p.kind == ShardNormKind::poly) return shard_norm_finish_poly(p, in, out, saved);
  if (p.kind == ShardNormKind::layer) return shard_norm_finish_layer(p, in, out, saved);
  float total[1];
  in.totals(p, total);
  const float rstd = rstd_of(total[0] / static_cast<float>(p.total_dim), p.eps);
  saved[0] = rstd;
  for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
    Floats n = load(in.x + i, lanes) * rstd;
    if (p.cast_before_weight) n = round_to(X{}, n);
    store(out + i, n * shard_norm_weight<X>(p, i, lanes), lanes);
  });
}

// Results, backward

template <class X, class Out>
static void shard_norm_finish_backward(const ShardNorm& p, int64_t row) {
  const ShardNormRow<X, Out> in(p, row);
  X* grad_x = static_cast<X*>(p.out) + row * p.dim;
  const float* statistics = p.statistics + row * shard_statistic_count(p.kind);
  const float dim = static_cast<float>(p.total_dim);
  if (p.kind == ShardNormKind::poly) {
    const ShardPolynomial y = shard_polynomial<X>(p, statistics);
    float totals[3], slopes[3];  // of the part of grad_x that goes back through the means
    in.totals(p, totals);
    for (int k = 0; k < 3; ++k)
      slopes[k] = (3 - k) * y.factors[k] * (totals[k] * statistics[k] / dim * statistics[k]);
    for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
      Floats g = load(in.grad_out + i, lanes);
      if (in.mul != nullptr) g *= load(in.mul + i, lanes);
      const Floats v = load(in.x + i, lanes), square = v * v;
      const Floats direct = (3 * y.factors[0] * v + 2 * y.factors[1]) * v + y.factors[2];
      const Floats means = (slopes[0] * square + slopes[1]) * square + slopes[2];
      store(grad_x + i, g * direct - v * means, lanes);
    });
    return;
  }
  const bool layer = p.kind == ShardNormKind::layer;
  const float mean = layer ? statistics[0] : 0.0f, rstd = shard_norm_rstd(p, statistics);
  float totals[2] = {}, total[1];
  if (layer) {
    in.totals(p, totals);
  } else {
    in.totals(p, total);
    totals[1] = total[0];
  }
  const float mean_g = totals[0] / dim, mean_product = totals[1] / dim;
  for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
    const Floats g = load(in.grad_out + i, lanes) * shard_norm_weight<X>(p, i, lanes);
    const Floats xhat = (load(in.x + i, lanes) - mean) * rstd;
    const Floats through = mean_product == 0 ? Floats{} : xhat * mean_product;
    Floats grad = g - mean_g - through;
    grad = shard_norm_product(grad, broadcast(rstd));
    if (in.grad_new_residual != nullptr) grad += load(in.grad_new_residual + i, lanes);
    store(grad_x + i, grad, lanes);
  });
}

// From the types in the params to template arguments

// visit(X{}, Out{}). The binding lets no other pair through.
template <class Visit>
FUSELAGE_INLINE void shard_norm_visit_types(const ShardNorm& p, Visit visit) {
  visit_dtype(p.dtype, [&](auto x) {
    if (p.out_dtype == p.dtype) return visit(x, x);
    if (p.out_dtype == DType::float32) return visit(x, float{});
    if constexpr (sizeof(x) == sizeof(float)) {
      if (p.out_dtype == DType::float16) return visit(x, Float16{});
      return visit(x, BFloat16{});
    }
    __builtin_trap();
  });
}

FUSELAGE_HIDDEN void shard_norm_sums(const ShardNorm& p, int64_t row_begin, int64_t row_end) {
  const int64_t count = shard_sum_count(p.kind, p.backward);
  shard_norm_visit_types(p, [&](auto x, auto out) {
    using X = decltype(x);
    for (int64_t row = row_begin; row < row_end; ++row) {
      float* sums = p.sums + row * count;
      if (p.backward) {
        shard_norm_backward_sums<X, decltype(out)>(p, row, sums);
      } else {
        shard_norm_forward_sums<X>(p, row, sums);
      }
    }
  });
}

FUSELAGE_HIDDEN void shard_norm_finish(const ShardNorm& p, int64_t row_begin, int64_t row_end) {
  shard_norm_visit_types(p, [&](auto x, auto out) {
    using X = decltype(x);
    using Out = decltype(out);
    for (int64_t row = row_begin; row < row_end; ++row) {
      if (p.backward) {
        shard_norm_finish_backward<X, Out>(p, row);
      } else {
        shard_norm_finish_forward<X, Out>(p, row);
      }
    }
  });
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(shard_norm_sums, (const ShardNorm& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(shard_norm_finish, (const ShardNorm& p, int64_t begin, int64_t end),
                  (p, begin, end))

}  // namespace fuselage::cpu
