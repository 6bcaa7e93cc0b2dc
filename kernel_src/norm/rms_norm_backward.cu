// The backward of rms_norm and fused_add_rms_norm on the GPU (formulas: norm/rms_norm.h).
//
// A persistent grid. The next rows are copied into shared memory while the current one is worked
// on: whole rows by one thread where the GPU has bulk copies, otherwise each thread's columns by
// itself (neither takes registers). A thread keeps the weight gradient of its columns in registers.
// Blocks leave one row of float32 partial sums each; a second kernel adds them up in order. Where
// rows are few, other blocks of the same launch make the weight gradient (norm/row_columns.h).
//
// Rows too long for either (no clusters, or beyond what eight blocks hold) are streamed: read
// twice.
//
// A thread has vectors of N elements, 16 bytes of x. With kAligned every row of every tensor starts
// and ends on a 16-byte boundary; without, rows may start anywhere, and pass through shared memory
// both ways (common/staged.h). Rows of which grad_out has another type than x go the way of
// unaligned ones. Which thread has which columns, and so the order of every sum, is the same, but
// where unaligned rows fill the shared memory: a block then has fewer of them, or a row more blocks
// (docs/design-decisions.md).
#include <type_traits>

#include "common/dispatch.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "common/runtime_dtype.h"
#include "common/staged.h"
#include "common/vector.h"
#include "norm/rms_norm.h"
#include "norm/rms_norm_policy.h"
#include "norm/rms_norm_stages.h"
#include "norm/row_columns.h"

namespace fuselage {
namespace {

// Whether the weight is of the activations' type, and so kept packed in registers.
template <typename T>
__device__ __forceinline__ bool weight_is_packed(const RmsNormBackward& p) {
  return p.weight != nullptr && (sizeof(T) == sizeof(float) || p.weight_dtype != DType::float32);
}

// The factors of N columns: weight + offset, or one. `packed` has been loaded where
// weight_is_packed. NOTE: with RuntimeLoading in its place the resident kernel takes 3 to 11%
// longer on an H200, with as many registers.
template <bool kAligned, typename T, int N>
__device__ __forceinline__ void weight_factors(const Vector<T, N>& packed, const RmsNormBackward& p,
                                               int column, int dim, float (&factors)[N]) {
  if (p.weight == nullptr) {
#pragma unroll
    for (int k = 0; k < N; ++k) factors[k] = 1.0f;
    return;
  }
  if (weight_is_packed<T>(p)) {
    packed.to_floats(factors);
  } else {
    using Loading = RuntimeLoading<float, N, kAligned>;
    Loading::load_columns(static_cast<const float*>(p.weight), column, dim).to_floats(factors);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) factors[k] += p.weight_offset;
}

// Whether the normalised row may be a result that is not used, of a sum that is: a row without
// statistics (see nan_unless_zero).
__device__ __forceinline__ bool may_be_unused(const RmsNormBackward& p, float rstd) {
  return p.grad_new_residual != nullptr && !(rstd > 0.0f);
}

// The weight gradient of few rows, for norm/row_columns.h.
template <typename T, typename O>
struct RmsNormColumnsOp {
  using Params = RmsNormBackward;
  using Element = T;
  using GradOut = O;
  static constexpr int kStatistics = 1, kColumnSums = 1;

  template <bool kAligned, int N>
  static __device__ __forceinline__ void column_terms(const Params&, const RowBackward&, int64_t,
                                                      int, const float (&grad_out)[N],
                                                      const float (&s)[N],
                                                      const RowMoments& moments, bool unused,
                                                      float (&sums)[1][N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) sums[0][k] += unused ? 0.0f : grad_out[k] * moments.rstd * s[k];
  }
  static __device__ __forceinline__ int kind(const Params&, int) { return 0; }
  static __device__ __forceinline__ WriteColumns finish(const Params& p) {
    return {p.grad_weight, p.weight_dtype, p.dim};
  }
  static __device__ __forceinline__ RowBackward launch(const Params& p) {
    RowBackward of_rows{};
    of_rows.tensors.data[0] = p.grad_out;
    of_rows.tensors.data[1] = p.x;
    of_rows.tensors.stride[0] = p.grad_out_stride;
    of_rows.tensors.stride[1] = p.x_stride;
    of_rows.extra = p.grad_new_residual != nullptr ? 2 : 0;
    of_rows.statistics = p.rstd;
    of_rows.statistics_size = 1;
    of_rows.dim = p.dim;
    of_rows.groups = 1;
    of_rows.group_rows = p.rows;
    return of_rows;
  }
};

// Grid: persistent, x over clusters, and after the `row_blocks` of these blocks for columns, if
// any. Block: (threads_per_row, rows_per_block). `blocks_in_cluster` counts with kClusters alone.
template <typename T, typename O, int kVectors, typename Stages, bool kClusters>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    rms_norm_backward_kernel(const RmsNormBackward p, const int row_blocks,
                             const int blocks_in_cluster, const int stages) {
  constexpr int N = Stages::N;
  constexpr bool kAligned = !Stages::kShared;
  if constexpr ((Stages::kBulk || (kClusters && kAligned)) && !kCompilesClusters) return;
  const int cluster = kClusters && kCompilesClusters ? blocks_in_cluster : 1;
  // NOTE: off a 128-byte boundary the asynchronous copies take a fifth longer.
  extern __shared__ __align__(128) uint4 dynamic_memory[];
  __shared__ RowSumScratch<1> scratch[2];
  if constexpr (!Stages::kBulk && std::is_same_v<T, O> && (!kClusters || Stages::kShared)) {
    if (static_cast<int>(blockIdx.x) >= row_blocks) {
      using Columns = RmsNormColumnsOp<T, O>;
      finish_columns<Columns, kAligned>(p, Columns::launch(p), blockIdx.x - row_blocks,
                                        reinterpret_cast<float*>(dynamic_memory));
      return;
    }
  }
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;  // between a thread's vectors
  const int block_in_row = cluster > 1 ? cluster_rank() : 0;
  const int first_column = block_in_row * kVectors * step + threadIdx.x * N;
  const auto column_of = [&](int j) { return first_column + j * step; };
  const int64_t first_row = int64_t{blockIdx.x / cluster} * blockDim.y + threadIdx.y;
  const int64_t row_step = int64_t{row_blocks / cluster} * blockDim.y;
  // rstd comes along with the rows, to each thread by itself: a load of its own would wait after
  // them.
  float* rstds = reinterpret_cast<float*>(dynamic_memory) + threadIdx.y * blockDim.x + threadIdx.x;
  Stages staged(reinterpret_cast<float*>(dynamic_memory) + stages * kBackwardThreads, p,
                first_column, first_row, row_step, stages);
  const auto start = [&](int64_t row, int stage) {
    if constexpr (Stages::kBulk) {
      if (threadIdx.x == 0 && row < p.rows) staged.start_row(row, stage);
      return;
    } else {
      if (row < p.rows) cp_async<4>(rstds + stage * kBackwardThreads, p.rstd + row);
      staged.start_next_row(row, stage, row < p.rows);
      cp_async_commit_group();
    }
  };

  row_sum_start(cluster, scratch);

  // The weight first: after the rows it would wait for all of them.
  Vector<T, N> weight[kVectors];
  if (weight_is_packed<T>(p)) {
    using Loading = RuntimeLoading<T, N, kAligned>;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      weight[j] = Loading::load_columns(static_cast<const T*>(p.weight), column_of(j), dim);
  }
  // A bulk copy starts as soon as the row before it in its stage is done with, others a row later.
  const int ahead = Stages::kBulk ? stages : stages - 1;
  for (int stage = 0; stage < ahead; ++stage) start(first_row + stage * row_step, stage);
  float next_rstd = 0.0f;
  if (Stages::kBulk && first_row < p.rows) next_rstd = p.rstd[first_row];

  // The factors of this thread's columns.
  float factors[kVectors][N];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    weight_factors<kAligned>(weight[j], p, column_of(j), dim, factors[j]);
  float grad_weight[kVectors][N];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int k = 0; k < N; ++k) grad_weight[j][k] = 0.0f;
  }

  row_sum_end(cluster);
  int stage = 0, turn = 0, round = 0;
  // All rows of a block, and all blocks of a cluster, go round the same number of times.
  for (int64_t row = first_row; row - threadIdx.y < p.rows; row += row_step) {
    const int64_t row_to_start = row + (stages - 1) * row_step;
    const int stage_to_start = stage == 0 ? stages - 1 : stage - 1;
    if constexpr (Stages::kBulk) {
      if (row < p.rows) staged.wait(stage, round);
    } else if constexpr (Stages::kShared) {
      // The barrier makes this row visible to all its threads, and frees the stage of the row
      // before it.
      cp_async_wait_group(stages - 2);
      row_barrier();
      start(row_to_start, stage_to_start);
    } else {
      start(row_to_start, stage_to_start);
      cp_async_wait_group(stages - 1);
    }
    const bool row_inside = row < p.rows;
    float rstd = Stages::kBulk ? next_rstd : rstds[stage * kBackwardThreads];
    if (Stages::kBulk && row + row_step < p.rows) next_rstd = p.rstd[row + row_step];

    // mean(g * xhat), where g = grad_out * factor and xhat = x * rstd.
    float dot[1] = {0.0f};
    if (row_inside) {
      float dots[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float g[N], x[N];
        staged.grad_out(row, stage, j, g);
        staged.x(row, stage, j, x);
        dots[j] = 0.0f;
#pragma unroll
        for (int k = 0; k < N; ++k) dots[j] += g[k] * factors[j][k] * x[k];
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) dot[0] += dots[j];
      if (may_be_unused(p, rstd)) {
        dot[0] = 0.0f;
#pragma unroll 1
        for (int j = 0; j < kVectors; ++j) {
          float g[N];
          staged.grad_out(row, stage, j, g);
          dot[0] += nan_unless_zero(g);
        }
      }
    }
    row_sum<true>(dot, cluster, scratch, turn);
    if constexpr (Stages::kBulk) {
      // The sum had a barrier: all threads of the row are done with the row before it.
      if (turn > 0) start(row_to_start, stage_to_start);
    }
    const bool unused = may_be_unused(p, rstd) && dot[0] == 0.0f;
    if (unused) rstd = 0.0f;
    const float x_factor = dot[0] / static_cast<float>(dim) * rstd * rstd * rstd;

    // grad_x = rstd * g - x * rstd^2 * mean(g * xhat), and this row's part of grad_weight.
    if (row_inside) {
      T* grad_x = static_cast<T*>(p.grad_x) + row * p.dim;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float g[N], x[N];
        staged.grad_out(row, stage, j, g);
        staged.x(row, stage, j, x);
        if (unused) Vector<float, N>::zero().to_floats(x);  // it may be infinite
#pragma unroll
        for (int k = 0; k < N; ++k) {
          g[k] *= rstd;
          grad_weight[j][k] += g[k] * x[k];
          x[k] = g[k] * factors[j][k] - x[k] * x_factor;
        }
        if (p.grad_new_residual != nullptr) {
          staged.grad_new_residual(row, stage, j, g);
#pragma unroll
          for (int k = 0; k < N; ++k) x[k] += g[k];
        }
        if (p.grad_x == nullptr) continue;
        const Vector<T, N> result = Vector<T, N>::from_floats(x);
        if constexpr (Stages::kShared) {
          staged.store_grad_x(row, j, result);
        } else if (column_of(j) < dim) {
          result.store(grad_x + column_of(j));
        }
      }
    }
    if constexpr (Stages::kShared) {
      row_barrier();
      if (p.grad_x != nullptr && row_inside) staged.write_grad_x(row);
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
    if (stage == 0) round ^= 1;
    ++turn;
  }
  launch_dependents();
  if (p.partials == nullptr) return;

  // Add up the rows of the block, in order, and leave the block's sum: [row of the block][column].
  cp_async_wait_group(0);
  __syncthreads();
  const int columns = kVectors * step;
  float* sums = reinterpret_cast<float*>(dynamic_memory);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    Vector<float, N>::from_floats(grad_weight[j])
        .store(sums + threadIdx.y * columns + j * step + threadIdx.x * N);
  }
  __syncthreads();
  constexpr int kWidth = 4;  // columns a thread adds up together
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int i = thread * kWidth; i < columns; i += blockDim.x * blockDim.y * kWidth) {
    float sum[kWidth];
    add_block_rows(sums + i, columns, sum);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const int column = block_in_row * columns + i + k;
      if (column >= dim) continue;
      if (p.partial_count > 1) {
        p.partials[int64_t{blockIdx.x / cluster} * p.dim + column] = sum[k];
      } else {
        store_value(p.grad_weight, p.weight_dtype, column, sum[k]);
      }
    }
  }
}

// grad_x of rows of any length and alignment, one a block.
template <typename T, typename O>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_backward_streamed_kernel(const RmsNormBackward p) {
  constexpr bool kAligned = false;
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<1> scratch[1];
  const int64_t row = blockIdx.x;
  const O* grad_out = static_cast<const O*>(p.grad_out) + row * p.grad_out_stride;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* grad_new_residual =
      static_cast<const T*>(p.grad_new_residual) + row * p.grad_new_residual_stride;
  float rstd = p.rstd[row];
  const bool lost = may_be_unused(p, rstd);
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;

  // g = grad_out * factor, and x.
  const auto load_both = [&](int column, float(&g)[N], float(&x_values)[N]) {
    float factors[N];
    load_values<kAligned>(RuntimeValues<T>(p.weight, p.weight_dtype), column, dim, 1.0f, factors);
    load<kAligned, N>(grad_out, column, dim).to_floats(g);
    load<kAligned, N>(x, column, dim).to_floats(x_values);
    const float offset = p.weight == nullptr ? 0.0f : p.weight_offset;
#pragma unroll
    for (int k = 0; k < N; ++k) g[k] *= factors[k] + offset;
  };

  float dot[1] = {0.0f};
#pragma unroll 1
  for (int column = threadIdx.x * N; column < dim; column += step) {
    float g[N], values[N];
    load_both(column, g, values);
    if (lost) {
      dot[0] += nan_unless_zero(g);
      continue;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) dot[0] += g[k] * values[k];
  }
  row_sum<false>(dot, 1, scratch, 0);
  const bool unused = lost && dot[0] == 0.0f;
  if (unused) rstd = 0.0f;
  const float mean_rstd = dot[0] * rstd / static_cast<float>(dim) * rstd;

#pragma unroll 1
  for (int start = 0; start < dim; start += step) {
    const int column = start + threadIdx.x * N;
    float g[N], values[N];
    load_both(column, g, values);
    if (unused) Vector<float, N>::zero().to_floats(values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = rstd * g[k] - values[k] * rstd * mean_rstd;
    if (p.grad_new_residual != nullptr) {
      load<kAligned, N>(grad_new_residual, column, dim).to_floats(g);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] += g[k];
    }
    store<kAligned>(Vector<T, N>::from_floats(values), static_cast<T*>(p.grad_x) + row * p.dim,
                    column, dim, column < dim);
  }
}

// Partial sums of grad_weight of streamed rows. Grid: (columns / threads, partial_count); a thread
// has one column of an equal share of the rows.
template <typename T, typename O>
__global__ void __launch_bounds__(256)
    rms_norm_backward_streamed_weight_kernel(const RmsNormBackward p) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= p.dim) return;
  const int64_t first_row = p.rows * blockIdx.y / gridDim.y;
  const int64_t last_row = p.rows * (blockIdx.y + 1) / gridDim.y;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t row = first_row; row < last_row; ++row) {
    const float g = to_float(static_cast<const O*>(p.grad_out)[row * p.grad_out_stride + column]);
    const float x = to_float(static_cast<const T*>(p.x)[row * p.x_stride + column]);
    const float rstd = p.rstd[row];
    const bool lost = g == 0.0f && may_be_unused(p, rstd);
    const O* row_of_g = static_cast<const O*>(p.grad_out) + row * p.grad_out_stride;
    sum += lost && is_zero(row_of_g, static_cast<int>(p.dim)) ? 0.0f : g * (x * rstd);
  }
  p.partials[blockIdx.y * p.dim + column] = sum;
}

// ---- launchers ----

BackwardPolicy policy_of(const RmsNormBackward& p, int device) {
  return rms_norm_backward_policy(device_info(device), has_aligned_kernel(p), p);
}

// `kVectors` is the most that the policy gives; halves of it are what else it may give, but for
// bulk copies. kLong: rows may be cut over a cluster, which is so with the most vectors.
template <typename T, typename O, int kVectors, template <typename, typename, int> class Stages,
          bool kLong = true>
gpuError launch_backward_rows(const RmsNormBackward& p, const BackwardPolicy& policy,
                              gpuStream stream) {
  using Chosen = Stages<T, O, kVectors>;
  if constexpr (kVectors > 1) {
    if (policy.row.vectors < kVectors) {
      return launch_backward_rows<T, O, kVectors / 2, Stages, false>(p, policy, stream);
    }
  }
  return with_bool(policy.row.cluster > 1, [&](auto clusters) {
    constexpr bool kClusters = kLong && (clusters || Chosen::kShared);
    return gpu_launch(&rms_norm_backward_kernel<T, O, kVectors, Chosen, kClusters>,
                      dim3(policy.blocks + policy.column_blocks),
                      dim3(policy.row.threads_per_row, policy.row.rows_per_block),
                      policy.shared_bytes, policy.row.cluster, stream, p, policy.blocks,
                      policy.row.cluster, policy.stages);
  });
}

template <typename T, typename O>
gpuError launch_backward_streamed(const RmsNormBackward& p, const BackwardPolicy& policy,
                                  gpuStream stream) {
  if (p.grad_x != nullptr) {
    const gpuError error = gpu_launch(&rms_norm_backward_streamed_kernel<T, O>, dim3(p.rows),
                                      dim3(policy.row.threads_per_row), 0, 1, stream, p);
    if (error != gpuSuccess) return error;
  }
  if (p.grad_weight == nullptr) return gpuSuccess;
  return gpu_launch(&rms_norm_backward_streamed_weight_kernel<T, O>,
                    dim3(ceil_div(p.dim, 256), p.partial_count), dim3(256), 0, 1, stream, p);
}

gpuError launch_backward_weight(const RmsNormBackward& p, gpuStream stream) {
  return reduce_partials({p.partials, 1, p.partial_count, 1, p.dim}, stream,
                         WriteColumns{p.grad_weight, p.weight_dtype, p.dim});
}

}  // namespace

namespace gpu {

int64_t rms_norm_backward_partials(const RmsNormBackward& p, int device) {
  const BackwardPolicy policy = policy_of(p, device);
  return policy.column_blocks > 0 ? 0 : policy.blocks / policy.row.cluster;
}

const char* rms_norm_backward(const RmsNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const BackwardPolicy policy = policy_of(p, device);
  gpuError error = gpuSuccess;
  const bool supported =
      dispatch_activation_output(p.x_dtype, p.out_dtype, [&](auto x_tag, auto out_tag) {
        using T = typename decltype(x_tag)::type;
        using O = typename decltype(out_tag)::type;
        constexpr int kMostVectors = kBackwardColumns * sizeof(T) / 16;
        if (policy.row.streamed) {
          error = launch_backward_streamed<T, O>(p, policy, stream);
          return;
        }
        if constexpr (std::is_same_v<T, O>) {
          if (policy.bulk) {
            error = launch_backward_rows<T, T, kMostVectors, BulkStages>(p, policy, stream);
            return;
          }
          if (has_aligned_kernel(p)) {
            error = launch_backward_rows<T, T, kMostVectors, PrivateStages>(p, policy, stream);
            return;
          }
        }
        error = launch_backward_rows<T, O, kMostVectors, SharedStages>(p, policy, stream);
      });
  if (!supported) return "unsupported element types";
  const bool partial = p.partial_count > 1 || policy.row.streamed;
  if (error == gpuSuccess && p.grad_weight != nullptr && partial)
    error = launch_backward_weight(p, stream);
  return message_of(error);
}

}  // namespace gpu
}  // namespace fuselage
