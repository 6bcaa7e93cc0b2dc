// Divisions on the GPU, of numbers of 64 bits that are mostly small.
#pragma once

#include "common/divide.h"
#include "common/gpu_compat.h"

namespace fuselage {

// a / b, of positive numbers. NOTE: not with the operator, whose subroutine for 64 bits takes a
// stack.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  int64_t result = 0;
#pragma unroll 1
  for (int bit = __clzll(b) - 1; bit >= 0; --bit) {
    if (a >> bit < b) continue;
    a -= b << bit;
    result |= int64_t{1} << bit;
  }
  return result;
}

__device__ __forceinline__ int64_t quotient(int64_t a, const Divisor& b) {
  if (b.value == 1) return a;
  if (b.multiplier == 0 || a >> 31 != 0) return quotient(a, b.value);
  return __umulhi(static_cast<uint32_t>(a), b.multiplier) >> b.shift;
}

}  // namespace fuselage
