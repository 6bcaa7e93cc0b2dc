// The backward of rms_norm and fused_add_rms_norm on the GPU (formulas: norm/rms_norm.h): an
// operator of norm/row_backward.h.
//
// Rows of which grad_out has another type than x go the way of unaligned ones. Which thread has
// which columns is the same for aligned rows and for others, and so is the order of a row's sum.
#include "common/dispatch.h"
#include "common/reduce_partials.h"
#include "common/runtime_dtype.h"
#include "common/vector.h"
#include "norm/rms_norm.h"
#include "norm/rms_norm_policy.h"
#include "norm/row_backward.h"

namespace fuselage {
namespace {

// s is x, and tensor 2 is grad_new_residual, if any.
template <typename T, typename O>
struct RmsNormBackwardOp {
  using Params = RmsNormBackward;
  using Element = T;
  using GradOut = O;
  static constexpr int kTensors = 3, kOutputs = 1;
  static constexpr int kStatistics = 1, kRowSums = 1, kNormSums = 1, kColumnSums = 1;
  static constexpr int kThreads = kRmsNormBackwardThreads, kColumns = kRmsNormBackwardColumns;
  static constexpr int kSharedFactors = 0;
  static constexpr bool kShortRows = std::is_same_v<T, O>, kFullStages = kShortRows;
  static constexpr bool kBulk = true, kColumnTerms = true;
  static constexpr int kLeastVectors = 1;
  static constexpr bool kSpreadRows = false;

  static __device__ __forceinline__ bool factors_by_row(const Params&) { return false; }
  static __device__ __forceinline__ int factors(const Params&) { return 1; }

  // weight + offset of N columns, or one. NOTE: with RuntimeLoading in its place the resident
  // kernel takes 3 to 11% longer on an H200, with as many registers.
  template <int N, bool kAligned>
  struct FactorLoading {
    Vector<T, N> packed;  // where the weight is of x's type

    static __device__ __forceinline__ bool is_packed(const Params& p) {
      return p.weight != nullptr &&
             (sizeof(T) == sizeof(float) || p.weight_dtype != DType::float32);
    }
    template <typename W>
    static __device__ __forceinline__ Vector<W, N> load(const Params& p, int column, int dim) {
      using Loading = RuntimeLoading<W, N, kAligned>;
      return Loading::load_columns(static_cast<const W*>(p.weight), column, dim);
    }
    __device__ __forceinline__ void start(const Params& p, int64_t, int column, int dim) {
      if (is_packed(p)) packed = load<T>(p, column, dim);
    }
    __device__ __forceinline__ void finish(const Params& p, int64_t, int column, int dim, int,
                                           float (&factors)[N]) const {
      if (p.weight == nullptr) {
#pragma unroll
        for (int k = 0; k < N; ++k) factors[k] = 1.0f;
        return;
      }
      if (is_packed(p)) {
        packed.to_floats(factors);
      } else {
        load<float>(p, column, dim).to_floats(factors);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) factors[k] += p.weight_offset;
    }
  };

  // g * xhat / rstd, where g = grad_out * factor and xhat = x * rstd.
  template <int N, typename Read, typename More>
  static __device__ __forceinline__ void terms(const RowBackward&, const float (&grad_out)[N],
                                               const float (&factors)[N], const float (&x)[N],
                                               const RowMoments&, const Read&, const More&,
                                               float (&sums)[1]) {
#pragma unroll
    for (int k = 0; k < N; ++k) sums[0] += grad_out[k] * factors[k] * x[k];
  }

  // grad_x = rstd * g - x * rstd^2 * mean(g * xhat)
  struct Coefficients {
    float of_x;
    __device__ __forceinline__ float2 pair() const { return make_float2(of_x, 0.0f); }
  };
  static __device__ __forceinline__ Coefficients coefficients(const Params&, const float (&sums)[1],
                                                              const RowMoments& moments,
                                                              const RowBackward& launch) {
    const float dim = static_cast<float>(static_cast<int>(launch.dim));
    return {sums[0] / dim * moments.rstd * moments.rstd * moments.rstd};
  }

  template <bool kAligned, int N, typename Read, typename More, typename Store>
  static __device__ __forceinline__ void gradients(const Params& p, const RowBackward& launch,
                                                   int64_t, int, const float (&factors)[N],
                                                   float (&grad_out)[N], float (&x)[N],
                                                   const RowMoments& moments,
                                                   const Coefficients& coefficients,
                                                   const Read& read, const More&,
                                                   const Store& store, float (&sums)[1][N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      grad_out[k] *= moments.rstd;
      sums[0][k] += grad_out[k] * x[k];
      x[k] = grad_out[k] * factors[k] - x[k] * coefficients.of_x;
    }
    if (launch.extra > 0) {
      read(2, grad_out);
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] += grad_out[k];
    }
    if (p.grad_x != nullptr) store(0, p.grad_x, x);
  }

  template <bool kAligned, bool, int N>
  static __device__ __forceinline__ void column_terms(const Params&, const RowBackward&, int64_t,
                                                      int, const float (&grad_out)[N],
                                                      const float (&x)[N],
                                                      const RowMoments& moments, bool unused,
                                                      float (&sums)[1][N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) sums[0][k] += unused ? 0.0f : grad_out[k] * moments.rstd * x[k];
  }

  static __device__ __forceinline__ int kind(const Params&, int) { return 0; }
  static __host__ __device__ __forceinline__ WriteColumns finish(const Params& p) {
    return {p.grad_weight, p.weight_dtype, p.dim};
  }
  static __device__ __forceinline__ void* output(const Params& p, int) { return p.grad_x; }
};

RowBackward rms_norm_backward_launch(const RmsNormBackward& p) {
  RowBackward launch{};
  launch.read(p.grad_out, p.grad_out_stride, p.x, p.x_stride, p.grad_new_residual,
              p.grad_new_residual_stride);
  launch.statistics = p.rstd;
  launch.statistics_size = static_cast<int>(p.rstd_stride);
  launch.needs_rows = p.grad_x != nullptr;
  launch.partials = p.partials;
  launch.partial_kinds = 1;
  return launch;
}

}  // namespace

namespace gpu {

int64_t rms_norm_backward_partials(const RmsNormBackward& p, int device) {
  const RowBackwardPolicy policy =
      row_backward_policy(device_info(device), rms_norm_backward_shape(p));
  return policy.column_blocks > 0 ? 0 : policy.blocks_per_group;
}

const char* rms_norm_backward(const RmsNormBackward& p, int device, void* raw_stream) {
  const gpuStream stream = static_cast<gpuStream>(raw_stream);
  const RowBackwardShape shape = rms_norm_backward_shape(p);
  const RowBackwardPolicy policy = row_backward_policy(device_info(device), shape);
  gpuError error = gpuSuccess;
  const bool supported = dispatch_activation_output(p.x_dtype, p.out_dtype, [&](auto x, auto out) {
    using Op = RmsNormBackwardOp<typename decltype(x)::type, typename decltype(out)::type>;
    error = row_backward<Op>(p, rms_norm_backward_launch(p), shape, policy, stream);
  });
  return supported ? message_of(error) : "unsupported element types";
}

}  // namespace gpu
}  // namespace fuselage
