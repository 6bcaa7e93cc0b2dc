// The CPU kernels' one vector type, and the one place where float16 and bfloat16 become float32 and
// back. `Floats` is a GCC/Clang vector as wide as the instruction set's registers, so that
// operators are plain arithmetic (`a * b + c`) and the order of a sum is the one written down: it
// depends neither on what a compiler makes of a loop nor on the alignment of a row, which batch
// invariance needs.
//
// Loads and stores are unaligned. A body written for one vector serves a whole row:
//
//   for_each_vector(0, dim, [&](int64_t i, auto lanes) {
//     store(y + i, 2 * load(x + i, lanes), lanes);
//   });
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/dtype.h"

#if FUSELAGE_VECTOR_BYTES > 16
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace fuselage::cpu::FUSELAGE_ISA {

constexpr int kLanes = FUSELAGE_VECTOR_BYTES / 4;

typedef float Floats __attribute__((vector_size(FUSELAGE_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(FUSELAGE_VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(FUSELAGE_VECTOR_BYTES / 2)));
typedef uint8_t Bytes __attribute__((vector_size(FUSELAGE_VECTOR_BYTES / 4)));

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

FUSELAGE_INLINE Floats broadcast(float value) { return value - Floats{}; }

FUSELAGE_INLINE Words broadcast_bits(uint32_t value) { return value - Words{}; }

// Conversions. Rounding is to nearest even; a NaN stays a NaN, and quiet.
//
// NOTE: g++ does not define __AVX2__ and the like after `#pragma GCC target`, so the width of the
// vector stands for the instruction set. The AVX-512 intrinsics are the _maskz_ ones, with a full
// mask: in g++ 12 the plain ones warn of uninitialised variables. Intrinsics only where the
// compiler's own code is slow: g++ 12 splits __builtin_convertvector to and from 16 bits in two,
// which doubles the time of a bfloat16 rms_norm.

#if FUSELAGE_VECTOR_BYTES == 64

FUSELAGE_INLINE Words widen_to_high(Halves bits) {
  const Words source = Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} << 16;
  return (Words)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)source,
                                               _mm512_castsi256_si512((__m256i)bits));
}

FUSELAGE_INLINE Halves narrow_from_high(Words bits) {
  const Halves source = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i permuted = _mm512_maskz_permutexvar_epi16(
      0xffff, _mm512_castsi256_si512((__m256i)source), (__m512i)bits);
  Halves low_half;
  __builtin_memcpy(&low_half, &permuted, sizeof(low_half));
  return low_half;
}

FUSELAGE_INLINE Floats decode(Float16, Halves bits) {
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
}

FUSELAGE_INLINE Halves encode(Float16, Floats value) {
  return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
}

#elif FUSELAGE_VECTOR_BYTES == 32

FUSELAGE_INLINE Words widen_to_high(Halves bits) {
  return (Words)_mm256_cvtepu16_epi32((__m128i)bits) << 16;
}

FUSELAGE_INLINE Halves narrow_from_high(Words bits) {
  const __m256i source = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m256i in_each_half = _mm256_shuffle_epi8((__m256i)bits, source);
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(in_each_half, 0b1000));
}

FUSELAGE_INLINE Floats decode(Float16, Halves bits) {
  return (Floats)_mm256_cvtph_ps((__m128i)bits);
}

FUSELAGE_INLINE Halves encode(Float16, Floats value) {
  return (Halves)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
}

#else

FUSELAGE_INLINE Words widen_to_high(Halves bits) {
  return __builtin_convertvector(bits, Words) << 16;
}

FUSELAGE_INLINE Halves narrow_from_high(Words bits) {
  return __builtin_convertvector(bits >> 16, Halves);
}

#if defined(__aarch64__)

FUSELAGE_INLINE Floats decode(Float16, Halves bits) {
  return (Floats)vcvt_f32_f16((float16x4_t)bits);
}

FUSELAGE_INLINE Halves encode(Float16, Floats value) {
  return (Halves)vcvt_f16_f32((float32x4_t)value);
}

#else

// Without conversion instructions: the float16 exponent and mantissa are moved into place as
// integers, and a float32 multiplication or subtraction corrects the exponent. No operand is a
// float32 subnormal, so that flush-to-zero does not change a result.
FUSELAGE_INLINE Floats decode(Float16, Halves bits) {
  const Words wide = __builtin_convertvector(bits, Words);
  const Words sign = (wide & 0x8000) << 16;
  const Words magnitude = wide & 0x7fff;
  const Floats normal = (Floats)((magnitude << 13) + 0x70000000) * 0x1p-112f;
  const Floats subnormal = (Floats)(magnitude + 0x4b000000);  // 2^23 + magnitude, in units of 2^-24
  const Words value = magnitude < 0x400 ? (Words)((subnormal - 0x1p23f) * 0x1p-24f) : (Words)normal;
  return (Floats)(sign | value);
}

// The float32 addition of a power of two, 2^13 times the last bit to keep, does the rounding.
FUSELAGE_INLINE Halves encode(Float16, Floats value) {
  const Words bits = (Words)value;
  const Words sign = (bits >> 16) & 0x8000;
  const Words magnitude = bits & 0x7fffffff;
  const Floats saturated = ((Floats)magnitude * 0x1p112f) * 0x1p-110f;  // infinity from 2^16 on
  const Words exponent = magnitude & 0x7f800000;
  const Words smallest = broadcast_bits(0x38800000);  // of the smallest normal float16
  const Words kept = exponent < smallest ? smallest : exponent;
  const Words rounded = (Words)((Floats)(kept + 0x07800000) + saturated);
  const Words finite = ((rounded >> 13) & 0x7c00) + (rounded & 0x0fff);
  const Words quiet_nan = broadcast_bits(0x7e00);
  return __builtin_convertvector(sign | (value == value ? finite : quiet_nan), Halves);
}

#endif
#endif

// The low byte of each word.
#if FUSELAGE_VECTOR_BYTES == 64
FUSELAGE_INLINE Bytes low_bytes(Words words) {
  return (Bytes)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)words);
}
#elif FUSELAGE_VECTOR_BYTES == 32
FUSELAGE_INLINE Bytes low_bytes(Words words) {
  const __m256i source = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m256i in_each_half = _mm256_shuffle_epi8((__m256i)words, source);
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(in_each_half),
                                          _mm256_extracti128_si256(in_each_half, 1));
  Bytes bytes;
  __builtin_memcpy(&bytes, &both, sizeof(bytes));
  return bytes;
}
#else
FUSELAGE_INLINE Bytes low_bytes(Words words) { return __builtin_convertvector(words, Bytes); }
#endif

// A bfloat16 is the high half of a float32.
FUSELAGE_INLINE Floats decode(BFloat16, Halves bits) { return (Floats)widen_to_high(bits); }

FUSELAGE_INLINE Halves encode(BFloat16, Floats value) {
  const Words bits = (Words)value;
  const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Words quiet_nan = bits | 0x400000;
  return narrow_from_high(value == value ? rounded : quiet_nan);
}

// The second where one is a NaN, or both are zero. (Comparison and choice take g++ 12 two
// instructions.)
#if FUSELAGE_VECTOR_BYTES == 64
FUSELAGE_INLINE Floats minimum(Floats a, Floats b) {
  return (Floats)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
}
FUSELAGE_INLINE Floats maximum(Floats a, Floats b) {
  return (Floats)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
}
#elif FUSELAGE_VECTOR_BYTES == 32
FUSELAGE_INLINE Floats minimum(Floats a, Floats b) {
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
}
FUSELAGE_INLINE Floats maximum(Floats a, Floats b) {
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
}
#else
FUSELAGE_INLINE Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
FUSELAGE_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
#endif

// With instructions for it: v - floor(v), and v * 2^floor(power).
#if FUSELAGE_VECTOR_BYTES == 64
constexpr bool kHasScale = true;
FUSELAGE_INLINE Floats above_floor(Floats v) {
  return (Floats)_mm512_maskz_reduce_ps(0xffff, (__m512)v, _MM_FROUND_TO_NEG_INF);
}
FUSELAGE_INLINE Floats scale(Floats v, Floats power) {
  return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)v, (__m512)power);
}
#else
constexpr bool kHasScale = false;
FUSELAGE_INLINE Floats above_floor(Floats v) { return v; }
FUSELAGE_INLINE Floats scale(Floats v, Floats) { return v; }
#endif

// Loads and stores. `lanes` says how much of the vector there is: all of it, or the first `count`.

struct AllLanes {};

struct FirstLanes {
  int count;  // in [1, kLanes)
};

FUSELAGE_INLINE int64_t count_of(AllLanes) { return kLanes; }
FUSELAGE_INLINE int64_t count_of(FirstLanes lanes) { return lanes.count; }

// Lanes that are not there read as zero.
template <class Lanes>
FUSELAGE_INLINE Floats load(const float* from, Lanes lanes) {
  Floats value = {};
  __builtin_memcpy(&value, from, count_of(lanes) * sizeof(float));
  return value;
}

template <class T, class Lanes>
FUSELAGE_INLINE Floats load(const T* from, Lanes lanes) {
  Halves bits = {};
  __builtin_memcpy(&bits, from, count_of(lanes) * sizeof(T));
  return decode(T{}, bits);
}

// Zero in the lanes that are not there.
FUSELAGE_INLINE Floats cut(Floats value, AllLanes) { return value; }
FUSELAGE_INLINE Floats cut(Floats value, FirstLanes lanes) {
  for (int k = lanes.count; k < kLanes; ++k) value[k] = 0;
  return value;
}

template <class Lanes>
FUSELAGE_INLINE void store(float* to, Floats value, Lanes lanes) {
  __builtin_memcpy(to, &value, count_of(lanes) * sizeof(float));
}

template <class T, class Lanes>
FUSELAGE_INLINE void store(T* to, Floats value, Lanes lanes) {
  const Halves bits = encode(T{}, value);
  __builtin_memcpy(to, &bits, count_of(lanes) * sizeof(T));
}

// What a store as T and a load would give.
FUSELAGE_INLINE Floats round_to(float, Floats value) { return value; }

template <class T>
FUSELAGE_INLINE Floats round_to(T, Floats value) {
  return decode(T{}, encode(T{}, value));
}

// Types that are known when a kernel runs.

// visit(T{}), where T has the elements of `dtype`.
template <class Visit>
FUSELAGE_INLINE void visit_dtype(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::float32: return visit(float{});
    case DType::float16: return visit(Float16{});
    case DType::bfloat16: return visit(BFloat16{});
  }
}

// Elements from i on of data of T, or of float32.
template <class T, class Lanes>
FUSELAGE_INLINE Floats load_as(const void* data, DType dtype, int64_t i, Lanes lanes) {
  if (dtype == DType::float32) return load(static_cast<const float*>(data) + i, lanes);
  return load(static_cast<const T*>(data) + i, lanes);
}

template <class T, class Lanes>
FUSELAGE_INLINE void store_as(void* data, DType dtype, int64_t i, Floats value, Lanes lanes) {
  if (dtype == DType::float32) return store(static_cast<float*>(data) + i, value, lanes);
  store(static_cast<T*>(data) + i, value, lanes);
}

// Loops.

// body(i, lanes) for the vectors of [begin, end).
template <class Body>
FUSELAGE_INLINE void for_each_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, AllLanes{});
  if (i < end) body(i, FirstLanes{int(end - i)});
}

template <class T>
static void set_zero(T* row,  // [dim]
                     int64_t dim) {
  for_each_vector(0, dim, [&](int64_t i, auto lanes) { store(row + i, Floats{}, lanes); });
}

FUSELAGE_INLINE float sum_lanes(Floats value) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad quad[kLanes / 4];
  __builtin_memcpy(quad, &value, sizeof(quad));
  Quad sum = quad[0];
  for (int k = 1; k < kLanes / 4; ++k) sum += quad[k];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The sum over [0, size) of the lanes of term(i, lanes), which must be zero in lanes that are not
// there. Four float32 accumulators hide the latency of the addition. They are short, and their sums
// are added up in float64, so that the error does not grow with the size: the squares of bfloat16
// have so few bits that halfway cases are common, and in a long accumulator their rounding has a
// bias.
template <class Term>
FUSELAGE_INLINE double sum_vectors(int64_t size, Term term) {
  constexpr int64_t kBlock = 32 * 4 * kLanes;
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = size - begin < kBlock ? size : begin + kBlock;
    Floats sum0 = {}, sum1 = {}, sum2 = {}, sum3 = {};
    int64_t i = begin;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      sum0 += term(i, AllLanes{});
      sum1 += term(i + kLanes, AllLanes{});
      sum2 += term(i + 2 * kLanes, AllLanes{});
      sum3 += term(i + 3 * kLanes, AllLanes{});
    }
    for_each_vector(i, end, [&](int64_t j, auto lanes) { sum0 += term(j, lanes); });
    total += sum_lanes((sum0 + sum1) + (sum2 + sum3));
  }
  return total;
}

template <class T>
FUSELAGE_INLINE double sum_squares(const T* row,  // [dim]
                                   int64_t dim) {
  return sum_vectors(dim, [&](int64_t i, auto lanes) {
    const Floats value = load(row + i, lanes);
    return value * value;
  });
}

// 1 / sqrt(mean + eps), of the mean of a row's squares.
FUSELAGE_INLINE float rstd_of(double mean, float eps) {
  return 1 / __builtin_sqrtf(static_cast<float>(mean) + eps);
}

// Whether all of a row is zero. A row without statistics, one that overflowed or holds a NaN, has a
// gradient of NaN, but for that of a result which is not used: there torch.compile has zeros, and
// zeros must come of them.
template <class T>
static bool is_zero(const T* row,  // [dim]
                    int64_t dim) {
  return sum_vectors(dim, [&](int64_t i, auto lanes) {
           return load(row + i, lanes) == 0 ? Floats{} : broadcast(1);
         }) == 0;
}

// As sum_vectors, of kCount sums at once: term(i, lanes, sums) adds to each of the kCount
// accumulators it is given, nothing in lanes that are not there. Their blocks are shorter: sums of
// terms of either sign, as those of a gradient, are small beside their terms.
template <int kCount, class Term>
FUSELAGE_INLINE void sum_vectors_of(int64_t size, double (&totals)[kCount], Term term) {
  constexpr int64_t kBlock = 8 * 2 * kLanes;
  for (int k = 0; k < kCount; ++k) totals[k] = 0;
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = size - begin < kBlock ? size : begin + kBlock;
    Floats even[kCount] = {}, odd[kCount] = {};
    int64_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      term(i, AllLanes{}, even);
      term(i + kLanes, AllLanes{}, odd);
    }
    for_each_vector(i, end, [&](int64_t j, auto lanes) { term(j, lanes, even); });
    for (int k = 0; k < kCount; ++k) totals[k] += sum_lanes(even[k] + odd[k]);
  }
}

}  // namespace fuselage::cpu::FUSELAGE_ISA
