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
// 16-byte vectors of a thread that are under way at once.
constexpr int kGroupNormAhead = 4;

// Channels last, in the forward: threads of a block, at most, and blocks of a multiprocessor, by
// which the kernels get their registers; chunks of a sample, unless it is small or large; and lanes
// of a warp that add up the parts of a group.
//
// On an H200, bfloat16, 32 groups, us where the multiprocessors hold the samples, and with three
// kernels: two samples of (320, 128, 128) 22.0 and 30.1, eight 89 and 98, two of (1280, 64, 64)
// 21.2 and 30.4, one of (512, 128, 128) with silu 19.4 and 27.2; but two of (640, 64, 64) 17.3,
// eight 64, where clusters take 18.9 and 57.
constexpr int kGroupNormRowsForwardThreads = 512, kGroupNormRowsForwardBlocks = 2;
constexpr int kGroupNormRowsForwardChunks = 128, kGroupNormRowsLanes = 8;

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
// and 36: a tile is 80 bytes of every row. Channels last needs 64 registers: 64 samples of
// (128, 32, 32) take 27 us on an H200 with three blocks, and 21 with four.
constexpr int kGroupNormClusterThreads = 256, kGroupNormClusterBlocks = 4;
constexpr int kGroupNormClusterParts = 32;
constexpr int64_t kGroupNormHeldBytes = 48 * 1024;
constexpr int64_t kGroupNormRowsHeldBytes = 64 * 1024;          // channels last, at most
constexpr int64_t kGroupNormRowsSampleBytes = 6 * 1024 * 1024;  // of a sample, channels last
constexpr int64_t kGroupNormTileBytes = 64;                     // of a row, at least
// Flat, of a group that one block reads twice although there are clusters.
constexpr int64_t kGroupNormClusterWholeBytes = 32 * 1024;

// The same of the backward, which holds x and grad_out: blocks of a multiprocessor, by which the
// kernels get their registers; bytes of a block, flat the wanted and the most, and channels last;
// bytes of a group or tile, at least, and of a flat one for which blocks have all threads, where
// others have half without silu; channels of a group, at most, or of a tile; and bytes of a sample,
// channels last.
//
// On an H100, bfloat16, 32 groups, us with one kernel and with four: flat, two samples of
// (640, 64, 64) 20.7 and 25.9, (320, 64, 64) 13.5 and 16.7, (1280, 32, 32) 13.9 and 16.9,
// (1280, 16, 16) 9.3 and 10.6. 256 threads take 22.6 for the first: clusters of 8 then want nearly
// all the room that there is, and some wait. With silu, 256 threads, 27.8 and 29.3. Channels last,
// (640, 64, 64) 33.0 and 38.9, (1280, 32, 32) 16.4 and 22.3; with 40 KB a block, 23.1. Then four
// kernels became faster. On an H200, channels last with silu, in one and in four: two samples of
// (640, 64, 64) 30.7 and 25.7, eight 85 and 70, one 17.9 and 19.9; two of (320, 64, 64) 19.7 and
// 23.1, eight 51 and 42; two of (1280, 32, 32) 15.9 and 24.0.
constexpr int kGroupNormBackwardClusterBlocks = 4, kGroupNormRowsBackwardClusterBlocks = 2;
constexpr int64_t kGroupNormBackwardHeldBytes = 20 * 1024, kGroupNormBackwardFlatBytes = 40 * 1024;
constexpr int64_t kGroupNormBackwardRowsBytes = 82000;
constexpr int64_t kGroupNormBackwardLeastBytes = 8 * 1024;
constexpr int64_t kGroupNormBackwardSmallBytes = 64 * 1024;
constexpr int64_t kGroupNormBackwardChannels = 512;
constexpr int64_t kGroupNormBackwardRowsSampleBytes = 4 * 1024 * 1024;

// Where the shared memory of all multiprocessors holds a flat group (norm/group_norm_grid.cu):
// warps of a block, by what they do; bytes of a chunk, at most, and channels that one may have a
// part of; and what a stage has besides its chunk.
//
// On an H100, one sample, 32 groups, us with one kernel, with three, and of a copy: bfloat16,
// (512, 128, 128) 25.2, 25.0 and 14.4, (512, 256, 256) 58.5, 79.1 and 49.4, (256, 512, 512) 104,
// 147 and 93, with silu 111, 148 and 94, (128, 1024, 1024) 211, 280 and 182, with silu 218, 282
// and 181; float32, (256, 512, 512) 208, 278 and 181. With chunks of 32 KB, the second to the
// fourth take 57.2, 107 and 217, with 16 KB 63.7, 111 and 208. On an H200, groups that have more
// than half of the stages: (256, 1024, 1024) 371, 427 and 256, (256, 1536, 1024) 562, 635 and 380.
constexpr int kGroupNormGridWatchWarps = 2, kGroupNormGridMomentWarps = 8;
constexpr int kGroupNormGridApplyWarps = 16;
constexpr int kGroupNormGridThreads =
    (2 + kGroupNormGridWatchWarps + kGroupNormGridMomentWarps + kGroupNormGridApplyWarps) *
    kWarpSize;
constexpr int64_t kGroupNormGridChunkBytes = 24 * 1024;
constexpr int kGroupNormGridChannels = 16;
constexpr int kGroupNormGridStateBytes = 320;

// The backward with several kernels: blocks of a multiprocessor, by which they get their registers;
// and, channels last, parts of a sample that have sums of their own, unless it is small.
//
// On an H200, bfloat16, two samples of (320, 128, 128), channels last with silu, take 36.3 us with
// 256 parts, 39.4 with 512; one of (256, 512, 512) 174 and, with 128, 193. With registers for three
// blocks these spill: with a block for each part, (256, 512, 512) 225, and 185 with two. Flat,
// before copies fetched whole lines of L2, chunks of 32 KB took 179 for it, of 64 KB 183, of 128
// and 256 KB 190 and 200; blocks that go on with another plane, as those of rows do with another
// part, were no faster.
constexpr int kGroupNormRowsBackwardBlocks = 2, kGroupNormPlanesBackwardBlocks = 3;
constexpr int kGroupNormRowsBackwardParts = 256;

// Vectors of a tensor that a thread has in shared memory, where it copies ahead.
constexpr int group_norm_copies_ahead(bool has_async_copy) { return has_async_copy ? 5 : 2; }

// Blocks are counted in 32 bits.
constexpr int64_t kGroupNormMostBlocks = (int64_t{1} << 31) - 1;
constexpr const char* kGroupNormTooMany = "there are too many groups or channels in all samples";

inline int64_t round_up(int64_t value, int64_t step) { return ceil_div(value, step) * step; }

// Bytes of a chunk where there are so many in all: few where that is few, so that all
// multiprocessors have some, and many where it is many, so that what a block does besides reading
// matters little.
inline int64_t group_norm_chunk_bytes(int64_t bytes, int64_t parts, int64_t least, int64_t most) {
  return std::clamp<int64_t>(bytes / parts, least, most);
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
// Channels for which a block has no threads are cut into tiles. About `parts` chunks, unless they
// would be small or large. `evenly`: rows of threads have as many positions of a chunk as others,
// and tiles of whole lines of memory are cut in two where a fourth of the threads would have none:
// the backward of two samples of (1280, 64, 64), bfloat16 with silu, takes 38 us so on an H200, not
// 42.
inline GroupNormPolicy group_norm_rows_policy(const GroupNormInput& p, int threads, int64_t parts,
                                              int64_t most_bytes, bool evenly) {
  const int size = dtype_size(p.dtype);
  const int64_t vectors = ceil_div(p.channels, 16 / size);
  GroupNormPolicy policy{};
  policy.tiles = ceil_div(vectors, threads);
  const auto set_threads = [&] {
    policy.threads_x = static_cast<int>(ceil_div(vectors, policy.tiles));
    policy.threads_y = threads / policy.threads_x;  // with x at least a warp
  };
  set_threads();
  constexpr int kVectorsOfLine = 8;
  if (evenly && 4 * policy.threads_x * policy.threads_y < 3 * threads &&
      vectors % (2 * policy.tiles * kVectorsOfLine) == 0) {
    policy.tiles *= 2;
    set_threads();
  }
  policy.chunk_channels = p.channels;
  const int64_t bytes =
      group_norm_chunk_bytes(p.channels * p.positions * size, parts, 16 * 1024, most_bytes);
  const int64_t positions = bytes / (int64_t{policy.threads_x} * 16);
  // No more than 1024 chunks, which one block adds up.
  policy.chunk_positions = round_up(std::max({positions, ceil_div(p.positions, 1024), int64_t{1}}),
                                    evenly ? policy.threads_y : 1);
  policy.chunks = ceil_div(p.positions, policy.chunk_positions);
  return policy;
}

// Groups that a vector of channels has parts of, at most.
constexpr int group_norm_rows_slots(int64_t group_channels, int vector_size) {
  if (group_channels % vector_size == 0) return 1;
  if (vector_size % group_channels == 0) return vector_size / static_cast<int>(group_channels);
  const int least = static_cast<int>(std::min<int64_t>(group_channels, vector_size));
  return (vector_size + least - 2) / least + 1;
}

// Pairs that the threads of a block leave of their channels.
inline int group_norm_rows_pairs(const GroupNormInput& p, const GroupNormPolicy& policy) {
  return policy.threads_x * policy.threads_y *
         group_norm_rows_slots(p.group_channels, 16 / dtype_size(p.dtype));
}

// Shared memory of a block of a cluster.
inline int64_t group_norm_cluster_bytes(const GroupNormInput& p, const GroupNormPolicy& policy) {
  const int vector_size = 16 / dtype_size(p.dtype);
  if (p.channels_last) {
    const int64_t of_thread = ceil_div(policy.chunk_positions, policy.threads_y);
    return policy.threads_x * policy.threads_y * of_thread * 16 +
           8 * group_norm_rows_pairs(p, policy);
  }
  const int64_t elements = policy.chunk_positions * vector_size;
  return policy.chunk_positions * 16 + (elements / p.positions + 2) * 8;
}

// Blocks of a cluster for so many bytes.
inline int group_norm_cluster_size(int64_t bytes, int least,
                                   int64_t of_block = kGroupNormHeldBytes) {
  return std::clamp(next_power_of_two(ceil_div(bytes, of_block)), least, kMaxCluster);
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

// Channels of a tile of whole groups and whole vectors, or 0 where a sample has no such tiles or is
// too large for them.
inline int64_t group_norm_tile_channels(const GroupNormInput& p) {
  const int size = dtype_size(p.dtype);
  int64_t width = std::lcm(p.group_channels, int64_t{16 / size});
  if (p.channels % width != 0 || p.channels * p.positions * size > kGroupNormRowsSampleBytes)
    return 0;
  while (width * size < kGroupNormTileBytes && p.channels % (2 * width) == 0) width *= 2;
  return width;
}

// Channels last: a cluster for each tile. Returns whether there is one.
inline bool group_norm_rows_cluster(const GroupNormInput& p, GroupNormPolicy& policy) {
  const int size = dtype_size(p.dtype), vector_size = 16 / size;
  const int64_t width = group_norm_tile_channels(p);
  if (width == 0) return false;
  const int64_t vectors = width / vector_size, groups = width / p.group_channels;
  const int64_t tiles = p.channels / width;
  if (vectors > kGroupNormClusterThreads || groups > kGroupNormClusterParts ||
      tiles > kMostBlocksAlongY)
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

// Blocks that have `stages` chunks each in shared memory at once. A group is cut into `chunks` of
// `chunk_vectors`, of which the last may have fewer.
struct GroupNormGridPolicy {
  int blocks, stages, shared_bytes;
  int64_t chunks, chunk_vectors;
};

// Flat, a group beyond a cluster: whether one kernel holds it, and how it is laid out. A sample has
// chunks for all blocks: with fewer blocks for few samples, a part of a GPU might have room for
// them, and not for those of more samples, whose sums would then have another order.
inline bool group_norm_grid_policy(const GroupNormInput& p, const DeviceInfo& device,
                                   GroupNormGridPolicy& policy) {
  const int size = dtype_size(p.dtype), vector_size = 16 / size;
  const int64_t bytes = p.group_size * size, vectors = bytes / 16;
  if (!device.has_bulk_copy || p.channels_last || p.positions % vector_size != 0 ||
      bytes <= kGroupNormHeldBytes * kMaxCluster || bytes > INT32_MAX)
    return false;
  const int64_t chunk_vectors = ceil_div(vectors, ceil_div(bytes, kGroupNormGridChunkBytes));
  const int64_t chunks = ceil_div(vectors, chunk_vectors);
  // Of a chunk, which may start anywhere in a vector.
  const int64_t stage_bytes = (chunk_vectors + 1) * 16 + kGroupNormGridStateBytes;
  const int stages = static_cast<int>(device.max_shared_memory / stage_bytes);
  policy = {device.multiprocessors, stages, static_cast<int>(stages * stage_bytes), chunks,
            chunk_vectors};
  // NOTE: the kernel needs chunks <= blocks * stages, or its blocks wait for each other for ever.
  return stages >= kGroupNormGridWatchWarps && p.groups * chunks >= policy.blocks &&
         chunks <= int64_t{policy.blocks} * stages &&
         (kGroupNormGridChannels - 2) * (p.positions / vector_size) >= chunk_vectors;
}

// Shared memory for the vectors that the threads of a block copy ahead.
inline int group_norm_copies_bytes(const DeviceInfo& device, const GroupNormPolicy& policy,
                                   int tensors) {
  return policy.threads_x * policy.threads_y * group_norm_copies_ahead(device.has_async_copy) *
         tensors * 16;
}

// The same of moments, channels last, whose pairs take their place.
inline int group_norm_rows_moments_bytes(const GroupNormInput& p, const DeviceInfo& device,
                                         const GroupNormPolicy& policy) {
  return std::max(group_norm_copies_bytes(device, policy, 1), 8 * group_norm_rows_pairs(p, policy));
}

// Channels last: shared memory of a block that holds its chunk (norm/group_norm_rows_grid.cu), with
// pairs of all channels and groups.
inline int64_t group_norm_rows_grid_bytes(const GroupNormInput& p, const GroupNormPolicy& policy) {
  const int64_t of_thread = ceil_div(policy.chunk_positions, policy.threads_y);
  return policy.threads_x * policy.threads_y * of_thread * 16 +
         8 * (group_norm_rows_pairs(p, policy) + p.channels + p.groups);
}

// Samples that the multiprocessors hold at once, laid out as group_norm_forward_policy says; more
// take several launches. 0 where other kernels take them.
inline int64_t group_norm_rows_grid_samples(const GroupNormInput& p, const DeviceInfo& device,
                                            const GroupNormPolicy& policy) {
  // A multiprocessor keeps 1 KB for each block, and has 1 KB more than a block may have.
  const int64_t bytes = group_norm_rows_grid_bytes(p, policy);
  if (!device.has_clusters || !p.channels_last || policy.tiles > 1 ||
      p.channels % (16 / dtype_size(p.dtype)) != 0 || bytes > device.max_shared_memory)
    return 0;
  const int64_t blocks = std::min<int64_t>((device.max_shared_memory + 1024) / (bytes + 1024),
                                           kGroupNormRowsForwardBlocks);
  const int64_t samples = device.multiprocessors * blocks / policy.chunks;
  // One by one, three kernels are as fast: four of (640, 128, 128), bfloat16 with silu, take 94 us
  // on an H200 so, and 88. Two at a time, four of (1280, 64, 64) take 43 and 54.
  return samples > 1 || p.samples <= samples ? samples : 0;
}

// Floats of its workspace: mean and squares of each chunk, and a counter of 64 bits.
inline int64_t group_norm_grid_workspace(const GroupNormInput& p,
                                         const GroupNormGridPolicy& policy) {
  return 2 * p.samples * p.groups * policy.chunks + 2;
}

// Shared memory of a block of a cluster in the backward.
inline int64_t group_norm_backward_cluster_bytes(const GroupNormInput& p,
                                                 const GroupNormPolicy& policy) {
  const int vector_size = 16 / dtype_size(p.dtype);
  const int64_t threads = policy.threads_x * policy.threads_y;
  if (p.channels_last) {
    const int64_t of_thread = ceil_div(policy.chunk_positions, policy.threads_y);
    const int64_t width = policy.threads_x * vector_size;
    const int64_t pairs = vector_size * (threads | 1) + std::max(threads, width);
    return threads * of_thread * 32 + (pairs + policy.chunks * width) * 8 + width * 4;
  }
  const int64_t warps = policy.chunks * threads / kWarpSize;
  return threads * policy.chunk_positions * 32 + (2 * p.group_channels + warps) * 8;
}

// Flat: a cluster for each group. Its warps have equal parts of the group's rows, and a row has a
// vector a lane: a piece of a channel, or some channels with few vectors. chunk_positions counts
// rows of a warp. Returns whether there is one.
inline bool group_norm_flat_backward_cluster(const GroupNormInput& p, GroupNormPolicy& policy) {
  const int size = dtype_size(p.dtype), vector_size = 16 / size;
  const int64_t of_group = 2 * p.group_size * size, vectors = p.positions / vector_size;
  if (p.positions % vector_size != 0 || p.group_channels > kGroupNormBackwardChannels ||
      of_group < kGroupNormBackwardLeastBytes ||
      of_group > kGroupNormBackwardFlatBytes * kMaxCluster)
    return false;
  const int lanes = std::min(kWarpSize, next_power_of_two(vectors));
  const int64_t rows = ceil_div(p.group_channels, kWarpSize / lanes) * ceil_div(vectors, kWarpSize);
  const int64_t bytes = rows * kWarpSize * 32;
  const bool is_small = bytes <= kGroupNormBackwardSmallBytes;
  const int threads = is_small || p.silu ? kGroupNormClusterThreads : kGroupNormClusterThreads / 2;
  const int chunks = group_norm_cluster_size(
      bytes, 1, p.silu && !is_small ? kGroupNormBackwardFlatBytes : kGroupNormBackwardHeldBytes);
  const int64_t of_warp = ceil_div(rows, chunks * threads / kWarpSize);
  policy = {true, lanes, threads / lanes, 1, chunks, of_warp, 0};
  return of_warp * threads * 32 <= kGroupNormBackwardFlatBytes;
}

// Channels last: a cluster for each tile, as group_norm_rows_cluster. Returns whether there is one.
inline bool group_norm_rows_backward_cluster(const GroupNormInput& p, GroupNormPolicy& policy) {
  const int size = dtype_size(p.dtype), vector_size = 16 / size;
  const int64_t width = group_norm_tile_channels(p);
  const int64_t sample_bytes = p.channels * p.positions * size;
  if (width == 0 || sample_bytes > kGroupNormBackwardRowsSampleBytes) return false;
  const int64_t tiles = p.channels / width, bytes = 2 * p.positions * width * size;
  if (width > kGroupNormBackwardChannels || width / p.group_channels > kGroupNormClusterParts ||
      tiles > kMostBlocksAlongY || bytes < kGroupNormBackwardLeastBytes)
    return false;
  const int chunks = group_norm_cluster_size(bytes, 1, kGroupNormBackwardRowsBytes);
  const int threads_x = static_cast<int>(width / vector_size);
  const int threads_y = kGroupNormClusterThreads / threads_x;
  policy = {true, threads_x, threads_y, tiles, chunks, ceil_div(p.positions, chunks), 0};
  return bytes <= chunks * kGroupNormBackwardRowsBytes;
}

// Whether there is one kernel that holds a group, and how it is laid out.
inline bool group_norm_backward_cluster_policy(const GroupNormInput& p, const DeviceInfo& device,
                                               GroupNormPolicy& policy) {
  const bool fits = device.has_clusters && dtype_size(p.dtype) == 2 &&
                    (p.channels_last ? group_norm_rows_backward_cluster(p, policy)
                                     : group_norm_flat_backward_cluster(p, policy));
  // NOTE: the kernels have arrays of their own besides.
  return fits && group_norm_backward_cluster_bytes(p, policy) <= device.max_shared_memory - 2048;
}

inline GroupNormPolicy group_norm_forward_policy(const GroupNormInput& p) {
  if (p.channels_last)
    return group_norm_rows_policy(p, kGroupNormRowsForwardThreads, kGroupNormRowsForwardChunks,
                                  512 * 1024, false);
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

// Channels last in the backward, with several kernels: parts that a block has one after the other.
// All blocks are on the GPU at once, or, where there are too many samples for that, go round a few
// times: as often as takes least, where a block takes as long to start as for some rows.
inline int group_norm_rows_parts_of_block(const GroupNormInput& p, const DeviceInfo& device,
                                          const GroupNormPolicy& policy) {
  constexpr int64_t kRowsOfStart = 4;
  const int64_t at_once = int64_t{device.multiprocessors} * kGroupNormRowsBackwardBlocks;
  const int64_t rows = policy.chunk_positions / policy.threads_y;
  int64_t best = policy.chunks, least = INT64_MAX;
  for (int64_t turns = 1; turns <= 4; ++turns) {
    // Of a sample.
    const int64_t blocks = std::min(turns * at_once / (p.samples * policy.tiles), policy.chunks);
    if (blocks == 0) continue;
    const int64_t parts = ceil_div(policy.chunks, blocks);
    const int64_t time = turns * (parts * rows + kRowsOfStart);
    if (time < least) best = parts, least = time;
  }
  return static_cast<int>(best);
}

// Shared memory of a block: vectors that are copied ahead and, channels last, sums of its threads.
inline int group_norm_backward_bytes(const GroupNormInput& p, const DeviceInfo& device,
                                     const GroupNormPolicy& policy, bool sums) {
  const int threads = policy.threads_x * policy.threads_y, vector_size = 16 / dtype_size(p.dtype);
  return group_norm_copies_bytes(device, policy, 2) + (sums ? (threads | 1) * vector_size * 8 : 0);
}

// Flat, a chunk is one of a plane: it has sums of every channel. Small planes share a block.
inline GroupNormPolicy group_norm_backward_policy(const GroupNormInput& p) {
  if (p.channels_last)
    return group_norm_rows_policy(p, kGroupNormRowsThreads, kGroupNormRowsBackwardParts, INT64_MAX,
                                  true);
  const int64_t bytes = p.positions * dtype_size(p.dtype);
  const int64_t chunk_bytes = group_norm_chunk_bytes(bytes, 128, 32 * 1024, 128 * 1024);
  GroupNormPolicy policy =
      group_norm_flat_policy(p, 1, kGroupNormRowsThreads, kGroupNormAhead, chunk_bytes,
                             kGroupNormRowsThreads * kGroupNormAhead);
  policy.threads_y = std::max(1, kGroupNormRowsThreads / 2 / policy.threads_x);
  return policy;
}

}  // namespace fuselage
