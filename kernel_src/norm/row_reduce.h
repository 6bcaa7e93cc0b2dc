// What a row is reduced to: plain sums, or the sum and the squared deviations from the mean.
//
// Both are added up in one tree, the same however many vectors a thread has:
//
//   vector   N columns         one thread
//   unit     32 vectors        one warp, which has kVectors of them
//   quad     4 units           a warp that has four, or a thread that reads those of several warps
//   block    quads, in order   every thread for itself, after the one barrier
//   row      blocks, in order  every thread, of what the blocks of a cluster send each other
//
// Deviations are from the mean of the part itself: exact in a vector, where all values are in
// registers. One level up, with d = mean of the part - mean of the whole,
//
//   sum of (x - mean of the whole)^2 = sum over the parts of: squares + count * d^2
//
// (Chan, Golub and LeVeque 1983), in which nothing cancels, however large the mean. A mean needs
// the sums alone, so that each level adds up twice, and a row has one barrier. In float32 the mean
// itself is rounded: `rest`, the sum of the deviations from it, is carried along. The means in
// between may be off in the last bit: what is about them stays so.
#pragma once

#include "common/reduce.h"
#include "common/vector.h"

namespace fuselage {

#if defined(__CUDACC__) || defined(__HIPCC__)

// Where the part of a row lies that a thread has: columns of the row.
struct RowPart {
  int dim;          // of the row
  int block_start;  // of the block's part
  int block_end;    // of it and of the row
  int warp_start;   // of the warp's units

  // Of `span` columns from `start` on, those of the block.
  __device__ __forceinline__ int count(int start, int span) const {
    return max(0, min(block_end - start, span));
  }
};

template <typename T, int N>
__device__ __forceinline__ float sum_of_squares(const Vector<T, N>& s) {
  float values[N], sum = 0.0f;
  s.to_floats(values);
#pragma unroll
  for (int k = 0; k < N; ++k) sum = fmaf(values[k], values[k], sum);
  return sum;
}

// NOTE: a division, rounded once. A product with a reciprocal is off by a bit where all values are
// alike and have no deviations; and the compiler may fuse it with the subtraction that follows, but
// not in every place where the same mean is needed again.
__device__ __forceinline__ float mean_of(float sum, float count) {
  return __fdiv_rn(sum, fmaxf(count, 1.0f));
}

// Moments of a part: about its own mean. In half precision sums of deviations are too small to
// matter.
template <bool kRest>
struct Moments {
  static constexpr int kSums = kRest ? 3 : 2;
  static constexpr int kShared = kSums + 2;  // of an entry: these, its count, and its mean
  float sum, squares, rest;

  __device__ __forceinline__ void move(float d, float count) {
    const float first = count * d;
    if constexpr (kRest) {
      squares = fmaf(fmaf(2.0f, rest, first), d, squares);
      rest += first;
    } else {
      squares = fmaf(first, d, squares);
    }
  }
  // Those of one vector. kWhole: all or none of its values are inside the row; the others are zero.
  template <bool kWhole, int N>
  static __device__ __forceinline__ Moments of_vector(const float (&values)[N], int count) {
    float parts[N];
#pragma unroll
    for (int k = 0; k < N; ++k) parts[k] = values[k];
#pragma unroll
    for (int step = N / 2; step > 0; step /= 2) {
#pragma unroll
      for (int k = 0; k < step; ++k) parts[k] += parts[k + step];
    }
    Moments m{parts[0], 0.0f, 0.0f};
    const float mean = mean_of_vector<kWhole, N>(m.sum, count);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float deviation = kWhole || k < count ? values[k] - mean : 0.0f;
      m.squares = fmaf(deviation, deviation, m.squares);
      if (kRest) m.rest += deviation;
    }
    return m;
  }
  template <bool kWhole, int N>
  static __device__ __forceinline__ float mean_of_vector(float sum, int count) {
    return kWhole ? sum * (1.0f / N) : mean_of(sum, static_cast<float>(count));
  }
};

// The tree over the threads of a block that share a row, of kRows rows of kVectors vectors, a warp
// apart. threadIdx.y counts the rows of a block where a row has no more than a warp; otherwise
// there is one.
template <int kRows, int kVectors, int N>
struct RowTree {
  static constexpr int kItems = kRows * kVectors;  // units of a warp: a lane looks after one
  static constexpr int kStep = kWarpSize * N;      // columns of a unit
  static constexpr bool kQuads = kVectors == 4;
  static constexpr int kEntries = kQuads ? 1 : kVectors;  // what a warp shares: a quad, or units
  static_assert(kVectors == 1 || kVectors == 2 || kVectors == 4, "a quad is four units");

  // The lanes of a warp that share a row, a power of two. NOTE: rows of several vectors a thread
  // have whole warps.
  static __device__ __forceinline__ int width() {
    return kVectors > 1 ? kWarpSize : min(static_cast<int>(blockDim.x), kWarpSize);
  }
  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x) & (width() - 1);
  }
  static __device__ __forceinline__ bool one_warp() {
    return static_cast<int>(blockDim.x) <= kWarpSize;
  }
  // The item that this lane looks after; the first lane that does so for an item.
  static __device__ __forceinline__ int own_item() {
    if constexpr (kItems == 1) return 0;
    if constexpr (kVectors > 1) return lane() / (kWarpSize / kItems);
    return lane() * kItems >> (31 - __clz(width()));
  }
  static __device__ __forceinline__ int lane_of(int item) { return item * width() / kItems; }

  // Whether units meet within the warp.
  static __device__ __forceinline__ bool adds_units() {
    return kVectors > 1 && (kQuads || one_warp());
  }
  static __device__ __forceinline__ float add_units(float value) {
#pragma unroll
    for (int i = 1; i < kVectors; i *= 2)
      value += shuffle_xor(value, i * (width() / kItems), width());
    return value;
  }

  // Writes values of this warp's entries to arrays of shared memory, padded with zeros to whole
  // fours.
  template <int kValues, typename Scratch>
  static __device__ __forceinline__ void share(const float (&values)[kValues], Scratch& scratch) {
    const int entries = static_cast<int>(blockDim.x) / kWarpSize * kEntries;
    const int item = kQuads ? 0 : own_item();
    if (lane() == lane_of(item)) {
#pragma unroll
      for (int k = 0; k < kValues; ++k)
        scratch.warps[k][static_cast<int>(threadIdx.x) / kWarpSize * kEntries + item] = values[k];
    }
    if (static_cast<int>(threadIdx.x) < (4 - entries % 4) % 4) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) scratch.warps[k][entries + threadIdx.x] = 0.0f;
    }
    __syncthreads();
  }
  template <typename Scratch>
  static __device__ __forceinline__ void read_four(const Scratch& scratch, int k, int i,
                                                   float (&v)[4]) {
    const float4 four = *reinterpret_cast<const float4*>(&scratch.warps[k][4 * i]);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  }
  static __device__ __forceinline__ float add_four(const float (&v)[4]) {
    return (v[0] + v[1]) + (v[2] + v[3]);
  }

  // f(i, values): of four neighbouring entries. Adds them up over the row: in order, or by four
  // where they are quads.
  template <int kValues, typename F>
  static __device__ __forceinline__ void add_fours(float (&totals)[kValues], F&& f) {
    const int fours = (static_cast<int>(blockDim.x) / kWarpSize * kEntries + 3) / 4;
#pragma unroll
    for (int k = 0; k < kValues; ++k) totals[k] = 0.0f;
    if constexpr (kQuads) {
#pragma unroll 4
      for (int i = 0; i < fours; ++i) {
        float values[kValues];
        f(i, values);
#pragma unroll
        for (int k = 0; k < kValues; ++k) totals[k] += values[k];
      }
    } else {
      for (int i = 0; i < fours; i += 4) {
        float quads[4][kValues];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
          for (int k = 0; k < kValues; ++k) quads[q][k] = 0.0f;
          if (i + q < fours) f(i + q, quads[q]);
        }
#pragma unroll
        for (int k = 0; k < kValues; ++k)
          totals[k] += (quads[0][k] + quads[1][k]) + (quads[2][k] + quads[3][k]);
      }
    }
  }

  // Each block sends its sums to every block of the cluster.
  template <int kSums, typename Scratch>
  static __device__ __forceinline__ void send(const float (&sums)[kSums], int cluster,
                                              Scratch& scratch) {
    if (static_cast<int>(threadIdx.x) < cluster) {
      if (threadIdx.x == 0)
        mbarrier_arrive_expect_tx(shared_address(&scratch.mbarrier),
                                  cluster * kSums * static_cast<int>(sizeof(float)));
#pragma unroll
      for (int k = 0; k < kSums; ++k)
        st_async(&scratch.blocks[k][cluster_rank()], threadIdx.x, sums[k],
                 shared_address(&scratch.mbarrier));
    }
    mbarrier_wait_parity_cluster(shared_address(&scratch.mbarrier), 0);
  }
};

// Sums of values: those of a row, in all lanes that look after one of its units.
template <int kRows, int kVectors, int N, int kSums, typename Scratch>
__device__ __forceinline__ void reduce_row(float (&items)[kRows * kVectors][kSums],
                                           float (&sums)[kSums], int cluster, Scratch& scratch) {
  using Tree = RowTree<kRows, kVectors, N>;
  warp_sums_of_rows(items, sums, Tree::width());
  if (Tree::adds_units()) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] = Tree::add_units(sums[k]);
  }
  if (kRows > 1 || Tree::one_warp()) return;
  Tree::share(sums, scratch);
  Tree::add_fours(sums, [&](int i, float(&values)[kSums]) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      float v[4];
      Tree::read_four(scratch, k, i, v);
      values[k] = Tree::add_four(v);
    }
  });
  if (cluster == 1) return;
  Tree::send(sums, cluster, scratch);
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    sums[k] = 0.0f;
    for (int i = 0; i < cluster; i += 2) sums[k] += scratch.blocks[k][i] + scratch.blocks[k][i + 1];
  }
}

// Moments: of a row, about its mean, which is returned in place of the sum.
template <bool kWhole, int kRows, int kVectors, int N, bool kRest, typename Scratch>
__device__ __forceinline__ Moments<kRest> reduce_row(Moments<kRest> (&items)[kRows * kVectors],
                                                     const RowPart& part, int cluster,
                                                     Scratch& scratch) {
  using M = Moments<kRest>;
  using Tree = RowTree<kRows, kVectors, N>;
  constexpr int kItems = Tree::kItems, kStep = Tree::kStep, kSums = M::kSums;
  const int width = Tree::width();
  const auto set = [](M& m, const float(&sums)[kSums - 1]) {
    m.squares = sums[0];
    if (kRest) m.rest = sums[kSums - 2];
  };

  // Units.
  float first[kItems][1], sum[1];
#pragma unroll
  for (int i = 0; i < kItems; ++i) first[i][0] = items[i].sum;
  warp_sums_of_rows(first, sum, width);
  M own{sum[0], 0.0f, 0.0f};
  const int own_start = part.warp_start + Tree::own_item() % kVectors * kStep;
  float count = static_cast<float>(part.count(own_start, width * N));
  float mean = mean_of(own.sum, count);
  float others[kItems][kSums - 1], sums[kSums - 1];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const float unit_mean = shuffle_from(mean, Tree::lane_of(i), width);
    const int column = part.warp_start + i % kVectors * kStep + Tree::lane() * N;
    const int inside = kWhole ? N : part.count(column, N);
    const float d = M::template mean_of_vector<kWhole, N>(items[i].sum, inside) - unit_mean;
    // NOTE: an empty vector has no deviation, whatever `d`.
    items[i].move(column < part.block_end ? d : 0.0f, static_cast<float>(inside));
    others[i][0] = items[i].squares;
    if (kRest) others[i][kSums - 2] = items[i].rest;
  }
  warp_sums_of_rows(others, sums, width);
  set(own, sums);

  // Quads of a warp.
  if (Tree::adds_units()) {
    own.sum = Tree::add_units(own.sum);
    const float count_of_all = static_cast<float>(part.count(part.warp_start, kVectors * kStep));
    const float mean_of_all = mean_of(own.sum, count_of_all);
    own.move(mean - mean_of_all, count);
    own.squares = Tree::add_units(own.squares);
    if (kRest) own.rest = Tree::add_units(own.rest);
    count = count_of_all;
    mean = mean_of_all;
  }
  if (kRows > 1 || Tree::one_warp()) {
    own.sum /= static_cast<float>(part.dim);
    own.move(mean - own.sum, count);
    return own;
  }

  // The block: entries have values of which the first four are as follows.
  enum { kSum, kSquares, kCount, kMean, kRestOf };
  if constexpr (kRest) {
    Tree::share({own.sum, own.squares, count, mean, own.rest}, scratch);
  } else {
    Tree::share({own.sum, own.squares, count, mean}, scratch);
  }
  Tree::add_fours(sum, [&](int i, float(&values)[1]) {
    float v[4];
    Tree::read_four(scratch, kSum, i, v);
    values[0] = Tree::add_four(v);
  });
  own.sum = sum[0];
  const auto block_count = [&](int i) {
    const int slice = static_cast<int>(blockDim.x) * kVectors * N;
    return static_cast<float>(max(0, min(part.dim - i * slice, slice)));
  };
  mean = cluster == 1 ? own.sum / static_cast<float>(part.dim)
                      : mean_of(own.sum, block_count(cluster_rank()));
  Tree::add_fours(sums, [&](int i, float(&values)[kSums - 1]) {
    float squares[4], counts[4], means[4], rests[4] = {};
    Tree::read_four(scratch, kSquares, i, squares);
    Tree::read_four(scratch, kCount, i, counts);
    Tree::read_four(scratch, kMean, i, means);
    if (kRest) Tree::read_four(scratch, kRestOf, i, rests);
    float quad_mean = mean, quad_count = 0.0f;
    if constexpr (!Tree::kQuads) {
      float of_four[4];
      Tree::read_four(scratch, kSum, i, of_four);
      quad_count = Tree::add_four(counts);
      quad_mean = mean_of(Tree::add_four(of_four), quad_count);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      M m{0.0f, squares[e], rests[e]};
      m.move(means[e] - quad_mean, counts[e]);
      squares[e] = m.squares;
      rests[e] = m.rest;
    }
    M m{0.0f, Tree::add_four(squares), kRest ? Tree::add_four(rests) : 0.0f};
    if constexpr (!Tree::kQuads) m.move(quad_mean - mean, quad_count);
    values[0] = m.squares;
    if (kRest) values[kSums - 2] = m.rest;
  });
  set(own, sums);
  if (cluster == 1) {
    own.sum = mean;
    return own;
  }

  // The row.
  if constexpr (kRest) {
    Tree::send({own.sum, own.squares, own.rest}, cluster, scratch);
  } else {
    Tree::send({own.sum, own.squares}, cluster, scratch);
  }
  M row{0.0f, 0.0f, 0.0f};
  for (int i = 0; i < cluster; i += 2) row.sum += scratch.blocks[0][i] + scratch.blocks[0][i + 1];
  row.sum /= static_cast<float>(part.dim);
  for (int i = 0; i < cluster; ++i) {
    M m{scratch.blocks[0][i], scratch.blocks[1][i], kRest ? scratch.blocks[kSums - 1][i] : 0.0f};
    m.move(mean_of(m.sum, block_count(i)) - row.sum, block_count(i));
    row.squares += m.squares;
    if (kRest) row.rest += m.rest;
  }
  return row;
}

#endif  // a GPU compiler

}  // namespace fuselage
