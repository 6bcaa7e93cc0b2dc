// The tensors that a backward of rows reads, on their way through shared memory a few rows ahead of
// the arithmetic. A stage holds a row of each tensor for each row of the block. There are three
// ways in:
//
//   BulkStages     aligned rows of more than a warp: one thread starts the copy of a whole row
//                  (cp.async.bulk), and an mbarrier tells when it is there
//                  [stage][row of the block][tensor][column]
//   PrivateStages  aligned rows: each thread copies the vectors that it will use itself (cp.async):
//                  no barrier. [stage][tensor][vector][thread]
//   SharedStages   rows of any alignment: the threads of a row copy its 16-byte blocks together,
//                  and each then finds its vectors at the row's own offset (common/staged.h).
//                  Results take the same way out. [stage][row of the block][tensor], [output][row]
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
#include "common/staged.h"
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
  int count;  // of vectors that start inside the row

  __device__ __forceinline__ RowColumns(int dim_, int first_column_, int step_, int vectors)
      : dim(dim_), first_column(first_column_), step(step_), count(0) {
#pragma unroll
    for (int j = 0; j < vectors; ++j) count += of(j) < dim ? 1 : 0;
  }
  __device__ __forceinline__ int of(int j) const { return first_column + j * step; }
  __device__ __forceinline__ bool inside(int j) const { return j < count; }
};

template <typename T, typename O, int kVectors, int kTensors, int kThreads>
struct PrivateStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShared = false;
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
  static constexpr bool kShared = false;
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
    __shared__ uint64_t mbarriers[kMaxRowStages * kMaxRowsPerBlock];
    mbarrier = shared_address(mbarriers + threadIdx.y * kMaxRowStages);
    here = static_cast<char*>(shared) + threadIdx.y * row_bytes() + threadIdx.x * 16;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < stages; ++stage) mbarrier_init(mbarrier + stage * 8, 1);
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
  template <typename U, int kTensor>
  __device__ __forceinline__ Vector<U, N> read(int j) const {
    return Vector<U, N>::load_shared(slot(kTensor, j));
  }
  __device__ __forceinline__ Vector<T, N> read_other(int tensor, int j, int64_t) const {
    return Vector<T, N>::load_shared(slot(tensor, j));
  }
};

template <typename T, typename O, int kVectors, int kTensors, int kThreads>
struct SharedStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShared = true;
  static constexpr bool kBulk = false;

  const RowTensors& tensors;
  const int slice_start, columns, row_bytes;
  char* here;     // the row of tensor 0 in the stage of this row, and 16 bytes a thread
  char* outputs;  // the row of output 0, and 16 bytes a thread
  const char* next[kTensors];  // this block's first column of the row that is started next
  StagedStart starts[2];       // of this thread's first column in this row, of what is read twice

  __device__ __forceinline__ SharedStages(void* shared, const RowTensors& tensors_,
                                          const RowColumns& all, int64_t first_row, int stages)
      : tensors(tensors_),
        slice_start(all.first_column - threadIdx.x * N),
        columns(min(all.dim - slice_start, static_cast<int>(blockDim.x) * kVectors * N)),
        row_bytes(staged_bytes(blockDim.x * kVectors * N,
                               sizeof(O) > sizeof(T) ? sizeof(O) : sizeof(T))) {
    here = static_cast<char*>(shared) + threadIdx.y * tensors.count * row_bytes + threadIdx.x * 16;
    outputs = static_cast<char*>(shared) + stages * stage_bytes() + threadIdx.y * row_bytes +
              threadIdx.x * 16;
  }

  __device__ __forceinline__ const char* start_of(int tensor, int64_t row) const {
    return tensor == 0 ? reinterpret_cast<const char*>(tensors.row<O>(0, row, slice_start))
                       : reinterpret_cast<const char*>(tensors.row<T>(tensor, row, slice_start));
  }
  __device__ __forceinline__ int stage_bytes() const {
    return blockDim.y * tensors.count * row_bytes;
  }
  __device__ __forceinline__ void advance(int stages) { here += stages * stage_bytes(); }
  __device__ __forceinline__ StagedStart find(int tensor, int64_t row) const {
    const int of_thread = tensor == 0 ? N * static_cast<int>(sizeof(O)) - 16 : 0;
    return StagedStart(here + static_cast<int>(threadIdx.x) * of_thread + tensor * row_bytes +
                       bytes_behind_boundary(start_of(tensor, row)));
  }
  // Before this row is read.
  __device__ __forceinline__ void find_row(int64_t row) {
    starts[0] = find(0, row);
    starts[1] = find(1, row);
  }

  __device__ __forceinline__ void start_next_row(bool row_inside, int64_t row) const {
    if (!row_inside) return;
    const int thread = threadIdx.x, threads = blockDim.x;
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      char* target = here + i * row_bytes - 16 * thread;
      if (i < tensors.count) {
        if (i == 0) {
          stage_in(target, tensors.row<O>(0, row, slice_start), columns, thread, threads);
        } else {
          stage_in(target, tensors.row<T>(i, row, slice_start), columns, thread, threads);
        }
      }
    }
  }

  // Where vector j is after the thread's first, and how many of its elements are there.
  __device__ __forceinline__ int offset(int j, int size) const {
    return j * static_cast<int>(blockDim.x) * N * size;
  }
  __device__ __forceinline__ int left(int j) const {
    return columns - (j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  }

  template <typename U, int kTensor>
  __device__ __forceinline__ Vector<U, N> read(int j) const {
    return load_staged<U, N>(starts[kTensor], offset(j, sizeof(U)), left(j));
  }
  __device__ __forceinline__ Vector<T, N> read_other(int tensor, int j, int64_t row) const {
    return load_staged<T, N>(find(tensor, row), offset(j, sizeof(T)), left(j));
  }

  // `target` is where the row's slice begins in global memory.
  __device__ __forceinline__ void store_output(const T* target, int output, int j,
                                               const Vector<T, N>& vector) const {
    store_staged(vector,
                 outputs + output * static_cast<int>(blockDim.y) * row_bytes +
                     bytes_behind_boundary(target) + offset(j, sizeof(T)),
                 left(j));
  }
  // All of the row's threads have stored.
  __device__ __forceinline__ void write_output(T* target, int output) const {
    const int thread = threadIdx.x;
    stage_out(outputs - 16 * thread + output * static_cast<int>(blockDim.y) * row_bytes, target,
              columns, thread, blockDim.x);
  }
};

}  // namespace
}  // namespace fuselage
