// The log-probabilities of tokens that sample/lm_head_sm90.cu has drawn, of the logits that it has
// written besides: the sums of common/row_weights.h. It takes less time than to draw from logits in
// memory, as sample/sample_cluster.cu does.
#include "common/row_weights.h"
#include "sample/lm_head_sm90.h"
#include "sample/sample_device.h"

namespace fuselage {
namespace {

struct DrawSums {
  Draws draws;
  DrawResults results;
  const float* logits;  // [batch, vocab], rows in whole vectors
  int64_t stride;
};

__device__ __forceinline__ void write_samples(const DrawSums& p, int64_t row, float max,
                                              unsigned long long weights) {
  RowState state{};
  state.weights = weights;
  state.max_key = max > minus_infinity() ? key_of<SampleMath>(max) : 0;
  for (int sample = threadIdx.x; sample < p.draws.num_samples; sample += kWarpSize) {
    const int64_t token = p.results.tokens[row * p.draws.num_samples + sample];
    Candidate drawn = no_candidate();
    if (token >= 0) {
      drawn.index = static_cast<int>(token - p.draws.vocab_offset);
      drawn.logit = p.logits[row * p.stride + drawn.index];
    }
    write_draw(p.draws, p.results, row, sample, drawn, state);
  }
}

__global__ void __launch_bounds__(kWeightThreads, kWeightBlocks)
    sums_kernel(const DrawSums p, const RowWeightsPolicy policy) {
  extern __shared__ __align__(16) char kept[];
  __shared__ SharedWeights shared;
  const auto [rank, row] = weighed_row(policy);
  // NOTE: all threads of a cluster, or of a warp.
  if (row >= p.draws.batch) return;
  using Part = RowPart<float, true>;
  const Part part(p.logits + row * p.stride, p.draws.vocab, DType::float32, 0.0f, policy, rank,
                  kept);
  float max = minus_infinity();
  part.for_each<true>([&](const float(&values)[Part::N]) {
#pragma unroll
    for (int k = 0; k < Part::N; ++k) max = fmaxf(max, values[k]);  // but NaN
  });
  max = share_max(shared, policy.cluster, max);

  const RowTemperature temperature = row_temperature(p.draws, row);
  WeightSums sums{0, 0.0f};
  if (max > minus_infinity() && !temperature.greedy) {
    const int shift = weight_shift(p.draws.vocab);
    part.for_each<false>([&](const float(&values)[Part::N]) {
#pragma unroll
      for (int k = 0; k < Part::N; ++k)
        sums.weights += weight_at(distance_of(values[k], max, temperature.inv_temperature), shift);
    });
  }
  sums = share_sums(shared, policy.cluster, sums);
  if (rank == 0 && threadIdx.x < kWarpSize) write_samples(p, row, max, sums.weights);
}

}  // namespace

namespace gpu {

const char* lm_head_sums_sm90(const LmHeadSample& p, int device, void* stream) {
  DrawSums sums{p.draws, p.results, p.logits, p.logits_stride};
  sums.results.scores = nullptr;  // they are there
  const RowWeightsPolicy policy =
      row_weights_policy(device_info(device), p.draws.batch, p.draws.vocab, 4, true);
  const dim3 grid(
      static_cast<unsigned>(ceil_div(p.draws.batch, policy.rows_per_block) * policy.cluster));
  const dim3 block(policy.threads, policy.rows_per_block);
  return message_of(gpu_launch(&sums_kernel, grid, block, policy.shared_bytes, policy.cluster,
                               static_cast<gpuStream>(stream), sums, policy));
}

}  // namespace gpu
}  // namespace fuselage
