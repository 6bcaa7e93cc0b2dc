// gumbel_sample on the GPU: formulas in sample/sample.h.
//
// A row is cut into parts, one for a block. A thread has eight neighbouring logits at a time, two blocks of Philox;
// sample_draw.h says how most are told to lose without their logarithms. A second kernel takes the best of the parts.
//
// Filters need no sort. On GPUs with clusters, sample_cluster.cu has them. Here is what all GPUs can do, and what
// rows too long for a cluster get: a row's logits are counted, and their weights added up, in bins of their distance
// from the greatest; the bin in which a filter's bound lies has few logits, which are listed, and among which the
// bound is found eight bits at a time. All sums are of integers, so that their order does not matter.

#include "common/launch_policy.h"
#include "sample/sample_device.h"
#include "sample/sample_draw.h"
#include "sample/sample_policy.h"
#if !defined(USE_ROCM)
#include "sample/lm_head_sm90.h"
#include "sample/sample_cluster.h"
#include "sample/sample_strips.h"
#endif

namespace fuselage {
namespace {

// The part of a row that is a block's.
struct Part {
  int64_t row, number, begin, end;
};

__device__ __forceinline__ Part part_of(const GumbelSample& p, const SamplePolicy& policy) {
  const int64_t row = blockIdx.x / policy.parts, number = blockIdx.x % policy.parts;
  const int64_t begin = number * policy.part;
  const int64_t end = begin + policy.part < p.draws.vocab ? begin + policy.part : p.draws.vocab;
  return {row, number, begin, end};
}

// ---- the draw ----

// Groups of logits of which some may win, in shared memory. All threads score them together, when the part is read: most
// turns find one in a few warps, where all lanes would wait for it.
struct GroupQueue {
  static constexpr uint32_t kMost = 64;
  float logits[kMost][kNoiseGroup];
  int columns[kMost];
  uint32_t count;

  __device__ __forceinline__ bool take(const float (&its)[kNoiseGroup], int column) {
    const uint32_t at = atomicAdd(&count, 1u);
    if (at >= kMost) return false;
    columns[at] = column;
#pragma unroll
    for (int k = 0; k < kNoiseGroup; k += 4) {
      *reinterpret_cast<float4*>(logits[at] + k) =
          make_float4(its[k], its[k + 1], its[k + 2], its[k + 3]);
    }
    return true;
  }
};

template <typename T>
__global__ void __launch_bounds__(kSampleThreads, kSampleBlocks)
    draw_kernel(const GumbelSample p, const SamplePolicy policy, const RowState* states,
                Candidate* candidates) {
  __shared__ Candidate of_warps[kSampleThreads / kWarpSize];
  __shared__ uint32_t block_floor;
  __shared__ __align__(16) GroupQueue queue;
  grid_dependency_wait();
  const Part part = part_of(p, policy);
  const Heat heat = heat_of(p.draws, part.row);
  Drawing<KeptKeys> drawing{};
  drawing.key = key_of_row(p.draws, part.row);
  drawing.keys.set(drawing.key);
  drawing.scale = heat.scale;
  drawing.unit = heat.unit;
  drawing.shared_floor = &block_floor;
  const bool filtered = states != nullptr && !heat.greedy;
  const float lowest =
      filtered ? value_of_key<SampleMath>(states[part.row].bound) : minus_infinity();
  for (int sample = 0; sample < p.draws.num_samples; ++sample) {
    drawing.sample = sample;
    drawing.best = no_candidate();
    drawing.floor = minus_infinity();
    bool is_first = true;
    if (threadIdx.x == 0) block_floor = queue.count = 0;
    __syncthreads();
    for_each_vector<T, kNoiseGroup>(
        p, part.row, part.begin, part.end, [&](int column, const auto& logits) {
          if (heat.greedy) {
#pragma unroll
            for (int k = 0; k < kNoiseGroup; ++k)
              offer(drawing.best, logits[k], logits[k], column + k);
            return;
          }
          float allowed[kNoiseGroup];
          bool any = !filtered;
#pragma unroll
          for (int k = 0; k < kNoiseGroup; ++k) {
            allowed[k] = logits[k];
            if (filtered && !(logits[k] >= lowest)) allowed[k] = minus_infinity();
            any |= allowed[k] > minus_infinity();
          }
          if (filtered && !warp_any(any)) return;
          const int64_t index = p.draws.vocab_offset + column;
          const auto groups = drawing.template groups_at<kNoiseGroup>(index);
          if (is_first) drawing.raise_floor(allowed, groups);
          // What the whole block has leaves hardly any logit to be scored.
          if (is_first && !filtered) __syncthreads();
          is_first = false;
          drawing.take_floor();
          bool may = drawing.may_win(allowed, groups);
          if (!warp_any(may)) return;
          if (may) may = !queue.take(allowed, column);
          if (warp_any(may)) drawing.offer_all(allowed, groups, index, column, !may);
        });
    __syncthreads();
    const uint32_t queued = queue.count < GroupQueue::kMost ? queue.count : GroupQueue::kMost;
    for (uint32_t i = threadIdx.x; i < queued * kNoiseGroup; i += kSampleThreads) {
      const float logit = queue.logits[i / kNoiseGroup][i % kNoiseGroup];
      const int column = queue.columns[i / kNoiseGroup] + static_cast<int>(i % kNoiseGroup);
      const int64_t index = p.draws.vocab_offset + column;
      if (!(logit > minus_infinity())) continue;
      drawing.offer_one(logit, drawing.keys.group(drawing.key, group_of(index), sample), index,
                        column);
    }
    const Candidate best = block_best<kSampleThreads>(drawing.best, of_warps);
    if (threadIdx.x == 0)
      candidates[(part.row * policy.parts + part.number) * p.draws.num_samples + sample] = best;
    __syncthreads();
  }
  launch_dependents();
}

// ---- the second stage ----

__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const Draws draws, const DrawResults results, const RowState* states,
                  const Candidate* candidates, const int64_t parts) {
  __shared__ Candidate of_warps[kFinishThreads / kWarpSize];
  grid_dependency_wait();
  const int64_t slot = blockIdx.x;
  const int64_t row = slot / draws.num_samples;
  const int sample = static_cast<int>(slot % draws.num_samples);
  Candidate best = no_candidate();
#pragma unroll 4
  for (int64_t part = threadIdx.x; part < parts; part += kFinishThreads)
    keep_better(best, candidates[(row * parts + part) * draws.num_samples + sample]);
  best = warp_best(best);
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kFinishThreads / kWarpSize; ++i) keep_better(best, of_warps[i]);
  if (sample == 0 && draws.offsets != nullptr && (draws.offset_per_row || row == 0))
    ++draws.offsets[row * draws.offset_stride];

  write_draw(draws, results, row, sample, best, states == nullptr ? RowState{} : states[row]);
}

__global__ void advance_kernel(int64_t* offset) {
  grid_dependency_wait();
  ++*offset;
}

// ---- filters ----

// Of a row, in global memory, all zero in the beginning.
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
    states[i] = {0, 0, 0, kKeyOfMinusInfinity + 1, 0, 0};
  launch_dependents();
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads)
    greatest_kernel(const GumbelSample p, const SamplePolicy policy, const FilterSpace space) {
  grid_dependency_wait();
  const Part part = part_of(p, policy);
  float greatest = minus_infinity();
  for_each_vector<T, kSampleVector>(p, part.row, part.begin, part.end,
                                    [&](int, const auto& logits) {
#pragma unroll
                                      for (int k = 0; k < kSampleVector; ++k)
                                        greatest = logits[k] > greatest ? logits[k] : greatest;
                                    });
  greatest = warp_greatest(greatest);
  if (threadIdx.x % kWarpSize == 0 && greatest > minus_infinity())
    atomicMax(&space.states[part.row].greatest, key_of<SampleMath>(greatest));
  launch_dependents();
}

__device__ __forceinline__ Scale scale_of(const GumbelSample& p, const RowState& state,
                                          int64_t row) {
  return {value_of_key<SampleMath>(state.greatest), heat_of(p.draws, row).inv_temperature};
}

// Whether a row has weights at all.
__device__ __forceinline__ bool has_weights(const GumbelSample& p, const RowState& state,
                                            int64_t row) {
  return state.greatest != 0 && !heat_of(p.draws, row).greedy;
}

// What a thread adds to bins: neighbours in the same bin at once, as in rows of equal logits all are.
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
  for_each_vector<T, kSampleVector>(p, part.row, part.begin, part.end,
                                    [&](int, const auto& logits) {
#pragma unroll
                                      for (int k = 0; k < kSampleVector; ++k) {
                                        if (!(logits[k] > minus_infinity())) continue;
                                        const float distance = scale.distance(logits[k]);
                                        run.add(counts, weights, distance_bin<SampleMath>(distance),
                                                weight_of<SampleMath>(distance, shift));
                                      }
                                    });
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

// Where a filter's bound lies: in `bin`, of whose logits the greatest `count` are wanted, or those with weights of
// `weight` in sum, or those from `key` on. `above` is the weight of all bins above.
struct Search {
  bool needed;
  int bin;
  uint32_t key;
  unsigned long long count, weight, above;
};

// Sums of two values over the threads before this one, and over all.
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

// All threads of a block of kThreads together.
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
      key = key_at_distance<SampleMath>(log_of_normal<SampleMath>(share), scale.greatest,
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

// Lists the keys of the bin.
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
          // A count past the end of the list says that it is not complete.
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
    // Digits from the top; of a digit, the search goes on among the keys that have it.
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

// ---- workspace ----

constexpr int64_t kSpaceAlignment = 128;

int64_t aligned_bytes(int64_t bytes) { return ceil_div(bytes, kSpaceAlignment) * kSpaceAlignment; }

struct Space {
  Candidate* candidates;
  FilterSpace filters;
  int64_t bytes;
};

bool fits_a_launch(const GumbelSample& p, const SamplePolicy& policy) {
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
  return p.draws.batch * policy.parts <= kMostBlocks &&
         p.draws.batch * p.draws.num_samples <= kMostBlocks;
}

bool needs_states(const GumbelSample& p) { return p.filters.any() || p.results.needs_sums(); }

// Of the form in which a cluster has a row, which pays for what needs states. NOTE: not for top_p of all of a row's
// logits, whose weights collide in the shared memory of a few blocks; after top_k there are few. But it may have fewer
// than those of a row of which strips are known, and then the one kernel is quicker.
ClusterPolicy cluster_policy_of(const GumbelSample& p, const DeviceInfo& info) {
  const bool weighs_all =
      p.filters.has_top_p && !p.filters.has_top_k && p.strips.greatest == nullptr;
  return needs_states(p) && !weighs_all ? cluster_policy(info, p.draws.batch, p.draws.vocab)
                                        : ClusterPolicy{0, 0};
}

Space space_of(const GumbelSample& p, const SamplePolicy& policy) {
  Space space{};
  char* base = static_cast<char*>(p.workspace);
  const auto take = [&](int64_t bytes) {
    char* at = base == nullptr ? nullptr : base + space.bytes;
    space.bytes += aligned_bytes(bytes);
    return static_cast<void*>(at);
  };
  const int64_t batch = p.draws.batch;
  space.candidates = static_cast<Candidate*>(
      take(batch * policy.parts * p.draws.num_samples * static_cast<int64_t>(sizeof(Candidate))));
  if (needs_states(p)) {
    space.filters.states =
        static_cast<RowState*>(take(batch * static_cast<int64_t>(sizeof(RowState))));
    space.filters.bins = static_cast<RowBins*>(take(batch * static_cast<int64_t>(sizeof(RowBins))));
  }
  if (p.filters.any())
    space.filters.lists =
        static_cast<uint32_t*>(take(batch * kListed * static_cast<int64_t>(sizeof(uint32_t))));
  return space;
}

// ---- launchers ----

template <typename T>
gpuError launch(const GumbelSample& p, const SamplePolicy& policy, const Space& space,
                const DeviceInfo& info, gpuStream stream) {
  const dim3 grid(static_cast<unsigned>(p.draws.batch * policy.parts)), block(kSampleThreads);
  const FilterSpace& filters = space.filters;
  gpuError error = gpuSuccess;
  const auto then = [&](auto kernel, dim3 its_grid, dim3 its_block, auto... args) {
    if (error == gpuSuccess) error = gpu_launch_after(kernel, its_grid, its_block, stream, args...);
  };
  if (needs_states(p)) {
    error = gpu_launch(&clear_kernel, dim3(info.multiprocessors), block, 0, 1, stream,
                       filters.states, reinterpret_cast<uint32_t*>(filters.bins), p.draws.batch);
    if (policy.parts > 0) {
      then(&greatest_kernel<T>, grid, block, p, policy, filters);
      then(&bins_kernel<T>, grid, block, p, policy, filters);
      const auto filter = [&](bool has, Filter which) {
        if (!has) return;
        then(&list_kernel<T>, grid, block, p, policy, filters, which);
        then(&choose_kernel<T>, dim3(static_cast<unsigned>(p.draws.batch)), dim3(kChooseThreads), p,
             filters, which);
      };
      filter(p.filters.has_top_k, Filter::top_k);
      filter(p.filters.has_top_p, Filter::top_p);
      filter(p.filters.has_min_p, Filter::min_p);
    }
  }
  if (policy.parts > 0) {
    // Without states there is nothing before it to wait for but other work on the stream.
    if (needs_states(p)) {
      then(&draw_kernel<T>, grid, block, p, policy, filters.states, space.candidates);
    } else {
      error = gpu_launch(&draw_kernel<T>, grid, block, 0, 1, stream, p, policy,
                         static_cast<const RowState*>(nullptr), space.candidates);
    }
  }
  if (error != gpuSuccess) return error;
  return gpu::draw_finish(p.draws, p.results, filters.states, space.candidates, policy.parts,
                          stream);
}

}  // namespace

namespace gpu {

gpuError draw_finish(const Draws& draws, const DrawResults& results, const RowState* states,
                     const Candidate* candidates, int64_t parts, gpuStream stream) {
  const dim3 grid(static_cast<unsigned>(draws.batch * draws.num_samples));
  return gpu_launch_after(&finish_kernel, grid, dim3(kFinishThreads), stream, draws, results,
                          states, candidates, parts);
}

gpuError advance_shared_offset(int64_t* offset, gpuStream stream) {
  return gpu_launch_after(&advance_kernel, dim3(1), dim3(1), stream, offset);
}

const char* advance_offset(int64_t* offset, void* stream) {
  return message_of(advance_shared_offset(offset, static_cast<gpuStream>(stream)));
}

int64_t gumbel_sample_workspace(const GumbelSample& p, int device) {
  const DeviceInfo& info = device_info(device);
  if (cluster_policy_of(p, info).blocks != 0) return 0;
  return space_of(p, sample_policy(info, p.draws.batch, p.draws.vocab)).bytes;
}

const char* gumbel_sample(const GumbelSample& p, int device, void* stream) {
  const DeviceInfo& info = device_info(device);
  const SamplePolicy policy = sample_policy(info, p.draws.batch, p.draws.vocab);
  if (!fits_a_launch(p, policy)) return "the batch has too many rows for one launch";
  const gpuStream on = static_cast<gpuStream>(stream);
#if !defined(USE_ROCM)
  const ClusterPolicy cluster = cluster_policy_of(p, info);
  if (p.strips.greatest != nullptr) return message_of(strips_sample(p, cluster, on));
  if (cluster.blocks != 0) return message_of(cluster_sample(p, cluster, on));
#endif
  const Space space = space_of(p, policy);
  switch (p.dtype) {
    case DType::float32: return message_of(launch<float>(p, policy, space, info, on));
    case DType::float16: return message_of(launch<float16>(p, policy, space, info, on));
    default: return message_of(launch<bfloat16>(p, policy, space, info, on));
  }
}

bool advances_offset(const Draws& draws) { return has_shared_offset(draws); }

bool takes_strips(const LmHead& head, const GumbelSample& p, int device) {
#if !defined(USE_ROCM)
  const DeviceInfo& info = device_info(device);
  // NOTE: or the head would advance an offset before the draw fails.
  return fits_a_launch(p, sample_policy(info, p.draws.batch, p.draws.vocab)) && p.filters.any() &&
         !p.results.needs_sums() && lm_head_sm90_serves(head, device) &&
         cluster_policy(info, p.draws.batch, p.draws.vocab).blocks != 0;
#else
  return false;
#endif
}

}  // namespace gpu
}  // namespace fuselage
