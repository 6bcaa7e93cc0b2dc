// What the kernels of group_norm's backward that read tensors once have in common (formulas:
// norm/group_norm.h). They take rstd into the factors of all elements.
#pragma once

#include "norm/group_norm_device.h"

namespace fuselage {
namespace {

// What N elements are mapped with, of one channel or of one each.
template <int N>
struct ScaledFactors {
  float mean[N], rstd[N], factor[N], bias[N];  // factor: rstd * weight

  __device__ __forceinline__ void set(int k, const GroupNormBackward& p, int64_t sample,
                                      int64_t channel, int64_t group) {
    const float2 statistics = pair_of_group(p.statistics, sample * p.groups + group);
    mean[k] = statistics.x;
    rstd[k] = statistics.y;
    factor[k] = statistics.y * value_or(p.weight, p.weight_dtype, channel, 1.0f);
    bias[k] = value_or(p.bias, p.bias_dtype, channel, 0.0f);
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

template <typename T>
__device__ __forceinline__ ScaledFactors<16 / sizeof(T)> scaled_factors_of(
    const GroupNormBackward& p, const GroupNormRows<T>& rows, const Divisor& group_channels) {
  ScaledFactors<16 / sizeof(T)> factors{};
  rows.for_channels([&](int k, int channel) {
    factors.set(k, p, rows.sample, channel, quotient(channel, group_channels));
  });
  return factors;
}

}  // namespace
}  // namespace fuselage
