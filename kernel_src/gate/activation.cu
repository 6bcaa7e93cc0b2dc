// The gate family on the GPU: formulas in gate/activation.h, activations in gate/activation_math.h.
//
// Every operator reads one to three [rows, dim] tensors and writes one or two. A thread has a few
// vectors of 16 bytes of each; all loads are issued before the first is used. Tensors without gaps
// between their rows come here as one long row. Halves of a packed tensor are two tensors with the
// row stride of the whole. Where gate and value take turns in one tensor, the forward reads two
// vectors of it for each it writes; the backward writes one for each half vector of grad_out,
// because two neighbouring ones would each be half of what a warp stores.
//
// The gradient of a bias is a sum over rows: blocks keep the sums of their columns in registers
// over a chunk of rows and leave one row of float32 partial sums each; a second kernel adds these
// up in order.
//
// Aligned: every row of every tensor starts on a 16-byte boundary; its last vector may be
// incomplete. Unaligned: rows may start anywhere (common/row_vectors.h).
//
// Common activations of aligned rows have kernels of their own. The others share one that is told
// the activation at run time: with kernels for all of them this file took twice as long to compile
// and had twice the size.
#include "gate/activation.h"

#include <algorithm>

#include "common/dispatch.h"
#include "common/quotient.h"
#include "common/reduce_partials.h"
#include "common/vector.h"
#include "gate/activation_device.h"
#include "gate/activation_policy.h"

namespace fuselage {
namespace {

// ---- kernels ----

// A [rows, dim] tensor, or null. Where gate and value take turns, x and its gradient are [rows, 2 *
// dim].
struct Operand {
  const void* data;
  int64_t stride;
};

// in_one: tensors whose rows are not aligned, but have no gaps. All are one long row, which is, and
// the bias comes again and again.
enum class Rows { aligned, unaligned, in_one };

// NOTE: what is needed first comes first. A kernel waits for each line of 64 bytes that it reads of
// its parameters, 0.03 to 0.05 us on an H200.
struct Elementwise {
  Operand x, y;
  Operand out;  // grad_x in the backward
  int64_t rows, dim;
  ActivationTile tile;
  Scalars scalars;
  Operand grad_out, out_y;  // in the backward; out_y is grad_y
  const void* bias;         // [dim]
  DType bias_dtype;
  Activation activation;    // of AnyAddFormula
  Divisor bias_columns{0};  // of Rows::in_one; 0 of others
  float* partials;          // [row blocks, dim] with grad_bias
  void* grad_bias;          // [dim]
};

// What a kernel does to every element. kInTurn: x and y take turns in one tensor.
template <class Formula_, bool kBackward_, bool kInTurn_>
struct Function {
  using Formula = Formula_;
  static constexpr bool kBackward = kBackward_;
  static constexpr bool kInTurn = kInTurn_;
  static constexpr bool kReadsX = !kBackward || Formula::kReadsInputs;
  static constexpr bool kReadsY = kReadsX && Formula::kHasY && !kInTurn;
  static constexpr bool kReadsBias = kReadsX && Formula::kHasBias;
  static constexpr bool kWritesY = kBackward && Formula::kHasY && !kInTurn;
  static constexpr int kLoads = kBackward + kReadsX + kReadsY;
  using Rare = Function<typename RareFormula<Formula>::type, kBackward, kInTurn>;
};

// Columns of one vector.
template <typename T, class Function>
constexpr int kColumns =
    16 / static_cast<int>(sizeof(T)) / (Function::kInTurn && Function::kBackward ? 2 : 1);

// The work of a thread on kVectors vectors of rows below row_end. `first_column` counts from
// block_column, where `dim` columns are left. With kSums, adds what it writes to `out` to `sums`.
template <typename T, class Function, int kVectors, Rows kRows, bool kSums, int N>
__device__ __forceinline__ void run_vectors(const Elementwise& p, int64_t first_row, int row_step,
                                            int64_t row_end, int64_t block_column, int first_column,
                                            int column_step, int dim, float (&sums)[N]) {
  using Formula = typename Function::Formula;
  constexpr bool kAligned = kRows != Rows::unaligned;
  constexpr bool kInTurn = Function::kInTurn;
  constexpr int kWidth = kInTurn ? 2 : 1;                          // elements of x a column
  constexpr int kParts = kInTurn && !Function::kBackward ? 2 : 1;  // vectors of x
  constexpr int kPart = kWidth * N / kParts;
  const auto row_of = [&](const Operand& operand, int width, int j) {
    return static_cast<const T*>(operand.data) + (first_row + j * row_step) * operand.stride +
           width * block_column;
  };
  const auto column_of = [&](int j) { return first_column + j * column_step; };
  // Rows past the end are empty.
  const auto dim_of = [&](int j) { return first_row + j * row_step < row_end ? dim : 0; };
  // The y of a gate is not there where only its own gradient is asked for.
  const auto y_dim_of = [&](int j) {
    return Function::kBackward && p.y.data == nullptr ? 0 : dim_of(j);
  };

  // Start to load everything this thread works on.
  constexpr bool kNeighbours = N * sizeof(T) == 16;
  OperandLoading<T, N, kAligned, kNeighbours, !kSums> grads[kVectors], ys[kVectors];
  OperandLoading<T, kPart, kAligned, kParts == 1, !kSums> xs[kVectors][kParts];
  // f(loading, row, column, columns of the row) for each of vector j.
  const auto each_operand = [&](int j, const auto& f) {
    if constexpr (Function::kBackward)
      f(grads[j], row_of(p.grad_out, 1, j), column_of(j), dim_of(j));
    if constexpr (Function::kReadsX) {
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        f(xs[j][i], row_of(p.x, kWidth, j), kWidth * column_of(j) + i * kPart, kWidth * dim_of(j));
    }
    if constexpr (Function::kReadsY) f(ys[j], row_of(p.y, 1, j), column_of(j), y_dim_of(j));
  };
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    each_operand(j, [](auto& loading, const T* row, int column, int columns) {
      loading.start(row, column, columns);
    });
  }

#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (is_end<kAligned, N>(column_of(j), dim_of(j))) {
      each_operand(j, [](auto& loading, const T* row, int column, int columns) {
        loading.load_end(row, column, columns);
      });
    }
    float grad_out[N], x[N] = {}, y[N] = {}, out[kWidth * N], out_y[N];
    if constexpr (Function::kBackward)
      grads[j].finish(row_of(p.grad_out, 1, j), column_of(j), dim_of(j)).to_floats(grad_out);
    if constexpr (Function::kReadsX) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        float part[kPart];
        xs[j][i]
            .finish(row_of(p.x, kWidth, j), kWidth * column_of(j) + i * kPart, kWidth * dim_of(j))
            .to_floats(part);
#pragma unroll
        for (int k = 0; k < kPart; ++k) {
          const int column = (i * kPart + k) / kWidth;
          (k % kWidth == 0 ? x : y)[column] = part[k];
        }
      }
    }
    if constexpr (Function::kReadsY)
      ys[j].finish(row_of(p.y, 1, j), column_of(j), y_dim_of(j)).to_floats(y);
    if (Function::kReadsBias && p.bias != nullptr) {
      const auto add = [&](auto* bias) {
        if constexpr (kRows == Rows::in_one) {
          const int64_t column = block_column + column_of(j);
          const int64_t columns = p.bias_columns.value;
          const int64_t start = column - quotient(column, p.bias_columns) * columns;
          add_repeated_bias(bias, static_cast<int>(start), static_cast<int>(columns), x);
        } else {
          add_bias<kAligned, !kSums>(bias + block_column, column_of(j), dim, x);
        }
      };
      if (sizeof(T) == sizeof(float) || p.bias_dtype == DType::float32) {
        add(static_cast<const float*>(p.bias));
      } else {
        add(static_cast<const T*>(p.bias));
      }
    }

    if constexpr (kIsAny<Formula>) {
      using Math = typename Formula::Math;
      Elements<N> grad, sum;
#pragma unroll
      for (int k = 0; k < N; ++k) sum.of[k] = Formula::Sum::forward(x[k], y[k], p.scalars);
      if constexpr (Function::kBackward) {
#pragma unroll
        for (int k = 0; k < N; ++k) grad.of[k] = grad_out[k];
        sum = gradient_any<Math>(p.activation, grad, sum);
      } else {
        sum = activate_any<Math>(p.activation, sum);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) {
        out[k] = sum.of[k];
        if constexpr (Function::kBackward) out_y[k] = p.scalars.alpha * sum.of[k];
      }
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if constexpr (Function::kBackward) {
          float grad_x, grad_y;
          Formula::backward(grad_out[k], x[k], y[k], p.scalars, grad_x, grad_y);
          out[kWidth * k] = grad_x;
          (kInTurn ? out[kWidth * k + kWidth - 1] : out_y[k]) = grad_y;
        } else {
          out[k] = Formula::forward(x[k], y[k], p.scalars);
        }
      }
    }
    if constexpr (kSums) {
      // NOTE: not contracted with the product that the gradient is, so that all kernels round
      // alike.
#pragma unroll
      for (int k = 0; k < N; ++k) sums[k] = __fadd_rn(sums[k], out[kWidth * k]);
    }

    constexpr int kOut = Function::kBackward ? kWidth : 1;
    if (!Function::kBackward || p.out.data != nullptr) {  // the same for all threads
      float values[kOut * N];
#pragma unroll
      for (int k = 0; k < kOut * N; ++k) values[k] = out[k];
      store_in_row<kAligned, !kSums>(Vector<T, kOut * N>::from_floats(values),
                                     const_cast<T*>(row_of(p.out, kOut, j)), kOut * column_of(j),
                                     kOut * dim_of(j));
    }
    if constexpr (Function::kWritesY) {
      if (p.out_y.data != nullptr)
        store_in_row<kAligned, !kSums>(Vector<T, N>::from_floats(out_y),
                                       const_cast<T*>(row_of(p.out_y, 1, j)), column_of(j),
                                       dim_of(j));
    }
  }
}

// Columns from `column` on. More than a block has do not matter, and would not fit an int.
__device__ __forceinline__ int columns_left(int64_t dim, int64_t column) {
  const int64_t left = dim - column;
  return left < (1 << 29) ? static_cast<int>(left) : 1 << 29;
}

// NOTE: of 32 bits each, without signs, it is one instruction.
__device__ __forceinline__ int64_t product(uint32_t a, int b) {
  return static_cast<int64_t>(uint64_t{a} * static_cast<uint32_t>(b));
}

// Of a multiprocessor, at least: 40 registers for the forward of one input. With 42, gelu of
// (16384, 4096) took 74.2 us on an H200, and 71.9 otherwise; but add_mul_act 94 us with more, and
// 104 so.
template <class Function>
constexpr int activation_blocks(Rows rows) {
  return rows == Rows::aligned && !Function::kBackward && Function::kLoads == 1 ? 12 : 0;
}

// Grid: blocks along a row in x, down the rows in y and z. The last may be past the end.
template <typename T, class Function, int kVectors, Rows kRows>
__global__ void __launch_bounds__(kActivationThreads, activation_blocks<Function>(kRows))
    activation_kernel(const Elementwise p) {
  constexpr int N = kColumns<T, Function>;
  const int64_t block_column = product(blockIdx.x, p.tile.columns_per_block);
  const uint32_t row_block = blockIdx.z * p.tile.layer + blockIdx.y;
  const int64_t first_row = product(row_block, p.tile.rows_per_block) + threadIdx.y;
  float unused_sums[N] = {};
  run_vectors<T, Function, kVectors, kRows, false>(
      p, first_row, p.tile.row_step, p.rows, block_column, threadIdx.x * N, p.tile.column_step,
      columns_left(p.dim, block_column), unused_sums);
}

// The same grid, of one layer, but a block goes through all the rows of its chunk.
template <typename T, class Function, int kVectors, Rows kRows>
__global__ void __launch_bounds__(kActivationSumThreads)
    activation_sum_kernel(const Elementwise p) {
  constexpr int N = kColumns<T, Function>;
  __shared__ float shared[kActivationSumThreads * N];  // [threads_y, threads_x * N]
  const int64_t block_column = product(blockIdx.x, p.tile.columns_per_block);
  const int64_t chunk_begin = product(blockIdx.y, p.tile.rows_per_block);
  const int64_t chunk_end =
      chunk_begin + p.tile.rows_per_block < p.rows ? chunk_begin + p.tile.rows_per_block : p.rows;
  const int dim = columns_left(p.dim, block_column);

  float sums[N] = {};
  for (int64_t row = chunk_begin; row < chunk_end; row += p.tile.row_step * kVectors) {
    run_vectors<T, Function, kVectors, kRows, true>(p, row + threadIdx.y, p.tile.row_step,
                                                    chunk_end, block_column, threadIdx.x * N, 0,
                                                    dim, sums);
  }

  // Add up the rows of threads, in order.
  const int columns = blockDim.x * N;
#pragma unroll
  for (int k = 0; k < N; ++k) shared[threadIdx.y * columns + threadIdx.x * N + k] = sums[k];
  __syncthreads();
  for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < columns;
       column += blockDim.x * blockDim.y) {
    if (column >= dim) break;
    float sum = 0.0f;
    for (int y = 0; y < static_cast<int>(blockDim.y); ++y) sum += shared[y * columns + column];
    p.partials[blockIdx.y * p.dim + block_column + column] = sum;
  }
}

// ---- launchers ----

dim3 grid_of(const ActivationPolicy& policy) {
  return dim3(policy.column_blocks, policy.tile.layer, policy.layers);
}

template <typename T, class Function>
bool is_aligned(const Elementwise& p) {
  // The ends of rows are read and written by the element.
  const auto starts_aligned = [&](const Operand& operand, int width) {
    constexpr int kSize = static_cast<int>(sizeof(T));
    return aligned_rows(operand.data, p.rows == 1 ? 0 : operand.stride, 0, kSize,
                        std::min(16, width * kColumns<T, Function> * kSize));
  };
  constexpr int kWidth = Function::kInTurn ? 2 : 1;
  const bool bias_fits = p.bias_columns.value > 0 || aligned_rows(p.bias, 0, 0, p.bias_dtype);
  return bias_fits && starts_aligned(p.grad_out, 1) && starts_aligned(p.x, kWidth) &&
         starts_aligned(p.y, 1) && starts_aligned(p.out, Function::kBackward ? kWidth : 1) &&
         starts_aligned(p.out_y, 1);
}

// The same work as Rows::in_one, where it is: (8191, 4097) bfloat16 with a bias takes 43.5 us on an
// H200 so, and 64.5 as unaligned rows.
template <typename T, class Function>
bool put_in_one_row(Elementwise& p) {
  if (p.bias == nullptr || p.dim > (1 << 29)) return false;
  for (const Operand& operand : {p.grad_out, p.x, p.y, p.out, p.out_y}) {
    if (operand.data != nullptr && operand.stride != p.dim) return false;
  }
  Elementwise one = p;
  one.rows = 1;
  one.dim = p.rows * p.dim;
  one.bias_columns = p.dim;
  if (!is_aligned<T, Function>(one)) return false;
  p = one;
  return true;
}

// Vectors a thread has of each tensor where there is work for all multiprocessors. More are slower:
// what counts is the number of loads in flight on a multiprocessor, and small threads leave room
// for many.
constexpr int kMostVectors = 2;
// An unaligned vector takes many registers.
template <class Function>
constexpr int kUnalignedVectors = Function::kLoads == 1 ? 2 : 1;
constexpr int kMostSumVectors = 4;

template <typename T, class Function>
gpuError launch(Elementwise p, int device, gpuStream stream) {
  using Rare = typename Function::Rare;
  constexpr int kRare = kUnalignedVectors<Function>;
  const bool aligned = is_aligned<T, Function>(p);
  auto kernel = &activation_kernel<T, Rare, kRare, Rows::unaligned>;
  if constexpr (Function::kReadsBias) {
    if (!aligned && put_in_one_row<T, Function>(p))
      kernel = &activation_kernel<T, Rare, kRare, Rows::in_one>;
  }
  const ActivationPolicy policy =
      activation_policy(device_info(device), kColumns<T, Function>, aligned ? kMostVectors : kRare,
                        aligned ? 1 : kRare, p.rows, p.dim);
  if (aligned) {
    kernel = policy.vectors == 1 ? &activation_kernel<T, Function, 1, Rows::aligned>
                                 : &activation_kernel<T, Function, kMostVectors, Rows::aligned>;
  }
  p.tile = policy.tile;
  return gpu_launch(kernel, grid_of(policy), dim3(policy.threads_x, policy.threads_y), 0, 1, stream,
                    p);
}

ActivationPolicy sum_policy(int device, DType dtype, int64_t rows, int64_t dim) {
  return activation_sum_policy(device_info(device), 16 / dtype_size(dtype), kMostSumVectors, rows,
                               dim);
}

template <typename T, class Function>
gpuError launch_sum(Elementwise p, int device, DType dtype, gpuStream stream) {
  const ActivationPolicy policy = sum_policy(device, dtype, p.rows, p.dim);
  p.tile = policy.tile;
  using Rare = typename Function::Rare;
  const auto kernel =
      !is_aligned<T, Function>(p) ? &activation_sum_kernel<T, Rare, 1, Rows::unaligned>
      : policy.vectors == 1       ? &activation_sum_kernel<T, Rare, 1, Rows::aligned>
                            : &activation_sum_kernel<T, Function, kMostSumVectors, Rows::aligned>;
  const gpuError error = gpu_launch(kernel, grid_of(policy),
                                    dim3(policy.threads_x, policy.threads_y), 0, 1, stream, p);
  if (error != gpuSuccess) return error;
  return reduce_partials({p.partials, 1, policy.row_blocks, 1, p.dim}, stream,
                         WriteColumns{p.grad_bias, p.bias_dtype, p.dim});
}

// Formulas with their activation, before the type of the elements is known.
template <Activation kActivation, bool kHasY>
struct Adding {
  static constexpr bool kMayHaveBias = true;
  template <class Math>
  using of = AddFormula<Math, kActivation, kHasY>;
};

template <bool kHasY>
struct AddingAny {
  static constexpr bool kMayHaveBias = true;
  template <class Math>
  using of = AnyAddFormula<Math, kHasY>;
};

template <Activation kActivation>
struct Gating {
  static constexpr bool kMayHaveBias = false;
  template <class Math>
  using of = GateFormula<Math, kActivation>;
};

struct ClampedGating {
  static constexpr bool kMayHaveBias = false;
  template <class Math>
  using of = ClampedGateFormula<Math>;
};

// With y, few activations have kernels of their own.
template <Activation kActivation, bool kHasY>
using AddingOrAny = std::conditional_t<kHasY, AddingAny<kHasY>, Adding<kActivation, kHasY>>;

// False where there is no such activation.
template <bool kHasY, typename F>
bool dispatch_adding(Activation activation, F&& f) {
  const std::false_type apart;
  switch (activation) {
    case Activation::none: f(Adding<Activation::none, kHasY>{}, apart); return true;
    case Activation::silu: f(Adding<Activation::silu, kHasY>{}, apart); return true;
    case Activation::relu: f(AddingOrAny<Activation::relu, kHasY>{}, apart); return true;
    case Activation::gelu: f(AddingOrAny<Activation::gelu, kHasY>{}, apart); return true;
    case Activation::gelu_tanh: f(AddingOrAny<Activation::gelu_tanh, kHasY>{}, apart); return true;
    case Activation::sigmoid:
    case Activation::tanh:
    case Activation::gelu_quick:
    case Activation::relu2: f(AddingAny<kHasY>{}, apart); return true;
  }
  return false;
}

// f(Adding<...>{} and so on, whether gate and value take turns). False where there is no kernel.
template <typename F>
[[nodiscard]] bool dispatch_formula(Formula formula, Activation activation, bool has_y,
                                    bool interleaved, F&& f) {
  const std::false_type apart;
  if (formula == Formula::clamped_gate) {
    interleaved ? f(ClampedGating{}, std::true_type{}) : f(ClampedGating{}, apart);
    return true;
  }
  if (interleaved) return false;
  if (formula == Formula::gate) {
    switch (activation) {
      case Activation::relu: f(Gating<Activation::relu>{}, apart); return true;
      case Activation::gelu: f(Gating<Activation::gelu>{}, apart); return true;
      case Activation::gelu_tanh: f(Gating<Activation::gelu_tanh>{}, apart); return true;
      case Activation::silu: f(Gating<Activation::silu>{}, apart); return true;
      default: return false;
    }
  }
  return has_y ? dispatch_adding<true>(activation, f) : dispatch_adding<false>(activation, f);
}

}  // namespace

namespace gpu {

const char* activation_forward(const ActivationForward& p, int device, void* stream) {
  Elementwise e{};
  e.x = {p.x, p.x_stride};
  e.y = {p.y, p.y_stride};
  e.out = {p.out, p.out_stride};
  e.bias = p.bias;
  e.bias_dtype = p.bias_dtype;
  e.rows = p.rows;
  e.dim = p.dim;
  e.scalars = {p.alpha, p.limit};
  e.activation = p.activation;
  gpuError error = gpuSuccess;
  const bool supported = dispatch_formula(
      p.formula, p.activation, p.y != nullptr, p.interleaved, [&](auto formula, auto interleaved) {
        error = dispatch_dtype(p.dtype, [&](auto tag) {
          using T = typename decltype(tag)::type;
          using F = typename decltype(formula)::template of<GpuMath<T>>;
          return launch<T, Function<F, false, interleaved>>(e, device,
                                                            static_cast<gpuStream>(stream));
        });
      });
  return supported ? message_of(error) : "unsupported activation";
}

int64_t activation_backward_partials(const ActivationBackward& p, int device) {
  return sum_policy(device, p.dtype, p.rows, p.dim).row_blocks;
}

const char* activation_backward(const ActivationBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  Elementwise e{};
  e.grad_out = {p.grad_out, p.grad_out_stride};
  e.x = {p.x, p.x_stride};
  e.y = {p.y, p.y_stride};
  e.out = {p.grad_x, p.grad_x_stride};
  e.out_y = {p.grad_y, p.grad_y_stride};
  e.bias = p.bias;
  e.bias_dtype = p.bias_dtype;
  e.rows = p.rows;
  e.dim = p.dim;
  e.scalars = {p.alpha, p.limit};
  e.activation = p.activation;
  e.partials = p.partials;
  e.grad_bias = p.grad_bias;
  gpuError error = gpuSuccess;
  // Where the inputs are not looked at, y may be null though its gradient is asked for.
  const bool has_y = p.y != nullptr || p.grad_y != nullptr;
  const bool supported = dispatch_formula(
      p.formula, p.activation, has_y, p.interleaved, [&](auto formula, auto interleaved) {
        error = dispatch_dtype(p.dtype, [&](auto tag) {
          using T = typename decltype(tag)::type;
          using F =
              Function<typename decltype(formula)::template of<GpuMath<T>>, true, interleaved>;
          if constexpr (decltype(formula)::kMayHaveBias) {
            if (p.grad_bias != nullptr) return launch_sum<T, F>(e, device, p.dtype, stream);
          }
          return launch<T, F>(e, device, stream);
        });
      });
  return supported ? message_of(error) : "unsupported activation";
}

}  // namespace gpu
}  // namespace fuselage
