// The gate family on the GPU: formulas in gate/activation.h, activations in gate/activation_math.h.
//
// Every operator reads one to three [rows, dim] tensors and writes one or two. A thread has a few vectors of
// 16 bytes of each; all loads are issued before the first is used. Tensors without gaps between their rows come
// here as one long row. Halves of a packed tensor are two tensors with the row stride of the whole; gate and
// value in turn are two neighbouring vectors, taken apart in registers.
//
// The gradient of a bias is a sum over rows: blocks keep the sums of their columns in registers over a chunk of
// rows and leave one row of float32 partial sums each; a second kernel adds these up in order.
//
// With kAligned every row of every tensor starts on a 16-byte boundary; its last vector may be incomplete.
// Without, rows may start anywhere, and vectors are put together from two aligned blocks (common/vector.h).
#include "gate/activation.h"

#include "common/dispatch.h"
#include "common/vector.h"
#include "gate/activation_math.h"
#include "gate/activation_policy.h"

namespace fuselage {
namespace {

// ---- device helpers ----

// What activation_math.h computes with. Where the result has 11 bits or fewer, e^v may be wrong by as much as a
// rounding of v makes it: one instruction instead of about eight.
template <typename T>
struct GpuMath {
  using Floats = float;
  static __device__ __forceinline__ float exp_negative(float v) {
    if constexpr (sizeof(T) == sizeof(float)) return expf(v);
    return exp2_approximate(1.4426950408889634f * v);
  }
  static __device__ __forceinline__ float exp_minus_half_square(float v) {
    if constexpr (sizeof(T) == sizeof(float)) return expf(-0.5f * v * v);
    return exp2_approximate(-0.7213475204444817f * v * v);
  }
  static __device__ __forceinline__ float reciprocal(float v) {
    if constexpr (sizeof(T) == sizeof(float)) return 1.0f / v;
    return reciprocal_of_normal(v);
  }
  static __device__ __forceinline__ float absolute(float v) { return fabsf(v); }
  static __device__ __forceinline__ float smaller(float a, float b) { return fminf(a, b); }
};

// Elements of a vector that only begins in the row; those behind its end are zero. Not inlined: it is rare, and
// would be most of the code.
template <int N, typename T>
__device__ __noinline__ Vector<T, N> load_elements(const T* row, int column, int dim) {
  float values[N];
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] = column + k < dim ? to_float(row[column + k]) : 0.0f;
  return Vector<T, N>::from_floats(values);
}

template <int N, typename T>
__device__ __noinline__ void store_elements(const Vector<T, N> vector, T* row, int column,
                                            int dim) {
  float values[N];
  vector.to_floats(values);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (column + k < dim) row[column + k] = from_float<T>(values[k]);
  }
}

// A vector of a row on its way, as Loading, for aligned rows whose last vector may be incomplete too.
template <typename T, int N, bool kAligned>
struct RowLoading {
  Loading<T, N, kAligned> loading;

  __device__ __forceinline__ void start(const T* row, int column, int dim) {
    loading.start(row, column, kAligned ? dim / N * N : dim);
  }
  __device__ __forceinline__ Vector<T, N> finish(const T* row, int column, int dim) const {
    if (kAligned && column < dim && column + N > dim) return load_elements<N>(row, column, dim);
    return loading.finish(row, column, dim);
  }
};

// `kNeighbours`: the lanes of a warp have neighbouring vectors. All of them call together unless kAligned.
template <bool kAligned, bool kNeighbours, int N, typename T>
__device__ __forceinline__ void store(const Vector<T, N>& vector, T* row, int column, int dim,
                                      bool inside) {
  if constexpr (!kAligned && kNeighbours) {
    vector.store_unaligned(row, column, dim, inside,
                           blockDim.x < kWarpSize ? blockDim.x : kWarpSize);
  } else if (inside) {
    if (kAligned && column + N <= dim) {
      vector.store(row + column);
    } else {
      store_elements(vector, row, column, dim);
    }
  }
}

template <bool kAligned, int N, typename W>
__device__ __forceinline__ void load_bias(const W* bias, int column, int dim, float (&values)[N]) {
  RowLoading<W, N, kAligned> loading;
  loading.start(bias, column, dim);
  loading.finish(bias, column, dim).to_floats(values);
}

// Gate and value of N columns, out of 2 * N numbers in which they take turns.
template <int N>
__device__ __forceinline__ void take_apart(float (&first)[N], float (&second)[N]) {
  float x[N], y[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    x[k] = k < N / 2 ? first[2 * k % N] : second[2 * k % N];
    y[k] = k < N / 2 ? first[2 * k % N + 1] : second[2 * k % N + 1];
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    first[k] = x[k];
    second[k] = y[k];
  }
}

template <int N>
__device__ __forceinline__ void put_together(float (&x)[N], float (&y)[N]) {
  float first[N], second[N];
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    first[2 * k] = x[k];
    first[2 * k + 1] = y[k];
    second[2 * k] = x[N / 2 + k];
    second[2 * k + 1] = y[N / 2 + k];
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    x[k] = first[k];
    y[k] = second[k];
  }
}

// ---- kernels ----

// A [rows, dim] tensor, or null.
struct Operand {
  const void* data;
  int64_t stride;
};

struct Elementwise {
  Operand inputs[3];   // forward: x, y. Backward: grad_out, x, y
  Operand outputs[2];  // forward: out. Backward: grad_x, grad_y
  const void* bias;    // [dim]
  DType bias_dtype;
  int64_t rows, dim;
  Scalars scalars;
  float* partials;  // [row blocks, dim] with grad_bias
  void* grad_bias;  // [dim]
};

// What the kernels below do with their inputs. `pair`: which of two neighbouring vectors an operand is, where
// gate and value take turns, and -1 where it is by itself.

// kY: whether there is a y.
template <template <class> class FormulaOf, typename T, bool kY, bool kInterleaved>
struct Forward {
  using Formula = FormulaOf<GpuMath<T>>;
  static constexpr int kInputs = kY ? 2 : 1;
  static constexpr int kOutputs = 1;
  static constexpr bool kBias = Formula::kHasBias;

  static __device__ __forceinline__ constexpr int input_pair(int i) {
    return kInterleaved ? i : -1;
  }
  static __device__ __forceinline__ constexpr int output_pair(int) { return -1; }

  template <int N>
  static __device__ __forceinline__ void compute(float (&in)[kInputs][N], const float (&bias)[N],
                                                 const Scalars& scalars, float (&out)[kOutputs][N],
                                                 float (&)[N]) {
    if constexpr (kInterleaved) take_apart(in[0], in[1]);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float y = kY ? in[kY ? 1 : 0][k] : 0.0f;
      out[0][k] = Formula::forward(in[0][k], y, bias[k], scalars);
    }
  }
};

template <template <class> class FormulaOf, typename T, bool kInterleaved>
struct Backward {
  using Formula = FormulaOf<GpuMath<T>>;
  static constexpr int kInputs = Formula::kReadsInputs ? 3 : 1;
  static constexpr int kOutputs = 2;
  static constexpr bool kBias = Formula::kHasBias && Formula::kReadsInputs;

  static __device__ __forceinline__ constexpr int input_pair(int i) {
    return kInterleaved ? i - 1 : -1;
  }
  static __device__ __forceinline__ constexpr int output_pair(int i) {
    return kInterleaved ? i : -1;
  }

  // Adds grad_x to `sums`.
  template <int N>
  static __device__ __forceinline__ void compute(float (&in)[kInputs][N], const float (&bias)[N],
                                                 const Scalars& scalars, float (&out)[kOutputs][N],
                                                 float (&sums)[N]) {
    if constexpr (kInterleaved) take_apart(in[1], in[2]);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float x = kInputs > 1 ? in[kInputs > 1 ? 1 : 0][k] : 0.0f;
      const float y = kInputs > 1 ? in[kInputs > 1 ? 2 : 0][k] : 0.0f;
      Formula::backward(in[0][k], x, y, bias[k], scalars, out[0][k], out[1][k]);
      sums[k] += out[0][k];
    }
    if constexpr (kInterleaved) put_together(out[0], out[1]);
  }
};

// The work of a thread on kVectors vectors of rows below row_end. `first_column` counts from block_column, where
// `dim` columns are left. Adds to `sums` what the function sums.
template <typename T, class Function, int kVectors, bool kAligned, int N>
__device__ __forceinline__ void run_vectors(const Elementwise& p, int64_t first_row, int row_step,
                                            int64_t row_end, int64_t block_column, int first_column,
                                            int column_step, int dim, float (&sums)[N]) {
  constexpr int kInputs = Function::kInputs;
  constexpr int kOutputs = Function::kOutputs;
  const auto row_of = [&](const Operand& operand, int pair, int j) {
    const int64_t column = pair < 0 ? block_column : 2 * block_column;
    return static_cast<const T*>(operand.data) + (first_row + j * row_step) * operand.stride +
           column;
  };
  const auto column_of = [&](int pair, int j) {
    const int column = first_column + j * column_step;
    return pair < 0 ? column : 2 * column + pair * N;
  };
  // Tensors that are not there, and rows behind the last, are empty.
  const auto dim_of = [&](const Operand& operand, int pair, int j) {
    if (operand.data == nullptr || first_row + j * row_step >= row_end) return 0;
    return pair < 0 ? dim : 2 * dim;
  };

  // Start to load everything this thread works on.
  RowLoading<T, N, kAligned> loading[kVectors][kInputs];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      const int pair = Function::input_pair(i);
      loading[j][i].start(row_of(p.inputs[i], pair, j), column_of(pair, j),
                          dim_of(p.inputs[i], pair, j));
    }
  }

#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float bias[N];
#pragma unroll
    for (int k = 0; k < N; ++k) bias[k] = 0.0f;
    if (Function::kBias && p.bias != nullptr) {
      if (sizeof(T) == sizeof(float) || p.bias_dtype == DType::float32) {
        load_bias<kAligned>(static_cast<const float*>(p.bias) + block_column, column_of(-1, j), dim,
                            bias);
      } else {
        load_bias<kAligned>(static_cast<const T*>(p.bias) + block_column, column_of(-1, j), dim,
                            bias);
      }
    }
    float in[kInputs][N], out[kOutputs][N];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      const int pair = Function::input_pair(i);
      loading[j][i]
          .finish(row_of(p.inputs[i], pair, j), column_of(pair, j), dim_of(p.inputs[i], pair, j))
          .to_floats(in[i]);
    }
    Function::compute(in, bias, p.scalars, out, sums);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      constexpr bool kNeighbours = Function::output_pair(0) < 0;
      const int pair = Function::output_pair(i);
      if (p.outputs[i].data == nullptr && pair < 0) continue;  // the same for all threads
      const Operand& operand = pair < 0 ? p.outputs[i] : p.outputs[0];
      T* row = const_cast<T*>(row_of(operand, pair, j));
      const int row_dim = dim_of(operand, pair, j), column = column_of(pair, j);
      store<kAligned, kNeighbours>(Vector<T, N>::from_floats(out[i]), row, column, row_dim,
                                   column < row_dim);
    }
  }
}

// Columns from `column` on. More than a block has do not matter, and would not fit an int.
__device__ __forceinline__ int columns_left(int64_t dim, int64_t column) {
  const int64_t left = dim - column;
  return left < (1 << 29) ? static_cast<int>(left) : 1 << 29;
}

// Grid: blocks along a row, then down the rows.
template <typename T, class Function, int kVectors, bool kAligned>
__global__ void __launch_bounds__(kActivationThreads)
    activation_kernel(const Elementwise p, const ActivationPolicy policy) {
  constexpr int N = 16 / sizeof(T);
  const uint32_t column_blocks = static_cast<uint32_t>(policy.column_blocks);
  const uint32_t row_block = blockIdx.x / column_blocks;
  const int64_t block_column =
      int64_t{blockIdx.x - row_block * column_blocks} * policy.columns_per_block;
  const int64_t first_row = int64_t{row_block} * policy.rows_per_block + threadIdx.y;
  float unused_sums[N] = {};
  run_vectors<T, Function, kVectors, kAligned>(p, first_row, policy.row_step, p.rows, block_column,
                                               threadIdx.x * N, policy.column_step,
                                               columns_left(p.dim, block_column), unused_sums);
}

// The same grid, but a block goes through all the rows of its chunk.
template <typename T, class Function, int kVectors, bool kAligned>
__global__ void __launch_bounds__(kActivationSumThreads)
    activation_sum_kernel(const Elementwise p, const ActivationPolicy policy) {
  constexpr int N = 16 / sizeof(T);
  __shared__ float shared[kActivationSumThreads * N];  // [threads_y, threads_x * N]
  const uint32_t column_blocks = static_cast<uint32_t>(policy.column_blocks);
  const uint32_t row_block = blockIdx.x / column_blocks;
  const int64_t block_column =
      int64_t{blockIdx.x - row_block * column_blocks} * policy.columns_per_block;
  const int64_t chunk_begin = int64_t{row_block} * policy.rows_per_block;
  const int64_t chunk_end =
      chunk_begin + policy.rows_per_block < p.rows ? chunk_begin + policy.rows_per_block : p.rows;
  const int dim = columns_left(p.dim, block_column);

  float sums[N] = {};
  for (int64_t row = chunk_begin; row < chunk_end; row += policy.row_step * kVectors) {
    run_vectors<T, Function, kVectors, kAligned>(p, row + threadIdx.y, policy.row_step, chunk_end,
                                                 block_column, threadIdx.x * N, 0, dim, sums);
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
    p.partials[int64_t{row_block} * p.dim + block_column + column] = sum;
  }
}

// grad_bias = sum of the partial sums. Block: 32 columns, and 32 threads for each.
template <typename B>
__global__ void __launch_bounds__(1024)
    activation_bias_kernel(const float* partials,  // [count, dim]
                           B* grad_bias,           // [dim]
                           int64_t dim, int count) {
  __shared__ float shared[32][33];
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  wait_for_kernel_before();
  float sum = 0.0f;
  if (column < dim) {
#pragma unroll 4
    for (int i = threadIdx.y; i < count; i += 32) sum += partials[i * dim + column];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int half = 16; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.y) < half)
      shared[threadIdx.y][threadIdx.x] += shared[threadIdx.y + half][threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && column < dim) grad_bias[column] = from_float<B>(shared[0][threadIdx.x]);
}

// ---- launchers ----

template <class Function>
bool is_aligned(const Elementwise& p, int element_size) {
  const auto starts_aligned = [&](const Operand& operand) {
    return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 &&
           (p.rows == 1 || operand.stride * element_size % 16 == 0);
  };
  bool aligned = reinterpret_cast<uintptr_t>(p.bias) % 16 == 0;
  for (const Operand& operand : p.inputs) aligned = aligned && starts_aligned(operand);
  for (const Operand& operand : p.outputs) aligned = aligned && starts_aligned(operand);
  return aligned;
}

// Vectors of 16 bytes a thread has of each tensor: with about four loads in flight the memory pipeline is full at
// the occupancy of these kernels.
template <class Function>
constexpr int kMostVectors = Function::kInputs == 1 ? 4 : 2;
// An unaligned vector takes two loads, and many registers.
template <class Function>
constexpr int kUnalignedVectors = Function::kInputs == 1 ? 2 : 1;
constexpr int kSumVectors = 2;

template <typename T, class Function>
gpuError launch(const Elementwise& p, int device, gpuStream stream) {
  constexpr int kMost = kMostVectors<Function>;
  constexpr int kUnaligned = kUnalignedVectors<Function>;
  const bool aligned = is_aligned<Function>(p, sizeof(T));
  const ActivationPolicy policy =
      aligned ? activation_policy(device_info(device), sizeof(T), kMost, 1, p.rows, p.dim)
              : activation_policy(device_info(device), sizeof(T), kUnaligned, kUnaligned, p.rows,
                                  p.dim);
  const dim3 grid(policy.row_blocks * policy.column_blocks);
  const dim3 block(policy.threads_x, policy.threads_y);
  if (!aligned)
    return gpu_launch(&activation_kernel<T, Function, kUnaligned, false>, grid, block, 0, 1, stream,
                      p, policy);
  if (policy.vectors == 1)
    return gpu_launch(&activation_kernel<T, Function, 1, true>, grid, block, 0, 1, stream, p,
                      policy);
  return gpu_launch(&activation_kernel<T, Function, kMost, true>, grid, block, 0, 1, stream, p,
                    policy);
}

ActivationPolicy sum_policy(int device, DType dtype, int64_t rows, int64_t dim) {
  return activation_sum_policy(device_info(device), dtype_size(dtype), kSumVectors, rows, dim);
}

template <typename T, class Function>
gpuError launch_sum(const Elementwise& p, int device, DType dtype, gpuStream stream) {
  const ActivationPolicy policy = sum_policy(device, dtype, p.rows, p.dim);
  const dim3 grid(policy.row_blocks * policy.column_blocks);
  const dim3 block(policy.threads_x, policy.threads_y);
  const auto kernel = is_aligned<Function>(p, sizeof(T))
                          ? &activation_sum_kernel<T, Function, kSumVectors, true>
                          : &activation_sum_kernel<T, Function, 1, false>;
  gpuError error = gpu_launch(kernel, grid, block, 0, 1, stream, p, policy);
  if (error != gpuSuccess) return error;
  dispatch_activation_output(p.bias_dtype, p.bias_dtype, [&](auto tag, auto) {
    using B = typename decltype(tag)::type;
    error =
        gpu_launch_after(&activation_bias_kernel<B>, dim3(ceil_div(p.dim, 32)), dim3(32, 32),
                         stream, const_cast<const float*>(p.partials), static_cast<B*>(p.grad_bias),
                         p.dim, static_cast<int>(policy.row_blocks));
  });
  return error;
}

// Formulas with their activation, before the type of the elements is known.
template <Activation kActivation>
struct Adding {
  static constexpr bool kMayLackY = true;
  static constexpr bool kMayHaveBias = true;
  template <class Math>
  using of = AddFormula<Math, kActivation>;
};

template <Activation kActivation>
struct Gating {
  static constexpr bool kMayLackY = false;
  static constexpr bool kMayHaveBias = false;
  template <class Math>
  using of = GateFormula<Math, kActivation>;
};

struct ClampedGating {
  static constexpr bool kMayLackY = false;
  static constexpr bool kMayHaveBias = false;
  template <class Math>
  using of = ClampedGateFormula<Math>;
};

// f(Adding<...>{} and so on, whether gate and value take turns). False where there is no kernel.
template <typename F>
bool dispatch_formula(Formula formula, Activation activation, bool interleaved, F&& f) {
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
  switch (activation) {
    case Activation::none: f(Adding<Activation::none>{}, apart); return true;
    case Activation::relu: f(Adding<Activation::relu>{}, apart); return true;
    case Activation::sigmoid: f(Adding<Activation::sigmoid>{}, apart); return true;
    case Activation::tanh: f(Adding<Activation::tanh>{}, apart); return true;
    case Activation::gelu: f(Adding<Activation::gelu>{}, apart); return true;
    case Activation::gelu_tanh: f(Adding<Activation::gelu_tanh>{}, apart); return true;
    case Activation::gelu_quick: f(Adding<Activation::gelu_quick>{}, apart); return true;
    case Activation::silu: f(Adding<Activation::silu>{}, apart); return true;
    case Activation::relu2: f(Adding<Activation::relu2>{}, apart); return true;
  }
  return false;
}

}  // namespace

namespace gpu {

const char* activation_forward(const ActivationForward& p, int device, void* stream) {
  Elementwise e{};
  e.inputs[0] = {p.x, p.x_stride};
  e.inputs[1] = p.interleaved ? e.inputs[0] : Operand{p.y, p.y_stride};
  e.outputs[0] = {p.out, p.out_stride};
  e.bias = p.bias;
  e.bias_dtype = p.bias_dtype;
  e.rows = p.rows;
  e.dim = p.dim;
  e.scalars = {p.alpha, p.limit};
  gpuError error = gpuSuccess;
  const bool supported =
      dispatch_formula(p.formula, p.activation, p.interleaved, [&](auto formula, auto interleaved) {
        dispatch_activation_output(p.dtype, p.dtype, [&](auto tag, auto) {
          using T = typename decltype(tag)::type;
          using F = decltype(formula);
          const gpuStream on = static_cast<gpuStream>(stream);
          if constexpr (F::kMayLackY) {
            if (e.inputs[1].data == nullptr) {
              error = launch<T, Forward<F::template of, T, false, false>>(e, device, on);
              return;
            }
          }
          error = launch<T, Forward<F::template of, T, true, interleaved>>(e, device, on);
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
  e.inputs[0] = {p.grad_out, p.grad_out_stride};
  e.inputs[1] = {p.x, p.x_stride};
  e.inputs[2] = p.interleaved ? e.inputs[1] : Operand{p.y, p.y_stride};
  e.outputs[0] = {p.grad_x, p.grad_x_stride};
  e.outputs[1] = {p.grad_y, p.grad_y_stride};
  e.bias = p.bias;
  e.bias_dtype = p.bias_dtype;
  e.rows = p.rows;
  e.dim = p.dim;
  e.scalars = {p.alpha, p.limit};
  e.partials = p.partials;
  e.grad_bias = p.grad_bias;
  gpuError error = gpuSuccess;
  const bool supported =
      dispatch_formula(p.formula, p.activation, p.interleaved, [&](auto formula, auto interleaved) {
        dispatch_activation_output(p.dtype, p.dtype, [&](auto tag, auto) {
          using T = typename decltype(tag)::type;
          using F = decltype(formula);
          using Function = Backward<F::template of, T, interleaved>;
          if constexpr (F::kMayHaveBias) {
            if (p.grad_bias != nullptr) {
              error = launch_sum<T, Function>(e, device, p.dtype, stream);
              return;
            }
          }
          error = launch<T, Function>(e, device, stream);
        });
      });
  return supported ? message_of(error) : "unsupported activation";
}

}  // namespace gpu
}  // namespace fuselage
