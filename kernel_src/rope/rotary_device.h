// What the kernels of rope/ share on the device: the columns of a thread in a head, their cos and
// sin, and the rotation itself.
#pragma once

#include <type_traits>

#include "common/dispatch.h"
#include "common/quotient.h"
#include "common/vector.h"
#include "rope/rotary_math.h"
#include "rope/rotary_policy.h"

namespace fuselage {

// The two vectors of one item (see HeadLayout), as rows of `first_size` and `second_size` columns
// from `first` and `second` of the head on. In either the item begins at `column`; past the end
// it has nothing.
struct Item {
  int first, first_size, second, second_size, column;
  bool rotated;
};

__device__ __forceinline__ Item item_of(const HeadLayout& layout, const RotaryShape& shape,
                                        int index, int vector) {
  const int rotary_dim = static_cast<int>(shape.rotary_dim), dim = static_cast<int>(shape.dim);
  if (index < layout.rotated_items)
    return {0,
            layout.rotated_half,
            layout.rotated_half,
            rotary_dim - layout.rotated_half,
            index * vector,
            true};
  const int second = rotary_dim + layout.rest_half;
  const int rest_size = layout.rest_items > 0 ? layout.rest_half : 0;
  return {rotary_dim,
          rest_size,
          second,
          layout.rest_items > 0 ? dim - second : 0,
          (index - layout.rotated_items) * vector,
          false};
}

__device__ __forceinline__ Token token_of(const Divisor& tokens, int64_t index) {
  const int64_t batch = quotient(index, tokens);
  return {batch, index - batch * tokens.value};
}

// Columns [column, column + N) of a row of `size` that starts anywhere; zero past its end.
template <int N, typename C>
__device__ __forceinline__ void unaligned_columns(const C* row, int column, int size,
                                                  float (&values)[N]) {
  using V = Vector<C, N>;
  if (column + N <= size && V::shift_of(row + column) == 0) {
    V::load(row + column).to_floats(values);
    return;
  }
  V::load_elements(row, column, size).to_floats(values);
}

// Columns from `column1` and from `column2` on of a token's cos and sin, of `size1` and `size2`
// columns. All loads come before the first conversion, which would wait for its own.
template <Starts kStarts, int N, typename C>
__device__ __forceinline__ void table_columns(const C* cos, const C* sin, int column1, int column2,
                                              int size1, int size2, float (&cos1)[N],
                                              float (&cos2)[N], float (&sin1)[N],
                                              float (&sin2)[N]) {
  if constexpr (kStarts != Starts::anywhere) {
    using V = Vector<C, N>;
    const auto load = [](const C* row, int column, int size) {
      if constexpr (kStarts == Starts::words) return V::load_words(row, column, size);
      return V::load(row + min(column, size - N));  // what is past the end belongs to no element
    };
    const V c1 = load(cos, column1, size1), c2 = load(cos, column2, size2);
    const V s1 = load(sin, column1, size1), s2 = load(sin, column2, size2);
    c1.to_floats(cos1);
    c2.to_floats(cos2);
    s1.to_floats(sin1);
    s2.to_floats(sin2);
  } else {
    unaligned_columns(cos, column1, size1, cos1);
    unaligned_columns(cos, column2, size2, cos2);
    unaligned_columns(sin, column1, size1, sin1);
    unaligned_columns(sin, column2, size2, sin2);
  }
}

// The factors of an item: out1 = x1 * cos1 + x2 * sin1 and out2 = x2 * cos2 + x1 * sin2, where x1
// and x2 are the item's vectors, or where interleaved each of them and itself with neighbours
// exchanged. The signs of the rotation, or of its transpose, are in sin1 and sin2.
template <int N>
struct Rotation {
  float cos1[N], cos2[N], sin1[N], sin2[N];
};

// A token's row of the tables. Of a position that they do not have it is the first one.
struct KnownRow {
  TableRow start;
  bool known;
};

__device__ __forceinline__ KnownRow known_row(const RotaryTable& table, const Token& at) {
  int64_t position = position_of(table, at);
  const bool known = position >= 0 && position < table.rows;
  if (!known) position = 0;
  return {table_row(table, at, position), known};
}

// Of N of the columns of an item's vectors, from `column` on.
template <Starts kStarts, typename C, int N>
__device__ __forceinline__ void load_rotation_as(const RotaryTable& table, const RotaryShape& shape,
                                                 const KnownRow& row, const Item& item, int column,
                                                 bool interleaved, bool inverse, Rotation<N>& r) {
  const C* cos = static_cast<const C*>(table.cos) + row.start.cos;
  const C* sin = static_cast<const C*>(table.sin) + row.start.sin;
  const int dim = static_cast<int>(shape.rotary_dim);
  float first[N], second[N];  // sin of either vector's own columns
  if (interleaved) {
    const int behind = item.first_size;  // where the first vectors end and the second begin
    if (table.half_width) {
      // Neighbours share a column.
      float c1[N / 2], c2[N / 2], s1[N / 2], s2[N / 2];
      table_columns<kStarts>(cos, sin, column / 2, (behind + column) / 2, behind / 2, dim / 2, c1,
                             c2, s1, s2);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        r.cos1[i] = c1[i / 2];
        r.cos2[i] = c2[i / 2];
        first[i] = s1[i / 2];
        second[i] = s2[i / 2];
      }
    } else {
      table_columns<kStarts>(cos, sin, column, behind + column, behind, dim, r.cos1, r.cos2, first,
                             second);
    }
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      r.sin1[i] = inverse ? first[i + 1] : -first[i];
      r.sin1[i + 1] = inverse ? -first[i] : first[i + 1];
      r.sin2[i] = inverse ? second[i + 1] : -second[i];
      r.sin2[i + 1] = inverse ? -second[i] : second[i + 1];
    }
  } else {
    const int half = dim / 2, second_start = table.half_width ? 0 : half;
    table_columns<kStarts>(cos, sin, column, second_start + column, half, second_start + half,
                           r.cos1, r.cos2, first, second);
#pragma unroll
    for (int i = 0; i < N; ++i) sine_factors(first[i], second[i], inverse, r.sin1[i], r.sin2[i]);
  }
  if (!row.known) {
#pragma unroll
    for (int i = 0; i < N; ++i) r.cos1[i] = r.cos2[i] = __uint_as_float(0x7fc00000u);
  }
}

template <typename T, Starts kStarts, int N>
__device__ __forceinline__ void load_rotation(const RotaryTable& table, const RotaryShape& shape,
                                              const KnownRow& row, const Item& item, int column,
                                              bool interleaved, bool inverse, Rotation<N>& r) {
  if (sizeof(T) == sizeof(float) || table.dtype == DType::float32) {
    load_rotation_as<kStarts, float>(table, shape, row, item, column, interleaved, inverse, r);
  } else {
    load_rotation_as<kStarts, T>(table, shape, row, item, column, interleaved, inverse, r);
  }
}

// NOTE: fmaf is spelled out, so that every kernel rounds alike.
template <int N>
__device__ __forceinline__ void rotate(const Rotation<N>& r, bool interleaved, float (&x1)[N],
                                       float (&x2)[N]) {
  if (interleaved) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float a = x1[i], b = x1[i + 1], c = x2[i], d = x2[i + 1];
      x1[i] = fmaf(a, r.cos1[i], b * r.sin1[i]);
      x1[i + 1] = fmaf(b, r.cos1[i + 1], a * r.sin1[i + 1]);
      x2[i] = fmaf(c, r.cos2[i], d * r.sin2[i]);
      x2[i + 1] = fmaf(d, r.cos2[i + 1], c * r.sin2[i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float a = x1[i], b = x2[i];
      x1[i] = fmaf(a, r.cos1[i], b * r.sin1[i]);
      x2[i] = fmaf(b, r.cos2[i], a * r.sin2[i]);
    }
  }
}

// The two vectors of an item on their way from memory.
template <typename T, int N, Starts kStarts>
struct ItemLoading {
  using V = Vector<T, N>;
  Loading<T, N, kStarts != Starts::anywhere> first, second;

  __device__ __forceinline__ void start(const T* head, const Item& item, bool inside) {
    first.start(head + item.first, item.column, inside ? item.first_size : 0);
    second.start(head + item.second, item.column, inside ? item.second_size : 0);
  }
  // As start, of a head in vectors or words: without a branch. A vector past the end is read as
  // another one, or as zeros.
  __device__ __forceinline__ void start_inside(const T* head, const Item& item) {
    if constexpr (kStarts == Starts::words) {
      first.first = V::load_words(head + item.first, item.column, item.first_size);
      second.first = V::load_words(head + item.second, item.column, item.second_size);
    } else {
      const int column1 = item.first + item.column, column2 = item.second + item.column;
      first.first = V::load(head + (item.column < item.first_size ? column1 : 0));
      second.first = V::load(head + (item.column < item.second_size ? column2 : 0));
    }
  }
  __device__ __forceinline__ void finish(const T* head, const Item& item, bool inside,
                                         Vector<T, N>& x1, Vector<T, N>& x2) const {
    x1 = first.finish(head + item.first, item.column, inside ? item.first_size : 0);
    x2 = second.finish(head + item.second, item.column, inside ? item.second_size : 0);
  }
  __device__ __forceinline__ void finish(const T* head, const Item& item, bool inside,
                                         float (&x1)[N], float (&x2)[N]) const {
    Vector<T, N> packed1, packed2;
    finish(head, item, inside, packed1, packed2);
    packed1.to_floats(x1);
    packed2.to_floats(x2);
  }
};

// NOTE: all lanes of the warp call together where rows start anywhere.
template <Starts kStarts, int N, typename T>
__device__ __forceinline__ void store_item(const Vector<T, N>& first, const Vector<T, N>& second,
                                           T* head, const Item& item, bool inside, int width) {
  const bool inside1 = inside && item.column < item.first_size;
  const bool inside2 = inside && item.column < item.second_size;
  T* row1 = head + item.first;
  T* row2 = head + item.second;
  if constexpr (kStarts == Starts::vectors) {
    if (inside1) first.store(row1 + item.column);
    if (inside2) second.store(row2 + item.column);
  } else if constexpr (kStarts == Starts::words) {
    if (inside1) first.store_words(row1, item.column, item.first_size);
    if (inside2) second.store_words(row2, item.column, item.second_size);
  } else {
    first.store_unaligned(row1, item.column, item.first_size, inside1, width);
    second.store_unaligned(row2, item.column, item.second_size, inside2, width);
  }
}

// How heads are paired, where it is known when a kernel is compiled: those that are not in vectors
// find out as they run.
enum class Pairs { halves, interleaved, any };

template <Pairs kPairs>
__device__ __forceinline__ bool is_interleaved(const RotaryShape& shape) {
  return kPairs == Pairs::any ? shape.interleaved : kPairs == Pairs::interleaved;
}

// ---- launchers ----

#if defined(__CUDACC__) || defined(__HIPCC__)

template <Pairs kPairs>
using PairsTag = std::integral_constant<Pairs, kPairs>;

template <Starts kStarts>
using StartsTag = std::integral_constant<Starts, kStarts>;

// run(TypeTag<T>, PairsTag, StartsTag) for the type and the layout of the heads. Null, or what is
// wrong.
template <typename F>
inline const char* dispatch_heads(const RotaryShape& shape, Starts starts, F&& run) {
  return message_of(dispatch_dtype(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr PairsTag<Pairs::any> any{};
    if constexpr (sizeof(T) < 4) {
      if (starts == Starts::anywhere) return run(tag, any, StartsTag<Starts::anywhere>{});
    }
    if (starts != Starts::vectors) return run(tag, any, StartsTag<Starts::words>{});
    constexpr StartsTag<Starts::vectors> vectors{};
    if (shape.interleaved) return run(tag, PairsTag<Pairs::interleaved>{}, vectors);
    return run(tag, PairsTag<Pairs::halves>{}, vectors);
  }));
}

#endif

}  // namespace fuselage
