// The forward of group_norm on the GPU (formulas: norm/group_norm.h).
//
// Flat, a small group is read twice by one block, the second time from L1 or L2. What a cluster
// holds has a kernel of its own (norm/group_norm_cluster.cu), and so have flat groups that the
// whole GPU holds (norm/group_norm_grid.cu), and samples, channels last, that it holds
// (norm/group_norm_rows_grid.cu). All else takes three kernels:
//
//   moments   blocks have a chunk each, and leave its moments of every group in it
//   combine   adds these up for each group, in a fixed order
//   apply     blocks have the same chunks, the last ones first: these are still in L2
//
// Vectors of aligned tensors are read several at a time, others one after the other: in the same
// order, so that bits do not depend on where a tensor starts.
//
// Flat, a block has some planes of a group, which are the positions of a channel, or some positions
// of one. Channels last, it has some positions of all channels, or of a tile of them. A thread has
// a vector of channels there, and moments of each: groups may start and end within a vector.
#include "norm/group_norm.h"

#include "common/dispatch.h"
#include "norm/group_norm_device.h"
#include "norm/group_norm_policy.h"
#include "norm/group_norm_rows.h"

namespace fuselage {
namespace {

// What partial moments are: count, mean and squares, of [samples, groups, parts].
constexpr int kGroupNormPartial = 3;

__device__ __forceinline__ void store_partial(float* partials, int64_t index,
                                              const GroupMoments& m) {
  float* partial = partials + kGroupNormPartial * index;
  partial[0] = m.count;
  partial[1] = m.mean;
  partial[2] = m.squares;
}

// ---- flat ----

struct FlatDivisors {
  Divisor chunks, groups, position_chunks;
};

// The planes of a block.
template <typename T>
struct FlatChunk {
  int64_t group, sample;  // the group's number among those of all samples
  int64_t channel;        // the first
  int64_t offset;         // of its first position, within the sample
  int channels, span;

  __device__ __forceinline__ FlatChunk(const GroupNormInput& p, const FlatDivisors& divisors,
                                       unsigned block)
      : group(quotient(block, divisors.chunks)), sample(quotient(group, divisors.groups)) {
    const int64_t part = block - group * p.chunks;
    const int64_t channel_chunk = quotient(part, divisors.position_chunks);
    const int64_t first =
        (part - channel_chunk * divisors.position_chunks.value) * p.chunk_positions;
    const int64_t first_channel = channel_chunk * p.chunk_channels;
    channel = (group - sample * p.groups) * p.group_channels + first_channel;
    channels = static_cast<int>(min(p.chunk_channels, p.group_channels - first_channel));
    span = static_cast<int>(min(p.chunk_positions, p.positions - first));
    offset = channel * p.positions + first;
  }
  __device__ __forceinline__ bool aligned(const GroupNormInput& p, const void* first) const {
    constexpr int N = 16 / sizeof(T);
    return is_aligned_16(first) && (channels == 1 || p.positions % N == 0);
  }
  // f(plane, size) for those of this thread, with a size of 0 where the block has fewer: all of its
  // threads go round equally often, to store together.
  template <typename F>
  __device__ __forceinline__ void for_planes(const F& f) const {
#pragma unroll 1
    for (int first = 0; first < channels; first += static_cast<int>(blockDim.y)) {
      const int plane = first + static_cast<int>(threadIdx.y);
      f(plane, plane < channels ? span : 0);
    }
  }
};

// Grid: the chunks of all groups. Block: threads of a plane, planes. Moments alone, results alone,
// or both, of a group that is one chunk.
template <typename T>
__global__ void __launch_bounds__(kGroupNormFlatThreads, 2)
    group_norm_flat_kernel(const GroupNormForward p, const FlatDivisors divisors,
                           const bool takes_moments, const bool applies) {
  constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  const unsigned block = takes_moments ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const FlatChunk<T> chunk(p, divisors, block);
  // Of the next plane of this thread.
  const auto values_of = [&](int plane) {
    return ChannelValues(p, chunk.channel + plane, applies && plane < chunk.channels);
  };
  ChannelValues channel = values_of(static_cast<int>(threadIdx.y));
  const T* x = static_cast<const T*>(p.x) + chunk.sample * p.x_stride + chunk.offset;
  const bool x_aligned = chunk.aligned(p, x);

  float2 statistics{};
  if (takes_moments) {
    ThreadMoments<N> own;
    chunk.for_planes([&](int plane, int size) {
      const auto add = [&](const V& vector, int column) {
        float values[N];
        unpack(vector, p.dtype, values);
        own.add(values, max(0, min(size - column, N)));
      };
      for_vectors<T, kGroupNormAhead>(x + plane * p.positions, size, size, x_aligned, add);
    });
    const GroupMoments m = block_moments(own.moments());
    if (!applies) {
      if (threadIdx.x == 0 && threadIdx.y == 0) store_partial(p.partials, block, m);
      launch_dependents();
      return;
    }
    statistics = statistics_of(m, p.eps);
    if (threadIdx.x == 0 && threadIdx.y == 0 && p.statistics != nullptr)
      reinterpret_cast<float2*>(p.statistics)[chunk.group] = statistics;
  } else {
    grid_dependency_wait();
    statistics = pair_of_group(p.statistics, chunk.group);
  }

  T* out = static_cast<T*>(p.out) + chunk.sample * p.channels * p.positions + chunk.offset;
  const bool aligned = x_aligned && chunk.aligned(p, out);
  chunk.for_planes([&](int plane, int size) {
    T* to = out + plane * p.positions;
    const float2 pair = channel.pair(p);
    const float factor = statistics.y * pair.x, bias = pair.y;
    channel = values_of(plane + static_cast<int>(blockDim.y));
    const auto apply = [&](const V& vector, int column) {
      float values[N];
      unpack(vector, p.dtype, values);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = fmaf(values[k] - statistics.x, factor, bias);
      activate<T>(p.silu, values);
      store_vector(pack<T>(values, p.dtype), to, aligned, column, size);
    };
    // NOTE: where vectors are not aligned lanes store together, also those without a plane.
    for_vectors<T, kGroupNormAhead>(x + plane * p.positions, size, aligned ? size : chunk.span,
                                    aligned, apply);
  });
}

// ---- moments of groups, from those of parts ----

constexpr int kGroupNormCombineThreads = 256;

// Grid: the groups of all samples.
__global__ void __launch_bounds__(kGroupNormCombineThreads)
    group_norm_combine_kernel(const GroupNormForward p, const int parts) {
  const int64_t first = int64_t{blockIdx.x} * parts;
  GroupMoments m{0.0f, 0.0f, 0.0f};
  grid_dependency_wait();
#pragma unroll 2
  for (int i = threadIdx.x; i < parts; i += kGroupNormCombineThreads) {
    const float* partial = p.partials + kGroupNormPartial * (first + i);
    m = merged(m, {partial[0], partial[1], partial[2]});
  }
  m = block_moments(m);
  if (threadIdx.x == 0)
    reinterpret_cast<float2*>(p.statistics)[blockIdx.x] = statistics_of(m, p.eps);
  launch_dependents();
}

// ---- channels last ----

// A thread's vectors of x, one of each of its positions, from the first to the last or the other
// way.
template <typename T>
struct RowsAhead {
  using V = Vector<T, 16 / sizeof(T)>;
  const GroupNormRows<T>& rows;
  const bool aligned;
  const int count;
  int64_t step;
  const T* x;  // of the next one that is copied
  CopiesAhead<T, 1, group_norm_copies_ahead(kCompilesAsyncCopy)> copies;

  __device__ __forceinline__ RowsAhead(const GroupNormForward& p, const GroupNormRows<T>& rows_,
                                       void* shared, bool from_last)
      : rows(rows_),
        aligned(rows.aligned(rows.start(static_cast<const T*>(p.x), p.x_stride))),
        count(rows.count()),
        step((from_last ? -1 : 1) * int64_t{blockDim.y} * p.channels),
        x(rows.start(static_cast<const T*>(p.x), p.x_stride) -
          (from_last ? (count - 1) * step : 0)),
        copies(shared, count) {}

  __device__ __forceinline__ auto start() {
    return [this](V* target, int) {
      rows.start_copy(target, x, aligned);
      x += step;
    };
  }
  __device__ __forceinline__ void fill() { copies.fill(start()); }
  __device__ __forceinline__ void next(DType dtype, float (&values)[16 / sizeof(T)]) {
    V vectors[1];
    copies.next(vectors, start());
    unpack(vectors[0], dtype, values);
  }
};

// Grid: (chunks of all samples, tiles). Block: (threads_x, threads_y).
template <typename T>
__global__ void __launch_bounds__(kGroupNormRowsForwardThreads, kGroupNormRowsForwardBlocks)
    group_norm_rows_moments_kernel(const GroupNormForward p, const Divisor chunks,
                                   const Divisor group_channels) {
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  const GroupNormRows<T> rows(p, chunks, blockIdx.x);
  RowsAhead<T> ahead(p, rows, shared, false);
  ahead.fill();
  ChannelMoments<N> m;
#pragma unroll 1
  for (int i = 0; i < ahead.count; ++i) {
    float values[N];
    ahead.next(p.dtype, values);
    if (i == 0) m.start(values);
    m.add(values);
  }
  __syncthreads();  // before others write where vectors were
  store_moments_of_groups<T>(p, rows, group_channels, m, reinterpret_cast<float2*>(shared));
  launch_dependents();
}

// Grid: `blocks` of a warp for the groups of each sample.
__global__ void __launch_bounds__(kWarpSize)
    group_norm_rows_combine_kernel(const GroupNormForward p, const unsigned blocks, const int tiles,
                                   const int width) {
  constexpr int kSide = kWarpSize / kGroupNormRowsLanes;
  grid_dependency_wait();
  const unsigned sample = blockIdx.x / blocks, first = (blockIdx.x - sample * blocks) * kSide;
  const int group = min(static_cast<int>(first + threadIdx.x / kGroupNormRowsLanes),
                        static_cast<int>(p.groups) - 1);
  const GroupMoments m = tiles == 1 ? moments_of_parts<false>(p, sample, group, 1, width)
                                    : moments_of_parts<true>(p, sample, group, tiles, width);
  const float2 statistics = statistics_of(m, p.eps);
  if (lane_of_group() == 0)
    reinterpret_cast<float2*>(p.statistics)[sample * p.groups + group] = statistics;
  launch_dependents();
}

// From the last chunk and position to the first: what was read last is still in the L2 cache.
template <typename T>
__global__ void __launch_bounds__(kGroupNormRowsForwardThreads, kGroupNormRowsForwardBlocks)
    group_norm_rows_apply_kernel(const GroupNormForward p, const Divisor chunks,
                                 const Divisor group_channels) {
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  const GroupNormRows<T> rows(p, chunks, gridDim.x - 1 - blockIdx.x);
  const ChannelLoading<T> loading(p, rows);
  RowsAhead<T> ahead(p, rows, shared, true);
  ahead.fill();
  T* out = rows.start(static_cast<T*>(p.out), p.channels * p.positions);
  const bool aligned = rows.aligned(out);
  out -= (ahead.count - 1) * ahead.step;

  float factor[N], bias[N];
  float2 statistics[N];
  loading.finish(p, rows, factor, bias);
  grid_dependency_wait();
  pairs_of_channels<T>(p, rows, group_channels, p.statistics, statistics);
#pragma unroll
  for (int k = 0; k < N; ++k) factor[k] *= statistics[k].y;
#pragma unroll 1
  for (int i = 0; i < ahead.count; ++i) {
    float values[N];
    ahead.next(p.dtype, values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = fmaf(values[k] - statistics[k].x, factor[k], bias[k]);
    activate<T>(p.silu, values);
    rows.write(pack<T>(values, p.dtype), out, aligned);
    out += ahead.step;
  }
}

// ---- launchers ----

template <typename T>
gpuError launch_flat(const GroupNormForward& p, const GroupNormPolicy& policy, gpuStream stream) {
  const FlatDivisors divisors{p.chunks, p.groups, ceil_div(p.positions, p.chunk_positions)};
  const dim3 grid(static_cast<unsigned>(p.samples * p.groups * p.chunks));
  const dim3 block(policy.threads_x, policy.threads_y);
  const auto launch = [&](bool after, bool takes_moments, bool applies) {
    return gpu_launch_as(after, &group_norm_flat_kernel<T>, grid, block, 0, 1, stream, p, divisors,
                         takes_moments, applies);
  };
  if (p.chunks == 1) return launch(false, true, true);
  gpuError error = launch(false, true, false);
  if (error == gpuSuccess) {
    error = gpu_launch_after(&group_norm_combine_kernel, dim3(p.samples * p.groups),
                             dim3(kGroupNormCombineThreads), stream, p, static_cast<int>(p.chunks));
  }
  return error != gpuSuccess ? error : launch(true, false, true);
}

template <typename T>
gpuError launch_rows(const GroupNormForward& p, const GroupNormPolicy& policy, int device,
                     gpuStream stream) {
  const DeviceInfo& info = device_info(device);
  constexpr int N = 16 / sizeof(T);
  const dim3 grid(static_cast<unsigned>(p.samples * p.chunks), static_cast<unsigned>(policy.tiles));
  const dim3 block(policy.threads_x, policy.threads_y);
  const Divisor chunks(p.chunks), group_channels(p.group_channels);
  gpuError error = gpu_launch(&group_norm_rows_moments_kernel<T>, grid, block,
                              group_norm_rows_moments_bytes(p, info, policy), 1, stream, p, chunks,
                              group_channels);
  if (error != gpuSuccess) return error;
  const int64_t blocks = ceil_div(p.groups, kWarpSize / kGroupNormRowsLanes);
  error = gpu_launch_after(&group_norm_rows_combine_kernel, dim3(p.samples * blocks),
                           dim3(kWarpSize), stream, p, static_cast<unsigned>(blocks),
                           static_cast<int>(policy.tiles), policy.threads_x * N);
  if (error != gpuSuccess) return error;
  return gpu_launch_as(true, &group_norm_rows_apply_kernel<T>, grid, block,
                       group_norm_copies_bytes(info, policy, 1), 1, stream, p, chunks,
                       group_channels);
}

// One kernel that holds a group in a cluster, or in the whole GPU, or all samples there, where
// there is one; otherwise those of this file.
enum class GroupNormWay { cluster, grid, rows_grid, blocks };

struct GroupNormChoice {
  GroupNormWay way;
  GroupNormPolicy policy;
  GroupNormGridPolicy grid;
};

GroupNormChoice choice_of(const GroupNormInput& p, int device) {
  const DeviceInfo info = device_info(device);
  GroupNormChoice choice{};
  if (group_norm_cluster_policy(p, info, choice.policy)) {
    choice.way = GroupNormWay::cluster;
    return choice;
  }
  choice.policy = group_norm_forward_policy(p);
  choice.way = group_norm_grid_policy(p, info, choice.grid)               ? GroupNormWay::grid
               : group_norm_rows_grid_samples(p, info, choice.policy) > 0 ? GroupNormWay::rows_grid
                                                                          : GroupNormWay::blocks;
  return choice;
}

gpuError launch_blocks(const GroupNormForward& p, const GroupNormPolicy& policy, int device,
                       gpuStream stream) {
  return dispatch_size(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return p.channels_last ? launch_rows<T>(p, policy, device, stream)
                           : launch_flat<T>(p, policy, stream);
  });
}

}  // namespace

namespace gpu {

int64_t group_norm_forward_workspace(GroupNormForward& p, int device) {
  const GroupNormChoice choice = choice_of(p, device);
  const GroupNormPolicy& policy = choice.policy;
  group_norm_set_chunks(p, policy);
  if (choice.way == GroupNormWay::cluster || (!p.channels_last && p.chunks == 1)) return 0;
  const int64_t floats = kGroupNormPartial * p.samples * p.groups * p.chunks * policy.tiles;
  // Enough for either: a launch may be refused.
  return choice.way == GroupNormWay::grid
             ? std::max(floats, group_norm_grid_workspace(p, choice.grid))
             : floats;
}

const char* group_norm_forward(const GroupNormForward& p, int device, void* raw_stream) {
  if (p.samples * p.groups * p.chunks > kGroupNormMostBlocks) return kGroupNormTooMany;
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const GroupNormChoice choice = choice_of(p, device);
  if (choice.way == GroupNormWay::cluster)
    return message_of(launch_group_norm_cluster(p, choice.policy, stream));
  bool refused = true;
  gpuError error = gpuSuccess;
  if (choice.way == GroupNormWay::grid)
    error = launch_group_norm_grid(p, choice.grid, refused, stream);
  if (choice.way == GroupNormWay::rows_grid)
    error = launch_group_norm_rows_grid(p, choice.policy, device, refused, stream);
  if (!refused) return message_of(error);
  return message_of(launch_blocks(p, choice.policy, device, stream));
}

}  // namespace gpu
}  // namespace fuselage
