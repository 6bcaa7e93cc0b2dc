// qk_norm_rotary on the GPU, forward and backward (formulas: rope/rotary.h).
//
// The threads of a row (up to a warp, or whole warps) hold a head; in the forward up to four heads of a
// token, all of q or all of k, that share cos, sin and weight. A head is read once, with 16-byte loads that
// are all issued before the first use; cos, sin and weight are there for four of its columns at a time. A thread
// has both elements of every pair, so the rotation needs no exchange between threads.
//
// The backward is a persistent grid, first over the heads of q, then over those of k. A thread keeps the
// weight gradient of its columns in registers; blocks leave one row of float32 partial sums each, which a
// second kernel adds up in order.
//
// With kAligned every half of a head starts and ends on a 16-byte boundary; without, halves may start
// anywhere (common/vector.h). Which thread has which columns, and so the order of every sum, is the same.
#include "common/dispatch.h"
#include "common/reduce.h"
#include "rope/rotary.h"
#include "rope/rotary_device.h"

namespace fuselage {
namespace {

// ---- device helpers ----

// Columns [kFirst, kFirst + kRotaryVector) of a pair of vectors become what `change` makes of their floats.
template <int kFirst, typename T, int N, typename F>
__device__ __forceinline__ void change_part(Vector<T, N>& first, Vector<T, N>& second, F&& change) {
  constexpr int M = kRotaryVector, kElements = WordTraits<T>::kElements;
  float x1[M], x2[M];
#pragma unroll
  for (int k = 0; k < M; k += kElements) {
    WordTraits<T>::unpack(first.words[(kFirst + k) / kElements], x1 + k);
    WordTraits<T>::unpack(second.words[(kFirst + k) / kElements], x2 + k);
  }
  change(x1, x2);
#pragma unroll
  for (int k = 0; k < M; k += kElements) {
    first.words[(kFirst + k) / kElements] = WordTraits<T>::pack(x1 + k);
    second.words[(kFirst + k) / kElements] = WordTraits<T>::pack(x2 + k);
  }
}

// weight_offset + weight in N columns of an item's vectors, from `column` on, or one.
template <bool kAligned, typename T, int N>
__device__ __forceinline__ void item_factors(const void* weight, DType weight_dtype, float offset,
                                             const Item& item, int column, float (&f1)[N],
                                             float (&f2)[N]) {
  const auto load_as = [&](auto zero) {
    using W = decltype(zero);
    const W* row = static_cast<const W*>(weight);
    if constexpr (kAligned) {
      // What is behind the end belongs to no element.
      using V = Vector<W, N>;
      const V first = V::load(row + item.first + min(column, item.first_size - N));
      const V second = V::load(row + (column < item.second_size ? item.second + column : 0));
      first.to_floats(f1);
      second.to_floats(f2);
    } else {
      unaligned_columns(row + item.first, column, item.first_size, f1);
      unaligned_columns(row + item.second, column, item.second_size, f2);
    }
  };
  if (weight == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) f1[i] = f2[i] = 1.0f;
    return;
  }
  if (weight_dtype == DType::float32) {
    load_as(float{});
  } else {
    load_as(T{});
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    f1[i] += offset;
    f2[i] += offset;
  }
}

template <int N>
__device__ __forceinline__ float sum_of_products(const float (&a)[N], const float (&b)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// `value`, computed again wherever this is called: what follows from it is not kept in registers over a loop.
__device__ __forceinline__ int opaque(int value) {
#if !defined(USE_ROCM)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// ---- forward ----

// Block: (threads_per_row, rows_per_block), a row being kHeads heads of a token's q or k.
template <typename T, int kHeads, Pairs kPairs, bool kAligned>
__global__ void __launch_bounds__(kQkNormThreads, !kAligned     ? 1
                                                  : kHeads == 1 ? 4
                                                                : 2)
    qk_norm_rotary_kernel(const QkNormRotary p, const HeadLayout layout, const int q_rows,
                          const Divisor rows_of_token, const Divisor tokens,
                          const float per_column) {
  constexpr int N = 16 / sizeof(T);
  constexpr int M = kRotaryVector;
  const bool interleaved = is_interleaved<kPairs>(p.shape);
  __shared__ RowSumScratch<kHeads> scratch[1];
  const Item item = item_of(layout, p.shape, threadIdx.x, N);
  const int64_t index = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int rows = static_cast<int>(rows_of_token.value);
  const int64_t token = quotient(index, rows_of_token);
  const bool inside = token < p.shape.batch * p.shape.tokens;
  const int row = static_cast<int>(index - token * rows);
  const Token at = token_of(tokens, inside ? token : 0);
  const bool is_q = row < q_rows;
  const QkNormRotarySide& side = is_q ? p.q : p.k;
  // Neighbouring rows have neighbouring heads.
  const int first_head = is_q ? row : row - q_rows;
  const int step = is_q ? q_rows : rows - q_rows;
  const auto exists = [&](int i) { return inside && first_head + i * step < side.heads; };
  const T* x = head_of<T>(side.x, at, first_head);
  T* out = head_of<T>(side.out, at, first_head);
  const int64_t x_step = step * side.x.head_stride, out_step = step * side.out.head_stride;
  const auto x_of = [&](int i) { return exists(i) ? x + i * x_step : x; };

  ItemLoading<T, N, kAligned> loading[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if constexpr (kAligned) {
      loading[i].start_inside(x_of(i), item);
    } else {
      loading[i].start(x_of(i), item, exists(i));
    }
  }
  const TableRow table = table_row(p.table, at);
  Rotation<M> rotation;
  float f1[M], f2[M];
  const auto load_factors = [&](int start) {
    if (item.rotated) {
      load_rotation<T, kAligned>(p.table, p.shape, table, item, item.column + start, interleaved,
                                 false, rotation);
    }
    item_factors<kAligned, T>(side.weight, side.weight_dtype, p.weight_offset, item,
                              item.column + start, f1, f2);
  };
  load_factors(0);
  Vector<T, N> first[kHeads], second[kHeads];
  float sums[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    loading[i].finish(x_of(i), item, exists(i), first[i], second[i]);
    float x1[N], x2[N];
    first[i].to_floats(x1);
    second[i].to_floats(x2);
    const float sum1 = sum_of_products(x1, x1), sum2 = sum_of_products(x2, x2);
    sums[i] = (item.column < item.first_size ? sum1 : 0.0f) +
              (item.column < item.second_size ? sum2 : 0.0f);
  }
  row_sum<false>(sums, 1, scratch, 0);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) sums[i] = reciprocal_sqrt(fmaf(sums[i], per_column, p.eps));

  const auto finish_columns = [&](auto start) {
    if constexpr (start > 0) load_factors(start);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      change_part<start>(first[i], second[i], [&](float(&x1)[M], float(&x2)[M]) {
#pragma unroll
        for (int k = 0; k < M; ++k) {
          x1[k] *= sums[i];
          x2[k] *= sums[i];
        }
        if (p.cast_before_weight) {
          round_all<T>(x1);
          round_all<T>(x2);
        }
#pragma unroll
        for (int k = 0; k < M; ++k) {
          x1[k] *= f1[k];
          x2[k] *= f2[k];
        }
        if (p.cast_before_weight) {
          round_all<T>(x1);
          round_all<T>(x2);
        }
        if (item.rotated) rotate(rotation, interleaved, x1, x2);
      });
    }
  };
  finish_columns(std::integral_constant<int, 0>{});
  if constexpr (M < N) finish_columns(std::integral_constant<int, M>{});
#pragma unroll
  for (int i = 0; i < kHeads; ++i)
    store_item<kAligned>(first[i], second[i], out + i * out_step, item, exists(i), layout.width);
}

// ---- backward ----

// The sum over a block's rows of their weight gradients, in order, as row blockIdx.x of the partials.
template <int N>
__device__ __forceinline__ void write_partials(const float (&g1)[N], const float (&g2)[N],
                                               const Item& item, int dim, float* sums,
                                               float* partials) {
  __syncthreads();  // the sums of the side before are read
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int column = item.column + k;
    if (column < item.first_size) sums[threadIdx.y * dim + item.first + column] = g1[k];
    if (column < item.second_size) sums[threadIdx.y * dim + item.second + column] = g2[k];
  }
  __syncthreads();
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int column = thread; column < dim; column += blockDim.x * blockDim.y) {
    // Four sums, and theirs: a long sum loses more.
    float four[4] = {};
    for (int row = 0; row < static_cast<int>(blockDim.y); row += 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        four[k] += row + k < static_cast<int>(blockDim.y) ? sums[(row + k) * dim + column] : 0.0f;
    }
    partials[int64_t{blockIdx.x} * dim + column] = (four[0] + four[1]) + (four[2] + four[3]);
  }
}

template <typename T, Pairs kPairs, bool kAligned>
__global__ void __launch_bounds__(kQkNormThreads, kAligned ? 2 : 1)
    qk_norm_rotary_backward_kernel(const QkNormRotaryBackward p, const HeadLayout layout,
                                   const Divisor tokens) {
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<2> scratch[2];
  extern __shared__ __align__(16) float weight_sums[];  // [rows of the block, dim]
  const bool interleaved = is_interleaved<kPairs>(p.shape);
  const int dim = static_cast<int>(p.shape.dim);
  int turn = 0;

#pragma unroll 1
  for (int s = 0; s < 2; ++s) {
    const int64_t side_heads = s == 0 ? p.q.heads : p.k.heads;
    const int heads = side_heads > 0 ? static_cast<int>(side_heads) : 1;
    float grad_weight1[N] = {}, grad_weight2[N] = {};
    // The head of this row, and how far it is to that of the next turn: no divisions of 64 bits on the way.
    const int64_t first = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const int distance = gridDim.x * blockDim.y;
    const int64_t first_token = quotient(first, heads);
    Token at = token_of(tokens, first_token);
    int head = static_cast<int>(first - first_token * heads);
    const int token_step = distance / heads, head_step = distance % heads;
    // All rows of a block take equally many turns: they meet in the sums.
    int64_t left = p.shape.batch * p.shape.tokens * side_heads - int64_t{blockIdx.x} * blockDim.y;
#pragma unroll 1
    for (; left > 0; left -= distance) {
      const Item item = item_of(layout, p.shape, opaque(threadIdx.x), N);
      const QkNormRotaryBackwardSide& side = s == 0 ? p.q : p.k;
      const bool inside = threadIdx.y < left;
      const T* x = inside ? head_of<T>(side.x, at, head) : nullptr;
      const T* grad_out = inside ? head_of<T>(side.grad_out, at, head) : nullptr;
      ItemLoading<T, N, kAligned> x_loading, g_loading;
      x_loading.start(x, item, inside);
      g_loading.start(grad_out, item, inside);
      Rotation<N> rotation;
      if (inside && item.rotated)
        load_rotation<T, kAligned>(p.table, p.shape, table_row(p.table, at), item, item.column,
                                   interleaved, true, rotation);

      // g, and the sums of x^2 and of g * f * x.
      float g1[N], g2[N];
      g_loading.finish(grad_out, item, inside, g1, g2);
      if (item.rotated) rotate(rotation, interleaved, g1, g2);
      // From the L1 cache in each turn: there are no registers to keep them.
      float f1[N], f2[N];
      item_factors<kAligned, T>(side.weight, side.weight_dtype, p.weight_offset, item, item.column,
                                f1, f2);
      float x1[N], x2[N];
      x_loading.finish(x, item, inside, x1, x2);
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sums[0] = fmaf(x1[k], x1[k], sums[0]);
        sums[0] = fmaf(x2[k], x2[k], sums[0]);
        sums[1] = fmaf(g1[k] * f1[k], x1[k], sums[1]);
        sums[1] = fmaf(g2[k] * f2[k], x2[k], sums[1]);
      }
      row_sum<false>(sums, 1, scratch, turn);
      turn ^= 1;

      const float rstd = reciprocal_sqrt(sums[0] / static_cast<float>(dim) + p.eps);
      const float x_factor = sums[1] / static_cast<float>(dim) * rstd * rstd * rstd;
      if (inside) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
          g1[k] *= rstd;
          g2[k] *= rstd;
          grad_weight1[k] = fmaf(g1[k], x1[k], grad_weight1[k]);
          grad_weight2[k] = fmaf(g2[k], x2[k], grad_weight2[k]);
          x1[k] = fmaf(g1[k], f1[k], -x1[k] * x_factor);
          x2[k] = fmaf(g2[k], f2[k], -x2[k] * x_factor);
        }
      }
      if (side.grad_x.data != nullptr) {
        T* grad_x = inside ? head_of<T>(side.grad_x, at, head) : nullptr;
        store_item<kAligned>(Vector<T, N>::from_floats(x1), Vector<T, N>::from_floats(x2), grad_x,
                             item, inside, layout.width);
      }
      head += head_step;
      at.token += token_step + (head >= heads ? 1 : 0);
      head -= head >= heads ? heads : 0;
      if (at.token >= p.shape.tokens) {
        const uint32_t tokens = static_cast<uint32_t>(p.shape.tokens);
        const int64_t batches =
            p.shape.tokens >> 31 == 0 ? static_cast<uint32_t>(at.token) / tokens : 1;
        at.token -= batches * p.shape.tokens;
        at.batch += batches;
      }
    }
    const Item item = item_of(layout, p.shape, threadIdx.x, N);
    const QkNormRotaryBackwardSide& side = s == 0 ? p.q : p.k;
    if (side.grad_weight != nullptr)
      write_partials(grad_weight1, grad_weight2, item, dim, weight_sums, side.partials);
  }
  let_kernel_after_start();
}

// grad_weight = sum of the partials over the blocks, in order. Block: (columns, shares of the partials);
// grid: (columns / columns a block, 2: q and k).
constexpr int kWeightColumns = 32, kWeightShares = 16;

__global__ void __launch_bounds__(kWeightColumns* kWeightShares)
    qk_norm_rotary_weight_kernel(const QkNormRotaryBackward p) {
  __shared__ float sums[kWeightShares][kWeightColumns];
  const QkNormRotaryBackwardSide& side = blockIdx.y == 0 ? p.q : p.k;
  wait_for_kernel_before();
  if (side.grad_weight == nullptr) return;
  const int64_t column = int64_t{blockIdx.x} * kWeightColumns + threadIdx.x;
  float sum = 0.0f;
  if (column < p.shape.dim) {
#pragma unroll 8
    for (int64_t i = threadIdx.y; i < p.partial_count; i += kWeightShares)
      sum += side.partials[i * p.shape.dim + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
#pragma unroll
  for (int others = kWeightShares / 2; others > 0; others /= 2) {
    __syncthreads();
    if (threadIdx.y < others) {
      sum += sums[threadIdx.y + others][threadIdx.x];
      sums[threadIdx.y][threadIdx.x] = sum;
    }
  }
  if (threadIdx.y > 0 || column >= p.shape.dim) return;
  switch (side.weight_dtype) {
    case DType::float32: static_cast<float*>(side.grad_weight)[column] = sum; break;
    case DType::float16:
      static_cast<float16*>(side.grad_weight)[column] = from_float<float16>(sum);
      break;
    case DType::bfloat16:
      static_cast<bfloat16*>(side.grad_weight)[column] = from_float<bfloat16>(sum);
      break;
  }
}

// ---- launchers ----

bool aligned_weight(const void* weight) { return reinterpret_cast<uintptr_t>(weight) % 16 == 0; }

bool is_aligned(const QkNormRotary& p) {
  const int vector = qk_norm_vector(p.shape);
  const auto side = [&](const QkNormRotarySide& s) {
    return s.heads == 0 ||
           (aligned_heads(s.x, p.shape.dtype, vector) &&
            aligned_heads(s.out, p.shape.dtype, vector) && aligned_weight(s.weight));
  };
  return aligned_shape(p.shape, vector) && aligned_table(p.table, kRotaryVector) && side(p.q) &&
         side(p.k);
}

bool is_aligned(const QkNormRotaryBackward& p) {
  const int vector = qk_norm_vector(p.shape);
  const auto side = [&](const QkNormRotaryBackwardSide& s) {
    return s.heads == 0 ||
           (aligned_heads(s.x, p.shape.dtype, vector) &&
            aligned_heads(s.grad_out, p.shape.dtype, vector) &&
            aligned_heads(s.grad_x, p.shape.dtype, vector) && aligned_weight(s.weight));
  };
  return aligned_shape(p.shape, vector) &&
         aligned_table(p.table, static_cast<int>(16 / dtype_size(p.table.dtype))) && side(p.q) &&
         side(p.k);
}

}  // namespace

namespace gpu {

int64_t qk_norm_rotary_max_dim(const RotaryShape& shape) { return qk_norm_max_dim(shape); }

const char* qk_norm_rotary(const QkNormRotary& p, int device, void* stream) {
  const QkNormPolicy policy = qk_norm_policy(p.shape);
  const int64_t tokens = p.shape.batch * p.shape.tokens;
  return dispatch_heads(p.shape, is_aligned(p), [&](auto tag, auto pairs, auto aligned) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel, int heads_per_row) {
      const int64_t q_rows = ceil_div(p.q.heads, heads_per_row);
      const int64_t rows = q_rows + ceil_div(p.k.heads, heads_per_row);
      return gpu_launch(kernel, dim3(ceil_div(tokens * rows, policy.rows_per_block)),
                        dim3(policy.threads_per_row, policy.rows_per_block), 0, 1,
                        static_cast<gpuStream>(stream), p, policy.layout, static_cast<int>(q_rows),
                        Divisor(rows), Divisor(p.shape.tokens),
                        1.0f / static_cast<float>(p.shape.dim));
    };
    if constexpr (aligned) {
      if (qk_norm_heads(device_info(device), p.shape, p.q.heads, p.k.heads) == 4)
        return run(&qk_norm_rotary_kernel<T, 4, pairs, true>, 4);
    }
    return run(&qk_norm_rotary_kernel<T, 1, pairs, aligned>, 1);
  });
}

int64_t qk_norm_rotary_backward_partials(const QkNormRotaryBackward& p, int device) {
  return qk_norm_backward_blocks(device_info(device), p.shape, p.q.heads, p.k.heads);
}

const char* qk_norm_rotary_backward(const QkNormRotaryBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const QkNormPolicy policy = qk_norm_policy(p.shape);
  const int blocks = qk_norm_backward_blocks(device_info(device), p.shape, p.q.heads, p.k.heads);
  const bool weights = p.q.grad_weight != nullptr || p.k.grad_weight != nullptr;
  const int shared_bytes =
      weights ? policy.rows_per_block * static_cast<int>(p.shape.dim * sizeof(float)) : 0;
  const char* error =
      dispatch_heads(p.shape, is_aligned(p), [&](auto tag, auto pairs, auto aligned) {
        using T = typename decltype(tag)::type;
        return gpu_launch(&qk_norm_rotary_backward_kernel<T, pairs, aligned>, dim3(blocks),
                          dim3(policy.threads_per_row, policy.rows_per_block), shared_bytes, 1,
                          stream, p, policy.layout, Divisor(p.shape.tokens));
      });
  if (error != nullptr || !weights) return error;
  return message_of(gpu_launch_after(&qk_norm_rotary_weight_kernel,
                                     dim3(ceil_div(p.shape.dim, kWeightColumns), 2),
                                     dim3(kWeightColumns, kWeightShares), stream, p));
}

}  // namespace gpu
}  // namespace fuselage
