// The gate family on the CPU, forward and backward: formulas in gate/activation.h. Compiled once
// per instruction set: see common/cpu_isa.h.

#include "gate/activation_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_math.h"
#include "common/cpu_rows.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "gate/activation.h"
#include "gate/activation_math.h"

namespace fuselage::cpu {

namespace FUSELAGE_ISA {

// Two vectors whose elements take turns in memory.
struct ActivationPair {
  Floats x, y;
};

// The lanes of a vector of pairs that hold the first `count` numbers of 2 * kLanes.
template <class T>
FUSELAGE_INLINE Floats activation_load_some(const T* from, int count) {
  if (count >= kLanes) return load(from, AllLanes{});
  if (count <= 0) return Floats{};
  return load(from, FirstLanes{count});
}

template <class T>
FUSELAGE_INLINE void activation_store_some(T* to, Floats value, int count) {
  if (count >= kLanes) return store(to, value, AllLanes{});
  if (count > 0) store(to, value, FirstLanes{count});
}

template <class T, class Lanes>
FUSELAGE_INLINE ActivationPair activation_load_pairs(const T* from, Lanes lanes) {
  const int count = 2 * static_cast<int>(count_of(lanes));
  float turns[2 * kLanes], x[kLanes], y[kLanes];
  store(turns, activation_load_some(from, count), AllLanes{});
  store(turns + kLanes, activation_load_some(from + kLanes, count - kLanes), AllLanes{});
  for (int i = 0; i < kLanes; ++i) {
    x[i] = turns[2 * i];
    y[i] = turns[2 * i + 1];
  }
  return {load(x, AllLanes{}), load(y, AllLanes{})};
}

template <class T, class Lanes>
FUSELAGE_INLINE void activation_store_pairs(T* to, const ActivationPair& pair, Lanes lanes) {
  const int count = 2 * static_cast<int>(count_of(lanes));
  float turns[2 * kLanes], x[kLanes], y[kLanes];
  store(x, pair.x, AllLanes{});
  store(y, pair.y, AllLanes{});
  for (int i = 0; i < kLanes; ++i) {
    turns[2 * i] = x[i];
    turns[2 * i + 1] = y[i];
  }
  activation_store_some(to, load(turns, AllLanes{}), count);
  activation_store_some(to + kLanes, load(turns + kLanes, AllLanes{}), count - kLanes);
}

// The inputs of the columns from i on, with the bias added; what is not there is zero. Without
// kBias there is none.
template <class Formula, bool kBias, class T, class Params, class Lanes>
FUSELAGE_INLINE ActivationPair activation_load(const Params& p, const T* x, const T* y, int64_t i,
                                               Lanes lanes) {
  if (!Formula::kHasBias && p.interleaved) return activation_load_pairs(x + 2 * i, lanes);
  ActivationPair in = {load(x + i, lanes), Floats{}};
  if (Formula::kHasY && y != nullptr) in.y = load(y + i, lanes);
  if (Formula::kHasBias && kBias && p.bias != nullptr) {
    in.x += load_as<T>(p.bias, p.bias_dtype, i, lanes);
  }
  return in;
}

// Row `row` of a tensor that may be null.
template <class T>
FUSELAGE_INLINE const T* activation_row(const void* tensor, int64_t row, int64_t stride) {
  return tensor == nullptr ? nullptr : static_cast<const T*>(tensor) + row * stride;
}
template <class T>
FUSELAGE_INLINE T* activation_row(void* tensor, int64_t row, int64_t stride) {
  return tensor == nullptr ? nullptr : static_cast<T*>(tensor) + row * stride;
}

// Narrow rows are put side by side, as many as this, as if they were one: there would be little in
// a row for a vector. Those without gaps are also worked on as one.
constexpr int64_t kActivationWideColumns = 512;
FUSELAGE_INLINE int64_t activation_rows_side_by_side(int64_t dim) {
  return dim <= kActivationWideColumns / 2 ? kActivationWideColumns / dim : 1;
}

FUSELAGE_INLINE int64_t activation_rows_at_once(const ActivationForward& p) {
  const bool gapless =
      p.x_stride == p.dim && p.out_stride == p.dim && (p.y == nullptr || p.y_stride == p.dim);
  return gapless ? activation_rows_side_by_side(p.dim) : 1;
}
FUSELAGE_INLINE int64_t activation_rows_at_once(const ActivationBackward& p) {
  const bool gapless = p.grad_out_stride == p.dim && (p.x == nullptr || p.x_stride == p.dim) &&
                       (p.y == nullptr || p.y_stride == p.dim) &&
                       (p.grad_x == nullptr || p.grad_x_stride == p.dim) &&
                       (p.grad_y == nullptr || p.grad_y_stride == p.dim);
  return gapless ? activation_rows_side_by_side(p.dim) : 1;
}

// Puts in place of the bias of narrow rows one of float32, repeated for each of `at_once` rows.
template <class T, class Params>
FUSELAGE_INLINE void activation_repeat_bias(Params& p, int64_t at_once,
                                            float (&repeated)[kActivationWideColumns]) {
  if (p.dim > kActivationWideColumns || p.bias == nullptr) return;
  for (int64_t row = 0; row < at_once; ++row) {
    for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
      store(repeated + row * p.dim + i, load_as<T>(p.bias, p.bias_dtype, i, lanes), lanes);
    });
  }
  p.bias = repeated;
  p.bias_dtype = DType::float32;
}

// body(row, first column, end column) for the pieces [begin, end). Of rows of which there are
// several at once the columns go on into the next.
template <class Body>
FUSELAGE_INLINE void activation_for_each_piece(int64_t dim, int64_t at_once, int64_t begin,
                                               int64_t end, Body body) {
  const int64_t pieces_in_row = (dim + kActivationColumns - 1) / kActivationColumns;
  for (int64_t piece = begin; piece < end; piece += at_once) {
    const int64_t first = piece % pieces_in_row * kActivationColumns;
    const int64_t rows = end - piece < at_once ? end - piece : at_once;
    const int64_t left = rows * dim - first;
    body(piece / pieces_in_row, first,
         first + (left < kActivationColumns ? left : kActivationColumns));
  }
}

// Stores value(i, lanes) in the columns [first, last).
template <class T, class Value>
FUSELAGE_INLINE void activation_store_each(T* out, int64_t first, int64_t last, Value value) {
  for_each_vector(first, last,
                  [&](int64_t i, auto lanes) { store(out + i, value(i, lanes), lanes); });
}

// Rounding to bfloat16 takes a second pass over a block in the first cache: at the end of a long
// chain of instructions it keeps the CPU from overlapping enough of them (gelu: 20.5 cycles a
// vector of AVX-512 in one pass, 16.8 in two).
template <class Value>
FUSELAGE_INLINE void activation_store_each(BFloat16* out, int64_t first, int64_t last,
                                           Value value) {
  constexpr int64_t kBlock = 512;
  float block[kBlock];
  for (int64_t begin = first; begin < last; begin += kBlock) {
    const int64_t end = last - begin < kBlock ? last : begin + kBlock;
    for_each_vector(begin, end, [&](int64_t i, auto lanes) {
      store(block + (i - begin), value(i, lanes), lanes);
    });
    for_each_vector(begin, end, [&](int64_t i, auto lanes) {
      store(out + i, load(block + (i - begin), lanes), lanes);
    });
  }
}

// A formula without y has no bias either.
template <class T, class Formula>
__attribute__((noinline)) static void activation_forward_pieces(const ActivationForward& params,
                                                                int64_t begin, int64_t end) {
  ActivationForward p = params;  // a copy: no store may change it
  const Scalars scalars = {p.alpha, p.limit};
  constexpr bool kBias = Formula::kHasBias && Formula::kHasY;
  const int64_t at_once = kBias ? activation_rows_at_once(p) : 1;
  float bias[kActivationWideColumns];
  if constexpr (kBias) activation_repeat_bias<T>(p, at_once, bias);
  const auto piece = [&](int64_t row, int64_t first, int64_t last) {
    const T* x = activation_row<T>(p.x, row, p.x_stride);
    const T* y = activation_row<T>(p.y, row, p.y_stride);
    T* out = activation_row<T>(p.out, row, p.out_stride);
    const auto value = [&](int64_t i, auto lanes) {
      const ActivationPair in = activation_load<Formula, Formula::kHasY>(p, x, y, i, lanes);
      return Formula::forward(in.x, in.y, scalars);
    };
    activation_store_each(out, first, last, value);
  };
  activation_for_each_piece(p.dim, at_once, begin, end, piece);
}

// Columns [first, last) of a row. Adds grad_x to `partial` [dim], unless that is null; `fresh`: it
// holds nothing yet. One row at a time: the tensors of several would be so many addresses a power
// of two apart that they drive each other from the first cache (1024 columns of bfloat16 with y,
// four rows: 2.3 times the time).
template <bool kBias, class T, class Formula>
FUSELAGE_INLINE void activation_backward_row(const ActivationBackward& p, int64_t row,
                                             int64_t first, int64_t last, float* partial,
                                             bool fresh) {
  const Scalars scalars = {p.alpha, p.limit};
  const T* grad_out = activation_row<T>(p.grad_out, row, p.grad_out_stride);
  const T* x = activation_row<T>(p.x, row, p.x_stride);
  const T* y = activation_row<T>(p.y, row, p.y_stride);
  T* grad_x = activation_row<T>(p.grad_x, row, p.grad_x_stride);
  T* grad_y = activation_row<T>(p.grad_y, row, p.grad_y_stride);
  for_each_vector(first, last, [&](int64_t i, auto lanes) {
    ActivationPair in = {}, grad;
    if constexpr (Formula::kReadsInputs) in = activation_load<Formula, kBias>(p, x, y, i, lanes);
    Formula::backward(load(grad_out + i, lanes), in.x, in.y, scalars, grad.x, grad.y);
    if (partial != nullptr) accumulate(partial + i, grad.x, fresh, lanes);
    if (!Formula::kHasBias && p.interleaved)
      return activation_store_pairs(grad_x + 2 * i, grad, lanes);
    if (grad_x != nullptr) store(grad_x + i, grad.x, lanes);
    if (Formula::kHasY && grad_y != nullptr) store(grad_y + i, grad.y, lanes);
  });
}

// A formula without y has no bias either.
template <class T, class Formula>
__attribute__((noinline)) static void activation_backward_pieces(const ActivationBackward& params,
                                                                 int64_t begin, int64_t end) {
  ActivationBackward p = params;
  constexpr bool kBias = Formula::kHasBias && Formula::kHasY;
  const int64_t at_once = kBias ? activation_rows_at_once(p) : 1;
  float bias[kActivationWideColumns];
  if constexpr (kBias) activation_repeat_bias<T>(p, at_once, bias);
  const auto piece = [&](int64_t row, int64_t first, int64_t last) {
    activation_backward_row<kBias, T, Formula>(p, row, first, last, nullptr, true);
  };
  activation_for_each_piece(p.dim, at_once, begin, end, piece);
}

// Rows with gaps are summed side by side too, so that the sums have the same bits.
template <class T, class Formula>
__attribute__((noinline)) static void activation_backward_chunks(const ActivationBackward& params,
                                                                 int64_t begin, int64_t end) {
  ActivationBackward p = params;
  const int64_t at_once = activation_rows_at_once(p), abreast = activation_rows_side_by_side(p.dim);
  float bias[kActivationWideColumns], wide[kActivationWideColumns];
  activation_repeat_bias<T>(p, at_once, bias);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const RowRange rows = rows_of_chunk(p.rows, chunk, p.partial_count);
    float* partial = p.partials + chunk * p.dim;
    float* sums = abreast > 1 ? wide : partial;
    const int64_t row_count = rows.end - rows.begin;
    for (int64_t row = 0, place = 0; row < row_count; row += at_once, place += at_once) {
      const int64_t count = row_count - row < at_once ? row_count - row : at_once;
      if (place == abreast) place = 0;
      activation_backward_row<true, T, Formula>(p, rows.begin + row, 0, count * p.dim,
                                                sums + place * p.dim, row < abreast);
    }
    if (abreast == 1) continue;
    for (int64_t k = 0; k < abreast && k < row_count; ++k) {
      for_each_vector(0, p.dim, [&](int64_t i, auto lanes) {
        accumulate(partial + i, load(wide + k * p.dim + i, lanes), k == 0, lanes);
      });
    }
  }
}

// From the types in the params to template arguments: visit(T{}, Formula{}). The binding lets no
// other combination through. has_y: of the formula `add`.

template <class M, bool kHasY, class Visit>
FUSELAGE_INLINE void activation_visit_add(Activation activation, Visit visit) {
  switch (activation) {
    case Activation::none: return visit(AddFormula<M, Activation::none, kHasY>{});
    case Activation::relu: return visit(AddFormula<M, Activation::relu, kHasY>{});
    case Activation::sigmoid: return visit(AddFormula<M, Activation::sigmoid, kHasY>{});
    case Activation::tanh: return visit(AddFormula<M, Activation::tanh, kHasY>{});
    case Activation::gelu: return visit(AddFormula<M, Activation::gelu, kHasY>{});
    case Activation::gelu_tanh: return visit(AddFormula<M, Activation::gelu_tanh, kHasY>{});
    case Activation::gelu_quick: return visit(AddFormula<M, Activation::gelu_quick, kHasY>{});
    case Activation::silu: return visit(AddFormula<M, Activation::silu, kHasY>{});
    case Activation::relu2: return visit(AddFormula<M, Activation::relu2, kHasY>{});
  }
}

template <class M, class Params, class Visit>
FUSELAGE_INLINE void activation_visit_gate(const Params& p, Visit visit) {
  if (p.formula == Formula::clamped_gate) return visit(ClampedGateFormula<M>{});
  switch (p.activation) {
    case Activation::relu: return visit(GateFormula<M, Activation::relu>{});
    case Activation::gelu: return visit(GateFormula<M, Activation::gelu>{});
    case Activation::gelu_tanh: return visit(GateFormula<M, Activation::gelu_tanh>{});
    case Activation::silu: return visit(GateFormula<M, Activation::silu>{});
    default: __builtin_trap();
  }
}

template <class Params, class Visit>
FUSELAGE_INLINE void activation_visit(const Params& p, bool has_y, Visit visit) {
  visit_dtype(p.dtype, [&](auto t) {
    using Math = CpuMath<(sizeof(t) < sizeof(float))>;
    const auto with_dtype = [&](auto formula) { visit(t, formula); };
    if (p.formula != Formula::add) return activation_visit_gate<Math>(p, with_dtype);
    has_y ? activation_visit_add<Math, true>(p.activation, with_dtype)
          : activation_visit_add<Math, false>(p.activation, with_dtype);
  });
}

FUSELAGE_HIDDEN void activation_forward(const ActivationForward& p, int64_t begin, int64_t end) {
  activation_visit(p, p.y != nullptr || p.bias != nullptr, [&](auto t, auto formula) {
    activation_forward_pieces<decltype(t), decltype(formula)>(p, begin, end);
  });
}

FUSELAGE_HIDDEN void activation_backward(const ActivationBackward& p, int64_t begin, int64_t end) {
  const bool has_y = p.y != nullptr || p.grad_y != nullptr || p.bias != nullptr;
  activation_visit(p, has_y, [&](auto t, auto formula) {
    activation_backward_pieces<decltype(t), decltype(formula)>(p, begin, end);
  });
}

FUSELAGE_HIDDEN void activation_backward_chunk(const ActivationBackward& p, int64_t begin,
                                               int64_t end) {
  activation_visit(p, p.y != nullptr || p.grad_y != nullptr, [&](auto t, auto formula) {
    if constexpr (decltype(formula)::kHasBias)
      activation_backward_chunks<decltype(t), decltype(formula)>(p, begin, end);
  });
}

FUSELAGE_HIDDEN void activation_backward_bias(const ActivationBackward& p, int64_t begin,
                                              int64_t end) {
  sum_columns(p.partials, p.partial_count, p.dim, p.grad_bias, p.bias_dtype, begin, end);
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(activation_forward, (const ActivationForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(activation_backward, (const ActivationBackward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(activation_backward_chunk,
                  (const ActivationBackward& p, int64_t begin, int64_t end), (p, begin, end))
FUSELAGE_PICK_ISA(activation_backward_bias,
                  (const ActivationBackward& p, int64_t begin, int64_t end), (p, begin, end))

#if FUSELAGE_ISA_IS_BASELINE

int64_t activation_pieces(int64_t rows, int64_t dim) {
  return rows * ((dim + kActivationColumns - 1) / kActivationColumns);
}

// A chunk has enough elements to be worth a task.
int64_t activation_backward_chunks(int64_t rows, int64_t dim) {
  constexpr int64_t kLeastRows = 8, kLeastElements = 32768;
  const int64_t rows_of_a_task = kLeastElements / dim;
  const int64_t least = rows_of_a_task > kLeastRows ? rows_of_a_task : kLeastRows;
  // Of narrow rows more than others: as many as these are summed side by side.
  const int64_t most = least > 128 ? least : 128;
  const int64_t chunk = baseline::chunk_rows(rows, least, most);
  return (rows + chunk - 1) / chunk;
}

#endif

}  // namespace fuselage::cpu
