// How rows that are quantised are laid out on a GPU: pure functions of the device and the shape. A
// maximum does not depend on the order, so neither do results.
#pragma once

#include <algorithm>

#include "common/launch_policy.h"

namespace fuselage {

constexpr int kQuantThreads = 1024;      // of a block, at most
constexpr int kQuantSliceThreads = 256;  // where rows are cut into slices
constexpr int kQuantShortThreads = 128;  // of a block with several rows
constexpr int kQuantVectors = 4;         // of a thread, where there are enough
// Of a multiprocessor, up to which all rows count as there at once.
constexpr int kQuantResidentThreads = 1024;
constexpr int64_t kMaxQuantBlocks = (int64_t{1} << 31) - 1;

// A row belongs to `threads_per_row` threads with `vectors` vectors each; or to as many of each of
// `slices` blocks, where it has no scale of its own.
struct QuantPolicy {
  int vectors;
  int threads_per_row;
  int rows_per_block;
  int64_t slices;
  bool for_many;  // one of the kernels for float8_e4m3fn
};

struct QuantShape {
  int64_t rows, dim;
  int element_size;
  bool whole_rows;  // a row has one scale, which is to be made
  bool aligned;     // every row of every tensor starts and ends on a boundary
  bool for_many;    // of e4m3, and aligned or more than a warp's
};

// Where all rows are on the GPU at once, time is latency, and threads have one vector: swiglu_quant
// of (8, 4096) bfloat16 takes 2.2 us on an H100 so, and 2.6 with four. Rows with one scale that are
// longer than a block holds have the kernel for all others, which goes through them in parts of one
// size.
inline QuantPolicy quant_policy(const DeviceInfo& device, const QuantShape& shape) {
  const int64_t count = ceil_div(shape.dim, 16 / shape.element_size);
  const bool is_short = count <= kWarpSize;
  const bool for_many =
      shape.for_many && !(shape.whole_rows && count > int64_t{kQuantThreads} * kQuantVectors);
  const bool few_rows =
      (shape.aligned || !for_many) && (!shape.whole_rows || count <= kQuantThreads) &&
      shape.rows * count <= int64_t{device.multiprocessors} * kQuantResidentThreads;
  QuantPolicy policy{is_short || few_rows ? 1 : kQuantVectors, kQuantThreads, 1, 1, for_many};
  if (for_many && is_short) {
    policy.threads_per_row = next_power_of_two(count);
    policy.rows_per_block = kQuantShortThreads / policy.threads_per_row;
    return policy;
  }
  const int64_t held =
      int64_t{shape.whole_rows ? kQuantThreads : kQuantSliceThreads} * policy.vectors;
  const int64_t parts = ceil_div(count, held);
  if (!shape.whole_rows) policy.slices = parts;
  // A thread's vectors lie a warp apart.
  policy.threads_per_row = std::max(threads_for(ceil_div(count, parts), policy.vectors), kWarpSize);
  if (policy.threads_per_row == kWarpSize) policy.rows_per_block = kQuantShortThreads / kWarpSize;
  return policy;
}

}  // namespace fuselage
