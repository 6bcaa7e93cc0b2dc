// What a row is reduced to: plain sums, or the sum and the squared deviations from the mean.
//
// Both are added up in one tree, the same however many vectors a thread has:
//
//   vector   N columns         one thread
//   unit     32 vectors        one warp, which has kVectors of them
//   quad     4 units           a warp that has four or eight of them; others after the barrier
//   block    quads, in pairs   every warp for itself, after the one barrier
//   row      blocks, in order  every thread, of what the blocks of a cluster send each other
//
// After the barrier the lanes of a warp read an entry each, of what the warps have, and add them up
// as they add up lanes: with every thread going through all entries by itself, most instructions of
// a layer norm were these.
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
// Of up to kSpan values, a power of two: of that many a product is rounded as the division is, and
// of none the mean is zero. kFull: all of them.
template <bool kFull, int kSpan>
__device__ __forceinline__ float mean_of_part(float sum, int count) {
  static_assert((kSpan & (kSpan - 1)) == 0, "has a reciprocal");
  if (kFull || count % kSpan == 0) return sum * (1.0f / kSpan);
  return mean_of(sum, static_cast<float>(count));
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
    if (!kWhole && count >= N) return of_vector<true>(values, N);
    float parts[N];
#pragma unroll
    for (int k = 0; k < N; ++k) parts[k] = values[k];
#pragma unroll
    for (int step = N / 2; step > 0; step /= 2) {
#pragma unroll
      for (int k = 0; k < step; ++k) parts[k] += parts[k + step];
    }
    Moments m{parts[0], 0.0f, 0.0f};
    const float mean = mean_of_part<kWhole, N>(m.sum, count);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float deviation = kWhole || k < count ? values[k] - mean : 0.0f;
      m.squares = fmaf(deviation, deviation, m.squares);
      if (kRest) m.rest += deviation;
    }
    return m;
  }
};

// The tree over the threads of a block that share a row, of kRows rows of kVectors vectors, a warp
// apart. threadIdx.y counts the rows of a block where a row has no more than a warp; otherwise
// there is one.
// kMoments: an entry is several values, and a step of each that is left out has a branch. With two
// vectors a thread all steps are done then: layer_norm of (512, 4096) takes 5.1 us so on an H200,
// and 5.4 otherwise.
template <int kRows, int kVectors, int N, bool kMoments = false>
struct RowTree {
  static constexpr int kItems = kRows * kVectors;  // units of a warp: a lane looks after one
  static constexpr int kStep = kWarpSize * N;      // columns of a unit
  static constexpr bool kQuads = kVectors >= 4;
  static constexpr bool kTwoQuads = kVectors == 8;
  static constexpr int kEntries = kQuads ? kVectors / 4 : kVectors;  // a warp's quads, or units
  static_assert(kVectors == 1 || kVectors == 2 || kVectors == 4 || kTwoQuads, "units or quads");

  // The lanes of a warp that share a row, a power of two. NOTE: rows of several vectors a thread
  // have whole warps.
  static __device__ __forceinline__ int width() {
    return kVectors > 1 ? kWarpSize : min(static_cast<int>(blockDim.x), kWarpSize);
  }
  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x) & (width() - 1);
  }
  // NOTE: policies give rows of two vectors a thread more than a warp. Known to the compiler, that
  // takes 0.08 us off a small rms_norm on an H200.
  static __device__ __forceinline__ bool one_warp() {
    if (kRows > 1) return true;
    return kVectors != 2 && static_cast<int>(blockDim.x) <= kWarpSize;
  }
  // The item that this lane looks after; the first lane that does so for an item.
  static __device__ __forceinline__ int own_item() {
    if constexpr (kItems == 1) return 0;
    if constexpr (kVectors > 1) return lane() / (kWarpSize / kItems);
    return lane() * kItems >> (31 - __clz(width()));
  }
  static __device__ __forceinline__ int lane_of(int item) { return item * width() / kItems; }

  // Adds what lies `first` lanes apart, and twice as far, up to before `last`.
  static __device__ __forceinline__ float add_lanes(float value, int first, int last) {
#pragma unroll
    for (int i = 1; i < kWarpSize; i *= 2) {
      if (i >= first && i < last) value += shuffle_xor(value, i, kWarpSize);
    }
    return value;
  }
  // Whether units meet within the warp.
  static __device__ __forceinline__ bool adds_units() {
    return kVectors > 1 && (kQuads || one_warp());
  }
  static __device__ __forceinline__ float add_units(float value) {
    constexpr int kLanes = kWarpSize / kItems;  // that look after the same unit
    return add_lanes(value, kLanes, kLanes * (kVectors < 4 ? kVectors : 4));
  }
  static __device__ __forceinline__ float add_two_quads(float value) {
    return kTwoQuads ? add_lanes(value, kWarpSize / 2, kWarpSize) : value;
  }

  // This warp's entries go to the block, of which lane i of every warp gets entry i, or zeros past
  // the last; lanes past span() get them again.
  template <int kValues, typename Scratch>
  static __device__ __forceinline__ void exchange(float (&values)[kValues], Scratch& scratch) {
    constexpr int kLanes = kWarpSize / kEntries;  // that have the same entry
    if (threadIdx.x % kLanes == 0) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) scratch.warps[k][threadIdx.x / kLanes] = values[k];
    }
    __syncthreads();
    const int i = entry();
#pragma unroll
    for (int k = 0; k < kValues; ++k) values[k] = i < entries() ? scratch.warps[k][i] : 0.0f;
  }
  static __device__ __forceinline__ int entries() {
    return static_cast<int>(blockDim.x) / kWarpSize * kEntries;
  }
  // The power of two that holds them, and a quad at least; which of them this lane has.
  static __device__ __forceinline__ int span() {
    if (kMoments && kVectors == 2) return kWarpSize;
    return max(4, 1 << (32 - __clz(entries() - 1)));
  }
  static __device__ __forceinline__ int entry() { return lane() & (span() - 1); }

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
    for (int k = 0; k < kSums; ++k) {
      sums[k] = Tree::add_units(sums[k]);
      if (Tree::one_warp()) sums[k] = Tree::add_two_quads(sums[k]);
    }
  }
  if (Tree::one_warp()) return;
  Tree::exchange(sums, scratch);
#pragma unroll
  for (int k = 0; k < kSums; ++k) sums[k] = Tree::add_lanes(sums[k], 1, Tree::span());
  if (cluster == 1) return;
  Tree::send(sums, cluster, scratch);
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    sums[k] = 0.0f;
    for (int i = 0; i < cluster; i += 2) sums[k] += scratch.blocks[k][i] + scratch.blocks[k][i + 1];
  }
}

// Moments of a part of a row, and what it takes to move them.
template <bool kRest>
struct PartMoments {
  Moments<kRest> own;
  float count, mean;

  // One level up: `own` is moved to the mean of what it is part of, and added to the other parts.
  template <typename F>
  __device__ __forceinline__ void meet(float mean_of_all, F&& add) {
    own.move(mean - mean_of_all, count);
    own.squares = add(own.squares);
    if (kRest) own.rest = add(own.rest);
    mean = mean_of_all;
  }
};

// Of the units of a warp, or the quad they are. kFull: they are all inside the row.
template <bool kWhole, bool kFull, int kRows, int kVectors, int N, bool kRest>
__device__ __forceinline__ PartMoments<kRest> reduce_units(
    Moments<kRest> (&items)[kRows * kVectors], const RowPart& part) {
  using M = Moments<kRest>;
  using Tree = RowTree<kRows, kVectors, N>;
  constexpr int kItems = Tree::kItems, kStep = Tree::kStep, kSums = M::kSums;
  const int width = Tree::width();
  const auto count_of = [&](int start, int span) { return kFull ? span : part.count(start, span); };

  float first[kItems][1], sum[1];
#pragma unroll
  for (int i = 0; i < kItems; ++i) first[i][0] = items[i].sum;
  warp_sums_of_rows(first, sum, width);
  const int own_start = part.warp_start + Tree::own_item() % kVectors * kStep;
  const int own_count = count_of(own_start, width * N);
  PartMoments<kRest> result{{sum[0], 0.0f, 0.0f}, static_cast<float>(own_count), 0.0f};
  M& own = result.own;
  result.mean = mean_of_part<kFull, kStep>(own.sum, own_count);
  float others[kItems][kSums - 1], sums[kSums - 1];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const float unit_mean = shuffle_from(result.mean, Tree::lane_of(i), width);
    const int column = part.warp_start + i % kVectors * kStep + Tree::lane() * N;
    const int inside = kWhole ? N : part.count(column, N);
    const float d = mean_of_part<kWhole, N>(items[i].sum, inside) - unit_mean;
    // NOTE: an empty vector has no deviation, whatever `d`.
    items[i].move(kFull || column < part.block_end ? d : 0.0f, static_cast<float>(inside));
    others[i][0] = items[i].squares;
    if (kRest) others[i][kSums - 2] = items[i].rest;
  }
  warp_sums_of_rows(others, sums, width);
  own.squares = sums[0];
  if (kRest) own.rest = sums[kSums - 2];

  if (Tree::adds_units()) {
    own.sum = Tree::add_units(own.sum);
    constexpr int kColumns = (kVectors < 4 ? kVectors : 4) * kStep;
    const int start = part.warp_start + (Tree::kTwoQuads ? Tree::own_item() / 4 * kColumns : 0);
    const int count_of_all = count_of(start, kColumns);
    result.meet(mean_of_part<kFull, kColumns>(own.sum, count_of_all),
                [](float v) { return Tree::add_units(v); });
    result.count = static_cast<float>(count_of_all);
  }
  return result;
}

// Of a row, about its mean, which is returned in place of the sum; of what reduce_units returned.
template <int kRows, int kVectors, int N, bool kRest, typename Scratch>
__device__ __forceinline__ Moments<kRest> reduce_row(PartMoments<kRest> moments,
                                                     const RowPart& part, int cluster,
                                                     Scratch& scratch) {
  using M = Moments<kRest>;
  using Tree = RowTree<kRows, kVectors, N, true>;
  constexpr int kStep = Tree::kStep, kSums = M::kSums;
  M& own = moments.own;
  float &count = moments.count, &mean = moments.mean;
  const auto meet = [&](float mean_of_all, const auto& add) { moments.meet(mean_of_all, add); };

  if (Tree::one_warp()) {
    own.sum = mean_of(Tree::add_two_quads(own.sum), static_cast<float>(part.dim));
    meet(own.sum, [](float v) { return Tree::add_two_quads(v); });
    return own;
  }

  // The block.
  float entry[M::kShared] = {own.sum, own.squares, count, mean};
  if (kRest) entry[4] = own.rest;
  Tree::exchange(entry, scratch);
  own = {entry[0], entry[1], kRest ? entry[4] : 0.0f};
  count = entry[2], mean = entry[3];
  if constexpr (!Tree::kQuads) {
    own.sum = Tree::add_lanes(own.sum, 1, 4);
    const int start = part.block_start + Tree::entry() / 4 * (4 * kStep);
    const float count_of_all = static_cast<float>(part.count(start, 4 * kStep));
    meet(mean_of(own.sum, count_of_all), [](float v) { return Tree::add_lanes(v, 1, 4); });
    count = count_of_all;
  }
  const auto add_quads = [](float v) {
    return Tree::add_lanes(v, Tree::kQuads ? 1 : 4, Tree::span());
  };
  own.sum = add_quads(own.sum);
  const auto block_count = [&](int i) {
    const int slice = static_cast<int>(blockDim.x) * kVectors * N;
    return static_cast<float>(max(0, min(part.dim - i * slice, slice)));
  };
  const float inside = cluster == 1 ? static_cast<float>(part.dim) : block_count(cluster_rank());
  meet(mean_of(own.sum, inside), add_quads);
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
