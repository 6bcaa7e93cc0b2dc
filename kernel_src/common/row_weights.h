// The sum of the weights of a row of logits (common/softmax_math.h): those of strips beside their
// own maxima first, in one pass, and then those of the strips beside the row's. All are integers,
// whose sum has no order. Strips are made of logits, or are in memory where a head has left them.
//
// The blocks of a cluster have a part of the row each (common/row_weights_policy.h). A thread reads
// back what it has kept itself: the part takes no barrier.
#pragma once

#include "common/dispatch_size.h"
#include "common/logits_device.h"
#include "common/ptx.h"
#include "common/reduce.h"
#include "common/row_weights_policy.h"
#include "common/runtime_dtype.h"
#include "common/strip_device.h"

namespace fuselage {
namespace {

// ---- strips ----

struct RowStrip {
  float max;
  uint32_t weights;  // the sum
  float mean;        // of the distances from `max`, by weight, where that is wanted
};

// A row's or a block's part of one: `size` logits from `data` on, -inf past the end. A thread has
// kVectors vectors at a time, which together with those of its neighbours are as many strips: one
// becomes the thread's. Of narrow rows it has one vector, and the lanes of a strip all get that.
// NOTE: rows with an infinity are not weighed.
template <typename T, bool kAligned, bool kWantsMean, bool kNarrow = false>
struct LogitStrips {
  static constexpr int kLanes = kStrip * static_cast<int>(sizeof(T)) / 16;  // of a strip
  static constexpr int kEach = 1, kVectors = kNarrow ? 1 : kLanes;
  static constexpr bool kHasMean = kWantsMean;
  using Columns = LogitColumns<T, kVectors>;
  static constexpr int N = Columns::N;
  const T* data;
  int size;
  DType dtype;
  float softcap, scale;  // strip_scale

  __device__ __forceinline__ int steps() const {
    const int step = static_cast<int>(blockDim.x) * kStrip;
    return (size + step - 1) / step;
  }
  using Loading = RowLoading<T, kVectors, kAligned>;
  // Past the last step, of nothing.
  __device__ __forceinline__ void start(int step, Loading& loading) const {
    const Columns columns;
    const int column = columns.first + step * columns.step;
    loading.start(data + column, size - column);
  }
  __device__ __forceinline__ void finish(int step, const Loading& loading,
                                         RowStrip (&strips)[kEach]) const {
    const Columns columns;
    const int left = size - columns.first - step * columns.step;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float values[N];
      unpack(loading.finish(j), dtype, values);
      finish_logits(values, left - j * kWarpSize * N, softcap, minus_infinity());
      const RowStrip strip = strip_of(values);
      if (threadIdx.x % kVectors == j) strips[0] = strip;
    }
  }
  // That of the vectors of kLanes neighbouring lanes, in all of them.
  __device__ __forceinline__ RowStrip strip_of(const float (&values)[N]) const {
    RowStrip strip{values[0], 0, 0.0f};
#pragma unroll
    for (int k = 1; k < N; ++k) strip.max = max_or_nan(strip.max, values[k]);
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2)
      strip.max = max_or_nan(strip.max, shuffle_xor(strip.max, mask, kWarpSize));
    constexpr float kUnits = 0.69314718f * (1 << kStripBits);  // and natural logarithms
    float products = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const StripWeight<kWantsMean> weight(values[k], strip.max, scale);
      strip.weights += weight.units();
      if (kWantsMean) products = __builtin_fmaf(weight.value, weight.power, products);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2)
      strip.weights += shuffle_xor(strip.weights, mask, kWarpSize);
    if (kWantsMean)
      strip.mean = kUnits * warp_sum(products, kLanes) / static_cast<float>(strip.weights);
    return strip;
  }
};

// The same of strips in memory, aligned, of whole pairs.
struct MemoryStrips {
  static constexpr int kEach = kStripsInFlight;
  static constexpr bool kHasMean = false;
  const StripSum* data;
  int size;  // strips

  __device__ __forceinline__ int steps() const {
    const int step = static_cast<int>(blockDim.x) * kEach;
    return (size + step - 1) / step;
  }
  struct Loading {
    uint4 pairs[kEach / 2];
  };
  __device__ __forceinline__ void start(int step, Loading& loading) const {
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      loading.pairs[i / 2] = {};
      const int at = index(step, i);
      if (at < size) loading.pairs[i / 2] = *reinterpret_cast<const uint4*>(data + at);
    }
  }
  __device__ __forceinline__ void finish(int step, const Loading& loading,
                                         RowStrip (&strips)[kEach]) const {
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const int at = index(step, i);
      const uint4& two = loading.pairs[i / 2];
      strips[i] = {at < size ? __uint_as_float(two.x) : minus_infinity(), two.y, 0.0f};
      strips[i + 1] = {at + 1 < size ? __uint_as_float(two.z) : minus_infinity(), two.w, 0.0f};
    }
  }
  __device__ __forceinline__ int index(int step, int i) const {
    return (step * kEach + i) * static_cast<int>(blockDim.x) + 2 * static_cast<int>(threadIdx.x);
  }
};

// ---- a row's part ----

// Which of the cluster's blocks a block is, and the row that it has a part of.
struct WeighedRow {
  int rank;
  int64_t row;
};

__device__ __forceinline__ WeighedRow weighed_row(const RowWeightsPolicy& policy) {
  const int rank = policy.cluster == 1 ? 0 : cluster_rank();
  const int64_t cluster = blockIdx.x / static_cast<unsigned>(policy.cluster);
  return {rank, cluster * policy.rows_per_block + threadIdx.y};
}

struct RowPart {
  int first, size;  // of logits
};

// The part of the cluster's block `rank`.
__device__ __forceinline__ RowPart part_of_row(const RowWeightsPolicy& policy, int rank,
                                               int64_t vocab) {
  const int64_t left = vocab - int64_t{rank} * policy.part;
  return {rank * policy.part, static_cast<int>(left < 0             ? 0
                                               : left < policy.part ? left
                                                                    : policy.part)};
}

// Those of a row's part, of the row's strips.
__device__ __forceinline__ MemoryStrips memory_strips(const StripSum* row, const RowPart& part) {
  return {row + part.first / kStrip, (part.size + kStrip - 1) / kStrip};
}

// Strips that are kept between the two times that they are looked at.
template <typename Source>
struct KeptStrips {
  static constexpr int kEach = Source::kEach;
  Source source;
  StripSum* memory;  // [kept * kEach, threads], and then the means
  int kept;          // steps

  // body(strip) of all strips. kFirst: they come from the source, and what there is room for is
  // kept.
  template <bool kFirst, typename Body>
  __device__ __forceinline__ void for_each(Body body) const {
    const int threads = static_cast<int>(blockDim.x * blockDim.y);
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    StripSum* own = memory + thread;
    float* own_mean = reinterpret_cast<float*>(memory + kept * kEach * threads) + thread;
    const int steps = source.steps();
    typename Source::Loading next;
    if (kFirst) source.start(0, next);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, own += kEach * threads, own_mean += kEach * threads) {
      RowStrip strips[kEach];
      const bool is_kept = step < kept;
      if (kFirst || !is_kept) {
        if (!kFirst) source.start(step, next);
        const typename Source::Loading loading = next;
        if (kFirst) source.start(step + 1, next);  // while this one is weighed
        source.finish(step, loading, strips);
#pragma unroll
        for (int i = 0; i < kEach && kFirst; ++i) {
          if (!is_kept) break;
          own[i * threads] = {strips[i].max, strips[i].weights};
          if (Source::kHasMean) own_mean[i * threads] = strips[i].mean;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          strips[i] = {own[i * threads].max, own[i * threads].weights,
                       Source::kHasMean ? own_mean[i * threads] : 0.0f};
        }
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) body(strips[i]);
    }
  }
};

// ---- reductions over the threads of a row ----

struct SharedWeights {
  static constexpr int kWarps = kWeightThreads / kWarpSize;
  float of_warps[kWarps];
  unsigned long long weights_of_warps[kWarps];
  float products_of_warps[kWarps];
  float max;  // this block's, read by the others
  // In the first block, those of all, which write them.
  unsigned long long weights_of_blocks[kMaxCluster];
  float products_of_blocks[kMaxCluster];
};
static_assert(sizeof(SharedWeights) <= kWeightFixedBytes, "the policy reserves as much");

// These two are over `width` neighbouring lanes, in every one of them.
__device__ __forceinline__ float warp_max_or_nan(float value, int width = kWarpSize) {
#pragma unroll
  for (int mask = width / 2; mask > 0; mask /= 2)
    value = max_or_nan(value, shuffle_xor(value, mask, width));
  return value;
}

// The row's maximum, in every thread of the cluster. NaN where there is one.
__device__ __forceinline__ float share_max(SharedWeights& shared, int cluster, float max) {
  max = warp_max_or_nan(max);
  if (blockDim.x == kWarpSize) return max;
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  if (lane == 0) shared.of_warps[threadIdx.x / kWarpSize] = max;
  __syncthreads();
  max = warp_max_or_nan(shared.of_warps[lane % warps]);
  if (cluster == 1) return max;
  if (threadIdx.x == 0) shared.max = max;
  cluster_sync();
  return warp_max_or_nan(*map_shared_rank(&shared.max, lane % cluster));
}

// Of a row: the sum of the weights, and that of weight * distance, of which the order is the
// layout's.
struct WeightSums {
  unsigned long long weights;
  float products;
};

__device__ __forceinline__ WeightSums warp_sums(WeightSums sums, int width = kWarpSize) {
  return {warp_sum_of(sums.weights, width), warp_sum(sums.products, width)};
}

// In the first warp of the cluster.
__device__ __forceinline__ WeightSums share_sums(SharedWeights& shared, int cluster,
                                                 WeightSums sums) {
  sums = warp_sums(sums);
  if (blockDim.x == kWarpSize) return sums;
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  if (lane == 0) {
    shared.weights_of_warps[threadIdx.x / kWarpSize] = sums.weights;
    shared.products_of_warps[threadIdx.x / kWarpSize] = sums.products;
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    sums = {};
    if (lane < warps) sums = {shared.weights_of_warps[lane], shared.products_of_warps[lane]};
    sums = warp_sums(sums);
  }
  if (cluster == 1) return sums;
  // NOTE: all blocks have started, as they share their maximum first.
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    *map_shared_rank(&shared.weights_of_blocks[rank], 0) = sums.weights;
    *map_shared_rank(&shared.products_of_blocks[rank], 0) = sums.products;
  }
  cluster_sync();
  if (threadIdx.x < kWarpSize && rank == 0) {
    sums = {};
    if (lane < cluster) sums = {shared.weights_of_blocks[lane], shared.products_of_blocks[lane]};
    sums = warp_sums(sums);
  }
  return sums;
}

// ---- a row ----

struct RowWeights {
  float max;  // in every thread of the cluster; NaN where there is one
  WeightSums sums;

  // Of a strip, once the maximum is known.
  template <bool kHasMean>
  __device__ __forceinline__ void add(const RowStrip& strip, float inv_temperature, int shift) {
    const float distance = distance_of(strip.max, max, inv_temperature);
    const unsigned long long weight = weight_of_strip<GpuFloats>(strip.weights, distance, shift);
    sums.weights += weight;
    if (kHasMean && weight != 0)
      sums.products += static_cast<float>(weight) * (distance + strip.mean);
  }
};

// Of a row, by all threads of its cluster. `is_weighed`: whether a row of such a maximum has
// weights.
template <typename Source, typename IsWeighed>
__device__ __forceinline__ RowWeights weigh_row(SharedWeights& shared, const Source& source,
                                                void* memory, const RowWeightsPolicy& policy,
                                                int64_t vocab, float inv_temperature,
                                                IsWeighed is_weighed) {
  const KeptStrips<Source> strips{source, static_cast<StripSum*>(memory), policy.kept};
  RowWeights row{minus_infinity(), {0, 0.0f}};
  strips.template for_each<true>(
      [&](const RowStrip& strip) { row.max = max_or_nan(row.max, strip.max); });
  row.max = share_max(shared, policy.cluster, row.max);
  if (is_weighed(row.max)) {
    const int shift = weight_shift(vocab);
    strips.template for_each<false>([&](const RowStrip& strip) {
      row.template add<Source::kHasMean>(strip, inv_temperature, shift);
    });
  }
  row.sums = share_sums(shared, policy.cluster, row.sums);
  return row;
}

// Of a narrow row, by the lanes that have it, in all of them.
template <typename Source, typename IsWeighed>
__device__ __forceinline__ RowWeights weigh_narrow_row(const Source& source, int64_t vocab,
                                                       float inv_temperature,
                                                       IsWeighed is_weighed) {
  const int lanes = lanes_of_row<1>();
  typename Source::Loading loading;
  RowStrip strips[1];
  source.start(0, loading);
  source.finish(0, loading, strips);
  RowWeights row{warp_max_or_nan(strips[0].max, lanes), {0, 0.0f}};
  if (is_weighed(row.max) && threadIdx.x % Source::kLanes == 0)
    row.template add<Source::kHasMean>(strips[0], inv_temperature, weight_shift(vocab));
  row.sums = warp_sums(row.sums, lanes);
  return row;
}

}  // namespace
}  // namespace fuselage
