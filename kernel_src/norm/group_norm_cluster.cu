// The forward of group_norm on GPUs with clusters, where a cluster's shared memory holds a group,
// or, channels last, a tile of whole groups: x is read once (formulas: norm/group_norm.h).
//
//   copy      a block has a chunk of the cluster's elements; its threads copy their vectors to
//             shared memory, all at once
//   moments   of these vectors, as they arrive; warps send theirs to all blocks (DSMEM)
//   apply     from shared memory
//
// Bits do not depend on where a tensor starts (norm/group_norm_held.h).
#include "common/dispatch.h"
#include "norm/group_norm_held.h"
#include "norm/group_norm_policy.h"
#include "norm/group_norm_rows.h"

namespace fuselage {
namespace {

constexpr int kParts = kGroupNormClusterParts;

// Moments of the parts of a group, flat: the warps of all blocks of a cluster.
struct ClusterParts {
  GroupMoments of_blocks[kMaxCluster * kParts];

  // To all blocks, which must have started; by a warp whose lanes all have `m`.
  __device__ __forceinline__ void send(const GroupMoments& m, int part, int cluster) {
    const int lane = thread_of_block() % kWarpSize;
    if (lane < cluster) *map_shared_rank(&of_blocks[part * cluster + cluster_rank()], lane) = m;
  }
  // Of the group, which has `count` parts in each block: in all lanes of a warp.
  __device__ __forceinline__ GroupMoments merge(int count, int cluster) const {
    const int lane = thread_of_block() % kWarpSize;
    GroupMoments m{0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = lane; i < count * cluster; i += kWarpSize) m = merged(m, of_blocks[i]);
    return warp_moments(m);
  }
};

template <typename T>
using Held = HeldVectors<T, 1, 2>;

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
  // Weights and biases of its channels, behind the vectors. They are asked for before these.
  const int positions = static_cast<int>(p.positions);
  const int block_channel = start * N / positions;
  const int channels = left > 0 ? ((start + left) * N - 1) / positions - block_channel + 1 : 0;
  const auto values_of = [&](int i) {
    return ChannelValues(p, first_channel + block_channel + i, i < channels);
  };
  ChannelValues values = values_of(static_cast<int>(threadIdx.x));
  Held<T> held(shared);
  const T* x = static_cast<const T*>(p.x) + sample * p.x_stride + offset;
  held.start_rows({x}, is_aligned_16(x), count, threads * N);
  float2* of_channels = reinterpret_cast<float2*>(shared + of_block);
  for (int i = static_cast<int>(threadIdx.x); i < channels; i += threads) {
    of_channels[i] = values.pair(p);
    values = values_of(i + threads);
  }
  ThreadMoments<N> own;
  held.for_each(count, p.dtype, [&](const float(&values)[1][N], int) { own.add(values[0]); });
  const GroupMoments of_warp = warp_moments(own.moments());
  cluster_wait();
  parts.send(of_warp, static_cast<int>(threadIdx.x) / kWarpSize, cluster);
  cluster_sync();
  const float2 statistics = statistics_of(parts.merge(threads / kWarpSize, cluster), p.eps);
  if (p.statistics != nullptr && rank == 0 && threadIdx.x == 0)
    reinterpret_cast<float2*>(p.statistics)[group] = statistics;

  T* out = static_cast<T*>(p.out) + sample * p.channels * p.positions + offset;
  const bool aligned = is_aligned_16(out);
  // A vector is one of a channel: there is a whole number of them in each.
  int channel = first / positions - block_channel;
  int position = first - (channel + block_channel) * positions;
  const int step_channels = threads * N / positions;
  const int step_positions = threads * N - step_channels * positions;
  const auto* next = held.own;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const float2 of_channel = of_channels[channel];
    const float factor = statistics.y * of_channel.x;
    float values[1][N];
    held.read(next, p.dtype, values);
#pragma unroll
    for (int k = 0; k < N; ++k)
      values[0][k] = fmaf(values[0][k] - statistics.x, factor, of_channel.y);
    activate<T>(p.silu, values[0]);
    write_vector(pack<T>(values[0], p.dtype), out, aligned);
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
                                   const Divisor chunks, const Divisor group_channels) {
  if constexpr (!kCompilesClusters) return;
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  __shared__ float2 of_groups[kParts];
  __shared__ GroupMoments of_blocks[kParts * kMaxCluster];
  cluster_arrive_relaxed();
  const GroupNormRows<T> rows(p, chunks, blockIdx.x);
  const int64_t step = int64_t{blockDim.y} * p.channels;
  const int count = rows.count();
  const ChannelLoading<T> loading(p, rows);
  Held<T> held(shared);
  const T* x = rows.start(static_cast<const T*>(p.x), p.x_stride) + rows.channel;
  held.start_rows({x}, is_aligned_16(x), count, step);
  ChannelMoments<N> own;
  held.for_each(count, p.dtype, [&](const float(&values)[1][N], int i) {
    if (i == 0) own.start(values[0]);
    own.add(values[0]);
  });
  cluster_wait();

  // Moments of the tile's groups, to all blocks, which must have started.
  const int of_thread =
      (static_cast<int>(p.chunk_positions) - 1) / static_cast<int>(blockDim.y) + 1;
  float2* pairs = reinterpret_cast<float2*>(shared + of_thread * held.threads);
  const int per_group = static_cast<int>(p.group_channels);
  const int groups = static_cast<int>(blockDim.x) * N / per_group;
  const int first_group = static_cast<int>(blockIdx.y) * groups, rank = cluster_rank();
  moments_of_groups<T>(p, rows, group_channels, own, pairs, first_group, groups,
                       [&](int group, const GroupMoments& m) {
                         GroupMoments* to = &of_blocks[(group - first_group) * cluster + rank];
                         for (int i = lane_of_group(); i < cluster; i += kGroupNormRowsLanes)
                           *map_shared_rank(to, i) = m;
                       });
  cluster_sync();
  for_groups(groups, [&](int group) {
    const GroupMoments* parts = of_blocks + group * cluster;
    const auto for_parts = [&](const auto& f) {
      for (int i = lane_of_group(); i < cluster; i += kGroupNormRowsLanes)
        f(parts[i].count, make_float2(parts[i].mean, parts[i].squares));
    };
    const float2 statistics = statistics_of(
        moments_of(parts[0].mean, static_cast<float>(p.group_size), for_parts), p.eps);
    if (lane_of_group() != 0) return;
    of_groups[group] = statistics;
    const int64_t number = rows.sample * p.groups + first_group + group;
    if (p.statistics != nullptr && rank == 0)
      reinterpret_cast<float2*>(p.statistics)[number] = statistics;
  });
  __syncthreads();

  float weight[N], bias[N];
  loading.finish(p, rows, weight, bias);
  write_results<T>(p, rows, held, group_channels, of_groups, first_group, weight, bias);
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
                        stream, p, cluster, Divisor(cluster), Divisor(p.group_channels));
    }
    const dim3 grid(static_cast<unsigned>(p.samples * p.groups * cluster));
    return gpu_launch(&group_norm_flat_cluster_kernel<T>, grid, block, shared_bytes, cluster,
                      stream, p, cluster, Divisor(p.groups));
  });
}

}  // namespace fuselage
