// gumbel_sample with filters where the greatest logit of each strip of kStrip neighbours is known, as the head on Hopper
// GPUs leaves them. A block has a row, and reads few of its strips:
//
//   limit   What the filters look for is not below it. For top_k, strips are dealt into groups: the top_k greatest of
//           the groups' greatest logits are as many. For min_p it is the bound. For top_p one is tried, and what all
//           below it may weigh at most is added up.
//   list    The logits from the limit on. A filter's bound is one of them: what is greater is counted, or weighed,
//           for each. For top_p it must be the same whatever is below the limit.
//
// A row for which the list has no room, or does not tell, is left to the kernel that reads all of it.
#include "sample/sample_strips.h"

#include "common/launch_policy.h"
#include "sample/sample_cluster.h"
#include "sample/sample_draw.h"
#include "sample/sample_filter.h"

namespace fuselage {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMostStrips = 1024;
constexpr int kMostListed = kThreads;  // one for each thread

// Groups of strips are those of a thread, or of four, which is quicker, and does as long as the limit is that of three
// quarters of the groups at most: the list gets about twice as many logits then.
constexpr int kGroupLanes = 4;
constexpr int kFewGroups = kThreads / kGroupLanes * 3 / 4;
constexpr int kMostGroups = kThreads / 2;
constexpr int kTriedGroups = kFewGroups;  // of top_p

struct Shared {
  float values[kThreads];
  uint32_t keys[kMostListed];  // 0 behind the end
  int columns[kMostListed];
  unsigned long long weights[kMostListed];
  int strips[kMostStrips];
  float of_warps[kWarps];
  unsigned long long sums[2][kWarps];
  Candidate best_of_warps[kWarps];
  uint32_t listed_strips, listed, limit, found[2];
};

constexpr int kFoursAtOnce = 4;

// body(greatest, first) for all strips of a row. A thread takes four neighbours at once, and several times: those from
// first + i * 4 * kThreads on, of which the greatest is greatest[i], -inf behind the end.
template <typename Body>
__device__ __forceinline__ void for_strips(const float* greatest, int count, Body body) {
  for (int first = 4 * static_cast<int>(threadIdx.x); first < count;
       first += 4 * kFoursAtOnce * kThreads) {
    float4 loaded[kFoursAtOnce];
#pragma unroll
    for (int i = 0; i < kFoursAtOnce; ++i) {
      const int at = first + 4 * i * kThreads;
      if (at < count) loaded[i] = *reinterpret_cast<const float4*>(greatest + at);
    }
    float most[kFoursAtOnce];
#pragma unroll
    for (int i = 0; i < kFoursAtOnce; ++i) {
      const int at = first + 4 * i * kThreads;
      const float four[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
      most[i] = minus_infinity();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (at + k < count) most[i] = fmaxf(four[k], most[i]);
      }
    }
    body(most, first);
  }
}

// The `wanted`-th greatest of shared.values[0, count). There are as many, and `count` is a multiple of 32.
__device__ __forceinline__ float nth_greatest(Shared& shared, int count, int wanted) {
  if (threadIdx.x == 0) shared.limit = 0xffffffffu;
  __syncthreads();
  if (threadIdx.x < count) {
    const float own = shared.values[threadIdx.x];
    // NOTE: four sums of floats: of one sum of predicates each waits for the one before, 90 cycles for four (H200).
    float4 above = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int i = 0; i < count; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(shared.values + i);
      above.x += four.x > own ? 1.0f : 0.0f;
      above.y += four.y > own ? 1.0f : 0.0f;
      above.z += four.z > own ? 1.0f : 0.0f;
      above.w += four.w > own ? 1.0f : 0.0f;
    }
    const bool is = above.x + above.y + above.z + above.w < static_cast<float>(wanted);
    const uint32_t least = __reduce_min_sync(kAllLanes, is ? key_of<SampleMath>(own) : 0xffffffffu);
    if (threadIdx.x % kWarpSize == 0) atomicMin(&shared.limit, least);
  }
  __syncthreads();
  return value_of_key<SampleMath>(shared.limit);
}

// That of the groups' greatest logits, where a thread has `of_thread`.
__device__ __forceinline__ float greatest_of_groups(Shared& shared, float of_thread, int wanted) {
  const int lanes = wanted <= kFewGroups ? kGroupLanes : 1;
  for (int mask = 1; mask < lanes; mask *= 2)
    of_thread = fmaxf(__shfl_xor_sync(kAllLanes, of_thread, mask), of_thread);
  if (threadIdx.x % lanes == 0) shared.values[threadIdx.x / lanes] = of_thread;
  return nth_greatest(shared, kThreads / lanes, wanted);
}

// At most the least logit at this distance. NOTE: a rounded sum is not above a float that the sum is not above.
__device__ __forceinline__ float limit_at(const Scale& scale, float distance) {
  return scale.greatest + (distance * 1.0001f - 1e-37f) / scale.inv_temperature;
}

__device__ __forceinline__ float limit_of(Shared& shared, const Wanted& wanted, const Scale& scale,
                                          float of_thread) {
  if (wanted.top_k > kMostGroups) return minus_infinity();
  if (wanted.top_k == 0 && !wanted.weighs()) return limit_at(scale, wanted.farthest);
  const float of_groups = greatest_of_groups(
      shared, of_thread, wanted.top_k > 0 ? static_cast<int>(wanted.top_k) : kTriedGroups);
  return wanted.top_k > 0 ? of_groups : fmaxf(of_groups, limit_at(scale, kNoWeight));
}

// Finds the key from which on, from the greatest, the weights of the list's keys reach `least`, and that for `most`; 0
// where there is none. Thread i has the weight of number i.
__device__ __forceinline__ void find_keys(Shared& shared, int listed, unsigned long long weight,
                                          unsigned long long least, unsigned long long most) {
  const uint32_t own = shared.keys[threadIdx.x];
  shared.weights[threadIdx.x] = weight;
  if (threadIdx.x < 2) shared.found[threadIdx.x] = 0;
  __syncthreads();
  if (own != 0) {
    unsigned long long above = 0, upto = 0;
#pragma unroll 4
    for (int i = 0; i < listed; ++i) {
      const uint32_t other = shared.keys[i];
      const unsigned long long its = shared.weights[i];
      above += other > own ? its : 0;
      upto += other >= own ? its : 0;
    }
    if (least > above && least <= upto) shared.found[0] = own;
    if (most > above && most <= upto) shared.found[1] = own;
  }
  __syncthreads();
}

// Whether the row is drawn: the same for all threads.
__device__ __forceinline__ bool draw_row(const GumbelSample& p, Shared& shared, int64_t row) {
  const int vocab = static_cast<int>(p.draws.vocab);
  const int strips = (vocab - 1) / kStrip + 1;
  const float* logits = static_cast<const float*>(p.logits) + row * p.stride;
  const Heat heat = heat_of(p.draws, row);
  const NoiseKey noise = key_of_row(p.draws, row);
  const Wanted wanted(p.filters, p.draws.vocab, row);
  const bool weighs_all = wanted.weighs_all();
  grid_dependency_wait();  // the head. What writes any of these was done before it was
  const RowStrips row_strips(p.strips, row);

  float of_thread = minus_infinity();
  for_strips(row_strips.greatest, strips, [&](const float(&most)[kFoursAtOnce], int) {
    for (const float its : most) of_thread = fmaxf(its, of_thread);
  });
  const float of_warp = warp_greatest(of_thread);
  if (threadIdx.x % kWarpSize == 0) shared.of_warps[threadIdx.x / kWarpSize] = of_warp;
  shared.keys[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.listed_strips = 0;
    shared.listed = 0;
  }
  __syncthreads();
  const Scale scale{warp_greatest(shared.of_warps[threadIdx.x % kWarps]), heat.inv_temperature};
  const bool filters = !heat.greedy && scale.greatest > minus_infinity();
  float limit = scale.greatest;
  if (filters) {
    limit = fmaxf(limit_of(shared, wanted, scale, of_thread), row_strips.floor);
    if (!(limit > minus_infinity())) return false;
  }

  unsigned long long below = 0;  // what all that is not read weighs at most
  const auto is_listed = [&](float its) { return its >= limit && its > minus_infinity(); };
  const auto counts = [&](float its) {
    return is_listed(its) || (weighs_all && scale.distance(its) > kNoWeight);
  };
  // Most threads have nothing that counts, and of the others most strips do not.
  if (counts(of_thread)) {
    for_strips(row_strips.greatest, strips, [&](const float(&most)[kFoursAtOnce], int first) {
      uint32_t fours = 0;
#pragma unroll
      for (int i = 0; i < kFoursAtOnce; ++i) fours |= counts(most[i]) ? 1u << i : 0u;
#pragma unroll 1
      for (; fours != 0; fours &= fours - 1) {
        const int begin = first + 4 * (__ffs(fours) - 1) * kThreads;
        const float4 loaded = *reinterpret_cast<const float4*>(row_strips.greatest + begin);
        const float four[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (begin + k >= strips) break;
          if (is_listed(four[k])) {
            const uint32_t at = atomicAdd(&shared.listed_strips, 1u);
            if (at < kMostStrips) shared.strips[at] = begin + k;
          } else if (weighs_all) {
            // NOTE: more than that, should a lesser logit have a greater weight by an error of e^distance.
            const unsigned long long weight = weight_of<SampleMath>(scale.distance(four[k]));
            below += weight == 0 ? 0 : kStrip * (weight + (weight >> 16) + 1);
          }
        }
      }
    });
  }
  __syncthreads();
  const int listed_strips = static_cast<int>(shared.listed_strips);
  if (listed_strips > kMostStrips) return false;

  unsigned long long sum = 0;  // of the weights of what is read
  constexpr int kAtOnce = 4, kStripsAtOnce = kThreads / kStrip;
  for (int first = 0; first < listed_strips; first += kAtOnce * kStripsAtOnce) {
    float loaded[kAtOnce];
    int columns[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kStripsAtOnce + static_cast<int>(threadIdx.x) / kStrip;
      columns[j] = i < listed_strips
                       ? shared.strips[i] * kStrip + static_cast<int>(threadIdx.x) % kStrip
                       : vocab;
      loaded[j] = columns[j] < vocab ? logits[columns[j]] : minus_infinity();
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (columns[j] >= vocab) continue;
      if (weighs_all) sum += weight_of<SampleMath>(scale.distance(loaded[j]));
      if (!is_listed(loaded[j])) continue;
      const uint32_t at = atomicAdd(&shared.listed, 1u);
      if (at < kMostListed) {
        shared.keys[at] = key_of<SampleMath>(loaded[j]);
        shared.columns[at] = columns[j];
      }
    }
  }
  __syncthreads();
  const int listed = static_cast<int>(shared.listed);
  if (listed > kMostListed) return false;

  const uint32_t own = shared.keys[threadIdx.x];
  uint32_t bound = 1;  // 0 is no key
  // NOTE: min_p may have left less than top_k.
  if (filters && wanted.top_k > 0 && wanted.top_k < listed) {
    shared.values[threadIdx.x] = own == 0 ? minus_infinity() : value_of_key<SampleMath>(own);
    const int whole_warps = (listed + kWarpSize - 1) / kWarpSize * kWarpSize;
    bound = key_of<SampleMath>(nth_greatest(shared, whole_warps, static_cast<int>(wanted.top_k)));
  }
  if (filters && wanted.weighs()) {
    const unsigned long long weight = own >= bound ? scale.weight_of_key(own) : 0;
    sum = block_sum_of(shared.sums[0], weighs_all ? sum : weight);
    below = block_sum_of(shared.sums[1], below);
    find_keys(shared, listed, weight, weights_needed(wanted.top_p, sum),
              weights_needed(wanted.top_p, sum + below));
    bound = shared.found[0];
    if (bound == 0 || bound != shared.found[1]) return false;
  }
  const bool is_allowed =
      own >= bound &&
      (!filters || scale.distance(value_of_key<SampleMath>(own)) >= wanted.farthest);

  for (int sample = 0; sample < p.draws.num_samples; ++sample) {
    Candidate best = no_candidate();
    if (is_allowed) {
      const float logit = value_of_key<SampleMath>(own);
      const int column = shared.columns[threadIdx.x];
      const int64_t index = p.draws.vocab_offset + column;
      float score = logit;
      if (!heat.greedy) {
        score = score_of<SampleMath>(logit, noise_of<SampleMath>(noise, index, sample), heat.scale,
                                     heat.unit);
      }
      offer(best, score, logit, column);
    }
    best = block_best<kThreads>(best, shared.best_of_warps);
    if (threadIdx.x == 0) write_draw(p.draws, p.results, row, sample, best, RowState{});
    __syncthreads();
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, 2) strips_kernel(const GumbelSample p) {
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  const bool drawn = draw_row(p, shared, row);
  if (threadIdx.x == 0) {
    if (!drawn) p.strips.left[2 + atomicAdd(p.strips.left, 1u)] = static_cast<uint32_t>(row);
    if (drawn && has_own_offset(p.draws)) ++p.draws.offsets[row * p.draws.offset_stride];
  }
  launch_dependents();
}

}  // namespace

namespace gpu {

gpuError strips_sample(const GumbelSample& p, const ClusterPolicy& policy, gpuStream stream) {
  const gpuError error = gpu_launch_after(
      &strips_kernel, dim3(static_cast<unsigned>(p.draws.batch)), dim3(kThreads), stream, p);
  return error != gpuSuccess ? error : cluster_sample(p, policy, stream);
}

}  // namespace gpu
}  // namespace fuselage
