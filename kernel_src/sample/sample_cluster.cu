// gumbel_sample with filters or log-probabilities, on GPUs with thread block clusters: formulas in
// sample/sample.h.
//
// The blocks of a cluster load a row once, into their shared memory, in float32. They find the
// bound of the filters (sample/sample_cluster_filters.h), add up the weights where
// log-probabilities are wanted, and draw.
#include "sample/sample_cluster.h"

#include <algorithm>

#include "common/launch_policy.h"
#include "sample/sample_cluster_filters.h"

namespace fuselage {
namespace {

// ---- sums and draws ----

// The row's sums for log-probabilities, of this block. `filtered`: whether any logit is below
// `lowest`.
__device__ __forceinline__ void sum_weights(Shared& shared, const Part& part, const Scale& scale,
                                            bool filtered, float lowest) {
  unsigned long long weights = 0, allowed = 0;
  part.for_each_four([&](int, const float(&four)[4]) {
    weights += weight_of_strip(four, scale, 0);
#pragma unroll
    for (int k = 0; k < 4 && filtered; ++k) {
      if (four[k] >= lowest) allowed += weight_of<SampleMath>(scale.distance(four[k]));
    }
  });
  weights = block_sum_of(shared.warp_sums[0], weights);
  allowed = block_sum_of(shared.warp_sums[1], allowed);
  if (threadIdx.x == 0) {
    shared.weights = weights;
    shared.allowed = allowed;
  }
}

// This block's candidates, of the logits from `lowest` on.
__device__ __forceinline__ void draw_samples(const GumbelSample& p, Shared& shared,
                                             const Part& part, const RowTemperature& temperature,
                                             const NoiseKey& key, float lowest,
                                             Candidate* candidates) {
  Drawing<MadeKeys> drawing{};
  drawing.key = key;
  // NOTE: computed again, as registers are short while the filters run.
  drawing.unit = score_unit<SampleMath>(temperature.inv_temperature);
  drawing.scale = temperature.inv_temperature * drawing.unit;
  drawing.shared_threshold = &shared.threshold;
  for (int sample = 0; sample < p.draws.num_samples; ++sample) {
    drawing.sample = sample;
    drawing.best = no_candidate();
    drawing.threshold = minus_infinity();
    if (threadIdx.x == 0) shared.threshold = 0;
    __syncthreads();
    part.for_each_four([&](int number, const float(&four)[4]) {
      const int column = part.begin + 4 * number;
      if (temperature.greedy) {
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
      drawing.load_threshold();
      drawing.draw(allowed, p.draws.vocab_offset + column, column);
    });
    const Candidate best = block_best<kClusterThreads>(drawing.best, shared.best_of_warps);
    if (threadIdx.x == 0) candidates[sample] = best;
    __syncthreads();
  }
}

// The first block writes the row's draws, and takes the next fallback row for the cluster.
__device__ __forceinline__ void write_row(const GumbelSample& p, Shared& shared,
                                          const Cluster& cluster, const ClusterPolicy& policy,
                                          int64_t row, const Maxima& maxima, bool has_sums,
                                          bool filtered, Candidate* candidates) {
  RowState state{};
  state.max_key = maxima.all > minus_infinity() ? key_of<SampleMath>(maxima.all) : 0;
  state.raised = filtered;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool is_block = lane < cluster.blocks;
  if (has_sums) {
    state.strip_weights = warp_sum_of(is_block ? *cluster.at(&shared.weights, lane) : 0);
    state.allowed = warp_sum_of(is_block ? *cluster.at(&shared.allowed, lane) : 0);
  }
  for (int sample = warp; sample < p.draws.num_samples; sample += kWarps) {
    const Candidate best =
        warp_best(is_block ? cluster.at(candidates, lane)[sample] : no_candidate());
    if (lane == 0) write_draw(p.draws, p.results, row, sample, best, state);
  }
  // NOTE: other clusters may still read an offset of all rows.
  if (threadIdx.x == 0 && has_own_offset(p.draws)) ++p.draws.offsets[row * p.draws.offset_stride];
  if (threadIdx.x == 0 && p.strips.fallback != nullptr) {
    const uint32_t next =
        static_cast<uint32_t>(policy.clusters) + atomicAdd(p.strips.fallback + 1, 1u);
    for (int block = 0; block < cluster.blocks; ++block) *cluster.at(&shared.next, block) = next;
  }
}

// ---- the kernel ----

__device__ __forceinline__ void draw_row(const GumbelSample& p, Shared& shared,
                                         const ClusterPolicy& policy, int64_t row) {
  const Cluster cluster{policy.blocks, policy.blocks == 1 ? 0 : cluster_rank()};
  const int64_t begin = cluster.rank * policy.part, left = p.draws.vocab - begin;
  const Part part{reinterpret_cast<float*>(reinterpret_cast<char*>(&shared) + kClusterFixedBytes),
                  static_cast<int>(begin),
                  static_cast<int>(left < 0             ? 0
                                   : left < policy.part ? left
                                                        : policy.part)};
  const RowTemperature temperature = row_temperature(p.draws, row);
  const NoiseKey key = key_of_row(p.draws, row);

  float of_thread = minus_infinity();
  switch (p.dtype) {
    case DType::float32: of_thread = load_part<float>(p, row, part); break;
    case DType::float16: of_thread = load_part<float16>(p, row, part); break;
    default: of_thread = load_part<bfloat16>(p, row, part);
  }
  const Maxima maxima = share_maxima(shared, cluster, of_thread);
  const bool has_weights = maxima.all > minus_infinity() && !temperature.greedy;

  const Scale scale{maxima.all, temperature.inv_temperature};
  uint32_t bound = kKeyOfMinusInfinity + 1;
  if (has_weights) {
    Filtering filtering{p,     shared, cluster, part, scale, key_of<SampleMath>(maxima.all),
                        bound, false,  0};
    if (p.filters.has_top_k) filtering.top_k(option_of(p.filters.top_k, row), maxima);
    if (p.filters.has_top_p) filtering.top_p(option_of(p.filters.top_p, row));
    if (p.filters.has_min_p) filtering.min_p(option_of(p.filters.min_p, row));
    bound = filtering.bound;
  }
  const float lowest = value_of_key<SampleMath>(bound);

  const bool has_sums = has_weights && wants_sums(p.results);
  const bool filtered = bound > kKeyOfMinusInfinity + 1;
  if (has_sums) sum_weights(shared, part, scale, filtered, lowest);
  Candidate* candidates = reinterpret_cast<Candidate*>(shared.low);
  draw_samples(p, shared, part, temperature, key, lowest, candidates);
  cluster.sync();
  if (cluster.rank == 0) {
    write_row(p, shared, cluster, policy, row, maxima, has_sums, filtered, candidates);
  }
  cluster.sync();
}

// A cluster has one row, or takes one fallback row after the other.
__global__ void __launch_bounds__(kClusterThreads, kClusterBlocks)
    cluster_kernel(const GumbelSample p, const ClusterPolicy policy) {
  extern __shared__ __align__(128) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  grid_dependency_wait();
  const uint32_t* fallback = p.strips.fallback;
  uint32_t number = blockIdx.x / policy.blocks;
#pragma unroll 1
  do {
    int64_t row = number;
    if (fallback != nullptr) {
      if (number >= fallback[0]) break;  // NOTE: first of all, as most launches have no such row
      row = fallback[2 + number];
    }
    draw_row(p, shared, policy, row);
    number = shared.next;
  } while (fallback != nullptr);
  launch_dependents();
}

}  // namespace

// ---- launchers ----

namespace gpu {

gpuError cluster_sample(const GumbelSample& p, const ClusterPolicy& policy, gpuStream stream) {
  const int64_t clusters =
      p.strips.fallback == nullptr ? p.draws.batch : std::min(p.draws.batch, policy.clusters);
  const dim3 grid(static_cast<unsigned>(clusters * policy.blocks));
  const int bytes = kClusterFixedBytes + static_cast<int>(policy.part * sizeof(float));
  const gpuError error = gpu_launch_as(true, &cluster_kernel, grid, dim3(kClusterThreads), bytes,
                                       policy.blocks, stream, p, policy);
  if (error != gpuSuccess || !has_shared_offset(p.draws) || p.draws.is_advanced) return error;
  return advance_shared_offset(p.draws.offsets, stream);
}

}  // namespace gpu
}  // namespace fuselage
