// Rows of any alignment on their way through shared memory. Between global and shared memory the
// threads copy aligned blocks of 16 bytes together; an element keeps its place within the block, so
// a row starts in shared memory as far past a boundary as in global memory. There each thread
// reads and writes its own vectors, by the word.
#pragma once

#include "common/launch_policy.h"
#include "common/ptx.h"
#include "common/vector.h"

namespace fuselage {

#if defined(__CUDACC__) || defined(__HIPCC__)

// Bytes between the boundary at or before `pointer`, and it.
__device__ __forceinline__ int bytes_behind_boundary(const void* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % 16);
}

// Starts the copy of `count` elements, of which element i then is at `staged` +
// bytes_behind_boundary(source) + i * sizeof(T). `thread` of `threads` does its share.
template <typename T>
__device__ __forceinline__ void stage_in(char* staged, const T* source, int count, int thread,
                                         int threads) {
  const int shift = bytes_behind_boundary(source);
  // NOTE: the first block may begin before the row, but not before the row's allocation.
  const char* block = reinterpret_cast<const char*>(source) - shift;
  const int bytes = shift + count * static_cast<int>(sizeof(T));
  for (int offset = 16 * thread; offset < bytes; offset += 16 * threads)
    cp_async_partial(staged + offset, block + offset, min(bytes - offset, 16));
}

// The way back, for rows written with store_staged. All of them must be in place.
template <typename T>
__device__ __forceinline__ void stage_out(const char* staged, T* target, int count, int thread,
                                          int threads) {
  const int shift = bytes_behind_boundary(target);
  char* block = reinterpret_cast<char*>(target) - shift;
  const int bytes = shift + count * static_cast<int>(sizeof(T));
  for (int offset = 16 * thread; offset < bytes; offset += 16 * threads) {
    if (offset >= shift && offset + 16 <= bytes) {
      *reinterpret_cast<uint4*>(block + offset) = *reinterpret_cast<const uint4*>(staged + offset);
      continue;
    }
    // The first and the last block hold elements of others.
    const int end = min(offset + 16, bytes);
    for (int i = max(offset, shift); i < end; i += static_cast<int>(sizeof(T)))
      *reinterpret_cast<T*>(block + i) = *reinterpret_cast<const T*>(staged + i);
  }
}

// The N elements at `source` in shared memory, of which the first `left` are there; the others are
// zero.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> load_staged(const char* source, int left) {
  using V = Vector<T, N>;
  constexpr int kHalf = sizeof(T) == 2;  // whether a word holds two elements
  V vector;
  if (left >= N) {
    // In pairs of words, which takes the shared memory a third less time than single ones.
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(source) % 8);
    const uint2* pairs = reinterpret_cast<const uint2*>(source - shift);
    uint32_t all[V::kWords + 2];
#pragma unroll
    for (int i = 0; i < V::kWords / 2 + 1; ++i) {
      all[2 * i] = pairs[i].x;
      all[2 * i + 1] = pairs[i].y;
    }
#pragma unroll
    for (int i = 0; i < V::kWords + kHalf; ++i) all[i] = shift & 4 ? all[i + 1] : all[i];
#pragma unroll
    for (int i = 0; i < V::kWords; ++i) {
      const uint64_t pair = static_cast<uint64_t>(all[i + kHalf]) << 32 | all[i];
      vector.words[i] = kHalf ? static_cast<uint32_t>(pair >> (shift & 2) * 8) : all[i];
    }
    return vector;
  }
  return V::load_elements(reinterpret_cast<const T*>(source), 0, left);
}

// Writes the first `left` of N elements to `target` in shared memory.
template <typename T, int N>
__device__ __forceinline__ void store_staged(const Vector<T, N>& vector, char* target, int left) {
  constexpr int kWords = Vector<T, N>::kWords;
  if (left >= N && reinterpret_cast<uintptr_t>(target) % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(target)[i] = vector.words[i];
  } else if (left >= N) {
    *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(vector.words[0]);
#pragma unroll
    for (int i = 0; i + 1 < kWords; ++i) {
      reinterpret_cast<uint32_t*>(target + 2)[i] = vector.words[i] >> 16 | vector.words[i + 1]
                                                                               << 16;
    }
    *reinterpret_cast<uint16_t*>(target + 4 * kWords - 2) =
        static_cast<uint16_t>(vector.words[kWords - 1] >> 16);
  } else {
    Vector<T, N>::store_elements(vector, reinterpret_cast<T*>(target), 0, left);
  }
}

#endif  // a GPU compiler

}  // namespace fuselage
