// cross_entropy on the GPU, and the backward of the family: formulas in loss/cross_entropy.h.
//
// The forward reads a row once. A thread keeps the maximum of its logits, and the sum of e^(logit -
// maximum); a larger maximum scales the sum. The threads of a row are a part of a warp, a warp, a
// block or a cluster (loss/cross_entropy_policy.h). Exponentials are those of the hardware. A
// second kernel, of one block, adds up the rows' losses in float64.
//
// The backward reads a row again, and writes its gradient, each element by itself.

#include "loss/cross_entropy_policy.h"
#include "loss/loss_row.h"

namespace fuselage {
namespace {

// ---- the forward ----

// Of a part of a row: `size` logits from `data` on, none where size <= 0. The lanes of a warp go
// round equally often: they load together.
template <typename T, int kVectors, bool kAligned>
__device__ __forceinline__ RunningSums read_part(const CrossEntropyForward& p, const T* data,
                                                 int size) {
  using Columns = LogitColumns<T, kVectors>;
  constexpr int N = Columns::N;
  const Columns columns;
  RunningSums sums = RunningSums::none();
  if (size <= 0) size = -N;
  const T* source = data + columns.first;
  int left = size - columns.first;  // -N or less where there is nothing
  do {
    RowLoading<T, kVectors, kAligned> loading;
    loading.start(source, left);
    float values[kVectors][N];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) unpack(loading.finish(j), p.in.dtype, values[j]);
    sums.add(p, values, left);
    source += columns.step;
    left -= columns.step;
  } while (left + columns.first > 0);
  return sums;
}

// The sums of a row of the block or cluster, in thread 0 of the first block. Threads keep those of
// their parts in shared memory, so that the next part is not waited for.
template <typename T, int kVectors, bool kAligned>
__device__ __forceinline__ RunningSums read_row(const CrossEntropyForward& p, const T* data,
                                                const LossPolicy& policy, int cluster, int rank) {
  extern __shared__ RunningSums of_threads[];  // [part][thread]
  __shared__ RunningSums of_warps[kLossMostParts][kLossThreads / kWarpSize];
  __shared__ RunningSums of_parts[kLossMostParts];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize;
#pragma unroll 1
  for (int i = rank; i < policy.parts; i += cluster) {
    const int begin = i * policy.part;  // at most the vocabulary and some parts, which is 2^28
    const int size = min(static_cast<int>(p.in.vocab) - begin, policy.part);
    of_threads[i * blockDim.x + threadIdx.x] =
        read_part<T, kVectors, kAligned>(p, data + begin, size);
  }
#pragma unroll 1
  for (int i = rank; i < policy.parts; i += cluster) {
    const RunningSums sums = warp_join(of_threads[i * blockDim.x + threadIdx.x], kWarpSize);
    if (warps == 1) return sums;
    if (lane == 0) of_warps[i][warp] = sums;
  }
  __syncthreads();
  const int own = rank + warp * cluster;  // a warp joins the sums of a part
  if (own < policy.parts) {
    RunningSums sums = RunningSums::none();
    if (lane < warps) sums = of_warps[own][lane];
    sums = warp_join(sums, kWarpSize);
    if (lane == 0) of_parts[own] = sums;
  }
  cluster > 1 ? cluster_sync() : __syncthreads();
  RunningSums sums = RunningSums::none();
  if (rank == 0 && warp == 0) {
    if (lane < policy.parts)
      sums = cluster > 1 ? *map_shared_rank(&of_parts[lane], lane % cluster) : of_parts[lane];
    sums = warp_join(sums, kWarpSize);
  }
  if (cluster > 1) cluster_sync();  // NOTE: a block whose memory is read must not end.
  return sums;
}

template <typename T, int kVectors, bool kAligned>
__global__ void __launch_bounds__(kLossThreads, bounded_blocks(kLossThreads, kAligned ? 3 : 2))
    forward_kernel(const CrossEntropyForward p, const LossPolicy policy, const int cluster) {
  const int64_t row =
      int64_t{blockIdx.x / static_cast<unsigned>(cluster)} * blockDim.y + threadIdx.y;
  const int rank = cluster == 1 ? 0 : cluster_rank();
  const bool is_read = is_counted(p.in, row), is_first = rank == 0 && threadIdx.x == 0;
  const T* data = row_of<T>(p.in, is_read ? row : 0);
  RunningSums sums = RunningSums::none();
  if constexpr (kVectors == 1) {  // all lanes of a warp
    const int size = is_read ? static_cast<int>(p.in.vocab) : 0;
    sums = warp_join(read_part<T, 1, kAligned>(p, data, size), lanes_of_row<1>());
  } else if (is_read) {  // all threads of a cluster
    sums = read_row<T, kVectors, kAligned>(p, data, policy, cluster, rank);
  }
  if (!is_first || row >= p.in.rows) return;
  if (is_read) {
    write_loss(p, row, sums, target_logit(p.in, row));
  } else {
    write_nothing(p, row);
  }
}

// ---- the sum of the losses ----

__global__ void __launch_bounds__(kLossSumThreads) finish_kernel(const CrossEntropyForward p) {
  __shared__ double sums[kLossSumThreads];
  __shared__ int64_t counts[kLossSumThreads];
  grid_dependency_wait();
  double sum = 0.0;
  int64_t count = 0;
#pragma unroll 1
  for (int64_t row = threadIdx.x; row < p.in.rows; row += kLossSumThreads) {
    sum += p.losses[row];
    count += target_of(p.in, row) != p.in.ignore_index;
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
#pragma unroll 1
  for (int step = kLossSumThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x >= step) continue;
    sums[threadIdx.x] += sums[threadIdx.x + step];
    counts[threadIdx.x] += counts[threadIdx.x + step];
  }
  if (threadIdx.x != 0) return;
  const bool is_mean = p.reduction == Reduction::mean;
  *p.loss = static_cast<float>(is_mean ? sums[0] / static_cast<double>(counts[0]) : sums[0]);
  if (p.count != nullptr) *p.count = static_cast<float>(counts[0]);
}

// ---- the backward ----

// From logits of T to gradients of U.
template <typename T, typename U, int kVectors, bool kAligned>
__global__ void __launch_bounds__(kGradientThreads, 4)
    gradient_kernel(const LossBackward p, const LossGradientPolicy policy) {
  using Columns = LogitColumns<T, kVectors>;
  constexpr int N = Columns::N;
  const Columns columns;
  const unsigned column_blocks = static_cast<unsigned>(policy.column_blocks);
  const int64_t row = int64_t{blockIdx.x / column_blocks} * policy.rows_per_block + threadIdx.y;
  int column = static_cast<int>(blockIdx.x % column_blocks) * policy.columns_per_block;
  column += columns.first;
  const bool is_row = row < p.in.rows, is_read = is_counted(p.in, row);
  const T* data = row_of<T>(p.in, is_row ? row : 0);
  U* grad_row = static_cast<U*>(p.grad_logits) + (is_row ? row : 0) * p.grad_stride;

  GradientRow own(p);
#pragma unroll 1
  for (int turn = 0; turn < policy.turns; ++turn, column += columns.step) {
    const int left = is_row ? static_cast<int>(p.in.vocab) - column : -N;
    RowLoading<T, kVectors, kAligned> loading;
    loading.start(data + column, is_read ? left : -N);
    if (turn == 0 && is_read) {
      own.read(p, row);
      own.finish(p, p.statistics[row]);
    }
    RowStoring<U, N, kVectors, kAligned> storing(grad_row + column, left);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float x[N], grads[N];
      unpack(loading.finish(j), p.in.dtype, x);
      finish_logits(x, N, p.in.softcap, 0.0f);
      own.differentiate(x, column + j * kWarpSize * N, grads);
      storing.put(j, pack<U>(grads, p.grad_dtype));
    }
    storing.end();
  }
}

// ---- the factor of gradients that were made in the forward ----

template <typename T>
__global__ void __launch_bounds__(kMultiplyThreads) multiply_kernel(const Multiply p) {
  const float factor = *p.factor;
  if (factor == 1.0f) return;
  constexpr int N = 16 / static_cast<int>(sizeof(T));
  using V = Vector<T, N>;
  T* x = static_cast<T*>(p.x);
  const int64_t first = int64_t{blockIdx.x} * kMultiplyThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kMultiplyThreads;
  const int64_t vectors = V::shift_of(x) == 0 ? p.count / N : 0;
#pragma unroll 1
  for (int64_t i = first; i < vectors; i += step) {
    float values[N];
    V::load(x + i * N).to_floats(values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] *= factor;
    V::from_floats(values).store(x + i * N);
  }
#pragma unroll 1
  for (int64_t i = vectors * N + first; i < p.count; i += step)
    x[i] = from_float<T>(to_float(x[i]) * factor);
}

// ---- launchers ----

template <typename T>
constexpr int kVectorSize = 16 / static_cast<int>(sizeof(T));

template <typename T>
gpuError launch_forward(const CrossEntropyForward& p, const DeviceInfo& device, gpuStream stream) {
  const LossPolicy policy = loss_policy(p.in.vocab, kVectorSize<T>);
  const int cluster = loss_cluster(device, p.in.rows, policy);
  const int64_t blocks = ceil_div(p.in.rows, policy.rows_per_block) * cluster;
  if (blocks > kMaxLossBlocks) return gpuErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks));
  const dim3 block(policy.threads, policy.rows_per_block);
  const auto kernel = policy.vectors == 1 ? &forward_kernel<T, 1, false>
                      : is_aligned(p.in)  ? &forward_kernel<T, kLossVectors, true>
                                          : &forward_kernel<T, kLossVectors, false>;
  const int shared_bytes = policy.parts * policy.threads * static_cast<int>(sizeof(RunningSums));
  return gpu_launch(kernel, grid, block, shared_bytes, cluster, stream, p, policy, cluster);
}

template <typename T, typename U>
gpuError launch_backward(const LossBackward& p, const LossGradientPolicy& policy,
                         gpuStream stream) {
  const dim3 grid(static_cast<unsigned>(policy.row_blocks * policy.column_blocks));
  const dim3 block(policy.threads, policy.rows_per_block);
  const auto kernel = policy.vectors == 1 ? &gradient_kernel<T, U, 1, false>
                      : is_aligned(p)     ? &gradient_kernel<T, U, kLossVectors, true>
                                          : &gradient_kernel<T, U, kLossVectors, false>;
  return gpu_launch(kernel, grid, block, 0, 1, stream, p, policy);
}

constexpr const char* kTooManyRows = "`logits` has too many rows for one launch";

}  // namespace

namespace gpu {

const char* cross_entropy_forward(const CrossEntropyForward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  if (p.in.rows > kMaxLossBlocks) return kTooManyRows;
  gpuError error = gpuSuccess;
  if (p.in.rows > 0) {
    error = dispatch_size(p.in.dtype, [&](auto tag) {
      return launch_forward<typename decltype(tag)::type>(p, device_info(device), stream);
    });
  }
  if (error != gpuSuccess || p.reduction == Reduction::none) return message_of(error);
  return message_of(gpu_launch_after(&finish_kernel, dim3(1), dim3(kLossSumThreads), stream, p));
}

const char* multiply(const Multiply& p, int device, void* stream) {
  const int64_t most = int64_t{device_info(device).multiprocessors} * kMultiplyBlocks;
  const int64_t blocks = std::min(ceil_div(p.count, kMultiplyThreads), most);
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    return gpu_launch(&multiply_kernel<typename decltype(tag)::type>,
                      dim3(static_cast<unsigned>(blocks)), dim3(kMultiplyThreads), 0, 1,
                      static_cast<gpuStream>(stream), p);
  }));
}

const char* loss_backward(const LossBackward& p, int device, void* raw_stream) {
  const LossGradientPolicy policy =
      loss_gradient_policy(device_info(device), p.in.rows, p.in.vocab, 16 / dtype_size(p.in.dtype));
  if (policy.row_blocks * policy.column_blocks > kMaxLossBlocks) return kTooManyRows;
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  if (p.grad_dtype != p.in.dtype)
    return message_of(launch_backward<float, bfloat16>(p, policy, stream));
  return message_of(dispatch_size(p.in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_backward<T, T>(p, policy, stream);
  }));
}

}  // namespace gpu
}  // namespace fuselage
