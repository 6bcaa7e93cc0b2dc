// topk_softmax on the GPU: formulas in route/topk_softmax.h.
//
// A part of a warp has a row (route/topk_softmax_policy.h), and the keys that its experts are
// compared by in registers. The choice takes k rounds. In each, a lane finds the largest of its
// keys, the lanes agree on the largest of these, and the lane that has it drops it.
//
// Where few logits are compared, and rows are aligned, a lane makes keys of vectors of logits that
// lie `lanes` vectors apart, as of 16 experts in vectors of 4 and two lanes:
//
//   vector 0 of lane 0 | vector 0 of lane 1 | vector 1 of lane 0 | vector 1 of lane 1
//
// Otherwise a second kernel makes the keys in shared memory, an expert a lane, and looks at whole
// groups there. A lane then takes every `lanes`th of them.
//
// The lanes of a warp run through a kernel together. Those without a row take the last one, and
// write nothing.

#include "common/alignment.h"
#include "common/dispatch_size.h"
#include "common/reduce.h"
#include "common/runtime_dtype.h"
#include "common/softmax_device.h"
#include "route/topk_softmax_math.h"
#include "route/topk_softmax_policy.h"

namespace fuselage {
namespace {

template <typename T>
constexpr int kVectorSize = 16 / static_cast<int>(sizeof(T));

// ---- the row of a thread ----

struct Row {
  int64_t index;
  bool is_written;
  int lane, lanes;

  __device__ __forceinline__ explicit Row(int64_t rows) {
    index = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    is_written = index < rows;
    if (!is_written) index = rows - 1;
    lane = static_cast<int>(threadIdx.x);
    lanes = static_cast<int>(blockDim.x);
  }
};

// body(i) for this lane's share of [0, count): neighbouring lanes have neighbouring ones.
template <int kUnroll, typename Body>
__device__ __forceinline__ void for_each_of_lane(const Row& row, int count, Body body) {
#pragma unroll kUnroll
  for (int i = row.lane; i < count; i += row.lanes) body(i);
}

// ---- scores, in shared memory ----
//
// NOTE: in steps, each with one choice of dtype or score: the compiler makes a loop of each case,
// and in one step there would be one for every combination. A lane reads what it wrote itself.

// Floats in memory that is read as integers, too.
struct SharedFloats {
  int32_t* bits;

  __device__ __forceinline__ float get(int i) const { return GpuFloats::floats_of(bits[i]); }
  __device__ __forceinline__ void set(int i, float value) const {
    bits[i] = GpuFloats::integers_of(value);
  }
};

// The logits of a row.
__device__ __forceinline__ void read_logits(const ExpertLogits& logits, const Row& row,
                                            SharedFloats x) {
  const int64_t first = row.index * logits.stride;
  for_each_of_lane<4>(row, logits.experts,
                      [&](int i) { x.set(i, load_value(logits.data, logits.dtype, first + i)); });
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal_of_normal(1.0f + expf(-x)); }

// Makes scores of logits. Those of softmax are not divided by their sum. `max`: of the row.
__device__ __forceinline__ void make_scores(const Row& row, int count, Score score, float max,
                                            SharedFloats x) {
  if (score == Score::softmax) {
    for_each_of_lane<1>(row, count, [&](int i) { x.set(i, expf(x.get(i) - max)); });
  } else {
    for_each_of_lane<1>(row, count, [&](int i) { x.set(i, sigmoid(x.get(i))); });
  }
}

// Of the numbers of a row: a NaN is left to the sum.
__device__ __forceinline__ float max_of(const Row& row, int count, SharedFloats x) {
  float max = minus_infinity();
  for_each_of_lane<1>(row, count, [&](int i) { max = fmaxf(max, x.get(i)); });
  return warp_max(max, row.lanes);
}

__device__ __forceinline__ float sum_of(const Row& row, int count, SharedFloats x) {
  float sum = 0.0f;
  for_each_of_lane<1>(row, count, [&](int i) { sum += x.get(i); });
  return warp_sum(sum, row.lanes);
}

// ---- keys in shared memory ----

// What the scores of a row are made with: the maximum of softmax, and what they are divided by.
struct RowSums {
  float max, sum;
};

__device__ __forceinline__ RowSums make_keys(const TopkForward& p, const Row& row, int32_t* keys) {
  const int experts = p.logits.experts;
  const SharedFloats x{keys};
  RowSums sums{0.0f, 1.0f};
  read_logits(p.logits, row, x);
  if (p.sums_scores()) sums.max = max_of(row, experts, x);
  if (p.compares_scores()) {
    make_scores(row, experts, p.score, sums.max, x);
    if (p.sums_scores()) {
      sums.sum = sum_of(row, experts, x);
      for_each_of_lane<1>(row, experts, [&](int i) { x.set(i, x.get(i) / sums.sum); });
    }
    if (p.bias != nullptr) {
      for_each_of_lane<1>(row, experts,
                          [&](int i) { x.set(i, x.get(i) + load_value(p.bias, p.bias_dtype, i)); });
    }
  } else if (p.sums_scores()) {
    float sum = 0.0f;
    for_each_of_lane<1>(row, experts, [&](int i) { sum += expf(x.get(i) - sums.max); });
    sums.sum = warp_sum(sum, row.lanes);
  }
  for_each_of_lane<1>(row, experts, [&](int i) { keys[i] = key_of<GpuFloats>(x.get(i)); });
  return sums;
}

// body(key) of each expert of a group. The first is another one for each group, which mostly is in
// another bank of shared memory.
template <typename Body>
__device__ __forceinline__ void for_each_of_group(int32_t* keys, int group, int size, Body body) {
  int i = group % size;
#pragma unroll 1
  for (int step = 0; step < size; ++step) {
    body(keys[group * size + i]);
    i = i + 1 < size ? i + 1 : 0;
  }
}

// Takes the keys of groups that are not among the best. Those of the groups come after `keys`.
__device__ __forceinline__ void limit_to_groups(const TopkForward& p, const Row& row,
                                                int32_t* keys) {
  int32_t* of_groups = keys + p.logits.experts;
  for_each_of_lane<1>(row, p.groups, [&](int group) {
    LargestKeys largest = {kNoKey, kNoKey};
    for_each_of_group(keys, group, p.group_size, [&](int32_t key) { add_key(largest, key); });
    of_groups[group] = group_key<GpuFloats>(largest, p.score);
  });
  warp_barrier();
  for_each_of_lane<1>(row, p.groups, [&](int group) {
    int before = 0;
#pragma unroll 1
    for (int other = 0; other < p.groups; ++other) before += comes_before(of_groups, other, group);
    if (before < p.chosen_groups) return;
    for_each_of_group(keys, group, p.group_size, [](int32_t& key) { key = kNoKey; });
  });
  warp_barrier();
}

// ---- the choice ----

struct Choice {
  int32_t key;
  int expert;

  // NOTE: without `||` and `&&`, which make branches.
  __device__ __forceinline__ bool comes_before(const Choice& other) const {
    return (key > other.key) | ((key == other.key) & (expert < other.expert));
  }
};

// The first of the choices of `lanes` neighbouring lanes, in every one of them.
__device__ __forceinline__ Choice first_of_lanes(Choice choice, int lanes) {
#pragma unroll 1
  for (int mask = lanes >> 1; mask > 0; mask >>= 1) {
    const Choice other{shuffle_xor(choice.key, mask, lanes),
                       shuffle_xor(choice.expert, mask, lanes)};
    if (other.comes_before(choice)) choice = other;
  }
  return choice;
}

// The keys of a lane: kVectors vectors of N experts.
template <int kVectors, int N>
struct LaneKeys {
  const Row& row;
  int32_t keys[kVectors][N];

  __device__ __forceinline__ int column_of(int j) const { return (j * row.lanes + row.lane) * N; }

  // body(key, expert) of each, in the order of experts.
  template <typename Body>
  __device__ __forceinline__ void for_each(Body body) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) body(keys[j][i], column_of(j) + i);
    }
  }

  // Those of the logits, in vectors of T.
  template <typename T>
  __device__ __forceinline__ void load_logits(const ExpertLogits& logits) {
    using V = Vector<T, N>;
    const T* data = static_cast<const T*>(logits.data) + row.index * logits.stride;
    V vectors[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      vectors[j] = column_of(j) < logits.experts ? V::load(data + column_of(j)) : V::zero();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float x[N];
      unpack(vectors[j], logits.dtype, x);
#pragma unroll
      for (int i = 0; i < N; ++i)
        keys[j][i] = column_of(j) < logits.experts ? key_of<GpuFloats>(x[i]) : kNoKey;
    }
  }

  __device__ __forceinline__ void load_shared(const int32_t* of_row, int experts) {
    for_each([&](int32_t& key, int expert) { key = expert < experts ? of_row[expert] : kNoKey; });
  }

  // Writes k experts into `chosen`, in shared memory.
  __device__ __forceinline__ void choose(int k, int32_t* chosen) {
    int taken = -1;
#pragma unroll 1
    for (int j = 0; j < k; ++j) {
      Choice best{kNoKey, 0};
      for_each([&](int32_t& key, int expert) {
        if (expert == taken) key = kNoKey;
        if (key > best.key) best = {key, expert};
      });
      taken = first_of_lanes(best, row.lanes).expert;
      if (row.lane == 0) chosen[j] = taken;
    }
  }
};

// ---- the forward ----

// Weights and indices, a chosen expert a lane. `scores`: room for those of the chosen.
__device__ __forceinline__ void write_choice(const TopkForward& p, const Row& row, RowSums sums,
                                             const int32_t* chosen, SharedFloats scores) {
  const int64_t first = row.index * p.logits.stride;
  const auto logit_at = [&](int j) {
    return load_value(p.logits.data, p.logits.dtype, first + chosen[j]);
  };
  // Without a sum over all, experts were compared by their logits.
  if (!p.sums_scores()) sums.max = logit_at(0);
  for_each_of_lane<1>(row, p.k, [&](int j) { scores.set(j, logit_at(j)); });
  make_scores(row, p.k, p.score, sums.max, scores);
  if (p.renormalize) sums.sum = sum_of(row, p.k, scores) + divisor_epsilon(p.score);
  if (!row.is_written) return;
  for_each_of_lane<1>(row, p.k, [&](int j) {
    p.weights[row.index * p.k + j] = scores.get(j) / sums.sum;
    p.indices[row.index * p.k + j] = chosen[j];
  });
}

// The shared memory of a row.
struct RowMemory {
  int32_t* chosen;      // [k]
  SharedFloats scores;  // [k]: of the chosen
  int32_t* keys;        // [experts + groups], where the policy has room for them

  __device__ __forceinline__ RowMemory(const TopkForward& p, const TopkPolicy& policy) {
    extern __shared__ int32_t shared[];
    chosen = shared + threadIdx.y * policy.shared_words;
    scores = {chosen + p.k};
    keys = chosen + 2 * p.k;
  }
};

// Of few experts, which are compared by their logits.
template <typename T>
__global__ void __launch_bounds__(kTopkThreads)
    forward_kernel(const TopkForward p, const TopkPolicy policy) {
  const Row row(p.logits.rows);
  const RowMemory memory(p, policy);
  LaneKeys<kFewKeys / kVectorSize<T>, kVectorSize<T>> lane{row, {}};
  lane.template load_logits<T>(p.logits);
  lane.choose(p.k, memory.chosen);
  warp_barrier();
  write_choice(p, row, {0.0f, 1.0f}, memory.chosen, memory.scores);
}

// Of any, with keys in shared memory.
template <int kKeys>
__global__ void __launch_bounds__(kTopkThreads)
    shared_forward_kernel(const TopkForward p, const TopkPolicy policy) {
  const Row row(p.logits.rows);
  const RowMemory memory(p, policy);
  const RowSums sums = make_keys(p, row, memory.keys);
  warp_barrier();
  if (p.has_limited_groups()) limit_to_groups(p, row, memory.keys);
  LaneKeys<kKeys, 1> lane{row, {}};
  lane.load_shared(memory.keys, p.logits.experts);
  lane.choose(p.k, memory.chosen);
  warp_barrier();
  write_choice(p, row, sums, memory.chosen, memory.scores);
}

// ---- the backward ----

__global__ void __launch_bounds__(kTopkThreads)
    backward_kernel(const TopkBackward p, const TopkPolicy policy) {
  extern __shared__ int32_t shared[];
  const Row row(p.logits.rows);
  const SharedFloats x{shared + threadIdx.y * policy.shared_words};
  const float* weights = p.weights + row.index * p.k;
  const float* grad_weights = p.grad_weights + row.index * p.k;
  const int64_t first_grad = row.index * p.logits.experts;

  float mean = 0.0f;
  if (p.subtracts_mean()) {
    for_each_of_lane<1>(row, p.k, [&](int j) { mean += grad_weights[j] * weights[j]; });
    mean = warp_sum(mean, row.lanes);
  }
  // First all as if they were not chosen.
  float of_score = 0.0f;
  if (p.reaches_all()) {
    read_logits(p.logits, row, x);
    make_scores(row, p.logits.experts, p.score, max_of(row, p.logits.experts, x), x);
    of_score = -mean / sum_of(row, p.logits.experts, x);
  }
  if (row.is_written) {
    for_each_of_lane<1>(row, p.logits.experts, [&](int i) {
      const float grad = p.reaches_all() ? of_score * x.get(i) : 0.0f;
      store_value(p.grad_logits, p.logits.dtype, first_grad + i, grad);
    });
  }
  warp_barrier();
  if (!row.is_written) return;
  for_each_of_lane<1>(row, p.k, [&](int j) {
    const int64_t expert = p.indices[row.index * p.k + j];
    if (expert < 0 || expert >= p.logits.experts) return;
    float grad = weights[j] * (grad_weights[j] - mean);
    if (p.score == Score::sigmoid) {
      const int64_t at = row.index * p.logits.stride + expert;
      grad *= sigmoid(-load_value(p.logits.data, p.logits.dtype, at));
    }
    store_value(p.grad_logits, p.logits.dtype, first_grad + expert, grad);
  });
}

// ---- launchers ----

constexpr const char* kTooManyRows = "`logits` has too many rows for one launch";

template <typename Kernel, typename... Args>
const char* launch(Kernel kernel, const ExpertLogits& logits, const TopkPolicy& policy,
                   void* stream, const Args&... args) {
  const int64_t blocks = ceil_div(logits.rows, policy.rows_per_block);
  if (blocks > kMaxTopkBlocks) return kTooManyRows;
  const int shared_bytes =
      policy.rows_per_block * policy.shared_words * static_cast<int>(sizeof(int32_t));
  return message_of(gpu_launch(kernel, dim3(static_cast<unsigned>(blocks)),
                               dim3(policy.lanes, policy.rows_per_block), shared_bytes, 1,
                               static_cast<gpuStream>(stream), args...));
}

}  // namespace

namespace gpu {

const char* topk_softmax_forward(const TopkForward& p, int, void* stream) {
  const ExpertLogits& logits = p.logits;
  const bool is_aligned =
      aligned_rows(logits.data, logits.rows == 1 ? 0 : logits.stride, logits.experts, logits.dtype);
  const bool by_logit = !p.compares_scores() && !p.sums_scores() && !p.has_limited_groups();
  const TopkPolicy policy = topk_policy(logits.experts, p.k, p.groups, by_logit && is_aligned);
  const auto kernel = policy.keys == kManyKeys         ? &shared_forward_kernel<kManyKeys>
                      : policy.has_shared_keys         ? &shared_forward_kernel<kFewKeys>
                      : logits.dtype == DType::float32 ? &forward_kernel<float>
                                                       : &forward_kernel<bfloat16>;
  return launch(kernel, logits, policy, stream, p, policy);
}

const char* topk_softmax_backward(const TopkBackward& p, int, void* stream) {
  const TopkPolicy policy = topk_gradient_policy(p.logits.experts, p.reaches_all());
  return launch(&backward_kernel, p.logits, policy, stream, p, policy);
}

}  // namespace gpu
}  // namespace fuselage
