// The layout of a block of sample/lm_head_sm90.cu: its warps, its tiles, its shared memory and its
// barriers, and the kernel's parameters. The names of the files beside this one are those of the
// warp roles.
#pragma once

#include "common/ptx.h"
#include "sample/sample_device.h"
#include "sample/sample_policy.h"

namespace fuselage {
namespace gpu {
namespace {

constexpr int kGroupRows = 64;  // of a warpgroup's wgmma
constexpr int kUnitRows = 16;   // of a warp: tiles differ by one such unit at most
static_assert(kUnitRows == kNoiseGroup, "the rows of a warp share noise groups");
constexpr int kHiddenDepth = 64;  // elements of a tile of hidden: rows of 128 bytes
constexpr int kRowBytes = 128;
constexpr int kFloat8Depth = 128;  // float8: zeros fill the depth up to a multiple of this
constexpr int kBoundsWarps = 3;
constexpr int kBoundsThreads = 32 * kBoundsWarps;
constexpr int kMaxStages = 12;
constexpr int kConsumerBarrier = 1, kBoundsBarrier = 2;  // named barriers of these warps

// ---- warps and registers ----

// Consumer warpgroups. They also convert float8, at which two are slower than memory: on an H200,
// with 151936 rows of 4096 and 64 columns of bfloat16, three take 200 us and two 211 us. More
// columns need the registers.
constexpr int consumer_groups(int columns, bool float8) { return float8 && columns <= 64 ? 3 : 2; }
constexpr int consumer_warps(int columns, bool float8) {
  return 4 * consumer_groups(columns, float8);
}
constexpr int tile_rows(int columns, bool float8) {
  return consumer_groups(columns, float8) * kGroupRows;
}
constexpr int threads_of(int columns, bool float8) {
  return (consumer_warps(columns, float8) + 1 + kBoundsWarps) * 32;
}

// setmaxnreg budgets of a thread.
struct Registers {
  int consumer, others;
};

// The consumers can have no more than the others free: setmaxnreg would wait for ever.
constexpr Registers registers_of(int groups) {
  return groups == 3 ? Registers{144, 80} : Registers{216, 72};
}
static_assert(2 * registers_of(2).consumer + registers_of(2).others == 3 * 168,
              "of 65536 for 384 threads");
static_assert(3 * registers_of(3).consumer + registers_of(3).others == 4 * 128,
              "of 65536 for 512 threads");

// ---- tiles and stages ----

// Elements of a stage. Float8: two tiles of hidden beside rows of 128 bytes, where they fit into
// shared memory.
constexpr int depth_of(int columns, bool float8) {
  return float8 && columns < 256 ? kFloat8Depth : kHiddenDepth;
}
constexpr int weight_row_bytes(int columns, bool float8) {
  return depth_of(columns, float8) * (float8 ? 1 : 2);
}
constexpr int weight_bytes(int columns, bool float8) {
  return tile_rows(columns, float8) * weight_row_bytes(columns, float8);
}
constexpr int hidden_rows(int columns, bool float8) {
  return columns * (depth_of(columns, float8) / kHiddenDepth);
}
constexpr int stage_bytes(int columns, bool float8) {
  return weight_bytes(columns, float8) + hidden_rows(columns, float8) * kRowBytes;
}

struct Tile {
  int row;    // the first
  int units;  // of rows
};

// ---- shared memory ----

// Of the columns, rows of the batch: what their noise is made with, and the thresholds of their
// scores.
struct Columns {
  uint4* noise;              // key, stream, low word of the offset
  uint32_t* offset;          // high word of the offset
  float* inverse;            // 1 / temperature, in the unit of scores
  float* unit;               // of scores; 0: no noise
  float* scale;              // of products with float8
  float* thresholds;         // [samples]: lower scores cannot be drawn. See also Strips
  unsigned long long* best;  // [samples]: key of the score, complement of the row
  // Where logits are written `thresholds` has those of logits: strips below are not written. NaN
  // past the batch.

  // For log-probabilities of targets, in the place of `offset`: the row of each, or -1.
  __device__ __forceinline__ uint32_t* targets() const { return offset; }

  __device__ __forceinline__ NoiseKey key_of(int column) const {
    const uint4 key = noise[column];
    return {{key.x, key.y}, {key.w, offset[column]}, key.z};
  }
};

constexpr int columns_bytes(int columns, int samples) {
  return columns * (16 + 4 + 4 + 4 + samples * 12);
}

// As many samples as leave enough shared memory for the stages.
constexpr int max_samples(int columns) { return columns >= 256 ? 1 : columns >= 64 ? 4 : 16; }

// Upper bounds of the noise of a tile, one for each unit and column. There are two buffers. Where
// logits are written they hold the maxima of strips.
constexpr int bounds_of(int columns, bool float8) {
  return tile_rows(columns, float8) / kUnitRows * columns;
}
constexpr int bounds_bytes(int columns, bool float8) { return 2 * bounds_of(columns, float8) * 4; }

constexpr int kQueue = 136;                  // candidates of a warp; one fragment adds up to 128
constexpr int kQueueBytes = kQueue * 8 + 8;  // in whole pairs
constexpr int queue_bytes(int columns, bool float8) {
  return consumer_warps(columns, float8) * kQueueBytes;
}
constexpr int kBarrierBytes = (2 * kMaxStages + 5) * 8;

constexpr int fixed_bytes(int columns, bool float8) {
  return columns_bytes(columns, max_samples(columns)) + (float8 ? columns * 4 : 0) +
         bounds_bytes(columns, float8) + queue_bytes(columns, float8) + kBarrierBytes;
}

constexpr int stages_of(int columns, bool float8) {
  const int stages =
      (kWgmmaSharedBytes - fixed_bytes(columns, float8)) / stage_bytes(columns, float8);
  return stages < kMaxStages ? stages : kMaxStages;
}

constexpr int shared_bytes_of(int columns, bool float8) {
  return stages_of(columns, float8) * stage_bytes(columns, float8) + fixed_bytes(columns, float8);
}

// ---- the kernel's parameters ----

struct HeadDraw {
  int vocab, batch;
  int64_t vocab_offset;
  int first_row;    // at most 0: noise groups begin at multiples of 16 in the whole vocabulary
  int units;        // of 16 rows, from first_row on
  int tiles;        // the same number for each block
  int groups;       // of kColumns rows of the batch; the clusters of blocks are dealt to them
  int steps;        // stages of the depth
  int batch_start;  // rows of the batch in earlier launches
  int num_samples;
  Draws draws;
  const float* hidden_scales;  // [columns], with float8
  const float* weight_scale;   // [vocab], [1], or null; with float8
  bool scale_per_row;
  const void* bias;
  DType bias_dtype;
  float softcap;
  HeadLogits out;  // where logits are written, unless out.logits is null
  HeadSums sums;   // where sums of strips are written, unless sums.strips.sums is null
  // With sums: [batch, drawn_stride], of which the logits of the best scores so far are written.
  float* drawn_logits;
  int64_t drawn_stride;
  bool finds_thresholds;
  uint32_t* arrived;               // warps that have written their first strips; set to 0 before
  unsigned long long* candidates;  // [blocks, num_samples, columns]
  uint32_t* shared_thresholds;     // [num_samples, columns]: keys of scores;
      // [num_samples]: blocks that have shared those of their first tile

  __host__ __device__ bool draws_samples() const { return num_samples > 0; }
};

// NOTE: by whole multiples of `tiles`, so that nothing overflows.
__device__ __forceinline__ Tile tile_of(const HeadDraw& p, int number) {
  const int each = p.units / p.tiles, more = p.units % p.tiles;
  const int unit = number * each + min(number, more);
  return {p.first_row + unit * kUnitRows, each + (number < more ? 1 : 0)};
}

// ---- one kernel's ----

template <typename Element, int kBatchColumns, int kClusterBlocks, bool kIsFloat8>
struct Traits {
  using T = Element;  // of wgmma
  static constexpr int kColumns = kBatchColumns, kCluster = kClusterBlocks;
  static constexpr bool kFloat8 = kIsFloat8;
  static constexpr int kStages = stages_of(kColumns, kFloat8);
  static constexpr int kConsumerWarps = consumer_warps(kColumns, kFloat8);
  static constexpr int kConsumerThreads = 32 * kConsumerWarps;
  static constexpr int kThreads = threads_of(kColumns, kFloat8);
  static constexpr Registers kRegisters = registers_of(consumer_groups(kColumns, kFloat8));
  static constexpr int kStageBytes = stage_bytes(kColumns, kFloat8);
  static constexpr int kWeightBytes = weight_bytes(kColumns, kFloat8);
  static constexpr int kWeightRowBytes = weight_row_bytes(kColumns, kFloat8);
  static constexpr int kHiddenRows = hidden_rows(kColumns, kFloat8);
  static constexpr int kDepth = depth_of(kColumns, kFloat8);
  static constexpr int kSamples = max_samples(kColumns);
  static constexpr int kBounds = bounds_of(kColumns, kFloat8);
};

// What a block works on: every so many tiles of the weight, and a group of columns. The clusters
// that have the same tiles run side by side, so that all but one read them from L2.
struct Share {
  int first_tile, tile_step;
  int first_column;

  template <typename Traits>
  __device__ __forceinline__ static Share of(const HeadDraw& p, int rank) {
    const int cluster = blockIdx.x / Traits::kCluster, at = cluster / p.groups;
    return {at * Traits::kCluster + rank, static_cast<int>(gridDim.x) / p.groups,
            (cluster - at * p.groups) * Traits::kColumns};
  }
};

// The row of the weight that is the target of a row of the batch, or -1.
__device__ __forceinline__ uint32_t target_of(const HeadDraw& p, int column) {
  const int64_t row = int64_t{p.batch_start} + column;
  int64_t target = -1;
  if (column < p.batch) {
    target = p.sums.int32_targets ? static_cast<const int32_t*>(p.sums.targets)[row]
                                  : static_cast<const int64_t*>(p.sums.targets)[row];
  }
  return target < p.vocab ? static_cast<uint32_t>(max(target, int64_t{-1})) : ~0u;
}

// A block's shared memory, by pointers and, for asynchronous copies and barriers, by addresses.
template <typename Traits>
struct Block {
  static constexpr int kColumns = Traits::kColumns;
  uint32_t stages;
  Columns columns;
  float* bounds;                       // [2, units, columns]
  char* queues;                        // [consumer warps]
  uint32_t full, empty;                // [stages]: written by TMA, read by all consumers
  uint32_t bounds_full, bounds_empty;  // [2]: written by the bounds warps, read by all consumers
  uint32_t queue_empty;                // what was queued is scored

  __device__ __forceinline__ explicit Block(char* shared) {
    constexpr int kSamples = Traits::kSamples;
    stages = shared_address(shared);
    columns.noise = reinterpret_cast<uint4*>(shared + Traits::kStages * Traits::kStageBytes);
    columns.best = reinterpret_cast<unsigned long long*>(columns.noise + kColumns);
    columns.thresholds = reinterpret_cast<float*>(columns.best + kSamples * kColumns);
    columns.inverse = columns.thresholds + kSamples * kColumns;
    columns.offset = reinterpret_cast<uint32_t*>(columns.inverse + kColumns);
    columns.unit = reinterpret_cast<float*>(columns.offset + kColumns);
    columns.scale = columns.unit + kColumns;
    bounds = columns.scale + (Traits::kFloat8 ? kColumns : 0);
    queues = reinterpret_cast<char*>(bounds + 2 * Traits::kBounds);
    full = shared_address(queues + queue_bytes(kColumns, Traits::kFloat8));
    empty = full + kMaxStages * 8;
    bounds_full = empty + kMaxStages * 8;
    bounds_empty = bounds_full + 16;
    queue_empty = bounds_empty + 16;
  }

  // One thread; __syncthreads, and a cluster barrier, must follow.
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < Traits::kStages; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, Traits::kConsumerWarps * Traits::kCluster);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(bounds_full + 8 * i, kBoundsWarps);
      mbarrier_init(bounds_empty + 8 * i, Traits::kConsumerWarps);
    }
    mbarrier_init(queue_empty, kBoundsWarps);
    fence_mbarrier_init();
  }

  // All threads.
  __device__ __forceinline__ void init_columns(const HeadDraw& p, int first_column) const {
    if (p.draws_samples()) {
      for (int column = threadIdx.x; column < kColumns; column += Traits::kThreads) {
        const bool present = column < p.batch;
        const int64_t row = p.batch_start + (present ? column : 0);
        const NoiseKey key = key_of_row(p.draws, row);
        const RowTemperature temperature = row_temperature(p.draws, row);
        columns.noise[column] = make_uint4(key.key[0], key.key[1], key.stream, key.offset[0]);
        columns.offset[column] = key.offset[1];
        columns.inverse[column] = temperature.scale;
        columns.unit[column] = temperature.unit;
        for (int sample = 0; sample < p.num_samples; ++sample) {
          columns.thresholds[sample * kColumns + column] = present ? -INFINITY : INFINITY;
          columns.best[sample * kColumns + column] = 0;
        }
      }
    }
    for (int column = threadIdx.x; column < kColumns && p.sums.targets != nullptr;
         column += Traits::kThreads) {
      columns.targets()[column] = target_of(p, first_column + column);
    }
    for (int column = threadIdx.x; column < kColumns && p.out.strips.maxima != nullptr;
         column += Traits::kThreads) {
      columns.thresholds[column] = column < p.batch ? -INFINITY : NAN;
    }
  }
};

}  // namespace
}  // namespace gpu
}  // namespace fuselage
