// gated_rms_norm on the CPU, forward and backward: the formulas are in norm/gated_rms_norm.h. A row
// is read from memory once: the first pass sums a group up and leaves it in the cache for the
// second. Compiled once per instruction set: see common/cpu_isa.h.

#include "norm/gated_rms_norm_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_math.h"
#include "common/cpu_rows.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "common/sigmoid_math.h"
#include "norm/gated_rms_norm.h"

namespace fuselage::cpu {

namespace FUSELAGE_ISA {

template <class X>
FUSELAGE_INLINE ValueAndSlope<Floats> gated_rms_norm_act(NormGate activation, Floats gate) {
  return gate_of<CpuMath<(sizeof(X) < sizeof(float))>>(activation == NormGate::silu, gate);
}

template <class X, class Params, class Lanes>
FUSELAGE_INLINE Floats gated_rms_norm_weight(const Params& p, int64_t i, Lanes lanes) {
  if (p.weight == nullptr) return broadcast(1);
  return load_as<X>(p.weight, p.weight_dtype, i, lanes);
}

// Forward

template <bool kNormFirst, class X>
static void gated_rms_norm_forward_group(const GatedRmsNormForward& p, int64_t row, int64_t group) {
  const int64_t first = group * p.dim;  // of the row's columns
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride + first;
  const X* gate = static_cast<const X*>(p.gate) + row * p.gate_stride + first;
  X* out = static_cast<X*>(p.out) + row * p.groups * p.dim + first;
  const auto act = [&](int64_t i, auto lanes) {
    return gated_rms_norm_act<X>(p.activation, load(gate + i, lanes)).value;
  };

  double sum;
  if constexpr (kNormFirst) {
    sum = sum_squares(x, p.dim);
  } else {
    sum = sum_vectors(p.dim, [&](int64_t i, auto lanes) {
      const Floats s = load(x + i, lanes) * act(i, lanes);
      return s * s;
    });
  }
  const float rstd = rstd_of(sum / static_cast<double>(p.dim), p.eps);
  if (p.rstd != nullptr) p.rstd[row * p.groups + group] = rstd;

  const bool rounds_product = kNormFirst && p.cast_before_weight && p.weight_dtype == p.dtype;
  for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
    const Floats a = act(i, lanes);
    Floats n = load(x + i, lanes);
    if constexpr (!kNormFirst) n *= a;
    n *= rstd;
    if (p.cast_before_weight) n = round_to(X{}, n);
    n *= gated_rms_norm_weight<X>(p, first + i, lanes);
    if (rounds_product) n = round_to(X{}, n);
    if constexpr (kNormFirst) n *= a;
    store(out + i, n, lanes);
  });
}

// Backward

// g * x * rstd * act(gate), with x and the gate in the order of the forward.
template <bool kNormFirst>
FUSELAGE_INLINE Floats gated_rms_norm_product(Floats g, Floats x, Floats a, float rstd) {
  if constexpr (kNormFirst) return g * (x * rstd) * a;
  return g * (x * a * rstd);
}

// A group of a row. `first_row`: `partial` holds nothing yet.
template <bool kNormFirst, class X>
static void gated_rms_norm_backward_group(const GatedRmsNormBackward& p, int64_t row, int64_t group,
                                          float* partial,  // [dim], or null
                                          bool first_row) {
  const int64_t first = group * p.dim, start = row * p.groups * p.dim + first;
  const X* grad_out = static_cast<const X*>(p.grad_out) + row * p.grad_out_stride + first;
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride + first;
  const X* gate = static_cast<const X*>(p.gate) + row * p.gate_stride + first;
  X* grad_x = p.grad_x == nullptr ? nullptr : static_cast<X*>(p.grad_x) + start;
  X* grad_gate = p.grad_gate == nullptr ? nullptr : static_cast<X*>(p.grad_gate) + start;
  const float rstd = p.rstd[row * p.groups + group];

  float mean = 0;  // of t * weight
  if (grad_x != nullptr || (grad_gate != nullptr && !kNormFirst)) {
    double sums[1];
    sum_vectors_of<1>(p.dim, sums, [&](int64_t i, auto lanes, Floats(&terms)[1]) {
      const Floats a = gated_rms_norm_act<X>(p.activation, load(gate + i, lanes)).value;
      const Floats g = load(grad_out + i, lanes) * gated_rms_norm_weight<X>(p, first + i, lanes);
      terms[0] += gated_rms_norm_product<kNormFirst>(g, load(x + i, lanes), a, rstd);
    });
    mean = static_cast<float>(sums[0] / static_cast<double>(p.dim));
  }
  for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
    const ValueAndSlope<Floats> act = gated_rms_norm_act<X>(p.activation, load(gate + i, lanes));
    const Floats g = load(grad_out + i, lanes), v = load(x + i, lanes);
    const Floats weighted = g * gated_rms_norm_weight<X>(p, first + i, lanes);
    if (partial != nullptr) {
      const Floats t = gated_rms_norm_product<kNormFirst>(g, v, act.value, rstd);
      accumulate(partial + i, t, first_row, lanes);
    }
    if constexpr (kNormFirst) {
      const Floats n = v * rstd;
      if (grad_x != nullptr) store(grad_x + i, rstd * (weighted * act.value - n * mean), lanes);
      if (grad_gate != nullptr) store(grad_gate + i, weighted * n * act.slope, lanes);
    } else {
      const Floats grad_s = rstd * (weighted - v * act.value * rstd * mean);
      if (grad_x != nullptr) store(grad_x + i, grad_s * act.value, lanes);
      if (grad_gate != nullptr) store(grad_gate + i, grad_s * v * act.slope, lanes);
    }
  });
}

// From what is in the params to template arguments

// visit(order, X{}), where order::value says whether the norm comes first.
template <bool kNormFirst_>
struct GatedRmsNormOrder {
  static constexpr bool value = kNormFirst_;
};
template <class Params, class Visit>
FUSELAGE_INLINE void gated_rms_norm_visit(const Params& p, Visit visit) {
  visit_dtype(p.dtype, [&](auto x) {
    if (p.norm_first) return visit(GatedRmsNormOrder<true>{}, x);
    visit(GatedRmsNormOrder<false>{}, x);
  });
}

FUSELAGE_HIDDEN void gated_rms_norm_forward(const GatedRmsNormForward& p, int64_t row_begin,
                                            int64_t row_end) {
  gated_rms_norm_visit(p, [&](auto order, auto x) {
    for (int64_t row = row_begin; row < row_end; ++row) {
      for (int64_t group = 0; group < p.groups; ++group)
        gated_rms_norm_forward_group<decltype(order)::value, decltype(x)>(p, row, group);
    }
  });
}

FUSELAGE_HIDDEN void gated_rms_norm_backward(const GatedRmsNormBackward& p, int64_t chunk_begin,
                                             int64_t chunk_end) {
  const int64_t columns = p.groups * p.dim;
  gated_rms_norm_visit(p, [&](auto order, auto x) {
    for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
      const RowRange rows = rows_of_chunk(p.rows, chunk, p.partial_count);
      float* partial = p.partials == nullptr ? nullptr : p.partials + chunk * columns;
      if (partial != nullptr && rows.begin == rows.end) set_zero(partial, columns);
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        for (int64_t group = 0; group < p.groups; ++group) {
          gated_rms_norm_backward_group<decltype(order)::value, decltype(x)>(
              p, row, group, partial == nullptr ? nullptr : partial + group * p.dim,
              row == rows.begin);
        }
      }
    }
  });
}

FUSELAGE_HIDDEN void gated_rms_norm_backward_weight(const GatedRmsNormBackward& p,
                                                    int64_t column_begin, int64_t column_end) {
  sum_columns(p.partials, p.partial_count, p.groups * p.dim, p.grad_weight, p.weight_dtype,
              column_begin, column_end);
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(gated_rms_norm_forward,
                  (const GatedRmsNormForward& p, int64_t begin, int64_t end), (p, begin, end))
FUSELAGE_PICK_ISA(gated_rms_norm_backward,
                  (const GatedRmsNormBackward& p, int64_t begin, int64_t end), (p, begin, end))
FUSELAGE_PICK_ISA(gated_rms_norm_backward_weight,
                  (const GatedRmsNormBackward& p, int64_t begin, int64_t end), (p, begin, end))

#if FUSELAGE_ISA_IS_BASELINE

int64_t gated_rms_norm_backward_chunks(int64_t rows) {
  const int64_t chunk = baseline::chunk_rows(rows);
  return rows == 0 ? 1 : (rows + chunk - 1) / chunk;
}

#endif

}  // namespace fuselage::cpu
