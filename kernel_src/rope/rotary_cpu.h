// CPU kernels of apply_rotary and qk_norm_rotary. Each call does a range of the work, so that the
// caller's thread pool can share it out.
#pragma once

#include <cstdint>

#include "rope/rotary.h"

namespace fuselage::cpu {

// Tokens [token_begin, token_end) of all sequences, one after the other.
void rotary(const Rotary& p, int64_t token_begin, int64_t token_end);
void qk_norm_rotary(const QkNormRotary& p, int64_t token_begin, int64_t token_end);

// Chunks [chunk_begin, chunk_end) of the backward. The tokens are cut into p.partial_count chunks,
// equal but for a token, a number that depends on the shape alone; each writes its tokens of grad_x
// and its row of the partials.
void qk_norm_rotary_backward(const QkNormRotaryBackward& p, int64_t chunk_begin, int64_t chunk_end);

// Columns [column_begin, column_end) of grad_weight = sum of the partials over the chunks, in
// order.
void qk_norm_rotary_backward_weight(const QkNormRotaryBackward& p, int64_t column_begin,
                                    int64_t column_end);

// The number of chunks for a backward of this shape, at least 1.
int64_t qk_norm_rotary_backward_chunks(const RotaryShape& shape, int64_t heads);

// The first token whose position is outside the table, or -1. All sequences, one after the other.
int64_t rotary_position_outside(const RotaryTable& table, const RotaryShape& shape);

}  // namespace fuselage::cpu
