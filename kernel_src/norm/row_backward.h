// The backward of every row operator: grad_x of each row, and sums over the rows for what the rows
// share.
//
// A persistent grid. A block (or a cluster, for long rows) works on every so many rows of one
// group, which is what shares its column sums. The next rows are copied into shared memory
// (norm/row_stages.h) while the current one is worked on:
//
//   copy rows ahead -> read: terms -> sums over the row, one barrier -> read again: gradients
//
// Both passes read the stage, which costs less than to keep a row in registers: those hold the
// column sums. Rows side by side in a block have a barrier each (kRowsApart), so that one computes
// while another waits. At the end the block adds up the column sums of its rows in order and leaves
// them as one part (common/reduce_partials.h). Where rows are few, other blocks of the same launch
// make the column sums (norm/row_columns.h).
//
// Rows too long for that are streamed: a block a row, read twice, and a kernel by columns for the
// sums.
//
// An operator says what differs, in a struct of static functions:
//
//   struct Op {
//     using Params, Element, GradOut;   // Element: of all tensors but grad_out, tensor 0
//     constexpr int kTensors;           // that are read for a row, at most; s is tensor 1
//     constexpr int kOutputs;           // rows that are written for a row, at most
//     constexpr int kStatistics, kRowSums, kColumnSums;
//     constexpr int kNormSums;          // the first sums of a row: zero where its norm is unused
//     constexpr int kThreads;           // of a block, at most
//     constexpr int kColumns;           // of a thread, at most: registers for kColumnSums of them
//     constexpr bool kFullStages;       // stages have room for kThreads: offsets are constants
//     constexpr int kSharedFactors;     // kinds of them in shared memory; 0: one, in registers
//     constexpr bool kShortRows;        // there are kernels with fewer columns a thread
//     constexpr int kLeastVectors;      // of a thread in these
//     constexpr bool kSpreadRows;       // of a block, over its group
//     constexpr bool kBulk;             // there are kernels with bulk copies
//     struct FactorLoading<N, kAligned> { start(p, row, column, dim); finish(.., kind, factors); }
//     factors(p)                        // kinds that there are: the first is what terms is given
//     factors_by_row(p)                 // whether each row has its own
//     terms(launch, grad_out, factors, s, moments, read, more, sums)   // adds to the row's sums
//     coefficients(p, sums, moments, launch)           // what gradients needs of these
//     gradients<kAligned>(p, launch, row, column, factors, grad_out, s, moments, coefficients,
//                         read, more, store, sums)     // stores rows, adds to sums of columns;
//                                                      // more(kind, values): of other factors
//     constexpr bool kColumnTerms;      // whether rows may be streamed, and blocks have columns
//     column_terms<kAligned, kStreamed>(p, launch, row, column, grad_out, s, moments, unused,
//                                       sums)  // these; without kStreamed only such as need
//                                                none of the row's sums
//     kind(p, i)                        // the place of sum i in a part, or -1 if it is not kept
//     finish(p)                         // the Finish of reduce_partials
//     output(p, i)                      // what `store` is given for output i, or null
//   };
#pragma once

#include <type_traits>

#include "common/dispatch.h"
#include "common/quotient.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "norm/row_columns.h"
#include "norm/row_factors.h"
#include "norm/row_stages.h"

namespace fuselage {
namespace {

// Of a row without statistics, the first of whose sums is that of nan_unless_zero: whether its
// result is not used. Then it counts as a row of zeros; otherwise its sums are NaN.
template <typename Op>
__device__ __forceinline__ bool is_unused(float (&row_sums)[Op::kRowSums], RowMoments& moments) {
#pragma unroll
  for (int i = 1; i < Op::kNormSums; ++i) row_sums[i] = row_sums[0];
  if (row_sums[0] != 0.0f) return false;
  moments.rstd = 0.0f;
  if (Op::kNormSums == Op::kRowSums) moments.mean = 0.0f;  // otherwise it is not a mean
  return true;
}

// Kinds of factors, wherever they are.
template <typename Op>
constexpr int kFactors = Op::kSharedFactors > 0 ? Op::kSharedFactors : 1;

// ---- the resident kernel ----

// A thread's part in it.
template <typename Op, typename Stages, int kVectors, bool kClusters>
struct RowBackwardThread {
  using T = typename Op::Element;
  using O = typename Op::GradOut;
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kAligned = !Stages::kShifted;

  const typename Op::Params& p;
  const RowBackward& launch;
  const int cluster, stages, statistics_bytes, block_in_row;
  const RowColumns columns;
  int64_t row;      // that is worked on
  int64_t output;   // this thread's first element of it in an output
  int turns, left;  // rows that the block, and this thread, still have
  char* const memory;
  float* statistics;  // of this thread's row, in the stage
  RowFactors<Op, kVectors, N> factors;
  Stages staged;
  float sums[kVectors][Op::kColumnSums][N];

  __device__ __forceinline__ RowBackwardThread(const typename Op::Params& p_,
                                               const RowBackward& launch_,
                                               const RowBackwardLayout& layout, char* memory_,
                                               int cluster_, int block_in_row_, int64_t first_row,
                                               int turns_, int left_)
      : p(p_),
        launch(launch_),
        cluster(cluster_),
        stages(layout.stages),
        statistics_bytes(Stages::kBulk     ? 0
                         : Op::kFullStages ? row_statistics_bytes(Op::kThreads, Op::kStatistics)
                                           : layout.statistics_bytes),
        block_in_row(block_in_row_),
        columns(static_cast<int>(launch_.dim),
                block_in_row_ * kVectors * static_cast<int>(blockDim.x) * N +
                    static_cast<int>(threadIdx.x) * N,
                N, kVectors),
        row(first_row),
        output(first_row * launch_.dim + columns.first_column),
        turns(turns_),
        left(left_),
        memory(memory_),
        statistics(reinterpret_cast<float*>(memory_) +
                   (threadIdx.y * blockDim.x + threadIdx.x) * Op::kStatistics),
        factors(reinterpret_cast<float4*>(memory_ + stages * statistics_bytes +
                                          (Op::factors_by_row(p_) ? threadIdx.y : 0) * kVectors *
                                              N * 4 * blockDim.x),
                Op::factors_by_row(p_)),
        staged(memory_ + stages * statistics_bytes + layout.factor_bytes, launch_.tensors, columns,
               first_row, stages) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int i = 0; i < Op::kColumnSums; ++i) {
#pragma unroll
        for (int k = 0; k < N; ++k) sums[j][i][k] = 0.0f;
      }
    }
  }

  // Starts to copy a row, if there is one, into the stage. Its statistics come along, to each
  // thread by itself: a load of its own would wait after the rows.
  __device__ __forceinline__ void start(bool there, int64_t row_to_start) {
    if (there) {
      const float* from = statistics_of(launch, row_to_start);
      if (Op::kStatistics == 2 && launch.statistics_size == 2) {
        cp_async<8>(statistics, from);
      } else {
        cp_async<4>(statistics, from);
      }
    }
    staged.start_next_row(there, row_to_start);
    cp_async_commit_group();
  }
  __device__ __forceinline__ void start_all() {
    if constexpr (Stages::kBulk) {
      if (threadIdx.x != 0) return;
      for (int i = 0; i < min(stages, left); ++i) staged.start_row(row + i * launch.row_step, i);
    } else {
      const int there = min(stages, left);
      for (int i = 0; i < there; ++i) {
        start(true, row + i * launch.row_step);
        advance(1);
      }
      advance(-there);
      for (int i = there; i < stages; ++i) cp_async_commit_group();  // of no row
    }
  }
  __device__ __forceinline__ void advance(int by) {
    staged.advance(by);
    if (!Stages::kBulk) statistics += by * (statistics_bytes / 4);
  }

  // `meanwhile` runs between the start of the loads and their use.
  template <typename F>
  __device__ __forceinline__ void load_factors(int64_t row, const F& meanwhile) {
    typename Op::template FactorLoading<N, kAligned> loading[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) loading[j].start(p, row, columns.of(j), columns.dim);
    meanwhile();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int kind = 0; kind < kFactors<Op>; ++kind) {
        if (kind >= Op::factors(p)) continue;
        float values[N];
        loading[j].finish(p, row, columns.of(j), columns.dim, kind, values);
        factors.set(kind, j, values);
      }
    }
  }

  // What an operator may read of vector j besides what it is given.
  __device__ __forceinline__ auto other_tensors(int j) const {
    return [this, j](int tensor, float(&values)[N]) {
      staged.read_other(tensor, j, row).to_floats(values);
    };
  }
  __device__ __forceinline__ auto other_factors(int j) const {
    return [this, j](int kind, float(&values)[N]) { factors.get(kind, j, values); };
  }

  // The row's sums over its columns, of which each thread has some.
  __device__ __forceinline__ void add_terms(const RowMoments& moments, bool lost,
                                            float (&row_sums)[Op::kRowSums]) const {
    float terms[kVectors][Op::kRowSums];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float grad_out[N], s[N], f[N];
#pragma unroll
      for (int i = 0; i < Op::kRowSums; ++i) terms[j][i] = 0.0f;
      staged.template read<O, 0>(j).to_floats(grad_out);
      staged.template read<T, 1>(j).to_floats(s);
      factors.get(0, j, f);
      Op::terms(launch, grad_out, f, s, moments, other_tensors(j), other_factors(j), terms[j]);
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int i = 0; i < Op::kRowSums; ++i) row_sums[i] += terms[j][i];
    }
    if (!lost) return;
    row_sums[0] = 0.0f;
#pragma unroll 1
    for (int j = 0; j < kVectors; ++j) {
      float grad_out[N];
      staged.template read<O, 0>(j).to_floats(grad_out);
      row_sums[0] += nan_unless_zero(grad_out);
    }
  }

  // Stores the row's gradients, and adds its part to the sums of columns.
  __device__ __forceinline__ void add_gradients(const RowMoments& moments, bool row_inside,
                                                bool unused,
                                                const typename Op::Coefficients& coefficients) {
    // The fourth vector is skipped where the warp has no columns for it: layer_norm (32768, 1536),
    // of whose threads all have three, takes 92 us on an H200 otherwise, and 85. A branch around
    // the others, too, or in add_terms, costs rows of 4096 columns 1 to 2%, and unaligned rows have
    // no register for it: layer_norm (16380, 4097) takes 288 us with it, and 280.
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (!row_inside || (kAligned && j == 3 && j >= columns.of_warp)) continue;
      float grad_out[N], s[N], f[N];
      staged.template read<O, 0>(j).to_floats(grad_out);
      Vector<T, N> packed = staged.template read<T, 1>(j);
      if (unused) packed = Vector<T, N>::zero();  // it may be infinite
      packed.to_floats(s);
      factors.get(0, j, f);
      const auto store = [&](int i, void* data, const float(&values)[N]) {
        const Vector<T, N> vector = Vector<T, N>::from_floats(values);
        if (!columns.inside(j)) return;
        if constexpr (!kAligned) {
          staged.put(result_tensor(i), j, vector);
        } else {
          vector.store(static_cast<T*>(data) + output + j * columns.step);
        }
      };
      Op::template gradients<kAligned>(p, launch, row, columns.of(j), f, grad_out, s, moments,
                                       coefficients, other_tensors(j), other_factors(j), store,
                                       sums[j]);
    }
    if constexpr (!kAligned) {
      // NOTE: lanes store together, also those whose row is past the end.
      warp_barrier();
#pragma unroll 1
      for (int i = 0; i < Op::kOutputs; ++i) {
        T* data = static_cast<T*>(Op::output(p, i));
        if (data != nullptr) staged.store(result_tensor(i), data + output, row_inside);
      }
      warp_barrier();  // before others are copied there
    }
  }
  // Whose place a result takes on its way out, where rows start anywhere: of T, and read before.
  static __device__ __forceinline__ constexpr int result_tensor(int i) {
    return std::is_same_v<T, O> ? i : 1 + i;
  }

  // Goes through all rows. All rows of a block, and all blocks of a cluster, go round equally
  // often.
  __device__ __forceinline__ void run(RowSumScratch<Op::kRowSums> (&scratch)[2],
                                      int64_t first_of_group) {
    RowMoments next{0.0f, 0.0f};
    // The factors first: after the rows they would wait for all of them.
    load_factors(first_of_group, [&] {
      start_all();
      if (Stages::kBulk && left > 0) next = load_moments<Op::kStatistics>(launch, row);
    });
    if (Op::kSharedFactors > 0) __syncthreads();
    row_sum_end(cluster);
    // With two stages nothing is under way while the blocks of a cluster wait for each other,
    // unless the next row need not wait for that: fused_add_rms_norm of (512, 131072) takes 207 us
    // so on an H200, and 235 otherwise. With three stages rms_norm takes 173, and 167.
    const bool releases = kClusters && Stages::kBulk && stages == 2;
    int stage = 0, turn = 0, round = 0;
#pragma unroll 1
    for (; turns > 0; --turns) {
      const bool row_inside = left > 0;
      RowMoments moments = next;
      if constexpr (Stages::kBulk) {
        if (row_inside) staged.wait(round);
        if (left > 1) next = load_moments<Op::kStatistics>(launch, row + launch.row_step);
      } else {
        cp_async_wait_group(stages - 1);
        if constexpr (Stages::kShifted) staged.join(row);
        moments = moments_from<Op::kStatistics>(statistics, launch.statistics_size);
      }
      if (Op::factors_by_row(p) && row_inside) load_factors(row, [] {});
      const bool lost = may_be_unused(launch, moments);
      float row_sums[Op::kRowSums] = {};
      if (row_inside) add_terms(moments, lost, row_sums);
      if constexpr (Stages::kBulk && kClusters) {
        if (releases && threadIdx.x == 0 && turn > 0 && left >= stages) {
          const int before = stage == 0 ? stages - 1 : -1;
          staged.wait_released(before, stage == 0 ? round ^ 1 : round);
          staged.start_row(row + (stages - 1) * launch.row_step, before);
        }
      }
      row_sum<true>(row_sums, cluster, scratch, turn);
      if constexpr (Stages::kBulk) {
        // The sum had a barrier: all threads of the row are done with the row before it.
        if (!releases && threadIdx.x == 0 && turn > 0 && left >= stages)
          staged.start_row(row + (stages - 1) * launch.row_step, stage == 0 ? stages - 1 : -1);
      }
      const bool unused = lost && is_unused<Op>(row_sums, moments);
      if (row_inside || !kAligned) {
        add_gradients(moments, row_inside, unused, Op::coefficients(p, row_sums, moments, launch));
      }
      if constexpr (!Stages::kBulk) start(left > stages, row + stages * launch.row_step);
      if constexpr (Stages::kBulk && kClusters) {
        if (releases) staged.release();
      }
      const bool last = ++stage == stages;
      advance(last ? 1 - stages : 1);
      if (last) stage = 0, round ^= 1;
      row += launch.row_step;
      output += launch.output_step;
      ++turn;
      --left;
    }
  }

  // Adds up the rows of the block, in order, for sum i of a column: give(column, sum).
  template <typename Give>
  __device__ __forceinline__ void add_rows(int i, const Give& give) const {
    constexpr int kWidth = 4;  // columns a thread adds up together
    const int width = kVectors * columns.step;
    float* rows = reinterpret_cast<float*>(memory);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      Vector<float, N>::from_floats(sums[j][i])
          .store(rows + threadIdx.y * width + j * columns.step + threadIdx.x * N);
    }
    __syncthreads();
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (int c = thread * kWidth; c < width; c += blockDim.x * blockDim.y * kWidth) {
      float sum[kWidth];
      add_block_rows(rows + c, width, sum);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const int column = block_in_row * width + c + k;
        if (column < columns.dim) give(column, sum[k]);
      }
    }
  }
};

// ---- kernels ----

// Grid: groups * blocks_per_group, times the cluster, and after them blocks for columns, if any.
// Block: (threads_per_row, rows_per_block). layout.cluster counts with kClusters alone.
template <typename Op, typename Stages, int kVectors, bool kClusters>
__global__ void __launch_bounds__(Op::kThreads, 1)
    row_backward_kernel(const typename Op::Params p, const RowBackward launch,
                        const RowBackwardLayout layout) {
  if constexpr ((Stages::kBulk || (kClusters && !Stages::kShifted)) && !kCompilesClusters) return;
  const int cluster = kClusters && kCompilesClusters ? layout.cluster : 1;
  // NOTE: off a 128-byte boundary the asynchronous copies take a fifth longer.
  extern __shared__ __align__(128) uint4 dynamic_memory[];
  __shared__ RowSumScratch<Op::kRowSums> scratch[2];
  constexpr bool kOneType = std::is_same_v<typename Op::Element, typename Op::GradOut>;
  if constexpr (Op::kColumnTerms && !Stages::kBulk && kOneType &&
                (!kClusters || Stages::kShifted)) {
    if (static_cast<int>(blockIdx.x) >= launch.row_blocks) {
      finish_columns<Op, !Stages::kShifted>(p, launch, blockIdx.x - launch.row_blocks,
                                            reinterpret_cast<float*>(dynamic_memory));
      return;
    }
  }
  const int64_t part = blockIdx.x / cluster;  // of all partial sums
  const int64_t group = quotient(part, launch.blocks_per_group);
  const int64_t begin = group * launch.group_rows;
  // Rows are dealt to the blocks one by one, so that no block has more than one more than another.
  // Rows of less than a warp lie side by side, for whole lines of memory.
  const int blocks = static_cast<int>(launch.blocks_per_group.value);
  const int block = static_cast<int>(part - group * blocks);
  const bool spread = Op::kSpreadRows && blockDim.x >= kWarpSize;
  const int block_row = block * (spread ? 1 : static_cast<int>(blockDim.y));
  const int own_row = block_row + static_cast<int>(threadIdx.y) * (spread ? blocks : 1);
  row_sum_start(cluster, scratch);
  RowBackwardThread<Op, Stages, kVectors, kClusters> thread(
      p, launch, layout, shared_in_register(dynamic_memory), cluster,
      cluster > 1 ? cluster_rank() : 0, begin + own_row,
      launch.turns + (block_row < launch.rest ? 1 : 0),
      launch.turns + (own_row < launch.rest ? 1 : 0));
  thread.run(scratch, begin);
  launch_dependents();
  if (launch.partials == nullptr || launch.column_blocks > 0) return;
  cp_async_wait_group(0);
  if constexpr (Op::kColumnSums == 1) {
    if (launch.blocks_per_group.value == 1) {  // of the only part there is nothing to add up
      const auto finish = Op::finish(p);
      thread.add_rows(0, [&](int column, float sum) {
        float none[1];
        finish.group(finish.load(column, true), group, column, {sum}, none);
      });
      return;
    }
  }
  float* partial = launch.partials + part * launch.partial_kinds * launch.dim;
#pragma unroll
  for (int i = 0; i < Op::kColumnSums; ++i) {
    const int kind = Op::kind(p, i);
    if (kind < 0) continue;
    float* sums = partial + kind * launch.dim;
    thread.add_rows(i, [&](int column, float sum) { sums[column] = sum; });
  }
}

// Rows of any length and alignment, one a block, read twice.
template <typename Op>
__global__ void __launch_bounds__(512, 1)
    row_backward_streamed_kernel(const typename Op::Params p, const RowBackward launch) {
  static_assert(Op::kNormSums == Op::kRowSums, "rows that may be unused have no other terms");
  using T = typename Op::Element;
  using O = typename Op::GradOut;
  constexpr int N = 16 / sizeof(T);
  __shared__ RowSumScratch<Op::kRowSums> scratch[1];
  const int64_t row = blockIdx.x;
  const int dim = static_cast<int>(launch.dim);
  const int step = blockDim.x * N;
  const O* grad_out_row = launch.tensors.row<O>(0, row, 0);
  const T* s_row = launch.tensors.row<T>(1, row, 0);
  RowMoments moments = load_moments<Op::kStatistics>(launch, row);
  const bool lost = may_be_unused(launch, moments);
  const auto load_factors = [&](int column, int kind, float(&factors)[N]) {
    typename Op::template FactorLoading<N, false> loading;
    loading.start(p, row, column, dim);
    loading.finish(p, row, column, dim, kind, factors);
  };
  const auto load_inputs = [&](int column, float(&grad_out)[N], float(&s)[N], float(&factors)[N]) {
    load<false, N>(grad_out_row, column, dim).to_floats(grad_out);
    load<false, N>(s_row, column, dim).to_floats(s);
    load_factors(column, 0, factors);
  };

  float sums[Op::kRowSums] = {};
#pragma unroll 1
  for (int column = threadIdx.x * N; column < dim; column += step) {
    float grad_out[N], s[N], factors[N];
    load_inputs(column, grad_out, s, factors);
    if (lost) {
      sums[0] += nan_unless_zero(grad_out);
    } else {
      const auto none = [](int, float(&)[N]) {};
      Op::terms(launch, grad_out, factors, s, moments, none, none, sums);
    }
  }
  row_sum<false>(sums, 1, scratch, 0);
  const bool unused = lost && is_unused<Op>(sums, moments);
  const typename Op::Coefficients coefficients = Op::coefficients(p, sums, moments, launch);
  if (launch.means != nullptr && threadIdx.x == 0) launch.means[row] = coefficients.pair();

  // NOTE: all lanes of a warp store together.
#pragma unroll 1
  for (int start = 0; start < dim; start += step) {
    const int column = start + threadIdx.x * N;
    float grad_out[N], s[N], factors[N], no_sums[Op::kColumnSums][N] = {};
    load_inputs(column, grad_out, s, factors);
    if (unused) Vector<float, N>::zero().to_floats(s);
    const auto read = [&](int tensor, float(&values)[N]) {
      load<false, N>(launch.tensors.row<T>(tensor, row, 0), column, dim).to_floats(values);
    };
    const auto more = [&](int kind, float(&values)[N]) { load_factors(column, kind, values); };
    const auto write = [&](int, void* data, const float(&values)[N]) {
      store<false>(Vector<T, N>::from_floats(values), static_cast<T*>(data) + row * launch.dim,
                   column, dim, column < dim);
    };
    Op::template gradients<false>(p, launch, row, column, factors, grad_out, s, moments,
                                  coefficients, read, more, write, no_sums);
  }
}

// ---- launchers ----

// The launcher of the resident kernels. `kVectors` is the most that the policy gives; with smaller
// ones, halves of it are what else it may give; for bulk copies where shared memory is too small
// for full stages alone. Rows are cut over a cluster with the most vectors alone.
template <typename Op, int kVectors, template <typename, typename, int, int, int> class Stages,
          bool kLong = true>
gpuError launch_row_backward(const typename Op::Params& p, const RowBackward& launch,
                             const RowBackwardPolicy& policy, const RowBackwardLayout& layout,
                             gpuStream stream) {
  using Chosen = Stages<typename Op::Element, typename Op::GradOut, kVectors, Op::kTensors,
                        Op::kFullStages ? Op::kThreads : 0>;
  if constexpr (kVectors > Op::kLeastVectors && Op::kShortRows &&
                (!Chosen::kBulk || Op::kFullStages)) {
    if (policy.row.vectors < kVectors) {
      return launch_row_backward<Op, kVectors / 2, Stages, false>(p, launch, policy, layout,
                                                                  stream);
    }
  }
  return with_bool(policy.row.cluster > 1, [&](auto clusters) {
    constexpr bool kClusters = kLong && (clusters || Chosen::kShifted);
    return gpu_launch(&row_backward_kernel<Op, Chosen, kVectors, kClusters>,
                      dim3(launch.row_blocks + launch.column_blocks),
                      dim3(policy.row.threads_per_row, policy.row.rows_per_block),
                      policy.shared_bytes, policy.row.cluster, stream, p, launch, layout);
  });
}

template <typename Op>
gpuError launch_row_backward_streamed(const typename Op::Params& p, const RowBackward& launch,
                                      gpuStream stream) {
  const int64_t rows = launch.groups * launch.group_rows;
  if (launch.needs_rows) {
    const gpuError error = gpu_launch(&row_backward_streamed_kernel<Op>, dim3(rows), dim3(512), 0,
                                      1, stream, p, launch);
    if (error != gpuSuccess) return error;
  }
  if (launch.partials == nullptr) return gpuSuccess;
  constexpr int kTile = kColumnThreads * 16 / static_cast<int>(sizeof(typename Op::Element));
  return gpu_launch(
      &row_backward_columns_kernel<Op>,
      dim3(launch.groups * launch.blocks_per_group.value * ceil_div(launch.dim, kTile)), dim3(256),
      0, 1, stream, p, launch);
}

// The one launcher of an operator's backward: rows, and then the sums of columns.
template <typename Op>
gpuError row_backward(const typename Op::Params& p, RowBackward launch,
                      const RowBackwardShape& shape, const RowBackwardPolicy& policy,
                      gpuStream stream) {
  constexpr int kMostVectors = Op::kColumns * static_cast<int>(sizeof(typename Op::Element)) / 16;
  constexpr bool kOneType = std::is_same_v<typename Op::Element, typename Op::GradOut>;
  constexpr bool kBulk = kOneType && Op::kBulk;  // NOTE: nvcc warns of an Op::kBulk without a use
  const RowPolicy& row = policy.row;
  launch.dim = shape.dim;
  launch.groups = shape.groups;
  launch.group_rows = shape.group_rows;
  launch.blocks_per_group = policy.blocks_per_group;
  launch.row_blocks = static_cast<int>(shape.groups * policy.blocks_per_group * row.cluster);
  launch.column_blocks = policy.column_blocks;
  const RowBackwardMemory memory(shape);
  const int rows = row.rows_per_block, threads = row.threads_per_row;
  launch.row_step = policy.blocks_per_group * rows;
  launch.output_step = launch.row_step * shape.dim;
  launch.turns = static_cast<int>(shape.group_rows / launch.row_step);
  launch.rest = static_cast<int>(shape.group_rows % launch.row_step);
  for (int i = 0; i < launch.tensors.count; ++i) {
    const int size = i == 0 ? shape.grad_out_size : shape.element_size;
    launch.tensors.step[i] = launch.row_step * launch.tensors.stride[i] * size;
  }
  const RowBackwardLayout layout{row.cluster, policy.stages,
                                 policy.bulk ? 0 : memory.statistics_bytes(rows, threads),
                                 memory.factor_bytes(rows, threads, row.vectors)};
  gpuError error = gpuSuccess;
  if (row.streamed) {
    error = gpuErrorInvalidValue;
    if constexpr (Op::kColumnTerms) error = launch_row_backward_streamed<Op>(p, launch, stream);
  } else if constexpr (kOneType) {
    if (policy.bulk) {
      if constexpr (kBulk) {
        error =
            launch_row_backward<Op, kMostVectors, BulkStages>(p, launch, policy, layout, stream);
      }
    } else if (shape.aligned) {
      error =
          launch_row_backward<Op, kMostVectors, PrivateStages>(p, launch, policy, layout, stream);
    } else {
      error =
          launch_row_backward<Op, kMostVectors, ShiftedStages>(p, launch, policy, layout, stream);
    }
  } else {
    error = launch_row_backward<Op, kMostVectors, ShiftedStages>(p, launch, policy, layout, stream);
  }
  const bool in_parts = Op::kColumnSums > 1 || row.streamed || policy.blocks_per_group > 1;
  if (error != gpuSuccess || launch.partials == nullptr || policy.column_blocks > 0 || !in_parts)
    return error;
  return reduce_partials(
      {launch.partials, shape.groups, policy.blocks_per_group, launch.partial_kinds, shape.dim},
      stream, Op::finish(p));
}

}  // namespace
}  // namespace fuselage
