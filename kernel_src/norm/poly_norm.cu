// poly_norm, fused_mul_poly_norm and grouped_poly_norm on the GPU (formulas: norm/poly_norm.h).
//
// The threads of a row hold it in registers, packed, forward and backward, so that it is read once:
// loads are 16 bytes wide and all issued before the first use, one reduction gives all sums of the
// row (three, or four), and a second pass over the registers writes the results. Short rows share a
// block; long rows are cut over the blocks of a cluster; rows beyond that, and short ones that are
// not aligned, are streamed: read twice. Many rows of the backward, and long ones of the forward,
// are copied into shared memory ahead of their turn, and held there.
//
// A row's part of the gradients of weight and bias is four numbers. Blocks of the backward add
// those of their rows up and leave one float32 partial sum; a second kernel adds them up in order.
// With experts, each row leaves its own, and a block of the second kernel has the rows of one
// expert.
//
// Which thread has which columns, and so the order of every sum, does not depend on alignment:
// aligned means that every row of every tensor starts and ends on a 16-byte boundary; otherwise
// vectors are put together from aligned blocks (common/row_vectors.h, common/vector.h).
#include "norm/poly_norm.h"

#include "norm/poly_norm_launch.h"
#include "norm/row_stages.h"
#include "norm/row_tensors.h"

namespace fuselage {
namespace {

// out = y [* mul]
template <Form kForm, typename T, int N>
__device__ __forceinline__ void results(const Vector<T, N>& x, const Vector<T, N>& mul,
                                        const Polynomial& y, bool padding, bool clamps, float limit,
                                        float (&out)[N]) {
  cut_floats<kForm>(x, clamps, limit, out);
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = y(out[k]);
  if constexpr (has_mul(kForm)) {
    float mul_values[N];
    cut_floats<kForm>(mul, clamps, limit, mul_values);
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] *= mul_values[k];
  }
  if constexpr (kForm == Form::grouped) {
    if (clamps) clamp_all(out, limit);
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = padding ? 0.0f : out[k];
  }
}

__device__ __forceinline__ void save_rstd(float* saved, int64_t row, const float (&rstd)[3]) {
#pragma unroll
  for (int k = 0; k < 3; ++k) saved[3 * row + k] = rstd[k];
}

// Grid: x over blocks of rows_per_block * kRows rows (times the cluster). Block: (threads_per_row,
// rows_per_block). `blocks_in_cluster` counts with kLong alone.
//
// The launch bounds leave the plain kernel of a block's rows 56 registers, as those of rms_norm's,
// and other aligned kernels 64, so that two blocks of 512 threads fit on a multiprocessor: on an
// H200 (8192, 14336) bfloat16 with mul then takes 165 us, and 251 with one block. 72 and more where
// a thread has several rows.
template <typename T, int kVectors, int kRows, Form kForm, bool kLong, bool kAligned>
__global__ void __launch_bounds__(kRows > 1 ? kPolyNormShortThreads
                                  : kAligned && kForm == Form::plain && !kLong
                                      ? 576
                                      : kPolyNormLongThreads,
                                  kRows > 1  ? 7
                                  : kAligned ? bounded_blocks(576, 2)
                                             : 1)
    poly_norm_forward_kernel(const PolyNormForward p, const int blocks_in_cluster) {
  constexpr int N = 16 / sizeof(T);
  constexpr bool kMul = has_mul(kForm);
  if constexpr (kLong && kAligned && !kCompilesClusters) return;
  const int cluster = kLong && kCompilesClusters ? blocks_in_cluster : 1;
  __shared__ RowSumScratch<3> scratch[1];
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;  // between a thread's vectors
  const int block_in_row = cluster > 1 ? cluster_rank() : 0;
  const int row_block = cluster > 1 ? blockIdx.x / cluster : blockIdx.x;
  const int first_column = block_in_row * kVectors * step + threadIdx.x * N;
  const int64_t first_row = (int64_t{row_block} * blockDim.y + threadIdx.y) * kRows;
  const T* x = static_cast<const T*>(p.x) + first_row * p.x_stride;
  const T* mul = static_cast<const T*>(p.mul) + first_row * p.mul_stride;
  const bool cuts = clamps<kForm>(p);
  const int64_t rows = rows_to_read<kForm>(p);
  // Rows past the end are empty.
  const auto dim_of = [&](int i) { return first_row + i < rows ? dim : 0; };
  const auto write_dim_of = [&](int i) {
    return kForm == Form::grouped ? (first_row + i < p.rows ? dim : 0) : dim_of(i);
  };

  row_sum_start(cluster, scratch);

  // Start to load everything this thread works on.
  RowFactors<T, kForm> factors;
  factors.load_common(p);
  SpreadLoading<T, kVectors, kAligned> x_loading[kRows], mul_loading[kMul ? kRows : 1];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = first_column + j * step;
      x_loading[i].start(j, x + i * p.x_stride, column, dim_of(i));
      if constexpr (kMul) mul_loading[i].start(j, mul + i * p.mul_stride, column, dim_of(i));
    }
  }
  factors.load_of_row(p, first_row);

  // Row statistics.
  Vector<T, N> x_packed[kRows][kVectors];
  float sums[kRows][3] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    x_loading[i].join();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      x_packed[i][j] = x_loading[i].joined(j);
      float values[N];
      cut_floats<kForm>(x_packed[i][j], cuts, p.hidden_clamp, values);
      add_moments(values, sums[i]);
    }
  }
  // Of several rows, a thread looks after the statistics of one.
  float own_sums[3], rstd[3];
  if constexpr (kRows > 1) {
    warp_sums_of_rows(sums, own_sums, blockDim.x);
  } else {
#pragma unroll
    for (int k = 0; k < 3; ++k) own_sums[k] = sums[0][k];
    row_sum_end(cluster);
    row_sum<false>(own_sums, cluster, scratch, 0);
  }
  rstd_of(own_sums, static_cast<float>(dim), p.eps, rstd);
  const int own = row_of_lane<kRows>(blockDim.x);
  const bool first_of_row = block_in_row == 0 && threadIdx.x == lane_of_row<kRows>(own, blockDim.x);
  if (p.rstd != nullptr && first_of_row && first_row + own < p.rows)
    save_rstd(p.rstd, first_row + own, rstd);
  const Polynomial own_y(factors.factors, rstd);

  // Write the results.
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Polynomial y =
        kRows > 1 ? own_y.from(lane_of_row<kRows>(i, blockDim.x), blockDim.x) : own_y;
    SpreadStoring<T, kVectors, kAligned> out(static_cast<T*>(p.out) + (first_row + i) * p.dim,
                                             first_column, step, write_dim_of(i));
    if constexpr (kMul) mul_loading[i].join();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      Vector<T, N> mul_packed{};
      if constexpr (kMul) mul_packed = mul_loading[i].joined(j);
      float values[N];
      results<kForm>(x_packed[i][j], mul_packed, y, factors.is_padding, cuts, p.hidden_clamp,
                     values);
      out.put(j, Vector<T, N>::from_floats(values));
    }
    out.end();
  }
}

// Many long rows without mul (norm/poly_norm_policy.h). The next rows of a persistent block are
// copied into shared memory (norm/row_stages.h) while it works on one, which is read there twice.
template <typename T, bool kClusters>
__global__ void __launch_bounds__(kPolyNormLongThreads, bounded_blocks(kPolyNormLongThreads, 2))
    poly_norm_forward_staged_kernel(const PolyNormForward p, const RowTensors tensors,
                                    const int blocks_in_cluster, const int stages) {
  if constexpr (!kCompilesClusters) return;
  constexpr int N = 16 / sizeof(T), kVectors = kPolyNormVectors;
  const int cluster = kClusters ? blocks_in_cluster : 1;
  extern __shared__ __align__(128) uint4 dynamic_memory[];
  __shared__ RowSumScratch<3> scratch[2];
  const int dim = static_cast<int>(p.dim), step = blockDim.x * N;
  const int block_in_row = cluster > 1 ? cluster_rank() : 0;
  const int first_column = block_in_row * kVectors * step + threadIdx.x * N;
  const int row_step = gridDim.x / cluster;
  int64_t row = blockIdx.x / cluster;

  row_sum_start(cluster, scratch);
  const Factors factors = load_factors<T>(p, 0);
  BulkStages<T, T, kVectors, 1, 0> staged(shared_in_register(dynamic_memory), tensors,
                                          RowColumns(dim, first_column, N, kVectors), row, stages);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages && row + i * row_step < p.rows; ++i)
      staged.start_row(row + i * row_step, i);
  }
  row_sum_end(cluster);

  int stage = 0, round = 0, turn = 0;
#pragma unroll 1
  for (; row < p.rows; row += row_step) {
    float sums[3] = {}, rstd[3];
    staged.wait(round);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float values[N];
      staged.template read<T, 0>(j).to_floats(values);
      add_moments(values, sums);
    }
    row_sum<false>(sums, cluster, scratch, turn);
    // The sum had a barrier: all threads of the block are done with the row before this one.
    if (threadIdx.x == 0 && turn > 0 && row + (stages - 1) * row_step < p.rows)
      staged.start_row(row + (stages - 1) * row_step, stage == 0 ? stages - 1 : -1);
    rstd_of(sums, static_cast<float>(dim), p.eps, rstd);
    if (p.rstd != nullptr && block_in_row == 0 && threadIdx.x == 0) save_rstd(p.rstd, row, rstd);
    const Polynomial y(factors, rstd);
    SpreadStoring<T, kVectors, true> out(static_cast<T*>(p.out) + row * p.dim, first_column, step,
                                         dim);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float values[N];
      results<Form::plain>(staged.template read<T, 0>(j), Vector<T, N>{}, y, false, false, 0.0f,
                           values);
      out.put(j, Vector<T, N>::from_floats(values));
    }
    const bool last = ++stage == stages;
    staged.advance(last ? 1 - stages : 1);
    if (last) stage = 0, round ^= 1;
    ++turn;
  }
}

// Rows of any length and alignment, read twice: the second time mostly from cache. A block has
// blockDim.y rows.
template <typename T, Form kForm>
__global__ void __launch_bounds__(kPolyNormLongThreads)
    poly_norm_forward_streamed_kernel(const PolyNormForward p) {
  constexpr bool kAligned = false;
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<3> scratch[1];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* mul = static_cast<const T*>(p.mul) + row * p.mul_stride;
  T* out = static_cast<T*>(p.out) + row * p.dim;
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;
  const bool cuts = clamps<kForm>(p);
  // Rows past the end are empty.
  const int dim_to_read = row < rows_to_read<kForm>(p) ? dim : 0;
  const int dim_to_write = row < p.rows ? dim : 0;

  RowFactors<T, kForm> factors;
  factors.load_common(p);
  factors.load_of_row(p, row);

  using Batch = BatchLoading<T, N, kPolyNormVectors>;
  using MulBatch = BatchLoading<T, N, kPolyNormVectors, has_mul(kForm)>;
  float sums[3] = {};
#pragma unroll 1
  for (int start = 0; start < dim; start += kPolyNormVectors * step) {
    const Batch x_batch(x, start + threadIdx.x * N, step, dim_to_read);
#pragma unroll
    for (int b = 0; b < kPolyNormVectors; ++b) {
      float values[N];
      cut_floats<kForm>(x_batch.finish(b), cuts, p.hidden_clamp, values);
      add_moments(values, sums);
    }
  }
  row_sum<false>(sums, 1, scratch, 0);
  float rstd[3];
  rstd_of(sums, static_cast<float>(dim), p.eps, rstd);
  if (p.rstd != nullptr && threadIdx.x == 0 && row < p.rows) save_rstd(p.rstd, row, rstd);
  const Polynomial y(factors.factors, rstd);

  // NOTE: all lanes of a warp store together.
#pragma unroll 1
  for (int start = 0; start < dim; start += kPolyNormVectors * step) {
    const int first_column = start + threadIdx.x * N;
    const Batch x_batch(x, first_column, step, dim_to_read);
    const MulBatch mul_batch(mul, first_column, step, dim_to_read);
#pragma unroll
    for (int b = 0; b < kPolyNormVectors; ++b) {
      const int column = first_column + b * step;
      float values[N];
      results<kForm>(x_batch.finish(b), mul_batch.finish(b), y, factors.is_padding, cuts,
                     p.hidden_clamp, values);
      store_vector<kAligned>(Vector<T, N>::from_floats(values), out, column, dim_to_write);
    }
  }
}

}  // namespace

namespace gpu {

const char* poly_norm_forward(const PolyNormForward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const PolyNormForwardPolicy policy = poly_norm_forward_policy(device_info(device), p);
  const RowPolicy& row = policy.row;
  return message_of(dispatch(p, [&](auto tag, auto form) {
    using T = typename decltype(tag)::type;
    constexpr Form kForm = decltype(form)::value;
    const dim3 grid(policy.groups * row.cluster);
    const dim3 block(row.threads_per_row, row.rows_per_block);
    if constexpr (kForm == Form::plain && sizeof(T) == 2) {
      if (policy.stages > 0) {
        RowTensors tensors{};
        tensors.add(p.x, p.x_stride);
        return with_bool(row.cluster > 1, [&](auto clusters) {
          return gpu_launch(&poly_norm_forward_staged_kernel<T, clusters>, grid, block,
                            policy.shared_bytes, row.cluster, stream, p, tensors, row.cluster,
                            policy.stages);
        });
      }
    }
    const bool aligned = is_aligned(p);
    if (is_streamed(row, aligned)) {
      return gpu_launch(&poly_norm_forward_streamed_kernel<T, kForm>,
                        dim3(ceil_div(p.rows, row.rows_per_block)), block, 0, 1, stream, p);
    }
    return with_row_kernel<kForm>(
        row, row.cluster > 1, aligned, [&](auto vectors, auto rows, auto is_long, auto is_aligned) {
          return gpu_launch(&poly_norm_forward_kernel<T, vectors, rows, kForm, is_long, is_aligned>,
                            grid, block, 0, row.cluster, stream, p, row.cluster);
        });
  }));
}

}  // namespace gpu
}  // namespace fuselage
