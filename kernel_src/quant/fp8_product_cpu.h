// The CPU kernels of fp8_product: codes [begin, end) to float32, and outputs [begin, end) of all
// rows. `q`: [rows, dim], decoded.
#pragma once

#include <cstdint>

#include "quant/fp8_product.h"

namespace fuselage::cpu {

void fp8_decode(const uint8_t* codes, float* values, int64_t begin, int64_t end);
void fp8_product(const Fp8Product& p, const float* q, int64_t begin, int64_t end);

}  // namespace fuselage::cpu
