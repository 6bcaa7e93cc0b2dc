// The matrix product of a warpgroup on Hopper GPUs: 64 rows by kColumns, 16 deep, accumulated in
// float32. Both operands are read from shared memory, where the depth runs along 128-byte rows; the
// first may also be in registers. See "Asynchronous warpgroup level matrix instructions" in the PTX
// manual.
#pragma once

#include <cstdint>

#include "common/gpu_compat.h"

namespace fuselage {

// d = a * b, plus d where `accumulate`.
template <typename T, int kColumns>
struct Wgmma;

// clang-format off
#define FUSELAGE_NUMBERS_4 "%0, %1, %2, %3"
#define FUSELAGE_NUMBERS_8 FUSELAGE_NUMBERS_4 \
  ", %4, %5, %6, %7"
#define FUSELAGE_NUMBERS_16 FUSELAGE_NUMBERS_8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FUSELAGE_NUMBERS_32 FUSELAGE_NUMBERS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FUSELAGE_NUMBERS_64 FUSELAGE_NUMBERS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FUSELAGE_NUMBERS_128 FUSELAGE_NUMBERS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FUSELAGE_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FUSELAGE_SUMS_8(i) FUSELAGE_SUMS_4(i), FUSELAGE_SUMS_4(i + 4)
#define FUSELAGE_SUMS_16(i) FUSELAGE_SUMS_8(i), FUSELAGE_SUMS_8(i + 8)
#define FUSELAGE_SUMS_32(i) FUSELAGE_SUMS_16(i), FUSELAGE_SUMS_16(i + 16)
#define FUSELAGE_SUMS_64(i) FUSELAGE_SUMS_32(i), FUSELAGE_SUMS_32(i + 32)
#define FUSELAGE_SUMS_128(i) FUSELAGE_SUMS_64(i), FUSELAGE_SUMS_64(i + 64)

// Of a matrix's descriptor, the high word is the same for all: rows of 128 bytes, 8 of which are
// swizzled together.
#define FUSELAGE_MATRIX(name, operand) \
  ".reg .b32 " #name "_high; mov.b32 " #name "_high, 0x40000040; " \
  ".reg .b64 " #name "; mov.b64 " #name ", {%" #operand ", " #name "_high};"

// The assembler's text counts operands: sums first, then i0 to i5.
#define FUSELAGE_WGMMA(T, type, columns, count, i0, i1, i2, i3, i4, i5) \
  template <> \
  struct Wgmma<T, columns> { \
    __device__ static __forceinline__ void run(float (&d)[count], uint32_t a, uint32_t b, \
                                               int accumulate) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2 ", 0; " \
                   FUSELAGE_MATRIX(a, i0) FUSELAGE_MATRIX(b, i1) \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" \
                   FUSELAGE_NUMBERS_##count "}, a, b, p, 1, 1, 0, 0;}" \
                   : FUSELAGE_SUMS_##count(0) \
                   : "r"(a), "r"(b), "r"(accumulate)); \
    } \
    __device__ static __forceinline__ void run(float (&d)[count], const uint32_t (&a)[4], \
                                               uint32_t b, int accumulate) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i5 ", 0; " \
                   FUSELAGE_MATRIX(b, i4) \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" \
                   FUSELAGE_NUMBERS_##count "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, b" \
                   ", p, 1, 1, 0;}" \
                   : FUSELAGE_SUMS_##count(0) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate)); \
    } \
  };
#define FUSELAGE_WGMMA_OF(T, type) \
  FUSELAGE_WGMMA(T, type, 8, 4, 4, 5, 6, 7, 8, 9) \
  FUSELAGE_WGMMA(T, type, 16, 8, 8, 9, 10, 11, 12, 13) \
  FUSELAGE_WGMMA(T, type, 32, 16, 16, 17, 18, 19, 20, 21) \
  FUSELAGE_WGMMA(T, type, 64, 32, 32, 33, 34, 35, 36, 37) \
  FUSELAGE_WGMMA(T, type, 128, 64, 64, 65, 66, 67, 68, 69) \
  FUSELAGE_WGMMA(T, type, 256, 128, 128, 129, 130, 131, 132, 133)

FUSELAGE_WGMMA_OF(__nv_bfloat16, "bf16")
FUSELAGE_WGMMA_OF(__half, "f16")
#undef FUSELAGE_WGMMA_OF
#undef FUSELAGE_WGMMA
#undef FUSELAGE_MATRIX
#undef FUSELAGE_SUMS_128
#undef FUSELAGE_SUMS_64
#undef FUSELAGE_SUMS_32
#undef FUSELAGE_SUMS_16
#undef FUSELAGE_SUMS_8
#undef FUSELAGE_SUMS_4
#undef FUSELAGE_NUMBERS_128
#undef FUSELAGE_NUMBERS_64
#undef FUSELAGE_NUMBERS_32
#undef FUSELAGE_NUMBERS_16
#undef FUSELAGE_NUMBERS_8
#undef FUSELAGE_NUMBERS_4
// clang-format on

}  // namespace fuselage
