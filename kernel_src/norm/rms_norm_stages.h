// How the rows of rms_norm's backward come through shared memory.
#pragma once

#include "common/ptx.h"
#include "common/staged.h"
#include "common/vector.h"
#include "norm/rms_norm_policy.h"

namespace fuselage {
namespace {

// The rows of the gradient's inputs on their way through shared memory, a few stages of them. A
// stage holds, for each row of the block, grad_out, x and perhaps grad_new_residual.

// Aligned rows: a thread copies the vectors that it will use itself, so no barrier is needed.
// [stage][tensor][vector][thread]
template <typename T, typename O, int kVectors>
struct PrivateStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShared = false;
  static constexpr bool kBulk = false;
  static constexpr int kPitch = kVectors * kBackwardThreads * N;  // elements of a tensor in a stage
  static constexpr int kTwoTensors = kPitch * static_cast<int>(sizeof(O) + sizeof(T));

  char* memory;  // this thread's first vector
  int stage_bytes, dim, first_column, step;
  int64_t grad_out_stride, x_stride, grad_new_residual_stride;
  const O* next_grad_out;  // first vector of the row that is started next
  const T* next_x;
  const T* next_grad_new_residual;

  __device__ __forceinline__ PrivateStages(void* shared, const RmsNormBackward& p,
                                           int first_column_, int64_t first_row, int64_t row_step,
                                           int stages)
      : memory(static_cast<char*>(shared)),
        dim(static_cast<int>(p.dim)),
        first_column(first_column_),
        step(blockDim.x * N) {
    stage_bytes =
        kTwoTensors + (p.grad_new_residual != nullptr ? kPitch * static_cast<int>(sizeof(T)) : 0);
    const auto start_of = [&](auto* tensor, int64_t stride) {
      return tensor + first_row * stride + first_column;
    };
    next_grad_out = start_of(static_cast<const O*>(p.grad_out), p.grad_out_stride);
    next_x = start_of(static_cast<const T*>(p.x), p.x_stride);
    next_grad_new_residual =
        start_of(static_cast<const T*>(p.grad_new_residual), p.grad_new_residual_stride);
    grad_out_stride = row_step * p.grad_out_stride;
    x_stride = row_step * p.x_stride;
    grad_new_residual_stride = row_step * p.grad_new_residual_stride;
    // Columns past the row's end are zero in every stage: nothing is copied there later.
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (inside(j)) continue;
      for (int stage = 0; stage < stages; ++stage) {
        *grad_out_slot(stage, j) = Vector<O, N>::zero();
        *x_slot(stage, j) = Vector<T, N>::zero();
      }
    }
  }

  __device__ __forceinline__ bool inside(int j) const { return first_column + j * step < dim; }

  template <typename U>
  __device__ __forceinline__ Vector<U, N>* slot(char* tensor, int j) const {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    return reinterpret_cast<Vector<U, N>*>(tensor) + thread + j * kBackwardThreads;
  }
  __device__ __forceinline__ Vector<O, N>* grad_out_slot(int stage, int j) const {
    return slot<O>(memory + stage * stage_bytes, j);
  }
  __device__ __forceinline__ Vector<T, N>* x_slot(int stage, int j) const {
    return slot<T>(memory + stage * stage_bytes + kPitch * static_cast<int>(sizeof(O)), j);
  }
  __device__ __forceinline__ Vector<T, N>* grad_new_residual_slot(int stage, int j) const {
    return slot<T>(memory + stage * stage_bytes + kTwoTensors, j);
  }

  __device__ __forceinline__ void start_next_row(int64_t, int stage, bool row_inside) {
    if (row_inside) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (inside(j)) {
          Vector<O, N>::load_async(grad_out_slot(stage, j), next_grad_out + j * step);
          Vector<T, N>::load_async(x_slot(stage, j), next_x + j * step);
        }
      }
      if (stage_bytes > kTwoTensors) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (inside(j))
            Vector<T, N>::load_async(grad_new_residual_slot(stage, j),
                                     next_grad_new_residual + j * step);
        }
      }
    }
    next_grad_out += grad_out_stride;
    next_x += x_stride;
    next_grad_new_residual += grad_new_residual_stride;
  }
  __device__ __forceinline__ void grad_out(int64_t, int stage, int j, float (&values)[N]) const {
    Vector<O, N>::load_shared(grad_out_slot(stage, j)).to_floats(values);
  }
  __device__ __forceinline__ void x(int64_t, int stage, int j, float (&values)[N]) const {
    Vector<T, N>::load_shared(x_slot(stage, j)).to_floats(values);
  }
  __device__ __forceinline__ void grad_new_residual(int64_t, int stage, int j,
                                                    float (&values)[N]) const {
    Vector<T, N>::load_shared(grad_new_residual_slot(stage, j)).to_floats(values);
  }
};

// Aligned rows of more than a warp, where the GPU has bulk copies: one thread starts the copy of a
// whole row, and an mbarrier tells when it is there. [stage][row of the block][tensor][column]
template <typename T, typename O, int kVectors>
struct BulkStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShared = false;
  static constexpr bool kBulk = true;

  char* memory;  // of this thread's row in the first stage
  uint64_t* mbarriers;
  const RmsNormBackward& p;
  int64_t row_step;
  int stage_bytes, slice, slice_start, columns;

  __device__ __forceinline__ BulkStages(void* shared, const RmsNormBackward& p_, int first_column,
                                        int64_t, int64_t row_step_, int stages)
      : p(p_), row_step(row_step_) {
    __shared__ uint64_t all_mbarriers[kMaxStages * kMaxWarpsPerBlock];
    mbarriers = all_mbarriers + threadIdx.y * kMaxStages;
    slice = blockDim.x * kVectors * N;
    slice_start = first_column - threadIdx.x * N;
    columns = max(0, min(static_cast<int>(p.dim) - slice_start, slice));
    const int row_bytes =
        slice *
        static_cast<int>(sizeof(O) + (p.grad_new_residual != nullptr ? 2 * sizeof(T) : sizeof(T)));
    stage_bytes = blockDim.y * row_bytes;
    memory = static_cast<char*>(shared) + threadIdx.y * row_bytes;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < stages; ++stage)
        mbarrier_init(shared_address(&mbarriers[stage]), 1);
      fence_mbarrier_init();
    }
    // Columns past the row's end are zero in every stage: nothing is copied there later.
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (local(j) < columns) continue;
      for (int stage = 0; stage < stages; ++stage) {
        *grad_out_slot(stage, j) = Vector<O, N>::zero();
        *x_slot(stage, j) = Vector<T, N>::zero();
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int local(int j) const {
    return (j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  }
  __device__ __forceinline__ O* grad_out_row(int stage) const {
    return reinterpret_cast<O*>(memory + stage * stage_bytes);
  }
  __device__ __forceinline__ T* x_row(int stage) const {
    return reinterpret_cast<T*>(grad_out_row(stage) + slice);
  }
  __device__ __forceinline__ Vector<O, N>* grad_out_slot(int stage, int j) const {
    return reinterpret_cast<Vector<O, N>*>(grad_out_row(stage) + local(j));
  }
  __device__ __forceinline__ Vector<T, N>* x_slot(int stage, int j) const {
    return reinterpret_cast<Vector<T, N>*>(x_row(stage) + local(j));
  }

  // One thread of the row calls this.
  __device__ __forceinline__ void start_row(int64_t row, int stage) const {
    uint64_t* mbarrier = &mbarriers[stage];
    const int x_bytes = columns * static_cast<int>(sizeof(T));
    const int out_bytes = columns * static_cast<int>(sizeof(O));
    mbarrier_arrive_expect_tx(shared_address(mbarrier),
                              out_bytes + (p.grad_new_residual != nullptr ? 2 * x_bytes : x_bytes));
    if (columns == 0) return;
    const auto source = [&](auto* tensor, int64_t stride) {
      return tensor + row * stride + slice_start;
    };
    bulk_copy_async(grad_out_row(stage),
                    source(static_cast<const O*>(p.grad_out), p.grad_out_stride), out_bytes,
                    shared_address(mbarrier));
    bulk_copy_async(x_row(stage), source(static_cast<const T*>(p.x), p.x_stride), x_bytes,
                    shared_address(mbarrier));
    if (p.grad_new_residual != nullptr) {
      bulk_copy_async(
          x_row(stage) + slice,
          source(static_cast<const T*>(p.grad_new_residual), p.grad_new_residual_stride), x_bytes,
          shared_address(mbarrier));
    }
  }
  __device__ __forceinline__ void wait(int stage, int round) const {
    mbarrier_wait_parity_cluster(shared_address(&mbarriers[stage]), round);
  }

  __device__ __forceinline__ void grad_out(int64_t, int stage, int j, float (&values)[N]) const {
    Vector<O, N>::load_shared(grad_out_slot(stage, j)).to_floats(values);
  }
  __device__ __forceinline__ void x(int64_t, int stage, int j, float (&values)[N]) const {
    Vector<T, N>::load_shared(x_slot(stage, j)).to_floats(values);
  }
  __device__ __forceinline__ void grad_new_residual(int64_t, int stage, int j,
                                                    float (&values)[N]) const {
    Vector<T, N>::load_shared(x_row(stage) + slice + local(j)).to_floats(values);
  }
};

// Rows of any alignment: the threads of a row copy its 16-byte blocks together, and each then finds
// its vectors at the row's own offset. [stage][row of the block][tensor], row_bytes each, and one
// row of grad_x on its way out for each row of the block.
template <typename T, typename O, int kVectors>
struct SharedStages {
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kShared = true;
  static constexpr bool kBulk = false;

  char* memory;
  const RmsNormBackward& p;
  int first_column, slice_start, columns, row_bytes, tensors, stages;

  __device__ __forceinline__ SharedStages(void* shared, const RmsNormBackward& p_,
                                          int first_column_, int64_t, int64_t, int stages_)
      : memory(static_cast<char*>(shared)), p(p_), first_column(first_column_), stages(stages_) {
    const int slice = blockDim.x * kVectors * N;  // columns of a row that this block works on
    slice_start = first_column - threadIdx.x * N;
    columns = min(static_cast<int>(p.dim) - slice_start, slice);
    row_bytes = staged_bytes(slice, sizeof(O) > sizeof(T) ? sizeof(O) : sizeof(T));
    tensors = p.grad_new_residual != nullptr ? 3 : 2;
  }

  __device__ __forceinline__ char* row_memory(int stage, int tensor) const {
    const int row = stage * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y);
    return memory + (row * tensors + tensor) * row_bytes;
  }
  __device__ __forceinline__ char* grad_x_memory() const {
    return row_memory(stages, 0) - static_cast<int>(threadIdx.y) * (tensors - 1) * row_bytes;
  }
  template <typename U>
  __device__ __forceinline__ const U* row_start(const void* tensor, int64_t row,
                                                int64_t stride) const {
    return static_cast<const U*>(tensor) + row * stride + slice_start;
  }

  template <typename U>
  __device__ __forceinline__ void start_tensor(const void* tensor, int64_t row, int64_t stride,
                                               int stage, int index) const {
    stage_in(row_memory(stage, index), row_start<U>(tensor, row, stride), columns, threadIdx.x,
             blockDim.x);
  }
  __device__ __forceinline__ void start_next_row(int64_t row, int stage, bool row_inside) const {
    if (!row_inside) return;
    start_tensor<O>(p.grad_out, row, p.grad_out_stride, stage, 0);
    start_tensor<T>(p.x, row, p.x_stride, stage, 1);
    if (p.grad_new_residual != nullptr) {
      start_tensor<T>(p.grad_new_residual, row, p.grad_new_residual_stride, stage, 2);
    }
  }

  // Where vector j of this thread starts in its slice, and how many of its elements are there.
  __device__ __forceinline__ int local(int j) const {
    return (j * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  }
  __device__ __forceinline__ int left(int j) const { return columns - local(j); }

  template <typename U>
  __device__ __forceinline__ void read(const void* tensor, int64_t row, int64_t stride, int stage,
                                       int index, int j, float (&values)[N]) const {
    const int shift = bytes_behind_boundary(row_start<U>(tensor, row, stride));
    load_staged<U, N>(row_memory(stage, index) + shift + local(j) * static_cast<int>(sizeof(U)),
                      left(j))
        .to_floats(values);
  }
  __device__ __forceinline__ void grad_out(int64_t row, int stage, int j,
                                           float (&values)[N]) const {
    read<O>(p.grad_out, row, p.grad_out_stride, stage, 0, j, values);
  }
  __device__ __forceinline__ void x(int64_t row, int stage, int j, float (&values)[N]) const {
    read<T>(p.x, row, p.x_stride, stage, 1, j, values);
  }
  __device__ __forceinline__ void grad_new_residual(int64_t row, int stage, int j,
                                                    float (&values)[N]) const {
    read<T>(p.grad_new_residual, row, p.grad_new_residual_stride, stage, 2, j, values);
  }

  __device__ __forceinline__ void store_grad_x(int64_t row, int j, const Vector<T, N>& v) const {
    const int shift = bytes_behind_boundary(row_start<T>(p.grad_x, row, p.dim));
    store_staged(v, grad_x_memory() + shift + local(j) * static_cast<int>(sizeof(T)), left(j));
  }
  // All of the row's threads have stored.
  __device__ __forceinline__ void write_grad_x(int64_t row) const {
    T* target = static_cast<T*>(p.grad_x) + row * p.dim + slice_start;
    stage_out(grad_x_memory(), target, columns, threadIdx.x, blockDim.x);
  }
};

}  // namespace
}  // namespace fuselage
