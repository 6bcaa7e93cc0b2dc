// How the sampling kernels are laid out on a GPU: pure functions of the device and the shape. Results do not depend
// on any of it.
#pragma once

#include "common/launch_policy.h"
#include "sample/sample.h"

namespace fuselage {

constexpr int kSampleThreads = 256;
constexpr int kSampleBlocks = 4;     // on a multiprocessor, of a draw
constexpr int kSampleVector = 8;     // neighbouring logits of a thread
constexpr int kSampleTurn = 16;      // its logits that are loaded before the first is used
constexpr int kChooseThreads = 512;  // of the block that looks for a filter's bound in a row
constexpr int kListed = 8192;  // logits of a bin that are listed; of more, the row is read again

struct SamplePolicy {
  int64_t part;  // logits of a row for one block
  int64_t parts;
};

inline SamplePolicy sample_policy(const DeviceInfo& device, int64_t batch, int64_t vocab) {
  // A turn of all threads at least: the first has to find a score to beat. Four at most, so that the last blocks do not
  // keep few multiprocessors busy.
  constexpr int64_t kTurn = int64_t{kSampleThreads} * kSampleTurn;
  const int64_t blocks = int64_t{device.multiprocessors} * kSampleBlocks;
  const int64_t wanted = ceil_div(ceil_div(vocab * batch, blocks), kTurn) * kTurn;
  SamplePolicy policy{};
  policy.part = std::min<int64_t>(std::max<int64_t>(wanted, kTurn), 4 * kTurn);
  policy.parts = ceil_div(vocab, policy.part);
  return policy;
}

// A row in the shared memory of a cluster.
constexpr int kClusterThreads = 512;
constexpr int kClusterBlocks = 2;              // on a multiprocessor
constexpr int kClusterListed = 4096;           // logits that may be listed
constexpr int kClusterFixedBytes = 34 * 1024;  // of a block, besides its part of the row
constexpr int kClusterWanted = 8192;           // logits of a row for one block

struct ClusterPolicy {
  int64_t part;      // logits of a row for one block
  int blocks;        // of a cluster; 0 where the GPU has none, or not room for the row
  int64_t clusters;  // at most, where most rows are done before: no more run at once
};

inline ClusterPolicy cluster_policy(const DeviceInfo& device, int64_t batch, int64_t vocab) {
#if defined(USE_ROCM)
  return {};
#else
  constexpr int64_t kMostRows = ((int64_t{1} << 31) - 1) / kMaxCluster;
  if (device.compute_capability < 90 || vocab == 0 || batch > kMostRows) return {};
  ClusterPolicy policy{};
  policy.blocks = cluster_for(device, vocab, kClusterWanted);
  policy.part = ceil_div(ceil_div(vocab, policy.blocks), 32) * 32;  // words of a bitmask
  policy.clusters =
      std::max<int64_t>(kClusterBlocks * int64_t{device.multiprocessors} / policy.blocks, 1);
  const int64_t most =
      (device.shared_bytes_per_block - kClusterFixedBytes) / static_cast<int64_t>(sizeof(float));
  return policy.part <= most ? policy : ClusterPolicy{};
#endif
}

constexpr int kFinishThreads = 128;

// The head. Rows of weight are tiled by kHeadRows; rows of the batch by 8 to 128, as there are.
constexpr int kHeadRows = 128;
constexpr int kHeadThreads = 128;
constexpr int kHeadFloorsFrom = 17;  // rows of the batch: with fewer, noise is hidden behind memory
constexpr int kHeadSharedBytes = 99 * 1024;  // what a block may have on every GPU from 8.0 on

struct HeadTile {
  int columns;                  // rows of the batch
  int warp_rows, warp_columns;  // of the tile, a warp's
  int step;                     // columns of a stage of shared memory
  int stages;
  int blocks;  // on a multiprocessor
};

constexpr int head_columns(int64_t batch, bool narrow) {
  return batch <= 8 ? 8 : batch <= 16 ? 16 : batch <= 32 ? 32 : batch <= 64 || narrow ? 64 : 128;
}

// Few rows of the batch wait for memory: long stages. Many wait for shared memory, of which square parts of a tile
// read least; two blocks of those are all that the registers hold, so that one draws while the other multiplies. (One
// block with twice the rows takes an eighth longer: H200, bfloat16, batch 128, vocab 151936, dim 4096.)
// Weights of float8 are made wider by each warp that reads them: it should be one.
constexpr HeadTile head_tile(int columns, bool narrow) {
  return columns == 128             ? HeadTile{128, 64, 64, 32, 5, 2}
         : columns == 64 && !narrow ? HeadTile{64, 64, 32, 32, 4, 3}
         : columns == 64            ? HeadTile{64, 32, 64, 32, 4, 3}
                                    : HeadTile{columns, 32, columns, 64, 4, 2};
}

// Float32, without tensor cores.
constexpr int kFloatStep = 32;

struct FloatTile {
  int columns, threads;
  int rows_each, columns_each;  // of a thread
  int stages;
};

constexpr int float_columns(int64_t batch) { return batch <= 32 ? 16 : 64; }

constexpr FloatTile float_tile(int columns) {
  return columns == 16 ? FloatTile{16, 128, 2, 8, 4} : FloatTile{64, 128, 4, 16, 3};
}

// The form for all types and GPUs, without tensor cores.
constexpr int kPlainThreads = 256;
constexpr int kPlainRows = 128;
constexpr int kPlainColumns = 16;
constexpr int kPlainStep = 16;

}  // namespace fuselage
