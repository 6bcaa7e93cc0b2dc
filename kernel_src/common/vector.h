// The one vector type: N elements of T that are loaded and stored together, up to 16 bytes an
// instruction. Values are kept packed, as they were in memory, and converted to float where they
// are used, in pairs where the GPU has an instruction for two.
#pragma once

#include <type_traits>

#include "common/gpu_compat.h"
#include "common/ptx.h"

namespace fuselage {

#if defined(USE_ROCM)
using float16 = _Float16;
// HIP's own bfloat16 type changed between releases, so the conversions are spelled out.
struct bfloat16 {
  uint16_t bits;
};
#else
using float16 = __half;
using bfloat16 = __nv_bfloat16;
#endif

// ---- single values ----

__device__ __forceinline__ float to_float(float value) { return value; }

template <typename T>
__device__ __forceinline__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}

#if defined(USE_ROCM)

__device__ __forceinline__ float to_float(float16 value) { return static_cast<float>(value); }

__device__ __forceinline__ float to_float(bfloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

template <>
__device__ __forceinline__ float16 from_float<float16>(float value) {
  return static_cast<float16>(value);
}

template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

#else

__device__ __forceinline__ float to_float(float16 value) { return __half2float(value); }
__device__ __forceinline__ float to_float(bfloat16 value) { return __bfloat162float(value); }

template <>
__device__ __forceinline__ float16 from_float<float16>(float value) {
  return __float2half_rn(value);
}

template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

#endif

template <typename To, typename From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// `value` as T would hold it.
template <typename T>
__device__ __forceinline__ float round_to(float value) {
  return to_float(from_float<T>(value));
}

// ---- one 32-bit word: a float, or a pair of half values ----

template <typename T>
struct WordTraits {
  static constexpr int kElements = 2;

  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = to_float(bits_as<T>(static_cast<uint16_t>(word)));
    values[1] = to_float(bits_as<T>(static_cast<uint16_t>(word >> 16)));
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return bits_as<uint16_t>(from_float<T>(values[0])) |
           static_cast<uint32_t>(bits_as<uint16_t>(from_float<T>(values[1]))) << 16;
  }
};

template <>
struct WordTraits<float> {
  static constexpr int kElements = 1;

  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return __float_as_uint(values[0]);
  }
};

#if !defined(USE_ROCM)

template <>
struct WordTraits<bfloat16> {
  static constexpr int kElements = 2;

  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return bits_as<uint32_t>(__floats2bfloat162_rn(values[0], values[1]));
  }
};

template <>
struct WordTraits<float16> {
  static constexpr int kElements = 2;

  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    const float2 pair = __half22float2(bits_as<__half2>(word));
    values[0] = pair.x;
    values[1] = pair.y;
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return bits_as<uint32_t>(__floats2half2_rn(values[0], values[1]));
  }
};

#endif

// ---- vectors ----

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vector {
  using Traits = WordTraits<T>;
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kAlignment = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = kBytes / 4;
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;  // of an element
  static constexpr int kElementBits = 8 * static_cast<int>(sizeof(T));
  static_assert(kBytes % 4 == 0 && (kBytes <= 16 || kBytes % 16 == 0),
                "a vector is 4, 8 or k * 16 bytes");

  uint32_t words[kWords];

  static __device__ __forceinline__ Vector zero() {
    Vector v;
#pragma unroll
    for (int i = 0; i < kWords; ++i) v.words[i] = 0;
    return v;
  }

  // NOTE: `source`, in global memory, must be aligned to kAlignment.
  static __device__ __forceinline__ Vector load(const void* source) {
    if constexpr (kAlignment == 16) {
      Vector v;
#pragma unroll
      for (int i = 0; i < kWords; i += 4)
        v.set(i, load_global_16(static_cast<const uint4*>(source) + i / 4));
      return v;
    }
    return load_shared(source);
  }

  // As load, from shared memory.
  static __device__ __forceinline__ Vector load_shared(const void* source) {
    Vector v;
    if constexpr (kAlignment == 16) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) v.set(i, reinterpret_cast<const uint4*>(source)[i / 4]);
    } else if constexpr (kAlignment == 8) {
      const uint2 pair = *reinterpret_cast<const uint2*>(source);
      v.words[0] = pair.x;
      v.words[1] = pair.y;
    } else {
      v.words[0] = *reinterpret_cast<const uint32_t*>(source);
    }
    return v;
  }

  // As load_shared, of a vector that is used in part.
  static __device__ __forceinline__ Vector load_shared_whole(const void* source) {
    if constexpr (kBytes != 16) return load_shared(source);
    Vector v;
    v.set(0, load_shared_16(source));
    return v;
  }

  // Starts the copy of one vector into shared memory (see cp_async).
  static __device__ __forceinline__ void load_async(Vector* shared, const void* source) {
#pragma unroll
    for (int i = 0; i < kBytes; i += kAlignment) {
      cp_async<kAlignment>(reinterpret_cast<char*>(shared) + i,
                           static_cast<const char*>(source) + i);
    }
  }

  __device__ __forceinline__ void store(void* target) const {
    if constexpr (kAlignment == 16) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        reinterpret_cast<uint4*>(target)[i / 4] =
            make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    } else if constexpr (kAlignment == 8) {
      *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(target) = words[0];
    }
  }

  // Bytes between the aligned address at or before `pointer`, and it.
  static __device__ __forceinline__ int shift_of(const void* pointer) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kAlignment);
  }

  __device__ __forceinline__ void to_floats(float (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) Traits::unpack(words[i], values + i * Traits::kElements);
  }

  static __device__ __forceinline__ Vector from_floats(const float (&values)[N]) {
    Vector v;
#pragma unroll
    for (int i = 0; i < kWords; ++i) v.words[i] = Traits::pack(values + i * Traits::kElements);
    return v;
  }

  // ---- rows of any alignment: `column` is a multiple of N, the row's start is aligned to T alone
  // ----

  // Of a shift in bytes, what is left of whole words.
  static __device__ __forceinline__ int bits_in_word(int shift) {
    return sizeof(T) < 4 ? (shift & 3) * 8 : 0;
  }

  // Bytes [shift, shift + kBytes) of two vectors in a row.
  static __device__ __forceinline__ Vector shifted(const Vector& first, const Vector& second,
                                                   int shift) {
    Vector result = zero();
    if constexpr (kBytes == 8 || kBytes == 16) {
      uint32_t all[2 * kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        all[i] = first.words[i];
        all[kWords + i] = second.words[i];
      }
#pragma unroll
      for (int step = 1; step < kWords; step *= 2) {
#pragma unroll
        for (int i = 0; i < 2 * kWords - step; ++i)
          all[i] = shift & 4 * step ? all[i + step] : all[i];
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint64_t pair = static_cast<uint64_t>(all[i + 1]) << 32 | all[i];
        result.words[i] = static_cast<uint32_t>(pair >> bits_in_word(shift));
      }
    }
    return result;
  }

  // Bytes [kBytes - shift, 2 * kBytes - shift).
  static __device__ __forceinline__ Vector shifted_up(const Vector& first, const Vector& second,
                                                      int shift) {
    uint32_t all[2 * kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      all[i] = first.words[i];
      all[kWords + i] = second.words[i];
    }
#pragma unroll
    for (int step = 1; step < kWords; step *= 2) {
#pragma unroll
      for (int i = 2 * kWords - 1; i >= step; --i)
        all[i] = shift & 4 * step ? all[i - step] : all[i];
    }
    Vector result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint64_t pair = static_cast<uint64_t>(all[kWords + i]) << 32 | all[kWords + i - 1];
      result.words[i] = static_cast<uint32_t>(pair << bits_in_word(shift) >> 32);
    }
    return result;
  }

  // Writes the elements of a row that starts anywhere, or none where not `inside`. The `width`
  // lanes of a group have neighbouring vectors: each joins the end of the vector before it to the
  // start of its own into one aligned block; only the first and last of a group, and of the row,
  // write parts of blocks. All lanes of the warp call together.
  __device__ __forceinline__ void store_unaligned(T* row, int column, int dim, bool inside,
                                                  int width) const {
    char* target = reinterpret_cast<char*>(row + column);
    const int shift = shift_of(target);
    // Of the row from here on. NOTE: cut, as those of a whole row may be more than an int holds.
    const int bytes = min(dim - column, 2 * N) * static_cast<int>(sizeof(T));
    if constexpr (kBytes == 8 || kBytes == 16) {
      Vector before;
#pragma unroll
      for (int i = 0; i < kWords; ++i) before.words[i] = shuffle_up(words[i], width);
      if (!inside) return;
      if (shift == 0) {
        if (bytes >= kBytes) {
          store(target);
        } else {
          store_part(*this, target, 0, bytes);
        }
        return;
      }
      const int lane = threadIdx.x % width;
      const Vector block = shifted(before, *this, kBytes - shift);  // ends within this vector
      if (lane > 0 && bytes >= kBytes - shift) {
        block.store(target - shift);
      } else {
        store_part(block, target - shift, lane > 0 ? 0 : shift,
                   bytes < kBytes - shift ? bytes + shift : kBytes);
      }
      // What lies after that block is left to the next lane, where there is one with the rest of
      // it.
      if (bytes > kBytes - shift && (lane == width - 1 || bytes <= kBytes)) {
        store_part(shifted(*this, *this, kBytes - shift), target - shift + kBytes, 0,
                   bytes < kBytes ? bytes + shift - kBytes : shift);
      }
    } else {
      if (inside) store_elements(*this, row, column, dim);
    }
  }

  // Rows of whole words, that start on the boundary of one. Words past the row's end are zero.
  static __device__ __forceinline__ Vector load_words(const T* row, int column, int dim) {
    Vector v;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int at = column + i * Traits::kElements;
      v.words[i] = at < dim ? *reinterpret_cast<const uint32_t*>(row + at) : 0;
    }
    return v;
  }
  __device__ __forceinline__ void store_words(T* row, int column, int dim) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int at = column + i * Traits::kElements;
      if (at < dim) *reinterpret_cast<uint32_t*>(row + at) = words[i];
    }
  }

  // The elements of a vector that only begins in a row, one by one; those past the row's end are
  // zero. NOTE: inlined, though it is rare and much code. A call in their place came with 5 to 15%
  // more time for rows of 4097 columns on an H200.
  static __device__ __forceinline__ Vector load_elements(const T* row, int column, int dim) {
    Vector v;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      v.words[i] = 0;
#pragma unroll
      for (int k = 0; k < Traits::kElements; ++k) {
        const int at = column + i * Traits::kElements + k;
        if (at < dim) v.words[i] |= uint32_t{bits_as<Bits>(row[at])} << k * kElementBits;
      }
    }
    return v;
  }
  static __device__ __forceinline__ void store_elements(const Vector vector, T* row, int column,
                                                        int dim) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t word = vector.words[i / Traits::kElements];
      if (column + i < dim)
        row[column + i] =
            bits_as<T>(static_cast<Bits>(word >> i % Traits::kElements * kElementBits));
    }
  }

 private:
  __device__ __forceinline__ void set(int i, const uint4& quad) {
    words[i] = quad.x;
    words[i + 1] = quad.y;
    words[i + 2] = quad.z;
    words[i + 3] = quad.w;
  }

  // Writes bytes [begin, end) of these 8 or 16 to the aligned block at `target`; both are even.
  static __device__ __forceinline__ void store_part(const Vector vector, char* target, int begin,
                                                    int end) {
    const uint32_t(&words)[kWords] = vector.words;
    if (begin == 0 && end < kBytes) {
      // The start of the block, in pieces of 8, 4 and 2 bytes.
      if (kBytes == 16 && end & 8)
        *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
      if (end & 4) {
        *reinterpret_cast<uint32_t*>(target + (end & 8)) =
            kBytes == 16 && end & 8 ? words[kWords / 2] : words[0];
      }
      if (end & 2) vector.store_half(target, end - 2, false);
    } else if (end == kBytes) {
      // The end of the block, in pieces of 2, 4 and 8 bytes.
      if (begin & 2) vector.store_half(target, begin, true);
      const int next = begin + (begin & 2);
      if (next & 4) {
        *reinterpret_cast<uint32_t*>(target + next) =
            kBytes == 8 || next & 8 ? words[kWords - 1] : words[1];
      }
      if (next <= kBytes - 8) {
        *reinterpret_cast<uint2*>(target + kBytes - 8) =
            make_uint2(words[kWords - 2], words[kWords - 1]);
      }
      if (kBytes == 16 && next == 0)
        *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    } else {
      for (int byte = begin; byte < end; byte += 2) vector.store_half(target, byte, byte & 2);
    }
  }

  // Writes the two bytes from `byte` on: the upper half of their word or the lower.
  __device__ __forceinline__ void store_half(char* target, int byte, bool upper) const {
    const uint32_t low = byte & 4 ? words[1] : words[0];
    const uint32_t high = byte & 4 ? words[kWords - 1] : words[kWords - 2];
    const uint32_t word = kBytes == 16 && byte & 8 ? high : low;
    *reinterpret_cast<uint16_t*>(target + byte) = static_cast<uint16_t>(upper ? word >> 16 : word);
  }
};

// A vector of a row in global memory on its way: start() of all vectors first, then finish() of
// each, so that the loads are in flight together. Elements past the row's end are zero.
template <typename T, int N, bool kAligned>
struct Loading {
  Vector<T, N> first;

  __device__ __forceinline__ void start(const T* row, int column, int dim) {
    first = column < dim ? Vector<T, N>::load(row + column) : Vector<T, N>::zero();
  }
  __device__ __forceinline__ Vector<T, N> finish(const T*, int, int) const { return first; }
};

// Rows that start anywhere: the vector is cut out of two aligned blocks.
template <typename T, int N>
struct Loading<T, N, false> {
  using V = Vector<T, N>;
  V first, second;

  // NOTE: the first block may begin before the row, but not before the row's allocation; no block
  // may end past the row's end. The one or two vectors for which it would are read by the element.
  static __device__ __forceinline__ bool in_blocks(const T* row, int column, int dim, int shift) {
    if ((V::kBytes < 8 || V::kBytes > 16) && shift != 0) return false;
    return column + N + (shift == 0 ? 0 : N - shift / static_cast<int>(sizeof(T))) <= dim;
  }
  __device__ __forceinline__ void start(const T* row, int column, int dim) {
    const int shift = V::shift_of(row + column);
    const char* block = reinterpret_cast<const char*>(row + column) - shift;
    const bool whole = in_blocks(row, column, dim, shift);
    first = whole ? V::load(block) : V::zero();
    second = whole && shift != 0 ? V::load(block + V::kBytes) : V::zero();
  }
  __device__ __forceinline__ V finish(const T* row, int column, int dim) const {
    const int shift = V::shift_of(row + column);
    if (column >= dim || in_blocks(row, column, dim, shift))
      return shift == 0 ? first : V::shifted(first, second, shift);
    return V::load_elements(row, column, dim);
  }
};

// One vector of a row, by itself.
template <bool kAligned, int N, typename T>
__device__ __forceinline__ Vector<T, N> load(const T* row, int column, int dim) {
  Loading<T, N, kAligned> loading;
  loading.start(row, column, dim);
  return loading.finish(row, column, dim);
}

// Writes `vector` where `inside`. All lanes of the warp call together unless kAligned.
template <bool kAligned, int N, typename T>
__device__ __forceinline__ void store(const Vector<T, N>& vector, T* row, int column, int dim,
                                      bool inside) {
  if constexpr (kAligned) {
    if (inside) vector.store(row + column);
  } else {
    vector.store_unaligned(row, column, dim, inside,
                           blockDim.x < kWarpSize ? blockDim.x : kWarpSize);
  }
}

// Zero where all values are, and NaN otherwise. That stands for sums over a row without statistics,
// one that overflowed or holds a NaN: its gradient is NaN, but for that of a result which is not
// used. There torch.compile has zeros, and zeros are what must come of them.
template <int N>
__device__ __forceinline__ float nan_unless_zero(const float (&values)[N]) {
  float result = 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) result = values[k] == 0.0f ? result : __uint_as_float(0x7fc00000u);
  return result;
}

// The same of a whole row, by one thread. Rows without statistics are rare, and those that are used
// mostly end it at once.
template <typename T>
__device__ __forceinline__ bool is_zero(const T* row, int dim) {
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int start = 0; start < dim; start += kAtOnce) {
    bool all = true;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (start + k < dim) all &= to_float(row[start + k]) == 0.0f;
    }
    if (!all) return false;
  }
  return true;
}

// Values rounded to T and back.
template <typename T, int N>
__device__ __forceinline__ void round_all(float (&values)[N]) {
  Vector<T, N>::from_floats(values).to_floats(values);
}

}  // namespace fuselage
