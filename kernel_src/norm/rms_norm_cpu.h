// CPU kernels of rms_norm, fused_add_rms_norm and rms_norm_add_rms_norm. Each call does a range of
// the work, so that the caller's thread pool can share it out.
#pragma once

#include <cstdint>

#include "norm/rms_norm.h"

namespace fuselage::cpu {

// Rows [row_begin, row_end) of the forward.
void rms_norm_forward(const RmsNormForward& p, int64_t row_begin, int64_t row_end);
void rms_norm_add_rms_norm(const RmsNormAddRmsNorm& p, int64_t row_begin, int64_t row_end);

// Chunks [chunk_begin, chunk_end) of the backward. The rows are cut into p.partial_count equal
// chunks (a number that depends on the shape alone, never on the thread count, so that results do
// not either); each chunk writes its rows of grad_x and, where grad_weight is needed, its row of
// p.partials.
void rms_norm_backward(const RmsNormBackward& p, int64_t chunk_begin, int64_t chunk_end);

// Columns [column_begin, column_end) of grad_weight = sum of p.partials over the chunks, in order.
void rms_norm_backward_weight(const RmsNormBackward& p, int64_t column_begin, int64_t column_end);

// The same of rms_norm_add_rms_norm's backward, of p.chunks chunks, and of both weights.
void rms_norm_add_rms_norm_backward(const RmsNormAddRmsNormBackward& p, int64_t chunk_begin,
                                    int64_t chunk_end);
void rms_norm_add_rms_norm_backward_weights(const RmsNormAddRmsNormBackward& p,
                                            int64_t column_begin, int64_t column_end);

// The number of chunks for a backward of this shape, at least 1.
int64_t rms_norm_backward_chunks(int64_t rows, int64_t dim);

}  // namespace fuselage::cpu
