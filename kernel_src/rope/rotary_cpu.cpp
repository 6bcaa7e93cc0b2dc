// apply_rotary and qk_norm_rotary on the CPU: the formulas are in rope/rotary.h. A token's cos and
// sin are made into factors once, a strip of columns at a time, and used for all of its heads.
// Compiled once per instruction set: see common/cpu_isa.h.

#include "rope/rotary_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_rows.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "rope/rotary.h"
#include "rope/rotary_math.h"

namespace fuselage::cpu {

namespace FUSELAGE_ISA {

// Factors

// Columns whose factors are made at once: of either half of a pair, or of pairs side by side. Heads
// mostly have no more.
constexpr int64_t kRotaryStrip = 2048;

// Of a strip: out1 = x1 * cos1 + x2 * sin1 and out2 = x2 * cos2 + x1 * sin2. x2 are the columns
// half a rotation after those of x1; where interleaved x2 is x1 with neighbours exchanged, and
// out2 does not exist.
struct RotaryFactors {
  float cos1[kRotaryStrip], sin1[kRotaryStrip];
  float cos2[kRotaryStrip], sin2[kRotaryStrip];
};

FUSELAGE_INLINE Token rotary_token(const RotaryShape& shape, int64_t index) {
  return {index / shape.tokens, index % shape.tokens};
}

// Neighbouring lanes exchanged.
FUSELAGE_INLINE Floats rotary_swap(Floats value) {
  typedef uint64_t Pairs __attribute__((vector_size(FUSELAGE_VECTOR_BYTES)));
  const Pairs pairs = (Pairs)value;
  return (Floats)((pairs << 32) | (pairs >> 32));
}

// The columns that are rotated together, as one range of pairs' first elements or of all elements.
FUSELAGE_INLINE int64_t rotary_columns(const RotaryShape& shape) {
  return shape.interleaved ? shape.rotary_dim : shape.rotary_dim / 2;
}

// Factors of the columns [begin, begin + size).
template <class C>
static void rotary_make_factors(const RotaryTable& table, const RotaryShape& shape, Token at,
                                bool inverse, int64_t begin, int64_t size, RotaryFactors& f) {
  const TableRow row = table_row(table, at, position_of(table, at));
  const C* cos = static_cast<const C*>(table.cos) + row.cos;
  const C* sin = static_cast<const C*>(table.sin) + row.sin;
  if (shape.interleaved) {
    float* own = f.sin2;  // sin of each column
    if (table.half_width) {
      for_each_vector(begin / 2, (begin + size) / 2, [&](int64_t i, auto lanes) {
        store(f.cos2 + i - begin / 2, load(cos + i, lanes), lanes);
        store(f.sin1 + i - begin / 2, load(sin + i, lanes), lanes);
      });
      for (int64_t i = 0; i < size; ++i) {
        f.cos1[i] = f.cos2[i / 2];
        own[i] = f.sin1[i / 2];
      }
    } else {
      for_each_vector(0, size, [&](int64_t i, auto lanes) {
        store(f.cos1 + i, load(cos + begin + i, lanes), lanes);
        store(own + i, load(sin + begin + i, lanes), lanes);
      });
    }
    for (int64_t i = 0; i < size; i += 2)
      sine_factors(own[i], own[i + 1], inverse, f.sin1[i], f.sin1[i + 1]);
    return;
  }
  const int64_t second = table.half_width ? 0 : shape.rotary_dim / 2;
  for_each_vector(0, size, [&](int64_t i, auto lanes) {
    const int64_t column = begin + i;
    Floats factor1, factor2;
    sine_factors(load(sin + column, lanes), load(sin + second + column, lanes), inverse, factor1,
                 factor2);
    store(f.cos1 + i, load(cos + column, lanes), lanes);
    store(f.cos2 + i, load(cos + second + column, lanes), lanes);
    store(f.sin1 + i, factor1, lanes);
    store(f.sin2 + i, factor2, lanes);
  });
}

// from(column, lanes) gives what is to be rotated, to(column, value, lanes) takes the result, for
// columns [begin, begin + size) and those half a rotation after them.
template <class From, class To>
FUSELAGE_INLINE void rotary_rotate(const RotaryShape& shape, const RotaryFactors& f, int64_t begin,
                                   int64_t size, From from, To to) {
  if (shape.interleaved) {
    for_each_vector(0, size, [&](int64_t i, auto lanes) {
      const Floats x = from(begin + i, lanes);
      to(begin + i, x * load(f.cos1 + i, lanes) + rotary_swap(x) * load(f.sin1 + i, lanes), lanes);
    });
    return;
  }
  const int64_t half = shape.rotary_dim / 2;
  for_each_vector(0, size, [&](int64_t i, auto lanes) {
    const Floats x1 = from(begin + i, lanes), x2 = from(half + begin + i, lanes);
    to(begin + i, x1 * load(f.cos1 + i, lanes) + x2 * load(f.sin1 + i, lanes), lanes);
    to(half + begin + i, x2 * load(f.cos2 + i, lanes) + x1 * load(f.sin2 + i, lanes), lanes);
  });
}

// body(factors, begin, size) for the strips of a token: one, of no columns, where nothing is
// rotated.
template <class C, class Body>
FUSELAGE_INLINE void rotary_strips(const RotaryTable& table, const RotaryShape& shape, Token at,
                                   bool inverse, Body body) {
  RotaryFactors factors;
  const int64_t columns = rotary_columns(shape);
  for (int64_t begin = 0; begin == 0 || begin < columns; begin += kRotaryStrip) {
    const int64_t size = columns - begin < kRotaryStrip ? columns - begin : kRotaryStrip;
    rotary_make_factors<C>(table, shape, at, inverse, begin, size, factors);
    body(factors, begin, size);
  }
}

// apply_rotary

template <class T, class C>
static void rotary_tokens(const Rotary& p, int64_t token_begin, int64_t token_end) {
  const RotarySide* sides[2] = {&p.q, &p.k};
  for (int64_t index = token_begin; index < token_end; ++index) {
    const Token at = rotary_token(p.shape, index);
    rotary_strips<C>(
        p.table, p.shape, at, p.inverse,
        [&](const RotaryFactors& factors, int64_t begin, int64_t size) {
          for (const RotarySide* side : sides) {
            for (int64_t head = 0; head < side->heads; ++head) {
              const T* x = head_of<const T>(side->x, at, head);
              T* out = head_of<T>(side->out, at, head);
              rotary_rotate(
                  p.shape, factors, begin, size,
                  [&](int64_t i, auto lanes) { return load(x + i, lanes); },
                  [&](int64_t i, Floats value, auto lanes) { store(out + i, value, lanes); });
            }
          }
        });
    if (p.in_place || p.shape.rotary_dim == p.shape.dim) continue;
    for (const RotarySide* side : sides) {
      for (int64_t head = 0; head < side->heads; ++head) {
        __builtin_memcpy(head_of<T>(side->out, at, head) + p.shape.rotary_dim,
                         head_of<const T>(side->x, at, head) + p.shape.rotary_dim,
                         (p.shape.dim - p.shape.rotary_dim) * sizeof(T));
      }
    }
  }
}

// qk_norm_rotary

// weight_offset + weight, or one. NOTE: the offset is added on either branch. Past them, g++ 12
// fuses other products of the backward, and bits change.
template <class T, class Lanes>
FUSELAGE_INLINE Floats rotary_weight(const void* weight, DType dtype, float offset, int64_t i,
                                     Lanes lanes) {
  if (weight == nullptr) return broadcast(1);
  if (dtype == DType::float32) return offset + load(static_cast<const float*>(weight) + i, lanes);
  return offset + load(static_cast<const T*>(weight) + i, lanes);
}

template <class T>
FUSELAGE_INLINE float rotary_rstd(const T* x, int64_t dim, float eps) {
  return rstd_of(sum_squares(x, dim) / static_cast<double>(dim), eps);
}

template <class T, class C>
static void qk_norm_rotary_tokens(const QkNormRotary& p, int64_t token_begin, int64_t token_end) {
  const QkNormRotarySide* sides[2] = {&p.q, &p.k};
  for (int64_t index = token_begin; index < token_end; ++index) {
    const Token at = rotary_token(p.shape, index);
    rotary_strips<C>(p.table, p.shape, at, false,
                     [&](const RotaryFactors& factors, int64_t begin, int64_t size) {
                       for (const QkNormRotarySide* side : sides) {
                         for (int64_t head = 0; head < side->heads; ++head) {
                           const T* x = head_of<const T>(side->x, at, head);
                           T* out = head_of<T>(side->out, at, head);
                           const float rstd = rotary_rstd(x, p.shape.dim, p.eps);
                           const auto normed = [&](int64_t i, auto lanes) {
                             Floats n = load(x + i, lanes) * rstd;
                             if (p.cast_before_weight) n = round_to(T{}, n);
                             const Floats y = n * rotary_weight<T>(side->weight, side->weight_dtype,
                                                                   p.weight_offset, i, lanes);
                             return p.cast_before_weight ? round_to(T{}, y) : y;
                           };
                           const auto keep = [&](int64_t i, Floats value, auto lanes) {
                             store(out + i, value, lanes);
                           };
                           rotary_rotate(p.shape, factors, begin, size, normed, keep);
                           if (begin > 0) continue;
                           for_each_vector(
                               p.shape.rotary_dim, p.shape.dim,
                               [&](int64_t i, auto lanes) { keep(i, normed(i, lanes), lanes); });
                         }
                       }
                     });
  }
}

// The backward of one head. g, the rotated grad_out, is made twice: it is not kept. `factors` are
// those of the whole token, or of the last strip that was needed where a head has several.
template <class T, class C>
static void qk_norm_rotary_backward_head(const QkNormRotaryBackward& p,
                                         const QkNormRotaryBackwardSide& side, Token at,
                                         int64_t head, RotaryFactors& factors, float* partial) {
  const T* x = head_of<const T>(side.x, at, head);
  const T* grad_out = head_of<const T>(side.grad_out, at, head);
  const int64_t dim = p.shape.dim;
  const float rstd = rotary_rstd(x, dim, p.eps);
  const auto weight = [&](int64_t i, auto lanes) {
    return rotary_weight<T>(side.weight, side.weight_dtype, p.weight_offset, i, lanes);
  };
  // take(column, g, lanes) for all columns.
  const auto for_each_g = [&](auto take) {
    const auto given = [&](int64_t i, auto lanes) { return load(grad_out + i, lanes); };
    const int64_t columns = rotary_columns(p.shape);
    for (int64_t begin = 0; begin < columns; begin += kRotaryStrip) {
      const int64_t size = columns - begin < kRotaryStrip ? columns - begin : kRotaryStrip;
      if (columns > kRotaryStrip)
        rotary_make_factors<C>(p.table, p.shape, at, true, begin, size, factors);
      rotary_rotate(p.shape, factors, begin, size, given, take);
    }
    for_each_vector(p.shape.rotary_dim, dim,
                    [&](int64_t i, auto lanes) { take(i, given(i, lanes), lanes); });
  };
  double sum = 0;  // of g * f * xhat
  if (side.grad_x.data != nullptr) {
    for_each_g([&](int64_t i, Floats g, auto lanes) {
      // Lanes that are not there read as zero.
      sum += sum_lanes(g * weight(i, lanes) * load(x + i, lanes));
    });
  }
  const float mean = static_cast<float>(sum / static_cast<double>(dim)) * rstd;
  T* grad_x = side.grad_x.data == nullptr ? nullptr : head_of<T>(side.grad_x, at, head);
  for_each_g([&](int64_t i, Floats g, auto lanes) {
    const Floats xhat = load(x + i, lanes) * rstd;
    if (grad_x != nullptr) store(grad_x + i, rstd * (g * weight(i, lanes) - xhat * mean), lanes);
    if (partial != nullptr) accumulate(partial + i, g * xhat, false, lanes);
  });
}

template <class T, class C>
static void qk_norm_rotary_backward_chunks_of(const QkNormRotaryBackward& p, int64_t chunk_begin,
                                              int64_t chunk_end) {
  const int64_t tokens = p.shape.batch * p.shape.tokens;
  const QkNormRotaryBackwardSide* sides[2] = {&p.q, &p.k};
  RotaryFactors factors;
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    const auto partial_of = [&](const QkNormRotaryBackwardSide* side) {
      return side->partials == nullptr ? nullptr : side->partials + chunk * p.shape.dim;
    };
    for (const QkNormRotaryBackwardSide* side : sides) {
      float* partial = partial_of(side);
      if (partial != nullptr) set_zero(partial, p.shape.dim);
    }
    const RowRange range = rows_of_chunk(tokens, chunk, p.partial_count);
    for (int64_t index = range.begin; index < range.end; ++index) {
      const Token at = rotary_token(p.shape, index);
      const int64_t columns = rotary_columns(p.shape);
      if (columns <= kRotaryStrip)
        rotary_make_factors<C>(p.table, p.shape, at, true, 0, columns, factors);
      for (const QkNormRotaryBackwardSide* side : sides) {
        for (int64_t head = 0; head < side->heads; ++head)
          qk_norm_rotary_backward_head<T, C>(p, *side, at, head, factors, partial_of(side));
      }
    }
  }
}

// From the types in the params to template arguments

// visit(T{}, C{}). The binding lets no other combination through.
template <class Params, class Visit>
FUSELAGE_INLINE void rotary_visit_types(const Params& p, Visit visit) {
  visit_dtype(p.shape.dtype, [&](auto x) {
    if (p.table.dtype == DType::float32) return visit(x, float{});
    visit(x, x);
  });
}

FUSELAGE_HIDDEN void rotary(const Rotary& p, int64_t token_begin, int64_t token_end) {
  rotary_visit_types(p, [&](auto x, auto table) {
    rotary_tokens<decltype(x), decltype(table)>(p, token_begin, token_end);
  });
}

FUSELAGE_HIDDEN void qk_norm_rotary(const QkNormRotary& p, int64_t token_begin, int64_t token_end) {
  rotary_visit_types(p, [&](auto x, auto table) {
    qk_norm_rotary_tokens<decltype(x), decltype(table)>(p, token_begin, token_end);
  });
}

FUSELAGE_HIDDEN void qk_norm_rotary_backward(const QkNormRotaryBackward& p, int64_t chunk_begin,
                                             int64_t chunk_end) {
  rotary_visit_types(p, [&](auto x, auto table) {
    qk_norm_rotary_backward_chunks_of<decltype(x), decltype(table)>(p, chunk_begin, chunk_end);
  });
}

FUSELAGE_HIDDEN void qk_norm_rotary_backward_weight(const QkNormRotaryBackward& p,
                                                    int64_t column_begin, int64_t column_end) {
  const QkNormRotaryBackwardSide* sides[2] = {&p.q, &p.k};
  for (const QkNormRotaryBackwardSide* side : sides) {
    if (side->grad_weight == nullptr) continue;
    sum_columns(side->partials, p.partial_count, p.shape.dim, side->grad_weight, side->weight_dtype,
                column_begin, column_end);
  }
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(rotary, (const Rotary& p, int64_t begin, int64_t end), (p, begin, end))
FUSELAGE_PICK_ISA(qk_norm_rotary, (const QkNormRotary& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(qk_norm_rotary_backward,
                  (const QkNormRotaryBackward& p, int64_t begin, int64_t end), (p, begin, end))
FUSELAGE_PICK_ISA(qk_norm_rotary_backward_weight,
                  (const QkNormRotaryBackward& p, int64_t begin, int64_t end), (p, begin, end))

#if FUSELAGE_ISA_IS_BASELINE

// Heads are rows: few of them keep the float32 sum over a chunk short.
int64_t qk_norm_rotary_backward_chunks(const RotaryShape& shape, int64_t heads) {
  constexpr int64_t kMostHeads = 256;
  const int64_t tokens = shape.batch * shape.tokens;
  const int64_t most = heads < kMostHeads ? kMostHeads / heads : 1;
  const int64_t chunk = baseline::chunk_rows(tokens, 1, most);
  return tokens == 0 ? 1 : (tokens + chunk - 1) / chunk;
}

int64_t rotary_position_outside(const RotaryTable& table, const RotaryShape& shape) {
  for (int64_t index = 0; index < shape.batch * shape.tokens; ++index) {
    const int64_t position = baseline::position_of(table, baseline::rotary_token(shape, index));
    if (position < 0 || position >= table.rows) return index;
  }
  return -1;
}

#endif

}  // namespace fuselage::cpu
