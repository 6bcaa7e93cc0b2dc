// gumbel_sample on the GPU: formulas in sample/sample.h.
//
// A row is cut into parts, one for a block. A thread has a noise group of neighbouring logits at a
// time; sample_draw.h says how most are ruled out without logarithms. A second kernel takes the
// best of the parts.
//
// Filters need no sort. Those for all GPUs are in gumbel_filters.h, those for GPUs with clusters in
// sample_cluster.cu, for rows that fit into a cluster.

#include "common/launch_policy.h"
#include "sample/gumbel_filters.h"
#include "sample/sample_draw.h"
#if !defined(USE_ROCM)
#include "sample/lm_head_sm90.h"
#include "sample/sample_cluster.h"
#include "sample/sample_strips.h"
#endif

namespace fuselage {
namespace {

// ---- the draw ----

// Noise groups that have a candidate, in shared memory. All threads score them together, when the
// part is read: most iterations find one in a few warps, where all lanes would wait for it.
struct GroupQueue {
  static constexpr uint32_t kMax = 64;
  float logits[kMax][kNoiseGroup];
  int columns[kMax];
  uint32_t count;

  __device__ __forceinline__ bool take(const float (&its)[kNoiseGroup], int column) {
    const uint32_t at = atomicAdd(&count, 1u);
    if (at >= kMax) return false;
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
  __shared__ uint32_t block_threshold;
  __shared__ __align__(16) GroupQueue queue;
  grid_dependency_wait();
  const Part part = part_of(p, policy);
  const RowTemperature temperature = row_temperature(p.draws, part.row);
  Drawing<KeptKeys> drawing{};
  drawing.key = key_of_row(p.draws, part.row);
  drawing.keys.set(drawing.key);
  drawing.scale = temperature.scale;
  drawing.unit = temperature.unit;
  drawing.shared_threshold = &block_threshold;
  const bool filtered = states != nullptr && !temperature.greedy;
  const float lowest =
      filtered ? value_of_key<SampleMath>(states[part.row].bound) : minus_infinity();
  for (int sample = 0; sample < p.draws.num_samples; ++sample) {
    drawing.sample = sample;
    drawing.best = no_candidate();
    drawing.threshold = minus_infinity();
    bool is_first = true;
    if (threadIdx.x == 0) block_threshold = queue.count = 0;
    __syncthreads();
    for_each_vector<T, kNoiseGroup>(
        p, part.row, part.begin, part.end, [&](int column, const auto& logits) {
          if (temperature.greedy) {
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
          if (is_first) drawing.init_threshold(allowed, groups);
          // The threshold of the whole block leaves hardly any candidate.
          if (is_first && !filtered) __syncthreads();
          is_first = false;
          drawing.load_threshold();
          bool is = drawing.has_candidate(allowed, groups);
          if (!warp_any(is)) return;
          if (is) is = !queue.take(allowed, column);
          if (warp_any(is)) drawing.offer_all(allowed, groups, index, column, !is);
        });
    __syncthreads();
    const uint32_t queued = queue.count < GroupQueue::kMax ? queue.count : GroupQueue::kMax;
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

// ---- workspace ----

constexpr int64_t kSpaceAlignment = 128;

int64_t aligned_bytes(int64_t bytes) { return ceil_div(bytes, kSpaceAlignment) * kSpaceAlignment; }

struct Space {
  Candidate* candidates;
  FilterSpace filters;
  int64_t bytes;
};

bool fits_a_launch(const GumbelSample& p, const SamplePolicy& policy) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  return p.draws.batch * policy.parts <= kMaxBlocks &&
         p.draws.batch * p.draws.num_samples <= kMaxBlocks;
}

bool needs_states(const GumbelSample& p) { return p.filters.any() || p.results.needs_sums(); }

// The policy of the form in which a cluster has a row, which is faster where there are filters or
// sums. NOTE: not for top_p without top_k, where the additions of all weights collide in the shared
// memory of a few blocks. With strips it is, as few rows need it.
ClusterPolicy cluster_policy_of(const GumbelSample& p, const DeviceInfo& info) {
  const bool is_top_p_alone =
      p.filters.has_top_p && !p.filters.has_top_k && p.strips.maxima == nullptr;
  return needs_states(p) && !is_top_p_alone ? cluster_policy(info, p.draws.batch, p.draws.vocab)
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
      then(&max_kernel<T>, grid, block, p, policy, filters);
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
    // Without states it depends on no kernel of this call.
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
  if (p.strips.maxima != nullptr) return message_of(strips_sample(p, cluster, on));
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
