// What kernels that quantise share on a GPU (formulas: common/quant.h).
//
// The largest |x| is found among integers: the bits of |x| have the order of the numbers, and NaN
// is above infinity. So a NaN makes the scale one, as in PyTorch's amax, and no order is left to
// choose.
//
// kTyped: T is the dtype of x. Otherwise it is bfloat16 for both of half precision
// (common/dispatch_size.h). kForMany: aligned rows of float8_e4m3fn.
#pragma once

#include <type_traits>

#include "common/dispatch_size.h"
#include "common/float8.h"
#include "common/quant.h"
#include "common/quant_math.h"
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
// which there is noise.
template <typename T, int N>
__device__ __forceinline__ uint32_t key_of(const Vector<T, N>& vector) {
  uint32_t key = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Two numbers of half precision side by side, and three such pairs an instruction.
  if constexpr (sizeof(T) == 2 && Vector<T, N>::kWords % 2 == 0) {
#pragma unroll
    for (int i = 0; i < Vector<T, N>::kWords; i += 2)
      key = __vimax3_u16x2(key, vector.words[i] & 0x7fff7fffu, vector.words[i + 1] & 0x7fff7fffu);
    return max(key, key << 16);
  }
#endif
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kWords; ++i) {
    const uint32_t word = vector.words[i];
    key = max(key, word & 0x7fffffffu);
    if constexpr (sizeof(T) == 2) key = max(key, word << 16 & 0x7fffffffu);
  }
  return key;
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
  key = largest_of_lanes<kWarpSize>(key, threads);
  if (threads <= kWarpSize) return key;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (lane == 0) warps[threadIdx.x / kWarpSize] = key;
  __syncthreads();
  return largest_of_lanes<kWarpSize>(lane < threads / kWarpSize ? warps[lane] : 0, kWarpSize);
}

// ---- quotients ----

// x / scale, rounded once, for many x: 5 instructions where a division is about 9 and a branch.
//
// 1 / scale is kept as the sum of `reciprocal`, which is rounded to nearest, and `rest`. So the
// first quotient is off by less than one in its last place, its remainder is exact, and one
// correction rounds the quotient to nearest (Markstein 1990). That takes a scale that is neither
// very large nor very small, so both may be multiplied by a power of two.
struct ScaleDivisor {
  float scale, reciprocal, rest, factor;

  __device__ __forceinline__ explicit ScaleDivisor(float by) {
    const float size = fabsf(by);
    factor = size < 5.421010862e-20f          ? 18446744073709551616.0f  // 2^-64, 2^64
             : size > 18446744073709551616.0f ? 5.421010862e-20f
                                              : 1.0f;
    scale = by * factor;
    reciprocal = 1.0f / scale;
    rest = fmaf(-scale, reciprocal, 1.0f) * reciprocal;
    // Of infinity: zeros of the sign of x, and NaN of infinities.
    if (isinf(by)) scale = reciprocal = rest = 0.0f;
  }
  // |x| is no larger than what the scale was made of, or twice that. A zero may have any sign.
  __device__ __forceinline__ float quotient(float x) const {
    const float first = fmaf(x, reciprocal, x * rest);
    const float remainder = fmaf(-first, scale, x);
    return fmaf(remainder, reciprocal, first);
  }
};

// The upper bytes of four numbers of half precision.
__device__ __forceinline__ uint32_t upper_bytes(uint32_t first, uint32_t second) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(first, second, 0x7531);
#else
  return (first >> 8 & 0xffu) | (first >> 16 & 0xff00u) | (second << 8 & 0xff0000u) |
         (second & 0xff000000u);
#endif
}

// Cuts off what lies out of range, which a quotient could not hold. NaN stays.
template <int N>
__device__ __forceinline__ void cut_off(float (&values)[N], float bound) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    values[k] = values[k] > bound ? bound : values[k];
    values[k] = values[k] < -bound ? -bound : values[k];
  }
}

// ---- codes ----

__device__ __forceinline__ uint32_t encode_int8(float value) {
  const float kept = value != value ? 0.0f : fminf(fmaxf(value, -127.0f), 127.0f);
  return static_cast<uint32_t>(__float2int_rn(kept)) & 0xffu;
}

// kE4m3: what `format` is otherwise is known when the kernel runs.
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

// Writes the codes of `left` columns or fewer. Rows that start anywhere are written in aligned
// blocks, which a lane joins of the end of the vector before and the start of its own; the first
// and last lanes, and the end of the row, write bytes. All lanes of the warp call together.
template <bool kAligned, int N>
__device__ __forceinline__ void store_codes(const Vector<uint8_t, N>& codes, uint8_t* target,
                                            int left) {
  if constexpr (kAligned) {
    if (left > 0) codes.store(target);
  } else {
    constexpr int kWords = N / 4;
    uint64_t own = 0, before = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      own |= static_cast<uint64_t>(codes.words[i]) << (32 * i);
      before |= static_cast<uint64_t>(shuffle_up(codes.words[i], kWarpSize)) << (32 * i);
    }
    if (left <= 0) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int shift = Vector<uint8_t, N>::shift_of(target);
    const auto put_bytes = [&](int begin, int end) {
#pragma unroll 1
      for (int k = begin; k < end; ++k) target[k] = static_cast<uint8_t>(own >> (8 * k));
    };
    const int starts_here = N - shift;  // bytes of this vector in the block in which it starts
    if (left < starts_here || (lane == 0 && shift > 0)) {
      // The first lane has nothing of what comes before it; past the row's end there may be another
      // row's.
      if (lane > 0) {
#pragma unroll 1
        for (int k = starts_here; k < N; ++k)
          target[k - N] = static_cast<uint8_t>(before >> (8 * k));
      }
      put_bytes(0, min(left, starts_here));
    } else {
      const uint64_t block = shift == 0 ? own : own << (8 * shift) | before >> (8 * starts_here);
      Vector<uint8_t, N> whole;
#pragma unroll
      for (int i = 0; i < kWords; ++i) whole.words[i] = static_cast<uint32_t>(block >> (32 * i));
      whole.store(target - shift);
    }
    // What lies past that block is the next lane's to write, where it has some of the row.
    if (lane == kWarpSize - 1 || left <= N) put_bytes(starts_here, min(left, N));
  }
}

// A vector from its values to its codes in memory. kRare: with any scale. Otherwise with a positive
// one that needs no factor, which was made of the values: nothing is out of range. `bound`: of a
// given scale, beyond which the dividend is out of range; or infinity.
template <bool kForMany, bool kTyped, bool kRare, typename T, int N>
__device__ __forceinline__ void quantise(const QuantForward& p, const Vector<T, N>& vector,
                                         const ScaleDivisor& divisor, float bound, uint8_t* target,
                                         int left) {
  float values[N];
  if constexpr (kTyped) {
    vector.to_floats(values);
  } else {
    unpack(vector, opaque(p.x_dtype), values);
  }
  if constexpr (kRare) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] *= divisor.factor;
    if (bound < INFINITY) cut_off(values, bound);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float quotient = divisor.quotient(values[k]);
    values[k] =
        kRare || sizeof(T) != 2 ? copysignf(quotient, values[k] * divisor.reciprocal) : quotient;
  }
  Vector<uint8_t, N> codes = encode<kForMany>(values, opaque(p.format));
  if constexpr (!kRare && sizeof(T) == 2) {
    // The signs of x, which are the upper bits of its upper bytes.
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const uint32_t upper = upper_bytes(vector.words[2 * i], vector.words[2 * i + 1]);
      codes.words[i] = (codes.words[i] & 0x7f7f7f7fu) | (upper & 0x80808080u);
    }
  }
  store_codes<kForMany>(codes, target, left);
}

// Whether a scale needs the code for any.
__device__ __forceinline__ bool is_rare(const ScaleDivisor& divisor, float bound) {
  return divisor.factor != 1.0f || bound < INFINITY || !(divisor.scale > 0.0f);
}

template <bool kTyped, typename T>
__device__ __forceinline__ float scale_of(const QuantForward& p, uint32_t key) {
  return quant_scale_of(amax_of<kTyped, T>(key, p.x_dtype), p.limit, opaque(p.power_of_two));
}

// The bound of a given scale, beyond which the dividend is out of range: a number, so that infinite
// x are cut off. But infinity over infinity is NaN.
__device__ __forceinline__ float bound_of(const QuantForward& p, const ScaleDivisor& divisor) {
  if (p.given_scale == nullptr || isinf(*p.given_scale)) return INFINITY;
  return 2.0f * p.limit * fabsf(divisor.scale);
}

// The scale of the group that a vector is part of; `write`: whether there are columns of it.
template <bool kTyped, typename T, int N>
__device__ __forceinline__ float scale_of_group(const QuantForward& p, const Vector<T, N>& vector,
                                                int64_t row, int column, bool write) {
  constexpr int kLanes = kQuantGroup / N;
  // NOTE: a row of fewer lanes is shorter than a group.
  const int width = min(kLanes, static_cast<int>(blockDim.x));
  const float scale =
      scale_of<kTyped, T>(p, largest_of_lanes<kLanes>(write ? key_of(vector) : 0, width));
  if (threadIdx.x % width == 0 && write) {
    const int64_t group = column / kQuantGroup;
    p.scale[row * p.scale_row_stride + group * p.scale_group_stride] = scale;
  }
  return scale;
}

// A row's vectors, of which a thread has kVectors a warp apart, to scales and codes: aligned rows
// of float8_e4m3fn, which a warp or less, or the block has. `first_column`, `left`: the first
// column of this thread, and how many there are from there on, none past the last row.
template <bool kTyped, typename T, int kVectors>
__device__ __forceinline__ void quantise_row(const QuantForward& p,
                                             const Vector<T, 16 / sizeof(T)> (&vectors)[kVectors],
                                             int64_t row, int first_column, int left) {
  constexpr int kStep = kWarpSize * 16 / static_cast<int>(sizeof(T));
  __shared__ uint32_t warps[kWarpSize];
  uint8_t* target = p.q + row * p.dim + first_column;
  const auto each_vector = [&](auto&& f) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) f(vectors[j], j * kStep);
  };
  if (p.in_groups) {
    each_vector([&](const auto& vector, int offset) {
      const ScaleDivisor divisor(
          scale_of_group<kTyped>(p, vector, row, first_column + offset, left > offset));
      if (is_rare(divisor, INFINITY)) {
        quantise<true, kTyped, true>(p, vector, divisor, INFINITY, target + offset, left - offset);
      } else {
        quantise<true, kTyped, false>(p, vector, divisor, INFINITY, target + offset, left - offset);
      }
    });
    return;
  }
  float scale = 1.0f;
  if (p.given_scale != nullptr) {
    scale = *p.given_scale;
  } else {
    uint32_t key = 0;
    each_vector([&](const auto& vector, int offset) {
      key = max(key, left > offset ? key_of(vector) : 0);
    });
    scale = scale_of<kTyped, T>(p, largest_of_row(key, warps));
    if (threadIdx.x == 0 && row < p.rows) p.scale[row * p.scale_row_stride] = scale;
  }
  const ScaleDivisor divisor(scale);
  const float bound = bound_of(p, divisor);
  if (is_rare(divisor, bound)) {
    each_vector([&](const auto& vector, int offset) {
      quantise<true, kTyped, true>(p, vector, divisor, bound, target + offset, left - offset);
    });
  } else {
    each_vector([&](const auto& vector, int offset) {
      quantise<true, kTyped, false>(p, vector, divisor, bound, target + offset, left - offset);
    });
  }
}

}  // namespace fuselage
