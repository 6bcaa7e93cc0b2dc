// What the kernels of group_norm's backward have in common (formulas: norm/group_norm.h). They take
// rstd into the factors of all elements.
#pragma once

#include "norm/group_norm_device.h"

namespace fuselage {
namespace {

// What N elements are mapped with, of one channel or of one each.
template <int N>
struct ScaledFactors {
  float mean[N], rstd[N], factor[N], bias[N];  // factor: rstd * weight
};

// Those of one channel on their way.
struct ScaledFactorLoading {
  float2 statistics;
  ChannelValues channel;

  __device__ __forceinline__ ScaledFactorLoading(const GroupNormBackward& p, int64_t sample,
                                                 int64_t channel_, int64_t group)
      : statistics(pair_of_group(p.statistics, sample * p.groups + group)), channel(p, channel_) {}
  __device__ __forceinline__ ScaledFactors<1> factors(const GroupNormBackward& p) const {
    const float2 pair = channel.pair(p);
    return {{statistics.x}, {statistics.y}, {statistics.y * pair.x}, {pair.y}};
  }
};

// a and x - mean of N elements, in place of grad_out and x. Element k has the factors of its
// channel, or those of the one that there is.
template <typename T, int N, int kChannels>
__device__ __forceinline__ void scaled_terms_of(const ScaledFactors<kChannels>& factors, bool silu,
                                                float (&grad_out)[N], float (&x)[N]) {
  float y[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int c = kChannels == 1 ? 0 : k;
    x[k] -= factors.mean[c];
    y[k] = fmaf(x[k], factors.factor[c], factors.bias[c]);
  }
  through_activation<T>(silu, y, grad_out);
}

// grad_x of an element.
__device__ __forceinline__ float gradient_of(float a, float from_mean, float factor,
                                             float2 scaled_means) {
  return fmaf(a, factor, -fmaf(from_mean, scaled_means.y, scaled_means.x));
}

// The two means over a group, as gradient_of is given them.
__device__ __forceinline__ float2 scaled(float2 means, float rstd) {
  return make_float2(rstd * means.x, rstd * rstd * means.y);
}

__device__ __forceinline__ void add(float2& sum, float2 pair) {
  sum.x += pair.x;
  sum.y += pair.y;
}

// Sums over `width` neighbouring lanes, as warp_sum; in a loop, as it is called in one.
__device__ __forceinline__ float2 warp_sum_of_pair(float2 pair, int width) {
#pragma unroll 1
  for (int mask = width / 2; same_in_warp(mask > 0); mask /= 2) {
    pair.x += shuffle_xor(pair.x, mask, kWarpSize);
    pair.y += shuffle_xor(pair.y, mask, kWarpSize);
  }
  return pair;
}

// Writes A and B of a channel, of all samples.
__device__ __forceinline__ void write_gradients(const GroupNormBackward& p, int64_t channel,
                                                float2 sums) {
  if (p.grad_bias != nullptr) store_value(p.grad_bias, p.bias_dtype, channel, sums.x);
  if (p.grad_weight != nullptr) store_value(p.grad_weight, p.weight_dtype, channel, sums.y);
}

// Channels last: those of a thread's channels.
template <typename T>
struct ScaledFactorsLoading {
  static constexpr int N = 16 / sizeof(T);
  ChannelLoading<T> channels;
  float2 statistics[N];

  __device__ __forceinline__ ScaledFactorsLoading(const GroupNormBackward& p,
                                                  const GroupNormRows<T>& rows,
                                                  const Divisor& group_channels)
      : channels(p, rows) {
    pairs_of_channels<T>(p, rows, group_channels, p.statistics, statistics);
  }
  __device__ __forceinline__ ScaledFactors<N> factors(const GroupNormBackward& p,
                                                      const GroupNormRows<T>& rows) const {
    ScaledFactors<N> factors;
    channels.finish(p, rows, factors.factor, factors.bias);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      factors.mean[k] = statistics[k].x;
      factors.rstd[k] = statistics[k].y;
      factors.factor[k] *= statistics[k].y;
    }
    return factors;
  }
};

}  // namespace
}  // namespace fuselage
