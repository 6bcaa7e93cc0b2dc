// What the kernels of norm/group_norm.cu and norm/group_norm_backward.cu are made of: vectors of
// contiguous elements and of rows, moments, and what a channel is mapped with.
#pragma once

#include "common/dispatch_size.h"
#include "common/gpu_math.h"
#include "common/quotient.h"
#include "common/runtime_dtype.h"
#include "common/sigmoid_math.h"
#include "common/vector.h"
#include "norm/group_norm.h"

namespace fuselage {
namespace {

__device__ __forceinline__ bool is_aligned_16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// ---- vectors under way ----

// Vectors of some tensors that a thread has loaded and not used yet. They are used one after the
// other in a loop that is not unrolled: its body is most of a kernel's code.
template <typename T, int kTensors, int kAhead>
struct VectorsAhead {
  using V = Vector<T, 16 / sizeof(T)>;
  V vectors[kAhead][kTensors];

  __device__ __forceinline__ void next() {
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) {
#pragma unroll
      for (int t = 0; t < kTensors; ++t) vectors[i][t] = vectors[i + 1][t];
    }
  }
};

// ---- planes: contiguous elements. Neighbouring threads (x) have vectors side by side ----

// body(vectors, column) for this thread's vectors of [0, span), kAhead of them under way where all
// tensors are aligned; otherwise they start anywhere. The order is the same. The planes have `size`
// elements; past them vectors are zero. NOTE: all threads of a block go round equally often.
template <typename T, int kAhead, int kTensors, typename Body>
__device__ __forceinline__ void for_vectors(const T* const (&rows)[kTensors], int size, int span,
                                            bool aligned, const Body& body) {
  constexpr int N = 16 / sizeof(T);
  const int step = static_cast<int>(blockDim.x) * N;
  int column = static_cast<int>(threadIdx.x) * N;
#pragma unroll 1
  for (int base = 0; base < span;) {
    VectorsAhead<T, kTensors, kAhead> ahead;
    int count = 1;
    if (aligned && base + kAhead * step <= size) {
      count = kAhead;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int t = 0; t < kTensors; ++t)
          ahead.vectors[i][t] = Vector<T, N>::load(rows[t] + column + i * step);
      }
    } else {
#pragma unroll
      for (int t = 0; t < kTensors; ++t)
        ahead.vectors[0][t] = load<false, N>(rows[t], column, size);
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

// Of this lane and of that whose index differs in the bit `mask`, in both. NOTE: values are chosen
// one by one: of two structs the compiler chooses addresses, and keeps them in memory.
__device__ __forceinline__ GroupMoments merged_across(const GroupMoments& m, int mask, int lane) {
  const float count = shuffle_xor(m.count, mask, kWarpSize);
  const float mean = shuffle_xor(m.mean, mask, kWarpSize);
  const float squares = shuffle_xor(m.squares, mask, kWarpSize);
  const bool upper = (lane & mask) != 0;
  return merged({upper ? count : m.count, upper ? mean : m.mean, upper ? squares : m.squares},
                {upper ? m.count : count, upper ? m.mean : mean, upper ? m.squares : squares});
}

// Of the lanes of a warp, in every one of them.
__device__ __forceinline__ GroupMoments warp_moments(GroupMoments m, int lane) {
#pragma unroll 1
  for (int mask = 1; mask < kWarpSize; mask *= 2) m = merged_across(m, mask, lane);
  return m;
}

// Of the threads of a block, whole warps of them, in every one. All of them call, once.
__device__ __forceinline__ GroupMoments block_moments(GroupMoments m) {
  __shared__ GroupMoments of_warps[kWarpSize];
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const int lane = thread % kWarpSize;
  m = warp_moments(m, lane);
  if (lane == 0) of_warps[thread / kWarpSize] = m;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x * blockDim.y) / kWarpSize;
  return warp_moments(lane < warps ? of_warps[lane] : GroupMoments{0.0f, 0.0f, 0.0f}, lane);
}

// Of the first `count` values of a vector, about their own mean: the others are zero.
template <int N>
__device__ __forceinline__ GroupMoments moments_of(const float (&values)[N], int count) {
  float parts[N];
#pragma unroll
  for (int k = 0; k < N; ++k) parts[k] = values[k];
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2) {
#pragma unroll
    for (int k = 0; k < step; ++k) parts[k] += parts[k + step];
  }
  GroupMoments m{static_cast<float>(count), parts[0] * (1.0f / N), 0.0f};
  if (count < N) m.mean = __fdiv_rn(parts[0], fmaxf(m.count, 1.0f));
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float d = k < count ? values[k] - m.mean : 0.0f;
    m.squares = fmaf(d, d, m.squares);
  }
  return m;
}

// ---- channels ----

__device__ __forceinline__ float value_or(const void* data, DType dtype, int64_t i, float missing) {
  return data == nullptr ? missing : load_value(data, dtype, i);
}

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

// grad_out, in its place times the slope of the activation at y.
template <typename T, int N>
__device__ __forceinline__ void through_activation(bool silu, const float (&y)[N],
                                                   float (&grad_out)[N]) {
  if (!silu) return;
#pragma unroll
  for (int k = 0; k < N; ++k) grad_out[k] *= gate_of<typename GpuMath<T>::Shared>(true, y[k]).slope;
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
  // So many positions does this thread have; as an int, as chunks are small.
  __device__ __forceinline__ int count() const { return count_of(static_cast<int>(threadIdx.y)); }
  __device__ __forceinline__ int count_of(int y) const {
    const int size = static_cast<int>(last - first), threads = static_cast<int>(blockDim.y);
    return size > y ? (size - y - 1) / threads + 1 : 0;
  }
  // body(vectors, row) for this thread's vectors of its rows, kAhead of them under way where all
  // tensors are aligned. The order is the same. `row`: elements from a tensor's start to it.
  template <int kAhead, int kTensors, typename Body>
  __device__ __forceinline__ void for_rows(const T* const (&tensors)[kTensors], bool aligned,
                                           const Body& body) const {
    const int64_t step = int64_t{blockDim.y} * channels;
    const bool ahead_fits = aligned && channel < channels;
    int64_t row = 0;
#pragma unroll 1
    for (int left = count(); left > 0;) {
      VectorsAhead<T, kTensors, kAhead> ahead;
      int count = 1;
      if (ahead_fits && left >= kAhead) {
        count = kAhead;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
          for (int t = 0; t < kTensors; ++t)
            ahead.vectors[i][t] = Vector<T, N>::load(tensors[t] + row + i * step + channel);
        }
      } else {
#pragma unroll
        for (int t = 0; t < kTensors; ++t)
          ahead.vectors[0][t] = Vector<T, N>::load_elements(tensors[t] + row, channel, channels);
      }
      left -= count;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        body(ahead.vectors[0], row);
        ahead.next();
        row += step;
      }
    }
  }
  __device__ __forceinline__ void write(const Vector<T, N>& vector, T* row, bool aligned) const {
    if (aligned && channel < channels) {
      vector.store(row + channel);
    } else {
      Vector<T, N>::store_elements(vector, row, channel, channels);
    }
  }
  // f(k, channel) of the channels that there are.
  template <typename F>
  __device__ __forceinline__ void for_channels(const F& f) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (channel + k < channels) f(k, channel + k);
    }
  }
};

}  // namespace
}  // namespace fuselage
