// log_probs on the GPU: formulas in loss/cross_entropy.h.
//
// A row's weights are added up as common/row_weights.h does it: the bits are those that a draw
// reports, whatever either kernel's layout is.

#include "common/row_weights.h"
#include "loss/cross_entropy_policy.h"
#include "loss/loss_device.h"

namespace fuselage {
namespace {

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
__global__ void __launch_bounds__(kWeightThreads, kWeightBlocks)
    log_probs_kernel(const LogProbsForward p, const RowWeightsPolicy policy) {
  extern __shared__ __align__(16) char kept[];
  __shared__ SharedWeights shared;
  const auto [rank, row] = weighed_row(policy);
  const bool is_first = rank == 0 && threadIdx.x == 0;
  // NOTE: all threads of a cluster, or of a warp.
  if (row >= p.in.rows) return;
  if (!is_counted(p.in, row)) {
    if (is_first) write_nothing(p, row);
    return;
  }
  using Part = RowPart<T, kAligned>;
  const Part part(row_of<T>(p.in, row), p.in.vocab, p.in.dtype, p.in.softcap, policy, rank, kept);

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
  const RowWeightsPolicy policy = row_weights_policy(
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
