// Fragments of matrices in shared memory for NVIDIA's tensor cores.
#pragma once

#include <cstdint>

#include "common/gpu_compat.h"

namespace fuselage {

// Four matrices of 8 rows of 16 bytes. A lane has the address of row lane % 8 of matrix lane / 8, and gets bytes
// 4 * (lane % 4) to 4 * (lane % 4) + 3 of row lane / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

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
