// The CPU kernel of quant_fp8: rows [begin, end).
#pragma once

#include <cstdint>

#include "quant/quant_fp8.h"

namespace fuselage::cpu {

void quant_fp8(const QuantForward& p, int64_t begin, int64_t end);

}  // namespace fuselage::cpu
