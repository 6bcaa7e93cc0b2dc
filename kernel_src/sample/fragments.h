// Fragments of float8 matrices for NVIDIA's tensor cores.
#pragma once

#include <cstdint>

#include "common/gpu_compat.h"

namespace fuselage {

// Four float8_e4m3 as two pairs of float16, exactly; the lower half of a word is the first of a pair.
__device__ __forceinline__ void widen(uint32_t four, uint32_t& lower, uint32_t& upper) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("{\n"
      ".reg .b16 lower, upper;\n"
      "mov.b32 {lower, upper}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lower;\n"
      "cvt.rn.f16x2.e4m3x2 %1, upper;\n"
      "}"
      : "=r"(lower), "=r"(upper)
      : "r"(four));
#endif
}

}  // namespace fuselage
