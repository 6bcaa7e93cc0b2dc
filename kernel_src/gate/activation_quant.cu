// silu_and_mul, swiglu and gelu_tanh whose results are quantised, on the GPU: the kernel of
// common/quant_kernel.h, with rows that are computed as they are read.
#include "common/alignment.h"
#include "common/gpu_math.h"
#include "common/quant_kernel.h"
#include "gate/activation.h"
#include "gate/activation_math.h"

namespace fuselage {
namespace {

template <typename T_, template <class Math> class FormulaOf>
struct ActivatedRows {
  using T = T_;
  using Params = Quantised<ActivationForward>;
  using Formula = FormulaOf<GpuMath<T>>;
  static constexpr bool kTyped = true, kUnaligned = true;
  static constexpr int N = 16 / sizeof(T);
  // On an H100, bfloat16 of (8192, 14336): gelu_tanh_quant takes 122 us with 40, 137 with 48 and
  // 140 with 56; swiglu_quant 229, 194 and 193.
  static constexpr int kRegisters = Formula::kHasY ? 56 : 40;

  static __host__ __device__ const QuantForward& quant(const Params& p) { return p.quant; }
  static __device__ __forceinline__ T* out_row(const Params& p, int64_t row) {
    return p.out == nullptr ? nullptr : static_cast<T*>(p.out) + row * p.out_stride;
  }

  template <int kVectors, bool kAligned>
  struct Inputs {
    RowLoading<T, kVectors, kAligned> x, y;

    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
      if constexpr (Formula::kHasY)
        y.start(static_cast<const T*>(p.y) + row * p.y_stride + column, left);
    }
    __device__ __forceinline__ void join() {
      x.join();
      if constexpr (Formula::kHasY) y.join();
    }
    __device__ __forceinline__ Vector<T, N> finish(int j) const {
      float a[N], b[N] = {};
      x.joined(j).to_floats(a);
      if constexpr (Formula::kHasY) y.joined(j).to_floats(b);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = Formula::forward(a[k], b[k], Scalars{});
      return Vector<T, N>::from_floats(a);
    }
  };
};

template <class Math>
using SiluGate = GateFormula<Math, Activation::silu>;
template <class Math>
using GeluTanh = AddFormula<Math, Activation::gelu_tanh, false>;

bool is_aligned(const Quantised<ActivationForward>& p) {
  const auto rows = [&](const void* data, int64_t stride) {
    return aligned_rows(data, stride, p.dim, p.dtype);
  };
  return rows(p.x, p.x_stride) && rows(p.y, p.y_stride) && rows(p.out, p.out_stride) &&
         aligned_rows(p.quant.q, p.dim, p.dim, 1, 8);
}

QuantPolicy policy_of(const Quantised<ActivationForward>& p, const DeviceInfo& device) {
  return quant_policy(
      device, {p.rows, p.dim, dtype_size(p.dtype), makes_row_scales(p.quant), is_aligned(p), true});
}

}  // namespace

namespace gpu {

// Whether one kernel does both. Others are written out by the activation's kernel, and quantised by
// quant_fp8's; so are unaligned rows of a warp's first vectors, which are rare.
bool activation_quantises(const Quantised<ActivationForward>& p) {
  if (p.quant.format != QuantFormat::e4m3 || dtype_size(p.dtype) != 2) return false;
  const QuantPolicy policy = policy_of(p, DeviceInfo{});  // as if there were many rows
  return policy.for_many && (policy.vectors > 1 || is_aligned(p)) &&
         ceil_div(p.rows, policy.rows_per_block) * policy.slices <= kMaxQuantBlocks;
}

const char* activation_quant(const Quantised<ActivationForward>& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const QuantPolicy policy = policy_of(p, device_info(device));
  const bool aligned = is_aligned(p);
  return message_of(dispatch_half(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.formula == Formula::gate)
      return launch_quant<ActivatedRows<T, SiluGate>>(p, policy, aligned, stream);
    return launch_quant<ActivatedRows<T, GeluTanh>>(p, policy, aligned, stream);
  }));
}

}  // namespace gpu
}  // namespace fuselage
