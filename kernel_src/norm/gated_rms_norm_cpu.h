// CPU kernels of gated_rms_norm. Each call does a range of the work, so that the caller's thread
// pool can share it out.
#pragma once

#include <cstdint>

#include "norm/gated_rms_norm.h"

namespace fuselage::cpu {

// Rows [row_begin, row_end) of the forward.
void gated_rms_norm_forward(const GatedRmsNormForward& p, int64_t row_begin, int64_t row_end);

// Chunks [chunk_begin, chunk_end) of the backward: the rows are cut into p.partial_count equal
// ones, each of which writes its rows of gradients and, where there are any, its row of p.partials.
void gated_rms_norm_backward(const GatedRmsNormBackward& p, int64_t chunk_begin, int64_t chunk_end);

// Columns [column_begin, column_end) of all groups of grad_weight = sum of p.partials, in order.
void gated_rms_norm_backward_weight(const GatedRmsNormBackward& p, int64_t column_begin,
                                    int64_t column_end);

// The number of chunks for a backward of so many rows, at least 1.
int64_t gated_rms_norm_backward_chunks(int64_t rows);

}  // namespace fuselage::cpu
