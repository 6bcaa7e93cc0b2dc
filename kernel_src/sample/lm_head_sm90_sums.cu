// The log-probabilities of tokens that sample/lm_head_sm90.cu has drawn, of the sums of strips that
// it has written besides, by common/row_weights.h.
#include "common/row_weights.h"
#include "sample/lm_head_sm90.h"
#include "sample/sample_device.h"

namespace fuselage {
namespace {

struct DrawSums {
  Draws draws;
  DrawResults results;
  const float* logits;  // [batch, stride]: those of tokens that were drawn
  int64_t stride;
  const StripSum* strips;  // [batch, strips_stride]
  int64_t strips_stride;
};

__device__ __forceinline__ void write_samples(const DrawSums& p, int64_t row,
                                              const RowWeights& weights) {
  RowState state{};
  state.strip_weights = weights.sums.weights;
  state.max_key = weights.max > minus_infinity() ? key_of<SampleMath>(weights.max) : 0;
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
  grid_dependency_wait();
  const MemoryStrips strips =
      memory_strips(p.strips + row * p.strips_stride, part_of_row(policy, rank, p.draws.vocab));
  const RowTemperature temperature = row_temperature(p.draws, row);
  const bool is_greedy = temperature.greedy;
  const RowWeights weights =
      weigh_row(shared, strips, kept, policy, p.draws.vocab, temperature.inv_temperature,
                [is_greedy](float max) { return max > minus_infinity() && !is_greedy; });
  if (rank == 0 && threadIdx.x < kWarpSize) write_samples(p, row, weights);
}

}  // namespace

namespace gpu {

const char* lm_head_draw_sums_sm90(const LmHeadSample& p, int device, void* stream) {
  DrawSums sums{p.draws, p.results, p.logits, p.logits_stride, p.strips.sums, p.strips.stride};
  sums.results.scores = nullptr;  // they are there
  const RowWeightsPolicy policy = row_weights_policy(device_info(device), p.draws.batch,
                                                     p.draws.vocab, MemoryStrips::kEach, false);
  const dim3 grid(
      static_cast<unsigned>(ceil_div(p.draws.batch, policy.rows_per_block) * policy.cluster));
  const dim3 block(policy.threads, policy.rows_per_block);
  return message_of(gpu_launch_as(true, &sums_kernel, grid, block, policy.shared_bytes,
                                  policy.cluster, static_cast<gpuStream>(stream), sums, policy));
}

}  // namespace gpu
}  // namespace fuselage
