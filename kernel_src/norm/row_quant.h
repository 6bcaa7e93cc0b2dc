// Operators of norm/row_forward.h whose result is quantised where it is in registers
// (common/quant_device.h): a row is read once, and written in eight bits.
#pragma once

#include "common/quant_device.h"
#include "norm/row_forward.h"
#include "norm/row_quant_policy.h"

namespace fuselage {

// Of an operator whose rows and results are of one half-precision type.
template <typename Op, typename Forward>
struct QuantisedOp : Op {
  struct Params : Forward {
    QuantForward quant;
  };
  static constexpr int N = Op::N;

  // Launch bounds of aligned rows: 64 registers. Of 48 some are spilled, and
  // fused_add_rms_norm_quant of (16384, 4096) takes 168 us on an H100, not 158.
  static constexpr int threads(bool aligned, bool clusters) {
    return aligned ? kForwardThreads : Op::threads(aligned, clusters);
  }
  static constexpr int blocks(int vectors, bool aligned, bool clusters) {
    return aligned ? 2 : Op::blocks(vectors, aligned, clusters);
  }

  template <bool kAligned, int kVectors>
  static __device__ __forceinline__ void quantise(
      const Params& p, const Vector<typename Op::In, N> (&vectors)[kVectors], int64_t row,
      int first_column, int left) {
    Vector<typename Op::In, N> inside[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      // A mean is taken away from what is past the row's end, too: its maximum may be larger.
      inside[j] = kAligned ? vectors[j] : first_elements(vectors[j], left - j * kWarpSize * N);
    }
    quantise_row<true, kAligned>(p.quant, inside, row, first_column, left);
  }
};

template <typename Op, typename Forward>
constexpr bool kQuantises<QuantisedOp<Op, Forward>> = true;

// Of rows for which is_one_kernel holds.
template <typename Op, typename Forward>
gpuError launch_row_quant(const Forward& forward, const QuantForward& quant, bool aligned,
                          int device, gpuStream stream) {
  using Both = QuantisedOp<Op, Forward>;
  const RowPolicy policy =
      row_quant_policy(device_info(device), forward.rows, forward.dim, aligned, Op::kMostVectors);
  auto kernel = !aligned              ? &row_forward_kernel<Both, kForwardVectors, 1, false, false>
                : policy.vectors == 1 ? &row_forward_kernel<Both, 1, 1, true, false>
                : policy.vectors == 2 ? &row_forward_kernel<Both, 2, 1, true, false>
                                      : &row_forward_kernel<Both, kForwardVectors, 1, true, false>;
  if constexpr (Op::kMostVectors) {
    if (policy.vectors == kForwardMostVectors)
      kernel = &row_forward_kernel<Both, kForwardMostVectors, 1, true, false>;
  }
  return gpu_launch(kernel, dim3(ceil_div(forward.rows, policy.rows_per_block)),
                    dim3(policy.threads_per_row, policy.rows_per_block), 0, 1, stream,
                    typename Both::Params{forward, quant}, 1);
}

}  // namespace fuselage
