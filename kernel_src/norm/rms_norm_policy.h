// How rms_norm kernels are laid out on a GPU: pure functions of the device, the element types and
// the shape.
#pragma once

#include <algorithm>
#include <optional>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "norm/rms_norm.h"
#include "norm/row_backward_policy.h"
#include "norm/row_forward_policy.h"

namespace fuselage {

// Whether every row of every tensor starts and ends on a 16-byte boundary.
inline bool is_aligned(const RmsNormForward& p) {
  return aligned_rows(p.x, p.x_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.residual, p.residual_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.new_residual, p.new_residual_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.out, p.out_stride, p.dim, p.out_dtype) &&
         aligned_rows(p.weight, 0, p.dim, p.weight_dtype);
}

inline bool is_aligned(const RmsNormBackward& p) {
  return aligned_rows(p.x, p.x_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.grad_out, p.grad_out_stride, p.dim, p.out_dtype) &&
         aligned_rows(p.grad_new_residual, p.grad_new_residual_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.grad_x, p.dim, p.dim, p.x_dtype) &&
         aligned_rows(p.weight, 0, p.dim, p.weight_dtype);
}

inline bool is_aligned(const RmsNormAddRmsNormBackward& p) {
  return aligned_rows(p.grad_out, p.grad_out_stride, p.dim, p.dtype) &&
         aligned_rows(p.grad_new_residual, p.grad_new_residual_stride, p.dim, p.dtype) &&
         aligned_rows(p.new_residual, p.new_residual_stride, p.dim, p.dtype) &&
         aligned_rows(p.x, p.x_stride, p.dim, p.dtype) &&
         aligned_rows(p.grad_x, p.dim, p.dim, p.dtype) &&
         aligned_rows(p.grad_residual, p.dim, p.dim, p.dtype) &&
         aligned_rows(p.pre_weight, 0, p.dim, p.pre_weight_dtype) &&
         aligned_rows(p.post_weight, 0, p.dim, p.post_weight_dtype);
}

// Rows of two types pass through shared memory as unaligned ones do: few callers have them.
template <typename Params>
inline bool has_aligned_kernel(const Params& p) {
  return is_aligned(p) && p.x_dtype == p.out_dtype;
}

inline RowPolicy rms_norm_forward_policy(const DeviceInfo& device, bool aligned,
                                         const RmsNormForward& p) {
  const bool light = p.residual == nullptr;
  return row_forward_policy(device,
                            {p.rows, p.dim, dtype_size(p.x_dtype), aligned, false, light, 0});
}

// Two vectors a thread: there are two barriers, at which other warps are to do something. On an
// H200, bfloat16, (16384, 4096) takes 133 us so, and 147 with four, (26214, 2560) 132 and 162,
// (8192, 8192) 138 and 151.
inline RowPolicy rms_norm_add_rms_norm_policy(const DeviceInfo& device, bool aligned, int64_t rows,
                                              int64_t dim, DType dtype) {
  return row_forward_policy(
      device, {rows, dim, dtype_size(dtype), aligned, false, false, 2 * kForwardThreads});
}

// Of a block and of a thread of the backward, which keeps the weight's gradient in registers.
constexpr int kRmsNormBackwardThreads = 512;
constexpr int kRmsNormBackwardColumns = 32;

inline RowBackwardShape rms_norm_backward_shape(const RmsNormBackward& p) {
  RowBackwardShape shape{};
  const bool residual = p.grad_new_residual != nullptr;
  shape.groups = 1;
  shape.group_rows = p.rows;
  shape.dim = p.dim;
  shape.aligned = has_aligned_kernel(p);
  shape.element_size = dtype_size(p.x_dtype);
  shape.grad_out_size = dtype_size(p.out_dtype);
  shape.tensors = residual ? 3 : 2;
  shape.statistics = 1;
  shape.column_sums = p.grad_weight != nullptr ? 1 : 0;
  shape.threads = kRmsNormBackwardThreads;
  shape.max_columns = kRmsNormBackwardColumns;
  // Rows of two types are too rare for kernels of their own of few columns a thread: without them
  // the file compiles in a third less time. Short ones take as long, for their bytes, as long ones.
  shape.short_rows = shape.full_stages = shape.one_type();
  shape.bulk = true;
  shape.least_vectors = 1;
  shape.bulk_turns = 2;
  // NOTE: measured on an H200, bfloat16. It does not depend on the way of copying, nor on the
  // arithmetic; with too much under way some multiprocessors end a third earlier than others. Bulk
  // copies of (39321, 1280) take 87 us with 82 KB and 79 with 123, but of (32768, 1536) 80 us with
  // 98 KB and 89 with 147. Others, of (78643, 640), take 89 us with 41 KB and 84 with 82, but of
  // (49152, 1024) 79 us with 66 KB and 85 with 131. Rows that start anywhere take one stage: on an
  // H100 (16380, 4097) takes 253 us with one, 246 with two; (32768, 1023) 109 and 113; with three
  // inputs 299 and 338, 135 and 150.
  shape.bulk_bytes = 125 << 10;
  shape.bytes = 84 << 10;
  shape.stages = 1;
  shape.column_steps = 8;
  return shape;
}

// Of a block and of a thread of rms_norm_add_rms_norm's in one pass, which keeps two sums a column
// in registers, and works on vectors of four tensors. On an H200, bfloat16, with 512 threads and 16
// columns, 640 and 16, or 512 and 32: (16384, 4096) takes 217, 219 or 225 us, (8192, 3072) 82, 87
// or 87, (65536, 1024) 202, 205 or 230; but (26214, 2560) 219, 202 or 207.
constexpr int kRmsNormAddRmsNormBackwardThreads = 512;
constexpr int kRmsNormAddRmsNormBackwardColumns = 16;

inline RowBackwardShape rms_norm_add_rms_norm_backward_shape(const RmsNormAddRmsNormBackward& p) {
  RowBackwardShape shape{};
  shape.groups = 1;
  shape.group_rows = p.rows;
  shape.dim = p.dim;
  shape.aligned = is_aligned(p);
  shape.element_size = shape.grad_out_size = dtype_size(p.dtype);
  shape.tensors = p.grad_new_residual != nullptr ? 4 : 3;
  shape.statistics = 2;
  shape.shared_factors = 2;
  shape.column_sums = rms_norm_add_rms_norm_weight_gradients(p);
  shape.sums_need_rows = true;  // those of post_weight; there are no blocks that have columns
  shape.threads = kRmsNormAddRmsNormBackwardThreads;
  shape.max_columns = kRmsNormAddRmsNormBackwardColumns;
  shape.bulk = true;
  // Those of adaptive norms with as many tensors. Others were not slower or faster: rows of a warp
  // with 115 KB under way, and bulk copies of up to 200.
  shape.bulk_turns = 0;
  shape.bulk_bytes = 176 << 10;
  shape.bytes = 60 << 10;
  shape.stages = 1;
  return shape;
}

// That of one pass, or nothing where it takes two. Which must not depend on pointers and strides,
// as results must not. Rows that never are aligned take less time in two: on an H200 (16380, 4097)
// takes 471 us, and 588 in one. So do rows that would be streamed: (512, 131072) takes 386 us, and
// 967.
inline std::optional<RowBackwardPolicy> rms_norm_add_rms_norm_backward_policy(
    const DeviceInfo& device, const RmsNormAddRmsNormBackward& p) {
  if (p.dim * dtype_size(p.dtype) % 16 != 0) return std::nullopt;
  const RowBackwardPolicy policy =
      row_backward_policy(device, rms_norm_add_rms_norm_backward_shape(p));
  if (policy.row.streamed) return std::nullopt;
  return policy;
}

}  // namespace fuselage
