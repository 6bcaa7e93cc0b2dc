// CPU kernels of the gate family. Each call does a range of the work, so that the caller's thread
// pool can share it out.
#pragma once

#include <cstdint>

#include "gate/activation.h"

namespace fuselage::cpu {

// The work of the forward, and of a backward without grad_bias, comes in pieces: up to
// kActivationColumns columns of one row.
constexpr int64_t kActivationColumns = 16384;
int64_t activation_pieces(int64_t rows, int64_t dim);

// Pieces [begin, end).
void activation_forward(const ActivationForward& p, int64_t begin, int64_t end);
void activation_backward(const ActivationBackward& p, int64_t begin, int64_t end);

// A backward with grad_bias, whose rows are cut into p.partial_count equal chunks: chunks [begin,
// end). The number depends on the shape alone, never on the thread count, so that results do not
// either.
int64_t activation_backward_chunks(int64_t rows, int64_t dim);
void activation_backward_chunk(const ActivationBackward& p, int64_t begin, int64_t end);

// Columns [begin, end) of grad_bias = sum of p.partials over the chunks, in order.
void activation_backward_bias(const ActivationBackward& p, int64_t begin, int64_t end);

}  // namespace fuselage::cpu
