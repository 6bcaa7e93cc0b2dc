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
  static constexpr bool kTyped = true;
  static constexpr int N = 16 / sizeof(T);

  static __host__ __device__ const QuantForward& quant(const Params& p) { return p.quant; }

  template <int kVectors>
  struct Inputs {
    RowLoading<T, kVectors, true> x, y;

    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
      if constexpr (Formula::kHasY)
        y.start(static_cast<const T*>(p.y) + row * p.y_stride + column, left);
    }
    __device__ __forceinline__ Vector<T, N> finish(const Params& p, int j) const {
      float a[N], b[N] = {};
      x.finish(j).to_floats(a);
      if constexpr (Formula::kHasY) y.finish(j).to_floats(b);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = Formula::forward(a[k], b[k], Scalars{});
      return Vector<T, N>::from_floats(a);
    }
  };
  static __device__ __forceinline__ void store(const Params& p, int64_t row, int column,
                                               const Vector<T, N>& vector) {
    if (p.out != nullptr) vector.store(static_cast<T*>(p.out) + row * p.out_stride + column);
  }
};

template <class Math>
using SiluGate = GateFormula<Math, Activation::silu>;
template <class Math>
using GeluTanh = AddFormula<Math, Activation::gelu_tanh, false>;

QuantPolicy policy_of(const QuantForward& p) {
  return quant_policy(p.dim, dtype_size(p.x_dtype), makes_row_scales(p), true);
}

}  // namespace

namespace gpu {

// Whether one kernel does both. Others are written out by the activation's kernel, and quantised by
// quant_fp8's.
bool activation_quantises(const Quantised<ActivationForward>& p) {
  const auto is_aligned = [&](const void* data, int64_t stride) {
    return aligned_rows(data, stride, p.dim, p.dtype);
  };
  if (!is_aligned(p.x, p.x_stride) || !is_aligned(p.y, p.y_stride) ||
      !is_aligned(p.out, p.out_stride) || !aligned_rows(p.quant.q, p.dim, p.dim, 1, 8) ||
      p.quant.format != QuantFormat::e4m3 || dtype_size(p.dtype) != 2)
    return false;
  const QuantPolicy policy = policy_of(p.quant);
  return policy.for_many &&
         ceil_div(p.rows, policy.rows_per_block) * policy.slices <= kMaxQuantBlocks;
}

const char* activation_quant(const Quantised<ActivationForward>& p, int, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const QuantPolicy policy = policy_of(p.quant);
  return message_of(dispatch_half(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.formula == Formula::gate)
      return launch_quant<ActivatedRows<T, SiluGate>>(p, policy, stream);
    return launch_quant<ActivatedRows<T, GeluTanh>>(p, policy, stream);
  }));
}

}  // namespace gpu
}  // namespace fuselage
