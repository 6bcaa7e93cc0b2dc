// layer_norm, ada_layer_norm, ada_rms_norm and gate_residual_ada_norm on the CPU, forward and
// backward: the formulas are in norm/ada_norm.h. A row is read from memory once: the first pass
// leaves it in the cache for those after it. Compiled once per instruction set: see
// common/cpu_isa.h.

#include "norm/ada_norm_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_rows.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "norm/ada_norm.h"

namespace fuselage::cpu {

namespace FUSELAGE_ISA {

// `dim` values of X, or of float32; or none, which read as `missing`.
template <class X>
struct AdaNormValues {
  const void* data;
  bool is_float32;
  float missing;

  FUSELAGE_INLINE AdaNormValues(const NormVector& vector, float missing_)
      : data(vector.data), is_float32(vector.dtype == DType::float32), missing(missing_) {}
  // Those of one row.
  FUSELAGE_INLINE AdaNormValues(const Modulation& modulation, int64_t row, float missing_)
      : data(nullptr), is_float32(modulation.dtype == DType::float32), missing(missing_) {
    if (modulation.data == nullptr) return;
    const int64_t offset = row / modulation.rows.value * modulation.stride;
    data = static_cast<const char*>(modulation.data) + offset * dtype_size(modulation.dtype);
  }
  template <class Lanes>
  FUSELAGE_INLINE Floats at(int64_t i, Lanes lanes) const {
    if (data == nullptr) return broadcast(missing);
    if (is_float32) return load(static_cast<const float*>(data) + i, lanes);
    return load(static_cast<const X*>(data) + i, lanes);
  }
};

// A product that is not to be fused with the addition after it: compilers do so in one place and
// not in the other.
FUSELAGE_INLINE Floats ada_norm_rounded(Floats product) {
#if defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

// Forward

// The sum of s = x.
template <class X>
static double ada_norm_sum(const X* x,  // [dim]
                           int64_t dim) {
  return sum_vectors(dim, [&](int64_t i, auto lanes) { return load(x + i, lanes); });
}

// The sum of s = round(residual + gate * x), which goes to new_residual.
template <class X>
static double ada_norm_add_sum(const X* x,         // [dim]
                               const X* residual,  // [dim]
                               X* new_residual,    // [dim]
                               const AdaNormValues<X>& gate, int64_t dim) {
  return sum_vectors(dim, [&](int64_t i, auto lanes) {
    const Floats product = ada_norm_rounded(load(x + i, lanes) * gate.at(i, lanes));
    const Floats s = round_to(X{}, load(residual + i, lanes) + product);
    store(new_residual + i, s, lanes);
    return s;
  });
}

// The sum of (s - mean)^2.
template <class X>
static double ada_norm_sum_squares(const X* s,  // [dim]
                                   int64_t dim, float mean) {
  return sum_vectors(dim, [&](int64_t i, auto lanes) {
    const Floats centred = cut(load(s + i, lanes) - mean, lanes);
    return centred * centred;
  });
}

// The sum of s - mean.
template <class X>
static double ada_norm_sum_deviations(const X* s,  // [dim]
                                      int64_t dim, float mean) {
  return sum_vectors(dim,
                     [&](int64_t i, auto lanes) { return cut(load(s + i, lanes) - mean, lanes); });
}

template <class X>
static void ada_norm_forward_rows(const AdaNormForward& p, int64_t row_begin, int64_t row_end) {
  const AdaNormValues<X> weight(p.weight, 1), bias(p.bias, 0);
  const double dim = static_cast<double>(p.dim);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const X* s = static_cast<const X*>(p.x) + row * p.x_stride;
    X* out = static_cast<X*>(p.out) + row * p.out_stride;
    double sum = 0;
    if (p.residual != nullptr) {
      const X* residual = static_cast<const X*>(p.residual) + row * p.residual_stride;
      X* new_residual = static_cast<X*>(p.new_residual) + row * p.new_residual_stride;
      sum = ada_norm_add_sum(s, residual, new_residual, AdaNormValues<X>(p.gate, row, 1), p.dim);
      s = new_residual;
    } else if (p.layer) {
      sum = ada_norm_sum(s, p.dim);
    }
    const float mean = p.layer ? static_cast<float>(sum / dim) : 0.0f;
    double variance = ada_norm_sum_squares(s, p.dim, mean) / dim, rest = 0;
    float rstd = rstd_of(variance, p.eps);
    // In float32 inputs a mean that is large against the deviations costs accuracy: it is off by
    // `rest`, their mean. Of half precision the sum is exact, or next to it. Few rows have such a
    // mean: their deviations are summed up by themselves.
    constexpr bool kMayNeedRest = sizeof(X) == sizeof(float);
    if (kMayNeedRest && __builtin_fabsf(mean) * rstd > 4) {
      rest = ada_norm_sum_deviations(s, p.dim, mean) / dim;
      variance -= rest * rest;
      rstd = rstd_of(variance < 0 ? 0 : variance, p.eps);
    }
    const float offset = static_cast<float>(-rest) * rstd;
    if (p.statistics != nullptr && p.layer) {
      p.statistics[2 * row] = static_cast<float>(mean + rest);
      p.statistics[2 * row + 1] = rstd;
    } else if (p.statistics != nullptr) {
      p.statistics[row] = rstd;
    }

    const AdaNormValues<X> scale(p.scale, row, 0), shift(p.shift, row, 0);
    for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
      Floats xhat = (load(s + i, lanes) - mean) * rstd;
      if constexpr (kMayNeedRest) xhat += offset;
      const Floats y = xhat * weight.at(i, lanes) + bias.at(i, lanes);
      store(out + i, y * (1 + scale.at(i, lanes)) + shift.at(i, lanes), lanes);
    });
  }
}

// Backward

// One row. The rows of partial sums are null where not needed.
template <class X>
static void ada_norm_backward_row(const AdaNormBackward& p, int64_t row,
                                  float* of_a,     // [dim], or null
                                  float* of_c,     // [dim], or null
                                  float* of_gate,  // [dim], or null
                                  bool first) {    // they hold nothing yet
  const int64_t dim = p.dim;
  const X* grad_out = static_cast<const X*>(p.grad_out) + row * p.grad_out_stride;
  const X* s = static_cast<const X*>(p.s) + row * p.s_stride;
  const X* grad_new_residual = nullptr;
  if (p.grad_new_residual != nullptr) {
    grad_new_residual =
        static_cast<const X*>(p.grad_new_residual) + row * p.grad_new_residual_stride;
  }
  const X* x = p.x == nullptr ? nullptr : static_cast<const X*>(p.x) + row * p.x_stride;
  const AdaNormValues<X> weight(p.weight, 1), bias(p.bias, 0), gate(p.gate, row, 1),
      scale(p.scale, row, 0);
  float mean = p.layer ? p.statistics[2 * row] : 0.0f;
  float rstd = p.layer ? p.statistics[2 * row + 1] : p.statistics[row];
  if (!(rstd > 0) && is_zero(grad_out, dim)) {  // see there
    s = grad_out;                               // what is read in place of the row is zero
    mean = rstd = 0;
  }

  const bool needs_grad_s =
      p.grad_x != nullptr || p.grad_residual != nullptr || p.grad_gate != nullptr;
  float mean_g = 0, mean_product = 0;  // mean(g) and mean(g * xhat)
  if (needs_grad_s) {
    double sums[2];
    sum_vectors_of<2>(dim, sums, [&](int64_t i, auto lanes, Floats* add) {
      const Floats xhat = (load(s + i, lanes) - mean) * rstd;
      const Floats g = load(grad_out + i, lanes) * weight.at(i, lanes) * (1 + scale.at(i, lanes));
      add[0] += g;
      add[1] += g * xhat;
    });
    mean_g = p.layer ? static_cast<float>(sums[0] / static_cast<double>(dim)) : 0.0f;
    mean_product = static_cast<float>(sums[1] / static_cast<double>(dim));
  }

  // NOTE: with `accumulate` of cpu_rows.h, and `load_as` in AdaNormValues, the float32 backward of
  // layer_norm took 8 to 10% longer (256 x 1024, AVX2, one core of an EPYC).
  const auto accumulate = [&](float* partial, int64_t i, Floats value, auto lanes) {
    if (!first) value += load(partial + i, lanes);
    store(partial + i, value, lanes);
  };
  const int64_t begin = row * dim;
  for_each_vector(0, dim, [&](int64_t i, auto lanes) {
    const Floats go = load(grad_out + i, lanes);
    const Floats xhat = (load(s + i, lanes) - mean) * rstd;
    const Floats factor = 1 + scale.at(i, lanes);
    if (of_a != nullptr) {
      const Floats a = p.scale_by_row ? go * factor : go;
      accumulate(of_a, i, a, lanes);
      accumulate(of_c, i, a * xhat, lanes);
    }
    if (p.scale_by_row && p.grad_scale != nullptr) {
      const Floats y = xhat * weight.at(i, lanes) + bias.at(i, lanes);
      store_as<X>(p.grad_scale, p.scale.dtype, begin + i, go * y, lanes);
    }
    if (p.scale_by_row && p.grad_shift != nullptr)
      store_as<X>(p.grad_shift, p.shift_dtype, begin + i, go, lanes);
    if (!needs_grad_s) return;
    const Floats g = go * weight.at(i, lanes) * factor;
    Floats grad = rstd * (g - mean_g - xhat * mean_product);
    if (grad_new_residual != nullptr) grad += load(grad_new_residual + i, lanes);
    if (p.grad_residual != nullptr)
      store(static_cast<X*>(p.grad_residual) + begin + i, grad, lanes);
    if (p.grad_x != nullptr)
      store(static_cast<X*>(p.grad_x) + begin + i, grad * gate.at(i, lanes), lanes);
    if (p.grad_gate == nullptr) return;
    const Floats grad_gate = grad * load(x + i, lanes);
    if (of_gate != nullptr) {
      accumulate(of_gate, i, grad_gate, lanes);
    } else {
      store_as<X>(p.grad_gate, p.gate.dtype, begin + i, grad_gate, lanes);
    }
  });
}

template <class X>
static void ada_norm_backward_chunks_of(const AdaNormBackward& p, int64_t chunk_begin,
                                        int64_t chunk_end) {
  const bool columns = p.sums_columns, gate = p.sums_gate;
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    const int64_t group = chunk / p.blocks_per_group, part = chunk % p.blocks_per_group;
    const RowRange rows = rows_of_chunk(p.group_rows, part, p.blocks_per_group);
    float* partial = p.partials + chunk * p.partial_rows * p.dim;
    float* of_a = columns ? partial : nullptr;
    float* of_c = columns ? partial + p.dim : nullptr;
    float* of_gate = gate ? partial + (columns ? 2 * p.dim : 0) : nullptr;
    for (int64_t row = rows.begin; row < rows.end; ++row)
      ada_norm_backward_row<X>(p, group * p.group_rows + row, of_a, of_c, of_gate,
                               row == rows.begin);
  }
}

// In float64, for a strip of columns at a time.
constexpr int64_t kAdaNormStrip = 256;
static_assert(kAdaNormStrip <= kColumnStrip, "a strip is stored at once");

// The sum of the partial sums of a group: row `kind` of each.
static void ada_norm_sum_group(const AdaNormBackward& p, int64_t group, int kind, int64_t begin,
                               int64_t size, double (&sum)[kAdaNormStrip]) {
  const int64_t stride = p.partial_rows * p.dim;
  const float* partials = p.partials + group * p.blocks_per_group * stride + kind * p.dim + begin;
  sum_partials(partials, stride, p.blocks_per_group, sum, size);
}

// Floats of a row of values, for a strip.
template <class X>
static void ada_norm_load_strip(const AdaNormValues<X>& values, int64_t begin, int64_t size,
                                float (&floats)[kAdaNormStrip]) {
  for_each_vector(0, size, [&](int64_t i, auto lanes) {
    store(floats + i, values.at(begin + i, lanes), lanes);
  });
}

template <class X>
static void ada_norm_backward_sums_of(const AdaNormBackward& p, int64_t column_begin,
                                      int64_t column_end) {
  const bool columns = p.sums_columns, gate = p.sums_gate;
  const int64_t groups = p.rows == 0 ? 0 : p.rows / p.group_rows;
  const bool one_scale = p.scale_rows.value == p.rows, one_gate = p.gate_rows.value == p.rows;
  const AdaNormValues<X> weight_values(p.weight, 1), bias_values(p.bias, 0);
  for (int64_t begin = column_begin; begin < column_end; begin += kAdaNormStrip) {
    const int64_t size = column_end - begin < kAdaNormStrip ? column_end - begin : kAdaNormStrip;
    float weight[kAdaNormStrip], bias[kAdaNormStrip], scale[kAdaNormStrip];
    ada_norm_load_strip(weight_values, begin, size, weight);
    ada_norm_load_strip(bias_values, begin, size, bias);
    double a[kAdaNormStrip], c[kAdaNormStrip], g[kAdaNormStrip], scaled[kAdaNormStrip];
    double all_a[kAdaNormStrip] = {}, all_c[kAdaNormStrip] = {}, all_g[kAdaNormStrip] = {};
    double grad_weight[kAdaNormStrip] = {}, grad_bias[kAdaNormStrip] = {};

    const auto store_scale_and_shift = [&](int64_t offset, double(&a)[kAdaNormStrip],
                                           double(&c)[kAdaNormStrip]) {
      if (p.grad_shift != nullptr) store_sums(p.grad_shift, p.shift_dtype, offset + begin, a, size);
      if (p.grad_scale == nullptr) return;
      for (int64_t i = 0; i < size; ++i) scaled[i] = c[i] * weight[i] + a[i] * bias[i];
      store_sums(p.grad_scale, p.scale.dtype, offset + begin, scaled, size);
    };
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = group * p.group_rows;
      if (columns) {
        ada_norm_sum_group(p, group, 0, begin, size, a);
        ada_norm_sum_group(p, group, 1, begin, size, c);
        const bool by_row = p.scale_by_row;
        if (!by_row) ada_norm_load_strip(AdaNormValues<X>(p.scale, row, 0), begin, size, scale);
        for (int64_t i = 0; i < size; ++i) {
          const double factor = by_row ? 1.0 : 1.0 + static_cast<double>(scale[i]);
          grad_weight[i] += factor * c[i];
          grad_bias[i] += factor * a[i];
          all_a[i] += a[i];
          all_c[i] += c[i];
        }
        if (!by_row && !one_scale) store_scale_and_shift(row / p.scale_rows.value * p.dim, a, c);
      }
      if (gate) {
        ada_norm_sum_group(p, group, columns ? 2 : 0, begin, size, g);
        if (one_gate) {
          for (int64_t i = 0; i < size; ++i) all_g[i] += g[i];
        } else {
          store_sums(p.grad_gate, p.gate.dtype, row / p.gate_rows.value * p.dim + begin, g, size);
        }
      }
    }
    if (columns && !p.scale_by_row && one_scale) store_scale_and_shift(0, all_a, all_c);
    if (gate && one_gate) store_sums(p.grad_gate, p.gate.dtype, begin, all_g, size);
    if (p.grad_weight != nullptr)
      store_sums(p.grad_weight, p.weight.dtype, begin, grad_weight, size);
    if (p.grad_bias != nullptr) store_sums(p.grad_bias, p.bias_dtype, begin, grad_bias, size);
  }
}

// From the type in the params to a template argument

FUSELAGE_HIDDEN void ada_norm_forward(const AdaNormForward& p, int64_t row_begin, int64_t row_end) {
  visit_dtype(p.dtype, [&](auto x) { ada_norm_forward_rows<decltype(x)>(p, row_begin, row_end); });
}

FUSELAGE_HIDDEN void ada_norm_backward(const AdaNormBackward& p, int64_t chunk_begin,
                                       int64_t chunk_end) {
  visit_dtype(p.dtype,
              [&](auto x) { ada_norm_backward_chunks_of<decltype(x)>(p, chunk_begin, chunk_end); });
}

FUSELAGE_HIDDEN void ada_norm_backward_sums(const AdaNormBackward& p, int64_t column_begin,
                                            int64_t column_end) {
  visit_dtype(p.dtype,
              [&](auto x) { ada_norm_backward_sums_of<decltype(x)>(p, column_begin, column_end); });
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(ada_norm_forward, (const AdaNormForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(ada_norm_backward, (const AdaNormBackward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(ada_norm_backward_sums, (const AdaNormBackward& p, int64_t begin, int64_t end),
                  (p, begin, end))

#if FUSELAGE_ISA_IS_BASELINE

int64_t ada_norm_backward_chunks(int64_t rows, int64_t group_rows) {
  const int64_t chunk = baseline::chunk_rows(rows);
  return group_rows == 0 ? 1 : (group_rows + chunk - 1) / chunk;
}

#endif

}  // namespace fuselage::cpu
