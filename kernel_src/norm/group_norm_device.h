// What the kernels of norm/group_norm.cu and norm/group_norm_backward.cu are made of: vectors of
// contiguous elements and of rows, moments, and what a channel is mapped with.
#pragma once

#include "common/dispatch_size.h"
#include "common/gpu_math.h"
#include "common/quotient.h"
#include "common/reduce.h"
#include "common/runtime_dtype.h"
#include "common/sigmoid_math.h"
#include "common/vector.h"
#include "norm/group_norm.h"

namespace fuselage {
namespace {

__device__ __forceinline__ bool is_aligned_16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

__device__ __forceinline__ int thread_of_block() {
  return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
}

// ---- vectors under way ----

// Vectors that a thread has loaded and not used yet. They are used one after the other in a loop
// that is not unrolled: its body is most of a kernel's code.
template <typename T, int kAhead>
struct VectorsAhead {
  using V = Vector<T, 16 / sizeof(T)>;
  V vectors[kAhead];

  __device__ __forceinline__ void next() {
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) vectors[i] = vectors[i + 1];
  }
};

// Vectors of some tensors that a thread copies to shared memory, kDepth - 1 of each under way, and
// uses in order. It reads nothing but what it has copied itself, so that
// nothing waits for other threads. `shared` has room for kDepth * kTensors vectors of each thread.
template <typename T, int kTensors, int kDepth>
struct CopiesAhead {
  using V = Vector<T, 16 / sizeof(T)>;
  V* const own;
  const int threads;  // vectors of a thread are so far apart
  int left;           // that are not started
  int used = 0, free = 0;

  __device__ __forceinline__ CopiesAhead(void* shared, int count)
      : own(static_cast<V*>(shared) + thread_of_block()),
        threads(static_cast<int>(blockDim.x * blockDim.y)),
        left(count) {}

  // start(targets, step): starts to copy the next vector of each tensor, `step` vectors apart.
  template <typename Start>
  __device__ __forceinline__ void fill(const Start& start) {
#pragma unroll 1
    for (int i = 0; i < kDepth - 1; ++i) start_next(start);
  }
  template <typename Start>
  __device__ __forceinline__ void next(V (&vectors)[kTensors], const Start& start) {
    cp_async_wait_group(kDepth - 2);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) vectors[t] = own[used + t * threads];
    advance(used);
    start_next(start);  // NOTE: in the place of what was used in the last round
  }

 private:
  __device__ __forceinline__ void advance(int& slot) const {
    slot = slot == (kDepth - 1) * kTensors * threads ? 0 : slot + kTensors * threads;
  }
  template <typename Start>
  __device__ __forceinline__ void start_next(const Start& start) {
    if (left > 0) start(own + free, threads);
    advance(free);
    --left;
    cp_async_commit_group();
  }
};

// ---- planes: contiguous elements. Neighbouring threads (x) have vectors side by side ----

// body(vector, column) for this thread's vectors of [0, span), kAhead of them under way where the
// tensor is aligned; otherwise they start anywhere. The order is the same. The plane has `size`
// elements; past them vectors are zero. NOTE: all threads of a block go round equally often.
template <typename T, int kAhead, typename Body>
__device__ __forceinline__ void for_vectors(const T* plane, int size, int span, bool aligned,
                                            const Body& body) {
  constexpr int N = 16 / sizeof(T);
  const int step = static_cast<int>(blockDim.x) * N;
  int column = static_cast<int>(threadIdx.x) * N;
#pragma unroll 1
  for (int base = 0; base < span;) {
    VectorsAhead<T, kAhead> ahead;
    int count = 1;
    if (aligned && base + kAhead * step <= size) {
      count = kAhead;
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        ahead.vectors[i] = Vector<T, N>::load(plane + column + i * step);
    } else {
      ahead.vectors[0] = load<false, N>(plane, column, size);
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      body(ahead.vectors[0], column);
      ahead.next();
      column += step;
    }
    base += count * step;
  }
}

// Writes one vector. NOTE: where it is not `aligned`, all lanes of the warp call together.
template <typename T, int N>
__device__ __forceinline__ void store_vector(const Vector<T, N>& vector, T* row, bool aligned,
                                             int column, int size) {
  if (!aligned) {
    store<false>(vector, row, column, size, column < size);
  } else if (column + N <= size) {
    vector.store(row + column);
  } else {
    Vector<T, N>::store_elements(vector, row, column, size);
  }
}

// ---- moments ----

// Of some values: how many, their mean, and the sum of squared deviations from it.
struct GroupMoments {
  float count, mean, squares;
};

// NOTE: the order counts: merged(a, b) and merged(b, a) may differ in the last bit.
__device__ __forceinline__ GroupMoments merged(const GroupMoments& a, const GroupMoments& b) {
  const float count = a.count + b.count, d = b.mean - a.mean;
  // Where `a` is empty the mean stays that of `b`, bit for bit.
  const float share = a.count > 0.0f ? b.count * reciprocal_of_normal(count) : 1.0f;
  // NOTE: the product with a.count first: where that is zero, d * d may be infinite.
  return {count, fmaf(d, share, a.mean), fmaf(a.count * share * d, d, a.squares + b.squares)};
}

// Of the lanes of a warp, in every one of them. The mean is that of a lane and how far the others
// are from it, so that it is exact where all are equal.
__device__ __forceinline__ GroupMoments warp_moments(const GroupMoments& m) {
  const int lane = thread_of_block() % kWarpSize;
  const int pivot = static_cast<int>(highest_of_warp(m.count > 0.0f ? lane : 0));
  const float mean = shuffle_from(m.mean, pivot, kWarpSize);
  const float count = warp_sum(m.count, kWarpSize);
  const float share = m.count * reciprocal_of_normal(fmaxf(count, 1.0f));
  const float from_pivot = m.count > 0.0f ? m.mean - mean : 0.0f;
  const float to_all = warp_sum(share * from_pivot, kWarpSize), d = from_pivot - to_all;
  return {count, mean + to_all, warp_sum(fmaf(m.count * d, d, m.squares), kWarpSize)};
}

// Of the threads of a block, whole warps of them, in every one. All of them call, once.
__device__ __forceinline__ GroupMoments block_moments(GroupMoments m) {
  __shared__ GroupMoments of_warps[kWarpSize];
  const int thread = thread_of_block();
  const int lane = thread % kWarpSize;
  m = warp_moments(m);
  if (lane == 0) of_warps[thread / kWarpSize] = m;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x * blockDim.y) / kWarpSize;
  return warp_moments(lane < warps ? of_warps[lane] : GroupMoments{0.0f, 0.0f, 0.0f});
}

// Of values that a thread sums up less a pivot, of which squares then lose the square of how far it
// is from the mean. It is the mean of the first vector, so that this is at most the vector's share
// of the squares: n values have n/N roundings of them more, if that vector lies outside of all
// others, and none if it does not.
template <int N>
struct ThreadMoments {
  float count = 0.0f, pivot = 0.0f, sum = 0.0f, squares = 0.0f;

  // The first `inside` values of a vector, of which the others are zero.
  __device__ __forceinline__ void add(const float (&values)[N], int inside = N) {
    if (count == 0.0f) {
      pivot = sum_of(values) * (1.0f / N);
      if (inside < N) pivot = __fdiv_rn(sum_of(values), static_cast<float>(max(inside, 1)));
    }
    count += static_cast<float>(inside);
    float d[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      d[k] = k < inside ? values[k] - pivot : 0.0f;
      squares = fmaf(d[k], d[k], squares);
    }
    sum += sum_of(d);
  }
  __device__ __forceinline__ GroupMoments moments() const {
    const float d = sum * reciprocal_of_normal(fmaxf(count, 1.0f));
    return {count, pivot + d, max_or_nan(fmaf(-sum, d, squares), 0.0f)};
  }

 private:
  static __device__ __forceinline__ float sum_of(const float (&values)[N]) {
    float parts[N];
#pragma unroll
    for (int k = 0; k < N; ++k) parts[k] = values[k];
#pragma unroll
    for (int step = N / 2; step > 0; step /= 2) {
#pragma unroll
      for (int k = 0; k < step; ++k) parts[k] += parts[k + step];
    }
    return parts[0];
  }
};

// Mean and rstd.
__device__ __forceinline__ float2 statistics_of(const GroupMoments& m, float eps) {
  return make_float2(m.mean, reciprocal_sqrt(__fdiv_rn(m.squares, m.count) + eps));
}

// ---- channels ----

// Weight and bias of a channel on their way, if it is `inside`.
struct ChannelValues {
  RuntimeValueLoading weight, bias;

  __device__ __forceinline__ ChannelValues(const GroupNormInput& p, int64_t channel,
                                           bool inside = true)
      : weight(inside ? p.weight : nullptr, p.weight_dtype, channel),
        bias(inside ? p.bias : nullptr, p.bias_dtype, channel) {}
  __device__ __forceinline__ float2 pair(const GroupNormInput& p) const {
    return make_float2(weight.finish(p.weight, p.weight_dtype, 1.0f),
                       bias.finish(p.bias, p.bias_dtype, 0.0f));
  }
};

// Mean and rstd, or another pair, of a group of a sample.
__device__ __forceinline__ float2 pair_of_group(const float* pairs, int64_t index) {
  return reinterpret_cast<const float2*>(pairs)[index];
}

// Values through the activation.
template <typename T, int N>
__device__ __forceinline__ void activate(bool silu, float (&y)[N]) {
  if (!silu) return;
#pragma unroll
  for (int k = 0; k < N; ++k) y[k] = gate_of<typename GpuMath<T>::Shared>(true, y[k]).value;
}

// The slope of silu at v, v * sigmoid(v). In half precision of few instructions: what 1 -
// sigmoid(v) loses where it is small counts for nothing in a slope of about one.
template <typename T>
__device__ __forceinline__ float silu_slope(float v) {
  if constexpr (sizeof(T) == sizeof(float)) return gate_of<GpuMath<T>>(true, v).slope;
  const float sigmoid = reciprocal_of_normal(1.0f + exp2_approximate(-1.4426950408889634f * v));
  return fmaf(sigmoid, fmaf(-v, sigmoid, v), sigmoid);
}

// grad_out, in its place times the slope of the activation at y.
template <typename T, int N>
__device__ __forceinline__ void through_activation(bool silu, const float (&y)[N],
                                                   float (&grad_out)[N]) {
  if (!silu) return;
#pragma unroll
  for (int k = 0; k < N; ++k) grad_out[k] *= silu_slope<T>(y[k]);
}

// ---- channels last: a thread has N channels of every so many positions ----

// A thread's channels, and the positions of its block: [first, last), of which it has every
// blockDim.y-th.
template <typename T>
struct GroupNormRows {
  static constexpr int N = 16 / sizeof(T);
  int64_t sample, chunk;
  int channel;  // the first; past the end where there are none
  int channels;
  int64_t first, last;

  __device__ __forceinline__ GroupNormRows(const GroupNormInput& p, const Divisor& chunks,
                                           unsigned block)
      : sample(quotient(block, chunks)),
        chunk(block - sample * p.chunks),
        channel(static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * N),
        channels(static_cast<int>(p.channels)),
        first(chunk * p.chunk_positions),
        last(min(first + p.chunk_positions, p.positions)) {}

  // Of a tensor, with a stride between samples: where this thread's first position is, and whether
  // its vectors are aligned.
  template <typename U>
  __device__ __forceinline__ U* start(U* data, int64_t stride) const {
    return data + sample * stride + (first + threadIdx.y) * channels;
  }
  __device__ __forceinline__ bool aligned(const T* start) const {
    return is_aligned_16(start) && channels % N == 0;
  }
  // Whether a row that starts there is whole words of 4 bytes.
  __device__ __forceinline__ bool has_words(const T* start) const {
    constexpr int kElements = 4 / sizeof(T);
    return reinterpret_cast<uintptr_t>(start) % 4 == 0 && channels % kElements == 0;
  }
  // So many positions does the block have, and this thread; as an int, as chunks are small.
  __device__ __forceinline__ int size() const { return static_cast<int>(last - first); }
  __device__ __forceinline__ int count() const { return count_of(static_cast<int>(threadIdx.y)); }
  __device__ __forceinline__ int count_of(int y) const {
    const int threads = static_cast<int>(blockDim.y);
    return size() > y ? (size() - y - 1) / threads + 1 : 0;
  }
  // Starts to copy this thread's vector of a row into shared memory; where it is neither aligned
  // nor of whole words, copies it. What is past the end of the row is zero.
  __device__ __forceinline__ void start_copy(Vector<T, N>* target, const T* row,
                                             bool aligned) const {
    if (aligned && channel < channels) {
      cp_async<16>(target, row + channel);
    } else if (has_words(row)) {
      constexpr int kElements = 4 / sizeof(T);
#pragma unroll
      for (int k = 0; k < N; k += kElements) {
        const bool inside = channel + k < channels;
        cp_async_zfill<4>(reinterpret_cast<uint32_t*>(target) + k / kElements,
                          inside ? row + channel + k : row, inside ? 4 : 0);
      }
    } else {
      *target = Vector<T, N>::load_elements(row, channel, channels);
    }
  }
  __device__ __forceinline__ void write(const Vector<T, N>& vector, T* row, bool aligned) const {
    if (aligned && channel < channels) {
      vector.store(row + channel);
    } else if (has_words(row)) {
      vector.store_words(row, channel, channels);
    } else {
      Vector<T, N>::store_elements(vector, row, channel, channels);
    }
  }
};

// As ThreadMoments, of each channel of a thread, of `count` positions: the pivot is its first
// value.
template <int N>
struct ChannelMoments {
  float pivot[N], sum[N] = {}, squares[N] = {};

  __device__ __forceinline__ void start(const float (&first)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) pivot[k] = first[k];
  }
  __device__ __forceinline__ void add(const float (&values)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float d = values[k] - pivot[k];
      sum[k] += d;
      squares[k] = fmaf(d, d, squares[k]);
    }
  }
  // Means and squares of the channels, zero where there are no positions.
  __device__ __forceinline__ void moments(int count, float (&means)[N],
                                          float (&squares_of)[N]) const {
    const float share = count == 0 ? 0.0f : reciprocal_of_normal(static_cast<float>(count));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float d = sum[k] * share;
      means[k] = count == 0 ? 0.0f : pivot[k] + d;
      squares_of[k] = max_or_nan(fmaf(-sum[k], d, squares[k]), 0.0f);
    }
  }
};

// Weights and biases of a thread's channels on their way: all loads are started together, and
// before tensors are copied, as each load waits for those that its thread has started before.
template <typename T>
struct ChannelLoading {
  static constexpr int N = 16 / sizeof(T);
  RuntimeLoading<T, N, false> weights, biases;

  __device__ __forceinline__ ChannelLoading(const GroupNormInput& p, const GroupNormRows<T>& rows) {
    weights.start(RuntimeValues<T>(p.weight, p.weight_dtype), rows.channel, rows.channels);
    biases.start(RuntimeValues<T>(p.bias, p.bias_dtype), rows.channel, rows.channels);
  }
  __device__ __forceinline__ void finish(const GroupNormInput& p, const GroupNormRows<T>& rows,
                                         float (&weight)[N], float (&bias)[N]) const {
    finish(weights, p.weight, p.weight_dtype, rows, 1.0f, weight);
    finish(biases, p.bias, p.bias_dtype, rows, 0.0f, bias);
  }

 private:
  static __device__ __forceinline__ void finish(const RuntimeLoading<T, N, false>& loading,
                                                const void* data, DType dtype,
                                                const GroupNormRows<T>& rows, float missing,
                                                float (&floats)[N]) {
    const RuntimeValues<T> values(data, dtype);
    if (values.is_packed()) {
      unpack(loading.packed, dtype, floats);  // of either type of half precision
    } else {
      loading.finish(values, rows.channel, rows.channels, missing, floats);
    }
  }
};

// f(k, group) for each of a thread's channels. Past the last channel, groups may not exist.
template <typename T, typename F>
__device__ __forceinline__ void for_groups_of_channels(const GroupNormInput& p,
                                                       const GroupNormRows<T>& rows,
                                                       const Divisor& group_channels, const F& f) {
  const int per_group = static_cast<int>(p.group_channels);
  int group = static_cast<int>(quotient(rows.channel, group_channels));
  int end = (group + 1) * per_group - rows.channel;
#pragma unroll
  for (int k = 0; k < GroupNormRows<T>::N; ++k) {
    if (k == end) {
      ++group;
      end += per_group;
    }
    f(k, group);
  }
}

// Pairs of the groups of a thread's channels. Past the last channel, of some group.
template <typename T, int N = GroupNormRows<T>::N>
__device__ __forceinline__ void pairs_of_channels(const GroupNormInput& p,
                                                  const GroupNormRows<T>& rows,
                                                  const Divisor& group_channels, const float* pairs,
                                                  float2 (&of_channels)[N]) {
  const int last = static_cast<int>(p.groups) - 1;
  for_groups_of_channels<T>(p, rows, group_channels, [&](int k, int group) {
    of_channels[k] = pair_of_group(pairs, rows.sample * p.groups + min(group, last));
  });
}

template <typename T>
__device__ __forceinline__ void write_vector(const Vector<T, 16 / sizeof(T)>& vector, T* target,
                                             bool aligned) {
  if (aligned) {
    vector.store(target);
  } else {
    Vector<T, 16 / sizeof(T)>::store_elements(vector, target, 0, 16 / sizeof(T));
  }
}

}  // namespace

struct GroupNormPolicy;
struct GroupNormGridPolicy;

// norm/group_norm_cluster.cu
gpuError launch_group_norm_cluster(const GroupNormForward& p, const GroupNormPolicy& policy,
                                   gpuStream stream);

// norm/group_norm_grid.cu. `refused`: not launched, as the stream has a part of the GPU alone.
gpuError launch_group_norm_grid(const GroupNormForward& p, const GroupNormGridPolicy& policy,
                                bool& refused, gpuStream stream);

// norm/group_norm_rows_grid.cu. `refused`: as above.
gpuError launch_group_norm_rows_grid(const GroupNormForward& p, const GroupNormPolicy& policy,
                                     int device, bool& refused, gpuStream stream);

// norm/group_norm_backward_cluster.cu
gpuError launch_group_norm_backward_cluster(const GroupNormBackward& p,
                                            const GroupNormPolicy& policy, gpuStream stream);

}  // namespace fuselage
