// What kernels that quantise share on a GPU (formulas: common/quant.h).
//
// The largest |x| is found among integers: the bits of |x| have the order of the numbers, and NaN
// is above infinity. So a NaN makes the scale one, as in PyTorch's amax, and no order is left to
// choose.
//
// kTyped: T is the dtype of x. Otherwise it is bfloat16 for both of half precision
// (common/dispatch_size.h). kE4m3: the format is float8_e4m3fn; otherwise it is known when the
// kernel runs. Codes are written as rows of any dtype are (common/row_vectors.h): those of rows of
// an odd size start at any byte.
#pragma once

#include <type_traits>

#include "common/dispatch_size.h"
#include "common/float8.h"
#include "common/quant.h"
#include "common/quant_math.h"
#include "common/reduce.h"
#include "common/row_vectors.h"

namespace fuselage {

// A value of which the compiler does not know that it is the same the next time. NOTE: it otherwise
// makes copies of all that follows for each dtype and option, of one vector after the other: 120 KB
// of code for a kernel.
template <typename V>
__device__ __forceinline__ V opaque(V value) {
#if defined(USE_ROCM)
  return value;
#else
  int bits = static_cast<int>(value);
  asm volatile("" : "+r"(bits));
  return static_cast<V>(bits);
#endif
}

// ---- the largest |x| ----

// What keys of |x| have in their upper bits: all of a float32, or the 16 of half precision, below
// which there is noise. `keys`, of many vectors, may be two numbers of half precision side by side:
// there is an instruction for three such words. key_of takes the larger one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <typename T>
constexpr bool kPairsOfKeys = sizeof(T) == 2;
#else
template <typename T>
constexpr bool kPairsOfKeys = false;
#endif

// The larger ones of `keys` and those of a vector.
template <typename T, int N>
__device__ __forceinline__ uint32_t larger_keys(uint32_t keys, const Vector<T, N>& vector) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kPairsOfKeys<T>) {
    static_assert(Vector<T, N>::kWords % 2 == 0, "two words an instruction");
#pragma unroll
    for (int i = 0; i < Vector<T, N>::kWords; i += 2)
      keys = __vimax3_u16x2(keys, vector.words[i] & 0x7fff7fffu, vector.words[i + 1] & 0x7fff7fffu);
    return keys;
  }
#endif
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kWords; ++i) {
    const uint32_t word = vector.words[i];
    keys = max(keys, word & 0x7fffffffu);
    if constexpr (sizeof(T) == 2) keys = max(keys, word << 16 & 0x7fffffffu);
  }
  return keys;
}

template <typename T>
__device__ __forceinline__ uint32_t key_of(uint32_t keys) {
  return kPairsOfKeys<T> ? max(keys, keys << 16) : keys;
}

template <bool kTyped, typename T>
__device__ __forceinline__ float amax_of(uint32_t key, DType dtype) {
  if (sizeof(T) == sizeof(float)) return bits_as<float>(key);
  if (kTyped ? std::is_same_v<T, bfloat16> : opaque(dtype) == DType::bfloat16)
    return bits_as<float>(key & 0xffff0000u);
  return to_float(bits_as<float16>(static_cast<uint16_t>(key >> 16)));
}

// Over `width` neighbouring lanes, a power of two of at most kMost.
template <int kMost>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t key, int width) {
#pragma unroll
  for (int mask = kMost / 2; mask > 0; mask /= 2) {
    const uint32_t other = shuffle_xor(key, mask, kWarpSize);
    if (mask < width) key = max(key, other);
  }
  return key;
}

// Over the threads of a row, which is a warp or less, or the block.
__device__ __forceinline__ uint32_t largest_of_row(uint32_t key, uint32_t (&warps)[kWarpSize]) {
  const int threads = static_cast<int>(blockDim.x);
  if (threads < kWarpSize) return largest_of_lanes<kWarpSize / 2>(key, threads);
  key = highest_of_warp(key);
  if (threads == kWarpSize) return key;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (lane == 0) warps[threadIdx.x / kWarpSize] = key;
  __syncthreads();
  return highest_of_warp(lane < threads / kWarpSize ? warps[lane] : 0);
}

// ---- quotients ----

// Cuts off what lies out of range, which a quotient could not hold. NaN stays.
template <int N>
__device__ __forceinline__ void cut_off(float (&values)[N], float bound) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    values[k] = values[k] > bound ? bound : values[k];
    values[k] = values[k] < -bound ? -bound : values[k];
  }
}

// 2^-64 and 2^64: scales in between need no factor.
constexpr float kSmallestUsualScale = 5.421010862e-20f,
                kLargestUsualScale = 18446744073709551616.0f;

// x / scale, rounded once, for many x: 5 instructions where a division is about 9 and a branch.
//
// 1 / scale is kept as the sum of `reciprocal`, which is rounded to nearest, and `rest`. So the
// first quotient is off by less than one in its last place, its remainder is exact, and one
// correction rounds the quotient to nearest (Markstein 1990). That takes a scale that is neither
// very large nor very small, so both may be multiplied by a power of two.
struct ScaleDivisor {
  static constexpr bool kE4m3 = false;  // whether it is for that format alone
  float scale, reciprocal, rest, factor;
  float bound;  // of a given scale, beyond which the dividend is out of range; or infinity

  __device__ __forceinline__ ScaleDivisor(const QuantForward& p, float by) {
    const float size = fabsf(by);
    factor = size < kSmallestUsualScale  ? kLargestUsualScale
             : size > kLargestUsualScale ? kSmallestUsualScale
                                         : 1.0f;
    scale = by * factor;
    reciprocal = 1.0f / scale;
    rest = fmaf(-scale, reciprocal, 1.0f) * reciprocal;
    // Of infinity: zeros of the sign of x, and NaN of infinities.
    if (isinf(by)) scale = reciprocal = rest = 0.0f;
    // A number, so that infinite x are cut off. But infinity over infinity is NaN.
    bound = p.given_scale == nullptr || isinf(by) ? INFINITY : 2.0f * p.limit * fabsf(scale);
  }
  // |x| is no larger than what the scale was made of, or twice that.
  __device__ __forceinline__ float quotient(float x) const {
    const float first = fmaf(x, reciprocal, x * rest);
    const float remainder = fmaf(-first, scale, x);
    return copysignf(fmaf(remainder, reciprocal, first), x * reciprocal);
  }
  template <int N>
  __device__ __forceinline__ void divide(float (&values)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] *= factor;
    if (bound < INFINITY) cut_off(values, bound);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = quotient(values[k]);
  }
};

// The same for usual scales that are made of x, and float8_e4m3fn: nothing is out of range.
template <typename T>
struct MadeDivisor {
  static constexpr bool kE4m3 = true;
  float reciprocal, rest;

  // x of half precision: 2 instructions for a quotient that is rounded to the same eight bits. It
  // is off by 2^-43 of itself before it is rounded to float32. x, amax and the limit have few bits:
  // x * limit / amax is halfway between two codes, or 2^-19 away from there, further than any
  // error. Halfway the rounding of the scale decides. All x and amax have been tried, with
  // reciprocals that are up to six units off (test_every_largest_value_of_half_precision).
  //
  // NOTE: the reciprocal is too small, so that `rest` is positive and a zero keeps its sign.
  __device__ __forceinline__ MadeDivisor(const QuantForward&, float scale) {
    static_assert(sizeof(T) == 2, "float32 has more bits");
    reciprocal = bits_as<float>(bits_as<uint32_t>(reciprocal_of_normal(scale)) - 2);
    rest = fmaf(-scale, reciprocal, 1.0f) * reciprocal;
  }
  template <int N>
  __device__ __forceinline__ void divide(float (&values)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = fmaf(values[k], reciprocal, values[k] * rest);
  }
};

template <>
struct MadeDivisor<float> : ScaleDivisor {
  static constexpr bool kE4m3 = true;
  using ScaleDivisor::ScaleDivisor;
  template <int N>
  __device__ __forceinline__ void divide(float (&values)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = quotient(values[k]);
  }
};

__device__ __forceinline__ bool is_usual_scale(float scale) {
  return scale >= kSmallestUsualScale && scale <= kLargestUsualScale;
}

// ---- codes ----

__device__ __forceinline__ uint32_t encode_int8(float value) {
  const float kept = value != value ? 0.0f : fminf(fmaxf(value, -127.0f), 127.0f);
  return static_cast<uint32_t>(__float2int_rn(kept)) & 0xffu;
}

template <bool kE4m3, int N>
__device__ __forceinline__ Vector<uint8_t, N> encode(const float (&values)[N], QuantFormat format) {
  Vector<uint8_t, N> codes;
  const auto each_word = [&](auto pair) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float* four = values + 4 * i;
      codes.words[i] = pair(four[0], four[1]) | pair(four[2], four[3]) << 16;
    }
  };
  if (kE4m3 || format == QuantFormat::e4m3) {
    each_word([](float a, float b) { return encode_float8x2<3>(a, b); });
  } else if (format == QuantFormat::e5m2) {
    each_word([](float a, float b) { return encode_float8x2<2>(a, b); });
  } else {
    each_word([](float a, float b) { return encode_int8(a) | encode_int8(b) << 8; });
  }
  return codes;
}

template <bool kTyped, typename T>
__device__ __forceinline__ float scale_of(const QuantForward& p, uint32_t key) {
  return quant_scale_of(amax_of<kTyped, T>(key, p.x_dtype), p.limit, opaque(p.power_of_two));
}

// The scale of the group that a vector is part of, one of kVectors of a thread; `write`: whether
// there are columns of it.
template <bool kTyped, int kVectors, typename T, int N>
__device__ __forceinline__ float scale_of_group(const QuantForward& p, const Vector<T, N>& vector,
                                                int64_t row, int column, bool write) {
  constexpr int kLanes = kQuantGroup / N;
  // NOTE: a row of fewer lanes is shorter than a group.
  const int width = min(kLanes, lanes_of_row<kVectors>());
  const uint32_t key = write ? key_of<T>(larger_keys(0, vector)) : 0;
  const float scale = scale_of<kTyped, T>(p, largest_of_lanes<kLanes>(key, width));
  if (threadIdx.x % width == 0 && write) {
    const int64_t group = column / kQuantGroup;
    p.scale[row * p.scale_row_stride + group * p.scale_group_stride] = scale;
  }
  return scale;
}

// Whether vector j of the warp lies past the row's end. Aligned, it is cheaper not to look.
template <bool kAligned, int N>
__device__ __forceinline__ bool is_past_end(int left, int j) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  return !kAligned && j > 0 && left + lane * N <= j * kWarpSize * N;
}

// A thread's vectors to codes, by the row's scale or those of their groups. `first_column`, `left`:
// the first column of this thread, and how many there are from there on (RowStoring).
template <bool kE4m3, bool kTyped, bool kAligned, typename T, int N, int kVectors>
__device__ __forceinline__ void quantise_vectors(const QuantForward& p,
                                                 const Vector<T, N> (&vectors)[kVectors],
                                                 float row_scale, int64_t row, int first_column,
                                                 int left) {
  constexpr int kStep = kWarpSize * N;
  RowStoring<uint8_t, N, kVectors, kAligned> storing(p.q + row * p.dim + first_column, left);
  // Those after the first are of groups alone: a row has one divisor.
  float scales[kVectors];
  scales[0] = row_scale;
  bool are_usual = is_usual_scale(row_scale);
  if (p.in_groups) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      scales[j] = scale_of_group<kTyped, kVectors>(p, vectors[j], row, first_column + j * kStep,
                                                   left > j * kStep);
      are_usual &= is_usual_scale(scales[j]);
    }
  }
  const auto put_all = [&](const auto& make_divisor) {
    auto divisor = make_divisor(scales[0]);
    constexpr bool kIsE4m3 = kE4m3 || decltype(divisor)::kE4m3;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (is_past_end<kAligned, N>(left, j)) continue;
      if (j > 0 && p.in_groups) divisor = make_divisor(scales[j]);
      float values[N];
      if constexpr (kTyped) {
        vectors[j].to_floats(values);
      } else {
        unpack(vectors[j], opaque(p.x_dtype), values);
      }
      divisor.divide(values);
      storing.put(j, encode<kIsE4m3>(values, opaque(p.format)));
    }
  };
  if (are_usual && p.given_scale == nullptr && (kE4m3 || p.format == QuantFormat::e4m3)) {
    put_all([&](float scale) { return MadeDivisor<T>(p, scale); });
  } else {
    put_all([&](float scale) { return ScaleDivisor(p, scale); });
  }
  storing.end();
}

// A row's vectors, of which a thread has kVectors a warp apart, to scales and codes: rows of
// float8_e4m3fn, which a warp or less, or the block has. No columns are left past the last row.
template <bool kTyped, bool kAligned, typename T, int kVectors>
__device__ __forceinline__ void quantise_row(const QuantForward& p,
                                             const Vector<T, 16 / sizeof(T)> (&vectors)[kVectors],
                                             int64_t row, int first_column, int left) {
  __shared__ uint32_t warps[kWarpSize];
  float scale = 1.0f;
  if (p.given_scale != nullptr) {
    scale = *p.given_scale;
  } else if (!p.in_groups) {
    uint32_t keys = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      keys = left > j * kWarpSize * 16 / static_cast<int>(sizeof(T)) ? larger_keys(keys, vectors[j])
                                                                     : keys;
    scale = scale_of<kTyped, T>(p, largest_of_row(key_of<T>(keys), warps));
    if (threadIdx.x == 0 && row < p.rows) p.scale[row * p.scale_row_stride] = scale;
  }
  quantise_vectors<true, kTyped, kAligned>(p, vectors, scale, row, first_column, left);
}

}  // namespace fuselage
