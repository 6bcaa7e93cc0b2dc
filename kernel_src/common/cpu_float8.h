// float8_e4m3fn of the CPU kernels: codes to float32, a vector at a time. Exact.
#pragma once

#include "common/cpu_vector.h"

namespace fuselage::cpu::FUSELAGE_ISA {

// NOTE: subnormals by a difference of normal numbers, so that a CPU that takes subnormal float32
// for zero has them, too.
FUSELAGE_INLINE Floats decode_e4m3(Words codes) {
  const Words magnitude = codes & 0x7fu;
  const Floats subnormal = ((Floats)(magnitude | 0x4b000000u) - 8388608.0f) * 0.001953125f;  // 2^-9
  Words bits = (magnitude << 20) + (120u << 23);
  bits = magnitude < 8u ? (Words)subnormal : bits;
  bits = magnitude == 0x7fu ? broadcast_bits(0x7fc00000u) : bits;
  return (Floats)(bits | (codes & 0x80u) << 24);
}

static inline void decode_e4m3(const uint8_t* codes, float* values, int64_t size) {
  for_each_vector(0, size, [&](int64_t i, auto lanes) {
    Bytes bytes = {};
    __builtin_memcpy(&bytes, codes + i, count_of(lanes));
    store(values + i, decode_e4m3(__builtin_convertvector(bytes, Words)), lanes);
  });
}

}  // namespace fuselage::cpu::FUSELAGE_ISA
