// The loss family on the CPU: formulas in loss/cross_entropy.h. Compiled once per instruction set:
// see common/cpu_isa.h.

#include "loss/cross_entropy_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "common/softmax_cpu.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

constexpr int64_t kLossPiece = 4096;  // logits of a row that are in float32 at a time
constexpr float kLossLowest = -3.40282347e+38f;

FUSELAGE_INLINE float loss_nan() { return __builtin_nanf(""); }
FUSELAGE_INLINE float loss_minus_infinity() { return -__builtin_inff(); }

FUSELAGE_INLINE int64_t loss_target(const LossRows& in, int64_t row) {
  return in.int32_targets ? static_cast<const int32_t*>(in.targets)[row]
                          : static_cast<const int64_t*>(in.targets)[row];
}

FUSELAGE_INLINE bool loss_is_counted(const LossRows& in, int64_t row) {
  return loss_target(in, row) != in.ignore_index;
}

// ---- logits ----

// x of columns [begin, begin + size), and -inf up to whole strips.
static void loss_load(const LossRows& in, int64_t row, int64_t begin, int64_t size, float* x) {
  visit_dtype(in.dtype, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(in.logits) + row * in.stride + begin;
    for_each_vector(0, size,
                    [&](int64_t i, auto lanes) { store(x + i, load(from + i, lanes), lanes); });
  });
  if (in.softcap != 0) {
    for (int64_t i = 0; i < size; ++i) x[i] = soft_capped<CpuFloats>(x[i], in.softcap);
  }
  for (int64_t i = size; i % kStrip != 0; ++i) x[i] = loss_minus_infinity();
}

// body(x, begin, size) of the pieces of a row.
template <class Body>
FUSELAGE_INLINE void loss_for_pieces(const LossRows& in, int64_t row, Body body) {
  float x[kLossPiece];
  for (int64_t begin = 0; begin < in.vocab; begin += kLossPiece) {
    const int64_t size = in.vocab - begin < kLossPiece ? in.vocab - begin : kLossPiece;
    loss_load(in, row, begin, size, x);
    body(static_cast<float*>(x), begin, size);
  }
}

FUSELAGE_INLINE int64_t loss_padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

FUSELAGE_INLINE float loss_target_logit(const LossRows& in, int64_t row) {
  float x[kStrip];
  loss_load(in, row, loss_target(in, row), 1, x);
  return x[0];
}

// The maximum of a row, at least the lowest float; `has_nan`: whether there is one.
static float loss_max(const LossRows& in, int64_t row, bool& has_nan) {
  Floats maxima = broadcast(kLossLowest);
  Integers nans = {};
  loss_for_pieces(in, row, [&](const float* x, int64_t, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats value = load(x + i, AllLanes{});
      nans |= (Integers)(value != value);
      maxima = value > maxima ? value : maxima;
    }
  });
  float max = maxima[0];
  has_nan = false;
  for (int k = 0; k < kLanes; ++k) {
    max = maxima[k] > max ? maxima[k] : max;
    has_nan |= nans[k] != 0;
  }
  return max;
}

// ---- logarithms ----

FUSELAGE_INLINE float loss_log_of_sum(double sum) {
  return sum > 0 ? log_of_normal<CpuFloats>(static_cast<float>(sum)) : loss_nan();
}

// ---- cross_entropy ----

static void loss_forward_row(const CrossEntropyForward& p, int64_t row) {
  const RowStatistics none = {0, 0};
  if (!loss_is_counted(p.in, row)) {
    p.losses[row] = 0;
    if (p.statistics != nullptr) p.statistics[row] = none;
    return;
  }
  bool has_nan = false;
  const float max = loss_max(p.in, row, has_nan);
  double sum = 0, total = 0;
  loss_for_pieces(p.in, row, [&](const float* x, int64_t, int64_t size) {
    sum += sum_vectors(loss_padded(size),
                       [&](int64_t i, auto) { return exp_up_to_0(load(x + i, AllLanes{}) - max); });
    if (p.smoothing != 0) {
      total += sum_vectors(size, [&](int64_t i, auto lanes) { return load(x + i, lanes); });
    }
  });
  const float log_sum = loss_log_of_sum(sum);
  float loss = log_sum - (1 - p.smoothing) * (loss_target_logit(p.in, row) - max);
  if (p.smoothing != 0)
    loss -= p.smoothing * static_cast<float>(total / static_cast<double>(p.in.vocab) - max);
  const float log_sum_exp = max + log_sum;
  if (p.square_scale != 0) loss += p.square_scale * log_sum_exp * log_sum_exp;
  p.losses[row] = p.token_weights == nullptr ? loss : p.token_weights[row] * loss;
  if (p.statistics != nullptr) p.statistics[row] = {max, log_sum};
}

FUSELAGE_HIDDEN void cross_entropy_forward(const CrossEntropyForward& p, int64_t begin,
                                           int64_t end) {
  for (int64_t row = begin; row < end; ++row) loss_forward_row(p, row);
}

// ---- log_probs ----

static void loss_weights(const LogProbsForward& p, int64_t row, LogProbsRow& found) {
  const int shift = weight_shift(p.in.vocab);
  const bool has_entropy = p.entropy != nullptr;
  loss_for_pieces(p.in, row, [&](const float* x, int64_t, int64_t size) {
    for (int64_t i = 0; i < size; i += kStrip) {
      double products = 0;
      const StripSum strip = strip_sum(x + i, p.inv_temperature, has_entropy ? &products : nullptr);
      const float distance = distance_of(strip.max, found.max, p.inv_temperature);
      const uint64_t weight = weight_of_strip<CpuFloats>(strip.weights, distance, shift);
      found.weights += weight;
      if (has_entropy && weight != 0)
        found.products += static_cast<double>(weight) * (distance + products / strip.weights);
    }
  });
}

FUSELAGE_HIDDEN void log_probs_forward(const LogProbsForward& p, LogProbsRow* rows, int64_t begin,
                                       int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    LogProbsRow& found = rows[row];
    found = {0, 0, 0, 0};
    if (!loss_is_counted(p.in, row)) continue;
    bool has_nan = false;
    found.max = loss_max(p.in, row, has_nan);
    found.target = loss_target_logit(p.in, row);
    if (!has_nan && found.max - found.max == 0) loss_weights(p, row, found);
  }
}

// ---- the backward ----

// The gradient of z is of_prob * p + of_log * p * log(p) - of_target [is the target] - offset.
struct LossFactors {
  float of_prob, of_log, of_target, offset;
};

static LossFactors loss_factors(const LossBackward& p, int64_t row) {
  const auto at = [row](const float* values, float missing) {
    return values == nullptr ? missing : values[row];
  };
  if (p.grad_loss == nullptr) {
    const float of_log_prob = at(p.grad_log_probs, 0), of_entropy = at(p.grad_entropy, 0);
    float of_prob = at(p.grad_log_sum_exp, 0) - of_log_prob;
    if (p.grad_entropy != nullptr) of_prob -= of_entropy * p.entropy[row];
    return {of_prob, -of_entropy, -of_log_prob, 0};
  }
  float grad = p.grad_loss[p.grad_per_row ? row : 0] * at(p.token_weights, 1);
  if (p.count != nullptr) grad /= *p.count;
  const float log_sum_exp = p.statistics[row].max + p.statistics[row].log_sum;
  float of_prob = grad;
  if (p.square_scale != 0) of_prob += 2 * grad * p.square_scale * log_sum_exp;
  return {of_prob, 0, grad * (1 - p.smoothing),
          grad * p.smoothing / static_cast<float>(p.full_vocab)};
}

// To gradients of T.
template <class T>
static void loss_backward_row(const LossBackward& p, int64_t row) {
  T* target_row = static_cast<T*>(p.grad_logits) + row * p.grad_stride;
  if (!loss_is_counted(p.in, row)) return set_zero(target_row, p.in.vocab);
  const RowStatistics statistics = p.statistics[row];
  const LossFactors f = loss_factors(p, row);
  const int64_t target = loss_target(p.in, row) - p.first_column;
  const float softcap = p.in.softcap;
  // Of the z of a vector of a piece, but for the target's part.
  const auto of_vector = [&](const float* x, int64_t i) {
    const Floats distance = (load(x + i, AllLanes{}) - statistics.max) * p.inv_temperature;
    const Floats log_prob = distance - statistics.log_sum;
    Floats factor = broadcast(f.of_prob);
    if (f.of_log != 0) {
      const Floats lowest = broadcast(-100.0f);  // of probabilities of zero
      factor += f.of_log * (log_prob > lowest ? log_prob : lowest);
    }
    return exp_up_to_0(log_prob) * factor - f.offset;
  };
  loss_for_pieces(p.in, row, [&](const float* x, int64_t begin, int64_t size) {
    T* grads = target_row + begin;
    const auto finish = [&](int64_t i, Floats grad, auto lanes) {
      grad *= p.inv_temperature;
      if (softcap != 0) {
        const Floats tanh = load(x + i, lanes) / softcap;
        grad *= 1 - tanh * tanh;
      }
      store(grads + i, grad, lanes);
    };
    for_each_vector(0, size, [&](int64_t i, auto lanes) { finish(i, of_vector(x, i), lanes); });
    if (target < begin || target >= begin + size) return;
    const int64_t i = (target - begin) / kLanes * kLanes;  // its vector once more
    Floats grad = of_vector(x, i);
    grad[target - begin - i] -= f.of_target;
    for_each_vector(i, size - i < kLanes ? size : i + kLanes,
                    [&](int64_t, auto lanes) { finish(i, grad, lanes); });
  });
}

FUSELAGE_HIDDEN void loss_backward(const LossBackward& p, int64_t begin, int64_t end) {
  visit_dtype(p.grad_dtype, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) loss_backward_row<decltype(type)>(p, row);
  });
}

FUSELAGE_HIDDEN void multiply(const Multiply& p, int64_t begin, int64_t end) {
  const float factor = *p.factor;
  if (factor == 1) return;
  visit_dtype(p.dtype, [&](auto type) {
    auto* x = static_cast<decltype(type)*>(p.x);
    for_each_vector(begin, end, [&](int64_t i, auto lanes) {
      store(x + i, load(x + i, lanes) * factor, lanes);
    });
  });
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(cross_entropy_forward, (const CrossEntropyForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(log_probs_forward,
                  (const LogProbsForward& p, LogProbsRow* rows, int64_t begin, int64_t end),
                  (p, rows, begin, end))
FUSELAGE_PICK_ISA(loss_backward, (const LossBackward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(multiply, (const Multiply& p, int64_t begin, int64_t end), (p, begin, end))

#if FUSELAGE_ISA_IS_BASELINE

void cross_entropy_finish(const CrossEntropyForward& p) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t row = 0; row < p.in.rows; ++row) {
    sum += p.losses[row];
    count += baseline::loss_is_counted(p.in, row);
  }
  const bool is_mean = p.reduction == Reduction::mean;
  *p.loss = static_cast<float>(is_mean ? sum / static_cast<double>(count) : sum);
  if (p.count != nullptr) *p.count = static_cast<float>(count);
}

// NOTE: for all instruction sets alike, as the draw's log-probabilities are.
void log_probs_finish(const LogProbsForward& p, const LogProbsRow* rows) {
  using baseline::CpuFloats;
  const int shift = baseline::weight_shift(p.in.vocab);
  for (int64_t row = 0; row < p.in.rows; ++row) {
    const bool is_counted = baseline::loss_is_counted(p.in, row);
    const LogProbsRow& found = rows[row];
    const bool is_valid = found.weights != 0;
    float log_sum = 0, log_prob = 0, log_sum_exp = 0, entropy = 0;
    if (is_counted) {
      const float nan = baseline::loss_nan();
      log_sum = is_valid ? baseline::log_of_weights<CpuFloats>(found.weights, shift) : nan;
      const float distance = baseline::distance_of(found.target, found.max, p.inv_temperature);
      log_prob = distance - log_sum;
      log_sum_exp =
          is_valid ? baseline::tempered<CpuFloats>(found.max, p.inv_temperature, log_sum) : nan;
      const double mean = found.products / static_cast<double>(found.weights);
      entropy = is_valid ? static_cast<float>(log_sum - mean) : nan;
    }
    p.log_probs[row] = log_prob;
    p.log_sum_exp[row] = log_sum_exp;
    p.is_greatest[row] = is_counted && is_valid && found.target == found.max;
    if (p.entropy != nullptr) p.entropy[row] = entropy;
    if (p.statistics != nullptr)
      p.statistics[row] = is_counted ? RowStatistics{found.max, log_sum} : RowStatistics{0, 0};
  }
}

#endif

}  // namespace fuselage::cpu
