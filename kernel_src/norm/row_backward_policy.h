// How the backward of a row operator is laid out on a GPU: one pure function of the device and of
// what the operator reads, keeps and writes for a row.
#pragma once

#include <algorithm>

#include "common/launch_policy.h"

namespace fuselage {

constexpr int kMaxRowStages = 4;
constexpr int kMaxRowTensors = 4;
constexpr int kMaxRowsPerBlock = 32;  // of more than a warp each

// Vectors of a row in a tile of columns, where blocks have columns.
constexpr int kRowBackwardTile = 8;

// Less the kernels' own arrays.
constexpr int kRowBackwardArrayBytes = 4096;

// What the policy needs to know of an operator and of a call of it.
struct RowBackwardShape {
  int64_t groups, group_rows;  // a group is the rows whose column sums are one
  int64_t dim;
  bool aligned;              // every row of every tensor starts and ends on a 16-byte boundary
  int element_size;          // of what is normalised, and of every tensor but grad_out
  int grad_out_size;         // of an element
  int tensors;               // that are read for a row, grad_out among them
  int statistics;            // floats of a row
  int shared_factors;        // kinds of float32 factors in shared memory; 0: in registers
  bool factors_by_row;       // each row has its own
  int column_sums;           // of a column that are kept; none: 0
  bool sums_need_rows;       // some need a row's own sums, or groups share what comes of them
  int threads, max_columns;  // of a block and of a thread, at most
  bool short_rows;           // whether there are kernels with fewer columns a thread
  int least_vectors;         // of a thread in these
  bool bulk;                 // whether there are kernels with bulk copies
  bool full_stages;          // stages have room for all threads that a block may have
  // What was measured for the operator:
  int bulk_turns;  // bulk copies pay where a block has more rows than these, one after the other
  int bulk_row_bytes;  // that rows side by side have together, of bulk copies; 0: what fits
  // Bytes of rows under way to a multiprocessor, at most: more are slower. Of bulk copies, and of
  // others of aligned rows of a warp or more. Where neither says so, this many stages.
  int bulk_bytes, bytes, stages;
  int column_steps;  // of blocks that have columns, that take as long as a second kernel

  constexpr bool one_type() const { return grad_out_size == element_size; }
};

struct RowBackwardPolicy {
  RowPolicy row;
  bool bulk;         // whole rows are copied by one thread
  int stages;        // rows under way between global and shared memory
  int shared_bytes;  // dynamic shared memory of a block
  int64_t
      blocks_per_group;  // persistent blocks or clusters; each leaves one row of every partial sum
  int column_blocks;     // that make the column sums themselves: no partial sums then
};

// The statistics of each thread's row in a stage that has room for so many threads.
constexpr int row_statistics_bytes(int threads, int statistics) {
  return (threads * statistics * 4 + 127) / 128 * 128;
}

// Where shared memory is laid out: [statistics][factors][stages].
struct RowBackwardMemory {
  RowBackwardShape shape;
  int vector_size;

  explicit constexpr RowBackwardMemory(const RowBackwardShape& s)
      : shape(s), vector_size(16 / s.element_size) {}

  // Threads that a stage of so many rows has room for.
  constexpr int stage_threads(int rows, int threads) const {
    return shape.full_stages ? shape.threads : rows * threads;
  }
  constexpr int statistics_bytes(int rows, int threads) const {
    return row_statistics_bytes(stage_threads(rows, threads), shape.statistics);
  }
  constexpr int factor_bytes(int rows, int threads, int vectors) const {
    const int bytes = shape.shared_factors * threads * vectors * vector_size * 4;
    return ((shape.factors_by_row ? rows : 1) * bytes + 127) / 128 * 128;
  }
  // One element of each tensor.
  constexpr int element_bytes() const {
    return (shape.tensors - 1) * shape.element_size + shape.grad_out_size;
  }
  constexpr int vector_bytes(int threads, int vectors) const {
    return threads * vectors * vector_size * element_bytes();
  }
  // Of rows that start anywhere, which have another block of 16 bytes in each warp, and whose
  // vectors of either type begin on a boundary of so many. NOTE: their stages have room for the
  // threads that there are.
  constexpr int end_bytes(int rows, int threads, int vectors) const {
    const int warps = rows * threads / std::min(threads, kWarpSize);
    return shape.tensors * vectors * warps * 16 + (shape.one_type() ? 0 : 16);
  }
  constexpr int stage_bytes(int rows, int threads, int vectors) const {
    const int bytes =
        shape.aligned ? vector_bytes(stage_threads(rows, threads), vectors)
                      : vector_bytes(rows * threads, vectors) + end_bytes(rows, threads, vectors);
    return bytes + statistics_bytes(rows, threads);
  }
  // What a block takes with one stage, whether its rows are aligned or not.
  constexpr int least_bytes(int rows, int threads, int vectors) const {
    return vector_bytes(stage_threads(rows, threads), vectors) + end_bytes(rows, threads, vectors) +
           statistics_bytes(rows, threads) + factor_bytes(rows, threads, vectors);
  }
};

// ---- blocks that have columns (norm/row_columns.h) ----
//
// They pay where rows are few: then they are done before a second kernel would have started. Each
// step down the rows takes them about 0.27 us on an H100, and twice that where rows are not
// aligned; blocks of rows take longer with each turn. On an H100, bfloat16: rms_norm (64, 4096)
// takes 3.4 us so, and 6.7 with a second kernel; (512, 4096) 8.8 and 10.8; but (1024, 128), of
// whose blocks each has 64 steps, 17.6 and 4.4. On an H200: ada_layer_norm (2, 77, 2048) 6.2 and
// 11.9; (1, 512, 3072) 10.9 and 14.3; layer_norm (1024, 2048) 13.0 and 14.7. But they read the rows
// again, and leave fewer blocks to the rows: fused_add_layer_norm (16384, 4096) took 389 us so, and
// 162 without.
constexpr int64_t kMostElementsBesideColumns = int64_t{1} << 21;

// The rows that blocks beside them have: threads for few steps.
inline int64_t least_rows_beside_columns(int64_t group_rows, int threads_per_row) {
  return ceil_div(std::clamp<int64_t>(group_rows, 128, 512), threads_per_row);
}

// What decides about them.
struct ColumnBlocksShape {
  int64_t groups, group_rows, dim;
  int vector_size;
  bool aligned;
  int cluster, threads_per_row;
  int64_t most_rows;  // of a block
  int steps;          // that take as long as a second kernel
};

// How many there are: one of each tile of columns, or none. Rows that take a cluster have more
// tiles than there could be blocks.
inline int column_blocks_for(const DeviceInfo& device, const ColumnBlocksShape& shape) {
  const int64_t tiles =
      ceil_div(shape.dim, int64_t{kRowBackwardTile} * shape.vector_size) * shape.groups;
  if (shape.cluster > 1 || tiles > device.multiprocessors / 2) return 0;
  if (shape.groups * shape.group_rows > kMostElementsBesideColumns / shape.dim) return 0;
  const int64_t row_blocks = std::max<int64_t>(1, (device.multiprocessors - tiles) / shape.groups);
  const int64_t rows =
      std::clamp(std::max(ceil_div(shape.group_rows, row_blocks),
                          least_rows_beside_columns(shape.group_rows, shape.threads_per_row)),
                 int64_t{1}, shape.most_rows);
  const int64_t lanes = std::max<int64_t>(1, rows * shape.threads_per_row / kRowBackwardTile);
  const int64_t steps = ceil_div(shape.group_rows, lanes) * (shape.aligned ? 1 : 2);
  const int64_t turns = ceil_div(shape.group_rows, rows * row_blocks);
  return steps <= shape.steps + 4 * (turns - 1) ? static_cast<int>(tiles) : 0;
}

// Shared memory for the sums of each thread.
inline int column_bytes(int sums, int threads, int vector_size) {
  return sums * threads * vector_size * 4;
}

// How many rows a stage holds and how many stages there are: fills policy.bulk, .stages and
// .shared_bytes. The rows of a block may become fewer.
inline void row_backward_stages(const DeviceInfo& device, const RowBackwardMemory& memory,
                                int most_vectors, int shared_bytes, RowBackwardPolicy& policy) {
  const RowBackwardShape& shape = memory.shape;
  RowPolicy& row = policy.row;
  const int threads = row.threads_per_row, vectors = row.vectors;
  const auto fits_bulk = [&](int rows) {
    return 2 * memory.vector_bytes(rows * threads, vectors) +
               memory.factor_bytes(rows, threads, vectors) <=
           shared_bytes;
  };
  // Bulk copies pay where a block has rows enough to copy ahead. Their kernels have the most
  // vectors a thread.
  const int64_t blocks = std::max<int64_t>(1, device.multiprocessors / shape.groups);
  const int64_t turns = ceil_div(shape.group_rows * row.cluster, blocks * row.rows_per_block);
  policy.bulk = shape.aligned && shape.bulk && device.has_bulk_copy && threads > kWarpSize &&
                turns > shape.bulk_turns && vectors == most_vectors && policy.column_blocks == 0 &&
                fits_bulk(1);
  const int64_t row_bytes = shape.dim * memory.element_bytes();
  if (policy.bulk && shape.bulk_row_bytes > 0) {
    row.rows_per_block = static_cast<int>(
        std::min<int64_t>(row.rows_per_block, ceil_div(shape.bulk_row_bytes, row_bytes)));
  }
  while (policy.bulk && !fits_bulk(row.rows_per_block)) --row.rows_per_block;
  const int rows = row.rows_per_block;
  // NOTE: bulk copies bring no statistics.
  const int stage_bytes = policy.bulk ? memory.vector_bytes(rows * threads, vectors)
                                      : memory.stage_bytes(rows, threads, vectors);
  // Blocks of a cluster wait for each other every row, which more stages hide: rms_norm's
  // (512, 131072) takes 206 us on an H200 with two, 178 with three.
  int stages = kMaxRowStages;
  if (row.cluster == 1 && (vectors == most_vectors || threads == kWarpSize)) {
    const int64_t bytes = rows * row_bytes;
    const auto within = [&](int most_bytes, int least) {
      return static_cast<int>(std::clamp<int64_t>(most_bytes / bytes, least, kMaxRowStages));
    };
    if (policy.bulk) {
      stages = within(shape.bulk_bytes, 2);
    } else if (shape.aligned) {
      stages = within(shape.bytes, 1);
    } else if (vectors == most_vectors) {
      stages = shape.stages;
    }
  }
  const int factor_bytes = memory.factor_bytes(rows, threads, vectors);
  policy.stages = std::max(std::min((shared_bytes - factor_bytes) / stage_bytes, stages), 1);
  // At the end the same memory holds the column sums of the block's rows, to add them up.
  const int sums_bytes = rows * threads * vectors * memory.vector_size * 4;
  policy.shared_bytes = std::max(policy.stages * stage_bytes + factor_bytes, sums_bytes);
  if (policy.column_blocks > 0) {
    policy.shared_bytes = std::max(
        policy.shared_bytes, column_bytes(shape.column_sums, rows * threads, memory.vector_size));
  }
}

// NOTE: threads and vectors of a row, and so the order of its sums, do not depend on the number of
// rows.
inline RowBackwardPolicy row_backward_policy(const DeviceInfo& real_device,
                                             const RowBackwardShape& shape) {
  DeviceInfo device = real_device;
  const RowBackwardMemory memory(shape);
  RowBackwardPolicy policy{};
  RowPolicy& row = policy.row;
  row = {1, 1, std::min(shape.threads, 512), 1, 1, false};  // if it is streamed
  const int shared_bytes = device.max_shared_memory - kRowBackwardArrayBytes;

  const int64_t count = ceil_div(shape.dim, memory.vector_size);
  // Where shared memory is small, threads have fewer vectors (of full stages) or rows fewer
  // threads: the same whether rows are aligned or not.
  int most_vectors = shape.max_columns / memory.vector_size;
  int block_threads = shape.threads;
  const auto is_too_much = [&] {
    return memory.least_bytes(1, block_threads, most_vectors) > shared_bytes;
  };
  while (shape.full_stages && most_vectors > 1 && is_too_much()) most_vectors /= 2;
  while (block_threads > kWarpSize && is_too_much()) block_threads -= kWarpSize;
  const int64_t block_limit = int64_t{block_threads} * most_vectors;
  // Kernels of clusters have the most vectors alone.
  if (count > block_limit && most_vectors * memory.vector_size == shape.max_columns)
    row.cluster = cluster_for(device, count, block_limit);
  const int64_t block_count = ceil_div(count, row.cluster);
  row.streamed = block_count > block_limit;
  if (row.streamed) {
    row.cluster = 1;
    // The 256 threads of a block for columns have so many rows at a time (norm/row_columns.h). With
    // fewer in a part most of them would idle.
    constexpr int64_t kRowsAtOnce = 256 / kRowBackwardTile;
    policy.blocks_per_group = std::clamp<int64_t>(
        std::min(64 / shape.groups, shape.group_rows / kRowsAtOnce), 1, shape.group_rows);
    return policy;
  }
  row.vectors = most_vectors;
  while (shape.short_rows && row.vectors > shape.least_vectors &&
         block_count <= kWarpSize * row.vectors / 2) {
    row.vectors /= 2;
  }
  row.threads_per_row = threads_for(block_count, row.vectors);
  const int64_t most_rows = row.cluster > 1 ? 1 : block_threads / row.threads_per_row;
  // Where rows are few, the sums of columns are made by blocks of their own. Rows of two types are
  // too rare for them.
  if (shape.column_sums > 0 && !shape.sums_need_rows && shape.one_type()) {
    policy.column_blocks = column_blocks_for(
        device, {shape.groups, shape.group_rows, shape.dim, memory.vector_size, shape.aligned,
                 row.cluster, row.threads_per_row, most_rows, shape.column_steps});
    device.multiprocessors -= policy.column_blocks;
  }
  // As many rows side by side as there are for each multiprocessor, threads for, and room for two
  // stages.
  const int64_t blocks = std::max<int64_t>(1, device.multiprocessors / row.cluster / shape.groups);
  if (row.cluster == 1) {
    int64_t rows = ceil_div(shape.group_rows, blocks);
    if (policy.column_blocks > 0)
      rows = std::max(rows, least_rows_beside_columns(shape.group_rows, row.threads_per_row));
    row.rows_per_block = static_cast<int>(std::clamp<int64_t>(rows, 1, most_rows));
    while (row.rows_per_block > 1 && memory.least_bytes(row.rows_per_block, row.threads_per_row,
                                                        row.vectors) > shared_bytes) {
      --row.rows_per_block;
    }
  }
  row_backward_stages(device, memory, most_vectors, shared_bytes, policy);
  policy.blocks_per_group =
      std::min<int64_t>(ceil_div(shape.group_rows, row.rows_per_block), blocks);
  return policy;
}

}  // namespace fuselage
