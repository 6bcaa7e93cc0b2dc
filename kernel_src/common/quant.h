// Quantisation of rows to eight bits, with a scale for each row, for each 128 columns of it, or one
// that is given.
//
//   scale = amax / limit              amax: the largest |x| of the row or group
//   q     = round(x / scale)          to nearest even, and within [-limit, limit]
//
// limit: 448 of float8_e4m3fn, 57344 of float8_e5m2, 127 of int8. Scales are float32, and may be
// rounded up to powers of two. A scale of zero, as of a row of zeros, is 1. A row or group with a
// NaN has a scale of NaN, and one with an infinity one of infinity: the formula does the rest. q
// has the bits of that formula in float32, as if x were divided, rounded to float32, and then to
// eight bits.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fuselage {

enum class QuantFormat { e4m3, e5m2, int8 };

constexpr int kQuantGroup = 128;  // columns of a group

inline int64_t quant_groups(int64_t columns) { return (columns + kQuantGroup - 1) / kQuantGroup; }

inline float quant_limit(QuantFormat format) {
  switch (format) {
    case QuantFormat::e4m3: return 448.0f;
    case QuantFormat::e5m2: return 57344.0f;
    case QuantFormat::int8: return 127.0f;
  }
  return 1.0f;
}

struct QuantForward {
  const void* x;  // [rows, dim] x_dtype; not of Quantised operators, which make it
  DType x_dtype;
  int64_t rows, dim, x_stride;
  QuantFormat format;
  float limit;               // of the format
  const float* given_scale;  // [1], or null: scales are made
  bool in_groups;            // of kQuantGroup columns; otherwise a scale a row
  bool power_of_two;         // scales are rounded up to powers of two
  uint8_t* q;                // [rows, dim], contiguous
  float* scale;              // of row i and group j: scale[i * row_stride + j * group_stride]
  int64_t scale_row_stride, scale_group_stride;
};

// Whether a row has one scale, which is to be made.
inline bool makes_row_scales(const QuantForward& p) {
  return p.given_scale == nullptr && !p.in_groups;
}

// An operator whose result, rounded to the dtype of x, is quantised: `out` is where that goes, too,
// or null.
template <typename Forward>
struct Quantised : Forward {
  QuantForward quant;
};

}  // namespace fuselage
