// Rotary position embedding, alone and after a norm of each head: what the GPU (rope/*.cu) and CPU
// (rope/rotary_cpu.cpp) kernels are given. q and k share one launch; either kernel serves q alone.
//
// A pair (x1, x2) of a head is two elements rotary_dim / 2 apart, or neighbours where interleaved.
// With the columns j1 and j2 of its elements (in a table of half width both have one column):
//
//   out1 = x1 * cos[j1] - x2 * sin[j1]             inverse: the transpose, which is the gradient
//   out2 = x2 * cos[j2] + x1 * sin[j2]               out1 = x1 * cos[j1] + x2 * sin[j2]
//                                                    out2 = x2 * cos[j2] - x1 * sin[j1]
//
// Columns from rotary_dim on are passed through. qk_norm_rotary rotates y instead of x:
//
//   n = x / sqrt(mean(x^2 over the head) + eps)    [rounded to the type of x]
//   y = n * (weight_offset + weight)               [rounded to the type of x]
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fuselage {

// [batch, tokens, heads, dim] with adjacent elements in a head; strides in elements.
struct Heads {
  void* data;  // inputs are only read
  int64_t batch_stride, token_stride, head_stride;
};

// cos and sin of the token `token` of a sequence are row `position` of their table:
//   position = offset + (positions: that of the token, else 0) + step * token
struct RotaryTable {
  const void* cos;        // [batch or 1, rows, rotary_dim or rotary_dim / 2] dtype
  const void* sin;        // likewise
  const void* positions;  // int64, or int32 where narrow_positions; null for none
  int64_t cos_batch_stride, sin_batch_stride;  // 0 where all sequences share a table
  int64_t cos_stride, sin_stride;              // elements between rows
  int64_t position_batch_stride, position_token_stride;
  int64_t offset;
  int64_t rows;  // a position outside [0, rows) makes the token's results NaN
  int step;
  bool narrow_positions;
  bool half_width;  // rotary_dim / 2 columns, one a pair
  DType dtype;      // that of x, or float32
};

struct RotaryShape {
  int64_t batch, tokens;  // sequences, and tokens of each
  int64_t dim, rotary_dim;
  bool interleaved;
  DType dtype;
};

struct RotarySide {
  Heads x, out;   // may be the same
  int64_t heads;  // 0 for a k that is not there
};

struct Rotary {
  RotaryShape shape;
  RotaryTable table;
  RotarySide q, k;
  bool inverse;
  bool in_place;  // out is x: columns from rotary_dim on stay as they are
};

struct QkNormRotarySide {
  Heads x, out;
  const void* weight;  // [dim] weight_dtype, or null for a weight of one
  DType weight_dtype;  // that of x, or float32
  int64_t heads;
};

struct QkNormRotary {
  RotaryShape shape;
  RotaryTable table;
  QkNormRotarySide q, k;
  float eps, weight_offset;
  bool cast_before_weight;  // round n and y
};

// With g = inverse rotation of grad_out, f = weight_offset + weight, xhat = x * rstd, over a head:
//   grad_x      = rstd * (g * f - xhat * mean(g * f * xhat))
//   grad_weight = sum over tokens and heads of g * xhat
// rstd is computed again: x is read anyway, and its sum of squares costs no pass of its own.
struct QkNormRotaryBackwardSide {
  Heads grad_out, x;
  Heads grad_x;  // null data when not needed
  const void* weight;
  void* grad_weight;  // [dim] weight_dtype, or null when not needed
  float* partials;    // [partial_count, dim] workspace, null without grad_weight
  DType weight_dtype;
  int64_t heads;
};

struct QkNormRotaryBackward {
  RotaryShape shape;
  RotaryTable table;
  QkNormRotaryBackwardSide q, k;
  float eps, weight_offset;
  int64_t partial_count;
};

namespace gpu {

// Launch on `stream` of `device`, which must be current. Return null, or why they could not.
const char* rotary(const Rotary& p, int device, void* stream);
const char* qk_norm_rotary(const QkNormRotary& p, int device, void* stream);
const char* qk_norm_rotary_backward(const QkNormRotaryBackward& p, int device, void* stream);

// The partial_count to give qk_norm_rotary_backward for these arguments.
int64_t qk_norm_rotary_backward_partials(const QkNormRotaryBackward& p, int device);

// The longest head that a block of qk_norm_rotary holds.
int64_t qk_norm_rotary_max_dim(const RotaryShape& shape);

}  // namespace gpu
}  // namespace fuselage
