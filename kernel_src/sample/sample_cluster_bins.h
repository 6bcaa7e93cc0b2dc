// Bins and lists of sample/sample_cluster.cu: in which bin, and at which key, a sum from the top on
// reaches an amount.
//
// All sums are of integers, so that their order does not matter, in two halves: shared memory has
// no 64-bit sums.
#pragma once

#include "sample/sample_cluster_row.h"

namespace fuselage {
namespace {

// ---- bins ----

__device__ __forceinline__ void clear_bins(Shared& shared) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < kDistanceBins / 4; i += kClusterThreads) {
    reinterpret_cast<uint4*>(shared.low)[i] = zero;
    reinterpret_cast<uint4*>(shared.high)[i] = zero;
  }
  __syncthreads();
}

__device__ __forceinline__ void add_to_bin(Shared& shared, int bin, uint32_t count) {
  atomicAdd(&shared.low[bin], count);
}
__device__ __forceinline__ void add_to_bin(Shared& shared, int bin, unsigned long long weight) {
  const uint32_t low = static_cast<uint32_t>(weight);
  const uint32_t carry = atomicAdd(&shared.low[bin], low) > ~low ? 1 : 0;
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
  if (high != 0) atomicAdd(&shared.high[bin], high);
}

__device__ __forceinline__ uint32_t warp_total(const uint32_t (&counts)[4]) {
  return kWarpSize * (counts[0] + counts[1] + counts[2] + counts[3]);
}
__device__ __forceinline__ unsigned long long warp_total(const unsigned long long (&weights)[4]) {
  return warp_sum_of(weights[0] + weights[1] + weights[2] + weights[3]);
}

// Adds four amounts a lane, without those of negative bins. Counts are all 1. All lanes call it
// together: where all have the same bin, as in rows of equal logits, one addition does.
template <typename Amount>
__device__ __forceinline__ void add_four(Shared& shared, const int (&bins)[4],
                                         const Amount (&amounts)[4]) {
  const int first = __shfl_sync(kAllLanes, bins[0], 0);
  const bool same = bins[0] == first && bins[1] == first && bins[2] == first && bins[3] == first;
  if (__all_sync(kAllLanes, same)) {
    if (first < 0) return;
    const Amount total = warp_total(amounts);
    if (threadIdx.x % kWarpSize == 0) add_to_bin(shared, first, total);
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (bins[k] >= 0) add_to_bin(shared, bins[k], amounts[k]);
  }
}

// The bin in which the sum reaches amount(), which is called after all blocks have filled the bins.
// If the sum of all bins is smaller, `all` alone is valid.
template <typename Group, typename Amount>
__device__ __forceinline__ Found find_bin(Shared& shared, const Group& group, Amount amount) {
  constexpr int kMaxEach = kDistanceBins / kClusterThreads;
  group.sync();
  const unsigned long long wanted = amount();
  // A block adds up its share of the bins over all blocks, a thread some neighbours.
  const int own = kDistanceBins / group.blocks;
  const int each = own > kClusterThreads ? own / kClusterThreads : 1;
  const int first = static_cast<int>(threadIdx.x) * each;
  unsigned long long values[kMaxEach] = {}, sum = 0;
  if (first < own) {
#pragma unroll
    for (int i = 0; i < kMaxEach; ++i) {
      if (i >= each) break;
      const int bin = group.rank * own + first + i;
      // NOTE: all are loaded first, so that the loads are in flight together.
      uint32_t lows[Group::kMaxBlocks], highs[Group::kMaxBlocks];
#pragma unroll
      for (int block = 0; block < Group::kMaxBlocks; ++block) {
        const int from = block < group.blocks ? block : group.rank;
        lows[block] = group.at(shared.low, from)[bin];
        highs[block] = group.at(shared.high, from)[bin];
      }
#pragma unroll
      for (int block = 0; block < Group::kMaxBlocks; ++block) {
        if (block < group.blocks)
          values[i] += static_cast<unsigned long long>(highs[block]) << 32 | lows[block];
      }
      sum += values[i];
    }
  }
  unsigned long long upto = sum;  // in the warp
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const unsigned long long before = __shfl_up_sync(kAllLanes, upto, step);
    if (static_cast<int>(threadIdx.x % kWarpSize) >= step) upto += before;
  }
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x % kWarpSize == kWarpSize - 1) shared.warp_sums[0][warp] = upto;
  __syncthreads();
  unsigned long long above = 0, segment = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    above += i < warp ? shared.warp_sums[0][i] : 0;
    segment += shared.warp_sums[0][i];
  }
  unsigned long long all = segment;
  int owner = 0;  // the block that has the bin in its share
  if constexpr (Group::kMaxBlocks > 1) {
    if (threadIdx.x == 0) shared.segment = segment;
    group.sync();
    const int lane = threadIdx.x % kWarpSize;
    const unsigned long long its = lane < group.blocks ? *group.at(&shared.segment, lane) : 0;
    all = 0;
#pragma unroll
    for (int block = 0; block < Group::kMaxBlocks; ++block) {
      above += block == group.rank ? all : 0;
      all += __shfl_sync(kAllLanes, its, block);
      owner += all < wanted ? 1 : 0;
    }
  }
  above += upto - sum;
#pragma unroll
  for (int i = 0; i < kMaxEach; ++i) {
    if (wanted > above && wanted <= above + values[i]) {
      shared.found = {wanted - above, values[i], group.rank * own + first + i, all};
    }
    above += values[i];
  }
  group.sync();
  Found found = *group.at(&shared.found, owner < group.blocks ? owner : 0);
  found.all = all;
  return found;
}

// The key, from `high` down to `low`, at which the amounts of all keys from `high` on reach
// `amount`. fill(low, high, shift) adds those of the keys in [low, high] to the bins (high - key)
// >> shift. Before each further step few(low, high, amount, key) may find the key, if few are left.
template <typename Group, typename Fill, typename Few>
__device__ __forceinline__ uint32_t find_key(Shared& shared, const Group& group, uint32_t low,
                                             uint32_t high, unsigned long long amount, Fill fill,
                                             Few few) {
  constexpr int kBits = 11;
  static_assert(kDistanceBins == 1 << kBits, "a step finds as many bits");
  while (true) {
    const int bits = 32 - __clz(static_cast<int>(high - low));
    const int shift = bits > kBits ? bits - kBits : 0;
    clear_bins(shared);
    fill(low, high, shift);
    const Found found = find_bin(shared, group, [&] { return amount; });
    amount = found.amount;
    high -= static_cast<uint32_t>(found.bin) << shift;
    if (shift == 0) return high;
    const uint32_t width = (1u << shift) - 1;
    if (high - low > width) low = high - width;
    uint32_t key;
    if (few(low, high, amount, key)) return key;
  }
}

// ---- lists ----

// Lists the keys of all logits of the row for which wanted(logit) is true, in each block, and
// returns their number. If that is above kClusterListed there is no list.
template <typename Wanted>
__device__ __forceinline__ uint32_t list_logits(Shared& shared, const Cluster& cluster,
                                                const Part& part, Wanted wanted) {
  if (threadIdx.x == 0) shared.listed = 0;
  __syncthreads();
  part.for_each_four([&](int, const float(&four)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (!wanted(four[k])) continue;
      const uint32_t at = atomicAdd(&shared.listed, 1u);
      if (at < kClusterListed) shared.list[at] = key_of<SampleMath>(four[k]);
    }
  });
  __syncthreads();
  const uint32_t own = shared.listed;
  cluster.sync();
  const uint32_t its =
      *cluster.at(&shared.listed, static_cast<int>(threadIdx.x % kWarpSize) % cluster.blocks);
  uint32_t ends[kMaxCluster], total = 0;  // of the blocks' lists, concatenated
#pragma unroll
  for (int i = 0; i < kMaxCluster; ++i) {
    // Ours is the first: it stays in place, as the others read it.
    const uint32_t count = __shfl_sync(kAllLanes, its, (cluster.rank + i) % cluster.blocks);
    total += i < cluster.blocks ? count : 0;
    ends[i] = total;
  }
  if (total > kClusterListed) return total;
  for (uint32_t i = own + threadIdx.x; i < total; i += kClusterThreads) {
    int block = 0;
    uint32_t start = 0;
#pragma unroll
    for (int k = 0; k < kMaxCluster - 1; ++k) {
      if (i >= ends[k]) {
        block = k + 1;
        start = ends[k];
      }
    }
    shared.list[i] = cluster.at(shared.list, (cluster.rank + block) % cluster.blocks)[i - start];
  }
  __syncthreads();
  return total;
}

}  // namespace
}  // namespace fuselage
