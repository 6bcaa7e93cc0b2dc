// The backward of group_norm on the GPU (formulas: norm/group_norm.h): four kernels, but for what
// norm/group_norm_backward_cluster.cu does in one:
//
//   sums       blocks leave A and B of every channel in a chunk
//   reduce     adds these up for each sample (common/reduce_partials.h)
//   means      the two of each group; other blocks add up grad_weight and grad_bias over samples
//   gradient   writes grad_x
//
// Flat, a block has a plane of positions of one channel, or a chunk of it; small planes share one.
// Channels last it has some positions of all channels, or of a tile of them: of a chunk, or of
// several.
#include "norm/group_norm.h"

#include "common/dispatch.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "norm/group_norm_gradient.h"
#include "norm/group_norm_policy.h"

namespace fuselage {
namespace {

// a and x - mean of the next vectors.
template <typename T, int N, typename Copies, typename Start, int kChannels>
__device__ __forceinline__ void copied_terms(Copies& copies, const Start& start,
                                             const GroupNormBackward& p,
                                             const ScaledFactors<kChannels>& factors, float (&a)[N],
                                             float (&from_mean)[N]) {
  Vector<T, N> vectors[2];
  copies.next(vectors, start);
  unpack(vectors[0], p.dtype, a);
  unpack(vectors[1], p.dtype, from_mean);
  scaled_terms_of<T>(factors, p.silu, a, from_mean);
}

// ---- flat ----

struct PlaneDivisors {
  Divisor chunks, channels, group_channels;
};

// A plane of a thread: a chunk of the positions of a channel of a sample.
template <typename T>
struct Plane {
  int64_t chunk, sample, channel, group;
  int64_t first;  // of the positions
  bool exists;
  int size;  // of the chunk; 0 where there is no such plane
  int span;  // of all threads of the block, which go round equally often

  __device__ __forceinline__ Plane(const GroupNormBackward& p, const PlaneDivisors& divisors,
                                   unsigned block) {
    const int64_t planes = quotient(block, divisors.chunks);
    chunk = block - planes * p.chunks;
    const int64_t row = planes * blockDim.y + threadIdx.y;
    exists = row < p.samples * p.channels;
    sample = exists ? quotient(row, divisors.channels) : 0;
    channel = exists ? row - sample * p.channels : 0;
    group = quotient(channel, divisors.group_channels);
    first = chunk * p.chunk_positions;
    span = static_cast<int>(min(p.chunk_positions, p.positions - first));
    size = exists ? span : 0;
  }
  template <typename U>
  __device__ __forceinline__ U* start(const GroupNormBackward& p, U* data, int64_t stride) const {
    return data + sample * stride + channel * p.positions + first;
  }
  // NOTE: the same for all planes of a block.
  __device__ __forceinline__ bool aligned(const GroupNormBackward& p, const T* data,
                                          int64_t stride) const {
    constexpr int N = 16 / sizeof(T);
    if (blockDim.y == 1) return is_aligned_16(start(p, data, stride));
    return is_aligned_16(data) && stride % N == 0 && p.positions % N == 0;
  }
};

// Grid: the chunks of every blockDim.y planes. Block: (threads of a plane, planes).
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kGroupNormRowsThreads, kGroupNormPlanesBackwardBlocks)
    group_norm_planes_kernel(const GroupNormBackward p, const PlaneDivisors divisors) {
  constexpr int N = 16 / sizeof(T), kDepth = group_norm_copies_ahead(kCompilesAsyncCopy);
  using V = Vector<T, N>;
  extern __shared__ uint4 shared[];
  const Plane<T> plane(p, divisors, kGradient ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const ScaledFactorLoading loading(p, plane.sample, plane.channel, plane.group);
  const int64_t out_stride = p.channels * p.positions;
  const T* all_x = static_cast<const T*>(p.x);
  const T* all_grad_out = static_cast<const T*>(p.grad_out);
  T* all_grad_x = static_cast<T*>(p.grad_x);
  const T* x = plane.start(p, all_x, p.x_stride);
  const T* grad_out = plane.start(p, all_grad_out, p.grad_out_stride);
  const bool aligned =
      plane.aligned(p, all_x, p.x_stride) && plane.aligned(p, all_grad_out, p.grad_out_stride);
  const int step = static_cast<int>(blockDim.x) * N;
  const int count = (plane.span + step - 1) / step;
  CopiesAhead<T, 2, kDepth> copies(shared, count);
  int next = static_cast<int>(threadIdx.x) * N;
  // Past the end vectors are zero. NOTE: where they are not aligned, all lanes of the warp load
  // together.
  const auto start = [&](V* targets, int apart) {
    if (aligned) {
      const int bytes = min(max(plane.size - next, 0), N) * static_cast<int>(sizeof(T));
      cp_async_zfill<16>(targets, grad_out + next, bytes);
      cp_async_zfill<16>(targets + apart, x + next, bytes);
    } else {
      targets[0] = load<false, N>(grad_out, next, plane.size);
      targets[apart] = load<false, N>(x, next, plane.size);
    }
    next += step;
  };
  copies.fill(start);
  [[maybe_unused]] float2 means{};
  if constexpr (kGradient) {
    grid_dependency_wait();
    means = pair_of_group(p.means, plane.sample * p.groups + plane.group);
  }
  const ScaledFactors<1> factors = loading.factors(p);
  const auto next_terms = [&](float(&a)[N], float(&from_mean)[N]) {
    copied_terms<T>(copies, start, p, factors, a, from_mean);
  };

  if constexpr (kGradient) {
    T* grad_x = plane.start(p, all_grad_x, out_stride);
    const bool writes_aligned = plane.aligned(p, all_grad_x, out_stride);
    means = scaled(means, factors.rstd[0]);
    int column = static_cast<int>(threadIdx.x) * N;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float a[N], from_mean[N];
      next_terms(a, from_mean);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = gradient_of(a[k], from_mean[k], factors.factor[0], means);
      store_vector(pack<T>(a, p.dtype), grad_x, writes_aligned, column, plane.size);
      column += step;
    }
  } else {
    float sums[2] = {};
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float a[N], from_mean[N], of_vector[2] = {};
      next_terms(a, from_mean);
      // NOTE: past the end grad_out is zero.
#pragma unroll
      for (int k = 0; k < N; ++k) {
        of_vector[0] += a[k];
        of_vector[1] = fmaf(a[k], from_mean[k], of_vector[1]);
      }
      sums[0] += of_vector[0];
      sums[1] += of_vector[1];
    }
    __shared__ RowSumScratch<2> scratch[1];
    row_sum<false>(sums, 1, scratch, 0);
    if (threadIdx.x == 0 && plane.exists) {
      float* partial =
          p.partials + (plane.sample * p.chunks + plane.chunk) * 2 * p.channels + plane.channel;
      partial[0] = sums[0];
      partial[p.channels] = factors.rstd[0] * sums[1];
    }
    launch_dependents();
  }
}

// ---- channels last ----

// A and B of a block's positions: those of each thread's channels, added up over the rows of
// threads in order, as A and B of a chunk. All threads of the block call together; before the next
// time they have met.
template <typename T, int N = GroupNormRows<T>::N>
__device__ __forceinline__ void store_sums(const GroupNormBackward& p, const GroupNormRows<T>& rows,
                                           const Divisor& group_channels, const float (&sums)[2][N],
                                           float2* of_threads, float* partial) {
  const int columns = static_cast<int>(blockDim.x), width = columns * N;
  const int threads = columns * static_cast<int>(blockDim.y), pitch = threads | 1;
  const int own = thread_of_block();
#pragma unroll
  for (int k = 0; k < N; ++k) of_threads[k * pitch + own] = make_float2(sums[0][k], sums[1][k]);
  __syncthreads();
  const int tile_first = static_cast<int>(blockIdx.y) * width;
#pragma unroll 1
  for (int i = own; i < width && tile_first + i < rows.channels; i += threads) {
    const int64_t channel = tile_first + i, group = quotient(channel, group_channels);
    const float rstd = pair_of_group(p.statistics, rows.sample * p.groups + group).y;
    const float2* of_column = of_threads + i % N * pitch + i / N;
    float2 sum = *of_column;
#pragma unroll 4
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) add(sum, of_column[y * columns]);
    partial[channel] = sum.x;
    partial[p.channels + channel] = rstd * sum.y;
  }
  __syncthreads();
}

// How a sample's parts, which have sums of their own, are dealt to blocks.
struct RowParts {
  int parts, of_block;
  int rows;  // of a thread in a part
};

// A block has some parts of a sample, one after the other: p.chunks and p.chunk_positions are the
// blocks of a sample, and what they have. Gradients are written from the last position to the
// first: what was read last is still in the L2 cache.
// Grid: (blocks of all samples, tiles). Block: (threads_x, threads_y).
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kGroupNormRowsThreads, kGroupNormRowsBackwardBlocks)
    group_norm_rows_backward_kernel(const GroupNormBackward p, const RowParts parts,
                                    const Divisor chunks, const Divisor group_channels) {
  constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  extern __shared__ uint4 shared[];
  const GroupNormRows<T> rows(p, chunks, blockIdx.x);
  const ScaledFactorsLoading<T> loading(p, rows, group_channels);
  const int count = rows.count();
  int64_t step = int64_t{blockDim.y} * p.channels, from = 0;
  if constexpr (kGradient) {
    from = (count - 1) * step;
    step = -step;
  }
  const T* x = rows.start(static_cast<const T*>(p.x), p.x_stride) + from;
  const T* grad_out = rows.start(static_cast<const T*>(p.grad_out), p.grad_out_stride) + from;
  const bool aligned = rows.aligned(x) && rows.aligned(grad_out);
  constexpr int kDepth = group_norm_copies_ahead(kCompilesAsyncCopy);
  CopiesAhead<T, 2, kDepth> copies(shared, count);
  const auto start = [&](V* targets, int apart) {
    rows.start_copy(targets, grad_out, aligned);
    rows.start_copy(targets + apart, x, aligned);
    grad_out += step;
    x += step;
  };
  copies.fill(start);
  const ScaledFactors<N> factors = loading.factors(p, rows);
  const auto next_terms = [&](float(&a)[N], float(&from_mean)[N]) {
    copied_terms<T>(copies, start, p, factors, a, from_mean);
  };

  if constexpr (kGradient) {
    T* grad_x = rows.start(static_cast<T*>(p.grad_x), p.channels * p.positions) + from;
    const bool writes_aligned = rows.aligned(grad_x);
    grid_dependency_wait();
    float2 means[N];
    pairs_of_channels<T>(p, rows, group_channels, p.means, means);
#pragma unroll
    for (int k = 0; k < N; ++k) means[k] = scaled(means[k], factors.rstd[k]);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float a[N], from_mean[N];
      next_terms(a, from_mean);
#pragma unroll
      for (int k = 0; k < N; ++k)
        a[k] = gradient_of(a[k], from_mean[k], factors.factor[k], means[k]);
      rows.write(pack<T>(a, p.dtype), grad_x, writes_aligned);
      grad_x += step;
    }
  } else {
    float2* of_threads = reinterpret_cast<float2*>(shared + kDepth * 2 * copies.threads);
    const int64_t first = rows.chunk * parts.of_block;
    const int64_t last = min(first + parts.of_block, int64_t{parts.parts});
    int left = count;
#pragma unroll 1
    for (int64_t part = first; part < last; ++part) {
      float sums[2][N] = {};
      const int here = min(left, parts.rows);
      left -= here;
#pragma unroll 1
      for (int i = 0; i < here; ++i) {
        float a[N], from_mean[N];
        next_terms(a, from_mean);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          sums[0][k] += a[k];
          sums[1][k] = fmaf(a[k], from_mean[k], sums[1][k]);
        }
      }
      store_sums<T>(p, rows, group_channels, sums, of_threads,
                    p.partials + (rows.sample * parts.parts + part) * 2 * p.channels);
    }
    launch_dependents();
  }
}

// ---- sums of channels, and means of groups ----

// Writes A and B of a sample's channels, if `sums` is not null, and the gradients that they are.
struct FinishGroupNorm {
  static constexpr int kKinds = 2, kTotals = 0;
  struct Columns {};
  float* sums;  // [samples, 2, channels]
  void *grad_weight, *grad_bias;
  DType weight_dtype, bias_dtype;
  int64_t channels;

  __device__ __forceinline__ Columns load(int64_t, bool) const { return {}; }
  __device__ __forceinline__ void group(const Columns&, int64_t sample, int64_t column,
                                        const float (&of_sample)[2], float (&)[1]) const {
    if (sums != nullptr) {
      sums[2 * sample * channels + column] = of_sample[0];
      sums[(2 * sample + 1) * channels + column] = of_sample[1];
    }
    if (grad_bias != nullptr) store_value(grad_bias, bias_dtype, column, of_sample[0]);
    if (grad_weight != nullptr) store_value(grad_weight, weight_dtype, column, of_sample[1]);
  }
};

constexpr int kGroupNormMeansThreads = 256;

// Adds up A and B over the samples: a channel a lane, of whose samples each warp has some.
__device__ __forceinline__ void write_totals(const GroupNormBackward& p, int block) {
  __shared__ float2 of_warps[kGroupNormMeansThreads];
  constexpr int kWarps = kGroupNormMeansThreads / kWarpSize;
  const int thread = thread_of_block(), warp = thread / kWarpSize;
  const int64_t channel = int64_t{block} * kWarpSize + thread % kWarpSize;
  float2 total{};
  if (channel < p.channels) {
#pragma unroll 8
    for (int64_t sample = warp; sample < p.samples; sample += kWarps) {
      const float* sums = p.sums + 2 * sample * p.channels + channel;
      add(total, make_float2(sums[0], sums[p.channels]));
    }
  }
  of_warps[thread] = total;
  __syncthreads();
  if (warp > 0 || channel >= p.channels) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) add(total, of_warps[i * kWarpSize + thread]);
  write_gradients(p, channel, total);
}

// Means of groups; and, by the blocks past `mean_blocks`, the gradients of weight and bias.
// Block: (threads of a group, groups).
__global__ void __launch_bounds__(kGroupNormMeansThreads)
    group_norm_means_kernel(const GroupNormBackward p, const Divisor groups,
                            const int mean_blocks) {
  __shared__ RowSumScratch<2> scratch[1];
  const int totals_block = static_cast<int>(blockIdx.x) - mean_blocks;
  const int64_t index = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool exists = index < p.samples * p.groups;
  const int64_t sample = exists ? quotient(index, groups) : 0;
  const int64_t first = (index - sample * p.groups) * p.group_channels;
  const int64_t count = exists && totals_block < 0 ? p.group_channels : 0;
  const auto weight_of = [&](int64_t i) {
    return RuntimeValueLoading(i < count ? p.weight : nullptr, p.weight_dtype, first + i);
  };
  RuntimeValueLoading weight = weight_of(threadIdx.x);
  grid_dependency_wait();
  if (totals_block >= 0) {
    write_totals(p, totals_block);
    return;
  }
  const float* sums = p.sums + 2 * sample * p.channels + first;
  float means[2] = {};
#pragma unroll 2
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const float a = sums[i], b = sums[p.channels + i];
    const float factor = weight.finish(p.weight, p.weight_dtype, 1.0f);
    weight = weight_of(i + blockDim.x);
    means[0] = fmaf(factor, a, means[0]);
    means[1] = fmaf(factor, b, means[1]);
  }
  row_sum<false>(means, 1, scratch, 0);
  if (threadIdx.x == 0 && exists) {
    const float size = static_cast<float>(p.group_size);
    reinterpret_cast<float2*>(p.means)[index] = make_float2(means[0] / size, means[1] / size);
  }
  launch_dependents();
}

// ---- launchers ----

int64_t plane_blocks(const GroupNormBackward& p) {
  return ceil_div(p.samples * p.channels, group_norm_backward_policy(p).threads_y) * p.chunks;
}

template <typename T, bool kGradient>
gpuError launch_chunks(const GroupNormBackward& p, int device, gpuStream stream) {
  const Divisor group_channels(p.group_channels);
  const GroupNormPolicy policy = group_norm_backward_policy(p);
  const dim3 block(policy.threads_x, policy.threads_y);
  const DeviceInfo& info = device_info(device);
  if (p.channels_last) {
    const int of_block = group_norm_rows_parts_of_block(p, info, policy);
    const RowParts parts{static_cast<int>(p.chunks), of_block,
                         static_cast<int>(p.chunk_positions) / policy.threads_y};
    GroupNormBackward blocks = p;
    blocks.chunks = ceil_div(p.chunks, of_block);
    blocks.chunk_positions = p.chunk_positions * of_block;
    const dim3 grid(static_cast<unsigned>(p.samples * blocks.chunks),
                    static_cast<unsigned>(policy.tiles));
    return gpu_launch_as(kGradient, &group_norm_rows_backward_kernel<T, kGradient>, grid, block,
                         group_norm_backward_bytes(p, info, policy, !kGradient), 1, stream, blocks,
                         parts, Divisor(blocks.chunks), group_channels);
  }
  const dim3 grid(static_cast<unsigned>(plane_blocks(p)));
  return gpu_launch_as(kGradient, &group_norm_planes_kernel<T, kGradient>, grid, block,
                       group_norm_backward_bytes(p, info, policy, false), 1, stream, p,
                       PlaneDivisors{p.chunks, p.channels, group_channels});
}

// Adds up the parts of each sample: into p.sums, and into gradients where there is one sample.
gpuError launch_reduce(const GroupNormBackward& p, gpuStream stream) {
  const bool alone = p.samples == 1;
  const FinishGroupNorm finish{p.sums,
                               alone ? p.grad_weight : nullptr,
                               alone ? p.grad_bias : nullptr,
                               p.weight_dtype,
                               p.bias_dtype,
                               p.channels};
  return reduce_partials({p.partials, p.samples, p.chunks, 2, p.channels}, stream, finish);
}

// Means, if grad_x is needed, and gradients if launch_reduce has not written them.
gpuError launch_means(const GroupNormBackward& p, gpuStream stream) {
  const bool adds =
      (p.samples > 1 || p.chunks == 1) && (p.grad_weight != nullptr || p.grad_bias != nullptr);
  const int threads =
      std::clamp(next_power_of_two(p.group_channels), kWarpSize, kGroupNormMeansThreads);
  const dim3 block(threads, kGroupNormMeansThreads / threads);
  const int64_t mean_blocks = p.grad_x == nullptr ? 0 : ceil_div(p.samples * p.groups, block.y);
  const int64_t blocks = mean_blocks + (adds ? ceil_div(p.channels, kWarpSize) : 0);
  if (blocks == 0) return gpuSuccess;
  return gpu_launch_after(&group_norm_means_kernel, dim3(static_cast<unsigned>(blocks)), block,
                          stream, p, Divisor(p.groups), static_cast<int>(mean_blocks));
}

gpuError launch_cluster(const GroupNormBackward& p, const GroupNormPolicy& policy,
                        gpuStream stream) {
  const gpuError error = launch_group_norm_backward_cluster(p, policy, stream);
  const bool is_done = p.samples == 1 || (p.grad_weight == nullptr && p.grad_bias == nullptr);
  if (error != gpuSuccess || is_done) return error;
  const FinishGroupNorm finish{nullptr,        p.grad_weight, p.grad_bias,
                               p.weight_dtype, p.bias_dtype,  p.channels};
  return reduce_partials({p.partials, 1, p.samples, 2, p.channels}, stream, finish);
}

GroupNormPolicy policy_of(const GroupNormBackward& p, int device) {
  GroupNormPolicy policy{};
  const bool cluster = group_norm_backward_cluster_policy(p, device_info(device), policy);
  return cluster ? policy : group_norm_backward_policy(p);
}

}  // namespace

namespace gpu {

void group_norm_backward_chunks(GroupNormBackward& p, int device) {
  group_norm_set_chunks(p, policy_of(p, device));
}

const char* group_norm_backward(const GroupNormBackward& given, int device, void* raw_stream) {
  GroupNormBackward p = given;
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const GroupNormPolicy policy = policy_of(p, device);
  if (policy.cluster) return message_of(launch_cluster(p, policy, stream));
  const int64_t groups = p.samples * p.groups;
  const int64_t blocks = p.channels_last ? p.samples * p.chunks : plane_blocks(p);
  if (std::max(blocks, groups) > kGroupNormMostBlocks) return kGroupNormTooMany;
  const auto launch = [&](auto gradient) {
    return dispatch_size(p.dtype, [&](auto tag) {
      return launch_chunks<typename decltype(tag)::type, decltype(gradient)::value>(p, device,
                                                                                    stream);
    });
  };
  gpuError error = launch(std::false_type{});
  if (p.chunks == 1) {
    p.sums = p.partials;  // there is nothing to add up
  } else if (error == gpuSuccess) {
    error = launch_reduce(p, stream);
  }
  if (error == gpuSuccess) error = launch_means(p, stream);
  if (error != gpuSuccess || p.grad_x == nullptr) return message_of(error);
  return message_of(launch(std::true_type{}));
}

}  // namespace gpu
}  // namespace fuselage
