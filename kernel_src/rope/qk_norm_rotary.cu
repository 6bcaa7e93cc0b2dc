// qk_norm_rotary on the GPU, forward and backward (formulas: rope/rotary.h).
//
// The threads of a row (up to a warp, or whole warps) hold heads of a token, all of q or all of k:
// several at once where they fit a warp, and one unit of heads after the other, for which cos, sin,
// weight and addresses are worked out once. Both directions are bound by instructions otherwise.
// Heads that fit a warp are in vectors of four elements and share the steps of their sums; longer
// ones are in vectors of 16 bytes, with cos, sin and weight for four of their columns at a time. A
// head is read once, and all loads are issued before the first use. A thread has both elements of
// every pair, so the rotation needs no exchange between threads.
//
// The backward is a persistent grid, first over the heads of q, then over those of k. A thread
// keeps the weight gradient of its columns in registers; blocks leave one row of float32 partial
// sums each, which a second kernel adds up in order.
//
// Every half of a head starts and ends on the boundary of a vector, or of a word, or anywhere
// (common/vector.h): kStarts. Which thread has which columns, and so the order of every sum, is the
// same.
#include "common/dispatch.h"
#include "common/ptx.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "rope/rotary.h"
#include "rope/rotary_device.h"

namespace fuselage {
namespace {

// ---- device helpers ----

// Columns [kFirst, kFirst + kRotaryVector) of a pair of vectors become what `change` makes of their
// floats.
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
template <Starts kStarts, typename T, int N>
__device__ __forceinline__ void item_factors(const void* weight, DType weight_dtype, float offset,
                                             const Item& item, int column, float (&f1)[N],
                                             float (&f2)[N]) {
  const auto load_as = [&](auto zero) {
    using W = decltype(zero);
    const W* row = static_cast<const W*>(weight);
    using V = Vector<W, N>;
    if constexpr (kStarts == Starts::words) {
      V::load_words(row + item.first, column, item.first_size).to_floats(f1);
      V::load_words(row + item.second, column, item.second_size).to_floats(f2);
    } else if constexpr (kStarts == Starts::vectors) {
      // What is past the end belongs to no element.
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

// `value`, computed again wherever this is called: what follows from it is not kept in registers
// over a loop.
__device__ __forceinline__ int opaque(int value) {
#if !defined(USE_ROCM)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// ---- forward ----

// Block: (threads_per_row, rows_per_block). A row is a unit of heads of a token, all of q or all of
// k, that share cos, sin and weight: kHeads at a time. With kHeads > 1 its threads are at most a
// warp.
template <typename T, int N, int kHeads, Pairs kPairs, Starts kStarts>
__global__ void __launch_bounds__(kQkNormThreads, kStarts == Starts::anywhere ? 1
                                                  : kHeads == 1               ? 4
                                                                              : kQkNormBlocks)
    qk_norm_rotary_kernel(const QkNormRotary p, const HeadLayout layout, const int unit_heads,
                          const int q_rows, const Divisor rows_of_token, const Divisor tokens,
                          const float per_column) {
  constexpr int M = kRotaryVector;
  const bool interleaved = is_interleaved<kPairs>(p.shape);
  const int width = blockDim.x;
  __shared__ RowSumScratch<1> scratch[1];
  const Item item = item_of(layout, p.shape, threadIdx.x, N);
  const int64_t index = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t token = quotient(index, rows_of_token);
  const bool inside = token < p.shape.batch * p.shape.tokens;
  const int row = static_cast<int>(index - token * static_cast<int>(rows_of_token.value));
  const Token at = token_of(tokens, inside ? token : 0);
  const bool is_q = row < q_rows;
  const QkNormRotarySide& side = is_q ? p.q : p.k;
  const int first_head = (is_q ? row : row - q_rows) * unit_heads;
  const int count = inside ? min(static_cast<int>(side.heads) - first_head, unit_heads) : 0;
  // Past the last head of the unit they stay at it.
  const T* x = head_of<T>(side.x, at, first_head);
  T* out = head_of<T>(side.out, at, first_head);
  const KnownRow table = known_row(p.table, at);
  Rotation<M> rotation;
  float f1[M], f2[M];
  const auto load_factors = [&](int start) {
    if (item.rotated) {
      load_rotation<T, kStarts>(p.table, p.shape, table, item, item.column + start, interleaved,
                                false, rotation);
    }
    item_factors<kStarts, T>(side.weight, side.weight_dtype, p.weight_offset, item,
                             item.column + start, f1, f2);
  };

  ItemLoading<T, N, kStarts> loading[kHeads];
  const T* heads[kHeads];
  const auto start_heads = [&](int done) {
    const auto exists = [&](int i) { return done + i < count; };
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      heads[i] = x;
      if constexpr (kStarts != Starts::anywhere) {
        loading[i].start_inside(x, item);
      } else {
        loading[i].start(x, item, exists(i));
      }
      x += exists(i + 1) ? side.x.head_stride : 0;
    }
  };
  start_heads(0);
  load_factors(0);
#pragma unroll 1
  for (int done = 0;;) {
    const auto exists = [&](int i) { return done + i < count; };
    Vector<T, N> first[kHeads], second[kHeads];
    float sums[kHeads][1];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      loading[i].finish(heads[i], item, exists(i), first[i], second[i]);
      float x1[N], x2[N];
      first[i].to_floats(x1);
      second[i].to_floats(x2);
      const float sum1 = sum_of_products(x1, x1), sum2 = sum_of_products(x2, x2);
      sums[i][0] = (item.column < item.first_size ? sum1 : 0.0f) +
                   (item.column < item.second_size ? sum2 : 0.0f);
    }
    float row_rstd[1];
    if constexpr (kHeads > 1) {
      warp_sums_of_rows(sums, row_rstd, width);
    } else {
      row_sum<false>(sums[0], 1, scratch, 0);
      row_rstd[0] = sums[0][0];
    }
    row_rstd[0] = reciprocal_sqrt(fmaf(row_rstd[0], per_column, p.eps));
    float rstd[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      rstd[i] = kHeads > 1 ? shuffle_from(row_rstd[0], lane_of_row<kHeads>(i, width), width)
                           : row_rstd[0];
    }

    const auto finish_columns = [&](auto start) {
      if constexpr (start > 0) load_factors(start);
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        change_part<start>(first[i], second[i], [&](float(&x1)[M], float(&x2)[M]) {
#pragma unroll
          for (int k = 0; k < M; ++k) {
            x1[k] *= rstd[i];
            x2[k] *= rstd[i];
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
    for (int i = 0; i < kHeads; ++i) {
      store_item<kStarts>(first[i], second[i], out, item, exists(i), layout.width);
      out += exists(i + 1) ? side.out.head_stride : 0;
    }
    done += kHeads;
    if (kHeads == 1 || done >= unit_heads) return;
    start_heads(done);
  }
}

// ---- backward ----

// The sum over a block's rows of their weight gradients, in order, as row blockIdx.x of the
// partials.
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

// Block: (threads_per_row, rows_per_block). Grid: any. A row takes one unit of a token's heads
// after the other, kHeads of them at a time: of q first, then of k. With kHeads > 1 a row is at
// most a warp.
template <typename T, int N, int kHeads, Pairs kPairs, Starts kStarts>
__global__ void __launch_bounds__(kQkNormThreads,
                                  kStarts == Starts::anywhere ? 1 : kQkNormBackwardBlocks)
    qk_norm_rotary_backward_kernel(const QkNormRotaryBackward p, const HeadLayout layout,
                                   const Divisor tokens, const int q_unit, const int k_unit,
                                   const float per_column) {
  __shared__ RowSumScratch<2> scratch[2];
  extern __shared__ __align__(16) float weight_sums[];  // [rows of the block, dim]
  const bool interleaved = is_interleaved<kPairs>(p.shape);
  const int width = blockDim.x;
  int turn = 0;

#pragma unroll 1
  for (int s = 0; s < 2; ++s) {
    const QkNormRotaryBackwardSide& side = s == 0 ? p.q : p.k;
    const int heads = static_cast<int>(side.heads), unit_heads = s == 0 ? q_unit : k_unit;
    const int units = heads > 0 ? (heads + unit_heads - 1) / unit_heads : 1;
    const Item item = item_of(layout, p.shape, threadIdx.x, N);
    float f1[N], f2[N], grad_weight1[N] = {}, grad_weight2[N] = {};
    if (heads > 0) {
      item_factors<kStarts, T>(side.weight, side.weight_dtype, p.weight_offset, item, item.column,
                               f1, f2);
    }
    // The unit of this row, and how far it is to that of the next turn: persistent blocks are few,
    // and so there are no divisions of 64 bits.
    const int index = blockIdx.x * blockDim.y + threadIdx.y, distance = gridDim.x * blockDim.y;
    Token at = token_of(tokens, index / units);
    int unit = index % units;
    const int token_step = distance / units, unit_step = distance % units;
    // All rows of a block take equally many turns: they meet in the sums.
    int64_t left =
        p.shape.batch * p.shape.tokens * (heads > 0 ? units : 0) - int64_t{blockIdx.x} * blockDim.y;
#pragma unroll 1
    for (; left > 0; left -= distance) {
      const bool inside = threadIdx.y < left;
      const Token here = inside ? at : Token{0, 0};
      const int first_head = inside ? unit * unit_heads : 0;
      const int count = inside ? min(heads - first_head, unit_heads) : 0;
      Rotation<N> rotation;
      // Past the last head of the unit they stay at it.
      const T* x = head_of<T>(side.x, here, first_head);
      const T* grad_out = head_of<T>(side.grad_out, here, first_head);
      T* grad_x = head_of<T>(side.grad_x, here, first_head);
#pragma unroll 1
      for (int done = 0; done < unit_heads; done += kHeads) {
        const auto exists = [&](int i) { return done + i < count; };
        ItemLoading<T, N, kStarts> x_loading[kHeads], g_loading[kHeads];
        const T* x_heads[kHeads];
        const T* g_heads[kHeads];
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
          x_heads[i] = x;
          g_heads[i] = grad_out;
          if constexpr (kStarts != Starts::anywhere) {
            x_loading[i].start_inside(x, item);
            g_loading[i].start_inside(grad_out, item);
          } else {
            x_loading[i].start(x, item, exists(i));
            g_loading[i].start(grad_out, item, exists(i));
          }
          x += exists(i + 1) ? side.x.head_stride : 0;
          grad_out += exists(i + 1) ? side.grad_out.head_stride : 0;
        }
        if (done == 0 && item.rotated) {
          load_rotation<T, kStarts>(p.table, p.shape, known_row(p.table, here),
                                    item_of(layout, p.shape, opaque(threadIdx.x), N), item.column,
                                    interleaved, true, rotation);
        }

        // g, and the sums of x^2 and of g * f * x.
        float g1[kHeads][N], g2[kHeads][N], sums[kHeads][2];
        Vector<T, N> packed1[kHeads], packed2[kHeads];
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
          x_loading[i].finish(x_heads[i], item, exists(i), packed1[i], packed2[i]);
          g_loading[i].finish(g_heads[i], item, exists(i), g1[i], g2[i]);
          if (item.rotated) rotate(rotation, interleaved, g1[i], g2[i]);
          float x1[N], x2[N], sums1[2] = {}, sums2[2] = {};
          packed1[i].to_floats(x1);
          packed2[i].to_floats(x2);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            sums1[0] = fmaf(x1[k], x1[k], sums1[0]);
            sums2[0] = fmaf(x2[k], x2[k], sums2[0]);
            sums1[1] = fmaf(g1[i][k] * f1[k], x1[k], sums1[1]);
            sums2[1] = fmaf(g2[i][k] * f2[k], x2[k], sums2[1]);
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            sums[i][j] = (item.column < item.first_size ? sums1[j] : 0.0f) +
                         (item.column < item.second_size ? sums2[j] : 0.0f);
          }
        }
        float row[2];
        if constexpr (kHeads > 1) {
          warp_sums_of_rows(sums, row, width);
        } else {
          row_sum<false>(sums[0], 1, scratch, turn);
          turn ^= 1;
          row[0] = sums[0][0];
          row[1] = sums[0][1];
        }
        row[0] = reciprocal_sqrt(fmaf(row[0], per_column, p.eps));
        // NOTE: in this order no factor leaves the range of float32 before the result does.
        row[1] = row[1] * per_column * row[0] * row[0] * row[0];

#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
          float rstd = row[0], x_factor = row[1];
          if constexpr (kHeads > 1) {
            rstd = shuffle_from(row[0], lane_of_row<kHeads>(i, width), width);
            x_factor = shuffle_from(row[1], lane_of_row<kHeads>(i, width), width);
          }
          float x1[N], x2[N];
          packed1[i].to_floats(x1);
          packed2[i].to_floats(x2);
          if (exists(i)) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
              g1[i][k] *= rstd;
              g2[i][k] *= rstd;
              grad_weight1[k] = fmaf(g1[i][k], x1[k], grad_weight1[k]);
              grad_weight2[k] = fmaf(g2[i][k], x2[k], grad_weight2[k]);
              x1[k] = fmaf(g1[i][k], f1[k], -x1[k] * x_factor);
              x2[k] = fmaf(g2[i][k], f2[k], -x2[k] * x_factor);
            }
          }
          if (side.grad_x.data != nullptr) {
            store_item<kStarts>(Vector<T, N>::from_floats(x1), Vector<T, N>::from_floats(x2),
                                grad_x, item, exists(i), layout.width);
            grad_x += exists(i + 1) ? side.grad_x.head_stride : 0;
          }
        }
      }
      unit += unit_step;
      at.token += token_step + (unit >= units ? 1 : 0);
      unit -= unit >= units ? units : 0;
      if (at.token >= p.shape.tokens) {
        const uint32_t tokens = static_cast<uint32_t>(p.shape.tokens);
        const int64_t batches =
            p.shape.tokens >> 31 == 0 ? static_cast<uint32_t>(at.token) / tokens : 1;
        at.token -= batches * p.shape.tokens;
        at.batch += batches;
      }
    }
    if (side.grad_weight != nullptr) {
      write_partials(grad_weight1, grad_weight2, item, static_cast<int>(p.shape.dim), weight_sums,
                     side.partials);
    }
  }
  launch_dependents();
}

// The gradients of the weights of q and k, or of the one that is needed.
struct WriteWeights {
  static constexpr int kKinds = 1, kTotals = 0;
  WriteColumns sides[2];

  __device__ __forceinline__ WriteColumns::Columns load(int64_t, bool) const { return {}; }
  __device__ __forceinline__ void group(const WriteColumns::Columns& columns, int64_t group,
                                        int64_t column, const float (&sums)[1],
                                        float (&totals)[1]) const {
    (group == 0 ? sides[0] : sides[1]).group(columns, 0, column, sums, totals);
  }
};

}  // namespace

// ---- launchers ----

namespace gpu {

int64_t qk_norm_rotary_max_dim(const RotaryShape& shape) { return qk_norm_max_dim(shape); }

const char* qk_norm_rotary(const QkNormRotary& call, int device, void* stream) {
  const QkNormRotary p = by_position(call, &QkNormRotarySide::x, &QkNormRotarySide::out);
  const QkNormForwardPolicy policy =
      qk_norm_forward_policy(device_info(device), p.shape, p.q.heads, p.k.heads);
  const int64_t tokens = p.shape.batch * p.shape.tokens;
  const int64_t q_rows = ceil_div(p.q.heads, policy.unit);
  const int64_t rows = q_rows + ceil_div(p.k.heads, policy.unit);
  const Starts starts = starts_of(p, policy.row.vector, kRotaryVector);
  return dispatch_heads(p.shape, starts, [&](auto tag, auto pairs, auto starts) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel) {
      return gpu_launch(kernel, dim3(ceil_div(tokens * rows, policy.row.rows_per_block)),
                        dim3(policy.row.threads_per_row, policy.row.rows_per_block), 0, 1,
                        static_cast<gpuStream>(stream), p, policy.row.layout, policy.unit,
                        static_cast<int>(q_rows), Divisor(rows), Divisor(p.shape.tokens),
                        1.0f / static_cast<float>(p.shape.dim));
    };
    constexpr int kFew = kRotaryVector, kMany = 16 / sizeof(T);
    if (policy.row.vector != kFew) return run(&qk_norm_rotary_kernel<T, kMany, 1, pairs, starts>);
    if (policy.heads_per_turn == 1) return run(&qk_norm_rotary_kernel<T, kFew, 1, pairs, starts>);
    return run(&qk_norm_rotary_kernel<T, kFew, kQkNormHeads, pairs, starts>);
  });
}

int64_t qk_norm_rotary_backward_partials(const QkNormRotaryBackward& p, int device) {
  return qk_norm_backward_policy(device_info(device), p.shape, p.q.heads, p.k.heads).blocks;
}

const char* qk_norm_rotary_backward(const QkNormRotaryBackward& call, int device,
                                    void* raw_stream) {
  using Side = QkNormRotaryBackwardSide;
  const QkNormRotaryBackward p = by_position(call, &Side::grad_out, &Side::x, &Side::grad_x);
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const QkNormBackwardPolicy policy =
      qk_norm_backward_policy(device_info(device), p.shape, p.q.heads, p.k.heads);
  const bool weights = p.q.grad_weight != nullptr || p.k.grad_weight != nullptr;
  const int shared_bytes = weights ? policy.weight_bytes : 0;
  const int table_vector = std::min(policy.row.vector, 16 / dtype_size(p.table.dtype));
  const Starts starts = starts_of(p, policy.row.vector, table_vector);
  const char* error = dispatch_heads(p.shape, starts, [&](auto tag, auto pairs, auto starts) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel) {
      return gpu_launch(kernel, dim3(policy.blocks),
                        dim3(policy.row.threads_per_row, policy.row.rows_per_block), shared_bytes,
                        1, stream, p, policy.row.layout, Divisor(p.shape.tokens), policy.q_unit,
                        policy.k_unit, 1.0f / static_cast<float>(p.shape.dim));
    };
    constexpr int kFew = kRotaryVector, kMany = 16 / sizeof(T);
    constexpr int kHeads = qk_norm_backward_heads(sizeof(T));
    if (policy.row.vector != kFew)
      return run(&qk_norm_rotary_backward_kernel<T, kMany, 1, pairs, starts>);
    if (policy.heads_per_turn == 1)
      return run(&qk_norm_rotary_backward_kernel<T, kFew, 1, pairs, starts>);
    return run(&qk_norm_rotary_backward_kernel<T, kFew, kHeads, pairs, starts>);
  });
  if (error != nullptr || !weights) return error;
  // The partial sums of k lie after those of q.
  const auto side = [&](const QkNormRotaryBackwardSide& of) {
    return WriteColumns{of.grad_weight, of.weight_dtype, p.shape.dim};
  };
  const bool both = p.q.grad_weight != nullptr && p.k.grad_weight != nullptr;
  const QkNormRotaryBackwardSide& first = p.q.grad_weight != nullptr ? p.q : p.k;
  return message_of(reduce_partials({first.partials, both ? 2 : 1, p.partial_count, 1, p.shape.dim},
                                    stream, WriteWeights{{side(first), side(p.k)}}));
}

}  // namespace gpu
}  // namespace fuselage
