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
  const float x = p.strips == nullptr     ? target_logit(p.in, row)
                  : has_target(p.in, row) ? p.target_logits[row]
                                          : not_a_number();
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

// NaN, infinity and a row of -inf have no weights.
__device__ __forceinline__ bool is_finite(float max) { return max - max == 0.0f; }

// A row, by the threads of its cluster. source_of(row, part): the strips of the block's part.
template <typename SourceOf>
__device__ __forceinline__ void find_log_prob(const LogProbsForward& p,
                                              const RowWeightsPolicy& policy, void* kept,
                                              SourceOf source_of) {
  __shared__ SharedWeights shared;
  const auto [rank, row] = weighed_row(policy);
  // NOTE: all threads of a cluster, or of a warp.
  if (row >= p.in.rows) return;
  const bool is_first = rank == 0 && threadIdx.x == 0;
  if (!is_counted(p.in, row)) {
    if (is_first) write_nothing(p, row);
    return;
  }
  const auto strips = source_of(row, part_of_row(policy, rank, p.in.vocab));
  const RowWeights weights =
      weigh_row(shared, strips, kept, policy, p.in.vocab, p.inv_temperature, is_finite);
  if (is_first) write_row(p, row, weights.max, weights.sums);
}

template <typename T, bool kAligned, bool kEntropy>
__global__ void __launch_bounds__(kWeightThreads, kWeightBlocks)
    log_probs_kernel(const LogProbsForward p, const RowWeightsPolicy policy) {
  extern __shared__ __align__(16) char kept[];
  find_log_prob(p, policy, kept, [&](int64_t row, const RowPart& part) {
    return LogitStrips<T, kAligned, kEntropy>{row_of<T>(p.in, row) + part.first, part.size,
                                              p.in.dtype, p.in.softcap,
                                              strip_scale(p.inv_temperature)};
  });
}

// Of rows of which a lane has one vector: several in a warp, whose shuffles take all of them.
template <typename T, bool kEntropy>
__global__ void __launch_bounds__(kNarrowThreads) narrow_kernel(const LogProbsForward p) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool is_read = is_counted(p.in, row);
  const LogitStrips<T, false, kEntropy, true> strips{
      row_of<T>(p.in, is_read ? row : 0), is_read ? static_cast<int>(p.in.vocab) : 0, p.in.dtype,
      p.in.softcap, strip_scale(p.inv_temperature)};
  const RowWeights weights = weigh_narrow_row(strips, p.in.vocab, p.inv_temperature, is_finite);
  if (threadIdx.x != 0 || row >= p.in.rows) return;
  if (is_read) {
    write_row(p, row, weights.max, weights.sums);
  } else {
    write_nothing(p, row);
  }
}

// Of strips that a head has left, and the logits of the targets.
__global__ void __launch_bounds__(kWeightThreads, kWeightBlocks)
    strips_kernel(const LogProbsForward p, const RowWeightsPolicy policy) {
  extern __shared__ __align__(16) char kept[];
  find_log_prob(p, policy, kept, [&](int64_t row, const RowPart& part) {
    return memory_strips(p.strips + row * p.in.stride, part);
  });
}

template <typename Kernel>
gpuError launch_rows(Kernel kernel, const LogProbsForward& p, int each, const DeviceInfo& device,
                     gpuStream stream) {
  const RowWeightsPolicy policy =
      row_weights_policy(device, p.in.rows, p.in.vocab, each, p.entropy != nullptr);
  const int64_t blocks = ceil_div(p.in.rows, policy.rows_per_block) * policy.cluster;
  if (blocks > kMaxLossBlocks) return gpuErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks));
  const dim3 block(policy.threads, policy.rows_per_block);
  return gpu_launch(kernel, grid, block, policy.shared_bytes, policy.cluster, stream, p, policy);
}

template <typename T>
gpuError launch(const LogProbsForward& p, const DeviceInfo& device, gpuStream stream) {
  const LossPolicy row = loss_policy(p.in.vocab, 16 / static_cast<int>(sizeof(T)));
  const auto launch_as = [&](auto entropy) {
    if (row.vectors == 1) {
      using Strips = LogitStrips<T, false, entropy, true>;
      const int lanes = std::max(row.threads, Strips::kLanes), rows = kNarrowThreads / lanes;
      const int64_t blocks = ceil_div(p.in.rows, rows);
      if (blocks > kMaxLossBlocks) return gpuErrorInvalidValue;
      return gpu_launch(&narrow_kernel<T, entropy>, dim3(static_cast<unsigned>(blocks)),
                        dim3(lanes, rows), 0, 1, stream, p);
    }
    const auto kernel = is_aligned(p.in) ? &log_probs_kernel<T, true, entropy>
                                         : &log_probs_kernel<T, false, entropy>;
    return launch_rows(kernel, p, LogitStrips<T, true, entropy>::kEach, device, stream);
  };
  return p.entropy != nullptr ? launch_as(std::true_type{}) : launch_as(std::false_type{});
}

}  // namespace

namespace gpu {

const char* log_probs_forward(const LogProbsForward& p, int device, void* stream) {
  const DeviceInfo info = device_info(device);
  const gpuStream on = static_cast<gpuStream>(stream);
  if (p.strips != nullptr)
    return message_of(launch_rows(&strips_kernel, p, MemoryStrips::kEach, info, on));
  return message_of(dispatch_size(
      p.in.dtype, [&](auto tag) { return launch<typename decltype(tag)::type>(p, info, on); }));
}

}  // namespace gpu
}  // namespace fuselage
