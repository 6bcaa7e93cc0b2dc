// How the kernels of the loss family are laid out on a GPU: pure functions of the device and the
// shape. The order of a float sum is that of the layout, so forwards do not ask for the rows.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "loss/cross_entropy.h"

namespace fuselage {

constexpr int kLossThreads = 512;      // of a block, at most
constexpr int kLossVectors = 2;        // 16-byte loads of a thread in flight
constexpr int kLossTurns = 8;          // that many times, at least, where a block has a row
constexpr int kLossPartTurns = 8;      // of a part of a row, at most
constexpr int kLossMostParts = 4;      // beyond, they have more
constexpr int kNarrowThreads = 256;    // of a block with several rows in a warp
constexpr int kGradientThreads = 256;  // of the backward
constexpr int kMultiplyThreads = 256;  // of a block that multiplies
constexpr int kMultiplyBlocks = 8;     // of them on a multiprocessor
constexpr int kLossSumThreads = 1024;  // of the block that adds up the losses of all rows
constexpr int kOnePassWarps = 8;       // of a block that has its part of a row twice, at most
constexpr int kOnePassBlocks = 3;      // of so many warps, on an SM
constexpr int kOnePassFixedBytes = 2 * 1024;                // of a block, besides logits
constexpr int kPieceLogits = kLossVectors * kWarpSize * 4;  // float32, of a warp at a time
constexpr int kPieceBytes = kPieceLogits * 4 + 8;           // with an mbarrier
constexpr int64_t kMaxLossBlocks = (int64_t{1} << 31) - 1;

// A thread has `vectors` vectors at a time, `threads` threads have a row. Rows of up to a warp's
// vectors share warps, with one vector a thread. Long rows are cut into parts, each with sums of
// its own: where rows are few, the blocks of a cluster have one each, and otherwise one block has
// all of them, one after the other. The bits are the same.
struct LossPolicy {
  int vectors;
  int threads;
  int rows_per_block;
  int parts;
  int part;  // logits of a part, of which all threads have as many, but of the last
};

inline LossPolicy loss_policy(int64_t vocab, int vector_size) {
  const int64_t count = std::max<int64_t>(ceil_div(vocab, vector_size), 1);
  if (count <= kWarpSize) {
    const int threads = threads_for(count, 1);
    return {1, threads, kNarrowThreads / threads, 1, static_cast<int>(count) * vector_size};
  }
  // Few threads for a row leave room for many rows, all of which load at once: 512 rows of 32000 in
  // one wave of blocks, not in a wave and a third.
  const int threads =
      std::clamp(threads_for(std::min<int64_t>(count, 1 << 16), kLossVectors * kLossTurns),
                 kWarpSize, kLossThreads);
  const int64_t turn = int64_t{threads} * kLossVectors;
  const int64_t turns = ceil_div(count, turn), most = ceil_div(turns, kLossPartTurns);
  const int parts = std::min(next_power_of_two(most), kLossMostParts);
  const int64_t part = ceil_div(turns, parts) * turn * vector_size;
  return {kLossVectors, threads, 1, parts, static_cast<int>(part)};
}

// The blocks of a row: more than one where all fit on the GPU at once. Of many rows, the blocks of
// a cluster wait for each other: (8192, 151936) in bfloat16 took 794 us so on an H200, and 580 with
// a block a row; (1, 151936) 14.6 and 21.8.
inline int loss_cluster(const DeviceInfo& device, int64_t rows, const LossPolicy& policy) {
  constexpr int kBlocks = 3;  // on a multiprocessor
  const bool fits = rows <= kBlocks * device.multiprocessors / policy.parts;
  return device.has_clusters && fits ? policy.parts : 1;
}

// The backward cuts rows into blocks of columns: every element is by itself. A thread has vectors
// `turns` times, so that what a block reads of its row first, target and statistics, is little
// beside its logits.
struct LossGradientPolicy {
  int vectors;
  int threads, rows_per_block;
  int turns;
  int columns_per_block;
  int64_t column_blocks, row_blocks;
};

inline LossGradientPolicy loss_gradient_policy(const DeviceInfo& device, int64_t rows,
                                               int64_t vocab, int vector_size) {
  constexpr int kTurns = 4, kBlocks = 16;  // blocks of a multiprocessor, for that many turns
  const LossPolicy row = loss_policy(vocab, vector_size);
  LossGradientPolicy policy{};
  policy.vectors = row.vectors;
  policy.threads = std::min(row.threads, kGradientThreads);
  policy.rows_per_block = row.vectors == 1 ? row.rows_per_block : kGradientThreads / policy.threads;
  const int columns = policy.threads * policy.vectors * vector_size;
  const int64_t blocks =
      ceil_div(rows, policy.rows_per_block) * ceil_div(vocab, int64_t{kTurns} * columns);
  const bool has_many = blocks >= int64_t{kBlocks} * device.multiprocessors;
  policy.turns = has_many && vocab > columns ? kTurns : 1;
  policy.columns_per_block = policy.turns * columns;
  policy.column_blocks = std::max<int64_t>(ceil_div(vocab, policy.columns_per_block), 1);
  policy.row_blocks = ceil_div(rows, policy.rows_per_block);
  return policy;
}

// One kernel reads a row of float32 logits, and writes its loss and gradient. The threads of
// `row` are those of a cluster, and have the logits that they have in the forward: a warp has
// pieces of kPieceLogits. All but its last one stay in shared memory until the sums are known.
struct OnePassPolicy {
  LossPolicy row;
  int warps;  // of a row
  int cluster, threads;
  int kept;  // pieces of a block in shared memory, at most
  int shared_bytes;
  int clusters;  // which take turns with the rows
  bool fits;
};

// The pieces of a warp of the row. Whole ones, but for the last.
constexpr int pieces_of(const LossPolicy& row, int vocab, int warp) {
  const int warps = row.threads / kWarpSize, turn = warps * kPieceLogits;
  const int left = vocab - warp / warps * row.part;
  const int of_warp = (left < row.part ? left : row.part) - warp % warps * kPieceLogits;
  return of_warp <= 0 ? 0 : (of_warp + turn - 1) / turn;
}

inline OnePassPolicy one_pass_policy(const DeviceInfo& device, int64_t rows, int64_t vocab,
                                     bool is_capped) {
  constexpr int kReservedBytes = 1024;  // of a block, which the driver has
  constexpr int kLeastBlocks = 2;       // NOTE: st.async is illegal in a launch without clusters
  // Rows of a cluster, at most. It copies one while it works on another, and waits for the first;
  // but of clusters with many rows, the last to start are alone for long. An H100 takes, in us:
  //   rows of a cluster         1     2     3     4     6    two kernels
  //   (2048, 151936)            -     -   666   665   665           1053
  //   (512, 151936)           231   192   183   183     -            287
  //   (256, 151936)           123   105   101   110   100            147
  //   (512, 50257)             93    78    74    81    70            120
  constexpr int kRows = 3;
  OnePassPolicy policy{};
  policy.row = loss_policy(vocab, 4);
  if (!device.has_clusters || !device.has_bulk_copy || policy.row.vectors != kLossVectors)
    return policy;
  policy.warps = policy.row.parts * policy.row.threads / kWarpSize;
  policy.cluster = std::max(next_power_of_two(ceil_div(policy.warps, kOnePassWarps)), kLeastBlocks);
  policy.threads = static_cast<int>(ceil_div(policy.warps, policy.cluster)) * kWarpSize;
  for (int rank = 0; rank < policy.cluster; ++rank) {
    int kept = 0;
    for (int warp = rank; warp < policy.warps; warp += policy.cluster)
      kept += std::max(pieces_of(policy.row, static_cast<int>(vocab), warp) - 1, 0);
    policy.kept = std::max(policy.kept, kept);
  }
  const int64_t bytes = int64_t{policy.kept} * kPieceBytes;
  policy.fits = bytes + kOnePassFixedBytes <= device.max_shared_memory;
  if (!policy.fits) return policy;
  policy.shared_bytes = static_cast<int>(bytes);
  const int of_threads = kOnePassBlocks * kOnePassWarps * kWarpSize / policy.threads;
  const int of_memory = (device.max_shared_memory + kReservedBytes) /
                        (policy.shared_bytes + kOnePassFixedBytes + kReservedBytes);
  const int blocks = std::max(std::min(of_threads, of_memory), 1);  // on an SM
  // A tanh is many instructions that wait for each other, and 8 warps are too few for them: (512,
  // 262144) with a softcap takes an H100 927 us so, and two kernels 578.
  policy.fits = blocks > 1 || !is_capped;
  const int at_once = std::max(device.multiprocessors / policy.cluster, 1) * blocks;
  // Fewer fit, as a cluster has SMs of one GPC: of 8 blocks, 45 on an H100, not 48.
  const int64_t of_cluster =
      std::clamp<int64_t>(ceil_div(rows, std::max(at_once * 7 / 8, 1)), 1, kRows);
  policy.clusters =
      static_cast<int>(std::min(ceil_div(rows, of_cluster), kMaxLossBlocks / policy.cluster));
  return policy;
}

// Whether the kernel may copy the rows of logits and write those of gradients: both start on
// 16-byte boundaries. Their ends may lie anywhere.
inline bool starts_aligned(const LossBackward& p) {
  return aligned_rows(p.in.logits, p.in.rows == 1 ? 0 : p.in.stride, 0, p.in.dtype) &&
         aligned_rows(p.grad_logits, p.in.rows == 1 ? 0 : p.grad_stride, 0, p.grad_dtype);
}

// Whether rows may be read, and gradients written, by whole vectors.
inline bool is_aligned(const LossRows& in) {
  return aligned_rows(in.logits, in.rows == 1 ? 0 : in.stride, in.vocab, in.dtype);
}
inline bool is_aligned(const LossBackward& p) {
  return is_aligned(p.in) &&
         aligned_rows(p.grad_logits, p.in.rows == 1 ? 0 : p.grad_stride, p.in.vocab, p.grad_dtype);
}

}  // namespace fuselage
