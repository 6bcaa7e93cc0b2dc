// gumbel_sample with filters where the maximum of each strip of kStrip neighbours is known, as the
// head on Hopper GPUs writes them. A block has a row, and reads few of its strips:
//
//   limit   The filters do not look below it. For top_k, strips are dealt into groups: the top_k
//           largest maxima of groups are as many logits. For min_p it is the bound. For top_p one
//           is tried, and an upper bound of the weight of all below it is added up.
//   list    The logits from the limit on. A filter's bound is one of them: for each, the larger
//           ones are counted, or weighed. For top_p it must be the same whatever is below.
//
// A row whose list is full, or does not tell the bound, falls back to the kernel that reads all of
// it.
#include "sample/sample_strips.h"

#include "common/launch_policy.h"
#include "sample/sample_cluster.h"
#include "sample/sample_draw.h"
#include "sample/sample_filter.h"

namespace fuselage {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxStrips = 1024;
constexpr int kMaxListed = kThreads;  // one for each thread

// The groups of strips are those of one thread, or of four. Four are faster, and serve as long as
// the limit is at most that of three quarters of the groups: then the list gets about twice as many
// logits.
constexpr int kGroupLanes = 4;
constexpr int kFewGroups = kThreads / kGroupLanes * 3 / 4;
constexpr int kMaxGroups = kThreads / 2;
constexpr int kTriedGroups = kFewGroups;  // of top_p

struct Shared {
  float values[kThreads];
  uint32_t keys[kMaxListed];  // 0 past the end
  int columns[kMaxListed];
  unsigned long long weights[kMaxListed];
  int strips[kMaxStrips];
  float of_warps[kWarps];
  unsigned long long sums[2][kWarps];
  Candidate best_of_warps[kWarps];
  uint32_t listed_strips, listed, limit, found[2];
};

constexpr int kFoursAtOnce = 4;

// body(of_fours, first) for all strips of a row. A thread has kFoursAtOnce times four neighbours:
// those from first + i * 4 * kThreads on, whose maximum is of_fours[i], -inf past the end.
template <typename Body>
__device__ __forceinline__ void for_strips(const float* maxima, int count, Body body) {
  for (int first = 4 * static_cast<int>(threadIdx.x); first < count;
       first += 4 * kFoursAtOnce * kThreads) {
    float4 loaded[kFoursAtOnce];
#pragma unroll
    for (int i = 0; i < kFoursAtOnce; ++i) {
      const int at = first + 4 * i * kThreads;
      if (at < count) loaded[i] = *reinterpret_cast<const float4*>(maxima + at);
    }
    float of_fours[kFoursAtOnce];
#pragma unroll
    for (int i = 0; i < kFoursAtOnce; ++i) {
      const int at = first + 4 * i * kThreads;
      const float four[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
      of_fours[i] = minus_infinity();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (at + k < count) of_fours[i] = fmaxf(four[k], of_fours[i]);
      }
    }
    body(of_fours, first);
  }
}

// The `wanted`-th largest of shared.values[0, count), of which `wanted` exist. `count` is a
// multiple of 32.
__device__ __forceinline__ float nth_largest(Shared& shared, int count, int wanted) {
  if (threadIdx.x == 0) shared.limit = 0xffffffffu;
  __syncthreads();
  if (threadIdx.x < count) {
    const float own = shared.values[threadIdx.x];
    // NOTE: four sums of floats: the additions of a single sum of predicates wait for each other,
    // 90 cycles for four (H200).
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
    const uint32_t lowest = lowest_of_warp(is ? key_of<SampleMath>(own) : 0xffffffffu);
    if (threadIdx.x % kWarpSize == 0) atomicMin(&shared.limit, lowest);
  }
  __syncthreads();
  return value_of_key<SampleMath>(shared.limit);
}

// That of the groups' maxima, where `of_thread` is the thread's.
__device__ __forceinline__ float nth_largest_of_groups(Shared& shared, float of_thread,
                                                       int wanted) {
  const int lanes = wanted <= kFewGroups ? kGroupLanes : 1;
  for (int mask = 1; mask < lanes; mask *= 2)
    of_thread = fmaxf(__shfl_xor_sync(kAllLanes, of_thread, mask), of_thread);
  if (threadIdx.x % lanes == 0) shared.values[threadIdx.x / lanes] = of_thread;
  return nth_largest(shared, kThreads / lanes, wanted);
}

// A lower bound of the logits at this distance. NOTE: a rounded sum is not above a float that the
// exact sum is not above.
__device__ __forceinline__ float limit_at(const Scale& scale, float distance) {
  return scale.max_logit + (distance * 1.0001f - 1e-37f) / scale.inv_temperature;
}

__device__ __forceinline__ float limit_of(Shared& shared, const RowFilters& filters,
                                          const Scale& scale, float of_thread) {
  if (filters.top_k > kMaxGroups) return minus_infinity();
  if (filters.top_k == 0 && !filters.has_top_p()) return limit_at(scale, filters.min_p_distance);
  const float of_groups = nth_largest_of_groups(
      shared, of_thread, filters.top_k > 0 ? static_cast<int>(filters.top_k) : kTriedGroups);
  return filters.top_k > 0 ? of_groups : fmaxf(of_groups, limit_at(scale, kZeroWeightDistance));
}

// Finds the keys at which the weights of the list, from the largest key on, reach `lower` and
// `upper`; 0 where there is none. Thread i has the weight of number i.
__device__ __forceinline__ void find_keys(Shared& shared, int listed, unsigned long long weight,
                                          unsigned long long lower, unsigned long long upper) {
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
    if (lower > above && lower <= upto) shared.found[0] = own;
    if (upper > above && upper <= upto) shared.found[1] = own;
  }
  __syncthreads();
}

// What is known of a row before its logits are read.
struct Row {
  const float* logits;
  int vocab, strips;
  RowTemperature temperature;
  RowFilters filters;
  Scale scale;
  bool is_filtered;
  float limit;

  __device__ __forceinline__ bool is_listed(float logit) const {
    return logit >= limit && logit > minus_infinity();
  }
  // Whether a strip with this maximum is read, or weighed.
  __device__ __forceinline__ bool counts(float maximum) const {
    return is_listed(maximum) ||
           (filters.is_top_p_alone() && scale.distance(maximum) > kZeroWeightDistance);
  }
};

// The maximum of this thread's strips. Sets the row's scale.
__device__ __forceinline__ float find_maximum(Shared& shared, Row& row, const float* maxima) {
  float of_thread = minus_infinity();
  for_strips(maxima, row.strips, [&](const float(&of_fours)[kFoursAtOnce], int) {
    for (const float its : of_fours) of_thread = fmaxf(its, of_thread);
  });
  const float of_warp = warp_max(of_thread);
  if (threadIdx.x % kWarpSize == 0) shared.of_warps[threadIdx.x / kWarpSize] = of_warp;
  shared.keys[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.listed_strips = 0;
    shared.listed = 0;
  }
  __syncthreads();
  row.scale = {warp_max(shared.of_warps[threadIdx.x % kWarps]), row.temperature.inv_temperature};
  return of_thread;
}

// Lists the strips that have a logit from the limit on. Returns an upper bound of the weights of
// this thread's others.
__device__ __forceinline__ unsigned long long list_strips(Shared& shared, const Row& row,
                                                          const float* maxima, float of_thread) {
  unsigned long long below = 0;
  // Most threads have nothing that counts, and of the others most strips do not.
  if (row.counts(of_thread)) {
    for_strips(maxima, row.strips, [&](const float(&of_fours)[kFoursAtOnce], int first) {
      uint32_t fours = 0;
#pragma unroll
      for (int i = 0; i < kFoursAtOnce; ++i) fours |= row.counts(of_fours[i]) ? 1u << i : 0u;
#pragma unroll 1
      for (; fours != 0; fours &= fours - 1) {
        const int begin = first + 4 * (__ffs(fours) - 1) * kThreads;
        const float4 loaded = *reinterpret_cast<const float4*>(maxima + begin);
        const float four[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (begin + k >= row.strips) break;
          if (row.is_listed(four[k])) {
            const uint32_t at = atomicAdd(&shared.listed_strips, 1u);
            if (at < kMaxStrips) shared.strips[at] = begin + k;
          } else if (row.filters.is_top_p_alone()) {
            // NOTE: a margin, should a smaller logit have a larger weight by an error of
            // e^distance.
            const unsigned long long weight = weight_of<SampleMath>(row.scale.distance(four[k]));
            below += weight == 0 ? 0 : kStrip * (weight + (weight >> 16) + 1);
          }
        }
      }
    });
  }
  __syncthreads();
  return below;
}

// Lists the logits from the limit on. Returns the weights of what this thread has read.
__device__ __forceinline__ unsigned long long list_logits(Shared& shared, const Row& row,
                                                          int listed_strips) {
  unsigned long long sum = 0;
  constexpr int kAtOnce = 4, kStripsAtOnce = kThreads / kStrip;
  for (int first = 0; first < listed_strips; first += kAtOnce * kStripsAtOnce) {
    float loaded[kAtOnce];
    int columns[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kStripsAtOnce + static_cast<int>(threadIdx.x) / kStrip;
      columns[j] = i < listed_strips
                       ? shared.strips[i] * kStrip + static_cast<int>(threadIdx.x) % kStrip
                       : row.vocab;
      loaded[j] = columns[j] < row.vocab ? row.logits[columns[j]] : minus_infinity();
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (columns[j] >= row.vocab) continue;
      if (row.filters.is_top_p_alone()) sum += weight_of<SampleMath>(row.scale.distance(loaded[j]));
      if (!row.is_listed(loaded[j])) continue;
      const uint32_t at = atomicAdd(&shared.listed, 1u);
      if (at < kMaxListed) {
        shared.keys[at] = key_of<SampleMath>(loaded[j]);
        shared.columns[at] = columns[j];
      }
    }
  }
  __syncthreads();
  return sum;
}

// The bound of the filters but min_p, among the list's keys; 0 where the list does not tell. `sum`
// and `below` are those of the thread.
__device__ __forceinline__ uint32_t find_bound(Shared& shared, const Row& row, int listed,
                                               uint32_t own, unsigned long long sum,
                                               unsigned long long below) {
  const RowFilters& filters = row.filters;
  uint32_t bound = 1;  // 0 is no key
  // NOTE: min_p may have left fewer than top_k.
  if (row.is_filtered && filters.top_k > 0 && filters.top_k < listed) {
    shared.values[threadIdx.x] = own == 0 ? minus_infinity() : value_of_key<SampleMath>(own);
    const int whole_warps = (listed + kWarpSize - 1) / kWarpSize * kWarpSize;
    bound = key_of<SampleMath>(nth_largest(shared, whole_warps, static_cast<int>(filters.top_k)));
  }
  if (row.is_filtered && filters.has_top_p()) {
    const unsigned long long weight = own >= bound ? row.scale.weight_of_key(own) : 0;
    sum = block_sum_of(shared.sums[0], filters.is_top_p_alone() ? sum : weight);
    below = block_sum_of(shared.sums[1], below);
    find_keys(shared, listed, weight, weights_needed(filters.top_p, sum),
              weights_needed(filters.top_p, sum + below));
    bound = shared.found[0] == shared.found[1] ? shared.found[0] : 0;
  }
  return bound;
}

// Draws from the list. Thread i has its number i, which may be drawn where `is_allowed`.
__device__ __forceinline__ void draw_samples(const GumbelSample& p, Shared& shared, int64_t number,
                                             const Row& row, const NoiseKey& noise, uint32_t own,
                                             bool is_allowed) {
  for (int sample = 0; sample < p.draws.num_samples; ++sample) {
    Candidate best = no_candidate();
    if (is_allowed) {
      const float logit = value_of_key<SampleMath>(own);
      const int column = shared.columns[threadIdx.x];
      const int64_t index = p.draws.vocab_offset + column;
      float score = logit;
      if (!row.temperature.greedy) {
        score = score_of<SampleMath>(logit, noise_of<SampleMath>(noise, index, sample),
                                     row.temperature.scale, row.temperature.unit);
      }
      offer(best, score, logit, column);
    }
    best = block_best<kThreads>(best, shared.best_of_warps);
    if (threadIdx.x == 0) write_draw(p.draws, p.results, number, sample, best, RowState{});
    __syncthreads();
  }
}

// Whether the row is drawn: the same for all threads.
__device__ __forceinline__ bool draw_row(const GumbelSample& p, Shared& shared, int64_t number) {
  const int vocab = static_cast<int>(p.draws.vocab);
  Row row{static_cast<const float*>(p.logits) + number * p.stride,
          vocab,
          (vocab - 1) / kStrip + 1,
          row_temperature(p.draws, number),
          RowFilters(p.filters, p.draws.vocab, number),
          {},
          false,
          0.0f};
  const NoiseKey noise = key_of_row(p.draws, number);
  grid_dependency_wait();  // for the head, which has waited for all that is read above
  const RowStrips strips(p.strips, number);

  const float of_thread = find_maximum(shared, row, strips.maxima);
  row.is_filtered = !row.temperature.greedy && row.scale.max_logit > minus_infinity();
  row.limit = row.scale.max_logit;
  if (row.is_filtered) {
    row.limit = fmaxf(limit_of(shared, row.filters, row.scale, of_thread), strips.threshold);
    if (!(row.limit > minus_infinity())) return false;
  }

  const unsigned long long below = list_strips(shared, row, strips.maxima, of_thread);
  const int listed_strips = static_cast<int>(shared.listed_strips);
  if (listed_strips > kMaxStrips) return false;
  const unsigned long long sum = list_logits(shared, row, listed_strips);
  const int listed = static_cast<int>(shared.listed);
  if (listed > kMaxListed) return false;

  const uint32_t own = shared.keys[threadIdx.x];
  const uint32_t bound = find_bound(shared, row, listed, own, sum, below);
  if (bound == 0) return false;
  const bool is_allowed =
      own >= bound && (!row.is_filtered || row.scale.distance(value_of_key<SampleMath>(own)) >=
                                               row.filters.min_p_distance);
  draw_samples(p, shared, number, row, noise, own, is_allowed);
  return true;
}

__global__ void __launch_bounds__(kThreads, 2) strips_kernel(const GumbelSample p) {
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  const bool drawn = draw_row(p, shared, row);
  if (threadIdx.x == 0) {
    if (!drawn)
      p.strips.fallback[2 + atomicAdd(p.strips.fallback, 1u)] = static_cast<uint32_t>(row);
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
