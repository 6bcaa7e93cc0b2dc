// gated_rms_norm on the GPU (formulas: norm/gated_rms_norm.h).
//
// A group of a row is what is normalised. Its threads hold it in registers, a few 16-byte vectors
// each, blockDim.x vectors apart. Short groups of several rows share a block. silu has kernels of
// its own for either order; another serves the rest, as the library has room for few.
//
// Forward: a block has its rows once, and so many blocks fit on a multiprocessor that some load
// while others add up.
//
// Backward: persistent blocks, each of which has one group of every so many rows, and the sums of
// its columns in registers. While a row is worked on, the next is copied to shared memory
// (cp.async). At the end the block adds up its rows and leaves one partial sum
// (common/reduce_partials.h).
//
// Groups that are longer, or start anywhere, are streamed: the same threads have the same columns
// in the same order, but read them twice, the second time from L1 or L2. Their column sums are in
// global memory, and stay in L2.
#include "norm/gated_rms_norm.h"

#include "common/dispatch.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "norm/gated_rms_norm_device.h"
#include "norm/gated_rms_norm_policy.h"
#include "norm/row_tensors.h"

namespace fuselage {
namespace {

template <int N>
__device__ __forceinline__ float sum_of_squares(const float (&values)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) sum = fmaf(values[k], values[k], sum);
  return sum;
}

// ---- forward ----

// Grid: x over blocks of blockDim.y rows of a group, the groups side by side. Block:
// (threads_per_row, rows_per_block).

__device__ __forceinline__ GatedGroup group_of_thread(const GatedRmsNormForward& p) {
  const uint32_t groups = static_cast<uint32_t>(p.groups), rows = blockIdx.x / groups;
  return GatedGroup(p, int64_t{rows} * blockDim.y + threadIdx.y, blockIdx.x - rows * groups);
}

__device__ __forceinline__ float rstd_of_group(const GatedRmsNormForward& p,
                                               const GatedGroup& group, float (&sum)[1]) {
  __shared__ RowSumScratch<1> scratch[1];
  row_sum<false>(sum, 1, scratch, 0);
  const float rstd = reciprocal_sqrt(mean_of_group(sum[0], p.dim) + p.eps);
  const uint32_t index = blockIdx.x % static_cast<uint32_t>(p.groups);
  if (p.rstd != nullptr && threadIdx.x == 0 && group.dim > 0)
    p.rstd[group.row * p.groups + index] = rstd;
  return rstd;
}

template <typename T, typename Gate>
__global__ void __launch_bounds__(kGatedNormForwardThreads)
    gated_rms_norm_forward_kernel(const GatedRmsNormForward p) {
  constexpr int N = 16 / sizeof(T), kVectors = kGatedNormForwardVectors;
  const GatedGroup group = group_of_thread(p);
  const Gate kind(p);
  const T* x = group.in<T>(p.x, p.x_stride);
  const T* gate = group.in<T>(p.gate, p.gate_stride);
  const auto column_of = [](int j) { return static_cast<int>(j * blockDim.x + threadIdx.x) * N; };

  Vector<T, N> x_packed[kVectors], gates[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    x_packed[j] = load<true, N>(x, column_of(j), group.dim);
    gates[j] = load<true, N>(gate, column_of(j), group.dim);
  }
  float values[kVectors][N], factors[kVectors][N], sum[1] = {};
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    open_gate(kind, x_packed[j], gates[j], values[j], factors[j]);
    sum[0] += sum_of_squares(values[j]);
  }
  const float rstd = rstd_of_group(p, group, sum);
  T* out = group.out<T>(p.out);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float weight[N];
    load_values<true>(group.weight<T>(p), column_of(j), group.dim, 1.0f, weight);
    const Vector<T, N> result = gated_result<T>(p, rstd, weight, factors[j], values[j]);
    if (column_of(j) < group.dim) result.store(out + column_of(j));
  }
}

template <typename T>
__global__ void __launch_bounds__(kGatedNormForwardThreads)
    gated_rms_norm_streamed_kernel(const GatedRmsNormForward p) {
  constexpr int N = 16 / sizeof(T);
  const GatedGroup group = group_of_thread(p);
  const AnyGate kind(p);
  const int dim = static_cast<int>(p.dim), step = static_cast<int>(blockDim.x) * N;
  float sum[1] = {}, rstd = 0.0f;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    // NOTE: all lanes of a warp go round together, to store together.
#pragma unroll 1
    for (int start = 0; start < dim; start += step) {
      const int column = start + static_cast<int>(threadIdx.x) * N;
      float values[N], factors[N], weight[N];
      open_gate(kind, load<false, N>(group.in<T>(p.x, p.x_stride), column, group.dim),
                load<false, N>(group.in<T>(p.gate, p.gate_stride), column, group.dim), values,
                factors);
      if (pass == 0) {
        sum[0] += sum_of_squares(values);
        continue;
      }
      load_values<false>(group.weight<T>(p), column, group.dim, 1.0f, weight);
      store<false>(gated_result<T>(p, rstd, weight, factors, values), group.out<T>(p.out), column,
                   group.dim, column < group.dim);
    }
    if (pass == 0) rstd = rstd_of_group(p, group, sum);
  }
}

// ---- backward ----

// Grid: shares * groups, the groups of a share side by side. Block: (threads_per_row,
// rows_per_block).

// The rows of a thread: every `step`-th from `first` on. All threads of a block go round equally
// often.
struct GatedRows {
  uint32_t group, share;
  int64_t first, step;

  __device__ __forceinline__ explicit GatedRows(const GatedRmsNormBackward& p) {
    const uint32_t groups = static_cast<uint32_t>(p.groups), shares = gridDim.x / groups;
    share = blockIdx.x / groups;
    group = blockIdx.x - share * groups;
    // Rows of less than a warp lie side by side, for whole lines of memory.
    const bool spread = blockDim.x >= kWarpSize;
    first =
        spread ? share + int64_t{threadIdx.y} * shares : int64_t{share} * blockDim.y + threadIdx.y;
    step = int64_t{shares} * blockDim.y;
  }
  // Whether any row of the block is left.
  __device__ __forceinline__ bool go_on(const GatedRmsNormBackward& p, int64_t row) const {
    return row - first + int64_t{share} * (blockDim.x >= kWarpSize ? 1 : blockDim.y) < p.rows;
  }
};

__device__ __forceinline__ float load_rstd(const GatedRmsNormBackward& p, int64_t row,
                                           uint32_t group) {
  return row < p.rows ? p.rstd[row * p.groups + group] : 0.0f;
}

// A thread's vectors of the rows under way, in shared memory: [stage][tensor][vector][thread]. It
// copies them itself, and waits for nobody.
template <typename T>
struct GatedStages {
  static constexpr int N = 16 / sizeof(T), kVectors = kGatedNormBackwardVectors;
  Vector<T, N>* memory;  // of this thread
  int threads;

  __device__ __forceinline__ explicit GatedStages(void* memory_)
      : memory(static_cast<Vector<T, N>*>(memory_) + threadIdx.y * blockDim.x + threadIdx.x),
        threads(blockDim.x * blockDim.y) {}
  __device__ __forceinline__ Vector<T, N>* slot(int stage, int tensor, int j) const {
    return memory + ((stage * kGatedNormTensors + tensor) * kVectors + j) * threads;
  }
  __device__ __forceinline__ void start(const GatedRmsNormBackward& p, const GatedGroup& group,
                                        int stage, int first, int step) const {
    const T* rows[] = {group.in<T>(p.grad_out, p.grad_out_stride), group.in<T>(p.x, p.x_stride),
                       group.in<T>(p.gate, p.gate_stride)};
#pragma unroll
    for (int i = 0; i < kGatedNormTensors; ++i) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = first + j * step;
        if (column < group.dim) Vector<T, N>::load_async(slot(stage, i, j), rows[i] + column);
      }
    }
    cp_async_commit_group();
  }
  __device__ __forceinline__ void read(int stage, int tensor, int j, float (&values)[N]) const {
    Vector<T, N>::load_shared(slot(stage, tensor, j)).to_floats(values);
  }
};

template <typename T, typename Gate>
__global__ void __launch_bounds__(kGatedNormBackwardThreads, 1)
    gated_rms_norm_backward_kernel(const GatedRmsNormBackward p) {
  constexpr int N = 16 / sizeof(T), kVectors = kGatedNormBackwardVectors;
  extern __shared__ __align__(128) uint4 dynamic_memory[];
  __shared__ RowSumScratch<1> scratch[2];
  const GatedRows rows(p);
  const Gate kind(p);
  const int dim = static_cast<int>(p.dim), step = static_cast<int>(blockDim.x) * N;
  const auto column_of = [&](int j) { return j * step + static_cast<int>(threadIdx.x) * N; };
  const GatedStages<T> stages(dynamic_memory);
  const auto start = [&](int64_t row, int stage) {
    stages.start(p, GatedGroup(p, row, rows.group), stage, column_of(0), step);
  };

  // Columns past the end are zero in every stage: nothing is copied there.
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (column_of(j) < dim) continue;
    for (int i = 0; i < kGatedNormStages * kGatedNormTensors; ++i)
      *stages.slot(0, i, j) = Vector<T, N>::zero();
  }
#pragma unroll
  for (int stage = 0; stage < kGatedNormStages - 1; ++stage)
    start(rows.first + stage * rows.step, stage);
  float weight[kVectors][N];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    load_values<true>(GatedGroup(p, 0, rows.group).weight<T>(p), column_of(j), dim, 1.0f,
                      weight[j]);
  }

  float next_rstd = load_rstd(p, rows.first, rows.group), sums[kVectors][N] = {};
  int turn = 0, stage = 0;
#pragma unroll 1
  for (int64_t row = rows.first; rows.go_on(p, row); row += rows.step) {
    start(row + (kGatedNormStages - 1) * rows.step, stage == 0 ? kGatedNormStages - 1 : stage - 1);
    const float rstd = next_rstd;
    next_rstd = load_rstd(p, row + rows.step, rows.group);
    cp_async_wait_group(kGatedNormStages - 1);

    const GatedGroup group(p, row, rows.group);
    float a[kVectors][N], slopes[kVectors][N], dot[1] = {};
    // A row past the end is what its stage had before.
    if (group.dim > 0) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float grad_out[N], x[N], t[N];
        stages.read(stage, 0, j, grad_out);
        stages.read(stage, 1, j, x);
        stages.read(stage, 2, j, a[j]);
        gated_terms<T>(kind, rstd, grad_out, x, a[j], slopes[j], t);
        dot[0] += weighted_sum(t, weight[j]);
#pragma unroll
        for (int k = 0; k < N; ++k) sums[j][k] += t[k];
      }
    }
    if (p.grad_x != nullptr || p.grad_gate != nullptr) {
      row_sum<true>(dot, 1, scratch, turn);
      ++turn;
      const float mean = mean_of_group(dot[0], p.dim);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float grad_out[N], x[N];
        if (column_of(j) >= group.dim) continue;
        stages.read(stage, 0, j, grad_out);
        stages.read(stage, 1, j, x);
        gated_gradients(kind, rstd, mean, grad_out, weight[j], a[j], x, slopes[j]);
        if (p.grad_x != nullptr)
          Vector<T, N>::from_floats(x).store(group.out<T>(p.grad_x) + column_of(j));
        if (p.grad_gate != nullptr)
          Vector<T, N>::from_floats(slopes[j]).store(group.out<T>(p.grad_gate) + column_of(j));
      }
    }
    stage = stage + 1 == kGatedNormStages ? 0 : stage + 1;
  }
  launch_dependents();
  if (p.partials == nullptr) return;

  // Add up the rows of the block, in order.
  float* partial = p.partials + (int64_t{rows.share} * p.groups + rows.group) * p.dim;
  if (blockDim.y == 1) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (column_of(j) < dim) Vector<float, N>::from_floats(sums[j]).store(partial + column_of(j));
    }
    return;
  }
  float* of_rows = reinterpret_cast<float*>(dynamic_memory);  // [row][column]
  const int width = kVectors * step;
  cp_async_wait_group(0);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    Vector<float, N>::from_floats(sums[j]).store(of_rows + threadIdx.y * width + column_of(j));
  __syncthreads();
  constexpr int kWidth = 4;  // columns that a thread adds up together
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int c = thread * kWidth; c < dim; c += blockDim.x * blockDim.y * kWidth) {
    float sum[kWidth];
    add_block_rows(of_rows + c, width, sum);
    Vector<float, kWidth>::from_floats(sum).store(partial + c);
  }
}

template <typename T>
__global__ void __launch_bounds__(kGatedNormBackwardThreads, 1)
    gated_rms_norm_backward_streamed_kernel(const GatedRmsNormBackward p) {
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<1> scratch[2];
  const GatedRows rows(p);
  const AnyGate kind(p);
  const int dim = static_cast<int>(p.dim), step = static_cast<int>(blockDim.x) * N;
  float* partial = p.partials;
  if (partial != nullptr) {
    partial += ((int64_t{rows.share} * blockDim.y + threadIdx.y) * p.groups + rows.group) * p.dim;
    for (int start = threadIdx.x * N; start < dim; start += step) {
      for (int column = start; column < min(start + N, dim); ++column) partial[column] = 0.0f;
    }
  }
  int turn = 0;
#pragma unroll 1
  for (int64_t row = rows.first; rows.go_on(p, row); row += rows.step) {
    const GatedGroup group(p, row, rows.group);
    const float rstd = load_rstd(p, row, rows.group);
    const int passes = p.grad_x == nullptr && p.grad_gate == nullptr ? 1 : 2;
    float dot[1] = {}, mean = 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      // NOTE: all lanes of a warp go round together, to store together.
#pragma unroll 1
      for (int start = 0; start < dim; start += step) {
        const int column = start + static_cast<int>(threadIdx.x) * N;
        float grad_out[N], x[N], a[N], slopes[N], t[N], weight[N];
        const auto read = [&](const void* data, int64_t stride, float(&values)[N]) {
          load<false, N>(group.in<T>(data, stride), column, group.dim).to_floats(values);
        };
        read(p.grad_out, p.grad_out_stride, grad_out);
        read(p.x, p.x_stride, x);
        read(p.gate, p.gate_stride, a);
        load_values<false>(group.weight<T>(p), column, group.dim, 1.0f, weight);
        gated_terms<T>(kind, rstd, grad_out, x, a, slopes, t);
        if (pass == 0) {
          dot[0] += weighted_sum(t, weight);
          if (partial == nullptr) continue;
#pragma unroll
          for (int k = 0; k < N; ++k) {
            if (column + k < group.dim) partial[column + k] += t[k];
          }
          continue;
        }
        gated_gradients(kind, rstd, mean, grad_out, weight, a, x, slopes);
        // One copy of the code for both.
#pragma unroll 1
        for (int output = 0; output < 2; ++output) {
          void* data = output == 0 ? p.grad_x : p.grad_gate;
          if (data != nullptr) {
            store<false>(Vector<T, N>::from_floats(x), group.out<T>(data), column, group.dim,
                         column < group.dim);
          }
#pragma unroll
          for (int k = 0; k < N; ++k) x[k] = slopes[k];
        }
      }
      if (passes == 1 || pass == 1) continue;
      row_sum<true>(dot, 1, scratch, turn);
      ++turn;
      mean = mean_of_group(dot[0], p.dim);
    }
  }
  launch_dependents();
}

// ---- launchers ----

// f(the type of the gate of kernels that hold a group).
template <typename Params, typename F>
auto with_gate(const Params& p, const F& f) {
  if (p.activation != NormGate::silu) return f(TypeTag<AnyGate>{});
  return p.norm_first ? f(TypeTag<SiluGate<true>>{}) : f(TypeTag<SiluGate<false>>{});
}

}  // namespace

namespace gpu {

const char* gated_rms_norm_forward(const GatedRmsNormForward& p, int /*device*/, void* stream) {
  const GatedRmsNormPolicy policy = gated_rms_norm_forward_policy(p);
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto kernel = &gated_rms_norm_streamed_kernel<T>;
    if (!policy.streamed) {
      kernel = with_gate(p, [](auto gate) {
        return &gated_rms_norm_forward_kernel<T, typename decltype(gate)::type>;
      });
    }
    return gpu_launch(kernel, dim3(static_cast<unsigned>(policy.blocks)),
                      dim3(policy.threads_per_row, policy.rows_per_block), 0, 1,
                      static_cast<gpuStream>(stream), p);
  }));
}

int64_t gated_rms_norm_backward_partials(const GatedRmsNormBackward& p, int device) {
  return gated_rms_norm_backward_policy(device_info(device), p).partials;
}

const char* gated_rms_norm_backward(const GatedRmsNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const GatedRmsNormBackwardPolicy policy = gated_rms_norm_backward_policy(device_info(device), p);
  const gpuError error = dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto kernel = &gated_rms_norm_backward_streamed_kernel<T>;
    if (!policy.row.streamed) {
      kernel = with_gate(p, [](auto gate) {
        return &gated_rms_norm_backward_kernel<T, typename decltype(gate)::type>;
      });
    }
    return gpu_launch(kernel, dim3(static_cast<unsigned>(policy.row.blocks)),
                      dim3(policy.row.threads_per_row, policy.row.rows_per_block),
                      policy.shared_bytes, 1, stream, p);
  });
  if (error != gpuSuccess || p.partials == nullptr) return message_of(error);
  const int64_t columns = p.groups * p.dim;
  return message_of(reduce_partials({p.partials, 1, policy.partials, 1, columns}, stream,
                                    WriteColumns{p.grad_weight, p.weight_dtype, columns}));
}

}  // namespace gpu
}  // namespace fuselage
