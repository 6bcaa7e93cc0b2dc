// poly_norm, fused_mul_poly_norm and grouped_poly_norm on the CPU, forward and backward: the
// formulas are in norm/poly_norm.h. A row is read from memory once: the first pass sums it up and
// leaves it in the cache for the second, which writes the result. Compiled once per instruction
// set: see common/cpu_isa.h.

#include "norm/poly_norm_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_rows.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "norm/poly_norm.h"

namespace fuselage::cpu {

namespace FUSELAGE_ISA {

// The weights and the bias of one expert.
struct PolyNormFactors {
  float weight[3], bias;
};

// The expert whose rows `row` is among: the first with a later end. p.experts for a row of padding.
template <class Params>
static int64_t poly_norm_expert(const Params& p, int64_t row) {
  if (p.offs == nullptr) return 0;
  int64_t begin = 0, end = p.experts;
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (p.offs[middle] > row) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

template <class T, class Params>
static PolyNormFactors poly_norm_factors(const Params& p, int64_t expert) {
  const FirstLanes one{1};
  PolyNormFactors factors;
  for (int k = 0; k < 3; ++k)
    factors.weight[k] = load_as<T>(p.weight, p.weight_dtype, 3 * expert + k, one)[0];
  factors.bias = load_as<T>(p.bias, p.bias_dtype, expert, one)[0];
  return factors;
}

// Without hidden_clamp these return their first argument.
template <bool kClamps>
FUSELAGE_INLINE Floats poly_norm_clamp(Floats value, float limit) {
  if constexpr (!kClamps) return value;
  const Floats high = broadcast(limit), low = broadcast(-limit);
  value = value > high ? high : value;
  return value < low ? low : value;
}

// `grad` where the value that it is a gradient of was not cut.
template <bool kClamps>
FUSELAGE_INLINE Floats poly_norm_unclamped(Floats grad, Floats value, float limit) {
  if constexpr (!kClamps) return grad;
  const Floats high = broadcast(limit), low = broadcast(-limit);
  return ((value >= low) & (value <= high)) ? grad : Floats{};
}

// w0 r0, w1 r1 and w2 r2 make y a polynomial of x.
FUSELAGE_INLINE Floats poly_norm_polynomial(Floats x, const float (&factors)[3], float bias) {
  return ((factors[0] * x + factors[1]) * x + factors[2]) * x + bias;
}

// Stands for a `mul` that there is none of.
struct PolyNormNoMul {};

template <class T, class Lanes>
FUSELAGE_INLINE Floats poly_norm_load_mul(const T* mul, int64_t i, Lanes lanes) {
  return load(mul + i, lanes);
}

template <class Lanes>
FUSELAGE_INLINE Floats poly_norm_load_mul(const PolyNormNoMul*, int64_t, Lanes) {
  return broadcast(1);
}

// Forward

template <bool kClamps, class T, class M>
static void poly_norm_forward_rows(const PolyNormForward& p, int64_t row_begin, int64_t row_end) {
  const float limit = p.hidden_clamp;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    const M* mul = static_cast<const M*>(p.mul) + row * p.mul_stride;
    T* out = static_cast<T*>(p.out) + row * p.dim;
    float* rstd_of_row = p.rstd == nullptr ? nullptr : p.rstd + 3 * row;
    const int64_t expert = poly_norm_expert(p, row);
    if (p.offs != nullptr && expert == p.experts) {
      set_zero(out, p.dim);
      for (int k = 0; rstd_of_row != nullptr && k < 3; ++k) rstd_of_row[k] = 0;
      continue;
    }
    const PolyNormFactors factors = poly_norm_factors<T>(p, expert);

    double sums[3];
    sum_vectors_of<3>(p.dim, sums, [&](int64_t i, auto lanes, Floats(&terms)[3]) {
      const Floats v = poly_norm_clamp<kClamps>(load(x + i, lanes), limit);
      const Floats square = v * v, cube = square * v;
      terms[0] += cube * cube;
      terms[1] += square * square;
      terms[2] += square;
    });
    float polynomial[3];
    for (int k = 0; k < 3; ++k) {
      const float rstd = rstd_of(sums[k] / static_cast<double>(p.dim), p.eps);
      polynomial[k] = factors.weight[k] * rstd;
      if (rstd_of_row != nullptr) rstd_of_row[k] = rstd;
    }
    for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
      const Floats v = poly_norm_clamp<kClamps>(load(x + i, lanes), limit);
      Floats y = poly_norm_polynomial(v, polynomial, factors.bias);
      if constexpr (sizeof(M) == sizeof(T)) {
        y *= poly_norm_clamp<kClamps>(poly_norm_load_mul(mul, i, lanes), limit);
      }
      store(out + i, poly_norm_clamp<kClamps>(y, limit), lanes);
    });
  }
}

// Backward

template <bool kClamps, class T, class M>
static void poly_norm_backward_rows(const PolyNormBackward& p, int64_t row_begin, int64_t row_end) {
  constexpr bool kMul = sizeof(M) == sizeof(T);
  const float limit = p.hidden_clamp;
  const float dim = static_cast<float>(p.dim);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* grad_out = static_cast<const T*>(p.grad_out) + row * p.grad_out_stride;
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    const M* mul = static_cast<const M*>(p.mul) + row * p.mul_stride;
    T* grad_x = p.grad_x == nullptr ? nullptr : static_cast<T*>(p.grad_x) + row * p.grad_x_stride;
    T* grad_mul =
        p.grad_mul == nullptr ? nullptr : static_cast<T*>(p.grad_mul) + row * p.grad_mul_stride;
    float* partial = p.partials == nullptr ? nullptr : p.partials + 4 * row;
    const int64_t expert = poly_norm_expert(p, row);
    if (p.offs != nullptr && expert == p.experts) {
      if (grad_x != nullptr) set_zero(grad_x, p.dim);
      if (grad_mul != nullptr) set_zero(grad_mul, p.dim);
      continue;  // nobody reads the partial sums of padding
    }
    const PolyNormFactors factors = poly_norm_factors<T>(p, expert);
    const float* rstd = p.rstd + 3 * row;
    float polynomial[3];
    for (int k = 0; k < 3; ++k) polynomial[k] = factors.weight[k] * rstd[k];

    // The gradient of the product y * mul: none where it was cut.
    const auto load_grad = [&](int64_t i, auto lanes, Floats v, Floats m) {
      const Floats g = load(grad_out + i, lanes);
      if constexpr (!kClamps) return g;
      const Floats y = poly_norm_polynomial(v, polynomial, factors.bias);
      return poly_norm_unclamped<kClamps>(g, y * m, limit);
    };

    float slopes[3] = {};  // of the part of grad_x that goes back through the means
    if (grad_x != nullptr || partial != nullptr) {
      double sums[4];
      sum_vectors_of<4>(p.dim, sums, [&](int64_t i, auto lanes, Floats(&terms)[4]) {
        const Floats v = poly_norm_clamp<kClamps>(load(x + i, lanes), limit);
        const Floats m = poly_norm_clamp<kClamps>(poly_norm_load_mul(mul, i, lanes), limit);
        Floats g = load_grad(i, lanes, v, m);
        if constexpr (kMul) g *= m;
        const Floats linear = g * v, square = linear * v;
        terms[0] += square * v;
        terms[1] += square;
        terms[2] += linear;
        terms[3] += g;
      });
      for (int k = 0; k < 3; ++k) {
        const float scaled = static_cast<float>(sums[k] * rstd[k]);
        slopes[k] = (3 - k) * polynomial[k] * (scaled / dim * rstd[k]);
        if (partial != nullptr) partial[k] = scaled;
      }
      if (partial != nullptr) partial[3] = static_cast<float>(sums[3]);
    }
    if (grad_x == nullptr && grad_mul == nullptr) continue;

    for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
      const Floats x_value = load(x + i, lanes);
      const Floats v = poly_norm_clamp<kClamps>(x_value, limit);
      const Floats mul_value = poly_norm_load_mul(mul, i, lanes);
      const Floats m = poly_norm_clamp<kClamps>(mul_value, limit);
      Floats g = load_grad(i, lanes, v, m);
      if constexpr (kMul) {
        if (grad_mul != nullptr) {
          const Floats y = poly_norm_polynomial(v, polynomial, factors.bias);
          store(grad_mul + i, poly_norm_unclamped<kClamps>(g * y, mul_value, limit), lanes);
        }
        g *= m;
      }
      if (grad_x == nullptr) return;
      const Floats square = v * v;
      const Floats direct = (3 * polynomial[0] * v + 2 * polynomial[1]) * v + polynomial[2];
      const Floats through_means = (slopes[0] * square + slopes[1]) * square + slopes[2];
      store(grad_x + i,
            poly_norm_unclamped<kClamps>(g * direct - v * through_means, x_value, limit), lanes);
    });
  }
}

// From the types in the params to template arguments

// visit(T{}, M{}, clamps), where clamps{} tells of a hidden_clamp.
struct PolyNormYes {
  static constexpr bool value = true;
};
struct PolyNormNo {
  static constexpr bool value = false;
};

template <class Params, class Visit>
FUSELAGE_INLINE void poly_norm_visit_types(const Params& p, Visit visit) {
  const auto visit_mul = [&](auto x) {
    if (p.mul == nullptr) return visit(x, PolyNormNoMul{}, PolyNormNo{});
    if (p.offs == nullptr || p.hidden_clamp == __builtin_inff()) return visit(x, x, PolyNormNo{});
    return visit(x, x, PolyNormYes{});
  };
  visit_dtype(p.dtype, visit_mul);
}

FUSELAGE_HIDDEN void poly_norm_forward(const PolyNormForward& p, int64_t row_begin,
                                       int64_t row_end) {
  poly_norm_visit_types(p, [&](auto x, auto mul, auto clamps) {
    poly_norm_forward_rows<decltype(clamps)::value, decltype(x), decltype(mul)>(p, row_begin,
                                                                                row_end);
  });
}

FUSELAGE_HIDDEN void poly_norm_backward(const PolyNormBackward& p, int64_t row_begin,
                                        int64_t row_end) {
  poly_norm_visit_types(p, [&](auto x, auto mul, auto clamps) {
    poly_norm_backward_rows<decltype(clamps)::value, decltype(x), decltype(mul)>(p, row_begin,
                                                                                 row_end);
  });
}

FUSELAGE_HIDDEN void poly_norm_backward_weight(const PolyNormBackward& p, int64_t expert_begin,
                                               int64_t expert_end) {
  for (int64_t expert = expert_begin; expert < expert_end; ++expert) {
    int64_t row = 0, end = p.rows;
    if (p.offs != nullptr) {
      if (expert > 0) row = p.offs[expert - 1];
      if (row < 0) row = 0;
      if (p.offs[expert] < end) end = p.offs[expert];
    }
    double sums[4];
    sum_partials(p.partials + 4 * row, 4, end - row, sums, 4);
    if (p.grad_weight != nullptr) store_sums(p.grad_weight, p.weight_dtype, 3 * expert, sums, 3);
    if (p.grad_bias != nullptr) store_sums(p.grad_bias, p.bias_dtype, expert, sums + 3, 1);
  }
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(poly_norm_forward, (const PolyNormForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(poly_norm_backward, (const PolyNormBackward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(poly_norm_backward_weight,
                  (const PolyNormBackward& p, int64_t begin, int64_t end), (p, begin, end))

}  // namespace fuselage::cpu
