// Channels last: moments of groups in chunks of a sample's positions, and of these together. For
// kernels that hold x and for others (norm/group_norm_rows_grid.cu, norm/group_norm.cu), in one
// order.
//
// Parts of different sizes are added up in two passes: the mean first, from what it is more than
// that of one of them, and then squares about it (norm/group_norm.h). That takes additions alone,
// where merging one part after the other divides each time.
#pragma once

#include "norm/group_norm_held.h"
#include "norm/group_norm_policy.h"

namespace fuselage {
namespace {

// Sum over the lanes that share a group, in all of them.
__device__ __forceinline__ float sum_of_group(float value) {
  return warp_sum(value, kGroupNormRowsLanes);
}
__device__ __forceinline__ int lane_of_group() { return thread_of_block() % kGroupNormRowsLanes; }

// f(group) for those that a warp has: kWarpSize / kGroupNormRowsLanes side by side. Past the last
// one lanes have the last one again. NOTE: the last threads of a block may be no whole warp.
template <typename F>
__device__ __forceinline__ void for_groups(int groups, const F& f) {
  constexpr int kSide = kWarpSize / kGroupNormRowsLanes;
  const int thread = thread_of_block(), warp = thread / kWarpSize;
  const int warps = static_cast<int>(blockDim.x * blockDim.y) / kWarpSize;
  if (warp >= warps) return;
#pragma unroll 1
  for (int first = warp * kSide; first < groups; first += warps * kSide)
    f(min(first + thread % kWarpSize / kGroupNormRowsLanes, groups - 1));
}

// Of parts that have their moments side by side: adds up, in two passes, what for_parts(f) calls
// f(count, pair) with, where `pivot` is the mean of one of them and `size` the count of all.
template <typename ForParts>
__device__ __forceinline__ GroupMoments moments_of(float pivot, float size,
                                                   const ForParts& for_parts) {
  float from_pivot = 0.0f, squares = 0.0f;
  for_parts(
      [&](float count, float2 pair) { from_pivot = fmaf(count, pair.x - pivot, from_pivot); });
  const float mean = fmaf(sum_of_group(from_pivot), reciprocal_of_normal(fmaxf(size, 1.0f)), pivot);
  for_parts([&](float count, float2 pair) {
    const float d = pair.x - mean;
    squares += fmaf(count * d, d, pair.y);
  });
  return {size, mean, sum_of_group(squares)};
}

// Of a block's chunk: give(group, moments) for `groups` groups from the first on, in all lanes that
// share one, from moments of each thread's channels. In three steps:
//
//   vectors     a thread leaves a pair for each group that its vector may have a part of
//   positions   threads add up those of one column of threads, over the positions (y)
//   groups      the lanes of a group add up those of its channels
//
// NOTE: what counts is how many instructions follow one another: a warp takes about five cycles for
// each. With the sums over positions left to the lanes of groups, and three divisions for each
// pair, this took 7,000 cycles on an H200. `memory` has room for group_norm_rows_pairs(); all
// threads of the block call together. A group that has no channel in the block's tile has moments
// of nothing there, and so have all where the chunk has no positions.
template <typename T, typename Give>
__device__ __forceinline__ void moments_of_groups(const GroupNormForward& p,
                                                  const GroupNormRows<T>& rows,
                                                  const Divisor& group_channels,
                                                  const ChannelMoments<GroupNormRows<T>::N>& own,
                                                  float2* memory, int first_group, int groups,
                                                  const Give& give) {
  constexpr int N = GroupNormRows<T>::N;
  const int per_group = static_cast<int>(p.group_channels);
  const int slots = group_norm_rows_slots(per_group, N);
  const int columns = static_cast<int>(blockDim.x), width = columns * N;
  const int threads_y = static_cast<int>(blockDim.y);
  // Row y of threads has so many positions, or one more.
  const int size = max(rows.size(), 0), of_row = size / threads_y;
  const int longer = size - of_row * threads_y;
  const auto count_of = [&](int y) { return static_cast<float>(of_row + (y < longer ? 1 : 0)); };

  const float count = count_of(static_cast<int>(threadIdx.y));
  float mean[N], squares[N];
  own.moments(static_cast<int>(count), mean, squares);
  int begin = static_cast<int>(quotient(rows.channel, group_channels)) * per_group - rows.channel;
#pragma unroll 1
  for (int slot = 0; slot < slots; ++slot) {
    const int end = begin + per_group;
    float pivot = 0.0f, from_pivot = 0.0f, sum = 0.0f, channels = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) pivot = k == max(begin, 0) ? mean[k] : pivot;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const bool has = k >= begin && k < end;
      from_pivot += has ? mean[k] - pivot : 0.0f;
      channels += has ? 1.0f : 0.0f;
    }
    const float all = pivot + from_pivot * reciprocal_of_normal(fmaxf(channels, 1.0f));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float d = mean[k] - all;
      sum += k >= begin && k < end ? fmaf(count * d, d, squares[k]) : 0.0f;
    }
    memory[(threadIdx.y * slots + slot) * columns + threadIdx.x] = make_float2(all, sum);
    begin = end;
  }
  __syncthreads();

  // NOTE: for one channel. All channels of a part have as many positions.
  const int pairs = slots * columns, used = min(threads_y, size);
  const float positions = static_cast<float>(size),
              share = reciprocal_of_normal(fmaxf(positions, 1.0f));
  for (int i = thread_of_block(); i < pairs; i += columns * threads_y) {
    int column = i, slot = 0;
    for (; column >= columns; column -= columns) ++slot;
    const int first = static_cast<int>(blockIdx.y) * width + column * N;
    const int group = static_cast<int>(quotient(first, group_channels)) + slot;
    const float channels =
        static_cast<float>(min((group + 1) * per_group, first + N) - max(group * per_group, first));
    const float pivot = memory[i].x;
    float from_pivot = 0.0f, sum = 0.0f;
#pragma unroll 4
    for (int y = 0; y < used; ++y) {
      const float2 pair = memory[y * pairs + i];
      const float d = pair.x - pivot, of_y = count_of(y) * d;
      from_pivot += of_y;
      sum += fmaf(channels * of_y, d, pair.y);
    }
    const float d = from_pivot * share;
    memory[i] = make_float2(pivot + d, max_or_nan(fmaf(-channels * from_pivot, d, sum), 0.0f));
  }
  __syncthreads();

  for_groups(groups, [&](int index) {
    const int group = first_group + index;
    // The channels of the tile that the group has.
    const int64_t start = int64_t{group} * per_group - int64_t{blockIdx.y} * width;
    const int first = static_cast<int>(max(min(start, int64_t{width}), int64_t{0}));
    const int last = static_cast<int>(max(min(start + per_group, int64_t{width}), int64_t{0}));
    const auto pair_of = [&](int column) {
      int slot = 0;
      for (int64_t channel = start; channel > column * N; channel -= per_group) ++slot;
      return memory[slot * columns + column];
    };
    const auto for_columns = [&](const auto& f) {
#pragma unroll 1
      for (int column = first / N + lane_of_group(); column * N < last;
           column += kGroupNormRowsLanes) {
        const int channels = min(last, (column + 1) * N) - max(first, column * N);
        f(static_cast<float>(channels) * positions, pair_of(column));
      }
    };
    const float pivot = last > first ? pair_of(first / N).x : 0.0f;
    const float count = static_cast<float>(last - first) * positions;
    const GroupMoments m = moments_of(pivot, count, for_columns);
    give(group, m);
  });
}

// The same for all groups, as partial moments in global memory.
template <typename T>
__device__ __forceinline__ void store_moments_of_groups(
    const GroupNormForward& p, const GroupNormRows<T>& rows, const Divisor& group_channels,
    const ChannelMoments<GroupNormRows<T>::N>& own, float2* memory) {
  const int64_t parts = p.chunks * gridDim.y, part = rows.chunk * gridDim.y + blockIdx.y;
  moments_of_groups<T>(p, rows, group_channels, own, memory, 0, static_cast<int>(p.groups),
                       [&](int group, const GroupMoments& m) {
                         if (lane_of_group() != 0) return;
                         const int64_t index = (rows.sample * p.groups + group) * parts + part;
                         reinterpret_cast<float2*>(p.partials)[index] =
                             make_float2(m.mean, m.squares);
                       });
}

// Of a group of a sample, from those of its parts: as many lanes as share a group have the result.
// A part is one of a chunk and a tile of `width` channels.
template <bool kTiles>
__device__ __forceinline__ GroupMoments moments_of_parts(const GroupNormForward& p, int64_t sample,
                                                         int group, int tiles, int width) {
  constexpr int kAhead = 16, kStep = kAhead * kGroupNormRowsLanes;
  const int parts = static_cast<int>(p.chunks) * tiles;
  const float2* of_parts =
      reinterpret_cast<const float2*>(p.partials) + (sample * p.groups + group) * parts;
  const float channels = static_cast<float>(p.group_channels);
  const float of_chunk = static_cast<float>(p.chunk_positions);
  const float of_last = static_cast<float>(p.positions - (p.chunks - 1) * p.chunk_positions);
  const auto count_of = [&](int part) {
    if constexpr (!kTiles) return (part == parts - 1 ? of_last : of_chunk) * channels;
    const int chunk = part / tiles;
    const int64_t start = group * p.group_channels - int64_t{part - chunk * tiles} * width;
    const int64_t first = max(min(start, int64_t{width}), int64_t{0});
    const int64_t last = max(min(start + p.group_channels, int64_t{width}), int64_t{0});
    return (chunk == p.chunks - 1 ? of_last : of_chunk) * static_cast<float>(last - first);
  };
  float2 ahead[kAhead];
  bool is_first = true;
  const auto for_parts = [&](const auto& f) {
#pragma unroll 1
    for (int base = lane_of_group(); base < parts; base += kStep) {
      if (is_first || parts > kStep) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const int part = base + j * kGroupNormRowsLanes;
          if (part < parts) ahead[j] = of_parts[part];
        }
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int part = base + j * kGroupNormRowsLanes;
        if (part < parts) f(count_of(part), ahead[j]);
      }
    }
    is_first = false;
  };
  // NOTE: of a part that is not empty.
  const float pivot = of_parts[kTiles ? group * p.group_channels / width : 0].x;
  return moments_of(pivot, static_cast<float>(p.group_size), for_parts);
}

// Writes the results of what a thread holds, of which the channels have weight and bias, and groups
// from `first_group` on mean and rstd.
template <typename T, int kStages, int N = GroupNormRows<T>::N>
__device__ __forceinline__ void write_results(const GroupNormForward& p,
                                              const GroupNormRows<T>& rows,
                                              const HeldVectors<T, 1, kStages>& held,
                                              const Divisor& group_channels,
                                              const float2* of_groups, int first_group,
                                              const float (&weight)[N], const float (&bias)[N]) {
  float mean[N], factor[N];
  for_groups_of_channels<T>(p, rows, group_channels, [&](int k, int group) {
    const float2 statistics = of_groups[group - first_group];
    mean[k] = statistics.x;
    factor[k] = statistics.y * weight[k];
  });
  T* out = rows.start(static_cast<T*>(p.out), p.channels * p.positions) + rows.channel;
  const bool aligned = is_aligned_16(out);
  const int64_t step = int64_t{blockDim.y} * p.channels;
  const int count = rows.count();
  const auto* next = held.own;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float values[1][N];
    held.read(next, p.dtype, values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[0][k] = fmaf(values[0][k] - mean[k], factor[k], bias[k]);
    activate<T>(p.silu, values[0]);
    write_vector(pack<T>(values[0], p.dtype), out, aligned);
    out += step;
  }
}

}  // namespace
}  // namespace fuselage
