// How the kernels of layer_norm and the adaptive norms are laid out on a GPU: pure functions of the
// device, the element types, the shape, and which tensors there are.
#pragma once

#include <algorithm>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "norm/ada_norm.h"
#include "norm/row_backward_policy.h"
#include "norm/row_forward_policy.h"

namespace fuselage {

// Whether every row of every tensor starts and ends on a 16-byte boundary.
inline bool is_aligned(const AdaNormForward& p) {
  const auto rows = [&](const void* data, int64_t stride) {
    return aligned_rows(data, stride, p.dim, p.dtype);
  };
  const auto modulation = [&](const Modulation& m) {
    return aligned_rows(m.data, m.stride, p.dim, m.dtype);
  };
  return rows(p.x, p.x_stride) && rows(p.residual, p.residual_stride) &&
         rows(p.new_residual, p.new_residual_stride) && rows(p.out, p.out_stride) &&
         modulation(p.gate) && modulation(p.scale) && modulation(p.shift) &&
         aligned_rows(p.weight.data, 0, p.dim, p.weight.dtype) &&
         aligned_rows(p.bias.data, 0, p.dim, p.bias.dtype);
}

inline bool is_aligned(const AdaNormBackward& p) {
  const auto rows = [&](const void* data, int64_t stride) {
    return aligned_rows(data, stride, p.dim, p.dtype);
  };
  const auto modulation = [&](const Modulation& m) {
    return aligned_rows(m.data, m.stride, p.dim, m.dtype);
  };
  return rows(p.grad_out, p.grad_out_stride) &&
         rows(p.grad_new_residual, p.grad_new_residual_stride) && rows(p.s, p.s_stride) &&
         rows(p.x, p.x_stride) && modulation(p.gate) && modulation(p.scale) &&
         aligned_rows(p.weight.data, 0, p.dim, p.weight.dtype) &&
         aligned_rows(p.bias.data, 0, p.dim, p.bias.dtype) && rows(p.grad_x, p.dim) &&
         rows(p.grad_residual, p.dim) && rows(p.grad_gate, p.dim) && rows(p.grad_scale, p.dim) &&
         rows(p.grad_shift, p.dim);
}

inline RowPolicy ada_norm_forward_policy(const DeviceInfo& device, bool aligned,
                                         const AdaNormForward& p) {
  // With a residual, on an H200, bfloat16: fused_add_layer_norm of (9984, 2048) takes 42.2 us with
  // two vectors a thread, 42.8 with four, (16384, 4096) 132 and 134, (32768, 1024) 67.0 and 68.5;
  // but (32760, 5120) 327 and 326.
  const bool plain = p.residual == nullptr;
  return row_forward_policy(device, {p.rows, p.dim, dtype_size(p.dtype), aligned, plain, false,
                                     plain ? 0 : kForwardThreads});
}

// Whether x was gated or added to a residual, so that there may be more than its gradient. Without
// a gate, grad_x alone is that of a plain norm.
inline bool ada_norm_has_residual(const AdaNormBackward& p) {
  return p.grad_new_residual != nullptr || p.grad_residual != nullptr || p.grad_gate != nullptr ||
         p.gate.data != nullptr;
}

// Of a block and of a thread of the backward, which keeps two sums a column in registers, or three
// where there is a residual.
constexpr int ada_norm_backward_threads(bool residual) { return residual ? 640 : 512; }
constexpr int ada_norm_backward_columns(bool residual) { return residual ? 16 : 32; }

// Vectors of a row in a thread, at least. With one, most of a short row's time is its sums:
// layer_norm of (1048576, 128) in bfloat16 took 344 us on an H200 so, and 210 in an older kernel
// that had two.
constexpr int kAdaNormLeastVectors = 2;

inline RowBackwardShape ada_norm_backward_shape(const AdaNormBackward& p) {
  RowBackwardShape shape{};
  shape.groups = p.rows / p.group_rows;
  shape.group_rows = p.group_rows;
  shape.dim = p.dim;
  shape.aligned = is_aligned(p);
  shape.element_size = shape.grad_out_size = dtype_size(p.dtype);
  shape.tensors = 2 + (p.grad_new_residual != nullptr ? 1 : 0) + (p.x != nullptr ? 1 : 0);
  const bool by_row = p.scale_by_row || p.gate_by_row;
  const bool residual = ada_norm_has_residual(p) || by_row;
  shape.statistics = 2;
  shape.shared_factors = !by_row && p.gate.data != nullptr ? 2 : 1;
  shape.factors_by_row = p.scale_by_row;
  shape.column_sums = p.partial_rows == 0 ? 0 : residual ? 3 : 2;
  // What groups share is left to the second kernel.
  const bool shared =
      p.grad_weight != nullptr || p.grad_bias != nullptr || p.scale_rows.value == p.rows;
  shape.sums_need_rows = p.sums_gate || (shape.groups > 1 && shared);
  shape.threads = ada_norm_backward_threads(residual && !by_row);
  shape.max_columns = ada_norm_backward_columns(residual);
  shape.short_rows = !residual;
  shape.least_vectors = kAdaNormLeastVectors;
  shape.bulk = !by_row;
  // With more tensors always: to copy them otherwise takes registers that there are not.
  shape.bulk_turns = shape.tensors > 2 ? 0 : 2;
  // NOTE: measured on an H200, bfloat16, layer_norm, for two and three stages. (32760, 5120), three
  // of which are 184 KB, takes 258 and 280 us, (32760, 4096), 197 KB, 199 and 226; but (32760,
  // 3584), 172 KB, 187 and 180. Rows of a warp take 95 us with 131 KB under way and 87 with 66,
  // (49152, 1024); but (65536, 768) 101 us with 49 KB and 90 with 98.
  shape.bulk_bytes = 176 << 10;
  shape.bytes = (shape.tensors > 2 ? 60 : 115) << 10;
  shape.stages = shape.tensors > 2 ? 1 : 2;
  shape.column_steps = 12;  // a second kernel has several sums to add up
  return shape;
}

// Partial sums of all groups, in floats.
inline int64_t ada_norm_backward_sums(const AdaNormBackward& p, const RowBackwardShape& shape) {
  return shape.groups * p.blocks_per_group * p.partial_rows * p.dim;
}

}  // namespace fuselage
