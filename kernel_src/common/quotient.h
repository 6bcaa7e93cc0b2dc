// Division on the GPU by a number of the host's.
#pragma once

#include "common/divide.h"
#include "common/gpu_compat.h"

namespace fuselage {

// a / b, of numbers that are not negative. NOTE: not with the operator, whose subroutine for 64
// bits takes a stack.
__device__ __forceinline__ int64_t quotient(int64_t a, const Divisor& b) {
  const uint64_t product = __umul64hi(static_cast<uint64_t>(a), b.multiplier);
  return b.value == 1 ? a : static_cast<int64_t>(product >> b.shift);
}

}  // namespace fuselage
