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
// Groups that start anywhere, or are cut over the blocks of a cluster, have a kernel for all gates;
// its threads have the same columns (common/row_vectors.h, norm/row_stages.h). Longer ones are
// streamed: read twice, the second time from L1 or L2. Their column sums are in global memory, and
// stay in L2.
#include "norm/gated_rms_norm.h"

#include <type_traits>

#include "common/dispatch.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "norm/gated_rms_norm_device.h"
#include "norm/gated_rms_norm_policy.h"
#include "norm/row_stages.h"
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

// Grid: x over blocks of blockDim.y rows of a group (times the cluster), the groups side by side.
// Block: (threads_per_row, rows_per_block).

__device__ __forceinline__ GatedGroup group_of_thread(const GatedRmsNormForward& p, int cluster) {
  const uint32_t groups = static_cast<uint32_t>(p.groups), block = blockIdx.x / cluster;
  const uint32_t rows = block / groups;
  return GatedGroup(p, int64_t{rows} * blockDim.y + threadIdx.y, block - rows * groups);
}

__device__ __forceinline__ float rstd_of_group(const GatedRmsNormForward& p,
                                               const GatedGroup& group, int cluster,
                                               RowSumScratch<1> (&scratch)[1], float (&sum)[1]) {
  row_sum_end(cluster);
  row_sum<false>(sum, cluster, scratch, 0);
  const float rstd = reciprocal_sqrt(mean_of_group(sum[0], p.dim) + p.eps);
  const uint32_t index = blockIdx.x / cluster % static_cast<uint32_t>(p.groups);
  if (p.rstd != nullptr && threadIdx.x == 0 && group.dim > 0)
    p.rstd[group.row * p.groups + index] = rstd;
  return rstd;
}

template <typename Gate, bool kAnywhere>
constexpr int gated_norm_registers() {
  return kAnywhere || std::is_same_v<Gate, AnyGate> ? kGatedNormMoreRegisters : kGatedNormRegisters;
}

// kAnywhere: groups may start anywhere, and be cut over the blocks of a cluster.
template <typename T, typename Gate, bool kAnywhere>
__global__ void FUSELAGE_MAX_REGISTERS(kGatedNormForwardThreads,
                                       (gated_norm_registers<Gate, kAnywhere>()))
    gated_rms_norm_forward_kernel(const GatedRmsNormForward p, const int blocks_in_cluster) {
  constexpr bool kAligned = !kAnywhere;
  constexpr int N = 16 / sizeof(T), kVectors = kGatedNormForwardVectors;
  __shared__ RowSumScratch<1> scratch[1];
  const int cluster = kAnywhere && kCompilesClusters ? blocks_in_cluster : 1;
  row_sum_start(cluster, scratch);
  const GatedGroup group = group_of_thread(p, cluster);
  const Gate kind(p);
  const T* x = group.in<T>(p.x, p.x_stride);
  const T* gate = group.in<T>(p.gate, p.gate_stride);
  const int step = static_cast<int>(blockDim.x) * N;
  const int first_column =
      (cluster > 1 ? cluster_rank() * kVectors * step : 0) + static_cast<int>(threadIdx.x) * N;
  const auto column_of = [=](int j) { return first_column + j * step; };

  SpreadLoading<T, kVectors, kAligned> x_loading, gate_loading;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    x_loading.start(j, x, column_of(j), group.dim);
    gate_loading.start(j, gate, column_of(j), group.dim);
  }
  RuntimeLoading<T, N, kAligned> weight_loading[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    weight_loading[j].start(group.weight<T>(p), column_of(j), group.dim);
  // Where the gate comes after the norm, it is opened there: that takes fewer registers.
  constexpr bool kLate = Gate::kOpensLate;
  Vector<T, N> xs[kVectors], gates[kVectors];
  float values[kLate ? 1 : kVectors][N], factors[kLate ? 1 : kVectors][N], sum[1] = {};
  x_loading.join();
  gate_loading.join();
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    xs[j] = x_loading.joined(j);
    gates[j] = gate_loading.joined(j);
    float(&s)[N] = values[kLate ? 0 : j];
    if constexpr (kLate) {
      xs[j].to_floats(s);
    } else {
      open_gate(kind, xs[j], gates[j], s, factors[j]);
    }
    sum[0] += sum_of_squares(s);
  }
  const float rstd = rstd_of_group(p, group, cluster, scratch, sum);
  SpreadStoring<T, kVectors, kAligned> out(group.out<T>(p.out), first_column, step, group.dim);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int at = kLate ? 0 : j;
    if constexpr (kLate) open_gate(kind, xs[j], gates[j], values[at], factors[at]);
    float weight[N];
    weight_loading[j].finish(group.weight<T>(p), column_of(j), group.dim, 1.0f, weight);
    out.put(j, gated_result<T>(p, rstd, weight, factors[at], values[at]));
  }
  out.end();
}

template <typename T>
__global__ void __launch_bounds__(kGatedNormForwardThreads)
    gated_rms_norm_streamed_kernel(const GatedRmsNormForward p) {
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<1> scratch[1];
  const GatedGroup group = group_of_thread(p, 1);
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
      store_vector<false>(gated_result<T>(p, rstd, weight, factors, values), group.out<T>(p.out),
                          column, group.dim);
    }
    if (pass == 0) rstd = rstd_of_group(p, group, 1, scratch, sum);
  }
}

// ---- backward ----

// Grid: shares * groups (times the cluster), the groups of a share side by side. Block:
// (threads_per_row, rows_per_block).

// The rows of a thread: every `step`-th from `first` on. All threads of a block go round equally
// often.
struct GatedRows {
  uint32_t group, share;
  int64_t first, step;

  __device__ __forceinline__ GatedRows(const GatedRmsNormBackward& p, int cluster) {
    const uint32_t groups = static_cast<uint32_t>(p.groups), block = blockIdx.x / cluster;
    const uint32_t shares = gridDim.x / cluster / groups;
    share = block / groups;
    group = block - share * groups;
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

template <typename T, typename Gate, bool kAnywhere>
__global__ void __launch_bounds__(kGatedNormBackwardThreads, 1)
    gated_rms_norm_backward_kernel(const GatedRmsNormBackward p, const RowTensors tensors,
                                   const int blocks_in_cluster) {
  constexpr bool kAligned = !kAnywhere;
  constexpr int N = 16 / sizeof(T), kVectors = kGatedNormBackwardVectors;
  using Stages = std::conditional_t<kAligned, PrivateStages<T, T, kVectors, kGatedNormTensors, 0>,
                                    ShiftedStages<T, T, kVectors, kGatedNormTensors, 0>>;
  extern __shared__ __align__(128) uint4 dynamic_memory[];
  __shared__ RowSumScratch<1> scratch[2];
  const int cluster = kAnywhere && kCompilesClusters ? blocks_in_cluster : 1;
  row_sum_start(cluster, scratch);
  const GatedRows rows(p, cluster);
  const Gate kind(p);
  const int dim = static_cast<int>(p.dim), step = static_cast<int>(blockDim.x) * N;
  const int slice_start = cluster > 1 ? cluster_rank() * kVectors * step : 0;  // within the group
  const auto column_of = [&](int j) {
    return slice_start + j * step + static_cast<int>(threadIdx.x) * N;
  };
  const int group_start = static_cast<int>(rows.group) * dim;
  Stages staged(dynamic_memory, tensors,
                RowColumns(group_start + dim, group_start + column_of(0), N, kVectors), rows.first,
                kGatedNormStages);
  const auto start = [&](int64_t row) {
    staged.start_next_row(row < p.rows, row);
    cp_async_commit_group();
  };
#pragma unroll
  for (int stage = 0; stage < kGatedNormStages; ++stage) {
    start(rows.first + stage * rows.step);
    staged.advance(1);
  }
  staged.advance(-kGatedNormStages);
  float weight[kVectors][N];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    load_values<kAligned>(GatedGroup(p, 0, rows.group).weight<T>(p), column_of(j), dim, 1.0f,
                          weight[j]);
  }
  row_sum_end(cluster);

  float next_rstd = load_rstd(p, rows.first, rows.group), sums[kVectors][N] = {};
  int turn = 0, stage = 0;
#pragma unroll 1
  for (int64_t row = rows.first; rows.go_on(p, row); row += rows.step) {
    const float rstd = next_rstd;
    next_rstd = load_rstd(p, row + rows.step, rows.group);
    cp_async_wait_group(kGatedNormStages - 1);
    if constexpr (kAnywhere) staged.join(row);

    const GatedGroup group(p, row, rows.group);
    float a[kVectors][N], slopes[kVectors][N], dot[1] = {};
    // A row past the end is what its stage had before.
    if (group.dim > 0) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float grad_out[N], x[N], t[N];
        staged.template read<T, 0>(j).to_floats(grad_out);
        staged.template read<T, 1>(j).to_floats(x);
        staged.template read<T, 2>(j).to_floats(a[j]);
        gated_terms<T>(kind, rstd, grad_out, x, a[j], slopes[j], t);
        dot[0] += weighted_sum(t, weight[j]);
#pragma unroll
        for (int k = 0; k < N; ++k) sums[j][k] += t[k];
      }
    }
    if (p.grad_x != nullptr || p.grad_gate != nullptr) {
      row_sum<true>(dot, cluster, scratch, turn);
      ++turn;
      const float mean = mean_of_group(dot[0], p.dim);
      const auto store = [&](int tensor, void* data, int j, const float(&values)[N]) {
        if (data == nullptr || column_of(j) >= group.dim) return;
        const Vector<T, N> result = Vector<T, N>::from_floats(values);
        if constexpr (kAligned) {
          result.store(group.out<T>(data) + column_of(j));
        } else {
          staged.put(tensor, j, result);
        }
      };
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float grad_out[N], x[N];
        if (kAligned && column_of(j) >= group.dim) continue;
        staged.template read<T, 0>(j).to_floats(grad_out);
        staged.template read<T, 1>(j).to_floats(x);
        gated_gradients(kind, rstd, mean, grad_out, weight[j], a[j], x, slopes[j]);
        store(0, p.grad_x, j, x);
        store(1, p.grad_gate, j, slopes[j]);
      }
      if constexpr (!kAligned) {
        // NOTE: lanes store together.
        warp_barrier();
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          void* data = i == 0 ? p.grad_x : p.grad_gate;
          if (data != nullptr) staged.store(i, group.out<T>(data) + column_of(0), group.dim > 0);
        }
        warp_barrier();  // before others are copied there
      }
    }
    start(row + kGatedNormStages * rows.step);
    const bool last = ++stage == kGatedNormStages;
    staged.advance(last ? 1 - kGatedNormStages : 1);
    if (last) stage = 0;
  }
  launch_dependents();
  if (p.partials == nullptr) return;

  // Add up the rows of the block, in order.
  float* partial = p.partials + (int64_t{rows.share} * p.groups + rows.group) * p.dim;
  const auto write = [&](int column, const auto& sum) {
    constexpr int kWidth = static_cast<int>(sizeof(sum) / sizeof(sum[0]));
    if constexpr (kAligned) {
      if (column < dim) Vector<float, kWidth>::from_floats(sum).store(partial + column);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (column + k < dim) partial[column + k] = sum[k];
      }
    }
  };
  if (blockDim.y == 1) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) write(column_of(j), sums[j]);
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
    write(c, sum);
  }
}

template <typename T>
__global__ void __launch_bounds__(kGatedNormBackwardThreads, 1)
    gated_rms_norm_backward_streamed_kernel(const GatedRmsNormBackward p) {
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<1> scratch[2];
  const GatedRows rows(p, 1);
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
            store_vector<false>(Vector<T, N>::from_floats(x), group.out<T>(data), column,
                                group.dim);
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

// f(the type of the gate, whether groups may start anywhere) of kernels that hold a group.
template <typename Params, typename F>
auto with_gate(const Params& p, const GatedRmsNormPolicy& policy, const F& f) {
  const std::false_type aligned;
  if (policy.anywhere) return f(TypeTag<AnyGate>{}, std::true_type{});
  if (p.activation != NormGate::silu) return f(TypeTag<AnyGate>{}, aligned);
  return p.norm_first ? f(TypeTag<SiluGate<true>>{}, aligned)
                      : f(TypeTag<SiluGate<false>>{}, aligned);
}

template <typename Kernel, typename... Args>
gpuError launch_groups(Kernel kernel, const GatedRmsNormPolicy& policy, int shared_bytes,
                       gpuStream stream, const Args&... args) {
  return gpu_launch(kernel, dim3(static_cast<unsigned>(policy.blocks * policy.cluster)),
                    dim3(policy.threads_per_row, policy.rows_per_block), shared_bytes,
                    policy.cluster, stream, args...);
}

}  // namespace

namespace gpu {

const char* gated_rms_norm_forward(const GatedRmsNormForward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const GatedRmsNormPolicy policy = gated_rms_norm_forward_policy(device_info(device), p);
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (policy.streamed)
      return launch_groups(&gated_rms_norm_streamed_kernel<T>, policy, 0, stream, p);
    return with_gate(p, policy, [&](auto gate, auto anywhere) {
      using Gate = typename decltype(gate)::type;
      return launch_groups(&gated_rms_norm_forward_kernel<T, Gate, anywhere>, policy, 0, stream, p,
                           policy.cluster);
    });
  }));
}

int64_t gated_rms_norm_backward_partials(const GatedRmsNormBackward& p, int device) {
  return gated_rms_norm_backward_policy(device_info(device), p).partials;
}

const char* gated_rms_norm_backward(const GatedRmsNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const GatedRmsNormBackwardPolicy policy = gated_rms_norm_backward_policy(device_info(device), p);
  RowTensors tensors{};
  tensors.add(p.grad_out, p.grad_out_stride);
  tensors.add(p.x, p.x_stride);
  tensors.add(p.gate, p.gate_stride);
  for (int i = 0; i < tensors.count; ++i)
    tensors.step[i] =
        policy.shares * policy.row.rows_per_block * tensors.stride[i] * dtype_size(p.dtype);
  const gpuError error = dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (policy.row.streamed) {
      return launch_groups(&gated_rms_norm_backward_streamed_kernel<T>, policy.row, 0, stream, p);
    }
    return with_gate(p, policy.row, [&](auto gate, auto anywhere) {
      using Gate = typename decltype(gate)::type;
      return launch_groups(&gated_rms_norm_backward_kernel<T, Gate, anywhere>, policy.row,
                           policy.shared_bytes, stream, p, tensors, policy.row.cluster);
    });
  });
  if (error != gpuSuccess || p.partials == nullptr) return message_of(error);
  const int64_t columns = p.groups * p.dim;
  return message_of(reduce_partials({p.partials, 1, policy.partials, 1, columns}, stream,
                                    WriteColumns{p.grad_weight, p.weight_dtype, columns}));
}

}  // namespace gpu
}  // namespace fuselage
