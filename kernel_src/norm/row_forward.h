// The forward of row operators: one kernel, and one for rows that no block or cluster holds.
//
//   s     = what the inputs of a row are combined to
//   stats = of sums over the row
//   out   = a function of s, the stats, and values of the columns
//
// rms_norm, fused_add_rms_norm (rms_norm_forward.h), rms_norm_add_rms_norm, layer_norm,
// fused_add_layer_norm, ada_layer_norm, ada_rms_norm and gate_residual_ada_norm
// (ada_norm_forward.h) say what differs in a struct, Op:
//
//   Params                what the kernel is given: raw pointers, sizes, strides
//   In, Out               element types of the inputs and of out; a vector is 16 bytes of In
//   Inputs                start() issues the loads of a row, join() puts their vectors together,
//                         finish(j) combines vector j to s
//   kWritesSum, sum_row   whether s is a result, too, and where it goes
//   kNormsInput           whether what finish(j) gives is itself summed over the row first, to
//                         InputStats; then Inputs' add(j) makes s of it, these, and the rest
//   kSums, sums_of        what is summed of a vector; where kCentres and centred(p), its moments
//                         instead (norm/row_reduce.h; kShared, too, and then kRest)
//   Stats                 of a row: made of its sums, saved, sent to other lanes
//   with_columns(p, f)    calls f with the type of what reads the values of columns in this call:
//     Columns(p, row)       .load(column, dim) -> Loaded, kAhead vectors ahead of their use;
//                           .map(s, stats, Loaded) -> a vector of out. kRare: few calls have them,
//                           and one copy of their code serves all vectors. Kernels of unaligned
//                           adaptive norms are a third smaller so, and as fast on an H100.
//                           kTogether: load_all(column, dim, loaded) loads those of all vectors
//   PackedColumns         of In's type: where early(), they are loaded with the row, if they fit
//                           this call. kLoadsAnyway: load() itself sees to that. kFirst: before
//                           the row, of which rms_norm of (4096, 8192) takes 34.8 us, not 35.9
//   shares_columns(p)     whether rows have the same
//   threads, blocks, short_blocks   launch bounds, by which a kernel gets its registers
//   kMostVectors          whether there is a kernel of kForwardMostVectors a thread
//
// Threads, rows and clusters. Grid: x over blocks of rows_per_block * kRows rows (times the
// cluster). Block: (threads_per_row, rows_per_block).
//
//   short rows                   one row a block           long rows, over a cluster
//   .------------------------.   .---------------------.   .---------. .---------. .---------.
//   | lanes 0-15:  rows 0-3  |   | warp 0 | warp 1 | ..|   | block 0 | | block 1 | | block 2 |
//   | lanes 16-31: rows 4-7  |   '---------------------'   '---------' '---------' '---------'
//   '------------------------'   sums meet in shared       and are sent to all blocks
//                                memory                    (DSMEM, mbarrier)
//
// A thread has kVectors vectors of each of kRows rows, which it holds in registers, so that a row
// is read once. All loads are issued before the first use, with those of the columns where there
// are registers for them. Several blocks fit on a multiprocessor: some load while others add up.
// There is one barrier, in the reduction; rows within a warp have none.
//
// Rows that start anywhere are put together in registers (common/row_vectors.h): nothing else
// differs.
#pragma once

#include <type_traits>

#include "common/dispatch.h"
#include "common/row_vectors.h"
#include "norm/row_forward_policy.h"
#include "norm/row_reduce.h"

namespace fuselage {

// Whether out is quantised on its way (norm/row_quant.h). Such operators have no gradient, and save
// no statistics.
template <typename Op>
constexpr bool kQuantises = false;

// A type of columns to hand over.
template <typename Columns>
struct ColumnsTag {
  using type = Columns;
};

// Units past the row's end need no work, of which some operators have more than memory takes time
// for. NOTE: the same for all lanes of a warp.
template <typename Op, bool kAligned>
__device__ __forceinline__ bool is_empty(int warp_start, int j, int step, int dim) {
  return (!kAligned || Op::kCentres) && j > 0 && warp_start + j * step >= dim;
}

// Vector j of row i, where these are not known to the compiler: registers have no addresses.
template <int kRows, int kVectors, typename V>
__device__ __forceinline__ V vector_at(const V (&vectors)[kRows][kVectors], int i, int j) {
  V result = vectors[0][0];
#pragma unroll
  for (int k = 1; k < kRows * kVectors; ++k)
    result = select(i * kVectors + j == k, vectors[k / kVectors][k % kVectors], result);
  return result;
}

template <int kRows, int kVectors, typename V>
__device__ __forceinline__ void set_vector_at(V (&vectors)[kRows][kVectors], int i, int j,
                                              const V& vector) {
#pragma unroll
  for (int k = 0; k < kRows * kVectors; ++k) {
    V& at = vectors[k / kVectors][k % kVectors];
    at = select(i * kVectors + j == k, vector, at);
  }
}

// The stats of a thread's rows: of the one that this lane looks after (RowTree).
template <typename Op, typename Stats, bool kAligned, int kRows, int kVectors, int N,
          typename Scratch>
__device__ __forceinline__ Stats stats_of_rows(const typename Op::Params& p,
                                               Vector<typename Op::In, N> (&s)[kRows][kVectors],
                                               const RowPart& part, int first_column, int cluster,
                                               Scratch& scratch) {
  constexpr int kItems = kRows * kVectors, kStep = kWarpSize * N;
  if constexpr (Op::kCentres) {
    if (Op::centred(p)) {
      const auto units = [&](auto is_full) {
        constexpr bool kFull = decltype(is_full)::value, kWhole = kAligned || kFull;
        Moments<Op::kRest> moments[kItems];
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int j = i % kVectors;
          moments[i] = {0.0f, 0.0f, 0.0f};
          if (!kFull && is_empty<Op, kAligned>(part.warp_start, j, kStep, part.dim)) continue;
          float values[N];
          s[i / kVectors][j].to_floats(values);
          moments[i] = Moments<Op::kRest>::template of_vector<kWhole>(
              values, part.count(first_column + j * kStep, N));
          Op::forget_floats(s[i / kVectors][j]);
        }
        return reduce_units<kWhole, kFull, kRows, kVectors, N>(moments, part);
      };
      // Where instructions take longer than memory: others pay for it with registers. NOTE: the
      // same for all lanes of a warp, so that they need not wait for each other.
      constexpr int kSpan = kVectors * kStep;  // of a warp
      bool full = false;
      if constexpr (kVectors > 1 && !kAligned) {
        full = same_in_warp(part.warp_start + kSpan <= part.block_end);
      } else if constexpr (kVectors > 1 && kQuantises<Op>) {
        const int warps = static_cast<int>(blockDim.x) / kWarpSize;
        full = part.block_start + warps * kSpan <= part.dim;
      }
      const auto moments = full ? units(std::true_type{}) : units(std::false_type{});
      return Stats(p, reduce_row<kRows, kVectors, N>(moments, part, cluster, scratch));
    }
  }
  float items[kItems][Op::kSums], sums[Op::kSums];
#pragma unroll
  for (int i = 0; i < kItems; ++i) Op::sums_of(s[i / kVectors][i % kVectors], items[i]);
  reduce_row<kRows, kVectors, N>(items, sums, cluster, scratch);
  return Stats(p, sums);
}

// Launch bounds.
template <typename Op, int kVectors, int kRows, bool kAligned, bool kClusters>
constexpr int forward_threads() {
  if (kRows > 1) return kForwardShortThreads;
  return kVectors > kForwardVectors ? kForwardMostVectorThreads : Op::threads(kAligned, kClusters);
}
template <typename Op, int kVectors, int kRows, bool kAligned, bool kClusters>
constexpr int forward_blocks() {
  const int blocks = kRows > 1                    ? Op::short_blocks(kAligned)
                     : kVectors > kForwardVectors ? kForwardMostVectorBlocks
                                                  : Op::blocks(kVectors, kAligned, kClusters);
  return bounded_blocks(forward_threads<Op, kVectors, kRows, kAligned, kClusters>(), blocks);
}

template <typename Op, int kVectors, int kRows, bool kAligned, bool kClusters>
__global__ void __launch_bounds__((forward_threads<Op, kVectors, kRows, kAligned, kClusters>()),
                                  (forward_blocks<Op, kVectors, kRows, kAligned, kClusters>()))
    row_forward_kernel(const typename Op::Params p, const int blocks_in_cluster) {
  using T = typename Op::In;
  using O = typename Op::Out;
  using Stats = typename Op::Stats;
  constexpr int N = 16 / sizeof(T);
  constexpr int kStep = kWarpSize * N;  // columns between a thread's vectors
  if constexpr (kAligned && kClusters && !kCompilesClusters) return;
  const int cluster = kClusters && kCompilesClusters ? blocks_in_cluster : 1;
  __shared__ RowSumScratch<Op::kShared> scratch[Op::kNormsInput ? 2 : 1];

  const int dim = static_cast<int>(p.dim);
  const int slice = blockDim.x * kVectors * N;  // columns of a row that a block has
  const int slice_start = cluster > 1 ? cluster_rank() * slice : 0;
  const int row_block = cluster > 1 ? blockIdx.x / cluster : blockIdx.x;
  const int warp_start = slice_start + static_cast<int>(threadIdx.x / kWarpSize) * kVectors * kStep;
  const int first_column = warp_start + static_cast<int>(threadIdx.x % kWarpSize) * N;
  const int64_t first_row = (int64_t{row_block} * blockDim.y + threadIdx.y) * kRows;
  // Rows past the last are empty; what is looked up for them is looked up for the last.
  const auto left_of = [&](int i) { return first_row + i < p.rows ? dim - first_column : -N; };
  const auto row_of = [&](int i) { return min(first_row + i, p.rows - 1); };
  const auto column_of = [&](int j) { return first_column + j * kStep; };
  row_sum_start(cluster, scratch);

  // Start to load everything this thread works on.
  typename Op::template Inputs<kVectors, kAligned> inputs[kRows];
  const auto start_inputs = [&] {
#pragma unroll
    for (int i = 0; i < kRows; ++i) inputs[i].start(p, first_row + i, first_column, left_of(i));
  };
  using Packed = typename Op::template PackedColumns<kAligned>;
  constexpr bool kEarly = Op::early(kVectors, kAligned);
  constexpr bool kFirst = kEarly && Packed::kFirst && kVectors > 1 && !kClusters;
  if (!kFirst) start_inputs();
  typename Packed::Loaded packed[kEarly ? kVectors : 1];
  // NOTE: a branch is late, and the loads behind it.
  constexpr bool kAnyway = Packed::kLoadsAnyway && kVectors == 2 && kRows == 1;
  if (kEarly && (kAnyway || Packed::fits(p))) {
    const Packed columns(p, row_of(0));
    if constexpr (Packed::kTogether) {
      columns.load_all(first_column, dim, packed);
    } else {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) packed[j] = columns.load(column_of(j), dim);
    }
  }
  if (kFirst) start_inputs();

  // Combine them. Vectors of a single input are as they were loaded, empty ones of zeros.
  constexpr bool kCombines = Op::kWritesSum || Op::kNormsInput;
  Vector<T, N> s[kRows][kVectors];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    RowStoring<T, N, kVectors, kAligned> storing(Op::sum_row(p, first_row + i) + first_column,
                                                 left_of(i));
    inputs[i].join(p);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      s[i][j] = Vector<T, N>::zero();
      if (kCombines && is_empty<Op, kAligned>(warp_start, j, kStep, dim)) continue;
      s[i][j] = inputs[i].finish(p, row_of(i), column_of(j), j);
      if constexpr (Op::kWritesSum && !Op::kNormsInput) storing.put(j, s[i][j]);
    }
    if constexpr (Op::kWritesSum && !Op::kNormsInput) storing.end();
  }
  row_sum_end(cluster);

  // Statistics: a lane looks after those of one row.
  const RowPart part{dim, slice_start, min(slice_start + slice, dim), warp_start};
  using Tree = RowTree<kRows, kVectors, N>;
  const auto lane_of = [&](int i) { return Tree::lane_of(i * kVectors); };
  const int own_row = Tree::own_item() / kVectors;
  const bool saves = !kQuantises<Op> && slice_start == 0 &&
                     static_cast<int>(threadIdx.x) == lane_of(own_row) &&
                     first_row + own_row < p.rows;
  if constexpr (Op::kNormsInput) {
    using InputStats = typename Op::InputStats;
    const InputStats own =
        stats_of_rows<Op, InputStats, kAligned>(p, s, part, first_column, cluster, scratch[1]);
    if (saves) own.save(p, first_row + own_row);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const InputStats stats = kRows == 1 ? own : own.from(lane_of(i), Tree::width());
      RowStoring<T, N, kVectors, kAligned> storing(Op::sum_row(p, first_row + i) + first_column,
                                                   left_of(i));
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (is_empty<Op, kAligned>(warp_start, j, kStep, dim)) continue;
        s[i][j] = inputs[i].add(p, column_of(j), j, s[i][j], stats);
        storing.put(j, s[i][j]);
      }
      storing.end();
    }
  }
  const Stats own_stats =
      stats_of_rows<Op, Stats, kAligned>(p, s, part, first_column, cluster, scratch[0]);
  if (saves) own_stats.save(p, first_row + own_row);

  // Write the results.
  Op::template with_columns<kAligned>(p, [&](auto tag) {
    using Columns = typename decltype(tag)::type;
    if constexpr (Columns::kRare) {
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) {
        const Columns columns(p, row_of(i));
        const Stats stats = kRows == 1 ? own_stats : own_stats.from(lane_of(i), Tree::width());
        RowStoring<O, N, kVectors, kAligned> storing(Op::out_row(p, first_row + i) + first_column,
                                                     left_of(i));
#pragma unroll 1
        for (int j = 0; j < kVectors; ++j) {
          if (is_empty<Op, kAligned>(warp_start, j, kStep, dim)) continue;
          const auto loaded = columns.load(column_of(j), dim);
          set_vector_at(s, i, j, columns.map(vector_at(s, i, j), stats, loaded));
        }
        if constexpr (kQuantises<Op>) continue;
        using Result = decltype(columns.map(s[0][0], stats, columns.load(0, dim)));
#pragma unroll
        for (int j = 0; j < kVectors; ++j) storing.put(j, bits_as<Result>(vector_at(s, i, j)));
        storing.end();
      }
      return;
    }
    constexpr bool kIsEarly =
        kEarly && std::is_same_v<typename Columns::Loaded, typename Packed::Loaded>;
    constexpr bool kAll = Columns::kTogether && !kIsEarly;
    // Vectors that are loaded ahead of their use.
    constexpr int kAhead = kIsEarly || kAll ? kVectors : kVectors > 1 ? Columns::kAhead : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Columns columns(p, row_of(i));
      const Stats stats = kRows == 1 ? own_stats : own_stats.from(lane_of(i), Tree::width());
      RowStoring<O, N, kVectors, kAligned> storing(Op::out_row(p, first_row + i) + first_column,
                                                   left_of(i));
      typename Columns::Loaded loaded[kVectors];
      if constexpr (kAll) columns.load_all(first_column, dim, loaded);
#pragma unroll
      for (int j = 0; j < (kAll ? 0 : kAhead); ++j) {
        if constexpr (kIsEarly) {
          if (i > 0 && !Op::shares_columns(p)) packed[j] = columns.load(column_of(j), dim);
          loaded[j] = packed[j];
        } else {
          loaded[j] = columns.load(column_of(j), dim);
        }
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (is_empty<Op, kAligned>(warp_start, j, kStep, dim)) continue;
        const int next = j + kAhead;
        if (next < kVectors) loaded[next] = columns.load(column_of(next), dim);
        const auto out = columns.map(s[i][j], stats, loaded[j]);
        if constexpr (kQuantises<Op>) {
          s[i][j] = out;
        } else {
          storing.put(j, out);
        }
      }
      if constexpr (!kQuantises<Op>) storing.end();
    }
  });
  if constexpr (kQuantises<Op>) {
    static_assert(kRows == 1 && !kClusters, "a row of one block");
    if (p.out != nullptr) {
      RowStoring<O, N, kVectors, kAligned> storing(Op::out_row(p, first_row) + first_column,
                                                   left_of(0));
#pragma unroll
      for (int j = 0; j < kVectors; ++j) storing.put(j, s[0][j]);
      storing.end();
    }
    Op::template quantise<kAligned>(p, s[0], first_row, first_column, left_of(0));
  }
}

// Rows of any length and alignment, one a block: read twice, or three times where the mean is taken
// away. After the first time mostly from L2.
template <typename Op>
__global__ void __launch_bounds__(kForwardThreads)
    row_forward_streamed_kernel(const typename Op::Params p) {
  using T = typename Op::In;
  using O = typename Op::Out;
  constexpr int N = 16 / sizeof(T);
  constexpr int kSums = Op::kSums;
  __shared__ RowSumScratch<1> mean_scratch[1];
  __shared__ RowSumScratch<2> moment_scratch[1];
  __shared__ RowSumScratch<kSums> scratch[1];
  const int64_t row = blockIdx.x;
  const int dim = static_cast<int>(p.dim);
  const int step = blockDim.x * N;
  using Inputs = typename Op::template Inputs<1, false>;

  // Of the input, where it is normalised itself.
  const auto input_stats = [&] {
    if constexpr (Op::kNormsInput) {
      __shared__ RowSumScratch<kSums> input_scratch[1];
      float sums[kSums] = {};
#pragma unroll 1
      for (int start = 0; start < dim; start += step) {
        const int column = start + static_cast<int>(threadIdx.x) * N;
        Inputs inputs;
        inputs.start(p, row, column, max(dim - column, -N));
        inputs.join(p);
        float vector[kSums];
        Op::sums_of(inputs.finish(p, row, column, 0), vector);
#pragma unroll
        for (int k = 0; k < kSums; ++k) sums[k] += vector[k];
      }
      row_sum<false>(sums, 1, input_scratch, 0);
      const typename Op::InputStats stats(p, sums);
      if (threadIdx.x == 0) stats.save(p, row);
      return stats;
    } else {
      return 0;
    }
  }();

  // f(column, columns left, s): s is combined, and written, the first time. NOTE: x and out, or
  // residual and new_residual, may be the same memory. A warp reads all elements of its vectors
  // before it writes them.
  const auto for_each_vector = [&](bool first, auto&& f) {
#pragma unroll 1
    for (int start = 0; start < dim; start += step) {
      const int column = start + static_cast<int>(threadIdx.x) * N;
      const int left = max(dim - column, -N);
      Vector<T, N> s;
      if (first || !Op::kWritesSum) {
        Inputs inputs;
        inputs.start(p, row, column, left);
        inputs.join(p);
        s = inputs.finish(p, row, column, 0);
        if constexpr (Op::kNormsInput) s = inputs.add(p, column, 0, s, input_stats);
        if constexpr (Op::kWritesSum) {
          RowStoring<T, N, 1, false> storing(Op::sum_row(p, row) + column, left);
          storing.put(0, s);
          storing.end();
        }
      } else {
        RowLoading<T, 1, false> loading;
        loading.start(Op::sum_row(p, row) + column, left);
        s = loading.finish(0);
      }
      f(column, left, s);
    }
  };

  // NOTE: a thread's columns may have been written by its neighbours: row_sum has a barrier.
  const auto stats_of = [&] {
    if constexpr (Op::kCentres) {
      if (Op::centred(p)) {
        float sum[1] = {0.0f};
        for_each_vector(true, [&](int, int, const Vector<T, N>& s) {
          float values[N];
          s.to_floats(values);
#pragma unroll
          for (int k = 0; k < N; ++k) sum[0] += values[k];
        });
        row_sum<false>(sum, 1, mean_scratch, 0);
        const float mean = sum[0] / static_cast<float>(dim);
        float moments[2] = {};
        for_each_vector(false, [&](int, int left, const Vector<T, N>& s) {
          float values[N];
          s.to_floats(values);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float deviation = k < left ? values[k] - mean : 0.0f;
            moments[0] = fmaf(deviation, deviation, moments[0]);
            moments[1] += deviation;
          }
        });
        row_sum<false>(moments, 1, moment_scratch, 0);
        return typename Op::Stats(p, Moments<Op::kRest>{mean, moments[0], moments[1]});
      }
    }
    float sums[kSums] = {};
    for_each_vector(true, [&](int, int, const Vector<T, N>& s) {
      float vector[kSums];
      Op::sums_of(s, vector);
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[k] += vector[k];
    });
    row_sum<false>(sums, 1, scratch, 0);
    return typename Op::Stats(p, sums);
  };
  const typename Op::Stats stats = stats_of();
  if (threadIdx.x == 0) stats.save(p, row);

  Op::template with_columns<false>(p, [&](auto tag) {
    const typename decltype(tag)::type columns(p, row);
    for_each_vector(false, [&](int column, int left, const Vector<T, N>& s) {
      RowStoring<O, N, 1, false> storing(Op::out_row(p, row) + column, left);
      storing.put(0, columns.map(s, stats, columns.load(column, dim)));
      storing.end();
    });
  });
}

// ---- launcher ----

// kAligned: every row of every tensor starts and ends on a 16-byte boundary, and out is of x's
// type.
template <typename Op, bool kAligned>
gpuError launch_row_forward(const typename Op::Params& p, const RowPolicy& policy,
                            gpuStream stream) {
  if (policy.streamed) {
    return gpu_launch(&row_forward_streamed_kernel<Op>, dim3(p.rows), dim3(policy.threads_per_row),
                      0, 1, stream, p);
  }
  const auto launch = [&](auto kernel) {
    const int64_t rows_per_block = int64_t{policy.rows_per_block} * policy.rows_per_thread;
    return gpu_launch(kernel, dim3(ceil_div(p.rows, rows_per_block) * policy.cluster),
                      dim3(policy.threads_per_row, policy.rows_per_block), 0, policy.cluster,
                      stream, p, policy.cluster);
  };
  constexpr bool kHasMostVectors = Op::kMostVectors;
  if constexpr (kAligned) {
    if (policy.cluster > 1) return launch(&row_forward_kernel<Op, 4, 1, true, true>);
    if constexpr (kHasMostVectors) {
      if (policy.vectors == kForwardMostVectors)
        return launch(&row_forward_kernel<Op, kForwardMostVectors, 1, true, false>);
    }
    switch (10 * policy.vectors + policy.rows_per_thread) {
      case 11: return launch(&row_forward_kernel<Op, 1, 1, true, false>);
      case 14: return launch(&row_forward_kernel<Op, 1, 4, true, false>);
      case 21: return launch(&row_forward_kernel<Op, 2, 1, true, false>);
      case 22: return launch(&row_forward_kernel<Op, 2, 2, true, false>);
    }
    return launch(&row_forward_kernel<Op, 4, 1, true, false>);
  } else {
    if (policy.rows_per_thread == 4) return launch(&row_forward_kernel<Op, 1, 4, false, false>);
    if (policy.vectors == 1) return launch(&row_forward_kernel<Op, 1, 1, false, false>);
    return launch(&row_forward_kernel<Op, 4, 1, false, true>);
  }
}

}  // namespace fuselage
