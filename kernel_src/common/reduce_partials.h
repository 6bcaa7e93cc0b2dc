// The second stage of every gradient that is a sum over rows. The blocks of the first stage leave
// rows of float32 partial sums:
//
//   partials [groups][parts][kinds][columns]
//
// A group is what shares a result (all rows, or those of a batch element); each of its parts was
// left by one block or cluster. The kernel adds up the parts of each group in a fixed order, which
// depends on the numbers of groups and parts alone, and gives the sums to a functor, which writes
// the gradients:
//
//   struct Finish {
//     static constexpr int kKinds;   // sums of a column in a part, at most
//     static constexpr int kTotals;  // values of a column that are added up over the groups, or 0
//     Columns load(column, inside);  // what is read before the first stage has ended
//     group(columns, group, column, sums, totals);  // what comes of a group; adds to totals
//     all(columns, column, totals);                 // and of all groups, where there are totals
//     needs_all();                                  // whether that is needed now
//   };
//
// Block: (columns, lanes). Lane y has share y % shares of the parts of a group. Where totals are
// needed 32 / shares groups are side by side in a block, which goes through all of them; otherwise
// a block has one group. The kernel starts while the first stage ends (PDL), and then is all
// latency: a thread has up to kPartsAhead parts under way at once.
#pragma once

#include <algorithm>

#include "common/gpu_compat.h"
#include "common/launch_policy.h"
#include "common/runtime_dtype.h"

namespace fuselage {

struct PartialSums {
  const float* data;
  int64_t groups, parts;
  int kinds;
  int64_t columns;
};

constexpr int kReduceThreads = 1024;
constexpr int kPartsAhead = 5;  // of a thread: all that it has where blocks left up to 160

namespace {

// Sums of kCount values over the lanes y, y + step, ... of a column, `count` of them, a power of
// two, in lane y alone: every fourth in order, and these four in pairs, which rounds less than one
// after the other. All threads call together; before the next time, they meet.
template <int kCount>
__device__ __forceinline__ void add_lanes(float (&values)[kCount], float* scratch, int step,
                                          int count, bool adds) {
  const int own = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kCount; ++k) scratch[k * kReduceThreads + own] = values[k];
  __syncthreads();
  if (!adds) return;
  const int pitch = step * static_cast<int>(blockDim.x);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float* lanes = scratch + k * kReduceThreads + own;
    float four[4] = {};
#pragma unroll 2
    for (int i = 0; i < count; i += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] += j < count ? lanes[(i + j) * pitch] : 0.0f;
    }
    values[k] = (four[0] + four[1]) + (four[2] + four[3]);
  }
}

template <typename Finish>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_partials_kernel(const PartialSums partials, const int log2_shares, const bool needs_all,
                           const Finish finish) {
  constexpr int kKinds = Finish::kKinds;
  constexpr int kTotals = Finish::kTotals > 0 ? Finish::kTotals : 1;
  constexpr bool kHasTotals = Finish::kTotals > 0;
  __shared__ float scratch[(kKinds > kTotals ? kKinds : kTotals) * kReduceThreads];
  const bool goes_on = kHasTotals && needs_all;  // to other groups
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int shares = 1 << log2_shares, parts = static_cast<int>(partials.parts);
  const int share = static_cast<int>(threadIdx.y) & (shares - 1);
  const int side_by_side = static_cast<int>(blockDim.y) >> log2_shares;
  const int64_t part_size = partials.kinds * partials.columns, group_size = parts * part_size;
  const int64_t step = part_size << log2_shares;  // between the parts of a thread
  const bool has_column = column < partials.columns;
  const auto columns = finish.load(column, has_column);
  float totals[kTotals] = {};
  int64_t first = goes_on ? 0 : int64_t{blockIdx.y};
  int64_t group = first + (threadIdx.y >> log2_shares);
  const float* of_group = partials.data + group * group_size + share * part_size + column;
  grid_dependency_wait();
  for (; first < partials.groups; first += side_by_side) {
    const bool inside = group < partials.groups && has_column;
    float sums[kKinds] = {};
    if (inside) {
      const float* part = of_group;
#pragma unroll 1
      for (int i = share; i < parts; i += kPartsAhead << log2_shares) {
        float values[kPartsAhead][kKinds];
#pragma unroll
        for (int j = 0; j < kPartsAhead; ++j) {
          const bool there = i + (j << log2_shares) < parts;
#pragma unroll
          for (int k = 0; k < kKinds; ++k) {
            const bool kept = there && (kKinds == 1 || k < partials.kinds);
            values[j][k] = kept ? part[j * step + k * partials.columns] : 0.0f;
          }
        }
#pragma unroll
        for (int j = 0; j < kPartsAhead; ++j) {
#pragma unroll
          for (int k = 0; k < kKinds; ++k) sums[k] += values[j][k];
        }
        part += kPartsAhead * step;
      }
    }
    if (shares > 1) add_lanes(sums, scratch, 1, shares, share == 0);
    if (share == 0 && inside) finish.group(columns, group, column, sums, totals);
    if (!goes_on) return;
    group += side_by_side;
    of_group += side_by_side * group_size;
    __syncthreads();
  }
  if constexpr (kHasTotals) {
    if (side_by_side > 1) add_lanes(totals, scratch, shares, side_by_side, threadIdx.y == 0);
    if (threadIdx.y == 0 && has_column) finish.all(columns, column, totals);
  }
}

// The sums of one kind, written as they are: row `group` of a [groups, columns] tensor.
struct WriteColumns {
  static constexpr int kKinds = 1, kTotals = 0;
  struct Columns {};
  void* data;
  DType dtype;
  int64_t size;

  __device__ __forceinline__ Columns load(int64_t, bool) const { return {}; }
  __device__ __forceinline__ void group(const Columns&, int64_t group, int64_t column,
                                        const float (&sums)[1], float (&)[1]) const {
    store_value(data, dtype, group * size + column, sums[0]);
  }
};

// Launches the second stage after the kernel that leaves the partial sums.
template <typename Finish>
gpuError reduce_partials(const PartialSums& partials, gpuStream stream, const Finish& finish) {
  // As few lanes a group as have all its parts under way at once, so that more groups are.
  int log2_shares = 0;
  while (log2_shares < 5 && (kPartsAhead << log2_shares) < partials.parts) ++log2_shares;
  const int shares = 1 << log2_shares;
  // Without totals each group has blocks of its own, if a grid has room for them.
  bool needs_all = false;
  if constexpr (Finish::kTotals > 0)
    needs_all = finish.needs_all() || partials.groups > kMostBlocksAlongY;
  int lanes = shares;
  if (needs_all)
    lanes *= static_cast<int>(std::min<int64_t>(32 / shares, next_power_of_two(partials.groups)));
  const int columns = kReduceThreads / lanes;
  const dim3 grid(ceil_div(partials.columns, columns), needs_all ? 1 : partials.groups);
  return gpu_launch_after(&reduce_partials_kernel<Finish>, grid, dim3(columns, lanes), stream,
                          partials, log2_shares, needs_all, finish);
}

}  // namespace
}  // namespace fuselage
