// The forward of group_norm, channels last, of samples that the shared memory of all
// multiprocessors holds: x is read once (formulas: norm/group_norm.h). Where it holds some of them,
// there are several launches.
//
//   copy      a block has one chunk of a sample's positions, with all channels; its threads copy
//             their vectors to shared memory, all at once
//   moments   of these vectors, as they arrive; a block leaves those of its groups in global memory
//   wait      for all blocks: they are on the GPU at once (a cooperative launch)
//   combine   every block adds up the parts of all groups of its sample
//   apply     from shared memory
//
// Parts and their order are those of norm/group_norm.cu, which takes all other samples, and so are
// the bits: a sample's do not depend on how many there are.
#include <algorithm>
#include <utility>

#include "common/cooperative_launch.h"
#include "norm/group_norm_rows.h"

#if !defined(USE_ROCM)
#include <cooperative_groups.h>
#endif

namespace fuselage {
namespace {

#if !defined(USE_ROCM)

// Grid: the chunks of all samples. Block: (vectors of a position, positions side by side).
template <typename T>
__global__ void __launch_bounds__(kGroupNormRowsForwardThreads, kGroupNormRowsForwardBlocks)
    group_norm_rows_grid_kernel(const GroupNormForward p, const Divisor chunks,
                                const Divisor group_channels) {
  if constexpr (!kCompilesClusters) return;
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  const GroupNormRows<T> rows(p, chunks, blockIdx.x);
  const int64_t step = int64_t{blockDim.y} * p.channels;
  const int count = rows.count();
  const T* x = rows.start(static_cast<const T*>(p.x), p.x_stride) + rows.channel;
  HeldVectors<T, 1, 4> held(shared);
  held.start_rows({x}, is_aligned_16(x), count, step);
  // Past the vectors of the thread that has the most: weights and biases of channels, statistics of
  // groups, and pairs of threads.
  const int most = (static_cast<int>(p.chunk_positions) - 1) / static_cast<int>(blockDim.y) + 1;
  float2* of_channels = reinterpret_cast<float2*>(shared + most * held.threads);
  float2 *of_groups = of_channels + rows.channels, *pairs = of_groups + p.groups;
  ChannelMoments<N> own;
  held.for_each(count, p.dtype, [&](const float(&values)[1][N], int i) {
    if (i == 0) own.start(values[0]);
    own.add(values[0]);
  });
  store_moments_of_groups<T>(p, rows, group_channels, own, pairs);
  auto grid = cooperative_groups::this_grid();
  auto arrived = grid.barrier_arrive();
  // NOTE: not before. Behind the copies of x these loads wait for all of them.
  for (int i = thread_of_block(); i < rows.channels; i += held.threads) {
    of_channels[i] = ChannelValues(p, i).pair(p);
  }
  grid.barrier_wait(std::move(arrived));

  for_groups(static_cast<int>(p.groups), [&](int group) {
    const float2 statistics =
        statistics_of(moments_of_parts<false>(p, rows.sample, group, 1, rows.channels), p.eps);
    if (lane_of_group() != 0) return;
    of_groups[group] = statistics;
    if (p.statistics != nullptr && rows.chunk == 0)
      reinterpret_cast<float2*>(p.statistics)[rows.sample * p.groups + group] = statistics;
  });
  __syncthreads();
  float weight[N], bias[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float2 of_channel = of_channels[rows.channel + k];
    weight[k] = of_channel.x;
    bias[k] = of_channel.y;
  }
  write_results<T>(p, rows, held, group_channels, of_groups, 0, weight, bias);
}

#endif

}  // namespace

gpuError launch_group_norm_rows_grid(const GroupNormForward& p, const GroupNormPolicy& policy,
                                     int device, bool& refused, gpuStream stream) {
  refused = true;
#if defined(USE_ROCM)
  static_cast<void>(p), static_cast<void>(policy), static_cast<void>(device);
  static_cast<void>(stream);
  return gpuSuccess;
#else
  const int64_t most = group_norm_rows_grid_samples(p, device_info(device), policy);
  const int shared_bytes = static_cast<int>(group_norm_rows_grid_bytes(p, policy));
  return dispatch_size(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    gpuError error = gpuSuccess;
    for (int64_t first = 0; first < p.samples && error == gpuSuccess; first += most) {
      GroupNormForward some = p;
      some.samples = std::min(most, p.samples - first);
      some.x = static_cast<const T*>(p.x) + first * p.x_stride;
      some.out = static_cast<T*>(p.out) + first * p.channels * p.positions;
      some.partials += first * p.groups * p.chunks * 2;
      if (p.statistics != nullptr) some.statistics += first * p.groups * 2;
      error = gpu_launch_cooperative(refused, &group_norm_rows_grid_kernel<T>,
                                     dim3(static_cast<unsigned>(some.samples * p.chunks)),
                                     dim3(policy.threads_x, policy.threads_y), shared_bytes, stream,
                                     some, Divisor(p.chunks), Divisor(p.group_channels));
      if (refused) break;
    }
    return error;
  });
#endif
}

}  // namespace fuselage
