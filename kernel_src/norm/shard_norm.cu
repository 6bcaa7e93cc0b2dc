// Norms whose columns are spread over ranks, on the GPU (formulas: norm/shard_norm.h).
//
// The threads of a row go over its columns, a few 16-byte vectors of each input at a time, all
// loaded before the first is used: one kernel for rows of any length. Layer norm goes over them
// twice to sum them up, first for the mean; the second time they come from L1 or L2. Rows of a warp
// or less share a block. Which thread has which columns, and so the order of every sum, depends on
// the number of columns alone.
//
// To finish, every thread of a row adds up what the ranks gave: a few floats that all of them read
// from L1. There are no clusters and no stages here: a rank has a part of a row.
#include "norm/shard_norm.h"

#include "common/dispatch.h"
#include "norm/shard_norm_device.h"
#include "norm/shard_norm_policy.h"

namespace fuselage {
namespace {

constexpr int kBatch = kShardNormBatch;

// A row of a tensor: null where there is no tensor, or no such row.
template <typename T>
__device__ __forceinline__ const T* row_of(const ShardNorm& p, const void* tensor, int64_t stride,
                                           int64_t row) {
  return tensor == nullptr || row >= p.rows ? nullptr
                                            : static_cast<const T*>(tensor) + row * stride;
}

// N columns of a row. Where it starts on a 16-byte boundary they are loaded whole, and otherwise by
// the element, into the same lanes. Zero past the end of the row, and where there is none.
template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load_or_zero(const T* row, int column, int dim) {
  return RuntimeLoading<T, N, false>::load_columns(row, column, row == nullptr ? 0 : dim);
}

// Vectors of a row on their way together.
template <typename T, int N>
struct ShardBatch {
  Vector<T, N> packed[kBatch];

  __device__ __forceinline__ ShardBatch(const T* row, int column, int dim) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      packed[b] = load_or_zero<N>(row, column + b * blockDim.x * N, dim);
  }
};

// Writes N values of a row of T; with kAny of T or float32.
template <typename T, bool kAny, int N>
__device__ __forceinline__ void store_row(const ShardNorm& p, void* tensor, DType dtype,
                                          int64_t row, const float (&values)[N], int column) {
  if (row >= p.rows) return;
  const int dim = static_cast<int>(p.dim);
  const int64_t start = row * p.dim;
  // Tensors that a kernel writes are contiguous, and start on a 16-byte boundary.
  const bool whole = start % N == 0 && column + N <= dim;
  const auto write = [&](auto* to, auto vector) {
    if (whole) {
      vector.store(to + column);
    } else {
      vector.store_elements(vector, to, column, dim);
    }
  };
  if (kAny && sizeof(T) != sizeof(float) && dtype == DType::float32) {
    write(static_cast<float*>(tensor) + start, Vector<float, N>::from_floats(values));
  } else {
    write(static_cast<T*>(tensor) + start, Vector<T, N>::from_floats(values));
  }
}

__device__ __forceinline__ int64_t row_of_thread() {
  return int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
}

// body(first column of this thread) for each batch of a row, of kColumns columns a thread. NOTE: as
// often in every thread.
template <int kColumns, typename Body>
__device__ __forceinline__ void for_each_batch(const ShardNorm& p, int width, const Body& body) {
  const int dim = static_cast<int>(p.dim), step = kColumns * blockDim.x;
#pragma unroll 1
  for (int start = 0; start < dim; start += step)
    body(start + static_cast<int>(threadIdx.x) * width);
}

// All kernels: grid x over blocks of blockDim.y rows; blockDim.x threads a row.

template <typename Op>
__global__ void __launch_bounds__(kShardNormThreads) shard_norm_sums_kernel(const ShardNorm p) {
  using T = typename Op::Element;
  constexpr int N = Op::N;
  const int64_t row = row_of_thread();
  const int dim = static_cast<int>(p.dim);
  const T* x = row_of<T>(p, p.x, p.x_stride, row);
  const T* residual = row_of<T>(p, p.residual, p.residual_stride, row);

  // add(s, column, columns left) for the vectors of s.
  const auto for_each_vector = [&](const auto& add) {
    for_each_batch<kBatch * N>(p, N, [&](int column) {
      const ShardBatch<T, N> x_batch(x, column, dim), residual_batch(residual, column, dim);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int at = column + b * blockDim.x * N;
        float s[N];
        x_batch.packed[b].to_floats(s);
        if (p.residual != nullptr) {
          float others[N];
          residual_batch.packed[b].to_floats(others);
#pragma unroll
          for (int k = 0; k < N; ++k) s[k] += others[k];
          round_all<T>(s);
        }
        add(s, at, dim - at);
      }
    });
  };

  float mean[1] = {};
  if (Op::is_layer(p)) {
    __shared__ RowSumScratch<1> scratch[1];
    for_each_vector([&](const float(&s)[N], int, int) {
      float part = 0.0f;
#pragma unroll
      for (int k = 0; k < N; ++k) part += s[k];
      mean[0] += part;
    });
    row_sum<false>(mean, 1, scratch, 0);
    mean[0] /= static_cast<float>(dim);
  }
  __shared__ RowSumScratch<Op::kSums> scratch[1];
  float sums[Op::kSums] = {};
  for_each_vector([&](const float(&s)[N], int column, int inside) {
    if (p.residual != nullptr) store_row<T, false>(p, p.new_residual, p.dtype, row, s, column);
    Op::add(s, mean[0], inside, sums);
  });
  row_sum<false>(sums, 1, scratch, 0);
  if (threadIdx.x == 0 && row < p.rows) Op::give(p, row, mean[0], sums);
}

template <typename Op>
__global__ void __launch_bounds__(kShardNormThreads) shard_norm_finish_kernel(const ShardNorm p) {
  using T = typename Op::Element;
  constexpr int N = Op::N;
  const int64_t row = row_of_thread();
  const int dim = static_cast<int>(p.dim);
  const T* x = row_of<T>(p, p.x, p.x_stride, row);
  const T* mul = row_of<T>(p, p.mul, p.mul_stride, row);
  const auto statistics = Op::merged(p, min(row, p.rows - 1), threadIdx.x == 0 && row < p.rows);
  for_each_batch<kBatch * N>(p, N, [&](int column) {
    const ShardBatch<T, N> x_batch(x, column, dim), mul_batch(mul, column, dim);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = column + b * blockDim.x * N;
      float values[N], factors[N] = {};
      x_batch.packed[b].to_floats(values);
      if constexpr (Op::kMul) mul_batch.packed[b].to_floats(factors);
      Op::map(p, statistics, at, factors, values);
      store_row<T, Op::kAnyOut>(p, p.out, p.out_dtype, row, values, at);
    }
  });
}

// g and x of each vector of a row: body(column, g, x).
template <typename Op, typename Body>
__device__ __forceinline__ void for_each_gradient(const ShardNorm& p, int64_t row,
                                                  const Body& body) {
  using T = typename Op::Element;
  constexpr int N = Op::N;
  const int dim = static_cast<int>(p.dim);
  // NOTE: any dtype but float32 stands for T.
  const auto grad_out = RuntimeValues<T>(row < p.rows ? p.grad_out : nullptr,
                                         Op::kAnyOut ? p.out_dtype : DType::float16)
                            .row_at(row * p.grad_out_stride);
  const T* x = row_of<T>(p, p.x, p.x_stride, row);
  const T* mul = row_of<T>(p, p.mul, p.mul_stride, row);
  for_each_batch<N>(p, N, [&](int column) {
    RuntimeLoading<T, N, false> grad;
    grad.start(grad_out, column, dim);
    const Vector<T, N> x_packed = load_or_zero<N>(x, column, dim);
    const Vector<T, N> mul_packed = load_or_zero<N>(mul, column, dim);
    float g[N], values[N], factors[N] = {};
    grad.finish(grad_out, column, dim, 0.0f, g);
    x_packed.to_floats(values);
    if constexpr (Op::kMul) mul_packed.to_floats(factors);
    Op::weigh(p, column, factors, g);
    body(column, g, values);
  });
}

template <typename Op>
__global__ void __launch_bounds__(kShardNormThreads)
    shard_norm_backward_sums_kernel(const ShardNorm p) {
  constexpr int N = Op::N;
  __shared__ RowSumScratch<Op::kBackwardSums> scratch[1];
  const int64_t row = row_of_thread();
  const auto statistics = Op::saved(p, min(row, p.rows - 1));
  float sums[Op::kBackwardSums] = {};
  for_each_gradient<Op>(p, row, [&](int, const float(&g)[N], const float(&x)[N]) {
    Op::add_gradient(statistics, g, x, sums);
  });
  row_sum<false>(sums, 1, scratch, 0);
  if (threadIdx.x == 0 && row < p.rows) Op::give_gradient(p, row, sums);
}

template <typename Op>
__global__ void __launch_bounds__(kShardNormThreads)
    shard_norm_backward_finish_kernel(const ShardNorm p) {
  using T = typename Op::Element;
  constexpr int N = Op::N;
  const int64_t row = row_of_thread(), inside = min(row, p.rows - 1);
  const auto statistics = Op::saved(p, inside);
  const typename Op::Means means(p, inside, statistics);
  const T* other = row_of<T>(p, p.grad_new_residual, p.grad_new_residual_stride, row);
  for_each_gradient<Op>(p, row, [&](int column, float(&g)[N], const float(&x)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) g[k] = Op::gradient(statistics, means, g[k], x[k]);
    if (!Op::kMul && other != nullptr) {
      float others[N];
      load_or_zero<N>(other, column, static_cast<int>(p.dim)).to_floats(others);
#pragma unroll
      for (int k = 0; k < N; ++k) g[k] += others[k];
    }
    store_row<T, false>(p, p.out, p.dtype, row, g, column);
  });
}

// From the params to the operator: f(TypeTag<Op>).
template <typename F>
gpuError dispatch_op(const ShardNorm& p, F&& f) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (p.kind) {
      case ShardNormKind::rms:
      case ShardNormKind::layer: return f(TypeTag<ShardLinearOp<T>>{});
      case ShardNormKind::poly: return f(TypeTag<ShardPolyOp<T>>{});
    }
    return gpuErrorInvalidValue;
  });
}

// Launches a kernel: kernel_of(TypeTag<Op>).
template <typename KernelOf>
const char* launch_rows(const ShardNorm& p, void* stream, const KernelOf& kernel_of) {
  const ShardNormPolicy policy = shard_norm_policy(p);
  const dim3 block(policy.threads_per_row, policy.rows_per_block);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, policy.rows_per_block)));
  return message_of(dispatch_op(p, [&](auto op) {
    return gpu_launch(kernel_of(op), grid, block, 0, 1, static_cast<gpuStream>(stream), p);
  }));
}

}  // namespace

namespace gpu {

const char* shard_norm_sums(const ShardNorm& p, int /*device*/, void* stream) {
  return launch_rows(p, stream, [&](auto op) {
    using Op = typename decltype(op)::type;
    return p.backward ? &shard_norm_backward_sums_kernel<Op> : &shard_norm_sums_kernel<Op>;
  });
}

const char* shard_norm_finish(const ShardNorm& p, int /*device*/, void* stream) {
  return launch_rows(p, stream, [&](auto op) {
    using Op = typename decltype(op)::type;
    return p.backward ? &shard_norm_backward_finish_kernel<Op> : &shard_norm_finish_kernel<Op>;
  });
}

}  // namespace gpu
}  // namespace fuselage
