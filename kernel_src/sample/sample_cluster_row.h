// A row in the shared memory of a cluster: see sample/sample_cluster.cu.
#pragma once

#include "common/ptx.h"
#include "sample/sample_draw.h"
#include "sample/sample_filter.h"

namespace fuselage {
namespace {

constexpr int kWarps = kClusterThreads / kWarpSize;

// The maximum of a block's logits, and the minimum of the maxima of its warps, and of its threads.
struct Maxima {
  float all, min_of_warps, min_of_threads;
};

// The bin in which the sum from the first bin on reaches an amount.
struct Found {
  unsigned long long amount;  // that is missing before the bin
  unsigned long long sum;     // of the bin
  int bin;
  unsigned long long all;  // of all bins
};

struct Shared {
  uint32_t low[kDistanceBins],
      high[kDistanceBins];        // halves of the bins; after the filters, candidates
  uint32_t list[kClusterListed];  // keys
  Maxima of_warps[kWarps];
  unsigned long long warp_sums[2][kWarps];
  Candidate best_of_warps[kWarps];
  Found found;
  uint32_t listed, min_key, max_key, threshold, few, few_keys[kWarpSize];
  uint32_t next;  // number of the next fallback row
  // This block's, read by the others.
  Maxima maxima;
  unsigned long long segment, sum, weights, allowed;
};
static_assert(kMaxCluster * 232448 / sizeof(float) < (1 << kWeightCountBits),
              "weights are not shifted: a row that fits has fewer logits");
static_assert(sizeof(Shared) <= kClusterFixedBytes, "the policy reserves as much");
static_assert(kMaxSamples * sizeof(Candidate) <= 2 * kDistanceBins * sizeof(uint32_t),
              "candidates are in the memory of the bins");

// The blocks that add up bins together: one, or all of a cluster.
struct OneBlock {
  static constexpr int kMaxBlocks = 1, blocks = 1, rank = 0;
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  template <typename V>
  __device__ __forceinline__ V* at(V* own, int) const {
    return own;
  }
};
struct Cluster {
  static constexpr int kMaxBlocks = kMaxCluster;
  int blocks, rank;
  __device__ __forceinline__ void sync() const { cluster_sync(); }
  template <typename V>
  __device__ __forceinline__ V* at(V* own, int of) const {
    return map_shared_rank(own, of);
  }
};

// ---- the row ----

// A block's part of the row: `size` logits from column `begin` on; -inf where they may not be
// drawn.
struct Part {
  float* logits;
  int begin, size;

  // body(number, four) of all vectors of four logits; -inf past the end. All threads of a warp call
  // it equally often.
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

// Loads the part of the row, and returns the maximum of this thread's logits.
template <typename T>
__device__ __forceinline__ float load_part(const GumbelSample& p, int64_t row, const Part& part) {
  const RowStrips strips(p.strips, row);
  constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  constexpr int kAtOnce = 4;
  const T* data = row_of<T>(p, row) + part.begin;
  float max_logit = minus_infinity();
  if (p.bias == nullptr && p.bitmask == nullptr && Vector<T, kWidth>::shift_of(data) == 0) {
    for (int first = 0; first < part.size; first += kAtOnce * kWidth * kClusterThreads) {
      Vector<T, kWidth> vectors[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = first + (j * kClusterThreads + static_cast<int>(threadIdx.x)) * kWidth;
        // NOTE: always set, or the registers live from row to row.
        vectors[j] =
            at + kWidth <= part.size ? Vector<T, kWidth>::load(data + at) : Vector<T, kWidth>{};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = first + (j * kClusterThreads + static_cast<int>(threadIdx.x)) * kWidth;
        if (at >= part.size) continue;
        float values[kWidth];
        if (strips.is_absent(part.begin + at)) {
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
          values[k] = fmaxf(values[k], minus_infinity());  // NaN becomes -inf
          max_logit = fmaxf(values[k], max_logit);
        }
#pragma unroll
        for (int k = 0; k < kWidth; k += 4) {
          *reinterpret_cast<float4*>(part.logits + at + k) =
              make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
        }
      }
    }
    return max_logit;
  }
  for_each_vector<T, kSampleVector>(
      p, row, part.begin, part.begin + part.size, [&](int column, const auto& logits) {
        const int at = column - part.begin;
        if (at >= part.size) return;
#pragma unroll
        for (int k = 0; k < kSampleVector; ++k) max_logit = fmaxf(logits[k], max_logit);
#pragma unroll
        for (int k = 0; k < kSampleVector; k += 4) {
          *reinterpret_cast<float4*>(part.logits + at + k) =
              make_float4(logits[k], logits[k + 1], logits[k + 2], logits[k + 3]);
        }
      });
  return max_logit;
}

__device__ __forceinline__ float warp_min(float value) { return -warp_max(-value); }

__device__ __forceinline__ Maxima warp_join(const Maxima& of_lane) {
  return {warp_max(of_lane.all), warp_min(of_lane.min_of_warps), warp_min(of_lane.min_of_threads)};
}

// The maxima of the whole row, in all threads of the cluster.
__device__ __forceinline__ Maxima share_maxima(Shared& shared, const Cluster& cluster,
                                               float of_thread) {
  const int lane = threadIdx.x % kWarpSize;
  const float of_warp = warp_max(of_thread), min_of_threads = warp_min(of_thread);
  if (lane == 0) shared.of_warps[threadIdx.x / kWarpSize] = {of_warp, of_warp, min_of_threads};
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    const Maxima own = warp_join(shared.of_warps[lane % kWarps]);
    if (lane == 0) shared.maxima = own;
  }
  cluster.sync();
  return warp_join(*cluster.at(&shared.maxima, lane % cluster.blocks));
}

}  // namespace
}  // namespace fuselage
