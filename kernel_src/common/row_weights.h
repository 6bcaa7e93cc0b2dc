// The sum of the weights of a row of logits beside its maximum (common/softmax_math.h). The maximum
// comes first, and then the sum, as integers, which has no order. The blocks of a cluster have a
// part of the row each, and keep it in shared memory between the two (common/row_weights_policy.h).
// A thread reads back what it has written itself: the part takes no barrier.
#pragma once

#include "common/dispatch_size.h"
#include "common/logits_device.h"
#include "common/ptx.h"
#include "common/reduce.h"
#include "common/row_weights_policy.h"
#include "common/runtime_dtype.h"

namespace fuselage {
namespace {

// ---- weights ----

// weight_of (common/softmax_math.h), in fewer instructions on GPUs that convert a float to 64 bits
// fast, as Hopper does. The same bits: the weight in its unit is a normal float before it is
// rounded, so that one sum, rounded down, and the conversion round as weight_of's shift does.
__device__ __forceinline__ unsigned long long weight_at(float distance, int shift) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const float v = fmaxf(distance, -30.0f);  // weights of zero; so has NaN
  // 1.5 * 2^23 as in split_exp, and the exponent of the unit: the low bits are the sum's.
  const float magic = static_cast<float>(12582912 + kWeightBits - shift);
  const float biased = GpuFloats::fma(v, kLog2E, magic);
  const float factor = exp_factor<GpuFloats>(v, biased - magic);
  const float weight = __uint_as_float(__float_as_uint(factor) + (__float_as_uint(biased) << 23));
  return __float2ull_rz(__fadd_rd(weight, 0.5f));
#else
  return weight_of<GpuFloats>(distance, shift);
#endif
}

// ---- a part of a row ----

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

template <typename T, bool kAligned>
struct RowPart {
  using Columns = LogitColumns<T, kWeightVectors>;
  using V = Vector<T, Columns::N>;
  static constexpr int N = Columns::N;
  Columns columns;
  const T* data;  // [size]
  int size;
  DType dtype;
  float softcap;
  V* shared;  // [kept, kWeightVectors, threads]
  int kept;

  // That of block `rank` of the row's.
  __device__ __forceinline__ RowPart(const T* row, int64_t vocab, DType type, float cap,
                                     const RowWeightsPolicy& policy, int rank, void* memory)
      : data(row + int64_t{rank} * policy.part),
        dtype(type),
        softcap(cap),
        shared(static_cast<V*>(memory)),
        kept(policy.kept) {
    const int64_t left = vocab - int64_t{rank} * policy.part;
    size = static_cast<int>(left < 0 ? 0 : left < policy.part ? left : policy.part);
  }

  // body(values) of all vectors, -inf past the end. kFirst: they come from global memory, and what
  // there is room for is kept.
  template <bool kFirst, typename Body>
  __device__ __forceinline__ void for_each(Body body) const {
    const int threads = static_cast<int>(blockDim.x * blockDim.y);
    V* own = shared + threadIdx.y * blockDim.x + threadIdx.x;
    int column = columns.first, step = 0;
    for (int first = 0; first < size; first += columns.step, column += columns.step, ++step) {
      V vectors[kWeightVectors];
      if (kFirst || step >= kept) {
        RowLoading<T, kWeightVectors, kAligned> loading;
        loading.start(data + column, size - column);
#pragma unroll
        for (int j = 0; j < kWeightVectors; ++j) {
          vectors[j] = loading.finish(j);
          if (kFirst && step < kept) vectors[j].store(own + (step * kWeightVectors + j) * threads);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kWeightVectors; ++j)
          vectors[j] = V::load_shared(own + (step * kWeightVectors + j) * threads);
      }
#pragma unroll
      for (int j = 0; j < kWeightVectors; ++j) {
        float values[N];
        unpack(vectors[j], dtype, values);
        finish_logits(values, size - column - j * kWarpSize * N, softcap, minus_infinity());
        body(values);
      }
    }
  }
};

// ---- reductions over the threads of a row ----

struct SharedWeights {
  static constexpr int kWarps = kWeightThreads / kWarpSize;
  float of_warps[kWarps];
  unsigned long long weights_of_warps[kWarps];
  float products_of_warps[kWarps];
  // This block's, read by the others.
  float max;
  unsigned long long weights;
  float products;
};
static_assert(sizeof(SharedWeights) <= kWeightFixedBytes, "the policy reserves as much");

__device__ __forceinline__ float warp_max_or_nan(float value) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2)
    value = max_or_nan(value, shuffle_xor(value, mask, kWarpSize));
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

__device__ __forceinline__ WeightSums warp_sums(WeightSums sums) {
  return {warp_sum_of(sums.weights), warp_sum(sums.products, kWarpSize)};
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
    if (lane == 0) {
      shared.weights = sums.weights;
      shared.products = sums.products;
    }
  }
  if (cluster == 1) return sums;
  cluster_sync();
  if (threadIdx.x < kWarpSize && cluster_rank() == 0) {
    sums = {};
    if (lane < cluster) {
      sums = {*map_shared_rank(&shared.weights, lane), *map_shared_rank(&shared.products, lane)};
    }
    sums = warp_sums(sums);
  }
  cluster_sync();  // NOTE: a block whose memory is read must not end.
  return sums;
}

}  // namespace
}  // namespace fuselage
