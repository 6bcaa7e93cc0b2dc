// layer_norm, fused_add_layer_norm, ada_layer_norm, ada_rms_norm and gate_residual_ada_norm on the
// GPU (formulas: norm/ada_norm.h).
//
// Forward: norm/row_forward.h, of the operator AdaNormOp.
//
// Backward: the one of all row operators (norm/row_backward.h). Every block works on rows of one
// group, within which scale, shift and gate do not change, and keeps up to three sums of its
// columns in registers; the gradients of scale, shift, gate, weight and bias are made of these.
//
// Rows too long for either (no clusters, or beyond what eight blocks hold) are streamed: read
// several times, mostly from cache.
//
// Which thread has which columns, and so the order of every sum, does not depend on alignment: with
// kAligned every row of every tensor starts and ends on a 16-byte boundary; without, vectors are
// put together from two aligned blocks (common/vector.h).
#include "norm/ada_norm.h"

#include <type_traits>

#include "common/dispatch.h"
#include "norm/ada_norm_backward.h"
#include "norm/ada_norm_forward.h"
#include "norm/ada_norm_policy.h"

namespace fuselage {
namespace {

RowBackward ada_norm_backward_launch(const AdaNormBackward& p, const RowBackwardShape& shape) {
  RowBackward launch{};
  launch.read(p.grad_out, p.grad_out_stride, p.s, p.s_stride, p.grad_new_residual,
              p.grad_new_residual_stride);
  if (p.x != nullptr) launch.tensors.add(p.x, p.x_stride);
  launch.statistics = p.statistics;
  launch.statistics_size = p.layer ? 2 : 1;
  launch.needs_rows = p.grad_x != nullptr || p.grad_residual != nullptr || p.grad_gate != nullptr;
  launch.partials = p.partials;
  launch.partial_kinds = p.partial_rows;
  // Streamed rows leave what the sums of the gate need of them after the partial sums, as pairs.
  if (p.partials != nullptr) {
    launch.means =
        reinterpret_cast<float2*>(p.partials) + ceil_div(ada_norm_backward_sums(p, shape), 2);
  }
  return launch;
}

}  // namespace

namespace gpu {

const char* ada_norm_forward(const AdaNormForward& given, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const AdaNormParams p = ada_norm_params(given);
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_bool(p.residual != nullptr, [&](auto residual) {
      return with_bool(is_aligned(p), [&](auto aligned) {
        const RowPolicy policy = ada_norm_forward_policy(device_info(device), aligned, p);
        return launch_row_forward<AdaNormOp<T, residual>, aligned>(p, policy, stream);
      });
    });
  }));
}

int64_t ada_norm_backward_workspace(AdaNormBackward& p, int device) {
  const RowBackwardShape shape = ada_norm_backward_shape(p);
  const RowBackwardPolicy policy = row_backward_policy(device_info(device), shape);
  p.blocks_per_group = policy.blocks_per_group;
  if (p.partial_rows == 0) return 0;
  const int64_t sums = ada_norm_backward_sums(p, shape);
  return policy.row.streamed ? 2 * (ceil_div(sums, 2) + p.rows) : sums;
}

const char* ada_norm_backward(const AdaNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const RowBackwardShape shape = ada_norm_backward_shape(p);
  const RowBackwardPolicy policy = row_backward_policy(device_info(device), shape);
  RowBackward launch = ada_norm_backward_launch(p, shape);
  if (!policy.row.streamed) launch.means = nullptr;
  if (policy.row.streamed && p.scale_by_row) launch.needs_rows = true;  // it writes their gradients
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.scale_by_row || p.gate_by_row)
      return row_backward<AdaNormBackwardOp<T, true, true>>(p, launch, shape, policy, stream);
    if (ada_norm_has_residual(p))
      return row_backward<AdaNormBackwardOp<T, true, false>>(p, launch, shape, policy, stream);
    return row_backward<AdaNormBackwardOp<T, false, false>>(p, launch, shape, policy, stream);
  }));
}

}  // namespace gpu
}  // namespace fuselage
