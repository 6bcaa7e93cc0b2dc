// The backward of group_norm on the GPU (formulas: norm/group_norm.h): four kernels, but for what
// norm/group_norm_backward_cluster.cu does in one:
//
//   sums       blocks have a chunk each, and leave A and B of every channel in it
//   reduce     adds these up (common/reduce_partials.h); grad_weight and grad_bias come of it
//   means      a warp for each group takes the two means over it
//   gradient   blocks have the same chunks, and write grad_x
//
// Flat, a block has a plane of positions of one channel, or a chunk of it; small planes share one.
// Channels last it has some positions of all channels, or of a tile of them.
#include "norm/group_norm.h"

#include "common/dispatch.h"
#include "common/reduce.h"
#include "common/reduce_partials.h"
#include "norm/group_norm_device.h"
#include "norm/group_norm_policy.h"

namespace fuselage {
namespace {

// What N elements are mapped with, of one channel or of one each.
template <int N>
struct GradientFactors {
  float mean[N], rstd[N], weight[N], bias[N];

  __device__ __forceinline__ void set(int k, const GroupNormBackward& p, int64_t sample,
                                      int64_t channel, int64_t group) {
    const float2 statistics = pair_of_group(p.statistics, sample * p.groups + group);
    mean[k] = statistics.x;
    rstd[k] = statistics.y;
    weight[k] = value_or(p.weight, p.weight_dtype, channel, 1.0f);
    bias[k] = value_or(p.bias, p.bias_dtype, channel, 0.0f);
  }
};

// a and xhat of N elements, in place of grad_out and x. Element k has the factors of its channel,
// or those of the one that there is.
template <typename T, int N, int kChannels>
__device__ __forceinline__ void terms_of(const GradientFactors<kChannels>& factors, bool silu,
                                         float (&grad_out)[N], float (&x)[N]) {
  float y[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int c = kChannels == 1 ? 0 : k;
    x[k] = (x[k] - factors.mean[c]) * factors.rstd[c];
    y[k] = fmaf(x[k], factors.weight[c], factors.bias[c]);
  }
  through_activation<T>(silu, y, grad_out);
}

// ---- flat ----

struct PlaneDivisors {
  Divisor chunks, channels, group_channels;
};

// A plane of a thread: a chunk of the positions of a channel of a sample.
template <typename T>
struct Plane {
  int64_t chunk, sample, channel, group;
  int64_t first;  // of the positions
  bool exists;
  int size;  // of the chunk; 0 where there is no such plane
  int span;  // of all threads of the block, which go round equally often

  __device__ __forceinline__ Plane(const GroupNormBackward& p, const PlaneDivisors& divisors,
                                   unsigned block) {
    const int64_t planes = quotient(block, divisors.chunks);
    chunk = block - planes * p.chunks;
    const int64_t row = planes * blockDim.y + threadIdx.y;
    exists = row < p.samples * p.channels;
    sample = exists ? quotient(row, divisors.channels) : 0;
    channel = exists ? row - sample * p.channels : 0;
    group = quotient(channel, divisors.group_channels);
    first = chunk * p.chunk_positions;
    span = static_cast<int>(min(p.chunk_positions, p.positions - first));
    size = exists ? span : 0;
  }
  template <typename U>
  __device__ __forceinline__ U* start(const GroupNormBackward& p, U* data, int64_t stride) const {
    return data + sample * stride + channel * p.positions + first;
  }
  // NOTE: the same for all planes of a block.
  __device__ __forceinline__ bool aligned(const GroupNormBackward& p, const T* data,
                                          int64_t stride) const {
    constexpr int N = 16 / sizeof(T);
    if (blockDim.y == 1) return is_aligned_16(start(p, data, stride));
    return is_aligned_16(data) && stride % N == 0 && p.positions % N == 0;
  }
};

// Grid: the chunks of every blockDim.y planes. Block: (threads of a plane, planes).
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kGroupNormRowsThreads, 2)
    group_norm_planes_kernel(const GroupNormBackward p, const PlaneDivisors divisors) {
  constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  const Plane<T> plane(p, divisors, kGradient ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const int64_t out_stride = p.channels * p.positions;
  const T* all_x = static_cast<const T*>(p.x);
  const T* all_grad_out = static_cast<const T*>(p.grad_out);
  T* all_grad_x = static_cast<T*>(p.grad_x);
  const T* x = plane.start(p, all_x, p.x_stride);
  const T* grad_out = plane.start(p, all_grad_out, p.grad_out_stride);
  T* grad_x = kGradient ? plane.start(p, all_grad_x, out_stride) : nullptr;
  const bool aligned = plane.aligned(p, all_x, p.x_stride) &&
                       plane.aligned(p, all_grad_out, p.grad_out_stride) &&
                       (!kGradient || plane.aligned(p, all_grad_x, out_stride));
  GradientFactors<1> factors;
  factors.set(0, p, plane.sample, plane.channel, plane.group);
  [[maybe_unused]] float2 means{};
  if constexpr (kGradient) {
    grid_dependency_wait();
    means = pair_of_group(p.means, plane.sample * p.groups + plane.group);
  }

  float sums[2] = {};
  for_vectors<T, kGroupNormFewAhead, 2>(
      {grad_out, x}, plane.size, aligned ? plane.size : plane.span, aligned,
      [&](const V(&vectors)[2], int column) {
        float a[N], xhat[N];
        unpack(vectors[0], p.dtype, a);
        unpack(vectors[1], p.dtype, xhat);
        terms_of<T>(factors, p.silu, a, xhat);
        if constexpr (kGradient) {
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const float of_means = fmaf(xhat[k], means.y, means.x);
            a[k] = factors.rstd[0] * fmaf(a[k], factors.weight[0], -of_means);
          }
          store_vector(pack<T>(a, p.dtype), grad_x, aligned, column, plane.size);
        } else {
          // NOTE: past the end grad_out is zero.
          float of_vector[2] = {};
#pragma unroll
          for (int k = 0; k < N; ++k) {
            of_vector[0] += a[k];
            of_vector[1] = fmaf(a[k], xhat[k], of_vector[1]);
          }
          sums[0] += of_vector[0];
          sums[1] += of_vector[1];
        }
      });
  if constexpr (!kGradient) {
    __shared__ RowSumScratch<2> scratch[1];
    row_sum<false>(sums, 1, scratch, 0);
    if (threadIdx.x == 0 && plane.exists) {
      float* partial =
          p.partials + (plane.sample * p.chunks + plane.chunk) * 2 * p.channels + plane.channel;
      partial[0] = sums[0];
      partial[p.channels] = sums[1];
    }
    launch_dependents();
  }
}

// ---- channels last ----

template <typename T>
__device__ __forceinline__ GradientFactors<16 / sizeof(T)> factors_of(
    const GroupNormBackward& p, const GroupNormRows<T>& rows, const Divisor& group_channels) {
  GradientFactors<16 / sizeof(T)> factors{};
  rows.for_channels([&](int k, int channel) {
    factors.set(k, p, rows.sample, channel, quotient(channel, group_channels));
  });
  return factors;
}

// Grid: (chunks of all samples, tiles). Block: (threads_x, threads_y).
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kGroupNormRowsThreads, 2)
    group_norm_rows_backward_kernel(const GroupNormBackward p, const Divisor chunks,
                                    const Divisor group_channels) {
  constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  const GroupNormRows<T> rows(p, chunks, kGradient ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const T* x = rows.start(static_cast<const T*>(p.x), p.x_stride);
  const T* grad_out = rows.start(static_cast<const T*>(p.grad_out), p.grad_out_stride);
  T* grad_x = kGradient ? rows.start(static_cast<T*>(p.grad_x), p.channels * p.positions) : nullptr;
  const bool aligned =
      rows.aligned(x) && rows.aligned(grad_out) && (!kGradient || rows.aligned(grad_x));
  const auto factors = factors_of(p, rows, group_channels);
  [[maybe_unused]] float of_a[N] = {}, of_product[N] = {};  // means
  if constexpr (kGradient) {
    grid_dependency_wait();
    rows.for_channels([&](int k, int channel) {
      const float2 means =
          pair_of_group(p.means, rows.sample * p.groups + quotient(channel, group_channels));
      of_a[k] = means.x;
      of_product[k] = means.y;
    });
  }

  [[maybe_unused]] float sums[2][N] = {};
  rows.template for_rows<kGroupNormFewAhead, 2>(
      {grad_out, x}, aligned, [&](const V(&vectors)[2], int64_t row) {
        float a[N], xhat[N];
        unpack(vectors[0], p.dtype, a);
        unpack(vectors[1], p.dtype, xhat);
        terms_of<T>(factors, p.silu, a, xhat);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          if constexpr (kGradient) {
            const float of_means = fmaf(xhat[k], of_product[k], of_a[k]);
            a[k] = factors.rstd[k] * fmaf(a[k], factors.weight[k], -of_means);
          } else {
            sums[0][k] += a[k];
            sums[1][k] = fmaf(a[k], xhat[k], sums[1][k]);
          }
        }
        if constexpr (kGradient) rows.write(pack<T>(a, p.dtype), grad_x + row, aligned);
      });
  if constexpr (!kGradient) {
    // Over the positions (y) of the block, in order.
    __shared__ float2 of_threads[kGroupNormRowsThreads * N];
    const int width = static_cast<int>(blockDim.x) * N;
    const int own = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll
    for (int k = 0; k < N; ++k) of_threads[own * N + k] = make_float2(sums[0][k], sums[1][k]);
    __syncthreads();
    const int tile_first = static_cast<int>(blockIdx.y) * width;
    float* partial = p.partials + (rows.sample * p.chunks + rows.chunk) * 2 * p.channels;
#pragma unroll 1
    for (int i = own; i < width && tile_first + i < rows.channels;
         i += static_cast<int>(blockDim.x * blockDim.y)) {
      float2 sum = of_threads[i];
#pragma unroll 4
      for (int y = 1; y < static_cast<int>(blockDim.y); ++y) {
        const float2 more = of_threads[y * width + i];
        sum.x += more.x;
        sum.y += more.y;
      }
      partial[tile_first + i] = sum.x;
      partial[p.channels + tile_first + i] = sum.y;
    }
    launch_dependents();
  }
}

// ---- sums of channels, and means of groups ----

// Writes A and B of each sample's channels, and the gradients that are sums of these over samples.
struct FinishGroupNorm {
  static constexpr int kKinds = 2, kTotals = 2;
  struct Columns {};
  float* sums;  // [samples, 2, channels]
  void *grad_weight, *grad_bias;
  DType weight_dtype, bias_dtype;
  int64_t channels;

  __device__ __forceinline__ Columns load(int64_t, bool) const { return {}; }
  __device__ __forceinline__ void group(const Columns&, int64_t sample, int64_t column,
                                        const float (&of_sample)[2], float (&totals)[2]) const {
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      sums[(2 * sample + kind) * channels + column] = of_sample[kind];
      totals[kind] += of_sample[kind];
    }
  }
  bool needs_all() const { return grad_bias != nullptr || grad_weight != nullptr; }
  __device__ __forceinline__ void all(const Columns&, int64_t column,
                                      const float (&totals)[2]) const {
    if (grad_bias != nullptr) store_value(grad_bias, bias_dtype, column, totals[0]);
    if (grad_weight != nullptr) store_value(grad_weight, weight_dtype, column, totals[1]);
  }
};

constexpr int kGroupNormMeansThreads = 128;

// Grid: warps for the groups of all samples.
__global__ void __launch_bounds__(kGroupNormMeansThreads)
    group_norm_means_kernel(const GroupNormBackward p, const Divisor groups) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t index =
      int64_t{blockIdx.x} * (kGroupNormMeansThreads / kWarpSize) + threadIdx.x / kWarpSize;
  grid_dependency_wait();
  const bool exists = index < p.samples * p.groups;
  const int64_t sample = exists ? quotient(index, groups) : 0;
  const int64_t first = (index - sample * p.groups) * p.group_channels;
  const float* sums = p.sums + 2 * sample * p.channels;
  float means[2] = {};
#pragma unroll 1
  for (int64_t i = lane; i < p.group_channels && exists; i += kWarpSize) {
    const float weight = value_or(p.weight, p.weight_dtype, first + i, 1.0f);
#pragma unroll
    for (int kind = 0; kind < 2; ++kind)
      means[kind] = fmaf(weight, sums[kind * p.channels + first + i], means[kind]);
  }
#pragma unroll
  for (int kind = 0; kind < 2; ++kind)
    means[kind] = warp_sum(means[kind], kWarpSize) / static_cast<float>(p.group_size);
  if (lane == 0 && exists)
    reinterpret_cast<float2*>(p.means)[index] = make_float2(means[0], means[1]);
  launch_dependents();
}

// ---- launchers ----

int64_t plane_blocks(const GroupNormBackward& p) {
  return ceil_div(p.samples * p.channels, group_norm_backward_policy(p).threads_y) * p.chunks;
}

template <typename T, bool kGradient>
gpuError launch_chunks(const GroupNormBackward& p, gpuStream stream) {
  const Divisor chunks(p.chunks), group_channels(p.group_channels);
  const GroupNormPolicy policy = group_norm_backward_policy(p);
  const dim3 block(policy.threads_x, policy.threads_y);
  if (p.channels_last) {
    const dim3 grid(static_cast<unsigned>(p.samples * p.chunks),
                    static_cast<unsigned>(policy.tiles));
    return gpu_launch_as(kGradient, &group_norm_rows_backward_kernel<T, kGradient>, grid, block, 0,
                         1, stream, p, chunks, group_channels);
  }
  const dim3 grid(static_cast<unsigned>(plane_blocks(p)));
  return gpu_launch_as(kGradient, &group_norm_planes_kernel<T, kGradient>, grid, block, 0, 1,
                       stream, p, PlaneDivisors{chunks, p.channels, group_channels});
}

gpuError launch_reduce(const GroupNormBackward& p, int64_t parts, gpuStream stream) {
  const FinishGroupNorm finish{p.sums,         p.grad_weight, p.grad_bias,
                               p.weight_dtype, p.bias_dtype,  p.channels};
  return reduce_partials({p.partials, p.samples, parts, 2, p.channels}, stream, finish);
}

gpuError launch_cluster(const GroupNormBackward& p, const GroupNormPolicy& policy,
                        gpuStream stream) {
  const gpuError error = launch_group_norm_backward_cluster(p, policy, stream);
  const bool is_done = p.samples == 1 || (p.grad_weight == nullptr && p.grad_bias == nullptr);
  return error != gpuSuccess || is_done ? error : launch_reduce(p, 1, stream);
}

GroupNormPolicy policy_of(const GroupNormBackward& p, int device) {
  GroupNormPolicy policy{};
  const bool cluster = group_norm_backward_cluster_policy(p, device_info(device), policy);
  return cluster ? policy : group_norm_backward_policy(p);
}

}  // namespace

namespace gpu {

void group_norm_backward_chunks(GroupNormBackward& p, int device) {
  group_norm_set_chunks(p, policy_of(p, device));
}

const char* group_norm_backward(const GroupNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const GroupNormPolicy policy = policy_of(p, device);
  if (policy.cluster) return message_of(launch_cluster(p, policy, stream));
  const int64_t groups = p.samples * p.groups;
  const int64_t blocks = p.channels_last ? p.samples * p.chunks : plane_blocks(p);
  if (std::max(blocks, groups) > kGroupNormMostBlocks) return kGroupNormTooMany;
  const auto launch = [&](auto gradient) {
    return dispatch_size(p.dtype, [&](auto tag) {
      return launch_chunks<typename decltype(tag)::type, decltype(gradient)::value>(p, stream);
    });
  };
  gpuError error = launch(std::false_type{});
  if (error != gpuSuccess) return message_of(error);
  error = launch_reduce(p, p.chunks, stream);
  if (error != gpuSuccess || p.grad_x == nullptr) return message_of(error);
  const dim3 grid(static_cast<unsigned>(ceil_div(groups, kGroupNormMeansThreads / kWarpSize)));
  error = gpu_launch_after(&group_norm_means_kernel, grid, dim3(kGroupNormMeansThreads), stream, p,
                           Divisor(p.groups));
  return message_of(error != gpuSuccess ? error : launch(std::true_type{}));
}

}  // namespace gpu
}  // namespace fuselage
