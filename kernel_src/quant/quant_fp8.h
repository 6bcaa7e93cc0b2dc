// quant_fp8: what the GPU (quant/quant_fp8.cu) and CPU (quant/quant_fp8_cpu.cpp) kernels are given,
// and the formulas, are in common/quant.h.
#pragma once

#include "common/quant.h"

namespace fuselage {
namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* quant_fp8(const QuantForward& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
