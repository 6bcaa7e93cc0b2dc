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
// the last lane to the first, which writes both ends of what the warp has; all blocks in between
// are written whole. So memory sees the same requests as of aligned rows, and a thread has the same
// columns: the order of a row's sum, and so its bits, do not depend on alignment.
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

// The first `count` elements of half precision, and zeros.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> first_elements(const Vector<T, N>& v, int count) {
  static_assert(sizeof(T) == 2, "two in a word");
  if (count >= N) return v;
  Vector<T, N> result;
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kWords; ++i)
    result.words[i] = count > 2 * i + 1 ? v.words[i] : count > 2 * i ? v.words[i] & 0xffffu : 0;
  return result;
}

// Calls f(shift) of bytes between a block and a vector of T. Where all lanes of a warp have the
// same, as they have of one row, it is called from a branch for each number of whole words: the
// compiler then knows which words go where, and there is nothing to select.
template <typename T, int kWords, bool kSame, typename F>
__device__ __forceinline__ void with_shift(int shift, F&& f) {
  if constexpr (kSame) {
    const int rest = sizeof(T) < 4 ? shift & 3 : 0;
    const bool one = same_in_warp(shift & 4), two = kWords > 2 && same_in_warp(shift & 8);
    if (one && two) {
      f(12 | rest);
    } else if (two) {
      f(8 | rest);
    } else if (one) {
      f(4 | rest);
    } else {
      f(rest);
    }
  } else {
    f(shift);
  }
}

// Keeps the compiler from making the address once for each predicated load.
template <typename T>
__device__ __forceinline__ void keep_in_register(const T*& address) {
#if !defined(USE_ROCM)
  asm volatile("" : "+l"(address));
#endif
}

// Vectors on their way from a row: start() issues all loads, finish() gives one vector; or joined()
// does, after join(), which is faster for several. Columns past the row's end are zero. `source` is
// this thread's first column, `left` the columns of the row from there on, -N or less where there
// is no row. All lanes of the warp call together.
template <typename T, int kVectors, bool kAligned>
struct RowLoading {
  static constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  V vectors[kVectors];

  __device__ __forceinline__ void start(const T* source, int left) {
    keep_in_register(source);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      vectors[j] = V::zero();
      if (left > j * kWarpSize * N) vectors[j] = V::load(source + j * kWarpSize * N);
    }
  }
  __device__ __forceinline__ V finish(int j) const { return vectors[j]; }
  __device__ __forceinline__ void join() {}
  __device__ __forceinline__ V joined(int j) const { return vectors[j]; }
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
    const bool has_next = lane_in_row<kVectors>() == lanes_of_row<kVectors>() - 1 && shift != 0;
    const int count = has_next ? kVectors + 1 : kVectors;
    blocks[kVectors] = V::zero();
    if (bytes >= offset_of(kVectors - 1) + (has_next ? 32 : 16)) {
#pragma unroll
      for (int j = 0; j <= kVectors; ++j) {
        if (j < kVectors || has_next) blocks[j] = V::load(first + offset_of(j));
      }
      return;
    }
    int tail = -1;  // where the block is in which the row ends
#pragma unroll
    for (int j = 0; j <= kVectors; ++j) {
      blocks[j] = V::zero();
      if (j < count && bytes >= offset_of(j) + 16) {
        blocks[j] = V::load(first + offset_of(j));
      } else if (j < count && bytes > offset_of(j)) {
        tail = offset_of(j);
      }
    }
    if (tail < 0) return;
    const V part = load_part(first + tail, bytes - tail);
#pragma unroll
    for (int j = 0; j <= kVectors; ++j) blocks[j] = select(tail == offset_of(j), part, blocks[j]);
  }

  // As start, where all blocks of the warp are inside the row.
  __device__ __forceinline__ void start_inside(const T* source) {
    shift = V::shift_of(source);
    const char* first = reinterpret_cast<const char*>(source) - shift;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) blocks[j] = V::load(first + offset_of(j));
    blocks[kVectors] = V::zero();
    if (lane_in_row<kVectors>() == lanes_of_row<kVectors>() - 1 && shift != 0)
      blocks[kVectors] = V::load(first + offset_of(kVectors));
  }

  __device__ __forceinline__ V finish(int j) const { return cut(j, shift); }
  __device__ __forceinline__ void join() {
    if (kVectors > 1 && same_in_warp(shift == 0)) return;
    with_shift<T, V::kWords, (kVectors > 1)>(shift, [&](int bytes) { join(bytes); });
  }
  __device__ __forceinline__ void join(int bytes) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) blocks[j] = cut(j, bytes);
  }
  __device__ __forceinline__ V joined(int j) const { return blocks[j]; }

 private:
  static __device__ __forceinline__ constexpr int offset_of(int j) {
    return j < kVectors ? j * kWarpSize * 16 : (kVectors - 1) * kWarpSize * 16 + 16;
  }
  // The first bytes of a block, an even number. NOTE: the block may end past the tensor.
  static __device__ __forceinline__ V load_part(const char* block, int bytes) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(block);
    const bool has_half = sizeof(T) < 4 && bytes & 2;
    const uint32_t half = has_half ? *reinterpret_cast<const uint16_t*>(block + bytes - 2) : 0;
    V part;
#pragma unroll
    for (int i = 0; i < V::kWords; ++i)
      part.words[i] = bytes >= 4 * i + 4 ? words[i] : bytes > 4 * i ? half : 0;
    return part;
  }
  __device__ __forceinline__ V cut(int j, int bytes) const {
    const int width = lanes_of_row<kVectors>(), lane = lane_in_row<kVectors>();
    // Past the last lane's vector lies the next one of the first lane.
    const bool has_next = j + 1 < kVectors;
    const V given = has_next ? select(lane == 0, blocks[j + 1], blocks[j]) : blocks[j];
    V next = shuffle_vector(given, (lane + 1) & (width - 1), width);
    if (!has_next) next = select(lane + 1 == width, blocks[kVectors], next);
    return V::shifted(blocks[j], next, bytes);
  }
};

// The way back: put() of each vector, then end(). `target` is this thread's first column, `left`
// the columns from there on, -N or less where there is no row. All lanes of the warp call together;
// units past the row's end need not be put.
template <typename T, int N, int kVectors, bool kAligned>
struct RowStoring {
  T* target;
  int left;

  __device__ __forceinline__ RowStoring(T* target_, int left_) : target(target_), left(left_) {}
  __device__ __forceinline__ void put(int j, const Vector<T, N>& vector) {
    if (left > j * kWarpSize * N) vector.store(target + j * kWarpSize * N);
  }
  __device__ __forceinline__ void end() {}
};

template <typename T, int N, int kVectors>
struct RowStoring<T, N, kVectors, false> {
  // A vector is so many pieces of up to 16 bytes.
  static constexpr int kPieces = N * sizeof(T) > 16 ? N* static_cast<int>(sizeof(T)) / 16 : 1;
  static constexpr int kBlocks = kVectors * kPieces;
  using Piece = Vector<T, N / kPieces>;
  static constexpr int kBytes = Piece::kBytes, kWords = Piece::kWords;
  T* target;
  int left;
  Piece blocks[kBlocks];  // a lane's pieces, and then the blocks in which they start

  __device__ __forceinline__ RowStoring(T* target_, int left_) : target(target_), left(left_) {}

  __device__ __forceinline__ void put(int j, const Vector<T, N>& vector) {
#pragma unroll
    for (int i = 0; i < Vector<T, N>::kWords; ++i)
      blocks[j * kPieces + i / kWords].words[i % kWords] = vector.words[i];
  }

  __device__ __forceinline__ void end() {
    const bool inside = is_inside();
    with_shift<T, kWords, (kVectors > 1)>(Piece::shift_of(target),
                                          [&](int bytes) { join(bytes, inside); });
    if (!inside) store_parts();
  }

  // The steps of end().
  // Whether the warp has one row, and all of its columns are inside.
  __device__ __forceinline__ bool is_inside() const {
    const int width = lanes_of_row<kVectors>(), lane = lane_in_row<kVectors>();
    return width == kWarpSize && same_in_warp(left + lane * N >= kVectors * width * N);
  }
  // Makes blocks of pieces; where they are `inside`, stores them.
  __device__ __forceinline__ void join(int bytes, bool inside) {
    shift_up(bytes);
    if (inside) store_inside(bytes);
  }
  // Blocks of a warp whose columns are all inside the row. The first lane's first block is the end
  // of the warp's last piece, `past` bytes further on, and the start of its first one.
  __device__ __forceinline__ void store_inside(int shift) const {
    const bool is_first = lane_in_row<kVectors>() == 0;
    char* const first = reinterpret_cast<char*>(target) - Piece::shift_of(target);
    const int past = kVectors * lanes_of_row<kVectors>() * kVector;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b > 0 || !is_first) blocks[b].store(first + offset_of(b));
    }
    if (!is_first) return;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = blocks[0].words[i];
      char* const at = first + 4 * i;
      const int rest = shift & kInWord;
      if (i != shift / 4 || rest == 0) {
        *reinterpret_cast<uint32_t*>(at + (i < shift / 4 ? past : 0)) = word;
      } else {
#pragma unroll
        for (int k = 0; k < 4; k += sizeof(T))
          store_low(at + k + (k < rest ? past : 0), word >> (8 * k));
      }
    }
  }
  // Of a warp whose columns are not.
  __device__ __forceinline__ void store_parts() {
    const int shift = Piece::shift_of(target);
    char* first = reinterpret_cast<char*>(target) - shift;
    const int past = kVectors * lanes_of_row<kVectors>() * kVector;  // from the first lane's block
    // Of the row, from the first block on.
    const int bytes =
        min(left, (kVectors + 1) * kWarpSize * N) * static_cast<int>(sizeof(T)) + shift;
    bool starts_inside = lane_in_row<kVectors>() == 0 && shift != 0;
    int at = -1;  // where else a part of a block is to be written
    Piece part = blocks[0];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b == 0 && starts_inside) continue;
      if (bytes >= offset_of(b) + kBytes) {
        blocks[b].store(first + offset_of(b));
      } else if (bytes > offset_of(b)) {
        at = offset_of(b);
        part = blocks[b];
      }
    }
    if (starts_inside && bytes > past) at = past;
#pragma unroll 1
    while (starts_inside || at >= 0) {
      if (starts_inside) {
        put_part(blocks[0], first, shift, min(bytes, kBytes));
      } else {
        put_part(part, first + at, 0, min(bytes - at, at == past ? shift : kBytes));
        at = -1;
      }
      starts_inside = false;
    }
  }

 private:
  static constexpr int kVector = N * static_cast<int>(sizeof(T));
  static constexpr int kInWord = 4 - static_cast<int>(sizeof(T));  // of a shift, less whole words
  static_assert(sizeof(T) > 1 || kBytes <= 8, "parts of a block are shifted out of two words");
  static __device__ __forceinline__ constexpr int offset_of(int b) {
    return b / kPieces * kWarpSize * kVector + b % kPieces * kBytes;
  }

  // Makes blocks of pieces. The first lane's first block has the end of the warp's last piece, too.
  __device__ __forceinline__ void shift_up(int bytes) {
    const int width = lanes_of_row<kVectors>(), lane = lane_in_row<kVectors>();
    const Piece last = blocks[kBlocks - 1];
#pragma unroll
    for (int b = kBlocks - kPieces; b >= 0; b -= kPieces) {
      // Before the first lane's vector lies the one before of the last lane.
      const Piece& previous = b > 0 ? blocks[b > 0 ? b - 1 : 0] : last;
      const Piece before =
          shuffle_vector(select(lane + 1 == width, previous, blocks[b + kPieces - 1]),
                         (lane - 1) & (width - 1), width);
#pragma unroll
      for (int i = kPieces - 1; i >= 0; --i) {
        blocks[b + i] =
            Piece::shifted_up(i > 0 ? blocks[b + i - (i > 0)] : before, blocks[b + i], bytes);
      }
    }
  }

  static __device__ __forceinline__ void store_low(char* target, uint32_t word) {
    if constexpr (sizeof(T) == 1) {
      *target = static_cast<char>(word);
    } else {
      *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(word);
    }
  }

  // Writes bytes [begin, end) of a block, both multiples of T's size.
  static __device__ __forceinline__ void put_part(const Piece& part, char* block, int begin,
                                                  int end) {
    if (begin >= end) return;
    if constexpr (sizeof(T) == 1) {
      const uint64_t all = static_cast<uint64_t>(part.words[kWords - 1]) << 32 | part.words[0];
#pragma unroll 1
      for (int k = begin; k < end; ++k) store_low(block + k, static_cast<uint32_t>(all >> (8 * k)));
      return;
    }
    uint32_t low = part.words[0], high = low;  // the words in which it starts and ends
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = part.words[i];
      if (begin <= 4 * i && end >= 4 * i + 4) *reinterpret_cast<uint32_t*>(block + 4 * i) = word;
      low = begin / 4 == i ? word : low;
      high = end / 4 == i ? word : high;
    }
    if (sizeof(T) == 4) return;
    if (begin & 2) store_low(block + begin, low >> 16);
    if (end & 2) store_low(block + end - 2, high);
  }
};

// One vector of a row by itself, where neighbouring lanes have neighbouring vectors, with the
// functions of Loading. `dim` is 0 where there is no row. All lanes of the warp call together.
//
// NOTE: without branches for the whole words of a shift, of which each would have copies. Several
// vectors of a thread share them (SpreadLoading).
template <typename T, bool kAligned>
struct VectorLoading : Loading<T, 16 / sizeof(T), true> {};

template <int N>
__device__ __forceinline__ int left_of_row(int column, int dim) {
  return dim == 0 ? -N : dim - column;
}

template <typename T>
struct VectorLoading<T, false> {
  static constexpr int N = 16 / sizeof(T);
  RowLoading<T, 1, false> loading;

  __device__ __forceinline__ void start(const T* row, int column, int dim) {
    loading.start(row + column, left_of_row<N>(column, dim));
  }
  __device__ __forceinline__ Vector<T, N> finish(const T*, int, int) const {
    return loading.finish(0);
  }
};

// The way back.
template <bool kAligned, int N, typename T>
__device__ __forceinline__ void store_vector(const Vector<T, N>& vector, T* row, int column,
                                             int dim) {
  RowStoring<T, N, 1, kAligned> storing(row + column, left_of_row<N>(column, dim));
  storing.put(0, vector);
  storing.end();
}

__device__ __forceinline__ bool has_whole_warps() { return lanes_of_row<1>() == kWarpSize; }

// Several vectors of a thread, `step` columns apart, where the warps of a row lie side by side:
//
//   vector 0 of warp 0 | vector 0 of warp 1 | ... | vector 1 of warp 0 | vector 1 of warp 1 | ...
//
// Of rows that start anywhere the last lane of a warp has one more block of each. start(j) issues
// the loads of one, and after join() there is joined(j). All lanes of the warp call together.
template <typename T, int kVectors, bool kAligned>
struct SpreadLoading {
  using V = Vector<T, 16 / sizeof(T)>;
  VectorLoading<T, kAligned> units[kVectors];

  __device__ __forceinline__ void start(int j, const T* row, int column, int dim) {
    units[j].start(row, column, dim);
  }
  __device__ __forceinline__ void join() {}
  __device__ __forceinline__ V joined(int j) const { return units[j].finish(nullptr, 0, 0); }
};

template <typename T, int kVectors>
struct SpreadLoading<T, kVectors, false> {
  static constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  RowLoading<T, 1, false> units[kVectors];

  __device__ __forceinline__ void start(int j, const T* row, int column, int dim) {
    // Whether the last lane's next block is inside the row, too.
    const int end = column + (kWarpSize + 1 - lane_in_row<1>()) * N;
    if (kVectors > 1 && has_whole_warps() && same_in_warp(end <= dim)) {
      units[j].start_inside(row + column);
    } else {
      units[j].start(row + column, left_of_row<N>(column, dim));
    }
  }
  __device__ __forceinline__ void join() {
    const int shift = units[0].shift;
    const auto join_all = [&](int bytes) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) units[j].join(bytes);
    };
    if (kVectors > 1 && has_whole_warps()) {
      if (!same_in_warp(shift == 0)) with_shift<T, V::kWords, true>(shift, join_all);
    } else {
      join_all(shift);
    }
  }
  __device__ __forceinline__ V joined(int j) const { return units[j].joined(0); }
};

// The way back: put() of each vector, then end(). `column` is this thread's first one, `dim` 0
// where there is no row.
template <typename T, int kVectors, bool kAligned>
struct SpreadStoring {
  static constexpr int N = 16 / sizeof(T);
  T* row;
  int column, step, dim;

  __device__ __forceinline__ SpreadStoring(T* row_, int column_, int step_, int dim_)
      : row(row_), column(column_), step(step_), dim(dim_) {}
  __device__ __forceinline__ void put(int j, const Vector<T, N>& vector) {
    store_vector<true>(vector, row, column + j * step, dim);
  }
  __device__ __forceinline__ void end() {}
};

template <typename T, int kVectors>
struct SpreadStoring<T, kVectors, false> {
  static constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  T* row;
  int column, step, dim;
  V vectors[kVectors];

  __device__ __forceinline__ SpreadStoring(T* row_, int column_, int step_, int dim_)
      : row(row_), column(column_), step(step_), dim(dim_) {}
  __device__ __forceinline__ void put(int j, const V& vector) { vectors[j] = vector; }

  __device__ __forceinline__ void end() {
    const int warp_left = dim - (column - lane_in_row<1>() * N);
    int first = 0;  // vector that is not inside the row for the whole warp
    if (kVectors > 1 && has_whole_warps()) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        first += same_in_warp(warp_left - j * step >= kWarpSize * N) ? 1 : 0;
      with_shift<T, V::kWords, true>(V::shift_of(row + column), [&](int bytes) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (j < first) unit(j, vectors[j]).join(bytes, true);
        }
      });
    }
#pragma unroll 1
    for (int j = first; j < kVectors; ++j) {
      if (kVectors > 1 && has_whole_warps() && same_in_warp(warp_left <= j * step)) return;
      V vector = vectors[0];
#pragma unroll
      for (int k = 1; k < kVectors; ++k) vector = select(j == k, vectors[k], vector);
      unit(j, vector).end();
    }
  }

 private:
  __device__ __forceinline__ RowStoring<T, N, 1, false> unit(int j, const V& vector) const {
    RowStoring<T, N, 1, false> result(row + column + j * step,
                                      left_of_row<N>(column + j * step, dim));
    result.put(0, vector);
    return result;
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
