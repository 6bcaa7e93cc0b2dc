// The filters of sample/sample_cluster.cu:
//   top_k    The top_k largest maxima of warps, or of threads, are as many logits. So their minimum
//            is a pivot: logits below it are not looked at. The others are listed, if they are few.
//   top_p    Weights are added up in bins of the distance from the row's maximum. The logits of the
//            bin in which the bound lies are listed.
//   min_p    The bound follows from the maximum.
// Blocks read each other's lists and go on alone, each with the same result: the keys of a list are
// added up in bins of ever smaller ranges, until a range is one key. For a bin with too many logits
// for a list, all blocks do that together.
#pragma once

#include "sample/sample_cluster_bins.h"

namespace fuselage {
namespace {

// As key_at_distance, by a search of 32 keys at a time. All lanes call it.
__device__ __forceinline__ uint32_t warp_key_at_distance(const Scale& scale, float lowest) {
  uint32_t low = kKeyOfMinusInfinity, high = key_of<SampleMath>(scale.max_logit);
  while (low < high) {
    const uint32_t step = (high - low) / kWarpSize + 1;
    const uint32_t offset = step * (threadIdx.x % kWarpSize);
    const uint32_t key = offset < high - low ? low + offset : high;
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

// The filters of a row. Logits with keys from `bound` on may be drawn.
struct Filtering {
  const GumbelSample& p;
  Shared& shared;
  const Cluster& cluster;
  const Part& part;
  Scale scale;
  uint32_t max_key, bound;
  bool complete;  // the list has all logits that may be drawn
  uint32_t listed;

  // The key among those of the list that are in [low, high], if they are few enough for the lanes
  // of a warp.
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
    unsigned long long above = 0, upto = 0;  // sums of the larger ones, and with the equal ones
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
    if (listed <= kWarpSize && key_of_few(low, max_key, wanted, amount, key)) return key;
    // The range of the keys: the smaller it is, the finer the first bins are.
    if (threadIdx.x == 0) {
      shared.min_key = max_key;
      shared.max_key = low;
    }
    __syncthreads();
    uint32_t lowest = max_key, highest = low;
    for (uint32_t i = threadIdx.x; i < listed; i += kClusterThreads) {
      const uint32_t own = shared.list[i];
      if (own < low) continue;
      lowest = own < lowest ? own : lowest;
      highest = own > highest ? own : highest;
    }
    lowest = lowest_of_warp(lowest);
    highest = highest_of_warp(highest);
    if (threadIdx.x % kWarpSize == 0) {
      atomicMin(&shared.min_key, lowest);
      atomicMax(&shared.max_key, highest);
    }
    __syncthreads();
    return find_key(shared, OneBlock{}, shared.min_key, shared.max_key, wanted,
                    fill_of_list(amount),
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
  // Fills bins with those of the row's logits that are in one bin of distances.
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

  // The key in the bin that was found, by way of a list where that has room.
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
    return find_key(shared, cluster, bound, max_key, found.amount, fill_of_row(found.bin, amount),
                    [](uint32_t, uint32_t, unsigned long long, uint32_t&) { return false; });
  }

  __device__ __forceinline__ void top_k(int64_t k, const Maxima& maxima) {
    if (k < 1 || k > p.draws.vocab) return;
    const unsigned long long wanted = static_cast<unsigned long long>(k);
    const auto one = [](uint32_t) { return 1u; };
    const bool of_warps = k <= kWarps * cluster.blocks && maxima.min_of_warps > minus_infinity();
    const bool of_threads =
        k <= kClusterThreads * cluster.blocks && maxima.min_of_threads > minus_infinity();
    const float pivot = of_warps     ? maxima.min_of_warps
                        : of_threads ? maxima.min_of_threads
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
    // Logits so far from the maximum that all of them together weigh less than what top_p removes
    // need no bins: their weights only count in the sum.
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
        const bool is = four[k] >= lowest && distance > kZeroWeightDistance;
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
    const uint32_t key = warp_key_at_distance(scale, min_p_distance_of(share));
    if (key > bound) bound = key;
  }
};

}  // namespace
}  // namespace fuselage
