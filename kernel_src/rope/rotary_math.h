// What the GPU and the CPU kernels of rope/ share: where heads and rows of the tables are, and the
// signs of the rotation.
#pragma once

#include "common/shared.h"
#include "rope/rotary.h"

namespace FUSELAGE_SHARED_NAMESPACE {

struct Token {
  int64_t batch, token;
};

template <typename T>
FUSELAGE_SHARED T* head_of(const Heads& heads, const Token& at, int64_t head) {
  return static_cast<T*>(heads.data) + at.batch * heads.batch_stride +
         at.token * heads.token_stride + head * heads.head_stride;
}

// The row of the tables that a token has. It may be one that they do not have.
FUSELAGE_SHARED int64_t position_of(const RotaryTable& table, const Token& at) {
  int64_t position = table.offset + table.step * at.token;
  if (table.positions != nullptr) {
    const int64_t index =
        at.batch * table.position_batch_stride + at.token * table.position_token_stride;
    position += table.narrow_positions ? static_cast<const int32_t*>(table.positions)[index]
                                       : static_cast<const int64_t*>(table.positions)[index];
  }
  return position;
}

// Where in the tables a token's cos and sin begin, in elements.
struct TableRow {
  int64_t cos, sin;
};

FUSELAGE_SHARED TableRow table_row(const RotaryTable& table, const Token& at, int64_t position) {
  return {at.batch * table.cos_batch_stride + position * table.cos_stride,
          at.batch * table.sin_batch_stride + position * table.sin_stride};
}

// With the sines of a pair's elements x1 and x2, the factors of out1 = x1 * cos1 + x2 * factor1 and
// out2 = x2 * cos2 + x1 * factor2: those of the rotation, or of its transpose.
template <typename Floats>
FUSELAGE_SHARED void sine_factors(Floats sin1, Floats sin2, bool inverse, Floats& factor1,
                                  Floats& factor2) {
  factor1 = inverse ? sin2 : -sin1;
  factor2 = inverse ? -sin1 : sin2;
}

}  // namespace FUSELAGE_SHARED_NAMESPACE
