// Copies of tiles into the stages of sample/lm_head.cu, by cp.async, of rows of any alignment.
#pragma once

#include <type_traits>

#include "common/ptx.h"
#include "common/vector.h"

namespace fuselage {
namespace {

// The offset of a chunk of 16 bytes of a row of kChunks: swizzled, so that eight rows have it in
// different banks.
template <int kChunks>
__device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
  constexpr int kRowsOfLine = 8 / kChunks;
  return static_cast<uint32_t>(row * kChunks + (chunk ^ (row / kRowsOfLine % kChunks))) * 16;
}

__device__ __forceinline__ void store_word(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

__device__ __forceinline__ int last_of(int64_t left, int count) {
  return static_cast<int>(left < count ? left : count) - 1;
}

// Starts the copy of kRows rows of a matrix into a stage: columns [column, column + kChunks * 16 /
// sizeof(E)), of which those from dim on are zero. Rows past `last` are copies of it, whose sums
// nobody reads. Rows that are not aligned to 16 bytes are copied by the word, or through registers.
template <int kRows, int kChunks, int kThreads, bool kAligned, typename E>
__device__ __forceinline__ void copy_rows(uint32_t shared, const E* matrix, int64_t stride,
                                          int last, int64_t column, int64_t dim) {
  constexpr int kSize = static_cast<int>(sizeof(E));
  constexpr int kPart = kAligned ? 16 : 4;  // bytes
  constexpr int kParts = kChunks * 16 / kPart, kSlots = kRows * kParts;
  constexpr int kCopies = (kSlots + kThreads - 1) / kThreads;
  static_assert(kThreads % kParts == 0, "a thread copies the same columns of all its rows");
  const int part = threadIdx.x % kParts, row = threadIdx.x / kParts;
  const int64_t own = column + part * (kPart / kSize);
  const int64_t left = (dim - own) * kSize;
  const int bytes = static_cast<int>(left < 0 ? 0 : left < kPart ? left : kPart);
  const E* from = matrix + (bytes > 0 ? own : 0);
  const auto source = [&](int i) {
    const int at = row + i * (kThreads / kParts);
    return from + (at < last ? at : last) * stride;
  };
  const auto to = [&](int i) {
    const int at = row + i * (kThreads / kParts);
    return shared + chunk_at<kChunks>(at, part * kPart / 16) + part * kPart % 16;
  };
  const auto has = [&](int i) {
    return kSlots % kThreads == 0 || row + i * (kThreads / kParts) < kRows;
  };
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (has(i)) cp_async_zfill_16(to(i), source(i), bytes);
    }
  } else if (kSize == 4 ||
             (reinterpret_cast<uintptr_t>(matrix) | static_cast<uintptr_t>(stride * kSize)) % 4 ==
                 0) {
#pragma unroll 8
    for (int i = 0; i < kCopies; ++i) {
      if (has(i)) cp_async_zfill_4(to(i), source(i), bytes);
    }
  } else if constexpr (kSize < 4) {
    constexpr int kBatch = kCopies < 8 ? kCopies : 8;  // loads in flight
    static_assert(kCopies % kBatch == 0, "whole batches");
#pragma unroll 1
    for (int i = 0; i < kCopies; i += kBatch) {
      using Bits = std::conditional_t<kSize == 2, uint16_t, uint8_t>;
      Bits elements[kBatch][4 / kSize] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int k = 0; k < 4 / kSize; ++k) {
          if (k * kSize < bytes) elements[j][k] = bits_as<Bits>(source(i + j)[k]);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < 4 / kSize; ++k)
          word |= static_cast<uint32_t>(elements[j][k]) << (k * kSize * 8);
        if (has(i + j)) store_word(to(i + j), word);
      }
    }
  }
}

}  // namespace
}  // namespace fuselage
