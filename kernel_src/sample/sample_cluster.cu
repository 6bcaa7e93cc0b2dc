// gumbel_sample with filters or log-probabilities, on GPUs with thread block clusters: formulas in sample/sample.h.
//
// The blocks of a cluster have a row in their shared memory, in float32, which is read from global memory once:
//   top_k    The greatest logits of all warps, or threads, are at least as many as top_k. The least of them is a
//            pivot: what is below it is not looked at. What is left is listed, where it is little.
//   top_p    Weights are added up in bins of their distance from the greatest logit; the bin in which the bound
//            lies is listed.
//   min_p    The bound is known from the greatest logit.
// Blocks read each other's lists and go on alone, each with the same result: the keys of a list are added up in bins of
// ever smaller spans, until a span is one key. Of a bin with too many logits for a list, all blocks do that
// together. Then the row is drawn from.
//
// All sums are of integers, so that their order does not matter, in two halves: shared memory has no 64-bit sums.

#include "sample/sample_cluster.h"

#include "common/launch_policy.h"
#include "sample/sample_draw.h"
#include "sample/sample_filter.h"

namespace fuselage {
namespace {

constexpr int kWarps = kClusterThreads / kWarpSize;

// The greatest logit of a block, and the least of the greatest of its warps and of its threads.
struct Greatest {
  float all, of_warps, of_threads;
};

// Where a sum from the first bin on reaches an amount.
struct Found {
  unsigned long long amount;  // that is wanted of the bin
  unsigned long long sum;     // of the bin
  int bin;
  unsigned long long all;  // of all bins
};

struct Shared {
  uint32_t low[kDistanceBins], high[kDistanceBins];  // the bins; after the filters, candidates
  uint32_t list[kClusterListed];                     // keys
  Greatest of_warps[kWarps];
  unsigned long long warp_sums[2][kWarps];
  Candidate best_of_warps[kWarps];
  Found found;
  uint32_t listed, least, most, floor, few, few_keys[kWarpSize];
  uint32_t next;  // of the rows that are left
  // Of this block, read by the others.
  Greatest greatest;
  unsigned long long segment, sum, weights, allowed;
};
static_assert(kMaxCluster * 232448 / sizeof(float) < (1 << kWeightCountBits),
              "weights are not shifted: a row that fits has few");
static_assert(sizeof(Shared) <= kClusterFixedBytes, "the policy counts with less");
static_assert(kMostSamples * sizeof(Candidate) <= 2 * kDistanceBins * sizeof(uint32_t),
              "candidates take the place of the bins");

// Who adds up in bins: a block, or all of a cluster.
struct OneBlock {
  static constexpr int kMostBlocks = 1, blocks = 1, rank = 0;
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  template <typename V>
  __device__ __forceinline__ V* at(V* own, int) const {
    return own;
  }
};
struct Cluster {
  static constexpr int kMostBlocks = kMaxCluster;
  int blocks, rank;
  __device__ __forceinline__ void sync() const { cluster_sync(); }
  template <typename V>
  __device__ __forceinline__ V* at(V* own, int of) const {
    return map_shared_rank(own, of);
  }
};

// ---- the row ----

// A block's part of the row: `size` logits, the first of which is that of column `begin`. What may not be drawn is
// -inf.
struct Part {
  float* logits;
  int begin, size;

  // body(number, four) of all vectors of four logits; -inf behind the end. All threads of a warp call it equally
  // often.
  template <typename Body>
  __device__ __forceinline__ void for_each_four(Body body) const {
    constexpr int kAtOnce = 2;
    const float4* vectors = reinterpret_cast<const float4*>(logits);
    const int count = (size + 3) / 4;
    for (int first = 0; first < count; first += kAtOnce * kClusterThreads) {
      float4 loaded[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * kClusterThreads + static_cast<int>(threadIdx.x);
        const float none = minus_infinity();
        loaded[j] = i < count ? vectors[i] : make_float4(none, none, none, none);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * kClusterThreads + static_cast<int>(threadIdx.x);
        const float four[4] = {loaded[j].x, loaded[j].y, loaded[j].z, loaded[j].w};
        body(i, four);
      }
    }
  }
};

// Reads the part of the row and returns the greatest logit that is this thread's.
template <typename T>
__device__ __forceinline__ float load_part(const GumbelSample& p, int64_t row, const Part& part) {
  const RowStrips strips(p.strips, row);
  constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  constexpr int kAtOnce = 4;
  const T* data = row_of<T>(p, row) + part.begin;
  float greatest = minus_infinity();
  if (p.bias == nullptr && p.bitmask == nullptr && Vector<T, kWidth>::shift_of(data) == 0) {
    for (int first = 0; first < part.size; first += kAtOnce * kWidth * kClusterThreads) {
      Vector<T, kWidth> vectors[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = first + (j * kClusterThreads + static_cast<int>(threadIdx.x)) * kWidth;
        // NOTE: always set, or what was there is kept from row to row.
        vectors[j] =
            at + kWidth <= part.size ? Vector<T, kWidth>::load(data + at) : Vector<T, kWidth>{};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = first + (j * kClusterThreads + static_cast<int>(threadIdx.x)) * kWidth;
        if (at >= part.size) continue;
        float values[kWidth];
        if (strips.lack(part.begin + at)) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) values[k] = minus_infinity();
        } else if (at + kWidth <= part.size) {
          vectors[j].to_floats(values);
        } else {
#pragma unroll
          for (int k = 0; k < kWidth; ++k)
            values[k] = at + k < part.size ? to_float(data[at + k]) : minus_infinity();
        }
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          values[k] = fmaxf(values[k], minus_infinity());  // NaN is no number to it
          greatest = fmaxf(values[k], greatest);
        }
#pragma unroll
        for (int k = 0; k < kWidth; k += 4) {
          *reinterpret_cast<float4*>(part.logits + at + k) =
              make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
        }
      }
    }
    return greatest;
  }
  for_each_vector<T, kSampleVector>(
      p, row, part.begin, part.begin + part.size, [&](int column, const auto& logits) {
        const int at = column - part.begin;
        if (at >= part.size) return;
#pragma unroll
        for (int k = 0; k < kSampleVector; ++k) greatest = fmaxf(logits[k], greatest);
#pragma unroll
        for (int k = 0; k < kSampleVector; k += 4) {
          *reinterpret_cast<float4*>(part.logits + at + k) =
              make_float4(logits[k], logits[k + 1], logits[k + 2], logits[k + 3]);
        }
      });
  return greatest;
}

__device__ __forceinline__ float warp_least(float value) { return -warp_greatest(-value); }

__device__ __forceinline__ Greatest warp_join(const Greatest& of_lane) {
  return {warp_greatest(of_lane.all), warp_least(of_lane.of_warps), warp_least(of_lane.of_threads)};
}

// What all blocks have together.
__device__ __forceinline__ Greatest share_greatest(Shared& shared, const Cluster& cluster,
                                                   float of_thread) {
  const int lane = threadIdx.x % kWarpSize;
  const float of_warp = warp_greatest(of_thread), least = warp_least(of_thread);
  if (lane == 0) shared.of_warps[threadIdx.x / kWarpSize] = {of_warp, of_warp, least};
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    const Greatest own = warp_join(shared.of_warps[lane % kWarps]);
    if (lane == 0) shared.greatest = own;
  }
  cluster.sync();
  return warp_join(*cluster.at(&shared.greatest, lane % cluster.blocks));
}

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

// Adds four amounts a lane, but those of bins below 0. Counts are all 1. All lanes call together: where all have the
// same bin, as in rows of equal logits, it is added to once.
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

// The bin in which the sum reaches amount(), which is called when all have filled the bins. Where the sum of all bins
// is less, nothing but `all` is valid.
template <typename Group, typename Amount>
__device__ __forceinline__ Found find_bin(Shared& shared, const Group& group, Amount amount) {
  constexpr int kMostEach = kDistanceBins / kClusterThreads;
  group.sync();
  const unsigned long long wanted = amount();
  // A block adds up its share of the bins over all blocks; a thread has neighbouring ones.
  const int own = kDistanceBins / group.blocks;
  const int each = own > kClusterThreads ? own / kClusterThreads : 1;
  const int first = static_cast<int>(threadIdx.x) * each;
  unsigned long long values[kMostEach] = {}, sum = 0;
  if (first < own) {
#pragma unroll
    for (int i = 0; i < kMostEach; ++i) {
      if (i >= each) break;
      const int bin = group.rank * own + first + i;
      // NOTE: all are loaded, so that none waits for another.
      uint32_t lows[Group::kMostBlocks], highs[Group::kMostBlocks];
#pragma unroll
      for (int block = 0; block < Group::kMostBlocks; ++block) {
        const int from = block < group.blocks ? block : group.rank;
        lows[block] = group.at(shared.low, from)[bin];
        highs[block] = group.at(shared.high, from)[bin];
      }
#pragma unroll
      for (int block = 0; block < Group::kMostBlocks; ++block) {
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
  int owner = 0;  // the block in whose share the bin is
  if constexpr (Group::kMostBlocks > 1) {
    if (threadIdx.x == 0) shared.segment = segment;
    group.sync();
    const int lane = threadIdx.x % kWarpSize;
    const unsigned long long its = lane < group.blocks ? *group.at(&shared.segment, lane) : 0;
    all = 0;
#pragma unroll
    for (int block = 0; block < Group::kMostBlocks; ++block) {
      above += block == group.rank ? all : 0;
      all += __shfl_sync(kAllLanes, its, block);
      owner += all < wanted ? 1 : 0;
    }
  }
  above += upto - sum;
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
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

// The key, from `high` down to `low`, at which the amounts of all keys from `high` on reach `amount`.
// fill(low, high, shift) adds those of the keys in [low, high] to the bins (high - key) >> shift. Where it can, and
// before the next step, few(low, high, amount, key) tells the key.
template <typename Group, typename Fill, typename Few>
__device__ __forceinline__ uint32_t find_key(Shared& shared, const Group& group, uint32_t low,
                                             uint32_t high, unsigned long long amount, Fill fill,
                                             Few few) {
  constexpr int kBits = 11;
  static_assert(kDistanceBins == 1 << kBits, "a span has as many bins");
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

// Lists the keys of the logits of which wanted(logit) is true, of all blocks in each, and returns how many they are. Of
// more than kClusterListed there is no list.
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
  uint32_t ends[kMaxCluster], total = 0;  // of the lists, one behind the other
#pragma unroll
  for (int i = 0; i < kMaxCluster; ++i) {
    // Ours is the first: the others are reading it.
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

// ---- filters ----

// As key_at_distance, 32 keys at a time: all lanes call it.
__device__ __forceinline__ uint32_t warp_key_at_distance(const Scale& scale, float lowest) {
  uint32_t low = kKeyOfMinusInfinity, high = key_of<SampleMath>(scale.greatest);
  while (low < high) {
    const uint32_t step = (high - low) / kWarpSize + 1;
    const uint32_t ahead = step * (threadIdx.x % kWarpSize);
    const uint32_t key = ahead < high - low ? low + ahead : high;
    const bool near = scale.distance(value_of_key<SampleMath>(key)) >= lowest;
    const uint32_t nearby = __ballot_sync(kAllLanes, near);
    const int first = nearby == 0 ? kWarpSize : __ffs(static_cast<int>(nearby)) - 1;
    const uint32_t key_of_first = __shfl_sync(kAllLanes, key, first % kWarpSize);
    const uint32_t key_before = __shfl_sync(kAllLanes, key, first == 0 ? 0 : first - 1);
    if (first < kWarpSize) high = key_of_first;
    if (first > 0) low = key_before + 1;
  }
  return high;
}

// What the filters know of the row. Logits with keys from `bound` on may be drawn.
struct Filtering {
  const GumbelSample& p;
  Shared& shared;
  const Cluster& cluster;
  const Part& part;
  Scale scale;
  uint32_t greatest, bound;
  bool complete;  // the list has all that may be drawn
  uint32_t listed;

  // The key among those of the list that are in [low, high], where a warp has a lane for each.
  template <typename Amount>
  __device__ __forceinline__ bool key_of_few(uint32_t low, uint32_t high, unsigned long long wanted,
                                             Amount amount, uint32_t& key) const {
    if (threadIdx.x == 0) shared.few = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < listed; i += kClusterThreads) {
      const uint32_t own = shared.list[i];
      if (own < low || own > high) continue;
      const uint32_t at = atomicAdd(&shared.few, 1u);
      if (at < kWarpSize) shared.few_keys[at] = own;
    }
    __syncthreads();
    const uint32_t count = shared.few;
    if (count > kWarpSize) return false;
    const uint32_t lane = threadIdx.x % kWarpSize;
    const uint32_t own = lane < count ? shared.few_keys[lane] : 0;
    const unsigned long long value = lane < count ? amount(own) : 0;
    unsigned long long above = 0, upto = 0;  // of the greater ones, and of the equal ones, too
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t other = __shfl_sync(kAllLanes, own, static_cast<int>(i));
      const unsigned long long its = __shfl_sync(kAllLanes, value, static_cast<int>(i));
      above += other > own ? its : 0;
      upto += other >= own ? its : 0;
    }
    const bool is = lane < count && wanted > above && wanted <= upto;
    const uint32_t found = __ballot_sync(kAllLanes, is);
    key = __shfl_sync(kAllLanes, own, found == 0 ? 0 : __ffs(static_cast<int>(found)) - 1);
    return found != 0;
  }

  // The key at which the amounts of the list's keys from `low` on reach `wanted`.
  template <typename Amount>
  __device__ __forceinline__ uint32_t key_in_list(uint32_t low, unsigned long long wanted,
                                                  Amount amount) const {
    uint32_t key;
    if (listed <= kWarpSize && key_of_few(low, greatest, wanted, amount, key)) return key;
    // The span that the keys have: the shorter it is, the finer the first bins are.
    if (threadIdx.x == 0) {
      shared.least = greatest;
      shared.most = low;
    }
    __syncthreads();
    uint32_t least = greatest, most = low;
    for (uint32_t i = threadIdx.x; i < listed; i += kClusterThreads) {
      const uint32_t own = shared.list[i];
      if (own < low) continue;
      least = own < least ? own : least;
      most = own > most ? own : most;
    }
    least = __reduce_min_sync(kAllLanes, least);
    most = __reduce_max_sync(kAllLanes, most);
    if (threadIdx.x % kWarpSize == 0) {
      atomicMin(&shared.least, least);
      atomicMax(&shared.most, most);
    }
    __syncthreads();
    return find_key(shared, OneBlock{}, shared.least, shared.most, wanted, fill_of_list(amount),
                    [&](uint32_t from, uint32_t to, unsigned long long rest, uint32_t& its) {
                      return key_of_few(from, to, rest, amount, its);
                    });
  }

  // Fills bins with the amounts of a list's keys.
  template <typename Amount>
  __device__ __forceinline__ auto fill_of_list(Amount amount) const {
    return [this, amount](uint32_t low, uint32_t high, int shift) {
      for (uint32_t i = threadIdx.x; i < listed; i += kClusterThreads) {
        const uint32_t key = shared.list[i];
        if (key >= low && key <= high)
          add_to_bin(shared, static_cast<int>((high - key) >> shift), amount(key));
      }
    };
  }
  // Fills bins with those of the row's logits that are in a bin of distance.
  template <typename Amount>
  __device__ __forceinline__ auto fill_of_row(int bin, Amount amount) const {
    using Value = decltype(amount(0u));
    return [this, bin, amount](uint32_t low, uint32_t high, int shift) {
      part.for_each_four([&](int, const float(&four)[4]) {
        int bins[4];
        Value amounts[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t key = key_of<SampleMath>(four[k]);
          const bool is = key >= low && key <= high && scale.bin(four[k]) == bin;
          bins[k] = is ? static_cast<int>((high - key) >> shift) : -1;
          amounts[k] = is ? amount(key) : Value{0};
        }
        add_four(shared, bins, amounts);
      });
    };
  }

  // The key of the bin that is found, by way of a list where that has room.
  template <typename Amount>
  __device__ __forceinline__ uint32_t key_in(const Found& found, bool may_list, Amount amount) {
    const float lowest = value_of_key<SampleMath>(bound);
    if (may_list) {
      listed = list_logits(shared, cluster, part, [&](float logit) {
        return logit >= lowest && scale.bin(logit) == found.bin;
      });
    }
    if (may_list && listed <= kClusterListed) {
      return key_in_list(bound, found.amount, amount);
    }
    return find_key(shared, cluster, bound, greatest, found.amount, fill_of_row(found.bin, amount),
                    [](uint32_t, uint32_t, unsigned long long, uint32_t&) { return false; });
  }

  __device__ __forceinline__ void top_k(int64_t k, const Greatest& all) {
    if (k < 1 || k > p.draws.vocab) return;
    const unsigned long long wanted = static_cast<unsigned long long>(k);
    const auto one = [](uint32_t) { return 1u; };
    const bool of_warps = k <= kWarps * cluster.blocks && all.of_warps > minus_infinity();
    const bool of_threads =
        k <= kClusterThreads * cluster.blocks && all.of_threads > minus_infinity();
    const float pivot = of_warps     ? all.of_warps
                        : of_threads ? all.of_threads
                                     : value_of_key<SampleMath>(bound);
    const uint32_t lowest = key_of<SampleMath>(pivot);
    if (of_warps) {
      listed = list_logits(shared, cluster, part, [&](float logit) { return logit >= pivot; });
      complete = listed <= kClusterListed;
    }
    if (complete) {
      bound = key_in_list(lowest, wanted, one);
      return;
    }
    clear_bins(shared);
    part.for_each_four([&](int, const float(&four)[4]) {
      int bins[4];
      const uint32_t ones[4] = {1, 1, 1, 1};
#pragma unroll
      for (int i = 0; i < 4; ++i) bins[i] = four[i] >= pivot ? scale.bin(four[i]) : -1;
      add_four(shared, bins, ones);
    });
    const Found found = find_bin(shared, cluster, [&] { return wanted; });
    if (found.all < wanted) return;
    bound = lowest;
    bound = key_in(found, found.sum <= kClusterListed, one);
  }

  __device__ __forceinline__ void top_p(float share) {
    if (!(share < 1.0f)) return;
    const auto weight = [this](uint32_t key) { return scale.weight_of_key(key); };
    if (complete) {
      unsigned long long sum = 0;
      for (uint32_t i = threadIdx.x; i < listed; i += kClusterThreads) {
        const uint32_t key = shared.list[i];
        if (key >= bound) sum += weight(key);
      }
      sum = block_sum_of(shared.warp_sums[1], sum);
      bound = key_in_list(bound, weights_needed(share, sum), weight);
      return;
    }
    // Logits so far off that all together cannot have what top_p leaves out need no bins: their weights only count
    // in the sum.
    const float left = share > 0.0f ? 1.0f - share : 1.0f;
    const float cutoff = 0.693147f * (log2_approximate(left) - 2.0f -
                                      log2_approximate(static_cast<float>(p.draws.vocab)));
    const float lowest = value_of_key<SampleMath>(bound);
    clear_bins(shared);
    unsigned long long sum = 0;
    part.for_each_four([&](int, const float(&four)[4]) {
      int bins[4];
      unsigned long long weights[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float distance = scale.distance(four[k]);
        const bool is = four[k] >= lowest && distance > kNoWeight;
        weights[k] = is ? weight_of<SampleMath>(distance) : 0;
        bins[k] = is && distance >= cutoff ? near_distance_bin<SampleMath>(distance) : -1;
        sum += weights[k];
      }
      add_four(shared, bins, weights);
    });
    sum = block_sum_of(shared.warp_sums[1], sum);
    if (threadIdx.x == 0) shared.sum = sum;
    const Found found = find_bin(shared, cluster, [&] {
      const int lane = threadIdx.x % kWarpSize;
      return weights_needed(
          share, warp_sum_of(lane < cluster.blocks ? *cluster.at(&shared.sum, lane) : 0));
    });
    bound = key_in(found, true, weight);
  }

  __device__ __forceinline__ void min_p(float share) {
    const uint32_t key = warp_key_at_distance(scale, farthest_of_min_p(share));
    if (key > bound) bound = key;
  }
};

// ---- the kernel ----

__device__ __forceinline__ void draw_row(const GumbelSample& p, Shared& shared,
                                         const ClusterPolicy& policy, int64_t row) {
  const Cluster cluster{policy.blocks, policy.blocks == 1 ? 0 : cluster_rank()};
  const int64_t begin = cluster.rank * policy.part, behind = p.draws.vocab - begin;
  const Part part{reinterpret_cast<float*>(reinterpret_cast<char*>(&shared) + kClusterFixedBytes),
                  static_cast<int>(begin),
                  static_cast<int>(behind < 0             ? 0
                                   : behind < policy.part ? behind
                                                          : policy.part)};
  const Heat heat = heat_of(p.draws, row);
  const NoiseKey key = key_of_row(p.draws, row);

  float of_thread = minus_infinity();
  switch (p.dtype) {
    case DType::float32: of_thread = load_part<float>(p, row, part); break;
    case DType::float16: of_thread = load_part<float16>(p, row, part); break;
    default: of_thread = load_part<bfloat16>(p, row, part);
  }
  const Greatest greatest = share_greatest(shared, cluster, of_thread);
  const bool any = greatest.all > minus_infinity();
  const bool has_weights = any && !heat.greedy;
  const bool wants_sums = p.results.logprobs != nullptr || p.results.log_sum_exp != nullptr;

  const Scale scale{greatest.all, heat.inv_temperature};
  uint32_t bound = kKeyOfMinusInfinity + 1;
  if (has_weights) {
    Filtering filtering{p,     shared, cluster, part, scale, key_of<SampleMath>(greatest.all),
                        bound, false,  0};
    if (p.filters.has_top_k) filtering.top_k(option_of(p.filters.top_k, row), greatest);
    if (p.filters.has_top_p) filtering.top_p(option_of(p.filters.top_p, row));
    if (p.filters.has_min_p) filtering.min_p(option_of(p.filters.min_p, row));
    bound = filtering.bound;
  }
  const float lowest = value_of_key<SampleMath>(bound);

  if (has_weights && wants_sums) {
    unsigned long long weights = 0, allowed = 0;
    part.for_each_four([&](int, const float(&four)[4]) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (!(four[k] > minus_infinity())) continue;
        const unsigned long long weight = weight_of<SampleMath>(scale.distance(four[k]));
        weights += weight;
        allowed += four[k] >= lowest ? weight : 0;
      }
    });
    weights = block_sum_of(shared.warp_sums[0], weights);
    allowed = block_sum_of(shared.warp_sums[1], allowed);
    if (threadIdx.x == 0) {
      shared.weights = weights;
      shared.allowed = allowed;
    }
  }

  Candidate* candidates = reinterpret_cast<Candidate*>(shared.low);
  Drawing<MadeKeys> drawing{};
  drawing.key = key;
  // NOTE: not heat's, which would be kept in registers while the filters need all.
  drawing.unit = score_unit<SampleMath>(heat.inv_temperature);
  drawing.scale = heat.inv_temperature * drawing.unit;
  drawing.shared_floor = &shared.floor;
  for (int sample = 0; sample < p.draws.num_samples; ++sample) {
    drawing.sample = sample;
    drawing.best = no_candidate();
    drawing.floor = minus_infinity();
    if (threadIdx.x == 0) shared.floor = 0;
    __syncthreads();
    part.for_each_four([&](int number, const float(&four)[4]) {
      const int column = part.begin + 4 * number;
      if (heat.greedy) {
#pragma unroll
        for (int k = 0; k < 4; ++k) offer(drawing.best, four[k], four[k], column + k);
        return;
      }
      float allowed[4];
      bool is_any = false;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const bool is = four[k] >= lowest;
        allowed[k] = is ? four[k] : minus_infinity();
        is_any |= is;
      }
      if (!warp_any(is_any)) return;
      drawing.take_floor();
      drawing.draw(allowed, p.draws.vocab_offset + column, column);
    });
    const Candidate best = block_best<kClusterThreads>(drawing.best, shared.best_of_warps);
    if (threadIdx.x == 0) candidates[sample] = best;
    __syncthreads();
  }

  cluster.sync();
  if (cluster.rank == 0) {
    RowState state{};
    state.greatest = any ? key_of<SampleMath>(greatest.all) : 0;
    state.raised = 1;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const bool is_block = lane < cluster.blocks;
    if (has_weights && wants_sums) {
      state.weights = warp_sum_of(is_block ? *cluster.at(&shared.weights, lane) : 0);
      state.allowed = warp_sum_of(is_block ? *cluster.at(&shared.allowed, lane) : 0);
    }
    for (int sample = warp; sample < p.draws.num_samples; sample += kWarps) {
      const Candidate best =
          warp_best(is_block ? cluster.at(candidates, lane)[sample] : no_candidate());
      if (lane == 0) write_draw(p.draws, p.results, row, sample, best, state);
    }
    // NOTE: an offset of all rows may be read by other clusters still.
    if (threadIdx.x == 0 && has_own_offset(p.draws)) ++p.draws.offsets[row * p.draws.offset_stride];
    if (threadIdx.x == 0 && p.strips.left != nullptr) {
      const uint32_t next =
          static_cast<uint32_t>(policy.clusters) + atomicAdd(p.strips.left + 1, 1u);
      for (int block = 0; block < cluster.blocks; ++block) *cluster.at(&shared.next, block) = next;
    }
  }
  cluster.sync();
}

// A cluster has a row, or takes, one after the other, of those that are left.
__global__ void __launch_bounds__(kClusterThreads, kClusterBlocks)
    cluster_kernel(const GumbelSample p, const ClusterPolicy policy) {
  extern __shared__ __align__(128) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  grid_dependency_wait();
  const uint32_t* left = p.strips.left;
  uint32_t number = blockIdx.x / policy.blocks;
#pragma unroll 1
  do {
    int64_t row = number;
    if (left != nullptr) {
      if (number >= left[0]) break;  // NOTE: mostly at once: this comes before all that takes time
      row = left[2 + number];
    }
    draw_row(p, shared, policy, row);
    number = shared.next;
  } while (left != nullptr);
  launch_dependents();
}

}  // namespace

// ---- launchers ----

namespace gpu {

gpuError cluster_sample(const GumbelSample& p, const ClusterPolicy& policy, gpuStream stream) {
  const int64_t clusters =
      p.strips.left == nullptr ? p.draws.batch : std::min(p.draws.batch, policy.clusters);
  const dim3 grid(static_cast<unsigned>(clusters * policy.blocks));
  const int bytes = kClusterFixedBytes + static_cast<int>(policy.part * sizeof(float));
  const gpuError error = gpu_launch_as(true, &cluster_kernel, grid, dim3(kClusterThreads), bytes,
                                       policy.blocks, stream, p, policy);
  if (error != gpuSuccess || !has_shared_offset(p.draws) || p.draws.is_advanced) return error;
  return advance_shared_offset(p.draws.offsets, stream);
}

}  // namespace gpu
}  // namespace fuselage
