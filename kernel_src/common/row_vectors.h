// A thread's vectors of one row, from and to global memory, whatever the row's alignment. A warp
// has kVectors * 32 neighbouring vectors of N columns, each of 16 bytes of the input:
//
//   vector 0 of lanes 0 ... 31 | vector 1 of lanes 0 ... 31 | ...
//
// Aligned rows start and end on 16-byte boundaries: a vector is one access. Rows that start
// anywhere are read in the aligned blocks that their vectors lie across, each block by one lane,
// once:
//
//   blocks    |  lane 0  |  lane 1  |  lane 2  |  ...  |  lane 31 | lane 31, one more |
//   vectors       |  lane 0  |  lane 1  |  ...                |  lane 31 |
//
// A lane takes the end of its vector from the block of the next lane (a shuffle), and shifts both
// into place. Results go back the same way: a lane gives the end of its vector to the next one, and
// all but the first and last blocks of a warp are written whole. So memory sees the same requests
// as of aligned rows, and a thread has the same columns: the order of a row's sum, and so its bits,
// do not depend on alignment.
//
// Nothing before a tensor's first 16-byte block or past its last element is read.
#pragma once

#include "common/vector.h"

namespace fuselage {

#if defined(__CUDACC__) || defined(__HIPCC__)

// Lanes of a warp that share a row, a power of two; and which of them this thread is. Rows of
// several vectors a thread have whole warps.
template <int kVectors>
__device__ __forceinline__ int lanes_of_row() {
  return kVectors > 1 ? kWarpSize : min(static_cast<int>(blockDim.x), kWarpSize);
}
template <int kVectors>
__device__ __forceinline__ int lane_in_row() {
  return static_cast<int>(threadIdx.x) & (lanes_of_row<kVectors>() - 1);
}

template <typename T, int N>
__device__ __forceinline__ Vector<T, N> shuffle_vector(const Vector<T, N>& v, int lane, int width) {
  Vector<T, N> result;
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kWords; ++i) {
    result.words[i] = __float_as_uint(shuffle_from(__uint_as_float(v.words[i]), lane, width));
  }
  return result;
}

template <typename T, int N>
__device__ __forceinline__ Vector<T, N> select(bool first, const Vector<T, N>& a,
                                               const Vector<T, N>& b) {
  Vector<T, N> result;
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kWords; ++i) result.words[i] = first ? a.words[i] : b.words[i];
  return result;
}

// Vectors on their way from a row: start() issues all loads, finish() gives one vector. Columns
// past the row's end are zero. `source` is this thread's first column, `left` the columns of the
// row from there on, -N or less where there is no row. All lanes of the warp call together.
template <typename T, int kVectors, bool kAligned>
struct RowLoading {
  static constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  V vectors[kVectors];

  __device__ __forceinline__ void start(const T* source, int left) {
#if !defined(USE_ROCM)
    // Keeps the compiler from making the address once for each predicated load.
    asm volatile("" : "+l"(source));
#endif
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      vectors[j] = V::zero();
      if (left > j * kWarpSize * N) vectors[j] = V::load(source + j * kWarpSize * N);
    }
  }
  __device__ __forceinline__ V finish(int j) const { return vectors[j]; }
};

template <typename T, int kVectors>
struct RowLoading<T, kVectors, false> {
  static constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  V blocks[kVectors + 1];
  int shift;  // bytes between a block's start and the vector's

  __device__ __forceinline__ void start(const T* source, int left) {
    shift = V::shift_of(source);
    const char* first = reinterpret_cast<const char*>(source) - shift;
    // Of the row, from the first block on. NOTE: cut, as those of a whole row may be more than an
    // int holds.
    const int bytes =
        min(left, (kVectors + 1) * kWarpSize * N) * static_cast<int>(sizeof(T)) + shift;
    const bool last_lane = lane_in_row<kVectors>() == lanes_of_row<kVectors>() - 1;
    int tail = -1;  // where the block is in which the row ends
#pragma unroll
    for (int j = 0; j <= kVectors; ++j) {
      blocks[j] = V::zero();
      const bool is_mine = j < kVectors || (last_lane && shift != 0);
      if (is_mine && bytes >= offset_of(j) + 16) {
        blocks[j] = V::load(first + offset_of(j));
      } else if (is_mine && bytes > offset_of(j)) {
        tail = offset_of(j);
      }
    }
    if (tail < 0) return;
    // NOTE: by the element, as the block may end past the tensor.
    const V elements = V::load_elements(reinterpret_cast<const T*>(first + tail), 0,
                                        (bytes - tail) / static_cast<int>(sizeof(T)));
#pragma unroll
    for (int j = 0; j <= kVectors; ++j)
      blocks[j] = select(tail == offset_of(j), elements, blocks[j]);
  }

  __device__ __forceinline__ V finish(int j) const {
    const int width = lanes_of_row<kVectors>(), lane = lane_in_row<kVectors>();
    // Past the last lane's vector lies the next one of the first lane.
    const bool has_next = j + 1 < kVectors;
    const V given = has_next ? select(lane == 0, blocks[j + 1], blocks[j]) : blocks[j];
    V next = shuffle_vector(given, (lane + 1) & (width - 1), width);
    if (!has_next) next = select(lane + 1 == width, blocks[kVectors], next);
    return V::shifted(blocks[j], next, shift);
  }

 private:
  static __device__ __forceinline__ constexpr int offset_of(int j) {
    return j < kVectors ? j * kWarpSize * 16 : (kVectors - 1) * kWarpSize * 16 + 16;
  }
};

// The way back: put() of each vector in order. `target` is this thread's first column, `left` the
// columns from there on (0 or less: none). All lanes of the warp call together.
template <typename T, int N, int kVectors, bool kAligned>
struct RowStoring {
  T* target;
  int left;

  __device__ __forceinline__ RowStoring(T* target_, int left_) : target(target_), left(left_) {}
  __device__ __forceinline__ void put(int j, const Vector<T, N>& vector) {
    if (left > j * kWarpSize * N) vector.store(target + j * kWarpSize * N);
  }
};

template <typename T, int N, int kVectors>
struct RowStoring<T, N, kVectors, false> {
  // A vector is so many pieces of up to 16 bytes.
  static constexpr int kPieces = N * sizeof(T) > 16 ? N* static_cast<int>(sizeof(T)) / 16 : 1;
  static constexpr int kPiece = N / kPieces;
  using Piece = Vector<T, kPiece>;
  T* target;
  int left;
  Piece previous{};  // the end of this lane's vector before

  __device__ __forceinline__ RowStoring(T* target_, int left_) : target(target_), left(left_) {}

  __device__ __forceinline__ void put(int j, const Vector<T, N>& vector) {
    const int width = lanes_of_row<kVectors>(), lane = lane_in_row<kVectors>();
    Piece pieces[kPieces];
#pragma unroll
    for (int i = 0; i < Vector<T, N>::kWords; ++i)
      pieces[i / Piece::kWords].words[i % Piece::kWords] = vector.words[i];
    const Piece& end = pieces[kPieces - 1];
    // Before the first lane's vector lies the one before of the last lane.
    const Piece given = j > 0 ? select(lane + 1 == width, previous, end) : end;
    const Piece before = shuffle_vector(given, (lane - 1) & (width - 1), width);
    previous = end;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int offset = j * kWarpSize * N + i * kPiece;
      const bool first = i == 0 && j == 0 && lane == 0;
      const bool last = i + 1 == kPieces && j + 1 == kVectors && lane + 1 == width;
      put_piece(i == 0 ? before : pieces[i == 0 ? 0 : i - 1], pieces[i], target + offset,
                left - offset, first, last);
    }
  }

 private:
  // Writes the block in which `piece` starts, and past it what no other lane writes.
  static __device__ __forceinline__ void put_piece(const Piece& before, const Piece& piece,
                                                   T* target, int left, bool first, bool last) {
    constexpr int kBytes = Piece::kBytes;
    if (left <= 0) return;
    const int shift = Piece::shift_of(target);
    char* block = reinterpret_cast<char*>(target) - shift;
    const int bytes = min(left, 2 * kPiece) * static_cast<int>(sizeof(T));  // of the row
    const int begin = first ? shift : 0, end = min(bytes + shift, kBytes);
    const Piece whole = select(shift == 0, piece, Piece::shifted(before, piece, kBytes - shift));
    if (end - begin == kBytes) {
      whole.store(block);
    } else {
      put_part(whole, block, begin, end);
    }
    const int rest = min(bytes, kBytes) + shift - kBytes;
    if (rest > 0 && (last || bytes <= kBytes))
      put_part(Piece::shifted(piece, piece, kBytes - shift), block + kBytes, 0, rest);
  }

  // Writes bytes [begin, end) of a block, both even.
  static __device__ __forceinline__ void put_part(const Piece& part, char* block, int begin,
                                                  int end) {
#pragma unroll
    for (int i = 0; i < Piece::kWords; ++i) {
      const bool low = begin <= 4 * i && end >= 4 * i + 2;
      const bool high = begin <= 4 * i + 2 && end >= 4 * i + 4;
      uint16_t* halves = reinterpret_cast<uint16_t*>(block + 4 * i);
      if (low && high) {
        *reinterpret_cast<uint32_t*>(halves) = part.words[i];
      } else if (low) {
        halves[0] = static_cast<uint16_t>(part.words[i]);
      } else if (high) {
        halves[1] = static_cast<uint16_t>(part.words[i] >> 16);
      }
    }
  }
};

// N columns from `column` on of a vector that rows share: from the L1 cache, mostly.
template <bool kAligned, int N, typename U>
__device__ __forceinline__ Vector<U, N> load_columns(const U* row, int column, int dim) {
  using V = Vector<U, N>;
  if constexpr (kAligned) {
    return V::load(row + column);
  } else {
    if (column + N <= dim && V::shift_of(row) == 0) return V::load(row + column);
    constexpr int kPieces = V::kBytes > 16 ? V::kBytes / 16 : 1;
    constexpr int kPiece = N / kPieces;
    V result;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto piece = load<false, kPiece>(row, column + i * kPiece, dim);
#pragma unroll
      for (int k = 0; k < V::kWords / kPieces; ++k)
        result.words[i * (V::kWords / kPieces) + k] = piece.words[k];
    }
    return result;
  }
}

#endif  // a GPU compiler

}  // namespace fuselage
