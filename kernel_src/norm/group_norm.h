// Group normalisation, with an activation after it: what the GPU (norm/group_norm.cu) and CPU
// (norm/group_norm_cpu.cpp) kernels are given.
//
//   mean = mean(x)                          over the channels of a group and all positions
//   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//   xhat = (x - mean) * rstd
//   out  = act(xhat * weight + bias)        act: silu, or none; weight and bias of the channel
//
// A sample lies in memory in one of two orders, and its results in the same:
//
//   flat           [channels, positions]    a group is contiguous
//   channels last  [positions, channels]    a group is some columns of every row
//
// Moments of a part of a group are its mean and the sum of squared deviations from that mean. Parts
// are combined about the mean of the whole (Chan, Golub and LeVeque 1983), in which nothing
// cancels. How a group is cut into parts follows from its size and the device alone, so that the
// result of a sample does not depend on how many there are.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fuselage {

// What forward and backward have in common.
struct GroupNormInput {
  const void* x;       // [samples, channels, positions] or [samples, positions, channels] dtype
  const void* weight;  // [channels] weight_dtype, or null for a weight of one
  const void* bias;    // [channels] bias_dtype, or null for none
  int64_t samples, groups, channels, positions;
  int64_t group_channels, group_size;  // channels / groups, and that times positions
  int64_t x_stride;                    // elements between samples
  // What the GPU or CPU cuts into parts, each with sums of its own: flat a group (in the backward a
  // plane, the positions of a channel), channels last the positions. On the GPU, a part has so many
  // positions, and in the flat forward so many channels.
  int64_t chunks;
  int64_t chunk_positions, chunk_channels;
  bool channels_last;
  bool silu;
  DType dtype, weight_dtype, bias_dtype;  // of weight and bias: dtype or float32
};

struct GroupNormForward : GroupNormInput {
  void* out;          // as x, without gaps
  float* statistics;  // [samples, groups, 2]: mean and rstd. May be null without a workspace
  float* partials;    // workspace, or null where none is needed
  float eps;
};

// With a = grad_out * act'(xhat * weight + bias), and sums over positions for a sample's channel
//   A = sum of a,  B = sum of a * xhat
// the gradients are, with means over the group of what is summed over channels,
//   grad_x      = rstd * (a * weight - sum(A * weight) / size - xhat * sum(B * weight) / size)
//   grad_weight = sum of B over samples,  grad_bias = sum of A over samples
struct GroupNormBackward : GroupNormInput {
  const void* grad_out;     // as x
  const float* statistics;  // of the forward
  void* grad_x;             // as x, without gaps, or null when not needed
  void* grad_weight;        // [channels] weight_dtype, or null when not needed
  void* grad_bias;          // [channels] bias_dtype, or null when not needed
  float* partials;          // [samples, chunks, 2, channels]: A and B of each chunk
  float* sums;              // [samples, 2, channels]: A and B
  float* means;             // [samples, groups, 2]: those that grad_x needs
  int64_t grad_out_stride;  // elements between samples
};

namespace gpu {

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* group_norm_forward(const GroupNormForward& p, int device, void* stream);
const char* group_norm_backward(const GroupNormBackward& p, int device, void* stream);

// Sets the chunks of `p`, and returns how many floats p.partials of the forward must have.
int64_t group_norm_forward_workspace(GroupNormForward& p, int device);
// Sets the chunks of `p`.
void group_norm_backward_chunks(GroupNormBackward& p, int device);

}  // namespace gpu
}  // namespace fuselage
