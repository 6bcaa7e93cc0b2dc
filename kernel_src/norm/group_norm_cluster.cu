// The forward of group_norm on GPUs with clusters, where a cluster's shared memory holds a group,
// or, channels last, a tile of whole groups: x is read once (formulas: norm/group_norm.h).
//
//   copy      a block has a chunk of the cluster's elements; its threads copy their vectors to
//             shared memory, all at once
//   moments   of these vectors, as they arrive; warps send theirs to all blocks (DSMEM)
//   apply     from shared memory
//
// A thread reads nothing but what it has copied itself. Vectors that are not aligned are copied by
// the element: the order is the same, so that bits do not depend on where a tensor starts.
#include "common/dispatch.h"
#include "norm/group_norm_device.h"
#include "norm/group_norm_policy.h"

namespace fuselage {
namespace {

constexpr int kParts = kGroupNormClusterParts;

// Moments of the parts of a cluster: in each block, of every group as many as warps share it.
struct ClusterParts {
  GroupMoments of_blocks[kMaxCluster * kParts];

  // To all blocks, which must have started; by a warp whose lanes all have `m`.
  __device__ __forceinline__ void send(const GroupMoments& m, int part, int cluster) {
    const int lane = thread_of_block() % kWarpSize;
    if (lane < cluster) *map_shared_rank(&of_blocks[part * cluster + cluster_rank()], lane) = m;
  }
  // Of a group, which has `count` parts in each block from `first` on: in all lanes of a warp.
  __device__ __forceinline__ GroupMoments merge(int first, int count, int cluster) const {
    const int lane = thread_of_block() % kWarpSize;
    GroupMoments m{0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = lane; i < count * cluster; i += kWarpSize)
      m = merged(m, of_blocks[first * cluster + i]);
    return warp_moments(m);
  }
};

// A thread's vectors in shared memory.
template <typename T>
struct HeldVectors {
  static constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  V* own;  // the first; others follow `threads` further on
  int threads;

  __device__ __forceinline__ HeldVectors(void* shared)
      : own(static_cast<V*>(shared) + thread_of_block()),
        threads(static_cast<int>(blockDim.x * blockDim.y)) {}

  // Starts to copy `count` vectors, `step` elements apart.
  __device__ __forceinline__ void start(const T* source, int64_t step, int count) {
    const bool aligned = is_aligned_16(source);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i == half(count)) cp_async_commit_group();
      if (aligned) {
        cp_async<16>(own + i * threads, source);
      } else {
        own[i * threads] = V::load_elements(source, 0, N);
      }
      source += step;
    }
    cp_async_commit_group();
  }
  // f(values) for each of them, as it arrives: the first half while the second is on its way.
  template <typename F>
  __device__ __forceinline__ void for_each(int count, DType dtype, const F& f) {
    cp_async_wait_group(count > 1 ? 1 : 0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i == half(count)) cp_async_wait_group(0);
      float values[N];
      unpack(own[i * threads], dtype, values);
      f(values);
    }
  }

 private:
  static __device__ __forceinline__ int half(int count) { return (count + 1) / 2; }
};

// Grid: clusters, one a group of a sample. p.chunk_positions: vectors of a block.
template <typename T>
__global__ void __launch_bounds__(kGroupNormClusterThreads, kGroupNormClusterBlocks)
    group_norm_flat_cluster_kernel(const GroupNormForward p, const int cluster,
                                   const Divisor groups) {
  if constexpr (!kCompilesClusters) return;
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  __shared__ ClusterParts parts;
  cluster_arrive_relaxed();
  const int rank = cluster_rank(), threads = static_cast<int>(blockDim.x);
  const unsigned group = blockIdx.x / static_cast<unsigned>(cluster);
  const int64_t sample = quotient(group, groups);
  const int64_t first_channel = (group - sample * p.groups) * p.group_channels;
  // The vectors of this block, within the group, and how many of them this thread has.
  const int of_block = static_cast<int>(p.chunk_positions), start = rank * of_block;
  const int left = min(of_block, static_cast<int>(p.group_size / N) - start);
  const int count = max(left - static_cast<int>(threadIdx.x) + threads - 1, 0) / threads;
  const int first = (start + static_cast<int>(threadIdx.x)) * N;
  const int64_t offset = first_channel * p.positions + first;
  HeldVectors<T> held(shared);
  held.start(static_cast<const T*>(p.x) + sample * p.x_stride + offset, threads * N, count);

  // Weights and biases of its channels, behind the vectors.
  const int positions = static_cast<int>(p.positions);
  const int block_channel = start * N / positions;
  const int channels = left > 0 ? ((start + left) * N - 1) / positions - block_channel + 1 : 0;
  float2* of_channels = reinterpret_cast<float2*>(shared + of_block);
  for (int i = static_cast<int>(threadIdx.x); i < channels; i += threads) {
    const int64_t channel = first_channel + block_channel + i;
    of_channels[i] = make_float2(value_or(p.weight, p.weight_dtype, channel, 1.0f),
                                 value_or(p.bias, p.bias_dtype, channel, 0.0f));
  }
  ThreadMoments<N> own;
  held.for_each(count, p.dtype, [&](const float(&values)[N]) { own.add(values); });
  const GroupMoments of_warp = warp_moments(own.moments());
  cluster_wait();
  parts.send(of_warp, static_cast<int>(threadIdx.x) / kWarpSize, cluster);
  cluster_sync();
  const float2 statistics = statistics_of(parts.merge(0, threads / kWarpSize, cluster), p.eps);
  if (p.statistics != nullptr && rank == 0 && threadIdx.x == 0)
    reinterpret_cast<float2*>(p.statistics)[group] = statistics;

  T* out = static_cast<T*>(p.out) + sample * p.channels * p.positions + offset;
  const bool aligned = is_aligned_16(out);
  // A vector is one of a channel: there is a whole number of them in each.
  int channel = first / positions - block_channel;
  int position = first - (channel + block_channel) * positions;
  const int step_channels = threads * N / positions;
  const int step_positions = threads * N - step_channels * positions;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const float2 of_channel = of_channels[channel];
    const float factor = statistics.y * of_channel.x;
    float values[N];
    unpack(held.own[i * threads], p.dtype, values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = fmaf(values[k] - statistics.x, factor, of_channel.y);
    activate<T>(p.silu, values);
    write_vector(pack<T>(values, p.dtype), out, aligned);
    out += threads * N;
    channel += step_channels;
    position += step_positions;
    if (position >= positions) {
      position -= positions;
      ++channel;
    }
  }
}

// Grid: (clusters, one a sample; tiles). Block: (vectors of a tile, positions side by side).
template <typename T>
__global__ void __launch_bounds__(kGroupNormClusterThreads, kGroupNormClusterBlocks)
    group_norm_rows_cluster_kernel(const GroupNormForward p, const int cluster,
                                   const Divisor chunks) {
  if constexpr (!kCompilesClusters) return;
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  __shared__ ClusterParts parts;
  __shared__ float2 of_groups[kParts];
  cluster_arrive_relaxed();
  const GroupNormRows<T> rows(p, chunks, blockIdx.x);
  const int64_t step = int64_t{blockDim.y} * p.channels;
  const int count = rows.count();
  HeldVectors<T> held(shared);
  held.start(rows.start(static_cast<const T*>(p.x), p.x_stride) + rows.channel, step, count);
  float weight[N], bias[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    weight[k] = value_or(p.weight, p.weight_dtype, rows.channel + k, 1.0f);
    bias[k] = value_or(p.bias, p.bias_dtype, rows.channel + k, 0.0f);
  }
  ChannelMoments<N> own;
  held.for_each(min(count, 1), p.dtype, [&](const float(&values)[N]) { own.start(values); });
  held.for_each(count, p.dtype, [&](const float(&values)[N]) { own.add(values); });
  const int thread = thread_of_block(), warp = thread / kWarpSize, lane = thread % kWarpSize;
  // Moments of all threads' channels, behind their vectors.
  const int of_thread =
      (static_cast<int>(p.chunk_positions) - 1) / static_cast<int>(blockDim.y) + 1;
  float2* of_threads = reinterpret_cast<float2*>(shared + of_thread * held.threads);
  own.store(count, of_threads + thread * N);
  __syncthreads();
  cluster_wait();

  // Whole warps share the tile's groups: as many have one group as there are warps for it.
  const int width = static_cast<int>(blockDim.x) * N;
  const int per_group = static_cast<int>(p.group_channels), groups = width / per_group;
  const int first_channel = static_cast<int>(blockIdx.y) * width;
  const int warps = held.threads / kWarpSize;
  const int slices = max(1, warps / groups);
  // NOTE: the last threads may be no whole warp.
  if (warp < warps) {
#pragma unroll 1
    for (int part = warp; part < groups * slices; part += warps) {
      const int group = part / slices, slice = part - group * slices;
      const int stride = slices * kWarpSize, step_y = stride / per_group;
      int y = (slice * kWarpSize + lane) / per_group;
      int channel = slice * kWarpSize + lane - y * per_group;
      GroupMoments m{0.0f, 0.0f, 0.0f};
#pragma unroll 1
      while (y < static_cast<int>(blockDim.y)) {
        const float2 moments = of_threads[y * width + group * per_group + channel];
        m = merged(m, {static_cast<float>(rows.count_of(y)), moments.x, moments.y});
        y += step_y;
        channel += stride - step_y * per_group;
        if (channel >= per_group) {
          channel -= per_group;
          ++y;
        }
      }
      parts.send(warp_moments(m), part, cluster);
    }
  }
  cluster_sync();
  if (warp < warps) {
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
      const float2 statistics = statistics_of(parts.merge(group * slices, slices, cluster), p.eps);
      if (lane == 0) of_groups[group] = statistics;
      const int64_t number = rows.sample * p.groups + first_channel / per_group + group;
      if (p.statistics != nullptr && rows.chunk == 0 && lane == 0)
        reinterpret_cast<float2*>(p.statistics)[number] = statistics;
    }
  }
  __syncthreads();

  float mean[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float2 statistics = of_groups[(rows.channel + k - first_channel) / per_group];
    mean[k] = statistics.x;
    weight[k] *= statistics.y;
  }
  T* out = rows.start(static_cast<T*>(p.out), p.channels * p.positions) + rows.channel;
  const bool aligned = is_aligned_16(out);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float values[N];
    unpack(held.own[i * held.threads], p.dtype, values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = fmaf(values[k] - mean[k], weight[k], bias[k]);
    activate<T>(p.silu, values);
    write_vector(pack<T>(values, p.dtype), out, aligned);
    out += step;
  }
}

}  // namespace

gpuError launch_group_norm_cluster(const GroupNormForward& p, const GroupNormPolicy& policy,
                                   gpuStream stream) {
  const int cluster = static_cast<int>(p.chunks);
  const int shared_bytes = static_cast<int>(group_norm_cluster_bytes(p, policy));
  const dim3 block(policy.threads_x, policy.threads_y);
  return dispatch_size(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.channels_last) {
      const dim3 grid(static_cast<unsigned>(p.samples * cluster),
                      static_cast<unsigned>(policy.tiles));
      return gpu_launch(&group_norm_rows_cluster_kernel<T>, grid, block, shared_bytes, cluster,
                        stream, p, cluster, Divisor(cluster));
    }
    const dim3 grid(static_cast<unsigned>(p.samples * p.groups * cluster));
    return gpu_launch(&group_norm_flat_cluster_kernel<T>, grid, block, shared_bytes, cluster,
                      stream, p, cluster, Divisor(p.groups));
  });
}

}  // namespace fuselage
