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
#pragma once

#include <type_traits>

#include "common/reduce.h"
#include "common/staged.h"
#include "common/vector.h"
#include "norm/row_backward_policy.h"
#include "norm/row_tensors.h"

namespace fuselage {
namespace {

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

  char* memory;  // this thread's first vector
  RowColumns columns;
  const RowTensors& tensors;
  int threads, stage_bytes;
  const char* next[kTensors];  // this thread's first column of the row that is started next

  __device__ __forceinline__ PrivateStages(void* shared, const RowTensors& tensors_,
                                           const RowColumns& columns_, int64_t first_row,
                                           int stages)
      : columns(columns_),
        tensors(tensors_),
        threads(kThreads > 0 ? kThreads : blockDim.x * blockDim.y) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    memory = static_cast<char*>(shared) + thread * 16;
    stage_bytes = offset_of(tensors.count);
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      const int64_t size = i == 0 ? sizeof(O) : sizeof(T);
      next[i] = static_cast<const char*>(tensors.data[i]) +
                (first_row * tensors.stride[i] + columns.first_column) * size;
    }
    // Columns past the end are zero in every stage: nothing is copied there later.
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (columns.inside(j)) continue;
      for (int stage = 0; stage < stages; ++stage) {
        *slot<O>(stage, 0, j) = Vector<O, N>::zero();
        for (int i = 1; i < tensors.count; ++i) *slot<T>(stage, i, j) = Vector<T, N>::zero();
      }
    }
  }

  __device__ __forceinline__ int offset_of(int tensor) const {
    return tensor * kVectors * 16 * (kThreads > 0 ? kThreads : threads);
  }
  template <typename U>
  __device__ __forceinline__ Vector<U, N>* slot(int stage, int tensor, int j) const {
    return reinterpret_cast<Vector<U, N>*>(memory + stage * stage_bytes + offset_of(tensor)) +
           j * (kThreads > 0 ? kThreads : threads);
  }

  __device__ __forceinline__ void start_next_row(int64_t, int stage, bool row_inside) {
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      if (row_inside && i < tensors.count) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (!columns.inside(j)) continue;
          if (i == 0) {
            Vector<O, N>::load_async(slot<O>(stage, 0, j),
                                     next[i] + j * columns.step * static_cast<int>(sizeof(O)));
          } else {
            Vector<T, N>::load_async(slot<T>(stage, i, j),
                                     next[i] + j * columns.step * static_cast<int>(sizeof(T)));
          }
        }
      }
      next[i] += tensors.step[i];
    }
  }
  template <typename U>
  __device__ __forceinline__ void read(int64_t, int stage, int tensor, int j,
                                       float (&values)[N]) const {
    Vector<U, N>::load_shared(slot<U>(stage, tensor, j)).to_floats(values);
  }
};

template <typename T, typename O, int kVectors, int kTensors, int kThreads>
struct BulkStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShared = false;
  static constexpr bool kBulk = true;

  char* memory;  // of this thread's row in the first stage
  uint64_t* mbarriers;
  const RowTensors& tensors;
  int stage_bytes, slice, slice_start, columns;

  __device__ __forceinline__ BulkStages(void* shared, const RowTensors& tensors_,
                                        const RowColumns& all, int64_t, int stages)
      : tensors(tensors_) {
    __shared__ uint64_t all_mbarriers[kMaxRowStages * kMaxRowsPerBlock];
    mbarriers = all_mbarriers + threadIdx.y * kMaxRowStages;
    slice = blockDim.x * kVectors * N;
    slice_start = all.first_column - threadIdx.x * N;
    columns = max(0, min(all.dim - slice_start, slice));
    const int row_bytes = offset_of(tensors.count);
    stage_bytes = blockDim.y * row_bytes;
    memory = static_cast<char*>(shared) + threadIdx.y * row_bytes;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < stages; ++stage)
        mbarrier_init(shared_address(&mbarriers[stage]), 1);
      fence_mbarrier_init();
    }
    // Columns past the end are zero in every stage: nothing is copied there later.
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (local(j) < columns) continue;
      for (int stage = 0; stage < stages; ++stage) {
        *slot<O>(stage, 0, j) = Vector<O, N>::zero();
        for (int i = 1; i < tensors.count; ++i) *slot<T>(stage, i, j) = Vector<T, N>::zero();
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int offset_of(int tensor) const {
    return tensor == 0
               ? 0
               : slice * (static_cast<int>(sizeof(O)) + (tensor - 1) * static_cast<int>(sizeof(T)));
  }
  __device__ __forceinline__ int local(int j) const {
    return (j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  }
  __device__ __forceinline__ char* row_memory(int stage, int tensor) const {
    return memory + stage * stage_bytes + offset_of(tensor);
  }
  template <typename U>
  __device__ __forceinline__ Vector<U, N>* slot(int stage, int tensor, int j) const {
    return reinterpret_cast<Vector<U, N>*>(reinterpret_cast<U*>(row_memory(stage, tensor)) +
                                           local(j));
  }

  // One thread of the row calls this.
  __device__ __forceinline__ void start_row(int64_t row, int stage) const {
    uint64_t* mbarrier = &mbarriers[stage];
    const int x_bytes = columns * static_cast<int>(sizeof(T));
    const int out_bytes = columns * static_cast<int>(sizeof(O));
    mbarrier_arrive_expect_tx(shared_address(mbarrier), out_bytes + (tensors.count - 1) * x_bytes);
    if (columns == 0) return;
    bulk_copy_async(row_memory(stage, 0), tensors.row<O>(0, row, slice_start), out_bytes,
                    shared_address(mbarrier));
#pragma unroll
    for (int i = 1; i < kTensors; ++i) {
      if (i < tensors.count)
        bulk_copy_async(row_memory(stage, i), tensors.row<T>(i, row, slice_start), x_bytes,
                        shared_address(mbarrier));
    }
  }
  __device__ __forceinline__ void wait(int stage, int round) const {
    mbarrier_wait_parity_cluster(shared_address(&mbarriers[stage]), round);
  }
  template <typename U>
  __device__ __forceinline__ void read(int64_t, int stage, int tensor, int j,
                                       float (&values)[N]) const {
    Vector<U, N>::load_shared(slot<U>(stage, tensor, j)).to_floats(values);
  }
};

template <typename T, typename O, int kVectors, int kTensors, int kThreads>
struct SharedStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShared = true;
  static constexpr bool kBulk = false;

  char* memory;
  const RowTensors& tensors;
  int slice_start, columns, row_bytes, stages;

  __device__ __forceinline__ SharedStages(void* shared, const RowTensors& tensors_,
                                          const RowColumns& all, int64_t, int stages_)
      : memory(static_cast<char*>(shared)), tensors(tensors_), stages(stages_) {
    const int slice = blockDim.x * kVectors * N;  // columns of a row that this block works on
    slice_start = all.first_column - threadIdx.x * N;
    columns = min(all.dim - slice_start, slice);
    row_bytes = staged_bytes(slice, sizeof(O) > sizeof(T) ? sizeof(O) : sizeof(T));
  }

  __device__ __forceinline__ char* row_memory(int stage, int tensor) const {
    const int row = stage * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
    return memory + (row * tensors.count + tensor) * row_bytes;
  }
  __device__ __forceinline__ char* output_memory(int output) const {
    const int rows = blockDim.y;
    const int row = stages * rows * tensors.count + output * rows + static_cast<int>(threadIdx.y);
    return memory + row * row_bytes;
  }
  __device__ __forceinline__ void start_next_row(int64_t row, int stage, bool row_inside) const {
    if (!row_inside) return;
    stage_in(row_memory(stage, 0), tensors.row<O>(0, row, slice_start), columns, threadIdx.x,
             blockDim.x);
#pragma unroll
    for (int i = 1; i < kTensors; ++i) {
      if (i < tensors.count) {
        stage_in(row_memory(stage, i), tensors.row<T>(i, row, slice_start), columns, threadIdx.x,
                 blockDim.x);
      }
    }
  }

  // Where vector j of this thread starts in its slice, and how many of its elements are there.
  __device__ __forceinline__ int local(int j) const {
    return (j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  }
  __device__ __forceinline__ int left(int j) const { return columns - local(j); }

  template <typename U>
  __device__ __forceinline__ void read(int64_t row, int stage, int tensor, int j,
                                       float (&values)[N]) const {
    const int shift = bytes_behind_boundary(tensors.row<U>(tensor, row, slice_start));
    load_staged<U, N>(row_memory(stage, tensor) + shift + local(j) * static_cast<int>(sizeof(U)),
                      left(j))
        .to_floats(values);
  }

  // `target` is the row in global memory.
  __device__ __forceinline__ void store_output(const T* target, int output, int j,
                                               const Vector<T, N>& vector) const {
    const int shift = bytes_behind_boundary(target + slice_start);
    store_staged(vector, output_memory(output) + shift + local(j) * static_cast<int>(sizeof(T)),
                 left(j));
  }
  // All of the row's threads have stored.
  __device__ __forceinline__ void write_output(T* target, int output) const {
    stage_out(output_memory(output), target + slice_start, columns, threadIdx.x, blockDim.x);
  }
};

}  // namespace
}  // namespace fuselage
