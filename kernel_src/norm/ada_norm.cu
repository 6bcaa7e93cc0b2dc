// layer_norm, ada_layer_norm, ada_rms_norm and gate_residual_ada_norm on the GPU (formulas: norm/ada_norm.h).
//
// Forward: norm/row_forward.h, of the operator AdaNormOp.
//
// Backward: a persistent grid. Every block works on rows of one group, within which scale, shift and gate do not
// change, and keeps the sums of its columns in registers, while the next rows are copied into shared memory. It
// leaves a row of float32 partial sums of each kind; a second kernel adds them up, group by group and in order,
// and makes the gradients of scale, shift, gate, weight and bias of them.
//
// Rows too long for either (no clusters, or beyond what eight blocks hold) are streamed: read several times,
// mostly from cache.
//
// Which thread has which columns, and so the order of every sum, does not depend on alignment: with kAligned every
// row of every tensor starts and ends on a 16-byte boundary; without, vectors are put together from two aligned
// blocks (common/vector.h).
#include "norm/ada_norm.h"

#include <type_traits>

#include "common/dispatch.h"
#include "common/quotient.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "common/vector.h"
#include "norm/ada_norm_policy.h"
#include "norm/row_forward.h"

namespace fuselage {
namespace {

// ---- device helpers ----

// `dim` values of T or of float32, or none.
template <typename T>
struct Values {
  const void* data;
  bool is_float32;  // where T is not

  __device__ __forceinline__ Values(const void* data_, DType dtype)
      : data(data_),
        is_float32(data_ != nullptr && sizeof(T) != sizeof(float) && dtype == DType::float32) {}
  // Those of one row.
  __device__ __forceinline__ Values(const Modulation& m, int64_t row) : Values(m.data, m.dtype) {
    if (data == nullptr) return;
    const int64_t index = m.stride == 0 ? 0 : quotient(row, m.rows);
    const int64_t size = is_float32 ? sizeof(float) : sizeof(T);
    data = static_cast<const char*>(data) + index * m.stride * size;
  }

  // N of them from `column` on; those behind the last are zero.
  template <bool kAligned, int N>
  __device__ __forceinline__ void load_floats(int column, int dim, float (&values)[N]) const {
    if constexpr (!kAligned) {
      // Rows that are read again and again, from L1: by the element, which takes the fewest registers.
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = column + k < dim ? at(column + k) : 0.0f;
    } else if (is_float32) {
      load<true, N>(static_cast<const float*>(data), column, dim).to_floats(values);
    } else {
      load<true, N>(static_cast<const T*>(data), column, dim).to_floats(values);
    }
  }
  // As load_floats, by whole vectors. Of aligned rows all columns are inside.
  template <bool kAligned, int N>
  __device__ __forceinline__ void load_columns_of(int column, int dim, float (&values)[N]) const {
    if (is_float32) {
      load_columns<kAligned, N>(static_cast<const float*>(data), column, dim).to_floats(values);
    } else {
      load_columns<kAligned, N>(static_cast<const T*>(data), column, dim).to_floats(values);
    }
  }
  // Whether values of this type are kept as U: T or float.
  template <typename U>
  static __device__ __forceinline__ bool is(DType dtype) {
    return sizeof(T) == sizeof(float) || (dtype == DType::float32) == (sizeof(U) == sizeof(float));
  }
  __device__ __forceinline__ float at(int64_t i) const {
    return is_float32 ? static_cast<const float*>(data)[i]
                      : to_float(static_cast<const T*>(data)[i]);
  }
};

// (value - mean) * rstd. NOTE: not as value * rstd - mean * rstd, which one instruction would do: of a row whose
// elements are all alike that leaves the rounding of mean * rstd, which may be any number.
struct Normalise {
  float mean, rstd, offset;

  __device__ __forceinline__ Normalise(float mean_, float rest, float rstd_)
      : mean(mean_), rstd(rstd_), offset(-rest * rstd_) {}
  __device__ __forceinline__ float operator()(float value) const {
    return fmaf(value - mean, rstd, offset);
  }
};

// ---- forward ----

// Weight and bias take the place of scale and shift where there are neither.
struct AdaNormParams : AdaNormForward {
  float scale_offset;  // what is added to the scale
};

template <typename T, bool kResidual>
struct AdaNormOp {
  using Params = AdaNormParams;
  using In = T;
  using Out = T;
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kCentres = true;
  static constexpr bool kRest =
      sizeof(T) == sizeof(float);  // in half precision it is lost in the rounding
  static constexpr int kSums = 1, kShared = Moments<kRest>::kShared;
  static constexpr bool kWritesSum = kResidual;

  // Launch bounds: 64 registers; 80 with several inputs, or where rows are put together.
  static constexpr int threads(bool aligned, bool) {
    return aligned && !kResidual ? kForwardThreads : 768;
  }
  static constexpr int blocks(bool aligned, bool) { return aligned && !kResidual ? 2 : 1; }
  static constexpr int short_blocks(bool aligned) { return aligned && !kResidual ? 7 : 5; }
  static constexpr bool early(int vectors, bool aligned) { return aligned && vectors < 4; }

  static __device__ __forceinline__ bool centred(const Params& p) { return p.layer; }
  static __device__ __forceinline__ bool shares_columns(const Params& p) {
    return p.scale.stride == 0 && p.shift.stride == 0;
  }
  static __device__ __forceinline__ T* sum_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.new_residual) + row * p.dim;
  }
  static __device__ __forceinline__ T* out_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.out) + row * p.dim;
  }

  // s = x, or residual + gate * x, rounded. NOTE: product and sum are rounded to float32 on the way, as on the CPU.
  template <int kVectors, bool kAligned>
  struct Inputs {
    RowLoading<T, kVectors, kAligned> x, residual, gate;

    // Whether the gate is loaded with x: it is of its type, and aligned.
    static __device__ __forceinline__ bool gate_is_packed(const Values<T>& gate) {
      return kAligned && gate.data != nullptr && !gate.is_float32;
    }
    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
      if constexpr (kResidual) {
        residual.start(static_cast<const T*>(p.residual) + row * p.residual_stride + column, left);
        const Values<T> values(p.gate, row);
        if (gate_is_packed(values)) gate.start(static_cast<const T*>(values.data) + column, left);
      }
    }
    __device__ __forceinline__ Vector<T, N> finish(const Params& p, int64_t row, int column,
                                                   int j) const {
      if constexpr (!kResidual) return x.finish(j);
      float a[N], b[N], gates[N];
      x.finish(j).to_floats(a);
      residual.finish(j).to_floats(b);
      const Values<T> values(p.gate, row);
#pragma unroll
      for (int k = 0; k < N; ++k) gates[k] = 1.0f;
      if (gate_is_packed(values)) {
        gate.finish(j).to_floats(gates);
      } else if (values.data != nullptr) {
        const int dim = static_cast<int>(p.dim);
        values.template load_columns_of<kAligned>(kAligned ? min(column, dim - N) : column, dim,
                                                  gates);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = __fadd_rn(b[k], __fmul_rn(gates[k], a[k]));
      return Vector<T, N>::from_floats(a);
    }
  };

  static __device__ __forceinline__ void sums_of(const Vector<T, N>& s, float (&sums)[1]) {
    sums[0] = sum_of_squares(s);
  }
  // Keeps the compiler from keeping the floats of a vector, which take twice the registers, for its next use.
  static __device__ __forceinline__ void forget_floats(Vector<T, N>& v) {
#if !defined(USE_ROCM)
#pragma unroll
    for (int i = 0; i < Vector<T, N>::kWords; ++i) asm volatile("" : "+r"(v.words[i]));
#endif
  }

  // NOTE: normalised as (value - mean) * rstd, and not as value * rstd - mean * rstd, which one instruction would do: of
  // a row whose elements are all alike that leaves the rounding of mean * rstd, which may be any number.
  struct Stats {
    float mean, rest, rstd;

    __device__ __forceinline__ Stats(float mean_, float rest_, float rstd_)
        : mean(mean_), rest(rest_), rstd(rstd_) {}
    __device__ __forceinline__ Stats(const Params& p, const float (&squares)[1])
        : mean(0.0f),
          rest(0.0f),
          rstd(reciprocal_sqrt(squares[0] / static_cast<float>(static_cast<int>(p.dim)) + p.eps)) {}
    __device__ __forceinline__ Stats(const Params& p, const Moments<kRest>& moments) {
      const float dim = static_cast<float>(static_cast<int>(p.dim));
      mean = moments.sum;
      rest = kRest ? mean_of(moments.rest, dim) : 0.0f;
      float variance = mean_of(moments.squares, dim) - rest * rest;
      variance = variance < 0.0f ? 0.0f : variance;  // and a NaN stays one
      rstd = reciprocal_sqrt(variance + p.eps);
    }
    __device__ __forceinline__ void save(const Params& p, int64_t row) const {
      if (p.statistics == nullptr) return;
      if (p.layer) {
        reinterpret_cast<float2*>(p.statistics)[row] = make_float2(mean + rest, rstd);
      } else {
        p.statistics[row] = rstd;
      }
    }
    __device__ __forceinline__ Stats from(int lane, int width) const {
      return Stats(shuffle_from(mean, lane, width), kRest ? shuffle_from(rest, lane, width) : 0.0f,
                   shuffle_from(rstd, lane, width));
    }
    __device__ __forceinline__ void normalise(const Vector<T, N>& s, float (&values)[N]) const {
      s.to_floats(values);
      const float offset = kRest ? -rest * rstd : 0.0f;
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = fmaf(values[k] - mean, rstd, offset);
    }
  };

  // out = xhat * (1 + scale) + shift, or without the 1, where there are both, of type U, and
  // nothing else.
  template <typename U>
  struct Pair {
    Vector<U, N> scale, shift;
  };
  template <typename U, bool kOne>
  struct Columns {
    using Loaded = Pair<U>;
    static constexpr int kAhead = sizeof(U) == sizeof(T) ? 1 : 0;  // where their registers are few
    const U *scale, *shift;

    static __device__ __forceinline__ bool fits(const Params& p) {
      return p.weight.data == nullptr && p.bias.data == nullptr && p.scale.data != nullptr &&
             p.shift.data != nullptr && Values<T>::template is<U>(p.scale.dtype) &&
             Values<T>::template is<U>(p.shift.dtype);
    }
    __device__ __forceinline__ Columns(const Params& p, int64_t row)
        : scale(static_cast<const U*>(Values<T>(p.scale, row).data)),
          shift(static_cast<const U*>(Values<T>(p.shift, row).data)) {}
    // What is past the end is read as the last vector: cheaper than not to.
    __device__ __forceinline__ Loaded load(int column, int dim) const {
      const int inside = min(column, dim - N);
      return {Vector<U, N>::load(scale + inside), Vector<U, N>::load(shift + inside)};
    }
    __device__ __forceinline__ Vector<T, N> map(const Vector<T, N>& s, const Stats& stats,
                                                const Loaded& loaded) const {
      float values[N], factors[N], other[N];
      stats.normalise(s, values);
      loaded.scale.to_floats(factors);
      loaded.shift.to_floats(other);
#pragma unroll
      for (int k = 0; k < N; ++k)
        values[k] = fmaf(values[k], kOne ? 1.0f + factors[k] : factors[k], other[k]);
      return Vector<T, N>::from_floats(values);
    }
  };
  template <bool kAligned>
  using PackedColumns = Columns<T, true>;

  // out = (xhat * weight + bias) * (offset + scale) + shift, of any types, read where they are used.
  // NOTE: spelled out, so that every kernel rounds alike.
  template <bool kAligned>
  struct AnyColumns {
    struct Loaded {
      int column, dim;
    };
    static constexpr int kAhead = 0;
    Values<T> weight, bias, scale, shift;
    float offset;

    __device__ __forceinline__ AnyColumns(const Params& p, int64_t row)
        : weight(p.weight.data, p.weight.dtype),
          bias(p.bias.data, p.bias.dtype),
          scale(p.scale, row),
          shift(p.shift, row),
          offset(p.scale_offset) {}
    __device__ __forceinline__ Loaded load(int column, int dim) const {
      return {kAligned ? min(column, dim - N) : column, dim};
    }
    __device__ __forceinline__ Vector<T, N> map(const Vector<T, N>& s, const Stats& stats,
                                                const Loaded& at) const {
      float values[N], factors[N], other[N];
      const auto load_or_zero = [&](const Values<T>& from, float(&floats)[N]) {
        if (from.data == nullptr) {
          Vector<T, N>::zero().to_floats(floats);
        } else {
          from.template load_columns_of<kAligned>(at.column, at.dim, floats);
        }
      };
      stats.normalise(s, values);
      if (weight.data != nullptr) {
        load_or_zero(weight, other);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = __fmul_rn(values[k], other[k]);
      }
      if (bias.data != nullptr) {
        load_or_zero(bias, other);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = __fadd_rn(values[k], other[k]);
      }
      load_or_zero(scale, factors);
      load_or_zero(shift, other);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = fmaf(values[k], offset + factors[k], other[k]);
      return Vector<T, N>::from_floats(values);
    }
  };

  template <bool kAligned, typename F>
  static __device__ __forceinline__ void with_columns(const Params& p, F&& f) {
    if (kAligned && PackedColumns<kAligned>::fits(p)) {
      if (p.scale_offset == 0.0f) {
        f(ColumnsTag<Columns<T, false>>{});
      } else {
        f(ColumnsTag<Columns<T, true>>{});
      }
    } else if (kAligned && sizeof(T) != sizeof(float) && p.scale_offset != 0.0f &&
               Columns<float, true>::fits(p)) {
      f(ColumnsTag<Columns<float, true>>{});
    } else {
      f(ColumnsTag<AnyColumns<kAligned>>{});
    }
  }
};

// ---- backward ----

// Mean and rstd of a row.
__device__ __forceinline__ float2 load_statistics(const AdaNormBackward& p, int64_t row) {
  if (p.layer) return reinterpret_cast<const float2*>(p.statistics)[row];
  return make_float2(0.0f, p.statistics[row]);
}

// 1 + scale, and weight: of N columns.
template <bool kAligned, typename T, int N>
__device__ __forceinline__ void scale_factors(const Values<T>& scale, int column, int dim,
                                              float (&factors)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) factors[k] = 0.0f;
  if (scale.data != nullptr) scale.template load_floats<kAligned>(column, dim, factors);
#pragma unroll
  for (int k = 0; k < N; ++k) factors[k] += 1.0f;
}

template <bool kAligned, typename T, int N>
__device__ __forceinline__ void multiply_weight(const NormVector& weight, int column, int dim,
                                                float (&values)[N]) {
  if (weight.data == nullptr) return;
  float factors[N];
  Values<T>(weight.data, weight.dtype).template load_floats<kAligned>(column, dim, factors);
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] *= factors[k];
}

// Writes N columns of a row of [rows, dim] values of T or float32. All lanes of the warp call together.
template <bool kAligned, typename T, int N>
__device__ __forceinline__ void store_values(void* data, DType dtype, const float (&values)[N],
                                             int64_t row, int64_t dim, int column, bool inside) {
  const int columns = static_cast<int>(dim);
  if (sizeof(T) != sizeof(float) && dtype == DType::float32) {
    store<kAligned>(Vector<float, N>::from_floats(values), static_cast<float*>(data) + row * dim,
                    column, columns, inside);
  } else {
    store<kAligned>(Vector<T, N>::from_floats(values), static_cast<T*>(data) + row * dim, column,
                    columns, inside);
  }
}

// What N columns of a row add to the gradients, and their rows of them.
template <bool kAligned, typename T, int N>
__device__ __forceinline__ void write_row_gradients(const AdaNormBackward& p,
                                                    const float (&grad_out)[N],
                                                    const float (&xhat)[N],
                                                    const float (&scale_factor)[N], int64_t row,
                                                    int column, bool inside, float (&a)[N]) {
  // Every row has its own scale and shift.
  const int dim = static_cast<int>(p.dim);
#pragma unroll
  for (int k = 0; k < N; ++k) a[k] = grad_out[k] * scale_factor[k];
  if (p.grad_scale != nullptr) {
    float y[N];
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = xhat[k];
    multiply_weight<kAligned, T>(p.weight, column, dim, y);
    if (p.bias.data != nullptr) {
      float bias[N];
      Values<T>(p.bias.data, p.bias.dtype).template load_floats<kAligned>(column, dim, bias);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] += bias[k];
    }
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] *= grad_out[k];
    store_values<kAligned, T>(p.grad_scale, p.scale.dtype, y, row, p.dim, column, inside);
  }
  if (p.grad_shift != nullptr)
    store_values<kAligned, T>(p.grad_shift, p.shift_dtype, grad_out, row, p.dim, column, inside);
}

// grad_s goes to a row of grad_residual and, times the gate, to one of grad_x; either may be null.
template <bool kAligned, typename T, int N>
__device__ __forceinline__ void write_grad_s(float (&grad)[N], const Values<T>& gate,
                                             T* grad_residual, T* grad_x, int column, int dim,
                                             bool inside) {
  if (grad_residual != nullptr)
    store<kAligned>(Vector<T, N>::from_floats(grad), grad_residual, column, dim, inside);
  if (grad_x == nullptr) return;
  if (gate.data != nullptr) {
    float factors[N];
    gate.template load_floats<kAligned>(column, dim, factors);
#pragma unroll
    for (int k = 0; k < N; ++k) grad[k] *= factors[k];
  }
  store<kAligned>(Vector<T, N>::from_floats(grad), grad_x, column, dim, inside);
}

// A row of a [rows, dim] tensor, or null.
template <typename T>
__device__ __forceinline__ T* row_or_null(void* tensor, int64_t row, int64_t dim) {
  return tensor == nullptr ? nullptr : static_cast<T*>(tensor) + row * dim;
}

// A tensor of the gradient's inputs on its way through shared memory: the next of a thread's rows. A thread copies
// the vectors that it will use itself, so no barrier is needed. The address moves on with the rows: to work it out
// for each takes as many instructions as the row's gradient.
template <typename T>
struct RowsToCopy {
  const T* next;
  int64_t step;

  __device__ __forceinline__ RowsToCopy(const void* tensor, int64_t row, int64_t row_step,
                                        int64_t stride, int column)
      : next(static_cast<const T*>(tensor) + row * stride + column), step(row_step * stride) {}
};

// Grid: groups of blocks (times the cluster). Block: (threads_per_row, rows_per_block). kResidual:
// there may be grad_new_residual, grad_residual and a gate; kByRow: there may be a scale or a gate
// for every row.
//
// [stage][tensor][vector][thread] are the rows under way, and behind them what is multiplied with grad_out.
template <typename T, bool kResidual, bool kByRow, bool kAligned>
__global__ void __launch_bounds__(kAdaNormThreads, 1)
    ada_norm_backward_kernel(const AdaNormBackward p, const int cluster, const int stages) {
  constexpr int N = 16 / sizeof(T);
  constexpr int kVectors = kAdaNormColumns / N;
  using V = Vector<T, N>;
  // NOTE: off a 128-byte boundary the asynchronous copies take a fifth longer.
  extern __shared__ __align__(128) uint4 dynamic_memory[];
  __shared__ RowSumScratch<2> scratch[2];
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;  // between a thread's vectors
  const int block_in_row = cluster > 1 ? cluster_rank() : 0;
  const int first_column = block_in_row * kVectors * step + threadIdx.x * N;
  const auto column_of = [&](int j) { return first_column + j * step; };
  const int64_t part = blockIdx.x / cluster;  // of all partial sums
  const int64_t group = quotient(part, p.blocks_per_group);
  const int64_t begin = group * p.group_rows, end = begin + p.group_rows;
  const int64_t block_row = begin + (part - group * p.blocks_per_group) * blockDim.y;
  const int64_t first_row = block_row + threadIdx.y;
  const int64_t row_step = p.blocks_per_group * blockDim.y;
  // All rows of a block, and all blocks of a cluster, take the same number of turns; this row has rows in so many.
  const int64_t turns = quotient(end - block_row + row_step - 1, row_step);
  const int64_t turns_inside =
      first_row < end ? quotient(end - first_row + row_step - 1, row_step) : 0;
  const bool has_extra = kResidual && p.grad_new_residual != nullptr;
  const bool has_x = kResidual && p.x != nullptr;
  const bool needs_grad_s =
      p.grad_x != nullptr || (kResidual && (p.grad_residual != nullptr || p.grad_gate != nullptr));

  const int threads = blockDim.x * blockDim.y;
  const int stage_size = (2 + has_extra + has_x) * kVectors * threads;
  V* const memory = reinterpret_cast<V*>(dynamic_memory) + threadIdx.y * blockDim.x + threadIdx.x;
  const auto slot = [&](int stage, int tensor, int j) {
    return memory + stage * stage_size + (tensor * kVectors + j) * threads;
  };
  RowsToCopy<T> grad_outs(p.grad_out, first_row, row_step, p.grad_out_stride, first_column);
  RowsToCopy<T> ss(p.s, first_row, row_step, p.s_stride, first_column);
  RowsToCopy<T> extras(p.grad_new_residual, first_row, row_step, p.grad_new_residual_stride,
                       first_column);
  RowsToCopy<T> xs(p.x, first_row, row_step, p.x_stride, first_column);
  int64_t to_start = turns_inside;
  const auto copy_row = [&](RowsToCopy<T>& rows, int stage, int tensor, bool inside) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kAligned) {
        if (inside && column_of(j) < dim)
          V::load_async(slot(stage, tensor, j), rows.next + j * step);
      } else {
        *slot(stage, tensor, j) =
            load<false, N>(rows.next - first_column, column_of(j), inside ? dim : 0);
      }
    }
    rows.next += rows.step;
  };
  const auto start = [&](int stage) {
    const bool inside = to_start > 0;
    if (inside || !kAligned) {
      copy_row(grad_outs, stage, 0, inside);
      copy_row(ss, stage, 1, inside);
      if (has_extra) copy_row(extras, stage, 2, inside);
      if (has_x) copy_row(xs, stage, 2 + has_extra, inside);
    }
    --to_start;
    if constexpr (kAligned) async_copy_commit();
  };

  row_sum_start(cluster, scratch);
  if constexpr (kAligned) {
    // Columns behind the row's end are zero in every stage: nothing is copied there later.
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (column_of(j) < dim) continue;
      for (int i = 0; i < stages * (2 + has_extra + has_x); ++i) *slot(0, i, j) = V::zero();
    }
  }
  // What is multiplied with grad_out: weight * (1 + scale). A thread keeps it behind the stages: the sums of its
  // columns take the registers.
  static_assert(sizeof(V) == sizeof(float4), "a slot is a vector of either");
  float4* const factors = reinterpret_cast<float4*>(slot(stages, 0, 0));
  const auto load_factors = [&](int64_t row) {
    const Values<T> scale(p.scale, row);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float values[N];
      scale_factors<kAligned>(scale, column_of(j), dim, values);
      multiply_weight<kAligned, T>(p.weight, column_of(j), dim, values);
#pragma unroll
      for (int k = 0; k < N; k += 4)
        factors[(j * N + k) / 4 * threads] =
            make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
    }
  };
  // The factors first: behind the rows they would wait for all of them.
  load_factors(begin);
  for (int stage = 0; stage < stages - 1; ++stage) start(stage);
  float2 next_statistics = make_float2(0.0f, 0.0f);
  if (first_row < end) next_statistics = load_statistics(p, first_row);

  float of_a[kVectors][N], of_c[kVectors][N], of_gate[kResidual ? kVectors : 1][N];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      of_a[j][k] = of_c[j][k] = 0.0f;
      if constexpr (kResidual) of_gate[j][k] = 0.0f;
    }
  }

  row_sum_end(cluster);
  const Values<T> group_gate(p.gate, begin);
  T* grad_x = row_or_null<T>(p.grad_x, first_row, p.dim);
  T* grad_residual = row_or_null<T>(p.grad_residual, first_row, p.dim);
  int stage = 0;
#pragma unroll 1
  for (int64_t turn = 0; turn < turns; ++turn) {
    const bool row_inside = turn < turns_inside;
    const int row_dim = row_inside ? dim : 0;
    const int64_t row = first_row + turn * row_step;
    start(stage == 0 ? stages - 1 : stage - 1);
    if constexpr (kAligned) async_copy_wait(stages - 1);
    const float mean = row_inside ? next_statistics.x : 0.0f;
    const float rstd = row_inside ? next_statistics.y : 0.0f;
    if (turn + 1 < turns_inside) next_statistics = load_statistics(p, row + row_step);
    if (kByRow && p.scale_by_row && row_inside) load_factors(row);
    const Normalise normalised(mean, 0.0f, rstd);

    // The row's part of the sums of columns; g = grad_out * factor and xhat, which are kept; mean(g) and
    // mean(g * xhat). Behind the row's end grad_out is zero, and with it all that is added up.
    // NOTE: unaligned, all lanes of a warp store together; rows behind the last are zero.
    float g[kVectors][N], xhat[kVectors][N], sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (!row_inside && kAligned) continue;
      float grad_out[N], a[N];
      V::load_shared(slot(stage, 0, j)).to_floats(grad_out);
      V::load_shared(slot(stage, 1, j)).to_floats(xhat[j]);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        xhat[j][k] = normalised(xhat[j][k]);
        a[k] = grad_out[k];
      }
      if (kByRow && p.scale_by_row) {
        float scale_factor[N];
        scale_factors<kAligned>(Values<T>(p.scale, row_inside ? row : begin), column_of(j), dim,
                                scale_factor);
        write_row_gradients<kAligned, T>(p, grad_out, xhat[j], scale_factor, row, column_of(j),
                                         column_of(j) < row_dim, a);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) {
        // NOTE: where there is no row, its zeros have met the scale of another, which may be infinite.
        if (!row_inside) a[k] = 0.0f;
        of_a[j][k] += a[k];
        of_c[j][k] = fmaf(a[k], xhat[j][k], of_c[j][k]);
      }
#pragma unroll
      for (int k = 0; k < N; k += 4) {
        const float4 four = factors[(j * N + k) / 4 * threads];
        g[j][k] = grad_out[k] * four.x;
        g[j][k + 1] = grad_out[k + 1] * four.y;
        g[j][k + 2] = grad_out[k + 2] * four.z;
        g[j][k + 3] = grad_out[k + 3] * four.w;
      }
      float sum = 0.0f, dot = 0.0f;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sum += g[j][k];
        dot = fmaf(g[j][k], xhat[j][k], dot);
      }
      sums[0] += sum;
      sums[1] += dot;
    }

    if (needs_grad_s) {
      row_sum<true>(sums, cluster, scratch, static_cast<int>(turn));
      // grad_s = rstd * (g - mean(g) - xhat * mean(g * xhat))
      const float of_xhat = -rstd * (sums[1] / static_cast<float>(dim));
      const float constant = p.layer ? -rstd * (sums[0] / static_cast<float>(dim)) : 0.0f;
      Values<T> gate = group_gate;
      if (kByRow && p.gate_by_row && row_inside) gate = Values<T>(p.gate, row);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (!row_inside && kAligned) continue;
        const int column = column_of(j);
        const bool inside = column < row_dim;
        float grad[N];
#pragma unroll
        for (int k = 0; k < N; ++k)
          grad[k] = fmaf(g[j][k], rstd, fmaf(xhat[j][k], of_xhat, constant));
        if constexpr (kResidual) {
          float other[N];
          const auto read_other = [&](int tensor) {
            V::load_shared(slot(stage, tensor, j)).to_floats(other);
          };
          if (has_extra) {
            read_other(2);
#pragma unroll
            for (int k = 0; k < N; ++k) grad[k] += other[k];
          }
          if (has_x) {
            read_other(2 + has_extra);
            if (kByRow && p.gate_by_row) {
#pragma unroll
              for (int k = 0; k < N; ++k) other[k] *= grad[k];
              store_values<kAligned, T>(p.grad_gate, p.gate.dtype, other, row, p.dim, column,
                                        inside);
            } else if (row_inside) {
#pragma unroll
              for (int k = 0; k < N; ++k) of_gate[j][k] = fmaf(grad[k], other[k], of_gate[j][k]);
            }
          }
        }
        write_grad_s<kAligned>(grad, gate, kResidual ? grad_residual : nullptr, grad_x, column, dim,
                               inside);
      }
      if (grad_x != nullptr) grad_x += row_step * p.dim;
      if (kResidual && grad_residual != nullptr) grad_residual += row_step * p.dim;
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  let_kernel_after_start();
  if (p.partials == nullptr) return;

  // Add up the rows of the block, in order, and leave the block's sums: [row of the block][column].
  async_copy_wait(0);
  const int columns = kVectors * step;
  float* sums = reinterpret_cast<float*>(dynamic_memory);
  float* partial = p.partials + part * p.partial_rows * p.dim;
  const auto leave = [&](const float(&of_thread)[kVectors][N]) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      Vector<float, N>::from_floats(of_thread[j])
          .store(sums + threadIdx.y * columns + j * step + threadIdx.x * N);
    }
    __syncthreads();
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int columns_here = min(columns, dim - block_in_row * columns);
    for (int i = thread; i < columns_here; i += blockDim.x * blockDim.y) {
      float sum = 0.0f;
      for (int row = 0; row < static_cast<int>(blockDim.y); ++row) sum += sums[row * columns + i];
      partial[block_in_row * columns + i] = sum;
    }
    partial += p.dim;
  };
  if (p.sums_columns) {
    leave(of_a);
    leave(of_c);
  }
  if constexpr (kResidual) {
    if (p.sums_gate) leave(of_gate);
  }
}

// The gradients of rows of any length and alignment, one a block, read twice. mean(g) and mean(g * xhat) of each
// row are left behind the partial sums.
template <typename T>
__global__ void __launch_bounds__(kAdaNormThreads, 1)
    ada_norm_backward_streamed_kernel(const AdaNormBackward p, float2* means) {
  constexpr bool kAligned = false;
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<2> scratch[1];
  const int64_t row = blockIdx.x;
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;
  const T* grad_out_row = static_cast<const T*>(p.grad_out) + row * p.grad_out_stride;
  const T* s = static_cast<const T*>(p.s) + row * p.s_stride;
  const T* extra = static_cast<const T*>(p.grad_new_residual) + row * p.grad_new_residual_stride;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const float2 statistics = load_statistics(p, row);
  const Values<T> scale(p.scale, row), gate(p.gate, row);

  // grad_out, xhat, 1 + scale, and weight * (1 + scale).
  const auto read = [&](int column, float(&grad_out)[N], float(&xhat)[N], float(&scale_factor)[N],
                        float(&factors)[N]) {
    load<kAligned, N>(grad_out_row, column, dim).to_floats(grad_out);
    load<kAligned, N>(s, column, dim).to_floats(xhat);
    scale_factors<kAligned>(scale, column, dim, scale_factor);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      xhat[k] = (xhat[k] - statistics.x) * statistics.y;
      factors[k] = scale_factor[k];
    }
    multiply_weight<kAligned, T>(p.weight, column, dim, factors);
  };

  float sums[2] = {};
  for (int column = threadIdx.x * N; column < dim; column += step) {
    float grad_out[N], xhat[N], scale_factor[N], factors[N];
    read(column, grad_out, xhat, scale_factor, factors);
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float g = grad_out[k] * factors[k];
      sum += g;
      dot = fmaf(g, xhat[k], dot);
    }
    sums[0] += sum;
    sums[1] += dot;
  }
  row_sum<false>(sums, 1, scratch, 0);
  const float mean_g = p.layer ? sums[0] / static_cast<float>(dim) : 0.0f;
  const float mean_product = sums[1] / static_cast<float>(dim);
  if (means != nullptr && threadIdx.x == 0) means[row] = make_float2(mean_g, mean_product);

  for (int start = 0; start < dim; start += step) {
    const int column = start + threadIdx.x * N;
    const bool inside = column < dim;
    float grad_out[N], xhat[N], scale_factor[N], factors[N], a[N];
    read(column, grad_out, xhat, scale_factor, factors);
    if (p.scale_by_row)
      write_row_gradients<kAligned, T>(p, grad_out, xhat, scale_factor, row, column, inside, a);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float g = grad_out[k] * factors[k];
      grad_out[k] = statistics.y * ((g - mean_g) - xhat[k] * mean_product);
    }
    if (p.grad_new_residual != nullptr) {
      load<kAligned, N>(extra, column, dim).to_floats(a);
#pragma unroll
      for (int k = 0; k < N; ++k) grad_out[k] += a[k];
    }
    if (p.grad_gate != nullptr && p.gate_by_row) {
      load<kAligned, N>(x, column, dim).to_floats(a);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] *= grad_out[k];
      store_values<kAligned, T>(p.grad_gate, p.gate.dtype, a, row, p.dim, column, inside);
    }
    write_grad_s<kAligned>(grad_out, gate, row_or_null<T>(p.grad_residual, row, p.dim),
                           row_or_null<T>(p.grad_x, row, p.dim), column, dim, inside);
  }
}

// One value of T or float32, or `missing`.
template <typename T>
__device__ __forceinline__ float value_at(const Values<T>& values, int64_t i, float missing) {
  return values.data == nullptr ? missing : values.at(i);
}

// Partial sums of streamed rows. Grid: groups * blocks_per_group, times the blocks of columns; a thread has one
// column of an equal share of a group's rows.
constexpr int kAdaNormStreamedThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kAdaNormStreamedThreads)
    ada_norm_backward_streamed_sums_kernel(const AdaNormBackward p, const float2* means) {
  const uint32_t column_blocks = (static_cast<uint32_t>(p.dim) + blockDim.x - 1) / blockDim.x;
  const int64_t part = blockIdx.x / column_blocks;
  const int64_t column = int64_t{blockIdx.x % column_blocks} * blockDim.x + threadIdx.x;
  if (column >= p.dim) return;
  const int64_t group = quotient(part, p.blocks_per_group);
  const int64_t share = part - group * p.blocks_per_group;
  const int64_t begin = group * p.group_rows + p.group_rows * share / p.blocks_per_group;
  const int64_t end = group * p.group_rows + p.group_rows * (share + 1) / p.blocks_per_group;
  const bool columns = p.sums_columns, gate = p.sums_gate;
  const float weight = value_at(Values<T>(p.weight.data, p.weight.dtype), column, 1.0f);
  float of_a = 0.0f, of_c = 0.0f, of_gate = 0.0f;
#pragma unroll 4
  for (int64_t row = begin; row < end; ++row) {
    const float2 statistics = load_statistics(p, row);
    const auto element = [&](const void* tensor, int64_t stride) {
      return to_float(static_cast<const T*>(tensor)[row * stride + column]);
    };
    const float grad_out = element(p.grad_out, p.grad_out_stride);
    const float xhat = (element(p.s, p.s_stride) - statistics.x) * statistics.y;
    const float factor = 1.0f + value_at(Values<T>(p.scale, row), column, 0.0f);
    const float a = p.scale_by_row ? grad_out * factor : grad_out;
    of_a += a;
    of_c = fmaf(a, xhat, of_c);
    if (!gate) continue;
    const float2 mean = means[row];
    const float g = grad_out * factor * weight;
    float grad = statistics.y * ((g - mean.x) - xhat * mean.y);
    if (p.grad_new_residual != nullptr)
      grad += element(p.grad_new_residual, p.grad_new_residual_stride);
    of_gate = fmaf(grad, element(p.x, p.x_stride), of_gate);
  }
  float* partial = p.partials + part * p.partial_rows * p.dim + column;
  if (columns) {
    partial[0] = of_a;
    partial[p.dim] = of_c;
  }
  if (gate) partial[columns ? 2 * p.dim : 0] = of_gate;
}

// The gradients that are sums, of the partial sums: A, C and G of each group, or of those what is summed.
template <typename T>
struct AdaNormGradients {
  static constexpr int kKinds = 3;
  static constexpr int kTotals = 5;  // A, C, G, and the gradients of weight and bias
  struct Columns {
    float weight, bias;
  };
  AdaNormBackward p;

  __device__ __forceinline__ Columns load(int64_t column, bool inside) const {
    if (!inside) return {1.0f, 0.0f};
    return {RuntimeValues<T>(p.weight.data, p.weight.dtype).at_or(column, 1.0f),
            RuntimeValues<T>(p.bias.data, p.bias.dtype).at_or(column, 0.0f)};
  }
  __device__ __forceinline__ void write_scale_and_shift(const Columns& columns, int64_t row,
                                                        int64_t column, float a, float c) const {
    const int64_t i = row * p.dim + column;
    if (p.grad_shift != nullptr) store_value(p.grad_shift, p.shift_dtype, i, a);
    if (p.grad_scale != nullptr)
      store_value(p.grad_scale, p.scale.dtype, i, c * columns.weight + a * columns.bias);
  }
  __device__ __forceinline__ void group(const Columns& columns, int64_t group, int64_t column,
                                        const float (&sums)[3], float (&totals)[5]) const {
    const int64_t row = group * p.group_rows;
    if (p.sums_columns) {
      float factor = 1.0f;
      if (!p.scale_by_row && p.scale.data != nullptr) {
        const RuntimeValues<T> scale(p.scale.data, p.scale.dtype);
        factor += scale.row_at(quotient(row, p.scale.rows) * p.scale.stride).at(column);
      }
      totals[0] += sums[0];
      totals[1] += sums[1];
      totals[3] = fmaf(factor, sums[1], totals[3]);
      totals[4] = fmaf(factor, sums[0], totals[4]);
      if (!p.scale_by_row && p.scale_rows < p.rows)
        write_scale_and_shift(columns, quotient(row, p.scale_rows), column, sums[0], sums[1]);
    }
    if (p.sums_gate) {
      const float of_gate = p.sums_columns ? sums[2] : sums[0];
      totals[2] += of_gate;
      if (p.gate_rows < p.rows)
        store_value(p.grad_gate, p.gate.dtype, quotient(row, p.gate_rows) * p.dim + column,
                    of_gate);
    }
  }
  // What belongs to all groups.
  __device__ __forceinline__ void all(const Columns& columns, int64_t column,
                                      const float (&totals)[5]) const {
    if (p.sums_columns && !p.scale_by_row && p.scale_rows == p.rows)
      write_scale_and_shift(columns, 0, column, totals[0], totals[1]);
    if (p.sums_gate && p.gate_rows == p.rows)
      store_value(p.grad_gate, p.gate.dtype, column, totals[2]);
    if (p.grad_weight != nullptr) store_value(p.grad_weight, p.weight.dtype, column, totals[3]);
    if (p.grad_bias != nullptr) store_value(p.grad_bias, p.bias_dtype, column, totals[4]);
  }
};

// ---- launchers ----

int tensors_read(const AdaNormBackward& p) {
  return 2 + (p.grad_new_residual != nullptr) + (p.x != nullptr);
}

// Whether there is more than grad_x of what was normalised.
bool has_residual(const AdaNormBackward& p) {
  return p.grad_new_residual != nullptr || p.grad_residual != nullptr || p.grad_gate != nullptr;
}

AdaNormBackwardPolicy policy_of(const AdaNormBackward& p, int device) {
  return ada_norm_backward_policy(device_info(device), is_aligned(p), tensors_read(p), p);
}

template <typename T>
gpuError launch_backward_streamed(const AdaNormBackward& p, const AdaNormBackwardPolicy& policy,
                                  gpuStream stream) {
  const int64_t parts = p.rows / p.group_rows * p.blocks_per_group;
  float2* means = nullptr;
  if (p.partials != nullptr)
    means = reinterpret_cast<float2*>(p.partials) + ceil_div(parts * p.partial_rows * p.dim, 2);
  gpuError error = gpuSuccess;
  // Sums of columns alone need nothing of it; those of the gate come with a gradient of the gate.
  if (p.grad_x != nullptr || p.grad_residual != nullptr || p.grad_gate != nullptr ||
      p.scale_by_row) {
    error = gpu_launch(&ada_norm_backward_streamed_kernel<T>, dim3(p.rows),
                       dim3(policy.row.threads_per_row), 0, 1, stream, p, means);
  }
  if (error != gpuSuccess || p.partials == nullptr) return error;
  return gpu_launch(&ada_norm_backward_streamed_sums_kernel<T>,
                    dim3(parts * ceil_div(p.dim, kAdaNormStreamedThreads)),
                    dim3(kAdaNormStreamedThreads), 0, 1, stream, p, means);
}

template <typename T>
gpuError launch_backward(const AdaNormBackward& p, const AdaNormBackwardPolicy& policy,
                         gpuStream stream) {
  if (policy.row.streamed) return launch_backward_streamed<T>(p, policy, stream);
  const dim3 grid(p.rows / p.group_rows * p.blocks_per_group * policy.row.cluster);
  const dim3 block(policy.row.threads_per_row, policy.row.rows_per_block);
  return with_bool(is_aligned(p), [&](auto aligned) {
    const auto run = [&](auto kernel) {
      return gpu_launch(kernel, grid, block, policy.shared_bytes, policy.row.cluster, stream, p,
                        policy.row.cluster, policy.stages);
    };
    if constexpr (aligned) {
      if (has_residual(p) && !p.scale_by_row && !p.gate_by_row)
        return run(&ada_norm_backward_kernel<T, true, false, true>);
    }
    if (has_residual(p) || p.scale_by_row || p.gate_by_row)
      return run(&ada_norm_backward_kernel<T, true, true, aligned>);
    return run(&ada_norm_backward_kernel<T, false, false, aligned>);
  });
}

template <typename T>
gpuError launch_backward_sums(const AdaNormBackward& p, gpuStream stream) {
  return reduce_partials(
      {p.partials, p.rows / p.group_rows, p.blocks_per_group, p.partial_rows, p.dim}, stream,
      AdaNormGradients<T>{p});
}

}  // namespace

namespace gpu {

const char* ada_norm_forward(const AdaNormForward& given, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  AdaNormParams p{given, 1.0f};
  if (p.scale.data == nullptr && p.shift.data == nullptr) {
    p.scale = {p.weight.data, 0, 1, p.weight.dtype};
    p.shift = {p.bias.data, 0, 1, p.bias.dtype};
    p.weight.data = p.bias.data = nullptr;
    if (p.scale.data != nullptr) p.scale_offset = 0.0f;
  }
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_bool(p.residual != nullptr, [&](auto residual) {
      return with_bool(is_aligned(p), [&](auto aligned) {
        const RowPolicy policy = ada_norm_forward_policy(device_info(device), aligned, p);
        return launch_row_forward<AdaNormOp<T, residual>, aligned>(p, policy, stream);
      });
    });
  }));
}

int64_t ada_norm_backward_workspace(AdaNormBackward& p, int device) {
  const AdaNormBackwardPolicy policy = policy_of(p, device);
  p.blocks_per_group = policy.blocks_per_group;
  const int kinds = p.partial_rows;
  if (kinds == 0) return 0;
  const int64_t sums = p.rows / p.group_rows * p.blocks_per_group * kinds * p.dim;
  // The means of streamed rows lie behind, as pairs.
  return policy.row.streamed ? 2 * (ceil_div(sums, 2) + p.rows) : sums;
}

const char* ada_norm_backward(const AdaNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const AdaNormBackwardPolicy policy = policy_of(p, device);
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const gpuError error = launch_backward<T>(p, policy, stream);
    if (error != gpuSuccess || p.partials == nullptr) return error;
    return launch_backward_sums<T>(p, stream);
  }));
}

}  // namespace gpu
}  // namespace fuselage
