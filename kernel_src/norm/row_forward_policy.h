// How the forward of row operators (norm/row_forward.h) is laid out on a GPU: a pure function of
// the device, the element size and the shape.
#pragma once

#include <algorithm>

#include "common/launch_policy.h"

namespace fuselage {

constexpr int kForwardThreads = 512;       // of a block, at most
constexpr int kForwardShortThreads = 128;  // of a block whose threads have several rows
constexpr int kForwardVectors = 4;         // of a row in a thread

// Of a row in a thread, where an operator has a kernel with more; the threads of its blocks, at
// most, and the blocks that a multiprocessor has registers for.
constexpr int kForwardMostVectors = 8, kForwardMostVectorThreads = 256,
              kForwardMostVectorBlocks = 3;

struct RowForwardShape {
  int64_t rows, dim;
  int element_size;   // of the inputs
  bool aligned;       // every row of every tensor starts and ends on a 16-byte boundary
  bool most_vectors;  // whether there is a kernel with kForwardMostVectors
  bool light;         // one sum of one input: little besides the loads
  int two_vectors;    // a thread's, where a row has so many at most. Measured
};

// Whether rows of so many vectors are enough for that many of them a thread.
inline bool has_rows_for_most_vectors(const DeviceInfo& device, int64_t rows, int64_t count) {
  const int64_t resident_warps = int64_t{device.multiprocessors} * kForwardMostVectorBlocks *
                                 kForwardMostVectorThreads / kWarpSize;
  return rows * ceil_div(count, kWarpSize * kForwardMostVectors) >=
         device.tuning.norm_wide_waves * resident_warps;
}

// What a thread does for a row's moments besides its vectors takes as many instructions as four of
// them. Eight pay where a row then has one warp, or a block would have half of its threads, and
// there are rows for five waves of them; and of longer rows always. On an H200, bfloat16:
// ada_layer_norm of (32760, 1536) takes 64 us with four and 55 with eight, layer_norm of
// (16384, 8192) 138 and 132, of (4096, 16384) 75 and 70; but ada_layer_norm of (9984, 2048), three
// waves, 27 and 29, and layer_norm of (8192, 3072), two warps, 29 and 33.
inline bool most_vectors_pay(const DeviceInfo& device, int64_t rows, int64_t count) {
  constexpr int64_t kHalf = int64_t{kForwardThreads} * kForwardVectors / 2;
  const bool one_warp =
      count > kWarpSize * kForwardVectors && count <= kWarpSize * kForwardMostVectors;
  return count > kHalf ||
         ((one_warp || count == kHalf) && has_rows_for_most_vectors(device, rows, count));
}

// How many vectors a thread has does not change the order of a row's sum (norm/row_reduce.h), so it
// may depend on the number of rows.
inline RowPolicy row_forward_policy(const DeviceInfo& device, const RowForwardShape& shape) {
  const int64_t count = ceil_div(shape.dim, 16 / shape.element_size);
  const int64_t block_vectors = int64_t{kForwardThreads} * kForwardVectors;
  RowPolicy policy{kForwardVectors, 1, kForwardThreads, 1, 1, false};
  // Half of them, so that two blocks or more fit on a multiprocessor: one loads while the other
  // adds up.
  if (count > block_vectors) policy.cluster = cluster_for(device, count, block_vectors / 2);
  const int64_t block_count = ceil_div(count, policy.cluster);
  policy.streamed = block_count > block_vectors;
  if (policy.streamed) {
    policy.cluster = 1;
    return policy;
  }
  // Four 16-byte loads of each input in flight a thread fill the memory pipeline at the occupancy
  // these kernels have; short rows get there by taking several rows a thread. Where all rows are on
  // the GPU at once, time is latency, and more threads have fewer vectors. On an H200, bfloat16:
  // layer_norm of (1024, 2048) takes 5.7 us with two vectors, 5.3 with four; ada_layer_norm of
  // (154, 2048) 3.5 with one, 3.2 with two, 3.8 with four.
  const auto all_resident = [&](int vectors) {
    const int64_t threads = threads_for(count, vectors);
    return threads <= kForwardThreads &&
           shape.rows * threads <=
               int64_t{device.multiprocessors} * device.tuning.norm_resident_threads;
  };
  // Light rows of up to 256 threads take two always: rms_norm of (4096, 2048) 9.9 us, and 10.2 with
  // four; of (1024, 2048) 3.9 and 4.1.
  const bool few_rows = all_resident(1);
  const bool few_threads = count > kWarpSize * kForwardVectors && count <= kForwardThreads;
  // Of several inputs two are enough under way, and with more warps others work while one waits.
  const bool several_inputs = count > 2 * kWarpSize && count <= shape.two_vectors;
  const bool two_pay =
      few_rows || several_inputs || (shape.light && (few_threads || all_resident(2)));
  const bool most_vectors =
      shape.most_vectors && policy.cluster == 1 && most_vectors_pay(device, shape.rows, count);
  const auto held = [&](int vectors) { return int64_t{threads_for(count, vectors)} * vectors; };
  if (count <= kWarpSize) {
    policy.vectors = 1;
    if (!few_rows) policy.rows_per_thread = 4;
  } else if (shape.aligned && two_pay) {
    if (count > 2 * kWarpSize) policy.vectors = 2;  // more than a warp: norm/row_reduce.h
  } else if (shape.aligned && count <= 2 * kWarpSize) {
    policy.vectors = 2;
    policy.rows_per_thread = 2;
  } else if (shape.aligned && most_vectors) {
    policy.vectors = kForwardMostVectors;
  } else if (shape.aligned && count > kWarpSize * kForwardVectors &&
             2 * held(kForwardVectors) > 3 * count) {
    // A third of the threads would idle: gate_residual_ada_norm of (16384, 1152) takes 64 us so,
    // and 57 with two vectors. Not in one warp: layer_norm of (52428, 640) takes 41 us so, and 64
    // with two warps.
    policy.vectors = 2;
  }
  policy.threads_per_row = threads_for(ceil_div(count, policy.cluster), policy.vectors);
  // A thread's vectors lie a warp apart.
  if (policy.vectors > 1) policy.threads_per_row = std::max(policy.threads_per_row, kWarpSize);
  // A lane looks after the statistics of one of its rows.
  policy.threads_per_row = std::max(policy.threads_per_row, policy.rows_per_thread);
  // With the most vectors fewer warps end together: layer_norm of (16384, 1280) takes 26.3 us with
  // four rows a block, 24.6 with two.
  const int block_threads =
      policy.vectors == kForwardMostVectors ? kForwardShortThreads / 2 : kForwardShortThreads;
  if (policy.threads_per_row <= kWarpSize)
    policy.rows_per_block = block_threads / policy.threads_per_row;
  return policy;
}

}  // namespace fuselage
