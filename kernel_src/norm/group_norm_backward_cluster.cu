// The backward of group_norm on GPUs with clusters, where a cluster's shared memory holds x and
// grad_out of a group, or, channels last, of a tile of whole groups: both are read once (formulas:
// norm/group_norm.h).
//
//   copy      a thread copies its vectors to shared memory, all at once
//   sums      A and B of channels, of these vectors as they arrive; and what they add to the two
//             means of the group, which warps or blocks send to all blocks (DSMEM)
//   gradient  grad_x, from shared memory
//
// A and B of a sample's channels are added up by the blocks that share the channels, in a fixed
// order. They are grad_bias and grad_weight where there is one sample. For half precision: float32
// takes the kernels of norm/group_norm_backward.cu.
#include "common/dispatch.h"
#include "norm/group_norm_gradient.h"
#include "norm/group_norm_held.h"
#include "norm/group_norm_policy.h"

namespace fuselage {
namespace {

// x and grad_out.
template <typename T>
using HeldPairs = HeldVectors<T, 2, 4>;

// Writes A and B of a sample's channel, or the gradients that they are.
__device__ __forceinline__ void write_sums(const GroupNormBackward& p, int64_t sample,
                                           int64_t channel, float2 sums) {
  if (p.samples > 1) {
    float* partial = p.partials + 2 * sample * p.channels + channel;
    partial[0] = sums.x;
    partial[p.channels] = sums.y;
    return;
  }
  write_gradients(p, channel, sums);
}

// ---- flat: a warp has rows of the group, a vector a lane. A row is a piece of a channel's plane,
// or, where that has few vectors, the planes of some channels, with blockDim.x lanes each ----

// A lane's vector in a row.
struct RowCursor {
  int width, side;  // lanes of a channel, and channels of a row
  int vectors;      // of a channel
  int pitch;        // lanes of all rows of a channel
  int channels;     // of the group
  int channel, vector;

  __device__ __forceinline__ RowCursor(const GroupNormBackward& p, int vector_size)
      : width(static_cast<int>(blockDim.x)),
        side(kWarpSize / width),
        vectors(static_cast<int>(p.positions) / vector_size),
        pitch((vectors + kWarpSize - 1) / kWarpSize * kWarpSize),
        channels(static_cast<int>(p.group_channels)) {}

  __device__ __forceinline__ int rows_of_channel() const { return pitch / kWarpSize; }
  __device__ __forceinline__ int rows() const {
    return (channels + side - 1) / side * rows_of_channel();
  }
  __device__ __forceinline__ int first_row_of(int of_channel) const {
    return of_channel / side * rows_of_channel();
  }
  __device__ __forceinline__ void set(int row) {
    const int bundle = row / rows_of_channel();
    channel = bundle * side + static_cast<int>(threadIdx.y) % side;
    vector = (row - bundle * rows_of_channel()) * kWarpSize + static_cast<int>(threadIdx.x);
  }
  // To the warp's next row. Returns whether that has another channel.
  __device__ __forceinline__ bool next() {
    vector += kWarpSize;
    if (vector < pitch) return false;
    vector -= pitch;
    channel += side;
    return true;
  }
  __device__ __forceinline__ bool exists() const { return channel < channels && vector < vectors; }
};

// Grid: clusters, one a group of a sample. Block: (lanes of a channel, channels side by side).
// p.chunk_positions: rows of a warp.
__global__ void __launch_bounds__(kGroupNormClusterThreads, kGroupNormBackwardClusterBlocks)
    group_norm_flat_backward_cluster_kernel(const GroupNormBackward p, const int cluster,
                                            const Divisor groups) {
  if constexpr (!kCompilesClusters) return;
  using T = bfloat16;
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  __shared__ float2 of_warps[kMaxCluster * kGroupNormClusterThreads / kWarpSize];
  cluster_arrive_relaxed();
  const int rank = cluster_rank(), thread = thread_of_block(), lane = thread % kWarpSize;
  const unsigned group = blockIdx.x / static_cast<unsigned>(cluster);
  const int64_t sample = quotient(group, groups);
  const int64_t first_channel = (group - sample * p.groups) * p.group_channels;
  HeldPairs<T> held(shared);
  // The rows of this warp.
  RowCursor at(p, N);
  const int warps = held.threads / kWarpSize, warp = rank * warps + thread / kWarpSize;
  const int most = static_cast<int>(p.chunk_positions), start = warp * most;
  const int count = max(min(at.rows() - start, most), 0);
  const auto offset = [&] { return at.channel * static_cast<int>(p.positions) + at.vector * N; };
  const int64_t of_group = first_channel * p.positions;
  const T* x = static_cast<const T*>(p.x) + sample * p.x_stride + of_group;
  const T* grad_out = static_cast<const T*>(p.grad_out) + sample * p.grad_out_stride + of_group;
  const float2 statistics = pair_of_group(p.statistics, group);
  const auto values_of = [&](int i) {
    return ChannelValues(p, first_channel + i, i < at.channels);
  };
  ChannelValues values = values_of(thread);
  at.set(start);
  held.start({grad_out, x}, is_aligned_16(x) && is_aligned_16(grad_out), count, [&] {
    const int here = at.exists() ? offset() : -1;
    at.next();
    return here;
  });

  // Past the vectors, factors and biases of the group's channels; and A and B of what warps have of
  // them, channel c of warp w in element c + w: of all the cluster's warps, in one of its blocks.
  float2* of_channels = reinterpret_cast<float2*>(shared + 2 * most * held.threads);
  float2* pieces = of_channels + at.channels;
  for (int i = thread; i < at.channels; i += held.threads) {
    const float2 pair = values.pair(p);
    of_channels[i] = make_float2(statistics.y * pair.x, pair.y);
    values = values_of(i + held.threads);
  }
  ScaledFactors<1> factors{};
  factors.mean[0] = statistics.x;
  const auto set_channel = [&](int channel) {
    factors.factor[0] = of_channels[channel].x;
    factors.bias[0] = of_channels[channel].y;
  };
  __syncthreads();
  cluster_wait();

  at.set(start);
  int left = count;
  float2 sums{}, of_warp{};
  held.for_each(count, p.dtype, [&](float(&values)[2][N], int) {
    if (at.exists()) {
      set_channel(at.channel);
      scaled_terms_of<T>(factors, p.silu, values[0], values[1]);
      float2 of_vector{};
#pragma unroll
      for (int k = 0; k < N; ++k) {
        of_vector.x += values[0][k];
        of_vector.y = fmaf(values[0][k], values[1][k], of_vector.y);
      }
      add(sums, of_vector);
    }
    const int channel = at.channel;
    const bool ends = at.next();
    if (!same_in_warp(--left == 0 || ends)) return;
    float2 piece = warp_sum_of_pair(sums, at.width);
    piece.y *= statistics.y;
    if (threadIdx.x == 0 && channel < at.channels) {
      *map_shared_rank(&pieces[channel + warp], channel & (cluster - 1)) = piece;
      const float factor = of_channels[channel].x;
      of_warp.x = fmaf(factor, piece.x, of_warp.x);
      of_warp.y = fmaf(factor, piece.y, of_warp.y);
    }
    sums = float2{};
  });
  of_warp = warp_sum_of_pair(of_warp, kWarpSize);
  if (lane < cluster) *map_shared_rank(&of_warps[warp], lane) = of_warp;
  cluster_sync();

  launch_dependents();

  // The channels whose pieces are here.
  const bool writes_sums = p.grad_weight != nullptr || p.grad_bias != nullptr;
  const int own = thread * cluster + rank;
  for (int i = own; i < at.channels && writes_sums; i += held.threads * cluster) {
    const int first_row = at.first_row_of(i);
    const int last_warp = (first_row + at.rows_of_channel() - 1) / most;
    float2 sum{};
#pragma unroll 4
    for (int w = first_row / most; w <= last_warp; ++w) add(sum, pieces[i + w]);
    write_sums(p, sample, first_channel + i, sum);
  }
  if (p.grad_x == nullptr) return;
  float2 means{};
  for (int i = lane; i < cluster * warps; i += kWarpSize) add(means, of_warps[i]);
  means = warp_sum_of_pair(means, kWarpSize);
  const float size = static_cast<float>(p.group_size);
  means = make_float2(means.x / size, statistics.y * (means.y / size));
  T* grad_x = static_cast<T*>(p.grad_x) + sample * p.channels * p.positions + of_group;
  const bool aligned = is_aligned_16(grad_x);
  at.set(start);
  const auto* next = held.own;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float values[2][N];
    held.read(next, p.dtype, values);
    if (at.exists()) {
      set_channel(at.channel);
      scaled_terms_of<T>(factors, p.silu, values[0], values[1]);
#pragma unroll
      for (int k = 0; k < N; ++k)
        values[0][k] = gradient_of(values[0][k], values[1][k], factors.factor[0], means);
      write_vector(pack<T>(values[0], p.dtype), grad_x + offset(), aligned);
    }
    at.next();
  }
}

// ---- channels last ----

// Grid: (clusters, one a sample; tiles). Block: (vectors of a tile, positions side by side).
__global__ void __launch_bounds__(kGroupNormClusterThreads, kGroupNormRowsBackwardClusterBlocks)
    group_norm_rows_backward_cluster_kernel(const GroupNormBackward p, const int cluster,
                                            const Divisor chunks, const Divisor group_channels) {
  if constexpr (!kCompilesClusters) return;
  using T = bfloat16;
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  __shared__ float2 of_groups[kGroupNormClusterParts];  // means
  cluster_arrive_relaxed();
  const GroupNormRows<T> rows(p, chunks, blockIdx.x);
  const int64_t step = int64_t{blockDim.y} * p.channels;
  const int count = rows.count(), rank = cluster_rank();
  HeldPairs<T> held(shared);
  const T* x = rows.start(static_cast<const T*>(p.x), p.x_stride) + rows.channel;
  const T* grad_out =
      rows.start(static_cast<const T*>(p.grad_out), p.grad_out_stride) + rows.channel;
  const ScaledFactorsLoading<T> loading(p, rows, group_channels);
  held.start_rows({grad_out, x}, is_aligned_16(x) && is_aligned_16(grad_out), count, step);

  // Past the vectors: A and B of all threads' channels, of slices of the block's positions, and of
  // the blocks of the cluster; and factors.
  const int columns = static_cast<int>(blockDim.x), width = columns * N, threads = held.threads;
  const int most = (static_cast<int>(p.chunk_positions) - 1) / static_cast<int>(blockDim.y) + 1;
  const int pitch = threads | 1, slices = max(1, threads / width);
  float2* of_threads = reinterpret_cast<float2*>(shared + 2 * most * threads);  // [N, pitch]
  float2* of_slices = of_threads + N * pitch;                                   // [slices, width]
  float2* of_blocks = of_slices + slices * width;                               // [cluster, width]
  float* all_factors = reinterpret_cast<float*>(of_blocks + cluster * width);
  const auto factors = loading.factors(p, rows);
  const int thread = thread_of_block(), lane = thread % kWarpSize, warp = thread / kWarpSize;
  float sums[2][N] = {};
  held.for_each(count, p.dtype, [&](float(&values)[2][N], int) {
    scaled_terms_of<T>(factors, p.silu, values[0], values[1]);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sums[0][k] += values[0][k];
      sums[1][k] = fmaf(values[0][k], values[1][k], sums[1][k]);
    }
  });
#pragma unroll
  for (int k = 0; k < N; ++k) {
    of_threads[k * pitch + thread] = make_float2(sums[0][k], factors.rstd[k] * sums[1][k]);
    if (threadIdx.y == 0) all_factors[threadIdx.x * N + k] = factors.factor[k];
  }
  __syncthreads();
  for (int i = thread; i < slices * width; i += threads) {
    const int slice = i / width, j = i - slice * width, k = j / columns, column = j - k * columns;
    float2 sum{};
    for (int y = slice; y < static_cast<int>(blockDim.y); y += slices)
      add(sum, of_threads[k * pitch + y * columns + column]);
    of_slices[slice * width + column * N + k] = sum;
  }
  __syncthreads();
  cluster_wait();
  for (int i = thread; i < width; i += threads) {
    float2 sum = of_slices[i];
    for (int slice = 1; slice < slices; ++slice) add(sum, of_slices[slice * width + i]);
    for (int block = 0; block < cluster; ++block)
      *map_shared_rank(&of_blocks[rank * width + i], block) = sum;
  }
  cluster_sync();
  launch_dependents();

  const int per_group = static_cast<int>(p.group_channels), groups = width / per_group;
  const int first_channel = static_cast<int>(blockIdx.y) * width, warps = threads / kWarpSize;
  const bool writes_sums = p.grad_weight != nullptr || p.grad_bias != nullptr;
  // NOTE: the last threads may be no whole warp.
  if (warp < warps) {
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
      float2 means{};
      for (int i = group * per_group + lane; i < (group + 1) * per_group; i += kWarpSize) {
        float2 sum{};
        for (int block = 0; block < cluster; ++block) add(sum, of_blocks[block * width + i]);
        if (writes_sums && (i & (cluster - 1)) == rank)
          write_sums(p, rows.sample, first_channel + i, sum);
        means.x = fmaf(all_factors[i], sum.x, means.x);
        means.y = fmaf(all_factors[i], sum.y, means.y);
      }
      means = warp_sum_of_pair(means, kWarpSize);
      const float size = static_cast<float>(p.group_size);
      if (lane == 0) of_groups[group] = make_float2(means.x / size, means.y / size);
    }
  }
  __syncthreads();

  if (p.grad_x != nullptr) {
    float2 means[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      means[k] = of_groups[quotient(rows.channel + k - first_channel, group_channels)];
      means[k].y *= factors.rstd[k];
    }
    T* grad_x = rows.start(static_cast<T*>(p.grad_x), p.channels * p.positions) + rows.channel;
    const bool aligned = is_aligned_16(grad_x);
    const auto* next = held.own;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float values[2][N];
      held.read(next, p.dtype, values);
      scaled_terms_of<T>(factors, p.silu, values[0], values[1]);
#pragma unroll
      for (int k = 0; k < N; ++k)
        values[0][k] = gradient_of(values[0][k], values[1][k], factors.factor[k], means[k]);
      write_vector(pack<T>(values[0], p.dtype), grad_x, aligned);
      grad_x += step;
    }
  }
}

}  // namespace

gpuError launch_group_norm_backward_cluster(const GroupNormBackward& p,
                                            const GroupNormPolicy& policy, gpuStream stream) {
  const int cluster = static_cast<int>(p.chunks);
  const int shared_bytes = static_cast<int>(group_norm_backward_cluster_bytes(p, policy));
  const dim3 block(policy.threads_x, policy.threads_y);
  if (p.channels_last) {
    const dim3 grid(static_cast<unsigned>(p.samples * cluster),
                    static_cast<unsigned>(policy.tiles));
    return gpu_launch(&group_norm_rows_backward_cluster_kernel, grid, block, shared_bytes, cluster,
                      stream, p, cluster, Divisor(cluster), Divisor(p.group_channels));
  }
  const dim3 grid(static_cast<unsigned>(p.samples * p.groups * cluster));
  return gpu_launch(&group_norm_flat_backward_cluster_kernel, grid, block, shared_bytes, cluster,
                    stream, p, cluster, Divisor(p.groups));
}

}  // namespace fuselage
