// CPU kernels of layer_norm and the adaptive norms. Each call does a range of the work, so that the
// caller's thread pool can share it out.
#pragma once

#include <cstdint>

#include "norm/ada_norm.h"

namespace fuselage::cpu {

// Rows [row_begin, row_end) of the forward.
void ada_norm_forward(const AdaNormForward& p, int64_t row_begin, int64_t row_end);

// Chunks [chunk_begin, chunk_end) of the backward: p.blocks_per_group equal ones of each group.
// Each writes its rows of the gradients, and its partial sums where sums are needed.
void ada_norm_backward(const AdaNormBackward& p, int64_t chunk_begin, int64_t chunk_end);

// Columns [column_begin, column_end) of the gradients that are sums of the partial sums, in order.
void ada_norm_backward_sums(const AdaNormBackward& p, int64_t column_begin, int64_t column_end);

// The number of chunks of a group, at least 1. It depends on the shape alone.
int64_t ada_norm_backward_chunks(int64_t rows, int64_t group_rows);

}  // namespace fuselage::cpu
