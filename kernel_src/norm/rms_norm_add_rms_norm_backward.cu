// The backward of rms_norm_add_rms_norm on the GPU (formulas: norm/rms_norm.h): an operator of
// norm/row_backward.h that takes both norms in one pass.
//
// What the first norm's gradient needs of a row is a sum of grad_s, which is there only after the
// second norm's own sum. But it is linear in it: with n = x * post_rstd * post_weight's factor, and
// xhat = s * rstd,
//
//   grad_s = rstd * g - xhat * of_xhat + grad_new_residual
//   sum(grad_s * n) = rstd * sum(g * n) - of_xhat * sum(xhat * n) + sum(grad_new_residual * n)
//
// so that a row has four sums, and one barrier. Rows that take less time in two passes
// (norm/rms_norm_policy.h) go through rms_norm's backward, twice.
#include "common/dispatch.h"
#include "common/reduce_partials.h"
#include "common/runtime_dtype.h"
#include "norm/rms_norm.h"
#include "norm/rms_norm_policy.h"
#include "norm/row_backward.h"

namespace fuselage {
namespace {

// The gradients of the weights, of those sums that there are.
struct WriteBothWeights {
  static constexpr int kKinds = 2, kTotals = 0;
  struct Columns {};
  void *pre, *post;
  DType pre_dtype, post_dtype;

  __device__ __forceinline__ Columns load(int64_t, bool) const { return {}; }
  __device__ __forceinline__ void group(const Columns&, int64_t, int64_t column,
                                        const float (&sums)[2], float (&)[1]) const {
    if (pre != nullptr) store_value(pre, pre_dtype, column, sums[0]);
    if (post != nullptr) store_value(post, post_dtype, column, pre != nullptr ? sums[1] : sums[0]);
  }
};

// s is new_residual, whose moments are its rstd and, in place of a mean, the rstd of x.
template <typename T>
struct RmsNormAddRmsNormBackwardOp {
  using Params = RmsNormAddRmsNormBackward;
  using Element = T;
  using GradOut = T;
  using Values = RuntimeValues<T>;
  static constexpr int kX = 2, kGradNewResidual = 3;  // tensors
  static constexpr int kTensors = 4, kOutputs = 2;
  static constexpr int kStatistics = 2, kRowSums = 4, kNormSums = 3, kColumnSums = 2;
  static constexpr int kThreads = kRmsNormAddRmsNormBackwardThreads;
  static constexpr int kColumns = kRmsNormAddRmsNormBackwardColumns;
  static constexpr bool kFullStages = false;
  static constexpr int kSharedFactors = 2;  // of pre_weight, and of post_weight
  static constexpr bool kShortRows = false, kBulk = true, kColumnTerms = false;
  static constexpr int kLeastVectors = 2;
  static constexpr bool kSpreadRows = true;

  static __device__ __forceinline__ float post_rstd(const RowMoments& m) { return m.mean; }

  static __device__ __forceinline__ bool factors_by_row(const Params&) { return false; }
  static __device__ __forceinline__ int factors(const Params&) { return 2; }

  template <int N, bool kAligned>
  struct FactorLoading {
    RuntimeLoading<T, N, kAligned> pre, post;

    static __device__ __forceinline__ Values pre_of(const Params& p) {
      return Values(p.pre_weight, p.pre_weight_dtype);
    }
    static __device__ __forceinline__ Values post_of(const Params& p) {
      return Values(p.post_weight, p.post_weight_dtype);
    }
    __device__ __forceinline__ void start(const Params& p, int64_t, int column, int dim) {
      pre.start(pre_of(p), column, dim);
      post.start(post_of(p), column, dim);
    }
    __device__ __forceinline__ void finish(const Params& p, int64_t, int column, int dim, int kind,
                                           float (&factors)[N]) const {
      const bool is_pre = kind == 0;
      if (is_pre) {
        pre.finish(pre_of(p), column, dim, 1.0f, factors);
      } else {
        post.finish(post_of(p), column, dim, 1.0f, factors);
      }
      if ((is_pre ? p.pre_weight : p.post_weight) == nullptr) return;
#pragma unroll
      for (int k = 0; k < N; ++k) factors[k] += p.weight_offset;
    }
  };

  // Of g * xhat, g * n, xhat * n and grad_new_residual * n.
  template <int N, typename Read, typename More>
  static __device__ __forceinline__ void terms(const RowBackward& launch,
                                               const float (&grad_out)[N],
                                               const float (&factors)[N], const float (&s)[N],
                                               const RowMoments& moments, const Read& read,
                                               const More& more, float (&sums)[4]) {
    float n[N], other[N];
    read(kX, n);
    more(1, other);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float g = grad_out[k] * factors[k], xhat = s[k] * moments.rstd;
      n[k] *= other[k] * post_rstd(moments);
      sums[0] = fmaf(g, xhat, sums[0]);
      sums[1] = fmaf(g, n[k], sums[1]);
      sums[2] = fmaf(xhat, n[k], sums[2]);
    }
    if (launch.extra == 0) return;
    read(kGradNewResidual, other);
#pragma unroll
    for (int k = 0; k < N; ++k) sums[3] = fmaf(other[k], n[k], sums[3]);
  }

  // grad_s as above, and grad_x = post_rstd * post_weight's factor * grad_s - x * of_x.
  struct Coefficients {
    float of_xhat, of_x;
  };
  static __device__ __forceinline__ Coefficients coefficients(const Params&, const float (&sums)[4],
                                                              const RowMoments& moments,
                                                              const RowBackward& launch) {
    const float dim = static_cast<float>(static_cast<int>(launch.dim));
    const float of_xhat = sums[0] / dim * moments.rstd;
    const float sum = fmaf(moments.rstd, sums[1], fmaf(-of_xhat, sums[2], sums[3]));
    return {of_xhat, sum / dim * post_rstd(moments) * post_rstd(moments)};
  }

  template <bool kAligned, int N, typename Read, typename More, typename Store>
  static __device__ __forceinline__ void gradients(const Params& p, const RowBackward& launch,
                                                   int64_t, int, const float (&factors)[N],
                                                   float (&grad_out)[N], float (&s)[N],
                                                   const RowMoments& moments,
                                                   const Coefficients& coefficients,
                                                   const Read& read, const More& more,
                                                   const Store& store, float (&sums)[2][N]) {
    float other[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      s[k] *= moments.rstd;
      sums[0][k] = fmaf(grad_out[k], s[k], sums[0][k]);
      grad_out[k] = fmaf(grad_out[k] * factors[k], moments.rstd, -s[k] * coefficients.of_xhat);
    }
    if (launch.extra > 0) {
      read(kGradNewResidual, other);
#pragma unroll
      for (int k = 0; k < N; ++k) grad_out[k] += other[k];
    }
    if (p.grad_residual != nullptr) store(1, p.grad_residual, grad_out);
    read(kX, s);
    more(1, other);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      grad_out[k] *= post_rstd(moments);
      sums[1][k] = fmaf(grad_out[k], s[k], sums[1][k]);
      grad_out[k] = fmaf(grad_out[k], other[k], -s[k] * coefficients.of_x);
    }
    if (p.grad_x != nullptr) store(0, p.grad_x, grad_out);
  }

  static __device__ __forceinline__ int kind(const Params& p, int i) {
    if (i == 0) return p.grad_pre_weight != nullptr ? 0 : -1;
    if (p.grad_post_weight == nullptr) return -1;
    return p.grad_pre_weight != nullptr ? 1 : 0;
  }
  static __host__ __device__ __forceinline__ WriteBothWeights finish(const Params& p) {
    return {p.grad_pre_weight, p.grad_post_weight, p.pre_weight_dtype, p.post_weight_dtype};
  }
  static __device__ __forceinline__ void* output(const Params& p, int i) {
    return i == 0 ? p.grad_x : p.grad_residual;
  }
};

RowBackward backward_launch(const RmsNormAddRmsNormBackward& p) {
  RowBackward launch{};
  launch.tensors.add(p.grad_out, p.grad_out_stride);
  launch.tensors.add(p.new_residual, p.new_residual_stride);
  launch.tensors.add(p.x, p.x_stride);
  launch.read_extra(p.grad_new_residual, p.grad_new_residual_stride);
  launch.statistics = p.statistics;
  launch.statistics_size = 2;
  launch.partials = p.workspace;
  launch.partial_kinds = rms_norm_add_rms_norm_weight_gradients(p);
  return launch;
}

BothRmsNorms in_two_passes(const RmsNormAddRmsNormBackward& p, int device) {
  BothRmsNorms norms(p);
  norms.set_partials(gpu::rms_norm_backward_partials(norms.pre, device),
                     gpu::rms_norm_backward_partials(norms.post, device), p.workspace);
  return norms;
}

}  // namespace

namespace gpu {

bool rms_norm_add_rms_norm_backward_in_one_pass(const RmsNormAddRmsNormBackward& p, int device) {
  return rms_norm_add_rms_norm_backward_policy(device_info(device), p).has_value();
}

int64_t rms_norm_add_rms_norm_backward_workspace(const RmsNormAddRmsNormBackward& p, int device) {
  const auto policy = rms_norm_add_rms_norm_backward_policy(device_info(device), p);
  if (!policy.has_value()) return in_two_passes(p, device).partial_floats();
  return policy->blocks_per_group * rms_norm_add_rms_norm_weight_gradients(p) * p.dim;
}

const char* rms_norm_add_rms_norm_backward(const RmsNormAddRmsNormBackward& p, int device,
                                           void* stream) {
  const auto policy = rms_norm_add_rms_norm_backward_policy(device_info(device), p);
  if (!policy.has_value()) {
    const BothRmsNorms norms = in_two_passes(p, device);
    const char* error = rms_norm_backward(norms.pre, device, stream);
    return error != nullptr || !norms.needs_post() ? error
                                                   : rms_norm_backward(norms.post, device, stream);
  }
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    using Op = RmsNormAddRmsNormBackwardOp<typename decltype(tag)::type>;
    return row_backward<Op>(p, backward_launch(p), rms_norm_add_rms_norm_backward_shape(p), *policy,
                            static_cast<gpuStream>(stream));
  }));
}

}  // namespace gpu
}  // namespace fuselage
