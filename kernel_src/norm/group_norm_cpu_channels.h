// What the CPU kernels of group_norm read of a sample and its channels, and map their values with.
// Compiled once per instruction set: see common/cpu_isa.h.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_math.h"
#include "common/cpu_rows.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "common/sigmoid_math.h"
#include "norm/group_norm.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

constexpr int64_t kGroupNormStrip = 512;  // channels that are worked on at once, channels last

// Of one position a sample is the same in either order. Channels last it has vectors.
FUSELAGE_INLINE bool group_norm_channels_last(const GroupNormInput& p) {
  return p.channels_last || p.positions == 1;
}

template <class X>
FUSELAGE_INLINE const X* group_norm_sample(const GroupNormInput& p, int64_t sample) {
  return static_cast<const X*>(p.x) + sample * p.x_stride;
}

// Value i of a weight or a bias.
template <class X>
FUSELAGE_INLINE float group_norm_value(const void* data, DType dtype, int64_t i, float missing) {
  return data == nullptr ? missing : load_as<X>(data, dtype, i, FirstLanes{1})[0];
}

template <class X>
FUSELAGE_INLINE Floats group_norm_act(bool silu, Floats y) {
  return silu ? gate_of<CpuMath<(sizeof(X) < sizeof(float))>>(true, y).value : y;
}

// grad_out * act'(xhat * weight + bias)
template <class X>
FUSELAGE_INLINE Floats group_norm_act_gradient(bool silu, Floats grad_out, Floats xhat,
                                               Floats weight, Floats bias) {
  if (!silu) return grad_out;
  using Math = CpuMath<(sizeof(X) < sizeof(float))>;
  return grad_out * gate_of<Math>(true, xhat * weight + bias).slope;
}

// What a channel of a sample is mapped with: arrays of a strip of channels, or one value of each.
struct GroupNormChannel {
  float mean, rstd, weight, bias;
};

// `values`: a pair for each group of all samples.
FUSELAGE_INLINE const float* group_norm_pair(const GroupNormInput& p, const float* values,
                                             int64_t sample, int64_t channel) {
  return values + 2 * (sample * p.groups + channel / p.group_channels);
}

template <class X>
FUSELAGE_INLINE GroupNormChannel group_norm_channel(const GroupNormInput& p,
                                                    const float* pair,  // mean and rstd
                                                    int64_t channel) {
  return {pair[0], pair[1], group_norm_value<X>(p.weight, p.weight_dtype, channel, 1),
          group_norm_value<X>(p.bias, p.bias_dtype, channel, 0)};
}

struct GroupNormStrip {
  int64_t first, size;  // of the channels
  float mean[kGroupNormStrip], rstd[kGroupNormStrip], weight[kGroupNormStrip],
      bias[kGroupNormStrip];
};

// Spreads a pair for each group of a sample over the channels of a strip.
FUSELAGE_INLINE void group_norm_spread(const GroupNormInput& p, const float* values, int64_t sample,
                                       const GroupNormStrip& strip, float* firsts, float* seconds) {
  const float* pair = group_norm_pair(p, values, sample, strip.first);
  int64_t left = p.group_channels - strip.first % p.group_channels;  // channels of the group
  for (int64_t i = 0; i < strip.size; ++i) {
    firsts[i] = pair[0], seconds[i] = pair[1];
    if (--left == 0) pair += 2, left = p.group_channels;
  }
}

template <class X>
FUSELAGE_INLINE void group_norm_fill(const GroupNormInput& p, const float* statistics,
                                     int64_t sample, GroupNormStrip& strip) {
  group_norm_spread(p, statistics, sample, strip, strip.mean, strip.rstd);
  for_each_vector(0, strip.size, [&](int64_t i, auto lanes) {
    Floats weight = broadcast(1), bias = {};
    if (p.weight != nullptr) weight = load_as<X>(p.weight, p.weight_dtype, strip.first + i, lanes);
    if (p.bias != nullptr) bias = load_as<X>(p.bias, p.bias_dtype, strip.first + i, lanes);
    store(strip.weight + i, weight, lanes);
    store(strip.bias + i, bias, lanes);
  });
}

// body(strip) of all channels.
template <class Body>
FUSELAGE_INLINE void group_norm_strips(int64_t channels, Body body) {
  GroupNormStrip strip;
  for (strip.first = 0; strip.first < channels; strip.first += kGroupNormStrip) {
    const int64_t rest = channels - strip.first;
    strip.size = rest < kGroupNormStrip ? rest : kGroupNormStrip;
    body(strip);
  }
}

// body(channel, begin, end) of elements [begin, end) of a flat group, a channel at a time.
template <class Body>
FUSELAGE_INLINE void group_norm_planes(const GroupNormInput& p, int64_t group, RowRange elements,
                                       Body body) {
  int64_t begin = elements.begin;
  while (begin < elements.end) {
    const int64_t channel = begin / p.positions, plane_end = (channel + 1) * p.positions;
    const int64_t end = plane_end < elements.end ? plane_end : elements.end;
    body(group * p.group_channels + channel, begin, end);
    begin = end;
  }
}

}  // namespace FUSELAGE_ISA
}  // namespace fuselage::cpu
