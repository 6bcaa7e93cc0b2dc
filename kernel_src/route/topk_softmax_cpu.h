// CPU kernels of topk_softmax: rows [begin, end).
#pragma once

#include <cstdint>

#include "route/topk_softmax.h"

namespace fuselage::cpu {

void topk_softmax_forward(const TopkForward& p, int64_t begin, int64_t end);
void topk_softmax_backward(const TopkBackward& p, int64_t begin, int64_t end);

}  // namespace fuselage::cpu
