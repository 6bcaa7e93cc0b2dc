// The filters of gumbel_sample on all GPUs, by kernels over global memory. A row's logits are
// counted, and their weights added up, in bins of their distance from the maximum. The bin in which
// a filter's bound lies has few logits. These are listed, and the bound is found among them eight
// bits at a time. All sums are of integers, so that their order does not matter.
#pragma once

#include "common/ptx.h"
#include "sample/sample_draw.h"

namespace fuselage {
namespace {

// A block's part of a row.
struct Part {
  int64_t row, number, begin, end;
};

__device__ __forceinline__ Part part_of(const GumbelSample& p, const SamplePolicy& policy) {
  const int64_t row = blockIdx.x / policy.parts, number = blockIdx.x % policy.parts;
  const int64_t begin = number * policy.part;
  const int64_t end = begin + policy.part < p.draws.vocab ? begin + policy.part : p.draws.vocab;
  return {row, number, begin, end};
}

// ---- bins ----

// The bins of a row, in global memory, zero at first.
struct RowBins {
  unsigned long long weights[kDistanceBins];
  uint32_t counts[kDistanceBins];
};

struct FilterSpace {
  RowState* states;  // [batch]
  RowBins* bins;     // [batch]
  uint32_t* lists;   // [batch, kListed]: keys
};

__global__ void __launch_bounds__(kSampleThreads)
    clear_kernel(RowState* states, uint32_t* bins, const int64_t batch) {
  const int64_t words = batch * static_cast<int64_t>(sizeof(RowBins) / sizeof(uint32_t));
  const int64_t first = int64_t{blockIdx.x} * kSampleThreads + threadIdx.x;
  for (int64_t i = first; i < words; i += int64_t{gridDim.x} * kSampleThreads) bins[i] = 0;
  for (int64_t i = first; i < batch; i += int64_t{gridDim.x} * kSampleThreads)
    states[i] = {0, 0, 0, 0, kKeyOfMinusInfinity + 1, 0, 0};
  launch_dependents();
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads)
    max_kernel(const GumbelSample p, const SamplePolicy policy, const FilterSpace space) {
  grid_dependency_wait();
  const Part part = part_of(p, policy);
  float max_logit = minus_infinity();
  for_each_vector<T, kSampleVector>(p, part.row, part.begin, part.end,
                                    [&](int, const auto& logits) {
#pragma unroll
                                      for (int k = 0; k < kSampleVector; ++k)
                                        max_logit = logits[k] > max_logit ? logits[k] : max_logit;
                                    });
  max_logit = warp_max(max_logit);
  if (threadIdx.x % kWarpSize == 0 && max_logit > minus_infinity())
    atomicMax(&space.states[part.row].max_key, key_of<SampleMath>(max_logit));
  launch_dependents();
}

__device__ __forceinline__ Scale scale_of(const GumbelSample& p, const RowState& state,
                                          int64_t row) {
  return {value_of_key<SampleMath>(state.max_key), row_temperature(p.draws, row).inv_temperature};
}

// Whether any logit of the row has a weight.
__device__ __forceinline__ bool has_weights(const GumbelSample& p, const RowState& state,
                                            int64_t row) {
  return state.max_key != 0 && !row_temperature(p.draws, row).greedy;
}

// A thread's additions to bins: one for neighbours in the same bin, as all are in rows of equal
// logits.
struct Run {
  int bin = 0;
  uint32_t count = 0;
  unsigned long long weight = 0;

  __device__ __forceinline__ void add(uint32_t* counts, unsigned long long* weights, int its_bin,
                                      unsigned long long its_weight) {
    if (its_bin != bin) flush(counts, weights);
    bin = its_bin;
    ++count;
    weight += its_weight;
  }
  __device__ __forceinline__ void flush(uint32_t* counts, unsigned long long* weights) {
    if (count != 0) atomicAdd(&counts[bin], count);
    if (weight != 0) atomicAdd(&weights[bin], weight);
    count = 0;
    weight = 0;
  }
};

template <typename T>
__global__ void __launch_bounds__(kSampleThreads)
    bins_kernel(const GumbelSample p, const SamplePolicy policy, const FilterSpace space) {
  __shared__ unsigned long long weights[kDistanceBins];
  __shared__ uint32_t counts[kDistanceBins];
  grid_dependency_wait();
  const Part part = part_of(p, policy);
  RowState& state = space.states[part.row];
  if (!has_weights(p, state, part.row)) return;
  const Scale scale = scale_of(p, state, part.row);
  for (int i = threadIdx.x; i < kDistanceBins; i += kSampleThreads) {
    weights[i] = 0;
    counts[i] = 0;
  }
  __syncthreads();
  Run run;
  const int shift = weight_shift(p.draws.vocab);
  const bool has_sums = wants_sums(p.results);
  unsigned long long strip_weights = 0;
  for_each_vector<T, kSampleVector>(p, part.row, part.begin, part.end,
                                    [&](int, const auto& logits) {
                                      if (has_sums)
                                        strip_weights += weight_of_strip(logits, scale, shift);
#pragma unroll
                                      for (int k = 0; k < kSampleVector; ++k) {
                                        if (!(logits[k] > minus_infinity())) continue;
                                        const float distance = scale.distance(logits[k]);
                                        run.add(counts, weights, distance_bin<SampleMath>(distance),
                                                weight_of<SampleMath>(distance, shift));
                                      }
                                    });
  if (has_sums) {
    strip_weights = warp_sum_of(strip_weights);
    if (threadIdx.x % kWarpSize == 0) atomicAdd(&state.strip_weights, strip_weights);
  }
  run.flush(counts, weights);
  __syncthreads();
  RowBins& bins = space.bins[part.row];
  unsigned long long sum = 0;
  for (int i = threadIdx.x; i < kDistanceBins; i += kSampleThreads) {
    if (counts[i] != 0) atomicAdd(&bins.counts[i], counts[i]);
    if (weights[i] != 0) atomicAdd(&bins.weights[i], weights[i]);
    sum += weights[i];
  }
  if (sum != 0) atomicAdd(&state.weights, sum);
  launch_dependents();
}

enum class Filter { top_k, top_p, min_p };

// The bin in which a filter's bound lies: the filter leaves its `count` largest logits, or those
// whose weights sum up to `weight`, or those from `key` on. `above` is the weight of all higher
// bins.
struct Search {
  bool needed;
  int bin;
  uint32_t key;
  unsigned long long count, weight, above;
};

// Inclusive sums of two values over the threads.
template <int kThreads>
struct Scan {
  unsigned long long a[kThreads], b[kThreads];

  __device__ __forceinline__ void run(unsigned long long own_a, unsigned long long own_b) {
    a[threadIdx.x] = own_a;
    b[threadIdx.x] = own_b;
    __syncthreads();
    for (int step = 1; step < kThreads; step *= 2) {
      const bool has = threadIdx.x >= step;
      const unsigned long long more_a = has ? a[threadIdx.x - step] : 0;
      const unsigned long long more_b = has ? b[threadIdx.x - step] : 0;
      __syncthreads();
      a[threadIdx.x] += more_a;
      b[threadIdx.x] += more_b;
      __syncthreads();
    }
  }
};

// All threads of a block of kThreads call it together.
template <int kThreads>
__device__ __forceinline__ Search search_of(const GumbelSample& p, int64_t row,
                                            const RowState& state, const RowBins& bins,
                                            Filter filter, Scan<kThreads>& scan, Search& shared) {
  constexpr int kEach = kDistanceBins / kThreads;
  unsigned long long counts[kEach], weights[kEach], count = 0, weight = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    counts[i] = bins.counts[threadIdx.x * kEach + i];
    weights[i] = bins.weights[threadIdx.x * kEach + i];
    count += counts[i];
    weight += weights[i];
  }
  scan.run(count, weight);
  const unsigned long long all = scan.a[kThreads - 1];
  unsigned long long above_count = scan.a[threadIdx.x] - count;
  unsigned long long above = scan.b[threadIdx.x] - weight;
  if (threadIdx.x == 0) shared = {false, 0, 0, 0, 0, 0};
  __syncthreads();
  unsigned long long wanted_count = 0, wanted_weight = 0;
  int wanted_bin = -1;
  uint32_t key = 0;
  if (filter == Filter::top_k) {
    const int64_t k = option_of(p.filters.top_k, row);
    if (k >= 1 && static_cast<unsigned long long>(k) < all) wanted_count = k;
  } else if (filter == Filter::top_p) {
    const float share = option_of(p.filters.top_p, row);
    if (share < 1.0f)
      wanted_weight = weights_needed(share, state.raised != 0 ? state.allowed : state.weights);
  } else {
    const float share = option_of(p.filters.min_p, row);
    if (share >= 1.17549435e-38f) {
      const Scale scale = scale_of(p, state, row);
      key = key_at_distance<SampleMath>(log_of_normal<SampleMath>(share), scale.max_logit,
                                        scale.inv_temperature);
      wanted_bin = distance_bin<SampleMath>(scale.distance(value_of_key<SampleMath>(key)));
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int bin = threadIdx.x * kEach + i;
    const bool here = bin == wanted_bin ||
                      (wanted_count > above_count && wanted_count <= above_count + counts[i]) ||
                      (wanted_weight > above && wanted_weight <= above + weights[i]);
    if (here) {
      shared = {true,
                bin,
                key,
                wanted_count == 0 ? 0 : wanted_count - above_count,
                wanted_weight == 0 ? 0 : wanted_weight - above,
                above};
    }
    above_count += counts[i];
    above += weights[i];
  }
  __syncthreads();
  return shared;
}

// Lists the keys of the bin in which the bound lies.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads)
    list_kernel(const GumbelSample p, const SamplePolicy policy, const FilterSpace space,
                const Filter filter) {
  __shared__ Scan<kSampleThreads> scan;
  __shared__ Search shared;
  grid_dependency_wait();
  const Part part = part_of(p, policy);
  RowState& state = space.states[part.row];
  if (!has_weights(p, state, part.row)) return;
  const Search search = search_of(p, part.row, state, space.bins[part.row], filter, scan, shared);
  if (!search.needed) return;
  const Scale scale = scale_of(p, state, part.row);
  uint32_t* list = space.lists + part.row * kListed;
  for_each_vector<T, kSampleVector>(
      p, part.row, part.begin, part.end, [&](int, const auto& logits) {
#pragma unroll
        for (int k = 0; k < kSampleVector; ++k) {
          if (!(logits[k] > minus_infinity())) continue;
          if (distance_bin<SampleMath>(scale.distance(logits[k])) != search.bin) continue;
          // A count past the end says that the list is not complete.
          if (*static_cast<volatile uint32_t*>(&state.listed) > kListed) continue;
          const uint32_t at = atomicAdd(&state.listed, 1u);
          if (at < kListed) list[at] = key_of<SampleMath>(logits[k]);
        }
      });
  launch_dependents();
}

// Finds the bound among the keys of the bin, a block for a row.
template <typename T>
__global__ void __launch_bounds__(kChooseThreads, 1)
    choose_kernel(const GumbelSample p, const FilterSpace space, const Filter filter) {
  constexpr int kDigits = 256;
  __shared__ Scan<kChooseThreads> scan;
  __shared__ Search shared;
  __shared__ unsigned long long weights[kDigits];
  __shared__ uint32_t counts[kDigits];
  __shared__ int chosen;
  grid_dependency_wait();
  const int64_t row = blockIdx.x;
  RowState& state = space.states[row];
  if (!has_weights(p, state, row)) return;
  Search search = search_of(p, row, state, space.bins[row], filter, scan, shared);
  if (!search.needed) return;
  const Scale scale = scale_of(p, state, row);
  const uint32_t listed = state.listed;
  const uint32_t* list = space.lists + row * kListed;
  // body(key) for all keys of the bin.
  const auto for_each_key = [&](auto body) {
    if (listed <= kListed) {
      for (uint32_t i = threadIdx.x; i < listed; i += kChooseThreads) body(list[i]);
      return;
    }
    for_each_vector<T, kSampleVector>(p, row, 0, p.draws.vocab, [&](int, const auto& logits) {
#pragma unroll
      for (int k = 0; k < kSampleVector; ++k) {
        if (logits[k] > minus_infinity() &&
            distance_bin<SampleMath>(scale.distance(logits[k])) == search.bin)
          body(key_of<SampleMath>(logits[k]));
      }
    });
  };
  const int weights_shift = weight_shift(p.draws.vocab);
  const auto weight_of_key = [&](uint32_t key) {
    return static_cast<unsigned long long>(
        weight_of<SampleMath>(scale.distance(value_of_key<SampleMath>(key)), weights_shift));
  };
  uint32_t bound = search.key;
  unsigned long long allowed = search.above;
  if (bound != 0) {
    if (threadIdx.x == 0) weights[0] = 0;
    __syncthreads();
    unsigned long long sum = 0;
    for_each_key([&](uint32_t key) {
      if (key >= bound) sum += weight_of_key(key);
    });
    if (sum != 0) atomicAdd(&weights[0], sum);
    __syncthreads();
    allowed += weights[0];
  } else {
    // Digits of eight bits, the highest first. The search goes on among the keys that have the
    // digit.
    for (int shift = 24; shift >= 0; shift -= 8) {
      if (threadIdx.x < kDigits) {
        weights[threadIdx.x] = 0;
        counts[threadIdx.x] = 0;
      }
      __syncthreads();
      Run run;
      for_each_key([&](uint32_t key) {
        if (shift < 24 && key >> (shift + 8) != bound) return;
        run.add(counts, weights, static_cast<int>(key >> shift & 255), weight_of_key(key));
      });
      run.flush(counts, weights);
      __syncthreads();
      // Thread t has digit 255 - t.
      const int digit = kDigits - 1 - static_cast<int>(threadIdx.x);
      const unsigned long long count = digit >= 0 ? counts[digit] : 0;
      const unsigned long long weight = digit >= 0 ? weights[digit] : 0;
      scan.run(count, weight);
      const unsigned long long above_count = scan.a[threadIdx.x] - count;
      const unsigned long long above = scan.b[threadIdx.x] - weight;
      if (count != 0 &&
          (search.count != 0 ? search.count > above_count && search.count <= above_count + count
                             : search.weight > above && search.weight <= above + weight)) {
        chosen = digit;
        shared.count = search.count == 0 ? 0 : search.count - above_count;
        shared.weight = search.weight == 0 ? 0 : search.weight - above;
        shared.above = above + (shift == 0 ? weight : 0);
      }
      __syncthreads();
      bound = bound << 8 | static_cast<uint32_t>(chosen);
      allowed += shared.above;
      search.count = shared.count;
      search.weight = shared.weight;
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) {
    state.listed = 0;
    if (bound > state.bound) {
      state.bound = bound;
      state.allowed = allowed;
      state.raised = 1;
    }
  }
  launch_dependents();
}

}  // namespace
}  // namespace fuselage
