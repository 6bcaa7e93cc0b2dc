// What kernels of cross_entropy do with the logits of a row that a thread has: their sums, the loss
// that follows from all of them, and their gradients. Formulas in loss/cross_entropy.h.
#pragma once

#include "loss/loss_device.h"

namespace fuselage {
namespace {

// ---- sums ----

// Of some of a row's logits: the maximum, the sum of e^(x - max), and that of x.
struct RunningSums {
  float max, sum, total;

  // NOTE: the lowest float, as -inf has no distance from itself. Rows without a sum have no finite
  // logit.
  static __device__ __forceinline__ RunningSums none() { return {kLowestFloat, 0.0f, 0.0f}; }

  // NOTE: rounded, whatever is added to it: the compiler would make FMAs of it in some kernels.
  __device__ __forceinline__ void raise(float most) {
    const float factor = exp2_approximate((max - most) * kLog2E);
#if defined(USE_ROCM)
    sum *= factor;
#else
    sum = __fmul_rn(sum, factor);
#endif
    max = most;
  }

  // Adds logits of a warp, a vector apart. The row has `left` columns from the first of them on.
  template <int kVectors, int N>
  __device__ __forceinline__ void add(const CrossEntropyForward& p, float (&values)[kVectors][N],
                                      int left) {
    float most = max;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      finish_logits(values[j], left - j * kWarpSize * N, p.in.softcap, minus_infinity());
#pragma unroll
      for (int k = 0; k < N; ++k) most = fmaxf(most, values[j][k]);
    }
    if (most > max) raise(most);
    float parts[4] = {};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int k = 0; k < N; ++k) parts[k % 4] += exp2_approximate((values[j][k] - most) * kLog2E);
    }
    sum += (parts[0] + parts[1]) + (parts[2] + parts[3]);
    if (p.smoothing == 0.0f) return;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int k = 0; k < N; ++k) total += k < left - j * kWarpSize * N ? values[j][k] : 0.0f;
    }
  }
};

// Over `width` neighbouring lanes, in every one of them.
__device__ __forceinline__ RunningSums warp_join(RunningSums sums, int width) {
  sums.raise(warp_max(sums.max, width));
  sums.sum = warp_sum(sums.sum, width);
  sums.total = warp_sum(sums.total, width);
  return sums;
}

// ---- the loss ----

// `target`: its x.
__device__ __forceinline__ void write_loss(const CrossEntropyForward& p, int64_t row,
                                           const RunningSums& sums, float target) {
  const float log_sum = log_of_sum(sums.sum), distance = target - sums.max;
  float loss = log_sum - (1.0f - p.smoothing) * distance;
  if (p.smoothing != 0.0f)
    loss -= p.smoothing * (sums.total / static_cast<float>(p.in.vocab) - sums.max);
  const float log_sum_exp = sums.max + log_sum;
  if (p.square_scale != 0.0f) loss += p.square_scale * log_sum_exp * log_sum_exp;
  p.losses[row] = p.token_weights == nullptr ? loss : p.token_weights[row] * loss;
  if (p.statistics != nullptr) p.statistics[row] = {sums.max, log_sum};
}

__device__ __forceinline__ void write_nothing(const CrossEntropyForward& p, int64_t row) {
  p.losses[row] = 0.0f;
  if (p.statistics != nullptr) p.statistics[row] = {0.0f, 0.0f};
}

// ---- gradients ----

// The gradient of z is of_prob * p + of_log2 * p * log2(p) - of_target [is the target] - offset.
struct GradientFactors {
  float of_prob, of_log2, of_target, offset;
  int target;
};

__device__ __forceinline__ float value_at(const float* values, int64_t row, float missing) {
  return values == nullptr ? missing : values[row];
}

// All that does not depend on statistics.
__device__ __forceinline__ GradientFactors factors_of(const LossBackward& p, int64_t row) {
  const int64_t target = target_of(p.in, row);
  GradientFactors f{0.0f, 0.0f, 0.0f, 0.0f, -1};
  if (target >= 0 && target < p.full_vocab) {
    f.target = static_cast<int>(target - p.first_column);
  } else {
    f.offset = not_a_number();
  }
  if (p.grad_loss != nullptr) {
    float grad = p.grad_loss[p.grad_per_row ? row : 0] * value_at(p.token_weights, row, 1.0f);
    if (p.count != nullptr) grad /= *p.count;
    f.of_prob = grad;
    f.of_target = grad * (1.0f - p.smoothing);
    f.offset += grad * p.smoothing / static_cast<float>(p.full_vocab);
  } else {
    const float of_log_prob = value_at(p.grad_log_probs, row, 0.0f);
    const float of_entropy = value_at(p.grad_entropy, row, 0.0f);
    f.of_prob = value_at(p.grad_log_sum_exp, row, 0.0f) - of_log_prob;
    if (p.grad_entropy != nullptr) f.of_prob -= of_entropy * p.entropy[row];
    f.of_log2 = -0.693147180559945f * of_entropy;
    f.of_target = -of_log_prob;
  }
  return f;
}

// What the gradients of a row have in common.
struct GradientRow {
  RowStatistics statistics;
  GradientFactors f;
  float scale, shift;  // of logarithms of probabilities, to the base 2
  float inv_temperature, softcap, inv_softcap;

  // NOTE: of a row that is not read, logits and factors are zero, and so are gradients.
  __device__ __forceinline__ explicit GradientRow(const LossBackward& p)
      : statistics{},
        f{},
        scale(p.inv_temperature * kLog2E),
        shift(0.0f),
        inv_temperature(p.inv_temperature),
        softcap(p.in.softcap),
        inv_softcap(p.in.softcap == 0.0f ? 0.0f : 1.0f / p.in.softcap) {}

  // In two steps, so that what is read need not wait for the statistics.
  __device__ __forceinline__ void read(const LossBackward& p, int64_t row) {
    f = factors_of(p, row);
  }
  __device__ __forceinline__ void finish(const LossBackward& p, const RowStatistics& of_row) {
    statistics = of_row;
    shift = of_row.log_sum * kLog2E;
    if (p.grad_loss == nullptr || p.square_scale == 0.0f) return;
    const float log_sum_exp = of_row.max + of_row.log_sum;
    f.of_prob += 2.0f * f.of_prob * p.square_scale * log_sum_exp;
  }

  // The gradients of N logits, of which the first is that of `column`, from their x.
  template <int N>
  __device__ __forceinline__ void differentiate(const float (&x)[N], int column,
                                                float (&grads)[N]) const {
    float log2_probs[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      log2_probs[k] = (x[k] - statistics.max) * scale - shift;
      grads[k] = f.of_prob;
    }
    if (f.of_log2 != 0.0f) {
      // NOTE: the bound is for probabilities of zero, whose logarithms are not finite.
#pragma unroll
      for (int k = 0; k < N; ++k) grads[k] += f.of_log2 * fmaxf(log2_probs[k], -200.0f);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) grads[k] = exp2_approximate(log2_probs[k]) * grads[k] - f.offset;
    // NOTE: one branch. With one for each element, exponentials wait for each other.
    const unsigned target = static_cast<unsigned>(f.target - column);
    if (target < N) {
#pragma unroll
      for (unsigned k = 0; k < N; ++k) grads[k] -= k == target ? f.of_target : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) grads[k] *= inv_temperature;
    if (softcap == 0.0f) return;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float tanh = x[k] * inv_softcap;
      grads[k] *= 1.0f - tanh * tanh;
    }
  }
};

}  // namespace
}  // namespace fuselage
