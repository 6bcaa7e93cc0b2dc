// How group_norm kernels are laid out on a GPU: pure functions of the element type and of the shape
// of a sample, never of the number of samples: how a group is cut decides the order of its sums.
#pragma once

#include <algorithm>
#include <numeric>

#include "common/launch_policy.h"
#include "norm/group_norm.h"

namespace fuselage {

// Threads of a block, at most, by which the kernels get their registers.
constexpr int kGroupNormFlatThreads = 512, kGroupNormRowsThreads = 256;
constexpr int kGroupNormRowsBlocks = 4;  // on an SM, in the forward
// 16-byte vectors of a thread that are under way at once, where moments are taken; and of each
// tensor where results are written or there are two of them.
constexpr int kGroupNormAhead = 4, kGroupNormFewAhead = 2;

constexpr int64_t kGroupNormWholeBytes = 64 * 1024;  // of a group that one block reads twice

// Of larger ones, flat in the forward: bytes of a chunk, and the threads for it. On an H100,
// bfloat16, 32 groups, a sample of (256, 512, 512) takes 150 us so, 159 with 256 threads, and 159
// with chunks of 128 KB for 512; two of (640, 64, 64) take 19, 20 and 25.
constexpr int64_t kGroupNormChunkBytes = 16 * 1024;
constexpr int kGroupNormChunkThreads = 128;

// Where a cluster's shared memory holds a group, or a tile of them: threads of a block, at most,
// and blocks of a multiprocessor, by which the kernels get their registers; parts that a block has
// moments of; and bytes that it holds.
//
// On an H100, bfloat16, 32 groups, us with one kernel and with three: flat, two samples of
// (320, 64, 64) 8.9 and 12.1, (640, 64, 64) 14.6 and 14.9, eight 40 and 49, two of (960, 64, 64)
// 17.5 and 20.2. With 82 KB a block, (640, 128, 128), 51 and 49. Channels last, two of (1280, 8, 8)
// 6.6 and 15.5, (1280, 32, 32) 12.9 and 19.4, (640, 64, 64) 20.8 and 23.8; but (1280, 64, 64) 40
// and 36: a tile is 80 bytes of every row.
constexpr int kGroupNormClusterThreads = 256, kGroupNormClusterBlocks = 3;
constexpr int kGroupNormClusterParts = 32;
constexpr int64_t kGroupNormHeldBytes = 48 * 1024;
constexpr int64_t kGroupNormRowsHeldBytes = 64 * 1024;          // channels last, at most
constexpr int64_t kGroupNormRowsSampleBytes = 6 * 1024 * 1024;  // of a sample, channels last
constexpr int64_t kGroupNormTileBytes = 64;                     // of a row, at least
// Flat, of a group that one block reads twice although there are clusters.
constexpr int64_t kGroupNormClusterWholeBytes = 32 * 1024;

// Blocks are counted in 32 bits.
constexpr int64_t kGroupNormMostBlocks = (int64_t{1} << 31) - 1;
constexpr int64_t kGroupNormMostTiles = 65535;  // along y
constexpr const char* kGroupNormTooMany = "there are too many groups or channels in all samples";

inline int64_t round_up(int64_t value, int64_t step) { return ceil_div(value, step) * step; }

// Bytes of a chunk where there are so many in all: few where that is few, so that all
// multiprocessors have some, and many where it is many, so that what a block does besides reading
// matters little.
inline int64_t group_norm_chunk_bytes(int64_t bytes, int64_t parts, int64_t least) {
  return std::clamp<int64_t>(bytes / parts, least, 128 * 1024);
}

// Threads (x) for a vector of a plane each, side by side, and for planes (y).
struct GroupNormPolicy {
  bool cluster;  // one kernel, in which the chunks of a group are the blocks of a cluster
  int threads_x, threads_y;
  int64_t tiles;  // of channels, channels last
  int64_t chunks, chunk_positions, chunk_channels;
};

inline void group_norm_set_chunks(GroupNormInput& p, const GroupNormPolicy& policy) {
  p.chunks = policy.chunks;
  p.chunk_positions = policy.chunk_positions;
  p.chunk_channels = policy.chunk_channels;
}

// Flat: planes of some channels, or some positions of one, of which all chunks but the last have a
// multiple of `step` vectors. `planes`: that a chunk may have.
inline GroupNormPolicy group_norm_flat_policy(const GroupNormInput& p, int64_t planes,
                                              int most_threads, int ahead, int64_t chunk_bytes,
                                              int64_t step) {
  const int size = dtype_size(p.dtype), vector_size = 16 / size;
  const int64_t plane_bytes = p.positions * size;
  GroupNormPolicy policy{};
  policy.tiles = 1;
  policy.chunk_positions = p.positions;
  policy.chunk_channels = std::clamp<int64_t>(chunk_bytes / plane_bytes, 1, planes);
  if (plane_bytes > chunk_bytes) {
    policy.chunk_positions =
        std::min(p.positions, round_up(chunk_bytes / size, step * vector_size));
  }
  policy.chunks =
      ceil_div(p.positions, policy.chunk_positions) * ceil_div(planes, policy.chunk_channels);
  policy.threads_x =
      std::min(threads_for(ceil_div(policy.chunk_positions, vector_size), ahead), most_threads);
  const int64_t least = std::max(1, kWarpSize / policy.threads_x);
  policy.threads_y = static_cast<int>(
      std::clamp<int64_t>(next_power_of_two(policy.chunk_channels), least,
                          std::max<int64_t>(least, most_threads / policy.threads_x)));
  return policy;
}

// Channels last: threads (x) for a vector of channels each, side by side, and for positions (y).
// Channels for which a block has no threads are cut into tiles.
inline GroupNormPolicy group_norm_rows_policy(const GroupNormInput& p) {
  const int size = dtype_size(p.dtype);
  const int64_t vectors = ceil_div(p.channels, 16 / size);
  GroupNormPolicy policy{};
  policy.tiles = ceil_div(vectors, kGroupNormRowsThreads);
  policy.threads_x = static_cast<int>(ceil_div(vectors, policy.tiles));
  policy.threads_y = kGroupNormRowsThreads / policy.threads_x;  // with x at least a warp
  policy.chunk_channels = p.channels;
  const int64_t bytes = group_norm_chunk_bytes(p.channels * p.positions * size, 256, 16 * 1024);
  const int64_t positions = bytes / (int64_t{policy.threads_x} * 16);
  // No more than 1024 chunks, which one block adds up.
  policy.chunk_positions = round_up(std::max(positions, ceil_div(p.positions, 1024)),
                                    int64_t{policy.threads_y} * kGroupNormAhead);
  policy.chunks = ceil_div(p.positions, policy.chunk_positions);
  return policy;
}

// Shared memory of a block of a cluster.
inline int64_t group_norm_cluster_bytes(const GroupNormInput& p, const GroupNormPolicy& policy) {
  const int vector_size = 16 / dtype_size(p.dtype);
  if (p.channels_last) {
    const int64_t of_thread = ceil_div(policy.chunk_positions, policy.threads_y);
    return policy.threads_x * policy.threads_y * (of_thread * 16 + vector_size * 8);
  }
  const int64_t elements = policy.chunk_positions * vector_size;
  return policy.chunk_positions * 16 + (elements / p.positions + 2) * 8;
}

// Blocks of a cluster for so many bytes.
inline int group_norm_cluster_size(int64_t bytes, int least) {
  return std::clamp(next_power_of_two(ceil_div(bytes, kGroupNormHeldBytes)), least, kMaxCluster);
}

// Flat: a cluster for each group, whose vectors its blocks have equal parts of: chunk_positions
// counts vectors. Returns whether there is one.
inline bool group_norm_flat_cluster(const GroupNormInput& p, GroupNormPolicy& policy) {
  const int size = dtype_size(p.dtype), vector_size = 16 / size;
  const int64_t bytes = p.group_size * size;
  if (p.positions % vector_size != 0 || bytes <= kGroupNormClusterWholeBytes ||
      bytes > kGroupNormHeldBytes * kMaxCluster)
    return false;
  const int chunks = group_norm_cluster_size(bytes, 2);
  policy = {true, kGroupNormClusterThreads, 1, 1, chunks, ceil_div(bytes / 16, chunks), 0};
  return true;
}

// Channels last: a cluster for each tile of whole groups and whole vectors. Returns whether there
// is one.
inline bool group_norm_rows_cluster(const GroupNormInput& p, GroupNormPolicy& policy) {
  const int size = dtype_size(p.dtype), vector_size = 16 / size;
  int64_t width = std::lcm(p.group_channels, int64_t{vector_size});
  if (p.channels % width != 0 || p.channels * p.positions * size > kGroupNormRowsSampleBytes)
    return false;
  while (width * size < kGroupNormTileBytes && p.channels % (2 * width) == 0) width *= 2;
  const int64_t vectors = width / vector_size, groups = width / p.group_channels;
  const int64_t tiles = p.channels / width;
  if (vectors > kGroupNormClusterThreads || groups > kGroupNormClusterParts ||
      tiles > kGroupNormMostTiles)
    return false;
  const int chunks = group_norm_cluster_size(p.positions * width * size, 1);
  const int threads_x = static_cast<int>(vectors), threads_y = kGroupNormClusterThreads / threads_x;
  policy = {true, threads_x, threads_y, tiles, chunks, ceil_div(p.positions, chunks), 0};
  return policy.chunk_positions * width * size <= kGroupNormRowsHeldBytes;
}

// Whether there is one kernel for all, and how it is laid out.
inline bool group_norm_cluster_policy(const GroupNormInput& p, const DeviceInfo& device,
                                      GroupNormPolicy& policy) {
  return device.has_clusters && (p.channels_last ? group_norm_rows_cluster(p, policy)
                                                 : group_norm_flat_cluster(p, policy));
}

inline GroupNormPolicy group_norm_forward_policy(const GroupNormInput& p) {
  if (p.channels_last) return group_norm_rows_policy(p);
  const int size = dtype_size(p.dtype);
  const int64_t bytes = p.group_size * size;
  if (bytes <= kGroupNormWholeBytes) {
    return group_norm_flat_policy(p, p.group_channels, kGroupNormFlatThreads, kGroupNormAhead,
                                  bytes, 1);
  }
  // A plane of many chunks is cut into equal ones.
  const int64_t parts = ceil_div(p.positions * size, kGroupNormChunkBytes);
  return group_norm_flat_policy(
      p, p.group_channels, kGroupNormChunkThreads, kGroupNormAhead,
      parts == 1 ? kGroupNormChunkBytes : ceil_div(p.positions, parts) * size, 1);
}

// Flat, a chunk is one of a plane: it has sums of every channel. Small planes share a block.
inline GroupNormPolicy group_norm_backward_policy(const GroupNormInput& p) {
  if (p.channels_last) return group_norm_rows_policy(p);
  const int64_t bytes = p.positions * dtype_size(p.dtype);
  const int64_t chunk_bytes = group_norm_chunk_bytes(bytes, 32, 64 * 1024);
  GroupNormPolicy policy =
      group_norm_flat_policy(p, 1, kGroupNormRowsThreads, kGroupNormFewAhead, chunk_bytes,
                             kGroupNormRowsThreads * kGroupNormFewAhead);
  policy.threads_y = std::max(1, kGroupNormRowsThreads / 2 / policy.threads_x);
  return policy;
}

}  // namespace fuselage
