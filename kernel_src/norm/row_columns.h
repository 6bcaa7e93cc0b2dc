// Sums of columns of a backward of rows (norm/row_backward.h) by blocks that have columns, and go
// down the rows: of rows so few that a second kernel would take longer than to read them twice, and
// of streamed rows.
#pragma once

#include <type_traits>

#include "common/quotient.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "common/vector.h"
#include "norm/row_tensors.h"

namespace fuselage {
namespace {

constexpr int kColumnThreads = kRowBackwardTile;  // that share a row; each has a vector of it

// The sums of a tile of columns over the rows [begin, end), by all threads of the block, in an
// order that depends on their number and that of the rows: give(column, sums), a thread a column.
// `memory`: kColumnSums floats a column of each thread.
template <typename Op, bool kAligned, bool kStreamed, typename Give>
__device__ __forceinline__ void add_columns(const typename Op::Params& p, const RowBackward& launch,
                                            int64_t first_column, int64_t begin, int64_t end,
                                            float* memory, const Give& give) {
  using T = typename Op::Element;
  constexpr int N = 16 / sizeof(T);
  constexpr int kTile = kColumnThreads * N;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int lanes = blockDim.x * blockDim.y / kColumnThreads;
  const int lane = thread / kColumnThreads;
  const int local = thread % kColumnThreads * N;
  const int dim = static_cast<int>(launch.dim);
  const int column = static_cast<int>(first_column) + local;
  float sums[Op::kColumnSums][N] = {};
  if (lane < lanes && column < dim) {
#pragma unroll 4
    for (int64_t row = begin + lane; row < end; row += lanes) {
      float grad_out[N], s[N];
      load<kAligned, N>(launch.tensors.row<typename Op::GradOut>(0, row, 0), column, dim)
          .to_floats(grad_out);
      load<kAligned, N>(launch.tensors.row<T>(1, row, 0), column, dim).to_floats(s);
      const RowMoments moments = load_moments<Op::kStatistics>(launch, row);
      const bool unused = may_be_unused(launch, moments) &&
                          is_zero(launch.tensors.row<typename Op::GradOut>(0, row, 0), dim);
      Op::template column_terms<kAligned, kStreamed>(p, launch, row, column, grad_out, s, moments,
                                                     unused, sums);
    }
  }
  // [sum][lane][column of the tile]
#pragma unroll
  for (int i = 0; i < Op::kColumnSums; ++i) {
    if (lane < lanes) {
#pragma unroll
      for (int k = 0; k < N; ++k) memory[(i * lanes + lane) * kTile + local + k] = sums[i][k];
    }
  }
  __syncthreads();
  for (int c = thread; c < kTile; c += blockDim.x * blockDim.y) {
    if (first_column + c >= launch.dim) continue;
    float totals[Op::kColumnSums] = {};
#pragma unroll 4
    for (int other = 0; other < lanes; ++other) {
#pragma unroll
      for (int i = 0; i < Op::kColumnSums; ++i)
        totals[i] += memory[(i * lanes + other) * kTile + c];
    }
    give(first_column + c, totals);
  }
}

// The sums of columns as the second stage takes them: those that are kept, one after the other.
template <typename Op, int kKinds>
__device__ __forceinline__ void keep_kinds(const typename Op::Params& p,
                                           const float (&sums)[Op::kColumnSums],
                                           float (&kinds)[kKinds]) {
#pragma unroll
  for (int i = 0; i < Op::kColumnSums; ++i) {
#pragma unroll
    for (int k = 0; k < kKinds; ++k) kinds[k] = Op::kind(p, i) == k ? sums[i] : kinds[k];
  }
}

// Where rows are few, blocks of their own make the gradients of columns, while others make those of
// rows: tensors so small are read twice, from L2, in less time than a second kernel takes to start.
template <typename Op, bool kAligned>
__device__ __forceinline__ void finish_columns(const typename Op::Params& p,
                                               const RowBackward& launch, int block,
                                               float* memory) {
  constexpr int kTile = kColumnThreads * 16 / static_cast<int>(sizeof(typename Op::Element));
  const auto finish = Op::finish(p);
  using Finish = std::decay_t<decltype(finish)>;
  const int tiles = (static_cast<int>(launch.dim) + kTile - 1) / kTile;
  const int group = block / tiles;
  const int64_t begin = group * launch.group_rows;
  add_columns<Op, kAligned, false>(
      p, launch, int64_t{block - group * tiles} * kTile, begin, begin + launch.group_rows, memory,
      [&](int64_t column, const float(&sums)[Op::kColumnSums]) {
        constexpr int kTotals = Finish::kTotals > 0 ? Finish::kTotals : 1;
        float kinds[Finish::kKinds] = {}, totals[kTotals] = {};
        keep_kinds<Op>(p, sums, kinds);
        const auto columns = finish.load(column, true);
        finish.group(columns, group, column, kinds, totals);
        if constexpr (Finish::kTotals > 0) {
          if (launch.groups == 1) finish.all(columns, column, totals);
        }
      });
}

// Partial sums of streamed rows. Grid: groups * blocks_per_group, times the tiles of columns; a
// block has an equal share of a group's rows.
template <typename Op>
__global__ void __launch_bounds__(256)
    row_backward_columns_kernel(const typename Op::Params p, const RowBackward launch) {
  constexpr int kTile = kColumnThreads * 16 / static_cast<int>(sizeof(typename Op::Element));
  __shared__ float memory[256 / kColumnThreads * Op::kColumnSums * kTile];
  const uint32_t tiles = (static_cast<uint32_t>(launch.dim) + kTile - 1) / kTile;
  const uint32_t part = blockIdx.x / tiles;
  const int64_t group = quotient(part, launch.blocks_per_group);
  const int64_t share = part - group * launch.blocks_per_group.value;
  const auto row_of = [&](int64_t i) {
    return group * launch.group_rows + quotient(launch.group_rows * i, launch.blocks_per_group);
  };
  float* partial = launch.partials + part * launch.partial_kinds * launch.dim;
  add_columns<Op, false, true>(p, launch, int64_t{blockIdx.x - part * tiles} * kTile, row_of(share),
                               row_of(share + 1), memory,
                               [&](int64_t column, const float(&sums)[Op::kColumnSums]) {
#pragma unroll
                                 for (int i = 0; i < Op::kColumnSums; ++i) {
                                   const int kind = Op::kind(p, i);
                                   if (kind >= 0) partial[kind * launch.dim + column] = sums[i];
                                 }
                               });
}

}  // namespace
}  // namespace fuselage
