// apply_rotary and qk_norm_rotary on the CPU: the formulas are in rope/rotary.h. A token's cos and
// sin are made into factors once, a strip of columns at a time, and used for all of its heads.
// Compiled once per instruction set: see isa.h.

#include "cpu/rotary.h"

#include <cstdint>

#include "common/dtype.h"
#include "cpu/isa.h"
#include "cpu/vector.h"
#include "rope/rotary.h"

namespace fuselage::cpu {

struct RotaryFunctions {
  void (*rotate)(const Rotary& p, int64_t token_begin, int64_t token_end);
  void (*norm)(const QkNormRotary& p, int64_t token_begin, int64_t token_end);
  void (*backward)(const QkNormRotaryBackward& p, int64_t chunk_begin, int64_t chunk_end);
};

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

struct RotaryToken {
  int64_t batch, token;
};

FUSELAGE_INLINE RotaryToken rotary_token(const RotaryShape& shape, int64_t index) {
  return {index / shape.tokens, index % shape.tokens};
}

template <class T>
FUSELAGE_INLINE T* rotary_head(const Heads& heads, RotaryToken at, int64_t head) {
  return static_cast<T*>(heads.data) + at.batch * heads.batch_stride +
         at.token * heads.token_stride + head * heads.head_stride;
}

FUSELAGE_INLINE int64_t rotary_position(const RotaryTable& table, RotaryToken at) {
  int64_t position = table.offset + table.step * at.token;
  if (table.positions != nullptr) {
    const int64_t i =
        at.batch * table.position_batch_stride + at.token * table.position_token_stride;
    position += table.narrow_positions ? static_cast<const int32_t*>(table.positions)[i]
                                       : static_cast<const int64_t*>(table.positions)[i];
  }
  return position;
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
static void rotary_make_factors(const RotaryTable& table, const RotaryShape& shape, RotaryToken at,
                                bool inverse, int64_t begin, int64_t size, RotaryFactors& f) {
  const int64_t position = rotary_position(table, at);
  const C* cos = static_cast<const C*>(table.cos) + at.batch * table.cos_batch_stride +
                 position * table.cos_stride;
  const C* sin = static_cast<const C*>(table.sin) + at.batch * table.sin_batch_stride +
                 position * table.sin_stride;
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
    for (int64_t i = 0; i < size; i += 2) {
      f.sin1[i] = inverse ? own[i + 1] : -own[i];
      f.sin1[i + 1] = inverse ? -own[i] : own[i + 1];
    }
    return;
  }
  const int64_t second = table.half_width ? 0 : shape.rotary_dim / 2;
  for_each_vector(0, size, [&](int64_t i, auto lanes) {
    const int64_t column = begin + i;
    const Floats sin1 = load(sin + column, lanes), sin2 = load(sin + second + column, lanes);
    store(f.cos1 + i, load(cos + column, lanes), lanes);
    store(f.cos2 + i, load(cos + second + column, lanes), lanes);
    store(f.sin1 + i, inverse ? sin2 : -sin1, lanes);
    store(f.sin2 + i, inverse ? -sin1 : sin2, lanes);
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
FUSELAGE_INLINE void rotary_strips(const RotaryTable& table, const RotaryShape& shape,
                                   RotaryToken at, bool inverse, Body body) {
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
    const RotaryToken at = rotary_token(p.shape, index);
    rotary_strips<C>(
        p.table, p.shape, at, p.inverse,
        [&](const RotaryFactors& factors, int64_t begin, int64_t size) {
          for (const RotarySide* side : sides) {
            for (int64_t head = 0; head < side->heads; ++head) {
              const T* x = rotary_head<const T>(side->x, at, head);
              T* out = rotary_head<T>(side->out, at, head);
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
        __builtin_memcpy(rotary_head<T>(side->out, at, head) + p.shape.rotary_dim,
                         rotary_head<const T>(side->x, at, head) + p.shape.rotary_dim,
                         (p.shape.dim - p.shape.rotary_dim) * sizeof(T));
      }
    }
  }
}

// qk_norm_rotary

// weight_offset + weight, or one.
template <class T, class Lanes>
FUSELAGE_INLINE Floats rotary_weight(const void* weight, DType dtype, float offset, int64_t i,
                                     Lanes lanes) {
  if (weight == nullptr) return broadcast(1);
  if (dtype == DType::float32) return offset + load(static_cast<const float*>(weight) + i, lanes);
  return offset + load(static_cast<const T*>(weight) + i, lanes);
}

template <class T>
FUSELAGE_INLINE float rotary_rstd(const T* x, int64_t dim, float eps) {
  const double sum = sum_vectors(dim, [&](int64_t i, auto lanes) {
    const Floats value = load(x + i, lanes);
    return value * value;
  });
  return 1 / __builtin_sqrtf(static_cast<float>(sum / static_cast<double>(dim)) + eps);
}

template <class T, class C>
static void qk_norm_rotary_tokens(const QkNormRotary& p, int64_t token_begin, int64_t token_end) {
  const QkNormRotarySide* sides[2] = {&p.q, &p.k};
  for (int64_t index = token_begin; index < token_end; ++index) {
    const RotaryToken at = rotary_token(p.shape, index);
    rotary_strips<C>(p.table, p.shape, at, false,
                     [&](const RotaryFactors& factors, int64_t begin, int64_t size) {
                       for (const QkNormRotarySide* side : sides) {
                         for (int64_t head = 0; head < side->heads; ++head) {
                           const T* x = rotary_head<const T>(side->x, at, head);
                           T* out = rotary_head<T>(side->out, at, head);
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
                                         const QkNormRotaryBackwardSide& side, RotaryToken at,
                                         int64_t head, RotaryFactors& factors, float* partial) {
  const T* x = rotary_head<const T>(side.x, at, head);
  const T* grad_out = rotary_head<const T>(side.grad_out, at, head);
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
  T* grad_x = side.grad_x.data == nullptr ? nullptr : rotary_head<T>(side.grad_x, at, head);
  for_each_g([&](int64_t i, Floats g, auto lanes) {
    const Floats xhat = load(x + i, lanes) * rstd;
    if (grad_x != nullptr) store(grad_x + i, rstd * (g * weight(i, lanes) - xhat * mean), lanes);
    if (partial != nullptr) store(partial + i, load(partial + i, lanes) + g * xhat, lanes);
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
      if (partial == nullptr) continue;
      for_each_vector(0, p.shape.dim,
                      [&](int64_t i, auto lanes) { store(partial + i, Floats{}, lanes); });
    }
    const int64_t end = tokens * (chunk + 1) / p.partial_count;
    for (int64_t index = tokens * chunk / p.partial_count; index < end; ++index) {
      const RotaryToken at = rotary_token(p.shape, index);
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
  const bool wide = p.table.dtype == DType::float32;
  switch (p.shape.dtype) {
    case DType::float32: return visit(float{}, float{});
    case DType::float16: return wide ? visit(Float16{}, float{}) : visit(Float16{}, Float16{});
    case DType::bfloat16: return wide ? visit(BFloat16{}, float{}) : visit(BFloat16{}, BFloat16{});
  }
}

static void rotary(const Rotary& p, int64_t token_begin, int64_t token_end) {
  rotary_visit_types(p, [&](auto x, auto table) {
    rotary_tokens<decltype(x), decltype(table)>(p, token_begin, token_end);
  });
}

static void qk_norm_rotary(const QkNormRotary& p, int64_t token_begin, int64_t token_end) {
  rotary_visit_types(p, [&](auto x, auto table) {
    qk_norm_rotary_tokens<decltype(x), decltype(table)>(p, token_begin, token_end);
  });
}

static void qk_norm_rotary_backward(const QkNormRotaryBackward& p, int64_t chunk_begin,
                                    int64_t chunk_end) {
  rotary_visit_types(p, [&](auto x, auto table) {
    qk_norm_rotary_backward_chunks_of<decltype(x), decltype(table)>(p, chunk_begin, chunk_end);
  });
}

extern FUSELAGE_HIDDEN const RotaryFunctions rotary_functions;
const RotaryFunctions rotary_functions = {rotary, qk_norm_rotary, qk_norm_rotary_backward};

}  // namespace FUSELAGE_ISA

// The public functions

#if FUSELAGE_ISA_IS_BASELINE

FUSELAGE_PICK_ISA(RotaryFunctions, rotary_functions)

void rotary(const Rotary& p, int64_t token_begin, int64_t token_end) {
  functions_of_this_cpu().rotate(p, token_begin, token_end);
}

void qk_norm_rotary(const QkNormRotary& p, int64_t token_begin, int64_t token_end) {
  functions_of_this_cpu().norm(p, token_begin, token_end);
}

void qk_norm_rotary_backward(const QkNormRotaryBackward& p, int64_t chunk_begin,
                             int64_t chunk_end) {
  functions_of_this_cpu().backward(p, chunk_begin, chunk_end);
}

// In float64: there can be many chunks.
void qk_norm_rotary_backward_weight(const QkNormRotaryBackward& p, int64_t column_begin,
                                    int64_t column_end) {
  const QkNormRotaryBackwardSide* sides[2] = {&p.q, &p.k};
  for (const QkNormRotaryBackwardSide* side : sides) {
    if (side->grad_weight == nullptr) continue;
    for (int64_t column = column_begin; column < column_end; ++column) {
      double total = 0;
      for (int64_t chunk = 0; chunk < p.partial_count; ++chunk)
        total += side->partials[chunk * p.shape.dim + column];
      const baseline::Floats sum = baseline::broadcast(static_cast<float>(total));
      const baseline::FirstLanes one{1};
      void* to = side->grad_weight;
      switch (side->weight_dtype) {
        case DType::float32: baseline::store(static_cast<float*>(to) + column, sum, one); break;
        case DType::float16:
          baseline::store(static_cast<baseline::Float16*>(to) + column, sum, one);
          break;
        case DType::bfloat16:
          baseline::store(static_cast<baseline::BFloat16*>(to) + column, sum, one);
          break;
      }
    }
  }
}

// Enough chunks for many cores. The most heads keep the float32 sum over a chunk short.
int64_t qk_norm_rotary_backward_chunks(const RotaryShape& shape, int64_t heads) {
  constexpr int64_t kChunks = 64, kMostHeads = 256;
  const int64_t tokens = shape.batch * shape.tokens;
  int64_t chunk_tokens = (tokens + kChunks - 1) / kChunks;
  if (chunk_tokens > kMostHeads / heads) chunk_tokens = kMostHeads / heads;
  if (chunk_tokens < 1) chunk_tokens = 1;
  return tokens == 0 ? 1 : (tokens + chunk_tokens - 1) / chunk_tokens;
}

int64_t rotary_position_outside(const RotaryTable& table, const RotaryShape& shape) {
  for (int64_t index = 0; index < shape.batch * shape.tokens; ++index) {
    const int64_t position = baseline::rotary_position(table, baseline::rotary_token(shape, index));
    if (position < 0 || position >= table.rows) return index;
  }
  return -1;
}

#endif

}  // namespace fuselage::cpu
