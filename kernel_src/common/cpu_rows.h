// What the backwards of the CPU have in common: rows cut into chunks, the partial sums that each
// chunk leaves of a gradient that is a sum over rows, and the second stage that adds these up.
//
// Chunks depend on the shape alone, never on the number of threads, so that results do not either.
#pragma once

#include <cstdint>

#include "common/cpu_vector.h"
#include "common/dtype.h"

namespace fuselage::cpu::FUSELAGE_ISA {

// Rows of a chunk: enough chunks for many cores, and `least` rows in each, so that its partial sums
// are small beside them. At most `most`, which keeps the float32 sum over a chunk short, however
// many rows there are.
FUSELAGE_INLINE int64_t chunk_rows(int64_t rows, int64_t least = 8, int64_t most = 128) {
  constexpr int64_t kChunks = 64;
  int64_t chunk = (rows + kChunks - 1) / kChunks;
  if (chunk < least) chunk = least;
  return chunk > most ? most : chunk;
}

// The rows of chunk `chunk` of `count`, which are equal but for a row.
struct RowRange {
  int64_t begin, end;
};

FUSELAGE_INLINE RowRange rows_of_chunk(int64_t rows, int64_t chunk, int64_t count) {
  return {rows * chunk / count, rows * (chunk + 1) / count};
}

template <int kCount>
struct RowsAtOnce {
  static constexpr int value = kCount;
};

// body(RowsAtOnce, row) for the rows of a chunk: kCount at once, and the last ones one by one. What
// several rows add to a partial sum is added up in registers first.
template <int kCount, class Body>
FUSELAGE_INLINE void for_each_rows(RowRange rows, Body body) {
  int64_t row = rows.begin;
  for (; row + kCount <= rows.end; row += kCount) body(RowsAtOnce<kCount>{}, row);
  for (; row < rows.end; ++row) body(RowsAtOnce<1>{}, row);
}

// Adds to partial sums. `first`: there are none yet, whatever the memory holds.
template <class Lanes>
FUSELAGE_INLINE void accumulate(float* partial, Floats value, bool first, Lanes lanes) {
  if (!first) value += load(partial, lanes);
  store(partial, value, lanes);
}

// The second stage

// Columns of which `sum_columns` holds the sums at once.
constexpr int64_t kColumnStrip = 512;

// sums[i] = the sum of partials[k * stride + i] over k < count, in order. In float64: there can be
// many.
FUSELAGE_NOINLINE void sum_partials(const float* partials, int64_t stride, int64_t count,
                                    double* sums,  // [size]
                                    int64_t size) {
  for (int64_t i = 0; i < size; ++i) sums[i] = 0;
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t i = 0; i < size; ++i) sums[i] += partials[k * stride + i];
  }
}

// Stores at most kColumnStrip sums in elements [offset, offset + size) of a gradient.
FUSELAGE_NOINLINE void store_sums(void* gradient, DType dtype, int64_t offset, const double* sums,
                                  int64_t size) {
  float floats[kColumnStrip];
  for (int64_t i = 0; i < size; ++i) floats[i] = static_cast<float>(sums[i]);
  visit_dtype(dtype, [&](auto type) {
    auto* to = static_cast<decltype(type)*>(gradient) + offset;
    for_each_vector(0, size,
                    [&](int64_t i, auto lanes) { store(to + i, load(floats + i, lanes), lanes); });
  });
}

// Columns [begin, end) of a gradient, of the partial sums of all chunks.
FUSELAGE_NOINLINE void sum_columns(const float* partials,  // [count, dim]
                                   int64_t count, int64_t dim,
                                   void* gradient,  // [dim] dtype
                                   DType dtype, int64_t begin, int64_t end) {
  double sums[kColumnStrip];
  for (int64_t first = begin; first < end; first += kColumnStrip) {
    const int64_t size = end - first < kColumnStrip ? end - first : kColumnStrip;
    sum_partials(partials + first, dim, count, sums, size);
    store_sums(gradient, dtype, first, sums, size);
  }
}

}  // namespace fuselage::cpu::FUSELAGE_ISA
