// The tensors that a backward of rows reads, on their way through shared memory a few rows ahead of
// the arithmetic. A stage holds a row of each tensor for each row of the block. There are three
// ways in:
//
//   BulkStages     aligned rows of more than a warp: one thread starts the copy of a whole row
//                  (cp.async.bulk), and an mbarrier tells when it is there
//                  [stage][row of the block][tensor][column]
//   PrivateStages  aligned rows: each thread copies the vectors that it will use itself (cp.async):
//                  no barrier. [stage][tensor][vector][thread]
//   ShiftedStages  rows of any alignment: as PrivateStages, but a thread copies the aligned block
//                  in which its vector starts, and the first lanes of a warp the one after those of
//                  the last lane. When they are there, it makes the vector of its own block and
//                  the next lane's, and puts it in the place of the block. Results leave the same
//                  way. [stage][tensor][vector][thread], and after each tensor [vector][warp] for
//                  the blocks after the last lanes
//
// Tensor 0 is of type O, the others are of type T. kThreads: of any block, where a stage has room
// for them all, so that offsets are constants; 0 where it has room for those that there are.
//
// NOTE: what a thread needs for every row, as where its stage is, it carries from one to the next.
// Of what it could compute anew the compiler keeps nothing where registers are short, and takes
// more instructions for addresses than for the sums.
#pragma once

#include <type_traits>

#include "common/ptx.h"
#include "common/reduce.h"
#include "common/row_vectors.h"
#include "common/vector.h"
#include "norm/row_backward_policy.h"
#include "norm/row_tensors.h"

namespace fuselage {
namespace {

// Shared memory, by an address that stays in a register: nvcc computes that of a shared array anew
// wherever it is used, from the block's number in its cluster, which takes tens of cycles to read.
__device__ __forceinline__ char* shared_in_register(void* pointer) {
#if defined(USE_ROCM)
  return static_cast<char*>(pointer);
#else
  uint32_t address = shared_address(pointer);
  asm volatile("" : "+r"(address));
  return static_cast<char*>(__cvta_shared_to_generic(address));
#endif
}

// Where a thread's columns are: vector j starts at first_column + j * step.
struct RowColumns {
  int dim, first_column, step;
  int count;    // of vectors that start inside the row
  int of_warp;  // of those that do so in some lane of the warp

  // Vectors of so many columns: a thread has `vectors` of them.
  __device__ __forceinline__ RowColumns(int dim_, int first_column_, int size, int vectors)
      : dim(dim_),
        first_column(first_column_),
        step(static_cast<int>(blockDim.x) * size),
        count(0),
        of_warp(0) {
    const int from_first_lane = static_cast<int>(threadIdx.x) % kWarpSize * size;
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
      count += of(j) < dim ? 1 : 0;
      of_warp += of(j) - from_first_lane < dim ? 1 : 0;
    }
  }
  __device__ __forceinline__ int of(int j) const { return first_column + j * step; }
  __device__ __forceinline__ bool inside(int j) const { return j < count; }
};

template <typename T, typename O, int kVectors, int kTensors, int kThreads>
struct PrivateStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShifted = false;
  static constexpr bool kBulk = false;
  static_assert(std::is_same_v<T, O>, "a thread's vectors have one size");

  const RowTensors& tensors;
  const RowColumns columns;
  const int threads;
  char* here;                  // this thread's first vector in the stage of this row
  const char* next[kTensors];  // this thread's first column of the row that is started next

  __device__ __forceinline__ PrivateStages(void* shared, const RowTensors& tensors_,
                                           const RowColumns& columns_, int64_t first_row,
                                           int stages)
      : tensors(tensors_),
        columns(columns_),
        threads(kThreads > 0 ? kThreads : blockDim.x * blockDim.y),
        here(static_cast<char*>(shared) + (threadIdx.y * blockDim.x + threadIdx.x) * 16) {
#pragma unroll
    for (int i = 0; i < kTensors; ++i)
      next[i] = reinterpret_cast<const char*>(tensors.row<T>(i, first_row, columns.first_column));
    // Columns past the end are zero in every stage: nothing is copied there later.
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (columns.inside(j)) continue;
      for (int stage = 0; stage < stages; ++stage) {
        for (int i = 0; i < tensors.count; ++i)
          *reinterpret_cast<Vector<T, N>*>(slot(i, j) + stage * stage_bytes()) =
              Vector<T, N>::zero();
      }
    }
  }

  __device__ __forceinline__ int stage_bytes() const {
    return tensors.count * kVectors * 16 * (kThreads > 0 ? kThreads : threads);
  }
  __device__ __forceinline__ char* slot(int tensor, int j) const {
    return here + (tensor * kVectors + j) * 16 * (kThreads > 0 ? kThreads : threads);
  }
  __device__ __forceinline__ void advance(int stages) { here += stages * stage_bytes(); }

  __device__ __forceinline__ void start_next_row(bool row_inside, int64_t) {
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      if (row_inside && i < tensors.count) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (columns.inside(j))
            Vector<T, N>::load_async(reinterpret_cast<Vector<T, N>*>(slot(i, j)),
                                     next[i] + j * columns.step * static_cast<int>(sizeof(T)));
        }
      }
      next[i] += tensors.step[i];
    }
  }
  template <typename U, int kTensor>
  __device__ __forceinline__ Vector<U, N> read(int j) const {
    return Vector<U, N>::load_shared(slot(kTensor, j));
  }
  __device__ __forceinline__ Vector<T, N> read_other(int tensor, int j, int64_t) const {
    return Vector<T, N>::load_shared(slot(tensor, j));
  }
};

template <typename T, typename O, int kVectors, int kTensors, int kThreads>
struct BulkStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShifted = false;
  static constexpr bool kBulk = true;
  static_assert(std::is_same_v<T, O>, "a thread's vectors have one size");

  const RowTensors& tensors;
  const int slice;    // columns of a row that this block has room for
  const int columns;  // and works on
  const int slice_start;
  char* here;         // this thread's first vector in the stage of this row
  uint32_t mbarrier;  // of that stage

  __device__ __forceinline__ BulkStages(void* shared, const RowTensors& tensors_,
                                        const RowColumns& all, int64_t, int stages)
      : tensors(tensors_),
        slice(blockDim.x * kVectors * N),
        columns(max(0, min(all.dim - (all.first_column - static_cast<int>(threadIdx.x) * N),
                           static_cast<int>(blockDim.x) * kVectors * N))),
        slice_start(all.first_column - threadIdx.x * N) {
    __shared__ uint64_t mbarriers[kMaxRowStages * (kMaxRowsPerBlock + 1)];
    mbarrier = shared_address(mbarriers + threadIdx.y * kMaxRowStages);
    here = static_cast<char*>(shared) + threadIdx.y * row_bytes() + threadIdx.x * 16;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < stages; ++stage) {
        mbarrier_init(mbarrier + stage * 8, 1);
        if (threadIdx.y == 0) mbarrier_init(mbarrier + kRead + stage * 8, blockDim.x / kWarpSize);
      }
      fence_mbarrier_init();
    }
    // Columns past the end are zero in every stage: nothing is copied there later.
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (all.inside(j)) continue;
      for (int stage = 0; stage < stages; ++stage) {
        for (int i = 0; i < tensors.count; ++i)
          *reinterpret_cast<Vector<T, N>*>(slot(i, j) + stage * stage_bytes()) =
              Vector<T, N>::zero();
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int row_bytes() const {
    return tensors.count * slice * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ int stage_bytes() const { return blockDim.y * row_bytes(); }
  __device__ __forceinline__ char* slot(int tensor, int j) const {
    return here + (tensor * kVectors + j) * static_cast<int>(blockDim.x) * 16;
  }
  __device__ __forceinline__ void advance(int stages) {
    here += stages * stage_bytes();
    mbarrier += stages * 8;
  }

  // Starts a row, into the stage that is so many after this one. The first thread of the row calls
  // this.
  __device__ __forceinline__ void start_row(int64_t row, int further) const {
    const int bytes = columns * static_cast<int>(sizeof(T));
    const uint32_t barrier = mbarrier + further * 8;
    mbarrier_arrive_expect_tx(barrier, tensors.count * bytes);
    if (columns == 0) return;
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      if (i < tensors.count)
        bulk_copy_async(slot(i, 0) + further * stage_bytes(), tensors.row<T>(i, row, slice_start),
                        bytes, barrier);
    }
  }
  __device__ __forceinline__ void wait(int round) const {
    mbarrier_wait_parity_cluster(mbarrier, round);
  }
  // In a block of one row: what a warp says when it has read its row, and when all have read the
  // one that is so many stages after this one.
  __device__ __forceinline__ void release() const {
    warp_barrier();
    if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(mbarrier + kRead);
  }
  __device__ __forceinline__ void wait_released(int further, int round) const {
    mbarrier_wait_parity(mbarrier + kRead + further * 8, round);
  }
  template <typename U, int kTensor>
  __device__ __forceinline__ Vector<U, N> read(int j) const {
    return Vector<U, N>::load_shared(slot(kTensor, j));
  }
  __device__ __forceinline__ Vector<T, N> read_other(int tensor, int j, int64_t) const {
    return Vector<T, N>::load_shared(slot(tensor, j));
  }

 private:
  // Bytes from the mbarriers of the first row to those that say it was read.
  static constexpr int kRead = kMaxRowStages * kMaxRowsPerBlock * 8;
};

template <typename T, typename O, int kVectors, int kTensors, int kThreads>
struct ShiftedStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShifted = true;
  static constexpr bool kBulk = false;

  // A vector of U is pieces of up to 16 bytes, which are copied and moved one by one.
  template <typename U>
  struct Of {
    static constexpr int kBytes = N * static_cast<int>(sizeof(U));
    static constexpr int kPieces = kBytes > 16 ? kBytes / 16 : 1;
    using Piece = Vector<U, N / kPieces>;
  };

  const RowTensors& tensors;
  const RowColumns columns;
  const int threads, width;  // of the block; lanes of a warp that share a row
  const int parts, part;     // such parts of the block, and which of them has this thread
  int inside, used;  // vectors whose blocks lie inside the row for the whole warp, or may not
  char* here;        // this thread's first vector in the stage of this row
  const char* next[kTensors];  // this thread's first column of the row that is started next

  __device__ __forceinline__ ShiftedStages(void* shared, const RowTensors& tensors_,
                                           const RowColumns& columns_, int64_t first_row,
                                           int stages)
      : tensors(tensors_),
        columns(columns_),
        threads(blockDim.x * blockDim.y),
        width(min(static_cast<int>(blockDim.x), kWarpSize)),
        parts(width == kWarpSize ? threads / kWarpSize : threads / width),
        part(width == kWarpSize ? thread() / kWarpSize : thread() / width),
        inside(0),
        used(0),
        here(static_cast<char*>(shared) + thread() * 16) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int left = columns.dim - columns.of(j) + lane() * N;
      inside += width == kWarpSize && left >= (kWarpSize + 1) * N ? 1 : 0;
      used += left > -N ? 1 : 0;
    }
    next[0] = reinterpret_cast<const char*>(tensors.row<O>(0, first_row, columns.first_column));
#pragma unroll
    for (int i = 1; i < kTensors; ++i)
      next[i] = reinterpret_cast<const char*>(tensors.row<T>(i, first_row, columns.first_column));
    // Blocks that no row reaches are zero in every stage: nothing is copied there later.
    for (int i = thread(); i < stages * stage_bytes() / 16; i += threads)
      static_cast<uint4*>(shared)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }

  static __device__ __forceinline__ int thread() { return threadIdx.y * blockDim.x + threadIdx.x; }
  __device__ __forceinline__ int lane() const {
    return static_cast<int>(threadIdx.x) & (width - 1);
  }
  __device__ __forceinline__ bool is_last() const { return lane() == width - 1; }
  template <typename U>
  __device__ __forceinline__ int vector_bytes() const {
    return (kVectors * threads * Of<U>::kBytes + 15) / 16 * 16;
  }
  template <typename U>
  __device__ __forceinline__ int tensor_bytes() const {
    return vector_bytes<U>() + kVectors * parts * 16;
  }
  __device__ __forceinline__ int stage_bytes() const {
    return tensor_bytes<O>() + (tensors.count - 1) * tensor_bytes<T>();
  }
  template <typename U>
  __device__ __forceinline__ char* slot(int tensor, int j) const {
    const int start = tensor == 0 ? 0 : tensor_bytes<O>() + (tensor - 1) * tensor_bytes<T>();
    return here + start + (Of<U>::kBytes - 16) * thread() + j * threads * Of<U>::kBytes;
  }
  // Of the last lane of a warp, the block after its vector.
  template <typename U>
  __device__ __forceinline__ char* end_slot(int tensor, int j) const {
    return slot<U>(tensor, 0) + vector_bytes<U>() - thread() * Of<U>::kBytes +
           (j * parts + part) * 16;
  }
  __device__ __forceinline__ void advance(int stages) { here += stages * stage_bytes(); }

  // Copies a block of a row that goes on for so many bytes. Where the row before this one may have
  // gone on there, it is filled with zeros.
  template <int kBytes>
  static __device__ __forceinline__ void start_block(char* target, const char* block, int bytes) {
    if (bytes >= kBytes) {
      cp_async<kBytes>(target, block);
    } else if (bytes > -kBytes) {
      cp_async_zfill<kBytes>(target, block, max(bytes, 0));
    }
  }
  template <typename U>
  __device__ __forceinline__ void start_tensor(int tensor) const {
    using V = typename Of<U>::Piece;
    const int shift = V::shift_of(next[tensor]);
    const char* blocks = next[tensor] - shift;
    const int step = columns.step * static_cast<int>(sizeof(U));
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (j >= inside) break;
#pragma unroll
      for (int i = 0; i < Of<U>::kPieces; ++i)
        cp_async<V::kBytes>(slot<U>(tensor, j) + i * V::kBytes, blocks + j * step + i * V::kBytes);
    }
    // The blocks after those of the last lane: each by another lane.
    if (lane() < inside && shift != 0)
      cp_async<V::kBytes>(end_slot<U>(tensor, lane()),
                          blocks + lane() * step + (width - lane()) * Of<U>::kBytes);
#pragma unroll 1
    for (int j = inside; j < used; ++j) {
      const char* block = blocks + j * step;
      const int bytes = (columns.dim - columns.of(j)) * static_cast<int>(sizeof(U)) + shift;
#pragma unroll
      for (int i = 0; i < Of<U>::kPieces; ++i) {
        start_block<V::kBytes>(slot<U>(tensor, j) + i * V::kBytes, block + i * V::kBytes,
                               bytes - i * V::kBytes);
      }
      if (is_last() && shift != 0) {
        start_block<V::kBytes>(end_slot<U>(tensor, j), block + Of<U>::kBytes,
                               bytes - Of<U>::kBytes);
      }
    }
  }
  __device__ __forceinline__ void start_next_row(bool row_inside, int64_t) {
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      if (row_inside && i < tensors.count) {
        if (i == 0) {
          start_tensor<O>(0);
        } else {
          start_tensor<T>(i);
        }
      }
      next[i] += tensors.step[i];
    }
  }

  // Makes vectors of the blocks of a row, which have arrived. All threads of the block call this.
  template <typename U>
  __device__ __forceinline__ void join_tensor(int tensor, int64_t row) const {
    using V = typename Of<U>::Piece;
    const int shift = V::shift_of(tensors.row<U>(tensor, row, columns.first_column));
    const bool whole = width == kWarpSize, moves = !whole || same_in_warp(shift != 0);
    char* own = slot<U>(tensor, 0);
    const char* after = is_last() ? end_slot<U>(tensor, 0) : own + Of<U>::kBytes;
    const int own_step = threads * Of<U>::kBytes, after_step = is_last() ? parts * 16 : own_step;
    // So many at once: they are held in registers until all lanes have read.
    constexpr int kAtOnce = kVectors * Of<U>::kPieces > 4 ? 4 / Of<U>::kPieces : kVectors;
#pragma unroll 1
    for (int k = 0; k < kVectors; k += kAtOnce, own += kAtOnce * own_step) {
      V pieces[kAtOnce][Of<U>::kPieces];
      const auto join = [&](int bytes) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          V first = V::load_shared_whole(own + j * own_step);
#pragma unroll
          for (int i = 0; i < Of<U>::kPieces; ++i) {
            const bool is_end = i + 1 == Of<U>::kPieces;
            const V second = V::load_shared_whole(
                is_end ? after + j * after_step : own + j * own_step + (i + 1) * V::kBytes);
            pieces[j][i] = V::shifted(first, second, bytes);
            first = second;
          }
        }
      };
      if (moves && whole) {
        with_shift<U, V::kWords, true>(shift, join);
      } else if (moves) {
        join(shift);
      }
      after += kAtOnce * after_step;
      warp_barrier();
      if (!moves) continue;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < Of<U>::kPieces; ++i)
          pieces[j][i].store(own + j * own_step + i * V::kBytes);
      }
    }
  }
  __device__ __forceinline__ void join(int64_t row) const {
    warp_barrier();
    join_tensor<O>(0, row);
#pragma unroll 1
    for (int i = 1; i < tensors.count; ++i) join_tensor<T>(i, row);
  }

  template <typename U, int kTensor>
  __device__ __forceinline__ Vector<U, N> read(int j) const {
    return Vector<U, N>::load_shared(slot<U>(kTensor, j));
  }
  __device__ __forceinline__ Vector<T, N> read_other(int tensor, int j, int64_t) const {
    return Vector<T, N>::load_shared(slot<T>(tensor, j));
  }

  // The way back: a result takes the place of a vector of T, which is not read again and starts
  // inside the row. Between put() and store(), and before the next copies, is a warp_barrier().
  __device__ __forceinline__ void put(int tensor, int j, const Vector<T, N>& result) const {
    result.store(slot<T>(tensor, j));
  }
  // Writes the row, if there is one, from this thread's first column on, `target`. All threads of
  // the block call this.
  __device__ __forceinline__ void store(int tensor, T* target, bool row_inside) const {
    using V = Vector<T, N>;
    using Unit = RowStoring<T, N, 1, false>;
    const char* own = slot<T>(tensor, 0);
    const char* before = lane() == 0 ? own + (width - 1) * 16 : own - 16;
    const int left = row_inside ? columns.dim - columns.first_column : -kWarpSize * N;
    int j = 0;
    if (width == kWarpSize) {
      int whole = 0;  // vectors that are inside for the whole warp
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        whole += left + lane() * N - k * columns.step >= kWarpSize * N ? 1 : 0;
      with_shift<T, V::kWords, true>(V::shift_of(target), [&](int bytes) {
        for (; j < whole; ++j) {
          Unit unit(target + j * columns.step, left);
          unit.blocks[0] = V::shifted_up(V::load_shared_whole(before + j * threads * 16),
                                         V::load_shared(own + j * threads * 16), bytes);
          unit.store_inside(bytes);
        }
      });
    }
#pragma unroll 1
    for (; j < used; ++j) {
      Unit unit(target + j * columns.step, max(left - j * columns.step, -N));
      unit.put(0, V::load_shared(own + j * threads * 16));
      unit.end();
    }
  }
};

}  // namespace
}  // namespace fuselage
