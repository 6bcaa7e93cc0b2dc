// The backward of the poly_norm operators. How both directions go about it: norm/poly_norm.cu.
#include "norm/poly_norm.h"

#include "norm/poly_norm_launch.h"
#include "norm/row_stages.h"

namespace fuselage {
namespace {

// One vector of each input, as floats: the gradient of the product y * mul, x, and mul.
template <Form kForm, int N>
struct Inputs {
  float grad[N], x[N], mul[N];

  template <typename T>
  __device__ __forceinline__ Inputs(const Vector<T, N>& grad_out, const Vector<T, N>& x_packed,
                                    const Vector<T, N>& mul_packed, const Polynomial& y,
                                    bool clamps, float limit) {
    grad_out.to_floats(grad);
    cut_floats<kForm>(x_packed, clamps, limit, x);
    if constexpr (has_mul(kForm)) cut_floats<kForm>(mul_packed, clamps, limit, mul);
    if constexpr (kForm == Form::grouped) {
      if (!clamps) return;
      float product[N];
#pragma unroll
      for (int k = 0; k < N; ++k) product[k] = y(x[k]) * mul[k];
      zero_clamped(grad, product, limit);
    }
  }
  // The gradient of y.
  __device__ __forceinline__ void multiply_grad() {
    if constexpr (has_mul(kForm)) {
#pragma unroll
      for (int k = 0; k < N; ++k) grad[k] *= mul[k];
    }
  }
};

// Where a thread's gradients of a row go, of which either may not be needed.
template <typename T, Form kForm, int kVectors, bool kAligned>
struct GradientStoring {
  SpreadStoring<T, kVectors, kAligned> x, mul;

  __device__ __forceinline__ GradientStoring(const PolyNormBackward& p, int64_t row, int column,
                                             int step, int dim)
      : x(of(p.grad_x, row * p.grad_x_stride), column, step, dim),
        mul(of(p.grad_mul, row * p.grad_mul_stride), column, step, dim) {}
  static __device__ __forceinline__ T* of(void* data, int64_t offset) {
    return data == nullptr ? nullptr : static_cast<T*>(data) + offset;
  }
  // One vector leaves at once: two gradients of it take registers.
  template <typename Storing, typename V>
  static __device__ __forceinline__ void put(Storing& storing, int j, const V& vector) {
    storing.put(j, vector);
    if constexpr (kVectors == 1) storing.end();
  }
  __device__ __forceinline__ void end() {
    if constexpr (kVectors > 1) {
      if (x.row != nullptr) x.end();
      if constexpr (has_mul(kForm)) {
        if (mul.row != nullptr) mul.end();
      }
    }
  }
};

// The gradients of vector j.
template <Form kForm, typename T, int N, typename Storing>
__device__ __forceinline__ void write_gradients(const Vector<T, N>& grad_out,
                                                const Vector<T, N>& x_packed,
                                                const Vector<T, N>& mul_packed, const Polynomial& y,
                                                const Derivative& derivative, bool padding,
                                                bool clamps, float limit, Storing& storing, int j) {
  Inputs<kForm, N> in(grad_out, x_packed, mul_packed, y, clamps, limit);
  if constexpr (has_mul(kForm)) {
    if (storing.mul.row != nullptr) {
      float values[N];
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = in.grad[k] * y(in.x[k]);
      if constexpr (kForm == Form::grouped) {
        float uncut[N];
        mul_packed.to_floats(uncut);
        if (clamps) zero_clamped(values, uncut, limit);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = padding ? 0.0f : values[k];
      }
      Storing::put(storing.mul, j, Vector<T, N>::from_floats(values));
    }
  }
  if (storing.x.row == nullptr) return;
  in.multiply_grad();
  float values[N];
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] = derivative.grad_x(in.grad[k], in.x[k]);
  if constexpr (kForm == Form::grouped) {
    float uncut[N];
    x_packed.to_floats(uncut);
    if (clamps) zero_clamped(values, uncut, limit);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = padding ? 0.0f : values[k];
  }
  Storing::put(storing.x, j, Vector<T, N>::from_floats(values));
}

__device__ __forceinline__ void load_rstd(const float* saved, int64_t row, float (&rstd)[3]) {
#pragma unroll
  for (int k = 0; k < 3; ++k) rstd[k] = saved[3 * row + k];
}

// The part of a row in the gradients of weight and bias.
__device__ __forceinline__ float4 weight_part(const float (&rstd)[3], const float* sums) {
  return make_float4(sums[0] * rstd[0], sums[1] * rstd[1], sums[2] * rstd[2], sums[3]);
}

__device__ __forceinline__ void add(float4& total, const float4& part) {
  total.x += part.x;
  total.y += part.y;
  total.z += part.z;
  total.w += part.w;
}

// That of another lane of the row.
__device__ __forceinline__ float4 from(const float4& values, int lane) {
  const int width = blockDim.x;
  return make_float4(shuffle_from(values.x, lane, width), shuffle_from(values.y, lane, width),
                     shuffle_from(values.z, lane, width), shuffle_from(values.w, lane, width));
}

// Leaves the sum of what the first threads of the block's rows have, in order, as the block's
// partial sum. `rows`: shared memory, one for each row.
__device__ __forceinline__ void leave_partial(const float4& total, float4* rows, float* partials,
                                              int index) {
  if (threadIdx.x == 0) rows[threadIdx.y] = total;
  __syncthreads();
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread >= kWarpSize) return;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int row = thread; row < static_cast<int>(blockDim.y); row += kWarpSize) add(sum, rows[row]);
  sum = make_float4(warp_sum(sum.x, kWarpSize), warp_sum(sum.y, kWarpSize),
                    warp_sum(sum.z, kWarpSize), warp_sum(sum.w, kWarpSize));
  if (thread == 0) reinterpret_cast<float4*>(partials)[index] = sum;
}

// Blocks that a multiprocessor has registers for. On an H200, bfloat16: (1048576, 64) takes 111 us
// with six and 125 with four, but with mul 242 and 178; (32768, 1024) 51 us with 80 registers a
// thread, and 55 with 64.
template <Form kForm>
constexpr int held_blocks(bool is_short, bool is_long, bool aligned) {
  constexpr bool kPlain = kForm == Form::plain;
  if (is_short) return kPlain ? 6 : 4;
  if (is_long) return kPlain && aligned ? 2 : 1;
  return kPlain ? 3 : 2;
}

// Grid: x over groups of blocks (a cluster, or one), which go round until there are no rows left.
// Block: (threads_per_row, rows_per_block). `blocks_in_cluster` counts with kLong alone.
//
// A thread has kVectors vectors of each of kRows rows.
template <typename T, int kVectors, int kRows, Form kForm, bool kLong, bool kAligned>
__global__ void __launch_bounds__(kRows > 1 ? kPolyNormShortThreads
                                  : kLong   ? kPolyNormLongThreads
                                            : kPolyNormThreads,
                                  held_blocks<kForm>(kRows > 1, kLong, kAligned))
    poly_norm_backward_kernel(const PolyNormBackward p, const int blocks_in_cluster) {
  constexpr int N = 16 / sizeof(T);
  constexpr bool kMul = has_mul(kForm);
  // Vectors of rows that start anywhere are shifted together, but of three inputs one by one: there
  // are no registers for more, and (16380, 4097) takes 518 us on an H200 so, not 479.
  constexpr int kTogether = kMul ? 1 : kVectors, kParts = kVectors / kTogether;
  const int cluster = kLong && kCompilesClusters ? blocks_in_cluster : 1;
  __shared__ RowSumScratch<4> scratch[2];
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;  // between a thread's vectors
  const int block_in_row = cluster > 1 ? cluster_rank() : 0;
  const int group = cluster > 1 ? blockIdx.x / cluster : blockIdx.x;
  const int first_column = block_in_row * kVectors * step + threadIdx.x * N;
  const int64_t rows_at_once = int64_t{blockDim.y} * kRows;
  const int64_t row_step = rows_at_once * (gridDim.x / cluster);
  const bool cuts = clamps<kForm>(p);
  const int64_t rows = rows_to_read<kForm>(p);

  row_sum_start(cluster, scratch);
  RowFactors<T, kForm> factors;
  factors.load_common(p);
  const int own = row_of_lane<kRows>(blockDim.x);
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  int turn = 0;
  for (int64_t block_row = group * rows_at_once; block_row < p.rows; block_row += row_step) {
    const int64_t first_row = block_row + int64_t{threadIdx.y} * kRows;
    // Rows past the end are empty.
    const auto dim_of = [&](int i) { return first_row + i < rows ? dim : 0; };
    const auto write_dim_of = [&](int i) {
      return kForm == Form::grouped ? (first_row + i < p.rows ? dim : 0) : dim_of(i);
    };

    // Of several rows, a thread looks after the sums of one.
    const int64_t own_row = first_row + own;
    float rstd[3];
    load_rstd(p.rstd, own_row < p.rows ? own_row : p.rows - 1, rstd);

    // Start to load everything.
    using Loading = SpreadLoading<T, kTogether, kAligned>;
    Loading grad_out_loading[kRows][kParts], x_loading[kRows][kParts],
        mul_loading[kMul ? kRows : 1][kParts];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const auto start = [&](auto& loading, const void* data, int64_t stride) {
          loading[j / kTogether].start(j % kTogether,
                                       static_cast<const T*>(data) + (first_row + i) * stride,
                                       first_column + j * step, dim_of(i));
        };
        start(grad_out_loading[i], p.grad_out, p.grad_out_stride);
        start(x_loading[i], p.x, p.x_stride);
        if constexpr (kMul) start(mul_loading[i], p.mul, p.mul_stride);
      }
    }
    factors.load_of_row(p, first_row);

    // The sums of each row.
    Vector<T, N> grad_packed[kRows][kVectors], x_packed[kRows][kVectors],
        mul_packed[kRows][kVectors];
    float sums[kRows][4] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int part = j / kTogether, k = j % kTogether;
        if (k == 0) {
          grad_out_loading[i][part].join();
          x_loading[i][part].join();
          if constexpr (kMul) mul_loading[i][part].join();
        }
        grad_packed[i][j] = grad_out_loading[i][part].joined(k);
        x_packed[i][j] = x_loading[i][part].joined(k);
        mul_packed[i][j] = Vector<T, N>{};
        if constexpr (kMul) mul_packed[i][j] = mul_loading[i][part].joined(k);
        Inputs<kForm, N> in(grad_packed[i][j], x_packed[i][j], mul_packed[i][j],
                            Polynomial(factors.factors, rstd), cuts, p.hidden_clamp);
        in.multiply_grad();
        add_products(in.grad, in.x, sums[i]);
      }
    }
    if (turn == 0) row_sum_end(cluster);
    float own_sums[4];
    if constexpr (kRows > 1) {
      warp_sums_of_rows(sums, own_sums, blockDim.x);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) own_sums[k] = sums[0][k];
      row_sum<false>(own_sums, cluster, scratch, turn);
    }
    const Polynomial own_y(factors.factors, rstd);
    const Derivative own_derivative(own_y, rstd, own_sums, static_cast<float>(dim));
    if (own_row < p.rows) {
      const float4 part = weight_part(rstd, own_sums);
      if constexpr (kForm == Form::grouped) {
        if (p.partials != nullptr && first_column == 0 && !factors.is_padding)
          reinterpret_cast<float4*>(p.partials)[own_row] = part;
      } else {
        add(total, part);
      }
    }

    // Write the gradients.
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first_row + i;
      const int lane = lane_of_row<kRows>(i, blockDim.x);
      const Polynomial y = kRows > 1 ? own_y.from(lane, blockDim.x) : own_y;
      const Derivative derivative =
          kRows > 1 ? own_derivative.from(y, lane, blockDim.x) : own_derivative;
#pragma unroll
      for (int j = 0; j < kVectors; j += kTogether) {
        GradientStoring<T, kForm, kTogether, kAligned> storing(p, row, first_column + j * step,
                                                               step, write_dim_of(i));
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          write_gradients<kForm>(grad_packed[i][j + k], x_packed[i][j + k], mul_packed[i][j + k], y,
                                 derivative, factors.is_padding, cuts, p.hidden_clamp, storing, k);
        }
        storing.end();
      }
    }
    ++turn;
  }
  launch_dependents();
  if constexpr (kRows > 1) {
    float4 of_all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kRows; ++i) add(of_all, from(total, lane_of_row<kRows>(i, blockDim.x)));
    total = of_all;
  }
  if constexpr (kForm != Form::grouped) {
    __shared__ float4 of_rows[kPolyNormShortThreads];
    if (p.partials != nullptr && block_in_row == 0)
      leave_partial(total, of_rows, p.partials, group);
  }
}

// Many aligned rows of more than a warp, not of experts. The blocks of a persistent grid have rows
// side by side, each with a barrier of its own; the next ones are copied into shared memory
// (norm/row_stages.h) while these are worked on, which are read there twice.
template <typename T, Form kForm, bool kClusters>
__global__ void __launch_bounds__(kPolyNormLongThreads, 1)
    poly_norm_backward_staged_kernel(const PolyNormBackward p, const RowTensors tensors,
                                     const int blocks_in_cluster, const int stages) {
  if constexpr (!kCompilesClusters) return;
  constexpr int N = 16 / sizeof(T);
  constexpr bool kMul = has_mul(kForm);
  const int cluster = kClusters ? blocks_in_cluster : 1;
  extern __shared__ __align__(128) uint4 dynamic_memory[];
  __shared__ RowSumScratch<4> scratch[2];
  const int dim = static_cast<int>(p.dim), step = blockDim.x * N;
  const int block_in_row = cluster > 1 ? cluster_rank() : 0;
  const RowColumns columns(dim, block_in_row * kPolyNormVectors * step + threadIdx.x * N, step,
                           kPolyNormVectors);
  const int64_t group = blockIdx.x / cluster, groups = gridDim.x / cluster;
  const int64_t row_step = groups * blockDim.y;
  int64_t row = group + threadIdx.y * groups;

  row_sum_start(cluster, scratch);
  const Factors factors = load_factors<T>(p, 0);
  BulkStages<T, T, kPolyNormVectors, kMul ? 3 : 2, 0> staged(shared_in_register(dynamic_memory),
                                                             tensors, columns, row, stages);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages && row + i * row_step < p.rows; ++i)
      staged.start_row(row + i * row_step, i);
  }
  float next_rstd[3] = {};
  if (row < p.rows) load_rstd(p.rstd, row, next_rstd);
  row_sum_end(cluster);

  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  int stage = 0, round = 0, turn = 0;
#pragma unroll 1
  for (int64_t block_row = group; block_row < p.rows; block_row += row_step) {
    const bool inside = row < p.rows;
    float rstd[3] = {next_rstd[0], next_rstd[1], next_rstd[2]};
    if (row + row_step < p.rows) load_rstd(p.rstd, row + row_step, next_rstd);
    const Polynomial y(factors, rstd);
    const auto mul_at = [&](int j) {
      if constexpr (kMul) return staged.template read<T, 2>(j);
      return Vector<T, N>{};
    };

    float sums[4] = {};
    if (inside) {
      staged.wait(round);
#pragma unroll
      for (int j = 0; j < kPolyNormVectors; ++j) {
        Inputs<kForm, N> in(staged.template read<T, 0>(j), staged.template read<T, 1>(j), mul_at(j),
                            y, false, 0.0f);
        in.multiply_grad();
        add_products(in.grad, in.x, sums);
      }
    }
    row_sum<true>(sums, cluster, scratch, turn);
    // The sum had a barrier: all threads of the row are done with the row before it.
    if (threadIdx.x == 0 && turn > 0 && row + (stages - 1) * row_step < p.rows)
      staged.start_row(row + (stages - 1) * row_step, stage == 0 ? stages - 1 : -1);
    if (inside) {
      add(total, weight_part(rstd, sums));
      const Derivative derivative(y, rstd, sums, static_cast<float>(dim));
      GradientStoring<T, kForm, kPolyNormVectors, true> storing(p, row, columns.first_column, step,
                                                                dim);
#pragma unroll
      for (int j = 0; j < kPolyNormVectors; ++j) {
        write_gradients<kForm>(staged.template read<T, 0>(j), staged.template read<T, 1>(j),
                               mul_at(j), y, derivative, false, false, 0.0f, storing, j);
      }
    }
    const bool last = ++stage == stages;
    staged.advance(last ? 1 - stages : 1);
    if (last) stage = 0, round ^= 1;
    row += row_step;
    ++turn;
  }
  launch_dependents();
  if (p.partials != nullptr && block_in_row == 0) {
    __syncthreads();  // some rows may still be read
    leave_partial(total, reinterpret_cast<float4*>(dynamic_memory), p.partials, group);
  }
}

// Rows of any length and alignment, read twice. A block has blockDim.y rows at a time. Of shorter
// rows, threads have the columns, and one after the other the rows (`rows_per_thread` of them),
// that those of the kernel above have at once.
template <typename T, Form kForm>
__global__ void __launch_bounds__(kPolyNormLongThreads)
    poly_norm_backward_streamed_kernel(const PolyNormBackward p, const int rows_per_thread) {
  constexpr bool kAligned = false;
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<4> scratch[2];
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;
  const bool cuts = clamps<kForm>(p);
  const int64_t rows = rows_to_read<kForm>(p);
  const int64_t rows_at_once = int64_t{blockDim.y} * rows_per_thread;
  const int64_t row_step = rows_at_once * gridDim.x;

  RowFactors<T, kForm> factors;
  factors.load_common(p);
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  int turn = 0;
#pragma unroll 1
  for (int i = 0; i < rows_per_thread; ++i) {
    float4 total_of_row = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int64_t block_row = blockIdx.x * rows_at_once; block_row < p.rows; block_row += row_step) {
      const int64_t row = block_row + int64_t{threadIdx.y} * rows_per_thread + i;
      const T* grad_out = static_cast<const T*>(p.grad_out) + row * p.grad_out_stride;
      const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
      const T* mul = static_cast<const T*>(p.mul) + row * p.mul_stride;
      factors.load_of_row(p, row);
      // Rows past the end are empty.
      const int dim_to_read = row < rows ? dim : 0;
      const int dim_to_write = row < p.rows ? dim : 0;
      float rstd[3];
      load_rstd(p.rstd, row < p.rows ? row : p.rows - 1, rstd);
      const Polynomial y(factors.factors, rstd);
      constexpr int kBatch = 2;
      using Batch = BatchLoading<T, N, kBatch>;
      using MulBatch = BatchLoading<T, N, kBatch, has_mul(kForm)>;
      float sums[4] = {};
#pragma unroll 1
      for (int start = 0; start < dim; start += kBatch * step) {
        const int first_column = start + threadIdx.x * N;
        const Batch grad_out_batch(grad_out, first_column, step, dim_to_read);
        const Batch x_batch(x, first_column, step, dim_to_read);
        const MulBatch mul_batch(mul, first_column, step, dim_to_read);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          Inputs<kForm, N> in(grad_out_batch.finish(b), x_batch.finish(b), mul_batch.finish(b), y,
                              cuts, p.hidden_clamp);
          in.multiply_grad();
          add_products(in.grad, in.x, sums);
        }
      }
      row_sum<false>(sums, 1, scratch, turn);
      const Derivative derivative(y, rstd, sums, static_cast<float>(dim));
      if (row < p.rows) {
        const float4 part = weight_part(rstd, sums);
        if constexpr (kForm == Form::grouped) {
          if (p.partials != nullptr && threadIdx.x == 0 && !factors.is_padding)
            reinterpret_cast<float4*>(p.partials)[row] = part;
        } else {
          add(total_of_row, part);
        }
      }

      // NOTE: all lanes of a warp store together.
#pragma unroll 1
      for (int start = 0; start < dim; start += step) {
        const int column = start + threadIdx.x * N;
        Vector<T, N> mul_packed{};
        if constexpr (has_mul(kForm)) mul_packed = load<kAligned, N>(mul, column, dim_to_read);
        GradientStoring<T, kForm, 1, kAligned> storing(p, row, column, step, dim_to_write);
        write_gradients<kForm>(load<kAligned, N>(grad_out, column, dim_to_read),
                               load<kAligned, N>(x, column, dim_to_read), mul_packed, y, derivative,
                               factors.is_padding, cuts, p.hidden_clamp, storing, 0);
        storing.end();
      }
      ++turn;
    }
    add(total, total_of_row);
  }
  launch_dependents();
  if constexpr (kForm != Form::grouped) {
    __shared__ float4 of_rows[kPolyNormShortThreads];
    if (p.partials != nullptr) leave_partial(total, of_rows, p.partials, blockIdx.x);
  }
}

// The gradients of weight and bias: sums of the partial sums, in an order that depends on their
// number alone. Grid: one block an expert.
__global__ void __launch_bounds__(1024) poly_norm_backward_weight_kernel(const PolyNormBackward p) {
  __shared__ RowSumScratch<4> scratch[1];
  const int64_t expert = blockIdx.x;
  int64_t begin = 0, end = p.partial_count;
  if (p.offs != nullptr) {
    if (expert > 0) begin = max(p.offs[expert - 1], 0);
    end = min(static_cast<int64_t>(p.offs[expert]), end);
  }
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  grid_dependency_wait();
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
    add(sum, reinterpret_cast<const float4*>(p.partials)[i]);
  float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  row_sum<false>(sums, 1, scratch, 0);
  if (threadIdx.x != 0) return;
  if (p.grad_weight != nullptr) {
#pragma unroll
    for (int k = 0; k < 3; ++k) store_value(p.grad_weight, p.weight_dtype, 3 * expert + k, sums[k]);
  }
  if (p.grad_bias != nullptr) store_value(p.grad_bias, p.bias_dtype, expert, sums[3]);
}

}  // namespace

namespace gpu {

int64_t poly_norm_backward_partials(const PolyNormBackward& p, int device) {
  return p.offs != nullptr ? p.rows : poly_norm_backward_policy(device_info(device), p).groups;
}

const char* poly_norm_backward(const PolyNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const PolyNormBackwardPolicy policy = poly_norm_backward_policy(device_info(device), p);
  const RowPolicy& row = policy.row;
  const gpuError error = dispatch(p, [&](auto tag, auto form) {
    using T = typename decltype(tag)::type;
    constexpr Form kForm = decltype(form)::value;
    const dim3 grid(policy.groups * row.cluster);
    const dim3 block(row.threads_per_row, row.rows_per_block);
    if constexpr (kForm != Form::grouped) {
      if (policy.stages > 0) {
        RowTensors tensors{};
        tensors.add(p.grad_out, p.grad_out_stride);
        tensors.add(p.x, p.x_stride);
        if (p.mul != nullptr) tensors.add(p.mul, p.mul_stride);
        return with_bool(row.cluster > 1, [&](auto clusters) {
          return gpu_launch(&poly_norm_backward_staged_kernel<T, kForm, clusters>, grid, block,
                            policy.shared_bytes, row.cluster, stream, p, tensors, row.cluster,
                            policy.stages);
        });
      }
    }
    const bool aligned = is_aligned(p);
    if (is_streamed(row, aligned)) {
      return gpu_launch(&poly_norm_backward_streamed_kernel<T, kForm>, grid, block, 0, 1, stream, p,
                        row.rows_per_thread);
    }
    const bool is_long = row.cluster > 1 || row.threads_per_row > kPolyNormThreads;
    return with_row_kernel<kForm>(
        row, is_long, aligned, [&](auto vectors, auto rows, auto is_long, auto is_aligned) {
          return gpu_launch(
              &poly_norm_backward_kernel<T, vectors, rows, kForm, is_long, is_aligned>, grid, block,
              0, row.cluster, stream, p, row.cluster);
        });
  });
  if (error != gpuSuccess || p.partials == nullptr || p.experts == 0) return message_of(error);
  return message_of(gpu_launch_after(&poly_norm_backward_weight_kernel, dim3(p.experts),
                                     dim3(poly_norm_weight_threads(p)), stream, p));
}

}  // namespace gpu
}  // namespace fuselage
