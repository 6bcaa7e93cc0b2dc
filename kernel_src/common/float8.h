// float8_e4m3fn: four bits of exponent, whose bias is 7, three of mantissa, NaN, and no infinities.
// float8_e5m2: five bits of exponent, whose bias is 15, and two of mantissa. What is read of them
// is exact; what is written is rounded to nearest even and saturates.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>
#elif defined(__HIPCC__)
#include <hip/hip_runtime.h>
#endif

#include "common/shared.h"

namespace FUSELAGE_SHARED_NAMESPACE {

struct Float8 {
  uint8_t bits;
};

// NOTE: subnormals by a product, so that a CPU that takes subnormal float32 for zero has them, too.
FUSELAGE_SHARED float to_float(Float8 value) {
  const uint32_t bits = value.bits;
  const uint32_t normal_bits = ((bits & 0x7f) << 20) + (120u << 23), nan_bits = 0x7fc00000u;
  float normal, nan;
  __builtin_memcpy(&normal, &normal_bits, sizeof(normal));
  __builtin_memcpy(&nan, &nan_bits, sizeof(nan));
  const float subnormal = static_cast<float>(bits & 7) * 0.001953125f;  // 2^-9
  float result = (bits & 0x78) == 0 ? subnormal : normal;
  result = (bits & 0x7f) == 0x7f ? nan : result;
  return bits & 0x80 ? -result : result;
}

template <class To, class From>
FUSELAGE_SHARED To float8_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps their number");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// The bits of float32 values as float8 with kMantissa bits of mantissa: 3 of e4m3fn, 2 of e5m2.
// Values past the largest number, infinities too, become that number; every NaN becomes 0x7f, as
// cvt.satfinite has it. Words and Floats: uint32_t and float, or vectors of them.
template <int kMantissa, class Words, class Floats>
FUSELAGE_SHARED Words encode_float8(Floats value) {
  static_assert(kMantissa == 2 || kMantissa == 3, "e5m2 or e4m3fn");
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kBias = kMantissa == 3 ? 127 - 7 : 127 - 15;
  constexpr uint32_t kLargest = kMantissa == 3 ? 0x43e00000u : 0x47600000u;  // 448, 57344
  constexpr uint32_t kSmallestNormal = (kBias + 1) << 23;
  // Of which the last bit is that of subnormals: adding it rounds to them.
  constexpr float kSubnormal = kMantissa == 3 ? 16384.0f : 128.0f;
  constexpr uint32_t kSubnormalBits = kMantissa == 3 ? 0x46800000u : 0x43000000u;
  const Words bits = float8_cast<Words>(value);
  const Words all = bits & 0x7fffffffu;
  const Words largest = all - all + kLargest;
  const Words magnitude = all > kLargest ? largest : all;
  const Words odd = magnitude >> kDropped & 1u;
  const Words normal =
      ((magnitude + ((1u << (kDropped - 1)) - 1u) + odd) >> kDropped) - (kBias << kMantissa);
  const Words subnormal =
      float8_cast<Words>(float8_cast<Floats>(magnitude) + kSubnormal) - kSubnormalBits;
  const Words number = (magnitude < kSmallestNormal ? subnormal : normal) | (bits >> 24 & 0x80u);
  const Words nan = all - all + 0x7fu;
  return all > 0x7f800000u ? nan : number;
}

#if defined(__CUDACC__) || defined(__HIPCC__)

// Two values as the bytes of a half word, the first in the lower one. NOTE: Ada has the
// instruction, too, but no code of its own: it shares that of Ampere.
template <int kMantissa>
__device__ __forceinline__ uint32_t encode_float8x2(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint16_t two;
  if constexpr (kMantissa == 3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
  }
  return two;
#else
  return encode_float8<kMantissa, uint32_t>(first) | encode_float8<kMantissa, uint32_t>(second)
                                                         << 8;
#endif
}

#endif

#if defined(__CUDACC__)

// Two in the lower half of a word as two T (float16 or bfloat16). Exponent and mantissa are moved
// into place, and a product corrects the exponent, subnormal or not.
template <typename T>
__device__ __forceinline__ uint32_t e4m3x2_to(uint32_t two) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  using Pair = std::conditional_t<kIsHalf, __half2, __nv_bfloat162>;
  const uint32_t apart = (two & 0xffu) | (two & 0xff00u) << 8;
  const uint32_t magnitude = apart & 0x007f007fu;
  const uint32_t nan = ((magnitude + 0x00010001u) >> 7 & 0x00010001u) * 0x7fffu;
  const uint32_t moved = (apart & 0x00800080u) << 8 | magnitude << (kIsHalf ? 7 : 4);
  Pair factors, pair;
  if constexpr (kIsHalf) {
    factors = __float2half2_rn(256.0f);  // 2^8
  } else {
    factors = __float2bfloat162_rn(1.329227995784916e36f);  // 2^120
  }
  __builtin_memcpy(&pair, &moved, sizeof(pair));
  pair = __hmul2(pair, factors);
  uint32_t result;
  __builtin_memcpy(&result, &pair, sizeof(result));
  return result | nan;
}

// Four as two pairs of float16. The lower half of a word is the first of a pair.
__device__ __forceinline__ void e4m3x4_to_float16(uint32_t four, uint32_t& first,
                                                  uint32_t& second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(first), "=r"(second)
      : "r"(four));
#else
  first = e4m3x2_to<__half>(four & 0xffffu);
  second = e4m3x2_to<__half>(four >> 16);
#endif
}

#endif

}  // namespace FUSELAGE_SHARED_NAMESPACE
