// CPU kernels of poly_norm, fused_mul_poly_norm and grouped_poly_norm. Each call does a range of
// the work, so that the caller's thread pool can share it out.
#pragma once

#include <cstdint>

#include "norm/poly_norm.h"

namespace fuselage::cpu {

// Rows [row_begin, row_end) of the forward.
void poly_norm_forward(const PolyNormForward& p, int64_t row_begin, int64_t row_end);

// Rows [row_begin, row_end) of the backward. p.partials, where there is one, has one entry for each
// row.
void poly_norm_backward(const PolyNormBackward& p, int64_t row_begin, int64_t row_end);

// grad_weight and grad_bias of experts [expert_begin, expert_end): the sum of p.partials over the
// expert's rows, in order. Without offs there is one expert, which has all rows.
void poly_norm_backward_weight(const PolyNormBackward& p, int64_t expert_begin, int64_t expert_end);

}  // namespace fuselage::cpu
