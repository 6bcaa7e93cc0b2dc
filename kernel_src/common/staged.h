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
  const char* block = reinterpret_cast<const char*>(source) - shift + 16 * thread;
  char* target = staged + 16 * thread;
  int left = shift + count * static_cast<int>(sizeof(T)) - 16 * thread;
  for (; left >= 16; left -= 16 * threads, block += 16 * threads, target += 16 * threads)
    cp_async<16>(target, block);
  if (left > 0) cp_async_partial(target, block, left);
}

// The way back, for rows written with store_staged. All of them must be in place.
template <typename T>
__device__ __forceinline__ void stage_out(const char* staged, T* target, int count, int thread,
                                          int threads) {
  constexpr int kSize = static_cast<int>(sizeof(T));
  const int shift = bytes_behind_boundary(target);
  char* block = reinterpret_cast<char*>(target) - shift;
  const int bytes = shift + count * kSize;
  const int first_whole = shift == 0 ? 0 : 16, end_of_whole = bytes / 16 * 16;
  for (int offset = first_whole + 16 * thread; offset < end_of_whole; offset += 16 * threads)
    *reinterpret_cast<uint4*>(block + offset) = *reinterpret_cast<const uint4*>(staged + offset);
  // The first and the last block hold elements of others.
  const auto write_elements = [&](int begin, int end) {
    for (int i = begin + kSize * thread; i < end; i += kSize * threads)
      *reinterpret_cast<T*>(block + i) = *reinterpret_cast<const T*>(staged + i);
  };
  if (shift != 0) write_elements(shift, min(16, bytes));
  write_elements(max(first_whole, end_of_whole), bytes);
}

// Where a row begins in shared memory: taken apart once, for all of its vectors.
struct StagedStart {
  const char* pairs;  // a multiple of 8, and in the pair of words there
  bool upper_word;    // the word,
  int bits;           // and the bits of it before the row

  StagedStart() = default;
  __device__ __forceinline__ explicit StagedStart(const char* source) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(source) % 8);
    pairs = source - shift;
    upper_word = shift & 4;
    bits = (shift & 2) * 8;
  }
};

// The N elements that are `offset` bytes (a multiple of 8) after the row's start, of which the
// first `left` are there; the others are zero.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> load_staged(const StagedStart& start, int offset,
                                                    int left) {
  using V = Vector<T, N>;
  constexpr int kHalf = sizeof(T) == 2;  // whether a word holds two elements
  V vector;
  if (left >= N) {
    // In pairs of words, which takes the shared memory a third less time than single ones.
    const uint2* pairs = reinterpret_cast<const uint2*>(start.pairs + offset);
    uint32_t all[V::kWords + 2];
#pragma unroll
    for (int i = 0; i < V::kWords / 2 + 1; ++i) {
      all[2 * i] = pairs[i].x;
      all[2 * i + 1] = pairs[i].y;
    }
#pragma unroll
    for (int i = 0; i < V::kWords + kHalf; ++i) all[i] = start.upper_word ? all[i + 1] : all[i];
#pragma unroll
    for (int i = 0; i < V::kWords; ++i) {
      const uint64_t pair = static_cast<uint64_t>(all[i + kHalf]) << 32 | all[i];
      vector.words[i] = kHalf ? static_cast<uint32_t>(pair >> start.bits) : all[i];
    }
    return vector;
  }
  if (left <= 0) return V::zero();
  const char* source = start.pairs + (start.upper_word ? 4 : 0) + start.bits / 8 + offset;
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
  } else if (left > 0) {
    Vector<T, N>::store_elements(vector, reinterpret_cast<T*>(target), 0, left);
  }
}

#endif  // a GPU compiler

}  // namespace fuselage
