// log_probs on the GPU: formulas in loss/cross_entropy.h.
//
// The maximum of a row comes first, then the sum of the weights beside it, as integers: their sum
// has no order, so the bits are those that a draw reports, whatever either kernel's layout is. The
// blocks of a cluster have a part of the row each, and keep it in shared memory between the two
// (loss/cross_entropy_policy.h). A thread reads back what it has written itself: the part takes no
// barrier.

#include "loss/cross_entropy_policy.h"
#include "loss/loss_device.h"

namespace fuselage {
namespace {

constexpr int kWarps = kLossThreads / kWarpSize;

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

template <typename T, bool kAligned>
struct RowPart {
  using Columns = LossColumns<T, kLossVectors>;
  using V = Vector<T, Columns::N>;
  static constexpr int N = Columns::N;
  Columns columns;
  const T* data;  // [size]
  int size;
  DType dtype;
  float softcap;
  V* shared;  // [kept, kLossVectors, threads]
  int kept;

  // body(values) of all vectors, -inf past the end. kFirst: they come from global memory, and what
  // there is room for is kept.
  template <bool kFirst, typename Body>
  __device__ __forceinline__ void for_each(Body body) const {
    const int threads = static_cast<int>(blockDim.x * blockDim.y);
    V* own = shared + threadIdx.y * blockDim.x + threadIdx.x;
    int column = columns.first, step = 0;
    for (int first = 0; first < size; first += columns.step, column += columns.step, ++step) {
      V vectors[kLossVectors];
      if (kFirst || step >= kept) {
        RowLoading<T, kLossVectors, kAligned> loading;
        loading.start(data + column, size - column);
#pragma unroll
        for (int j = 0; j < kLossVectors; ++j) {
          vectors[j] = loading.finish(j);
          if (kFirst && step < kept) vectors[j].store(own + (step * kLossVectors + j) * threads);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kLossVectors; ++j)
          vectors[j] = V::load_shared(own + (step * kLossVectors + j) * threads);
      }
#pragma unroll
      for (int j = 0; j < kLossVectors; ++j) {
        float values[N];
        unpack(vectors[j], dtype, values);
        finish_logits(values, size - column - j * kWarpSize * N, softcap, minus_infinity());
        body(values);
      }
    }
  }
};

// ---- reductions over the threads of a row ----

struct Shared {
  float of_warps[kWarps];
  unsigned long long weights_of_warps[kWarps];
  float products_of_warps[kWarps];
  // This block's, read by the others.
  float max;
  unsigned long long weights;
  float products;
};
static_assert(sizeof(Shared) <= kLogProbsFixedBytes, "the policy reserves as much");

__device__ __forceinline__ float warp_max_or_nan(float value) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2)
    value = max_or_nan(value, shuffle_xor(value, mask, kWarpSize));
  return value;
}

// The row's maximum, in every thread of the cluster. NaN where there is one.
__device__ __forceinline__ float share_max(Shared& shared, int cluster, float max) {
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
__device__ __forceinline__ WeightSums share_sums(Shared& shared, int cluster, WeightSums sums) {
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

// ---- the kernel ----

__device__ __forceinline__ void write_row(const LogProbsForward& p, int64_t row, float max,
                                          const WeightSums& sums) {
  const bool is_valid = sums.weights != 0;
  const float log_sum =
      is_valid ? log_of_weights<GpuFloats>(sums.weights, weight_shift(p.in.vocab)) : not_a_number();
  const float x = target_logit(p.in, row);
  const float distance = distance_of(x, max, p.inv_temperature);
  p.log_probs[row] = distance - log_sum;
  p.log_sum_exp[row] =
      is_valid ? tempered<GpuFloats>(max, p.inv_temperature, log_sum) : not_a_number();
  p.is_greatest[row] = is_valid && x == max;
  // Of an invalid row or target, NaN.
  const float mean = sums.products / static_cast<float>(sums.weights);
  if (p.entropy != nullptr) p.entropy[row] = x == x ? log_sum - mean : not_a_number();
  if (p.statistics != nullptr) p.statistics[row] = {max, log_sum};
}

__device__ __forceinline__ void write_nothing(const LogProbsForward& p, int64_t row) {
  p.log_probs[row] = p.log_sum_exp[row] = 0.0f;
  p.is_greatest[row] = false;
  if (p.entropy != nullptr) p.entropy[row] = 0.0f;
  if (p.statistics != nullptr) p.statistics[row] = {0.0f, 0.0f};
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kLossThreads, kLogProbsBlocks)
    log_probs_kernel(const LogProbsForward p, const LogProbsPolicy policy) {
  extern __shared__ __align__(16) char kept[];
  __shared__ Shared shared;
  const int rank = policy.cluster == 1 ? 0 : cluster_rank();
  const int64_t row =
      int64_t{blockIdx.x / static_cast<unsigned>(policy.cluster)} * policy.rows_per_block +
      threadIdx.y;
  const bool is_first = rank == 0 && threadIdx.x == 0;
  // NOTE: all threads of a cluster, or of a warp.
  if (row >= p.in.rows) return;
  if (!is_counted(p.in, row)) {
    if (is_first) write_nothing(p, row);
    return;
  }
  using Part = RowPart<T, kAligned>;
  Part part;
  part.data = row_of<T>(p.in, row) + int64_t{rank} * policy.part;
  const int64_t left = p.in.vocab - int64_t{rank} * policy.part;
  part.size = static_cast<int>(left < 0 ? 0 : left < policy.part ? left : policy.part);
  part.dtype = p.in.dtype;
  part.softcap = p.in.softcap;
  part.shared = reinterpret_cast<typename Part::V*>(kept);
  part.kept = policy.kept;

  float max = minus_infinity();
  part.template for_each<true>([&](const float(&values)[Part::N]) {
#pragma unroll
    for (int k = 0; k < Part::N; ++k) max = max_or_nan(max, values[k]);
  });
  max = share_max(shared, policy.cluster, max);

  // NaN, infinity and a row of -inf have no weights.
  WeightSums sums{0, 0.0f};
  const int shift = weight_shift(p.in.vocab);
  if (max - max == 0.0f) {
    part.template for_each<false>([&](const float(&values)[Part::N]) {
#pragma unroll
      for (int k = 0; k < Part::N; ++k) {
        const float distance = rounded_product(values[k] - max, p.inv_temperature);
        const unsigned long long weight = weight_at(distance, shift);
        sums.weights += weight;
        if (p.entropy != nullptr && weight != 0)
          sums.products += static_cast<float>(weight) * distance;
      }
    });
  }
  sums = share_sums(shared, policy.cluster, sums);
  if (is_first) write_row(p, row, max, sums);
}

template <typename T>
gpuError launch(const LogProbsForward& p, const DeviceInfo& device, gpuStream stream) {
  const LogProbsPolicy policy = log_probs_policy(
      device, p.in.rows, p.in.vocab, 16 / static_cast<int>(sizeof(T)), p.entropy == nullptr);
  const int64_t blocks = ceil_div(p.in.rows, policy.rows_per_block) * policy.cluster;
  if (blocks > kMaxLossBlocks) return gpuErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks));
  const dim3 block(policy.threads, policy.rows_per_block);
  const auto kernel = is_aligned(p.in) ? &log_probs_kernel<T, true> : &log_probs_kernel<T, false>;
  return gpu_launch(kernel, grid, block, policy.shared_bytes, policy.cluster, stream, p, policy);
}

}  // namespace

namespace gpu {

const char* log_probs_forward(const LogProbsForward& p, int device, void* stream) {
  const DeviceInfo info = device_info(device);
  return message_of(dispatch_size(p.in.dtype, [&](auto tag) {
    return launch<typename decltype(tag)::type>(p, info, static_cast<gpuStream>(stream));
  }));
}

}  // namespace gpu
}  // namespace fuselage
